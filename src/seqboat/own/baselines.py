"""The simple thing: a model that is fitted in seconds, stands beside a network and is part of its answers.

    texts, events      TF-IDF of words and pairs of words, then logistic or ridge regression
    numbers            summary statistics of each channel, then the same, or gradient boosting, whichever is better
    tags               the tag that each word has most often

scikit-learn fits them; what they learned becomes plain tensors, stored with the weights, so that a saved model holds
no code. The training rows get scores of models that have not seen them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.core.extras import check_installed
from seqboat.own.inputs import BUCKETS, Facts
from seqboat.own.targets import LabelsTarget, NumberTarget
from seqboat.tasks.task import IGNORE

if TYPE_CHECKING:
    from seqboat.own.task import OwnTask

FOLDS = 3
MAX_TERMS = 1 << 18
"""Terms that are known at most: those in most rows."""
MAX_WEIGHTS = 1 << 21
LINEAR_ROWS = 20_000
"""Rows that a linear model learns from at most."""
TREE_ROWS = 4_000
TREES = 150
DEPTH = 4


class Fitted(NamedTuple):
    """A baseline."""

    name: str
    about: dict[str, Any]
    """what `build_baseline` needs to make an empty one"""
    module: nn.Module
    """scores (batch, outputs), or (batch, time, outputs) of tags, from inputs and mask"""
    unseen: NDArray[np.float32] | list[NDArray[np.float32]]
    """scores of the training rows by models that have not seen them"""


class Offset(nn.Module):
    """What a model's answers begin with: the scores of a baseline, times a share that is learned.

    Args:
        baseline: scores from inputs and mask.
    """

    def __init__(self, baseline: nn.Module) -> None:
        super().__init__()
        self.baseline = baseline
        self.share = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The scores of the baseline, times the share."""
        with torch.no_grad():
            scores = self.baseline(inputs, mask)
        return scores * self.share


def build_baseline(about: Mapping[str, Any], task: OwnTask) -> nn.Module:
    """An empty baseline, to load."""
    kinds: dict[str, Callable[..., nn.Module]] = {
        "terms": Terms,
        "linear": Linear,
        "trees": Trees,
        "tags": TagTable,
    }
    settings = {name: value for name, value in about.items() if name != "kind"}
    require(about.get("kind") in kinds, f"baseline {about.get('kind')!r} is unknown")
    if about["kind"] in ("linear", "trees"):
        settings["facts"] = task.facts
    return kinds[about["kind"]](**settings)


# texts


