"""Ordinary modules as modules of a sparse layer: which ones mix tokens, and how they are wrapped or refused.

A token-wise module is called on the active tokens of the whole batch at once. One that lets tokens see each other
would mix the sequences of a batch there, so it must become a `PackedModule` first.

`PaddedUnit` calls any module on padded sequences of active tokens, `MixerUnit` a whole mixer with its state. Both
keep the promise of `PackedModule`: all at once, in pieces and token by token give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from seqboat.core.checks import check_positive, require
from seqboat.core.layout import Layout
from seqboat.core.mixer import Mixer
from seqboat.core.state import map_state, tensors
from seqboat.layers.sma import Packed, PackedModule


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
    columns = max(size + packed.longest, 1)
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
            state = self._empty(batch, tokens)
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

    @property
    def grows(self) -> bool:  # type: ignore[override]
        return self.causal and self.context is None

    def init_state(self, batch: int) -> Replay:
        return self._empty(batch, next(self.module.parameters(), torch.zeros(0)))

    def _empty(self, batch: int, like: Tensor) -> Replay:
        assert self.d_model is not None
        tokens = like.new_zeros(batch, self.context or 0, self.d_model)
        return Replay(tokens, torch.zeros(batch, dtype=torch.int64, device=like.device))

    def step(
        self, x: Tensor, active: Tensor, position: Tensor, state: Replay, weight: Tensor | None = None
    ) -> Tensor:
        rows = active.nonzero().squeeze(1)
        offsets = F.pad(active.cumsum(dim=0), (1, 0))
        packed = Packed(rows, rows, position.index_select(0, rows), offsets, min(len(rows), 1))
        out, after = self(x.index_select(0, rows), packed, state)
        for part, new in zip(state, after, strict=True):
            part.set_(new)
        return torch.zeros_like(x).index_copy_(0, rows, out)


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
        self.causal, self.grows = mixer.causal, mixer.causal and mixer.grows

    def forward(self, tokens: Tensor, packed: Packed, state: Any = None) -> tuple[Tensor, Any]:
        padded = unpack(tokens, packed)
        y, after, _ = self.mixer(padded.tokens, Layout(padded.real), state)
        out = y.flatten(0, 1).index_select(0, padded.place)
        return out - tokens if self.change else out, after

    def init_state(self, batch: int) -> Any:
        return self.mixer.init_state(batch)

    def step(
        self, x: Tensor, active: Tensor, position: Tensor, state: Any, weight: Tensor | None = None
    ) -> Tensor:
        before = [part.clone() for _, part in tensors(state)]
        y = self.mixer.step(x, state).y
        # the others keep their state
        kept = iter(before)

        def restore(part: Tensor) -> Tensor:
            old = next(kept)
            changed = active.view(-1, *(1,) * (part.dim() - 1))
            if old.shape != part.shape:
                old = F.pad(
                    old,
                    [n for a, b in zip(part.shape[:0:-1], old.shape[:0:-1], strict=True) for n in (0, a - b)],
                )
            return part.copy_(torch.where(changed, part, old))

        map_state(restore, state)
        return y - x if self.change else y


MIXES_TOKENS = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
    nn.RNNBase,
    _ConvNd,
    _AvgPoolNd,
    _MaxPoolNd,
    _AdaptiveAvgPoolNd,
    _AdaptiveMaxPoolNd,
    Mixer,
    PackedModule,
)
"""Classes whose outputs for a token depend on other tokens; so do classes with Attention in their name."""


def name_modules(
    modules: Mapping[str, nn.Module] | Iterable[nn.Module] | nn.Module,
) -> dict[str, nn.Module]:
    """Modules by name: "module" for a single one, numbers for those of a list."""
    if isinstance(modules, Mapping | nn.ModuleDict):
        named = dict(modules.items())
    elif isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        named = {"module": modules}
    else:
        named = {str(number): module for number, module in enumerate(modules)}
    for name, module in named.items():
        require(
            isinstance(module, nn.Module),
            f"module {name!r} must be an nn.Module, got {type(module).__name__}",
        )
    require(len(named) > 0, "modules must hold at least one module, got none")
    return named


def as_unit(name: str, module: nn.Module) -> nn.Module:
    """A module that a sparse layer can run: unchanged or wrapped. Otherwise a ValueError says what to do."""
    if isinstance(module, PackedModule):
        return module
    hint = f"module {name!r} is a mixer, which works on whole sequences: wrap it in seqboat.MixerUnit"
    require(not isinstance(module, Mixer), hint)
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
        attention = next(part for part in module.modules() if isinstance(part, nn.MultiheadAttention))
        _require_batch_first(name, module, attention.batch_first)
        return PaddedUnit(module, _encode)
    if isinstance(module, nn.MultiheadAttention):
        _require_batch_first(name, module, module.batch_first)
        return PaddedUnit(module, _attend)
    if isinstance(module, nn.RNNBase) and not module.bidirectional:
        _require_batch_first(name, module, module.batch_first)
        return PaddedUnit(module, _recur)
    for path, part in module.named_modules():
        if isinstance(part, MIXES_TOKENS) or "Attention" in type(part).__name__:
            inside = (
                f"contains {type(part).__name__} ({path}), which"
                if path
                else f"is {type(part).__name__}, which"
            )
            raise ValueError(
                f"module {name!r} {inside} mixes tokens, and as a token-wise module would mix the sequences of a "
                "batch: wrap the module in seqboat.PaddedUnit(module, call), which calls it on each sequence's "
                "active tokens (docs/layers.md, 'Any module, sparsely')"
            )
    return module


def _require_batch_first(name: str, module: nn.Module, batch_first: bool) -> None:
    require(batch_first, f"module {name!r} must be built with batch_first=True: {type(module).__name__}")


def _padding(real: Tensor) -> Tensor:
    """(batch, slots): what attention must not see. Of a sequence without tokens it sees all: no softmax is empty."""
    return ~real & real.any(dim=1, keepdim=True)


def _encode(module: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    out: Tensor = module(x, src_key_padding_mask=_padding(real))
    return out


def _attend(module: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    out: Tensor = module(x, x, x, key_padding_mask=_padding(real), need_weights=False)[0]
    return out


def _recur(module: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    out: Tensor = module(x)[0]  # from left to right: padding comes after all tokens
    return out
