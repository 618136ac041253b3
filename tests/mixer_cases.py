"""Small mixers for the contract tests: every entry of MIXERS in both directions, and many of them in other forms.

A mixer that is added to MIXERS is included without a change here: its configuration is made small field by
field, by the names that all mixers share.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from seqboat.core.layout import Layout
from seqboat.core.mixer import Mixer, MixerOutput, directions_of
from seqboat.core.state import tensors
from seqboat.layers.gau import GAUConfig, PositionsName
from seqboat.layers.routers import (
    ROUTERS,
    AlwaysActiveConfig,
    GumbelConfig,
    GumbelSoftmax,
    SigmoidConfig,
    SigmoidRouter,
    TemperedSoftmax,
    XMoEConfig,
)
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.layers.sma import SparseModularActivation
from seqboat.mixers import MIXERS
from seqboat.models.backbone import StackConfig
from seqboat.ops.attention import rotate, turns
from seqboat.ssm import SSMS, SSMConfig
from seqboat.ssm.conv import EMAConvConfig
from seqboat.ssm.diagonal import EMAConfig, S4DConfig
from seqboat.ssm.liquid_s4 import LiquidS4Config

D_MODEL = 8

SMALL = {
    "d_state": 4,
    "systems": 2,
    "order": 3,
    "shift": 5,
    "d_head": 2,
    "d_key": 12,  # a head of few numbers often reads next to nothing, and its norm magnifies rounding errors
    "d_z": 6,
    "d_v": 10,
    "block": 8,
    "window": 5,
    "max_positions": 12,
    "heads": 2,
    "segment": 5,
    "chunk": 5,
    "memory": 7,
    "max_span": 12,
    "ramp": 3,
    "first_span": 6.0,
    "projected": 6,
    "features": 10,
    "length": 5,
    "block_size": 2,
    "buckets": 4,
    "hashes": 2,
    "chunk_size": 3,
    "random_blocks": 1,
    "d_route": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Values of fields that would make a test slow, random, or blind to what happens beyond a border."""


def shrink(config: Any) -> Any:
    """The same configuration with small sizes and without dropout, in all of its parts."""
    changes = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            changes[field.name] = shrink(value)
        elif field.name in SMALL and not (field.name == "chunk" and value is None):  # None: no chunks
            changes[field.name] = SMALL[field.name]
    return replace(config, **changes)


def directions(config_class: Any) -> Iterable[tuple[str, Any]]:
    """Small configurations of a mixer, in each direction that it declares to have."""
    for direction in directions_of(config_class):
        config = shrink(config_class(causal=direction == "causal"))
        # the cases push every weight themselves, from the small ones of the paper
        yield direction, replace(config, init="paper") if isinstance(config, SeqBoatConfig) else config


