"""Tests of the tests: slips that nobody noticed once are noticed now."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks.mutants.modules import TESTS
from benchmarks.mutants.runner import _paired
from benchmarks.mutants.slips import mutants

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["--known", "--attacks"])
def test_known_slips_are_noticed(which):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mutants", which, "--worst"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in done.stdout.splitlines() if line.startswith("passed")]


def test_modules_and_their_tests_are_there():
    for module, tests in TESTS.items():
        assert (ROOT / "src" / module).is_file(), module
        for test in tests:
            path, _, name = test.partition("::")
            words = f"def {name}(" if name else "def test_"
            assert words in (ROOT / "tests" / path).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("name", ["known", "attacks"])
def test_listed_slips_can_still_be_made(name):
    """A line that was written anew is in the list as it is now; making the slips is a slow test."""
    slips = tomllib.loads((ROOT / "benchmarks" / "mutants" / f"{name}.toml").read_text(encoding="utf-8"))[
        "slip"
    ]
    for slip in slips:
        text = (ROOT / "src" / slip["module"]).read_text(encoding="utf-8")
        assert text.count(slip["old"]) == 1, (slip["module"], slip["old"])
        for test in slip["tests"]:
            path, _, case = test.partition("::")
            assert f"def {case.partition('[')[0]}" in (ROOT / "tests" / path).read_text(encoding="utf-8"), (
                test
            )


def test_slips_change_one_place_and_leave_words_alone():
    text = (
        "def f(a, b=2):\n"
        '    """Words with 3 numbers."""\n'
        "    if a < 1 and not b:\n"
        '        raise ValueError(f"{a + 1} is wrong")\n'
        "    check(a, least=5)\n"
        "    return a * b if a in (b,) else [x for x in b if x]\n"
    )
    made = mutants("f.py", text)
    changes = {(m.kind, m.after) for m in made}
    for expected in (
        ("constant", "3"), ("border", "(a <= 1)"), ("opposite", "(a >= 1)"), ("and/or", "(a < 1 or not b)"),
        ("part dropped", "(a < 1)"), ("sign dropped", "(b)"), ("always False", "(False)"),
        ("statement dropped", "pass"), ("argument dropped", "(check(a))"), ("operator", "(a / b)"),
        ("factor forgotten", "(a)"), ("opposite", "(a not in (b,))"), ("always True", "(True)"),
    ):  # fmt: skip
        assert expected in changes, expected
    assert len({m.text for m in made}) == len(made)
    for mutant in made:
        compile(mutant.text, "f.py", "exec")
        assert "Words with 3 numbers." in mutant.text
        assert "{a + 1} is wrong" in mutant.text or mutant.after == "pass"


def test_slips_have_names_that_outlive_other_changes():
    text = "def f(a):\n    return a + 1 if a < 1 else 1\n"
    places = [m.place for m in mutants("f.py", text)]
    assert len(set(places)) == len(places)  # each 1 is a place of its own
    assert [m.place for m in mutants("f.py", "import os\n\n" + text)] == places
    assert "constant: 1 -> 2 | return a + 1 if a < 2 else 1" in places


@pytest.mark.parametrize(
    ("old", "new", "only_bodies"),
    [
        ("return a + X", "return a - X", True),
        ("return a + X", "return (lambda: a)()", False),
        ("X = 1", "X = 2", False),
        ("b=2", "b=3", False),
        ("for i in range(3)", "for i in range(4)", False),
        ("if i > 0", "if i >= 0", False),
        ("c + 1", "c - 1", False),
        ("d + 1", "d - 1", False),
        ("e + 1", "e - 1", True),
        ("h + 1", "h - 1", True),
    ],
)
def test_only_bodies_of_functions_are_exchanged_in_place(old, new, only_bodies):
    """What has run when a module was imported cannot be changed afterwards."""
    text = (
        "X = 1\n"
        "def f(a, b=2):\n    return a + X\n"
        "def g(c):\n    return c + 1\n"
        "def k(d):\n    return d + 1\n"
        "def j(d):\n    return k(d)\n"
        "Y = {g(i) for i in range(3) if i > 0} | {j(0)}\n"
        "class C:\n    def m(self, e):\n        return e + 1\n    n = lambda h: h + 1\n"
    )
    assert text.count(old) == 1
    found = {}
    changed = compile(text.replace(old, new), "f.py", "exec")
    assert _paired(compile(text, "f.py", "exec"), changed, found) is only_bodies
    if only_bodies:
        assert {("f", 2), ("C.m", 12)} <= set(found)
