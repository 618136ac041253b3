"""Models for transformers: the numbers of the core, tokens of `generate`, caches, padding, loading, training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from closeness import assert_same_numbers
from small_runs import same_tensors

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithFlattening,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    TextStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.utils import logging

from seqboat.core.state import select_rows, state_bytes, tensors
from seqboat.hf import (
    SeqBoatCache,
    SeqBoatConfig,
    SeqBoatForCausalLM,
    SeqBoatForSequenceClassification,
    SeqBoatModel,
    byte_tokenizer,
)
from seqboat.hf.save import to_transformers
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoatConfig as LayerConfig
from seqboat.mixers import MIXERS
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel, Tagger
from seqboat.ssm.diagonal import S4DConfig

WINDOW = 4
LAYER = LayerConfig(
    gau=GAUConfig(d_z=8, d_v=16, window=WINDOW, positions="rotary"), causal=True, prenorm=True, init="paper"
)
STACK = BackboneConfig(mixer=LAYER, d_model=16, num_layers=2, vocab=64, scaled_embedding=True)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def core_model(config: BackboneConfig = STACK, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """A language model whose next token is hard to foresee: weights well above their starting values."""
    torch.manual_seed(7)
    model = LanguageModel(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embedding" not in name:
                parameter.normal_(std=1.2)
    return model


def hf_model(config: BackboneConfig = STACK, dtype: torch.dtype = torch.float64) -> Any:
    return to_transformers(core_model(config, dtype))


PROMPTS = [[7, 3, 60], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [33, 33, 5, 0, 2, 9]]


def pad(rows: list[list[int]], side: str = "left") -> dict[str, Tensor]:
    """Rows side by side, with rubbish on the padding."""
    time = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), time), 63), torch.zeros(len(rows), time, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(time - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def greedy_by_steps(model: LanguageModel, prompt: list[int], new: int) -> list[int]:
    """The likeliest token every time, one row alone, by the core's own steps."""
    logits, state, _ = model(torch.tensor([prompt]))
    token, tokens = logits[:, -1].argmax(dim=-1), []
    for _ in range(new):
        tokens.append(int(token))
        logits, state, _ = model.step(token, state)
        token = logits.argmax(dim=-1)
    return tokens


@torch.no_grad()
def beams_by_steps(model: LanguageModel, prompt: list[int], new: int, beams: int) -> list[int]:
    """The best of several beams, one sequence alone, by the core's own steps."""
    logits, state, _ = model(torch.tensor([prompt]))
    scores, first = logits[0, -1].log_softmax(dim=-1).topk(beams)
    state = select_rows(state, torch.zeros(beams, dtype=torch.int64))
    paths = first[:, None]
    for _ in range(new - 1):
        logits, state, _ = model.step(paths[:, -1], state)
        everything = scores[:, None] + logits.log_softmax(dim=-1)
        scores, best = everything.flatten().topk(beams)
        parent = best // logits.shape[-1]
        paths = torch.cat([paths[parent], (best % logits.shape[-1])[:, None]], dim=1)
        state = select_rows(state, parent)
    return paths[int(scores.argmax())].tolist()


