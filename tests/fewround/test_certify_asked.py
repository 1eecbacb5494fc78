"""That importance sampling asks every condition of *reached*, about the right draws."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal as normal

import fald
from fald.fewround import certify, importance, proposal
from fald.fewround.search import DrawBatch, weigh
from fald.fewround.weights import moments, precision, smooth
from helpers import federation, linear_model

CONDITIONS = {
    "khat": "k-hat", "pooled_khat": "pooled k-hat", "means_precise": "precision of means",
    "sds_precise": "precision of sds", "moments_exist": "moments", "agreement": "agreement", "tails": "tails",
    "far_mass": "far mass", "defined": "numbers", "mode": "mode", "funnel": "funnel",
    "one_mode": "one mode", "explored": "explorers", "two_rounds": "rounds",
}  # fmt: skip
COUNT = 512


@pytest.fixture
def asked(monkeypatch):
    """What each condition was asked about; all of them say no."""
    found = {}
    for function, name in CONDITIONS.items():

        def no(*given, name=name, **named):
            found[name] = (*given, *named.values())
            return certify.Condition(name, False, f"{name} says no")

        monkeypatch.setattr(certify, function, no)
    return found


def batch(number, mean, scale, rng):
    """Draws of a Gaussian, of a posterior that is a correlated one."""
    own = proposal.gaussian(np.full(2, mean), scale * np.eye(2))
    draws = mean + np.sqrt(scale) * rng.standard_normal((COUNT + 2 * number, 2))
    values = normal(cov=[[1.0, 0.5], [0.5, 1.0]]).logpdf(draws) + 3.0
    return DrawBatch(number, own, len(draws), draws, values, {})


@pytest.fixture
def search():
    rng = np.random.default_rng(0)
    return SimpleNamespace(
        batches=[batch(2, 0.1, 2.0, rng), batch(3, -0.1, 1.5, rng)], report=None, tolerance=0.07,
        names=["a", "b"], best=object(), highest=1.5, climbers=SimpleNamespace(waiting=4),
        modes=SimpleNamespace(relevant=lambda: [1, 2, 3], active=[1, 2]), concave=False,
    )  # fmt: skip


def test_every_condition_is_asked_about_what_its_name_says(asked, search):
    search.report = lambda draws: draws[:, :1] ** 2
    state, base = weigh(search), proposal.gaussian(np.zeros(2), np.diag([4.0, 9.0]))
    ways, far, undefined = np.eye(2), np.zeros(4), np.zeros(COUNT + 6, bool)
    checks = importance._conditions(search, state, base, (ways, far), undefined=undefined, gain=0.25)
    assert {check.name for check in checks} == set(CONDITIONS.values()) - {"far mass"}  # rays tell that
    labels, last = ["a", "b", "reported quantity 1"], search.batches[-1]
    assert asked.pop("k-hat") == (state.newest, COUNT + 6)
    assert asked.pop("pooled k-hat") == (state.pooled,)
    assert asked.pop("precision of means") == (state.precision, 0.07, labels)
    assert asked.pop("precision of sds") == (state.precision, 0.07, labels)
    assert asked.pop("moments") == (state.precision, labels)
    assert asked.pop("agreement") == (state.moments, state.all_moments, 0.07, ["a", "b"])
    *first, sd, names = asked.pop("tails")
    assert (first[0] is far, first[1] is ways, names) == (True, True, ["a", "b"])
    assert first[2] == 1.5 > last.values.max()  # draws may have missed the top
    np.testing.assert_allclose(sd, [2.0, 3.0])
    flags, expected, distance, tolerance = asked.pop("numbers")
    assert (flags is undefined, tolerance) == (True, 0.07)
    np.testing.assert_allclose(distance, np.max(last.positions**2 / [4.0, 9.0], axis=1))
    cores = normal(cov=np.diag([4.0, 9.0])).logpdf(last.positions)
    np.testing.assert_allclose(expected, np.exp(cores - last.density(last)) / len(cores), rtol=1e-9)
    assert asked == {
        "mode": (search.best, 0.25), "funnel": (search.best, 1.5), "one mode": (3,), "explorers": (6,),
        "rounds": (2,),
    }  # fmt: skip


def test_of_tails_that_fall_by_proof_only_the_top_is_asked_for(asked, monkeypatch, search):
    seen = []
    monkeypatch.setattr(
        certify, "falls", lambda best: seen.append(best) or certify.Condition("tails", True, "")
    )
    state, base = weigh(search), proposal.gaussian(np.zeros(2), np.eye(2))
    checks = importance._conditions(search, state, base, None, undefined=np.zeros(COUNT + 6, bool), gain=0.0)
    assert seen == [search.best]
    assert "tails" not in asked
    assert {check.name for check in checks} == set(CONDITIONS.values()) - {"far mass"}


def test_the_newest_draws_certify_and_all_of_them_are_compared_with_it(search):
    state, (old, new) = weigh(search), search.batches

    def density(own, draws):
        return proposal.log_density(own.proposal, own.count, draws)

    ratios = new.values - density(new, new.positions)
    newest = smooth(ratios)
    np.testing.assert_allclose(state.newest.weights, newest.weights, rtol=1e-9)
    np.testing.assert_allclose(state.moments.mean, moments(new.positions, newest.weights).mean)
    np.testing.assert_allclose(state.precision, precision(new.positions, newest.weights))
    assert state.log_mass == pytest.approx(logsumexp(ratios) - np.log(COUNT + 6))
    assert state.log_mass == pytest.approx(3.0, abs=0.2)  # the posterior's integral
    both = np.concatenate([old.positions, new.positions])
    shares = np.log(np.array([COUNT + 4, COUNT + 6]) / (2 * COUNT + 10))
    mixed = np.logaddexp(shares[0] + density(old, both), shares[1] + density(new, both))
    pooled = smooth(np.concatenate([old.values, new.values]) - mixed)
    np.testing.assert_allclose(state.pooled.weights, pooled.weights, rtol=1e-9)
    np.testing.assert_allclose(state.all_moments.covariance, moments(both, pooled.weights).covariance)
    np.testing.assert_array_equal(state.all_positions, both)


@pytest.mark.parametrize("holding", [set(), {"tails"}, {"tails", "k-hat"}])
def test_whatever_fails_is_told_and_withholds_the_certificate(search, holding):
    search.trace, search.target = [], SimpleNamespace(dim=2)
    search.modes.relevant = list
    checks = [certify.Condition(n, n in holding, f"{n}!") for n in ("rounds", "k-hat", "tails")]
    found = importance._outcome(search, weigh(search), checks)
    assert set(found.failed) == {"rounds", "k-hat", "tails"} - holding
    assert all(f"{name}!" in found.reason for name in found.failed)
    assert not found.reached
    assert found.advice
    right = importance._outcome(search, weigh(search), [check._replace(holds=True) for check in checks])
    assert (right.reached, right.reason, right.advice, right.failed) == (True, "", "", ())
    assert right.positions is search.batches[-1].positions


@pytest.mark.slow
def test_importance_sampling_asks_every_condition_in_a_run(asked):
    """Each of them can say no, that of rays among them."""
    found = fald.fit(
        0, linear_model(2.0), federation().data, method="importance", max_rounds=3, progress=False
    )
    assert found.attrs["verdict"] == "not reached"
    assert all(f"{name} says no" in found.attrs["reason"] for name in CONDITIONS.values())
    assert asked["rounds"] == (2,)
