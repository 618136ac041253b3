"""The order of batches, its sharing among processes, and workers that fail."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch

from seqboat.training.loader import (
    POOL,
    LoaderError,
    Part,
    Plan,
    batches,
    check_lengths,
    micro_batches,
    shuffled,
    split_batch,
)
from small_runs import ToyConfig


def flat(epoch: list[Any]) -> list[int]:
    return [int(i) for batch in epoch for i in batch]


@pytest.mark.parametrize(("count", "size", "passage"), [(45, 2, 5), (100, 8, 3), (8, 8, 1), (24, 4, 6)])
def test_streams_read_passages_in_random_order(count: int, size: int, passage: int) -> None:
    plan = Plan(count, size, 3, streams=True, passage=passage)
    epoch = np.array(plan.epoch(0))
    assert epoch.shape == (plan.per_epoch, size) and plan.per_epoch == count // (size * passage) * passage
    assert len(set(epoch.flat)) == epoch.size, "no window twice"
    for step, batch in enumerate(epoch):
        anew = plan.starts_anew(step)
        assert anew == (step % passage == 0)
        if anew:
            assert not (batch % passage).any(), "passages begin where they begin in the text"
        else:
            assert (batch == epoch[step - 1] + 1).all()
    assert plan.starts_anew(plan.per_epoch), "an epoch begins with a passage"
    if count > size * passage:
        assert flat(plan.epoch(1)) != epoch.flatten().tolist()


def test_passages_of_a_short_text_are_shorter() -> None:
    plan = Plan(11, 3, 0, streams=True, passage=99)
    epoch = np.array(plan.epoch(0))
    assert epoch.shape == (3, 3) and sorted(epoch.flat) == list(range(9))
    assert [plan.starts_anew(step) for step in range(4)] == [True, False, False, True]


def test_passages_of_one_window_are_random_segments() -> None:
    streams, free = Plan(24, 4, 3, streams=True, passage=1), Plan(24, 4, 3)
    assert flat(streams.epoch(2)) == flat(free.epoch(2))
    assert all(streams.starts_anew(step) for step in range(12))


@pytest.mark.parametrize("bucketing", [False, True])
@pytest.mark.parametrize(("count", "size"), [(45, 8), (8, 8), (3, 8), (1, 1), (1000, 7)])
def test_an_epoch_holds_every_example_once(count: int, size: int, bucketing: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 99, count) if bucketing else None
    plan = Plan(count, size, 3, lengths)
    for number in (0, 1, 5):
        epoch = plan.epoch(number)
        assert sorted(flat(epoch)) == list(range(count))
        assert len(epoch) == plan.per_epoch == -(-count // size)
        assert sorted(len(b) for b in epoch)[1:] == [size] * (len(epoch) - 1) or count < size


def test_order_is_a_function_of_seed_and_step_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 99, 100)
    one, two = (Plan(100, 8, 3, lengths) for _ in range(2))
    # asked for in any order, by a fresh plan or a used one
    assert [one.batch(s).tolist() for s in (30, 2, 13)] == [two.batch(s).tolist() for s in (30, 2, 13)]
    assert flat(one.epoch(0)) != flat(one.epoch(1))
    assert flat(one.epoch(0)) != flat(Plan(100, 8, 4, lengths).epoch(0))


def test_the_permutation_never_changes() -> None:
    # written down once: a run of another version of numpy must see the same order
    assert shuffled(10, 1, 2, 3).tolist() == [1, 8, 2, 4, 6, 5, 0, 9, 7, 3]


def test_bucketing_puts_similar_lengths_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 2000)
    spread = [np.mean([np.ptp(lengths[b]) for b in Plan(2000, 10, 0, by).epoch(0)]) for by in (None, lengths)]
    assert spread[1] < spread[0] / 10
    # and the batches of a pool do not come in the order of their lengths
    means = [lengths[b].mean() for b in Plan(2000, 10, 0, lengths).epoch(0)[:POOL]]
    assert means != sorted(means)


def test_streams_continue_from_batch_to_batch() -> None:
    plan = Plan(11, 3, 0, streams=True)
    assert [b.tolist() for b in plan.epoch(0)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert plan.batch(3).tolist() == [0, 3, 6]
    with pytest.raises(ValueError, match="4 streams need at least as many windows of text, got 3"):
        Plan(3, 4, 0, streams=True)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_of_a_batch_are_the_batch(parts: int) -> None:
    batch = [5, 3, 9, 1, 4]
    shared = split_batch(batch, parts)
    assert len(shared) == parts
    assert [i for part in shared if part.counted for i in part.examples] == batch
    assert all(part.examples for part in shared)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_micro_batches_stay_within_their_tokens(processes: int, accumulation: int) -> None:
    lengths = np.array([3, 100, 4, 5, 90, 6, 7, 8, 2, 50, 3, 4])
    batch = list(range(12))
    shared = micro_batches(batch, processes, accumulation, lengths, 100)
    assert len(shared) == processes and len({len(mine) for mine in shared}) == 1
    counted = [part for mine in shared for part in mine if part.counted]
    assert sorted(i for part in counted for i in part.examples) == batch
    assert all(len(p.examples) * max(lengths[list(p.examples)]) <= 100 for mine in shared for p in mine)
    # nothing changes where nothing is too large
    assert micro_batches(batch, processes, accumulation, lengths, 10**6) == micro_batches(
        batch, processes, accumulation
    )
    with pytest.raises(
        ValueError, match=r"train example 1 has 100 tokens, more than training.max_tokens = 99: cut long"
    ):
        check_lengths(lengths, 99, "train")


def test_bad_plans_are_named() -> None:
    with pytest.raises(ValueError, match="number of examples must be an integer >= 1, got 0"):
        Plan(0, 4, 0)
    with pytest.raises(ValueError, match="lengths must hold one entry for each of 5 examples"):
        Plan(5, 4, 0, np.ones(4, dtype=np.int64))


def read(config: ToyConfig, parts: list[Part], workers: int, timeout: float = 20.0) -> list[Any]:
    task = config.build()
    return list(batches(task, task.dataset("train"), "train", iter(parts), workers, timeout))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    parts = [Part((i, i + 1, i + 2), True) for i in range(8)]
    for one, two in zip(read(ToyConfig(), parts, 0), read(ToyConfig(), parts, workers), strict=True):
        assert one.part == two.part
        assert torch.equal(one.batch.inputs, two.batch.inputs)
        assert torch.equal(one.batch.targets, two.batch.targets)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_record_is_named_in_one_line(workers: int) -> None:
    parts = [Part((0, 1), True), Part((2, 3), True)]
    with pytest.raises(LoaderError) as caught:
        read(ToyConfig(bad=(3,)), parts, workers)
    assert str(caught.value) == "dataset toy, split train, record 3: OSError: bad sector"


def test_reading_leaves_the_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    read(ToyConfig(), [Part((0,), True)], 1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_killed_worker_is_reported() -> None:
    task = ToyConfig(slow=0.5).build()
    parts = (Part((i,), True) for i in range(1000))
    source = batches(task, task.dataset("train"), "train", parts, 1, 30.0)
    next(source)
    child = _children()[-1]
    threading.Timer(0.25, os.kill, (child, signal.SIGKILL)).start()
    with pytest.raises(
        LoaderError, match=r"dataset toy, split train, records \[\d+\]: (DataLoader worker|.*[Cc]onnection)"
    ):
        for _ in source:
            pass


def test_a_connection_that_stays_broken_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __next__(self) -> object:
            raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", lambda self: Broken())
    with pytest.raises(
        LoaderError, match=r"dataset toy, split train, records \[\]: .*Connection reset by peer"
    ):
        read(ToyConfig(), [Part((1,), True)], 1)


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits this long for each of its workers to end."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.mark.usefixtures("quick_checks")
def test_a_hanging_worker_is_given_up() -> None:
    with pytest.raises(LoaderError, match=r"dataset toy, split train, records \[1\]: DataLoader timed out"):
        read(ToyConfig(slow=30.0), [Part((1,), True)], 1, timeout=0.5)


def _children() -> list[int]:
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children") as file:
        return [int(pid) for pid in file.read().split()]
