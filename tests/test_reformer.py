"""Reformer against dense attention over what its chunks show, and against the layer in transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from against import around, by_head, check_against, enlarge
from seqboat.mixers import Reformer, ReformerConfig

BASE = ReformerConfig(heads=2, hashes=3, buckets=4, chunk_size=3)


def make(config: ReformerConfig, d_model: int = 6) -> Reformer:
    torch.manual_seed(0)
    layer: Reformer = enlarge(Reformer(d_model, config))
    return layer


def seen_from(layer: Reformer, buckets: list[int], i: int) -> set[int]:
    """The tokens that token i sees in one round of hashing."""
    size = layer.config.chunk_size
    order = sorted(range(len(buckets)), key=lambda j: (buckets[j], j))
    chunk = {j: rank // size for rank, j in enumerate(order)}
    return {j for j in order if chunk[i] - chunk[j] in (0, 1)}


def attend(layer: Reformer, branch: Tensor, everything: bool = False) -> Tensor:
    """Shared-QK attention of (time, dim) over the union of all rounds, or over everything, token by token."""
    shared, value = branch @ layer.shared.weight.T, branch @ layer.value.weight.T
    buckets = layer.hash(shared.unflatten(-1, (layer.heads, -1)).transpose(0, 1)[None])[0]
    heads = []
    for h, (q, v) in enumerate(zip(by_head(shared, layer.heads), by_head(value, layer.heads), strict=True)):
        rows = []
        for i in range(len(branch)):
            seen = set(range(len(branch)))
            if not everything:
                seen = set().union(*(seen_from(layer, hashed.tolist(), i) for hashed in buckets[h]))
            others = sorted(seen - {i}) or [i]
            length = [(q[j].square().mean() + 1e-6).sqrt() * layer.d_head**0.5 for j in others]
            scores = torch.stack([q[i] @ q[j] / n for j, n in zip(others, length, strict=True)])
            if others == [i]:
                scores = scores * 0
            rows.append(torch.softmax(scores, dim=0) @ v[others])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1)


@pytest.mark.parametrize("hashes", [1, 3])
def test_equals_dense_attention_over_the_union_of_its_rounds(hashes: int) -> None:
    layer = make(replace(BASE, hashes=hashes, prenorm=hashes == 3))
    check_against(layer, lambda x: around(layer.block, x, lambda b: attend(layer, b)), [17, 6, 1])


def test_with_one_bucket_and_one_chunk_it_is_full_attention() -> None:
    layer = make(replace(BASE, buckets=1, chunk_size=32))
    x = torch.randn(1, 20, 6, dtype=torch.float64)
    expected = around(layer.block, x[0], lambda b: attend(layer, b, everything=True))
    torch.testing.assert_close(layer(x).y[0], expected)


def test_rotations_follow_the_seed_and_are_saved() -> None:
    torch.manual_seed(3)
    one = Reformer(8, BASE)
    torch.manual_seed(3)
    two = Reformer(8, BASE)
    other = Reformer(8, BASE)
    assert one.rotations.equal(two.rotations) and not one.rotations.equal(other.rotations)
    other.load_state_dict(one.state_dict())
    assert other.rotations.equal(one.rotations)
    tokens = torch.randn(1, 2, 200, 4)
    buckets = one.hash(tokens)
    assert buckets.unique().tolist() == [0, 1, 2, 3]
    # opposite tokens have opposite buckets
    assert one.hash(-tokens).equal((buckets + 2) % 4)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="buckets must be even or 1, got 7"):
        ReformerConfig(buckets=7)
    with pytest.raises(ValueError, match="hashes must be an integer >= 1, got 0"):
        ReformerConfig(hashes=0)
    with pytest.raises(ValueError, match="Reformer has no causal form, it is bidirectional"):
        ReformerConfig(causal=True)


@pytest.mark.filterwarnings("ignore")
def test_agrees_with_transformers() -> None:
    peer: Any = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    layer = make(ReformerConfig(heads=2, hashes=1, buckets=4, chunk_size=4))
    config = peer.ReformerConfig(
        hidden_size=6,
        num_attention_heads=2,
        attention_head_size=3,
        num_buckets=4,
        num_hashes=1,
        lsh_attn_chunk_length=4,
        lsh_attention_probs_dropout_prob=0.0,
        hash_seed=7,
    )
    theirs = peer.LSHSelfAttention(config).double().eval()
    theirs.query_key.weight.data.copy_(layer.shared.weight)
    theirs.value.weight.data.copy_(layer.value.weight)
    torch.manual_seed(7)
    layer.rotations.copy_(torch.randn(2, 3, 1, 2, dtype=torch.float64))
    x = torch.randn(1, 24, 6, dtype=torch.float64)
    expected = theirs(x)[0]
    expected = expected[0] if expected.dim() == 3 else expected
    shared, value = layer._project(x)
    bucket = layer.hash(shared)
    attended = layer._attend(shared, value, bucket, torch.tensor([24]))
    # theirs looks back from the first chunk to the last one; ours to nothing
    chunk = bucket[0, :, 0].argsort(dim=-1, stable=True).argsort(dim=-1) // 4
    ours = attended[0].transpose(0, 1)
    compared = (chunk > 0).T
    assert compared.sum() == 40
    torch.testing.assert_close(ours[compared], expected.unflatten(-1, (2, 3))[compared])
