"""bf16 and fp16 autocast: how far layers, language models and trained models are from float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeness import assert_same_numbers
from seqboat import BackboneConfig, EMAConfig, GAUConfig, LanguageModel, S4DConfig, SeqBoat, SeqBoatConfig
from seqboat.core.state import tensors

HALVES = (torch.bfloat16, torch.float16)
BOUND = 2e-2
"""Largest relative RMS error of outputs and of all gradients together."""
SCALE = 2.0**12
"""Of the loss: small gradients of fp16 would vanish without one; training uses the same."""

LAYERS = {
    "bidirectional": SeqBoatConfig(),
    "paper": SeqBoatConfig(init="paper"),
    "two modules": SeqBoatConfig(ffn=True, gau=GAUConfig(attention="relu2")),
    "laplace": SeqBoatConfig(gau=GAUConfig(attention="laplace", positions="compressed"), norm="scale"),
    "batch norm": SeqBoatConfig(norm="batch", prenorm=True, ssm=S4DConfig(d_state=8)),
    "causal": SeqBoatConfig(causal=True, prenorm=True, gau=GAUConfig(positions="rotary", window=32)),
}


def relative_rms(got: list[Tensor], expected: list[Tensor]) -> float:
    one, other = (
        torch.cat([part.detach().double().flatten() for part in parts]) for parts in (got, expected)
    )
    return float((one - other).norm() / other.norm())


def run(model: nn.Module, half: torch.dtype | None, *inputs: Tensor) -> tuple[Any, list[Tensor]]:
    """The output, and the gradients of all parameters."""
    model.zero_grad()
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        out = model(*inputs)
    y = out.logits if hasattr(out, "logits") else out.y
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    (SCALE * (y.float() * weight).mean()).backward()
    return out, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_under_autocast(name: str, half: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = SeqBoat(48, LAYERS[name])
    x = torch.randn(2, 150, 48)
    (out, grads), (wide, expected) = run(layer, half, x), run(layer, None, x)
    assert out.y.dtype == torch.float32 and relative_rms([out.y], [wide.y]) < BOUND
    assert relative_rms(grads, expected) < BOUND
    assert torch.equal(out.routing.active, wide.routing.active)
    # statistics, states and decisions stay in float32
    assert out.routing.probs.dtype == torch.float32
    assert relative_rms([out.routing.probs], [wide.routing.probs]) < 1e-5
    assert all(part.dtype in (torch.float32, torch.int64) for _, part in tensors(out.state))
    if name == "causal":
        assert_same_numbers(out.state.ssm.states, wide.state.ssm.states)


def small_model(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    mixer = SeqBoatConfig(
        ssm=EMAConfig(d_state=4),
        gau=GAUConfig(d_z=16, d_v=32, window=32, positions="rotary"),
        causal=True,
        prenorm=True,
    )
    config = BackboneConfig(mixer=mixer, d_model=32, num_layers=2, vocab=64, scaled_embedding=True)
    return LanguageModel(config)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_language_models_under_autocast(half: torch.dtype) -> None:
    model, tokens = small_model(), torch.randint(64, (2, 120))
    (out, grads), (wide, expected) = run(model, half, tokens), run(model, None, tokens)
    assert relative_rms([out.logits], [wide.logits]) < BOUND
    assert relative_rms(grads, expected) < BOUND


def train(half: torch.dtype | None, steps: int = 40) -> float:
    """The mean loss of the last steps of a small language model."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.arange(64).repeat(40).view(-1, 5)[torch.randperm(512)].flatten()
    losses = []
    for step in range(steps):
        tokens = text[step * 60 : step * 60 + 4 * 33].view(4, 33)
        with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
            logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    return sum(losses[-5:]) / 5


def test_training_in_bfloat16_reaches_the_loss_of_float32() -> None:
    assert train(torch.bfloat16) == pytest.approx(train(None), rel=1e-2)
