"""Standard seconds: what a probe makes of processor time, and what a run keeps of its probes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from seqboat.paper.studies import clock
from seqboat.paper.studies.budget import standard_step
from seqboat.paper.studies.clock import STANDARD, Probe, Probes, StandardClock
from seqboat.paper.target import per_step
from seqboat.run import Run
from seqboat.tasks import TASKS
from seqboat.training.display import Display
from seqboat.training.loop import train
from small_runs import ToyConfig, small_run


class Machine:
    """A machine whose processor time passes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.probe_seconds = 100.0, STANDARD
        monkeypatch.setattr(clock.time, "process_time", lambda: self.now)
        monkeypatch.setattr(Probe, "__call__", self.probe)

    def probe(self, *_: object) -> float:
        self.now += self.probe_seconds
        return self.probe_seconds

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_on_the_standard_core_a_second_is_a_second(machine: Machine) -> None:
    timer = StandardClock()
    for total in (1.0, 2.0, 3.0):
        machine.work(1.0)
        assert timer() == pytest.approx(total), "probes are not counted"


def test_on_a_busy_core_a_second_is_worth_less(machine: Machine) -> None:
    timer = StandardClock()
    machine.probe_seconds = 3 * STANDARD
    machine.work(1.0)
    assert timer() == pytest.approx(1 / 2), "between a probe of one and a probe of three"
    machine.work(1.0)
    assert timer() == pytest.approx(1 / 2 + 1 / 3)


def test_a_probe_takes_time_and_leaves_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    probe = Probe()
    with torch.no_grad():  # wherever it is called
        assert probe() > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_probes_are_spread_over_a_run_and_spare_evaluations(machine: Machine, tmp_path: Path) -> None:
    config = small_run().replace(schedule={"steps": 200}, evaluation={"every": 50})
    probes = Probes(tmp_path, config)
    for step in range(1, 201):
        machine.probe_seconds = 2 * STANDARD if step <= 100 else 4 * STANDARD
        probes(step, nn.Identity())
    assert len(probes.taken()) == 36, "each fifth step, without four evaluations"
    assert probes.slowdown() == pytest.approx(3.0)
    # of 10 s per 200 steps, 36 probes took 1.08 s
    assert probes.standard_step(0.05) == pytest.approx((0.05 - 1.08 / 200) / 3)


def test_short_runs_have_a_probe(tmp_path: Path) -> None:
    for number, steps in enumerate((2, 3, 6)):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = small_run().replace(
            schedule={"steps": steps, "warmup_steps": 1}, evaluation={"every": max(steps // 3, 2)}
        )
        probes = Probes(folder, config)
        for step in range(1, steps + 1):
            probes(step, nn.Identity())
        assert len(probes.taken()) >= 1


def test_a_run_that_was_killed_counts_repeated_steps_once(machine: Machine, tmp_path: Path) -> None:
    config = small_run().replace(schedule={"steps": 10}, evaluation={"every": 10})
    assert Probes(tmp_path, config).slowdown() is None
    before = Probes(tmp_path, config)
    for step in range(1, 6):
        before(step, nn.Identity())
    with (tmp_path / clock.FILE).open("a") as file:
        file.write('[6, 0.0\n{"half a line')
    machine.probe_seconds = 3 * STANDARD
    after = Probes(tmp_path, config)
    for step in range(4, 10):
        after(step, nn.Identity())
    # the repeated step 4 is lost with the half line, step 5 is replaced, 6 to 9 are new
    assert after.taken() == [STANDARD] * 4 + [3 * STANDARD] * 5


def test_a_run_knows_its_standard_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of 1 ms in a real run, on a core ten times as fast as the standard one: its seconds are worth ten."""
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    monkeypatch.setattr(Probe, "__call__", lambda self: STANDARD / 10)
    config = small_run().replace(schedule={"steps": 12}, evaluation={"every": 6}, training={"log_every": 2})
    folder = tmp_path / "run"
    probes = Probes(folder, config)
    outcome = train(config, folder, display=Display(), on_step=probes)
    assert outcome.exit_code == 0 and len(probes.taken()) == 10
    run = Run(folder)
    seconds = per_step(run.metrics, "processor")
    assert seconds is not None and seconds > 0
    assert standard_step(run) == pytest.approx(10 * (seconds - 10 * STANDARD / 10 / 12))
