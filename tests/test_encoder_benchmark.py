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

    numbers = {
        "length": 16,
        "tune-texts": 96,
        "fit-texts": 64,
        "probe-texts": 12,
        "citing": 10,
        "steps": 2,
        "neurons": 4,
        "rounds": 1,
        "threads": 1,
    }
    sizes = [f"--{name}={value}" for name, value in numbers.items()]
    where = ["--source", str(tmp_path / "source"), "--model", str(tmp_path / "model")]
    page = tmp_path / "page.md"
    page.write_text(
        "Before.\n\n<!-- encoder: begin -->\n<!-- encoder: end -->\n"
        "\n<!-- encoder-wide: begin -->\n<!-- encoder-wide: end -->\n"
    )
    try:
        run("tune", *where, *sizes, "--only", "feed-forward 0.5", "early exit")
        before = (tmp_path / "out" / "feed-forward-0.5.safetensors").stat().st_mtime_ns
        found = run("all", *where, *sizes)
        run("show", "--page", str(page))
        run("show", "--page", str(page), "--part-of-page", "encoder-wide")
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "out" / "feed-forward-0.5.safetensors").stat().st_mtime_ns == before
    tried = found["feed-forward 0.5"]["cosine by learning rate"]
    assert list(tried) == ["2e-05", "0.0001"] and all(0.3 < cosine <= 1.0001 for cosine in tried.values())
    scores = found["scores"]
    assert set(scores) == {"dense", *benchmark.RUNS}
    assert scores["dense"]["cosine papers"] == pytest.approx(1.0)
    for name, row in scores.items():
        assert 0.3 < row["cosine papers"] <= 1.0001 and 0 <= row["probe"] <= 1 and 0 <= row["area"] <= 1, name
    for kind in ("full", "padded"):
        times = found["timing"][f"{kind}, processor time"]
        assert times["dense"] == 1.0 and all(times[key] > 0 for key in benchmark.RUNS)
    for rate in benchmark.RATES:
        for place in benchmark.PLACES:
            for active in scores[f"{place} {rate:g}"]["rates"].values():
                assert abs(active - rate) < 0.2, (place, rate, active)
    assert json.loads((tmp_path / "retrofit-encoder.json").read_text()) == found
    assert all("commit" in found[key] for key in benchmark.RUNS)
    written, marked, alone = page.read_text().partition("<!-- encoder-wide: begin -->")
    assert marked and "| feed-forward | 50% of tokens |" in alone and "<picture>" not in alone
    assert json.loads((tmp_path / "retrofit-encoder-wide.json").read_text()) == found
    assert written.count("\n| ") == 2 + len(benchmark.RUNS) and "images/retrofit-encoder-dark.svg" in written
    for name in ("retrofit-encoder.svg", "retrofit-encoder-dark.svg"):
        assert (tmp_path / "images" / name).stat().st_size > 1000
