"""The documentation is true: links resolve, and tables match the code."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

import replicated_ckpt
from replicated_ckpt import (
    CheckpointManager,
    MemoryTierShort,
    PlansUnknown,
    ReplicatedReader,
    ReplicatedWriter,
    WorldSizeChanged,
    errors,
)
from replicated_ckpt.cli.exit_codes import MEANING
from replicated_ckpt.cli.main import VERBS
from replicated_ckpt.core.divergence import Divergence
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry, UploadEntry, WeightsEntry
from replicated_ckpt.drill.plan import Scenario
from replicated_ckpt.drill.table import HEADER

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/README.md",
        "examples/stock/README.md",
        "benchmarks/README.md",
        ".github/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
GENERATED_PAGES = {  # pages of the site -> their documents
    "index.md": "README.md",
    "examples.md": "examples/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "threat-model.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
AGENT_ROUTES = {  # (module of the agent, method) -> path that its patterns continue
    ("routes", "answer"): "/",
    ("routes", "_save"): "/v1/saves/{save_id}/",
    ("object_routes", "answer"): "/v1/object/",
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # DCP says that there is no process group


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub forms them."""
    headings = re.findall(r"^#+ +(.+)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: str, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / document).parent / path if path else ROOT / document
        if not found.exists():
            yield f"{document}: {target}: no such file"
        elif anchor and anchor not in anchors(found.read_text(encoding="utf-8")):
            yield f"{document}: {target}: no such heading"


def section(document: str, heading: str) -> str:
    """The text under one heading, up to the next."""
    match = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text_of(document), flags=re.DOTALL | re.MULTILINE)
    assert match is not None, f"{document} has no heading {heading!r}"
    return match[1]


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables in a text, without header rows."""
    lines = re.findall(r"^\|(.+)\|$", text, flags=re.MULTILINE)
    rules = {index for index, line in enumerate(lines) if set(line) <= set("-:| ")}
    kept = [line for index, line in enumerate(lines) if index not in rules and index + 1 not in rules]
    return [[cell.strip() for cell in line.split("|")] for line in kept]


def quoted(cell: str) -> str:
    match = re.fullmatch(r"`(.+)`", cell)
    return match[1] if match else cell


def subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for below in kind.__subclasses__():
        yield below
        yield from subclasses(below)


def routes_of(name: str, method: str, path: str) -> Iterator[str]:
    """The verbs in one `match` of the agent's routes, as `METHOD /path/{name}`, without patterns that delegate."""
    module = ast.parse(text_of(f"replicated_ckpt/agent/http/{name}.py"))
    function = next(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == method)
    for case in (node for node in ast.walk(function) if isinstance(node, ast.match_case)):
        assert isinstance(case.pattern, ast.MatchSequence)
        verb, *parts = case.pattern.patterns
        if any(isinstance(part, ast.MatchStar) for part in parts):
            continue
        for http in re.findall(r"[A-Z]+", ast.unparse(verb)):
            for rest in product(*(_path_parts(part) for part in parts)):
                yield f"{http} {path}{'/'.join(rest)}".rstrip("/")


def verbs_of_repair() -> set[str]:
    """The verbs in the table of the repair routes."""
    module = ast.parse(text_of("replicated_ckpt/agent/http/repair_routes.py"))
    tables = [node.value for node in ast.walk(module) if isinstance(node, ast.AnnAssign)]
    (table,) = (table for table in tables if isinstance(table, ast.Dict))
    return {f"POST /v1/{ast.literal_eval(key)}" for key in table.keys if key is not None}


def _path_parts(pattern: ast.pattern) -> list[str]:
    """The values that one part of a path may have: a text, one of several, or a placeholder."""
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is not None:
        return _path_parts(pattern.pattern)
    if isinstance(pattern, ast.MatchOr):
        return [text for alternative in pattern.patterns for text in _path_parts(alternative)]
    text = ast.unparse(pattern)
    return [str(ast.literal_eval(text)) if isinstance(pattern, ast.MatchValue) else f"{{{text}}}"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    """Each link to a file or heading of the repository resolves."""
    assert list(broken_links(document, text_of(document))) == []


@pytest.mark.parametrize("link", ["[x](no-such-file.md)", "[x](#no-such-heading)", "[x](docs/design.md#no-such)"])
def test_a_broken_link_is_found(link: str) -> None:
    """Shows that the link test can fail."""
    assert len(list(broken_links("README.md", link))) == 1


def linked_pages(document: str) -> set[str]:
    """The documents of this repository that a document links to."""
    targets = (target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(document))))
    found = {((ROOT / document).parent / target).resolve() for target in targets if target.endswith(".md")}
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_every_page_is_reached_from_the_menu() -> None:
    """Each page is in the menu, or is linked directly or indirectly from a page in the menu."""
    listed, _, elsewhere = text_of("mkdocs.yml").partition("\nnav:")[2].partition("\nnot_in_nav:")
    menu = re.findall(r"^ +- [^\n]*?([\w/-]+\.md)$", listed, flags=re.MULTILINE)
    others = set(re.findall(r"[\w/-]+\.md", elsewhere))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(menu).isdisjoint(others)
    assert {*menu, *others} == pages | GENERATED_PAGES.keys()
    documents = {page: GENERATED_PAGES.get(page, f"docs/{page}") for page in {*menu, *others}}
    reached = new = {documents[page] for page in menu}
    while new:
        new = {target for document in new for target in linked_pages(document)} & set(documents.values()) - reached
        reached = reached | new
    assert set(documents.values()) - reached == set()


