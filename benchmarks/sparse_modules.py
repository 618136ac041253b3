"""What sparse activation costs: a training step relative to the same modules on all tokens, and many modules to one.

    python benchmarks/sparse_modules.py

Jobs take turns, and the best of several rounds counts, in processor seconds on one thread, so that other work on the
machine matters little. A step is forward, backward and AdamW; many modules are compared with one also without
AdamW, which has as many times the parameters to update. Active tokens are picked at random; the router still
computes its probabilities.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from seqboat import GAUConfig, SparseModularActivation
from seqboat.core.nn import FeedForward
from seqboat.layers.packing import pack

Job = Callable[[], None]


def measure(jobs: dict[str, Job], rounds: int) -> dict[str, float]:
    """The fewest seconds that each job took; jobs take turns."""
    best = dict.fromkeys(jobs, float("inf"))
    for job in jobs.values():
        job()
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            best[name] = min(best[name], time.process_time() - start)
    return best


def train_step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, update: bool = True) -> Job:
    """One step of a model that is asked to repeat its input."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def job() -> None:
        optimizer.zero_grad(set_to_none=True)
        (run(x) - x.detach()).square().mean().backward()
        if update:
            optimizer.step()

    return job


def sparse_step(modules: dict[str, nn.Module], x: Tensor, rate: float, update: bool = True) -> Job:
    """A step of sparsely activated modules, each at this rate."""
    batch, time_steps, d_model = x.shape
    layer = SparseModularActivation(modules, d_model)
    active = torch.rand(batch, time_steps, len(modules)) < rate

    def run(x: Tensor) -> Tensor:
        with layer.override(mask=active):
            return layer(x).y

    return train_step(layer, run, x, update)


def dense_step(modules: dict[str, nn.Module], x: Tensor) -> Job:
    """A step of the same modules on all tokens, without a router."""
    batch, time_steps, d_model = x.shape
    everyone = pack(torch.ones(batch, time_steps, dtype=torch.bool))
    contextual = {"attention"}

    def run(x: Tensor) -> Tensor:
        flat = x.reshape(-1, d_model)
        outputs = [
            module(flat, everyone)[0] if name in contextual else module(flat)
            for name, module in modules.items()
        ]
        return torch.stack(outputs).sum(dim=0).view(x.shape) if len(outputs) > 1 else outputs[0].view(x.shape)

    return train_step(nn.ModuleDict(modules), run, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--time", type=int, default=1024)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--d-ff", type=int, default=1024)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(options.batch, options.time, options.d_model)

    def two() -> dict[str, nn.Module]:
        gau = GAUConfig(d_z=64, d_v=2 * options.d_model, window=options.window, max_positions=options.time)
        return {
            "attention": gau.build(options.d_model, causal=False),
            "ffn": FeedForward(options.d_model, options.d_ff, "silu"),
        }

    def many(count: int) -> dict[str, nn.Module]:
        return {f"ffn{i}": FeedForward(options.d_model, options.d_ff, "silu") for i in range(count)}

    jobs = {"attention + FFN, all tokens": dense_step(two(), x)}
    for rate in (0.1, 0.25, 0.5, 1.0):
        jobs[f"attention + FFN, {rate:.0%} active each"] = sparse_step(two(), x, rate)
    found = measure(jobs, options.rounds)
    dense = found["attention + FFN, all tokens"]
    print(f"{options.batch} x {options.time} tokens, d_model {options.d_model}, d_ff {options.d_ff}")
    for name, seconds in found.items():
        print(f"{name:55s} {seconds * 1e3:8.1f} ms  {seconds / dense:5.2f} x")
    for update in (False, True):
        for rate in (0.4, 0.8):
            end = f"{rate:.0%} active in all{'' if update else ', no update'}"
            jobs = {
                f"{count} token-wise module{'s' if count > 1 else ''}, {end}": sparse_step(
                    many(count), x, rate / count, update
                )
                for count in (1, 2, 4, 8)
            }
            several = measure(jobs, options.rounds)
            one = several[f"1 token-wise module, {end}"]
            for name, seconds in several.items():
                print(f"{name:55s} {seconds * 1e3:8.1f} ms  {seconds / one:5.2f} x")


if __name__ == "__main__":
    main()
