"""The ablations: each row changes what the paper says it changes, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from seqboat.cli.main import main
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import AlwaysActiveConfig, GumbelConfig, SigmoidConfig, XMoEConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.layers.variants import SeqBoatChunkConfig, SeqBoatThenFFN, SeqBoatThenFFNConfig
from seqboat.mixers import MIXERS
from seqboat.mixers.carry import carry_over
from seqboat.mixers.mega import MegaConfig
from seqboat.recipes import ABLATIONS, find_recipe
from seqboat.recipes.base import with_mixer
from seqboat.ssm.diagonal import S4DConfig
from seqboat.training.settings_io import from_dict, to_dict

# what each row changes, by the dotted name of the field
CHANGES: dict[str, dict[str, Any]] = {
    "full": {"gau.span": "full"},
    "full-always": {"gau.span": "full", "router": AlwaysActiveConfig()},
    "full-gumbel": {"gau.span": "full", "router": GumbelConfig()},
    "full-s4d": {"gau.span": "full", "ssm": S4DConfig()},
    "ffn": {},
    "gau-ffn": {"ffn": True},
    "sigmoid": {"router": SigmoidConfig()},
    "moe": {"router": XMoEConfig()},
    "local": {"router": AlwaysActiveConfig()},
    "chunk": {"router": AlwaysActiveConfig(), "gau.span": "chunk"},
    "mem32": {"gau.window": 32},
    "local32": {"router": AlwaysActiveConfig(), "gau.window": 32},
}
# in full, as in the published code
PUBLISHED: dict[str, dict[str, Any]] = {
    "full-s4d": {"ssm": S4DConfig(d_state=16, init="inv-lin", rule="bilinear", truncation=1024)},
    "sigmoid": {},
}
ROWS = [name for name in ABLATIONS if not name.endswith(".mega")]


def test_both_tables_are_complete() -> None:
    full = {"full", "full-always", "full-gumbel", "full-s4d"}
    for task in ("image", "listops", "pathfinder"):
        for size in ("", "-small"):
            prefix = f"ablations.{task}{size}."
            rows = {name.removeprefix(prefix) for name in ABLATIONS if name.startswith(prefix)}
            assert rows == (CHANGES.keys() - (full if task == "pathfinder" else set())) | {"mega"}
    assert {name.removeprefix("seqboat-") for name in MIXERS if name.startswith("seqboat-")} >= CHANGES.keys()


@pytest.mark.parametrize("name", ROWS)
def test_rows_change_what_the_paper_says(name: str) -> None:
    _, task, row = name.split(".")
    base, config = find_recipe(f"lra.{task}")(), ABLATIONS[name]()
    mixer: Any = config.model.mixer
    assert config.replace(model={"mixer": base.model.mixer}) == base
    assert type(mixer) is MIXERS[f"seqboat-{row}"]
    expected: Any = base.model.mixer
    changes = dict(CHANGES[row])
    if not task.endswith("-small") and row in PUBLISHED:
        changes |= PUBLISHED[row]
        if row == "sigmoid":  # the temperature starts as in the recipe
            scale = expected.router.temperature_scale
            changes["router"] = SigmoidConfig(temperature_scale=scale)
    for path, value in changes.items():
        part, _, field = path.rpartition(".")
        if part:
            value = dataclasses.replace(getattr(expected, part), **{field: value})
        expected = dataclasses.replace(expected, **{part or field: value})
    fields = [field.name for field in dataclasses.fields(SeqBoatConfig)]
    assert {f: getattr(mixer, f) for f in fields} == {f: getattr(expected, f) for f in fields}


@pytest.mark.parametrize("name", ABLATIONS)
def test_rows_build_and_round_trip(name: str) -> None:
    config = ABLATIONS[name]()
    assert from_dict(to_dict(config)) == config
    with torch.device("meta"):
        model = config.build_model()
    assert sum(p.numel() for p in model.parameters()) > 10_000
    assert (ABLATIONS[name].__doc__ or "").endswith(f"On the recipe lra.{name.split('.')[1]}.")


def test_mega_has_the_widths_of_its_seqboat() -> None:
    mega: Any = ABLATIONS["ablations.image.mega"]().model.mixer
    assert isinstance(mega, MegaConfig)
    assert (mega.d_z, mega.d_v, mega.attention, mega.norm, mega.prenorm) == (96, 320, "relu2", "batch", True)
    assert mega.ema.truncation == 1024 and mega.chunk is None and mega.ffn


def test_a_row_takes_another_mixer() -> None:
    other = SeqBoatConfig(init="paper", norm="rms")
    assert with_mixer(ABLATIONS["ablations.image.local"](), other).model.mixer == other


def test_ablations_change_any_seqboat() -> None:
    base = SeqBoatConfig(
        init="paper", gau=GAUConfig(d_z=8, window=16, attention="laplace"), norm="rms", causal=True
    )
    chunk = carry_over(base, SeqBoatChunkConfig).mixer
    assert chunk.gau == dataclasses.replace(base.gau, span="chunk")
    assert (chunk.router, chunk.norm, chunk.causal) == (AlwaysActiveConfig(), "rms", True)


@pytest.mark.parametrize("prenorm", [False, True])
def test_the_block_behind_a_layer(prenorm: bool) -> None:
    torch.manual_seed(0)
    config = SeqBoatThenFFNConfig(init="paper", gau=GAUConfig(d_z=4, window=4), prenorm=prenorm, d_ff=5)
    both = config.build(6).double().eval()
    assert isinstance(both, SeqBoatThenFFN)
    alone = (
        SeqBoat(6, SeqBoatConfig(init="paper", gau=GAUConfig(d_z=4, window=4), prenorm=prenorm))
        .double()
        .eval()
    )
    alone.load_state_dict(both.layer.state_dict())
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    y = alone(x).y
    given = both.norm(y) if prenorm else y
    inner = given @ both.ffn.hidden.weight.T + both.ffn.hidden.bias
    inner = inner / (1 + torch.exp(-inner))
    expected = y + inner @ both.ffn.out.weight.T + both.ffn.out.bias
    torch.testing.assert_close(both(x).y, expected if prenorm else both.norm(expected))


def test_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list", "ablations"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ABLATIONS)
    assert lines[0].startswith("ablations.image.full ") and "SeqBoat-full" in lines[0]
