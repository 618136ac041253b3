"""Checkpoints: whole or not there, whatever goes wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from seqboat.data.files import Lock
from seqboat.training import checkpoint as ck
from seqboat.training.checkpoint import (
    MODEL,
    OPTIM,
    PHASES,
    STATE,
    CheckpointError,
    CheckpointStore,
    OtherFormat,
    load_model_tensors,
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    verify,
)


def content(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {
        MODEL: {"weight": torch.randn(20, 10, generator=generator), "count": torch.tensor(step)},
        OPTIM: {"weight/exp_avg": torch.randn(20, 10, generator=generator)},
    }


def save(store: CheckpointStore, step: int, **options: Any) -> None:
    store.save(step, content(step), {"progress": {"step": step}, "note": "é"}, **options)


def warnings_of(folder: Path) -> tuple[CheckpointStore, list[str]]:
    told: list[str] = []
    return CheckpointStore(folder, warn=told.append), told


def test_round_trip_and_pointers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, best=True)
    save(store, 2)
    found = store.newest()
    assert found is not None and found.step == 2 and found.state["note"] == "é"
    assert torch.equal(found.tensors(MODEL)["weight"], content(2)[MODEL]["weight"])
    best = store.best()
    assert best is not None and best.step == 1
    assert (store.pointed("latest"), store.pointed("best")) == (2, 1)
    assert sorted(p.name for p in found.path.iterdir()) == [MODEL, OPTIM, STATE]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 7):
        save(store, step, best=step == 2)
    assert store.steps() == [2, 5, 6]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize("name", [MODEL, OPTIM, STATE])
def test_one_flipped_byte_is_always_found(tmp_path: Path, name: str) -> None:
    store, told = warnings_of(tmp_path)
    save(store, 1)
    save(store, 2)
    path = store.path(2) / name
    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(80):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(damaged))
        told.clear()
        found = store.newest()
        assert found is not None and found.step == 1
        assert len(told) == 1 and str(path) in told[0] and "trying the checkpoint before it" in told[0]
    path.write_bytes(whole)
    found = store.newest()
    assert found is not None and found.step == 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("name", [MODEL, OPTIM, STATE])
@pytest.mark.parametrize("harm", [truncate, empty, Path.unlink])
def test_truncated_empty_and_missing_files_are_found(tmp_path: Path, name: str, harm: Any) -> None:
    store, told = warnings_of(tmp_path)
    save(store, 1)
    save(store, 2)
    harm(store.path(2) / name)
    found = store.newest()
    assert found is not None and found.step == 1
    assert name in told[0]


def test_an_extra_file_is_found(tmp_path: Path) -> None:
    store, told = warnings_of(tmp_path)
    save(store, 1)
    (store.path(1) / "extra.pkl").write_bytes(b"anything")
    assert store.newest() is None
    assert "extra.pkl does not belong to the checkpoint" in told[0]


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(ck, "FORMAT", 2)
    save(store, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2, this version reads 1"):
        verify(store.path(1))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint folder"):
        verify(tmp_path / "step-1")
    folder = tmp_path / "step-2"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"state.json cannot be read"):
        verify(folder)
    (folder / STATE).write_text("[]")
    with pytest.raises(CheckpointError, match="is not the state of a checkpoint"):
        verify(folder)
    # a pickle by any name is never opened: its name is not in the state
    (folder / STATE).write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify(folder)


def test_an_edited_format_is_damage_and_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    store = CheckpointStore(tmp_path, keep=9, warn=told.append)
    save(store, 1)
    save(store, 2)
    path = store.path(2) / STATE
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    found = store.newest()
    assert found is not None and found.step == 1 and "does not match its own sha256" in told[0]
    monkeypatch.setattr(ck, "FORMAT", 2)
    save(store, 3)
    monkeypatch.undo()
    for read in (store.newest, store.recover):
        with pytest.raises(OtherFormat, match=r"step-3/state.json has format 2.*another version of seqboat"):
            read()
    assert store.steps() == [1, 2, 3]


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("harm", ["truncate", "pipe", "folder", "not a folder"])
def test_nothing_whole_is_ever_deleted(
    tmp_path: Path, newest: bool, middle: bool, best: bool, harm: str
) -> None:
    """Checkpoints 2 (best), 4 and 6, damaged in every combination; then the run continues and saves more."""
    writer = CheckpointStore(tmp_path, keep=2)
    for step in (2, 4, 6):
        save(writer, step, best=step == 2)
    damaged = {step for step, bad in ((2, best), (4, middle), (6, newest)) if bad}
    for step in damaged:
        path = writer.path(step) / MODEL
        if harm == "truncate":
            truncate(path)
            continue
        path.unlink()
        if harm == "pipe":
            os.mkfifo(path)
        elif harm == "folder":
            path.mkdir()
        else:
            shutil.rmtree(writer.path(step))
            writer.path(step).write_text("x")
    told: list[str] = []
    store = CheckpointStore(tmp_path, keep=2, warn=told.append)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    if len(damaged) == 3:
        with pytest.raises(CheckpointError, match=r"has 3 checkpoints and none can be read \(.*step-6"):
            store.recover()
        assert sorted(entry.name for entry in tmp_path.iterdir()) == before
        return
    whole = {2, 4, 6} - damaged
    found = store.recover()
    assert found is not None and found.step == max(whole)
    assert set(store.steps()) == whole
    assert {entry.name for entry in tmp_path.glob("damaged-*")} == {f"damaged-step-{s}" for s in damaged}
    assert len(told) == len(damaged) and all("moved aside to damaged-step-" in line for line in told)
    step = found.step
    for _ in range(3):
        step += 1
        save(store, step)
        # the newest two and the best, as far as they were whole
        assert store.steps()[-1] == step and store.pointed("latest") == step
        assert verify(store.path(step)).step == step
        assert ({2} & whole) <= set(store.steps())
    assert len(set(store.steps()) - {2}) == 2


@pytest.mark.parametrize("damaged", [(3,), (2,), (2, 3), (1, 2, 3), (1,), (1, 3)], ids=str)
@pytest.mark.parametrize("harm", [truncate, empty, flip, Path.unlink])
def test_damage_while_the_run_continues(tmp_path: Path, damaged: tuple[int, ...], harm: Any) -> None:
    """What was damaged since it was written takes no place among the kept ones, and is not deleted either."""
    told: list[str] = []
    store = CheckpointStore(tmp_path, keep=3, warn=told.append)
    for step in (1, 2, 3):
        save(store, step)
    for step in damaged:
        harm(store.path(step) / MODEL)
    save(store, 4)
    whole = {1, 2, 3, 4} - set(damaged)
    assert set(store.steps()) == {1, 2, 3, 4} and len(told) == len(damaged)
    for step in whole:
        assert verify(store.path(step)).step == step
    for step in (5, 6, 7):
        save(store, step)
    # three newer ones: now the whole ones may go
    assert store.steps() == sorted([*damaged, 5, 6, 7]) and len(told) == len(damaged)


def test_files_that_were_only_touched_stay_whole(tmp_path: Path) -> None:
    told: list[str] = []
    store = CheckpointStore(tmp_path, keep=1, warn=told.append)
    save(store, 1, best=True)
    save(store, 2)
    os.utime(store.path(2) / MODEL, (1, 1))
    (tmp_path / "best").write_text("nonsense")
    save(store, 3)
    assert (store.steps(), told) == ([1, 3], [])


def test_moved_checkpoints_keep_a_run_from_starting_over(tmp_path: Path) -> None:
    store, _ = warnings_of(tmp_path)
    assert store.recover() is None
    save(store, 1)
    for _ in range(2):
        save(store, 2)
        truncate(store.path(2) / MODEL)
        store.recover()
    assert sorted(p.name for p in tmp_path.glob("damaged-*")) == ["damaged-step-2", "damaged-step-2-2"]
    shutil.rmtree(store.path(1))
    with pytest.raises(CheckpointError, match="2 checkpoints and none can be read"):
        store.recover()


def test_a_checkpoint_that_is_replaced_survives_a_kill(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    os.rename(store.path(1), tmp_path / f"{ck.OLD}step-1-99")  # where a process dies between two renames
    store.sweep()
    assert verify(store.path(1)).step == 1
    save(store, 1)
    assert store.steps() == [1] and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": []}, "has no valid 'files'"),
        ({"step": "x"}, "has no valid 'step'"),
        ({"step": 7}, "is of step 7, but its folder is step-1"),
        ({"progress": []}, "has no valid 'progress'"),
    ],
)
def test_sealed_nonsense_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = store.path(1) / STATE
    state = json.loads(path.read_text())
    del state["sha256"]
    path.write_text(ck._seal({**state, **change}))
    with pytest.raises(CheckpointError, match=message):
        verify(store.path(1))


def test_hostile_state_files_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = store.path(1) / STATE
    path.write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"state.json cannot be read: it is nested too deeply"):
        verify(store.path(1))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"state.json cannot be read: .* is not a file: it is"):
        verify(store.path(1))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is not a file: it is"):
        verify(store.path(1))
    path.unlink()
    with open(path, "wb") as file:
        file.truncate(ck.MAX_STATE + 1)
    with pytest.raises(CheckpointError, match="is too large"):
        verify(store.path(1))


def test_best_falls_back_to_the_newest(tmp_path: Path) -> None:
    store, told = warnings_of(tmp_path)
    save(store, 1, best=True)
    save(store, 2)
    empty(store.path(1) / MODEL)
    found = store.best()
    assert found is not None and found.step == 2
    assert "taking the newest checkpoint instead of the best" in told[0]


@pytest.mark.parametrize("phase", PHASES)
def test_a_failure_in_any_phase_leaves_whole_checkpoints(tmp_path: Path, phase: str) -> None:
    def fail(name: str) -> None:
        if armed and name == phase:
            raise OSError(errno.EIO, "broken disk")

    armed = False
    store = CheckpointStore(tmp_path, keep=1, on_phase=fail)
    save(store, 1)
    armed = True
    with pytest.raises(CheckpointError, match=r"cannot write .*step-2: .*broken disk"):
        save(store, 2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    found = CheckpointStore(tmp_path).newest()
    assert found is not None and found.step == (2 if phase in ("pointer", "prune") else 1)
    armed = False
    save(store, 3)
    assert CheckpointStore(tmp_path).steps() == [3]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import save
from seqboat.data.files import Lock
from seqboat.training.checkpoint import PHASES, CheckpointStore

def die(name):
    if name == phase and armed:
        os.kill(os.getpid(), signal.SIGKILL)

for phase in PHASES:
    folder = Path(sys.argv[1]) / phase
    folder.mkdir()
    if os.fork() == 0:
        armed = False
        with Lock(folder):
            store = CheckpointStore(folder, keep=1, on_phase=die)
            save(store, 1)
            armed = True
            save(store, 2, best=True)
        os._exit(0)
    status = os.wait()[1]
    print(phase, os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders in which a process was killed while it saved its second checkpoint, by phase."""
    folder = tmp_path_factory.mktemp("killed")
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), here], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:-1] == [f"{phase} -{signal.SIGKILL.value}" for phase in PHASES]
    return folder


