"""`seqboat generate`: stream text from a trained language model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqboat.cli.options import Shared
from seqboat.cli.parser import Count
from seqboat.console import printable, typed_bytes


def run(
    run: str | None = None,
    *,
    prompt: str | None = None,
    max_new_bytes: Count = 256,
    greedy: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    n: Count = 1,
    echo: bool = False,
    save_state: Path | None = None,
    load_state: Path | None = None,
    chunk: Count | None = None,
    shared: Shared,
) -> int:
    """Continue a text with a language model; the prompt is read from standard input unless it is given.

    Args:
        run: folder of a run, or a checkpoint in it (default: the bundled model).
        prompt: text to continue; - reads standard input.
        max_new_bytes: bytes to generate.
        greedy: always choose the most probable byte.
        temperature: values below 1 favor probable bytes (default: 1).
        top_k: sample from the K most probable bytes.
        top_p: sample from the most probable bytes whose total reaches P, in (0, 1].
        min_p: sample from bytes at least P times as probable as the most probable one.
        repetition_penalty: values above 1 make bytes that have occurred less likely (default: 1).
        seed: makes sampling repeatable.
        stop: stop before this text; may be given several times.
        n: texts to generate from one reading of the prompt; the likeliest is printed first.
        echo: print the prompt first.
        save_state: save the state at the end.
        load_state: continue from a saved state.
        chunk: bytes of the prompt to read at a time.

    examples:
      seqboat generate enwik8-small --prompt "The history of" --temperature 0.8 --seed 0
      seqboat generate RUN --prompt "Dear reader," --save-state letter.safetensors
      seqboat generate RUN --load-state letter.safetensors --prompt "Yours,"
    """
    from seqboat.text.generate import SamplingConfig

    # check what can be checked before a model is loaded
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    if temperature is not None and temperature <= 0:
        raise ValueError(
            f"--temperature must be above 0, got {temperature:g}; --greedy always takes the most probable byte"
        )
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    sampling = SamplingConfig(greedy=greedy, **chosen)
    if "" in stop:
        raise ValueError("--stop must not be empty")
    if n > 1 and save_state is not None:
        raise ValueError("--save-state keeps the state of one text: leave out --n")
    if n > 1 and greedy:
        raise ValueError("--greedy gives the same text every time: leave out --n")
    stops = [typed_bytes(word) for word in stop]
    start = read_prompt(prompt, load_state is not None)

    from seqboat.run import Run
    from seqboat.text.generate import best_of, stream
    from seqboat.text.session import CHUNK, check_state_path, load_session, save_session

    device = shared.chosen()
    if save_state is not None:
        check_state_path(save_state)
    model = Run(run, shared.which).language_model.to(device)
    session = None if load_state is None else load_session(load_state, model)
    if session is not None and session.batch != 1:
        raise ValueError(f"{load_state} holds {session.batch} texts, expected 1")
    settings: dict[str, Any] = {
        "max_new_bytes": max_new_bytes,
        "sampling": sampling,
        "stop": stops,
        "session": session,
        "chunk": chunk or CHUNK,
        "progress": show_progress if sys.stderr.isatty() and len(start) > CHUNK else None,
    }
    terminal = sys.stdout.isatty()
    if n > 1:
        for number, (text, bits) in enumerate(best_of(model, start, n, **settings), 1):
            shown = start.decode() + text.text if echo else text.text
            write(f"--- {number} of {n}, {bits:.3f} bits per byte\n{shown}\n", terminal)
        return 0
    texts = stream(model, start, **settings)
    if echo:
        write(start.decode(), terminal)
    try:
        for piece in texts:
            write(piece.text, terminal)
    finally:
        if terminal:
            # what comes next on the screen starts on a new line
            write("\n", terminal)
    if save_state is not None:
        save_session(save_state, texts.session, model)
    return 0


def read_prompt(given: str | None, continues: bool) -> bytes:
    """The prompt, from the command line or standard input; empty only where there is a state to continue from."""
    if given is not None and given != "-":
        prompt, source = typed_bytes(given), "--prompt"
    elif given is None and continues:
        return b""
    else:
        if sys.stdin is None or (given is None and sys.stdin.isatty()):
            raise ValueError("there is nothing to continue from: give --prompt TEXT, or pipe in a text")
        prompt, source = sys.stdin.buffer.read(), "standard input"
    if not prompt:
        raise ValueError(f"the prompt from {source} is empty: there must be something to continue from")
    try:
        prompt.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt from {source} is not UTF-8: byte {error.start} is 0x{prompt[error.start]:02x}"
        ) from None
    return prompt


def write(text: str, terminal: bool) -> None:
    """Show text at once, as UTF-8 whatever the locale; a terminal gets no control codes but line breaks and tabs."""
    if terminal:
        text = printable(text, lines=True, mark="\ufffd")
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def show_progress(done: int, size: int) -> None:
    """Count bytes of the prompt on one line of the terminal."""
    print(
        f"\rreading {done:,}/{size:,} bytes",
        end="\r\033[K" if done == size else "",
        file=sys.stderr,
        flush=True,
    )