@pytest.mark.parametrize("kind", [ReplicatedWriter, ReplicatedReader, CheckpointManager])
def test_the_tables_of_options_are_the_signatures(kind: Callable[..., object]) -> None:
    """The reference lists exactly the arguments, in order, with their defaults."""
    listed = {quoted(row[0]): quoted(row[1]) for row in rows(section("docs/reference.md", kind.__name__))}
    parameters = inspect.signature(kind).parameters.values()
    wanted = {p.name: "required" if p.default is p.empty else repr(p.default) for p in parameters}
    assert list(listed.items()) == list(wanted.items())


def test_the_table_of_exit_codes_is_the_enum() -> None:
    """docs/cli.md has each exit code with its meaning."""
    listed = {int(code): meaning for code, meaning in rows(section("docs/cli.md", "Exit codes"))}
    assert listed == {code.value: meaning for code, meaning in MEANING.items()}


def test_the_documents_name_each_command_and_scenario() -> None:
    """docs/cli.md lists the commands, and docs/drill.md the scenarios."""
    verbs = re.findall(r"\[`(\w+)`\]\(#\1\)", section("docs/cli.md", "Command line"))
    assert sorted(verbs) == sorted(VERBS)
    scenarios = [quoted(row[0]) for row in rows(section("docs/drill.md", "The drill"))]
    assert sorted(scenarios) == sorted(Scenario)


def test_the_drills_table_has_the_columns_that_it_prints() -> None:
    """The example output has the drill's columns and scenarios."""
    block = re.search(r"```text\n(scenario.*?)```", section("docs/drill.md", "The drill"), flags=re.DOTALL)
    assert block is not None
    header, _, *lines = block[1].splitlines()
    assert tuple(re.split(r"\s{2,}", header)) == HEADER
    assert {line.split()[0] for line in lines[: len(Scenario)]} == set(Scenario)


def test_every_error_has_its_entry_in_the_runbook() -> None:
    """Each error and warning is exported by the package and has an entry in the runbook, and there is no other entry."""
    kinds: list[type[BaseException]] = [errors.ReplicatedCkptError, errors.ReplicatedCkptWarning]
    names = {kind.__name__ for top in kinds for kind in (top, *subclasses(top)) if kind.__module__ == errors.__name__}
    names |= {
        WorldSizeChanged.__name__,
        PlansUnknown.__name__,
        MemoryTierShort.__name__,
    }  # defined beside the code that raises them
    headings = re.search(r"^## Errors\n(.*?)^## ", text_of("docs/runbook.md"), flags=re.DOTALL | re.MULTILINE)
    assert headings is not None
    assert set(re.findall(r"^### (\w+)$", headings[1], flags=re.MULTILINE)) == names
    assert names <= set(replicated_ckpt.__all__)


def test_every_verb_of_the_agent_is_documented() -> None:
    """The table of verbs matches the agent's routes exactly."""
    wanted = {verb for place, path in AGENT_ROUTES.items() for verb in routes_of(*place, path)}
    assert {"PUT /v1/saves/{save_id}/{name}", "POST /v1/{verb}"} < wanted
    wanted = wanted - {"POST /v1/{verb}"} | verbs_of_repair()
    listed = {quoted(row[0]) for row in rows(section("docs/verbs.md", "The agent's verbs"))}
    assert {verb for verb in listed if "/" in verb} == wanted


def test_the_manifests_schema_is_complete() -> None:
    """The table of the schema has exactly the fields of the manifest."""
    wanted = {"version", *(field.name for field in fields(Manifest))}
    wanted |= {f"nodes[].{field.name}" for field in fields(NodeEntry)}
    wanted |= {f"shards{{}}.{field.name}" for field in fields(ShardEntry)}
    wanted |= {f"upload.{field.name}" for field in fields(UploadEntry)}
    wanted |= {f"weights.{field.name}" for field in fields(WeightsEntry)}
    wanted |= {f"divergences[].{field.name}" for field in fields(Divergence)}
    assert {quoted(row[0]) for row in rows(section("docs/format.md", "Manifest"))} == wanted


def runs_always(path: Path) -> bool:
    """Whether `make test` runs a test of this file: at least one is not marked `long`."""
    tests = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    marks = [{ast.unparse(mark) for mark in test.decorator_list} for test in tests if test.name.startswith("test_")]
    return any("pytest.mark.long" not in found for found in marks)


def test_each_guarantee_is_shown_by_make_test() -> None:
    """Each test file that docs/guarantees.md names has a test that `make test` runs."""
    named = re.findall(r"\]\(\.\./(tests/\S+\.py)\)", text_of("docs/guarantees.md"))
    assert len(named) > 15
    assert [path for path in named if not runs_always(ROOT / path)] == []
