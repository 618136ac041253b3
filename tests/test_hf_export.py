"""From a run to transformers: the same logits, a tokenizer, a card that runs; what cannot be exported says so."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from published_cases import read, save_checkpoint, write_dictionaries
from seqboat.cli.main import main
from seqboat.hf import SeqBoatForCausalLM
from seqboat.own.task import ClassifyTaskConfig
from seqboat.own.text import LMTextTaskConfig
from seqboat.paper.checkpoints import import_run
from seqboat.run import Run
from seqboat.tasks import TASKS
from seqboat.training.trainer import train
from small_runs import Spy, ToyConfig, small_run

SHORT = {"schedule": {"steps": 4}, "evaluation": {"every": 4}}
ONCE = {"schedule": {"steps": 1, "warmup_steps": 0}, "evaluation": {"every": 1}}


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    logging.disable_progress_bar()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a language model of bytes (lm) and a classifier of texts (classify)."""
    place = tmp_path_factory.mktemp("export")
    text = place / "text.txt"
    text.write_text("The history of the small boat is long. " * 40)
    train(small_run(LMTextTaskConfig(text=(str(text),), segment=16), **SHORT), place / "lm", display=Spy())
    table = place / "table.csv"
    table.write_text("text,label\n" + "".join(f"word {i},{'good' if i % 2 else 'bad'}\n" for i in range(30)))
    task = ClassifyTaskConfig(train=str(table), tokens="bytes", max_length=16)
    train(small_run(task, **SHORT), place / "classify", display=Spy())
    return place


def run_card(card: str, folder: Path) -> str:
    """Run the example of a model card; returns what it prints."""
    found = re.search(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert found is not None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(found[1].replace("path/to/this/folder", str(folder)), {})
    return out.getvalue()


def test_a_language_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "exported"
    assert main(["export", "--to", "hf", str(folder / "lm"), str(out)]) == 0
    printed = capsys.readouterr()
    assert f"{out}: SeqBoatForCausalLM" in printed.out and "tokenizer: bytes" in printed.out
    assert printed.err == ""
    core = Run(folder / "lm").model
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert not model.training and model.dtype == torch.float32
    ids = torch.tensor([list(b"The history of the boat")])
    inputs = tokenizer("The history of the boat", return_tensors="pt")
    assert torch.equal(inputs["input_ids"], ids)
    torch.testing.assert_close(model(**inputs).logits, core(ids).logits, atol=1e-6, rtol=0)
    assert model.generation_config.pad_token_id == 0 and model.generation_config.eos_token_id is None
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "4 steps" in card and "task `lmtext`" in card and "bits on held-out data" in card
    assert run_card(card, out).startswith("The history of")
    assert not [path for path in tmp_path.iterdir() if path != out]


def test_a_classifier_knows_its_labels(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a" / "exported"
    assert main(["export", "--to", "hf", str(folder / "classify"), str(out), "--which", "latest"]) == 0
    core = Run(folder / "classify", "latest").model
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(out),
        AutoTokenizer.from_pretrained(out),
    )
    assert model.config.id2label == {0: "bad", 1: "good"} and model.config.label2id == {"bad": 0, "good": 1}
    inputs = tokenizer(["word 3", "another word"], padding=True, return_tensors="pt")
    assert tokenizer.padding_side == "right"
    expected = core(inputs["input_ids"], inputs["attention_mask"].bool()).logits
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-6, rtol=0)
    assert "tensor" in run_card((out / "README.md").read_text(), out)


def test_labels_are_those_of_the_run(folder: Path, tmp_path: Path) -> None:
    table = folder / "table.csv"
    content = table.read_text()
    try:
        table.write_text(content.replace("word 1,good", "word 1,better"))
        assert main(["export", "--to", "hf", str(folder / "classify"), str(tmp_path / "one")]) == 0
        table.unlink()
        assert main(["export", "--to", "hf", str(folder / "classify"), str(tmp_path / "two")]) == 0
    finally:
        table.write_text(content)
    for name in ("one", "two"):
        assert AutoConfig.from_pretrained(tmp_path / name).id2label == {0: "bad", 1: "good"}


