"""Models whose exact answer is not known, against long runs of NUTS that are stored.

``python -m benchmarks.verdict.sampled`` makes ``references.json``: four chains of 25,000 draws in coordinates
in which effects and coefficients are independent standard normals a priori.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fald
from benchmarks.verdict.problem import RESULTS, Problem

# seeds of Orobanche that germinated on 21 plates (Crowder 1978), kind of seed, kind of extract
_GERMINATED = [10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3]
_SEEDS = [39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7]
_KIND, _EXTRACT = [0] * 11 + [1] * 10, [0] * 5 + [1] * 6 + [0] * 5 + [1] * 5
_REFERENCES = RESULTS / "references.json"


def _plates() -> tuple[np.ndarray, ...]:
    kind, extract = np.array(_KIND, np.float32), np.array(_EXTRACT, np.float32)
    x = np.stack([np.ones(21, np.float32), kind, extract, kind * extract], axis=1)
    return np.arange(21, dtype=np.float32), x, np.array(_GERMINATED, np.float32), np.array(_SEEDS, np.float32)


def _binomial(eta, hits, count):
    return hits * eta - count * jax.nn.softplus(eta)


@cache
def _orob(explicit: bool) -> fald.Model:
    """Four coefficients, the log scale between plates, and 21 effects, in units of it unless explicit."""

    def logprior_fn(theta):
        log_tau, own = theta[4], theta[5:] / jnp.exp(theta[4]) if explicit else theta[5:]
        scale = -0.5 * jnp.exp(2 * log_tau) + log_tau - (21 * log_tau if explicit else 0.0)
        return -0.5 * jnp.sum((theta[:4] / 2.5) ** 2) + scale - 0.5 * jnp.sum(own**2)

    def loglikelihood_fn(theta, example):
        which, x, hits, count = example
        effect = (jnp.arange(21) == which) @ theta[5:] * (1.0 if explicit else jnp.exp(theta[4]))
        return _binomial(x @ theta[:4] + effect, hits, count)

    return fald.Model(logprior_fn, loglikelihood_fn, np.zeros(26))


def _rows(parts: tuple[np.ndarray, ...]) -> fald.FederatedData:
    return fald.FederatedData.from_arrays({f"s{i}": tuple(p[i::3] for p in parts) for i in range(3)})


def _regression() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(12)
    x = rng.standard_normal((60, 8)).astype(np.float32)
    y = x @ np.array([2, -1, 0.5, 0, 0, 0, 0, 0]) + rng.standard_normal(60)
    return x, y.astype(np.float32)


@cache
def _horseshoe(explicit: bool) -> fald.Model:
    """Eight coefficients, their log local scales and the log scale of all, half-Cauchy; known noise."""

    def cauchy(log_scale):
        return jnp.sum(log_scale - jnp.log1p(jnp.exp(2 * log_scale)))

    def logprior_fn(theta):
        beta, scales = theta[:8], theta[8:16] + theta[16]
        own = -0.5 * jnp.sum(beta**2)
        if explicit:
            own = -0.5 * jnp.sum((beta / jnp.exp(scales)) ** 2) - jnp.sum(scales)
        return own + cauchy(theta[8:16]) + cauchy(theta[16])

    def loglikelihood_fn(theta, example):
        x, y = example
        beta = theta[:8] if explicit else theta[:8] * jnp.exp(theta[8:16] + theta[16])
        return -0.5 * (y - x @ beta) ** 2

    return fald.Model(logprior_fn, loglikelihood_fn, np.zeros(17))


_MODELS: dict[str, Any] = {"orob": (_orob, _plates), "horseshoe": (_horseshoe, _regression)}


def sampled(name: str) -> Problem:
    """``orob`` or ``horseshoe``, with explicit effects or coefficients."""
    model, rows = _MODELS[name]
    known = json.loads(_REFERENCES.read_text())[name]
    return Problem(model(True), _rows(rows()), np.array(known["mean"]), np.array(known["sd"]), name)


def _explicit(name: str, theta):
    if name == "orob":
        return theta.at[:, 5:].multiply(jnp.exp(theta[:, 4:5]))
    return theta.at[:, :8].multiply(jnp.exp(theta[:, 8:16] + theta[:, 16:]))


def main() -> None:
    """Make the references."""
    from numpyro.diagnostics import summary
    from numpyro.infer import MCMC, NUTS

    found = {}
    for name, (make, rows) in _MODELS.items():
        model, parts = make(False), tuple(map(jnp.asarray, rows()))

        def energy(theta, model=model, parts=parts):
            terms = jax.vmap(lambda example: model.loglikelihood_fn(theta, example))(parts)
            return -model.logprior_fn(theta) - jnp.sum(terms)

        kernel = NUTS(potential_fn=energy, target_accept_prob=0.99)
        chains = MCMC(
            kernel,
            num_warmup=2000,
            num_samples=25_000,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        chains.run(jax.random.key(3), init_params=0.1 * jax.random.normal(jax.random.key(4), (4, model.dim)))
        draws = _explicit(name, chains.get_samples())
        known = summary({"theta": np.asarray(draws).reshape(4, -1, model.dim)})["theta"]
        means, sds = (np.asarray(draws, float).mean(axis=0), np.asarray(draws, float).std(axis=0))
        worst = {"rhat": float(known["r_hat"].max()), "ess": float(known["n_eff"].min())}
        found[name] = {"mean": means.round(6).tolist(), "sd": sds.round(6).tolist(), **worst}
        print(name, worst)
    _REFERENCES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
