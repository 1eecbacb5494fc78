"""Hierarchical models with explicit effects, exact by quadrature over their scales."""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np

import fald
from benchmarks.verdict.problem import Problem, generator

_PRIOR = 5.0  # sd of the overall mean and of the half-normal scale between groups


@cache
def _schools(groups: int, centred: bool) -> fald.Model:
    """Known errors; parameters: overall mean, log scale between groups, effects."""

    def logprior_fn(theta):
        mu, log_tau, x = theta[0], theta[1], theta[2:]
        tau = jnp.exp(log_tau)
        own = x / tau if not centred else (x - mu) / tau
        effects = -0.5 * jnp.sum(own**2) - len(x) * log_tau if centred else -0.5 * jnp.sum(x**2)
        return -0.5 * (mu / _PRIOR) ** 2 - 0.5 * (tau / _PRIOR) ** 2 + log_tau + effects

    def loglikelihood_fn(theta, example):
        which, measured, error = example
        mu, log_tau, x = theta[0], theta[1], theta[2:]
        chosen = (jnp.arange(groups) == which) @ x
        effect = chosen if centred else mu + jnp.exp(log_tau) * chosen
        return -0.5 * ((measured - effect) / error) ** 2

    return fald.Model(logprior_fn, loglikelihood_fn, np.zeros(groups + 2))


def _moments(weights, means, variances):
    mean = weights @ means
    return mean, np.sqrt(weights @ (variances + means**2) - mean**2)


def _normal_given(matrix, errors, measured, precision):
    """Mean and covariance of coefficients with a prior precision, measured with independent errors."""
    inner = matrix.T @ (matrix / errors[:, None] ** 2) + precision
    covariance = np.linalg.inv(inner)
    mean = covariance @ (matrix.T @ (measured / errors**2))
    # the evidence, up to what does not depend on the scales
    log_evidence = 0.5 * np.linalg.slogdet(precision)[1] - 0.5 * np.linalg.slogdet(inner)[1]
    return mean, covariance, log_evidence + 0.5 * mean @ inner @ mean


def _exact(measured, errors, centred: bool):
    groups = len(measured)
    logs = np.linspace(-12, 4.5, 1200)
    rows = []
    for log_tau in logs:
        tau = np.exp(log_tau)
        # mean, and effects in units of the scale between groups
        matrix = np.c_[np.ones(groups), tau * np.eye(groups)]
        precision = np.diag(np.r_[_PRIOR**-2, np.ones(groups)])
        mean, covariance, log_evidence = _normal_given(matrix, errors, measured, precision)
        if centred:
            change = np.eye(groups + 1)
            change[1:] = matrix
            mean, covariance = change @ mean, change @ covariance @ change.T
        rows.append((log_evidence - 0.5 * (tau / _PRIOR) ** 2 + log_tau, mean, np.diag(covariance)))
    level = np.array([r[0] for r in rows])
    weights = np.exp(level - level.max())
    weights /= weights.sum()
    own = _moments(weights, logs[:, None], np.zeros((len(logs), 1)))
    rest = _moments(weights, np.array([r[1] for r in rows]), np.array([r[2] for r in rows]))
    return [np.r_[rest[i][0], own[i][0], rest[i][1:]] for i in (0, 1)]


def _problem(rng, centred: bool) -> Problem:
    groups = int(rng.choice([4, 8]))
    tau, error = float(np.exp(rng.uniform(np.log(0.1), np.log(5)))), float(rng.uniform(0.3, 3))
    errors = (error * rng.uniform(0.7, 1.5, groups)).astype(np.float32)
    measured = (rng.normal(0, 2) + tau * rng.normal(size=groups) + errors * rng.normal(size=groups)).astype(
        "f"
    )
    return schools(measured, errors, centred, f"{groups} groups, scale {tau:.2f}, error {error:.2f}")


def schools(measured, errors, centred: bool, what: str) -> Problem:
    """Groups measured with known errors, both (n,) in single precision, at two sites."""
    groups = len(measured)
    which = np.arange(groups, dtype=np.float32)
    sites = {f"s{i}": (which[i::2], measured[i::2], errors[i::2]) for i in range(2)}
    mean, sd = _exact(measured.astype(float), errors.astype(float), centred)
    data = fald.FederatedData.from_arrays(sites)
    return Problem(_schools(groups, centred), data, mean, sd, what)


