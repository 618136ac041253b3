"""The fast layer against the loops of `seqboat.reference`, in float64: values, states and all gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracles  # noqa: F401 - kernels for the reference
from mixer_cases import shrink
from seqboat import reference
from seqboat.layers.gau import GAU, ROTATES, GAUConfig, PositionsName
from seqboat.layers.routers import (
    AlwaysActiveConfig,
    GumbelConfig,
    RouterConfig,
    SigmoidConfig,
    TemperedSoftmax,
    TemperedSoftmaxConfig,
    XMoEConfig,
)
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig, SeqBoatState
from seqboat.layers.sma import compress, extract
from seqboat.ssm import SSMS
from seqboat.ssm.diagonal import EMA, EMAConfig, S4DConfig

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """A layer and a batch to run it on."""

    config: SeqBoatConfig
    d_model: int
    lengths: tuple[int, ...]
    """real tokens per row, padded to the longest"""
    padding: str = "none"
    """where padding stands: none, left, right, interior"""
    splits: tuple[int, ...] = ()
    """columns at which the batch is cut into calls with a carried state; causal layers only"""
    seed: int = 0


def make_layer(case: Case) -> SeqBoat:
    """A layer in evaluation mode whose parameters are far from their initial values."""
    generator = torch.Generator().manual_seed(case.seed)
    torch.manual_seed(case.seed)
    layer = case.config.build(case.d_model).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
        for name, buffer in layer.named_buffers():
            noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
            buffer.copy_(300000 * noise if name.endswith("training_step") else 0.2 + noise)
    return layer


def make_batch(case: Case) -> tuple[Tensor, Tensor | None]:
    """Random tokens, also on padding, and the mask."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    longest = max(case.lengths)
    time = longest if case.padding == "none" else longest + 3
    x = torch.randn(len(case.lengths), time, case.d_model, generator=generator, dtype=torch.float64)
    if case.padding == "none":
        assert len(set(case.lengths)) == 1
        return x, None
    mask = torch.zeros(len(case.lengths), time, dtype=torch.bool)
    for row, length in enumerate(case.lengths):
        if case.padding == "left":
            mask[row, time - length :] = True
        elif case.padding == "right":
            mask[row, :length] = True
        else:
            mask[row, torch.randperm(time, generator=generator)[:length]] = True
    return x, mask


def real(rows: Tensor, row: int, mask: Tensor | None) -> Tensor:
    return rows[row] if mask is None else rows[row][mask[row]]


def remembered(memory: Any, row: int, config: GAUConfig) -> list[tuple[int, Tensor, Tensor]]:
    """What the memory of one row holds, oldest first: position, key, value."""
    total = int(memory.total[row])
    size = config.window + (config.span == "memory")
    first = 0 if config.span == "full" else max(0, total - config.window)
    places = [slot if config.span == "full" else slot % size for slot in range(first, total)]
    return [(int(memory.positions[row, p]), memory.keys[row, p], memory.values[row, p]) for p in places]


Row = tuple[dict[str, Tensor], dict[str, list[Any]]]
"""What is compared of a row: numbers, and things that have to be equal."""


def fast_rows(layer: SeqBoat, x: Tensor, mask: Tensor | None, splits: tuple[int, ...]) -> list[Row]:
    """Every row of the layer's results."""
    borders = [0, *splits, x.shape[1]]
    state, outputs = None, []
    for begin, end in itertools.pairwise(borders):
        part = None if mask is None else mask[:, begin:end]
        outputs.append(layer(x[:, begin:end], part, state))
        state = outputs[-1].state
    y = torch.cat([output.y for output in outputs], dim=1)
    probs = torch.cat([output.routing.probs for output in outputs], dim=1)[..., 0]
    active = torch.cat([output.routing.active for output in outputs], dim=1)[..., 0]
    if mask is not None:
        assert not y[~mask].any() and not probs[~mask].any() and not active[~mask].any()
    rows: list[Row] = []
    for row in range(len(x)):
        numbers = {"y": real(y, row, mask), "probs": real(probs, row, mask)}
        facts: dict[str, list[Any]] = {"active": real(active, row, mask).tolist()}
        if layer.causal:
            assert isinstance(state, SeqBoatState)
            numbers |= {f"ssm {i}": part[row] for i, part in enumerate(state.ssm)}
            memory = state.sma.modules[0]
            held = remembered(memory, row, layer.config.gau)
            gau = layer.sma.units["gau"]
            assert isinstance(gau, GAU)
            numbers |= {f"key {i}": key[: gau.d_z] for i, (_, key, _) in enumerate(held)}
            if held and held[0][1].shape[0] > gau.d_z:
                numbers["weights"] = torch.stack([key[-1] for _, key, _ in held])
            numbers |= {f"value {i}": value for i, (_, _, value) in enumerate(held)}
            facts["positions"] = [position for position, _, _ in held]
            facts["counts"] = [int(memory.total[row]), int(state.sma.seen[row])]
        rows.append((numbers, facts))
    return rows


