"""The benchmarks of decoding, in small form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lm_runs import write_lm_run
from seqboat.run import Run
from test_generate import make_model
from test_learning_benchmarks import load

ROOT = Path(__file__).parents[1]
TINY = {"num_layers": 2, "d_model": 8, "d_z": 4, "d_v": 8, "d_state": 2, "window": 4, "vocab": 256}


def test_products_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("decoding", monkeypatch)
    (times,) = script.measure_products(1, ((8, 4),)).values()
    assert {"float32, as stored", "float32, by input channel"} <= times.keys() and min(times.values()) > 0
    found = script.measure_batch(make_model(), texts=2, context=3, steps=1, rounds=1)
    assert found["ratio, wall time"] == pytest.approx(found["together, tokens/s"] / found["alone, tokens/s"])


def test_steps_take_turns_with_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load("decoding", monkeypatch)
    found = script.measure_steps(TINY, ROOT, [5, 9], steps=2, rounds=1)
    assert list(found) == [
        "general step, 5 tokens",
        *(f"lean, {kind}, {context} tokens" for context in (5, 9) for kind in ("float32", "int8")),
    ]
    baseline = found["general step, 5 tokens"]
    for values in found.values():
        assert values["wall, speed-up"] == pytest.approx(baseline["wall, ms"] / values["wall, ms"])
    (tmp_path / "src").mkdir()
    with pytest.raises(SystemExit, match="does not hold a version"):
        script.measure_steps(TINY, tmp_path, [5], steps=2, rounds=1)


def test_texts_before_and_after_rounding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load("int8_texts", monkeypatch)
    model = Run(write_lm_run(tmp_path)).language_model
    pairs = script.compare(model, [b"Ein", b"Das"], 9, half=["linear"])
    codes = dict(model.named_buffers())
    assert codes["backbone.embedding.codes"].dtype == torch.int8
    assert codes["backbone.layers.0.linear.codes"].dtype == torch.float16
    assert [pair.prompt for pair in pairs] == [b"Ein", b"Das"]
    for pair in pairs:
        assert len(pair.before) == len(pair.after) == 9
        assert pair.before[: pair.common] == pair.after[: pair.common] and pair.common <= pair.same_bytes
        assert (pair.common == 9) == (pair.before == pair.after)
    parted = script.Pair(b"x", b"abc", b"abd", 2)
    assert parted.common == 2
