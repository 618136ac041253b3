"""Budgets, remedies for dead routers and decisions by hand, each held to a loop over the tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_same_numbers
from seqboat.core.layout import Layout
from seqboat.core.mixer import Routing
from seqboat.layers.adapters import MixerUnit, PaddedUnit
from seqboat.layers.budget import (
    BudgetConfig,
    budget_loss,
    extra_loss,
    first_come,
    rate_loss,
)
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import (
    AlwaysActiveConfig,
    TopKConfig,
)
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.layers.sma import SparseModularActivation, override_activation, sparse_layers
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel, Matcher
from seqboat.ssm.diagonal import EMAConfig

WIDTH = 6
LENGTHS = torch.tensor([23, 9, 1, 0])
TIME = 23


def real() -> Tensor:
    return torch.arange(TIME) < LENGTHS[:, None]


def sparse(
    modules: int = 2,
    *,
    causal: bool = True,
    budget: BudgetConfig | None = None,
    router: Any = "sigmoid",
) -> SparseModularActivation:
    """Attention and linear maps in float64, with routers that want about half of the tokens."""
    torch.manual_seed(0)
    gau = GAUConfig(d_z=4, d_v=8, window=5, max_positions=12).build(WIDTH, causal)
    units = {"gau": gau, **{f"linear{i}": nn.Linear(WIDTH, WIDTH) for i in range(1, modules)}}
    sma = SparseModularActivation(units, WIDTH, router, budget=budget, start_active=False).double()
    for parameter in sma.router.parameters():
        nn.init.normal_(parameter)
    if hasattr(sma.router, "logits"):
        nn.init.zeros_(sma.router.get_parameter("logits.bias"))
    return sma.eval()


def tokens(seed: int = 1, batch: int = 4, time: int = TIME) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, time, WIDTH, generator=generator, dtype=torch.float64)


# the functions, by loops


@pytest.mark.parametrize("seed", range(20))
def test_first_come(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wants = torch.rand(2, 17, 3, generator=generator) < 0.6
    most = torch.randint(0, 3, (2, 17, 3), generator=generator).cumsum(dim=1) // 2
    spent = torch.randint(0, 4, (2, 3), generator=generator)
    got = first_come(wants, most, spent)
    for row in range(2):
        for i in range(3):
            granted = int(spent[row, i])
            for t in range(17):
                grant = bool(wants[row, t, i]) and granted < int(most[row, t, i])
                assert bool(got[row, t, i]) == grant
                granted += grant


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cap", [0.0, 0.1, 0.25, (0.5, 0.1), 1.0], ids=str)
def test_caps_keep_the_most_confident_tokens(cap: float | tuple[float, ...], training: bool) -> None:
    free = sparse(causal=False).train(training)
    capped = sparse(causal=False, budget=BudgetConfig(cap=cap)).train(training)
    x = tokens()
    wishes, got = free(x, real()).routing, capped(x, real()).routing
    shares = cap if isinstance(cap, tuple) else (cap, cap)
    assert_same_numbers(got.probs, wishes.probs)
    bound = 0
    for row, length in enumerate(LENGTHS.tolist()):
        for i, share in enumerate(shares):
            wanted = wishes.active[row, :, i].nonzero().flatten().tolist()
            most = math.floor(share * length + 1e-9)
            best = sorted(wanted, key=lambda t: -wishes.probs[row, t, i].item())[:most]
            assert got.active[row, :, i].nonzero().flatten().tolist() == sorted(best)
            bound += len(wanted) > most
    assert bound or cap == 1.0


def running(wishes: Tensor, share: float) -> list[bool]:
    """Grant wishes in order within the fraction of the tokens so far."""
    granted: list[bool] = []
    for t, wish in enumerate(wishes.tolist()):
        granted.append(wish and sum(granted) + 1 <= math.floor(share * (t + 1) + 1e-9))
    return granted


@pytest.mark.parametrize("cap", [0.1, 0.3, (0.5, 0.2)], ids=str)
def test_caps_of_causal_layers_hold_for_every_prefix(cap: float | tuple[float, ...]) -> None:
    free, capped = sparse(), sparse(budget=BudgetConfig(cap=cap))
    x = tokens()
    wishes, got = free(x, real()).routing.active, capped(x, real()).routing.active
    assert got.any()
    for i, share in enumerate(cap if isinstance(cap, tuple) else (cap, cap)):
        for row in range(4):
            assert got[row, :, i].tolist() == running(wishes[row, :, i], share)
        sofar = got[..., i].cumsum(dim=1) / torch.arange(1, TIME + 1)
        assert (sofar <= share).all()


LIMITS: dict[str, tuple[BudgetConfig, Any]] = {
    "cap": (BudgetConfig(cap=(0.3, 0.2, 0.6)), "sigmoid"),
    "exclusive": (BudgetConfig(per_token=1), "tempered-softmax"),
    "both": (BudgetConfig(cap=0.3, per_token=2), "gumbel-softmax"),
    "competing": (BudgetConfig(target=0.3, cap=0.4), "x-moe"),
    "top-k": (BudgetConfig(), TopKConfig(capacity=0.3)),
}
every_limit = pytest.mark.parametrize("name", LIMITS)


def limited(name: str) -> SparseModularActivation:
    budget, router = LIMITS[name]
    sma = sparse(3, budget=budget, router=router)
    if name == "top-k":
        nn.init.normal_(sma.get_buffer("router.border"), std=0.2)
    return sma


@every_limit
@pytest.mark.parametrize("cuts", [(0, 23), (0, 1, 2, 9, 9, 15, 23), tuple(range(24))], ids=len)
def test_whole_pieces_and_steps_agree(name: str, cuts: tuple[int, ...]) -> None:
    sma, x, mask = limited(name), tokens(), real()
    whole = sma(x, Layout(mask))
    assert whole.routing.active.any()
    state, outputs, decisions = sma.init_state(4), [], []
    for start, end in itertools.pairwise(cuts):
        y, state, routing = sma(x[:, start:end], Layout(mask[:, start:end]), state)
        outputs.append(y)
        decisions.append(routing.active)
    assert torch.cat(decisions, dim=1).equal(whole.routing.active)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole.y, rtol=0, atol=1e-10)
    assert state.spent.equal(whole.state.spent) and state.spent.equal(whole.routing.active.sum(dim=1))
    whole, one = sma(x), sma.init_state(4)
    for t in range(TIME):
        y, _, routing = sma.step(x[:, t], one)
        assert routing is not None and routing.active.equal(whole.routing.active[:, t])
        torch.testing.assert_close(y, whole.y[:, t], rtol=0, atol=1e-10)
    assert one.spent.equal(whole.state.spent)


@every_limit
def test_limits_do_not_depend_on_batch_mates_or_padding(name: str) -> None:
    budget, router = LIMITS[name]
    sma = sparse(3, causal=False, budget=budget, router=router)
    x, mask = tokens(), real().flip(1)  # real tokens last
    whole = sma(x, mask)
    for row in range(4):
        alone = sma(x[row : row + 1, mask[row]])
        assert alone.routing.active[0].equal(whole.routing.active[row, mask[row]])
        torch.testing.assert_close(alone.y[0], whole.y[row, mask[row]], rtol=0, atol=1e-10)


def test_modules_per_token() -> None:
    free, two = sparse(4), sparse(4, budget=BudgetConfig(per_token=2))
    x = tokens()
    wishes, got = free(x).routing, two(x).routing
    for row in range(4):
        for t in range(TIME):
            wanted = wishes.active[row, t].nonzero().flatten().tolist()
            best = sorted(wanted, key=lambda i: -wishes.probs[row, t, i].item())[:2]
            assert got.active[row, t].nonzero().flatten().tolist() == sorted(best)
    assert (wishes.active.sum(dim=-1) > 2).any()


def test_rate_loss_by_hand() -> None:
    probs = torch.tensor([[[0.9], [0.6], [0.2], [0.7]]], dtype=torch.float64, requires_grad=True)
    routing = Routing(probs.detach() > 0.5, probs)
    mask = torch.tensor([[True, True, True, False]])
    loss = rate_loss(routing, torch.tensor([0.25]), mask)
    error = 2 / 3 - 0.25
    assert loss.item() == pytest.approx(error**2)
    loss.backward()
    assert probs.grad is not None
    # every real token is pushed down, active or not
    assert probs.grad.flatten().tolist() == pytest.approx([2 * error / 3] * 3 + [0.0])


@pytest.mark.parametrize("kind", ["lm", "match"])
def test_the_loss_of_a_model(kind: str) -> None:
    torch.manual_seed(0)
    causal = kind == "lm"
    layer = SeqBoatConfig(
        init="paper",
        ssm=EMAConfig(d_state=2),
        gau=GAUConfig(d_z=4, window=4),
        causal=causal,
        budget=BudgetConfig(target=0.2, loss_weight=3.0),
    )
    config = BackboneConfig(mixer=layer, d_model=8, num_layers=2, vocab=5)
    ids, mask = torch.randint(0, 5, (3, 9)), torch.arange(9) < torch.tensor([[9], [4], [1]])
    model: nn.Module
    masks: list[Tensor | None] = [mask]
    if kind == "match":
        model = Matcher(config)
        out = model(ids, ids.flip(1), mask, None)
        masks = [mask, None]
    else:
        model = LanguageModel(config) if causal else Classifier(config, 3)
        out = model(ids, mask)
    loss = budget_loss(model, out.routings, masks)
    assert loss is not None
    expected = 0.0
    for number, routing in enumerate(out.routings):
        here = masks[number // 2]
        active = routing.active[..., 0] if here is None else routing.active[..., 0][here]
        expected += 3 * (float(active.double().mean()) - 0.2) ** 2
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    router = model.get_parameter("backbone.layers.0.sma.router.logits.bias")
    assert router.grad is not None and router.grad.any()
    with pytest.raises(ValueError, match=r"routings must hold 2 x 1, .* got 1"):
        budget_loss(model, out.routings[:1])
    plain = Classifier(BackboneConfig(mixer=SeqBoatConfig(init="paper"), d_model=8, num_layers=1, vocab=5), 2)
    assert budget_loss(plain, plain(ids).routings) is None


def test_forced_on_and_off() -> None:
    sma, x, mask = sparse(), tokens(), real()
    free = sma(x, mask)
    with sma.override(active=False):
        off = sma(x, mask)
    assert not off.routing.active.any() and not off.y.any()
    with sma.override(active={"gau": True}):
        on = sma(x, mask).routing.active
    assert on[..., 0].equal(mask) and on[..., 1].equal(free.routing.active[..., 1])
    with sma.override(active=True, confidence=1.0):
        dense = sma(x, mask)
    always = sparse(router="always-active")
    always.units.load_state_dict(sma.units.state_dict())
    torch.testing.assert_close(dense.y, always(x, mask).y, rtol=0, atol=1e-12)
    assert_same_numbers(sma(x, mask).y, free.y)


def test_threshold_cap_and_mask() -> None:
    sma, x = sparse(), tokens()
    probs = sma(x).routing.probs
    with sma.override(threshold={"linear1": 0.8}):
        active = sma(x).routing.active
        assert active[..., 1].equal(probs[..., 1] > 0.8) and active[..., 0].equal(probs[..., 0] > 0.5)
        with sma.override(cap=0.25):
            capped = sma(x).routing.active
            for row in range(4):
                for i in range(2):
                    assert capped[row, :, i].tolist() == running(active[row, :, i], 0.25)
        assert sma(x).routing.active.equal(active)
    chosen = torch.rand(4, TIME) < 0.3
    with sma.override(mask=chosen):
        assert sma(x).routing.active.equal(chosen[..., None].expand(-1, -1, 2))
    with sma.override(mask=lambda routing: routing.probs < 0.3):
        assert sma(x).routing.active.equal(probs < 0.3)
        state = sma.init_state(4)
        routing = sma.step(x[:, 0], state).routing
        assert routing is not None and routing.active.equal(probs[:, 0] < 0.3)
    lifted = sparse(budget=BudgetConfig(cap=0.1))
    with lifted.override(cap=1.0):
        assert lifted(x).routing.active.equal(probs > 0.5)


def test_a_cap_that_is_lowered_on_the_way() -> None:
    sma, x = sparse(), tokens()
    with sma.override(active=True):
        _, state, _ = sma(x[:, :10])
    with sma.override(cap=0.5, threshold=0.0):
        later = sma(x[:, 10:], state=state).routing.active
    # ten of ten are spent: nobody is active until ten are half of what was seen
    assert later[0, :, 0].tolist() == [t >= 21 and (t + 1) % 2 == 0 for t in range(10, TIME)]


def test_mistakes_in_overrides() -> None:
    sma = sparse()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"active": {"ffn": True}}, r"override of active: there is no module 'ffn' among gau, linear1"),
        ({"active": 1}, r"override of active must be true or false, got 1"),
        ({"threshold": 1.5}, r"override of threshold must be between 0 and 1, got 1.5"),
        ({"cap": {"gau": -0.1}}, r"override of cap must be between 0 and 1, got -0.1"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message), sma.override(**options):
            pass
    with (
        sma.override(mask=torch.ones(4, 3, dtype=torch.bool)),
        pytest.raises(ValueError, match=r"must be bool of shape \(4, 23\) or \(4, 23, 2\), got .* \(4, 3\)"),
    ):
        sma(tokens())
    assert sma(tokens()).routing.active.any()


def seqboat(**options: Any) -> SeqBoat:
    torch.manual_seed(0)
    config = SeqBoatConfig(
        init="paper", ssm=EMAConfig(d_state=4), gau=GAUConfig(d_z=4, window=5, max_positions=12), **options
    )
    layer = config.build(WIDTH).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_without_attention_and_one_with_nothing_else(causal: bool) -> None:
    layer = seqboat(causal=causal)
    x = tokens()
    with override_activation(layer, active=False):
        quiet = layer(x).y
    hidden = nn.functional.silu(layer.ssm(x).y)
    expected = layer.norm(nn.functional.silu(layer.linear(hidden) + x))
    torch.testing.assert_close(quiet, expected, rtol=0, atol=1e-10)
    dense = seqboat(causal=causal, router=AlwaysActiveConfig())
    weights = {k: v for k, v in layer.state_dict().items() if not k.startswith("sma.router")}
    dense.load_state_dict(weights)
    with override_activation(layer, active=True, confidence=1.0):
        torch.testing.assert_close(layer(x).y, dense(x).y, rtol=0, atol=1e-10)


def test_some_layers_of_a_model() -> None:
    torch.manual_seed(0)
    config = BackboneConfig(mixer=SeqBoatConfig(init="paper", ffn=True), d_model=8, num_layers=3, vocab=5)
    model = Classifier(config, 2).eval()
    ids = torch.randint(0, 5, (2, 9))
    free = model(ids).routings
    with override_activation(model, layers=[2], active={"ffn": True}):
        out = model(ids).routings
    assert out[0].active.equal(free[0].active) and out[1].active.equal(free[1].active)
    assert out[2].active[..., 1].all()
    assert len(sparse_layers(model)) == 3
    with pytest.raises(ValueError, match=r"layers must be in 0..2, got 3"), override_activation(model, [3]):
        pass


# settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BudgetConfig(cap=1.5), r"budget.cap must be between 0 and 1, got 1.5"),
        (lambda: BudgetConfig(target=()), r"budget.target must hold at least one fraction, got none"),
        (lambda: BudgetConfig(per_token=0), r"budget.per_token must be an integer >= 1, got 0"),
        (lambda: BudgetConfig(loss_weight=-1.0), r"budget.loss_weight must not be negative, got -1.0"),
        (
            lambda: sparse(3, budget=BudgetConfig(cap=(0.1, 0.2))),
            r"budget.cap must be one fraction or 3, one per module; got 2",
        ),
        (lambda: sparse(router="random"), r"router must be one of tempered-softmax, .*; got 'random'"),
        (
            lambda: SparseModularActivation({"block": seqboat()}, WIDTH),
            r"module 'block' is a mixer, .* wrap it in seqboat.MixerUnit",
        ),
        (
            lambda: SparseModularActivation(PaddedUnit(nn.Linear(WIDTH, WIDTH)), WIDTH, causal=True),
            r"causal needs modules that are causal",
        ),
        (
            lambda: SparseModularActivation(nn.Linear(WIDTH, WIDTH)),
            r"d_model must be given unless the router",
        ),
        (lambda: PaddedUnit(nn.Linear(1, 1), causal=True), r"d_model must be given for a causal module"),
        (lambda: PaddedUnit(nn.Linear(1, 1), context=3), r"context is of use to causal modules only, got 3"),
    ],
)
def test_mistakes_in_settings(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layer_inside_a_layer() -> None:
    inner = MixerUnit(seqboat(causal=True))
    outer = SparseModularActivation({"block": inner}, WIDTH, budget=BudgetConfig(cap=0.5)).double().eval()
    assert len(sparse_layers(outer)) == 2
    x = tokens()
    with outer.override(active=True, confidence=1.0):
        y = outer(x).y
    torch.testing.assert_close(y, inner.mixer(x).y - x, rtol=0, atol=1e-10)


class Penalized(nn.Linear):
    """A module with its own loss."""

    def auxiliary_loss(self) -> Tensor:
        return self.weight.square().sum()


def test_extra_loss_is_the_sum_of_all_kinds() -> None:
    torch.manual_seed(0)
    layer = SparseModularActivation({"ffn": Penalized(8, 8)}, 8, budget=BudgetConfig(target=0.1))
    out = layer(torch.randn(2, 6, 8))
    mask = torch.ones(2, 6, dtype=torch.bool)
    budget = budget_loss(layer, [out.routing], [mask])
    ffn = layer.units["ffn"]
    assert isinstance(ffn, Penalized) and budget is not None
    torch.testing.assert_close(extra_loss(layer, [out.routing], [mask]), budget + ffn.auxiliary_loss())
    torch.testing.assert_close(extra_loss(layer), ffn.auxiliary_loss())
    assert extra_loss(nn.Linear(2, 2)) is None
