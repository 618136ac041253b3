"""Processed data of the published implementations: the arrays that the original files give; bad files are named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from seqboat.cli.main import main
from seqboat.data.fairseq import IndexedSequences, byte_symbols, label_symbols, read_dictionary
from seqboat.data.prepare import prepare as prepare_data
from seqboat.data.store import ArrayStore
from seqboat.run import Run
from seqboat.tasks import enwik8
from seqboat.tasks.image import ImageTaskConfig
from seqboat.tasks.listops import ListOpsConfig, ListOpsTaskConfig, generate
from seqboat.tasks.retrieval import RetrievalTaskConfig
from seqboat.tasks.speech import SpeechTaskConfig
from seqboat.tasks.stored import shuffled_rows
from seqboat.tasks.text import TextTaskConfig
from seqboat.training.trainer import train
from small_runs import Spy, small_run, write_listops

END = 2


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call[0], self.call[1:]


CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def write_mapped(stem: Path, rows: list[list[int]], kind: str = "u2") -> None:
    """Token ids in the format with a memory-mapped index."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    width = np.dtype(kind).itemsize
    lengths = [len(row) for row in rows]
    starts = [width * sum(lengths[:i]) for i in range(len(rows))]
    stem.with_suffix(".bin").write_bytes(b"".join(np.array(row, f"<{kind}").tobytes() for row in rows))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, CODES[kind], len(rows))
    body = np.array(lengths, "<i4").tobytes() + np.array(starts, "<i8").tobytes()
    stem.with_suffix(".idx").write_bytes(head + body)


