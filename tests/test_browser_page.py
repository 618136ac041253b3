"""The page that runs a language model in a browser: the same text and decisions as in PyTorch, and no other request.

It needs onnxruntime-web, which `make browser` fetches from the npm registry into build/browser.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import browser
from browsers import open_chromium, requests_of
from seqboat.run import Run

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
from seqboat.onnx.export import export_run

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "build" / "browser" / "ort"
MODEL = "enwik8-medium"
PROMPT, LENGTH = "Größe: the [[history]] of", 60


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not RUNTIME.is_dir():
        pytest.skip("build/browser/ort is missing: make browser fetches onnxruntime-web")
    made = tmp_path_factory.mktemp("page") / "browser"
    export_run(Run(MODEL), made, ("step",))
    shutil.copytree(RUNTIME, made / "ort")
    for path in (ROOT / "examples" / "onnx" / "browser").iterdir():
        shutil.copy(path, made)
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with open_chromium() as found:
        yield found


def wait(driver: Any, *states: str) -> str:
    """Until the page says that it has come to one of these states; which one."""
    from selenium.webdriver.support.ui import WebDriverWait

    def now(_: Any) -> str | None:
        state = driver.execute_script("return document.getElementById('status')?.dataset.state")
        return state if state in states else None

    return str(WebDriverWait(driver, 120, 0.05).until(now))


@torch.no_grad()
def expected() -> tuple[bytes, list[int]]:
    """The most likely continuation, and how many layers attended to each of its bytes."""
    model, text, counts = Run(MODEL).language_model, list(PROMPT.encode()), []
    state = model.init_state(1)
    for i in range(len(text) + LENGTH):
        out = model.step(torch.tensor([text[i]]), state)
        state = out.state
        counts.append(sum(int(routing.active) for routing in out.routings if routing is not None))
        if i + 1 == len(text) and len(counts) < len(PROMPT.encode()) + LENGTH:
            text.append(int(out.logits.argmax()))
    return bytes(text), counts


@pytest.mark.slow
def test_the_page_writes_what_the_model_writes(driver: Any, address: str) -> None:
    driver.get("about:blank")
    for log in ("browser", "performance"):
        driver.get_log(log)  # reading empties it
    driver.get(address)
    assert wait(driver, "ready", "failed") == "ready"
    fill = "document.getElementById(arguments[0]).value = arguments[1]"
    for name, value in (("prompt", PROMPT), ("length", str(LENGTH)), ("temperature", "0")):
        driver.execute_script(fill, name, value)
    driver.find_element("id", "start").click()
    assert wait(driver, "done", "failed") == "done"
    boxes = driver.execute_script(
        "return [...document.querySelectorAll('#text span')].map((b) => [b.textContent, b.dataset.layers, "
        "getComputedStyle(b).backgroundColor])"
    )
    text, counts = expected()
    assert "".join(box[0] for box in boxes) == text.decode()
    assert [int(count) for box in boxes for count in box[1].split()] == counts
    # one color per number of layers among the characters of one byte
    colors = {(box[1], box[2]) for box in boxes if " " not in box[1]}
    assert len(colors) == len({count for count, _ in colors}) == len({shade for _, shade in colors}) > 1
    assert "bytes read" in driver.find_element("id", "status").text
    assert [entry["message"] for entry in driver.get_log("browser")] == []
    asked = [url for url in requests_of(driver) if not url.startswith("data:")]
    assert asked and all(url.startswith(address) for url in asked), asked


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.5, 1.0], ids=["cut", "changed"])
def test_a_damaged_model_is_named(driver: Any, folder: Path, address: str, keep: float) -> None:
    path = folder / "step.onnx"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: int(keep * len(whole)) - 1] + (b"x" if keep == 1 else b""))
        driver.get(address + "?" + str(keep))
        assert wait(driver, "ready", "failed") == "failed"
        assert "step.onnx" in driver.find_element("id", "status").text
    finally:
        path.write_bytes(whole)


def test_nothing_is_written_without_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """npm is missing, fails, or gives another file than the one that was tested."""
    folder = tmp_path / "browser"
    monkeypatch.setattr(sys, "argv", ["browser.py", str(folder)])

    def npm(content: bytes | None) -> Any:
        def pack(*_: Any, cwd: str, **__: Any) -> subprocess.CompletedProcess[str]:
            if content is not None:
                Path(cwd, "onnxruntime-web.tgz").write_bytes(content)
            return subprocess.CompletedProcess([], int(content is None), "", "no network\n")

        return pack

    for run, found, word in (
        (npm(None), None, "npm is not installed"),
        (npm(None), "npm", "no network"),
        (npm(b"something else"), "npm", "its checksum differs"),
    ):
        monkeypatch.setattr(browser.shutil, "which", lambda _, found=found: found)
        monkeypatch.setattr(browser.subprocess, "run", run)
        assert browser.main() == 2
        said = capsys.readouterr().err
        assert word in said and said.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