@pytest.mark.parametrize("beams", [1, 4])
def test_generated_tokens_are_those_of_the_core(beams: int) -> None:
    new = 60
    model, core = hf_model(), core_model()
    batch = pad(PROMPTS)
    settings = {"max_new_tokens": new, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    got = model.generate(**batch, **settings)
    width = batch["input_ids"].shape[1]
    assert torch.equal(got[:, :width], batch["input_ids"]) and got.shape[1] == width + new
    active: list[Tensor] = []
    for row, prompt in zip(got[:, width:].tolist(), PROMPTS, strict=True):
        ours = beams_by_steps(core, prompt, new, beams) if beams > 1 else greedy_by_steps(core, prompt, new)
        assert row == ours
        whole = core(torch.tensor([prompt + row]))
        active += [routing.active.sum() for routing in whole.routings]
        if beams == 1:
            # the forward pass over everything, without any cache, would have chosen each of them
            assert whole.logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist() == row
    assert len(set(got[:, width:].flatten().tolist())) > 20
    # every layer forgot most of the tokens that attended
    assert min(int(count) for count in active) > 4 * WINDOW


def test_beams_without_a_cache_are_the_same() -> None:
    model = hf_model()
    batch = pad(PROMPTS)
    settings = {"max_new_tokens": 25, "do_sample": False, "num_beams": 4, "pad_token_id": 0}
    assert torch.equal(
        model.generate(**batch, **settings), model.generate(**batch, **settings, use_cache=False)
    )


def test_sampling_does_not_depend_on_the_cache() -> None:
    model = hf_model()
    results = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        results.append(
            model.generate(
                **pad(PROMPTS),
                do_sample=True,
                top_p=0.9,
                temperature=0.8,
                num_return_sequences=2,
                max_new_tokens=20,
                pad_token_id=0,
                use_cache=use_cache,
            )
        )
    assert torch.equal(*results) and results[0].shape == (6, 31)


def test_a_long_prompt_is_read_in_chunks() -> None:
    model = hf_model()
    batch = pad(PROMPTS)
    whole = model.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=0)
    parts = model.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=0, prefill_chunk_size=4)
    assert torch.equal(whole, parts)


def test_generation_goes_on_from_a_returned_cache() -> None:
    model = hf_model()
    batch = pad(PROMPTS)
    settings = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    first = model.generate(**batch, max_new_tokens=9, **settings)
    cache = first.past_key_values
    assert isinstance(cache, SeqBoatCache)
    # the last token has been chosen but not read
    assert cache.get_seq_length() == first.sequences.shape[1] - 1 and cache.whole.batch_size == 3
    said = torch.tensor([[4, 5], [6, 7], [8, 9]])
    ids = torch.cat([first.sequences, said], dim=1)
    mask = F.pad(batch["attention_mask"], (0, ids.shape[1] - batch["attention_mask"].shape[1]), value=1)
    kept = copy.deepcopy(cache)
    again = model.generate(ids, attention_mask=mask, max_new_tokens=11, past_key_values=cache, **settings)
    fresh = model.generate(ids, attention_mask=mask, max_new_tokens=11, **settings)
    assert torch.equal(again.sequences, fresh.sequences)
    # a copy is not changed by what the original reads
    assert kept.get_seq_length() == first.sequences.shape[1] - 1
    copied = model.generate(ids, attention_mask=mask, max_new_tokens=11, past_key_values=kept, **settings)
    assert torch.equal(copied.sequences, fresh.sequences)


def test_the_cache_does_not_grow() -> None:
    model = hf_model()
    cache = model(torch.tensor([[1, 2, 3]])).past_key_values
    size = state_bytes(cache.state)
    with torch.no_grad():
        for token in range(40):
            cache = model(torch.tensor([[token]]), past_key_values=cache).past_key_values
    assert state_bytes(cache.state) == size and cache.get_seq_length() == 43
    assert cache.state.seen.tolist() == [43]


def test_a_stream_of_text_is_the_text() -> None:
    config = dataclasses.replace(STACK, vocab=256)
    model, tokenizer = hf_model(config), byte_tokenizer()
    # every character of the stream must be a whole one
    for byte in range(128, 256):
        model.model.backbone.embedding.weight.data[byte] = 0
    inputs = tokenizer("Grüße", return_tensors="pt")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ids = model.generate(**inputs, max_new_tokens=30, do_sample=False, streamer=TextStreamer(tokenizer))
    assert out.getvalue() == tokenizer.decode(ids[0]) + "\n" and out.getvalue().startswith("Grüße")


