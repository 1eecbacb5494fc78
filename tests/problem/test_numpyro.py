"""NumPyro models: the same density as their twins, the exact posterior, NUTS, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from arviz_stats.base import array_stats

import fald
from fald.core.errors import ConfigError, DataError
from fald.problem.from_numpyro import from_numpyro

pytestmark = pytest.mark.slow

numpyro = pytest.importorskip("numpyro")
dist = numpyro.distributions


def logistic(x, y=None):
    a = numpyro.sample("intercept", dist.Normal(0, 2.5))
    b = numpyro.sample("coefficient", dist.Normal(0, 2.5).expand([x.shape[-1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + x @ b), obs=y)


def waiting(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("y", dist.Exponential(rate), obs=y)


def measured(y):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def shares(x, y=None):
    base = numpyro.sample("base", dist.Dirichlet(jnp.ones(3)))
    tilt = numpyro.sample("tilt", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=jnp.log(base) + x[:, None] * tilt), obs=y)


RNG = np.random.default_rng(11)
X = RNG.normal(size=(60, 2))
BINARY = (RNG.random(60) < 0.4).astype(float)
TIMES = RNG.exponential(0.5, 60)
LENGTHS = RNG.normal(1.0, 0.7, 60)


def sites(rows):
    cuts = {"a": slice(0, 40), "b": slice(40, 57), "c": slice(57, 60)}
    return fald.FederatedData.from_arrays(
        {name: jax.tree.map(lambda leaf, cut=cut: leaf[cut], rows) for name, cut in cuts.items()}
    )


def run(model, rows, *, step_size, temperature=1.0, num_rounds=1500, num_chains=64):
    return fald.sample(
        2,
        model,
        sites(rows),
        num_rounds=num_rounds,
        local_steps=2,
        step_size=step_size,
        temperature=temperature,
        correlation=0.9,
        num_chains=num_chains,
        num_warmup=300,
        progress=False,
    )


def deviations(draws, mean, sd, allowance):
    """Distance of mean and sd from exact ones beyond a discretisation allowance, in standard errors.

    ``allowance`` is relative to the sd.
    """
    draws = draws.astype(float)
    errors = [float(array_stats.mcse(draws, method=m, chain_axis=0, draw_axis=1)) for m in ("mean", "sd")]
    gaps = np.abs([draws.mean() - mean, draws.std() - sd]) - allowance * sd
    return np.maximum(gaps, 0) / errors


def test_density_equals_the_built_in_logistic_model_up_to_a_constant():
    ours = fald.models.logistic_regression(2)
    theirs = from_numpyro(logistic, (X[0], BINARY[0]))
    assert theirs.parameter_names == ["coefficient[0]", "coefficient[1]", "intercept"]

    def densities(model, position):
        rows = jax.vmap(model.loglikelihood_fn, (None, 0))(position, (X, BINARY))
        return np.array([*rows, model.logprior_fn(position)])

    positions = [{"coefficient": RNG.normal(size=2), "intercept": RNG.normal()} for _ in range(3)]
    positions = [jax.tree.map(jnp.float32, p) for p in positions]
    gaps = [densities(ours, p) - densities(theirs, p) for p in positions]
    np.testing.assert_allclose(gaps[0], gaps[1], atol=2e-5)
    np.testing.assert_allclose(gaps[0], gaps[2], atol=2e-5)
    np.testing.assert_allclose(gaps[0][:-1], 0, atol=2e-5)


def test_jacobian_is_part_of_the_prior():
    model = from_numpyro(waiting, TIMES[0])
    at = jnp.array([-1.0, 0.0, 1.3])
    found = jax.vmap(lambda u: model.logprior_fn({"rate": u}))(at)
    expected = dist.Gamma(2.0, 1.0).log_prob(jnp.exp(at)) + at
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_conjugate_posterior():
    model = from_numpyro(waiting, TIMES[0])
    shape, rate = 2 + len(TIMES), 1 + TIMES.sum()
    mean, sd = shape / rate, np.sqrt(shape) / rate
    # on the log scale the curvature is the shape; a step η inflates the variance by about η·shape/2
    step_size = 0.04 / shape
    draws = run(model, TIMES, step_size=step_size)["posterior"]["rate"].values
    assert (draws > 0).all()
    assert (deviations(draws, mean, sd, allowance=0.02) < 4).all()
    hotter = run(model, TIMES, step_size=step_size, temperature=1.1**2)["posterior"]["rate"].values
    assert deviations(hotter, mean, sd, allowance=0.02)[1] > 4
    counted_thrice = (shape + 2) / (rate + 2)
    assert deviations(draws, counted_thrice, sd, allowance=0.02)[0] > 4


def test_two_parameters_against_nuts():
    nuts = numpyro.infer.MCMC(
        numpyro.infer.NUTS(measured),
        num_warmup=500,
        num_samples=4000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(jax.random.key(0), jnp.asarray(LENGTHS))
    reference = nuts.get_samples(group_by_chain=True)
    model = from_numpyro(measured, LENGTHS[0])
    step_size = 0.04 / 130  # the curvature is about 2n for the log of the scale, and for the mean
    good = run(model, LENGTHS, step_size=step_size, num_rounds=2000)["posterior"]
    hot = run(model, LENGTHS, step_size=step_size, num_rounds=2000, temperature=1.1**2)["posterior"]
    for name in ("mean", "scale"):
        exact = np.asarray(reference[name], float)
        # the reference has a Monte-Carlo error of its own: about 0.012 sd of each quantity
        target = exact.mean(), exact.std(), 0.05
        assert (deviations(good[name].values, *target) < 4).all()
        assert deviations(hot[name].values, *target)[1] > 4
    assert (good["scale"].values > 0).all()


def test_simplex_comes_back_in_its_own_space_and_predicts():
    labels = RNG.choice(3, 60, p=[0.6, 0.3, 0.1])
    rows = (X[:, 0], labels)
    model = from_numpyro(shares, (X[0, 0], labels[0]))
    tree = run(model, rows, step_size=2e-3, num_rounds=400, num_chains=4)
    base = tree["posterior"]["base"].values
    assert base.shape == (4, 100, 3)
    assert (base > 0).all()
    np.testing.assert_allclose(base.sum(-1), 1, rtol=1e-5)
    assert tree["unconstrained_posterior"]["position"].shape == (4, 100, 5)
    table = fald.predict(model, tree, X[:4, 0])
    means = table[[c for c in table if c.endswith("mean")]].to_numpy()
    assert means.shape == (4, 3)
    np.testing.assert_allclose(means.sum(1), 1, rtol=1e-5)


def test_prediction_equals_the_built_in_one():
    model = from_numpyro(logistic, (X[0], BINARY[0]))
    draws = RNG.normal(size=(2, 50, 3)).astype(np.float32)  # in the order of the flat position
    coefficient, intercept = draws[..., :2], draws[..., 2]
    tree = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset(
                {
                    "coefficient": (("chain", "draw", "coefficient_dim_0"), coefficient),
                    "intercept": (("chain", "draw"), intercept),
                }
            ),
            "unconstrained_posterior": xr.Dataset({"position": (("chain", "draw", "parameter"), draws)}),
        }
    )
    logits = intercept[..., None] + coefficient @ X[:5].T
    expected = 1 / (1 + np.exp(-logits.reshape(-1, 5)))
    table = fald.predict(model, tree, X[:5], level=0.8)
    np.testing.assert_allclose(table["mean"], expected.mean(0), rtol=1e-4)
    np.testing.assert_allclose(table["10%"], np.quantile(expected, 0.1, axis=0), rtol=1e-4)


def latent_per_row(y):
    with numpyro.plate("rows", len(y)):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def discrete(y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(k, 1), obs=y)


def unobserved(y):
    numpyro.sample("mean", dist.Normal(0, 1))


def moving_support(y):
    top = numpyro.sample("top", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Uniform(0, top))
    numpyro.sample("y", dist.Normal(level, 1), obs=y)


def fixed_plate(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", 60):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def with_factor(y):
    mean = numpyro.sample("mean", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.factor("penalty", -1.0 - mean**2)
    numpyro.sample("y", dist.Normal(mean, 1), obs=y)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (latent_per_row, "'z' has one value per row"),
        (discrete, "'k' is discrete"),
        (unobserved, "observes nothing"),
        (moving_support, "support of parameter 'level' depends on another parameter"),
        (fixed_plate, "cannot be evaluated on one and on two rows"),
        (with_factor, "a row given twice"),
    ],
)
def test_programs_that_are_no_product_over_rows(program, words):
    with pytest.raises(DataError, match=words):
        from_numpyro(program, jnp.array(0.5))


def test_flat_priors_are_possible():
    def flat(y):
        mean = numpyro.sample("mean", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    model = from_numpyro(flat, jnp.array(0.5))
    assert float(model.logprior_fn({"mean": jnp.array(3.0)})) == 0.0


def test_which_outcome_to_predict():
    def two(x, y=None, z=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)
        numpyro.sample("z", dist.Normal(3.0 + slope * x, 1), obs=z)

    row = (jnp.array(1.0), jnp.array(0.0), jnp.array(0.0))
    assert from_numpyro(two, row).predict_fn is None
    model = from_numpyro(two, row, predict_site="z")
    assert float(model.predict_fn({"slope": jnp.array(2.0)}, jnp.array(1.0))) == 5.0
    with pytest.raises(ConfigError, match=r"'w' is not observed; observed: \['y', 'z'\]"):
        from_numpyro(two, row, predict_site="w")
