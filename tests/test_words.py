"""The project speaks the plain American English of its field: words that once made readers stumble stay out.

`docs/glossary.md` has the words to use instead. The changelog's past entries keep their words.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".js", ".css", ".html", ".toml", ".yml", ".yaml", ".cff"}
FOLDERS = ("src", "docs", "tests", "examples", "benchmarks", "tools", ".github")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in SUFFIXES and "fixtures" not in path.parts and path != Path(__file__)
] + [
    p
    for p in sorted(ROOT.iterdir())
    if (p.suffix in SUFFIXES or p.name == "Makefile") and p.stem != "CHANGELOG"
]

WORDS = {
    "awake|wakes?|woke|woken|waking|asleep": "active, activate, inactive",
    "(?<!readers )(?<!people )(?<!users )(?<!user )who|whom": "which (of tokens)",
    "shares? of": "fraction of, rate of",
    "(?<!standard )deviations?": "std",
    "rows? of (?:a|the|each|every) batch|batch rows?": "sequence",
    "(?:go|goes|going|went) on|tak(?:e|es|en|ing) up again": "continue, resume",
    "mend(?:s|ed|ing)?": "fix",
    "yard-?sticks?": "baseline",
    "contenders?": "candidate",
    "(?:small )?twins?": "small variant",
    '(?<!")dear(?:er|est)?': "expensive",
    "prices?": "cost",
    "[0-9,]+ updates|updates (?:of|per|done)": "steps",
    "so many": "N, this many",
    "of (?:its|their|our|your|his|her) own(?! [a-z])": "separate",
    "as it is produced": "streamed",
    "(?:rises?|falls?) in a line": "linear warm-up, linear decay",
    "survives what": "failure handling",
    "slow hours?|fast hours?": "run-to-run variation",
    "rounds that count": "timed rounds",
    "found out by looking": "detected automatically",
    "batch mates?": "other sequences of the batch",
}
"""Patterns that must not occur as words, and what to write instead."""

BRITISH = (
    r"colour|favour|behaviour|neighbour|honour|labour|centre|licence|artefact|judgement|learnt|spelt|whilst|grey"
    r"|labell(?:ed|ing)(?!by)|modell(?:ed|ing)|cancell(?:ed|ing)|travell|analys(?:ed|er|ing)|(?<![a-z])analyse"
    r"|(?:optim|normal|initial|discret|material|summar|random|minim|maxim|penal|token|quant|organ|recogn|general"
    r"|parametr|serial|synchron|visual|util|special|categor|vector|final|real|emphas|standard|symbol|priorit)is"
    r"(?:e|es|ed|er|ers|ing|ation|ations)(?![a-z])"
)
"""British spellings, inside identifiers too."""

ALLOWED = {
    ("tools/glance.py", "contender"): "a key of records that older versions wrote",
    ("src/seqboat/paper/results.py", "contender"): "the same",
    ("tests/test_reproduce.py", "contender"): "the same",
    (
        "src/seqboat/training/config/serialization.py",
        "optimiser",
    ): "the former name of a group of fields, still read",
    ("tests/test_config.py", "optimiser"): "the same",
    ("tests/test_format_1.py", "--optimiser."): "the same",
    ("src/seqboat/tasks/base.py", "summarise"): "the former name of a method that users implement",
}
"""Lines that may keep a word, by file and a part of the line, and why."""


def test_every_exception_is_needed() -> None:
    for file, part in ALLOWED:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert any(part in line for line in text.splitlines()), f"{file} has no {part!r} any more"


ANY = re.compile(rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])|{BRITISH}", flags=re.IGNORECASE)


def lines_with(pattern: str, text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.search(pattern, line, flags=re.IGNORECASE)]


def complaints(text: str) -> list[str]:
    """What to write instead, for every line with a word that is not wanted."""
    if ANY.search(text) is None:
        return []
    return [
        f"{line[:100]!r}: write {instead}"
        for words, instead in WORDS.items()
        for line in lines_with(rf"(?<![a-z])(?:{words})(?![a-z])", text)
    ] + [f"{line[:100]!r}: American spelling" for line in lines_with(BRITISH, text)]


def test_words() -> None:
    found = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for line in complaints(path.read_text(encoding="utf-8")):
            if not any(name == file and part in line for file, part in ALLOWED):
                found.append(f"{name}: {line}")
    assert len(FILES) > 400 and not found, "\n".join(found)


def test_the_search_finds_what_it_should() -> None:
    assert complaints("nothing wrong here\n") == []
    assert complaints("fine\nTwo contenders.") == ["'Two contenders.': write candidate"]
    assert complaints("set_colour = 1") == ["'set_colour = 1': American spelling"]
