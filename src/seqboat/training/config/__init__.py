"""A run's configuration: dataclasses (fields), dictionaries and YAML (serialization), dotted names (overrides)."""

from seqboat.training.config.fields import (
    FREE_TO_CHANGE,
    Distributed,
    EvaluationConfig,
    Precision,
    RunConfig,
    TrackerName,
    TrainingConfig,
)
from seqboat.training.config.overrides import change_field, field_names, override, split_arguments
from seqboat.training.config.serialization import (
    difference,
    from_dict,
    from_yaml,
    part_from_dict,
    to_dict,
    to_yaml,
)

__all__ = [
    "FREE_TO_CHANGE",
    "Distributed",
    "EvaluationConfig",
    "Precision",
    "RunConfig",
    "TrackerName",
    "TrainingConfig",
    "change_field",
    "difference",
    "field_names",
    "from_dict",
    "from_yaml",
    "override",
    "part_from_dict",
    "split_arguments",
    "to_dict",
    "to_yaml",
]
