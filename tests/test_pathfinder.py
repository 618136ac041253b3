"""Pathfinder images: solvers that only see pixels, the published drawing, determinism, published files."""

from __future__ import annotations

import io
import math
import shutil
import tarfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from seqboat.data.prepare import prepare
from seqboat.data.store import ArrayStore
from seqboat.tasks.curves import (
    PATHFINDER,
    PATHFINDER16,
    PATHX,
    PathfinderConfig,
    Scene,
    draw_scene,
    make_image,
    make_scene,
    place,
    reduce,
    tables,
)
from seqboat.tasks.pathfinder import PathfinderTaskConfig, PathXTaskConfig

Image = pytest.importorskip("PIL.Image")
ImageDraw = pytest.importorskip("PIL.ImageDraw")


def flood(ink: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Connected groups of pixels, diagonal neighbors included, as (n, 2) places."""
    seen = np.zeros_like(ink)
    groups = []
    for start in map(tuple, np.argwhere(ink)):
        if seen[start]:
            continue
        seen[start] = True
        group, waiting = [], [start]
        while waiting:
            y, x = waiting.pop()
            group.append((y, x))
            for near in ((y + a, x + b) for a in (-1, 0, 1) for b in (-1, 0, 1)):
                inside = 0 <= near[0] < ink.shape[0] and 0 <= near[1] < ink.shape[1]
                if inside and ink[near] and not seen[near]:
                    seen[near] = True
                    waiting.append(near)
        groups.append(np.array(group))
    return groups


def enlarge(scene: Scene, config: PathfinderConfig, zoom: int) -> NDArray[np.bool_]:
    """The dashes of a scene as thin strokes in a large picture: whose they are cannot be seen."""
    table = tables(config, scene.margin)
    reach = (scene.margin, scene.margin + config.paddle_length)
    dashes = [dash for curve in scene.curves for dash in curve]
    return strokes([[place(table, dash, at) for at in reach] for dash in dashes], config.size, zoom)


def strokes(segments: list[list[tuple[float, float]]], size: int, zoom: int) -> NDArray[np.bool_]:
    picture = Image.new("L", (size * zoom, size * zoom))
    pen = ImageDraw.Draw(picture)
    for ends in segments:
        pen.line([(x * zoom, y * zoom) for y, x in ends], fill=255, width=2)
    return np.asarray(picture) > 0


def trace(
    ink: NDArray[np.bool_], dots: list[NDArray[np.float64]], length: float, gap: float, most: int
) -> bool:
    """Follow the dashes of a picture from one dot, each time to the one that continues best; is the other reached?

    Args:
        ink: the dashes.
        dots: the places of both dots.
        length: of a dash.
        gap: from the end of a dash to the point around which the next one turns, and from there to the next.
        most: dashes of a curve.
    """
    found = []
    for group in flood(ink):
        center = group.mean(axis=0) + 0.5
        axis = np.linalg.svd(group - group.mean(axis=0), full_matrices=False)[2][0]
        found.append((center - length / 2 * axis, center + length / 2 * axis))
    start, goal = dots
    used: set[int] = set()

    def nearest(point: NDArray[np.float64]) -> tuple[float, int, int]:
        return min(
            (float(np.linalg.norm(end - point)), i, side)
            for i, ends in enumerate(found)
            for side, end in enumerate(ends)
            if i not in used
        )

    _, number, side = nearest(start)
    for _ in range(most):
        used.add(number)
        head, tail = found[number][1 - side], found[number][side]
        if np.linalg.norm(head - goal) < 0.4 * length:
            return True
        pivot = head + gap * (head - tail) / np.linalg.norm(head - tail)

        def misfit(pair: tuple[int, int], pivot: NDArray[np.float64] = pivot) -> float:
            near, far = found[pair[0]][pair[1]], found[pair[0]][1 - pair[1]]
            ahead = (far - near) / np.linalg.norm(far - near)
            return float(np.linalg.norm(near - pivot - gap * ahead))

        choices = [(i, end) for i in range(len(found)) if i not in used for end in (0, 1)]
        if not choices:
            return False
        number, side = min(choices, key=misfit)
    return False


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_a_solver_that_traces_the_picture_agrees_with_the_labels(count: int) -> None:
    zoom = 7
    labels = []
    for index in range(count):
        scene = make_scene(3, index)
        ink = enlarge(scene, PATHFINDER, zoom)
        dots = [np.array(marker) * zoom for marker in scene.markers]
        margin = scene.margin * zoom
        reached = trace(ink, dots, PATHFINDER.paddle_length * zoom, margin, PATHFINDER.contour)
        assert reached == bool(scene.label), f"image {index}"
        labels.append(scene.label)
    assert 0.35 * count < sum(labels) < 0.65 * count


def test_a_solver_on_the_pixels_of_path_x_agrees_with_the_labels() -> None:
    """No geometry is given here: strokes and dots are found in the 128 x 128 image itself."""
    right = 0
    for index in range(30):
        scene = make_scene(5, index, PATHX)
        image = draw_scene(scene, PATHX)
        # dots are brighter than dashes; a dash under a dot is found by its visible half
        bright = [group for group in flood(image > 0.94 * 255) if len(group) > 8]
        if len(bright) != 2:
            continue
        dots = [group.mean(axis=0) + 0.5 for group in bright]
        # dots hide the ends of dashes, so the dashes there are put back as strokes of the right length
        ink = image > 100
        rows, columns = np.indices(image.shape)
        for y, x in dots:
            ink &= (rows + 0.5 - y) ** 2 + (columns + 0.5 - x) ** 2 > (PATHX.marker_radius + 0.8) ** 2
        right += solve_pathx(ink, dots, scene.margin) == bool(scene.label)
    # now and then dots touch, or hide so much that a curve cannot be told
    assert right >= 27


def solve_pathx(ink: NDArray[np.bool_], dots: list[NDArray[np.float64]], margin: float) -> bool:
    length = PATHX.paddle_length
    full, stubs = [], []
    for group in flood(ink):
        center = group.mean(axis=0) + 0.5
        dot = min(dots, key=lambda d: float(np.linalg.norm(d - center)))
        if np.linalg.norm(dot - center) < length + 0.5:
            stubs.append((dot, (center - dot) / np.linalg.norm(center - dot)))
        elif len(group) > 2:
            axis = np.linalg.svd(group - group.mean(axis=0), full_matrices=False)[2][0]
            full.append((center, axis))
    segments = [[tuple(center + way * length / 2 * axis) for way in (-1, 1)] for center, axis in full]
    segments += [[tuple(dot), tuple(dot + length * axis)] for dot, axis in stubs]
    zoom = 5
    picture = strokes(segments, PATHX.size, zoom)
    return trace(picture, [zoom * dot for dot in dots], zoom * length, zoom * margin, PATHX.contour)


@pytest.mark.parametrize("config", [PATHFINDER, PATHX, PATHFINDER16], ids=["32", "128", "16"])
def test_the_image_shows_the_scene_and_nothing_else(config: PathfinderConfig) -> None:
    for index in range(6):
        scene = make_scene(1, index, config)
        image = draw_scene(scene, config).astype(int)
        table = tables(config, scene.margin)
        rows, columns = np.indices(image.shape) + 0.5
        lit = np.zeros(image.shape, bool)
        for curve in scene.curves:
            for dash in curve:
                middle = place(table, dash, scene.margin + config.paddle_length / 2)
                y, x = (min(int(part), config.size - 1) for part in middle)
                around = image[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2]
                assert around.max() > 0.3 * 255 * config.contrast
                reach = config.paddle_length / 2 + config.thickness / 2 + 2
                lit |= np.hypot(rows - middle[0], columns - middle[1]) <= reach
        for y_dot, x_dot in scene.markers:
            lit |= np.hypot(rows - y_dot, columns - x_dot) <= config.marker_radius + 2
            inside = np.hypot(rows - y_dot, columns - x_dot) < config.marker_radius - 1
            assert (image[inside] > 240).all()
        # the reducing filter leaves faint rings around what it draws
        assert image[~lit].max(initial=0) < 20


def test_curves_have_the_published_shape() -> None:
    margins = set()
    for index in range(20):
        for config in (PATHFINDER, PATHX):
            scene = make_scene(0, index, config)
            table = tables(config, scene.margin)
            assert [len(curve) for curve in scene.curves[:2]] == [14, 14]
            assert all(len(curve) == 4 for curve in scene.curves[2:])
            assert 2 <= len(scene.curves) <= 2 + config.distractors
            (y, x), (v, u) = (place(table, curve[0], scene.margin) for curve in scene.curves[:2])
            # starts lie on a grid of half pixels
            assert math.hypot(y - v, x - u) == pytest.approx(config.seed_distance, abs=1.5)
            low = 2 * config.seed_distance - 0.5
            assert low <= y <= config.size - low and low <= x <= config.size - low
            most = math.pi / 2 / config.continuity
            for curve in scene.curves:
                turns = np.diff([dash.direction for dash in curve]) * 2 * math.pi / table.count
                turns = np.abs((turns + math.pi) % (2 * math.pi) - math.pi)
                assert (turns < most).all()
            if config is PATHX:
                margins.add(scene.margin)
    assert margins == {2, 3}


def segment_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Least distance of two segments, by sampling both."""
    steps = np.linspace(0, 1, 41)[:, None]
    first, second = a[0] + steps * (a[1] - a[0]), b[0] + steps * (b[1] - b[0])
    return float(np.linalg.norm(first[:, None] - second, axis=-1).min())


@pytest.mark.parametrize("config", [PATHFINDER, PATHX], ids=["32", "128"])
def test_dashes_keep_apart_and_never_cross(config: PathfinderConfig) -> None:
    for index in range(4):
        scene = make_scene(2, index, config)
        table = tables(config, scene.margin)
        ends = [
            (
                number,
                i,
                np.array([place(table, d, at) for at in (scene.margin, scene.margin + config.paddle_length)]),
            )
            for number, curve in enumerate(scene.curves)
            for i, d in enumerate(curve)
        ]
        # 0.8: places are on a grid of half pixels, and dashes are tested at every pixel of their length
        apart = 2 * scene.margin + config.thickness - 0.5 - 0.8
        for k, (curve, i, a) in enumerate(ends):
            for other, j, b in ends[:k]:
                if curve != other or abs(i - j) > 1:
                    assert segment_distance(a, b) > apart
                assert a.min() >= 0.4 and a.max() <= config.size - 0.4


def test_turns_follow_the_published_law() -> None:
    """In the open, the chance of a turn is proportional to cos^2(continuity * turn)."""
    config = replace(PATHX, size=512, contour=6, seed_distance=120, distractors=0, margins=(2,))
    table = tables(config, 2)
    counts = np.zeros(table.count)
    for index in range(600):
        for curve in make_scene(0, index, config).curves:
            for last, dash in pairwise(curve):
                counts[(dash.direction - last.direction) % table.count] += 1
    angle = np.arange(table.count) * 2 * math.pi / table.count
    angle = np.minimum(angle, 2 * math.pi - angle)
    law = np.where(1.8 * angle < math.pi / 2, np.cos(1.8 * angle) ** 2, 0)
    expected = law / law.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    # chi-squared with about 24 degrees of freedom: above 60 in one of 10,000 cases, and the seed is fixed
    assert ((counts[used] - expected[used]) ** 2 / expected[used]).sum() < 60


def test_the_same_seed_gives_the_same_image_whatever_was_made_before() -> None:
    images = {index: make_image(7, index)[0].tobytes() for index in range(5)}
    tables.cache_clear()
    assert {index: make_image(7, index)[0].tobytes() for index in reversed(range(5))} == images
    assert len(set(images.values())) == 5
    assert make_image(8, 0)[0].tobytes() != images[0]


def test_reducing_agrees_with_pillow() -> None:
    fine = np.zeros((40, 40))
    fine[12:15, 8:30] = 1
    ours = np.rint(reduce(fine) * 255)
    theirs = np.asarray(
        Image.fromarray((fine * 255).astype(np.uint8)).resize((20, 20), Image.Resampling.LANCZOS), dtype=float
    )
    # Pillow clips and rounds between the two axes
    np.testing.assert_allclose(ours, theirs, atol=8)


def test_impossible_images_are_refused() -> None:
    with pytest.raises(ValueError, match="seed_distance must be at most a quarter of size"):
        PathfinderConfig(size=16)
    with pytest.raises(ValueError, match="continuity must be at least 1"):
        PathfinderConfig(continuity=0.5)


def digests(store: ArrayStore) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in store.manifest["arrays"].items()}


