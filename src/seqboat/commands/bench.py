"""`seqboat bench`: time and memory of mixers."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    raise NotImplementedError
