"""Whole models of the published implementation: classifier, matcher, speech classifier and language model.

    params, config = ...                            # by their published names
    model = model_from_published(params, config)    # a Classifier, Matcher or LanguageModel
    params, config = model_to_published(model)

A published configuration is a dictionary:

    kind                  "classifier", "matcher", "speech" (a classifier of samples) or "language model"
    layers, classes       depth; number of classes (not of a language model)
    vocab                 number of token ids, None for real values
    absolute_positions    whether sinusoidal positions are added to the inputs
    scaled_embedding      language model: whether embeddings are multiplied by sqrt(embed_dim)
    final_norm_affine     whether the norm of a pre-norm stack has a learned scale and shift
    padding_index, train  token id of padding; whether the model is in training mode
    layer                 constructor arguments of a layer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seqboat.compat.layers import (
    TRACKED,
    check_config,
    check_published,
    layer_config,
    layer_parameters,
    layer_to_published,
    load,
    norm_parameters,
    norm_to_published,
    published_config,
)
from seqboat.core.checks import check_choice, require
from seqboat.core.nn import BatchNorm
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel, Matcher
from seqboat.models.limits import build_within

KINDS = ("classifier", "matcher", "speech", "language model")
PADDING = 1
"""The token id of padding in published dictionaries."""
_OPTIONAL = (TRACKED, "inv_freq", "decoder.version", "decoder.output_projection.weight")
"""Names of a published checkpoint that hold nothing to learn, or a second name of the same tensor."""


def backbone_config(config: Mapping[str, Any]) -> BackboneConfig:
    """Our configuration of a published model."""
    check_config(config, ("kind", "layers", "layer"))
    check_choice("kind", config["kind"], KINDS)
    layer = config["layer"]
    return BackboneConfig(
        mixer=layer_config(layer),
        d_model=layer["embed_dim"],
        num_layers=config["layers"],
        vocab=config.get("vocab"),
        scaled_embedding=config.get("scaled_embedding", False),
        absolute_positions=config.get("absolute_positions", False),
        dropout=layer.get("dropout", 0.0),
        final_norm_affine=config.get("final_norm_affine", True),
        head_bias=False,
        head_init="xavier",
    )


def model_from_published(
    params: Mapping[str, Tensor], config: Mapping[str, Any], name: str = "published model"
) -> nn.Module:
    """A model with the weights of a published one, in their type; in eval mode unless its configuration says train.

    Args:
        params: by their published names.
        config: the published configuration.
        name: of the file, for messages.
    """
    backbone, kind = backbone_config(config), config["kind"]
    if kind != "language model":
        check_config(config, ("classes",))

    def build() -> nn.Module:
        if kind == "language model":
            return LanguageModel(backbone)
        return (Matcher if kind == "matcher" else Classifier)(backbone, config["classes"])

    elements = sum(value.numel() for value in params.values())
    model = build_within(build, elements, backbone.num_layers, len(params), name)
    params = {name.replace("classifier.0.0.", "classifier.0."): value for name, value in params.items()}
    expected, _ = model_to_published(model)
    optional = tuple(name for name in params if name.endswith(_OPTIONAL))
    needed = {name: value for name, value in expected.items() if not name.endswith(_OPTIONAL)}
    check_published(params, needed, optional)
    _check_tied(params)
    dtype = next(value.dtype for name, value in params.items() if name.endswith("mx_proj.weight"))
    load(model.to(dtype), _our_names(params, config))
    return model.train(config.get("train", False))


def model_to_published(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of a model under their published names, and its published configuration.

    A bias table on compressed positions has published entries that no query can reach: they are zero.

    Args:
        model: a Classifier, Matcher or LanguageModel; a ValueError names what the published code does not have.
    """
    require(
        isinstance(model, Classifier | Matcher | LanguageModel),
        f"only classifiers, matchers and language models have a published form, not {type(model).__name__}",
    )
    assert isinstance(model, Classifier | Matcher | LanguageModel)
    backbone = model.backbone.config
    require(
        isinstance(backbone.mixer, SeqBoatConfig),
        f"the published models have SeqBoat layers, not {type(backbone.mixer).__name__}",
    )
    assert isinstance(backbone.mixer, SeqBoatConfig)
    lm = isinstance(model, LanguageModel)
    require(backbone.channels == 1, f"published inputs have one channel, got {backbone.channels}")
    require(lm or backbone.head_hidden, "the published head has a hidden layer: head_hidden must be True")
    require(lm or not backbone.head_bias, "the published head has no bias: head_bias must be False")
    require(lm or not backbone.scaled_embedding, "published classifiers do not scale their embedding")
    require(
        not (lm and model.backbone.absolute_positions),
        "the published language model has no absolute positions",
    )
    layer = published_config(backbone.d_model, backbone.mixer)
    rate = layer.get("dropout", 0.0)
    require(
        backbone.dropout == rate,
        f"the published dropout is the same on inputs and in layers, got {backbone.dropout} and {rate}",
    )
    config: dict[str, Any] = {
        "kind": "language model" if lm else "matcher" if isinstance(model, Matcher) else "classifier",
        "layers": backbone.num_layers,
        "vocab": backbone.vocab,
    }
    if lm:
        config |= {"scaled_embedding": backbone.scaled_embedding}
    else:
        head = model.head
        assert isinstance(head, nn.Module)
        config |= {
            "classes": head.out.out_features,  # type: ignore[union-attr]
            "padding_index": None if backbone.vocab is None else PADDING,
            "absolute_positions": model.backbone.absolute_positions,
        }
    if lm or not backbone.final_norm_affine:
        config |= {"final_norm_affine": backbone.final_norm_affine}
    config |= {"train": model.training, "layer": layer}
    return _published_names(model, config), config


