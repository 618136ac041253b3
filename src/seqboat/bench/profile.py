"""Where the time of a layer goes: by part, by kind of operation, and relative to its matmul lower bound.

The step and its matmul lower bound are first timed without the profiler, which costs time itself; its numbers are
then used as fractions of the step. An operation belongs to the part of the layer whose call it ran in, and a backward
operation to the part of its forward operation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from seqboat.bench.candidates import LOWER_BOUND, Candidate
from seqboat.bench.measure import Quartiles, human_seconds, quartiles, time_rounds
from seqboat.bench.runners import LayerRunner, LowerBoundRunner
from seqboat.bench.setting import LayerSetting, Mode
from seqboat.bench.tables import Column, print_machine, print_table, ratio_text
from seqboat.core.checks import require
from seqboat.mixers import SeqBoat
from seqboat.models.cost import Product

if TYPE_CHECKING:
    from rich.console import Console

PART = "part of the layer: "
REST = "the layer itself"
"""What runs outside its parts: residual, activation, and linear maps applied without calling the module."""

CALLS = ("forward", "activate", "after_silu")
"""Methods of a part that are marked in the profile."""

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear"),
    "copies and fills": ("copy", "fill", "zero", "cat", "flip", "clone", "constant_pad_nd", "unfold_backward"),
    "gathering and scattering": (
        "index", "index_select", "index_add", "index_put", "gather", "scatter", "scatter_add", "nonzero",
    ),
    "norms, softmax, sums": (
        "native_layer_norm", "native_layer_norm_backward", "softmax", "softmax_backward_data", "sum", "mean",
        "linalg_vecdot", "linalg_vector_norm", "amax", "any", "cumsum", "cumprod",
    ),
}  # fmt: skip
"""PyTorch operations by kind; in-place variants and leading underscores are ignored."""

ELEMENTWISE = "elementwise"
OUTSIDE = "between operations"
"""Python, the dispatcher, autograd's engine, allocation."""

VIEWS = (
    "slice", "select", "as_strided", "view", "transpose", "t", "unsqueeze", "squeeze", "expand", "permute", "detach",
    "empty", "empty_strided", "empty_like", "reshape", "unflatten", "flatten", "unbind", "split", "narrow", "to",
    "resolve_conj", "alias", "lift_fresh", "new_empty", "unsafe_view", "result_type",
)  # fmt: skip
"""Operations that move no data: they cost only the call."""


class PartTime(NamedTuple):
    """The time of a part of the layer."""

    part: str
    forward: float
    backward: float
    """fractions of the whole step"""


class KindTime(NamedTuple):
    """The time of a kind of operation."""

    kind: str
    fraction: float
    calls: float
    """per step"""


class ProductTime(NamedTuple):
    """The matrix products of a part, timed alone."""

    what: str
    gigaflops: float
    """GFLOPs: multiplications and additions"""
    seconds: float
    fraction: float
    """fraction of the whole lower bound"""


class Profile(NamedTuple):
    """Where the time of a step goes."""

    candidate: str
    mode: str
    seconds: Quartiles
    lower_bound_seconds: Quartiles | None
    """matmul lower bound; None if it is not known"""
    lower_bound_ratio: float | None
    parts: list[PartTime]
    kinds: list[KindTime]
    products: list[ProductTime]


PART_COLUMNS = (
    Column("part", lambda row: row.part),
    Column("forward", lambda row: f"{row.forward:.1%}"),
    Column("backward", lambda row: f"{row.backward:.1%}"),
    Column("together", lambda row: f"{row.forward + row.backward:.1%}"),
)
KIND_COLUMNS = (
    Column("kind", lambda row: row.kind),
    Column("calls", lambda row: f"{row.calls:.0f}"),
    Column("fraction", lambda row: f"{row.fraction:.1%}"),
)
PRODUCT_COLUMNS = (
    Column("product", lambda row: row.what),
    Column("GFLOP", lambda row: f"{row.gigaflops:.2f}"),
    Column("time", lambda row: human_seconds(row.seconds)),
    Column("GFLOP/s", lambda row: f"{row.gigaflops / row.seconds:.0f}"),
    Column("fraction", lambda row: f"{row.fraction:.1%}"),
)


