"""Cases whose numbers must not change while the library is rebuilt; `make_golden.py` stored them once.

Cases are made of public names and plain dictionaries. Everything that depends on how the package is laid out stands
in the first part of this file ("The package, as the cases see it"): whoever moves or renames something changes that
part, and never a case or a fixture.

Inputs and weights are drawn from `numpy.random.RandomState`, whose numbers never change, by the name of the case and
of the parameter; the fixtures hold the seed of each case, and what came out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "fixtures" / "golden" / "library"

# --- The package, as the cases see it -------------------------------------------------------------------------


PLACES: dict[str, tuple[str, ...]] = {
    "Run": ("run",),
    "RunConfig": ("training.config",),
    "Plan": ("training.loader",),
    "train": ("training.trainer", "training.trainer"),
    "prepare": ("data.prepare",),
    "to_dict": ("core.settings", "training.settings_io", "training.config.serialization"),
    "generate": ("text.generate",),
    "SamplingConfig": ("text.generate",),
    "read_chunks": ("text.score", "text.scoring"),
    "score": ("text.score", "text.scoring"),
    "total": ("text.score", "text.scoring"),
    "to_transformers": ("hf.save", "hf.export"),
    "quantize": ("export.int8", "inference.int8"),
    "make_image": ("tasks.curves",),
    "format_line": ("tasks.listops", "tasks.expressions"),
    "iterate": ("tasks.listops", "tasks.expressions"),
    "LISTOPS": ("tasks.listops",),
    "LISTOPS_SMALL": ("tasks.listops",),
    "PATHFINDER": ("tasks.curves",),
    "PATHFINDER16": ("tasks.curves",),
    "PATHX": ("tasks.curves",),
    "PATHX32": ("tasks.curves",),
}
"""Where the names that the package does not export live: the first module that has one counts."""


def load(name: str) -> Any:
    """A name of the package that it does not export."""
    for place in PLACES[name]:
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return getattr(import_module(f"seqboat.{place}"), name)
    raise ImportError(
        f"{name} is in none of {', '.join(PLACES[name])}: add its place to PLACES in {__file__}"
    )


def build_mixer(name: str, d: int, **options: Any) -> nn.Module:
    """The mixer of this name; an option that is a dictionary changes a part, or chooses its form by `name`.

    What it returns is called as `mixer(x, mask, state, cu_seqlens=...)`, and has `init_state(batch)` and
    `step(x, state)` if it decodes.
    """
    from seqboat import MIXERS

    config: Any = change(MIXERS[name](), options)
    return Stack(config.build_layers(d, 3)) if hasattr(config, "build_layers") else config.build(d)


def build_sparse(
    d: int, modules: int, router: Mapping[str, Any], budget: Mapping[str, Any], causal: bool
) -> nn.Module:
    """Linear maps named "0", "1", ..., behind a router with a budget."""
    from seqboat import ROUTERS, BudgetConfig, SparseModularActivation

    options = dict(router)
    config = change(ROUTERS[options.pop("name")](), options)
    units = [nn.Linear(d, d) for _ in range(modules)]
    return SparseModularActivation(units, d, config, budget=BudgetConfig(**budget), causal=causal)


def change(config: Any, options: Mapping[str, Any]) -> Any:
    """A changed copy of a configuration."""
    from seqboat import ROUTERS, SSMS

    forms: dict[str, Any] = {"ssm": SSMS, "router": ROUTERS}
    values = dict(options)
    for key, value in options.items():
        if isinstance(value, Mapping):
            part = forms[key][value["name"]]() if "name" in value else getattr(config, key)
            values[key] = change(part, {k: v for k, v in value.items() if k != "name"})
    return dataclasses.replace(config, **values)


def by_hand(module: nn.Module, **decisions: Any) -> contextlib.AbstractContextManager[None]:
    """Decisions taken by hand, inside a `with` block."""
    from seqboat import override_activation

    return override_activation(module, **decisions)


def run(mixer: nn.Module, x: Tensor, mask: Tensor | None = None, **more: Any) -> tuple[Tensor, Any, Any]:
    """Output, state and routing (`active` and `probs`, or None)."""
    out = mixer(x, mask, **more)
    return out.y, out.state, out.routing


def step(mixer: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Output and state of a single token."""
    out = mixer.step(x, state)
    return out.y, out.state


