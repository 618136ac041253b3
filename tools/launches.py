"""Kernel launches and memory traffic of a training step of one layer, before and after the Triton kernels.

    TRITON_INTERPRET=1 python tools/launches.py --page docs/gpu.md

Counted on the CPU: a dispatch mode sees every operator that a GPU would launch a kernel for (views and allocations
launch none), takes the branches that the code takes on a GPU, and adds up the bytes of all operands and results.
Triton kernels stand in as one launch each and are not run. Caches are ignored: every operand is read from memory
once per launch. Needs Triton (`make launches` has an environment with it).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pages import replace_part
from seqboat import SeqBoat, SeqBoatConfig, using_kernels
from seqboat.inference.base import Token
from seqboat.inference.device import DeviceSeqBoat
from seqboat.inference.lean import LeanSeqBoat, lean_layer
from seqboat.layers.gau import GAU
from seqboat.layers.packing import Routing
from seqboat.layers.policy import Policy
from seqboat.layers.seqboat import SeqBoatState
from seqboat.ops import band
from seqboat.ops.kernels.registry import IMPLEMENTATIONS
from seqboat.ops.kernels.tuning import Launch, recording
from seqboat.recipes.enwik8 import enwik8
from seqboat.recipes.lra import text

ACTIVE = 0.3
"""Fraction of active tokens."""

FREE = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach", "lift_fresh"} | {
    "promote_types", "scalar_tensor", "_unsafe_view"
}  # fmt: skip
"""Operators that launch nothing, besides views; a number in an expression becomes a tensor on the host."""


class Step(NamedTuple):
    """One launch."""

    name: str
    bytes: int
    """read and written"""
    flops: int
    """of matrix products and scans; other operations are bound by memory"""
    narrow: bool = False
    """whether the operands of a matrix product are bf16"""


class Cost(NamedTuple):
    """What a training step needs."""

    steps: list[Step]
    tokens: int
    waits: int
    """times the host waits for the device"""

    @property
    def launches(self) -> int:
        return len(self.steps)

    @property
    def bytes(self) -> float:
        """Bytes per token."""
        return sum(step.bytes for step in self.steps) / self.tokens


class Count(TorchDispatchMode):
    """Counts operators that launch a kernel, and the bytes they move."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = function.name().split("::")
        if namespace == "seqboat":
            # our own operators are chains of others: look inside
            with self:
                return OPDEFS[f"seqboat::{name.partition('.')[0]}"]._init_fn(*args, **kwargs)
        result = function(*args, **kwargs)
        short = name.partition(".")[0]
        # the host has to know how many there are
        self.waits += short in ("_local_scalar_dense", "item", "nonzero")
        if short not in ("_local_scalar_dense", "item") and not function.is_view and short not in FREE:
            operands = list(
                {id(part): part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}.values()
            )
            results = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
            count = flop_registry.get(function.overloadpacket)
            flops = 0 if count is None else count(*args, **kwargs, out_val=result)
            narrow = any(part.dtype == torch.bfloat16 for part in operands)
            self.steps.append(Step(short, _moved(short, operands, results), flops, narrow))
        return result


def _moved(name: str, operands: list[Tensor], results: list[Tensor]) -> int:
    """Bytes that an operator reads and writes."""
    if name in ("new_zeros", "zeros_like", "ones_like", "new_ones", "fill_", "zero_", "bernoulli_"):
        operands = []  # gives the shape, and is not read
    elif name == "copy_":
        operands = operands[1:]
    elif name == "index_select":
        operands = [operands[1], *results]  # reads the rows that it takes
    elif name == "index_add_":
        operands, results = (
            [*operands[1:], operands[2]],
            [operands[2]],
        )  # reads and writes the rows that it adds to
    return sum(_stored(part) * part.element_size() for part in (*operands, *results))


def _stored(x: Tensor) -> int:
    """Numbers in memory behind a tensor: those that are repeated by a stride of zero count once."""
    size = 1
    for count, stride in zip(x.shape, x.stride(), strict=True):
        size *= count if stride else min(count, 1)
    return size


def _dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    return torch.native_dropout(x, rate, True)[0] if training else x


@contextmanager
def deciding(active: Tensor) -> Iterator[None]:
    """Replace what the router decides, not what it computes: kernels that are only recorded decide nothing."""

    def forward(self: Policy, x: Tensor, *rest: Any) -> Routing:
        wanted = rest[4] if len(rest) > 4 else None
        return Routing(active[..., None], (self.router(x) if wanted is None else wanted).probs)

    with patch.object(Policy, "forward", forward):
        yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Take the branches of the code that a GPU takes."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(band, "on_cpu", lambda x: False))
        # on a CPU, dropout is a chain of three operators
        stack.enter_context(patch.object(torch.nn.functional, "dropout", _dropout))
        yield


