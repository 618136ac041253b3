"""Classifiers, regressors and taggers of sequences, as scikit-learn's users know them.

    clf = SequenceClassifier(minutes=5)
    clf.fit(X, y)                       # texts, lists of events, arrays (time, channels), a pandas column
    clf.predict(X); clf.predict_proba(X); clf.score(X, y); print(clf.summary()); clf.explain(X[0])
    clf.save("model"); SequenceClassifier.load("model")

They learn exactly what `seqboat train` learns, and save what it saves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from seqboat.core.checks import require
from seqboat.own.fit import Result
from seqboat.own.records import Values
from seqboat.own.session import TASKS, closing_lines, configure, fit_config, learn, split_settings, write_run
from seqboat.own.task import OwnTask
from seqboat.predict import Predictor
from seqboat.run import Run


class Token(NamedTuple):
    """What a token did for an answer."""

    text: str
    """the word, or the steps of a patch"""
    share: float
    """how much the score of the answer falls without it"""
    attended: bool
    """whether it attended to others, and others to it"""


class _SequenceEstimator(BaseEstimator):
    """What the three have in common.

    Args:
        minutes: for the whole of `fit`, within a tenth.
        tokens: "words" or "bytes" of texts; lists of words and numbers stay what they are.
        max_length: longest sequence in words, bytes or steps; None cuts nothing below 8,192 tokens.
        validation_fraction: of the rows, to choose by.
        early_stopping: whether to stop when validation gains nothing for a third of the time.
        class_weight: None or "balanced", or weights by class; only of a classifier.
        n_jobs: threads; None leaves torch's number.
        verbose: 0 says nothing, 1 shows a bar on a terminal and the outcome, 2 also what was read.
        random_state: of the initial weights and the order of rows.
        settings: others by name, as `--set` of `seqboat train` takes them: {"steps": 300, "d_model": 128}.
    """

    _task: ClassVar[str]

    def __init__(
        self,
        *,
        minutes: float = 5,
        tokens: str = "words",
        max_length: int | None = None,
        validation_fraction: float = 0.1,
        early_stopping: bool = True,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        n_jobs: int | None = None,
        verbose: int = 1,
        random_state: int | np.random.RandomState | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.minutes = minutes
        self.tokens = tokens
        self.max_length = max_length
        self.validation_fraction = validation_fraction
        self.early_stopping = early_stopping
        self.class_weight = class_weight
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.random_state = random_state
        self.settings = settings

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        tags.non_deterministic = True
        return tags

    # learning

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Learn from rows.

        Args:
            X: texts, lists of words, arrays (time, channels) with NaN for gaps, a 3-d array (rows, time, channels), a
                2-d array of series with one channel, or a pandas column.
            y: one answer for each.
            groups: of the rows, such as patients: those of a group are learned from together, or validated on.
        """
        of_fit, of_task, others = split_settings(self.settings or {})
        settings = fit_config({"early_stopping": self.early_stopping, **of_fit}, minutes=self.minutes)
        started = settings.now()
        rows = read_rows(X)
        answers = self._read_answers(y)
        if len(rows) != len(answers):
            raise ValueError(f"X and y must have the same length, got {len(rows)} and {len(answers)}")
        if groups is not None and len(groups) != len(rows):
            raise ValueError(f"groups must have one entry for each row, got {len(groups)} and {len(rows)}")
        self._set_n_features(X)
        config = TASKS[self._task](
            tokens=self.tokens,
            max_length=self.max_length,
            holdout=self.validation_fraction,
            strict=True,
            group_column=None if groups is None else "group",
            **self._task_fields(),
        )
        values = Values(rows, answers, config, None if groups is None else list(groups))
        random = self.random_state
        seed = random if isinstance(random, int) else int(check_random_state(random).randint(2**31 - 1))
        sets = [f"--task.{name}={value}" for name, value in of_task.items()]
        with _threads(self.n_jobs):
            task, run_config = configure(config, values, [f"--seed={seed}", *sets, *others])
            self._prepare(task)
            shown = _Shown(self.verbose)
            found = learn(task, run_config, settings, started=started, tell=shown.tell, show=shown.show)
            shown.close()
        task.forget()
        self.task_: OwnTask = task
        self.result_: Result = found.result
        self.model_ = found.result.model
        self.n_iter_ = int(found.result.record["steps"])
        if self.verbose:
            for line in closing_lines(found.result.record):
                print(line, file=sys.stderr)
        return self

    def _task_fields(self) -> dict[str, Any]:
        return {}

    def _prepare(self, task: OwnTask) -> None:
        """Change a task before anything is learned."""

    def _read_answers(self, y: Any) -> list[Any]:
        require(y is not None, "requires y to be passed, but the target y is None")
        return list(getattr(y, "tolist", lambda: y)())

    def _set_n_features(self, X: Any) -> None:
        if isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "fiub":
            self.n_features_in_ = X.shape[1]

    # answering

    def _scores(self, X: Any) -> list[torch.Tensor]:
        check_is_fitted(self, "model_")
        rows = read_rows(X)
        width = getattr(self, "n_features_in_", None)
        if width is not None and isinstance(X, np.ndarray) and X.ndim == 2 and X.shape[1] != width:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting {width} features as input"
            )
        with _threads(self.n_jobs):
            scores = Predictor((self.task_, self.model_)).logits(rows)
        for number, row in enumerate(scores):
            if not bool(torch.isfinite(row).all()):
                raise ValueError(
                    f"X[{number}]: the model's output is not finite: look for extreme values in it"
                )
        return scores

    # what it knows

    def summary(self) -> str:
        """What was read and cut, which baselines stand beside the model, who won, and what attention did."""
        from seqboat.own.describe import DataSummary

        check_is_fitted(self, "model_")
        record = self.result_.record
        known = record.get("data")
        lines = [] if known is None else DataSummary(**known).lines()
        return "\n".join([*lines, *closing_lines(record)])

    def explain(self, x: Any) -> list[Token]:
        """Each token of one input, with what the score of the answer loses without it, and whether it attended.

        A word is replaced by one that nobody knows, a patch of steps by the mean.
        """
        check_is_fitted(self, "model_")
        (row,) = read_rows([x])
        with _threads(self.n_jobs):
            return explain_input(self.task_, self.model_, row)

    def save(self, folder: str | Path) -> Path:
        """Write the model as a run: `seqboat predict`, `report` and `explain` take the folder."""
        check_is_fitted(self, "model_")
        folder = Path(folder)
        known = folder.exists() and (folder / "run.json").is_file()
        require(
            known or not folder.exists() or not any(folder.iterdir()),
            f"{folder} holds other files: name a new folder",
        )
        write_run(folder, self.task_, self.result_, self._said())
        return folder

    def _said(self) -> dict[str, Any]:
        """What an estimator keeps beside the run."""
        values = self.get_params()
        random = self.random_state
        values["random_state"] = random if isinstance(random, int) else None
        return {
            "estimator": type(self).__name__,
            "parameters": values,
            "features": getattr(self, "n_features_in_", None),
        }

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The estimator that was saved, or one for a folder that `seqboat train` made."""
        run = Run(folder)
        task = run.task
        require(
            isinstance(task, OwnTask) and task.name == cls._task,
            f"{folder} holds a model of the task {task.name}: {cls.__name__} loads {cls._task}",
        )
        assert isinstance(task, OwnTask)
        about = run.about
        said = about.get("estimator") or {}
        known = {
            name: value for name, value in said.get("parameters", {}).items() if name in cls().get_params()
        }
        found = cls(**known)
        found.task_, found.model_ = task, run.model
        found.result_ = Result(run.model, run.config, run.step, about)
        found.n_iter_ = int(about.get("steps", run.step))
        if said.get("features") is not None:
            found.n_features_in_ = int(said["features"])
        found._loaded()
        return found

    def _loaded(self) -> None:
        """Set what follows from the task."""


class SequenceClassifier(ClassifierMixin, _SequenceEstimator):
    """One class for each sequence.

    >>> from seqboat import SequenceClassifier
    >>> X, y = ["first last", "last first"] * 20, ["up", "down"] * 20
    >>> model = SequenceClassifier(random_state=0, verbose=0, settings={"steps": 4}).fit(X, y)
    >>> model.predict_proba(X[:3]).shape
    (3, 2)
    """

    __doc__ = f"{__doc__}\n\n{_SequenceEstimator.__doc__}"
    _task = "classify"

    def _read_answers(self, y: Any) -> list[Any]:
        from sklearn.utils import column_or_1d
        from sklearn.utils.multiclass import check_classification_targets

        require(y is not None, "requires y to be passed, but the target y is None")
        y = column_or_1d(np.asarray(y), warn=True)
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise ValueError("Input y contains NaN or infinity")
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least two classes, got one class: {self.classes_[0]!r}"
            )
        # numbers in the order of classes_, so that labels need not be text
        width = len(str(len(self.classes_)))
        return [f"{code:0{width}}" for code in codes]

    def _prepare(self, task: OwnTask) -> None:
        names = [str(name) for name in self.classes_.tolist()]
        weight = self.class_weight
        if weight is not None and weight != "balanced":
            require(
                isinstance(weight, Mapping),
                f'class_weight must be None, "balanced" or a dict, got {weight!r}',
            )
            facts = task.facts
            task.facts = {
                **facts,
                "weights": [float(weight.get(name, 1.0)) for name in self.classes_.tolist()],
            }
        task.rename(names)

    def _task_fields(self) -> dict[str, Any]:
        return {"class_weights": "balanced" if self.class_weight == "balanced" else "none"}

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of every class, in the order of `classes_`."""
        scores = torch.stack(self._scores(X)).double()
        return scores.softmax(dim=-1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def _said(self) -> dict[str, Any]:
        return {**super()._said(), "classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _loaded(self) -> None:
        said = self.result_.record.get("estimator") or {}
        names = said.get("classes", list(self.task_.labels or ()))
        self.classes_ = np.array(names, dtype=said.get("dtype"))


class SequenceRegressor(RegressorMixin, _SequenceEstimator):
    """One number for each sequence.

    >>> import numpy as np
    >>> from seqboat import SequenceRegressor
    >>> X = np.random.default_rng(0).random((40, 30))
    >>> model = SequenceRegressor(random_state=0, verbose=0, settings={"steps": 4}).fit(X, X.sum(axis=1))
    >>> model.predict(X[:3]).shape
    (3,)
    """

    __doc__ = f"{__doc__}\n\n{_SequenceEstimator.__doc__}"
    _task = "regress"

    def _read_answers(self, y: Any) -> list[Any]:
        from sklearn.utils import column_or_1d

        require(y is not None, "requires y to be passed, but the target y is None")
        y = column_or_1d(np.asarray(y), warn=True)
        if y.dtype == object:
            try:
                y = y.astype(np.float64)
            except (TypeError, ValueError):
                raise ValueError("Unknown label type: y must be numbers, got objects that are none") from None
        require(y.dtype.kind in "fiub", f"y must be numbers, got {y.dtype}")
        if not np.isfinite(y.astype(np.float64)).all():
            raise ValueError("Input y contains NaN or infinity")
        return y.astype(np.float64).tolist()

    def predict(self, X: Any) -> NDArray[np.float64]:
        """A number for each row, in the units of y."""
        scores = torch.stack(self._scores(X)).double()[:, 0].numpy()
        facts = self.task_.facts
        return scores * facts["target_std"] + facts["target_mean"]


class SequenceTagger(_SequenceEstimator):
    """A tag for each word or step: y holds a list of tags for each row, or of spans (start, end, label) for texts.

    >>> from seqboat import SequenceTagger
    >>> X, y = [["Ann", "left"], ["we", "left"]] * 20, [["NAME", "O"], ["O", "O"]] * 20
    >>> SequenceTagger(random_state=0, verbose=0, settings={"steps": 4}).fit(X, y).predict([["Ann", "left"]])
    [['NAME', 'O']]
    """

    __doc__ = f"{__doc__}\n\n{_SequenceEstimator.__doc__}"
    _task = "tag"

    def predict(self, X: Any) -> list[list[Any]]:
        """The tags of each row; of texts, spans (start, end, label)."""
        rows = read_rows(X)
        scores = self._scores(rows)
        found: list[list[Any]] = []
        for row, logits in zip(rows, scores, strict=True):
            text = row if isinstance(row, str) else None
            answer = self.task_.answer(logits, text)
            spans = answer.get("spans")
            found.append(
                answer["tags"] if spans is None else [(s["start"], s["end"], s["label"]) for s in spans]
            )
        return found

    def score(self, X: Any, y: Any) -> float:
        """The share of the tags that are right; of spans, those that are in either and in both."""
        said, wanted = self.predict(X), [list(row) for row in y]
        if all(isinstance(tag, str) for row in said for tag in row) and any(said):
            pairs = [
                (a, str(b))
                for one, two in zip(said, wanted, strict=True)
                for a, b in zip(one, two, strict=False)
            ]
            return float(accuracy_score(*zip(*pairs, strict=True))) if pairs else 0.0
        one = {(i, *span) for i, row in enumerate(said) for span in row}
        two = {(i, *span) for i, row in enumerate(wanted) for span in row}
        return 2 * len(one & two) / max(len(one) + len(two), 1)


def read_rows(X: Any) -> list[Any]:
    """Rows of whatever was given: texts, lists of words, or arrays (time, channels)."""
    if isinstance(X, str | bytes):
        raise ValueError("X must be a list of texts or series, got one text: put it in a list, [text]")
    if hasattr(X, "columns") and hasattr(X, "iloc"):
        numbers = all(getattr(kind, "kind", "O") in "fiub" for kind in X.dtypes)
        require(
            len(X.columns) == 1 or numbers,
            f"X must be one column, got {len(X.columns)}: name it, frame['text']",
        )
        X = X.to_numpy() if numbers else X.iloc[:, 0]
    if hasattr(X, "tocsr"):
        raise TypeError("Sparse data was passed, but dense data is required: use X.toarray()")
    if isinstance(X, torch.Tensor):
        X = X.detach().cpu().numpy()
    if hasattr(X, "__array__") and not isinstance(X, np.ndarray | list):
        X = np.asarray(X)
    if isinstance(X, np.ndarray):
        if np.iscomplexobj(X):
            raise ValueError("Complex data not supported")
        if X.ndim < 1 or (X.ndim == 1 and X.dtype.kind in "fiub"):
            raise ValueError(
                "Expected 2D array or a list of series, got a flat array. Reshape your data: X.reshape(-1, 1) for "
                "series of one step, X.reshape(1, -1) for one series"
            )
        if X.ndim == 2 and X.dtype.kind in "fiub":
            if X.shape[1] == 0:
                raise ValueError(f"0 feature(s) (shape={X.shape}) while a minimum of 1 is required.")
            X = X.astype(np.float64)[:, :, None]
        elif X.ndim > 3:
            raise ValueError(f"X must have the shape (rows, time, channels), got {X.shape}")
        rows = [row.tolist() if row.dtype.kind in "OU" else row for row in X] if X.ndim > 1 else X.tolist()
    else:
        rows = [row.detach().cpu().numpy() if isinstance(row, torch.Tensor) else row for row in X]
    if len(rows) == 0:
        raise ValueError("X has no rows: 0 sample(s) while a minimum of 1 is required.")
    for number, row in enumerate(rows):
        if isinstance(row, np.ndarray) and row.dtype.kind == "f" and np.isinf(row).any():
            raise ValueError(f"X[{number}] contains infinity: use NaN for gaps")
        if not isinstance(row, str | list | tuple | np.ndarray):
            raise ValueError(
                f"X[{number}] must be a text, a list of words or an array, got {type(row).__name__}"
            )
    return rows


@torch.no_grad()
def explain_input(task: OwnTask, model: torch.nn.Module, value: Any, most: int = 512) -> list[Token]:
    """What each token of an input does for the answer; see `explain`."""
    from seqboat.own.inputs import split_words
    from seqboat.tasks.task import Example

    query = task.read_input(value)
    inputs = np.asarray(query.inputs)

    def run(rows: Sequence[NDArray[Any]]) -> tuple[torch.Tensor, Any]:
        batch = task.collate_inputs([Example(row, 0) for row in rows])
        out = model(batch.inputs, batch.mask)
        return out.logits.double(), out.routings

    logits, routings = run([inputs])
    active = np.zeros(len(inputs), bool)
    for routing in routings:
        if routing is not None:
            active |= routing.active[0].any(dim=-1).numpy()
    tagging, number = task.kind == "tag", task.metric == "rmse"
    best = None if number or tagging else int(logits[0].argmax())
    shares = np.zeros(len(inputs))
    places = np.arange(len(inputs)) if len(inputs) <= most else np.flatnonzero(active)[:most]
    without = _without(task, inputs)
    for start in range(0, 0 if tagging else len(places), 32):
        some = places[start : start + 32]
        rows = []
        for place in some:
            row = inputs.copy()
            row[place] = without
            rows.append(row)
        scores = run(rows)[0]
        if number:
            shares[some] = ((logits[0, 0] - scores[:, 0]) * task.facts["target_std"]).numpy()
        else:
            shares[some] = (logits.log_softmax(-1)[0, best] - scores.log_softmax(-1)[:, best]).numpy()
    if isinstance(value, np.ndarray) or task.vocab is None:
        patch = int(task.facts.get("patch", 1))
        words = [f"{i * patch}-{(i + 1) * patch - 1}" if patch > 1 else str(i) for i in range(len(inputs))]
    elif task.text_bytes:
        words = [chr(i) for i in inputs]
    else:
        words = split_words(value, False)[: len(inputs)]
    return [Token(*token) for token in zip(words, shares.tolist(), active.tolist(), strict=True)]


def _without(task: OwnTask, inputs: NDArray[Any]) -> Any:
    """What stands in for a token: an unknown word, a space, or the mean where nothing was observed."""
    if task.vocab is None:
        return np.zeros(inputs.shape[1], inputs.dtype)
    return 32 if task.text_bytes else 0


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """A number of threads inside the block; -1 for all processors."""
    before = torch.get_num_threads()
    if count is not None:
        import os

        require(count == -1 or count > 0, f"n_jobs must be positive or -1, got {count}")
        torch.set_num_threads(
            count
            if count > 0
            else len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Shown:
    """Progress of a fit, as much as is asked for."""

    def __init__(self, verbose: int) -> None:
        from seqboat.cli.train import ProgressBar

        self.verbose = verbose
        self.bar = ProgressBar(sys.stderr) if verbose else None

    def tell(self, line: str) -> None:
        if self.bar is not None and self.verbose > 1:
            self.bar.tell(line)

    def show(self, progress: Any) -> None:
        if self.bar is not None and (self.verbose > 1 or self.bar.moves):
            self.bar.show(progress)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
