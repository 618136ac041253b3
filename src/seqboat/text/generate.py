"""Text from a language model of bytes, byte by byte, with a state of constant size.

    for piece in stream(model, "The history of", max_new_bytes=500):
        print(piece.text, end="", flush=True)
    one, two = generate(model, ["A prompt", "A longer prompt"], sampling=SamplingConfig(top_p=0.9, seed=0))
    best = best_of(model, "A prompt", 8)[0]                 # of eight texts, after reading the prompt once

The prompts are read in chunks (`text.session`); then their texts run side by side until the last has ended. They are
independent: each ends at its own stop string and has its own random generator. A product with many rows rounds
differently from one with a single row, so a choice can differ from that of the text alone where two candidates are
that close.
"""

from __future__ import annotations

import codecs
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.checks import check_positive, require
from seqboat.core.state import concat_rows, select_rows
from seqboat.models.heads import LanguageModel
from seqboat.text.session import CHUNK, Session, read, start

BYTES = 256
"""Tokens of a language model of bytes."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen; changes of the scores apply in the order of these fields."""

    greedy: bool = False
    """Whether to always take the most probable token instead of sampling."""
    repetition_penalty: float = 1.0
    """Tokens that have occurred: positive scores are divided by this, negative ones multiplied; 1 changes nothing."""
    temperature: float = 1.0
    """Scores are divided by this: below 1 the likely become likelier."""
    top_k: int | None = None
    """Keep only this many of the most probable tokens (and ties with the last of them); None keeps all."""
    top_p: float = 1.0
    """Keep only the most probable tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep only tokens at least this probable, relative to the most probable one."""
    seed: int | None = None
    """Sequence r draws from a generator with seed + r; None takes another seed every time."""

    def __post_init__(self) -> None:
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            require(
                0 < value < math.inf,
                f"{name} must be a finite number > 0, got {value!r}"
                + ("; to always take the most probable token, set greedy" if name == "temperature" else ""),
            )
        if self.top_k is not None:
            check_positive("top_k", self.top_k)
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p!r}")
        require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p!r}")
        if self.seed is not None:
            check_positive("seed", self.seed, least=0)
        if self.greedy:
            # a setting that has no effect is a misunderstanding
            for name, plain in (("temperature", 1.0), ("top_k", None), ("top_p", 1.0), ("min_p", 0.0)):
                value = getattr(self, name)
                require(
                    value == plain,
                    f"greedy and {name} cannot be combined: the most probable token is taken, got {name} {value!r}",
                )
            require(self.seed is None, "greedy and seed cannot be combined: nothing is drawn")


def penalize(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Scores in which tokens that have occurred are less likely (for a penalty above 1)."""
    if penalty == 1:
        return logits
    return torch.where(used, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def distribution(logits: Tensor, used: Tensor, sampling: SamplingConfig) -> Tensor:
    """Probabilities to draw the next token by.

    Args:
        logits: (batch, vocab).
        used: (batch, vocab), True for tokens that have occurred.
        sampling: what is kept and how it is scaled.

    Returns:
        (batch, vocab) in float64, zero for what is left out.
    """
    scores = penalize(logits.double(), used, sampling.repetition_penalty)
    # seen from the best score, so that no temperature makes it infinite
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p < 1:
        probs, order = scores.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        # a token stays if those before it do not reach the sum yet: so the first always stays
        beyond = probs.cumsum(dim=-1) - probs >= sampling.top_p
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -math.inf)
    probs = scores.softmax(dim=-1)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), 0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def choose(
    logits: Tensor, used: Tensor, sampling: SamplingConfig, generators: Sequence[torch.Generator]
) -> Tensor:
    """The next token of every sequence, (batch,); it depends neither on the other sequences nor on the device.

    Args:
        logits: (batch, vocab).
        used: (batch, vocab), True for tokens that have occurred; read only where there is a repetition penalty.
        sampling: how to choose.
        generators: one per sequence.
    """
    if sampling.greedy:
        return penalize(logits, used, sampling.repetition_penalty).argmax(dim=-1)
    probs = distribution(logits, used, sampling)
    draws = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators]
    # the first token at which the sum of probabilities passes the draw; never one of probability zero
    sums = probs.cumsum(dim=-1)
    height = torch.cat(draws).to(sums.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, height, right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)


def make_generators(sampling: SamplingConfig, batch: int) -> list[torch.Generator]:
    """One random generator per sequence: that of sequence r has the seed `sampling.seed` + r."""
    seed = secrets.randbits(60) if sampling.seed is None else sampling.seed
    return [torch.Generator().manual_seed(seed + number) for number in range(batch)]


class StopFinder:
    """Finds stop strings in a stream of bytes, and holds back what may become one.

    >>> finder = StopFinder([b"END"])
    >>> [finder.feed(byte) for byte in b"aEN."], finder.found
    ([b'a', b'', b'', b'EN.'], False)
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self.stops = sorted(stops, key=len, reverse=True)
        self.found = False
        self.held = b""

    def feed(self, byte: int) -> bytes:
        """Take one more byte; returns the bytes that certainly belong to the text."""
        held = self.held + bytes([byte])
        for stop in self.stops:  # the longest first: it began before the others
            if held.endswith(stop):
                self.found, self.held = True, b""
                return held[: -len(stop)]
        keep = max((_overlap(held, stop) for stop in self.stops), default=0)
        self.held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> bytes:
        """What was held back, when nothing more comes."""
        rest, self.held = self.held, b""
        return rest


def _overlap(text: bytes, stop: bytes) -> int:
    """How many bytes at the end of a text are the beginning of a stop string."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class TextDecoder:
    """Bytes to text as they come: characters when they are whole, U+FFFD for what is no UTF-8.

    >>> decoder = TextDecoder()
    >>> [decoder.feed(part) for part in (b"caf", b"\\xc3", b"\\xa9", b"\\xff!")]
    ['caf', '', 'é', '\\ufffd!']

    A character that is cut off at the end is never shown; `before` gives its first bytes to the next decoder.
    """

    def __init__(self, before: bytes = b"") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(unfinished(before))

    def feed(self, data: bytes) -> str:
        """The characters that these bytes complete."""
        return self._decoder.decode(data)


def unfinished(data: bytes) -> bytes:
    """The beginning of a character at the end of some bytes, if it lacks its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-3:])
    return decoder.getstate()[0]


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


