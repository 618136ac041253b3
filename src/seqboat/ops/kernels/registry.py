"""Which implementation computes each heavy operation, and why the others do not.

Every heavy operation runs in plain torch unless another implementation is chosen, is available on this machine, and
fits the call. Forward and backward are separate operations: the backward pass needs only the inputs, so either may
run in torch whatever computed the other. If a chosen implementation fails, it is disabled with a warning and torch
computes the call instead.

    use_kernels("triton")                     all operations that have Triton kernels
    use_kernels("triton", operation="attention")
    SEQBOAT_KERNELS=triton seqboat train ...  the same from outside; "triton,scan=torch" leaves out the scan
    kernels()                                 what is available, what was chosen, what ran

To add an implementation, add it to `IMPLEMENTATIONS`; its function takes the arguments that the caller of `attempt`
passes on. Hot paths test `SEAM.open` and the device before they call `pick`: on a CPU nothing is looked up.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch

from seqboat.core.checks import check_choice

KernelChoice = Literal["auto", "torch", "triton"]
CHOICES: tuple[str, ...] = get_args(KernelChoice)

VARIABLE = "SEQBOAT_KERNELS"
"""Environment variable that makes the first choices: a name for all operations, or `operation=name`, with commas."""

OPERATIONS = {
    "scan": "diagonal state-space scan",
    "scan_backward": "its gradients",
    "attention": "banded attention on packed tokens",
    "attention_backward": "its gradients",
}
"""Heavy operations and what they compute."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    run: str
    """module and function, imported when it is first used"""
    missing: Callable[[], str | None] = lambda: None
    """why this machine cannot run it; None if it can"""
    refuse: Callable[..., str | None] = lambda **call: None
    """why it does not fit a call; gets what the caller of `pick` passes"""
    automatic: bool = False
    """whether "auto" may take it; experimental kernels have to be chosen by name"""
    experimental: bool = False


@dataclass
class _Seam:
    """What was chosen, and what happened since."""

    open: bool = False
    """whether anything but "auto" and "torch" is chosen; False keeps a CPU from looking anything up"""
    choice: dict[str, str] = field(default_factory=dict)
    disabled: dict[tuple[str, str], str] = field(default_factory=dict)
    """(operation, implementation) to the reason"""
    ran: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    """(operation, implementation) to the last reason for running torch instead"""
    lock: Any = field(default_factory=threading.Lock)


SEAM = _Seam()


@cache
def triton_missing() -> str | None:
    """Why Triton kernels cannot run here; None if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        found = version("triton")
    except PackageNotFoundError:
        found = "unknown"
    major, _, rest = found.partition(".")
    minor = rest.partition(".")[0]
    if major.isdigit() and minor.isdigit() and (int(major), int(minor)) < (3, 7):
        return f"triton {found} is older than 3.7"
    if not interprets() and not torch.cuda.is_available():
        return "no GPU, and TRITON_INTERPRET=1 is not set"
    return None


def interprets() -> bool:
    """Whether Triton kernels run in the interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def refuse_for_triton(**call: Any) -> str | None:
    """Why Triton kernels do not fit a call, as far as that is the same for all operations."""
    device, dtype = call["device"], call["dtype"]
    if device.type != "cuda" and not (device.type == "cpu" and interprets()):
        return f"no Triton kernels for {device.type} tensors"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no Triton kernels for {str(dtype).removeprefix('torch.')}"
    return None


def _refuse_scan(**call: Any) -> str | None:
    if call["states"] > 64:
        return f"{call['states']} states per channel, at most 64 fit into registers"
    return refuse_for_triton(**call)


def _refuse_attention(**call: Any) -> str | None:
    if call["dropout"]:
        return "attention dropout"
    if call["d_z"] > 256:
        return f"queries of width {call['d_z']}, at most 256 fit into shared memory"
    return refuse_for_triton(**call)


def _triton(run: str, refuse: Callable[..., str | None] = refuse_for_triton) -> Implementation:
    return Implementation("triton", f"seqboat.ops.kernels.{run}", triton_missing, refuse, experimental=True)


IMPLEMENTATIONS: dict[str, list[Implementation]] = {operation: [] for operation in OPERATIONS}
"""Implementations of each operation besides torch, in the order in which "auto" asks them."""

IMPLEMENTATIONS["scan"] = [_triton("scan:triton_scan", _refuse_scan)]
IMPLEMENTATIONS["scan_backward"] = [_triton("scan:triton_scan_backward", _refuse_scan)]
IMPLEMENTATIONS["attention"] = [
    _triton("triton_band_launch:attention", _refuse_attention),
]
IMPLEMENTATIONS["attention_backward"] = [_triton("triton_band_launch:attention_backward", _refuse_attention)]


