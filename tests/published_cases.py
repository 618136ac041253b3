"""Stored whole models of the published implementation: parameters, inputs, logits, gradients."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

NAMES = ["image", "language_model", "listops", "pathfinder", "retrieval", "speech", "text"]
FOLDER = Path(__file__).parent / "fixtures" / "golden" / "models"


class PublishedModel(NamedTuple):
    """One stored model."""

    config: dict[str, Any]
    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    """of the mean cross entropy"""
    arrays: dict[str, Tensor]
    """input, target, logits and lengths"""

    def run(self, model: nn.Module) -> Tensor:
        """The logits of our model."""
        arrays = self.arrays
        if self.config["kind"] == "matcher":
            masks = [real(arrays["input"], arrays["lengths"]), real(arrays["input1"], arrays["lengths1"])]
            return model(arrays["input"], arrays["input1"], *masks).logits
        if self.config["vocab"] is None or "lengths" not in arrays:
            return model(arrays["input"]).logits
        return model(arrays["input"], real(arrays["input"], arrays["lengths"])).logits


def real(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Where the tokens are not padding."""
    return torch.arange(tokens.shape[1]) < lengths[:, None]


def read(name: str) -> PublishedModel:
    """A stored model by name."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    params: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for key, value in arrays.items():
        kind, _, inner = key.partition(".")
        {"param": params, "grad": grads}.get(kind, rest)[inner or kind] = value
    return PublishedModel(config, params, grads, rest)


def settings(case: PublishedModel, arch: str, **changes: Any) -> dict[str, Any]:
    """The settings with which fairseq would have trained a stored model, as its command line names them."""
    config, layer = case.config, case.config["layer"]
    common = {
        "arch": arch,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_fn": "silu",
        "attention_activation_fn": layer["attention_activation"],
        "rel_pos_bias": layer["rel_pos_bias"],
        "local_pos": layer["local_pos"],
        "truncation_length": layer["truncation"],
        "init_temp_scale": layer["init_temp_scale"],
        "adam_betas": "(0.9, 0.98)",
        "lr": [0.01],
        "data": "/somewhere/else",
        "seed": 1,
    }
    if config["kind"] == "language model":
        common |= {
            "task": "language_modeling",
            "decoder_layers": config["layers"],
            "decoder_embed_dim": layer["embed_dim"],
            "decoder_hidden_dim": layer["hdim"],
            "decoder_ffn_embed_dim": -1,
            "decoder_z_dim": layer["zdim"],
            "decoder_n_dim": layer["ndim"],
            "decoder_chunk_size": layer["window_size"],
            "max_target_positions": layer["max_positions"],
            "normalization_type": layer["norm_type"],
            "normalize_before": layer["prenorm"],
            "no_affine_final_norm": True,
            "share_decoder_input_output_embed": True,
        }
    else:
        common |= {
            "task": "lra-image" if config["vocab"] is None else "lra-text",
            "layer_type": "slag",
            "encoder_layers": config["layers"],
            "encoder_embed_dim": layer["embed_dim"],
            "encoder_hidden_dim": layer["hdim"],
            "encoder_ffn_embed_dim": -1,
            "z_dim": layer["zdim"],
            "n_dim": layer["ndim"],
            "chunk_size": layer["window_size"],
            "max_positions": layer["max_positions"],
            "norm_type": layer["norm_type"],
            "encoder_normalize_before": layer["prenorm"],
            "sentence_class_num": config["classes"],
            "sen_rep_type": "mp",
            "classifier_layers": 1,
            "use_nli": config["kind"] == "matcher",
        }
    return common | changes


def save_checkpoint(path: Path, case: PublishedModel, arch: str, **changes: Any) -> Path:
    """Write a stored model as fairseq writes its checkpoints."""
    params = {name.replace("classifier.0.", "classifier.0.0."): value for name, value in case.params.items()}
    if case.config["kind"] == "language model":
        params["decoder.version"] = torch.tensor([3.0])
        params["decoder.output_projection.weight"] = params["decoder.embed_tokens.weight"]
    moments = {"state": {0: {"step": 7, "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.01}]}
    content = {
        "args": Namespace(**settings(case, arch, **changes)),
        "model": OrderedDict(params),
        "optimizer_history": [{"criterion_name": "LRACrossEntropyCriterion", "num_updates": 90_000}],
        "extra_state": {"epoch": 60, "best": np.float64(0.61), "val_loss": 0.5},
        "last_optimizer_state": moments,
    }
    torch.save(content, path)
    return path


def write_dictionaries(folder: Path, symbols: list[str], labels: list[str] | None = None) -> Path:
    """The dictionaries of published data; of a language model without labels."""
    home = folder if labels is None else folder / "src-bin"
    home.mkdir(parents=True, exist_ok=True)
    (home / "dict.txt").write_text("".join(f"{symbol} {1000 - i}\n" for i, symbol in enumerate(symbols)))
    if labels is not None:
        (folder / "label-bin").mkdir()
        (folder / "label-bin" / "dict.txt").write_text("".join(f"{label} 500\n" for label in labels))
    return folder
