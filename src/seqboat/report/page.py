"""One self-contained HTML page: elements, tables and charts from plain data, and the frame around them.

A page fetches nothing: styles and scripts from the package are inlined, and a content security policy allows exactly
those, by hash, and no requests. Text from data is escaped here, or goes into JSON that a browser never executes;
control characters and bidirectional marks are made visible. A chart is a specification in plain data: the page's
script draws it, and a table below shows its numbers.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from string import Template
from typing import Any

from seqboat.version import __version__

Numbers = dict[str, Any]
"""A report as plain data."""
Chart = dict[str, Any]
"""Specification of a chart: `type` (bars, rows, matrix, lines), `title`, `about`, and the numbers."""

SCRIPTS = ("common.js", "charts.js", "explorer.js")
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


def visible(text: str) -> str:
    r"""Text with control codes and bidirectional marks replaced by visible signs.

    >>> visible("a\x1b[31mb\u202ec\n")
    'a␛[31mb⟨202E⟩c⏎'
    """
    return "".join(_sign(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def _sign(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return "⏎" if character == "\n" else "⇥"
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨{code:04X}⟩"


def element(tag: str, *children: object, **attributes: object) -> Html:
    """An element; children that are not `Html` are escaped, attributes that are None are omitted."""
    words = [tag]
    for name, value in attributes.items():
        if value is not None:
            words.append(f'{name.rstrip("_").replace("_", "-")}="{html.escape(visible(str(value)))}"')
    inner = "".join(
        child if isinstance(child, Html) else html.escape(visible(str(child))) for child in children
    )
    return Html(f"<{' '.join(words)}>{inner}</{tag}>")


def join(parts: Iterable[Html]) -> Html:
    """Concatenate elements."""
    return Html("".join(parts))


def asset(name: str) -> str:
    """The content of an asset file."""
    return files("seqboat").joinpath("report", "assets", name).read_text(encoding="utf-8")


def as_json(data: object) -> str:
    """Plain data as ASCII JSON that cannot close its HTML element; NaN and infinity become null.

    >>> as_json({"a": "</script>", "b": float("nan")})
    '{"a":"\\\\u003c/script\\\\u003e","b":null}'
    """
    text = json.dumps(finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(data: Any) -> Any:
    """The same data, with None for numbers that are not finite."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(key): finite(value) for key, value in data.items()}
    return [finite(item) for item in data] if isinstance(data, list | tuple) else data


# numbers as text


