"""Images of dashed curves, for Pathfinder and Path-X: section 4.1 of the paper.

After Linsley et al. (2018), with the parameters of the Long Range Arena. Two curves of dashes ("paddles") grow in
turns from nearby starts, then short distractors are added. Each next dash turns by an angle drawn with probability
proportional to cos^2(min(continuity * |turn|, pi / 2)) among the directions in which it touches no other dash. A
fair coin decides the label: dots at both ends of one curve (1), or at the start of one and the end of the other (0).

An image depends only on the seed and its index, so that any number of processes makes the same files. Most pairs of
curves run into the border or each other and are discarded (hundreds for one image of Path-X), so everything that does
not depend on the image is precomputed: `Tables`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import check_positive, require

SCALE = 2
"""Curves are drawn at twice the size and then downsampled; all code below works on that finer grid."""
LEAST = 1e-4
"""A curve is at a dead end if the weights of its free directions sum to less."""
TRIES = 10
"""Attempts to place a distractor before it is left out."""


@dataclass(frozen=True, kw_only=True)
class PathfinderConfig:
    """Which images to draw; by default the hard 32 x 32 images of the Long Range Arena. Lengths are in pixels."""

    size: int = 32
    """Height and width."""
    contour: int = 14
    """Number of dashes in each of the two curves."""
    distractors: int = 5
    """Number of distractors, which are short curves."""
    distractor_contour: int = 4
    """Number of dashes in each distractor."""
    seed_distance: int = 7
    """Distance between the starts of the two curves; the first starts at least twice as far from the border."""
    paddle_length: int = 2
    """Length of a dash."""
    thickness: float = 0.5
    """Thickness of a dash."""
    margins: tuple[int, ...] = (1,)
    """Free space around a dash, so that dashes are twice as far apart; each image draws one of these values."""
    continuity: float = 1.0
    """Straightness: dashes turn by at most pi / (2 continuity)."""
    marker_radius: float = 1.5
    """Radius of the dots."""
    contrast: float = 0.75
    """Brightness of dashes; that of dots is 1."""

    def __post_init__(self) -> None:
        for name in ("size", "contour", "distractor_contour", "seed_distance", "paddle_length"):
            check_positive(name, getattr(self, name))
        check_positive("distractors", self.distractors, least=0)
        for margin in self.margins:
            check_positive("margins", margin)
        require(len(self.margins) > 0, "margins must not be empty")
        require(
            4 * self.seed_distance <= self.size,
            f"seed_distance must be at most a quarter of size ({self.size}), got {self.seed_distance}",
        )
        require(self.continuity >= 1, f"continuity must be at least 1, got {self.continuity!r}")
        require(0 < self.contrast <= 1, f"contrast must be in (0, 1], got {self.contrast!r}")
        for name in ("thickness", "marker_radius"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)!r}")


PATHFINDER = PathfinderConfig()
PATHX = PathfinderConfig(
    size=128,
    distractors=8,
    seed_distance=20,
    paddle_length=5,
    thickness=1.5,
    margins=(2, 3),
    continuity=1.8,
    marker_radius=3,
    contrast=0.9,
)
PATHFINDER16 = PathfinderConfig(size=16, contour=4, distractors=2, distractor_contour=2, seed_distance=4)
PATHX32 = PathfinderConfig(
    size=32,
    contour=4,
    distractors=2,
    distractor_contour=2,
    seed_distance=8,
    paddle_length=4,
    thickness=1.0,
    margins=(2,),
    marker_radius=3,
    contrast=0.9,
)
"""The curves of PATHFINDER16 at twice the size: longer sequences, not longer curves."""


class Dash(NamedTuple):
    """A dash, which extends from `margin` to `margin + paddle_length` away from its pivot."""

    y: int
    """pivot on the fine grid"""
    x: int
    direction: int
    """index of the direction, below `Tables.count`"""


class Scene(NamedTuple):
    """What an image shows."""

    label: int
    """1 if both dots are on one curve"""
    margin: int
    curves: tuple[tuple[Dash, ...], ...]
    """the two curves, then the distractors"""
    markers: tuple[tuple[float, float], tuple[float, float]]
    """(y, x) of the dots, in pixels"""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Everything that depends only on the configuration and the margin, precomputed."""

    count: int
    """number of directions"""
    directions: tuple[tuple[float, float], ...]
    """unit vectors (y, x)"""
    after: tuple[tuple[int, ...], ...]
    """(count, choices): the directions that can follow each one"""
    weights: NDArray[np.float64]
    """(choices,): their probability weights, the same for every direction"""
    chances: tuple[float, ...]
    """cumulative weights if every direction is free"""
    points: NDArray[np.int64]
    """(count, points): points along the center line of a dash, as offsets into a flat stamp"""
    points_after: NDArray[np.int64]
    """(count, choices, points): the same for the directions that can follow each one"""
    inside: NDArray[np.bool_]
    """(cells, count, 2): whether a dash with its pivot in this row, or column, is inside the image"""
    inside_after: NDArray[np.bool_]
    """(2, count, cells, choices): the same for the directions that can follow each one, for rows and for columns"""
    at_border: tuple[tuple[tuple[tuple[float, ...] | None, ...], ...], ...]
    """(2, count, cells) cumulative weights if only the border is in the way, for rows and for columns: None if it is
    not, and empty if no direction is free"""
    outside: int
    """rows before the first row of the image in the three tables above"""
    stamps: NDArray[np.bool_]
    """(count, side * side): cells around a pivot that no other dash may touch"""
    stamp_side: int
    ahead: float
    """distance from a pivot to the center of the possible next dashes, along the last direction, in cells"""
    near: float
    """the next dash cannot touch dashes whose centers are farther than this from that point, in cells"""
    patches: NDArray[np.uint8]
    """(count, 2, 2, side, side): a dash in pixels, for a pivot on even or odd rows and columns"""


