"""Classifier, matcher and language model: shapes, masks, tied weights, checkpointing, learning."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from closeness import assert_same_numbers
from mixer_cases import SMALL_EMA, SMALL_GAU, assert_near, balance, directions, enliven, mask_rows
from seqboat.core.nn import masked_mean, sinusoids
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.models.backbone import Backbone, BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel, Matcher

ENCODER = SeqBoatConfig(init="paper", ssm=SMALL_EMA, gau=SMALL_GAU)
DECODER = replace(ENCODER, causal=True)
TOKENS = BackboneConfig(mixer=ENCODER, d_model=8, num_layers=2, vocab=11)
VALUES = replace(TOKENS, vocab=None)
LANGUAGE = replace(TOKENS, mixer=DECODER)

MODELS = {
    f"{name}-{direction}": config
    for name, config_class in MIXERS.items()
    for direction, config in directions(config_class)
}


def ids(*shape: int, vocab: int = 11) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(5))


def make(model: Any, inputs: Tensor) -> Any:
    enliven(model)
    balance(model, inputs)
    return model


@pytest.mark.parametrize("mixer", MODELS.values(), ids=MODELS.keys())
def test_classifier(mixer: Any) -> None:
    torch.manual_seed(0)
    config = replace(TOKENS, mixer=mixer, absolute_positions=True)
    model = make(Classifier(config, 4), ids(3, 20))
    mask = mask_rows()
    inputs = ids(*mask.shape)
    inputs[~mask] = 3
    out = model(inputs, mask)
    assert out.logits.shape == (6, 4) and len(out.routings) == 2
    for row, real in enumerate(mask):
        alone = model(inputs[row : row + 1, real])
        assert_near(out.logits[row], alone.logits[0], 1e-10)
    inputs[~mask] = 9
    assert_same_numbers(model(inputs, mask).logits, out.logits)
    # a row without tokens has the features of nothing: a function of the head's biases
    assert_near(out.logits[5], model.head(torch.zeros(8, dtype=torch.float64)), 1e-12)
    out.logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_matcher() -> None:
    torch.manual_seed(0)
    model = Matcher(TOKENS, 3)
    enliven(model)
    first, second = ids(4, 22), ids(4, 15).flip(0)
    first_mask = mask_rows()[:4]
    second_mask = torch.arange(15) < torch.tensor([[15], [4], [1], [9]])
    out = model(first, second, first_mask, second_mask)
    assert out.logits.shape == (4, 3) and len(out.routings) == 4
    a = masked_mean(model.backbone(first, first_mask).y, first_mask)
    b = masked_mean(model.backbone(second, second_mask).y, second_mask)
    assert_near(out.logits, model.head(torch.cat([a, b, a * b, a - b], dim=-1)), 1e-12)
    for row in range(4):
        alone = model(first[row : row + 1, first_mask[row]], second[row : row + 1, second_mask[row]])
        assert_near(out.logits[row], alone.logits[0], 1e-10)


def test_head_by_formula() -> None:
    torch.manual_seed(0)
    model = Classifier(TOKENS, 4).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    head = model.head
    assert head.hidden is not None
    hidden = F.gelu(x @ head.hidden.weight.T + head.hidden.bias)
    assert_near(head(x), hidden @ head.out.weight.T + head.out.bias, 1e-12)
    assert head.hidden.out_features == 16


def test_linear_head() -> None:
    linear = replace(TOKENS, head_hidden=False)
    torch.manual_seed(0)
    head = Classifier(linear, 4).double().head
    x = torch.randn(3, 8, dtype=torch.float64)
    assert_near(head(x), x @ head.out.weight.T + head.out.bias, 1e-12)
    assert Matcher(linear).head.hidden is not None


def test_published_head() -> None:
    """Xavier weights, a hidden bias of zeros, no bias on the class scores."""
    torch.manual_seed(0)
    config = replace(TOKENS, d_model=64, head_bias=False, head_init="xavier")
    model = Classifier(config, 4)
    head = model.head
    assert head.out.bias is None and not head.hidden.bias.any()
    assert "head.out.bias" not in model.state_dict()
    for part in (head.hidden, head.out):
        bound = math.sqrt(6 / sum(part.weight.shape))
        assert 0.95 * bound < float(part.weight.abs().max().detach()) <= bound
    x = torch.randn(3, 64)
    assert_near(head(x), F.gelu(x @ head.hidden.weight.T) @ head.out.weight.T, 1e-5)
    assert Matcher(config).head.out.bias is None
    with pytest.raises(ValueError, match="head_init must be one of normal, xavier, zero; got 'zeros'"):
        replace(TOKENS, head_init="zeros")


def test_final_norm_without_affine_parameters() -> None:
    torch.manual_seed(0)
    config = replace(LANGUAGE, mixer=replace(DECODER, prenorm=True))
    whole, plain = LanguageModel(config), LanguageModel(replace(config, final_norm_affine=False))
    # at first the scale is 1 and the shift 0
    weights = whole.state_dict()
    for name in ("weight", "bias"):
        del weights[f"backbone.norm.{name}"]
    plain.load_state_dict(weights)
    tokens = ids(2, 9)
    assert_same_numbers(plain(tokens).logits, whole(tokens).logits)
    # the norms of the layers keep theirs, and a stack without a final norm has nothing to lose
    assert "backbone.layers.0.norm.weight" in plain.state_dict()
    post = LanguageModel(replace(LANGUAGE, final_norm_affine=False))
    assert post.state_dict().keys() == LanguageModel(LANGUAGE).state_dict().keys()


def test_language_model_ties_its_weights() -> None:
    torch.manual_seed(0)
    model = LanguageModel(LANGUAGE).double()
    assert [name for name in model.state_dict() if "embedding" in name] == ["backbone.embedding.weight"]
    tokens = ids(2, 9)
    out = model(tokens)
    assert out.logits.shape == (2, 9, 11)
    hidden = model.backbone(tokens).y
    weight = model.backbone.embedding.weight
    assert_near(out.logits, hidden @ weight.T, 1e-12)
    # tokens that do not occur get their gradient from the output alone
    out.logits[..., 3].sum().backward()
    absent = next(token for token in range(11) if token != 3 and token not in tokens)
    assert weight.grad is not None and weight.grad[3].any() and not weight.grad[absent].any()


def test_scaled_embedding() -> None:
    torch.manual_seed(0)
    plain = Backbone(TOKENS).double()
    scaled = Backbone(replace(TOKENS, scaled_embedding=True)).double()
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        scaled.embedding.weight /= math.sqrt(8)
    assert_near(scaled(ids(2, 9)).y, plain(ids(2, 9)).y, 1e-12)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_checkpointing_changes_no_number(masked: bool) -> None:
    torch.manual_seed(0)
    dropout = replace(DECODER, dropout=0.2, gau=replace(SMALL_GAU, attention_dropout=0.2))
    model = LanguageModel(replace(LANGUAGE, mixer=dropout, dropout=0.1))
    make(model, ids(4, 30)).train()
    mask = mask_rows() if masked else None
    results = []
    for checkpointing in (False, True):
        model.backbone.gradient_checkpointing = checkpointing
        model.zero_grad()
        torch.manual_seed(3)
        out = model(ids(6, 22), mask)
        out.logits.square().sum().backward()
        results.append((out.logits, [parameter.grad for parameter in model.parameters()]))
    (plain, plain_grads), (again, again_grads) = results
    assert_same_numbers(again, plain)
    for one, two in zip(plain_grads, again_grads, strict=True):
        assert one is not None and two is not None
        assert_near(one, two, 1e-12)


def test_checkpointing_moves_running_averages_once() -> None:
    torch.manual_seed(0)
    model = Classifier(replace(TOKENS, mixer=replace(ENCODER, norm="batch")), 3).double().train()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    results = []
    for checkpointing in (False, True):
        model.backbone.gradient_checkpointing = checkpointing
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        model(ids(6, 22), mask_rows()).logits.square().sum().backward()
        results.append([buffer.clone() for buffer in model.buffers()])
    assert results[0]
    for one, two in zip(*results, strict=True):
        assert_same_numbers(one, two)
    assert not torch.equal(results[0][0], next(iter(buffers.values())))


def test_absolute_positions_continue_with_the_state() -> None:
    torch.manual_seed(0)
    model = make(LanguageModel(replace(LANGUAGE, absolute_positions=True)), ids(4, 30))
    tokens, mask = ids(6, 22), mask_rows()
    whole = model(tokens, mask)
    first = model(tokens[:, :9], mask[:, :9])
    assert first.state.seen.equal(mask[:, :9].sum(dim=1))
    second = model(tokens[:, 9:], mask[:, 9:], first.state)
    assert_near(torch.cat([first.logits, second.logits], dim=1), whole.logits, 1e-10)
    assert second.state.seen.equal(mask.sum(dim=1))
    whole, state = model(tokens), model(tokens[:, :9]).state
    for t in range(9, 22):
        assert_near(model.step(tokens[:, t], state).logits, whole.logits[:, t], 1e-10)
    assert state.seen.tolist() == [22] * 6
    # and they matter: the same tokens later in a sequence score otherwise
    embedded = model.backbone._embed(tokens[:, :3], torch.tensor([0, 1, 2]).expand(6, 3))
    later = model.backbone._embed(tokens[:, :3], torch.tensor([7, 8, 9]).expand(6, 3))
    shift = sinusoids(torch.tensor([7, 8, 9]), 8) - sinusoids(torch.tensor([0, 1, 2]), 8)
    assert_near(later - embedded, (shift * model.backbone.position_scale).expand(6, 3, 8), 1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_real_values(causal: bool) -> None:
    torch.manual_seed(0)
    mixer = DECODER if causal else ENCODER
    model = Classifier(replace(VALUES, mixer=mixer), 3)
    x = torch.randn(6, 22, dtype=torch.float64)
    make(model, x)
    assert_near(model(x).logits, model(x[..., None]).logits, 0)
    mask = mask_rows()
    padded = torch.where(mask, x, math.nan)
    for row, real in enumerate(mask):
        assert_near(model(padded, mask).logits[row], model(x[row : row + 1, real]).logits[0], 1e-10)
    wide = Classifier(replace(VALUES, mixer=mixer, channels=3), 3)
    enliven(wide)
    y = wide(torch.randn(2, 9, 3, dtype=torch.float64))
    assert y.logits.shape == (2, 3)
    if causal:
        backbone, state = model.backbone, model.backbone.init_state(6)
        whole = backbone(x).y
        for t in range(22):
            out = backbone.step(x[:, t] if t % 2 else x[:, t, None], state)
            assert_near(out.y, whole[:, t], 1e-10)
            assert out.state is not None
            state = out.state


def test_dropout_only_in_training() -> None:
    torch.manual_seed(0)
    config = replace(TOKENS, mixer=replace(ENCODER, dropout=0.5), dropout=0.5)
    model = Classifier(config, 3)
    tokens = ids(2, 9)
    assert not model(tokens).logits.equal(model(tokens).logits)
    model.eval()
    assert model(tokens).logits.equal(model(tokens).logits)


def test_empty_inputs() -> None:
    torch.manual_seed(0)
    for shape in ((0, 5), (3, 0), (0, 0)):
        tokens = torch.zeros(shape, dtype=torch.int64)
        for mask in (None, torch.zeros(shape, dtype=torch.bool)):
            model = LanguageModel(LANGUAGE)
            out = model(tokens, mask)
            assert out.logits.shape == (*shape, 11)
            out.logits.sum().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None and not parameter.grad.any(), name
            assert Classifier(TOKENS, 4)(tokens, mask).logits.shape == (shape[0], 4)


def test_learns_to_find_a_marked_token() -> None:
    """The class is the token behind the only marker: more than a mean over tokens can tell."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    mixer = SeqBoatConfig(init="paper", ssm=SMALL_EMA, gau=replace(SMALL_GAU, window=16))
    model = Classifier(BackboneConfig(mixer=mixer, d_model=16, num_layers=2, vocab=5), 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 4, (size, 16), generator=generator)
        place = torch.randint(0, 15, (size, 1), generator=generator)
        return tokens.scatter(1, place, 4), tokens.gather(1, place + 1).squeeze(1)

    for _ in range(150):
        tokens, labels = batch(32)
        loss = F.cross_entropy(model(tokens).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    tokens, labels = batch(500)
    accuracy = (model(tokens).logits.argmax(dim=-1) == labels).double().mean()
    assert float(accuracy) > 0.9


def test_language_model_learns_by_heart() -> None:
    """The text comes out again from its first token, one step at a time."""
    torch.manual_seed(0)
    text = ids(1, 32, vocab=6)
    config = replace(LANGUAGE, vocab=6, d_model=24, mixer=replace(DECODER, gau=replace(SMALL_GAU, window=16)))
    model = LanguageModel(config)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        out = model(text[:, :-1])
        loss = F.cross_entropy(out.logits.flatten(0, 1), text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    token, state, said = text[:, 0], model.init_state(1), [int(text[0, 0])]
    with torch.no_grad():
        for _ in range(31):
            logits, state, _ = model.step(token, state)
            token = logits.argmax(dim=-1)
            said.append(int(token))
    assert said == text[0].tolist()