def test_stop_strings() -> None:
    model, tokenizer = hf_model(), byte_tokenizer()
    inputs = tokenizer("1", return_tensors="pt")
    whole = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()
    # the text up to its first printable character ends there
    places = [i for i, byte in enumerate(whole) if i > 0 and byte > 32]
    assert places
    stop = chr(whole[places[0]])
    got = model.generate(
        **inputs, max_new_tokens=12, do_sample=False, stop_strings=[stop], tokenizer=tokenizer
    )
    assert got[0].tolist() == whole[: places[0] + 1]
    # transformers' server passes the tokenizer even where nothing needs it
    unused = model.generate(**inputs, max_new_tokens=12, do_sample=False, tokenizer=tokenizer)
    assert unused[0].tolist() == whole


def test_what_generate_cannot_do_says_so() -> None:
    model = hf_model()
    right = pad(PROMPTS, side="right")
    with pytest.raises(ValueError, match="pad on the left"):
        model.generate(**right, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match=r"must be a SeqBoatCache.*got DynamicCache"):
        model.generate(**pad(PROMPTS), max_new_tokens=2, pad_token_id=0, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="not used by the model"):
        model.generate(**pad(PROMPTS), max_new_token=2)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(**pad(PROMPTS[:1]), max_new_tokens=2, prompt_lookup_num_tokens=2)


def test_a_cache_under_the_library_operations() -> None:
    model = hf_model()
    cache = model(**pad(PROMPTS)).past_key_values
    before = cache.state
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.state.seen.tolist() == [6, 3, 11]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert cache.state.seen.tolist() == [6, 3] and cache.whole.batch_size == 2
    for (_, got), (_, was) in zip(tensors(cache.state.layers), tensors(before.layers), strict=True):
        assert torch.equal(got, was[[2, 0]])
    assert cache.get_max_length() == -1 and cache.get_mask_sizes(5, 0) == (16, 0)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        cache.crop(1)
    with pytest.raises(NotImplementedError):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    cache.reset()
    assert cache.state is None and cache.get_seq_length() == 0 and cache.whole.batch_size == -1
    again = model(**pad(PROMPTS), past_key_values=cache).past_key_values
    assert again is cache and again.state.seen.tolist() == [3, 11, 6]


@pytest.mark.parametrize("grad", [True, False])
def test_tokens_one_by_one_and_in_pieces(grad: bool) -> None:
    model = hf_model()
    batch = pad(PROMPTS)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.set_grad_enabled(grad):
        whole = model(**batch).logits
        cache, pieces = None, []
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 11)):
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            cache = out.past_key_values
            pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    if grad:
        # a step must not have written over what the backward pass needs
        torch.cat(pieces, dim=1).sum().backward()


def test_a_cache_of_inference_mode_can_be_used_outside() -> None:
    model = hf_model()
    with torch.inference_mode():
        cache = model(torch.tensor([[1, 2, 3]])).past_key_values
    with torch.no_grad():
        out = model(torch.tensor([[4]]), past_key_values=cache)
    torch.testing.assert_close(out.logits[:, 0], model(torch.tensor([[1, 2, 3, 4]])).logits[:, -1])


def causal_mixers() -> dict[str, Any]:
    """Every mixer that a language model can be made of."""
    found = {"seqboat with s4d": dataclasses.replace(LAYER, ssm=S4DConfig(d_state=4))}
    for name, make in MIXERS.items():
        mixer = make()
        if "causal" in {field.name for field in dataclasses.fields(mixer)}:
            with contextlib.suppress(ValueError):
                mixer = dataclasses.replace(mixer, causal=True)
                LanguageModel(BackboneConfig(mixer=mixer, d_model=16, num_layers=1, vocab=8))
                found[name] = mixer
    return found


def test_every_causal_mixer_saves_and_loads(tmp_path: Path) -> None:
    batch = pad(PROMPTS)
    mixers = causal_mixers()
    assert {"seqboat", "transformer", "mega-chunk"} <= mixers.keys()
    for name, mixer in mixers.items():
        core = core_model(BackboneConfig(mixer=mixer, d_model=16, num_layers=1, vocab=64))
        model = to_transformers(core)
        expected = core(batch["input_ids"], batch["attention_mask"].bool()).logits
        assert_same_numbers(model(**batch).logits, expected, name=name)
        model.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert type(again) is SeqBoatForCausalLM and again.config.backbone == model.config.backbone
        assert same_tensors(dict(again.state_dict()), dict(model.state_dict())), name
        assert_same_numbers(again(**batch).logits, expected, name=name)