class Terms(nn.Module):
    """A linear model of TF-IDF: sublinear counts, smooth inverse document frequency, rows of length 1.

    Args:
        terms: how many are known.
        outputs: scores.
        vocab: token ids.
        first: the first id that counts; those before it are shared by words that are hardly known.
        orders: lengths of terms in tokens.
    """

    terms: Tensor
    rarity: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, terms: int, outputs: int, vocab: int, first: int, orders: Sequence[int]) -> None:
        super().__init__()
        self.vocab, self.first, self.orders = vocab, first, tuple(orders)
        self.register_buffer("terms", torch.zeros(terms, dtype=torch.int64))
        self.register_buffer("rarity", torch.zeros(terms))
        self.register_buffer("weight", torch.zeros(terms, outputs))
        self.register_buffer("bias", torch.zeros(outputs))

    def codes(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The row and the number of every term in some tokens, which stand row by row."""
        found, where = [], []
        code = torch.zeros_like(ids)
        good = torch.ones_like(ids, dtype=torch.bool)
        for order in range(1, max(self.orders) + 1):
            count = len(ids) - order + 1
            if count <= 0:
                break
            last = ids[order - 1 :]
            code = code[:count] * (self.vocab + 1) + last + 1
            good = good[:count] & (last >= self.first) & (rows[order - 1 :] == rows[:count])
            if order in self.orders:
                found.append(code[good])
                where.append(rows[:count][good])
        return torch.cat(where), torch.cat(found)

    def features(self, rows: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and value of each entry of the matrix of known terms."""
        place = torch.searchsorted(self.terms, codes).clamp(max=max(len(self.terms) - 1, 0))
        there = self.terms[place] == codes if len(self.terms) else torch.zeros_like(codes, dtype=torch.bool)
        cells, counts = torch.unique(rows[there] * len(self.terms) + place[there], return_counts=True)
        row, column = cells // max(len(self.terms), 1), cells % max(len(self.terms), 1)
        value = (1 + torch.log(counts.double())) * self.rarity[column].double()
        size = int(row.max()) + 1 if len(row) else 0
        norm = torch.zeros(size, dtype=torch.float64, device=row.device).index_add_(0, row, value.square())
        return row, column, value / norm.sqrt()[row]

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores (batch, outputs) of ids (batch, time)."""
        numbers = torch.arange(len(inputs), device=inputs.device)[:, None].expand_as(inputs)
        real = torch.ones_like(inputs, dtype=torch.bool) if mask is None else mask
        row, column, value = self.features(*self.codes(inputs[real].long(), numbers[real]))
        found = self.bias.expand(len(inputs), -1).clone()
        return found.index_add_(0, row, value.to(found.dtype)[:, None] * self.weight[column])


def _fit_terms(
    task: OwnTask, inputs: Sequence[NDArray[Any]], targets: NDArray[Any], folds: NDArray[Any]
) -> Fitted:
    from scipy.sparse import csr_matrix

    outputs = task.classes
    words = task.source.name == "words"
    about: dict[str, Any] = {
        "terms": 0,
        "outputs": outputs,
        "vocab": int(task.vocab or 0),
        "first": BUCKETS if words else 0,
        "orders": [1, 2] if words else [1, 2, 3, 4],
    }
    model = Terms(**about)
    flat = torch.from_numpy(np.concatenate(inputs).astype(np.int64))
    lengths = torch.tensor([len(row) for row in inputs])
    rows, codes = model.codes(flat, torch.repeat_interleave(torch.arange(len(inputs)), lengths))
    known, numbers = torch.unique(codes, return_inverse=True)
    cells = torch.unique(rows * max(len(known), 1) + numbers)
    frequency = torch.bincount(cells % max(len(known), 1), minlength=len(known))
    kept = torch.nonzero(frequency >= (2 if len(inputs) >= 100 else 1)).flatten()
    most = min(MAX_TERMS, MAX_WEIGHTS // outputs)
    kept = kept[torch.argsort(-frequency[kept], stable=True)[:most]].sort().values
    about["terms"] = len(kept)
    model = Terms(**about)
    model.terms = known[kept]
    model.rarity = (torch.log((1 + len(inputs)) / (1 + frequency[kept].double())) + 1).float()
    row, column, value = model.features(rows, codes)
    matrix = csr_matrix((value.numpy(), (row.numpy(), column.numpy())), shape=(len(inputs), len(kept)))

    def fit(some: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        return _linear(task, matrix[some], targets[some], strength=10.0)

    weight, bias = fit(_at_most(np.arange(len(inputs)), LINEAR_ROWS))
    model.weight, model.bias = torch.from_numpy(weight).float(), torch.from_numpy(bias).float()
    unseen = _unseen(folds, outputs, lambda some, held: matrix[held] @ (w := fit(some))[0] + w[1])
    kind = "ridge" if isinstance(task.target, NumberTarget) else "logistic"
    return Fitted(f"TF-IDF and {kind} regression", {"kind": "terms", **about}, model, unseen)


def _linear(
    task: OwnTask, features: Any, targets: NDArray[Any], strength: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Weights (columns, outputs) and biases of a linear model."""
    from sklearn.linear_model import LogisticRegression, Ridge

    columns, outputs = features.shape[1], task.classes
    weight, bias = np.zeros((columns, outputs)), np.zeros(outputs)
    if columns == 0:
        return weight, bias
    if isinstance(task.target, NumberTarget):
        model: Any = Ridge(alpha=10 / strength).fit(features, targets)
        return model.coef_.reshape(-1, 1), np.atleast_1d(model.intercept_)
    if isinstance(task.target, LabelsTarget):
        for label in range(outputs):
            there = targets[:, label] > 0.5
            if there.any() and not there.all():
                model = LogisticRegression(C=strength, max_iter=100).fit(features, there)
                weight[:, label], bias[label] = model.coef_[0], model.intercept_[0]
            else:
                bias[label] = 5.0 if there.all() else -5.0
        return weight, bias
    weights = task.facts.get("weights")
    known = np.unique(targets)
    if len(known) < 2:
        bias[:] = np.where(np.isin(np.arange(outputs), known), 0.0, -5.0)
        return weight, bias
    model = LogisticRegression(
        C=strength, max_iter=100, class_weight=None if weights is None else {k: weights[k] for k in known}
    ).fit(features, targets)
    bias[:] = -5.0  # classes that are not among these rows
    if len(known) == 2:
        weight[:, known] = np.stack([-model.coef_[0] / 2, model.coef_[0] / 2], axis=1)
        bias[known] = [-model.intercept_[0] / 2, model.intercept_[0] / 2]
    else:
        weight[:, known], bias[known] = model.coef_.T, model.intercept_
    return weight, bias


# numbers


def statistics(inputs: Tensor, mask: Tensor | None, facts: Facts) -> Tensor:
    """A few numbers per channel of series (batch, patches, values): double, (batch, features)."""
    width, patch, gaps = len(facts["mean"]), int(facts["patch"]), bool(facts["gaps"])
    batch = len(inputs)
    x = inputs.double().reshape(batch, inputs.shape[1] * patch, -1)
    real = x.new_ones(x.shape[:2], dtype=torch.bool)
    if mask is not None:
        real = mask.repeat_interleave(patch, dim=1)
    x, there = x[..., :width], real[..., None] & (x[..., width:] > 0.5 if gaps else True)
    there = there.expand_as(x)
    count = there.sum(dim=1).clamp(min=1)
    time = torch.arange(x.shape[1], device=x.device)[None, :, None]
    zero = torch.where(there, x, 0.0)
    mean = zero.sum(dim=1) / count
    std = (torch.where(there, (x - mean[:, None]).square(), 0.0).sum(dim=1) / count).sqrt()
    low, lowest = torch.where(there, x, torch.inf).min(dim=1)
    high, highest = torch.where(there, x, -torch.inf).max(dim=1)
    some = there.any(dim=1)
    low, high = torch.where(some, low, 0.0), torch.where(some, high, 0.0)
    length = real.sum(dim=1, keepdim=True).clamp(min=1)
    both = there[:, 1:] & there[:, :-1]
    moves = torch.where(both, (x[:, 1:] - x[:, :-1]).abs(), 0.0).sum(dim=1) / both.sum(dim=1).clamp(min=1)
    parts = [mean, std, low, high, lowest / length, highest / length, moves, count / length]
    for quarter in range(4):
        inside = there & (time * 4 // length[..., None] == quarter)
        parts.append(torch.where(inside, x, 0.0).sum(dim=1) / inside.sum(dim=1).clamp(min=1))
    return torch.cat([*parts, length.log()], dim=1)


class Linear(nn.Module):
    """A linear model of summary statistics.

    Args:
        features: numbers of a series.
        outputs: scores.
        facts: of the inputs.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, features: int, outputs: int, facts: Facts) -> None:
        super().__init__()
        self.facts = {name: facts[name] for name in ("mean", "patch", "gaps")}
        self.register_buffer("weight", torch.zeros(features, outputs, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(outputs, dtype=torch.float64))

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores (batch, outputs)."""
        return (statistics(inputs, mask, self.facts) @ self.weight + self.bias).to(inputs.dtype)


class Trees(nn.Module):
    """Boosted regression trees on summary statistics.

    Args:
        trees: for each output.
        nodes: of a tree.
        outputs: scores; of two classes, one score for both.
        facts: of the inputs.
    """

    feature: Tensor
    border: Tensor
    ways: Tensor
    value: Tensor

    def __init__(self, trees: int, nodes: int, outputs: int, facts: Facts) -> None:
        super().__init__()
        self.facts = {name: facts[name] for name in ("mean", "patch", "gaps")}
        self.outputs = outputs
        columns = 1 if outputs == 2 else outputs
        self.register_buffer("feature", torch.zeros(trees, columns, nodes, dtype=torch.int64))
        self.register_buffer("border", torch.zeros(trees, columns, nodes, dtype=torch.float64))
        self.register_buffer("ways", torch.zeros(trees, columns, nodes, 2, dtype=torch.int64))
        self.register_buffer("value", torch.zeros(trees, columns, nodes, dtype=torch.float64))

    def fill(self, model: Any) -> None:
        """Take the trees of a gradient boosting of scikit-learn that starts from zero."""
        for number, row in enumerate(model.estimators_):
            for column, estimator in enumerate(row):
                tree = estimator.tree_
                count, itself = tree.node_count, np.arange(tree.node_count)
                leaf = tree.children_left < 0
                ways = np.stack([tree.children_left, tree.children_right], axis=1)
                ways = np.where(leaf[:, None], itself[:, None], ways)
                place = (number, column, slice(count))
                self.feature[place] = torch.from_numpy(np.where(leaf, 0, tree.feature).astype(np.int64))
                self.border[place] = torch.from_numpy(tree.threshold.astype(np.float64))
                self.ways[place] = torch.from_numpy(ways.astype(np.int64))
                self.value[place] = torch.from_numpy(tree.value[:, 0, 0] * model.learning_rate)

    def scores(self, features: Tensor) -> Tensor:
        """Scores (batch, outputs) of statistics."""
        trees, columns, nodes = self.feature.shape
        # scikit-learn compares in single precision
        x = features.float().double()
        node = torch.zeros(len(x), trees * columns, dtype=torch.int64, device=x.device)
        offset = torch.arange(trees * columns, device=x.device) * nodes
        for _ in range(DEPTH):
            flat = node + offset
            right = x.gather(1, self.feature.reshape(-1)[flat]) > self.border.reshape(-1)[flat]
            node = self.ways.reshape(-1, 2)[flat, right.long()]
        found = self.value.reshape(-1)[node + offset].reshape(len(x), trees, columns).sum(dim=1)
        return torch.cat([-found / 2, found / 2], dim=1) if self.outputs == 2 else found

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores (batch, outputs)."""
        return self.scores(statistics(inputs, mask, self.facts)).to(inputs.dtype)


def _fit_statistics(
    task: OwnTask, inputs: Sequence[NDArray[Any]], targets: NDArray[Any], folds: NDArray[Any]
) -> Fitted:
    rows = []
    for start in range(0, len(inputs), 256):
        batch = task._pad(inputs[start : start + 256])
        rows.append(statistics(*batch, task.facts).numpy())
    features = np.concatenate(rows)
    center, scale = features.mean(axis=0), features.std(axis=0)
    scale[scale < 1e-9] = 1.0
    even = (features - center) / scale
    outputs, number = task.classes, isinstance(task.target, NumberTarget)

    def fit(some: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        return _linear(task, even[some], targets[some], strength=1.0)

    every = np.arange(len(inputs))
    weight, bias = fit(_at_most(every, LINEAR_ROWS))
    linear = Linear(features.shape[1], outputs, task.facts)
    linear.weight = torch.from_numpy(weight / scale[:, None])
    linear.bias = torch.from_numpy(bias - (center / scale) @ weight)
    unseen = _unseen(folds, outputs, lambda some, held: even[held] @ (w := fit(some))[0] + w[1])
    about = {"kind": "linear", "features": features.shape[1], "outputs": outputs}
    name = "summary statistics and " + ("ridge" if number else "logistic") + " regression"
    found = Fitted(name, about, linear, unseen)
    if isinstance(task.target, LabelsTarget) or outputs > 20:
        return found
    boosted = _fit_trees(task, features, targets, folds)
    return (
        boosted
        if boosted is not None and _loss(task, boosted, targets) < _loss(task, found, targets)
        else found
    )


def _fit_trees(
    task: OwnTask, features: NDArray[Any], targets: NDArray[Any], folds: NDArray[Any]
) -> Fitted | None:
    from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

    outputs, number = task.classes, isinstance(task.target, NumberTarget)
    few = np.bincount(targets, minlength=outputs).min() if not number else len(targets)
    if few < 2 * FOLDS:
        return None

    def fit(some: NDArray[Any]) -> Trees:
        some = _at_most(some, TREE_ROWS)
        kind: Any = GradientBoostingRegressor if number else GradientBoostingClassifier
        model = kind(
            n_estimators=TREES,
            max_depth=DEPTH,
            subsample=0.5,
            max_features="sqrt",
            init="zero",
            random_state=0,
        ).fit(features[some], targets[some])
        trees = Trees(TREES, 2 ** (DEPTH + 1) - 1, outputs, task.facts)
        trees.fill(model)
        return trees

    unseen = _unseen(
        folds, outputs, lambda some, held: fit(some).scores(torch.from_numpy(features[held])).numpy()
    )
    about = {"kind": "trees", "trees": TREES, "nodes": 2 ** (DEPTH + 1) - 1, "outputs": outputs}
    return Fitted("summary statistics and gradient boosting", about, fit(np.arange(len(targets))), unseen)


def _loss(task: OwnTask, found: Fitted, targets: NDArray[Any]) -> float:
    total, scored = task.target.loss(
        torch.from_numpy(np.asarray(found.unseen)), torch.from_numpy(targets), task.facts
    )
    return float(total / scored)


# tags


class TagTable(nn.Module):
    """The logarithm of how often each token has each tag.

    Args:
        vocab: token ids; 0 for real values, which all count as one.
        outputs: tags.
    """

    table: Tensor

    def __init__(self, vocab: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(max(vocab, 1), outputs))

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores (batch, time, outputs)."""
        return self.table[
            inputs if inputs.dim() == 2 else inputs.new_zeros(inputs.shape[:2], dtype=torch.int64)
        ]


def _fit_tags(
    task: OwnTask, inputs: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]], folds: NDArray[Any]
) -> Fitted:
    vocab, outputs = int(task.vocab or 0), task.classes
    ids = [row.astype(np.int64) if row.ndim == 1 else np.zeros(len(row), np.int64) for row in inputs]
    targets = list(targets)
    counts = np.zeros((FOLDS, max(vocab, 1) * outputs))
    for fold in range(FOLDS):
        cells = [ids[i] * outputs + targets[i] for i in np.flatnonzero(folds == fold).tolist()]
        if cells:
            counts[fold] = np.bincount(np.concatenate(cells), minlength=counts.shape[1])

    def logarithm(seen: NDArray[Any]) -> NDArray[np.float32]:
        seen = seen.reshape(-1, outputs)
        usual = (seen.sum(axis=0) + 1) / (seen.sum() + outputs)
        return np.log((seen + 0.5 * usual) / (seen.sum(axis=1, keepdims=True) + 0.5)).astype(np.float32)

    model = TagTable(vocab, outputs)
    model.table = torch.from_numpy(logarithm(counts.sum(axis=0)))
    tables = [logarithm(counts.sum(axis=0) - counts[fold]) for fold in range(FOLDS)]
    unseen = [tables[fold][row] for fold, row in zip(folds, ids, strict=True)]
    name = f"tag per {task.source.unit.removesuffix('s')}" if vocab else "most frequent tag"
    return Fitted(name, {"kind": "tags", "vocab": vocab, "outputs": outputs}, model, unseen)


