"""Prints sizes of the package and its documents as hints. `make check` runs it; no figure here fails anything.

python tools/hints.py
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 5
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


def measure_functions(modules: Mapping[str, str]) -> dict[str, int]:
    """Lines of each function, by `path:line name`."""
    return {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, text in modules.items()
        for node in ast.walk(ast.parse(text, path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def count_comments(text: str) -> int:
    """The number of comments in a module, without directives to linters or the type checker."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return sum(not re.match(r"# *(noqa|type:|fmt:|pragma)", comment) for comment in comments)


def list_largest(size_by_name: Mapping[str, int], *, over: int = 0) -> str:
    """The largest entries with their sizes, or all entries larger than `over`."""
    ordered = sorted(size_by_name.items(), key=lambda item: -item[1])
    shown = [item for item in ordered if item[1] > over] if over else ordered[:LONGEST]
    return ", ".join(f"{name} ({size:,})" for name, size in shown) or "none"


def print_list(title: str, entries: list[str]) -> None:
    print(f"  {title}: {len(entries)}" + "".join(f"\n    {entry}" for entry in entries))


def split_sentences(text: str) -> list[str]:
    """The sentences of a document: code, tables and HTML comments are left out, and a list item ends a sentence."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!["))]
    prose = re.sub(r"\n(?=\s*([-*]|\d+\.) )", "\n\n", "\n".join(lines))
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    blocks = (" ".join(block.split()) for block in prose.split("\n\n"))
    return [part for block in blocks for part in re.split(r"(?<=[.!?:])\s+", block) if len(part.split()) > 1]


def find_shared_names(paths: list[str]) -> Iterator[str]:
    """File names that occur in two or more folders, with those folders."""
    folders_by_name = defaultdict(list)
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders_by_name[name].append(folder.partition("/")[2])
    for name, folders in sorted(folders_by_name.items()):
        if len(folders) > 1:
            yield f"{name} ({', '.join(folders)})"


def print_package() -> None:
    """Lines, files, folders, names and comments of the package."""
    modules = read_modules("replicated_ckpt")
    lines = {path: text.count("\n") for path, text in modules.items()}
    own = {path: count for path, count in lines.items() if not path.endswith("__init__.py")}
    files_by_folder: dict[str, int] = defaultdict(int)
    for path in own:
        files_by_folder[path.rpartition("/")[0]] += 1
    comments = sum(map(count_comments, modules.values()))
    functions = measure_functions(modules)
    print(f"package: {sum(lines.values()):,} lines in {len(modules)} files of {len(files_by_folder)} folders")
    print("  comments in 100 lines:", f"{100 * comments / sum(lines.values()):.1f}")
    print("  longest files:", list_largest(lines))
    print("  longest functions:", list_largest(functions))
    print(f"  functions over {FUNCTION_LINES} lines:", sum(count > FUNCTION_LINES for count in functions.values()))
    print(f"  folders of over {FOLDER_FILES} files:", list_largest(files_by_folder, over=FOLDER_FILES))
    print_list("folders of one file", [folder for folder, count in files_by_folder.items() if count == 1])
    print_list(f"files under {SHORT_FILE_LINES} lines", [path for path, n in own.items() if n < SHORT_FILE_LINES])
    print_list("file names in two folders or more", list(find_shared_names(list(own))))


def print_tests() -> None:
    """Sizes of the tests, and the number of tests without a docstring."""
    modules = read_modules("tests")
    lines = {path: text.count("\n") for path, text in modules.items()}
    tests = [
        node
        for path, text in modules.items()
        for node in ast.walk(ast.parse(text, path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    print(f"tests: {sum(lines.values()):,} lines in {len(modules)} files; {len(tests):,} test functions")
    print("  longest files:", list_largest(lines))
    print("  tests without a docstring:", sum(ast.get_docstring(test) is None for test in tests))


def print_documents() -> None:
    """Sizes of the documents, the links of the README, and the length of sentences."""
    paths = sorted((ROOT / "docs").rglob("*.md"))
    pages = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}
    sizes = {path: len(text.encode()) for path, text in pages.items()}
    readme = (ROOT / "README.md").read_text("utf-8")
    linked = {target for target in re.findall(r"\]\(([^)#\s]+)", readme) if not re.match(r"[a-z]+:", target)}
    print(f"docs: {sum(sizes.values()) / 1000:.0f} KB in {len(pages)} pages")
    print(f"  README: {len(readme.encode()):,} bytes, links to {len(linked)} files of the repository")
    print(f"  pages over {PAGE_BYTES:,} bytes:", list_largest(sizes, over=PAGE_BYTES))
    words = {path: [len(sentence.split()) for sentence in split_sentences(text)] for path, text in pages.items()}
    every = [count for counts in words.values() for count in counts]
    share = sum(count > SENTENCE_WORDS for count in every) / len(every)
    long = {path: sum(count > SENTENCE_WORDS for count in counts) for path, counts in words.items()}
    print(f"  sentences over {SENTENCE_WORDS} words: {share:.1%}; average {sum(every) / len(every):.1f} words")
    print("  most long sentences:", list_largest(long))


if __name__ == "__main__":
    print_package()
    print_tests()
    print_documents()
