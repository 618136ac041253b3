"""Speed and memory of every mixer at several lengths, beside the columns of table 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqboat.bench.candidates import MIXER_TITLES, OURS, Candidate, configure
from seqboat.bench.layers import run_layers
from seqboat.bench.measure import as_record
from seqboat.bench.setting import MODES, LayerSetting
from seqboat.mixers import MIXERS
from seqboat.models.cost import count_parameters
from seqboat.paper import layer_efficiency
from seqboat.paper.layer_efficiency import (
    BLOCKS,
    find_row,
    left_out,
    measured_ratio,
    rate_of,
    rate_text,
)
from seqboat.paper.matching import match_layer
from seqboat.paper.published import LRA, LRA_SPEED_LENGTH
from seqboat.paper.tables import Make, Pictures, Record, ratio_text, table
from seqboat.paper.target import MeasuredTarget
from seqboat.paper.trial import Bench, Scale


def mixer_candidates(setting: LayerSetting, matched: bool) -> list[Candidate]:
    """Every mixer at the width of the setting, or as large as SeqBoat; a Transformer by plain equations first."""
    plain = Candidate("transformer", "transformer", {"implementation": "plain"})
    fused = Candidate("transformer, fused", "transformer", {"implementation": "sdpa"})
    others = [Candidate(name, name, {}) for name in MIXERS if name != "transformer"]
    found = [plain, fused, *others]
    if not matched:
        return found
    target = count_parameters(configure(OURS, setting).build(setting.d_model))
    return [_match(candidate, setting, target) for candidate in found]


def _match(candidate: Candidate, setting: LayerSetting, target: int) -> Candidate:
    """The candidate at the width that gives it the target's number of parameters."""
    found = match_layer(configure(candidate, setting), setting.d_model, target)
    return candidate._replace(overrides={**candidate.overrides, **found.changes})


