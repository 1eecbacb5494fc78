"""The posterior as the server knows it: its own prior plus sums from the sites."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fald.calculus.mode import descend, newton_step, unit_scaled
from fald.calculus.sums import Report, prior_derivatives, prior_gradients, prior_values
from fald.fewround.site import Answer
from fald.problem.model import Model

Array = NDArray[Any]


class Derivatives(NamedTuple):
    """Log posterior, gradient (d,) and Hessian (d, d) at a position (d,)."""

    position: Array
    value: float
    gradient: Array
    hessian: Array

    @property
    def finite(self) -> bool:
        """Whether all of it is finite."""
        return Report(self.value, self.gradient, self.hessian).finite

    def newton(self) -> tuple[Array, float]:
        """Newton step uphill, and its length in posterior standard deviations."""
        return newton_step(Report(-self.value, -self.gradient, -self.hessian))

    def concave(self) -> bool:
        """Whether the log posterior curves downwards in every direction, clearly above rounding."""
        values = unit_scaled(-self.hessian)[1]
        return bool(values[0] > 1e-10 * max(float(values[-1]), 1e-300))

    def covariance(self) -> Array:
        """Inverse of the negative Hessian, with eigenvalues taken by their size."""
        scale, values, vectors = unit_scaled(-self.hessian)
        sizes = np.maximum(np.abs(values), 1e-8 * np.abs(values).max() or 1.0)
        root = vectors / np.sqrt(sizes) / scale[:, None]
        return root @ root.T

    def log_mass(self) -> float:
        """Logarithm of the mass around it by Laplace's method, up to a constant."""
        return self.value + float(np.linalg.slogdet(self.covariance())[1]) / 2


class Target:
    """Log posterior from log likelihoods summed over sites."""

    def __init__(self, model: Model):
        self.model = model
        self.dim = model.dim
        self.start = np.asarray(model.flat_initial_position, float)

    def values(self, positions: Array, sums: Array) -> Array:
        """Log posterior (M,), −∞ where it is not a number."""
        return self.posterior(positions, sums)[0]

    def posterior(self, positions: Array, sums: Array) -> tuple[Array, Array]:
        """Log posterior (M,), −∞ where it is not a number, and where it is none (M,).

        Where the prior has no density the likelihood need not be a number.
        """
        prior = prior_values(self.model, positions)
        with np.errstate(invalid="ignore"):
            both = np.where(np.isneginf(prior), -np.inf, sums + prior)
        undefined = np.isnan(both) | np.isposinf(both)
        return np.where(undefined, -np.inf, both), undefined

    def gradients(self, positions: Array, sums: Answer) -> tuple[Array, Array]:
        """Log posterior (M,) and its gradient (M, d) at the first states of a request."""
        value, gradient = prior_gradients(self.model, positions)
        count = len(positions)
        return tidy(value + sums["state_values"][:count]), sums["state_gradients"][:count] + gradient

    def derivatives(self, positions: Array, sums: Answer) -> list[Derivatives]:
        """Log posterior with derivatives at the anchors of a request."""
        own = [sums[f"anchor_{name}"] for name in ("values", "gradients", "hessians")]
        prior = prior_derivatives(self.model, positions)
        return [Derivatives(*one) for one in zip(positions, *(a + b for a, b in zip(own, prior)))]

    def regressed(self, sums: Answer, positions: Array, cloud: int) -> tuple[list[Derivatives], Derivatives]:
        """Derivatives from gradients alone, at states of which the last ``cloud`` are draws around a point.

        The slope of a linear regression of the gradients on the draws is the mean Hessian over the cloud (and
        by Stein's identity that of the posterior smoothed by a Gaussian cloud); it stands for the Hessian at
        all other states as well.

        Returns
        -------
        tuple
            Derivatives at the states before the cloud, and the smoothed ones at the centre of the cloud.
        """
        values, grads = self.gradients(positions, sums)
        draws, slopes = positions[-cloud:], grads[-cloud:]
        usable = np.isfinite(slopes).all(axis=1)
        draws, slopes = draws[usable], slopes[usable]
        if len(draws) < 2 * self.dim:
            hessian, centre, gradient = np.full((self.dim, self.dim), np.nan), positions[-1], grads[-1]
        else:
            centre, gradient = draws.mean(axis=0), slopes.mean(axis=0)
            hessian = np.linalg.lstsq(draws - centre, slopes - gradient, rcond=None)[0]
            hessian = (hessian + hessian.T) / 2
        found = [
            Derivatives(position, float(value), grad, hessian)
            for position, value, grad in zip(positions[:-cloud], values, grads)
        ]
        return found, Derivatives(centre, 0.0, gradient, hessian)

    def prior_scale(self, widest: float = 1e3) -> tuple[Array, Array]:
        """Centre and covariance of a Gaussian like the prior, with sds of ``widest`` at most."""
        here = None
        position = self.start
        for _ in range(50):
            here = Derivatives(position, *(part[0] for part in prior_derivatives(self.model, position[None])))
            if not here.finite:
                return self.start, 25.0 * np.eye(self.dim)
            step, decrement = here.newton()
            if decrement < 1e-6 or not np.isfinite(step).all() or np.abs(step).max() > 1e6:
                break
            position = position + step / max(1.0, decrement / 5)
        assert here is not None
        scale, values, vectors = unit_scaled(-here.hessian)
        if not (np.abs(-here.hessian).max() > 0):
            return self.start, 25.0 * np.eye(self.dim)
        sizes = np.maximum(values, 1e-3)
        root = vectors / np.sqrt(sizes) / scale[:, None]
        covariance = root @ root.T
        most = np.minimum(np.sqrt(np.diag(covariance)), widest)  # a flat direction has no end
        shrink = most / np.sqrt(np.diag(covariance))
        return here.position, covariance * np.outer(shrink, shrink)

    def quadratic_mode(self, precision: Array, shift: Array, start: Array) -> tuple[Array, Array] | None:
        """Mode and covariance of prior × exp(−½θᵀAθ + bᵀθ), which the server finds alone.

        Where it has no mode, as in the neck of a funnel, which rises for ever and holds ever less, the place
        of most mass on the way up stands for it.
        """
        seen: list[Derivatives] = []

        def report(theta: Array) -> Report:
            value, grad, second = (part[0] for part in prior_derivatives(self.model, theta[None]))
            energy = theta @ precision @ theta / 2 - shift @ theta - value
            here = Report(float(energy), precision @ theta - shift - grad, precision - second)
            seen.append(Derivatives(theta, -here.value, -here.gradient, -here.hessian))
            return here

        def values(places: Array) -> Array:
            own = np.einsum("mi,ij,mj->m", places, precision, places) / 2 - places @ shift
            return own - prior_values(self.model, places)

        found = descend(report, values, start, tolerance=1e-6)
        if not found.report.finite:
            return None
        here = Derivatives(found.position, -found.report.value, -found.report.gradient, -found.report.hessian)
        if found.failed:
            usable = [place for place in seen if place.finite]
            here = max(usable, key=lambda place: (place.concave(), place.log_mass()))
        return here.position, here.covariance()


def tidy(values: Array) -> Array:
    """Values with −∞ for what is not a number, or +∞."""
    return np.where(np.isnan(values) | np.isposinf(values), -np.inf, values)
