"""Retrofitted encoders: nothing changes at first; then they equal BERT's equations, sequence by sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeness import assert_same_numbers, largest
from seqboat.layers.counts import activation
from seqboat.layers.routers import TemperedSoftmaxConfig
from seqboat.retrofitting.fitting import choose_columns
from seqboat.retrofitting.model import RateSchedule, Retrofit, find_modules, load_retrofit, retrofit

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

VOCAB = 60
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def bert(**changes: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(**(SIZES | changes)))


def distilbert() -> Any:
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=2, n_heads=4, initializer_range=0.2, pad_token_id=0
    )
    return transformers.DistilBertModel(config)


LAYOUTS: dict[str, Callable[[], Any]] = {
    "bert": bert,
    "bert-eager": lambda: bert(attn_implementation="eager"),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**SIZES)),
    "distilbert": distilbert,
}
SELECT: list[tuple[str, ...]] = [("mlp",), ("attention",), ("attention", "mlp"), ("block",)]


def make(layout: str = "bert") -> Any:
    torch.manual_seed(0)
    model = LAYOUTS[layout]().double().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower():
            # as after training: a norm without weights would do nothing twice
            nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    return model


def draw(batch: int = 3, time: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


def padded() -> dict[str, Tensor]:
    """Three sequences of 11, 7 and 2 tokens."""
    mask = (torch.arange(11) < torch.tensor([[11], [7], [2]])).long()
    return {"input_ids": draw() * mask, "attention_mask": mask}


def sparse(model: nn.Module, select: Any, rate: float = 0.5, **settings: Any) -> Retrofit:
    """Retrofitted, with routers that differ from token to token, thresholds set for the rate."""
    made = retrofit(model, select, **settings)
    model.to(next(model.parameters()).dtype)  # the routers too
    for parameter in made.router_parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    made.set_rate(rate)
    made.calibrate({"input_ids": draw(4, 30, seed)} for seed in range(4))
    made.reset_statistics()
    return made


def decide(unit: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the active tokens of (time, dim), and their probabilities."""
    weight, bias = unit.router.logits.weight, unit.router.logits.bias
    logits = x * (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt() @ weight.T + bias
    probs = torch.sigmoid(logits)[:, 0]
    place = (probs >= unit.threshold).nonzero()[:, 0]
    return place, probs[place][:, None]


def settle(skip: Tensor, place: Tensor, y: Tensor, p: Tensor) -> Tensor:
    """The active tokens' results among the skipped tokens', with the gradient of a mixture to the probability."""
    y = y + (p - p.detach()) * (y.detach() - skip[place].detach()) if len(place) else y
    return skip.index_put((place,), y)


def moved(unit: Any, x: Tensor) -> Tensor:
    """A skipped token: as it is, or with its linear map."""
    return x if unit.substitute is None else x + x @ unit.substitute.weight.T + unit.substitute.bias


def formula(model: Any, ids: Tensor, retrofitted: Retrofit) -> Tensor:
    """BERT on one sequence (time,), from its equations, with the same routers."""
    x = model.embeddings(ids[None])[0]

    def attend(part: Any, x: Tensor) -> Tensor:
        heads = part.self.num_attention_heads
        width = x.shape[1] // heads
        q, k, v = (f(x).view(-1, heads, width) for f in (part.self.query, part.self.key, part.self.value))
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * width**-0.5, dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(x.shape)
        return part.output.LayerNorm(part.output.dense(mixed) + x)

    def feed(layer: Any, x: Tensor) -> Tensor:
        return layer.output.LayerNorm(layer.output.dense(F.gelu(layer.intermediate.dense(x))) + x)

    for i, layer in enumerate(model.encoder.layer):
        whole = retrofitted.units.get(f"encoder.layer.{i}")
        if whole is not None:
            place, p = decide(whole, x)
            x = settle(moved(whole, x), place, feed(layer, attend(layer.attention, x[place])), p)
            continue
        unit = retrofitted.units.get(f"encoder.layer.{i}.attention.self")
        if unit is None:
            x = attend(layer.attention, x)
        else:
            place, p = decide(unit, x)
            skip = layer.attention.output.LayerNorm(moved(unit, x))
            x = settle(skip, place, attend(layer.attention, x[place]), p)
        unit = retrofitted.units.get(f"encoder.layer.{i}.intermediate")
        if unit is None:
            x = feed(layer, x)
        else:
            place, p = decide(unit, x)
            x = settle(layer.output.LayerNorm(moved(unit, x)), place, feed(layer, x[place]), p)
    return x


@pytest.mark.parametrize("select", SELECT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_changes_at_first(layout: str, select: Any) -> None:
    model = make(layout).float().train()
    names = [name for name, _ in model.named_parameters()]
    real = padded()["attention_mask"].bool()

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)  # dropout
        states = model(**padded()).last_hidden_state[real]
        states.square().mean().backward()
        return states, {name: p.grad for name in names if (p := model.get_parameter(name)).grad is not None}

    before, grads = run()
    retrofitted = retrofit(model, select)
    after, after_grads = run()
    assert_same_numbers(after, before)
    assert grads.keys() == after_grads.keys()
    for name, grad in grads.items():
        assert_same_numbers(after_grads[name], grad, name, largest(grads.values()))
    assert set(retrofitted.rates().values()) == {1.0}
    assert all(p.grad is not None for p in retrofitted.router_parameters())
    with torch.no_grad():
        quiet = model.eval()(**padded()).last_hidden_state
        retrofitted.undo()
        assert_same_numbers(model(**padded()).last_hidden_state, quiet)


@pytest.mark.parametrize("select", SELECT, ids=str)
@pytest.mark.parametrize(
    ("layout", "skipped"), [("bert", "nothing"), ("bert-eager", "nothing"), ("bert", "linear")]
)
def test_as_the_formula(layout: str, skipped: Any, select: Any) -> None:
    model = make(layout)
    retrofitted = sparse(model, select, skipped=skipped)
    batch = padded()
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    weight = torch.randn(3, 11, 32, dtype=torch.float64)

    def run(states: Callable[[], list[Tensor]]) -> tuple[list[Tensor], dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        found = states()
        sum((x * w[: len(x)]).sum() for x, w in zip(found, weight, strict=True)).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return found, grads

    def together() -> list[Tensor]:
        states = model(**batch).last_hidden_state
        return [states[b, :n] for b, n in enumerate(lengths)]

    fast, fast_grads = run(together)
    assert all(0 < rate < 1 for rate in retrofitted.rates().values())
    ids = batch["input_ids"]
    slow, slow_grads = run(lambda: [formula(model, ids[b, :n], retrofitted) for b, n in enumerate(lengths)])
    torch.testing.assert_close(fast, slow)
    assert {f"{name}.sparse.router.logits.weight" for name in retrofitted.units} <= slow_grads.keys()
    for name, grad in slow_grads.items():
        torch.testing.assert_close(fast_grads[name], grad, msg=name)


@pytest.mark.parametrize("select", SELECT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_and_batch_mates_change_nothing(layout: str, select: Any) -> None:
    model = make(layout)
    retrofitted = sparse(model, select)
    batch = padded()
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        states = model(**batch).last_hidden_state
        rates = retrofitted.rates()
        active = {name: routing.active for name, routing in retrofitted.routings().items()}
        for name, routing in retrofitted.routings().items():
            assert not routing.active[~real].any()
            assert rates[name] == pytest.approx(float(activation(routing, real).rate))
        for b, length in enumerate(real.sum(dim=1).tolist()):
            alone = model(batch["input_ids"][b : b + 1, :length]).last_hidden_state[0]
            torch.testing.assert_close(states[b, :length], alone)
            for name, routing in retrofitted.routings().items():
                assert torch.equal(routing.active[0], active[name][b, :length])
        wider = {name: F.pad(value, (0, 5)) for name, value in batch.items()}
        torch.testing.assert_close(model(**wider).last_hidden_state[:, :11][real], states[real])
    assert all(0 < rate < 1 for rate in rates.values())


@pytest.mark.parametrize("select", SELECT, ids=str)
def test_none_active(select: Any) -> None:
    model = make()
    retrofitted = sparse(model, select)
    for unit in retrofitted.units.values():
        unit.threshold.fill_(2.0)
    model(**padded()).last_hidden_state.square().sum().backward()
    grads = [p.grad for name, p in model.named_parameters() if "pooler" not in name]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    with torch.no_grad():
        states = model(**padded()).last_hidden_state
        for b, length in enumerate((11, 7, 2)):
            want = formula(model, padded()["input_ids"][b, :length], retrofitted)
            torch.testing.assert_close(states[b, :length], want)
    assert set(retrofitted.rates().values()) == {0.0}


def test_training_meets_the_budget_and_moves_routers() -> None:
    """Matching the dense states: routers first, then everything."""
    torch.manual_seed(0)
    dense = bert(num_hidden_layers=2, vocab_size=500).eval()
    model = copy.deepcopy(dense).train()
    retrofitted = retrofit(model, ("attention", "mlp"))
    begin = [p.detach().clone() for p in retrofitted.router_parameters()]
    schedule = RateSchedule(final=0.4, begin=2, steps=20)

    def batch(seed: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 500, (8, 24), generator=torch.Generator().manual_seed(seed))
        mask = torch.arange(24) < torch.randint(12, 25, (8, 1), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids * mask, "attention_mask": mask.long()}

    retrofitted.freeze()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(60):
        if step == 25:
            retrofitted.unfreeze()
        retrofitted.set_rate(schedule(step))
        retrofitted.reset_statistics()
        given = batch(step)
        with torch.no_grad():
            want = dense(**given).last_hidden_state
        found = model(**given).last_hidden_state
        loss = (found - want)[given["attention_mask"].bool()].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tokens = int(given["attention_mask"].sum())
        for name, rate in retrofitted.rates().items():
            assert rate == pytest.approx(schedule(step), abs=3.0 / tokens), (step, name)
        if step == 24:
            assert all(
                torch.equal(model.get_parameter(name), parameter)
                for name, parameter in dense.named_parameters()
            )
            for parameter, before in zip(retrofitted.router_parameters(), begin, strict=True):
                assert not torch.equal(parameter, before)
    assert not torch.equal(
        model.encoder.layer[1].output.dense.weight, dense.encoder.layer[1].output.dense.weight
    )
    retrofitted.calibrate(batch(seed) for seed in range(100, 140))
    retrofitted.reset_statistics()
    with torch.no_grad():
        for seed in range(200, 220):
            model.eval()(**batch(seed))
    for name, rate in retrofitted.rates().items():
        assert abs(rate - 0.4) < 0.05, (name, rate)


def ridge(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias that minimize the squared error of all tokens plus a penalty, by a QR decomposition."""
    x1 = F.pad(x, (0, 1), value=1.0)
    penalty = (1e-4 * x1.square().sum(dim=0)[:-1].mean()).sqrt() * torch.eye(x1.shape[1], dtype=x.dtype)
    penalty[-1] = 0.0
    found = torch.linalg.lstsq(
        torch.cat([x1, penalty]), F.pad(y, (0, 0, 0, x1.shape[1])), driver="gelsd"
    ).solution
    return found[:-1].T, found[-1]


@pytest.mark.parametrize("kind", ["tokens", "sequence", "block"])
def test_fit_is_least_squares(kind: Any) -> None:
    """Substitutes: what the dense block adds; routers: the logarithm of what the substitute leaves of it."""
    model = make()
    part = {"tokens": ".intermediate", "sequence": ".attention.self", "block": ""}[kind]
    retrofitted = retrofit(model, {f"encoder.layer.1{part}": kind}, skipped="linear")
    model.double()
    data = [padded(), {"input_ids": draw(20, 30, seed=5)}]
    (unit,) = retrofitted.units.values()
    layer = model.encoder.layer[1]
    xs, added = [], []
    for batch in data:
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).hidden_states
            for b, length in enumerate(real.sum(dim=1).tolist()):
                x = states[1][b : b + 1, :length]
                attended = layer.attention(x)[0]
                hidden = F.gelu(layer.intermediate.dense(attended))
                if kind == "tokens":
                    xs.append(attended[0])
                    added.append(layer.output.dense(hidden)[0])
                elif kind == "block":
                    xs.append(x[0])
                    added.append(states[2][b, :length] - x[0])
                else:
                    xs.append(x[0])
                    own = layer.attention.self
                    context = type(own).forward(own, x)[0]
                    added.append(layer.attention.output.dense(context)[0])
    x, y = torch.cat(xs), torch.cat(added)
    retrofitted.fit(data)
    assert retrofitted.rate == 1.0
    weight, bias = ridge(x, y)
    substitute: Any = unit.substitute
    torch.testing.assert_close(substitute.weight, weight)
    torch.testing.assert_close(substitute.bias, bias)
    token = x * (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt()
    found = x @ weight.T + bias
    norm = {"tokens": layer.output.LayerNorm, "sequence": layer.attention.output.LayerNorm}.get(kind)
    off = y - found if norm is None else norm(x + y) - norm(x + found)
    slope, _ = ridge(token, off.detach().norm(dim=1, keepdim=True).log())
    logits = unit.router.logits(token)[:, 0]  # type: ignore[operator]
    torch.testing.assert_close(logits.mean(), torch.zeros((), dtype=x.dtype), atol=1e-6, rtol=0)
    torch.testing.assert_close(logits.std(correction=0), torch.ones((), dtype=x.dtype))
    own = unit.router.logits.weight  # type: ignore[union-attr]
    torch.testing.assert_close(F.normalize(own), F.normalize(slope))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "neurons"), [("mlp", 0), ("mlp", 6), ("attention", 0), ("block", 0), ("block", 6)]
)
def test_fit_at_a_rate(part: str, neurons: int) -> None:
    """Substitutes: from the tokens that they serve in the sparse model to what the dense model has in their place."""
    model = make()
    dense = copy.deepcopy(model)
    retrofitted = retrofit(model, (part,), skipped="linear", neurons=neurons)
    model.double()
    data = [padded(), {"input_ids": draw(20, 30, seed=5)}]
    retrofitted.set_rate(0.5)
    retrofitted.fit(data)
    retrofitted.reset_statistics()
    name = list(retrofitted.units)[1]
    unit: Any = retrofitted.units[name]
    norms = {
        "mlp": dense.encoder.layer[1].output.LayerNorm,
        "attention": dense.encoder.layer[1].attention.output.LayerNorm,
    }
    got: dict[str, list[Tensor]] = {"x": [], "wanted": []}

    def keep(which: str, x: Tensor, real: Tensor) -> None:
        got[which].append(x[real])

    skipped = []
    for batch in data:
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, real=real: keep("x", args[0], real)
            ),
            dense.encoder.layer[1].register_forward_hook(
                lambda _, args, out, real=real: keep("wanted", out, real)
            )
            if part == "block"
            else norms[part].register_forward_pre_hook(
                lambda _, args, real=real: keep("wanted", args[0], real)
            ),
        ]
        with torch.no_grad():
            dense(**batch)
            model(**batch)
        skipped.append(~retrofitted.routings()[name].active[..., 0][real])
        for handle in handles:
            handle.remove()
    for rate in retrofitted.rates().values():
        assert rate == pytest.approx(0.5, abs=0.01)
    here = torch.cat(skipped)
    x, y = torch.cat(got["x"])[here], torch.cat(got["wanted"])[here]
    inputs = x if neurons == 0 else torch.cat([x, F.gelu(unit.substitute.inner(x))], dim=1)
    weight, bias = ridge(inputs, y - x)
    torch.testing.assert_close(unit.substitute(x), inputs @ weight.T + bias)


def llama() -> Any:
    """A decoder: its layers write to a cache."""
    own = {"num_key_value_heads": 2, "num_hidden_layers": 5}
    return transformers.LlamaModel(transformers.LlamaConfig(**(SIZES | own)))


@pytest.mark.parametrize("select", SELECT)
@pytest.mark.parametrize("model", [lambda: bert(num_hidden_layers=5), llama], ids=["bert", "llama"])
def test_fit_runs_every_layer_three_times_at_most(
    model: Callable[[], Any], select: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers before the one that is fitted repeat what they gave; that changes nothing."""
    data = [padded(), {"input_ids": draw(20, 30, seed=5)}]

    def fitted() -> tuple[dict[str, Tensor], dict[str, int]]:
        torch.manual_seed(0)
        dense = model().double().eval()
        retrofitted = retrofit(dense, select, skipped="linear")
        dense.double()
        retrofitted.set_rate(0.5)
        forwards = {name: part.__dict__.get("forward") for name, part in dense.named_modules()}
        runs: dict[str, int] = {}
        for name, part in dense.named_modules():
            if name.endswith(("query", "q_proj")):  # of attention, which every layer has once
                part.register_forward_pre_hook(
                    lambda *_, name=name: runs.update({name: runs.get(name, 0) + 1})
                )
        retrofitted.fit(data)
        assert forwards == {name: part.__dict__.get("forward") for name, part in dense.named_modules()}
        assert not any(part._forward_hooks for part in dense.modules())
        return dense.state_dict(), runs

    quick, few = fitted()
    monkeypatch.setattr("seqboat.retrofitting.fitting._outermost", lambda model: [])
    slow, many = fitted()
    torch.testing.assert_close(quick, slow)
    assert max(few.values()) <= 3 * len(data)
    assert max(many.values()) > 4 * len(data)


def test_fit_with_a_layer_that_runs_twice() -> None:
    """What it gives the second time is not what it gave the first time."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 1, 0, 2):
                x = torch.tanh(self.layers[index](x))
            return x

    torch.manual_seed(0)
    model = Twice().double()
    x = torch.randn(4, 30, 8, dtype=torch.float64)
    inputs = []
    handle = model.layers[2].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(x)
    handle.remove()
    wanted = model.layers[2](inputs[0]).detach()
    retrofitted = retrofit(model, {"layers.1": "tokens", "layers.2": "tokens"}, d_model=8, skipped="linear")
    model.double()
    retrofitted.fit([{"x": x}])
    substitute: Any = retrofitted.units["layers.2"].substitute
    # up to the penalty, a linear map is replaced by itself
    torch.testing.assert_close(substitute(inputs[0]), wanted, rtol=1e-3, atol=1e-3)


def test_fit_where_all_tokens_are_alike() -> None:
    """Then no threshold tells them apart, and no token is left for the substitute."""
    single = nn.Sequential(nn.Linear(8, 8)).double()
    retrofitted = retrofit(single, {"0": "tokens"}, d_model=8, skipped="linear")
    single.double()
    retrofitted.set_rate(0.5)
    x = torch.ones(2, 5, 8, dtype=torch.float64)
    retrofitted.fit([{"input": x}])
    assert all(bool(torch.isfinite(value).all()) for value in single.state_dict().values())


def test_attention_has_no_neurons(tmp_path: Path) -> None:
    model = make()
    retrofitted = retrofit(model, ("attention", "mlp"), skipped="linear", neurons=40)
    model.double()
    retrofitted.set_rate(0.5)
    retrofitted.fit([{"input_ids": draw(20, 30, seed=5)}])
    units: Any = retrofitted.units
    attention, block = (units[f"encoder.layer.1.{name}"] for name in ("attention.self", "intermediate"))
    assert attention.substitute.inner is None and attention.substitute.weight.abs().sum() > 0
    assert block.substitute.inner.out_features == 40
    retrofitted.save(tmp_path)
    other = make()
    loaded = load_retrofit(other, tmp_path)
    assert loaded.neurons == 40
    assert loaded.units["encoder.layer.1.intermediate"].state_dict().keys() == block.state_dict().keys()


def test_a_module_with_fewer_neurons_gives_all_of_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    units: Any = retrofit(model, {"?": "tokens"}, d_model=8, skipped="linear", neurons=20).units
    assert [unit.substitute.inner.out_features for unit in units.values()] == [8, 20]


def test_columns_are_chosen_one_after_the_other() -> None:
    """Each is the one with which least squares leaves the smallest error."""
    torch.manual_seed(0)
    matrix = torch.randn(300, 40, dtype=torch.float64) @ torch.randn(40, 40, dtype=torch.float64)
    matrix[:, 30] = 2 * matrix[:, 3]
    targets = matrix[:, :10] @ torch.randn(10, 6, dtype=torch.float64)
    targets = targets + torch.randn_like(targets)

    def error(columns: list[int]) -> float:
        some = matrix[:, columns]
        return float((targets - some @ torch.linalg.lstsq(some, targets).solution).square().sum())

    wanted: list[int] = []
    for _ in range(12):
        wanted.append(min(set(range(40)) - set(wanted), key=lambda one: error([*wanted, one])))
    chosen = choose_columns(matrix.T @ matrix, matrix.T @ targets, 12)
    # 3 and 30 leave the same error, so rounding decides which of them comes first
    assert [3 if column == 30 else column for column in chosen] == [3 if one == 30 else one for one in wanted]
    everything = choose_columns(matrix.T @ matrix, matrix.T @ targets, 40)
    assert sorted(everything) == list(range(40)), "also those that add nothing, if all are asked for"
    assert everything[-1] in (3, 30)


@pytest.mark.parametrize("matters", [3, 40])
def test_the_neuron_that_matters_is_copied(matters: int) -> None:
    model = make()
    layer = model.encoder.layer[1]
    with torch.no_grad():
        layer.output.dense.weight[:, torch.arange(48) != matters] = 0.0
    retrofitted = retrofit(model, {"encoder.layer.1.intermediate": "tokens"}, skipped="linear", neurons=1)
    model.double()
    retrofitted.fit([{"input_ids": draw(20, 30, seed=5)}])
    substitute: Any = retrofitted.units["encoder.layer.1.intermediate"].substitute
    assert torch.equal(substitute.inner.weight[0], layer.intermediate.dense.weight[matters])
    assert torch.equal(substitute.inner.bias[0], layer.intermediate.dense.bias[matters])


def test_fitted_substitutes_bring_the_model_closer() -> None:
    far = {}
    data = [{"input_ids": draw(20, 30, seed)} for seed in range(5, 8)]
    new = {"input_ids": draw(10, 30, seed=50)}
    cases: list[tuple[Any, int]] = [("nothing", 0), ("linear", 0), ("linear", 16)]
    for skipped, neurons in cases:
        model = make()
        with torch.no_grad():
            dense = model(**new).last_hidden_state
            retrofitted = retrofit(model, ("mlp",), skipped=skipped, neurons=neurons)
            model.double()
            assert_same_numbers(model(**new).last_hidden_state, dense)
            retrofitted.set_rate(0.5)
            if skipped == "linear":
                retrofitted.fit(data)
            else:
                retrofitted.calibrate(data)
            far[skipped, neurons] = float((model(**new).last_hidden_state - dense).square().mean())
    assert far["linear", 0] < 0.5 * far["nothing", 0], far
    assert far["linear", 16] < 0.5 * far["linear", 0], far


def test_checkpointed_layers_decide_alike() -> None:
    model = make().train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    retrofitted = sparse(model, ("attention", "mlp"))

    def grads() -> list[Tensor]:
        model.zero_grad()
        for unit in retrofitted.units.values():
            unit.pending = None
        model(**padded()).last_hidden_state.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = grads()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(grads(), plain)


def test_bfloat16_and_autocast() -> None:
    model = make().float()
    sparse(model, ("attention", "mlp"))
    with torch.autocast("cpu", torch.bfloat16):
        model(**padded()).last_hidden_state.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.bfloat16()(**padded()).last_hidden_state.dtype == torch.bfloat16


def test_copies_are_independent() -> None:
    model = make()
    sparse(model, ("attention", "mlp"))
    with torch.no_grad():
        before = model(**padded()).last_hidden_state
        other = copy.deepcopy(model)
        assert_same_numbers(other(**padded()).last_hidden_state, before)
        for parameter in other.parameters():
            parameter.zero_()
        Retrofit.of(other).undo()
        assert_same_numbers(model(**padded()).last_hidden_state, before)


def test_save_and_load(tmp_path: Path) -> None:
    model = make()
    with torch.no_grad():
        dense = model(**padded()).last_hidden_state
        keys = list(model.state_dict())
        retrofitted = sparse(model, ("attention", "mlp"), skipped="linear", neurons=5)
        want = model(**padded()).last_hidden_state
    assert not torch.allclose(want, dense)
    assert list(retrofitted.original_state_dict()) == keys
    model.save_pretrained(tmp_path, state_dict=retrofitted.original_state_dict())
    retrofitted.save(tmp_path)
    fresh, report = transformers.AutoModel.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    loaded = load_retrofit(fresh.eval(), tmp_path)
    assert loaded.rate == 0.5 and loaded.kinds == retrofitted.kinds and loaded.skipped == "linear"
    assert loaded.neurons == 5
    with torch.no_grad():
        assert_same_numbers(fresh(**padded()).last_hidden_state, want)
        loaded.undo()
        assert list(fresh.state_dict()) == keys
        assert_same_numbers(fresh(**padded()).last_hidden_state, dense)


def test_what_is_found() -> None:
    assert find_modules(make(), ("attention", "mlp")) == {
        f"encoder.layer.{i}.{part}": kind
        for i in range(3)
        for part, kind in (("attention.self", "sequence"), ("intermediate", "tokens"))
    }
    assert find_modules(make(), {"encoder.layer.[12].intermediate": "tokens"}) == {
        "encoder.layer.1.intermediate": "tokens",
        "encoder.layer.2.intermediate": "tokens",
    }
    assert find_modules(make("distilbert"), ("mlp",)) == {
        "transformer.layer.0.ffn": "tokens",
        "transformer.layer.1.ffn": "tokens",
    }


def test_refused() -> None:
    with pytest.raises(ValueError, match='neurons=3 needs skipped="linear"'):
        retrofit(bert(), ("mlp",), neurons=3)
    with pytest.raises(
        ValueError, match="neurons must be at most 48, as many as a selected module has, got 49"
    ):
        retrofit(bert(), ("attention", "mlp"), skipped="linear", neurons=49)
    with pytest.raises(
        ValueError, match="neurons must be at most 0, as many as a selected module has, got 1"
    ):
        retrofit(bert(), ("attention",), skipped="linear", neurons=1)
    with pytest.raises(ValueError, match=r"has no substitute to fit: retrofit\(\.\.\., skipped=\"linear\"\)"):
        retrofit(bert(), ("mlp",)).fit([padded()])
    with pytest.raises(ValueError, match="fit needs at least one batch"):
        retrofit(bert(), ("mlp",), skipped="linear").fit([])
    with pytest.raises(ValueError, match="only the default router can be fitted"):
        retrofit(bert(), ("mlp",), skipped="linear", router=TemperedSoftmaxConfig()).fit([padded()])
    with pytest.raises(ValueError, match=r"layer\.0\.intermediate must get all tokens at once"):
        retrofit(bert(chunk_size_feed_forward=4), ("mlp",))
    decoder = bert(is_decoder=True, add_cross_attention=True)
    with pytest.raises(ValueError, match=r"layer\.0 has causal and bidirectional attention: select one"):
        retrofit(decoder, ("block",))

    class Mixing(nn.Module):
        is_causal = False

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=1, keepdim=True).expand_as(x)

    with pytest.raises(ValueError, match="must take an attention_mask to be run on a part of its tokens"):
        retrofit(nn.Sequential(Mixing()), {"0": "sequence"}, d_model=4)
    biased = transformers.MPNetModel(transformers.MPNetConfig(**SIZES))
    retrofit(biased, ("attention",))
    with pytest.raises(ValueError, match="cannot have a position bias: it is between all tokens"):
        biased(**padded())