def test_one_and_two_processes_prepare_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqboat.tasks import pathfinder

    monkeypatch.setattr(pathfinder, "SHARD", 50)
    counts = (90, 6, 6)
    one = prepare("pathfinder16", "generate", tmp_path / "one", counts=counts, seed=4, workers=1)
    two = prepare("pathfinder16", "generate", tmp_path / "two", counts=counts, seed=4, workers=2)
    assert digests(one) == digests(two)
    assert one.manifest["counts"] == {"train": 90, "val": 6, "test": 6}
    task = PathfinderTaskConfig(size=16, data_dir=str(tmp_path / "one")).build()
    example = task.dataset("val")[0]
    image, label = make_image(4, 90, PATHFINDER16)
    np.testing.assert_allclose(example.inputs[:, 0], (image.reshape(-1) / 255 - 0.5) / 0.5, atol=1e-6)
    assert example.target == label

    # an interrupted run: its finished parts are not made again
    made = []
    real = pathfinder._make_shard

    def fails_late(folder: Path, start: int, *rest: object) -> int:
        if start == 100:
            raise KeyboardInterrupt
        return counting(folder, start, *rest)

    def counting(folder: Path, start: int, *rest: object) -> int:
        made.append(start)
        return real(folder, start, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pathfinder, "_make_shard", fails_late)
    with pytest.raises(KeyboardInterrupt):
        prepare("pathfinder16", "generate", tmp_path / "cut", counts=counts, seed=4, workers=1)
    assert not (tmp_path / "cut" / "pathfinder16").exists()
    monkeypatch.setattr(pathfinder, "_make_shard", counting)
    three = prepare("pathfinder16", "generate", tmp_path / "cut", counts=counts, seed=4, workers=1)
    assert made == [0, 50, 100]
    assert digests(three) == digests(one)
    # another seed does not continue with the old parts
    assert digests(
        prepare("pathfinder16", "generate", tmp_path / "cut", counts=counts, seed=5, workers=1, force=True)
    ) != digests(one)


