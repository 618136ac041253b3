"""What one decoding step costs: single products, lean and general steps, and many texts in one batch.

    python benchmarks/decoding.py products                     matrices of the paper's enwik8 model
    python benchmarks/decoding.py steps                        its layout, half of the tokens active
    python benchmarks/decoding.py steps --before TREE          against the general step of another version
    python benchmarks/decoding.py steps --contexts 1024 65536  after short and long texts
    python benchmarks/decoding.py batch                        the small bundled model, 32 texts against one
    python benchmarks/decoding.py batch --full-size            the same with the paper's enwik8 layout

TREE is a folder with another version, such as `git worktree add TREE COMMIT` makes. Its general step runs in a
separate process and takes turns with the others, on the same weights and tokens.

Times of `products` are seconds of processor time, the least of several rounds, which a busy machine changes less than
wall time; `steps` and `batch` show both.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import general_steps
from seqboat.bench.rates import meet_rate
from seqboat.inference.int8 import Int8Matrix, quantize, quantize_rows
from seqboat.inference.lean import lean_model
from seqboat.inference.products import FloatProduct
from seqboat.models.backbone import BackboneState
from seqboat.models.heads import LanguageModel
from seqboat.run import Run
from seqboat.text.batch import BatchEngine
from seqboat.text.sampling import SamplingConfig
from seqboat.text.session import Session, read, start

LAYERS = 14
"""Different matrices of each size, so that none stays in a near cache."""
SIZES = ((2592, 616), (616, 1232), (616, 616))
"""Outputs and inputs: projection and output of attention, dense branch."""
FULL_SIZE = {
    "num_layers": LAYERS,
    "d_model": 616,
    "d_z": 128,
    "d_v": 1232,
    "d_state": 16,
    "window": 1024,
    "vocab": 256,
}
"""The paper's enwik8 model."""
Round = Callable[[], tuple[float, float]]
"""Decodes the tokens of one round: seconds of wall time and of processor time."""


def least(run: Callable[[int], object], rounds: int = 15) -> float:
    """Microseconds per call, in the best round of LAYERS calls."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        for number in range(LAYERS):
            run(number)
        times.append(time.thread_time() - began)
    return min(times) / LAYERS * 1e6


@torch.inference_mode()
def measure_products(tokens: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> dict[str, dict[str, float]]:
    """Microseconds of each kind of product, by the size of the matrix."""
    found = {}
    for outputs, inputs in sizes:
        x, bias = torch.randn(tokens, inputs), torch.zeros(outputs)
        weights = [torch.randn(outputs, inputs) for _ in range(LAYERS)]
        codes = [quantize_rows(weight) for weight in weights]
        stored = [FloatProduct(weight, bias) for weight in weights]
        kinds: dict[str, Callable[..., Tensor]] = {
            "float32, as stored": lambda i, x=x, w=weights, b=bias: F.linear(x, w[i], b),
            "float32, by input channel": lambda i, x=x, p=stored: p[i](x),
            "_weight_int8pack_mm": lambda i, x=x, c=codes: torch._weight_int8pack_mm(x, *c[i]),
        }
        packed = [Int8Matrix.pack(*part, bias) for part in codes]
        if None not in packed:
            kinds["int8 in half precision"] = lambda i, x=x, p=packed: p[i](x)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                zeros = torch.zeros(outputs, dtype=torch.int64)
                dynamic = [
                    torch.ops.quantized.linear_prepack(
                        torch._make_per_channel_quantized_tensor(part, scale.double(), zeros, 0), bias
                    )
                    for part, scale in codes
                ]
            kinds["fbgemm, 7-bit activations"] = lambda i, x=x, d=dynamic: torch.ops.quantized.linear_dynamic(
                x, d[i], True
            )
        except (AttributeError, RuntimeError):
            pass  # a build of PyTorch without it
        found[f"{outputs} x {inputs}"] = {name: least(run) for name, run in kinds.items()}
    return found


def full_size(rate: float = 0.5, config: dict[str, int] = FULL_SIZE) -> LanguageModel:
    """The layout of the paper's enwik8 model, with fresh weights."""
    torch.manual_seed(0)
    model = general_steps.build(config)
    meet_rate(model, torch.randint(0, 256, (1, 256)), rate)
    return model


@torch.inference_mode()
def read_prompt(model: LanguageModel, prompt: Tensor) -> BackboneState:
    """The state after a prompt (1, time)."""
    state = model.init_state(1)
    for piece in prompt.split(general_steps.CHUNK, dim=1):
        state = model(piece, None, state).state
    return state


def lean_steps(model: LanguageModel, state: BackboneState, tokens: Tensor) -> Round:
    """Lean steps; later rounds read on, which costs the same."""
    lean = lean_model(model)
    assert lean is not None
    lean.join(state)

    def run() -> tuple[float, float]:
        began, used = time.perf_counter(), time.process_time()
        for token in tokens.unbind(1):
            lean.step(token)
        return time.perf_counter() - began, time.process_time() - used

    return run


