"""A grid of settings: one compilation, errors that follow the exact law, a figure."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest

import fald
from fald.core.errors import ConfigError
from fald.planner import Problem
from helpers import START, federation, linear_model

FEDERATION = federation((4, 4, 4))
MODEL = linear_model()
CHAINS = 400


def swept(grid, problem=None, **changes):
    settings = {"num_rounds": 40, "num_chains": CHAINS, "step_size": 0.05, "points": 6, **changes}
    settings = {k: v for k, v in settings.items() if k not in grid}
    exact = fald.gaussian.target(*FEDERATION.energies)
    return fald.sweep.run(3, MODEL, FEDERATION.data, grid, reference=exact, problem=problem, **settings)


@contextmanager
def compilations():
    """Names of what is compiled meanwhile."""
    seen = []

    def listen(event, duration, **about):
        if event.endswith("backend_compile_duration"):
            seen.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_a_grid_is_compiled_once_and_follows_the_exact_law():
    problem = Problem.from_gaussian(*FEDERATION.energies, start=START)
    swept({"local_steps": [2]}, problem)
    with compilations() as seen:
        table = swept({"local_steps": [1, 8], "step_size": [0.02, 0.1]}, problem)
    assert seen == []
    assert list(table.columns[:4]) == ["local_steps", "step_size", "round", "draws"]
    assert len(table) == 4 * 6
    assert set(table["draws"]) == {CHAINS}
    # the worst of two parameters: means and sds of 400 chains, to five standard errors
    gaps = {name: (table[name] - table[f"{name}_law"]).abs().max() for name in ("mean_error", "sd_error")}
    spread = 1 + table["sd_error_law"].max()
    assert gaps["mean_error"] < 5 * spread / np.sqrt(CHAINS)
    assert gaps["sd_error"] < 5 * spread / np.sqrt(2 * CHAINS)
    # the twins: another number of chains is another program, and another start another law
    with compilations() as seen:
        swept({"local_steps": [1]}, num_chains=CHAINS + 1)
    assert seen
    other = swept({"local_steps": [1]}, Problem.from_gaussian(*FEDERATION.energies, start=START + 3))
    assert (other["mean_error"] - other["mean_error_law"]).abs().max() > 5 * spread / np.sqrt(CHAINS)


def test_settings_that_leave_the_finite_numbers_do_not_end_a_sweep():
    table = swept({"step_size": [0.05, 1e6]}, num_rounds=60, local_steps=5, points=2)
    assert table["step_size"].tolist() == [0.05, 0.05, 1e6]
    assert np.isinf(table["w2"].iloc[-1])
    assert np.all(np.isfinite(table["w2"].iloc[:2]))
    lines = fald.sweep.plot(table).lines
    assert [line.get_label() for line in lines] == ["η = 0.05", "η = 1000000.0"]
    assert len(lines[1].get_xdata()) == 0


@pytest.mark.slow
def test_schemes_and_schedules_are_named_and_have_a_law():
    grid = {
        "participation": [fald.full(), fald.without_replacement(2)],
        "step_size": [0.05, fald.paper_decay(2.0, 1.0)],
    }
    problem = Problem.from_gaussian(*FEDERATION.energies, start=START)
    table = swept(grid, problem, local_steps=2, num_chains=8, points=1)
    assert table["participation"].tolist() == [*["full"] * 2, *["without-replacement S=2"] * 2]
    assert np.isfinite(table["w2_law"]).all()
    assert table["w2_law"].nunique() == 4
    assert fald.sweep.plot(table, "mean_error").get_ylabel() == "error of means, in posterior sd"


@pytest.mark.parametrize(
    ("grid", "changes", "said"),
    [
        ({"local_step": [1]}, {}, "no local_step"),
        ({"local_steps": [1]}, {"speed": 2}, "no speed"),
        ({"local_steps": [0]}, {}, "local-steps must be"),
    ],
)
def test_what_is_no_setting_is_refused(grid, changes, said):
    with pytest.raises(ConfigError, match=said):
        swept(grid, **changes)


def test_a_figure_of_what_was_not_measured_is_refused():
    with pytest.raises(ConfigError, match="y must be one of"):
        fald.sweep.plot(swept({"local_steps": [1]}, num_chains=8, points=1), "energy")
