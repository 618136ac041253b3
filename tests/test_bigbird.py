"""BigBird against dense attention under its mask, and against the layer in transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from against import around, check_against, enlarge
from seqboat.core.mixer import Mixer
from seqboat.mixers import BigBird, BigBirdConfig

CONFIGS = {
    "paper": BigBirdConfig(heads=2, block_size=2, random_blocks=2),
    "front": BigBirdConfig(heads=2, block_size=3, global_blocks=1, random_blocks=1, prenorm=True),
    "window": BigBirdConfig(heads=2, block_size=2, window_blocks=5, global_blocks=0, random_blocks=0),
    "many": BigBirdConfig(heads=2, block_size=2, window_blocks=1, global_blocks=5, random_blocks=9),
}


def make(config: BigBirdConfig) -> BigBird:
    torch.manual_seed(0)
    layer: BigBird = enlarge(BigBird(6, config))
    return layer


def blocks_seen(layer: BigBird, number: int) -> Tensor:
    """(heads, number, number): whether a block sees another, from what the layer says of its random ones."""
    config = layer.config
    front, back = (config.global_blocks + 1) // 2, config.global_blocks // 2
    seen = layer.look(torch.tensor([number]), number)
    result = torch.zeros(layer.heads, number, number, dtype=torch.bool)
    for h in range(layer.heads):
        for i in range(number):
            drawn = seen.blocks[0, h, i][seen.valid[0, h, i]].tolist()
            assert len(set(drawn)) == len(drawn), "a block is looked at twice"
            fixed = {
                j
                for j in range(number)
                if j < front or j >= number - back or abs(i - j) <= config.window_blocks // 2
            }
            assert fixed <= set(drawn)
            free = number - len(fixed)
            assert len(set(drawn) - fixed) == min(config.random_blocks, free)
            everything = i < front or i >= number - back
            result[h, i, list(range(number)) if everything else drawn] = True
    return result


def oracle(layer: BigBird, x: Tensor) -> Tensor:
    """One sequence (time, dim) by dense attention under the mask."""
    size = layer.config.block_size
    number = -(-len(x) // size)
    block = torch.arange(len(x)) // size
    visible = blocks_seen(layer, number)[:, block][:, :, block]

    def attend(branch: Tensor) -> Tensor:
        parts = (branch @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, 3)).transpose(0, 1) for part in parts)
        scores = (q @ k.transpose(1, 2) / math.sqrt(3)).masked_fill(~visible, -torch.inf)
        return (torch.softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1)

    return around(layer.block, x, attend)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_dense_attention_under_its_mask(name: str) -> None:
    layer = make(CONFIGS[name])
    check_against(layer, lambda x: oracle(layer, x), [23, 22, 9, 4, 1])


def test_random_blocks_follow_the_seed_and_nothing_else() -> None:
    config = BigBirdConfig(heads=4, block_size=2, random_blocks=3)
    torch.manual_seed(3)
    one = BigBird(8, config)
    torch.manual_seed(3)
    two = BigBird(8, config)
    other = BigBird(8, config)
    number = torch.tensor([40])
    patterns = [layer.look(number, 40).blocks for layer in (one, two, other)]
    assert patterns[0].equal(patterns[1]) and not patterns[0].equal(patterns[2])
    assert not patterns[0][:, 0].equal(patterns[0][:, 1]), "every head draws for itself"
    # longer sequences in the batch change nothing
    padded = one.look(torch.tensor([40, 57]), 57)
    alone = one.look(number, 40)
    assert padded.blocks[0, :, :40][padded.valid[0, :, :40]].equal(alone.blocks[0][alone.valid[0]])
    other.load_state_dict(one.state_dict())
    assert other.look(number, 40).blocks.equal(patterns[0])


def test_random_blocks_are_spread_evenly() -> None:
    torch.manual_seed(0)
    layer = BigBird(8, BigBirdConfig(heads=8, block_size=2, random_blocks=4))
    drawn = layer.look(torch.tensor([128]), 128).blocks[..., -4:]
    share = torch.histc(drawn.float(), bins=4, min=0, max=128) / drawn.numel()
    # 4,096 draws: the std is 0.007
    assert ((share - 0.25).abs() < 0.04).all()


def test_there_is_no_causal_form_and_no_state() -> None:
    with pytest.raises(
        ValueError, match="BigBird has no causal form, it is bidirectional: its global blocks"
    ):
        BigBirdConfig(causal=True)
    assert BigBird.step is Mixer.step
    with pytest.raises(ValueError, match="BigBird has no state"):
        make(CONFIGS["paper"])(torch.randn(1, 2, 6, dtype=torch.float64), None, torch.zeros(1))


def test_dropout_only_in_training() -> None:
    layer = BigBird(8, BigBirdConfig(heads=2, block_size=2, dropout=0.5))
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x).y, layer(x).y)
    layer.eval()
    torch.testing.assert_close(layer(x).y, layer(x).y)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="window_blocks must be odd, got 2"):
        BigBirdConfig(window_blocks=2)
    with pytest.raises(ValueError, match="block_size must be an integer >= 1, got 0"):
        BigBirdConfig(block_size=0)
    with pytest.raises(ValueError, match="random_blocks must be an integer >= 0, got -1"):
        BigBirdConfig(random_blocks=-1)


@pytest.mark.filterwarnings("ignore")
def test_agrees_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    peer: Any = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    layer = make(BigBirdConfig(heads=2, block_size=4, random_blocks=2))
    number = 9
    config = peer.BigBirdConfig(
        hidden_size=6, num_attention_heads=2, block_size=4, num_random_blocks=2, use_bias=True
    )
    theirs = peer.BigBirdBlockSparseAttention(config, seed=0).double().eval()
    weights, biases = layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3)
    for part, weight, bias in zip((theirs.query, theirs.key, theirs.value), weights, biases, strict=True):
        part.weight.data.copy_(weight)
        part.bias.data.copy_(bias)
    # its random blocks are ours
    drawn = layer.look(torch.tensor([number]), number).blocks[0, :, 1:-1, -2:].numpy()
    monkeypatch.setattr(theirs, "_bigbird_block_rand_mask_with_head", lambda **_: list(drawn))
    x = torch.randn(1, 4 * number, 6, dtype=torch.float64)
    one = torch.ones(1, 1, 4 * number, 1, dtype=torch.float64)
    blocked = torch.ones(1, number, 4, dtype=torch.float64)
    band = torch.ones(1, 1, number - 4, 4, 12, dtype=torch.float64)
    out = theirs(x, band, one, one.transpose(2, 3), blocked, blocked)[0]
    expected = around(layer.block, x[0], lambda _: out[0])
    torch.testing.assert_close(layer(x).y[0], expected)
