"""Attention on packed tokens: each sees its neighbors of the same group, within a reach.

    out_i = sum_j f(q_i . k_j + bias(p_j - p_i)) v_j        over j of i's group, left <= before and right <= after it

f is softmax, squared ReLU or Laplace (appendix A.2 of the paper); queries come scaled. Groups lie behind each other
in one array. There are two ways to compute the same numbers, and `attend` takes the cheaper one:

    dense   groups padded to the longest, side by side: short groups, or reaches that cover them
    band    blocks of queries against the overlapping blocks of keys around them. Only the inputs are stored for the
            backward pass, which recomputes the scores, a few blocks at a time.

To add an attention function, write two small functions and give them a name in `FUNCTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqboat.core.checks import check_positive
from seqboat.ops.kernels import CHOSEN, attempt

HIDDEN = -1e30
"""Score of a masked key: its exponential is zero, and a query without visible keys stays finite."""
WEIGHTLESS = -1e20
"""The logarithm of a weight of zero: as good as hidden, but a query sees even such a key before a masked one."""
SCORES = {"cpu": 1 << 19}
"""Scores of blocks held at a time: on a CPU they fit in a core's cache."""
DENSE = 1 << 23
"""Scores that dense attention keeps for the backward pass; what is larger is cut, and computed again there."""
MU, SIGMA = math.sqrt(0.5), math.sqrt(0.25 / math.pi)

FAR = 1 << 30
"""A reach without a bound."""

AttentionName = Literal["softmax", "relu2", "laplace"]


class Function(NamedTuple):
    """An attention function."""

    weights: Callable[[Tensor], Tensor]
    """of biased scores (..., keys); zero where a score is HIDDEN"""
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """the gradient of the scores, from scores, weights and the gradient of the weights (may be overwritten)"""
    by_keys: bool
    """whether scores are scaled by 1 / keys instead of 1 / sqrt(d_key)"""


def _laplace(scores: Tensor) -> Tensor:
    return 0.5 * torch.erfc((MU - scores) * (1 / (SIGMA * math.sqrt(2))))


def _laplace_backward(scores: Tensor, weights: Tensor, grad: Tensor) -> Tensor:
    density = ((scores - MU) / SIGMA).square_().mul_(-0.5).exp_()
    return grad.mul_(density).mul_(1 / (SIGMA * math.sqrt(2 * math.pi)))


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)


def _softmax_backward(scores: Tensor, weights: Tensor, grad: Tensor) -> Tensor:
    # (grad - sum(grad * weights)) * weights, in one pass
    return torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)


def _relu2(scores: Tensor) -> Tensor:
    return F.relu(scores).square()


def _relu2_backward(scores: Tensor, weights: Tensor, grad: Tensor) -> Tensor:
    return grad.mul_(F.relu(scores)).mul_(2)


FUNCTIONS: dict[str, Function] = {
    "softmax": Function(_softmax, _softmax_backward, False),
    "relu2": Function(_relu2, _relu2_backward, True),
    "laplace": Function(_laplace, _laplace_backward, True),
}
"""Attention functions by the name that configurations use."""


