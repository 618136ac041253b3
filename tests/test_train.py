"""The training loop: resuming bit for bit, kills, signals, numbers that are not finite, workers, trackers."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from closeness import assert_same_numbers, largest
from rights import permissions
from seqboat.layers.routers import AlwaysActiveConfig, GumbelConfig, GumbelSoftmax
from seqboat.run import Run, start_from
from seqboat.tasks import TASKS
from seqboat.training import diagnosis
from seqboat.training.checkpoint import MODEL, OPTIM, CheckpointError, CheckpointStore, _seal
from seqboat.training.config import RunConfig, TrainingConfig
from seqboat.training.display import PlainDisplay
from seqboat.training.loader import LoaderError, Plan
from seqboat.training.record import MemoryMeter, iterate_metrics, numbers
from seqboat.training.settings_io import override, read_config, to_dict
from seqboat.training.signals import StopSignals
from seqboat.training.trainer import RunOutcome, train
from small_runs import Spy, ToyConfig, numbers_of, same_tensors, small_run, without_dropout


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)


class Stop(Exception):
    """Ends a run from outside, without any clean-up."""


def stop_after(step: int) -> Any:
    def hook(done: int, model: torch.nn.Module) -> None:
        if done == step:
            raise Stop

    return hook


def final(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    found = CheckpointStore(folder).newest()
    assert found is not None
    return found.tensors(MODEL), found.tensors(OPTIM)


def same_runs(one: Path, two: Path) -> bool:
    return all(same_tensors(a, b) for a, b in zip(final(one), final(two), strict=True))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return numbers_of(list(iterate_metrics(folder / "metrics.jsonl")))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 steps, four epochs of six batches, that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "toy", ToyConfig)
        outcome = train(small_run(), folder, display=Spy())
    assert outcome.exit_code == 0 and outcome.step == 24 and outcome.message == "finished"
    return folder


def test_a_run_leaves_everything_beside_its_checkpoints(straight: Path) -> None:
    assert read_config(straight / "config.json") == small_run()
    about = json.loads((straight / "run.json").read_text())
    assert about["seed"] == 0 and about["versions"]["torch"] == torch.__version__
    assert about["parameters"] == sum(p.numel() for p in small_run().build_model().parameters())
    records = list(iterate_metrics(straight / "metrics.jsonl"))
    training = [r for r in records if r["split"] == "train"]
    assert [r["step"] for r in training] == list(range(1, 25))
    wanted = {
        "loss",
        "accuracy",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "memory_mb",
        "activation",
        "epoch",
        "elapsed",
    }
    assert wanted <= training[0].keys() and len(training[0]["activation"]) == 2
    assert [r["step"] for r in records if r["split"] == "val"] == [12, 24]
    assert CheckpointStore(straight).pointed("latest") == 24 and CheckpointStore(straight).pointed(
        "best"
    ) in (12, 24)
    state = CheckpointStore(straight).newest()
    assert state is not None and state.state["sampler"] == {"epoch": 4, "position": 0}
    # nothing of the machine or its user is written
    text = (straight / "step-24" / "state.json").read_text() + (straight / "run.json").read_text()
    assert os.path.expanduser("~") not in text and "PATH" not in text


def test_training_learns(tmp_path: Path) -> None:
    spy = Spy()
    config = small_run(optimizer={"lr": 0.03}, schedule={"steps": 60}, training={"accumulation": 1})
    train(config, tmp_path, display=spy)
    assert sum(spy.losses[-10:]) < 0.8 * sum(spy.losses[:10])


@pytest.mark.parametrize("k", [1, 3, 4, 7, 13, 23])
def test_resuming_continues_bit_for_bit(tmp_path: Path, straight: Path, k: int) -> None:
    with pytest.raises(Stop):
        train(small_run(), tmp_path / "run", display=Spy(), on_step=stop_after(k))
    spy = Spy()
    outcome = train(small_run(), tmp_path / "run", resume=True, display=spy)
    assert outcome.exit_code == 0
    assert same_runs(straight, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(straight)
    # time continues where the checkpoint left it
    for clock in ("elapsed", "processor"):
        seconds = [record[clock] for record in iterate_metrics(tmp_path / "run" / "metrics.jsonl")]
        assert seconds == sorted(seconds) and seconds[0] > 0
    resumed = [m for m in spy.messages if m.startswith("resumed")]
    # a stop in the very step that saves comes before the save
    assert resumed == ([f"resumed after step {(k - 1) // 4 * 4}"] if k > 4 else [])


def test_a_finished_run_stays_finished(straight: Path) -> None:
    before = metrics(straight)
    outcome = train(small_run(), straight, resume=True, display=Spy())
    assert outcome == RunOutcome(0, 24, outcome.best, "the run had already finished")
    assert metrics(straight) == before


@pytest.mark.parametrize("kind", ["classify", "lm"])
def test_the_price_of_attention_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    config = small_run()
    if kind == "lm":
        config = small_run(ToyConfig(kind="lm"), training={"carry_state": True, "bucketing": False})
    mixer = dataclasses.replace(config.model.mixer, init="scaled", form="gated")  # type: ignore[type-var]
    config = config.replace(model={"mixer": mixer})
    train(config, tmp_path / "straight", display=Spy())
    with pytest.raises(Stop):
        train(config, tmp_path / "run", display=Spy(), on_step=stop_after(13))
    train(config, tmp_path / "run", resume=True, display=Spy())
    assert same_runs(tmp_path / "straight", tmp_path / "run")
    state = json.loads((tmp_path / "run" / "step-24" / "state.json").read_text())
    # two micro-batches in every step
    assert state["price"]["calls"] == 48 and state["price"]["gain"] >= 0
    unpriced = train(small_run(), tmp_path / "paper", display=Spy())
    assert unpriced.exit_code == 0
    assert "price" not in json.loads((tmp_path / "paper" / "step-24" / "state.json").read_text())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"mixer": small_run().model.mixer}, "training": {"precision": "bf16"}},
        {"optimizer": {"name": "radam"}},
        {"training": {"gradient_checkpointing": True, "accumulation": 1}},
        {"training": {"bucketing": False, "workers": 1}},
    ],
    ids=["bf16", "radam", "checkpointing", "workers"],
)
def test_resuming_with_other_settings(tmp_path: Path, changes: Any) -> None:
    config = small_run(schedule={"steps": 10}).replace(**changes)
    train(config, tmp_path / "one", display=Spy())
    with pytest.raises(Stop):
        train(config, tmp_path / "two", display=Spy(), on_step=stop_after(7))
    train(config, tmp_path / "two", resume=True, display=Spy())
    assert same_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("segments", [None, 2, 99])
def test_resuming_a_language_model_with_its_state(tmp_path: Path, segments: int | None) -> None:
    task = ToyConfig(kind="lm", count=40)
    config = small_run(
        task,
        training={"carry_state": True, "carry_segments": segments, "bucketing": False, "batch_size": 8},
        schedule={"steps": 12, "warmup_steps": 2},
    )
    train(config, tmp_path / "one", display=Spy())
    with pytest.raises(Stop):
        train(config, tmp_path / "two", display=Spy(), on_step=stop_after(7))
    train(config, tmp_path / "two", resume=True, display=Spy())
    assert same_runs(tmp_path / "one", tmp_path / "two")
    # and the state matters
    free = config.replace(training={"carry_state": False})
    train(free, tmp_path / "three", display=Spy())
    assert not same_runs(tmp_path / "one", tmp_path / "three")


@pytest.mark.parametrize("segments", [None, 1, 2])
def test_carried_state_sees_the_text_before(tmp_path: Path, segments: int | None) -> None:
    """With a state, segments read one after the other are one text: the losses of later batches show it."""
    task = ToyConfig(kind="lm", count=8, length=3)
    training = {"carry_state": True, "carry_segments": segments, "bucketing": False}
    config = small_run(task, training={**training, "batch_size": 2, "accumulation": 1})
    config = config.replace(
        schedule={"steps": 4, "warmup_steps": 0}, optimizer={"lr": 1e-12}, model={"dropout": 0.0}
    )
    mixer: Any = config.model.mixer
    config = config.replace(model={"mixer": type(mixer)(gau=mixer.gau, causal=True)})
    spy = Spy()
    train(config, tmp_path, display=spy)
    torch.manual_seed(config.seed)
    model = config.build_model()
    built = config.build_task()
    data = built.dataset("train")
    state, losses = None, []
    plan = Plan(8, 2, config.seed, streams=True, passage=segments)
    for step in range(4):
        state = None if segments and step % segments == 0 else state
        batch = built.collate([data[i] for i in plan.batch(step)])
        out = model(batch.inputs, batch.mask, state)
        state = out.state
        losses.append(float(built.loss(out, batch).mean.detach()))
    assert spy.losses == pytest.approx(losses, rel=1e-5)


def test_wrong_uses_of_carried_state(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="carry_state needs a language model, but toy is not one"):
        train(small_run(training={"carry_state": True, "bucketing": False}), tmp_path / "a", display=Spy())
    assert not (tmp_path / "a").exists()
    growing = small_run(ToyConfig(kind="lm"), training={"carry_state": True, "bucketing": False})
    growing = override(growing, ["--model.mixer=seqboat-full", "--training.carry_state=true"])
    with pytest.raises(ValueError, match=r"needs a state of constant size, .*: --training.carry_state=false"):
        train(growing, tmp_path / "a", display=Spy())
    assert not (tmp_path / "a").exists()
    lm = small_run(
        ToyConfig(kind="lm"), training={"carry_state": True, "bucketing": False, "accumulation": 3}
    )
    with pytest.raises(
        ValueError, match=r"must be a multiple of processes x training.accumulation = 3, got 8"
    ):
        train(lm, tmp_path / "b", display=Spy())


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_no_loss(tmp_path: Path, straight: Path, workers: int) -> None:
    train(small_run(training={"workers": workers}), tmp_path, display=Spy())
    assert metrics(tmp_path) == metrics(straight)
    assert same_runs(tmp_path, straight)


def test_same_seed_same_run_other_seed_other_run(tmp_path: Path, straight: Path) -> None:
    train(small_run(), tmp_path / "one", display=Spy())
    assert metrics(tmp_path / "one") == metrics(straight)
    train(small_run(seed=1), tmp_path / "two", display=Spy())
    assert metrics(tmp_path / "two") != metrics(straight)


def test_micro_batches_add_up(tmp_path: Path) -> None:
    """Accumulation changes nothing but the order of sums, also where the last batch is short."""
    from small_runs import without_dropout

    runs = []
    for accumulation in (1, 2, 5):
        config = without_dropout(small_run(training={"accumulation": accumulation}, schedule={"steps": 14}))
        spy = Spy()
        train(config, tmp_path / str(accumulation), display=spy)
        runs.append(spy)
    for other in runs[1:]:
        assert other.losses == pytest.approx(runs[0].losses, rel=1e-5)
        for one, two in zip(runs[0].records, other.records, strict=True):
            assert two["accuracy"] == pytest.approx(one["accuracy"])
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_long_examples_split_batches_and_change_no_loss(tmp_path: Path) -> None:
    from small_runs import without_dropout

    losses = []
    for limit in (2**19, 24):
        config = without_dropout(
            small_run(training={"max_tokens": limit, "bucketing": False}, schedule={"steps": 8})
        )
        spy = Spy()
        train(config, tmp_path / str(limit), display=spy)
        losses.append((spy.losses, [score["loss"] for score in spy.scores]))
    for one, two in zip(*losses, strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    with pytest.raises(
        ValueError, match=r"train example \d+ has 12 tokens, more than training.max_tokens = 11"
    ):
        train(small_run(training={"max_tokens": 11}), tmp_path / "refused", display=Spy())
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_runs_agree(tmp_path: Path) -> None:
    config = small_run(schedule={"steps": 3, "warmup_steps": 1}, training={"accumulation": 1})
    config = config.replace(evaluation={"every": 100, "limit": 4})
    losses = []
    for compiled in (False, True):
        spy = Spy()
        train(config.replace(training={"compile": compiled}), tmp_path / str(compiled), display=spy)
        losses.append(spy.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# what a run refuses


def test_a_folder_with_a_run_is_not_overwritten(straight: Path) -> None:
    before = metrics(straight)
    with pytest.raises(ValueError, match=r"already holds a run: resume it \(--resume\)"):
        train(small_run(), straight, display=Spy())
    assert metrics(straight) == before


def test_resuming_another_configuration_names_the_field(straight: Path) -> None:
    with pytest.raises(ValueError, match=r"another configuration: optimizer.lr is 0.5, it was 0.01"):
        train(small_run(optimizer={"lr": 0.5}), straight, resume=True, display=Spy())
    with pytest.raises(ValueError, match=r"model.num_layers is 3, it was 2"):
        train(small_run(model={"num_layers": 3}), straight, resume=True, display=Spy())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ValueError, match="cannot write to the run's folder"):
            train(small_run(), folder, display=Spy())


def test_a_second_run_in_the_same_folder(tmp_path: Path) -> None:
    def second(done: int, model: torch.nn.Module) -> None:
        with pytest.raises(ValueError, match="is in use by another run"):
            train(small_run(), tmp_path, resume=True, display=Spy())
        raise Stop

    with pytest.raises(Stop):
        train(small_run(), tmp_path, display=Spy(), on_step=second)


def test_too_small_a_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must not exceed training.batch_size"):
        small_run(training={"batch_size": 1})


def test_a_bad_record_stops_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match="dataset toy, split train, record 5: OSError: bad sector"):
        train(small_run(ToyConfig(bad=(5,))), tmp_path, display=Spy())


# checkpoints of a run


def test_a_damaged_newest_checkpoint_costs_one_interval(tmp_path: Path, straight: Path) -> None:
    with pytest.raises(Stop):
        train(small_run(), tmp_path, display=Spy(), on_step=stop_after(14))
    path = tmp_path / "step-12" / MODEL
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    spy = Spy()
    train(small_run(), tmp_path, resume=True, display=spy)
    assert any("does not match its sha256" in m for m in spy.messages)
    assert "resumed after step 8" in spy.messages
    assert same_runs(straight, tmp_path)


def test_a_run_without_a_readable_checkpoint_is_not_started_over(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        train(small_run(), tmp_path, display=Spy(), on_step=stop_after(14))
    for path in tmp_path.glob(f"step-*/{MODEL}"):
        path.write_bytes(path.read_bytes()[:-1])
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.name != "lock"}
    with pytest.raises(CheckpointError, match="2 checkpoints and none can be read"):
        train(small_run(), tmp_path, resume=True, display=Spy())
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.name != "lock"} == before


def test_checkpoints_without_permission(tmp_path: Path, straight: Path) -> None:
    """A file or folder that may not be read costs one interval; a run that has nothing else is left as it is."""
    run = tmp_path / "run"
    with pytest.raises(Stop):
        train(small_run(), run, display=Spy(), on_step=stop_after(14))
    for name in (f"step-12/{MODEL}", "step-12/state.json", "step-12"):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(run, copy)
        (copy / name).chmod(0)
        spy = Spy()
        with permissions():
            assert train(small_run(), copy, resume=True, display=spy).exit_code == 0
        assert "Permission denied" in spy.messages[0] and "moved aside to damaged-step-12" in spy.messages[0]
        assert same_runs(straight, copy)
    for name in (f"step-12/{MODEL}", "step-8"):
        (run / name).chmod(0)
    before = sorted(path.name for path in run.iterdir())
    with permissions():
        with pytest.raises(CheckpointError, match=r"2 checkpoints and none can be read .*Permission denied"):
            train(small_run(), run, resume=True, display=Spy())
        run.chmod(0o555)
        with pytest.raises(ValueError, match=r"cannot write to the run.s folder .*run: Permission denied"):
            train(small_run(), run, resume=True, display=Spy())
    run.chmod(0o755)
    assert sorted(path.name for path in run.iterdir()) == before
    for path in tmp_path.rglob("*step-*"):
        path.chmod(0o755)


@pytest.mark.parametrize(
    "change",
    [{"step": 10**9}, {"step": -1}, {"best_step": 99}, {"tokens": -5}, {"elapsed": "x"}, {"unknown": 1}],
)
def test_impossible_progress_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(Stop):
        train(small_run(), tmp_path, display=Spy(), on_step=stop_after(5))
    path = tmp_path / "step-4" / "state.json"
    state = json.loads(path.read_text())
    del state["sha256"]
    path.write_text(_seal({**state, "progress": {**state["progress"], **change}}))
    with pytest.raises(CheckpointError, match=r"step-4: its progress (is impossible|does not fit)"):
        train(small_run(), tmp_path, resume=True, display=Spy())


def test_a_full_disk_ends_the_run_and_resuming_repairs_it(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    usage = {"free": 10**12}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=usage["free"]))

    def fill(done: int, model: torch.nn.Module) -> None:
        usage["free"] = 100 if done >= 8 else 10**12

    with pytest.raises(CheckpointError, match=r"no space for .*step-8"):
        train(small_run(), tmp_path, display=Spy(), on_step=fill)
    assert CheckpointStore(tmp_path).steps() == [4]
    usage["free"] = 10**12
    train(small_run(), tmp_path, resume=True, display=Spy())
    assert same_runs(straight, tmp_path)


LAUNCHER = """
import os, sys, time
folder, here, steps, slow, workers = sys.argv[1:]
sys.path.insert(0, here)
import small_runs
from seqboat.training.trainer import train
small_runs.register()
training = {"save_every": 1 if workers == "0" else 4, "workers": int(workers)}
config = small_runs.small_run(training=training, schedule={"steps": int(steps)})

