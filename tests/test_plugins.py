"""Plug-ins: parts of other packages, by entry point or by name, in every command and in saved runs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_runs import lm_config, write_run
from seqboat import BackboneConfig, LanguageModel, plugins
from seqboat.bench.setting import LayerSetting, configure, parse_candidate
from seqboat.cli.main import main
from seqboat.predict import Predictor
from seqboat.recipes import find_recipe
from seqboat.recipes.base import with_mixer
from seqboat.run import Run
from seqboat.training.settings_io import from_dict, override, to_dict

TEMPLATE = Path(__file__).parents[1] / "examples" / "plugin" / "src"
QUICK = ["--schedule.steps=4", "--schedule.warmup_steps=1", "--task.train_size=64", "--task.eval_size=16"]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No plug-in is loaded before a test, or left after it."""
    monkeypatch.setattr(plugins, "_state", plugins._State())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    before = {name: dict(plugins._registry(name)) for name in plugins.TABLES}
    modules = set(sys.modules)
    yield
    for name, table in before.items():
        plugins._registry(name).clear()
        plugins._registry(name).update(table)
    for name in set(sys.modules) - modules:
        if not name.startswith(("seqboat.", "torch.")):
            del sys.modules[name]


def declare(site: Path, module: str, package: str, version: str = "0.1.0") -> None:
    """What installing a package leaves: its metadata, with an entry point."""
    folder = site / f"{package.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nanything = {module}\n")


@pytest.fixture
def installed(tmp_path: Path) -> None:
    """The template package, as if installed."""
    declare(tmp_path / "site", "seqboat_brackets", "seqboat-brackets")
    sys.path[:0] = [str(tmp_path / "site"), str(TEMPLATE)]


def forget(*paths: Path) -> None:
    """Another process, in which these folders hold no packages."""
    for path in paths:
        sys.path.remove(str(path))
    plugins._state.__init__()  # type: ignore[misc]
    for name in plugins.TABLES:
        for key, part in list(plugins._registry(name).items()):
            if getattr(part, "__module__", "").startswith(("seqboat_brackets", "mine")):
                del plugins._registry(name)[key]
    for name in [name for name in sys.modules if name.startswith(("seqboat_brackets", "mine"))]:
        del sys.modules[name]