@pytest.mark.parametrize("name", ["s4", "s4d", "s5", "liquid-s4", "h3"])
def test_complex_weights_in_a_mapped_file(name: str, tmp_path: Path) -> None:
    """In double precision a complex number has 16 bytes; tensors in a file begin at multiples of 8."""
    offsets = set()
    for width in (15, 16):
        core = core_model(BackboneConfig(mixer=causal_mixers()[name], d_model=width, num_layers=1, vocab=63))
        to_transformers(core).save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
        offsets |= {weight.data_ptr() % 16 for weight in again.parameters() if weight.shape[-1:] == (2,)}
        ids = torch.tensor([[1, 2, 3, 4, 5]])
        assert_same_numbers(again(ids).logits, core(ids).logits)
    assert 8 in offsets


@pytest.mark.parametrize("name", ["transformer", "mega-chunk"])
def test_beams_of_other_mixers(name: str) -> None:
    model = hf_model(BackboneConfig(mixer=causal_mixers()[name], d_model=16, num_layers=2, vocab=64))
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    batch = pad(PROMPTS)
    assert torch.equal(
        model.generate(**batch, **settings), model.generate(**batch, **settings, use_cache=False)
    )


def test_padding_changes_nothing() -> None:
    model = hf_model()
    left, right = pad(PROMPTS), pad(PROMPTS, side="right")
    one, two = model(**left, output_hidden_states=True), model(**right, output_hidden_states=True)
    for i, row in enumerate(PROMPTS):
        alone = model(torch.tensor([row]), output_hidden_states=True)
        for got in (one.logits[i, -len(row) :], two.logits[i, : len(row)]):
            torch.testing.assert_close(got, alone.logits[0])
        assert len(alone.hidden_states) == 3
        for a, b, c in zip(one.hidden_states, two.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(a[i, -len(row) :], c[0])
            torch.testing.assert_close(b[i, : len(row)], c[0])


def test_the_loss_is_that_of_the_real_tokens() -> None:
    model = hf_model()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in PROMPTS:
        tokens = torch.tensor([row])
        total = total + F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="sum")
        count += len(row) - 1
    for side in ("left", "right"):
        batch = pad(PROMPTS, side)
        # labels on padding are what users forget: they are not scored
        out = model(**batch, labels=batch["input_ids"])
        torch.testing.assert_close(out.loss, total / count)
        half = model(**batch, labels=batch["input_ids"], num_items_in_batch=torch.tensor(2 * count))
        torch.testing.assert_close(half.loss, total / count / 2)
    ignored = torch.full_like(batch["input_ids"], -100)
    nothing = model(**batch, labels=ignored).loss
    nothing.backward()
    assert nothing == 0 and all(not p.grad.any() for p in model.parameters())
    some = ignored.clone()
    some[1, 3] = batch["input_ids"][1, 3]
    one = F.cross_entropy(model(**batch).logits[1, 2], some[1, 3])
    torch.testing.assert_close(model(**batch, labels=some).loss, one)


def test_vectors_instead_of_tokens() -> None:
    model = hf_model()
    batch = pad(PROMPTS)
    vectors = model.get_input_embeddings()(batch["input_ids"])
    out = model(inputs_embeds=vectors, attention_mask=batch["attention_mask"])
    torch.testing.assert_close(out.logits, model(**batch).logits)
    # the hook is gone
    torch.testing.assert_close(model(**batch).logits, out.logits)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = {"attention_mask": batch["attention_mask"]}
    new = model.generate(inputs_embeds=vectors, **mask, **settings)
    assert torch.equal(new, model.generate(**batch, **settings)[:, -8:])
    with pytest.raises(
        ValueError, match=r"inputs_embeds must have shape \(batch, time, 16\), got \(3, 11, 5\)"
    ):
        model(inputs_embeds=vectors[..., :5])
    with pytest.raises(
        ValueError, match=r"inputs_embeds must be torch.float64 like the model, got torch.float32"
    ):
        model(inputs_embeds=vectors.float())
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


