"""Micro-batches, precision, prefetching, processes and plans: what a user of GPUs sets."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import assert_same_numbers, largest
from seqboat.cli.main import main
from seqboat.recipes import RECIPES
from seqboat.tasks import TASKS
from seqboat.training import precision
from seqboat.training.checkpoint import MODEL, OPTIM, CheckpointStore
from seqboat.training.config import TrainingConfig
from seqboat.training.loop import train
from seqboat.training.parallel import launch
from seqboat.training.planning.estimate import GB, estimate
from seqboat.training.precision import LossScale, matrix_products
from small_runs import Spy, ToyConfig, same_tensors, small_run, without_dropout


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)


def newest(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    found = CheckpointStore(folder).newest()
    assert found is not None
    return found.tensors(MODEL), found.tensors(OPTIM)


@pytest.mark.parametrize("kind", ["classify", "lm", "match"])
def test_micro_batches_add_up_to_the_batch(kind: Any, tmp_path: Path) -> None:
    config = without_dropout(small_run(ToyConfig(kind=kind))).replace(
        schedule={"steps": 1, "warmup_steps": 0}, evaluation={"limit": 2}, optimizer={"clip": 1e9}
    )
    gradients, losses = [], []
    for number, training in enumerate(
        ({"accumulation": 1}, {"accumulation": 4}, {"accumulation": 1, "max_micro_batch": 3})
    ):
        spy = Spy()
        train(config.replace(training=training), tmp_path / str(number), display=spy)
        # the first step of Adam: its average is a tenth of the gradient
        averages = newest(tmp_path / str(number))[1]
        gradients.append({name: v for name, v in averages.items() if name.endswith("exp_avg")})
        losses.append(spy.losses[0])
    for other, loss in zip(gradients[1:], losses[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-6)
        for name, value in gradients[0].items():
            assert_same_numbers(other[name], value, name, largest(gradients[0].values()))


def test_number_of_micro_batches() -> None:
    training = TrainingConfig(batch_size=128, max_micro_batch=26)
    assert [training.micro_batches(n) for n in (1, 2, 8, 16)] == [5, 3, 1, 1]
    assert TrainingConfig(batch_size=128, accumulation=8, max_micro_batch=26).micro_batches(1) == 8
    assert TrainingConfig(batch_size=8, max_micro_batch=3, carry_state=True).micro_batches(1) == 4
    with pytest.raises(ValueError, match=r"training.max_micro_batch must be"):
        TrainingConfig(max_micro_batch=0)


@pytest.mark.parametrize("kind", ["classify", "lm"])
def test_fp16_scales_its_loss_and_resumes(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "PATIENCE", 3)
    monkeypatch.setattr(LossScale.__new__, "__defaults__", (2.0**22, 0))
    config = small_run(ToyConfig(kind=kind)).replace(
        schedule={"steps": 14, "warmup_steps": 2},
        training={"precision": "fp16", "save_every": 7},
        evaluation={"every": 14, "limit": 8},
    )
    spy = Spy()
    assert train(config, tmp_path / "run", display=spy).exit_code == 0
    scales = [record["loss_scale"] for record in spy.records]
    assert scales[0] == 2.0**21 and min(scales) < scales[0], "the first gradients must overflow"
    assert any(b > a for a, b in pairwise(scales)), "the scale must grow again"
    assert not spy.messages and all(record["loss"] is not None for record in spy.records)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "step-14")
    train(config, tmp_path / "again", resume=True, display=Spy())
    for one, two in zip(newest(tmp_path / "run"), newest(tmp_path / "again"), strict=True):
        assert same_tensors(one, two)


def test_fp16_does_not_hide_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    config = small_run(ToyConfig(real=True, nan_from=0)).replace(
        training={"precision": "fp16", "max_skipped": 2}, schedule={"steps": 6}
    )
    spy = Spy()
    assert train(config, tmp_path / "run", display=spy).exit_code == 3
    assert "the inputs are not finite" in spy.messages[0]


def test_loss_scale() -> None:
    scale = LossScale(8.0, precision.PATIENCE - 2)
    assert scale.after(True) == (4.0, 0)
    assert scale.after(False).after(False) == (16.0, 0)


def test_tf32_holds_during_the_run(tmp_path: Path) -> None:
    seen = []
    config = small_run().replace(
        training={"precision": "tf32"}, schedule={"steps": 2, "warmup_steps": 0}, evaluation={"limit": 2}
    )
    assert not torch.backends.cuda.matmul.allow_tf32
    train(
        config,
        tmp_path / "run",
        display=Spy(),
        on_step=lambda *_: seen.append(torch.backends.cuda.matmul.allow_tf32),
    )
    assert seen == [True, True] and not torch.backends.cuda.matmul.allow_tf32
    with matrix_products("fp32"):
        assert not torch.backends.cuda.matmul.allow_tf32


def test_batches_are_prefetched_and_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqboat.training import loader, loop

    given: list[dict[str, Any]] = []
    make = torch.utils.data.DataLoader

    def spied(*args: Any, **options: Any) -> Any:
        given.append(dict(options))
        return make(
            *args, **{**options, "num_workers": 0, "prefetch_factor": None, "timeout": 0, "pin_memory": False}
        )

    monkeypatch.setattr(torch.utils.data, "DataLoader", spied)
    monkeypatch.setattr(loop, "pins", lambda device: True)
    config = small_run().replace(schedule={"steps": 1, "warmup_steps": 0}, evaluation={"limit": 2})
    for pinned in (True, False):
        changed = config.replace(training={"workers": 1, "prefetch": 5, "pin_memory": pinned})
        train(changed, tmp_path / str(pinned), display=Spy())
    training = [one for one in given if one["prefetch_factor"] == 5]
    assert [one["pin_memory"] for one in training] == [True, False]
    assert loader.pins(torch.device("cuda")) and not loader.pins(torch.device("cpu"))


# processes of this machine

SHOW = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True); sys.exit({code})"


def test_launch_starts_ranks_and_returns_their_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([sys.executable, "-c", SHOW.format(code=0)], 2, poll=0.01) == 0
    assert sorted(capfd.readouterr().out.split("\n")[:2]) == ["0 2", "1 2"]
    only_second = SHOW.format(code="7 * int(os.environ['RANK'])")
    assert launch([sys.executable, "-c", only_second], 2, poll=0.01) == 7


READY = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(120)
"""


