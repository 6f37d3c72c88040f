"""Hooks of mkdocs that add documents outside docs/ as pages, point links to pages, and turn marked sections into tabs."""

import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGE_BY_DOCUMENT = {
    "README.md": "index.md",
    "SECURITY.md": "threat-model.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
}
DOCUMENT_BY_PAGE = {page: document for document, page in PAGE_BY_DOCUMENT.items()}
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
TABS = re.compile(r"^<!-- tabs:[^\n]*-->\n(.*?)^<!-- end of the tabs -->\n", re.DOTALL | re.MULTILINE)
SCRIPT = "site_tabs.js"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for document, page in PAGE_BY_DOCUMENT.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text(encoding="utf-8")))
    for plot in sorted((ROOT / "benchmarks" / "plots").glob("*.svg")):
        files.append(File.generated(config, f"plots/{plot.name}", content=plot.read_bytes()))
    files.append(File.generated(config, SCRIPT, content=(ROOT / "tools" / SCRIPT).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    if page.file.name in config.extra["found_last"]:
        page.meta["search"] = {"boost": 0.2}
    document = DOCUMENT_BY_PAGE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts += [_with_links(markdown[end : fence.start()], document), fence[0]]
        end = fence.end()
    return TABS.sub(lambda marked: _tabs(marked[1]), "".join([*parts, _with_links(markdown[end:], document)]))


def _tabs(text: str) -> str:
    """A tab for each `##` section. The heading stays inside its tab, so the search and links find it."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    titles = [section.partition("\n")[0].removeprefix("## ") for section in sections]
    tabs = [
        f'=== "{title}"\n\n{textwrap.indent(section, "    ")}' for title, section in zip(titles, sections, strict=True)
    ]
    return "".join(tabs[1:])


def _with_links(text: str, document: str) -> str:
    return LINK.sub(lambda link: _link(link[1], link[2], link[3], document), text)


def _link(image: str, text: str, target: str, document: str) -> str:
    """The link's text on the site. A link to a file that is no page becomes the file's name."""
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return f"{image}[{text}]({target})"
    file = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
    if file in PAGE_BY_DOCUMENT or file.startswith(("docs/", "benchmarks/plots/")):
        folder = posixpath.dirname(_page_of(document)) or "."
        return f"{image}[{text}]({posixpath.relpath(_page_of(file), folder)}{hash_}{anchor})"
    if not (ROOT / file).exists():
        raise FileNotFoundError(f"{document}: {target}")
    return f"`{file}`" if text.strip("`") in file else f"{text} (`{file}`)"


def _page_of(file: str) -> str:
    """The path on the site of a document or plot of the repository."""
    return PAGE_BY_DOCUMENT.get(file, file.removeprefix("docs/").removeprefix("benchmarks/"))
