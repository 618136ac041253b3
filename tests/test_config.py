"""Configurations: round trips, overrides, and messages for what does not fit."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from seqboat.layers.routers import ROUTERS, SigmoidConfig
from seqboat.mixers import MIXERS
from seqboat.models.heads import Classifier, LanguageModel, Matcher
from seqboat.recipes import RECIPES
from seqboat.ssm import SSMS
from seqboat.ssm.diagonal import S4DConfig
from seqboat.tasks import TASKS
from seqboat.training.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.training.settings_io import (
    difference,
    from_dict,
    override,
    read_config,
    to_dict,
    to_json,
)
from small_runs import ToyConfig, small_run


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)


def mixer_of(config: RunConfig) -> Any:
    return config.model.mixer


def test_round_trip_through_dict_and_json(tmp_path: Path) -> None:
    config = small_run().replace(training={"trackers": ("wandb",)}, seed=7)
    assert from_dict(to_dict(config)) == config
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    assert read_config(path) == config


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_can_be_chosen_and_comes_back(name: str) -> None:
    config = override(small_run(), ["--model.mixer", name])
    assert type(config.model.mixer) is type(MIXERS[name]())
    assert from_dict(to_dict(config)) == config


def test_the_direction_of_a_recipe_stays_when_another_mixer_is_chosen() -> None:
    both = small_run()
    causal = override(both, ["--model.mixer.causal=true"])
    assert mixer_of(override(causal, ["--model.mixer=transformer"])).causal
    assert not mixer_of(override(both, ["--model.mixer=transformer"])).causal
    # what needs no causal mixer can do with one, but not the other way round
    assert mixer_of(override(both, ["--model.mixer=transformer-xl"])).causal
    with pytest.raises(ValueError, match="Linformer has no causal form, it is bidirectional"):
        override(causal, ["--model.mixer=linformer"])
    with pytest.raises(ValueError, match="TransformerXL has no bidirectional form, it is causal"):
        override(both, ["--model.mixer=transformer-xl", "--model.mixer.causal=false"])


def test_mixers_whose_state_grows_read_segments_one_by_one() -> None:
    lines: list[str] = []
    own = RECIPES["lm"]()
    config: Any = override(own, ["--model.mixer=transformer"], lines.append)
    assert not config.training.carry_state
    assert (config.task.segment, config.task.context, config.task.window) == (512, 256, 512)
    assert lines[-1] == (
        "the state of transformer grows with the text, so segments are read one by one, and the second half of each "
        "is scored: training.carry_state=false"
    )
    # so does a field of the mixer, but neither a constant state nor an explicit choice changes anything
    assert not override(own, ["--model.mixer.gau.span=full"]).training.carry_state
    assert override(own, ["--model.mixer=s5"]).task == own.task
    explicit = override(own, ["--model.mixer=transformer", "--training.carry_state=true"])
    assert explicit.training.carry_state and explicit.carries_growing_state()
    # a file over a recipe
    over = {"model": {"mixer": {"name": "transformer"}}}
    assert from_dict(over, own).task == config.task and not from_dict(over, own).training.carry_state
    assert from_dict(over | {"training": {"carry_state": True}}, own).carries_growing_state()
    assert from_dict({"model": {"mixer": {"name": "s5"}}}, own).training.carry_state
    # what was chosen before stays
    assert override(explicit, ["--model.mixer.dropout=0.2"]).training.carry_state


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_can_be_chosen_and_comes_back(name: str) -> None:
    config = override(small_run(), [f"--model.mixer.router={name}"])
    assert mixer_of(config).router == ROUTERS[name]()
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_chosen_and_comes_back(name: str) -> None:
    config = override(small_run(), ["--task", name])
    assert config.task == TASKS[name]()
    assert from_dict(to_dict(config)) == config


def test_no_option_has_a_field_called_name() -> None:
    # "name" is the key that says which option a dictionary is
    options = [*MIXERS.values(), *ROUTERS.values(), *TASKS.values(), S4DConfig]
    for option in options:
        cls: Any = option if isinstance(option, type) else type(option())
        assert "name" not in {field.name for field in dataclasses.fields(cls)}


def test_overrides_reach_every_kind_of_field() -> None:
    config = override(
        small_run(),
        [
            "--model.num_layers=3",
            "--optimizer.lr",
            "1e-3",
            "--optimizer.betas=0.8,0.9",
            "--optimizer.clip=none",
            "--training.compile",
            "--training.bucketing=false",
            "--training.trackers=tensorboard,wandb",
            "--model.mixer.gau.attention=relu2",
            "--model.mixer.ssm=s4d",
            "--model.mixer.ssm.d_state=8",
            "--data.count=9",
            "--seed=5",
        ],
    )
    assert config.model.num_layers == 3
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.clip) == (1e-3, (0.8, 0.9), None)
    assert (config.training.compile, config.training.bucketing) == (True, False)
    assert config.training.trackers == ("tensorboard", "wandb")
    assert mixer_of(config).gau.attention == "relu2"
    assert mixer_of(config).ssm == S4DConfig(d_state=8)
    assert config.task == ToyConfig(count=9)
    assert config.seed == 5


def test_lists_of_files_take_several_words() -> None:
    config = override(small_run(), ["--task=lmtext", "--data.text", "a.txt", "b, c.txt", "--seed=1"])
    task: Any = config.task
    assert task.text == ("a.txt", "b, c.txt")


def test_the_same_mixer_changes_nothing() -> None:
    config = small_run(ToyConfig(kind="lm"))
    assert override(config, ["--model.mixer=seqboat"]) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.num_layer=2"], "--model.num_layer is not a field .* mean --model.num_layers?"),
        (["--model.mixer.window=2"], "did you mean --model.mixer.gau.window?"),
        (["--modle.d_model=2"], "did you mean --model.d_model?"),
        (["--nonsense=2"], "--nonsense is not a field of this configuration"),
        (["--model.mixer=seqbot"], "model.mixer 'seqbot' is unknown; did you mean seqboat?"),
        (["--model.mixer.router=softmax"], "did you mean gumbel-softmax"),
        (["--model.num_layers=two"], "model.num_layers must be an integer, got 'two'"),
        (["--model.num_layers=2.5"], "model.num_layers must be an integer, got '2.5'"),
        (["--model.num_layers=0"], "num_layers must be an integer >= 1, got 0"),
        (["--optimizer.lr=fast"], "optimizer.lr must be a number, got 'fast'"),
        (["--optimizer.betas=0.9"], r"--optimizer.betas must be 2 values, got \[0.9\]"),
        (["--optimizer.name=sgd"], "--optimizer.name must be one of adamw, radam, adagrad; got 'sgd'"),
        (["--training.compile=maybe"], "training.compile must be True or False, got 'maybe'"),
        (["--training.trackers=mlflow"], r"training.trackers\[0\] must be one of tensorboard"),
        (["--model=big"], "model is a group of fields: set one of --model.mixer"),
        (["--seed"], "seed must be an integer, got nothing"),
        (["--seed", "1", "2"], "seed must be an integer, got 1 2"),
        (["--model.mixer"], "model.mixer must be one of seqboat.* got nothing"),
        (["stray"], "argument 'stray' does not belong to any --name"),
        (["--model.d_model.x=2"], "--model.d_model.x is not a field"),
    ],
)
def test_wrong_overrides_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(small_run(), arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": {"num_layer": 2}}', "field 'model.num_layer' is unknown; did you mean model.num_layers?"),
        ('{"optimizer": {"lr": [1]}}', r"optimizer.lr must be a number, got \[1\]"),
        ('{"optimizer": {"betas": [0.9]}}', r"optimizer.betas must be 2 values, got \[0.9\]"),
        ('{"seed": true}', "seed must be an integer, got True"),
        ('{"seed": -1}', "seed must be an integer >= 0, got -1"),
        ('{"model": {"mixer": {"name": "nothing"}}}', "'nothing' is unknown"),
        ('{"model": {"mixer": {"name": ["mega"]}}}', "is unknown"),
        ('{"model": []}', "model must be"),
        ('{"task": {"count": {"a": 1}}}', "task.count must be an integer, got a dictionary"),
        ("[1]", "must hold an object of fields, got list"),
        ('{"a": [', "is not JSON"),
        ('{"seed": \x00}', "is not JSON"),
        ('{"seed": ' + "[" * 100_000, "nested too deeply"),
        ('{"seed": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"seed": "' + "a" * 5000 + '"}', r"seed must be an integer, got 'aaaa.*\.\.\..*aaa'$"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_config(path, small_run())
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_files_without_a_recipe_must_be_complete(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"seed": 1}')
    with pytest.raises(ValueError, match="task is missing"):
        read_config(path)
    with pytest.raises(ValueError, match=r"cannot read the configuration .*nowhere"):
        read_config(tmp_path / "nowhere")
    path.write_text(" " * (1 << 21))
    with pytest.raises(ValueError, match="too large for a configuration"):
        read_config(path)


def test_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config.json is not a file: it is a folder, a pipe or a device"):
        read_config(tmp_path / "config.json")


def test_a_file_over_a_recipe_changes_only_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    mixer = {"ssm": {"name": "s4d", "d_state": 4}, "router": "sigmoid"}
    path.write_text(json.dumps({"model": {"mixer": mixer}, "optimizer": {"lr": 1e-3}}))
    base = small_run()
    config = read_config(path, base)
    changed = dataclasses.replace(mixer_of(base), ssm=S4DConfig(d_state=4), router=SigmoidConfig())
    assert config == base.replace(model={"mixer": changed}, optimizer={"lr": 0.001})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainingConfig(batch_size=0), "training.batch_size must be an integer >= 1, got 0"),
        (
            lambda: TrainingConfig(batch_size=2, accumulation=3),
            "must not exceed training.batch_size, got 3 and 2",
        ),
        (lambda: TrainingConfig(carry_state=True, bucketing=True), "cannot be combined"),
        (lambda: EvaluationConfig(patience=0), "evaluation.patience must be an integer >= 1, got 0"),
        (lambda: EvaluationConfig(split="dev"), "evaluation.split must be one of train, val, test"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_models_follow_the_kind_of_task() -> None:
    kinds: dict[Any, type] = {"classify": Classifier, "match": Matcher, "lm": LanguageModel}
    for kind, cls in kinds.items():
        assert isinstance(small_run(ToyConfig(kind=kind)).build_model(), cls)
    with pytest.raises(ValueError, match=r"model.vocab must be 8 for the task toy, got 9"):
        small_run(model={"vocab": 9}).build_model()


def test_what_a_resumed_run_may_change() -> None:
    base = small_run()
    for change in (["--training.workers=2"], ["--training.save_every=9"], ["--training.distributed=fsdp"]):
        assert difference(base, override(base, change)) is None
    for change, text in (
        (["--optimizer.lr=0.5"], "optimizer.lr is 0.5, it was 0.01"),
        (["--model.mixer.ssm=s4d"], "model.mixer.ssm.name is 's4d', it was 'ema'"),
        (["--seed=3"], "seed is 3, it was 0"),
    ):
        assert difference(base, override(base, change)) == text


@pytest.mark.parametrize("name", SSMS)
def test_seqboat_takes_every_kernel(name: str, tmp_path: Path) -> None:
    """From Python, the command line, and YAML as a word or as a saved dictionary."""
    base = small_run()
    expected = dataclasses.replace(mixer_of(base), ssm=SSMS[name]())
    config = override(base, [f"--model.mixer.ssm={name}"])
    assert mixer_of(config) == expected
    saved = tmp_path / "saved.json"
    saved.write_text(to_json(config), encoding="utf-8")
    assert f'"name": "{name}"' in saved.read_text(encoding="utf-8")
    assert read_config(saved) == config
    word = tmp_path / "word.json"
    word.write_text(json.dumps({"model": {"mixer": {"ssm": name}}}), encoding="utf-8")
    assert mixer_of(read_config(word, base)).ssm == SSMS[name]()
    layer = expected.build(8)
    assert layer(torch.randn(2, 5, 8)).y.shape == (2, 5, 8)


def test_an_unknown_kernel_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"model.mixer.ssm 's5d' is unknown; did you mean s(5|4d)\?"):
        override(small_run(), ["--model.mixer.ssm=s5d"])
