"""Virtual machines that name tile instructions without having them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seqboat import processor

FLAGS = "processor\t: 0\nmodel name\t: Some Processor\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n\nprocessor\t: 1\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose flags name tiles and that hides their sizes; returns its /proc/cpuinfo."""
    path = tmp_path / "cpuinfo"
    path.write_text(FLAGS, encoding="utf-8")
    monkeypatch.setattr(processor, "CPUINFO", path)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processor.sys, "platform", "linux")
    monkeypatch.setattr(processor, "_cpuid", lambda leaf, part: (0, 0, 0, 0))
    for name in processor.LIMITS:
        monkeypatch.delenv(name, raising=False)
    return path


def limit(monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What the environment says after the check; the change is undone with the test."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(processor.os, "environ", environment)
    processor.avoid_hidden_tiles()
    return environment.get("ONEDNN_MAX_CPU_ISA")


def test_hidden_tiles_are_avoided(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor.tiles_are_hidden()
    assert limit(monkeypatch) == "AVX512_CORE_FP16"


def test_a_limit_of_the_user_stays(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processor.LIMITS:
        environment = {name: "AVX2"}
        monkeypatch.setattr(processor.os, "environ", environment)
        processor.avoid_hidden_tiles()
        assert environment == {name: "AVX2"}


def test_real_tiles_are_used(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_cpuid", lambda leaf, part: (1, 0, 0, 0))
    assert limit(monkeypatch) is None


def test_programs_that_may_not_make_code_change_nothing(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_cpuid", lambda leaf, part: None)
    assert limit(monkeypatch) is None


def test_processors_without_tiles_are_not_asked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write_text(FLAGS.replace(" amx_tile", ""), encoding="utf-8")
    assert limit(monkeypatch) is None


@pytest.mark.parametrize(("name", "value"), [("platform", "win32"), ("machine", "aarch64")])
def test_other_systems_are_not_asked(
    name: str, value: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "platform":
        monkeypatch.setattr(processor.sys, "platform", value)
    else:
        monkeypatch.setattr(processor.platform, "machine", lambda: value)
    assert limit(monkeypatch) is None


def test_the_name(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor.processor_name() == "Some Processor"
    machine.unlink()
    monkeypatch.setattr(processor.platform, "processor", lambda: "")
    assert processor.processor_name() == "unknown"
    assert not processor.tiles_are_hidden()


@pytest.mark.skipif(
    sys.platform != "linux" or processor.platform.machine() != "x86_64", reason="machine code of x86-64 Linux"
)
def test_cpuid_answers() -> None:
    highest = processor._cpuid(0, 0)
    assert highest is not None
    maker = b"".join(number.to_bytes(4, "little") for number in (highest[1], highest[3], highest[2]))
    assert highest[0] > 0
    assert maker.isascii(), maker  # GenuineIntel, AuthenticAMD, ...


def test_products_in_bf16_do_not_end_the_process() -> None:
    code = "import seqboat, torch; a = torch.ones(512, 64).bfloat16(); print(float((a @ a.T)[0, 0]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "64.0\n"), done.stderr
