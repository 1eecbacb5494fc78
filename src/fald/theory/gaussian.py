r"""Exact law of FA-LD on Gaussian energies, round by round, without sampling.

For energies f^c(θ) = ½(θ−x_c)ᵀH_c(θ−x_c) one local step is affine in θ with Gaussian noise, so the
mean and the covariance of the averaged position obey a closed recursion. With A_cj = I − η_j H_c and
P_cj = Π_{i>j} A_ci, the product of the steps that follow step j, a client that starts a round at θ ends it at

    β^c = θ + G_c (x_c − θ) + noise,    G_c = I − Π_j A_cj = H_c Σ_j η_j P_cj,

    own covariance of the noise       (1−ρ²) v_c E_c,   E_c = 2τ Σ_j η_j P_cj P_cjᵀ,
    covariance between clients a, b   ρ² 2τ Σ_j η_j P_aj P_bjᵀ.

All P_cj are polynomials of one symmetric H_c, hence diagonal in its eigenbasis. With momentum G_c and the
answers to noise follow from the recursion of position and velocity within a round, in the same basis; as
velocities are drawn anew in every round, the position alone is the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fald.core.checks import check_count
from fald.core.errors import ConfigError
from fald.settings.fald import NoiseScale, Setting
from fald.settings.participation import Participation, full
from fald.settings.schedules import heat_at, step_sizes_at
from fald.theory.bounds import checked

Array = NDArray[np.float64]
StepSize = float | ArrayLike | Callable[[int], float]

_FULL = full()
_CHUNK = 1 << 20  # numbers held at a time while the steps of a round are summed


class Law(NamedTuple):
    """Mean and covariance of a position; a leading axis, where there is one, counts rounds."""

    mean: Array
    covariance: Array


class _Round(NamedTuple):
    """What one round does, apart from the state it starts from."""

    gain: Array  # (N, d, d) G_c
    pull: Array  # (N, d) G_c x_c
    noise: Array  # (d, d) covariance that injected noise adds to the average


@dataclass(frozen=True)
class _Federation:
    """Checked input, with each H_c = Q_c diag(λ_c) Q_cᵀ decomposed once."""

    eigenvalues: Array  # (N, d)
    eigenvectors: Array  # (N, d, d)
    centers: Array  # (N, d)
    chance: Array  # (N,) q_c = E[w_c]
    spread: float  # f in Cov(w_a, w_b) = f (q_a δ_ab − q_a q_b)
    own: Array  # (N,) k_c: the clients' own noise adds (1−ρ²) Σ_c k_c E_c to the average
    temperature: float
    correlation: float
    momentum: float

    def round(self, step_sizes: Array, heats: Array) -> _Round:
        """Compose the local steps, of temperatures relative to the run's, last to first."""
        lam, q = self.eigenvalues, self.chance
        d = lam.shape[1]
        if self.momentum:
            return self._with_momentum(step_sizes, heats)
        outer = np.empty((lam.size, 0))
        if self.correlation > 0:
            columns = self.eigenvectors.transpose(0, 2, 1).reshape(-1, d)
            outer = ((np.repeat(q, d)[:, None] * columns)[:, :, None] * columns[:, None]).reshape(-1, d * d)
        carried, first, second = np.ones_like(lam), np.zeros_like(lam), np.zeros_like(lam)  # Σ η P, Σ η P²
        shared = np.zeros((d, d))  # Σ_j η_j M_j M_jᵀ with M_j = Σ_c q_c P_cj
        chunk = max(1, _CHUNK // max(lam.size, d * d))
        for stop in range(len(step_sizes), 0, -chunk):
            eta, heat = (each[max(0, stop - chunk) : stop][::-1] for each in (step_sizes, heats))
            factors = np.concatenate([carried[None], 1.0 - eta[:, None, None] * lam])
            products = np.cumprod(factors, axis=0)
            carried, products = products[-1], products[:-1]
            first += np.tensordot(eta, products, 1)
            second += np.einsum("j,jci,jci->ci", eta * heat, products, products)
            if self.correlation > 0:
                mixed = (products.reshape(len(eta), -1) @ outer).reshape(-1, d, d)
                shared += np.tensordot((eta * heat)[:, None, None] * mixed, mixed, ((0, 2), (0, 2)))
        return self._composed(lam * first, second, shared)

    def _with_momentum(self, step_sizes: Array, heats: Array) -> _Round:
        """As ``round``, from how the last position answers to position and velocity before each step."""
        lam, a = self.eigenvalues, self.momentum
        place, velocity = np.ones_like(lam), np.zeros_like(lam)
        second, shared = np.zeros_like(lam), np.zeros((lam.shape[1],) * 2)
        for j in range(len(step_sizes) - 1, -1, -1):
            kept = a if j else 0.0  # the first velocity of a round is new
            answer = velocity + np.sqrt(2 * step_sizes[j]) * place
            variance = heats[j] * (1 - kept**2) / 2
            second += variance * answer**2
            if self.correlation > 0:
                mixed = np.tensordot(self.chance, self._in_basis(answer), 1)
                shared += variance * mixed @ mixed.T
            place = place - (1 + kept) * np.sqrt(step_sizes[j] / 2) * lam * answer
            velocity = kept * answer
        return self._composed(1 - place, second, shared)

    def _composed(self, gain: Array, second: Array, shared: Array) -> _Round:
        gain, q = self._in_basis(gain), self.chance
        rho2, f = self.correlation**2, self.spread
        per_client = f * rho2 * q + (1 - rho2) * self.own
        noise = np.einsum("c,cpq->pq", per_client, self._in_basis(second)) + (1 - f) * rho2 * shared
        return _Round(gain, np.einsum("cpq,cq->cp", gain, self.centers), 2 * self.temperature * noise)

    def _in_basis(self, diagonal: Array) -> Array:
        return (self.eigenvectors * diagonal[:, None, :]) @ self.eigenvectors.transpose(0, 2, 1)


def law(
    hessians: ArrayLike,
    centers: ArrayLike,
    weights: ArrayLike,
    *,
    step_size: StepSize,
    local_steps: int,
    num_rounds: int,
    temperature: float = 1.0,
    correlation: float = 0.0,
    participation: Participation = _FULL,
    noise: NoiseScale = "realised",
    momentum: float = 0.0,
    initial_position: ArrayLike | None = None,
    initial_covariance: ArrayLike | None = None,
) -> Law:
    r"""Mean and covariance of the averaged position after each round.

    With q_c = E[w_c], Ḡ = Σ q_c G_c, μ_c = m + G_c(x_c − m) and the participation factor f (0 for full
    participation, 1/S for Scheme I, (N−S)/(S(N−1)) for Scheme II), one round maps (m, C) to

        m' = Σ_c q_c μ_c,
        C' = (1−f)(I−Ḡ)C(I−Ḡ)ᵀ + f Σ_c q_c [(I−G_c)C(I−G_c)ᵀ + (μ_c−m')(μ_c−m')ᵀ]
             + 2τρ²(1−f) Σ_j η_j M_j M_jᵀ + Σ_c (fρ² q_c + (1−ρ²) k_c) E_c,

    where M_j = Σ_c q_c P_cj. ``noise="realised"`` has k_c = q_c: given the draw, own noise of variance
    1/w_c enters with weight w_c, hence as Σ_c w_c E_c, whose mean is Σ_c q_c E_c, also when a client was
    drawn several times and uploads one β. ``noise="paper"`` has k_c = ((1−f) q_c² + f q_c)/p_c.

    Parameters
    ----------
    hessians, centers, weights
        (N, d, d) symmetric H_c of the client energies f^c (not of p_c f^c), or one (d, d) for all; (N, d)
        minimisers x_c; (N,) client weights p_c > 0 with sum 1.
    step_size
        η: one number, one number per local step (num_rounds·local_steps of them), or a function of
        the index of the local step, counted from 0 at the start of the run.
    local_steps, num_rounds, temperature, correlation
        K per round, the number of rounds, τ ≥ 0 and ρ ∈ [0, 1].
    participation, noise
        Who takes part; ``"realised"`` (v_c = 1/w_c) or ``"paper"`` (v_c = 1/p_c).
    momentum
        As in ``fald.sample``. The law of preconditioned steps is that of ``preconditioned`` energies.
    initial_position, initial_covariance
        Mean (d,) and covariance (d, d) of the start; zero unless given.

    Returns
    -------
    Law
        ``mean`` (num_rounds + 1, d) and ``covariance`` (num_rounds + 1, d, d); index 0 is the start. A chain
        that leaves the finite numbers is refused.

    Notes
    -----
    Gradients are exact: minibatch noise is not in this law. With full participation the position is
    Gaussian and these two moments are its whole law. With random participation it is a mixture: the
    moments are exact, but ``wasserstein2`` of them is then only a lower bound of the true distance. The
    recursion is not in the paper of the algorithm.

    Examples
    --------
    >>> problem = [[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5]
    >>> path = law(*problem, step_size=0.1, local_steps=2, num_rounds=50)
    >>> path.mean.shape, path.covariance.shape
    ((51, 1), (51, 1, 1))
    >>> path.mean[-1].round(4), path.covariance[-1].round(4)
    (array([0.7286]), array([[0.5714]]))
    """
    run = Setting(local_steps, 1.0, correlation, participation, noise, temperature, momentum=momentum)
    federation = _prepare((hessians, centers, weights), run)
    num_rounds = check_count("num-rounds", num_rounds, 0)
    steps = _step_sizes(step_size, run.local_steps, num_rounds)
    heats = np.ones_like(steps) * heat_at(step_size, np.arange(steps.size).reshape(steps.shape))
    per_round = np.stack([steps, heats], axis=1)
    d = federation.centers.shape[1]
    mean, covariance = np.empty((num_rounds + 1, d)), np.empty((num_rounds + 1, d, d))
    mean[0] = 0.0 if initial_position is None else _finite("initial-position", initial_position, (d,))
    covariance[0] = 0.0
    if initial_covariance is not None:
        covariance[0] = _finite("initial-covariance", initial_covariance, (d, d))
        _factor(covariance[0])
    f, q = federation.spread, federation.chance
    with np.errstate(over="ignore", invalid="ignore"):
        for r in range(num_rounds):
            if r == 0 or (len(per_round) > 1 and not np.array_equal(per_round[r], per_round[r - 1])):
                composed = federation.round(*per_round[r])
                average = np.eye(d) - np.tensordot(q, composed.gain, 1)
                pull = q @ composed.pull
                transition = np.eye(d) - composed.gain
                row = (q[:, None, None] * transition).transpose(1, 0, 2).reshape(d, -1)
            mean[r + 1] = average @ mean[r] + pull
            following = (1 - f) * (average @ covariance[r] @ average) + composed.noise
            if f > 0:
                apart = _deviations(q, composed.pull - composed.gain @ mean[r])
                following += f * (row @ (covariance[r] @ transition).reshape(-1, d) + apart.T @ apart)
            covariance[r + 1] = following
    finite = np.isfinite(mean).all(1) & np.isfinite(covariance).all((1, 2))
    if not finite.all():
        largest = float(np.abs(federation.eigenvalues).max() * steps.max())
        raise ConfigError(
            f"the chain leaves the finite numbers in round {int(np.argmin(finite))}: step-size times "
            f"curvature must be < 2; the largest is {largest:.4g}",
            hint="choose a smaller step-size",
        )
    return Law(mean, (covariance + covariance.transpose(0, 2, 1)) / 2)


def stationary(
    hessians: ArrayLike,
    centers: ArrayLike,
    weights: ArrayLike,
    *,
    step_size: float,
    local_steps: int,
    temperature: float = 1.0,
    correlation: float = 0.0,
    participation: Participation = _FULL,
    noise: NoiseScale = "realised",
    momentum: float = 0.0,
) -> Law:
    r"""Mean and covariance that a round of ``law`` leaves unchanged, for a constant step size.

    Solves Ḡ m = Σ q_c G_c x_c and then, linear in C,

        ḠC + CḠ − (1−f) ḠCḠ − f Σ_c q_c G_c C G_c = noise + f Σ_c q_c (μ_c−m)(μ_c−m)ᵀ.

    Parameters are those of ``law``, with one number for the step size; ``mean`` is (d,) and ``covariance``
    (d, d). Rounds that do not contract are refused with their spectral radius.

    Notes
    -----
    Nothing is said of how many rounds it takes to come near the fixed point. With equal curvatures momentum
    does not change the covariance: of curvature λ it is τ/(λ(1 − ηλ/2)) as without.

    Examples
    --------
    >>> fixed = stationary([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5], step_size=0.1, local_steps=2)
    >>> fixed.mean.round(4), fixed.covariance.round(4)
    (array([0.7286]), array([[0.5714]]))
    """
    run = Setting(local_steps, 1.0, correlation, participation, noise, temperature, momentum=momentum)
    federation = _prepare((hessians, centers, weights), run)
    if np.ndim(step_size) != 0 or callable(step_size):
        raise ConfigError(f"step-size must be one number here; got {step_size!r}", hint="use law instead")
    (steps,) = _step_sizes(step_size, run.local_steps, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        composed = federation.round(steps, np.ones_like(steps))
    drawn = {"chance": federation.chance, "spread": federation.spread}
    _, turn, mean, covariance = fixed_point(*composed, **drawn)
    return Law(mean, turn @ ((covariance + covariance.T) / 2) @ turn.T)


def fixed_point(
    gain: Array, pull: Array, added: Array, *, chance: Array, spread: float
) -> tuple[Array, Array, Array, Array]:
    """Eigenvalues and eigenvectors of Ḡ, stationary mean, and stationary covariance in that basis.

    ``gain`` are the G_c, ``pull`` the G_c x_c, and ``added`` is the covariance that noise adds to the
    average in a round. Drawn devices: by conjugate gradients preconditioned with the solution for f = 0. The
    operator is symmetric, and positive definite exactly when a round contracts.
    """
    q, f = chance, spread
    weighed = q[:, None, None] * gain
    average = np.sum(weighed, axis=0)
    if not np.isfinite(average).all():
        raise _not_contracting(np.inf)
    rates, turn = np.linalg.eigh(average)
    if rates[0] <= len(rates) * np.finfo(float).eps * rates[-1] or rates[-1] >= 2:
        raise _not_contracting(float(np.max((1 - rates) ** 2)))
    mean = turn @ ((turn.T @ (q @ pull)) / rates)
    pairs = rates[:, None] + rates - rates[:, None] * rates
    if f == 0:
        return rates, turn, mean, (turn.T @ added @ turn) / pairs
    apart = _deviations(q, pull - gain @ mean)
    added = turn.T @ (added + f * (apart.T @ apart)) @ turn
    gain, weighed = turn.T @ gain @ turn, turn.T @ weighed @ turn

    def apply(C: Array) -> Array:
        both = np.sum(weighed @ (C @ gain), axis=0)
        return (pairs + f * rates[:, None] * rates) * C - f * (both + both.T) / 2

    solution = added / pairs
    residual = added - apply(solution)
    step = fresh = residual / pairs
    size, scale = float(np.sum(residual * fresh)), float(np.sum(added * solution))
    for _ in range(500):
        if size <= 1e-26 * scale:
            break
        image = apply(step)
        curvature = float(np.sum(step * image))
        if not curvature > 0:
            raise _not_contracting(1 - curvature / float(np.sum(step**2)))
        solution = solution + (size / curvature) * step
        residual = residual - (size / curvature) * image
        fresh = residual / pairs
        size, before = float(np.sum(residual * fresh)), size
        step = fresh + (size / before) * step
    if not size <= 1e-16 * scale:
        raise _not_contracting(1.0)
    return rates, turn, mean, solution


def target(hessians: ArrayLike, centers: ArrayLike, weights: ArrayLike, temperature: float = 1.0) -> Law:
    r"""Mean and covariance of the posterior π ∝ exp(−Σ_c p_c f^c/τ).

    With H = Σ_c p_c H_c the mean (d,) is H⁻¹ Σ_c p_c H_c x_c and the covariance (d, d) τ H⁻¹. Parameters are
    those of ``law``. An H that is not positive definite is refused: π is then not a distribution.

    Examples
    --------
    >>> target([[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5])
    Law(mean=array([0.75]), covariance=array([[0.5]]))
    """
    H, x, p = _checked_energies(hessians, centers, weights)
    rates, basis = np.linalg.eigh(np.tensordot(p, H, 1))
    if rates[0] <= len(rates) * np.finfo(float).eps * rates[-1]:
        raise ConfigError(
            f"the weighted hessians must sum to a positive definite matrix; an eigenvalue is {rates[0]:.4g}",
            hint="add a prior, or drop the directions that no client has data on",
        )
    mean = basis @ ((basis.T @ np.einsum("c,cpq,cq->p", p, H, x)) / rates)
    return Law(mean, (basis * (Setting(1, 1.0, temperature=temperature).temperature / rates)) @ basis.T)


def preconditioned(
    hessians: ArrayLike, centers: ArrayLike, weights: ArrayLike, preconditioner: ArrayLike
) -> tuple[Array, Array, Array]:
    """Energies in the coordinates M^−½θ, in which steps preconditioned by the diagonal M (d,) > 0 are plain.

    Means and standard deviations of the laws there, times M^½, are those of θ.

    Examples
    --------
    >>> energies = preconditioned([[[4.0]]], [[1.0]], [1.0], [0.25])
    >>> float(0.25 * stationary(*energies, step_size=1e-3, local_steps=1).covariance[0, 0])
    0.2501...
    """
    H, x, p = _checked_energies(hessians, centers, weights)
    root = np.sqrt(
        checked("preconditioner", _finite("preconditioner", preconditioner, x.shape[1:]), above=True)
    )
    return H * np.outer(root, root), x / root, p


def wasserstein2(mean_a: ArrayLike, cov_a: ArrayLike, mean_b: ArrayLike, cov_b: ArrayLike) -> Array:
    r"""2-Wasserstein distance between Gaussians N(a, A) and N(b, B).

        W2² = ‖a−b‖² + tr(A + B − 2(A^{1/2} B A^{1/2})^{1/2}) = ‖a−b‖² + min_U ‖F_A − F_B U‖²_F

    for any factors A = F_A F_Aᵀ, B = F_B F_Bᵀ and U orthogonal. The second form is what is computed: it
    does not subtract nearly equal traces, and A or B may be singular. Means are (..., d) and covariances
    (..., d, d); leading axes broadcast. For other distributions of these moments it is a lower bound.

    Examples
    --------
    >>> float(wasserstein2([0.0, 0.0], [[1.0, 0.0], [0.0, 4.0]], [3.0, 4.0], [[1.0, 0.0], [0.0, 9.0]]))
    5.0990...
    """
    a, b = np.asarray(mean_a, float), np.asarray(mean_b, float)
    A, B = np.asarray(cov_a, float), np.asarray(cov_b, float)
    d = a.shape[-1] if a.ndim else 0
    if not (d and b.shape[-1:] == (d,) and A.shape[-2:] == (d, d) and B.shape[-2:] == (d, d)):
        shapes = ", ".join(str(array.shape) for array in (a, A, b, B))
        raise ConfigError(f"means must be (..., d) and covariances (..., d, d); got {shapes}")
    root_a, root_b = _factor(A), _factor(B)
    left, _, right = np.linalg.svd(root_a.swapaxes(-1, -2) @ root_b)
    turned = root_b @ (right.swapaxes(-1, -2) @ left.swapaxes(-1, -2))
    return np.sqrt(np.sum((a - b) ** 2, -1) + np.sum((root_a - turned) ** 2, (-2, -1)))


def rounds_to(epsilon: float, path: Law, goal: Law) -> int | None:
    """First round at which a law is within ``epsilon`` of another in W2; ``None`` if it never is.

    ``path`` is a result of ``law``, ``goal`` one of ``target`` or ``stationary``. The first passage only: a
    law may come near its goal and leave it again.

    Examples
    --------
    >>> problem = [[[1.0]], [[3.0]]], [[0.0], [1.0]], [0.5, 0.5]
    >>> path = law(*problem, step_size=0.01, local_steps=2, num_rounds=200)
    >>> rounds_to(0.1, path, target(*problem))
    51
    """
    near = wasserstein2(*path, *goal) <= epsilon
    return int(np.argmax(near)) if near.any() else None


def _deviations(chance: Array, moved: Array) -> Array:
    """√q_c (E β^c − E β̄), so that its Gram matrix is the spread of the clients' means."""
    return np.sqrt(chance)[:, None] * (moved - chance @ moved)


def _prepare(energies: tuple[ArrayLike, ArrayLike, ArrayLike], run: Setting) -> _Federation:
    H, x, p = _checked_energies(*energies)
    return _Federation(*np.linalg.eigh(H), x, *drawn(p, run), run.temperature, run.correlation, run.momentum)


def drawn(p: Array, run: Setting) -> tuple[Array, float, Array]:
    """``chance``, ``spread`` and ``own`` of a federation with weights p_c."""
    participation = run.participation
    n, s = len(p), participation.num_participants or 1
    participation.check(np.ones(n, int))
    chance, spread = p, 0.0
    if participation.scheme == "with-replacement":
        spread = 1.0 / s
    elif participation.scheme == "without-replacement":
        chance, spread = np.full(n, 1.0 / n), (n - s) / (s * max(n - 1, 1))
        if not participation.allow_unequal and not np.allclose(p, chance, rtol=1e-9):
            raise ConfigError(
                f"drawing without replacement weighs every client 1/S, but the weights are {p.min():.4g} to "
                f"{p.max():.4g}: the chain would sample another posterior",
                hint="use with-replacement, full participation, or set allow-unequal if that is meant",
            )
    own = chance if run.noise == "realised" else ((1 - spread) * chance**2 + spread * chance) / p
    return chance, spread, own


def _checked_energies(hessians, centers, weights) -> tuple[Array, Array, Array]:
    x = np.asarray(centers, float)
    if x.ndim != 2 or x.size == 0:
        raise ConfigError(f"centers must be (clients, dimensions); got shape {x.shape}")
    num_clients, d = x.shape
    x, p = _finite("centers", x, x.shape), _finite("weights", weights, (num_clients,))
    if p.min() <= 0 or abs(p.sum() - 1) > 1e-8:
        raise ConfigError(
            f"weights must be > 0 and sum to 1; the smallest is {p.min():.6g}, the sum {p.sum():.9g}",
            hint="divide each client's number of rows by the total",
        )
    H = np.asarray(hessians, float)
    if H.shape == (d, d):
        H = np.broadcast_to(H, (num_clients, d, d))
    return _symmetric("hessians", _finite("hessians", H, (num_clients, d, d))), x, p


def _finite(name: str, value: ArrayLike, shape: tuple[int, ...]) -> Array:
    array = np.asarray(value, float)
    if array.shape != shape:
        raise ConfigError(f"{name} must have shape {shape}; got {array.shape}")
    if not np.isfinite(array).all():
        raise ConfigError(f"{name} must be finite; got {array[~np.isfinite(array)][0]}")
    return array


def _symmetric(name: str, array: Array) -> Array:
    transposed = array.swapaxes(-1, -2)
    gap = np.abs(array - transposed).max()
    if gap > 1e-5 * np.abs(array).max():  # what float32 leaves of symmetry
        raise ConfigError(f"{name} must be symmetric; entries differ from their mirrors by up to {gap:.4g}")
    return (array + transposed) / 2


def _step_sizes(step_size: StepSize, local_steps: int, num_rounds: int) -> Array:
    """(rounds, K) step sizes; one row for all rounds when the step is constant."""
    total = local_steps * num_rounds
    values = (
        step_sizes_at(step_size, np.arange(total)) if callable(step_size) else np.asarray(step_size, float)
    )
    if values.ndim and values.shape != (total,):
        raise ConfigError(f"step-size must be one number or {total}; got shape {values.shape}")
    checked("step-size", values, above=True)
    return values.reshape(num_rounds, local_steps) if values.ndim else np.full((1, local_steps), values)


def _factor(covariance: Array) -> Array:
    """F with F Fᵀ = covariance, from its eigendecomposition."""
    if not np.isfinite(covariance).all():
        raise ConfigError("covariances must be finite")
    values, vectors = np.linalg.eigh(_symmetric("covariances", covariance))
    if (values[..., 0] < -1e-8 * np.abs(values[..., -1])).any():
        raise ConfigError(f"covariances must have no negative eigenvalue; got {values.min():.4g}")
    return vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]


def _not_contracting(radius: float) -> ConfigError:
    """The refusal of rounds whose covariance map has at least this spectral radius."""
    return ConfigError(
        f"a stationary law needs rounds whose covariance map has spectral radius < 1; got {radius:.6g}",
        hint="choose a step-size below 2 / the largest curvature, or add a prior to flat directions",
    )
