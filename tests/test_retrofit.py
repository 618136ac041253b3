"""Retrofitted encoders: nothing changes at first; then they equal BERT's equations, sequence by sequence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeness import assert_same_numbers, largest
from seqboat.core.mixer import activation
from seqboat.layers.budget import extra_loss
from seqboat.layers.routers import TemperedSoftmaxConfig
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


def test_fit_where_all_tokens_are_alike() -> None:
    """Then no threshold tells them apart, and no token is left for the substitute."""
    single = nn.Sequential(nn.Linear(8, 8)).double()
    retrofitted = retrofit(single, {"0": "tokens"}, d_model=8, skipped="linear")
    single.double()
    retrofitted.set_rate(0.5)
    x = torch.ones(2, 5, 8, dtype=torch.float64)
    retrofitted.fit([{"input": x}])
    assert all(bool(torch.isfinite(value).all()) for value in single.state_dict().values())


def test_fitted_substitutes_bring_the_model_closer() -> None:
    far = {}
    data = [{"input_ids": draw(20, 30, seed)} for seed in range(5, 8)]
    new = {"input_ids": draw(10, 30, seed=50)}
    kinds: list[Any] = ["nothing", "linear"]
    for skipped in kinds:
        model = make()
        with torch.no_grad():
            dense = model(**new).last_hidden_state
            retrofitted = retrofit(model, ("mlp",), skipped=skipped)
            model.double()
            assert_same_numbers(model(**new).last_hidden_state, dense)
            retrofitted.set_rate(0.5)
            if skipped == "linear":
                retrofitted.fit(data)
            else:
                retrofitted.calibrate(data)
            far[skipped] = float((model(**new).last_hidden_state - dense).square().mean())
    assert far["linear"] < 0.5 * far["nothing"], far


@pytest.mark.parametrize("budget", ["controller", "loss"])
def test_training_reaches_the_rate(budget: Any) -> None:
    """Routers alone, then everything; a router can meet a rate only as closely as its tokens differ."""
    torch.manual_seed(0)
    model = bert(num_hidden_layers=1, vocab_size=500, initializer_range=0.02).train()
    retrofitted = retrofit(model, budget=budget)
    begin = {name: p.detach().clone() for name, p in model.named_parameters()}
    mine = {id(parameter) for parameter in retrofitted.router_parameters()}
    schedule = RateSchedule(final=0.4, begin=2, steps=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    retrofitted.freeze()
    for step in range(100):
        if step == 10:
            for name, parameter in model.named_parameters():
                moved = not torch.equal(parameter, begin[name])
                assert moved == (id(parameter) in mine), name
            retrofitted.unfreeze()
        retrofitted.set_rate(schedule(step))
        ids = torch.randint(3, 500, (16, 24))
        loss = model(input_ids=ids).last_hidden_state[..., 0].square().mean()
        if budget == "loss":
            loss = loss + 30 * retrofitted.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if budget == "controller":
        retrofitted.calibrate({"input_ids": torch.randint(3, 500, (16, 24))} for _ in range(40))
    retrofitted.reset_statistics()
    with torch.no_grad():
        model.eval()(torch.randint(3, 500, (200, 24)))
    for name, rate in retrofitted.rates().items():
        assert abs(rate - 0.4) < (0.05 if budget == "controller" else 0.12), (name, rate)
    extra = extra_loss(model)
    assert (extra is None) == (budget == "controller")
    if extra is not None:
        torch.testing.assert_close(extra, retrofitted.loss())


def test_feed_forward_blocks_of_a_decoder() -> None:
    """Token-wise modules need no cache of their own: generation is the same with and without one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=1, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).double().eval()
    retrofitted = sparse(model, ("mlp",))
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": 2}
    said = [model.generate(draw(), use_cache=use, **settings) for use in (True, False)]
    assert torch.equal(*said) and all(0 < rate < 1 for rate in retrofitted.rates().values())
    with pytest.raises(ValueError, match=r"self_attn has causal attention, .* select token-wise modules"):
        retrofit(transformers.LlamaModel(config))


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
        retrofitted = sparse(model, ("attention", "mlp"), skipped="linear")
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


