"""The lean step gives the numbers of the general step and of the whole forward pass, and knows where it applies."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqboat.core.state import select_rows, tensors
from seqboat.inference.attention import LeanAttention
from seqboat.inference.lean import LeanSeqBoat, lean_backbone, lean_model
from seqboat.layers.budget import BudgetConfig
from seqboat.layers.gau import GAUConfig
from seqboat.layers.policy import override_activation
from seqboat.layers.routers import ROUTERS, AlwaysActiveConfig, SigmoidConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.layers.variants import SeqBoatThenFFNConfig
from seqboat.mixers import MIXERS
from seqboat.mixers.ssm import S4DLayerConfig, S4LayerConfig, S5LayerConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.ops.positions import POSITIONS
from seqboat.ssm.conv import EMAConvConfig
from seqboat.ssm.ema import EMAConfig
from seqboat.ssm.liquid_s4 import LiquidS4Config
from seqboat.ssm.s4 import S4Config
from seqboat.ssm.s4d import S4DConfig
from seqboat.ssm.s5 import S5Config

TOLERANCE = 1e-10
VOCAB = 11


def seqboat(**settings: Any) -> SeqBoatConfig:
    return SeqBoatConfig(**{"causal": True, "router": SigmoidConfig(), "init": "paper", **settings})


def attention(function: str, positions: str, span: str) -> SeqBoatConfig:
    named: Any = {"attention": function, "positions": positions, "span": span}
    gau = GAUConfig(d_z=4, d_v=6, window=5, max_positions=7, **named)
    return seqboat(gau=gau, ssm=EMAConfig(d_state=2))


CASES: dict[str, Any] = {
    **{
        f"{function} {positions} {span}": attention(function, positions, span)
        for function, positions, span in itertools.product(
            ("softmax", "relu2", "laplace"),
            tuple(POSITIONS),
            ("memory", "full", "chunk"),
        )
    },
    "s4d": seqboat(ssm=S4DConfig(d_state=4)),
    "s4": seqboat(ssm=S4Config(d_state=4)),
    "s5": seqboat(ssm=S5Config(d_state=8, systems=2)),
    "liquid pb": seqboat(ssm=LiquidS4Config(d_state=4, kernel="pb", order=3)),
    "liquid kb": seqboat(ssm=LiquidS4Config(d_state=4, kernel="kb", order=3)),
    "liquid linear": seqboat(ssm=LiquidS4Config(d_state=4, order=1)),
    "truncated": seqboat(ssm=EMAConfig(d_state=2, truncation=6)),
    "truncated to one": seqboat(ssm=EMAConfig(d_state=2, truncation=1)),
    "convolution": seqboat(ssm=EMAConvConfig(d_state=2)),
    "convolution of two": seqboat(ssm=EMAConvConfig(d_state=2, conv=2, truncation=5)),
    "truncated s4d": seqboat(ssm=S4DConfig(d_state=4, truncation=5)),
    **{f"router {name}": seqboat(router=make(), ffn=True) for name, make in ROUTERS.items()},
    "all active": seqboat(router=AlwaysActiveConfig()),
    "a target": seqboat(budget=BudgetConfig(target=0.5)),
    "a target above a threshold": seqboat(budget=BudgetConfig(target=0.5), router=ROUTERS["threshold"]()),
    **{
        f"norm {norm} {'before' if prenorm else 'after'}": seqboat(norm=norm, prenorm=prenorm)
        for norm, prenorm in itertools.product(("layer", "batch", "scale", "rms"), (False, True))
    },
    "then ffn": SeqBoatThenFFNConfig(causal=True, router=SigmoidConfig(), init="paper"),
    "layer s4": S4LayerConfig(causal=True, ssm=S4Config(d_state=4)),
    "layer s4d": S4DLayerConfig(causal=True, prenorm=False, ssm=S4DConfig(d_state=4)),
    "layer s5": S5LayerConfig(causal=True, ssm=S5Config(d_state=8, systems=2)),
}
FEW = (
    "softmax rotary memory",
    "relu2 original full",
    "laplace compressed chunk",
    "router x-moe",
    "layer s5",
)


def make_model(mixer: Any, dtype: torch.dtype = torch.float64, **settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = BackboneConfig(
        **{
            "mixer": mixer,
            "d_model": 6,
            "num_layers": 2,
            "vocab": VOCAB,
            "scaled_embedding": True,
            **settings,
        }
    )
    model = LanguageModel(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("policy.shift"):
                buffer.copy_(torch.linspace(-0.3, 0.2, len(buffer) + 1)[1:])
    return model


@torch.no_grad()
def compare(model: LanguageModel, batch: int, time: int, read: int = 9) -> tuple[float, set[int]]:
    """The largest difference of scores, and how many sequences of a layer attended at the same time."""
    ids = torch.randint(0, VOCAB, (batch, time), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    # read in chunks first: the state of a prefill is where a lean step starts
    state = model(ids[:, :4]).state
    state = model(ids[:, 4:read], None, state).state
    lean = lean_model(model, batch)
    assert lean is not None
    lean.join(state)
    worst, together = 0.0, set()
    for t in range(read, time):
        if t == time // 2:  # a state is a value, and nothing is lost on the way out and in
            again = lean.state()
            lean = lean_model(model, batch)
            assert lean is not None
            lean.join(again)
        scores = lean.step(ids[:, t])
        general, state, routings = model.step(ids[:, t], state, inplace=True)
        together |= {int(r.active.sum()) for r in routings if r is not None}
        worst = max(worst, float((scores - general).abs().max()))
        worst = max(worst, float((scores - whole.logits[:, t]).abs().max()))
    return worst, together


@pytest.mark.parametrize("name", CASES)
def test_lean_is_general_is_whole(name: str) -> None:
    for batch in (1, 3):
        worst, together = compare(make_model(CASES[name]), batch, 24)
        assert worst < TOLERANCE
        if name in FEW[:3]:
            assert len(together) > 1, "sequences must be active at different steps for this to mean anything"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_thousand_tokens(name: str) -> None:
    assert compare(make_model(CASES[name]), 1, 2000)[0] < TOLERANCE
    assert compare(make_model(CASES[name]), 2, 400)[0] < TOLERANCE


def test_large_memories_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqboat.inference.attention.ONE_BY_ONE", 0)
    for name in FEW[:3]:
        assert compare(make_model(CASES[name]), 3, 34)[0] < TOLERANCE


def test_threads_share_large_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices and memories are split among threads, also where their sizes are no multiples of the number."""
    monkeypatch.setattr("seqboat.inference.products.SPLIT", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for name in FEW:
        model = make_model(CASES[name])
        assert compare(model, 1, 40)[0] < TOLERANCE and compare(model, 3, 24)[0] < TOLERANCE
    lean = lean_model(make_model(CASES[FEW[0]]))
    assert lean is not None and isinstance(lean.layers[0], LeanSeqBoat)
    (unit,) = lean.layers[0].units
    assert isinstance(unit, LeanAttention) and (unit.parts, unit.keys.shape[1], unit.values.shape[1]) == (
        4,
        6,
        8,
    )


def test_added_positions_and_float32() -> None:
    model = make_model(CASES["softmax none memory"], absolute_positions=True)
    assert compare(model, 2, 20)[0] < TOLERANCE
    assert compare(make_model(CASES["softmax rotary memory"], torch.float32), 2, 30)[0] < 1e-5


@pytest.mark.parametrize("name", FEW)
def test_sequences_join_and_leave(name: str) -> None:
    """Whoever else is there, a sequence gives the scores that it gives alone."""
    model = make_model(CASES[name])
    lean = lean_model(model, 3)
    assert lean is not None
    ids = torch.randint(0, VOCAB, (5, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        scores = model(ids).logits
    here: list[list[int]] = []  # sequence and tokens read, in the order of the rows
    waiting = [0, 1, 2, 3, 4]
    ends = {0: 8, 1: 40, 2: 15, 3: 22, 4: 40}
    while here or waiting:
        if waiting and len(here) < 3:
            number = waiting.pop(0)
            with torch.no_grad():
                lean.join(model(ids[number : number + 1, : number + 1]).state)
            here.append([number, number + 1])
        got = lean.step(torch.stack([ids[number, at] for number, at in here]))
        for row, (number, at) in enumerate(here):
            torch.testing.assert_close(got[row], scores[number, at], atol=TOLERANCE, rtol=0)
            here[row][1] += 1
        for row in reversed(range(len(here))):
            number, at = here[row]
            if at == ends[number]:
                state = lean.leave(row)
                with torch.no_grad():
                    want = model(ids[number : number + 1, :at]).state
                assert state.seen.tolist() == [at]
                for (part, one), (_, two) in zip(tensors(state), tensors(want), strict=True):
                    assert one.dtype == two.dtype and one.shape[0] == two.shape[0], part
                here[row] = here[-1]
                here.pop()
    assert len(lean) == 0


def test_what_it_returns_may_be_trained_on() -> None:
    model = make_model(CASES["softmax rotary memory"])
    lean = lean_model(model)
    assert lean is not None
    lean.join(model.init_state(1))
    assert not lean.step(torch.tensor([3])).is_inference()
    assert not any(part.is_inference() for _, part in tensors(lean.state()))
    before = lean.state()
    copy = select_rows(before, torch.tensor([0]))
    lean.step(torch.tensor([4]))
    for (name, one), (_, two) in zip(tensors(before), tensors(copy), strict=True):
        assert torch.equal(one, two), f"{name} changed with a later step"


def refused() -> dict[str, Any]:
    def trained(model: LanguageModel) -> LanguageModel:
        return model.train()

    def hooked(model: LanguageModel) -> LanguageModel:
        model.backbone.layers[0].register_forward_hook(lambda *_: None)
        return model

    plain = CASES["softmax rotary memory"]
    return {
        "training": trained(make_model(plain)),
        "hooks": hooked(make_model(plain)),
        "half precision": make_model(plain, torch.bfloat16),
        "a cap": make_model(seqboat(budget=BudgetConfig(cap=0.5))),
        "a target": make_model(seqboat(budget=BudgetConfig(target=0.5), router=ROUTERS["x-moe"]())),
        "another mixer": make_model(MIXERS["transformer"](causal=True, heads=2)),
    }


def test_where_it_does_not_apply() -> None:
    for name, model in refused().items():
        assert lean_model(model) is None and lean_backbone(model.backbone) is None, name
    model = make_model(CASES["softmax rotary memory"])
    with override_activation(model, active=False):
        assert lean_model(model) is None
    with torch.autocast("cpu"):
        assert lean_model(model) is None
    assert lean_model(copy.deepcopy(model)) is not None
    lean = lean_model(model)
    assert lean is not None and lean.applies
    with override_activation(model, active=False):
        assert not lean.applies
    assert lean.applies


def test_bad_calls() -> None:
    model, other = make_model(CASES["softmax rotary memory"]), make_model(CASES["all active"], num_layers=3)
    lean = lean_model(model)
    assert lean is not None
    with pytest.raises(ValueError, match="it has 3 layers, the model 2"):
        lean.join(other.init_state(1))
    with pytest.raises(ValueError, match="room for 1 sequences, not for 2"):
        lean.join(model.init_state(2))
    lean.join(model.init_state(1))
    with pytest.raises(ValueError, match=r"tokens must have shape \(1,\)"):
        lean.step(torch.tensor([1, 2]))


class Count(TorchDispatchMode):
    """Counts operations."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_it_is_lean() -> None:
    """Less than half of the operations of a general step, with attention in every layer."""
    model = make_model(
        seqboat(router=AlwaysActiveConfig(), prenorm=True, gau=GAUConfig(d_z=4, positions="rotary"))
    )
    lean, state, token = lean_model(model), model.init_state(1), torch.tensor([1])
    assert lean is not None
    lean.join(state)
    counts = []
    with torch.no_grad():
        for step in (lambda: lean.read(token), lambda: model.step(token, state)):
            with Count() as count:
                step()
            counts.append(count.operations)
    assert counts[0] < 0.5 * counts[1], counts


def test_a_full_memory_is_written_in_place() -> None:
    model = make_model(CASES["softmax rotary memory"])
    lean = lean_model(model)
    assert lean is not None
    lean.join(model.init_state(1))

    def addresses() -> list[int]:
        layers: list[Any] = lean.layers
        units = [layer.units[0] for layer in layers if isinstance(layer, LeanSeqBoat)]
        parts: list[Tensor] = [
            part for unit in units if isinstance(unit, LeanAttention) for part in (unit.keys, unit.values)
        ]
        return [part.data_ptr() for part in parts]

    before = addresses()
    for token in range(30):
        lean.step(torch.tensor([token % VOCAB]))
    assert addresses() == before
