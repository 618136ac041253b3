"""Samples for the explorer of a report: every token with its decisions in all layers and the weights of its query.

A sample is one compressed byte string: a JSON header and arrays, which the page's script unpacks when the sample is
selected. Probabilities and weights take one byte each. Two counts per query give the tokens it sees; only its largest
weights are kept, as many as the page size allows, each as the square root of its ratio to the largest. The error of a
weight that is 1/16 of the largest is then at most 2 %.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqboat.analysis.attention import Attention, attention_weights
from seqboat.analysis.traces import Examples, LayerTrace, SampleTrace, SequenceTrace, trace
from seqboat.report.page import finite, visible
from seqboat.tasks.task import IGNORE, Task

PAGE_BYTES = 4_750_000
"""Target size of a page, met by leaving out weights if possible."""
KEPT = (128, 96, 64, 48, 32, 24, 20, 16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
"""Candidate numbers of weights to keep per query; the largest that fits is used."""
NOTHING = 0xFFFF
"""Code for a missing target."""
TITLE = 48
"""Maximum length of a title in the list of samples, in characters."""

Array = NDArray[Any]


class Sight(NamedTuple):
    """What the queries of a layer see: the largest weights of each, sorted. Slots count active tokens."""

    before: Array
    """(active,): number of visible keys before the query"""
    after: Array
    """(active,): number of visible keys after it"""
    columns: Array
    """(kept, active): index of the key among the visible ones, largest weight first"""
    fractions: Array
    """(kept, active) float32: its fraction of the total weight of the query"""
    sums: Array
    """(active,) float32: sum of the weights"""


class Sample(NamedTuple):
    """One example, and what its queries saw in every layer."""

    trace: SampleTrace
    sights: tuple[tuple[Sight | None, ...], ...]
    """by sequence and layer; None without attention"""


def sight_of(attention: Attention) -> Sight:
    """The largest weights of every query."""
    count = len(attention.positions)
    slot = np.arange(count)
    weights = attention.weights
    keep = min(KEPT[0], weights.shape[1])
    columns = np.argsort(-weights, axis=1, kind="stable")[:, :keep]
    sums = weights.sum(axis=1, dtype=np.float64)
    largest = np.take_along_axis(weights, columns, axis=1) / np.where(sums > 0, sums, 1)[:, None]
    return Sight(
        (slot - attention.first).astype(np.uint32),
        (attention.end - slot - 1).astype(np.uint32),
        _narrow(columns.T),
        largest.T.astype(np.float32),
        sums.astype(np.float32),
    )


def collect_samples(examples: Examples, count: int) -> list[Sample]:
    """Trace the first examples one at a time, without padding, with the weights of one layer in memory.

    Args:
        examples: model, task and data.
        count: maximum number of samples.
    """
    model, kind = examples.model, examples.task.kind
    samples = []
    count = min(count, len(examples.dataset))
    for i in range(count):
        batch = examples.batch([i])
        (found,) = trace(model, kind, batch)
        sights: list[list[Sight | None]] = [[] for _ in found.sequences]
        for layer in range(len(found.sequences[0].layers)):
            (seen,) = attention_weights(model, kind, batch, layer)
            for place, attention in zip(sights, seen, strict=True):
                place.append(None if attention is None else sight_of(attention))
        samples.append(Sample(found, tuple(map(tuple, sights))))
    return samples


# tokens as text


def spell_bytes(data: bytes) -> list[str]:
    """The symbol of each byte of a text: a character at its first byte, dots at the others.

    >>> spell_bytes("a é\\n".encode() + b"\\xff")
    ['a', ' ', 'é', '·', '⏎', '⟨FF⟩']
    """
    shown: list[str] = []
    at = 0
    while at < len(data):
        size, character = _character(data, at)
        if character is None:
            shown.append(f"⟨{data[at]:02X}⟩")
        else:
            shown += [_alone(character), *"·" * (size - 1)]
        at += size
    return shown


def _character(data: bytes, at: int) -> tuple[int, str | None]:
    first = data[at]
    size = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    try:
        return size, data[at : at + size].decode("utf-8")
    except UnicodeDecodeError:
        return 1, None


def _alone(character: str) -> str:
    """A character for a separate cell; combining marks get a dotted circle as a base."""
    import unicodedata

    mark = unicodedata.category(character).startswith("M")
    return "◌" + character if mark else visible(character)


def spell_tokens(task: Task, ids: Array) -> list[str] | None:
    """The symbol of each token; None if inputs are real values."""
    if task.modality == "bytes":
        return spell_bytes(ids.astype(np.uint8).tobytes())
    if task.modality == "tokens":
        names = task.token_names
        return [visible(names[i]) if names else str(i) for i in ids.tolist()]
    return None


def label_name(task: Task, label: int) -> str:
    """The name of a class."""
    return visible(task.labels[label]) if task.labels else str(label)


# packing


class _Pack:
    """Strings and arrays of one sample."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.arrays: dict[str, Array] = {}

    def text(self, name: str, words: Sequence[str]) -> None:
        self.arrays[name] = np.array(
            [self.strings.setdefault(w, len(self.strings)) for w in words], np.uint16
        )

    def bytes(self, **head: object) -> bytes:
        # wide dtypes first, so that each array is aligned
        order = sorted(self.arrays.items(), key=lambda item: -item[1].dtype.itemsize)
        listed = [[name, f"{array.dtype.kind}{array.dtype.itemsize}", array.size] for name, array in order]
        text = json.dumps({"strings": list(self.strings), "arrays": listed, **head}).encode()
        text += b" " * (-len(text) % 8 + 4)
        parts = [len(text).to_bytes(4, "little"), text]
        parts += [array.astype(array.dtype.newbyteorder("<")).tobytes() for _, array in order]
        return zlib.compress(b"".join(parts), 9)