def write_cached(stem: Path, rows: list[list[int]], kind: str = "i4") -> None:
    """Token ids in the older format, where all of them are one larger."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    width = np.dtype(kind).itemsize
    lengths = [len(row) for row in rows]
    ends = [0, *np.cumsum(lengths).tolist()] if rows else [0]
    data = b"".join(np.array([i + 1 for i in row], f"<{kind}").tobytes() for row in rows)
    stem.with_suffix(".bin").write_bytes(data)
    head = b"TNTIDX\0\0" + struct.pack("<QQQQQ", 1, CODES[kind], width, len(rows), len(rows))
    body = [np.arange(len(rows) + 1), np.array(ends), np.array(lengths)]
    stem.with_suffix(".idx").write_bytes(head + b"".join(part.astype("<i8").tobytes() for part in body))


FORMATS = {"mmap": write_mapped, "cached": write_cached}


class Dictionary:
    """Symbols in order of their first use, behind the special ones."""

    def __init__(self, words: list[str]) -> None:
        self.ids = {word: place for place, word in enumerate(words, start=4)}

    def row(self, words: list[str]) -> list[int]:
        return [*(self.ids[word] for word in words), END]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{word} {100 + place}\n" for word, place in self.ids.items()]
        filler = [f"madeupword{i:04d} 0\n" for i in range(-(4 + len(lines)) % 8)]
        (folder / "dict.txt").write_text("".join(lines + filler), encoding="utf-8")


def write_set(
    folder: Path,
    form: str,
    rows: dict[str, list[list[str]]],
    labels: dict[str, list[str]],
    second: dict[str, list[list[str]]] | None = None,
) -> None:
    """A data set of token sequences with labels, as fairseq binarizes it."""
    every = [
        word for part in (rows, second or {}) for split in part.values() for row in split for word in row
    ]
    words = Dictionary(sorted(set(every), reverse=True))
    names = Dictionary(sorted({label for split in labels.values() for label in split}, reverse=True))
    for home, sequences in (("src-bin", rows), ("src1-bin", second)):
        if sequences is not None:
            words.save(folder / home)
            for split, some in sequences.items():
                FORMATS[form](folder / home / split, [words.row(row) for row in some])
    names.save(folder / "label-bin")
    for split, some_labels in labels.items():
        FORMATS[form](folder / "label-bin" / split, [names.row([label]) for label in some_labels])


def arrays(store: ArrayStore) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(store[name]) for name in store.manifest["arrays"]}


def assert_same(one: ArrayStore, two: ArrayStore) -> None:
    first, second = arrays(one), arrays(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and np.array_equal(value, second[name]), name


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("brackets", ["[", ""], ids=["bracket", "bare"])
def test_listops(form: str, brackets: str, tmp_path: Path) -> None:
    config = ListOpsConfig(max_depth=4, max_arguments=3, longer_than=5, shorter_than=40)
    made = {split: generate(6, seed, config) for seed, split in enumerate(("train", "val", "test"))}
    (tmp_path / "table").mkdir()
    for split, some in made.items():
        write_listops(tmp_path / "table" / f"basic_{split}.tsv", some)
    names = {"train": "train", "val": "valid", "test": "test"}
    rows = {
        names[split]: [["(", *(t.replace("[", brackets) for t in e.tokens), ")"] for e in some]
        for split, some in made.items()
    }
    values = {names[split]: [str(e.value) for e in some] for split, some in made.items()}
    write_set(tmp_path / "lra" / "listops", form, rows, values)
    plain = prepare_data("listops", str(tmp_path / "table"), tmp_path / "a")
    found = prepare_data("listops", str(tmp_path / "lra"), tmp_path / "b")
    assert_same(found, plain)
    assert found.manifest["skipped"] == 0
    task = ListOpsTaskConfig(data_dir=str(tmp_path / "b"), end_token=True).build()
    example = task.dataset("train")[0]
    assert example.inputs.tolist()[-1] == 0 and 0 not in example.inputs[:-1]
    assert task.lengths("train").max() == max(len(e.tokens) for e in made["train"]) + 1
    assert task.max_length == 2001
    assert task.read_text(b"[MAX 1 2 ]").tolist() == [12, 2, 3, 15, 0]
    kinds, classes = task.token_classes(example.inputs)
    assert kinds[classes[-1]] == "end" and "end" not in {kinds[i] for i in classes[:-1]}


REVIEWS = {"train": [("fine film", 1), ("dull", 0), ("caf\u00e9", 1)], "test": [("bad one", 0), ("good", 1)]}


def spell(text: str, style: str) -> list[str]:
    if style == "bytes":
        return [str(byte) for byte in text.encode()]
    return [{" ": "\u2581"}.get(character, character) for character in text]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("style", ["bytes", "characters"])
def test_text(form: str, style: str, tmp_path: Path) -> None:
    folder = tmp_path / "imdb-4000"
    rows = {split: [spell(text, style) for text, _ in some] for split, some in REVIEWS.items()}
    write_set(folder, form, rows, {s: [str(label) for _, label in some] for s, some in REVIEWS.items()})
    store = prepare_data("text", str(tmp_path), tmp_path / "data")
    for split, some in REVIEWS.items():
        assert bytes(store[f"{split}.tokens"]) == "".join(text for text, _ in some).encode()
        assert store[f"{split}.labels"].tolist() == [label for _, label in some]
    task = TextTaskConfig(data_dir=str(tmp_path / "data"), end_token=True, max_length=4).build()
    assert bytes(task.dataset("train")[0].inputs.astype(np.uint8)) == b"fine\0"
    assert task.read_text(b"ab").tolist() == [97, 98, 0]
    plain = TextTaskConfig(data_dir=str(tmp_path / "data"), max_length=4).build()
    assert bytes(plain.dataset("train")[0].inputs.astype(np.uint8)) == b"fine"


def test_a_recipe_trains_on_published_data(tmp_path: Path) -> None:
    rows = {split: [spell(text, "bytes") for text, _ in some] for split, some in REVIEWS.items()}
    labels = {split: [str(label) for _, label in some] for split, some in REVIEWS.items()}
    write_set(tmp_path / "imdb-4000", "mmap", rows, labels)
    prepare_data("text", str(tmp_path), tmp_path / "data")
    task = TextTaskConfig(data_dir=str(tmp_path / "data"), max_length=16, end_token=True)
    once = {"schedule": {"steps": 1, "warmup_steps": 0}, "evaluation": {"every": 1}}
    train(small_run(task, **once), tmp_path / "run", display=Spy())
    assert Run(tmp_path / "run").evaluate("test")["examples"] == 2


def test_retrieval(tmp_path: Path) -> None:
    texts = ["one paper", "another", "a third"]
    pairs = {"train": [(0, 1, 1), (1, 2, 0)], "valid": [(0, 2, 1)], "test": [(2, 2, 0)]}
    write_set(
        tmp_path / "aan",
        "mmap",
        {s: [spell(texts[first], "bytes") for first, _, _ in some] for s, some in pairs.items()},
        {s: [str(label) for _, _, label in some] for s, some in pairs.items()},
        {s: [spell(texts[second], "bytes") for _, second, _ in some] for s, some in pairs.items()},
    )
    store = prepare_data("retrieval", str(tmp_path), tmp_path / "data")
    # each text is stored once
    assert len(store["documents.offsets"]) == 4
    task = RetrievalTaskConfig(data_dir=str(tmp_path / "data"), end_token=True).build()
    for split, some in pairs.items():
        examples = task.dataset({"valid": "val"}.get(split, split))  # type: ignore[arg-type]
        for example, (first, second, label) in zip(
            (examples[i] for i in range(len(some))), some, strict=True
        ):
            assert example.target == label and example.second is not None
            assert bytes(example.inputs.astype(np.uint8)).decode() == texts[first] + "\0"
            assert bytes(example.second.astype(np.uint8)).decode() == texts[second] + "\0"


def write_pixels(folder: Path, split: str, images: NDArray[np.uint8], labels: NDArray[np.integer]) -> None:
    for name in ("input", "label"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    lines = [" ".join(str(pixel) for pixel in image.reshape(-1)) + "\n" for image in images]
    (folder / "input" / f"{split}.src").write_text("".join(lines))
    (folder / "label" / f"{split}.label").write_text("".join(f"{label}\n" for label in labels))


def test_image(tmp_path: Path) -> None:
    """The published split into training and validation is that of our task, so the arrays are those of CIFAR-10."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (20, 32, 32), np.uint8), random.integers(0, 10, 20)
    order = shuffled_rows(16, 42)
    folder = tmp_path / "cifar10"
    write_pixels(folder, "train", images[order[:12]], labels[order[:12]])
    write_pixels(folder, "valid", images[order[12:]], labels[order[12:]])
    write_pixels(folder, "test", images[16:], labels[16:])
    store = prepare_data("image", str(tmp_path), tmp_path / "data")
    assert np.array_equal(store["train.images"], images[:16]) and np.array_equal(
        store["test.images"], images[16:]
    )
    assert store["train.labels"].tolist() == labels[:16].tolist()
    task = ImageTaskConfig(data_dir=str(tmp_path / "data"), holdout=4).build()
    assert [task.dataset("val")[i].target for i in range(4)] == labels[order[12:]].tolist()
    assert [task.dataset("train")[i].target for i in range(12)] == labels[order[:12]].tolist()


