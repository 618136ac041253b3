"""Which implementation computes the two heavy operations: torch, or Triton kernels where they are chosen.

    use_kernels("triton")                     both operations
    use_kernels("triton", operation="scan")   one of them
    SEQBOAT_KERNELS=triton seqboat train ...  the same from outside; "triton,scan=torch" leaves out the scan
    kernels()                                 what is available, what was chosen, what ran

A choice is a wish: a call that the kernels do not fit runs in torch. If a kernel fails, its operation is left to
torch with a warning. Triton is imported when a kernel first runs. Hot paths look into CHOSEN before anything else.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seqboat.core.checks import check_choice

KernelChoice = Literal["torch", "triton"]
CHOICES: tuple[str, ...] = get_args(KernelChoice)
VARIABLE = "SEQBOAT_KERNELS"
"""Environment variable that makes the first choices: a name for both operations, or `operation=name`, with commas."""
OPERATIONS = {"scan": "diagonal state-space scan", "attention": "banded attention on packed tokens"}
"""Operations with kernels, each with its gradients, and what they compute."""

CHOSEN: set[str] = set()
"""Operations for which kernels are chosen."""
DISABLED: dict[str, str] = {}
"""Operations that are left to torch for the rest of the process, and why."""
REFUSED: dict[str, str] = {}
"""The last reason for running torch instead, by operation."""
RAN: Counter[str] = Counter()
"""How often each kernel ran."""


def interprets() -> bool:
    """Whether Triton kernels run in the interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@cache
def missing() -> str | None:
    """Why Triton kernels cannot run here; None if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    return None if interprets() or torch.cuda.is_available() else "no GPU, and TRITON_INTERPRET=1 is not set"


def refuse(x: Tensor, states: int = 0, d_z: int = 0, dropout: float = 0.0) -> str | None:
    """Why the kernels do not fit a call; None if they do.

    Args:
        x: an input.
        states: real numbers per channel of a scan.
        d_z: width of queries and keys.
        dropout: of attention weights.
    """
    if x.device.type != "cuda" and not (x.device.type == "cpu" and interprets()):
        return f"no Triton kernels for {x.device.type} tensors"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no Triton kernels for {str(x.dtype).removeprefix('torch.')}"
    if states > 64:
        return f"{states} states per channel, at most 64 fit into registers"
    if d_z > 256:
        return f"queries of width {d_z}, at most 256 fit into shared memory"
    return "attention dropout" if dropout else None


def attempt(operation: str, function: str, x: Tensor, *arguments: Any, **sizes: Any) -> Any:
    """What a kernel computes instead of torch; None if torch should.

    Args:
        operation: one of OPERATIONS.
        function: module and function in this package.
        x: an input, whose device and type decide whether the kernel fits.
        arguments: of the function.
        sizes: what else decides that, as in `refuse`.
    """
    if operation not in CHOSEN:
        return None
    reason = DISABLED.get(operation) or missing() or refuse(x, **sizes)
    if reason is not None:
        REFUSED[operation] = reason
        return None
    try:
        result = _load(function)(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        DISABLED[operation] = f"failed: {type(error).__name__}: {error}"
        message = f"triton {DISABLED[operation]}; {operation} runs in torch from now on"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    RAN[function.rpartition(":")[2]] += 1
    return result


@cache
def _load(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"{__name__}.{module}"), name)
    return found


def kernels() -> dict[str, dict[str, Any]]:
    """What computes each heavy operation here: what is available and why not, what was chosen, and why torch ran."""
    found = {}
    for operation, computes in OPERATIONS.items():
        reason = DISABLED.get(operation) or missing()
        triton = "available (experimental)" if reason is None else f"not available: {reason}"
        found[operation] = {
            "computes": computes,
            "implementations": {"torch": "available", "triton": triton},
            "chosen": "triton" if operation in CHOSEN else "torch",
            "refused": REFUSED.get(operation),
        }
    return found


def record() -> dict[str, str]:
    """What ran, for the record of a run."""
    return {name: "triton" if any(ran.startswith(name) for ran in RAN) else "torch" for name in OPERATIONS}


def use_kernels(name: KernelChoice = "torch", operation: str | None = None) -> None:
    """Choose the implementation of one operation, or of both.

    Args:
        name: "torch" or "triton".
        operation: "scan" or "attention"; both by default.
    """
    check_choice("name", name, CHOICES)
    if operation is not None:
        check_choice("operation", operation, tuple(OPERATIONS))
    wanted = set(OPERATIONS) if operation is None else {operation}
    CHOSEN.update(wanted) if name == "triton" else CHOSEN.difference_update(wanted)


@contextmanager
def using_kernels(name: KernelChoice, operation: str | None = None) -> Iterator[None]:
    """`use_kernels` inside a `with` block.

    Args:
        name: "torch" or "triton".
        operation: "scan" or "attention"; both by default.
    """
    before = set(CHOSEN)
    try:
        use_kernels(name, operation)
        yield
    finally:
        CHOSEN.clear()
        CHOSEN.update(before)


for _wanted in filter(None, os.environ.get(VARIABLE, "").split(",")):
    _operation, _, _name = _wanted.strip().rpartition("=")
    use_kernels(_name, _operation or None)  # type: ignore[arg-type]
