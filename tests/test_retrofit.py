"""Retrofitted models: nothing changes at first; then they equal a loop over rows, cached or not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_same_numbers, largest
from seqboat.layers.counts import activation
from seqboat.layers.losses import extra_loss
from seqboat.layers.packing import Routing
from seqboat.layers.routers import TemperedSoftmaxConfig
from seqboat.retrofitting.model import RateSchedule, Retrofit, find_modules, load_retrofit, retrofit
from seqboat.retrofitting.unit import SparseUnit

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

VOCAB = 50
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2}


def llama(**changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(**({"vocab_size": VOCAB} | SPECIAL | sizes | changes))
    return transformers.LlamaForCausalLM(config)


def qwen() -> Any:
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **SPECIAL,
    )
    return transformers.Qwen3ForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=48, **SPECIAL
    )
    return transformers.GPT2LMHeadModel(config)


LAYOUTS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-eager": lambda: llama(attn_implementation="eager"),
    "gpt2": gpt2,
    "qwen3": qwen,
}
SELECT = [("attention", "mlp"), ("block",)]


def make(layout: str) -> Any:
    torch.manual_seed(0)
    return LAYOUTS[layout]().double().eval()


def draw(rows: int = 3, time: int = 11, seed: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randint(3, vocab, (rows, time), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: int = 3, time: int = 11) -> dict[str, Tensor]:
    mask = torch.ones(rows, time, dtype=torch.int64)
    mask[1, :4] = 0
    mask[2, :1] = 0
    return {"input_ids": draw(rows, time), "attention_mask": mask}


def sparse(model: nn.Module, select: Any, rate: float = 0.5, **settings: Any) -> Retrofit:
    """Retrofitted, with routers that differ from token to token, thresholds set for the rate."""
    made = retrofit(model, select, **settings)
    for parameter in made.router_parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    made.set_rate(rate)
    made.calibrate({"input_ids": draw(4, 30, seed)} for seed in range(4))
    made.reset_statistics()
    return made


def run_rows(unit: SparseUnit, x: Tensor, kwargs: dict[str, Any], routing: Routing) -> Any:
    """What a unit computes, row by row and without masks: the original on nothing but the active tokens."""
    rows = []
    for b in range(len(x)):
        place = routing.active[b].nonzero()[:, 0]
        mine = {key: value for key, value in kwargs.items() if not isinstance(value, Tensor)}
        if "position_embeddings" in kwargs:
            cos, sin = (
                part.expand(len(x), -1, -1)[b : b + 1, place] for part in kwargs["position_embeddings"]
            )
            mine["position_embeddings"] = (cos, sin)
        if unit.kind != "tokens":
            causal = torch.ones(len(place), len(place), dtype=torch.bool).tril()[None, None]
            mine["attention_mask"] = as_given(causal, kwargs.get("attention_mask"), x.dtype)
        skip = x[b] if unit.kind == "block" else torch.zeros_like(x[b])
        if len(place):
            out = unit.original(x[b : b + 1, place], **mine)
            out = (out[0] if isinstance(out, tuple) else out)[0]
            p = routing.probs[b, place][:, None]
            out = skip[place] + (out - skip[place]) * (1 + p - p.detach())
            skip = skip.index_copy(0, place, out)
        rows.append(skip)
    y = torch.stack(rows)
    return (y, None) if unit.kind == "sequence" else y


def as_given(mask: Tensor, like: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A mask of the kind that the model uses: bool, or added to the scores."""
    if like is None or like.dtype == torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