def text_layer() -> tuple[int, SeqBoatConfig]:
    """Width and configuration of the paper's Text layer, with its kernel whole instead of cut at 1,024 taps."""
    return _whole(text().model)


def enwik8_layer() -> tuple[int, SeqBoatConfig]:
    """Those of its enwik8 layer, with its kernel whole instead of cut at 2,048 taps."""
    return _whole(enwik8().model)


def _whole(model: Any) -> tuple[int, SeqBoatConfig]:
    config = model.mixer
    return model.d_model, replace(config, ssm=replace(config.ssm, truncation=None), init="scaled")


LAYERS = {"Text": (text_layer, 4, 4096), "enwik8": (enwik8_layer, 1, 4096)}
"""Layer, batch and tokens per sequence."""


def count(layer: SeqBoat, batch: int, time: int, triton: bool, dtype: torch.dtype | None) -> Cost:
    """Count a step: forward, and backward to all parameters and the input."""
    torch.manual_seed(0)
    layer.zero_grad()  # sums with earlier gradients would count as well
    x = torch.randn(batch, time, layer.d_model, requires_grad=True)
    active = torch.rand(batch, time) < ACTIVE
    grad = torch.ones(batch, time, layer.d_model)
    launches: list[Launch] = []
    mode = Count()
    with ExitStack() as stack:
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(deciding(active))
        if triton:
            stack.enter_context(using_kernels("triton"))
            stack.enter_context(recording(launches))
        if dtype is not None:
            stack.enter_context(torch.autocast("cpu", dtype))
        stack.enter_context(mode)
        layer(x).y.backward(grad)
    steps = mode.steps + [
        Step(
            f"triton {launch.kernel.__name__}",
            launch.bytes,
            flops_of(launch),
            # the first operand of every kernel that multiplies matrices, but for gradients of scores
            torch.bfloat16 in launch.arguments[:2] and "left" in launch.kernel.arg_names,
        )
        for launch in launches
    ]
    return Cost(steps, batch * time, mode.waits)


def count_step(layer: SeqBoat, active: bool) -> Cost:
    """Count one step of decoding, of one sequence whose memory is full."""
    layer.eval()
    mode = Count()
    state = full_memory(layer)
    flags = torch.full((1, 1), active)
    x = torch.randn(1, layer.d_model)
    with torch.no_grad(), as_on_a_gpu(), deciding(flags):
        # what depends on weights alone is kept
        state = layer.step(x, state).state
        with mode:
            layer.step(x, state)
    return Cost(mode.steps, 1, mode.waits)


def full_memory(layer: SeqBoat) -> SeqBoatState:
    """A state whose memory has no place left."""
    with torch.no_grad(), as_on_a_gpu(), layer.sma.override(active=True):
        state: SeqBoatState = layer(torch.randn(1, layer.config.gau.window + 1, layer.d_model)).state
    return state


def count_lean_step(layer: SeqBoat, active: bool) -> Cost:
    """The same for the lean step in torch."""
    made = lean_layer(layer.eval(), 1)
    assert isinstance(made, LeanSeqBoat) and made.folded is not None
    made.put(0, full_memory(layer), 0)
    made.folded.border = [-math.inf if active else math.inf]
    x, mode = torch.randn(1, layer.d_model), Count()
    seen = [layer.config.gau.window + 1]

    def tolist(self: Tensor) -> Any:
        mode.waits += 1
        return with_numbers(self)

    with_numbers = Tensor.tolist
    with torch.no_grad():
        made(x, Token(seen, x.dtype, x.device))
        with patch.object(Tensor, "tolist", tolist), mode:
            made(x, Token(seen, x.dtype, x.device))
    return Cost(mode.steps, 1, mode.waits)


def count_kernel_step(layer: SeqBoat, active: bool) -> Cost:
    """The same for the kernels, which are the same launches for an inactive token but read less."""
    from seqboat.ops.kernels.triton_decode.launch import decode

    gau = layer.eval().sma.units["gau"]
    assert isinstance(gau, GAU)
    launches: list[Launch] = []
    mode = Count()
    with torch.no_grad():
        step = DeviceSeqBoat(layer, gau, IMPLEMENTATIONS["decode"][0], 1).step
        x = torch.randn(1, layer.d_model)
        with recording(launches), mode:
            decode(step, x)
    # in float32: weights, biases and outputs of the attention's products
    unread = {
        "project": step.base.numel() + 2 * step.base_bias.numel(),
        "leave": step.out.numel() + step.out_bias.numel() + step.values.shape[2],
    }
    steps = []
    for launch in launches:
        name, size = launch.kernel.__name__, launch.bytes
        if not active:
            size = 0 if name in ("score", "recall") else size - 4 * unread.get(name, 0)
        steps.append(Step(f"triton {name}", size, 0))
    return Cost(mode.steps + steps, 1, mode.waits)