def step(done, model):
    print(done, flush=True)
    time.sleep(float(slow))

# imports take longer than runs: each line of input starts a run in a child of this process
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.setsid()
        print(os.getpid(), flush=True)
        outcome = train(config, folder, resume=True, display=small_runs.Spy(), on_step=step)
        os._exit(outcome.exit_code)
    status = os.waitpid(child, 0)[1]
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


class Launcher:
    """Runs in separate processes, one after the other."""

    def __init__(self, folder: Path, steps: int, slow: float = 0.0, workers: int = 0) -> None:
        arguments = [str(folder), str(Path(__file__).parent), str(steps), str(slow), str(workers)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def start(self) -> int:
        """Start a run; returns its process."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return int(self.read())

    def read(self) -> str:
        """The next line: the number of a step that was done, or the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait(self) -> int:
        """The exit code of the run."""
        while not (line := self.read()).startswith("ended"):
            assert line, "the launcher died"
        return int(line.split()[1])


def kill_often(folder: Path, kills: int, steps: int) -> None:
    """Kill a run that saves every step at random moments, resume it, and compare with one that was left alone."""
    chance = random.Random(kills)
    config = small_run(training={"save_every": 1}, schedule={"steps": steps})
    train(config, folder / "left-alone", display=Spy())
    newest = 0
    with Launcher(folder / "killed", steps) as launcher:
        for _ in range(kills):
            child = launcher.start()
            for _ in range(chance.randrange(steps // kills)):
                launcher.read()
            time.sleep(chance.random() * 0.1)
            os.kill(child, signal.SIGKILL)
            assert launcher.wait() == -signal.SIGKILL
            found = CheckpointStore(folder / "killed").newest() if (folder / "killed").exists() else None
            reached = found.step if found else 0
            # no finished checkpoint is ever lost
            assert reached >= newest
            newest = reached
        assert 0 < newest < steps
        launcher.start()
        assert launcher.wait() == 0
    assert same_runs(folder / "left-alone", folder / "killed")
    assert metrics(folder / "left-alone") == metrics(folder / "killed")
    assert not [p for p in (folder / "killed").iterdir() if p.name.startswith(".")]


def test_kill_at_random_moments(tmp_path: Path) -> None:
    kill_often(tmp_path, 4, 32)


@pytest.mark.slow
def test_kill_at_many_random_moments(tmp_path: Path) -> None:
    kill_often(tmp_path, 50, 400)


# signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_finish_the_step_and_save(tmp_path: Path, straight: Path, number: Any, code: int) -> None:
    def send(done: int, model: torch.nn.Module) -> None:
        if done == 5:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    outcome = train(small_run(), tmp_path, display=Spy(), on_step=send)
    # the signal came after step 5, so step 6 is the one that is finished
    assert (outcome.exit_code, outcome.step) == (code, 6)
    assert outcome.message == f"stopped by {signal.Signals(number).name} after step 6"
    assert CheckpointStore(tmp_path).pointed("latest") == 6
    assert signal.getsignal(number) is before
    assert train(small_run(), tmp_path, resume=True, display=Spy()).exit_code == 0
    assert same_runs(straight, tmp_path)


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    def send(done: int, model: torch.nn.Module) -> None:
        if done == 6:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small_run(), tmp_path, display=Spy(), on_step=send)
    assert CheckpointStore(tmp_path).steps() == [4]


def test_an_interrupted_process_exits_with_its_code(tmp_path: Path) -> None:
    with Launcher(tmp_path / "run", 10_000, slow=0.01) as launcher:
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            child = launcher.start()
            assert launcher.read().isdigit()
            os.kill(child, number)
            assert launcher.wait() == code
    assert CheckpointStore(tmp_path / "run").newest() is not None


def test_signals_to_a_whole_group_with_workers(tmp_path: Path, straight: Path) -> None:
    """Schedulers signal the data workers too: the run still takes one step at most, saves and says why it ended."""
    codes = ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 75), (signal.SIGINT, 130))
    with Launcher(tmp_path / "run", 24, slow=0.1, workers=2) as launcher:
        for number, code in codes:
            child = launcher.start()
            step = int(launcher.read())
            os.killpg(child, number)
            assert launcher.wait() == code
            found = CheckpointStore(tmp_path / "run").newest()
            assert found is not None and step <= found.step <= step + 2
        launcher.start()
        assert launcher.wait() == 0
    assert same_runs(straight, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(straight)


def test_hangups_under_nohup_stay_ignored() -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received == 0
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize("interrupted", [12, 24])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_during_evaluation_stop_within_a_batch(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, interrupted: int, number: Any
) -> None:
    from small_runs import ToyData

    real, reads = ToyData.__getitem__, []

    def read(self: Any, index: int) -> Any:
        if self.split == "val":
            reads.append(index)
            if len(reads) == (1 if interrupted == 12 else 46):
                os.kill(os.getpid(), number)
        return real(self, index)

    monkeypatch.setattr(ToyData, "lengths", lambda self: np.full(45, 12))
    monkeypatch.setattr(ToyData, "__getitem__", read)
    config = small_run(training={"bucketing": False})
    outcome = train(config, tmp_path / "run", display=Spy())
    assert (outcome.exit_code, outcome.step) == (128 + number, interrupted)
    # one batch of 16 of the 45 examples
    assert len(reads) == (16 if interrupted == 12 else 45 + 16)
    monkeypatch.undo()
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    monkeypatch.setattr(ToyData, "lengths", lambda self: np.full(45, 12))
    train(config, tmp_path / "alone", display=Spy())
    assert train(config, tmp_path / "run", resume=True, display=Spy()).exit_code == 0
    assert same_runs(tmp_path / "alone", tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")


def test_a_signal_before_an_evaluation_skips_it(tmp_path: Path, straight: Path) -> None:
    def send(done: int, model: torch.nn.Module) -> None:
        if done == 11:
            os.kill(os.getpid(), signal.SIGTERM)

    spy = Spy()
    outcome = train(small_run(), tmp_path, display=spy, on_step=send)
    assert (outcome.exit_code, outcome.step, spy.scores) == (143, 12, [])
    assert train(small_run(), tmp_path, resume=True, display=Spy()).exit_code == 0
    assert same_runs(straight, tmp_path) and metrics(tmp_path) == metrics(straight)


# numbers that are not finite


def test_a_logged_step_that_is_not_finite_is_shown(tmp_path: Path) -> None:
    """A learning rate out of all bounds ends a run with code 3, whatever is displayed at that step."""
    stream = io.StringIO()
    config = small_run(optimizer={"lr": 1e30, "clip": None}, schedule={"warmup_steps": 0})
    outcome = train(config, tmp_path / "five", display=PlainDisplay(stream))
    assert outcome.exit_code == 3 and "5 steps in a row" in outcome.message
    assert "loss -" in stream.getvalue()
    outcome = train(config.replace(training={"max_skipped": 1}), tmp_path / "one", display=Spy())
    assert outcome.exit_code == 3 and "was not finite in step" in outcome.message


def test_not_finite_steps_are_not_applied(tmp_path: Path) -> None:
    """Batches with a NaN change neither weights nor running averages; the others train on."""
    task = ToyConfig(real=True, nan_from=44)
    config = small_run(task, schedule={"steps": 30}, training={"bucketing": False})
    mixer: Any = config.model.mixer
    config = config.replace(model={"mixer": type(mixer)(gau=mixer.gau, norm="batch", prenorm=True)})
    weights: list[dict[str, torch.Tensor]] = []

    def watch(done: int, model: torch.nn.Module) -> None:
        weights.append({name: value.clone() for name, value in model.state_dict().items()})

    spy = Spy()
    outcome = train(config, tmp_path, display=spy, on_step=watch)
    assert outcome.exit_code == 0
    records = list(iterate_metrics(tmp_path / "metrics.jsonl"))
    skipped = [r["step"] for r in records if r["split"] == "skipped"]
    # one example of 45 spoils one batch of six
    assert len(skipped) == 5
    for step in range(2, 31):
        assert same_tensors(weights[step - 1], weights[step - 2]) == (step in skipped)
    assert all(bool(v.isfinite().all()) for v in weights[-1].values())
    first = next(r for r in records if r["split"] == "skipped")
    assert first["trouble"] == "the inputs are not finite" and 44 in first["examples"]
    assert any(
        m.startswith(f"step {skipped[0]} not applied: the inputs are not finite") for m in spy.messages
    )


def test_five_in_a_row_end_the_run_with_code_3(tmp_path: Path) -> None:
    config = small_run()

    def spoil(done: int, model: torch.nn.Module) -> None:
        if done == 6:
            with torch.no_grad():
                model.get_parameter("backbone.layers.1.linear.weight").fill_(torch.nan)

    outcome = train(config, tmp_path, display=Spy(), on_step=spoil)
    assert (outcome.exit_code, outcome.step) == (3, 11)
    assert "5 steps in a row, the last being step 11" in outcome.message
    assert "the output of backbone.layers.1.linear is not finite" in outcome.message
    # what is kept is from before
    assert CheckpointStore(tmp_path).steps() == [4, 8] or CheckpointStore(tmp_path).steps() == [4]


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    def spoil(done: int, model: torch.nn.Module) -> None:
        if done == 1:
            model.get_parameter("head.out.weight").register_hook(lambda gradient: gradient * torch.inf)

    outcome = train(small_run(), tmp_path, display=Spy(), on_step=spoil)
    assert outcome.exit_code == 3 and "the gradient of head.out.weight is not finite" in outcome.message


def test_batches_without_targets_count_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqboat.tasks.task import IGNORE, Batch
    from small_runs import Toy

    real = Toy.collate

    def collate(self: Any, examples: Any) -> Batch:
        batch = real(self, examples)
        return batch._replace(targets=torch.full_like(batch.targets, IGNORE))

    monkeypatch.setattr(Toy, "collate", collate)
    spy = Spy()
    outcome = train(small_run(ToyConfig(kind="lm"), schedule={"steps": 6}), tmp_path, display=spy)
    assert spy.losses == [0.0] * 6
    assert outcome.exit_code == 3 and outcome.message == "no evaluation gave a finite accuracy"


# what is watched


def test_early_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_run(evaluation={"every": 2, "patience": 3}, optimizer={"lr": 1e-12})
    outcome = train(config, tmp_path, display=Spy())
    # the first evaluation is the best, the next three are no better
    assert (outcome.step, outcome.message) == (8, "no better for 3 evaluations")
    assert CheckpointStore(tmp_path).pointed("best") == 2
    again = train(config, tmp_path, resume=True, display=Spy())
    assert (again.step, again.message) == (8, "the run had already finished")


def test_a_router_that_stays_dead_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "DEAD_AFTER", 5)

    def switch(done: int, model: torch.nn.Module) -> None:
        bias = model.get_parameter("backbone.layers.1.sma.router.logits.bias")
        with torch.no_grad():
            bias.copy_(torch.tensor([100.0, -100.0] if done < 12 else [-100.0, 100.0]))

    spy = Spy()
    train(small_run(), tmp_path, display=spy, on_step=switch)
    dead = [m for m in spy.messages if m.startswith("layer 2: its router has activated no token")]
    assert dead == [
        "layer 2: its router has activated no token since step 2; the layer works without its module"
    ]
    assert any(m == "layer 2 is active again at step 13" for m in spy.messages)


def test_a_resumed_run_knows_since_when_a_router_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "DEAD_AFTER", 5)
    config = small_run()
    mixer: Any = config.model.mixer
    config = config.replace(
        model={"mixer": type(mixer)(gau=mixer.gau, ffn=True)}, training={"save_every": 2, "keep": 9}
    )

    def silence(done: int, model: torch.nn.Module) -> None:
        # pairs (skip, activate) of attention and of the feed-forward block
        bias = model.get_parameter("backbone.layers.1.sma.router.logits.bias")
        with torch.no_grad():
            bias.copy_(torch.tensor([-100.0, 100.0, 100.0, -100.0]))
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, display=Spy(), on_step=silence)
    spy = Spy()
    train(config, tmp_path, display=spy, resume=True)
    assert "resumed after step 4" in spy.messages
    assert [m for m in spy.messages if m.startswith("layer 2, module ffn: ")] == [
        "layer 2, module ffn: its router has activated no token since step 2; the layer works without ffn"
    ]


