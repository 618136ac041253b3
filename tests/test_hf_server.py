"""The server of transformers on an export: completions in one piece and streamed, equal to the core's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("fastapi", reason="needs transformers[serving], which no extra installs")
pytest.importorskip("uvicorn", reason="needs transformers[serving], which no extra installs")
pytest.importorskip("openai", reason="needs transformers[serving], which no extra installs")

from seqboat.hf.export import export_run
from seqboat.run import Run
from seqboat.text.generate import SamplingConfig, generate

MODEL, PROMPT, LENGTH = "enwik8-small", "The history of", 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address of a server, and the name of its model."""
    folder = tmp_path_factory.mktemp("exported") / "small"
    export_run(MODEL, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "seqboat.hf", "transformers.cli.transformers", "serve", str(folder)]
    log = folder.with_name("log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        yield address, str(folder)
    finally:
        process.terminate()
        process.wait(30)


def ask(server: tuple[str, str], **settings: Any) -> bytes:
    address, model = server
    body = {"model": model, "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, **settings}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


@pytest.mark.slow
def test_completions_are_those_of_the_core(server: tuple[str, str]) -> None:
    model = Run(MODEL).language_model
    (wanted,) = generate(model, PROMPT, max_new_bytes=LENGTH, sampling=SamplingConfig(greedy=True))
    expected = wanted.data.decode()
    answer = json.loads(ask(server))
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] == LENGTH
    lines = ask(server, stream=True).decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    pieces = [json.loads(event)["choices"] for event in events if event != "[DONE]"]
    assert "".join(choice[0]["text"] for choice in pieces if choice) == expected
    assert len(pieces) > 2, "streamed in several pieces"
