"""One input through a trained model: its prediction and which tokens attended, as text, plain data or a page.

    examples = subject("runs/listops", lambda task: (task.read_text(b"[MAX 2 9 [MIN 4 7 ] 0 ]"),))
    found = explain(examples)
    print(render(found, examples.task, color=False))
    as_record(found, examples.task)

In color, the background of a token shows its confidence. Without color, the digit below a token is its confidence in
tenths, and a dot means that it was not activated. Control characters in the input are escaped.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.analysis.traces import Examples, LayerTrace, SampleTrace, SequenceTrace, trace
from seqboat.core.checks import require
from seqboat.report.page import Html, asset, element, visible, write_page
from seqboat.report.samples import (
    PAGE_BYTES,
    collect_samples,
    explorer,
    label_name,
    pack_samples,
    spell_tokens,
)
from seqboat.run import Run
from seqboat.tasks.task import IGNORE, Dataset, Example, Task

LONGEST = 8192
"""Maximum number of tokens to read, unless the sequences of the task are longer."""
LABEL = 9
"""Width of the label before the tokens, in columns."""
RESET = "\033[0m"
LEVELS = ((195, 16), (153, 16), (111, 16), (68, 231), (25, 231))
"""Background and foreground, of the 256 terminal colors, by tenths of the confidence from one half up."""

Sequences = tuple[NDArray[Any], ...]
"""One sequence, or the two that a task compares."""


class Single(Dataset):
    """A dataset of one example."""

    def __init__(self, example: Example) -> None:
        self.example = example

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Example:
        return self.example


def subject(
    run: Path | str,
    read: Callable[[Task], Sequences],
    which: str = "best",
    fields: Sequence[str] = (),
) -> Examples:
    """The model of a run, and one unlabeled input.

    Args:
        run: the run's folder, or one checkpoint in it.
        read: makes the inputs, given the task: one sequence, or two if the task compares pairs.
        which: "best" or "latest".
        fields: overrides of the data settings, as arguments `--data.x=value`.
    """
    source = Run(run, which, fields)
    task = source.task
    parts = read(task)
    wanted = 2 if task.kind == "match" else 1
    require(
        len(parts) == wanted,
        f"the task {task.name} takes {wanted} input{'s' * (wanted > 1)}, got {len(parts)}",
    )
    for part in parts:
        require(len(part) > 0, "the input must not be empty")
    parts = tuple(part[: longest(task)] for part in parts)
    target: NDArray[Any] | int = IGNORE
    if task.kind == "lm":
        target = np.append(parts[0][1:], IGNORE)
    elif task.kind == "tag":
        target = np.full(len(parts[0]), IGNORE)
    example = Example(parts[0], target, parts[1] if wanted == 2 else None)
    return Examples(source.model, source.config, task, Single(example), source.step)


def longest(task: Task) -> int:
    """Maximum number of tokens to read."""
    return max(task.max_length, LONGEST) if task.kind == "lm" else task.max_length


def explain(examples: Examples) -> SampleTrace:
    """Trace the input through the model."""
    found = trace(examples.model, examples.task.kind, examples.batch([0]))[0]
    finite = np.isfinite(found.probs).all() and np.isfinite(found.logits).all()
    require(bool(finite), "the model's output for this input is not finite (NaN or infinite)")
    return found


# as plain data


def as_record(found: SampleTrace, task: Task, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """Prediction and activation as plain data.

    Args:
        found: from `explain`.
        task: of the run.
        layers: which to include, counted from 0; all by default.
    """
    last = (found.ranked[-1], found.probs[-1]) if task.kind == "lm" else (found.ranked, found.probs)
    said = None if task.kind == "lm" else task.say(found.logits)
    ranked = (
        []
        if said is not None
        else [
            {"class": int(number), "name": name_of(task, int(number)), "probability": float(prob)}
            for number, prob in zip(*last, strict=True)
        ]
    )
    record: dict[str, Any] = {"prediction": ranked[0] if said is None else said, "ranked": ranked}
    if task.kind == "lm":
        record["bits_per_token"] = bits_per_token(found)
    record["sequences"] = [
        {
            "tokens": sequence.inputs.tolist() if task.vocab is not None else None,
            "length": len(sequence.inputs),
            "layers": [
                _layer_record(number, layer)
                for number, layer in enumerate(sequence.layers)
                if layers is None or number in layers
            ],
        }
        for sequence in found.sequences
    ]
    return record


def _layer_record(number: int, layer: LayerTrace | None) -> dict[str, Any]:
    if layer is None:
        return {"layer": number + 1, "module": None}
    return {
        "layer": number + 1,
        "module": layer.module,
        "rate": float(layer.active.mean()),
        "active": np.flatnonzero(layer.active).tolist(),
        "confidence": [round(float(prob), 6) for prob in layer.probs[layer.active]],
    }


def name_of(task: Task, number: int) -> str:
    """The name of a class, or of the next token of a language model."""
    if task.kind == "lm":
        words = spell_tokens(task, np.array([number]))
        return str(number) if words is None else words[0]
    return label_name(task, number)


def bits_per_token(found: SampleTrace) -> float | None:
    """Mean over the tokens after the first one; None if there are none."""
    probs = np.asarray(found.label_prob, dtype=np.float64)
    known = probs[~np.isnan(probs)]
    return float(-np.log2(np.maximum(known, 1e-30)).mean()) if len(known) else None


# as a page


def explain_page(examples: Examples, run: str) -> str:
    """One self-contained page with the prediction and the explorer.

    Args:
        examples: from `subject`.
        run: name of the run on the page.
    """
    task = examples.task
    samples = collect_samples(examples, 1)
    found = samples[0].trace
    facts = [*prediction_text(found, task).splitlines(), *_rate_lines(found, None)]
    about = element("section", *(element("p", line) for line in facts), id="prediction", class_="card")
    sections = [("prediction", "Prediction", about)]
    explored, texts = None, []
    if any(layer is not None for layer in found.sequences[0].layers):
        packed = pack_samples(samples, task, PAGE_BYTES)
        explored, texts = explorer(samples, task, packed), packed.texts
        sections.append(("explorer", "Explorer", Html(asset("explorer.html"))))
    lead = f"{run}, step {examples.step:,}"
    return write_page(f"One input of {task.name}", visible(lead), sections, {}, explored, texts)


# as text


def prediction_text(found: SampleTrace, task: Task) -> str:
    """The prediction, in a line or two."""
    record = as_record(found, task, [])
    lm = task.kind == "lm"
    if not np.isfinite(found.probs).all():
        return "no prediction: the output of the model is not finite"
    if not record["ranked"]:
        return f"prediction: {record['prediction']}"
    # quoted, so that a space is visible
    first, *others = [
        f"{repr(item['name']) if lm else item['name']} ({item['probability']:.1%})"
        for item in record["ranked"][:5]
    ]
    line = f"{'next token' if lm else 'prediction'}: {first}"
    if others:
        line += f"; then {', '.join(others)}"
    if record.get("bits_per_token") is not None:
        line += f"\n{record['bits_per_token']:.3f} bits per token, not counting the first"
    return line


def render(
    found: SampleTrace, task: Task, layers: Sequence[int] | None = None, color: bool = False, width: int = 80
) -> str:
    """Prediction and activation as text for a terminal.

    Args:
        found: from `explain`.
        task: of the run.
        layers: which to show, counted from 0; all by default.
        color: whether to use colors.
        width: of the terminal in columns.
    """
    lines = [prediction_text(found, task), *_rate_lines(found, layers)]
    for number, sequence in enumerate(found.sequences):
        shown = _shown(sequence, layers)
        if shown:
            title = [f"sequence {number + 1}"] if len(found.sequences) > 1 else []
            lines += ["", *title, *_pictures(sequence, task, shown, color, max(width, LABEL + 20))]
    if "--html FILE shows where" not in lines and any(_shown(part, layers) for part in found.sequences):
        lines.append(legend(color))
    return "\n".join(lines)


def _shown(sequence: SequenceTrace, layers: Sequence[int] | None) -> list[tuple[int, LayerTrace]]:
    """The layers to show: those with a router."""
    return [
        (i, layer)
        for i, layer in enumerate(sequence.layers)
        if layer is not None and (layers is None or i in layers)
    ]


def _rate_lines(found: SampleTrace, layers: Sequence[int] | None) -> Iterator[str]:
    """The activation rate of each sequence and layer."""
    for number, sequence in enumerate(found.sequences):
        where = f"sequence {number + 1}, " if len(found.sequences) > 1 else ""
        for i, layer in _shown(sequence, layers):
            text = f"{where}layer {i + 1}: {layer.active.mean():.1%} of {len(layer.active):,} tokens attend"
            if layer.active.any():
                text += f", mean confidence {layer.probs[layer.active].mean():.2f}"
            yield text
    if not any(_shown(sequence, layers) for sequence in found.sequences):
        yield "no layer has a router: every token is processed in the same way"


def legend(color: bool) -> str:
    """Legend of the shades or digits."""
    if color:
        return "confidence: not activated " + " ".join(
            _shade(f" {low / 10} ", low / 10) for low in range(5, 10)
        )
    return "confidence: . not activated, digits: tenths, rounded down"


Shown = Sequence[tuple[int, LayerTrace]]


def _pictures(sequence: SequenceTrace, task: Task, shown: Shown, color: bool, width: int) -> Iterator[str]:
    words = spell_tokens(task, sequence.inputs)
    if words is not None:
        gap = "" if task.modality == "bytes" else " "
        return (_colored if color else _marked)(words, gap, shown, width)
    return iter(["--html FILE shows where"])


def _level(confidence: float) -> int:
    # because of rounding: 0.7 * 10 is slightly less than 7
    return min(9, int(confidence * 10 + 1e-6))


def _shade(text: str, confidence: float) -> str:
    """Text on a background for its confidence."""
    back, front = LEVELS[min(max(_level(confidence) - 5, 0), len(LEVELS) - 1)]
    return f"\033[48;5;{back}m\033[38;5;{front}m{text}{RESET}"


def _mark(confidence: float) -> str:
    return str(_level(confidence)) if confidence > 0 else "."


def _columns(text: str) -> int:
    """Width of a text in terminal columns."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me") for c in text)