def everything(layer: SeqBoat) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def as_pairs(state: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors of a kernel's state, complex ones as pairs of real numbers."""
    parts = state if isinstance(state, tuple) else (state,)
    return [torch.view_as_real(part).flatten(-2) if part.is_complex() else part for part in parts]


def reference_rows(layer: SeqBoat, x: Tensor, mask: Tensor | None, by_step: bool = False) -> list[Row]:
    """The same from the loops, each row as one sequence without its padding, at once or token by token."""
    params = everything(layer)
    rows: list[Row] = []
    for row in range(len(x)):
        sequence = real(x, row, mask)
        if by_step:
            state, steps = None, []
            for token in sequence:
                steps.append(reference.decode_step(token, params, layer.config, state))
                state = steps[-1].state
            y = torch.stack([step.y for step in steps])
            probs = torch.cat([step.decisions.probs for step in steps])
            active = [flag for step in steps for flag in step.decisions.active]
        else:
            y, state, (active, probs) = reference.layer(sequence, params, layer.config)
        numbers = {"y": y, "probs": probs}
        facts: dict[str, list[Any]] = {"active": active}
        if layer.causal:
            assert state is not None
            numbers |= {f"ssm {i}": part for i, part in enumerate(as_pairs(state.ssm))}
            numbers |= {f"key {i}": entry.key for i, entry in enumerate(state.memory)}
            weights = [entry.weight for entry in state.memory if entry.weight is not None]
            if weights and layer.config.gau.attention == "softmax":
                numbers["weights"] = torch.log(torch.stack(weights))
                weights = []
            for i, entry in enumerate(state.memory):
                numbers[f"value {i}"] = entry.value * weights[i] if weights else entry.value
            facts["positions"] = [entry.position for entry in state.memory]
            total = state.memory[-1].slot + 1 if state.memory else 0
            facts["counts"] = [total, state.seen]
        else:
            assert state is None
        rows.append((numbers, facts))
    return rows


def assert_near(name: str, got: Tensor, want: Tensor) -> None:
    """Equal within the tolerance, relative to the largest value where that is above one."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{name} is not finite"
    if want.numel():
        difference = (got - want).abs().max() / want.abs().max().clamp(min=1)
        assert difference <= TOLERANCE, f"{name}: off by {difference:.2e}"


def gradients(rows: list[Row], inputs: list[Tensor], seed: int) -> tuple[Tensor, ...]:
    """Gradients of a random combination of all numbers, states included."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for numbers, _ in rows:
        for _, value in sorted(numbers.items()):
            weight = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            total = total + (weight * value).sum()
    if not total.requires_grad:
        return tuple(torch.zeros_like(part) for part in inputs)
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


def compare(case: Case, by_step: bool = False) -> list[list[bool]]:
    """Hold the layer to the reference; the decisions are returned for whatever needs them."""
    layer = make_layer(case)
    x, mask = make_batch(case)
    return compare_layer(layer, x, mask, case.splits, case.seed, by_step)


def compare_layer(
    layer: SeqBoat,
    x: Tensor,
    mask: Tensor | None,
    splits: tuple[int, ...] = (),
    seed: int = 0,
    by_step: bool = False,
) -> list[list[bool]]:
    x = x.clone().requires_grad_()
    got = fast_rows(layer, x, mask, splits)
    want = reference_rows(layer, x, mask, by_step)
    for row, ((numbers, facts), (expected, expected_facts)) in enumerate(zip(got, want, strict=True)):
        assert facts == expected_facts, f"row {row}"
        assert numbers.keys() == expected.keys()
        for name in sorted(numbers):
            value = numbers[name]
            assert_near(f"{name} of row {row}", value, expected[name])
    names = ["x", *(name for name, _ in layer.named_parameters())]
    inputs = [x, *layer.parameters()]
    got_grads, want_grads = gradients(got, inputs, seed), gradients(want, inputs, seed)
    for name, grad, expected_grad in zip(names, got_grads, want_grads, strict=True):
        assert_near(f"gradient of {name}", grad, expected_grad)
    if mask is not None:
        assert not got_grads[0][~mask].any(), "a gradient reached padding"
    return [facts["active"] for _, facts in got]


ROUTER_CONFIGS: list[RouterConfig] = [
    TemperedSoftmaxConfig(temperature_scale=0.4),
    SigmoidConfig(),
    SigmoidConfig(temperature_scale=0.4),
    GumbelConfig(),
    XMoEConfig(d_route=3),
    AlwaysActiveConfig(),
]


@st.composite
def cases(draw: st.DrawFn, *, causal: bool, complex_states: bool) -> Case:
    """Any layer and any batch, small."""
    truncation = draw(st.none() | st.none() | st.integers(1, 12))
    block = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 64]))
    ssm: EMAConfig | S4DConfig
    if complex_states:
        ssm = S4DConfig(
            d_state=2 * draw(st.integers(1, 2)),
            init=draw(st.sampled_from(["legs", "lin", "inv", "inv-lin"])),
            rule=draw(st.sampled_from(["zoh", "zoh", "bilinear"])),
            truncation=truncation,
            block=block,
        )
    else:
        ssm = EMAConfig(
            d_state=draw(st.integers(1, 5)),
            truncation=truncation,
            block=block,
        )
    positions = draw(st.sampled_from(get_args(PositionsName)))
    gau = GAUConfig(
        d_z=2 * draw(st.integers(1, 2)) if positions in ROTATES else draw(st.integers(1, 4)),
        d_v=draw(st.none() | st.integers(1, 5)),
        attention=draw(st.sampled_from(["softmax", "relu2", "laplace"])),
        span=draw(st.sampled_from(["memory", "memory", "full", "chunk"])),
        window=draw(st.one_of(st.integers(1, 6), st.integers(1, 50))),
        positions=positions,
        max_positions=draw(st.integers(1, 50)),
        attention_dropout=draw(st.sampled_from([0.0, 0.5])),
    )
    config = SeqBoatConfig(
        init="paper",
        form=draw(st.sampled_from(["paper", "gated"])),
        ssm=ssm,
        router=draw(st.sampled_from(ROUTER_CONFIGS)),
        gau=gau,
        causal=causal,
        norm=draw(st.sampled_from(["layer", "batch", "scale", "rms"])),
        prenorm=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.5])),
    )
    padding = draw(st.sampled_from(["none", "left", "right", "interior"]))
    rows = draw(st.integers(1, 3))
    lengths = st.one_of(st.integers(0, 8), st.integers(9, 40))
    sizes = tuple(draw(lengths) for _ in range(rows))
    if padding == "none":
        sizes = sizes[:1] * rows
    time = max(sizes)
    splits = draw(st.lists(st.integers(0, time), max_size=2)) if causal else []
    return Case(
        config=config,
        d_model=draw(st.integers(3, 8)),
        lengths=sizes,
        padding=padding,
        splits=tuple(sorted(splits)),
        seed=draw(st.integers(0, 10**6)),
    )


