"""`seqboat doctor`: is everything computed correctly on this machine, and how fast?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from seqboat.cli.parser import Size


def run(*, device: str | None = None, length: Size = 1024, json: Path | None = None) -> int:
    """Check that everything computes correctly on this machine, and how fast.

    Args:
        device: cpu, cuda or cuda:N (default: the GPU if there is one).
        length: tokens of a sequence in the bench; 0 skips it.
        json: write all results, for bug reports: no names, no paths.
    """
    import torch

    from seqboat.core.checks import check_output
    from seqboat.data.files import write_json
    from seqboat.doctor import anonymous, bench, check_contract, describe_machine, examine

    if json is not None:
        check_output("--json", json)
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    machine = describe_machine(place)
    for line in machine_lines(machine):
        print(line)
    print("\noperations against their obvious form in float64 on the CPU, relative RMS errors")
    findings = examine(place, print)
    wrong = sorted({found.wrong for found in findings if found.wrong is not None})
    print("\ncontract of a layer")
    contract = check_contract(place)
    for name, problem in contract.items():
        print(f"{name:<18} {'ok' if problem is None else f'WRONG: {problem}'}")
    broken = [name for name, problem in contract.items() if problem is not None]
    speeds: dict[str, float] = {}
    if length:
        speeds = bench(place, length)
        print(f"\ntraining step of one layer of width 128, sequences of {length:,} tokens")
        for name, taken in speeds.items():
            if name != "tokens":
                print(f"{name:<22} {1e3 * taken:8.1f} ms  {speeds['tokens'] / taken:12,.0f} tokens/s")
    if json is not None:
        record = {
            **machine,
            "operations": [found.as_record() for found in findings],
            "contract": contract,
            "bench_seconds": speeds,
            "bench_length": length,
            "wrong": [*wrong, *broken],
        }
        write_json(json, anonymous(record), indent=2)
    for name in [*wrong, *broken]:
        print(f"seqboat doctor: {name} is wrong on this machine", file=sys.stderr)
    if not wrong and not broken:
        print("\nno problem found")
    return 1 if wrong or broken else 0


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """The machine in a few lines."""
    lines = [", ".join(f"{name} {version}" for name, version in machine["versions"].items())]
    memory = f", {machine['memory_gb']} GB" if "memory_gb" in machine else ""
    lines.append(f"{machine['system']}, {machine['processor']}, {machine['threads']} threads")
    if not machine["bf16"]:
        lines.append(
            "warning: this virtual machine hides the size of its tiles (AMX), which PyTorch needs: "
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
        )
    lines.append(f"device {machine['device']}{memory}")
    lines.append("\nkernels")
    for operation, about in machine["kernels"].items():
        known = about["implementations"].items()
        others = "".join(f"; {name} {state}" for name, state in known if name not in ("torch", "reference"))
        lines.append(f"{operation:<18} {about['chosen']:<7} torch{others}")
    return lines
