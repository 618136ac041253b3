"""Sparse activation for an existing model: selected modules run only on the tokens that a router picks.

The paper names this as the next step for its mechanism (section 6). `retrofit` changes a model in place: attention
and feed-forward blocks of an encoder of transformers, or token-wise modules of any model, keep their class, name and
weights; each gets a router as a child module, `sparse`, and its `forward` goes through it. At first every token is
active and the outputs are unchanged. Then the budget is lowered (`Retrofit.set_rate`) while the model is fine-tuned.

- The output of an active token is not scaled: the output of a trained module keeps its size. The gradient reaches the
  router as if the output had been scaled by the probability (a straight-through estimate of the paper's confidence).
- A token is active if its probability is at least the module's threshold. In training the threshold is a quantile of
  the batch, so that every batch meets the budget; in evaluation it is the running average of these quantiles, so
  that a decision depends on the token alone.
- Token-wise modules get the active tokens of the batch as one packed array, attention those of each sequence moved to
  the front, with their positions and mask. Causal attention is refused: its cache keeps every token.
- In BERT's layout a block is two modules: the second takes the output of the first and the block's input, and ends
  with the residual connection and its norm. Selecting the first makes both sparse; inactive tokens get only the norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.core.mixer import Routing
from seqboat.core.settings import Settings
from seqboat.data.files import read_json, replacing, write_json
from seqboat.layers.routers import RouterConfig, SigmoidConfig
from seqboat.models.limits import build_within
from seqboat.retrofitting.fitting import Substitute, fit_skipped
from seqboat.retrofitting.unit import Call, Kind, SparseUnit, Steering
from seqboat.training.settings_io import part_from_dict, to_dict

CHILD = "sparse"
"""Name of the child module that holds a module's router."""
FORMAT = 2
"""Version of the saved files; others are rejected."""
_PARTS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "attention": ("sequence", ("self_attn", "attn", "attention.self", "attention", "self_attention")),
    "mlp": ("tokens", ("mlp", "feed_forward", "ffn", "intermediate")),
}
"""Names of the parts of layers in transformers."""


@dataclass(frozen=True, kw_only=True)
class RateSchedule(Settings):
    """The fraction of active tokens over training: `start`, then a linear ramp to `final`, then `final`.

    >>> schedule = RateSchedule(final=0.5, begin=100, steps=200)
    >>> [schedule(step) for step in (0, 100, 200, 300, 1000)]
    [1.0, 1.0, 0.75, 0.5, 0.5]
    """

    final: float
    """Fraction of active tokens at the end."""
    start: float = 1.0
    """Fraction of active tokens at the beginning."""
    begin: int = 0
    """Step at which the ramp begins."""
    steps: int
    """Length of the ramp in steps."""

    def __post_init__(self) -> None:
        check_fraction("start", self.start)
        check_fraction("final", self.final)
        check_positive("begin", self.begin, least=0)
        check_positive("steps", self.steps)

    def __call__(self, step: int) -> float:
        done = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        return self.start + (self.final - self.start) * done


Skipped = Literal["nothing", "linear"]
"""What inactive tokens get: nothing is added to them, or a linear map of the token."""


def check_fraction(name: str, value: float) -> None:
    """Reject a fraction of tokens outside (0, 1]."""
    require(0.0 < value <= 1.0, f"{name} must be in (0, 1], got {value!r}")


