"""`seqboat demo`: train a small model on ListOps and show what it did."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    raise NotImplementedError
