"""The lab does what it did before it was rebuilt: `lab_golden_cases.py` has the cases."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lab_golden_cases import REMADE, RUNS, configurations, generated, losses, orders, stored


@cache
def wanted() -> dict[str, Any]:
    return stored()


def test_configurations_of_all_recipes() -> None:
    want, got = wanted()["configurations"], configurations()
    want = {name: fields for name, fields in want.items() if name not in REMADE}
    assert got.keys() == want.keys()
    changes = {
        f"{name}: {field}": (want[name].get(field, "absent"), got[name].get(field, "absent"))
        for name in want
        for field in want[name].keys() | got[name].keys()
        if want[name].get(field, "absent") != got[name].get(field, "absent")
    }
    assert not changes, f"{len(changes)} fields changed: {dict(list(changes.items())[:10])}"


def test_orders_of_plans() -> None:
    assert orders() == wanted()["orders"]


def test_generated_data() -> None:
    assert generated() == wanted()["generated"]


@pytest.mark.parametrize("name", RUNS)
def test_losses_of_a_tiny_run(name: str, tmp_path: Path) -> None:
    assert losses(name, tmp_path) == pytest.approx(wanted()["losses"][name], rel=1e-6)
