"""Files of earlier versions still load and give the same numbers: runs, configurations, generation states.

`fixtures/format-1` was written by version 0.1.0: two tiny runs, a YAML configuration, the state of a generation, and
in expected.json what that version made of them.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from seqboat.cli.main import main
from seqboat.recipes import find_recipe
from seqboat.run import Run
from seqboat.text.session import load_session, read
from seqboat.training.checkpoint import MODEL, OPTIM
from seqboat.training.config import difference, from_yaml, override
from seqboat.training.evaluate import Streaming

OLD = Path(__file__).parent / "fixtures" / "format-1"
EXPECTED: dict[str, Any] = json.loads((OLD / "expected.json").read_text())
# float32 sums in another order, on another processor
CLOSE: dict[str, Any] = {"rel": 1e-5, "abs": 1e-5}


@pytest.mark.parametrize("expected", EXPECTED["eval"], ids=lambda record: str(record["run"]))
def test_a_run_scores_as_before(expected: dict[str, Any]) -> None:
    run = Run(OLD / expected["run"], expected["which"])
    found = run.evaluate(expected["split"], limit=expected["examples"])
    for name in ("recipe", "step", "split", "examples"):
        assert found[name] == expected[name]
    for name in ("loss", "accuracy", "bits"):
        assert found[name] == pytest.approx(expected[name], **CLOSE)
    assert found["activation"] == pytest.approx(expected["activation"], **CLOSE)


def test_a_language_model_scores_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(OLD)  # its configuration names notes.txt
    found = Run("lm").evaluate("val", reading=Streaming())
    for name, value in EXPECTED["stream"].items():
        assert found[name] == (value if isinstance(value, str) else pytest.approx(value, **CLOSE))


def test_a_run_resumes_as_before(tmp_path: Path) -> None:
    run = tmp_path / "recall"
    shutil.copytree(OLD / "recall", run)
    shutil.rmtree(run / "step-8")
    assert main(["train", "--resume", "--out", str(run)]) == 0
    for name in (MODEL, OPTIM):
        new, old = load_file(run / "step-8" / name), load_file(OLD / "recall" / "step-8" / name)
        assert new.keys() == old.keys()
        for key, value in old.items():
            torch.testing.assert_close(new[key], value, rtol=1e-4, atol=1e-6)
    assert [r["step"] for r in Run(run).metrics] == [r["step"] for r in Run(OLD / "recall").metrics]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_a_run_exports_as_before(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["export-hf", str(OLD / "lm"), str(tmp_path / "exported")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    ids = torch.tensor([list(b"The boat sees")])
    want = Run(OLD / "lm").language_model(ids).logits
    torch.testing.assert_close(theirs(ids).logits, want)


def test_a_configuration_means_the_same() -> None:
    old = from_yaml(OLD / "config.yaml")
    new = override(
        find_recipe("recall")(), ["--seed=7", "--model.mixer.router=sigmoid", "--optimiser.lr=0.01"]
    )
    assert difference(old, new) is None


def test_a_generation_state_continues() -> None:
    model = Run(OLD / "lm").language_model
    session = load_session(OLD / "state.safetensors", model)
    expected = EXPECTED["state"]
    assert session.logits[0, :8].tolist() == pytest.approx(expected["logits"], **CLOSE)
    assert session.tail.tolist() == expected["tail"]
    after = read(model, session, [expected["prompt"].encode()])
    assert after.logits[0, :8].tolist() == pytest.approx(expected["after"], **CLOSE)
