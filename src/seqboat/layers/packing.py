"""Sparse modular activation, the mechanism alone: which tokens are active, and how they are packed.

Section 3.2 and listings 1 and 2 of the paper. Two forms of the same thing:

- `compress` / `extract`: the paper's operators. Each sequence's active tokens move to the front of a batch
  that is padded to the longest of them.
- `pack` / `Packed.take` / `Packed.add`: the active tokens of the whole batch as one array (tokens, dim), sequence
  after sequence, with where they came from. No sequence pays for the others, and nothing is padded.
  `pack_modules` does this for several modules at once, module after module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.documents import Documents
from seqboat.core.padding import front_places


class Routing(NamedTuple):
    """The decisions of a router for M modules.

    >>> import torch
    >>> from seqboat import SeqBoat
    >>> routing = SeqBoat(8)(torch.randn(2, 5, 8)).routing
    >>> routing.active.shape, routing.confidence.shape
    (torch.Size([2, 5, 1]), torch.Size([2, 5, 1]))
    """

    active: Tensor
    """(batch, time, modules) bool: whether the token activates the module (the paper's a)"""
    probs: Tensor
    """(batch, time, modules): the probability of activation"""

    @property
    def confidence(self) -> Tensor:
        """The probability of the decision where active, zero elsewhere (the paper's c)."""
        return torch.where(self.active, self.probs, self.probs.new_zeros(()))


def compress(x: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Move the active positions of each sequence to the front, keeping their order (listing 1).

    Args:
        x: (batch, time, dim).
        active: (batch, time) bool.

    Returns:
        packed: (batch, slots, dim), zeros after the last active token of a sequence.
        slot: (batch, time), where each position went; `slots` for inactive ones.

    >>> x = torch.arange(4.0).view(1, 4, 1)
    >>> packed, slot = compress(x, torch.tensor([[False, True, False, True]]))
    >>> packed.flatten().tolist(), slot.tolist()
    ([1.0, 3.0], [[2, 0, 2, 1]])
    """
    slots = int(active.sum(dim=1).max()) if active.numel() else 0
    # every inactive position points at one spare slot past the end: cut off here, read as zero by extract
    slot = torch.where(active, front_places(active), slots)
    packed = x.new_zeros(x.shape[0], slots + 1, x.shape[-1])
    packed = packed.scatter(1, slot[..., None].expand_as(x), x)
    return packed[:, :slots], slot


def extract(y: Tensor, slot: Tensor) -> Tensor:
    """Put each slot back at the position it came from; zero where nothing was active (listing 2).

    Args:
        y: (batch, slots, dim), one output for each slot.
        slot: (batch, time), from `compress`.

    Returns:
        (batch, time, dim).

    >>> extract(torch.tensor([[[5.0], [6.0]]]), torch.tensor([[2, 0, 2, 1]])).flatten().tolist()
    [0.0, 5.0, 0.0, 6.0]
    """
    padded = F.pad(y, (0, 0, 0, 1))
    return padded.gather(1, slot[..., None].expand(-1, -1, y.shape[-1]))


class Packed(NamedTuple):
    """Where the tokens of a packed array came from; sequence after sequence, tokens in their order.

    >>> import torch
    >>> from seqboat import pack
    >>> packed = pack(torch.tensor([[False, True], [True, True]]))
    >>> packed.flat.tolist(), packed.row.tolist(), packed.position.tolist(), packed.offsets.tolist()
    ([1, 2, 3], [0, 1, 1], [1, 0, 1], [0, 1, 3])
    >>> x = torch.arange(4.0).view(2, 2, 1)
    >>> packed.add(torch.zeros(2, 2, 1), 10 * packed.take(x)).flatten().tolist()
    [0.0, 10.0, 20.0, 30.0]
    """

    flat: Tensor
    """(tokens,): place in the flattened (batch * time) sequence"""
    row: Tensor
    """(tokens,): sequence of the batch"""
    position: Tensor
    """(tokens,): position in the original sequence, counted from its beginning"""
    offsets: Tensor
    """(batch + 1,): where each sequence begins in the packed array"""
    longest: int | None = None
    """tokens of the longest sequence, if the host knows it"""
    documents: Documents | None = None
    """where the sequences are packed documents: what they are; states then belong to the sequences of the batch"""
    weight: Tensor | None = None
    """(tokens,): how much each token counts for those that see it; all alike by default"""

    @property
    def slot(self) -> Tensor:
        """(tokens,): place among the active tokens of the same sequence."""
        places = torch.arange(self.flat.shape[0], device=self.flat.device)
        return places - self.offsets[self.row]

    def take(self, x: Tensor) -> Tensor:
        """The packed tokens (tokens, dim) of (batch, time, dim)."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.flat)

    def add(self, base: Tensor, y: Tensor) -> Tensor:
        """Add packed (tokens, dim) to (batch, time, dim) at the places they came from."""
        return base.reshape(-1, base.shape[-1]).index_add(0, self.flat, y).view(base.shape)

    @property
    def slots(self) -> int:
        """Tokens of the longest sequence."""
        if self.longest is not None:
            return self.longest
        return int(self.offsets.diff().max()) if self.offsets.shape[0] > 1 else 0


def pack(active: Tensor, seen: Tensor | None = None, documents: Documents | None = None) -> Packed:
    """Find the active tokens of a batch. This is the one place where the host waits for the device.

    Args:
        active: (batch, time) bool.
        seen: (batch,) or (documents,), tokens of each sequence before this call; none by default.
        documents: the sequences that a batch of 1 is made of; its own one by default.

    >>> packed = pack(torch.tensor([[False, True], [True, True]]))
    >>> packed.flat.tolist(), packed.row.tolist(), packed.offsets.tolist()
    ([1, 2, 3], [0, 1, 1], [0, 1, 3])
    """
    time, listed = active.shape[1], active.reshape(-1)
    per_row = active.sum(dim=1) if documents is None else documents.sums(listed)
    longest = time
    if hasattr(active, "stands_for"):
        index, longest = listed.nonzero(), time
    elif torch.compiler.is_compiling() or not active.numel() or not per_row.numel():
        index = listed.nonzero()
    elif active.device.type == "cpu":
        index, longest = listed.nonzero(), int(per_row.amax())
    else:
        # both sizes in one transfer
        size, longest = torch.stack([per_row.sum(), per_row.amax()]).tolist()
        index = listed.nonzero_static(size=size)
    index = index.squeeze(1)
    offsets = F.pad(per_row.cumsum(dim=0), (1, 0))
    if documents is None:
        row = torch.div(index, max(time, 1), rounding_mode="floor")
        position = index - row * time
    else:
        row, position = documents.number[index], documents.position[index]
    if seen is not None:
        position = position + seen[row]
    return Packed(index, row, position, offsets, longest, documents)


class Gathered(NamedTuple):
    """The active tokens of several modules in one array: module after module, each in packed form."""

    parts: tuple[Packed, ...]
    """one per module"""
    flat: Tensor
    """(tokens,): places of all of them in the flattened (batch * time) sequence; a token may appear several times"""
    entry: Tensor
    """(tokens,): places in the flattened (batch * time * modules) decisions"""

    @property
    def counts(self) -> list[int]:
        """How many tokens each module has."""
        return [part.flat.shape[0] for part in self.parts]


def pack_modules(active: Tensor, seen: Tensor | None = None, documents: Documents | None = None) -> Gathered:
    """Find the active tokens of all modules at once: the host waits for the device once, however many there are.

    Args:
        active: (batch, time, modules) bool.
        seen, documents: as in `pack`.

    >>> gathered = pack_modules(torch.tensor([[[False, True], [True, True]]]))
    >>> gathered.flat.tolist(), gathered.counts
    ([1, 0, 1], [1, 2])
    """
    batch, time, modules = active.shape
    if modules == 1:
        packed = pack(active[..., 0], seen, documents)
        return Gathered((packed,), packed.flat, packed.flat)
    if torch.compiler.is_compiling() or hasattr(active, "stands_for"):
        # the compiler traces through one number of tokens at a time; tensors without content know none
        parts = tuple(pack(active[..., i], seen, documents) for i in range(modules))
        entries = [part.flat * modules + i for i, part in enumerate(parts)]
        return Gathered(parts, torch.cat([part.flat for part in parts]), torch.cat(entries))
    by_module = active.permute(2, 0, 1).contiguous()
    per_row = by_module.sum(dim=2) if documents is None else documents.sums(by_module[:, 0])
    some = per_row.shape[1] > 0
    sizes = torch.stack([per_row.sum(dim=1), per_row.amax(dim=1)]) if some else per_row.new_zeros(2, modules)
    counts, longest = sizes.tolist()
    # with the size known, the host need not wait for another device again; on a CPU the plain form is faster
    listed = by_module.view(-1)
    index = listed.nonzero() if active.device.type == "cpu" else listed.nonzero_static(size=sum(counts))
    index = index.squeeze(1)
    line = torch.div(
        index, max(time, 1), rounding_mode="floor"
    )  # sequences of all modules, one after the other
    module = torch.div(line, max(batch, 1), rounding_mode="floor")
    flat = index - module * (batch * time)
    if documents is None:
        row, position = line - module * batch, index - line * time
    else:
        row, position = documents.number[flat], documents.position[flat]
    if seen is not None:
        position = position + seen[row]
    offsets = F.pad(per_row.cumsum(dim=1), (1, 0))
    pieces = zip(flat.split(counts), row.split(counts), position.split(counts), offsets, longest, strict=True)
    placed = tuple(Packed(*piece, documents) for piece in pieces)
    return Gathered(placed, flat, flat * modules + module)


class PackedModule(nn.Module, ABC):
    """A contextual module: it sees only its active tokens, and they see each other.

    Token-wise modules need none of this: any nn.Module on (tokens, dim) will do. A module that is not causal only
    needs `forward`, and may return its output without a state.

    >>> import torch
    >>> from seqboat import PackedModule, SparseModularActivation
    >>> class Count(PackedModule):
    ...     def forward(self, tokens, packed, state=None):      # adds the number of active tokens of the sequence
    ...         return tokens + packed.offsets.diff()[packed.row][:, None]
    >>> sparse = SparseModularActivation({"count": Count()}, d_model=4)
    >>> sparse(torch.randn(2, 6, 4)).y.shape
    torch.Size([2, 6, 4])
    """

    causal: bool = False
    weighs: bool = False
    """Whether tokens count for others by `Packed.weight`, which `advance` then takes as `weight` (active,)."""

    @property
    def takes_documents(self) -> bool:
        """Whether the state that it takes and returns is that of the sequences where documents are packed."""
        return False

    @abstractmethod
    def forward(self, tokens: Tensor, packed: Packed, state: Any = None) -> Tensor | tuple[Tensor, Any]:
        """Process the active tokens of a batch.

        Args:
            tokens: (tokens, dim).
            packed: where they came from.
            state: what the module remembers of the tokens it saw before; None at the beginning.

        Returns:
            (tokens, dim), and the state after the last token (None unless causal).
        """

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The state before the first token; a size of zero means that it grows."""
        raise NotImplementedError(f"{type(self).__name__} carries no state")

    def advance(
        self, tokens: Tensor, rows: Tensor, position: Tensor, state: Any, inplace: bool = False
    ) -> tuple[Tensor, Any]:
        """Process one token of some sequences.

        Args:
            tokens: (active, dim).
            rows: (active,), which sequences of the batch they belong to.
            position: (active,), their positions in the original sequence.
            state: of all sequences.
            inplace: whether the given state may be overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} carries no state")
