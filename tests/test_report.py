"""Pages say what the measures say, hold no more than their size allows, load nothing and execute nothing of the data;
and they work in a real browser, with the mouse, the keyboard and on a phone."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from browsers import open_chromium, requests_of
from lm_runs import write_lm_run, write_run
from seqboat.analysis.attention import Attention, attention_weights
from seqboat.analysis.traces import LayerTrace, SampleTrace, SequenceTrace, load_examples, trace
from seqboat.cli.main import main
from seqboat.cli.report import default_page
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers.transformer import TransformerConfig
from seqboat.report.page import element, visible
from seqboat.report.run import Collected, collect, describe_run, report_page, thin
from seqboat.report.samples import PAGE_BYTES, Sample, pack_sample, pack_samples, sight_of, spell_bytes
from seqboat.run import find_run
from seqboat.tasks import TASKS
from seqboat.tasks.task import Dataset, Example, Kind, Split, Task
from small_runs import ToyConfig, register, small_run

ATTACK = "<script>alert(1)</script>"
BIDI, ESCAPE = "\u202e", "\x1b[31m"
TEXTS = (
    f"{ATTACK} and words that continue for a while, line after line\nof them",
    f"turn {BIDI}around, {ESCAPE}red, \u0301 mark, żółw & <b>bold</b> é",
    "a",
    "</script><!-- <img src=x onerror=alert(3)>",
    "",
)


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Fixed examples of any modality."""

    modality: Literal["bytes", "image", "wave"] = "bytes"
    empty: bool = False

    def build(self) -> Show:
        return Show(self)


