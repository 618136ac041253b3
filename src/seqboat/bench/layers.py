"""Time and memory of layers, side by side in one run.

Contenders take turns in every round, so that whatever else the machine does falls on all of them; what is shown
is the median over the rounds with its quartiles, and the ratio to the first contender of the same run. Memory is what
a step needs beyond what was there before it: from CUDA's allocator, or, on the CPU, the peak of the resident set of a
process in which nothing else runs. Before anything large is allocated its memory is estimated from shorter
sequences, and what would not fit is refused.

Two contenders are not mixers: "published" is the paper's algorithm (benchmarks/published.py of the repository), and
"floor" is the bare sum of matrix products that the mathematics of our layer asks for.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.bench.measure import (
    Spread,
    available_memory,
    extra_peak,
    extrapolate,
    human_bytes,
    human_seconds,
    in_child,
    machine,
    spread,
    time_rounds,
)
from seqboat.checks import require
from seqboat.core.routers import AlwaysActive, Router
from seqboat.core.sma import Routing
from seqboat.data.files import replacing
from seqboat.mixers import MIXERS, Mixer, SeqBoat, SeqBoatConfig
from seqboat.mixers.attention.mega import MegaConfig
from seqboat.mixers.base import directions_of
from seqboat.mixers.seqboat.gau import GAU, Positions
from seqboat.mixers.ssm.base import DiagonalSSM
from seqboat.ops.attention import AttentionName
from seqboat.training.config import change_field
from seqboat.training.evaluate import find_checkpoint
from seqboat.training.metrics import iterate_metrics

Mode = Literal["training", "inference"]
MODES: tuple[Mode, ...] = ("training", "inference")

SHORTEST = 32
"""Tokens per row of the shortest sequence from which memory is estimated."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A layer and its batch; the defaults are the paper's Text setting with half of the tokens active."""

    batch: int = 4
    """Rows."""
    length: int = 4096
    """Tokens per row."""
    d_model: int = 128
    """Width."""
    d_z: int = 64
    """Width of queries and keys of gated attention."""
    d_v: int = 256
    """Width of its values."""
    d_state: int = 16
    """States per channel of state-space layers."""
    window: int = 256
    """Working memory."""
    heads: int = 4
    """Heads of multi-head attention."""
    attention: AttentionName = "softmax"
    """Attention function of gated attention."""
    positions: Positions = "compressed"
    """Positions of our attention unit."""
    causal: bool = False
    """One direction or both."""
    prenorm: bool = False
    """Whether norms come first."""
    rate: float | None = 0.5
    """Share of the tokens that routers activate; None for what they decide themselves."""
    dtype: str = "float32"
    """Type of weights and inputs."""
    device: str = "cpu"
    """Where to run."""
    seed: int = 0
    """Of weights and inputs."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "d_model", "d_z", "d_v", "d_state", "window", "heads"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.rate is None or 0 <= self.rate <= 1, f"rate must be between 0 and 1, got {self.rate}")
        require(
            isinstance(getattr(torch, self.dtype, None), torch.dtype),
            f"dtype must be a torch type such as float32, got {self.dtype!r}",
        )

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.batch * self.length


PRESETS = {
    "text": Setting(),
    "enwik8": Setting(
        batch=1, length=8192, d_model=616, d_z=128, d_v=1232, window=1024, heads=11,
        positions="rotary", causal=True, prenorm=True,
    ),
}  # fmt: skip
"""Layers of the paper: LRA's Text, and the language model of enwik8."""


class Contender(NamedTuple):
    """What is measured: a name and the fields of its configuration that differ from the setting's."""

    label: str
    name: str
    overrides: dict[str, Any]
    """by dotted name; d_model is a width of its own instead of the setting's, compiled asks for torch.compile"""


OURS = Contender("seqboat", "seqboat", {})
"""The SeqBoat layer as the setting says."""


