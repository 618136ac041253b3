"""Models in compact form: the folder of a run without what training needs, in half precision."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lm_runs import lm_config, write_lm_run, write_run
from seqboat import run as runs
from seqboat.cli.main import main
from seqboat.run import Run, find_run, shipped_models
from seqboat.text.generate import SamplingConfig, generate
from seqboat.training.checkpoint import MODEL, CheckpointError, CheckpointStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("shipped"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_packed_run_is_a_run(run: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = Run(run).pack(tmp_path / "small", dtype=dtype)
    stored = CheckpointStore(folder).best()
    assert stored is not None and {t.dtype for t in stored.tensors(MODEL).values()} == {dtype}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "best",
        "latest",
        "step-1/model.safetensors",
        "step-1/state.json",
    }
    assert (folder / "step-1" / MODEL).stat().st_mode & 0o777 == 0o644
    one, config = Run(run).language_model, Run(run).config
    two, same = Run(folder).language_model, Run(folder).config
    assert same == config and two.backbone.embedding.weight.dtype == torch.float32
    tokens = torch.arange(100)[None]
    # eight bits of precision are left of weights in bfloat16
    spare = 0.0 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(one(tokens).logits, two(tokens).logits, atol=spare, rtol=spare)
    assert Run(folder).evaluate()["bits"] == pytest.approx(Run(run).evaluate()["bits"], rel=0.01)


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    folder = Run(run).pack(tmp_path / "small")
    with pytest.raises(ValueError, match="small must be empty or not exist"):
        Run(run).pack(folder)
    weights = folder / "step-1" / MODEL
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"model.safetensors does not match its sha256"):
        _ = Run(folder / "step-1").language_model
    large = write_run(tmp_path / "large", lm_config(run.parent / "text.txt"))
    model = Run(large).language_model
    with torch.no_grad():
        model.backbone.embedding.weight[0, 0] = 1e6
    best = CheckpointStore(large).best()
    assert best is not None
    CheckpointStore(large).save(2, {MODEL: dict(model.state_dict())}, best.state, best=True)
    with pytest.raises(
        ValueError, match=r"embedding.weight does not fit into torch.float16: .* up to 1e\+06"
    ):
        Run(large).pack(tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_the_package_s_own_model_is_the_default(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MODELS", tmp_path / "models")
    assert shipped_models() == {}
    assert main(["generate", "--prompt", "a"]) == 2
    assert "give the folder of a run: this installation has no bundled model" in capsys.readouterr().err
    folder = Run(run).pack(tmp_path / "models" / "toy")
    assert shipped_models() == {"toy": folder}
    assert find_run(None) == find_run("toy") == folder and find_run(str(run)) == run
    (want,) = generate(
        Run(folder).language_model, "a", max_new_bytes=20, sampling=SamplingConfig(greedy=True)
    )
    for named in ([], ["toy"]):
        assert main(["generate", *named, "--prompt", "a", "--max-new-bytes", "20", "--greedy"]) == 0
        assert capsys.readouterr().out == want.text
    assert main(["eval", "toy", str(run.parent / "text.txt")]) == 0
    assert main(["eval", "toy", "--limit", "3"]) == 0
    if find_spec("transformers") is not None:
        assert main(["export", "--to=hf", "toy", str(tmp_path / "exported")]) == 0
        assert (tmp_path / "exported" / "model.safetensors").is_file()
    # a folder of that name comes first
    monkeypatch.chdir(tmp_path)
    Path("toy").mkdir()
    assert find_run("toy") == Path("toy")


def test_models_of_the_package_are_whole() -> None:
    for folder in shipped_models().values():
        assert Run(folder).shipped and not Run(folder).language_model.training
        assert (folder / "README.md").is_file()
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4 * 2**20