def test_every_training_batch_meets_the_rate() -> None:
    """Also where the router moves much faster than an average of thresholds could follow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    retrofitted = retrofit(model, {"0": "tokens"}, d_model=8)
    retrofitted.set_rate(0.3)
    bias = model.get_parameter("0.sparse.router.logits.bias")
    for step in range(10):
        nn.init.constant_(bias, -step)
        retrofitted.reset_statistics()
        model(torch.randn(4, 50, 8))
        assert retrofitted.rates()["0"] == pytest.approx(0.3, abs=0.006)


def test_any_module() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.ffn(x)

    torch.manual_seed(0)
    parts: list[Any] = [Residual().double(), Residual().double()]
    model = nn.Sequential(*parts)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    before = model(x)
    retrofitted = retrofit(model, {"*.ffn": "tokens"}, d_model=8, router=TemperedSoftmaxConfig())
    assert_same_numbers(model(x), before)
    retrofitted.set_rate(0.3)
    retrofitted.calibrate({"input": x} for _ in range(3))
    retrofitted.reset_statistics()
    with torch.no_grad():
        y = model.eval()(x)
        for residual, routing in zip(parts, retrofitted.routings().values(), strict=True):
            own = residual.ffn
            x = x + torch.where(routing.active, own[2](own[1](own[0](x))), 0.0)
    torch.testing.assert_close(y, x)
    assert retrofitted.rates()["0.ffn"] == pytest.approx(0.3, abs=0.05)


def test_bad_tokens_move_no_threshold() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    retrofitted = retrofit(model, {"0": "tokens"}, d_model=4)
    retrofitted.set_rate(0.5)
    x = torch.randn(2, 8, 4)
    model(x)
    model(x)
    good = retrofitted.units["0"].threshold.clone()
    model(torch.full_like(x, torch.nan))
    x[0, 3] = torch.nan
    y = model(x)
    assert (y[0, 3] == 0).all() and y.isfinite().all()
    torch.testing.assert_close(retrofitted.units["0"].threshold, good)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 10**9}, "d_model is 1000000000, which no saved tensor has"),
        ({"d_model": "8"}, "d_model must be an integer"),
        ({"kinds": {"7": "tokens"}}, "no module of the model is called '7'"),
        ({"kinds": 3}, "TypeError"),
        ({"router": {"name": "x-moe", "d_route": 10**9}}, "larger than its weights"),
        ({"router": {"name": "x-moe"}}, "size mismatch|Missing key"),
        ({"rates": {"1": 7}}, r"must be in \(0, 1\], got 7"),
        ({"rates": {}}, "KeyError: '1'"),
    ],
)
def test_files_that_do_not_fit_are_named_and_change_nothing(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    retrofit(network(), {"1": "tokens"}, d_model=8).save(tmp_path)
    file = tmp_path / "retrofit.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    model = network()
    with pytest.raises(ValueError, match=message) as caught:
        load_retrofit(model, tmp_path)
    assert str(file) in str(caught.value)
    assert [name for name, _ in model.named_modules()] == ["", "0", "1"]
    (tmp_path / "retrofit.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"retrofit\.safetensors cannot be read"):
        load_retrofit(model, tmp_path)


def test_refused() -> None:
    model = bert()
    with pytest.raises(ValueError, match=r"select: no module of the model is called 'nothing\.\*'"):
        retrofit(model, {"nothing.*": "tokens"})
    with pytest.raises(ValueError, match="select must be one of attention, mlp, block; got 'heads'"):
        retrofit(model, ["heads"])
    with pytest.raises(ValueError, match="select must be a sequence or a mapping, got the string 'mlp'"):
        retrofit(model, "mlp")
    with pytest.raises(
        ValueError, match=r"encoder\.layer\.0\.intermediate is inside encoder\.layer\.0, which is"
    ):
        retrofit(model, ("block", "mlp"))
    with pytest.raises(ValueError, match="no layers with attention and mlp found in Sequential"):
        retrofit(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="d_model must be given"):
        retrofit(nn.Sequential(nn.Linear(3, 3)), {"0": "tokens"})
    retrofitted = retrofit(model)
    with pytest.raises(ValueError, match="model is retrofitted already"):
        retrofit(model)
    with pytest.raises(ValueError, match=r"rate must be in \(0, 1\], got 0"):
        retrofitted.set_rate(0)
    with pytest.raises(ValueError, match="has not run yet"):
        retrofitted.loss()
    with pytest.raises(ValueError, match=r"steps must be an integer >= 1, got 0"):
        RateSchedule(final=0.5, steps=0)
    narrow = nn.Sequential(nn.Linear(4, 3))
    retrofit(narrow, {"0": "tokens"}, d_model=4)
    with pytest.raises(
        ValueError, match=r"must return the shape it takes, \(1, 2, 4\), got a tensor \(1, 2, 3\)"
    ):
        narrow(torch.randn(1, 2, 4))
    with pytest.raises(ValueError, match=r"takes \(batch, time, dim\), got a tensor \(2, 4\)"):
        narrow(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"has no substitute to fit: retrofit\(\.\.\., skipped=\"linear\"\)"):
        retrofit(bert(), ("mlp",)).fit([padded()])
    with pytest.raises(ValueError, match="fit needs at least one batch"):
        retrofit(bert(), ("mlp",), skipped="linear").fit([])
    with pytest.raises(ValueError, match="only the default router can be fitted"):
        retrofit(bert(), ("mlp",), skipped="linear", router=TemperedSoftmaxConfig()).fit([padded()])
    with pytest.raises(ValueError, match=r"layer\.0\.intermediate must get all tokens at once"):
        retrofit(bert(chunk_size_feed_forward=4), ("mlp",))
    biased = transformers.MPNetModel(transformers.MPNetConfig(**SIZES))
    retrofit(biased, ("attention",))
    with pytest.raises(ValueError, match="cannot have a position bias: it is between all tokens"):
        biased(**padded())
