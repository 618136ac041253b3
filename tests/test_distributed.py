"""Several processes compute what one does: DDP, FSDP2 and hybrid sharding, uneven batches, hosts that are lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from seqboat.data.files import Lock
from seqboat.tasks import TASKS
from seqboat.training import parallel
from seqboat.training.checkpoint import MODEL, OPTIM, CheckpointStore, verify
from seqboat.training.config import RunConfig
from seqboat.training.parallel import ProcessesError, choose_device
from seqboat.training.record import iterate_metrics
from seqboat.training.trainer import train
from small_runs import Spy, ToyConfig, small_run, without_dropout

HERE = Path(__file__).parent
STEPS = 20


def run_config(**changes: Any) -> RunConfig:
    """20 steps over batches of 8, of which every sixth has 5 examples; saved at step 8 and 16."""
    config = without_dropout(small_run(training={"accumulation": 1}))
    config = config.replace(schedule={"steps": STEPS}, training={"save_every": 8, "keep": 9})
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


def sharded(method: str, **changes: Any) -> dict[str, Any]:
    return {"training": {"distributed": method, **changes}}


SCENARIOS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": sharded("fsdp"),
    "ddp-accumulation": {"training": {"accumulation": 2}},
    "fsdp-accumulation": sharded("fsdp", accumulation=2),
}
NORM_SCENARIOS: dict[str, dict[str, Any]] = {
    "norm-ddp": {},
    "norm-fsdp": sharded("fsdp"),
    "norm-checkpointing": {"training": {"gradient_checkpointing": True}},
}
NAN_SCENARIOS: dict[str, dict[str, Any]] = {
    "nan-ddp": {"training": {"accumulation": 2}},
    "nan-fsdp": sharded("fsdp", accumulation=2),
}
FOUR: dict[str, dict[str, Any]] = {
    "four-ddp": {},
    "four-fsdp": sharded("fsdp"),
    "four-hybrid": sharded("hybrid"),
}


def play(folder: Path) -> None:
    """What each of the two or four processes does."""
    TASKS["toy"] = ToyConfig
    ports = iter(os.environ["PORTS"].split(","))

    def go(name: str, config: RunConfig, **options: Any) -> None:
        os.environ["MASTER_PORT"] = next(ports)
        train(config, folder / name, display=Spy(), **options)

    if os.environ["WORLD_SIZE"] == "4":
        for name, changes in FOUR.items():
            go(name, run_config(**changes))
        # two processes wrote the checkpoint
        go("resumed-four", run_config(**sharded("hybrid")), resume=True)
        return
    for name, changes in SCENARIOS.items():
        go(name, run_config(**changes))
    for name, changes in NORM_SCENARIOS.items():
        go(name, batch_norm_config(**changes))
    for name, changes in NAN_SCENARIOS.items():
        go(name, nan_config(**changes))
    go("half-dead", run_config(), on_step=half_dead)
    # a run of one process continues in two
    go("resumed", run_config(), resume=True)
    go("resumed-fsdp", run_config(**sharded("fsdp")), resume=True)
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


def start(
    rank: int, folder: Path, ports: list[str], play: str = "play", size: int = 2
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": "2",
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


def quick_watch() -> None:
    """Lost ranks are missed after seconds."""
    parallel.BEAT, parallel.SILENCE = 0.2, 10.0


def play_frozen(folder: Path) -> None:
    """One of the two processes stops for good after three steps."""
    TASKS["toy"] = ToyConfig
    quick_watch()

    def freeze(done: int, model: torch.nn.Module) -> None:
        if done == 3 and os.environ["RANK"] == os.environ["FROZEN"]:
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))

    try:
        train(run_config(), folder / "run", display=Spy(), on_step=freeze)
    except ProcessesError as error:
        print("SAID", error, flush=True)
        raise SystemExit(1) from error


def test_a_watch_that_ended_has_left_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is in there when the process exits aborts it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    before = set(threading.enumerate())
    watch = parallel.Watch(0, 2)
    started = set(threading.enumerate()) - before
    assert len(started) == 2 and watch.lost(60.0) == []
    watch.end()
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize(
    ("number", "lost"), [("SIGSTOP", 1), pytest.param("SIGSTOP", 0, marks=pytest.mark.slow), ("SIGKILL", 1)]
)
def test_a_lost_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, lost: int
) -> None:
    monkeypatch.setenv("FROZEN", str(lost))
    monkeypatch.setenv("SIGNAL", number)
    ports = free_ports(1)
    processes = [start(rank, tmp_path, ports, "play_frozen") for rank in range(2)]
    try:
        output = processes[1 - lost].communicate(timeout=100)[0]
        assert processes[1 - lost].returncode == 1
        assert f"rank {1 - lost} of 2" in output and f"no answer from rank {lost}" in output, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def play_alone(folder: Path) -> None:
    """What each rank under a launcher does that will be killed."""
    TASKS["toy"] = ToyConfig

    def note(done: int, model: torch.nn.Module) -> None:
        (folder / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))

    train(run_config(task=ToyConfig(slow=0.2)), folder / "run", display=Spy(), on_step=note)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    code = "import sys, pathlib, test_distributed as t; t.play_alone(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen(
        [
            *f"{sys.executable} -P -m torch.distributed.run --standalone --nproc-per-node 2 --no-python".split(),
            *(sys.executable, "-c", code, str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    notes = [tmp_path / f"rank-{rank}" for rank in range(2)]
    ends = time.monotonic() + 300
    while not all(note.exists() and note.read_text() for note in notes) and time.monotonic() < ends:
        time.sleep(0.2)
    ranks = [int(note.read_text()) for note in notes]
    launcher.kill()
    launcher.wait()
    try:
        ends = time.monotonic() + 60
        while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < ends:
            time.sleep(0.2)
        assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    finally:
        for rank in ranks:
            if Path(f"/proc/{rank}").exists():
                os.kill(rank, signal.SIGKILL)
    with Lock(tmp_path / "run"):
        pass


class Stop(Exception):
    """The model would be made now."""


def test_every_rank_takes_its_gpu_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for GPUs that records what is asked of them."""
    calls: list[Any] = []
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", str(device))))

    def init(backend: str, device_id: torch.device, timeout: timedelta) -> None:
        calls.append(("init", backend, str(device_id), timeout))

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: None)
    monkeypatch.setattr(parallel, "Watch", lambda rank, size: types.SimpleNamespace(end=lambda: None))

    def build(*_: Any, **__: Any) -> None:
        calls.append("model")
        raise Stop

    monkeypatch.setattr(RunConfig, "build_model", build)
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    with pytest.raises(Stop):
        train(run_config(), tmp_path / "run", display=Spy())
    assert calls == [
        ("set_device", "cuda:1"),
        ("init", "cpu:gloo,cuda:nccl", "cuda:1", timedelta(minutes=30)),
        "model",
        "destroy",
    ]
    with pytest.raises(ValueError, match="must be cuda without a number under torchrun"):
        choose_device("cuda:0", 1)
    with pytest.raises(
        ValueError, match="there are 4 GPUs, and this is process 5 here: torchrun --nproc-per-node 4"
    ):
        choose_device("cuda", 4)


