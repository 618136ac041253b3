"""Equal parameter counts: every mixer beside SeqBoat, in runs and in single layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from seqboat.cli.main import main
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers import MIXERS, Mixer, PerformerConfig, TransformerConfig
from seqboat.models.cost import count_parameters
from seqboat.paper.matching import (
    TABLES,
    count_of_run,
    match_layer,
    match_parameters,
    too_long,
)
from seqboat.recipes import RECIPES
from seqboat.training.config import from_yaml, override

RECIPE = "lra.listops-small"


@dataclass(frozen=True)
class Unwilling:
    """A mixer that no width suits."""

    def build(self, d_model: int) -> Mixer:
        raise ValueError(f"{d_model} is not my size")


def test_counts_are_those_of_the_whole_model() -> None:
    for layers in (1, 3):
        config = RECIPES[RECIPE]().replace(model={"num_layers": layers})
        assert count_of_run(config) == count_parameters(config.build_model())


@pytest.mark.parametrize("mixer", ["transformer", "adaptive-span", "linformer", "mega", "s4d"])
def test_models_come_near_the_recipe(mixer: str) -> None:
    reference = RECIPES[RECIPE]()
    config = override(reference, ["--model.mixer", mixer])
    matched, found = match_parameters(config, reference)
    assert found.target == count_parameters(reference.build_model())
    assert found.parameters == count_parameters(matched.build_model())
    assert abs(found.parameters - found.target) < 0.03 * found.target
    # MEGA without its feed-forward block is already larger than SeqBoat
    assert ("d_model" in found.changes) == (mixer in ("mega", "s4d"))
    assert matched.model.d_model == found.changes.get("d_model", config.model.d_model)
    longest = config.build_task().max_length
    rest = {name: value for name, value in found.changes.items() if name not in ("d_model", "d_ff")}
    # tables end with the longest sequence, if not with the recipe's; projections along time make room
    assert (
        rest
        == {
            "transformer": {},
            "adaptive-span": {"max_span": longest},
            "linformer": {"projected": 128},
            "mega": {},
            "s4d": {},
        }[mixer]
    )
    changed = {name: value for name, value in found.changes.items() if name != "d_model"}
    assert matched.model.mixer == replace(config.model.mixer, **changed)  # type: ignore[type-var]


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_comes_near(mixer: str) -> None:
    reference = RECIPES[RECIPE]()
    config = override(reference, ["--model.mixer", mixer])
    matched, found = match_parameters(config, reference)
    assert abs(found.parameters - found.target) < 0.04 * found.target
    assert found.parameters == count_parameters(matched.build_model())
    longest = config.build_task().max_length
    assert not too_long(matched.model.mixer, longest)
    assert bool(too_long(config.model.mixer, longest)) == any(
        name.split(".")[-1] in TABLES for name in found.changes
    )


def test_the_block_of_any_mixer_makes_room() -> None:
    """However it is told to have one: MEGA's behind each SeqBoat layer, or one among the modules."""
    for name in ("seqboat-ffn", "seqboat-gau-ffn"):
        mixer = MIXERS[name]()
        target = count_parameters(mixer.build(64)) - 50 * (2 * 64 + 1)
        found = match_layer(mixer, 64, target)
        assert found.changes == {"d_ff": 128 - 50} and found.parameters == target
    assert "d_ff" not in match_layer(SeqBoatConfig(), 64, 20_000).changes


def test_no_width_is_nearer() -> None:
    target = count_parameters(SeqBoatConfig().build(64))
    found = match_layer(TransformerConfig(), 64, target)
    assert list(found.changes) == ["d_ff"] and count_parameters(found.mixer.build(64)) == found.parameters
    for other in (-1, 1):
        layer = replace(TransformerConfig(), d_ff=found.changes["d_ff"] + other).build(64)
        assert abs(count_parameters(layer) - target) >= abs(found.parameters - target)


def test_the_model_gets_narrower_where_the_mixer_alone_is_too_large() -> None:
    mixer = PerformerConfig(heads=4)
    small = match_layer(mixer, 64, 6000)
    assert set(small.changes) == {"d_model", "d_ff"} and small.d_model % 4 == 0
    assert small.mixer == replace(mixer, d_ff=small.changes["d_ff"])
    assert abs(small.parameters - 6000) < 2 * small.d_model
    rotary = match_layer(TransformerConfig(heads=4, positions="rotary"), 64, 2000)
    assert rotary.d_model % 8 == 0


def test_reports_and_refusals() -> None:
    found = match_layer(TransformerConfig(), 16, 10_000)
    assert found.report() == (
        f"{found.parameters:,} parameters with d_ff = {found.changes['d_ff']}; 10,000 to match "
        f"({found.parameters / 10_000 - 1:+.2%})"
    )
    with pytest.raises(ValueError, match="target must be an integer >= 1, got 0"):
        match_layer(TransformerConfig(), 16, 0)
    with pytest.raises(ValueError, match="no width up to 16 suits Unwilling"):
        match_layer(Unwilling(), 16, 10)


def test_the_command_line_prints_the_matched_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    words = ["train", RECIPE, "--model.mixer", "transformer", "--match-parameters", "--print_config"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "to match" in err
    path = tmp_path / "config.yaml"  # type: ignore[operator]
    path.write_text(out)
    target = count_of_run(RECIPES[RECIPE]())
    assert abs(count_of_run(from_yaml(path)) - target) < 0.03 * target
    path.write_text(out.replace(f"recipe: {RECIPE}", "recipe: ''"))
    assert main(["train", "--config", str(path), "--match-parameters", "--print_config"]) == 2
    assert "--match-parameters needs a recipe" in capsys.readouterr().err
