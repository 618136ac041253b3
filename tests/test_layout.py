"""Layouts: packed documents give what each of them gives alone; padding moves aside and back."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixer_cases import CASES, D_MODEL, MASKS, Case, balance, directions, enliven, mask_rows
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
from seqboat.core.layout import clear, find_layout, front
from seqboat.core.mixer import Mixer
from seqboat.layers.gau import PositionsName
from seqboat.mixers import MIXERS
from seqboat.models.heads import Tagger

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


def take_gradients(module: nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    module.zero_grad()
    return found


def check_alone(layer: Mixer, x: Tensor, cu: Tensor) -> None:
    """Compare outputs and all gradients, packed and document by document."""
    weight = torch.randn_like(x)
    packed, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = layer(packed, cu_seqlens=cu)
    assert out.state is None
    (out.y * weight).sum().backward()
    together = take_gradients(layer)
    for start, end in pairwise(cu.tolist()):
        one = layer(alone[:, start:end])
        (one.y * weight[:, start:end]).sum().backward()
        torch.testing.assert_close(out.y[:, start:end], one.y, rtol=EXACT, atol=EXACT)
        if one.routing is not None:
            assert torch.equal(out.routing.active[:, start:end], one.routing.active)
    for got, expected in zip(together, take_gradients(layer), strict=True):
        torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(packed.grad, alone.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("seed", range(24))
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


@pytest.mark.parametrize("mixer", ["seqboat", "mega-chunk", "transformer", "s4d"])
def test_language_models_score_documents_as_if_alone(mixer: str) -> None:
    torch.manual_seed(0)
    model = enliven(LanguageModel(small_model(mixer)))
    tokens = torch.randint(11, (1, 22))
    out = model(tokens, cu_seqlens=CU.int())
    for start, end in pairwise(CU.tolist()):
        if end > start:
            same(out.logits[:, start:end], model(tokens[:, start:end]).logits)


@pytest.mark.parametrize("mixer", ["seqboat", "seqboat-full", "s4d", "mega-chunk", "transformer", "h3"])
def test_rows_and_padding(mixer: str) -> None:
    """Packed sequences with padding inside and behind documents."""
    torch.manual_seed(0)
    model = enliven(LanguageModel(small_model(mixer)))
    tokens = torch.randint(11, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 3] = mask[0, 9:] = mask[1, :1] = False
    cu = torch.tensor([0, 5, 12, 16, 24])
    out = model(tokens, mask, cu_seqlens=cu)
    assert out.state is None
    for start, end in pairwise(cu.tolist()):
        chosen = torch.arange(start, end)[mask.flatten()[start:end]]
        same(out.logits.flatten(0, 1)[chosen], model(tokens.flatten()[chosen][None]).logits[0])


def test_packed_documents_carry_no_state() -> None:
    model = LanguageModel(small_model())
    tokens, state = torch.randint(11, (1, 12)), model.init_state(1)
    with pytest.raises(ValueError, match="packed documents carry no state"):
        model(tokens, None, state, cu_seqlens=torch.tensor([0, 5, 12]))
    layer = SeqBoat(6, causal=True)
    with pytest.raises(ValueError, match="packed documents carry no state"):
        layer(torch.zeros(1, 5, 6), None, layer.init_state(1), cu_seqlens=torch.tensor([0, 5]))


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


@pytest.mark.parametrize("causal", [False, True])
def test_limits_are_counted_per_document(causal: bool) -> None:
    torch.manual_seed(0)
    budget = BudgetConfig(cap=0.4)
    layer = enliven(SparseModularActivation([nn.Linear(6, 6)], 6, budget=budget, causal=causal))
    check_alone(layer, torch.randn(1, 22, 6, dtype=torch.float64), CU)


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
        (torch.tensor([0, 5, 12]), "every one of the 2 sequences must begin a document"),
    ],
)
def test_wrong_borders_are_refused(cu: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_layout(torch.zeros(2, 6), None, cu)


def test_empty_sequences() -> None:
    layer = SeqBoat(6, SeqBoatConfig(causal=True))
    assert layer(torch.zeros(2, 0, 6), cu_seqlens=torch.tensor([0, 0])).y.shape == (2, 0, 6)


# padding


def test_plan_by_hand() -> None:
    mask = torch.tensor([[False, True, True], [True, False, True], [False, False, False]])
    x = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    plan = front(mask)
    assert plan.mask is not None and plan.mask.tolist() == [
        [True, True, False],
        [True, True, False],
        [False, False, False],
    ]
    pulled = plan.pull(x)
    assert pulled.tolist() == [[2, 3, 0], [4, 6, 0], [0, 0, 0]]
    assert plan.push(pulled).tolist() == [[0, 2, 3], [4, 0, 6], [0, 0, 0]]


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)], ids=str)
def test_push_undoes_pull(trailing: tuple[int, ...]) -> None:
    mask = mask_rows()
    x = torch.randn(*mask.shape, *trailing)
    plan = front(mask)
    assert plan.push(plan.pull(x)).equal(clear(x, mask))
    # order is kept, and real tokens come first
    for row, real in enumerate(mask):
        count = int(real.sum())
        assert plan.pull(x)[row, :count].equal(x[row, real])
        assert not plan.pull(x)[row, count:].any()


def test_padding_is_overwritten_whatever_it_holds() -> None:
    mask = mask_rows([MASKS["interior"]])
    x = torch.randn(1, mask.shape[1], 2)
    x[~mask] = torch.nan
    x.requires_grad_()
    assert not front(mask).pull(x).isnan().any()
    cleaned = clear(x, mask)
    assert not cleaned[~mask].any() and cleaned[mask].equal(x[mask])
    (cleaned.square().sum() + front(mask).pull(x).square().sum()).backward()
    assert x.grad is not None and not x.grad[~mask].any()
    assert x.grad[mask].equal(4 * x.detach()[mask])
    assert clear(x, None) is x
