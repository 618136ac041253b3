"""Generation: steps, chunks and whole passes give the same bytes; sampling, stop strings, UTF-8, state files."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm_runs import TEXT, lm_config, with_task, write_lm_run, write_run
from seqboat.cli.main import main
from seqboat.core.state import state_bytes, tensors
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.layers.sma import override_activation
from seqboat.mixers.mega import MegaConfig
from seqboat.mixers.transformer import TransformerConfig
from seqboat.models.backbone import BackboneConfig, BackboneState
from seqboat.models.heads import LanguageModel, LanguageModelOutput
from seqboat.run import Run
from seqboat.ssm.diagonal import EMAConfig
from seqboat.tasks.diagnostics import RecallTaskConfig
from seqboat.tasks.listops import ListOpsTaskConfig
from seqboat.text.generate import (
    Generation,
    SamplingConfig,
    StopFinder,
    TextDecoder,
    best_of,
    choose,
    distribution,
    generate,
    make_generators,
    stream,
    unfinished,
)
from seqboat.text.score import read_chunks, score, total
from seqboat.text.session import load_session, read, save_session, start
from seqboat.training.evaluate import Streaming, evaluate
from seqboat.training.parallel import World

ROOT = Path(__file__).parents[1]
GREEDY = SamplingConfig(greedy=True)
PROMPTS = ["a", "Of what", "The longest, which is past the window"]
MIXERS: dict[str, Any] = {
    "memory": SeqBoatConfig(
        init="paper",
        ssm=EMAConfig(d_state=2),
        gau=GAUConfig(d_z=4, d_v=8, window=8, positions="rotary"),
        causal=True,
        prenorm=True,
    ),
    "chunk": SeqBoatConfig(
        init="paper",
        ssm=EMAConfig(d_state=2),
        gau=GAUConfig(d_z=4, d_v=8, window=8, span="chunk"),
        causal=True,
        prenorm=True,
    ),
    "full": SeqBoatConfig(
        init="paper",
        ssm=EMAConfig(d_state=2),
        gau=GAUConfig(d_z=4, d_v=8, span="full", positions="rotary"),
        causal=True,
        prenorm=True,
    ),
    "transformer": TransformerConfig(heads=2, causal=True, prenorm=True),
    "mega-chunk": MegaConfig(d_z=4, d_v=8, chunk=8, causal=True, prenorm=True),
}


def make_model(name: str = "memory", seed: int = 0, layers: int = 2) -> LanguageModel:
    """A model that does not just say the last byte again, as fresh ones with tied embeddings do."""
    torch.manual_seed(seed)
    config = BackboneConfig(
        mixer=MIXERS[name], d_model=8, num_layers=layers, vocab=256, scaled_embedding=True
    )
    model = LanguageModel(config).double().eval()
    closing: Any = model.backbone.norm
    with torch.no_grad():
        closing.weight.normal_()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


@torch.no_grad()
def slowly(model: LanguageModel, prompt: str, count: int) -> bytes:
    """The likeliest bytes by whole passes over everything so far, without any state."""
    text = list(prompt.encode())
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return bytes(text[-count:])


@pytest.mark.parametrize("name", MIXERS)
def test_cached_is_uncached(name: str) -> None:
    """Prompts of different lengths, in one batch and alone, in chunks of any size."""
    model = make_model(name)
    slow = [slowly(model, prompt, 24) for prompt in PROMPTS]
    for chunk in (1, 5, 4096):
        together = generate(model, PROMPTS, max_new_bytes=24, sampling=GREEDY, chunk=chunk)
        assert [result.data for result in together] == slow
    alone = [generate(model, prompt, max_new_bytes=24, sampling=GREEDY)[0] for prompt in PROMPTS]
    assert alone == together and {result.finish for result in alone} == {"length"}
    assert len(set(b"".join(slow))) > 3, "the texts must not be all alike for this to mean anything"


def test_drawn_bytes_are_those_of_whole_passes() -> None:
    """With the same draws, scores from the state choose the same bytes as scores from nothing."""
    model = make_model()
    sampling = SamplingConfig(temperature=0.9, top_k=50, repetition_penalty=1.2, seed=7)
    (result,) = generate(model, PROMPTS[1], max_new_bytes=60, sampling=sampling)
    generators, text = make_generators(sampling, 1), list(PROMPTS[1].encode())
    for _ in range(60):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[:, -1]
        used = torch.zeros(1, 256, dtype=torch.bool)
        used[0, text] = True
        text.append(int(choose(logits, used, sampling, generators)))
    assert bytes(text[-60:]) == result.data


def test_a_row_does_not_depend_on_its_batch() -> None:
    model = make_model()
    sampling = SamplingConfig(seed=3)
    both = generate(model, PROMPTS[:2], max_new_bytes=30, sampling=sampling)
    assert generate(model, PROMPTS[0], max_new_bytes=30, sampling=sampling) == both[:1]
    alone = generate(model, PROMPTS[1], max_new_bytes=30, sampling=SamplingConfig(seed=4))
    assert alone == both[1:]
    assert generate(model, PROMPTS[:2], max_new_bytes=30, sampling=sampling) == both
    # two rows of one prompt are two samples; no seed is another one every time
    twice = generate(model, [PROMPTS[0]] * 2, max_new_bytes=30, sampling=sampling)
    assert twice[0] != twice[1]
    free = [generate(model, "a", max_new_bytes=30)[0].data for _ in range(2)]
    assert free[0] != free[1]


# sampling


def kept(logits: list[float], **settings: Any) -> list[int]:
    """Tokens that can be drawn, the likeliest first."""
    scores = torch.tensor([logits], dtype=torch.float64)
    probs = distribution(scores, torch.zeros_like(scores, dtype=torch.bool), SamplingConfig(**settings))[0]
    assert float(probs.sum()) == pytest.approx(1)
    order = probs.argsort(descending=True, stable=True).tolist()
    return [i for i in order if probs[i] > 0]


LOG_PROBS = np.log([0.1, 0.5, 0.05, 0.25, 0.1]).tolist()


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, [1, 3, 0, 4, 2]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 3, 0, 4]),  # the last two tie
        ({"top_k": 99}, [1, 3, 0, 4, 2]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.8}, [1, 3, 0]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.4}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"temperature": 100.0, "min_p": 0.9}, [1, 3, 0, 4, 2]),
        # of the three that top_k keeps, top_p then needs two: 0.5 / 0.75 is less than 0.7
        ({"top_k": 2, "top_p": 0.7}, [1, 3]),
        ({"top_k": 2, "top_p": 0.6}, [1]),
    ],
    ids=str,
)
def test_what_is_kept(settings: dict[str, Any], tokens: list[int]) -> None:
    assert kept(LOG_PROBS, **settings) == tokens


def test_temperature_and_penalty() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]], dtype=torch.float64)
    used = torch.tensor([[True, True, False]])
    got = distribution(logits, used, SamplingConfig(temperature=0.5, repetition_penalty=1.5))
    want = torch.tensor([[2 / 1.5 / 0.5, -1 * 1.5 / 0.5, 0.5 / 0.5]], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(got, want)
    # half precision is widened first, and the coldest temperature is only greedy
    coldest = distribution(logits.half(), used, SamplingConfig(temperature=5e-324))
    assert coldest.dtype == torch.float64 and coldest.tolist() == [[1, 0, 0]]


def test_draws_follow_the_probabilities() -> None:
    rows = 4000
    logits = torch.tensor(LOG_PROBS).expand(rows, -1)
    used, plain = torch.zeros(rows, 5, dtype=torch.bool), SamplingConfig(seed=0)
    drawn = choose(logits, used, plain, make_generators(plain, rows))
    shares = torch.bincount(drawn, minlength=5) / rows
    # four standard deviations of a fraction of one half
    torch.testing.assert_close(shares, torch.tensor(LOG_PROBS).exp(), atol=4 * 0.5 / rows**0.5, rtol=0)
    top = SamplingConfig(seed=0, top_k=2)
    few = choose(logits, used, top, make_generators(top, rows))
    assert set(few.tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"temperature must be a finite number > 0, got 0.0; .* set greedy"),
        ({"temperature": -1.0}, r"temperature must be a finite number > 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a finite number > 0, got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number > 0, got 0.0"),
        ({"top_k": 0}, "top_k must be an integer >= 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"seed": 2**63}, r"seed must be less than 2\^63"),
        ({"greedy": True, "temperature": 0.5}, "greedy and temperature cannot be combined"),
        ({"greedy": True, "top_k": 5}, "greedy and top_k cannot be combined"),
        ({"greedy": True, "seed": 1}, "greedy and seed cannot be combined"),
    ],
    ids=str,
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)


# a model that says what it is told


class Parrot(LanguageModel):
    """Says a text, whatever it reads: after n tokens its n-th byte (prompts count)."""

    def __init__(self, text: bytes) -> None:
        super().__init__(BackboneConfig(mixer=MIXERS["memory"], d_model=8, num_layers=1, vocab=256))
        self.text = torch.tensor(list(text))

    def _say(self, seen: Tensor, like: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(self.text[seen % len(self.text)], 256).to(like.dtype) * 100

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        state: BackboneState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> LanguageModelOutput:
        out = super().forward(tokens, mask, state, cu_seqlens=cu_seqlens)
        before = out.state.seen - (tokens.shape[1] if mask is None else mask.sum(dim=1))
        seen = before[:, None] + torch.arange(1, tokens.shape[1] + 1)
        return out._replace(logits=self._say(seen, out.logits))

    def step(self, tokens: Tensor, state: BackboneState) -> LanguageModelOutput:
        out = super().step(tokens, state)
        return out._replace(logits=self._say(out.state.seen, out.logits))


def say(text: str | bytes, prompt: str = "P", **settings: Any) -> Generation:
    data = text.encode() if isinstance(text, str) else text
    settings = {"max_new_bytes": len(data), "sampling": GREEDY, **settings}
    return generate(Parrot(b"P" + data), prompt, **settings)[0]


def test_stop_strings() -> None:
    assert say("one two three") == ("one two three", b"one two three", "length")
    assert say("one two three", stop=["two"]) == ("one ", b"one ", "stop")
    # the first to be complete counts, and of those that end together the longest
    assert say("one two three", stop=["three", "wo"]).text == "one t"
    assert say("one two three", stop=["o", "two"]).text == ""
    assert say("xtwo", stop=["o", "two"]).text == "x"
    # a beginning that comes to nothing, or is still open at the end, belongs to the text
    assert say("aab aaab", stop=["aaab"]).text == "aab "
    assert say("one tw", stop=["two"]) == ("one tw", b"one tw", "length")
    # what the prompt began does not count
    assert say("END.", prompt="P", stop=["PE"]).text == "END."
    assert say("grün, blau", stop=["ü"]).text == "gr"
    assert say(b"\xff\xfe!", stop=[b"\xfe"]).data == b"\xff"


def test_the_stop_string_is_never_shown() -> None:
    texts = stream(Parrot(b"Pab<<eEND of"), "P", max_new_bytes=11, sampling=GREEDY, stop=["<END", "END"])
    pieces = [piece.text for piece in texts]
    assert pieces == ["a", "b", "<", "<e"]
    assert texts.results[0].finish == "stop"
    # the model has read it, though
    assert int(texts.session.state.seen) == len("Pab<<eEND")


def test_rows_end_on_their_own() -> None:
    """A row that met its stop string leaves with its state, and the others continue as if alone."""
    model = make_model()
    free = generate(model, PROMPTS, max_new_bytes=40, sampling=GREEDY)
    stop = free[1].data[9:12]
    texts = stream(model, PROMPTS, max_new_bytes=40, sampling=GREEDY, stop=[stop])
    shown = ["", "", ""]
    for piece in texts:
        shown[piece.row] += piece.text
    found = [result.data.find(stop) for result in free]
    assert 0 <= found[1] <= 9 and -1 in found, (
        "the rows must end at different times for this to mean anything"
    )
    for result, whole, at, text in zip(texts.results, free, found, shown, strict=True):
        assert result.data == (whole.data if at < 0 else whole.data[:at])
        assert result.text == text
    lengths = [len(whole.data) if at < 0 else at + len(stop) for whole, at in zip(free, found, strict=True)]
    alone = [
        stream(model, p, max_new_bytes=n, sampling=GREEDY) for p, n in zip(PROMPTS, lengths, strict=True)
    ]
    for row, other in enumerate(alone):
        list(other)
        for (name, one), (_, two) in zip(tensors(texts.session), tensors(other.session), strict=True):
            torch.testing.assert_close(one[row], two[0], msg=name)


@pytest.mark.parametrize("text", ["naïve €uro 𝄞 clef", "ASCII alone", "日本語"])
def test_characters_appear_whole(text: str) -> None:
    data = text.encode()
    pieces = [p.text for p in stream(Parrot(b"P" + data), "P", max_new_bytes=len(data), sampling=GREEDY)]
    assert pieces == list(text)


def test_what_is_no_utf8_is_marked() -> None:
    assert say(b"a\xffb\xc3(c").text == "a\ufffdb\ufffd(c"
    # cut off within a character: the bytes are there, half a character is not shown
    cut = say("x€", max_new_bytes=3)
    assert cut == ("x", b"x\xe2\x82", "length")


def test_a_cut_character_is_finished_later() -> None:
    model = Parrot("P€𝄞!".encode())
    texts = stream(model, "P", max_new_bytes=2, sampling=GREEDY)
    assert list(texts) == []
    later = stream(model, session=texts.session, max_new_bytes=3, sampling=GREEDY)
    assert [piece.text for piece in later] == ["€"] and later.results[0].text == "€"
    last = stream(model, session=later.session, max_new_bytes=3, sampling=GREEDY)
    assert "".join(piece.text for piece in last) == "𝄞!"


@pytest.mark.parametrize("cut", range(1, 8))
def test_decoder_and_finder_do_not_care_where_bytes_are_cut(cut: int) -> None:
    data = "a€b\N{GRINNING FACE}é".encode() + b"\xf0\x9f"
    parts = [data[i : i + cut] for i in range(0, len(data), cut)]
    decoder = TextDecoder()
    assert "".join(decoder.feed(part) for part in parts) == "a€b\N{GRINNING FACE}é"
    assert unfinished(data) == b"\xf0\x9f" and unfinished(data[:-2]) == b"" and unfinished(b"\xff") == b""
    finder = StopFinder([b"\x82\xacb", b"zz"])
    seen = b"".join(finder.feed(byte) for byte in data if not finder.found)
    assert finder.found and seen == b"a\xe2" and finder.rest() == b""


# sessions and their files


def test_a_session_is_a_value() -> None:
    """Continuing from a session twice gives the same text twice: it is never overwritten."""
    model = make_model()
    session = read(model, start(model, 2), [b"one", b"another"])
    before = {name: part.clone() for name, part in tensors(session)}
    first, second = (
        generate(model, session=session, max_new_bytes=20, sampling=GREEDY, stop=["q"]) for _ in range(2)
    )
    assert (
        first == second == generate(model, ["one", "another"], max_new_bytes=20, sampling=GREEDY, stop=["q"])
    )
    for name, part in tensors(session):
        assert torch.equal(part, before[name]), name


def test_prompts_may_come_in_parts() -> None:
    model = make_model()
    whole = generate(model, "one two", max_new_bytes=20, sampling=GREEDY)
    session = read(model, start(model), [b"one"])
    assert generate(model, " two", session=session, max_new_bytes=20, sampling=GREEDY) == whole
    # also none at all, before anything: every byte is as likely as any other
    blank = start(model)
    assert not blank.logits.any()
    assert generate(model, "one two", session=blank, max_new_bytes=20, sampling=GREEDY) == whole


def test_going_on_from_a_file(tmp_path: Path) -> None:
    model = make_model()
    whole = generate(model, PROMPTS[:2], max_new_bytes=60, sampling=GREEDY)
    path, data = tmp_path / "state.safetensors", [b"", b""]
    session = read(model, start(model, 2), [p.encode() for p in PROMPTS[:2]])
    for _ in range(3):
        save_session(path, session, model)
        texts = stream(model, session=load_session(path, model), max_new_bytes=20, sampling=GREEDY)
        list(texts)
        data = [one + two.data for one, two in zip(data, texts.results, strict=True)]
        session = texts.session
    assert data == [result.data for result in whole]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_another_models_state_is_refused(tmp_path: Path) -> None:
    model = make_model()
    path = tmp_path / "state"
    save_session(path, start(model), model)
    changed = make_model()
    with torch.no_grad():
        changed.backbone.embedding.weight[0, 0] += 1e-9
    wider = LanguageModel(
        dataclasses.replace(
            model.backbone.config,
            mixer=dataclasses.replace(
                MIXERS["memory"], gau=GAUConfig(d_z=4, d_v=8, window=9, positions="rotary")
            ),
        )
    ).double()
    wider.load_state_dict(model.state_dict())
    for other in (make_model(seed=1), make_model(layers=1), changed, wider):
        with pytest.raises(ValueError, match=r"state is the state of another model"):
            load_session(path, other)


def test_damaged_state_files_are_named(tmp_path: Path) -> None:
    model = make_model()
    path = tmp_path / "state"
    with pytest.raises(ValueError, match=r"state is not a file"):
        load_session(path, model)
    save_session(path, start(model), model)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"state cannot be read as a state"):
        load_session(path, model)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"state cannot be read as a state"):
        load_session(path, model)
    for at in np.random.default_rng(0).integers(0, len(whole), 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"^[^ ]*state "):
            load_session(path, model)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"state is not a state of this version: format is None"):
        load_session(path, model)
    path.write_bytes(whole)
    assert set(load_file(path)) == {name for name, _ in tensors(start(model), "session")}
    load_session(path, model)


def test_a_state_that_cannot_be_written(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        save_session(tmp_path / "nowhere" / "state", start(model), model)
    with pytest.raises(ValueError, match=r"is a folder: a state is written to a file"):
        save_session(tmp_path, start(model), model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ""}, r"prompts\[0\] is empty"),
        ({"prompts": ["a", b""]}, r"prompts\[1\] is empty"),
        ({"prompts": []}, "prompts must hold at least one prompt, got none"),
        ({"prompts": [3]}, r"prompts\[0\] must be text or bytes, got int"),
        ({"prompts": "\ud800"}, r"prompts\[0\] is not valid text"),
        ({"prompts": "a", "stop": [""]}, "stop strings must not be empty"),
        ({"prompts": "a", "max_new_bytes": 0}, "max_new_bytes must be an integer >= 1, got 0"),
        ({"prompts": "a", "chunk": 0}, "chunk must be an integer >= 1, got 0"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(make_model(), **arguments)


def test_other_bad_arguments() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="one text per sequence of the session, 2, got 1"):
        generate(model, ["a"], session=start(model, 2))
    with pytest.raises(ValueError, match=r"rows\[0\] must hold token ids in 0..255, got 256"):
        read(model, start(model), [np.array([256])])
    with pytest.raises(ValueError, match=r"rows\[0\] must be bytes or a one-dimensional array"):
        read(model, start(model), [np.array([0.5])])
    large = LanguageModel(dataclasses.replace(model.backbone.config, vocab=300))
    with pytest.raises(ValueError, match="model must be a model of bytes, got vocab 300"):
        generate(large, "a")
    with torch.no_grad():
        model.backbone.embedding.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="scores are not finite"):
        generate(model, "a")


def test_reading_in_chunks_is_reading_at_once() -> None:
    """Rows of different lengths, some of them empty in later chunks."""
    model = make_model()
    rows = [b"x", bytes(range(70)), b"", "für".encode() * 9]
    begun = read(model, start(model, 4), [b"p"] * 4)
    whole = read(model, begun, rows)
    seen: list[tuple[int, int]] = []
    for chunk in (1, 7, 32):
        parts = read(model, begun, rows, chunk=chunk, progress=lambda *done: seen.append(done))
        for (name, one), (_, two) in zip(tensors(whole), tensors(parts), strict=True):
            torch.testing.assert_close(one, two, msg=name)
    assert seen[-3:] == [(32, 70), (64, 70), (70, 70)]
    assert torch.equal(whole.logits[2], begun.logits[2])
    assert whole.tail[0].tolist() == [-1, *b"px"] and bytes(whole.tail[3].tolist()) == "für".encode()[-3:]


def test_the_session_does_not_grow() -> None:
    model = make_model()
    texts = stream(model, "a", max_new_bytes=200, sampling=GREEDY)
    sizes = set()
    for _ in texts:
        sizes.add(state_bytes(texts.session))
    assert len(sizes) == 1


# the command line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_run(tmp_path_factory.mktemp("generate"))


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Make this the standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_text_from_the_command_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Run(run).language_model
    (want,) = generate(
        model, "schön", max_new_bytes=50, sampling=SamplingConfig(seed=5, top_k=40, temperature=0.7)
    )
    options = ["--max-new-bytes", "50", "--seed", "5", "--top-k", "40", "--temperature", "0.7"]
    assert main(["generate", str(run), "--prompt", "schön", *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == want.text and captured.err == ""
    assert main(["generate", str(run), "--prompt", "schön", *options, "--echo"]) == 0
    assert capsys.readouterr().out == "schön" + want.text
    for arguments in ([], ["--prompt", "-"]):
        give(monkeypatch, "schön".encode())
        assert main(["generate", str(run), *arguments, *options, "--chunk", "2"]) == 0
        assert capsys.readouterr().out == want.text
    stop = want.text[3:5]
    assert main(["generate", str(run), "--prompt", "schön", *options, "--stop", "no", "--stop", stop]) == 0
    assert capsys.readouterr().out == want.text[: want.text.index(stop)]


def test_a_document_goes_on_later(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Run(run).language_model
    (want,) = generate(model, "Zeilen", max_new_bytes=60, sampling=GREEDY)
    state = str(tmp_path / "state")
    base = ["generate", str(run), "--greedy", "--max-new-bytes", "20"]
    assert main([*base, "--prompt", "Zeilen", "--save-state", state]) == 0
    assert main([*base, "--load-state", state, "--save-state", state]) == 0
    assert main([*base, "--load-state", state]) == 0
    assert capsys.readouterr().out == want.text
    # with more to read in between
    (more,) = generate(model, b"Zeilen" + want.data[:40] + b"XY", max_new_bytes=20, sampling=GREEDY)
    assert main([*base, "--load-state", state, "--prompt", "XY"]) == 0
    assert capsys.readouterr().out == more.text


def test_a_terminal_gets_no_control_codes(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqboat.cli.generate import write

    write("a\tb\n\x1b[31m\r\x07\u202ec€", terminal=True)
    write("\x1b", terminal=False)
    assert capsys.readouterr().out == "a\tb\n\ufffd[31m\ufffd\ufffd\ufffdc€\x1b"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    give(monkeypatch, b"x" * 5000)
    assert main(["generate", str(run), "--max-new-bytes", "5", "--greedy"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert captured.err == "\rreading 4,096/5,000 bytes\rreading 5,000/5,000 bytes\r\033[K"


def test_what_cannot_be_generated(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run.parent / "text.txt"
    other = write_lm_run(tmp_path / "b", seed=1)
    states = [tmp_path / "one", tmp_path / "two", tmp_path / "none"]
    model = Run(run).language_model
    save_session(states[0], start(Run(other).language_model), Run(other).language_model)
    save_session(states[1], start(model, 2), model)
    causal = lm_config(text)
    mixer: Any = dataclasses.replace(causal.model.mixer, causal=False)  # type: ignore[type-var]
    classifier = write_run(
        tmp_path / "classifier",
        dataclasses.replace(
            causal, task=ListOpsTaskConfig(), model=dataclasses.replace(causal.model, mixer=mixer)
        ),
    )
    prompt = [str(run), "--prompt", "a"]
    cases: list[tuple[list[str], str]] = [
        ([str(run), "--prompt", ""], "the prompt from --prompt is empty"),
        ([str(run)], "the prompt from standard input is empty"),
        ([str(run), "--prompt", "a\udcffb"], "the prompt from --prompt is not UTF-8: byte 1 is 0xff"),
        ([*prompt, "--temperature", "0"], "--temperature must be above 0, got 0; --greedy always takes"),
        ([*prompt, "--temperature", "-1"], "--temperature must be above 0, got -1"),
        ([*prompt, "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        ([*prompt, "--top-p", "1.1"], "top_p must be in (0, 1], got 1.1"),
        ([*prompt, "--top-k", "0"], "top_k must be an integer >= 1, got 0"),
        ([*prompt, "--greedy", "--temperature", "0.5"], "greedy and temperature cannot be combined"),
        ([*prompt, "--greedy", "--seed", "1"], "greedy and seed cannot be combined"),
        ([*prompt, "--max-new-bytes", "0"], "--max-new-bytes must be an integer >= 1, got 0"),
        ([*prompt, "--chunk", "-3"], "--chunk must be an integer >= 1, got -3"),
        ([*prompt, "--stop", ""], "--stop must not be empty"),
        ([*prompt, "--device", "fast"], "--device must be auto, cpu or cuda, got 'fast'"),
        ([*prompt, "--save-state", str(tmp_path / "no" / "s")], "no does not exist"),
        ([*prompt, "--load-state", str(states[0])], "one is the state of another model"),
        ([*prompt, "--load-state", str(states[1])], "two holds 2 texts, expected 1"),
        ([*prompt, "--load-state", str(states[2])], "none is not a file"),
        ([*prompt, "--load-state", str(text)], "text.txt cannot be read as a state"),
        ([str(tmp_path / "nowhere"), "--prompt", "a"], "nowhere is not the folder of a run"),
        (
            [str(classifier), "--prompt", "a"],
            "must be the run of a language model of bytes, got a classifier",
        ),
    ]
    for arguments, message in cases:
        give(monkeypatch, b"")
        assert main(["generate", *arguments]) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == "", arguments
    give(monkeypatch, "ä".encode()[:1])
    assert main(["generate", str(run)]) == 2
    assert "the prompt from standard input is not UTF-8: byte 0 is 0xc3" in capsys.readouterr().err
    give(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate", str(run)]) == 2
    assert "give --prompt TEXT, or pipe in a text" in capsys.readouterr().err


def test_the_guide_runs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands and Python of docs/language-models.md, on a small model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "runs" / "lm")
    (tmp_path / "notes.txt").write_text("Some notes.\n", encoding="utf-8")
    guide = ROOT / "docs" / "language-models.md"
    blocks = re.findall(
        r"^```(console|python)\n(.*?)^```", guide.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert {language for language, _ in blocks} == {"console", "python"}
    for language, block in blocks:
        if language == "python":
            exec(compile(block, str(guide), "exec"), {})
            continue
        for line in block.splitlines():
            assert main(shlex.split(line.removeprefix("$ seqboat "))) == 0, line
    captured = capsys.readouterr()
    assert captured.err == "" and '"bits_per_byte"' in captured.out
    assert {"letter.safetensors", "document.safetensors"} <= {path.name for path in tmp_path.iterdir()}


def launch(run: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "seqboat", "generate", str(run), "--prompt", "a", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C"},
        # a shell that runs the tests in the background has its children ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_text_comes_as_it_is_produced_and_stops_when_nobody_reads(run: Path) -> None:
    """Some of an endless text is read from a pipe, which is then closed: no complaint."""
    with launch(run, "--max-new-bytes", str(10**9)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_ctrl_c(run: Path) -> None:
    with launch(run, "--max-new-bytes", str(10**9)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(process.stdout.read(10)) == 10
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b"stopped\n"
        assert process.wait(60) == 130


def test_an_override_in_the_middle_of_a_text_counts() -> None:
    model = make_model()
    texts = stream(model, "Of what", max_new_bytes=6, sampling=GREEDY)
    next(texts)
    with override_activation(model, active=False):
        next(texts)
        quiet = texts.session.state.layers[0].sma.spent
        next(texts)
        assert torch.equal(texts.session.state.layers[0].sma.spent, quiet), "no token may attend here"


@pytest.mark.parametrize("name", ["transformer", "mega-chunk"])
def test_texts_of_other_models_end_at_different_times(name: str) -> None:
    """Memories that grow, and models without a lean step."""
    model = make_model(name)
    stop = [generate(model, PROMPTS[0], max_new_bytes=9, sampling=GREEDY)[0].data[4:6]]
    together = generate(model, PROMPTS, max_new_bytes=20, sampling=GREEDY, stop=stop)
    for prompt, found in zip(PROMPTS, together, strict=True):
        assert found == generate(model, prompt, max_new_bytes=20, sampling=GREEDY, stop=stop)[0]
    assert together[0].finish == "stop"


def test_best_of_several_reads_the_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    calls: list[int] = []
    forward = LanguageModel.forward

    def counted(self: LanguageModel, tokens: torch.Tensor, *rest: object) -> object:
        calls.append(tokens.numel())
        return forward(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "forward", counted)
    sampling = SamplingConfig(seed=3)
    found = best_of(model, "A prompt", 5, max_new_bytes=10, sampling=sampling)
    assert calls == [len("A prompt")]
    bits = [one.bits_per_byte for one in found]
    assert bits == sorted(bits) and len({one.generation.data for one in found}) == 5
    # text r draws with the seed + r, so they are those of five calls
    alone = [
        generate(model, "A prompt", max_new_bytes=10, sampling=SamplingConfig(seed=3 + r))[0]
        for r in range(5)
    ]
    assert {one.generation for one in found} == set(alone)
    # the bits are what scoring the text says
    best = found[0]
    text = np.frombuffer(b"A prompt" + best.generation.data, np.uint8)
    (scores,) = score(model, [text])
    assert best.bits_per_byte == pytest.approx(float(scores.bits[-10:].mean()), rel=1e-5)
    two = generate(model, ["A", "B"], n=2, max_new_bytes=4, sampling=SamplingConfig(seed=0))
    assert len(two) == 4
    assert two[2] == generate(model, "B", max_new_bytes=4, sampling=SamplingConfig(seed=2))[0]


def test_several_texts_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_lm_run(tmp_path))
    arguments = ["generate", run, "--prompt", "Ein", "--max-new-bytes", "8", "--seed", "5", "--n", "3"]
    assert main(arguments) == 0
    found = best_of(Run(run).language_model, "Ein", 3, max_new_bytes=8, sampling=SamplingConfig(seed=5))
    shown = [
        f"--- {i} of 3, {bits:.3f} bits per byte\n{text.text}\n" for i, (text, bits) in enumerate(found, 1)
    ]
    assert capsys.readouterr().out == "".join(shown)
    for more, message in (
        (["--save-state", str(tmp_path / "s")], "leave out --n"),
        (["--n", "0"], "--n must be an integer >= 1, got 0"),
    ):
        assert main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err
    assert main(["generate", run, "--prompt", "x", "--greedy", "--n", "2"]) == 2
    assert "the same text every time" in capsys.readouterr().err and not (tmp_path / "s").exists()


def test_a_state_with_the_wrong_number_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_lm_run(tmp_path)
    model = Run(run).language_model
    session = read(model, start(model), [b"Ein"])
    less = session._replace(state=session.state._replace(layers=session.state.layers[:1]))
    save_session(tmp_path / "state", less, model)
    out = tmp_path / "out"
    command = ["generate", str(run), "--load-state", str(tmp_path / "state"), "--save-state", str(out)]
    assert main(command) == 2
    shown, error = capsys.readouterr()
    assert shown == "" and error.count("\n") == 1 and "state of another model" in error and not out.exists()
    assert "they differ in session.state.layers.1." in error and len(error) < 400


# scores

DATA = TEXT.encode()[:300]


@pytest.fixture
def scorer(run: Path) -> LanguageModel:
    return Run(run).language_model.double()


def array(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def test_bits_are_those_of_a_whole_pass(scorer: LanguageModel) -> None:
    tokens = torch.tensor([list(DATA)])
    with torch.no_grad():
        out = scorer(tokens)
    want = -out.logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1) / math.log(2)
    (got,) = score(scorer, [array(DATA)])
    assert got.tokens.tolist() == list(DATA)
    # nothing is known before the first byte
    assert got.bits[0] == 8
    torch.testing.assert_close(torch.from_numpy(got.bits[1:]), want)
    for mine, routing in zip(got.active, out.routings, strict=True):
        assert mine is not None and mine.tolist() == routing.active[0, :, 0].tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64, 300, 1000])
def test_chunks_do_not_matter(scorer: LanguageModel, chunk: int) -> None:
    (whole,) = score(scorer, [array(DATA)])
    parts = list(score(scorer, read_chunks(io.BytesIO(DATA), chunk)))
    assert len(parts) == -(-len(DATA) // chunk)
    np.testing.assert_allclose(np.concatenate([p.bits for p in parts]), whole.bits, rtol=1e-9)
    one, two = total(parts), total([whole])
    assert one.tokens == two.tokens == 300 and one.bits == pytest.approx(two.bits)
    assert one.activation == two.activation


def test_bits_are_lengths_of_a_code(scorer: LanguageModel) -> None:
    """Over all bytes that could come next, 2^-bits adds up to one: Kraft's equality."""
    costs = [total(score(scorer, [array(DATA[:20] + bytes([byte]))])).bits for byte in range(256)]
    before = total(score(scorer, [array(DATA[:20])])).bits
    assert sum(2.0 ** (before - bits) for bits in costs) == pytest.approx(1)


