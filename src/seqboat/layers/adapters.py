"""Ordinary modules as modules of a sparse layer: which ones mix tokens, and how they are wrapped or refused.

A token-wise module is called on the active tokens of the whole batch at once. One that lets tokens see each other
would mix the sequences of a batch there, so it must become a `PackedModule` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from seqboat.core.checks import require
from seqboat.core.mixer import Mixer
from seqboat.layers.packing import PackedModule
from seqboat.layers.units import PaddedUnit

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
