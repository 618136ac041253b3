"""The benchmarks of learning, in small form: their data, their models, and the pages that they write."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqboat.cli.main import main
from seqboat.ops.positions import RelativeBias
from seqboat.tasks import TASKS
from seqboat.training.config import override
from small_runs import ToyConfig, small_run

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of the benchmarks as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tasks", ["needle", pytest.param("all", marks=pytest.mark.slow)])
def test_every_contact_has_models_of_equal_size(
    tasks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contacts = load("first_contacts", monkeypatch)
    lines = [json.dumps({"text": f"film {i}", "rating": 1 + i % 10}) for i in range(3000)]
    (tmp_path / "reviews.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(contacts, "EVERY", 1)
    for name in contacts.TASKS if tasks == "all" else [tasks]:
        task = contacts.contact(name, str(tmp_path / "reviews.jsonl"))._replace(steps=1)
        sizes = {}
        for model in contacts.MODELS:
            sizes[model] = contacts.count(contacts.Model(task, model, contacts.matched_width(task, model)))
            [point] = contacts.steps_of(task, model, 0)
            assert point["step"] == 1 and np.isfinite(point["score"])
        assert max(sizes.values()) < 1.15 * min(sizes.values()), (name, sizes)


def test_the_page_of_contacts_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contacts = load("first_contacts", monkeypatch)
    scores = {"seqboat": (0.5, 0.7), "encoder": (0.9, 0.9), "gru": (0.55, 0.65)}
    runs = [
        {
            "task": "copy",
            "model": model,
            "seed": seed,
            "metric": "accuracy",
            "parameters": 1000,
            "commit": "abcdef0123",
            "curve": [
                {"step": 25, "seconds": 1.0, "score": 0.1},
                {"step": 50, "seconds": 2.0, "score": score},
            ],
        }
        for model, pair in scores.items()
        for seed, score in enumerate(pair)
    ]
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- first contacts: begin -->\n<!-- first contacts: end -->\nb\n", encoding="utf-8")
    contacts.write_page(runs, page)
    text = page.read_text(encoding="utf-8")
    assert "| copy | 0.600 | 0.900 (encoder layer) | -0.300 | 0.141 | yes |" in text
    assert "| copy | encoder layer | 1,000 | 2 | 0.900 ± 0.000 | 0.900 ± 0.000 | 50 | 40 |" in text
    assert "`abcdef0`" in text and text.startswith("a\n") and text.endswith("b\n")
    assert (tmp_path / "images" / "first-contacts-dark.svg").exists()


def test_only_the_order_tells_long_sequences_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    long = load("long_sequences", monkeypatch)
    random = np.random.default_rng(0)
    for label in (True, False):
        for _ in range(20):
            series = long.machine(random, 256, label)
            burst, peak = int(series[:, 0].argmax()), int(series[:, 1].argmax())
            assert (burst < peak) == label and abs(burst - peak) >= 256 // 8 - 12
            text = long.log(random, 512, label)
            assert (text.index("disk full") < text.index("backup started")) == label
            assert len(text) <= 512 and text.count("disk full") == text.count("backup started") == 1


def test_models_of_long_sequences_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = load("long_sequences", monkeypatch)
    small = ["--rows", "20", "--length", "96", "--steps", "1", "--batch", "4", "--set", "model.d_model=8"]
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["long_sequences.py", "--out", str(out), *small])
    long.main()
    assert capsys.readouterr().out.count("minutes |") == 6
    page = tmp_path / "page.md"
    page.write_text("<!-- long sequences: begin -->\n<!-- long sequences: end -->\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["long_sequences.py", "--out", str(out), "--page", str(page)])
    long.main()
    text = page.read_text(encoding="utf-8")
    assert "| logs | bag of words | " in text and "| machines | summary statistics | " in text


def test_the_page_on_long_sequences_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = load("long_sequences", monkeypatch)
    monkeypatch.chdir(tmp_path)
    page = FOLDER.parent / "docs" / "long-sequences.md"
    (block,) = re.findall(
        r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    first, *others = (shlex.split(line) for line in block.splitlines())
    assert first[:3] == ["$", "python", "benchmarks/long_sequences.py"]
    monkeypatch.setattr(sys, "argv", first[2:])
    long.main()
    for words in others:
        assert words[:2] == ["$", "seqboat"] and main(words[2:]) == 0, words
    assert (tmp_path / "answers.csv").read_text().count("\n") == 41


def test_blind_queries_are_those_of_the_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Softmax has none. Squared ReLU with biases far below zero leaves every query without a key."""
    blind = load("blind_queries", monkeypatch)
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    config = small_run()
    assert [seen.step for seen in blind.watch(config, 4, 2)] == [0, 2, 4]
    assert all(value in (0.0, None) for seen in blind.watch(config, 1, 1) for value in seen.blind)
    config = override(config, ["--model.mixer.gau.attention=relu2", "--model.mixer.router=always-active"])
    monkeypatch.setattr(
        RelativeBias, "reset_parameters", lambda self: torch.nn.init.constant_(self.table, -9.0)
    )
    (start,) = blind.watch(config, 0, 1)
    assert set(start.active) == set(start.blind) == {1.0} and start.loss is None
    monkeypatch.setattr(blind, "find_recipe", lambda name: lambda: config)
    blind.main(["toy", "--steps=0"])
    assert capsys.readouterr().out.splitlines()[1].startswith("0  -  100.0")
