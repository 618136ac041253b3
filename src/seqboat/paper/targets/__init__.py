"""The paper's tables and figures, at full size and as small variants for two cores; one file per kind.

    target = TARGETS["ablation"]
    for trial in target.trials("small"):
        trial.command()                 what to type for it
        trial.config(seed)              what that runs
    target.collect(job)                 what a finished run showed, as plain data
    target.show(scale, records, ...)    its tables and figures as lines of a page

A new figure is a file with a subclass of one of the three families in `base.py`, and a line in the table below.
"""

from __future__ import annotations

from seqboat.paper.figure3 import ACTIVATION
from seqboat.paper.figure4 import CONFIDENCE
from seqboat.paper.figure5 import TRADEOFF
from seqboat.paper.figure6 import SPAN
from seqboat.paper.table6 import EFFICIENCY
from seqboat.paper.tables78 import ABLATION
from seqboat.paper.tables123 import DIAGNOSTICS, ENWIK8, LRA, SPEECH
from seqboat.paper.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        LRA,
        SPEECH,
        ENWIK8,
        DIAGNOSTICS,
        ABLATION,
        TRADEOFF,
        ACTIVATION,
        CONFIDENCE,
        SPAN,
        EFFICIENCY,
    )
}
"""Every target of `seqboat reproduce` by its name, in the order of the page."""

GROUPS = {
    "tables": ("lra", "speech", "enwik8"),
    "figures": ("activation", "confidence", "tradeoff", "span"),
}
"""Targets that have a name together."""