def test_pathfinder(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    splits = {"train": 5, "valid": 2, "test": 3}
    images = {split: random.integers(0, 256, (count, 32, 32), np.uint8) for split, count in splits.items()}
    for split, some in images.items():
        write_pixels(tmp_path / "pathfinder", split, some, np.arange(len(some)) % 2)
    store = prepare_data("pathfinder", str(tmp_path), tmp_path / "data")
    for split, some in images.items():
        name = {"valid": "val"}.get(split, split)
        assert np.array_equal(store[f"{name}.images"], some)
        assert store[f"{name}.labels"].tolist() == [i % 2 for i in range(len(some))]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_speech(twice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips come back as 16-bit numbers whose normalized values are the published ones, and so do the splits."""
    random = np.random.default_rng(0)
    sizes = {"train": 6, "val": 2, "test": 2}
    waves = {}
    for split, count in sizes.items():
        walk = np.cumsum(random.normal(size=(count, 16_000)), axis=1)
        waves[split] = np.round(30 * walk).clip(-30_000, 30_000)
    scale = 2.0**30 if twice else 2.0**15
    floats = {s: torch.tensor(w / scale, dtype=torch.float32) for s, w in waves.items()}
    mean, std = floats["train"].mean(), floats["train"].std()
    folder = tmp_path / "speech_commands" / "processed_data" / "raw"
    folder.mkdir(parents=True)
    published = {s: (f - mean) / (std + 1e-5) for s, f in floats.items()}
    for split, clips in published.items():
        torch.save(clips[:, None], folder / f"{split}_X.pt")
        torch.save(torch.arange(len(clips)) % 10, folder / f"{split}_y.pt")
    with pytest.raises(ValueError, match="raw holds pickles of tensors: name --unpickle"):
        prepare_data("speech", str(tmp_path), tmp_path / "data")
    arguments = ["--from", str(tmp_path), "--data-dir", str(tmp_path / "data"), "--unpickle"]
    assert main(["paper", "data", "prepare", "speech", *arguments]) == 0
    store = ArrayStore.find(tmp_path / "data", "speech")
    assert store["clips"].dtype == np.int16 and store.manifest["counts"] == sizes
    task = SpeechTaskConfig(data_dir=str(tmp_path / "data")).build()
    for split, clips in published.items():
        examples = task.dataset(split)  # type: ignore[arg-type]
        for number, clip in enumerate(clips):
            example = examples[number]
            assert example.target == number % 10
            assert np.abs(example.inputs[:, 0] - clip.numpy()).max() < 2e-6 * float(clip.abs().max())
    shift = waves["train"] - store["clips"][:6]
    assert (shift == shift[0, 0]).all()
    with pytest.raises(ValueError, match="without the names of their speakers"):
        SpeechTaskConfig(data_dir=str(tmp_path / "data"), parts="speaker").build().dataset("train")
    torch.save(published["val"][:, None] * torch.pi + torch.randn(2, 1, 16_000), folder / "val_X.pt")
    with pytest.raises(ValueError, match=r"val_X\.pt, clip 0: .*not 16-bit samples"):
        prepare_data("speech", str(tmp_path), tmp_path / "data", force=True, unpickle=True)
    torch.save(Call(Path.touch, tmp_path / "mark"), folder / "train_y.pt")
    with pytest.raises(ValueError, match=r"train_y\.pt: the file asks for .*refused"):
        prepare_data("speech", str(tmp_path), tmp_path / "data", force=True, unpickle=True)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_enwik8(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of numbers, with a line break where the text has one: the whole text comes back."""
    import hashlib

    text = b"a first line\n\nand a second one, caf\xc3\xa9\nthird" * 8
    size = len(text)
    monkeypatch.setattr(enwik8, "SIZE", size)
    monkeypatch.setattr(enwik8, "SHA256", hashlib.sha256(text).hexdigest())
    folder = tmp_path / "enwik8_data_bin"
    words = Dictionary([str(byte) for byte in sorted(set(text)) if byte != 10])
    words.save(folder)
    ends = [0, round(0.9 * size), round(0.95 * size), size]
    for split, start, end in zip(("train", "valid", "test"), ends[:-1], ends[1:], strict=True):
        part = text[start:end]
        lines = part.removesuffix(b"\n").split(b"\n")
        FORMATS[form](folder / split, [words.row([str(byte) for byte in line]) for line in lines])
    store = prepare_data("enwik8", str(tmp_path), tmp_path / "data")
    assert bytes(store["bytes"]) == text
    monkeypatch.setattr(enwik8, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match="enwik8_data_bin is not enwik8: sha256 is"):
        prepare_data("enwik8", str(tmp_path), tmp_path / "data", force=True)


# files that are not what they seem


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["u1", "i2", "i4", "i8"])
def test_types_of_ids(form: str, kind: str, tmp_path: Path) -> None:
    rows = [[5, 6, 2], [], [9]]
    FORMATS[form](tmp_path / "x", rows, kind)
    assert [row.tolist() for row in IndexedSequences(tmp_path / "x")] == rows
    FORMATS[form](tmp_path / "none", [], kind)
    assert len(IndexedSequences(tmp_path / "none")) == 0


def patched(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        (0, b"MMIDXXX", "not an index of fairseq"),
        (9, b"\x02", "has version 2, expected 1"),
        (17, b"\x06", "token ids of type 6"),
        (18, b"\xff" * 8, "but its header says"),
        (26, struct.pack("<i", -1), "a sequence of negative length"),
        (26, struct.pack("<i", 2**31 - 1), "a sequence is longer than its file"),
        (26, struct.pack("<i", 2), "overlap or leave gaps|bytes, but"),
        (34, struct.pack("<q", 2), "overlap or leave gaps"),
    ],
)
def test_bad_mapped_index(place: int, content: bytes, message: str, tmp_path: Path) -> None:
    write_mapped(tmp_path / "x", [[5, 6, 2], [9, 2]])
    patched(tmp_path / "x.idx", place, content)
    with pytest.raises(ValueError, match=rf"x\.(idx|bin).*({message})"):
        IndexedSequences(tmp_path / "x")


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        (8, b"\x02", "has version 2, expected 1"),
        (16, b"\x07", "token ids of type 7"),
        (24, b"\x08", "but the element size is 8"),
        (32, b"\xff" * 8, "they are not flat"),
        (32, b"\xff" * 16, "but its header says"),
        (48, b"\x01", "not every sequence has one size"),
        (72, b"\x01", "overlap or leave gaps"),
        (96, struct.pack("<q", -3), "a sequence of negative length"),
        (96, struct.pack("<q", 2**62), "a sequence is longer than its file"),
    ],
)
def test_bad_cached_index(place: int, content: bytes, message: str, tmp_path: Path) -> None:
    write_cached(tmp_path / "x", [[5, 6, 2], [9, 2]])
    patched(tmp_path / "x.idx", place, content)
    with pytest.raises(ValueError, match=rf"x\.idx.*({message})"):
        IndexedSequences(tmp_path / "x")


