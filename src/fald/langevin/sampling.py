"""``fald.sample``: put a problem together, run it, return the draws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fald import loop
from fald.checkpoint import Checkpoint
from fald.data import FederatedData
from fald.engines.base import Engine, Problem, Records
from fald.engines.inprocess import InProcess
from fald.errors import ConfigError, DataError
from fald.journal import Journal, as_journal
from fald.models.base import Model
from fald.noise import NoiseScale
from fald.participation import Participation
from fald.privacy.guard import Guard, Protection, secret_words
from fald.results import build_tree
from fald.samplers.base import Method, check_count
from fald.samplers.fald import fald
from fald.samplers.names import by_name
from fald.summaries import settling
from fald.types import Position, StepSize, as_floats, float_dtype
from fald.version import __version__

if TYPE_CHECKING:
    import xarray as xr


def sample(
    rng_key: jax.Array | int,
    model: Model,
    data: FederatedData,
    *,
    num_rounds: int,
    local_steps: int | None = None,
    step_size: StepSize | None = None,
    temperature: float = 1.0,
    correlation: float = 0.0,
    participation: Participation | None = None,
    noise: NoiseScale = "realised",
    batch_size: int | None = None,
    clip_norm: float | None = None,
    num_chains: int = 4,
    num_warmup: int = 0,
    thinning: int = 1,
    initial_position: Position | None = None,
    method: Method | str | None = None,
    privacy: Protection | None = None,
    engine: Engine | None = None,
    progress: bool = True,
    checkpoint: str | Path | Checkpoint | None = None,
    journal: str | Path | Journal | None = None,
) -> xr.DataTree:
    """Draw from the joint posterior of all clients by federated averaging Langevin dynamics.

    Every round each participating client takes K noisy gradient steps on its own rows,

      β^c ← β^c − η ∇f̃^c(β^c) + √(2ητ)·(ρ ξ̇ + √((1−ρ²) v_c) ξ^c),

    and the server averages, θ = Σ_c w_c β^c.

    Parameters
    ----------
    rng_key
        A JAX key, or an integer seed. The same key gives the same draws.
    model, data
        The model, and the rows of each client.
    num_rounds
        Rounds in total, warm-up included.
    local_steps
        K, steps between synchronisations.
    step_size
        η, or a function from the step number to η, such as ``fald.paper_decay(L, m)``.
    temperature
        τ; the chains sample exp(−f/τ).
    correlation
        ρ, correlation of the injected noise between clients, 0 to 1.
    participation
        ``fald.full()`` (default), ``fald.with_replacement(S)`` or ``fald.without_replacement(S)``.
        Each chain draws its own participants.
    noise
        ``"realised"`` scales a client's own noise by its weight in this round's average, so that the
        average has the right temperature; ``"paper"`` by its share of the rows.
    batch_size
        Rows per stochastic gradient, drawn afresh without replacement in every step; None for exact
        gradients.
    clip_norm
        Norm to which the gradient of each row is cut; the result is then a pseudo-posterior.
    num_chains, num_warmup, thinning
        Chains; rounds thrown away at the start; rounds per kept draw after that.
    initial_position
        Where chains start: a position, or one with a leading chain axis. Default: the model's.
    method
        A method from ``fald.samplers`` instead of FA-LD; then ``local_steps``, ``step_size``,
        ``temperature``, ``correlation``, ``noise``, ``batch_size`` and ``clip_norm`` are the method's own.
        Or its name, such as ``"qlsd"``, which takes those of them that it has.
    privacy
        ``fald.privacy.Protection``: account for the run, stop it within a budget, draw client noise
        from entropy. Each chain counts.
    engine
        Where clients run; in this process by default.
    progress
        Report on standard error.
    checkpoint
        Folder (or ``fald.Checkpoint``) to save to. A folder that holds an earlier part of the same
        run is continued, to the same draws as an uninterrupted run.
    journal
        Folder in which ``rounds.jsonl`` grows as the run goes, for ``fald watch``; None: none.

    Returns
    -------
    xarray.DataTree
        Groups ``posterior`` (chain, draw, …), ``sample_stats`` and ``constant_data``; settings in
        the attributes.

    Raises
    ------
    ConfigError, DataError
        If settings or data cannot be used.
    NonFiniteError, Interrupted, StorageError, PrivacyError
        If the run ends early; the draws so far are in the exception's ``tree``.

    Notes
    -----
    Draws follow the posterior only up to a bias that grows with the step size, with K and with the
    differences between clients. R-hat and ESS see mixing, not this bias.

    Examples
    --------
    >>> import numpy as np, fald
    >>> rng = np.random.default_rng(0)
    >>> clients = {"a": rng.normal(1, 1, (30, 1)), "b": rng.normal(1, 1, (10, 1))}
    >>> data = fald.FederatedData.from_arrays(clients)
    >>> tree = fald.sample(0, fald.models.gaussian_location([[1.0]]), data, num_rounds=200,
    ...                    local_steps=5, step_size=1e-3, num_warmup=100, progress=False)
    >>> dict(tree["posterior"].sizes)
    {'chain': 4, 'draw': 100, 'location_dim_0': 1}
    """
    method = _method(
        method,
        local_steps=(local_steps, None),
        step_size=(step_size, None),
        temperature=(temperature, 1.0),
        correlation=(correlation, 0.0),
        noise=(noise, "realised"),
        batch_size=(batch_size, None),
        clip_norm=(clip_norm, None),
    )
    num_rounds = check_count("num-rounds", num_rounds, 1)
    num_chains = check_count("num-chains", num_chains, 1)
    num_warmup = check_count("num-warmup", num_warmup, 0)
    thinning = check_count("thinning", thinning, 1)
    if num_rounds * method.local_steps >= 2**31:
        raise ConfigError(
            f"num-rounds × local-steps must stay below 2^31; got {num_rounds} × {method.local_steps}"
        )
    if num_rounds - num_warmup < thinning:
        raise ConfigError(
            f"no draw would be kept: {num_rounds} rounds, {num_warmup} of them warm-up, thinning {thinning}",
            hint="ask for more rounds or less warm-up",
        )
    if not (participation is None or isinstance(participation, Participation)):
        raise ConfigError(
            f"participation must be fald.full(), with_replacement(S) or without_replacement(S); "
            f"got {participation!r}"
        )
    if num_warmup < method.preparation_rounds:
        raise ConfigError(
            f"{method.name} makes no draws in its first {method.preparation_rounds} rounds; "
            f"got num-warmup {num_warmup}",
            hint=f"set num-warmup to at least {method.preparation_rounds}",
        )
    participation = method.participation(participation)
    participation.check(data.sizes)
    _check_schedule(method, num_rounds)
    key, seed = as_key(rng_key)
    check_model(model, data)
    method = method.prepare(model, data)
    positions = _start(model, initial_position, num_chains)
    secret = None
    if privacy is not None:
        method = method.without_energy()
        if privacy.client_noise == "entropy":
            secret = jnp.asarray(secret_words())
    problem = Problem(key, model, data, method, participation, num_chains, num_warmup, thinning, secret)
    settings = {
        **method.settings(),
        "participation": participation.scheme,
        "num_participants": participation.num_participants,
        "num_chains": num_chains,
        "num_warmup": num_warmup,
        "thinning": thinning,
        "precision": str(float_dtype()),
        "seed": seed,
        "privacy": None if privacy is None else asdict(privacy),
    }
    if isinstance(checkpoint, str | Path):
        checkpoint = Checkpoint(checkpoint)
    elif not (checkpoint is None or isinstance(checkpoint, Checkpoint)):
        raise ConfigError(f"checkpoint must be a folder or a fald.Checkpoint; got {checkpoint!r}")
    description = {} if checkpoint is None else _description(problem, settings, positions)

    def build(records: list[Records], guard: Guard | None = None, costs: Any = None):
        tree = build_tree(problem, records, {**settings, "num_rounds": num_rounds}, guard, costs)
        unstable = loop.step_times_curvature(problem, positions[0], records)
        if unstable is not None:
            tree.attrs["step_times_curvature"] = unstable
        return tree

    notes = as_journal(journal)
    notes.about |= {"method": method.name, "model": model.name, "settings": settings}

    def look(records: list[Records]) -> dict[str, Any]:
        return {} if method.point_estimate else settling(model, records)

    return loop.run(
        problem,
        InProcess() if engine is None else engine,
        positions,
        num_rounds=num_rounds,
        checkpoint=checkpoint,
        description=description,
        progress=progress,
        build=build,
        privacy=privacy,
        journal=notes,
        settling=look,
    )


def _method(method: Method | str | None, **settings: tuple[Any, Any]) -> Method:
    """The method of a run; ``settings`` are what ``sample`` was given and its defaults."""
    given = {name: value for name, (value, default) in settings.items() if value != default}
    if isinstance(method, str):
        return by_name(method, **given)
    if method is None:
        if not {"local_steps", "step_size"} <= set(given):
            raise ConfigError(
                "local-steps and step-size are needed", hint="or pass a method from fald.samplers"
            )
        return fald(**given)
    if given:
        raise ConfigError("settings of the method belong into the method", hint="remove them from sample()")
    return method


def _description(problem: Problem, settings: dict[str, Any], positions: jax.Array) -> dict[str, Any]:
    """What a run is, to recognise it when it resumes."""
    model, data = problem.model, problem.data
    fingerprints = {
        "the data": data.fingerprint(),
        "the starting positions": hashlib.sha256(np.asarray(positions).tobytes()).hexdigest()[:16],
        "the densities of the model": density_probe(model, data),
    }
    step_size = getattr(problem.method, "step_size", None)
    if callable(step_size):
        fingerprints["the step-size schedule"] = _digits(step_size(jnp.asarray(k)) for k in (0, 1, 10, 1000))
    return {
        "settings": {**settings, "model": model.name, "version": __version__},
        "fingerprints": fingerprints,
    }


def density_probe(model: Model, data: FederatedData) -> list[str]:
    """Log prior and log likelihood at a point, which tell models of one name apart.

    The examples are made up, so that nothing of the rows gets into a file.
    """
    theta = model.flat_initial_position + 0.1 * jnp.cos(jnp.arange(model.dim))
    examples = [
        jax.tree.map(lambda a, v=v: jnp.asarray(np.full(a.shape[1:], v, a.dtype)), data.rows) for v in (0, 1)
    ]
    loglikelihood = jax.jit(model.flat_loglikelihood)
    return _digits([model.flat_logprior(theta), *[loglikelihood(theta, example) for example in examples]])


def _digits(values: Iterable[Any]) -> list[str]:
    # so few that they do not depend on the machine
    return [f"{float(v):.4g}" for v in values]


def _check_schedule(method: Method, num_rounds: int) -> None:
    schedule = getattr(method, "step_size", None)
    if not callable(schedule):
        return
    for step in (0, num_rounds * method.local_steps - 1):
        try:
            value = float(np.asarray(schedule(jnp.asarray(step, jnp.int32))))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the step-size schedule gives no number at step {step}: {error}") from error
        if not (np.isfinite(value) and value > 0):
            raise ConfigError(f"the step-size schedule must give numbers > 0; got {value:g} at step {step}")


def as_key(rng_key: jax.Array | int) -> tuple[jax.Array, Any]:
    """A JAX key from a key or a seed, and what to write down of it."""
    if isinstance(rng_key, int | np.integer) and not isinstance(rng_key, bool):
        seed = int(rng_key)
        if not 0 <= seed < 2**63:
            raise ConfigError(f"a seed must be between 0 and 2^63 − 1; got {seed}")
        # both halves: JAX's own key drops the upper one in float32
        return jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)), seed
    if not isinstance(rng_key, jax.Array):
        raise ConfigError(f"rng_key must be a JAX key or an integer seed; got {rng_key!r}")
    key = rng_key if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng_key)
    return key, np.asarray(jax.random.key_data(key)).tolist()


def _start(model: Model, initial_position: Position | None, num_chains: int) -> jax.Array:
    template = model.flat_initial_position
    if initial_position is None:
        return jnp.tile(template, (num_chains, 1))
    structure = jax.tree.structure(model.initial_position)
    given = as_floats(initial_position)
    if jax.tree.structure(given) != structure:
        raise ConfigError("initial-position must have the structure of the model's initial_position")
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(model.initial_position)]
    found = [np.shape(leaf) for leaf in jax.tree.leaves(given)]
    if found == shapes:
        flat = jnp.tile(ravel_pytree(given)[0], (num_chains, 1))
    elif found == [(num_chains, *s) for s in shapes]:
        flat = jax.vmap(lambda p: ravel_pytree(p)[0])(given)
    else:
        raise ConfigError(
            f"initial-position must have shapes {shapes}, or those with {num_chains} chains in front; "
            f"got {found}"
        )
    if not bool(jnp.all(jnp.isfinite(flat))):
        raise ConfigError("initial-position must be finite")
    return flat


def check_model(model: Model, data: FederatedData) -> None:
    """Refuse a model that cannot be evaluated on rows of this data."""
    if model.check_fn is not None and data.present:
        model.check_fn(data)
    example = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], jax.dtypes.canonicalize_dtype(a.dtype)), data.rows
    )
    theta = jax.ShapeDtypeStruct((model.dim,), float_dtype())
    try:
        likelihood = jax.eval_shape(model.flat_loglikelihood, theta, example)
        prior = jax.eval_shape(model.flat_logprior, theta)
    except Exception as error:
        raise DataError(
            f"the model cannot be evaluated on a row of this data: {error}",
            hint="loglikelihood_fn(position, example) gets ONE example: the rows without their leading axis",
        ) from error
    for name, value in (("loglikelihood_fn", likelihood), ("logprior_fn", prior)):
        if value.shape != ():
            raise DataError(
                f"{name} must return one number; it returns an array of shape {value.shape}",
                hint="sum over the parts of one example",
            )
