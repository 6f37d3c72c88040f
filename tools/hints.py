"""Prints sizes of the package and its documents as hints. `make check` runs it; no figure here fails anything.

python tools/hints.py
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES = 500
FUNCTION_LINES = 50
FOLDER_FILES = 13
SHORT_FILE_LINES = 40
PAGE_BYTES = 25_000
SENTENCE_WORDS = 25


def read_modules(folder: str) -> dict[str, str]:
    """The text of each Python module below `folder`, by its path in the repository."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted((ROOT / folder).rglob("*.py"))
    }


def find_long_functions(path: str, text: str) -> Iterator[str]:
    """`path:line name (lines)` of each function that is longer than the hint."""
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{path}:{node.lineno} {node.name} ({lines})"


def split_sentences(text: str) -> list[str]:
    """The sentences of a document: code, tables and HTML comments are left out, and a list item ends a sentence."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!["))]
    prose = re.sub(r"\n(?=\s*([-*]|\d+\.) )", "\n\n", "\n".join(lines))
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    blocks = (" ".join(block.split()) for block in prose.split("\n\n"))
    return [part for block in blocks for part in re.split(r"(?<=[.!?:])\s+", block) if len(part.split()) > 1]


def print_package() -> None:
    """Lines, files and folders of the package that are larger or smaller than the hints."""
    modules = read_modules("replicated_ckpt")
    lines = {path: text.count("\n") for path, text in modules.items()}
    print(f"package: {sum(lines.values()):,} lines in {len(modules)} files")
    long_files = [f"{path} ({count})" for path, count in lines.items() if count > FILE_LINES]
    print(f"  files over {FILE_LINES} lines:", ", ".join(long_files) or "none")
    long_functions = [found for path, text in modules.items() for found in find_long_functions(path, text)]
    print(f"  functions over {FUNCTION_LINES} lines:", ", ".join(long_functions) or "none")
    own = {path: count for path, count in lines.items() if not path.endswith("__init__.py")}
    print(f"  files under {SHORT_FILE_LINES} lines:", sum(count < SHORT_FILE_LINES for count in own.values()))
    folders = Counter(path.rpartition("/")[0] for path in own)
    crowded = [f"{folder} ({count})" for folder, count in folders.items() if count > FOLDER_FILES]
    print(f"  folders of over {FOLDER_FILES} files:", ", ".join(crowded) or "none")
    names = Counter(path.rpartition("/")[2] for path in own)
    print("  file names that lie in two folders or more:", sum(count > 1 for count in names.values()))


def print_documents() -> None:
    """Bytes of the documents, and the length of their sentences."""
    pages = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))
    }
    sizes = {path: len(text.encode()) for path, text in pages.items()}
    readme = (ROOT / "README.md").stat().st_size
    print(f"docs: {sum(sizes.values()) / 1000:.0f} KB in {len(pages)} pages; README {readme} B")
    large = [f"{path} ({size})" for path, size in sizes.items() if size > PAGE_BYTES]
    print(f"  pages over {PAGE_BYTES:,} B:", ", ".join(large) or "none")
    words = [len(sentence.split()) for text in pages.values() for sentence in split_sentences(text)]
    share = sum(count > SENTENCE_WORDS for count in words) / len(words)
    print(f"  sentences over {SENTENCE_WORDS} words: {share:.0%}; average {sum(words) / len(words):.1f} words")


if __name__ == "__main__":
    print_package()
    print_documents()
    sys.exit(0)
