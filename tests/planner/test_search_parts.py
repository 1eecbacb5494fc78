"""The search for settings part by part: rounding, the valley of a cost, and what a candidate is made of."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fald import schedules
from fald.core.errors import ConfigError
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
    law = SimpleNamespace(autocorrelation_time=lambda thinning=1: np.array([1.0, 3.0 + 40.0 / thinning]))
    assert search._draws(law, Goal(ess=320, num_chains=32, ess_per_chain=0)) == (4, math.ceil(10 * 13.0))
    quick = SimpleNamespace(autocorrelation_time=lambda thinning=1: np.array([9.0, 1.0]))
    assert search._draws(quick, Goal(ess=320, num_chains=32, ess_per_chain=0)) == (1, 90)
    assert search._draws(quick, Goal(ess=0)) == (1, 0)


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
    assert min(asked) < 4.0 ** -(search._SPAN - 1)
    assert len(asked) < 40


def test_a_valley_between_two_walls_is_found_and_nothing_far_below_the_least_is_looked_for():
    def between(step):
        return math.log(step / 0.03) ** 2 if 0.02 < step < 0.05 else math.inf

    assert search._least(between, 1.0, 1.0, down=2.0) == pytest.approx(0.03, rel=0.06)
    assert not math.isfinite(between(search._least(between, 1.0, 1.0)))  # by fours it is missed
    asked = []
    search._least(lambda step: asked.append(step) or math.inf, 1.0, 1.0, down=2.0, low=1e-2)
    assert 1e-2 / 2 <= min(asked) <= 1e-2
    assert len(asked) == 8


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
    assert plan.best.guaranteed.reason == "no bounds above 500 parameters"
    assert plan.best.predicted.bias_parameter.startswith("the ")
    for other in ({"batch_size": 5}, {"participation": with_replacement(2)}):
        with pytest.raises(ConfigError, match="above 500 parameters"):
            search.plan(model, "data", goal=GOAL, **other)
    small = search.plan(SimpleNamespace(dim=500), "data", goal=GOAL, local_steps=[1, 2], num_rounds=400)
    assert (small.num_exchanges, small.best.num_rounds) == (7, 400)


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
