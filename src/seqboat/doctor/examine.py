"""The examination: every implementation of every operation, the contract of a layer, and a short bench.

An implementation that disagrees with the obvious form is disabled: torch computes the operation from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from seqboat.doctor.machine import TYPES, seconds
from seqboat.doctor.operations import BOUNDS, Case, Errors, cases, measure
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.ops.kernels import CHOSEN, DISABLED, RAN, REFUSED, kernels, using_kernels
from seqboat.ssm.ema import EMAConfig

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """What one implementation of an operation is worth in one type."""

    operation: str
    implementation: str
    dtype: str
    cases: int
    """how many it computed"""
    outputs: float
    """largest relative RMS error"""
    gradients: float
    bound: float
    worst: str
    """the case with the largest error"""
    wrong: str | None = None
    """the operation, if it disagrees"""
    note: str | None = None
    """why it did not compute some cases"""

    def as_record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def examine(device: torch.device, tell: Tell = lambda line: None) -> list[Finding]:
    """Compare all implementations in all types; those that disagree are disabled for this process."""
    found = []
    grouped: dict[str, list[Case]] = {}
    for case in cases():
        grouped.setdefault(case.operation, []).append(case)
    for operation, some in grouped.items():
        for name in implementations(operation):
            for dtype in TYPES:
                finding = _compare(operation, name, dtype, some, device)
                found.append(finding)
                tell(_line(finding))
                if finding.wrong is not None and name != "torch":
                    _fall_back(finding, operation, tell)
    return found


def implementations(operation: str) -> Iterator[str]:
    """Torch, and the other implementations that this machine can run."""
    yield "torch"
    for name, state in kernels()[operation]["implementations"].items():
        if name not in ("torch", "reference") and state.startswith("available"):
            yield name


def _compare(operation: str, name: str, dtype: str, some: list[Case], device: torch.device) -> Finding:
    """The finding of one implementation and type."""
    kind, worst, at, done = TYPES[dtype], Errors(0.0, 0.0), "", 0
    notes: list[str] = []
    with using_kernels(name, operation), warnings.catch_warnings():  # type: ignore[arg-type]
        # an implementation that fails says so below
        warnings.simplefilter("ignore", RuntimeWarning)
        for case in some:
            RAN.clear()
            before = operation in DISABLED
            errors = measure(case, device, kind)
            if name != "torch" and operation in DISABLED and not before:
                return Finding(
                    operation, name, dtype, done, 0.0, 0.0, BOUNDS[kind], case.name, operation, DISABLED[operation]
                )  # fmt: skip
            if name != "torch" and not RAN:
                refused = REFUSED.get(operation)
                notes += [refused] if refused and refused not in notes else []
                continue
            done += 1
            if max(errors) >= max(worst):
                worst, at = Errors(*map(max, zip(errors, worst, strict=True))), case.name
    bound = BOUNDS[kind]
    wrong = None if max(worst) <= bound else operation
    note = "; ".join(notes) or None
    return Finding(operation, name, dtype, done, worst.outputs, worst.gradients, bound, at, wrong, note)


def _line(finding: Finding) -> str:
    what = f"{finding.operation:<10} {finding.implementation:<7} {finding.dtype:<8}"
    if not finding.cases and finding.wrong is None:
        return f"{what} not run: {finding.note}"
    errors = f"outputs {finding.outputs:.1e}, gradients {finding.gradients:.1e}, bound {finding.bound:.0e}"
    verdict = "ok" if finding.wrong is None else f"WRONG: {finding.wrong}, worst case: {finding.worst}"
    note = "" if finding.note is None else f" ({finding.note})"
    return f"{what} {finding.cases} cases, {errors}: {verdict}{note}"


def _fall_back(finding: Finding, operation: str, tell: Tell) -> None:
    assert finding.wrong is not None
    DISABLED[operation] = f"disagrees with the reference in {finding.dtype}: {finding.worst}"
    tell(
        f"           {finding.implementation} is disabled for {operation}: torch computes it in this process; "
        f"elsewhere set SEQBOAT_KERNELS={operation}=torch"
    )


# the contract of a layer

PIECES = (0, 5, 6, 40, 77)
"""Borders at which a sequence is split."""


def check_contract(device: torch.device) -> dict[str, str | None]:
    """Whole = pieces = steps, packed = alone, and two equal runs: for each, what is wrong, or None."""
    torch.manual_seed(0)
    mixer = SeqBoatConfig(
        ssm=EMAConfig(d_state=4),
        gau=GAUConfig(d_z=8, d_v=16, window=8, positions="rotary"),
        causal=True,
        prenorm=True,
        init="paper",
    )
    config = BackboneConfig(mixer=mixer, d_model=16, num_layers=2, vocab=32)
    model = LanguageModel(config).to(device).eval()
    tokens = torch.randint(32, (2, PIECES[-1]), device=device)
    with torch.no_grad():
        whole = model(tokens).logits
        state, parts = model.init_state(2), []
        for begin, end in pairwise(PIECES):
            out = model(tokens[:, begin:end], None, state)
            state = out.state
            parts.append(out.logits)
        pieces = torch.cat(parts, dim=1)
        state, parts = model.init_state(2), []
        for t in range(tokens.shape[1]):
            out = model.step(tokens[:, t], state)
            state = out.state
            parts.append(out.logits[:, None])
        steps = torch.cat(parts, dim=1)
        borders = torch.tensor([*PIECES, *(PIECES[-1] + place for place in PIECES[1:])], device=device)
        packed = model(tokens, cu_seqlens=borders).logits
        alone = torch.cat(
            [model(tokens[:, begin:end]).logits for begin, end in pairwise(PIECES)],
            dim=1,
        )
    return {
        "whole = pieces": _differs(whole, pieces),
        "whole = steps": _differs(whole, steps),
        "packed = alone": _differs(packed, alone),
        "two runs equal": _repeats(device),
    }


def _differs(one: Tensor, other: Tensor) -> str | None:
    error = float((one - other).norm() / one.norm())
    return None if error <= BOUNDS[torch.float32] else f"relative RMS error {error:.1e}"


def _repeats(device: torch.device) -> str | None:
    """Whether a layer gives the same bits twice, forward and backward."""
    for causal in (False, True):
        torch.manual_seed(1)
        gau = GAUConfig(d_z=8, d_v=16, window=8)
        layer = SeqBoat(16, SeqBoatConfig(gau=gau, causal=causal, init="paper")).to(device)
        x = torch.randn(3, 150, 16, device=device)
        runs: list[list[Tensor]] = []
        for _ in range(2):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            y = layer(given).y
            y.square().sum().backward()
            names = ["y", "x", *(name for name, _ in layer.named_parameters())]
            grads = [p.grad for p in layer.parameters() if p.grad is not None]
            assert given.grad is not None
            runs.append([y.detach(), given.grad, *(grad.clone() for grad in grads)])
        for name, one, other in zip(names, *runs, strict=True):
            if not torch.equal(one, other):
                return f"{'causal' if causal else 'bidirectional'} layer: {name} differs between two runs"
    return None


# the bench


def bench(device: torch.device, length: int, width: int = 128) -> dict[str, float]:
    """Seconds of a training step of one layer: with the chosen kernels, in plain torch, and of a Transformer."""
    torch.manual_seed(0)
    batch = max(1, (65536 if device.type == "cuda" else 4096) // length)
    x = torch.randn(batch, length, width, device=device)
    layer = SeqBoat(width, SeqBoatConfig()).to(device)
    transformer = MIXERS["transformer"]().build(width).to(device)

    def step(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            module.zero_grad()
            module(x).y.square().mean().backward()

        return run

    found = {"tokens": float(batch * length), "seqboat": seconds(step(layer), device)}
    if CHOSEN:
        with using_kernels("torch"):
            found["seqboat, plain torch"] = seconds(step(layer), device)
    found["transformer"] = seconds(step(transformer), device)
    return found