class Stack(nn.Module):
    """Layers one after the other, for mixers whose layers differ."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, mask: Any = None, state: Any = None, cu_seqlens: Any = None) -> Output:
        states = []
        for number, layer in enumerate(self.layers):
            before = None if state is None else state[number]
            x, after, _ = run(layer, x, mask, state=before, cu_seqlens=cu_seqlens)
            states.append(after)
        return Output(x, states, None)

    def step(self, x: Tensor, state: Any) -> Output:
        states = []
        for layer, before in zip(self.layers, state, strict=True):
            x, after = step(layer, x, before)
            states.append(after)
        return Output(x, states, None)


class Output(NamedTuple):
    """What a stack returns."""

    y: Tensor
    state: Any
    routing: Any


def bundled_model() -> Any:
    """The language model of bytes that comes with the package."""
    return load("Run")("enwik8-small").language_model


def logits_of(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, time, vocab), and which tokens of which layers were active (layers, batch, time)."""
    out = model(tokens)
    return out.logits, torch.stack([routing.active[..., 0] for routing in out.routings])


def greedy_bytes(model: Any, prompts: list[bytes], count: int) -> list[bytes]:
    """What follows each of the prompts."""
    sampling = load("SamplingConfig")(greedy=True)
    found = load("generate")(model, prompts, max_new_bytes=count, sampling=sampling)
    return [text.data for text in found]


def bits_of(model: Any, text: bytes) -> float:
    """Bits per byte of a text, read in chunks of 3,000."""
    scores = load("score")(model, load("read_chunks")(io.BytesIO(text), 3000))
    return float(load("total")(scores).bits_per_token)


def in_transformers(model: Any) -> Any:
    """The same model as one of transformers."""
    return load("to_transformers")(model)


def make_sparse(model: nn.Module, part: str, skipped: str) -> Any:
    """A retrofitted model, in place."""
    from seqboat import retrofit

    return retrofit(model, (part,), skipped=skipped)  # type: ignore[arg-type]


# --- Drawn numbers --------------------------------------------------------------------------------------------

D = 8
TIME = 70


def drawn(key: str, *shape: int) -> Tensor:
    """N(0, 1) in float64, the same for the same key."""
    values = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape)
    return torch.from_numpy(np.asarray(values, dtype=np.float64))


SCALES = {
    "log_temperature": (0.0, 0.2),
    "log_dt": (-1.5, 0.4),
    "log_real": (-0.5, 0.3),
    "log_rate": (0.5, 0.3),
    "step_bias": (-1.0, 0.4),
    "imag": (1.5, 1.0),
    "span_ratio": (0.5, 0.1),
    "running_var": (1.5, 0.05),
    "features": (0.0, 1.0),
    "rotations": (0.0, 1.0),
    "options": (0.0, 1.0),
    "border": (0.0, 0.0),
} | dict.fromkeys(("alpha", "beta", "gamma", "delta", "skip", "b", "c", "p", "second"), (0.0, 0.7))
"""Mean and deviation of drawn weights by the last part of their name; matrices keep the size of their inputs."""


@torch.no_grad()
def fill(module: nn.Module, key: str) -> nn.Module:
    """To float64 and eval mode, every parameter and buffer drawn by its name."""
    module = module.to(torch.float64).eval()
    for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
        last = name.rpartition(".")[2]
        if not value.is_floating_point():
            if last in ("seed", "seeds"):
                value.copy_(torch.arange(1, 1 + value.numel()).view(value.shape))
            continue
        if last in SCALES:
            mean, scale = SCALES[last]
        elif name.endswith("norm.weight"):
            mean, scale = 1.0, 0.2
        else:
            mean, scale = 0.0, value.shape[-1] ** -0.5 if value.dim() > 1 else 0.3
        value.copy_(mean + scale * drawn(f"{key}/{name}", *value.shape))
    return module


def project(value: Tensor, key: str) -> Tensor:
    """(..., d) to (...): along a drawn direction, which no error of ours is orthogonal to."""
    return value.detach() @ drawn(key, value.shape[-1])


