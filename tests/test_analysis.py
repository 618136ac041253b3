"""Traces, attention weights and measures equal what loops over tokens give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_runs import write_lm_run, write_run
from seqboat.analysis import attention_weights, load_examples, routed_layers, sites, trace
from seqboat.mixers.gau import GAU, GAUConfig
from seqboat.mixers.transformer import TransformerConfig
from seqboat.sma import pack
from seqboat.tasks.base import IGNORE
from small_runs import ToyConfig, register, small_run

SPANS: list[dict[str, Any]] = [
    {"window": 4},
    {"window": 6, "positions": "compressed"},
    {"window": 1},
    {"window": 64, "positions": "rotary"},
    {"window": 3, "span": "chunk"},
    {"window": 4, "span": "chunk", "positions": "compressed", "attention": "relu2"},
    {"window": 4, "span": "full", "attention": "laplace"},
    {"window": 4, "span": "full", "positions": "none"},
    {"window": 5, "attention": "laplace"},
]


def make_gau(causal: bool, **settings: Any) -> GAU:
    torch.manual_seed(0)
    gau = GAU(6, GAUConfig(d_z=4, d_v=8, max_positions=16, **settings), causal=causal).double().eval()
    with torch.no_grad():
        for parameter in gau.parameters():
            parameter.normal_()
    return gau


def loop_sees(gau: GAU, count: int, slot: int) -> list[int]:
    """Slots that a query sees, by the words of the paper."""
    config, found = gau.config, []
    for key in range(count):
        if config.span == "memory":
            near = slot - config.window <= key <= slot
            if not gau.causal:
                near = abs(slot - key) <= config.window // 2
        elif config.span == "chunk":
            near = key // config.window == slot // config.window
        else:
            near = True
        if near and (key <= slot or not gau.causal):
            found.append(key)
    return found


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("settings", SPANS, ids=str)
def test_weights_times_values_are_what_the_unit_attends(settings: dict[str, Any], causal: bool) -> None:
    gau = make_gau(causal, **settings)
    active = torch.rand(3, 23, generator=torch.Generator().manual_seed(1)) < 0.6
    active[1] = False
    packed = pack(active)
    tokens = torch.randn(len(packed.flat), 6, dtype=torch.float64)
    wanted = gau(tokens, packed)[0]
    for row in range(3):
        mine = packed.row == row
        position = packed.position[mine]
        query, key, value, gate = gau.project(tokens[mine], position)
        count = len(query)
        for part in (slice(None), slice(2, 5), slice(count // 2, count)):
            first, end, weights = gau.weigh(query, key, position, part)
            attended = []
            for i, slot in enumerate(range(count)[part]):
                keys = list(range(int(first[i]), int(end[i])))
                assert keys == loop_sees(gau, count, slot)
                assert not weights[i, len(keys) :].any()
                attended.append(weights[i, : len(keys)] @ value[keys])
            if attended:
                out = gau.out(gate[part] * torch.stack(attended))
                torch.testing.assert_close(out, wanted[mine][part], rtol=1e-10, atol=1e-12)


def toy_run(folder: Path, mixer: Any = None, **task: Any) -> Path:
    register()
    config = small_run(ToyConfig(**task))
    if mixer is not None:
        config = config.replace(model={"mixer": mixer})
    return write_run(folder / "run", config)


@pytest.mark.parametrize("kind", ["classify", "match", "lm"])
def test_a_trace_is_what_the_model_says_of_each_sample_alone(kind: Any, tmp_path: Path) -> None:
    examples = load_examples(toy_run(tmp_path, kind=kind), "val", limit=6)
    model, task = examples.model, examples.task
    assert examples.step == 1 and len(examples.dataset) == 6
    samples = trace(model, task.kind, examples.batch(range(6)))
    assert len({len(sample.sequences[0].inputs) for sample in samples}) > 1, "nothing is padded"
    for number, sample in enumerate(samples):
        example = examples.dataset[number]
        assert len(sample.sequences) == (2 if kind == "match" else 1)
        np.testing.assert_array_equal(sample.sequences[0].inputs, example.inputs)
        alone = [torch.from_numpy(example.inputs)[None]]
        if example.second is not None:
            np.testing.assert_array_equal(sample.sequences[1].inputs, example.second)
            alone.append(torch.from_numpy(example.second)[None])
        output = model(*alone)
        probs = torch.softmax(output.logits[0], dim=-1)
        np.testing.assert_array_equal(sample.prediction, probs.argmax(dim=-1))
        np.testing.assert_allclose(sample.probs[..., 0], probs.max(dim=-1).values.detach(), rtol=1e-5)
        label = np.asarray(example.target)
        np.testing.assert_array_equal(sample.label, label)
        wanted = probs.gather(-1, torch.from_numpy(label)[..., None])[..., 0].detach()
        np.testing.assert_allclose(sample.label_prob, wanted, rtol=1e-5)
        for half, sequence in enumerate(sample.sequences):
            for layer, found in enumerate(sequence.layers):
                assert found is not None
                routing = output.routings[half * len(sequence.layers) + layer]
                np.testing.assert_array_equal(found.active, routing.active[0, :, 0])
                np.testing.assert_allclose(found.probs, routing.probs[0, :, 0].detach(), atol=1e-5)
                np.testing.assert_array_equal(found.confidence, np.where(found.active, found.probs, 0))


def test_a_language_model_keeps_the_best_next_tokens(tmp_path: Path) -> None:
    examples = load_examples(write_lm_run(tmp_path), "val", limit=2)
    sample = trace(examples.model, "lm", examples.batch([0]))[0]
    assert sample.ranked.shape == sample.probs.shape == (32, 5)
    assert (np.diff(sample.probs, axis=1) <= 0).all()
    unscored = examples.batch([0])
    unscored.targets[0, :3] = IGNORE
    masked = trace(examples.model, "lm", unscored)[0]
    assert np.isnan(masked.label_prob[:3]).all() and not np.isnan(masked.label_prob[3:]).any()  # type: ignore[index]


def test_a_layer_without_a_router_has_no_trace(tmp_path: Path) -> None:
    examples = load_examples(toy_run(tmp_path, TransformerConfig(heads=2, d_ff=8)), "val", limit=2)
    batch = examples.batch([0, 1])
    assert routed_layers(examples.model) == []
    assert [sample.sequences[0].layers for sample in trace(examples.model, "classify", batch)] == [
        (None, None)
    ] * 2
    assert attention_weights(examples.model, "classify", batch, 0) == [(None,), (None,)]


def test_the_attention_module_is_shown_first_and_others_beside_it(tmp_path: Path) -> None:
    config = small_run()
    mixer = dataclasses.replace(config.model.mixer, ffn=True)  # type: ignore[type-var]
    examples = load_examples(toy_run(tmp_path, mixer), "val", limit=2)
    batch = examples.batch([0, 1])
    routings = examples.model(batch.inputs, batch.mask).routings
    layer = trace(examples.model, "classify", batch)[0].sequences[0].layers[0]
    assert layer is not None and layer.module == "gau" and [o.module for o in layer.others] == ["ffn"]
    length = len(layer.active)
    np.testing.assert_array_equal(layer.others[0].active, routings[0].active[0, :length, 1])
    site = sites(examples.model)[1]
    assert site is not None and site.temperature == pytest.approx(8**0.5)


@pytest.mark.parametrize("kind", ["classify", "match", "lm"])
def test_attention_is_told_in_original_positions(kind: Any, tmp_path: Path) -> None:
    examples = load_examples(toy_run(tmp_path, kind=kind), "val", limit=5)
    batch = examples.batch(range(5))
    samples = trace(examples.model, kind, batch)
    gau: Any = sites(examples.model)[1].gau  # type: ignore[union-attr]
    found = attention_weights(examples.model, kind, batch, 1)
    assert len(found) == 5
    for sample, row in zip(samples, found, strict=True):
        assert len(row) == len(sample.sequences)
        for sequence, attention in zip(sample.sequences, row, strict=True):
            layer = sequence.layers[1]
            assert layer is not None and attention is not None
            np.testing.assert_array_equal(attention.positions, np.flatnonzero(layer.active))
            for slot in range(len(attention.positions)):
                positions, weights = attention.seen_by(slot)
                slots = loop_sees(gau, len(attention.positions), slot)
                np.testing.assert_array_equal(positions, attention.positions[slots])
                assert weights.sum() == pytest.approx(1, abs=1e-5)


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    examples = load_examples(toy_run(tmp_path), "val", limit=1)
    with pytest.raises(ValueError, match=r"layer must be in 0\.\.1, got 2"):
        attention_weights(examples.model, "classify", examples.batch([0]), 2)
