"""Stores what `test_golden_library.py` and `test_lab_golden.py` compare. It was run once, before the rebuilding.

python tests/make_golden.py                    the files that do not exist yet
python tests/make_golden.py configurations     a part of the lab's file again, also: orders, generated, losses
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import lab_golden_cases as lab_cases
from golden_cases import (
    CASES,
    FOLDER,
    PROMPTS,
    RETROFITS,
    Case,
    Found,
    bits_of,
    bundled_model,
    greedy_bytes,
    int8_numbers,
    model_numbers,
    retrofit_numbers,
    text_of,
    transformers_tokens,
)


def find_seed(case: Case) -> tuple[int, Found]:
    """The first seed whose decisions have margins, with numbers that are neither huge nor nothing."""
    for seed in range(200):
        found = case(seed)
        sound = all(
            part.isfinite().all() and part.abs().max() < 1e6 for part in found.values() if part.numel()
        )
        if not sound:
            continue
        if "active" not in found:
            return seed, found
        moved = case(seed, moved=True)
        same = torch.equal(found["active"], moved["active"])
        probs = found.get("probs")
        clear = probs is None or "hand" in case.name or bool(((probs - 0.5).abs() > 1e-3).all())
        share = found["active"].double().mean()
        mixed = "always" in case.name or "hand" in case.name or 0.02 < share < 0.98 or seed > 100
        if same and clear and mixed:
            return seed, found
    raise SystemExit(f"{case}: no seed with margins")


def bundled() -> dict[str, Tensor]:
    model = bundled_model().eval()
    found = model_numbers(double=True)
    texts = greedy_bytes(model, PROMPTS, 64)
    found["greedy"] = torch.tensor([list(text) for text in texts], dtype=torch.uint8)
    found["bits"] = torch.tensor([bits_of(model, text_of(10_000, 1))], dtype=torch.float64)
    for beams, padded in ((1, False), (1, True), (3, False), (3, True)):
        found[f"tokens-{beams}-{padded}"] = transformers_tokens(beams, padded).to(torch.uint8)
    return found


def lab(again: Sequence[str]) -> None:
    """The lab's file; parts that it has stay unless they are asked for."""
    parts: dict[str, Callable[[], Any]] = {
        "configurations": lab_cases.configurations,
        "orders": lab_cases.orders,
        "generated": lab_cases.generated,
        "losses": _losses,
    }
    found = lab_cases.stored() if lab_cases.FILE.exists() else {}
    missing = [name for name in parts if name in again or name not in found]
    if missing:
        found |= {name: parts[name]() for name in missing}
        data = json.dumps(found, sort_keys=True).encode()
        lab_cases.FILE.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
        print(lab_cases.FILE.name, lab_cases.FILE.stat().st_size)


def _losses() -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: lab_cases.losses(name, Path(folder) / name) for name in lab_cases.RUNS}


def main() -> int:
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, cases in CASES.items():
        path = FOLDER / f"{name}.safetensors"
        if path.exists():
            continue
        assert len({case.name for case in cases}) == len(cases)
        seeds: dict[str, int] = {}
        arrays: dict[str, Tensor] = {}
        for case in cases:
            seeds[case.name], found = find_seed(case)
            arrays |= {f"{case.name}/{part}": value.contiguous() for part, value in found.items()}
        save_file(arrays, path, {"seeds": json.dumps(seeds)})
        print(path.name, len(cases), path.stat().st_size, {n: s for n, s in seeds.items() if s > 9})
    path = FOLDER / "model.safetensors"
    if not path.exists():
        save_file({name: part.contiguous() for name, part in bundled().items()}, path)
        print(path.name, path.stat().st_size)
    path = FOLDER / "extras.safetensors"
    if not path.exists():
        found = {f"int8/{name}": part for name, part in int8_numbers().items()}
        for kind in RETROFITS:
            found |= {f"{'-'.join(kind)}/{name}": value for name, value in retrofit_numbers(*kind).items()}
        save_file({name: value.contiguous() for name, value in found.items()}, path)
        print(path.name, path.stat().st_size)
    lab(sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
