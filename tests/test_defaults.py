"""Defaults of the mixers are those of their papers: what the published experiments have in common."""

from __future__ import annotations

from typing import Any

import pytest

from seqboat.core.nn import FeedForward
from seqboat.mixers import MIXERS

PUBLISHED: dict[str, dict[str, Any]] = {
    # the base model of the paper; a hidden width of four times the model's
    "transformer": {
        "heads": 8,
        "activation": "relu",
        "norm": "layer",
        "prenorm": False,
        "positions": "absolute",
    },
    # the 12-layer model for enwik8
    "transformer-xl": {"heads": 8, "segment": 512, "memory": 512, "activation": "relu", "prenorm": False},
    # the 12-layer model for enwik8
    "adaptive-span": {"heads": 8, "max_span": 8192, "ramp": 32, "first_span": 0.0, "span_weight": 2e-6},
    "reformer": {"heads": 8, "hashes": 4, "chunk_size": 64, "prenorm": True},
    # the internal construction of the base model
    "bigbird": {
        "block_size": 64,
        "window_blocks": 3,
        "global_blocks": 2,
        "random_blocks": 3,
        "activation": "gelu",
    },
    "performer": {"kernel": "softmax", "features": 256, "redraw": 1000},
    "linformer": {"projected": 256, "sharing": "keys"},
    "luna": {"length": 256, "tied": True},
    # Text of the Long Range Arena
    "mega": {"d_z": 64, "d_v": None, "attention": "softmax", "chunk": None, "ffn": True, "prenorm": False},
    "mega-chunk": {"d_z": 64, "attention": "softmax", "chunk": 128},
}
HIDDEN = {"mega": 2, "mega-chunk": 2}
"""Multiples of the width in feed-forward blocks, where they are not four."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_those_of_the_paper(name: str) -> None:
    config = MIXERS[name]()
    assert {field: getattr(config, field) for field in PUBLISHED[name]} == PUBLISHED[name]
    blocks = [part for part in config.build(64).modules() if isinstance(part, FeedForward)]
    assert [block.hidden.out_features for block in blocks] == [64 * HIDDEN.get(name, 4)]
    if name.startswith("mega"):
        assert config.build(64).d_v == 128
