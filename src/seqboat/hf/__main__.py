"""Run another program with our models registered: `python -m seqboat.hf MODULE ARGUMENTS...`.

Programs that load models by their Auto class, such as evaluation harnesses and the server of transformers, do not
import this package. This imports it, then runs the program like `python -m MODULE ARGUMENTS...`.
"""

from __future__ import annotations

import runpy
import sys

import transformers

import seqboat.hf

USAGE = "usage: python -m seqboat.hf MODULE [ARGUMENTS...]"


def main() -> int:
    """Run the module; it reads its arguments from sys.argv."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    # the server of transformers looks classes up by name in the library itself
    for name in seqboat.hf.__all__:
        setattr(transformers, name, getattr(seqboat.hf, name))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
