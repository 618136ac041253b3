"""Checks of arguments: every message says what was wrong, what came and what was expected."""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@contextmanager
def naming(source: Path | str | None) -> Iterator[None]:
    """Name the file whose values are used inside in every ValueError; None: there is no such file.

    >>> with naming("config.json"):
    ...     check_positive("classes", -2)
    Traceback (most recent call last):
    ValueError: classes must be an integer >= 1, got -2 (settings from config.json)
    """
    try:
        yield
    except ValueError as error:
        if source is None or str(source) in str(error):
            raise
        raise ValueError(f"{error} (settings from {source})") from error


class _Short(reprlib.Repr):
    """Values in messages: a hostile file can hold one whose full repr takes minutes to write."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxdict = 2
        self.maxlist = self.maxtuple = self.maxset = 4
        self.maxstring = self.maxother = self.maxlong = 120


def short(value: object) -> str:
    """The repr of a value, cut short where it is long or deep."""
    return _Short().repr(value)


def check_positive(name: str, value: int, least: int = 1) -> None:
    """Refuse a count that is not a whole number of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= least, f"{name} must be an integer >= {least}, got {short(value)}")
    # torch cannot even express larger sizes
    require(value < 1 << 63, f"{name} must be less than 2^63, got {short(value)}")


def check_rate(name: str, value: float) -> None:
    """Refuse a probability outside [0, 1)."""
    require(0.0 <= value < 1.0, f"{name} must be in [0, 1), got {value!r}")


def check_steps(dt_min: float, dt_max: float) -> None:
    """Refuse a range of initial steps that is empty or not positive."""
    require(
        0 < dt_min <= dt_max,
        f"dt_min and dt_max must satisfy 0 < dt_min <= dt_max, got {dt_min}, {dt_max}",
    )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not one of the choices."""
    require(value in choices, f"{name} must be one of {', '.join(choices)}; got {short(value)}")


def check_output(name: str, path: Path, inputs: Iterable[Path | str] = ()) -> None:
    """Refuse a file that could not be written or should not be replaced, before work is done for it.

    Args:
        name: of the setting that holds the path, for messages; may be empty.
        path: to write to: nothing yet, or a regular file.
        inputs: files that are read for it.
    """
    what = f"{name} {path}".strip()
    require(path.parent.is_dir(), f"{what}: the folder {path.parent} does not exist")
    require(os.access(path.parent, os.W_OK), f"{what}: the folder {path.parent} cannot be written to")
    if not os.path.lexists(path):
        return
    mode = os.lstat(path).st_mode
    kinds = {
        "a folder": stat.S_ISDIR,
        "a link": stat.S_ISLNK,
        "a pipe": stat.S_ISFIFO,
        "a socket": stat.S_ISSOCK,
    }
    kind = next((kind for kind, test in kinds.items() if test(mode)), "a device")
    require(stat.S_ISREG(mode), f"{what} is {kind}: it must be a file")
    for source in inputs:
        same = os.path.exists(source) and os.path.samefile(path, source)
        require(not same, f"{what} is the input itself: name another file")


def check_sequence(x: Tensor, d_model: int) -> None:
    """Refuse anything that is not a floating (batch, time, d_model) tensor."""
    require(isinstance(x, Tensor), f"x must be a tensor, got {type(x).__name__}")
    shape = tuple(x.shape)
    require(
        x.dim() == 3 and shape[-1] == d_model,
        f"x must have shape (batch, time, {d_model}), got {shape}",
    )
    require(x.is_floating_point(), f"x must be floating point, got {x.dtype}")


def check_token(x: Tensor, d_model: int) -> None:
    """Refuse anything that is not a floating (batch, d_model) tensor."""
    require(isinstance(x, Tensor), f"x must be a tensor, got {type(x).__name__}")
    shape = tuple(x.shape)
    require(
        x.dim() == 2 and shape[-1] == d_model,
        f"x must have shape (batch, {d_model}), got {shape}",
    )
    require(x.is_floating_point(), f"x must be floating point, got {x.dtype}")


def check_mask(mask: Tensor, x: Tensor) -> None:
    """Refuse a mask that is not a bool (batch, time) tensor on the device of x."""
    require(isinstance(mask, Tensor), f"mask must be a tensor, got {type(mask).__name__}")
    want = tuple(x.shape[:2])
    require(
        mask.dtype == torch.bool,
        f"mask must be a bool tensor, True on real tokens; got {mask.dtype}",
    )
    require(
        tuple(mask.shape) == want,
        f"mask must have shape (batch, time) = {want}, got {tuple(mask.shape)}",
    )
    require(
        mask.device == x.device,
        f"mask is on {mask.device} but its sequence is on {x.device}",
    )


def check_device(x: Tensor, parameter: Tensor) -> None:
    """Refuse an input that is on another device than the module."""
    require(
        x.device == parameter.device,
        f"x is on {x.device} but the module is on {parameter.device}",
    )


def check_dtype(x: Tensor, parameter: Tensor, name: str = "x", owner: str = "module") -> None:
    """Refuse an input of another type than the module's, unless autocast brings them together."""
    require(
        x.dtype == parameter.dtype or torch.is_autocast_enabled(x.device.type),
        f"{name} must be {parameter.dtype} like the {owner}, got {x.dtype}",
    )


def check_row_mask(mask: Tensor, x: Tensor) -> None:
    """Refuse a mask of a step that is not a bool (batch,) tensor on the device of x."""
    require(isinstance(mask, Tensor), f"mask must be a tensor, got {type(mask).__name__}")
    require(
        mask.dtype == torch.bool and mask.shape == x.shape[:1],
        f"mask of a step must be bool of shape (batch,) = ({x.shape[0]},), "
        f"got {mask.dtype} of shape {tuple(mask.shape)}",
    )
    require(mask.device == x.device, f"mask is on {mask.device} but its tokens are on {x.device}")
