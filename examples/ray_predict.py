"""Answers for a table of any size on a Ray cluster; every worker holds one copy of the model.

    pip install "ray[data]"
    python -P examples/ray_predict.py RUN new.parquet answers --column text --workers 8 --gpus 1

Reads Parquet, CSV or JSON lines, and writes Parquet files into a folder, rows in the order of the input.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray


class Answers:
    """A worker: answers batches of rows."""

    def __init__(self, run: str, column: str, device: str) -> None:
        from seqboat.predict import Predictor

        self.predictor, self.column = Predictor(run, device=device), column

    def __call__(self, rows: Any) -> Any:
        names = self.predictor.columns(probabilities=False, activation=False)
        found = self.predictor.predict(rows[self.column].tolist())
        for name in names:
            if name not in rows:
                rows[name] = [answer.get(name) for answer in found]
        return rows


def predict(run: str, table: str, column: str = "text", workers: int = 2, gpus: int = 0) -> Any:
    """The rows of a table with their answers, as a dataset of Ray."""
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    kind = table.rpartition(".")[2]
    read = {"parquet": ray.data.read_parquet, "csv": ray.data.read_csv}.get(kind, ray.data.read_json)
    return read(table).map_batches(
        Answers,
        fn_constructor_args=(run, column, "cuda" if gpus else "cpu"),
        batch_format="pandas",
        batch_size=1024,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_gpus=gpus,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("table")
    parser.add_argument("out")
    parser.add_argument("--column", default="text")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="of every worker")
    options = parser.parse_args()
    predict(options.run, options.table, options.column, options.workers, options.gpus).write_parquet(
        options.out
    )
