"""Build the wheel and the source archive from the last commit, twice, and fail unless both builds have equal bytes.

    python tools/dist.py [FOLDER]    # dist/ unless named; needs the packages of requirements-build.txt

Times in both archives are that of the commit (SOURCE_DATE_EPOCH, unless it is set already). setuptools writes the
time of the build and the user's name into source archives, so they are packed again without them. The source archive
must hold every file of the commit: without the files that tests read, its tests would fail where it is unpacked.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout


def repack(path: Path, epoch: int) -> None:
    """Write a .tar.gz again: members in order of name, one time, no user, no file mode but executable or not."""
    plain = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            content = old.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, content)
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed:
        packed.write(plain.getvalue())


def build(folder: Path, epoch: int) -> dict[str, bytes]:
    """Both archives of a fresh copy of the last commit, by name."""
    source = folder / "source"
    source.mkdir()
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        archive.extractall(source, filter="data")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    # no isolation: nothing but the hashed packages of this environment takes part
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "out"), str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    for path in (folder / "out").glob("*.tar.gz"):
        repack(path, epoch)
    return {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir())}


def left_out(archive: bytes, files: Iterable[str]) -> list[str]:
    """Which of these files a source archive does not hold, below its one folder."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        held = {member.name.partition("/")[2] for member in members.getmembers()}
    return sorted(set(files) - held)


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        first, second = build(Path(one), epoch), build(Path(two), epoch)
    differ = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
    if differ:
        print(f"two builds differ in {', '.join(sorted(differ))}", file=sys.stderr)
        return 1
    (source,) = (content for name, content in first.items() if name.endswith(".tar.gz"))
    if missing := left_out(source, git("ls-files", "-z").decode().strip("\0").split("\0")):
        print(f"MANIFEST.in leaves out {', '.join(missing)}", file=sys.stderr)
        return 1
    target.mkdir(parents=True, exist_ok=True)
    for name, content in first.items():
        (target / name).write_bytes(content)
        print(f"{hashlib.sha256(content).hexdigest()}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
