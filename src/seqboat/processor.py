"""The processor: its name, and an instruction set that some virtual machines advertise without having it.

PyTorch multiplies bf16 matrices with tile instructions (AMX) where the processor's flags name them. Some virtual
machines pass these flags on but hide how large the tiles are; there the first product of two bf16 matrices ends the
process with an illegal instruction. `avoid_hidden_tiles` runs when seqboat is imported and limits oneDNN, PyTorch's
library for matrix products, to the instructions below.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that limit oneDNN; it reads them at its first product."""
BELOW_TILES = "AVX512_CORE_FP16"
CPUINFO = Path("/proc/cpuinfo")
TILES = 0x1D
"""The leaf of CPUID that says how large tiles are."""


def processor_name() -> str:
    """The model of the processor, as far as the system tells."""
    return _facts().get("model name") or platform.processor() or "unknown"


def avoid_hidden_tiles() -> None:
    """Keep oneDNN off tile instructions that would end the process, unless the user has set a limit.

    It helps if it comes before the first matrix product of the process.
    """
    if not any(name in os.environ for name in LIMITS) and tiles_are_hidden():
        os.environ[LIMITS[0]] = BELOW_TILES


def tiles_are_hidden() -> bool:
    """Whether the processor's flags name tiles (AMX), but CPUID does not say how large they are."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if "amx_tile" not in _facts().get("flags", "").split():
        return False
    palettes = _cpuid(TILES, 0)
    return palettes is not None and palettes[0] == 0


def _facts() -> dict[str, str]:
    """What the system says about its first processor."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            facts: dict[str, str] = {}
            for line in file:
                name, colon, value = line.partition(":")
                if not colon:
                    break
                facts[name.strip()] = value.strip()
            return facts
    except OSError:
        return {}


def _cpuid(leaf: int, part: int) -> tuple[int, int, int, int] | None:
    """The registers eax, ebx, ecx and edx after CPUID; None where a program may not make its own machine code."""
    import ctypes
    import mmap

    # push rbx; mov eax, esi; mov ecx, edx; cpuid; mov [rdi], eax; mov [rdi+4], ebx; mov [rdi+8], ecx;
    # mov [rdi+12], edx; pop rbx; ret
    code = bytes.fromhex("53 89f0 89d1 0fa2 8907 895f04 894f08 89570c 5b c3")
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(code)
    registers = (ctypes.c_uint32 * 4)()
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)(place)
    call(ctypes.addressof(registers), leaf, part)
    a, b, c, d = registers
    return a, b, c, d
