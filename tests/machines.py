"""Parts of the suite as other machines would run them: `make test-machines`.

    python tests/machines.py --list
    python tests/machines.py --only "*odd offsets"
    python tests/machines.py --page docs/machines.md

The last commit is cloned to an empty folder, and each variant runs there with another
environment: other instruction sets and numbers of threads for the tests that compute, other users, homes, locales
and paths for those that read and write files. Two variants run at a time. What has passed at this commit is not run
again, so a second call continues where the first was stopped; --missing keeps what passed at another commit, too.
--page keeps the rows of variants without a result here: each row names its commit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "machines"
BEGIN, END = "<!-- variants: begin -->", "<!-- variants: end -->"
NOBODY = 65534
LIMIT = 3600
"""Seconds after which a variant has failed."""

NUMBERS = [
    *(
        "closeness",
        "golden",
        "published",
        "hf",
        "retrofit",
        "model",
        "sma",
        "budget",
        "routers",
        "padding",
        "scan",
    ),
    *(
        "fused",
        "attention",
        "nn",
        "s4",
        "s4d",
        "s5",
        "liquid_s4",
        "h3",
        "mamba2",
        "gated_deltanet",
        "samba",
        "mega",
        "performer",
        "reformer",
        "bigbird",
    ),
    *("luna", "linformer", "transformer", "transformer_xl", "adaptive_span", "theorems", "optim", "generate"),
    *("ngrams", "int8"),
    "contract.py::test_copies_and_saved_weights",
    "contract.py::test_padding_changes_nothing_in_single_precision",
]
"""Tests that compute: an instruction set, a thread or an address could change their result."""

FILES = [
    *(
        "cli",
        "config",
        "console",
        "files",
        "data",
        "checkpoint",
        "loader",
        "tasks",
        "recipes",
        "report",
        "figures",
    ),
    *("generate", "scoring", "explain", "intervene", "shipped", "tables"),
]
"""Tests that read, write and print: a user, a home, a locale or a path could change their result."""

PARTS = {"numbers": NUMBERS, "files": FILES}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One machine to imitate."""

    name: str
    part: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    threads: int = 1
    folder: str = "seqboat"
    """name of the clone"""
    root: bool = True
    """False runs as another user, if this one is root"""
    home: str = "writable"
    without: tuple[str, ...] = ()
    """programs that are not on the path"""


LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromedriver")
VARIANTS = [
    Variant("this machine as it is", "numbers"),
    Variant("ATen without vector instructions", "numbers", {"ATEN_CPU_CAPABILITY": "default"}),
    Variant("ATen with AVX2", "numbers", {"ATEN_CPU_CAPABILITY": "avx2"}),
    Variant("MKL with SSE4.2", "numbers", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    Variant("MKL, compatible branch", "numbers", {"MKL_CBWR": "COMPATIBLE"}),
    Variant("MKL, AVX2 branch", "numbers", {"MKL_CBWR": "AVX2"}),
    Variant("oneDNN with SSE4.1", "numbers", {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Variant("oneDNN with AVX2", "numbers", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Variant("weights at odd offsets", "numbers", {"SEQBOAT_TEST_ODD_OFFSETS": "1"}),
    Variant("two threads", "numbers", threads=2),
    Variant("hash seed 1", "files", {"PYTHONHASHSEED": "1"}),
    Variant("hash seed 4242", "files", {"PYTHONHASHSEED": "4242"}),
    Variant("locale without UTF-8", "files", LOCALE),
    Variant("no browser", "files", without=BROWSERS),
    Variant("a user who is not root", "files", root=False),
    Variant("a home that is read-only", "files", root=False, home="read-only"),
    Variant("spaces and umlauts in the path", "files", folder="Zwei Wörter/süß é"),
]


def probe() -> str:
    """A digest of the last bits of a few products and sums, to see which variants round differently here."""
    import torch
    from torch import nn

    from odd_offsets import lay_odd

    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(33, 67, generator=generator, dtype=dtype) for _ in range(2))
        weight = lay_odd(w) if os.environ.get("SEQBOAT_TEST_ODD_OFFSETS") else w
        signal = torch.randn(2, 5, 999, generator=generator, dtype=dtype)
        parts = [x @ weight.T, x.softmax(dim=-1), signal.sum(dim=-1), torch.fft.rfft(signal).real]
        parts.append(nn.functional.conv1d(signal, torch.ones(3, 5, 7, dtype=dtype)))
        for part in parts:
            digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def clone(variant: Variant, scratch: Path) -> Path:
    """The last commit in a folder that the user of the variant owns."""
    owner = "nobody" if other_user(variant) else "owner"
    folder = scratch / owner / variant.folder
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
        if owner == "nobody":
            for place in (folder, *folder.rglob("*")):
                os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
    return folder


def other_user(variant: Variant) -> bool:
    return not variant.root and os.geteuid() == 0


def environment_of(variant: Variant, folder: Path, scratch: Path) -> dict[str, str]:
    """The environment without the caches and the settings of this user."""
    keep = {"PATH", "LANG", "LC_ALL", "TERM", "LD_LIBRARY_PATH", "SSL_CERT_FILE"}
    environment = {name: value for name, value in os.environ.items() if name in keep}
    home, place = (Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=scratch)) for kind in ("home", "tmp"))
    if other_user(variant):
        os.chown(place, NOBODY, NOBODY)
        if variant.home == "writable":
            os.chown(home, NOBODY, NOBODY)
    if variant.home == "read-only":
        home.chmod(0o555)
    environment |= {"HOME": str(home), "TMPDIR": str(place), "PYTHONPATH": str(folder / "src")}
    environment |= {"OMP_NUM_THREADS": str(variant.threads), "PYTHONDONTWRITEBYTECODE": "1"}
    if variant.without:
        environment["PATH"] = str(path_without(variant.without, scratch))
    return environment | variant.environment


def path_without(programs: Sequence[str], scratch: Path) -> Path:
    """A folder with links to everything on the path but these programs."""
    folder = Path(tempfile.mkdtemp(prefix="bin-", dir=scratch))
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if program.name not in programs and not link.exists() and os.access(program, os.X_OK):
                link.symlink_to(program)
    return folder


def as_nobody(command: list[str], scratch: Path) -> list[str]:
    """The command as a user without rights that can read this Python even where it lies in root's home."""
    command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
    needed = [Path(sys.base_prefix), Path(sys.prefix)]
    closed = {p for place in needed for p in place.parents if not p.stat().st_mode & 0o001}
    if not closed:
        return command
    # in a separate mount namespace: cover the closed folder, show the parts that are needed
    lines = ["set -e"]
    for number, place in enumerate(needed):
        lines += [
            f"mkdir -p '{scratch}/mount-{number}'",
            f"mount --bind '{place}' '{scratch}/mount-{number}'",
        ]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs '{folder}'" for folder in sorted(closed)]
    for number, place in enumerate(needed):
        lines += [f"mkdir -p '{place}'", f"mount --bind '{scratch}/mount-{number}' '{place}'"]
    return ["unshare", "--mount", "sh", "-c", "\n".join([*lines, 'exec "$@"']), "sh", *command]


def look(variant: Variant, scratch: Path, folder: Path, environment: dict[str, str]) -> tuple[str, bytes]:
    """What `probe` finds in a variant, and what it wrote to standard error."""
    script = "import sys; sys.path.insert(0, 'tests'); import machines; print(machines.probe())"
    command = [sys.executable, "-c", script]
    if other_user(variant):
        command = as_nobody(command, scratch)
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    return found.stdout.decode().strip(), found.stderr


def run(variant: Variant, scratch: Path, tests: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the tests of a variant, or these, and count them."""
    folder = clone(variant, scratch)
    environment = environment_of(variant, folder, scratch)
    bits, trouble = look(variant, scratch, folder, environment)
    report = Path(environment["TMPDIR"]) / "tests.xml"
    tests = tests or [
        f"tests/test_{name}" if "::" in name else f"tests/test_{name}.py" for name in PARTS[variant.part]
    ]
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfEs",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
    ]
    command = [*pytest, f"--junit-xml={report}", *tests]
    if other_user(variant):
        command = as_nobody(command, scratch)
    start = time.perf_counter()
    try:
        output = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, check=False, timeout=LIMIT
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    minutes = (time.perf_counter() - start) / 60
    (RESULTS / f"{variant.name}.log").write_bytes(trouble + output)
    return count(report) | {"minutes": round(minutes, 1), "bits": bits}


def count(report: Path) -> dict[str, int]:
    """Outcomes in a report of pytest; without a report the run itself has failed."""
    if not report.is_file():
        return {"passed": 0, "skipped": 0, "failed": 1}
    numbers = dict.fromkeys(("tests", "skipped", "failures", "errors"), 0)
    for suite in ET.parse(report).getroot().iter("testsuite"):
        for name in numbers:
            numbers[name] += int(suite.get(name, 0))
    failed = numbers["failures"] + numbers["errors"]
    return {
        "passed": numbers["tests"] - numbers["skipped"] - failed,
        "skipped": numbers["skipped"],
        "failed": failed,
    }


def table(
    results: dict[str, dict[str, Any]], plain: str, rows: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The results as Markdown.

    Args:
        results: outcomes by the variant's name.
        plain: what `probe` finds on this machine as it is.
        rows: earlier rows by the variant's name, for variants without a result.
    """
    lines = [
        "| variant | settings | tests | passed | skipped | failed | minutes | last bits of a product | commit |",
        "|---|---|---|---:|---:|---:|---:|---|---|",
    ]
    for variant in VARIANTS:
        if variant.name not in results:
            lines += [rows[variant.name]] if variant.name in rows else []
            continue
        found = results[variant.name]
        settings = " ".join(f"`{name}={value}`" for name, value in variant.environment.items())
        bits = "" if variant.part == "files" else "as it is" if found["bits"] == plain else "differ"
        cells = [variant.name, settings, variant.part, *(found[k] for k in ("passed", "skipped", "failed"))]
        lines.append(
            "| " + " | ".join(str(cell) for cell in [*cells, found["minutes"], bits, found["commit"]]) + " |"
        )
    return "\n".join(lines)


def processor() -> str:
    """The processor and what torch uses of it."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    name = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), "this processor"
    )
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {capability}, {os.cpu_count()} cores, torch {torch.__version__}"


def write(page: Path, results: dict[str, dict[str, Any]], plain: str) -> None:
    """Replace the rows of a page that have results; the others stay."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    rows = {line.split("|")[1].strip(): line for line in old.splitlines() if line.startswith("| ")}
    new = f"{processor()}.\n\n{table(results, plain, rows)}"
    page.write_text(f"{before}{BEGIN}\n{new}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the variants and stop")
    parser.add_argument("--only", action="append", metavar="NAME", help="variants whose name matches")
    parser.add_argument("--again", action="store_true", help="run also what has finished for this commit")
    parser.add_argument(
        "--missing", action="store_true", help="run only what failed or never ran, at any commit"
    )
    parser.add_argument("--processes", type=int, default=2, help="variants at a time (default 2)")
    parser.add_argument("--tests", nargs="+", help="run these instead, as a trial whose results are not kept")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    options = parser.parse_args(arguments)
    wanted = [
        v for v in VARIANTS if not options.only or any(fnmatch.fnmatch(v.name, o) for o in options.only)
    ]
    if not wanted:
        parser.error(f"no variant matches {', '.join(options.only)}")
    if options.list:
        print("\n".join(variant.name for variant in wanted))
        return 0
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    RESULTS.mkdir(parents=True, exist_ok=True)
    store = RESULTS / "results.json"
    results: dict[str, dict[str, Any]] = {}
    if store.is_file() and not options.tests:
        results = json.loads(store.read_text(encoding="utf-8"))
    lock = threading.Lock()
    scratch = Path(tempfile.mkdtemp(prefix="machines-"))
    scratch.chmod(0o755)

    def finish(variant: Variant) -> None:
        found = run(variant, scratch, options.tests) | {"commit": commit[:7]}
        with lock:
            results[variant.name] = found
            if not options.tests:
                store.write_text(json.dumps(results, indent=1), encoding="utf-8")
            print(f"{variant.name}: {found}", flush=True)

    def stale(variant: Variant) -> bool:
        found = results.get(variant.name)
        if found is None or found["failed"]:
            return True
        return options.again or (found["commit"] != commit[:7] and not options.missing)

    open_ones = [variant for variant in wanted if stale(variant)]
    try:
        plain, _ = look(VARIANTS[0], scratch, ROOT, environment_of(VARIANTS[0], ROOT, scratch))
        with lock:
            for variant in open_ones:
                clone(variant, scratch)
        with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
            list(pool.map(finish, [v for v in open_ones if v.threads == 1]))
        for variant in open_ones:
            if variant.threads > 1:
                finish(variant)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(table(results, plain))
    if options.page and not options.tests:
        write(options.page, results, plain)
    return int(any(results[variant.name]["failed"] for variant in wanted))


if __name__ == "__main__":
    sys.exit(main())
