"""Models in compact form: the folder of a run without what training needs, in half precision."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lm_runs import lm_config, write_lm_run, write_run
from seqboat import shipped
from seqboat.cli import main
from seqboat.shipped import find_run, pack_run, shipped_models
from seqboat.text.generate import SamplingConfig, generate
from seqboat.training.checkpoint import MODEL, CheckpointError, Store
from seqboat.training.evaluate import evaluate_run, load_language_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("shipped"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_packed_run_is_a_run(run: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = pack_run(run, tmp_path / "small", dtype=dtype, card="A toy.\n")
    stored = Store(folder).best()
    assert stored is not None and {t.dtype for t in stored.tensors(MODEL).values()} == {dtype}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "README.md",
        "best",
        "latest",
        "step-1/model.safetensors",
        "step-1/state.json",
    }
    assert (folder / "step-1" / MODEL).stat().st_mode & 0o777 == 0o644
    one, config = load_language_model(run)
    two, same = load_language_model(folder)
    assert same == config and two.backbone.embedding.weight.dtype == torch.float32
    tokens = torch.arange(100)[None]
    # eight bits of precision are left of weights in bfloat16
    spare = 0.0 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(one(tokens).logits, two(tokens).logits, atol=spare, rtol=spare)
    assert evaluate_run(folder)["bits"] == pytest.approx(evaluate_run(run)["bits"], rel=0.01)


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    folder = pack_run(run, tmp_path / "small")
    with pytest.raises(ValueError, match="small must be empty or not exist"):
        pack_run(run, folder)
    weights = folder / "step-1" / MODEL
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"model.safetensors does not match its sha256"):
        load_language_model(folder / "step-1")
    large = write_run(tmp_path / "large", lm_config(run.parent / "text.txt"))
    model, _ = load_language_model(large)
    with torch.no_grad():
        model.backbone.embedding.weight[0, 0] = 1e6
    best = Store(large).best()
    assert best is not None
    Store(large).save(2, {MODEL: dict(model.state_dict())}, best.state, best=True)
    with pytest.raises(
        ValueError, match=r"embedding.weight does not fit into torch.float16: .* up to 1e\+06"
    ):
        pack_run(large, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_the_package_s_own_model_is_the_default(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "MODELS", tmp_path / "models")
    assert shipped_models() == {}
    assert main(["generate", "--prompt", "a"]) == 2
    assert "name the folder of a run: no model comes with this installation" in capsys.readouterr().err
    folder = pack_run(run, tmp_path / "models" / "toy")
    assert shipped_models() == {"toy": folder}
    assert find_run(None) == find_run("toy") == folder and find_run(str(run)) == run
    (want,) = generate(
        load_language_model(folder)[0], "a", max_new_bytes=20, sampling=SamplingConfig(greedy=True)
    )
    for named in ([], ["toy"]):
        assert main(["generate", *named, "--prompt", "a", "--max-new-bytes", "20", "--greedy"]) == 0
        assert capsys.readouterr().out == want.text
    assert main(["score", "toy", str(run.parent / "text.txt")]) == 0
    assert main(["eval", "toy", "--limit", "3"]) == 0
    if find_spec("transformers") is not None:
        assert main(["export-hf", "toy", str(tmp_path / "exported")]) == 0
        assert (tmp_path / "exported" / "model.safetensors").is_file()
    # a folder of that name comes first
    monkeypatch.chdir(tmp_path)
    Path("toy").mkdir()
    assert find_run("toy") == Path("toy")


def test_models_of_the_package_are_whole() -> None:
    for folder in shipped_models().values():
        load_language_model(folder)
        assert (folder / "README.md").is_file()
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4e6
