"""References: NUTS on the pooled rows, kept in a folder; means known to 0.01 sd, sds to 2%.

``python -m benchmarks.rounds.references [NAME …]`` computes those that are missing, by default for every
study whose mean and sd can be found.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arviz_stats.base import array_stats
from numpyro.infer import MCMC, NUTS

from benchmarks.rounds import studies
from fald.core.errors import ExitCode, FaldError

CACHE = Path(__file__).parent / "cache"
RHAT_LIMIT = 1.01
MEAN_LIMIT = 0.01
SD_LIMIT = 0.02


class UntrustedReferenceError(FaldError):
    """A reference that cannot be trusted."""


@dataclass(frozen=True)
class Settings:
    """How long NUTS runs: blocks of draws are added until the Monte-Carlo error is below the limit."""

    seed: int = 7
    num_chains: int = 32
    num_warmup: int = 300
    block: int = 400
    max_blocks: int = 30
    kept: int = 4000


STANDARD = Settings()


@dataclass(frozen=True, eq=False)
class Reference:
    """Moments of a posterior in the flat unconstrained coordinates of its model.

    Parameters
    ----------
    mean, sd
        (dim,) posterior mean and standard deviation.
    mcse_mean, mcse_sd
        (dim,) their Monte-Carlo standard errors.
    rhat
        (dim,) rank-normalised split R-hat.
    draws
        (4000, dim) draws, thinned.
    divergences, num_draws
        Draws at which the integrator diverged, and all draws.
    seconds
        Time it took.
    """

    mean: np.ndarray
    sd: np.ndarray
    mcse_mean: np.ndarray
    mcse_sd: np.ndarray
    rhat: np.ndarray
    draws: np.ndarray
    divergences: int
    num_draws: int
    seconds: float

    def trusted(self, name: str) -> Reference:
        """This reference, or an error if its chains disagree or are too short."""
        worst = float(np.max(self.rhat))
        if not worst <= RHAT_LIMIT:
            raise UntrustedReferenceError(f"{name}: the chains of the reference disagree, R-hat {worst:.3f}")
        if not self.accurate():
            of_mean, of_sd = self.worst_mcse()
            raise UntrustedReferenceError(
                f"{name}: Monte-Carlo errors of the reference are {of_mean:.3f} sd (mean), {of_sd:.1%} (sd)"
            )
        return self

    def worst_mcse(self) -> tuple[float, float]:
        """The largest Monte-Carlo errors of a mean, in posterior sd, and of an sd, relative."""
        return float(np.max(self.mcse_mean / self.sd)), float(np.max(self.mcse_sd / self.sd))

    def accurate(self) -> bool:
        """Whether both errors are within their limits."""
        of_mean, of_sd = self.worst_mcse()
        return of_mean <= MEAN_LIMIT and of_sd <= SD_LIMIT


def log_density(study: studies.Study) -> Callable[[Any], Any]:
    """The log posterior density of the pooled rows at a flat position, up to a constant."""
    model = study.model
    rows = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), study.data.rows)

    def log_density_fn(flat):
        terms = jax.vmap(model.flat_loglikelihood, (None, 0))(flat, rows)
        return model.flat_logprior(flat) + jnp.sum(terms)

    return log_density_fn


def mode(log_density_fn: Callable[[Any], Any], start: Any, max_steps: int = 500) -> tuple[Any, np.ndarray]:
    """Mode and inverse negative Hessian there, by Newton steps damped until the density rises."""
    value, gradient, hessian = (jax.jit(f(log_density_fn)) for f in (lambda f: f, jax.grad, jax.hessian))
    position, damping, here = np.asarray(start), 1e-3, float(value(start))
    for _ in range(max_steps):
        g, H = np.asarray(gradient(position)), -np.asarray(hessian(position))
        # scaled to unit diagonal, so that the damping does not depend on the units of parameters
        unit = np.sqrt(np.maximum(np.abs(np.diag(H)), 1e-12))
        scaled = H / np.outer(unit, unit)
        lowest = float(np.linalg.eigvalsh(scaled)[0])
        if lowest > 0 and float(g / unit @ np.linalg.solve(scaled, g / unit)) < 1e-9:
            return position, np.linalg.inv(H)
        shift = damping + max(0.0, 1e-8 - lowest)
        step = np.linalg.solve(scaled + shift * np.eye(len(g)), g / unit) / unit
        there = float(value(position + step))
        if there > here - 1e-10 * abs(here):
            position, here, damping = position + step, there, damping / 5
        else:
            damping = max(damping, 1e-6) * 4
    raise UntrustedReferenceError(
        f"no mode found in {max_steps} Newton steps", hint="the posterior may be improper"
    )


def compute(study: studies.Study, settings: Settings = STANDARD) -> Reference:
    """Run NUTS on the pooled rows in float64, in coordinates whitened at the mode."""
    began = time.perf_counter()
    with jax.enable_x64(True):
        log_density_fn = log_density(study)
        center, covariance = mode(log_density_fn, study.model.flat_initial_position)
        scale = np.linalg.cholesky(covariance)
        # whitening is a dense mass matrix already. Steps of 1 are tried first; NumPyro's own first step of 10
        # can throw a chain out for good
        kernel = NUTS(
            potential_fn=lambda z: -log_density_fn(center + scale @ z),
            adapt_mass_matrix=False,
            step_size=0.1,
        )
        mcmc = MCMC(
            kernel,
            num_warmup=settings.num_warmup,
            num_samples=settings.block,
            num_chains=settings.num_chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        key = jax.random.key(settings.seed)
        start = jax.random.normal(key, (settings.num_chains, study.dim))
        blocks, divergences = [], 0
        for block in range(settings.max_blocks):
            mcmc.run(jax.random.fold_in(key, block), init_params=start, extra_fields=("diverging",))
            blocks.append(np.asarray(mcmc.get_samples(group_by_chain=True)) @ scale.T + center)
            divergences += int(np.sum(mcmc.get_extra_fields()["diverging"]))
            mcmc.post_warmup_state = mcmc.last_state
            reference = summarise(np.concatenate(blocks, axis=1), divergences, settings)
            if reference.accurate() and np.max(reference.rhat) <= RHAT_LIMIT:
                break
    return replace(reference, seconds=time.perf_counter() - began)


def summarise(draws: np.ndarray, divergences: int, settings: Settings) -> Reference:
    """Moments, their Monte-Carlo errors and R-hat of (chains, draws, dim)."""
    axes = {"chain_axis": 0, "draw_axis": 1}
    columns = np.moveaxis(draws, -1, 0)
    flat = draws.reshape(-1, draws.shape[-1])
    every = max(1, len(flat) // settings.kept)
    return Reference(
        mean=flat.mean(0),
        sd=flat.std(0, ddof=1),
        mcse_mean=np.array([array_stats.mcse(c, method="mean", **axes) for c in columns], float),
        mcse_sd=np.array([mcse_of_sd(c, **axes) for c in columns], float),
        rhat=np.array([array_stats.rhat(c, method="rank", **axes) for c in columns], float),
        draws=flat[::every][: settings.kept],
        divergences=divergences,
        num_draws=len(flat),
        seconds=0.0,
    )


def mcse_of_sd(draws: np.ndarray, **axes: int) -> float:
    """Monte-Carlo error of the sd, from that of the mean squared deviation: se(s²)/(2s).

    ArviZ's ``method="sd"`` counts effective draws for the mean; chains of NUTS alternate, which helps means
    and not squares, so that it says a half or a third of the error.
    """
    squares = (draws - draws.mean()) ** 2
    return float(array_stats.mcse(squares, method="mean", **axes)) / (2 * np.sqrt(squares.mean()))


def fingerprint(study: studies.Study) -> str:
    """A short hash of the rows, of the limits, and of the model by its log density at fixed positions."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        start = np.asarray(study.model.flat_initial_position)
        positions = start + 0.1 * rng.standard_normal((3, study.dim))
        values = jax.jit(jax.vmap(log_density(study)))(positions)
    text = [
        study.data.fingerprint(),
        repr((RHAT_LIMIT, MEAN_LIMIT, SD_LIMIT)),
        *[f"{v:.6e}" for v in np.asarray(values)],
    ]
    return hashlib.sha256("|".join(text).encode()).hexdigest()[:12]


