"""Sequence models that attend only where attention pays off.

A state-space layer reads every token in linear time; a router decides per token whether to attend; the chosen
tokens are packed and attend to each other inside a small working memory.

Names are loaded when they are first used, so that the command line answers before torch is imported. Importing sets
an environment variable on virtual machines on which PyTorch would crash (`seqboat.processor`), and does nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from seqboat.processor import avoid_hidden_tiles
from seqboat.version import __version__

if TYPE_CHECKING:
    from seqboat.core.budget import BudgetConfig, RevivalConfig
    from seqboat.core.counts import activation
    from seqboat.core.losses import budget_loss, extra_loss
    from seqboat.core.policy import override_activation, update_budgets
    from seqboat.core.routers import (
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
    from seqboat.core.sma import Packed, PackedModule, Routing, compress, extract, pack
    from seqboat.core.state import detach_state, repeat_rows, select_rows, state_bytes
    from seqboat.core.watch import dead_routers
    from seqboat.mixers import MIXERS
    from seqboat.mixers.base import AsTensor, Mixer, MixerOutput, RecurrentMixer
    from seqboat.mixers.seqboat.activation import SparseModularActivation
    from seqboat.mixers.seqboat.gau import GAU, GAUConfig
    from seqboat.mixers.seqboat.layer import SeqBoat, SeqBoatConfig
    from seqboat.mixers.seqboat.units import MixerUnit, PaddedUnit
    from seqboat.mixers.ssm import SSMS
    from seqboat.mixers.ssm.ema import EMA, EMAConfig
    from seqboat.mixers.ssm.liquid_s4 import LiquidS4Config
    from seqboat.mixers.ssm.s4 import S4Config
    from seqboat.mixers.ssm.s4d import S4D, S4DConfig
    from seqboat.mixers.ssm.s5 import S5Config
    from seqboat.models.backbone import Backbone, BackboneConfig
    from seqboat.models.compile import compile_model, compile_step
    from seqboat.models.heads import Classifier, LanguageModel, Matcher
    from seqboat.ops.kernels.registry import kernels, use_kernels, using_kernels
    from seqboat.plugins import load_plugin
    from seqboat.retrofitting.model import RateSchedule, Retrofit, load_retrofit, retrofit

_HOMES = {
    "EMA": "mixers.ssm.ema",
    "GAU": "mixers.seqboat.gau",
    "MIXERS": "mixers",
    "ROUTERS": "core.routers",
    "S4D": "mixers.ssm.s4d",
    "AlwaysActiveConfig": "core.routers",
    "AsTensor": "mixers.base",
    "Backbone": "models.backbone",
    "BackboneConfig": "models.backbone",
    "BudgetConfig": "core.budget",
    "Classifier": "models.heads",
    "EMAConfig": "mixers.ssm.ema",
    "ExpertChoiceConfig": "core.routers",
    "GAUConfig": "mixers.seqboat.gau",
    "GumbelConfig": "core.routers",
    "LanguageModel": "models.heads",
    "Matcher": "models.heads",
    "Mixer": "mixers.base",
    "MixerOutput": "mixers.base",
    "MixerUnit": "mixers.seqboat.units",
    "Packed": "core.sma",
    "PackedModule": "core.sma",
    "PaddedUnit": "mixers.seqboat.units",
    "RateSchedule": "retrofitting.model",
    "RecurrentMixer": "mixers.base",
    "Retrofit": "retrofitting.model",
    "RevivalConfig": "core.budget",
    "Routing": "core.sma",
    "S4DConfig": "mixers.ssm.s4d",
    "SeqBoat": "mixers.seqboat.layer",
    "SeqBoatConfig": "mixers.seqboat.layer",
    "SigmoidConfig": "core.routers",
    "SparseModularActivation": "mixers.seqboat.activation",
    "TemperedSoftmaxConfig": "core.routers",
    "ThresholdConfig": "core.routers",
    "TopKConfig": "core.routers",
    "XMoEConfig": "core.routers",
    "extra_loss": "core.losses",
    "S5Config": "mixers.ssm.s5",
    "S4Config": "mixers.ssm.s4",
    "LiquidS4Config": "mixers.ssm.liquid_s4",
    "SSMS": "mixers.ssm",
    "activation": "core.counts",
    "budget_loss": "core.losses",
    "compile_model": "models.compile",
    "compile_step": "models.compile",
    "compress": "core.sma",
    "dead_routers": "core.watch",
    "detach_state": "core.state",
    "extract": "core.sma",
    "kernels": "ops.kernels.registry",
    "load_plugin": "plugins",
    "load_retrofit": "retrofitting.model",
    "override_activation": "core.policy",
    "pack": "core.sma",
    "repeat_rows": "core.state",
    "retrofit": "retrofitting.model",
    "select_rows": "core.state",
    "set_training_step": "core.routers",
    "state_bytes": "core.state",
    "update_budgets": "core.policy",
    "use_kernels": "ops.kernels.registry",
    "using_kernels": "ops.kernels.registry",
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
    "compile_step",
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


avoid_hidden_tiles()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'seqboat' has no attribute {name!r}")
    return getattr(import_module(f"seqboat.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
