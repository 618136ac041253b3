"""A SeqBoat layer in single steps on a GPU: a handful of kernels per token, and no question to the host.

A lean layer in torch asks the router on the host, and launches 10 kernels for an inactive token and 28 for an active
one. Here the decision, the states, the memory and all counters stay on the device:
five launches per layer, six if the norm comes last, whatever the router decides. Nothing depends on the host, so a
step could be captured in a CUDA graph. The kernels are those of `seqboat.ops.kernels.triton_decode`.

Experimental, as all Triton kernels are: `use_kernels("triton")` or `use_kernels("triton", "decode")` chooses it, and
torch runs where it does not fit or fails on a first trial.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from seqboat.core.nn import EPS, BatchNorm, LayerNorm, Norm
from seqboat.inference.attention import Places
from seqboat.inference.base import LeanLayer, Token, fold_router
from seqboat.layers.gau import GAU
from seqboat.layers.policy import Policy
from seqboat.layers.routers import AlwaysActive
from seqboat.layers.seqboat import SeqBoat, SeqBoatState
from seqboat.layers.sma import SMAState
from seqboat.ops.decode import LayerStep
from seqboat.ops.kernels.registry import SEAM, Implementation, attempt, pick, using_kernels
from seqboat.ops.positions import CompressedBias, OriginalBias, frequencies
from seqboat.ssm.diagonal import DiagonalSSM, SSMState, TruncatedState, complex_like
from seqboat.ssm.ema import EMA
from seqboat.ssm.s4d import S4D

CERTAIN = 100.0
"""Log-odds of a token that is always active: its confidence is 1 in every type."""


def device_layer(layer: SeqBoat, capacity: int) -> DeviceSeqBoat | None:
    """A layer in kernels, with the weights that it has now; None where torch should run.

    Args:
        layer: causal, in eval mode, with plain weights.
        capacity: sequences that fit.
    """
    if not SEAM.open:
        return None
    gau, skip = layer.sma.units["gau"], layer.ssm.skip
    assert isinstance(gau, GAU)
    sizes = {"d_model": layer.d_model, "places": gau.window + 1, "d_z": gau.d_z}
    sizes["states"] = layer.ssm.d_state if isinstance(layer.ssm, DiagonalSSM) else 0
    found = pick("decode", device=skip.device, dtype=skip.dtype, unfit=_unfit(layer, gau), **sizes)
    if found is None:
        return None
    made = DeviceSeqBoat(layer, gau, found, capacity)
    # all kernels are compiled and run once, before there is a state to lose
    trial = attempt("decode", found, made.step, skip.new_zeros(1, layer.d_model))
    made.forget()
    return None if trial is None else made


def _unfit(layer: SeqBoat, gau: GAU) -> str | None:
    """What about a layer the kernels do not compute."""
    products = (layer.linear, gau.base, gau.out)
    router = layer.sma.policy.router
    if len(layer.sma.units) > 1:
        return "a second module beside attention"
    if type(layer.ssm) not in (EMA, S4D) or layer.ssm.truncation == 1:
        return "a state-space layer that is neither MD-EMA nor S4D, or has one tap"
    if Places(gau).full:
        return "a memory that grows"
    if type(router) is not AlwaysActive and fold_router(layer.sma.policy) is None:
        return f"a router without a single border, {type(router).__name__}"
    if any(type(part) is not nn.Linear or part.weight.dtype != layer.ssm.skip.dtype for part in products):
        return "int8 weights, or weights of several types"
    return None


class DeviceSeqBoat(LeanLayer):
    """A SeqBoat layer in kernels; made by `device_layer`."""

    def __init__(self, layer: SeqBoat, gau: GAU, implementation: Implementation, capacity: int) -> None:
        ssm = layer.ssm
        assert isinstance(ssm, DiagonalSSM)
        self.implementation, self.places = implementation, Places(gau)
        self.past = 0 if ssm.truncation is None else ssm.truncation - 1
        self.log_decay, self.drive, coefficients = _fold_kernel(ssm, self.past)
        weight, (d_z, d_v) = layer.linear.weight, (gau.d_z, gau.d_v)
        kind, norm_weight, norm_bias = _fold_norm(layer.norm, weight)
        router, border = _fold_router(layer.sma.policy, layer.d_model, weight)
        scale = float(gau.function.scale(d_z, gau.span.window))
        scaling = torch.stack([gau.gamma[0] * scale, gau.beta[0] * scale, gau.gamma[1], gau.beta[1]])
        kinds = {OriginalBias: "original", CompressedBias: "compressed"}
        bias = next((name for kind, name in kinds.items() if isinstance(gau.positions, kind)), "none")

        def wide(x: Tensor) -> Tensor:
            return x.detach().float().contiguous().clone()

        def copied(part: nn.Linear) -> tuple[Tensor, Tensor]:
            bias = weight.new_zeros(part.out_features) if part.bias is None else part.bias
            return part.weight.detach().contiguous().clone(), bias.detach().clone()

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(capacity, *shape, dtype=dtype, device=weight.device)

        dense, base, out = copied(layer.linear), copied(gau.base), copied(gau.out)
        size = self.places.size
        self.step = LayerStep(
            norm=kind,
            prenorm=layer.config.prenorm,
            eps=EPS,
            norm_weight=wide(norm_weight),
            norm_bias=wide(norm_bias),
            coefficients=coefficients,
            skip=wide(ssm.skip),
            past=self.past,
            router=router,
            border=border,
            dense=dense[0],
            dense_bias=dense[1],
            base=base[0],
            base_bias=base[1],
            scaling=wide(scaling),
            frequency=frequencies(d_z, weight.device) if gau.positions.rotates else None,
            bias=bias,
            table=None if gau.bias is None else wide(gau.bias.table),
            function=gau.config.attention,
            chunked=self.places.chunk,
            out=out[0],
            out_bias=out[1],
            states=zeros(*coefficients.shape[1:]),
            history=zeros(self.past, layer.d_model),
            keys=zeros(size, d_z, dtype=weight.dtype),
            values=zeros(size, d_v, dtype=weight.dtype),
            positions=zeros(size, dtype=torch.int64),
            seen=zeros(dtype=torch.int64),
            total=zeros(dtype=torch.int64),
            spent=zeros(dtype=torch.int64),
        )

    def __call__(self, x: Tensor, token: Token) -> Tensor:
        y = attempt("decode", self.implementation, self.step, x)
        if y is None:
            raise RuntimeError(
                "a kernel of the decoding step failed: read the sequence again, torch runs now"
            )
        found: Tensor = y
        return found

    @property
    def _kept(self) -> tuple[Tensor, ...]:
        """Everything that changes."""
        step = self.step
        counters = (step.seen, step.total, step.spent)
        return (step.states, step.history, step.keys, step.values, step.positions, *counters)

    def forget(self) -> None:
        """Begin anew."""
        for part in self._kept:
            part.zero_()

    def put(self, row: int, state: SeqBoatState, source: int) -> None:
        sma: SMAState = state.sma
        memory, step = sma.modules[0], self.step
        total = int(memory.total[source])
        ours, theirs = self.places.convert(total, step.keys.device)
        for mine, other in zip(
            (step.keys, step.values, step.positions),
            (memory.keys, memory.values, memory.positions),
            strict=True,
        ):
            mine[row, ours] = other[source, theirs].to(mine.dtype)
        for mine, other in ((step.seen, sma.seen), (step.total, memory.total), (step.spent, sma.spent[:, 0])):
            mine[row] = other[source]
        if not self.past:
            states = complex_like(state.ssm.states[source], self.log_decay)
        else:
            history = state.ssm.history[source]
            step.history[row, self._order(sma.seen[source])] = history.float()
            states = self._read(history.double())
        step.states[row] = _parts(states)

    def _order(self, seen: Tensor) -> Tensor:
        """Places of the inputs of a truncated kernel, oldest first."""
        return (seen + torch.arange(self.past, device=seen.device)) % self.past

    def _read(self, history: Tensor) -> Tensor:
        """(dim, states): what a truncated kernel holds after its last inputs, oldest first."""
        decay, states = torch.exp(self.log_decay), torch.zeros_like(self.drive)
        for x in history:
            states = decay * states + self.drive * x[:, None]
        return states

    def get(self, rows: list[int], seen: Tensor) -> SeqBoatState:
        step, span = self.step, self.places.span
        totals = step.total[rows]
        memory = span.make_state(
            len(rows), step.keys.shape[2], step.values.shape[2], step.keys.dtype, seen.device
        )
        for number, (row, total) in enumerate(zip(rows, totals.tolist(), strict=True)):
            ours, theirs = self.places.convert(total, seen.device)
            memory.keys[number, theirs] = step.keys[row, ours]
            memory.values[number, theirs] = step.values[row, ours]
            memory.positions[number, theirs] = step.positions[row, ours]
        sma = SMAState((memory._replace(total=totals),), seen.clone(), step.spent[rows][:, None])
        if self.past:
            history = [step.history[row, self._order(step.seen[row])] for row in rows]
            return SeqBoatState(TruncatedState(torch.stack(history)), sma)
        states = step.states[rows].transpose(2, 3)  # (rows, parts, dim, states)
        paired = states.permute(0, 2, 3, 1).flatten(2) if states.shape[1] == 2 else states[:, 0]
        return SeqBoatState(SSMState(paired.contiguous()), sma)

    def move(self, source: int, target: int) -> None:
        for part in self._kept:
            part[target] = part[source]


def _parts(states: Tensor) -> Tensor:
    """(dim, states) as (parts, states, dim) of real numbers: one part, or real and imaginary ones."""
    parts = torch.view_as_real(states).unbind(-1) if states.is_complex() else (states,)
    return torch.stack([part.t() for part in parts]).float()


def _fold_kernel(ssm: DiagonalSSM, past: int) -> tuple[Tensor, Tensor, Tensor]:
    """log q and drive in float64, (dim, states), and the coefficients of `LayerStep`."""
    with using_kernels("torch"):
        log_decay, drive, read = (part[0] for part in copy.deepcopy(ssm).double().coefficients())
    # near one, q - 1 has digits that q in float32 has not
    less = torch.expm1(log_decay)
    tail = drive * torch.exp(log_decay * past) if past else torch.zeros_like(drive)
    return log_decay, drive, torch.stack([_parts(part) for part in (less, drive, read, tail)]).contiguous()


def _fold_norm(norm: Norm, like: Tensor) -> tuple[str, Tensor, Tensor]:
    """The kind of a norm, its scale and its shift, (dim,)."""
    one, zero = like.new_ones(like.shape[0]), like.new_zeros(like.shape[0])
    if isinstance(norm, BatchNorm):
        scale = torch.rsqrt(norm.running_var.double() + EPS) * (norm.weight if norm.affine else 1)
        return "shift", scale, (norm.bias if norm.affine else 0) - norm.running_mean * scale
    kind = "layer" if isinstance(norm, LayerNorm) else "rms"
    if not norm.affine:
        return kind, one, zero
    weight, bias = norm.get_parameter("weight"), getattr(norm, "bias", None)
    return kind, weight.expand_as(one), zero if bias is None else bias


def _fold_router(policy: Policy, dim: int, like: Tensor) -> tuple[Tensor, float]:
    """Weights and bias of the log-odds as one vector, and the border above which a token is active."""
    folded = fold_router(policy)
    if folded is None:
        always = torch.zeros(dim + 1, device=like.device)
        always[dim] = CERTAIN
        return always, 0.0
    return torch.cat([folded.weight[0], folded.bias]).float(), float(folded.border[0])
