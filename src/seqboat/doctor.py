"""The doctor: is everything computed correctly on this machine, and how fast?

Cases of every heavy operation, in odd sizes, each with a slow and obvious form. A case makes its inputs in float64;
they are rounded to the type under test, the operation runs on the device in that type, and the obvious form on the
CPU in float64 on the same rounded numbers. Outputs and the gradients of all inputs are compared. What disagrees is
disabled: torch computes the operation from then on.
"""

from __future__ import annotations

import getpass
import math
import os
import platform
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqboat import reference
from seqboat.bench.measure import quartiles, time_rounds
from seqboat.core.layout import Layout
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.ops.attention import FUNCTIONS, AttentionName, Neighbors, banded
from seqboat.ops.kernels import CHOSEN, DISABLED, RAN, REFUSED, kernels, using_kernels
from seqboat.ssm.diagonal import DiagonalSSM, EMAConfig, S4DConfig, SSMConfig
from seqboat.training.record import device_name, probe_bf16, processor_name, versions

BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest relative RMS error by type."""

Call = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One call of an operation."""

    operation: str
    name: str
    inputs: dict[str, Tensor]
    """in float64 on the CPU, and integers"""
    run: Call
    """the operation of the library; takes the inputs by name"""
    obvious: Call
    """the same, written for reading"""
    wide: tuple[str, ...] = ()
    """inputs that stay in at least float32"""


class Errors(NamedTuple):
    """Relative RMS errors of a call."""

    outputs: float
    gradients: float


def measure(case: Case, device: torch.device, dtype: torch.dtype) -> Errors:
    """How far an operation is from its obvious form."""
    rounded, placed = {}, {}
    for name, value in case.inputs.items():
        if not value.is_floating_point():
            rounded[name], placed[name] = value, value.to(device)
            continue
        kept = dtype if name not in case.wide or dtype == torch.float64 else torch.float32
        narrow = value.to(kept)
        rounded[name] = narrow.double().requires_grad_()
        placed[name] = narrow.to(device).requires_grad_()
    found, expected = _differentiate(case.run, placed), _differentiate(case.obvious, rounded)
    return Errors(*(_error(got, wanted) for got, wanted in zip(found, expected, strict=True)))


def _differentiate(call: Call, inputs: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the inputs for a fixed gradient of the outputs."""
    outputs = call(**inputs)
    generator = torch.Generator().manual_seed(7)
    # exact in every type
    weights = [torch.randn(out.shape, generator=generator).bfloat16() for out in outputs]
    products = [(out * w.to(out.device, out.dtype)).sum() for out, w in zip(outputs, weights, strict=True)]
    total = torch.stack([part.double() for part in products]).sum()
    if not total.requires_grad:
        return list(outputs), []
    leaves = [value for value in inputs.values() if value.requires_grad]
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [out.detach() for out in outputs], filled


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative RMS error of any tensor; one that is not finite counts as infinite.

    Small ones are measured against a thousandth of the largest: they are sums of larger numbers of both signs.
    """
    norms = [float(wanted.norm()) for wanted in expected]
    most = max([*norms, 0.0])
    worst = 0.0
    for got, wanted, norm in zip(found, expected, norms, strict=True):
        error = float((got.double().cpu() - wanted).norm())
        if not math.isfinite(error):
            return math.inf
        worst = max(worst, error / (norm + 1e-3 * most) if error else 0.0)
    return worst


def cases() -> Iterator[Case]:
    """All cases of all operations."""
    yield from _scans()
    yield from _attentions()


class _Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)


# the scan

SCANS: tuple[tuple[str, int, int, bool, bool], ...] = (
    ("ema", 67, 4, True, True),
    ("ema", 67, 4, False, False),
    ("ema", 1, 1, True, False),
    ("ema", 0, 3, False, False),
    ("ema", 130, 16, True, False),
    ("s4d", 67, 4, True, True),
    ("s4d", 33, 2, False, False),
)
"""Kernel, tokens, states, whether causal, and whether there is padding."""


