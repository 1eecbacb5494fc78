"""Gaussian federations, Monte Carlo on them by the ordinary engine, and the exact law beside it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.lab.reproduce.base import Meter, PanelRun
from fald.langevin.engine import Assignment
from fald.langevin.fald import fald
from fald.langevin.inprocess import InProcess
from fald.problem.data import FederatedData
from fald.problem.models import Model
from fald.runtime.records import RunState
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


def _loglikelihood(theta, example):
    """An example is (mean, precision, count): that many rows x ~ N(θ, precision⁻¹) with that mean."""
    mean, precision, count = example
    gap = theta - mean
    return -0.5 * count * (gap @ precision @ gap)


_MODEL = Model(lambda theta: 0.0 * jnp.sum(theta), _loglikelihood, jnp.zeros(2), name="quadratic")


def _gaussians(centers: np.ndarray, precisions: np.ndarray, rows: int) -> Gaussians:
    n = len(centers)
    parts = [np.asarray(part, np.float32)[:, None] for part in (centers, precisions, np.full(n, rows))]
    data = FederatedData.from_arrays({f"client-{c:02d}": tuple(p[c] for p in parts) for c in range(n)})
    return Gaussians(data, _MODEL, n * rows * precisions, centers, np.full(n, 1.0 / n))


def _centers(alpha: float, settings: Mapping[str, Any]) -> tuple[int, int, Any, np.ndarray]:
    """Clients, rows of each, random numbers, and θ_c ~ N(0, αI)."""
    n, rng = settings["num-clients"], np.random.default_rng(settings["data-seed"])
    return n, settings["rows-per-client"], rng, np.sqrt(alpha) * rng.standard_normal((n, 2))


def paper_federation(alpha: float, settings: Mapping[str, Any]) -> Gaussians:
    """Clients of the paper: θ_c ~ N(0, αI), rows from N(θ_c, Σ), the same Σ for all.

    Only the mean of a client's rows matters, so that mean is all that the sampler gets.
    """
    n, rows, rng, means = _centers(alpha, settings)
    drawn = means[:, None] + rng.standard_normal((n, rows, 2)) @ np.linalg.cholesky(COVARIANCE).T
    return _gaussians(drawn.mean(1), np.broadcast_to(np.linalg.inv(COVARIANCE), (n, 2, 2)), rows)


def curved_federation(alpha: float, settings: Mapping[str, Any]) -> Gaussians:
    """Clients that differ in curvature: Σ_c = s_c R(φ_c) Σ R(φ_c)ᵀ, φ_c uniform and log s_c uniform.

    ``rotation`` is the largest |φ_c|, ``stretch`` the largest s_c and 1/s_c.
    """
    n, rows, rng, means = _centers(alpha, settings)
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
    run: PanelRun,
    label: str,
    federation: Gaussians,
    meter: Meter,
    *,
    num_rounds: int,
    every: int = 1,
    enough: Callable[[np.ndarray], bool] = lambda newest: False,
    **options: Any,
) -> np.ndarray:
    """Positions (kept rounds, runs, 2) of independent runs from zero, step by step.

    ``every`` so many rounds one is kept. ``enough`` looks at the newest of them and may end the runs. The
    random numbers depend on the seed and on ``label`` alone. Options are those of ``fald``, and
    ``participation``; ``law_of`` takes the same.
    """
    who, runs = options.pop("participation", full()), run.settings["num-runs"]
    method = fald(**options)
    key = jax.random.fold_in(jax.random.key(run.seed), zlib.crc32(label.encode()))
    problem = Assignment(key, federation.model, federation.data, method, who, runs, 0, every)
    kept, goal = [], federation.goal
    done, w2 = 0, 0.0
    at_once = max(1, _STEPS_AT_ONCE // method.local_steps)
    for state, newest, _ in along(problem, jnp.zeros((runs, 2)), num_rounds, at_once):
        kept.append(newest)
        w2 = float(fitted_w2(np.asarray(state.server, float), goal))
        meter.add((state.round - done) * method.local_steps, w2)
        done = state.round
        if len(newest) and enough(newest):
            break
    meter.add((num_rounds - done) * method.local_steps, w2)
    return np.concatenate(kept)


def along(
    problem: Assignment, start: jax.Array, num_rounds: int, at_once: int
) -> Iterator[tuple[RunState, np.ndarray, float]]:
    """Run rounds by the ordinary engine, some at once: state, newest positions, mean energy."""
    engine = InProcess()
    state = engine.init(problem, start)
    while state.round < num_rounds:
        most = min(num_rounds - state.round, engine.most_rounds(problem, state))
        state, records, energy = engine.advance(problem, state, min(most, at_once))
        yield state, np.asarray(records.position, float), energy


def curve(
    run: PanelRun, label: str, federation: Gaussians, meter: Meter, *, num_rounds: int, **options: Any
) -> tuple[dict[str, np.ndarray], np.ndarray, Law]:
    """W2 by runs and by law at some rounds, as columns; the positions of all rounds; the law of all rounds.

    ``low`` and ``high`` are the 95% limits of the estimate from so many runs, under the law.
    """
    goal = federation.goal
    path = law_of(federation, num_rounds, **options)
    positions = simulate(run, label, federation, meter, num_rounds=num_rounds, **options)
    rounds = some_rounds(num_rounds, run.settings["num-points"])
    shown = at_rounds(path, rounds)
    low, high = expected_fit(shown, goal, run.settings["num-runs"]).T
    by_runs, by_law = fitted_w2(positions[rounds - 1], goal), gaussian.wasserstein2(*shown, *goal)
    columns = {"round": rounds, "w2_runs": by_runs, "w2_law": by_law, "low": low, "high": high}
    return columns, positions, path


def fitted_w2(positions: np.ndarray, goal: Law) -> np.ndarray:
    """W2 to the goal of a Gaussian fitted to the runs, for (…, runs, d) positions: the paper's measure."""
    mean = positions.mean(-2)
    gap = positions - mean[..., None, :]
    covariance = gap.swapaxes(-1, -2) @ gap / (positions.shape[-2] - 1)
    return gaussian.wasserstein2(mean, covariance, *goal)


def expected_fit(path: Law, goal: Law, num_runs: int, quantiles=(0.025, 0.975), *, repeats: int = 400):
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
    second = gap[..., i] * gap[..., j] - path.covariance[:, None, i, j]
    numbers = np.concatenate([gap.mean(0), second.mean(0)], axis=1)
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
    largest, limit = every.max(), limit_of(len(every))
    said = f"the largest of {len(every)} deviations of means and covariances is {largest:.1f} standard errors"
    return f"{said} (allowed: {limit:.1f})", bool(largest <= limit)


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
