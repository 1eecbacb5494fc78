"""Where predictions and the front turn from one case to another, and laws that a few lines write out."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import numpy as np
import pytest

from fald.core.errors import ConfigError
from fald.planner import Goal, Problem, Setting
from fald.planner.front import FrontPoint
from fald.settings.participation import full
from fald.settings.schedules import piecewise

front, predict = (importlib.import_module(f"fald.planner.{n}") for n in ("front", "predict"))

TWO = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])


def one(curvature, start):
    """One client with independent parameters of these curvatures, whose chains start there."""
    flat = Problem.from_gaussian([np.diag(curvature)], [np.zeros(len(curvature))], [1.0])
    return replace(flat, start=np.array(start, float))


BOTH = one([2.0, 5.0], [0.5, -3.0])


def test_along_constant_steps_errors_are_those_of_the_recursion():
    """Each mean shrinks by 1 − ηλ a step, and each variance is a geometric sum."""
    curved, start, tau, eta, K = np.array([2.0, 5.0]), BOTH.start, 0.5, 0.05, 2
    found = predict.trajectory(BOTH, Setting(K, eta, temperature=tau), iter([30, 1, 0]))
    assert found.num_rounds.tolist() == [30, 1, 0]
    sd = np.sqrt(tau / curved)
    for i, rounds in enumerate((30, 1, 0)):
        kept = (1 - eta * curved) ** (K * rounds)
        mean, variance = kept * start, 2 * eta * tau * (1 - kept**2) / (1 - (1 - eta * curved) ** 2)
        apart = np.sqrt(variance) - sd
        assert found.bias[i] == pytest.approx(np.abs(mean / sd).max())
        assert found.sd_error[i] == pytest.approx(np.abs(apart / sd).max())
        assert found.w2[i] == pytest.approx(math.sqrt(np.sum(mean**2) + np.sum(apart**2)))
    assert np.abs(BOTH.start / sd).min() < found.bias[1]  # the twin: the other parameter is nearer


@pytest.mark.parametrize("step", [0.05, piecewise([(0, 0.05), (3, 0.02)])])
def test_of_no_rounds_there_are_no_errors(step):
    assert [len(errors) for errors in predict.trajectory(BOTH, Setting(2, step), [])] == [0, 0, 0, 0]


def test_along_constant_steps_batches_add_their_noise():
    setting = Setting(2, 0.05, batch_size=2)
    known = replace(BOTH, scatters=np.ones((1, 2, 2)), sizes=np.array([10]))
    for problem in (known, replace(known, scatters=0 * known.scatters)):
        found = predict.trajectory(problem, setting, [4])
        at = predict.predict(problem, setting, 4)
        assert (found.sd_error[0], found.bias[0]) == (at.sd_error, at.bias)
    assert found.sd_error[0] != predict.trajectory(known, setting, [4]).sd_error[0]  # the twin


def test_a_start_may_be_forgotten_where_the_limit_is_far_from_the_posterior():
    """Two clients that drift apart in a round: what shrinks is the distance of two runs, and no mean."""
    steps, K, rounds, start = piecewise([(0, 0.1), (15, 0.05)]), 5, 12, 5.0
    sd, left, ahead = math.sqrt(0.5), start, [True]
    for r in range(rounds):
        eta = 0.1 if r < 3 else 0.05
        left *= ((1 - eta) ** K + (1 - 3 * eta) ** K) / 2  # curvatures 1 and 3
        ahead.append(left / sd > 0.01)
    found = predict.predict(replace(TWO, start=np.array([start])), Setting(K, steps), rounds)
    assert 3 < found.forgotten == ahead.index(False) < rounds
    assert found.bias > 0.02  # the twin: its mean stays away


@pytest.mark.parametrize(
    ("local_steps", "rounds", "border", "begun"),
    [
        (3, 2, 5, True),
        (3, 2, 6, False),
        (3, 2, 7, False),
        (1, 1, 1, False),
        (1, 2, 1, True),
        (1, 0, 1, False),
    ],
)
def test_the_memory_of_a_run_with_a_schedule_is_that_of_the_last_step_taken(
    local_steps, rounds, border, begun
):
    steps = piecewise([(0, 0.1), (border, 0.02)])
    kept = (1 - (0.02 if begun else 0.1) * 2.0) ** local_steps
    found = predict.predict(one([2.0], [1.0]), Setting(local_steps, steps), rounds)
    assert found.autocorrelation_time == pytest.approx((1 + kept) / (1 - kept), rel=1e-5)


@pytest.mark.parametrize("start", [[0.0, 3.0], [1e-3, -3.0]])
def test_a_start_is_forgotten_by_its_slowest_parameter_and_draws_by_theirs(start):
    setting = Setting(2, piecewise([(0, 0.05), (9, 0.02)]))
    slow, far = (predict.predict(one([h], [x]), setting, 30) for h, x in zip((2.0, 5.0), start))
    found = predict.predict(one([2.0, 5.0], start), setting, 30)
    assert slow.forgotten == 0 < 1 < far.forgotten == found.forgotten < 30
    assert found.autocorrelation_time == pytest.approx(slow.autocorrelation_time)
    assert far.autocorrelation_time < 0.5 * slow.autocorrelation_time


def test_a_schedule_has_no_limit():
    with pytest.raises(ConfigError, match="has no limit: give num-rounds"):
        predict.predict(TWO, Setting(2, piecewise([(0, 0.1), (7, 0.02)])))


@pytest.mark.parametrize("step", [0.05, piecewise([(0, 0.05), (3, 0.02)])])
def test_changes_are_judged_after_the_rounds_of_the_run(step):
    far, setting = replace(TWO, start=np.array([5.0])), Setting(2, step)
    found = predict.what_if(far, setting, 3)
    others = {"as it is": {}, "local-steps = 1": {"local_steps": 1}, "correlation = 1": {"correlation": 1.0}}
    for name, change in others.items():
        at = predict.predict(far, replace(setting, **change), 3)
        assert found[name] == pytest.approx(max(at.bias, at.sd_error))
    assert found["as it is"] > 1  # the twin: in the limit the start is forgotten


def test_the_rounds_to_a_goal_end_with_the_first_that_meets_it():
    setting, goal = Setting(2, 0.01), Goal(math.inf, math.inf, w2=0.1)
    rounds = predict.rounds_to(BOTH, setting, goal)
    before, at = predict.trajectory(BOTH, setting, [rounds - 1, rounds]).w2
    assert at <= 0.1 < before
    assert predict.rounds_to(BOTH, setting, replace(goal, w2=1e-4)) is None


# -- the front ------------------------------------------------------------------------------------------


def test_the_grid_that_is_tried_where_none_is_given(monkeypatch):
    tried, aims = [], set()

    def points(problem, goal, setting, *, errors, privacy_fn):
        assert (problem, goal, privacy_fn) == (TWO, Goal(), None)
        aims.add(tuple(errors))
        tried.append(setting)
        return [FrontPoint(setting, 10, 0, 0.1, 1.0)]  # never all accuracies: every step size is tried

    monkeypatch.setattr(front, "_points", points)
    front.pareto(TWO, noise="paper", temperature=0.5)
    assert aims == {(0.02, 0.05, 0.1, 0.2)}
    assert tried == [
        Setting(K, TWO.largest_step / 2.0**i, rho, full(), "paper", 0.5)
        for rho in (0.0, 0.7, 0.95, 1.0)
        for K in (1, 3, 10, 30)
        for i in range(16)
    ]


def test_a_privacy_loss_is_the_formula_of_the_module():
    # p = 1/2 and v = 2 at both clients: z = √(1/2)·√(2·0.5·(1 − 0.36)/0.01) = √32
    setting = Setting(2, 0.01, 0.6, temperature=0.5)
    loss = front.privacy_loss(TWO, setting, 50, 3)
    assert loss == pytest.approx(math.sqrt(2 * 50 * 3 / 32))
    known = replace(TWO, sizes=np.array([10, 40]))
    for rows, times in ((41, 1), (40, 1), (20, 2), (10, 4), (5, 8)):
        found = front.privacy_loss(known, replace(setting, batch_size=rows), 50, 3)
        assert found == pytest.approx(times * loss)  # of the client of which a batch is the smallest part
    assert front.privacy_loss(known, setting, 50, 3) == loss


def test_a_privacy_loss_of_batches_needs_the_rows_of_the_clients():
    """A batch of few rows shows more of each of them: as if it were all rows, the loss would be too small."""
    batches = Setting(2, 0.01, batch_size=5)
    with pytest.raises(ConfigError, match="batch-size needs the numbers of the clients' rows"):
        front.privacy_loss(TWO, batches, 50, 3)
    with pytest.raises(ConfigError, match="batch-size needs the numbers of the clients' rows"):
        front.pareto(TWO, local_steps=(2,), correlations=(0.0,), batch_size=5)
    # an accountant may know better
    told = front.pareto(TWO, local_steps=(2,), correlations=(0.0,), batch_size=5, privacy_fn=lambda run: 1.0)
    assert {point.privacy for point in told} == {1.0}