def kernels() -> dict[str, dict[str, Any]]:
    """What computes each heavy operation here: what is available and why not, what was chosen, and what ran.

    "torch" is always there, and computes whatever is not counted under "ran".

    >>> kernels()["scan"]["implementations"]["torch"]
    'available'
    """
    return {operation: _describe(operation) for operation in OPERATIONS}


def _describe(operation: str) -> dict[str, Any]:
    found = {"torch": "available", "reference": "available, for tests: seqboat.reference"}
    for implementation in IMPLEMENTATIONS[operation]:
        reason = _unavailable(operation, implementation)
        state = "available" if reason is None else f"not available: {reason}"
        found[implementation.name] = f"{state} (experimental)" if implementation.experimental else state
    return {
        "computes": OPERATIONS[operation],
        "implementations": found,
        "chosen": SEAM.choice.get(operation, "auto"),
        "ran": {name: count for (what, name), count in SEAM.ran.items() if what == operation},
        "refused": {name: why for (what, name), why in SEAM.refused.items() if what == operation},
    }


def use_kernels(name: KernelChoice = "auto", operation: str | None = None) -> None:
    """Choose the implementation of one operation, or of all that have it.

    A choice is a wish: a call that the implementation does not fit runs in torch, and `kernels()` says why.

    Args:
        name: "auto" takes what is proven on this kind of device, "torch" nothing but torch.
        operation: one of `kernels()`; its backward pass follows the same choice. All of them by default.

    >>> use_kernels("torch", operation="scan")
    >>> kernels()["scan"]["chosen"]
    'torch'
    >>> use_kernels("auto")
    """
    check_choice("name", name, CHOICES)
    if operation is not None:
        check_choice("operation", operation, tuple(OPERATIONS))
    wanted = list(OPERATIONS) if operation is None else [operation, f"{operation}_backward"]
    for what in wanted:
        if what in OPERATIONS:
            SEAM.choice[what] = name
    SEAM.open = any(choice not in ("auto", "torch") for choice in SEAM.choice.values())


@contextmanager
def using_kernels(name: KernelChoice, operation: str | None = None) -> Iterator[None]:
    """`use_kernels` inside a `with` block.

    Args:
        name: as in `use_kernels`.
        operation: one of `kernels()`; all of them by default.

    >>> with using_kernels("torch"):
    ...     kernels()["attention"]["chosen"]
    'torch'
    """
    before = dict(SEAM.choice), SEAM.open
    try:
        use_kernels(name, operation)
        yield
    finally:
        SEAM.choice, SEAM.open = before


def disable(operation: str, name: str, reason: str) -> None:
    """Never take an implementation for an operation again; torch computes it instead."""
    check_choice("operation", operation, tuple(OPERATIONS))
    SEAM.disabled[operation, name] = reason


def enable(operation: str, name: str) -> None:
    """Undo `disable`."""
    SEAM.disabled.pop((operation, name), None)


def forget_runs() -> None:
    """Begin counting what ran from zero."""
    SEAM.ran.clear()
    SEAM.refused.clear()


def record() -> dict[str, str]:
    """What ran, for the record of a run: operation to implementation, "torch" where nothing else did.

    >>> with using_kernels("torch"):
    ...     record()["scan"]
    'torch'
    """
    found = dict.fromkeys(OPERATIONS, "torch")
    for operation, name in SEAM.ran:
        found[operation] = name if found[operation] == "torch" else f"{found[operation]}, {name}"
    return found


def pick(operation: str, **call: Any) -> Implementation | None:
    """The implementation that computes this call; None for torch.

    Args:
        operation: its name.
        call: what implementations need to know to refuse: `device`, `dtype` and what the operation adds.
    """
    choice = SEAM.choice.get(operation, "auto")
    if choice == "torch":
        return None
    for implementation in IMPLEMENTATIONS[operation]:
        if implementation.name != choice and not (choice == "auto" and implementation.automatic):
            continue
        reason = _unavailable(operation, implementation) or implementation.refuse(**call)
        if reason is None:
            return implementation
        SEAM.refused[operation, implementation.name] = reason
    return None


def attempt(operation: str, implementation: Implementation, *arguments: Any) -> Any:
    """Run an implementation; None if it failed: then it is disabled, and torch should compute the call."""
    try:
        result = _load(implementation.run)(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        name = implementation.name
        disable(operation, name, f"failed: {type(error).__name__}: {error}")
        warnings.warn(
            f"{name} failed in {operation}, which runs in torch from now on: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    with SEAM.lock:
        SEAM.ran[operation, implementation.name] += 1
    return result


def _unavailable(operation: str, implementation: Implementation) -> str | None:
    disabled = SEAM.disabled.get((operation, implementation.name))
    return implementation.missing() if disabled is None else f"disabled: {disabled}"


@cache
def _load(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def _read_environment() -> None:
    for wanted in filter(None, os.environ.get(VARIABLE, "").split(",")):
        operation, _, name = wanted.strip().rpartition("=")
        use_kernels(name, operation or None)  # type: ignore[arg-type]


_read_environment()