class ShowData(Dataset):
    def __init__(self, config: ShowConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return 0 if self.config.empty else len(TEXTS)

    def __getitem__(self, index: int) -> Example:
        if self.config.modality == "bytes":
            return Example(np.frombuffer(TEXTS[index].encode(), np.uint8).astype(np.int64), index % 2)
        size = 48 if self.config.modality == "image" else 400
        values = np.random.default_rng(index).standard_normal((size, 1)).astype(np.float32)
        return Example(values, index % 2)


class Show(Task):
    name = "show"
    kind: Kind = "classify"
    classes = 2
    labels = ("<img src=x onerror=alert(2)>", "other")
    max_length = 400

    def __init__(self, config: ShowConfig) -> None:
        self.config = config
        self.vocab = 256 if config.modality == "bytes" else None
        self.text_bytes = config.modality == "bytes"
        self.picture = (6, 8) if config.modality == "image" else None

    def dataset(self, split: Split) -> Dataset:
        return ShowData(self.config)


def show_run(folder: Path, modality: Any = "bytes", seed: int = 0, **changes: Any) -> Path:
    """A run with fresh weights, and the record of a training that never was."""
    mixer = SeqBoatConfig(init="paper", gau=GAUConfig(d_z=4, d_v=8, window=8, max_positions=32))
    model = {"mixer": mixer, "num_layers": 3, **changes}
    config = small_run(ShowConfig(modality=modality), model=model, seed=seed)
    write_run(folder, config, seed)
    lines = []
    for step in range(1, 7):
        common = {"step": step, "loss": 1 / step, "accuracy": step / 10, "activation": [0.5, None, step / 6]}
        if step == 2:
            common["loss"] = math.nan
        lines.append({**common, "split": "train", "tokens_per_s": 1000.0 + step, "memory_mb": 10.0 * step})
        if step % 3 == 0:
            lines.append({**common, "split": "val", "elapsed": 60.0 * step, "processor": 30.0 * step})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"cut off', encoding="utf-8")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _tasks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "show", ShowConfig)
        patch.setitem(TASKS, "toy", ToyConfig)
        yield


class Pages:
    """Runs and their pages, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, Path] = {}

    def run(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            if name == "lm":
                write_lm_run(folder)
            elif name == "pair":
                write_run(folder, small_run(ToyConfig(kind="match", count=5)))
            elif name == "plain":
                write_run(folder, small_run(ToyConfig(count=5), model={"mixer": TransformerConfig()}))
            else:
                show_run(folder, name)
        return folder / "run" if name == "lm" else folder

    def page(self, name: str) -> Path:
        if name not in self.made:
            page = self.folder / f"{name}.html"
            runs = [str(self.run(name)), *(["--split", "val", "--limit", "3"] if name == "lm" else [])]
            assert main(["report", *runs, "--out", str(page)]) == 0
            self.made[name] = page
        return self.made[name]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, _tasks: None) -> Pages:
    return Pages(tmp_path_factory.mktemp("report"))


EXPLORED = ("bytes", "image", "wave", "pair", "lm")
ALL = (*EXPLORED, "plain")


# the file


class Reader(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.inside: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.raw.append((*self.inside, data))
        else:
            self.words.append(data)


def code_of(page: Reader) -> list[tuple[str, str]]:
    """Scripts that run, and styles."""
    return [(tag, text) for tag, attributes, text in page.raw if "type" not in attributes]


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@pytest.mark.parametrize("name", ALL)
def test_a_page_allows_only_its_own_code(pages: Pages, name: str) -> None:
    page = Reader(pages.page(name).read_text(encoding="utf-8"))
    policies = [
        a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1 and policies[0] is not None
    rules = dict(rule.split(" ", 1) for rule in policies[0].split("; "))
    assert rules.pop("default-src") == "'none'" and rules.pop("img-src") == "data:"
    assert rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    for tag in ("script", "style"):
        allowed = rules.pop(f"{tag}-src").split()
        assert allowed == [f"'sha256-{digest(text)}'" for kind, text in code_of(page) if kind == tag]
    assert not rules


@pytest.mark.parametrize("name", ALL)
def test_a_page_refers_to_nothing_outside(pages: Pages, name: str) -> None:
    text = pages.page(name).read_text(encoding="utf-8")
    page = Reader(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "form", "base", "img", "video", "audio")
        assert not {"src", "srcset", "style", "action", "background"} & attributes.keys()
        assert not [a for a in attributes if a.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    for tag, code in code_of(page):
        # the name of SVG in scripts is not an address that anybody calls
        assert "://" not in code.replace("http://www.w3.org/2000/svg", "")
        if tag == "style":
            assert "url(" not in code and "@import" not in code
        else:
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", code
            )
    anchors = {a["href"] for t, a in page.tags if t == "a"}
    assert anchors <= {f"#{a.get('id')}" for _, a in page.tags}


def test_text_of_the_data_is_neutral(pages: Pages) -> None:
    text = pages.page("bytes").read_text(encoding="utf-8")
    assert ATTACK not in text and "<img" not in text and "</script><!--" not in text
    assert "\\u003cimg src=x onerror=alert(2)\\u003e" in text
    hidden = [c for c in text if visible(c) != c and c != "\n"]
    assert not hidden
    kinds = [a.get("type") for t, a in Reader(text).tags if t == "script"]
    assert kinds == ["application/json", *["text/plain"] * len(TEXTS), None, None, None]


def test_elements_escape() -> None:
    assert element("p", ATTACK, title='"><b>') == (
        '<p title="&quot;&gt;&lt;b&gt;">&lt;script&gt;alert(1)&lt;/script&gt;</p>'
    )
    assert element("p", f"a{BIDI}b\x00") == "<p>a⟨202E⟩b␀</p>"


def test_every_chart_has_its_table(pages: Pages) -> None:
    page = Reader(pages.page("bytes").read_text(encoding="utf-8"))
    charts = [a["data-chart"] for _, a in page.tags if "data-chart" in a]
    numbers = next(json.loads(text) for _, a, text in page.raw if a.get("id") == "numbers")
    assert list(numbers["charts"]) == charts and len(charts) == 8
    # each chart's table, all settings, and what the columns of three tables mean
    assert sum(tag == "details" for tag, _ in page.tags) == len(charts) + 1 + 3
    assert page.words.count("What the columns mean") == 3
    layer = collect(pages.run("bytes"), samples=0).numbers["measures"]["layers"][0]
    words = " ".join(page.words)
    assert f"{100 * layer['rate']['mean']:.1f} %" in words and f"{100 * layer['rate']['std']:.1f} %" in words


def test_assets_are_in_the_wheel() -> None:
    root = Path(__file__).parents[1]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "seqboat"
    ]
    for path in (root / "src" / "seqboat" / "report" / "assets").iterdir():
        assert any(fnmatch(f"report/assets/{path.name}", pattern) for pattern in patterns), path.name


# samples


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """As the page's script does it."""
    raw = zlib.decompress(data)
    size = int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4 : 4 + size])
    arrays, at = {}, 4 + size
    for name, kind, length in head["arrays"]:
        dtype = np.dtype(f"<{kind}")
        assert at % dtype.itemsize == 0
        arrays[name] = np.frombuffer(raw, dtype, length, at)
        at += length * dtype.itemsize
    assert at == len(raw)
    return head, arrays