def test_ids_that_are_no_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_run(ToyConfig(kind="lm"), **ONCE), tmp_path / "run", display=Spy())
    assert main(["export", "--to", "hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "no tokenizer" in capsys.readouterr().out
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert "There is no tokenizer" in (tmp_path / "out" / "README.md").read_text()
    core = Run(tmp_path / "run").model
    ids = torch.tensor([[1, 2, 3, 7]])
    model = SeqBoatForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(model(ids).logits, core(ids).logits, atol=1e-6, rtol=0)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a refused export."""
    assert main(["export", "--to", "hf", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_runs_that_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_run(ToyConfig(kind="match"), **ONCE), tmp_path / "match", display=Spy())
    out = tmp_path / "out"
    assert "match cannot be exported (task toy): only language models, classifiers and taggers" in refusal(
        capsys, tmp_path / "match", out
    )
    assert "is not the folder of a run" in refusal(capsys, tmp_path / "nowhere", out)
    (tmp_path / "empty").mkdir()
    assert "contains no complete checkpoint" in refusal(capsys, tmp_path / "empty", out)
    assert not out.exists()


def test_models_of_real_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_run(ToyConfig(real=True), **ONCE), tmp_path / "real", display=Spy())
    assert main(["export", "--to", "hf", str(tmp_path / "real"), str(tmp_path / "out")]) == 0
    assert "no tokenizer: the model reads real values (input_values)" in capsys.readouterr().out
    assert "Inputs are real values" in (tmp_path / "out" / "README.md").read_text()


def test_places_that_are_taken(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert "file is a file" in refusal(capsys, folder / "lm", tmp_path / "file")
    assert "is not empty" in refusal(capsys, folder / "lm", tmp_path)
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "empty").mkdir()
    assert main(["export", "--to", "hf", str(folder / "lm"), str(tmp_path / "empty")]) == 0


def test_a_damaged_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "lm" / "step-4" / "model.safetensors"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        message = refusal(capsys, folder / "lm" / "step-4", tmp_path / "out")
    finally:
        path.write_bytes(whole)
    assert "step-4/model.safetensors does not match its sha256" in message
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_when_writing_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("seqboat.hf.model.write_checksums", fail)
    assert main(["export", "--to", "hf", str(folder / "lm"), str(tmp_path / "out")]) == 1
    assert "No space left" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in [name for name in sys.modules if name.startswith("seqboat.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = refusal(capsys, tmp_path, tmp_path / "out")
    assert "seqboat.hf needs transformers: pip install 'seqboat[hf]'" in message


@pytest.mark.slow
def test_without_the_import_transformers_does_not_know_the_model(folder: Path, tmp_path: Path) -> None:
    assert main(["export", "--to", "hf", str(folder / "lm"), str(tmp_path / "out")]) == 0
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path / 'out')!r})"
    for first, expected in (("", 1), ("import seqboat.hf; ", 0)):
        done = subprocess.run(
            [sys.executable, "-c", first + code], capture_output=True, text=True, check=False
        )
        assert done.returncode == expected, done.stderr
        assert expected == 0 or "`seqboat`" in done.stderr


TRAINER = """
import sys, torch, seqboat.hf
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import Trainer, TrainingArguments

folder, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
texts = ["abcabcabcabc", "abcab", "bcabcabca", "c"] * 4
arguments = TrainingArguments(
    output_dir=out, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, save_steps=4,
    learning_rate=0.01, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
)
trainer = Trainer(
    model=model, args=arguments, train_dataset=[tokenizer(text) for text in texts],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
assert isinstance(trainer.model_wrapped, DistributedDataParallel)
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
parts = [torch.empty_like(mine) for _ in range(2)]
torch.distributed.all_gather(parts, mine)
assert torch.equal(*parts), "the processes disagree"
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_the_trainer_with_two_processes(folder: Path, tmp_path: Path) -> None:
    assert main(["export", "--to", "hf", str(folder / "lm"), str(tmp_path / "model")]) == 0
    script = tmp_path / "script.py"
    script.write_text(TRAINER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "model"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-4") is not None


def test_a_published_model(tmp_path: Path) -> None:
    """What was imported from the published implementation can be exported."""
    file = save_checkpoint(tmp_path / "a.pt", read("language_model"), "slag_lm_enwik8_base_v2")
    data = write_dictionaries(tmp_path / "data", [str(code) for code in range(97, 97 + 19)])
    import_run(file, tmp_path / "run", data)
    assert main(["export", "--to", "hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    tokens = torch.tensor([[97, 98, 10, 99]])
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(tokens).logits
    torch.testing.assert_close(logits, Run(tmp_path / "run").language_model(tokens).logits)
