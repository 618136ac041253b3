"""Libraries that the core does without: which extra brings them, and what to say where they are missing."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "rich": ("rich", "cli"),
    "yaml": ("pyyaml", "train"),
    "matplotlib": ("matplotlib", "report"),
    "transformers": ("transformers", "hf"),
    "PIL": ("pillow", "image"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
}
"""By the name to import: the library's name, and the extra that has it."""


def missing(module: str, what: str) -> str:
    """What to say where something cannot be had without a library.

    Args:
        module: the name to import.
        what: needs it.

    >>> missing("PIL", "--image")
    "--image needs pillow: install seqboat with its extra 'image'"
    """
    library, extra = EXTRAS[module]
    return f"{what} needs {library}: install seqboat with its extra '{extra}'"


def check_installed(module: str, what: str) -> None:
    """Refuse what could not be done without a library, before work is done for it."""
    if find_spec(module) is None:
        raise ValueError(missing(module, what))
