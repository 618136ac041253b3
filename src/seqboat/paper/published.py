"""Every number of the paper that we compare with, table by table.

    LRA["seqboat"].accuracy["image"]              table 1: 90.10
    SPEECH["seqboat"].accuracy                    table 2: 97.35
    ENWIK8["seqboat"].bits                        table 3: 1.02
    EFFICIENCY["text"].training["seqboat"]        table 6: 3.61 times MEGA's speed
    ABLATIONS["SeqBoat"]["ffn"].scores["image"]   table 8: 89.60 % at 1.13 times MEGA's speed

Models have the names of our mixers, tasks those of our recipes. Accuracies are in percent, as printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LRA_TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
"""The columns of tables 1 and 6."""
TITLES = {
    "listops": "ListOps",
    "text": "Text",
    "retrieval": "Retrieval",
    "image": "Image",
    "pathfinder": "Pathfinder",
    "pathx": "Path-X",
    "speech": "Speech Commands",
}
"""Tasks as tables name them, where that is not their short name."""
CHANCE = {
    "listops": 0.1,
    "text": 0.5,
    "retrieval": 0.5,
    "image": 0.1,
    "pathfinder": 0.5,
    "pathx": 0.5,
    "speech": 0.1,
}
"""The accuracy of guessing."""


class LRAScores(NamedTuple):
    """A row of table 1."""

    accuracy: dict[str, float | None]
    """by task; None where the model does not beat chance"""
    average: float
    """as printed: over the tasks with a score"""
    speed: float
    """of training on Text with 4,096 tokens, as a multiple of the Transformer's"""
    memory: float
    """of training on Text, likewise"""


def _lra(*scores: float | None, average: float, speed: float, memory: float) -> LRAScores:
    return LRAScores(dict(zip(LRA_TASKS, scores, strict=True)), average, speed, memory)


LRA = {
    "transformer": _lra(37.11, 65.21, 79.14, 42.94, 71.83, None, average=59.24, speed=1.0, memory=1.0),
    "mega": _lra(63.14, 90.43, 91.25, 90.44, 96.01, 97.98, average=88.21, speed=2.9, memory=0.31),
    "reformer": _lra(37.27, 56.10, 53.40, 38.07, 68.50, None, average=50.67, speed=0.8, memory=0.24),
    "bigbird": _lra(36.05, 64.02, 59.29, 40.83, 74.87, None, average=55.01, speed=1.1, memory=0.30),
    "seqboat-full": _lra(61.65, 89.60, 91.67, 89.96, 95.87, 95.28, average=87.33, speed=6.2, memory=0.07),
    "performer": _lra(18.01, 65.40, 53.82, 42.77, 77.05, None, average=51.41, speed=5.7, memory=0.11),
    "linformer": _lra(35.70, 53.94, 52.27, 38.56, 76.34, None, average=51.36, speed=5.5, memory=0.10),
    "luna": _lra(37.98, 65.78, 79.56, 47.86, 78.55, None, average=61.95, speed=4.9, memory=0.16),
    "s4": _lra(59.10, 86.53, 90.94, 88.48, 94.01, 96.07, average=85.86, speed=4.8, memory=0.14),
    "s4d": _lra(60.47, 86.18, 89.46, 88.19, 93.06, 91.95, average=84.89, speed=6.1, memory=0.14),
    "s5": _lra(62.15, 89.31, 91.40, 88.00, 95.33, 98.58, average=87.46, speed=6.1, memory=0.14),
    "liquid-s4": _lra(62.75, 89.02, 91.20, 89.50, 94.8, 96.66, average=87.32, speed=1.2, memory=0.17),
    "h3": _lra(57.50, 88.20, 91.00, 87.30, 93.00, 91.80, average=84.80, speed=6.0, memory=0.24),
    "mega-chunk": _lra(58.76, 90.19, 90.97, 85.80, 94.41, 93.81, average=85.66, speed=7.0, memory=0.09),
    "seqboat": _lra(61.70, 89.60, 91.28, 90.10, 96.35, 96.68, average=87.62, speed=10.4, memory=0.05),
}
"""Table 1: the Long Range Arena."""
LRA_SPEED_LENGTH = 4096
"""Tokens of a sequence for the speed and memory of table 1."""


class SpeechScores(NamedTuple):
    """A row of table 2."""

    parameters: int
    accuracy: float
    speed: float | None = None
    """of training, as a multiple of MEGA-chunk's"""
    memory: float | None = None


SPEECH = {
    "s4": SpeechScores(300_000, 97.50),
    "mega-chunk": SpeechScores(300_000, 96.92, 1.00, 1.00),
    "seqboat": SpeechScores(293_000, 97.35, 1.32, 0.44),
}
"""Table 2: Speech Commands, ten classes of raw audio with 16,000 samples."""


class LanguageModelScores(NamedTuple):
    """A row of table 3."""

    parameters: int
    bits: float
    """per character"""
    speed: float | None = None
    """of training, as a multiple of MEGA-chunk's"""
    memory: float | None = None


ENWIK8 = {
    "transformer-xl": LanguageModelScores(41_000_000, 1.06),
    "adaptive-span": LanguageModelScores(39_000_000, 1.02),
    "mega-chunk": LanguageModelScores(39_000_000, 1.02, 1.00, 1.00),
    "seqboat": LanguageModelScores(39_000_000, 1.02, 1.16, 1.07),
}
"""Table 3: the test split of enwik8, sequences of 8,192 bytes."""


def published_score(table: str, row: str, task: str) -> float | None:
    """The number of a row of tables 1 to 3 on a task; None where the model does not beat chance.

    >>> published_score("lra", "mega-chunk", "image"), published_score("enwik8", "seqboat", "enwik8")
    (85.8, 1.02)

    Args:
        table: lra, speech or enwik8.
        row: the name of a mixer, as in `recipes.rows.ROWS`.
        task: of the table.
    """
    if table == "lra":
        return LRA[row].accuracy[task]
    return SPEECH[row].accuracy if table == "speech" else ENWIK8[row].bits


