"""Five small tables that a first user might bring, and what this package and its rivals make of them.

    python benchmarks/first_contact.py                       all five, seed 0, processor seconds as below
    python benchmarks/first_contact.py events --seeds 3      one of them, three seeds

events      which of two rare events came first, in logs of 120 to 260 events, at least 40 events apart
documents   which of two phrases came first, in texts of 3 to 6 kB, at least 1,000 bytes apart
sensors     height of the first burst after the one pulse that two channels share; decoys in every channel; gaps
adding      the sum of the two numbers that are marked, of 200
topics      one of four subjects, told by word frequencies only
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import numpy as np

SYLLABLES = "ba ce di fo gu ka le mi no pu ra se ti vo zu cha pre ster lin dor".split()  # noqa: SIM905


class Table(NamedTuple):
    """Inputs and targets to learn from and to be tested on."""

    inputs: list[Any]
    targets: list[Any]
    test_inputs: list[Any]
    test_targets: list[Any]


def _split(rows: list[tuple[Any, Any]], test: int) -> Table:
    inputs, targets = (list(part) for part in zip(*rows, strict=True))
    return Table(inputs[:-test], targets[:-test], inputs[-test:], targets[-test:])


def events(seed: int = 0, rows: int = 3_000, test: int = 1_000) -> Table:
    random = np.random.default_rng([seed, 1])
    names = [f"ev{number:02d}" for number in range(30)]
    found = []
    for _ in range(rows + test):
        length = int(random.integers(120, 261))
        log = [names[i] for i in random.integers(0, len(names), length)]
        gap = int(random.integers(40, length - 1))
        first = int(random.integers(0, length - gap))
        pair = ("open", "close") if random.random() < 0.5 else ("close", "open")
        log[first], log[first + gap] = pair
        found.append((log, f"{pair[0]} first"))
    return _split(found, test)


def words(random: np.random.Generator, count: int) -> list[str]:
    """Different words that nobody knows."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choice(SYLLABLES, int(random.integers(1, 5))))] = None
    return list(found)


