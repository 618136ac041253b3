"""Units: contextual modules for sparse activation, made from modules that know nothing of packing.

`PaddedUnit` calls any module on padded sequences of active tokens, `MixerUnit` a whole mixer with its state. Both
keep the promise of `PackedModule`: all at once, in pieces and token by token give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.mixer import Mixer, RecurrentMixer
from seqboat.core.padding import Aligned
from seqboat.core.state import tensors
from seqboat.layers.packing import Packed, PackedModule


class Padded(NamedTuple):
    """Packed tokens as padded sequences."""

    tokens: Tensor
    """(batch, slots, dim), zeros after the last token of a sequence; at least one slot"""
    real: Tensor
    """(batch, slots) bool: True on tokens"""
    place: Tensor
    """(tokens,): where each packed token went, in the flattened (batch * slots)"""


def unpack(tokens: Tensor, packed: Packed, old: Tensor | None = None, kept: Tensor | None = None) -> Padded:
    """Packed tokens as padded sequences, after older ones.

    Args:
        tokens: (tokens, dim).
        packed: where they came from.
        old: (batch, any, dim), older tokens of each sequence.
        kept: (batch,), how many of them there are.
    """
    batch = packed.offsets.shape[0] - 1
    # a module may refuse an empty sequence: one slot of padding does no harm
    size = 0 if old is None else old.shape[1]
    columns = max(size + packed.slots, 1)
    before = packed.offsets.new_zeros(batch) if kept is None else kept
    place = packed.row * columns + before[packed.row] + packed.slot
    base = tokens.new_zeros(batch, columns, tokens.shape[1])
    if old is not None:
        base = F.pad(old.to(tokens.dtype), (0, 0, 0, columns - size))
    flat = base.reshape(batch * columns, tokens.shape[1]).index_copy(0, place, tokens)
    columns_of = torch.arange(columns, device=tokens.device)
    real = columns_of < (before + packed.offsets.diff())[:, None]
    return Padded(flat.view(batch, columns, tokens.shape[1]), real, place)


class Replay(NamedTuple):
    """The active tokens that a padded module has to see again."""

    tokens: Tensor
    """(batch, size, dim): oldest first, zeros after the last one"""
    total: Tensor
    """(batch,): tokens so far"""


Call = Callable[[nn.Module, Tensor, Tensor], Tensor]


class PaddedUnit(PackedModule):
    """Any module on (batch, slots, dim), which sees the active tokens of each sequence side by side.

    >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> unit = PaddedUnit(attention, lambda m, x, real: m(x, x, x, key_padding_mask=~real, need_weights=False)[0])

    Args:
        module: to call.
        call: calls it, on the tokens (batch, slots, dim) and where they are real (batch, slots); by default the
            module gets the tokens alone, with zeros after the last one of a sequence.
        causal: whether no output depends on later tokens. Then the unit can continue a sequence: it keeps the tokens
            that it has seen, and shows them to the module again.
        context: how many earlier tokens an output may depend on, if that is bounded and the module does not count
            its tokens; None keeps all of them.
        d_model: width of the tokens; only needed to make a fresh state.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call | None = None,
        *,
        causal: bool = False,
        context: int | None = None,
        d_model: int | None = None,
    ) -> None:
        super().__init__()
        if context is not None:
            check_positive("context", context, least=0)
        require(causal or context is None, f"context is of use to causal modules only, got {context}")
        require(not causal or d_model is not None, "d_model must be given for a causal module")
        self.module, self.causal, self.context, self.d_model = module, causal, context, d_model
        self._call = call

    def forward(
        self, tokens: Tensor, packed: Packed, state: Replay | None = None
    ) -> tuple[Tensor, Replay | None]:
        if not self.causal:
            return self._run(unpack(tokens, packed)), None
        batch = packed.offsets.shape[0] - 1
        if state is None:
            state = self.make_state(batch, tokens.dtype, tokens.device)
        kept = state.total if self.context is None else state.total.clamp(max=self.context)
        padded = unpack(tokens, packed, state.tokens, kept)
        return self._run(padded), self._remember(padded, kept, state, packed.offsets.diff())

    def _run(self, padded: Padded) -> Tensor:
        out = self.module(padded.tokens) if self._call is None else self._call(self.module, *padded[:2])
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        wanted, name = tuple(padded.tokens.shape), type(self.module).__name__
        require(found == wanted, f"{name} must return (batch, slots, dim) = {wanted}, got {found}")
        return out.flatten(0, 1).index_select(0, padded.place)

    def _remember(self, padded: Padded, kept: Tensor, state: Replay, new: Tensor) -> Replay:
        total = state.total + new
        size = self.context
        if size is None:
            size = int(total.max()) if len(total) else 0
        end = kept + new
        first = (end - size).clamp(min=0)
        places = first[:, None] + torch.arange(size, device=total.device)
        inside = (places < end[:, None])[..., None]
        places = places.clamp(max=padded.tokens.shape[1] - 1)[..., None]
        tokens = padded.tokens.gather(1, places.expand(-1, -1, padded.tokens.shape[2]))
        tokens = torch.where(inside, tokens, 0).to(state.tokens.dtype)
        return Replay(tokens, total)

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Replay:
        assert self.d_model is not None
        return Replay(
            torch.zeros(batch, self.context or 0, self.d_model, dtype=dtype, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def advance(
        self, tokens: Tensor, rows: Tensor, position: Tensor, state: Replay, inplace: bool = False
    ) -> tuple[Tensor, Replay]:
        out, after = self(tokens, single(rows, position, state.total.shape[0]), state)
        return out, after


def single(rows: Tensor, position: Tensor, batch: int) -> Packed:
    """One token of some sequences, in packed form."""
    counts = torch.zeros(batch, dtype=torch.int64, device=rows.device).index_fill(0, rows, 1)
    return Packed(rows, rows, position, F.pad(counts.cumsum(dim=0), (1, 0)), min(len(rows), 1))


class MixerUnit(PackedModule):
    """A whole mixer, which sees the active tokens of each sequence as a sequence.

    Args:
        mixer: any; positions count active tokens.
        change: whether to return only what the mixer adds to its input. A mixer has a residual connection inside;
            with another one around the sparse layer, a skipped token then passes unchanged.

    Calling it with tokens of shape (tokens, d_model) returns the outputs, of the same shape, and the state.

    >>> import torch
    >>> from seqboat import MixerUnit, SeqBoat, SparseModularActivation
    >>> sparse = SparseModularActivation({"layer": MixerUnit(SeqBoat(8, causal=True))}, d_model=8, causal=True)
    >>> sparse(torch.randn(2, 10, 8)).y.shape
    torch.Size([2, 10, 8])
    """

    def __init__(self, mixer: Mixer, change: bool = True) -> None:
        super().__init__()
        self.mixer, self.change = mixer, change
        self.causal = mixer.causal and isinstance(mixer, RecurrentMixer)

    def forward(self, tokens: Tensor, packed: Packed, state: Any = None) -> tuple[Tensor, Any]:
        padded = unpack(tokens, packed)
        y, after, _ = self.mixer(padded.tokens, Aligned(padded.real), state)
        out = y.flatten(0, 1).index_select(0, padded.place)
        return out - tokens if self.change else out, after

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
        assert isinstance(self.mixer, RecurrentMixer)
        return self.mixer.make_state(batch, dtype, device)

    def advance(
        self, tokens: Tensor, rows: Tensor, position: Tensor, state: Any, inplace: bool = False
    ) -> tuple[Tensor, Any]:
        assert isinstance(self.mixer, RecurrentMixer)
        batch = len(next(part for _, part in tensors(state)))
        x = tokens.new_zeros(batch, tokens.shape[1]).index_copy(0, rows, tokens)
        active = torch.zeros(batch, dtype=torch.bool, device=rows.device).index_fill(0, rows, True)
        y, after, _ = self.mixer.advance(x, state, active, inplace)
        out = y.index_select(0, rows)
        return out - tokens if self.change else out, after
