"""int8 weights: what they stand for, files of them, and commands that read them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lm_runs import write_lm_run
from seqboat.cli.main import main
from seqboat.export.int8 import (
    Int8Embedding,
    Int8Linear,
    float_tensors,
    is_quantized,
    pack,
    quantize,
    quantize_rows,
)
from seqboat.run import Run
from seqboat.text.generate import SamplingConfig, generate
from seqboat.text.score import score, total
from seqboat.text.session import load_session, read, save_session, start
from seqboat.training.checkpoint import MODEL, CheckpointStore

GREEDY = SamplingConfig(greedy=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def small(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "small"
    assert main(["export", "--to=int8", str(run), str(folder), "--limit", "500"]) == 0
    return folder


def test_rows_are_rounded_to_the_nearest_code() -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 33) * torch.logspace(-3, 3, 20)[:, None]
    weight[4] = 0
    codes, scale = quantize_rows(weight)
    assert codes.dtype == torch.int8 and codes.abs().amax(dim=1).tolist() == [127] * 4 + [0] + [127] * 15
    back = codes.float() * scale[:, None]
    assert bool(((back - weight).abs() <= 0.5001 * scale[:, None]).all())


def test_half_precision_codes_lose_half_a_unit_of_their_last_place() -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 33) * torch.logspace(-9, 9, 20)[:, None]
    weight[4] = 0
    codes, scale = quantize_rows(weight, torch.float16)
    largest = codes.float().abs().amax(dim=1)
    assert codes.dtype == torch.float16 and largest[4] == 0 and bool((largest[scale != 1] >= 0.5).all())
    apart = (codes.float() * scale[:, None] - weight).abs()
    assert bool((apart <= 2**-11 * weight.abs() + 2**-25 * scale[:, None]).all())
    # weights from a file in half precision stay as they are
    half = torch.randn(9, 33).half().float()
    codes, scale = quantize_rows(half, torch.float16)
    assert torch.equal(codes.float() * scale[:, None], half)


@pytest.mark.parametrize("kind", [torch.int8, torch.float16])
def test_codes_keep_their_type(kind: torch.dtype) -> None:
    """A change of a model's type concerns its scales."""
    codes, scale = quantize_rows(torch.randn(5, 4), kind)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        layer = Int8Linear(codes, scale, torch.zeros(5)).to(dtype)
        assert layer.codes.dtype == kind and torch.equal(layer.codes, codes)
        assert layer.weight.dtype == layer.scale.dtype == dtype
        assert torch.equal(layer.codes, codes), "making the matrix must not change them"


@pytest.mark.parametrize("kind", [torch.int8, torch.float16])
@pytest.mark.parametrize("shape", [(50, 34), (1, 1), (7, 616), (1296, 616)])
def test_products_are_those_of_the_rounded_weights(shape: tuple[int, int], kind: torch.dtype) -> None:
    torch.manual_seed(1)
    codes, scale = quantize_rows(torch.randn(shape), kind)
    bias = torch.randn(shape[0])
    layer, plain = Int8Linear(codes, scale, bias), Int8Linear(codes, scale, None)
    table = Int8Embedding(codes, scale)
    for tokens in (1, 2, 3, 4, 5, 8, 16, 17, 40):
        x = torch.randn(tokens, shape[1])
        exact = x.double() @ (codes.double() * scale.double()[:, None]).T
        near = 1e-5 * float(exact.abs().max())
        torch.testing.assert_close(layer(x).double(), exact + bias, atol=near, rtol=0)
        torch.testing.assert_close(plain(x[None]).double(), exact[None], atol=near, rtol=0)
        torch.testing.assert_close(table.multiply(x).double(), exact, atol=near, rtol=0)
    ids = torch.tensor([[shape[0] - 1, 0], [0, 0]])
    torch.testing.assert_close(table(ids), layer.weight[ids])