def _narrow(values: Array) -> Array:
    """The same integers in the smallest dtype that holds them."""
    most = int(values.max()) if values.size else 0
    return values.astype(np.uint8 if most < 1 << 8 else np.uint16 if most < 1 << 16 else np.uint32)


def to_bytes(probs: Array) -> Array:
    """Numbers from 0 to 1 as bytes."""
    return np.rint(np.clip(np.nan_to_num(probs), 0, 1) * 255).astype(np.uint8)


def pack_layer(pack: _Pack, name: str, layer: LayerTrace, sight: Sight | None, keep: int) -> None:
    """Pack the decisions and weights of one layer.

    Args:
        pack: destination.
        name: of the sequence and the layer.
        layer: the decisions.
        sight: the weights, if the layer has attention.
        keep: number of weights per query.
    """
    pack.arrays[f"{name}.active"] = np.packbits(layer.active, bitorder="little")
    pack.arrays[f"{name}.probs"] = to_bytes(layer.probs)
    if sight is None:
        return
    pack.arrays[f"{name}.before"] = _narrow(sight.before)
    pack.arrays[f"{name}.after"] = _narrow(sight.after)
    if not keep:
        return
    count = len(sight.before)
    columns, fractions = sight.columns[:keep], sight.fractions[:keep]
    if len(columns) < keep:
        # all layers have the same number of rows, so that the script need not know it per layer
        empty = np.zeros((keep - len(columns), count), np.uint8)
        columns, fractions = np.concatenate([columns, empty]), np.concatenate([fractions, empty])
    peak = fractions[0]
    ratio = np.sqrt(fractions[1:] / np.where(peak > 0, peak, 1))
    pack.arrays[f"{name}.top"] = _narrow(columns).reshape(-1)
    pack.arrays[f"{name}.ratio"] = to_bytes(ratio).reshape(-1)
    pack.arrays[f"{name}.peak"] = np.rint(np.clip(np.nan_to_num(peak), 0, 1) * 65535).astype(np.uint16)
    if np.abs(sight.sums - 1).max(initial=0) > 1e-3:
        pack.arrays[f"{name}.sum"] = sight.sums