def seen_by(arrays: dict[str, np.ndarray[Any, Any]], name: str, slot: int, keep: int) -> dict[int, float]:
    """Slots that a query sees, with the weights that were kept."""
    count = len(arrays[f"{name}.before"])
    first = slot - int(arrays[f"{name}.before"][slot])
    peak = arrays[f"{name}.peak"][slot] / 65535
    top, ratio = arrays[f"{name}.top"].reshape(keep, count), arrays[f"{name}.ratio"].reshape(keep - 1, count)
    parts = [1.0, *((ratio[:, slot] / 255) ** 2)]
    return {first + int(top[k, slot]): float(part * peak) for k, part in enumerate(parts) if part * peak > 0}


@pytest.mark.parametrize("name", ["bytes", "pair"])
def test_packed_samples_hold_what_was_traced(pages: Pages, name: str) -> None:
    examples = load_examples(pages.run(name))
    keep = 9  # a window of 8 and the query itself: all of them
    for number in range(len(examples.dataset)):
        batch = examples.batch([number])
        (found,) = trace(examples.model, examples.task.kind, batch)
        seen = [
            attention_weights(examples.model, examples.task.kind, batch, layer)[0]
            for layer in range(len(found.sequences[0].layers))
        ]
        sights = tuple(tuple(sight_of(layer[s]) for layer in seen) for s in range(len(found.sequences)))  # type: ignore[arg-type]
        head, arrays = unpack(pack_sample(Sample(found, sights), examples.task, keep))
        for s, sequence in enumerate(found.sequences):
            words = [head["strings"][i] for i in arrays[f"{s}.text"]]
            assert len(words) == len(sequence.inputs) == head["sequences"][s]["length"]
            for number, layer in enumerate(sequence.layers):
                assert layer is not None
                key = f"{s}.{number}"
                bits = np.unpackbits(arrays[f"{key}.active"], bitorder="little")[: len(words)]
                np.testing.assert_array_equal(bits.astype(bool), layer.active)
                np.testing.assert_allclose(arrays[f"{key}.probs"] / 255, layer.probs, atol=0.5 / 255 + 1e-6)
                attention = seen[number][s]
                assert attention is not None
                np.testing.assert_array_equal(
                    np.arange(len(attention.first)) - arrays[f"{key}.before"], attention.first
                )
                np.testing.assert_array_equal(
                    np.arange(len(attention.end)) + arrays[f"{key}.after"] + 1, attention.end
                )
                for slot in range(len(attention.positions)):
                    kept = seen_by(arrays, key, slot, min(keep, 9))
                    positions, weights = attention.seen_by(slot)
                    for position, weight in zip(positions, weights, strict=True):
                        at = int(np.flatnonzero(attention.positions == position)[0])
                        # half a step of the root of the ratio to the largest, and of the largest itself
                        step = 2 * np.sqrt(weight * weights.max()) / 510 + weights.max() / 510**2 + 1 / 131070
                        assert abs(kept.get(at, 0.0) - weight) <= step + 1e-6


