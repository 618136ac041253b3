"""Many texts at once: a batch that sequences join and leave at any step, each with its own state.

    engine = BatchEngine(model, capacity=32)
    (first,) = engine.add(read(model, start(model), [b"The history of"]), max_new_bytes=200)
    while engine.running:
        for piece in engine.step():                    # one more byte of every text
            print(piece.row, piece.text)
        ...                                            # add further texts, or drop some

A state of constant size makes this simple: a text takes one place in the batch whatever its length, and what it needs
to continue is a value. Texts beyond the capacity wait for a place. Sequences do not see each other, but a product
with many rows rounds differently from one with a single row: scores agree to the last bits of their type, not in
them. A choice can differ from that of the text alone only where two candidates are that close; in float64 that does
not happen in practice (`tests/test_batch.py` compares 32 texts byte by byte).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.checks import check_positive, require
from seqboat.core.state import concat_rows, select_rows
from seqboat.inference.lean import LeanModel, lean_model
from seqboat.models.backbone import BackboneState
from seqboat.models.heads import LanguageModel
from seqboat.text.pieces import StopFinder, TextDecoder
from seqboat.text.sampling import SamplingConfig, choose, make_generators
from seqboat.text.session import TAIL, Session, select_sessions

CAPACITY = 32
"""Texts that run at the same time."""


class Piece(NamedTuple):
    """A piece of generated text of one sequence."""

    row: int
    text: str


class Generation(NamedTuple):
    """What was generated for a prompt, without the prompt and without the stop string."""

    text: str
    """as shown: U+FFFD for what is no UTF-8, a character cut off at the end left out"""
    data: bytes
    """as generated"""
    finish: Literal["length", "stop"]
    """why it ended"""


class GeneralBatch:
    """Sequences that take the model's general step together: the same calls as a `LeanModel`, for any model."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._state: BackboneState | None = None

    def join(self, state: BackboneState, rows: Sequence[int]) -> None:
        """Take over some sequences of a state; they come after those that are here already."""
        fresh = select_rows(state, torch.tensor(list(rows)))
        self._state = fresh if self._state is None else concat_rows([self._state, fresh])

    def state(self, rows: Sequence[int]) -> BackboneState:
        """The states of some sequences, as values."""
        assert self._state is not None
        return select_rows(self._state, torch.tensor(list(rows)))

    def leave(self, row: int) -> BackboneState:
        """Give up a sequence and return its state; the last sequence takes its place."""
        assert self._state is not None
        state, last = self.state([row]), len(self._state.seen) - 1
        rest = list(range(last))
        if row != last:
            rest[row] = last
        self._state = select_rows(self._state, torch.tensor(rest)) if rest else None
        return state

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one token of each sequence; returns the scores of the next."""
        assert self._state is not None
        out = self.model.step(tokens, self._state, inplace=True)
        self._state = out.state
        return out.logits


class _Text:
    """One text that is being generated."""

    def __init__(
        self,
        number: int,
        session: Session,
        limit: int,
        sampling: SamplingConfig,
        generator: torch.Generator,
        stops: Sequence[bytes],
    ) -> None:
        self.number, self.limit, self.sampling, self.generator = number, limit, sampling, generator
        self.session: Session | None = session
        """while it waits, and after it has ended; a batch of one"""
        self.used, self.tail = session.used[0].clone(), session.tail[0].tolist()
        self.fresh: set[int] = set()
        self.before = bytes(token for token in self.tail if 0 <= token < 256)
        self.finder, self.decoder = StopFinder(stops), TextDecoder(self.before)
        self.data = bytearray()
        self.tokens, self.bits = 0, 0.0

    def read(self, token: int, bits: float) -> str:
        """Take one more token; returns what can be shown."""
        self.tokens, self.bits = self.tokens + 1, self.bits + bits
        self.fresh.add(token)
        self.tail = [*self.tail[1:], token]
        shown = self.finder.feed(token)
        if self.ended and not self.finder.found:
            shown += self.finder.rest()
        self.data += shown
        return self.decoder.feed(shown)

    @property
    def ended(self) -> bool:
        return self.finder.found or self.tokens >= self.limit

    def mark_used(self) -> Tensor:
        """(vocab,): True for tokens that have occurred."""
        if self.fresh:
            self.used[list(self.fresh)] = True
            self.fresh.clear()
        return self.used


class BatchEngine:
    """Generates many texts at once.

    Args:
        model: of bytes, in eval mode.
        capacity: texts that run at the same time; more of them wait.
    """

    def __init__(self, model: LanguageModel, *, capacity: int = CAPACITY) -> None:
        check_positive("capacity", capacity)
        self.model, self.capacity = model, capacity
        self._batch: LeanModel | GeneralBatch | None = None
        self._logits: Tensor | None = None
        self._rows: list[_Text] = []
        self._waiting: deque[_Text] = deque()
        self._texts: dict[int, _Text] = {}

    @property
    def running(self) -> int:
        """Texts that have not ended, those that wait included."""
        return len(self._rows) + len(self._waiting)

    def add(
        self,
        session: Session,
        *,
        max_new_bytes: int = 256,
        sampling: SamplingConfig | None = None,
        stop: Sequence[bytes] = (),
        n: int = 1,
        generators: Sequence[torch.Generator] | None = None,
    ) -> list[int]:
        """Add texts that continue what a model has read; returns their numbers.

        Args:
            session: one or several sequences; not changed, and not to be changed before they run.
            max_new_bytes: for each of them.
            sampling: how bytes are chosen; sequence r of the session draws with the seed + r.
            stop: a text ends before any of these.
            n: texts per sequence.
            generators: random generators, one per text, instead of those of `sampling`.
        """
        check_positive("max_new_bytes", max_new_bytes)
        check_positive("n", n)
        sampling = sampling or SamplingConfig()
        size = session.batch * n
        draws = make_generators(sampling, size) if generators is None else generators
        require(len(draws) == size, f"generators must hold one per text, {size}, got {len(draws)}")
        numbers = []
        for row in range(session.batch):
            own = select_sessions(session, [row]) if session.batch > 1 else session
            for copy in range(n):
                number = len(self._texts)
                text = _Text(number, own, max_new_bytes, sampling, draws[row * n + copy], stop)
                self._texts[number] = text
                self._waiting.append(text)
                numbers.append(number)
        return numbers

    def step(self) -> list[Piece]:
        """Generate one more byte of every running text; returns what can be shown, in the order of the texts."""
        self._fill()
        if not self._rows:
            return []
        assert self._batch is not None and self._logits is not None
        require(
            bool(self._logits.isfinite().all()),
            "the model's scores are not finite: its weights are damaged, or it was not trained well",
        )
        tokens = self._choose(self._logits)
        spent = (F.cross_entropy(self._logits.double(), tokens, reduction="none") / math.log(2)).tolist()
        if isinstance(self._batch, LeanModel) and not self._batch.applies:
            self._generalize()
        self._logits = self._batch.step(tokens)
        pieces = []
        for text, token, bits in zip(self._rows, tokens.tolist(), spent, strict=True):
            if shown := text.read(token, bits):
                pieces.append(Piece(text.number, shown))
        for text in [text for text in self._rows if text.ended]:
            self._take_out(text)
        return sorted(pieces)

    def drop(self, number: int) -> Generation:
        """Let a text leave before its end; returns what there is of it."""
        text = self._text(number)
        if text in self._rows:
            self._take_out(text)
        elif text in self._waiting:
            self._waiting.remove(text)
        return self.result(number)

    def result(self, number: int) -> Generation:
        """A text so far."""
        text = self._text(number)
        data = bytes(text.data)
        finish: Literal["length", "stop"] = "stop" if text.finder.found else "length"
        return Generation(TextDecoder(text.before).feed(data), data, finish)

    def bits_per_byte(self, number: int) -> float:
        """Bits per generated byte of a text so far, by the model's own scores; not a number for an empty one."""
        text = self._text(number)
        return text.bits / text.tokens if text.tokens else math.nan

    def session(self, number: int) -> Session:
        """What the model has read of a text, prompt included: a value."""
        text = self._text(number)
        if text.session is not None:
            return text.session
        assert self._batch is not None
        row = self._rows.index(text)
        return self._session(text, row, self._batch.state([row]))

    def _text(self, number: int) -> _Text:
        require(number in self._texts, f"there is no text {number}: {len(self._texts)} were added")
        return self._texts[number]

    def _session(self, text: _Text, row: int, state: BackboneState) -> Session:
        assert self._logits is not None
        tail = torch.tensor([text.tail[-TAIL:]], device=self._logits.device)
        return Session(state, self._logits[row : row + 1].clone(), text.mark_used()[None].clone(), tail)

    @torch.no_grad()
    def _fill(self) -> None:
        """Let waiting texts join, as long as there is room."""
        while self._waiting and len(self._rows) < self.capacity:
            if self._batch is None:
                self._batch = lean_model(self.model, self.capacity) or GeneralBatch(self.model)
            text = self._waiting.popleft()
            assert text.session is not None
            self._batch.join(text.session.state, [0])
            logits = text.session.logits
            self._logits = logits if not self._rows else torch.cat([self._logits, logits])  # type: ignore[list-item]
            self._rows.append(text)
            text.session = None

    def _take_out(self, text: _Text) -> None:
        """Let a text leave; the last one takes its row."""
        assert self._batch is not None and self._logits is not None
        row, last = self._rows.index(text), len(self._rows) - 1
        text.session = self._session(text, row, self._batch.leave(row))
        self._rows[row] = self._rows[last]
        self._rows.pop()
        order = list(range(last))
        if row != last:
            order[row] = last
        self._logits = self._logits[order]

    def _generalize(self) -> None:
        """Continue with the general step: something was put on the model that the lean step does not heed."""
        assert isinstance(self._batch, LeanModel)
        state = self._batch.state()
        self._batch = GeneralBatch(self.model)
        self._batch.join(state, range(len(self._rows)))

    def _choose(self, logits: Tensor) -> Tensor:
        """The next token of every row."""
        groups: dict[SamplingConfig, list[int]] = {}
        for row, text in enumerate(self._rows):
            groups.setdefault(text.sampling, []).append(row)
        if len(groups) == 1:
            ((sampling, rows),) = groups.items()
            return self._choose_rows(logits, sampling, rows)
        tokens = torch.empty(len(self._rows), dtype=torch.int64, device=logits.device)
        for sampling, rows in groups.items():
            tokens[rows] = self._choose_rows(logits[rows], sampling, rows)
        return tokens

    def _choose_rows(self, logits: Tensor, sampling: SamplingConfig, rows: Sequence[int]) -> Tensor:
        texts = [self._rows[row] for row in rows]
        used = logits  # not read
        if sampling.repetition_penalty != 1:
            used = torch.stack([text.mark_used() for text in texts])
        return choose(logits, used, sampling, [text.generator for text in texts])