def reference(name: str, folder: Path = CACHE) -> Reference:
    """The reference of a study: read from the folder, or computed and written there.

    Raises
    ------
    UntrustedReferenceError
        If R-hat is above 1.01 or a Monte-Carlo error above its limit in any coordinate, if no mode is found
        to start from, or if the study has no mean and sd that could be found.
    """
    study = studies.load(name)
    if study.expects != "reached":
        raise UntrustedReferenceError(f"{name} has no reference: {study.note}", hint="judge its verdict only")
    path = folder / f"{name}-{fingerprint(study)}.npz"
    if path.exists():
        with np.load(path) as stored:
            values = {f: stored[f] if stored[f].ndim else stored[f].item() for f in stored.files}
        return Reference(**values).trusted(name)
    found = compute(study).trusted(name)
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, **{f.name: getattr(found, f.name) for f in fields(found)})
    partial.replace(path)
    return found


def main(wanted: Sequence[str]) -> int:
    """Compute what is missing and say how each went; the exit code."""
    failed = 0
    try:
        for name in wanted or [n for kind in ("real", "awkward") for n in studies.names(kind)]:
            try:
                line = described(reference(name))
            except FaldError as error:
                failed, line = 1, str(error)
            print(f"{name:<24} {line}", flush=True)
    except KeyboardInterrupt:
        print("stopped; references that were finished are kept", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    return failed


def described(found: Reference) -> str:
    """One line on how a reference was found and how well it is known."""
    of_mean, of_sd = found.worst_mcse()
    return (
        f"d {len(found.mean):>3}  draws {found.num_draws:>6}  MCSE {of_mean:.4f} sd, {of_sd:.2%}  "
        f"R-hat {np.max(found.rhat):.4f}  divergences {found.divergences}  {found.seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
