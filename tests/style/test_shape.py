"""Names and habits of the package that would otherwise slip. Sizes are hints, which `tools/hints.py` prints."""

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
    "replicated_ckpt/agent/repair/scrub.py": 1,  # top of a thread that must outlive whatever lies on the disk
    "replicated_ckpt/node/saves/submissions.py": 1,  # top of a thread; who waits for the shard gets the error
    "replicated_ckpt/node/saves/finish.py": 1,  # top of a thread; the rank that waits gets the error
    "replicated_ckpt/agent/repair/reprotect.py": 2,  # top of a thread that must go on; who waits gets the error
    "replicated_ckpt/node/uploads/uploader.py": 1,  # top of a thread that must outlive whatever a bucket answers
    "replicated_ckpt/cli/main.py": 1,  # top of the process
    "replicated_ckpt/dcp/find/bucket_look.py": 1,  # top of a thread; whoever looks gets the error
    "replicated_ckpt/dcp/save/submission.py": 3,  # two are raised as errors that abort nothing; one is the top of a thread
    "replicated_ckpt/dcp/load/loading.py": 1,  # top of a thread; whoever takes the window gets the error
    "replicated_ckpt/dcp/find/rendezvous.py": 3,  # told to the ranks that wait for this one; then it is raised
    "replicated_ckpt/dcp/load/load_attempt.py": 1,  # raised a little later, where DCP tells all ranks
    "replicated_ckpt/dcp/load/reader.py": 1,  # raised a little later, where DCP tells all ranks
    "replicated_ckpt/dcp/c10d/picklable_error.py": 1,  # an error's own code raises anything when it is pickled
    "replicated_ckpt/dcp/save/replicas.py": 1,  # a value that this rank does not write: it is not compared then
    "replicated_ckpt/dcp/save/save_attempt.py": 1,  # of a copy for another rank: it is not made then
    "replicated_ckpt/dcp/runtime/user_code.py": 1,  # the user's own function; its error is logged, and fails no save
    "replicated_ckpt/dcp/staging/state_copy.py": 1,  # an object's own code raises anything when it is copied
    "replicated_ckpt/dcp/staging/stager.py": 1,  # the state is saved without a copy then, where DCP tells all ranks
    "replicated_ckpt/dcp/objects/values.py": 1,  # a class that a user has allowed may raise anything
    "replicated_ckpt/stores/bucket_client/fsspec.py": 1,  # its back ends raise their SDKs' own errors; all is translated
    "replicated_ckpt/stores/threads.py": 1,  # top of a worker thread; the caller gets the error
    "replicated_ckpt/stores/tee.py": 1,  # top of a sink thread; its owner gets the error
}

PATH_QUESTIONS = {"exists", "is_dir", "is_file", "is_symlink"}
NO_PATHS = {"reader", "self.reader", "self._fs"}  # what has a method of such a name, and answers for itself

Rule = Callable[[Source], Iterator[str]]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything and lets it end there; one that cleans up and raises again hides nothing."""
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
    """(line, the name it is bound to here, its full name) of everything imported from torch."""
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
    """A number that is known has one plural: `plural(count, "node")`, not "node(s)"."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"[a-z]\(s\)", node.value):
            yield f"{source.path}:{node.lineno}: {node.value[:60]!r}"


def _asks_a_path(call: ast.Call) -> bool:
    """Whether it is a question whose answer is False for an error: a DirEntry's says `follow_symlinks`, and is none."""
    if not isinstance(call.func, ast.Attribute) or any(word.arg == "follow_symlinks" for word in call.keywords):
        return False
    module = ast.unparse(call.func.value)
    in_module = {"exists", "lexists", "isdir", "isfile", "islink"} if module == "os.path" else PATH_QUESTIONS
    return call.func.attr in in_module and module not in NO_PATHS


def unheard_refusals(source: Source) -> Iterator[str]:
    """From Python 3.14 on a Path that may not be looked at "is not there": what decides about files asks the system."""
    if source.path.startswith(("replicated_ckpt/drill/", "replicated_ckpt/testing/")):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and _asks_a_path(node):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}: ask replicated_ckpt.stores.files.existence"


RULES: list[Rule] = [
    broad_excepts,
    unfinished,
    vague_names,
    private_torch_names,
    guessed_plurals,
    unheard_refusals,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_its_shape(rule: Rule) -> None:
    """Names and habits are those of the style guide."""
    assert [finding for source in package_sources() for finding in rule(source)] == []


def test_no_exemption_outlives_its_reason() -> None:
    """A file that has fewer broad excepts than it is allowed gives the allowance back."""
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
        (unheard_refusals, "replicated_ckpt/core/x.py", "if not path.exists():\n    make(path)\n"),
        (unheard_refusals, "replicated_ckpt/core/x.py", "import os\nos.path.isdir(name)\n"),
    ],
)
def test_a_breach_is_found(rule: Rule, path: str, text: str) -> None:
    """Every rule can fail."""
    assert len(list(rule(Source(path, text)))) == 1


def test_cleaning_up_and_raising_again_is_no_breach() -> None:
    """`except BaseException` may free what was taken, if it ends in `raise`."""
    text = "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n"
    assert list(broad_excepts(Source("replicated_ckpt/core/x.py", text))) == []
