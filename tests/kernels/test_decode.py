"""A step of decoding by Triton kernels against the general step in float64: outputs, states, and what it launches."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import seqboat
from closeness import difference
from seqboat import EMAConfig, GAUConfig, S4DConfig, SeqBoat, SeqBoatConfig
from seqboat.core.state import tensors
from seqboat.inference.device import DeviceSeqBoat
from seqboat.inference.lean import lean_layer, lean_model
from seqboat.layers.routers import ROUTERS
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.ops.kernels import registry, tuning
from seqboat.ops.kernels.tuning import Config, Launch, recording

TOLERANCE = 2e-6
CASES: dict[str, dict[str, Any]] = {
    "softmax rotary": {"positions": "rotary", "norm": "layer", "prenorm": True},
    "softmax original": {"positions": "original", "max_positions": 9, "router": "sigmoid"},
    "softmax compressed": {"positions": "compressed", "norm": "rms", "router": "threshold"},
    "relu2 none": {"attention": "relu2", "positions": "none", "norm": "scale", "prenorm": True},
    "relu2 rotary chunk": {"attention": "relu2", "positions": "rotary", "span": "chunk", "norm": "batch"},
    "laplace original": {"attention": "laplace", "max_positions": 4, "norm": "batch", "prenorm": True},
    "laplace compressed chunk": {"attention": "laplace", "positions": "compressed", "span": "chunk"},
    "chunk original": {"span": "chunk", "positions": "original", "norm": "rms", "prenorm": True},
    "s4d": {"ssm": S4DConfig(d_state=6), "positions": "rotary", "norm": "scale"},
    "truncated": {"ssm": EMAConfig(d_state=3, truncation=6), "prenorm": True},
    "truncated s4d": {"ssm": S4DConfig(d_state=4, truncation=2), "positions": "none"},
    "all active": {"router": "always-active", "positions": "compressed", "prenorm": True},
}
STEPS = 26


@pytest.fixture(autouse=True)
def _fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger blocks: the interpreter takes most of its time to start a program."""
    registry.forget_runs()
    for name in ("project", "leave"):
        monkeypatch.setitem(tuning.CONFIGS, name, (Config({"OUT": 64, "IN": 32}),))


def make_layer(seed: int, settings: dict[str, Any]) -> SeqBoat:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    gau: dict[str, Any] = {
        "d_z": rng.choice([2, 6, 10]),
        "d_v": rng.choice([3, 7, 20]),
        "window": rng.choice([1, 4, 5]),
    }
    other = dict(settings)
    gau |= {name: other.pop(name) for name in GAUConfig.__dataclass_fields__ if name in other}
    other.setdefault("ssm", EMAConfig(d_state=rng.choice([1, 3, 16])))
    other["router"] = ROUTERS[other.pop("router", "tempered-softmax")]()
    config = SeqBoatConfig(causal=True, init="paper", gau=GAUConfig(**gau), **other)
    layer = SeqBoat(rng.choice([5, 11, 33]), config).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in layer.norm.named_buffers():
            buffer.copy_(torch.rand_like(buffer) + (0.5 if name == "running_var" else -0.5))
        logits = getattr(layer.sma.policy.router, "logits", None)
        if logits is not None:
            # half of the tokens, whatever their size
            logits.weight.normal_()
            logits.bias.zero_()
    return layer


def make_device(layer: SeqBoat, capacity: int) -> DeviceSeqBoat:
    with torch.no_grad(), seqboat.using_kernels("triton"):
        made = lean_layer(layer, capacity)
    assert isinstance(made, DeviceSeqBoat), registry.kernels()["decode"]
    return made


