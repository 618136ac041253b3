"""Layers of the published implementation: parameters and constructor arguments, in and out.

The published layers keep their arrays time-major and use other names. Only the parts of the paper's tasks are
covered: MD-EMA, one gated attention unit, tempered softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seqboat.core.checks import check_choice, require
from seqboat.core.nn import BatchNorm, NormName
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import TemperedSoftmaxConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.ssm.diagonal import EMA, EMAConfig

TRACKED = "num_batches_tracked"
"""A count that published batch norms keep and never use."""
_EMA_NAMES = ("delta", "alpha", "beta", "gamma")
_NORM_NAMES: dict[str, NormName] = {
    "layernorm": "layer",
    "batchnorm": "batch",
    "syncbatchnorm": "batch",
    "scalenorm": "scale",
    "rmsnorm": "rms",
}
_POSITIONS = {"simple": "original", "rotary": "rotary"}
_SSM_NAMES = ("move.", "ssm.")
"""What the state-space part of a layer is called: in checkpoints of whole models, and alone."""


def ema_from_published(params: Mapping[str, Tensor], config: Mapping[str, Any]) -> EMA:
    """An EMA with the weights of the published one.

    Args:
        params: delta, alpha, beta, gamma, omega.
        config: embed_dim, ndim, bidirectional, truncation.
    """
    check_config(config, ("embed_dim",))
    causal = not config.get("bidirectional", False)
    ema = EMA(
        config["embed_dim"],
        EMAConfig(d_state=config.get("ndim", 2), truncation=config.get("truncation")),
        causal=causal,
    )
    check_published(params, to_published(ema))
    load(ema.to(params["delta"].dtype), ema_parameters(params, causal))
    return ema


def ema_parameters(params: Mapping[str, Tensor], causal: bool) -> dict[str, Tensor]:
    """Published EMA parameters (or their gradients) under our names."""
    directions = 1 if causal else 2
    ours = {name: params[name].reshape(directions, -1, params["gamma"].shape[-1]) for name in _EMA_NAMES}
    return {**ours, "skip": params["omega"]}


def ema_to_published(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our EMA parameters (or their gradients) under the published names."""
    theirs = {name: params[name].flatten(0, 1).unsqueeze(-1) for name in _EMA_NAMES[:3]}
    return {**theirs, "gamma": params["gamma"].flatten(0, 1), "omega": params["skip"]}


def layer_from_published(params: Mapping[str, Tensor], config: Mapping[str, Any]) -> SeqBoat:
    """A SeqBoat layer with the weights of the published one.

    Args:
        params: by their published names.
        config: its constructor arguments.
    """
    ours = layer_config(config)
    layer = SeqBoat(config["embed_dim"], ours)
    expected = layer_to_published(layer.state_dict(), config)
    check_published(params, expected, optional=(f"norm.norm.{TRACKED}",))
    load(layer.to(params["mx_proj.weight"].dtype), layer_parameters(params, config))
    return layer


def layer_config(config: Mapping[str, Any]) -> SeqBoatConfig:
    """Our configuration of a published layer."""
    check_config(config, ("embed_dim", "zdim", "hdim", "window_size", "max_positions"))
    rel_pos_bias, norm_type = config.get("rel_pos_bias", "simple"), config.get("norm_type", "layernorm")
    check_choice("rel_pos_bias", rel_pos_bias, tuple(_POSITIONS))
    check_choice("norm_type", norm_type, tuple(_NORM_NAMES))
    causal = not config.get("bidirectional", False)
    side = config["window_size"]
    positions = _POSITIONS[rel_pos_bias]
    full = side <= 0  # the published code then attends to all active tokens, by their original positions
    if _has_local_table(config):
        positions = "compressed"
    return SeqBoatConfig(
        form="paper",
        ssm=EMAConfig(d_state=config.get("ndim", 2), truncation=config.get("truncation")),
        router=TemperedSoftmaxConfig(temperature_scale=config.get("init_temp_scale", 1.0)),
        gau=GAUConfig(
            d_z=config["zdim"],
            d_v=config["hdim"],
            attention=config.get("attention_activation", "softmax"),
            span="full" if full else "memory",
            window=GAUConfig.window if full else side if causal else 2 * side,
            positions=positions,  # type: ignore[arg-type]
            max_positions=config["max_positions"],
            attention_dropout=config.get("attention_dropout", 0.0),
        ),
        causal=causal,
        norm=_NORM_NAMES[norm_type],
        prenorm=config.get("prenorm", True),
        dropout=config.get("dropout", 0.0),
    )


