"""Every public name is documented: its arguments, or its fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import seqboat
from seqboat import (
    Backbone,
    BackboneConfig,
    BudgetConfig,
    Classifier,
    EMAConfig,
    GAUConfig,
    LanguageModel,
    Matcher,
    S4DConfig,
    SeqBoat,
    SeqBoatConfig,
    SigmoidConfig,
)
from seqboat.core.settings import field_texts, fill_in
from seqboat.mixers import MIXERS
from seqboat.mixers.mega import Mega, MegaConfig
from seqboat.mixers.transformer import Transformer, TransformerConfig
from seqboat.models.heads import Tagger
from seqboat.training.config import RunConfig

NAMES = {f"seqboat.{name}": getattr(seqboat, name) for name in seqboat.__all__ if name != "__version__"} | {
    f"seqboat.mixers.{name}": config for name, config in MIXERS.items()
}
TABLES = {name: thing for name, thing in NAMES.items() if isinstance(thing, dict)}
OTHERS = {name: thing for name, thing in NAMES.items() if name not in TABLES}
FIELDED = {
    name: thing
    for name, thing in OTHERS.items()
    if dataclasses.is_dataclass(thing) or hasattr(thing, "_fields")
}
CALLED = {
    name: thing
    for name, thing in OTHERS.items()
    if name not in FIELDED
    and not name.startswith("seqboat.mixers.")  # these take a width, and a configuration
}


def parameters(thing: Any) -> list[str]:
    """What a caller may give: arguments of a function, or of a class with a constructor."""
    if inspect.isclass(thing) and not any("__init__" in vars(part) for part in thing.__mro__[:1]):
        return []  # an abstract class
    return [name for name in inspect.signature(thing).parameters if name != "self"]


@pytest.mark.parametrize("name", CALLED)
def test_arguments_are_documented(name: str) -> None:
    text = inspect.getdoc(CALLED[name]) or ""
    section = re.split(r"\n(?=\S)", text.partition("Args:\n")[2])[0]
    listed = re.findall(r"^    (\w+):", section, flags=re.MULTILINE)
    assert listed == parameters(CALLED[name])


@pytest.mark.parametrize("name", FIELDED)
def test_fields_are_documented(name: str) -> None:
    thing = FIELDED[name]
    fields = thing._fields if hasattr(thing, "_fields") else [f.name for f in dataclasses.fields(thing)]
    texts = field_texts(thing)
    assert [field for field in fields if not texts.get(field)] == []


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_documented(name: str) -> None:
    module = import_module(f"seqboat.{seqboat._HOMES[name.rpartition('.')[2]]}")
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
    (place,) = [
        i
        for i, node in enumerate(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and name.rpartition(".")[2] in ast.unparse(node).partition("=")[0].partition(":")[0].split()
    ]
    following = tree[place + 1]
    assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)


def test_help_tells_everything_about_the_layer() -> None:
    text = inspect.getdoc(SeqBoat) or ""
    for part in (
        "Args:",
        "(batch, time, d_model)",
        "Returns:",
        "MixerOutput(y, state, routing)",
        "Raises:",
        ">>>",
    ):
        assert part in text
    listed = re.findall(r"\b(\w+) \(", text.partition("Args:")[2].partition("Calling it:")[0])
    known = {
        field.name
        for part in (SeqBoatConfig, GAUConfig, EMAConfig, BudgetConfig)
        for field in dataclasses.fields(part)
    }
    assert {"causal", "window", "router", "target"} <= set(listed) <= known


# settings as keywords


def test_keywords_are_the_same_as_a_configuration() -> None:
    config = SeqBoatConfig(
        causal=True, gau=GAUConfig(window=128), ssm=S4DConfig(d_state=8), router=SigmoidConfig()
    )
    assert SeqBoat(8, causal=True, window=128, ssm="s4d", d_state=8, router="sigmoid").config == config
    assert SeqBoat(8, SeqBoatConfig(causal=True), window=9).config == SeqBoatConfig(
        causal=True, gau=GAUConfig(window=9)
    )
    assert SeqBoat(8).config == SeqBoatConfig()
    assert Transformer(8, heads=2, causal=True).config == TransformerConfig(heads=2, causal=True)
    assert Mega(8, d_z=4).config == MegaConfig(d_z=4)
    model = LanguageModel(vocab=7, d_model=8, num_layers=1, window=4)
    assert model.backbone.config == BackboneConfig(
        mixer=SeqBoatConfig(causal=True, gau=GAUConfig(window=4)), vocab=7, d_model=8, num_layers=1
    )
    for kind in (Classifier, Tagger, Matcher):
        made = kind(classes=3, vocab=7, d_model=8, num_layers=1, mixer="transformer", heads=2)
        assert made.backbone.config.mixer == TransformerConfig(heads=2)
        assert made.head.out.out_features == 3
    changed = Backbone(model.backbone.config, d_model=16)
    assert changed.config == dataclasses.replace(model.backbone.config, d_model=16)


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_is_built_by_name(name: str) -> None:
    few: dict[str, Any] = {"heads": 2} if has_heads(name) else {}
    model = Backbone(channels=2, d_model=8, num_layers=1, mixer=name, **few)
    assert type(model.config.mixer) is MIXERS[name]


def has_heads(name: str) -> bool:
    return "heads" in [field.name for field in dataclasses.fields(MIXERS[name])]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SeqBoat(8, windw=3), "SeqBoat has no argument 'windw'; did you mean 'window'?"),
        (
            lambda: SeqBoat(8, qqq=3),
            "SeqBoat has no argument 'qqq'; it has d_model, config, ssm, router",
        ),
        (lambda: SeqBoat("8"), "SeqBoat: d_model must be an integer, got '8'"),  # type: ignore[arg-type]
        (lambda: SeqBoat(8.0), "SeqBoat: d_model must be an integer, got 8.0"),  # type: ignore[arg-type]
        (lambda: SeqBoat(8, True), "SeqBoat: config must be a SeqBoatConfig, got True; single settings"),  # type: ignore[arg-type]
        (lambda: SeqBoat(8, MegaConfig()), "SeqBoat: config must be a SeqBoatConfig, got MegaConfig"),  # type: ignore[arg-type]
        (lambda: SeqBoat(8, dropout="no"), "SeqBoat: dropout must be a number, got 'no'"),
        (lambda: SeqBoat(8, causal=1), "SeqBoat: causal must be True or False, got 1"),
        (lambda: SeqBoat(8, window="8"), "SeqBoat: window must be an integer, got '8'"),
        (lambda: SeqBoat(8, router=torch.nn.Linear), "SeqBoat: router must be a RouterConfig, got <class"),
        (lambda: GAUConfig(window="8"), "GAUConfig: window must be an integer, got '8'"),  # type: ignore[arg-type]
        (lambda: GAUConfig(windw=8), "GAUConfig has no setting 'windw'; did you mean 'window'?"),  # type: ignore[call-arg]
        (lambda: GAUConfig(8), "GAUConfig takes its settings by name, got 8 without one"),  # type: ignore[call-arg]
        (lambda: EMAConfig(truncation=1.5), "truncation must be an integer or None, got 1.5"),  # type: ignore[arg-type]
        (lambda: BudgetConfig(cap=("a",)), "BudgetConfig: cap must be"),  # type: ignore[arg-type]
        (lambda: BackboneConfig(mixer="mega"), "BackboneConfig: mixer must be a MixerConfig, got 'mega'"),  # type: ignore[arg-type]
        (lambda: Classifier(clases=3), "Classifier has no argument 'clases'; did you mean 'classes'?"),
        (lambda: LanguageModel(vocab=8, mixer=3), "LanguageModel: mixer must be a MixerConfig, got 3"),
        (lambda: RunConfig(task=3, model=4), "RunConfig: task must be a TaskConfig, got 3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(build: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SeqBoat(8, router="sigmod"), "router has no form 'sigmod'; did you mean 'sigmoid'?"),
        (lambda: SeqBoat(8, norm="bach"), "norm must be one of layer, batch, scale, rms; got 'bach'"),
        (lambda: SeqBoat(0), "d_model must be an integer >= 1, got 0"),
        (lambda: LanguageModel(vocab=8, mixer="seqbot"), "LanguageModel has no mixer 'seqbot'; did you mean"),
    ],
)
def test_wrong_values_are_named(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build()
    assert not isinstance(caught.value, TypeError)


def test_parts_inside_of_parts_change_together() -> None:
    """Two settings of one part arrive in one step: their checks may depend on each other."""
    filled = fill_in(
        BackboneConfig, BackboneConfig(mixer=SeqBoatConfig()), {"d_z": 4, "window": 5, "d_model": 6}, 0
    )
    assert filled == BackboneConfig(mixer=SeqBoatConfig(gau=GAUConfig(d_z=4, window=5)), d_model=6)
