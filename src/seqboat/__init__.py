"""Sequence models that attend only where attention is worth its price.

A state-space layer reads every token in linear time; a router decides per token whether to attend; the chosen
tokens are packed and attend to each other inside a small working memory.

Names are loaded when they are first used, so that the command line answers before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from seqboat.version import __version__

if TYPE_CHECKING:
    from seqboat.budget import BudgetConfig, RevivalConfig, budget_loss, override_activation, update_budgets
    from seqboat.compile import compile_model, compile_step
    from seqboat.mixers import MIXERS
    from seqboat.mixers.activation import SparseModularActivation
    from seqboat.mixers.base import Mixer, MixerOutput, RecurrentMixer
    from seqboat.mixers.ema import EMA, EMAConfig
    from seqboat.mixers.gau import GAU, GAUConfig
    from seqboat.mixers.s4d import S4D, S4DConfig
    from seqboat.mixers.seqboat import SeqBoat, SeqBoatConfig
    from seqboat.mixers.units import MixerUnit, PaddedUnit
    from seqboat.model import Backbone, BackboneConfig, Classifier, LanguageModel, Matcher
    from seqboat.retrofitting import RateSchedule, Retrofit, load_retrofit, retrofit
    from seqboat.routers import (
        ROUTERS,
        AlwaysActiveConfig,
        ExpertChoiceConfig,
        GumbelConfig,
        SigmoidConfig,
        TemperedSoftmaxConfig,
        ThresholdConfig,
        TopKConfig,
        XMoEConfig,
        activation,
        set_training_step,
    )
    from seqboat.sma import Packed, PackedModule, Routing, compress, extract, pack
    from seqboat.state import detach_state, repeat_rows, select_rows, state_bytes

_HOMES = {
    "EMA": "mixers.ema",
    "GAU": "mixers.gau",
    "MIXERS": "mixers",
    "ROUTERS": "routers",
    "S4D": "mixers.s4d",
    "AlwaysActiveConfig": "routers",
    "Backbone": "model",
    "BackboneConfig": "model",
    "BudgetConfig": "budget",
    "Classifier": "model",
    "EMAConfig": "mixers.ema",
    "ExpertChoiceConfig": "routers",
    "GAUConfig": "mixers.gau",
    "GumbelConfig": "routers",
    "LanguageModel": "model",
    "Matcher": "model",
    "Mixer": "mixers.base",
    "MixerOutput": "mixers.base",
    "MixerUnit": "mixers.units",
    "Packed": "sma",
    "PackedModule": "sma",
    "PaddedUnit": "mixers.units",
    "RateSchedule": "retrofitting",
    "RecurrentMixer": "mixers.base",
    "Retrofit": "retrofitting",
    "RevivalConfig": "budget",
    "Routing": "sma",
    "S4DConfig": "mixers.s4d",
    "SeqBoat": "mixers.seqboat",
    "SeqBoatConfig": "mixers.seqboat",
    "SigmoidConfig": "routers",
    "SparseModularActivation": "mixers.activation",
    "TemperedSoftmaxConfig": "routers",
    "ThresholdConfig": "routers",
    "TopKConfig": "routers",
    "XMoEConfig": "routers",
    "activation": "routers",
    "budget_loss": "budget",
    "compile_model": "compile",
    "compile_step": "compile",
    "compress": "sma",
    "detach_state": "state",
    "extract": "sma",
    "load_retrofit": "retrofitting",
    "override_activation": "budget",
    "pack": "sma",
    "repeat_rows": "state",
    "retrofit": "retrofitting",
    "select_rows": "state",
    "set_training_step": "routers",
    "state_bytes": "state",
    "update_budgets": "budget",
}
"""Where each public name lives."""

__all__ = [
    "EMA",
    "GAU",
    "MIXERS",
    "ROUTERS",
    "S4D",
    "AlwaysActiveConfig",
    "Backbone",
    "BackboneConfig",
    "BudgetConfig",
    "Classifier",
    "EMAConfig",
    "ExpertChoiceConfig",
    "GAUConfig",
    "GumbelConfig",
    "LanguageModel",
    "Matcher",
    "Mixer",
    "MixerOutput",
    "MixerUnit",
    "Packed",
    "PackedModule",
    "PaddedUnit",
    "RateSchedule",
    "RecurrentMixer",
    "Retrofit",
    "RevivalConfig",
    "Routing",
    "S4DConfig",
    "SeqBoat",
    "SeqBoatConfig",
    "SigmoidConfig",
    "SparseModularActivation",
    "TemperedSoftmaxConfig",
    "ThresholdConfig",
    "TopKConfig",
    "XMoEConfig",
    "__version__",
    "activation",
    "budget_loss",
    "compile_model",
    "compile_step",
    "compress",
    "detach_state",
    "extract",
    "load_retrofit",
    "override_activation",
    "pack",
    "repeat_rows",
    "retrofit",
    "select_rows",
    "set_training_step",
    "state_bytes",
    "update_budgets",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'seqboat' has no attribute {name!r}")
    return getattr(import_module(f"seqboat.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
