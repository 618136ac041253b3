"""The configuration of a run: plain frozen dataclasses, to and from a dictionary or YAML, with dotted overrides.

A part that can be one of several things (a mixer, a task, a router, a state-space layer) is a dictionary with its
`name`; everything else follows from the fields of the dataclasses and their types. Files are data: no tags, no
class paths, nothing that is looked up by import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from torch import nn

from seqboat.checks import check_choice, check_positive, require
from seqboat.core.routers import ROUTERS, RouterConfig
from seqboat.mixers import MIXERS
from seqboat.mixers.base import directions_of
from seqboat.mixers.ssm import SSMS, SSMConfig
from seqboat.models.backbone import BackboneConfig, Classifier, LanguageModel, Matcher, MixerConfig
from seqboat.tasks import TASKS
from seqboat.tasks.base import SPLITS, Split, Task, TaskConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig

Precision = Literal["fp32", "bf16"]
Distributed = Literal["ddp", "fsdp"]
Tracker = Literal["tensorboard", "trackio", "wandb"]
MAX_FILE = 1 << 20
"""Bytes of a configuration file beyond which it is refused."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How the steps are taken."""

    batch_size: int = 32
    """Examples per update, over all processes and micro-batches."""
    accumulation: int = 1
    """Micro-batches per update and process."""
    bucketing: bool = False
    """Whether examples of similar length share a batch."""
    carry_state: bool = False
    """Whether a language model reads contiguous text and keeps its state from batch to batch, without gradient."""
    workers: int = 0
    """Processes that read data; 0 reads between the steps."""
    precision: Precision = "fp32"
    """Full precision, or bf16 where it is safe (the parameters stay in full precision)."""
    compile: bool = False
    """Whether the model runs through torch.compile."""
    gradient_checkpointing: bool = False
    """Whether layers are computed again in the backward pass instead of kept."""
    distributed: Distributed = "ddp"
    """With several processes: copies of the model (ddp), or one model spread over them (fsdp)."""
    device: str = "auto"
    """Where to train; auto takes a GPU if there is one."""
    log_every: int = 20
    """Steps between lines of metrics."""
    save_every: int = 1000
    """Steps between checkpoints; evaluations that improve save too."""
    keep: int = 2
    """How many of the newest checkpoints to keep besides the best."""
    trackers: tuple[Tracker, ...] = ()
    """Where metrics go besides the run's own file."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "log_every", "save_every", "keep"):
            check_positive(f"training.{name}", getattr(self, name))
        check_positive("training.workers", self.workers, least=0)
        check_choice("training.precision", self.precision, ("fp32", "bf16"))
        check_choice("training.distributed", self.distributed, ("ddp", "fsdp"))
        require(
            self.accumulation <= self.batch_size,
            f"training.accumulation must not exceed training.batch_size, "
            f"got {self.accumulation} and {self.batch_size}",
        )
        require(
            not (self.carry_state and self.bucketing),
            "training.carry_state and training.bucketing exclude each other: contiguous text is not sorted",
        )
        for tracker in self.trackers:
            check_choice("training.trackers", tracker, ("tensorboard", "trackio", "wandb"))


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How held-out data is scored during training."""

    every: int = 1000
    """Steps between evaluations; there is one more after the last step."""
    batch_size: int = 32
    """Examples at a time, over all processes."""
    split: Split = "val"
    """What is scored."""
    limit: int | None = None
    """How many examples are scored during training; None scores all."""
    patience: int | None = None
    """Stop after so many evaluations without a better one; None never stops early."""

    def __post_init__(self) -> None:
        check_positive("evaluation.every", self.every)
        check_positive("evaluation.batch_size", self.batch_size)
        check_choice("evaluation.split", self.split, SPLITS)
        for name in ("limit", "patience"):
            if getattr(self, name) is not None:
                check_positive(f"evaluation.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run depends on."""

    task: TaskConfig
    """What is learnt."""
    model: BackboneConfig
    """Who learns it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How parameters move."""
    schedule: ScheduleConfig = ScheduleConfig()
    """For how long, and how fast."""
    training: TrainingConfig = TrainingConfig()
    """How the steps are taken."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How held-out data is scored."""
    seed: int = 0
    """Of the initial weights, the order of the data and the noise of dropout and routers."""
    recipe: str = ""
    """Where the configuration came from."""

    def __post_init__(self) -> None:
        check_positive("seed", self.seed, least=0)

    def build_task(self) -> Task:
        """The task; reads no data yet."""
        return self.task.build()

    def build_model(self, task: Task | None = None, classes: int | None = None) -> nn.Module:
        """A model with fresh weights for the task; the number of classes may be known better than from its data."""
        task = task or self.build_task()
        have, want = self.model.vocab, task.vocab
        require(
            have is None or have == want,
            f"model.vocab must be {want} for the task {task.name}, got {have}",
        )
        backbone = dataclasses.replace(self.model, vocab=want, channels=task.channels)
        if task.kind == "lm":
            return LanguageModel(backbone)
        return (Matcher if task.kind == "match" else Classifier)(backbone, classes or task.classes)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy in which fields, or fields of parts, are changed: `replace(seed=1, model=dict(num_layers=2))`."""
        return dataclasses.replace(
            self,
            **{
                name: dataclasses.replace(getattr(self, name), **value) if isinstance(value, dict) else value
                for name, value in changes.items()
            },
        )


FREE_TO_CHANGE = (
    "recipe",
    "task.data_dir",
    "training.workers",
    "training.device",
    "training.distributed",
    "training.log_every",
    "training.save_every",
    "training.keep",
    "training.trackers",
)
"""Fields that a resumed run may change: they decide where and what is seen of the numbers, not the numbers."""


# names and types of fields


class Choice(typing.NamedTuple):
    """A field that can be one of several dataclasses."""

    options: Mapping[str, Callable[[], Any]]
    """makes the default of each, by name"""

    def name_of(self, value: object) -> str:
        """The name under which a value's class is listed."""
        for name, make in self.options.items():
            if (make if isinstance(make, type) else type(make())) is type(value):
                return name
        raise ValueError(f"{type(value).__name__} is not one of {', '.join(self.options)}")


FAMILIES: Mapping[Any, Mapping[str, Callable[[], Any]]] = {
    MixerConfig: MIXERS,
    TaskConfig: TASKS,
    RouterConfig: ROUTERS,
    SSMConfig: SSMS,
}
"""Kinds of parts that a field may be one of, each with the registry that names them."""


@cache
def hints(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields."""
    found = typing.get_type_hints(cls)
    return {field.name: found[field.name] for field in dataclasses.fields(cls)}


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def _choice(hint: Any) -> Choice | None:
    """The options of a field, if it has any."""
    options = FAMILIES.get(hint)
    return None if options is None else Choice(options)


def to_dict(config: Any, hint: Any = None) -> Any:
    """A configuration as plain dictionaries, lists, numbers and words."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        choice = _choice(hint)
        head = {"name": choice.name_of(config)} if choice else {}
        fields = hints(type(config))
        return head | {name: to_dict(getattr(config, name), fields[name]) for name in fields}
    if isinstance(config, tuple | list):
        return [to_dict(item) for item in config]
    return str(config) if isinstance(config, Path) else config


RENAMED = {"optimiser": "optimizer"}
"""Former names of groups of fields, which files and commands may still use."""


def modernize(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dictionary with the former names of its groups replaced by the present ones."""
    for old, new in RENAMED.items():
        if old in data:
            require(new not in data, f"{old} and {new} are the same group of fields: give one of them")
            data = {RENAMED.get(key, key): value for key, value in data.items()}
    return data


def from_dict(data: Mapping[str, Any], base: RunConfig | None = None) -> RunConfig:
    """A run's configuration from a dictionary; what it lacks comes from `base` or from the defaults."""
    data = modernize(data)
    merged = data if base is None else _merge(to_dict(base), data, RunConfig, "")
    config = _read(RunConfig, merged, "")
    assert isinstance(config, RunConfig)
    return config


def part_from_dict(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    """A part of a configuration from a dictionary; what it lacks comes from the defaults.

    Args:
        kind: the type of the part, such as MixerConfig or BackboneConfig.
        data: its fields, and its name where there are several of the kind.
        where: what messages call it.
    """
    return _read(kind, data, where)


def _inner(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _class_of(hint: Any, data: Mapping[str, Any], where: str) -> type | None:
    """The dataclass that a dictionary describes."""
    choice = _choice(hint)
    if choice is not None:
        name = str(data.get("name"))
        if name not in choice.options:
            raise ValueError(_unknown(f"{where or 'configuration'}: name", name, choice.options))
        make = choice.options[name]
        return make if isinstance(make, type) else type(make())
    for member in _members(hint):
        if dataclasses.is_dataclass(member):
            return member  # type: ignore[return-value]
    return None


def _unknown(what: str, name: object, known: typing.Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    return f"{what} {name!r} is unknown; {hint}"


def _read(hint: Any, data: Any, where: str) -> Any:
    if data is None and type(None) in _members(hint):
        return None
    if isinstance(data, Mapping):
        cls = _class_of(hint, data, where)
        if cls is None:
            raise ValueError(f"{where} must be {_spell(hint)}, got a dictionary")
        fields = hints(cls)
        given = {key: value for key, value in data.items() if key != "name" or "name" in fields}
        for key in given:
            if key not in fields:
                raise ValueError(
                    _unknown("field", _inner(where, str(key)), [_inner(where, f) for f in fields])
                )
        values = {key: _read(fields[key], value, _inner(where, key)) for key, value in given.items()}
        required = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        for name in required:
            if name not in values:
                raise ValueError(f"{_inner(where, name)} is missing")
        choice = _choice(hint)
        if choice is not None and not isinstance(choice.options[data["name"]], type):
            return dataclasses.replace(choice.options[data["name"]](), **values)
        return cls(**values)
    choice = _choice(hint)
    if choice is not None and isinstance(data, str):
        return _read(hint, {"name": data}, where)
    return _value(hint, data, where)


def _spell(hint: Any) -> str:
    """A type in words."""
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(str(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "a list"
    members = _members(hint)
    if len(members) > 1:
        return " or ".join(_spell(m) for m in members)
    if (choice := _choice(hint)) is not None:
        return "one of " + ", ".join(choice.options)
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return words.get(hint, "a dictionary")


def _value(hint: Any, data: Any, where: str) -> Any:
    """A value that came from YAML, JSON or Python, checked against its type."""
    for member in _members(hint):
        origin = typing.get_origin(member)
        if member is type(None) and data is None:
            return None
        if origin is Literal and data in typing.get_args(member):
            return data
        if member is bool and isinstance(data, bool):
            return data
        if member is int and isinstance(data, int) and not isinstance(data, bool):
            return data
        if member is float and isinstance(data, int | float | str) and not isinstance(data, bool):
            with contextlib.suppress(ValueError):  # YAML reads 1e-3 as a word
                return float(data)
        if member is str and isinstance(data, str):
            return data
        if member is Path and isinstance(data, str | Path):
            return Path(data)
        if origin is tuple and isinstance(data, list | tuple):
            parts = typing.get_args(member)
            if parts[-1] is Ellipsis:
                return tuple(_read(parts[0], item, f"{where}[{i}]") for i, item in enumerate(data))
            if len(parts) == len(data):
                return tuple(
                    _read(p, item, f"{where}[{i}]")
                    for i, (p, item) in enumerate(zip(parts, data, strict=True))
                )
    raise ValueError(f"{where or 'configuration'} must be {_spell(hint)}, got {data!r}")


def _parse(hint: Any, words: Sequence[str], where: str) -> Any:
    """A value that came from the command line, checked against its type."""
    for member in _members(hint):
        if typing.get_origin(member) is tuple:
            kinds = typing.get_args(member)
            items = [] if list(words) in ([""], ["[]"]) else list(words)
            if kinds[0] not in (str, Path):  # paths may hold commas
                items = [item for word in items for item in word.strip("[]()").split(",") if item]
            if kinds[-1] is not Ellipsis and len(kinds) != len(items):
                raise ValueError(f"{where} must be {len(kinds)} values, got {' '.join(words)}")
            kinds = (kinds[0],) * len(items) if kinds[-1] is Ellipsis else kinds
            return tuple(_parse(k, [i.strip()], where) for k, i in zip(kinds, items, strict=True))
    if len(words) != 1:
        raise ValueError(f"{where} must be {_spell(hint)}, got {' '.join(words) or 'nothing'}")
    word = words[0]
    if type(None) in _members(hint) and word.lower() in ("none", "null"):
        return None
    converted: list[Any] = []
    for member in _members(hint):
        if member is bool and word.lower() in ("true", "false", "yes", "no", "1", "0"):
            converted.append(word.lower() in ("true", "yes", "1"))
        elif member is int:
            with contextlib.suppress(ValueError):
                converted.append(int(word))
        elif member is not type(None):
            converted.append(word)
    for value in converted:
        try:
            return _value(hint, value, where)
        except ValueError:
            continue
    raise ValueError(f"{where} must be {_spell(hint)}, got {word!r}")


def field_names(data: Mapping[str, Any], where: str = "") -> list[str]:
    """Dotted names of all fields of a configuration in dictionary form."""
    names = []
    for key, value in data.items():
        inner = _inner(where, key)
        names.append(inner)
        if isinstance(value, Mapping):
            names += field_names(value, inner)
    return names


CARRIED = ("causal",)
"""Fields of a mixer that the task decides: they stay when another mixer is chosen."""


def _chosen(hint: Any, name: str, old: Any, where: str) -> dict[str, Any]:
    """The dictionary of another option, with the default of every field."""
    choice = _choice(hint)
    assert choice is not None
    if name not in choice.options:
        raise ValueError(_unknown(where, name, choice.options))
    made = choice.options[name]()
    new: dict[str, Any] = {"name": name} | {
        key: value for key, value in to_dict(made, hint).items() if key != "name"
    }
    carried = {key: old[key] for key in CARRIED if isinstance(old, Mapping) and key in old and key in new}
    if carried.get("causal") is False and "bidirectional" not in directions_of(made):
        del carried["causal"]  # what needs no causal mixer can do with one
    return new | carried


def _merge(base: dict[str, Any], data: Mapping[str, Any], hint: Any, where: str) -> dict[str, Any]:
    """One dictionary over another; choosing another name starts from its defaults."""
    choice = _choice(hint)
    if choice is not None and "name" in data and data["name"] != base.get("name"):
        base = _chosen(hint, str(data["name"]), base, _inner(where, "name"))
    cls = _class_of(hint, base, where)
    fields = hints(cls) if cls else {}
    merged = dict(base)
    for key, value in data.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) and key in fields:
            merged[key] = _merge(base[key], value, fields[key], _inner(where, key))
        else:
            merged[key] = value
    return merged


def override(config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """Apply command-line overrides: `--a.b=value`, or `--a.b value` with as many values as a list takes.

    `--model.mixer NAME` (or task, router, ssm) picks an option with its defaults; `--data.x` is `--task.x`.
    """
    data = to_dict(config)
    for name, words in split_arguments(arguments):
        _set(data, name, words)
    return from_dict(data)


def change_field(config: Any, path: str, value: Any, label: str) -> Any:
    """A configuration with another value of one field.

    Args:
        config: of a mixer or any other part.
        path: the field's name; those of parts are dotted.
        value: as it is, unchecked.
        label: what the messages begin with.

    >>> from seqboat import SeqBoatConfig
    >>> change_field(SeqBoatConfig(), "gau.window", 32, "mine").gau.window
    32
    """
    name, _, rest = path.partition(".")
    known = [field.name for field in dataclasses.fields(config)]
    require(
        name in known, f"{label}: {type(config).__name__} has no field {name!r}; it has {', '.join(known)}"
    )
    if rest:
        part = getattr(config, name)
        require(dataclasses.is_dataclass(part), f"{label}: {name} has no fields of its own")
        value = change_field(part, rest, value, label)
    return dataclasses.replace(config, **{name: value})


def split_arguments(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Names and words of `--name=word` and `--name word word`."""
    pairs: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, word = argument[2:].partition("=")
            pairs.append((name, [word] if equals else []))
        elif pairs:
            pairs[-1][1].append(argument)
        else:
            raise ValueError(f"argument {argument!r} does not belong to any --name")
    return pairs


def _set(data: dict[str, Any], name: str, words: list[str]) -> None:
    path = name.split(".")
    path[0] = {"data": "task", **RENAMED}.get(path[0], path[0])
    where = ".".join(path)
    node, hint = data, RunConfig
    for depth, part in enumerate(path):
        here = ".".join(path[:depth])
        cls = _class_of(hint, node, here) if isinstance(node, Mapping) else None
        fields = hints(cls) if cls else {}
        if part not in fields:
            raise ValueError(_unknown_field(where, field_names(data)))
        hint = fields[part]
        if depth < len(path) - 1:
            node = node[part]
    last = path[-1]
    if _choice(hint) is not None:
        if len(words) != 1:
            raise ValueError(f"{where} must be {_spell(hint)}, got {' '.join(words) or 'nothing'}")
        node[last] = _chosen(hint, words[0], node[last], where)
    elif isinstance(node.get(last), Mapping):
        inner = ", ".join(f"{where}.{key}" for key in node[last])
        raise ValueError(f"{where} is a group of fields: set one of {inner}")
    else:
        value = _parse(hint, words or ["true"] if hint is bool else words, where)
        node[last] = to_dict(value)


def _unknown_field(name: str, known: Sequence[str]) -> str:
    same = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same[:3] or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {' or '.join('--' + n for n in near)}?" if near else ""
    return f"--{name} is not a field of this configuration{hint}"


def to_yaml(config: RunConfig) -> str:
    """A configuration as YAML text, with every field."""
    import yaml

    return str(yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, width=100))


def from_yaml(path: Path | str, base: RunConfig | None = None) -> RunConfig:
    """Read a configuration from a YAML (or JSON) file."""
    import yaml

    path = Path(path)
    try:
        size = path.stat().st_size
        require(size <= MAX_FILE, f"{path} is too large for a configuration: {size:,} bytes")
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not plain YAML: {reason}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a dictionary of fields, got {type(data).__name__}")
    try:
        return from_dict(data, base)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def difference(old: RunConfig, new: RunConfig) -> str | None:
    """The first field in which two runs differ, with both values; None if one may continue the other.

    Fields that decide where a run happens and what is seen of it, not its numbers, may differ.
    """
    return _difference(to_dict(old), to_dict(new), "")


def _difference(old: Any, new: Any, name: str) -> str | None:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return None if old == new else f"{name} is {new!r}, it was {old!r}"
    for key in [*old, *(k for k in new if k not in old)]:
        inner = _inner(name, key)
        if inner in FREE_TO_CHANGE:
            continue
        found = _difference(old.get(key, "nothing"), new.get(key, "nothing"), inner)
        if found:
            return found
    return None
