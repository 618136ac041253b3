"""The library computes what it computed before it was rebuilt: `golden_cases.py` has the cases."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from golden_cases import (
    CASES,
    FOLDER,
    PROMPTS,
    RETROFITS,
    Case,
    bits_of,
    bundled_model,
    greedy_bytes,
    int8_numbers,
    model_numbers,
    retrofit_numbers,
    text_of,
    transformers_tokens,
)

TOLERANCE = 1e-9
GRADIENTS = 1e-8
"""Of the largest number of each kind, in float64."""


@cache
def stored(file: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The numbers of a file, and the seed of each of its cases."""
    path = FOLDER / f"{file}.safetensors"
    with safe_open(path, framework="pt") as opened:
        seeds = json.loads((opened.metadata() or {}).get("seeds", "{}"))
    return load_file(path), seeds


def assert_equal(got: Tensor, want: Tensor, tolerance: float, name: str) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{name}: {int((got != want).sum())} of {want.numel()} differ"
    elif want.numel():
        worst = float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))
        assert worst <= tolerance, f"{name}: differs by {worst:.1e} of the largest"


@pytest.mark.parametrize(
    ("file", "case"),
    [pytest.param(file, case, id=f"{file}-{case}") for file, cases in CASES.items() for case in cases],
)
def test_case(file: str, case: Case) -> None:
    arrays, seeds = stored(file)
    found = case(seeds[case.name])
    assert {f"{case}/{part}" for part in found} == {n for n in arrays if n.rpartition("/")[0] == case.name}
    # decisions first: one that flips explains the rest
    for part in sorted(found, key=lambda part: part != "active"):
        tolerance = GRADIENTS if "grad" in part else TOLERANCE
        assert_equal(found[part], arrays[f"{case}/{part}"], tolerance, part)


@pytest.mark.parametrize("double", [True, False])
def test_logits_of_the_bundled_model(double: bool) -> None:
    arrays, _ = stored("model")
    found = model_numbers(double)
    flips = int((found["active"] != arrays["active"]).sum())
    assert flips == 0
    assert_equal(found["logits"], arrays["logits"], 1e-6 if double else 1e-5, "logits")
    assert_equal(found["line"], arrays["line"], 1e-9 if double else 1e-5, "line")


def test_text_of_the_bundled_model() -> None:
    arrays, _ = stored("model")
    model = bundled_model()
    assert greedy_bytes(model, PROMPTS, 64) == [bytes(row.tolist()) for row in arrays["greedy"]]
    assert bits_of(model, text_of(10_000, 1)) == pytest.approx(float(arrays["bits"]), rel=1e-5)


@pytest.mark.parametrize(("beams", "padded"), [(1, False), (1, True), (3, False), (3, True)])
def test_transformers_generates_the_same_tokens(beams: int, padded: bool) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    arrays, _ = stored("model")
    assert transformers_tokens(beams, padded).tolist() == arrays[f"tokens-{beams}-{padded}"].tolist()


def test_int8_form_of_the_bundled_model() -> None:
    arrays, _ = stored("extras")
    found = int8_numbers()
    assert torch.equal(found["active"], arrays["int8/active"])
    assert_equal(found["logits"], arrays["int8/logits"], 1e-5, "logits")


@pytest.mark.parametrize(("part", "skipped"), RETROFITS)
def test_a_retrofitted_encoder(part: str, skipped: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    arrays, _ = stored("extras")
    for name, value in retrofit_numbers(part, skipped).items():
        assert_equal(value, arrays[f"{part}-{skipped}/{name}"], TOLERANCE, name)
