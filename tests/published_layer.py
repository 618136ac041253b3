"""The SeqBoat layer computed the way it was published: the baseline that `seqboat bench` compares ours with.

Same parameters as `seqboat.SeqBoat`, same results, by its own code (section 3.3 and appendix A of the paper):

- MD-EMA as one convolution by FFT, with the kernel summed from a (dim, states, time) table of powers;
- compress and extract by scatter and gather, into a batch padded to its longest compressed sequence;
- local attention on blocks of that batch, each against copies of its own and its neighbors' keys and values;
- the relative bias of original positions looked up in a whole time x time matrix;
- everything that the backward pass needs, scores included, kept by autograd.

It is written to be fast at that: one transform for both directions of the average at the smallest length that avoids
wrap-around, a kernel that is kept between calls in evaluation, no tensor wider or copied more often than the method
requires.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.checks import require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import MixerOutput, Routing
from seqboat.layers.gau import GAU, ROTATES
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig, SeqBoatState
from seqboat.layers.sma import compress, extract
from seqboat.ops.attention import HIDDEN, rotate, turns
from seqboat.ssm.diagonal import EMA


class Published(SeqBoat):
    """A SeqBoat layer with MD-EMA and a working memory, by the published algorithm. Carries no state."""

    def __init__(self, d_model: int, config: SeqBoatConfig | None = None) -> None:
        super().__init__(d_model, config)
        unit = self.sma.units["gau"]
        require(
            isinstance(self.ssm, EMA) and isinstance(unit, GAU) and unit.config.span == "memory",
            "the published layer is MD-EMA with a working memory: ssm must be an EMAConfig and gau.span 'memory'",
        )
        assert isinstance(unit, GAU) and isinstance(self.ssm, EMA)
        self.ssm: EMA
        self.unit = [unit]  # in a list, so that its parameters keep one name
        self._kernel: tuple[object, Tensor] | None = None

    def mix(
        self,
        x: Tensor,
        layout: Layout,
        state: SeqBoatState | None,
    ) -> MixerOutput:
        require(
            state is None and layout.documents is None,
            "the published layer has no state and packs no documents",
        )
        mask = layout.mask
        branch = clear(self.norm(x, mask), mask) if self.config.prenorm else x
        hidden = clear(self.drop(F.silu(self.average(branch))), mask)
        active, probs = self.sma.router(hidden)
        if mask is not None:
            active, probs = active & mask[..., None], clear(probs, mask)
        routing = Routing(active, probs)
        packed, slot = compress(hidden, active[..., 0])
        attended = extract(self.attend(packed, slot), slot)
        branches = attended * routing.confidence.to(attended.dtype) + self.linear(hidden)
        y = F.silu((self.drop(branches) if self.causal else branches) + x)
        y = y if self.config.prenorm else self.norm(y, mask)
        return MixerOutput(clear(y, mask), None, routing)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def average(self, x: Tensor) -> Tensor:
        """MD-EMA of (batch, time, dim) by FFT, both directions in one transform."""
        time = x.shape[1]
        taps = min(time, self.ssm.truncation or time)
        size = good_size(time + taps - 1)
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=size) * self._spectrum(taps, size)
        y = torch.fft.irfft(spectrum, n=size)[..., :time].transpose(1, 2)
        return y + self.ssm.skip * x

    def _spectrum(self, taps: int, size: int) -> Tensor:
        """Of the kernel, (dim, size / 2 + 1); in evaluation it is computed once for given weights."""
        if torch.is_grad_enabled():
            return self._make_spectrum(taps, size)
        key = (taps, size, *((p.data_ptr(), p._version) for p in self.ssm.parameters()))
        if self._kernel is None or self._kernel[0] != key:
            self._kernel = (key, self._make_spectrum(taps, size))
        return self._kernel[1]

    def _make_spectrum(self, taps: int, size: int) -> Tensor:
        log_decay, drive, read = self.ssm.coefficients()
        exponent = log_decay[..., None] * torch.arange(taps, device=log_decay.device)
        with torch.no_grad():
            # most powers of a long kernel underflow, and arithmetic near the smallest numbers is many times slower:
            # they are held at a size that is as good as zero beside the first taps
            exponent.clamp_(min=0.8 * math.log(torch.finfo(exponent.dtype).tiny))
        powers = torch.exp(exponent)
        kernel = torch.einsum("sdn,sdnl->sdl", read * drive, powers)
        whole = F.pad(kernel[0], (0, size - taps))
        if len(kernel) == 2:
            # a tap that looks ahead is one at a negative place, counted from the end of the circle
            ahead = kernel[1][:, 1:].flip(-1)
            whole = whole + F.pad(kernel[1][:, :1], (0, size - 1)) + F.pad(ahead, (size - taps + 1, 0))
        return torch.fft.rfft(whole)

    def attend(self, packed: Tensor, slot: Tensor) -> Tensor:
        """The gated attention unit on a compressed batch (batch, slots, dim)."""
        unit = self.unit[0]
        count = slot.shape[1]
        slots = packed.shape[1]
        places = torch.arange(count, device=slot.device).expand_as(slot)
        position = compress(places[..., None], slot < slots)[0][..., 0]
        base = F.silu(F.linear(packed, unit.base.weight, unit.base.bias))
        z, gate, value = base.split([unit.d_z, unit.d_v, unit.d_v], dim=-1)
        query, key = (torch.addcmul(unit.beta[i], z, unit.gamma[i]) for i in (0, 1))
        if unit.config.positions in ROTATES:
            turn = turns(position, unit.d_z, query.dtype)
            query, key = rotate(query, turn), rotate(key, turn)
        # zeros beyond the active tokens of a sequence are no keys
        real = torch.arange(slots, device=slot.device) < (slot < slots).sum(dim=1, keepdim=True)
        attended = self.local_attention(query * unit.scale, key, value, position, real, count)
        y = F.linear(gate * attended, unit.out.weight, unit.out.bias)
        return F.dropout(y, unit.dropout, self.training) if unit.dropout else y

    def local_attention(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, real: Tensor, time: int
    ) -> Tensor:
        """Attention of blocks to their neighboring blocks, the keys and values of which are copied together."""
        unit = self.unit[0]
        left, right = unit.sides
        slots = query.shape[1]
        size = max(left, 1)
        blocks = -(-slots // size)
        after = 0 if self.causal else 1

        def split(t: Tensor) -> Tensor:
            pad = (0, 0) * (t.dim() - 2) + (0, blocks * size - slots)
            return F.pad(t, pad).view(t.shape[0], blocks, size, *t.shape[2:])

        def look_around(t: Tensor) -> Tensor:
            split_up = split(t)
            padded = F.pad(split_up, (0, 0) * (split_up.dim() - 2) + (1, after))
            return torch.cat([padded[:, i : i + blocks] for i in range(2 + after)], dim=2)

        queries, keys, values = split(query), look_around(key), look_around(value)
        scores = queries @ keys.transpose(-1, -2)
        distance = torch.arange((2 + after) * size, device=query.device) - size
        distance = distance - torch.arange(size, device=query.device)[:, None]
        if unit.bias is not None and unit.config.positions == "compressed":
            scores = scores + unit.bias(distance)
        elif unit.bias is not None:
            whole = bias_matrix(unit.bias.table, time)
            index = split(position)[..., None] * time + look_around(position)[:, :, None]
            scores = scores + whole.view(-1)[index]
        inside = (distance >= -left) & (distance <= right)
        scores = scores.masked_fill(~(inside & look_around(real)[:, :, None]), HIDDEN)
        weights = unit.function.weights(scores)
        if unit.config.attention_dropout:
            weights = F.dropout(weights, unit.config.attention_dropout, self.training)
        return (weights @ values).flatten(1, 2)[:, :slots]


def bias_matrix(table: Tensor, time: int) -> Tensor:
    """(time, time): the bias of every pair of positions, from the (2 reach + 1,) biases of distances.

    >>> bias_matrix(torch.tensor([1.0, 2.0, 3.0]), 3).tolist()
    [[2.0, 3.0, 3.0], [1.0, 2.0, 3.0], [1.0, 1.0, 2.0]]
    """
    reach = (table.shape[0] - 1) // 2
    beyond = max(time - 1 - reach, 0)
    row = torch.cat([table[:1].expand(beyond), table, table[-1:].expand(beyond)])
    middle = row.shape[0] // 2
    # row i of the matrix begins i places before the middle
    return row[middle - time + 1 : middle + time].unfold(0, time, 1).flip(0).contiguous()


def good_size(least: int) -> int:
    """The smallest even length of at least this with no prime factor beyond 5: such transforms are fast.

    >>> good_size(8191), good_size(101)
    (8192, 108)
    """
    size = max(2, least + least % 2)
    while _largest_factor(size) > 5:
        size += 2
    return size


def _largest_factor(number: int) -> int:
    for factor in (2, 3, 5):
        while number % factor == 0:
            number //= factor
    return number if number > 1 else 1
