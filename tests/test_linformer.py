"""Linformer against its equations, and with identity projections against full attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from against import around, by_head, check_against, enlarge
from seqboat.mixers import Linformer, LinformerConfig
from seqboat.mixers.linformer import Sharing


def make(config: LinformerConfig) -> Linformer:
    torch.manual_seed(0)
    layer: Linformer = enlarge(Linformer(6, config))
    return layer


def oracle(layer: Linformer, x: Tensor) -> Tensor:
    """One sequence (time, dim), head by head, each projected row a sum over the tokens."""
    columns = layer.config.max_positions

    def shorten(rows: Tensor, kind: int, h: int) -> Tensor:
        weights = layer.project[kind, h % layer.project.shape[1]]
        return sum(
            (weights[min(t, columns - 1)][:, None] * row for t, row in enumerate(rows)),
            torch.zeros(layer.config.projected, rows.shape[1], dtype=rows.dtype),
        )

    def attend(branch: Tensor) -> Tensor:
        parts = (branch @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        heads = []
        for h, (q, k, v) in enumerate(zip(*(by_head(p, layer.heads) for p in parts), strict=True)):
            scores = q @ shorten(k, 0, h).T / math.sqrt(layer.d_head)
            heads.append(torch.softmax(scores, dim=-1) @ shorten(v, layer.project.shape[0] - 1, h))
        return torch.cat(heads, dim=-1)

    return around(layer.block, x, attend)


@pytest.mark.parametrize("sharing", ["none", "heads", "keys"])
def test_equals_its_equations(sharing: Sharing) -> None:
    layer = make(
        LinformerConfig(heads=2, projected=4, sharing=sharing, max_positions=7, prenorm=sharing == "none")
    )
    counts = {"none": 4, "heads": 2, "keys": 1}
    assert layer.project.shape[0] * layer.project.shape[1] == counts[sharing]
    check_against(layer, lambda x: oracle(layer, x), [11, 7, 1])


def test_with_identity_projections_it_is_full_attention() -> None:
    layer = make(LinformerConfig(heads=2, projected=9, max_positions=9))
    with torch.no_grad():
        layer.project.copy_(torch.eye(9))
    x = torch.randn(1, 9, 6, dtype=torch.float64)

    def attend(branch: Tensor) -> Tensor:
        parts = (branch @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, 3)).transpose(0, 1) for part in parts)
        return (torch.softmax(q @ k.transpose(1, 2) / math.sqrt(3), dim=-1) @ v).transpose(0, 1).flatten(1)

    torch.testing.assert_close(layer(x).y[0], around(layer.block, x[0], attend))


def test_there_is_no_causal_form_and_no_state() -> None:
    with pytest.raises(
        ValueError, match="Linformer has no causal form, it is bidirectional: its projections"
    ):
        LinformerConfig(causal=True)
    layer = make(LinformerConfig(heads=2, projected=4, max_positions=7))
    assert not layer.decodes
    with pytest.raises(ValueError, match="Linformer has no state"):
        layer(torch.randn(1, 2, 6, dtype=torch.float64), None, torch.zeros(1))


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="projected must be an integer >= 1, got 0"):
        LinformerConfig(projected=0)
    with pytest.raises(ValueError, match="sharing must be one of none, heads, keys; got 'layers'"):
        LinformerConfig(sharing="layers")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_agrees_with_the_package_linformer() -> None:
    peer = pytest.importorskip("linformer")
    layer = make(LinformerConfig(heads=2, projected=4, sharing="heads", max_positions=9))
    theirs = peer.LinformerSelfAttention(
        6, 9, k=4, heads=2, dim_head=3, one_kv_head=False, share_kv=False
    ).double()
    query, key, value = layer.qkv.weight.chunk(3)
    with torch.no_grad():
        layer.qkv.bias.zero_()
        theirs.to_q.weight.copy_(query)
        theirs.to_k.weight.copy_(key)
        theirs.to_v.weight.copy_(value)
        theirs.proj_k.copy_(layer.project[0, 0])
        theirs.proj_v.copy_(layer.project[1, 0])
        theirs.to_out.weight.copy_(torch.eye(6))
        theirs.to_out.bias.zero_()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    expected = torch.stack([around(layer.block, row, lambda b: theirs(b[None])[0]) for row in x])
    torch.testing.assert_close(layer(x).y, expected)
