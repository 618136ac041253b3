"""The moving average with a short convolution: against a convolution written out, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat import SeqBoat, SeqBoatConfig
from seqboat.compat.layers import published_config, to_published
from seqboat.recipes import find_recipe
from seqboat.ssm.conv import EMAConv, EMAConvConfig
from seqboat.ssm.ema import EMA
from seqboat.training.settings_io import override, read_config, to_json


def kernel_pair(causal: bool, conv: int, truncation: int | None = None) -> tuple[EMAConv, EMA]:
    """The kernel, and a moving average with its weights."""
    torch.manual_seed(0)
    kernel = EMAConv(5, causal=causal, d_state=3, conv=conv, truncation=truncation).double()
    plain = EMA(5, causal=causal, d_state=3, truncation=truncation).double()
    plain.load_state_dict({k: v for k, v in kernel.state_dict().items() if k != "taps"})
    return kernel, plain


def depthwise(x: Tensor, taps: Tensor) -> Tensor:
    """A causal convolution by PyTorch, without the current token."""
    conv = taps.shape[0] + 1
    weight = F.pad(taps.flip(0), (0, 0, 0, 1)).t()[:, None]  # (dim, 1, conv), the current token last
    padded = F.pad(x.transpose(1, 2), (conv - 1, 0))
    return F.conv1d(padded, weight, groups=x.shape[2]).transpose(1, 2)


@pytest.mark.parametrize("truncation", [None, 6])
@pytest.mark.parametrize("conv", [2, 4, 9])
@pytest.mark.parametrize("length", [1, 3, 40])
def test_adds_a_convolution(length: int, conv: int, truncation: int | None) -> None:
    x = torch.randn(2, length, 5, dtype=torch.float64)
    kernel, plain = kernel_pair(True, conv, truncation)
    torch.testing.assert_close(kernel(x).y, plain(x).y + depthwise(x, kernel.taps[0]))
    kernel, plain = kernel_pair(False, conv, truncation)
    ahead = depthwise(x.flip(1), kernel.taps[1]).flip(1)
    torch.testing.assert_close(kernel(x).y, plain(x).y + depthwise(x, kernel.taps[0]) + ahead)


def test_without_taps_it_is_the_moving_average() -> None:
    kernel, plain = kernel_pair(True, 4)
    with torch.no_grad():
        kernel.taps.zero_()
    x = torch.randn(2, 17, 5, dtype=torch.float64)
    torch.testing.assert_close(kernel(x).y, plain(x).y)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients(causal: bool) -> None:
    kernel, _ = kernel_pair(causal, 3)
    x = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)

    def outputs(x: Tensor, taps: Tensor) -> Tensor:
        replaced = {"taps": taps}
        return torch.func.functional_call(kernel, replaced, (x,)).y

    assert torch.autograd.gradcheck(outputs, (x, kernel.taps))


def test_resetting_is_the_same_as_making() -> None:
    torch.manual_seed(3)
    kernel = EMAConv(5, causal=True)
    made = {name: value.clone() for name, value in kernel.state_dict().items()}
    torch.manual_seed(3)
    kernel.reset_parameters()
    for name, value in kernel.state_dict().items():
        # drawn again into other memory, where the last bits may differ
        torch.testing.assert_close(value, made[name], msg=name)


def test_settings(tmp_path: Path) -> None:
    layer = SeqBoat(8, ssm="ema-conv", causal=True, d_state=3)
    assert isinstance(layer.ssm, EMAConv) and layer.ssm.conv == 4 and "conv=4" in repr(layer)
    recipe = find_recipe("recall")()
    config = override(recipe, ["--model.mixer.ssm=ema-conv", "--model.mixer.ssm.conv=3"])
    assert config.model.mixer.ssm == EMAConvConfig(conv=3)  # type: ignore[attr-defined]
    path = tmp_path / "run.json"
    path.write_text(to_json(config))
    assert read_config(path, recipe) == config


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="conv must be at least 2, got 1; 'ema' has no convolution"):
        EMAConvConfig(conv=1)
    with pytest.raises(ValueError, match="the published layer has an EMA, not EMAConvConfig"):
        published_config(8, SeqBoatConfig(ssm=EMAConvConfig(), init="paper"))
    with pytest.raises(ValueError, match="the published layer has an EMA, not EMAConv"):
        to_published(EMAConv(8, causal=True))
