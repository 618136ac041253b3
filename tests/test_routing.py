"""The routing suite: its tasks can be solved from the tokens that matter alone, and its lines are kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import seqboat.paper.routing as suite
from seqboat.paper.routing import (
    ARMS,
    IGNORE,
    SETTINGS,
    Net,
    decided,
    draw,
    gradients,
    read_rows,
    run_suite,
    train,
    write_page,
)

SMALL = {"steps": 3, "batch": 2, "width": 8}


@pytest.mark.parametrize("task", [name for name in SETTINGS if SETTINGS[name].time <= 256])
def test_answers_follow_from_the_tokens_that_matter(task: str) -> None:
    setting = SETTINGS[task]
    x, y, relevant = draw(setting, 8, setting.time, torch.Generator().manual_seed(3))
    for tokens, answers, matter in zip(x.tolist(), y.tolist(), relevant.tolist(), strict=True):
        if setting.kind == "adding":
            assert sum(number for number, mark in tokens if mark) == pytest.approx(answers)
            assert [bool(mark) for _, mark in tokens] == matter
            continue
        seen: dict[int, int] = {}
        first = 0
        waiting = 0
        for place, ((kind, key, value, noise), answer, counts) in enumerate(
            zip(tokens, answers, matter, strict=True)
        ):
            if setting.kind == "easy":
                assert answer == noise % 16
                continue
            if answer != IGNORE:
                assert counts
                assert answer == (first - 1 if setting.kind == "order" else seen[key] - 1), place
            if setting.kind == "mqar" and kind == 1:
                assert counts == (value > 0)
                if value:
                    seen[waiting] = value
                waiting = key
            elif counts and kind == 1:
                seen[key] = value
                first = first or key


def test_decisions_of_others() -> None:
    setting = replace(SETTINGS["recall-128"], width=8)
    net = Net(setting, ARMS["gated"], 0.1).eval()
    x, _, relevant = draw(setting, 4, setting.time, torch.Generator().manual_seed(0))
    wanted = {
        "oracle": relevant,
        "shuffled": relevant.roll(1, 0),
        "never": torch.zeros_like(relevant),
        "always": torch.ones_like(relevant),
    }
    for by, mask in wanted.items():
        with decided(net, by, relevant, 0.1, torch.Generator()):
            _, routings = net(x)
        assert torch.equal(routings[0].active[..., 0], mask)
    with decided(net, "random", relevant, 0.1, torch.Generator().manual_seed(0)):
        _, routings = net(x)
    assert routings[0].active.float().mean() == pytest.approx(0.1, abs=0.04)


def test_only_the_gated_form_has_a_gradient_for_memory_in_its_last_layer() -> None:
    for form, layer, means in gradients():
        last = layer == int(form.split(", ")[1][0])
        assert means["question"] > 0
        assert (means["memory"] == 0) == (form.startswith("paper") and last)


def test_a_line_per_run_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suite.SETTINGS, "recall-128", replace(SETTINGS["recall-128"], time=32, **SMALL))  # type: ignore[arg-type]
    monkeypatch.setattr(suite, "HELD_OUT", 4)
    told: list[str] = []
    results = tmp_path / "results.jsonl"
    arms = ["gated", "top-k", "paper", "random"]
    rows = run_suite(["recall-128"], arms, [0, 1], results, told.append)
    assert len(told) == len(rows) == 8
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["arm"] for line in lines[:4]] == ["gated", "paper", "random", "top-k"]
    assert lines[0]["controls"].keys() == set(suite.CONTROLS)
    monkeypatch.setattr(suite, "train", None)  # nothing is trained twice
    assert run_suite(["recall-128"], arms, [0, 1], results, told.append) == rows
    write_page(rows, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| gated, with its price | 0 1 |" in page and "| paper, 1 layer | 1 | 0 | 0 |" in page
    assert len(read_rows(results)) == 8
    with pytest.raises(ValueError, match="'recal' is unknown; expected some of recall-128"):
        run_suite(["recal"], arms, [0], results, told.append)


@pytest.mark.slow
def test_a_router_finds_the_tokens_that_matter() -> None:
    torch.set_flush_denormal(True)
    row = train("recall-128", "gated", 10, 0.06, steps=500, every=500)
    assert row["score"] > 0.9 and row["rate"][0] < 0.1
    assert row["precision"][0] > 0.7 and row["recall"][0] > 0.95
    assert row["controls"]["never"] < 0.2
