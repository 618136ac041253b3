"""The gated form and the price of attention: what each token counts, what the router is told, what it pays."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqboat import AttentionPrice, Classifier, SeqBoat, override_activation
from seqboat.layers.gau import GAU
from seqboat.layers.routers import TemperedSoftmax
from seqboat.layers.sma import gate


def layer_of(form: str, **options: Any) -> SeqBoat:
    torch.manual_seed(0)
    layer = SeqBoat(8, causal=True, form=form, window=64, d_z=4, **options).double()
    router = layer.sma.router
    assert isinstance(router, TemperedSoftmax)
    with torch.no_grad():
        # probabilities on both sides of one half, most of them below the saturation of the gate
        router.logits.weight.mul_(20)
        router.logits.bias.mul_(0.1)
    return layer


def inputs(time: int = 24) -> Tensor:
    return torch.randn(3, time, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def memory_gradient(form: str) -> tuple[Tensor, Tensor]:
    """The gradient of the last token's output with respect to p, and which tokens are active."""
    layer = layer_of(form)
    y, _, routing = layer(inputs())
    routing.probs.retain_grad()
    y[:, -1].square().sum().backward()
    assert routing.probs.grad is not None
    return routing.probs.grad[..., 0], routing.active[..., 0]


def test_only_the_gated_form_tells_the_router_what_to_remember() -> None:
    paper, active = memory_gradient("paper")
    assert active[:, -1].any() and active[:, :-1].any()
    assert not paper[:, :-1].any()
    gated, active = memory_gradient("gated")
    asked = active[:, -1:]
    unsaturated = active & asked
    unsaturated[:, -1] = False
    assert (gated[unsaturated] != 0).float().mean() > 0.5
    assert not gated[~active].any()


def test_a_forced_token_counts_as_a_whole_and_confidence_wins() -> None:
    layer, x = layer_of("gated").eval(), inputs()
    routing = layer(x).routing
    weights = gate(routing)
    assert weights[routing.active].min() < 1
    with layer.sma.override(active=True):
        forced = layer(x).routing
        assert gate(forced)[~routing.active].eq(1).all()
    with layer.sma.override(active=True, confidence=1.0):
        whole = layer(x).y
    always = SeqBoat(8, causal=True, window=64, d_z=4, router="always-active").double().eval()
    always.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(whole, always(x).y)
    with layer.sma.override(confidence=0.0):
        torch.testing.assert_close(layer(x).y, SilentAttention(layer)(x))


class SilentAttention(nn.Module):
    """A layer whose attention adds nothing."""

    def __init__(self, layer: SeqBoat) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with self.layer.sma.override(active=False):
            y: Tensor = self.layer(x).y
        return y


def test_dropping_a_token_at_the_border_changes_nothing() -> None:
    """The output is continuous in the logit of every token; in the paper's form it jumps."""
    jumps = {}
    for form in ("paper", "gated"):
        layer, x = layer_of(form).eval(), inputs()
        probs = layer(x).routing.probs
        router = layer.sma.router
        assert isinstance(router, TemperedSoftmax)
        with torch.no_grad():
            bias = router.logits.bias
            # the shift at which the least active token falls out
            margin = torch.logit(probs[probs > 0.5]).min() * router.temperature[0]
            bias[1] -= margin - 1e-9
            before = layer(x)
            bias[1] -= 2e-9
            after = layer(x)
        assert (before.routing.active.sum() - after.routing.active.sum()) == 1
        jumps[form] = float((before.y - after.y).abs().max())
    assert jumps["gated"] < 1e-6 < 1e-3 < jumps["paper"]


