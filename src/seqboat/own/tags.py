"""Tags of tokens: spans of characters, or one tag per word, character or step."""

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
from seqboat.data.store import ArrayStore, RaggedWriter, Staging
from seqboat.own.inputs import Facts
from seqboat.own.targets import Labeled, read_label
from seqboat.tasks.stored import ragged
from seqboat.tasks.task import IGNORE, Example, Loss, ratio

OUTSIDE = "O"
"""Tag of tokens outside every span."""


class TagTarget(Labeled):
    """A tag for each token: of a text from spans of characters, of words or of a series one by one."""

    kind = "tag"
    said = ("tags",)

    def read(self, values: Mapping[str, Any], stored: NDArray[Any]) -> list[str]:
        tags = values.get(self.config.label_column)
        require(isinstance(tags, list), f"{self.config.label_column!r} must be a list")
        assert isinstance(tags, list)
        text = values.get(self.config.text_column)
        if isinstance(text, list) and len(tags) == len(text) and all(isinstance(word, str) for word in text):
            return _word_tags(text, tags)
        if isinstance(text, str) and all(isinstance(tag, list | tuple | dict) for tag in tags):
            return _span_tags(text, tags)
        time = len(text) if isinstance(text, list | str) else len(stored)
        require(len(tags) == time, f"{len(tags)} tags for {time} tokens")
        found = [read_label(tag) for tag in tags]
        if isinstance(text, str):
            sizes = [len(character.encode("utf-8", "surrogateescape")) for character in text]
            found = [tag for tag, size in zip(found, sizes, strict=True) for _ in range(size)]
        return found

    def open(self, staging: Staging) -> None:
        super().open(staging)
        self._tags = RaggedWriter(staging, "tags", np.uint16)
        self._names.number(OUTSIDE, 0)

    def append(self, value: Any, line: int) -> None:
        numbers = [self._names.number(tag, line) for tag in value]
        require(max(numbers, default=0) < 1 << 16, "too many different tags")
        self._tags.append(np.array(numbers, np.uint16))

    def measure(self, store: ArrayStore, rows: NDArray[np.integer], path: str) -> Facts:
        labels = super().measure(store, rows, path)["labels"]
        return {"labels": [OUTSIDE, *(label for label in labels if label != OUTSIDE)]}

    def encode(self, store: ArrayStore, facts: Facts, index: int, length: int) -> NDArray[np.int64]:
        return self.classes(store, facts)[ragged(store, "tags", index, length)]

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


def _word_tags(words: Sequence[str], tags: Sequence[Any]) -> list[str]:
    found: list[str] = []
    for word, tag in zip(words, tags, strict=True):
        if found:
            found.append(OUTSIDE)  # the space between words
        found += [read_label(tag)] * len(word.encode("utf-8", "surrogateescape"))
    return found


def _span_tags(text: str, spans: Sequence[Any]) -> list[str]:
    ends = np.cumsum([0, *(len(character.encode("utf-8", "surrogateescape")) for character in text)])
    found = [OUTSIDE] * int(ends[-1])
    for span in spans:
        if isinstance(span, dict):
            span = [span.get("start"), span.get("end"), span.get("label")]
        require(
            len(span) == 3 and all(isinstance(place, int) for place in span[:2]),
            f"a span must be start, end and label, got {str(span)[:60]}",
        )
        start, end, label = span
        require(0 <= start < end <= len(text), f"span {start} to {end} is outside a text of {len(text)}")
        first, last = int(ends[start]), int(ends[end])
        found[first:last] = [read_label(label)] * (last - first)
    return found


def find_spans(text: str, tags: Sequence[str]) -> list[dict[str, Any]]:
    """Spans of characters from the tags of a text's bytes; a character goes by its first byte.

    >>> find_spans("a bc", ["O", "O", "X", "X"])
    [{'start': 2, 'end': 4, 'label': 'X', 'text': 'bc'}]
    """
    spans: list[dict[str, Any]] = []
    place, before = 0, OUTSIDE
    for number, character in enumerate(text):
        tag = tags[place] if place < len(tags) else OUTSIDE
        if tag != OUTSIDE:
            if tag == before:
                spans[-1]["end"] = number + 1
            else:
                spans.append({"start": number, "end": number + 1, "label": tag})
        before = tag
        place += len(character.encode("utf-8", "surrogateescape"))
    return [{**span, "text": text[span["start"] : span["end"]]} for span in spans]