def spell(value: Any, unit: str | None = None) -> str:
    """A number as text; a dash for None.

    >>> spell(0.3432, "percent"), spell(170770), spell(1.15320), spell(None)
    ('34.3 %', '170,770', '1.15', '-')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if unit == "percent":
        percent = 100 * value
        return "< 0.1 %" if 0 < percent < 0.1 else f"{percent:.1f} %"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def day_text(moment: datetime) -> str:
    """A date as text."""
    return f"{moment.day} {moment:%B %Y}"


def score_unit(metric: str) -> str | None:
    """The unit of a metric."""
    return "percent" if metric == "accuracy" else None


# parts of a page


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    caption: str,
    words: Sequence[int] = (),
    about: Mapping[str, str] | None = None,
) -> Html:
    """A table whose first column names the rows.

    Args:
        head: names of the columns.
        rows: cells; numbers as text.
        caption: description for screen readers.
        words: columns of text; the others are numbers, aligned to the right.
        about: what columns mean, shown on hover; `explained` shows the same as text.
    """
    about = about or {}
    kinds = ["text" if i in (0, *words) else "number" for i in range(len(head))]
    top = join(
        element("th", name, scope="col", class_=kind, title=about.get(name))
        for name, kind in zip(head, kinds, strict=True)
    )
    body = []
    for row in rows:
        first, *others = row
        cells = (element("td", cell, class_=kind) for cell, kind in zip(others, kinds[1:], strict=True))
        body.append(element("tr", element("th", first, scope="row"), *cells))
    content = element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", element("tr", top)),
        element("tbody", *body),
    )
    # wide tables scroll, which must work without a mouse
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=caption)


def explained(about: Mapping[str, str]) -> Html:
    """What the columns of a table mean, as text that can be opened."""
    terms = [part for name, text in about.items() for part in (element("dt", name), element("dd", text))]
    return element("details", element("summary", "What the columns mean"), element("dl", *terms))


def chart_table(chart: Chart) -> Html:
    """The numbers of a chart."""
    unit, kind = chart.get("unit"), chart["type"]
    title = f"{chart['title']}: numbers"
    if kind == "lines":
        series = chart["series"]
        steps = sorted({x for one in series for x, _ in one["points"]})
        lookup = [dict(one["points"]) for one in series]
        rows = [[spell(x), *(spell(c.get(x), unit) for c in lookup)] for x in steps]
        return table([chart["xlabel"], *(one["name"] for one in series)], rows, title)
    if kind == "bars":
        head: list[str] = [chart["label"]]
        columns: list[list[str]] = []
        for one in chart["series"]:
            head.append(one["name"])
            columns.append([spell(v, unit) for v in one["values"]])
            if one.get("errors"):
                head.append("std")
                columns.append([spell(v, unit) for v in one["errors"]])
        return table(head, zip(chart["rows"], *columns, strict=True), title)
    if kind == "rows":
        # bins are rows: there are more bins than layers
        rows = [
            [name, *(spell(values[i], unit) for values in chart["values"])]
            for i, name in enumerate(chart["bins"])
        ]
        return table([chart["xlabel"], *chart["rows"]], rows, title)
    shown = chart.get("texts") or [[spell(v, unit) for v in values] for values in chart["values"]]
    rows = [[name, *texts] for name, texts in zip(chart["rows"], shown, strict=True)]
    return table([chart["label"], *chart["columns"]], rows, title)


def figure(key: str, chart: Chart) -> Html:
    """A chart with its title, and a collapsible table of its numbers."""
    about = [element("p", chart["about"])] if chart.get("about") else []
    return element(
        "figure",
        element("figcaption", element("h3", chart["title"]), *about),
        element(
            "div",
            class_="chart",
            data_chart=key,
            data_label=f"Chart: {chart['title']}. The table below has its numbers.",
        ),
        element("details", element("summary", "Table"), chart_table(chart)),
        class_="card",
    )


def tiles(items: Iterable[tuple[str, str, str]]) -> Html:
    """Tiles with a name, a large number and a note."""
    cells = (
        element(
            "li",
            element("span", name, class_="name"),
            element("span", number, class_="figure"),
            element("span", note, class_="note"),
        )
        for name, number, note in items
    )
    return element("ul", *cells, class_="tiles")


def settings_table(settings: Mapping[str, object], caption: str) -> Html:
    """A table of setting names and values."""
    rows = [[name, spell_setting(value)] for name, value in settings.items()]
    return table(["setting", "value"], rows, caption, words=(1,))


def spell_setting(value: object) -> str:
    """A setting as on the command line."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


# the frame


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def write_page(
    title: str,
    lead: str,
    sections: Sequence[tuple[str, str, Html]],
    charts: Mapping[str, Chart],
    explorer: Mapping[str, Any] | None = None,
    samples: Sequence[str] = (),
) -> str:
    """A whole page.

    Args:
        title: of the page.
        lead: the line below the title.
        sections: anchor, name in the navigation, content.
        charts: by the keys given to `figure`.
        explorer: data for the explorer, besides the samples.
        samples: packed, in base64.
    """
    style = asset("page.css")
    names = [name for name in SCRIPTS if explorer is not None or name != "explorer.js"]
    scripts = {name: asset(name) for name in names}
    policy = "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(map(_hash, scripts.values())),
            f"style-src {_hash(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    links = join(element("a", name, href=f"#{anchor}") for anchor, name, _ in sections)
    numbers = {"charts": charts, "explorer": explorer}
    now = datetime.now(UTC)
    written = f"{day_text(now)}, {now:%H:%M} UTC"
    body = join(
        [
            element(
                "header",
                element("h1", title),
                element("p", lead, class_="lead"),
                element("nav", links, aria_label="Parts of this page"),
            ),
            element(
                "noscript",
                element(
                    "p", "The charts and the explorer need JavaScript; the tables do not.", class_="card"
                ),
            ),
            element("main", join(content for _, _, content in sections), id="main"),
            element(
                "footer",
                element(
                    "p",
                    f"Written by seqboat {__version__} on {written}. This page makes no network requests.",
                ),
            ),
        ]
    )
    data = [f'<script type="application/json" id="numbers">{as_json(numbers)}</script>']
    data += [f'<script type="text/plain" id="sample-{i}">{text}</script>' for i, text in enumerate(samples)]
    return Template(asset("template.html")).substitute(
        # not escaped: the policy contains only hashes and keywords
        policy=policy,
        title=html.escape(visible(title)),
        style=style,
        body=body,
        data="\n".join(data),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts.values()),
    )
