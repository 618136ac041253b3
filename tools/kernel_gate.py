"""Compile every Triton kernel in every configuration for GPUs that are not here, and table what each needs.

    python tools/kernel_gate.py --page docs/gpu.md

Needs Triton (`make kernel-gate` has an environment with it) and no GPU. The kernels are those that the layers of the
paper launch, forward and backward, with and without padding, carried states and autocast; they are recorded
from real calls. A configuration fails if it needs more shared memory than the device has, or more than 128 bytes of
stack per thread: registers that do not suffice are kept in memory, which slows a kernel down many times.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pages import replace_part
from seqboat.ops.kernels.tuning import Config, Launch, configs_of, recording

STACK = 128
"""Bytes of stack per thread that a kernel may use."""


class Device(NamedTuple):
    """A GPU to compile for."""

    name: str
    target: GPUTarget
    shared: int
    """bytes of shared memory that a program may use"""


DEVICES = (
    Device("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024),
    Device("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),
    Device("sm_120", GPUTarget("cuda", 120, 32), 99 * 1024),
    Device("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),
)

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


class Measured(NamedTuple):
    """What one compiled kernel needs."""

    kernel: str
    config: Config
    device: str
    registers: int
    stack: int
    shared: int
    seconds: float


def signature(launch: Launch, config: Config) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types of the run-time arguments, values of the compile-time ones, and what is known of the former."""
    names = launch.kernel.arg_names
    types, constants, attributes = {}, {}, {}
    sizes = {**config.sizes, **launch.sizes}
    for place, name in enumerate(names):
        if name in sizes:
            types[name], constants[name] = "constexpr", sizes[name]
            continue
        value = launch.arguments[place]
        if value is None:
            types[name], constants[name] = "constexpr", None
        elif isinstance(value, torch.dtype):
            types[name] = TYPES[value]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if value % 16 == 0 and value:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def build(launch: Launch, config: Config, device: Device) -> Measured:
    """Compile one kernel, and read what it needs from the result."""
    begin = time.monotonic()
    types, constants, attributes = signature(launch, config)
    constexprs = {(launch.kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(launch.kernel, types, constexprs, attributes)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    compiled = triton.compile(source, target=device.target, options=options)
    took = time.monotonic() - begin
    registers, stack = usage(compiled)
    name = launch.kernel.__name__
    return Measured(name, config, device.name, registers, stack, compiled.metadata.shared, took)


def usage(compiled: Any) -> tuple[int, int]:
    """Registers and bytes of stack per thread of a compiled kernel."""
    if "cubin" in compiled.asm:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            told = subprocess.run(
                [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", told)
        assert found is not None, told
        return int(found[1]), int(found[2])
    text = compiled.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    stack = re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)
    assert registers is not None and stack is not None
    return int(registers[1]), int(stack[1])


def unique(launches: list[Launch]) -> list[Launch]:
    """Launches that differ in what is compiled."""
    kept = {}
    for launch in launches:
        arguments = tuple(
            value if not isinstance(value, int) else (value % 16 == 0, value == 1)
            for value in launch.arguments
        )
        kept[launch.kernel.__name__, arguments, tuple(sorted(launch.sizes.items()))] = launch
    return list(kept.values())


def record_scans() -> list[Launch]:
    """The scans of the paper's layers: MD-EMA with 16 states, S4D with 32 complex ones, S5 with one."""
    from seqboat.ops.kernels.triton_scan_launch import Inputs, scan, scan_backward

    launches: list[Launch] = []
    with recording(launches):
        for states, dtype in ((16, torch.float32), (32, torch.complex64), (1, torch.complex64)):
            for directions in (1, 2) if states > 1 else (1,):
                coefficient = torch.zeros(directions, 128, states, dtype=dtype)
                x, skip = torch.zeros(2, 4096, 128), torch.zeros(128)
                width = states * (2 if dtype.is_complex else 1)
                start = torch.zeros(2, 128, width) if directions == 1 else None
                lengths = torch.zeros(2, dtype=torch.int64)
                inputs = Inputs(x, coefficient, coefficient, coefficient, skip, start, lengths)
                _, final = scan(inputs, True)
                scan_backward(x, final, inputs, True)
    return launches


def record_attention() -> list[Launch]:
    """Attention of the paper's Text and enwik8 layers, and of both kinds of positions, in three types."""
    from seqboat.ops.band import Neighbors
    from seqboat.ops.kernels.triton_band_launch import attention, attention_backward

    launches: list[Launch] = []
    tokens = 4096
    group = torch.zeros(tokens, dtype=torch.int64)
    layers = [
        # d_z, d_v, left, right, entries of the table, positions, function
        (64, 256, 128, 128, 257, None, "softmax"),
        (128, 1232, 1024, 0, None, None, "softmax"),
        (128, 1232, 1024, 0, 8191, group, "relu2"),
        (64, 256, 128, 128, 8191, group, "laplace"),
    ]
    with recording(launches):
        for d_z, d_v, left, right, entries, position, function in layers:
            table = None if entries is None else torch.zeros(entries)
            near = Neighbors(group, position, table, left, right, function, 0.1)
            for dtype in (torch.float32, torch.bfloat16):
                q, v = torch.zeros(tokens, d_z, dtype=dtype), torch.zeros(tokens, d_v, dtype=dtype)
                attention_backward(v, attention(q, q, v, near), q, q, v, near)
    return launches


def record_pointwise() -> list[Launch]:
    """Coefficients, gates and norms of the Text and enwik8 layers."""
    from seqboat.ops.kernels import triton_pointwise_launch as pointwise

    launches: list[Launch] = []
    with recording(launches):
        parts: list[Any] = [*(torch.zeros(2, 128, 16) for _ in range(4)), 0.25]
        made = pointwise.ema_coefficients(*parts)
        pointwise.ema_coefficients_backward(list(made), *parts)
        for d_z, d_v, rotary, dtype in ((64, 256, False, torch.float32), (128, 1232, True, torch.bfloat16)):
            before, gamma = torch.zeros(4096, d_z + 2 * d_v, dtype=dtype), torch.zeros(2, d_z)
            position = torch.zeros(4096, dtype=torch.int64) if rotary else None
            opened = pointwise.open_gates(before, gamma, gamma, position)
            pointwise.open_gates_backward(list(opened), before, gamma, gamma, position)
        for width, weight, bias in ((128, torch.zeros(()), None), (616, torch.zeros(616), torch.zeros(616))):
            x = torch.zeros(4096, width)
            y = pointwise.norm(x, weight, bias, 1e-5, True)
            pointwise.norm_backward([y], x, weight, bias, 1e-5, True)
    return launches


def record_joins() -> list[Launch]:
    """Router and residual sum of the Text and enwik8 layers."""
    from seqboat.ops.kernels import triton_pointwise_launch as joins

    launches: list[Launch] = []
    with recording(launches):
        for dim, dtype in ((128, torch.float32), (128, torch.bfloat16), (616, torch.bfloat16)):
            x, keep = torch.zeros(4096, dim), torch.zeros(4096, dim, dtype=torch.bool)
            router = torch.zeros(2, dim), torch.zeros(2), torch.zeros(1)
            hidden, probs, active = joins.route(x, keep, 0.1, *router, dtype)
            joins.route_backward([hidden, probs], x, keep, 0.1, *router, dtype)
            for base in (x, None):
                places = torch.zeros(4096, dtype=torch.int32)
                parts = hidden, torch.zeros(dim), base, hidden[:1024], probs, active, places
                grad = joins.scatter(*parts, torch.float32)
                joins.scatter_backward([grad], *parts, torch.float32)
    return launches


def record_decoding() -> list[Launch]:
    """A step of the enwik8 layer, and of layers with other kernels, positions, functions and norms."""
    from launches import enwik8_layer
    from seqboat import EMAConfig, GAUConfig, S4DConfig, SeqBoat, SeqBoatConfig
    from seqboat.inference.device import DeviceSeqBoat
    from seqboat.layers.gau import GAU
    from seqboat.ops.kernels.registry import IMPLEMENTATIONS
    from seqboat.ops.kernels.triton_decode.launch import decode

    width, enwik8 = enwik8_layer()
    chunk = GAUConfig(window=128, span="chunk", positions="original", attention="relu2")
    memory = GAUConfig(window=256, positions="compressed", attention="laplace")
    layers = [
        (width, enwik8),
        (width, replace(enwik8, ssm=EMAConfig(truncation=2048), norm="rms")),
        (256, SeqBoatConfig(causal=True, gau=chunk, ssm=S4DConfig(d_state=64), norm="batch")),
        (128, SeqBoatConfig(causal=True, gau=memory, norm="scale")),
    ]
    launches: list[Launch] = []
    (found,) = IMPLEMENTATIONS["decode"]
    with recording(launches), torch.no_grad():
        for dim, config in layers:
            for dtype in (torch.float32, torch.bfloat16):
                layer = SeqBoat(dim, config).to(dtype)
                gau = layer.sma.units["gau"]
                assert isinstance(gau, GAU)
                step = DeviceSeqBoat(layer, gau, found, 2).step
                decode(step, torch.zeros(2, dim, dtype=dtype))
    return launches


RECORDS = (record_scans, record_attention, record_pointwise, record_joins, record_decoding)


def table(results: list[Measured]) -> str:
    """The largest needs of each kernel and configuration, over all calls, per device."""
    cells: dict[tuple[str, str], dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for found in results:
        sizes = ", ".join(f"{name.lower()} {size}" for name, size in found.config.sizes.items())
        key = found.kernel, f"{sizes}{', ' if sizes else ''}{found.config.warps} warps"
        cells[key][found.device].append(found)
    names = [device.name for device in DEVICES]
    lines = [f"| kernel | configuration | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for (kernel, config), by_device in sorted(cells.items()):
        row = []
        for name in names:
            several = by_device[name]
            if not several:
                row.append("-")
                continue
            most = [max(getattr(one, what) for one in several) for what in ("registers", "stack", "shared")]
            row.append(f"{most[0]} / {most[1]} / {most[2] / 1024:.0f} KB")
        lines.append(f"| `{kernel}` | {config} | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, help="document whose table to replace")
    parser.add_argument(
        "--only", default="", help="parts of kernels' names, with commas; others keep their rows"
    )
    parser.add_argument("--devices", default=",".join(device.name for device in DEVICES))
    arguments = parser.parse_args()
    launches = unique([launch for make in RECORDS for launch in make()])
    jobs = [
        (launch, config, device)
        for launch in launches
        for device in DEVICES
        for config in configs_of(
            launch.kernel, launch.arguments, launch.sizes, device.target.backend == "hip"
        )
        if device.name in arguments.devices.split(",")
        and any(part in launch.kernel.__name__ for part in arguments.only.split(","))
    ]
    results = []
    failed = 0
    for launch, config, device in jobs:
        found = build(launch, config, device)
        results.append(found)
        bad = found.stack > STACK or found.shared > device.shared
        failed += bad
        print(
            f"{found.kernel:20} {device.name:7} {config.sizes} w{config.warps}: {found.registers} registers, "
            f"{found.stack} stack, {found.shared} shared, {found.seconds:.1f} s{' FAILS' if bad else ''}  "
            f"{launch.sizes if bad else ''}",
            flush=True,
        )
    kernels = len({found.kernel for found in results})
    by = f"{kernels} kernels by Triton {triton.__version__}"
    summary = f"{len(results)} compilations of {by}, {failed} above a limit."
    print(summary)
    if arguments.page:
        rows = table(results).splitlines()
        made = {row.split("`")[1] for row in rows[2:]}
        kept = [
            row
            for row in arguments.page.read_text(encoding="utf-8").splitlines()
            if row.startswith("| `")
            and row.count("|") == rows[0].count("|")
            and row.split("`")[1] not in made
        ]
        if arguments.only and kept:
            summary += " Rows of other kernels are of an earlier run."
            rows[2:] = sorted(rows[2:] + kept)
        replace_part(arguments.page, "compiled", "\n".join([summary, "", *rows]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
