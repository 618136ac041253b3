"""Whole models of the published implementation: its logits and gradients, and its weights back bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from closeness import assert_same_numbers, largest
from published_cases import NAMES, PublishedModel, read
from seqboat import compat
from seqboat.compat.models import gradients_to_published
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.heads import Classifier, LanguageModel
from seqboat.ssm.diagonal import S4DConfig


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> PublishedModel:
    return read(request.param)


@pytest.fixture
def text() -> PublishedModel:
    return read("text")


def test_logits_and_gradients(case: PublishedModel) -> None:
    model = compat.model_from_published(case.params, case.config)
    logits = case.run(model)
    assert_same_numbers(logits, case.arrays["logits"])
    loss = F.cross_entropy(logits.flatten(0, -2), case.arrays["target"].flatten())
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    theirs = gradients_to_published(model, grads)
    # the stored gradients lack that of one bias
    assert case.grads.keys() <= theirs.keys() and theirs.keys() - case.grads.keys() <= {"classifier.0.bias"}
    for name, want in case.grads.items():
        assert_same_numbers(theirs[name], want, name, largest(case.grads.values()))


def test_round_trip(case: PublishedModel) -> None:
    """Every weight comes back bit for bit; a bias table on compressed positions where a query can reach it."""
    params, config = compat.model_to_published(compat.model_from_published(case.params, case.config))
    assert params.keys() == case.params.keys()
    side = case.config["layer"]["window_size"]
    for name, value in case.params.items():
        assert params[name].shape == value.shape and params[name].dtype == value.dtype, name
        if name.endswith("num_batches_tracked"):
            continue
        if name.endswith("rel_pos_bias.rel_pos_bias") and case.config["layer"]["local_pos"]:
            reached = slice(3 * side - 1, 5 * side)
            assert torch.equal(params[name][reached], value[reached]), name
            assert params[name].count_nonzero() == 2 * side + 1
        else:
            assert torch.equal(params[name], value), name
    # a speech model is a classifier
    wanted = {**case.config, "kind": case.config["kind"].replace("speech", "classifier")}
    assert {key: config.get(key) for key in wanted} == wanted
    again = compat.model_from_published(params, config)
    for name, value in compat.model_to_published(again)[0].items():
        assert torch.equal(value, params[name]), name


def test_our_model_round_trip() -> None:
    """A model that was made here becomes the same model again, also one that attends to everything."""
    torch.manual_seed(0)
    case = read("listops")
    backbone = compat.backbone_config(case.config)
    mixer = backbone.mixer
    assert isinstance(mixer, SeqBoatConfig)
    options: tuple[dict[str, Any], ...] = ({}, {"span": "full"})
    for changes in options:
        config = replace(
            backbone, mixer=replace(mixer, gau=replace(mixer.gau, **changes), dropout=0.1), dropout=0.1
        )
        model = Classifier(config, 7).eval()
        params, published = compat.model_to_published(model)
        assert published["layer"]["window_size"] == (-1 if changes else 6)
        again = compat.model_from_published(params, published)
        assert isinstance(again, Classifier) and again.state_dict().keys() == model.state_dict().keys()
        assert replace(again.backbone.config, mixer=mixer) == replace(config, mixer=mixer)
        assert all(value.equal(model.state_dict()[name]) for name, value in again.state_dict().items())
        assert_same_numbers(case.run(again), case.run(model))


def test_all_active_tokens_in_reach() -> None:
    """Without a working memory the published layer attends to all active tokens, as with one that holds them all."""
    case = read("listops")
    layer = case.config["layer"]
    full, wide = (
        compat.model_from_published(case.params, {**case.config, "layer": {**layer, "window_size": side}})
        for side in (-1, 60)
    )
    assert_same_numbers(case.run(full), case.run(wide))
    assert not torch.allclose(case.run(full), case.arrays["logits"], rtol=0, atol=1e-6)


def test_names_of_checkpoints() -> None:
    """In a checkpoint the hidden layer and its dropout are one module; a language model has tied weights twice."""
    case = read("speech")
    params = {name.replace("classifier.0.", "classifier.0.0."): value for name, value in case.params.items()}
    model = compat.model_from_published(params, case.config)
    assert_same_numbers(case.run(model), case.arrays["logits"])
    case = read("language_model")
    weight = case.params["decoder.embed_tokens.weight"]
    extra = {"decoder.version": torch.tensor([3.0]), "decoder.output_projection.weight": weight.clone()}
    model = compat.model_from_published({**case.params, **extra}, case.config)
    assert_same_numbers(case.run(model), case.arrays["logits"])
    extra["decoder.output_projection.weight"][3, 3] += 1
    with pytest.raises(
        ValueError, match=r"output_projection\.weight must equal decoder\.embed_tokens\.weight"
    ):
        compat.model_from_published({**case.params, **extra}, case.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "translator"}, "kind must be one of classifier, matcher, speech, language model"),
        ({"layers": 3}, r"missing \['encoder.encoder.layers.2.*unknown none"),
        ({"layers": 1}, r"missing none, unknown \['encoder.encoder.layers.1"),
        ({"vocab": 61}, r"embed_tokens.embed.weight must have shape \(61, 20\), got \(60, 20\)"),
        ({"classes": 3}, r"sentence_projection_layer.weight must have shape \(3, 40\), got \(2, 40\)"),
        ({"absolute_positions": True}, r"missing \['encoder.encoder.pos_emb.scale'\]"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_refusals(text: PublishedModel, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compat.model_from_published(text.params, {**text.config, **change})


def test_missing_configuration(text: PublishedModel) -> None:
    for name in ("kind", "layers", "layer", "classes"):
        config = {key: value for key, value in text.config.items() if key != name}
        with pytest.raises(ValueError, match=rf"missing \['{name}'\]"):
            compat.model_from_published(text.params, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm": S4DConfig()}, "the published layer has an EMA, not S4DConfig"),
        ({"ffn": True}, "the published layer has no ffn"),
        ({"dropout": 0.2}, "the published dropout is the same on inputs and in layers, got 0.0 and 0.2"),
    ],
    ids=["ssm", "ffn", "dropout"],
)
def test_models_without_a_published_form(text: PublishedModel, change: dict[str, Any], message: str) -> None:
    backbone = compat.backbone_config(text.config)
    mixer = backbone.mixer
    assert isinstance(mixer, SeqBoatConfig)
    with pytest.raises(ValueError, match=message):
        compat.model_to_published(Classifier(replace(backbone, mixer=replace(mixer, **change)), 2))


def test_options_without_a_published_form(text: PublishedModel) -> None:
    backbone = compat.backbone_config(text.config)
    mixer = backbone.mixer
    assert isinstance(mixer, SeqBoatConfig)
    with pytest.raises(ValueError, match="head_bias must be False"):
        compat.model_to_published(Classifier(replace(backbone, head_bias=True), 2))
    odd = replace(mixer, gau=replace(mixer.gau, window=7))
    with pytest.raises(ValueError, match="twice a whole number, got window 7"):
        compat.model_to_published(Classifier(replace(backbone, mixer=odd), 2))
    positions = replace(backbone, mixer=replace(mixer, causal=True), absolute_positions=True)
    with pytest.raises(ValueError, match="the published language model has no absolute positions"):
        compat.model_to_published(LanguageModel(positions))
    with pytest.raises(ValueError, match="not Linear"):
        compat.model_to_published(torch.nn.Linear(2, 2))
