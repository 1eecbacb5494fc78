"""A NumPyro model as a fald model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.errors import ConfigError, DataError
from fald.core.types import Example
from fald.problem.model import Model


def from_numpyro(model: Callable[..., Any], example: Example, *, predict_site: str | None = None) -> Model:
    """Wrap a NumPyro model whose rows are independent given its parameters.

    The model is called as ``model(*rows)`` (or ``model(rows)`` if the rows are not a tuple) with a
    batch of rows, just as NumPyro's own samplers call it; fald calls it with one row at a time.
    Parameters live on the real line inside the sampler, with the Jacobian of the transformation in
    the prior, and come back in their own space in the results.

    Parameters
    ----------
    model
        The NumPyro model. Every ``sample`` without ``obs`` is a parameter; every one with ``obs``
        belongs to the likelihood.
    example
        One row of the data without its leading axis, such as ``(x[0], y[0])``; its shapes and
        types count, and its values for a check that rows add up.
    predict_site
        Observed site whose mean ``fald.predict`` reports; needed if there is more than one. The
        model is then called with the last element of the rows replaced by ``None``.

    Returns
    -------
    Model
        With ``constrain_fn`` set, so results are in the model's own space.

    Raises
    ------
    DataError
        If a parameter's shape depends on the number of rows (a latent variable per row), if its
        support depends on another parameter, if it is discrete, if nothing is observed, or if the
        observed part of the model is not a sum over rows (a plate of a fixed size, a factor).

    Examples
    --------
    >>> import numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> def waiting(y):
    ...     rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     numpyro.sample("y", dist.Exponential(rate), obs=y)
    >>> from_numpyro(waiting, jnp.array(1.0)).parameter_names
    ['rate']
    """
    try:
        from numpyro import distributions, handlers
        from numpyro.distributions import biject_to
        from numpyro.infer import init_to_uniform
        from numpyro.infer.util import log_density
    except ImportError as error:
        raise ConfigError(
            "from_numpyro needs the package numpyro", hint="pip install 'fald[numpyro]'"
        ) from error

    def as_arguments(rows):
        return rows if isinstance(rows, tuple) else (rows,)

    def batch(row, repeats=1):
        return jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf)[None], repeats, axis=0), row)

    def sites_of(repeats, seed):
        seeded = handlers.substitute(
            handlers.seed(model, jax.random.key(seed)), substitute_fn=init_to_uniform
        )
        trace = handlers.trace(seeded).get_trace(*as_arguments(batch(example, repeats)))
        sampled = {k: s for k, s in trace.items() if s["type"] == "sample"}
        latent = {k: s for k, s in sampled.items() if not s["is_observed"]}
        return latent, {k: s for k, s in sampled.items() if s["is_observed"]}

    latent, observed = sites_of(1, seed=0)
    elsewhere, _ = sites_of(2, seed=1)
    if not observed:
        raise DataError("the NumPyro model observes nothing", hint="give one of its sample sites obs=")
    transforms, initial = {}, {}
    for name, site in latent.items():
        if np.shape(site["value"]) != np.shape(elsewhere[name]["value"]):
            raise DataError(
                f"parameter {name!r} has one value per row; rows must be independent given the parameters",
                hint="integrate it out, or index it by group instead of by row",
            )
        if site["fn"].support.is_discrete:
            raise DataError(f"parameter {name!r} is discrete; Langevin dynamics needs gradients")
        transforms[name] = biject_to(site["fn"].support)
        initial[name] = jnp.zeros(np.shape(transforms[name].inv(site["value"])))
        there = biject_to(elsewhere[name]["fn"].support)(initial[name])
        if not np.allclose(transforms[name](initial[name]), there):
            raise DataError(
                f"the support of parameter {name!r} depends on another parameter",
                hint="write it as a fraction of that parameter, with a support of its own",
            )

    def constrain_fn(position):
        return {name: transforms[name](position[name]) for name in transforms}

    def logprior_fn(position):
        constrained = constrain_fn(position)
        blocked = handlers.block(model, hide=list(observed))
        value, _ = log_density(blocked, as_arguments(batch(example)), {}, constrained)
        for name, transform in transforms.items():
            jacobian = transform.log_abs_det_jacobian(position[name], constrained[name])
            value = value + jnp.sum(jacobian)
        return value

    def loglikelihood_of(position, rows):
        substituted = handlers.substitute(model, data=constrain_fn(position))
        blocked = handlers.block(substituted, hide=list(latent))
        return log_density(blocked, as_arguments(rows), {}, {})[0]

    def loglikelihood_fn(position, row):
        return loglikelihood_of(position, batch(row))

    def predict_fn(position, x):
        seeded = handlers.seed(model, jax.random.key(0))
        substituted = handlers.substitute(seeded, data=constrain_fn(position))
        trace = handlers.trace(substituted).get_trace(*as_arguments(batch(x)), None)
        outcome: Any = trace[predict_site or next(iter(observed))]["fn"]
        base: Any = outcome.base_dist if isinstance(outcome, distributions.ExpandedDistribution) else outcome
        if isinstance(base, distributions.CategoricalProbs | distributions.CategoricalLogits):
            return jnp.asarray(base.probs)[0]
        return outcome.mean[0]

    try:
        one, two = (loglikelihood_of(initial, batch(example, repeats)) for repeats in (1, 2))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the NumPyro model cannot be evaluated on one and on two rows: {error}",
            hint="take the number of rows from the arguments, as in numpyro.plate('rows', len(y))",
        ) from error
    if np.isfinite(one) and not np.isclose(two, 2 * one, rtol=1e-3, atol=1e-3):
        raise DataError(
            f"the log likelihood of a row given twice is {two:.4g}, not twice the {one:.4g} of one row",
            hint="size plates by the rows given; make factors that are not of a row part of the prior",
        )
    if predict_site is None and len(observed) > 1:
        predict = None
    elif predict_site is not None and predict_site not in observed:
        raise ConfigError(f"predict-site {predict_site!r} is not observed; observed: {sorted(observed)}")
    else:
        predict = predict_fn
    return Model(
        logprior_fn=logprior_fn,
        loglikelihood_fn=loglikelihood_fn,
        initial_position=initial,
        predict_fn=predict,
        constrain_fn=constrain_fn,
        name=f"numpyro:{getattr(model, '__name__', 'model')}",
    )
