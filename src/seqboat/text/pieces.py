"""Bytes as they are generated, turned into text that can be shown: stop strings and whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


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
