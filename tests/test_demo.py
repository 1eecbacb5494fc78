"""The bundled trial against a reference that pools the rows."""

import numpy as np
import pytest

import fald
from fald.datasets import load_bundled_study
from fald.predict import flat_positions
from helpers import pooled_nuts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study():
    study = load_bundled_study("indo")
    data = study.read_data()
    return study, data, study.build_model(data.features)


@pytest.fixture(scope="module")
def reference(study):
    """Draws by NUTS on the pooled rows."""
    _, data, model = study
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
    study, data, model = study
    index = model.parameter_names.index("coefficient[indomethacin]")
    assert reference[:, index].mean() == pytest.approx(-0.8, abs=0.03)
    assert reference[:, index].std() == pytest.approx(0.26, abs=0.01)
    arguments = study.sampler.arguments()
    tree = fald.sample(study.sampler.seed, model, data, **arguments, progress=False)
    mean_error, sd_error = errors(tree, model, reference)
    assert mean_error < 0.1
    assert sd_error < 0.1
    assert fald.diagnostics.verdict(tree) == []
    # the twins: eight times the local steps shift the mean, a tenth more noise widens the sd
    shorter = {**arguments, "num_rounds": 12_500}
    biased = fald.sample(1, model, data, **{**shorter, "local_steps": 24}, progress=False)
    assert errors(biased, model, reference)[0] > 0.1
    hot = fald.sample(1, model, data, **{**shorter, "temperature": 1.25}, progress=False)
    assert errors(hot, model, reference)[1] > 0.1