@pytest.mark.parametrize("select", SELECT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_changes_at_first(layout: str, select: Any) -> None:
    model = make(layout).float().train()
    batch = {**left_padded(), "labels": draw()}
    torch.manual_seed(1)  # GPT-2 drops out
    before = model(**batch)
    before.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    said = model.eval().generate(**left_padded(), max_new_tokens=5, do_sample=False)
    names = [name for name, _ in model.named_parameters()]
    model.zero_grad(set_to_none=True)

    retrofitted = retrofit(model.train(), select)
    torch.manual_seed(1)
    after = model(**batch)
    after.loss.backward()
    assert_same_numbers(after.logits, before.logits)
    for name in names:
        assert_same_numbers(model.get_parameter(name).grad, grads[name], name, largest(grads.values()))
    assert set(retrofitted.rates().values()) == {1.0}
    assert torch.equal(model.eval().generate(**left_padded(), max_new_tokens=5, do_sample=False), said)
    # the routers learn already
    assert all(p.grad is not None for p in retrofitted.router_parameters())


@pytest.mark.parametrize("select", SELECT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_as_a_loop_over_rows(layout: str, select: Any, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(layout)
    retrofitted = sparse(model, select)
    batch = left_padded()
    if padding == "none":
        batch.pop("attention_mask")
    elif padding == "right":
        batch["attention_mask"] = batch["attention_mask"].flip(1)
        # transformers counts positions of right-padded rows from the first token anyway
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    weight = torch.randn(*real.shape, VOCAB, dtype=torch.float64) * real[..., None]

    def run() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        logits = model(**batch, use_cache=False).logits
        (logits * weight).sum().backward()
        return logits[real].detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    fast, fast_grads = run()
    rates = retrofitted.rates()
    assert all(0 < rate < 1 for rate in rates.values())
    monkeypatch.setattr(SparseUnit, "run_tokens", run_rows)
    monkeypatch.setattr(SparseUnit, "run_sequence", run_rows)
    slow, slow_grads = run()
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(fast_grads, slow_grads)


@pytest.mark.parametrize("select", SELECT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_generate_with_and_without_cache(layout: str, select: Any) -> None:
    model = make(layout)
    retrofitted = sparse(model, select)
    for beams in (1, 4):
        settings: dict[str, Any] = {
            "max_new_tokens": 12,
            "do_sample": False,
            "num_beams": beams,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        cached = model.generate(**left_padded(), **settings)
        plain = model.generate(**left_padded(), use_cache=False, **settings)
        assert torch.equal(cached.sequences, plain.sequences)
        torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits))
        # a sequence does not depend on the others
        alone = model.generate(left_padded()["input_ids"][:1], **settings)
        assert torch.equal(alone.sequences[0], cached.sequences[0])
    assert all(0 < rate < 1 for rate in retrofitted.rates().values())


def test_skipped_tokens_leave_no_keys() -> None:
    from seqboat.retrofitting.cache import SparseLayer

    model = make("llama")
    retrofitted = sparse(model, {"model.layers.[02].self_attn": "sequence"})
    batch = left_padded()
    with torch.no_grad():
        whole = model(**batch)
        active = {name: r.active[..., 0] for name, r in retrofitted.routings().items()}
        pieces: list[Tensor] = []
        past: Any = None
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 11)):
            out = model(
                batch["input_ids"][:, start:end],
                attention_mask=batch["attention_mask"][:, :end],
                position_ids=torch.arange(start, end)[None],
                past_key_values=past,
                use_cache=True,
            )
            past = out.past_key_values
            pieces.append(out.logits)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[real], whole.logits[real])
    assert [type(layer) is SparseLayer for layer in past.layers] == [True, False, True]
    for layer in (0, 2):
        held, want = past.layers[layer], active[f"model.layers.{layer}.self_attn"]
        assert held.count.tolist() == want.sum(dim=1).tolist()
        assert past.get_seq_length(layer) == 11
        for row, count in enumerate(held.count):
            assert held.position[row, :count].tolist() == want[row].nonzero()[:, 0].tolist()
    # forget the last four tokens, and read them again
    past.crop(-4)
    with torch.no_grad():
        again = model(
            batch["input_ids"][:, 7:],
            attention_mask=batch["attention_mask"],
            position_ids=torch.arange(7, 11)[None],
            past_key_values=past,
        )
    torch.testing.assert_close(again.logits, pieces[-1])
    # rows selected and repeated
    past.batch_select_indices(torch.tensor([2, 0]))
    past.batch_repeat_interleave(2)
    new = torch.tensor([[5], [6], [5], [6]])
    rows = torch.tensor([2, 2, 0, 0])
    with torch.no_grad():
        step = model(
            new,
            attention_mask=torch.cat([batch["attention_mask"][rows], torch.ones_like(new)], dim=1),
            position_ids=torch.tensor([[11]]),
            past_key_values=past,
        )
        want = model(
            torch.cat([batch["input_ids"][rows], new], dim=1),
            attention_mask=torch.cat([batch["attention_mask"][rows], torch.ones_like(new)], dim=1),
        )
    torch.testing.assert_close(step.logits[:, -1], want.logits[:, -1])


