"""Figures say what they were given, in two themes and three formats, and refuse what cannot be drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from seqboat.figures import (
    STYLES,
    THEMES,
    Point,
    activation_figure,
    confidence_maps_figure,
    curves_figure,
    histogram_figure,
    intervention_figure,
    lines_figure,
    pareto_front,
    save_figure,
    span_figure,
    tradeoff_figure,
    training_figure,
    write_figure,
)
from seqboat.figures.style import line_style

TASKS: Any = {"ListOps": ([0.0, 0.3, None], [0.0, 0.4, None]), "Text": ([0.9, 0.2], [0.3, 0.1])}
POINTS = {
    "SeqBoat": [Point(64, 3.0, 0.6, 0.01), Point(16, 4.0, 0.5)],
    "MEGA-chunk": [Point(16, 3.5, 0.4), Point(64, 1.0, 0.65)],
}
MAP = np.array([[0.0, 0.5], [0.75, 1.0]])
CURVE = [
    {"step": 10, "split": "train", "activation": [0.1, None]},
    {"step": 20, "split": "val", "activation": [0.2, None]},
    {"step": 20, "split": "train", "activation": [0.3, None]},
]

FIGURES: dict[str, Callable[..., Any]] = {
    "activation": lambda theme: activation_figure({"SeqBoat": TASKS}, theme=theme),
    "maps": lambda theme: confidence_maps_figure([MAP, MAP], {"layer 2": [MAP, MAP]}, theme=theme),
    "tradeoff": lambda theme: tradeoff_figure({"Image": POINTS}, speed="s", score="a", theme=theme),
    "span": lambda theme: span_figure(
        {"Pathfinder": {16: ([8.0, None, 90.0], [1.0, None, 20.0]), 32: ([4.0, 5.0], [0.5, 9.0])}},
        local={16: 8},
        theme=theme,
    ),
    "histogram": lambda theme: histogram_figure({"layer 1": ([0, 3], [5, 3]), "layer 2": None}, theme=theme),
    "training": lambda theme: training_figure(CURVE, theme=theme),
    "intervention": lambda theme: intervention_figure(
        {"all off": (0.1, 0.02), "all on": (0.4, None)},
        {0.5: (0.6, 0.03, 0.3), 0.1: (0.2, None, 0.9)},
        metric="acc",
        usual=(0.6, 0.02),
        theme=theme,
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_in_both_themes(name: str, tmp_path: Path) -> None:
    """Ink on paper in each theme; vector files name no font and nothing elsewhere."""
    from matplotlib.colors import to_rgb

    light, dark = write_figure(FIGURES[name], tmp_path / "new" / name, ("svg",))
    assert (light.name, dark.name) == (f"{name}.svg", f"{name}-dark.svg")
    svg = light.read_text(encoding="utf-8")
    assert "<svg" in svg and "font-family" not in svg and 'href="http' not in svg
    assert dark.read_text(encoding="utf-8") != svg
    for theme in THEMES:
        style = STYLES[theme]
        figure = FIGURES[name](theme)
        assert to_rgb(figure.get_facecolor()) == to_rgb(style.paper)
        for axes in figure.axes:
            for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
                assert to_rgb(label.get_color()) == to_rgb(style.ink)


def test_activation_draws_error_bars_within_the_axis() -> None:
    panels: Any = activation_figure({"SeqBoat-full": {"Text": ([0.5], [0.0])}, "SeqBoat": TASKS}).axes
    other, axes = panels
    assert other.get_title() == "SeqBoat-full" and other.get_legend() is None
    # a task has the same look in every panel
    assert other.containers[0].lines[0].get_color() == axes.containers[1].lines[0].get_color()
    lines = [container.lines[0] for container in axes.containers]
    np.testing.assert_array_equal(lines[0].get_ydata(), [0.0, 0.3, math.nan])
    np.testing.assert_array_equal(lines[1].get_ydata(), [0.9, 0.2])
    assert lines[0].get_linestyle() != lines[1].get_linestyle()
    assert lines[0].get_marker() != lines[1].get_marker()
    bars = axes.containers[1].lines[2][0].get_segments()
    np.testing.assert_allclose([sorted(segment[:, 1]) for segment in bars], [[0.6, 1.0], [0.1, 0.3]])
    low = axes.containers[0].lines[2][0].get_segments()[1][:, 1]
    assert sorted(low) == [0.0, pytest.approx(0.7)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["Text", "ListOps"]


@pytest.mark.parametrize("panels", [1, 2, 3])
@pytest.mark.parametrize("letters", [5, 30, 52])
def test_legends_of_lines_stay_on_the_paper(panels: int, letters: int) -> None:
    names = [f"{number} {'model ' * 10}"[:letters] for number in range(9)]
    lines = {f"panel {i}": {name: [(1.0, 0.5), (2.0, 0.6)] for name in names} for i in range(panels)}
    figure: Any = lines_figure(lines, x="seconds", y="score")
    figure.draw_without_rendering()
    (found,) = figure.legends
    box, paper = found.get_window_extent(), figure.bbox
    assert [text.get_text() for text in found.get_texts()] == names
    assert paper.x0 <= box.x0 and box.x1 <= paper.x1 and paper.y0 <= box.y0
    assert all(box.y1 <= axes.get_tightbbox().y0 for axes in figure.axes)


def test_maps_are_white_where_nothing_is_active() -> None:
    figure = confidence_maps_figure([MAP], {"layer 4": [MAP]}, theme="dark")
    colors = figure.axes[1].get_images()[0].get_array()
    assert colors is not None
    assert colors[0, 0].tolist() == [1, 1, 1, 1]
    luminance = colors[..., :3] @ np.array([0.299, 0.587, 0.114])
    # darker with confidence, and the palest still differs from white
    assert 0.95 > luminance[0, 1] > luminance[1, 0] > luminance[1, 1]


def test_the_front_is_what_nobody_beats() -> None:
    points = [point for family in POINTS.values() for point in family]
    assert pareto_front(points) == [Point(16, 4.0, 0.5), Point(64, 3.0, 0.6, 0.01), Point(64, 1.0, 0.65)]
    # in seconds, the low ones are fast
    assert [p.speed for p in pareto_front(points, "low")] == [1.0]
    same = [Point(1, 2.0, 0.5), Point(2, 2.0, 0.5)]
    assert len(pareto_front(same)) == 1


def test_tradeoff_names_sizes_and_turns_seconds_around() -> None:
    axes = tradeoff_figure({"Image": POINTS}, speed="seconds", score="accuracy", faster="low").axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["16", "16", "64", "64"]
    assert axes.xaxis_inverted() and axes.get_xlabel() == "seconds"
    ringed = axes.get_lines()[-1]
    assert ringed.get_xdata().tolist() == [1.0]  # type: ignore[union-attr]


def test_labels_stay_off_the_lines() -> None:
    """Points above each other, as a steep line of a family gives them."""
    from matplotlib.path import Path as Line
    from matplotlib.text import Text

    points = [Point(2**i, 5.0 - 0.01 * i, 0.5 + 0.1 * i) for i in range(4)]
    figure = tradeoff_figure({"Pathfinder": {"SeqBoat": points}}, speed="s", score="accuracy")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    line = Line(axes.transData.transform([(p.speed, p.score) for p in points]))
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == 4 and not any(line.intersects_bbox(box, filled=False) for box in boxes)


def test_interventions_have_error_bars() -> None:
    left, right = FIGURES["intervention"]("light").axes[:2]
    (bars,) = left.containers[0].lines[2]
    np.testing.assert_allclose(bars.get_segments()[0][:, 0], [0.08, 0.12])
    (bars,) = right.containers[0].lines[2]
    np.testing.assert_allclose([s[:, 1] for s in bars.get_segments()], [[0.2, 0.2], [0.57, 0.63]])


def test_spans_leave_gaps_and_show_sliding_windows() -> None:
    axes = FIGURES["span"]("light").axes[0]
    spans = [container.lines[0].get_ydata() for container in axes.containers]
    np.testing.assert_array_equal(spans[0], [8.0, math.nan, 90.0])
    np.testing.assert_array_equal(spans[1], [4.0, 5.0])
    lines = [list(line.get_ydata()) for line in axes.get_lines()]
    assert [8, 8] in lines, "the sliding window"
    assert [0.02] in lines, "a mark where nothing attends"
    bars = axes.containers[1].lines[2][0].get_segments()
    np.testing.assert_allclose([segment[:, 1] for segment in bars], [[3.5, 4.5], [0.5, 14.0]])


def test_labels_of_near_points_do_not_overlap() -> None:
    from matplotlib.text import Text

    near = {"SeqBoat": [Point(16 * 2**i, 5.0 + 0.02 * i, 0.5 + 0.01 * i) for i in range(5)]}
    near["MEGA-chunk"] = [Point(512, 5.05, 0.53), Point(16, 20.0, 0.9)]
    figure = tradeoff_figure({"Image": near}, speed="s", score="accuracy", chance={"Image": 0.1})
    figure.draw_without_rendering()
    axes = figure.axes[0]
    # without the lines that lead to them
    boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text() != "chance"]
    assert len(boxes) == 7
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
    assert axes.get_ylim()[0] < 0.1, "an axis that begins at the scores would dramatize them"


def test_accuracies_have_a_whole_axis() -> None:
    run = {"metric": "accuracy", "label": "SeqBoat", "curve": [[10, 0.52], [20, 0.53]]}
    bits = {**run, "metric": "bits", "curve": [[10, 5.2], [20, 5.1]]}
    figure = curves_figure(
        {"Path-X": [run, {**run, "label": "MEGA"}], "enwik8": [bits]}, chance={"Path-X": 0.5}
    )
    accuracy, other = figure.axes
    assert accuracy.get_ylim() == (0, 1) and other.get_ylim()[0] > 5
    assert [text.get_text() for text in accuracy.texts] == ["chance"] and not other.texts
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["SeqBoat", "MEGA"]  # type: ignore[union-attr]


def test_histograms_stack_active_and_not() -> None:
    axes = FIGURES["histogram"]("light").axes[0]
    heights = [[bar.get_height() for bar in container] for container in axes.containers]
    assert heights == [[0.0, 3 / 8], [5 / 8, 0.0]]
    assert axes.get_title() == "layer 1\n37.5% active"


def test_training_draws_lines_of_training_and_marks_of_evaluations() -> None:
    lines = training_figure(CURVE).axes[0].get_lines()
    assert lines[0].get_ydata().tolist() == [0.1, 0.3]  # type: ignore[union-attr]
    assert lines[1].get_xdata().tolist() == [20] and len(lines) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: activation_figure({}), "panels must not be empty"),
        (lambda: activation_figure({"x": {"a": ([0.1], [0.1, 0.2])}}), r"stds of a must have the shape"),
        (lambda: activation_figure({"x": {"a": ([], [])}}), r"rates of a must have shape \(layers,\)"),
        (lambda: activation_figure({"x": TASKS}, theme="blue"), "theme must be one of"),  # type: ignore[arg-type]
        (lambda: confidence_maps_figure([MAP], {"x": [MAP, MAP]}), "x must hold 1 maps"),
        (lambda: confidence_maps_figure([MAP], {"x": [MAP[:1]]}), r"shape of their image, \(2, 2\), got"),
        (lambda: confidence_maps_figure([], {}), "must not be empty"),
        (lambda: tradeoff_figure({"a": {}}, speed="", score=""), "at least one point"),
        (lambda: span_figure({}), "panels must not be empty"),
        (lambda: training_figure([]), "points must not be empty"),
    ],
)
def test_what_cannot_be_drawn(draw: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw()


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    formats = ("svg", "pdf", "png")
    one, two = (write_figure(FIGURES["training"], tmp_path / n, formats, ("light",)) for n in ("a", "b"))
    assert [path.name for path in one] == ["a.svg", "a.pdf", "a.png"]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_names_of_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end with \.png, \.svg or \.pdf, got 'a.gif'"):
        save_figure(training_figure(CURVE), tmp_path / "a.gif")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("theme", THEMES)
def test_sixteen_lines_look_different(theme: Any) -> None:
    looks = [line_style(STYLES[theme], number) for number in range(16)]
    assert len({(look["color"], look["marker"]) for look in looks}) == 16
    assert ["mfc" in look for look in looks] == [False] * 8 + [True] * 8


def test_a_label_looks_the_same_in_all_panels() -> None:
    def run(label: str) -> dict[str, Any]:
        return {"metric": "accuracy", "label": label, "curve": [(1, 0.1), (2, 0.2)]}

    figure = curves_figure({"one": [run("a"), run("b")], "two": [run("b")]})
    colors = [[line.get_color() for line in axes.get_lines()] for axes in figure.axes]
    assert colors[1] == [colors[0][1]] and colors[0][0] != colors[0][1]
