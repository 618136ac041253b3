"""Sizes of kernels: the short lists that the compile gate has checked, and how one of each list is chosen.

The first entry of a list is the default, so that two runs add in the same order and give the same numbers.
`tuned(True)` measures the list once per shape on the first call instead, which may choose differently from
run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class Config(NamedTuple):
    """One way to cut the work of a kernel into programs."""

    sizes: dict[str, int]
    """compile-time sizes by name"""
    warps: int = 4
    stages: int = 1


def _channels(*pairs: tuple[int, int]) -> tuple[Config, ...]:
    return tuple(Config({"BLOCK": block}, warps) for block, warps in pairs)


def _tiles(*tiles: tuple[int, int, int, int]) -> tuple[Config, ...]:
    return tuple(
        Config({"QUERIES": queries, "KEYS": keys, "VALUES": values}, warps)
        for queries, keys, values, warps in tiles
    )


CONFIGS: dict[str, tuple[Config, ...]] = {
    # channels per program and warps; with 32 channels per warp a thread holds all states of its channel
    "decay_table": _channels((128, 4)),
    "local_states": _channels((64, 2), (128, 4)),
    "carry_states": _channels((64, 2)),
    "outputs": _channels((64, 2), (128, 4)),
    "final_states": _channels((64, 2)),
    "input_gradients": _channels((64, 2), (128, 4)),
    "parameter_gradients": _channels((64, 2), (128, 4)),
    # many or complex states: several warps share the states of a channel
    "outputs:wide": _channels((32, 4)),
    "input_gradients:wide": _channels((32, 4)),
    "parameter_gradients:wide": _channels((64, 4)),
    # queries, keys and values (columns) per program
    "attend": _tiles((64, 32, 64, 4), (32, 32, 64, 4), (64, 32, 128, 8)),
    "score_gradients": _tiles((32, 32, 64, 4)),
    "products_by_key": _tiles((32, 64, 64, 4)),
    # float32 without TF32 has no matrix units and needs more registers
    "attend:exact": _tiles((32, 32, 32, 8), (16, 32, 32, 4)),
    "score_gradients:exact": _tiles((32, 32, 32, 8)),
    "score_gradients:exact:hip": _tiles((16, 32, 32, 8)),
    "products_by_key:exact": _tiles((32, 32, 32, 8)),
    "ema_coefficients": (Config({"BLOCK": 256}, 4),),
    "ema_coefficients_backward": (Config({"BLOCK": 256}, 4),),
    "open_gates": (Config({"ROWS": 16, "COLUMNS": 128}, 4),),
    "open_gates_backward": (Config({"ROWS": 16, "COLUMNS": 128}, 4),),
    "norm": (Config({"ROWS": 4}, 4),),
    "norm_backward": (Config({"ROWS": 4}, 8),),
    "route": (Config({"ROWS": 4}, 4),),
    "route_backward": (Config({"ROWS": 4}, 8),),
    "scatter": (Config({"ROWS": 4}, 4),),
    "scatter_backward": (Config({"ROWS": 4}, 8),),
    # a step of decoding: channels, outputs and inputs of a product, places and columns of the memory
    "enter": _channels((64, 2), (32, 1)),
    "enter:wide": _channels((32, 4)),
    "project": (Config({"OUT": 8, "IN": 256}, 4), Config({"OUT": 16, "IN": 128}, 4)),
    "score": (Config({"KEYS": 16}, 4), Config({"KEYS": 32}, 4)),
    "recall": (Config({"KEYS": 32, "VALUES": 32}, 4), Config({"KEYS": 64, "VALUES": 32}, 8)),
    "leave": (Config({"OUT": 8, "IN": 256}, 4), Config({"OUT": 16, "IN": 128}, 4)),
    "close": (Config({}, 4),),
    "table_by_step": (Config({}, 4),),
    "table_by_position": (Config({}, 4),),
}
"""Configurations of each kernel, the default first."""


class Launch(NamedTuple):
    """One launch of a kernel, as `recording` keeps it."""

    kernel: Any
    arguments: tuple[Any, ...]
    """positional ones, with the data type in place of a tensor"""
    sizes: dict[str, Any]
    """compile-time arguments besides those of a configuration"""
    programs: tuple[int, ...]
    """of the default configuration"""
    bytes: int
    """of the tensors that it reads and writes, each counted once"""


_recorder: list[Launch] | None = None
_tuning = False
_measured: dict[tuple[Any, ...], Config] = {}


@contextmanager
def recording(launches: list[Launch]) -> Iterator[None]:
    """Inside, kernels are not run: each launch is noted instead, and results are zeros."""
    global _recorder
    before, _recorder = _recorder, launches
    try:
        yield
    finally:
        _recorder = before


def is_recording() -> bool:
    """Whether launches are noted instead of made."""
    return _recorder is not None


@contextmanager
def tuned(measure: bool) -> Iterator[None]:
    """Inside, the fastest configuration of a list is measured on the first call with a shape."""
    global _tuning
    before, _tuning = _tuning, measure
    try:
        yield
    finally:
        _tuning = before


def scratch(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that a kernel will fill; zeros where kernels are only recorded."""
    if is_recording():
        with _disable_current_modes():
            return torch.zeros(shape, dtype=dtype, device=like.device)
    return torch.empty(shape, dtype=dtype, device=like.device)


