"""torch.compile: the same numbers, one graph per layer, no new compilation for every batch.

How many tokens are active depends on the data. torch traces through that only if it is told to capture
operators with such shapes, as `compile_model` does; then a layer is one graph. Without it, a layer falls into
several graphs at the packing of its tokens, with the same results.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mixer_cases import CASES, D_MODEL, Case, assert_near
from seqboat.layers.budget import BudgetConfig
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.models.backbone import BackboneConfig
from seqboat.models.compile import compile_model
from seqboat.models.heads import Classifier, LanguageModel
from seqboat.ssm.diagonal import EMAConfig

CAPTURE: dict[str, Any] = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")), reason="no C++ compiler was found"
)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """No compiled code stays behind for other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_layer(causal: bool, span: Any = "memory", **settings: Any) -> SeqBoat:
    torch.manual_seed(0)
    gau = GAUConfig(d_z=8, window=5, max_positions=12, span=span)
    return SeqBoatConfig(init="paper", causal=causal, ssm=EMAConfig(d_state=4), gau=gau, **settings).build(16)


def gradients(layer: SeqBoat, y: Tensor) -> list[Tensor]:
    layer.zero_grad()
    # not the sum of squares, which a norm at the end makes constant: its gradient would be rounding alone
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (y * weight).sum().backward()
    return [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]


def check_training(layer: SeqBoat, compiled: Any, batches: int = 4, fixed: bool = False) -> None:
    """Outputs and gradients of batches with different numbers of active tokens, unless a budget fixes it."""
    counts = set()
    for i in range(batches):
        x = torch.randn(3, 40, 16) * (i + 1)
        expected, out = layer(x), compiled(x)
        counts.add(int(expected.routing.active.sum()))
        torch.testing.assert_close(out.y, expected.y, rtol=1e-5, atol=1e-5)
        assert out.routing.active.equal(expected.routing.active)
        wanted, got = gradients(layer, expected.y), gradients(layer, out.y)
        assert len(wanted) == len(got) == len(list(layer.parameters()))
        for one, two in zip(got, wanted, strict=True):
            # an entry may be a small difference of large sums: the largest entry sets the scale
            assert float((one - two).abs().max()) <= 1e-5 * float(two.abs().max())
    assert fixed or len(counts) > 1, "the batches should differ in their number of active tokens"


def check_one_graph(causal: bool, span: str, fixed: bool = False, **settings: Any) -> None:
    layer = make_layer(causal, span, **settings)
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(**dict.fromkeys(CAPTURE, False)):  # type: ignore[arg-type]
        # fullgraph refuses any break at all
        check_training(layer, compile_model(layer, backend=counter, fullgraph=True), fixed=fixed)
    assert counter.frame_count <= 2


