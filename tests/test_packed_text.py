"""Language models of text files: documents share sequences of a batch, and none sees another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lm_runs import lm_config
from mixer_cases import enliven
from seqboat import LanguageModel
from seqboat.analysis.attention import attention_weights
from seqboat.own.text import LMTextTaskConfig
from seqboat.tasks.task import apply_model
from seqboat.training.trainer import train
from small_runs import Spy

EXACT = 1e-10


@pytest.mark.parametrize("documents", ["files", "lines"])
def test_text_files_are_read_as_documents(tmp_path: Path, documents: str) -> None:
    """Packed sequences: every byte is scored as in its document alone."""
    torch.manual_seed(0)
    texts = ["first\nlines", "2", "a third text\n\nof more lines\n", "end " * 6]
    if documents == "lines":
        (tmp_path / "all.txt").write_text("\n".join(texts))
        texts = [line for text in texts for line in text.splitlines() if line]
    else:
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text)
    task = LMTextTaskConfig(
        text=(str(tmp_path),),
        segment=256,
        holdout=0.01,
        documents=documents,  # type: ignore[arg-type]
    ).build()
    task.borders = lambda split: (0, len(task.store["bytes"]))  # type: ignore[method-assign]
    data = task.dataset("val")
    model = enliven(LanguageModel(replace(lm_config(tmp_path).model, vocab=256)))
    assert len(data) == 1
    batch = task.collate([data[0]])
    found, scored = apply_model(model, "lm", batch).logits[0], batch.targets[0]
    whole = torch.from_numpy(np.array(task.store["bytes"])).long()
    assert torch.equal(scored, whole[1:])
    starts = task.document_starts("val")
    assert starts is not None
    ends = [*starts[1:], len(whole)]
    for text, start, end in zip(texts, starts, ends, strict=True):
        alone = whole[start:end]
        assert text.strip() in bytes(alone.tolist()).decode()
        expected = model(alone[None]).logits[0][: len(found) - start]
        torch.testing.assert_close(found[start:end], expected, rtol=EXACT, atol=EXACT)


def test_what_a_run_says_about_documents(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text("a short text " * 3)
    config = LMTextTaskConfig(text=(str(tmp_path),), segment=32, holdout=0.1)
    lines = config.build().summary("val").lines()
    assert (
        lines[2]
        == "documents   24 train, 4 val; packed without padding, none sees another (--data.documents)"
    )
    assert not any(
        "documents" in line for line in replace(config, documents="joined").build().summary("val").lines()
    )


def test_training_packs(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number} of some " * (1 + number % 3))
    config = lm_config(tmp_path).replace(
        training={"batch_size": 2, "carry_state": True}, schedule={"steps": 3, "warmup_steps": 1}
    )
    outcome = train(config, tmp_path / "run", display=Spy())
    assert outcome.exit_code == 0 and outcome.best is not None


def test_attention_is_shown_for_whole_sequences(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number} of some ")
    config = lm_config(tmp_path)
    task = config.build_task()
    batch = task.collate([task.dataset("train")[number] for number in (0, 1)])
    assert batch.cu_seqlens is not None
    model = config.build_model(task).eval()
    for (found,), (plain,) in zip(
        attention_weights(model, "lm", batch, 0),
        attention_weights(model, "lm", batch.joined(), 0),
        strict=True,
    ):
        assert found is not None and plain is not None and len(found.positions) > 1
        assert np.array_equal(found.weights, plain.weights) and np.array_equal(
            found.positions, plain.positions
        )
