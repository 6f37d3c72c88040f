"""Hooks of mkdocs: documents outside docs/ become pages, and links are led to the pages or to plain names of files."""

import posixpath
import re
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for document, page in PAGE_BY_DOCUMENT.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text(encoding="utf-8")))
    for plot in sorted((ROOT / "benchmarks" / "plots").glob("*.svg")):
        files.append(File.generated(config, f"plots/{plot.name}", content=plot.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    document = DOCUMENT_BY_PAGE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts += [_with_links(markdown[end : fence.start()], document), fence[0]]
        end = fence.end()
    return "".join([*parts, _with_links(markdown[end:], document)])


def _with_links(text: str, document: str) -> str:
    return LINK.sub(lambda link: _link(link[1], link[2], link[3], document), text)


def _link(image: str, text: str, target: str, document: str) -> str:
    """The link as it is on the site; one to a file that is no page becomes the file's name."""
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return f"{image}[{text}]({target})"
    file = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
    page = PAGE_BY_DOCUMENT.get(file, file.removeprefix("docs/"))
    if file in PAGE_BY_DOCUMENT or file.startswith("docs/"):
        return f"{image}[{text}]({page}{hash_}{anchor})"
    if file.startswith("benchmarks/plots/"):
        return f"{image}[{text}]({file.removeprefix('benchmarks/')})"
    if not (ROOT / file).exists():
        raise FileNotFoundError(f"{document}: {target}")
    return f"`{file}`" if text.strip("`") in file else f"{text} (`{file}`)"