def ragged(batch: int = 3, time: int = TIME) -> Tensor:
    """(batch, time): all real; padded on the right; with gaps, which begin and end it."""
    mask = torch.ones(batch, time, dtype=torch.bool)
    mask[1, time - 4 :] = False
    mask[2] = drawn("gaps", time) > -0.6
    mask[2, :2] = mask[2, -3:] = False
    return mask


# --- Cases ----------------------------------------------------------------------------------------------------

Found = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """Numbers by name, from a seed; of those that start with `active`, every one must be equal."""

    name: str
    compute: Callable[[str, bool], Found]
    """of the key from which weights and inputs are drawn, and whether the routers' weights are moved by 1e-3"""

    def __call__(self, seed: int, moved: bool = False) -> Found:
        return self.compute(f"{self.name}/{seed}", moved)

    def __str__(self) -> str:
        return self.name


@torch.no_grad()
def move(module: nn.Module, key: str) -> None:
    """Change the routers a little: decisions that stay the same have a margin."""
    for name, value in module.named_parameters():
        if "router." in name or "logits." in name:
            value.mul_(1 + 1e-3 * drawn(f"move/{key}/{name}", *value.shape))


def prepare(module: nn.Module, key: str, moved: bool) -> nn.Module:
    module = fill(module, key)
    if moved:
        move(module, key)
    return module


def report(module: nn.Module, x: Tensor, key: str, y: Tensor, routing: Any) -> Found:
    """Output, gradients and decisions."""
    found = {"y": project(y, f"{key}/y")}
    if routing is not None:
        found["active"] = routing.active.to(torch.uint8)
        found["probs"] = routing.probs.detach()
    named = sorted(module.named_parameters())
    loss = (y * drawn(f"{key}/loss", *y.shape)).sum()
    grad, *grads = torch.autograd.grad(loss, [x, *(value for _, value in named)], allow_unused=True)
    found["x.grad"] = project(torch.zeros_like(x) if grad is None else grad, f"{key}/x.grad")
    rows = [
        torch.zeros(2, dtype=torch.float64)
        if g is None
        else torch.stack([g.norm(), (g * drawn(f"{key}/{name}/grad", *g.shape)).sum()])
        for (name, _), g in zip(named, grads, strict=True)
    ]
    found["grads"] = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)
    return found


def layer_case(name: str, mixer: str, options: Mapping[str, Any]) -> Case:
    """Output and gradients of a mixer, with a ragged mask."""

    def compute(key: str, moved: bool) -> Found:
        module = prepare(build_mixer(mixer, D, **options), key, moved)
        x = drawn(f"{key}/x", 3, TIME, D).requires_grad_()
        y, _, routing = run(module, x, ragged())
        return report(module, x, key, y, routing)

    return Case(name, compute)


def documents_case(name: str, mixer: str, options: Mapping[str, Any]) -> Case:
    """Output and gradients of a mixer on packed documents, of which one is empty and one longer than a block."""
    lengths = (1, 7, 0, 80, 2, 22)

    def compute(key: str, moved: bool) -> Found:
        module = prepare(build_mixer(mixer, D, **options), key, moved)
        x = drawn(f"{key}/x", 1, sum(lengths), D).requires_grad_()
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        y, _, routing = run(module, x, cu_seqlens=starts)
        return report(module, x, key, y, routing)

    return Case(name, compute)


def pieces_case(name: str, build: Callable[[], nn.Module]) -> Case:
    """Outputs of a causal mixer after pieces of 0, 1, 7 and 33 tokens, and then 20 steps."""

    @torch.no_grad()
    def compute(key: str, moved: bool) -> Found:
        module = prepare(build(), key, moved)
        x = drawn(f"{key}/x", 2, 61, D)
        outputs, actives, state = [], [], None
        for piece in x[:, :41].split((0, 1, 7, 33), dim=1):
            y, state, routing = run(module, piece, state=state)
            outputs.append(y)
            if routing is not None:
                actives.append(routing.active)
        for token in x[:, 41:].unbind(dim=1):
            y, state = step(module, token, state)
            outputs.append(y[:, None])
        found = {"y": project(torch.cat(outputs, dim=1), f"{key}/y")}
        if actives:
            found["active"] = torch.cat(actives, dim=1).to(torch.uint8)
        return found

    return Case(name, compute)


