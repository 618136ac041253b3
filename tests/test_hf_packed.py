"""Packed documents in models of transformers: every position 0 begins one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import DataCollatorWithFlattening

from closeness import assert_same_numbers
from mixer_cases import enliven
from seqboat.hf import SeqBoatConfig, SeqBoatForCausalLM, SeqBoatForSequenceClassification

LENGTHS = (4, 1, 9)
same = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def small_model() -> SeqBoatForCausalLM:
    torch.manual_seed(0)
    mixer = {"name": "seqboat", "causal": True, "gau": {"d_z": 4, "d_v": 8, "window": 4}}
    config = SeqBoatConfig(vocab_size=32, hidden_size=8, num_hidden_layers=2, mixer=mixer)
    return enliven(SeqBoatForCausalLM(config))


def test_flattened_examples_are_read_as_if_alone() -> None:
    model = small_model()
    documents = [torch.randint(32, (length,)).tolist() for length in LENGTHS]
    batch = DataCollatorWithFlattening()([{"input_ids": ids} for ids in documents])
    out = model(**batch)
    logits = out.logits[0].split(LENGTHS)
    total = torch.zeros((), dtype=torch.float64)
    for ids, found in zip(documents, logits, strict=True):
        alone = torch.tensor([ids])
        expected = model(alone, labels=alone)
        same(found, expected.logits[0])
        total += expected.loss * (len(ids) - 1)
    same(out.loss, total / sum(length - 1 for length in LENGTHS), rtol=1e-10, atol=1e-10)
    # whoever made the labels: first tokens are no targets
    plain = model(batch["input_ids"], labels=batch["input_ids"], position_ids=batch["position_ids"])
    same(plain.loss, out.loss)


def test_padding_and_a_cache() -> None:
    model = small_model()
    ids = torch.randint(32, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    position_ids = torch.tensor([[1, 1, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2]])
    out = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=True)
    same(out.logits[:, 4:], model(ids[:, 4:]).logits)
    same(out.logits[:1, 2:4], model(ids[:1, 2:4]).logits)
    # the cache holds the last documents; one of the sequences starts another
    more = torch.randint(32, (2, 2))
    after = model(more, past_key_values=out.past_key_values, position_ids=torch.tensor([[3, 4], [0, 1]]))
    longer = model(torch.cat([ids[:1, 4:], more[:1]], dim=1)).logits[:, 3:]
    same(after.logits[:1], longer)
    same(after.logits[1:], model(more[1:]).logits)


def test_positions_of_a_single_document_change_nothing() -> None:
    model = small_model()
    ids = torch.randint(32, (2, 5))
    plain = model(ids, output_hidden_states=True, position_ids=torch.arange(5)[None])
    assert_same_numbers(plain.logits, model(ids).logits)


def test_refusals() -> None:
    model = small_model()
    ids, packed = torch.randint(32, (1, 4)), torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(ValueError, match="no output_hidden_states"):
        model(ids, position_ids=packed, output_hidden_states=True)
    with pytest.raises(ValueError, match="position_ids must have shape"):
        model(ids, position_ids=packed[:, :2])
    classifier = SeqBoatForSequenceClassification(model.config)
    with pytest.raises(ValueError, match="takes no packed documents"):
        classifier(ids, position_ids=packed)