@pytest.mark.parametrize("form", FORMATS)
def test_cut_files(form: str, tmp_path: Path) -> None:
    FORMATS[form](tmp_path / "x", [[5, 6, 2], [9, 2]])
    for name in ("x.idx", "x.bin"):
        whole = (tmp_path / name).read_bytes()
        for cut in (0, 4, len(whole) // 2 - 1, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:cut])
            with pytest.raises(ValueError, match=r"x\.(idx|bin)"):
                IndexedSequences(tmp_path / "x")
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(ValueError, match=r"there is no file .*x\.bin"):
        IndexedSequences(tmp_path / "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 1\nb\n", "line 2: expected a symbol and a count, got 'b'"),
        (b"a 1\n\n", "line 2: expected a symbol and a count, got ''"),
        (b"a 1\na 2\n", "line 2: 'a' occurs twice"),
        (b"<pad> 2\n", "line 1: '<pad>' occurs twice"),
        (b"a x\n", "line 1: expected a symbol and a count"),
        (b"\xff 1\n", "not UTF-8 at byte 0"),
    ],
)
def test_bad_dictionaries(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"dict\.txt.*{message}"):
        read_dictionary(tmp_path / "dict.txt")


def test_meaning_of_symbols(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("65 3\n\u2028 2\na b 1\n<s> 1 #fairseq:overwrite\nmadeupword0000 0\n", encoding="utf-8")
    assert read_dictionary(path)[4:] == ("65", "\u2028", "a b", "<s>", "madeupword0000")
    special = ("<s>", "<pad>", "</s>", "<unk>")
    assert byte_symbols((*special, "65", "7", "<CLS>"), "x") == {4: b"A", 5: b"\x07"}
    assert byte_symbols((*special, "7", "<space>"), "x") == {4: b"7", 5: b" "}
    assert byte_symbols((*special, "7", "8"), "x") == {4: b"7", 5: b"8"}
    with pytest.raises(ValueError, match="x: symbol 256 is not a byte"):
        byte_symbols((*special, "256"), "x")
    with pytest.raises(ValueError, match="x: symbol 'the' is neither a byte"):
        byte_symbols((*special, "the"), "x")
    with pytest.raises(ValueError, match="x has no symbols"):
        byte_symbols(special, "x")
    assert label_symbols((*special, "1", "0", "madeupword0000"), 2, "x") == {4: 1, 5: 0}
    with pytest.raises(ValueError, match="x: label 'good' is not a number from 0 to 1"):
        label_symbols((*special, "good"), 2, "x")


def test_bad_records_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"review {i}" for i in range(30)]
    rows = {split: [spell(text, "bytes") for text in texts] for split in ("train", "test")}
    write_set(tmp_path / "imdb-4000", "mmap", rows, {split: ["0", "1"] * 15 for split in rows})
    stem = tmp_path / "imdb-4000" / "src-bin" / "train"
    ids = [row.tolist() for row in IndexedSequences(stem)]
    ids[3][2] = 3  # <unk>
    ids[5] = [END]
    ids[7][0] = 60_000
    write_mapped(stem, ids)
    assert (
        main(["paper", "data", "prepare", "text", "--from", str(tmp_path), "--data-dir", str(tmp_path / "d")])
        == 0
    )
    said = capsys.readouterr()
    assert "train 27, test 30" in said.out and "train.bin, sequence 6: empty sequence" in said.err
    assert "train.bin, sequence 4: token id [3] has no meaning" in said.err
    with pytest.raises(ValueError, match="sequence 4: token id"):
        prepare_data("text", str(tmp_path), tmp_path / "d", strict=True, force=True)
    write_mapped(stem, ids[:-1])
    with pytest.raises(ValueError, match=r"has 29 sequences, .*label-bin/train 30"):
        prepare_data("text", str(tmp_path), tmp_path / "d", force=True)
    (tmp_path / "imdb-4000" / "label-bin" / "dict.txt").unlink()
    with pytest.raises(ValueError, match=r"there is no file .*label-bin/dict\.txt"):
        prepare_data("text", str(tmp_path), tmp_path / "d", force=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda lines: [*lines[:2], "1 2 3\n", *lines[3:]],
            "train.src, line 3: expected 1,024 pixels, got 3",
        ),
        (
            lambda lines: [*lines[:2], lines[2].replace(" ", " -", 1), *lines[3:]],
            "line 3: pixels must be numbers",
        ),
        (
            lambda lines: [*lines[:2], "999 " * 1024 + "\n", *lines[3:]],
            "line 3: pixels must be at most 255, got 999",
        ),
        (
            lambda lines: [*lines[:2], "1 " * 9000 + "\n", *lines[3:]],
            r"train\.src, line 3: more than 1,024 pixels",
        ),
        (lambda lines: lines[:-1], "must have the same number of lines: one ends at 12"),
    ],
    ids=["few", "words", "large", "long", "lines"],
)
def test_bad_pixels(change: Any, message: str, tmp_path: Path) -> None:
    images = np.zeros((12, 32, 32), np.uint8)
    for split in ("train", "valid", "test"):
        write_pixels(tmp_path / "cifar10", split, images, np.zeros(12, int))
    path = tmp_path / "cifar10" / "input" / "train.src"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=message):
        prepare_data("image", str(tmp_path), tmp_path / "data", strict=True)
