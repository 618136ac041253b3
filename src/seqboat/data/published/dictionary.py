"""Dictionaries of fairseq (`dict.txt`): which token id stands for which symbol.

    <s> <pad> </s> <unk>      ids 0, 1, 2 and 3, not written in the file
    116 1048576               id 4: the symbol, and how often it was counted
    101 734003                id 5
    madeupword0000 0          fills the dictionary up to a multiple of eight

What a symbol means depends on the data. Bytes are written as decimal numbers (as in enwik8, where a line break is
the end of a line, </s>) or as characters; ListOps has its operators, digits and brackets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from seqboat.core.checks import require, short
from seqboat.data.files import open_regular

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""Symbols that every dictionary begins with."""
PAD, END, UNKNOWN = 1, 2, 3
MAX_BYTES = 16 << 20
"""Bytes of a dictionary that are read at most."""
SPACES = ("<space>", "<SPACE>", "\u2581", "\u0120")
"""How dictionaries of characters write a blank, at which fairseq splits its lines."""
_FILLER = "madeupword"
_FLAG = "#fairseq:overwrite"


def read_dictionary(path: Path) -> tuple[str, ...]:
    """The symbols of a dictionary by id, the special ones included.

    Raises:
        ValueError: naming the file and the line that is wrong.
    """
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    require(len(content) <= MAX_BYTES, f"{path} has more than {MAX_BYTES:,} bytes: it is not a dictionary")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a dictionary: not UTF-8 at byte {error.start}") from None
    symbols = list(SPECIAL)
    places = {symbol: place for place, symbol in enumerate(symbols)}
    # only "\n" ends a line: a symbol may be one of the other separators of Unicode
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        overwrite = count == _FLAG
        if overwrite:
            symbol, _, count = symbol.rpartition(" ")
        good = symbol and count.isascii() and count.isdigit()
        require(bool(good), f"{path}, line {number}: expected a symbol and a count, got {short(line)}")
        require(symbol not in places or overwrite, f"{path}, line {number}: {short(symbol)} occurs twice")
        places[symbol] = len(symbols)
        symbols.append(symbol)
    return tuple(symbols)


def write_dictionary(symbols: Sequence[str]) -> str:
    """The text of a dictionary with these symbols, after the special ones."""
    return "".join(f"{symbol} 1\n" for symbol in symbols)


def is_filler(symbol: str) -> bool:
    """Whether a symbol stands for nothing that data contain."""
    return symbol in SPECIAL or symbol == "<CLS>" or symbol.startswith(_FILLER)


def byte_symbols(symbols: Sequence[str], where: object) -> dict[int, bytes]:
    """The bytes that each token id stands for; ids that stand for nothing are left out.

    Symbols are decimal numbers up to 255 if all of them are and one has more than one digit, else single characters.

    Args:
        symbols: of a dictionary.
        where: the name of its file, for messages.
    """
    words = {place: symbol for place, symbol in enumerate(symbols) if not is_filler(symbol)}
    require(len(words) > 0, f"{where} has no symbols")
    numbers = all(word.isascii() and word.isdigit() and len(word) < 4 for word in words.values())
    if numbers and any(len(word) > 1 for word in words.values()):
        for word in words.values():
            require(int(word) < 256, f"{where}: symbol {word} is not a byte: it is more than 255")
        return {place: bytes([int(word)]) for place, word in words.items()}
    found = {}
    for place, word in words.items():
        require(
            len(word) == 1 or word in SPACES,
            f"{where}: symbol {short(word)} is neither a byte (a number up to 255), nor a character, nor "
            f"one of {', '.join(SPACES[:3])} for a blank; change its spelling in a copy of the dictionary",
        )
        found[place] = b" " if word in SPACES else word.encode("utf-8", errors="surrogatepass")
    return found


def label_symbols(symbols: Sequence[str], classes: int, where: object) -> dict[int, int]:
    """The class that each token id of a dictionary of labels stands for.

    Labels are numbers, in any order of lines. The published code takes the place in the file instead; where that
    differs, so do the numbers of its classes.
    """
    found = {}
    for place, symbol in enumerate(symbols):
        if is_filler(symbol):
            continue
        good = symbol.isascii() and symbol.isdigit() and len(symbol) < 4 and int(symbol) < classes
        require(good, f"{where}: label {short(symbol)} is not a number from 0 to {classes - 1}")
        found[place] = int(symbol)
    require(len(found) > 0, f"{where} has no labels")
    return found


def named_symbols(
    symbols: Sequence[str], names: Mapping[str, int], where: object, ignored: Collection[str] = ()
) -> dict[int, int]:
    """Our id of each token id whose symbol has a name; ignored symbols are left out.

    Args:
        symbols: of a dictionary.
        names: our ids by name.
        where: the name of the dictionary's file, for messages.
        ignored: symbols that our sequences leave out.
    """
    found = {}
    for place, symbol in enumerate(symbols):
        if not is_filler(symbol) and symbol not in ignored:
            require(symbol in names, f"{where}: symbol {short(symbol)} is none of {', '.join(names)}")
            found[place] = names[symbol]
    return found
