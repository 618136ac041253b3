"""Checkpoints of the published implementation, which are files of fairseq.

A file holds the model's tensors (`model`) and the settings of its training (`args`, or `cfg` in later versions of
fairseq). It is read by `compat.pickles`, which runs nothing in it.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqboat.compat.pickles import load_pickle, load_tensors
from seqboat.core.checks import require, short
from seqboat.data.files import replacing

ARCHITECTURES = {
    "listop": "lra.listops",
    "imdb": "lra.text",
    "aan": "lra.retrieval",
    "cifar10": "lra.image",
    "pf32": "lra.pathfinder",
    "pf128": "lra.pathx",
    "sc_raw": "speech",
    "enwik8": "enwik8",
}
"""Parts of the names of published architectures, and the recipe of the same task."""
_NAMES = {
    "lra.listops": ("slag_lra_listop", "lra-text"),
    "lra.text": ("slag_lra_imdb", "lra-text"),
    "lra.retrieval": ("slag_lra_aan", "lra-text"),
    "lra.image": ("slag_lra_cifar10", "lra-image"),
    "lra.pathfinder": ("slag_lra_pf32", "lra-image"),
    "lra.pathx": ("slag_lra_pf128_base", "lra-image"),
    "speech": ("slag_sc_raw_base", "speech_commands"),
    "enwik8": ("slag_lm_enwik8_base_v2", "language_modeling"),
}
"""The architecture and the task that a recipe is published as."""


class PublishedCheckpoint(NamedTuple):
    """What a checkpoint holds."""

    params: dict[str, Tensor]
    """by their published names, in at least float32"""
    config: dict[str, Any]
    """as `compat.models` describes it"""
    settings: dict[str, Any]
    """of the training"""
    steps: int
    """of training"""
    notes: tuple[str, ...]
    """what does not carry over"""

    @property
    def recipe(self) -> str | None:
        """The recipe of the same task, if the name of the architecture tells."""
        arch = str(self.settings.get("arch", ""))
        return next((recipe for part, recipe in ARCHITECTURES.items() if part in arch), None)


def read_checkpoint(path: Path) -> PublishedCheckpoint:
    """Read a checkpoint; a ValueError names the file and what is wrong with it."""
    content = load_pickle(path)
    require(isinstance(content, dict), f"{path} holds {type(content).__name__}, not a checkpoint")
    model = content.get("model")
    require(
        isinstance(model, dict) and len(model) > 0,
        f"{path} has no 'model': it is not a checkpoint of fairseq",
    )
    given = content.get("args") or content.get("cfg")
    require(given is not None, f"{path} has neither 'args' nor 'cfg': it is not a checkpoint of fairseq")
    params = {
        name: value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        for name, value in load_tensors(path, model).items()
    }
    try:
        settings = plain_settings(given)
        config, notes = config_from_settings(settings, params)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return PublishedCheckpoint(params, config, settings, _steps(content), notes)


def plain_settings(value: object) -> dict[str, Any]:
    """The settings of a checkpoint, a namespace or a dictionary with sections of both, as one dictionary."""
    found = vars(value) if isinstance(value, argparse.Namespace) else value
    require(isinstance(found, dict), f"the settings must be a namespace, got {type(value).__name__}")
    assert isinstance(found, dict)
    flat: dict[str, Any] = {}
    # sections such as `model` and `task` first: what stands beside them is more specific
    for section in found.values():
        if isinstance(section, dict | argparse.Namespace):
            flat |= section if isinstance(section, dict) else vars(section)
    return flat | {str(n): v for n, v in found.items() if not isinstance(v, dict | argparse.Namespace)}


def _steps(content: Mapping[str, Any]) -> int:
    history = content.get("optimizer_history")
    last = history[-1] if isinstance(history, list) and history else None
    steps = last.get("num_updates") if isinstance(last, dict) else None
    return steps if type(steps) is int and 0 <= steps < 1 << 48 else 0


class _Settings:
    """Settings with checks of their types."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    def get(self, name: str, default: Any) -> Any:
        value = self.settings.get(name, default)
        if value is None:
            return default
        kind = (int, float) if isinstance(default, float) else type(default) if default is not None else int
        require(isinstance(value, kind), f"setting {name} must be {kind}, got {short(value)}")
        return value

    def need(self, name: str) -> int:
        value = self.settings.get(name)
        require(type(value) is int, f"setting {name} must be a whole number, got {short(value)}")
        assert isinstance(value, int)
        return value


