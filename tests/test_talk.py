"""What a run on the user's own data says: its data, baselines, remaining time."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqboat.cli.eval import outcome_lines
from seqboat.cli.main import main
from seqboat.data.store import Skips
from seqboat.own.describe import class_warnings
from seqboat.run import Run
from seqboat.tasks import ClassifyTaskConfig, LMTextTaskConfig, RegressTaskConfig, TagTaskConfig
from seqboat.tasks.byte_counts import score_counts
from seqboat.tasks.outcomes import Outcomes
from seqboat.training.config import RunConfig
from seqboat.training.trainer import RunOutcome, Trainer, train
from small_runs import Spy, numbers_of
from test_own import TINY, write_csv, write_lines

WORDS = {"good": "fine tasty warm", "bad": "cold awful burnt"}


def soups(folder: Path, extra: list[list[Any]] | None = None) -> Path:
    """A table that a bag of words solves."""
    random = np.random.default_rng(0)
    rows: list[list[Any]] = []
    for i in range(80):
        label = "good" if i % 8 < 5 else "bad"
        rows.append([f"the soup {i} was {random.choice(WORDS[label].split())}", label])
    return write_csv(folder / "soups.csv", ["text", "label"], rows + (extra or []))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run, and what it said."""
    folder = tmp_path_factory.mktemp("talk")
    table = soups(
        folder, [["a new soup", "Good"], ["", "bad"], ["x", "good", "y"], ["too", "many", "fields"]]
    )
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text="", **_: lines.append(str(text)))
        command = ["train", "classify", f"--data.train={table}", f"--out={folder / 'run'}"]
        assert main([*command, *TINY, "--training.log_every=1"]) == 0
    return folder / "run", lines


def test_a_run_says_what_it_learns_from(told: tuple[Path, list[str]]) -> None:
    run, lines = told
    text = "\n".join(lines)
    before = text[: text.index("step 1/2")]
    for part in (
        "data        soups.csv (",
        "rows        73 train, 8 val",
        "skipped     3 records: 2 expected 2 fields, 1 empty text; the first: soups.csv, line",
        "warning     'good' (",
        "and 'Good' (1) look alike but are different classes",
        "1 class has fewer than 20 training rows, too few to learn well: 'Good' (1)",
        "baselines   val accuracy: majority 0.",
    ):
        assert part in before, part
    assert " left" in next(line for line in lines if line.startswith("step 1/2"))
    record = json.loads((run / "run.json").read_text())
    assert (
        record["data"]["sizes"] == {"train": 73, "val": 8} and sum(record["data"]["classes"].values()) == 73
    )
    scores = record["baselines"]["scores"]
    assert scores["TF-IDF and logistic regression"]["accuracy"] >= scores["majority"]["accuracy"]
    best = next(line for line in lines if line.startswith("finished; best accuracy"))
    assert f"on val (majority {scores['majority']['accuracy']:.4f}, TF-IDF and logistic regression " in best


def test_a_large_table_takes_more_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("seqboat.recipes.own.EPOCHS", 300.0)
    command = ["train", "classify", f"--data.train={soups(tmp_path)}", f"--out={tmp_path / 'run'}"]
    configs: list[RunConfig] = []

    def noted(config: RunConfig, *_: Any, **__: Any) -> RunOutcome:
        configs.append(config)
        return RunOutcome(1, 0, None, "noted")

    monkeypatch.setattr("seqboat.training.trainer.train", noted)
    assert main(command) == 1
    # 72 rows, 300 times, in batches of 32
    assert (configs[-1].schedule.steps, configs[-1].evaluation.every) == (675, 113)
    told = capsys.readouterr().err
    assert "steps       675 instead of 300: 72 rows, read 3e+02 times" in told
    assert main([*command, "--evaluation.every=10"]) == 1
    assert (configs[-1].schedule.steps, configs[-1].evaluation.every) == (675, 10)
    assert main([*command, "--schedule.steps", "301"]) == 1
    assert (configs[-1].schedule.steps, configs[-1].evaluation.every) == (301, 50)


