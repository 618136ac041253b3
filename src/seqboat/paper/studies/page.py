"""The page of all studies, written from their records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seqboat.data.files import write_text
from seqboat.paper.studies import STUDIES
from seqboat.paper.studies.clock import STANDARD
from seqboat.paper.studies.store import read_records, records_path
from seqboat.paper.studies.study import Study
from seqboat.paper.tables import Pictures, Record, showing


def write_page(page: Path) -> list[Record]:
    """Write the page and its figures; returns the records behind it."""
    records, source = read_records(page), records_path(page).name
    lines = [
        "# Evidence at equal compute",
        "",
        f"`seqboat reproduce` writes this page from `{source}`, which has a line of JSON for each run with its "
        "command, commit, seed and processor time; do not edit it by hand. Seconds count the training steps on one "
        "processor core. They are standard seconds: a small fixed computation, which takes "
        f"{1000 * STANDARD:g} ms on the standard core, runs between the steps, and where it takes twice as long a "
        "second is worth half. So a busy or slow machine trains for longer, with about as many steps "
        "([how well that works](choosing.md#standard-seconds)). "
        "[choosing.md](choosing.md) says what the results mean in practice.",
        "",
    ]
    with showing(records_path(page)):
        for study in STUDIES.values():
            mine = [r for r in records if r["study"] == study.name]
            pictures = Pictures(page.parent, True, f"evidence-{study.name}", study.title)
            lines += _section(study, mine, pictures)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, "\n".join(lines).rstrip() + "\n")
    return records


def _section(study: Study, records: Sequence[Record], pictures: Pictures) -> list[str]:
    lines = [f"## {study.title}", "", study.about, ""]
    if not records:
        return [*lines, f"Not run here: `{study.command}`.", ""]
    budgets = sorted({r["budget"] for r in records})
    named = {trial.name for trial in study.trials}
    known = [r for r in records if r["trial"] in named]
    wanted = len(study.cells(study.budget)) // len(study.multiples)
    lines += [
        f"`{study.command} --budget SECONDS`; these runs had {_list(budgets)} seconds each. "
        f"{_count(known, budgets, wanted)}",
        "",
    ]
    diverged = [f"{r['trial']} (seed {r['seed']}, {r['budget']:g} s)" for r in known if "test" not in r]
    if diverged:
        lines += [f"Diverged with every learning rate that was tried: {', '.join(diverged)}.", ""]
    lines += _edge(known)
    lines += study.show(study, [r for r in known if "test" in r], pictures)
    made = sorted({(r["versions"]["torch"], r["commit"] or "unknown") for r in known if "versions" in r})
    total = sum(r.get("processor_seconds", 0.0) for r in known) / 60
    return [
        *lines,
        f"{len(known)} runs took {total:.0f} minutes of processor time, including evaluations but not the search for "
        f"learning rates (at {_list(sorted({c for _, c in made}))}; torch {_list(sorted({t for t, _ in made}))}).",
        "",
    ]


def _edge(records: Sequence[Record]) -> list[str]:
    """How often the search for a learning rate ended at the largest one."""
    found = [(r["lr"], [rate for rate, _ in r["sweep"]]) for r in records if r.get("sweep")]
    largest = sum(chosen == max(rates) for chosen, rates in found)
    if not largest:
        return []
    return [
        f"{largest} of {len(found)} searches chose the largest learning rate: some of these models may do better "
        "with a larger one still.",
        "",
    ]


def _count(records: Sequence[Record], budgets: Sequence[float], wanted: int) -> str:
    """How much of a study is there, by budget, and what it ran on."""
    lines = []
    for budget in budgets:
        mine = [r for r in records if r["budget"] == budget]
        processors = sorted({r["processor"] for r in mine if r.get("processor")})
        where = f", on {_list(processors)}{_worth(mine)}" if processors else ""
        more = "; the same command continues" if len(mine) < wanted else ""
        lines.append(f"{len(mine)} of {wanted} runs with {budget:g} s are finished{where}{more}.")
    return " ".join(lines)


def _worth(records: Sequence[Record]) -> str:
    """What a second of processor time was worth."""
    worth = [f"{1 / r['slowdown']:.2f}" for r in records if r.get("slowdown")]
    if not worth:
        return " (in seconds of processor time, not in standard seconds)"
    least, most = min(worth, key=float), max(worth, key=float)
    return f", where a second was worth {least if least == most else f'{least} to {most}'} standard seconds"


def _list(parts: Sequence[object]) -> str:
    texts = [f"{part:g}" if isinstance(part, float) else str(part) for part in parts]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
