"""The habits of the repository: hooks and hosted checks run what `make` runs; generated pictures are up to date."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

import diagrams
import glance

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TARGETS = dict(re.findall(r"^([\w-]+):(?!=) *(.*)$", MAKEFILE, flags=re.MULTILINE))
"""Prerequisites of every target of the Makefile."""
WORKFLOWS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
NOT_MAKE = {"choco install make --no-progress"}
"""Commands of the hosted checks that cannot be make targets: Windows runners come without make."""


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_hosted_checks_run_make_targets() -> None:
    commands = {step["run"] for workflow in WORKFLOWS.values() for step in steps(workflow) if "run" in step}
    for command in commands - NOT_MAKE:
        found = re.fullmatch(r"make ([\w-]+)( TORCH=\$\{\{ matrix.torch \}\})?", command)
        assert found is not None and found[1] in TARGETS, command
    run = {command.split()[1] for command in commands - NOT_MAKE}
    assert {"lint", "types", "test", "test-all", "docs", "dist", "audit"} <= run


def test_hosted_checks_cover_what_the_project_promises() -> None:
    jobs = WORKFLOWS["check"]["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    classifiers = [c for c in PROJECT["project"]["classifiers"] if "Python :: 3." in c]
    assert matrix["python"] == [c.rpartition(" ")[2] for c in classifiers]
    oldest = next(d for d in PROJECT["project"]["dependencies"] if d.startswith("torch")).partition(">=")[2]
    assert jobs["torch"]["strategy"]["matrix"]["torch"] == [f"{oldest}.0", "newest"]


def test_hooks_run_what_check_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    assert hooks == [f"make {target}" for target in TARGETS["check"].split()]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    called = " ".join(re.findall(r"^make (.*)$", script, flags=re.MULTILINE)).split()
    assert called == TARGETS["check"].split()


def test_every_target_is_phony_or_a_file() -> None:
    found = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", MAKEFILE, flags=re.MULTILINE)
    assert found is not None
    assert set(found[1].replace("\\", "").split()) == set(TARGETS)


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 220
    assert not [line for line in lines if re.search(r"[├└│]|^ +\w+\.py\b", line)], (
        "a file tree belongs in docs"
    )


def test_results_of_the_readme_are_those_of_the_records() -> None:
    for path, text in glance.outputs().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: make glance"


def test_diagrams_are_up_to_date() -> None:
    for name in diagrams.DIAGRAMS.keys() - {"architecture-layers"}:
        for theme in diagrams.THEMES:
            path = diagrams.IMAGES / f"{name}{theme}.svg"
            assert path.read_text(encoding="utf-8") == diagrams.draw(name, theme), (
                f"{path.name}: make diagrams"
            )


def test_the_picture_of_the_layers_is_that_of_the_import_test() -> None:
    """Names and order only: what a folder says about itself may be reworded without drawing anything."""
    for theme in diagrams.THEMES:
        path = diagrams.IMAGES / f"architecture-layers{theme}.svg"
        names = re.findall(r'font-size="14"[^>]*>([^<]+)<', path.read_text(encoding="utf-8"))
        assert names == [name for group in diagrams.folder_order() for name in group], "make diagrams"


def test_pictures_exist_in_both_themes() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        pictures = re.findall(
            r'srcset="([^"]+)-dark\.svg"><img alt="[^"]+" src="([^"]+)\.svg">',
            path.read_text(encoding="utf-8"),
        )
        for dark, light in pictures:
            assert dark == light, path.name
            assert (path.parent / f"{light}.svg").exists() and (path.parent / f"{dark}-dark.svg").exists(), (
                light
            )


def small_changes() -> list[list[str]]:
    """The cells of CONTRIBUTING's table: change, files, registry line."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Twelve small changes")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_small_changes_touch_few_files() -> None:
    package = ROOT / "src" / "seqboat"
    rows = small_changes()
    assert len(rows) == 12
    for change, files, registry in rows:
        paths = re.findall(r"`([^`]+)`", files)
        assert 1 <= len(paths) <= 2, change
        for path in paths:
            place = package / path
            assert place.parent.is_dir() if "<name>" in path else place.is_file(), f"{change}: {path}"
        if registry:
            name, path = re.findall(r"`([^`]+)`", registry)
            source = (package / path).read_text(encoding="utf-8")
            assert re.search(rf"^{name}\b.*=|\.{name}\(", source, flags=re.MULTILINE), f"{change}: {name}"


WITHOUT_UNIX = """
import importlib, pkgutil, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None  # importing it raises ImportError, as on Windows
import seqboat
OPTIONAL = ("seqboat.hf", "seqboat.onnx", "seqboat.ops.kernels.triton")  # need libraries that may be missing
for found in pkgutil.walk_packages(seqboat.__path__, "seqboat."):
    if not found.name.startswith(OPTIONAL) and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
from seqboat.training.metrics import resident_peak
print(resident_peak())
"""


def test_every_module_is_imported_without_the_libraries_of_unix() -> None:
    """Hosted checks run on Windows too; this finds there and then what would break all of them."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_UNIX], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
