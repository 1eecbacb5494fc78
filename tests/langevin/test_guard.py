"""A private run while it goes: what it is charged, what it says, and where its budget ends it."""

from types import SimpleNamespace

import numpy as np
import pytest

from fald.core.errors import PrivacyError
from fald.langevin.fald import FALD, fald, variant
from fald.langevin.guard import Guard, settings_of_run
from fald.privacy import RunSettings
from fald.privacy.protection import Protection
from fald.settings.participation import full, without_replacement

DELTA = 1e-5
METHOD = fald(local_steps=2, step_size=2**-10, clip_norm=0.25)


def problem(**changes):
    given = {
        "method": METHOD, "participation": full(), "num_chains": 1, "num_warmup": 3,
        "data": SimpleNamespace(sizes=np.array([100, 300]), names=("a", "b"), bounds=None),
        "num_kept": lambda rounds: rounds, "model": SimpleNamespace(sensitivity_fn=None, origin=""),
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


def guarded(rounds=10, lost=0, *, given=None, **protection):
    return Guard(Protection(DELTA, method="rdp", **protection), given or problem(), rounds, lost)


def test_a_run_is_charged_with_all_its_settings():
    part = without_replacement(1, allow_unequal=True)
    method = fald(
        local_steps=3, step_size=2**-9, temperature=0.5, correlation=0.25, noise="paper", batch_size=7,
        clip_norm=2.0,
    )  # fmt: skip
    found = settings_of_run(problem(method=method, participation=part, num_chains=4), 5, 9.0, 2)
    assert found == RunSettings(
        sizes=[100, 300], num_rounds=7, num_chains=4, local_steps=3, step_size=2**-9, temperature=0.5,
        correlation=0.25, noise="paper", batch_size=7, clip_norm=2.0, participation=part,
    )  # fmt: skip
    # a bound of the model's own counts only where nothing is clipped
    free = fald(local_steps=3, step_size=2**-9)
    assert settings_of_run(problem(method=free), 5, 9.0, 0).delta_gradient == 9.0
    assert settings_of_run(problem(), 5, 9.0, 0).delta_gradient == 0.5


def test_lost_rounds_of_a_schedule_come_first_and_at_its_largest_step():
    def rising(k):
        return 1e-3 * (1.0 + k)

    method = fald(local_steps=2, step_size=rising, clip_norm=0.25)
    found = settings_of_run(problem(method=method), 3, None, 2)
    own = [float(rising(k)) for k in range(6)]
    np.testing.assert_allclose(found.step_size, [max(own)] * 4 + own)
    assert found.num_rounds == 5


def test_a_method_that_sends_what_is_not_accounted_for_is_refused():
    class Other(FALD):
        def client_update(self, hyper, local, message, memory):
            return super().client_update(hyper, local, message, memory)

    for method in (variant(Other, METHOD), fald(local_steps=2, step_size=0.1, clip_norm=1.0, momentum=0.5)):
        with pytest.raises(PrivacyError, match="no privacy accounting"):
            guarded(given=problem(method=method))


def test_readings_are_from_above_and_near():
    free = guarded(rounds=100)
    exact = [free.ledger.worst(r) for r in range(101)]
    for r in (0, 1, 2, 7, 50, 99, 100, 101):
        assert exact[min(r, 100)] <= free.epsilon(r) <= exact[min(100, max(1, r) + 3)]
    assert free.epsilon(1) == free.epsilon(0) == exact[1]
    assert free.epsilon(100) == free.epsilon(1000) == exact[100]
    few = guarded(rounds=30, lost=5)
    assert [few.epsilon(r) for r in (1, 12, 30)] == [few.ledger.worst(r + 5) for r in (1, 12, 30)]


def test_the_budget_ends_a_run_in_time():
    exact = [guarded(rounds=30).ledger.worst(r) for r in range(31)]
    assert guarded().num_rounds == 10
    for lost in (0, 4):
        for rounds in (1, 5, 9, 10):
            stopped = guarded(lost=lost, max_epsilon=exact[rounds + lost])
            assert stopped.num_rounds == rounds
        assert guarded(lost=lost, max_epsilon=exact[14 + lost]).num_rounds == 10
        assert guarded(lost=lost, max_epsilon=exact[6 + lost] * (1 - 1e-9)).num_rounds == 5
        with pytest.raises(PrivacyError, match="does not allow one more round") as refused:
            guarded(lost=lost, max_epsilon=exact[1 + lost] * (1 - 1e-9))
        assert f"after which ε would be {exact[1 + lost]:.3g}" in str(refused.value)
    assert "after round 5 of 10" in str(guarded(max_epsilon=exact[5]).exceeded(10))
    assert "larger budget" in guarded(max_epsilon=exact[5]).exceeded(10).hint
    with pytest.raises(PrivacyError, match=f"would be {exact[1]:.3g}"):
        guarded(rounds=1, max_epsilon=0.5 * exact[1])


def test_a_run_whose_budget_ends_before_its_first_draw_does_not_begin():
    budget = guarded().ledger.worst(5)
    assert guarded(given=problem(num_kept=lambda r: r - 4), max_epsilon=budget).num_rounds == 5
    with pytest.raises(PrivacyError, match="after round 5, before its first draw"):
        guarded(given=problem(num_kept=lambda r: r - 5), max_epsilon=budget)


def test_a_statement_is_of_the_rounds_begun_and_lost():
    exact = [guarded(rounds=30).ledger.worst(r) for r in range(31)]
    for lost in (0, 4):
        run = guarded(lost=lost, client_noise="seeded")
        for begun in (0, 2, 7):
            run.rounds_begun = begun
            told = run.statement().data
            assert told["epsilon"] == pytest.approx(exact[max(1, begun + lost)], rel=1e-12)
            assert told["preparation_rounds"] == min(begun, 3)
        assert told["simulation"]
        assert [c["name"] for c in told["clients"]] == ["a", "b"]
    run = guarded(given=problem(model=SimpleNamespace(sensitivity_fn=None, origin="mine 1.0")))
    assert run.rounds_begun == run.lost_rounds == 0
    assert not run.statement().data["simulation"]
    assert "mine 1.0" in run.statement().text


def test_what_is_asked_for_reaches_the_accountant():
    assert Guard(Protection(DELTA, method="rdp"), problem(), 2).lost_rounds == 0
    assert guarded(rounds=2).ledger.method == "rdp"
    assert guarded(rounds=2, view="summed").ledger.noise.view == "summed"
    assert guarded(rounds=2).ledger.delta == DELTA
    # a stated sensitivity, else what the model derives from declared bounds
    data = SimpleNamespace(sizes=np.array([100, 300]), names=("a", "b"), bounds=((0.0, 2.0),))
    derived = problem(
        method=fald(local_steps=2, step_size=2**-10), data=data,
        model=SimpleNamespace(sensitivity_fn=lambda bounds: 3 * bounds[0][1], origin=""),
    )  # fmt: skip
    assert guarded(given=derived).ledger.settings.sensitivity == 6.0
    assert guarded(given=derived, sensitivity=1.5).ledger.settings.sensitivity == 1.5
    assert guarded(given=derived, sensitivity=0.5).ledger.worst() == pytest.approx(guarded().ledger.worst())