class Stack(Mixer):
    """Layers one after the other, for mixers whose layers differ."""

    def __init__(self, layers: Sequence[Mixer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.d_model, self.causal = layers[0].d_model, layers[0].causal

    def mix(self, x: Tensor, layout: Layout, state: Any) -> MixerOutput:
        return self._through(x, state, lambda layer, y, before: layer(y, layout, before))

    def step(self, x: Tensor, state: Any) -> MixerOutput:
        out = self._through(x, state, lambda layer, y, before: layer.step(y, before))
        return out._replace(state=state)

    def _through(self, x: Tensor, state: Any, run: Callable[[Any, Tensor, Any], MixerOutput]) -> MixerOutput:
        states = []
        for number, layer in enumerate(self.layers):
            x, after, _ = run(layer, x, None if state is None else state[number])
            states.append(after)
        return MixerOutput(x, tuple(states) if self.causal else None)

    @property
    def decodes(self) -> bool:
        return all(layer.decodes for layer in self.layers)

    def init_state(self, batch: int) -> Any:
        return tuple(layer.init_state(batch) for layer in self.layers)  # type: ignore[operator]


def turned(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of (..., dim) at positions (...)."""
    return rotate(x, turns(position, x.shape[-1], x.dtype))


MADE: dict[tuple[Case, int], tuple[Mixer, Tensor]] = {}
"""Mixers of the cases by seed, and the state of the generator after each was made: thousands of tests want
one, and most of the time would be spent on making them."""


@dataclass(frozen=True)
class Case:
    """A mixer to test; `build` makes a new one."""

    name: str
    build: Callable[[], Mixer]

    def make(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Mixer:
        """The mixer in eval mode, its weights moved away from their small initial values: a copy of one made once.

        Random numbers drawn afterward do not depend on which of the calls made it.
        """
        if (self, seed) not in MADE:
            torch.manual_seed(seed)
            mixer = enliven(self.build())
            balance(mixer, torch.randn(4, 64, D_MODEL, dtype=torch.float64))
            MADE[self, seed] = mixer, torch.get_rng_state()
        mixer, generator = MADE[self, seed]
        torch.set_rng_state(generator)
        return copy.deepcopy(mixer).to(dtype)

    def __str__(self) -> str:
        return self.name


def enliven(module: Any) -> Any:
    """To float64 and eval mode, with a random push to every parameter: no part is close to doing nothing."""
    module = module.to(torch.float64).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def balance(module: nn.Module, inputs: Tensor) -> None:
    """Shift the bias of every router so that it activates about half of the tokens of these inputs."""

    def shift(router: nn.Module, arguments: tuple[Tensor]) -> None:
        assert isinstance(router, TemperedSoftmax | SigmoidRouter | GumbelSoftmax)
        logits = router.logits(arguments[0]).flatten(0, -2)
        bias: Tensor = router.logits.bias
        if not isinstance(router, SigmoidRouter):
            # pairs (skip, activate): the difference decides
            logits, bias = logits[:, 1::2] - logits[:, 0::2], bias[1::2]
        # between two tokens: rounding would decide for one that lies on the threshold itself
        middle = logits.median(dim=0).values
        above = torch.where(logits > middle + 1e-6, logits, torch.inf).amin(dim=0)
        bias.sub_(torch.where(above.isfinite(), (middle + above) / 2, middle))

    hooks = [
        part.register_forward_pre_hook(shift)
        for part in module.modules()
        if isinstance(part, TemperedSoftmax | SigmoidRouter | GumbelSoftmax)
    ]
    with torch.no_grad():
        module(inputs)
    for hook in hooks:
        hook.remove()


SMALL_GAU = GAUConfig(d_z=6, d_v=10, window=5, max_positions=12)
SMALL_EMA = EMAConfig(d_state=4, block=8)

SEQBOATS = {
    "plain": SeqBoatConfig(init="paper", ssm=SMALL_EMA, gau=SMALL_GAU),
    "chunk-relu2-compressed-sigmoid": SeqBoatConfig(
        init="paper",
        ssm=SMALL_EMA,
        router=SigmoidConfig(),
        gau=replace(SMALL_GAU, span="chunk", attention="relu2", positions="compressed"),
        norm="rms",
    ),
    "full-laplace-none-gumbel": SeqBoatConfig(
        init="paper",
        ssm=SMALL_EMA,
        router=GumbelConfig(),
        gau=replace(SMALL_GAU, span="full", attention="laplace", positions="none"),
        norm="scale",
        prenorm=True,
    ),
    "memory-rotary-xmoe": SeqBoatConfig(
        init="paper",
        ssm=SMALL_EMA,
        router=XMoEConfig(d_route=4),
        gau=replace(SMALL_GAU, positions="rotary", window=3),
        norm="batch",
        prenorm=True,
    ),
    "full-original-always": SeqBoatConfig(
        init="paper",
        ssm=SMALL_EMA,
        router=AlwaysActiveConfig(),
        gau=replace(SMALL_GAU, span="full", attention="relu2"),
    ),
    "s4d": SeqBoatConfig(
        init="paper",
        ssm=S4DConfig(d_state=4, block=8),
        gau=replace(SMALL_GAU, positions="compressed"),
        norm="batch",
    ),
    "truncated": SeqBoatConfig(
        init="paper", ssm=replace(SMALL_EMA, truncation=6), gau=replace(SMALL_GAU, span="chunk")
    ),
}
for kernel, kernel_class in SSMS.items():
    SEQBOATS.setdefault(kernel, SeqBoatConfig(init="paper", ssm=shrink(kernel_class()), gau=SMALL_GAU))
"""Forms of the SeqBoat layer that together use every option, and every kernel."""


VARIANTS: dict[str, Sequence[dict[str, Any]]] = {
    "transformer": (
        {"positions": "rotary", "prenorm": True, "norm": "rms"},
        {"positions": "relative", "activation": "gelu"},
    ),
    "transformer-xl": ({"prenorm": True},),
    "adaptive-span": ({"prenorm": True},),
    "reformer": ({"prenorm": False},),
    "bigbird": ({"prenorm": True},),
    "performer": ({"kernel": "relu", "prenorm": True},),
    "linformer": ({"sharing": "none", "prenorm": True},),
    "luna": ({"tied": False}, {"prenorm": True}),
    "mega": (
        {"attention": "laplace", "prenorm": True, "norm": "rms"},
        {"attention": "relu2", "ffn": False},
    ),
    "mega-chunk": ({"attention": "relu2"}, {"attention": "laplace", "prenorm": True}),
    "h3": ({"d_head": 1, "norm": "rms"},),
}
"""Other forms of the mixers: their options, each with those that it meets best."""


CORES: dict[str, SSMConfig] = {name: shrink(kernel_class()) for name, kernel_class in SSMS.items()} | {
    "s4d": S4DConfig(d_state=4, block=8, init="lin"),
    "s4d-inv": S4DConfig(d_state=4, init="inv"),
    "ema-truncated": replace(SMALL_EMA, truncation=6),
    "ema-conv-truncated": EMAConvConfig(d_state=4, conv=3, truncation=6),
    "liquid-kb": LiquidS4Config(d_state=4, block=8, order=3, kernel="kb"),
}


def _sparse(causal: bool) -> Mixer:
    units = {
        "gau": SMALL_GAU.build(D_MODEL, causal),
        "ffn": nn.Sequential(nn.Linear(D_MODEL, 12), nn.GELU(), nn.Linear(12, D_MODEL)),
    }
    return SparseModularActivation(units, D_MODEL, start_active=False)


def _stack(config: StackConfig) -> Mixer:
    """Three layers, of which one is not like the others."""
    return Stack(list(config.build_layers(D_MODEL, 3)))


def _cases() -> list[Case]:
    cases = []
    for name, config_class in MIXERS.items():
        for direction, config in directions(config_class):
            if isinstance(config, StackConfig):
                cases.append(Case(f"{name}-{direction}", partial(_stack, config)))
                continue
            cases.append(Case(f"{name}-{direction}", partial(config.build, D_MODEL)))
    for causal in (False, True):
        direction = "causal" if causal else "bidirectional"
        for name, seqboat in SEQBOATS.items():
            layer = replace(seqboat, causal=causal)
            cases.append(Case(f"layer-{name}-{direction}", partial(layer.build, D_MODEL)))
        for name, ssm in CORES.items():
            cases.append(Case(f"core-{name}-{direction}", partial(ssm.build, D_MODEL, causal)))
        cases.append(Case(f"sma-{direction}", partial(_sparse, causal)))
    return cases


def _variants() -> list[Case]:
    cases = []
    for name, forms in VARIANTS.items():
        for direction, config in directions(MIXERS[name]):
            for options in forms:
                label = "-".join(f"{option}={value}" for option, value in options.items())
                variant = replace(config, **options)
                cases.append(Case(f"{name}-{label}-{direction}", partial(variant.build, D_MODEL)))
    return cases


CASES = _cases()
FORMS = CASES + _variants()
"""With other forms of the mixers, for what depends on their options."""


def is_recurrent(case: Case) -> bool:
    """Whether the mixer of a case carries a state."""
    mixer = case.build()
    return mixer.decodes


CAUSAL_FORMS = [case for case in FORMS if case.build().causal]
RECURRENT_CASES = [case for case in CASES if is_recurrent(case)]
RECURRENT_FORMS = [case for case in FORMS if is_recurrent(case)]

MASKS = {
    "full": "######################",
    "right": "############..........",
    "left": "......################",
    "interior": "##..####..#....######.",
    "single": ".........#............",
    "none": "......................",
}
"""Patterns of real tokens (#) and padding (.)."""


def mask_rows(patterns: Iterable[str] | None = None) -> Tensor:
    """(rows, time): the given patterns, or all of MASKS."""
    rows = MASKS.values() if patterns is None else patterns
    return torch.tensor([[sign == "#" for sign in row] for row in rows])


def pairwise(options: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Some of the product of the options, in which every two options of different kinds meet."""
    every = list(itertools.product(*(range(len(choices)) for choices in options)))
    random.Random(0).shuffle(every)
    missing = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(options)), 2)
        for a in range(len(options[i]))
        for b in range(len(options[j]))
    }
    chosen = []
    while missing:

        def gain(candidate: tuple[int, ...]) -> int:
            return len(missing.intersection(itertools.combinations(enumerate(candidate), 2)))

        best = max(every, key=gain)
        missing.difference_update(itertools.combinations(enumerate(best), 2))
        chosen.append(best)
    return [tuple(options[i][pick] for i, pick in enumerate(picks)) for picks in sorted(chosen)]


ROUTER_NAMES = tuple(ROUTERS)
GRID = (
    ROUTER_NAMES,
    get_args(PositionsName),
    ("softmax", "relu2", "laplace"),
    (1, 2, 5, 64),
    ("memory", "full", "chunk"),
)
"""Routers, positions, attention functions, windows (one larger than any sequence here) and spans."""


def grid_layer(choice: tuple[Any, ...]) -> SeqBoatConfig:
    """The causal layer of one choice from GRID."""
    router, positions, attention, window, span = choice
    gau = replace(SMALL_GAU, positions=positions, attention=attention, window=window, span=span)
    return SeqBoatConfig(init="paper", ssm=SMALL_EMA, router=ROUTERS[router](), gau=gau, causal=True)


def grid_name(choice: tuple[Any, ...]) -> str:
    """A readable name of such a choice."""
    return "-".join(map(str, choice))


def assert_near(got: Tensor, expected: Tensor, tolerance: float, name: str = "values") -> None:
    """Equal up to this difference, absolute or relative; zero asks for the same bits."""
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance, equal_nan=False, msg=lambda text: f"{name}: {text}"
    )


def assert_states_near(got: Any, expected: Any, tolerance: float) -> None:
    """Two states hold the same numbers; of a memory that grows, places that were never used may be more."""
    one, two = dict(tensors(got)), dict(tensors(expected))
    assert one.keys() == two.keys()
    for name, a in one.items():
        b = two[name]
        assert a.dim() == b.dim() and a.shape[:1] == b.shape[:1], name
        for dim, size in enumerate(map(min, a.shape, b.shape)):
            spare = [part.narrow(dim, size, part.shape[dim] - size) for part in (a, b)]
            assert not any(part.any() for part in spare), name
            a, b = a.narrow(dim, 0, size), b.narrow(dim, 0, size)
        assert_near(a, b, tolerance, name)


def random_cuts(time: int, generator: random.Random) -> list[int]:
    """The borders of a random split of a sequence, empty pieces included."""
    cuts = sorted(generator.choices(range(time + 1), k=generator.randint(1, 5)))
    return [0, *cuts, time]
