"""Names and habits of the package. Sizes are only hints, which `tools/hints.py` prints."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator

import pytest

from tests.style.package_source import Source, package_sources

UNFINISHED = r"\b(TODO|FIXME|XXX)\b"
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
TORCH_PRIVATE_HOME = "replicated_ckpt/dcp/runtime/torch_private.py"
# `except Exception` belongs at the top of a thread or process only: path -> how many are there, and why.
BROAD_EXCEPTS_ALLOWED = {
    "replicated_ckpt/agent/repair/scrub.py": 1,  # top of a thread that must survive any file on the disk
    "replicated_ckpt/node/saves/submissions.py": 1,  # top of a thread; the waiter of the shard gets the error
    "replicated_ckpt/node/saves/finish.py": 1,  # top of a thread; the rank that waits gets the error
    "replicated_ckpt/agent/repair/reprotect.py": 2,  # top of a thread that must go on; the waiter gets the error
    "replicated_ckpt/node/uploads/uploader.py": 1,  # top of a thread that must survive any answer of a bucket
    "replicated_ckpt/cli/main.py": 1,  # top of the process
    "replicated_ckpt/dcp/find/bucket_look.py": 1,  # top of a thread; the caller gets the error
    "replicated_ckpt/dcp/save/submission.py": 3,  # two become errors that abort no save; one is the top of a thread
    "replicated_ckpt/dcp/load/loading.py": 1,  # top of a thread; the reader of the window gets the error
    "replicated_ckpt/dcp/find/rendezvous.py": 3,  # sent to the waiting ranks, then raised
    "replicated_ckpt/dcp/load/load_attempt.py": 1,  # raised later, where DCP sends it to all ranks
    "replicated_ckpt/dcp/load/reader.py": 1,  # raised later, where DCP sends it to all ranks
    "replicated_ckpt/dcp/c10d/picklable_error.py": 1,  # pickling an error may raise anything
    "replicated_ckpt/dcp/save/replicas.py": 1,  # the value is not compared, as this rank does not write it
    "replicated_ckpt/dcp/save/save_attempt.py": 1,  # the copy for another rank is not made
    "replicated_ckpt/dcp/runtime/user_code.py": 1,  # the user's function; its error is logged, and fails no save
    "replicated_ckpt/dcp/staging/state_copy.py": 1,  # copying an object may raise anything
    "replicated_ckpt/dcp/staging/stager.py": 1,  # the state is saved without a copy, where DCP sends errors to all ranks
    "replicated_ckpt/dcp/objects/values.py": 1,  # a class that a user has allowed may raise anything
    "replicated_ckpt/stores/bucket_client/fsspec.py": 1,  # back ends raise errors of their SDKs, which are translated
    "replicated_ckpt/stores/threads.py": 1,  # top of a worker thread; the caller gets the error
    "replicated_ckpt/stores/tee.py": 1,  # top of a sink thread; its owner gets the error
}

PATH_QUESTIONS = {"exists", "is_dir", "is_file", "is_symlink"}
NO_PATHS = {"reader", "self.reader", "self._fs"}  # other objects with such a method

Rule = Callable[[Source], Iterator[str]]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches every exception and does not end in a bare `raise`."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or getattr(kind, "id", "") in {"Exception", "BaseException"} for kind in caught)


def broad_excepts(source: Source) -> Iterator[str]:
    handlers = [node for node in source.nodes if isinstance(node, ast.ExceptHandler) and is_broad(node)]
    if len(handlers) > BROAD_EXCEPTS_ALLOWED.get(source.path, 0):
        lines = ", ".join(str(handler.lineno) for handler in handlers)
        yield f"{source.path}: broad except in line {lines}; translate what you expect, let the rest pass"


def unfinished(source: Source) -> Iterator[str]:
    if not re.search(UNFINISHED, source.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING} and re.search(UNFINISHED, token.string):
            yield f"{source.path}:{token.start[0]}: unfinished: {token.string.strip()[:60]}"


def vague_names(source: Source) -> Iterator[str]:
    for part in source.name.split("."):
        if set(part.split("_")) & BANNED_NAMES:
            yield f"{source.path}: {part!r} names no concept"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def torch_bindings(source: Source) -> Iterator[tuple[int, str, str]]:
    """Line, local name and full name of everything imported from torch."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield node.lineno, alias.asname or "torch", alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def private_torch_names(source: Source) -> Iterator[str]:
    if source.path == TORCH_PRIVATE_HOME:
        return
    bound = set()
    for line, local, full in torch_bindings(source):
        bound.add(local)
        if any(is_private(part) for part in full.split(".")):
            yield f"{source.path}:{line}: {full} is private to torch: {TORCH_PRIVATE_HOME}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root_name(node) in bound:
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)} is private to torch: {TORCH_PRIVATE_HOME}"