# all of them


def fit_baseline(
    task: OwnTask, inputs: Sequence[NDArray[Any]], targets: Sequence[Any], groups: NDArray[Any] | None = None
) -> Fitted:
    """Fit the simple thing.

    Args:
        task: what is learned.
        inputs: encoded training rows.
        targets: encoded.
        groups: of the rows, which stay in one fold; None without groups.
    """
    check_installed("sklearn", "own data")
    random = np.random.default_rng(0)
    if groups is None:
        folds = random.permutation(len(inputs)) % FOLDS
    else:
        names, of = np.unique(groups, return_inverse=True)
        folds = (random.permutation(len(names)) % FOLDS)[of]
    if task.kind == "tag":
        return _fit_tags(task, inputs, [np.asarray(row) for row in targets], folds)
    wanted = np.stack([np.asarray(row) for row in targets])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fit could go on a little
        found = (_fit_terms if task.vocab is not None else _fit_statistics)(task, inputs, wanted, folds)
    return _calibrated(task, found, wanted)


def _calibrated(task: OwnTask, found: Fitted, targets: NDArray[Any]) -> Fitted:
    """The same with scores as large as rows that were not seen bear out."""
    scales = np.geomspace(0.05, 2.0, 40)
    losses = [
        _loss(task, found._replace(unseen=scale * np.asarray(found.unseen)), targets) for scale in scales
    ]
    scale = float(scales[int(np.argmin(losses))])
    for name in ("weight", "bias", "value"):
        if hasattr(found.module, name):
            getattr(found.module, name).mul_(scale)
    return found._replace(unseen=(scale * np.asarray(found.unseen)).astype(np.float32))


