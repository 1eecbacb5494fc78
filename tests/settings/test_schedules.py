"""Schedules: their values, their records, what they refuse, and what makes the compiler work again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald import schedules
from fald.core.errors import ConfigError
from fald.settings.schedules import OwnFunction, from_record, record

DATA = fald.FederatedData.from_arrays({"a": np.ones((6, 1)), "b": np.zeros((4, 1)), "c": np.zeros((5, 1))})
MODEL = fald.models.gaussian_location([[1.0]])
ALL = {
    "paper": schedules.paper_decay(10.0, 1.0),
    "polynomial": schedules.polynomial(0.01, 5.0),
    "cosine": schedules.cosine(0.01, 20, last=0.001),
    "cyclical": schedules.cyclical(0.01, 6, last=0.001),
    "warm-up": schedules.warm_up(5, schedules.cosine(0.01, 20, last=0.001)),
    "piecewise": schedules.piecewise([(0, 0.01), (8, schedules.polynomial(0.01, 5.0))]),
}


def sampled(step_size, **others):
    settings = {"num_rounds": 4, "local_steps": 3, "num_chains": 2, "progress": False, "step_check": False}
    return fald.sample(1, MODEL, DATA, step_size=step_size, **{**settings, **others})


def in_phases(phases):
    settings = {"local_steps": 3, "num_chains": 2, "progress": False, "step_check": False}
    return fald.sample(1, MODEL, DATA, phases=phases, **settings)


def compilations(calls):
    """How many programs of rounds the calls made the compiler build."""
    found = []

    def note(name, seconds, **about):
        if name.endswith("jaxpr_to_mlir_module_duration"):  # also of a program that a cache on disk has
            found.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for call in calls:
            call()
    finally:
        jax.monitoring.clear_event_listeners()
    return len([name for name in found if name and "run" in str(name)])


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_is_what_a_function_of_the_same_values_is(name):
    schedule = ALL[name]
    np.testing.assert_allclose(
        fald.positions(sampled(schedule), MODEL)[:],
        fald.positions(sampled(lambda step: schedule(step) * 1.0), MODEL)[:],
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip
    assert from_record(record(schedule)) == schedule
    assert all(float(schedule(jnp.asarray(k))) > 0 for k in (0, 1, 7, 8, 50))


def test_values():
    two = schedules.piecewise([(0, 0.5), (4, schedules.warm_up(2, 0.2))])
    assert [round(float(two(k)), 6) for k in (0, 3, 4, 5, 9)] == [0.5, 0.5, 0.1, 0.2, 0.2]
    cycle = schedules.cyclical(0.2, 4, last=0.1, cycles=2)
    assert [round(float(cycle(k)), 6) for k in (0, 2, 4, 8, 99)] == [0.2, 0.15, 0.2, 0.1, 0.1]


def test_refusals():
    with pytest.raises(ConfigError, match="decides by the value of the step"):
        sampled(lambda step: 0.1 if step > 3 else 0.2)
    with pytest.raises(ConfigError, match="must give numbers > 0"):
        sampled(schedules.cosine(0.01, 3))
    with pytest.raises(ConfigError, match="begin at 0"):
        schedules.piecewise([(1, 0.1)])
    with pytest.raises(ConfigError, match="only schedules"):
        schedules.warm_up(3, lambda step: 0.1)


def test_equal_functions_are_those_with_the_same_code_and_values():
    def made(scale):
        return OwnFunction(lambda step: scale / (1 + step))

    assert made(0.1) == made(0.1)
    assert made(0.1) != made(0.2)


def test_what_is_compiled_again():
    def made(scale):
        return lambda step: scale / (10.0 + step)

    sampled(0.01)
    sampled(schedules.cosine(0.01, 20, last=0.001))
    sampled(made(0.1))
    again = [
        lambda: sampled(0.02, local_steps=7, temperature=0.5),
        lambda: sampled(schedules.cosine(0.02, 30, last=0.002)),
        lambda: sampled(schedules.cyclical(0.02, 5, last=0.002), local_steps=5),
        lambda: sampled(made(0.1)),
        lambda: sampled(0.01, num_rounds=9, num_warmup=2, thinning=3),
    ]
    drawn = {"participation": fald.without_replacement(2, allow_unequal=True)}
    cycle = [schedules.Phase(2, 0.01, temperature=0.0), schedules.Phase(2, 0.01, draws=1)]
    sampled(0.01, **drawn)
    in_phases(cycle)
    longer = [schedules.Phase(3, 0.03, temperature=0.5), schedules.Phase(5, 0.01, 0.002, draws=1)]
    again += [lambda: sampled(0.02, correlation=0.0, local_steps=4, **drawn), lambda: in_phases(longer)]
    assert compilations(again) == 0
    # twins: what shapes the computation is compiled, such as a composition that no other test here has
    other = schedules.warm_up(2, schedules.polynomial(0.01, 5.0))
    assert compilations([lambda: sampled(other)]) > 0
    assert compilations([lambda: sampled(0.01, batch_size=2)]) > 0
    assert compilations([lambda: sampled(0.01, participation=fald.with_replacement(2))]) > 0
    assert compilations([lambda: sampled(0.01, participation=fald.with_replacement(3))]) > 0
    assert compilations([lambda: in_phases(3 * cycle)]) > 0