def published_config(d_model: int, config: SeqBoatConfig) -> dict[str, Any]:
    """The published constructor arguments of a layer; a ValueError names what the published code does not have."""
    usual = SeqBoatConfig(form="paper")
    for field in ("form", "ffn", "d_ff", "budget"):
        require(
            getattr(config, field) == getattr(usual, field),
            f"the published layer has no {field}, got {getattr(config, field)}",
        )
    ssm, router, gau = config.ssm, config.router, config.gau
    require(
        type(config) is SeqBoatConfig, f"the published layer is a SeqBoat layer, not {type(config).__name__}"
    )
    require(type(ssm) is EMAConfig, f"the published layer has an EMA, not {type(ssm).__name__}")
    require(
        isinstance(router, TemperedSoftmaxConfig),
        f"the published router is a tempered softmax, not {type(router).__name__}",
    )
    assert isinstance(ssm, EMAConfig) and isinstance(router, TemperedSoftmaxConfig)
    check_choice("span", gau.span, ("memory", "full"))
    check_choice("positions", gau.positions, ("original", "compressed", "rotary"))
    full = gau.span == "full"
    require(
        not full or gau.positions != "compressed",
        "the published layer has compressed positions with a working memory only, got span 'full'",
    )
    require(
        full or config.causal or gau.window % 2 == 0,
        f"the published working memory is twice a whole number, got window {gau.window}",
    )
    given = {
        "embed_dim": d_model,
        "zdim": gau.d_z,
        "hdim": gau.d_v or 2 * d_model,
        "ndim": ssm.d_state,
        "attention_activation": gau.attention,
        "bidirectional": not config.causal,
        "window_size": -1 if full else gau.window if config.causal else gau.window // 2,
        "truncation": ssm.truncation,
        "norm_type": next(theirs for theirs, ours in _NORM_NAMES.items() if ours == config.norm),
        "prenorm": config.prenorm,
        "rel_pos_bias": "rotary" if gau.positions == "rotary" else "simple",
        "local_pos": gau.positions == "compressed",
        "max_positions": gau.max_positions,
        "init_temp_scale": router.temperature_scale,
    }
    rates = {"dropout": config.dropout, "attention_dropout": gau.attention_dropout}
    return given | {name: rate for name, rate in rates.items() if rate}


def _has_local_table(config: Mapping[str, Any]) -> bool:
    """Whether the bias table is one of distances among the active tokens."""
    simple = config.get("rel_pos_bias", "simple") == "simple"
    return simple and config["window_size"] > 0 and bool(config.get("local_pos", False))


def _table_slice(config: Mapping[str, Any], size: int) -> slice:
    """Where our table of compressed distances lies in the published one.

    With `local_pos` that is indexed by the place of the key among the keys of the query's block, which begin
    one block before it, so distance 0 is at `window_size + max_positions - 1`, its max_positions being three blocks.
    """
    side = config["window_size"]
    center = side + (size + 1) // 2 - 1
    return slice(center - side, center + side + 1)