def pack_sample(sample: Sample, task: Task, keep: int) -> bytes:
    """A sample in the format of the page's script."""
    pack = _Pack()
    sequences = []
    for s, (sequence, sights) in enumerate(zip(sample.trace.sequences, sample.sights, strict=True)):
        words = spell_tokens(task, sequence.inputs)
        if words is None:
            pack.arrays[f"{s}.values"] = _scale_values(
                sequence.inputs, centered=task.modality == "wave"
            ).reshape(-1)
        else:
            pack.text(f"{s}.text", words)
        for number, (layer, sight) in enumerate(zip(sequence.layers, sights, strict=True)):
            if layer is not None:
                pack_layer(pack, f"{s}.{number}", layer, sight, keep)
        sequences.append(
            {
                "length": len(sequence.inputs),
                "channels": 1 if sequence.inputs.ndim == 1 else sequence.inputs.shape[1],
                "layers": [layer is not None for layer in sequence.layers],
            }
        )
    if task.kind == "lm":
        _pack_next(pack, sample.trace, task)
    return pack.bytes(sequences=sequences)


def _pack_next(pack: _Pack, found: SampleTrace, task: Task) -> None:
    """Pack the predictions of a language model after each token, and the targets."""
    assert isinstance(found.label, np.ndarray)
    pack.text("next", _each_alone(task, found.ranked[:, 0]))
    pack.arrays["next_prob"] = to_bytes(found.probs[:, 0])
    pack.text("wanted", _each_alone(task, np.maximum(found.label, 0)))
    pack.arrays["wanted"][found.label == IGNORE] = NOTHING
    pack.arrays["wanted_prob"] = to_bytes(np.asarray(found.label_prob))


def _each_alone(task: Task, ids: Array) -> list[str]:
    return [(spell_tokens(task, ids[i : i + 1]) or [""])[0] for i in range(len(ids))]


def _scale_values(values: Array, centered: bool) -> Array:
    """Real inputs as bytes: scaled from minimum to maximum, or centered so that zero is 128."""
    values = np.nan_to_num(values.astype(np.float64))
    if centered:
        return np.rint(128 + 127 * values / max(float(np.abs(values).max(initial=0)), 1e-12)).astype(np.uint8)
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    low = float(values.min()) if values.size else low
    return np.rint(255 * (values - low) / max(high - low, 1e-12)).astype(np.uint8)


# the explorer


class PackedSamples(NamedTuple):
    """All samples, ready for a page."""

    texts: list[str]
    """in base64"""
    keep: int
    """number of weights per query"""
    coverage: float
    """fraction of the total weight that is kept"""


def pack_samples(samples: Sequence[Sample], task: Task, room: int) -> PackedSamples:
    """Pack all samples, with as many weights as fit.

    Args:
        samples: to pack.
        task: describes their tokens.
        room: maximum size in bytes; exceeded only if samples without weights are already larger.
    """
    most = max(
        (len(s.columns) for sample in samples for part in sample.sights for s in part if s is not None),
        default=0,
    )
    lengths = [sum(len(part.inputs) for part in sample.trace.sequences) for sample in samples]
    for keep in (most, *(fewer for fewer in KEPT if fewer < most)):
        texts: list[str] = []
        size = done = 0
        for sample, tokens in zip(samples, lengths, strict=True):
            texts.append(base64.b64encode(pack_sample(sample, task, keep)).decode())
            size, done = size + len(texts[-1]), done + tokens
            # already far too large after some of them: try fewer weights
            if keep and (size > room or size * sum(lengths) > 1.2 * room * done):
                break
        else:
            return PackedSamples(texts, keep, coverage(samples, keep))
    raise AssertionError("without weights everything fits")


def coverage(samples: Sequence[Sample], keep: int) -> float:
    """Fraction of the total weight in the largest weights of all queries; 1 if there is no weight."""
    sights = [s for sample in samples for part in sample.sights for s in part if s is not None]
    held = [s.fractions[:keep].sum(axis=0)[s.sums > 0] for s in sights]
    total = np.concatenate(held) if held else np.zeros(0)
    return float(np.minimum(total, 1).mean()) if total.size else 1.0


def explorer(samples: Sequence[Sample], task: Task, packed: PackedSamples) -> dict[str, Any]:
    """Data for the page's script, besides the samples."""
    layers = samples[0].trace.sequences[0].layers
    routed = [number for number, layer in enumerate(layers) if layer is not None]
    chosen = [
        float(layer.probs[layer.active].min())
        for sample in samples
        for sequence in sample.trace.sequences
        for layer in sequence.layers
        if layer is not None and layer.active.any()
    ]
    # the larger of two softmax probabilities is at least one half; other routers may be below
    low = 0.5 if not chosen or min(chosen) >= 0.499 else 0.0
    return finite(
        {
            "modality": task.modality,
            "unit": {"bytes": "byte", "tokens": "token", "image": "pixel", "wave": "sample"}[task.modality],
            "picture": task.picture,
            "layers": [f"layer {number + 1}" for number in range(len(layers))],
            "start": _start(samples, routed),
            "low": low,
            "keep": packed.keep,
            "samples": [describe_sample(i, sample.trace, task) for i, sample in enumerate(samples)],
            "about": _about(packed, samples),
        }
    )


