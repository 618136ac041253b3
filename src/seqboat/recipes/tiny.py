"""Tiny variants: two narrow layers on the data of the small variants, for comparisons of many models.

The small variants need about ten minutes of a core each before they show anything. These leave chance on most tasks
within one minute, so that fifteen models on eight tasks, with a search for the learning rate, fit into an afternoon
(`seqboat reproduce tables --scale small`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.recipes import enwik8, lra, speech
from seqboat.recipes.base import MixerChoice, choose
from seqboat.training.config import RunConfig


def _tiny(
    small: RunConfig, mixer: MixerChoice, *, width: int = 32, task: dict[str, Any] | None = None, **model: Any
) -> RunConfig:
    """A small variant with two layers of this width; queries are half as wide, values twice."""
    own = cast(SeqBoatConfig, small.model.mixer)
    narrow = replace(own, gau=replace(own.gau, d_z=width // 2, d_v=2 * width))
    changed = {"d_model": width, "num_layers": 2, "mixer": choose(mixer, narrow), **model}
    return small.replace(model=changed, task=task or {})


def listops(mixer: MixerChoice = None) -> RunConfig:
    """ListOps of up to 128 tokens in two layers of width 32.

    Cut from the small variant: 2 layers of width 32 instead of 4 of 64.
    """
    return _tiny(lra.listops_small(), mixer)


def text(mixer: MixerChoice = None) -> RunConfig:
    """Text with reviews cut to 512 bytes in two layers of width 32.

    Cut from the small variant: width 32 instead of 64.
    """
    return _tiny(lra.text_small(), mixer)


def retrieval(mixer: MixerChoice = None) -> RunConfig:
    """Retrieval with documents cut to 256 bytes in two layers of width 32, with n-grams.

    Cut from the small variant: width 32 instead of 64. Added: every byte also reads the embeddings of the last 3, 4
    and 5 bytes; without them every model stays at chance in a minute.
    """
    return _tiny(lra.retrieval_small(), mixer, ngrams=(3, 4, 5), ngram_buckets=4096)


def image(mixer: MixerChoice = None) -> RunConfig:
    """Image at 16 x 16 pixels in two layers of width 32.

    Cut from the small variant: 2 layers of width 32 instead of 4 of 64.
    """
    return _tiny(lra.image_small(), mixer)


def pathfinder(mixer: MixerChoice = None) -> RunConfig:
    """Pathfinder at 16 x 16 pixels in two layers of width 32.

    Cut from the small variant: 2 layers of width 32 instead of 4 of 64.
    """
    return _tiny(lra.pathfinder_small(), mixer)


def pathx(mixer: MixerChoice = None) -> RunConfig:
    """Path-X at 32 x 32 pixels in two layers of width 32.

    Cut from the small variant: width 32 instead of 64, working memory 64 instead of 128. Changed: the moving average
    and the learning rate of the full-size recipe.
    """
    paper = lra.pathfinder_mixer(window=64, max_positions=1024)
    small = lra.pathx_small(paper).replace(optimizer={"lr": 0.01, "ssm_lr": None})
    return _tiny(small, mixer)


def speech_commands(mixer: MixerChoice = None) -> RunConfig:
    """Speech Commands at 1,000 averaged samples in two layers of width 32.

    Cut from the small variant: averages of 16 samples instead of 8, 2 layers of width 32 instead of 4 of 48.
    """
    return _tiny(speech.speech_small(), mixer, task={"pool": 16})


def enwik8_bytes(mixer: MixerChoice = None) -> RunConfig:
    """enwik8 in segments of 256 bytes in two layers of width 64.

    Cut from the small variant: 2 layers of width 64 instead of 3 of 128, segments of 256 bytes instead of 512.
    Changed: no model carries a state; segments come from random places, and the second half of each is scored.
    """
    small = enwik8.enwik8_small().replace(task={"segment": 256})
    return _tiny(small.by_segments(), mixer, width=64)
