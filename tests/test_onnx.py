"""ONNX files against the models they came from, and against bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lm_runs import write_lm_run
from seqboat.cli.main import main
from seqboat.inference.int8 import quantize
from seqboat.layers.budget import BudgetConfig
from seqboat.layers.gau import GAUConfig
from seqboat.layers.policy import policies
from seqboat.layers.routers import (
    AlwaysActiveConfig,
    ExpertChoiceConfig,
    GumbelConfig,
    RouterConfig,
    SigmoidConfig,
    TemperedSoftmaxConfig,
    ThresholdConfig,
    TopKConfig,
    XMoEConfig,
)
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.layers.variants import SeqBoatThenFFNConfig
from seqboat.mixers.ssm import S4DLayerConfig, S5LayerConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel, Matcher, Tagger
from seqboat.run import Run
from seqboat.ssm.conv import EMAConvConfig
from seqboat.ssm.ema import EMAConfig
from seqboat.ssm.s4 import S4Config
from seqboat.ssm.s4d import S4DConfig
from seqboat.ssm.s5 import S5Config

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from seqboat.onnx.export import FORMAT, prepare, write_form  # noqa: E402
from seqboat.onnx.session import OnnxModel, compare, next_state  # noqa: E402

WINDOW = 5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mixer(**changes: Any) -> SeqBoatConfig:
    """A small layer; fields of the attention unit start with `gau_`."""
    gau = {name[4:]: changes.pop(name) for name in list(changes) if name.startswith("gau_")}
    gau = {"d_z": 4, "d_v": 6, "window": WINDOW, "max_positions": 9, **gau}
    kind = changes.pop("kind", SeqBoatConfig)
    return kind(**{"ssm": EMAConfig(d_state=3), "init": "paper", **changes, "gau": GAUConfig(**gau)})


def vary(model: nn.Module, seed: int = 0) -> Any:
    """Weights of a size at which every part counts, and running averages that are not the initial ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "log_" not in name and "imag" not in name:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand(buffer.shape, generator=generator), alpha=0.5)
            elif name.endswith("border"):
                buffer.fill_(0.2)
    return model.eval()


def backbone(layer: Any, **changes: Any) -> BackboneConfig:
    return BackboneConfig(**{"mixer": layer, "d_model": 8, "num_layers": 2, "vocab": 11, **changes})


def write(model: nn.Module, form: str, folder: Path, **settings: Any) -> OnnxModel:
    path = folder / f"{form}.onnx"
    write_form(model, form, path, {"format": FORMAT}, **settings)
    return OnnxModel(path)


def check(model: nn.Module, form: str, folder: Path, some: bool = True) -> None:
    """A file gives the numbers and decisions of its model."""
    found = compare(write(model, form, folder), model, 24 if form == "step" else 70)
    assert found.flipped == 0 and found.worst <= 1e-4, found
    if some:
        assert found.decisions >= 96


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu2": {"gau_attention": "relu2", "gau_positions": "compressed"},
    "laplace": {"gau_attention": "laplace", "gau_positions": "rotary"},
    "rotary": {"gau_positions": "rotary"},
    "no positions": {"gau_positions": "none"},
    "chunk": {"gau_span": "chunk"},
    "chunk, compressed": {"gau_span": "chunk", "gau_positions": "compressed", "gau_attention": "relu2"},
    "truncated": {"ssm": EMAConfig(d_state=3, truncation=7)},
    "convolution": {"ssm": EMAConvConfig(d_state=3)},
    "convolution, truncated": {"ssm": EMAConvConfig(d_state=3, truncation=7, conv=3)},
    "s4d": {"ssm": S4DConfig(d_state=4)},
    "s4d, bilinear": {"ssm": S4DConfig(d_state=6, rule="bilinear", init="lin")},
    "s4d, truncated": {"ssm": S4DConfig(d_state=4, truncation=5)},
    "s5": {"ssm": S5Config(d_state=8, systems=2)},
    "two modules": {"ffn": True},
    "then ffn": {"kind": SeqBoatThenFFNConfig, "norm": "scale"},
    "then ffn, prenorm": {"kind": SeqBoatThenFFNConfig, "prenorm": True},
    "prenorm": {"prenorm": True, "dropout": 0.1},
    "batch norm": {"norm": "batch"},
    "rms norm": {"norm": "rms", "prenorm": True},
    "sigmoid": {"router": SigmoidConfig()},
    "tempered sigmoid": {"router": SigmoidConfig(temperature_scale=0.5)},
    "gumbel": {"router": GumbelConfig()},
    "threshold": {"router": ThresholdConfig(threshold=0.4)},
    "x-moe": {"router": XMoEConfig(d_route=3), "ffn": True},
    "always": {"router": AlwaysActiveConfig()},
}
FULL: dict[str, dict[str, Any]] = {
    name: {"gau_span": "full", **changes}
    for name, changes in {
        "full": {},
        "full, relu2": {"gau_attention": "relu2", "gau_positions": "compressed"},
        "full, laplace": {"gau_attention": "laplace", "gau_positions": "rotary"},
    }.items()
}
BORDER: dict[str, dict[str, Any]] = {
    "top-k": {"router": TopKConfig()},
    "expert choice": {"router": ExpertChoiceConfig(), "ffn": True},
}


