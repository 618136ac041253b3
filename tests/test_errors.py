"""Bad input: a ValueError that names the argument, what came and what was expected; nothing broadcasts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixer_cases import CASES, D_MODEL, RECURRENT_CASES, SMALL_EMA, SMALL_GAU, Case
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import SigmoidRouter
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.layers.sma import SparseModularActivation
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel, Matcher
from seqboat.ssm.diagonal import EMA, S4D, EMAConfig, S4DConfig

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_recurrent_case = pytest.mark.parametrize("case", RECURRENT_CASES, ids=str)

X = torch.randn(2, 5, D_MODEL)
REAL = torch.ones(2, 5, dtype=torch.bool)


BAD_INPUTS: list[tuple[Any, Any, str]] = [
    (X[0], None, "x must have shape (batch, time, 8), got (5, 8)"),
    (X[None], None, "x must have shape (batch, time, 8), got (1, 2, 5, 8)"),
    (X[..., :1], None, "x must have shape (batch, time, 8), got (2, 5, 1)"),
    (X.long(), None, "x must be floating point, got torch.int64"),
    (X.tolist(), None, "x must be a tensor, got list"),
    (X.to("meta"), None, "x is on meta but the module is on cpu"),
    (X.double(), None, "x must be torch.float32 like the module, got torch.float64"),
    (X, REAL[:1], "mask must have shape (batch, time) = (2, 5), got (1, 5)"),
    (X, REAL[:, :1], "mask must have shape (batch, time) = (2, 5), got (2, 1)"),
    (X, REAL[0], "mask must have shape (batch, time) = (2, 5), got (5,)"),
    (X, REAL[..., None], "mask must have shape (batch, time) = (2, 5), got (2, 5, 1)"),
    (X, REAL.float(), "mask must be a bool tensor, True on real tokens; got torch.float32"),
    (X, REAL.long(), "mask must be a bool tensor, True on real tokens; got torch.int64"),
    (X, REAL.tolist(), "mask must be a tensor, got list"),
    (X, REAL.to("meta"), "mask is on meta but its sequence is on cpu"),
]


@every_case
def test_input_of_a_mixer(case: Case) -> None:
    mixer = case.build()
    for x, mask, message in BAD_INPUTS:
        with pytest.raises(ValueError, match=re.escape(message)):
            mixer(x, mask)


@every_recurrent_case
def test_state_of_another_batch(case: Case) -> None:
    mixer = case.build()
    assert mixer.decodes
    for batch in (0, 1, 3):
        with pytest.raises(ValueError, match=rf"must be of 2 sequences, got {batch}"):
            mixer(X, state=mixer.init_state(batch))
    with pytest.raises(ValueError, match="state must be that of this"):
        mixer(X, state=())


@pytest.mark.parametrize("case", [case for case in CASES if "bidirectional" in case.name], ids=str)
def test_state_given_to_a_bidirectional_mixer(case: Case) -> None:
    with pytest.raises(ValueError, match=r"bidirectional: only causal layers carry a state|has no state"):
        case.build()(X, state=(X,))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GAUConfig(window=0), "window must be an integer >= 1, got 0"),
        (lambda: GAUConfig(window=-3), "window must be an integer >= 1, got -3"),
        (lambda: GAUConfig(window=2.0), "GAUConfig: window must be an integer, got 2.0"),  # type: ignore[arg-type]
        (lambda: GAUConfig(window=True), "GAUConfig: window must be an integer, got True"),
        (lambda: GAUConfig(d_z=0), "d_z must be an integer >= 1, got 0"),
        (lambda: GAUConfig(d_z=7, positions="rotary"), "d_z must be even with rotary positions, got 7"),
        (lambda: GAUConfig(d_v=0), "d_v must be an integer >= 1, got 0"),
        (lambda: GAUConfig(max_positions=0), "max_positions must be an integer >= 1, got 0"),
        (
            lambda: GAUConfig(attention="relu"),  # type: ignore[arg-type]
            "attention must be one of softmax, relu2, laplace; got 'relu'",
        ),
        (
            lambda: GAUConfig(span="window"),  # type: ignore[arg-type]
            "span must be one of memory, full, chunk; got 'window'",
        ),
        (
            lambda: GAUConfig(positions="absolute"),  # type: ignore[arg-type]
            "positions must be one of original, compressed, rotary, rotary-original, none; got 'absolute'",
        ),
        (lambda: GAUConfig(attention_dropout=1.0), "attention_dropout must be in [0, 1), got 1.0"),
        (lambda: SeqBoatConfig(dropout=-0.1), "dropout must be in [0, 1), got -0.1"),
        (
            lambda: SeqBoatConfig(norm="group"),  # type: ignore[arg-type]
            "norm must be one of layer, batch, scale, rms; got 'group'",
        ),
        (lambda: SeqBoatConfig().build(0), "d_model must be an integer >= 1, got 0"),
        (lambda: SMALL_GAU.build(0, causal=True), "d_model must be an integer >= 1, got 0"),
        (lambda: EMA(8, EMAConfig(d_state=0), causal=True), "d_state must be an integer >= 1, got 0"),
        (lambda: EMA(8, EMAConfig(block=0), causal=True), "block must be an integer >= 1, got 0"),
        (lambda: EMA(8, EMAConfig(truncation=0), causal=True), "truncation must be an integer >= 1, got 0"),
        (
            lambda: S4D(8, S4DConfig(d_state=5), causal=True),
            "d_state of S4D must be even (conjugate pairs), got 5",
        ),
        (
            lambda: S4D(8, S4DConfig(init="hippo"), causal=True),  # type: ignore[arg-type]
            "init must be one of legs, lin, inv, inv-lin; got 'hippo'",
        ),
        (
            lambda: S4D(8, S4DConfig(dt_min=0.2), causal=True),
            "dt_min and dt_max must satisfy 0 < dt_min <= dt_max, got 0.2, 0.1",
        ),
        (
            lambda: SparseModularActivation(nn.Linear(8, 8), 8, SigmoidRouter(8, 3)),
            "router decides for 3 modules of width 8, but there are 1 modules of width 8",
        ),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:50] if isinstance(value, str) else "",
)
def test_configurations(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


CAUSAL = SeqBoatConfig(ssm=SMALL_EMA, gau=SMALL_GAU, causal=True)
TOKENS = BackboneConfig(mixer=CAUSAL, d_model=D_MODEL, num_layers=2, vocab=11)
VALUES = replace(TOKENS, vocab=None, channels=3)
IDS = torch.randint(0, 11, (2, 5))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: replace(TOKENS, d_model=0), "d_model must be an integer >= 1, got 0"),
        (lambda: replace(TOKENS, num_layers=0), "num_layers must be an integer >= 1, got 0"),
        (lambda: replace(TOKENS, vocab=0), "vocab must be an integer >= 1, got 0"),
        (lambda: replace(TOKENS, channels=0), "channels must be an integer >= 1, got 0"),
        (lambda: replace(TOKENS, dropout=1.5), "dropout must be in [0, 1), got 1.5"),
        (lambda: Classifier(TOKENS, 0), "classes must be an integer >= 1, got 0"),
        (lambda: LanguageModel(VALUES), "a language model needs a vocab, got None"),
        (
            lambda: LanguageModel(replace(TOKENS, mixer=replace(CAUSAL, causal=False))),
            "a language model needs causal mixers: set causal=True",
        ),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:50] if isinstance(value, str) else "",
)
def test_model_configurations(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def raises(message: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(message))


def test_inputs_of_a_token_model() -> None:
    model = LanguageModel(TOKENS)
    ids = "inputs must be integer token ids of shape (batch, time), got "
    with raises(ids + "torch.float32 of shape (2, 5)"):
        model(IDS.float())
    with raises(ids + "torch.int64 of shape (5,)"):
        model(IDS[0])
    with raises(ids + "torch.int64 of shape (2, 5, 1)"):
        model(IDS[..., None])
    with raises("inputs must be a tensor, got list"):
        model(IDS.tolist())
    with raises("inputs are on meta but the model is on cpu"):
        model(IDS.to("meta"))
    for wrong in (11, -1):
        bad = IDS.clone()
        bad[1, 3] = wrong
        with raises(f"inputs must be token ids in 0..10, got {wrong}"):
            model(bad)
        with raises(f"inputs must be token ids in 0..10, got {wrong}"):
            model.step(bad[:, 3], model.init_state(2))
    # padding may hold any id
    bad = IDS.clone()
    bad[:, 4:] = -100
    mask = REAL.clone()
    mask[:, 4:] = False
    assert model(bad, mask).logits.isfinite().all()


def test_masks_of_a_model() -> None:
    model = LanguageModel(TOKENS)
    with raises("mask must have shape (batch, time) = (2, 5), got (1, 5)"):
        model(IDS, REAL[:1])
    with raises("mask must be a bool tensor, True on real tokens; got torch.int64"):
        model(IDS, REAL.long())
    with raises("mask is on meta but its sequence is on cpu"):
        model(IDS, REAL.to("meta"))
    with raises("mask must be a tensor, got list"):
        model(IDS, REAL.tolist())


def test_inputs_of_a_model_of_real_values() -> None:
    model = Classifier(VALUES, 4)
    want = "inputs must be floating point of shape (batch, time, 3), got "
    with raises(want + "torch.float32 of shape (2, 5, 1)"):
        model(torch.randn(2, 5, 1))
    with raises(want + "torch.float32 of shape (2, 5)"):
        model(torch.randn(2, 5))
    with raises(want + "torch.int64 of shape (2, 5, 3)"):
        model(torch.ones(2, 5, 3, dtype=torch.int64))
    with raises("inputs must be torch.float32 like the model, got torch.float64"):
        model(torch.randn(2, 5, 3, dtype=torch.float64))


def test_pairs_of_a_matcher() -> None:
    model = Matcher(TOKENS)
    with raises("first and second must hold the same number of sequences, got 2 and 1"):
        model(IDS, IDS[:1])


def test_states_and_steps_of_a_model() -> None:
    model = LanguageModel(TOKENS)
    state = model.init_state(2)
    with raises("the state is of 3 sequences, but there are 2"):
        model(IDS, state=model.init_state(3))
    with raises("state of another model: it must be a BackboneState of 2 layers"):
        model(IDS, state=LanguageModel(replace(TOKENS, num_layers=1)).init_state(2))
    with raises("state of another model: it must be a BackboneState of 2 layers, got tuple"):
        model(IDS, state=())
    token: Tensor = IDS[:, 0]
    with raises("inputs must be integer token ids of shape (batch,), got torch.int64 of shape (2, 5)"):
        model.step(IDS, state)
    with raises("the state is of 2 sequences, but there are 1"):
        model.step(token[:1], state)
    encoder = Classifier(replace(TOKENS, mixer=replace(CAUSAL, causal=False)), 3).backbone
    with raises("this model is bidirectional: only causal models carry a state"):
        encoder(IDS, state=state)
    with raises("this model is bidirectional: only causal models carry a state"):
        encoder.init_state(2)
    with raises("this model is bidirectional: only causal models carry a state"):
        encoder.step(token, state)