def power(size: int) -> int:
    """The next power of two, which tiles need."""
    return 1 << max(size - 1, 0).bit_length()


def configs_of(
    kernel: Any, arguments: tuple[Any, ...], sizes: dict[str, Any], hip: bool = torch.version.hip is not None
) -> tuple[Config, ...]:
    """The configurations of a kernel, which may have other lists for many states, exact products, and AMD."""
    name = kernel.__name__
    types = [getattr(part, "dtype", part) for part in arguments]
    if f"{name}:wide" in CONFIGS and sizes["N"] * sizes["PARTS"] >= 32:
        return CONFIGS[f"{name}:wide"]
    if f"{name}:exact" in CONFIGS and sizes["PRECISION"] == "ieee" and types[1] == torch.float32:
        return CONFIGS.get(f"{name}:exact:hip" if hip else "", CONFIGS[f"{name}:exact"])
    return CONFIGS[name]


def launch(
    kernel: Any, grid: Callable[[dict[str, int]], tuple[int, ...]], *arguments: Any, **sizes: Any
) -> None:
    """Run a kernel.

    Args:
        kernel: a Triton function with configurations in CONFIGS.
        grid: number of programs, given the sizes.
        arguments: positional ones; None for tensors that are not there.
        sizes: compile-time arguments besides those of the configuration.
    """
    tensors = [part for part in arguments if isinstance(part, Tensor)]
    if _recorder is not None:
        types = tuple(part.dtype if isinstance(part, Tensor) else part for part in arguments)
        size = sum(part.numel() * part.element_size() for part in tensors)
        programs = grid({**configs_of(kernel, types, sizes)[0].sizes, **sizes})
        _recorder.append(Launch(kernel, types, sizes, programs, size))
        return
    configs = configs_of(kernel, arguments, sizes)
    config = configs[0]
    if _tuning and tensors[0].is_cuda and len(configs) > 1:
        config = _fastest(kernel, grid, arguments, sizes)
    _run(kernel, grid, arguments, sizes, config)


def _run(kernel: Any, grid: Any, arguments: Any, sizes: dict[str, Any], config: Config) -> None:
    merged = {**config.sizes, **sizes}
    programs = grid(merged)
    if all(programs):
        kernel[programs](*arguments, **merged, num_warps=config.warps, num_stages=config.stages)


def _fastest(kernel: Any, grid: Any, arguments: Any, sizes: dict[str, Any]) -> Config:
    shapes = tuple(part if not isinstance(part, Tensor) else part.dtype for part in arguments)
    key = (kernel.__name__, shapes, tuple(sorted(sizes.items())))
    if key not in _measured:
        # on copies: some kernels overwrite what they read
        best: tuple[float, Config] | None = None
        for config in configs_of(kernel, arguments, sizes):
            copies = [part.clone() if isinstance(part, Tensor) else part for part in arguments]
            _run(kernel, grid, copies, sizes, config)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                _run(kernel, grid, copies, sizes, config)
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end)
            if best is None or took < best[0]:
                best = took, config
        assert best is not None
        _measured[key] = best[1]
    return _measured[key]