def test_a_resumed_run_keeps_its_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def again(*_: Any) -> Any:
        raise AssertionError("baselines were computed again")

    arguments = ["train", "classify", f"--data.train={soups(tmp_path)}", f"--out={tmp_path / 'run'}", *TINY]
    with monkeypatch.context() as patch:
        patch.setattr(
            Trainer, "_after_step", lambda self, signal: self.save() or self._outcome(130, "stopped")
        )
        assert main(arguments) == 130
    before = json.loads((tmp_path / "run" / "run.json").read_text())
    monkeypatch.setattr("seqboat.own.task.fit_baseline", again)
    assert main([*arguments, "--resume"]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["baselines"] == before["baselines"]
    assert "baselines   val accuracy: majority" in capsys.readouterr().out


def test_what_is_told_changes_no_number(told: tuple[Path, list[str]]) -> None:
    run = Run(told[0])
    spy = Spy()
    train(run.config, told[0].parent / "quiet", display=spy)
    assert numbers_of(run.metrics) == numbers_of(Run(told[0].parent / "quiet").metrics)
    assert "data" not in Run(told[0].parent / "quiet").about


def test_classes_that_look_alike_or_are_rare() -> None:
    assert class_warnings({"a": 30, "b": 20}) == []
    (warning,) = class_warnings({"not ok": 30, "Not-OK!": 20, "C": 40, "C#": 40, "1": 20, "-1": 20})
    assert warning.startswith("'not ok' (30) and 'Not-OK!' (20) look alike")
    (warning,) = class_warnings({str(i): 3 for i in range(12)})
    assert "12 classes have fewer than 20" in warning and "'7' (3) and 4 more" in warning


def test_reasons_are_counted_without_their_details() -> None:
    skips = Skips()
    for reason in ("not UTF-8 at byte 3", "not UTF-8 at byte 4", "not a number: 'x'", "5 tags for 7 tokens"):
        skips.add("file", "line 1", reason)
    assert skips.reasons == {"not UTF-8": 2, "not a number": 1, "N tags for N tokens": 1}


# baselines


def test_counts_of_bytes(tmp_path: Path) -> None:
    learn, text = b"abracadabra abracad", b"abrz"

    def chance(before: bytes, byte: int, order: int) -> float:
        if order < 0:
            return 1 / 256
        lower = chance(before, byte, order - 1)
        context = before[len(before) - order :]
        after = Counter(
            learn[i + order] for i in range(len(learn) - order) if learn[i : i + order] == context
        )
        return (after[byte] + len(after) * lower) / (after.total() + len(after)) if after else lower

    found = score_counts(np.frombuffer(learn, np.uint8), np.frombuffer(text, np.uint8))
    for name, order in (("byte frequencies", 0), ("counts after 3 bytes", 3)):
        bits = [-math.log2(chance(text[:i], text[i], min(i, order))) for i in range(1, len(text))]
        assert found[name]["bits"] == pytest.approx(sum(bits) / len(bits))
    (tmp_path / "notes.txt").write_bytes(b"the boat sails on. " * 100)
    task = LMTextTaskConfig(text=(str(tmp_path / "notes.txt"),), segment=16).build()
    assert task.summary("val").lines() == [
        "data        notes.txt (1.9 kB)",
        "bytes       1,710 train, 95 val",
    ]
    assert task.baselines("val", 4)["counts after 3 bytes"]["bits"] < 0.5


# which answers are wrong


def test_classes_and_confusions_are_counted(tmp_path: Path) -> None:
    task = ClassifyTaskConfig(train=str(soups(tmp_path))).build()
    data = task.dataset("train")
    examples = [data[i] for i in range(20)]
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 2, generator=random)
    outcomes = Outcomes(task)
    for start in (0, 12):
        part = list(range(start, min(start + 12, 20)))
        outcomes.add(part, task.collate([examples[i] for i in part]), logits[part])
    found = outcomes.result()
    pairs = Counter((int(e.target), int(v.argmax())) for e, v in zip(examples, logits, strict=True))
    assert found["confusion"] == [[pairs[a, b] for b in (0, 1)] for a in (0, 1)]
    bad = found["classes"][0]
    assert bad["label"] == "bad" and bad["count"] == pairs[0, 0] + pairs[0, 1]
    assert bad["precision"] == pairs[0, 0] / (pairs[0, 0] + pairs[1, 0])
    assert bad["recall"] == pairs[0, 0] / bad["count"]
    assert bad["f1"] == pytest.approx(2 / (1 / bad["precision"] + 1 / bad["recall"]))
    wrong = {
        i: float(v.double().softmax(0)[int(e.target)])
        for i, (e, v) in enumerate(zip(examples, logits, strict=True))
        if int(v.argmax()) != int(e.target)
    }
    assert [error["example"] for error in found["worst"]] == sorted(wrong, key=lambda i: wrong[i])[:10]
    assert all(error["input"].startswith("the soup ") for error in found["worst"])
    assert [pair["count"] for pair in found["confused"]] == sorted([pairs[0, 1], pairs[1, 0]], reverse=True)


