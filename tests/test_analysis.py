"""Traces, attention weights and measures equal what loops over tokens give."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_runs import write_lm_run, write_run
from seqboat.analysis.attention import attention_weights, local_span, mean_distance, visible, weigh_slots
from seqboat.analysis.measures import (
    BINS,
    LayerMeasures,
    MeanStd,
    Moments,
    activation_curve,
    measure,
    measure_run,
)
from seqboat.analysis.traces import load_examples, sites, trace
from seqboat.bench.cost import forward_products, linear_flops
from seqboat.layers.gau import GAU, GAUConfig
from seqboat.layers.routers import AlwaysActiveConfig, GumbelConfig, SigmoidConfig, XMoEConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.layers.sma import pack
from seqboat.mixers.transformer import TransformerConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier
from seqboat.tasks import (
    ListOpsTaskConfig,
    PathfinderTaskConfig,
    RecallTaskConfig,
    SpeechTaskConfig,
    TextTaskConfig,
)
from seqboat.tasks.listops import TOKENS, encode
from seqboat.tasks.task import IGNORE
from seqboat.training.evaluate import Windows
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
            first, end, weights = weigh_slots(gau, query, key, position, part)
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


@pytest.mark.parametrize(
    ("router", "temperature"),
    [
        (GumbelConfig(start=1.5), 1.5),
        (XMoEConfig(), 0.3),
        (SigmoidConfig(), None),
        (AlwaysActiveConfig(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_temperature_of_routers_that_have_one(router: Any, temperature: float | None) -> None:
    config = BackboneConfig(
        mixer=SeqBoatConfig(init="paper", router=router), d_model=8, num_layers=1, vocab=5
    )
    (site,) = sites(Classifier(config, 2))
    assert site is not None and site.temperature == (temperature and pytest.approx(temperature))


@pytest.mark.parametrize("kind", ["classify", "match", "lm"])
@pytest.mark.parametrize("at_once", [256, 3])
def test_attention_is_told_in_original_positions(
    kind: Any, at_once: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("seqboat.analysis.attention.QUERIES_AT_ONCE", at_once)
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


# measures against loops


def summary_of(values: list[float]) -> MeanStd | None:
    if not values:
        return None
    mean = sum(values) / len(values)
    return MeanStd(mean, (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5, len(values))


def assert_summary(found: MeanStd | None, values: list[float]) -> None:
    wanted = summary_of(values)
    if wanted is None:
        assert found is None
    else:
        assert found is not None and found.sequences == wanted.sequences
        assert found.mean == pytest.approx(wanted.mean, rel=1e-12)
        assert found.std == pytest.approx(wanted.std, rel=1e-9, abs=1e-12)


class Loop:
    """The measures of one layer, token by token."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.counts: list[float] = []
        self.spans: list[float] = []
        self.weighted: list[float] = []
        self.blind = [0, 0]
        self.kinds: dict[int, list[int]] = {}
        self.probabilities = [[0, 0] for _ in range(BINS)]

    def add(self, gau: GAU, layer: Any, attention: Any, kinds: Any, counted: Any) -> None:
        length = len(layer.active)
        some = [t for t in range(length) if counted[t]]
        for t in some:
            on = int(layer.active[t])
            for bins in (
                self.kinds.setdefault(int(kinds[t]), [0, 0]),
                self.probabilities[min(int(np.float32(layer.probs[t]) * BINS), BINS - 1)],
            ):
                bins[0] += on
                bins[1] += 1
        self.rates.append(sum(bool(layer.active[t]) for t in some) / len(some))
        self.counts.append(sum(bool(layer.active[t]) for t in some))
        positions = [t for t in range(length) if layer.active[t]]
        distances, weighted = [], []
        for slot, here in enumerate(positions):
            if not counted[here]:
                continue
            keys = loop_sees(gau, len(positions), slot)
            if len(keys) > 1:
                distances.append(sum(abs(positions[k] - here) for k in keys) / (len(keys) - 1))
            weights = [float(w) for w in attention.seen_by(slot)[1]]
            apart = [abs(positions[k] - here) for k in keys]
            self.blind[0] += not any(weights)
            self.blind[1] += 1
            if any(weights):
                pairs = zip(weights, apart, strict=True)
                weighted.append(sum(w * d for w, d in pairs) / sum(weights))
        for found, values in ((self.spans, distances), (self.weighted, weighted)):
            if values:
                found.append(sum(values) / len(values))

    def check(self, found: LayerMeasures) -> None:
        assert_summary(found.rate, self.rates)
        assert_summary(found.active, self.counts)
        assert_summary(found.span, self.spans)
        assert found.blind == (tuple(self.blind) if self.blind[1] else None)
        if self.weighted:
            wanted = summary_of(self.weighted)
            assert wanted is not None and found.weighted_span is not None
            # weights are in single precision
            assert found.weighted_span.mean == pytest.approx(wanted.mean, rel=1e-5)
        assert [list(part) for part in found.probabilities] == self.probabilities
        assert {i: list(part) for i, part in enumerate(found.by_class) if part.total} == self.kinds
        assert found.counts.active == sum(self.counts)