def test_routers_hear_of_the_step(tmp_path: Path) -> None:
    config = small_run(schedule={"steps": 6})
    mixer: Any = config.model.mixer
    config = config.replace(model={"mixer": type(mixer)(gau=mixer.gau, router=GumbelConfig())})
    heard = []

    def listen(done: int, model: torch.nn.Module) -> None:
        router = next(m for m in model.modules() if isinstance(m, GumbelSoftmax))
        heard.append(int(router.training_step))

    train(config, tmp_path, display=Spy(), on_step=listen)
    assert heard == [0, 1, 2, 3, 4, 5]


def test_layers_that_always_attend_show_as_such(tmp_path: Path) -> None:
    config = small_run(schedule={"steps": 4})
    mixer: Any = config.model.mixer
    config = config.replace(model={"mixer": type(mixer)(gau=mixer.gau, router=AlwaysActiveConfig())})
    spy = Spy()
    train(config, tmp_path, display=spy)
    assert all(record["activation"] == [1.0, 1.0] for record in spy.records)


def test_metrics_that_cannot_be_written_do_not_stop_a_run(tmp_path: Path) -> None:
    def harm(done: int, model: torch.nn.Module) -> None:
        if done == 2:
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").mkdir()

    spy = Spy()
    assert train(small_run(), tmp_path, display=spy, on_step=harm).exit_code == 0
    assert len([m for m in spy.messages if m.startswith("cannot write metrics")]) == 1


