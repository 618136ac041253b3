"""N-grams as inputs: every token also reads the embedding of the last n tokens, looked up by a hash.

A model of bytes has to learn its words from scratch, for which a small table of texts is too little. With n-grams as
inputs it starts from word pieces: a few thousand rows are enough to find which of them matter. Different n-grams may
share a bucket; with several n they rarely share all of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLIER = 0x5851F42D4C957F2D
"""Of the hash: a large odd number with bits in all places."""


class NGrams(nn.Module):
    """The sum of the embeddings of the n-grams that end at each token.

    Args:
        sizes: the n of the n-grams.
        buckets: embeddings per n.
        d_model: width.
    """

    def __init__(self, sizes: Sequence[int], buckets: int, d_model: int) -> None:
        super().__init__()
        self.sizes, self.buckets = tuple(sizes), buckets
        self.table = nn.EmbeddingBag(len(self.sizes) * buckets, d_model, mode="sum")
        # a tenth of the tokens' embeddings: what is learned soon stands out, also of rare n-grams
        nn.init.normal_(self.table.weight, std=0.1 * d_model**-0.5)

    @property
    def reach(self) -> int:
        """Tokens before a token that its n-grams hold."""
        return max(self.sizes) - 1

    def begin(self, batch: int, device: torch.device) -> Tensor:
        """The memory before the first token: (batch, reach) zeros; later ids + 1 of the last tokens."""
        return torch.zeros(batch, self.reach, dtype=torch.int64, device=device)

    def advance(self, ids: Tensor, before: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The memory after token ids (batch, time), of which each sequence has the first `lengths` (all by default).

        >>> grams = NGrams([2, 4], 1000, 8)
        >>> grams.advance(torch.tensor([[5, 6]]), grams.begin(1, torch.device("cpu"))).tolist()
        [[0, 6, 7]]
        """
        known = torch.cat([before, ids.long() + 1], dim=1)
        if lengths is None:
            return known[:, known.shape[1] - self.reach :]
        places = lengths[:, None] + torch.arange(self.reach, device=ids.device)
        return known.gather(1, places)

    def places(self, ids: Tensor, before: Tensor | None = None) -> Tensor:
        """Places in the table: (batch, time, sizes) of token ids (batch, time).

        The same n tokens have the same place wherever they stand; n-grams that begin before the sequence count, too.

        Args:
            ids: of the tokens.
            before: the memory of earlier tokens, from `begin` or `advance`; None at the start of the sequences.

        >>> places = NGrams([2], 1000, 4).places(torch.tensor([[5, 6, 5, 6]]))[0, :, 0].tolist()
        >>> places[1] == places[3], places[0] == places[2]
        (True, False)
        """
        found: list[Tensor] = []
        known = (
            F.pad(ids.long() + 1, (self.reach, 0))
            if before is None
            else torch.cat([before, ids.long() + 1], 1)
        )
        key = torch.zeros_like(ids, dtype=torch.int64)
        for back in range(max(self.sizes)):
            # 0 stands for "before the sequence"; products wrap around at 64 bits
            start = self.reach - back
            key = (key + known[:, start : start + ids.shape[1]]) * MULTIPLIER
            if back + 1 in self.sizes:
                mixed = (key ^ (key >> 29)) * MULTIPLIER
                found.append((mixed >> 32).remainder(self.buckets) + len(found) * self.buckets)
        return torch.stack(found, dim=-1)

    def places_of(self, last: Sequence[int]) -> list[int]:
        """As `places` of one token, from ids + 1 of the last tokens up to it, with plain integers: (sizes,).

        Python's integers do not wrap around by themselves; a few of them still take less time than tensors.

        >>> grams = NGrams([2, 4], 1000, 8)
        >>> grams.places_of([0, 6, 7, 8]) == grams.places(torch.tensor([[5, 6, 7]]))[0, -1].tolist()
        True
        """
        found: list[int] = []
        key = 0
        for back in range(max(self.sizes)):
            key = _wrap((key + last[-1 - back]) * MULTIPLIER)
            if back + 1 in self.sizes:
                mixed = _wrap((key ^ (key >> 29)) * MULTIPLIER)
                found.append((mixed >> 32) % self.buckets + len(found) * self.buckets)
        return found

    def forward(self, ids: Tensor, before: Tensor | None = None) -> Tensor:
        """(batch, time, d_model) for token ids (batch, time); see `places`."""
        places = self.places(ids, before)
        out: Tensor = self.table(places.flatten(0, 1))
        return out.unflatten(0, ids.shape)


def _wrap(number: int) -> int:
    """A number as 64 bits hold it, with a sign."""
    return ((number + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