def documents(seed: int = 0, rows: int = 3_000, test: int = 1_000) -> Table:
    random = np.random.default_rng([seed, 2])
    known = words(np.random.default_rng(7), 3_000)
    rates = 1 / np.arange(10, 10 + len(known))
    rates /= rates.sum()
    phrases = ("valve was opened", "pump was started")
    found = []
    for _ in range(rows + test):
        size = int(random.integers(3_000, 6_001))
        text = [known[i] for i in random.choice(len(known), size // 5, p=rates)]
        ends = np.cumsum([len(word) + 1 for word in text])
        text = text[: int(np.searchsorted(ends, size))]
        ends = ends[: len(text)]
        for word in ("valve", "pump", "opened", "started"):  # single words say nothing
            text[int(random.integers(len(text)))] = word
        first = int(random.integers(0, np.searchsorted(ends, ends[-1] - 1_100)))
        second = int(random.integers(np.searchsorted(ends, ends[first] + 1_050), len(text)))
        order = (0, 1) if random.random() < 0.5 else (1, 0)
        text.insert(second, phrases[order[1]])
        text.insert(first, phrases[order[0]])
        found.append((" ".join(text), ("valve", "pump")[order[0]] + " first"))
    return _split(found, test)


def sensors(seed: int = 0, rows: int = 2_000, test: int = 1_000) -> Table:
    random = np.random.default_rng([seed, 3])
    pulse = np.array([1.0, 2.0, 3.0, 2.0, 1.0])
    burst = np.sin(np.linspace(0, np.pi, 9)) * 4
    found = []
    for _ in range(rows + test):
        length = int(random.integers(240, 401))
        series = 0.2 * random.standard_normal((length, 3))
        places = np.sort(random.choice(np.arange(8, length - 16, 14), 7, replace=False))
        joint = int(random.integers(1, 4))  # decoys before it and bursts after it
        heights = random.uniform(0.0, 1.2, len(places))
        for number, place in enumerate(places):
            if number == joint:
                series[place : place + 5, :2] += pulse[:, None]
            elif number == joint + 1 or random.random() < 0.5:
                series[place : place + 9, 2] += burst * heights[number]
            else:
                series[place : place + 5, int(random.integers(2))] += pulse
        series[random.random(series.shape) < 0.02] = np.nan
        found.append((series, 1_000 * heights[joint + 1] + 20 * random.standard_normal()))
    return _split(found, test)


def adding(seed: int = 0, rows: int = 3_000, test: int = 1_000) -> Table:
    random = np.random.default_rng([seed, 4])
    found = []
    for _ in range(rows + test):
        values, marks = random.random(200), np.zeros(200)
        chosen = [int(random.integers(0, 100)), int(random.integers(100, 200))]
        marks[chosen] = 1
        found.append((np.stack([values, marks], axis=1), float(values[chosen].sum())))
    return _split(found, test)


def topics(seed: int = 0, rows: int = 3_000, test: int = 1_000) -> Table:
    random = np.random.default_rng([seed, 5])
    known = words(np.random.default_rng(8), 2_000)
    usual = 1 / np.arange(10, 10 + len(known))
    lean = np.exp(0.4 * np.random.default_rng(9).standard_normal((4, len(known))))
    rates = usual * lean
    rates /= rates.sum(axis=1, keepdims=True)
    found = []
    for _ in range(rows + test):
        topic = int(random.integers(4))
        size = int(random.integers(40, 120))
        text = " ".join(known[i] for i in random.choice(len(known), size, p=rates[topic]))
        found.append((text, ("north", "south", "east", "west")[topic]))
    return _split(found, test)


TABLES = {"events": events, "documents": documents, "sensors": sensors, "adding": adding, "topics": topics}
SECONDS = {"events": 60, "documents": 150, "sensors": 60, "adding": 60, "topics": 60}
"""Of processor time, for each rival."""


def score(name: str, said: Any, wanted: Any) -> float:
    """RMSE of numbers, or the share of right answers."""
    if name in ("sensors", "adding"):
        return float(np.sqrt(np.mean((np.asarray(said, float) - np.asarray(wanted, float)) ** 2)))
    return float(np.mean(np.asarray(said) == np.asarray(wanted)))


def ours(name: str, table: Table, seed: int) -> float:
    """The estimator with its defaults."""
    from seqboat import SequenceClassifier, SequenceRegressor

    kind = SequenceRegressor if name in ("sensors", "adding") else SequenceClassifier
    settings = {"clock": "processor"}
    model = kind(minutes=SECONDS[name] / 60, verbose=1, random_state=seed, settings=settings)
    model.fit(table.inputs, table.targets)
    return score(name, model.predict(table.test_inputs), table.test_targets)


def simple(name: str, table: Table, seed: int) -> float:
    """TF-IDF with logistic regression, or boosting on a few statistics of each channel."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    if name in ("sensors", "adding"):

        def summed(rows: list[Any]) -> Any:
            parts = (np.nanmean, np.nanstd, np.nanmin, np.nanmax)
            return np.stack([np.concatenate([part(row, axis=0) for part in parts]) for row in rows])

        boosted = HistGradientBoostingRegressor(random_state=seed).fit(summed(table.inputs), table.targets)
        return score(name, boosted.predict(summed(table.test_inputs)), table.test_targets)
    texts = [
        [row if isinstance(row, str) else " ".join(row) for row in rows]
        for rows in (table.inputs, table.test_inputs)
    ]
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    model = make_pipeline(vectors, LogisticRegression(C=10, max_iter=300)).fit(texts[0], table.targets)
    return score(name, model.predict(texts[1]), table.test_targets)


def main() -> None:
    """Print a line for every table, seed and rival."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for name in options.names or TABLES:
        for seed in range(options.seeds):
            table = TABLES[name](seed)
            for rival in (simple, ours):
                begun = time.process_time()
                found = rival(name, table, seed)
                print(
                    f"{name} seed {seed} {rival.__name__:<7} {found:.4g} {time.process_time() - begun:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