@pytest.mark.parametrize("phase", PHASES)
def test_kill_in_any_phase_leaves_whole_checkpoints(killed: Path, phase: str) -> None:
    folder = killed / phase
    store, told = warnings_of(folder)
    # the lock of a dead process is taken over, what it left unfinished is swept
    with Lock(folder):
        store.sweep()
        assert not [p for p in folder.iterdir() if p.name.startswith(".")]
        found = store.newest()
        assert found is not None and found.step == (2 if phase in ("pointer", "prune") else 1)
        assert not told
        save(store, 3)
    assert verify(store.path(3)).step == 3


def test_disk_full_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError) as caught:
        save(store, 2)
    message = str(caught.value)
    assert "step-2: it needs 1,050," in message and "1,000 are free" in message and "\n" not in message
    assert store.steps() == [1] and verify(store.path(1)).step == 1


@pytest.mark.parametrize("kind", ["system", "safetensors"])
def test_disk_full_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    real = ck.save_file

    def full(tensors: Any, path: Path) -> None:
        if path.name == OPTIM:
            path.write_bytes(b"half of it")
            if kind == "system":
                raise OSError(errno.ENOSPC, "No space left on device")
            raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(tensors, path)

    monkeypatch.setattr(ck, "save_file", full)
    with pytest.raises(CheckpointError, match=r"no space for .*step-2.*older checkpoints are untouched"):
        save(store, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]
    assert verify(store.path(1)).step == 1