def check_run(run: Path, split: Any = "val", reading: Windows | None = None, batch_size: int = 4) -> Any:
    """Compare all measures of a run with loops over traces of its samples."""
    examples = load_examples(run, split, limit=12, reading=reading)
    measures = measure(examples, split, batch_size=batch_size, reading=reading)
    found = sites(examples.model)
    loops = [Loop() for _ in found]
    kind = examples.task.kind
    numbers = range(len(examples.dataset))
    tokens = 0
    for number in numbers:
        batch = examples.batch([number])
        sample = trace(examples.model, kind, batch)[0]
        for half, sequence in enumerate(sample.sequences):
            names, kinds = examples.task.token_classes(sequence.inputs)
            assert names == measures.classes
            counted = np.ones(len(kinds), bool)
            if reading is not None:
                counted = np.asarray(sample.label) != IGNORE
            tokens += int(counted.sum())
            for layer, site in enumerate(found):
                assert site is not None and site.gau is not None
                attention = attention_weights(examples.model, kind, batch, layer)[0][half]
                loops[layer].add(site.gau, sequence.layers[layer], attention, kinds, counted)
    assert measures.tokens == tokens and measures.examples == len(numbers)
    for loop, measured in zip(loops, measures.layers, strict=True):
        assert measured is not None
        loop.check(measured)
    return measures


@pytest.mark.parametrize("kind", ["classify", "lm"], ids=["both", "causal"])
@pytest.mark.parametrize("settings", [setting for setting in SPANS if setting != {"window": 1}], ids=str)
def test_measures_equal_loops_over_tokens(
    settings: dict[str, Any], kind: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("seqboat.analysis.attention.QUERIES_AT_ONCE", 7)
    mixer: Any = small_run(ToyConfig(kind=kind)).model.mixer
    gau = GAUConfig(d_z=4, d_v=8, max_positions=16, **settings)
    check_run(toy_run(tmp_path, dataclasses.replace(mixer, gau=gau), kind=kind, length=30))


def test_queries_that_see_nothing_are_counted(tmp_path: Path) -> None:
    """Squared ReLU gives no weight to keys whose scores are not positive."""
    mixer: Any = small_run().model.mixer
    gau = GAUConfig(d_z=2, d_v=8, window=2, positions="none", attention="relu2")
    register()
    config = small_run().replace(model={"mixer": dataclasses.replace(mixer, gau=gau)})
    measures = check_run(write_run(tmp_path / "run", config, noise=0.5))
    blind = [layer.blind for layer in measures.layers]
    assert any(0 < part.active < part.total for part in blind)


def test_measures_of_pairs_count_both_sequences(tmp_path: Path) -> None:
    measures = check_run(toy_run(tmp_path, kind="match"), "test")
    assert measures.sequences == 24 and measures.examples == 12


def test_measures_of_windows_leave_the_context_out(tmp_path: Path) -> None:
    measures = check_run(write_lm_run(tmp_path), "val", Windows(window=24, context=16))
    assert 11 * 8 < measures.tokens <= 12 * 8 and measures.task == "lmtext"
    layer = measures.layers[0]
    assert layer.span.mean > 0 and layer.counts.total < 12 * 8 + 1


def test_a_layer_that_never_attends(tmp_path: Path) -> None:
    run = toy_run(tmp_path)
    examples = load_examples(run, "val", limit=3)
    with torch.no_grad():
        examples.model.backbone.layers[0].sma.router.logits.bias.copy_(torch.tensor([9.0, -9.0]))  # type: ignore
    found = measure(examples, "val").layers[0]
    assert found is not None and found.counts.active == 0 and found.rate == MeanStd(0.0, 0.0, 3)
    assert (
        found.blind is None
        and found.span is None
        and found.weighted_span is None
        and found.confidence is None
    )


def test_cost_is_that_of_the_products(tmp_path: Path) -> None:
    mixer: Any = dataclasses.replace(small_run().model.mixer, ffn=True, d_ff=5)  # type: ignore[type-var]
    run = toy_run(tmp_path, mixer)
    examples = load_examples(run, "val", limit=1)
    length = len(examples.dataset[0].inputs)
    layer: Any = examples.model.backbone.layers[1]  # type: ignore[union-attr, index]
    found = measure_run(run, "val", limit=1).layers[1]
    assert found is not None and found.cost is not None

    def flops(active: int, others: int) -> int:
        # the feed-forward block: 8 -> 5 -> 8
        return sum(p.flops for p in forward_products(layer, 1, length, active)) + others * 2 * (40 + 40)

    assert found.cost.flops == flops(found.counts.active, found.others["ffn"].active)
    assert found.cost.always == flops(length, length)
    assert 0 < found.cost.fraction < 1
    assert linear_flops(layer.sma.units["ffn"]) == 160


def test_a_model_without_routers_has_no_layers_to_measure(tmp_path: Path) -> None:
    measures = measure_run(toy_run(tmp_path, TransformerConfig(heads=2, d_ff=8)), "val", limit=3)
    assert measures.layers == (None, None) and 0 <= measures.metrics["accuracy"] <= 1


def test_a_record_is_plain_data_and_batches_do_not_matter(tmp_path: Path) -> None:
    run = toy_run(tmp_path)
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "split": "train" if step % 100 else "val", "activation": [0.5, None]})
            + "\n"
            for step in range(1, 1001)
        )
    )
    calls: list[tuple[int, int]] = []
    one = measure_run(run, "val", limit=10, progress=lambda *done: calls.append(done))
    assert calls == [(1, 1)]
    record = json.loads(json.dumps(one.to_record(), allow_nan=False))
    layer = record["layers"][0]
    assert layer["counts"]["rate"] == layer["counts"]["active"] / layer["counts"]["total"]
    assert set(layer["rate"]) == {"mean", "std", "sequences"} and record["run"] == str(run)
    assert record["training"][-1] == {"step": 1000, "split": "val", "activation": [0.5, None]}
    assert len([point for point in record["training"] if point["split"] == "val"]) == 10
    assert 150 <= len([point for point in record["training"] if point["split"] == "train"]) <= 200
    examples = load_examples(run, "val", limit=10)
    other = measure(examples, "val", batch_size=3, weighted=False, progress=lambda *done: calls.append(done))
    assert calls[1:] == [(i, 4) for i in range(1, 5)]
    for a, b in zip(one.layers, other.layers, strict=True):
        assert a is not None and b is not None and b.weighted_span is None
        assert a.by_class == b.by_class and a.cost == b.cost
    assert activation_curve(run / "step-1") == activation_curve(run)


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("window", [1, 6, 7])
def test_the_span_of_a_sliding_window(window: int, causal: bool) -> None:
    gau = make_gau(causal, window=window)
    first, end = visible(gau, torch.arange(60), 60)
    spans = mean_distance(torch.arange(60.0, dtype=torch.float64), first, end)
    others = [abs(key - 30) for key in loop_sees(gau, 60, 30) if key != 30]
    if not others:
        assert spans[30].isnan()
        return
    assert spans[30].item() == pytest.approx(sum(others) / len(others))
    # the paper's reference: half a window, which a causal one has up to half a token
    assert spans[30].item() == pytest.approx(local_span(window) / (1 if causal else 2), abs=0.75)