def test_a_text_costs_what_evaluation_says(run: Path) -> None:
    model, config = Run(run).language_model, Run(run).config
    task = config.build_task()
    text = task.text("test")
    world = World(0, 1, torch.device("cpu"))
    scored = evaluate(model, task, "test", world, batch_size=1, reading=Streaming(chunk=50))
    sums = total(score(model.train(), [text]))
    assert model.training
    # evaluation leaves the first byte out
    assert (sums.bits - 8) / (sums.tokens - 1) == pytest.approx(scored.metrics["bits"], abs=1e-6)


def test_layers_without_a_router_and_texts_without_bytes(scorer: LanguageModel) -> None:
    plain = LanguageModel(
        BackboneConfig(mixer=TransformerConfig(heads=2, causal=True), d_model=8, num_layers=2, vocab=256)
    )
    (got,) = score(plain, [array(DATA)])
    assert got.active == (None, None)
    assert total([got, got]).activation == (None, None)
    empty = total(score(scorer, [array(b"")]))
    assert empty.bits_per_token is None and tuple(empty) == (0, 0.0, ())
    with pytest.raises(ValueError, match=r"one-dimensional arrays of token ids, got float64 of shape \(2,\)"):
        list(score(scorer, [np.zeros(2)]))  # type: ignore[list-item]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_files_are_scored_one_by_one(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, none = tmp_path / "one", tmp_path / "two", tmp_path / "none"
    one.write_bytes(DATA)
    two.write_bytes(b"\xff\x00 any bytes \xfe")
    none.write_bytes(b"")
    assert main(["eval", str(run), str(one), str(two), str(none)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    first, second, third = lines(captured.out)
    model = Run(run).language_model
    want = total(score(model, [array(DATA)]))
    assert first["file"] == str(one) and first["bytes"] == 300
    assert first["bits"] == pytest.approx(want.bits) and first["bits_per_byte"] == pytest.approx(
        want.bits / 300
    )
    assert first["activation"] == list(want.activation)
    # every file is a separate text
    assert second["bits"] == pytest.approx(total(score(model, [array(two.read_bytes())])).bits)
    assert third["bytes"] == 0 and third["bits_per_byte"] is None


def test_every_byte(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DATA)))
    assert main(["eval", str(run), "-", "--per-token", "--chunk", "64"]) == 0
    *tokens, summary = lines(capsys.readouterr().out)
    assert bytes(line["byte"] for line in tokens) == DATA
    assert [line["position"] for line in tokens] == list(range(300))
    assert sum(line["bits"] for line in tokens) == pytest.approx(summary["bits"])
    rates = [sum(line["active"][layer] for line in tokens) / 300 for layer in range(2)]
    assert rates == pytest.approx(summary["activation"]) and summary["file"] == "-"


def test_progress_on_a_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text"
    path.write_bytes(DATA)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["eval", str(run), str(path), "--chunk", "200"]) == 0
    captured = capsys.readouterr()
    assert "text: 200 bytes, " in captured.err and captured.err.count("bits per byte") == 2
    assert len(lines(captured.out)) == 1


def test_what_cannot_be_scored(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run.parent / "text.txt"
    recall = RecallTaskConfig(vocab=16, length=24, pairs=2)
    other = write_run(tmp_path / "other", with_task(lm_config(text), recall))
    cases = [
        ([str(run), str(tmp_path / "nowhere")], "nowhere is not a file"),
        ([str(run), str(tmp_path)], f"{tmp_path} is not a file"),
        ([str(run), "-", "-"], "standard input (-) can be read only once"),
        ([str(run), str(text), "--chunk", "0"], "--chunk must be an integer >= 1, got 0"),
        ([str(tmp_path / "none"), str(text)], "none is not the folder of a run"),
        ([str(other), str(text)], "must be the run of a language model of bytes, got a language model of 16"),
        ([str(run), str(text), "--device", "fast"], "--device must be auto, cpu or cuda, got 'fast'"),
    ]
    for arguments, message in cases:
        assert main(["eval", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
