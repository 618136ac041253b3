"""The command line: help, version, errors of one line with their exit codes, output that breaks, Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seqboat.cli import main as cli
from seqboat.cli.main import COMMANDS, MOVED, UsageError, main
from seqboat.cli.paper import VERBS
from seqboat.cli.parser import Count, Parser, fill
from seqboat.core.extras import EXTRAS
from seqboat.run import MODELS
from seqboat.version import __version__


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], int]], None]:
    """Make `seqboat fake` run a function."""

    def use(act: Callable[[int], int]) -> None:
        def run(*, steps: int = 1) -> int:
            """Pretend.

            Args:
                steps: how many.
            """
            return act(steps)

        monkeypatch.setitem(sys.modules, "seqboat.cli.fake", SimpleNamespace(run=run))
        monkeypatch.setattr(cli, "COMMANDS", {"fake": "pretend"})

    return use


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def raises(error: BaseException) -> Callable[[int], int]:
    def act(steps: int) -> int:
        raise error

    return act


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, line in COMMANDS.items():
        assert name in text and line in text


@pytest.mark.parametrize("name", [*COMMANDS, *(f"paper {verb}" for verb in VERBS)])
def test_help_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: seqboat {name}") and text.count("\n") <= 40


@pytest.mark.parametrize("old", MOVED)
def test_a_command_of_before_says_what_it_is_now(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([old, "--help"]) == 0
    shown = capsys.readouterr()
    new = MOVED[old]
    assert shown.err == f"seqboat {old} is now: seqboat {new} --help\n"
    assert shown.out.startswith(f"usage: seqboat {new.partition(' --')[0]}")


def test_what_a_signature_says() -> None:
    def run(
        one: str, *more: Path, size: Count = 3, words: tuple[str, ...] = (), text: Sequence[str] = ()
    ) -> int:
        """Try.

        Args:
            one: first.
            more: others,
                over two lines.
            size: of all.
            words: several.
            text: repeated.

        examples
        """
        return 0

    parser = Parser(prog="try")
    fill(parser, run)
    options = parser.parse_args(["a", "b", "--words", "x", "y", "--text", "1", "--text", "2"])
    assert vars(options) == {
        "one": "a",
        "more": [Path("b")],
        "size": 3,
        "words": ["x", "y"],
        "text": ["1", "2"],
    }
    shown = parser.format_help()
    assert shown.startswith("usage: try ONE [MORE ...] [options]") and shown.endswith("\nexamples\n")
    assert "others, over two lines" in shown and "of all (default: 3)" in shown

    def undocumented(*, size: int = 1) -> int:
        """Try."""
        return 0

    with pytest.raises(KeyError, match="size"):
        fill(Parser(prog="try"), undocumented)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense"], ["doctor", "--nonsense"]], ids=str)
def test_what_is_not_known_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("seqboat") and captured.err.endswith(" --help)\n")
    assert captured.err.count("\n") == 1 and "error: " in captured.err


def test_arguments_reach_the_command(install: Callable[..., None]) -> None:
    install(lambda steps: steps)
    assert main(["fake"]) == 1
    assert main(["fake", "--steps", "7"]) == 7


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no such recipe"), 2, "seqboat fake: error: no such recipe\n"),
        (ValueError("window must be 1"), 2, "seqboat fake: error: window must be 1\n"),
        (OSError("disk full"), 1, "seqboat fake: OSError: disk full (--debug shows where)\n"),
        (KeyError("k"), 1, "seqboat fake: KeyError: 'k' (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (BrokenPipeError(), 0, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_are_one_line(
    error: BaseException,
    code: int,
    line: str,
    install: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(raises(error))
    assert main(["fake"]) == code
    captured = capsys.readouterr()
    assert captured.err == line and captured.out == ""


def test_a_library_that_is_missing_is_named_with_its_extra(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(raises(ModuleNotFoundError("No module named 'rich'", name="rich.console")))
    assert main(["fake"]) == 2
    line = "seqboat fake: error: this command needs rich: pip install 'seqboat[lab]'\n"
    assert capsys.readouterr().err == line
    install(raises(ModuleNotFoundError("No module named 'seqbote'", name="seqbote")))
    assert main(["fake"]) == 1
    assert capsys.readouterr().err.startswith("seqboat fake: ModuleNotFoundError: No module named 'seqbote'")


def test_extras_are_those_of_the_package() -> None:
    path = Path(__file__).parents[1] / "pyproject.toml"
    extras = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for library, extra in EXTRAS.values():
        assert any(line.startswith(library) for line in extras[extra]), extra


@pytest.mark.parametrize("error", [UsageError("a"), ValueError("b"), OSError("c")], ids=repr)
def test_debug_shows_where(error: Exception, install: Callable[..., None]) -> None:
    install(raises(error))
    with pytest.raises(type(error)):
        main(["--debug", "fake"])


def test_an_error_of_several_lines_is_printed_as_one(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(raises(RuntimeError("first line\n  second line\n")))
    assert main(["fake"]) == 1
    assert (
        capsys.readouterr().err
        == "seqboat fake: RuntimeError: first line second line (--debug shows where)\n"
    )


def test_as_a_module() -> None:
    done = seqboat("--version", stdout=subprocess.PIPE)
    assert done.returncode == 0 and done.stdout == f"seqboat {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["paper", "list", "recipes"], 0),
        (["paper", "data", "list"], 0),
        (["--help"], 0),
        (["paper", "data", "show", "x"], 2),
    ],
)
def test_a_closed_pipe_ends_a_command_quietly(arguments: list[str], code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = seqboat(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == code
    assert done.stderr.count("\n") == (1 if code else 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "recipe 'nope' is unknown; `seqboat paper list recipes` shows all"),
        ("imgae", "recipe 'imgae' is unknown; did you mean lra.image?"),
        ("recal", "recipe 'recal' is unknown; did you mean recall?"),
    ],
)
def test_only_near_names_are_suggested(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", name]) == 2
    assert capsys.readouterr().err == f"seqboat train: error: {message}\n"


def test_help_of_a_recipe_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recall", "--model.mixer", "s4d", "--help"]) == 0
    text = capsys.readouterr().out
    for part in (
        "usage: seqboat train recall",
        "Multi-query associative recall: 8 pairs",
        "  --data.length 64                   Tokens per example.",
        "  --model.mixer s4d                  The layer that is stacked.",
        "  --schedule.steps 1500 ",
    ):
        assert part in text
    for recipe in ("recall", "classify", "enwik8", "lra.pathx"):
        assert main(["train", recipe, "--help"]) == 0
        assert capsys.readouterr().out.count("\n") <= 40
    assert main(["train", "recal", "-h"]) == 2
    assert "did you mean recall?" in capsys.readouterr().err


def test_every_recipe_tells_every_setting() -> None:
    from seqboat.recipes import RECIPES
    from seqboat.training.settings_io import describe

    for recipe in RECIPES.values():
        assert not [setting.name for setting in describe(recipe()) if not setting.text]


# an output that cannot be written to, Ctrl-C, warnings


def seqboat(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "seqboat", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
        **settings,
    )


def close_stdout() -> None:
    os.close(1)


def test_a_closed_output_is_one_line() -> None:
    done = seqboat("paper", "list", "recipes", preexec_fn=close_stdout)
    assert (done.returncode, done.stderr) == (1, "seqboat paper: error: standard output is closed\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [["paper", "list", "recipes"], ["--help"]], ids=str)
def test_a_full_output_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = seqboat(*arguments, stdout=full)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "error: cannot write to standard output: No space left on device\n" in done.stderr


TINY = [
    "--schedule.steps=3",
    "--schedule.warmup_steps=1",
    "--training.log_every=1",
    "--training.batch_size=2",
]
TINY += ["--model.d_model=8", "--evaluation.limit=2"]


@pytest.mark.parametrize("output", ["closed", "full"])
def test_training_survives_an_output_that_cannot_be_written_to(output: str, tmp_path: Path) -> None:
    arguments = ["train", "copy", *TINY, "--out", str(tmp_path / "run")]
    if output == "closed":
        done = seqboat(*arguments, preexec_fn=close_stdout)
        assert done.stderr == ""
    else:
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full here")
        with open("/dev/full", "w") as full:
            done = seqboat(*arguments, stdout=full)
        assert done.stderr.startswith("seqboat: cannot write to standard output: No space left on device")
        assert done.stderr.count("\n") == 1
    assert done.returncode == 0 and (tmp_path / "run" / "step-3" / "model.safetensors").is_file()


def test_a_resumed_run_takes_fields_with_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["train", "copy", *TINY, "--out", run]) == 0
    assert main(["train", "--resume", "--out", run, "--training.log_every", "2", "--print-config"]) == 0
    assert '"log_every": 2' in capsys.readouterr().out
    # a setting that does not fit one of the command line
    file = tmp_path / "run" / "config.json"
    assert main(["train", "--resume", "--out", run, "--schedule.warmup_steps", "9"]) == 2
    assert f"must not exceed schedule.steps, got 9 and 3 (settings from {file})" in capsys.readouterr().err
    # a setting that only building the model refuses
    file.write_text(file.read_text().replace('"temperature_scale": ', '"temperature_scale": -'))
    assert main(["train", "--resume", "--out", run]) == 2
    assert f"temperature_scale must be positive, got -1.0 (settings from {file})" in capsys.readouterr().err


def test_ctrl_c_ends_generation_at_once() -> None:
    command = [sys.executable, "-m", "seqboat", "generate", "--prompt", "The ", "--max-new-bytes", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        try:
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, error) == (130, b"stopped\n")


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    """A damaged newest checkpoint is passed over, and said in the words of the command line."""
    run = tmp_path / "run"
    shutil.copytree(MODELS / "enwik8-small", run)
    newest = max(run.glob("step-*"), key=lambda path: int(path.name[5:]))
    shutil.copytree(newest, newest.with_name("step-9999"))
    (newest.with_name("step-9999") / "model.safetensors").write_bytes(b"")
    (run / "latest").write_text("step-9999\n")
    command = [sys.executable, "-m", "seqboat", "generate", str(run), "--which", "latest"]
    done = subprocess.run(
        [*command, "--prompt", "a", "--max-new-bytes", "1"], capture_output=True, timeout=300, check=False
    )
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 0 and line.startswith("seqboat generate: warning: ") and "step-9999" in line
