"""Imports point one way, the core needs three libraries, and help does not wait for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import seqboat

PACKAGE = Path(seqboat.__file__).parent

LIBRARY = set(
    "core ops layers ssm mixers models text hf export compat retrofitting inference version reference".split()  # noqa: SIM905
)
"""What a person imports; everything else is the lab around it."""
KNOWN_SEAMS = {"data", "own", "run", "training", "tasks", "recipes", "console", "processor", "plugins"}
"""What library folders still take from the lab; to shrink to nothing."""

SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, without the package's name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("seqboat.") for name in found if name.startswith("seqboat.")}


def test_the_library_imports_nothing_of_the_lab() -> None:
    upward = []
    for path in SOURCES:
        if path.relative_to(PACKAGE).with_suffix("").parts[0] in LIBRARY:
            for name in imports(path):
                if name.partition(".")[0] not in LIBRARY and not any(name.startswith(s) for s in KNOWN_SEAMS):
                    upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not upward, upward


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )


ONLY_THE_CORE = """
import re, sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions, requires

def needed(names):
    # the three libraries and all that they need in turn
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except Exception:
            continue
        waiting += [re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in lines if "extra ==" not in line]
    return found

allowed = needed(["torch", "numpy", "safetensors"])
homes = packages_distributions()

class Hide:
    # finds everything on the path but the libraries that are not allowed
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.split(".")[0]
        names = {home.lower().replace("_", "-") for home in homes.get(top, ())}
        if names and not names & allowed and top != "seqboat":
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hide if finder is PathFinder else finder for finder in sys.meta_path]
try:
    import pytest
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the block does not work")
"""


def test_the_core_needs_three_libraries() -> None:
    code = (
        ONLY_THE_CORE
        + """
import seqboat, torch
for name in seqboat.__all__:
    if not name.startswith("Sequence"):  # estimators of scikit-learn
        getattr(seqboat, name)
import seqboat.reference, seqboat.compat
config = seqboat.BackboneConfig(mixer=seqboat.SeqBoatConfig(causal=True), d_model=8, num_layers=1, vocab=5)
model = seqboat.LanguageModel(config)
model(torch.randint(0, 5, (2, 9))).logits.sum().backward()
print("ran")
"""
    )
    done = run(code)
    assert done.returncode == 0 and done.stdout == "ran\n", done.stderr


def test_importing_the_package_imports_no_torch() -> None:
    done = run("import sys, seqboat; seqboat.__version__; dir(seqboat); print('torch' in sys.modules)")
    assert done.returncode == 0 and done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["train", "--help"], ["nonsense"], []], ids=str
)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from seqboat.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
heavy = sorted({{"torch", "numpy", "matplotlib", "rich"}} & set(sys.modules))
print("heavy:", heavy)
"""
    done = run(code)
    assert done.stdout.endswith("heavy: []\n"), done.stdout + done.stderr


def test_public_names() -> None:
    assert sorted(seqboat.__all__) == sorted([*seqboat._HOMES, "__version__"])
    for name in seqboat.__all__:
        assert getattr(seqboat, name) is not None, name
    assert dir(seqboat) == sorted(seqboat.__all__)
    with pytest.raises(AttributeError, match="module 'seqboat' has no attribute 'nonsense'"):
        seqboat.nonsense  # noqa: B018
