"""Where the time of a layer goes: by its parts, by kinds of operations, and against the bare matrix products.

The step and the floor are timed in turn first, as the profiler itself costs time; what it then says is taken as
shares of the step. Every operation belongs to the part of the layer in whose call it ran, and backward operations to
the part whose forward operation they undo.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from seqboat.bench.layers import Contender, FloorRunner, LayerRunner, Mode, Product, Setting
from seqboat.bench.measure import Spread, spread, time_rounds
from seqboat.checks import require
from seqboat.mixers import SeqBoat

PART = "part of the layer: "
REST = "the layer itself"
"""What runs in none of its parts: residual, activation, and maps that are applied without being called."""

CALLS = ("forward", "activate", "after_silu")
"""Methods through which a part is entered."""

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
"""Operations of PyTorch by what they do; in-place forms and leading underscores count alike."""

ELEMENTWISE = "elementwise"
OUTSIDE = "between operations"
"""Python, the dispatcher, autograd's engine, allocation."""

VIEWS = (
    "slice", "select", "as_strided", "view", "transpose", "t", "unsqueeze", "squeeze", "expand", "permute", "detach",
    "empty", "empty_strided", "empty_like", "reshape", "unflatten", "flatten", "unbind", "split", "narrow", "to",
    "resolve_conj", "alias", "lift_fresh", "new_empty", "unsafe_view", "result_type",
)  # fmt: skip
"""Operations that move no numbers: what they cost is the cost of calling them."""


class PartShare(NamedTuple):
    """How much of a step a part of the layer takes."""

    part: str
    forward: float
    backward: float
    """shares of the whole step"""


class KindShare(NamedTuple):
    """How much of a step a kind of operations takes."""

    kind: str
    share: float
    calls: float
    """per step"""


class FloorPart(NamedTuple):
    """The bare matrix products of a part."""

    what: str
    gigaflops: float
    """multiplications and additions, in units of 1e9"""
    seconds: float
    share: float
    """of the whole floor"""


class Profile(NamedTuple):
    """Where the time of a step goes."""

    contender: str
    mode: str
    seconds: Spread
    floor_seconds: Spread | None
    """of the matrix products that the layer cannot do without; None where we do not know them"""
    floor_ratio: float | None
    parts: list[PartShare]
    kinds: list[KindShare]
    floor: list[FloorPart]


def run_profile(
    contenders: Sequence[Contender],
    setting: Setting,
    modes: Sequence[Mode],
    *,
    rounds: int = 5,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Profile]:
    """Profile single layers.

    Args:
        contenders: layers; the floor is known of SeqBoat layers without a feed-forward block.
        setting: of the layers.
        modes: training step, inference.
        rounds: steps that are timed, and as many that are profiled.
        warmup: steps before them.
        progress: is told what comes next.
    """
    require(
        all(c.name != "floor" for c in contenders), "floor is what layers are compared with: leave it out"
    )
    for contender in contenders:
        require(
            not contender.overrides.get("compiled"),
            f"{contender.label}: compiled layers have no parts to profile",
        )
    found = []
    for contender in contenders:
        runner = LayerRunner(contender, setting)
        known = isinstance(runner.layer, SeqBoat) and not runner.layer.config.ffn
        floor = FloorRunner(setting, contender) if known else None
        for mode in modes:
            progress(f"{contender.label}, {mode}: {warmup + rounds} steps timed, {rounds} profiled")
            found.append(_profile(contender, runner, floor, mode, setting, rounds, warmup))
    return found


def _profile(
    contender: Contender,
    runner: LayerRunner,
    floor: FloorRunner | None,
    mode: Mode,
    setting: Setting,
    rounds: int,
    warmup: int,
) -> Profile:
    jobs: dict[str, Callable[[], Any]] = {"layer": partial(runner.run, mode)}
    products: list[Product] = []
    if floor is not None:
        jobs["floor"] = partial(floor.run, mode)
        products = floor.products(mode)
        jobs |= {f"{i}": partial(floor.multiply, product) for i, product in enumerate(products)}
    times = {key: spread(values) for key, values in time_rounds(jobs, rounds, warmup, setting.device).items()}
    events = profiled_events(runner, mode, rounds)
    on_device = setting.device.startswith("cuda")
    return Profile(
        contender=contender.label,
        mode=mode,
        seconds=times["layer"],
        floor_seconds=times.get("floor"),
        floor_ratio=times["layer"].median / times["floor"].median if floor is not None else None,
        parts=part_shares(events, on_device),
        kinds=kind_shares(events, rounds, on_device),
        floor=_floor_parts(products, [times[f"{i}"].median for i in range(len(products))]),
    )


def profiled_events(runner: LayerRunner, mode: Mode, steps: int) -> Sequence[FunctionEvent]:
    """What the profiler saw in so many steps."""
    activities = [ProfilerActivity.CPU]
    if runner.x.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with _marked(runner.layer), profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            runner.run(mode)
    return list(profiler.events() or [])


@contextmanager
def _marked(layer: nn.Module) -> Iterator[None]:
    """Calls of the parts of a layer leave a mark in the profile, in the block."""
    changed = []
    for name, part in layer.named_modules():
        # parts, and parts of what only holds others
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
    """The innermost part in whose call an event lies."""
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


def part_shares(events: Sequence[FunctionEvent], on_device: bool = False) -> list[PartShare]:
    """Shares by part of the layer, the largest first."""
    # autograd numbers its nodes: the last operation that saw a number is the one that made the node
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
    shares = [
        PartShare(part, forward[part] / whole, backward[part] / whole)
        for part in dict.fromkeys([*forward, *backward])
    ]
    return sorted(shares, key=lambda share: -(share.forward + share.backward))


def _is_backward(event: FunctionEvent) -> bool:
    return event.name.startswith("autograd::engine::evaluate_function")


def kind_of(name: str) -> str:
    """The kind of an operation by the name that the profiler gives it.

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


def kind_shares(events: Sequence[FunctionEvent], steps: int, on_device: bool = False) -> list[KindShare]:
    """Shares by kind of operation, the largest first."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in events:
        kind = kind_of(event.name)
        seconds[kind] += _own_time(event, on_device)
        calls[kind] += 1
    whole = sum(seconds.values()) or 1.0
    shares = [KindShare(kind, seconds[kind] / whole, calls[kind] / steps) for kind in seconds]
    return sorted(shares, key=lambda share: -share.share)


def _floor_parts(products: Sequence[Product], seconds: Sequence[float]) -> list[FloorPart]:
    """The products by what they belong to: forward and both gradients together."""
    whole = math.fsum(seconds) or 1.0
    names = dict.fromkeys(product.what.split(",")[0] for product in products)
    found = []
    for name in names:
        own = [i for i, product in enumerate(products) if product.what.split(",")[0] == name]
        flops, took = sum(products[i].flops for i in own), math.fsum(seconds[i] for i in own)
        found.append(FloorPart(name, flops / 1e9, took, took / whole))
    return found
