"""The benchmark's own arithmetic: turns, ratios, goals, history; and that each workload runs."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from fald.core.errors import ConfigError
from fald.lab.bench import run
from fald.lab.bench.runner import judged, markdown
from fald.lab.bench.scaling import fitted
from fald.lab.bench.timing import Case, Contender, Mark, Timing, fastest, interleave, times_faster
from helpers import run_python


def test_contenders_take_turns_after_one_untimed_call():
    calls, now = [], itertools.count()
    contenders = {name: Contender(lambda n=name: calls.append(n), 2) for name in "ab"}
    found = interleave(contenders, 3, clock=lambda: float(next(now)), cpu_clock=lambda: 0.0)
    assert calls == ["a", "b"] * 4
    assert found["a"] == Timing(0.5, 0.5, 0.0)


TIMINGS = {"slow": Timing(1.0, 2.0, 2.0), "fast": Timing(0.1, 0.2, 0.4), "fast, 2": Timing(0.1, 0.1, 0.4)}
CASE = Case(
    "X",
    "a workload",
    "step",
    "slow",
    dict.fromkeys(TIMINGS),  # type: ignore[arg-type]
    [
        Mark("times slow", times_faster("fast", "slow"), 9.0),
        Mark("times slow", times_faster("fast", "slow"), 11.0),
        Mark("seconds", lambda t, limits: t["fast"].median / limits["one"], 0.2, at_most=True),
    ],
    ["Other"],
)


def document(**changes):
    machine = {"processor": "p", "cores": 2, "load": 0.1}
    limits = {"sgemm": 100.0, "normals": 200.0, "copy": 10.0, "one": 1.0}
    made = judged(CASE, TIMINGS, limits)
    return {"version": "1", "machine": machine, "limits": limits, "cases": [made], "scaling": [], **changes}


def test_ratios_and_goals():
    made = document()["cases"][0]
    assert made["contenders"]["fast"]["ratio"] == pytest.approx(10)
    assert [goal["holds"] for goal in made["goals"]] == [True, False, True]
    assert fastest(TIMINGS, "fast") == "fast, 2"


def test_table_says_what_was_missed_and_what_changed():
    text = markdown(document())
    assert "times slow: 10, wanted at least 9: reached." in text
    assert "times slow: 10, wanted at least 11: **not reached**." in text
    assert "Not installed here: Other." in text
    assert "last time" not in text
    before = document()
    before["cases"][0]["contenders"]["fast"]["ratio"] = 7.0
    assert "| 10 | 7 |" in markdown(document(), before)


def test_lines_are_told_from_curves():
    x = np.array([5, 10, 20, 40])
    assert fitted(x, 0.1 + 0.3 * x)["r2"] == pytest.approx(1)
    assert fitted(x, 0.1 + 0.3 * x)["power"] < 1
    assert fitted(x, 0.01 * x**2)["power"] == pytest.approx(2)


def test_unknown_workloads_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="imagse"):
        run(["imagse"], tmp_path)


@pytest.mark.slow
def test_workloads_run_and_history_grows(tmp_path):
    both = {"simulation": ["A", "A, composed"], "chains": ["D", "D, one client"]}
    for times, asked in enumerate((list(both), ["chains"]), 1):
        made = run(asked, tmp_path, quick=True)
        assert [case["name"] for case in made["cases"]] == [name for kind in asked for name in both[kind]]
        assert len((tmp_path / "history.jsonl").read_text().splitlines()) == times
    assert "last time" in (tmp_path / "bench.md").read_text()
    assert json.loads((tmp_path / "bench.json").read_text()) == made


def test_nothing_of_it_is_needed_by_the_product():
    code = "import sys, fald.cli.main, fald.lab.bench; print({'torch', 'blackjax'} & set(sys.modules))"
    assert run_python(code).strip() == "set()"


def test_importing_the_package_loads_nothing_slow():
    slow = {"scipy.stats", "scipy.linalg", "pydantic", "optax", "pandas", "xarray"}
    code = f"import sys, fald; print({slow} & set(sys.modules)); print(callable(fald.write_report))"
    assert run_python(code).split("\n")[:2] == ["set()", "True"]
