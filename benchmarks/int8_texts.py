"""How many greedy texts stay the same after rounding the weights of a model to int8, and where the others part.

    python benchmarks/int8_texts.py                                  the small bundled model, its own prompts
    python benchmarks/int8_texts.py --run runs/lm --text notes.txt   prompts from a file, at even distances
    python benchmarks/int8_texts.py --half                           everything in int8

Given the same text before it, a byte differs only where the two most likely ones are close; after the first such
byte, the texts go separate ways. So both are counted: texts that are the same to the end, and bytes that are the same
when both models read the text of the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from seqboat.inference.int8 import code_types, is_quantized, put_codes, quantize, quantize_rows
from seqboat.models.heads import LanguageModel
from seqboat.run import Run
from seqboat.text.generate import SamplingConfig, generate

OPENINGS = (
    "The history of", "In mathematics,", "The capital of", "'''Albert Einstein''' was", "[[Category:",
    "== External links ==\n*", "During the Second World War,", "A computer is", "The population of the city",
    "Music of the", "He was born in", "The language is spoken", "The river", "According to the Bible,",
    "In 1969, the", "The film was", "[[Image:", "Some scientists believe", "The president of the", "Water is",
)  # fmt: skip
"""Prompts where no text is given."""
HALF = ("embedding", "linear")
"""Last names of the matrices that `quantize` leaves in half precision."""
GREEDY = SamplingConfig(greedy=True)


class Pair(NamedTuple):
    """What both models wrote after a prompt."""

    prompt: bytes
    before: bytes
    after: bytes
    same_bytes: int
    """bytes of the first text that the second model would write too, given all before them"""

    @property
    def common(self) -> int:
        """Bytes until the texts part."""
        pairs = zip(self.before, self.after, strict=True)
        return next((at for at, (one, two) in enumerate(pairs) if one != two), len(self.before))


def write(model: LanguageModel, prompts: list[bytes], length: int) -> list[bytes]:
    """Greedy texts, each as it is alone."""
    return [generate(model, p, max_new_bytes=length, sampling=GREEDY)[0].data for p in prompts]


@torch.inference_mode()
def compare(
    model: LanguageModel, prompts: list[bytes], length: int, half: Sequence[str] = HALF
) -> list[Pair]:
    """Write with the model, round it in place, and write again; `half` names what stays in half precision."""
    before = write(model, prompts, length)
    for name, dtype in code_types(model).items():
        if dtype == torch.float16 and name.rpartition(".")[2] not in half:
            put_codes(model, name, *quantize_rows(model.get_submodule(name).weight))  # type: ignore[arg-type]
    quantize(model)
    after = write(model, prompts, length)
    pairs = []
    for prompt, one, two in zip(prompts, before, after, strict=True):
        ids = torch.tensor([list(prompt + one)])
        chosen = model(ids).logits[0, len(prompt) - 1 : -1].argmax(dim=-1)
        pairs.append(Pair(prompt, one, two, int((chosen == ids[0, len(prompt) :]).sum())))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="enwik8-small", help="a run or bundled model that is not rounded")
    parser.add_argument("--text", type=Path, help="take prompts of 40 bytes from this file")
    parser.add_argument("--prompts", type=int, default=len(OPENINGS), help="with --text: how many")
    parser.add_argument(
        "--half", nargs="*", choices=HALF, default=HALF, help="what stays in half precision (both)"
    )
    parser.add_argument("--bytes", type=int, default=100, help="length of every text")
    options = parser.parse_args()
    prompts = [opening.encode() for opening in OPENINGS]
    if options.text is not None:
        data = options.text.read_bytes()
        places = [len(data) * number // options.prompts for number in range(options.prompts)]
        prompts = [data[place : place + 40] for place in places]
    torch.set_num_threads(1)
    model: Any = Run(options.run).language_model
    if is_quantized(model):
        parser.error(f"{options.run} has int8 weights already")
    pairs = compare(model, prompts, options.bytes, options.half)
    for pair in pairs:
        if pair.common < len(pair.before):
            where = slice(max(0, pair.common - 20), pair.common + 20)
            print(f"{pair.prompt!r}, byte {pair.common}:\n  {pair.before[where]!r}\n  {pair.after[where]!r}")
    same = sum(pair.before == pair.after for pair in pairs)
    kept, count = sum(pair.same_bytes for pair in pairs), sum(len(pair.before) for pair in pairs)
    print(
        f"{same} of {len(pairs)} texts are the same; {kept} of {count} bytes, given the same text before them"
    )


if __name__ == "__main__":
    main()
