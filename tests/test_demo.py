"""The bundled trial against a reference that pools the rows."""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald.datasets import load_bundled_study
from fald.predict import flat_positions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study():
    study = load_bundled_study("indo")
    data = study.read_data()
    return study, data, study.build_model(data.features)


@pytest.fixture(scope="module")
def reference(study):
    """Mean, sd and their Monte-Carlo errors by NUTS on the pooled rows."""
    _, data, model = study
    rows = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), data.rows)

    def logdensity(theta):
        terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
        return model.flat_logprior(theta) + jnp.sum(terms)

    warmup = blackjax.window_adaptation(blackjax.nuts, logdensity)
    key = jax.random.key(20)
    (state, parameters), _ = warmup.run(key, model.flat_initial_position, num_steps=800)
    kernel = blackjax.nuts(logdensity, **parameters).step

    def chain(key):
        def one(state, key):
            state, _ = kernel(key, state)
            return state, state.position

        return jax.lax.scan(one, state, jax.random.split(key, 4100))[1][100:]

    draws = np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(key, 4)), np.float64)
    return draws.reshape(-1, draws.shape[-1])


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