# 4 x 90 = 360 configurations, most of them distinct
repeatable = settings(
    max_examples=90,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("complex_states", [False, True])
@repeatable
@given(data=st.data())
def test_layers_equal_the_reference(data: st.DataObject, causal: bool, complex_states: bool) -> None:
    compare(data.draw(cases(causal=causal, complex_states=complex_states)))


# a small layer of each kind for the cases below
LAYERS = {
    "causal memory": SeqBoatConfig(
        init="paper",
        ssm=EMAConfig(d_state=3, block=8),
        gau=GAUConfig(d_z=3, window=5, positions="original", max_positions=12),
        causal=True,
        prenorm=True,
    ),
    "bidirectional memory": SeqBoatConfig(
        init="paper",
        ssm=EMAConfig(d_state=3, block=8),
        gau=GAUConfig(d_z=3, window=5, positions="original", max_positions=12, attention="relu2"),
        norm="scale",
    ),
    "causal full": SeqBoatConfig(
        init="paper",
        ssm=S4DConfig(d_state=4, block=8),
        gau=GAUConfig(d_z=2, span="full", max_positions=12, attention="laplace"),
        causal=True,
        norm="rms",
    ),
    "bidirectional chunk": SeqBoatConfig(
        init="paper",
        ssm=S4DConfig(d_state=2, block=8),
        gau=GAUConfig(d_z=4, span="chunk", window=4, positions="rotary"),
        norm="batch",
        prenorm=True,
    ),
    "causal truncated": SeqBoatConfig(
        init="paper",
        ssm=EMAConfig(d_state=2, truncation=6),
        gau=GAUConfig(d_z=3, window=4, positions="compressed"),
        causal=True,
    ),
}
for name, kernel in SSMS.items():
    small = shrink(kernel())
    LAYERS[f"causal {name}"] = replace(LAYERS["causal memory"], ssm=small)
    LAYERS[f"bidirectional {name}"] = replace(LAYERS["bidirectional memory"], ssm=small)
kinds = pytest.mark.parametrize("kind", LAYERS)


def assert_gradients_everywhere(layer: SeqBoat, x: Tensor) -> None:
    """After a backward pass every parameter has a finite gradient, be it zero."""
    layer.zero_grad()
    layer(x).y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert torch.isfinite(parameter.grad).all(), name


# nothing, one, two; around a block of the scan (8) and of the attention (16); primes; beyond max_positions (12)
@pytest.mark.parametrize("time", [0, 1, 2, 7, 8, 9, 13, 15, 16, 17, 31])
@kinds
def test_every_length(kind: str, time: int) -> None:
    case = Case(LAYERS[kind], d_model=4, lengths=(time, time), seed=time)
    compare(case)
    assert_gradients_everywhere(make_layer(case), make_batch(case)[0])


def paper_router(layer: SeqBoat) -> TemperedSoftmax:
    assert isinstance(layer.sma.router, TemperedSoftmax)
    return layer.sma.router


def force(layer: SeqBoat, x: Tensor, count: int) -> None:
    """Shift the router's bias so that exactly the `count` keenest tokens of the batch are active."""
    router = paper_router(layer)
    probs = layer(x).routing.probs.flatten()
    difference = (torch.logit(probs) * router.temperature).sort(descending=True).values.detach()
    borders = torch.cat([difference[:1] + 1, difference, difference[-1:] - 1])
    with torch.no_grad():
        router.logits.bias[1] -= (borders[count] + borders[count + 1]) / 2


@pytest.mark.parametrize("count", [0, 1, 2, 33, 34])
@kinds
def test_any_number_of_active_tokens(kind: str, count: int) -> None:
    case = Case(LAYERS[kind], d_model=4, lengths=(17, 17), seed=count)
    layer, (x, _) = make_layer(case), make_batch(case)
    force(layer, x, count)
    active = compare_layer(layer, x, None)
    assert sum(map(sum, active)) == count
    assert_gradients_everywhere(layer, x)
    if count == 0:
        for name, parameter in layer.sma.named_parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any(), f"{name} was moved by tokens that it did not see"


def test_router_decisions_are_mixed() -> None:
    """The random layers above would prove little if their routers always said the same."""
    for router in ROUTER_CONFIGS[:-1]:
        config = replace(LAYERS["causal memory"], router=router)
        decisions = [
            flag
            for seed in range(10)
            for row in compare(Case(config, d_model=6, lengths=(20,), seed=seed))
            for flag in row
        ]
        assert 0.1 < sum(decisions) / len(decisions) < 0.9, router


@pytest.mark.parametrize("log_temperature", [-25.0, 25.0])
def test_extreme_temperatures(log_temperature: float) -> None:
    case = Case(LAYERS["causal memory"], d_model=4, lengths=(11,))
    layer, (x, mask) = make_layer(case), make_batch(case)
    with torch.no_grad():
        paper_router(layer).log_temperature.fill_(log_temperature)
    compare_layer(layer, x, mask)


def test_extreme_averages() -> None:
    """Averages that forget at once and averages that never forget."""
    case = Case(LAYERS["causal memory"], d_model=4, lengths=(40,))
    layer, (x, mask) = make_layer(case), make_batch(case)
    ema = layer.ssm
    assert isinstance(ema, EMA)
    with torch.no_grad():
        ema.delta[0, 0], ema.alpha[0, 0] = 30.0, 30.0
        ema.delta[0, 1] = -30.0
        ema.alpha[0, 2] = -30.0
    compare_layer(layer, x, mask)


@pytest.mark.parametrize("padding", ["none", "interior"])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if LAYERS[kind].causal])
def test_decoding_in_the_reference_equals_the_parallel_layer(kind: str, padding: str) -> None:
    lengths = (23, 23) if padding == "none" else (23, 9)
    compare(Case(LAYERS[kind], d_model=4, lengths=lengths, padding=padding, seed=3), by_step=True)