def decode_table() -> str:
    """A Markdown table of one step of decoding of the enwik8 layer."""
    torch.manual_seed(0)
    d_model, config = enwik8_layer()
    layer = SeqBoat(d_model, config)
    lines = ["| step | token | launches | MB | waits |", "|---|---|---|---|---|"]
    counts = {
        "general, torch": count_step,
        "lean, torch": count_lean_step,
        "lean, triton": count_kernel_step,
    }
    for name, number in counts.items():
        for active in (True, False):
            found = number(layer, active)
            lines.append(
                f"| {name} | {'active' if active else 'inactive'} | {found.launches} | "
                f"{found.bytes / 1e6:.1f} | {found.waits} |"
            )
    return "\n".join(lines)


def flops_of(launch: Launch) -> int:
    """Operations of a Triton kernel: products of the band, or walks over all states.

    A walk is counted by its instructions, two operations each, as a GPU's peak counts a fused multiply and add: a
    token of a walk takes three per state (input, decay, sum), reading or summing a state one more each.
    """
    name, values = launch.kernel.__name__, dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    if "left" in values and name != "table_by_step":
        window = values["left"] + values["right"] + 1
        tokens = values.get("tokens") or values["end_key"]
        if name == "products_by_key":
            return 2 * (values["end_key"] - values["begin_key"]) * window * values["width"]
        # scores, and sums of values; backward scores twice, their gradients, and those of queries
        each = values["d_z"] + values["d_v"] if name == "attend" else 3 * values["d_z"] + values["d_v"]
        return 2 * tokens * window * each if "d_z" in values else 0
    if "chunks" in values and name != "carry_states":
        parts = launch.sizes["PARTS"]
        instructions = {
            "local_states": 5 if launch.sizes.get("TANGENT") else 3,
            "final_states": 0,
            "outputs": 4,
            "input_gradients": 5,
            "parameter_gradients": 7,
        }
        directions = 2 if launch.sizes.get("BIDIRECTIONAL") else 1
        if "SPLITS" in launch.sizes:
            directions = launch.programs[2] // launch.sizes["SPLITS"]
        batch = launch.programs[0] // values["chunks"]
        return (
            2
            * instructions[name]
            * parts**2
            * directions
            * batch
            * values["time"]
            * values["dim"]
            * values["states"]
        )
    return 0


@cache
def cost_of(name: str, triton: bool, dtype: torch.dtype | None) -> Cost:
    """The count of one of LAYERS."""
    make, batch, time = LAYERS[name]
    d_model, config = make()
    return count(SeqBoat(d_model, config), batch, time, triton, dtype)


def table() -> str:
    """A Markdown table of all layers."""
    lines = [
        "| layer | type | implementation | launches | KB per token | launches, ratio | bytes, ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in LAYERS:
        first = cost_of(name, False, None)
        for dtype in (None, torch.bfloat16):
            for triton in (False, True):
                found = cost_of(name, triton, dtype)
                lines.append(
                    f"| {name} | {'float32' if dtype is None else 'bf16 autocast'} | "
                    f"{'triton' if triton else 'torch'} | {found.launches} | {found.bytes / 1e3:.1f} | "
                    f"{found.launches / first.launches:.2f}x | {found.bytes / first.bytes:.2f}x |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, help="document whose table to replace")
    parser.add_argument("--operators", action="store_true", help="list what the Text layer launches")
    parser.add_argument(
        "--autocast", action="store_const", const=torch.bfloat16, help="count under bf16 autocast"
    )
    parser.add_argument(
        "--decode", action="store_true", help="count a step of decoding of the enwik8 layer instead"
    )
    arguments = parser.parse_args()
    if arguments.operators:
        d_model, config = text_layer()
        for triton in (False, True):
            found = count(SeqBoat(d_model, config), 4, 4096, triton, arguments.autocast)
            print(f"{found.launches} launches, {found.bytes / 1e3:.1f} KB per token, {found.waits} waits")
            number, moved = Counter(step.name for step in found.steps), Counter[str]()
            for step in found.steps:
                moved[step.name] += step.bytes
            for name, size in moved.most_common():
                print(f"  {number[name]:4} {name:28} {size / found.tokens:9.0f} bytes per token")
        return
    made = decode_table() if arguments.decode else table()
    print(made)
    if arguments.page:
        replace_part(arguments.page, "decode" if arguments.decode else "launches", made)


if __name__ == "__main__":
    main()
