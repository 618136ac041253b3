"""What routers did: traces of single examples, measures of a whole split, interventions.

from seqboat.analysis import attention_weights, intervene, load_examples, measure_run, trace
"""

from __future__ import annotations

from seqboat.analysis.attention import attention_weights
from seqboat.analysis.interventions import intervene
from seqboat.analysis.measures import activation_curve, measure, measure_run
from seqboat.analysis.traces import load_examples, sites, trace

__all__ = [
    "activation_curve",
    "attention_weights",
    "intervene",
    "load_examples",
    "measure",
    "measure_run",
    "sites",
    "trace",
]
