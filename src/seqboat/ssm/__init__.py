"""State-space kernels, each with one line in SSMS."""

from typing import Any

from seqboat.core.settings import FAMILIES
from seqboat.ssm.conv import EMAConvConfig
from seqboat.ssm.diagonal import EMAConfig, S4DConfig, SSMConfig
from seqboat.ssm.liquid_s4 import LiquidS4Config
from seqboat.ssm.s4 import S4Config
from seqboat.ssm.s5 import S5Config

SSMS: dict[str, Any] = {
    "ema": EMAConfig,
    "ema-conv": EMAConvConfig,
    "s4d": S4DConfig,
    "s4": S4Config,
    "s5": S5Config,
    "liquid-s4": LiquidS4Config,
}
"""Every kernel that SeqBoat takes as its state-space layer, by the name that commands, files and keywords use."""
FAMILIES[SSMConfig] = SSMS

__all__ = ["SSMS", "SSMConfig"]
