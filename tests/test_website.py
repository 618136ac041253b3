"""The documentation site: pages for every document and every public name, with links that lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import seqboat
import website
from examples_in_docstrings import fence
from seqboat import mixers

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The collected pages, and the navigation."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    return folder, website.collect(folder)


def test_every_public_name_has_a_page(pages: tuple[Path, list[str]]) -> None:
    folder, navigation = pages
    public = {*seqboat.__all__, *mixers.__all__} - {"__version__"}
    names = {name.name: name for name in website.public_names()}
    assert names.keys() == public
    for name in names.values():
        home = getattr(seqboat if name.public == "seqboat" else mixers, name.name)
        if name.kind != "table":
            assert home.__module__ == name.module and name.about == (home.__doc__ or "").split("\n")[0]
        assert f"::: {name.module}.{name.name}\n" in (folder / name.page).read_text(encoding="utf-8")
        assert name.about and any(line.endswith(f": {name.page}") for line in navigation)
    # on a file system that ignores case, no page may overwrite another
    assert len({name.page.lower() for name in names.values()}) == len(names)


def test_every_document_is_a_page(pages: tuple[Path, list[str]]) -> None:
    folder, navigation = pages
    for path in [
        *(ROOT / "docs").glob("*.md"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
    ]:
        assert any(line.endswith(f": {path.name}") for line in navigation), path.name
    for page in folder.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"^(```+).*?^\1$|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)
        for _, link, _ in website.LINK.findall(text):
            assert "://" in link or (page.parent / link).exists(), f"{page.relative_to(folder)}: {link}"


def test_broken_links_of_a_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here">x</a><a href="#top">x</a><h1 id="top">x</h1>')
    (tmp_path / "b.html").write_text('<p id="here"><img src="gone.png"><a href="a.html#gone">x</a>')
    assert website.broken_links(tmp_path) == ["b.html: a.html#gone", "b.html: gone.png"]


def test_a_document_that_the_index_forgets_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Index\n")
    (tmp_path / "docs" / "new.md").write_text("# New\n")
    monkeypatch.setattr(website, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"docs/index.md does not list docs/new.md"):
        website.collect(tmp_path / "out")


def test_doctests_become_code_blocks() -> None:
    text = "Adds.\n\nArgs:\n    x: one.\n\n>>> 1 + 1\n2\n\nMore.\n>>> 3\n3"
    code = ["```pycon\n>>> 1 + 1\n2\n```", "```pycon\n>>> 3\n3\n```"]
    assert fence(text) == f"Adds.\n\nArgs:\n    x: one.\n\n{code[0]}\n\nMore.\n\n{code[1]}"
    assert fence("No example.") == "No example."


@pytest.mark.slow
def test_the_site_builds() -> None:
    """Where `make docs` has made its environment."""
    tool = ROOT / ".venv-docs" / "bin" / "mkdocs"
    if not tool.exists():
        pytest.skip("the site is built by `make docs`")
    assert website.main(["collect"]) == 0
    done = subprocess.run(
        [str(tool), "build", "--quiet", "--strict", "--config-file", "build/mkdocs.yml"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert website.broken_links(ROOT / "site") == []
    page = (ROOT / "site" / "api" / "class" / "SeqBoat.html").read_text(encoding="utf-8")
    assert "d_model" in page and "working memory" in page and "SeqBoat" in page
