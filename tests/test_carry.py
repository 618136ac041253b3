"""Changing the mixer keeps the recipe: what carries over, what does not, and that it is said."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from seqboat.cli.main import main
from seqboat.core.mixer import directions_of
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.mixers.carry import carry_over
from seqboat.mixers.mega import MegaChunkConfig, MegaConfig
from seqboat.mixers.transformer import TransformerConfig
from seqboat.recipes import lra
from seqboat.ssm.diagonal import EMAConfig
from seqboat.training.settings_io import override, read_config

BOAT = SeqBoatConfig(
    ssm=EMAConfig(d_state=4, truncation=99),
    gau=GAUConfig(d_z=10, d_v=14, attention="relu2", window=6, positions="original", max_positions=40),
    norm="batch",
    prenorm=True,
    dropout=0.25,
)


def test_seqboat_full_on_pathfinder_is_that_of_the_paper() -> None:
    """Squared ReLU, batch norm before the layer, and no working memory."""
    config: Any = override(lra.pathfinder(), ["--model.mixer=seqboat-full"]).model.mixer
    own: Any = lra.pathfinder().model.mixer
    assert (config.gau.attention, config.norm, config.prenorm, config.gau.span) == (
        "relu2",
        "batch",
        True,
        "full",
    )
    assert (config.gau.d_z, config.gau.d_v, config.router, config.ssm) == (64, 256, own.router, own.ssm)


def test_widths_function_norm_positions_and_dropout_carry_over_to_mega() -> None:
    carried = carry_over(BOAT, "mega-chunk")
    assert carried.mixer == MegaChunkConfig(
        ema=BOAT.ssm,  # type: ignore[arg-type]
        d_z=10,
        d_v=14,
        attention="relu2",
        chunk=6,
        max_positions=40,
        norm="batch",
        prenorm=True,
        dropout=0.25,
    )
    assert carried.report() is None
    # SeqBoat has no feed-forward block after its layers, MEGA does
    assert carried.mixer.ffn and not BOAT.ffn


def test_what_has_no_place_is_said_in_one_line() -> None:
    carried = carry_over(BOAT, "transformer")
    assert carried.mixer == TransformerConfig(
        positions="relative", max_positions=40, norm="batch", prenorm=True, dropout=0.25
    )
    assert carried.report() == (
        "seqboat -> transformer: not carried over: ssm, d_z=10, d_v=14, attention=relu2, window=6"
    )
    # MEGA without chunks has no window
    assert carry_over(BOAT, "mega").report() == "seqboat -> mega: not carried over: window=6"


def test_positions_keep_their_meaning() -> None:
    rotary = SeqBoatConfig(gau=GAUConfig(positions="rotary"))
    for name in ("transformer", "mega"):
        assert carry_over(rotary, name).mixer.positions == "rotary"
        assert carry_over(SeqBoatConfig(), name).mixer.positions == "rotary", "the bias is left out"
    assert carry_over(MegaConfig(), "seqboat").mixer.gau.positions == "original"
    left = carry_over(TransformerConfig(positions="none"), "mega").report()
    assert left == "transformer -> mega: not carried over: positions=none"


@pytest.mark.parametrize("name", [name for name, kind in MIXERS.items() if issubclass(kind, SeqBoatConfig)])
def test_variants_keep_what_makes_them_variants(name: str) -> None:
    """And nothing else: everything but the fields of the variant is that of the recipe."""
    variant: Any = MIXERS[name]()
    usual = SeqBoatConfig()
    made: Any = carry_over(BOAT, name).mixer
    for field in ("router", "ssm", "ffn"):
        own = getattr(variant, field)
        expected = own if own != getattr(usual, field) else getattr(BOAT, field)
        assert getattr(made, field) == expected
    assert (made.gau.span, made.norm, made.gau.d_z) == (variant.gau.span, "batch", 10)
    own_window = variant.gau.window
    assert made.gau.window == (6 if own_window == usual.gau.window else own_window)
    # and back: the variant's own values stay behind
    back = carry_over(made, "seqboat").mixer
    assert back.gau.span == "memory" and (back.gau.window in (6, usual.gau.window))


def test_chunks_are_what_makes_mega_chunk() -> None:
    assert carry_over(MegaChunkConfig(chunk=7, d_z=9), "mega").mixer == MegaConfig(d_z=9)
    assert carry_over(MegaConfig(d_z=9), "mega-chunk").mixer == MegaChunkConfig(d_z=9)


@pytest.mark.parametrize(
    ("old", "new"), list(itertools.product(("seqboat", "transformer", "mega", "s5"), MIXERS))
)
def test_every_change_gives_a_mixer_that_builds(old: str, new: str) -> None:
    causal = "bidirectional" not in directions_of(MIXERS[new])
    config: Any = MIXERS[old](norm="batch", dropout=0.5)
    made: Any = carry_over(config, new).mixer
    assert (made.norm, made.dropout, made.causal) == ("batch", 0.5, causal)
    assert type(made) is MIXERS[new]


def test_files_and_commands_carry_over_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "change.json"
    path.write_text('{"model": {"mixer": {"name": "mega", "d_z": 12}}}')
    said: list[str] = []
    config: Any = read_config(path, lra.image(), said.append).model.mixer
    assert (config.d_z, config.attention, config.norm) == (12, "relu2", "batch")
    assert said == ["seqboat -> mega: not carried over: router"]
    command = ["train", "lra.image", "--model.mixer=mega", "--print-config"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert '"attention": "relu2"' in shown.out
    assert shown.err.splitlines() == said