class FakeTracker(types.ModuleType):
    """Stands in for trackio and wandb, which share their interface."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.logged: list[tuple[dict[str, float], int]] = []
        self.began: dict[str, Any] = {}
        self.ended = False

    def init(self, **options: Any) -> None:
        self.began = options

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.ended = True


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_get_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, name, fake)
    train(small_run(schedule={"steps": 5}, training={"trackers": (name,)}), tmp_path / "run", display=Spy())
    assert fake.ended and fake.began == {"project": "seqboat", "name": "run"}
    assert [step for _, step in fake.logged] == [1, 2, 3, 4, 5, 5]
    assert {"train/loss", "train/lr", "train/activation/2"} <= fake.logged[0][0].keys()
    assert "val/accuracy" in fake.logged[-1][0]


def test_tensorboard_gets_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            written.append(folder)

        def add_scalar(self, *values: Any) -> None:
            written.append(values)

        def close(self) -> None:
            written.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    train(small_run(schedule={"steps": 4}, training={"trackers": ("tensorboard",)}), tmp_path, display=Spy())
    assert written[0] == str(tmp_path / "tensorboard") and written[-1] == "closed"
    assert [step for name, _, step in written[1:-1] if name == "train/loss"] == [1, 2, 3, 4]


def test_a_missing_tracker_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"trackers needs wandb: pip install wandb"):
        train(small_run(training={"trackers": ("wandb",)}), tmp_path, display=Spy())


def test_numbers_of_a_record() -> None:
    record = {"step": 3, "split": "train", "loss": 1.5, "accuracy": None, "activation": [0.5, None]}
    assert numbers(record) == {"train/loss": 1.5, "train/activation/1": 0.5}


def test_the_configuration_in_a_checkpoint_is_the_run_s(straight: Path) -> None:
    found = CheckpointStore(straight).newest()
    assert found is not None
    config: RunConfig = small_run()
    assert found.state["config"] == json.loads(json.dumps(to_dict(config)))


def test_memory_is_averaged_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation between steps raises the peak of the run, not the mean over the steps."""
    now = {"peak": 0}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: now["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.update(peak=0))
    meter = MemoryMeter(torch.device("cuda"))
    for allocated in (2**20, 3 * 2**20):
        meter.start_step()
        now["peak"] = allocated
        meter.end_step()
    assert meter.read() == {"memory_mb": 3, "step_memory_mb": 2}
    now["peak"] = 9 * 2**20  # an evaluation
    meter.start_step()
    now["peak"] = 4 * 2**20
    meter.end_step()
    assert meter.read() == {"memory_mb": 9, "step_memory_mb": 4}
    assert MemoryMeter(torch.device("cpu")).read().keys() == {"memory_mb"}


def newest_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
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
        averages = newest_tensors(tmp_path / str(number))[1]
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


def test_tf32_holds_during_the_run(tmp_path: Path) -> None:
    seen = []
    config = small_run().replace(
        training={"precision": "tf32"}, schedule={"steps": 2, "warmup_steps": 0}, evaluation={"limit": 2}
    )
    assert torch.get_float32_matmul_precision() == "highest"
    train(
        config,
        tmp_path / "run",
        display=Spy(),
        on_step=lambda *_: seen.append(torch.get_float32_matmul_precision()),
    )
    assert seen == ["high", "high"] and torch.get_float32_matmul_precision() == "highest"


def test_training_starts_from_the_backbone_of_a_run(tmp_path: Path) -> None:
    config = small_run().replace(schedule={"steps": 2, "warmup_steps": 0}, training={"save_every": 1})
    assert train(config, tmp_path / "source", display=Spy()).exit_code == 0
    other = small_run(ToyConfig(kind="match"), seed=5).replace(schedule={"steps": 2, "warmup_steps": 0})
    started = start_from(other, tmp_path / "source")
    source, seen = Run(tmp_path / "source").weights, dict[str, torch.Tensor]()

    def keep(taken: int, model: torch.nn.Module) -> None:
        seen.update({} if seen else {name: value.clone() for name, value in model.state_dict().items()})

    still = started.replace(optimizer={"lr": 1e-30, "weight_decay": 0.0})
    assert train(still, tmp_path / "run", display=Spy(), on_step=keep).exit_code == 0
    backbone = {name: value for name, value in source.items() if name.startswith("backbone.")}
    assert backbone and all(torch.allclose(seen[name], value, atol=1e-20) for name, value in backbone.items())
    assert not Run(Run(tmp_path / "run").pack(tmp_path / "packed")).config.start, "a folder of this machine"
    wide = started.replace(model={"d_model": 16})
    with pytest.raises(ValueError, match=r"source.*: backbone.embedding.weight must have shape \(8, 16\)"):
        train(wide, tmp_path / "wide", display=Spy())
    with pytest.raises(ValueError, match="nowhere is not the folder of a run"):
        start_from(other, "nowhere")


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
        "--no-python seqboat train lra.pathx --out runs/lra.pathx --resume --training.precision=bf16"
    )
    if signaled:
        assert code == 0 and lines[1:] == ["--signal=TERM 5.0", "saved", "requeue 5"]
    else:
        assert code == 3 and len(lines) == 1
