"""Everything runs on a device that is not the CPU, with the same numbers: `second_device` refuses to mix the two."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from closeness import assert_same_numbers, largest
from lm_runs import TEXT, write_lm_run, write_run
from mixer_cases import CASES, D_MODEL, RECURRENT_CASES, Case, shrink
from second_device import SecondTensor, host_reads, second_device
from seqboat.analysis.interventions import intervene
from seqboat.analysis.measures import measure
from seqboat.analysis.traces import load_examples
from seqboat.core.state import tensors
from seqboat.layers.sma import SparseModularActivation
from seqboat.mixers import MIXERS
from seqboat.models.backbone import BackboneConfig
from seqboat.report.samples import collect_samples
from seqboat.retrofitting.model import retrofit
from seqboat.run import Run
from seqboat.tasks import TASKS
from seqboat.text.generate import SamplingConfig, generate
from seqboat.text.score import score
from seqboat.text.session import load_session, read, save_session, start
from seqboat.training.checkpoint import MODEL, OPTIM, CheckpointStore
from seqboat.training.evaluate import Streaming, Windows, evaluate
from seqboat.training.parallel import World
from seqboat.training.trainer import train
from small_runs import Spy, ToyConfig, numbers_of, register, small_run


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)


@pytest.fixture
def device() -> Iterator[torch.device]:
    with second_device() as device:
        yield device


def both(case: Case, device: torch.device) -> tuple[Any, Any]:
    """The same mixer on the CPU and on the device, in training mode."""
    mixer = case.make(torch.float64).train()
    return mixer, copy.deepcopy(mixer).to(device)


def inputs(time: int = 13) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, time, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, time, dtype=torch.bool)
    mask[1, 5:] = False
    return x, mask


# the device itself


def test_devices_do_not_mix(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    assert isinstance(x, SecondTensor) and x.device == device
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0]
    for wrong in (lambda: x + torch.ones(2), lambda: torch.cat([x, torch.ones(1)])):
        with pytest.raises(RuntimeError, match="expected all tensors on remote:0"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_reads_of_the_host_are_counted(device: torch.device) -> None:
    x = torch.arange(4, device=device)
    with host_reads() as reads:
        float(x.sum())
        x[x > 1]
        x.nonzero()
        x.cpu()
        x.tolist()
        bool((x > 1).any())
    wanted = ["_local_scalar_dense", "index", "nonzero", "copy to host", "tolist"]
    assert [read for read in reads if read in wanted][:5] == wanted and len(reads) == 6, reads
    with host_reads() as reads:
        (x + 1).sum().double().to(torch.int64)
    assert not reads


# layers

CHOSEN = [case for case in CASES if not case.name.startswith("core-")]
"""Every mixer in both directions, the forms of the SeqBoat layer, and modules of any kind."""
STEPPED = [case for case in RECURRENT_CASES if not re.match("core-|.*-full", case.name)]
"""Without a memory that grows: it takes another storage, which the stand-in for a device cannot."""


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_layers_agree_and_wait_once(case: Case, device: torch.device) -> None:
    mixer, moved = both(case, device)
    x, mask = inputs()
    results = []
    for layer, where in ((mixer, torch.device("cpu")), (moved, device)):
        torch.manual_seed(1)
        given = x.clone().to(where).requires_grad_()
        with host_reads() as reads:
            output = layer(given, mask.to(where))
            output.y.pow(2).sum().backward()
        found = {"y": output.y, "input": given.grad}
        found |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        found |= dict(tensors(output.state)) if output.state is not None else {}
        results.append({name: value.detach().cpu() for name, value in found.items()})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert_same_numbers(results[1][name], value, name, largest(results[0].values()))
    # once for each module of each layer
    packs = sum(len(part.names) for part in moved.modules() if isinstance(part, SparseModularActivation))
    assert len(reads) <= max(packs, len(moved.layers) if hasattr(moved, "layers") else 1), reads


@pytest.mark.parametrize("case", STEPPED, ids=str)
def test_steps_agree(case: Case, device: torch.device) -> None:
    mixer, moved = both(case, device)
    x, _ = inputs(6)
    ys = []
    with torch.no_grad():
        for layer, where in ((mixer.eval(), torch.device("cpu")), (moved.eval(), device)):
            assert layer.decodes
            y, state, _ = layer(x[:, :4].to(where))
            for t in (4, 5):
                last, state, _ = layer.step(x[:, t].to(where), state)
            ys.append((y.cpu(), last.cpu()))
    for got, expected in zip(ys[1], ys[0], strict=True):
        assert_same_numbers(got, expected)


# training

CONFIGS: dict[str, dict[str, Any]] = {
    "seqboat": {},
    "without-router": {
        "model": BackboneConfig(mixer=shrink(MIXERS["transformer"]()), d_model=8, num_layers=2)
    },
    "pairs": {"task": ToyConfig(kind="match")},
    "text": {"task": ToyConfig(kind="lm", count=48), "training": {"carry_state": True, "bucketing": False}},
    "recomputed": {"training": {"gradient_checkpointing": True}},
}


def toy(name: str) -> Any:
    changes = dict(CONFIGS[name])
    return (
        small_run(changes.pop("task", None))
        .replace(schedule={"steps": 4, "warmup_steps": 1}, evaluation={"every": 2, "limit": 20})
        .replace(training={"save_every": 2})
        .replace(**changes)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_training_agrees_and_resumes(name: str, device: torch.device, tmp_path: Path) -> None:
    config = toy(name)
    spies = []
    for folder, where in (("cpu", "cpu"), ("remote", device.type)):
        spy = Spy()
        train(config.replace(training={"device": where}), tmp_path / folder, display=spy)
        spies.append(spy)
    for one, two in zip(numbers_of(spies[0].records), numbers_of(spies[1].records), strict=True):
        assert one.keys() == two.keys()
        assert one["activation"] == two["activation"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4) and two["accuracy"] == one["accuracy"]
    assert spies[1].scores[-1]["loss"] == pytest.approx(spies[0].scores[-1]["loss"], rel=1e-4)
    # the run starts again at its second step, on the device: bit for bit
    shutil.copytree(tmp_path / "remote", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "step-4")
    train(config.replace(training={"device": device.type}), tmp_path / "again", resume=True, display=Spy())
    whole, resumed = (CheckpointStore(tmp_path / folder).newest() for folder in ("remote", "again"))
    assert whole is not None and resumed is not None and resumed.step == 4
    for file in (MODEL, OPTIM):
        one, two = whole.tensors(file), resumed.tensors(file)
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


# what is done with trained models


@pytest.fixture(scope="module")
def lm_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("second"))


def language_model(run: Path) -> Any:
    return Run(run).model.eval()


def test_generation_agrees(lm_run: Path, device: torch.device) -> None:
    sampling = SamplingConfig(top_k=20, top_p=0.9, repetition_penalty=1.2, seed=3)
    texts = []
    for where in ("cpu", device):
        model = language_model(lm_run).to(where)
        found = generate(model, ["Ein", "und noch"], max_new_bytes=12, sampling=sampling)
        texts.append([one.data for one in found])
    assert texts[0] == texts[1]


def test_scoring_and_sessions_agree(lm_run: Path, device: torch.device, tmp_path: Path) -> None:
    text = np.frombuffer(TEXT.encode()[:90], np.uint8)
    bits = []
    for where in ("cpu", device):
        model = language_model(lm_run).to(where)
        parts = list(score(model, [text[:50], text[50:]]))
        bits.append(np.concatenate([part.bits for part in parts]))
    np.testing.assert_allclose(bits[1], bits[0], rtol=1e-5)
    model = language_model(lm_run).to(device)
    session = read(model, start(model), [text.tobytes()])
    save_session(tmp_path / "session", session, model)
    again = load_session(tmp_path / "session", model)
    assert again.logits.device == device and torch.equal(again.logits.cpu(), session.logits.cpu())


@pytest.mark.parametrize(
    "reading", [Windows(window=24, context=8), Streaming(chunk=16)], ids=["windows", "stream"]
)
def test_evaluation_agrees(reading: Any, lm_run: Path, device: torch.device) -> None:
    found = []
    for where in (torch.device("cpu"), device):
        run = Run(lm_run)
        model = run.model.to(where)
        found.append(evaluate(model, run.task, "val", World(0, 1, where), reading=reading, limit=200))
    assert found[1].metrics["bits"] == pytest.approx(found[0].metrics["bits"], rel=1e-6)
    assert found[1].activation == found[0].activation


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    register()
    return write_run(tmp_path_factory.mktemp("toy") / "run", small_run(), noise=0.3)


def test_analysis_agrees(toy_run: Path, device: torch.device) -> None:
    records, samples = [], []
    for where in (torch.device("cpu"), device):
        examples = load_examples(toy_run, "val", 12)
        records.append(measure(examples, "val", device=where).to_record())
        samples.append(collect_samples(examples, 2))
        assert next(examples.model.parameters()).device == where
    assert_same_records(records[1], records[0])
    for one, two in zip(*samples, strict=True):
        for mine, other in zip(one.trace.sequences, two.trace.sequences, strict=True):
            for layer, wanted in zip(other.layers, mine.layers, strict=True):
                assert layer is not None and wanted is not None
                np.testing.assert_array_equal(layer.active, wanted.active)


def assert_same_records(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_same_records(got[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for one, two in zip(got, wanted, strict=True):
            assert_same_records(one, two)
    else:
        assert got == (pytest.approx(wanted, rel=1e-5) if isinstance(wanted, float) else wanted)


def test_interventions_agree(toy_run: Path, device: torch.device) -> None:
    tables = [intervene(toy_run, "val", 10, thresholds=(0.5,), device=where)[0] for where in (None, device)]
    assert len(tables[0]) == len(tables[1]) > 2
    for one, two in zip(*tables, strict=True):
        assert two.metrics == pytest.approx(one.metrics, rel=1e-5)


def test_retrofit_agrees(device: torch.device) -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
    ).double()
    torch.manual_seed(0)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    results = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        moved = copy.deepcopy(model).to(where)
        made = retrofit(moved, {"0": "tokens", "1": "tokens"}, d_model=8)
        with torch.no_grad():
            moved(x.to(where))
        made.set_rate(0.5)
        moved.train()
        y = moved(x.to(where))
        y.pow(2).sum().backward()
        results.append([y.detach().cpu(), *(p.grad.cpu() for p in moved.parameters() if p.grad is not None)])
    for got, expected in zip(results[1], results[0], strict=True):
        assert_same_numbers(got, expected, scale=largest(results[0]))


def test_hugging_face_model_agrees(device: torch.device) -> None:
    pytest.importorskip("transformers")
    from seqboat.hf.configuration import SeqBoatModelConfig
    from seqboat.hf.model import SeqBoatForCausalLM

    mixer = shrink(MIXERS["seqboat"](causal=True))
    torch.manual_seed(0)
    model = SeqBoatForCausalLM(
        SeqBoatModelConfig.from_backbone(BackboneConfig(mixer=mixer, d_model=8, num_layers=2, vocab=32))
    )
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    losses, texts = [], []
    for where in ("cpu", device):
        moved = copy.deepcopy(model).to(where).eval()
        given = ids.to(where)
        loss = moved(given, labels=given).loss
        loss.backward()
        losses.append(float(loss.detach()))
        texts.append(moved.generate(given, max_new_tokens=4, do_sample=False).cpu())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert torch.equal(*texts)
