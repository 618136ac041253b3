"""A template for plug-ins of seqboat: what commands and configurations call our parts."""

from seqboat_brackets.mixer import RunningMeanConfig
from seqboat_brackets.recipe import brackets
from seqboat_brackets.task import BracketsTaskConfig

MIXERS = {"running-mean": RunningMeanConfig}
TASKS = {"brackets": BracketsTaskConfig}
RECIPES = {"brackets": brackets}