@contextmanager
def general_rounds(given: dict[str, Any], source: Path) -> Iterator[Round]:
    """General steps of the version in this folder, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(given, path)
        threads = str(torch.get_num_threads())
        command = [sys.executable, general_steps.__file__, str(path), threads]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            stdin, stdout = child.stdin, child.stdout
            came_from = stdout.readline()
            if not came_from or not Path(json.loads(came_from)).is_relative_to(source.resolve()):
                raise SystemExit(f"{source} does not hold a version that can be compared")

            def run() -> tuple[float, float]:
                stdin.write("\n")
                stdin.flush()
                wall, used = json.loads(stdout.readline())
                return wall, used

            yield run
            stdin.close()


def measure_steps(
    config: dict[str, int], tree: Path, contexts: Sequence[int], steps: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds per token of lean steps and of a version's general step, all in turn.

    Args:
        config: sizes of the model.
        tree: the folder of the version whose general step is the baseline.
        contexts: tokens to read first; all but the first for lean steps only.
        steps: tokens per round.
        rounds: timed rounds, after one that is not.
    """
    plain = full_size(config=config)
    rounded = copy.deepcopy(plain)
    quantize(rounded)
    drawn = torch.randint(0, 256, (1, max(contexts) + steps), generator=torch.Generator().manual_seed(1))
    tokens, prompt = drawn[:, :steps], drawn[:, steps:]
    given = {
        "config": config,
        "weights": plain.state_dict(),
        "prompt": prompt[:, : contexts[0]],
        "tokens": tokens,
    }
    with general_rounds(given, tree / "src") as baseline:
        measured = {f"general step, {contexts[0]} tokens": baseline}
        for context in contexts:
            state = read_prompt(plain, prompt[:, :context])
            for name, model in (("float32", plain), ("int8", rounded)):
                measured[f"lean, {name}, {context} tokens"] = lean_steps(model, state, tokens)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in measured}
        for number in range(rounds + 1):
            for name, run in measured.items():
                seconds = run()
                if number > 0:
                    times[name].append(seconds)
    first = next(iter(times.values()))
    return {
        name: {
            part: value
            for at, kind in enumerate(("wall", "processor"))
            for part, value in (
                (f"{kind}, ms", statistics.median(pair[at] for pair in pairs) / steps * 1e3),
                (
                    f"{kind}, speed-up",
                    statistics.median(base[at] / pair[at] for base, pair in zip(first, pairs, strict=True)),
                ),
            )
        }
        for name, pairs in times.items()
    }


def tokens_per_second(model: LanguageModel, sessions: list[Session], steps: int) -> tuple[float, float]:
    """Of all texts together, by wall time and by processor time."""
    engine = BatchEngine(model, capacity=len(sessions))
    for session in sessions:
        engine.add(session, max_new_bytes=steps + 2, sampling=SamplingConfig(seed=0))
    engine.step()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        engine.step()
    count = len(sessions) * steps
    return count / (time.perf_counter() - began), count / (time.process_time() - used)


def measure_batch(
    model: LanguageModel, texts: int, context: int, steps: int, rounds: int
) -> dict[str, float]:
    """Tokens per second of many texts in one batch, and of one of them alone, in turns."""
    sessions = []
    for number in range(texts):
        size = context + 3 * number
        ids = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(number))
        sessions.append(read(model, start(model), [ids.numpy()]))
    together, alone = [], []
    for _ in range(rounds):
        together.append(tokens_per_second(model, sessions, steps))
        alone.append(tokens_per_second(model, sessions[:1], 3 * steps))
    ratios = [[a / b for a, b in zip(x, y, strict=True)] for x, y in zip(together, alone, strict=True)]
    return {
        "together, tokens/s": max(wall for wall, _ in together),
        "alone, tokens/s": max(wall for wall, _ in alone),
        "ratio, wall time": statistics.median(wall for wall, _ in ratios),
        "ratio, processor time": statistics.median(used for _, used in ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("products", "steps", "batch"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1, help="products: tokens multiplied at once")
    parser.add_argument(
        "--before",
        type=Path,
        default=Path(__file__).parents[1],
        metavar="TREE",
        help="steps: the version whose general step is the baseline (this one)",
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[2560], metavar="N", help="steps: tokens to read first"
    )
    parser.add_argument("--full-size", action="store_true", help="batch: the layout of the paper's model")
    parser.add_argument("--texts", type=int, default=32, help="batch: texts at the same time")
    parser.add_argument("--context", type=int, default=200, help="batch: bytes of the shortest prompt")
    parser.add_argument("--steps", type=int, default=10, help="steps, batch: tokens of every text per round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "products":
        for size, times in measure_products(options.tokens).items():
            print(size, {name: f"{value:.0f} us" for name, value in times.items()})
        return
    if options.what == "steps":
        found = measure_steps(FULL_SIZE, options.before, options.contexts, options.steps, options.rounds)
        for name, values in found.items():
            print(name, {part: round(value, 2) for part, value in values.items()})
        return
    model = full_size() if options.full_size else Run("enwik8-small").language_model
    speeds = measure_batch(model, options.texts, options.context, options.steps, options.rounds)
    print({name: round(value, 2) for name, value in speeds.items()})


if __name__ == "__main__":
    main()