SIZES = [(2 + (7 * i) % 5, 3 + 41 * i % 300) for i in range(20)]
"""Twenty different shapes of a batch."""


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_one_graph_serves_every_size(causal: bool) -> None:
    layer = make_layer(causal).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compile_model(layer, backend=counter, fullgraph=True)
    assert len(set(SIZES)) == 20
    for batch, time in SIZES:
        x = torch.randn(batch, time, 16)
        torch.testing.assert_close(compiled(x).y, layer(x).y, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "name", ["language model with n-grams", pytest.param("classifier", marks=pytest.mark.slow)]
)
def test_one_graph_serves_a_model_at_every_size(name: str) -> None:
    """Two layers, since the second one gets what the first one returned; with gradients, as in training.

    Without generated code: what becomes a graph, and for which sizes, is decided before.
    """
    torch.manual_seed(0)
    lm = name != "classifier"
    mixer = SeqBoatConfig(
        init="paper",
        causal=lm,
        norm="layer" if lm else "rms",
        ssm=EMAConfig(d_state=4),
        gau=GAUConfig(d_z=8, window=5, positions="rotary"),
    )
    config = BackboneConfig(mixer=mixer, d_model=16, num_layers=2, vocab=11)
    if lm:
        model: Any = LanguageModel(config)
    else:
        model = Classifier(config, 3)
    counter = CompileCounterWithBackend("eager")
    compiled = compile_model(model, backend=counter, fullgraph=True)
    for batch, time in SIZES:
        ids = torch.randint(0, 11, (batch, time))
        # of a classifier, every sequence has some padding: a mask that hides nothing is another case
        given = (ids,) if lm else (ids, torch.arange(time) < torch.randint(1, time, (batch, 1)))
        torch.testing.assert_close(compiled(*given).logits, model(*given).logits, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


class Outputs(torch.nn.Module):
    """A layer as a function from tensors to tensors, for export."""

    def __init__(self, layer: SeqBoat) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.layer(x).y if state is None else self.layer.step(x, state)[:2]


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_export_with_any_batch_and_length(causal: bool) -> None:
    layer = make_layer(causal).eval()
    sizes = {0: torch.export.Dim("batch", min=2, max=1024), 1: torch.export.Dim("time", min=2, max=1 << 20)}
    program = torch.export.export(Outputs(layer), (torch.randn(3, 40, 16),), dynamic_shapes={"x": sizes})
    for batch, time in SIZES[:6]:
        x = torch.randn(batch, time, 16)
        torch.testing.assert_close(program.module()(x), layer(x).y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"ffn": True}, {"span": "chunk"}], ids=["gau", "two modules", "chunk"]
)
def test_export_of_a_step(settings: dict[str, Any]) -> None:
    layer = make_layer(True, **settings).eval()
    first = layer.init_state(3)
    program = torch.export.export(Outputs(layer), (torch.randn(3, 16), first)).module()
    exported, general = layer.init_state(3), layer.init_state(3)
    active = 0
    for token in torch.randn(30, 3, 16):
        y, exported = program(token, exported)
        expected, general, routing = layer.step(token, general)
        assert routing is not None
        active += int(routing.active.sum())
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert 0 < active < 90 * (1 + ("ffn" in settings)), "some tokens should be active, some not"


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("span", ["memory", "full", "chunk"])
def test_every_span_is_one_graph(causal: bool, span: str) -> None:
    check_one_graph(causal, span)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(
    "settings",
    [
        {"ffn": True},
        {"budget": BudgetConfig(cap=0.3)},
        {"budget": BudgetConfig(target=0.4)},
    ],
    ids=["two modules", "cap", "target"],
)
def test_budgets_and_more_modules_are_one_graph(causal: bool, settings: dict[str, Any]) -> None:
    check_one_graph(causal, "memory", fixed="budget" in settings, **settings)


@pytest.mark.slow
# raised by torch's compiler when it looks at what crosses a break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_with_the_settings_that_torch_comes_with(causal: bool) -> None:
    layer = make_layer(causal)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter)
    check_training(layer, compiled, batches=2)
    graphs = counter.frame_count
    check_training(layer, compiled, batches=4)
    assert counter.frame_count == graphs, "a later batch was compiled again"


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_machine_code(causal: bool) -> None:
    layer = make_layer(causal)
    # stored code of an earlier version of our operators must not answer for them
    with torch._dynamo.config.patch(**CAPTURE), torch._inductor.config.patch(fx_graph_cache=False):
        check_training(layer, torch.compile(layer, fullgraph=True))


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_step_is_one_graph() -> None:
    layer = make_layer(True)
    x, state = torch.randn(3, 9, 16), layer.init_state(3)
    expected, step = layer(x).y, torch.compile(layer.step, backend="aot_eager", fullgraph=True)
    for t in range(9):
        torch.testing.assert_close(step(x[:, t], state).y, expected[:, t], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch, at a break of the graph
@pytest.mark.parametrize("case", [case for case in CASES if case.name.rsplit("-", 1)[0] in MIXERS], ids=str)
def test_every_mixer_is_the_same_compiled(case: Case) -> None:
    """Traced, with its gradients traced as well; without generated code, which would take minutes."""
    mixer = case.make()
    x = torch.randn(3, 22, D_MODEL, dtype=torch.float64, requires_grad=True)
    wanted = [x, *mixer.parameters()]
    expected = mixer(x).y
    gradients = torch.autograd.grad(expected.square().sum(), wanted)
    got = torch.compile(mixer, backend="aot_eager")(x).y
    assert_near(got, expected, 1e-12)
    for one, other in zip(torch.autograd.grad(got.square().sum(), wanted), gradients, strict=True):
        assert_near(one, other, 1e-10)