@generator
def hierarchies_centred(rng) -> Problem:
    """Groups measured with known errors, as in the eight schools, effects themselves as parameters."""
    return _problem(rng, True)


@generator
def hierarchies_scaled(rng) -> Problem:
    """The same with effects in units of the scale between groups."""
    return _problem(rng, False)


@cache
def _batches(groups: int) -> fald.Model:
    """Unknown error as well; parameters: overall mean, log scales between and within groups, effects."""

    def logprior_fn(theta):
        mu, log_tau, log_error, x = theta[0], theta[1], theta[2], theta[3:]
        scales = jnp.exp(jnp.stack([log_tau, log_error]))
        effects = -0.5 * jnp.sum(((x - mu) / scales[0]) ** 2) - len(x) * log_tau
        return (
            -0.5 * (mu / _PRIOR) ** 2 - 0.5 * jnp.sum((scales / _PRIOR) ** 2) + log_tau + log_error + effects
        )

    def loglikelihood_fn(theta, example):
        which, measured = example
        chosen = (jnp.arange(groups) == which) @ theta[3:]
        return -0.5 * ((measured - chosen) * jnp.exp(-theta[2])) ** 2 - theta[2]

    return fald.Model(logprior_fn, loglikelihood_fn, np.zeros(groups + 3))


@generator
def hierarchies_of_batches(rng) -> Problem:
    """Several rows per group and an unknown error, as with yields of batches or plates."""
    groups, each = int(rng.choice([5, 10])), int(rng.choice([3, 5]))
    tau = float(np.exp(rng.uniform(np.log(0.1), np.log(3))))
    which = np.repeat(np.arange(groups), each).astype(np.float32)
    effects = rng.normal(0, 1) + tau * rng.normal(size=groups)
    measured = (effects[which.astype(int)] + rng.normal(size=len(which))).astype(np.float32)
    return batches(measured.reshape(groups, each), f"{groups} groups of {each}, scale {tau:.2f}")


def batches(table, what: str) -> Problem:
    """Measurements (groups, each), in single precision, in units in which priors of ±5 are wide."""
    groups, each = table.shape
    which = np.repeat(np.arange(groups), each).astype(np.float32)
    measured, y = table.reshape(-1), table.astype(float)
    centre, within = y.mean(axis=1), float(np.sum((y - y.mean(axis=1, keepdims=True)) ** 2))
    taus, sigmas = np.linspace(-9, 3.5, 250), np.linspace(-1.5, 2.0, 120)
    levels, means, variances, scales = [], [], [], []
    for log_error in sigmas:
        error = np.exp(log_error)
        errors = np.full(groups, error / np.sqrt(each))
        own = -groups * each * log_error - within / (2 * error**2) - 0.5 * (error / _PRIOR) ** 2 + log_error
        own -= 0.5 * np.sum((centre / errors) ** 2)
        for log_tau in taus:
            tau_here = np.exp(log_tau)
            matrix = np.c_[np.ones(groups), tau_here * np.eye(groups)]
            precision = np.diag(np.r_[_PRIOR**-2, np.ones(groups)])
            mean, covariance, evidence = _normal_given(matrix, errors, centre, precision)
            change = np.eye(groups + 1)
            change[1:] = matrix
            levels.append(own + evidence - 0.5 * (tau_here / _PRIOR) ** 2 + log_tau)
            means.append(change @ mean)
            variances.append(np.einsum("ij,jk,ik->i", change, covariance, change))
            scales.append((log_tau, log_error))
    weights = np.exp(np.array(levels) - np.max(levels))
    weights /= weights.sum()
    rest = _moments(weights, np.array(means), np.array(variances))
    own = _moments(weights, np.array(scales), np.zeros((len(scales), 2)))
    mean, sd = (np.r_[rest[i][0], own[i], rest[i][1:]] for i in (0, 1))
    rows = {f"s{i}": (which[which % 2 == i], measured[which % 2 == i]) for i in range(2)}
    return Problem(_batches(groups), fald.FederatedData.from_arrays(rows), mean, sd, what)
