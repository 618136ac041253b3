"""Compress and extract, the packed form, and modules that run on their active tokens alone."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqboat.core.layout import Layout
from seqboat.core.mixer import Routing
from seqboat.core.state import tensors
from seqboat.layers.adapters import MixerUnit, PaddedUnit
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import AlwaysActive, Router, SigmoidRouter, TemperedSoftmax, XMoE
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.layers.sma import Combine, Packed, PackedModule, SparseModularActivation, compress, extract, pack
from seqboat.mixers.transformer import TransformerConfig


def decisions(batch: int, time: int, rate: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, time, generator=generator) < rate


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (4, 0), (0, 4)], ids=str)
def test_extract_undoes_compress(shape: tuple[int, int], rate: float) -> None:
    active = decisions(*shape, rate)
    x = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    packed, slot = compress(x, active)
    longest = int(active.sum(dim=1).max()) if active.numel() else 0
    assert packed.shape == (shape[0], longest, 5)
    back = extract(packed, slot)
    assert back.equal(torch.where(active[..., None], x, 0))
    weight = torch.randn_like(back)
    (back * weight).sum().backward()
    assert x.grad is not None and x.grad.equal(torch.where(active[..., None], weight, 0))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (4, 0), (0, 4)], ids=str)
def test_packed_form_is_the_padded_form_without_its_padding(shape: tuple[int, int], rate: float) -> None:
    active = decisions(*shape, rate)
    x = torch.randn(*shape, 5, dtype=torch.float64)
    packed = pack(active)
    padded, slot = compress(x, active)
    tokens = packed.take(x)
    assert tokens.equal(x[active])
    assert tokens.equal(padded[packed.row, packed.slot])
    assert packed.slot.equal(slot[active])
    assert packed.offsets.diff().equal(active.sum(dim=1)) and packed.offsets[0] == 0
    rows, positions = active.nonzero(as_tuple=True)
    assert packed.row.equal(rows) and packed.position.equal(positions)
    base = torch.randn_like(x)
    assert packed.add(base, tokens).equal(base + extract(padded, slot))


def test_packed_positions_continue() -> None:
    active = decisions(3, 9, 0.5)
    seen = torch.tensor([5, 0, 7])
    whole, later = pack(active), pack(active, seen)
    assert later.position.equal(whole.position + seen[whole.row])
    assert later.flat.equal(whole.flat) and later.slot.equal(whole.slot)


def test_packed_gradients() -> None:
    active = decisions(2, 5, 0.5)
    packed = pack(active)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(packed.flat), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packed.take, x)
    assert torch.autograd.gradcheck(packed.add, (x, y))
    assert torch.autograd.gradcheck(lambda x: extract(*compress(x, active)), x)


def test_confidence_is_kept_where_active() -> None:
    routing = Routing(torch.tensor([True, False, True]), torch.tensor([0.75, 0.4, 1.0]))
    assert routing.confidence.tolist() == [0.75, 0.0, 1.0]


def spread(router: Router) -> Router:
    """Make the decisions of a router varied and float64."""
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    return router.double()


@pytest.mark.parametrize("router_class", [TemperedSoftmax, SigmoidRouter, XMoE, AlwaysActive])
def test_modules_equal_a_naive_loop(router_class: type[Router]) -> None:
    torch.manual_seed(0)
    units = {
        "wide": nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 6)),
        "gau": GAUConfig(d_z=4, d_v=8, span="full").build(6, causal=False),
        "narrow": nn.Linear(6, 6),
    }
    sma = SparseModularActivation(units, 6, spread(router_class(6, 3))).double()
    x = torch.randn(3, 11, 6, dtype=torch.float64)
    y, state, routing = sma(x)
    assert state is None and routing is not None
    expected = torch.zeros_like(x)
    for row in range(3):
        for i, unit in enumerate(units.values()):
            places = [t for t in range(11) if routing.active[row, t, i]]
            if not places:
                continue
            tokens = x[row, places]
            if i == 1:
                out, _ = unit(tokens, pack(routing.active[row : row + 1, :, i]))
            else:
                out = unit(tokens)
            for place, token in zip(places, out, strict=True):
                expected[row, place] += routing.probs[row, place, i] * token
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert routing.active.any()


class RunningSum(PackedModule):
    """A user's own contextual module: the sum of all active tokens of a row, through a matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, tokens: Tensor, packed: Packed, state: None = None) -> Tensor:
        batch = len(packed.offsets) - 1
        sums = tokens.new_zeros(batch, tokens.shape[1]).index_add(0, packed.row, tokens)
        return self.linear(tokens + sums[packed.row])