def test_cache_grows_past_its_first_size() -> None:
    model = make("llama")
    sparse(model, ("attention",), rate=0.9)
    ids = draw(2, 5)
    said = model.generate(ids, max_new_tokens=90, do_sample=False)
    assert torch.equal(said, model.generate(ids, max_new_tokens=90, do_sample=False, use_cache=False))


def test_gradients_through_the_cache() -> None:
    model = make("llama")
    sparse(model, ("attention", "mlp"))
    ids = draw()

    def grads(pieces: list[int]) -> list[Tensor]:
        model.zero_grad()
        past, logits = None, []
        for piece in ids.split(pieces, dim=1):
            out = model(piece, past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits)
        torch.cat(logits, dim=1).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.testing.assert_close(grads([4, 1, 6]), grads([11]))


@pytest.mark.parametrize("select", SELECT, ids=str)
def test_causal(select: Any) -> None:
    model = make("llama")
    sparse(model, select)
    ids = draw()
    changed = ids.clone()
    changed[:, 6:] = draw(seed=9)[:, 6:]
    with torch.no_grad():
        one, two = model(ids).logits, model(changed).logits
    torch.testing.assert_close(one[:, :6], two[:, :6])
    assert not torch.allclose(one[:, 6:], two[:, 6:])


@pytest.mark.parametrize("select", SELECT, ids=str)
def test_none_active(select: Any) -> None:
    model = make("llama")
    retrofitted = sparse(model, select)
    for unit in retrofitted.units.values():
        unit.threshold.fill_(2.0)
    ids = draw()
    model(ids).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        logits = model(ids).logits
        embedded = model.model.norm(model.model.embed_tokens(ids))
    torch.testing.assert_close(logits, model.lm_head(embedded))
    retrofitted.reset_statistics()
    cached = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(cached, model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False))
    assert set(retrofitted.rates().values()) == {0.0}


@pytest.mark.parametrize(("budget", "within"), [("controller", 0.03), ("loss", 0.1)])
def test_training_reaches_the_rate(budget: Any, within: float) -> None:
    torch.manual_seed(0)
    # the first router sees the embedding alone: a rate can be met only as closely as tokens differ
    vocab = 500
    model = llama(num_hidden_layers=2, initializer_range=0.02, vocab_size=vocab)
    retrofitted = retrofit(model, budget=budget)
    schedule = RateSchedule(final=0.4, begin=5, steps=40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(140):
        retrofitted.set_rate(schedule(step))
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (140 - step) / 80)
        ids = draw(16, 32, seed=step, vocab=vocab)
        loss = model(input_ids=ids, labels=ids).loss
        if budget == "loss":
            loss = loss + 30 * retrofitted.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    retrofitted.reset_statistics()
    with torch.no_grad():
        model.eval()(draw(400, 32, seed=1000, vocab=vocab))
    for name, rate in retrofitted.rates().items():
        assert abs(rate - 0.4) < within, (name, rate)
    assert float(retrofitted.loss()) < within**2
    extra = extra_loss(model)
    assert (extra is None) == (budget == "controller")
    if extra is not None:
        torch.testing.assert_close(extra, retrofitted.loss())


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


def test_statistics_leave_padding_out() -> None:
    model = make("llama")
    retrofitted = sparse(model, ("attention", "mlp"))
    batch = left_padded()
    with torch.no_grad():
        model(**batch)
    real = batch["attention_mask"].bool()
    for name, routing in retrofitted.routings().items():
        assert not routing.active[~real].any()
        assert retrofitted.rates()[name] == pytest.approx(float(activation(routing, real).rate))


def test_checkpointed_layers_decide_alike() -> None:
    model = llama().double().train()
    retrofitted = sparse(model, ("attention", "mlp"))
    batch = {**left_padded(), "labels": draw()}

    def grads() -> list[Tensor]:
        model.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    thresholds = [unit.threshold.clone() for unit in retrofitted.units.values()]
    plain = grads()
    for unit, threshold in zip(retrofitted.units.values(), thresholds, strict=True):
        unit.pending = None
        unit.threshold.copy_(threshold)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(grads(), plain)


