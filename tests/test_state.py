"""States as values: rows picked, repeated and reordered, graphs cut, sizes constant, strangers refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mixer_cases import (
    D_MODEL,
    RECURRENT_CASES,
    SMALL_EMA,
    SMALL_GAU,
    Case,
    assert_near,
    assert_states_near,
)
from seqboat.core.mixer import Mixer
from seqboat.core.state import (
    check_state,
    detach_state,
    map_state,
    repeat_rows,
    select_rows,
    state_bytes,
    tensors,
)
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.ssm.diagonal import EMAConfig, S4DConfig

every_recurrent_case = pytest.mark.parametrize("case", RECURRENT_CASES, ids=str)


def make(case: Case) -> Mixer:
    mixer = case.make()
    assert mixer.decodes
    return mixer


def sequence(batch: int, time: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, time, D_MODEL, generator=generator, dtype=torch.float64)


@every_recurrent_case
@torch.no_grad()
def test_reordered_rows_continue_as_the_reordered_batch(case: Case) -> None:
    mixer = make(case)
    x = sequence(3, 20)
    rows = torch.tensor([2, 0, 0, 1, 2])
    state = select_rows(mixer(x[:, :11]).state, rows)
    expected = mixer(x[rows])
    later = mixer(x[rows][:, 11:], state=state)
    assert_near(later.y, expected.y[:, 11:], 1e-10)
    assert_states_near(later.state, expected.state, 1e-10)
    for t in range(11, 20):
        out = mixer.step(x[rows][:, t], state)
        assert_near(out.y, expected.y[:, t], 1e-10)
        state = out.state


@every_recurrent_case
@torch.no_grad()
def test_repeated_rows(case: Case) -> None:
    mixer = make(case)
    state = mixer(sequence(2, 9)).state
    repeated = repeat_rows(state, 3)
    assert_states_near(repeated, select_rows(state, torch.tensor([0, 0, 0, 1, 1, 1])), 0)
    assert state_bytes(repeated) == 3 * state_bytes(state)
    assert type(repeated) is type(state)


@every_recurrent_case
def test_gradient_flows_through_a_state_until_it_is_detached(case: Case) -> None:
    mixer = make(case)
    whole, parts = sequence(2, 16).requires_grad_(), sequence(2, 16).requires_grad_()
    mixer(whole).y[:, 9:].square().sum().backward()
    expected = {name: parameter.grad for name, parameter in mixer.named_parameters()}
    mixer.zero_grad()
    state = mixer(parts[:, :9]).state
    mixer(parts[:, 9:], state=state).y.square().sum().backward()
    assert whole.grad is not None and parts.grad is not None
    assert_near(parts.grad, whole.grad, 1e-10)
    for name, parameter in mixer.named_parameters():
        want = expected[name]
        assert parameter.grad is not None and want is not None
        assert_near(parameter.grad, want, 1e-9, name)
    parts.grad = None
    state = detach_state(mixer(parts[:, :9]).state)
    assert not any(part.requires_grad for _, part in tensors(state))
    mixer(parts[:, 9:], state=state).y.square().sum().backward()
    later: Any = parts.grad
    assert not later[:, :9].any() and later[:, 9:].any()


@pytest.mark.parametrize("span", ["memory", "chunk"])
@torch.no_grad()
def test_size_is_constant(span: Any) -> None:
    config = SeqBoatConfig(init="paper", ssm=SMALL_EMA, gau=replace(SMALL_GAU, span=span), causal=True)
    layer = config.build(D_MODEL)
    state = layer.init_state(2)
    size = state_bytes(state)
    shapes = [part.shape for _, part in tensors(state)]
    # EMA states, keys, values, positions, counts of active tokens (of the unit, of the layer) and of all tokens,
    # in float32 and int64; the working memory also holds the token itself
    places = 5 + (span == "memory")
    assert size == 2 * (4 * D_MODEL * 4 + places * (6 * 4 + 10 * 4 + 8) + 8 + 8 + 8)
    x = torch.randn(1000, 2, D_MODEL)
    for token in x:
        layer.step(token, state)
        assert [part.shape for _, part in tensors(state)] == shapes
    assert state.sma.seen.tolist() == [1000, 1000]
    assert state_bytes(layer(x.transpose(0, 1)).state) == size


@torch.no_grad()
def test_full_span_grows_with_the_active_tokens_alone() -> None:
    config = SeqBoatConfig(init="paper", ssm=SMALL_EMA, gau=replace(SMALL_GAU, span="full"), causal=True)
    layer = config.build(D_MODEL)
    out = layer(torch.randn(1, 200, D_MODEL))
    active = int(out.routing.active.sum())
    assert 0 < active < 200
    assert out.state.sma.modules[0].keys.shape == (1, active, 6)
    state, more = out.state, 0
    for token in torch.randn(50, 1, D_MODEL):
        routing = layer.step(token, state).routing
        assert routing is not None
        more += int(routing.active.sum())
    memory = state.sma.modules[0]
    assert active + more <= memory.keys.shape[1] <= 2 * (active + more) and int(memory.total) == active + more


def test_map_and_names() -> None:
    state = (torch.ones(2), (None, torch.zeros(2, 3)))
    assert [name for name, _ in tensors(state)] == ["state.0", "state.1.1"]
    doubled = map_state(lambda part: 2 * part, state)
    assert doubled[1][0] is None and doubled[0].tolist() == [2.0, 2.0]
    assert state_bytes(state) == 4 * (2 + 6)
    with pytest.raises(ValueError, match="a state holds tensors and tuples, not dict"):
        map_state(lambda part: part, {"a": torch.ones(1)})


LAYER = SeqBoatConfig(init="paper", ssm=SMALL_EMA, gau=SMALL_GAU, causal=True)


def test_state_of_another_batch() -> None:
    layer = LAYER.build(D_MODEL)
    x = torch.randn(2, 3, D_MODEL)
    with pytest.raises(ValueError, match=r"state.ssm.states must be of 2 sequences, got 3"):
        layer(x, state=layer.init_state(3))
    with pytest.raises(ValueError, match="state must be that of this SeqBoat, got tuple"):
        layer(x, state=())


def test_check_state_reads_a_size_of_zero_as_any() -> None:
    fresh = (torch.zeros(2, 0, 3),)
    check_state((torch.zeros(2, 7, 3),), fresh, torch.device("cpu"), "layer")
    with pytest.raises(ValueError, match=r"state.0 must have shape \(2, any, 3\) .* got \(2, 7, 4\)"):
        check_state((torch.zeros(2, 7, 4),), fresh, torch.device("cpu"), "layer")
    # the batch is never any
    with pytest.raises(ValueError, match=r"state.0 must have shape \(0, any, 3\) .* got \(2, 7, 3\)"):
        check_state((torch.zeros(2, 7, 3),), (torch.zeros(0, 0, 3),), torch.device("cpu"), "layer")
    with pytest.raises(ValueError, match=r"state.0 must have shape \(2,\) .* got \(3,\)"):
        check_state((torch.zeros(3),), (torch.zeros(2),), torch.device("cpu"), "layer")


def test_state_dtype_follows_the_inputs() -> None:
    config = SeqBoatConfig(
        init="paper", ssm=S4DConfig(d_state=4), gau=GAUConfig(d_z=4, window=3), causal=True
    )
    layer = config.build(D_MODEL).to(torch.bfloat16)
    state = layer(torch.randn(2, 5, D_MODEL, dtype=torch.bfloat16)).state
    kinds = {name: part.dtype for name, part in tensors(state)}
    assert kinds["state.ssm.states"] == torch.float32
    assert kinds["state.sma.modules.0.keys"] == torch.bfloat16
    assert {name: part.dtype for name, part in tensors(layer.init_state(2))} == kinds


@pytest.mark.parametrize("truncation", [None, 5])
def test_steps_follow_changed_weights(truncation: int | None) -> None:
    """What a step keeps of the weights is made anew when they change, or when a sequence begins."""
    layer = EMAConfig(d_state=4, truncation=truncation).build(6, causal=True).double().eval()
    x = torch.randn(2, 9, 6, dtype=torch.float64)

    def by_steps() -> Tensor:
        state = layer.init_state(2)
        steps = []
        for token in x.unbind(1):
            y, state, _ = layer.step(token, state)
            steps.append(y)
        return torch.stack(steps, dim=1)

    with torch.no_grad():
        torch.testing.assert_close(by_steps(), layer(x).y)
        layer.beta.mul_(2.0)
        torch.testing.assert_close(by_steps(), layer(x).y)
        layer.beta.data.mul_(2.0)  # which leaves no trace in the weight's version
        torch.testing.assert_close(by_steps(), layer(x).y)
        half = layer(x[:, :4])
        layer.gamma.mul_(3.0)  # in the middle of a sequence
        again = layer(x[:, 4:5], None, half.state)
        y, state, _ = layer.step(x[:, 4], half.state)
        torch.testing.assert_close(y, again.y[:, 0])
        y, state, _ = layer.step(x[:, 5], state)
        layer.gamma.mul_(0.5)
        expected = layer(x[:, 6:7], None, state).y[:, 0]
        torch.testing.assert_close(layer.step(x[:, 6], state).y, expected)


@pytest.mark.parametrize("rows", [torch.ones(2), torch.tensor([True, False, True]), torch.tensor([0, 3])])
def test_rows_must_be_whole_numbers_of_rows_that_exist(rows: Tensor) -> None:
    with pytest.raises(ValueError, match="rows must be"):
        select_rows((torch.ones(3, 2),), rows)
    with pytest.raises(ValueError, match="times must be an integer >= 1, got 0"):
        repeat_rows((torch.ones(3, 2),), 0)
