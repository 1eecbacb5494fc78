"""Gaussian federations, Monte Carlo on them by the ordinary engine, and the exact law beside it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.lab.reproduce.base import Meter, Run
from fald.langevin.engine import Problem
from fald.langevin.fald import fald
from fald.langevin.inprocess import InProcess
from fald.problem.data import FederatedData
from fald.problem.models import Model
from fald.settings.participation import Participation, full, with_replacement, without_replacement
from fald.theory import gaussian
from fald.theory.gaussian import Law

COVARIANCE = np.array([[5.0, -2.0], [-2.0, 1.0]])
_STEPS_AT_ONCE = 2000  # about a second between two looks at the keyboard
_FAMILY_ERROR = 1e-3  # chance of a false alarm of one comparison with the law


class Gaussians(NamedTuple):
    """Clients with quadratic energies: their data for the sampler, and H_c, x_c, p_c for the law."""

    data: FederatedData
    model: Model
    hessians: np.ndarray
    centers: np.ndarray
    weights: np.ndarray

    @property
    def energies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the functions of ``fald.gaussian`` take first."""
        return self.hessians, self.centers, self.weights

    @property
    def goal(self) -> Law:
        """The posterior."""
        return gaussian.target(*self.energies)


def _quadratic_model() -> Model:
    """An example is (mean, precision, count): that many rows x ~ N(θ, precision⁻¹) with that mean."""

    def loglikelihood_fn(theta, example):
        mean, precision, count = example
        gap = theta - mean
        return -0.5 * count * (gap @ precision @ gap)

    return Model(
        logprior_fn=lambda theta: 0.0 * jnp.sum(theta),
        loglikelihood_fn=loglikelihood_fn,
        initial_position=jnp.zeros(2),
        name="quadratic",
    )


_MODEL = _quadratic_model()


def _gaussians(centers: np.ndarray, precisions: np.ndarray, rows: int) -> Gaussians:
    n = len(centers)
    summaries = {
        f"client-{c:02d}": (
            centers[c : c + 1].astype(np.float32),
            precisions[c : c + 1].astype(np.float32),
            np.array([rows], np.float32),
        )
        for c in range(n)
    }
    data = FederatedData.from_arrays(summaries)
    return Gaussians(data, _MODEL, n * rows * precisions, centers, np.full(n, 1.0 / n))


def paper_federation(alpha: float, settings: Mapping[str, Any]) -> Gaussians:
    """Clients of the paper: θ_c ~ N(0, αI), rows from N(θ_c, Σ), the same Σ for all.

    Only the mean of a client's rows matters, so that mean is all that the sampler gets.
    """
    n, rows = settings["num-clients"], settings["rows-per-client"]
    rng = np.random.default_rng(settings["data-seed"])
    means = np.sqrt(alpha) * rng.standard_normal((n, 2))
    drawn = means[:, None] + rng.standard_normal((n, rows, 2)) @ np.linalg.cholesky(COVARIANCE).T
    return _gaussians(drawn.mean(1), np.broadcast_to(np.linalg.inv(COVARIANCE), (n, 2, 2)), rows)


def curved_federation(alpha: float, settings: Mapping[str, Any]) -> Gaussians:
    """Clients that differ in curvature: Σ_c = s_c R(φ_c) Σ R(φ_c)ᵀ, φ_c uniform and log s_c uniform.

    ``rotation`` is the largest |φ_c|, ``stretch`` the largest s_c and 1/s_c.
    """
    n, rows = settings["num-clients"], settings["rows-per-client"]
    rng = np.random.default_rng(settings["data-seed"])
    means = np.sqrt(alpha) * rng.standard_normal((n, 2))
    phi = rng.uniform(-settings["rotation"], settings["rotation"], n)
    scale = np.exp(rng.uniform(-1, 1, n) * np.log(settings["stretch"]))
    turn = np.array([[np.cos(phi), -np.sin(phi)], [np.sin(phi), np.cos(phi)]]).transpose(2, 0, 1)
    covariances = scale[:, None, None] * turn @ COVARIANCE @ turn.transpose(0, 2, 1)
    roots = np.linalg.cholesky(covariances)
    centers = means + (roots @ rng.standard_normal((n, 2, 1)))[:, :, 0] / np.sqrt(rows)
    return _gaussians(centers, np.linalg.inv(covariances), rows)


def heterogeneity(federation: Gaussians) -> float:
    """γ = max_c ‖∇f^c(θ*)‖ at the posterior mean."""
    gaps = federation.goal.mean - federation.centers
    return float(np.linalg.norm(np.einsum("cij,cj->ci", federation.hessians, gaps), axis=1).max())


def participation_of(scheme: str, count: int) -> Participation:
    """Full participation, or S clients by Scheme I or II."""
    return {"full": lambda _: full(), "I": with_replacement, "II": without_replacement}[scheme](count)


