"""Equal parameter counts: every mixer beside SeqBoat, in runs and in single layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from seqboat.cli import main
from seqboat.config import from_yaml, override
from seqboat.matching import count_of_run, count_parameters, match_layer, match_parameters
from seqboat.mixers import LinformerConfig, Mixer, TransformerConfig
from seqboat.mixers.seqboat import SeqBoatConfig
from seqboat.recipes import RECIPES

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


@pytest.mark.parametrize("mixer", ["transformer", "transformer-xl", "mega", "s4d"])
def test_models_come_near_the_recipe(mixer: str) -> None:
    reference = RECIPES[RECIPE]()
    config = override(reference, ["--model.mixer", mixer])
    matched, found = match_parameters(config, reference)
    assert found.target == count_parameters(reference.build_model())
    assert found.parameters == count_parameters(matched.build_model())
    assert abs(found.parameters - found.target) < 0.03 * found.target
    # MEGA without its feed-forward block is already larger than SeqBoat
    assert (found.field == "d_model") == (mixer in ("mega", "s4d"))
    assert matched.model.d_model == (found.value if found.field == "d_model" else config.model.d_model)
    assert type(matched.model.mixer) is type(config.model.mixer)


def test_no_width_is_nearer() -> None:
    target = count_parameters(SeqBoatConfig().build(64))
    found = match_layer(TransformerConfig(), 64, target)
    assert found.field == "d_ff" and count_parameters(found.mixer.build(64)) == found.parameters
    for other in (-1, 1):
        layer = replace(TransformerConfig(), d_ff=found.value + other).build(64)
        assert abs(count_parameters(layer) - target) >= abs(found.parameters - target)


def test_the_model_gets_narrower_where_the_mixer_alone_is_too_large() -> None:
    mixer = LinformerConfig(heads=4, max_positions=100, projected=8)
    small = match_layer(mixer, 64, 6000)
    assert small.field == "d_model" and small.value % 4 == 0 and small.mixer == mixer
    assert abs(small.parameters - 6000) < 600
    rotary = match_layer(TransformerConfig(heads=4, positions="rotary"), 64, 2000)
    assert rotary.d_model % 8 == 0


def test_reports_and_refusals() -> None:
    found = match_layer(TransformerConfig(), 16, 10_000)
    assert found.report() == (
        f"{found.parameters:,} parameters with d_ff = {found.value}; 10,000 to match "
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