def published(folder: Path, size: int = 32, count: int = 30) -> Path:
    """A folder in the form of the LRA release; one image is broken, one label is out of range."""
    root = folder / f"pathfinder{size}" / "curv_contour_length_14"
    (root / "imgs" / "0").mkdir(parents=True)
    (root / "metadata").mkdir()
    lines = []
    for index in range(count):
        image = np.full((size, size), index, np.uint8)
        Image.fromarray(image).save(root / "imgs" / "0" / f"sample_{index}.png")
        lines.append(f"imgs/0 sample_{index}.png {index} {index % 2} 1.0 14 4 2 0.5 1 1")
    (root / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    lines[5] = lines[5].replace(" 5 1 ", " 5 2 ")
    (root / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
    easy = folder / f"pathfinder{size}" / "curv_baseline"
    shutil.copytree(root, easy)
    return folder


def test_published_images_are_read_from_a_folder_and_an_archive(tmp_path: Path) -> None:
    folder = published(tmp_path / "lra_release")
    one = prepare("pathfinder", str(folder), tmp_path / "one")
    with tarfile.open(tmp_path / "lra_release.gz", "w:gz") as archive:
        archive.add(folder, "lra_release")
    two = prepare("pathfinder", str(tmp_path / "lra_release.gz"), tmp_path / "two")
    assert digests(one) == digests(two)
    assert one.manifest["counts"] == {"train": 24, "val": 2, "test": 2}
    assert one.manifest["skipped"] == 2
    reasons = " ".join(skip["reason"] + skip["file"] for skip in one.manifest["skipped_records"])
    assert "label must be 0 or 1" in reasons and "sample_3.png" in reasons
    images, labels = np.asarray(one["train.images"]), np.asarray(one["train.labels"])
    np.testing.assert_array_equal(images[:, 0, 0] % 2, labels)
    values = np.concatenate(
        [np.asarray(one[f"{split}.images"])[:, 0, 0] for split in ("train", "val", "test")]
    )
    assert sorted(values) == [i for i in range(30) if i not in (3, 5)]


def test_images_of_another_size_and_pickled_metadata_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "lra_release")
    with pytest.raises(ValueError, match="contains no pathfinder128 images"):
        prepare("pathx", str(folder), tmp_path / "data")
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    table = folder / "pathfinder32" / "curv_contour_length_14" / "metadata" / "0.npy"
    table.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"0\.npy is not a table of strings"):
        prepare("pathfinder", str(folder), tmp_path / "data")
    assert not any((tmp_path / "data").glob("pathfinder*"))


def test_a_task_refuses_images_of_another_size(tmp_path: Path) -> None:
    prepare("pathfinder16", "generate", tmp_path, counts=(4, 2, 2), workers=1)
    task = PathXTaskConfig(data_dir=str(tmp_path), store="pathfinder16").build()
    with pytest.raises(ValueError, match="images of size 16, expected 128"):
        task.dataset("train")