class Convolution(nn.Module):
    """A convolution over time, (batch, time, width) in and out; pads left in front if causal."""

    def __init__(self, width: int, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.inner = nn.Conv1d(width, width, 3, padding=2 if causal else 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return y[:, : x.shape[1]]


def attend(module: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    # a row without a real token would have nothing to attend to
    hidden = ~real & real.any(dim=1, keepdim=True)
    y: Tensor = module(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    return y


WIDTH = 6
UNITS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "ffn": lambda: nn.Sequential(nn.Linear(WIDTH, 15), nn.GELU(), nn.Linear(15, WIDTH)),
    "gau": lambda: GAUConfig(d_z=4, d_v=8, window=4, max_positions=8).build(WIDTH, causal=False),
    "own": lambda: RunningSum(WIDTH),
    "conv": lambda: PaddedUnit(Convolution(WIDTH)),
    "attention": lambda: PaddedUnit(nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend),
    "block": lambda: MixerUnit(TransformerConfig(heads=1, d_ff=8, positions="rotary").build(WIDTH)),
}
"""Modules that have little in common."""


def alone(unit: nn.Module, tokens: Tensor, places: list[int]) -> Tensor:
    """What a module makes of the active tokens (tokens, width) of one sequence, without any packing of a batch."""
    if isinstance(unit, PaddedUnit) and isinstance(unit.module, Convolution):
        y: Tensor = unit.module(tokens[None])[0]
        return y
    if isinstance(unit, PaddedUnit):
        y = unit.module(tokens[None], tokens[None], tokens[None], need_weights=False)[0][0]
        return y
    if isinstance(unit, MixerUnit):
        changed: Tensor = unit.mixer(tokens[None]).y[0] - tokens
        return changed
    if isinstance(unit, RunningSum):
        y = unit.linear(tokens + tokens.sum(dim=0))
        return y
    if isinstance(unit, PackedModule):
        active = torch.zeros(1, max(places) + 1, dtype=torch.bool)
        active[0, places] = True
        return unit(tokens, pack(active))[0]
    y = unit(tokens)
    return y


def loop(x: Tensor, routing: Routing, units: list[nn.Module], weights: Tensor) -> Tensor:
    """The formula of section 3.2, one row and one module at a time."""
    rows = []
    for row in range(x.shape[0]):
        y = 0 * x[row]
        for i, unit in enumerate(units):
            places = [t for t in range(x.shape[1]) if routing.active[row, t, i]]
            if places:
                out = alone(unit, x[row, places], places)
                for place, token in zip(places, out, strict=True):
                    y = y + torch.stack(
                        [weights[row, t, i] * token if t == place else 0 * token for t in range(x.shape[1])]
                    )
        rows.append(y)
    return torch.stack(rows)


class Planned(SigmoidRouter):
    """A sigmoid whose decisions are given."""

    plan: Tensor

    def route(self, x: Tensor) -> Routing:
        return Routing(self.plan, super().route(x).probs)


PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda r: r < 0.4,
    "none": lambda r: r < 0,
    "all": lambda r: r < 2,
    "one-module": lambda r: (r < 0.5) & (torch.arange(r.shape[2]) == r.shape[2] - 1),
    "one-row": lambda r: (r < 0.5) & (torch.arange(r.shape[0]) == 1)[:, None, None],
    "one-token": lambda r: r == r.max(),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "names",
    [
        ["attention"],
        ["own"],
        ["conv", "linear"],
        ["gau", "ffn"],
        ["ffn", "attention", "block"],
        ["linear", "gau", "conv", "own"],
        ["block", "attention", "gau", "ffn"],
    ],
    ids="-".join,
)
def test_outputs_and_gradients_equal_the_loop(names: list[str], pattern: str) -> None:
    torch.manual_seed(len(names))
    router = Planned(WIDTH, len(names))
    sma = SparseModularActivation({name: UNITS[name]() for name in names}, router=router).double()
    nn.init.normal_(router.logits.weight)
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    router.plan = PATTERNS[pattern](torch.rand(3, 7, len(names)))
    out = sma(x)
    expected = loop(x, out.routing, list(sma.units.values()), router(x).probs)
    torch.testing.assert_close(out.y, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(x)
    wanted = [x, *sma.parameters()]
    ours = torch.autograd.grad((out.y * weight).sum(), wanted)
    theirs = torch.autograd.grad((expected * weight).sum(), wanted, allow_unused=True, materialize_grads=True)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)


def _causal_attention(module: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    y: Tensor = module(x, x, x, attn_mask=later, need_weights=False)[0]
    return y


CAUSAL_UNITS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: PaddedUnit(Convolution(WIDTH, causal=True), causal=True, context=2, d_model=WIDTH),
    "conv-all": lambda: PaddedUnit(Convolution(WIDTH, causal=True), causal=True, d_model=WIDTH),
    "attention": lambda: PaddedUnit(
        nn.MultiheadAttention(WIDTH, 2, batch_first=True), _causal_attention, causal=True, d_model=WIDTH
    ),
    "token": lambda: PaddedUnit(nn.Linear(WIDTH, WIDTH), causal=True, context=0, d_model=WIDTH),
    "block": lambda: MixerUnit(TransformerConfig(heads=1, d_ff=8, causal=True).build(WIDTH)),
    "layer": lambda: MixerUnit(
        SeqBoatConfig(init="paper", gau=GAUConfig(d_z=4, window=3), causal=True).build(WIDTH), change=False
    ),
    "gau": lambda: GAUConfig(d_z=4, d_v=8, window=4, max_positions=8).build(WIDTH, causal=True),
    "ffn": UNITS["ffn"],
}


@pytest.mark.parametrize(
    "names", [["conv", "ffn"], ["attention", "conv-all"], ["block", "gau", "token"], ["layer"]], ids="-".join
)
def test_units_go_on_where_they_stopped(names: list[str]) -> None:
    torch.manual_seed(0)
    units = {name: CAUSAL_UNITS[name]() for name in names}
    sma = SparseModularActivation(units, WIDTH, spread(SigmoidRouter(WIDTH, len(names)))).double().eval()
    assert sma.causal
    x = torch.randn(3, 19, WIDTH, dtype=torch.float64)
    mask = torch.arange(19) < torch.tensor([[19], [11], [0]])
    whole = sma(x, Layout(mask))
    for cuts in ([0, 7, 7, 8, 19], list(range(20))):
        state, outputs = None, []
        for start, end in itertools.pairwise(cuts):
            y, state, _ = sma(x[:, start:end], Layout(mask[:, start:end]), state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole.y, rtol=0, atol=1e-10)
    whole, state = sma(x), sma.init_state(3)
    for t in range(19):
        torch.testing.assert_close(sma.step(x[:, t], state).y, whole.y[:, t], rtol=0, atol=1e-10)
    for (name, one), (_, two) in zip(tensors(state), tensors(whole.state), strict=True):
        one = one[tuple(slice(0, size) for size in two.shape)]  # memories that grow have spare places
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10, msg=name)
    other = x.clone()
    other[:, 12:] = 5.0
    torch.testing.assert_close(sma(other).y[:, :12], sma(x).y[:, :12], rtol=0, atol=1e-10)


def test_a_unit_that_returns_another_shape() -> None:
    unit = PaddedUnit(nn.Linear(WIDTH, 2 * WIDTH))
    sma = SparseModularActivation(unit, WIDTH, AlwaysActive(WIDTH))
    with pytest.raises(
        ValueError, match=r"Linear must return \(batch, slots, dim\) = \(2, 3, 6\), got \(2, 3, 12\)"
    ):
        sma(torch.randn(2, 3, WIDTH))


@pytest.mark.parametrize("combine", ["sum", "average"])
def test_what_outputs_are_multiplied_by(combine: Combine) -> None:
    torch.manual_seed(0)
    router = Planned(WIDTH, 3)
    units = {name: UNITS[name]() for name in ("linear", "ffn", "own")}
    sma = SparseModularActivation(units, router=router, combine=combine)
    sma = sma.double()
    nn.init.normal_(router.logits.weight)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    router.plan = torch.rand(2, 7, 3) < 0.5
    out = sma(x)
    probs = router(x).probs
    weights = torch.where(router.plan, probs, 0)
    if combine == "average":
        weights = weights / torch.where(router.plan.any(-1), weights.sum(-1), 1)[..., None]
    expected = loop(x, out.routing, list(units.values()), weights)
    torch.testing.assert_close(out.y, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(x)
    for one, two in zip(
        torch.autograd.grad((out.y * weight).sum(), [x, *sma.parameters()]),
        torch.autograd.grad((expected * weight).sum(), [x, *sma.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)


def test_one_module_and_base() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 6)
    sma = SparseModularActivation(linear, 6, spread(SigmoidRouter(6))).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    out = sma(x)
    assert out.state is not None and out.state.modules == (None,) and out.state.seen.tolist() == [9, 9]
    torch.testing.assert_close(out.y, out.routing.confidence * linear(x), rtol=0, atol=1e-12)
    base = torch.randn_like(x)
    torch.testing.assert_close(sma(x, base=base).y, base + out.y, rtol=0, atol=1e-12)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    masked = sma(x, Layout(mask), base=base)
    torch.testing.assert_close(masked.y[mask], (base + out.y)[mask], rtol=0, atol=1e-12)
    torch.testing.assert_close(masked.y[~mask], base[~mask], rtol=0, atol=0)
    assert not masked.routing.active[~mask].any()


@pytest.mark.parametrize("bias", [-1e3, 1e3], ids=["none", "all"])
def test_none_or_all_active(bias: float) -> None:
    torch.manual_seed(0)
    ffn = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    router = SigmoidRouter(6)
    nn.init.constant_(router.logits.bias, bias)
    sma = SparseModularActivation({"ffn": ffn}, 6, router).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    y = sma(x).y
    torch.testing.assert_close(y, ffn(x) if bias > 0 else torch.zeros_like(x), rtol=0, atol=1e-12)
    y.sum().backward()
    for name, parameter in sma.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_gradient_reaches_the_router_only_through_the_confidence() -> None:
    torch.manual_seed(0)
    linear, router = nn.Linear(6, 6), SigmoidRouter(6)
    sma = SparseModularActivation(linear, 6, spread(router)).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    out = sma(x)
    weight = torch.randn_like(out.y)
    (out.y * weight).sum().backward()
    # the gradient of a probability is weight . f(x) on active tokens and zero on the others
    probs = out.routing.probs.detach()
    through = torch.where(out.routing.active, (weight * linear(x)).sum(-1, keepdim=True), 0)
    slope = through * probs * (1 - probs)
    expected = torch.einsum("btm,btd->md", slope, x)
    torch.testing.assert_close(router.logits.weight.grad, expected.detach())


FOUR = ("linear", "ffn", "gau", "attention")
SILENT: list[dict[str, bool]] = [
    {"ffn": False, "gau": False},
    dict.fromkeys(FOUR, False),
    {},
    {"attention": False},
]
"""What the second process does not activate, step by step."""


def four_modules() -> SparseModularActivation:
    torch.manual_seed(0)
    return SparseModularActivation({name: UNITS[name]() for name in FOUR}, WIDTH, start_active=False).double()


def part(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 8, WIDTH, generator=generator, dtype=torch.float64)


def play(rank: int, folder: str) -> None:
    """What each of two processes does."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sma = four_modules()
    copies = nn.parallel.DistributedDataParallel(sma)
    optimizer = torch.optim.SGD(sma.parameters(), lr=0.1)
    for step, silent in enumerate(SILENT):
        optimizer.zero_grad()
        with sma.override(active=silent if rank else None):
            copies(part(step, rank)).y.square().sum().backward()
        optimizer.step()
    torch.save(sma.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_of_which_one_activates_no_token_of_a_module(tmp_path: Path) -> None:
    script = "import sys, test_sma; test_sma.play(int(sys.argv[1]), sys.argv[2])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    assert [process.wait(timeout=400) for process in processes] == [0, 0]
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    # one process that sees both parts
    sma = four_modules()
    optimizer = torch.optim.SGD(sma.parameters(), lr=0.1)
    for step, silent in enumerate(SILENT):
        optimizer.zero_grad()
        for rank in range(2):
            with sma.override(active=silent if rank else None):
                (sma(part(step, rank)).y.square().sum() / 2).backward()
        optimizer.step()
    for name, value in sma.state_dict().items():
        assert one[name].equal(two[name]), name
        torch.testing.assert_close(one[name], value, rtol=0, atol=1e-10)


def test_errors() -> None:
    linear = nn.Linear(6, 6)
    with pytest.raises(ValueError, match="modules must hold at least one module, got none"):
        SparseModularActivation({}, 6)
    with pytest.raises(ValueError, match=r"router decides for 2 modules of width 6, but there are 1 modules"):
        SparseModularActivation(linear, 6, SigmoidRouter(6, 2))
    with pytest.raises(ValueError, match=r"of width 5, but there are 1 modules of width 6"):
        SparseModularActivation(linear, 6, SigmoidRouter(5))
    sma = SparseModularActivation(linear, 6)
    x = torch.randn(2, 3, 6)
    with pytest.raises(ValueError, match=r"base must have the shape of x, \(2, 3, 6\), got \(2, 3, 1\)"):
        sma(x, base=torch.randn(2, 3, 1))
    with pytest.raises(ValueError, match="with a base, mask must be None or a Layout"):
        sma(x, torch.ones(2, 3, dtype=torch.bool), base=x)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, time, 6\), got \(2, 6\)"):
        sma(x[:, 0])
    with pytest.raises(ValueError, match=r"(?i)module 'module' must return .*\(.*, 6\), got"):
        SparseModularActivation(nn.Linear(6, 1), 6, AlwaysActive(6))(x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 8), (0, 0, 8), (2, 0, 8)])
@pytest.mark.parametrize("unit", ["mixer", "padded"])
def test_units_take_empty_batches(unit: str, shape: tuple[int, ...], causal: bool) -> None:
    mixer = SeqBoatConfig(init="paper", causal=causal).build(8)
    module: nn.Module = MixerUnit(mixer)
    if unit == "padded":
        module = PaddedUnit(nn.Identity(), causal=causal, d_model=8)
    sparse = SparseModularActivation({"unit": module}, 8)
    x = torch.randn(shape, requires_grad=True)
    out = sparse(x)
    assert out.y.shape == shape
    out.y.sum().backward()
    assert all(parameter.grad is not None for parameter in sparse.parameters())
    if causal:
        assert sparse.step(torch.randn(shape[0], 8), out.state).y.shape == (shape[0], 8)


def test_another_router_decides_once_it_is_set() -> None:
    sma = SparseModularActivation({"linear": nn.Linear(4, 4)}, 4)
    sma.router = AlwaysActive(4, 1)
    for layer in (sma, copy.deepcopy(sma)):
        routing = layer(torch.randn(2, 5, 4)).routing
        assert routing is not None and routing.active.all()
