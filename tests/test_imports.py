"""Imports point one way, the core needs three libraries, and help does not wait for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import seqboat

PACKAGE = Path(seqboat.__file__).parent

CORE = {
    "version": set(),
    "checks": set(),
    "precision": set(),
    "fused": set(),
    "sma": {"fused"},
    "padding": set(),
    "scan": {"precision"},
    "attention": {"precision"},
    "gated": {"attention", "precision"},
    "compile": {"checks", "mixers.base"},
    "state": {"checks"},
    "nn": {"checks", "fused"},
    "routers": {"checks", "fused", "nn", "sma"},
    "budget": {"checks", "routers", "sma"},
    "sparse_cache": {"checks"},
    "retrofitting": {"budget", "checks", "routers", "sma", "sparse_cache"},
    "mixers.base": {"checks", "padding", "sma", "state"},
    "model": {"checks", "mixers.base", "nn", "padding", "sma", "state"},
}
"""What each file of the core may import from the package, at most; mixers are below."""

PARTS = {
    "attention",
    "budget",
    "checks",
    "fused",
    "gated",
    "nn",
    "padding",
    "precision",
    "routers",
    "scan",
    "sma",
    "state",
}
"""What mixers are made of."""

COMPOSED = {
    "ema": {"ssm"},
    "s4d": {"hippo", "ssm", "ssm_layer"},
    "s4": {"hippo", "ssm", "ssm_layer"},
    "s5": {"hippo", "ssm", "ssm_layer"},
    "liquid_s4": {"hippo", "ssm", "ssm_layer"},
    "h3": {"s4d", "ssm", "transformer"},
    "seqboat": {"activation", "ema", "gau", "s4d", "ssm", "transformer"},
    "seqboat_family": {"ema", "gau", "s4d", "seqboat", "transformer"},
    "mega": {"cache", "ema", "ssm", "transformer"},
    "transformer": {"cache"},
    "block": {"transformer"},
    "transformer_xl": {"block", "fifo"},
    "adaptive_span": {"block", "fifo"},
    "linformer": {"block"},
    "bigbird": {"block"},
    "performer": {"block", "linear"},
    "luna": {"block", "linear"},
    "reformer": {"block", "cache"},
}
"""Mixers that use another one, to compose it."""


def imports(module: str, at_import_only: bool = False) -> set[str]:
    """The modules of the package that a file imports, without the package's name.

    Args:
        module: with dots, without the package's name.
        at_import_only: leave out imports inside functions.
    """
    path = PACKAGE.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    tree = ast.parse(source)
    nodes = tree.body if at_import_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found.update(name.removeprefix("seqboat.") for name in names if name.startswith("seqboat."))
    return {name for name in found if is_module(name)}


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def modules(folder: str = "") -> list[str]:
    """Every module of a folder of the package."""
    files = sorted((PACKAGE / folder).glob("*.py"))
    prefix = f"{folder}." if folder else ""
    return [prefix + file.stem for file in files if not file.stem.startswith("__")]


@pytest.mark.parametrize("module", CORE)
def test_the_core_looks_down_only(module: str) -> None:
    extra = imports(module) - CORE[module] - {"mixers"}
    assert not extra, f"{module} must not import {sorted(extra)}"
    assert "mixers" not in imports(module) or module == "model", f"{module} must not know the mixers"


def test_the_model_names_no_mixer() -> None:
    tree = ast.parse((PACKAGE / "model.py").read_text())
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("seqboat.mixers")
        for alias in node.names
    }
    assert names == {"Mixer", "RecurrentMixer"}


@pytest.mark.parametrize("module", modules("mixers"))
def test_mixers_import_parts_and_what_they_compose(module: str) -> None:
    name = module.removeprefix("mixers.")
    allowed = {f"mixers.{other}" for other in COMPOSED.get(name, set())}
    extra = imports(module) - PARTS - allowed - {"mixers", "mixers.base"}
    assert not extra, f"{module} must not import {sorted(extra)}"


def test_no_cycles() -> None:
    """Follow the imports at the top of every file; a cycle would come back to where it began."""
    everything = [
        *modules(),
        *modules("mixers"),
        *modules("tasks"),
        *modules("recipes"),
        *modules("commands"),
        *modules("hf"),
    ]
    graph = {module: imports(module, at_import_only=True) - {module} for module in everything}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"imports in a circle: {' -> '.join([*path, module])}"
        if module not in done and module in graph:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in everything:
        visit(module, ())
    assert done == set(everything)


@pytest.mark.parametrize("module", ["model", "mixers.seqboat", "routers", "nn", "sma", "scan", "attention"])
def test_nothing_below_the_command_line_knows_it(module: str) -> None:
    seen, waiting = set(), [module]
    while waiting:
        current = waiting.pop()
        if current not in seen and current != "mixers":
            seen.add(current)
            waiting += imports(current)
    upper = {"cli", "train", "config", "evaluate", "bench", "reference", "compat", "loader", "optim"}
    assert not seen & upper
    assert not any(name.split(".")[0] in ("commands", "tasks", "recipes") for name in seen)


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
    "arguments", [["--help"], ["--version"], ["demo", "--help"], ["nonsense"], []], ids=str
)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from seqboat.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
heavy = sorted({{"torch", "numpy", "matplotlib", "rich", "yaml"}} & set(sys.modules))
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