def layer_parameters(params: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Published layer parameters (or their gradients) under our names."""
    causal = not config.get("bidirectional", False)
    d_model = config["embed_dim"]
    ema: dict[str, Tensor] = {}
    for prefix in _SSM_NAMES:
        ema |= {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
    ours = {f"ssm.{k}": v for k, v in ema_parameters(ema, causal).items()}
    gau = "sma.units.gau."
    ours |= {
        f"{gau}base.weight": params["mx_proj.weight"],
        f"{gau}base.bias": params["mx_proj.bias"],
        f"{gau}gamma": params["gamma"],
        f"{gau}beta": params["beta"],
        f"{gau}out.weight": params["h_proj.weight"],
        f"{gau}out.bias": params["h_proj.bias"],
        "linear.weight": params["hx_proj.weight"][-d_model:],
        "linear.bias": params["hx_proj.bias"][-d_model:],
        "sma.router.logits.weight": params["hx_proj.weight"][:-d_model],
        "sma.router.logits.bias": params["hx_proj.bias"][:-d_model],
        "sma.router.log_temperature": params["q_router.temp"],
    }
    ours |= {f"norm.{k}": v for k, v in norm_parameters(params, "norm.norm.").items()}
    if "rel_pos_bias.rel_pos_bias" in params:
        table = params["rel_pos_bias.rel_pos_bias"]
        if _has_local_table(config):
            table = table[_table_slice(config, len(table))]
        ours[f"{gau}bias.table"] = table
    return ours


def norm_parameters(params: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The parameters of a published norm (or their gradients) under our names."""
    ours = {}
    for name, value in params.items():
        inner = name.removeprefix(prefix)
        if name.startswith(prefix) and inner != TRACKED:
            # the scalar of ScaleNorm is an array of one number
            ours["weight" if inner == "scalar" else inner] = value.reshape(()) if inner == "scalar" else value
    return ours


def norm_to_published(params: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Our norm parameters (or their gradients) under the published names."""
    theirs = {}
    for name, value in params.items():
        if name.startswith(prefix):
            scalar = name == f"{prefix}weight" and value.dim() == 0
            theirs["scalar" if scalar else name.removeprefix(prefix)] = value.reshape(1) if scalar else value
    return theirs


def layer_to_published(
    params: Mapping[str, Tensor], config: Mapping[str, Any], ssm: str = "ssm"
) -> dict[str, Tensor]:
    """Our layer parameters (or their gradients) under the published names.

    Args:
        params: of a layer from `layer_from_published`, or of one with the same configuration.
        config: the published constructor arguments. With `local_pos` the published bias table covers three
            blocks; its entries that no query can reach are zero.
        ssm: the name of the state-space part; checkpoints of whole models call it "move".
    """
    gau = "sma.units.gau."
    ema = {k.removeprefix("ssm."): v for k, v in params.items() if k.startswith("ssm.")}
    theirs = {f"{ssm}.{k}": v for k, v in ema_to_published(ema).items()}
    theirs |= {
        "mx_proj.weight": params[f"{gau}base.weight"],
        "mx_proj.bias": params[f"{gau}base.bias"],
        "gamma": params[f"{gau}gamma"],
        "beta": params[f"{gau}beta"],
        "h_proj.weight": params[f"{gau}out.weight"],
        "h_proj.bias": params[f"{gau}out.bias"],
        "hx_proj.weight": torch.cat([params["sma.router.logits.weight"], params["linear.weight"]]),
        "hx_proj.bias": torch.cat([params["sma.router.logits.bias"], params["linear.bias"]]),
        "q_router.temp": params["sma.router.log_temperature"],
    }
    theirs |= {f"norm.norm.{k}": v for k, v in norm_to_published(params, "norm.").items()}
    if f"{gau}bias.table" in params:
        table = params[f"{gau}bias.table"]
        if _has_local_table(config):
            size = 6 * config["window_size"] - 1
            whole = table.new_zeros(size)
            whole[_table_slice(config, size)] = table
            table = whole
        theirs["rel_pos_bias.rel_pos_bias"] = table
    return theirs


def to_published(module: SeqBoat | EMA, config: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """The weights of a layer or an EMA under the published names.

    Args:
        module: to translate.
        config: the published constructor arguments; needed for layers.
    """
    params = module.state_dict()
    if isinstance(module, EMA):
        require(type(module) is EMA, f"the published layer has an EMA, not {type(module).__name__}")
        return ema_to_published(params)
    require(config is not None, "config (the published constructor arguments) is needed for a layer")
    assert config is not None
    theirs = layer_to_published(params, config)
    if isinstance(module.norm, BatchNorm):
        theirs[f"norm.norm.{TRACKED}"] = torch.zeros((), dtype=torch.int64)
    return theirs


def check_config(config: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in config]
    require(not missing, f"config must hold the published arguments {needed}, missing {missing}")


def check_published(
    params: Mapping[str, Tensor], expected: Mapping[str, Tensor], optional: tuple[str, ...] = ()
) -> None:
    """Refuse published parameters that are missing, unknown or of another shape."""
    missing = sorted(expected.keys() - params.keys())
    unknown = sorted(params.keys() - expected.keys() - set(optional))
    require(
        not missing and not unknown,
        f"published parameters do not fit: missing {missing or 'none'}, unknown {unknown or 'none'}",
    )
    for name, value in expected.items():
        require(
            params[name].shape == value.shape,
            f"{name} must have shape {tuple(value.shape)}, got {tuple(params[name].shape)}",
        )


def load(module: torch.nn.Module, params: Mapping[str, Tensor]) -> None:
    """Copy parameters into a module; every one must be there and fit."""
    check_published(params, module.state_dict())
    module.load_state_dict(dict(params))
