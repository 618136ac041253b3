"""Your own data: every input and every target, from a file to an answer."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import struct
import tracemalloc
import wave
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from closeness import assert_same_numbers
from seqboat.cli.main import main
from seqboat.data.store import Skips
from seqboat.data.tables import read_records
from seqboat.own.carried import unpack_tokenizer
from seqboat.own.inputs import read_sound
from seqboat.own.prepare import read_time
from seqboat.own.tags import find_spans
from seqboat.own.task import OwnTask
from seqboat.predict import Predictor
from seqboat.run import Run
from seqboat.tasks import ClassifyTaskConfig, RegressTaskConfig, TagTaskConfig

TINY = [
    "--data.max_length=24",
    "--model.d_model=8",
    "--model.num_layers=1",
    "--model.mixer.gau.d_z=4",
    "--model.mixer.gau.d_v=8",
    "--model.mixer.gau.window=8",
    "--model.mixer.gau.max_positions=64",
    "--model.mixer.ssm.d_state=2",
    "--schedule.steps=2",
    "--schedule.warmup_steps=1",
    "--training.batch_size=4",
    "--training.save_every=2",
    "--evaluation.every=2",
]


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


# whole runs, one for each kind of data


def class_table(folder: Path) -> list[str]:
    rows = [[f"{'good' if i % 2 else 'bad'} film {i}", "pq"[i % 2]] for i in range(20)]
    return ["classify", f"--data.train={write_csv(folder / 'rows.csv', ['text', 'label'], rows)}"]


def balanced_table(folder: Path) -> list[str]:
    return [*class_table(folder), "--data.class_weights=balanced"]


def label_table(folder: Path) -> list[str]:
    rows = [
        [f"text {i}", "|".join(name for bit, name in enumerate("abc") if i >> bit & 1)] for i in range(24)
    ]
    table = write_csv(folder / "rows.csv", ["text", "label"], rows)
    return ["classify", f"--data.train={table}", "--data.label_separator=|"]


def pair_table(folder: Path) -> list[str]:
    rows = [[f"left {i}", f"right number {i * i}", i % 2] for i in range(20)]
    table = write_csv(folder / "rows.csv", ["text", "other", "label"], rows)
    return ["classify", f"--data.train={table}", "--data.second_column=other"]


def number_table(folder: Path) -> list[str]:
    rows = [[f"text {i}", 1000 + 10 * i] for i in range(20)]
    table = write_csv(folder / "rows.csv", ["text", "weight"], rows)
    return ["regress", f"--data.train={table}", "--data.label_column=weight"]


def span_lines(folder: Path) -> list[str]:
    records = [{"text": f"Zoë met {i}", "tags": [[0, 3, "name"]]} for i in range(20)]
    return ["tag", f"--data.train={write_lines(folder / 'rows.jsonl', records)}"]


def causal_word_tags(folder: Path) -> list[str]:
    records = [{"text": ["Ann", "ran", str(i)], "tags": ["name", "O", "number"]} for i in range(20)]
    return ["tag", f"--data.train={write_lines(folder / 'rows.jsonl', records)}", "--model.mixer.causal=true"]


def series_lines(folder: Path) -> list[str]:
    records = [
        {"text": [[t * (i % 2), None if t == 2 else 5 + t] for t in range(4 + i % 3)], "label": "ab"[i % 2]}
        for i in range(20)
    ]
    return ["classify", f"--data.train={write_lines(folder / 'rows.jsonl', records)}", "--data.input=series"]


def series_steps(folder: Path) -> list[str]:
    rows = [[i, t, t * i if t else "", i % 2] for i in range(20) for t in range(5)]
    table = write_csv(folder / "rows.csv", ["id", "u", "v", "label"], rows)
    return [
        "regress",
        f"--data.train={table}",
        "--data.series_column=id",
        "--data.channels",
        "u",
        "v",
    ]


def symbol_table(folder: Path) -> list[str]:
    rows = [["acgt"[i % 4] * 9 + "GATTACA", i % 2] for i in range(20)]
    table = write_csv(folder / "rows.csv", ["text", "label"], rows)
    return ["classify", f"--data.train={table}", "--data.input=symbols"]


def sound_folder(folder: Path) -> list[str]:
    for i in range(20):
        path = folder / "clips" / "hl"[i % 2] / f"{i}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sound([1000 * ((t * (1 + i % 2)) % 7) for t in range(30 + i)]))
    return ["classify", f"--data.train={folder / 'clips'}"]


def image_folder(folder: Path) -> list[str]:
    image = pytest.importorskip("PIL.Image")
    for i in range(20):
        path = folder / "pictures" / "wb"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((6, 5 + i % 2), 12 * i, np.uint8)).save(path)
    return ["classify", f"--data.train={folder / 'pictures'}", "--data.image_size=4"]


def named_sounds(folder: Path) -> list[str]:
    rows = []
    for i in range(20):
        (folder / f"{i}.wav").write_bytes(sound([100 * i] * 30))
        rows.append([f"{i}.wav", i / 2])
    table = write_csv(folder / "rows.csv", ["clip", "label"], rows)
    return ["regress", f"--data.train={table}", "--data.file_column=clip"]


KINDS: list[Callable[[Path], list[str]]] = [
    class_table,
    balanced_table,
    label_table,
    pair_table,
    number_table,
    span_lines,
    causal_word_tags,
    series_lines,
    series_steps,
    symbol_table,
    sound_folder,
    image_folder,
    named_sounds,
]

ANSWERS = {
    "label_table": {"labels", "probabilities"},
    "number_table": {"value"},
    "series_steps": {"value"},
    "named_sounds": {"value"},
    "span_lines": {"spans"},
    "causal_word_tags": {"spans"},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_from_a_file_to_an_answer(
    kind: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = kind(tmp_path)
    assert main(["train", *arguments, *TINY, f"--out={tmp_path / 'run'}"]) == 0, capsys.readouterr().err
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(tmp_path / "run", moved)
    data = Path(next(a for a in arguments if a.startswith("--data.train=")).partition("=")[2])
    capsys.readouterr()
    # the run carries what it needs: the training data may be gone
    new = data.rename(data.with_name(f"new-{data.name}"))
    out = tmp_path / "answers.jsonl"
    assert main(["predict", str(moved), str(new), f"--out={out}", "--activation", "--probabilities"]) == 0, (
        capsys.readouterr().err
    )
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(answers) == 24 if kind is label_table else 20
    wanted = ANSWERS.get(kind.__name__, {"label", "probability", "probabilities"})
    assert all(set(answer) == {"row", "activation"} | wanted for answer in answers)
    assert all(0 <= answer["activation"] <= 1 for answer in answers)
    # the same scores as evaluation
    assert main(["eval", str(moved), f"--data.val={new}", f"--data.test={new}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["examples"] == len(answers) and math.isfinite(scores["loss"])
    task = Run(moved, fields=[f"--data.val={new}"]).task
    assert isinstance(task, OwnTask)
    dataset = task.dataset("val")
    if wanted == {"value"}:
        mean, std = task.facts["target_mean"], task.facts["target_std"]
        truth = [float(dataset[i].target) * std + mean for i in range(len(dataset))]
        said = [answer["value"] for answer in answers]
        error = math.sqrt(sum((a - b) ** 2 for a, b in zip(said, truth, strict=True)) / len(truth))
        assert scores["rmse"] == pytest.approx(error, rel=1e-5)
    elif "label" in wanted:
        named = [task.facts["labels"][int(dataset[i].target)] for i in range(len(dataset))]
        right = sum(answer["label"] == name for answer, name in zip(answers, named, strict=True))
        assert scores["accuracy"] == pytest.approx(right / len(named))
        assert all(sum(answer["probabilities"].values()) == pytest.approx(1) for answer in answers)


def test_a_run_carries_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("seqboat.hf")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["?", "pad", *(f"word{i}" for i in range(9))])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    named = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?", pad_token="pad")
    named.save_pretrained(tmp_path / "words")
    rows = [[f"word{i % 9} word{(i + 3) % 9} other", "ab"[i % 2]] for i in range(20)]
    table = write_csv(tmp_path / "rows.csv", ["text", "label"], rows)
    run = tmp_path / "run"
    assert main(["train", "classify", f"--data.train={table}", f"--data.tokenizer={tmp_path / 'words'}", *TINY,
                 f"--out={run}"]) == 0, capsys.readouterr().err  # fmt: skip
    before = Predictor(run).predict(["word1 word4 other", "word2"])
    moved = shutil.move(run, tmp_path / "moved")
    shutil.rmtree(tmp_path / "words")
    table.unlink()
    monkeypatch.chdir(tmp_path)
    assert Predictor(moved).predict(["word1 word4 other", "word2"]) == before
    assert Predictor(Run(moved).pack(tmp_path / "packed")).task.vocab == len(words)
    capsys.readouterr()
    assert main(["export", "--to=hf", str(moved), str(tmp_path / "exported")]) == 0
    assert "tokenizer: the one that the run" in capsys.readouterr().out
    pipe = transformers.pipeline("text-classification", str(tmp_path / "exported"), top_k=None)
    scores = {part["label"]: part["score"] for part in pipe(["word1 word4 other"])[0]}
    assert scores == pytest.approx(before[0]["probabilities"], rel=1e-4)
    # what is packed is not trusted
    packed = Run(moved).task.facts["tokenizer"]  # type: ignore[index]
    with pytest.raises(ValueError, match=r"name '\.\./x'"):
        unpack_tokenizer({"../x": next(iter(packed.values()))})
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack_tokenizer({name: text[:-12] for name, text in packed.items()})


@pytest.mark.parametrize(
    "kind", [pair_table, label_table, number_table, span_lines, series_lines, image_folder]
)
def test_runs_are_reported_explained_and_exported(
    kind: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = kind(tmp_path)
    run = str(tmp_path / "run")
    assert main(["train", *arguments, *TINY, f"--out={run}"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["report", run, f"--out={tmp_path / 'report.html'}"]) == 0, capsys.readouterr().err
    name = kind.__name__
    text = {"pair_table": ["one", "two"], "series_lines": [], "image_folder": []}.get(name, ["Ann met 1"])
    if text:
        capsys.readouterr()
        assert main(["explain", run, *(part for word in text for part in ("--text", word))]) == 0
        said = {"label_table": "label|%", "number_table": "1", "span_lines": "tag|name on", "pair_table": "%"}
        assert re.search(rf"prediction: .*({said[name]})", capsys.readouterr().out)
    if kind is number_table:  # one export: each takes ten seconds
        check_onnx(run, tmp_path / "onnx")
    hf = pytest.importorskip("seqboat.hf")
    transformers = pytest.importorskip("transformers")
    capsys.readouterr()
    code = main(["export", "--to=hf", run, str(tmp_path / "exported")])
    if kind is pair_table:
        assert code == 2 and "only language models, classifiers and taggers" in capsys.readouterr().err
        return
    assert code == 0, capsys.readouterr().err
    auto = hf.AutoModelForTokenClassification if kind is span_lines else hf.AutoModelForSequenceClassification
    model = auto.from_pretrained(tmp_path / "exported")
    predictor = Predictor(run)
    task = predictor.task
    assert isinstance(task, OwnTask)
    if task.vocab is None:
        example = task.dataset("val")[0]
        values = torch.from_numpy(example.inputs)[None]
        # the logits of so short a training are small sums of large terms: too few digits are left in float32
        values, model = values.double(), model.double()
        assert_same_numbers(model(input_values=values).logits, predictor.model.double()(values).logits)
        assert model.config.input_facts["mean"] == task.facts["mean"]
        with pytest.raises(ValueError, match="input_values must be given"):
            model(torch.zeros(1, 3, dtype=torch.int64))
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    long = "Ann met 1 and a great many others on the way"
    inputs = tokenizer([long, "Ann"], truncation=True, padding=True, return_tensors="pt")
    assert inputs["input_ids"].shape == (2, 24)
    logits = model(**inputs).logits
    answers = predictor.predict([long, "Ann"])
    if kind is number_table:
        assert model.config.problem_type == "regression"
        assert_same_numbers(logits[:, 0], torch.tensor([answer["value"] for answer in answers]))
    elif kind is label_table:
        assert model.config.problem_type == "multi_label_classification"
        wanted = torch.tensor([list(answer["probabilities"].values()) for answer in answers])
        assert_same_numbers(logits.sigmoid(), wanted)
    else:
        tags = [[model.config.id2label[int(tag)] for tag in row] for row in logits.argmax(-1)]
        assert answers[0]["spans"] == find_spans(long, tags[0])
        assert answers[1]["spans"] == find_spans("Ann", tags[1][:3])


def check_onnx(run: str, folder: Path) -> None:
    """The run as ONNX: what the file says about it, and answers in its units. The command compares the scores."""
    if find_spec("onnxscript") is None or find_spec("onnxruntime") is None:
        return
    from seqboat.export.onnx import OnnxModel

    assert main(["export", "--to=onnx", run, str(folder), "--int8"]) == 0
    file, predictor = OnnxModel(folder / "sequence.onnx"), Predictor(run)
    assert file.about["problem"] == "number" and "input" not in file.about
    assert file.about["max_length"] == str(predictor.task.max_length)
    text = b"Ann met 1"
    found = file.run({"tokens": np.array([list(text)]), "lengths": np.array([len(text)])})["logits"]
    (answer,) = predictor.predict([text.decode()])
    # int8 weights: the spread of the targets is 58
    assert abs(float(found[0, 0]) - answer["value"]) < 2 and answer["value"] > 900


# targets


def build(config: Any, rows: int = 4) -> tuple[OwnTask, Any]:
    task = config.build()
    dataset = task.dataset("train")
    return task, task.collate([dataset[i] for i in range(min(rows, len(dataset)))])


class Output:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def test_balanced_classes_have_equal_weight(tmp_path: Path) -> None:
    table = write_csv(
        tmp_path / "rows.csv", ["text", "label"], [["t", "a"]] * 9 + [["t", "b"]] * 3 + [["t", "a"]] * 3
    )
    task, batch = build(ClassifyTaskConfig(train=str(table), val=str(table), class_weights="balanced"), 15)
    assert task.facts["counts"] == [12, 3]
    weights = torch.tensor([15 / 24, 15 / 6])
    logits = torch.randn(15, 2)
    loss = task.loss(Output(logits), batch)
    wanted = cross_entropy(logits, batch.targets, weight=weights)
    assert_same_numbers(loss.mean, wanted)
    counts = torch.bincount(batch.targets).float() * weights
    assert float(counts[0]) == pytest.approx(float(counts[1]))


def test_several_labels_are_separate_questions(tmp_path: Path) -> None:
    rows = [["x", "a|b"], ["y", ""], ["z", " b | c "], ["w", "c|c"]]
    table = write_csv(tmp_path / "rows.csv", ["text", "label"], rows)
    task, batch = build(ClassifyTaskConfig(train=str(table), val=str(table), label_separator="|"))
    assert task.labels == ("a", "b", "c")
    wanted = torch.tensor([[1.0, 1, 0], [0, 0, 0], [0, 1, 1], [0, 0, 1]])
    assert torch.equal(batch.targets, wanted)
    logits = torch.randn(4, 3)
    assert_same_numbers(
        task.loss(Output(logits), batch).mean, binary_cross_entropy_with_logits(logits, wanted)
    )
    scores = task.summarize(task.score(Output(wanted * 4 - 2), batch))
    assert scores["f1"] == scores["exact"] == 1
    scores = task.summarize(task.score(Output(torch.full((4, 3), 2.0)), batch))
    assert scores["f1"] == pytest.approx(2 * 5 / (12 + 5)) and scores["exact"] == 0
    assert task.answer(torch.tensor([2.0, -2, 3]))["labels"] == ["a", "c"]
    lists = write_lines(
        tmp_path / "rows.jsonl", [{"text": "x", "label": ["b", "a"]}, {"text": "y", "label": []}]
    )
    task, batch = build(ClassifyTaskConfig(train=str(lists), val=str(lists), label_separator="|"))
    assert batch.targets.tolist() == [[1, 1], [0, 0]]


def test_numbers_are_scored_in_their_own_units(tmp_path: Path) -> None:
    numbers = [100.0, 300.0, 250.0, 950.0]
    table = write_csv(tmp_path / "rows.csv", ["text", "label"], [["t", n] for n in numbers])
    task, batch = build(RegressTaskConfig(train=str(table), val=str(table)))
    mean, std = np.mean(numbers), np.std(numbers)
    assert_same_numbers(batch.targets, torch.tensor((np.array(numbers) - mean) / std, dtype=torch.float32))
    said = torch.tensor([[0.0], [0.5], [-1.0], [1.0]], dtype=torch.float64)
    scores = task.summarize(task.score(Output(said), batch))
    guess = said[:, 0].numpy() * std + mean
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean((guess - numbers) ** 2)), rel=1e-6)
    assert scores["mae"] == pytest.approx(np.mean(np.abs(guess - numbers)), rel=1e-6)
    assert scores["r2"] == pytest.approx(1 - np.mean((guess - numbers) ** 2) / np.var(numbers), rel=1e-6)
    assert task.answer(said[1])["value"] == pytest.approx(guess[1])
    assert task.metric == "rmse" and task.better == "lower"


def test_spans_of_characters_become_tags_of_bytes(tmp_path: Path) -> None:
    text = "Zoë and Åke"
    record = {"text": text, "tags": [[0, 3, "name"], {"start": 8, "end": 11, "label": "name"}]}
    lines = write_lines(tmp_path / "rows.jsonl", [record, {"text": "nobody", "tags": []}])
    task, batch = build(TagTaskConfig(train=str(lines), val=str(lines)))
    assert task.labels == ("O", "name")
    tags = [task.labels[tag] for tag in batch.targets[0].tolist()]
    assert "".join("x" if tag == "name" else "." for tag in tags) == "xxxx.....xxxx"
    assert find_spans(text, tags) == [
        {"start": 0, "end": 3, "label": "name", "text": "Zoë"},
        {"start": 8, "end": 11, "label": "name", "text": "Åke"},
    ]
    perfect = torch.nn.functional.one_hot(batch.targets.clamp_min(0), 2).float()
    assert task.summarize(task.score(Output(perfect), batch))["f1"] == 1
    assert int(task.loss(Output(perfect), batch).scored) == 13 + 6
    bad: list[dict[str, Any]] = [
        {"text": "ab", "tags": [[0, 3, "x"]]},
        {"text": "ab", "tags": ["a"]},
        {"text": "ab", "tags": "a"},
    ]
    lines = write_lines(tmp_path / "rows.jsonl", [*[record] * 9, *bad])
    task = TagTaskConfig(train=str(lines)).build()
    task.dataset("train")
    assert [skip["reason"] for skip in task.skips.listed] == [
        "span 0 to 3 is outside a text of 2",
        "1 tags for 2 tokens",
        "'tags' must be a list",
    ]


# inputs


def test_gaps_of_series_are_filled_and_marked(tmp_path: Path) -> None:
    lines = write_lines(
        tmp_path / "rows.jsonl",
        [{"text": [[1, 10], [3, None]], "label": 0}, {"text": [[5, 30]], "label": 1}],
    )
    task, batch = build(ClassifyTaskConfig(train=str(lines), val=str(lines), input="series"))
    assert task.channels == 4 and task.facts["mean"] == [3, 20] and task.facts["gaps"]
    std = math.sqrt(8 / 3)
    wanted = torch.tensor([[-2 / std, -1, 1, 1], [0, 0, 1, 0]])
    assert torch.allclose(batch.inputs[0], wanted) and batch.mask.tolist() == [[True, True], [True, False]]


def test_series_must_fit_together(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "rows.csv", ["id", "u", "label"], [["a", 1, 0], ["b", 2, 1], ["a", 3, 0]])
    config = ClassifyTaskConfig(train=str(table), series_column="id", channels=("u",))
    with pytest.raises(
        ValueError, match=r"rows.csv, line 4: series 'a' was there before: sort the table by 'id'"
    ):
        config.build().dataset("train")
    lines = write_lines(
        tmp_path / "rows.jsonl",
        [{"text": [[1, 2]], "label": i % 2} for i in range(4)]
        + [{"text": [1], "label": 1}, {"text": [], "label": 0}],
    )
    task = ClassifyTaskConfig(train=str(lines), input="series").build()
    task.dataset("train")
    assert [skip["reason"] for skip in task.skips.listed] == ["expected 2 channels, got 1", "empty series"]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sounds_of_every_width(width: int) -> None:
    top = 1 << (8 * width - 1)
    wanted = [-top, -top // 2, 0, top // 2]
    stored = [value + 128 for value in wanted] if width == 1 else wanted
    rate, samples = read_sound(sound(stored, width, 11_025))
    assert rate == 11_025 and samples.tolist() == [-1, -0.5, 0, 0.5]
    _, both = read_sound(sound([stored[0], stored[2]], width, channels=2))
    assert both.tolist() == [-0.5]
    for broken in (b"RIFF", sound([], width), b""):
        with pytest.raises(ValueError, match=r"not a WAV file|no samples"):
            read_sound(broken)


def test_unknown_symbols_have_an_id(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "rows.csv", ["text", "label"], [["acgt", 0], ["GGGG", 1]])
    other = write_csv(tmp_path / "val.csv", ["text", "label"], [["nAcx", 0]])
    task = ClassifyTaskConfig(train=str(table), val=str(other), input="symbols").build()
    assert task.vocab == 5 and task.facts["symbols"] == "ACGT"
    assert task.dataset("val")[0].inputs.tolist() == [0, 1, 2, 0]
    assert task.show(task.dataset("val")[0]) == "?AC?\n-> 0 (0)"


# splits


def splits(config: Any) -> dict[str, list[str]]:
    task = config.build()
    return {
        split: [task.show(task.dataset(split)[i]).split("\n")[0] for i in range(len(task.dataset(split)))]
        for split in ("train", "val", "test")
    }


def test_splits_by_column_group_and_time(tmp_path: Path) -> None:
    rows = [
        [f"row{i}", i % 2, ("train", "Dev", "test")[min(i % 5, 2)], f"g{i % 4}", f"2024-01-{20 - i:02d}"]
        for i in range(16)
    ]
    table = str(write_csv(tmp_path / "rows.csv", ["text", "label", "part", "author", "day"], rows))
    found = splits(ClassifyTaskConfig(train=table, split_column="part"))
    assert found["val"] == ["row1", "row6", "row11"] and found["train"] == ["row0", "row5", "row10", "row15"]
    assert len(found["test"]) == 9
    found = splits(ClassifyTaskConfig(train=table, time_column="day", holdout=0.25))
    assert found["val"] == found["test"] == ["row0", "row1", "row2", "row3"]
    found = splits(ClassifyTaskConfig(train=table, group_column="author", holdout=0.25))
    groups = {split: {int(name[3:]) % 4 for name in names} for split, names in found.items()}
    assert groups["train"] | groups["val"] == {0, 1, 2, 3} and not groups["train"] & groups["val"]
    assert len(found["val"]) == 4
    assert read_time("17.5") == 17.5
    with pytest.raises(ValueError, match="only one of split_column and time_column"):
        ClassifyTaskConfig(train=table, split_column="part", time_column="day")
    with pytest.raises(ValueError, match="leave out val"):
        ClassifyTaskConfig(train=table, val=table, split_column="part")
    with pytest.raises(ValueError, match="has one group only"):
        splits(ClassifyTaskConfig(train=str(_one_group(tmp_path)), group_column="author"))


def _one_group(folder: Path) -> Path:
    return write_csv(folder / "one.csv", ["text", "label", "author"], [["a", 0, "x"], ["b", 1, "x"]])


# tables in other forms


def records(path: Path, **settings: Any) -> tuple[list[dict[str, Any]], Skips]:
    skips = Skips(most=1.0)
    return [record.values for record in read_records(path, ("text", "label"), skips, **settings)], skips


@pytest.mark.parametrize(("delimiter", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_other_delimiters_are_found_and_said(tmp_path: Path, delimiter: str, name: str) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"text{delimiter}label", f'"a, b, c"{delimiter}1', f"d, e{delimiter}2"]
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match=f"rows.csv: fields are separated by {name}( .*)?, not commas"):
        found, _ = records(path)
    assert found == [{"text": "a, b, c", "label": "1"}, {"text": "d, e", "label": "2"}]
    assert records(path, delimiter=delimiter)[0] == found


def test_other_encodings_are_found_and_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("text,label\ncafé,1\nnaïve \u2013 no,2\nplain,1\n".encode("cp1252"))
    with pytest.warns(
        UserWarning, match=r"rows.csv: 2 of the first 5 lines are not UTF-8; read as Windows-1252"
    ):
        found, skips = records(path)
    assert [row["text"] for row in found] == ["café", "naïve \u2013 no", "plain"] and skips.count == 0
    assert records(path, encoding="cp1252")[0] == found
    path.write_bytes("text,label\ncafé\x81,1\n".encode("latin-1"))
    with pytest.warns(UserWarning, match="read as Latin-1"):
        assert records(path)[0][0]["text"] == "café\x81"
    path.write_bytes("text,label\ncafé,1\n".encode("utf-16"))
    with pytest.warns(UserWarning, match="read as UTF-16"):
        assert records(path)[0] == [{"text": "café", "label": "1"}]
    path.write_bytes("text,label\ncafé,1\n".encode("utf-16") + b"\0")
    with pytest.warns(UserWarning, match="read as UTF-16"):
        assert records(path)[0] == [{"text": "café", "label": "1"}], "half a character at the end"
    # without the mark at its beginning it cannot be told, but said
    path.write_bytes("text,label\ncafé,1\n".encode("utf-16-le"))
    assert records(path, encoding="utf-16-le")[0] == [{"text": "café", "label": "1"}]
    with pytest.raises(ValueError, match="encoding must be one that Python knows, such as utf-8 or latin-1"):
        ClassifyTaskConfig(train=str(path), encoding="klingon")
    with pytest.raises(ValueError, match="delimiter must be one character, got ', '"):
        ClassifyTaskConfig(train=str(path), delimiter=", ")


@pytest.mark.parametrize("indent", [None, 1])
def test_arrays_of_objects(tmp_path: Path, indent: int | None) -> None:
    rows: list[Any] = [
        {"text": f"row {i} ]}}", "label": i % 2, "more": [i, {"x": "[{"}]} for i in range(3000)
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*rows[:5], 17, *rows[5:]], indent=indent))
    found, skips = records(path)
    assert found == rows and [skip["record"] for skip in skips.listed] == ["line 6"]
    text = path.read_text()
    for broken, message in (
        (text[: len(text) // 2], "cannot be read|ends in the middle"),
        (text + "x", "there is more text after the JSON array"),
        ('[{"text": "a", "label": 1} {', "no comma after record 1"),
        ('[{"text": "a", "label": 1},]', "ends in the middle of its JSON array, after 1 records"),
        ('[{"text": ' + "[" * 100_000, "record 1 of the JSON array cannot be read"),
    ):
        path.write_text(broken)
        with pytest.raises(ValueError, match=rf"rows.json.*({message})"):
            records(path)


def test_a_long_array_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = json.dumps({"text": "x" * 1000, "label": 1})
    path.write_text("[" + ",".join([row] * 8000) + "]")
    tracemalloc.start()
    count = sum(1 for _ in read_records(path, ("text", "label"), Skips()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 8000 and peak < 6e6


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    table = {"text": [f"row {i}" for i in range(3000)], "label": [i % 3 for i in range(3000)]}
    parquet.write_table(arrow.table(table), path)
    task = ClassifyTaskConfig(train=str(path)).build()
    assert task.labels == ("0", "1", "2") and len(task.dataset("train")) == 2700
    assert records(path)[0][7] == {"text": "row 7", "label": 1}
    with pytest.raises(
        ValueError, match=r"rows.parquet has no column 'body'; its columns are 'text', 'label'"
    ):
        list(read_records(path, ("body",), Skips()))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"rows.parquet cannot be read as Parquet"):
        records(path)


# predicting


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    assert main(["train", *class_table(folder), *TINY, f"--out={folder / 'run'}"]) == 0
    return folder / "run"


def test_bad_rows_keep_their_place(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_csv(tmp_path / "new.csv", ["id", "text"], [[1, ""], [2, "fine"], [3, "good"]])
    capsys.readouterr()
    assert main(["predict", str(classifier), str(table), "--probabilities"]) == 0
    said = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert [row["row"] for row in rows] == ["line 2", "line 3", "line 4"]
    assert [row["error"] for row in rows] == ["empty text", "", ""]
    assert rows[0]["label"] == "" and rows[1]["label"] in ("p", "q")
    assert float(rows[1]["probability"]) == max(float(rows[1]["p(p)"]), float(rows[1]["p(q)"]))
    assert said.err == "seqboat predict: 1 of 3 rows could not be read\n"


def test_lines_of_standard_input(
    classifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("good film\n\nbad film\n"))
    assert main(["predict", str(classifier), "-", "--format=jsonl"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["row"] for answer in found] == ["line 1", "line 2", "line 3"]
    assert found[1] == {"row": "line 2", "error": "empty text"}
    predicted = Predictor(classifier).predict(["good film", "bad film"])
    assert [found[0]["label"], found[2]["label"]] == [answer["label"] for answer in predicted]


def test_answers_do_not_depend_on_the_batch(classifier: Path, tmp_path: Path) -> None:
    texts = [f"text number {i} " * (1 + i % 5) for i in range(50)]
    one = [Predictor(classifier, batch_size=1).predict([text])[0]["probabilities"] for text in texts]
    many = [answer["probabilities"] for answer in Predictor(classifier, batch_size=7).predict(texts)]
    assert_same_numbers(
        torch.tensor([list(p.values()) for p in many]),
        torch.tensor([list(p.values()) for p in one]),
    )


def test_a_long_table_is_predicted_in_bounded_memory(classifier: Path, tmp_path: Path) -> None:
    predictor = Predictor(classifier, batch_size=64)
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "good film"

    answers = predictor._answers(predictor._read(endless()), False)
    for _ in range(10):
        next(answers)
    assert taken <= 32 * 64


def test_more_rows_take_no_more_memory(classifier: Path, tmp_path: Path) -> None:
    peaks = []
    for rows in (2_500, 6_000):
        table = tmp_path / f"{rows}.csv"
        table.write_text("text\n" + "".join(f"film {i}\n" for i in range(rows)), encoding="utf-8")
        predictor = Predictor(classifier, batch_size=64)
        tracemalloc.start()
        count = sum("label" in answer for answer in predictor.stream(table))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == rows
    assert peaks[1] < 1.1 * peaks[0]


def test_what_cannot_be_predicted_says_so(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (
            ["enwik8-small", "x.csv"],
            "must be a run of a task with labels, numbers or tags to predict, got the language model",
        ),
        ([str(classifier)], "give a file, a folder or - to predict from, or --text"),
        ([str(classifier), str(tmp_path / "none.csv")], "none.csv does not exist: expected a table"),
        ([str(classifier), "--text=a", "--batch-size=0"], "batch_size must be an integer >= 1, got 0"),
        ([str(tmp_path), "--text=a"], "contains no complete checkpoint"),
    ):
        capsys.readouterr()
        assert main(["predict", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    with pytest.raises(ValueError, match="inputs must be a list of texts, got one text"):
        Predictor(classifier).predict("one")


def test_both_texts_of_a_pair_are_needed(tmp_path: Path) -> None:
    assert main(["train", *pair_table(tmp_path), *TINY, f"--out={tmp_path / 'run'}"]) == 0
    predictor = Predictor(tmp_path / "run")
    assert len(predictor.predict([{"text": "one", "other": "two"}])) == 1
    with pytest.raises(ValueError, match="each input must be a mapping with 'text' and 'other'"):
        predictor.predict(["one"])
