"""Draw the diagrams of the README and docs/architecture.md as SVG, light and dark: `python tools/diagrams.py`.

Each diagram is one function on a canvas; the two themes differ in colors only. The picture of the package layers
reads the folder order from tests/test_imports.py, so it cannot drift from what the tests enforce.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"

THEMES = {
    "": {
        "ink": "#1f2328",
        "muted": "#59636e",
        "line": "#818b98",
        "plain": "#f6f8fa",
        "edge": "#d1d9e0",
        "blue": "#ddf4ff",
        "blue-edge": "#54aeff",
        "orange": "#ffe2c2",
        "orange-edge": "#e16f24",
        "green": "#d5f5dc",
        "green-edge": "#2da44e",
        "purple": "#efe3ff",
        "purple-edge": "#a475f9",
    },
    "-dark": {
        "ink": "#e6edf3",
        "muted": "#9198a1",
        "line": "#6e7681",
        "plain": "#161b22",
        "edge": "#3d444d",
        "blue": "#0c2d4e",
        "blue-edge": "#388bfd",
        "orange": "#4a2a10",
        "orange-edge": "#f0883e",
        "green": "#12361f",
        "green-edge": "#3fb950",
        "purple": "#2e1f4d",
        "purple-edge": "#a371f7",
    },
}


class Canvas:
    """Boxes, arrows and labels, collected as SVG elements."""

    def __init__(self, width: int, height: int, title: str, colors: dict[str, str]) -> None:
        self.size, self.title, self.colors = (width, height), title, colors
        self.parts: list[str] = []

    def _fill(self, kind: str) -> tuple[str, str]:
        return self.colors[kind], self.colors["edge" if kind == "plain" else f"{kind}-edge"]

    def box(self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "plain") -> None:
        fill, edge = self._fill(kind)
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="{edge}"/>'
        )
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            # the first line is the name, what follows explains it
            size, color = (14, "ink") if i == 0 else (11.5, "muted")
            self.text(
                x + w / 2, y + h / 2 + 5 + (i - (len(lines) - 1) / 2) * 16, line, size=size, color=color
            )

    def cell(self, x: float, y: float, size: float, text: str = "", kind: str = "plain") -> None:
        fill, edge = self._fill(kind)
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" rx="3" fill="{fill}" stroke="{edge}"/>'
        )
        if text:
            self.text(x + size / 2, y + size / 2 + 4, text, size=11)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        color: str = "ink",
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight} '
            f'fill="{self.colors[color]}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{self.colors["line"]}" stroke-width="1.5"{dash} '
            'marker-end="url(#head)"/>'
        )

    def rule(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{self.colors["edge"]}" stroke-width="1"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], color: str) -> None:
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{self.colors[color]}" stroke-width="2.5"/>')
        for x, y in points:
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{self.colors[color]}"/>')

    def svg(self) -> str:
        width, height = self.size
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{self.colors["line"]}"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, '
                'sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{head}</defs>",
                *self.parts,
                "</svg>",
                "",
            ]
        )


ACTIVE = (1, 4, 5, 9)
"""The active tokens of the sequence in the picture of the layer."""


def _strip(c: Canvas, x: float, y: float, active: Sequence[int], count: int, size: float = 18) -> None:
    for i in range(count):
        c.cell(x + i * (size + 3), y, size, kind="orange" if i in active else "plain")


def layer(c: Canvas) -> None:
    """The SeqBoat layer: the picture of the README."""
    c.text(20, 34, "x: every token", anchor="start", bold=True)
    _strip(c, 20, 46, (), 12)
    c.arrow((145, 70), (145, 96))
    c.box(40, 98, 210, 52, "State-space layer\nlinear time, all tokens", "blue")
    c.arrow((145, 150), (145, 196))
    c.box(40, 198, 210, 52, "Router\nactivate this token? how sure?", "purple")
    _strip(c, 20, 282, ACTIVE, 12)
    c.arrow((145, 250), (145, 280))
    c.text(20, 322, "active tokens, chosen per token and layer", anchor="start", size=12, color="muted")

    c.arrow((272, 291), (320, 291))
    c.box(322, 262, 138, 58, "Pack\ndrop inactive tokens", "orange")
    c.arrow((460, 291), (490, 291))
    c.box(492, 262, 150, 58, "Gated attention\nwithin a small window", "orange")
    c.arrow((642, 291), (680, 291))
    c.box(682, 262, 132, 58, "Unpack, scale\nby the confidence", "orange")
    c.arrow((250, 224), (748, 224), (748, 260), dashed=True)
    c.text(500, 216, "confidence: carries the gradient to the router", size=12, color="muted")

    c.arrow((250, 124), (490, 124))
    c.box(492, 98, 150, 52, "Linear\nall tokens", "blue")
    c.arrow((642, 124), (830, 124))
    c.arrow((814, 291), (845, 291), (845, 141))
    c.arrow((270, 55), (845, 55), (845, 107))
    c.text(560, 47, "residual connection", size=12, color="muted")
    c.box(831, 110, 28, 28, "+", "green")
    c.arrow((859, 124), (892, 124))
    c.box(894, 98, 84, 52, "SiLU\nand norm", "green")
    c.text(936, 180, "y", bold=True)
    c.arrow((936, 150), (936, 166))


def folder_order() -> list[list[str]]:
    """The groups of tests/test_imports.py, from the bottom up, without the entry point."""
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ORDER":
            groups = [group.split() for group in ast.literal_eval(node.value).split("|")]
            return [group for group in groups if group != ["__main__"]]
    raise ValueError("tests/test_imports.py has no ORDER")


KINDS = {
    "ops": "blue",
    "core": "orange",
    "mixers": "orange",
    "models": "orange",
    "commands": "green",
    "cli": "green",
}


def _about(name: str) -> str:
    """The first line of a folder's or module's docstring, without its period."""
    package = ROOT / "src" / "seqboat"
    folder, module = package / name / "__init__.py", package / f"{name}.py"
    tree = ast.parse((folder if folder.exists() else module).read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").split("\n")[0].rstrip(".")


def layers(c: Canvas) -> None:
    """Folders and modules of the package: everything imports downward only."""
    groups = folder_order()
    c.size = (900, 38 * len(groups) + 56)
    top = c.size[1] - 36
    for i, names in enumerate(groups):
        y = top - (i + 1) * 38 + 4
        width = (820 - 10 * (len(names) - 1)) / len(names)
        for j, name in enumerate(names):
            x = 60 + j * (width + 10)
            c.box(x, y, width, 32, "" if len(names) == 1 else name, KINDS.get(name, "plain"))
            if len(names) == 1:
                c.text(x + 14, y + 21, name, anchor="start", size=14)
                c.text(x + 110, y + 21, _about(name), anchor="start", size=12, color="muted")
    c.arrow((30, 16), (30, top - 4))
    c.text(
        60,
        c.size[1] - 14,
        "Imports point down: a box may use any box below it.",
        anchor="start",
        color="muted",
    )


def step(c: Canvas) -> None:
    """One training step, from the seed to the checkpoint."""
    rows = [
        ["seed, step number", "Loader\nbatch = f(seed, step)", "Backbone\nlogits, routings"],
        [
            "Optimizer\nAdamW, RAdam or Adagrad",
            "Gradient\nclip, skip if not finite",
            "Loss\ntask + budgets + auxiliary",
        ],
        [
            "Budgets\nmove the thresholds",
            "metrics.jsonl\nloss, rates, speed",
            "step-N/\nchecksum, then rename",
        ],
    ]
    kinds = [["plain", "blue", "orange"], ["green", "blue", "purple"], ["green", "plain", "plain"]]
    for r, row in enumerate(rows):
        for k, text in enumerate(row):
            c.box(30 + k * 295, 30 + r * 110, 220, 60, text, kinds[r][k])
    for k in (0, 1):
        c.arrow((250 + k * 295, 60), (323 + k * 295, 60))
    c.arrow((730, 90), (730, 138))
    c.arrow((620, 170), (547, 170))
    c.arrow((325, 170), (252, 170))
    c.arrow((140, 200), (140, 248))
    c.arrow((250, 280), (323, 280))
    c.arrow((545, 280), (618, 280))
    c.text(286, 48, "draws", size=12, color="muted")
    c.text(584, 48, "inputs", size=12, color="muted")
    c.text(722, 118, "sums over processes and micro-batches", size=12, color="muted", anchor="end")
    c.text(
        440,
        352,
        "A step depends on weights, configuration and step number alone: a resumed run repeats the same bits.",
        color="muted",
    )


def packing(c: Canvas) -> None:
    """Padded batch, packed tokens, banded attention."""
    c.text(30, 28, "1. Padded batch (batch, time)", anchor="start", bold=True)
    rows = [("a", 8, (1, 2, 5, 7)), ("b", 5, (0, 3)), ("c", 7, (1, 4, 6))]
    for r, (name, length, active) in enumerate(rows):
        for t in range(8):
            if t < length:
                on = t in active
                c.cell(30 + t * 29, 44 + r * 32, 26, f"{name}{t}" if on else "", "orange" if on else "plain")
            else:
                c.text(43 + t * 29, 62 + r * 32, "·", color="muted")
    c.text(30, 160, "orange: active; dots: padding", anchor="start", size=12, color="muted")

    c.arrow((272, 90), (318, 90))
    c.text(330, 28, "2. Packed tokens (tokens, dim)", anchor="start", bold=True)
    tokens = [f"{name}{t}" for name, _, active in rows for t in active]
    for i, token in enumerate(tokens):
        c.cell(330 + i * 29, 76, 26, token, "orange")
    c.text(330, 126, "one array for the whole batch, no padding;", anchor="start", size=12, color="muted")
    c.text(330, 143, "keeps sequence, position and starts", anchor="start", size=12, color="muted")

    c.arrow((600, 90), (646, 90))
    c.text(660, 28, "3. Banded attention (window 2, causal)", anchor="start", bold=True)
    for q, query in enumerate(tokens):
        c.text(672, 58 + q * 23, query, size=11, color="muted")
        for k, key in enumerate(tokens):
            seen = query[0] == key[0] and 0 <= q - k <= 2
            c.cell(690 + k * 23, 44 + q * 23, 20, kind="orange" if seen else "plain")
    c.text(690, 268, "rows: queries, columns: keys;", anchor="start", size=12, color="muted")
    c.text(690, 285, "only blocks near the diagonal are computed", anchor="start", size=12, color="muted")


def scan(c: Canvas) -> None:
    """The block scan of a diagonal state-space layer."""
    for k in range(3):
        x = 60 + k * 285
        c.text(x + 105, 28, f"block {k + 1}: 64 tokens", bold=True)
        for i in range(8):
            c.cell(x + 3 + i * 26, 40, 22)
        c.arrow((x + 105, 64), (x + 105, 94))
        c.box(x, 96, 210, 54, "y = mixᵀ x + leaveᵀ s\nmatrix products in the block", "blue")
        c.arrow((x + 105, 150), (x + 105, 180))
        for i in range(8):
            c.cell(x + 3 + i * 26, 182, 22, kind="green")
        if k < 2:
            c.arrow((x + 210, 123), (x + 283, 123))
            c.text(x + 247, 114, f"s{k + 2}", size=13)
            c.text(x + 247, 141, "decay · s", size=10.5, color="muted")
            c.text(x + 247, 155, "+ enterᵀ x", size=10.5, color="muted")
    c.arrow((20, 123), (58, 123))
    c.text(36, 114, "s1", size=13)
    c.arrow((840, 123), (878, 123))
    c.text(
        450,
        236,
        "Time is linear in the length, no table is longer than a block, and a state can enter or leave anywhere.",
        color="muted",
    )


def decoding(c: Canvas) -> None:
    """What a causal layer keeps between two tokens."""
    c.text(65, 80, "token t", bold=True)
    c.box(20, 90, 90, 44, "x", "plain")
    c.arrow((110, 112), (158, 112))
    c.box(160, 80, 160, 64, "State-space step\ns = q · s + b · x", "blue")
    c.arrow((320, 112), (368, 112))
    c.box(370, 80, 130, 64, "Router\nactive?", "purple")
    c.arrow((500, 112), (558, 112))
    c.text(528, 103, "yes", size=12, color="muted")
    c.box(560, 80, 190, 64, "Attention step\none query, ≤ window + 1 keys", "orange")
    c.arrow((750, 112), (818, 112))
    c.box(820, 90, 60, 44, "y", "green")
    c.arrow((435, 80), (435, 40), (850, 40), (850, 88))
    c.text(640, 33, "no: the state-space output alone", size=12, color="muted")

    c.text(30, 226, "state", anchor="start", bold=True)
    c.box(160, 200, 160, 56, "SSM state\n(batch, dim, states)", "blue")
    c.arrow((215, 198), (215, 146))
    c.arrow((265, 146), (265, 198))
    c.box(370, 200, 130, 56, "Counters\nseen, spent", "purple")
    c.arrow((415, 198), (415, 146))
    c.arrow((455, 146), (455, 198))
    for i in range(8):
        c.cell(565 + i * 23, 206, 20, kind="orange" if i < 5 else "plain")
    c.text(655, 246, "keys, values, positions of the last", size=11.5, color="muted")
    c.text(655, 261, "window active tokens: a ring buffer", size=11.5, color="muted")
    c.arrow((625, 203), (625, 146))
    c.arrow((685, 146), (685, 203))
    c.text(
        450,
        296,
        "The size does not depend on how many tokens were read. States are values that are passed in and returned.",
        color="muted",
    )


DIAGRAMS: dict[str, tuple[Callable[[Canvas], None], int, int, str]] = {
    "layer": (
        layer,
        990,
        336,
        "The SeqBoat layer: a state-space layer on all tokens, attention on the active ones",
    ),
    "architecture-layers": (
        layers,
        900,
        500,
        "Package layers, from commands at the top to operations at the bottom",
    ),
    "architecture-step": (step, 880, 370, "One training step"),
    "architecture-packing": (packing, 960, 300, "Padded batch, packed tokens, banded attention"),
    "architecture-scan": (
        scan,
        900,
        256,
        "The block scan: matrix products in a block, a state between blocks",
    ),
    "architecture-decoding": (decoding, 900, 312, "The state of a causal layer between two tokens"),
}


def draw(name: str, theme: str) -> str:
    """One diagram as SVG text."""
    function, width, height, title = DIAGRAMS[name]
    canvas = Canvas(width, height, title, THEMES[theme])
    function(canvas)
    return canvas.svg()


def main() -> int:
    for name in DIAGRAMS:
        for theme in THEMES:
            (IMAGES / f"{name}{theme}.svg").write_text(draw(name, theme), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
