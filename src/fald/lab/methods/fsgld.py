r"""Federated SGLD (FSGLD): visits as in DSGLD, corrected by Gaussian surrogates of the clients.

    θ ← θ − η[∇U_0 + ∇Ũ_s/f_s] + η[∇log q − ∇log q_s/f_s] + √(2ητ) ξ,    q = Π_s q_s,  q_s = N(μ_s, Σ_s),

with q_s fitted to the likelihood of client s once, before the first round. Any surrogates leave the drift
unbiased; good ones take away the variance of the visits.

Reference: El Mekkaoui, Mesquita, Blomstedt and Kaski, "Federated stochastic gradient Langevin dynamics",
UAI 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fald.calculus.mode import descend
from fald.calculus.sums import (
    Report,
    Site,
    client_report,
    log_likelihoods,
    make_site,
    prior_gradients,
    prior_report,
    total,
)
from fald.core.errors import ConfigError, DataError
from fald.core.reveals import Reveals
from fald.core.types import PyTree, StepSize, float_dtype
from fald.lab.methods.dsgld import DSGLD, dsgld
from fald.langevin.client import Local
from fald.langevin.fald import variant
from fald.langevin.method import Answers, Cost, Spent, check_dim, digest, numbers_as_bytes, triangle
from fald.problem.data import FederatedData
from fald.problem.model import Model


class Surrogates(NamedTuple):
    """Gaussians by their natural parameters: ∇log q_s(θ) = linear_s − precision_s θ.

    ``precision`` is (N, d, d), ``linear`` (N, d), clients in the order of their names.
    """

    precision: Any
    linear: Any

    @classmethod
    def from_moments(cls, means: ArrayLike, covariances: ArrayLike) -> Surrogates:
        """From μ_s (N, d) and Σ_s (N, d, d).

        Examples
        --------
        >>> made = Surrogates.from_moments([[1.0]], [[[0.5]]])
        >>> made.precision.tolist(), made.linear.tolist()
        ([[[2.0]]], [[2.0]])
        """
        precision = np.linalg.inv(np.asarray(covariances, float))
        return cls(precision, np.einsum("cij,cj->ci", precision, np.asarray(means, float)))


@dataclass(frozen=True)
class FSGLD(DSGLD):
    """The method; made by ``fsgld``."""

    surrogates: Surrogates | None = field(default=None, compare=False)

    reveals = Reveals(preparation={"precision": "precision", "linear": "shift"})

    def split(self) -> tuple[Self, dict[str, Any]]:
        """As FA-LD, with the surrogates among the numbers."""
        if self.surrogates is None:
            raise ConfigError("fsgld has no surrogates yet", hint="fit_surrogates(model, data) makes them")
        skeleton, numbers = super().split()
        arrays = Surrogates(*[jnp.asarray(np.asarray(part), float_dtype()) for part in self.surrogates])
        return replace(skeleton, surrogates=None), {**numbers, "surrogates": arrays}

    def settings(self) -> dict[str, Any]:
        """Settings as plain values; surrogates by a short hash."""
        told = {} if self.surrogates is None else {"surrogates": digest(self.surrogates)}
        return {**super().settings(), **told}

    def offer(self, model: Model, data: FederatedData) -> dict[str, Any]:
        """A surrogate of each client, fitted to its own rows; nothing where surrogates were given."""
        return fit_surrogates(model, data)._asdict() if self.surrogates is None else {}

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Self:
        """Take the surrogates that clients have fitted, unless others were given."""
        check_dim(self.name, model.dim)
        made = Surrogates(**answers) if self.surrogates is None else self.surrogates
        wanted = (data.num_clients, model.dim)
        if np.shape(made.linear) != wanted or np.shape(made.precision) != (*wanted, model.dim):
            raise DataError(
                f"surrogates must have shapes {(*wanted, model.dim)} and {wanted}; "
                f"got {np.shape(made.precision)} and {np.shape(made.linear)}"
            )
        return replace(self, surrogates=made)

    def cost(self, dim: int) -> Cost:
        """A surrogate up, their product down; the gradients of local fits are not counted."""
        sent = numbers_as_bytes(dim + triangle(dim))
        return super().cost(dim)._replace(setup=Spent(1, sent, sent))

    def client_update(self, hyper, local: Local, message: PyTree, memory: PyTree):
        """K corrected steps."""
        precision, linear = hyper["surrogates"]
        own_precision, own_linear = precision[local.client], linear[local.client]
        all_precision, all_linear = precision.sum(0), linear.sum(0)

        def grad(theta, k):
            of_all = all_linear - all_precision @ theta
            of_own = own_linear - own_precision @ theta
            return local.grad(theta, k) - of_all + of_own / local.share

        return super().client_update(hyper, local._replace(grad=grad), message, memory)


def fit_surrogates(model: Model, data: FederatedData) -> Surrogates:
    """Gaussian surrogates by a quadratic fit of each client's likelihood at its own mode.

    The mode is that of the prior times the client's likelihood, by damped Newton steps; directions in which
    the likelihood is not concave there get no curvature.

    Raises
    ------
    DataError
        If the model has too many parameters, or a client's likelihood has no finite derivatives.

    Examples
    --------
    >>> import fald
    >>> data = fald.FederatedData.from_arrays({"a": np.array([[1.0], [3.0]]), "b": np.array([[5.0]])})
    >>> made = fit_surrogates(fald.models.gaussian_location([[2.0]]), data)
    >>> made.precision.ravel().round(6).tolist(), made.linear.ravel().round(6).tolist()
    ([1.0, 0.5], [2.0, 2.5])
    """
    check_dim("fsgld", model.dim)
    precisions, linears = [], []
    for name in data.names:
        site = make_site(model, data.client(name), name)

        def report(theta: np.ndarray, site: Site = site) -> Report:
            return total([client_report(site, theta), prior_report(model, theta)])

        def values(thetas: np.ndarray, site: Site = site) -> np.ndarray:
            return -log_likelihoods(site, thetas) - prior_gradients(model, thetas)[0]

        found = descend(report, values, np.asarray(model.flat_initial_position), tolerance=1e-6)
        if not found.report.finite:
            raise DataError(f"the likelihood of client {name!r} has no finite derivatives")
        theta, own = found.position, client_report(site, found.position)
        curvatures, vectors = np.linalg.eigh(own.hessian)
        precision = (vectors * np.maximum(curvatures, 0)) @ vectors.T
        precisions.append(precision)
        linears.append(precision @ theta - own.gradient)
    return Surrogates(np.array(precisions), np.array(linears))


def fsgld(
    *,
    local_steps: int,
    step_size: StepSize,
    surrogates: Surrogates | None = None,
    temperature: float = 1.0,
    batch_size: int | None = None,
) -> FSGLD:
    """FSGLD: DSGLD whose visits are corrected by surrogates.

    Parameters
    ----------
    local_steps, step_size, temperature, batch_size
        As for ``dsgld``.
    surrogates
        q_s of every client. None: fitted by ``fit_surrogates`` when the run begins, which needs the rows
        in this process.

    Examples
    --------
    >>> fsgld(local_steps=10, step_size=1e-3).name
    'fsgld'
    """
    made = dsgld(local_steps=local_steps, step_size=step_size, temperature=temperature, batch_size=batch_size)
    return variant(FSGLD, made, name="fsgld", surrogates=surrogates)
