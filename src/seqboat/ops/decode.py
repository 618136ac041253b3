"""What a step of decoding reads and overwrites."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NORMS = {"none": 0, "shift": 1, "rms": 2, "layer": 3}
BIASES = {"none": 0, "original": 1, "compressed": 2}
FUNCTIONS = {"softmax": 0, "relu2": 1, "laplace": 2}


@dataclass(frozen=True)
class LayerStep:
    """A SeqBoat layer as `decode` takes it: weights, and the states of `capacity` sequences.

    Weights of products may be float32, bf16 or fp16, and the memory likewise; the rest is float32.
    """

    norm: str
    """of NORMS"""
    prenorm: bool
    eps: float
    norm_weight: Tensor
    """(dim,)"""
    norm_bias: Tensor
    coefficients: Tensor
    """(4, parts, states, dim): q - 1, drive, read, and what an input adds after `past` tokens"""
    skip: Tensor
    """(dim,)"""
    past: int
    """inputs that a truncated kernel remembers; 0 for a whole one"""
    router: Tensor
    """(dim + 1,): weights of the log-odds, and their bias"""
    border: float
    """log-odds above which a token is active"""
    dense: Tensor
    """(dim, dim)"""
    dense_bias: Tensor
    base: Tensor
    """(d_z + 2 d_v, dim)"""
    base_bias: Tensor
    scaling: Tensor
    """(4, d_z): gamma and beta of queries, times the scale of scores, and of keys"""
    frequency: Tensor | None
    """(d_z / 2,) float64: rotary positions"""
    bias: str
    """of BIASES"""
    table: Tensor | None
    """(2 furthest + 1,): biases by distance"""
    function: str
    """of FUNCTIONS"""
    chunked: bool
    """whether a token sees its chunk instead of the last places"""
    out: Tensor
    """(dim, d_v)"""
    out_bias: Tensor

    states: Tensor
    """(capacity, parts, states, dim)"""
    history: Tensor
    """(capacity, past, dim): inputs of a truncated kernel, token t at place t modulo `past`"""
    keys: Tensor
    """(capacity, places, d_z)"""
    values: Tensor
    """(capacity, places, d_v)"""
    positions: Tensor
    """(capacity, places), of the tokens in the memory"""
    seen: Tensor
    """(capacity,): tokens so far"""
    total: Tensor
    """(capacity,): active ones among them"""
    spent: Tensor
    """(capacity,): active ones that count against a budget"""