def test_logits_of_some_tokens() -> None:
    model = hf_model()
    batch = pad(PROMPTS)
    whole = model(**batch).logits
    torch.testing.assert_close(model(**batch, logits_to_keep=3).logits, whole[:, -3:])
    places = torch.tensor([0, 7])
    torch.testing.assert_close(model(**batch, logits_to_keep=places).logits, whole[:, places])
    with pytest.raises(ValueError, match="leave logits_to_keep at 0"):
        model(**batch, logits_to_keep=1, labels=batch["input_ids"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": torch.ones(3, 5)}, r"attention_mask must have shape \(3, 11\), got \(3, 5\)"),
        ({"attention_mask": torch.ones(3, 1, 11, 11)}, r"attention_mask must have shape \(3, 11\), got"),
        ({"labels": torch.ones(3, 4, dtype=torch.int64)}, r"labels must have shape \(3, 11\), got \(3, 4\)"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"past_key_values": ((),)}, "past_key_values must be a SeqBoatCache.*got tuple"),
        ({"input_ids": torch.full((3, 11), 64), "attention_mask": None}, r"token ids in 0..63, got 64"),
    ],
    ids=["short mask", "square mask", "labels", "attentions", "cache", "ids"],
)
def test_inputs_that_do_not_fit(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_model()(**{**pad(PROMPTS), **inputs})


def test_a_cache_of_another_model() -> None:
    other = hf_model(dataclasses.replace(STACK, d_model=8))
    cache = other(**pad(PROMPTS)).past_key_values
    with pytest.raises(RuntimeError, match="size"):
        hf_model()(torch.tensor([[1], [2], [3]]), past_key_values=cache)
    two = hf_model()(torch.tensor([[1, 2], [3, 4]])).past_key_values
    with pytest.raises(ValueError, match="the state is of 2 sequences, but there are 1"):
        hf_model()(torch.tensor([[1]]), past_key_values=two)


@pytest.mark.parametrize("causal", [True, False])
def test_classification(causal: bool, tmp_path: Path) -> None:
    layer = dataclasses.replace(LAYER, causal=causal, norm="batch")
    torch.manual_seed(0)
    core = Classifier(dataclasses.replace(STACK, mixer=layer), classes=3).double().eval()
    model = to_transformers(core)
    batch = pad(PROMPTS)
    expected = core(batch["input_ids"], batch["attention_mask"].bool()).logits
    out = model(**batch, labels=torch.tensor([0, 2, 1]))
    assert_same_numbers(out.logits, expected)
    torch.testing.assert_close(out.loss, F.cross_entropy(expected, torch.tensor([0, 2, 1])))
    torch.testing.assert_close(model(**pad(PROMPTS, side="right")).logits, expected)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype="auto")
    assert type(again) is SeqBoatForSequenceClassification and again.config.num_labels == 3
    assert same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    assert_same_numbers(again(**batch).logits, expected)
    stack = AutoModel.from_pretrained(tmp_path, dtype="auto")
    assert type(stack) is SeqBoatModel
    y = core.backbone(batch["input_ids"], batch["attention_mask"].bool()).y
    assert_same_numbers(stack(**batch).last_hidden_state, y)
    assert (stack(**batch).past_key_values is None) == (not causal)
    if not causal:
        with pytest.raises(ValueError, match="needs causal mixers"):
            SeqBoatForCausalLM(model.config)


