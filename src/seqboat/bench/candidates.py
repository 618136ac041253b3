"""What a benchmark measures: mixers by their names, with the fields that differ from the setting.

Two candidates are not mixers: "published" is the paper's algorithm (tests/published_layer.py of the repository), and
"lower-bound" is only the matrix products that our layer cannot avoid.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch

from seqboat.bench.rates import force_rate
from seqboat.bench.setting import LayerSetting
from seqboat.core.checks import require
from seqboat.core.mixer import directions_of
from seqboat.mixers import MIXERS, Mixer, SeqBoatConfig
from seqboat.mixers.mega import MegaConfig
from seqboat.training.config import change_field

LOWER_BOUND = "lower-bound"
PUBLISHED = "published"
ALIASES = {"floor": LOWER_BOUND}
"""Earlier names that are still accepted."""


MIXER_TITLES = {
    "transformer": "Transformer",
    "transformer, fused": "Transformer, fused attention",
    "seqboat": "SeqBoat",
    "seqboat-gau-ffn": "SeqBoat-{GAU, FFN}",
    "seqboat-ffn": "SeqBoat-FFN",
    "seqboat-sigmoid": "SeqBoat-Sigmoid",
    "seqboat-moe": "SeqBoat-MoE",
    "seqboat-local": "SeqBoat-local",
    "seqboat-chunk": "SeqBoat-chunk",
    "seqboat-mem32": "SeqBoat-mem32",
    "seqboat-local32": "SeqBoat-local32",
    "seqboat-full": "SeqBoat-full",
    "seqboat-full-always": "SeqBoat-full, always activated",
    "seqboat-full-gumbel": "SeqBoat-full, Gumbel softmax",
    "seqboat-full-s4d": "SeqBoat-full with S4D",
    "mega": "MEGA",
    "mega-chunk": "MEGA-chunk",
    "s4d": "S4D",
    "s4": "S4",
    "s5": "S5",
    "liquid-s4": "Liquid-S4",
    "h3": "H3",
    "h3-hybrid": "H3, hybrid",
    "mamba2": "Mamba-2",
    "gated-deltanet": "Gated DeltaNet",
    "samba": "Samba",
    "samba-gdn": "Samba, Gated DeltaNet",
    "transformer-xl": "Transformer-XL",
    "adaptive-span": "Adaptive Span",
    "linformer": "Linformer",
    "performer": "Performer",
    "bigbird": "BigBird",
    "luna": "Luna",
    "reformer": "Reformer",
}
"""Mixers as figures name them."""
VALUES = {"implementation=sdpa": "fused attention", "compiled=True": "compiled"}
"""Fields that are said in words."""


def candidate_title(label: str) -> str:
    """A candidate as a legend names it.

    >>> candidate_title("transformer:implementation=sdpa"), candidate_title("seqboat:gau.window=32")
    ('Transformer, fused attention', 'SeqBoat, window 32')
    """
    name, _, rest = label.partition(":")
    others = {PUBLISHED: "published algorithm", LOWER_BOUND: "matmul lower bound"}
    words = [MIXER_TITLES.get(name) or others.get(name, name)]
    for pair in filter(None, rest.split(",")):
        field, _, value = pair.partition("=")
        words.append(VALUES.get(pair, f"{field.rpartition('.')[2].replace('_', ' ')} {value}"))
    return ", ".join(words)


class Candidate(NamedTuple):
    """What to measure: a name, and the fields of its configuration that differ from the setting."""

    label: str
    name: str
    overrides: dict[str, Any]
    """by dotted name; d_model replaces the setting's width, compiled requests torch.compile"""


OURS = Candidate("seqboat", "seqboat", {})
"""The SeqBoat layer of the setting."""


def parse_candidate(text: str) -> Candidate:
    """Read NAME or NAME:FIELD=VALUE,FIELD=VALUE; fields of parts are dotted.

    >>> parse_candidate("seqboat:gau.window=32,causal=True").overrides
    {'gau.window': 32, 'causal': True}
    """
    name, colon, rest = text.partition(":")
    name = ALIASES.get(name, name)
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
    return Candidate(name + colon + rest, name, overrides)


def own_setting(candidate: Candidate, setting: LayerSetting) -> LayerSetting:
    """The setting, with the candidate's width if it has one.

    >>> own_setting(parse_candidate("mega:d_model=96"), LayerSetting()).d_model
    96
    """
    return replace(setting, d_model=candidate.overrides.get("d_model", setting.d_model))


def configure(candidate: Candidate, setting: LayerSetting) -> Any:
    """The configuration of a candidate under a setting."""
    config = MIXERS["seqboat" if candidate.name in (PUBLISHED, LOWER_BOUND) else candidate.name]()
    config = _fit(config, setting)
    for path, value in candidate.overrides.items():
        if path in ("d_model", "compiled"):
            continue
        config = change_field(config, path, value, candidate.label)
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
        config = replace(config, gau=gau, init="paper")
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