def test_objects_travel_over_gloo_beside_gpus() -> None:
    """With a backend for each kind of device, objects take that of the CPU: there is no GPU here to take."""
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = parallel.World(0, 2, torch.device("cpu"))
        assert world.broadcast({"a": 1}) == {"a": 1} and world.gather(["b"]) == ["b"]
        with pytest.raises(KeyError, match="c"):
            world.agree(KeyError("c"))
    finally:
        dist.destroy_process_group()


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


def values(folder: Path, name: str, split: str = "train") -> list[float]:
    return [r[name] for r in iterate_metrics(folder / "metrics.jsonl") if r["split"] == split]


def play_all(folder: Path, size: int, runs: int) -> None:
    ports = free_ports(runs)
    processes = [start(rank, folder, ports, size=size) for rank in range(size)]
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(outputs)
    # no complaint about parameters that some process did not use
    assert not any("find_unused_parameters" in output for output in outputs)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, alone: Path, streams: Path) -> Path:
    """The runs of two processes."""
    folder = tmp_path_factory.mktemp("played")
    for name in ("resumed", "resumed-fsdp"):
        (folder / name).mkdir()
        shutil.copytree(alone / "step-8", folder / name / "step-8")
    (folder / "streams-resumed").mkdir()
    shutil.copytree(streams / "step-8", folder / "streams-resumed" / "step-8")
    play_all(folder, 2, len(SCENARIOS) + len(NORM_SCENARIOS) + len(NAN_SCENARIOS) + 5)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, played: Path) -> Path:
    """The runs of four processes on two hosts."""
    folder = tmp_path_factory.mktemp("four")
    (folder / "resumed-four").mkdir()
    shutil.copytree(played / "fsdp" / "step-8", folder / "resumed-four" / "step-8")
    play_all(folder, 4, len(FOUR) + 1)
    return folder


