"""ONNX files against the models they came from, and against bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lm_runs import write_lm_run
from seqboat.cli.main import main
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import AlwaysActiveConfig, SigmoidConfig, XMoEConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel, Matcher, Tagger
from seqboat.ops.attention import FAR, Neighbors, banded
from seqboat.ops.scan import block_tables, scan
from seqboat.ssm.conv import EMAConvConfig
from seqboat.ssm.diagonal import EMAConfig, S4DConfig

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

from seqboat.export.onnx import (
    FORMAT,
    ORDINARY,
    OnnxModel,
    _Ordinary,
    compare,
    next_state,
    write_form,
)

WINDOW = 5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mixer(**changes: Any) -> SeqBoatConfig:
    """A small layer; fields of the attention unit start with `gau_`."""
    gau = {name[4:]: changes.pop(name) for name in list(changes) if name.startswith("gau_")}
    gau = {"d_z": 4, "d_v": 6, "window": WINDOW, "max_positions": 9, **gau}
    return SeqBoatConfig(**{"ssm": EMAConfig(d_state=3), "init": "paper", **changes, "gau": GAUConfig(**gau)})


def vary(model: nn.Module, seed: int = 0) -> Any:
    """Weights of a size at which every part counts, and running averages that are not the initial ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "log_" not in name and "imag" not in name:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand(buffer.shape, generator=generator), alpha=0.5)
    return model.eval()


def backbone(layer: Any, **changes: Any) -> BackboneConfig:
    return BackboneConfig(**{"mixer": layer, "d_model": 8, "num_layers": 1, "vocab": 11, **changes})


def write(model: nn.Module, form: str, folder: Path, **settings: Any) -> OnnxModel:
    path = folder / f"{form}.onnx"
    write_form(model, form, path, {"format": FORMAT}, **settings)
    return OnnxModel(path)


def check(model: nn.Module, form: str, folder: Path) -> OnnxModel:
    """A file gives the numbers and decisions of its model."""
    file = write(model, form, folder)
    found = compare(file, model, 24 if form == "step" else 70)
    assert found.flipped == 0 and found.worst <= 1e-5 and found.decisions >= 48, found
    return file


# our operators in ordinary ones


@pytest.mark.parametrize("attention", ["softmax", "relu2", "laplace"])
@pytest.mark.parametrize("bias", ["none", "compressed", "original"])
@pytest.mark.parametrize("left, right", [(5, 0), (3, 4), (FAR, FAR)])
def test_attention_in_ordinary_operators(attention: Any, bias: str, left: int, right: int) -> None:
    for counts in ([0], [1, 70, 0, 59], [64], [130]):
        group = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        tokens = len(group)
        q, k, v = (torch.randn(tokens, width, dtype=torch.float64) for width in (4, 4, 6))
        position = torch.cat([torch.arange(count) * 3 for count in counts]) if bias == "original" else None
        table = None if bias == "none" else torch.randn(2 * 9 + 1, dtype=torch.float64)
        near = Neighbors(group, position, table, left, right, tokens, attention)
        found = ORDINARY["seqboat::attend"](q, k, v, *near, 0.0, 0)
        torch.testing.assert_close(found, banded(q, k, v, *near, 0.0, 0))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_scan_in_ordinary_operators(bidirectional: bool) -> None:
    shape = (1 + bidirectional, 4, 3)
    drive, read = torch.randn(2, *shape, dtype=torch.float64)
    decay = -torch.rand(shape, dtype=torch.float64)
    tables = block_tables(decay, drive, read, torch.randn(4, dtype=torch.float64), 8)
    for time in (1, 16, 43):
        x = torch.randn(2, time, 4, dtype=torch.float64)
        with _Ordinary():
            found = scan(x, tables, bidirectional)
        torch.testing.assert_close(found, scan(x, tables, bidirectional))


# files


def test_a_classifier(tmp_path: Path) -> None:
    """Any batch, any length, padding of any content; numbers and decisions of the model."""
    model = vary(Classifier(backbone(mixer()), 3))
    file = check(model, "sequence", tmp_path)
    for lengths in ([1], [64], [200, 0, 131, 7]):
        ids, count = torch.randint(0, 11, (len(lengths), max(lengths))), torch.tensor(lengths)
        mask = torch.arange(max(lengths)) < count[:, None]
        given = torch.where(mask, ids, 1 << 40)
        found = file.run({"tokens": given.numpy(), "lengths": count.numpy()})
        wanted = model(ids, mask)
        np.testing.assert_allclose(found["logits"], wanted.logits.detach(), atol=1e-5, rtol=0)
        assert np.array_equal(found["active"][:, :, 0], wanted.routings[0].active)


CASES: dict[str, dict[str, Any]] = {
    "laplace": {"gau_attention": "laplace", "gau_positions": "rotary"},
    "chunk, compressed": {"gau_span": "chunk", "gau_positions": "compressed", "gau_attention": "relu2"},
    "truncated": {"ssm": EMAConfig(d_state=3, truncation=7)},
    "convolution": {"ssm": EMAConvConfig(d_state=3)},
    "two modules": {"ffn": True, "router": XMoEConfig(d_route=3)},
    "prenorm": {"prenorm": True, "dropout": 0.1, "norm": "rms", "router": SigmoidConfig()},
    "batch norm": {"norm": "batch", "router": AlwaysActiveConfig()},
    "full": {"gau_span": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "full"])