def sparse_case(
    name: str,
    modules: int,
    router: Mapping[str, Any],
    budget: Mapping[str, Any] | None = None,
    causal: bool = False,
    training: bool = False,
    decisions: Mapping[str, Any] | None = None,
) -> Case:
    """Decisions, probabilities, output and gradients of modules behind a router."""

    def compute(key: str, moved: bool) -> Found:
        module = prepare(build_sparse(D, modules, router, budget or {}, causal), key, moved).train(training)
        x = drawn(f"{key}/x", 3, 24, D).requires_grad_()
        with by_hand(module, **decisions) if decisions else contextlib.nullcontext():
            # real tokens first, as a mask given by hand has them
            mask = torch.arange(24) < torch.tensor([[24], [17], [0 if training else 1]])
            y, _, routing = run(module, x, mask)
        return report(module, x, key, y, routing)

    return Case(name, compute)


GAU = {
    "d_z": 6,
    "d_v": 10,
    "window": 5,
    "max_positions": 12,
    "attention": "softmax",
    "span": "memory",
    "positions": "rotary-original",
}
EMA = {"name": "ema", "d_state": 4}
SOFTMAX = {"name": "tempered-softmax"}
LAYER = {"ssm": EMA, "router": SOFTMAX, "gau": GAU, "norm": "layer", "prenorm": False, "init": "paper"}


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


UNROUTED = without(LAYER, "router")
FULL = UNROUTED | {"gau": without(GAU, "span")}
WIDE = UNROUTED | {"gau": without(GAU, "window")}
BOTH = (False, True)

MIXERS: dict[str, tuple[dict[str, Any], tuple[bool, ...]]] = {
    "seqboat": (LAYER, BOTH),
    "seqboat-gau-ffn": (LAYER, BOTH),
    "seqboat-ffn": (LAYER, BOTH),
    "seqboat-sigmoid": (UNROUTED, BOTH),
    "seqboat-moe": (UNROUTED | {"router": {"name": "x-moe", "d_route": 4}}, BOTH),
    "seqboat-local": (UNROUTED, BOTH),
    "seqboat-chunk": (FULL, BOTH),
    "seqboat-mem32": (WIDE | {"router": SOFTMAX}, BOTH),
    "seqboat-local32": (WIDE, BOTH),
    "seqboat-full": (FULL | {"router": SOFTMAX}, BOTH),
    "seqboat-full-always": (FULL, BOTH),
    "seqboat-full-gumbel": (FULL, BOTH),
    "seqboat-full-s4d": (without(FULL, "ssm") | {"router": SOFTMAX}, BOTH),
    "transformer": ({"heads": 2, "positions": "absolute"}, BOTH),
    "mega": ({"ema": {"d_state": 4}, "d_z": 6, "d_v": 10, "max_positions": 12}, BOTH),
    "mega-chunk": ({"ema": {"d_state": 4}, "d_z": 6, "d_v": 10, "chunk": 5, "max_positions": 12}, BOTH),
    "s4d": ({"ssm": {"d_state": 4}}, BOTH),
    "s4": ({"ssm": {"d_state": 4, "systems": 2}}, BOTH),
    "s5": ({"ssm": {"d_state": 4, "systems": 2}}, BOTH),
    "liquid-s4": ({"ssm": {"d_state": 4, "order": 3}}, BOTH),
    "h3": ({"shift": 5, "ssm": {"d_state": 4}, "d_head": 2}, BOTH),
    "h3-hybrid": ({"shift": 5, "ssm": {"d_state": 4}, "d_head": 2, "heads": 2}, BOTH),
    "mamba2": ({"d_state": 4, "d_head": 2}, (True,)),
    "gated-deltanet": ({"heads": 2, "d_key": 12}, (True,)),
    "samba": ({"d_state": 4, "d_head": 2, "heads": 2, "window": 5}, (True,)),
    "samba-gdn": ({"heads": 2, "d_key": 12, "window": 5}, (True,)),
    "transformer-xl": ({"heads": 2, "segment": 5, "memory": 7}, (True,)),
    "adaptive-span": ({"heads": 2, "max_span": 12, "ramp": 3}, (True,)),
    "linformer": ({"heads": 2, "projected": 6, "max_positions": TIME}, (False,)),
    "performer": ({"heads": 2, "features": 10}, (False,)),
    "bigbird": ({"heads": 2, "block_size": 4, "random_blocks": 1}, (False,)),
    "luna": ({"heads": 2, "length": 5}, (False,)),
    "reformer": ({"heads": 2, "hashes": 2, "buckets": 4, "chunk_size": 5}, (False,)),
}
"""Every mixer that stays, with small sizes, and its directions (causal or not)."""

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("transformer", {"positions": "rotary", "prenorm": True, "norm": "rms"}),
    ("transformer", {"activation": "gelu"}),
    ("mega", {"attention": "laplace", "prenorm": True, "norm": "rms"}),
    ("mega", {"attention": "relu2", "ffn": False}),
    ("mega-chunk", {"attention": "laplace", "prenorm": True}),
    ("transformer-xl", {"prenorm": True}),
    ("adaptive-span", {"prenorm": True}),
    ("reformer", {"prenorm": False}),
    ("bigbird", {"prenorm": True}),
    ("performer", {"kernel": "relu", "prenorm": True}),
    ("linformer", {"sharing": "none", "prenorm": True}),
    ("luna", {"tied": False}),
    ("luna", {"prenorm": True}),
    ("h3", {"d_head": 1, "norm": "rms"}),
]
"""Other forms of the mixers."""


