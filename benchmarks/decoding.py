"""What one decoding step costs: products of single tokens, and many texts in one batch against one after the other.

    python benchmarks/decoding.py products               matrices of the paper's enwik8 model
    python benchmarks/decoding.py batch                  the bundled model
    python benchmarks/decoding.py batch --full-size      the paper's enwik8 layout, half of the tokens active

Times are seconds of processor time, the least of several rounds, which a busy machine changes less than wall time;
`batch` shows both.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.bench.rates import meet_rate
from seqboat.inference.int8 import Int8Matrix, quantize_rows
from seqboat.inference.products import FloatProduct
from seqboat.mixers import SeqBoatConfig
from seqboat.mixers.seqboat.gau import GAUConfig
from seqboat.mixers.ssm.ema import EMAConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.runs import Run
from seqboat.text.batch import BatchEngine
from seqboat.text.sampling import SamplingConfig
from seqboat.text.session import Session, read, start

LAYERS = 14
"""Different matrices of each size, so that none stays in a near cache."""
SIZES = ((2592, 616), (616, 1232), (616, 616))
"""Outputs and inputs: projection and output of attention, dense branch."""


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


def full_size(rate: float = 0.5) -> LanguageModel:
    """The layout of the paper's enwik8 model, with fresh weights."""
    torch.manual_seed(0)
    gau = GAUConfig(d_z=128, d_v=1232, window=1024, positions="rotary")
    mixer = SeqBoatConfig(ssm=EMAConfig(d_state=16), gau=gau, causal=True, prenorm=True)
    model = LanguageModel(BackboneConfig(mixer=mixer, d_model=616, num_layers=14, vocab=256)).eval()
    meet_rate(model, torch.randint(0, 256, (1, 256)), rate)
    return model


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
    parser.add_argument("what", choices=("products", "batch"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1, help="products: tokens multiplied at once")
    parser.add_argument("--full-size", action="store_true", help="batch: the layout of the paper's model")
    parser.add_argument("--texts", type=int, default=32, help="batch: texts at the same time")
    parser.add_argument("--context", type=int, default=200, help="batch: bytes of the shortest prompt")
    parser.add_argument("--steps", type=int, default=10, help="batch: tokens of every text per round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "products":
        for size, times in measure_products(options.tokens).items():
            print(size, {name: f"{value:.0f} us" for name, value in times.items()})
        return
    model = full_size() if options.full_size else Run("enwik8-small").language_model
    found = measure_batch(model, options.texts, options.context, options.steps, options.rounds)
    print({name: round(value, 2) for name, value in found.items()})


if __name__ == "__main__":
    main()
