"""Pins are what `make` installs and nothing else, with hashes; builds do not depend on time and place."""

from __future__ import annotations

import io
import re
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pins
from dist import left_out, repack

ROOT = Path(__file__).parents[1]
CUDA = re.compile(r"nvidia-|cuda-|triton")
"""What torch needs only in its CUDA build."""


def closure(extras: list[str]) -> set[str]:
    """What the project needs with some extras on Linux, in any supported Python, by installed metadata."""
    needed: dict[str, set[str]] = {}
    waiting = [("seqboat", {"", *extras})]
    while waiting:
        name, wanted = waiting.pop()
        if name in needed and wanted <= needed[name]:
            continue
        needed[name] = needed.get(name, set()) | wanted
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            environments = [
                {
                    "extra": extra,
                    "python_version": version,
                    "python_full_version": f"{version}.5",
                    "sys_platform": "linux",
                    "platform_system": "Linux",
                    "os_name": "posix",
                    "implementation_name": "cpython",
                    "platform_python_implementation": "CPython",
                }
                for extra in needed[name]
                for version in ("3.11", "3.12", "3.13")
            ]
            applies = requirement.marker is None or any(map(requirement.marker.evaluate, environments))
            other = pins.normalize(requirement.name)
            if applies and not CUDA.match(other):
                waiting.append((other, {"", *requirement.extras}))
    return needed.keys() - {"seqboat"}


def test_constraints_are_what_make_installs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^EXTRAS := (.*)$", makefile, flags=re.MULTILINE)
    assert found is not None
    assert set(pins.read_pins()) == closure(found[1].split(","))


def test_hashed_requirements_are_the_constraints() -> None:
    expected = {name: version for name, version in pins.read_pins().items() if name not in pins.UNHASHED}
    path = ROOT / "requirements-hashed.txt"
    assert pins.read_pins(path) == expected
    build = pins.read_pins(ROOT / "requirements-build.txt")
    assert set(build) == set(map(pins.normalize, pins.BUILD))
    assert not [name for name, version in build.items() if expected.get(name, version) != version]
    for file in (path, ROOT / "requirements-build.txt"):
        # every requirement is followed by at least one hash, or pip refuses the file
        entries = re.findall(
            r"^[\w-]+==\S+((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", file.read_text(), re.MULTILINE
        )
        assert len(entries) == len(pins.read_pins(file)) and all(entries), file.name


def test_pins_are_read_and_names_compared() -> None:
    assert pins.normalize("Typing_Extensions.x") == "typing-extensions-x"
    with pytest.raises(FileNotFoundError):
        pins.read_pins(ROOT / "no-such-file.txt")


def test_audit_names_licenses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def without_audit(name: str) -> str:
        if name == "pip-audit":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without_audit)
    assert pins.audit() == 0
    lines = capsys.readouterr().out.splitlines()
    safetensors = next(line for line in lines if line.startswith("safetensors "))
    assert "Apache" in safetensors
    assert "known vulnerabilities were not looked up" in lines[-1]


def test_archives_carry_neither_time_nor_user(tmp_path: Path) -> None:
    contents = []
    for seconds, user, names in ((1000, "one", "ab"), (2000, "two", "ba")):
        path = tmp_path / "archive.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.uname, member.mode = 1, seconds, user, 0o600 + seconds % 7
                archive.addfile(member, io.BytesIO(name.encode()))
        repack(path, epoch=0)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    with tarfile.open(tmp_path / "archive.tar.gz") as archive:
        assert [(m.name, m.mtime, m.uname) for m in archive.getmembers()] == [("a", 0, ""), ("b", 0, "")]


def test_files_that_a_source_archive_leaves_out_are_named() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in ("seqboat-1", "seqboat-1/README.md", "seqboat-1/tests/test_a.py"):
            archive.addfile(tarfile.TarInfo(name))
    files = ["README.md", "tests/test_a.py", "tests/conftest.py", "Makefile"]
    assert left_out(packed.getvalue(), files) == ["Makefile", "tests/conftest.py"]
