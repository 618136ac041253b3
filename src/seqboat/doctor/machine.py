"""The machine: versions, the device, which kernels it has, and which number types are slow on it."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from seqboat.ops.kernels import kernels
from seqboat.training.record import device_name, probe_bf16, processor_name, versions

SLOW = 1.5
"""A type whose matrix products take this many times as long as those of float32 deserves a warning."""
TYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, the processor and the device, without names of people, computers or folders."""
    found: dict[str, Any] = {"versions": versions() | {"triton": _version("triton")}}
    found["system"] = f"{platform.system()} {platform.machine()}"
    found["processor"] = processor_name()
    found["bf16"] = probe_bf16()
    found["threads"] = torch.get_num_threads()
    found["device"] = device_name(device)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found["capability"] = f"{facts.major}.{facts.minor}"
        found["memory_gb"] = round(facts.total_memory / 1e9, 1)
        found["versions"]["cuda"] = str(torch.version.cuda or torch.version.hip)
    found["kernels"] = {
        operation: {"chosen": about["chosen"], "implementations": about["implementations"]}
        for operation, about in kernels().items()
    }
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def time_products(device: torch.device, size: int | None = None) -> dict[str, float]:
    """Seconds of a matrix product in each number type."""
    size = size or (1024 if device.type == "cuda" else 192)
    found = {}
    for name, dtype in TYPES.items():
        a = torch.randn(size, size, device=device).to(dtype)
        found[name] = seconds(lambda a=a: a @ a, device, least=0.05)  # type: ignore[misc]
    return found


def slow_types(products: dict[str, float]) -> list[str]:
    """What to say about types that are slower than float32.

    >>> slow_types({"float32": 1.0, "bf16": 40.0, "fp16": 1.2})
    ['bf16 products take 40 times as long as float32 here: train in fp32']
    """
    base = products["float32"]
    return [
        f"{name} products take {taken / base:.2g} times as long as float32 here: train in fp32"
        for name, taken in products.items()
        if name in ("bf16", "fp16") and taken > SLOW * base
    ]


def seconds(call: Callable[[], Any], device: torch.device, least: float = 0.2) -> float:
    """The mean time of a call, after one that is not timed."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    count, began = 0, time.perf_counter()
    while count < 2 or time.perf_counter() - began < least:
        call()
        wait()
        count += 1
    return (time.perf_counter() - began) / count


def anonymous(content: Any) -> Any:
    """Plain data without the names of the user and the computer, and without paths.

    >>> anonymous({"why": "cannot open /home/me/data/x.so: no"})
    {'why': 'cannot open <path>: no'}
    """
    if isinstance(content, dict):
        return {anonymous(key): anonymous(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [anonymous(value) for value in content]
    if not isinstance(content, str):
        return content
    text = re.sub(r"(?:[A-Za-z]:\\|~?/)(?:[^\s:'\",;()]+[/\\])+[^\s:'\",;()]*", "<path>", content)
    for name in _names():
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def _names() -> list[str]:
    """Of the user and the computer; those that are common words say nothing and stay."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = os.environ.get("USER", "")
    # stays "~" without a home: containers run as users that the system does not know
    home = Path(os.path.expanduser("~"))
    found = {user, home.name, socket.gethostname()}
    return [name for name in found if len(name) > 2 and name not in ("root", "user", "home", "localhost")]