def test_a_full_volume(tmp_path: Path) -> None:
    """On a real small volume, where one can be mounted."""
    volume = tmp_path / "volume"
    volume.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(volume)]
    if (
        os.geteuid() != 0
        or shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("no right to mount a small volume")
    try:
        store = CheckpointStore(volume, keep=9)
        state: dict[str, Any] = {}
        big = {MODEL: {"weight": torch.zeros(300_000)}}
        store.save(1, big, state)
        with pytest.raises(CheckpointError, match=r"no space for .*: it needs 2,248,576 bytes"):
            store.save(2, big, state)
        # room by the first estimate, but not in the end
        ck_slack, ck.SLACK = ck.SLACK, -10_000_000
        try:
            with pytest.raises(CheckpointError, match="no space for"):
                store.save(3, {MODEL: {"weight": torch.zeros(900_000)}}, state)
        finally:
            ck.SLACK = ck_slack
        assert store.steps() == [1] and verify(store.path(1)).step == 1
        assert not [p for p in volume.iterdir() if p.name.startswith(".")]
    finally:
        subprocess.run(["umount", str(volume)], check=True)


def test_sweeping_leaves_everything_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / ".stage-9-123").mkdir()
    (tmp_path / ".latest-123").write_text("x")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".hidden").write_text("mine")
    store.sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "latest", "notes.txt", "step-1"]