def test_the_packed_product_follows_its_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again for other codes, copies have their own, and without it floating point does."""
    layer = Int8Linear(*quantize_rows(torch.randn(5, 4)), None)
    x = torch.randn(2, 4)
    first = layer(x)
    other = copy.deepcopy(layer)
    other.codes.mul_(-1)
    torch.testing.assert_close(other(x), -first)
    torch.testing.assert_close(layer(x), first)
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(dim=0).expand(2, 4))
    monkeypatch.delattr(torch, "fbgemm_pack_gemm_matrix_fp16", raising=False)
    assert pack(layer.codes) is None
    torch.testing.assert_close(copy.deepcopy(layer)(x), first)


def test_a_quantized_model_steps_as_it_reads(run: Path) -> None:
    model = Run(run).language_model
    ids = torch.arange(40)[None]
    plain = model(ids).logits.detach()
    quantize(model)
    assert is_quantized(model) and not any(p.requires_grad for p in model.parameters())
    whole = model(ids).logits
    assert 0 < float((whole - plain).abs().max()) < 0.1 * float(plain.abs().max())
    state = model.init_state(1)
    for t in range(40):
        logits, state, _ = model.step(ids[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], atol=1e-4, rtol=1e-4)


def test_the_command_writes_a_run(small: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(small / "step-1" / MODEL)
    types = {name: value.dtype for name, value in weights.items() if name.endswith(".codes")}
    assert types["backbone.layers.0.sma.units.gau.base.codes"] == torch.int8
    # what every score and every token depends on
    fine = {name for name, dtype in types.items() if dtype == torch.float16}
    assert fine == {"backbone.embedding.codes", *(f"backbone.layers.{n}.linear.codes" for n in range(2))}
    assert not any(name.endswith("linear.weight") for name in weights)
    assert "backbone.layers.0.sma.router.logits.weight" in weights, "routers are not rounded"
    model, whole = Run(small).language_model, Run(run).language_model
    quantize(whole)
    for name, value in float_tensors(whole).items():
        assert torch.equal(value, float_tensors(model)[name]), name
    # the card has what score says
    text = bytes(Run(run).task.text("test")[:500])
    bits = total(score(model, [np.frombuffer(text, np.uint8)])).bits_per_token
    assert f"{bits:.6f} bits per byte of the test text of lmtext" in (small / "README.md").read_text()
    notes = small.parent / "notes.txt"
    notes.write_bytes(text)
    assert main(["eval", str(small), str(notes)]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert main(["generate", str(small), "--prompt", "Ein", "--greedy", "--max-new-bytes", "9"]) == 0
    assert capsys.readouterr().out == generate(model, "Ein", max_new_bytes=9, sampling=GREEDY)[0].text


def test_transformers_gets_the_rounded_weights(small: Path) -> None:
    pytest.importorskip("transformers")
    from seqboat.hf.save import to_transformers

    model, ids = Run(small).language_model, torch.arange(30)[None]
    theirs = to_transformers(model).eval()
    torch.testing.assert_close(theirs(ids).logits, model(ids).logits)


def test_states_belong_to_the_rounded_model(small: Path, run: Path, tmp_path: Path) -> None:
    model, whole = Run(small).language_model, Run(run).language_model
    save_session(tmp_path / "state", read(model, start(model), [b"Ein"]), model)
    load_session(tmp_path / "state", model)
    with pytest.raises(ValueError, match="is the state of another model"):
        load_session(tmp_path / "state", whole)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


def test_bad_input(small: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "has int8 weights already" in fails(capsys, "export", "--to=int8", str(small), str(out))
    assert "is not a file" in fails(
        capsys, "export", "--to=int8", str(run), str(out), "--text", str(tmp_path / "none")
    )
    assert "--limit must be an integer >= 1, got 0" in fails(
        capsys, "export", "--to=int8", str(run), str(out), "--limit", "0"
    )
    assert "is not empty" in fails(capsys, "export", "--to=int8", str(run), str(small))
    assert "does not exist" in fails(capsys, "export", "--to=int8", str(run), str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["another layer", "another shape", "not int8"])
def test_int8_weights_of_another_model(
    change: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is whole, but not of the model that its folder describes."""
    folder = tmp_path / "wrong"
    shutil.copytree(small, folder)
    source = Run(folder)
    weights, name = dict(source.weights), "backbone.layers.0.linear.codes"
    if change == "another layer":
        weights["backbone.layers.7.linear.codes"] = weights.pop(name)
    elif change == "another shape":
        weights[name] = weights[name][:, :-1]
    else:
        weights[name] = weights[name].float()
    state = {key: source.checkpoint.state[key] for key in ("config", "classes", "versions")}
    CheckpointStore(folder).save(1, {MODEL: weights}, state, best=True)
    for command in (("generate", str(folder), "--prompt", "x"), ("eval", str(folder), __file__)):
        assert "int8 weights of another model" in fails(capsys, *command)


def test_a_file_of_another_model(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of one run in the folder of another, which knows its checksum."""
    folder, out = tmp_path / "wrong", tmp_path / "state"
    shutil.copytree(Run("enwik8-small").folder, folder)
    shutil.copy(small / "step-1" / MODEL, folder / "step-1800" / MODEL)
    for command in (
        ("generate", str(folder), "--prompt", "x", "--save-state", str(out)),
        ("eval", str(folder), __file__),
    ):
        error = fails(capsys, *command)
        assert "wrong contains no complete checkpoint" in error and "does not match its sha256" in error
    assert not out.exists()