def config_from_settings(
    settings: Mapping[str, Any], params: Mapping[str, Tensor]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The published configuration of a checkpoint, and notes on what does not carry over.

    Args:
        settings: of the training.
        params: of the model; the kind of model and its vocabulary follow from them.
    """
    read = _Settings(settings)
    lm = any(name.startswith("decoder.") for name in params)
    side = "decoder" if lm else "encoder"
    layer_type = read.get("layer_type", "slag")
    require(lm or layer_type == "slag", f"layer_type must be 'slag' (SeqBoat), got {short(layer_type)}")
    _refuse_options(read, side, lm)
    d_model = read.need(f"{side}_embed_dim")
    rate = read.get("dropout", 0.0)
    layer = {
        "embed_dim": d_model,
        "zdim": read.need("decoder_z_dim" if lm else "z_dim"),
        "hdim": read.need(f"{side}_hidden_dim"),
        "ndim": read.need("decoder_n_dim" if lm else "n_dim"),
        "attention_activation": read.get("attention_activation_fn", "softmax"),
        "bidirectional": not lm,
        "window_size": read.get("decoder_chunk_size" if lm else "chunk_size", -1),
        "truncation": read.get("truncation_length", None),
        "norm_type": read.get("normalization_type" if lm else "norm_type", "layernorm"),
        "prenorm": read.get("normalize_before" if lm else "encoder_normalize_before", False),
        "rel_pos_bias": read.get("rel_pos_bias", "simple"),
        "local_pos": read.get("local_pos", False),
        "max_positions": read.need("max_target_positions" if lm else "max_positions"),
        "init_temp_scale": read.get("init_temp_scale", 0.3),
        "dropout": rate,
        "attention_dropout": read.get("attention_dropout", 0.0),
    }
    embedding = params.get(
        "decoder.embed_tokens.weight" if lm else "encoder.encoder.embed_tokens.embed.weight"
    )
    config: dict[str, Any] = {
        "layers": read.need(f"{side}_layers"),
        "vocab": None if embedding is None else len(embedding),
        "train": False,
        "layer": layer,
    }
    if lm:
        config |= {
            "kind": "language model",
            "scaled_embedding": not read.get("no_scale_embedding", False),
            "final_norm_affine": not read.get("no_affine_final_norm", False),
        }
    else:
        hidden = params.get("classifier.0.0.weight", params.get("classifier.0.weight"))
        require(hidden is not None and hidden.dim() == 2, "there is no classifier.0.0.weight")
        assert hidden is not None
        pair = hidden.shape[1] == 4 * d_model
        require(
            pair or hidden.shape[1] == d_model,
            f"the head must read {d_model} features, or {4 * d_model} of a pair (use_nli), got {hidden.shape[1]}",
        )
        config |= {
            "kind": "matcher" if pair else "classifier",
            "classes": read.need("sentence_class_num"),
            "padding_index": None if embedding is None else 1,
            "absolute_positions": any(name.endswith("pos_emb.scale") for name in params),
        }
    return config, _notes(read, lm)


def _refuse_options(read: _Settings, side: str, lm: bool) -> None:
    """Refuse settings under which the published code computes something that our layers do not."""
    fixed: dict[str, Any] = {
        "activation_fn": "silu",
        "always_act": False,
        "act_bias": 0.0,
        "normalize_embedding": False,
        "use_p": False,
        "adaptive_input": False,
    }
    if not lm:
        fixed |= {"sen_rep_type": "mp", "classifier_activation_fn": "gelu", "classifier_layers": 1}
    for name, wanted in fixed.items():
        found = read.get(name, wanted)
        require(found == wanted, f"setting {name} must be {wanted!r}, got {short(found)}")
    width = read.get(f"{side}_ffn_embed_dim", -1)
    require(
        width <= 0, f"setting {side}_ffn_embed_dim must be -1: SeqBoat has no feed-forward block, got {width}"
    )


def _notes(read: _Settings, lm: bool) -> tuple[str, ...]:
    notes = []
    name = "hidden_dropout" if lm else "act_dropout"
    if rate := read.get(name, 0.0):
        notes.append(f"{name} {rate} does not carry over: it matters in training only")
    if read.get("feature_dropout", False):
        notes.append("feature_dropout does not carry over: it matters in training only")
    return tuple(notes)


def settings_from_config(config: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """The settings that the published code needs to build a model."""
    lm = config["kind"] == "language model"
    side, layer = "decoder" if lm else "encoder", config["layer"]
    arch, task = _NAMES[recipe]
    settings: dict[str, Any] = {
        "arch": arch,
        "task": task,
        f"{side}_embed_dim": layer["embed_dim"],
        f"{side}_hidden_dim": layer["hdim"],
        f"{side}_ffn_embed_dim": -1,
        f"{side}_layers": config["layers"],
        "decoder_z_dim" if lm else "z_dim": layer["zdim"],
        "decoder_n_dim" if lm else "n_dim": layer["ndim"],
        "decoder_chunk_size" if lm else "chunk_size": layer["window_size"],
        "truncation_length": layer["truncation"],
        "normalization_type" if lm else "norm_type": layer["norm_type"],
        "normalize_before" if lm else "encoder_normalize_before": layer["prenorm"],
        "max_target_positions" if lm else "max_positions": layer["max_positions"],
        "activation_fn": "silu",
        "attention_activation_fn": layer["attention_activation"],
        "rel_pos_bias": layer["rel_pos_bias"],
        "local_pos": layer["local_pos"],
        "init_temp_scale": layer["init_temp_scale"],
        "dropout": layer.get("dropout", 0.0),
        "attention_dropout": layer.get("attention_dropout", 0.0),
        "feature_dropout": False,
        "normalize_embedding": False,
    }
    if lm:
        return settings | {
            "no_scale_embedding": not config["scaled_embedding"],
            "no_affine_final_norm": not config["final_norm_affine"],
            "share_decoder_input_output_embed": True,
            "hidden_dropout": 0.0,
            "adaptive_input": False,
            "adaptive_softmax_cutoff": None,
        }
    d_model = layer["embed_dim"]
    pair = config["kind"] == "matcher"
    return settings | {
        "layer_type": "slag",
        "input_type": "image" if config["vocab"] is None else "text",
        "sen_rep_type": "mp",
        "add_apos": config["absolute_positions"],
        "use_nli": pair,
        "use_p": False,
        "always_act": False,
        "act_bias": 0.0,
        "act_dropout": 0.0,
        "apply_bert_init": False,
        "classifier_layers": 1,
        "classifier_activation_fn": "gelu",
        "classifier_in_dim": (4 if pair else 1) * d_model,
        "classifier_out_dim": 2 * d_model,
        "sentence_class_num": config["classes"],
    }


def write_checkpoint(
    path: Path, params: Mapping[str, Tensor], config: Mapping[str, Any], recipe: str, steps: int = 0
) -> None:
    """Write a checkpoint that the published code loads.

    Args:
        path: of the file, which appears whole or not at all.
        params: by their published names.
        config: the published configuration.
        recipe: whose task and architecture it has.
        steps: of training.
    """
    names = {name.replace("classifier.0.", "classifier.0.0."): value for name, value in params.items()}
    if config["kind"] == "language model":
        names["decoder.version"] = torch.tensor([3.0])
        names["decoder.output_projection.weight"] = names["decoder.embed_tokens.weight"]
    content = {
        "args": argparse.Namespace(**settings_from_config(config, recipe)),
        "model": OrderedDict((name, value.detach().cpu().contiguous()) for name, value in names.items()),
        "optimizer_history": [
            {
                "criterion_name": "CrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {},
                "num_updates": steps,
            }
        ],
        "extra_state": {"epoch": 1, "train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }
    with replacing(path) as stage:
        torch.save(content, stage)