@pytest.mark.parametrize("case", [*CASES, *BORDER])
def test_a_step(case: str, tmp_path: Path) -> None:
    model = vary(LanguageModel(backbone(mixer(causal=True, **{**CASES, **BORDER}[case]))))
    check(model, "step", tmp_path)


@pytest.mark.parametrize("case", [*CASES, *FULL])
def test_whole_sequences(case: str, tmp_path: Path) -> None:
    check(vary(Tagger(backbone(mixer(**{**CASES, **FULL}[case])), 3)), "sequence", tmp_path)


@pytest.mark.parametrize(
    "case", ["plain", "laplace", "chunk, compressed", "truncated", "s4d", "s5", "two modules", *FULL, *BORDER]
)
def test_whole_sequences_from_left_to_right(case: str, tmp_path: Path) -> None:
    model = vary(LanguageModel(backbone(mixer(causal=True, **{**CASES, **FULL, **BORDER}[case]))))
    check(model, "sequence", tmp_path)


@pytest.mark.parametrize(
    "kind, changes",
    [
        (Classifier, {}),
        (Classifier, {"ngrams": (2, 4), "ngram_buckets": 37}),
        (Classifier, {"vocab": None, "channels": 2, "absolute_positions": True, "head_bias": False}),
        (Matcher, {"final_norm_affine": False}),
    ],
    ids=["classes", "n-grams", "real values", "pairs"],
)
def test_other_models(kind: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    model = vary(kind(backbone(mixer(prenorm=True), **changes), 3))
    check(model, "sequence", tmp_path)
    quantize(model)
    check(model, "sequence", tmp_path)


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@torch.no_grad()
def test_language_models_with_ngrams(int8: bool, tmp_path: Path) -> None:
    """The state holds the last tokens, also those of a sequence shorter than an n-gram."""
    steered = mixer(causal=True, gau_positions="rotary", budget=BudgetConfig(target=0.5))
    changes = {"ngrams": (2, 5), "ngram_buckets": 37, "scaled_embedding": True}
    model = vary(LanguageModel(backbone(steered, **changes)))
    for policy in policies(model):
        policy.shift.fill_(0.2)
    if int8:
        quantize(model)
    for form in ("step", "sequence"):
        check(model, form, tmp_path)
    step, whole = OnnxModel(tmp_path / "step.onnx"), OnnxModel(tmp_path / "sequence.onnx")
    ids, lengths = random_ids(3, 12), np.array([2, 9, 12])
    state = next_state(whole.run({"tokens": ids.numpy(), "lengths": lengths}))
    assert state["recent"].tolist()[0] == [0, 0, *(ids[0, :2] + 1).tolist()]
    more = random_ids(3, 4, seed=1)
    for time in range(4):
        logits, _, state = step.step(more[:, time].numpy(), state)
        for row, length in enumerate(lengths):
            wanted = model(torch.cat([ids[row, :length], more[row, : time + 1]])[None]).logits[0, -1]
            np.testing.assert_allclose(logits[row], wanted.numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", ["step", "sequence"])
@pytest.mark.parametrize(
    "layer",
    [
        S4DLayerConfig(ssm=S4DConfig(d_state=4), causal=True),
        S5LayerConfig(ssm=S5Config(d_state=8, systems=2), causal=True),
    ],
    ids=["s4d", "s5"],
)
def test_layers_without_attention(layer: Any, form: str, tmp_path: Path) -> None:
    model = vary(LanguageModel(backbone(layer, scaled_embedding=True)))
    check(model, form, tmp_path, some=False)


def decide(model: nn.Module, everything: bool) -> None:
    """Let all tokens be active, or none."""
    for name, weight in model.named_parameters():
        if name.endswith("router.logits.bias"):
            weight.data.copy_(torch.tensor([-30.0, 30.0] if everything else [30.0, -30.0]))


def random_ids(batch: int, time: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("active", [None, False, True], ids=["some", "none", "all"])
def test_500_steps_and_20_lengths(active: bool | None, tmp_path: Path) -> None:
    model = vary(LanguageModel(backbone(mixer(causal=True, gau_positions="rotary"))))
    if active is not None:
        decide(model, active)
    agree(model, random_ids(2, 500), active, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["enwik8-small", "enwik8-medium"])
def test_500_steps_and_20_lengths_of_bundled_models(name: str, tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_bytes()
    ids = torch.tensor([list(text[:500]), list(text[500:1000])])
    agree(prepare(Run(name), False), ids, None, tmp_path)


@torch.no_grad()
def agree(model: Any, ids: torch.Tensor, active: bool | None, tmp_path: Path) -> None:
    """Steps on 500 tokens and sequences of 20 lengths give the scores of the model; some, no or all tokens active."""
    step, whole = (write(model, form, tmp_path) for form in ("step", "sequence"))
    wanted = model(ids).logits.numpy()
    state, rates = step.start(2), []
    for time in range(500):
        got = step.step(ids[:, time].numpy(), state)
        state = got.state
        np.testing.assert_allclose(got.logits, wanted[:, time], atol=1e-4, rtol=0)
        assert got.active is not None
        rates.append(got.active.mean())
    assert {None: 0.05 < np.mean(rates) < 0.95, False: not any(rates), True: min(rates) == 1}[active]
    random = np.random.default_rng(0)
    for time in random.integers(1, 300, 20).tolist():
        lengths = np.array([time, random.integers(1, time + 1)])
        logits = whole.run({"tokens": ids[:, :time].numpy(), "lengths": lengths})["logits"]
        mask = np.arange(time) < lengths[:, None]
        np.testing.assert_allclose(logits[mask], wanted[:, :time][mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "case", ["plain", "chunk, compressed", "s4d", "s5", "truncated", "s4d, truncated", "two modules"]
)
def test_steps_continue_where_sequences_end(case: str, tmp_path: Path) -> None:
    """The whole graph leaves the state that single steps leave, for sequences of different lengths."""
    model = vary(LanguageModel(backbone(mixer(causal=True, **CASES[case]))))
    step, whole = (write(model, form, tmp_path) for form in ("step", "sequence"))
    ids, lengths = random_ids(3, 66).numpy(), np.array([64, 32, 7])
    after = next_state(whole.run({"tokens": ids[:, :64], "lengths": lengths}))
    step.check_state(after, 3)
    for row, length in enumerate(lengths):
        state = step.start(1)
        for token in ids[row, :length].tolist():
            state = step.step(np.array([token]), state).state
        for name, part in state.items():
            np.testing.assert_allclose(after[name][row], part[0], atol=1e-4, err_msg=name)


def test_inactive_tokens_cost_nothing(tmp_path: Path) -> None:
    """The packed part of a graph is as large as the active tokens, and one group of queries at least."""
    model = vary(LanguageModel(backbone(mixer(causal=True))))
    write(model, "sequence", tmp_path)
    graph = onnx.load(tmp_path / "sequence.onnx")
    softmax = [node for node in graph.graph.node if node.op_type == "Softmax"]
    graph.graph.output.append(onnx.helper.make_tensor_value_info(softmax[0].output[0], 1, None))
    path = tmp_path / "shown.onnx"
    onnx.save(graph, path)
    shown, rows = OnnxModel(path), []
    ids = random_ids(1, 640).numpy()
    for everything in (False, True):
        decide(model, everything)
        for tensor in graph.graph.initializer:
            if tensor.name.startswith("router.bias"):
                value = np.array([60.0 if everything else -60.0], np.float32)
                tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
        onnx.save(graph, path)
        shown = OnnxModel(path)
        rows.append(len(shown.run({"tokens": ids, "lengths": np.array([640])})[softmax[0].output[0]]))
    assert rows == [1, 10]


def test_int8_files_are_small_and_right(tmp_path: Path) -> None:
    config = backbone(mixer(causal=True, gau_d_v=64), d_model=32)
    model = vary(LanguageModel(config))
    sizes = []
    for form in ("step", "sequence"):
        check(model, form, tmp_path)
        sizes.append((tmp_path / f"{form}.onnx").stat().st_size)
    quantize(model)
    # codes of one or two bytes in place of numbers of four
    saved = sum((4 - b.itemsize) * b.numel() for name, b in model.named_buffers() if name.endswith(".codes"))
    for form, before in zip(("step", "sequence"), sizes, strict=True):
        check(model, form, tmp_path)
        assert before - (tmp_path / f"{form}.onnx").stat().st_size > 0.9 * saved > 35_000


# the command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "small"
    assert main(["export-onnx", str(run), "--out", str(folder), "--int8"]) == 0
    return folder


def test_files_say_what_they_are(exported: Path, run: Path) -> None:
    about = json.loads((exported / "model.json").read_text())
    assert set(about["files"]) == {"step.onnx", "sequence.onnx"} and about["int8"] is True
    for form in ("step", "sequence"):
        file = OnnxModel(exported / f"{form}.onnx")
        assert file.about["form"] == form and file.about["vocab"] == "256" and file.about["bytes"] == "true"
        assert file.about["weights"] == about["weights"] and int(file.about["max_length"]) > 0
        assert [part["name"] for part in file.state_parts][:2] == ["seen", "0.ssm"]
    assert main(["export-onnx", str(run), "--check", str(exported)]) == 0


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """One line, exit code 2."""
    assert main(arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and all(word in said[0] for word in words), said


def test_bad_exports_leave_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    command = ["export-onnx", str(run), "--out", str(folder)]
    fails([*command, "--opset", "16"], capsys, "opset 16 cannot express LayerNormalization", "17")
    fails([*command, "--opset", "999"], capsys, "999")
    fails(["export-onnx", str(run), "--out", str(tmp_path / "no" / "out")], capsys, "does not exist")
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    (folder / "mine.txt").write_text("x")
    fails(command, capsys, "is not empty")
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_damaged_and_foreign_files(
    exported: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_lm_run(tmp_path / "other", seed=1)
    fails(["export-onnx", str(other), "--check", str(exported)], capsys, "of another model")
    fails(["export-onnx", str(run), "--check", str(tmp_path)], capsys, "not a folder with ONNX files")
    whole = (exported / "step.onnx").read_bytes()
    for name, content in (("half", whole[: len(whole) // 2]), ("empty", b""), ("text", b"not a model")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "step.onnx").write_bytes(content)
        # without its checksum
        fails(["export-onnx", str(run), "--check", str(folder)], capsys, "is not a whole ONNX file")
        (folder / "model.json").write_bytes((exported / "model.json").read_bytes())
        fails(["export-onnx", str(run), "--check", str(folder)], capsys, "is damaged", "bytes")
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "step.onnx").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (changed / "model.json").write_bytes((exported / "model.json").read_bytes())
    fails(["export-onnx", str(run), "--check", str(changed)], capsys, "checksum")


def test_states_of_another_model_are_refused(exported: Path) -> None:
    step = OnnxModel(exported / "step.onnx")
    state = step.start(1)
    short = {name: part for name, part in state.items() if not name.startswith("1.")}
    with pytest.raises(ValueError, match="it has 1 layers, the model 2"):
        step.step(np.array([1]), short)
    with pytest.raises(ValueError, match=r"0\.ssm must be float32 of shape"):
        step.step(np.array([1]), {**state, "0.ssm": np.zeros((1, 2), np.float32)})
    with pytest.raises(ValueError, match="seen must be int64 of shape"):
        step.step(np.array([1, 2]), state)
    with pytest.raises(ValueError, match="reads whole sequences"):
        OnnxModel(exported / "sequence.onnx").step(np.array([1]), state)


def refused(model: nn.Module, form: str, folder: Path, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        write(model, form, folder)
    assert list(folder.iterdir()) == []


def test_what_has_no_form_says_so(tmp_path: Path) -> None:
    def lm(**changes: Any) -> nn.Module:
        return LanguageModel(backbone(mixer(causal=True, **changes))).eval()

    refused(
        lm(ssm=S4Config(d_state=4)), "step", tmp_path, "kernel S4 has no ONNX form; EMA, EMAConv, S4D and S5"
    )
    refused(lm(gau_span="full"), "step", tmp_path, "choose --form sequence")
    refused(lm(budget=BudgetConfig(cap=0.5)), "step", tmp_path, "a budget")
    refused(lm().train(), "step", tmp_path, "training mode")
    refused(Classifier(backbone(mixer()), 3).eval(), "step", tmp_path, "a classifier reads whole sequences")
    picks: list[RouterConfig] = [TopKConfig(), ExpertChoiceConfig()]
    for router in picks:
        model = Tagger(backbone(mixer(router=router)), 3).eval()
        refused(model, "sequence", tmp_path, "picks a fraction of each sequence")
    ngrams = Classifier(backbone(mixer(norm="batch"), ngrams=(2,)), 3).eval()
    with pytest.raises(ValueError, match="opset 17 cannot express BitwiseXor"):
        write(ngrams, "sequence", tmp_path, opset=17)
    plain = LanguageModel(backbone(mixer(causal=True, norm="batch", router=TemperedSoftmaxConfig()))).eval()
    assert compare(write(plain, "step", tmp_path, opset=14), plain).worst < 1e-4
