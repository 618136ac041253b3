"""Transformer-XL and Adaptive Span on enwik8: the settings of their published scripts.

- Transformer-XL: `run_enwik8_base.sh` of kimiyoung/transformer-xl. Evaluation there remembers 2,100 tokens; ours
  remembers as many as training, unless `--model.mixer.memory` says more.
- Adaptive Span: `enwik8.sh` of facebookresearch/adaptive-span, whose layers share one table of distances.

Both read contiguous text in segments of 512 bytes and carry their memory along.
"""

from __future__ import annotations

from seqboat.mixers.adaptive_span import AdaptiveSpanConfig
from seqboat.mixers.transformer_xl import TransformerXLConfig
from seqboat.recipes.rows.base import Settings
from seqboat.training.optim import OptimizerConfig, ScheduleConfig

TRANSFORMER_XL = Settings(
    TransformerXLConfig(heads=8, d_ff=2048, segment=512, memory=512, dropout=0.1),
    512,
    12,
    OptimizerConfig(lr=0.00025, betas=(0.9, 0.999), weight_decay=0.0, clip=0.25),
    ScheduleConfig(steps=400_000, warmup_steps=0, shape="cosine"),
    22,
    dropout=0.1,
)
ADAPTIVE_SPAN = Settings(
    AdaptiveSpanConfig(
        heads=8, d_ff=2048, max_span=8192, span_weight=5e-7, shared_distances=True, causal=True, dropout=0.3
    ),
    512,
    12,
    OptimizerConfig(name="adagrad", lr=0.07, weight_decay=0.0, clip=0.03),
    ScheduleConfig(steps=600_000, warmup_steps=32_000, warmup_from=0.0, shape="constant"),
    64,
)
SEGMENT = 512
"""Bytes of a segment."""