@pytest.mark.parametrize("router", ROUTER_CONFIGS)
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if LAYERS[kind].causal])
def test_step_equals_decoding_in_the_reference(kind: str, router: RouterConfig) -> None:
    case = Case(replace(LAYERS[kind], router=router), d_model=4, lengths=(19, 19), seed=4)
    layer, (x, _) = make_layer(case), make_batch(case)
    params = everything(layer)
    state = layer.init_state(batch=2)
    states: list[reference.LayerState | None] = [None, None]
    for t in range(x.shape[1]):
        out = layer.step(x[:, t], state)
        state = out.state
        for row in range(2):
            want = reference.decode_step(x[row, t], params, layer.config, states[row])
            states[row] = want.state
            assert want.state is not None
            assert out.routing is not None
            assert out.routing.active[row].tolist() == want.decisions.active
            assert_near(f"step {t}", out.y[row], want.y)
            assert_near(f"probability {t}", out.routing.probs[row], want.decisions.probs)
            for part, expected in zip(state.ssm, as_pairs(want.state.ssm), strict=True):
                assert_near(f"state {t}", part[row], expected)
            held = remembered(state.sma.modules[0], row, layer.config.gau)
            assert [position for position, _, _ in held] == [e.position for e in want.state.memory]
            for (_, key, value), entry in zip(held, want.state.memory, strict=True):
                assert_near(f"key {t}", key, entry.key)
                assert_near(f"value {t}", value, entry.value)


