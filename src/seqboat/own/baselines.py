"""Simple baselines on your own data, computed in seconds, to compare a run with.

    majority            the most frequent class, labels or tag; for numbers their mean
    bag of words        words and pairs of words, weighted by TF-IDF, in a linear model (logistic or ridge regression)
    summary statistics  of series, sounds and images: mean, std, least, most, first and last value, in a linear model
    tag per word        the tag that each word has most often; also of other tokens

They read exactly what the model reads, truncated as it is, and are scored by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from seqboat.own.tags import TagTarget
from seqboat.own.targets import ClassTarget, LabelsTarget, NumberTarget
from seqboat.tasks.task import Dataset, Example, Split, draw_subset

if TYPE_CHECKING:
    from seqboat.own.task import OwnTask

TRAIN_ROWS = 5_000
"""Training rows that a baseline reads at most, a fixed random sample."""
SCORED_ROWS = 10_000
"""Rows that it is scored on at most."""
MAX_TERMS = 1 << 18
"""Words and pairs of words that it knows at most: the most frequent."""
MAX_WEIGHTS = 1 << 21
"""Weights that it has at most, over all classes."""
STRENGTH = 4.0
"""Inverse of the penalty on squared weights, as usual for a sum of losses."""
ITERATIONS = 60
_WORD = re.compile(r"\w+")
_PAIR = 32
_SECOND = 1 << 62


def score_baselines(task: OwnTask, split: Split, limit: int | None = None) -> dict[str, dict[str, float]]:
    """Scores of simple models, by name.

    Args:
        task: what to learn.
        split: to score.
        limit: as in evaluation: score at most this many examples, always the same.
    """
    train = draw_subset(task.dataset("train"), TRAIN_ROWS)
    scored = draw_subset(draw_subset(task.dataset(split), limit), SCORED_ROWS)
    learn, test = list(_examples(train)), list(_examples(scored))
    if isinstance(task.target, TagTarget):
        return _tag_baselines(task, learn, test)
    wanted = _targets(task, learn)
    outputs = {_majority_name(task): _majority(task, wanted).expand(len(test), -1)}
    name, features = _features(task, learn, test, wanted.shape[1])
    if features is not None:
        weight, bias = fit_linear(features[0], wanted, _losses(task))
        outputs[name] = features[1].times(weight) + bias
    targets = task.collate_targets(test, 0)
    found = {}
    for name, logits in outputs.items():
        sums = task.target.score(logits, targets, task.facts)
        means = {k: float(total) / max(float(count), 1e-12) for k, (total, count) in sums.items()}
        found[name] = task.target.summarize(means)
    return found


def _examples(dataset: Dataset) -> Iterable[Example]:
    return (dataset[i] for i in range(len(dataset)))


def _targets(task: OwnTask, examples: Sequence[Example]) -> Tensor:
    """(rows, outputs): one-hot classes, labels as 0 and 1, or numbers."""
    found = task.collate_targets(examples, 0)
    if isinstance(task.target, ClassTarget):
        return F.one_hot(found, task.classes).float()
    return found.float().reshape(len(examples), -1)


def _majority_name(task: OwnTask) -> str:
    return "mean" if isinstance(task.target, NumberTarget) else "majority"


def _majority(task: OwnTask, wanted: Tensor) -> Tensor:
    """The same output for every row."""
    rates = wanted.mean(dim=0)
    return rates - 0.5 if isinstance(task.target, LabelsTarget) else rates


def _losses(task: OwnTask) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    if isinstance(task.target, NumberTarget):
        return squared_loss
    return sigmoid_loss if isinstance(task.target, LabelsTarget) else softmax_loss


# losses of a linear model: the mean over rows, and its gradient with respect to the outputs


def softmax_loss(outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of one class."""
    logs = outputs.log_softmax(dim=1)
    return -(wanted * logs).sum() / len(wanted), (logs.exp() - wanted) / len(wanted)


