"""The contract of every mixer: whole, split and single steps agree; padding and other sequences change nothing."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_same_numbers
from mixer_cases import (
    CASES,
    CAUSAL_FORMS,
    D_MODEL,
    FORMS,
    GRID,
    MASKS,
    RECURRENT_CASES,
    RECURRENT_FORMS,
    Case,
    assert_near,
    assert_states_near,
    balance,
    enliven,
    grid_layer,
    grid_name,
    mask_rows,
    pairwise,
    random_cuts,
)
from seqboat.core.mixer import DIRECTIONS, Mixer, directions_of
from seqboat.core.state import copy_state, select_rows, tensors
from seqboat.mixers import MIXERS
from seqboat.models.backbone import Backbone, BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.ssm.diagonal import EMAConfig
from small_runs import same_tensors

TIME = len(MASKS["full"])
EXACT, SINGLE = 1e-10, 1e-5
"""Tolerances in float64 and in float32."""
LENGTHS = (0, 1, 2, 7, 8, 9, 13, 67)
"""Around the block of 8, prime, beyond the 12 positions of the bias table, and several blocks."""

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_form = pytest.mark.parametrize("case", FORMS, ids=str)
every_causal_form = pytest.mark.parametrize("case", CAUSAL_FORMS, ids=str)
every_recurrent_case = pytest.mark.parametrize("case", RECURRENT_CASES, ids=str)
every_recurrent_form = pytest.mark.parametrize("case", RECURRENT_FORMS, ids=str)


def sequence(batch: int, time: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, time, D_MODEL, generator=generator, dtype=torch.float64).to(dtype)


def make_recurrent(case: Case, dtype: torch.dtype = torch.float64) -> Mixer:
    mixer = case.make(dtype)
    assert mixer.decodes
    return mixer


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_have_the_directions_that_they_declare(name: str) -> None:
    declared = directions_of(MIXERS[name])
    assert declared
    for direction in DIRECTIONS:
        causal = direction == "causal"
        if direction in declared:
            assert MIXERS[name](causal=causal).causal == causal
        else:
            with pytest.raises(ValueError, match=f"has no {direction} form, it is {declared[0]}: "):
                MIXERS[name](causal=causal)


@pytest.mark.parametrize("name", [name for name in MIXERS if "causal" in directions_of(MIXERS[name])])
def test_layers_say_whether_their_state_grows(name: str) -> None:
    layer = MIXERS[name](causal=True).build(D_MODEL)
    assert layer.decodes
    with torch.no_grad():
        sizes = [
            sum(p.numel() for _, p in tensors(layer(torch.randn(1, n, D_MODEL)).state)) for n in (3, 600)
        ]
    assert layer.grows == (sizes[0] < sizes[1])


def test_an_empty_part_of_a_state_does_not_grow() -> None:
    """One tap of a kernel or a convolution remembers nothing."""
    boat: Any = MIXERS["seqboat"]
    assert not boat(ssm=EMAConfig(truncation=1), causal=True).build(D_MODEL).grows
    for name in ("mamba2", "gated-deltanet"):
        one: Any = MIXERS[name]
        assert not one(conv=1).build(D_MODEL).grows


def test_hybrids_grow_with_their_attention() -> None:
    mixer: Any = MIXERS["h3-hybrid"]
    stack = Backbone(BackboneConfig(mixer=mixer(causal=True), d_model=D_MODEL, num_layers=2, vocab=5))
    assert stack.grows and not stack.layers[0].grows


@every_form
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_shapes_and_gradients_at_every_length(case: Case, batch: int) -> None:
    mixer = case.make().train()
    for time in LENGTHS:
        mixer.zero_grad()
        x = sequence(batch, time).requires_grad_()
        out = mixer(x)
        assert out.y.shape == x.shape and out.y.dtype == x.dtype
        assert out.y.isfinite().all()
        assert (out.state is not None) == mixer.decodes
        if out.routing is not None:
            assert out.routing.active.shape[:2] == (batch, time)
            assert out.routing.probs.shape == out.routing.active.shape
        out.y.square().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
        for name, parameter in mixer.named_parameters():
            assert parameter.grad is not None, f"{name} got no gradient at batch {batch}, length {time}"
            assert parameter.grad.isfinite().all(), f"{name} at batch {batch}, length {time}"


@every_form
def test_every_parameter_matters(case: Case) -> None:
    mixer = case.make()
    mixer(sequence(3, 30)).y.square().sum().backward()
    # a shift of the bias of "skip" and of "activate" by as much changes no decision
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@every_form
@pytest.mark.parametrize("filling", ["random", "nan", "inf"])
def test_padding_and_batch_mates_change_nothing(case: Case, filling: str) -> None:
    mixer = case.make()
    mask = mask_rows()
    x = sequence(len(mask), TIME)
    other = torch.randn_like(x) * 1e3 if filling == "random" else torch.full_like(x, float(filling))
    x = torch.where(mask[..., None], x, other).requires_grad_()
    out = mixer(x, mask)
    assert not out.y[~mask].any()
    if out.routing is not None:
        assert not out.routing.active[~mask].any() and not out.routing.probs[~mask].any()
    weight = torch.randn_like(out.y)
    (out.y * weight).sum().backward()
    assert x.grad is not None and not x.grad[~mask].any()
    for row, real in enumerate(mask):
        alone = x.detach()[row : row + 1, real].requires_grad_()
        single = mixer(alone)
        assert_near(out.y[row, real], single.y[0], EXACT)
        (single.y * weight[row, real]).sum().backward()
        assert alone.grad is not None
        assert_near(x.grad[row, real], alone.grad[0], EXACT)
        if out.routing is not None:
            assert out.routing.active[row, real].equal(single.routing.active[0])
        if out.state is not None:
            own = select_rows(out.state, torch.tensor([row]))
            assert_states_near(own, single.state, EXACT)


@every_case
def test_padding_changes_nothing_in_single_precision(case: Case) -> None:
    mixer = case.make(torch.float32)
    mask = mask_rows()
    x = sequence(len(mask), TIME, torch.float32)
    y = mixer(x, mask).y
    for row, real in enumerate(mask):
        assert_same_numbers(y[row, real], mixer(x[row : row + 1, real]).y[0])


@every_case
def test_a_poisoned_row_stays_alone(case: Case) -> None:
    """Whatever one sequence holds, in all channels or in one: products of finite numbers may overflow, too."""
    mixer = case.make()
    x = sequence(3, TIME)
    clean = x.clone().requires_grad_()
    expected = mixer(clean).y
    expected[0::2].sum().backward()
    assert clean.grad is not None
    poisons = (float("nan"), float("inf"), -float("inf"), 1e30, 1e160, 1e300)
    for poison, channels in itertools.product(poisons, (slice(None), slice(0, 1))):
        poisoned = x.clone()
        poisoned[1, 5:9, channels] = poison
        poisoned.requires_grad_()
        y = mixer(poisoned).y
        assert_near(y[0::2], expected[0::2], 1e-12)
        y[0::2].sum().backward()
        assert poisoned.grad is not None
        assert_near(poisoned.grad[0::2], clean.grad[0::2], 1e-12)


@every_causal_form
def test_the_future_is_not_seen(case: Case) -> None:
    mixer = case.make()
    x = sequence(2, TIME)
    y = mixer(x).y
    for t in (0, 1, 7, 8, TIME - 1):
        changed = x.clone()
        changed[:, t:] += 3 * torch.randn_like(changed[:, t:])
        other = mixer(changed).y
        assert_near(other[:, :t], y[:, :t], 1e-12)
        assert not torch.allclose(other[:, t], y[:, t])


def read_split(model: Any, x: Tensor, mask: Tensor | None, cuts: list[int]) -> tuple[Tensor, Any]:
    """A sequence in pieces, the state handed on."""
    outputs, state = [], None
    for begin, end in itertools.pairwise(cuts):
        out = model(x[:, begin:end], None if mask is None else mask[:, begin:end], state)
        outputs.append(out[0])
        state = out.state
    return torch.cat(outputs, dim=1), state


def read_steps(model: Any, x: Tensor) -> tuple[Tensor, Any]:
    """A sequence token by token."""
    outputs, state = [], model.init_state(x.shape[0])
    for t in range(x.shape[1]):
        out = model.step(x[:, t], state)
        assert out.state is state
        outputs.append(out[0].clone())
    return torch.stack(outputs, dim=1), state


def check_three_modes(model: Any, x: Tensor, mask: Tensor | None, tolerance: float, splits: int = 20) -> None:
    """Whole, in random splits and step by step: the same outputs and final states."""
    whole = model(x, mask)
    chance = random.Random(0)
    for _ in range(splits):
        y, state = read_split(model, x, mask, random_cuts(x.shape[1], chance))
        assert_near(y, whole[0], tolerance)
        assert_states_near(state, whole.state, tolerance)
    if mask is None:
        y, state = read_steps(model, x)
        assert_near(y, whole[0], tolerance)
        assert_states_near(state, whole.state, tolerance)


@every_recurrent_form
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@torch.no_grad()
def test_whole_split_and_steps_agree(case: Case, masked: bool, dtype: torch.dtype) -> None:
    mixer = make_recurrent(case, dtype)
    mask = mask_rows() if masked else None
    x = sequence(6 if masked else 2, TIME, dtype)
    check_three_modes(mixer, x, mask, EXACT if dtype == torch.float64 else SINGLE)


@every_recurrent_case
@torch.no_grad()
def test_long_pieces_agree(case: Case) -> None:
    """Pieces of many blocks, and a memory that turns over many times."""
    mixer = make_recurrent(case)
    x = sequence(2, 1153)
    whole = mixer(x)
    y, state = read_split(mixer, x, None, [0, 540, 541, 549, 1153])
    assert_near(y, whole.y, EXACT)
    assert_states_near(state, whole.state, EXACT)


@every_recurrent_case
@torch.no_grad()
def test_a_call_leaves_the_given_state_and_a_step_overwrites_it(case: Case) -> None:
    mixer = make_recurrent(case)
    state = mixer(sequence(2, 9)).state
    before = copy_state(state)
    later = sequence(2, 3, seed=2)
    expected = mixer(later, None, state)
    assert_states_near(state, before, 0)
    for t in range(3):
        out = mixer.step(later[:, t], state)
        assert out.state is state
        assert_near(out.y, expected.y[:, t], EXACT)
    assert_states_near(state, expected.state, EXACT)


@pytest.mark.parametrize("choice", pairwise(GRID), ids=grid_name)
@torch.no_grad()
def test_three_modes_over_options(choice: tuple[Any, ...]) -> None:
    check_layer_and_model(choice, splits=6)


@pytest.mark.slow
@pytest.mark.parametrize("choice", list(itertools.product(*GRID)), ids=grid_name)
@torch.no_grad()
def test_three_modes_over_all_options(choice: tuple[Any, ...]) -> None:
    check_layer_and_model(choice, splits=20)


def check_layer_and_model(choice: tuple[Any, ...], splits: int) -> None:
    layer_config = grid_layer(choice)
    torch.manual_seed(0)
    layer = enliven(layer_config.build(D_MODEL))
    balance(layer, sequence(4, 64))
    mask = mask_rows()
    check_three_modes(layer, sequence(6, TIME), mask, EXACT, splits)
    check_three_modes(layer, sequence(6, TIME), None, EXACT, 1)
    config = BackboneConfig(mixer=layer_config, d_model=D_MODEL, num_layers=2, vocab=11)
    model = enliven(LanguageModel(config))
    balance(model, torch.randint(0, 11, (4, 64)))
    check_three_modes(model, torch.randint(0, 11, (6, TIME)), mask, EXACT, splits)
    check_three_modes(model, torch.randint(0, 11, (6, TIME)), None, EXACT, 1)


@every_case
def test_layout_of_the_input_is_free(case: Case) -> None:
    mixer = case.make()
    x = sequence(3, TIME)
    y = mixer(x).y
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    strided = torch.stack([x, torch.full_like(x, torch.nan)], dim=2)[:, :, 0]
    assert not turned.is_contiguous() and not strided.is_contiguous()
    for other in (turned, strided, x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert_near(mixer(other).y, y, 1e-12)
    expanded = x[:1].expand(3, -1, -1)
    assert_near(mixer(expanded).y, mixer(expanded.contiguous()).y, 1e-12)
    mask = torch.tensor([[True] * 20 + [False] * 2]).expand(3, -1)
    assert_near(mixer(expanded, mask).y, mixer(x[:1], mask[:1]).y.expand(3, -1, -1), EXACT)
    # an expanded input sums its gradient
    shared, alone = x[:1].clone().requires_grad_(), x[:1].clone().requires_grad_()
    mixer(shared.expand(3, -1, -1)).y.square().sum().backward()
    (3 * mixer(alone).y.square().sum()).backward()
    assert shared.grad is not None and alone.grad is not None
    assert_near(shared.grad, alone.grad, EXACT)


@every_form
def test_without_gradients(case: Case) -> None:
    mixer = case.make()
    x, mask = sequence(6, TIME), mask_rows()
    y = mixer(x, mask).y.detach()
    with torch.no_grad():
        quiet = mixer(x, mask).y
        assert not quiet.requires_grad
        assert_near(
            quiet, y, 1e-12
        )  # not always the same bits: without gradients torch may take another kernel
    with torch.inference_mode():
        assert_near(mixer(x, mask).y, y, 1e-12)
    mixer.requires_grad_(False)
    frozen = x.clone().requires_grad_()
    mixer(frozen, mask).y.square().sum().backward()
    assert frozen.grad is not None and frozen.grad[mask].any()


@every_recurrent_case
def test_steps_in_inference_mode(case: Case) -> None:
    mixer = make_recurrent(case)
    x = sequence(2, 7)
    with torch.inference_mode():
        assert_near(read_steps(mixer, x)[0], mixer(x).y, EXACT)


@every_case
def test_copies_and_saved_weights(case: Case) -> None:
    mixer = case.make()
    x = sequence(3, TIME)
    y = mixer(x).y.detach()
    assert_same_numbers(copy.deepcopy(mixer)(x).y, y)
    assert_same_numbers(pickle.loads(pickle.dumps(mixer))(x).y, y)
    torch.manual_seed(99)
    other = case.build().to(torch.float64).eval()
    assert not other(x).y.equal(y)
    other.load_state_dict(mixer.state_dict(), strict=True)
    assert same_tensors(dict(other.state_dict()), dict(mixer.state_dict()))
    assert_same_numbers(other(x).y, y)


@every_form
def test_float64_agrees_with_float32(case: Case) -> None:
    mixer = case.make(torch.float32)
    x = sequence(3, TIME, torch.float32)
    y = mixer(x).y
    assert y.dtype == torch.float32
    wide = mixer.double()(x.double()).y
    assert wide.dtype == torch.float64
    assert_near(y.double(), wide, SINGLE)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@every_case
def test_autocast_to_bfloat16(case: Case) -> None:
    x = sequence(3, TIME, torch.float32).requires_grad_()
    plain = case.make(torch.float32).train()
    torch.manual_seed(2)
    expected = plain(x).y
    expected.square().sum().backward()
    mixer = case.make(torch.float32).train()
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16):
        out = mixer(x)
    assert out.y.dtype == torch.float32
    assert relative_error(out.y.detach(), expected.detach()) < 2e-2
    if out.routing is not None:
        assert out.routing.probs.dtype == torch.float32
    for name, part in tensors(out.state):
        assert part.dtype in (torch.float32, torch.int64), name
    out.y.square().sum().backward()
    whole = float(torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm())
    for (name, parameter), other in zip(mixer.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        # gradients of biases are sums of many numbers of both signs, each with an error of about 2^-8; one that is
        # smaller than the others by four orders (squares behind a norm hardly change) is made of such errors alone
        error = float((parameter.grad - other.grad).norm())
        assert error < 0.1 * float(other.grad.norm()) + 1e-5 * whole, name


@every_recurrent_case
@torch.no_grad()
def test_three_modes_in_autocast(case: Case) -> None:
    mixer = make_recurrent(case, torch.float32)
    x = sequence(2, TIME, torch.float32)
    expected = mixer(x).y
    with torch.autocast("cpu", torch.bfloat16):
        pieces, _ = read_split(mixer, x, None, [0, 5, 13, TIME])
        steps, _ = read_steps(mixer, x)
        state = mixer(x[:, :9]).state
        after = mixer.step(x[:, 9], state).y
    for y in (pieces, steps):
        assert relative_error(y, expected) < 2e-2
    assert relative_error(after, expected[:, 9]) < 2e-2


@every_case
def test_modules_in_bfloat16(case: Case) -> None:
    mixer = case.make(torch.float32)
    x = sequence(3, TIME, torch.float32)
    y = mixer.to(torch.bfloat16)(x.bfloat16()).y
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    # parameters themselves are rounded; only large inputs or states in bfloat16 would break this bound
    large = mixer((1e3 * x).bfloat16()).y
    assert large.isfinite().all()


def test_every_mixer_says_what_distinguishes_it() -> None:
    """The first line of a configuration is what `seqboat paper list mixers` prints."""
    lines = [(config.__doc__ or "").splitlines()[0] for config in MIXERS.values()]
    assert len(set(lines)) == len(lines)
    assert not [line for line in lines if line.startswith("A layer of") or len(line) < 30]