def test_launch_passes_signals_on(tmp_path: Path) -> None:
    def send() -> None:
        ends = time.monotonic() + 100
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < ends:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=send).start()
    before = signal.getsignal(signal.SIGUSR1)
    assert launch([sys.executable, "-c", READY, str(tmp_path)], 2, poll=0.01) == 75
    assert signal.getsignal(signal.SIGUSR1) == before


def test_callbacks_need_one_process(tmp_path: Path) -> None:
    config = small_run(training={"processes": 2})
    with pytest.raises(ValueError, match=r"on_step needs training\.processes=1"):
        train(config, tmp_path / "run", on_step=lambda *_: None)


@pytest.mark.slow
def test_a_run_in_two_processes_of_its_own(tmp_path: Path) -> None:
    config = RECIPES["recall"]().replace(
        schedule={"steps": 3, "warmup_steps": 0}, evaluation={"limit": 8}, training={"device": "cpu"}
    )
    alone = train(config, tmp_path / "alone", display=Spy())
    both = train(config.replace(training={"processes": 2}), tmp_path / "both")
    assert (both.exit_code, both.step) == (alone.exit_code, alone.step) == (0, 3)
    for name, value in newest(tmp_path / "alone")[0].items():
        torch.testing.assert_close(newest(tmp_path / "both")[0][name], value, rtol=1e-4, atol=1e-5)


# plans


@pytest.mark.parametrize(("name", "published"), [("lra.pathx", 8), ("lra.retrieval", 8)])
def test_paper_runs_fit_in_24_gb(name: str, published: int) -> None:
    config = RECIPES[name]()
    found = estimate(config, memory=24 * GB)
    assert found.fits and found.micro_batch >= published
    assert found.micro_batches * found.micro_batch >= config.training.batch_size
    # with the number of examples that the published scripts give to each GPU
    assert estimate(config.replace(training={"max_micro_batch": published})).memory < 24 * GB


def test_dry_run_and_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", "recall", "--gpu", "a10", "--out", str(tmp_path / "run")]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "at the rates of a10" in shown and "fits in 24 GB" in shown and "lower bound" in shown
    assert not (tmp_path / "run").exists()
    whole = estimate(RECIPES["recall"]())
    assert main(["train", "recall", "--fit", str(0.3 * whole.memory / GB), "--print-config"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "max_micro_batch" in line)
    assert 1 <= int(line.split(":")[1]) < whole.micro_batch
    assert main(["train", "recall", "--fit", "0.0001"]) == 2
    assert "one example at a time takes" in capsys.readouterr().err
    assert main([*words[:2], "--dry-run", "--gpu", "abacus"]) == 2
    assert "gpu must be" in capsys.readouterr().err


# a cluster of stand-ins for Slurm's commands

STANDINS = {
    "scontrol": 'if [ "$1" = show ]; then echo node-a; echo node-b; else echo "$@" >> "$SAID"; fi',
    "scancel": 'echo "$@" >> "$SAID"; kill -TERM "$(cat "$PIDFILE")"',
    "srun": 'exec "$@"',
    "torchrun": """
echo "$@" >> "$SAID"
trap 'echo saved >> "$SAID"; exit 1' TERM
echo $$ > "$PIDFILE"
i=0; while [ $i -lt "${ROUNDS:-300}" ]; do sleep 0.1; i=$((i + 1)); done
exit 3
""",
}


@pytest.mark.parametrize("signaled", [True, False])
def test_slurm_script(signaled: bool, tmp_path: Path) -> None:
    for name, body in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    said, pid = tmp_path / "said", tmp_path / "pid"
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SAID": str(said),
        "PIDFILE": str(pid),
        "ROUNDS": "300" if signaled else "1",
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    script = Path(__file__).parents[1] / "examples" / "slurm.sh"
    running = subprocess.Popen(["bash", str(script), "lra.pathx", "--training.precision=bf16"], env=env)
    if signaled:
        ends = time.monotonic() + 30
        while not (pid.exists() and pid.read_text()) and time.monotonic() < ends:
            time.sleep(0.02)
        running.send_signal(signal.SIGUSR1)
    code = running.wait(60)
    lines = said.read_text().splitlines()
    assert lines[0] == (
        "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-a:29500 --rdzv-id 5 "
        "-m seqboat train lra.pathx --out runs/lra.pathx --resume --training.precision=bf16"
    )
    if signaled:
        assert code == 0 and lines[1:] == ["--signal=TERM 5.0", "saved", "requeue 5"]
    else:
        assert code == 3 and len(lines) == 1
