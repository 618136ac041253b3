"""Against stored results of the published implementation: outputs and all gradients.

The files hold its parameters, inputs, outputs and gradients, time-major, with `padding` True on padding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from seqboat import compat, reference
from seqboat.layers.seqboat import SeqBoat
from seqboat.ssm.diagonal import EMA, EMAConfig

NAMES = [
    "ema_bidirectional",
    "ema_causal",
    "ema_truncated",
    "layer_causal_relu2",
    "layer_image",
    "layer_listops",
    "layer_lm",
    "layer_text",
]
# stored in training mode, where batch norm mixes the sequences: no oracle of one sequence
MIXED = ["layer_image"]

# the published implementation runs its Fourier transform and its softmax in float32
TOLERANCE = 2e-5


class Golden(NamedTuple):
    """One stored run; sequences as (batch, time, dim)."""

    config: dict[str, Any]
    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    x: Tensor
    mask: Tensor | None
    y: Tensor
    grad_y: Tensor

    @property
    def real(self) -> Tensor:
        return torch.ones(self.x.shape[:2], dtype=torch.bool) if self.mask is None else self.mask


def read(path: Path) -> Golden:
    with safe_open(path, framework="pt") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])

    def below(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}

    grads = below("grad.")
    grads["input"] = grads["input"].transpose(0, 1)
    return Golden(
        config,
        below("param."),
        grads,
        arrays["input"].transpose(0, 1),
        arrays["padding"].logical_not() if "padding" in arrays else None,
        arrays["output"].transpose(0, 1),
        arrays["grad_output"].transpose(0, 1),
    )


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest, fixtures: Path) -> Golden:
    return read(fixtures / "golden" / f"{request.param}.safetensors")


@pytest.fixture
def text(fixtures: Path) -> Golden:
    return read(fixtures / "golden" / "layer_text.safetensors")


def build(golden: Golden) -> SeqBoat | EMA:
    if "zdim" in golden.config:
        return compat.layer_from_published(golden.params, golden.config)
    return compat.ema_from_published(golden.params, golden.config)


def published_names(module: SeqBoat | EMA, ours: Mapping[str, Tensor], golden: Golden) -> dict[str, Tensor]:
    if isinstance(module, EMA):
        return compat.ema_to_published(ours)
    return compat.layer_to_published(ours, golden.config)


def difference(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert got.shape == want.shape
    return float(((got - want).abs().max() / want.abs().max()).detach())


def assert_gradients(module: SeqBoat | EMA, grads: Mapping[str, Tensor], golden: Golden) -> None:
    theirs = published_names(module, grads, golden)
    expected = {name: grad for name, grad in golden.grads.items() if name != "input"}
    assert theirs.keys() == expected.keys()
    for name, want in expected.items():
        assert difference(theirs[name], want) <= TOLERANCE, name


def test_outputs_and_gradients(golden: Golden) -> None:
    module = build(golden)
    x = golden.x.clone().requires_grad_()
    y = module(x, golden.mask).y
    assert difference(y[golden.real], golden.y[golden.real]) <= TOLERANCE
    names, parameters = zip(*module.named_parameters(), strict=True)
    grad_x, *grads = torch.autograd.grad(y, [x, *parameters], golden.grad_y)
    assert difference(grad_x, golden.grads["input"]) <= TOLERANCE
    assert_gradients(module, dict(zip(names, grads, strict=True)), golden)


@pytest.mark.parametrize("golden", [name for name in NAMES if name not in MIXED], indirect=True)
def test_reference_outputs_and_gradients(golden: Golden) -> None:
    """The specification itself agrees with the published implementation, without our fast code."""
    module = build(golden)
    names, parameters = zip(*module.named_parameters(), strict=True)
    params = dict(zip(names, parameters, strict=True))
    x = golden.x.clone().requires_grad_()
    total = torch.zeros((), dtype=x.dtype)
    for row, real in enumerate(golden.real):
        if isinstance(module, EMA):
            truncation = golden.config.get("truncation")
            config = EMAConfig(d_state=golden.config["ndim"], truncation=truncation)
            y, _ = reference.ema(x[row][real], params, config)
        else:
            y = reference.layer(x[row][real], params, module.config).y
        assert difference(y, golden.y[row][real]) <= TOLERANCE
        total = total + (y * golden.grad_y[row][real]).sum()
    grad_x, *grads = torch.autograd.grad(total, [x, *parameters])
    assert difference(grad_x, golden.grads["input"]) <= TOLERANCE
    assert_gradients(module, dict(zip(names, grads, strict=True)), golden)


def test_round_trip(golden: Golden) -> None:
    """Every weight comes back; a bias table on compressed positions only where a query can reach it."""
    theirs = compat.to_published(build(golden), golden.config)
    assert theirs.keys() == golden.params.keys()
    for name, value in golden.params.items():
        if name == "rel_pos_bias.rel_pos_bias" and golden.config.get("local_pos"):
            side = golden.config["window_size"]
            center = side + 3 * side - 1
            reached = slice(center - side, center + side + 1)
            assert torch.equal(theirs[name][reached], value[reached])
            assert theirs[name].shape == value.shape
        elif not name.endswith("num_batches_tracked"):
            assert torch.equal(theirs[name], value), name


@pytest.mark.parametrize("name", ["h_proj.bias", "ssm.delta", "rel_pos_bias.rel_pos_bias", "norm.norm.bias"])
def test_missing_parameter(text: Golden, name: str) -> None:
    params = {key: value for key, value in text.params.items() if key != name}
    with pytest.raises(ValueError, match=rf"missing \['{name}'\], unknown none"):
        compat.layer_from_published(params, text.config)


def test_unknown_parameter(text: Golden) -> None:
    params = {**text.params, "extra.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"missing none, unknown \['extra\.weight'\]"):
        compat.layer_from_published(params, text.config)


@pytest.mark.parametrize("name", ["h_proj.weight", "ssm.alpha", "q_router.temp", "rel_pos_bias.rel_pos_bias"])
def test_misshaped_parameter(text: Golden, name: str) -> None:
    params = {**text.params, name: torch.zeros(3, 3, dtype=torch.float64)}
    with pytest.raises(ValueError, match=rf"{name} must have shape .*, got \(3, 3\)"):
        compat.layer_from_published(params, text.config)


def test_bad_config(text: Golden) -> None:
    config = {key: value for key, value in text.config.items() if key != "zdim"}
    with pytest.raises(ValueError, match=r"config must hold .*missing \['zdim'\]"):
        compat.layer_from_published(text.params, config)
    with pytest.raises(ValueError, match=r"norm_type must be one of layernorm.*; got 'none'"):
        compat.layer_from_published(text.params, {**text.config, "norm_type": "none"})
    with pytest.raises(ValueError, match="rel_pos_bias must be one of simple, rotary; got 'alibi'"):
        compat.layer_from_published(text.params, {**text.config, "rel_pos_bias": "alibi"})


def test_ema_parameters_are_checked(fixtures: Path) -> None:
    golden = read(fixtures / "golden" / "ema_truncated.safetensors")
    with pytest.raises(ValueError, match=r"missing \['omega'\], unknown \['skip'\]"):
        params = {name.replace("omega", "skip"): value for name, value in golden.params.items()}
        compat.ema_from_published(params, golden.config)
    with pytest.raises(ValueError, match=r"delta must have shape \(24, 4, 1\), got \(12, 4, 1\)"):
        params = {**golden.params, "delta": golden.params["delta"][:12]}
        compat.ema_from_published(params, golden.config)


def test_layer_needs_its_config(text: Golden) -> None:
    with pytest.raises(ValueError, match="config"):
        compat.to_published(build(text))
