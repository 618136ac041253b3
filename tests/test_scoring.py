"""Bits per byte: against whole passes, in any chunks, as a code, and from the command line."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_runs import TEXT, lm_config, with_task, write_lm_run, write_run
from seqboat.cli.main import main
from seqboat.mixers import TransformerConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.run import Run
from seqboat.tasks.diagnostics import RecallTaskConfig
from seqboat.text.scoring import read_chunks, score, total
from seqboat.training.evaluate import Streaming, evaluate
from seqboat.training.parallel import World

DATA = TEXT.encode()[:300]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("scoring"))


@pytest.fixture
def model(run: Path) -> LanguageModel:
    return Run(run).language_model.double()


def array(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def test_bits_are_those_of_a_whole_pass(model: LanguageModel) -> None:
    tokens = torch.tensor([list(DATA)])
    with torch.no_grad():
        out = model(tokens)
    want = -out.logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1) / math.log(2)
    (got,) = score(model, [array(DATA)])
    assert got.tokens.tolist() == list(DATA)
    # nothing is known before the first byte
    assert got.bits[0] == 8
    torch.testing.assert_close(torch.from_numpy(got.bits[1:]), want)
    for mine, routing in zip(got.active, out.routings, strict=True):
        assert mine is not None and mine.tolist() == routing.active[0, :, 0].tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64, 300, 1000])
def test_chunks_do_not_matter(model: LanguageModel, chunk: int) -> None:
    (whole,) = score(model, [array(DATA)])
    parts = list(score(model, read_chunks(io.BytesIO(DATA), chunk)))
    assert len(parts) == -(-len(DATA) // chunk)
    np.testing.assert_allclose(np.concatenate([p.bits for p in parts]), whole.bits, rtol=1e-9)
    one, two = total(parts), total([whole])
    assert one.tokens == two.tokens == 300 and one.bits == pytest.approx(two.bits)
    assert one.activation == two.activation


def test_bits_are_lengths_of_a_code(model: LanguageModel) -> None:
    """Over all bytes that could come next, 2^-bits adds up to one: Kraft's equality."""
    costs = [total(score(model, [array(DATA[:20] + bytes([byte]))])).bits for byte in range(256)]
    before = total(score(model, [array(DATA[:20])])).bits
    assert sum(2.0 ** (before - bits) for bits in costs) == pytest.approx(1)


def test_a_text_costs_what_evaluation_says(run: Path) -> None:
    model, config = Run(run).language_model, Run(run).config
    task = config.build_task()
    text = task.text("test")
    world = World(0, 1, torch.device("cpu"))
    scored = evaluate(model, task, "test", world, batch_size=1, reading=Streaming(chunk=50))
    sums = total(score(model.train(), [text]))
    assert model.training
    # evaluation leaves the first byte out
    assert (sums.bits - 8) / (sums.tokens - 1) == pytest.approx(scored.metrics["bits"], abs=1e-6)


def test_layers_without_a_router_and_texts_without_bytes(model: LanguageModel) -> None:
    plain = LanguageModel(
        BackboneConfig(mixer=TransformerConfig(heads=2, causal=True), d_model=8, num_layers=2, vocab=256)
    )
    (got,) = score(plain, [array(DATA)])
    assert got.active == (None, None)
    assert total([got, got]).activation == (None, None)
    empty = total(score(model, [array(b"")]))
    assert empty.bits_per_token is None and tuple(empty) == (0, 0.0, ())
    with pytest.raises(ValueError, match=r"one-dimensional arrays of token ids, got float64 of shape \(2,\)"):
        list(score(model, [np.zeros(2)]))  # type: ignore[list-item]


# the command line


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_files_are_scored_one_by_one(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, none = tmp_path / "one", tmp_path / "two", tmp_path / "none"
    one.write_bytes(DATA)
    two.write_bytes(b"\xff\x00 any bytes \xfe")
    none.write_bytes(b"")
    assert main(["eval", str(run), str(one), str(two), str(none)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    first, second, third = lines(captured.out)
    model = Run(run).language_model
    want = total(score(model, [array(DATA)]))
    assert first["file"] == str(one) and first["bytes"] == 300
    assert first["bits"] == pytest.approx(want.bits) and first["bits_per_byte"] == pytest.approx(
        want.bits / 300
    )
    assert first["activation"] == list(want.activation)
    # every file is a separate text
    assert second["bits"] == pytest.approx(total(score(model, [array(two.read_bytes())])).bits)
    assert third["bytes"] == 0 and third["bits_per_byte"] is None


def test_every_byte(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DATA)))
    assert main(["eval", str(run), "-", "--per-token", "--chunk", "64"]) == 0
    *tokens, summary = lines(capsys.readouterr().out)
    assert bytes(line["byte"] for line in tokens) == DATA
    assert [line["position"] for line in tokens] == list(range(300))
    assert sum(line["bits"] for line in tokens) == pytest.approx(summary["bits"])
    rates = [sum(line["active"][layer] for line in tokens) / 300 for layer in range(2)]
    assert rates == pytest.approx(summary["activation"]) and summary["file"] == "-"


def test_progress_on_a_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text"
    path.write_bytes(DATA)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["eval", str(run), str(path), "--chunk", "200"]) == 0
    captured = capsys.readouterr()
    assert "text: 200 bytes, " in captured.err and captured.err.count("bits per byte") == 2
    assert len(lines(captured.out)) == 1


def test_what_cannot_be_scored(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run.parent / "text.txt"
    recall = RecallTaskConfig(vocab=16, length=24, pairs=2)
    other = write_run(tmp_path / "other", with_task(lm_config(text), recall))
    cases = [
        ([str(run), str(tmp_path / "nowhere")], "nowhere is not a file"),
        ([str(run), str(tmp_path)], f"{tmp_path} is not a file"),
        ([str(run), "-", "-"], "standard input (-) can be read only once"),
        ([str(run), str(text), "--chunk", "0"], "--chunk must be an integer >= 1, got 0"),
        ([str(tmp_path / "none"), str(text)], "none is not the folder of a run"),
        ([str(other), str(text)], "must be the run of a language model of bytes, got a language model of 16"),
        ([str(run), str(text), "--device", "fast"], "--device must be auto, cpu or cuda, got 'fast'"),
    ]
    for arguments, message in cases:
        assert main(["eval", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
