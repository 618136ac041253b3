"""The paper's tables and figures, at full size and as small variants for two cores; one file per table or figure.

    target = TARGETS["ablation"]
    for trial in target.trials("small"):
        trial.command()                 what to type for it
        trial.config(seed)              what that runs

`jobs.py` runs them, `results.py` keeps the numbers and writes the page. A new figure is a file with a Target, and
a line in the table below.
"""

from __future__ import annotations

from seqboat.paper.figure3 import ACTIVATION
from seqboat.paper.figure4 import CONFIDENCE
from seqboat.paper.figure5 import TRADEOFF
from seqboat.paper.figure6 import SPAN
from seqboat.paper.table6 import EFFICIENCY
from seqboat.paper.tables78 import ABLATION
from seqboat.paper.tables123 import ENWIK8, LRA, SPEECH
from seqboat.paper.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (LRA, SPEECH, ENWIK8, ABLATION, TRADEOFF, ACTIVATION, CONFIDENCE, SPAN, EFFICIENCY)
}
"""Every target of `seqboat paper run` by its name, in the order of the page."""

GROUPS = {
    "tables": ("lra", "speech", "enwik8"),
    "figures": ("activation", "confidence", "tradeoff", "span"),
}
"""Targets that have a name together."""