def guessed_plurals(source: Source) -> Iterator[str]:
    """Use `plural(count, "node")` instead of "node(s)"."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"[a-z]\(s\)", node.value):
            yield f"{source.path}:{node.lineno}: {node.value[:60]!r}"


def _hides_path_errors(call: ast.Call) -> bool:
    """Whether a call returns False on an error. Those of a DirEntry, with `follow_symlinks`, do not count."""
    if not isinstance(call.func, ast.Attribute) or any(word.arg == "follow_symlinks" for word in call.keywords):
        return False
    module = ast.unparse(call.func.value)
    in_module = {"exists", "lexists", "isdir", "isfile", "islink"} if module == "os.path" else PATH_QUESTIONS
    return call.func.attr in in_module and module not in NO_PATHS


def ignored_path_errors(source: Source) -> Iterator[str]:
    """From Python 3.14 on, `Path.exists` returns False for an unreadable path, so decisions must not depend on it."""
    if source.path.startswith(("replicated_ckpt/drill/", "replicated_ckpt/testing/")):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and _hides_path_errors(node):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}: ask replicated_ckpt.stores.files.existence"


RULES: list[Rule] = [
    broad_excepts,
    unfinished,
    vague_names,
    private_torch_names,
    guessed_plurals,
    ignored_path_errors,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_follows_the_style_guide(rule: Rule) -> None:
    """Names and habits follow the style guide."""
    assert [finding for source in package_sources() for finding in rule(source)] == []


def test_no_exemption_outlives_its_reason() -> None:
    """A file with fewer broad excepts than allowed must lower its allowance."""
    count_by_path = {
        source.path: sum(isinstance(node, ast.ExceptHandler) and is_broad(node) for node in source.nodes)
        for source in package_sources()
    }
    assert {path: count_by_path.get(path, 0) for path in BROAD_EXCEPTS_ALLOWED} == BROAD_EXCEPTS_ALLOWED


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (broad_excepts, "replicated_ckpt/core/x.py", "try:\n    f()\nexcept:\n    pass\n"),
        (broad_excepts, "replicated_ckpt/core/x.py", "try:\n    f()\nexcept Exception as exc:\n    pass\n"),
        (broad_excepts, "replicated_ckpt/core/x.py", "try:\n    f()\nexcept (OSError, BaseException):\n    pass\n"),
        (unfinished, "replicated_ckpt/core/x.py", "x = 1  # TO" + "DO: later\n"),
        (vague_names, "replicated_ckpt/core/utils.py", ""),
        (vague_names, "replicated_ckpt/common/x.py", ""),
        (vague_names, "replicated_ckpt/core/shard_helpers.py", ""),
        (private_torch_names, "replicated_ckpt/dcp/x.py", "from torch.distributed.checkpoint import _version\n"),
        (private_torch_names, "replicated_ckpt/dcp/x.py", "from torch.distributed._tensor import DTensor\n"),
        (private_torch_names, "replicated_ckpt/dcp/x.py", "import torch.distributed as dist\ndist.c10d._get_store()\n"),
        (guessed_plurals, "replicated_ckpt/core/x.py", 'print(f"{count} node(s)")\n'),
        (ignored_path_errors, "replicated_ckpt/core/x.py", "if not path.exists():\n    make(path)\n"),
        (ignored_path_errors, "replicated_ckpt/core/x.py", "import os\nos.path.isdir(name)\n"),
    ],
)
def test_a_violation_is_found(rule: Rule, path: str, text: str) -> None:
    """Shows that every rule can fail."""
    assert len(list(rule(Source(path, text)))) == 1


def test_cleaning_up_and_raising_again_is_no_violation() -> None:
    """`except BaseException` may clean up if it ends in `raise`."""
    text = "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n"
    assert list(broad_excepts(Source("replicated_ckpt/core/x.py", text))) == []
