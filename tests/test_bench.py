"""The benchmark command: rows, ratios, rates, refusals; never how long something took."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqboat.bench import layers
from seqboat.bench import setting as setting_module
from seqboat.bench.decode import run_decode
from seqboat.bench.layers import (
    LayerRow,
    LowerBoundRunner,
    find_memory,
    measure_memory,
    run_layers,
)
from seqboat.bench.measure import available_memory, in_child, quartiles, time_rounds
from seqboat.bench.rates import ForcedRate, force_rate
from seqboat.bench.setting import (
    MODES,
    PRESETS,
    Candidate,
    LayerSetting,
    Mode,
    build,
    configure,
    parse_candidate,
)
from seqboat.cli.main import main
from seqboat.core.mixer import activation
from seqboat.layers.routers import TemperedSoftmax
from seqboat.layers.seqboat import SeqBoat

TINY = LayerSetting(batch=2, length=48, d_model=16, d_z=8, d_v=12, d_state=4, window=8, heads=2)


PEAKS = """[
    __import__("seqboat.bench.measure", fromlist=["x"]).extra_peak(lambda: __import__("torch").ones(n, 2**18))
    for n in (100, 80, 40)
]"""


def test_memory_of_known_allocations() -> None:
    """Of 100, 80 and 40 MiB, one after the other: what was freed before hides nothing."""
    measured = in_child(eval, PEAKS)
    assert measured == pytest.approx([100 * 2**20, 80 * 2**20, 40 * 2**20], rel=0.2)


def test_failures_of_a_child_are_told() -> None:
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        in_child(int, "x")
    with pytest.raises(RuntimeError, match="ended with code 3"):
        in_child(os._exit, 3)


def test_forced_rate_is_reached_and_keeps_the_gradient() -> None:
    for rate in (0.0, 0.1, 0.5, 1.0):
        layer = build(parse_candidate("seqboat"), replace(TINY, rate=rate, length=500))
        assert isinstance(layer, SeqBoat)
        x = torch.randn(3, 500, 16)
        out = layer(x)
        assert out.routing is not None
        assert activation(out.routing).per_row.flatten().tolist() == pytest.approx([rate] * 3, abs=0.01)
        again = layer(x).routing
        assert again is not None and again.active.equal(out.routing.active)
        out.y.square().sum().backward()
        router = layer.sma.router
        assert isinstance(router, ForcedRate) and isinstance(router.router, TemperedSoftmax)
        logits = router.router.logits.weight.grad
        assert logits is not None and bool(logits.any()) == (rate > 0)


def test_forced_rate_in_steps() -> None:
    layer = build(parse_candidate("seqboat"), replace(TINY, rate=0.3, causal=True))
    assert isinstance(layer, SeqBoat)
    state, count = layer.init_state(4), torch.zeros(4)
    for _ in range(100):
        _, state, routing = layer.step(torch.randn(4, 16), state)
        assert routing is not None
        count += routing.active[:, 0]
    assert count.tolist() == pytest.approx([30] * 4, abs=1)


def test_natural_rate_and_always_active_are_left_alone() -> None:
    natural = build(parse_candidate("seqboat"), replace(TINY, rate=None))
    assert not any(isinstance(part, ForcedRate) for part in natural.modules())
    config = configure(parse_candidate("seqboat"), TINY)
    from seqboat import AlwaysActiveConfig

    always = replace(config, router=AlwaysActiveConfig()).build(16)
    force_rate(always, 0.5)
    assert always(torch.randn(1, 9, 16)).routing.active.all()


def test_candidates_follow_the_setting_and_their_own_fields() -> None:
    config = configure(parse_candidate("seqboat:gau.window=32,gau.positions=original"), TINY)
    assert (config.gau.window, config.gau.positions, config.gau.d_z, config.ssm.d_state) == (
        32,
        "original",
        8,
        4,
    )
    config = configure(parse_candidate("transformer:activation=gelu"), TINY)
    assert (config.heads, config.activation, config.causal) == (2, "gelu", False)
    assert configure(parse_candidate("mega-chunk"), replace(TINY, causal=True)).causal
    assert configure(parse_candidate("transformer-xl"), TINY).causal
    with pytest.raises(ValueError, match="Linformer has no causal form"):
        configure(parse_candidate("linformer"), replace(TINY, causal=True))
    with pytest.raises(ValueError, match="did you mean seqboat"):
        parse_candidate("seqbot")
    with pytest.raises(ValueError, match="FIELD=VALUE"):
        parse_candidate("seqboat:window")
    with pytest.raises(ValueError, match=r"gau.widow' is unknown; did you mean .*gau.window"):
        configure(parse_candidate("seqboat:gau.widow=3"), TINY)
    with pytest.raises(ValueError, match=r"causal must be True or False, got a dictionary"):
        configure(parse_candidate("seqboat:causal.x=3"), TINY)
    with pytest.raises(ValueError, match="lower-bound takes no fields"):
        parse_candidate("lower-bound:x=1")
    with pytest.raises(ValueError, match="rate must be between 0 and 1, got 2"):
        LayerSetting(rate=2)
    with pytest.raises(ValueError, match="dtype must be"):
        LayerSetting(dtype="float33")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.5, None])
def test_the_lower_bound_counts_what_the_layer_needs(causal: bool, rate: float | None) -> None:
    setting = replace(TINY, causal=causal, rate=rate, length=64)
    bound = LowerBoundRunner(setting)
    bound.run("training")
    forward, both = bound.flops("inference"), bound.flops("training")
    assert both == 3 * forward > 0
    whats = [product.what for product in bound.forward]
    assert ("gau: scores" in whats) == (rate != 0.0)
    if rate == 0.5:
        by_name = {product.what: product.flops for product in bound.forward}
        tokens, active = 128, 64
        assert by_name["linear"] == 2 * tokens * 16 * 16
        assert by_name["gau: base"] == 2 * active * 16 * (8 + 24)
        # 9 keys for each active token, the last group filled up
        assert by_name["gau: scores"] == 2 * math.ceil(active / 9) * 9 * 9 * 8


def test_quartiles_and_turns() -> None:
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0, 4.0)
    order: list[str] = []
    jobs = {name: (lambda n=name: order.append(n)) for name in "ab"}
    times = time_rounds(jobs, rounds=2, warmup=1)
    assert order == ["a", "b"] * 3
    assert all(len(values) == 2 and min(values) >= 0 for values in times.values())


def test_rows_and_ratios() -> None:
    names = ["seqboat", "published", "transformer:activation=gelu", "mega", "lower-bound"]
    rows = run_layers([parse_candidate(name) for name in names], TINY, rounds=3, memory=False)
    assert [(row.mode, row.candidate) for row in rows] == [(mode, name) for mode in MODES for name in names]
    for row in rows:
        assert row.seconds is not None and row.ratio is not None and row.lower_bound_ratio is not None
        assert 0 < row.seconds.low <= row.seconds.median <= row.seconds.high
        first = next(r for r in rows if r.mode == row.mode)
        assert first.seconds is not None and first.ratio == 1
        assert row.ratio == row.seconds.median / first.seconds.median
        routed = row.candidate in ("seqboat", "published")
        assert row.active == (pytest.approx(0.5, abs=0.01) if routed else None)
        assert (row.parameters > 0) == (row.candidate != "lower-bound")
    assert rows[0].parameters == rows[1].parameters


def test_memory_is_measured_in_a_child() -> None:
    setting = replace(TINY, length=1024, batch=1)
    found = find_memory(parse_candidate("transformer:activation=gelu"), setting, "training")
    # queries, keys, values and the hidden tokens of the feed-forward block, in float32
    assert found > 7 * setting.d_model * 1024 * 4


def test_what_does_not_fit_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(candidate: Candidate, setting: LayerSetting, mode: Mode) -> int:
        if candidate.name == "transformer":
            raise RuntimeError("RuntimeError: can't allocate memory")
        return 2**20

    monkeypatch.setattr(layers, "find_memory", find)
    ours, theirs = run_layers(
        [parse_candidate("seqboat"), parse_candidate("transformer")], TINY, ("inference",), rounds=1
    )
    assert ours.seconds is not None and not ours.note and ours.memory == 2**20
    assert theirs.seconds is None and theirs.memory is None
    assert theirs.note == "transformer, inference: RuntimeError: can't allocate memory"
    with pytest.raises(ValueError, match="nothing fits: transformer, training: RuntimeError"):
        run_layers([parse_candidate("transformer")], TINY, rounds=1)
    assert main(["bench", "--mixers", "seqboat", "--length", str(2**34)]) == 2
    error = capsys.readouterr().err.strip()
    assert (
        error.startswith("seqboat bench: error: 1 x 17179869184 tokens need at least") and "\n" not in error
    )
    assert available_memory() > 2**20


def test_command_writes_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # another test measures in a real child
    monkeypatch.setattr(layers, "in_child", lambda job, *arguments: job(*arguments))
    record = tmp_path / "out.json"
    words = "--mixers seqboat lower-bound --length 64 --batch 1 --rounds 1 --warmup 0 --rate 0.25"
    assert main(["bench", *words.split(), "--json", str(record)]) == 0
    printed = capsys.readouterr().out
    assert "training step, 1 x 64 tokens, window 256, rate 0.25" in printed
    assert "inference, 1 x 64 tokens" in printed and "x lower bound" in printed
    written = json.loads(record.read_text())
    assert written.keys() == {"machine", "setting", "what", "rounds", "rows"}
    assert written["setting"]["rate"] == 0.25 and written["machine"]["torch"] == torch.__version__
    assert len(written["rows"]) == 4
    for row in written["rows"]:
        assert row.keys() == set(LayerRow._fields)
        assert row["seconds"].keys() == {"median", "low", "high"}
        assert row["ratio"] is not None and row["lower_bound_ratio"] is not None
        if row["candidate"] == "seqboat":
            assert row["memory"] is not None and row["active"] == 0.25


def test_forms_with_a_window_of_their_own_keep_it() -> None:
    windows = {
        name: configure(parse_candidate(name), replace(TINY, window=7)).gau.window
        for name in ("seqboat", "seqboat-local", "seqboat-mem32", "seqboat-local32")
    }
    assert windows == {"seqboat": 7, "seqboat-local": 7, "seqboat-mem32": 32, "seqboat-local32": 32}


def test_a_width_of_its_own() -> None:
    layer = build(parse_candidate("mega:d_model=6,d_ff=3"), TINY)
    assert layer.d_model == 6 and TINY.d_model != 6
    rows = run_layers([parse_candidate("mega:d_model=6")], TINY, rounds=1, memory=False)
    assert all(row.seconds is not None for row in rows)
    with pytest.raises(ValueError, match="d_model must be an integer >= 1, got 'wide'"):
        parse_candidate("mega:d_model=wide")


def test_the_memory_of_the_lower_bound_is_that_of_its_operands() -> None:
    bound = LowerBoundRunner(TINY)
    bound.run("training")
    held = sum(operand.nbytes for operand in bound._operands.values())
    assert bound.memory("training") == held > bound.memory("inference") > 0


def test_tables_keep_names_whole(capsys: pytest.CaptureFixture[str]) -> None:
    label = "seqboat:gau.positions=original,gau.window=1024,compiled=True"
    found = run_layers([parse_candidate("seqboat")], TINY, ("inference",), rounds=1, memory=False)
    layers.print_layers([found[0]._replace(candidate=label, memory=2**20)], TINY)
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if label in line]
    assert "1.0 MB" in line and "x lower bound" not in printed


def test_compiled_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def note(layer: torch.nn.Module) -> torch.nn.Module:
        compiled.append(layer)
        return layer

    monkeypatch.setattr("seqboat.models.compile.compile_model", note)
    measured = [parse_candidate(text) for text in ("seqboat", "seqboat:compiled=True")]
    rows = run_layers(measured, TINY, ("training",), rounds=1, memory=False)
    assert len(compiled) == 1 and [row.candidate for row in rows] == ["seqboat", "seqboat:compiled=True"]
    measure_memory(measured[1], replace(TINY, length=512), "inference")
    assert len(compiled) == 2
    with pytest.raises(ValueError, match="compiled must be True or False, got 'yes'"):
        parse_candidate("seqboat:compiled=yes")


def test_decode_rows() -> None:
    names = ["seqboat", "mega-chunk", "transformer"]
    rows = run_decode(
        [parse_candidate(n) for n in names], replace(TINY, batch=2), [16, 40], steps=3, rounds=2
    )
    assert [(row.candidate, row.context) for row in rows] == [(n, c) for c in (16, 40) for n in names]
    sizes = {name: [row.state_bytes for row in rows if row.candidate == name] for name in names}
    assert sizes["seqboat"][0] == sizes["seqboat"][1] and sizes["mega-chunk"][0] == sizes["mega-chunk"][1]
    assert sizes["transformer"][1] > sizes["transformer"][0]
    for row in rows:
        assert row.tokens_per_second == 2 / row.seconds.median
        assert (row.growth == 1) == (row.context == 16)
    with pytest.raises(ValueError, match="lower-bound has no state"):
        run_decode([parse_candidate("lower-bound")], TINY, [8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "0"], "--length must be an integer >= 1, got 0"),
        (["--rounds", "0"], "--rounds must be an integer >= 1, got 0"),
        (["--json", "no/such/folder/x.json"], "cannot write to the folder no/such/folder"),
        (["--context", "8"], "--context and --steps need 'decode'"),
        (["decode", "--length", "8"], "--length cannot be used with 'decode'"),
        (["decode", "--mixers", "seqboat:compiled=True"], "decoding steps cannot be compiled here"),
        (["--mixers", "seqboat", "seqboat"], "the same candidate is given twice"),
        (["--mixers", "seqboat", "transformer:heads=7"], "multiple of heads = 7"),
        (["--dtype", "float33"], "dtype must be a torch type"),
        (["--rate", "1.5"], "--rate must be a number from 0 to 1 or 'natural', got '1.5'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("seqboat bench: error: ") and message in error and "\n" not in error


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], LayerSetting]]:
    """Candidates and settings that a command would measure; nothing is measured."""
    calls: list[tuple[list[str], LayerSetting]] = []

    def run_layers(found: list[Candidate], setting: LayerSetting, *rest: Any, **more: Any) -> list[Any]:
        calls.append(([candidate.label for candidate in found], setting))
        return []

    monkeypatch.setattr(layers, "run_layers", run_layers)
    return calls


def test_options_of_the_command_reach_the_setting(
    asked: list[tuple[list[str], LayerSetting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert main(["bench", "--mixers", "seqboat"]) == 0 and threads == []
    words = ["--preset", "enwik8", "--window", "32", "--rate", "natural", "--threads", "3"]
    assert main(["bench", "--mixers", "seqboat", *words]) == 0 and threads == [3]
    assert main(["bench", "--mixers", "seqboat", "--length", "1024"]) == 0
    usual, found, short = (setting for _, setting in asked)
    assert usual == PRESETS["text"] and found == replace(PRESETS["enwik8"], window=32, rate=None)
    assert (short.batch, short.length) == (16, 1024), "as many tokens"


def test_without_the_repository_the_published_algorithm_is_left_out(
    asked: list[tuple[list[str], LayerSetting]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(setting_module, "PUBLISHED_SOURCE", tmp_path / "published.py")
    assert main(["bench"]) == 0
    line = "skipping 'published', which needs a clone of the repository\n"
    assert capsys.readouterr().err == line
    (whole, _), (rest, _) = asked
    assert "published" in whole and rest == [label for label in whole if label != "published"]
    with pytest.raises(ValueError, match="'published' needs the repository"):
        setting_module.load_published()


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom seqboat.cli.main import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "decode" in done.stdout and "--length" in done.stdout
