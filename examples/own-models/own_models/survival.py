"""A plain JAX model: survival times that may be censored, with a constant hazard."""

import jax.numpy as jnp

import fald


def survival(features, *, prior_scale=2.5):
    """Make the model of a study whose target is a time, and whose first feature says whether it ended.

    An example is one patient, ``(x, time)`` with x the encoded features.
    """
    _, *names = features

    def log_hazard(position, x):
        return position["log_hazard"] + x[1:] @ position["coefficient"]

    def loglikelihood(position, patient):
        x, time = patient
        return x[0] * log_hazard(position, x) - jnp.exp(log_hazard(position, x)) * time

    def logprior(position):
        return -0.5 * sum(jnp.sum(value**2) for value in position.values()) / prior_scale**2

    return fald.Model(
        logprior_fn=logprior,
        loglikelihood_fn=loglikelihood,
        initial_position={"log_hazard": jnp.array(0.0), "coefficient": jnp.zeros(len(names))},
        predict_fn=lambda position, x: jnp.exp(-log_hazard(position, x)),
        dims={"coefficient": ["feature"]},
        coords={"feature": names, "input": list(features)},
        ratios={"coefficient": "hazard ratio"},
        prior=f"log hazard and every coefficient Normal(0, {prior_scale:g})",
        name="survival",
    )
