"""Many texts in one batch: each as if it were alone, whenever others join and leave."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lm_runs import write_lm_run
from seqboat.cli.main import main
from seqboat.inference.lean import LeanModel
from seqboat.layers.policy import override_activation
from seqboat.models.heads import LanguageModel
from seqboat.run import Run
from seqboat.text.batch import BatchEngine, GeneralBatch
from seqboat.text.generate import best_of, generate, stream
from seqboat.text.sampling import SamplingConfig
from seqboat.text.scoring import score
from seqboat.text.session import Session, read, save_session, start
from test_generate import GREEDY, Parrot, make_model


def begun(model: LanguageModel, prompt: bytes) -> Session:
    return read(model, start(model), [prompt])


@pytest.mark.parametrize("name", ["memory", "full"])
def test_thirty_two_texts_are_those_of_each_alone(name: str) -> None:
    """Different prompts, lengths, settings and stop strings; places for a few at a time, so that they come and go."""
    model = make_model(name)
    draw = random.Random(0)
    texts = []
    for number in range(32):
        prompt = bytes(draw.choices(range(256), k=draw.randint(1, 30)))
        sampling = GREEDY if number % 3 == 0 else SamplingConfig(seed=number, temperature=0.5 + number / 16)
        if number % 5 == 1:
            sampling = SamplingConfig(seed=number, repetition_penalty=1.3)
        texts.append((prompt, draw.randint(1, 25), sampling, [b"e"] if number % 4 == 0 else []))
    alone = [
        generate(model, prompt, max_new_bytes=size, sampling=sampling, stop=stop)[0]
        for prompt, size, sampling, stop in texts
    ]
    engine = BatchEngine(model, capacity=7)
    numbers: list[int] = []
    shown: dict[int, str] = {}
    for prompt, size, sampling, stop in texts:
        session = begun(model, prompt)
        numbers += engine.add(session, max_new_bytes=size, sampling=sampling, stop=stop)
        if len(numbers) > 4:  # the others run already
            for piece in engine.step():
                shown[piece.row] = shown.get(piece.row, "") + piece.text
    while engine.running:
        for piece in engine.step():
            shown[piece.row] = shown.get(piece.row, "") + piece.text
    assert [engine.result(number) for number in numbers] == alone
    assert [shown.get(number, "") for number in numbers] == [one.text for one in alone]
    assert len({len(one.data) for one in alone}) > 5 and any(one.finish == "stop" for one in alone)


def test_a_text_may_leave_and_come_back() -> None:
    model = make_model()
    (whole,) = generate(model, "Of what", max_new_bytes=12, sampling=GREEDY)
    engine = BatchEngine(model, capacity=2)
    first, other = (
        engine.add(begun(model, p), max_new_bytes=12, sampling=GREEDY)[0] for p in (b"Of what", b"a")
    )
    (waits,) = engine.add(begun(model, b"b"))
    for _ in range(5):
        engine.step()
    part = engine.drop(first)
    assert whole.data.startswith(part.data) and len(part.data) == 5
    assert engine.drop(waits).data == b"" and engine.running == 1
    (later,) = engine.add(engine.session(first), max_new_bytes=7, sampling=GREEDY)
    while engine.running:
        engine.step()
    assert part.data + engine.result(later).data == whole.data
    assert engine.result(other) == generate(model, "a", max_new_bytes=12, sampling=GREEDY)[0]
    with pytest.raises(ValueError, match="there is no text 9: 4 were added"):
        engine.result(9)


def test_other_models_run_in_a_batch_too() -> None:
    """A model without a lean step takes the general one: the same texts, and memories that grow."""
    for model in (make_model("transformer"), Parrot(b"Pone two three")):
        engine = BatchEngine(model, capacity=2)
        numbers = [
            engine.add(begun(model, p), max_new_bytes=9, sampling=GREEDY)[0] for p in (b"P", b"Pone", b"Pon")
        ]
        while engine.running:
            engine.step()
            assert isinstance(engine._batch, GeneralBatch)
        for number, prompt in zip(numbers, ("P", "Pone", "Pon"), strict=True):
            assert engine.result(number) == generate(model, prompt, max_new_bytes=9, sampling=GREEDY)[0]


def test_an_override_in_the_middle_of_a_text_counts() -> None:
    model = make_model()
    texts = stream(model, "Of what", max_new_bytes=6, sampling=GREEDY)
    assert isinstance(texts._engine._batch, LeanModel) or texts._engine._batch is None
    next(texts)
    with override_activation(model, active=False):
        next(texts)
        assert isinstance(texts._engine._batch, GeneralBatch)
        quiet = texts.session.state.layers[0].sma.spent
        next(texts)
        assert torch.equal(texts.session.state.layers[0].sma.spent, quiet), "no token may attend here"


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
    text = torch.tensor(list(b"A prompt" + best.generation.data)).numpy()
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
    session = begun(model, b"Ein")
    less = session._replace(state=session.state._replace(layers=session.state.layers[:1]))
    save_session(tmp_path / "state", less, model)
    out = tmp_path / "out"
    command = ["generate", str(run), "--load-state", str(tmp_path / "state"), "--save-state", str(out)]
    assert main(command) == 2
    shown, error = capsys.readouterr()
    assert shown == "" and error.count("\n") == 1 and "state of another model" in error and not out.exists()
    assert "they differ in session.state.layers.1." in error and len(error) < 400