def test_models_are_never_loaded_in_part() -> None:
    model = torch.nn.Linear(2, 3)
    before = model_tensors(model)
    before = {name: value.clone() for name, value in before.items()}
    good = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    for bad, message in (
        ({"weight": good["weight"]}, "the checkpoint lacks bias"),
        ({**good, "extra": torch.ones(1)}, "the model has no extra"),
        (
            {**good, "weight": torch.ones(2, 2)},
            r"weight must have shape \(3, 2\), the checkpoint has \(2, 2\)",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_model_tensors(model, bad)
        assert all(torch.equal(value, before[name]) for name, value in model_tensors(model).items())
    load_model_tensors(model, good)
    assert torch.equal(model.weight, good["weight"])


def test_shared_parameters_are_saved_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    saved = {name: value.clone() for name, value in model_tensors(model).items()}
    assert sorted(saved) == ["0.bias", "0.weight", "1.bias"]
    saved["0.weight"] += 1
    load_model_tensors(model, saved)
    weight: Any = model[1].weight
    assert torch.equal(weight, saved["0.weight"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam])
def test_optimizers_continue(kind: Any) -> None:
    def fresh() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, kind(list(model.named_parameters()), lr=0.1)

    def step(model: torch.nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        model(torch.arange(3.0) + number).square().sum().backward()
        optimizer.step()

    one, first = fresh()
    for number in range(6):
        step(one, first, number)
    two, second = fresh()
    for number in range(3):
        step(two, second, number)
    weights, memory = model_tensors(two), optimizer_tensors(second)
    assert sorted(memory)[0] == "bias/exp_avg"
    three, third = fresh()
    load_model_tensors(three, weights)
    load_optimizer_tensors(third, memory)
    for number in range(3, 6):
        step(three, third, number)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), three.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="the optimizer has no parameter other"):
        load_optimizer_tensors(third, {"other/exp_avg": torch.ones(1)})
