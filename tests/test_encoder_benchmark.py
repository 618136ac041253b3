"""benchmarks/retrofit_encoder.py from texts to the figure, on a tiny encoder with random weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
tokenizers = pytest.importorskip("tokenizers", reason="needs the hf extra")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WORDS = [f"w{i}" for i in range(60)]


def write_source(folder: Path) -> None:
    """Random texts in the format of the real ones."""
    draw = np.random.default_rng(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS, draw.integers(5, 30)))

    reviews = folder / "imdb"
    reviews.mkdir(parents=True)
    for part in ("train", "test"):
        rows = [json.dumps({"text": text(), "label": i % 2}) for i in range(40)]
        (reviews / f"imdb_{part}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "enwik8").mkdir()
    (folder / "enwik8" / "enwik8").write_text(" ".join(text() for _ in range(60)))
    papers = folder / "peerread_citation_pairs"
    papers.mkdir()
    (papers / "docs.jsonl").write_text("".join(json.dumps({"text": text()}) + "\n" for _ in range(20)))
    pairs = [f"{label}\t{i}\t{(3 * i + 7 + label) % 20}\n" for i in range(10) for label in (0, 1)]
    (papers / "pairs_test.tsv").write_text("".join(pairs))


def write_model(folder: Path) -> None:
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(folder)


@pytest.mark.slow
def test_from_texts_to_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path / "source")
    write_model(tmp_path / "model")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import retrofit_encoder as benchmark

    threads = torch.get_num_threads()

    def run(*args: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["retrofit_encoder.py", *args, "--out", str(tmp_path / "out")])
        benchmark.main()
        return json.loads((tmp_path / "out" / "retrofit-results.json").read_text())

    numbers = {"length": 16, "tune-texts": 96, "probe-texts": 12, "citing": 10, "steps": 2, "threads": 1}
    sizes = [f"--{name}={value}" for name, value in numbers.items()]
    where = ["--source", str(tmp_path / "source"), "--model", str(tmp_path / "model")]
    try:
        found = run("all", *where, *sizes)
        before = (tmp_path / "out" / "feed-forward-0.5.safetensors").stat().st_mtime_ns
        again = run("tune", *where, *sizes)  # nothing is left to do
        run("show", "--figure", str(tmp_path / "figure.png"))
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "out" / "feed-forward-0.5.safetensors").stat().st_mtime_ns == before
    assert again["measured"] == found["measured"] and (tmp_path / "figure.png").stat().st_size > 1000
    measured = found["measured"]
    assert set(measured) == {"dense"} | {
        f"{n} {x:g}" for n, levels in benchmark.LEVELS.items() for x in levels
    }
    assert measured["dense"]["cosine papers"] == pytest.approx(1.0) and measured["dense"]["ratio"] == [
        1,
        1,
        1,
    ]
    for name, row in measured.items():
        assert 0.3 < row["cosine papers"] <= 1.0001 and 0 <= row["probe"] <= 1 and 0 <= row["area"] <= 1, name
    for rate in benchmark.RATES:
        for place in benchmark.PLACES:
            for active in measured[f"{place} {rate:g}"]["rates"].values():
                assert abs(active - rate) < 0.2, (place, rate, active)
    assert [len(found[f"layer dropping {n}"]["layers"]) for n in (5, 4, 3)] == [5, 4, 3]
