"""Files that somebody made on purpose: refused in one line that names them, before memory or time is spent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lm_runs import write_lm_run
from seqboat.cli.explain import read_pixels
from seqboat.core.state import tensors
from seqboat.models.heads import LanguageModel
from seqboat.run import Run
from seqboat.text import session as sessions
from seqboat.text.session import Session, load_session, read, save_session, start


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def model(run: Path) -> LanguageModel:
    return Run(run).language_model


# generation states


def reseal(path: Path, session: Session, model: LanguageModel, **changes: torch.Tensor) -> None:
    """Write a session with some tensors replaced, and a hash that fits."""
    parts = {name: part.clone() for name, part in tensors(session, "session")}
    parts |= {name: part for name, part in changes.items() if part is not None}
    save_file(parts, path, sessions._seal(sessions.fingerprint(model), parts))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("session.state.seen", lambda t: t - 100, "session.state.seen must be at least 0, got -92"),
        ("session.tail", lambda t: t - 300, "session.tail must be at least -1"),
        ("session.tail", lambda t: t + 300, "tail must hold token ids below 256"),
        ("session.logits", lambda t: t[:, :100].clone(), r"logits must have shape \(batch, 256\)"),
        ("session.logits", lambda t: t[:0].clone(), r"logits must have shape \(batch, 256\)"),
        ("session.used", lambda t: t[:, :100].clone(), "used must have shape"),
    ],
)
def test_resealed_states_are_refused(
    name: str, change: Any, message: str, model: LanguageModel, tmp_path: Path
) -> None:
    session = read(model, start(model), [b"The boat"])
    parts = dict(tensors(session, "session"))
    reseal(tmp_path / "state", session, model, **{name: change(parts[name])})
    with pytest.raises(ValueError, match=f"state does not fit this model: .*{message}"):
        load_session(tmp_path / "state", model)


def test_a_resealed_state_that_is_whole_loads(model: LanguageModel, tmp_path: Path) -> None:
    session = read(model, start(model, 2), [b"The boat", b"x"])
    reseal(tmp_path / "state", session, model)
    again = load_session(tmp_path / "state", model)
    assert torch.equal(again.logits, session.logits) and torch.equal(again.tail, session.tail)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_no_state(kind: str, model: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "state"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="state is not a file"):
        load_session(path, model)
    save_session(tmp_path / "good", start(model), model)
    assert load_session(tmp_path / "good", model).batch == 1


# folders of transformers


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    from seqboat.cli.hf import export_run

    return export_run(run, tmp_path / "exported").folder


HUGE = [
    ({"num_layers": 10**9}, "exported: the configuration asks for 1,000,000,000 layers"),
    ({"d_model": 20_000}, "exported: the configuration asks for a model far larger than its weights"),
    ({"vocab": 10**12}, "exported: the configuration asks for a model far larger than its weights"),
]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(("changes", "message"), HUGE)
def test_a_configuration_cannot_ask_for_more_than_its_weights(
    changes: dict[str, int], message: str, exported: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = exported / "config.json"
    config = json.loads(path.read_text())
    config["backbone"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(exported)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_nested_and_irregular_files_are_named(exported: Path) -> None:
    from seqboat.hf import SeqBoatForCausalLM

    config = (exported / "config.json").read_text()
    (exported / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is damaged"):
        SeqBoatForCausalLM.from_pretrained(exported)
    (exported / "config.json").write_text(config)
    (exported / "sha256.json").unlink()
    (exported / "model.safetensors").unlink()
    os.mkfifo(exported / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors is not a regular file"):
        SeqBoatForCausalLM.from_pretrained(exported)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_code_in_an_exported_folder_is_not_run(exported: Path) -> None:
    from seqboat.hf import SeqBoatForCausalLM

    path = exported / "config.json"
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names}))
    mark = exported / "EXECUTED"
    (exported / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    # not even where it is asked for
    assert SeqBoatForCausalLM.from_pretrained(exported, trust_remote_code=True).config.auto_map
    assert not mark.exists()


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_the_configuration_has_a_name_of_its_own() -> None:
    import seqboat
    from seqboat import hf

    assert hf.SeqBoatConfig is hf.SeqBoatModelConfig is not seqboat.SeqBoatConfig


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
def test_hostile_files_of_every_kind() -> None:
    """A few of the trials of `hostile.py`, in a process that holds nothing else."""
    command = [sys.executable, str(Path(__file__).with_name("hostile.py")), "--count", "172"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "172 trials" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("safe", [False, True])
def test_no_module_of_the_current_folder_is_run(safe: bool, tmp_path: Path) -> None:
    for name in ("torch", "numpy", "json", "argparse", "rich", "safetensors", "yaml"):
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w')\n")
    command = [sys.executable, *(["-P"] if safe else []), "-m", "seqboat", "paper", "list", "tasks"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "listops" in done.stdout, done.stderr
    assert not (tmp_path / "EXECUTED").exists()


def test_a_drawing_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would hand PostScript to Ghostscript, whatever the name of the file."""
    image = pytest.importorskip("PIL.Image")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%touch x) (w) file\n"
    opened = list[str]()
    monkeypatch.setattr("PIL.EpsImagePlugin.EpsImageFile.load", lambda self: opened.append("run"))
    image.init()
    with pytest.raises(ValueError, match="not an image: expected one of PNG"):
        read_pixels(eps)
    assert not opened
    with pytest.raises(ValueError, match=r"an image of 8000 x 8000 pixels is too large"):
        read_pixels(png_of(8_000))


def png_of(side: int) -> bytes:
    """The beginning of a picture that claims this size."""
    import struct
    import zlib

    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    data = b"IDAT" + zlib.compress(bytes(10))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk
        + struct.pack(">I", len(data) - 4)
        + data
        + struct.pack(">I", zlib.crc32(data))
    )
