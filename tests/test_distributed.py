"""Two processes compute what one does: DDP and FSDP2 on the CPU, uneven batches, layers that activate nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqboat.tasks import TASKS
from seqboat.training.checkpoint import MODEL, OPTIM, CheckpointStore
from seqboat.training.config import RunConfig
from seqboat.training.loop import train
from seqboat.training.metrics import iterate_metrics
from seqboat.training.parallel import ProcessesError
from small_runs import Spy, ToyConfig, small_run, without_dropout

HERE = Path(__file__).parent


def run_config(**changes: Any) -> RunConfig:
    """12 steps over batches of 8, of which every sixth has 5 examples; saved at step 8."""
    config = without_dropout(small_run(training={"accumulation": 1}))
    config = config.replace(schedule={"steps": 12}, training={"save_every": 8, "keep": 9})
    return config.replace(**changes)


def stream_config() -> RunConfig:
    """A language model on eight streams of six segments."""
    lm = run_config(task=ToyConfig(kind="lm", count=48), training={"carry_state": True, "bucketing": False})
    mixer: Any = lm.model.mixer
    return lm.replace(model={"mixer": type(mixer)(gau=mixer.gau, causal=True)})


def batch_norm_config(**changes: Any) -> RunConfig:
    """The same with batch norms, and 41 examples: the last batch of an epoch has one, and a process has none."""
    config = run_config(task=ToyConfig(count=41), training={"bucketing": False})
    mixer: Any = config.model.mixer
    return config.replace(model={"mixer": replace(mixer, norm="batch")}).replace(**changes)


def nan_config(**changes: Any) -> RunConfig:
    """Batch norms and real inputs, of which those of the second process are NaN in some batches."""
    task = ToyConfig(count=48, length=3, real=True, nan_from=47)
    return batch_norm_config(task=task, schedule={"steps": 8}).replace(**changes)


def half_dead(done: int, model: torch.nn.Module) -> None:
    """From step 4 on, layer 2 of the second process activates no token, whatever its router has learned."""
    import torch.distributed as dist

    from seqboat.layers.routers import TemperedSoftmax

    if done == 4 and dist.is_initialized() and dist.get_rank() == 1:
        layer: Any = model.get_submodule("backbone.layers.1.sma.router")
        assert isinstance(layer, TemperedSoftmax)

        def silence(module: Any, args: Any, output: Any) -> Any:
            return output._replace(active=torch.zeros_like(output.active))

        layer.register_forward_hook(silence)


SCENARIOS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"training": {"distributed": "fsdp"}},
    "ddp-accumulation": {"training": {"accumulation": 2}},
    "fsdp-accumulation": {"training": {"distributed": "fsdp", "accumulation": 2}},
}
NORM_SCENARIOS: dict[str, dict[str, Any]] = {
    "norm-ddp": {},
    "norm-fsdp": {"training": {"distributed": "fsdp"}},
    "norm-checkpointing": {"training": {"gradient_checkpointing": True}},
}
NAN_SCENARIOS: dict[str, dict[str, Any]] = {
    "nan-ddp": {"training": {"accumulation": 2}},
    "nan-fsdp": {"training": {"accumulation": 2, "distributed": "fsdp"}},
}


def play(folder: Path) -> None:
    """What each of the two processes does."""
    TASKS["toy"] = ToyConfig
    ports = iter(os.environ["PORTS"].split(","))

    def go(name: str, config: RunConfig, **options: Any) -> None:
        os.environ["MASTER_PORT"] = next(ports)
        train(config, folder / name, display=Spy(), **options)

    for name, changes in SCENARIOS.items():
        go(name, run_config(**changes))
    for name, changes in NORM_SCENARIOS.items():
        go(name, batch_norm_config(**changes))
    for name, changes in NAN_SCENARIOS.items():
        go(name, nan_config(**changes))
    go("half-dead", run_config(), on_step=half_dead)
    # a run of one process continues in two
    go("resumed", run_config(), resume=True)
    go("resumed-fsdp", run_config(training={"distributed": "fsdp"}), resume=True)
    lm = stream_config()
    go("streams", lm)
    # and of one process, with its state
    go("streams-resumed", lm, resume=True)


def free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start(rank: int, folder: Path, ports: list[str], play: str = "play") -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ports[0],
        "PORTS": ",".join(ports),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    script = (
        "import sys; from pathlib import Path; import test_distributed; "
        f"test_distributed.{play}(Path(sys.argv[1]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def play_frozen(folder: Path) -> None:
    """One of the two processes stops for good after three steps."""
    TASKS["toy"] = ToyConfig

    def freeze(done: int, model: torch.nn.Module) -> None:
        if done == 3 and os.environ["RANK"] == os.environ["FROZEN"]:
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        train(run_config(training={"timeout": 4.0}), folder / "run", display=Spy(), on_step=freeze)
    except ProcessesError as error:
        print("SAID", error, flush=True)


@pytest.mark.parametrize("frozen", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_frozen_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: int) -> None:
    monkeypatch.setenv("FROZEN", str(frozen))
    ports = free_ports(1)
    processes = [start(rank, tmp_path, ports, "play_frozen") for rank in range(2)]
    try:
        output = processes[1 - frozen].communicate(timeout=60)[0]
        expected = (
            f"SAID rank {1 - frozen} of 2 waited more than 4 s or lost its connection: no answer from rank "
        )
        assert expected + str(frozen) in output, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "toy", ToyConfig)
        train(run_config(), folder, display=Spy())
    return folder


@pytest.fixture(scope="module")
def alone_with_norms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with batch norms."""
    folder = tmp_path_factory.mktemp("norms") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "toy", ToyConfig)
        train(batch_norm_config(), folder, display=Spy())
    return folder


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that carries its state."""
    folder = tmp_path_factory.mktemp("streams") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "toy", ToyConfig)
        train(stream_config(), folder, display=Spy())
    return folder


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, alone: Path, streams: Path) -> Path:
    """The runs of two processes."""
    folder = tmp_path_factory.mktemp("played")
    for name in ("resumed", "resumed-fsdp"):
        (folder / name).mkdir()
        shutil.copytree(alone / "step-8", folder / name / "step-8")
    (folder / "streams-resumed").mkdir()
    shutil.copytree(streams / "step-8", folder / "streams-resumed" / "step-8")
    ports = free_ports(len(SCENARIOS) + len(NORM_SCENARIOS) + len(NAN_SCENARIOS) + 5)
    processes = [start(rank, folder, ports) for rank in range(2)]
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    # no complaint about parameters that some process did not use
    assert not any("find_unused_parameters" in output for output in outputs)
    return folder


def values(folder: Path, name: str, split: str = "train") -> list[float]:
    return [r[name] for r in iterate_metrics(folder / "metrics.jsonl") if r["split"] == split]


@pytest.mark.parametrize("name", SCENARIOS)
def test_losses_are_those_of_one_process(alone: Path, played: Path, name: str) -> None:
    ours, theirs = values(played / name, "loss"), values(alone, "loss")
    assert len(ours) == 12
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert values(played / name, "grad_norm") == pytest.approx(values(alone, "grad_norm"), rel=1e-3)
    assert values(played / name, "accuracy") == values(alone, "accuracy")
    assert values(played / name, "epoch") == values(alone, "epoch")


@pytest.mark.parametrize("name", SCENARIOS)
def test_scores_are_those_of_one_process(alone: Path, played: Path, name: str) -> None:
    # 45 examples in batches of 16: the last one is uneven
    for metric in ("loss", "accuracy"):
        assert values(played / name, metric, "val") == pytest.approx(values(alone, metric, "val"), abs=1e-5)
    rates = values(played / name, "activation")
    for ours, theirs in zip(rates, values(alone, "activation"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("name", SCENARIOS)
def test_checkpoints_hold_whole_tensors(alone: Path, played: Path, name: str) -> None:
    ours, theirs = CheckpointStore(played / name).newest(), CheckpointStore(alone).newest()
    assert ours is not None and theirs is not None
    for file in (MODEL, OPTIM):
        one, two = ours.tensors(file), theirs.tensors(file)
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(one[key], two[key], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", NORM_SCENARIOS)
def test_batch_norms_are_those_of_one_process(alone_with_norms: Path, played: Path, name: str) -> None:
    ours, theirs = values(played / name, "loss"), values(alone_with_norms, "loss")
    assert len(ours) == 12 and ours == pytest.approx(theirs, abs=1e-5)
    for metric in ("loss", "accuracy"):
        scores = values(played / name, metric, "val"), values(alone_with_norms, metric, "val")
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    one, two = CheckpointStore(played / name).newest(), CheckpointStore(alone_with_norms).newest()
    assert one is not None and two is not None
    averages = {key: value for key, value in two.tensors(MODEL).items() if "running" in key}
    assert len(averages) == 4
    for key, value in averages.items():
        torch.testing.assert_close(one.tensors(MODEL)[key], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAN_SCENARIOS)
def test_bad_inputs_of_one_process_are_found_by_all(played: Path, name: str) -> None:
    skipped = [r for r in iterate_metrics(played / name / "metrics.jsonl") if r["split"] == "skipped"]
    # example 47 comes once in an epoch of six batches
    assert 1 <= len(skipped) <= 2
    for record in skipped:
        assert record["trouble"] == "the inputs are not finite"
        assert 47 in record["examples"] and len(record["examples"]) == 8


@pytest.mark.parametrize("name", ["resumed", "resumed-fsdp"])
def test_a_run_of_one_process_goes_on_in_two(alone: Path, played: Path, name: str) -> None:
    assert values(played / name, "loss") == pytest.approx(values(alone, "loss")[8:], abs=1e-5)


def test_a_run_of_two_processes_goes_on_in_one(
    alone: Path, played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    shutil.copytree(played / "fsdp" / "step-8", tmp_path / "step-8")
    spy = Spy()
    train(run_config(), tmp_path, resume=True, display=spy)
    assert spy.losses == pytest.approx(values(alone, "loss")[8:], abs=1e-5)


def test_a_process_whose_layer_activates_nothing(alone: Path, played: Path) -> None:
    losses = values(played / "half-dead", "loss")
    assert len(losses) == 12 and losses[:4] == pytest.approx(values(alone, "loss")[:4], abs=1e-5)
    # it did make a difference
    assert losses[4:] != pytest.approx(values(alone, "loss")[4:], abs=1e-5)


def test_carried_states_are_those_of_one_process(played: Path, streams: Path) -> None:
    assert values(played / "streams", "loss") == pytest.approx(values(streams, "loss"), abs=1e-5)
    assert values(played / "streams", "bits", "val") == pytest.approx(
        values(streams, "bits", "val"), abs=1e-5
    )
    # in the middle of an epoch of six batches
    resumed = values(played / "streams-resumed", "loss")
    assert resumed == pytest.approx(values(streams, "loss")[8:], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
        ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--main_process_port"],
    ],
    ids=["torchrun", "accelerate"],
)
def test_launchers(tmp_path: Path, launcher: list[str], method: str) -> None:
    from test_evaluate import RECALL

    port = free_ports(1)[0]
    losses = []
    fields = [*RECALL, "--training.log_every=1", f"--training.distributed={method}"]
    commands: list[tuple[str, list[str]]] = [("one", []), ("two", [*launcher, port])]
    for name, prefix in commands:
        out = tmp_path / name
        command = [sys.executable, *prefix, "-m", "seqboat"]
        done = subprocess.run(
            [*command, "train", "recall", "--out", str(out), *fields],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        losses.append(values(out, "loss"))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