class Retrofit:
    """A model whose selected modules run only on the tokens that routers pick; made by `retrofit`.

    Use the model itself as before. This object has what is new: the budget, the statistics, the routers.

    Args:
        model: changed in place.
        kinds: modules by name, and how each is run.
        d_model: width of the tokens.
        router: the configuration of every router.
        budget: how the rate is kept.
        skipped: what inactive tokens get.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    >>> sparse = retrofit(model, {"1": "tokens"}, d_model=8)
    >>> sparse.set_rate(0.5)
    >>> sparse.undo()                                    # the model as it was
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: Mapping[str, Kind],
        d_model: int,
        router: RouterConfig,
        budget: Steering,
        skipped: Skipped = "nothing",
    ) -> None:
        self.model = model
        self.kinds = dict(kinds)
        self.d_model, self.router, self.budget = d_model, router, budget
        self.skipped: Skipped = skipped
        self.units: dict[str, SparseUnit] = {}
        """by the name of the module"""
        self._frozen: list[nn.Parameter] = []
        self._call = Call()
        self._call.units = max(len(self.kinds), 1)
        for name, kind in self.kinds.items():
            owner = model.get_submodule(name)
            weight = next(owner.parameters(), torch.empty(()))
            second = second_half(model, name)
            routed = router.build(d_model).to(weight.device)
            cheap = Substitute(d_model, weight.dtype) if skipped == "linear" else None
            unit = SparseUnit(owner, kind, routed, budget, self._call, second, cheap)
            unit.to(weight.device).train(owner.training)
            owner.add_module(CHILD, unit)
            owner.forward = unit.forward
            if second is not None:
                second.forward = unit.finish
            self.units[name] = unit
        self._signature = inspect.signature(model.forward)
        self._hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)

    @staticmethod
    def of(model: nn.Module) -> Retrofit:
        """The `Retrofit` of a retrofitted model, for example of a copy."""
        for hook in model._forward_pre_hooks.values():
            found = getattr(hook, "__self__", None)
            if isinstance(found, Retrofit):
                return found
        raise ValueError(f"{type(model).__name__} is not retrofitted")

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model runs: update the thresholds, and note the padding mask."""
        for unit in self.units.values():
            unit.follow()
        given = self._signature.bind_partial(*args, **kwargs).arguments if args else kwargs
        mask = given.get("attention_mask", given.get("kwargs", {}).get("attention_mask"))
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        self._call.mask = None
        if isinstance(mask, Tensor) and mask.dim() == 2 and isinstance(tokens, Tensor):
            # a decoder's mask covers what its cache holds too
            mask = mask[:, mask.shape[1] - tokens.shape[1] :].bool()
            self._call.real_count = int(mask.sum())
            self._call.mask = mask if self._call.real_count < mask.numel() else None

    @property
    def rate(self) -> float:
        """The fraction of tokens that every module may activate; at 1 the model is unchanged."""
        return next(iter(self.units.values())).rate

    def set_rate(self, rate: float) -> None:
        """Change the fraction of active tokens that training aims at, or that `calibrate` sets."""
        check_fraction("rate", rate)
        for unit in self.units.values():
            if unit.rate != rate:
                # the last batch under the old rate still counts
                unit.follow()
                unit.updates.zero_()
                unit.rate = rate

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Set the thresholds for the current rate from data, without training.

        What earlier modules skip changes the inputs of later ones, so it takes several batches until all settle.

        Args:
            batches: keyword arguments of the model, one call per batch; it runs in evaluation mode.
        """
        was, self._call.tracking = self.model.training, True
        self.model.eval()
        try:
            for batch in batches:
                self.model(**batch)
            for unit in self.units.values():
                unit.follow()
        finally:
            self._call.tracking = False
            self.model.train(was)

    def fit(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Fit substitutes and routers to the dense model by least squares, without training; see `fit_skipped`.

        Set the rate before: the substitute is fitted to the tokens that will be skipped, and the threshold is set.

        Args:
            batches: keyword arguments of the model, one call per batch; all are run in evaluation mode, about
                three times.
        """
        fit_skipped(self.model, self.units, list(batches))

    def loss(self) -> Tensor:
        """Mean over modules of the squared difference between the last call's rate and the budget.

        With the budget "loss", add it to the loss of the task (times a weight, 1 or more); `seqboat.extra_loss` does
        the same. Its gradient reaches every token's probability, active or not.
        """
        for name, unit in self.units.items():
            require(unit.routing is not None, f"{name} has not run yet: call the model before its loss")
        return torch.stack([unit.rate_error() for unit in self.units.values()]).mean()

    def rates(self) -> dict[str, float]:
        """The fraction of tokens that each module activated since `reset_statistics`; padding does not count."""
        return {name: unit.activated / max(unit.seen, 1) for name, unit in self.units.items()}

    def reset_statistics(self) -> None:
        """Reset the counts."""
        for unit in self.units.values():
            unit.activated = unit.seen = 0

    def routings(self) -> dict[str, Routing]:
        """The decisions of the last call, (batch, time, 1) each."""
        return {
            name: Routing(*(part[..., None] for part in unit.routing))
            for name, unit in self.units.items()
            if unit.routing is not None
        }

    def router_parameters(self) -> list[nn.Parameter]:
        """What the retrofit added: parameters to tune alone, or with a separate learning rate."""
        return [parameter for unit in self.units.values() for parameter in unit.parameters()]

    def freeze(self) -> None:
        """Freeze all weights but the routers'; `unfreeze` undoes this."""
        mine = {id(parameter) for parameter in self.router_parameters()}
        for parameter in self.model.parameters():
            if id(parameter) not in mine and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)

    def unfreeze(self) -> None:
        """Make trainable what `freeze` froze."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen.clear()

    def original_state_dict(self) -> dict[str, Tensor]:
        """The model's weights without the routers, as an unmodified model of its class loads them.

        >>> retrofitted.model.save_pretrained(folder, state_dict=retrofitted.original_state_dict())  # doctest: +SKIP
        """
        added = tuple(f"{name}.{CHILD}." if name else f"{CHILD}." for name in self.units)
        return {key: value for key, value in self.model.state_dict().items() if not key.startswith(added)}

    def save(self, folder: str | Path) -> None:
        """Write what the retrofit added, retrofit.json and retrofit.safetensors; the model is saved separately."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{name}.{key}": value.contiguous()
            for name, unit in self.units.items()
            for key, value in unit.state_dict().items()
        }
        about = {
            "format": FORMAT,
            "kinds": self.kinds,
            "rates": {name: unit.rate for name, unit in self.units.items()},
            "d_model": self.d_model,
            "router": to_dict(self.router, RouterConfig),
            "budget": self.budget,
            "skipped": self.skipped,
        }
        with replacing(folder / "retrofit.safetensors") as stage:
            save_file(tensors, stage)
        write_json(folder / "retrofit.json", about, indent=2)

    def undo(self) -> None:
        """Restore every module's forward and remove the routers; weights keep their current values."""
        self.unfreeze()
        self._hook.remove()
        for name, unit in self.units.items():
            owner = self.model.get_submodule(name)
            if unit._before is None:
                del owner.forward
            else:
                owner.forward = unit._before
            delattr(owner, CHILD)
            if unit.halved:
                del unit._second[0].forward  # type: ignore[union-attr]
        self.units.clear()


