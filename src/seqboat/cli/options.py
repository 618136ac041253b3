"""Options that commands share, and overrides of routers.

    --off 1,3 --on 2      layers, counted from 1, or all
    --threshold 0.7       activate above this probability
    --cap 0.25            at most this fraction of the tokens of a sequence
    --mask FILE           which positions attend, as .npy: (time,) for all layers or (layers, time)

Overrides go to the attention of every layer they are meant for; other modules of a layer are left alone. In Python,
`seqboat.override_activation` does the same and more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, Literal

from seqboat.data.files import open_regular

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from seqboat.core.mixer import Routing

MAX_MASK = 64 << 20
"""Bytes of a mask's file beyond which it is refused."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Shared options.

    Args:
        which: which checkpoint, the best or the latest.
        data_dir: where the prepared data is.
        device: auto, cpu or cuda.
    """

    which: Literal["best", "latest"] = "best"
    data_dir: str | None = None
    device: str = "auto"

    def chosen(self) -> torch.device:
        """Where to compute."""
        from seqboat.training.parallel import choose_device

        return choose_device(self.device, what="--device")

    def fields(self, given: Sequence[str]) -> list[str]:
        """The settings of the data that were given, with its folder."""
        return [*([f"--data.data_dir={self.data_dir}"] if self.data_dir else []), *given]


@dataclass(frozen=True, kw_only=True)
class Control:
    """Override the routers.

    Args:
        off: no token attends in these layers: such as 1,3, or all.
        on: every token attends in these layers.
        threshold: tokens attend above this probability.
        cap: at most this fraction of each sequence attends.
        mask: file of positions that attend, .npy, (time,) or (layers, time).
    """

    off: str | None = None
    on: str | None = None
    threshold: float | None = None
    cap: float | None = None
    mask: str | None = None

    def __post_init__(self) -> None:
        for name in ("threshold", "cap"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"--{name} must be between 0 and 1, got {value:g}")

    def record(self) -> dict[str, Any]:
        """What was given, as plain data."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def describe(self) -> str:
        """What was given, in a line."""
        return ", ".join(f"--{name} {value}" for name, value in self.record().items())

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Take the decisions of a model, inside a `with` block."""
        from seqboat.analysis.traces import sites

        found = sites(model)
        if not any(found):
            raise ValueError("no layer of this run has a router: there is nothing to override")
        off, on = (read_layers(f"--{name}", getattr(self, name), found) for name in ("off", "on"))
        if both := sorted(off & on):
            raise ValueError(f"--off and --on must not name the same layer, got {both[0]} in both")
        mask = None if self.mask is None else read_mask(Path(self.mask), len(found))
        with contextlib.ExitStack() as stack:
            for number, site in enumerate(found, start=1):
                if site is None:
                    continue
                forced = {site.module: number in on} if number in off | on else None
                decisions = site.sma.override(
                    active=forced,
                    threshold=None if self.threshold is None else {site.module: self.threshold},
                    cap=None if self.cap is None else {site.module: self.cap},
                    mask=None if mask is None else _Mask(mask[number - 1], site.column),
                )
                stack.enter_context(decisions)
            yield


def read_layers(what: str, text: str | None, found: Sequence[Any]) -> set[int]:
    """Layers given on the command line, counted from 1.

    Args:
        what: name of the argument.
        text: numbers with commas between them, or all; None for none.
        found: one entry per layer, None where it has no router.

    >>> sorted(read_layers("--off", "1,3", ["a", "b", "c"])), read_layers("--off", "all", ["a", None])
    ([1, 3], {1})
    """
    routed = {number for number, site in enumerate(found, start=1) if site is not None}
    if text is None:
        return set()
    if text.strip() == "all":
        return routed
    wanted = f"{what} must be layers from 1 to {len(found)} with commas between them, or all; got {text!r}"
    numbers = set()
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= len(found):
            raise ValueError(wanted)
        if int(word) not in routed:
            raise ValueError(f"{what} {text}: layer {int(word)} has no router")
        numbers.add(int(word))
    return numbers


def read_mask(path: Path, layers: int) -> NDArray[np.bool_]:
    """(layers, time) bool: the decisions in a file."""
    import numpy as np

    wanted = f"--mask must be a .npy file of 0 and 1, (time,) or ({layers}, time)"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_MASK:
                raise ValueError(f"{wanted}; {path} is too large: {size:,} bytes")
            values = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"--mask {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, SyntaxError, EOFError, TokenError) as error:
        # of a broken header, too
        reason = str(error) if str(error).startswith("--mask") else f"{wanted}; {path}: {error}"
        raise ValueError(reason) from error
    fits = values.ndim in (1, 2) and values.dtype.kind in "biuf" and bool(np.isin(values, (0, 1)).all())
    if not fits or (values.ndim == 2 and len(values) != layers):
        raise ValueError(f"{wanted}; {path} holds {values.dtype} of shape {values.shape}")
    return np.broadcast_to(values.astype(bool), (layers, values.shape[-1]))


class _Mask:
    """The decisions of one module of a layer, from those of every position; others stay."""

    def __init__(self, decisions: NDArray[np.bool_], column: int) -> None:
        self.decisions, self.column = decisions, column

    def __call__(self, routing: Routing) -> Tensor:
        import torch

        time = routing.active.shape[1]
        if len(self.decisions) < time:
            raise ValueError(f"--mask has {len(self.decisions)} positions, but a sequence has {time}")
        active = routing.active.clone()
        active[..., self.column] = torch.from_numpy(self.decisions[:time].copy()).to(active.device)
        return active
