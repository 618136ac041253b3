"""`seqboat doctor`: what it finds right and wrong on a doctor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from seqboat import doctor
from seqboat.cli.main import main
from seqboat.ops import kernels
from seqboat.ops.attention import Neighbors, banded
from seqboat.ops.kernels import using_kernels

CPU = torch.device("cpu")


def wrong_attention(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    """A kernel that forgets the border of the window."""
    return banded(q, k, v, *near._replace(left=near.left + 1), 0.0, 0)


def failing_attention(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    raise RuntimeError("no kernel image at /home/somebody/cache/x.so")


@pytest.fixture(autouse=True)
def _few_cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two small cases of every operation."""
    found: dict[str, list[doctor.Case]] = {}
    for case in doctor.cases():
        tokens = max(part.shape[0 if part.dim() < 3 else 1] for part in case.inputs.values() if part.dim())
        if tokens < 70:
            found.setdefault(case.operation, []).append(case)
    few = [case for some in found.values() for case in some[:2]]
    monkeypatch.setattr(doctor, "cases", lambda: iter(few))
    before = dict(kernels.DISABLED)
    yield
    kernels.DISABLED.clear()
    kernels.DISABLED.update(before)


def register(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    kernel, operation = globals()[function], function.partition("_")[2]
    monkeypatch.setattr(kernels, "_load", lambda name: kernel)
    monkeypatch.setattr(kernels, "missing", lambda: None)
    monkeypatch.setattr(kernels, "refuse", lambda x, **sizes: None)
    few = [case for case in doctor.cases() if case.operation == operation][:2]
    monkeypatch.setattr(doctor, "cases", lambda: iter(few))
    monkeypatch.setattr(doctor, "check_contract", lambda device: {})


def test_a_sound_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--length", "16", "--json", str(tmp_path / "doctor.json")]) == 0
    output = capsys.readouterr().out
    assert "no problem found" in output and "two runs equal     ok" in output
    assert "scan       torch   float64" in output and "transformer" in output
    record = json.loads((tmp_path / "doctor.json").read_text())
    assert record["wrong"] == [] and record["versions"]["torch"] == torch.__version__
    checked = {(found["operation"], found["dtype"]) for found in record["operations"] if found["cases"]}
    assert checked == {
        (operation, dtype)
        for operation in kernels.OPERATIONS
        for dtype in ("float64", "float32", "bf16", "fp16")
    }
    assert set(record["kernels"]) == set(kernels.OPERATIONS)


@pytest.mark.parametrize("dtype", doctor.BOUNDS)
def test_every_case_agrees(dtype: torch.dtype) -> None:
    """All that `seqboat doctor` measures, or it calls a sound machine wrong."""
    wrong = {}
    for case in doctor.cases():
        error = max(doctor.measure(case, CPU, dtype))
        if not error <= doctor.BOUNDS[dtype]:
            wrong[case.operation, case.name] = error
    assert not wrong


def test_a_wrong_kernel_is_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, "wrong_attention")
    assert main(["doctor", "--device", "cpu", "--length", "0", "--json", str(tmp_path / "doctor.json")]) == 1
    output = capsys.readouterr()
    assert "seqboat doctor: attention is wrong on this machine" in output.err
    assert (
        "triton is disabled for attention" in output.out and "SEQBOAT_KERNELS=attention=torch" in output.out
    )
    assert json.loads((tmp_path / "doctor.json").read_text())["wrong"] == ["attention"]
    # from now on torch computes it, even if the kernel is asked for
    case = next(case for case in doctor.cases() if case.operation == "attention")
    with using_kernels("triton", "attention"):
        assert max(doctor.measure(case, CPU, torch.float64)) < 1e-10
        assert kernels.REFUSED["attention"].startswith("disagrees with the reference")


def test_a_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, "failing_attention")
    assert main(["doctor", "--device", "cpu", "--length", "0", "--json", str(tmp_path / "doctor.json")]) == 1
    text = (tmp_path / "doctor.json").read_text()
    assert "no kernel image at <path>" in text and "somebody" not in text


def test_every_operation_is_right_in_every_type_here() -> None:
    assert [found for found in doctor.examine(CPU) if found.wrong is not None] == []


def test_a_wrong_scan_in_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor._scan

    def wrong(made: doctor.DiagonalSSM) -> doctor.Call:
        run = right(made)
        return lambda **inputs: (run(**inputs)[0].nan_to_num() * 1.001, *run(**inputs)[1:])

    monkeypatch.setattr(doctor, "_scan", wrong)
    monkeypatch.setattr(doctor, "cases", doctor._scans)
    monkeypatch.setattr(doctor, "TYPES", {"float32": torch.float32})
    assert {found.wrong for found in doctor.examine(CPU)} == {"scan"}


def test_reports_name_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "engine-1")
    found = doctor.anonymous(
        {"a": ["ada on engine-1 read /home/ada/x/y.txt (twice)", 1.5, None], "canada": True}
    )
    assert found == {"a": ["<name> on <name> read <path> (twice)", 1.5, None], "canada": True}


def test_devices_and_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda:7"]) == 2
    assert "--device cuda:7" in capsys.readouterr().err
    assert main(["doctor", "--json", str(tmp_path / "none" / "x.json")]) == 2


def test_a_user_that_the_system_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with `--user 12345`: neither a name nor a home."""
    pwd = pytest.importorskip("pwd")

    def unknown(number: int) -> NoReturn:
        raise KeyError(f"uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.anonymous("read /srv/data/a.txt") == "read <path>"
