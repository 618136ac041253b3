"""What a benchmark measures: sizes of a layer and its batch, and candidates by the names of mixers.

Two candidates are not mixers: "published" is the paper's algorithm (tests/published_layer.py of the repository), and
"lower-bound" is only the matrix products that our layer cannot avoid.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from seqboat.bench.rates import force_rate
from seqboat.core.checks import require
from seqboat.core.mixer import Mixer, directions_of
from seqboat.layers.gau import PositionsName
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.mixers.mega import MegaConfig
from seqboat.models.backbone import MixerConfig
from seqboat.ops.attention import AttentionName
from seqboat.training.settings_io import part_from_dict

Mode = Literal["training", "inference"]
MODES: tuple[Mode, ...] = ("training", "inference")


@dataclass(frozen=True, kw_only=True)
class LayerSetting:
    """Sizes of a layer and its batch; the defaults are the paper's Text task with half of the tokens active."""

    batch: int = 4
    """Sequences per batch."""
    length: int = 4096
    """Tokens per sequence."""
    d_model: int = 128
    """Width of the layer."""
    d_z: int = 64
    """Width of queries and keys in gated attention."""
    d_v: int = 256
    """Width of values in gated attention."""
    d_state: int = 16
    """States per channel in state-space layers."""
    window: int = 256
    """Size of the working memory in tokens."""
    heads: int = 4
    """Heads in multi-head attention."""
    attention: AttentionName = "softmax"
    """Attention function of gated attention."""
    positions: PositionsName = "compressed"
    """Position scheme of gated attention."""
    causal: bool = False
    """Whether the layer is causal or bidirectional."""
    prenorm: bool = False
    """Whether layers are pre-norm."""
    rate: float | None = 0.5
    """Activation rate to force; None for the routers' decisions."""
    dtype: str = "float32"
    """Dtype of weights and inputs."""
    device: str = "cpu"
    """Device to run on."""
    seed: int = 0
    """Random seed of weights and inputs."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "d_model", "d_z", "d_v", "d_state", "window", "heads"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.rate is None or 0 <= self.rate <= 1, f"rate must be between 0 and 1, got {self.rate}")
        require(
            isinstance(getattr(torch, self.dtype, None), torch.dtype),
            f"dtype must be a torch type such as float32, got {self.dtype!r}",
        )

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return self.batch * self.length

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a torch object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def where(self) -> str:
        """Description of the batch, for messages."""
        return f"{self.batch} x {self.length} tokens"


PRESETS = {
    "text": LayerSetting(),
    "enwik8": LayerSetting(
        batch=1, length=8192, d_model=616, d_z=128, d_v=1232, window=1024, heads=11,
        positions="rotary", causal=True, prenorm=True,
    ),
}  # fmt: skip
"""Layers of the paper: LRA's Text, and the language model of enwik8."""


# candidates

LOWER_BOUND = "lower-bound"
PUBLISHED = "published"


class Candidate(NamedTuple):
    """What to measure: a name, and the fields of its configuration that differ from the setting."""

    label: str
    name: str
    overrides: dict[str, Any]
    """by dotted name; d_model replaces the setting's width, compiled requests torch.compile"""


OURS = Candidate("seqboat", "seqboat", {})
"""The SeqBoat layer of the setting."""


def parse_candidate(text: str) -> Candidate:
    """Read NAME or NAME:FIELD=VALUE,FIELD=VALUE; fields of parts are dotted."""
    name, _, rest = text.partition(":")
    known = [*MIXERS, PUBLISHED, LOWER_BOUND]
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown candidate {name!r}{hint} There are: {', '.join(known)}")
    overrides = {}
    for pair in filter(None, rest.split(",")):
        field, equals, value = pair.partition("=")
        require(bool(equals), f"{text}: expected FIELD=VALUE after the colon, got {pair!r}")
        try:
            overrides[field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            overrides[field] = value
    require(not (overrides and name == LOWER_BOUND), f"{LOWER_BOUND} takes no fields: it follows the setting")
    width = overrides.get("d_model", 1)
    require(isinstance(width, int) and width >= 1, f"{text}: d_model must be an integer >= 1, got {width!r}")
    compiled = overrides.get("compiled", False)
    require(isinstance(compiled, bool), f"{text}: compiled must be True or False, got {compiled!r}")
    return Candidate(text, name, overrides)


def own_setting(candidate: Candidate, setting: LayerSetting) -> LayerSetting:
    """The setting, with the candidate's width if it has one."""
    return replace(setting, d_model=candidate.overrides.get("d_model", setting.d_model))


def configure(candidate: Candidate, setting: LayerSetting) -> Any:
    """The configuration of a candidate under a setting."""
    config = MIXERS["seqboat" if candidate.name in (PUBLISHED, LOWER_BOUND) else candidate.name]()
    config = _fit(config, setting)
    for path, value in candidate.overrides.items():
        if path in ("d_model", "compiled"):
            continue
        *parts, last = path.split(".")
        changed: Any = {last: list(value) if isinstance(value, tuple) else value}
        for part in reversed(parts):
            changed = {part: changed}
        config = part_from_dict(MixerConfig, changed, candidate.label, config)
    return config


def _fit(config: Any, setting: LayerSetting) -> Any:
    """Set the common fields of mixers to the values of the setting, in all parts of a configuration."""
    shared = {
        "causal": setting.causal,
        "prenorm": setting.prenorm,
        "d_z": setting.d_z,
        "d_v": setting.d_v,
        "d_state": setting.d_state,
        "heads": setting.heads,
        "max_positions": max(setting.length, 2),
    }
    if "bidirectional" not in directions_of(config):
        shared["causal"] = True  # it has only this direction
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            changes[field.name] = _fit(value, setting)
        elif field.name in shared:
            changes[field.name] = shared[field.name]
        elif field.name == "max_span":
            changes[field.name] = min(value, max(setting.length, 2))
    config = replace(config, **changes)
    if isinstance(config, SeqBoatConfig):
        gau = replace(config.gau, attention=setting.attention, positions=setting.positions)
        if (
            gau.window == SeqBoatConfig().gau.window
        ):  # otherwise the window is what distinguishes this variant
            gau = replace(gau, window=setting.window)
        # timings are those of the router of the paper, unless a rate is forced
        config = replace(config, gau=gau, init="paper", form="paper")
    if isinstance(config, MegaConfig):
        config = replace(config, attention=setting.attention)
    return config


PUBLISHED_SOURCE = Path(__file__).parents[3] / "tests" / "published_layer.py"
"""The published algorithm, which is in the repository but not in the installed package."""


def load_published() -> Any:
    """The class of the published algorithm, from the repository of this package."""
    require(
        PUBLISHED_SOURCE.is_file(),
        f"'{PUBLISHED}' needs the repository of this package: there is no {PUBLISHED_SOURCE}",
    )
    spec = importlib.util.spec_from_file_location("seqboat_published", PUBLISHED_SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Published


def build(candidate: Candidate, setting: LayerSetting) -> Mixer:
    """The layer of a candidate; its activation is forced if the setting has a rate."""
    torch.manual_seed(setting.seed)
    setting = own_setting(candidate, setting)
    config = configure(candidate, setting)
    layer = load_published()(setting.d_model, config) if candidate.name == PUBLISHED else None
    layer = layer or config.build(setting.d_model)
    layer = layer.to(setting.device, setting.torch_dtype)
    if setting.rate is not None:
        force_rate(layer, setting.rate, setting.seed)
    return layer
