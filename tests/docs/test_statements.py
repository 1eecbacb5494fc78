"""The table of the paper's statements is complete, and what it names exists."""

from __future__ import annotations

import importlib.util
import tomllib
from collections import Counter
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

import fald
from fald.lab.reproduce.panels import PANELS

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "docs" / "_ext"
LISTED = tomllib.loads((EXTENSION / "statements.toml").read_text(encoding="utf-8"))
ROWS = LISTED["statement"]

# numbers of the published version, by section: theorems, lemmas, definitions and assumptions share a counter
SECTIONS = {"5": 10, "6": 1, "A": 4, "B": 8, "C": 3, "E": 2, "F": 1, "G": 3}
NUMBERED = ("theorem", "lemma", "corollary", "definition", "assumption")


def numbers(rows, *kinds):
    return [number for row in rows if row["kind"] in kinds for number in row["number"].split(", ")]


def counted(rows):
    found = Counter({kind: len(numbers(rows, kind)) for kind in (*NUMBERED, "algorithm", "figure")})
    found["panel"] = sum(row.get("panels", 0) for row in rows)
    return dict(found)


def test_every_statement_is_listed_once():
    assert counted(ROWS) == LISTED["counts"]
    wanted = [f"{section}.{i + 1}" for section, count in SECTIONS.items() for i in range(count)]
    assert sorted(numbers(ROWS, *NUMBERED)) == sorted(wanted)
    assert sum(LISTED["counts"][kind] for kind in NUMBERED) == sum(SECTIONS.values())
    assert sorted(numbers(ROWS, "algorithm") + numbers(ROWS, "figure")) == sorted("1234" * 2)


@pytest.mark.parametrize("missing", range(0, len(ROWS), 5))
def test_a_statement_that_is_missing_is_noticed(missing):
    rows = [row for i, row in enumerate(ROWS) if i != missing]
    assert counted(rows) != LISTED["counts"] or ROWS[missing]["kind"] == "formula"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['kind']} {row['number']}")
def test_what_is_named_exists(row):
    assert row["where"]
    for name in row["where"]:
        if name.startswith("fald reproduce "):
            assert name.removeprefix("fald reproduce ") in PANELS
        else:
            found = reduce(getattr, name.split(".")[1:], fald)
            assert callable(found)
            assert found.__doc__


def test_every_panel_of_the_paper_is_reproduced():
    named = {name for row in ROWS for name in row["where"] if name.startswith("fald reproduce ")}
    beyond = {"communication", "calibration"}
    assert {name.split()[-1] for name in named} == set(PANELS) - beyond


def test_every_function_of_the_theory_has_a_statement_and_its_docstring_says_which():
    by_function = {}
    for row in ROWS:
        for name in row["where"]:
            by_function.setdefault(name, []).append(row)
    functions = [n for n in fald.theory.__all__ if n[0].islower() and n != "constants"]
    for name in functions:
        rows = by_function[f"fald.theory.{name}"]
        said = getattr(fald.theory, name).__doc__
        for number in numbers([row for row in rows if row["kind"] != "formula"], "theorem", "lemma"):
            assert number in said, (name, number)


def test_the_page_shows_every_row():
    spec = importlib.util.spec_from_file_location("generated", EXTENSION / "generated_reference.py")
    generated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generated)
    tables = {kind: generated.statements(kind) for kind in generated._KINDS}
    for row in ROWS:
        assert f"| {row['number']} | {row['about']} |" in tables[row["kind"]]
        assert row["verdict"] in generated.VERDICTS
    assert sum(table.count("\n") - 1 for table in tables.values()) == len(ROWS)
    generated.STATEMENTS = {"statement": [{**ROWS[0], "verdict": "holds, we think"}]}
    with pytest.raises(ValueError, match="unknown verdict"):
        generated.statements("theorem")
    assert "{fald-statements}" in (ROOT / "docs" / "reference" / "statements.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_stored_shares_of_the_bounds_are_those_of_the_script():
    spec = importlib.util.spec_from_file_location("bounds", ROOT / "benchmarks" / "bounds.py")
    bounds = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bounds)

    def parts(text):
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]

    stored = parts((ROOT / "benchmarks" / "bounds.md").read_text(encoding="utf-8"))
    again = parts(bounds.table())
    assert [row[:2] for row in stored] == [row[:2] for row in again]
    shares = [
        np.array([[float(cell.rstrip("%")) for cell in row[2:]] for row in table[2:]])
        for table in (stored, again)
    ]
    np.testing.assert_allclose(*shares, rtol=0.06)  # two digits are stored
    assert shares[0].max() < 100
