"""`seqboat generate`: stream text from a trained language model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from seqboat.console import printable, typed_bytes

EPILOG = """\
The text is streamed. The prompt is printed only with --echo. Without --prompt, it is read from standard input:

  seqboat generate RUN --prompt "The history of" --max-new-bytes 500 --temperature 0.8 --seed 0
  seqboat generate RUN < book.txt
  seqboat generate RUN --prompt "Dear reader," --save-state letter.safetensors
  seqboat generate RUN --load-state letter.safetensors
  seqboat generate RUN --load-state letter.safetensors --prompt "Yours,"
  seqboat generate RUN --prompt "The history of" --n 8 --seed 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "run", nargs="?", help="folder of a run, or one checkpoint in it (default: the bundled model)"
    )
    parser.add_argument("--which", choices=("best", "latest"), default="best", help="which checkpoint")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    parser.add_argument(
        "--max-new-bytes", type=int, default=256, metavar="N", help="bytes to generate (default: 256)"
    )
    parser.add_argument("--greedy", action="store_true", help="always choose the most probable byte")
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="values below 1 favor probable bytes (default: 1)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable bytes")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the most probable bytes whose total reaches P, in (0, 1]",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from bytes at least P times as probable as the most probable one",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="values above 1 make bytes that have occurred less likely (default: 1)",
    )
    parser.add_argument("--seed", type=int, help="seed that makes sampling repeatable")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be given several times",
    )
    parser.add_argument(
        "--n",
        type=int,
        default=1,
        metavar="N",
        help="number of texts to generate from one reading of the prompt; the likeliest is printed first",
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    parser.add_argument("--save-state", metavar="FILE", help="save the state at the end")
    parser.add_argument("--load-state", metavar="FILE", help="continue from a saved state")
    parser.add_argument("--chunk", type=int, metavar="N", help="bytes of the prompt to read at a time")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.text.generate import SamplingConfig

    # check what can be checked before a model is loaded
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.temperature is not None and options.temperature <= 0:
        raise ValueError(
            f"--temperature must be above 0, got {options.temperature:g}; "
            "--greedy always takes the most probable byte"
        )
    sampling = SamplingConfig(greedy=options.greedy, **given)
    for name in ("max_new_bytes", "chunk", "n"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be an integer >= 1, got {value}")
    if "" in options.stop:
        raise ValueError("--stop must not be empty")
    if options.n > 1 and options.save_state is not None:
        raise ValueError("--save-state keeps the state of one text: leave out --n")
    if options.n > 1 and options.greedy:
        raise ValueError("--greedy gives the same text every time: leave out --n")
    stops = [typed_bytes(stop) for stop in options.stop]
    prompt = read_prompt(options)

    from seqboat.run import Run
    from seqboat.text.generate import best_of, stream
    from seqboat.text.session import CHUNK, check_state_path, load_session, save_session
    from seqboat.training.parallel import choose_device

    device = choose_device(options.device, what="--device")
    if options.save_state is not None:
        check_state_path(Path(options.save_state))
    model = Run(options.run, options.which).language_model.to(device)
    session = None if options.load_state is None else load_session(options.load_state, model)
    if session is not None and session.batch != 1:
        raise ValueError(f"{options.load_state} holds {session.batch} texts, expected 1")
    settings: dict[str, Any] = {
        "max_new_bytes": options.max_new_bytes,
        "sampling": sampling,
        "stop": stops,
        "session": session,
        "chunk": options.chunk or CHUNK,
        "progress": show_progress if sys.stderr.isatty() and len(prompt) > CHUNK else None,
    }
    terminal = sys.stdout.isatty()
    if options.n > 1:
        for number, (text, bits) in enumerate(best_of(model, prompt, options.n, **settings), 1):
            shown = prompt.decode() + text.text if options.echo else text.text
            write(f"--- {number} of {options.n}, {bits:.3f} bits per byte\n{shown}\n", terminal)
        return 0
    texts = stream(model, prompt, **settings)
    if options.echo:
        write(prompt.decode(), terminal)
    try:
        for piece in texts:
            write(piece.text, terminal)
    finally:
        if terminal:
            # what comes next on the screen starts on a new line
            write("\n", terminal)
    if options.save_state is not None:
        save_session(options.save_state, texts.session, model)
    return 0


def read_prompt(options: argparse.Namespace) -> bytes:
    """The prompt, from the command line or standard input; empty only where there is a state to continue from."""
    if options.prompt is not None and options.prompt != "-":
        prompt, source = typed_bytes(options.prompt), "--prompt"
    elif options.prompt is None and options.load_state is not None:
        return b""
    else:
        if sys.stdin is None or (options.prompt is None and sys.stdin.isatty()):
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
