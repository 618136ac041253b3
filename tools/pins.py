"""Pinned packages: `hashes` writes files with hashes from the package index, `audit` lists licenses and known flaws.

python tools/pins.py hashes    # needs a network: reads the index that pip is configured for
python tools/pins.py audit     # works offline; asks pip-audit too, where it is installed and has a network
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
BUILD = ("build", "packaging", "pyproject_hooks", "setuptools")
"""What a release build installs."""
UNHASHED = ("torch",)
"""CPU and CUDA builds of torch share a version but not their files: install it first, from the source you trust."""


def normalize(name: str) -> str:
    """The form in which the index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path = CONSTRAINTS) -> dict[str, str]:
    """Versions by normalized name, from lines `name==version`, with or without hashes behind them."""
    lines = [line.split(";")[0].split() for line in path.read_text(encoding="utf-8").splitlines()]
    pins = [line[0].split("==") for line in lines if line and "==" in line[0]]
    return {normalize(name): version for name, version in pins}


@functools.cache
def index_url() -> str:
    """The index that pip reads: from its settings, or its own default."""
    from pip._internal.models.index import PyPI

    found = os.environ.get("PIP_INDEX_URL")
    if not found:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
            capture_output=True,
            text=True,
            check=False,
        )
        found = done.stdout.strip()
    return (found or PyPI.simple_url).rstrip("/")


def published_files(name: str) -> list[tuple[str, str]]:
    """Name and SHA-256 of every file that the index has of a package."""
    with urllib.request.urlopen(f"{index_url()}/{name}/", timeout=60) as answer:
        page = answer.read().decode()
    return [(file, digest) for digest, file in re.findall(r'#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)', page)]


def hashed(pins: dict[str, str], note: str) -> str:
    """Requirements with the SHA-256 of every wheel and source archive of the pinned versions."""
    from packaging.utils import parse_sdist_filename, parse_wheel_filename

    lines = [f"# {note}", "# written by `python tools/pins.py hashes`"]
    for name, version in sorted(pins.items()):
        found = set()
        for file, digest in published_files(name):
            try:
                own = (parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename)(file)[1]
            except ValueError:
                continue  # eggs and installers of long ago
            if str(own) == version:
                found.add(digest)
        if not found:
            raise SystemExit(f"the index has no file of {name} {version}")
        lines.append(f"{name}=={version} \\")
        lines += [f"    --hash=sha256:{digest} \\" for digest in sorted(found)]
        lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join(lines) + "\n"


def write_hashes() -> None:
    """Write requirements-hashed.txt and requirements-build.txt."""
    pins = read_pins()
    environment = {name: version for name, version in pins.items() if name not in UNHASHED}
    note = "The versions of constraints.txt without torch: pip install --require-hashes --no-deps -r FILE"
    (ROOT / "requirements-hashed.txt").write_text(hashed(environment, note), encoding="utf-8")
    before = ROOT / "requirements-build.txt"
    build = (read_pins(before) if before.exists() else {}) | pins
    chosen = {normalize(name): build[normalize(name)] for name in BUILD}
    note = "What builds a release: pip install --require-hashes -r FILE"
    before.write_text(hashed(chosen, note), encoding="utf-8")


def license_of(name: str) -> str:
    """The license that a package states about itself."""
    about = metadata.metadata(name)
    fields = {
        field: about.get_all(field) or [""] for field in ("License-Expression", "Classifier", "License")
    }
    classifiers = [
        line.rpartition(" :: ")[2] for line in fields["Classifier"] if line.startswith("License ::")
    ]
    text = fields["License-Expression"][0] or ", ".join(classifiers) or fields["License"][0].strip()
    return text.splitlines()[0][:60] if text else "not stated"


def audit() -> int:
    """Print every installed package with version and license; fail where pip-audit knows a flaw."""
    pins = read_pins()
    for package in sorted(metadata.distributions(), key=lambda d: normalize(d.name)):
        name = normalize(package.name)
        pinned = "" if pins.get(name) == package.version.split("+")[0] else "  (not pinned)"
        print(f"{name:24} {package.version:16} {license_of(package.name)}{pinned}")
    try:
        metadata.version("pip-audit")
    except metadata.PackageNotFoundError:
        print(
            "\npip-audit is not installed: known vulnerabilities were not looked up (pip install pip-audit)"
        )
        return 0
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--strict",
        "--requirement",
        str(ROOT / "requirements-hashed.txt"),
    ]
    return subprocess.run([*command, "--no-deps", "--disable-pip"], check=False).returncode


def main() -> int:
    match sys.argv[1:]:
        case ["hashes"]:
            write_hashes()
            return 0
        case ["audit"]:
            return audit()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
