"""What a method, family, accountant, engine or kind of result is called stands in its registry alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fald
from fald.federation.engines import ENGINES
from fald.fewround.methods import FIT_METHODS
from fald.langevin.registry import METHODS
from fald.privacy.accountants import ACCOUNTANTS
from fald.problem.families import FAMILIES
from fald.results.kinds import KINDS

SOURCE = Path(fald.__file__).parent
NAMES = [set(METHODS), set(FIT_METHODS) - {"auto"}, set(FAMILIES), set(ACCOUNTANTS), set(ENGINES), set(KINDS)]
# the registries themselves
HOMES = {
    "langevin/registry.py", "fewround/methods.py", "problem/families/__init__.py", "privacy/accountants.py",
    "federation/engines/__init__.py", "results/kinds.py",
}  # fmt: skip
# what the lab exports, and experiments that are about some of the methods or engines
EXPERIMENTS = {
    "lab/methods/__init__.py", "lab/bench/federations.py", "lab/bench/fit.py", "lab/bench/fitters.py",
    "lab/reproduce/calibration.py",
    "lab/reproduce/communication.py",
}  # fmt: skip


def lists(text: str) -> list[int]:
    """Lines with a list, tuple, set, dict or Literal that has two names or more of one registry."""
    found = []
    for node in ast.walk(ast.parse(text)):
        parts = getattr(node, "elts", None) or getattr(node, "keys", None)
        if not isinstance(parts, list):
            continue
        words = {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}
        if any(len(words & names) > 1 for names in NAMES):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_list_of_names(path):
    place = path.relative_to(SOURCE).as_posix()
    if place not in HOMES | EXPERIMENTS:
        assert lists(path.read_text()) == []


def test_twin_a_list_is_found():
    assert lists('SEND = ("laplace", "consensus")\n') == [1]
    assert lists('from typing import Literal\nFamily = Literal["linear", "softmax"]\n') == [2]
    assert lists('NAMES = {"pld": 1, "rdp": 2}\n') == [1]
    assert lists('SHOWN = {"few-round", "point estimate"}\n') == [1]
    assert lists('x = ["linear"]\n') == []


def test_no_room_below_the_lab_knows_its_methods():
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).as_posix()
        if not place.startswith("lab/") and place != "__init__.py":
            assert "fald.lab" not in path.read_text(), place
