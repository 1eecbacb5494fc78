"""The bundled trial against a reference that pools the rows."""

import numpy as np
import pytest

import fald
from fald.results.predict import flat_positions
from fald.study.datasets import load_bundled_study
from helpers import pooled_nuts

pytestmark = pytest.mark.slow

LANGEVIN = {
    "num_rounds": 40_000,
    "num_warmup": 2500,
    "local_steps": 3,
    "step_size": 6e-4,
    "num_chains": 32,
    "thinning": 25,
}


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


def test_plain_langevin_agrees_with_pooled_nuts(study, reference):
    data, model = study
    index = model.parameter_names.index("coefficient[indomethacin]")
    assert reference[:, index].mean() == pytest.approx(-0.8, abs=0.03)
    assert reference[:, index].std() == pytest.approx(0.26, abs=0.01)
    tree = fald.sample(1, model, data, **LANGEVIN, progress=False)
    mean_error, sd_error = errors(tree, model, reference)
    assert mean_error < 0.1
    assert sd_error < 0.1
    assert fald.diagnostics.verdict(tree) == []
    # the twins: eight times the local steps shift the mean, a tenth more noise widens the sd
    # fewer rounds, of which one with 24 steps does as much as eight
    longer = {**LANGEVIN, "local_steps": 24, "num_rounds": 1600, "num_warmup": 320, "thinning": 4}
    biased = fald.sample(1, model, data, **longer, progress=False)
    assert errors(biased, model, reference)[0] > 0.1
    hotter = {**LANGEVIN, "num_rounds": 12_500, "temperature": 1.25}
    hot = fald.sample(1, model, data, **hotter, progress=False)
    assert errors(hot, model, reference)[1] > 0.1
