"""Functions that can be read: few parameters, and names for those beyond the fourth."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

import fald

PACKAGE = Path(fald.__file__).parent
MOST, MOST_POSITIONAL = 8, 4

# public functions whose settings are keyword arguments
PUBLIC = {
    ("langevin/fald.py", "fald"),
    ("langevin/sampling.py", "sample"),
    ("study/fit.py", "fit"),
    ("theory/gaussian.py", "law"),
    ("theory/gaussian.py", "stationary"),
}
# where the parameters of a command are its options: all that the file gives to the command line
COMMANDS = {"cli/federation.py", "cli/main.py", "lab/cli.py"}
# the signature is NVFlare's
OVERRIDES = {("federation/engines/nvflare/adapter.py", "process_result_of_unknown_task")}


def too_long(tree: ast.AST) -> list[str]:
    """Names of functions with too many parameters, ``self`` and ``cls`` apart."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            plain = [a.arg for a in (*given.posonlyargs, *given.args) if a.arg not in ("self", "cls")]
            if len(plain) > MOST_POSITIONAL or len(plain) + len(given.kwonlyargs) > MOST:
                found.append(node.name)
    return found


def public(tree: ast.Module) -> list[str]:
    """Functions of a module that others may use."""
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


@functools.cache
def sources() -> dict[str, ast.Module]:
    return {str(p.relative_to(PACKAGE)): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))}


def test_no_function_has_more_than_eight_parameters_or_four_without_a_name():
    bad = {(path, name) for path, tree in sources().items() for name in too_long(tree)}
    commands = {(path, name) for path in COMMANDS for name in public(sources()[path])}
    assert not bad - PUBLIC - OVERRIDES - commands
    assert bad >= PUBLIC | OVERRIDES  # no exception that is not needed
    assert {path for path, _ in bad & commands} == COMMANDS


def test_public_functions_take_keywords_beyond_the_third():
    trees = sources()
    for path, name in PUBLIC:
        (found,) = [n for n in ast.walk(trees[path]) if isinstance(n, ast.FunctionDef) and n.name == name]
        assert len(found.args.args) <= 3


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b, c, d, e): ...",
        "def f(a, /, b, c, d, e=1): ...",
        "def f(*, a, b, c, d, e, f, g, h, i): ...",
        "class A:\n async def f(self, a, b, c, d, e): ...",
    ],
)
def test_twin_long_signatures_are_seen(source):
    assert too_long(ast.parse(source)) == ["f"]


def test_signatures_at_the_limit_pass():
    assert not too_long(ast.parse("class A:\n def f(self, a, b, c, d, *, e, f, g, h): ..."))


def test_no_class_name_stands_twice():
    names = Counter(n.name for tree in sources().values() for n in tree.body if isinstance(n, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1 and not name.startswith("_")}
