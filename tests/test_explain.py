"""`seqboat explain` and overrides: what is shown is what the model did, and input reaches no terminal raw."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lm_runs import write_lm_run, write_run
from seqboat.analysis.traces import load_examples, trace
from seqboat.cli.explain import use_color
from seqboat.cli.main import main
from seqboat.cli.options import Control
from seqboat.data.prepare import prepare
from seqboat.layers.gau import GAUConfig
from seqboat.mixers.transformer import TransformerConfig
from seqboat.reference import under
from seqboat.report.explain import explain, render, subject
from seqboat.run import Run
from seqboat.tasks import ListOpsTaskConfig, PathfinderTaskConfig, SpeechTaskConfig
from seqboat.tasks.listops import decode
from small_runs import ToyConfig, register, small_run

ANSI = re.compile(r"\033\[[0-9;]*m")


def toy(folder: Path, mixer: Any = None, **task: Any) -> Path:
    register()
    config = small_run(ToyConfig(**task))
    config = config if mixer is None else config.replace(model={"mixer": mixer})
    return write_run(folder / "run", config, noise=0.3)


def of_task(folder: Path, task: Any) -> Path:
    return write_run(folder / "run", dataclasses.replace(small_run(), task=task))


def out(capsys: Any, *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return str(capsys.readouterr().out)


def refused(capsys: Any, *arguments: str) -> str:
    """The message of a command that fails, which is one line."""
    assert main(list(arguments)) == 2
    error = str(capsys.readouterr().err)
    assert error.count("\n") == 1
    return error


def test_marks_lie_below_their_tokens(tmp_path: Path, capsys: Any) -> None:
    run = of_task(tmp_path, ListOpsTaskConfig(max_length=64))
    text = "[MAX 2 9 [MIN 4 7 ] 0 ]"
    shown = out(capsys, str(run), "--text", text).splitlines()
    found = explain(subject(run, lambda task: (task.read_text(text.encode()),)))
    words = decode(found.sequences[0].inputs.tolist())
    assert shown[0] == f"{run}, step 1" and shown[1].startswith(f"prediction: {found.prediction} (")
    begin = shown.index(" " * 9 + text)
    for number, layer in enumerate(found.sequences[0].layers):
        assert layer is not None
        line, place = shown[begin + 1 + number].ljust(9 + len(text)), 9
        assert line.startswith(f"layer {number + 1}")
        for word, active, prob in zip(words, layer.active, layer.probs, strict=True):
            assert line[place] == (str(int(prob * 10 + 1e-6)) if active else ".")
            place += len(word) + 1


def test_colors_say_the_same_as_marks(tmp_path: Path) -> None:
    run = of_task(tmp_path, ListOpsTaskConfig(max_length=64))
    examples = subject(run, lambda task: (task.read_text(b"[MAX 2 9 [MIN 4 7 ] 0 ]"),))
    found = explain(examples)
    text = render(found, examples.task, [1], color=True)
    layer = found.sequences[0].layers[1]
    assert layer is not None and layer.active.any() and not layer.active.all()
    line = text.splitlines()[text.splitlines().index("layer 2") + 1]
    assert ANSI.sub("", line) == "[MAX 2 9 [MIN 4 7 ] 0 ]"
    colored = re.findall(r"38;5;\d+m(\S+?)\033\[0m", line)
    words = decode(found.sequences[0].inputs.tolist())
    assert colored == [word for word, on in zip(words, layer.active, strict=True) if on]
    assert "layer 1" not in text


def test_control_characters_are_spelled(tmp_path: Path, capsys: Any) -> None:
    run = write_lm_run(tmp_path)
    file = tmp_path / "input"
    file.write_bytes("a\033[31mred\x07\u202eé\r\nend".encode() + b"\xff")
    for color in ("never", "always"):
        shown = out(capsys, str(run), "--file", str(file), "--color", color)
        plain = ANSI.sub("", shown)
        assert "a␛[31mred␇⟨202E⟩" in plain and "␍⏎\n" in plain and "end⟨FF⟩" in plain
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", plain)
        assert ("\033" in shown) == (color == "always")
    assert "bits per token" in plain and plain.splitlines()[1].startswith("next token: ")


def test_colors_only_where_they_are_wanted(monkeypatch: Any) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert use_color("auto") and not use_color("never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color("auto") and use_color("always")
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not use_color("auto")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert not use_color("auto")


def test_the_record_of_a_language_model(tmp_path: Path, capsys: Any) -> None:
    run = write_lm_run(tmp_path)
    record = json.loads(out(capsys, str(run), "--text", "Ein Text", "--json", "--layer", "2"))
    model = Run(run).model
    with torch.no_grad():
        output = model(torch.tensor([list(b"Ein Text")]))
    probs = torch.softmax(output.logits[0], dim=-1)
    assert record["prediction"]["class"] == int(probs[-1].argmax()) and len(record["ranked"]) == 5
    assert record["prediction"]["probability"] == pytest.approx(float(probs[-1].max()), rel=1e-5)
    known = probs[torch.arange(7), torch.tensor(list(b"in Text"))]
    assert record["bits_per_token"] == pytest.approx(float(-known.log2().mean()), rel=1e-4)
    (sequence,) = record["sequences"]
    assert sequence["tokens"] == list(b"Ein Text")
    (layer,) = sequence["layers"]
    active = output.routings[1].active[0, :, 0]
    assert layer["layer"] == 2 and layer["active"] == active.nonzero()[:, 0].tolist()
    assert layer["rate"] == pytest.approx(float(active.float().mean()))


def test_a_pair_takes_two_inputs(tmp_path: Path, capsys: Any) -> None:
    run = str(toy(tmp_path, kind="match"))
    shown = out(capsys, run, "--text", "1 2 3", "--text", "4 5")
    assert "sequence 1\n" in shown and "sequence 2, layer 2: " in shown
    assert "takes 2 inputs, got 1" in refused(capsys, "explain", run, "--text", "1 2 3")


def test_an_image_and_its_confidences(tmp_path: Path, capsys: Any) -> None:
    pillow = pytest.importorskip("PIL.Image")
    run = of_task(tmp_path, PathfinderTaskConfig(size=16))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16)).astype(np.uint8)
    pillow.fromarray(pixels).save(tmp_path / "image.png")
    pillow.fromarray(pixels[:8]).save(tmp_path / "half.png")
    lines = out(capsys, str(run), "--image", str(tmp_path / "image.png")).splitlines()
    examples = subject(run, lambda task: (task.read_image(pixels),))
    # as the data set would have read it
    np.testing.assert_allclose(
        examples.dataset[0].inputs[:, 0], (pixels.reshape(-1) / 255 - 0.5) / 0.5, atol=1e-6
    )
    assert lines[-1] == "--html FILE shows where" and lines[2].startswith("layer 1: ")
    assert "two curve" in lines[1] or "one curve" in lines[1]
    message = refused(capsys, "explain", str(run), "--image", str(tmp_path / "half.png"))
    assert "half.png: the image must be 16 x 16 pixels, got 8 x 16" in message
    (tmp_path / "no.png").write_bytes(b"\x89PNG nonsense")
    assert "not an image" in refused(capsys, "explain", str(run), "--image", str(tmp_path / "no.png"))
    assert "reads images, not text" in refused(capsys, "explain", str(run), "--text", "abc")


def test_sound(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    run = of_task(tmp_path, SpeechTaskConfig(pool=80))

    def write(name: str, rate: int) -> str:
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as clip:
            clip.setparams((1, 2, rate, 0, "NONE", ""))
            clip.writeframes((np.sin(np.arange(8000) / 9) * 9000).astype("<i2").tobytes())
        (tmp_path / name).write_bytes(buffer.getvalue())
        return str(tmp_path / name)

    message = refused(capsys, "explain", str(run), "--wav", write("slow.wav", 8000))
    assert "slow.wav: expected 16000 samples per second, got 8000" in message
    clip = write("fine.wav", 16000)
    store = SimpleNamespace(manifest={"extra": {"mean": 0.0, "std": 0.1}})
    monkeypatch.setattr("seqboat.tasks.stored.ArrayStore.find", lambda *where: store)
    assert out(capsys, str(run), "--wav", clip).rstrip().endswith("--html FILE shows where")


@pytest.mark.parametrize("flag", ["--data-dir", "--data_dir"])
def test_the_data_may_be_elsewhere(flag: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    run = str(of_task(tmp_path, ListOpsTaskConfig(data_dir=str(tmp_path / "nowhere"), max_length=32)))
    prepare("listops", "generate", tmp_path / "data", counts=(2, 2, 2), workers=1)
    there = [flag, str(tmp_path / "data")]
    for words in (["eval", run], ["report", run, "--json"], ["explain", run, "--thresholds", ""]):
        assert "contains no prepared data" in refused(capsys, *words)
        assert main([*words, *there]) == 0
        capsys.readouterr()
    # a given input needs the data only for facts about all of it
    asked: list[str] = []
    store = SimpleNamespace(manifest={"extra": {"mean": 0.0, "std": 0.1}})

    def find(root: Any, *rest: Any) -> Any:
        asked.append(str(root))
        return store

    monkeypatch.setattr("seqboat.tasks.stored.ArrayStore.find", find)
    with wave.open(str(tmp_path / "clip.wav"), "wb") as clip:
        clip.setparams((1, 2, 16000, 0, "NONE", ""))
        clip.writeframes(bytes(32000))
    speech = of_task(tmp_path / "speech", SpeechTaskConfig(pool=80))
    out(capsys, str(speech), "--wav", str(tmp_path / "clip.wav"), *there)
    assert asked and set(asked) == {str(tmp_path / "data")}


def test_a_page_to_look_into(tmp_path: Path, capsys: Any) -> None:
    run = write_lm_run(tmp_path)
    page = tmp_path / "page.html"
    out(capsys, str(run), "--text", "<script>alert(1)</script>", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text and "Content-Security-Policy" in text
    assert "<p>next token: " in text and "⏎" not in text.partition("</section>")[0]
    listops = of_task(tmp_path / "listops", ListOpsTaskConfig(max_length=64))
    out(capsys, str(listops), "--text", "[MIN 1 2 ]", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    # nobody said what it is
    assert "<p>prediction: " in text and '["predicted"' in text and '["label"' not in text


def test_long_texts_are_cut(tmp_path: Path, capsys: Any) -> None:
    run = of_task(tmp_path, ListOpsTaskConfig(max_length=4))
    assert main(["explain", str(run), "--text", "[MAX 2 9 4 0 ]", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "only the first 4 of 6 tokens are read\n"
    assert json.loads(captured.out)["sequences"][0]["length"] == 4


def test_a_model_without_routers(tmp_path: Path, capsys: Any) -> None:
    run = str(toy(tmp_path, TransformerConfig(heads=2, d_ff=8)))
    assert "no layer has a router" in out(capsys, run, "--text", "1 2 3")
    page = tmp_path / "page.html"
    out(capsys, run, "--text", "1 2 3", "--html", str(page))
    assert "no layer has a router" in page.read_text(encoding="utf-8")
    for flags in (["--off", "1"], ["--threshold", "0.5"]):
        message = refused(capsys, "explain", run, "--text", "1 2", *flags)
        assert "no layer of this run has a router" in message
    assert "layer 1 has no router" in refused(capsys, "explain", run, "--text", "1 2", "--layer", "1")
    assert "no layer of this run has a router" in refused(capsys, "explain", run)


def test_a_model_that_diverged(tmp_path: Path, capsys: Any) -> None:
    register()
    run = str(write_run(tmp_path / "run", small_run(), noise=1e30))
    assert "the model's output for this input is not finite" in refused(
        capsys, "explain", run, "--text", "1 2"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "a.html"], "--html needs an input: --text, --file, --image or --wav"),
        (["--text", "1", "--plot", "a.svg"], "--plot cannot be used with an input"),
        (["--text", " "], "--text must not be empty"),
        (["--text", "9 9"], "token ids must be from 0 to 7, got [9]"),
        (["--text", "a b"], "must be numbers from 0 to 7"),
        (["--file", "nowhere"], "--file nowhere cannot be read: No such file or directory"),
        (["--file", "/dev/null"], "--file /dev/null is empty"),
        (["--wav", __file__], "not sound"),
        (["--text", "1", "--layer", "3"], "--layer must be layers from 1 to 2"),
        (["--text", "1", "--layer", "two"], "--layer must be layers from 1 to 2"),
        (["--text", "1", "--off", "0"], "--off must be layers from 1 to 2"),
        (["--text", "1", "--off", "1", "--on", "1,2"], "must not name the same layer, got 1 in both"),
        (["--text", "1", "--threshold", "1.5"], "--threshold must be between 0 and 1, got 1.5"),
        (["--text", "1", "--cap", "-1"], "--cap must be between 0 and 1, got -1"),
        (["--text", "1", "--mask", "nowhere.npy"], "--mask nowhere.npy cannot be read"),
        (["--text", "1", "--html", "."], "--html . is a folder: it must be a file"),
        (["--text", "1", "--html", "nowhere/page.html"], "the folder nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert message in refused(capsys, "explain", str(toy(tmp_path)), *arguments)


# overridden decisions


def active_of(run: Path, control: Control, count: int = 4) -> list[np.ndarray[Any, Any]]:
    """(layers, length) of some examples, under control."""
    examples = load_examples(run, "val", limit=count)
    with control.applied(examples.model):
        samples = trace(examples.model, examples.task.kind, examples.batch(range(count)))
    free = trace(examples.model, examples.task.kind, examples.batch(range(count)))
    assert any(not layer.active.all() for s in free for layer in s.sequences[0].layers if layer is not None)
    return [np.stack([layer.active for layer in s.sequences[0].layers if layer is not None]) for s in samples]


def test_layers_on_and_off(tmp_path: Path) -> None:
    run = toy(tmp_path)
    for active in active_of(run, Control(off="1", on="2")):
        assert not active[0].any() and active[1].all()
    for active in active_of(run, Control(on="all")):
        assert active.all()


def test_threshold_cap_and_mask(tmp_path: Path) -> None:
    run = toy(tmp_path)
    examples = load_examples(run, "val", limit=4)
    with Control(off="1").applied(examples.model):
        # what layer 2 sees depends on layer 1: it stays the same in both
        samples = trace(examples.model, "classify", examples.batch(range(4)))
    layers: list[Any] = [sample.sequences[0].layers[1] for sample in samples]
    probs = [layer.probs for layer in layers]
    # in the widest gap of the middle half: the last bits of a probability that is computed again may differ
    ranked = np.sort(np.concatenate(probs))
    quarter = len(ranked) // 4
    gap = quarter + int(np.diff(ranked[quarter:-quarter]).argmax())
    middle = float(ranked[gap : gap + 2].mean())
    for active, prob in zip(active_of(run, Control(off="1", threshold=middle)), probs, strict=True):
        np.testing.assert_array_equal(active[1], prob > np.float32(middle))
    for active in active_of(run, Control(threshold=0.0, cap=0.25)):
        assert active.sum(axis=1).tolist() == [active.shape[1] // 4] * 2
    rows = np.random.default_rng(0).random((2, 12)) < 0.5
    np.save(tmp_path / "mask.npy", rows)
    np.save(tmp_path / "one.npy", rows[0].astype(int))
    for active in active_of(run, Control(mask=str(tmp_path / "mask.npy"))):
        np.testing.assert_array_equal(active, rows[:, : active.shape[1]])
    for active in active_of(run, Control(mask=str(tmp_path / "one.npy"))):
        np.testing.assert_array_equal(active, rows[[0, 0], : active.shape[1]])


def test_other_modules_are_left_alone(tmp_path: Path) -> None:
    mixer: Any = dataclasses.replace(small_run().model.mixer, ffn=True)  # type: ignore[type-var]
    examples = load_examples(toy(tmp_path, mixer), "val", limit=1)
    np.save(tmp_path / "mask.npy", [True] * 12)
    batch = examples.batch([0])
    free = examples.model(batch.inputs, batch.mask).routings[0].active
    for control in (Control(on="1"), Control(mask=str(tmp_path / "mask.npy"))):
        with control.applied(examples.model):
            routing = examples.model(batch.inputs, batch.mask).routings[0]
        assert routing.active[..., 0].all() and routing.active[..., 1].equal(free[..., 1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([0, 2], "must be a .npy file of 0 and 1"),
        ([[1], [0], [1]], "holds int64 of shape (3, 1)"),
        ([1], "--mask has 1 positions, but a sequence has 3"),
    ],
)
def test_masks_that_do_not_fit(content: list[Any], message: str, tmp_path: Path, capsys: Any) -> None:
    run = str(toy(tmp_path))
    np.save(tmp_path / "mask.npy", content)
    arguments = ["--text", "1 2 3", "--mask", str(tmp_path / "mask.npy")]
    assert message in refused(capsys, "explain", run, *arguments)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"0 1 1", "archive"], ids=["empty", "zip", "text", "npz"]
)
def test_masks_that_are_no_arrays(content: bytes | str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "mask.npy"
    if isinstance(content, str):
        with open(path, "wb") as file:
            np.savez(file, mask=np.ones(3))
    else:
        path.write_bytes(content)
    arguments = [str(toy(tmp_path)), "--text", "1 2 3", "--mask", str(path)]
    assert "must be a .npy file of 0 and 1" in refused(capsys, "explain", *arguments)


def test_eval_takes_decisions_by_hand(tmp_path: Path, capsys: Any) -> None:
    run = str(toy(tmp_path))

    def scores(*flags: str) -> Any:
        assert main(["eval", run, "--split", "val", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    free, quiet = scores(), scores("--off", "all")
    assert "control" not in free and quiet["control"] == {"off": "all"}
    assert quiet["activation"] == [0.0, 0.0] != free["activation"] and quiet["loss"] != free["loss"]
    assert scores()["loss"] == free["loss"]
    assert main(["eval", run, "--split", "val", "--on", "1"]) == 0
    assert "overrides: --on 1" in capsys.readouterr().out
    assert "--threshold must be between 0 and 1" in refused(capsys, "eval", run, "--threshold", "2")


# forced decisions against brute force


@pytest.mark.parametrize("kind", ["classify", "lm"], ids=["both", "causal"])
def test_all_off_is_the_state_space_model_alone(kind: Any, tmp_path: Path) -> None:
    """Every layer: norm(SiLU(H W + b + x)) with H = SiLU(SSM(x)), and nothing else."""
    examples = load_examples(toy(tmp_path, kind=kind, length=30), "val", limit=3)
    model: Any = examples.model.double()
    for number in range(3):
        inputs = examples.batch([number]).inputs
        with Control(off="all").applied(model):
            found = model.backbone(inputs).y[0]
        x = model.backbone.embedding(inputs)[0]
        for layer in model.backbone.layers:
            hidden = torch.nn.functional.silu(layer.ssm(x[None]).y[0])
            x = layer.norm(torch.nn.functional.silu(layer.linear(hidden) + x))
        torch.testing.assert_close(found, x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["classify", "lm"], ids=["both", "causal"])
@pytest.mark.parametrize("window", [4, 6])
def test_all_on_is_dense_attention_within_the_window(kind: Any, window: int, tmp_path: Path) -> None:
    """The same, plus confidence times a gated softmax over all tokens with everything outside the window hidden."""
    base: Any = small_run(ToyConfig(kind=kind)).model.mixer
    mixer = dataclasses.replace(base, gau=GAUConfig(d_z=4, d_v=8, window=window, max_positions=16))
    examples = load_examples(toy(tmp_path, mixer, kind=kind, length=30), "val", limit=3)
    model: Any = examples.model.double()
    silu = torch.nn.functional.silu
    for number in range(3):
        inputs = examples.batch([number]).inputs
        with torch.no_grad(), Control(on="all").applied(model):
            found = model.backbone(inputs).y[0]
        with torch.no_grad(), Control(off="all").applied(model):
            assert (found - model.backbone(inputs).y[0]).abs().max() > 0.01
        x = model.backbone.embedding(inputs)[0]
        for layer in model.backbone.layers:
            weights = dict(layer.named_parameters())
            gau, router = under(weights, "sma.units.gau."), under(weights, "sma.router.")
            hidden = silu(layer.ssm(x[None]).y[0])
            logits = hidden @ router["logits.weight"].T + router["logits.bias"]
            confidence = torch.softmax(logits / router["log_temperature"].exp(), dim=1)[:, 1]
            query, key, value, gate = layer.sma.units["gau"].project(hidden, torch.arange(len(hidden)))
            place = torch.arange(len(hidden))
            apart = place - place[:, None]
            near = (apart <= 0) & (apart >= -window) if kind == "lm" else apart.abs() <= window // 2
            scores = query @ key.T / 2 + gau["bias.table"][(apart + 15).clamp(0, 30)]
            attended = torch.softmax(scores.masked_fill(~near, -torch.inf), dim=1) @ value
            out = (gate * attended) @ gau["out.weight"].T + gau["out.bias"]
            x = layer.norm(silu(confidence[:, None] * out + layer.linear(hidden) + x))
        torch.testing.assert_close(found, x, rtol=0, atol=1e-6)
