"""Scores do not depend on batches; models come back from runs; the command line around them."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_runs import lm_config, write_lm_run
from seqboat.cli.main import main
from seqboat.core.mixer import Routing
from seqboat.layers.routers import AlwaysActiveConfig
from seqboat.models.heads import LanguageModel
from seqboat.recipes import find_recipe
from seqboat.run import Run
from seqboat.tasks import TASKS
from seqboat.tasks.segments import LongTextTask
from seqboat.tasks.task import IGNORE, Batch, Task
from seqboat.training.checkpoint import MODEL, CheckpointError, CheckpointStore
from seqboat.training.config import RunConfig
from seqboat.training.display import LiveDisplay, PlainDisplay, make_display
from seqboat.training.evaluate import (
    Streaming,
    Windows,
    activation_sums,
    cut_text,
    evaluate,
    rates,
    stream_parts,
)
from seqboat.training.parallel import World, choose_device
from seqboat.training.trainer import train
from small_runs import Spy, ToyConfig, same_tensors, small_run

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "toy", ToyConfig)
        train(small_run(schedule={"steps": 8}, evaluation={"every": 4}), folder, display=Spy())
    return folder


@pytest.mark.parametrize("kind", ["classify", "match", "lm"])
def test_scores_do_not_depend_on_the_batch_size(kind: Any) -> None:
    config = small_run(ToyConfig(kind=kind))
    torch.manual_seed(0)
    model = config.build_model()
    task = config.build_task()
    one, two, three = (evaluate(model, task, "val", ALONE, batch_size=size) for size in (45, 7, 1))
    for other in (two, three):
        assert other.metrics == pytest.approx(one.metrics, rel=1e-5)
        assert other.activation == pytest.approx(one.activation)
    assert one.examples == 45
    assert evaluate(model, task, "val", ALONE, limit=5).examples == 5
    assert model.training


def test_a_carried_state_reads_on() -> None:
    """Segments in streams are scored as one text per row."""
    task_config = ToyConfig(kind="lm", count=7)
    config = small_run(task_config)
    torch.manual_seed(0)
    model, task = config.build_model().eval(), config.build_task()
    scored = evaluate(model, task, "val", ALONE, batch_size=2, carry_state=True)
    data = task.dataset("val")
    totals: Any = None
    for rows in ([0, 1, 2, 3], [4, 5, 6]):
        state = None
        for number in rows:
            batch = task.collate([data[number]])
            out: Any = model(batch.inputs, batch.mask, state)
            state = out.state
            score = task.score(out, batch)
            totals = score if totals is None else {k: totals[k] + v for k, v in score.items()}
    assert scored.metrics == pytest.approx(task.summarize(totals), rel=1e-5)
    head = evaluate(model, task, "val", ALONE, batch_size=2, carry_state=True, limit=4)
    assert head.examples == 4


@pytest.mark.parametrize(("count", "size", "ranks"), [(7, 2, 1), (5, 4, 1), (9, 4, 2), (3, 8, 2), (1, 4, 3)])
def test_streams_hold_every_segment_once(count: int, size: int, ranks: int) -> None:
    parts = [stream_parts(count, size, World(rank, ranks, torch.device("cpu"))) for rank in range(ranks)]
    # every process takes part in as many batches
    assert len({len(p) for p in parts}) == 1
    seen = [i for mine in parts for part in mine if part.counted for i in part.examples]
    assert sorted(seen) == list(range(count))
    for mine in parts:
        for before, after in itertools.pairwise(mine):
            if after.counted:
                # rows continue, and only the last ones end
                assert after.examples == tuple(i + 1 for i in before.examples[: len(after.examples)])


# long texts


def text_model(folder: Path, config: RunConfig) -> tuple[LanguageModel, Task]:
    """A language model of random letters, in float64, and its task."""
    data = np.random.default_rng(0).integers(97, 123, 20_000, dtype=np.uint8).tobytes()
    (folder / "text.txt").write_bytes(data)
    torch.manual_seed(0)
    model = config.build_model()
    assert isinstance(model, LanguageModel)
    return model.double().eval(), config.build_task()


def bits(model: LanguageModel, task: Task, reading: Windows | Streaming, **settings: Any) -> float:
    return evaluate(model, task, "test", ALONE, reading=reading, **settings).metrics["bits"]


def test_a_stream_may_come_in_any_chunks(tmp_path: Path) -> None:
    model, task = text_model(tmp_path, lm_config(tmp_path / "text.txt"))
    text = torch.from_numpy(task.text("test").astype(np.int64))[None]
    assert text.shape == (1, 1000)
    with torch.no_grad():
        logits = model(text[:, :-1]).logits[0]
    want = float(torch.nn.functional.cross_entropy(logits, text[0, 1:])) / math.log(2)
    for chunk in (9, 64, 333, 5000):
        assert bits(model, task, Streaming(chunk=chunk), batch_size=1) == pytest.approx(want, abs=1e-9)
    model.float()
    whole, parts = (bits(model, task, Streaming(chunk=chunk), batch_size=1) for chunk in (5000, 77))
    assert parts == pytest.approx(whole, abs=1e-6)


def test_windows_are_read_from_nothing(tmp_path: Path) -> None:
    """Against a loop over the scored bytes, each with the window that it is in."""
    model, task = text_model(tmp_path, lm_config(tmp_path / "text.txt"))
    text, total, count = task.text("test").astype(np.int64)[:201], 0.0, 0
    for first in range(0, 200, 24):
        begin, end = max(0, first - 40), min(first + 24, 200)
        with torch.no_grad():
            logits = model(torch.from_numpy(text[None, begin:end])).logits[0]
        scores = logits.log_softmax(-1)
        for t in range(first, end):
            total -= float(scores[t - begin, text[t + 1]]) / math.log(2)
            count += 1
    assert count == 200
    for size in (1, 4):
        got = bits(model, task, Windows(window=64, context=40), limit=200, batch_size=size)
        assert got == pytest.approx(total / count, abs=1e-9)


def test_a_task_is_scored_in_the_windows_that_it_names(tmp_path: Path) -> None:
    """Against a loop that reads the window of every byte again for that byte alone."""
    config = lm_config(tmp_path / "text.txt")
    config = config.replace(task={"window": 16, "context": 11, "holdout": 0.005})
    model, task = text_model(tmp_path, config)
    text, total = task.text("test").astype(np.int64), 0.0
    for t in range(len(text) - 1):
        begin = max(0, t - t % 5 - 11)
        with torch.no_grad():
            logits = model(torch.from_numpy(text[None, begin : t + 1])).logits[0, -1]
        total -= float(logits.log_softmax(-1)[text[t + 1]]) / math.log(2)
    own = evaluate(model, task, "test", ALONE, batch_size=3)
    assert own.metrics["bits"] == pytest.approx(total / (len(text) - 1), abs=1e-9)
    assert own.metrics["bits"] == pytest.approx(bits(model, task, Windows(window=16, context=11)), abs=1e-9)
    assert len(task.dataset("train")[0].inputs) == 32, "training reads whole segments"


def test_enwik8_is_scored_in_the_windows_of_the_paper() -> None:
    """8,192 bytes, of which the last 1,192 are scored: as `seqboat eval --mode windows` does by default."""
    task = find_recipe("enwik8")().build_task()
    assert isinstance(task, LongTextTask) and task.max_length == 8192
    text = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)
    task._store = {"bytes": text}  # type: ignore[attr-defined]
    task.borders = lambda split: (0, len(text))  # type: ignore[method-assign]
    data, default = task.segments("test"), cut_text(text, Windows())
    assert len(data) == len(default) == 17
    seen = 0
    for index in range(17):
        example, other = data[index], default[index]
        np.testing.assert_array_equal(example.inputs, other.inputs)
        np.testing.assert_array_equal(example.target, other.target)
        scored = int(np.sum(np.asarray(example.target) != IGNORE))
        before = len(example.inputs) - scored
        assert len(example.inputs) <= 8192 and scored <= 1192 and before == min(seen, 7000)
        seen += scored
    assert seen == len(text) - 1


def test_windows_and_streams_agree_where_they_must(tmp_path: Path) -> None:
    """In the first window, and everywhere if the model remembers less than the context."""
    path = tmp_path / "text.txt"
    windows, streaming = Windows(window=64, context=32), Streaming(chunk=50)
    model, task = text_model(tmp_path, lm_config(path))
    few = Windows(window=16, context=8)
    for limit in (5, 16):
        whole = bits(model, task, streaming, limit=limit, batch_size=1)
        assert bits(model, task, few, limit=limit) == pytest.approx(whole, abs=1e-9)
    longer = [bits(model, task, reading, batch_size=32) for reading in (few, windows)]
    assert abs(longer[0] - longer[1]) > 1e-6, "a model with a long memory must tell contexts apart"
    config = lm_config(path, window=4, truncation=6)
    mixer: Any = dataclasses.replace(config.model.mixer, router=AlwaysActiveConfig())  # type: ignore[type-var]
    # two layers look back on 4 + 5 bytes each
    short, task = text_model(tmp_path, config.replace(model={"mixer": mixer}))
    whole = bits(short, task, streaming, batch_size=1)
    assert bits(short, task, windows) == pytest.approx(whole, abs=1e-9)
    near = Windows(window=64, context=4)
    assert abs(bits(short, task, near) - whole) > 1e-6, "with less context than memory they must differ"


def test_rows_of_a_stream_begin_from_nothing(tmp_path: Path) -> None:
    """Several rows read parts of the text side by side: faster, and not quite the same."""
    model, task = text_model(tmp_path, lm_config(tmp_path / "text.txt"))
    alone, four = (
        evaluate(model, task, "test", ALONE, batch_size=n, reading=Streaming(chunk=10)) for n in (1, 4)
    )
    assert alone.metrics["bits"] != four.metrics["bits"]
    assert alone.metrics["bits"] == pytest.approx(four.metrics["bits"], rel=0.02)
    assert alone.examples == four.examples == 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Windows(window=0), "window must be an integer >= 1, got 0"),
        (lambda: Windows(context=-1), "context must be an integer >= 0, got -1"),
        (lambda: Windows(window=64, context=64), "context must be less than the window of 64, got 64"),
        (lambda: Streaming(chunk=0), "chunk must be an integer >= 1, got 0"),
    ],
)
def test_readings_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_modes_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_lm_run(tmp_path))
    tokens = len(Run(run).config.build_task().text("val")) - 1
    results = []
    for mode in (["stream", "--chunk", "7"], ["stream"], ["windows", "--window", "40", "--context", "30"]):
        assert main(["eval", run, "--split", "val", "--mode", *mode, "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    one, two, three = results
    assert one["mode"] == "stream" and one["chunk"] == 7 and one["tokens"] == tokens
    assert one["bits"] == pytest.approx(two["bits"], abs=1e-6)
    assert (three["mode"], three["window"], three["context"]) == ("windows", 40, 30)
    assert main(["eval", run, "--mode", "windows", "--limit", "50"]) == 0
    shown = capsys.readouterr().out
    assert "50 tokens of test, in windows of 8,192 with at least 7,000 of context" in shown
    assert main(["eval", run, "--mode", "stream"]) == 0
    assert "tokens of test, read once with a carried state" in capsys.readouterr().out


def test_a_run_of_another_kind_is_no_language_model(run: Path) -> None:
    with pytest.raises(
        ValueError, match="run must be the run of a language model of bytes, got a classifier"
    ):
        _ = Run(run).language_model
    with pytest.raises(ValueError, match="the task toy is not one long text"):
        Run(run).evaluate(reading=Streaming())


# activation


def test_activation_counts_real_tokens_of_both_sequences() -> None:
    active = torch.tensor([[[True], [True], [False]]])
    routing = Routing(active, active.float())
    mask = torch.tensor([[True, False, True]])
    single = Batch(torch.zeros(1, 3, dtype=torch.int64), mask, torch.zeros(1))
    assert rates(activation_sums((routing, None), single)) == [0.5, None]
    pair = single._replace(second=torch.zeros(1, 3, dtype=torch.int64))
    assert rates(activation_sums((routing, None, routing, None), pair)) == [0.6, None]


def test_models_come_back(run: Path) -> None:
    model, config = Run(run).model, Run(run).config
    assert config == small_run(schedule={"steps": 8}, evaluation={"every": 4}) and not model.training
    best = CheckpointStore(run).best()
    assert best is not None and same_tensors(dict(model.state_dict()), best.tensors(MODEL))
    latest = Run(run, which="latest").model
    named = Run(run / "step-8").model
    assert same_tensors(dict(latest.state_dict()), dict(named.state_dict()))
    assert Run(run / "step-8").step == 8


def test_a_run_scores_as_it_did_in_training(run: Path) -> None:
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in recorded if r["split"] == "val"][-1]
    again = Run(run / "step-8").evaluate("val")
    assert again["accuracy"] == last["accuracy"]
    assert again["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert again["activation"] == last["activation"] and again["step"] == 8


def test_what_is_no_run_is_named(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not the folder of a run"):
        _ = Run(tmp_path / "nowhere").model
    with pytest.raises(ValueError, match="contains no complete checkpoint"):
        _ = Run(tmp_path).model


def test_a_damaged_checkpoint_is_not_scored(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "step-8"
    shutil.copytree(run / "step-8", copy)
    data = bytearray((copy / MODEL).read_bytes())
    data[-1] ^= 1
    (copy / MODEL).write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="does not match its sha256"):
        _ = Run(copy).model


def test_ctrl_c_ends_an_evaluation_within_a_batch(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from small_runs import ToyData

    real, reads = ToyData.__getitem__, []

    def read(self: Any, index: int) -> Any:
        reads.append(index)
        if len(reads) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, index)

    monkeypatch.setattr(ToyData, "__getitem__", read)
    assert main(["eval", str(run), "--split", "train", "--batch-size", "4"]) == 130
    assert len(reads) <= 4
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "stopped\n")


def test_devices_are_checked() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"training.device must be auto, cpu or cuda, got 'fast'"):
        choose_device("fast")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(ValueError, match=r"training.device is cuda, but there is no GPU"):
            choose_device("cuda")


# the command line

RECALL = [
    "--data.length=24",
    "--data.pairs=2",
    "--data.vocab=16",
    "--data.train_size=64",
    "--data.eval_size=16",
    "--model.d_model=8",
    "--model.num_layers=1",
    "--model.mixer.gau.d_z=4",
    "--model.mixer.gau.d_v=8",
    "--schedule.steps=4",
    "--schedule.warmup_steps=1",
    "--training.batch_size=8",
    "--training.log_every=2",
]


def test_train_eval_resume_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "recall", "--out", out, *RECALL]) == 0
    shown = capsys.readouterr().out
    assert "step 4/4" in shown and "active %" in shown and "finished; best accuracy" in shown
    assert main(["eval", out, "--split", "val", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"accuracy", "loss", "bits", "step", "activation"} <= result.keys() and result["examples"] == 16
    assert result["recipe"] == "recall"
    assert main(["eval", out, "--limit", "4"]) == 0
    captured = capsys.readouterr()
    assert "4 examples of test" in captured.out and captured.err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["eval", out, "--batch_size", "8"]) == 0
    assert capsys.readouterr().err == "\r1/2 batches\r2/2 batches\n"
    assert main(["train", "--resume", "--out", out]) == 0
    assert "already finished" in capsys.readouterr().out
    assert main(["train", "recall", "--out", out, *RECALL]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_the_printed_configuration_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recall", "--print-config", *RECALL, "--model.mixer", "seqboat"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["train", "--config", str(path), "--print_config"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "recal"], "recipe 'recal' is unknown; did you mean recall?"),
        (["train"], "give a recipe (seqboat paper list recipes), --config FILE"),
        (["train", "recall", "--model.depth=2"], "--model.depth is not a field of this configuration"),
        (["train", "recall", "--config", "nowhere.json"], "cannot read the configuration nowhere.json"),
        (["eval", "nowhere"], "nowhere is not the folder of a run"),
        (["eval", "nowhere", "--limit", "0"], "--limit must be an integer >= 1, got 0"),
        (["eval", "nowhere", "--window", "9"], "--window works only with --mode windows, got no --mode"),
        (
            ["eval", "x", "--mode", "stream", "--context", "9"],
            "--context works only with --mode windows, got --mode stream",
        ),
        (
            ["eval", "x", "--mode", "windows", "--chunk", "9"],
            "--chunk works only with --mode stream, got --mode windows",
        ),
        (
            ["eval", "x", "--mode", "windows", "--window", "9"],
            "context must be less than the window of 9, got 7000",
        ),
        (["eval", "x", "--device", "fast"], "--device must be auto, cpu or cuda, got 'fast'"),
    ],
)
def test_errors_are_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith(f"seqboat {arguments[0]}: error:")


def test_other_commands_take_no_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["paper", "list", "recipes", "--model.depth=2"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --model.depth=2" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["recipes", "mixers", "tasks", "routers"])
def test_list(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    wanted = {"recipes": "lra.text-small", "mixers": "seqboat", "tasks": "recall", "routers": "sigmoid"}
    assert wanted[what] in names
    assert all(len(line.split()) > 2 for line in lines if not line.startswith("toy"))


# displays


RECORD = {
    "step": 3,
    "split": "train",
    "epoch": 0.5,
    "loss": 1.25,
    "lr": 0.001,
    "grad_norm": 2.0,
    "tokens_per_s": 1234.0,
    "memory_mb": 99.0,
    "activation": [0.5, None],
}


def test_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 130.0])
    monkeypatch.setattr("seqboat.training.display.time.monotonic", lambda: next(times))
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.start("a run", 10)
    display.log(RECORD)
    display.scored({"step": 3, "split": "val", "accuracy": 0.5, "activation": [0.5, None]}, True)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "a run"
    assert lines[1] == "step 3/10  loss 1.2500  active % 50 -  70 s left"
    assert lines[2] == "step 3/10  val: accuracy 0.5000  active % 50 -  best so far"
    stream.close()
    # a closed terminal does not end a run
    display.tell("nobody hears this")


def test_the_live_bar() -> None:
    from rich.console import Console

    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=100))
    display.start("a run", 10, 1)
    display.log(RECORD)
    display.scored({"step": 3, "split": "val", "accuracy": 0.5, "activation": [0.5, None]}, True)
    display.tell("[layer] 2 is <dead>")
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for part in (
        "a run",
        "step 3/10  loss 1.2500",
        "50 -",
        "val: accuracy 0.5000",
        "[layer] 2 is <dead>",
        "━",
    ):
        assert part in text


def test_the_display_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_display(), PlainDisplay)
    assert not isinstance(make_display(first=False), PlainDisplay)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert isinstance(make_display(), LiveDisplay)
