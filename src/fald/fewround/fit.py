"""``fald.fit``: a posterior in a handful of rounds, with nothing to tune and a verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from fald.checkpoint import Checkpoint, Store
from fald.data import FederatedData
from fald.errors import ConfigError, DiagnosticsError
from fald.fewround.exchange import Exchange, InProcessExchange, Round, Server, drive
from fald.fewround.outcome import Outcome
from fald.fewround.site import REVEALS
from fald.fewround.weights import precision, resample
from fald.journal import MOST_PARAMETERS, Journal, as_journal
from fald.models.base import Model
from fald.participation import Participation
from fald.planner import Goal, plan
from fald.prepare import MAX_DIM
from fald.privacy.guard import Protection
from fald.results import draws_by_row, labels, posterior_groups, reported, site_sizes
from fald.samplers.base import check_count
from fald.sampling import as_key, check_model, density_probe, sample
from fald.threads import one_thread
from fald.version import __version__

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[Any]
FitMethod = Literal["auto", "importance", "corrected", "langevin"]

ACCURACIES = {"high": 0.05, "medium": 0.1}
NAMES = {
    "importance": "adaptive importance sampling",
    "split-hmc": "adaptive importance sampling, then split-HMC",
    "corrected-langevin": "corrected federated Langevin dynamics with a certified end",
    "langevin": "federated averaging Langevin dynamics (FA-LD)",
}
_NUM_CHAINS, _NUM_DRAWS = 4, 4000
_MOST_SCOPE = {"one mode", "mode", "tails", "explorers"}  # with these split-HMC would not help
_HMC_ROUNDS = 24


@one_thread
def fit(
    rng_key: jax.Array | int,
    model: Model,
    data: FederatedData,
    *,
    accuracy: str | float = "high",
    max_rounds: int = 12,
    method: FitMethod = "auto",
    curvature: bool = True,
    batch_size: int | None = None,
    participation: Participation | None = None,
    privacy: Protection | None = None,
    sampler: dict[str, Any] | None = None,
    exchange: Exchange | None = None,
    progress: bool = True,
    checkpoint: str | Path | Checkpoint | None = None,
    journal: str | Path | Journal | None = None,
) -> xr.DataTree:
    """Draw from the joint posterior of all clients in a handful of rounds, without settings.

    Parameters
    ----------
    rng_key
        A JAX key, or an integer seed. The same key gives the same draws.
    model, data
        The model, and the rows of each client.
    accuracy
        ``"high"``: every mean within 0.05 posterior sds and every sd within 5%, at 95% confidence for all
        together; ``"medium"``: 0.1; or a number.
    max_rounds
        Rounds to spend on importance sampling or corrected Langevin dynamics. Where importance sampling does
        not reach the accuracy, ``"auto"`` goes on with split-HMC for at most 24 further rounds.
    method
        ``"importance"``: adaptive importance sampling; ``"corrected"``: corrected Langevin dynamics;
        ``"langevin"``: plain FA-LD with planned settings; ``"auto"`` chooses by what the study allows, and
        the result says why.
    curvature
        Whether Hessians may leave a site. Without them gradients at many parameters are asked for instead,
        which describe the same curvature less directly.
    batch_size, participation, privacy
        As in ``fald.sample``; any of them rules out all but plain FA-LD.
    sampler
        Further arguments of ``fald.sample`` for plain FA-LD. A private run needs ``num_rounds``,
        ``local_steps``, ``step_size`` and ``clip_norm`` here, because choosing them from the rows would leak.
    exchange
        How sites are reached; in this process by default.
    progress
        Report on standard error.
    checkpoint
        Folder to save every round to. A folder that holds the first rounds of the same run is continued.
    journal
        Folder in which ``rounds.jsonl`` grows as the run goes, for ``fald watch``; None: none.

    Returns
    -------
    xarray.DataTree
        As ``fald.sample`` gives it. ``posterior`` has equally weighted draws, ``sample_stats`` the importance
        weight of each (``log_weight``), ``rounds`` what every round did and sent. The attributes ``verdict``,
        ``reason`` and ``advice`` say whether the accuracy was reached, why not, and what to do next.

    Raises
    ------
    ConfigError, DataError
        If settings or data cannot be used.
    DiagnosticsError
        If the method ended without any draw.
    Interrupted, StorageError
        If the run ends early; finished rounds are in the checkpoint.

    Notes
    -----
    Every upload is a sum over a site's rows, and only the sum over sites is used. Nothing here is
    differentially private, and sums over few rows describe these rows: the attribute ``exposed`` names such
    sites.

    Examples
    --------
    >>> import numpy as np, fald
    >>> rng = np.random.default_rng(0)
    >>> clients = {"a": rng.normal(1, 1, (30, 1)), "b": rng.normal(1, 1, (10, 1))}
    >>> data = fald.FederatedData.from_arrays(clients)
    >>> tree = fald.fit(0, fald.models.gaussian_location([[1.0]]), data, progress=False)
    >>> tree.attrs["verdict"], int(tree.attrs["rounds_done"])
    ('reached', 3)
    """
    tolerance = _tolerance(accuracy)
    max_rounds = check_count("max-rounds", max_rounds, 3)
    check_model(model, data)
    chosen, why = choose(
        model,
        method,
        batch_size=batch_size,
        participation=participation,
        privacy=privacy,
        curvature=curvature,
    )
    if chosen == "langevin":
        given = {"batch_size": batch_size, "participation": participation, **(sampler or {})}
        how = {"progress": progress, "checkpoint": checkpoint, "journal": journal}
        return _langevin(rng_key, model, data, tolerance, given, privacy, why, how)
    if sampler:
        raise ConfigError("'sampler' goes with plain FA-LD", hint="use fald.sample, or method='langevin'")
    _, seed = as_key(rng_key)
    number = (
        seed if isinstance(seed, int) else int.from_bytes(np.asarray(seed, np.uint32).tobytes()[:8], "little")
    )
    settings = {
        "method": chosen,
        "accuracy": tolerance,
        "max_rounds": max_rounds,
        "curvature": curvature,
        "seed": seed,
    }
    store = None
    if checkpoint is not None:
        folder = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint
        store = Store(folder, _description(model, data, settings))
        store.open()
    trace: list[dict[str, Any]] = []
    server = _server(chosen, method, model, number, tolerance, max_rounds, curvature, trace)
    notes = as_journal(journal)
    most = max_rounds + (_HMC_ROUNDS if method == "auto" else 0)
    notes.about |= {"method": chosen, "model": model.name, "settings": settings, "rounds_total": max_rounds}
    notes.about |= {"most_rounds": most}
    outcome, rounds = drive(
        server,
        InProcessExchange(model, data) if exchange is None else exchange,
        store=store,
        note=_teller(progress, trace),
        journal=notes,
        describe=_describer(model, trace),
    )
    if not len(outcome.positions):
        raise DiagnosticsError(f"no posterior: {outcome.reason}", hint=outcome.advice)
    tree = _tree(model, data, outcome, rounds, settings, number)
    tree.attrs["chosen"] = why
    return tree


def choose(
    model: Model,
    method: FitMethod = "auto",
    *,
    batch_size: int | None = None,
    participation: Participation | None = None,
    privacy: Protection | None = None,
    curvature: bool = True,
) -> tuple[str, str]:
    """Which method ``fald.fit`` uses, and why, in a sentence.

    Raises
    ------
    ConfigError
        If the method that was asked for cannot do what was asked of it.

    Examples
    --------
    >>> import fald
    >>> choose(fald.models.logistic_regression(3), batch_size=10)
    ('langevin', 'plain FA-LD, because batches of rows give no exact likelihoods')
    """
    if method not in ("auto", "importance", "corrected", "langevin"):
        raise ConfigError(
            f"method must be auto, importance, corrected or langevin; got {method!r}", hint="auto is usual"
        )
    obstacles = {
        "sums without noise give no differential privacy": privacy is not None,
        "batches of rows give no exact likelihoods": batch_size is not None,
        "not all sites take part in every round": participation is not None
        and participation.scheme != "full",
        f"the model has {model.dim} parameters, more than {MAX_DIM}": model.dim > MAX_DIM,
    }
    found = next((sentence for sentence, holds in obstacles.items() if holds), "")
    if method == "langevin":
        return "langevin", "plain FA-LD, as asked for"
    if found and method != "auto":
        raise ConfigError(f"method {method!r} cannot be used: {found}", hint="use method='langevin'")
    if found:
        return "langevin", f"plain FA-LD, because {found}"
    if method == "corrected":
        if not curvature:
            raise ConfigError("method 'corrected' needs Hessians", hint="use method='importance'")
        return "corrected", "corrected Langevin dynamics, as asked for"
    if method == "importance":
        return "importance", "adaptive importance sampling, as asked for"
    kind = "" if curvature else ", by gradients because Hessians may not leave"
    return "importance", (
        f"adaptive importance sampling, because likelihoods are exact, all sites take part and "
        f"{model.dim} parameters are few{kind}"
    )


def _tolerance(accuracy: str | float) -> float:
    if isinstance(accuracy, str):
        if accuracy not in ACCURACIES:
            raise ConfigError(
                f"accuracy must be {' or '.join(map(repr, ACCURACIES))} or a number; got {accuracy!r}"
            )
        return ACCURACIES[accuracy]
    if isinstance(accuracy, bool) or not 0.005 <= accuracy <= 0.5:
        raise ConfigError(f"accuracy must be between 0.005 and 0.5 posterior sds; got {accuracy!r}")
    return float(accuracy)


def _server(
    chosen: str, asked: str, model: Model, seed: int, tolerance: float, max_rounds: int, curvature: bool,
    trace: list[dict[str, Any]],
) -> Server[Outcome]:  # fmt: skip
    """The server of a method; split-HMC follows where importance sampling had one mode and too few draws."""
    # here, so that a program which never fits need not load them
    from fald.fewround.corrected import corrected_langevin
    from fald.fewround.importance import importance_sampling
    from fald.fewround.learned import split_hmc
    from fald.fewround.proposal import cholesky, overall

    report = _report(model)
    common: dict[str, Any] = {"seed": seed, "tolerance": tolerance, "report": report, "trace": trace}
    if chosen == "corrected":
        return (yield from corrected_langevin(model, max_rounds=max_rounds, **common))
    outcome, current = yield from importance_sampling(
        model, max_rounds=max_rounds, curvature=curvature, **common
    )
    if outcome.reached or asked != "auto" or _MOST_SCOPE & set(outcome.failed):
        return outcome
    mean, covariance = overall(current)
    later = yield from split_hmc(model, mean, cholesky(covariance), max_rounds=_HMC_ROUNDS, **common)
    unlearned = "split-HMC could not learn the posterior"
    return later or replace(outcome, reason=f"{outcome.reason}; {unlearned}")


def _report(model: Model) -> Callable[[Array], Array] | None:
    """Reported quantities of positions (C, d) as columns; None where they are the position itself."""
    if model.constrain_fn is None:
        return None

    def columns(positions: Array) -> Array:
        with jax.enable_x64(True):
            values = reported(model, np.asarray(positions, np.float64)).values()
            return np.concatenate([np.asarray(v, float).reshape(len(positions), -1) for v in values], axis=1)

    return columns


def _description(model: Model, data: FederatedData, settings: dict[str, Any]) -> dict[str, Any]:
    """What a run is, to recognise it when it resumes."""
    return {
        "settings": {**settings, "model": model.name, "version": __version__},
        "fingerprints": {
            "the data": data.fingerprint(),
            "the densities of the model": density_probe(model, data),
        },
    }


def _teller(progress: bool, trace: list[dict[str, Any]]) -> Callable[[int], None]:
    def tell(number: int) -> None:
        if not progress:
            return
        row = trace[number - 1] if number <= len(trace) else {"draws": 0, "khat": np.nan}
        parts = [f"{row['draws']:,} draws"] if row["draws"] else ["asking"]
        parts += [f"k-hat {row['khat']:.2f}, ESS {row['ess']:,.0f}"] if np.isfinite(row["khat"]) else []
        parts += [f"{row['accepted']:.0%} accepted"] if "accepted" in row else []
        print(f"round {number}: {', '.join(parts)}", file=sys.stderr, flush=True)

    return tell


def _describer(model: Model, trace: list[dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """What the journal is told of a round: its draws and weights, and where the posterior seems to be."""
    names = model.parameter_names if model.constrain_fn is not None else labels(model)

    def describe(number: int) -> dict[str, Any]:
        if number > len(trace):
            return {}
        row = trace[number - 1]
        said = {"draws": sum(r["draws"] for r in trace[:number]), "ess": row["ess"], "k_hat": row["khat"]}
        if "mean" not in row:
            return said
        rows = list(zip(names, row["mean"], row["sd"]))[:MOST_PARAMETERS]
        return {**said, "intervals": {name: [m, m - 1.96 * s, m + 1.96 * s] for name, m, s in rows}}

    return describe


def _tree(
    model: Model, data: FederatedData, outcome: Outcome, rounds: Sequence[Round], settings: dict[str, Any],
    seed: int,
) -> xr.DataTree:  # fmt: skip
    import xarray as xr

    with jax.enable_x64(True):
        groups, taken = _draws(model, outcome, seed)
        exact = _precision_of(model, outcome)
    base = {k: groups["posterior"].coords[k].values for k in ("chain", "draw")}
    with np.errstate(divide="ignore"):
        weights = np.log(outcome.weights)[taken]
    groups["sample_stats"] = xr.Dataset({"log_weight": (["chain", "draw"], weights)}, base)
    groups["constant_data"] = site_sizes(data.names, data.sizes)
    trace = [*outcome.trace, *[{}] * (len(rounds) - len(outcome.trace))]
    columns = {
        name: (["round"], np.array([float(row.get(name, np.nan)) for row in trace]))
        for name in ("draws", "khat", "ess", "newton", "explorers")
    }
    missing = np.full(model.dim, np.nan)
    for name in ("mean", "sd"):
        columns[name] = (["round", "parameter"], np.array([row.get(name, missing) for row in trace]))
    columns["bytes_down"] = (["round"], np.array([float(r.bytes_down) for r in rounds]))
    columns["bytes_up"] = (["round"], np.array([float(r.bytes_up) for r in rounds]))
    columns["uploads"] = (["round"], np.array([" ".join(r.kinds) for r in rounds], dtype=str))
    groups["rounds"] = xr.Dataset(
        columns, {"round": np.arange(1, len(rounds) + 1), "parameter": model.parameter_names}
    )
    tree = xr.DataTree.from_dict(groups)
    kinds = sorted({kind for r in rounds for kind in r.kinds}, key=list(REVEALS).index)
    tree.attrs = {
        "inference_library": "fald",
        "inference_library_version": __version__,
        "method": NAMES[outcome.method],
        "model": model.name,
        "point_estimate": 0,
        "pseudo_posterior": 0,
        "rounds_done": len(rounds),
        "settings": json.dumps({**settings, "num_chains": len(base["chain"])}),
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "advice": outcome.advice,
        "khat": float(outcome.khat),
        "effective_draws": float(outcome.ess),
        "num_proposed": len(outcome.positions),
        "precision": json.dumps(exact),
        "modes": json.dumps(outcome.modes.tolist()),
        "exposed": json.dumps(exposed(data, model.dim)),
        "reveals": json.dumps([REVEALS[kind] for kind in kinds]),
        "uploads": "sums over sites",
        "data": data.fingerprint(),
    }
    return tree


def exposed(data: FederatedData, dim: int) -> list[str]:
    """Sites with so few rows that sums over them describe single rows.

    Examples
    --------
    >>> import fald
    >>> exposed(fald.datasets.load("indo"), 9)
    ['Case']
    """
    return [name for name, size in zip(data.names, data.sizes) if size <= max(dim, 5)]


def _draws(model: Model, outcome: Outcome, seed: int) -> tuple[dict[str, xr.Dataset], Array]:
    """Equally weighted draws in chains, and which of the outcome's draws each is."""
    rng = np.random.Generator(np.random.Philox([seed & (2**64 - 1), 3]))
    if outcome.weighted:
        taken = resample(outcome.weights, _NUM_CHAINS * _NUM_DRAWS, float(rng.random()))
    else:
        taken = np.arange(len(outcome.positions) // _NUM_CHAINS * _NUM_CHAINS)
    taken = rng.permutation(taken).reshape(_NUM_CHAINS, -1)
    return posterior_groups(model, outcome.positions[taken]), taken


def _precision_of(model: Model, outcome: Outcome) -> dict[str, dict[str, float]]:
    """Monte-Carlo error and effective sample size of every reported mean, from the weights."""
    import xarray as xr

    tree = xr.DataTree.from_dict(posterior_groups(model, outcome.positions[None]))
    rows = {label: draws[0] for label, (_, draws) in draws_by_row(tree).items()}
    values = np.stack(list(rows.values()), axis=1)
    if outcome.weighted:
        known = precision(values, outcome.weights)
        spread = np.sqrt(outcome.weights @ (values - outcome.weights @ values) ** 2)
        errors = known.mean
    else:
        spread = values.std(axis=0)
        errors = np.full(values.shape[1], len(values) ** -0.5)
    most = _NUM_CHAINS * _NUM_DRAWS  # a summary cannot know more than the draws that are kept
    return {
        label: {"mcse": float(e * s), "ess": float(min(e**-2 if e > 0 else np.inf, outcome.ess, most))}
        for label, e, s in zip(rows, errors, spread)
    }


def _langevin(
    rng_key, model: Model, data: FederatedData, tolerance: float, given: dict[str, Any],
    privacy: Protection | None, why: str, how: dict[str, Any],
) -> xr.DataTree:  # fmt: skip
    """Plain FA-LD: planned from the rows, or, for a private run, with settings that no row has shaped."""
    given = {name: value for name, value in given.items() if value is not None}
    if privacy is None:
        if not data.present:
            raise ConfigError(
                "settings of plain FA-LD are planned from the rows, which are at the sites",
                hint="give the study a [sampler] section",
            )
        shaping = ("temperature", "correlation", "participation", "noise", "batch_size")
        fixed = {name: given.pop(name) for name in shaping if name in given}
        goal = Goal(bias=tolerance, sd_error=tolerance, num_chains=given.pop("num_chains", 16))
        given = {**plan(model, data, goal=goal, **fixed).arguments(), **given}
    else:
        missing = [name for name in ("num_rounds", "local_steps", "step_size") if name not in given]
        if missing:
            raise ConfigError(
                f"a private run needs sampler settings: {', '.join(m.replace('_', '-') for m in missing)}",
                hint="choosing them from the rows would leak; 'fald privacy calibrate' searches a budget",
            )
    tree = sample(rng_key, model, data, **given, privacy=privacy, **how)
    tree.attrs |= {
        "verdict": "not certified",
        "reason": "plain FA-LD has a bias that no diagnostic sees; its settings were planned for the wanted "
        "accuracy"
        if privacy is None
        else "the chains of a private run cannot be checked against the rows",
        "advice": "look at R-hat and ESS, and at 'fald diagnose' for the predicted bias",
        "chosen": why,
    }
    return tree
