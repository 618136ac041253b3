"""Tags of tokens: spans of characters, or one tag per word or step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from seqboat.core.checks import require
from seqboat.own.inputs import Facts
from seqboat.own.targets import Labeled, read_label
from seqboat.tasks.task import IGNORE, Example, Loss, ratio

OUTSIDE = "O"
"""Tag of tokens outside every span."""

Span = tuple[int, int, str]


class TagTarget(Labeled):
    """A tag for each token: of a text from spans of characters, of words or of a series one by one."""

    kind = "tag"
    said = ("tags",)

    def read(self, values: Mapping[str, Any]) -> list[str] | list[Span]:
        """One tag per token, or the spans of a text."""
        tags = values.get(self.config.label_column)
        tags = tags.tolist() if isinstance(tags, np.ndarray) else tags
        require(isinstance(tags, list | tuple), f"{self.config.label_column!r} must be a list")
        assert isinstance(tags, list | tuple)
        text = values.get(self.config.text_column)
        if isinstance(text, str):
            return [_read_span(span, len(text)) for span in tags]
        return [read_label(tag) for tag in tags]

    def named(self, value: Any) -> Sequence[str]:
        return [OUTSIDE, *(tag if isinstance(tag, str) else tag[2] for tag in value)]

    def measure(self, values: Sequence[Any], path: str) -> Facts:
        facts = super().measure(values, path)
        counts = dict(zip(facts["labels"], facts["counts"], strict=True))
        labels = [OUTSIDE, *(label for label in facts["labels"] if label != OUTSIDE)]
        counts[OUTSIDE] -= len(values)  # `named` adds one for every row
        return {"labels": labels, "counts": [counts[label] for label in labels]}

    def encode(self, value: Any, facts: Facts, length: int) -> NDArray[np.int64]:
        places = {label: place for place, label in enumerate(facts["labels"])}
        return np.array([places[tag] for tag in value[:length]], np.int64)

    def collate(self, examples: Sequence[Example], time: int) -> Tensor:
        targets = torch.full((len(examples), time), IGNORE, dtype=torch.int64)
        for row, example in zip(targets, examples, strict=True):
            wanted = np.asarray(example.target, np.int64)
            row[: len(wanted)] = torch.from_numpy(wanted)
        return targets

    def loss(self, logits: Tensor, targets: Tensor, facts: Facts) -> Loss:
        flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        total = F.cross_entropy(*flat, ignore_index=IGNORE, reduction="sum")
        return Loss(total, (targets != IGNORE).sum())

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")
        return each.sum(dim=-1) / (targets != IGNORE).sum(dim=-1).clamp(min=1)

    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        real = targets != IGNORE
        right = ((logits.argmax(dim=-1) == targets) & real).sum(dim=-1)
        return right.double() / real.sum(dim=-1).clamp(min=1)

    def score(self, logits: Tensor, targets: Tensor, facts: Facts) -> dict[str, Tensor]:
        said, real = logits.argmax(dim=-1), targets != IGNORE
        right = ((said == targets) & real).sum()
        # of what is tagged: a tag that is wrong is one too many and one too few
        hit = 2 * ((said == targets) & real & (targets != 0)).sum()
        named = ((said != 0) & real).sum() + ((targets != 0) & real).sum()
        return {"accuracy": ratio(right, real.sum()), "f1": ratio(hit, named)}

    def answer(self, logits: Tensor, facts: Facts) -> dict[str, Any]:
        return {"tags": [facts["labels"][int(tag)] for tag in logits.argmax(dim=-1)]}

    def say(self, answer: dict[str, Any]) -> str:
        counts = Counter(tag for tag in answer["tags"] if tag != OUTSIDE)
        found = [f"{label} on {count} tokens" for label, count in counts.most_common(5)]
        return ", ".join(found) or "no tag"

    def spell(self, target: NDArray[Any] | int, facts: Facts) -> str:
        return " ".join(facts["labels"][int(tag)] for tag in np.asarray(target))


def _read_span(span: Any, length: int) -> Span:
    if isinstance(span, dict):
        span = [span.get("start"), span.get("end"), span.get("label")]
    require(
        isinstance(span, list | tuple)
        and len(span) == 3
        and all(isinstance(place, int | np.integer) for place in span[:2]),
        f"a span must be start, end and label, got {str(span)[:60]}",
    )
    start, end, label = span
    require(0 <= start < end <= length, f"span {start} to {end} is outside a text of {length}")
    return int(start), int(end), read_label(label)


def tags_of(spans: Sequence[Span], places: Sequence[tuple[int, int]]) -> list[str]:
    """The tag of each token from spans of characters; the last span that touches it counts.

    >>> tags_of([(2, 4, "X")], [(0, 1), (2, 4), (5, 6)])
    ['O', 'X', 'O']
    """
    found = [OUTSIDE] * len(places)
    starts = np.array([start for start, _ in places])
    ends = np.array([end for _, end in places])
    for start, end, label in spans:
        for number in np.flatnonzero((starts < end) & (ends > start)):
            found[number] = label
    return found


def find_spans(text: str, tags: Sequence[str], places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Spans of characters from the tags of a text's tokens; neighbors with the same tag are one span.

    >>> find_spans("a bc", ["O", "X"], [(0, 1), (2, 4)])
    [{'start': 2, 'end': 4, 'label': 'X', 'text': 'bc'}]
    """
    spans: list[dict[str, Any]] = []
    before = OUTSIDE
    for tag, (start, end) in zip(tags, places, strict=False):
        if tag != OUTSIDE:
            if tag == before:
                spans[-1]["end"] = end
            else:
                spans.append({"start": start, "end": end, "label": tag})
        before = tag
    return [{**span, "text": text[span["start"] : span["end"]]} for span in spans]