@lru_cache(maxsize=16)
def tables(config: PathfinderConfig, margin: int) -> Tables:
    """The tables of a configuration."""
    length = config.paddle_length
    # one direction per pixel on the circle of possible tips
    count = round(2 * math.pi * (length + margin))
    angles = np.arange(count) * (2 * math.pi / count)
    directions = np.stack([np.sin(angles), np.cos(angles)], axis=1)
    # in multiples of 360 / count degrees, below 90 / continuity degrees
    most = math.ceil(count / 4 / config.continuity) - 1
    turns = np.arange(-most, most + 1)
    weights = np.cos(config.continuity * turns * (2 * math.pi / count)) ** 2
    after = (np.arange(count)[:, None] + turns) % count
    # the edges of two dashes may overlap by half a pixel
    apart = 2 * margin + config.thickness - 0.5

    middle = SCALE * (margin + length / 2)
    ahead = 0.7 * middle
    spread = max(
        math.hypot(middle * math.cos(turn) - ahead, middle * math.sin(turn))
        for turn in (turns * (2 * math.pi / count)).tolist()
    )
    near = spread + SCALE * (length + apart) + 2

    # a stamp must contain every cell that a dash from any near pivot can touch
    reach = math.ceil(near + ahead + 2 * middle + SCALE * length)
    cells = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2, indexing="ij"), axis=-1) / SCALE
    stamps = np.stack([_distance(cells, d, margin, margin + length) <= apart for d in directions])
    stamp_side = 2 * reach + 1
    steps = SCALE * np.arange(margin, margin + length + 1)
    offsets = np.rint(steps[None, :, None] * directions[:, None]).astype(np.int64)
    points = (offsets[..., 0] + reach) * stamp_side + offsets[..., 1] + reach
    # a dash may end on the outermost pixel, but not beyond it
    ends = SCALE * np.array([margin, margin + length])[:, None, None] * directions
    # the pivot itself may be outside, by the margin
    outside = SCALE * (margin + 1)
    rows = np.arange(-outside, SCALE * config.size + outside)[:, None, None, None] + ends
    inside = ((rows >= SCALE // 2) & (rows <= SCALE * (config.size - 0.5))).all(axis=1)

    inside_after = np.ascontiguousarray(inside[:, after].transpose(3, 1, 0, 2))
    sums = (inside_after * weights).cumsum(axis=-1)

    def at_border(free: NDArray[np.bool_], running: NDArray[np.float64]) -> tuple[float, ...] | None:
        return None if free.all() else tuple(running.tolist()) if running[-1] >= LEAST else ()

    # extends beyond the dash by the support of the downsampling filter
    side = 2 * (length + margin + 4)
    fine = (np.arange(-SCALE * side // 2, SCALE * side // 2) + 0.5) / SCALE
    patches = np.zeros((count, SCALE, SCALE, side, side), np.uint8)
    for odd_y in range(SCALE):
        for odd_x in range(SCALE):
            place = np.stack(np.meshgrid(fine - odd_y / SCALE, fine - odd_x / SCALE, indexing="ij"), axis=-1)
            for i, direction in enumerate(directions):
                ink = _distance(place, direction, margin, margin + length) <= config.thickness / 2
                patches[i, odd_y, odd_x] = np.rint(reduce(ink.astype(np.float64)) * config.contrast * 255)
    return Tables(
        count=count,
        directions=tuple((float(y), float(x)) for y, x in directions),
        after=tuple(tuple(row) for row in after.tolist()),
        weights=weights,
        chances=tuple(np.cumsum(weights).tolist()),
        points=points,
        points_after=points[after],
        inside=inside,
        inside_after=inside_after,
        at_border=tuple(
            tuple(
                tuple(at_border(free, running) for free, running in zip(frees, runnings, strict=True))
                for frees, runnings in zip(*pair, strict=True)
            )
            for pair in zip(inside_after, sums, strict=True)
        ),
        outside=outside,
        stamps=stamps.reshape(count, -1),
        stamp_side=stamp_side,
        ahead=ahead,
        near=near,
        patches=patches,
    )


def _distance(
    places: NDArray[np.floating], direction: NDArray[np.floating], start: float, end: float
) -> NDArray[np.floating]:
    """Distance of (..., 2) points from the segment of a ray between `start` and `end`."""
    along = np.clip(places @ direction, start, end)
    away: NDArray[np.floating] = np.linalg.norm(places - along[..., None] * direction, axis=-1)
    return away


def reduce(fine: NDArray[np.float64]) -> NDArray[np.float64]:
    """A square image downsampled by two with a Lanczos-3 filter, clipped to [0, 1]."""
    small = len(fine) // SCALE
    centers = (np.arange(small) + 0.5) * SCALE
    distance = (np.arange(len(fine)) + 0.5 - centers[:, None]) / SCALE
    filters = np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)
    filters /= filters.sum(axis=1, keepdims=True)
    result: NDArray[np.float64] = np.clip(filters @ fine @ filters.T, 0.0, 1.0)
    return result


class _Field:
    """The dashes of an image so far, and where another one fits."""

    def __init__(self, config: PathfinderConfig, margin: int) -> None:
        self.table = tables(config, margin)
        self.back = SCALE * margin
        self.step = SCALE * (config.paddle_length + 2 * margin)
        self.middle = SCALE * (margin + config.paddle_length / 2)
        self.dashes: list[tuple[float, float, Dash]] = []

    def add(self, dash: Dash) -> None:
        """Add a dash, with its center for quick comparisons."""
        y, x, direction = dash
        dy, dx = self.table.directions[direction]
        self.dashes.append((y + self.middle * dy, x + self.middle * dx, dash))

    def start(self, random: Random, tip_y: float, tip_x: float) -> Dash | None:
        """A dash in a random direction with its tip at a point (in pixels), or None if there is no room."""
        table = self.table
        direction = int(random.random() * table.count)
        dy, dx = table.directions[direction]
        y, x = round(SCALE * tip_y - self.back * dy), round(SCALE * tip_x - self.back * dx)
        if not (
            table.inside[y + table.outside, direction, 0] and table.inside[x + table.outside, direction, 1]
        ):
            return None
        for other in self._near(y + table.ahead * dy, x + table.ahead * dx, None):
            shift = (y - other.y) * table.stamp_side + x - other.x
            if table.stamps[other.direction][table.points[direction] + shift].any():
                return None
        return Dash(y, x, direction)

    def after(self, random: Random, last: Dash) -> Dash | None:
        """The dash after another one, which it may come close to, or None if there is no room."""
        table = self.table
        y, x, direction = last
        dy, dx = table.directions[direction]
        y, x = y + round(self.step * dy), x + round(self.step * dx)
        by_row = table.at_border[0][direction][y + table.outside]
        by_column = table.at_border[1][direction][x + table.outside]
        if by_row == () or by_column == ():
            return None
        near = self._near(y + table.ahead * dy, x + table.ahead * dx, last)
        if near or (by_row is not None and by_column is not None):
            free = (
                table.inside_after[0, direction, y + table.outside]
                & table.inside_after[1, direction, x + table.outside]
            )
            for other in near:
                shift = (y - other.y) * table.stamp_side + x - other.x
                free &= ~table.stamps[other.direction][table.points_after[direction] + shift].any(axis=1)
            chances: Sequence[float] = (free * table.weights).cumsum().tolist()
            if chances[-1] < LEAST:
                return None
        else:
            chances = by_row or by_column or table.chances
        choice = bisect_right(chances, random.random() * chances[-1])
        return Dash(y, x, table.after[direction][choice])

    def _near(self, y: float, x: float, last: Dash | None) -> list[Dash]:
        """Dashes, other than the last, that a dash with its center near here could touch."""
        near = self.table.near
        return [
            dash
            for middle_y, middle_x, dash in self.dashes
            if -near < middle_y - y < near and -near < middle_x - x < near and dash is not last
        ]


def _two_curves(
    random: Random, config: PathfinderConfig, margin: int
) -> tuple[list[list[Dash]], _Field] | None:
    field = _Field(config, margin)
    low, room = 2 * config.seed_distance, config.size - 4 * config.seed_distance
    y, x = low + random.random() * room, low + random.random() * room
    angle = random.random() * 2 * math.pi
    distance = config.seed_distance
    curves: list[list[Dash]] = []
    for start_y, start_x in ((y, x), (y + distance * math.sin(angle), x + distance * math.cos(angle))):
        dash = field.start(random, start_y, start_x)
        if dash is None:
            return None
        field.add(dash)
        curves.append([dash])
    for _ in range(config.contour - 1):
        for curve in curves:
            dash = field.after(random, curve[-1])
            if dash is None:
                return None
            field.add(dash)
            curve.append(dash)
    return curves, field


def _distractor(random: Random, config: PathfinderConfig, field: _Field) -> list[Dash] | None:
    """Add a short curve to the field; None, with the field unchanged, if it does not fit."""
    before = len(field.dashes)
    curve: list[Dash] = []
    for i in range(config.distractor_contour):
        if i == 0:
            places = ((random.random(), random.random()) for _ in range(TRIES))
            tried = (field.start(random, config.size * y, config.size * x) for y, x in places)
            dash = next((dash for dash in tried if dash is not None), None)
        else:
            dash = field.after(random, curve[-1])
        if dash is None:
            del field.dashes[before:]
            return None
        field.add(dash)
        curve.append(dash)
    return curve


def make_scene(seed: int, index: int, config: PathfinderConfig = PATHFINDER) -> Scene:
    """The content of image number `index` of a seed."""
    # Python guarantees that random() gives the same numbers for the same string seed
    random = Random(f"pathfinder {seed} {index}")
    label = int(random.random() < 0.5)
    margin = config.margins[int(random.random() * len(config.margins))]
    for _ in range(1_000_000):
        found = _two_curves(random, config, margin)
        if found is not None:
            break
    else:
        raise ValueError(f"two curves of {config.contour} dashes do not fit: {config}")
    curves, field = found
    for _ in range(config.distractors):
        for _ in range(TRIES):
            distractor = _distractor(random, config, field)
            if distractor is not None:
                curves.append(distractor)
                break
    first = int(random.random() < 0.5)
    last = first if label else 1 - first
    table = tables(config, margin)
    markers = (
        place(table, curves[first][0], margin),
        place(table, curves[last][-1], margin + config.paddle_length),
    )
    return Scene(label, margin, tuple(tuple(curve) for curve in curves), markers)


def place(table: Tables, dash: Dash, distance: float) -> tuple[float, float]:
    """The point (y, x), in pixels, at this distance from a dash's pivot along its direction."""
    dy, dx = table.directions[dash.direction]
    return dash.y / SCALE + distance * dy, dash.x / SCALE + distance * dx


def draw_scene(scene: Scene, config: PathfinderConfig = PATHFINDER) -> NDArray[np.uint8]:
    """The image (size, size) of a scene."""
    table = tables(config, scene.margin)
    side = table.patches.shape[-1]
    disk = 2 * math.ceil(config.marker_radius + 4)
    # wide enough that patches at the border fit
    border = max(side, disk)
    canvas = np.zeros((config.size + 2 * border, config.size + 2 * border), np.uint8)
    for curve in scene.curves:
        for y, x, direction in curve:
            top, left = y // SCALE - side // 2 + border, x // SCALE - side // 2 + border
            part = canvas[top : top + side, left : left + side]
            np.maximum(part, table.patches[direction, y % SCALE, x % SCALE], out=part)
    fine = (np.arange(-SCALE * disk // 2, SCALE * disk // 2) + 0.5) / SCALE
    for y_marker, x_marker in scene.markers:
        top, left = math.floor(y_marker), math.floor(x_marker)
        ink = (fine[:, None] + top - y_marker) ** 2 + (fine + left - x_marker) ** 2 <= config.marker_radius**2
        top, left = top - disk // 2 + border, left - disk // 2 + border
        part = canvas[top : top + disk, left : left + disk]
        np.maximum(part, np.rint(reduce(ink.astype(np.float64)) * 255).astype(np.uint8), out=part)
    return canvas[border:-border, border:-border].copy()


def make_image(seed: int, index: int, config: PathfinderConfig = PATHFINDER) -> tuple[NDArray[np.uint8], int]:
    """Image number `index` of a seed, (size, size), and its label."""
    scene = make_scene(seed, index, config)
    return draw_scene(scene, config), scene.label