def test_moments_and_bins() -> None:
    moments = Moments()
    assert moments.summary() is None
    for value in (1e9 + 1, 1e9 + 2, 1e9 + 3):
        moments.add(value)
    found = moments.summary()
    assert (
        found is not None and found.mean == 1e9 + 2 and found.std == pytest.approx((2 / 3) ** 0.5, rel=1e-9)
    )


def test_tasks_say_what_their_tokens_are() -> None:
    text = TextTaskConfig().build()
    names, kinds = text.token_classes(np.frombuffer("a Z9.\n\té\x00".encode(), np.uint8))
    assert [names[k] for k in kinds] == [
        *("letter", "space", "letter", "digit", "punctuation", "line end", "space"),
        *("beyond ASCII", "beyond ASCII", "control"),
    ]
    listops = ListOpsTaskConfig().build()
    names, kinds = listops.token_classes(encode(["[SM", "0", "9", "]", "[MIN"]))
    assert [names[k] for k in kinds] == ["operator", "digit", "digit", "bracket", "operator"]
    assert (text.modality, listops.modality, listops.token_names) == ("bytes", "tokens", TOKENS)
    image = PathfinderTaskConfig(size=16).build()
    names, kinds = image.token_classes(np.zeros((256, 1), np.float32))
    assert image.modality == "image" and len(names) == 16 and names[kinds[16]] == "row 2"
    speech = SpeechTaskConfig().build()
    names, kinds = speech.token_classes(np.array([[0.0], [-0.2], [0.7], [-1.5], [3.0]], np.float32))
    assert speech.modality == "wave" and kinds.tolist() == [0, 1, 2, 3, 4] and len(names) == 5
    recall = RecallTaskConfig().build()
    names, kinds = recall.token_classes(np.array([0, 63]))
    assert names[0] == "0" and len(names) == 64 and kinds.tolist() == [0, 63]