def synthetic(length: int, layers: int, window: int, rng: np.random.Generator) -> Sample:
    """Half of the tokens active, and weights that no compression can guess."""
    decided, sights = [], []
    for _ in range(layers):
        probs = rng.random(length).astype(np.float32)
        positions = np.flatnonzero(probs > 0.5)
        slot = np.arange(len(positions))
        first, end = np.maximum(slot - window // 2, 0), np.minimum(slot + window // 2 + 1, len(slot))
        weights = np.exp(rng.standard_normal((len(slot), window + 1), dtype=np.float32))
        weights[np.arange(window + 1) >= (end - first)[:, None]] = 0
        weights /= weights.sum(axis=1, keepdims=True)
        decided.append(LayerTrace(probs > 0.5, probs))
        sights.append(sight_of(Attention(positions, first, end, weights)))
    ids = rng.integers(0, 256, length)
    found = SampleTrace(
        (SequenceTrace(ids, tuple(decided)),), 1, np.array([1, 0]), np.array([0.9, 0.1], np.float32), 0.9
    )
    return Sample(found, (tuple(sights),))


def test_twenty_samples_of_4096_tokens_stay_below_five_megabytes(pages: Pages) -> None:
    rng = np.random.default_rng(0)
    found = collect(pages.run("bytes"), samples=0)
    samples = [synthetic(4096, 4, 128, rng)] * 20
    page = report_page(Collected(found.numbers, samples, found.task))
    assert 0.8 * PAGE_BYTES < len(page.encode()) < 5_000_000
    kept = re.search(r"keeps the (\d+) largest weights of every query: on average (\d+\.\d) %", page)
    assert kept is not None and int(kept[1]) >= 6
    fractions = [s.fractions[: int(kept[1])].sum(axis=0) for s in samples[0].sights[0] if s is not None]
    assert float(kept[2]) == pytest.approx(100 * float(np.concatenate(fractions).mean()), abs=0.06)


def test_weights_give_way_to_size(pages: Pages) -> None:
    sample = synthetic(200, 2, 16, np.random.default_rng(0))
    task = ShowConfig().build()
    whole = pack_samples([sample], task, 1_000_000)
    assert whole.keep == 17 and whole.coverage == pytest.approx(1)
    some = pack_samples([sample], task, len(whole.texts[0]) // 2)
    assert 0 < some.keep < 17 and some.coverage < 1 and len(some.texts[0]) <= len(whole.texts[0]) // 2
    assert pack_samples([sample], task, 0).keep == 0


def test_bytes_are_spelled_one_by_one() -> None:
    assert spell_bytes("żó€😀".encode()) == ["ż", "·", "ó", "·", "€", "·", "·", "😀", "·", "·", "·"]
    assert spell_bytes(b"\xc5a\x1b\t \xe2\x82") == ["⟨C5⟩", "a", "␛", "⇥", " ", "⟨E2⟩", "⟨82⟩"]
    assert spell_bytes(f"{BIDI}\u0301".encode()) == ["⟨202E⟩", "·", "·", "◌\u0301", "·"]
    data = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8).tobytes()
    assert len(spell_bytes(data)) == 5000


# numbers


def test_json_has_the_numbers(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    run = pages.run("bytes")
    before = set(run.iterdir())
    assert main(["report", str(run), "--json", "--split", "val", "--limit", "2"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert set(run.iterdir()) == before
    measures = numbers["measures"]
    assert measures["examples"] == 2 and measures["split"] == "val" and len(measures["layers"]) == 3
    assert numbers["curves"]["loss"]["val"] == [[3, 1 / 3], [6, 1 / 6]]
    assert [point[0] for point in numbers["curves"]["activation"]["train"]] == [1, 2, 3, 4, 5, 6]
    assert numbers["training"] == {
        "tokens_per_s": 1003.5,
        "memory_mb": 60.0,
        "minutes": 6.0,
        "processor_minutes": 3.0,
    }
    assert numbers["settings"]["model.mixer.gau.window"] == 8 and numbers["parameters"] > 0
    assert numbers["held_out"]["scores"] == {"loss": 1 / 6, "accuracy": 0.6}


def test_long_curves_are_thinned() -> None:
    points = thin([[i, float(i)] for i in range(1000)], most=100)
    assert len(points) == 100 and points[0] == [9, 4.5] and points[-1] == [999, 994.5]
    assert thin([[1, [0.5, None]], [2, [1.0, None]]], most=1) == [[2, [0.75, None]]]


def test_a_page_goes_beside_its_run(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    run = pages.run("image")
    checkpoint = next(run.glob("step-*"))
    files = set(checkpoint.iterdir())
    assert main(["report", str(checkpoint), "--samples", "1"]) == 0
    assert f"wrote {run / 'report.html'}" in capsys.readouterr().out
    assert set(checkpoint.iterdir()) == files and describe_run(run)["step"] == 1


def test_where_pages_go_by_default(tmp_path: Path) -> None:
    run = tmp_path / "a"
    (run / "step-20").mkdir(parents=True)
    assert default_page(run) == default_page(run / "step-20") == run / "report.html"
    # never into the installed package
    assert default_page(find_run("enwik8-small")) == Path("enwik8-small.html")


def test_without_routers_there_is_still_a_report(pages: Pages) -> None:
    text = pages.page("plain").read_text(encoding="utf-8")
    page = Reader(text)
    assert {a.get("id") for _, a in page.tags} >= {"summary", "settings"}
    assert not {"explorer", "activation"} & {a.get("id") for _, a in page.tags}
    assert "accuracy on test" in text


def test_other_modules_are_told(tmp_path: Path) -> None:
    mixer = SeqBoatConfig(init="paper", gau=GAUConfig(d_z=4, d_v=8, window=4), ffn=True)
    run = write_run(tmp_path / "run", small_run(ToyConfig(count=5), model={"mixer": mixer}))
    found = collect(run)
    part = found.numbers["measures"]["layers"][0]["others"]["ffn"]["rate"]
    assert f"gau, ffn {100 * part:.1f} %" in report_page(found)


def test_a_run_that_diverged(tmp_path: Path) -> None:
    register()
    found = collect(write_run(tmp_path / "run", small_run(), noise=1e30), "val", 2, 4)
    layer = found.numbers["measures"]["layers"][0]
    assert layer["counts"]["total"] > 0 == sum(part["total"] for part in layer["probabilities"])
    assert "explorer" in report_page(found)


def test_damaged_lines_of_the_record_are_left_out(tmp_path: Path) -> None:
    register()
    run = write_run(tmp_path / "run", small_run())
    good = {"step": 1, "split": "val", "loss": 2.0, "activation": [0.5, None]}
    lines = [
        json.dumps(good).encode(),
        b'{"step": 2, "split": "val", "loss": NaN, "activation": 5}',
        b'{"split": "val", "loss": 7.0}',
        b"\xff\xfe",
        b"[1]",
        b'{"step": 3, "spl',
    ]
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines))
    found = collect(run, "val", 0, 4)
    assert [point[0] for point in found.numbers["curves"]["loss"]["val"]] == [1, 2]
    assert [record["step"] for record in found.numbers["measures"]["training"]] == [1]
    assert "curve-loss" in report_page(found)


def test_no_samples_no_explorer(pages: Pages, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(pages.run("bytes")), "--samples", "0", "--out", str(page)]) == 0
    ids = {a.get("id") for _, a in Reader(page.read_text(encoding="utf-8")).tags}
    assert "activation" in ids and "explorer" not in ids


def test_no_matplotlib_is_needed(pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(pages.run("image")), "--samples", "1", "--out", str(tmp_path / "p.html")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nothing"], "is not the folder of a run"),
        (["{run}", "--limit", "0"], "--limit must be an integer >= 1, got 0"),
        (["{run}", "--samples", "-1"], "--samples must be an integer >= 0, got -1"),
        (["{run}", "--out", "{tmp}/no/page.html"], "does not exist"),
        (["{run}", "--out", "{tmp}"], "is a folder"),
        (["{run}", "--out", "{step}/page.html"], "a checkpoint's folder must not change"),
        (["{run}", "--out", "{tmp}/p.html", "--seed", "3"], "only the data can be changed"),
        (
            ["{run}", "--out", "{tmp}/p.html", "--data.empty", "true"],
            "must hold at least one example, got none",
        ),
    ],
)
def test_errors_are_one_line(
    pages: Pages, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run = pages.run("bytes")
    words = [a.format(run=run, tmp=tmp_path, step=next(run.glob("step-*"))) for a in arguments]
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


# in a browser

PHONE, DESK = (375, 812), (1200, 900)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with open_chromium() as found:
        yield found


class Browser:
    """A page that is open, and short words for what people do with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, size: tuple[int, int] = DESK) -> None:
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)  # reading empties it
        self.driver.get(page.as_uri())
        if self.one("#explorer", missing=True) is not None:
            self.wait("document.getElementById('explorer').dataset.ready === '0'")
        # charts are drawn when the browser has given them their width
        self.wait("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg'))")

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60, 0.05).until(lambda _: self.run(f"return {condition}"), condition)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def one(self, selector: str, missing: bool = False) -> Any:
        found = self.driver.find_elements("css selector", selector)
        assert found or missing, selector
        return found[0] if found else None

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver, 0).send_keys(key).perform()

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, without those that the policy stopped."""
        return requests_of(self.driver)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def browser(driver: Any) -> Browser:
    return Browser(driver)


def active_tokens(pages: Pages, name: str, number: int, layer: int) -> list[int]:
    """Positions of the activated tokens of an example."""
    examples = load_examples(pages.run(name))
    (found,) = trace(examples.model, examples.task.kind, examples.batch([number]))
    decided = found.sequences[0].layers[layer]
    assert decided is not None
    return np.flatnonzero(decided.active).tolist()


@pytest.mark.parametrize("name", ALL)
def test_pages_are_quiet_and_fit(pages: Pages, browser: Browser, name: str) -> None:
    """No complaint in the console, no request but for the file itself, no scrolling sideways on a phone."""
    page = pages.page(name)
    for size in (DESK, PHONE):
        browser.open(page, size)
        if name in EXPLORED:
            browser.one("#next").click()
            browser.wait("document.getElementById('explorer').dataset.ready === '1'")
        browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert browser.run("return document.documentElement.scrollWidth") <= size[0]
        assert browser.complaints() == []
        assert browser.requests() == [page.as_uri()]
    drawn = browser.run("return [...document.querySelectorAll('.chart svg')].map((s) => s.childElementCount)")
    assert all(count > 3 for count in drawn) and (drawn or name == "plain")


def test_scripts_in_the_data_run_nothing(pages: Pages, browser: Browser) -> None:
    from selenium.common.exceptions import NoAlertPresentException

    browser.open(pages.page("bytes"))
    for number, text in enumerate(TEXTS):
        browser.run("document.getElementById('sample').value = arguments[0]", str(number))
        browser.run("document.getElementById('sample').dispatchEvent(new Event('change'))")
        browser.wait(f"document.getElementById('explorer').dataset.ready === '{number}'")
        shown = browser.run(
            "return [...document.querySelectorAll('#panels .panel:first-child .tok')].map((s) => s.textContent)"
        )
        assert shown == spell_bytes(text.encode())
    with pytest.raises(NoAlertPresentException):
        browser.driver.switch_to.alert  # noqa: B018
    assert (
        browser.run("return document.querySelectorAll('main script, main img, main b:not(.fact b)').length")
        == 0
    )
    assert "<img src=x onerror=alert(2)>" in browser.text("#facts")
    assert browser.complaints() == []


def test_code_that_was_not_written_by_us_is_blocked(pages: Pages, browser: Browser, tmp_path: Path) -> None:
    """Should anything slip through the escaping one day, the policy still stops it."""
    text = pages.page("bytes").read_text(encoding="utf-8")
    page = tmp_path / "slipped.html"
    slipped = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
    page.write_text(text.replace("</main>", f"{slipped}</main>"), encoding="utf-8")
    browser.open(page)
    assert browser.driver.title == "bytes"
    blocked = browser.complaints()
    assert len(blocked) >= 2 and all("Content Security Policy" in line for line in blocked)
    assert browser.requests() == [page.as_uri()]


def test_clicks_change_what_is_shown(pages: Pages, browser: Browser) -> None:
    browser.open(pages.page("bytes"))
    layers = browser.run(
        "return [...document.querySelectorAll('#panels select')].map((s) => Number(s.value))"
    )
    active = active_tokens(pages, "bytes", 0, layers[0])
    tokens = "[...document.querySelectorAll('#panels .tokens')[0].querySelectorAll('.tok')]"
    colors = f"return {tokens}.map((s) => s.style.backgroundColor)"
    before = browser.run(colors)
    assert [i for i, color in enumerate(before) if color] == active
    caption = browser.text(".panel .caption")
    assert caption.startswith(f"{len(active)} of {len(TEXTS[0])} activated")
    # what the query of a token sees, with the weights that the model computed
    middle = active[len(active) // 2]
    browser.one(f"#tok-0-{middle}").click()
    assert browser.text(".panel .caption").startswith("Sees 9 activated bytes")
    assert browser.one("#back").is_displayed() and "large weight" in browser.text("#legend")
    after = browser.run(colors)
    assert after != before
    examples = load_examples(pages.run("bytes"))
    attention = attention_weights(examples.model, "classify", examples.batch([0]), layers[0])[0][0]
    assert attention is not None
    positions, weights = attention.seen_by(active.index(middle))
    seen = browser.run(
        "return [...document.querySelectorAll('.inspect')[1].querySelectorAll('tbody tr')]"
        ".map((r) => [...r.cells].map((c) => c.textContent))"
    )
    order = np.argsort(-weights, kind="stable")[: len(seen)]
    for row, k in zip(seen, order, strict=True):
        assert int(row[1]) == positions[k] - middle
        assert float(row[2].removesuffix(" %")) == pytest.approx(100 * weights[k], abs=0.3)
    # and back
    browser.one(f"#tok-0-{middle}").click()
    assert browser.run(colors) == before and not browser.one("#back").is_displayed()
    # another layer, one layer only, another sample
    other = next(i for i in range(3) if i != layers[0])
    browser.one(f"#panels select option[value='{other}']").click()
    painted = [i for i, color in enumerate(browser.run(colors)) if color]
    assert painted == active_tokens(pages, "bytes", 0, other)
    browser.one("#both").click()
    assert browser.run("return document.querySelectorAll('#panels .panel').length") == 1
    browser.one("#next").click()
    browser.wait("document.getElementById('explorer').dataset.ready === '1'")
    assert len(browser.run(colors)) == len(TEXTS[1].encode())
    assert browser.complaints() == []


def test_hovering_tells(pages: Pages, browser: Browser) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    browser.open(pages.page("bytes"))
    ActionChains(browser.driver, 0).move_to_element(browser.one("#tok-1-3")).perform()
    assert browser.text("#status").startswith(f"“r” · position 4 of {len(TEXTS[0])} · layer ")
    assert re.search(r"(confidence|probability) \d\.\d\d", browser.text("#status"))
    chart = browser.one("[data-chart='activation'] .touch")
    ActionChains(browser.driver, 0).move_to_element(chart).perform()
    assert browser.one(".tip").is_displayed() and browser.text(".tip").startswith("layer 1")


def test_everything_works_with_the_keyboard(pages: Pages, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(pages.page("bytes"))
    reached = []
    for _ in range(60):
        browser.press(Keys.TAB)
        reached.append(
            browser.run(
                "const a = document.activeElement; return a.id || a.getAttribute('role') || a.tagName.toLowerCase()"
            )
        )
        ring = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none" or reached[-1] == "body", reached[-1]
    for wanted in ("a", "summary", "sample", "previous", "next", "both", "select", "listbox"):
        assert wanted in reached, wanted
    browser.run("document.querySelector('#panels .tokens').focus()")
    place = "return document.querySelector('#panels .tokens').getAttribute('aria-activedescendant')"
    browser.press(Keys.HOME)
    assert browser.run(place) == "tok-0-0"
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert browser.run(place) == "tok-0-1"
    browser.press(Keys.ARROW_DOWN)
    down = int(browser.run(place).removeprefix("tok-0-"))
    assert down > 2
    browser.press(Keys.ARROW_UP)
    assert browser.run(place) == "tok-0-1"
    browser.press(Keys.END)
    assert browser.run(place) == f"tok-0-{len(TEXTS[0]) - 1}"
    layer = int(browser.run("return document.querySelector('#panels select').value"))
    first = active_tokens(pages, "bytes", 0, layer)[0]
    browser.press(Keys.HOME, *[Keys.ARROW_RIGHT] * first, Keys.ENTER)
    assert browser.text(".panel .caption").startswith("Sees ")
    assert f"position {first + 1} of" in browser.text("#live") and "Sees " in browser.text("#live")
    assert browser.run("return document.querySelectorAll('[aria-selected=true]').length") == 2
    browser.press(Keys.ESCAPE)
    assert "activated" in browser.text(".panel .caption") and not browser.one("#back").is_displayed()


@pytest.mark.parametrize("name", ["image", "wave"])
def test_pixels_and_waves(pages: Pages, browser: Browser, name: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(pages.page(name))
    layer = int(browser.run("return document.querySelector('#panels select').value"))
    active = active_tokens(pages, name, 0, layer)
    picture = "return document.querySelector('#panels canvas[tabindex]').toDataURL()"
    before = browser.run(picture)
    browser.run("document.querySelector('#panels canvas[tabindex]').focus()")
    browser.press(Keys.HOME)
    step = 8 if name == "image" else 10
    browser.press(Keys.ARROW_DOWN)
    here = f"row {step // 8 + 1}, column {step % 8 + 1}" if name == "image" else f"position {step + 1} of 400"
    assert browser.text("#status").startswith(here)
    browser.press(Keys.HOME, *[Keys.ARROW_RIGHT] * active[0], Keys.ENTER)
    assert browser.text(".panel .caption") and "Sees " in browser.text("#live")
    assert browser.run(picture) != before
    browser.press(Keys.ESCAPE)
    plain = browser.run(picture)
    browser.one("#view option[value='overlay']").click()
    assert browser.run(picture) != plain
    # a click where the first activated pixel or sample is drawn
    if name == "image":
        canvas = browser.one("#panels canvas[tabindex]")
        size = canvas.size
        column, row = active[-1] % 8, active[-1] // 8
        from selenium.webdriver.common.action_chains import ActionChains

        offset = ((column + 0.5) / 8 - 0.5) * size["width"], ((row + 0.5) / 6 - 0.5) * size["height"]
        ActionChains(browser.driver, 0).move_to_element_with_offset(
            canvas, *map(int, offset)
        ).click().perform()
        assert browser.text("#status").startswith(f"row {row + 1}, column {column + 1}")
        assert browser.one("#back").is_displayed()
    assert browser.complaints() == []


@pytest.mark.parametrize("name", ["bytes", "image"])
def test_screen_readers_find_names(pages: Pages, browser: Browser, name: str) -> None:
    """Everything that can be used or seen has a name in the tree that screen readers get."""
    browser.open(pages.page(name))
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = (
        "button",
        "checkbox",
        "combobox",
        "listbox",
        "link",
        "application",
        "image",
        "region",
        "table",
        "heading",
    )
    found = [
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in tree
        if not node.get("ignored") and node.get("role", {}).get("value") in roles
    ]
    kinds = {role for role, _ in found}
    assert {"heading", "link", "image", "region"} <= kinds
    assert not [role for role, label in found if not label]


def test_pairs_and_texts_of_language_models(pages: Pages, browser: Browser) -> None:
    browser.open(pages.page("pair"))
    length = "return document.querySelectorAll('#panels .tokens')[0].querySelectorAll('.tok').length"
    first = browser.run(length)
    browser.one("#part option[value='1']").click()
    browser.wait("document.querySelectorAll('#panels .tokens')[0].querySelectorAll('.tok').length === 5")
    assert first != 5 and browser.one("#part").is_displayed()
    browser.open(pages.page("lm"))
    assert not browser.one("#part").is_displayed()
    assert re.search(
        r"most probable next: “.+” \(0\.\d\d\); wanted: “.+” \(0\.\d\d\)", browser.text("#inspector")
    )
    assert "bits per token" in browser.text("#facts")
