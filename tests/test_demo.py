"""The demo: a quick run leaves its files, bad options are one line, figures show what they are given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from seqboat import cli
from seqboat.commands import demo
from seqboat.tasks.synthetic import listops

PNG = b"\x89PNG\r\n\x1a\n"


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["demo", "--quick", "--seed", "3", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert any(line.startswith("test accuracy") for line in lines)
    assert any(line.split() == ["chance", "0.100"] for line in lines)
    assert sum(line.startswith("  layer ") for line in lines) == demo.QUICK.num_layers
    assert f"{demo.QUICK.steps}/{demo.QUICK.steps}" in text and "left" in text
    numbers = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert numbers["seed"] == 3 and numbers["updates"] == numbers["recipe"]["steps"] == demo.QUICK.steps
    assert "out of time" not in text
    assert len(numbers["activation_rate"]) == demo.QUICK.num_layers
    assert f"{numbers['accuracy']:.3f}" in text and f"{numbers['most_common_value']:.3f}" in text
    picture = tmp_path / "out" / "demo.png"
    assert picture.read_bytes().startswith(PNG) and picture.stat().st_size < 200_000
    assert {p.name for p in picture.parent.iterdir()} == {"demo.json", "demo.png"}


def test_same_seed_same_numbers(tmp_path: Path):
    found = []
    for name in ("one", "two"):
        assert cli.main(["demo", "--quick", "--steps", "3", "--out", str(tmp_path / name)]) == 0
        numbers = json.loads((tmp_path / name / "demo.json").read_text())
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
    assert (
        "picture  none: it needs matplotlib: install seqboat with its extra 'report'"
        in capsys.readouterr().out
    )
    assert {p.name for p in tmp_path.iterdir()} == {"demo.json"}


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with demo.reporter(steps=10) as report:
        report(demo.Progress(0.5, 5, 1.25, 0.4, (0.0, 0.25), 61.0))
    text = capsys.readouterr().out
    assert "5/10" in text and "loss 1.25" in text and "25%" in text and "1:01 left" in text


def test_interrupt_ends_without_a_traceback(tmp_path: Path):
    # a shell may have told its background jobs to ignore the signal; people at a terminal have not
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from seqboat.cli import main; sys.exit(main(sys.argv[1:]))"
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
    assert list(tmp_path.iterdir()) == []


def test_time_limit_ends_training():
    torch.manual_seed(0)
    recipe = demo.replace(demo.QUICK, steps=1_000_000)
    seen: list[demo.Progress] = []
    expressions = listops.iterate(0, demo.task(recipe))
    updates = demo.train(demo.build_model(recipe), expressions, recipe, 0.5 / 60, seen.append)
    assert seen[-1].done == 1.0 and seen[-1].step == updates < recipe.steps
    assert seen[-1].remaining == 0


def test_running_out_of_time_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["demo", "--quick", "--steps", "1000000", "--minutes", "0.01", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    updates = json.loads((tmp_path / "demo.json").read_text())["updates"]
    assert f"out of time: {updates:,} of 1,000,000 updates in 0.01 minutes" in capsys.readouterr().out


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


def test_batches_hold_new_expressions_of_about_one_length():
    torch.manual_seed(0)
    stream = listops.iterate(1, demo.task(demo.QUICK))
    drawn = [batch for batch, _ in zip(demo.batches(stream, size=8, pool=4), range(8), strict=False)]
    rows = [tuple(row[keep].tolist()) for b in drawn for row, keep in zip(b.ids, b.mask, strict=True)]
    assert len(set(rows)) == len(rows) == 64
    padding = 1 - sum(int(b.mask.sum()) for b in drawn) / sum(b.mask.numel() for b in drawn)
    shuffled = max(len(row) for row in rows) * len(rows)
    assert padding < 0.5 * (1 - sum(map(len, rows)) / shuffled)


def test_evaluation_counts_every_token_once():
    """Against the same numbers from one batch of everything, without the sorting and the averages."""
    torch.manual_seed(0)
    recipe = demo.replace(demo.QUICK, test_count=450)
    model = demo.build_model(recipe)
    test = listops.generate(recipe.test_count, 0, demo.task(recipe))
    result = demo.evaluate(model, test, recipe)
    batch = demo.to_batch(test)
    with torch.no_grad():
        out = model(batch.ids, batch.mask)
    assert result.accuracy == float((out.logits.argmax(1) == batch.values).double().mean())
    assert result.majority == np.unique([e.value for e in test], return_counts=True)[1].max() / len(test)
    for layer, routing in enumerate(out.routings):
        assert routing is not None
        active = routing.active[..., 0] & batch.mask
        assert result.rates[layer] == pytest.approx(float(active.sum() / batch.mask.sum()), rel=1e-5)
        share = active.sum(1) / batch.mask.sum(1)
        assert result.deviations[layer] == pytest.approx(float(share.std(unbiased=False)), rel=1e-4)
        if active.any():
            assert result.confidence[layer] == pytest.approx(
                float(routing.probs[..., 0][active].mean()), rel=1e-5
            )


def test_figure_colours_confidence_and_leaves_the_rest_white():
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
    """Far above the most common value (about 0.12) with a third of the updates."""
    assert cli.main(["demo", "--steps", "800", "--minutes", "60", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert numbers["accuracy"] > 0.4 > 2 * numbers["most_common_value"]
