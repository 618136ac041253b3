"""Checkpoints of fairseq: the same logits after an import, back again, and hostile files that run nothing."""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from published_cases import PublishedModel, read, real, save_checkpoint, settings, write_dictionaries
from seqboat import compat
from seqboat.cli.main import main
from seqboat.compat.checkpoint import read_checkpoint
from seqboat.compat.pickles import load_pickle
from seqboat.paper.checkpoints import export_run, import_run
from seqboat.run import Run
from seqboat.training.checkpoint import load_model_tensors

# everything is in float64 here, so that only the order of sums differs
NEAR = 1e-12
CODES = list(range(97, 97 + 26)) + list(range(48, 58)) + list(range(65, 65 + 26)) + list(range(160, 250))
"""Bytes for the symbols of small dictionaries."""


def to_bytes(ids: Tensor, unknown: int = 1, end: int = 0) -> Tensor:
    """Our token ids of published ones, with the dictionary of `symbols`."""
    table = torch.tensor([unknown, unknown, end, unknown, *CODES])
    return table[ids]


def symbols(count: int) -> list[str]:
    return [str(code) for code in CODES[:count]]


@pytest.fixture
def language_model(tmp_path: Path) -> tuple[PublishedModel, Path, Path]:
    """A stored model, its checkpoint and its dictionary."""
    case = read("language_model")
    file = save_checkpoint(tmp_path / "checkpoint_best.pt", case, "slag_lm_enwik8_base_v2")
    return case, file, write_dictionaries(tmp_path / "enwik8_data_bin", symbols(case.config["vocab"] - 4))


def exact(run: Run) -> nn.Module:
    """The model of a run in the precision of its stored weights."""
    model = run.config.build_model(classes=run.checkpoint.state["classes"]).double()
    load_model_tensors(model, run.weights)
    assert run.model.state_dict().keys() == model.state_dict().keys()
    return model.eval()


def largest(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max().detach())


