"""Estimators of scikit-learn: they do what its users expect, and what the command does."""

from __future__ import annotations

import csv
import io
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator

from seqboat import SequenceClassifier, SequenceRegressor, SequenceTagger
from seqboat.cli.main import main
from seqboat.own import fit as fitting

QUICK: dict[str, Any] = {"steps": 6, "d_model": 8, "evaluations": 2}
X = [f"{'alpha beta' if i % 2 else 'beta alpha'} word{i % 7}" for i in range(60)]
Y = [("no", "yes")[i % 2] for i in range(60)]


def quick(kind: Any = SequenceClassifier, **changes: Any) -> Any:
    return kind(verbose=0, random_state=0, settings={**QUICK, **changes})


SKIPPED = {
    "check_regressors_train": "asks for a good fit of unordered columns after these few steps",
    "check_class_weight_classifiers": "asks for one class nearly alone, by weights, after these few steps",
}
"""Checks of scikit-learn that are left out, and why."""


@pytest.mark.parametrize("kind", [SequenceClassifier, SequenceRegressor])
@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn(kind: Any) -> None:
    failed = {}
    for estimator, check in estimator_checks_generator(quick(kind), legacy=True, mark=None):
        name = getattr(check, "func", check).__name__
        if name in SKIPPED:
            continue
        try:
            check(estimator)
        except SkipTest:
            pass  # scikit-learn leaves it out
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{name}: {why[:300]}" for name, why in failed.items())


def test_a_column_of_pandas_is_a_list(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    # the index is not in order
    frame = pd.DataFrame({"text": X, "label": Y}, index=range(59, -1, -1))
    model = quick().fit(frame["text"], frame["label"])
    plain = quick().fit(X, Y).predict_proba(X[:9])
    np.testing.assert_allclose(model.predict_proba(frame["text"][:9]), plain, atol=1e-4)


def test_clone_pickle_save_and_load(tmp_path: Path) -> None:
    model = quick().fit(X, Y)
    again = quick().fit(X, Y)
    probabilities = model.predict_proba(X)
    assert np.array_equal(probabilities, again.predict_proba(X))
    assert probabilities.shape == (60, 2) and np.allclose(probabilities.sum(axis=1), 1)
    assert list(model.classes_) == ["no", "yes"]
    assert clone(model).get_params() == model.get_params() and not hasattr(clone(model), "model_")
    copy = pickle.loads(pickle.dumps(model))
    assert np.array_equal(copy.predict_proba(X), probabilities)
    loaded = SequenceClassifier.load(model.save(tmp_path / "model"))
    assert np.allclose(loaded.predict_proba(X), probabilities, atol=1e-6)
    assert loaded.get_params() == model.get_params() and loaded.summary() == model.summary()
    with pytest.raises(ValueError, match="SequenceRegressor loads regress"):
        SequenceRegressor.load(tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        model.save(tmp_path / "other")
    assert "val accuracy" in model.summary() and "attention" in model.summary()


def test_tools_of_scikit_learn() -> None:
    lower = FunctionTransformer(lambda rows: [row.lower() for row in rows])
    scores = cross_val_score(make_pipeline(lower, quick()), X, Y, cv=2)
    assert scores.shape == (2,) and np.isfinite(scores).all()
    search = GridSearchCV(quick(), {"tokens": ["words", "bytes"]}, cv=2, refit=False).fit(X, Y)
    assert set(search.cv_results_["param_tokens"]) == {"words", "bytes"}
    labels = quick().fit(X, np.array([i % 2 for i in range(60)])).predict(X)
    assert labels.dtype.kind == "i"


def test_series_of_every_form() -> None:
    random = np.random.default_rng(0)
    cube = random.standard_normal((40, 12, 2))
    targets = cube[:, :, 0].sum(axis=1)
    one = quick(SequenceRegressor).fit(cube, targets).predict(cube)
    ragged = [row[: 6 + i % 7] for i, row in enumerate(cube)]
    assert np.array_equal(one, quick(SequenceRegressor).fit(list(cube), targets).predict(list(cube)))
    gaps = [np.where(random.random(row.shape) < 0.1, np.nan, row) for row in ragged]
    found = quick(SequenceRegressor).fit(gaps, targets)
    assert np.isfinite(found.predict(gaps)).all()
    shares = found.explain(gaps[0])
    assert len(shares) == 6 and all(np.isfinite(token.share) for token in shares)
    # a value that is far too large reaches no other row
    wild = [row.copy() for row in gaps]
    wild[0][0, 0] = 3e38
    assert np.allclose(found.predict(wild)[1:], found.predict(gaps)[1:], rtol=1e-5)
    with pytest.raises(ValueError, match=r"X\[3\] contains infinity"):
        found.predict([*gaps[:3], np.full((4, 2), np.inf)])
    with pytest.raises(ValueError, match="contains NaN or infinity"):
        quick(SequenceRegressor).fit(gaps, [np.nan] * 40)


def test_tags_of_words_and_spans_of_texts() -> None:
    words = [["Ann", "met", f"Bob{i % 3}"] for i in range(30)]
    tags = [["NAME", "O", "NAME"]] * 30
    tagger = quick(SequenceTagger).fit(words, tags)
    assert tagger.predict(words[:2]) == tags[:2] and tagger.score(words, tags) == 1
    texts, spans = ["Ann met us"] * 30, [[(0, 3, "NAME")]] * 30
    tagger = quick(SequenceTagger).fit(texts, spans)
    assert tagger.predict(texts[:1]) == [[(0, 3, "NAME")]] and tagger.score(texts, spans) == 1


def test_explained_words_and_groups() -> None:
    model = quick(d_model=16, steps=30).fit(X, Y, groups=[i // 6 for i in range(60)])
    tokens = model.explain("alpha beta word1")
    assert [token.text for token in tokens] == ["alpha", "beta", "word1"]
    with pytest.raises(ValueError, match="groups must have one entry for each row"):
        model.fit(X, Y, groups=[1])


def test_ctrl_c_keeps_the_best_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fitting._Fitting._train_step

    def stop(self: Any, lr: float) -> None:
        if self.step == 4:
            raise KeyboardInterrupt
        step(self, lr)

    monkeypatch.setattr(fitting._Fitting, "_train_step", stop)
    model = quick(steps=100).fit(X, Y)
    assert model.n_iter_ == 4 and model.result_.record["interrupted"]
    assert np.isfinite(model.predict_proba(X)).all()


def test_minutes_end_training() -> None:
    model = SequenceClassifier(minutes=0.05, verbose=0, settings={"d_model": 8, "clock": "processor"}).fit(
        X, Y
    )
    # the clock is the processor's: what other programs do does not matter
    assert model.result_.record["seconds"] < 2 * 60 * 0.05 + 5


def test_the_command_learns_what_python_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open("data.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text", "label"], *zip(X, Y, strict=True)])
    sets = [word for name, value in {**QUICK, "seed": 0}.items() for word in ("--set", f"{name}={value}")]
    assert main(["train", "data.csv", "--target", "label", "--out", "model", *sets]) == 0
    said = capsys.readouterr()
    assert "task        classify: column 'label' holds classes" in said.err
    assert said.out.splitlines()[-1].startswith("attention: ")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(X[:5])))
    assert main(["predict", "model", "-", "--probabilities"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    model = quick().fit(X, Y)
    ours = [float(row["p(yes)"]) for row in rows]
    assert ours == pytest.approx(model.predict_proba(X[:5])[:, 1].tolist(), abs=1e-5)
    loaded = SequenceClassifier.load("model")
    assert list(loaded.predict(X[:5])) == list(model.predict(X[:5]))
