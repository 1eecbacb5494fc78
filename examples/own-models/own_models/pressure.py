"""A NumPyro model: a linear effect of every feature, with normal residuals."""

from dataclasses import replace

import numpy as np
import numpyro
import numpyro.distributions as dist

import fald


def pressure(features, *, prior_scale=2.5):
    """Make the model of a study: ``features`` are the names of its encoded columns."""

    def model(x, y):
        base = numpyro.sample("base", dist.Normal(0.0, prior_scale))
        slope = numpyro.sample("slope", dist.Normal(0.0, prior_scale).expand([len(features)]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(2.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(base + x @ slope, noise), obs=y)

    made = fald.models.from_numpyro(model, (np.ones(len(features)), np.array(1.0)))
    return replace(
        made,
        dims={"slope": ["feature"]},
        coords={"feature": list(features)},
        prior=f"base and slopes Normal(0, {prior_scale:g}), residual sd half-normal(2)",
    )