def _way(causal: bool) -> str:
    return "causal" if causal else "bidirectional"


def _mixers() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name of the case, name of the mixer, options."""
    for mixer, (options, ways) in MIXERS.items():
        for causal in ways:
            yield f"{mixer}-{_way(causal)}", mixer, options | {"causal": causal}
    for mixer, more in FORMS:
        options, ways = MIXERS[mixer]
        label = "-".join(f"{key}={value}" for key, value in more.items())
        for causal in ways:
            yield f"{mixer}-{label}-{_way(causal)}", mixer, options | more | {"causal": causal}


KERNELS: list[dict[str, Any]] = [
    EMA,
    EMA | {"truncation": 6},
    {"name": "ema-conv", "d_state": 4, "conv": 3},
    {"name": "ema-conv", "d_state": 4, "conv": 3, "truncation": 6},
    {"name": "s4d", "d_state": 4, "rule": "zoh"},
    {"name": "s4d", "d_state": 4, "rule": "bilinear"},
    {"name": "s4d", "d_state": 4, "truncation": 6},
    {"name": "s4", "d_state": 4, "systems": 2},
    {"name": "s5", "d_state": 4, "systems": 2},
    {"name": "liquid-s4", "d_state": 4, "order": 3, "kernel": "pb"},
    {"name": "liquid-s4", "d_state": 4, "order": 2, "kernel": "kb"},
]
ROUTERS: list[dict[str, Any]] = [
    SOFTMAX,
    {"name": "sigmoid"},
    {"name": "sigmoid", "temperature_scale": 0.5},
    {"name": "gumbel-softmax"},
    {"name": "x-moe", "d_route": 4},
    {"name": "always-active"},
    {"name": "top-k", "capacity": 0.4},
]
SPANS = ("memory", "full", "chunk")
POSITIONS = ("original", "compressed", "rotary", "rotary-original", "none")
FUNCTIONS = ("softmax", "relu2", "laplace")
NORMS = ("layer", "rms", "scale", "batch")
WINDOWS = (1, 2, 5, 16, 100)


def _settings() -> Iterator[dict[str, Any]]:
    """Forty settings of the layer, in which all values of each option take turns."""
    random = np.random.RandomState(40)
    options = (SPANS, POSITIONS, FUNCTIONS, NORMS, WINDOWS, KERNELS, ROUTERS[:-1], BOTH, BOTH)
    columns = [[values[i % len(values)] for i in random.permutation(40)] for values in options]
    for span, positions, function, norm, window, kernel, router, prenorm, causal in zip(
        *columns, strict=True
    ):
        gau = GAU | {"span": span, "positions": positions, "attention": function, "window": window}
        parts = {"ssm": kernel, "router": router, "gau": gau, "init": "paper"}
        yield {**parts, "norm": norm, "prenorm": prenorm, "causal": causal}


SETTINGS = list(_settings())
DOCUMENTS: list[tuple[str, str, dict[str, Any]]] = [
    *((f"seqboat-{_way(c)}", "seqboat", LAYER | {"causal": c}) for c in BOTH),
    *(
        (f"seqboat-{span}-{_way(c)}", "seqboat", LAYER | {"gau": GAU | {"span": span}, "causal": c})
        for span in ("full", "chunk")
        for c in BOTH
    ),
    (
        "seqboat-batch",
        "seqboat",
        LAYER | {"gau": GAU | {"positions": "compressed", "attention": "laplace"}, "norm": "batch"},
    ),
    *(
        (f"seqboat-{kernel['name']}-{i}-{_way(c)}", "seqboat", LAYER | {"ssm": kernel, "causal": c})
        for i, kernel in enumerate(KERNELS[1:9])
        for c in BOTH
        if kernel["name"] != "s4"
    ),
    *(
        (f"{m}-{_way(c)}", m, MIXERS[m][0] | {"causal": c})
        for m in ("s4d", "s5", "mamba2", "seqboat-ffn", "seqboat-gau-ffn", "h3-hybrid")
        for c in MIXERS[m][1]
    ),
]


def _pieces() -> Iterator[Case]:
    for name, mixer, options in _mixers():
        if options["causal"]:
            yield pieces_case(name, lambda m=mixer, o=options: build_mixer(m, D, **o))  # type: ignore[misc]
    for number, options in enumerate(SETTINGS):
        options = options | {"causal": True}
        yield pieces_case(f"setting-{number}", lambda o=options: build_mixer("seqboat", D, **o))  # type: ignore[misc]
    for label, budget in (("cap", {"cap": (0.3, 0.6)}), ("per-token", {"per_token": 1})):
        yield pieces_case(f"sparse-{label}", lambda b=budget: build_sparse(D, 2, SOFTMAX, b, True))  # type: ignore[misc]


def _first(routing: Any) -> Tensor:
    active: Tensor = routing.probs > 0.4
    return active


def _sparse() -> Iterator[Case]:
    for i, router in enumerate(ROUTERS):
        if "temperature_scale" in router:
            continue  # covered by the settings of the layer
        for modules in (1, 3):
            for training in (False,) if router["name"] == "gumbel-softmax" else (False, True):
                mode = "training" if training else "eval"
                for causal in BOTH if router["name"] == "top-k" else (False,):
                    name = f"{router['name']}-{i}-{modules}-{mode}-{_way(causal)}"
                    yield sparse_case(name, modules, router, causal=causal, training=training)
    budgets: list[tuple[str, int, dict[str, Any]]] = [
        ("cap", 1, {"cap": 0.3}),
        ("cap-all", 3, {"cap": 0.25}),
        ("caps", 3, {"cap": (0.2, 0.5, 0.9)}),
        ("one", 3, {"per_token": 1}),
        ("two", 3, {"per_token": 2}),
        ("caps-one", 3, {"cap": (0.2, 0.3, 0.1), "per_token": 1}),
    ]
    for name, modules, budget in budgets:
        for router in (SOFTMAX, ROUTERS[1]):
            for causal, training in ((False, False), (True, False), (False, True)):
                label = f"{name}-{router['name']}-{_way(causal)}-{'training' if training else 'eval'}"
                yield sparse_case(label, modules, router, budget, causal, training)
    hands: list[tuple[str, dict[str, Any]]] = [
        ("on", {"active": True}),
        ("off", {"active": False}),
        ("some", {"active": {"0": True, "2": False}}),
        ("mask", {"mask": drawn("mask", 3, 24, 3) > 0.3}),
        ("mask-all", {"mask": drawn("mask", 3, 24) > 0.3}),
        ("function", {"mask": _first}),
        ("threshold", {"threshold": 0.3}),
        ("thresholds", {"threshold": {"0": 0.3, "1": 0.7}}),
        ("cap", {"cap": 0.25}),
        ("caps", {"cap": {"1": 0.1, "2": 0.8}}),
        ("confidence", {"confidence": 0.5}),
        ("threshold-cap", {"threshold": 0.35, "cap": 0.4}),
        ("mask-confidence", {"mask": drawn("mask", 3, 24, 3) > 0.0, "confidence": 1.0}),
    ]
    for name, decisions in hands:
        yield sparse_case(f"hand-{name}", 3, SOFTMAX, decisions=decisions)
    yield sparse_case("hand-cap-budget", 3, SOFTMAX, {"cap": 0.2}, decisions={"cap": 0.5})
    yield sparse_case("hand-threshold-x-moe", 3, ROUTERS[4], decisions={"threshold": 0.2})
    yield sparse_case("hand-cap-causal", 3, SOFTMAX, {}, True, decisions={"cap": 0.25})


CASES: dict[str, list[Case]] = {
    "mixers": [layer_case(*parts) for parts in _mixers()],
    "seqboat": [layer_case(f"setting-{i}", "seqboat", options) for i, options in enumerate(SETTINGS)],
    "routers": list(_sparse()),
    "documents": [documents_case(*parts) for parts in DOCUMENTS],
    "pieces": list(_pieces()),
}
"""By file."""


# --- The model that comes with the package --------------------------------------------------------------------

WORDS = """
the of and in to a is was for as on by with at from it he his an were are which this be had first one
history city world war state river between island north during language people was century known later
government called most system music into form used after water number [[United States]] {{cite}} '''bold'''
"""


def text_of(size: int, seed: int = 0) -> bytes:
    """Text of words, the same for the same seed."""
    random, known, text = np.random.RandomState(seed), WORDS.split(), ""
    while len(text) < size:
        words = [known[i] for i in random.randint(0, len(known), random.randint(5, 15))]
        text += " ".join(words).capitalize() + (".\n" if random.randint(4) == 0 else ". ")
    return text[:size].encode()


PROMPTS = [b"The history of the river", b"In the world ", b"[[United States]] and the"]


def model_numbers(double: bool) -> Found:
    """Logits of the model on 512 bytes, in float64 or float32."""
    model = bundled_model().eval()
    model = model.double() if double else model.float()
    tokens = torch.from_numpy(np.frombuffer(text_of(512), np.uint8).astype(np.int64))[None]
    with torch.no_grad():
        logits, active = logits_of(model, tokens)
    return {"logits": logits[0, ::16].float(), "line": project(logits[0].double(), "line"), "active": active}


def transformers_tokens(beams: int, padded: bool) -> Tensor:
    """(batch, time): what transformers generates from the prompts."""
    model = in_transformers(bundled_model()).eval()
    prompts = PROMPTS if padded else PROMPTS[:1]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            num_beams=beams,
            pad_token_id=0,
        )


def int8_numbers() -> Found:
    """Logits of the model with int8 weights on 128 bytes."""
    model = bundled_model().eval()
    load("quantize")(model)
    tokens = torch.from_numpy(np.frombuffer(text_of(128), np.uint8).astype(np.int64))[None]
    with torch.no_grad():
        logits, active = logits_of(model, tokens)
    return {"logits": logits[0, ::8].float(), "active": active}


RETROFITS = [(p, s) for p in ("mlp", "attention", "block") for s in ("nothing", "linear")]


def retrofit_numbers(part: str, skipped: str) -> Found:
    """Outputs of a drawn BERT of two layers at the rates 1 and 0.5, and the decisions at 0.5."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=60, max_position_embeddings=40, pad_token_id=0, **sizes))
    key = f"bert/{part}/{skipped}"
    fill(model, key)

    def ids(place: int, time: int) -> Tensor:
        return torch.from_numpy(np.random.RandomState(place).randint(3, 60, (3, time)))

    mask = (torch.arange(11) < torch.tensor([[11], [7], [2]])).long()
    inputs = {"input_ids": ids(0, 11) * mask, "attention_mask": mask}
    found = {}
    with torch.no_grad():
        sparse = make_sparse(model, part, skipped)
        model.double()
        found["dense"] = project(model(**inputs).last_hidden_state * mask[..., None], key)
        for name, value in model.named_parameters():
            if "router." in name:
                value.copy_(0.5 * drawn(f"{key}/{name}", *value.shape))
        batches = [{"input_ids": ids(1 + i, 30)} for i in range(4)]
        sparse.set_rate(0.5)
        if skipped == "linear":
            sparse.fit(batches)
        else:
            sparse.calibrate(batches)
        sparse.reset_statistics()
        found["sparse"] = project(model(**inputs).last_hidden_state * mask[..., None], key)
        found["rates"] = torch.tensor(list(sparse.rates().values()), dtype=torch.float64)
    return found
