"""Tasks: the contract, the published file formats, bad records, users' files."""

from __future__ import annotations

import io
import json
import lzma
import math
import pickle
import re
import tarfile
import wave
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from seqboat.cli.main import main
from seqboat.data.prepare import prepare
from seqboat.data.store import ArrayStore
from seqboat.tasks import (
    IGNORE,
    SPLITS,
    TASKS,
    Batch,
    ClassifyTaskConfig,
    CopyTaskConfig,
    Enwik8TaskConfig,
    Example,
    ImageTaskConfig,
    ListOpsTaskConfig,
    LMTextTaskConfig,
    NeedleTaskConfig,
    RecallTaskConfig,
    RegressTaskConfig,
    RetrievalTaskConfig,
    SpeechTaskConfig,
    TagTaskConfig,
    Task,
    TextTaskConfig,
)
from seqboat.tasks import enwik8 as enwik8_module
from seqboat.tasks.image import to_gray
from seqboat.tasks.listops import Expression, ShortListOpsTaskConfig, encode, generate
from seqboat.tasks.listops import ListOpsConfig as DrawnListOps
from seqboat.tasks.speech import SAMPLES, WORDS, random_parts, read_wav, speaker_part
from seqboat.tasks.task import draw_subset
from small_runs import write_listops

FAKE = bytes(np.random.default_rng(1).integers(32, 127, 20_000, dtype=np.uint8))


# small files in the published formats


