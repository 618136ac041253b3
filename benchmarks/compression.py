"""Bits per byte of trained language models beside general compressors, on the same bytes of enwik8.

    python benchmarks/compression.py runs/enwik8-small runs/enwik8-transformer --data-dir data

A model is charged for every byte, the first one with 8 bits, but not for its own weights, as is usual; `weights` says
what they take in the run's own precision. Compressors run at their strongest level.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.run import Run
from seqboat.tasks.enwik8 import Enwik8TaskConfig
from seqboat.tasks.task import SPLITS
from seqboat.text.scoring import CHUNK, score, total

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": lambda data: gzip.compress(data, 9),
    "bzip2 -9": lambda data: bz2.compress(data, 9),
    "xz -9": lambda data: lzma.compress(data, preset=9),
}


def compress_row(name: str, data: bytes) -> dict[str, Any]:
    """How small a compressor makes the text."""
    began = time.process_time()
    size = len(COMPRESSORS[name](data))
    return {
        "name": name,
        "bytes": len(data),
        "bits_per_byte": 8 * size / len(data),
        "seconds": time.process_time() - began,
    }


def model_row(run: str, text: NDArray[np.uint8]) -> dict[str, Any]:
    """How many bits a model needs for the text."""
    model = Run(run).language_model

    def chunks() -> Iterator[NDArray[np.uint8]]:
        for begin in range(0, len(text), CHUNK):
            if sys.stderr.isatty():
                print(f"\r{run}: {begin:,}/{len(text):,} bytes", end="\r", file=sys.stderr, flush=True)
            yield text[begin : begin + CHUNK]

    began = time.process_time()
    sums = total(score(model, chunks()))
    return {
        "name": run,
        "bytes": sums.tokens,
        "bits_per_byte": sums.bits_per_token,
        "seconds": time.process_time() - began,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "activation": sums.activation,
    }


def main() -> None:
    """Measure and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="folders of runs")
    parser.add_argument("--data-dir", default="data", help="where the prepared enwik8 is")
    parser.add_argument("--split", choices=SPLITS, default="test", help="which bytes")
    parser.add_argument("--limit", type=int, help="only this many bytes from the beginning")
    options = parser.parse_args()
    text = Enwik8TaskConfig(data_dir=options.data_dir).build().text(options.split)[: options.limit]
    for name in COMPRESSORS:
        print(json.dumps(compress_row(name, text.tobytes())), flush=True)
    for run in options.runs:
        print(json.dumps(model_row(run, text)), flush=True)


if __name__ == "__main__":
    main()
