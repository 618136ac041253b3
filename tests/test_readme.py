"""What the documents say is true: code blocks and examples run, the tree is the tree, links lead somewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lm_runs import write_lm_run, write_run
from seqboat.tasks import ListOpsTaskConfig
from seqboat.tasks.prepare import prepare
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


def run(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_python_blocks_run(tmp_path: Path):
    found = blocks("python")
    assert found
    for block in found:
        script = tmp_path / "block.py"
        script.write_text(block, encoding="utf-8")
        run(str(script))


def make_listops_run(folder: Path) -> None:
    """The run that docs/analysis.md looks into, small and not trained."""
    task = ListOpsTaskConfig(data_dir=str(folder / "data"), max_length=64)
    prepare("listops", "generate", folder / "data", counts=(4, 4, 4), workers=1)
    write_run(folder / "runs" / "listops", dataclasses.replace(small_run(), task=task), noise=0.3)


def make_exported_model(folder: Path) -> None:
    """The folder that docs/huggingface.md loads."""
    from seqboat.hf.export import export_run

    export_run(write_lm_run(folder / "lm"), folder / "exported")


def make_onnx_files(folder: Path) -> None:
    """The folder that docs/deploy.md loads."""
    from seqboat.onnx.export import export_run
    from seqboat.runs import Run

    export_run(Run(write_lm_run(folder / "lm")), folder / "exported")


NEEDED: dict[str, Callable[[Path], None]] = {
    "analysis.md": make_listops_run,
    "deploy.md": make_onnx_files,
    "huggingface.md": make_exported_model,
}
"""What must be there before the blocks of a document can run."""
ELSEWHERE = {
    "README.md": "test_python_blocks_run",
    "language-model.md": "test_generate.py",
    "plugins.md": "test_plugins.py",
    "your-data.md": "test_tasks.py",
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
    if "onnx" in text:
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    if path.name in NEEDED:
        NEEDED[path.name](tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(text, path.name, "exec"), {})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    output = run(str(path))
    if path.stem == "train_tiny":
        found = re.search(r"accuracy on new sequences: ([\d.]+)", output)
        assert found is not None and float(found[1]) > 0.9
    if path.stem == "decode":
        sizes = set(re.findall(r"state takes ([\d,]+) bytes", output))
        assert len(sizes) == 1


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert not [link for link in local if not (path.parent / link).exists()]


def test_names_in_the_paper_map_exist():
    """Every `module.name` that the map mentions can be imported."""
    text = (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8")
    folders = "|".join(path.stem for path in (ROOT / "src" / "seqboat").iterdir())
    names = set(re.findall(rf"`((?:{folders})\.(?!py`)[\w.]+)`", text))
    assert len(names) > 20
    script = "import pkgutil, sys\nfor name in sys.argv[1:]:\n    pkgutil.resolve_name(f'seqboat.{name}')\n"
    run("-c", script, *sorted(names))


def test_make_targets_in_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    for path in DOCUMENTS:
        mentioned = set(
            re.findall(r"`make ([\w-]+)`|^ +make ([\w-]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
        assert {a or b for a, b in mentioned} <= targets, path.name
