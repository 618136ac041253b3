"""The demo: a quick run leaves its files, bad options are one line, figures show what they are given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from seqboat.cli import demo
from seqboat.cli import main as cli
from seqboat.recipes import RECIPES
from seqboat.run import Run
from seqboat.tasks.expressions import decode
from seqboat.tasks.short_listops import ShortListOpsTaskConfig
from seqboat.tasks.task import SPLITS
from seqboat.training.planning import pace

PNG = b"\x89PNG\r\n\x1a\n"


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["demo", "--quick", "--seed", "3", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert any(line.startswith("test accuracy") for line in lines)
    assert any(line.split() == ["chance", "0.100"] for line in lines)
    assert sum(line.startswith("  layer ") for line in lines) == 2
    assert "step 25/25" in text and "minutes are enough" not in text
    numbers = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert numbers["seed"] == numbers["config"]["seed"] == numbers["config"]["task"]["seed"] == 3
    assert numbers["steps"] == numbers["config"]["schedule"]["steps"] == 25
    assert len(numbers["activation_rate"]) == 2
    assert f"{numbers['accuracy']:.3f}" in text and f"{numbers['most_common_value']:.3f}" in text
    picture = tmp_path / "out" / "demo.png"
    assert picture.read_bytes().startswith(PNG) and picture.stat().st_size < 200_000
    assert {p.name for p in picture.parent.iterdir()} == {"demo.json", "demo.png", "run"}
    # what it left is an ordinary run
    run = Run(tmp_path / "out" / "run")
    scored = run.evaluate("test")
    assert scored["recipe"] == "demo" and scored["accuracy"] == numbers["accuracy"]
    assert scored["activation"] == pytest.approx(numbers["activation_rate"])


def test_same_seed_same_numbers_and_a_second_demo_replaces_the_first(tmp_path: Path):
    found = []
    for _ in range(2):
        assert cli.main(["demo", "--quick", "--steps", "3", "--out", str(tmp_path)]) == 0
        numbers = json.loads((tmp_path / "demo.json").read_text())
        found.append({k: numbers[k] for k in ("accuracy", "activation_rate", "confidence")})
    assert found[0] == found[1]


def test_bad_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["--out", str(tmp_path / "file")], "cannot be written to"),
        (["--out", str(tmp_path / "file" / "below")], "cannot be written to"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--minutes", "-1"], "--minutes must be positive, got -1.0"),
    ):
        out = [] if "--out" in arguments else ["--out", str(tmp_path / "fresh")]
        assert cli.main(["demo", *arguments, *out]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1
        assert captured.out == ""
    assert not (tmp_path / "fresh").exists()


def test_without_matplotlib_the_demo_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["demo", "--quick", "--steps", "2", "--out", str(tmp_path)]) == 0
    assert "picture  none: it needs matplotlib: pip install 'seqboat[report]'" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"demo.json", "run"}


def test_interrupt_ends_without_a_traceback(tmp_path: Path):
    # a shell may have told its background jobs to ignore the signal; people at a terminal have not
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from seqboat.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-u", "-c", script, "demo", "--out", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            while not process.stdout.readline().startswith("training"):
                assert process.poll() is None, process.stderr.read()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors and "stopped" in errors
    assert "demo.json" not in {entry.name for entry in tmp_path.iterdir()}


def test_minutes_shorten_the_schedule(monkeypatch: pytest.MonkeyPatch):
    config = RECIPES["demo"]()
    monkeypatch.setattr(pace, "step_seconds", lambda config: 0.5)
    short = pace.fit_minutes(config, 2.0)
    assert (short.schedule.steps, short.schedule.warmup_steps) == (240, 24)
    assert short == config.replace(schedule={"steps": 240, "warmup_steps": 24})
    assert pace.fit_minutes(config, 1e-6).schedule.steps == 1
    assert pace.fit_minutes(config, 1e6) is config
    with pytest.raises(ValueError, match="minutes must be positive, got 0"):
        pace.fit_minutes(config, 0)


def test_steps_are_timed():
    config = RECIPES["demo"]().replace(
        task=ShortListOpsTaskConfig(train_size=60, eval_size=4), training={"batch_size": 2}
    )
    begin = time.monotonic()
    seconds = pace.step_seconds(config)
    assert 0 < seconds * pace.TRIAL / 2 < time.monotonic() - begin


def test_a_short_time_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pace, "step_seconds", lambda config: 0.12)
    arguments = ["demo", "--quick", "--steps", "1000000", "--minutes", "0.01", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert json.loads((tmp_path / "demo.json").read_text())["steps"] == 5
    assert "0.01 minutes are enough for 5 of 1,000,000 steps (--minutes)" in capsys.readouterr().out


def test_threads_are_given_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="stop"), demo.one_thread():
            assert torch.get_num_threads() == 1
            raise RuntimeError("stop")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_expressions_are_in_one_split_only():
    task = ShortListOpsTaskConfig(train_size=300, eval_size=50, seed=1).build()
    drawn = {split: [task.dataset(split)[i] for i in range(50)] for split in SPLITS}
    texts = [tuple(example.inputs.tolist()) for examples in drawn.values() for example in examples]
    assert len(set(texts)) == len(texts) == 150
    for example in drawn["test"]:
        tokens = decode(example.inputs.tolist())
        assert 10 <= len(tokens) <= 100
        assert task.show(example) == f"{' '.join(tokens)} -> {example.target}"
        assert task.excerpt(example.inputs, size=1000) == " ".join(tokens)
    # more training examples leave the others as they are
    larger = ShortListOpsTaskConfig(train_size=900, eval_size=50, seed=1).build()
    for split in SPLITS:
        for i in range(50):
            one, two = drawn[split][i], larger.dataset(split)[i]
            assert one.target == two.target and np.array_equal(one.inputs, two.inputs)
    assert task.dataset("val").lengths().tolist() == [len(example.inputs) for example in drawn["val"]]


def test_figure_colors_confidence_and_leaves_the_rest_white():
    figures = pytest.importorskip("seqboat.figures")
    pytest.importorskip("matplotlib")
    from matplotlib.patches import Rectangle

    tokens = ["[MAX", *"12345678" * 4, "]"]
    confidence = np.zeros((2, len(tokens)))
    confidence[0, 3], confidence[1, 5] = 0.5, 1.0
    figure = figures.demo_figure([0.25, 1.0], [0.5, 0.1], tokens, confidence, "caption")
    axes = figure.axes[1]
    cells = [p for p in axes.patches if isinstance(p, Rectangle)]
    texts = [t.get_text() for t in axes.texts]
    assert len(cells) == 2 * len(tokens) == len(texts)
    shades = [np.dot(cell.get_facecolor()[:3], (0.299, 0.587, 0.114)) for cell in cells]
    assert sum(shade > 0.999 for shade in shades) == 2 * len(tokens) - 2
    low, high = sorted((shade for shade in shades if shade <= 0.999), reverse=True)
    assert 0.9 > low > high + 0.3  # gray tells white, unsure and sure apart
    assert "caption" in axes.get_title(loc="left")
    assert [t.get_text() for t in figure.axes[0].texts] == ["25%", "100%"]
    with pytest.raises(ValueError, match=r"confidence must have shape \(layers, 34\)"):
        figures.draw_confidence(axes, tokens, confidence[:, :5])
    with pytest.raises(ValueError, match="stds must have the shape of rates"):
        figures.draw_activation(axes, [0.1, 0.2], [0.1])


@pytest.mark.slow
def test_the_demo_learns(tmp_path: Path):
    """Far above the most common value (about 0.12) with a third of the steps."""
    assert cli.main(["demo", "--steps", "800", "--minutes", "60", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert numbers["accuracy"] > 0.4 > 2 * numbers["most_common_value"]
