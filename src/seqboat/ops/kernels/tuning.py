"""Launches of kernels, and their sizes: fixed ones, so that two runs add in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHANNELS: dict[str, tuple[int, int]] = {
    # channels per program and warps; with 32 channels per warp a thread holds all states of its channel
    "decay_table": (128, 4),
    "local_states": (64, 2),
    "carry_states": (64, 2),
    "outputs": (64, 2),
    "final_states": (64, 2),
    "input_gradients": (64, 2),
    "parameter_gradients": (64, 2),
    # many or complex states: several warps share the states of a channel
    "outputs:wide": (32, 4),
    "input_gradients:wide": (32, 4),
    "parameter_gradients:wide": (64, 4),
}
TILES: dict[str, tuple[int, int, int, int]] = {
    # queries, keys and values (columns) per program, and warps
    "attend": (64, 32, 64, 4),
    "score_gradients": (32, 32, 64, 4),
    "products_by_key": (32, 64, 64, 4),
    # float32 without TF32 has no matrix units and needs more registers
    "attend:exact": (32, 32, 32, 8),
    "score_gradients:exact": (16, 32, 32, 8) if torch.version.hip else (32, 32, 32, 8),
    "products_by_key:exact": (32, 32, 32, 8),
}


def sizes_of(name: str, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Compile-time sizes and warps of a kernel."""
    if name in CHANNELS:
        wide = f"{name}:wide" in CHANNELS and given["N"] * given["PARTS"] >= 32
        block, warps = CHANNELS[f"{name}:wide" if wide else name]
        return {"BLOCK": block}, warps
    if name not in TILES:
        return {}, 4
    exact = given["PRECISION"] == "ieee" and arguments[1].dtype == torch.float32
    queries, keys, values, warps = TILES[f"{name}:exact" if exact else name]
    return {"QUERIES": queries, "KEYS": keys, "VALUES": values}, warps


def launch(kernel: Any, grid: Callable[[dict[str, int]], tuple[int, ...]], *given: Any, **sizes: Any) -> None:
    """Run a kernel.

    Args:
        kernel: a Triton function.
        grid: number of programs, given the sizes.
        given: its arguments; None for tensors that are not there.
        sizes: compile-time arguments besides those of CHANNELS and TILES.
    """
    found, warps = sizes_of(kernel.__name__, given, sizes)
    merged = {**found, **sizes}
    programs = grid(merged)
    if all(programs):
        kernel[programs](*given, **merged, num_warps=warps, num_stages=1)


def scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that a kernel will fill."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def power(size: int) -> int:
    """The next power of two, which tiles need."""
    return 1 << max(size - 1, 0).bit_length()