class _Text:
    """One text that is being generated."""

    def __init__(self, session: Session, generator: torch.Generator, stops: Sequence[bytes]) -> None:
        self.generator, self.tail = generator, session.tail[0].tolist()
        self.before = bytes(token for token in self.tail if 0 <= token < BYTES)
        self.finder, self.decoder = StopFinder(stops), TextDecoder(self.before)
        self.data, self.tokens, self.bits, self.ended = bytearray(), 0, 0.0, False

    def read(self, token: int, bits: float, limit: int) -> str:
        """Take one more token; returns what can be shown."""
        self.tokens, self.bits = self.tokens + 1, self.bits + bits
        self.tail = [*self.tail[1:], token]
        shown = self.finder.feed(token)
        self.ended = self.finder.found or self.tokens >= limit
        if self.ended and not self.finder.found:
            shown += self.finder.rest()
        self.data += shown
        return self.decoder.feed(shown)

    @property
    def result(self) -> Generation:
        data = bytes(self.data)
        finish: Literal["length", "stop"] = "stop" if self.finder.found else "length"
        return Generation(TextDecoder(self.before).feed(data), data, finish)


class Stream:
    """Pieces of text as they are produced; made by `stream`.

    `session` is what the model has read up to the last piece, the generated bytes (also those of a stop string)
    included; `results` are the whole texts so far. A piece names its sequence: with n texts per prompt, those of the
    first prompt come first.
    """

    def __init__(
        self,
        model: LanguageModel,
        session: Session,
        limit: int,
        sampling: SamplingConfig,
        stops: Sequence[bytes],
        n: int = 1,
    ) -> None:
        rows = [row for row in range(session.batch) for _ in range(n)]
        self._model, self._limit, self._sampling = model, limit, sampling
        self._running, session = list(range(len(rows))), select_rows(session, torch.tensor(rows))
        self._logits, self._used = session.logits, session.used
        self._ended: dict[int, Session] = {}
        self._texts = [
            _Text(select_rows(session, torch.tensor([row])), generator, stops)
            for row, generator in enumerate(make_generators(sampling, len(rows)))
        ]
        self._state = session.state
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def results(self) -> list[Generation]:
        """The texts so far, n per prompt."""
        return [text.result for text in self._texts]

    @property
    def bits(self) -> list[float]:
        """Bits per byte of the texts so far, by the model's own scores; stop strings count."""
        return [text.bits / text.tokens if text.tokens else math.nan for text in self._texts]

    @property
    def session(self) -> Session:
        """What the model has read, one text per sequence: a value."""
        parts = dict(self._ended)
        if self._running:
            whole = self._whole()
            for row, number in enumerate(self._running):
                parts[number] = select_rows(whole, torch.tensor([row]))
        return concat_rows([parts[number] for number in range(len(self._texts))])

    def _whole(self) -> Session:
        """What the model has read of the running texts."""
        tail = torch.tensor([self._texts[number].tail for number in self._running], device=self._used.device)
        return Session(self._state, self._logits, self._used, tail)

    def _run(self) -> Iterator[Piece]:
        was_training = self._model.training
        self._model.eval()
        try:
            while self._running:
                yield from self._step()
        finally:
            self._model.train(was_training)

    def _step(self) -> list[Piece]:
        """One more byte of every running text; returns what can be shown."""
        texts = [self._texts[number] for number in self._running]
        require(
            bool(self._logits.isfinite().all()),
            "the model's scores are not finite: its weights are damaged, or it was not trained well",
        )
        tokens = choose(self._logits, self._used, self._sampling, [text.generator for text in texts])
        spent = (F.cross_entropy(self._logits.double(), tokens, reduction="none") / math.log(2)).tolist()
        self._logits = self._model.step(tokens, self._state).logits
        self._used.scatter_(1, tokens[:, None], True)
        pieces = []
        for number, text, token, bits in zip(self._running, texts, tokens.tolist(), spent, strict=True):
            if shown := text.read(token, bits, self._limit):
                pieces.append(Piece(number, shown))
        if any(text.ended for text in texts):
            self._take_out([row for row, text in enumerate(texts) if text.ended])
        return pieces

    @torch.no_grad()
    def _take_out(self, rows: Sequence[int]) -> None:
        """Keep what was read of the texts in these rows, and go on with the others."""
        whole = self._whole()
        for row in rows:
            self._ended[self._running[row]] = select_rows(whole, torch.tensor([row]))
        rest = [row for row in range(len(self._running)) if row not in rows]
        self._running = [self._running[row] for row in rest]
        if rest:
            left = select_rows(whole, torch.tensor(rest))
            self._logits, self._used, self._state = left.logits, left.used, left.state