def _start(samples: Sequence[Sample], routed: Sequence[int]) -> list[int]:
    """The two layers to show first: those that activate most."""
    counts = dict.fromkeys(routed, 0)
    for sample in samples:
        for sequence in sample.trace.sequences:
            for number in routed:
                layer = sequence.layers[number]
                counts[number] += 0 if layer is None else int(layer.active.sum())
    chosen = sorted(sorted(routed, key=lambda number: -counts[number])[:2])
    return [chosen[0], chosen[-1]]


def _about(packed: PackedSamples, samples: Sequence[Sample]) -> str:
    seen = any(s is not None and len(s.before) for sample in samples for part in sample.sights for s in part)
    text = (
        "Color shows the router's confidence where a layer's attention is activated; white is not activated."
    )
    if not seen:
        return text
    if not packed.keep:
        return f"{text} The weights of queries are left out to keep this page small."
    if packed.coverage > 1 - 1e-6:
        return f"{text} All weights of every query are kept."
    count = "the largest weight" if packed.keep == 1 else f"the {packed.keep} largest weights"
    held = "more than 99.9 %" if packed.coverage > 0.999 else f"{100 * packed.coverage:.1f} %"
    return (
        f"{text} To stay small, this page keeps {count} of every query: on average {held} of its weight; "
        "the rest is not shown."
    )


def describe_sample(number: int, found: SampleTrace, task: Task) -> dict[str, Any]:
    """Title and facts of a sample as text."""
    length = " + ".join(f"{len(s.inputs):,}" for s in found.sequences)
    facts: list[list[str]] = []
    if task.kind == "lm":
        wanted = np.asarray(found.label) != IGNORE
        probs = np.maximum(np.asarray(found.label_prob)[wanted], 1e-12)
        hit = np.asarray(found.prediction)[wanted] == np.asarray(found.label)[wanted]
        if wanted.any():
            facts.append(["bits per token", f"{-np.log2(probs).mean():.3f}"])
            facts.append(["next token right", f"{100 * hit.mean():.1f} %"])
    elif (said := task.say(found.logits)) is not None:
        facts.append(["predicted", visible(said)])
        if isinstance(found.label, np.ndarray):
            wanted = found.label != IGNORE
            hit = np.asarray(found.prediction)[wanted] == found.label[wanted]
            facts.append(["tags right", f"{100 * hit.mean():.1f} %" if wanted.any() else "no tags"])
    else:
        assert isinstance(found.label, int) and isinstance(found.prediction, int)
        guess = f"{label_name(task, found.prediction)} ({100 * float(found.probs[0]):.0f} %)"
        if found.label == IGNORE:  # it has no label
            facts.append(["predicted", guess])
        else:
            right = found.label == found.prediction
            facts.append(["label", label_name(task, found.label)])
            verdict = "right" if right else "wrong"
            facts.append(["predicted", f"{guess} {'✓' if right else '✗'} {verdict}", verdict])
            if not right:
                facts.append(["probability of the label", f"{100 * float(found.label_prob):.0f} %"])
    facts.append(["length", length])
    return {"title": f"{number + 1}. {_title(found.sequences[0], task, facts)}", "facts": facts}


def _title(sequence: SequenceTrace, task: Task, facts: Sequence[Sequence[str]]) -> str:
    words = spell_tokens(task, sequence.inputs[: 2 * TITLE])
    if words is None:
        return " ".join(f"{name} {value}" for name, value, *_ in facts[:2])
    text = ("" if task.modality == "bytes" else " ").join(w for w in words if w != "·")
    text = " ".join(text.replace("⏎", " ").split()) or "(nothing to read)"
    return text if len(text) <= TITLE else text[: TITLE - 1] + "…"