def widen(x: Tensor) -> Tensor:
    """In the type of scores and sums: float64 for float64, float32 for everything else."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Seen(NamedTuple):
    """Which keys a token sees."""

    group: Tensor
    """(tokens,): a token sees only keys of its group; groups are numbers that do not fall"""
    offsets: Tensor
    """(groups + 1,): where each group begins"""
    longest: int
    """tokens of the longest group, or a bound"""
    left: int
    """how many tokens a token sees before itself"""
    right: int
    """how many tokens a token sees after itself"""
    table: Tensor | None = None
    """(2 * furthest + 1,): bias per distance key - query; larger distances use the first or last entry"""
    position: Tensor | None = None
    """(tokens,): coordinates of the bias; None takes indices into the packed array"""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Seen,
    function: str = "softmax",
    dropout: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Attention of each token of a packed array to its neighbors of the same group.

    Args:
        q, k: (tokens, d_key); queries are scaled already.
        v: (tokens, d_value).
        seen: which keys a token sees.
        function: name in FUNCTIONS.
        dropout: rate of weights dropped.
        weight: (tokens,), what the share of each key is multiplied by, in [0, 1]: 0 hides a key. In softmax it is the
            exponential that is multiplied, so that the shares still sum to one.
    """
    if weight is not None:
        q, k, v = weigh_keys(q, k, v, weight, function)
    if not torch.compiler.is_compiling() and "attention" not in CHOSEN and len(q):
        left, right = (min(side, seen.longest - 1) for side in (seen.left, seen.right))
        if _is_short(len(q), len(seen.offsets) - 1, seen.longest, left + right + 1):
            return _dense(q, k, v, seen._replace(left=left, right=right), function, dropout)
    near = Neighbors(seen.group, seen.position, seen.table, seen.left, seen.right, seen.longest, function)
    seed = int(torch.randint(0, 2**62, (1,)).item()) if dropout else 0
    out: Tensor = banded(q, k, v, *near, dropout, seed)
    return out