def stream(
    model: LanguageModel,
    prompts: str | bytes | Sequence[str | bytes] = (),
    *,
    max_new_bytes: int = 256,
    sampling: SamplingConfig | None = None,
    stop: Sequence[str | bytes] = (),
    session: Session | None = None,
    n: int = 1,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> Stream:
    """Read prompts, then generate as pieces are asked for.

    Args:
        model: of bytes; put into eval mode and back.
        prompts: one, or several of any lengths; may be left out, or be empty, where a session is given.
        max_new_bytes: for each prompt.
        sampling: how bytes are chosen; by default drawn as the model scores them.
        stop: a text ends before any of these; they are looked for in what is generated, not in the prompt.
        session: what was read before, one sequence per prompt; it is not changed.
        n: texts per prompt, which is read only once.
        chunk: bytes of each prompt read at once.
        progress: called with the bytes of the longest prompt that are read, and all.
    """
    vocab = model.backbone.config.vocab
    require(vocab is not None and vocab <= BYTES, f"model must be a model of bytes, got vocab {vocab}")
    check_positive("max_new_bytes", max_new_bytes)
    check_positive("n", n)
    stops = [_encode(text, f"stop[{i}]") for i, text in enumerate(stop)]
    require(all(stops), "stop strings must not be empty, got ''")
    given = [prompts] if isinstance(prompts, str | bytes) else list(prompts)
    rows = [_encode(text, f"prompts[{i}]") for i, text in enumerate(given)]
    if session is None:
        require(len(rows) > 0, "prompts must hold at least one prompt, got none")
        for i, row in enumerate(rows):
            require(len(row) > 0, f"prompts[{i}] is empty: there must be something to continue from")
        session = start(model, len(rows))
    else:
        rows = rows or [b""] * session.batch
    was_training = model.training
    model.eval()
    try:
        session = read(model, session, rows, chunk=chunk, progress=progress)
    finally:
        model.train(was_training)
    return Stream(model, session, max_new_bytes, sampling or SamplingConfig(), stops, n)


def generate(
    model: LanguageModel,
    prompts: str | bytes | Sequence[str | bytes] = (),
    *,
    max_new_bytes: int = 256,
    sampling: SamplingConfig | None = None,
    stop: Sequence[str | bytes] = (),
    session: Session | None = None,
    n: int = 1,
    chunk: int = CHUNK,
) -> list[Generation]:
    """Whole texts, n per prompt; see `stream` for the arguments."""
    texts = stream(
        model,
        prompts,
        max_new_bytes=max_new_bytes,
        sampling=sampling,
        stop=stop,
        session=session,
        n=n,
        chunk=chunk,
    )
    for _ in texts:
        pass
    return texts.results


class Ranked(NamedTuple):
    """One of several texts for a prompt."""

    generation: Generation
    bits_per_byte: float
    """by the model's own scores: the fewer, the likelier it finds the text"""


def best_of(
    model: LanguageModel,
    prompt: str | bytes = b"",
    n: int = 4,
    *,
    max_new_bytes: int = 256,
    sampling: SamplingConfig | None = None,
    stop: Sequence[str | bytes] = (),
    session: Session | None = None,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> list[Ranked]:
    """Several texts for one prompt, which is read only once; the likeliest first. See `stream` for the arguments."""
    texts = stream(
        model,
        prompt,
        max_new_bytes=max_new_bytes,
        sampling=sampling,
        stop=stop,
        session=session,
        n=n,
        chunk=chunk,
        progress=progress,
    )
    for _ in texts:
        pass
    found = [Ranked(*pair) for pair in zip(texts.results, texts.bits, strict=True)]
    return sorted(found, key=lambda ranked: ranked.bits_per_byte)


def _encode(text: str | bytes, name: str) -> bytes:
    require(isinstance(text, str | bytes), f"{name} must be text or bytes, got {type(text).__name__}")
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid text: {error}") from error