def call(made: DeviceSeqBoat, x: Tensor) -> Tensor:
    token: Any = None  # everything is on the device
    return made(x, token)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_steps_equal_the_general_step(name: str) -> None:
    number = list(CASES).index(name)
    layer = make_layer(number, CASES[name])
    wide, batch, dim = copy.deepcopy(layer).double(), number % 3 + 1, layer.d_model
    made = make_device(layer, batch + 1)
    # from the middle of a sequence on, half way between tokens that were read at once and single ones
    state = wide(torch.randn(batch, 3 * (number % 4), dim).double()).state
    for row in range(batch):
        made.put(row, state, row)
    several = set()
    for time in range(STEPS):
        if time == STEPS // 2:  # a state is a value, and nothing is lost on the way out and in
            kept = made.get(list(range(batch)), made.step.seen[:batch])
            made = make_device(layer, batch)
            for row in range(batch):
                made.put(row, kept, row)
        x = torch.randn(batch, dim)
        expected = wide.step(x.double(), state)
        state = expected.state
        assert expected.routing is not None
        several.add(int(expected.routing.active.sum()))
        assert difference(call(made, x), expected.y) < TOLERANCE, time
    found = made.get(list(range(batch)), made.step.seen[:batch])
    for (part, one), (_, two) in zip(tensors(found), tensors(state), strict=True):
        for row, total in enumerate(state.sma.modules[0].total.tolist()):
            # what no later token sees need not be kept
            _, visible = made.places.convert(total, one.device)
            if one.dim() > 1 and "modules" in part:
                assert difference(one[row, visible], two[row, visible]) < TOLERANCE, part
            else:
                assert difference(one[row], two[row]) < TOLERANCE, part
    if name != "all active":
        assert len(several) > 1, "active and inactive tokens"
    assert int(state.sma.modules[0].total.max()) > layer.config.gau.window + 1, "the ring must come round"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 3e-3), (torch.bfloat16, 3e-2)])
@torch.no_grad()
def test_narrow_weights_and_memories(dtype: torch.dtype, bound: float) -> None:
    """Tokens, weights and memory are rounded, sums are not."""
    layer = make_layer(0, CASES["softmax rotary"]).to(dtype)
    wide = copy.deepcopy(layer).double()
    made, state = make_device(layer, 2), wide.init_state(2)
    assert made.step.keys.dtype == made.step.base.dtype == dtype
    for _ in range(8):
        x = torch.randn(2, layer.d_model).to(dtype)
        expected = wide.step(x.double(), state)
        state, found = expected.state, call(made, x)
        assert found.dtype == dtype and difference(found, expected.y) < bound


@torch.no_grad()
def test_a_token_that_is_not_finite_activates_nothing() -> None:
    made = make_device(make_layer(1, {"router": "always-active", "norm": "rms"}), 2)
    x = torch.randn(2, made.step.skip.shape[0])
    x[1, 0] = torch.nan
    call(made, x)
    assert made.step.total.tolist() == [1, 0] and made.step.seen.tolist() == [1, 1]


class Quiet(TorchDispatchMode):
    """Notes every operator but allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and "empty" not in function.name():
            self.called.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "number"), [("softmax rotary", 5), ("softmax original", 6)])
@torch.no_grad()
def test_five_or_six_launches_and_no_question_to_the_host(name: str, number: int) -> None:
    layer = make_layer(0, CASES[name])
    made, launches = make_device(layer, 2), list[Launch]()
    x = torch.randn(2, layer.d_model)
    with recording(launches), Quiet() as quiet:
        call(made, x)
    assert len(launches) == number and not quiet.called


@torch.no_grad()
def test_a_language_model() -> None:
    """Sequences join and leave, and scores are those of the whole text."""
    torch.manual_seed(2)
    mixer = SeqBoatConfig(causal=True, gau=GAUConfig(d_z=4, d_v=6, window=3), ssm=EMAConfig(d_state=2))
    config = BackboneConfig(mixer=mixer, d_model=6, num_layers=2, vocab=7)
    model = LanguageModel(config).eval()
    ids = torch.randint(0, 7, (2, 12))
    expected = copy.deepcopy(model).double()(ids).logits
    with seqboat.using_kernels("triton", "decode"):
        lean = lean_model(model, 2)
        assert lean is not None and all(isinstance(layer, DeviceSeqBoat) for layer in lean.layers)
        lean.join(model(ids[:, :4]).state)
        for time in range(4, 8):
            assert difference(lean.step(ids[:, time]), expected[:, time]) < TOLERANCE
        lean.leave(0)  # the other one takes its place
        for time in range(8, 10):
            assert difference(lean.step(ids[1:, time]), expected[1:, time]) < TOLERANCE
        state = lean.state()
    assert difference(model.step(ids[1:, 10], state).logits, expected[1:, 10]) < TOLERANCE
    assert seqboat.kernels()["decode"]["ran"]["triton"] >= 12