def test_bfloat16_and_autocast() -> None:
    model = llama()
    retrofitted = sparse(model, ("attention", "mlp"))
    ids = draw()
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    threshold = retrofitted.units["model.layers.0.mlp"].threshold.clone()
    model.bfloat16()
    assert torch.equal(retrofitted.units["model.layers.0.mlp"].threshold, threshold)
    assert model(ids).logits.dtype == torch.bfloat16
    model.generate(ids, max_new_tokens=3)


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


def test_undo() -> None:
    model = make("llama")
    ids = draw()
    with torch.no_grad():
        before = model(ids).logits
    keys = list(model.state_dict())
    retrofitted = sparse(model, ("attention", "mlp"))
    retrofitted.freeze()
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        f"{name}.sparse.router.logits.{part}" for name in retrofitted.units for part in ("weight", "bias")
    ]
    assert list(retrofitted.original_state_dict()) == keys
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, before)
    retrofitted.undo()
    assert list(model.state_dict()) == keys and all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        assert_same_numbers(model(ids).logits, before)
    retrofit(model)  # can be done again


def test_copies_are_independent() -> None:
    model = make("llama")
    retrofitted = sparse(model, ("attention", "mlp"))
    ids = draw()
    with torch.no_grad():
        before = model(ids).logits
        other = copy.deepcopy(model)
        assert_same_numbers(other(ids).logits, before)
        mine = Retrofit.of(other)
        assert mine is not retrofitted and Retrofit.of(model) is retrofitted
        mine.set_rate(1.0)
        for parameter in other.parameters():
            parameter.zero_()
        retrofitted.reset_statistics()
        other(ids)
        assert set(retrofitted.rates().values()) == {0.0}  # the copy counts for itself
        assert_same_numbers(model(ids).logits, before)
        mine.undo()
        assert_same_numbers(model(ids).logits, before)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not retrofitted"):
        Retrofit.of(other)


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


def test_save_and_load(tmp_path: Path) -> None:
    model = make("llama")
    retrofitted = sparse(model, ("attention", "mlp"), router=TemperedSoftmaxConfig(temperature_scale=0.5))
    ids = draw()
    with torch.no_grad():
        want = model(ids).logits
    model.save_pretrained(tmp_path, state_dict=retrofitted.original_state_dict())
    retrofitted.save(tmp_path)

    fresh, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    loaded = load_retrofit(fresh.eval(), tmp_path)
    assert loaded.rate == 0.5 and loaded.kinds == retrofitted.kinds and loaded.router == retrofitted.router
    with torch.no_grad():
        assert_same_numbers(fresh(ids).logits, want)
    about = json.loads((tmp_path / "retrofit.json").read_text())
    (tmp_path / "retrofit.json").write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99, expected 1"):
        load_retrofit(make("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"contains no retrofit\.json"):
        load_retrofit(make("llama"), tmp_path / "nothing")


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


def test_what_is_found() -> None:
    assert find_modules(make("gpt2"), ("mlp",)) == {
        "transformer.h.0.mlp": "tokens",
        "transformer.h.1.mlp": "tokens",
    }
    assert find_modules(make("qwen3"), {"model.layers.1.self_attn": "sequence"}) == {
        "model.layers.1.self_attn": "sequence"
    }


def test_refused() -> None:
    model = make("llama")
    with pytest.raises(ValueError, match=r"select: no module of the model is called 'nothing\.\*'"):
        retrofit(model, {"nothing.*": "tokens"})
    with pytest.raises(ValueError, match="select must be one of attention, mlp, block; got 'heads'"):
        retrofit(model, ["heads"])
    with pytest.raises(ValueError, match="select must be a sequence or a mapping, got the string 'mlp'"):
        retrofit(model, "mlp")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp is inside model\.layers\.0, which is"):
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
    with pytest.raises(ValueError, match="got StaticLayer: retrofitted models use the default"):
        model.generate(draw(), max_new_tokens=2, cache_implementation="static")
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
    sliding = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=0,
        )
    )
    with pytest.raises(ValueError, match="has a sliding window"):
        retrofit(sliding)