def print_profiles(console: Console, profiles: Sequence[Profile], setting: LayerSetting) -> None:
    """Print three tables per layer and mode: parts, kinds of operations, the matmul lower bound."""
    print_machine(console)
    for found in profiles:
        step = "training step" if found.mode == "training" else found.mode
        line = f"{found.candidate}, {step}, {setting.where}: {human_seconds(found.seconds.median)}"
        if found.lower_bound_seconds is not None:
            bound = human_seconds(found.lower_bound_seconds.median)
            line += f", {ratio_text(found.lower_bound_ratio)} the matmul lower bound ({bound})"
        console.print(f"\n{line}", highlight=False, soft_wrap=True)
        print_table(console, "by part", PART_COLUMNS, found.parts)
        print_table(console, "by kind of operation", KIND_COLUMNS, found.kinds)
        if found.products:
            print_table(console, "matmul lower bound: each product alone", PRODUCT_COLUMNS, found.products)


def run_profile(
    candidates: Sequence[Candidate],
    setting: LayerSetting,
    modes: Sequence[Mode],
    *,
    rounds: int = 5,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Profile]:
    """Profile single layers.

    Args:
        candidates: layers; only SeqBoat layers without a feed-forward block have a known lower bound.
        setting: of the layers.
        modes: training step, inference.
        rounds: number of steps to time, and to profile after that.
        warmup: untimed steps before them.
        progress: called with a description of the next step.
    """
    require(
        all(c.name != LOWER_BOUND for c in candidates),
        f"layers are always compared with the {LOWER_BOUND}: leave it out",
    )
    for candidate in candidates:
        require(
            not candidate.overrides.get("compiled"),
            f"{candidate.label}: compiled layers have no parts to profile",
        )
    found = []
    for candidate in candidates:
        runner = LayerRunner(candidate, setting)
        known = isinstance(runner.layer, SeqBoat) and not runner.layer.config.ffn
        bound = LowerBoundRunner(setting, candidate) if known else None
        for mode in modes:
            progress(f"{candidate.label}, {mode}: {warmup + rounds} steps timed, {rounds} profiled")
            found.append(_profile(candidate, runner, bound, mode, setting, rounds, warmup))
    return found


def _profile(
    candidate: Candidate,
    runner: LayerRunner,
    bound: LowerBoundRunner | None,
    mode: Mode,
    setting: LayerSetting,
    rounds: int,
    warmup: int,
) -> Profile:
    jobs: dict[str, Callable[[], Any]] = {"layer": partial(runner.run, mode)}
    products: list[Product] = []
    if bound is not None:
        jobs["bound"] = partial(bound.run, mode)
        products = bound.products(mode)
        jobs |= {f"{i}": partial(bound.multiply, product) for i, product in enumerate(products)}
    times = {
        key: quartiles(values) for key, values in time_rounds(jobs, rounds, warmup, setting.device).items()
    }
    events = profiled_events(runner, mode, rounds)
    on_device = setting.device.startswith("cuda")
    return Profile(
        candidate=candidate.label,
        mode=mode,
        seconds=times["layer"],
        lower_bound_seconds=times.get("bound"),
        lower_bound_ratio=times["layer"].median / times["bound"].median if bound is not None else None,
        parts=part_times(events, on_device),
        kinds=kind_times(events, rounds, on_device),
        products=_product_times(products, [times[f"{i}"].median for i in range(len(products))]),
    )


def profiled_events(runner: LayerRunner, mode: Mode, steps: int) -> Sequence[FunctionEvent]:
    """The profiler's events over some steps."""
    activities = [ProfilerActivity.CPU]
    if runner.x.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with _marked(runner.layer), profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            runner.run(mode)
    return list(profiler.events() or [])


