"""``fald.sample``: put a problem together, run it, return the draws."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fald.core.compiled import keep_compiled
from fald.core.errors import ConfigError
from fald.core.keys import as_key
from fald.core.types import Position, StepSize, as_floats, float_dtype
from fald.langevin.chains import Asked, Chains
from fald.langevin.divergence import StepCheck, check_step, step_at_draws
from fald.langevin.draws import build_tree
from fald.langevin.engine import Assignment, Engine
from fald.langevin.fald import FALD, fald, private
from fald.langevin.guard import Guard
from fald.langevin.inprocess import InProcess
from fald.langevin.method import Method
from fald.langevin.noise import NoiseScale
from fald.langevin.registry import by_name, participants
from fald.langevin.safety import check_noise, farthest
from fald.privacy.protection import Protection, secret_words
from fald.problem.data import FederatedData
from fald.problem.model import Model, check_model
from fald.problem.remarks import remarks
from fald.results.diagnostics import STEP_LIMIT
from fald.results.positions import positions as found_positions
from fald.results.sinks import Sink
from fald.results.summary import settling
from fald.runtime import loop
from fald.runtime.checkpoint import Checkpoint, as_checkpoint
from fald.runtime.identity import array_hash, digits, identity
from fald.runtime.journal import Journal, as_journal
from fald.runtime.records import Records
from fald.settings.fald import Preconditioner, checked, method_settings
from fald.settings.participation import Participation, check_participation
from fald.settings.schedules import Phase, check_schedule, in_phases

if TYPE_CHECKING:
    import xarray as xr


def sample(
    rng_key: jax.Array | int,
    model: Model,
    data: FederatedData,
    *,
    num_rounds: int | None = None,
    local_steps: int | None = None,
    step_size: StepSize | None = None,
    temperature: float = 1.0,
    correlation: float = 0.0,
    participation: Participation | None = None,
    noise: NoiseScale = "realised",
    batch_size: int | None = None,
    clip_norm: float | None = None,
    momentum: float = 0.0,
    preconditioner: Preconditioner | None = None,
    num_chains: int = 4,
    num_warmup: int = 0,
    thinning: int = 1,
    phases: Sequence[Phase] | None = None,
    initial_position: Position | xr.DataTree | None = None,
    method: Method | str | None = None,
    privacy: Protection | None = None,
    engine: Engine | None = None,
    callback: Callable[[int, Position, dict[str, Any]], Any] | None = None,
    sinks: Sequence[Sink] = (),
    step_check: bool = True,
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
        Rounds in total, warm-up included. Needed unless there are ``phases``.
    local_steps
        K, steps between synchronisations.
    step_size
        η, a schedule of ``fald.schedules``, or a function from the step number to η.
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
    momentum
        What a local step keeps of the velocity, from 0 (FA-LD) to below 1: underdamped Langevin dynamics
        within a round. Velocities are drawn anew in every round and never sent, so take K of 1/(1 − momentum)
        and more. The step size means the same: it is stable below 2/curvature, and one gradient goes up to
        (1 + momentum)/(1 − momentum) times as far. Not in private runs.
    preconditioner
        ``"rms"``: steps are scaled by M = s̄/(s + s̄/10), where s is the root mean square of each derivative of
        the rows' log likelihoods at the start and s̄ that of all. Clients send sums of squares once, before
        the first round; M then stays, so that the target does. Not in private runs, nor over a secure sum.
    num_chains, num_warmup, thinning
        Chains; rounds thrown away at the start; rounds per kept draw after that.
    phases
        ``fald.schedules.Phase``, one after the other, instead of ``num_rounds``, ``step_size``,
        ``temperature``, ``num_warmup`` and ``thinning``: FedAvg as a start, cyclical SG-MCMC, annealing.
        Not in private runs.
    initial_position
        Where chains start: a position, one with a leading chain axis, or a result, such as one of FedAvg
        (``temperature=0``), whose chains are then gone on from. Default: the model's.
    method
        A method from ``fald.samplers`` instead of FA-LD; then ``local_steps``, ``step_size``,
        ``temperature``, ``correlation``, ``noise``, ``batch_size``, ``clip_norm``, ``momentum`` and
        ``preconditioner`` are the method's own.
        Or its name, such as ``"qlsd"``, which takes those of them that it has.
    privacy
        ``fald.privacy.Protection``: account for the run, stop it within a budget, draw client noise
        from entropy. Each chain counts.
    engine
        Where clients run; in this process by default.
    callback
        ``callback(round, positions, stats)`` after every kept draw, with the position of each chain, chains
        in front, and ``energy`` and ``drift`` unless the run is private. If it returns True the run ends.
    sinks
        From ``fald.sinks``, or of your own: where draws go as the run goes. The result then has the last one
        only, so that memory does not grow.
    step_check
        Compare the step size with the largest curvature of some clients before the first round and at the
        mean of the draws, each in about a second at most when it is compiled, and warn where it is too large.
        The rows with the largest and smallest labels are looked at as well. False: do not.
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
    keep_compiled()
    kept = None
    if phases is not None:
        phases = list(phases)
        taken = (num_rounds is None, step_size is None, temperature == 1, num_warmup == 0, thinning == 1)
        if method is not None or not all(taken):
            raise ConfigError(
                "phases have their own rounds, step sizes, temperatures and draws",
                hint="leave out num-rounds, step-size, temperature, num-warmup, thinning and method",
            )
        step_size, temperature, kept = in_phases(phases, checked("local_steps", local_steps))
        num_rounds = sum(phase.rounds for phase in phases)
    if num_rounds is None:
        raise ConfigError("num-rounds is needed", hint="or phases")
    method = _method(
        method,
        local_steps=local_steps,
        step_size=step_size,
        temperature=temperature,
        correlation=correlation,
        noise=noise,
        batch_size=batch_size,
        clip_norm=clip_norm,
        momentum=momentum,
        preconditioner=preconditioner,
    )
    num_rounds, num_chains = int(checked("num_rounds", num_rounds)), checked("num_chains", num_chains)
    num_warmup, thinning = checked("num_warmup", num_warmup), checked("thinning", thinning)
    about = method.about
    if num_rounds * about.local_steps >= 2**31:
        raise ConfigError(
            f"num-rounds × local-steps must stay below 2^31; got {num_rounds} × {about.local_steps}"
        )
    if kept is None and num_rounds - num_warmup < thinning:
        raise ConfigError(
            f"no draw would be kept: {num_rounds} rounds, {num_warmup} of them warm-up, thinning {thinning}",
            hint="ask for more rounds or less warm-up",
        )
    if num_warmup < about.preparation_rounds:
        raise ConfigError(
            f"{about.name} makes no draws in its first {about.preparation_rounds} rounds; "
            f"got num-warmup {num_warmup}",
            hint=f"set num-warmup to at least {about.preparation_rounds}",
        )
    participation = participants(method, check_participation(participation))
    participation.check(data.sizes)
    if callable(about.step_size):
        check_schedule(about.step_size, num_rounds * about.local_steps - 1)
    key, seed = as_key(rng_key)
    check_model(model, data)
    looked = model if step_check else None  # that asks for log likelihoods before the first round, too
    for said in remarks(data, about.batch_size, model=looked, private=privacy is not None):
        warnings.warn(said, stacklevel=2)
    engine = InProcess() if engine is None else engine
    if data.read is not None and not (
        type(method) is FALD and method.batch_size is not None and isinstance(engine, InProcess)
    ):
        raise ConfigError(
            "rows that a function reads are for FA-LD in batches, with all clients in this process",
            hint="set batch-size, leave out method and engine; or give arrays, which may be mapped",
        )
    positions = _start(model, initial_position, num_chains)
    answers: dict[str, Any] = {}
    if about.reveals.preparation:
        answers = engine.gather(method, _started_at(model, initial_position, positions), data)
    method = method.prepare(model, data, answers)
    secret = None
    if privacy is not None:
        method = private(method)
        shares, largest = data.sizes / data.num_rows, farthest(model, method, positions)
        for share in (float(shares.min()), float(shares.max())):
            entering = share if participation.scheme == "full" else 1 / (participation.num_participants or 1)
            check_noise(method, share, entering, largest)
        if privacy.client_noise == "entropy":
            secret = jnp.asarray(secret_words())
    counts = num_chains, num_warmup, thinning
    problem = Assignment(key, model, data, method, participation, *counts, secret, kept)
    settings = {
        **method.about.settings,
        "participation": participation.scheme,
        "num_participants": participation.num_participants,
        "num_chains": num_chains,
        "num_warmup": num_warmup,
        "thinning": thinning,
        "precision": str(float_dtype()),
        "seed": seed,
        "privacy": None if privacy is None else asdict(privacy),
        **({} if phases is None else {"phases": [asdict(phase) for phase in phases]}),
    }
    if callback is not None and not _takes_three(callback):
        raise ConfigError(f"callback must be a function (round, positions, stats) -> stop; got {callback!r}")
    if not (isinstance(sinks, Sequence) and all(isinstance(sink, Sink) for sink in sinks)):
        raise ConfigError(f"sinks must come from fald.sinks, in a list; got {sinks!r}")
    if len({id(sink) for sink in sinks}) < len(sinks):
        raise ConfigError("the same sink is given twice, and would count every draw twice")
    checkpoint = as_checkpoint(checkpoint)
    description = {} if checkpoint is None else _description(problem, settings, positions)

    found = [_checked_step(problem, num_rounds, positions[0])] if step_check else []

    def build(records: list[Records], guard: Guard | None = None, costs: Any = None):
        told = {**settings, "num_rounds": num_rounds}
        tree = build_tree(problem, records, told, guard=guard, costs=costs)
        products = [c.product for c in (*found, *[step_at_draws(problem, records) for _ in found]) if c]
        if products:
            tree.attrs["step_times_curvature"] = max(products)
        if isinstance(engine, InProcess):
            tree.attrs["layout"] = engine.layout(problem)
        if sinks:
            tree.attrs["sinks"] = ", ".join(type(sink).__name__ for sink in sinks)
        return tree

    notes = as_journal(journal)
    notes.about |= {"method": about.name, "model": model.name, "settings": settings}
    chains = Chains(problem, engine, Asked(positions, num_rounds, privacy, tuple(sinks), callback), build)
    if found and found[0] is not None:
        chains.remark = f", step × curvature {found[0].product:.2g}"
    if not about.point_estimate:
        chains.settling = functools.partial(settling, model)
    try:
        loop.run(chains, checkpoint=checkpoint, description=description, journal=notes, progress=progress)
    finally:
        if isinstance(engine, InProcess):
            engine.close()
    return chains.draws()


def _method(method: Method | str | None, **settings: Any) -> Method:
    """The method of a run; ``settings`` are what ``sample`` was given."""
    defaults = method_settings()
    given = {name: value for name, value in settings.items() if value != defaults[name]}
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


def _takes_three(callback: Any) -> bool:
    """Whether a function can be called with three values, as far as it says what it takes."""
    try:
        inspect.signature(callback).bind(0, None, None)
    except TypeError:
        return False
    except ValueError:  # some functions do not say
        pass
    return True


def _started_at(model: Model, initial_position: Any, positions: jax.Array) -> Model:
    """The model with the first chain's start for its own, where one was given."""
    return model if initial_position is None else replace(model, initial_position=model.unravel(positions[0]))