def _lines(words: Sequence[str], gap: str, room: int) -> Iterator[range]:
    """Indices of the words in each line; line breaks in the text are kept."""
    begin = used = 0
    for i, word in enumerate(words):
        size = _columns(word) + len(gap)
        if used + size > room and i > begin:
            yield range(begin, i)
            begin, used = i, 0
        used += size
        if word == "⏎":
            yield range(begin, i + 1)
            begin, used = i + 1, 0
    if begin < len(words):
        yield range(begin, len(words))


def _colored(words: Sequence[str], gap: str, shown: Shown, width: int) -> Iterator[str]:
    """The text once per layer."""
    for number, layer in shown:
        confidence = layer.confidence
        yield f"layer {number + 1}"
        for line in _lines(words, gap, width):
            parts = [_shade(words[i], confidence[i]) if layer.active[i] else words[i] for i in line]
            yield gap.join(parts)
        yield ""


def _marked(words: Sequence[str], gap: str, shown: Shown, width: int) -> Iterator[str]:
    """The text line by line, with a line of marks per layer below."""
    for line in _lines(words, gap, width - LABEL):
        yield " " * LABEL + gap.join(words[i] for i in line)
        for number, layer in shown:
            confidence = layer.confidence
            marks = gap.join(_mark(confidence[i]).ljust(_columns(words[i])) for i in line)
            yield f"{f'layer {number + 1}':<{LABEL}}{marks}".rstrip()
        yield ""
