"""lm-evaluation-harness on a model for transformers: a local task, without a network."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("lm_eval", reason="needs lm_eval, which no extra installs")

import lm_eval
from lm_eval.tasks import TaskManager

from seqboat.hf import byte_tokenizer
from seqboat.hf.export import to_transformers
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel

CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
TEXT = """
task: plain_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: bits_per_byte
"""
WRITE = """
task: writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list:
  - metric: exact_match
"""
DOCS = [
    {"question": "The sky is", "choices": [" blue", " seven"], "answer": 0},
    {"question": "Two and two make", "choices": [" green", " four", " a long walk home"], "answer": 1},
    {"question": "Grüße aus", "choices": [" München", " 12"], "answer": 0},
]


@pytest.mark.filterwarnings("ignore")
def test_local_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = BackboneConfig(mixer=SeqBoatConfig(causal=True), d_model=16, num_layers=1, vocab=256)
    core = LanguageModel(config).eval()
    to_transformers(core, pad_token_id=0).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, text in (("choice", CHOICE), ("plain_text", TEXT), ("writing", WRITE)):
        (tasks / f"{name}.yaml").write_text(text.format(path=data))
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "model"), "prefix_token_id": 10, "device": "cpu"},
        tasks=["choice", "plain_text", "writing"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=2,
    )
    scores = result["results"]

    def nats(context: bytes, continuation: bytes) -> float:
        ids = torch.tensor([list(context + continuation)])
        logits = core(ids[:, :-1]).logits[0, -len(continuation) :]
        return float(F.cross_entropy(logits, ids[0, -len(continuation) :], reduction="sum"))

    right = 0
    for doc in DOCS:
        costs = [nats(doc["question"].encode(), choice.encode()) for choice in doc["choices"]]  # type: ignore[attr-defined]
        right += min(range(len(costs)), key=costs.__getitem__) == doc["answer"]
    assert scores["choice"]["acc,none"] == pytest.approx(right / len(DOCS))
    texts = [str(doc["question"]).encode() for doc in DOCS]
    bits = sum(nats(b"\n", text) for text in texts) / math.log(2) / sum(len(text) for text in texts)
    assert scores["plain_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert scores["writing"]["exact_match,none"] == 0
