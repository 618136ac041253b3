"""`seqboat explain`: every setting is scored as if it had been forced by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_runs import write_lm_run, write_run
from seqboat.analysis.interventions import THRESHOLDS, Contribution, contribution, intervene, standard_error
from seqboat.cli.main import main
from seqboat.layers.sma import override_activation
from seqboat.run import Run
from seqboat.tasks.task import draw_subset
from seqboat.training.evaluate import evaluate
from seqboat.training.parallel import World
from small_runs import ToyConfig, register, small_run


def toy(folder: Path, **task: Any) -> Path:
    register()
    return write_run(folder / "run", small_run(ToyConfig(**task)), noise=0.3)


def test_what_attention_contributes(tmp_path: Path) -> None:
    run = Run(toy(tmp_path))
    task = run.config.build_task()
    found = contribution(run.model, task, batch_size=16, limit=20)
    assert found is not None and found.metric == "accuracy"
    tried, _, _ = intervene(run.path, "val", 20, thresholds=())
    by_name = {outcome.setting.name: outcome for outcome in tried}
    assert found.score == by_name["as it is"].metrics["accuracy"]
    assert found.without == by_name["all off"].metrics["accuracy"]
    assert found.error == by_name["all off"].change_error
    assert found.rate == by_name["as it is"].rate


def test_what_attention_contributes_is_one_line() -> None:
    gained = Contribution(0.021, 0.95, 0.736, 0.0097, "accuracy")
    assert str(gained) == "attention: 2.1 % of tokens; without it -21.4 +- 1.9 points" and not gained.idle
    idle = Contribution(1.0, 0.95, 0.948, 0.01, "accuracy")
    assert str(idle).endswith("; nothing shows that attention matters here")
    bits = Contribution(0.5, 2.5, 2.75, None, "bits")
    assert str(bits).startswith("attention: 50 % of tokens; without it +0.250 bits") and bits.interval is None


def test_every_setting_is_what_was_forced(tmp_path: Path) -> None:
    run = toy(tmp_path)
    calls: list[tuple[int, int]] = []
    outcomes, metric, examples = intervene(
        run, "val", 20, thresholds=(0.3, 0.6), progress=lambda _, *done: calls.append(done)
    )
    assert metric == "accuracy" and examples == 20 and calls == [(i, 9) for i in range(1, 10)]
    found = {outcome.setting.name: outcome for outcome in outcomes}
    forced: dict[str, list[tuple[list[int] | None, dict[str, Any]]]] = {
        "as it is": [],
        "layer 1 off": [([0], {"active": False})],
        "layer 2 off": [([1], {"active": False})],
        "only layer 1": [([1], {"active": False})],
        "only layer 2": [([0], {"active": False})],
        "all off": [(None, {"active": False})],
        "all on": [(None, {"active": True})],
        "threshold 0.3": [(None, {"threshold": 0.3})],
        "threshold 0.6": [(None, {"threshold": 0.6})],
    }
    assert list(found) == list(forced)
    model, config = Run(run).model, Run(run).config
    world = World(0, 1, torch.device("cpu"))
    for name, overrides in forced.items():
        layers, decisions = overrides[0] if overrides else (None, {})
        with override_activation(model, layers, **decisions):
            wanted = evaluate(model, config.build_task(), "val", world, batch_size=16, limit=20)
        assert found[name].metrics == wanted.metrics and found[name].activation == wanted.activation
    assert found["all off"].activation == [0, 0] and found["all on"].activation == [1, 1]
    assert found["threshold 0.3"].rate >= found["threshold 0.6"].rate
    assert len({outcome.metrics["loss"] for outcome in outcomes}) > 4


def test_errors_are_those_of_the_examples(tmp_path: Path) -> None:
    run = toy(tmp_path)
    outcomes, _, _ = intervene(run, "val", 20, thresholds=())
    task, model = Run(run).task, Run(run).model
    data = draw_subset(task.dataset("val"), 20)

    def right(active: bool | None) -> np.ndarray[Any, Any]:
        """Whether each example is answered right, one at a time."""
        found = []
        with override_activation(model, None, active=active), torch.no_grad():
            for i in range(20):
                batch = task.collate([data[i]])
                said = model(batch.inputs, batch.mask).logits.argmax(-1)
                found.append(bool(said == batch.targets))
        return np.array(found, float)

    found = {outcome.setting.name: outcome for outcome in outcomes}
    usual, off = right(None), right(False)
    assert found["all off"].metrics["accuracy"] == off.mean()
    assert found["as it is"].error == pytest.approx(usual.std(ddof=1) / math.sqrt(20))
    assert found["all off"].error == pytest.approx(off.std(ddof=1) / math.sqrt(20))
    assert found["all off"].change_error == pytest.approx((off - usual).std(ddof=1) / math.sqrt(20))
    assert found["as it is"].change_error is None


def test_errors_of_metrics_that_are_no_means() -> None:
    """The jackknife of a root mean square, beside what the delta method says of many examples."""
    errors = np.random.default_rng(0).normal(size=4000) ** 2
    without = np.sqrt((errors.sum() - errors) / (len(errors) - 1))
    wanted = errors.std(ddof=1) / math.sqrt(len(errors)) / (2 * math.sqrt(errors.mean()))
    assert standard_error(without) == pytest.approx(wanted, rel=1e-2)
    assert standard_error(without[:1]) is None
    assert standard_error(np.array([1.0, math.nan])) is None


def test_of_several_modules_the_attention_is_counted(tmp_path: Path) -> None:
    register()
    mixer: Any = dataclasses.replace(small_run().model.mixer, ffn=True)  # type: ignore[type-var]
    run = write_run(tmp_path / "run", small_run().replace(model={"mixer": mixer}), noise=0.3)
    outcomes, _, _ = intervene(run, "val", 4, thresholds=())
    found = {outcome.setting.name: outcome.activation for outcome in outcomes}
    assert found["all off"] == [0, 0] and found["all on"] == [1, 1]


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    run = str(toy(tmp_path))
    picture = tmp_path / "picture.svg"
    assert main(["explain", run, "--split", "val", "--limit", "9", "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}, 9 examples of val" and len(lines) == 2 + 7 + len(THRESHOLDS)
    assert lines[2].startswith("as it is") and lines[7].startswith("all off") and lines[7].endswith("0 0")
    assert picture.stat().st_size > 1000
    arguments = ["explain", run, "--split", "val", "--limit", "9", "--thresholds", "", "--json"]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["examples"] == 9 and [o["setting"] for o in record["outcomes"]][-1] == "all on"
    first, second = record["outcomes"][:2]
    assert first["accuracy"] == pytest.approx(float(lines[2].split()[3]), abs=1e-4)
    assert lines[1].split() == [
        "accuracy",
        "±",
        "error",
        "change",
        "±",
        "error",
        "active",
        "%,",
        "by",
        "layer",
    ]
    assert f"{first['accuracy']:.4f} ± {first['standard_error']:.4f}" in lines[2]
    assert f"± {second['change_standard_error']:.4f}" in lines[3]


def test_a_language_model(tmp_path: Path, capsys: Any) -> None:
    run = str(write_lm_run(tmp_path))
    assert main(["explain", run, "--split", "val", "--thresholds", "0.5", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    scores = {outcome["setting"]: outcome["bits"] for outcome in record["outcomes"]}
    assert record["metric"] == "bits" and scores["threshold 0.5"] == scores["as it is"] != scores["all off"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit must be an integer >= 1, got 0"),
        (["--thresholds", "0.5,x"], "--thresholds must be numbers with commas between them, got '0.5,x'"),
        (["--thresholds", "0.5,1.2"], "--thresholds must be between 0 and 1, got 1.2"),
        (["--plot", "a.gif"], "--plot must end with .svg, .pdf or .png, got 'a.gif'"),
        (["--plot", "nowhere/a.svg"], "the folder nowhere does not exist"),
        (["--model.d_model", "3"], "only the data can be changed"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["explain", str(toy(tmp_path)), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_picture_needs_matplotlib(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["explain", "nowhere", "--plot", str(tmp_path / "a.svg")]) == 2
    assert "--plot needs matplotlib: pip install 'seqboat[lab]'" in capsys.readouterr().err


def test_scores_that_are_no_numbers_are_null(tmp_path: Path, capsys: Any) -> None:
    register()
    run = write_run(tmp_path / "run", small_run(), noise=1e30)
    assert main(["explain", str(run), "--split", "val", "--limit", "2", "--thresholds", "", "--json"]) == 0

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    record = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert record["outcomes"][0]["loss"] is None