def _checked_step(problem: Assignment, num_rounds: int, start: jax.Array) -> StepCheck | None:
    """What the step size is beside the curvature at the start, said aloud where it is too large."""
    found = check_step(problem, num_rounds, start, np.arange(problem.data.num_clients))
    # an optimiser only has to be stable
    advice = "" if found is None else found.advice(2.0 if problem.method.about.point_estimate else STEP_LIMIT)
    if advice:
        warnings.warn(advice, stacklevel=3)
    return found


def _description(problem: Assignment, settings: dict[str, Any], positions: jax.Array) -> dict[str, Any]:
    """What a run is, to recognise it when it resumes."""
    others: dict[str, Any] = {"the starting positions": array_hash(positions)}
    step_size = problem.method.about.step_size
    if callable(step_size):
        others["the step-size schedule"] = digits(step_size(jnp.asarray(k)) for k in (0, 1, 10, 1000))
    return identity(problem.model, problem.data, settings, others)


def _start(model: Model, initial_position: Any, num_chains: int) -> jax.Array:
    if initial_position is None:
        return jnp.tile(model.flat_initial_position, (num_chains, 1))
    if hasattr(initial_position, "children"):  # a result: where its chains ended
        return jax.vmap(lambda p: ravel_pytree(p)[0])(
            as_floats(found_positions(initial_position, model).last(num_chains))
        )
    if jax.tree.structure(initial_position) != jax.tree.structure(model.initial_position):
        raise ConfigError(
            "initial-position must have the structure of the model's initial_position, or be a result of "
            f"fald.sample; got a {type(initial_position).__name__}"
        )
    given = as_floats(initial_position)
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