def simulate(
    run: Run,
    label: str,
    federation: Gaussians,
    meter: Meter,
    *,
    num_runs: int,
    num_rounds: int,
    local_steps: int,
    step_size: float,
    correlation: float = 0.0,
    participation: Participation | None = None,
    noise: Any = "realised",
    every: int = 1,
    enough: Callable[[np.ndarray], bool] | None = None,
) -> np.ndarray:
    """Positions (kept rounds, runs, 2) of independent runs from zero, step by step.

    ``every`` so many rounds one is kept. ``enough`` looks at the newest of them and may end the runs. The
    random numbers depend on the seed and on ``label`` alone.
    """
    method = fald(local_steps=local_steps, step_size=step_size, correlation=correlation, noise=noise)
    key = jax.random.fold_in(jax.random.key(run.seed), zlib.crc32(label.encode()))
    problem = Problem(
        key, federation.model, federation.data, method, participation or full(), num_runs, 0, every
    )
    engine, kept, goal = InProcess(), [], federation.goal
    state = engine.init(problem, jnp.zeros((num_runs, 2)))
    while state.round < num_rounds:
        most = min(num_rounds - state.round, engine.most_rounds(problem, state))
        size = max(1, min(most, _STEPS_AT_ONCE // local_steps))
        state, records, _ = engine.advance(problem, state, size)
        kept.append(np.asarray(records.position, float))
        now = np.asarray(state.server, float)
        meter.add(size * local_steps, float(fitted_w2(now, goal)))
        if enough is not None and len(kept[-1]) and enough(kept[-1]):
            break
    meter.add((num_rounds - state.round) * local_steps, float(fitted_w2(now, goal)))
    return np.concatenate(kept)


def fitted_w2(positions: np.ndarray, goal: Law) -> np.ndarray:
    """W2 to the goal of a Gaussian fitted to the runs, for (…, runs, d) positions: the paper's measure."""
    mean = positions.mean(-2)
    gap = positions - mean[..., None, :]
    covariance = gap.swapaxes(-1, -2) @ gap / (positions.shape[-2] - 1)
    return gaussian.wasserstein2(mean, covariance, *goal)


def expected_fit(path: Law, goal: Law, num_runs: int, quantiles=(0.025, 0.975), repeats: int = 400):
    """Quantiles of ``fitted_w2`` for that many runs that follow the law exactly, for every round.

    Means of Gaussian samples are Gaussian and their covariances Wishart, so no runs are needed. With
    random participation the law is only nearly Gaussian, and so are these.
    """
    rng = np.random.default_rng(0)
    d, nu = path.mean.shape[-1], num_runs - 1
    # Bartlett: the factor of a Wishart matrix is triangular with chi and normal entries
    factor = np.tril(rng.standard_normal((repeats, d, d)), -1)
    factor[:, range(d), range(d)] = np.sqrt(rng.chisquare(nu - np.arange(d), (repeats, d)))
    shift = rng.standard_normal((repeats, d)) / np.sqrt(num_runs)
    found = []
    for mean, covariance in zip(path.mean, path.covariance):
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0))
        means = mean + shift @ root.T
        spread = root @ factor / np.sqrt(nu)
        w2 = gaussian.wasserstein2(means, spread @ spread.transpose(0, 2, 1), *goal)
        found.append(np.quantile(w2, quantiles))
    return np.array(found)


def deviations(positions: np.ndarray, path: Law) -> np.ndarray:
    """Runs against a law in standard errors: two means and three covariances, averaged over rounds.

    ``positions`` (rounds, runs, d) and ``path`` belong to the same rounds. Every run gives one number per
    moment, the average over its rounds of θ − E θ or of (θ − E θ)(θ − E θ)ᵀ − Cov θ; runs are independent, so
    their spread gives the standard error, whatever the correlation between rounds.
    """
    gap = positions - path.mean[:, None]
    i, j = np.triu_indices(gap.shape[-1])
    first = gap.mean(0)
    second = (gap[..., i] * gap[..., j] - path.covariance[:, None, i, j]).mean(0)
    numbers = np.concatenate([first, second], axis=1)
    return numbers.mean(0) / (numbers.std(0, ddof=1) / np.sqrt(len(numbers)))


def limit_of(count: int) -> float:
    """How large the largest of ``count`` standard normals may be, with a chance of error of 0.1%.

    Examples
    --------
    >>> round(limit_of(5), 2)
    3.72
    """
    from scipy.stats import norm

    return float(norm.ppf(1 - _FAMILY_ERROR / (2 * count)))


def agreement(found: list[np.ndarray]) -> tuple[str, bool]:
    """Words and verdict on all deviations from the law of one panel."""
    every = np.abs(np.concatenate(found))
    limit = limit_of(len(every))
    said = (
        f"the largest of {len(every)} deviations of means and covariances is {every.max():.1f} standard "
        f"errors (allowed: {limit:.1f})"
    )
    return said, bool(every.max() <= limit)


def some_rounds(num_rounds: int, most: int = 60) -> np.ndarray:
    """Rounds from 1 to the last, denser at the start, for curves.

    Examples
    --------
    >>> some_rounds(5).tolist()
    [1, 2, 3, 4, 5]
    """
    return np.unique(np.geomspace(1, num_rounds, most).round().astype(int))


def law_of(federation: Gaussians, num_rounds: int, **settings: Any) -> Law:
    """The exact law of the rounds 0 … ``num_rounds``, started at zero."""
    return gaussian.law(*federation.energies, num_rounds=num_rounds, **settings)


def at_rounds(path: Law, rounds: np.ndarray) -> Law:
    """The law at some rounds."""
    return Law(path.mean[rounds], path.covariance[rounds])
