r"""Law of FA-LD chains on the clients' local models at the mode.

Near the mode θ* client c has the energy f^c(θ*+u) ≈ g_cᵀu + ½uᵀH_c u, for which ``fald.gaussian`` gives
the law of every round exactly. Its stationary mean and covariance give bias and sd error; the affine
round map θ' = (I−Ḡ)θ + … gives the rounds until the start is forgotten and the autocorrelation of draws.

Two terms of third order are added, with b_ck = ∇(q_kᵀ∇²f^c q_k) along the eigenvectors q_k of H_c. A local
chain is hotter than the posterior, by 1/p_c in its own noise, which shifts the mean: with ΔC_ck(j) its
variance along q_k at local step j less that of the posterior,

    δm = Ḡ⁻¹ Σ_c q_c Σ_j η (I−ηH_c)^{K−1−j} (−½ Σ_k ΔC_ck(j) b_ck).

And it spends its steps where the curvature is another, on the way to the client's own mode: the covariance
is that for the curvatures λ_ck + b_ckᵀμ_c, μ_c the mean of the local chain over the steps of a round.

What the models leave out: higher orders, other modes, and on the way from a far start everything but the
curvature at the mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fald import theory
from fald.calculus.mode import Preparation
from fald.core.errors import ConfigError
from fald.settings.fald import Setting
from fald.theory import gaussian
from fald.theory.gaussian import Law

Array = NDArray[Any]

_MOST_CHANGE = 0.5  # of a curvature, by its third-order term
_AHEAD = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 112)  # sixteenths of the rounds done: a goal must stay met


@dataclass(frozen=True)
class Goal:
    """What a run is to reach, from the end of the warm-up on and for all parameters.

    ``bias`` is the largest shift of a posterior mean in posterior standard deviations, ``sd_error`` the
    largest relative error of a standard deviation, ``w2`` the largest W2 distance in units of the
    parameters. ``ess`` are effective draws of the slowest parameter over all chains; 0 asks only for the law
    to arrive. Each of ``num_chains`` has at least ``ess_per_chain``: with 150 the split R-hat is near 1.007.
    """

    bias: float = 0.05
    sd_error: float = 0.05
    w2: float = math.inf
    ess: float = 2000.0
    num_chains: int = 32
    ess_per_chain: float = 150.0

    def __post_init__(self):
        for name in ("bias", "sd_error", "w2"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name.replace('_', '-')} must be > 0; got {getattr(self, name)!r}")
        if self.num_chains < 1 or not min(self.ess, self.ess_per_chain) >= 0:
            raise ConfigError(f"ess must be ≥ 0 and num-chains ≥ 1; got {self.ess!r} and {self.num_chains!r}")

    @property
    def draws(self) -> float:
        """Effective draws wanted of each chain."""
        return max(self.ess / self.num_chains, self.ess_per_chain) if self.ess > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Problem:
    """Local models of all clients, in coordinates whose origin is the mode; of f^c and not of p_c f^c.

    H_c in ``hessians``, g_c in ``gradients``, p_c in ``weights``, and where the chains start. ``constants``
    are those of the bounds; where there are none, ``uncertified`` says why. ``directions``, ``skews`` and
    ``scatters`` as in ``fald.calculus.mode.LocalModel``, stacked; without them, or without the clients' rows
    in ``sizes``, the third-order term or the noise of batches is left out.
    """

    hessians: Array  # (N, d, d) H_c
    gradients: Array  # (N, d) g_c
    weights: Array  # (N,) p_c
    start: Array  # (d,) where the chains start
    parameters: tuple[str, ...]  # names
    directions: Array | None = None
    skews: Array | None = None
    scatters: Array | None = None
    sizes: Array | None = None
    constants: theory.Constants | None = None  # of the bounds
    uncertified: str = "no constants were given"  # why there are none

    @classmethod
    def from_preparation(
        cls, found: Preparation, constants: theory.Constants | None = None, uncertified: str = ""
    ) -> Problem:
        """Local models of a federation, from ``fald.calculus.mode.prepare``."""
        own = type(found.local[0])(*(np.stack(parts) for parts in zip(*found.local)))
        place = found.weights, found.start - found.mode, found.parameters
        more = own.directions, own.skews, own.scatter, found.sizes, constants
        return cls(own.hessian, own.gradient, *place, *more, uncertified or cls.uncertified)

    @classmethod
    def from_gaussian(
        cls,
        hessians: ArrayLike,
        centers: ArrayLike,
        weights: ArrayLike,
        *,
        start: ArrayLike | None = None,
        constants: theory.Constants | None = None,
    ) -> Problem:
        """Gaussian energies ½(θ−x_c)ᵀH_c(θ−x_c), as in ``fald.gaussian.law``; the start is 0 unless given.

        Examples
        --------
        >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
        >>> problem.start, problem.gradients.ravel()
        (array([-0.75]), array([ 0.75, -0.75]))
        """
        mode = gaussian.target(hessians, centers, weights).mean
        x, p, d = np.asarray(centers, float), np.asarray(weights, float), len(mode)
        H = np.broadcast_to(np.asarray(hessians, float), (len(p), d, d))
        first = np.zeros(d) if start is None else np.asarray(start, float)
        pull = np.einsum("cpq,cq->cp", H, mode - x)
        return cls(H, pull, p, first - mode, tuple(f"theta[{i}]" for i in range(d)), constants=constants)

    @cached_property
    def spectrum(self) -> tuple[Array, Array, Array]:
        """Eigenvalues (N, d) and eigenvectors (N, d, d) of the H_c, and the centres (N, d) in that basis."""
        basis = np.linalg.eigh(self.hessians)[1] if self.directions is None else self.directions
        values = np.einsum("cpk,cpk->ck", self.hessians @ basis, basis)
        along = np.einsum("cpk,cp->ck", basis, self.gradients)
        floor = 1e-9 * np.abs(values).max(1, keepdims=True)
        flat, pulled = np.abs(values) < floor, np.abs(along) > 1e-9 * np.abs(along).max(1, keepdims=True)
        # a linear energy has no centre; a curvature too small to matter gives it one far away
        values = np.where(flat & pulled, floor, values)
        away = np.where(flat & ~pulled, 0.0, along / np.where(values == 0, 1.0, values))
        return values, basis, -away

    @cached_property
    def bends(self) -> Array:
        """(N, d, d) component l of ∇(q_kᵀ∇²f^c q_k) in the basis, at [c, l, k]."""
        assert self.skews is not None
        return self.spectrum[1].transpose(0, 2, 1) @ self.skews.transpose(0, 2, 1)

    @cached_property
    def precision(self) -> Array:
        """(d, d) Σ_c p_c H_c, the inverse of the posterior covariance at temperature 1."""
        return np.tensordot(self.weights, self.hessians, 1)

    @property
    def largest_step(self) -> float:
        """1/L, the largest step size that is considered; L as certified, or at the mode."""
        known = 0.0 if self.constants is None else self.constants.smoothness
        return 1.0 / max(known, float(self.spectrum[0].max()))


class Chain(NamedTuple):
    """Law of a chain with constant settings, in the eigenbasis of the average round map I − Ḡ.

    ``stationary`` is the limit, ``posterior`` the goal, ``start`` the first position, all turned into the
    basis; ``rates`` are the eigenvalues of Ḡ.
    """

    stationary: Law
    posterior: Law
    start: Array
    rates: Array
    basis: Array

    def at(self, num_rounds: float) -> Law:
        """Mean and covariance after some rounds from the start, a single point.

        Exact with full participation. With drawn devices the limit is exact, and the way to it is that of
        the average round.
        """
        if math.isinf(num_rounds):
            return self.stationary
        if num_rounds == 0:  # a rate of exactly 1 has no power 0 below
            return Law(self.start, np.zeros_like(self.stationary.covariance))
        with np.errstate(divide="ignore"):
            left, logs = 1 - self.rates, np.log(np.abs(1 - self.rates))
        negative = (np.sign(left)[:, None] * np.sign(left) < 0) & (num_rounds % 2 == 1)
        exponents = num_rounds * (logs[:, None] + logs)
        fill = np.where(negative, 1 + np.exp(exponents), -np.expm1(exponents))
        decay = np.sign(left) ** (num_rounds % 2 or 2) * np.exp(num_rounds * logs)
        mean = self.stationary.mean + decay * (self.start - self.stationary.mean)
        return Law(mean, self.stationary.covariance * fill)

    def errors(self, law: Law, goal: Law | None = None) -> tuple[Array, Array]:
        """Shift of each mean in posterior sds, and relative error of each sd, signed."""
        mean, covariance = self.posterior if goal is None else goal
        sd = np.sqrt(self._variances(covariance))
        return self.basis @ (law.mean - mean) / sd, np.sqrt(self._variances(law.covariance)) / sd - 1

    def _variances(self, covariance: Array) -> Array:
        """Variances of the parameters themselves, from a covariance in the basis."""
        return np.maximum(np.sum((self.basis @ covariance) * self.basis, 1), 0.0)

    def excess(self, num_rounds: float, goal: Goal, towards: Law | None = None) -> float:
        """Largest error after some rounds as a multiple of what the goal allows."""
        law = self.at(num_rounds)
        shift, sd = (float(np.abs(e).max()) for e in self.errors(law, towards))
        worst = max(shift / goal.bias, sd / goal.sd_error)
        if math.isfinite(goal.w2):
            worst = max(worst, float(gaussian.wasserstein2(*law, *(towards or self.posterior))) / goal.w2)
        return worst

    def arrival(self, goal: Goal, towards: Law | None = None) -> int | None:
        """First round from which on the goal is met; ``None`` if it never is."""
        if self.excess(math.inf, goal, towards) > 1:
            return None
        pair = 1 + int(self.rates.max() > 1)  # where a chain alternates, odd and even rounds differ

        def met(rounds: int) -> bool:
            return all(self.excess(rounds + i, goal, towards) <= 1 for i in range(pair))

        low, high = -1, 1  # not met, met
        while high < 1 << 62:
            if not met(high):
                low, high = high, 2 * high
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if met(middle) else (middle, high)
            # a fast part may hide a slow one for some rounds
            later = [r for r in (high + k * (high // 16 + 1) for k in _AHEAD) if not met(r)]
            if not later:
                break
            low, high = later[-1], 2 * later[-1]
        return high

    def autocorrelation_time(self, thinning: int = 1) -> Array:
        """(d,) draws per effective draw of each parameter's mean, keeping every ``thinning``-th round.

        τ_j = 1 + 2 Σ_l (A^l C)_jj/C_jj with A = (I−Ḡ)^thinning, also with drawn devices: the expectation of
        a round is affine.
        """
        kept, C = (1 - self.rates) ** thinning, self.stationary.covariance
        lagged = np.sum((self.basis @ ((kept / (1 - kept))[:, None] * C)) * self.basis, 1)
        return np.maximum(1 + 2 * lagged / self._variances(C), 1.0)


class _Rounds(NamedTuple):
    """What a setting does at each client, in the eigenbasis of its H_c; drawn as in ``fald.gaussian``."""

    left: Array  # (N, d, K) powers (1−ηλ)^j
    gain: Array  # (N, d) 1 − (1−ηλ)^K
    heat: Array  # (N, d) Σ_j η(1−ηλ)^{2j}
    chance: Array
    spread: float
    own: Array


def chain(problem: Problem, setting: Setting) -> Chain:
    """Law of the chain with these settings; rounds that do not contract are refused.

    Examples
    --------
    >>> problem = Problem.from_gaussian([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    >>> law = chain(problem, Setting(local_steps=2, step_size=0.1))
    >>> law.stationary.covariance.round(4), law.posterior.covariance.round(4)
    (array([[0.5714]]), array([[0.5]]))
    """
    s = setting
    if callable(s.step_size):
        raise ConfigError(
            "step-size must be a number here; got a schedule",
            hint="planner.predict and planner.trajectory take schedules too",
        )
    if s.momentum or s.preconditioner is not None:
        raise ConfigError(
            "momentum and preconditioner must be left out here: plans are for plain local steps",
            hint="fald.gaussian.law has the law of both",
        )
    if s.temperature == 0:
        raise ConfigError("temperature must be > 0 here: at 0 there is a point estimate and no law; got 0")
    values, basis, centers = problem.spectrum
    drawn = gaussian.drawn(problem.weights, s)
    rounds = _rounds(values, s, drawn)
    rates, turn, mean, covariance = _limit(problem, s, rounds)
    posterior = s.temperature * np.linalg.inv(problem.precision)
    if problem.skews is not None:
        bent = _bend(problem, s, rounds, (turn @ covariance @ turn.T, posterior))
        mean = mean + turn @ ((turn.T @ (rounds.chance @ bent)) / rates)
        here = _turned(basis.transpose(0, 2, 1), mean)
        usual = centers + rounds.left.mean(-1) * (here - centers)
        change = np.einsum("clk,cl->ck", problem.bends, usual)
        change = np.clip(change, -_MOST_CHANGE * np.abs(values), _MOST_CHANGE * np.abs(values))
        rates, turn, _, covariance = _limit(problem, s, _rounds(values + change, s, drawn))
    goal = Law(np.zeros(len(mean)), turn.T @ posterior @ turn)
    return Chain(Law(turn.T @ mean, covariance), goal, turn.T @ problem.start, rates, turn)


def _limit(problem: Problem, s: Setting, rounds: _Rounds) -> tuple[Array, Array, Array, Array]:
    """Eigenvalues and eigenvectors of Ḡ, stationary mean, and stationary covariance in that basis."""
    _, basis, centers = problem.spectrum
    gain = (basis * rounds.gain[:, None, :]) @ basis.transpose(0, 2, 1)
    pull, added = _turned(basis, rounds.gain * centers), _added(problem, s, rounds)
    return gaussian.fixed_point(gain, pull, added, chance=rounds.chance, spread=rounds.spread)


def _added(problem: Problem, s: Setting, rounds: _Rounds) -> Array:
    """Covariance that injected noise and batches add to the average in a round."""
    basis, q, f, rho2 = problem.spectrum[1], rounds.chance, rounds.spread, s.correlation**2
    per_client = f * rho2 * q + (1 - rho2) * rounds.own
    added = 2 * s.temperature * _mixed(basis, per_client[:, None] * rounds.heat)
    if rho2 > 0 and f < 1:
        added = added + 2 * s.temperature * s.step_size * (1 - f) * rho2 * _shared(basis, rounds)
    if s.batch_size is not None and problem.scatters is not None and problem.sizes is not None:
        # the gradient noise of batches at the mode
        scale = problem.sizes.sum() ** 2 / s.batch_size * np.maximum(1 - s.batch_size / problem.sizes, 0)
        turned = basis.transpose(0, 2, 1) @ problem.scatters @ basis * scale[:, None, None]
        own = turned * s.step_size**2 * (rounds.left @ rounds.left.transpose(0, 2, 1))
        added = added + np.tensordot((1 - f) * q**2 + f * q, basis @ own @ basis.transpose(0, 2, 1), 1)
    return added


def _rounds(values: Array, s: Setting, drawn: tuple[Array, float, Array]) -> _Rounds:
    left = np.ones((*values.shape, int(s.local_steps)))
    left[:, :, 1:] = (1 - s.step_size * values)[:, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        np.cumprod(left, axis=-1, out=left)
        sums = s.step_size * np.sum(left, -1), s.step_size * np.einsum("ckj,ckj->ck", left, left)
        return _Rounds(left, values * sums[0], sums[1], *drawn)


def _mixed(basis: Array, diagonal: Array) -> Array:
    """Σ_c Q_c diag_c Q_cᵀ; in small products, which do not wait for other threads."""
    return np.sum((basis * diagonal[:, None, :]) @ basis.transpose(0, 2, 1), axis=0)


def _turned(basis: Array, vectors: Array) -> Array:
    """Q_c v_c for every client; one vector serves all."""
    return np.squeeze(basis @ vectors[..., None], -1)


def _shared(basis: Array, rounds: _Rounds) -> Array:
    """Σ_j M_j M_jᵀ with M_j = Σ_c q_c (I−ηH_c)^j.

    M_j is smooth in j, so it is computed at Chebyshev nodes, more of them the more it decays over a round,
    and interpolated; where that would take as many as there are steps, at every step.
    """
    steps = rounds.left.shape[-1]
    fastest = float(rounds.left[:, :, min(1, steps - 1)].min())
    decay = -steps * math.log(fastest) if 0 < fastest < 1 else (0.0 if fastest >= 1 else math.inf)
    count = steps if math.isinf(decay) else min(steps, 8 + int(4 * math.sqrt(decay)))
    if count == steps:
        powers, weights = rounds.left, np.eye(steps)
    else:
        angles = np.pi * np.arange(count) / (count - 1)
        nodes = np.unique(np.round((steps - 1) * (1 - np.cos(angles)) / 2).astype(int))
        place = 2 * np.arange(steps) / (steps - 1) - 1
        polynomials = np.polynomial.chebyshev.chebvander(place, len(nodes) - 1)
        lagrange = np.linalg.solve(polynomials[nodes].T, polynomials.T)
        powers, weights = rounds.left[:, :, nodes], lagrange @ lagrange.T
    mixed = np.stack([_mixed(basis, rounds.chance[:, None] * power) for power in np.moveaxis(powers, -1, 0)])
    return np.tensordot(np.tensordot(weights, mixed, 1), mixed, ((0, 2), (0, 2)))


def _bend(problem: Problem, s: Setting, rounds: _Rounds, covariances: tuple[Array, Array]) -> Array:
    """(N, d) third-order pull on each client, from the covariances of the chain and of the posterior."""
    _, basis, _ = problem.spectrum
    own, S = 1 / problem.weights, s.participation.num_participants or 1
    # E[w_c v_c]/q_c, how hot a client is when it takes part
    if s.noise == "realised" and s.participation.scheme == "with-replacement":
        own = (1 - (1 - problem.weights) ** S) / problem.weights
    elif s.noise == "realised" and s.participation.scheme == "without-replacement":
        own = np.full(len(problem.weights), float(S))
    heat = 2 * s.step_size * s.temperature * ((1 - s.correlation**2) * own + s.correlation**2)
    inside, wanted = (np.einsum("cpk,cpk->ck", C @ basis, basis)[:, :, None] for C in covariances)
    squares = rounds.left**2
    hotter = inside * squares + heat[:, None, None] * (np.cumsum(squares, -1) - squares) - wanted
    weights = s.step_size * rounds.left[:, :, ::-1] @ hotter.transpose(0, 2, 1)
    return _turned(basis, -0.5 * np.sum(weights * problem.bends, -1))
