"""What is put together about a result, on trees made by hand: who took part, what was sent, distances."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from fald.core.errors import DataError, DiagnosticsError
from fald.results import examine as module
from fald.results.examine import Examined, compared, examine
from fald.results.kinds import KINDS


def tree_of(kind="chain", chains=2, draws=50, attrs=None, **groups):
    """A result without anything that a test does not give it."""
    values = np.random.default_rng(0).normal(size=(chains, draws))
    made = {"posterior": xr.Dataset({"x": (("chain", "draw"), values)}), **groups}
    tree = xr.DataTree.from_dict({f"/{name}": each for name, each in made.items()})
    tree.attrs = {"kind": kind, "rounds_done": 7, **(attrs or {})}
    return tree


def site(name, share=0.5, took_part=100, rows=10.0):
    return {"client": name, "share": share, "took_part": took_part, "rows": rows}


# -- sites --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "share", "chance"),
    [
        ({}, 0.3, 1.0),
        ({"participation": "full", "num_participants": 2}, 0.3, 1.0),
        ({"participation": "with-replacement", "num_participants": 2}, 0.3, 1 - 0.7**2),
        ({"participation": "without-replacement", "num_participants": 2}, 0.3, 2 / 5),
        ({"participation": "without-replacement", "num_participants": None}, 0.3, 1.0),
        ({"num_participants": 2}, 0.3, 1.0),
    ],
)
def test_how_often_a_site_should_take_part(settings, share, chance):
    assert module._inclusion(settings, share, 5) == pytest.approx(chance)


def test_a_site_is_called_seldom_five_sds_below_its_plan(monkeypatch):
    drawn = {"participation": "without-replacement", "num_participants": 1}
    monkeypatch.setattr(module, "settings_of", lambda tree: drawn)
    tree = tree_of(chains=4, draws=100)
    # 400 kept rounds, of which each of four sites has a quarter: 100 ± 5·√75 = 56.7
    run = {
        "sites": [
            site("a"),
            site("b", took_part=57),
            site("c", took_part=56.0, rows=7),
            site("d", took_part=0),
        ]
    }
    found = module._sites(tree, run)
    assert [s["seldom"] for s in found] == [False, False, True, True]
    assert [s["planned"] for s in found] == [100.0] * 4
    assert [s["took_part"] for s in found] == [100, 57, 56, 0]
    assert found[2]["rows"] == 7
    assert (found[0]["client"], found[0]["share"]) == ("a", 0.5)
    assert (found[0]["bytes_down"], found[0]["bytes_up"]) == (None, None)
    # where everybody takes part, one round less is already seldom
    drawn.clear()
    assert [s["seldom"] for s in module._sites(tree, {"sites": [site("a", 1, 400), site("b", 1, 399)]})] == [
        False, True,
    ]  # fmt: skip


def test_sites_of_a_few_round_result_are_asked_in_every_round():
    rounds = xr.Dataset({"bytes_down": ("round", [10.0, 20.0]), "bytes_up": ("round", [1.0, 2.0])})
    tree = tree_of(
        "few-round", attrs={"settings": json.dumps({"participation": "with-replacement"})}, rounds=rounds
    )
    found = module._sites(tree, {"sites": [site("a", took_part=7), site("b", took_part=6)]})
    assert [(s["planned"], s["seldom"]) for s in found] == [(7.0, False), (7.0, True)]
    assert [(s["bytes_down"], s["bytes_up"]) for s in found] == [(30, 3)] * 2


def test_bytes_are_summed_over_chains_by_site():
    of_site = ("chain", "client")
    cost = xr.Dataset(
        {"bytes_down": (of_site, [[1, 2], [10, 20]]), "bytes_up": (of_site, [[3, 4], [30, 40]])}
    )
    found = module._spent(tree_of(cost=cost), 2)
    assert found == [{"bytes_down": 11, "bytes_up": 33}, {"bytes_down": 22, "bytes_up": 44}]


def test_modes_are_counted_where_they_were_looked_for():
    assert module._num_modes(tree_of()) is None
    assert module._num_modes(tree_of(attrs={"modes": "[]"})) == 0
    assert module._num_modes(tree_of(attrs={"modes": json.dumps([[0.0], [1.0]])})) == 2


# -- comparisons --------------------------------------------------------------------------------------------


def draws_of(columns, **attrs):
    made = {name: (("chain", "draw"), np.reshape(values, (2, -1))) for name, values in columns.items()}
    tree = xr.DataTree.from_dict({"/posterior": xr.Dataset(made)})
    tree.attrs = {"kind": "chain", "rounds_done": 9, **attrs}
    return tree


@pytest.mark.parametrize("sign", [1, -1])
def test_distances_are_in_sds_of_the_reference_and_name_the_worst(sign, monkeypatch):
    rng = np.random.default_rng(3)
    base = {name: rng.normal(size=1000) for name in "abc"}
    goal = {name: v - v.mean() for name, v in base.items()}
    sd = {name: v.std(ddof=1) for name, v in goal.items()}
    ours = {"a": goal["a"] + 0.1, "b": goal["b"] + sign * 0.3 * sd["b"], "c": goal["c"] * (1 + sign * 0.25)}
    seen = {"ours": {"a": 100.0, "b": 400.0}, "theirs": {"a": 50.0, "b": 900.0}}
    monkeypatch.setattr(module, "ess", lambda tree: seen[tree.attrs["which"]])
    reference = draws_of(dict(reversed(goal.items())), which="theirs")
    found = compared(draws_of(ours, which="ours"), "nuts", reference)
    assert (found["name"], found["rounds"]) == ("nuts", 9)
    assert (found["shift_parameter"], found["sd_parameter"]) == ("b", "c")
    assert found["shift"] == pytest.approx(0.3)
    assert found["sd_ratio"] == pytest.approx(1 + sign * 0.25)
    assert found["sd_error"] == pytest.approx(0.25)
    assert found["standard_error"] == pytest.approx(math.sqrt(1 / 100 + 1 / 50))
    assert found["sd_standard_error"] == pytest.approx(math.sqrt(1 / 100 + 1 / 50) / math.sqrt(2))
    monkeypatch.setattr(module.ReferenceLaw, "w2", lambda self, draws: 3.0)
    size = math.sqrt(sum(s**2 for s in sd.values()))
    again = compared(draws_of(ours, which="ours"), "nuts", reference)
    assert again["w2_relative"] == pytest.approx(3.0 / size)
    monkeypatch.setattr(module.ReferenceLaw, "w2", lambda self, draws: math.nan)
    assert compared(draws_of(ours, which="ours"), "nuts", reference)["w2_relative"] is None


def test_of_a_thousand_numbers_the_one_that_is_off_is_named(monkeypatch):
    rng = np.random.default_rng(5)
    base = rng.normal(size=(2, 40, 1001))
    ours = base.copy()
    ours[..., 700] += 2.0
    trees = [
        xr.DataTree.from_dict({"/posterior": xr.Dataset({"w": (("chain", "draw", "i"), values)})})
        for values in (ours, base)
    ]
    monkeypatch.setattr(module, "ess", lambda tree: {"w": 80.0})
    monkeypatch.setattr(module.ReferenceLaw, "w2", lambda self, draws: 1.0)
    found = compared(trees[0], "nuts", trees[1])
    assert found["shift_parameter"] == "w[700]"
    assert found["shift"] == pytest.approx(2.0 / base[..., 700].std(ddof=1))


# -- what takes rows ----------------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch):
    """Checks of rows that say that they were made, or why not."""
    parts = SimpleNamespace(failing=set(), seen=[])

    def made(name):
        def check(*given, **named):
            parts.seen.append((name, given, named))
            if name in parts.failing:
                raise DataError(f"no {name}")
            return name

        return check

    for name in ("predictive_checks", "redundant_columns", "absurd_values", "prior_sensitivity"):
        monkeypatch.setattr(module, name, made(name))
    return parts


ROWS = SimpleNamespace(present=True)


def test_with_rows_and_model_everything_is_made(parts):
    tree = object()
    found = module._of_rows(tree, "model", ROWS, level=0.9, why="away")
    assert found == {
        "predictive": "predictive_checks", "no_predictive": "", "prior": "prior_sensitivity",
        "no_prior": None, "columns": "redundant_columns", "values": "absurd_values", "no_rows": "",
    }  # fmt: skip
    assert parts.seen == [
        ("predictive_checks", ("model", tree, ROWS), {"level": 0.9}), ("redundant_columns", (ROWS,), {}),
        ("absurd_values", (ROWS,), {}), ("prior_sensitivity", (tree, "model", ROWS), {}),
    ]  # fmt: skip


def test_what_cannot_be_made_says_why(parts):
    parts.failing = {"predictive_checks", "redundant_columns", "prior_sensitivity"}
    found = module._of_rows(None, "model", ROWS, level=0.9, why="away")
    assert (found["predictive"], found["no_predictive"]) == (None, "no predictive_checks")
    assert (found["columns"], found["values"], found["no_rows"]) == (None, None, "no redundant_columns")
    assert (found["prior"], found["no_prior"]) == (None, "no prior_sensitivity")
    away = module._of_rows(None, "model", None, level=0.9, why="away")
    assert (away["no_predictive"], away["no_rows"], away["no_prior"]) == ("away", "away", "away")
    without = module._of_rows(None, None, ROWS, level=0.9, why="no model was given")
    assert (without["predictive"], without["no_predictive"]) == (None, "no model was given")
    assert without["no_rows"] == "no redundant_columns"


# -- the whole ----------------------------------------------------------------------------------------------


@pytest.fixture
def documented(monkeypatch, parts):
    """A document of any kind, and checks that tell what they were given."""
    seen = SimpleNamespace(levels=[], facts=[], run={"sites": [], "kind": "chain"})

    def document(tree, level):
        seen.levels.append(level)
        return {**seen.run, "kind": tree.attrs["kind"]}

    def made(facts):
        seen.facts.append(facts)
        return []

    monkeypatch.setattr(module, "document", document)
    monkeypatch.setattr(module, "made_checks", made)
    monkeypatch.setattr(module, "compared", lambda tree, name, reference: f"compared with {name}")
    monkeypatch.setattr(module, "settings_of", lambda tree: {})
    return seen


def test_an_examined_result_has_its_facts_and_its_judgement(documented, parts):
    tree = tree_of(chains=3, draws=20, attrs={"ended": "stopped", "modes": "[[1]]", "federation": '{"a": 1}'})
    found = examine(tree, model="model", data=ROWS, level=0.8, doubling={"shift": 0.1})
    assert documented.levels == [0.8]
    facts = found.facts
    assert (facts["ended"], facts["chains"], facts["draws"], facts["modes"]) == ("stopped", 3, 20, 1)
    assert (facts["federation"], facts["doubling"], facts["sites"]) == ({"a": 1}, {"shift": 0.1}, [])
    assert (facts["reference"], facts["predictive"]) == (None, "predictive_checks")
    assert (found.tree, found.model, found.data) == (tree, "model", ROWS)
    assert found.kind is KINDS["chain"]
    assert found.document is facts["run"]
    assert found.judgement["first"] == "No problem found."
    assert found.document["complaints"] == found.judgement["objections"] == []
    assert documented.facts == [facts]
    plain = examine(tree_of())
    assert (plain.facts["ended"], plain.facts["federation"], plain.facts["modes"]) == ("", None, None)
    assert plain.facts["no_predictive"] == "the rows were not given"
    assert documented.levels[-1] == 0.95


def test_rows_that_are_elsewhere_are_not_looked_at(documented, parts):
    found = examine(tree_of(), data=SimpleNamespace(present=False), why="they are elsewhere")
    assert found.data is None
    assert found.facts["no_rows"] == "they are elsewhere"
    assert [name for name, *_ in parts.seen] == ["prior_sensitivity"]


def test_nothing_is_made_from_the_rows_of_a_private_run(documented, parts):
    found = examine(tree_of("private chain"), model="model", data=ROWS)
    assert found.data is None
    assert "without noise" in found.facts["no_predictive"]
    assert {name for name, *_ in parts.seen} == {"prior_sensitivity"}
    assert parts.seen[0][1][2] is None


@pytest.mark.parametrize(
    ("kind", "beside", "reference", "expected"),
    [
        ("chain", None, None, None),
        ("chain", {"shift": 0.1}, None, {"shift": 0.1}),
        ("chain", {"other": 0.1}, None, None),
        ("chain", {"shift": 0.1}, ("nuts", None), "compared with nuts"),
        ("point estimate", None, ("nuts", None), None),
        ("point estimate", {"shift": 0.1}, ("nuts", None), {"shift": 0.1}),
    ],
)
def test_a_reference_is_given_or_stands_beside_the_run(documented, kind, beside, reference, expected):
    documented.run["beside"] = beside
    assert examine(tree_of(kind), reference=reference).facts["reference"] == expected


def test_a_point_estimate_has_no_checks_of_rows(documented, parts):
    found = examine(tree_of("point estimate"), model="model", data=ROWS)
    assert parts.seen == []
    for key in ("predictive", "no_predictive", "prior", "no_prior", "columns", "values", "no_rows"):
        assert found.facts[key] is None


def test_strict_objects_with_the_first_advice():
    def check(colour, advice, strict=False):
        return {"colour": colour, "advice": advice, "strict": strict}

    def examined(objections, *checks):
        return Examined(None, {"run": {"judgement": {"objections": objections, "checks": list(checks)}}})

    examined([], check("red", "x")).require_clean()
    found = examined(
        ["A.", "B."],
        check("amber", "no objection"),
        check("amber", "second", strict=True),
        check("red", ""),
        check("red", "first"),
    )
    with pytest.raises(DiagnosticsError, match=r"^A\. B\.") as caught:
        found.require_clean()
    assert caught.value.hint == "first"
    with pytest.raises(DiagnosticsError) as caught:
        examined(["A."], check("red", ""), check("none", "z")).require_clean()
    assert caught.value.hint == ""


@pytest.mark.parametrize("kind", KINDS)
def test_checks_are_those_that_the_kind_declares_in_their_order(kind, monkeypatch):
    keys = KINDS[kind].checks
    silent = keys[1]
    monkeypatch.setattr(
        module,
        "CHECKS",
        {key: lambda facts, key=key: None if key == silent else key for key in module.CHECKS},
    )
    assert module.made_checks({"run": {"kind": kind}}) == [key for key in keys if key != silent]
