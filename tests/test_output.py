"""Standard output that cannot be written to, Ctrl-C, and fields on the command line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seqboat.cli.main import main
from seqboat.run import MODELS


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
