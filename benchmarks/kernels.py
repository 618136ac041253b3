"""The state-space kernels inside one SeqBoat recipe: quality and processor time of each, on two tasks.

    OMP_NUM_THREADS=1 python benchmarks/kernels.py --out runs/kernels --write docs/mixers.md

Every run is `seqboat train RECIPE --model.mixer.ssm=KERNEL`: the recipe's own settings, the kernel's defaults, and a
schedule that is shortened equally for all kernels. Finished runs are kept; call the script again to continue. ListOps
needs `seqboat data prepare listops-small` first. `--write` puts the table between the two marks of a page.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from seqboat.data.files import write_text
from seqboat.recipes import RECIPES
from seqboat.ssm import SSMS
from seqboat.training.config import RunConfig, override
from seqboat.training.trainer import train

STEPS = {"recall": 1000, "lra.listops-small": 600}
"""Training steps of each recipe, in place of 1,500 and 4,600."""
BEGIN, END = "<!-- benchmarks/kernels.py: begin -->", "<!-- benchmarks/kernels.py: end -->"


def configure(recipe: str, kernel: str, seed: int, data_dir: Path) -> RunConfig:
    """The run of one kernel."""
    steps = STEPS[recipe]
    arguments = [
        f"--model.mixer.ssm={kernel}",
        f"--schedule.steps={steps}",
        f"--schedule.warmup_steps={steps // 10}",
        f"--evaluation.every={steps // 2}",
        f"--training.save_every={steps // 10}",
        f"--seed={seed}",
    ]
    config = RECIPES[recipe]()
    if hasattr(config.task, "data_dir"):
        arguments.append(f"--data.data_dir={data_dir}")
    return override(config, arguments)


def record_of(out: Path, recipe: str, kernel: str, seed: int) -> Path:
    """Where the result of a run is written when it has finished."""
    return out / f"{recipe}-{kernel}-{seed}" / "kernel.json"


def run(recipe: str, kernel: str, seed: int, out: Path, data_dir: Path) -> dict[str, Any]:
    """Train one model, or continue; what its last evaluation says."""
    record = record_of(out, recipe, kernel, seed)
    folder = record.parent
    if record.is_file():
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        return found
    config = configure(recipe, kernel, seed, data_dir)
    outcome = train(config, folder, resume=folder.exists())
    if outcome.exit_code:
        raise SystemExit(f"{folder}: {outcome.message}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [line for line in map(json.loads, lines) if line["split"] == config.evaluation.split][-1]
    result = {
        "recipe": recipe,
        "kernel": kernel,
        "seed": seed,
        "steps": STEPS[recipe],
        "parameters": sum(p.numel() for p in config.build_model().parameters()),
        "accuracy": last["accuracy"],
        "activation": last["activation"],
        "processor": last["processor"],
        "commit": commit(),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
    }
    write_text(record, json.dumps(result, indent=2) + "\n")
    return result


def commit() -> str:
    """The commit that is checked out here; a plus sign marks changed files."""
    where = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=where, capture_output=True)
    return head.stdout.strip() + ("+" if changed.returncode else "")


def tabulate(results: list[dict[str, Any]]) -> str:
    """The table, and how it was made."""
    seeds = sorted({result["seed"] for result in results})
    heads = [part for recipe in STEPS for part in (f"{recipe}: accuracy", "active", "processor min")]
    lines = [
        "| kernel | " + " | ".join(["parameters", *heads]) + " |",
        "|---|" + "---:|" * (1 + len(heads)),
    ]
    for kernel in SSMS:
        sizes = [f"{r['parameters']:,}" for r in results if (r["kernel"], r["recipe"]) == (kernel, "recall")]
        cells = sizes[:1] or ["not run"]
        for recipe in STEPS:
            mine = [r for r in results if (r["kernel"], r["recipe"]) == (kernel, recipe)]
            rates = [rate for r in mine for rate in r["activation"] if rate is not None]
            if not mine:
                cells += ["not run"] * 3
                continue
            cells += [
                f"{100 * sum(r['accuracy'] for r in mine) / len(mine):.1f} %",
                f"{100 * sum(rates) / len(rates):.0f} %" if rates else "",
                f"{sum(r['processor'] for r in mine) / len(mine) / 60:.1f}",
            ]
        lines.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    schedule = ", ".join(f"{recipe} {steps:,} steps" for recipe, steps in STEPS.items())
    commits = ", ".join(sorted({result["commit"] for result in results}))
    machines = "; ".join(sorted({result["machine"] for result in results}))
    lines += [
        "",
        f"Validation accuracy, fraction of active tokens (mean over layers) and processor time of whole runs, with "
        f"every kernel at its defaults. Schedules are shorter than the recipes' and equal for all: {schedule}. "
        f"Seeds {', '.join(map(str, seeds))}; one thread; {machines}; commit {commits}. "
        "Made by `python benchmarks/kernels.py`.",
    ]
    return "\n".join(lines)


def insert(page: Path, table: str) -> None:
    """Put the table between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page} has no marks {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    write_text(page, f"{before}{BEGIN}\n{table}\n{END}{after}")


def main(arguments: list[str] | None = None) -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"), help="folder of the runs")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder of the prepared data")
    parser.add_argument("--kernels", nargs="+", default=list(SSMS), choices=list(SSMS))
    parser.add_argument("--recipes", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--write", type=Path, help="page whose marked part is replaced with the table")
    parser.add_argument(
        "--finished", action="store_true", help="train nothing: tabulate the runs that are there"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = [
        run(recipe, kernel, seed, options.out, options.data_dir)
        for recipe in options.recipes
        for kernel in options.kernels
        for seed in options.seeds
        if not options.finished or record_of(options.out, recipe, kernel, seed).is_file()
    ]
    table = tabulate(results)
    print(table)
    if options.write is not None:
        insert(options.write, table)


if __name__ == "__main__":
    main(sys.argv[1:])