def model_and_batch() -> tuple[Classifier, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Classifier(vocab=7, classes=2, d_model=8, num_layers=2, form="gated").train()
    return model, torch.randint(0, 7, (4, 12)), torch.tensor([0, 1, 0, 1])


def test_the_price_is_what_it_says() -> None:
    model, x, y = model_and_batch()
    price = AttentionPrice(model, weight=0.5, early=0.07, above=0.25, every=2)
    mask = torch.arange(12) < torch.tensor([[12], [5], [9], [1]])
    for call in range(3):
        out = model(x, mask)
        loss = nn.functional.cross_entropy(out.logits, y)
        with torch.no_grad(), override_activation(model, active=False):
            off = nn.functional.cross_entropy(model(x, mask).logits, y)
        calls: list[int] = []

        def without(calls: list[int] = calls) -> Tensor:
            calls.append(1)
            out = model(x, mask)
            assert not any(routing.active.any() for routing in out.routings)
            assert not out.logits.requires_grad
            return nn.functional.cross_entropy(out.logits, y) * 4  # attention gains three quarters

        before = price.gain
        got = price(loss, off=without)
        assert len(calls) == (call % 2 == 0)
        now = float(1 - loss.detach() / (4 * off))
        expected_gain = {0: now, 1: before, 2: before + 0.3 * (now - before)}[call]
        assert price.gain == pytest.approx(expected_gain, rel=1e-5)
        want = sum(
            (0.5 * (price.gain - 0.02) + 0.07) * torch.relu(2 * routing.probs[mask] - 1).mean()
            for routing in out.routings
        )
        torch.testing.assert_close(got, want)
    assert price(loss).item() == 0.0  # no forward pass since the last price


def test_few_active_tokens_pay_nothing_until_it_is_too_late() -> None:
    model, x, y = model_and_batch()
    price = AttentionPrice(model, weight=0.4, deadline=1)
    few = torch.zeros(4, 12, dtype=torch.bool)
    few[:, 0] = True
    for expected in (0.0, 3.0):
        with override_activation(model, mask=few):
            out = model(x)
        loss = nn.functional.cross_entropy(out.logits, y)
        cost = sum(torch.relu(2 * routing.probs - 1).mean() for routing in out.routings)
        torch.testing.assert_close(price(loss), expected * cost)


def test_nothing_left_to_gain_is_no_gain() -> None:
    """Where hardly any loss is left without attention, a share of it says nothing."""
    model, x, _ = model_and_batch()
    price = AttentionPrice(model, every=1)
    for off, on in ((2.0, 2.0), (0.01, 0.0)):
        model(x)
        price(torch.tensor(on), off=lambda off=off: torch.tensor(off))  # type: ignore[misc]
    assert price.gain == pytest.approx(0.3 * 0.01 / 0.6)


def test_what_is_dropped_before_anything_is_gained_comes_back() -> None:
    model, x, y = model_and_batch()
    price = AttentionPrice(model)
    with torch.no_grad():
        for layer in price.layers:
            layer.router.start_at(-0.5)
    out = model(x)
    assert not any(routing.active.any() for routing in out.routings)
    loss = nn.functional.cross_entropy(out.logits, y)
    want = sum(0.03 * (1 - 2 * routing.probs).mean() for routing in out.routings)
    torch.testing.assert_close(price(loss), want)


def test_a_resumed_price_continues() -> None:
    prices = []
    _, x, y = model_and_batch()
    for resumed in (False, True):
        model = model_and_batch()[0]
        price = AttentionPrice(model, every=2, wide=64, deadline=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(9):
            if resumed and step == 5:
                again = AttentionPrice(model, every=2, wide=64, deadline=4)
                again.load_state_dict(copy.deepcopy(price.state_dict()))
                price = again
            loss = nn.functional.cross_entropy(model(x).logits, y)

            def off(model: Classifier = model) -> Tensor:
                return nn.functional.cross_entropy(model(x).logits, y)

            total = loss + price(loss, off=off)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        prices.append([float(total.detach()), price.state_dict()])
    assert prices[0] == prices[1]
    with pytest.raises(ValueError, match="lacks first, gain, level"):
        price.load_state_dict({"calls": 3})


def test_measuring_leaves_running_averages_alone() -> None:
    torch.manual_seed(0)
    layer = SeqBoat(8, form="gated", norm="batch").train()
    price, x = AttentionPrice(layer), torch.randn(2, 9, 8)
    loss = layer(x).y.square().mean()
    before = [buffer.clone() for buffer in layer.buffers()]
    price(loss, off=lambda: layer(x).y.square().mean())
    assert before and all(map(torch.equal, before, layer.buffers()))


def test_a_price_that_follows_a_rate() -> None:
    torch.manual_seed(0)
    layer = SeqBoat(8, form="gated", causal=True).train()
    price = AttentionPrice(layer, rate=0.3)
    optimizer = torch.optim.AdamW(layer.parameters(), 0.01)
    x, rates = torch.randn(8, 64, 8), []
    for _ in range(400):
        out = layer(x)
        loss = (out.y - x.roll(3, 1)).square().mean()
        optimizer.zero_grad()
        (loss + price(loss)).backward()
        optimizer.step()
        rates.append(out.routing.active.float().mean().item())
    assert rates[0] == 1.0
    assert sum(rates[-100:]) / 100 == pytest.approx(0.3, abs=0.1)


def test_a_wide_window_narrows() -> None:
    layer = SeqBoat(8, form="gated", causal=True, window=4).train()
    price, x = AttentionPrice(layer, wide=64, deadline=2), torch.randn(1, 40, 8)
    unit = layer.sma.units["gau"]
    assert isinstance(unit, GAU)
    widths = [unit.wide]
    for _ in range(5):
        price(layer(x).y.square().mean())
        widths.append(unit.wide)
    assert widths == [64, 64, 64, 16, None, None]
    unit.wide = 64
    wide = SeqBoat(8, form="gated", causal=True, window=64).train()
    wide.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x).y, wide(x).y)
    layer.eval()
    unit.wide = None
    narrow = layer(x).y
    unit.wide = 64
    assert torch.equal(layer(x).y, narrow)


def test_copies_and_files_of_a_priced_model() -> None:
    model, x, y = model_and_batch()
    price = AttentionPrice(model)
    loss = nn.functional.cross_entropy(model(x).logits, y)
    copied = copy.deepcopy(model)
    assert not any(layer.recent.on for layer in AttentionPrice(copied).layers if layer in price.layers)
    assert price(loss) > 0
    with pytest.raises(ValueError, match="no sparsely activated layer"):
        AttentionPrice(nn.Linear(2, 2))
    assert pickle.loads(pickle.dumps(price.layers[0].recent)).routings == []


@pytest.mark.parametrize("wrong", [{"weight": -1}, {"every": 0}, {"rate": 1.5}, {"deadline": 0}, {"wide": 0}])
def test_wrong_settings_name_themselves(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AttentionPrice(SeqBoat(8), **wrong)  # type: ignore[arg-type]
