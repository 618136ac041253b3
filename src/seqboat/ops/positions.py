"""Position schemes: how attention knows the order of its tokens.

A token has a position in the original sequence and a slot, its index among the active tokens. A scheme may rotate
queries and keys (rotary), add a learned bias per distance (in positions or in slots), do both, or neither.

To add a scheme, write a class here and give it a name in `PositionsName` and `POSITIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.ops.precision import wide_type

Slot = TypeVar("Slot", Tensor, None)


class Positions:
    """A scheme without positions; the base of all others."""

    rotates = False
    """Whether queries and keys are rotated."""
    added = False
    """Whether the model adds position embeddings to its inputs."""

    def check_width(self, name: str, d_key: int) -> None:
        """Reject a width of queries and keys that the scheme cannot use."""

    def max_distance(self, max_positions: int, reach: int | None) -> int | None:
        """The largest distance with an entry in the bias table; None without a table.

        Args:
            max_positions: number of positions that the table must distinguish.
            reach: slots from a query to the furthest key it sees; None if unbounded.
        """
        return None

    def rotate(self, query: Tensor, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate (..., d_key) by their positions (...)."""
        return query, key

    def coordinate(self, position: Tensor, slot: Slot) -> Tensor | Slot:
        """The coordinate that the bias takes distances in: positions or slots."""
        return slot


class Rotary(Positions):
    """Rotary embedding of the original positions."""

    rotates = True

    def check_width(self, name: str, d_key: int) -> None:
        require(d_key % 2 == 0, f"{name} must be even with rotary positions, got {d_key}")

    def rotate(self, query: Tensor, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        # stacked: decoding time depends on the number of operations
        query, key = rotate(torch.stack([query, key]), position).unbind(0)
        return query, key


class OriginalBias(Positions):
    """A learned bias per distance in the original sequence."""

    def max_distance(self, max_positions: int, reach: int | None) -> int:
        return max_positions - 1

    def coordinate(self, position: Tensor, slot: Slot) -> Tensor:
        return position


class RotaryOriginal(Rotary, OriginalBias):
    """Rotary embedding and a learned bias per distance, both of the original positions."""


class CompressedBias(Positions):
    """A learned bias per distance among the active tokens."""

    def max_distance(self, max_positions: int, reach: int | None) -> int:
        return max_positions - 1 if reach is None else reach


class Absolute(Positions):
    """Position embeddings that the model adds to its inputs."""

    added = True


PositionsName = Literal["original", "compressed", "rotary", "rotary-original", "none"]
POSITIONS: dict[str, Positions] = {
    "original": OriginalBias(),
    "compressed": CompressedBias(),
    "rotary": Rotary(),
    "rotary-original": RotaryOriginal(),
    "none": Positions(),
}
"""Schemes for sparse attention by the name that configurations use."""


class RelativeBias(nn.Module):
    """A learned bias per distance `key - query`; larger distances share the last entry of the table."""

    def __init__(self, max_distance: int) -> None:
        super().__init__()
        check_positive("max_distance", max_distance, least=0)
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.empty(2 * max_distance + 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The table starts at N(0, 0.02), truncated at two standard deviations."""
        nn.init.trunc_normal_(self.table, std=0.02, a=-0.04, b=0.04)

    def forward(self, distance: Tensor) -> Tensor:
        """The bias of each distance."""
        return self.table[(distance + self.max_distance).clamp(0, 2 * self.max_distance)]


class RotaryBias(nn.Module):
    """A bias per distance from two learned vectors: their product after rotary embedding, as in MEGA.

    With the vectors a, b split into halves (a1, a2) and (b1, b2), and d = key - query,

        bias(d) = sum over frequencies f of (a1 b1 + a2 b2) cos(f d) + (a2 b1 - a1 b2) sin(f d)
    """

    def __init__(self, dim: int, max_distance: int) -> None:
        super().__init__()
        require(dim % 2 == 0, f"dim of a rotary bias must be even, got {dim}")
        check_positive("max_distance", max_distance, least=0)
        self.max_distance = max_distance
        self.vectors = nn.Parameter(torch.empty(2, 2, dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The vectors start at N(0, 0.02)."""
        nn.init.normal_(self.vectors, std=0.02)

    @property
    def table(self) -> Tensor:
        """(2 * max_distance + 1,): the bias of each distance."""
        return self._bias(torch.arange(-self.max_distance, self.max_distance + 1, device=self.vectors.device))

    def forward(self, distance: Tensor) -> Tensor:
        """The bias of each distance; larger ones are those of the ends of the table."""
        return self._bias(distance.clamp(-self.max_distance, self.max_distance))

    def _bias(self, distance: Tensor) -> Tensor:
        (a1, a2), (b1, b2) = self.vectors
        dim = 2 * self.vectors.shape[-1]
        angle = torch.remainder(distance[..., None] * frequencies(dim, distance.device), 2 * math.pi)
        angle = angle.to(self.vectors.dtype)
        return angle.cos() @ (a1 * b1 + a2 * b2) + angle.sin() @ (a2 * b1 - a1 * b2)


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding: rotate each pair of adjacent channels by position * 10000^(-2i/dim).

    Args:
        x: (..., dim), dim even.
        position: (...), integer.
    """
    return turn_pairs(x, rotations(position, x.shape[-1], x))


def rotations(position: Tensor, dim: int, like: Tensor) -> Tensor:
    """(..., dim / 2, 2): cosine and sine of the angle by which each pair of `dim` channels turns at a position."""
    # reduced to one turn in float64: in float32 the angle of position one million is off by a tenth of a radian
    angle = torch.remainder(position[..., None] * frequencies(dim, like.device), 2 * math.pi)
    angle = angle.to(wide_type(like))
    return torch.stack([angle.cos(), angle.sin()], dim=-1).to(like.dtype)


def turn_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate each pair of adjacent channels of (..., dim) by what `rotations` found."""
    cos, sin = turn.unbind(-1)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [torch.addcmul(even * cos, odd, sin, value=-1), torch.addcmul(odd * cos, even, sin)]
    return torch.stack(turned, dim=-1).flatten(-2)


def frequencies(dim: int, device: torch.device) -> Tensor:
    """(dim / 2,), float64: angle by which each pair of channels turns per position."""
    key = dim, device
    # asked first: a lookup in a dictionary that grows later would have the compiler compile again
    if not torch.compiler.is_compiling() and key in _known_frequencies:
        return _known_frequencies[key]
    # never an inference tensor, even if first needed in inference mode: training uses it too
    with torch.inference_mode(False):
        found = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    if not torch.compiler.is_compiling():
        _known_frequencies[key] = found
    return found


_known_frequencies: dict[tuple[int, torch.device], Tensor] = {}


@contextmanager
def separate_frequencies() -> Iterator[None]:
    """Inside, nothing is shared with the outside: for tensors without content, which must not be kept."""
    known = dict(_known_frequencies)
    _known_frequencies.clear()
    try:
        yield
    finally:
        _known_frequencies.clear()
        _known_frequencies.update(known)


def sinusoids(position: Tensor, d_model: int) -> Tensor:
    """Sinusoidal position embedding (..., d_model): sines in the first half, cosines in the second."""
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device=position.device) / d_model
    angle = position[..., None] * 10000.0**-exponent
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., :d_model]