def weigh_keys(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values where each key counts by its weight (tokens,), as in `attend`.

    In softmax, the logarithm of the weight is one more channel of the keys; the others weigh each value by itself.
    """
    if FUNCTIONS[function].by_keys:
        return q, k, v * weight[:, None].to(v.dtype)
    some = weight > 0
    log = torch.where(some, torch.where(some, weight, 1.0).log(), WEIGHTLESS)[:, None].to(k.dtype)
    return torch.cat([q, torch.ones_like(log, dtype=q.dtype)], dim=1), torch.cat([k, log], dim=1), v


def _is_short(tokens: int, groups: int, longest: int, reach: int) -> bool:
    """Whether groups side by side cost less than a band: at most half of them padding, and nearly all scores seen."""
    near = longest <= max(128, min(512, 2 * reach)) or longest <= reach
    return near and groups * longest <= 2 * tokens


# dense: groups side by side, in ordinary operators


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Seen, function: str, dropout: float) -> Tensor:
    groups, longest = len(seen.offsets) - 1, seen.longest
    places = None
    if len(q) != groups * longest:
        places = torch.arange(len(q), device=q.device) + (seen.group * longest - seen.offsets[seen.group])

    def side_by_side(x: Tensor) -> Tensor:
        if places is not None:
            x = x.new_zeros(groups * longest, *x.shape[1:]).index_copy(0, places, x)
        return x.view(groups, longest, *x.shape[1:])

    counts = None if places is None else seen.offsets.diff()
    position = None if seen.table is None or seen.position is None else side_by_side(seen.position)
    q, k, v = side_by_side(q), side_by_side(k), side_by_side(v)
    sides = seen.left, seen.right
    out = attend_groups(q, k, v, counts, sides, function, seen.table, position, dropout).flatten(0, 1)
    return out if places is None else out.index_select(0, places)


def attend_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    sides: tuple[int, int],
    function: str = "softmax",
    table: Tensor | None = None,
    position: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """As `attend`, on groups side by side.

    Args:
        q, k: (groups, slots, d_key); queries are scaled already.
        v: (groups, slots, d_value).
        counts: (groups,), tokens of each group, which come first; None if all slots are tokens.
        sides: how many tokens a token sees before and after itself.
        function: name in FUNCTIONS.
        table, position: as in `Seen`; positions are (groups, slots).
        dropout: rate of weights dropped.
    """
    groups, slots = q.shape[:2]
    rest = sides, function, table, dropout
    with torch.autocast(q.device.type, enabled=False):
        if torch.compiler.is_compiling() or (step := max(1, DENSE // max(slots, 1) ** 2)) >= groups:
            return _attend_groups(q, k, v, counts, position, *rest)
        pieces = []
        for begin in range(0, groups, step):
            cut: list[Any] = [
                None if x is None else x[begin : begin + step] for x in (q, k, v, counts, position)
            ]
            if torch.is_grad_enabled():
                pieces.append(checkpoint(_attend_groups, *cut, *rest, use_reentrant=False))
            else:
                pieces.append(_attend_groups(*cut, *rest))  # type: ignore[call-arg]
        return torch.cat(pieces)


def _attend_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    position: Tensor | None,
    sides: tuple[int, int],
    function: str,
    table: Tensor | None,
    dropout: float,
) -> Tensor:
    slots = q.shape[1]
    slot = torch.arange(slots, device=q.device)
    distance, hidden = slot - slot[:, None], None
    if torch.compiler.is_compiling() or min(sides) < slots - 1:
        hidden = (distance < -sides[0]) | (distance > sides[1])
    if counts is not None:
        beyond = (slot >= counts[:, None])[:, None]
        hidden = beyond if hidden is None else hidden | beyond
    q, k, wide = widen(q), widen(k), widen(v)
    bias = q.new_zeros(1, 1, 1)
    if table is not None:
        furthest = (len(table) - 1) // 2
        distance = distance if position is None else position[:, None] - position[:, :, None]
        bias = table.to(q.dtype)[distance.clamp(-furthest, furthest) + furthest]
    if hidden is not None:
        bias = bias.masked_fill(hidden, HIDDEN)
    scores = torch.baddbmm(bias.expand(len(q), slots, slots), q, k.mT)
    weights = FUNCTIONS[function].weights(scores)
    return torch.bmm(F.dropout(weights, dropout) if dropout else weights, wide).to(v.dtype)


# band: blocks of queries with the blocks of keys within their reach


class Neighbors(NamedTuple):
    """Which keys a token of a band sees, and how they are weighed."""

    group: Tensor
    """(tokens,): a token sees only keys of the same group; groups are contiguous"""
    position: Tensor | None
    """(tokens,): coordinates of the bias; None takes indices into the packed array"""
    table: Tensor | None
    """(2 * furthest + 1,): bias per distance"""
    left: int
    """how many tokens a token sees before itself"""
    right: int
    """how many tokens a token sees after itself"""
    longest: int
    """tokens of the longest group, or a bound"""
    function: str
    """name in FUNCTIONS"""


class _Band:
    """Blocks (n, size, d) of queries against (n, width, d), the keys around each of them."""

    def __init__(self, x: Tensor, near: Neighbors) -> None:
        group, position, table, left, right, longest, _ = near
        nearest = max(min(longest, len(x)) - 1, 1)
        left, right = (min(side, nearest) if side else 0 for side in (left, right))
        self.tokens, reach = len(x), max(left, right)
        # blocks of a quarter of the reach compute few masked scores; below 16 or above 128, products get slow
        self.size = size = min(128, max(16, 1 << max(reach // 2, 1).bit_length() - 1))
        self.before, self.after = -(-left // size), -(-right // size)
        self.blocks, self.segments = -(-self.tokens // size), self.before + 1 + self.after
        self.width = self.segments * size
        at_once = max(1, SCORES.get(x.device.type, 1 << 26) // (size * self.width))
        starts = range(0, self.blocks, at_once)
        self.parts = [slice(begin, min(begin + at_once, self.blocks)) for begin in starts]
        place = torch.arange(self.width, device=x.device) - self.before * size
        step = place - torch.arange(size, device=x.device)[:, None]
        self.hidden = (step < -left) | (step > right)
        self.table = None if table is None else table.to(x.dtype)
        self.furthest = 0 if table is None else (len(table) - 1) // 2
        self.position = None if position is None or table is None else self.pad(position)
        self.step = step.clamp_(-self.furthest, self.furthest).add_(self.furthest)
        self.static = x.new_zeros(size, self.width)
        if self.table is not None and self.position is None:
            self.static = self.table[self.step]
        self.static = self.static.masked_fill(self.hidden, HIDDEN)
        self.group = self.pad(group, -1)
        ends = self.keys(self.group)
        # the blocks in which a query may meet another group, where looking costs nothing
        self.mixed = (ends.amin(dim=1) != ends.amax(dim=1)).tolist() if x.device.type == "cpu" else None

    def pad(self, x: Tensor, value: float = 0.0) -> Tensor:
        """(tokens, ...) with the blocks before and after it."""
        tail = (self.blocks + self.after) * self.size - self.tokens
        return F.pad(x, (0, 0) * (x.dim() - 1) + (self.before * self.size, tail), value=value)

    def keys(self, x: Tensor) -> Tensor:
        """(blocks, width, ...) of what `pad` made: overlapping views."""
        stride = self.size * x.stride(0), *x.stride()
        return x.as_strided((self.blocks, self.width, *x.shape[1:]), stride)

    def queries(self, x: Tensor) -> Tensor:
        """(blocks, size, ...) of what `pad` made: a view."""
        return x[self.before * self.size :][: self.blocks * self.size].unflatten(0, (self.blocks, self.size))

    def own(self, x: Tensor) -> Tensor:
        """(tokens, ...) of what `pad` made."""
        return x[self.before * self.size :][: self.tokens]

    def score(self, part: slice, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Biased scores of some blocks, and the entries of the table that biased them, if they differ by block."""
        scores = torch.baddbmm(self.static.expand(len(q), -1, -1), q, k.mT)
        index = None
        if self.position is not None:
            assert self.table is not None
            index = self.keys(self.position)[part, None, :] - self.queries(self.position)[part, :, None]
            index = index.clamp_(-self.furthest, self.furthest).add_(self.furthest)
            scores += self.table.index_select(0, index.view(-1)).view(index.shape)
        own, others = self.queries(self.group), self.keys(self.group)
        if self.mixed is None:
            scores.masked_fill_(own[part, :, None] != others[part, None, :], HIDDEN)
        else:
            for block in range(part.start, part.stop):
                if self.mixed[block]:
                    other = own[block, :, None] != others[block]
                    scores[block - part.start].masked_fill_(other, HIDDEN)
        return scores, index


SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor group, Tensor? position, Tensor? table, int left, int right, "
    "SymInt longest, str function, float dropout, int seed"
)