def published_parameters(table: str, row: str) -> int | None:
    """The printed size of a model; table 1 has none."""
    if table == "lra":
        return None
    return (SPEECH if table == "speech" else ENWIK8)[row].parameters


EFFICIENCY_MODELS = {
    "mega": "MEGA",
    "mega-chunk": "MEGA-chunk",
    "seqboat-full": "SeqBoat-full",
    "seqboat": "SeqBoat",
}
"""The rows of table 6 and their titles; the others are compared with the first."""


class TaskEfficiency(NamedTuple):
    """A column of table 6: multiples of MEGA, by model."""

    length: int
    """tokens of a sequence"""
    training: dict[str, float]
    """speed of a training step"""
    memory: dict[str, float]
    """of a training step"""
    evaluation: dict[str, float]
    """speed of an evaluation step"""


_Ratios = tuple[float, float, float, float]


def _efficiency(length: int, training: _Ratios, memory: _Ratios, evaluation: _Ratios) -> TaskEfficiency:
    blocks = (dict(zip(EFFICIENCY_MODELS, ratios, strict=True)) for ratios in (training, memory, evaluation))
    return TaskEfficiency(length, *blocks)


EFFICIENCY = {
    "listops": _efficiency(2048, (1.00, 2.07, 1.79, 2.26), (1.00, 0.34, 0.45, 0.20), (1.00, 2.15, 1.70, 2.67)),
    "text": _efficiency(4096, (1.00, 2.42, 2.14, 3.61), (1.00, 0.29, 0.23, 0.16), (1.00, 2.33, 2.47, 3.55)),
    "retrieval": _efficiency(4000, (1.00, 2.66, 2.44, 2.50), (1.00, 0.31, 0.27, 0.23), (1.00, 2.57, 2.59, 2.69)),
    "image": _efficiency(1024, (1.00, 1.39, 1.45, 1.33), (1.00, 0.75, 0.74, 0.74), (1.00, 1.48, 1.52, 1.43)),
    "pathfinder": _efficiency(1024, (1.00, 1.46, 1.27, 1.31), (1.00, 0.69, 0.68, 0.70), (1.00, 1.50, 1.30, 1.38)),
    "pathx": _efficiency(16384, (1.00, 1.36, 1.24, 1.30), (1.00, 0.82, 0.59, 0.89), (1.00, 2.52, 1.95, 1.93)),
}  # fmt: skip
"""Table 6: speed and memory by task of the Long Range Arena."""


class AblationScore(NamedTuple):
    """One cell pair of tables 7 and 8."""

    accuracy: float
    """on the validation split"""
    speed: float
    """of training, as a multiple of MEGA's"""


class Ablation(NamedTuple):
    """A row of tables 7 and 8."""

    title: str
    scores: Mapping[str, AblationScore]
    """by task"""


def _ablation(title: str, **scores: tuple[float, float]) -> Ablation:
    return Ablation(title, {task: AblationScore(*pair) for task, pair in scores.items()})


ABLATIONS = {
    "SeqBoat-full": {
        "full": _ablation("SeqBoat-full", image=(90.16, 1.45), listops=(60.95, 1.79)),
        "full-always": _ablation("- always activated", image=(90.70, 1.25), listops=(62.10, 1.11)),
        "full-gumbel": _ablation("- Gumbel softmax", image=(89.94, 1.29), listops=(59.75, 1.76)),
        "full-s4d": _ablation("- SSM with S4D", image=(82.84, 1.88), listops=(59.25, 2.45)),
    },
    "SeqBoat": {
        "": _ablation("SeqBoat", image=(90.36, 1.33), listops=(59.05, 2.26), pathfinder=(96.34, 1.31)),
        "ffn": _ablation("SeqBoat-FFN", image=(89.60, 1.13), listops=(56.45, 2.05), pathfinder=(96.62, 0.97)),
        "gau-ffn": _ablation(
            "SeqBoat-{GAU, FFN}", image=(89.74, 1.20), listops=(59.10, 1.97), pathfinder=(96.10, 1.06)
        ),
        "sigmoid": _ablation(
            "SeqBoat-Sigmoid", image=(87.34, 1.77), listops=(58.20, 2.52), pathfinder=(91.35, 1.67)
        ),
        "moe": _ablation("SeqBoat-MoE", image=(85.60, 1.66), listops=(58.10, 2.19), pathfinder=(91.41, 1.80)),
        "local": _ablation(
            "SeqBoat-local", image=(90.12, 1.46), listops=(59.00, 1.78), pathfinder=(96.08, 1.54)
        ),
        "chunk": _ablation(
            "SeqBoat-chunk", image=(86.46, 2.17), listops=(58.35, 2.79), pathfinder=(93.91, 2.97)
        ),
        "mem32": _ablation(
            "SeqBoat-mem32", image=(78.16, 1.73), listops=(58.70, 2.14), pathfinder=(92.97, 1.86)
        ),
        "local32": _ablation(
            "SeqBoat-local32", image=(75.58, 1.67), listops=(53.90, 2.19), pathfinder=(82.05, 1.80)
        ),
    },
}
"""Tables 7 and 8, by table and row."""

TRADEOFF = (
    "The paper finds MEGA-chunk at chance on Pathfinder with chunks below 128, and SeqBoat near 90 % with a memory "
    "of 16."
)
"""What figure 5 shows, in words: its points are not printed as numbers."""
OBSERVED_SEQUENCES = 100
"""Sequences of the validation split that figures 3 and 6 look at."""
