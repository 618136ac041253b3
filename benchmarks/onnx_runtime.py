"""Exported models in onnxruntime against PyTorch: steps of decoding and whole sequences, in turns.

    python benchmarks/onnx_runtime.py                       the small bundled model
    python benchmarks/onnx_runtime.py --run enwik8-medium   another, here one that has int8 weights only
    python benchmarks/onnx_runtime.py --full-size           the paper's enwik8 layout, half of the tokens active

Tokens per second at batch 1, the median over the rounds, and the median of the ratios to PyTorch's lean step
(`seqboat.inference.lean`) or its whole forward pass in the same round. One thread each; seconds are those of the
processor, which a busy machine changes less than wall time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from decoding import full_size
from seqboat.inference.int8 import is_quantized, quantize
from seqboat.inference.lean import lean_model
from seqboat.models.heads import LanguageModel
from seqboat.onnx.export import FORMAT, write_form
from seqboat.onnx.session import OnnxModel
from seqboat.run import Run

Measure = Callable[[], float]
"""Tokens per second of processor time."""


def torch_steps(model: LanguageModel, ids: list[int], warm: int) -> Measure:
    """Lean steps on some tokens, after a few others."""

    def measure() -> float:
        lean = lean_model(model)
        assert lean is not None
        lean.join(model.init_state(1))
        for token in ids[:warm]:
            lean.step(torch.tensor([token]))
        began = time.process_time()
        for token in ids[warm:]:
            lean.step(torch.tensor([token]))
        return (len(ids) - warm) / (time.process_time() - began)

    return measure


def onnx_steps(model: LanguageModel, ids: list[int], warm: int, folder: Path) -> Measure:
    """The same in onnxruntime."""
    file = written(model, "step", folder)

    def measure() -> float:
        state = file.start(1)
        for token in ids[:warm]:
            state = file.step(np.array([token]), state).state
        began = time.process_time()
        for token in ids[warm:]:
            state = file.step(np.array([token]), state).state
        return (len(ids) - warm) / (time.process_time() - began)

    return measure


def torch_sequence(model: LanguageModel, ids: list[int]) -> Measure:
    """The whole forward pass."""
    tokens = torch.tensor([ids])

    def measure() -> float:
        began = time.process_time()
        with torch.inference_mode():
            model(tokens)
        return len(ids) / (time.process_time() - began)

    return measure


def onnx_sequence(model: LanguageModel, ids: list[int], folder: Path) -> Measure:
    """The same in onnxruntime."""
    file = written(model, "sequence", folder)
    given = {"tokens": np.array([ids]), "lengths": np.array([len(ids)])}

    def measure() -> float:
        began = time.process_time()
        file.run(given)
        return len(ids) / (time.process_time() - began)

    return measure


def written(model: LanguageModel, form: str, folder: Path) -> OnnxModel:
    path = Path(tempfile.mkdtemp(dir=folder)) / f"{form}.onnx"
    write_form(model, form, path, {"format": FORMAT})
    return OnnxModel(path)


def compare(measures: dict[str, Measure], rounds: int) -> dict[str, tuple[float, float]]:
    """Median tokens per second, and the median ratio to the first one, of rounds that measure all in turn."""
    for measure in measures.values():
        measure()
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    first = next(iter(found.values()))
    return {
        name: (
            statistics.median(values),
            statistics.median(value / base for value, base in zip(values, first, strict=True)),
        )
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", default="enwik8-small", help="a run or bundled model")
    parser.add_argument("--full-size", action="store_true", help="the paper's enwik8 layout, fresh weights")
    parser.add_argument(
        "--tokens", type=int, default=400, help="steps per round, and length of the sequences"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = full_size() if options.full_size else Run(options.run).language_model
    models = {"int8": copy.deepcopy(plain)}
    quantize(models["int8"])
    if not is_quantized(plain):
        models = {"float32": plain, **models}
    ids = np.random.default_rng(0).integers(0, 256, 50 + options.tokens).tolist()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        steps: dict[str, Measure] = {}
        wholes: dict[str, Measure] = {}
        for name, model in models.items():
            steps[f"PyTorch, {name}"] = torch_steps(model, ids, 50)
            steps[f"onnxruntime, {name}"] = onnx_steps(model, ids, 50, folder)
            wholes[f"PyTorch, {name}"] = torch_sequence(model, ids[50:])
            wholes[f"onnxruntime, {name}"] = onnx_sequence(model, ids[50:], folder)
        for form, measures in (("step", steps), ("sequence", wholes)):
            print(f"| {form} | tokens/s | beside the first |\n|---|---|---|")
            for name, (speed, ratio) in compare(measures, options.rounds).items():
                print(f"| {name} | {speed:,.0f} | {ratio:.2f} |", flush=True)
            print()


if __name__ == "__main__":
    main()