def test_the_queue_of_the_reference_is_first_in_first_out() -> None:
    config = replace(
        LAYERS["causal memory"], router=AlwaysActiveConfig(), gau=GAUConfig(d_z=2, window=3, positions="none")
    )
    layer = make_layer(Case(config, d_model=4, lengths=(1,)))
    state = None
    for t in range(6):
        token = torch.randn(4, dtype=torch.float64)
        state = reference.decode_step(token, everything(layer), config, state).state
        assert state is not None
        assert [entry.position for entry in state.memory] == list(range(t + 1))[-3:]


def test_compress_and_extract_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 9, 2, generator=generator)
    active = torch.rand(5, 9, generator=generator) < torch.tensor([0.0, 0.2, 0.5, 0.8, 1.0])[:, None]
    packed, slot = compress(x, active)
    restored = extract(packed, slot)
    for row in range(5):
        tokens, places = reference.compress(x[row], active[row].tolist())
        assert torch.equal(packed[row, : len(places)], tokens)
        assert not packed[row, len(places) :].any()
        assert torch.equal(restored[row], reference.extract(tokens, places, 9))


def test_reference_on_numbers_worked_by_hand() -> None:
    """One channel, one average: p = 1/2, q = 1 - p/2 = 3/4, so a unit impulse gives 1/2, 3/8, 9/32."""
    zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    params = {"delta": zero, "alpha": zero, "beta": one, "gamma": one, "skip": torch.tensor([10.0])}
    impulse = torch.tensor([[1.0], [0.0], [0.0]])
    y, state = reference.ema(impulse, params, EMAConfig(d_state=1))
    assert y.flatten().tolist() == [10.5, 0.375, 0.28125]
    assert state is not None
    assert state.tolist() == [[0.28125]]
    y, history = reference.ema(impulse, params, EMAConfig(d_state=1, truncation=2))
    assert y.flatten().tolist() == [10.5, 0.375, 0.0]
    assert history is not None
    assert history.tolist() == [[0.0]]