def test_errors_of_other_answers(tmp_path: Path) -> None:
    labels = write_csv(
        tmp_path / "labels.csv", ["text", "label"], [[f"t{i}", "a|b"] for i in range(4)] + [["u", "c"]]
    )
    task = ClassifyTaskConfig(train=str(labels), label_separator="|").build()
    batch = task.collate([task.dataset("train")[i] for i in range(3)])
    outcomes = Outcomes(task)
    outcomes.add([0, 1, 2], batch, 2 * batch.targets - 1)
    assert [row["f1"] for row in outcomes.result()["classes"]].count(None) < 3
    assert outcomes.result()["worst"] == []
    outcomes.add([3, 4, 5], batch, torch.full((3, 3), -1.0))
    assert outcomes.result()["worst"][0]["predicted"] == "no label"
    numbers = write_csv(tmp_path / "numbers.csv", ["text", "label"], [[f"t{i}", 10 * i] for i in range(9)])
    regress = RegressTaskConfig(train=str(numbers)).build()
    outcomes = Outcomes(regress)
    batch = regress.collate([regress.dataset("train")[i] for i in range(8)])
    said = batch.targets[:, None].clone()
    said[3] += 2
    outcomes.add(list(range(8)), batch, said)
    worst = outcomes.result()["worst"][0]
    assert worst["example"] == 3 and "classes" not in outcomes.result()
    assert float(worst["predicted"]) - float(worst["label"]) == pytest.approx(
        2 * regress.facts["target_std"], rel=1e-2
    )
    records = [{"text": f"Ann {i}", "tags": [[0, 3, "name"]]} for i in range(4)]
    tags = TagTaskConfig(train=str(write_lines(tmp_path / "tags.jsonl", records))).build()
    batch = tags.collate([tags.dataset("train")[i] for i in range(2)])
    outcomes = Outcomes(tags)
    outcomes.add([0, 1], batch, torch.tensor([1.0, 0.0]).expand(2, batch.inputs.shape[1], 2))
    found = outcomes.result()
    assert found["confusion"] == [[2, 0], [2, 0]] and found["worst"][0]["predicted"] == "1 of 2 tags wrong"


def test_evaluation_prints_classes_and_errors(
    told: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(told[0]), "--split=val", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["baselines"]["split"] == "val"
    right = sum(found["confusion"][i][i] for i in range(3))
    assert found["accuracy"] == right / found["examples"] == right / 8
    assert main(["eval", str(told[0]), "--split=train"]) == 0
    text = capsys.readouterr().out
    for part in (
        "baselines on val, accuracy: majority",
        "class  precision  recall      F1    count  predicted",
        "confusion (rows: label, columns: prediction)",
        "worst errors (example, label, prediction, beginning of the input)",
        "the soup ",
    ):
        assert part in text, part


def test_many_classes_are_listed_by_their_score() -> None:
    rows = [
        {"label": f"c{i}", "precision": 0.5, "recall": None, "f1": i / 40, "count": i, "predicted": 2}
        for i in range(40)
    ]
    confused = [{"label": "a", "predicted": "b", "count": 7}]
    lines = list(outcome_lines({"classes": rows, "confusion": None, "confused": confused}))
    assert "(30 of 40, lowest F1 first)" in lines[1] and lines[2].startswith("c0 ")
    assert len([line for line in lines if line.startswith("c")]) == 31 and "  a predicted as b: 7" in lines


def test_the_report_has_classes_and_explains_its_columns(told: tuple[Path, list[str]]) -> None:
    page = told[0].parent / "report.html"
    assert main(["report", str(told[0]), "--split=val", f"--out={page}"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<title>run</title>" in text and 'id="scores"' in text and "Confusion matrix" in text
    assert "TF-IDF and logistic regression" in text and "baseline, accuracy on val" in text
    for head, about in (
        ("recall", "that were found"),
        ("weighted span", "weighted by attention"),
    ):
        heads = [line for line in re.findall(r"<th [^>]*>[^<]*</th>", text) if f">{head}<" in line]
        assert heads and any(about in line for line in heads)
        assert re.search(rf"<dt>{head}</dt><dd>[^<]*{about}", text)