def test_a_step(case: str, tmp_path: Path) -> None:
    check(vary(LanguageModel(backbone(mixer(causal=True, **CASES[case])))), "step", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_whole_sequences(case: str, tmp_path: Path) -> None:
    check(vary(Tagger(backbone(mixer(**CASES[case])), 3)), "sequence", tmp_path)
    if case != "full":  # a memory that grows has no size to write down
        check(vary(LanguageModel(backbone(mixer(causal=True, **CASES[case])))), "sequence", tmp_path)


@pytest.mark.slow
def test_pairs_and_real_values(tmp_path: Path) -> None:
    check(vary(Matcher(backbone(mixer(prenorm=True)), 3)), "sequence", tmp_path)
    values = {"vocab": None, "channels": 2, "absolute_positions": True, "head_bias": False}
    check(vary(Classifier(backbone(mixer(), **values), 3)), "sequence", tmp_path)


# the command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "exported"
    assert main(["export", "--to=onnx", str(run), str(folder), "--int8"]) == 0
    return folder


def test_files_say_what_they_are(exported: Path, run: Path) -> None:
    about = json.loads((exported / "model.json").read_text())
    assert set(about["files"]) == {"step.onnx", "sequence.onnx"} and about["int8"] is True
    for form in ("step", "sequence"):
        file = OnnxModel(exported / f"{form}.onnx")
        assert file.about["form"] == form and file.about["vocab"] == "256" and file.about["bytes"] == "true"
        assert file.about["weights"] == about["weights"] and int(file.about["max_length"]) > 0
        assert {"seen", "0.ssm.states", "1.ssm.states"} <= {part["name"] for part in file.state_parts}
        assert b"site-packages" not in (exported / f"{form}.onnx").read_bytes()
    assert main(["export", "--to=onnx", str(run), "--check", str(exported)]) == 0


def test_the_document_runs(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text(encoding="utf-8")
    monkeypatch.chdir(exported.parent)
    for code in re.findall("```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(code, "deploy.md", "exec"), {})


def test_steps_continue_where_sequences_end(exported: Path) -> None:
    """The whole graph leaves the state that single steps leave, for sequences of different lengths."""
    step, whole = (OnnxModel(exported / f"{form}.onnx") for form in ("step", "sequence"))
    ids, lengths = np.random.default_rng(0).integers(0, 256, (3, 66)), np.array([64, 32, 7])
    after = next_state(whole.run({"tokens": ids[:, :64], "lengths": lengths}))
    step.check_state(after, 3)
    for row, length in enumerate(lengths):
        state = step.start(1)
        for token in ids[row, :length].tolist():
            state = step.step(np.array([token]), state).state
        for name, part in state.items():
            np.testing.assert_allclose(after[name][row], part[0], atol=1e-5, err_msg=name)


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """One line, exit code 2."""
    assert main(arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and all(word in said[0] for word in words), said


def test_bad_exports_leave_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    command = ["export", "--to=onnx", str(run), str(folder)]
    fails([*command, "--opset", "16"], capsys, "--opset must be between 18 and 23", "16")
    fails(["export", "--to=onnx", str(run), str(tmp_path / "no" / "out")], capsys, "does not exist")
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    (folder / "mine.txt").write_text("x")
    fails(command, capsys, "is not empty")
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_damaged_and_foreign_files(
    exported: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_lm_run(tmp_path / "other", seed=1)
    fails(["export", "--to=onnx", str(other), "--check", str(exported)], capsys, "of another model")
    fails(["export", "--to=onnx", str(run), "--check", str(tmp_path)], capsys, "not a folder with ONNX files")
    whole = (exported / "step.onnx").read_bytes()
    for name, content in (("half", whole[: len(whole) // 2]), ("empty", b""), ("text", b"not a model")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "step.onnx").write_bytes(content)
        # without its checksum
        fails(["export", "--to=onnx", str(run), "--check", str(folder)], capsys, "is not a whole ONNX file")
        (folder / "model.json").write_bytes((exported / "model.json").read_bytes())
        fails(["export", "--to=onnx", str(run), "--check", str(folder)], capsys, "is damaged", "bytes")
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "step.onnx").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (changed / "model.json").write_bytes((exported / "model.json").read_bytes())
    fails(["export", "--to=onnx", str(run), "--check", str(changed)], capsys, "checksum")


def test_states_of_another_model_are_refused(exported: Path) -> None:
    step = OnnxModel(exported / "step.onnx")
    state = step.start(1)
    short = {name: part for name, part in state.items() if not name.startswith("1.")}
    with pytest.raises(ValueError, match="it has 1 layers, the model 2"):
        step.step(np.array([1]), short)
    with pytest.raises(ValueError, match=r"0\.ssm\.states must be float32 of shape"):
        step.step(np.array([1]), {**state, "0.ssm.states": np.zeros((1, 2), np.float32)})
    with pytest.raises(ValueError, match="must be float32 of shape"):
        step.step(np.array([1, 2]), state)
    with pytest.raises(ValueError, match="reads whole sequences"):
        OnnxModel(exported / "sequence.onnx").step(np.array([1]), state)


def test_what_has_no_form_says_so(tmp_path: Path) -> None:
    def refused(model: nn.Module, form: str, match: str, **settings: Any) -> None:
        with pytest.raises(ValueError, match=match):
            write(model, form, tmp_path, **settings)
        assert list(tmp_path.iterdir()) == []

    def lm(**changes: Any) -> nn.Module:
        return LanguageModel(backbone(mixer(causal=True, **changes))).eval()

    refused(lm(gau_span="full"), "step", "fixed size, but that of this model grows")
    refused(lm().train(), "step", "training mode")
    refused(Classifier(backbone(mixer()), 3).eval(), "step", "a classifier reads whole sequences")
    refused(lm(), "step", r"opset must be in 18\.\.23, got 17", opset=17)
    refused(lm(ssm=S4DConfig(d_state=4)), "step", "no ONNX form: it computes with complex numbers, as S4D")
    refused(nn.Linear(2, 2).eval(), "sequence", "a Linear has no ONNX form")