def retrofit(
    model: nn.Module,
    select: Sequence[str] | Mapping[str, Kind] = ("attention", "mlp"),
    *,
    d_model: int | None = None,
    router: RouterConfig | None = None,
    budget: Steering = "controller",
    skipped: Skipped = "nothing",
) -> Retrofit:
    """Make selected modules of a model sparse, in place. At first all tokens are active, and nothing changes.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    >>> sparse = retrofit(model, {"1": "tokens"}, d_model=8)
    >>> sparse.set_rate(0.5)
    >>> y = model(torch.randn(2, 5, 8))  # a training step: from here the threshold follows the rate
    >>> sparse.rates().keys()
    dict_keys(['1'])

    Args:
        model: an encoder of transformers, or any module with token-wise ones.
        select: parts of its layers: "attention", "mlp", or "block" for whole layers. Or a mapping from patterns of
            module names to how to run them: {"encoder.layer.[13].mlp": "tokens"}. "tokens" is for token-wise
            modules, "sequence" for bidirectional attention, "block" for such modules with a residual connection
            inside, so that skipped tokens pass unchanged.
        d_model: width of the tokens; by default what the model's configuration says.
        router: the router's configuration; one logit per token by default.
        budget: how the rate is kept: "controller" moves the thresholds during training; for "loss", add
            `Retrofit.loss` to your loss.
        skipped: what inactive tokens get: nothing is added to them ("nothing"), or a linear map of the token, which
            `Retrofit.fit` sets and training changes ("linear").
    """
    check_choice("budget", budget, get_args(Steering))
    check_choice("skipped", skipped, get_args(Skipped))
    require(
        not any(isinstance(part, SparseUnit) for part in model.modules()),
        "model is retrofitted already: call undo() first",
    )
    kinds = find_modules(model, select)
    config = getattr(model, "config", None)
    if d_model is None:
        d_model = getattr(config, "hidden_size", None)
        require(d_model is not None, "d_model must be given: the model has no config.hidden_size")
        assert d_model is not None
    check_positive("d_model", d_model)
    kernel = getattr(config, "_attn_implementation", None)
    require(
        kernel in (None, "eager", "sdpa") or all(kind == "tokens" for kind in kinds.values()),
        f"the model's attention implementation must be eager or sdpa, got {kernel}",
    )
    return Retrofit(model, kinds, d_model, router or SigmoidConfig(), budget, skipped)


def find_modules(model: nn.Module, select: Sequence[str] | Mapping[str, Kind]) -> dict[str, Kind]:
    """The modules that `retrofit` would wrap, and how it would run each."""
    require(not isinstance(select, str), f"select must be a sequence or a mapping, got the string {select!r}")
    found: dict[str, Kind] = {}
    if isinstance(select, Mapping):
        names = [name for name, _ in model.named_modules() if name]
        for pattern, kind in select.items():
            check_choice(f"select[{pattern!r}]", kind, get_args(Kind))
            matches = [name for name in names if fnmatchcase(name, pattern)]
            require(len(matches) > 0, f"select: no module of the model is called {pattern!r}")
            found.update(dict.fromkeys(matches, kind))
    else:
        for part in select:
            check_choice("select", part, (*_PARTS, "block"))
        for path, layer in _layers(model):
            if "block" in select:
                found[path] = "block"
            for part, (kind, _) in _PARTS.items():
                if part in select:
                    found[f"{path}.{_part(layer, part)}"] = kind
        require(
            len(found) > 0,
            f"select: no layers with attention and mlp found in {type(model).__name__}; "
            "name modules by pattern",
        )
    for name, kind in found.items():
        outer = [other for other in found if name.startswith(f"{other}.")]
        require(not outer, f"select: {name} is inside {outer and outer[0]}, which is selected too")
        _check_module(model, name, kind)
    return found