@contextmanager
def _marked(layer: nn.Module) -> Iterator[None]:
    """Mark the calls of a layer's parts in the profile, inside a `with` block."""
    changed = []
    for name, part in layer.named_modules():
        # children; of containers, their children
        if not name or isinstance(part, nn.ModuleList | nn.ModuleDict):
            continue
        for call in CALLS:
            if hasattr(part, call) and call not in vars(part):
                setattr(part, call, _marking(getattr(part, call), name))
                changed.append((part, call))
    try:
        yield
    finally:
        for part, call in changed:
            delattr(part, call)


def _marking(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def marked(*arguments: Any, **named: Any) -> Any:
        with record_function(PART + name):
            return call(*arguments, **named)

    return marked


def _own_time(event: FunctionEvent, on_device: bool) -> float:
    return float(event.self_device_time_total if on_device else event.self_cpu_time_total)


def _part_of(event: FunctionEvent) -> str | None:
    """The innermost part whose call contains an event."""
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith(PART):
            return above.name.removeprefix(PART)
        above = above.cpu_parent
    return None


def _outermost(event: FunctionEvent) -> FunctionEvent:
    while event.cpu_parent is not None:
        event = event.cpu_parent
    return event


def part_times(events: Sequence[FunctionEvent], on_device: bool = False) -> list[PartTime]:
    """Fractions by part of the layer, the largest first."""
    # autograd numbers its nodes: the last operation with a number created that node
    maker: dict[tuple[int, int], str] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and not _is_backward(_outermost(event)):
            maker[event.sequence_nr, event.thread] = _part_of(event) or REST
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    for event in events:
        outer = _outermost(event)
        if _is_backward(outer):
            known = maker.get((outer.sequence_nr, outer.fwd_thread or 0), REST)
            backward[known] += _own_time(event, on_device)
        else:
            forward[_part_of(event) or REST] += _own_time(event, on_device)
    whole = sum(forward.values()) + sum(backward.values()) or 1.0
    found = [
        PartTime(part, forward[part] / whole, backward[part] / whole)
        for part in dict.fromkeys([*forward, *backward])
    ]
    return sorted(found, key=lambda time: -(time.forward + time.backward))


def _is_backward(event: FunctionEvent) -> bool:
    return event.name.startswith("autograd::engine::evaluate_function")


def kind_of(name: str) -> str:
    """The kind of an operation, given its name in the profile.

    >>> kind_of("aten::baddbmm_"), kind_of("aten::_softmax"), kind_of("aten::silu"), kind_of("aten::slice")
    ('matrix products', 'norms, softmax, sums', 'elementwise', 'between operations')
    """
    space, _, operation = name.rpartition("::")
    if space != "aten":
        return OUTSIDE
    plain = operation.strip("_")
    if plain in VIEWS:
        return OUTSIDE
    return next((kind for kind, names in KINDS.items() if plain in names), ELEMENTWISE)


def kind_times(events: Sequence[FunctionEvent], steps: int, on_device: bool = False) -> list[KindTime]:
    """Fractions by kind of operation, the largest first."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in events:
        kind = kind_of(event.name)
        seconds[kind] += _own_time(event, on_device)
        calls[kind] += 1
    whole = sum(seconds.values()) or 1.0
    found = [KindTime(kind, seconds[kind] / whole, calls[kind] / steps) for kind in seconds]
    return sorted(found, key=lambda time: -time.fraction)


def _product_times(products: Sequence[Product], seconds: Sequence[float]) -> list[ProductTime]:
    """The products summed by name: forward and both gradients together."""
    whole = math.fsum(seconds) or 1.0
    names = dict.fromkeys(product.what.split(",")[0] for product in products)
    found = []
    for name in names:
        own = [i for i, product in enumerate(products) if product.what.split(",")[0] == name]
        flops, took = sum(products[i].flops for i in own), math.fsum(seconds[i] for i in own)
        found.append(ProductTime(name, flops / 1e9, took, took / whole))
    return found