def listops_files(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = DrawnListOps(max_depth=3, max_arguments=3, longer_than=4, shorter_than=20)
    expressions = generate(24, config=config)
    for split, part in zip(SPLITS, (expressions[:16], expressions[16:20], expressions[20:]), strict=True):
        write_listops(folder / f"basic_{split}.tsv", part)
    return folder


def imdb_files(folder: Path, count: int = 12) -> Path:
    for part in ("train", "test"):
        for name in ("pos", "neg", "unsup"):
            (folder / "aclImdb" / part / name).mkdir(parents=True)
            for i in range(count):
                text = f"{part} review {i} is {name}".ljust(20 + 3 * i, "!")
                (folder / "aclImdb" / part / name / f"{i}_7.txt").write_text(text, encoding="utf-8")
    return folder / "aclImdb"


def aan_files(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, count in (("train", 20), ("eval", 4), ("test", 4)):
        rows = [
            f"{i % 2}.0\tA{i}\tB{i}\tb'paper {i} caf\\xc3\\xa9'\tpaper {i + 1 - i % 2} of \"quotes\""
            for i in range(count)
        ]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("\n".join(rows) + "\n")
    return folder


def cifar_files(folder: Path) -> Path:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        records = random.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
    return folder


def wav(samples: np.ndarray, rate: int = 16_000, channels: int = 1, width: int = 2) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as clip:
        clip.setnchannels(channels)
        clip.setsampwidth(width)
        clip.setframerate(rate)
        clip.writeframes(samples.astype("<i2" if width == 2 else np.uint8).tobytes())
    return buffer.getvalue()


def speech_files(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for word in WORDS:
        (folder / word).mkdir(parents=True)
        for speaker in range(8):
            clip = wav(random.integers(-2000, 2000, SAMPLES))
            (folder / word / f"{speaker:08x}_nohash_0.wav").write_bytes(clip)
    (folder / "yes" / "short_nohash_0.wav").write_bytes(wav(random.integers(-9, 9, SAMPLES - 1)))
    (folder / "bird").mkdir()
    (folder / "bird" / "other_nohash_0.wav").write_bytes(wav(np.zeros(SAMPLES)))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with every data set, prepared from small files in the published formats."""
    raw, root = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        import hashlib

        patch.setattr(enwik8_module, "SIZE", len(FAKE))
        patch.setattr(enwik8_module, "SHA256", hashlib.sha256(FAKE).hexdigest())
        (raw / "enwik8").write_bytes(FAKE)
        prepare("enwik8", str(raw / "enwik8"), root)
    prepare("listops", str(listops_files(raw / "listops-1000")), root)
    prepare("text", str(imdb_files(raw)), root)
    prepare("retrieval", str(aan_files(raw / "tsv_data")), root)
    prepare("image", str(cifar_files(raw / "cifar-10-batches-bin")), root)
    prepare("speech", str(speech_files(raw / "speech_commands_v0.02")), root)
    prepare("pathfinder", "generate", root, counts=(12, 4, 4), workers=1)
    prepare("pathx", "generate", root, counts=(3, 1, 1), workers=1)
    return root


@pytest.fixture(scope="module")
def user_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    rows = "".join(f"text number {i},{'good' if i % 2 else 'bad'}\n" for i in range(30))
    (folder / "rows.csv").write_text("text,label\n" + rows)
    numbers = "".join(f"text number {i},{i / 4}\n" for i in range(30))
    (folder / "numbers.csv").write_text("text,label\n" + numbers)
    tags = [{"text": f"Ann met {i}", "tags": [[0, 3, "name"]]} for i in range(30)]
    (folder / "tags.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tags))
    (folder / "notes").mkdir()
    for i in range(3):
        (folder / "notes" / f"{i}.txt").write_text(f"Note {i}. " * 100, encoding="utf-8")
    return folder


def build(name: str, root: Path, user_files: Path) -> Task:
    special = {
        "image": lambda: ImageTaskConfig(data_dir=str(root), holdout=5),
        "listops-drawn": lambda: ShortListOpsTaskConfig(train_size=40, eval_size=20),
        "recall": lambda: RecallTaskConfig(train_size=20, eval_size=5),
        "copy": lambda: CopyTaskConfig(train_size=20, eval_size=5),
        "needle": lambda: NeedleTaskConfig(train_size=20, eval_size=5),
        "classify": lambda: ClassifyTaskConfig(train=str(user_files / "rows.csv")),
        "regress": lambda: RegressTaskConfig(train=str(user_files / "numbers.csv")),
        "tag": lambda: TagTaskConfig(train=str(user_files / "tags.jsonl")),
        "lmtext": lambda: LMTextTaskConfig(text=(str(user_files / "notes"),), segment=50),
        "enwik8": lambda: Enwik8TaskConfig(data_dir=str(root), segment=64),
    }
    config = special.get(name, lambda: TASKS[name](data_dir=str(root)))()
    return config.build()


# the contract, for every task


@pytest.mark.parametrize("name", TASKS)
def test_every_task_keeps_the_contract(name: str, root: Path, user_files: Path) -> None:
    task = build(name, root, user_files)
    assert task.name == name
    assert task.splits == SPLITS
    with pytest.raises(ValueError, match="split must be one of train, val, test; got 'dev'"):
        task.dataset("dev")  # type: ignore[arg-type]
    for split in SPLITS:
        dataset = pickle.loads(pickle.dumps(task.dataset(split)))
        lengths = task.lengths(split)
        assert len(dataset) == len(lengths) > 0
        examples = [dataset[i] for i in range(min(len(dataset), 4))]
        for example, length in zip(examples, lengths.tolist(), strict=False):
            assert (
                max(len(example.inputs), len(example.second) if example.second is not None else 0) == length
            )
            assert 0 < length <= task.max_length
            assert not task.fixed_length or length == task.max_length
            assert task.show(example)
        batch = task.collate(examples)
        check_batch(task, batch, examples)
        again = task.collate([task.dataset(split)[i] for i in range(len(examples))])
        assert all(a is b or torch.equal(a, b) for a, b in zip(batch, again, strict=True))  # type: ignore[arg-type]


def check_batch(task: Task, batch: Batch, examples: list[Example]) -> None:
    rows = len(examples)
    if task.vocab is None:
        assert batch.inputs.dtype == torch.float32 and batch.inputs.shape[2] == task.channels
        assert torch.isfinite(batch.inputs).all()
    else:
        assert batch.inputs.dtype == torch.int64 and batch.inputs.dim() == 2
        assert int(batch.inputs.min()) >= 0 and int(batch.inputs.max()) < task.vocab
    if batch.mask is not None:
        assert batch.mask.sum(1).tolist() == [len(example.inputs) for example in examples]
        assert bool(batch.mask[:, 0].all())
    assert (batch.second is not None) == (task.kind == "match")
    if task.kind in ("lm", "tag"):
        assert batch.targets.shape == batch.inputs.shape[:2]
        logits = torch.randn(*batch.targets.shape, task.classes)
    elif task.labels is None and task.name == "regress":
        assert batch.targets.shape == (rows,) and task.classes == 1
        logits = torch.randn(rows, 1)
    else:
        assert batch.targets.shape == (rows,) and int(batch.targets.max()) < task.classes
        logits = torch.randn(rows, task.classes)
    totals = task.score(SimpleNamespace(logits=logits), batch)
    metrics = task.summarize(totals)
    assert task.metric in metrics and all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ["text", "copy", "lmtext"])
def test_scores_add_up_over_uneven_batches(name: str, root: Path, user_files: Path) -> None:
    task = build(name, root, user_files)
    dataset = task.dataset("val")
    examples = [dataset[i] for i in range(min(5, len(dataset)))]
    torch.manual_seed(0)
    whole = task.collate(examples)
    logits = torch.randn(*whole.targets.shape, task.classes)
    first, rest = task.collate(examples[:2]), task.collate(examples[2:])
    pieces = [
        (first, logits[:2][:, : first.targets.shape[1]] if task.kind == "lm" else logits[:2]),
        (rest, logits[2:][:, : rest.targets.shape[1]] if task.kind == "lm" else logits[2:]),
    ]
    totals: dict[str, torch.Tensor] = {}
    losses = []
    for batch, part in pieces:
        losses.append(task.loss(SimpleNamespace(logits=part), batch))
        for key, value in task.score(SimpleNamespace(logits=part), batch).items():
            totals[key] = totals.get(key, torch.zeros(2, dtype=torch.float64)) + value
    together = task.score(SimpleNamespace(logits=logits), whole)
    assert task.summarize(totals) == pytest.approx(task.summarize(together))
    mean = sum(float(loss.total) for loss in losses) / sum(int(loss.scored) for loss in losses)
    assert mean == pytest.approx(float(task.loss(SimpleNamespace(logits=logits), whole).mean))


def test_a_batch_without_targets_costs_nothing() -> None:
    task = RecallTaskConfig(train_size=2).build()
    batch = task.collate([Example(np.zeros(4, np.int64), np.full(4, IGNORE))])
    logits = torch.randn(1, 4, task.classes, requires_grad=True)
    loss = task.loss(SimpleNamespace(logits=logits), batch)
    assert float(loss.mean.detach()) == 0 and int(loss.scored) == 0
    loss.mean.backward()
    assert logits.grad is not None and not logits.grad.any()
    assert math.isnan(task.summarize(task.score(SimpleNamespace(logits=logits), batch))["loss"])


def test_half_precision_scores_are_summed_in_float32() -> None:
    task = TextTaskConfig().build()
    batch = Batch(torch.zeros(2, 3, dtype=torch.int64), None, torch.tensor([0, 1]))
    loss = task.loss(SimpleNamespace(logits=torch.zeros(2, 2, dtype=torch.bfloat16)), batch)
    assert loss.total.dtype == torch.float32
    assert float(loss.total) == pytest.approx(2 * math.log(2))
    with pytest.raises(ValueError, match="logits must have the targets' shape"):
        task.loss(SimpleNamespace(logits=torch.zeros(3, 2)), batch)
    with pytest.raises(ValueError, match="at least one example"):
        task.collate([])


def test_padding_is_on_the_right_and_batches_move() -> None:
    task = TextTaskConfig().build()
    batch = task.collate([Example(np.array([7, 8, 9]), 1), Example(np.array([5]), 0)])
    assert batch.inputs.tolist() == [[7, 8, 9], [5, 0, 0]]
    assert batch.mask is not None and batch.mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.tokens == 6
    assert batch.to("cpu").inputs.device.type == "cpu"
    assert task.collate([Example(np.array([5]), 0)]).mask is None


def test_subsets_are_drawn_from_everywhere_and_stay_the_same(root: Path) -> None:
    task = TextTaskConfig(data_dir=str(root), train_size=8, eval_size=6).build()
    chosen = [task.dataset("train")[i] for i in range(8)]
    # the file is sorted by class
    assert {example.target for example in chosen} == {0, 1}
    assert len(task.dataset("val")) == len(task.dataset("test")) == 6
    again = TextTaskConfig(data_dir=str(root), train_size=8).build().dataset("train")
    assert all(np.array_equal(a.inputs, again[i].inputs) for i, a in enumerate(chosen))
    whole = TextTaskConfig(data_dir=str(root)).build().dataset("train")
    assert draw_subset(whole, None) is whole
    with pytest.raises(ValueError, match="train_size must be an integer >= 1, got 0"):
        TextTaskConfig(train_size=0)


def test_a_task_needs_no_data_until_it_is_asked_for_some(tmp_path: Path) -> None:
    task = RetrievalTaskConfig(data_dir=str(tmp_path)).build()
    assert (task.vocab, task.classes, task.max_length) == (256, 2, 4000)
    with pytest.raises(ValueError, match="run `seqboat paper data prepare retrieval`"):
        task.dataset("train")


def test_held_out_examples_are_not_trained_on(root: Path) -> None:
    task = TextTaskConfig(data_dir=str(root), holdout=6).build()
    train, val = task.dataset("train"), task.dataset("val")
    assert (len(train), len(val), len(task.dataset("test"))) == (18, 6, 24)
    texts = [bytes(d[i].inputs.astype(np.uint8)) for d in (train, val) for i in range(len(d))]
    assert len(set(texts)) == 24
    with pytest.raises(ValueError, match="holdout must be less than the 24 training examples, got 24"):
        TextTaskConfig(data_dir=str(root), holdout=24).build().dataset("train")


# single tasks


def test_listops_is_read_as_published(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = ListOpsTaskConfig(data_dir=str(root)).build()
    config = DrawnListOps(max_depth=3, max_arguments=3, longer_than=4, shorter_than=20)
    tokens, value = generate(17, config=config)[16]
    example = task.dataset("val")[0]
    assert example.inputs.tolist() == encode(tokens).tolist() and example.target == value
    assert task.show(example) == f"{' '.join(tokens)} -> {value}"

    folder = listops_files(tmp_path / "bad")
    with open(folder / "basic_train.tsv", "a") as file:
        file.write("( [MIN 3 ) ]\t12\n")
    store = prepare("listops", str(folder), tmp_path / "data")
    assert store.manifest["skipped"] == 1
    assert store.manifest["skipped_records"][0]["record"] == "line 18"
    with pytest.raises(ValueError, match=r"basic_train.tsv, line 18: .* a digit from 0 to 9"):
        prepare("listops", str(folder), tmp_path / "data", strict=True, force=True)
    words = ["data", "prepare", "listops", "--from", str(folder), "--data-dir", str(tmp_path / "command")]
    assert main([*words, "--strict"]) == 2
    assert "a digit from 0 to 9" in capsys.readouterr().err
    assert main(words) == 0
    assert "basic_train.tsv, line 18" in capsys.readouterr().err
    (folder / "basic_val.tsv").unlink()
    with pytest.raises(ValueError, match=r"contains no expressions for val: expected basic_val.tsv"):
        prepare("listops", str(folder), tmp_path / "data", force=True)
    # the failed attempts have not touched what was there
    assert ArrayStore.find(tmp_path / "data", "listops").manifest["counts"]["train"] == 16


def test_drawn_listops_are_the_first_of_the_seed(tmp_path: Path) -> None:
    store = prepare("listops-small", "generate", tmp_path, counts=(6, 2, 2), seed=3)
    task = ListOpsTaskConfig(data_dir=str(tmp_path), store="listops-small").build()
    from seqboat.tasks.listops import LISTOPS_SMALL

    wanted = generate(10, seed=3, config=LISTOPS_SMALL)
    got = [
        Expression(tuple(task.show(example).rpartition(" -> ")[0].split()), int(example.target))
        for split in SPLITS
        for example in (task.dataset(split)[i] for i in range(len(task.dataset(split))))
    ]
    assert got == wanted
    assert store.manifest["source"] == "generated with seed 3"


def test_reviews_are_read_from_folder_archive_and_json(root: Path, tmp_path: Path) -> None:
    imdb_files(tmp_path)
    with tarfile.open(tmp_path / "reviews.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "aclImdb", "aclImdb")
    packed = prepare("text", str(tmp_path / "reviews.tar.gz"), tmp_path / "one")
    folder = ArrayStore.find(root, "text")
    assert packed.manifest["arrays"] == folder.manifest["arrays"]
    assert packed.manifest["counts"] == {"train": 24, "test": 24}

    compact = tmp_path / "imdb"
    compact.mkdir()
    rows = [{"id": i, "label": i % 2, "text": f"review {i}"} for i in range(40)]
    for part in ("train", "test"):
        lines = "\n".join(json.dumps(row) for row in rows)
        (compact / f"imdb_{part}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    store = prepare("text", str(compact), tmp_path / "two")
    assert np.asarray(store["train.labels"]).tolist() == [i % 2 for i in range(40)]


def test_bad_reviews_are_left_out_and_named(tmp_path: Path) -> None:
    folder = imdb_files(tmp_path, count=30)
    (folder / "train" / "pos" / "3_7.txt").write_bytes(b" \n")
    (folder / "test" / "neg" / "4_7.txt").write_bytes(b"caf\xe9")
    store = prepare("text", str(folder), tmp_path / "data")
    assert store.manifest["counts"] == {"train": 59, "test": 59}
    found = {(skip["record"], skip["reason"]) for skip in store.manifest["skipped_records"]}
    assert found == {("train/pos/3_7.txt", "empty text"), ("test/neg/4_7.txt", "not UTF-8 at byte 3")}
    for i in range(12):
        (folder / "train" / "neg" / f"{i}_7.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"14 of 120 records are bad \(.*\); the first"):
        prepare("text", str(folder), tmp_path / "data", force=True)
    with pytest.raises(ValueError, match="contains no train reviews: expected aclImdb/train/pos"):
        prepare("text", str(tmp_path / "data"), tmp_path / "other")


def test_pairs_share_their_documents(root: Path) -> None:
    store = ArrayStore.find(root, "retrieval")
    task = RetrievalTaskConfig(data_dir=str(root)).build()
    example = task.dataset("train")[1]
    assert example.second is not None
    assert bytes(example.inputs.astype(np.uint8)).decode() == "paper 1 café"
    assert bytes(example.second.astype(np.uint8)).decode() == 'paper 1 of "quotes"'
    assert example.target == 1
    texts = {f"paper {i} café" for i in range(20)} | {f'paper {i + 1 - i % 2} of "quotes"' for i in range(20)}
    assert store.manifest["extra"]["documents"] == len(texts)
    with pytest.raises(ValueError, match="max_length must be at most 16384"):
        RetrievalTaskConfig(max_length=20_000)


def test_bad_pairs_are_left_out_and_named(tmp_path: Path) -> None:
    folder = aan_files(tmp_path / "tsv_data")
    with open(folder / "new_aan_pairs.train.tsv", "ab") as file:
        file.write(b"2.0\tA\tB\tone\ttwo\n1.0\tA\tB\t\ttwo\n")
    store = prepare("retrieval", str(tmp_path), tmp_path / "data")
    reasons = [skip["reason"] for skip in store.manifest["skipped_records"]]
    assert reasons == ["label must be 0 or 1, got b'2.0'", "empty text"]
    (folder / "new_aan_pairs.eval.tsv").write_text("only two\tfields\n" * 20)
    with pytest.raises(
        ValueError, match=r"contains no val pairs.*; 22 records were skipped, the first: .*line 1: "
    ):
        prepare("retrieval", str(folder), tmp_path / "data", force=True)


def test_documents_and_pairs_apart(tmp_path: Path) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    docs = "\n".join(json.dumps({"id": i, "text": f"document {i}"}) for i in range(5))
    (folder / "docs.jsonl.xz").write_bytes(lzma.compress(docs.encode()))
    rows = "1\t0\t4\n0\t2\t3\n" * 10
    for split in SPLITS:
        more = "1\t0\t9\n" if split == "val" else ""
        (folder / f"pairs_{split}.tsv.xz").write_bytes(lzma.compress((rows + more).encode()))
    store = prepare("retrieval", str(folder), tmp_path / "data")
    assert store.manifest["counts"] == {"train": 20, "val": 20, "test": 20}
    assert store.manifest["skipped_records"][0] == {
        "file": "pairs_val.tsv.xz",
        "record": "line 21",
        "reason": "expected label and the ids of two documents",
    }
    example = RetrievalTaskConfig(data_dir=str(tmp_path / "data")).build().dataset("val")[0]
    assert example.second is not None and bytes(example.second.astype(np.uint8)) == b"document 4"


def test_images_are_gray_normalized_rows_of_pixels(root: Path, tmp_path: Path) -> None:
    raw = cifar_files(tmp_path / "cifar-10-batches-bin")
    records = np.frombuffer((raw / "test_batch.bin").read_bytes(), np.uint8).reshape(-1, 3073)
    gray = to_gray(records[:, 1:].reshape(-1, 3, 32, 32))
    image = pytest.importorskip("PIL.Image")
    pillow = np.asarray(
        image.fromarray(records[0, 1:].reshape(3, 32, 32).transpose(1, 2, 0).copy()).convert("L")
    )
    np.testing.assert_array_equal(gray[0], pillow)
    task = ImageTaskConfig(data_dir=str(root), holdout=5).build()
    assert [len(task.dataset(split)) for split in SPLITS] == [15, 5, 4]
    example = task.dataset("test")[0]
    np.testing.assert_allclose(example.inputs[:, 0], (gray[0].reshape(-1) / 255 - 0.48) / 0.24, atol=1e-5)
    small = ImageTaskConfig(data_dir=str(root), holdout=5, pool=2).build().dataset("test")[0]
    assert small.inputs.shape == (256, 1)
    np.testing.assert_allclose(small.inputs[0, 0], (gray[0, :2, :2].mean() / 255 - 0.48) / 0.24, atol=1e-5)
    with pytest.raises(ValueError, match="pool must divide 32, got 3"):
        ImageTaskConfig(pool=3)


def test_the_pickled_version_of_cifar_is_refused_unopened(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (canary,)

    (folder / "data_batch_1").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"get the binary version, cifar-10-binary.tar.gz"):
        prepare("image", str(folder), tmp_path / "data")
    gray = tmp_path / "gray"
    gray.mkdir()
    np.save(gray / "train_images.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.save(gray / "train_labels.npy", np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="is not an array of numbers"):
        prepare("image", str(gray), tmp_path / "data")
    assert not canary.exists()


def test_damaged_arrays_of_images_are_named(tmp_path: Path) -> None:
    def write(**changes: object) -> None:
        for part in ("train", "test"):
            np.save(tmp_path / f"{part}_images.npy", np.zeros((20, 32, 32), np.uint8))
            np.save(tmp_path / f"{part}_labels.npy", np.arange(20) % 10)
        for name, content in changes.items():
            if isinstance(content, bytes):
                (tmp_path / f"{name}.npy").write_bytes(content)
            else:
                np.save(tmp_path / f"{name}.npy", np.asarray(content))

    labels = np.arange(20) % 10
    labels[3] = 77
    write(train_labels=labels)
    (skip,) = prepare("image", str(tmp_path), tmp_path / "data").manifest["skipped_records"]
    assert (skip["record"], skip["reason"]) == ("row 3", "label must be from 0 to 9, got 77")
    packed = lzma.compress((tmp_path / "train_images.npy").read_bytes())
    for changes, message in (
        (
            {"train_labels": labels[:9]},
            r"must hold uint8 of shape \(9, 32, 32\), got uint8 of shape \(20, 32, 32\)",
        ),
        ({"train_images": np.zeros((20, 32, 32))}, "got float64 of shape"),
        ({"train_labels": np.zeros(20)}, r"must hold integers of shape \(images,\), got float64"),
        (
            {"train_images": b"<html>404</html>"},
            "train_images.npy is not an array of numbers in NumPy's format",
        ),
        ({"train_images": packed[:100]}, "train_images.npy is damaged or truncated"),
    ):
        write(**changes)
        with pytest.raises(ValueError, match=message):
            prepare("image", str(tmp_path), tmp_path / "data", force=True)


def test_bad_images_are_refused_or_left_out(tmp_path: Path) -> None:
    folder = cifar_files(tmp_path / "cifar-10-batches-bin")
    content = bytearray((folder / "data_batch_2.bin").read_bytes())
    content[0] = 10
    (folder / "data_batch_2.bin").write_bytes(content)
    store = prepare("image", str(folder), tmp_path / "data")
    assert store.manifest["counts"] == {"train": 19, "test": 4}
    assert store.manifest["skipped_records"][0]["reason"] == "label must be at most 9, got 10"
    (folder / "data_batch_3.bin").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3.bin has \d+ bytes, expected a multiple of 3073"):
        prepare("image", str(folder), tmp_path / "data", force=True)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"has no data_batch_3.bin"):
        prepare("image", str(folder), tmp_path / "data", force=True)


def test_speech_is_split_as_published_and_by_speaker(root: Path) -> None:
    store = ArrayStore.find(root, "speech")
    assert len(store["labels"]) == 80
    assert store.manifest["extra"]["other_lengths"] == 1
    random = SpeechTaskConfig(data_dir=str(root)).build()
    assert [len(random.dataset(split)) for split in SPLITS] == [60, 10, 10]
    speaker = SpeechTaskConfig(data_dir=str(root), parts="speaker", pool=8).build()
    assert sum(len(speaker.dataset(split)) for split in SPLITS) == 80
    assert speaker.dataset("train")[0].inputs.shape == (2000, 1)
    train = np.concatenate([random.dataset("train")[i].inputs for i in range(60)])
    assert abs(train.mean()) < 0.05 and train.std() == pytest.approx(1, abs=0.05)
    parts = random_parts(np.repeat(np.arange(10), 100))
    assert [(parts == i).sum() for i in range(3)] == [700, 150, 150]


def test_folders_and_archives_of_sounds_give_the_same(root: Path, tmp_path: Path) -> None:
    folder = speech_files(tmp_path / "speech_commands_v0.02")
    with tarfile.open(tmp_path / "speech.tar.gz", "w:gz") as archive:
        for word in reversed(WORDS):
            archive.add(folder / word, f"./{word}")
    store = prepare("speech", str(tmp_path / "speech.tar.gz"), tmp_path / "data")
    assert store.manifest["arrays"] == ArrayStore.find(root, "speech").manifest["arrays"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (wav(np.zeros(SAMPLES), rate=8000), "expected 16000 samples per second, got 8000"),
        (wav(np.zeros(SAMPLES), channels=2), "expected one channel, got 2"),
        (wav(np.zeros(SAMPLES), width=1), "expected 16 bit samples, got 8"),
        (wav(np.zeros(0)), "no samples"),
        (wav(np.zeros(SAMPLES))[:9000], "truncated"),
        (b"RIFF", "not a WAV file"),
        (b"", "not a WAV file"),
    ],
)
def test_bad_sounds_are_left_out_and_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_wav(content)
    folder = speech_files(tmp_path / "speech_commands_v0.02")
    (folder / "go" / "bad_nohash_1.wav").write_bytes(content)
    store = prepare("speech", str(folder), tmp_path / "data")
    (skip,) = store.manifest["skipped_records"]
    assert skip["record"] == "go/bad_nohash_1.wav" and message in skip["reason"]


def test_every_byte_is_a_target_once(root: Path) -> None:
    task = Enwik8TaskConfig(data_dir=str(root), segment=64, context=32).build()
    assert (task.metric, task.better) == ("bits", "lower")
    for split, start, end in (("val", 18_000, 19_000), ("test", 19_000, 20_000)):
        dataset = task.dataset(split)  # type: ignore[arg-type]
        scored = b""
        for i in range(len(dataset)):
            example = dataset[i]
            assert isinstance(example.target, np.ndarray)
            assert (example.inputs[1:] == example.target[:-1])[example.target[:-1] != IGNORE].all()
            scored += bytes(example.target[example.target != IGNORE].astype(np.uint8))
        assert scored == FAKE[start + 1 : end]
        assert bytes(task.text(split)) == FAKE[start:end]  # type: ignore[arg-type]
    assert len(dataset[1].inputs) == 96
    train = task.dataset("train")
    assert {len(train[i].inputs) for i in range(len(train))} == {64}


def test_enwik8_must_be_enwik8(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr("enwik8", FAKE)
    with pytest.raises(ValueError, match="has 20,000 bytes, expected 100,000,000: it is not enwik8"):
        prepare("enwik8", str(tmp_path / "mine.zip"), tmp_path / "data")
    (tmp_path / "mine.zip").rename(tmp_path / "enwik8.zip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enwik8_module, "SIZE", len(FAKE))
        with pytest.raises(ValueError, match="is not enwik8: sha256 is"):
            prepare("enwik8", str(tmp_path), tmp_path / "data")
        import hashlib

        patch.setattr(enwik8_module, "SHA256", hashlib.sha256(FAKE).hexdigest())
        assert bytes(prepare("enwik8", str(tmp_path), tmp_path / "data")["bytes"]) == FAKE


def test_recall_asks_for_each_key_once_and_answers_right() -> None:
    config = RecallTaskConfig(length=48, pairs=6, vocab=32)
    dataset = config.build().dataset("test")
    for i in range(50):
        inputs, targets, *_ = dataset[i]
        assert isinstance(targets, np.ndarray)
        memory = dict(zip(inputs[:12:2].tolist(), inputs[1:12:2].tolist(), strict=True))
        asked = np.flatnonzero(targets != IGNORE)
        assert len(memory) == 6 and sorted(inputs[asked].tolist()) == sorted(memory)
        assert [memory[key] for key in inputs[asked].tolist()] == targets[asked].tolist()
        assert (asked >= 12).all() and set(inputs[12:][targets[12:] == IGNORE].tolist()) <= {0}
    train = config.build().dataset("train")
    assert not np.array_equal(train[0].inputs, dataset[0].inputs)
    with pytest.raises(ValueError, match="length must be at least 18"):
        RecallTaskConfig(length=17, pairs=6)
    with pytest.raises(ValueError, match="vocab must be at least 13"):
        RecallTaskConfig(pairs=6, vocab=12)


def test_noise_stands_between_pairs_and_is_never_asked_for() -> None:
    config = RecallTaskConfig(length=48, pairs=4, vocab=31, noise=0.5)
    dataset = config.build().dataset("test")
    places = set()
    for i in range(50):
        inputs, targets, *_ = dataset[i]
        assert isinstance(targets, np.ndarray)
        context = inputs[: 2 * 4 + 18]  # half of the 36 tokens that are neither pairs nor questions
        (at,) = np.nonzero(context <= 10)
        memory = dict(zip(context[at].tolist(), context[at + 1].tolist(), strict=True))
        places |= set(at.tolist())
        assert len(memory) == 4 and all(10 < value <= 20 for value in memory.values())
        assert (np.delete(context, [*at, *(at + 1)]) > 20).all() and (context > 0).all()
        asked = np.flatnonzero(targets != IGNORE)
        assert [memory[key] for key in inputs[asked].tolist()] == targets[asked].tolist()
        assert len(asked) == 4 and (inputs[26:] <= 10).all()
    assert len(places) > 20
    with pytest.raises(ValueError, match=r"noise must be in \[0, 1\], got 2"):
        RecallTaskConfig(noise=2)
    with pytest.raises(ValueError, match="vocab must be at least 13 for 4 different keys, got 12"):
        RecallTaskConfig(pairs=4, vocab=12, noise=0.1)


def test_copy_wants_the_tokens_in_order() -> None:
    dataset = CopyTaskConfig(length=30, tokens=5).build().dataset("train")
    for i in range(50):
        inputs, targets, *_ = dataset[i]
        assert isinstance(targets, np.ndarray)
        assert inputs[:25][inputs[:25] > 0].tolist() == targets[25:].tolist()
        assert set(inputs[25:].tolist()) == {1} and (targets[:25] == IGNORE).all()
    with pytest.raises(ValueError, match=r"index must be in \[0, 20000\)"):
        dataset[20_000]


@pytest.mark.parametrize("needles", [1, 4])
def test_needle_asks_for_a_number_that_was_given(needles: int) -> None:
    dataset = NeedleTaskConfig(length=80, needles=needles, key_length=1, digits=3).build().dataset("test")
    asked, depths = set(), set()
    for i in range(60):
        inputs, targets, *_ = dataset[i]
        assert isinstance(targets, np.ndarray)
        text, question = bytes(inputs.astype(np.uint8)).split(b"?")
        given = [(found[0][:1], found[0][2:5]) for found in re.finditer(rb"[a-z]=[0-9]{3};", text)]
        assert len(dict(given)) == len(given) == needles and text.count(b"=") == needles
        answer = bytes(targets[-3:].astype(np.uint8))
        assert (question[:1], answer) in given and question[1:] == b"=" + answer[:2]
        assert (targets[:-3] == IGNORE).all()
        asked.add([key for key, _ in given].index(question[:1]))
        depths.add(text.index(b"="))
    assert asked == set(range(needles)) and len(depths) > 20
    with pytest.raises(ValueError, match="length must be at least 35 for 5 needles and a question, got 34"):
        NeedleTaskConfig(length=34, needles=5)
    with pytest.raises(ValueError, match="key_length must be larger for 27 different keys, got 1"):
        NeedleTaskConfig(length=999, needles=27, key_length=1)


# your own data: test_own.py has the rest


def test_text_files_are_joined_in_order(tmp_path: Path) -> None:
    for name, content in (
        ("b.txt", b"second file"),
        ("a.txt", b"first file"),
        ("c.md", b"third"),
        ("d.png", b"x"),
    ):
        (tmp_path / name).write_bytes(content)
    task = LMTextTaskConfig(text=(str(tmp_path),), segment=1000, holdout=0.2).build()
    joined = b"first file\n\nsecond file\n\nthird"
    parts = [bytes(task.dataset(split)[0].inputs.astype(np.uint8)) for split in SPLITS]
    assert parts == [joined[:17], joined[18:23], joined[24:29]]
    pattern = LMTextTaskConfig(text=(str(tmp_path / "*.txt"), str(tmp_path / "a.txt")), holdout=0.2).build()
    assert b"first file" in bytes(pattern.dataset("train")[0].inputs.astype(np.uint8))
    (tmp_path / "blank.txt").write_bytes(b" \n")
    with_blank = LMTextTaskConfig(text=(str(tmp_path),), holdout=0.2).build()
    with_blank.dataset("train")
    assert with_blank.skips.count == 1 and with_blank.skips.listed[0]["reason"] == "empty text"
    for text, message in (((str(tmp_path / "*.rst"),), "matches no file"), ((), "at least one file")):
        with pytest.raises(ValueError, match=message):
            LMTextTaskConfig(text=text).build().dataset("train")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "a.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"3 bytes are too few .*: at least 30 are needed"):
        LMTextTaskConfig(text=(str(tmp_path / "tiny"),)).build().dataset("val")


# the real data, where it is at hand

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.mark.skipif(
    not SHARED.is_dir(),
    reason="the real recordings are not here: no folder shared/data beside the repository",
)
def test_speakers_are_in_the_parts_that_the_authors_put_them_in() -> None:
    rows = (SHARED / "speech_commands_sc10" / "index.tsv").read_text().splitlines()[1:]
    for row in rows:
        _, split, _, _, speaker, _ = row.split("\t")
        assert SPLITS[speaker_part(speaker)] == split
    assert len(rows) == 4100


SHORT_RUN = [
    "--model.num_layers=1",
    "--model.d_model=8",
    "--schedule.steps=2",
    "--schedule.warmup_steps=1",
    "--evaluation.every=2",
    "--training.batch_size=4",
]


def test_what_is_wrong_with_held_out_rows_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, other, run = tmp_path / "rows.csv", tmp_path / "val.csv", tmp_path / "run"
    table.write_text("text,label\na,1\n,2\nb,2\nc,1\nd,2\n")
    command = [
        "train",
        "classify",
        f"--data.train={table}",
        f"--data.val={other}",
        f"--out={run}",
        *SHORT_RUN,
    ]
    for content, message in (
        (
            None,
            f"{other} does not exist: expected a table (.csv, .tsv, .jsonl, .ndjson, .parquet), "
            "or a folder with a folder for each class",
        ),
        ("text,label\nx,7\n", f"{other}, line 2: label '7' is not among those of training: 1, 2"),
    ):
        if content is not None:
            other.write_text(content)
        assert main(command) == 2
        assert capsys.readouterr().err == f"seqboat train: error: {message}\n"
        assert not run.exists()
    other.write_text("text,label\nx,1\n")
    assert main(command) == 0
    told = "skipped     1 record: 1 empty text; the first: rows.csv, line 3: empty text"
    assert told in capsys.readouterr().out.splitlines()


def test_a_trained_run_is_scored_on_another_table_without_the_training_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("good", "0"), ("bad", "1"), ("so so", "2")]
    for name, count in (("train", 6), ("val", 1), ("new", 4)):
        lines = [
            f"{text} {i},{label}\n" for i in range(count) for text, label in rows[: 2 if name == "new" else 3]
        ]
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(lines))
    run = str(tmp_path / "run")
    tables = [f"--data.{name}={tmp_path / name}.csv" for name in ("train", "val")]
    assert main(["train", "classify", "--out", run, *tables, *SHORT_RUN]) == 0
    (tmp_path / "train.csv").unlink()
    capsys.readouterr()
    assert main(["eval", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 3
    assert main(["eval", run, "--data.test", str(tmp_path / "new.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 8
    # a class is a place in the labels of the run, not in those of the table
    task = ClassifyTaskConfig(train="gone.csv", test=str(tmp_path / "new.csv")).build()
    task.labels = ("1", "0", "2")
    assert task.classes == 3 and task.dataset("test")[0].target == 1

    (tmp_path / "new.csv").write_text("text,label\nfine,3\n")
    for arguments, message in (
        (
            ["--split", "train"],
            f"{tmp_path / 'train.csv'} does not exist: expected a table (.csv, .tsv, .jsonl, ",
        ),
        (["--data.test", str(tmp_path / "new.csv")], "line 2: label '3' is not among those of"),
        (
            ["--data.tset=a.csv"],
            "--data.tset is not a field of this configuration; did you mean --data.test?",
        ),
        (["--model.d_model=4"], "only the data can be changed (--data.FIELD), got --model.d_model"),
    ):
        assert main(["eval", run, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
