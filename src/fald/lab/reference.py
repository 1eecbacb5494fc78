"""What results are held against: NUTS on the pooled rows, or a long run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.gradients import Batch, energy_fn
from fald.langevin.fald import sgld
from fald.langevin.sampling import sample
from fald.problem.data import FederatedData
from fald.problem.model import Model

if TYPE_CHECKING:
    import xarray as xr

_CHAINS = 4


@dataclass(frozen=True, eq=False)
class Reference:
    """Means and standard deviations (d,) of the flat position, and where they come from.

    ``uncertainty`` is the standard error of the means in units of ``sd``, root mean square over parameters.
    """

    name: str
    mean: np.ndarray
    sd: np.ndarray
    num_draws: int
    uncertainty: float = 0.0

    @classmethod
    def from_draws(cls, name: str, draws: np.ndarray) -> Reference:
        """From draws (chains, draws, d); chains that disagree make its means uncertain.

        Examples
        --------
        >>> made = Reference.from_draws("made up", np.array([[[0.0], [2.0]], [[0.0], [2.0]]]))
        >>> made.mean, made.uncertainty
        (array([1.]), 0.0)
        """
        draws = np.asarray(draws, float)
        flat = draws.reshape(-1, draws.shape[-1])
        sd = flat.std(0, ddof=1)
        errors = draws.mean(1).std(0, ddof=1) / np.sqrt(len(draws)) / sd
        return cls(name, flat.mean(0), sd, len(flat), float(np.sqrt(np.mean(errors**2))))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "mean": self.mean.tolist(), "sd": self.sd.tolist()}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Reference:
        """From what ``to_json`` made."""
        return cls(**{**found, "mean": np.array(found["mean"]), "sd": np.array(found["sd"])})


def flat_draws(tree: xr.DataTree) -> np.ndarray:
    """(chains, draws, d) positions as the sampler saw them."""
    if "unconstrained_posterior" in tree.children:
        return np.asarray(tree["unconstrained_posterior"]["position"].values, float)
    arrays = [v.values for v in tree["posterior"].data_vars.values()]
    return np.concatenate([a.reshape(*a.shape[:2], -1) for a in arrays], axis=2).astype(float)


def pooled_energy(model: Model, data: FederatedData) -> Callable[[jax.Array], jax.Array]:
    """f of a flat position, on the rows of all clients together."""
    batch = Batch(jax.tree.map(jnp.asarray, data.rows), None, jnp.asarray(data.num_rows))
    energy = energy_fn(model, data.num_rows)
    return lambda theta: energy(theta, batch)


def pooled_nuts(
    model: Model,
    data: FederatedData,
    start: jax.Array,
    seed: int = 0,
    *,
    num_warmup: int = 1000,
    num_draws: int = 2000,
) -> Reference | None:
    """NUTS on the rows of all clients together; None where NumPyro is not installed.

    Parameters
    ----------
    model, data
        The problem.
    start
        (d,) flat position near the mode.
    seed
        Of its random numbers.
    num_warmup, num_draws
        Per chain, of four chains.
    """
    try:
        from numpyro.infer import MCMC, NUTS
    except ImportError:
        return None
    kernel = NUTS(potential_fn=pooled_energy(model, data))
    quiet = {"num_chains": _CHAINS, "chain_method": "sequential", "progress_bar": False}
    run = MCMC(kernel, num_warmup=num_warmup, num_samples=num_draws, **quiet)
    run.run(jax.random.key(seed), init_params=jnp.tile(start, (_CHAINS, 1)))
    return Reference.from_draws("NUTS on the pooled rows", np.asarray(run.get_samples(group_by_chain=True)))


def longest_run(
    model: Model, data: FederatedData, step_size: float, num_rounds: int, *, seed: int = 0
) -> Reference:
    """SGLD with exact gradients and a small step, the second half of so many rounds."""
    asked: dict[str, Any] = {"num_chains": _CHAINS, "num_rounds": num_rounds, "num_warmup": num_rounds // 2}
    thinning = max(1, num_rounds // 4000)
    method = sgld(step_size=step_size)
    tree = sample(seed, model, data, method=method, thinning=thinning, progress=False, **asked)
    name = f"SGLD with step size {step_size:.2g}, the longest run ({num_rounds:,} rounds)"
    return Reference.from_draws(name, flat_draws(tree))
