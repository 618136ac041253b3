"""What the numbers of a run may depend on: versions, the device, and the commit of the code."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import safetensors
import torch

from seqboat.plugins import loaded_plugins
from seqboat.version import __version__


def versions() -> dict[str, str]:
    """Versions of the libraries that compute, and of the packages of plug-ins."""
    plugins = {plugin.package: plugin.version or "" for plugin in loaded_plugins() if plugin.package}
    return {
        **plugins,
        "seqboat": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """What computes: "cpu", or the model of a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def commit() -> str | None:
    """The commit of the working copy that this package is in, if it is in one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