class MixerEfficiencyTarget(MeasuredTarget):
    """All lengths side by side, then a table for each length, at equal width and at equal parameters."""

    def bench_options(self) -> dict[str, Any]:
        return {"rounds": 3, "slowest": 15.0}

    def measure_parts(self, bench: Bench, scale: Scale, folder: Path, **options: Any) -> dict[str, Any]:
        assert bench.length is not None
        rate = rate_of(folder, "text")
        batch = max(1, layer_efficiency.TOKENS // bench.length)
        setting = LayerSetting(batch=batch, length=bench.length, rate=rate.value)
        candidates = mixer_candidates(setting, bench.matched)
        rows = run_layers(candidates, [setting], MODES, **options)
        changes = {candidate.label: candidate.overrides for candidate in candidates}
        return {"mixers": as_record(rows, setting, rate=rate._asdict(), changes=changes)}

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        benches = self.benches(scale)
        lines = _all_lengths(benches, records)
        for bench in benches:
            lines += _one_length(bench, [r for r in records if r["trial"] == bench.name])
        return [*lines, *pictures.show(_draw(records))]


def _all_lengths(benches: Sequence[Bench], records: Sequence[Record]) -> list[str]:
    rows = {r["trial"]: r["parts"]["mixers"]["rows"] for r in records}
    lines = []
    for matched in (False, True):
        own = [bench for bench in benches if bench.matched == matched and bench.name in rows]
        if not own:
            continue
        labels = list(dict.fromkeys(row["candidate"] for bench in own for row in rows[bench.name]))
        columns: dict[str, list[float | None]] = {}
        for title, mode, kind in BLOCKS:
            for bench in own:
                found = [measured_ratio(rows[bench.name], label, mode, kind) for label in labels]
                columns[f"{title}, {bench.length:,}"] = found
                if bench.length == LRA_SPEED_LENGTH and mode == "training":
                    columns[f"{title}, paper"] = [_published(label, kind) for label in labels]
        cells = ([ratio_text(value) for value in column] for column in columns.values())
        lines += [f"### All lengths, equal {'parameters' if matched else 'width'}", ""]
        lines += table(["mixer", *columns], list(zip(labels, *cells, strict=True)))
    return lines


def _published(label: str, kind: str) -> float | None:
    """The paper's speed or memory of a mixer; None where it has none."""
    if label not in LRA:
        return None
    return LRA[label].memory if kind == "memory" else LRA[label].speed


def _one_length(bench: Bench, records: Sequence[Record]) -> list[str]:
    lines = [f"### {bench.title[0].upper()}{bench.title[1:]}", ""]
    if not records:
        return [*lines, "Not measured here.", ""]
    part = records[0]["parts"]["mixers"]
    rows, setting = part["rows"], part["setting"]
    lines += [f"{setting['batch']} x {setting['length']:,} tokens; active: {rate_text(part['rate'])}.", ""]
    cells = []
    for label in dict.fromkeys(row["candidate"] for row in rows):
        training, inference = (find_row(rows, label, mode) for mode in MODES)
        known = bench.length == LRA_SPEED_LENGTH
        change = _change(part["changes"][label])
        cells.append(
            [
                label + (f" ({change})" if change else ""),
                f"{training['parameters']:,}" if training["parameters"] else "-",
                *_time_cells(training),
                ratio_text(_published(label, "training") if known else None, digits=1),
                *_memory_cells(training),
                ratio_text(_published(label, "memory") if known else None),
                *_time_cells(inference),
                *_memory_cells(inference),
            ]
        )
    head = ["mixer", "parameters", "training ms", "speed", "paper", "MiB", "memory", "paper", "inference ms"]
    notes = left_out(rows)
    return [*lines, *table([*head, "speed", "MiB", "memory"], cells), *notes, *([""] if notes else [])]


def _change(overrides: Mapping[str, Any]) -> str:
    """What matching parameters changed."""
    shown = {name: value for name, value in overrides.items() if name != "implementation"}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _time_cells(row: Record) -> list[str]:
    if row["seconds"] is None:
        return ["left out", "-"]
    return [f"{1000 * row['seconds']['median']:.0f}", ratio_text(1 / row["ratio"] if row["ratio"] else None)]


def _memory_cells(row: Record) -> list[str]:
    if row["memory"] is None:
        return ["-", "-"]
    return [f"{row['memory'] / 2**20:.0f}", ratio_text(row["memory_ratio"] or None)]


def _draw(records: Sequence[Record]) -> Make | None:
    """At the paper's length and equal width."""
    from seqboat.figures import ratios_figure

    found = [r for r in records if r["trial"] == f"width-{LRA_SPEED_LENGTH}"]
    if not found:
        return None
    rows = found[0]["parts"]["mixers"]["rows"]
    panels: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for title, mode, kind in BLOCKS[:2]:
        panels[title] = {
            MIXER_TITLES.get(label, label): (measured_ratio(rows, label, mode, kind), _published(label, kind))
            for label in dict.fromkeys(row["candidate"] for row in rows)
        }
    return lambda theme: ratios_figure(panels, reference="plain Transformer", theme=theme)


MIXER_EFFICIENCY = MixerEfficiencyTarget(
    name="mixers-efficiency",
    title="Speed and memory of every mixer",
    where="columns of table 1, for all mixers and more lengths",
    about="One layer of each mixer at the sizes of Text (width 128, memory 256), as multiples of a plain "
    "Transformer (with all scores and weights in memory), measured alternately. The paper's multiples are those of "
    "its table 1, at 4,096 tokens. First, all mixers have the same width; then all have as many parameters as "
    "SeqBoat. In routed layers, as many tokens attend as in our small Text run. H3 and its hybrid differ only in a "
    "stack, not in a single layer. Adaptive Span has its initial spans, with a ramp of 32 tokens.",
    cut="batches of 8,192 tokens, or of one sequence if that is longer; steps estimated to take more than 15 "
    "seconds are skipped.",
    small_benches=tuple(
        Bench(
            name=f"{'parameters' if matched else 'width'}-{length}",
            title=f"{length:,} tokens, equal {'parameters' if matched else 'width'}",
            minutes=8,
            length=length,
            matched=matched,
        )
        for matched in (False, True)
        for length in (1024, 4096, 16384)
    ),
)
