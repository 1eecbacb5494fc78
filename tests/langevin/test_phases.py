"""Phases of a run: their exact law, the draws they keep, what they refuse; and twins that must be told."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

import fald
from fald import gaussian
from fald.core.errors import ConfigError, Interrupted, PrivacyError
from fald.langevin import inprocess
from fald.settings.schedules import Phase, Phases, from_record, in_phases, record
from helpers import START, deviations, draws, federation, linear_model

MODEL = linear_model()
FEDERATION = federation((2, 2, 8, 8))
LIMIT = 4.0
PHASES = [
    Phase(3, 0.3, temperature=0.0),
    Phase(2, 0.2, last_step_size=0.05, temperature=2.0),
    Phase(2, 0.05, temperature=0.5, draws=2),
]
STEPS = 3


def sampled(phases=PHASES, model=MODEL, **others):
    given = {"local_steps": STEPS, "num_chains": 2, "progress": False, "step_check": False, **others}
    return fald.sample(5, model, FEDERATION.data, phases=phases, **given)


def largest(sample, phases=PHASES, **others):
    """The largest deviation of last draws from the exact law of phases."""
    schedule, temperature, kept = in_phases(phases, STEPS)
    run = {"step_size": schedule, "local_steps": STEPS, "num_rounds": kept[-1], "temperature": temperature}
    path = gaussian.law(*FEDERATION.energies, initial_position=START, **run, **others)
    return np.abs(deviations(sample, path.mean[-1], path.covariance[-1])).max()


@pytest.mark.parametrize(
    "others",
    [
        {"correlation": 0.6},
        pytest.param(
            {"momentum": 0.6, "participation": fald.without_replacement(2, allow_unequal=True)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["noise that is shared", "momentum and drawn clients"],
)
def test_draws_follow_the_exact_law_of_phases(others):
    sample = draws(sampled(num_chains=20_000, **others))[:, -1]
    assert largest(sample, **others) < LIMIT
    for change in ({"temperature": 1.0}, {"step_size": 0.1}):  # twins
        other = [*PHASES[:-1], dataclasses.replace(PHASES[-1], **change)]
        assert largest(sample, other, **others) > LIMIT, change


def test_a_temperature_that_does_not_change_is_told_apart(monkeypatch):
    monkeypatch.setattr(sys.modules["fald.langevin.fald"], "heat_at", lambda schedule, step: 1.0)
    sample = draws(sampled(num_chains=20_000, model=dataclasses.replace(MODEL)))[:, -1]
    assert largest(sample) > 2 * LIMIT


@pytest.mark.slow
def test_phases_without_noise_are_fedavg_and_then_go_on():
    """FedAvg as a start, in one run: positions and draws of the two runs that it stands for."""
    phases = [Phase(4, 0.1, temperature=0.0, draws=1), Phase(3, 0.05, temperature=0.7, draws=3)]
    whole = draws(sampled(phases))
    common = {"local_steps": STEPS, "num_chains": 2, "progress": False, "step_check": False}
    first = fald.sample(5, MODEL, FEDERATION.data, num_rounds=4, step_size=0.1, temperature=0.0, **common)
    np.testing.assert_allclose(whole[:, 0], draws(first)[:, -1], rtol=1e-5)
    later = fald.sample(
        5, MODEL, FEDERATION.data, num_rounds=7, num_warmup=4, temperature=0.7,
        step_size=fald.schedules.piecewise([(0, 0.1), (12, 0.05)]), **common,
    )  # fmt: skip
    assert np.abs(whole[:, 1:] - draws(later)).max() > 0.01  # noise from the first round on


@pytest.mark.parametrize(
    "apart",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["one program", "clients on threads"],
)
def test_the_draws_that_phases_ask_for_are_kept(monkeypatch, apart):
    monkeypatch.setattr(inprocess, "_WORK_ON_THREADS", 0 if apart else 2**60)
    monkeypatch.setattr(inprocess, "_WORK_AT_ONCE", 0 if apart else 2**17)
    inprocess._compile.cache_clear()
    cycle = [Phase(3, 0.2, temperature=0.0), Phase(4, 0.2, last_step_size=0.02, draws=2)]
    every = [dataclasses.replace(phase, draws=phase.rounds) for phase in 2 * cycle]
    few, whole = sampled(2 * cycle), sampled(every)
    rounds = few["sample_stats"]["round"].values.tolist()
    assert rounds == [5, 7, 12, 14]
    np.testing.assert_array_equal(draws(few), draws(whole)[:, np.array(rounds) - 1])
    assert "clients on threads" in few.attrs["layout"] if apart else "one program" in few.attrs["layout"]


def test_a_run_in_phases_goes_on_where_it_was_stopped(tmp_path):
    def stop(round_number, positions, stats):
        if round_number == 6:
            raise KeyboardInterrupt

    phases, kept = [*PHASES, *PHASES], fald.Checkpoint(tmp_path / "run", rounds=1)
    whole = sampled(phases)
    with pytest.raises(Interrupted):
        sampled(phases, checkpoint=kept, callback=stop)
    np.testing.assert_array_equal(draws(sampled(phases, checkpoint=kept)), draws(whole))
    with pytest.raises(ConfigError, match="phases"):
        sampled([*PHASES[:2], dataclasses.replace(PHASES[2], draws=1)], checkpoint=kept)


def test_steps_of_phases():
    schedule, temperature, kept = in_phases(PHASES, 10)
    assert (temperature, kept) == (2.0, (6, 7))
    found = [float(schedule(k)) for k in (0, 29, 30, 40, 49, 50, 69, 500)]
    falling = 0.05 + 0.15 * 0.5 * (1 + np.cos(np.pi * 19 / 20))
    np.testing.assert_allclose(found, [0.3, 0.3, 0.2, 0.125, falling, 0.05, 0.05, 0.05], rtol=1e-5)
    assert [float(schedule.heat(k)) for k in (29, 30, 49, 50)] == [0.0, 1.0, 1.0, 0.25]
    again = from_record(record(schedule))
    assert isinstance(again, Phases)
    np.testing.assert_array_equal(again.table, schedule.table)


def test_phases_may_be_made_as_they_are_asked_for():
    np.testing.assert_array_equal(draws(sampled(phase for phase in PHASES)), draws(sampled()))


def test_refusals():
    with pytest.raises(ConfigError, match="have their own rounds"):
        sampled(num_rounds=5)
    with pytest.raises(ConfigError, match="the last phase keeps no draws"):
        sampled([Phase(3, 0.1)])
    with pytest.raises(ConfigError, match="cannot keep 4 draws"):
        Phase(3, 0.1, draws=4)
    with pytest.raises(ConfigError, match="num-rounds is needed"):
        fald.sample(0, MODEL, FEDERATION.data, local_steps=1, step_size=0.1)
    with pytest.raises(ConfigError, match=r"phases must be fald\.schedules\.Phase"):
        sampled([(3, 0.1)])
    protection = fald.privacy.Protection(delta=1e-5)
    with pytest.raises(PrivacyError, match="no privacy accounting"):
        sampled(privacy=protection, clip_norm=1.0)


@pytest.mark.slow
def test_only_steps_with_noise_are_held_against_the_curvature():
    """Steps of FedAvg only have to be stable."""
    large = 1.5 / float(np.linalg.eigvalsh(FEDERATION.hessians).max())
    quiet = Phase(2, large, temperature=0.0)
    found = sampled([quiet, Phase(2, large / 10, draws=1)], step_check=True)
    assert found.attrs["step_times_curvature"] < 0.2
    with pytest.warns(UserWarning, match="badly biased"):
        sampled([dataclasses.replace(quiet, temperature=1.0), Phase(2, large / 10, draws=1)], step_check=True)
