"""Packed input: documents behind each other give what each of them gives alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixer_cases import CASES, D_MODEL, Case, balance, directions, enliven
from seqboat import (
    AsTensor,
    BackboneConfig,
    BudgetConfig,
    Classifier,
    EMAConfig,
    GAUConfig,
    LanguageModel,
    S4DConfig,
    SeqBoat,
    SeqBoatConfig,
    SparseModularActivation,
)
from seqboat.core.documents import find_documents
from seqboat.core.mixer import Mixer
from seqboat.core.state import select_rows, tensors
from seqboat.mixers import MIXERS
from seqboat.models.heads import Tagger
from seqboat.ops.positions import PositionsName

EXACT = 1e-10
"""Largest difference in float64 between a packed document and the document alone."""
CU = torch.tensor([0, 7, 7, 8, 19, 22])
"""An empty document, one of a single token, and longer ones."""


def borders(rng: np.random.Generator, tokens: int) -> Tensor:
    """Random documents, some of them empty."""
    cuts = np.sort(rng.integers(0, tokens + 1, rng.integers(0, 7)))
    return torch.tensor([0, *cuts, tokens])


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)


def same_state(got: Any, expected: Any) -> None:
    """Equal states; memories that grow may have grown to different sizes, with zeros behind."""
    parts, others = list(tensors(got)), list(tensors(expected))
    assert [name for name, _ in parts] == [name for name, _ in others]
    for (_, one), (_, other) in zip(parts, others, strict=True):
        common = tuple(slice(0, min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
        same(one[common], other[common])


def take_gradients(module: nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    module.zero_grad()
    return found


def check_alone(layer: Mixer, x: Tensor, cu: Tensor) -> None:
    """Compare outputs and all gradients, packed and document by document."""
    weight = torch.randn_like(x)
    packed, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = layer(packed, cu_seqlens=cu)
    (out.y * weight).sum().backward()
    together = take_gradients(layer)
    for start, end in pairwise(cu.tolist()):
        one = layer(alone[:, start:end])
        (one.y * weight[:, start:end]).sum().backward()
        torch.testing.assert_close(out.y[:, start:end], one.y, rtol=EXACT, atol=EXACT)
        if one.routing is not None:
            assert torch.equal(out.routing.active[:, start:end], one.routing.active)
        if end == x.shape[1] and end > start:
            same_state(out.state, one.state)
    for got, expected in zip(together, take_gradients(layer), strict=True):
        torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(packed.grad, alone.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("seed", range(50))
def test_random_packings_equal_the_documents_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kinds = get_args(PositionsName)
    gau = GAUConfig(
        d_z=4,
        d_v=6,
        window=int(rng.integers(1, 12)),
        positions=kinds[seed % 4],
        max_positions=8,
        attention=("softmax", "relu2", "laplace")[seed % 3],
        span=("memory", "full", "memory", "chunk")[seed // 2 % 4],
    )
    config = SeqBoatConfig(
        ssm=(EMAConfig(d_state=4, block=8), S4DConfig(d_state=4, block=16))[seed // 3 % 2],
        gau=gau,
        causal=seed % 2 == 0,
        ffn=seed % 5 == 0,
        prenorm=seed % 4 > 1,
        init="paper",
    )
    layer = enliven(SeqBoat(6, config))
    tokens = int(rng.integers(1, 120))
    x = torch.randn(1, tokens, 6, dtype=torch.float64)
    balance(layer, x)
    check_alone(layer, x, borders(rng, tokens))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mixer_packs(case: Case) -> None:
    check_alone(case.make(), torch.randn(1, 22, D_MODEL, dtype=torch.float64), CU)


def small_model(mixer: str = "seqboat", **options: object) -> BackboneConfig:
    config = dict(directions(MIXERS[mixer]))["causal" if options.pop("causal", True) else "bidirectional"]
    return BackboneConfig(mixer=config, d_model=D_MODEL, num_layers=2, vocab=11, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mixer", ["seqboat", "mega-chunk", "transformer", "s4d", "luna"])
def test_language_models_score_documents_as_if_alone(mixer: str) -> None:
    torch.manual_seed(0)
    model = enliven(LanguageModel(small_model(mixer)))
    tokens = torch.randint(11, (1, 22))
    out = model(tokens, cu_seqlens=CU.int())
    for start, end in pairwise(CU.tolist()):
        if end > start:
            same(out.logits[:, start:end], model(tokens[:, start:end]).logits)


@pytest.mark.parametrize("mixer", ["seqboat", "seqboat-full", "s4d", "mega-chunk", "transformer", "h3"])
def test_rows_padding_and_states(mixer: str) -> None:
    """Two calls on packed sequences, with padding inside and behind; first documents continue, others do not."""
    torch.manual_seed(0)
    model = enliven(LanguageModel(small_model(mixer)))
    tokens = torch.randint(11, (2, 2, 12))
    mask = torch.ones(2, 2, 12, dtype=torch.bool)
    mask[0, 0, 3] = mask[0, 0, 9:] = mask[0, 1, :1] = mask[1, 1, 10:] = False
    first = model(tokens[0], mask[0], cu_seqlens=torch.tensor([0, 5, 12, 16, 24]))
    second = model(tokens[1], mask[1], first.state, cu_seqlens=torch.tensor([0, 12, 14, 24]))
    anew = model(tokens[1], mask[1], first.state, cu_seqlens=torch.tensor([0, 0, 12, 14, 24]))
    parts = [first.logits.flatten(0, 1), second.logits.flatten(0, 1)]
    whole, logits = mask.flatten(), torch.cat(parts)

    def check(*places: tuple[int, int]) -> Any:
        """The document whose tokens these are, in one call or over both."""
        chosen = torch.cat([torch.arange(start, end) for start, end in places])
        chosen = chosen[whole[chosen]]
        alone = model(tokens.flatten()[chosen][None])
        same(logits[chosen], alone.logits[0])
        return alone.state

    check((0, 5))
    check((12, 16))
    one, other = check((5, 12), (24, 36)), check((38, 48))
    check((16, 24), (36, 38))
    same_state(select_rows(second.state, torch.tensor([0])), one)
    same_state(select_rows(second.state, torch.tensor([1])), other)
    # an empty document at the beginning takes the state: the first sequence starts anew, the other continues
    same(anew.logits[0], model(tokens[1, :1]).logits[0])
    same(anew.logits[1], second.logits[1])
    second.logits.sum().backward()  # through the state


def test_classifiers_and_taggers() -> None:
    torch.manual_seed(0)
    config = small_model("luna", causal=False, absolute_positions=True)
    x = torch.randint(11, (1, 22))
    classifier, tagger = enliven(Classifier(config, 3)), enliven(Tagger(config, 3))
    scores, tags = classifier(x, cu_seqlens=CU).logits, tagger(x, cu_seqlens=CU).logits
    assert scores.shape == (5, 3)
    for number, (start, end) in enumerate(pairwise(CU.tolist())):
        same(scores[number : number + 1], classifier(x[:, start:end]).logits)
        same(tags[:, start:end], tagger(x[:, start:end]).logits)


@pytest.mark.parametrize("priority", ["confidence", "order"])
def test_limits_are_counted_per_document(priority: str) -> None:
    torch.manual_seed(0)
    budget = BudgetConfig(cap=0.4, priority=priority)  # type: ignore[arg-type]
    layer = enliven(SparseModularActivation([nn.Linear(6, 6)], 6, budget=budget))
    check_alone(layer, torch.randn(1, 22, 6, dtype=torch.float64), CU)


def test_checkpointed_layers_pack() -> None:
    torch.manual_seed(0)
    model = enliven(LanguageModel(small_model())).train()
    tokens = torch.randint(11, (1, 22))
    grads = []
    for checkpointing in (False, True):
        model.backbone.gradient_checkpointing = checkpointing
        model(tokens, cu_seqlens=CU).logits.square().sum().backward()
        grads.append(take_gradients(model))
    for one, other in zip(*grads, strict=True):
        same(one, other)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_document_stays_alone(poison: float) -> None:
    torch.manual_seed(0)
    layer = enliven(SeqBoat(6, SeqBoatConfig(ssm=EMAConfig(d_state=4, block=8))))
    x = torch.randn(1, 60, 6, dtype=torch.float64)
    cu = torch.tensor([0, 20, 40, 60])
    clean = layer(x, cu_seqlens=cu).y
    x[:, 20:40] = poison
    y = layer(x.requires_grad_(), cu_seqlens=cu).y
    for part in (slice(0, 20), slice(40, 60)):
        same(y[:, part], clean[:, part])
        (grad,) = torch.autograd.grad(y[:, part].sum(), x, retain_graph=True)
        assert grad[:, part].isfinite().all()


def test_derivatives_as_a_tensor() -> None:
    torch.manual_seed(0)
    layer = AsTensor(SeqBoat(4, SeqBoatConfig(ssm=EMAConfig(d_state=2, block=8)))).double()
    x = torch.randn(1, 12, 4, dtype=torch.float64, requires_grad=True)
    cu = torch.tensor([0, 5, 12])
    assert torch.autograd.gradcheck(lambda x: layer(x, None, cu), x, fast_mode=True)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        (torch.tensor([0, 3]), "increase from 0 to batch \\* time = 12"),
        (torch.tensor([0, 9, 3, 12]), "increase from 0"),
        (torch.tensor([0.0, 12.0]), "int32 or int64"),
        ([0, 12], "must be a tensor, got list"),
    ],
)
def test_wrong_borders_are_refused(cu: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_documents(cu, torch.zeros(2, 6))


def test_documents_end_with_their_sequence() -> None:
    with pytest.raises(ValueError, match="every one of the 2 sequences must begin a document"):
        find_documents(torch.tensor([0, 5, 12]), torch.zeros(2, 6))


def test_empty_sequences() -> None:
    layer = SeqBoat(6, SeqBoatConfig(causal=True))
    state = layer.init_state(2)
    y, after, _ = layer(torch.zeros(2, 0, 6), None, state, cu_seqlens=torch.tensor([0, 0]))
    assert y.shape == (2, 0, 6)
    same_state(after, state)
