"""States of recurrent layers: values with the batch first, nested in named tuples.

The first dimension of every tensor is the batch, so that sequences can be selected, reordered and repeated without
knowing what kind of layer the state belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.checks import check_positive, require

State = TypeVar("State", bound=Any)


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply a function to every tensor of a state."""
    if isinstance(state, Tensor):
        return function(state)  # type: ignore[return-value]
    if isinstance(state, tuple):
        parts = [map_state(function, part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    require(state is None, f"a state holds tensors and tuples, not {type(state).__name__}")
    return state


def tensors(state: Any, name: str = "state") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state with its dotted name."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, tuple):
        fields = getattr(state, "_fields", range(len(state)))
        for field, part in zip(fields, state, strict=True):
            yield from tensors(part, f"{name}.{field}")


def rebuild(like: State, parts: Mapping[str, Tensor], name: str = "state") -> State:
    """A state of the same kind as another one, from tensors by their dotted names: the inverse of `tensors`.

    >>> like = (torch.zeros(1), None)
    >>> rebuild(like, {"state.0": torch.ones(1)})
    (tensor([1.]), None)
    """
    expected = {key for key, _ in tensors(like, name)}
    other = sorted(expected ^ parts.keys())
    require(
        not other,
        f"state of another model: {len(parts)} tensors where this one has {len(expected)}; they differ in "
        f"{', '.join(other[:2])}{', ...' if other[2:] else ''}",
    )
    values = iter([parts[key] for key, _ in tensors(like, name)])
    return map_state(lambda _: next(values), like)


def select_rows(state: State, rows: Tensor) -> State:
    """The sequences of a state in this order, each as often as it is named: for beam search and finished sequences.

    Args:
        state: of a layer or a model; the first dimension of its tensors is the batch.
        rows: (n,) integers, the sequences to keep.

    >>> select_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1, 0])).flatten().tolist()
    [2.0, 2.0, 1.0]
    """
    rows = torch.as_tensor(rows)
    require(
        rows.dim() == 1 and rows.dtype in (torch.int64, torch.int32),
        f"rows must be a one-dimensional integer tensor, got {rows.dtype} of shape {tuple(rows.shape)}",
    )
    return map_state(lambda part: _take_rows(part, rows), state)


def _take_rows(part: Tensor, rows: Tensor) -> Tensor:
    # indices on another device are checked there: looking at them here would make the host wait
    if rows.device.type == "cpu" and rows.numel():
        last, wrong = len(part) - 1, rows[(rows < 0) | (rows >= len(part))]
        require(wrong.numel() == 0, f"rows must be in 0..{last}, got {wrong[:1].tolist()}")
    return part.index_select(0, rows.to(part.device))


def concat_rows(states: Sequence[State]) -> State:
    """The sequences of several states in one; memories that have grown to different sizes are filled up with zeros.

    >>> concat_rows([torch.ones(1, 1), torch.ones(1, 2)]).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    require(len(states) > 0, "states must hold at least one state, got none")
    columns = [iter([part for _, part in tensors(state)]) for state in states]
    return map_state(lambda _: _join([next(column) for column in columns]), states[0])


def _join(parts: Sequence[Tensor]) -> Tensor:
    most = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    wide = []
    for part in parts:
        missing = [size - have for size, have in zip(most, part.shape[1:], strict=True)]
        pads = [amount for size in reversed(missing) for amount in (0, size)]
        wide.append(F.pad(part, pads) if any(missing) else part)
    return torch.cat(wide)


def repeat_rows(state: State, times: int) -> State:
    """Repeat every sequence of a state, as `generate` with several beams expects.

    Args:
        state: of a layer or a model; the first dimension of its tensors is the batch.
        times: how often.

    >>> repeat_rows(torch.tensor([[1.0], [2.0]]), 2).flatten().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    check_positive("times", times)
    return map_state(lambda part: part.repeat_interleave(times, dim=0), state)


def copy_state(state: State) -> State:
    """A state that may be overwritten without changing this one: steps overwrite theirs.

    Args:
        state: of a layer or a model.
    """
    return map_state(Tensor.clone, state)


def overwrite(state: State, new: State) -> State:
    """Give a state the values of another one of the same kind, in place; memories that have grown take their size."""
    for (_, old), (_, part) in zip(tensors(state), tensors(new), strict=True):
        if old.shape == part.shape:
            old.copy_(part)
        elif old is not part:
            old.set_(part)  # type: ignore[call-overload]
    return state


def detach_state(state: State) -> State:
    """Detach a state from the graph: truncated backpropagation through time.

    Args:
        state: of a layer or a model.

    >>> from seqboat import SeqBoat
    >>> layer = SeqBoat(8, causal=True)
    >>> state = detach_state(layer(torch.randn(1, 5, 8)).state)
    >>> layer(torch.randn(1, 5, 8), state=state).y.sum().backward()       # stops at the border of the two parts
    """
    return map_state(lambda part: part.detach(), state)


def state_bytes(state: Any) -> int:
    """The memory that a state takes.

    Args:
        state: of a layer or a model.

    >>> from seqboat import SeqBoat
    >>> layer = SeqBoat(8, causal=True, window=16)
    >>> short, long = (layer(torch.randn(1, time, 8)).state for time in (50, 500))
    >>> state_bytes(short) == state_bytes(long)
    True
    """
    return sum(part.numel() * part.element_size() for _, part in tensors(state))


def check_state(state: Any, like: Any, device: torch.device, what: str) -> None:
    """Refuse a state whose tensors differ from those of a fresh one in number, shape, type or device.

    Args:
        state: what the caller passed.
        like: a fresh state; only its shapes and types are read; after the batch, a size of zero matches any.
        device: where the state has to be.
        what: the name of the layer, for the message.
    """
    require(
        type(state) is type(like),
        f"state must be a {type(like).__name__} of this {what}, got {type(state).__name__}",
    )
    expected = dict(tensors(like))
    got = dict(tensors(state))
    require(
        got.keys() == expected.keys(),
        f"state of another model: {what} expects {sorted(expected)}, got {sorted(got)}",
    )
    for name, want in expected.items():
        have = got[name]
        fits = have.shape[:1] == want.shape[:1] and have.dim() == want.dim()
        fits = fits and all(a == b or b == 0 for a, b in zip(have.shape[1:], want.shape[1:], strict=True))
        sizes = ", ".join(str(size or "any") if i else str(size) for i, size in enumerate(want.shape))
        sizes += "," if want.dim() == 1 else ""
        require(fits, f"{name} must have shape ({sizes}) for this {what} and batch, got {tuple(have.shape)}")
        require(
            have.dtype == want.dtype and have.device == device,
            f"{name} must be {want.dtype} on {device} for this {what}, got {have.dtype} on {have.device}",
        )
