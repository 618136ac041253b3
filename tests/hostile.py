"""Malformed and hostile files from outside, thrown at every command: a trial with a fixed seed.

    python -P tests/hostile.py --count 2000 --seconds 2400

Small whole files are made once: tables, texts, archives, pictures, sounds, configurations, trained runs, saved
states, masks, published checkpoints. Every trial damages one of them (bytes, numbers, structure, kind of file), or
hides code in it, and runs a command on it in a process forked from this one, so that torch is imported once. A trial
passes if the command

- ends within ten seconds of processor time (a minute on the clock), in less than 1 GB of memory,
- prints no traceback and exits with 0, 1, 2 or 3,
- runs nothing that was hidden in the file or in the folder where it works, and
- if it refuses, says so in a message that names the damaged file.

The last line counts the trials; the exit code is 1 if one failed. Needs a system with fork and /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import wave
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rights import respect_permissions

SECONDS = 10.0
"""Of processor time, which a busy machine does not stretch."""
PATIENCE = 60.0
"""Seconds on the clock after which a command that does nothing hangs."""
MEGABYTES = 1000
MARK = "EXECUTED"
"""File that hidden code makes, in the folder where the command works or beside the damaged file."""
TINY = [
    "--model.d_model=8",
    "--model.num_layers=1",
    "--schedule.steps=2",
    "--schedule.warmup_steps=1",
    "--evaluation.every=2",
    "--training.save_every=1",
    "--training.batch_size=2",
]


@dataclass
class Subject:
    """Something that can be damaged, and a command that reads it."""

    name: str
    source: Path
    """file or folder that a trial copies"""
    files: tuple[str, ...]
    """what of a folder is damaged, as patterns; empty if the source is a file"""
    command: Callable[[Path], list[str]]
    """arguments of the command, from the damaged copy"""
    reseal: bool = False
    """whether checksums are corrected after the damage, so that the content itself is judged"""
    text: bool = field(default=False)
    """whether damage to numbers and structure makes sense"""


# what damage is done


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.8 else b""


def extend(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice([b"\0" * 100, b"\xff" * 9, b"\n\n\n", rng.randbytes(300), data])


def repeat(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.randrange(1, 200)]
    return data[:at] + piece * rng.choice([2, 50]) + data[at:]


def insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    what = rng.choice(
        [b"\0", b"\xff\xfe", b'"', b"'", b"\r", b"\x1b[31m", b"\xe2\x80\xae", b"{", b"]", b"&a *a"]
    )
    return data[:at] + what + data[at:]


def random_bytes(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([1, 64, 5000]))


BYTES = [flip, truncate, extend, repeat, insert, random_bytes]

NUMBERS = [
    "-1",
    "0",
    "1000000000",
    "99999999999999999999",
    "1e400",
    "NaN",
    "-0.5",
    '"x"',
    "null",
    "[]",
    "true",
]


def numbers(data: bytes, rng: random.Random) -> bytes:
    places = list(re.finditer(rb"-?\d+(\.\d+)?", data))
    if not places:
        return flip(data, rng)
    place = rng.choice(places)
    return data[: place.start()] + rng.choice(NUMBERS).encode() + data[place.end() :]


def words(data: bytes, rng: random.Random) -> bytes:
    places = list(re.finditer(rb"[A-Za-z_]{3,}", data))
    if not places:
        return flip(data, rng)
    place = rng.choice(places)
    other = rng.choice(places)
    choices = [other.group(), b"", b"__class__", b"../../etc/passwd", b"a" * 10000, "\u202eevil".encode()]
    return data[: place.start()] + rng.choice(choices) + data[place.end() :]


def nest(data: bytes, rng: random.Random) -> bytes:
    deep = rng.choice([b"[", b'{"a":', b"- "]) * rng.choice([500, 100_000])
    return rng.choice([deep, data + b"\n" + deep, deep + data])


TEXT = [numbers, numbers, words, nest]


def many_members(data: bytes, rng: random.Random) -> bytes:
    """A zip archive of a million members: the same entry over and over, which need not point anywhere."""
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *(0,) * 9, 1, *(0,) * 6) + b"a"
    count = rng.choice([70_000, 1_000_000])
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, len(entry) * count, 4, 0)
    return b"PK\x03\x04" + entry * count + end


def huge_claims(data: bytes, rng: random.Random) -> bytes:
    """Numbers of four bytes in an archive that claim to be as large as they can be."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 4])):
        at = rng.randrange(max(len(changed) - 4, 1))
        changed[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x40"])
    return bytes(changed)


def many_empty_members(data: bytes, rng: random.Random) -> bytes:
    """A tar archive of very many members without content."""
    member = tarfile.TarInfo("aclImdb/train/pos/0_7.txt").tobuf()
    return gzip.compress(member * 40_000 + bytes(1024), 1)


ARCHIVES = {".zip": [many_members, huge_claims], ".gz": [huge_claims, many_empty_members]}


class Call:
    """Calls a function when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {MARK}",)


def hide_pickle(data: bytes, rng: random.Random) -> bytes:
    """A pickle that runs a command, alone or as torch.save and numpy.save write it, under whatever name."""
    kind = rng.randrange(4)
    out = io.BytesIO()
    if kind == 0:
        return pickle.dumps(Call(), protocol=rng.choice([0, 2, 4]))
    if kind == 1:
        torch.save({"args": Call(), "model": {"a": torch.zeros(1)}}, out)
    elif kind == 2:
        np.save(out, np.array([Call()], dtype=object), allow_pickle=True)
    else:
        return b"\x80\x04\x8e\xff\xff\xff\xff"  # 9 bytes that announce 4 GB
    return out.getvalue()


def hide_postscript(data: bytes, rng: random.Random) -> bytes:
    """A drawing that runs a command, for whoever opens it with Ghostscript."""
    return f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch {MARK}) (w) file\n".encode()


def hide_script(data: bytes, rng: random.Random) -> bytes:
    """HTML, escape sequences and formulas that run where they are shown."""
    return data + rng.choice(
        [b"<script>1</script>", b"=cmd|' /C touch " + MARK.encode() + b"'!A0", b"\x1b]0;x\x07"]
    )


HIDDEN = [hide_pickle, hide_pickle, hide_postscript, hide_script]


def replace_file(path: Path, rng: random.Random) -> None:
    """Put something else than a file in its place, or forbid to read it."""
    if rng.random() < 0.3:
        rng.choice([path, path.parent if path.parent.name.startswith("step-") else path]).chmod(0)
        return
    path.unlink()
    kind = rng.choice(["folder", "fifo", "zero", "null", "dangling", "loop", "missing"])
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind != "missing":
        path.symlink_to(
            {"zero": "/dev/zero", "null": "/dev/null", "dangling": path.name + ".gone", "loop": path.name}[
                kind
            ]
        )


def damage(path: Path, subject: Subject, rng: random.Random) -> str:
    """Damage a file; returns how."""
    if rng.random() < 0.08 and not subject.reseal:
        replace_file(path, rng)
        return "replaced"
    kinds = TEXT if subject.text and rng.random() < 0.6 else BYTES
    if rng.random() < 0.3:
        kinds = ARCHIVES.get(path.suffix, HIDDEN)
    how = rng.choice(kinds)
    data = path.read_bytes()
    opened = path.suffix == ".gz" and how is not many_empty_members and rng.random() < 0.5
    changed = how(gzip.decompress(data) if opened else data, rng)
    path.write_bytes(gzip.compress(changed) if opened else changed)
    return how.__name__


def reseal(folder: Path) -> None:
    """Correct the checksums of every checkpoint below a folder, as an attacker would."""
    for path in folder.rglob("state.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
            state = json.loads(path.read_text(encoding="utf-8"))
            del state["sha256"]
            for name in state["files"]:
                state["files"][name] = hashlib.sha256((path.parent / name).read_bytes()).hexdigest()
            plain = json.dumps(state, indent=1, sort_keys=True)
            state["sha256"] = hashlib.sha256(plain.encode()).hexdigest()
            path.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n", encoding="utf-8")


# one command in a separate process


class Outcome(NamedTuple):
    code: int
    output: str
    seconds: float
    """of processor time"""
    megabytes: float
    trouble: str


def resident(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def processor_time(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def child(arguments: list[str], folder: Path, out: Path) -> None:
    """Become the command."""
    os.setsid()
    sink = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(folder)
    respect_permissions()
    from seqboat.cli.main import main

    code = 1
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str], folder: Path, patience: float = PATIENCE) -> Outcome:
    out = folder / ".output"
    begin = time.monotonic()
    pid = os.fork()
    if not pid:
        child(arguments, folder, out)
    most, seconds, trouble, status = 0.0, 0.0, "", None
    while status is None:
        done, code, usage = os.wait4(pid, os.WNOHANG)
        if done:
            status, seconds = code, usage.ru_utime + usage.ru_stime
            break
        most, seconds = max(most, resident(pid)), max(seconds, processor_time(pid))
        if most > MEGABYTES:
            trouble = f"{most:.0f} MB"
        elif seconds > SECONDS or time.monotonic() - begin > patience:
            trouble = f"{seconds:.0f} s of processor time, {time.monotonic() - begin:.0f} s on the clock"
        if trouble:
            os.killpg(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    output = out.read_text(encoding="utf-8", errors="replace") if out.exists() else ""
    return Outcome(code, output, seconds, most, trouble)


def judge(outcome: Outcome, damaged: Path, folder: Path, generates: bool) -> str:
    """What is wrong with an outcome; empty if nothing."""
    if outcome.trouble:
        return outcome.trouble
    if any(folder.rglob(MARK)):
        return "executed"
    if "Traceback (most recent call last)" in outcome.output:
        return "traceback"
    if outcome.code not in (0, 1, 2, 3):
        return f"exit code {outcome.code}"
    # what a model generates may be any bytes
    if not generates and re.search("[\x1b\u202a-\u202e\u2066-\u2069]", outcome.output):
        return "control characters"
    if outcome.code == 0:
        return ""
    named = {damaged.name, *(part.name for part in damaged.relative_to(folder).parents if part.name)}
    if not any(name in outcome.output for name in named):
        return "names no file"
    return ""


# what can be damaged


def write_sources(home: Path) -> None:
    """Small whole files of every kind that commands read from users."""
    rng = random.Random(0)
    rows = [(f"a {rng.choice(['good', 'bad'])} film, number {i}", i) for i in range(40)]
    labeled = [(text, "yes" if "good" in text else "no") for text, _ in rows]
    csv = "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in labeled)
    (home / "table.csv").write_text(csv, encoding="utf-8")
    (home / "table.tsv").write_text(csv.replace('",', "\t").replace('"', "").replace("text,", "text\t"))
    with gzip.open(home / "table.csv.gz", "wb") as packed:
        packed.write(csv.encode())
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in labeled)
    (home / "table.jsonl").write_text(lines, encoding="utf-8")
    (home / "text.txt").write_text("It was a dark and stormy night. " * 60, encoding="utf-8")
    np.save(home / "mask.npy", np.ones(20, dtype=bool))
    with tarfile.open(home / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for split in ("train", "test"):
            for side in ("pos", "neg"):
                for i in range(4):
                    text = f"a {side} film {i}".encode()
                    member = tarfile.TarInfo(f"aclImdb/{split}/{side}/{i}_7.txt")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text))
    with zipfile.ZipFile(home / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as packed_text:
        packed_text.writestr("enwik8", b"<page>some text</page>\n" * 3000)
    with tarfile.open(home / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
            record = bytes([3]) + bytes(range(256)) * 12
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(record) * 4
            archive.addfile(member, io.BytesIO(record * 4))
    for label in ("cat", "dog"):
        for kind in ("pictures", "sounds"):
            (home / kind / label).mkdir(parents=True)
        for i in range(6):
            write_picture(home / "pictures" / label / f"{i}.png", rng)
            write_sound(home / "sounds" / label / f"{i}.wav", rng)


def write_picture(path: Path, rng: random.Random) -> None:
    from PIL import Image

    Image.fromarray(np.frombuffer(rng.randbytes(64), np.uint8).reshape(8, 8)).save(path)


def write_sound(path: Path, rng: random.Random) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(rng.randbytes(400))


EVERY = ("config.json", "run.json", "metrics.jsonl", "step-2/*", "latest", "best")
FACTS = ("config.json", "step-2/state.json")


def make_subjects(home: Path) -> list[Subject]:
    write_sources(home)
    table, text = f"{home}/table.csv", f"{home}/text.txt"
    for name, arguments in {
        "classify": ["classify", f"--data.train={table}", "--data.max_length=32"],
        "lm": ["lm", f"--data.text={text}", "--data.segment=32"],
    }.items():
        made = run(["train", *arguments, *TINY, f"--out={home}/{name}"], home, patience=600)
        assert made.code == 0, made.output
    saved = ["generate", f"{home}/lm", "--prompt", "It was", "--max-new-bytes", "4", "--seed", "0"]
    for arguments in (
        [*saved, "--save-state", f"{home}/saved.safetensors"],
        ["export", f"{home}/lm", f"{home}/published.pt", "--to", "published"],
    ):
        made = run(arguments, home, patience=600)
        assert made.code == 0 or "published" in str(arguments), made.output
    printed = run(["train", "recall", *TINY, "--print-config"], home, patience=600)
    assert printed.code == 0, printed.output
    (home / "config.json").write_text(printed.output, encoding="utf-8")
    torch.save({"args": argparse.Namespace(arch="x"), "model": {"a": torch.zeros(2)}}, home / "model.pt")

    def classify(path: Path) -> list[str]:
        return ["train", "classify", f"--data.train={path}", "--data.max_length=32", *TINY, "--out=run"]

    alone: dict[str, Callable[[Path], list[str]]] = {
        "table.csv": classify,
        "table.tsv": classify,
        "table.jsonl": classify,
        "text.txt": lambda path: [
            "train",
            "lm",
            f"--data.text={path}",
            "--data.segment=32",
            *TINY,
            "--out=run",
        ],
        "config.json": lambda path: ["train", "--config", str(path), "--print-config"],
        "saved.safetensors": lambda path: [
            "generate",
            f"{home}/lm",
            "--load-state",
            str(path),
            "--max-new-bytes=2",
        ],
        "mask.npy": lambda path: [
            "explain",
            f"{home}/classify",
            "--text",
            "a good film",
            "--mask",
            str(path),
        ],
        "model.pt": lambda path: ["paper", "import", str(path), "imported", "--unpickle"],
    }
    archives = {"aclImdb_v1.tar.gz": "text", "enwik8.zip": "enwik8", "cifar-10-binary.tar.gz": "image"}
    for name, task in archives.items():
        alone[name] = lambda path, task=task: [  # type: ignore[misc]
            *("paper", "data", "prepare", task, "--from", str(path), "--data-dir", "data")
        ]
    subjects = [
        Subject(name, home / name, (), command, text=name.endswith(("json", "jsonl")))
        for name, command in alone.items()
    ]
    run_of = f"{home}/classify"
    subjects += [
        Subject(
            "eval table",
            home / "table.csv",
            (),
            lambda path: ["eval", run_of, f"--data.test={path}"],
        ),
        Subject(
            "predict table", home / "table.csv", (), lambda path: ["predict", f"{home}/classify", str(path)]
        ),
        Subject("eval text", home / "text.txt", (), lambda path: ["eval", f"{home}/lm", str(path)]),
        Subject("pictures", home / "pictures", ("*/*.png",), classify),
        Subject("sounds", home / "sounds", ("*/*.wav",), classify),
    ]
    in_run: dict[str, tuple[Path, Callable[[Path], list[str]]]] = {
        "eval": (home / "classify", lambda run: ["eval", str(run)]),
        "predict": (home / "classify", lambda run: ["predict", str(run), table]),
        "explain": (home / "classify", lambda run: ["explain", str(run), "--text", "a good film"]),
        "report": (home / "classify", lambda run: ["report", str(run), "--json"]),
        "resume": (
            home / "classify",
            lambda run: ["train", "--resume", "--out", str(run), "--schedule.steps=3"],
        ),
        "export hf": (home / "classify", lambda run: ["export", str(run), "exported", "--to", "hf"]),
        "export int8": (home / "lm", lambda run: ["export", str(run), "int8", "--to", "int8", "--no-score"]),
        "eval text RUN": (home / "lm", lambda run: ["eval", str(run), text]),
        "generate": (
            home / "lm",
            lambda run: ["generate", str(run), "--prompt", "It", "--max-new-bytes", "2"],
        ),
    }
    for name, (source, command) in in_run.items():
        subjects.append(Subject(f"{name} RUN", source, EVERY, command))
        subjects.append(Subject(f"{name} RUN, facts", source, FACTS, command, text=True))
        subjects.append(Subject(f"{name} RUN, resealed", source, FACTS, command, reseal=True, text=True))
    return subjects


def write_traps(folder: Path) -> None:
    """Modules that a command must not take from the folder where it works."""
    for name in ("torch", "numpy", "json", "PIL", "yaml", "sitecustomize", "seqboat_plugin"):
        (folder / f"{name}.py").write_text(f"open({MARK!r}, 'w')")


def attempt(subject: Subject, rng: random.Random, scratch: Path) -> tuple[str, str, Outcome, list[str]]:
    """One trial: what was damaged and how, what is wrong with the outcome, and the command."""
    copy = scratch / subject.source.name
    if subject.source.is_dir():
        shutil.copytree(subject.source, copy, symlinks=True)
        found = sorted(path for pattern in subject.files for path in copy.glob(pattern) if path.is_file())
        path = rng.choice(found)
    else:
        shutil.copy(subject.source, copy)
        path = copy
    how = damage(path, subject, rng)
    if subject.reseal:
        reseal(copy)
    write_traps(scratch)
    command = subject.command(copy)
    outcome = run(command, scratch)
    return (
        f"{path.relative_to(scratch)} {how}",
        judge(outcome, path, scratch, command[0] == "generate"),
        outcome,
        command,
    )


def trial(count: int, seed: int = 0, seconds: float = 1e9, only: int | None = None) -> tuple[int, list[str]]:
    """Trials done, and what failed; prints a summary."""
    torch.set_num_threads(1)
    for name in (
        "training.trainer",
        "text.generate",
        "report.run",
        "hf.export",
        "compat.runs",
        "data.prepare",
    ):
        with contextlib.suppress(ImportError):
            __import__(f"seqboat.{name}")
    begin, wrong, done = time.monotonic(), list[str](), Counter[str]()
    slowest = largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "whole"
        home.mkdir()
        subjects = make_subjects(home)
        for number in range(count):
            if only not in (None, number):
                continue
            if time.monotonic() - begin > seconds:
                break
            scratch = Path(folder) / "trial"
            scratch.mkdir()
            subject, rng = subjects[number % len(subjects)], random.Random(f"{seed}-{number}")
            damaged, trouble, outcome, command = attempt(subject, rng, scratch)
            done["refused" if outcome.code else "accepted"] += 1
            slowest, largest = max(slowest, outcome.seconds), max(largest, outcome.megabytes)
            if trouble or only is not None:
                last = outcome.output if only is not None else outcome.output.strip()[-300:]
                said = f"trial {number}: {trouble or 'ok'}: {subject.name}: {damaged}\n  {last}"
                print(said, " ".join(command), sep="\n  ", flush=True)
                wrong += [said] if trouble else []
            shutil.rmtree(scratch, ignore_errors=True)
    total = sum(done.values())
    print(
        f"{total} trials in {time.monotonic() - begin:.0f} s: {done['refused']} refused, "
        f"{done['accepted']} accepted; slowest {slowest:.1f} s of processor time, largest {largest:.0f} MB; "
        f"{len(wrong)} failed"
    )
    return total, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=2400, help="stop after this time")
    parser.add_argument("--only", type=int, help="a trial by its number, with its output")
    given = parser.parse_args()
    raise SystemExit(1 if trial(given.count, given.seed, given.seconds, given.only)[1] else 0)
