"""N-grams of tokens as inputs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from seqboat import BackboneConfig, Classifier, GAUConfig, LanguageModel, SeqBoatConfig
from seqboat.core.state import map_state
from seqboat.export.int8 import Int8Bag, float_tensors, quantize
from seqboat.models.backbone import Backbone
from seqboat.models.ngrams import NGrams

CONFIG = BackboneConfig(
    mixer=SeqBoatConfig(gau=GAUConfig(d_z=4, window=4, max_positions=16)),
    d_model=8,
    num_layers=1,
    vocab=256,
    ngrams=(2, 3),
    ngram_buckets=64,
)


def test_an_ngram_has_one_place_wherever_it_stands() -> None:
    ngrams = NGrams([2, 4], 50_000, 4)
    text = torch.tensor([list(b"abcdabcdxabcd")])
    two, four = ngrams.places(text)[0].T
    assert four[3] == four[7] == four[12] and two[1] == two[5] == two[10]
    assert len(set(four.tolist())) == 11 and len(set(two.tolist())) == 7
    assert (two < 50_000).all() and (four >= 50_000).all() and (four < 100_000).all()
    reverse = ngrams.places(text.flip(1))[0, -1]
    assert not set(reverse.tolist()) & set(two.tolist() + four.tolist())


def test_buckets_are_used_evenly() -> None:
    torch.manual_seed(0)
    places = NGrams([3], 100, 4).places(torch.randint(97, 123, (20, 500)))
    counts = torch.bincount(places.flatten(), minlength=100)
    assert counts.min() > 50 and counts.max() < 160


def test_places_do_not_depend_on_what_follows() -> None:
    ngrams = NGrams([2, 3], 97, 4)
    text = torch.randint(256, (2, 9))
    assert torch.equal(ngrams.places(text)[:, :5], ngrams.places(text[:, :5]))
    expected = ngrams.table.weight[ngrams.places(text)].sum(dim=2)
    torch.testing.assert_close(ngrams(text), expected)


def test_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Classifier(CONFIG, 3).double().eval()
    ids = torch.randint(256, (2, 7))
    alone = model(ids).logits
    padded = torch.cat([torch.full((2, 3), 9), ids, torch.full((2, 2), 9)], dim=1)
    mask = torch.tensor([[False] * 3 + [True] * 7 + [False] * 2] * 2)
    torch.testing.assert_close(model(padded, mask).logits, alone, rtol=0, atol=1e-12)
    assert model.backbone(ids).state is None


def test_every_table_learns() -> None:
    model = Classifier(CONFIG, 3)
    model(torch.randint(256, (2, 7))).logits.sum().backward()
    assert model.backbone.ngrams is not None
    gradient = model.backbone.ngrams.table.weight.grad
    assert gradient is not None and (gradient != 0).any(dim=1).sum() > 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ngrams": (3, 2)}, r"ngrams must be different lengths in ascending order, got \(3, 2\)"),
        ({"ngrams": (1,)}, r"ngrams must be an integer >= 2, got 1"),
        ({"ngram_buckets": 0}, r"ngram_buckets must be an integer >= 1, got 0"),
    ],
)
def test_mistakes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


def test_dropout_of_ngrams_only_in_training() -> None:
    torch.manual_seed(0)
    model = Backbone(dataclasses.replace(CONFIG, ngram_dropout=0.5))
    text = torch.randint(256, (2, 12))
    plain = Backbone(CONFIG)
    plain.load_state_dict(model.state_dict())
    position = torch.zeros(2, 12, dtype=torch.int64)
    dropped = model._embed(text, position) - model.embedding(text)
    kept = plain._embed(text, position) - plain.embedding(text)
    gone = dropped.abs() < 1e-6
    assert 0.2 < gone.float().mean() < 0.8
    torch.testing.assert_close(dropped[~gone], 2 * kept[~gone])
    model.eval()
    torch.testing.assert_close(model._embed(text, position), plain._embed(text, position))
    with pytest.raises(ValueError, match="ngram_dropout must be"):
        dataclasses.replace(CONFIG, ngram_dropout=1.5)


def test_ngrams_need_token_ids() -> None:
    with pytest.raises(ValueError, match="ngrams need token ids, but the inputs are real values"):
        Backbone(dataclasses.replace(CONFIG, vocab=None))


def language_model(**changes: object) -> LanguageModel:
    torch.manual_seed(0)
    causal = dataclasses.replace(CONFIG.mixer, causal=True)  # type: ignore[type-var]
    config = dataclasses.replace(CONFIG, mixer=causal, ngrams=(2, 5), **changes)  # type: ignore[arg-type]
    return LanguageModel(config).double().eval()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_whole_is_pieces_is_steps() -> None:
    model = language_model()
    ids = torch.randint(256, (3, 23))
    whole = model(ids)
    assert whole.state.recent is not None
    state = model.init_state(3)
    found: list[torch.Tensor] = []
    for piece in ids.split([1, 2, 0, 7, 3, 10], dim=1):
        out = model(piece, None, state)
        state, found = out.state, [*found, out.logits]
    close(torch.cat(found, dim=1), whole.logits)
    assert torch.equal(state.recent, whole.state.recent)  # type: ignore[arg-type]
    state = model.init_state(3)
    for time, token in enumerate(ids.unbind(1)):
        out = model.step(token, state)
        state = out.state
        close(out.logits, whole.logits[:, time])
    assert torch.equal(state.recent, whole.state.recent)  # type: ignore[arg-type]


def test_padding_and_pauses_are_not_remembered() -> None:
    model = language_model()
    ids = torch.randint(256, (2, 12))
    mask = torch.rand(2, 12) < 0.6
    padded = model(ids, mask)
    state = model.init_state(2)
    for time in range(12):
        state = model.step(ids[:, time], state, mask[:, time]).state
    assert torch.equal(state.recent, padded.state.recent)  # type: ignore[arg-type]
    for row in range(2):
        alone = model(ids[row : row + 1, mask[row]])
        close(padded.logits[row, mask[row]], alone.logits[0])
        assert torch.equal(padded.state.recent[row], alone.state.recent[0])


def test_packed_documents_are_read_alone() -> None:
    model = language_model()
    ids, sizes = torch.randint(256, (2, 14)), [5, 9, 1, 13]
    borders = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    packed = model(ids, cu_seqlens=borders)
    parts = ids.flatten().split(sizes)
    close(packed.logits.flatten(0, 1), torch.cat([model(part[None]).logits[0] for part in parts]))
    # the first document of a sequence continues it, and the last one is continued
    before = model(torch.randint(256, (2, 6))).state
    packed = model(ids, None, before, cu_seqlens=borders)
    first = model(ids[:1, :5], None, map_state(lambda part: part[:1], before))
    close(packed.logits[0, :5], first.logits[0])
    assert torch.equal(packed.state.recent[1], parts[3][-4:] + 1)


def test_rounded_tables() -> None:
    model = language_model().float()
    rounded = copy.deepcopy(model)
    quantize(rounded)
    assert isinstance(rounded.backbone.ngrams.table, Int8Bag)  # type: ignore[union-attr]
    ids = torch.randint(256, (2, 9))
    other = language_model().float()
    other.load_state_dict(float_tensors(rounded))
    torch.testing.assert_close(rounded(ids).logits, other(ids).logits, rtol=1e-5, atol=1e-5)
    assert repr(rounded.backbone.ngrams.table) == "Int8Bag(128, 8)"  # type: ignore[union-attr]