def gradients_to_published(model: nn.Module, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a model's parameters, given by our names, under the published ones."""
    _, config = model_to_published(model)
    return _translate(grads, config)


def _our_names(params: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    stem, layer_name = _stem(config)
    ours: dict[str, Tensor] = {}
    for number in range(config["layers"]):
        prefix = f"{stem}layers.{number}.{layer_name}."
        layer = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        ours |= {
            f"backbone.layers.{number}.{k}": v for k, v in layer_parameters(layer, config["layer"]).items()
        }
    if config.get("vocab") is None:
        ours["backbone.embedding.weight"] = params[f"{stem}embed_tokens.weight"][:, None]
        ours["backbone.embedding.bias"] = params[f"{stem}embed_tokens.bias"]
    else:
        ours["backbone.embedding.weight"] = params[f"{stem}{_embedding(config)}"]
    if f"{stem}pos_emb.scale" in params:
        ours["backbone.position_scale"] = params[f"{stem}pos_emb.scale"].reshape(())
    norm = norm_parameters(params, f"{stem}final_norm.norm.")
    ours |= {f"backbone.norm.{k}": v for k, v in norm.items()}
    if config["kind"] != "language model":
        hidden = params["classifier.0.weight"]
        ours["head.hidden.weight"] = _swap_features(hidden) if config["kind"] == "matcher" else hidden
        ours["head.hidden.bias"] = params["classifier.0.bias"]
        ours["head.out.weight"] = params["sentence_projection_layer.weight"]
    return ours


def _published_names(
    model: Classifier | Matcher | LanguageModel, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state of a model, with the buffers of the published one."""
    theirs = _translate(model.state_dict(), config)
    stem, layer_name = _stem(config)
    if isinstance(model.backbone.norm, BatchNorm):
        theirs[f"{stem}final_norm.norm.{TRACKED}"] = torch.zeros((), dtype=torch.int64)
    for number, layer in enumerate(model.backbone.layers):
        if isinstance(layer.norm, BatchNorm):
            count = torch.zeros((), dtype=torch.int64)
            theirs[f"{stem}layers.{number}.{layer_name}.norm.norm.{TRACKED}"] = count
    if model.backbone.absolute_positions:
        d_model, weight = model.backbone.config.d_model, model.backbone.embedding.weight
        even = torch.arange(0, d_model, 2, dtype=weight.dtype, device=weight.device) / d_model
        theirs[f"{stem}pos_emb.inv_freq"] = 1.0 / 10000**even
    return theirs


def _translate(params: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our parameters, buffers or gradients under the published names."""
    stem, layer_name = _stem(config)
    theirs: dict[str, Tensor] = {}
    if config.get("vocab") is None:
        theirs[f"{stem}embed_tokens.weight"] = params["backbone.embedding.weight"][:, 0]
        theirs[f"{stem}embed_tokens.bias"] = params["backbone.embedding.bias"]
    else:
        theirs[f"{stem}{_embedding(config)}"] = params["backbone.embedding.weight"]
    if "backbone.position_scale" in params:
        theirs[f"{stem}pos_emb.scale"] = params["backbone.position_scale"].reshape(1)
    for number in range(config["layers"]):
        prefix = f"backbone.layers.{number}."
        layer = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        names = layer_to_published(layer, config["layer"], ssm="move")
        theirs |= {f"{stem}layers.{number}.{layer_name}.{k}": v for k, v in names.items()}
    norm = norm_to_published(params, "backbone.norm.")
    theirs |= {f"{stem}final_norm.norm.{k}": v for k, v in norm.items()}
    if config["kind"] != "language model":
        hidden = params["head.hidden.weight"]
        theirs["classifier.0.weight"] = _swap_features(hidden) if config["kind"] == "matcher" else hidden
        theirs["classifier.0.bias"] = params["head.hidden.bias"]
        theirs["sentence_projection_layer.weight"] = params["head.out.weight"]
    return theirs


def _stem(config: Mapping[str, Any]) -> tuple[str, str]:
    """What the published names of the stack begin with, and what a layer is called."""
    if config["kind"] == "language model":
        return "decoder.", "slag_layer"
    return "encoder.encoder.", "mega_layer"


def _embedding(config: Mapping[str, Any]) -> str:
    return "embed_tokens.weight" if config["kind"] == "language model" else "embed_tokens.embed.weight"


def _swap_features(weight: Tensor) -> Tensor:
    """The weights of a matcher's features [a, b, a * b, a - b] in the published order [b, a, ...], or back."""
    first, second, rest = weight.tensor_split((weight.shape[1] // 4, weight.shape[1] // 2), dim=1)
    return torch.cat([second, first, rest], dim=1)


def _check_tied(params: Mapping[str, Tensor]) -> None:
    """Refuse a language model whose output weights are not those of its embedding."""
    output = params.get("decoder.output_projection.weight")
    require(
        output is None or torch.equal(output, params["decoder.embed_tokens.weight"]),
        "decoder.output_projection.weight must equal decoder.embed_tokens.weight: "
        "only language models with tied embeddings are supported",
    )