def second_half(model: nn.Module, name: str) -> nn.Module | None:
    """The module that ends the block that the named one begins, in BERT's layout; None elsewhere.

    It is called `output` and takes the output of the first half and the input of the block.
    """
    parent, _, own = name.rpartition(".")
    second = getattr(model.get_submodule(parent), "output", None)
    if own not in ("self", "intermediate") or not isinstance(second, nn.Module):
        return None
    return second if list(inspect.signature(second.forward).parameters)[1:] == ["input_tensor"] else None


def _part(layer: nn.Module, part: str) -> str | None:
    """The name of a part of a layer."""
    names = {name for name, _ in layer.named_modules()}
    return next((name for name in _PARTS[part][1] if name in names), None)


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (f"{path}.{i}" if path else str(i), layer)
        for path, layers in model.named_modules()
        if isinstance(layers, nn.ModuleList)
        for i, layer in enumerate(layers)
        if all(_part(layer, part) is not None for part in _PARTS)
    ]


def _check_module(model: nn.Module, name: str, kind: Kind) -> None:
    """Reject modules that cannot run on a subset of their tokens."""
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    if kind == "tokens":
        require(
            getattr(parent, "chunk_size_feed_forward", 0) == 0 or second_half(model, name) is None,
            f"{name} must get all tokens at once, but chunk_size_feed_forward is not 0",
        )
        return
    require(
        all(getattr(part, "is_causal", False) is False for part in module.modules()),
        f"{name} has causal attention, whose cache keeps every token: select token-wise modules, as ('mlp',)",
    )
    require(
        "attention_mask" in inspect.signature(module.forward).parameters,
        f"{name} must take an attention_mask to be run on a part of its tokens",
    )
    for part in module.modules():
        require(
            getattr(part, "sliding_window", None) is None,
            f"{name} has a sliding window, which counts positions that a sparse module leaves out",
        )


def load_retrofit(model: nn.Module, folder: str | Path) -> Retrofit:
    """Retrofit a model from files written by `Retrofit.save`, including thresholds and rates.

    Args:
        model: of the same class, with its weights already loaded.
        folder: with retrofit.json and retrofit.safetensors.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     retrofit(model, {"1": "tokens"}, d_model=8).save(folder)
    ...     other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    ...     load_retrofit(other, folder).rates().keys()
    dict_keys(['1'])
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    file, weights = folder / "retrofit.json", folder / "retrofit.safetensors"
    require(file.is_file(), f"{folder} contains no retrofit.json")
    require(weights.is_file(), f"{folder} contains no retrofit.safetensors")
    about = read_json(file)
    require(isinstance(about, dict), f"{file} does not describe a retrofit")
    require(about.get("format") == FORMAT, f"{file} has format {about.get('format')!r}, expected {FORMAT}")
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{weights} cannot be read: {error}") from error
    made = None
    try:
        router = part_from_dict(RouterConfig, about["router"], "router")
        _check_size(about, router, tensors)
        made = retrofit(
            model,
            about["kinds"],
            d_model=about["d_model"],
            router=router,
            budget=about["budget"],
            skipped=about["skipped"],
        )
        for name, unit in made.units.items():
            own = {
                key.removeprefix(f"{name}."): value
                for key, value in tensors.items()
                if key.startswith(f"{name}.")
            }
            unit.load_state_dict(own)
            check_fraction(f"rates[{name!r}]", about["rates"][name])
            unit.rate = about["rates"][name]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if made is not None:
            made.undo()
        raise ValueError(f"{file} and {weights.name} do not fit: {type(error).__name__}: {error}") from error
    return made


def _check_size(about: Mapping[str, Any], router: RouterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a retrofit far larger than the tensors that were saved of it, before anything of it is made."""
    d_model, skipped = about["d_model"], about.get("skipped")
    check_positive("d_model", d_model)
    least = 2 if skipped == "linear" else 1  # a map from d_model to d_model
    require(
        any(tuple(part.shape).count(d_model) >= least for part in tensors.values()),
        f"d_model is {d_model}, which no saved tensor has",
    )
    elements = sum(part.numel() for part in tensors.values())
    build_within(lambda: router.build(d_model), elements, 0, len(tensors), "the router")