def test_a_new_head_on_a_trained_stack(tmp_path: Path) -> None:
    model = hf_model()
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5, dtype="auto")
    out = classifier(**pad(PROMPTS), labels=torch.tensor([4, 0, 1]))
    assert out.logits.shape == (3, 5) and torch.isfinite(out.loss)
    for weight in (classifier.head.hidden.weight, classifier.head.out.weight):
        assert 0.01 < weight.std() < 0.03
    assert torch.equal(classifier.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_configurations(tmp_path: Path) -> None:
    default = SeqBoatConfig()
    assert default.stack() == BackboneConfig(mixer=LayerConfig(causal=True), vocab=256)
    given = SeqBoatConfig(
        backbone={"d_model": 16, "mixer": {"name": "mega-chunk", "causal": True, "chunk": 4}}
    )
    assert given.backbone is not None and given.backbone["mixer"]["d_z"] > 0 and given.hidden_size == 16
    given.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is SeqBoatConfig and again.stack() == given.stack()
    with pytest.raises(ValueError, match=r"field 'backbone\.mixer\.windw' is unknown"):
        SeqBoatConfig(backbone={"mixer": {"name": "seqboat", "windw": 3}})
    with pytest.raises(ValueError, match=r"backbone\.mixer.*'rnn' is unknown"):
        SeqBoatConfig(backbone={"mixer": {"name": "rnn"}})
    with pytest.raises(ValueError, match="num_layers must be an integer >= 1, got 0"):
        SeqBoatConfig(backbone={"num_layers": 0})
    with pytest.raises(ValueError, match="of an earlier version: export the run again"):
        SeqBoatConfig(vocab_size=32, mixer={"name": "seqboat"})
    for stack in (
        dataclasses.replace(STACK, vocab=None, channels=3),
        dataclasses.replace(STACK, final_norm_affine=False, head_bias=False, head_init="xavier"),
    ):
        assert SeqBoatConfig.from_backbone(stack).stack() == stack


def test_other_sizes_of_the_vocabulary(tmp_path: Path) -> None:
    model = hf_model()
    before = model(**pad(PROMPTS)).logits
    model.resize_token_embeddings(67)
    assert model.config.vocab_size == 67
    torch.testing.assert_close(model(**pad(PROMPTS)).logits[..., :64], before)
    assert torch.isfinite(model(torch.tensor([[66, 1]])).logits).all()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    assert_same_numbers(again(torch.tensor([[66, 1]])).logits, model(torch.tensor([[66, 1]])).logits)
    with pytest.raises(ValueError, match=r"token ids in 0..66, got 67"):
        again(torch.tensor([[67]]))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_separate_embeddings(tied: bool, tmp_path: Path) -> None:
    model = SeqBoatForCausalLM(SeqBoatConfig.from_backbone(STACK, tie_word_embeddings=tied))
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tied
    assert_same_numbers(again(**pad(PROMPTS)).logits, model(**pad(PROMPTS)).logits)


def test_half_precision(tmp_path: Path) -> None:
    model = to_transformers(LanguageModel(STACK)).eval()
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    batch = pad(PROMPTS)
    assert half.dtype == torch.bfloat16
    # bf16 has 8 bits: each of the two layers rounds a few times
    torch.testing.assert_close(half(**batch).logits.float(), model(**batch).logits, atol=0.05, rtol=0.05)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    assert half.generate(**batch, **settings).shape == (3, 21)


def test_a_device_map(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = hf_model()
    model.save_pretrained(tmp_path)
    for place in ("cpu", "auto"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", device_map=place)
        assert_same_numbers(again(**pad(PROMPTS)).logits, model(**pad(PROMPTS)).logits)


def test_gradient_checkpointing() -> None:
    batch = pad(PROMPTS)
    gradients = []
    for wanted in (False, True):
        model = hf_model().train()
        if wanted:
            model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing == wanted
        model(**batch, labels=batch["input_ids"]).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small model in a folder."""
    to_transformers(LanguageModel(STACK)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("place", [100, -1])
def test_a_changed_byte_is_found(place: int, saved: Path) -> None:
    path = saved / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors (is not a whole|was changed)"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_files_that_are_cut_off_or_gone(saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        AutoModelForCausalLM.from_pretrained(saved)
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        AutoModelForCausalLM.from_pretrained(saved)
    path.write_bytes(whole)
    (saved / "sha256.json").write_text("{")
    with pytest.raises(ValueError, match=r"sha256\.json is damaged"):
        AutoModelForCausalLM.from_pretrained(saved)
    (saved / "sha256.json").write_text("{}")
    (saved / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_weights_of_another_model(saved: Path, tmp_path: Path) -> None:
    path, sums = saved / "model.safetensors", saved / "sha256.json"
    weights = load_file(path)
    sums.unlink()
    foreign = {f"transformer.h.{i}.weight": torch.zeros(4, 4) for i in range(4)}
    save_file({"transformer.wte.weight": torch.zeros(4, 4)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"asks for 2 layers, the weights have 1 tensors"):
        AutoModelForCausalLM.from_pretrained(saved)
    save_file(foreign, path, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"does not hold the weights of this SeqBoatForCausalLM: \d+ are missing"
    ):
        AutoModelForCausalLM.from_pretrained(saved)
    weights.pop("model.backbone.layers.1.linear.weight")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 are missing, model\.backbone\.layers\.1\.linear\.weight first"):
        AutoModelForCausalLM.from_pretrained(saved)
    # without a list of hashes the library's own rules hold
    weights["model.backbone.layers.1.linear.weight"] = torch.zeros(16, 16)
    save_file(weights, path, metadata={"format": "pt"})
    assert AutoModelForCausalLM.from_pretrained(saved) is not None
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16)).save_pretrained(
        tmp_path / "gpt2"
    )
    with pytest.raises(ValueError, match=r"gpt2 does not hold the weights of this SeqBoatForCausalLM"):
        SeqBoatForCausalLM.from_pretrained(tmp_path / "gpt2")


def test_bytes_as_tokens(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    text = "Ā <pad> né\r\n\t \x00 日本 \U0001f600 ~"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert len(tokenizer) == 256 and tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    assert tokenizer("").input_ids == []
    everything = tokenizer.decode(list(range(256)))
    assert everything[:128] == bytes(range(128)).decode() and set(everything[128:]) == {"\ufffd"}
    # what is cut off at the end of a text must not spoil the rest of it
    assert tokenizer.decode([*"日本".encode()][:-1]) == "日\ufffd"
    batch = tokenizer(["a", "bcd"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[0, 0, 97], [98, 99, 100]]
    assert batch.attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text).input_ids == ids and again.padding_side == "left" and again.decode(ids) == text
    assert byte_tokenizer(padding_side="right").padding_side == "right"


def test_pipelines(tmp_path: Path) -> None:
    config = dataclasses.replace(STACK, vocab=256)
    to_transformers(LanguageModel(config), pad_token_id=0).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    write = pipeline("text-generation", model=str(tmp_path))
    answers = write(["One", "Another prompt"], max_new_tokens=5, do_sample=False, batch_size=2)
    for prompt, answer in zip(["One", "Another prompt"], answers, strict=True):
        assert answer[0]["generated_text"].startswith(prompt)
        alone = write(prompt, max_new_tokens=5, do_sample=False)
        assert alone == answer
    to_transformers(Classifier(config, classes=2)).save_pretrained(tmp_path)
    judge = pipeline("text-classification", model=str(tmp_path))
    assert judge("Some text")[0]["label"] in ("LABEL_0", "LABEL_1")


def test_only_models_of_tokens_are_converted() -> None:
    with pytest.raises(
        ValueError, match="only language models, classifiers and taggers can be exported, not a Linear"
    ):
        to_transformers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("head", ["next token", "sequence", "number", "tokens"])
def test_the_trainer_takes_a_step_with_every_head(head: str, tmp_path: Path) -> None:
    """Two micro-batches of different lengths give the step of the whole batch."""
    pytest.importorskip("accelerate")
    layer = dataclasses.replace(LAYER, causal=head == "next token")
    stack, labels = dataclasses.replace(STACK, mixer=layer), [0, 2, 1, 0]
    rows = [*PROMPTS, [5, 6, 7, 8]]
    torch.manual_seed(0)
    core: Any = Classifier(stack, 1 if head == "number" else 3)
    if head == "next token":
        core = LanguageModel(stack)
    elif head == "tokens":
        core = Tagger(stack, 3)
    model = to_transformers(core, pad_token_id=0)
    if head == "number":
        model.config.problem_type = "regression"

    def collate(places: list[dict[str, int]]) -> dict[str, Tensor]:
        batch = pad([rows[place["input_ids"]] for place in places])
        if head in ("sequence", "number"):
            wanted = torch.tensor([labels[place["input_ids"]] for place in places])
            return {**batch, "labels": wanted.float() if head == "number" else wanted}
        wanted = batch["input_ids"] if head == "next token" else batch["input_ids"] % 3
        # the first token has no score before it
        scored = batch["attention_mask"].bool() & (batch["attention_mask"].cumsum(dim=1) > 1)
        return {**batch, "labels": wanted.masked_fill(~scored, -100)}

    every = [{"input_ids": place} for place in range(4)]
    expected = copy.deepcopy(model).train()
    expected(**collate(every)).loss.backward()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        save_strategy="no",
        eval_strategy="no",
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(
        model=model, args=arguments, train_dataset=every, eval_dataset=every, data_collator=collate
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
    for name, parameter in expected.named_parameters():
        step = torch.zeros_like(parameter) if parameter.grad is None else 0.1 * parameter.grad
        torch.testing.assert_close(
            model.get_parameter(name), before[name] - step, atol=1e-5, rtol=1e-4, msg=name
        )


# packed documents: every position 0 begins one

LENGTHS = (4, 1, 9)
same = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def test_flattened_examples_are_read_as_if_alone() -> None:
    model = hf_model()
    documents = [torch.randint(64, (length,)).tolist() for length in LENGTHS]
    batch = DataCollatorWithFlattening()([{"input_ids": ids} for ids in documents])
    out = model(**batch)
    logits = out.logits[0].split(LENGTHS)
    total = torch.zeros((), dtype=torch.float64)
    for ids, found in zip(documents, logits, strict=True):
        alone = torch.tensor([ids])
        expected = model(alone, labels=alone)
        same(found, expected.logits[0])
        total += expected.loss * (len(ids) - 1)
    same(out.loss, total / sum(length - 1 for length in LENGTHS), rtol=1e-10, atol=1e-10)
    # whoever made the labels: first tokens are no targets
    plain = model(batch["input_ids"], labels=batch["input_ids"], position_ids=batch["position_ids"])
    same(plain.loss, out.loss)


def test_packed_documents_with_padding_and_a_cache() -> None:
    model = hf_model()
    ids = torch.randint(64, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    position_ids = torch.tensor([[1, 1, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2]])
    out = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=True)
    same(out.logits[:, 4:], model(ids[:, 4:]).logits)
    same(out.logits[:1, 2:4], model(ids[:1, 2:4]).logits)
    # packed documents carry no state
    assert out.past_key_values is None
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="packed documents carry no state"):
        model(ids, past_key_values=cache, position_ids=position_ids)


def test_positions_of_a_single_document_change_nothing() -> None:
    model = hf_model()
    ids = torch.randint(64, (2, 5))
    plain = model(ids, output_hidden_states=True, position_ids=torch.arange(5)[None])
    assert_same_numbers(plain.logits, model(ids).logits)


def test_packed_documents_that_are_refused() -> None:
    model = hf_model()
    ids, packed = torch.randint(64, (1, 4)), torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(ValueError, match="no output_hidden_states"):
        model(ids, position_ids=packed, output_hidden_states=True)
    with pytest.raises(ValueError, match="position_ids must have shape"):
        model(ids, position_ids=packed[:, :2])
    classifier = SeqBoatForSequenceClassification(model.config)
    with pytest.raises(ValueError, match="takes no packed documents"):
        classifier(ids, position_ids=packed)