@pytest.fixture(scope="module")
def place(played: Path, four: Path) -> Callable[[str], Path]:
    """The folder of a run."""
    return lambda name: (four if name in FOUR else played) / name


@pytest.mark.parametrize("name", [*SCENARIOS, *FOUR])
def test_losses_are_those_of_one_process(alone: Path, place: Callable[[str], Path], name: str) -> None:
    ours, theirs = values(place(name), "loss"), values(alone, "loss")
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert values(place(name), "grad_norm") == pytest.approx(values(alone, "grad_norm"), rel=1e-3)
    assert values(place(name), "accuracy") == values(alone, "accuracy")
    assert values(place(name), "epoch") == values(alone, "epoch")


@pytest.mark.parametrize("name", [*SCENARIOS, *FOUR])
def test_scores_are_those_of_one_process(alone: Path, place: Callable[[str], Path], name: str) -> None:
    # 45 examples in batches of 16: the last one is uneven
    for metric in ("loss", "accuracy"):
        assert values(place(name), metric, "val") == pytest.approx(values(alone, metric, "val"), abs=1e-5)
    rates = values(place(name), "activation")
    for ours, theirs in zip(rates, values(alone, "activation"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("name", [*SCENARIOS, *FOUR])
def test_checkpoints_hold_whole_tensors(alone: Path, place: Callable[[str], Path], name: str) -> None:
    folder = place(name)
    newest, theirs = CheckpointStore(folder).newest(), CheckpointStore(alone).newest()
    first = verify(folder / "step-8")
    assert newest is not None and theirs is not None
    # sharded while the run goes on; whole files at its end
    assert first.sharded == ("fsdp" in name or "hybrid" in name) and not newest.sharded
    for ours, other in ((newest, theirs), (first, verify(alone / "step-8"))):
        for file in (MODEL, OPTIM):
            one, two = ours.tensors(file), other.tensors(file)
            assert one.keys() == two.keys()
            for key in one:
                torch.testing.assert_close(one[key], two[key], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", NORM_SCENARIOS)
def test_batch_norms_are_those_of_one_process(alone_with_norms: Path, played: Path, name: str) -> None:
    ours, theirs = values(played / name, "loss"), values(alone_with_norms, "loss")
    assert len(ours) == STEPS and ours == pytest.approx(theirs, abs=1e-5)
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


@pytest.mark.parametrize("name", ["resumed", "resumed-fsdp", "resumed-four"])
def test_a_run_goes_on_in_more_processes(alone: Path, played: Path, four: Path, name: str) -> None:
    folder = (four if name == "resumed-four" else played) / name
    assert values(folder, "loss") == pytest.approx(values(alone, "loss")[8:], rel=1e-6)


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
    assert len(losses) == STEPS and losses[:4] == pytest.approx(values(alone, "loss")[:4], abs=1e-5)
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
def test_torchrun(tmp_path: Path, method: str) -> None:
    from test_evaluate import RECALL

    losses = []
    fields = [*RECALL, "--training.log_every=1", f"--training.distributed={method}"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_ports(1)[0]]
    for name, prefix in (("one", []), ("two", [*torchrun, "--no-python", sys.executable])):
        command = [sys.executable, *prefix, "-m", "seqboat", "train", "recall", "--out", str(tmp_path / name)]
        done = subprocess.run(
            [*command, *fields],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        losses.append(values(tmp_path / name, "loss"))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


# two hosts: network namespaces with a cable between them

HOSTS = ("seqboat-a", "seqboat-b")
ADDRESSES = ("10.83.47.1", "10.83.47.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces, each with an address; skipped where they are not permitted."""
    if (
        shutil.which("ip") is None
        or subprocess.run(["ip", "netns", "add", HOSTS[0]], capture_output=True).returncode
    ):
        pytest.skip("no right to make network namespaces (ip netns)")
    try:
        ip("netns", "add", HOSTS[1])
        ip("-n", HOSTS[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", host, "link", "set", device, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def host_config() -> RunConfig:
    return run_config(**sharded("hybrid", save_every=4, workers=0, device="cpu"))


def play_host(folder: Path) -> None:
    """What each rank of each host does."""
    TASKS["toy"] = ToyConfig
    quick_watch()

    def slow(done: int, model: torch.nn.Module) -> None:
        time.sleep(float(os.environ["SLOW"]))

    train(host_config(), folder, resume=True, display=Spy(), on_step=slow)


def on_hosts(folder: Path, ranks: int, slow: float) -> list[subprocess.Popen[str]]:
    """torchrun on both hosts."""
    code = "import sys, pathlib, test_distributed as t; t.play_host(pathlib.Path(sys.argv[1]))"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "cable",
        "SLOW": str(slow),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    return [
        subprocess.Popen(
            [
                *f"ip netns exec {host} {sys.executable} -m torch.distributed.run --nnodes 2".split(),
                *f"--nproc-per-node {ranks // 2} --rdzv-backend c10d --rdzv-id test".split(),
                # torchrun looks for its address under the name of the machine, which both hosts share
                *("--rdzv-conf", f"is_host={int(host == HOSTS[0])}"),
                *f"--rdzv-endpoint {ADDRESSES[0]}:29400 --local-addr {address} --no-python".split(),
                *(sys.executable, "-c", code, str(folder)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, address in zip(HOSTS, ADDRESSES, strict=True)
    ]


@pytest.mark.slow
def test_a_host_is_lost_and_comes_back(tmp_path: Path, hosts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    train(host_config(), tmp_path / "alone", display=Spy())
    whole = values(tmp_path / "alone", "loss")
    folder = tmp_path / "run"
    running = on_hosts(folder, 4, slow=1.0)
    try:
        ends = time.monotonic() + 300
        while not (folder / "step-4").exists() and time.monotonic() < ends:
            time.sleep(0.1)
        assert (folder / "step-4").exists()
        ip("-n", HOSTS[1], "link", "set", "cable", "down")
        outputs = []
        for process in running:
            try:
                outputs.append(process.communicate(timeout=100)[0])
            except subprocess.TimeoutExpired:
                # its ranks have ended; torchrun itself waits for the store on the other host
                process.kill()
                outputs.append(process.communicate(timeout=60)[0])
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode for process in running)
    assert "no answer from rank 2, 3" in outputs[0], outputs[0]
    assert "no answer from rank 0" in outputs[1], outputs[1]
    ip("-n", HOSTS[1], "link", "set", "cable", "up")
    shutil.copytree(folder, tmp_path / "two")
    for name, ranks in (("run", 4), ("two", 2)):
        again = on_hosts(tmp_path / name, ranks, slow=0.0)
        outputs = [process.communicate(timeout=300)[0] for process in again]
        assert [process.returncode for process in again] == [0, 0], "\n".join(outputs)
        assert values(tmp_path / name, "loss") == pytest.approx(whole, rel=1e-6)
