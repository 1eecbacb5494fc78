"""The search for settings part by part: rounding, the valley of a cost, and what a candidate is made of."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fald import schedules
from fald.core.errors import ConfigError, DataError
from fald.planner import Goal, Problem, Setting, chain, scheduled
from fald.settings.participation import with_replacement

search = importlib.import_module("fald.planner.search")
TWO = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5], start=[2.0])


def test_step_sizes_are_rounded_down_and_counts_up():
    for value, rounded in (
        (0.0012399, 0.00123), (0.00123, 0.00123), (0.001, 0.001), (1.0, 1.0), (999.9, 999.0),
        (12345.0, 12300.0), (0.3, 0.3), (1 / 3, 0.333),
    ):  # fmt: skip
        assert search._down(value) == rounded
    assert search._down(0.0012399, digits=2) == 0.0012
    counts = {0: 0, 1: 1, 7: 7, 99: 99, 100: 100, 101: 110, 110: 110, 1234: 1300, 10_001: 11_000}
    assert {n: search._up(n) for n in counts} == counts


def test_draws_are_thinned_to_a_tenth_of_their_memory():
    law = SimpleNamespace(autocorrelation_time=lambda thinning=1: np.array([1.0, 3.03 + 40.0 / thinning]))
    # 10 draws of 13.03 kept rounds each: 130.3
    assert search._draws(law, Goal(ess=320, num_chains=32, ess_per_chain=0)) == (4, 131)
    quick = SimpleNamespace(autocorrelation_time=lambda thinning=1: np.array([9.0, 1.0]))
    assert search._draws(quick, Goal(ess=320, num_chains=32, ess_per_chain=0)) == (1, 90)
    assert search._draws(quick, Goal(ess=0)) == (1, 0)


def test_a_bracket_is_cut_seven_times_by_the_golden_ratio():
    """Of a cost without a slope the lower part is kept each time; nothing is climbed or descended."""
    asked = []
    found = search._least(lambda step: asked.append(step) or 1.0, 0.1, 1.0)
    golden, width = (math.sqrt(5) - 1) / 2, 2 * math.log(2)
    ends = [-math.log(2), 0.0, math.log(2)]
    inside = [width * golden**k - math.log(2) for k in range(1, 9)]
    np.testing.assert_allclose(np.sort(np.log(asked)), math.log(0.1) + np.sort([*ends, *inside]))
    assert found == pytest.approx(0.1)  # the first of equals


@pytest.mark.parametrize("offset", np.linspace(-1.3, 1.3, 27))
def test_the_bottom_is_as_near_as_seven_cuts_bring_it(offset):
    """What is left after seven cuts holds the bottom and a place that was looked at, by the golden ratio."""
    best = 0.01 * math.exp(offset)
    found = search._least(lambda step: abs(math.log(step / best)), 0.01, 1.0)
    assert abs(math.log(found / best)) <= 2 * math.log(2) * ((math.sqrt(5) - 1) / 2) ** 8 * (1 + 1e-9)


def test_no_step_above_the_largest_is_looked_at():
    asked = []
    for guess in (0.3, 0.7, 1.0, 5.0):
        found = search._least(lambda step: asked.append(step) or 1 / step, guess, 1.0)
        assert max(asked) == pytest.approx(1.0, abs=1e-12)
        assert found == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("guess", [1e-7, 1e-3, 0.05, 1.0])
@pytest.mark.parametrize("best", [1e-5, 0.03, 0.8])
def test_the_bottom_of_a_valley_is_found_from_either_side(guess, best):
    asked = []

    def cost(step):
        asked.append(step)
        return math.inf if step > 30 * best else math.log(step / best) ** 2

    found = search._least(cost, guess, 1.0)
    assert abs(math.log(found / best)) < 0.06
    assert max(asked) <= 1.0 + 1e-12
    assert len(set(asked)) == len(asked)  # no law is computed twice
    assert cost(found) == min(cost(step) for step in list(asked))
    # falling all the way: the largest step
    assert search._least(lambda step: -step, guess, 1.0) == pytest.approx(1.0, rel=0.06)


def test_near_a_good_guess_few_laws_are_computed():
    asked = []
    search._least(lambda step: asked.append(step) or math.log(step / 0.01) ** 2, 0.01, 1.0)
    assert len(asked) <= 14
    assert 0.001 < min(asked) < max(asked) < 0.1


def test_a_goal_that_no_step_reaches_ends_the_search():
    asked = []
    search._least(lambda step: asked.append(step) or math.inf, 1.0, 1.0)
    np.testing.assert_allclose(asked[:20], 4.0 ** -np.arange(20.0))
    assert min(asked) == pytest.approx(4.0**-20 / 2)
    assert len(asked) == 20 + 3 + 8  # the last place and both sides of it, and seven cuts


def test_a_valley_between_two_walls_is_found_and_nothing_far_below_the_least_is_looked_for():
    def between(step):
        return math.log(step / 0.03) ** 2 if 0.02 < step < 0.05 else math.inf

    assert search._least(between, 1.0, 1.0, down=2.0) == pytest.approx(0.03, rel=0.06)
    assert not math.isfinite(between(search._least(between, 1.0, 1.0)))  # by fours it is missed
    asked = []
    last = search._least(lambda step: asked.append(step) or math.inf, 1.0, 1.0, down=2.0, low=1e-2)
    assert 1e-2 / 2 <= min(asked) <= 1e-2
    assert len(asked) == 8
    assert last == pytest.approx(2.0**-7)
    asked.clear()  # at the least itself it still goes on
    search._least(lambda step: asked.append(step) or math.inf, 1.0, 1.0, down=2.0, low=1.0)
    assert asked == pytest.approx([1.0, 0.5])


def test_a_plan_chooses_the_step_and_tries_every_number_of_steps():
    likes = search._likes(TWO, [1, 4], {"correlation": 0.5})
    assert [(s.local_steps, s.step_size, s.correlation) for s in likes] == [
        (1, TWO.largest_step, 0.5), (4, TWO.largest_step, 0.5),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="chooses the step size"):
        search.fewest_rounds(TWO, local_steps=[1], step_size=0.1)
    with pytest.raises(ConfigError, match="temperature must be > 0"):
        search._likes(TWO, [1], {"temperature": 0.0})


GOAL = Goal(0.1, 0.1, ess=400, num_chains=4, ess_per_chain=0)
WIDE = Problem.from_gaussian(
    [np.diag([1.0, 40.0]), np.diag([3.0, 20.0])], [[0.0, 1.0], [1.0, 0.0]], [0.5, 0.5]
)


def test_a_candidate_is_what_the_law_of_its_setting_says():
    plan = search.fewest_rounds(WIDE, GOAL, local_steps=[1, 3], correlation=0.3)
    assert [c.setting.local_steps for c in plan.candidates] == [1, 3]
    assert min(c.thinning for c in plan.candidates) > 1
    for c in plan.candidates:
        law = chain(WIDE, c.setting)
        thinning, kept = search._draws(law, GOAL)
        arrival = law.arrival(GOAL)
        assert c.setting.correlation == 0.3
        assert (c.num_warmup, c.thinning) == (search._up(arrival), thinning)
        assert c.num_rounds == c.num_warmup + thinning * search._up(kept)
        time = float(law.autocorrelation_time(thinning).max())
        assert c.ess == pytest.approx(4 * search._up(kept) / time)
        assert c.ess >= 400
        # the worst moment after the warm-up: its end, or the limit
        worst = max((c.num_warmup, math.inf), key=lambda r, law=law: law.excess(r, GOAL))
        shifts, sds = law.errors(law.at(worst))
        errors = np.abs(shifts).max(), np.abs(sds).max()
        assert (c.predicted.bias, c.predicted.sd_error) == pytest.approx(errors)
        assert max(c.predicted.bias, c.predicted.sd_error) <= 0.1
        assert c.guaranteed.reason == "no constants were given"
    best = plan.best
    assert plan.arguments() == {
        **best.setting.arguments(), "num_rounds": best.num_rounds, "num_warmup": best.num_warmup,
        "thinning": best.thinning, "num_chains": 4,
    }  # fmt: skip
    assert plan.what_if["as it is"] <= 0.1
    assert (plan.goal, plan.problem, plan.num_exchanges) == (GOAL, WIDE, 0)


@pytest.mark.parametrize(("ess", "moment"), [(400, 4), (0, 10)])
def test_errors_count_from_the_first_draw_on(monkeypatch, ess, moment):
    """From a far start the end of the warm-up is the worst moment; without draws the end of the run is."""
    asked, real = [], search.errors_at
    monkeypatch.setattr(search, "errors_at", lambda *given: asked.append(given[2]) or real(*given))
    far = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5], start=[1e6])
    likes, goal = search._likes(far, [1], {}), Goal(0.1, 0.1, ess=ess)
    search._search(far, goal, likes, cost=lambda law: 1.0, shape=lambda law: (10, 4, 1), merit=lambda c: 1.0)
    assert asked == [moment]


def test_without_draws_a_run_ends_where_it_arrives():
    goal = Goal(0.1, 0.1, ess=0)
    (c,) = search.fewest_rounds(TWO, goal, local_steps=[2]).candidates
    arrival = chain(TWO, c.setting).arrival(goal)
    assert (c.num_rounds, c.num_warmup, c.thinning) == (max(arrival, 1), max(arrival, 1) - 1, 1)


def test_of_nearly_equal_numbers_of_steps_the_fewest_are_taken(monkeypatch):
    """Within two percent of the best; one without any step size that will do is not taken."""
    real = search._search

    def judged(rounds):
        def merit(c):
            return rounds[c.setting.local_steps]

        likes = search._likes(TWO, list(rounds), {})
        found = real(TWO, GOAL, likes, cost=lambda law: 1.0, shape=lambda law: (10, 4, 1), merit=merit)
        return found.best.setting.local_steps

    assert judged({1: 102.0, 2: 100.0, 4: 101.0}) == 1
    assert judged({1: 102.1, 2: 101.0, 4: 100.0}) == 2
    assert judged({1: 103.0, 2: 103.0, 4: 100.0}) == 4
    likes = search._likes(TWO, [1, 2], {})
    shapes = iter([None, (10, 4, 1)])
    found = real(TWO, GOAL, likes, cost=lambda law: 1.0, shape=lambda law: next(shapes), merit=lambda c: 1.0)
    assert found.best.setting.local_steps == 2
    none = found.candidates[0]
    assert (none.num_rounds, none.num_warmup, none.thinning, none.ess) == (0, 0, 1, 0.0)
    assert (none.predicted, none.guaranteed.reason) == (None, "no step size will do")
    assert real(TWO, GOAL, likes, cost=lambda law: math.inf, shape=None, merit=None) is None


def test_the_best_of_a_length_spends_all_rounds_and_leaves_room_for_the_draws():
    plan = search.best_accuracy(TWO, 400, GOAL, local_steps=[1, 3])
    for c in plan.candidates:
        law = chain(TWO, c.setting)
        thinning, kept = search._draws(law, GOAL)
        assert (c.num_rounds, c.thinning, c.num_warmup) == (400, thinning, 400 - thinning * kept)
        assert c.ess >= 400 * (1 - 1 / kept)
    errors = [max(c.predicted.bias, c.predicted.sd_error) for c in plan.candidates]
    assert max(plan.best.predicted.bias, plan.best.predicted.sd_error) <= 1.021 * min(errors)
    with pytest.raises(ConfigError, match="num-rounds = 30 do not give 100 effective draws"):
        search.best_accuracy(TWO, 30, GOAL, local_steps=[1])
    (none,) = search.best_accuracy(TWO, 50, Goal(0.1, 0.1, ess=0), local_steps=[1]).candidates
    assert none.num_warmup == 49  # all of them but one


def test_a_large_model_is_planned_by_its_extreme_curvatures(monkeypatch):
    model, found = SimpleNamespace(dim=501), SimpleNamespace(least=2.0, largest=50.0, distance=3.0)
    monkeypatch.setattr(search, "extremes", lambda *given: found)
    monkeypatch.setattr(search, "local_models", lambda *given, **named: (TWO, 7))
    plan = search.plan(model, "data", goal=GOAL)
    assert [c.setting.local_steps for c in plan.candidates] == [1]
    assert plan.num_exchanges == 0
    np.testing.assert_allclose(plan.problem.hessians, [np.diag([2.0, 50.0])])
    np.testing.assert_allclose(plan.problem.start, [3.0, 3.0])
    np.testing.assert_allclose(plan.problem.weights, [1.0])
    np.testing.assert_allclose(plan.problem.gradients, 0.0)
    assert plan.best.guaranteed.reason == "no bounds above 500 parameters"
    assert plan.best.predicted.bias_parameter.startswith("the ")
    for other in ({"batch_size": 5}, {"participation": with_replacement(2)}):
        with pytest.raises(ConfigError, match="above 500 parameters"):
            search.plan(model, "data", goal=GOAL, **other)
    small = search.plan(SimpleNamespace(dim=500), "data", goal=GOAL, local_steps=[1, 2], num_rounds=400)
    assert (small.num_exchanges, small.best.num_rounds) == (7, 400)


# -- what the searches are asked for --------------------------------------------------------------------

TEN = Goal(ess=80, num_chains=8, ess_per_chain=0)  # ten draws of each chain
FALLING = schedules.polynomial(2.0, 40)
GRID = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80)


def made_up(arrival, times, excess=None):
    """A law that meets any goal after so many rounds, with draws that remember less when they are thinned."""
    return SimpleNamespace(
        arrival=lambda goal: arrival,
        autocorrelation_time=lambda thinning=1: np.array(times) / thinning,
        excess=lambda rounds, goal: excess[rounds],
    )


@pytest.fixture
def asked(monkeypatch):
    """What ``_search`` is asked for, without searching."""
    asked = {}

    def noted(problem, goal, likes, **judges):
        asked.update(problem=problem, goal=goal, likes=likes, **judges)
        return "a plan"

    monkeypatch.setattr(search, "_search", noted)
    return asked


def test_a_run_costs_its_arrival_and_its_draws(asked):
    assert search.fewest_rounds(TWO, TEN, correlation=0.5) == "a plan"
    assert (asked["problem"], asked["goal"]) == (TWO, TEN)
    assert asked["likes"] == [Setting(K, TWO.largest_step, 0.5) for K in GRID]
    cost, shape = asked["cost"], asked["shape"]
    assert cost(made_up(7, [2.0, 3.5])) == 7 + 10 * 3.5
    assert cost(made_up(0, [2.0, 3.5])) == 10 * 3.5
    assert cost(made_up(None, [2.0, 3.5])) == math.inf
    # 43 rounds each: every fourth is kept, 107.5 of them, and both counts are rounded up
    assert shape(made_up(123, [2.0, 43.0])) == (130 + 4 * 110, 130, 4)
    assert shape(made_up(0, [2.0])) == (20, 0, 1)
    assert asked["merit"](SimpleNamespace(num_rounds=9)) == 9
    search.fewest_rounds(TWO, Goal(ess=0), local_steps=[4])
    assert asked["likes"] == [Setting(4, TWO.largest_step)]
    for arrival, rounds in ((None, 1), (0, 1), (1, 1), (2, 2), (123, 123)):
        assert asked["shape"](made_up(arrival, [43.0])) == (rounds, rounds - 1, 1)
        assert arrival is None or asked["cost"](made_up(arrival, [43.0])) == arrival
    search.fewest_rounds(TWO)
    assert asked["goal"] == Goal()


def test_a_run_of_a_length_costs_its_worst_error_or_what_it_lacks(asked):
    assert search.best_accuracy(TWO, 100, TEN, correlation=0.5) == "a plan"
    assert (asked["problem"], asked["goal"]) == (TWO, TEN)
    assert asked["likes"] == [Setting(K, TWO.largest_step, 0.5) for K in GRID]
    cost, shape = asked["cost"], asked["shape"]
    for excess, worst in (({20: 0.4, math.inf: 0.7}, 0.7), ({20: 0.9, math.inf: 0.7}, 0.9)):
        law = made_up(None, [2.0, 8.0], excess)
        assert (cost(law), shape(law)) == (worst, (100, 20, 1))
    whole = made_up(None, [10.0], {0: 0.9, math.inf: 0.2})  # not a round to spare
    assert (cost(whole), shape(whole)) == (0.9, (100, 0, 1))
    for time, lacking in ((13.0, 0.3), (16.0, 0.6), (43.2, 3.32)):  # the last: 108 of every fourth
        law = made_up(None, [2.0, time], {})
        assert cost(law) == pytest.approx(search._TOO_SLOW * (1 + lacking))
        assert shape(law) is None
    assert search._TOO_SLOW > 1e6
    slow = Setting(1, 0.01)
    assert asked["merit"](SimpleNamespace(setting=slow)) == cost(chain(TWO, slow)) > search._TOO_SLOW
    search.best_accuracy(TWO, 100, Goal(ess=0), local_steps=[4])
    assert asked["likes"] == [Setting(4, TWO.largest_step)]
    none = made_up(None, [43.0], {100: 0.3, math.inf: 0.1})
    assert (asked["cost"](none), asked["shape"](none)) == (0.3, (100, 99, 4))
    search.best_accuracy(TWO, 100)
    assert asked["goal"] == Goal()


def test_schedules_are_searched_in_their_own_way(monkeypatch, asked):
    monkeypatch.setattr(search, "_scheduled", lambda *given, **named: (given, named))
    likes = [Setting(K, TWO.largest_step, 0.5) for K in (2, 3)]
    run = {"local_steps": [2, 3], "step_size": FALLING, "correlation": 0.5}
    assert search.fewest_rounds(TWO, TEN, **run) == ((TWO, TEN, likes, FALLING), {})
    assert search.best_accuracy(TWO, 90, TEN, **run) == ((TWO, TEN, likes, FALLING), {"num_rounds": 90})
    assert asked == {}


def test_a_plan_hands_on_what_it_was_given(monkeypatch):
    chosen, seen = search.fewest_rounds(TWO, GOAL, local_steps=[1]), []

    def noted(name, value):
        return lambda *given, **named: seen.append((name, given, named)) or value

    for name, value in (("local_models", (TWO, 7)), ("fewest_rounds", chosen), ("best_accuracy", chosen)):
        monkeypatch.setattr(search, name, noted(name, value))
    extremes = noted("extremes", SimpleNamespace(least=2.0, largest=50.0, distance=3.0))
    monkeypatch.setattr(search, "extremes", extremes)
    small, large = SimpleNamespace(dim=500), SimpleNamespace(dim=501)
    run = {"local_steps": [2, 3], "step_size": FALLING, "temperature": 0.5}
    assert search.plan(small, "data", goal=GOAL, start="start", **run).num_exchanges == 7
    (_, (model, data, setting), named), *others = seen
    assert (model, data, setting.temperature, named) == (small, "data", 0.5, {"start": "start"})
    assert others == [("fewest_rounds", (TWO, GOAL), run)]
    seen.clear()
    search.plan(small, "data", goal=GOAL, num_rounds=90, **run)
    assert seen[0][2] == {"start": None}
    assert seen[1:] == [("best_accuracy", (TWO, 90, GOAL), run)]
    seen.clear()
    search.plan(small, "data")
    assert seen[1:] == [("fewest_rounds", (TWO, None), {"local_steps": GRID, "step_size": None})]
    seen.clear()
    assert search.plan(large, "data", start="start", local_steps=[2, 3]).num_exchanges == 0
    assert seen[0] == ("extremes", (large, "data", "start"), {})
    assert seen[1][2] == {"local_steps": (1,), "step_size": None}


def test_local_models_come_with_constants_or_the_reason_for_none(monkeypatch):
    seen, found = [], SimpleNamespace(num_exchanges=3)
    monkeypatch.setattr(search, "prepare", lambda *given, **named: seen.append((given, named)) or found)
    monkeypatch.setattr(search, "constants", lambda *given, **named: seen.append((given, named)) or "known")
    monkeypatch.setattr(search, "Problem", SimpleNamespace(from_preparation=lambda *given: given))
    setting = Setting(2, 0.1, temperature=0.5, batch_size=4)
    assert search.local_models("model", "data", setting, start="start") == ((found, "known", ""), 4)
    assert seen == [
        (("model", "data"), {"start": "start"}),
        (("model", "data"), {"preparation": found, "temperature": 0.5, "batch_size": 4}),
    ]

    def refused(*given, **named):
        raise DataError("a flat direction")

    monkeypatch.setattr(search, "constants", refused)
    assert search.local_models("model", "data", setting) == ((found, None, "a flat direction"), 4)


def test_settings_are_tried_with_one_small_step(monkeypatch):
    seen = []
    monkeypatch.setattr(search, "chain", lambda *given: seen.append(given))
    search.chain_possible(TWO, Setting(80, 0.3, 0.5))
    assert seen == [(TWO, Setting(1, 1e-3 * TWO.largest_step, 0.5))]


def test_every_search_begins_where_the_last_that_found_something_ended(monkeypatch):
    begun, judged, steps = [], [], iter([0.012345, 0.02, 0.05])

    def least(cost, guess, high):
        begun.append((guess, high))
        judged.append((cost(0.01), cost(5.0)))
        return next(steps)

    monkeypatch.setattr(search, "_least", least)
    shapes = iter([None, (10, 4, 1), (10, 4, 2)])
    plan = search._search(
        TWO, TEN, search._likes(TWO, [1, 2, 4], {}), cost=lambda law: float(law.rates[0]),
        shape=lambda law: next(shapes), merit=lambda c: 5 - c.setting.local_steps,
    )  # fmt: skip
    # a quarter of 1/L in a round, and then as much as two steps of 0.02
    np.testing.assert_allclose(begun, [(1 / 12, 1 / 3), (1 / 24, 1 / 3), (0.04 / 4, 1 / 3)])
    # the average round keeps the mean of 0.99^K and 0.97^K; five is refused by the law
    left = [1 - (0.99**K + 0.97**K) / 2 for K in (1, 2, 4)]
    assert judged == [(pytest.approx(x), math.inf) for x in left]
    assert [c.setting.step_size for c in plan.candidates] == [0.0123, 0.02, 0.05]
    assert [(c.num_rounds, c.num_warmup, c.thinning) for c in plan.candidates] == [
        (0, 0, 1), (10, 4, 1), (10, 4, 2),
    ]  # fmt: skip
    assert plan.best is plan.candidates[2]
    for c in plan.candidates[1:]:  # six rounds, or every second of them
        time = chain(TWO, c.setting).autocorrelation_time(c.thinning)[0]
        assert c.ess == pytest.approx(8 * (6 // c.thinning) / time)


def test_what_cannot_be_reached_is_said():
    likes = search._likes(TWO, [2, 3], {})
    for num_rounds in (None, 30):
        assert search._found("a plan", TEN, likes, num_rounds) == "a plan"
    with pytest.raises(ConfigError, match=r"bias ≤ 0\.05, sd-error ≤ 0\.05 .* local-steps in \[2, 3\]"):
        search._found(None, TEN, likes)
    with pytest.raises(ConfigError, match="num-rounds = 30 do not give 10 effective draws per chain"):
        search._found(None, TEN, likes, 30)


# -- schedules ------------------------------------------------------------------------------------------


@pytest.fixture
def tabled(monkeypatch):
    """A search for multiples of a schedule whose runs are given by hand, and what it looked at."""
    seen = SimpleNamespace(followed=[], least=[], costs=[], runs=[], tables={})

    def least(cost, guess, high, **named):
        seen.least.append((guess, high, named))
        seen.costs.append((cost(0.5), cost(99.0)))
        return 0.12345

    def run(problem, setting, goal, *length):
        assert (problem, goal) == (TWO, TEN)
        seen.runs.append(length)
        if setting.step_size.first > 100:
            raise ConfigError("it diverges")
        return seen.tables[setting.local_steps]

    monkeypatch.setattr(search, "_least", least)
    monkeypatch.setattr(search, "fewest", lambda *given: run(*given))
    monkeypatch.setattr(search, "best_of", lambda *given: run(*given))
    monkeypatch.setattr(search, "smallest", lambda *given: (given[0], given[1].local_steps, *given[2:]))
    monkeypatch.setattr(search, "followed", lambda *given: seen.followed.append(given))
    monkeypatch.setattr(search, "predict", lambda *given: given)
    monkeypatch.setattr(search, "what_if", lambda *given: given)
    return seen


@pytest.mark.parametrize("length", [None, 77])
def test_the_multiple_of_a_schedule_is_searched_for_every_number_of_steps(tabled, length):
    table = scheduled.Timetable
    tabled.tables = {
        1: table(100, 10, 10.0, 12, 100.0), 2: None, 3: table(90, 20, 9.99, 33, 50.0),
        4: table(101, 5, 11.0, 7, 99.0),
    }  # fmt: skip
    likes = search._likes(TWO, [1, 2, 3, 4], {"correlation": 0.5})
    plan = search._scheduled(TWO, TEN, likes, FALLING, num_rounds=length)
    assert [(p, s.local_steps, s.correlation, n) for p, s, n in tabled.followed] == [
        (TWO, K, 0.5, 1) for K in (1, 2, 3, 4)
    ]
    # the largest of its steps, 2, would be 1/L
    assert [s.step_size.first for _, s, _ in tabled.followed] == pytest.approx([1e-3 / 3] * 4)
    for K, (guess, high, named) in zip((1, 2, 3, 4), tabled.least):
        assert (guess, high) == pytest.approx((1 / 6, 1 / 6))
        assert named == {"down": 2.0, "low": (TWO, K, FALLING, TEN)}
    inf = math.inf
    assert tabled.costs == [(100.0, inf), (inf, inf), (50.0, inf), (99.0, inf)]
    assert set(tabled.runs) == {() if length is None else (length,)}
    # as many draws as wanted, and a little fewer
    assert [(c.num_rounds, c.num_warmup, c.thinning, c.ess) for c in plan.candidates] == [
        (100, 10, 1, 80.0), (0, 0, 1, 0.0), (0, 0, 1, 0.0), (101, 5, 1, 88.0),
    ]  # fmt: skip
    for c, like in zip(plan.candidates, likes):
        assert c.setting == Setting(like.local_steps, schedules.scaled(FALLING, 0.123), 0.5)
    good, none = "the bounds are for constant step sizes", "no multiple of the schedule will do"
    assert [c.guaranteed.reason for c in plan.candidates] == [good, none, none, good]
    first, second, third, fourth = plan.candidates
    assert first.predicted == (TWO, first.setting, 12)
    assert (second.predicted, third.predicted) == (None, None)
    assert fourth.predicted == (TWO, fourth.setting, 7)
    assert plan.best is first  # within two percent of the fourth
    assert (plan.goal, plan.problem, plan.num_exchanges) == (TEN, TWO, 0)
    assert plan.what_if == (TWO, first.setting, 100)
    tabled.tables[1] = table(110, 10, 10.0, 12, 110.0)
    assert search._scheduled(TWO, TEN, likes, FALLING, num_rounds=length).best.setting.local_steps == 4


def test_where_no_multiple_of_a_schedule_will_do_it_is_said(tabled):
    tabled.tables = {2: None, 3: scheduled.Timetable(90, 20, 9.99, 33, 50.0)}
    likes = search._likes(TWO, [2, 3], {})
    with pytest.raises(ConfigError, match=r"no multiple of .* and 10 effective .* local-steps in \[2, 3\]"):
        search._scheduled(TWO, TEN, likes, FALLING)
    with pytest.raises(ConfigError, match="num-rounds = 77 do not give 10 effective draws per chain"):
        search._scheduled(TWO, TEN, likes, FALLING, num_rounds=77)


@pytest.mark.parametrize("worst", [3, 5, 8])
def test_the_worst_kept_round_may_be_the_first_or_the_last(worst):
    excess = np.full(9, 0.5)
    excess[worst], excess[2] = 0.9, 7.0  # what is in the warm-up does not count
    found = scheduled.Course(excess, np.ones((9, 1, 1)), np.zeros((8, 1, 1)))
    run = scheduled._run(found, 3, 8)
    assert (run.num_rounds, run.num_warmup, run.worst, run.ess) == (8, 3, worst, pytest.approx(5.0))
    assert found.arrival() == 3
    assert scheduled._run(found, 9, 8).num_warmup == 7  # the last position is kept


@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_four_times_the_smallest_multiple_of_a_schedule_fills_the_flattest_direction(spread):
    schedule = schedules.cosine(0.01, 50, last=0.001)
    goal, setting = Goal(math.inf, spread), Setting(2, schedule)
    factor = 4 * scheduled.smallest(TWO, setting, schedule, goal)
    whole = sum(float(schedule(k)) for k in range(50)) + 0.001 * (2 * scheduled.MOST - 50)
    left = math.exp(-2 * float(TWO.precision[0, 0]) * factor * whole)
    assert math.sqrt(1 - left) == pytest.approx(1 - spread, rel=1e-5)