def _by_kernel(function: str, q: Tensor, dropout: float, *given: Any) -> Any:
    """What a kernel computes instead of torch; None if there is none for this call."""
    return attempt("attention", f"triton_band:{function}", q, *given, d_z=q.shape[1], dropout=dropout)


@torch.library.custom_op("seqboat::attend", mutates_args=(), schema=f"({SCHEMA}) -> Tensor")
def banded(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """The operator behind `attend`: q, k, v, the fields of `Neighbors`, rate and seed of dropout."""
    *fields, dropout, seed = rest
    near = Neighbors(*fields)
    if not len(q):
        return v.new_empty(0, v.shape[1])

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        found = _by_kernel("attention", q, dropout, q, k, v, near)
        return (_forward(q, k, v, near, dropout, seed) if found is None else found,)

    with torch.autocast(q.device.type, enabled=False):
        return _confine(forward, (q, k, v), near.group, 1, 2)[0]


def _forward(q: Tensor, k: Tensor, v: Tensor, near: Neighbors, dropout: float, seed: int) -> Tensor:
    q, k, wide = widen(q), widen(k), widen(v)
    band, weigh = _Band(q, near), FUNCTIONS[near.function].weights
    queries, keys, values = band.queries(band.pad(q)), band.keys(band.pad(k)), band.keys(band.pad(wide))
    out = wide.new_empty(band.blocks, band.size, v.shape[1])
    for part in band.parts:
        weights = weigh(band.score(part, queries[part], keys[part])[0])
        if dropout:
            weights *= _keep(weights, dropout, seed + part.start)
        torch.bmm(weights, values[part], out=out[part])
    return out.flatten(0, 1)[: band.tokens].to(v.dtype)


@banded.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(q.shape[0], v.shape[1])


@torch.library.custom_op(
    "seqboat::attend_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? out, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend_backward(
    grad: Tensor, out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *fields, dropout, seed = rest
    near = Neighbors(*fields)
    if not len(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _like(q, near.table)
    with torch.autocast(q.device.type, enabled=False):
        found = None
        if out is not None:
            found = _by_kernel("attention_backward", q, dropout, grad, out, q, k, v, near)
        if found is None:
            parts = widen(grad), widen(q), widen(k), widen(v)
            # four factors at most meet in a product
            found = _confine(partial(_backward, near, dropout, seed), parts, near.group, 3, 4)
        types = q.dtype, k.dtype, v.dtype, q.dtype if near.table is None else near.table.dtype
        return tuple(part.to(dtype) for part, dtype in zip(found, types, strict=True))


def _backward(
    near: Neighbors, dropout: float, seed: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the table, which is empty without one."""
    f, band = FUNCTIONS[near.function], _Band(q, near)
    queries, above, dq = (band.queries(band.pad(q)), band.queries(band.pad(grad)), band.pad(q))
    k, v = band.pad(k), band.pad(v)
    dk, dv, keys, values = torch.zeros_like(k), torch.zeros_like(v), band.keys(k), band.keys(v)
    by_block, dqueries = [part.unflatten(0, (-1, band.size)) for part in (dk, dv)], band.queries(dq)
    static, dtable = torch.zeros_like(band.static), _like(q, band.table).zero_()
    for part in band.parts:
        scores, index = band.score(part, queries[part], keys[part])
        weights = f.weights(scores)
        dweights = torch.bmm(above[part], values[part].mT)
        if dropout:
            keep = _keep(weights, dropout, seed + part.start)
            dscores = f.backward(scores, weights, dweights.mul_(keep))
            weights = weights * keep
        else:
            dscores = f.backward(scores, weights, dweights)
        if index is not None:
            dtable.index_add_(0, index.view(-1), dscores.view(-1))
        elif band.table is not None:
            static += dscores.sum(dim=0)
        torch.bmm(dscores, keys[part], out=dqueries[part])
        for number in range(band.segments):
            place = slice(part.start + number, part.stop + number)
            columns = slice(number * band.size, (number + 1) * band.size)
            by_block[0][place].baddbmm_(dscores[:, :, columns].mT, queries[part])
            by_block[1][place].baddbmm_(weights[:, :, columns].mT, above[part])
    if band.table is not None and band.position is None:
        dtable.index_add_(0, band.step.view(-1), static.masked_fill_(band.hidden, 0).view(-1))
    return band.own(dq), band.own(dk), band.own(dv), dtable


def _confine(
    run: Callable[..., tuple[Tensor, ...]],
    parts: tuple[Tensor, ...],
    group: Tensor,
    by_token: int,
    factors: int,
) -> tuple[Tensor, ...]:
    """Run a pass so that what is not finite in one group reaches no token of another.

    A block holds tokens of several groups, and the weights between them, which are zero, times NaN would be NaN. This
    covers inputs that are not finite, and tokens so large that a product of theirs overflows.

    Args:
        run: from `parts` to results, (tokens, ...) but for those that are sums over tokens.
        parts: each (tokens, ...).
        group: (tokens,), as in `Seen`.
        by_token: how many of the results are (tokens, ...).
        factors: how many numbers meet in a product at most.
    """
    # on a CPU looking costs nothing compared to the pass itself; elsewhere it would wait for the device
    if group.device.type == "cpu":
        results = run(*parts)
        if all(part.sum().isfinite() for part in results[:by_token]):
            return results
    bad = torch.zeros_like(group, dtype=torch.bool)
    for part in parts:
        # of the type that sums have
        limit = torch.finfo(torch.promote_types(part.dtype, torch.float32)).max ** (1 / factors)
        bad |= ~(part.abs() < limit).all(dim=1)
    results = run(*(torch.where(bad[:, None], 0, part) for part in parts))
    number = F.pad((group[1:] != group[:-1]).cumsum(0), (1, 0))
    counts = torch.zeros_like(number).index_add_(0, number, bad.to(number.dtype))
    spoiled = torch.where(counts[number] > 0, torch.nan, 0.0)[:, None]
    found = [part + spoiled.to(part.dtype) for part in results[:by_token]]
    return *found, *(part + spoiled.sum().to(part.dtype) for part in results[by_token:])


def _like(q: Tensor, table: Tensor | None) -> Tensor:
    return q.new_zeros(0) if table is None else torch.zeros_like(table)


@_attend_backward.register_fake
def _(grad: Tensor, out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    # contiguous like the real ones, for any layout of the inputs
    return *(part.new_empty(part.shape) for part in (q, k, v)), _like(q, rest[2])


def _keep(weights: Tensor, rate: float, seed: int) -> Tensor:
    """The factor on each weight: 0 if dropped, 1 / (1 - rate) if kept; the same in both passes."""
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    keep = torch.rand(weights.shape, generator=generator, device=weights.device) >= rate
    return keep.to(weights.dtype).mul_(1 / (1 - rate))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # torch recomputes what it needs from the inputs; kernels read the output
    out = output if "attention" in CHOSEN else None
    ctx.save_for_backward(out, *inputs[:6])
    ctx.rest = inputs[6:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    out, *tensors, table = ctx.saved_tensors
    *grads, dtable = _attend_backward(grad.contiguous(), out, *tensors, table, *ctx.rest)
    return *grads, None, None, None if table is None else dtable, *(None,) * 6


banded.register_autograd(_differentiate, setup_context=_save)


# positions


class RelativeBias(nn.Module):
    """A learned bias per distance `key - query`; larger distances share the last entry of the table."""

    def __init__(self, max_distance: int) -> None:
        super().__init__()
        check_positive("max_distance", max_distance, least=0)
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.empty(2 * max_distance + 1))
        nn.init.trunc_normal_(self.table, std=0.02, a=-0.04, b=0.04)

    def forward(self, distance: Tensor) -> Tensor:
        """The bias of each distance."""
        return self.table[(distance + self.max_distance).clamp(0, 2 * self.max_distance)]


def turns(position: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """(..., dim / 2, 2): cosine and sine of the angle by which each pair of `dim` channels turns at a position.

    All layers of a step ask for the same ones, which are computed once.
    """
    # asked first: while torch traces, the number of tokens is not known
    traced = torch.compiler.is_compiling()
    if traced or position.dim() != 1 or len(position) > 64 or position.device.type != "cpu":
        return _make_turns(position, dim, dtype)
    key = (*position.tolist(), dim, dtype)
    if _last_turns[0] != key:
        _last_turns[:] = key, _make_turns(position, dim, dtype)
    found: Tensor = _last_turns[1]
    return found


def _make_turns(position: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        # reduced to one turn in float64: in float32 the angle of position one million is off by a tenth of a radian
        angle = torch.remainder(position[..., None] * frequencies(dim, position.device), 2 * math.pi)
        angle = angle.to(torch.promote_types(dtype, torch.float32))
        return torch.stack([angle.cos(), angle.sin()], dim=-1)


_last_turns: list[Any] = [None, None]


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding: turn each pair of adjacent channels of (..., dim) as `turns` found."""
    pairs = x.to(turn.dtype).unflatten(-1, (-1, 2))
    if not torch.compiler.is_compiling():
        turned = torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(turn)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    # compilers and ONNX know no complex numbers
    (even, odd), (cos, sin) = pairs.unbind(-1), turn.unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def frequencies(dim: int, device: torch.device) -> Tensor:
    """(dim / 2,), float64: angle per position, 10000^(-2i/dim); kept, but never a tensor of a graph."""
    return _make_frequencies(dim, device) if torch.compiler.is_compiling() else _kept_frequencies(dim, device)


def _make_frequencies(dim: int, device: torch.device) -> Tensor:
    # never an inference tensor, even if first needed in inference mode: training uses it too
    with torch.inference_mode(False):
        return 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


_kept_frequencies = cache(_make_frequencies)
