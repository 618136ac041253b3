"""General steps of any version of the package, a round for every line on standard input: a part of `decoding.py`.

    PYTHONPATH=TREE/src python benchmarks/general_steps.py MODEL.pt THREADS

It uses public names alone, so that earlier versions can run it. The file has `config`, the sizes of the model,
`weights`, the `prompt` to read first and the `tokens` of every round. The first line of the answer is the folder that
the package came from; each further one has the wall time and the processor time of a round in seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import seqboat
from seqboat import BackboneConfig, EMAConfig, GAUConfig, LanguageModel, SeqBoatConfig

CHUNK = 1024
"""Tokens of the prompt read at a time."""


def build(config: dict[str, Any]) -> LanguageModel:
    """A language model with the layers of the paper's, in the given sizes."""
    gau = GAUConfig(d_z=config["d_z"], d_v=config["d_v"], window=config["window"], positions="rotary")
    mixer = SeqBoatConfig(ssm=EMAConfig(d_state=config["d_state"]), gau=gau, causal=True, prenorm=True)
    sizes = {name: config[name] for name in ("d_model", "num_layers", "vocab")}
    return LanguageModel(BackboneConfig(mixer=mixer, **sizes)).eval()


@torch.inference_mode()
def main(path: str, threads: int) -> None:
    torch.set_num_threads(threads)
    given = torch.load(path)
    model = build(given["config"])
    model.load_state_dict(given["weights"])
    state = model.init_state(1)
    for piece in given["prompt"].split(CHUNK, dim=1):
        state = model(piece, None, state).state
    print(json.dumps(str(seqboat.__path__[0])), flush=True)
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        for token in given["tokens"].unbind(1):
            state = model.step(token, state, inplace=True).state
        print(json.dumps([time.perf_counter() - began, time.process_time() - used]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
