"""Schedules: their values, their records, what they refuse, and what makes the compiler work again."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald import schedules
from fald.core.errors import ConfigError
from fald.settings.schedules import (
    OwnFunction,
    check_schedule,
    from_record,
    is_data,
    record,
    scaled,
    step_size_at,
    step_sizes_at,
)

DATA = fald.FederatedData.from_arrays({"a": np.ones((6, 1)), "b": np.zeros((4, 1)), "c": np.zeros((5, 1))})
MODEL = fald.models.gaussian_location([[1.0]])
READ = fald.FederatedData.from_read(lambda client, index: np.ones((len(index), 1)), {"a": 99, "b": 99})
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


def test_schedules_are_their_formulas():
    k = np.array([0, 1, 5, 19, 20, 21, 100])
    np.testing.assert_allclose([schedules.paper_decay(10.0, 3.0)(x) for x in k], 1 / (20 + 3 * k / 12))
    np.testing.assert_allclose(
        [schedules.polynomial(0.2, 5.0, power=0.7)(x) for x in k], 0.2 * (1 + k / 5) ** -0.7
    )
    assert schedules.polynomial(0.2, 5.0).power == 0.55
    half = np.where(k < 20, 0.1 + 0.05 * (1 + np.cos(np.pi * k / 20)), 0.1)
    np.testing.assert_allclose([schedules.cosine(0.2, 20, last=0.1)(x) for x in k], half, rtol=1e-6)
    again = 0.05 * (1 + np.cos(np.pi * (k % 8) / 8)) * 2
    np.testing.assert_allclose([schedules.cyclical(0.2, 8)(x) for x in k], again, rtol=1e-5)
    assert schedules.cyclical(0.2, 8).cycles >= 2**31
    assert schedules.cosine(0.2, 8).last == schedules.cyclical(0.2, 8).last == 0.0
    line = np.minimum((k + 1) / 4, 1) * 0.3
    np.testing.assert_allclose([schedules.warm_up(4, 0.3)(x) for x in k], line, rtol=1e-6)
    three = schedules.piecewise([(0, 0.1), (5, schedules.polynomial(0.2, 5.0)), (20, 0.4)])
    wanted = np.where(k < 5, 0.1, np.where(k < 20, 0.2 * (1 + np.maximum(k - 5, 0) / 5) ** -0.55, 0.4))
    np.testing.assert_allclose([three(x) for x in k], wanted, rtol=1e-6)
    # a power of a negative number would be complex, or nothing: no part is asked before it begins
    late = schedules.piecewise([(0, 0.1), (20, schedules.polynomial(0.2, 5.0))])
    assert [float(late(x)) for x in (0, 15, 20)] == [pytest.approx(x) for x in (0.1, 0.1, 0.2)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: schedules.paper_decay(1.0, 0.0),
        lambda: schedules.paper_decay(1.0, 1.1),
        lambda: schedules.paper_decay(float("inf"), 1.0),
        lambda: schedules.polynomial(0.0, 1.0),
        lambda: schedules.polynomial(0.1, 0.0),
        lambda: schedules.polynomial(0.1, 1.0, power=0.0),
        lambda: schedules.cosine(0.0, 3),
        lambda: schedules.cosine(0.1, 0),
        lambda: schedules.cosine(0.1, 3, last=-0.1),
        lambda: schedules.warm_up(0, 0.1),
        lambda: schedules.warm_up(3, 0.0),
        lambda: schedules.piecewise([]),
        lambda: schedules.piecewise([(1, 0.1)]),
        lambda: schedules.piecewise([(0, 0.1), (5, 0.2), (3, 0.3)]),
        lambda: schedules.piecewise([(0, 0.1), (5, 0.2), (5, 0.3)]),
        lambda: schedules.piecewise([(0, 0.1), (5, lambda step: 0.1)]),
    ],
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
    assert schedules.paper_decay(1.0, 1.0)(0) == 0.5  # the borders themselves are allowed


def test_records_are_plain_and_come_back():
    nested = schedules.piecewise([(0, 0.1), (5, schedules.warm_up(2, schedules.polynomial(0.2, 5.0)))])
    assert record(nested) == {
        "schedule": "Piecewise",
        "parts": [
            0.1,
            {"schedule": "WarmUp", "steps": 2.0, "then": {
                "schedule": "Polynomial", "first": 0.2, "steps": 5.0, "power": 0.55}},
        ],
        "starts": [0.0, 5.0],
    }  # fmt: skip
    assert from_record(record(nested)) == nested
    assert record(0.1) == from_record(0.1) == 0.1
    assert record(lambda step: 0.1) == {"schedule": "function"}
    with pytest.raises(ConfigError, match="'function' are not recorded"):
        from_record(record(lambda step: 0.1))


def test_numbers_can_be_taken_out_of_a_schedule_and_not_out_of_a_function():
    assert is_data(schedules.cosine(0.1, 3))
    assert not is_data(lambda step: 0.1)
    assert not is_data(0.1)
    assert jax.tree.leaves(schedules.polynomial(0.2, 5.0)) == [0.2, 5.0, 0.55]
    assert (step_size_at(0.3, 7), step_size_at(lambda k: 2 * k, 7)) == (0.3, 14)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda step: 0.1 if step > 3 else 0.2, "decides by the value"),
        (lambda step: step + "a", "gives no number"),
        (lambda step: jnp.ones(2) * step, "gives no number"),
        (lambda step: jnp.where(step < 1, 0.0, 1.0), "got 0 at step 0"),
        (lambda step: jnp.where(step < 9, 1.0, -1.0), "got -1 at step 9"),
        (lambda step: jnp.where(step == 4, -1.0, 1.0), "got -1 at step 4"),
        (lambda step: jnp.where(step < 9, 1.0, jnp.nan), "got nan at step 9"),
        (lambda step: jnp.where(step < 9, 1.0, jnp.inf), "got inf at step 9"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule, words):
    with pytest.raises(ConfigError, match=words):
        check_schedule(schedule, 9)
    check_schedule(lambda step: 0.1 / (1 + step), 9)


def test_refusals():
    with pytest.raises(ConfigError, match="decides by the value of the step"):
        sampled(lambda step: 0.1 if step > 3 else 0.2)
    with pytest.raises(ConfigError, match="must give numbers > 0"):
        sampled(schedules.cosine(0.01, 3))
    with pytest.raises(ConfigError, match="begin at 0"):
        schedules.piecewise([(1, 0.1)])
    with pytest.raises(ConfigError, match="only schedules"):
        schedules.warm_up(3, lambda step: 0.1)


SCALE = 0.1


def test_equal_functions_are_those_with_the_same_code_and_values():
    def made(scale):
        return OwnFunction(lambda step: scale / (1 + step))

    assert made(0.1) == made(0.1)
    assert hash(made(0.1)) == hash(made(0.1))
    assert made(0.1) != made(0.2)
    assert made(1) != made(1.0) != made(True)  # other types compute otherwise
    assert made(0.1)(4) == 0.1 / 5
    assert made(0.1) != (lambda step: 0.1)
    assert OwnFunction(lambda step: 0.1) != OwnFunction(lambda step: 0.2)

    def with_default(scale):
        def own(step, factor=scale):
            return factor * step

        return OwnFunction(own)

    def with_keyword(scale):
        def own(step, *, factor=scale):
            return factor * step

        return OwnFunction(own)

    for kind in (with_default, with_keyword):
        assert kind(0.1) == kind(0.1)
        assert kind(0.1) != kind(0.2)


def test_functions_that_see_what_may_change_are_equal_to_themselves_alone(monkeypatch):
    def with_list(values):
        return OwnFunction(lambda step: values[0])

    seen = [0.1]
    assert with_list(seen) == with_list(seen)
    assert with_list([0.1]) != with_list(list(seen))

    def nested(scale):
        return OwnFunction(lambda step: (lambda: scale * step)())

    same = nested(0.1)
    assert same == OwnFunction(same.function)
    assert nested(0.1) != nested(0.1)  # what the function within sees is not known

    def of_module():
        return OwnFunction(lambda step: SCALE * step)

    first = of_module()
    before = first._key()
    monkeypatch.setitem(globals(), "SCALE", 0.2)
    assert first._key() != before

    class Called:
        def __call__(self, step):
            return 0.1

    one = Called()
    assert OwnFunction(one) == OwnFunction(one)
    assert OwnFunction(one) != OwnFunction(Called())


def made(scale):
    return lambda step: scale / (10.0 + step)


def other_clients(*sizes):
    return fald.FederatedData.from_arrays({name: np.ones((n, 1)) for name, n in zip("abcd", sizes)})


COSINE, WARM = schedules.cosine(0.01, 20, last=0.001), schedules.warm_up(2, schedules.polynomial(0.01, 5.0))
TWO, CYCLE = fald.with_replacement(2), [schedules.Phase(2, 0.01), schedules.Phase(2, 0.01, draws=1)]
LONGER = [schedules.Phase(3, 0.03, temperature=0.5), schedules.Phase(5, 0.01, 0.002, draws=1)]
# of each row of the table in docs/how-to/networks.md: settings of runs, and how many programs they need
COMPILED = {
    "K, η, τ > 0, 0 < ρ < 1, clipping norm, momentum > 0, rounds, warm-up, thinning, seed, sinks, callback": [
        ([{}, {"local_steps": 7}, {"step_size": 0.02}, {"temperature": 0.5}, {"rng_key": 2}], 1),
        ([{}, {"num_rounds": 9}, {"num_rounds": 9, "num_warmup": 2, "thinning": 3}], 1),
        ([{"correlation": 0.3}, {"correlation": 0.9, "local_steps": 5}], 1),
        ([{"clip_norm": 1.0}, {"clip_norm": 2.0}], 1),
        ([{"momentum": 0.5}, {"momentum": 0.9, "local_steps": 7}], 1),
        ([{}, {"sinks": [fald.sinks.RunningMoments()]}, {"callback": lambda *seen: None}], 1),
    ],
    "numbers of a schedule of `fald.schedules`, lengths and temperatures of phases": [
        (
            [{"step_size": COSINE}, {"step_size": schedules.cyclical(0.02, 5, last=0.002), "local_steps": 5}],
            1,
        ),
        ([{"phases": CYCLE}, {"phases": LONGER}], 1),
    ],
    "another kind of schedule, or another composition": [
        ([{}, {"step_size": COSINE}, {"step_size": WARM}, {"step_size": 0.02}], 3),
    ],
    "a function of your own": [
        ([{"step_size": made(0.1)}, {"step_size": made(0.1)}, {"step_size": made(0.2)}], 2),
    ],
    "participants S, batch b, chains, number and sizes of clients": [
        ([{"participation": TWO}, {"participation": fald.with_replacement(3)}], 2),
        ([{"batch_size": 2}, {"batch_size": 3}, {}], 3),
        ([{"num_chains": 2}, {"num_chains": 3}], 2),
        ([{"data": other_clients(6, 4, 5)}, {"data": other_clients(6, 4, 5, 5)}], 2),
        ([{"data": other_clients(6, 4, 5)}, {"data": other_clients(6, 4, 7)}], 2),
    ],
    "ρ = 0, 0 < ρ < 1 or ρ = 1; τ = 0 or not; clipping, momentum, preconditioner or not": [
        ([{"correlation": rho} for rho in (0.0, 0.5, 1.0, 0.0)], 3),
        ([{}, {"temperature": 0.0}, {"temperature": 0.0, "step_size": 0.02}], 2),
        ([{}, {"clip_norm": 1.0}, {"clip_norm": None}], 2),
        ([{}, {"momentum": 0.5}, {"preconditioner": "rms"}, {"momentum": 0.5, "preconditioner": "rms"}], 4),
    ],
    "the model or its shapes": [([{}, {"model": dataclasses.replace(MODEL)}], 2)],
    "number of phases or of their draws": [
        ([{"phases": CYCLE}, {"phases": 3 * CYCLE}], 2),
        ([{"phases": 2 * CYCLE}, {"phases": [*CYCLE, *LONGER, *CYCLE[:1], *CYCLE[:1], *CYCLE]}], 2),
    ],
    "of rows that a function reads: K, b, S, chains": [
        ([{"data": READ, "batch_size": 2, "local_steps": K} for K in (3, 4)], 1),
        ([{"data": READ, "batch_size": 2, "local_steps": K} for K in (1, 4)], 2),
    ],
}


def run_once(model, changes):
    given = {"rng_key": 1, "model": model, "data": DATA, "step_size": 0.01, "num_rounds": 4} | changes
    if "phases" in changes:
        given = {k: v for k, v in given.items() if k not in ("step_size", "num_rounds")}
    settings = {"local_steps": 3, "num_chains": 2, "progress": False, "step_check": False}
    return fald.sample(given.pop("rng_key"), given.pop("model"), given.pop("data"), **{**settings, **given})


CASES = [(row, *case) for row, cases in COMPILED.items() for case in cases]
QUICK = ([{}, {"local_steps": 7}], [{}, {"temperature": 0.0}], [{"num_chains": 2}, {"num_chains": 3}])


@pytest.mark.parametrize(
    ("row", "runs", "programs"),
    [pytest.param(*case, marks=[] if case[1][:2] in QUICK else [pytest.mark.slow]) for case in CASES],
)
@pytest.mark.filterwarnings("ignore:batch-size")
def test_what_is_compiled_again(row, runs, programs):
    model = dataclasses.replace(MODEL)  # nothing compiled before counts
    assert compilations([functools.partial(run_once, model, changes) for changes in runs]) == programs


def test_the_table_of_what_is_compiled_again_is_the_documented_one():
    page = (Path(fald.__file__).parents[2] / "docs/how-to/networks.md").read_text()
    table = page.split("| what changes between two runs | compiled again |\n|---|---|\n")[1].split("\n\n")[0]
    found = {cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in table.splitlines())}
    assert list(found) == list(COMPILED)
    for row, cases in COMPILED.items():
        # what the page calls free is free in every case, and what it does not is compiled in some
        again = max(programs for _, programs in cases) > 1
        assert again == (found[row] != "no"), row


@pytest.mark.parametrize("name", ALL)
def test_every_step_of_a_scaled_schedule_is_so_many_times_as_large(name):
    steps = np.array([0, 1, 4, 5, 7, 8, 13, 40])
    plain, three = (step_sizes_at(s, steps) for s in (ALL[name], scaled(ALL[name], 3.0)))
    np.testing.assert_allclose(three, 3 * plain, rtol=1e-5)


def test_numbers_are_scaled_and_functions_are_not():
    assert scaled(0.25, 2) == 0.5
    with pytest.raises(ConfigError, match="can be multiplied"):
        scaled(lambda step: 0.1, 2.0)
