"""Launches of the kernels of a step of decoding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqboat.ops.decode import BIASES, FUNCTIONS, NORMS, LayerStep
from seqboat.ops.kernels.triton_decode import kernels
from seqboat.ops.kernels.tuning import launch, power, scratch


def decode(step: LayerStep, x: Tensor) -> Tensor:
    """The outputs (rows, dim) of one token of each of the first rows, whose states change."""
    x = x.contiguous()
    rows, dim = x.shape
    (_, size, d_z), d_v = step.keys.shape, step.values.shape[2]
    _, parts, states, _ = step.coefficients.shape
    width = d_z + 2 * d_v
    hidden, summed, confidence = scratch(x, rows, dim), scratch(x, rows, dim), scratch(x, rows)
    opened, scores, attended = (scratch(x, rows, numbers) for numbers in (width, size, d_v))
    y = scratch(x, rows, dim, dtype=x.dtype)
    norm = NORMS[step.norm]

    def blocks(numbers: int, name: str) -> Any:
        return lambda sizes: (-(-numbers // sizes[name]), rows)

    launch(
        kernels.enter, blocks(dim, "BLOCK"),
        x, step.norm_weight, step.norm_bias, step.coefficients, step.skip, step.states, step.history, step.seen,
        hidden, dim, states, step.past, step.eps,
        NORM=norm if step.prenorm else 0, PARTS=parts, TRUNCATED=step.past > 0, DIM=power(dim), N=power(states),
    )  # fmt: skip
    launch(
        kernels.project, lambda sizes: (-(-dim // sizes["OUT"]) + -(-width // sizes["OUT"]), rows),
        x, hidden, step.dense, step.dense_bias, step.router, step.base, step.base_bias, summed, opened, confidence,
        dim, width, step.border, DIM=power(dim),
    )  # fmt: skip
    furthest = 0 if step.table is None else len(step.table) // 2
    launch(
        kernels.score, blocks(size, "KEYS"),
        opened, step.scaling, step.frequency, step.keys, step.positions, step.table, step.seen, step.total,
        confidence, scores, d_z, width, size, furthest,
        BIAS=BIASES[step.bias], ROTARY=step.frequency is not None, CHUNKED=step.chunked, WIDTH_Z=power(d_z),
    )  # fmt: skip
    launch(
        kernels.recall, blocks(d_v, "VALUES"),
        opened, scores, step.values, step.total, confidence, attended, d_z, d_v, size,
        FUNCTION=FUNCTIONS[step.function], CHUNKED=step.chunked, SIZE=power(size),
    )  # fmt: skip
    launch(
        kernels.leave, blocks(dim, "OUT"),
        summed, attended, step.out, step.out_bias, confidence, step.seen, step.total, step.spent,
        y if step.prenorm else summed, dim, d_v, ACTIVATE=step.prenorm,
    )  # fmt: skip
    if not step.prenorm:
        launch(
            kernels.close, lambda _: (1, rows), summed, step.norm_weight, step.norm_bias, y, dim, step.eps,
            NORM=norm, DIM=power(dim),
        )  # fmt: skip
    return y
