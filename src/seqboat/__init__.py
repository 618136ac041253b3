"""Sequence models that attend only where attention pays off.

A state-space layer reads every token in linear time; a router decides per token whether to attend; the chosen
tokens are packed and attend to each other inside a small working memory.

Names are loaded when they are first used, so that the command line answers before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from seqboat.version import __version__

if TYPE_CHECKING:
    from seqboat.core.mixer import AsTensor, Mixer, MixerOutput, RecurrentMixer
    from seqboat.core.state import detach_state, repeat_rows, select_rows, state_bytes
    from seqboat.layers.budget import BudgetConfig, RevivalConfig
    from seqboat.layers.counts import activation
    from seqboat.layers.gau import GAU, GAUConfig
    from seqboat.layers.losses import budget_loss, extra_loss
    from seqboat.layers.packing import Packed, PackedModule, Routing, compress, extract, pack
    from seqboat.layers.policy import override_activation, update_budgets
    from seqboat.layers.price import AttentionPrice
    from seqboat.layers.routers import (
        ROUTERS,
        AlwaysActiveConfig,
        ExpertChoiceConfig,
        GumbelConfig,
        SigmoidConfig,
        TemperedSoftmaxConfig,
        ThresholdConfig,
        TopKConfig,
        XMoEConfig,
        set_training_step,
    )
    from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
    from seqboat.layers.sma import SparseModularActivation
    from seqboat.layers.units import MixerUnit, PaddedUnit
    from seqboat.layers.watch import dead_routers
    from seqboat.mixers import MIXERS
    from seqboat.models.backbone import Backbone, BackboneConfig
    from seqboat.models.compile import compile_model
    from seqboat.models.heads import Classifier, LanguageModel, Matcher
    from seqboat.ops.kernels import kernels, use_kernels, using_kernels
    from seqboat.plugins import load_plugin
    from seqboat.retrofitting.model import RateSchedule, Retrofit, load_retrofit, retrofit
    from seqboat.ssm import SSMS
    from seqboat.ssm.ema import EMA, EMAConfig
    from seqboat.ssm.liquid_s4 import LiquidS4Config
    from seqboat.ssm.s4 import S4Config
    from seqboat.ssm.s4d import S4D, S4DConfig
    from seqboat.ssm.s5 import S5Config

_HOMES = {
    "EMA": "ssm.ema",
    "GAU": "layers.gau",
    "MIXERS": "mixers",
    "ROUTERS": "layers.routers",
    "S4D": "ssm.s4d",
    "AlwaysActiveConfig": "layers.routers",
    "AsTensor": "core.mixer",
    "AttentionPrice": "layers.price",
    "Backbone": "models.backbone",
    "BackboneConfig": "models.backbone",
    "BudgetConfig": "layers.budget",
    "Classifier": "models.heads",
    "EMAConfig": "ssm.ema",
    "ExpertChoiceConfig": "layers.routers",
    "GAUConfig": "layers.gau",
    "GumbelConfig": "layers.routers",
    "LanguageModel": "models.heads",
    "Matcher": "models.heads",
    "Mixer": "core.mixer",
    "MixerOutput": "core.mixer",
    "MixerUnit": "layers.units",
    "Packed": "layers.packing",
    "PackedModule": "layers.packing",
    "PaddedUnit": "layers.units",
    "RateSchedule": "retrofitting.model",
    "RecurrentMixer": "core.mixer",
    "Retrofit": "retrofitting.model",
    "RevivalConfig": "layers.budget",
    "Routing": "layers.packing",
    "S4DConfig": "ssm.s4d",
    "SeqBoat": "layers.seqboat",
    "SeqBoatConfig": "layers.seqboat",
    "SigmoidConfig": "layers.routers",
    "SparseModularActivation": "layers.sma",
    "TemperedSoftmaxConfig": "layers.routers",
    "ThresholdConfig": "layers.routers",
    "TopKConfig": "layers.routers",
    "XMoEConfig": "layers.routers",
    "extra_loss": "layers.losses",
    "S5Config": "ssm.s5",
    "S4Config": "ssm.s4",
    "LiquidS4Config": "ssm.liquid_s4",
    "SSMS": "ssm",
    "activation": "layers.counts",
    "budget_loss": "layers.losses",
    "compile_model": "models.compile",
    "compress": "layers.packing",
    "dead_routers": "layers.watch",
    "detach_state": "core.state",
    "extract": "layers.packing",
    "kernels": "ops.kernels",
    "load_plugin": "plugins",
    "load_retrofit": "retrofitting.model",
    "override_activation": "layers.policy",
    "pack": "layers.packing",
    "repeat_rows": "core.state",
    "retrofit": "retrofitting.model",
    "select_rows": "core.state",
    "set_training_step": "layers.routers",
    "state_bytes": "core.state",
    "update_budgets": "layers.policy",
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
    "ExpertChoiceConfig",
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
    "RecurrentMixer",
    "Retrofit",
    "RevivalConfig",
    "Routing",
    "S4Config",
    "S4DConfig",
    "S5Config",
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
    "compress",
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
    "update_budgets",
    "use_kernels",
    "using_kernels",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'seqboat' has no attribute {name!r}")
    return getattr(import_module(f"seqboat.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
