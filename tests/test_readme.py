"""What the documents say is true: code blocks and examples run, the tree is the tree, links lead somewhere."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lm_runs import write_lm_run, write_run
from seqboat.data.prepare import prepare
from seqboat.tasks import ListOpsTaskConfig
from small_runs import small_run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / "docs").glob("*.md"),
]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run_code(text: str, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in this process: starting one would take longer than most of them do."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(path)])
    exec(compile(text, path.name, "exec"), {"__name__": "__main__", "__file__": str(path)})


def test_python_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = blocks("python")
    assert found
    for block in found:
        run_code(block, ROOT / "README.md", tmp_path, monkeypatch)
    assert capsys.readouterr().err == ""


def make_listops_run(folder: Path) -> None:
    """The run that docs/analysis.md looks into, small and not trained."""
    task = ListOpsTaskConfig(data_dir=str(folder / "data"), max_length=64)
    prepare("listops", "generate", folder / "data", counts=(4, 4, 4), workers=1)
    write_run(folder / "runs" / "listops", dataclasses.replace(small_run(), task=task), noise=0.3)


def make_exported_model(folder: Path) -> None:
    """The folder that docs/transformers.md loads."""
    from seqboat.cli.hf import export_run

    export_run(write_lm_run(folder / "lm"), folder / "exported")


NEEDED: dict[str, Callable[[Path], None]] = {
    "analysis.md": make_listops_run,
    "transformers.md": make_exported_model,
}
"""What must be there before the blocks of a document can run."""
ELSEWHERE = {
    "deploy.md": "test_onnx.py",
    "README.md": "test_python_blocks_run",
    "language-models.md": "test_text.py",
    "training.md": "test_plugins.py",
    "your-data.md": "test_own.py",
}
"""Documents whose blocks other tests run."""


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in DOCUMENTS
        if path.name not in ELSEWHERE and blocks("python", path.read_text(encoding="utf-8"))
    ],
    ids=lambda path: path.name,
)
def test_python_blocks_of_documents_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All blocks of a document, one after the other."""
    text = "".join(blocks("python", path.read_text(encoding="utf-8")))
    if "transformers" in text:
        pytest.importorskip("transformers")
    if path.name in NEEDED:
        NEEDED[path.name](tmp_path)
    run_code(text, path, tmp_path, monkeypatch)


def run_example(path: Path) -> str:
    """The output of an example in a process, as a reader would run it."""
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if path.stem not in ("sma_by_hand", "ray_predict", "merge_answers")],
    ids=lambda path: path.stem,
)
def test_examples_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    if path.stem == "train_tiny":
        assert "range(1, 301)" in text
        text = text.replace("range(1, 301)", "range(1, 51)")
    run_code(text, path, tmp_path, monkeypatch)
    output, error = capsys.readouterr()
    assert error == ""
    if path.stem == "train_tiny":
        assert re.search(r"step 50: loss [\d.]+, activation per layer [\d.]+ [\d.]+\n", output)
    if path.stem == "decode":
        sizes = set(re.findall(r"state takes ([\d,]+) bytes", output))
        assert len(sizes) == 1


def test_an_example_runs_as_a_script():
    assert run_example(ROOT / "examples" / "sma_by_hand.py")


@pytest.mark.slow
def test_the_toy_task_of_the_examples_is_learned():
    found = re.search(
        r"accuracy on new sequences: ([\d.]+)", run_example(ROOT / "examples" / "train_tiny.py")
    )
    assert found is not None and float(found[1]) > 0.9


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert not [link for link in local if not (path.parent / link).exists()]


def test_names_in_the_page_of_the_paper_exist():
    """Every `module.name` that the page mentions can be imported."""
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    folders = "|".join(path.stem for path in (ROOT / "src" / "seqboat").iterdir())
    names = set(re.findall(rf"`((?:{folders})\.(?!py`)[\w.]+)`", text))
    assert len(names) > 10
    for name in sorted(names):
        pkgutil.resolve_name(f"seqboat.{name}")


def test_make_targets_in_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    for path in DOCUMENTS:
        mentioned = set(
            re.findall(r"`make ([\w-]+)`|^ +make ([\w-]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
        assert {a or b for a, b in mentioned} <= targets, path.name
