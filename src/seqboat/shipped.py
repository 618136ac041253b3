"""Models that come with the package, and the compact form they have.

    models/NAME/
      README.md                the card: data, licence, size, scores
      best, latest             the name of the checkpoint
      step-N/
        model.safetensors      weights, in half precision
        state.json             step, configuration, sha256 of the weights

This is the folder of a run without what only training needs, so whatever uses the model of a run takes it too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from seqboat.checks import require
from seqboat.training.checkpoint import MODEL, Store
from seqboat.training.evaluate import find_checkpoint

MODELS = Path(__file__).parent / "models"
KEPT = ("config", "classes", "labels", "versions")
"""What of a checkpoint's state is needed to use its model."""


def shipped_models() -> dict[str, Path]:
    """The models that come with the package, by name."""
    found = sorted(MODELS.iterdir()) if MODELS.is_dir() else []
    return {path.name: path for path in found if (path / "best").is_file()}


def find_run(run: str | None) -> Path:
    """The folder that a user means: a run's, a shipped model's by name, or the first shipped one for None."""
    shipped = shipped_models()
    if run is None:
        require(len(shipped) > 0, "name the folder of a run: no model comes with this installation")
        return next(iter(shipped.values()))
    return shipped[run] if run in shipped and not Path(run).exists() else Path(run)


def pack_run(
    run: Path | str,
    folder: Path | str,
    which: str = "best",
    dtype: torch.dtype = torch.float16,
    card: str | None = None,
) -> Path:
    """Write a run's model in compact form.

    Args:
        run: its folder.
        folder: to make; must not hold anything yet.
        which: "best" or "latest".
        dtype: of the stored weights; the model is loaded in its own precision.
        card: text of README.md.

    Returns:
        The folder.
    """
    checkpoint = find_checkpoint(run, which)
    folder = Path(folder)
    require(not folder.exists() or not any(folder.iterdir()), f"{folder} must be empty or not exist")
    weights = {}
    for name, value in checkpoint.tensors(MODEL).items():
        weights[name] = value.to(dtype) if value.is_floating_point() else value
        fits = bool(weights[name].isfinite().all())
        require(fits, f"{name} does not fit into {dtype}: it holds values up to {float(value.abs().max()):g}")
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: checkpoint.state[key] for key in KEPT if key in checkpoint.state}
    saved = Store(folder).save(checkpoint.step, {MODEL: weights}, state, best=True)
    # weights are written for their owner alone, but a package is for everyone on the machine
    (saved / MODEL).chmod(0o644)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")
    return folder