def parse_contender(text: str) -> Contender:
    """Read NAME or NAME:FIELD=VALUE,FIELD=VALUE; fields of parts are dotted.

    >>> parse_contender("seqboat:gau.window=32,causal=True").overrides
    {'gau.window': 32, 'causal': True}
    """
    name, _, rest = text.partition(":")
    known = [*MIXERS, "published", "floor"]
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown contender {name!r}{hint} There are: {', '.join(known)}")
    overrides = {}
    for pair in filter(None, rest.split(",")):
        field, equals, value = pair.partition("=")
        require(bool(equals), f"{text}: expected FIELD=VALUE after the colon, got {pair!r}")
        try:
            overrides[field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            overrides[field] = value
    require(not (overrides and name == "floor"), "floor takes no fields: it follows the setting")
    width = overrides.get("d_model", 1)
    require(isinstance(width, int) and width >= 1, f"{text}: d_model must be an integer >= 1, got {width!r}")
    compiled = overrides.get("compiled", False)
    require(isinstance(compiled, bool), f"{text}: compiled must be True or False, got {compiled!r}")
    return Contender(text, name, overrides)


def own_setting(contender: Contender, setting: Setting) -> Setting:
    """The setting of a contender that has a width of its own.

    >>> own_setting(parse_contender("mega:d_model=96"), Setting()).d_model
    96
    """
    return replace(setting, d_model=contender.overrides.get("d_model", setting.d_model))


def configure(contender: Contender, setting: Setting) -> Any:
    """The configuration of a contender under a setting."""
    config = MIXERS["seqboat" if contender.name in ("published", "floor") else contender.name]()
    config = _fit(config, setting)
    for path, value in contender.overrides.items():
        if path in ("d_model", "compiled"):
            continue
        config = change_field(config, path, value, contender.label)
    return config


def _fit(config: Any, setting: Setting) -> Any:
    """Give the fields that mixers share the values of the setting, in all parts of a configuration."""
    shared = {
        "causal": setting.causal,
        "prenorm": setting.prenorm,
        "d_z": setting.d_z,
        "d_v": setting.d_v,
        "d_state": setting.d_state,
        "heads": setting.heads,
        "max_positions": max(setting.length, 2),
    }
    if "bidirectional" not in directions_of(config):
        shared["causal"] = True  # the only direction that it has
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            changes[field.name] = _fit(value, setting)
        elif field.name in shared:
            changes[field.name] = shared[field.name]
        elif field.name == "max_span":
            changes[field.name] = min(value, max(setting.length, 2))
    config = replace(config, **changes)
    if isinstance(config, SeqBoatConfig):
        gau = replace(config.gau, attention=setting.attention, positions=setting.positions)
        if gau.window == SeqBoatConfig().gau.window:  # or else a window of its own is what the form is about
            gau = replace(gau, window=setting.window)
        config = replace(config, gau=gau)
    if isinstance(config, MegaConfig):
        config = replace(config, attention=setting.attention)
    return config


PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published.py"
"""The published algorithm: in the repository of this package, but not in its installation."""


def load_published() -> Any:
    """The class of the published algorithm, from the repository that this package lies in."""
    require(PUBLISHED.is_file(), f"'published' needs the repository of this package: there is no {PUBLISHED}")
    spec = importlib.util.spec_from_file_location("seqboat_published", PUBLISHED)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Published


class ForcedRate(Router):
    """Activates a fixed share of the tokens, picked by chance but always the same ones.

    The probabilities are those of another router, so that its cost and its gradient stay; only its decisions do not
    count.
    """

    def __init__(self, router: Router, rate: float, seed: int = 0) -> None:
        super().__init__(router.d_model, router.modules_count)
        require(0 <= rate <= 1, f"rate must be between 0 and 1, got {rate}")
        self.router, self.rate, self.seed = router, rate, seed
        self._pattern: Tensor | None = None
        self._steps = 0

    def route(self, x: Tensor) -> Routing:
        probs = self.router.route(x).probs
        # one token at a time, as decoding asks
        picked = (
            self._step(x.shape[0]).view(x.shape[:-1]) if x[..., 0].numel() == len(x) else self._sequence(x)
        )
        return Routing(picked.to(x.device)[..., None].expand(probs.shape), probs)

    def _sequence(self, x: Tensor) -> Tensor:
        """(batch, time): in each row the same number of tokens, at places of its own."""
        shape = x.shape[:-1]
        if self._pattern is None or self._pattern.shape != shape or self._pattern.device != x.device:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.rand(shape, generator=generator).argsort(dim=-1).argsort(dim=-1)
            self._pattern = (order < round(self.rate * shape[-1])).to(x.device)
        return self._pattern

    def _step(self, batch: int) -> Tensor:
        """(batch,): evenly over the steps, rows at different times."""
        # the golden section spreads any number of rows evenly
        phases = [row * (math.sqrt(5) - 1) / 2 for row in range(batch)]
        before = self._steps * self.rate
        self._steps += 1
        after = self._steps * self.rate
        # plain numbers: the time of a step should be the layer's, not ours
        return torch.tensor([math.floor(after + phase) > math.floor(before + phase) for phase in phases])


def force_rate(module: nn.Module, rate: float, seed: int = 0) -> None:
    """Replace the routers of a module, those that always activate excepted."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, Router) and not isinstance(child, AlwaysActive | ForcedRate):
                setattr(part, name, ForcedRate(child, rate, seed))


def build(contender: Contender, setting: Setting) -> Mixer:
    """The layer of a contender, with its routers forced if the setting asks for a rate."""
    torch.manual_seed(setting.seed)
    setting = own_setting(contender, setting)
    config = configure(contender, setting)
    layer = load_published()(setting.d_model, config) if contender.name == "published" else None
    layer = layer or config.build(setting.d_model)
    layer = layer.to(setting.device, getattr(torch, setting.dtype))
    if setting.rate is not None:
        force_rate(layer, setting.rate, setting.seed)
    return layer


class Runner(ABC):
    """Something that can be timed in each mode."""

    parameters: int = 0

    @abstractmethod
    def run(self, mode: Mode) -> None:
        """One step."""

    def active(self) -> float | None:
        """The share of tokens that were activated."""
        return None


class LayerRunner(Runner):
    """A layer on random inputs."""

    def __init__(self, contender: Contender, setting: Setting) -> None:
        self.layer = build(contender, setting)
        self.parameters = sum(p.numel() for p in self.layer.parameters())
        self._call = self.layer
        if contender.overrides.get("compiled"):
            from seqboat.models.compile import compile_model  # takes as long to import as torch itself

            # the first call takes up to a minute, which falls into the rounds that do not count
            self._call = compile_model(self.layer)
        self.x = _inputs(own_setting(contender, setting)).requires_grad_()
        self.above = torch.randn_like(self.x)

    def run(self, mode: Mode) -> None:
        if mode == "inference":
            self.layer.eval()
            with torch.no_grad():
                self._call(self.x)
            return
        self.x.grad = None
        self.layer.train().zero_grad(set_to_none=True)
        self._call(self.x).y.backward(self.above)

    def active(self) -> float | None:
        with torch.no_grad():
            routing = self.layer.eval()(self.x).routing
        return None if routing is None else float(routing.active.float().mean())


def _inputs(setting: Setting) -> Tensor:
    generator = torch.Generator().manual_seed(setting.seed)
    shape = (setting.batch, setting.length, setting.d_model)
    return torch.randn(shape, generator=generator).to(setting.device, getattr(torch, setting.dtype))


class Product(NamedTuple):
    """A batch of matrix products (rows x inner) @ (inner x columns)."""

    what: str
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def forward_products(layer: SeqBoat, setting: Setting, active: int) -> list[Product]:
    """The matrix products of one forward pass.

    The state-space layer counts as the products of its block scan (within blocks, into and out of the states);
    attention as the products inside the window alone: `window` + 1 keys per active token (its chunk, or all).
    """
    gau, ssm = layer.sma.units["gau"], layer.ssm
    assert isinstance(gau, GAU) and isinstance(ssm, DiagonalSSM)
    d, tokens = setting.d_model, setting.tokens
    block = min(ssm.block, setting.length)
    blocks, states = -(-tokens // block), ssm.d_state * ssm.directions
    row = active // setting.batch  # each attends among its own tokens
    span = {"memory": gau.left + 1 + gau.right, "chunk": gau.window, "full": row}[gau.config.span]
    keys = max(min(span, row), 1)
    # as many products as in a band of this width, in square-like blocks
    groups = -(-active // keys)
    found = [
        Product("scan: within blocks", d, blocks, block, block),
        Product("scan: into states", d, blocks, block, states),
        Product("scan: out of states", d, blocks, states, block),
        Product("linear", 1, tokens, d, d),
        Product("router", 1, tokens, d, 2),
        Product("gau: base", 1, active, d, gau.d_z + 2 * gau.d_v),
        Product("gau: scores", groups, keys, gau.d_z, keys),
        Product("gau: values", groups, keys, keys, gau.d_v),
        Product("gau: out", 1, active, gau.d_v, d),
    ]
    return [product for product in found if product.flops]


def backward_products(forward: Sequence[Product]) -> list[Product]:
    """For each product, the gradients of its two factors. Scores that are computed again do not count."""
    found = []
    for what, batch, rows, inner, columns in forward:
        found.append(Product(f"{what}, left", batch, rows, columns, inner))
        found.append(Product(f"{what}, right", batch, inner, rows, columns))
    return found


class FloorRunner(Runner):
    """The matrix products of our layer and nothing else, with all operands in place.

    Args:
        setting: of the layer.
        contender: a SeqBoat layer without a feed-forward block; as the setting says by default.
    """

    def __init__(self, setting: Setting, contender: Contender = OURS) -> None:
        setting = own_setting(contender, setting)
        layer = build(contender, setting)
        assert isinstance(layer, SeqBoat)
        rate = 1.0 if isinstance(layer.sma.router, AlwaysActive) else setting.rate
        if rate is None:
            rate = LayerRunner(contender, setting).active() or 0.0
        active = setting.batch * round(rate * setting.length)
        self.forward = forward_products(layer, setting, active)
        self.backward = backward_products(self.forward)
        self._operands: dict[tuple[int, ...], Tensor] = {}
        self._device, self._dtype = setting.device, getattr(torch, setting.dtype)

    def products(self, mode: Mode) -> list[Product]:
        """What is multiplied in a step."""
        return self.forward + self.backward if mode == "training" else self.forward

    def run(self, mode: Mode) -> None:
        for product in self.products(mode):
            self.multiply(product)

    def multiply(self, product: Product) -> None:
        """One batch of products."""
        _, batch, rows, inner, columns = product
        with torch.no_grad():
            left = self._operand(batch, rows, inner, 0)
            right = self._operand(batch, inner, columns, 1)
            torch.bmm(left, right, out=self._operand(batch, rows, columns, 2))

    def _operand(self, batch: int, rows: int, columns: int, role: int) -> Tensor:
        key = (batch, rows, columns, role)
        if key not in self._operands:
            shape = (batch, rows, columns)
            self._operands[key] = torch.randn(shape, device=self._device, dtype=self._dtype)
        return self._operands[key]

    def flops(self, mode: Mode) -> int:
        """Of all products."""
        return sum(product.flops for product in self.products(mode))


def make_runner(contender: Contender, setting: Setting) -> Runner:
    """A contender that is ready to run."""
    return FloorRunner(setting) if contender.name == "floor" else LayerRunner(contender, setting)


class Memory(NamedTuple):
    """Memory of a step, in bytes."""

    estimate: dict[str, int]
    """by mode, from shorter sequences"""
    peak: dict[str, int]
    """by mode, measured; modes that would not fit or take too long are missing"""
    seconds: dict[str, float] = {}  # noqa: RUF012 - never changed
    """by mode, how long a step should take, from shorter sequences"""


def measure_memory(
    contender: Contender,
    setting: Setting,
    modes: Sequence[Mode],
    available: int,
    whole: bool = True,
    slowest: float = math.inf,
) -> Memory:
    """Estimate the memory of each mode, and measure it if it fits.

    Args:
        contender: what to measure.
        setting: of the layer.
        modes: which.
        available: bytes that may be used.
        whole: whether to measure the whole length after the estimate.
        slowest: seconds that a step may take, by its estimate.
    """
    # estimates come from the layer as it is: compiled, every length would have to be compiled anew
    plain = contender._replace(overrides={k: v for k, v in contender.overrides.items() if k != "compiled"})
    # the first call of all loads libraries and starts threads
    tiny = make_runner(plain, replace(setting, length=min(setting.length, SHORTEST), batch=1))
    for mode in modes:
        tiny.run(mode)
    lengths: list[int] = []
    short: dict[str, list[int]] = {mode: [] for mode in modes}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    # an estimate takes three; then twice as long again, while four times the memory is a small part of what there is
    while len(lengths) < 3 or 16 * max(sizes[-1] for sizes in short.values()) < available:
        length = 2 * lengths[-1] if lengths else SHORTEST
        if 4 * length > setting.length:
            break
        lengths.append(length)
        runner = make_runner(plain, replace(setting, length=length))
        for mode in modes:
            job = partial(runner.run, mode)
            short[mode].append(extra_peak(job, setting.device))
            # the better of two: a hiccup in a short step would grow with the square of the length
            times[mode].append(min(time_rounds({mode: job}, 2, 0, setting.device)[mode]))
        del runner
    estimate: dict[str, int] = {
        mode: extrapolate(lengths[-3:], short[mode][-3:], setting.length)
        for mode in modes
        if len(lengths) >= 3
    }
    seconds: dict[str, float] = {
        mode: extrapolate(lengths[-3:], [round(1e9 * t) for t in times[mode][-3:]], setting.length) / 1e9
        for mode in estimate
    }
    fitting = [
        mode for mode in modes if estimate.get(mode, 0) <= available and seconds.get(mode, 0.0) <= slowest
    ]
    peak: dict[str, int] = {}
    if whole and fitting:
        runner = make_runner(contender, setting)
        for mode in fitting:
            if contender.overrides.get("compiled"):
                runner.run(mode)  # the compiler's own memory does not count
            peak[mode] = extra_peak(partial(runner.run, mode), setting.device)
    return Memory(estimate, peak, seconds)


class Row(NamedTuple):
    """One contender in one mode under one setting."""

    contender: str
    mode: str
    batch: int
    length: int
    window: int
    rate: float | None
    """asked for"""
    active: float | None
    """share of the tokens that were activated; None without a router"""
    parameters: int
    seconds: Spread | None
    """None if refused"""
    ratio: float | None
    """of the median to the first contender's"""
    floor_ratio: float | None
    """of the median to that of the matrix products, if they were measured"""
    memory: int | None
    """peak of the step in bytes"""
    memory_ratio: float | None
    """to the first contender's"""
    memory_estimate: int | None
    note: str
    """why it was refused"""


def run_layers(
    contenders: Sequence[Contender],
    settings: Sequence[Setting],
    modes: Sequence[Mode] = MODES,
    *,
    rounds: int = 5,
    warmup: int = 1,
    memory: bool = True,
    slowest: float = math.inf,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Row]:
    """Measure every contender under every setting in every mode.

    Args:
        contenders: the first is what the others are compared with.
        settings: take turns like the contenders, so that ratios between them hold as well.
        modes: training step (forward and backward of the layer), inference (forward alone).
        rounds: that count.
        warmup: rounds before them.
        memory: whether to measure the peak memory.
        slowest: seconds that a step may take; what should take longer, going by shorter sequences, is refused.
        progress: is told what comes next.
    """
    for contender in contenders:
        for setting in settings:
            if contender.name != "floor":
                # mistakes in names and widths show before minutes of measuring
                build(contender, replace(setting, device="cpu", length=min(setting.length, 32)))
    plans = [_plan(contenders, setting, modes, memory, slowest, progress) for setting in settings]
    if not any(plan.runners for plan in plans):
        raise ValueError("nothing fits: " + "; ".join(n for plan in plans for n in plan.refused.values()))
    rows = []
    for mode in modes:
        # settings take turns as well: a machine that slows down must not slow the last length alone
        jobs: dict[tuple[int, str], Callable[[], None]] = {
            (i, label): partial(runner.run, mode)
            for i, plan in enumerate(plans)
            for label, runner in plan.runners.items()
            if (label, mode) not in plan.refused
        }
        progress(f"{mode}: {len(jobs)} contenders and settings in turn, {warmup + rounds} rounds")
        times = {
            key: spread(values)
            for key, values in time_rounds(jobs, rounds, warmup, settings[0].device).items()
        }
        for i, plan in enumerate(plans):
            rows += _rows(contenders, plan, mode, {label: t for (j, label), t in times.items() if j == i})
    order = {setting: i for i, setting in reversed(list(enumerate(settings)))}
    return [row for _, row in sorted(rows, key=lambda pair: order[pair[0]])]


class _Plan(NamedTuple):
    """What runs under a setting, and what is refused."""

    setting: Setting
    memory: dict[str, Memory]
    """by contender"""
    refused: dict[tuple[str, str], str]
    """by contender and mode, why"""
    runners: dict[str, Runner]
    """by contender"""


def _plan(
    contenders: Sequence[Contender],
    setting: Setting,
    modes: Sequence[Mode],
    memory: bool,
    slowest: float,
    progress: Callable[[str], None],
) -> _Plan:
    where = f"{setting.batch} x {setting.length} tokens"
    found: dict[str, Memory] = {}
    refused: dict[tuple[str, str], str] = {}
    for contender in contenders:
        progress(f"{where}: memory of {contender.label}")
        found[contender.label] = _find_memory(contender, setting, modes, memory, slowest)
        for mode in modes:
            need = found[contender.label].estimate.get(mode, 0)
            free = available_memory(setting.device)
            if need > free:
                refused[contender.label, mode] = (
                    f"{contender.label} at {where} would need about {human_bytes(need)} for {mode}, "
                    f"{human_bytes(free)} are available"
                )
            elif (long := found[contender.label].seconds.get(mode, 0.0)) > slowest:
                refused[contender.label, mode] = (
                    f"{contender.label} at {where} would take about {human_seconds(long)} for {mode}, "
                    f"{human_seconds(slowest)} are allowed"
                )
    runners = {
        contender.label: make_runner(contender, setting)
        for contender in contenders
        if any((contender.label, mode) not in refused for mode in modes)
    }
    return _Plan(setting, found, refused, runners)


def _rows(
    contenders: Sequence[Contender], plan: _Plan, mode: Mode, times: Mapping[str, Spread]
) -> list[tuple[Setting, Row]]:
    """The rows of one setting and mode, each with its setting."""
    setting = plan.setting
    floor = next((times.get(c.label) for c in contenders if c.name == "floor"), None)
    first = times.get(contenders[0].label)
    first_peak = plan.memory[contenders[0].label].peak.get(mode)
    rows = []
    for contender in contenders:
        label = contender.label
        seconds, peak = times.get(label), plan.memory[label].peak.get(mode)
        runner = plan.runners.get(label)
        row = Row(
            contender=label,
            mode=mode,
            batch=setting.batch,
            length=setting.length,
            window=setting.window,
            rate=setting.rate,
            active=runner.active() if runner is not None and seconds is not None else None,
            parameters=runner.parameters if runner is not None else 0,
            seconds=seconds,
            ratio=_ratio(seconds, first),
            floor_ratio=_ratio(seconds, floor),
            memory=peak,
            memory_ratio=peak / first_peak if peak and first_peak else None,
            memory_estimate=plan.memory[label].estimate.get(mode),
            note=plan.refused.get((label, mode), ""),
        )
        rows.append((setting, row))
    return rows


def _find_memory(
    contender: Contender, setting: Setting, modes: Sequence[Mode], measure: bool, slowest: float
) -> Memory:
    if contender.name == "floor":
        return Memory({}, {})
    free = available_memory(setting.device)
    # input, output and their gradients are the least that any layer needs
    least = 4 * setting.tokens * setting.d_model * getattr(torch, setting.dtype).itemsize
    if least > free:
        return Memory(dict.fromkeys(modes, least), {})
    if not measure and setting.length < 16 * SHORTEST:
        return Memory({}, {})
    arguments = (contender, setting, modes, free, measure, slowest)
    if setting.device == "cpu":
        return in_child(measure_memory, *arguments)
    return measure_memory(*arguments)


def _ratio(one: Spread | None, other: Spread | None) -> float | None:
    return one.median / other.median if one is not None and other is not None else None


def sweep(
    preset: Setting,
    lengths: Sequence[int],
    windows: Sequence[int],
    rates: Sequence[float | None],
    tokens: int | None,
) -> list[Setting]:
    """Settings of every length, window and rate; the batch shrinks so that the number of tokens stays.

    >>> [(s.batch, s.length) for s in sweep(Setting(), [1024, 16384], [256], [0.5], 16384)]
    [(16, 1024), (1, 16384)]
    """
    return [
        replace(
            preset,
            length=length,
            batch=max(1, tokens // length) if tokens is not None else preset.batch,
            window=window,
            rate=rate,
        )
        for length in lengths
        for window in windows
        for rate in rates
    ]


def recorded_activation(run: Path | str) -> list[float]:
    """Activation rate of every routed layer of a run, as last measured on held-out data for its best checkpoint.

    Args:
        run: the folder of a run, or one checkpoint (step-N) in it.
    """
    checkpoint = find_checkpoint(run)
    found: list[float] = []
    for record in iterate_metrics(checkpoint.path.parent / "metrics.jsonl"):
        if record["split"] not in ("train", "skipped") and record["step"] <= checkpoint.step:
            found = [rate for rate in record["activation"] if rate is not None]
    require(len(found) > 0, f"{run} has no measured activation: no router, or never evaluated")
    return found


def as_record(rows: Sequence[Any], setting: Any, **extra: Any) -> dict[str, Any]:
    """Everything of a run, for a JSON file."""
    return {"machine": machine(), "setting": asdict(setting), **extra, "rows": [_plain(row) for row in rows]}


def _plain(value: Any) -> Any:
    """Named tuples as dictionaries, in all depths."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


_MARKERS = "os^Dv<>PX*"
_DASHES = ("-", "--", ":", "-.")


def swept(rows: Sequence[Row]) -> str:
    """The field of the settings that takes the most values: the axis to draw against."""
    return max(("length", "window", "rate"), key=lambda field: len({getattr(row, field) for row in rows}))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time and memory per step, one line per contender, both axes logarithmic.

    They are drawn against the length, or against the window or the rate of activation if that is what was swept.
    Lines differ in marker and dashes as well as in colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axis = swept(rows)
    places = sorted({getattr(row, axis) for row in rows if getattr(row, axis)})
    words = {"length": "tokens per row", "window": "working memory, tokens", "rate": "share of active tokens"}
    # whatever else was swept makes lines of its own
    others = [f for f in words if f != axis and len({getattr(row, f) for row in rows}) > 1]

    def line(row: Row) -> str:
        return ", ".join([row.contender, *(f"{f} {getattr(row, f)}" for f in others)])

    modes = list(dict.fromkeys(row.mode for row in rows))
    panels: list[tuple[str, Callable[[Row], float]]] = [
        ("seconds per step", lambda row: row.seconds.median if row.seconds is not None else 0.0),
        ("peak memory, MiB", lambda row: (row.memory or 0) / 2**20),
    ]
    # an axis without a single value has no logarithm
    panels = [panel for panel in panels if any(panel[1](row) > 0 for row in rows)]
    figure, axes = pyplot.subplots(
        len(panels), len(modes), figsize=(5.2 * len(modes), 3.5 * len(panels)), squeeze=False, sharex=True,
        layout="constrained",
    )  # fmt: skip
    for i, (quantity, value) in enumerate(panels):
        for j, mode in enumerate(modes):
            for k, label in enumerate(dict.fromkeys(map(line, rows))):
                own = [r for r in rows if line(r) == label and r.mode == mode and value(r) > 0]
                own = sorted((r for r in own if getattr(r, axis)), key=lambda row: float(getattr(row, axis)))
                # an empty line keeps the colours of all panels alike
                style = _MARKERS[k % len(_MARKERS)] + _DASHES[k // len(_MARKERS) % len(_DASHES)]
                axes[i][j].plot(
                    [getattr(r, axis) for r in own], [value(r) for r in own], style, ms=5, label=label
                )
            axes[i][j].set(ylabel=quantity, title=mode if i == 0 else None)
            axes[-1][j].set(xlabel=words[axis])
            if not any(len(drawn.get_xdata()) for drawn in axes[i][j].lines):
                continue  # nothing has no logarithm
            axes[i][j].set(xscale="log", yscale="log")
            axes[i][j].set_xticks(places, [f"{place:,g}" for place in places])
            axes[i][j].xaxis.set_minor_locator(NullLocator())
            axes[i][j].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes[i][j].yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axes[i][j].yaxis.set_minor_formatter(NullFormatter())
            axes[i][j].grid(True, which="both", alpha=0.3)
    axes[0][0].legend(fontsize="small")
    with replacing(path) as stage:
        figure.savefig(stage, format="png", dpi=130)
    pyplot.close(figure)
