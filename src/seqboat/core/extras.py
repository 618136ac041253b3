"""Optional libraries: which extra installs them, and the message if one is missing."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "rich": ("rich", "lab"),
    "matplotlib": ("matplotlib", "lab"),
    "PIL": ("pillow", "lab"),
    "pyarrow": ("pyarrow", "lab"),
    "sklearn": ("scikit-learn", "lab"),
    "transformers": ("transformers", "hf"),
    "onnx": ("onnx", "onnx"),
    "onnxruntime": ("onnxruntime", "onnx"),
    "onnxscript": ("onnxscript", "onnx"),
}
"""By the name to import: the library's name, and the extra that has it."""


def missing(module: str, what: str) -> str:
    """The message that something needs a library.

    Args:
        module: the name to import.
        what: needs it.

    >>> missing("PIL", "--image")
    "--image needs pillow: pip install 'seqboat[lab]'"
    """
    library, extra = EXTRAS[module]
    return f"{what} needs {library}: pip install 'seqboat[{extra}]'"


def check_installed(module: str, what: str) -> None:
    """Raise an error early if a library is missing."""
    if find_spec(module) is None:
        raise ValueError(missing(module, what))
