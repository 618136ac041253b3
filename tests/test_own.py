"""Your own data: every input and every target, from a file to an answer."""

from __future__ import annotations

import csv
import glob
import io
import itertools
import json
import math
import re
import shlex
import struct
import warnings
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqboat.cli.main import main
from seqboat.own.baselines import Offset, Terms, Trees, fit_baseline, statistics
from seqboat.own.fit import FitConfig, attention_line, fit
from seqboat.own.inputs import BUCKETS, read_picture, read_sound
from seqboat.own.records import Values
from seqboat.own.session import configure
from seqboat.own.task import ClassifyTaskConfig, OwnTask, RegressTaskConfig, TagTaskConfig
from seqboat.predict import Predictor
from seqboat.run import Run
from seqboat.tasks.task import Example

TINY = [
    "--model.d_model=8",
    "--model.num_layers=1",
    "--model.mixer.gau.d_z=4",
    "--model.mixer.gau.d_v=8",
    "--model.mixer.gau.window=8",
    "--model.mixer.ssm.d_state=2",
    "--schedule.steps=2",
    "--schedule.warmup_steps=1",
    "--training.batch_size=4",
    "--training.save_every=2",
    "--evaluation.every=2",
]
"""A run of a recipe that takes a second."""
SHORT = ["--set", "steps=2", "--set", "d_model=8", "--set", "evaluations=1"]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_csv(path: Path, columns: list[str], rows: list[list[Any]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def sound(samples: list[int], width: int = 2, rate: int = 8000, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as clip:
        clip.setparams((channels, width, rate, 0, "NONE", ""))
        pieces = [struct.pack("<i", sample)[: width if width > 1 else 1] for sample in samples]
        clip.writeframes(b"".join(pieces))
    return buffer.getvalue()


# from a file to an answer


def class_table(folder: Path) -> list[str]:
    rows = [[i, f"{'good' if i % 2 else 'bad'} film {i}", "pq"[i % 2]] for i in range(20)]
    return [str(write_csv(folder / "rows.csv", ["id", "review", "label"], rows)), "--target", "label"]


def label_table(folder: Path) -> list[str]:
    names = ["a", "b", "a|b", "a|c", "b|c"]
    rows = [[f"text {i} of many", names[i % 5]] for i in range(20)]
    table = write_csv(folder / "rows.csv", ["text", "label"], rows)
    return [str(table), "--target", "label", "--set", "label_separator=|"]


def number_table(folder: Path) -> list[str]:
    rows = [[f"text {i}", 1000 + 10.5 * i] for i in range(20)]
    return [str(write_csv(folder / "rows.csv", ["text", "weight"], rows)), "--target", "weight"]


def span_lines(folder: Path) -> list[str]:
    records = [{"text": f"Zoë met {i}", "tags": [[0, 3, "name"]]} for i in range(20)]
    return [str(write_lines(folder / "rows.jsonl", records)), "--target", "tags", "--set", "tokens=bytes"]


def word_tags(folder: Path) -> list[str]:
    records = [{"words": ["Ann", "ran", str(i)], "tags": ["name", "O", "number"]} for i in range(20)]
    return [str(write_lines(folder / "rows.jsonl", records)), "--target", "tags"]


def event_lines(folder: Path) -> list[str]:
    records = [{"events": ["on", "off", f"e{i % 3}"][: 2 + i % 2], "kind": "ab"[i % 2]} for i in range(20)]
    return [str(write_lines(folder / "rows.jsonl", records)), "--target", "kind"]


def series_lines(folder: Path) -> list[str]:
    records = [
        {"load": [[t * (i % 2), None if t == 2 else 5 + t] for t in range(4 + i % 3)], "kind": "ab"[i % 2]}
        for i in range(20)
    ]
    return [str(write_lines(folder / "rows.jsonl", records)), "--target", "kind"]


def series_steps(folder: Path) -> list[str]:
    rows = [[i, t, t * i if t else "", i / 3] for i in range(20) for t in range(150 + i)]
    table = write_csv(folder / "rows.csv", ["id", "u", "v", "wear"], rows)
    return [str(table), "--target", "wear", "--series", "id", "--channels", "u", "v"]


def sound_folder(folder: Path) -> list[str]:
    for i in range(20):
        path = folder / "clips" / "hl"[i % 2] / f"{i}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sound([1000 * ((t * (1 + i % 2)) % 7) for t in range(30 + i)]))
    return [str(folder / "clips")]


def image_folder(folder: Path) -> list[str]:
    image = pytest.importorskip("PIL.Image")
    for i in range(20):
        path = folder / "pictures" / "wb"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((6, 5 + i % 2), 12 * i, np.uint8)).save(path)
    return [str(folder / "pictures"), "--set", "image_size=4"]


def named_sounds(folder: Path) -> list[str]:
    rows = []
    for i in range(20):
        (folder / f"{i}.wav").write_bytes(sound([100 * i] * 30))
        rows.append([f"{i}.wav", i / 2])
    table = write_csv(folder / "rows.csv", ["clip", "label"], rows)
    return [str(table), "--target", "label", "--set", "file_column=clip"]


KINDS: list[tuple[Callable[[Path], list[str]], set[str]]] = [
    (class_table, {"predicted_label", "probability"}),
    (label_table, {"labels"}),
    (number_table, {"value"}),
    (span_lines, {"spans"}),
    (word_tags, {"predicted_tags"}),
    (event_lines, {"label", "probability"}),
    (series_lines, {"label", "probability"}),
    (series_steps, {"value"}),
    (sound_folder, {"label", "probability"}),
    (image_folder, {"label", "probability"}),
    (named_sounds, {"value"}),
]


@pytest.mark.parametrize(("kind", "wanted"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_from_a_file_to_an_answer(
    kind: Callable[[Path], list[str]], wanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = kind(tmp_path)
    model = tmp_path / "model"
    assert main(["train", *arguments, *SHORT, f"--out={model}"]) == 0, capsys.readouterr().err
    moved = tmp_path / "elsewhere"
    model.rename(moved)
    # the model carries what it needs: the training data may be gone
    data = Path(arguments[0])
    new = data.rename(data.with_name(f"new-{data.name}"))
    capsys.readouterr()
    out = tmp_path / "answers.jsonl"
    assert main(["predict", str(moved), str(new), f"--out={out}"]) == 0, capsys.readouterr().err
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 20
    assert all(wanted <= set(answer) and "error" not in answer for answer in answers)
    if kind is class_table:
        assert [answer["id"] for answer in answers] == [str(i) for i in range(20)]
    # the same scores as evaluation
    assert main(["eval", str(moved), f"--data.val={new}", f"--data.test={new}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["examples"] == 20 and math.isfinite(scores["loss"])
    task = Run(moved, fields=[f"--data.val={new}"]).task
    assert isinstance(task, OwnTask)
    data_set = task.dataset("val")
    if wanted == {"value"}:
        facts = task.facts
        truth = [float(data_set[i].target) * facts["target_std"] + facts["target_mean"] for i in range(20)]
        error = math.sqrt(sum((a["value"] - b) ** 2 for a, b in zip(answers, truth, strict=True)) / 20)
        assert scores["rmse"] == pytest.approx(error, rel=1e-4)
    elif "label" in wanted:
        named = [task.facts["labels"][int(data_set[i].target)] for i in range(20)]
        right = sum(answer["label"] == name for answer, name in zip(answers, named, strict=True))
        assert scores["accuracy"] == pytest.approx(right / 20)


def test_a_model_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *class_table(tmp_path), *SHORT, f"--out={tmp_path / 'model'}"]) == 0
    assert main(["report", str(tmp_path / "model"), "--split=val"]) == 0
    page = (tmp_path / "model" / "report.html").read_text(encoding="utf-8")
    assert "TF-IDF and logistic regression" in page and 'id="scores"' in page


# inputs


def in_memory(
    inputs: list[Any], targets: list[Any] | None = None, kind: Any = ClassifyTaskConfig, **fields: Any
) -> OwnTask:
    config = kind(**fields)
    answers = [("a", "b")[i % 2] for i in range(len(inputs))] if targets is None else targets
    return OwnTask(config, Values(inputs, answers, config))


def test_words_are_known_if_they_are_met_twice() -> None:
    task = in_memory(["One fish, two fish"] * 9 + ["red Fish!"] * 11)
    assert set(task.facts["words"]) == {"one", "fish", ",", "two", "red", "!"}
    known = task.facts["words"].index("fish") + BUCKETS
    ids = task.query("fish FISH whale whale kraken").inputs.tolist()
    assert ids[:2] == [known, known] and ids[2] == ids[3] != ids[4] and max(ids[2:]) < BUCKETS
    # lists are taken as they are; other scripts have no words
    assert "New York" in in_memory([["New York", "x"]] * 20).facts["words"]
    other = in_memory([f"{i:05}абвгдежзиклмнопрст{i * i}" for i in range(30)])
    assert other.vocab == 256 and other.source.name == "bytes"
    assert in_memory(["word"] * 20, tokens="bytes").query("é").inputs.tolist() == [0xC3, 0xA9]


def test_series_are_normalized_patched_and_limited() -> None:
    random = np.random.default_rng(0)
    rows = [5 + 2 * random.standard_normal((300 + i, 2)) for i in range(20)]
    rows[3][5, 1] = np.nan
    task = in_memory(rows)
    facts = task.facts
    assert facts["patch"] == 4 and facts["gaps"] and task.channels == 16
    assert facts["mean"] == pytest.approx([5, 5], abs=0.1) and facts["std"] == pytest.approx([2, 2], abs=0.1)
    steps = task.query(rows[3]).inputs.reshape(-1, 4)
    assert len(steps) == 304 and steps[5].tolist()[1::2] == [0.0, 0.0]
    wanted = (rows[3] - facts["mean"]) / facts["std"]
    assert np.allclose(steps[6:300, :2], wanted[6:300], atol=1e-5) and (steps[303] == 0).all()
    # one absurd value neither decides about the scale nor gets far
    rows[0][0, 0] = 3e38
    again = in_memory(rows)
    assert again.facts["std"][0] < 30 and np.abs(again.query(rows[0]).inputs).max() <= 1000
    long = in_memory([np.zeros((20_000, 1)) + i for i in range(4)])
    assert long.facts["patch"] == 64 and len(long.query(np.zeros((20_000, 1))).inputs) == 313
    with pytest.raises(ValueError, match="expected 2 channels, got 3"):
        task.query(np.zeros((5, 3)))


def test_what_is_cut_is_said(tmp_path: Path) -> None:
    task = in_memory([" ".join(["w"] * (5 + 10 * (i == 3))) for i in range(20)], max_length=8, holdout=0.05)
    found = task.summary("val")
    text = "\n".join(found.lines())
    assert "1 rows (5.3%) are cut to 8, which loses 6.7% of all words (--set max_length=N)" in text
    assert task.query("w w w w w w w w w w").cut == 2
    assert in_memory(["w " * 9000] * 4).max_length == 8192


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sounds_of_every_width(width: int) -> None:
    top = (1 << (8 * width - 1)) - 1
    rate, samples = read_sound(sound([0 if width > 1 else 128, top if width > 1 else 255], width))
    assert rate == 8000 and samples == pytest.approx([0, 1], abs=0.01)


def test_pictures_are_told_by_their_content() -> None:
    image = pytest.importorskip("PIL.Image")
    deep = np.array([[0, 65535], [257, 32768]], np.uint16)
    buffer = io.BytesIO()
    image.fromarray(deep).save(buffer, "PNG")
    assert read_picture(buffer.getvalue()) == pytest.approx(deep / 257)
    with pytest.raises(ValueError, match="not an image: expected one of PNG, JPEG, WEBP, BMP, TIFF, GIF"):
        read_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    huge = (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 9999, 9999, 1, 8, 0, 0, 1, 1, 0, 0)
    )
    with pytest.raises(ValueError, match="9999 x 9999 pixels is too large"):
        read_picture(huge)


def test_splits_by_column_group_and_time(tmp_path: Path) -> None:
    rows = [
        [f"text {i}", "ab"[i % 2], ("train", "dev", "test")[i % 3], f"g{i // 4}", f"2024-01-{i + 1:02}"]
        for i in range(24)
    ]
    table = str(write_csv(tmp_path / "rows.csv", ["text", "label", "part", "group", "day"], rows))
    by = ClassifyTaskConfig(train=table, split_column="part").build()
    assert by.parts()["val"].tolist() == list(range(1, 24, 3))
    assert by.parts()["test"].tolist() == list(range(2, 24, 3))
    groups = ClassifyTaskConfig(train=table, group_column="group").build().parts()
    assert not {i // 4 for i in groups["train"]} & {i // 4 for i in groups["val"]}
    late = ClassifyTaskConfig(train=table, time_column="day", holdout=0.25).build().parts()
    assert late["val"].tolist() == list(range(18, 24))
    halves = ClassifyTaskConfig(train=table, holdout=0.5).build().parts()
    assert sum(i % 2 for i in halves["val"].tolist()) == 6


# the simple thing


def test_terms_are_weighed_as_by_hand() -> None:
    texts = ["a b a", "b c", "a b c c", "c c a"] * 30
    task = in_memory(texts, holdout=0.1)
    train = task.dataset("train")
    rows = [train[i] for i in range(len(train))]
    found = fit_baseline(task, [row.inputs for row in rows], [row.target for row in rows])
    module = found.module
    assert isinstance(module, Terms)

    def terms(row: Example) -> Counter[tuple[int, ...]]:
        ids = row.inputs.tolist()
        return Counter([(i,) for i in ids] + list(itertools.pairwise(ids)))

    frequency = Counter(term for row in rows for term in terms(row))
    seen = Counter(term for row in rows for term in set(terms(row)))
    assert len(module.terms) == len(frequency)
    row = rows[0]
    weights = {
        t: (1 + math.log(n)) * (math.log((1 + len(rows)) / (1 + seen[t])) + 1) for t, n in terms(row).items()
    }
    norm = math.sqrt(sum(value**2 for value in weights.values()))
    base = int(task.vocab or 0) + 1
    order = {int(code): place for place, code in enumerate(module.terms)}
    wanted = module.bias.double().clone()
    for term, value in weights.items():
        code = term[0] + 1 if len(term) == 1 else (term[0] + 1) * base + term[1] + 1
        wanted += value / norm * module.weight[order[code]].double()
    alone = module(torch.from_numpy(row.inputs)[None].long())
    assert alone[0].double().tolist() == pytest.approx(wanted.tolist(), rel=1e-5)
    batch = task.collate_inputs(rows[:7])
    assert module(batch.inputs, batch.mask)[0].tolist() == pytest.approx(alone[0].tolist(), rel=1e-5)
    # rows are scored by models that have not seen them
    assert not np.allclose(found.unseen[0], module(batch.inputs, batch.mask)[0].numpy(), atol=1e-6)


def test_trees_answer_as_scikit_learn_does() -> None:
    from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

    random = np.random.default_rng(0)
    features = random.standard_normal((200, 5))
    facts = {"mean": [0.0], "patch": 1, "gaps": False}
    for outputs in (1, 2, 3):
        target = features[:, 0] * 2 if outputs == 1 else (random.random(200) * outputs).astype(int)
        kind: Any = GradientBoostingRegressor if outputs == 1 else GradientBoostingClassifier
        model = kind(n_estimators=7, max_depth=4, init="zero", random_state=0).fit(features, target)
        trees = Trees(7, 31, outputs, facts)
        trees.fill(model)
        scores = trees.scores(torch.from_numpy(features))
        if outputs == 1:
            assert np.allclose(scores[:, 0], model.predict(features))
        else:
            assert np.allclose(scores.softmax(-1), model.predict_proba(features))


def test_statistics_ignore_padding_and_gaps() -> None:
    random = np.random.default_rng(0)
    rows = [random.standard_normal((140 + 9 * i, 2)) for i in range(8)]
    rows[2][3:9, 0] = np.nan
    task = in_memory(rows)
    examples = [Example(task.query(row).inputs, 0) for row in rows]
    batch = task.collate_inputs(examples)
    together = statistics(batch.inputs, batch.mask, task.facts)
    for number, example in enumerate(examples):
        one = statistics(torch.from_numpy(example.inputs)[None], None, task.facts)
        assert torch.allclose(together[number], one[0], atol=1e-9)


def test_a_network_starts_as_the_baseline_and_adds_what_it_finds() -> None:
    random = np.random.default_rng(0)
    inputs = []
    for i in range(300):
        order = ["x", "y"] if i % 2 else ["y", "x"]
        inputs.append([*("abc"[k] for k in random.integers(0, 3, 3)), *order])
    config = ClassifyTaskConfig()
    task, run = configure(
        config, Values(inputs, ["first" if i % 2 else "second" for i in range(300)], config), ["--seed=0"]
    )
    result = fit(task, run, FitConfig(steps=60, evaluations=4))
    offset = result.model.offset
    assert isinstance(offset, Offset) and result.record["score"]["accuracy"] == 1.0
    # labels by chance: nothing can be added, and the baseline answers alone
    labels = [("no", "yes")[int(k)] for k in random.integers(0, 2, 300)]
    task, run = configure(config, Values(inputs, labels, config), ["--seed=0"])
    result = fit(task, run, FitConfig(steps=8, evaluations=2))
    assert result.record["kept"] == "baseline"
    predictor = Predictor((task, result.model))
    alone = result.model.offset
    assert isinstance(alone, Offset)
    batch = task.collate_inputs([Example(task.query(inputs[0]).inputs, 0)])
    assert predictor.logits(inputs[:1])[0].tolist() == pytest.approx(
        alone.baseline(batch.inputs, batch.mask)[0].tolist()
    )


def test_the_last_line_says_what_attention_did() -> None:
    found = {"active": 0.34, "change": -0.041, "error": 0.008, "metric": "accuracy"}
    assert attention_line(found) == "attention: 34 % of tokens; without it -4.1 +- 0.8 points"
    assert "bought nothing" in attention_line({**found, "off": True})
    assert "baseline" in attention_line(None)


# answers


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    assert main(["train", *class_table(folder), *SHORT, f"--out={folder / 'model'}"]) == 0
    return folder / "model"


def test_bad_rows_keep_their_place_and_formulas_are_text(classifier: Path, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_text(
        'id,review,note\n1,good film,=1+1\n2,,x\n3,bad\n4,"bad film","-3"\n5,bad,@x\n', encoding="utf-8"
    )
    out = tmp_path / "out.csv"
    assert main(["predict", str(classifier), str(table), f"--out={out}"]) == 0
    with open(out, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["1", "", "", "4", "5"]
    assert rows[0]["note"] == "'=1+1" and rows[3]["note"] == "-3" and rows[4]["note"] == "'@x"
    assert "line 3: empty text" in rows[1]["error"] and "line 4: expected 3 fields, got 2" in rows[2]["error"]
    assert rows[0]["label"] in "pq" and not rows[0]["error"]
    assert main(["predict", str(classifier), str(table), f"--out={table}"]) == 2


def test_parts_of_a_table_merge_back(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_csv(
        tmp_path / "new.csv", ["row", "review"], [[str(70 - i), f"good film {i}"] for i in range(7)]
    )
    rows: list[dict[str, Any]] = []
    for part in range(3):
        out = tmp_path / f"{part}.jsonl"
        assert main(["predict", str(classifier), str(table), f"--out={out}", f"--shard={part}/3"]) == 0
        rows += [json.loads(line) for line in out.read_text().splitlines()]
    rows.sort(key=lambda row: row["input_row"])
    # a column of its own that is called row stays
    assert [row["row"] for row in rows] == [str(70 - i) for i in range(7)]
    assert [row["review"] for row in rows] == [f"good film {i}" for i in range(7)]
    table = write_csv(tmp_path / "own.csv", ["input_row", "review"], [["9", "good film"]])
    assert main(["predict", str(classifier), str(table), "--shard=0/3"]) == 2
    assert "own.csv has a column input_row, which --shard adds: rename it" in capsys.readouterr().err


def test_a_column_that_is_gone_is_one_line(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_csv(tmp_path / "new.csv", ["body"], [["good film"]])
    assert main(["predict", str(classifier), str(table)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "new.csv has no column 'review'" in said and "it has body" in said
    assert "--data.text_column names another" in said
    assert main(["predict", str(classifier), str(table), "--data.text_column=body"]) == 0
    # what the message says is what the command takes
    table.write_text("id;review\n1;good film\n", encoding="utf-8")
    assert main(["predict", str(classifier), str(table)]) == 2
    assert "separated by ';': --set delimiter=';'" in capsys.readouterr().err
    assert main(["predict", str(classifier), str(table), "--set", "delimiter=;"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("1,good film,")


def test_answers_do_not_depend_on_the_batch(classifier: Path) -> None:
    texts = ["good film " * n for n in (1, 5, 2, 9, 1, 3)] + ["bad"]
    one = [Predictor(classifier, batch_size=1).predict([text])[0]["probabilities"]["p"] for text in texts]
    many = [answer["probabilities"]["p"] for answer in Predictor(classifier, batch_size=7).predict(texts)]
    assert one == pytest.approx(many, rel=1e-5)


def test_an_output_that_is_no_number_is_an_error(classifier: Path) -> None:
    predictor = Predictor(classifier)
    predictor.model.head.out.bias.data[0] = torch.nan  # type: ignore[union-attr, operator]
    assert "not finite" in predictor.predict(["good film"])[0]["error"]


def test_spans_cover_words() -> None:
    task = in_memory(["Ann met Bob-Lee"] * 20, [[[0, 3, "name"], [8, 15, "name"]]] * 20, TagTaskConfig)
    row = task.dataset("train")[0]
    assert [task.facts["labels"][i] for i in row.target] == ["name", "O", "name", "name", "name"]  # type: ignore[union-attr]
    logits = torch.nn.functional.one_hot(torch.from_numpy(np.asarray(row.target)), 2).double()
    spans = task.answer(logits, "Ann met Bob-Lee")["spans"]
    assert [(span["start"], span["end"]) for span in spans] == [(0, 3), (8, 15)]


def test_numbers_that_cannot_be_learned_are_refused() -> None:
    for value, message in (
        (1e308, "a number must be between"),
        ("x", "not a number"),
        (10**400, "must be between"),
    ):
        task = in_memory(["a b"] * 20, [1.0] * 19 + [value], RegressTaskConfig, strict=True)
        with pytest.raises(ValueError, match=message):
            task.dataset("train")
    nan = in_memory(["a b"] * 20, ["x", "y"] * 9 + ["x", math.nan], strict=True)
    with pytest.raises(ValueError, match=r"X, X\[19\]: empty label \(NaN\)"):
        nan.dataset("train")


@pytest.mark.parametrize("kind", [RegressTaskConfig, ClassifyTaskConfig])
def test_labels_of_json_that_are_no_numbers(kind: type[Any], tmp_path: Path) -> None:
    labels = [str(number % 2) for number in range(20)] + ["NaN", "1" + "0" * 400]
    rows = [f'{{"text": "text {number}", "label": {label}}}\n' for number, label in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("".join(rows), encoding="utf-8")
    task = kind(train=str(tmp_path / "a.jsonl"), max_length=16).build()
    task.dataset("train")
    # as a class, the long one has a name like any other
    assert task.skips.count == (2 if kind is RegressTaskConfig else 1)
    assert "a.jsonl, line 21: " in task.skips.first and "nan" in task.skips.first.lower()


TUTORIAL = Path(__file__).parents[1] / "docs" / "your-data.md"


def test_the_page_on_your_own_data_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    text = TUTORIAL.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                exec(compile(block, str(TUTORIAL), "exec"), names)
            continue
        for line in block.splitlines():
            arguments = shlex.split(line.removeprefix("$ seqboat "))
            # the shell would expand patterns
            expanded = [path for word in arguments for path in sorted(glob.glob(word)) or [word]]
            assert main(expanded) == 0, line
    with open("answers.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[7]["id"] == "7" and rows[7]["predicted_label"] in ("open first", "close first")
    said = capsys.readouterr()
    assert "regress: column 'wear' holds" in said.err and said.out.count("attention: ") == 5
