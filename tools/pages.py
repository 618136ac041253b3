"""Generated parts of documents, between a pair of comments."""

from __future__ import annotations

from pathlib import Path


def replace_part(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name: begin -->` and `<!-- name: end -->`."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, also, after = rest.partition(end)
    if not (found and also):
        raise SystemExit(f"{page} has no part {name!r}")
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", encoding="utf-8")