def test_an_installed_package_is_used_by_every_command(
    installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "brackets", "--out", str(run), *QUICK]) == 0
    config = json.loads((run / "config.json").read_text())
    assert config["task"]["plugin"] == config["model"]["mixer"]["plugin"] == "seqboat_brackets"
    assert json.loads((run / "run.json").read_text())["versions"]["seqboat-brackets"] == "0.1.0"

    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["examples"] == 16 and 0 <= scored["accuracy"] <= 1

    (tmp_path / "new.csv").write_text("text\n(())\n()x\n")
    assert main(["predict", str(run), "new.csv", "--format=jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["label"] in ("balanced", "unbalanced") and 0.5 <= rows[0]["probability"] <= 1
    assert rows[1]["error"] == "line 3: a text must consist of ( and ), got '()x'"
    (answer,) = Predictor(run).predict(["(())"])
    assert answer["label"] == rows[0]["label"]

    assert main(["report", str(run)]) == 0
    assert "brackets" in (run / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["explain", str(run), "--text", "(())"]) == 0
    assert "prediction: " in capsys.readouterr().out
    for what, name in (("tasks", "brackets"), ("mixers", "running-mean"), ("recipes", "brackets")):
        assert main(["paper", "list", what]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(name))
        assert line.endswith("[plug-in seqboat_brackets (seqboat-brackets 0.1.0)]")
    assert main(["paper", "list", "plugins"]) == 0
    assert "mixers: running-mean" in capsys.readouterr().out
    assert main(["paper", "data", "show", "brackets"]) == 0

    # the run continues in another process, and says what it needs where the package is not installed
    assert main(["train", "--resume", "--out", str(run)]) == 0
    forget(tmp_path / "site", TEMPLATE)
    capsys.readouterr()
    for command in (["eval", str(run)], ["predict", str(run), "--text=()"], ["report", str(run)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert (
            said.count("\n") == 1
            and "model.mixer 'running-mean' comes from the plug-in seqboat_brackets" in said
        )
        assert "install its package, or add --import seqboat_brackets" in said
    sys.path.append(str(TEMPLATE))
    assert main(["eval", str(run), "--import", "seqboat_brackets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == scored


def test_the_code_of_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        (TEMPLATE.parents[2] / "docs" / "training.md").read_text(encoding="utf-8").partition("## Plug-ins")[2]
    )
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    exec(compile(code, "training.md", "exec"), {})
    assert capsys.readouterr().out == "{'ROUTERS': ('norm',)}\n"
    assert main(["paper", "list", "routers"]) == 0
    assert (
        "norm                   Tokens with long vectors attend. [plug-in my_parts]"
        in capsys.readouterr().out
    )


def test_python_finds_installed_plugins(installed: None) -> None:
    config = find_recipe("brackets")()
    assert type(config.model.mixer).__name__ == "RunningMeanConfig"
    assert from_dict(to_dict(config)) == config
    other = override(find_recipe("recall")(), ["--model.mixer=running-mean", "--model.mixer.expansion=3"])
    assert to_dict(other)["model"]["mixer"] == {
        "name": "running-mean",
        "plugin": "seqboat_brackets",
        "causal": True,
        "expansion": 3,
    }
    assert to_dict(with_mixer(find_recipe("brackets")(), "s4d"))["model"]["mixer"].get("plugin") is None
    made = configure(parse_candidate("running-mean:expansion=4"), LayerSetting(causal=True))
    assert made.expansion == 4 and made.causal


def test_a_language_model_of_a_plugin_generates(
    installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.load_plugins()
    (tmp_path / "text.txt").write_text("abc " * 100)
    config = lm_config(tmp_path / "text.txt")
    mixer = plugins._registry("MIXERS")["running-mean"](causal=True)
    write_run(tmp_path / "lm", config.replace(model={"mixer": mixer}))
    arguments = ["generate", str(tmp_path / "lm"), "--prompt=ab", "--max-new-bytes=5", "--greedy"]
    assert main(arguments) == 0 and len(capsys.readouterr().out) == 5


@pytest.mark.parametrize("causal", [True, False])
def test_the_mixer_of_the_template_keeps_the_contract(installed: None, causal: bool) -> None:
    plugins.load_plugins()
    torch.manual_seed(0)
    layer = plugins._registry("MIXERS")["running-mean"](causal=causal).build(6).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    whole = layer(x)
    mask = torch.arange(9) >= torch.tensor([[2], [4]])  # padding on the left, 7 and 5 tokens
    padded = layer(torch.cat([torch.full((2, 2, 6), 9.0, dtype=torch.float64), x], dim=1), mask)
    torch.testing.assert_close(padded.y[0, 2:], whole.y[0])
    torch.testing.assert_close(padded.y[1:, 4:], layer(x[1:, 2:]).y)
    if causal:
        first = layer(x[:, :3])
        rest = layer(x[:, 3:], state=first.state)
        torch.testing.assert_close(torch.cat([first.y, rest.y], dim=1), whole.y)
        state = layer.init_state(2)
        for t in range(7):
            out = layer.step(x[:, t], state)
            state = out.state
            torch.testing.assert_close(out.y, whole.y[:, t])
    model = LanguageModel(
        BackboneConfig(mixer=dataclasses.replace(layer_config(), causal=True), vocab=5, d_model=8)
    )
    model(torch.randint(0, 5, (2, 6))).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def layer_config() -> Any:
    return plugins._registry("MIXERS")["running-mean"]()


MINE = """
from dataclasses import dataclass
from seqboat.layers.routers import RouterConfig, SigmoidRouter
from seqboat.ssm.diagonal import EMA, EMAConfig

class EverySecond(SigmoidRouter):
    pass

@dataclass(frozen=True, kw_only=True)
class EverySecondConfig(RouterConfig):
    "A router of mine."
    bias: float = 0.5
    def build(self, d_model, modules=1):
        return EverySecond(d_model, modules)

@dataclass(frozen=True, kw_only=True)
class SlowConfig(EMAConfig):
    "A kernel of mine."
    d_state: int = 3

ROUTERS = {"mine": EverySecondConfig}
SSMS = {"slow": SlowConfig}
"""


def test_a_module_in_the_current_folder_is_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_parts.py").write_text(MINE)
    quick = [*QUICK[:2], "--task.train_size=16", "--task.eval_size=8", "--training.batch_size=4"]
    parts = [
        "--model.mixer.router=mine",
        "--model.mixer.ssm=slow",
        "--model.num_layers=1",
        "--model.d_model=8",
    ]
    assert main(["train", "recall", "--import", "mine_parts", "--out=run", *parts, *quick]) == 0
    assert os.environ[plugins.VARIABLE] == "mine_parts"  # for the processes that a command starts
    assert main(["paper", "list", "ssms", "--import=mine_parts"]) == 0
    assert "slow                   A kernel of mine. [plug-in mine_parts]" in capsys.readouterr().out
    router = Run("run").config.model.mixer.router  # type: ignore[attr-defined]
    assert type(router).__name__ == "EverySecondConfig"

    # a saved run does not import what it names
    os.environ[plugins.VARIABLE] = ""
    forget(tmp_path)
    (tmp_path / "mine_parts.py").write_text("open('imported', 'w').close()\n" + MINE)
    assert main(["eval", "run"]) == 2
    assert capsys.readouterr().err.endswith(
        "model.mixer.router 'mine' comes from the plug-in mine_parts: install its package, or add "
        "--import mine_parts (in Python, seqboat.load_plugin('mine_parts'))\n"
    )
    sys.path.append(str(tmp_path))  # as `python -m seqboat` has it: still nothing is imported
    with pytest.raises(plugins.MissingPlugin, match="add --import mine_parts"):
        _ = Run("run").config
    assert not (tmp_path / "imported").exists()
    os.environ[plugins.VARIABLE] = "mine_parts"
    plugins._state.looked = False
    assert Run("run").evaluate()["examples"] == 8
    assert (tmp_path / "imported").exists()


@pytest.fixture
def broken(tmp_path: Path) -> None:
    site = tmp_path / "site"
    declare(site, "broken_parts", "seqboat-broken")
    (site / "broken_parts.py").write_text("raise RuntimeError('half\\nfinished')\n")
    sys.path.insert(0, str(site))


def test_a_broken_plugin_breaks_nothing_else(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    left_out = (
        "the plug-in broken_parts of seqboat-broken is skipped: broken_parts cannot be imported: RuntimeError"
    )
    with pytest.warns(UserWarning, match=left_out):
        assert main(["paper", "list", "tasks"]) == 0
    assert capsys.readouterr().out.startswith("listops ")
    assert main(["paper", "list", "plugins"]) == 0  # the warning comes once per process
    assert capsys.readouterr().out.startswith(
        "broken_parts  skipped: broken_parts cannot be imported: Runtime"
    )
    record = {"name": "x", "plugin": "broken_parts"}
    with pytest.raises(
        ValueError, match="which cannot be loaded: broken_parts cannot be imported: RuntimeError"
    ):
        from_dict({**to_dict(find_recipe("recall")()), "task": record})


def test_help_loads_no_plugin(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["eval", "--help"], ["paper", "data", "show", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
    assert "--import MODULE" in capsys.readouterr().out and not plugins._state.looked
    assert "broken_parts" not in sys.modules


ROUTER = "from seqboat.layers.routers import *\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1/0", "mine_bad cannot be imported: ZeroDivisionError: division by zero"),
        ("import nonsense", "mine_bad cannot be imported: ModuleNotFoundError: No module named 'nonsense'"),
        ("raise SystemExit(3)", "mine_bad cannot be imported: SystemExit: 3"),
        ("x = 1", "mine_bad has none of the tables TASKS, MIXERS, ROUTERS, SSMS, RECIPES"),
        ("MIXERS = [1]", r"mine_bad.MIXERS must be a dictionary of names, got list"),
        ("MIXERS = {'a b': 1}", "a name must consist of letters, digits, dots and hyphens"),
        ("MIXERS = {'mega': 1}", "seqboat already has a mixer of this name"),
        ("MIXERS = {'mine': 1}", "must be a configuration class, a frozen dataclass, got 1"),
        (
            "from seqboat import SeqBoatConfig\nMIXERS = {'mine': SeqBoatConfig}",
            "already registered under another",
        ),
        ("RECIPES = {'mine': 3}", "must be a function that returns a RunConfig"),
        (
            "from seqboat import EMAConfig\nROUTERS = {'mine': EMAConfig}",
            "must derive from seqboat.layers.rout",
        ),
        (
            f"{ROUTER}@dataclass\nclass A:\n    x: int = 1\nTASKS = {{'mine': A}}",
            "A has no method build",
        ),
        (
            f"{ROUTER}@dataclass\nclass A:\n    name: str = ''\n    def build(self): pass\nTASKS = {{'mine': A}}",
            "A must not have a field 'name'",
        ),
        (
            f"{ROUTER}@dataclass\nclass A:\n    def build(self): pass\nMIXERS = {{'mine': A}}",
            "A needs a field causal, the direction of the mixer",
        ),
        (
            f"{ROUTER}@dataclass\nclass A:\n    x: int\n    def build(self): pass\nTASKS = {{'mine': A}}",
            r"A\(\) must work without arguments, got TypeError",
        ),
    ],
)
def test_a_module_that_is_no_plugin_says_why(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine_bad.py").write_text(text)
    before = {name: dict(plugins._registry(name)) for name in plugins.TABLES}
    with pytest.raises(ValueError, match=message):
        plugins.load_plugin("mine_bad")
    assert before == {name: plugins._registry(name) for name in plugins.TABLES}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("nowhere", "--import nowhere: there is no module nowhere, installed or in "),
        ("torch.nowhere", "--import torch.nowhere: there is no module torch.nowhere"),
        ("mine.py", "mine.py is a file: give the name of the module, mine,"),
    ],
)
def test_a_module_that_is_missing(module: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list", "tasks", "--import", module]) == 2
    said = capsys.readouterr()
    assert said.out == "" and message in said.err and said.err.count("\n") == 1


def test_the_variable_names_a_module_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "nowhere")
    with pytest.raises(ValueError, match="SEQBOAT_IMPORT: there is no module nowhere"):
        plugins.load_plugins()


def test_two_plugins_with_one_name(installed: None, tmp_path: Path) -> None:
    plugins.load_plugins()
    (tmp_path / "mine_too.py").write_text("RECIPES = {'brackets': lambda: None}")
    with pytest.raises(
        ValueError, match=r"the plug-in seqboat_brackets \(seqboat-brackets 0.1.0\) already has"
    ):
        plugins.load_plugin("mine_too")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "plugin must be the name of a module"),
        ("other", "'running-mean' comes from the plug-in other, not from seqboat_br"),
        ("seqboat_brackets", None),
    ],
)
def test_a_part_is_that_of_the_plugin_that_wrote_it(
    installed: None, record: Any, message: str | None
) -> None:
    data = to_dict(find_recipe("brackets")())
    data["model"]["mixer"]["plugin"] = record
    read: Callable[[], Any] = lambda: from_dict(data)  # noqa: E731
    if message is None:
        assert read() == find_recipe("brackets")()
    else:
        with pytest.raises(ValueError, match=message):
            read()
