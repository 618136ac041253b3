"""Stores the numbers that `test_golden_library.py` compares. It was run once; run it again for new cases only.

python tests/make_golden.py            the files that do not exist yet
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from torch import Tensor

from golden_cases import (
    CASES,
    FOLDER,
    PROMPTS,
    Case,
    Found,
    bits_of,
    bundled_model,
    greedy_bytes,
    model_numbers,
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


def main() -> int:
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, cases in CASES.items():
        path = FOLDER / f"{name}.safetensors"
        if path.exists():
            continue
        assert len({case.name for case in cases}) == len(cases)
        seeds, arrays = {}, {}
        for case in cases:
            seeds[case.name], found = find_seed(case)
            arrays |= {f"{case.name}/{part}": value.contiguous() for part, value in found.items()}
        save_file(arrays, path, {"seeds": json.dumps(seeds)})
        print(path.name, len(cases), path.stat().st_size, {n: s for n, s in seeds.items() if s > 9})
    path = FOLDER / "model.safetensors"
    if not path.exists():
        save_file({name: part.contiguous() for name, part in bundled().items()}, path)
        print(path.name, path.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
