"""HiPPO-LegS: the matrices that state-space models start from (Gu et al., 2020 and 2022).

    x'(t) = A x(t) + B u(t),   A[n, k] = -sqrt(2n + 1) sqrt(2k + 1) if n > k, -(n + 1) if n = k, 0 if n < k
                               B[n]    = sqrt(2n + 1)

A is normal but for a matrix of rank one: with P = B / sqrt(2), the sum A + P P^T = -1/2 + S has a skew-symmetric S,
so that a unitary V makes it diagonal: A = V (diag(poles) - (V* P)(V* P)*) V*. The poles come in conjugate pairs; one
of each pair is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Modes(NamedTuple):
    """The half of the normal part of HiPPO-LegS whose poles have a positive imaginary part; complex128."""

    poles: Tensor
    """(states / 2,)"""
    vectors: Tensor
    """(states, states / 2): columns of V; a real state x has the modes z = V* x, and x = 2 Re(V z)"""


def legs(d_state: int) -> tuple[Tensor, Tensor]:
    """A (states, states) and B (states,), in float64."""
    b = torch.sqrt(1 + 2 * torch.arange(d_state, dtype=torch.float64))
    a = -torch.tril(b[:, None] * b, diagonal=-1) - torch.diag(1 + torch.arange(d_state, dtype=torch.float64))
    return a, b


def legs_modes(d_state: int) -> Modes:
    """Poles and vectors of the normal part, for an even number of states."""
    a, b = legs(d_state)
    skew = a + 0.5 * b[:, None] * b + 0.5 * torch.eye(d_state, dtype=torch.float64)
    # the eigenvalues of S are i times those of the Hermitian -iS, which come in rising order
    frequency, vectors = torch.linalg.eigh(torch.complex(torch.zeros_like(skew), -skew))
    half = frequency[d_state // 2 :]
    return Modes(torch.complex(torch.full_like(half, -0.5), half), vectors[:, d_state // 2 :])
