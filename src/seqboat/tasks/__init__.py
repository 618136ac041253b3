"""Tasks: one file each, which reads the published file format or makes the data itself."""

from seqboat.core.settings import FAMILIES
from seqboat.own.task import ClassifyTaskConfig, RegressTaskConfig, TagTaskConfig
from seqboat.own.text import LMTextTaskConfig
from seqboat.tasks.diagnostics import CopyTaskConfig, NeedleTaskConfig, RecallTaskConfig
from seqboat.tasks.enwik8 import Enwik8TaskConfig
from seqboat.tasks.image import ImageTaskConfig
from seqboat.tasks.listops import ListOpsTaskConfig, ShortListOpsTaskConfig
from seqboat.tasks.pathfinder import PathfinderTaskConfig, PathXTaskConfig
from seqboat.tasks.retrieval import RetrievalTaskConfig
from seqboat.tasks.speech import SpeechTaskConfig
from seqboat.tasks.task import IGNORE, SPLITS, Batch, Dataset, Example, Loss, Split, Task, TaskConfig
from seqboat.tasks.text import TextTaskConfig

TASKS = {
    "listops": ListOpsTaskConfig,
    "text": TextTaskConfig,
    "retrieval": RetrievalTaskConfig,
    "image": ImageTaskConfig,
    "pathfinder": PathfinderTaskConfig,
    "pathx": PathXTaskConfig,
    "speech": SpeechTaskConfig,
    "enwik8": Enwik8TaskConfig,
    "listops-drawn": ShortListOpsTaskConfig,
    "recall": RecallTaskConfig,
    "copy": CopyTaskConfig,
    "needle": NeedleTaskConfig,
    "classify": ClassifyTaskConfig,
    "regress": RegressTaskConfig,
    "tag": TagTaskConfig,
    "lmtext": LMTextTaskConfig,
}
"""Every task by the name that commands use: a configuration class with defaults for every field."""
FAMILIES[TaskConfig] = TASKS

__all__ = [
    "IGNORE",
    "SPLITS",
    "TASKS",
    "Batch",
    "ClassifyTaskConfig",
    "CopyTaskConfig",
    "Dataset",
    "Enwik8TaskConfig",
    "Example",
    "ImageTaskConfig",
    "LMTextTaskConfig",
    "ListOpsTaskConfig",
    "Loss",
    "NeedleTaskConfig",
    "PathXTaskConfig",
    "PathfinderTaskConfig",
    "RecallTaskConfig",
    "RegressTaskConfig",
    "RetrievalTaskConfig",
    "ShortListOpsTaskConfig",
    "SpeechTaskConfig",
    "Split",
    "TagTaskConfig",
    "Task",
    "TaskConfig",
    "TextTaskConfig",
]