def _scans() -> Iterator[Case]:
    for number, (kind, length, states, causal, padded) in enumerate(SCANS):
        draw = _Random(number)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            config: Any = {"ema": EMAConfig, "s4d": S4DConfig}[kind](d_state=states)
            made: DiagonalSSM = config.build(5, causal=causal)
        inputs = {"x": draw(3, length, 5)}
        inputs |= {name: p.detach().double() for name, p in made.named_parameters()}
        if padded:
            inputs["mask"] = torch.arange(length) < torch.tensor([[length], [0], [length // 2]])
        direction = "causal" if causal else "bidirectional"
        name = f"{kind}, {length} tokens, {states} states, {direction}{', padded' if padded else ''}"
        weights = tuple(name for name, _ in made.named_parameters())
        yield Case("scan", name, inputs, _scan(made), _obvious_scan(config, causal), weights)


def _scan(made: DiagonalSSM) -> Call:
    def run(x: Tensor, mask: Tensor | None = None, **weights: Tensor) -> tuple[Tensor, ...]:
        padding = None if mask is None else Layout(mask)
        out = torch.func.functional_call(made, weights, (x, padding), strict=True)
        return (out.y,) if out.state is None else (out.y, out.state.states)

    return run


def _obvious_scan(config: SSMConfig, causal: bool) -> Call:
    """The loop of the reference over the real tokens of every sequence."""

    def run(x: Tensor, mask: Tensor | None = None, **weights: Tensor) -> tuple[Tensor, ...]:
        outputs, states = [], []
        for row in range(len(x)):
            real = torch.arange(x.shape[1]) if mask is None else mask[row].nonzero()[:, 0]
            y, state = reference.ssm(x[row, real], weights, config)
            outputs.append(torch.zeros_like(x[row]).index_put((real,), y))
            states.append(state)
        if not causal:
            return (torch.stack(outputs),)
        final = torch.stack(states)
        return torch.stack(outputs), torch.view_as_real(final).flatten(-2) if final.is_complex() else final

    return run


# attention

ATTENTION_CASES: tuple[tuple[tuple[int, ...], int, int, str, str, int, int], ...] = (
    ((1, 7, 33, 20), 5, 0, "softmax", "position", 6, 10),
    ((40, 3, 24), 4, 4, "softmax", "slot", 16, 33),
    ((40, 1, 24), 1, 1, "relu2", "position", 6, 5),
    ((67,), 90, 0, "laplace", "none", 8, 16),
    ((5,), 3, 3, "softmax", "none", 16, 16),
    ((), 4, 4, "softmax", "position", 6, 10),
)
"""Tokens of each sequence, keys before and behind, function, bias, d_z and d_v."""


def _attentions() -> Iterator[Case]:
    for number, (lengths, left, right, attention, bias, d_z, d_v) in enumerate(ATTENTION_CASES):
        draw, tokens = _Random(100 + number), sum(lengths)
        group = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        scale = 1 / (left + right + 1) if FUNCTIONS[attention].by_keys else d_z**-0.5
        fixed: Any = {"left": left, "right": right, "attention": attention, "scale": scale}
        inputs = {"q": draw(tokens, d_z), "k": draw(tokens, d_z), "v": draw(tokens, d_v), "group": group}
        if bias != "none":
            inputs["table"] = draw(2 * 12 + 1)
        if bias == "position":
            inputs["position"] = torch.cumsum(torch.arange(tokens) % 3 + 1, 0)
        sizes = f"{len(lengths)} sequences, {tokens} tokens, -{left}..+{right}, d_z {d_z}, d_v {d_v}"
        name = f"{attention}, {sizes}, bias {bias}"
        run, obvious = partial(_banded, **fixed), partial(_obvious_attention, **fixed)
        yield Case("attention", name, inputs, run, obvious, ("table",))


def _banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    table: Tensor | None = None,
    position: Tensor | None = None,
    *,
    left: int,
    right: int,
    attention: AttentionName,
    scale: float,
) -> tuple[Tensor, ...]:
    near = Neighbors(group, position, table, left, right, len(q), attention)
    return (banded(q * scale, k, v, *near, 0.0, 0),)


def _obvious_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    table: Tensor | None = None,
    position: Tensor | None = None,
    *,
    left: int,
    right: int,
    attention: AttentionName,
    scale: float,
) -> tuple[Tensor, ...]:
    """Query by query, over the keys that it sees, with the functions of the reference."""
    function, _ = reference.ATTENTION_FUNCTIONS[attention]
    where = torch.arange(len(q), device=q.device) if position is None else position
    outputs = []
    for t in range(len(q)):
        seen = [s for s in range(max(t - left, 0), min(t + right + 1, len(q))) if group[s] == group[t]]
        scores = k[seen] @ q[t] * scale
        if table is not None:
            furthest = len(table) // 2
            scores = scores + table[(where[seen] - where[t] + furthest).clamp(0, 2 * furthest)]
        outputs.append(function(scores) @ v[seen])
    return (torch.stack(outputs) if outputs else v,)


# the examination

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
        form="paper",
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
        layer = SeqBoat(16, SeqBoatConfig(gau=gau, causal=causal, init="paper", form="paper")).to(device)
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

    def plain() -> None:
        with using_kernels("torch"):
            step(layer)()

    jobs = {"seqboat": step(layer)}
    if CHOSEN:
        jobs["seqboat, plain torch"] = plain
    jobs["transformer"] = step(transformer)
    times = time_rounds(jobs, 5, 1, str(device))
    return {"tokens": float(batch * length), **{name: quartiles(t).median for name, t in times.items()}}


# the machine

TYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, the processor and the device, without names of people, computers or folders."""
    found: dict[str, Any] = {"versions": versions() | {"triton": _version("triton")}}
    found["system"] = f"{platform.system()} {platform.machine()}"
    found["processor"] = processor_name()
    found["bf16"] = probe_bf16()
    found["threads"] = torch.get_num_threads()
    found["device"] = device_name(device)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found["capability"] = f"{facts.major}.{facts.minor}"
        found["memory_gb"] = round(facts.total_memory / 1e9, 1)
        found["versions"]["cuda"] = str(torch.version.cuda or torch.version.hip)
    found["kernels"] = {
        operation: {"chosen": about["chosen"], "implementations": about["implementations"]}
        for operation, about in kernels().items()
    }
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def anonymous(content: Any) -> Any:
    """Plain data without the names of the user and the computer, and without paths.

    >>> anonymous({"why": "cannot open /home/me/data/x.so: no"})
    {'why': 'cannot open <path>: no'}
    """
    if isinstance(content, dict):
        return {anonymous(key): anonymous(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [anonymous(value) for value in content]
    if not isinstance(content, str):
        return content
    text = re.sub(r"(?:[A-Za-z]:\\|~?/)(?:[^\s:'\",;()]+[/\\])+[^\s:'\",;()]*", "<path>", content)
    for name in _names():
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def _names() -> list[str]:
    """Of the user and the computer; those that are common words say nothing and stay."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = os.environ.get("USER", "")
    # stays "~" without a home: containers run as users that the system does not know
    home = Path(os.path.expanduser("~"))
    found = {user, home.name, socket.gethostname()}
    return [name for name in found if len(name) > 2 and name not in ("root", "user", "home", "localhost")]