def test_language_model(
    language_model: tuple[PublishedModel, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, file, data = language_model
    assert main(["paper", "import", str(file), str(tmp_path / "run"), "--unpickle", "--data", str(data)]) == 0
    assert "LanguageModel for enwik8, " in capsys.readouterr().out
    run = Run(tmp_path / "run")
    assert run.step == 90_000 and run.config.recipe == "enwik8"
    ids = torch.randint(2, 23, (2, 40), generator=torch.Generator().manual_seed(3))
    ids[0, :3] = torch.tensor([2, 3, 4])
    theirs = compat.model_from_published(case.params, {**case.config, "train": False})(ids).logits
    ours = exact(run)(to_bytes(ids, end=10)).logits
    places = to_bytes(torch.arange(2, 23), end=10)
    assert largest(ours[..., places], theirs[..., 2:]) <= NEAR
    # in the run's own precision, and as commands load it
    assert largest(run.language_model(to_bytes(ids, end=10)).logits, ours) <= 1e-6 * float(
        ours.detach().abs().max()
    )
    # bytes that the dictionary does not have are <unk>
    rows = run.weights["backbone.embedding.weight"]
    assert rows[255].equal(rows[1])


def test_imported_language_model_is_of_use(
    language_model: tuple[PublishedModel, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from seqboat.data.store import Prepared, Staging

    _, file, data = language_model
    import_run(file, tmp_path / "run", data)
    with Staging(tmp_path / "data", "enwik8") as staging:
        staging.put("bytes", np.frombuffer(b"a small text\n" * 300, np.uint8))
        staging.finish("test", Prepared({"train": 1}))
    run = str(tmp_path / "run")
    fields = [f"--data.data_dir={tmp_path / 'data'}", "--data.segment=64", "--data.context=0"]
    assert main(["eval", run, "--split", "val", *fields]) == 0
    assert "bits" in capsys.readouterr().out
    assert main(["generate", run, "--prompt", "abc", "--max-new-bytes", "8"]) == 0
    (tmp_path / "some.txt").write_text("cab")
    assert main(["eval", run, str(tmp_path / "some.txt")]) == 0


@pytest.mark.parametrize(
    ("name", "arch"), [("text", "slag_lra_imdb"), ("retrieval", "slag_lra_aan")], ids=["text", "retrieval"]
)
@pytest.mark.parametrize("marker", [False, True], ids=["plain", "cls"])
def test_classifier_and_matcher_of_tokens(name: str, arch: str, marker: bool, tmp_path: Path) -> None:
    """Token ids and classes are translated by the dictionaries; </s> is the end token, byte 0."""
    case = read(name)
    case.params["encoder.encoder.embed_tokens.embed.weight"][59] = 0.5
    stored = case.run(compat.model_from_published(case.params, case.config))
    file = save_checkpoint(tmp_path / "checkpoint_best.pt", case, arch)
    # with the last id as <CLS>, which the published code adds to its dictionary
    data = write_dictionaries(tmp_path / "data", symbols(55 if marker else 56), ["1", "0"])
    done = import_run(file, tmp_path / "run", data)
    assert done.notes == ()
    run = Run(tmp_path / "run")
    assert run.config.task.end_token and run.config.model.vocab is None  # type: ignore[attr-defined]
    arrays = case.arrays
    swap = {59: 58} if marker else {}
    inputs = [
        ids.clone().apply_(lambda i: swap.get(i, i))
        for ids in (arrays["input"], arrays.get("input1", arrays["input"]))
    ]
    if marker:
        moved = PublishedModel(
            case.config, case.params, {}, {**arrays, "input": inputs[0], "input1": inputs[1]}
        )
        stored = moved.run(compat.model_from_published(case.params, case.config))
    ours = [to_bytes(ids) for ids in inputs]
    masks = [
        real(arrays["input"], arrays["lengths"]),
        real(ours[1], arrays.get("lengths1", arrays["lengths"])),
    ]
    model = exact(run)
    logits = model(*ours, *masks).logits if name == "retrieval" else model(ours[0], masks[0]).logits
    # the dictionary of labels has class 1 first
    assert largest(logits.flip(-1), stored) <= NEAR


@pytest.mark.parametrize(
    ("name", "arch", "task"),
    [
        ("image", "slag_lra_cifar10", "image"),
        ("speech", "slag_sc_raw_base", "speech"),
        ("pathfinder", "slag_lra_pf128_base", "pathx"),
    ],
    ids=["image", "speech", "path-x"],
)
def test_classifier_of_values(name: str, arch: str, task: str, tmp_path: Path) -> None:
    case = read(name)
    extra: dict[str, Any] = {"pixel_normalization": [0.25, 0.75]} if name == "image" else {}
    file = save_checkpoint(tmp_path / "checkpoint_best.pt", case, arch, **extra)
    import_run(file, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.task.name == task
    if name == "image":
        assert (run.config.task.mean, run.config.task.std) == (0.25, 0.75)  # type: ignore[attr-defined]
    model = exact(run).train(case.config["train"])
    assert largest(case.run(model), case.arrays["logits"]) <= NEAR


@pytest.mark.parametrize("kind", ["language model", "matcher", "speech"])
def test_export_and_back(kind: str, tmp_path: Path) -> None:
    """What was imported is exported bit for bit, but for ids that no data contain."""
    name, arch = {
        "language model": ("language_model", "slag_lm_enwik8_base_v2"),
        "matcher": ("retrieval", "slag_lra_aan"),
        "speech": ("speech", "slag_sc_raw_base"),
    }[kind]
    case = read(name)
    case = case._replace(
        params={k: v.float() if v.is_floating_point() else v for k, v in case.params.items()}
    )
    file = save_checkpoint(tmp_path / "a.pt", case, arch)
    data = None
    if case.config["vocab"]:
        labels = None if kind == "language model" else ["1", "0"]
        data = write_dictionaries(tmp_path / "data", symbols(case.config["vocab"] - 4), labels)
    import_run(file, tmp_path / "run", data)
    done = export_run(tmp_path / "run", tmp_path / "b.pt", data)
    assert done.dictionaries == ()
    before, after = read_checkpoint(file), read_checkpoint(tmp_path / "b.pt")
    assert after.params.keys() == before.params.keys() and after.steps == 90_000
    for key, value in before.params.items():
        got = after.params[key]
        if key.endswith(("num_batches_tracked", "inv_freq", "rel_pos_bias")):
            continue  # buffers, and tables with entries that nobody reaches
        if ("embed_tokens" in key or "output_projection" in key) and data is not None:
            got, value = got[2 : len(value)], value[2:]
        assert torch.equal(got, value), key
    again = {k: v for k, v in after.config.items() if k != "vocab"}
    assert again == {k: v for k, v in before.config.items() if k != "vocab"}
    # PyTorch itself reads the file, as fairseq would
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(tmp_path / "b.pt", weights_only=True)
    assert content["args"].arch == arch and content["optimizer_history"][-1]["num_updates"] == 90_000


def test_export_with_new_dictionaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = read("text")
    file = save_checkpoint(tmp_path / "a.pt", case, "slag_lra_imdb")
    import_run(file, tmp_path / "run", write_dictionaries(tmp_path / "data", symbols(56), ["0", "1"]))
    out = tmp_path / "b.pt"
    assert main(["export", "--to=published", str(tmp_path / "run"), str(out)]) == 0
    assert "b.pt.dict.txt: its dictionary" in capsys.readouterr().out
    home = tmp_path / "again"
    (home / "src-bin").mkdir(parents=True)
    (home / "label-bin").mkdir()
    (tmp_path / "b.pt.dict.txt").rename(home / "src-bin" / "dict.txt")
    (tmp_path / "b.pt.labels.txt").rename(home / "label-bin" / "dict.txt")
    import_run(out, tmp_path / "run2", home)
    first, second = (Run(tmp_path / name).model.state_dict() for name in ("run", "run2"))
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert main(["export", "--to=published", str(tmp_path / "run"), str(out)]) == 2


def test_half_precision_and_sections(tmp_path: Path) -> None:
    """Weights in half precision are widened; later versions of fairseq keep their settings in sections."""
    case = read("speech")
    given = settings(case, "slag_sc_raw_base")
    params = {
        name.replace("classifier.0.", "classifier.0.0."): v.half() if v.is_floating_point() else v
        for name, v in case.params.items()
    }
    cfg = {"model": argparse.Namespace(**given), "task": {"_name": "speech_commands"}, "common": {"seed": 1}}
    torch.save({"cfg": cfg, "model": params}, tmp_path / "a.pt")
    found = read_checkpoint(tmp_path / "a.pt")
    assert found.recipe == "speech" and found.steps == 0
    assert {v.dtype for v in found.params.values()} == {torch.float32, torch.int64}
    import_run(tmp_path / "a.pt", tmp_path / "run")
    # half precision has 11 bits
    logits = Run(tmp_path / "run").model.train()(case.arrays["input"].float()).logits
    assert largest(logits, case.arrays["logits"]) <= 2e-2


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"encoder_ffn_embed_dim": 64}, "encoder_ffn_embed_dim must be -1"),
    ({"layer_type": "mega"}, r"layer_type must be 'slag' \(SeqBoat\), got 'mega'"),
    ({"z_dim": 10**12}, r"a\.pt: the configuration asks for a model far larger than its weights"),
    ({"encoder_layers": 4}, r"missing \['encoder.encoder.layers.3"),
    ({"arch": "slag_lra_new"}, "architecture 'slag_lra_new' does not identify the task: choose a recipe"),
    (
        {"arch": "slag_lra_pf32"},
        "a classifier of 10 classes, which is not what the recipe lra.pathfinder needs",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=lambda value: str(value)[:30])
def test_settings_that_do_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    changes = {"arch": "slag_lra_cifar10", **change}
    file = save_checkpoint(tmp_path / "a.pt", read("image"), **changes)
    with pytest.raises(ValueError, match=message):
        import_run(file, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_an_import_needs(
    language_model: tuple[PublishedModel, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, file, data = language_model
    out = str(tmp_path / "run")
    assert main(["paper", "import", str(file), out]) == 2
    assert "is a pickle: pass --unpickle to read it" in capsys.readouterr().err
    assert main(["paper", "import", str(file), out, "--unpickle"]) == 2
    assert "reads token ids: give the folder of its data" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"has no dictionary: expected src-bin/dict\.txt or dict\.txt"):
        import_run(file, out, tmp_path)
    few = write_dictionaries(tmp_path / "few", symbols(5))
    with pytest.raises(ValueError, match="has 9 symbols, but the model has 23 token ids"):
        import_run(file, out, few)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    with pytest.raises(ValueError, match="must be empty or not exist"):
        import_run(file, out, data)


# hostile files


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def save_pickle(path: Path, content: bytes, members: dict[str, bytes] | None = None) -> Path:
    """A file in the layout of torch.save with any pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        for name, value in {"version": b"3\n", **(members or {})}.items():
            archive.writestr(f"archive/{name}", value)
    return path


@pytest.mark.parametrize("place", ["args", "model", "extra_state", "last_optimizer_state"])
def test_no_call_is_run(place: str, tmp_path: Path) -> None:
    """Wherever a call hides, it is named and not made."""
    import os

    mark = tmp_path / "mark"
    for call in (
        Call(os.system, f"touch {mark}"),
        Call(eval, f"open({str(mark)!r}, 'w')"),
        Call(Path.touch, mark),
    ):
        content = {"args": argparse.Namespace(a=1), "model": {"a": torch.zeros(1)}, place: call}
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(ValueError, match=r"a\.pt: the file asks for '(posix|nt|eval|getattr|pathlib)"):
            load_pickle(tmp_path / "a.pt")
        assert not mark.exists()


BAD = [
    b"",
    b"\x80\x02cseqboat.compat.pickles\nload_pickle\n.",
    # a class of the list cannot be changed
    b"\x80\x02cargparse\nNamespace\n(N}U\x06__eq__K\x01stb.",
    # a text of 4 GB that is not there
    b"\x80\x02X\xff\xff\xff\xff.",
]


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_bad_pickles(content: bytes, tmp_path: Path) -> None:
    before = dict(vars(argparse.Namespace))
    with pytest.raises(ValueError, match=r"a\.pt(: the file .* refused| is damaged)"):
        load_pickle(save_pickle(tmp_path / "a.pt", content))
    assert dict(vars(argparse.Namespace)) == before


def tensor_pickle(elements: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """The pickle of {"model": {"a": tensor}, "args": namespace} with any claims about the tensor."""

    storage = object()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", elements) if obj is storage else None

    stream = io.BytesIO()
    tensor = Call(torch._utils._rebuild_tensor_v2, storage, offset, shape, stride, False, OrderedDict())
    Pickler(stream, 2).dump({"model": {"a": tensor}, "args": argparse.Namespace(arch="x")})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("elements", "shape", "stride", "offset"),
    [
        (4, (5,), (1,), 0),
        (4, (10**9,), (0,), 0),
    ],
)
def test_tensors_that_are_not_there(
    elements: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, tmp_path: Path
) -> None:
    content = tensor_pickle(elements, shape, stride, offset)
    file = save_pickle(tmp_path / "a.pt", content, {"data/0": bytes(16)})
    with pytest.raises(ValueError, match=r"a\.pt( is damaged|: a tensor of shape)"):
        read_checkpoint(file)


def test_other_files(tmp_path: Path) -> None:
    case = read("speech")
    path = tmp_path / "a.pt"
    for content, message in [
        ({"args": argparse.Namespace(), "model": {}}, "has no 'model'"),
        ({"model": {"a": torch.zeros(1)}}, "has neither 'args' nor 'cfg'"),
        ([1], "holds list, not a checkpoint"),
        ({"model": {"a": 3}, "args": argparse.Namespace()}, "'a' is not a tensor but int"),
    ]:
        torch.save(content, path)
        with pytest.raises(ValueError, match=message):
            read_checkpoint(path)
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(ValueError, match=r"is not a file of torch.save"):
        read_checkpoint(path)
    save_checkpoint(path, case, "slag_sc_raw_base")
    whole = path.read_bytes()
    for cut in (200, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="is damaged or truncated"):
            read_checkpoint(path)
    place = whole.index(case.params["classifier.0.weight"].numpy().tobytes())
    path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    with pytest.raises(ValueError, match="is damaged"):
        read_checkpoint(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(ValueError, match="is compressed"):
        read_checkpoint(path)