def sigmoid_loss(outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of labels that are each there or not, summed over labels."""
    total = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="sum")
    return total / len(wanted), (outputs.sigmoid() - wanted) / len(wanted)


def squared_loss(outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Half the squared error."""
    error = outputs - wanted
    return error.square().sum() / 2 / len(wanted), error / len(wanted)


# features


class SparseMatrix:
    """A matrix of which few entries are not zero, with fast products.

    Args:
        rows: of the entries, sorted.
        columns: of the entries.
        values: of the entries.
        shape: rows and columns in all.
    """

    def __init__(
        self,
        rows: NDArray[np.integer],
        columns: NDArray[np.integer],
        values: NDArray[np.floating],
        shape: tuple[int, int],
    ) -> None:
        self.shape = shape
        order = np.argsort(columns, kind="stable")
        self._rows = _compressed(rows, columns, values, shape[0])
        self._columns = _compressed(columns[order], rows[order], values[order], shape[1])

    def times(self, weight: Tensor) -> Tensor:
        """The product with (columns, outputs)."""
        return _multiply(self._rows, weight)

    def transposed_times(self, rows: Tensor) -> Tensor:
        """The product of the transposed matrix with (rows, outputs)."""
        return _multiply(self._columns, rows)


def _compressed(
    rows: NDArray[np.integer], columns: NDArray[np.integer], values: NDArray[np.floating], count: int
) -> tuple[Tensor, Tensor, Tensor]:
    starts = np.searchsorted(rows, np.arange(count))
    return (
        torch.from_numpy(columns.astype(np.int64)),
        torch.from_numpy(starts.astype(np.int64)),
        torch.from_numpy(values.astype(np.float32)),
    )


def _multiply(part: tuple[Tensor, Tensor, Tensor], dense: Tensor) -> Tensor:
    columns, starts, values = part
    return F.embedding_bag(columns, dense, starts, mode="sum", per_sample_weights=values)


def _features(
    task: OwnTask, learn: Sequence[Example], test: Sequence[Example], outputs: int
) -> tuple[str, tuple[SparseMatrix, SparseMatrix] | None]:
    """The name of a baseline and the features of rows to learn from and to score."""
    if task.vocab is None:
        return "summary statistics", _statistics(learn, test)
    terms = Terms(task)
    most = max(1, min(MAX_TERMS, MAX_WEIGHTS // outputs))
    return terms.name, weigh_terms(terms.of(learn, grow=True), terms.of(test), len(learn), len(test), most)


class Terms:
    """The terms of texts as numbers: words and pairs of neighboring words.

    Of strings of symbols, triples and quadruples of symbols; of tokens, tokens and pairs of them.
    """

    def __init__(self, task: OwnTask) -> None:
        self.task = task
        self.words: dict[str, int] = {}

    @property
    def name(self) -> str:
        """What to call a model of them."""
        if self.task.source.name == "symbols":
            return "bag of triples"
        return "bag of words" if self.task.text_bytes else "bag of tokens"

    def of(
        self, examples: Sequence[Example], grow: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row of each term, and the term; a new word counts only if the vocabulary may grow."""
        rows, terms = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, example in enumerate(examples):
            for salt, inputs in ((0, example.inputs), (_SECOND, example.second)):
                if inputs is None:
                    continue
                ids = self._ids(inputs, grow)
                pairs = (ids[:-1] + 1 << _PAIR) | ids[1:]
                known = [ids[ids >= 0], pairs[(ids[:-1] >= 0) & (ids[1:] >= 0)]]
                found = np.concatenate(known) | salt
                terms.append(found)
                rows.append(np.full(len(found), row, np.int64))
        return np.concatenate(rows), np.concatenate(terms)

    def _ids(self, inputs: NDArray[Any], grow: bool) -> NDArray[np.int64]:
        if self.task.text_bytes:
            words = _WORD.findall(bytes(inputs.astype(np.uint8)).decode(errors="replace").lower())
            if grow:
                return np.array([self.words.setdefault(w, len(self.words)) for w in words], np.int64)
            return np.array([self.words.get(w, -1) for w in words], np.int64)
        ids = inputs.astype(np.int64)
        if self.task.source.name == "symbols":
            base = int(self.task.vocab or 1)
            return ids[:-2] * base * base + ids[1:-1] * base + ids[2:] if len(ids) > 2 else ids[:0]
        return ids


Found = tuple[NDArray[np.int64], NDArray[np.int64]]


def weigh_terms(
    learn: Found, test: Found, learn_rows: int, test_rows: int, most: int
) -> tuple[SparseMatrix, SparseMatrix] | None:
    """TF-IDF of terms: sublinear counts, smooth inverse document frequency, rows of length 1.

    Args:
        learn: row and term of every occurrence in the rows to learn from.
        test: the same of the rows to score.
        learn_rows: number of rows to learn from.
        test_rows: number of rows to score.
        most: terms to keep; those in most rows.

    Returns:
        Both matrices; None if no term is left.
    """
    known, numbers = np.unique(learn[1], return_inverse=True)
    cells = np.unique(learn[0] * max(len(known), 1) + numbers)
    frequency = np.bincount(cells % max(len(known), 1), minlength=len(known))
    least = 2 if learn_rows >= 100 else 1
    kept = np.flatnonzero(frequency >= least)
    kept = np.sort(kept[np.argsort(-frequency[kept], kind="stable")[:most]])
    if not len(kept):
        return None
    known = known[kept]
    rarity = np.log((1 + learn_rows) / (1 + frequency[kept])) + 1
    return _weighed(learn, known, rarity, learn_rows), _weighed(test, known, rarity, test_rows)


def _weighed(found: Found, known: NDArray[np.int64], rarity: NDArray[np.float64], rows: int) -> SparseMatrix:
    place = np.minimum(np.searchsorted(known, found[1]), len(known) - 1)
    there = known[place] == found[1]
    cells, counts = np.unique(found[0][there] * len(known) + place[there], return_counts=True)
    row, column = cells // len(known), cells % len(known)
    values = (1 + np.log(counts)) * rarity[column]
    norms = np.sqrt(np.bincount(row, weights=values**2, minlength=rows))
    return SparseMatrix(row, column, values / norms[row], (rows, len(known)))


def _statistics(learn: Sequence[Example], test: Sequence[Example]) -> tuple[SparseMatrix, SparseMatrix]:
    """A few numbers per channel, in units of their standard deviation over the rows to learn from."""

    def of(example: Example) -> NDArray[np.float64]:
        values = np.asarray(example.inputs, np.float64)
        parts = [values.mean(0), values.std(0), values.min(0), values.max(0), values[0], values[-1]]
        return np.concatenate([*parts, [np.log(len(values))]])

    one, two = np.stack([of(e) for e in learn]), np.stack([of(e) for e in test])
    mean, std = one.mean(0), one.std(0)
    std[std < 1e-9] = 1.0
    return _dense((one - mean) / std), _dense((two - mean) / std)


def _dense(values: NDArray[np.float64]) -> SparseMatrix:
    rows, columns = np.indices(values.shape)
    return SparseMatrix(rows.reshape(-1), columns.reshape(-1), values.reshape(-1), values.shape)


def fit_linear(
    features: SparseMatrix,
    wanted: Tensor,
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    strength: float = STRENGTH,
) -> tuple[Tensor, Tensor]:
    """Weights (columns, outputs) and biases of a linear model with a penalty on squared weights, by L-BFGS.

    Args:
        features: of the rows.
        wanted: (rows, outputs).
        loss: the mean loss of some outputs, and its gradient.
        strength: inverse of the penalty.
    """
    rows, columns = features.shape
    weight = torch.zeros(columns, wanted.shape[1], requires_grad=True)
    bias = torch.zeros(wanted.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=ITERATIONS,
        history_size=8,
        tolerance_grad=1e-5,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )
    penalty = 1 / (strength * rows)

    @torch.no_grad()
    def closure() -> Tensor:
        value, gradient = loss(features.times(weight) + bias, wanted)
        weight.grad = features.transposed_times(gradient) + penalty * weight
        bias.grad = gradient.sum(dim=0)
        return value + penalty / 2 * weight.square().sum()

    optimizer.step(closure)
    return weight.detach(), bias.detach()


# tags


def _tag_baselines(
    task: OwnTask, learn: Sequence[Example], test: Sequence[Example]
) -> dict[str, dict[str, float]]:
    """The tag that is most frequent of all, and the tag that each word or token has most often."""
    count = task.classes
    total = np.zeros(count, np.int64)
    seen: dict[Any, NDArray[np.int64]] = {}
    for example in learn:
        tags = np.asarray(example.target)
        total += np.bincount(tags, minlength=count)
        for key, first, end in _pieces(task, example):
            found = seen.setdefault(key, np.zeros(count, np.int64))
            found += np.bincount(tags[first:end], minlength=count)
    usual = int(total.argmax())
    best = {key: int(found.argmax()) for key, found in seen.items()}
    name = "tag per word" if task.text_bytes else "tag per token"
    sums: dict[str, dict[str, Tensor]] = {"majority": {}, name: {}}
    for example in test:
        length = len(example.inputs)
        said = np.full(length, usual)
        for key, first, end in _pieces(task, example):
            said[first:end] = best.get(key, usual)
        answers = {"majority": np.full(length, usual), name: said}
        for which, tags in answers.items() if task.vocab is not None else [("majority", answers["majority"])]:
            logits = F.one_hot(torch.from_numpy(tags), count).float()[None]
            scores = task.target.score(logits, task.collate_targets([example], length), task.facts)
            for metric, value in scores.items():
                sums[which][metric] = sums[which].get(metric, torch.zeros(2).double()) + value
    return {
        which: task.target.summarize({k: float(a) / max(float(b), 1e-12) for k, (a, b) in parts.items()})
        for which, parts in sums.items()
        if parts
    }


def _pieces(task: OwnTask, example: Example) -> Iterable[tuple[Any, int, int]]:
    """Words of a text, or other tokens, with their places; what is between words counts byte by byte."""
    if not task.text_bytes:
        if task.vocab is not None:
            yield from ((int(token), i, i + 1) for i, token in enumerate(example.inputs))
        return
    data = bytes(example.inputs.astype(np.uint8))
    last = 0
    for word in re.finditer(rb"[0-9A-Za-z_\x80-\xff]+", data):
        yield from ((data[i : i + 1], i, i + 1) for i in range(last, word.start()))
        yield word.group().lower(), word.start(), word.end()
        last = word.end()
    yield from ((data[i : i + 1], i, i + 1) for i in range(last, len(data)))
