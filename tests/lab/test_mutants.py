"""Tests of the tests: slips that nobody noticed once are noticed now."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.mutants.modules import TESTS
from benchmarks.mutants.slips import mutants

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_known_slips_are_noticed():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mutants", "--known"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" not in done.stdout


def test_modules_and_their_tests_are_there():
    for module, tests in TESTS.items():
        assert (ROOT / "src" / module).is_file(), module
        for test in tests:
            path, _, name = test.partition("::")
            words = f"def {name}(" if name else "def test_"
            assert words in (ROOT / "tests" / path).read_text(encoding="utf-8"), test


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
