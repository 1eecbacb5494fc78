"""The bundled trial against a reference that pools the rows."""

from dataclasses import replace

import numpy as np
import pytest

import fald
from fald.results.diagnostics import ReferenceLaw
from fald.results.predict import flat_positions
from fald.results.tree import draws_by_row
from fald.study.datasets import load_bundled_study
from helpers import pooled_nuts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study():
    study = load_bundled_study("indo")
    data = study.read_data()
    return data, study.build_model(data.features)


@pytest.fixture(scope="module")
def reference(study):
    """Draws by NUTS on the pooled rows."""
    data, model = study
    return pooled_nuts(model, data, 4000)


def errors(tree, model, reference):
    """Largest error of a mean in posterior sds, and of an sd relative to it."""
    draws = flat_positions(model, tree).astype(np.float64)
    sd = reference.std(axis=0)
    return (
        np.max(np.abs(draws.mean(axis=0) - reference.mean(axis=0)) / sd),
        np.max(np.abs(draws.std(axis=0) / sd - 1)),
    )


def test_demo_agrees_with_pooled_nuts(study, reference):
    data, model = study
    tree = fald.fit(0, model, data, progress=False)
    assert tree.attrs["verdict"] == "reached"
    assert tree.attrs["rounds_done"] <= 4
    # 4,000 draws of NUTS know a mean to 0.016 sd and an sd to 1.1%, nine parameters to 2.8 times that
    mean_error, sd_error = errors(tree, model, reference)
    assert mean_error < 0.05 + 0.03
    assert sd_error < 0.05 + 0.03


def test_planned_fa_ld_agrees_with_the_few_round_posterior(study):
    """Four times the planned run, as groups of chains of one: each within .1 posterior sd and 10%."""
    data, model = study
    few = fald.fit(0, model, data, progress=False)
    plan = fald.planner.plan(model, data)  # for .05 and 5%, as fald demo --method fa-ld plans
    planned = {**plan.arguments(), "progress": False}
    chains = planned["num_chains"]
    four = fald.sample(1, model, data, **{**planned, "num_chains": 4 * chains})
    shifts, ratios = by_group(four, few, chains)
    assert shifts.shape == ratios.shape == (4, 9)
    assert np.abs(shifts).max() < 0.1
    assert np.abs(ratios - 1).max() < 0.1
    # what was predicted is right to a third of it, beyond what four groups together know
    predicted, error = plan.best.predicted.bias, 1 / np.sqrt(min(fald.diagnostics.ess(four).values()))
    assert abs(np.abs(shifts.mean(0)).max() - predicted) < predicted / 3 + 4 * error
    # the twin: a step ten times too large fails by its bias, of the size predicted, not for want of rounds
    coarse = {**planned, "step_size": 10 * planned["step_size"], "num_rounds": 3000}
    tree = fald.sample(1, model, data, **coarse)
    assert max(fald.diagnostics.rhat(tree).values()) < 1.02
    shifts, ratios = by_group(tree, few, chains)
    setting = replace(plan.best.setting, step_size=coarse["step_size"])
    predicted = fald.planner.predict(plan.problem, setting).bias
    assert max(0.1, predicted / 2) < np.abs(shifts).max() < 2 * predicted
    assert 0.1 < np.abs(ratios - 1).max() < 1


def by_group(tree, reference, size):
    """Shift of means and ratio of sds, (groups, parameters), for groups of chains."""
    draws = draws_by_row(tree)
    law = ReferenceLaw.of(reference, list(draws))
    chains = np.stack([d for _, d in draws.values()], axis=-1).astype(float)
    found = [law.errors(part.reshape(-1, chains.shape[2])) for part in np.split(chains, len(chains) // size)]
    return np.array([e[0] for e in found]), np.array([e[1] for e in found])