def constant_scores(task: OwnTask, targets: Sequence[Any]) -> tuple[str, Tensor]:
    """The answer that needs no input: its name, and scores (outputs,)."""
    if task.kind == "tag":
        flat = np.concatenate([np.asarray(row) for row in targets])
        counts = np.bincount(flat[flat != IGNORE], minlength=task.classes)
        return "most frequent tag", torch.from_numpy(np.log(counts + 0.5)).float()
    wanted = np.stack([np.asarray(row) for row in targets])
    if isinstance(task.target, NumberTarget):
        return "mean", torch.tensor([float(wanted.mean())])
    if isinstance(task.target, LabelsTarget):
        rates = wanted.mean(axis=0).clip(1e-3, 1 - 1e-3)
        return "majority", torch.from_numpy(np.log(rates / (1 - rates))).float()
    counts = np.bincount(wanted, minlength=task.classes)
    return "majority", torch.from_numpy(np.log(counts + 0.5)).float()


def _unseen(
    folds: NDArray[Any], outputs: int, score: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
) -> NDArray[np.float32]:
    """Scores of each row by a model of the other folds."""
    found = np.zeros((len(folds), outputs), np.float32)
    for fold in range(FOLDS):
        held, some = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        if len(held) and len(some):
            found[held] = score(_at_most(some, LINEAR_ROWS), held)
    return found


def _at_most(rows: NDArray[Any], most: int) -> NDArray[Any]:
    return rows if len(rows) <= most else np.sort(np.random.default_rng(0).choice(rows, most, replace=False))
