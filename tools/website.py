"""Collect the pages of the documentation site, and check the links of the built one.

    python tools/website.py collect       build/docs and build/mkdocs.yml: documents, and a page for every public name
    python tools/website.py check site    every link and anchor of the built pages leads somewhere

The documents stay as they are in the repository, with links that work there. On the site, links to other files of the
repository lead to copies of these files.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "seqboat"
BUILD = ROOT / "build"
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")


class Name(NamedTuple):
    """A public name."""

    name: str
    module: str
    """where it is defined"""
    public: str
    """the module to import it from"""
    kind: str
    """class, function or table"""
    about: str
    """the first sentence of its docstring"""

    @property
    def page(self) -> str:
        """Path of its page; names that differ in case only are of different kinds."""
        return f"api/{self.kind}/{self.name}.md"


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def assigned(tree: ast.Module, name: str) -> ast.expr:
    """What a module assigns to a name."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            return node.value
    raise ValueError(f"no {name} is assigned")


def public_names() -> list[Name]:
    """Everything in `seqboat.__all__` and `seqboat.mixers.__all__`, from the source: nothing is imported."""
    top = parse(PACKAGE / "__init__.py")
    homes = ast.literal_eval(assigned(top, "_HOMES"))
    listed = ast.literal_eval(assigned(top, "__all__"))
    found = [describe(name, f"seqboat.{homes[name]}", "seqboat") for name in listed if name != "__version__"]
    mixers = parse(PACKAGE / "mixers" / "__init__.py")
    origins = {
        alias.name: str(node.module)
        for node in mixers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name in ast.literal_eval(assigned(mixers, "__all__")):
        if name not in listed:
            found.append(describe(name, origins[name], "seqboat.mixers"))
    return found


def describe(name: str, module: str, public: str) -> Name:
    """Look a name up in the source of its module."""
    path = ROOT / "src" / Path(*module.split("."))
    tree = parse(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            return Name(name, module, public, kind, (ast.get_docstring(node) or "").split("\n")[0])
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if isinstance(target, ast.Name) and target.id == name:
            text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            return Name(name, module, public, "table", str(text).split("\n")[0])
    raise ValueError(f"{module} does not define {name}")


def sections(index: str) -> dict[str, dict[str, str]]:
    """The parts of docs/index.md: titles of pages and their links."""
    found: dict[str, dict[str, str]] = {}
    for part in index.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        rows = re.findall(r"^\| \[([^\]]+)\]\(([^)#]+)\)", body, flags=re.MULTILINE)
        found[title] = dict(rows)
    return found


class Pages:
    """The folder that mkdocs reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.copied: set[Path] = set()

    def write(self, page: str, text: str) -> None:
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def place(self, path: Path) -> str:
        """Where a file of the repository is on the site; it is copied there if it is not a page already."""
        if path.parent == ROOT / "docs" or (ROOT / "docs" / "images") in path.parents:
            return path.relative_to(ROOT / "docs").as_posix()
        if path.parent == ROOT and path.suffix == ".md" and path.name != "README.md":
            return path.name
        inside = path.relative_to(ROOT)
        target = f"files/{inside.as_posix()}"
        if path.is_dir():
            target += "/contents.md"
        elif path.suffix in (".md", ".py", ".sh", ".txt", ".toml", ".yml", ""):
            target += ".md"
        if path not in self.copied:
            self.copied.add(path)
            self.copy(path, target)
        return target

    def copy(self, path: Path, target: str) -> None:
        """A page with the content of a file, or with a list of what is in a folder."""
        title = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            entries = [
                entry
                for entry in sorted(path.iterdir())
                if not entry.name.startswith((".", "__")) and not entry.name.endswith(".egg-info")
            ]
            rows = []
            for entry in entries:
                link = self.relative(target, self.place(entry))
                rows.append(f"- [{entry.name}{'/' if entry.is_dir() else ''}]({link})")
            self.write(target, f"# {title}\n\n" + "\n".join(rows) + "\n")
        elif path.suffix == ".md":
            self.page(path, target)
        elif target.endswith(".md"):
            language = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml"}.get(
                path.suffix, "text"
            )
            content = path.read_text(encoding="utf-8")
            self.write(target, f"# {title}\n\n````{language}\n{content.rstrip()}\n````\n")
        else:
            (self.folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.folder / target)

    def relative(self, page: str, target: str) -> str:
        """A link from one page to another."""
        return "../" * page.count("/") + target

    def page(self, path: Path, target: str) -> None:
        """A document of the repository, with links that fit the site."""

        def change(found: re.Match[str]) -> str:
            link = found[2]
            if "://" in link or link.startswith("mailto:"):
                return found[0]
            there = (path.parent / unquote(link)).resolve()
            if not there.exists():
                raise ValueError(f"{path.relative_to(ROOT)} links to {link}, which does not exist")
            return found[1] + self.relative(target, self.place(there)) + found[3]

        text = path.read_text(encoding="utf-8")
        # code is not searched for links
        pieces = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.DOTALL | re.MULTILINE)
        pieces[::2] = [LINK.sub(change, piece) for piece in pieces[::2]]
        self.write(target, "".join(pieces))


def api_pages(pages: Pages) -> list[Name]:
    """A page for every public name, and a table of them."""
    names = public_names()
    for name in names:
        lead = f"`from {name.public} import {name.name}`\n\n"
        if name.kind == "table":
            options = "    options:\n      show_root_heading: false\n"
            text = f"# {name.name}\n\n{lead}::: {name.module}.{name.name}\n{options}"
        else:
            text = f"{lead}::: {name.module}.{name.name}\n"
        pages.write(name.page, text)
    titles = {"class": "Classes", "function": "Functions", "table": "Tables"}
    parts = [
        "# API reference\n\nEvery name of `seqboat`, and the layers and configurations of `seqboat.mixers`. Layers "
        "and models take their settings as keywords, or as one configuration.\n"
    ]
    for kind, title in titles.items():
        rows = [f"| [`{n.name}`]({kind}/{n.name}.md) | {n.about} |" for n in names if n.kind == kind]
        parts.append(f"## {title}\n\n| name | what it is |\n|---|---|\n" + "\n".join(rows) + "\n")
    pages.write("api/index.md", "\n".join(parts))
    return names


def collect(folder: Path) -> list[str]:
    """Write all pages; returns the lines of the navigation."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = Pages(folder)
    parts = sections((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    listed = {link for links in parts.values() for link in links.values()}
    documents = sorted((ROOT / "docs").glob("*.md"))
    for document in documents:
        if document.name not in listed | {"index.md"}:
            raise ValueError(f"docs/index.md does not list docs/{document.name}")
        pages.page(document, document.name)
    for document in sorted(ROOT.glob("*.md")):
        if document.name != "README.md":
            pages.page(document, document.name)
    shutil.copytree(ROOT / "docs" / "images", folder / "images", dirs_exist_ok=True)
    names = api_pages(pages)
    lines = ["nav:", "  - Home: index.md"]
    for title, links in parts.items():
        lines.append(f"  - {title}:")
        for label, link in links.items():
            there = (ROOT / "docs" / link).resolve()
            lines.append(f'      - "{label}": {pages.place(there)}')
    lines += ["  - API:", "      - api/index.md"]
    for kind, title in (("class", "Classes"), ("function", "Functions"), ("table", "Tables")):
        lines += [f"      - {title}:", *(f"          - {n.name}: {n.page}" for n in names if n.kind == kind)]
    extra = sorted(path for path in folder.rglob("*.md") if path.relative_to(folder).parts[0] == "files")
    lines.append("not_in_nav: |\n" + "\n".join(f"  /{path.relative_to(folder).as_posix()}" for path in extra))
    return lines


class Links(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        for key in ("href", "src", "srcset"):
            if found.get(key):
                self.links.add(found[key])


def broken_links(site: Path) -> list[str]:
    """Links of a built site that lead nowhere."""
    pages: dict[Path, Links] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links start at the root of a server
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            fragment = unquote(parts.fragment)
            known = pages[there].anchors if there in pages else set()
            missing_anchor = fragment and there in pages and fragment not in known and fragment != "__top"
            if not there.exists() or missing_anchor:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def main(arguments: list[str]) -> int:
    """Collect the pages, or check what was built."""
    if arguments == ["collect"]:
        nav = collect(BUILD / "docs")
        config = ["INHERIT: ../mkdocs.yml", "docs_dir: docs", "site_dir: ../site", *nav]
        (BUILD / "mkdocs.yml").write_text("\n".join(config) + "\n", encoding="utf-8")
        return 0
    if len(arguments) == 2 and arguments[0] == "check":
        broken = broken_links(Path(arguments[1]).resolve())
        print("\n".join(broken) or "every link leads somewhere")
        return 1 if broken else 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
