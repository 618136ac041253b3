"""A layer that decodes in kernels: its states, where it does not apply, and what happens if a kernel fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import seqboat
from closeness import difference
from seqboat.core.state import tensors
from seqboat.inference.base import Token
from seqboat.inference.device import DeviceSeqBoat
from seqboat.inference.lean import LeanSeqBoat, lean_layer, lean_model
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.ops.decode import LayerStep
from seqboat.ops.kernels import registry
from seqboat.ops.kernels.registry import IMPLEMENTATIONS, Implementation, using_kernels
from seqboat.ssm.ema import EMAConfig
from seqboat.ssm.s4d import S4DConfig
from seqboat.ssm.s5 import S5Config

HERE = sys.modules[__name__]
GAU = GAUConfig(d_z=4, d_v=6, window=3)


def counting(step: LayerStep, x: Tensor) -> Tensor:
    """A kernel that only counts."""
    step.seen[: len(x)] += 1
    return x + step.seen[: len(x), None]


def broken(step: LayerStep, x: Tensor) -> Tensor:
    step.states.add_(1)
    raise RuntimeError("no such instruction")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, HERE.__name__, HERE)
    for name, value in vars(registry._Seam()).items():
        monkeypatch.setattr(registry.SEAM, name, value)
    yield
    registry._load.cache_clear()


def register(monkeypatch: pytest.MonkeyPatch, run: str) -> None:
    refuse = IMPLEMENTATIONS["decode"][0].refuse

    def any_device(**call: Any) -> str | None:
        return refuse(**call | {"device": torch.device("cuda")})

    made = Implementation("triton", f"{HERE.__name__}:{run}", refuse=any_device)
    monkeypatch.setitem(IMPLEMENTATIONS, "decode", [made])


def make_layer(**settings: Any) -> SeqBoat:
    torch.manual_seed(0)
    return SeqBoat(5, SeqBoatConfig(**{"causal": True, "gau": GAU, **settings})).eval()


@pytest.mark.parametrize("ssm", [EMAConfig(d_state=3), S4DConfig(d_state=4), EMAConfig(truncation=5)])
@torch.no_grad()
def test_states_go_in_and_out(ssm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "counting")
    layer = make_layer(ssm=ssm)
    state = layer(torch.randn(3, 8, 5)).state
    with using_kernels("triton"):
        made = lean_layer(layer, 4)
    assert isinstance(made, DeviceSeqBoat)
    for row, source in enumerate((2, 0, 1)):
        made.put(row, state, source)
    made.move(2, 3)
    for rows, sources in (([0, 1, 2], [2, 0, 1]), ([3], [1])):
        found = made.get(rows, state.sma.seen[sources])
        for (name, one), (_, two) in zip(tensors(found), tensors(state), strict=True):
            assert difference(one, two[sources]) < 1e-6, name


@torch.no_grad()
def test_a_truncated_kernel_holds_the_sum_of_its_last_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "counting")
    layer = make_layer(ssm=EMAConfig(d_state=3, truncation=5))
    with using_kernels("triton"):
        made = lean_layer(layer, 1)
    assert isinstance(made, DeviceSeqBoat)
    state = layer(torch.randn(1, 9, 5)).state
    made.put(0, state, 0)
    _, drive, read, tail = made.step.coefficients[:, 0]
    # what the kernel adds to the next output, and what it forgets then
    taps = layer.ssm.kernel(5)[0].flip(1)  # type: ignore[operator]
    decayed = (1 + made.step.coefficients[0, 0]) * made.step.states[0, 0]
    torch.testing.assert_close(
        (read * decayed).sum(dim=0), (state.ssm.history[0].t() * taps[:, :4]).sum(dim=1)
    )
    torch.testing.assert_close((read * tail).sum(dim=0), taps[:, 0])
    torch.testing.assert_close((read * drive).sum(dim=0), taps[:, 4])


def test_a_trial_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "counting")
    with using_kernels("triton"):
        made = lean_layer(make_layer(), 2)
    assert isinstance(made, DeviceSeqBoat)
    y = made(torch.zeros(2, 5), Token([0, 0], torch.float32, torch.device("cpu")))
    assert torch.equal(y, torch.ones(2, 5))
    assert seqboat.kernels()["decode"]["ran"] == {"triton": 2}


def test_a_kernel_that_fails_on_its_trial_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "broken")
    with using_kernels("triton"), pytest.warns(RuntimeWarning, match="triton failed in decode"):
        assert isinstance(lean_layer(make_layer(), 1), LeanSeqBoat)
    with using_kernels("triton"):  # and no second warning
        assert isinstance(lean_layer(make_layer(), 1), LeanSeqBoat)


def test_a_kernel_that_fails_later_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "counting")
    with using_kernels("triton"):
        made = lean_layer(make_layer(), 1)
    assert isinstance(made, DeviceSeqBoat)
    register(monkeypatch, "broken")
    made.implementation = IMPLEMENTATIONS["decode"][0]
    with (
        pytest.warns(RuntimeWarning, match="no such instruction"),
        pytest.raises(RuntimeError, match="read the sequence again"),
    ):
        made(torch.zeros(1, 5), Token([0], torch.float32, torch.device("cpu")))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two modules": ({"ffn": True}, "a second module"),
    "S5": ({"ssm": S5Config(d_state=16)}, "neither MD-EMA nor S4D"),
    "one tap": ({"ssm": EMAConfig(truncation=1)}, "one tap"),
    "full": ({"gau": GAUConfig(span="full")}, "a memory that grows"),
    "a long memory": ({"gau": GAUConfig(window=9000)}, "memory 9001"),
    "wide queries": ({"gau": GAUConfig(d_z=300)}, "queries of width 300"),
    "many states": ({"ssm": EMAConfig(d_state=65)}, "65 states"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_does_not_apply(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "counting")
    settings, reason = REFUSED[name]
    with torch.no_grad(), using_kernels("triton"):
        assert isinstance(lean_layer(make_layer(**settings), 1), LeanSeqBoat)
    assert reason in seqboat.kernels()["decode"]["refused"]["triton"]


def test_types(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "counting")
    config = BackboneConfig(mixer=SeqBoatConfig(causal=True, gau=GAU), d_model=5, num_layers=2, vocab=7)
    model = LanguageModel(config).eval()
    for dtype, kind in ((torch.float32, DeviceSeqBoat), (torch.float64, LeanSeqBoat)):
        with using_kernels("triton"):
            lean = lean_model(model.to(dtype))
        assert lean is not None and all(type(layer) is kind for layer in lean.layers)
    assert lean_model(model.bfloat16()) is None  # torch has no lean step in narrow types
    with using_kernels("triton"):
        lean = lean_model(model)
    assert lean is not None and all(type(layer) is DeviceSeqBoat for layer in lean.layers)
    lean.join(model.init_state(1))
    assert lean.step(torch.tensor([3])).dtype == torch.bfloat16
