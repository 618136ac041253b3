"""The table of `tests/machines.py`: rows that were not run again stay as they are."""

from __future__ import annotations

from pathlib import Path

from machines import BEGIN, END, VARIANTS, table, write


def outcome(commit: str, bits: str) -> dict[str, object]:
    return {"passed": 5, "skipped": 1, "failed": 0, "minutes": 2.0, "bits": bits, "commit": commit}


def test_rows_without_a_result_stay(tmp_path: Path) -> None:
    first, second, third = (variant.name for variant in VARIANTS[:3])
    page = tmp_path / "machines.md"
    old = table({first: outcome("aaaaaaa", "x"), second: outcome("aaaaaaa", "y")}, "x")
    page.write_text(f"before\n{BEGIN}\nA processor.\n\n{old}\n{END}\nafter\n", encoding="utf-8")
    write(page, {second: outcome("bbbbbbb", "x"), third: outcome("bbbbbbb", "y")}, "x")
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"\n{END}\nafter\n")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    assert [(row[1], *row[-3:-1]) for row in rows[1:]] == [
        (first, "as it is", "aaaaaaa"),
        (second, "as it is", "bbbbbbb"),
        (third, "differ", "bbbbbbb"),
    ]
