"""Sequence models that attend only where attention pays off.

A state-space layer reads every token in linear time; a router decides per token whether to attend; the chosen
tokens are packed and attend to each other inside a small working memory.

Names are loaded when they are first used, so that the command line answers before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from seqboat.version import __version__

if TYPE_CHECKING:
    from seqboat.core.mixer import AsTensor, Mixer, MixerOutput, Routing, activation
    from seqboat.core.state import copy_state, detach_state, repeat_rows, select_rows, state_bytes
    from seqboat.estimators import SequenceClassifier, SequenceRegressor, SequenceTagger
    from seqboat.layers.adapters import MixerUnit, PaddedUnit
    from seqboat.layers.budget import BudgetConfig, extra_loss
    from seqboat.layers.gau import GAU, GAUConfig
    from seqboat.layers.price import AttentionPrice
    from seqboat.layers.routers import (
        ROUTERS,
        AlwaysActiveConfig,
        GumbelConfig,
        SigmoidConfig,
        TemperedSoftmaxConfig,
        TopKConfig,
        XMoEConfig,
        set_training_step,
    )
    from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
    from seqboat.layers.sma import (
        Packed,
        PackedModule,
        SparseModularActivation,
        compress,
        dead_routers,
        extract,
        override_activation,
        pack,
    )
    from seqboat.mixers import MIXERS
    from seqboat.models.backbone import Backbone, BackboneConfig
    from seqboat.models.compile import compile_model
    from seqboat.models.heads import Classifier, LanguageModel, Matcher
    from seqboat.ops.kernels import kernels, use_kernels, using_kernels
    from seqboat.plugins import load_plugin
    from seqboat.retrofitting.model import RateSchedule, Retrofit, load_retrofit, retrofit
    from seqboat.ssm import SSMS
    from seqboat.ssm.diagonal import EMA, S4D, EMAConfig, S4DConfig
    from seqboat.ssm.liquid_s4 import LiquidS4Config
    from seqboat.ssm.s4 import S4Config
    from seqboat.ssm.s5 import S5Config

_HOMES = {
    "EMA": "ssm.diagonal",
    "GAU": "layers.gau",
    "MIXERS": "mixers",
    "ROUTERS": "layers.routers",
    "S4D": "ssm.diagonal",
    "AlwaysActiveConfig": "layers.routers",
    "AsTensor": "core.mixer",
    "AttentionPrice": "layers.price",
    "Backbone": "models.backbone",
    "BackboneConfig": "models.backbone",
    "BudgetConfig": "layers.budget",
    "Classifier": "models.heads",
    "EMAConfig": "ssm.diagonal",
    "GAUConfig": "layers.gau",
    "GumbelConfig": "layers.routers",
    "LanguageModel": "models.heads",
    "Matcher": "models.heads",
    "Mixer": "core.mixer",
    "MixerOutput": "core.mixer",
    "MixerUnit": "layers.adapters",
    "Packed": "layers.sma",
    "PackedModule": "layers.sma",
    "PaddedUnit": "layers.adapters",
    "RateSchedule": "retrofitting.model",
    "Retrofit": "retrofitting.model",
    "Routing": "core.mixer",
    "S4DConfig": "ssm.diagonal",
    "SeqBoat": "layers.seqboat",
    "SeqBoatConfig": "layers.seqboat",
    "SigmoidConfig": "layers.routers",
    "SparseModularActivation": "layers.sma",
    "TemperedSoftmaxConfig": "layers.routers",
    "TopKConfig": "layers.routers",
    "XMoEConfig": "layers.routers",
    "extra_loss": "layers.budget",
    "S5Config": "ssm.s5",
    "S4Config": "ssm.s4",
    "LiquidS4Config": "ssm.liquid_s4",
    "SSMS": "ssm",
    "SequenceClassifier": "estimators",
    "SequenceRegressor": "estimators",
    "SequenceTagger": "estimators",
    "activation": "core.mixer",
    "compile_model": "models.compile",
    "compress": "layers.sma",
    "copy_state": "core.state",
    "dead_routers": "layers.sma",
    "detach_state": "core.state",
    "extract": "layers.sma",
    "kernels": "ops.kernels",
    "load_plugin": "plugins",
    "load_retrofit": "retrofitting.model",
    "override_activation": "layers.sma",
    "pack": "layers.sma",
    "repeat_rows": "core.state",
    "retrofit": "retrofitting.model",
    "select_rows": "core.state",
    "set_training_step": "layers.routers",
    "state_bytes": "core.state",
    "use_kernels": "ops.kernels",
    "using_kernels": "ops.kernels",
}
"""Where each public name lives."""

__all__ = [
    "EMA",
    "GAU",
    "MIXERS",
    "ROUTERS",
    "S4D",
    "SSMS",
    "AlwaysActiveConfig",
    "AsTensor",
    "AttentionPrice",
    "Backbone",
    "BackboneConfig",
    "BudgetConfig",
    "Classifier",
    "EMAConfig",
    "GAUConfig",
    "GumbelConfig",
    "LanguageModel",
    "LiquidS4Config",
    "Matcher",
    "Mixer",
    "MixerOutput",
    "MixerUnit",
    "Packed",
    "PackedModule",
    "PaddedUnit",
    "RateSchedule",
    "Retrofit",
    "Routing",
    "S4Config",
    "S4DConfig",
    "S5Config",
    "SeqBoat",
    "SeqBoatConfig",
    "SequenceClassifier",
    "SequenceRegressor",
    "SequenceTagger",
    "SigmoidConfig",
    "SparseModularActivation",
    "TemperedSoftmaxConfig",
    "TopKConfig",
    "XMoEConfig",
    "__version__",
    "activation",
    "compile_model",
    "compress",
    "copy_state",
    "dead_routers",
    "detach_state",
    "extra_loss",
    "extract",
    "kernels",
    "load_plugin",
    "load_retrofit",
    "override_activation",
    "pack",
    "repeat_rows",
    "retrofit",
    "select_rows",
    "set_training_step",
    "state_bytes",
    "use_kernels",
    "using_kernels",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'seqboat' has no attribute {name!r}")
    return getattr(import_module(f"seqboat.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
