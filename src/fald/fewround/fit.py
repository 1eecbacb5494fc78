"""A posterior in a handful of rounds: which server asks, what is told of it, and the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fald.calculus.sums import prior_values
from fald.core.errors import ConfigError, DiagnosticsError
from fald.core.keys import as_key
from fald.core.threads import one_thread
from fald.core.version import __version__
from fald.fewround.exchange import Exchange, InProcessExchange, Questions, Round, Server
from fald.fewround.methods import FIT_METHODS, NAMES, FitMethod
from fald.fewround.outcome import Outcome
from fald.fewround.site import REVEALS
from fald.fewround.weights import keep, precision
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.results.kinds import FEW_ROUND
from fald.results.tree import draws_by_row, labels, posterior_groups, reported, site_sizes
from fald.runtime import loop
from fald.runtime.checkpoint import Checkpoint, as_checkpoint
from fald.runtime.identity import identity
from fald.runtime.journal import MOST_PARAMETERS, Journal, as_journal

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[Any]

MAX_DIM = 1000  # parameters up to which few rounds are enough; their matrices take memory
ACCURACIES = {"high": 0.05, "medium": 0.1}
_NUM_CHAINS, _NUM_DRAWS = 4, 4000
# where split-HMC is no help
_MOST_SCOPE = {"concavity", "one mode", "mode", "funnel", "tails", "explorers", "numbers"}
_HMC_ROUNDS = 24
_MOST_LEARNED = 200  # parameters up to which split-HMC learns a posterior in minutes


class FewRoundSettings(NamedTuple):
    """What a few-round run is to do.

    Attributes
    ----------
    method
        ``"importance"``, or ``"corrected"``.
    tolerance
        Wanted errors of means and sds, in posterior sds.
    max_rounds
        Rounds to spend on the method.
    curvature
        Whether Hessians may leave a site.
    go_on
        Whether split-HMC follows where importance sampling does not get there.
    """

    method: str
    tolerance: float
    max_rounds: int
    curvature: bool
    go_on: bool

    @property
    def most_rounds(self) -> int:
        """Rounds at most, those of split-HMC included."""
        return self.max_rounds + (_HMC_ROUNDS if self.go_on else 0)

    def plain(self, seed: Any) -> dict[str, Any]:
        """Settings as plain values, for the record."""
        return {
            "method": self.method,
            "accuracy": self.tolerance,
            "max_rounds": self.max_rounds,
            "curvature": self.curvature,
            "seed": seed,
        }


@one_thread
def few_rounds(
    rng_key: jax.Array | int,
    model: Model,
    data: FederatedData,
    settings: FewRoundSettings,
    *,
    exchange: Exchange | None = None,
    progress: bool = True,
    checkpoint: str | Path | Checkpoint | None = None,
    journal: str | Path | Journal | None = None,
) -> xr.DataTree:
    """Run a few-round method; ``fald.fit`` says what the arguments and the result are."""
    _, seed = as_key(rng_key)
    plain = settings.plain(seed)
    checkpoint = as_checkpoint(checkpoint)
    told = _Told(model)
    questions = Questions(
        server_of(settings, model, _number(seed), told.trace),
        InProcessExchange(model, data) if exchange is None else exchange,
        (settings.max_rounds, settings.most_rounds),
        told,
    )
    notes = as_journal(journal)
    notes.about |= {"method": settings.method, "model": model.name, "settings": plain}
    notes.about |= {"most_rounds": settings.most_rounds}
    loop.run(
        questions,
        checkpoint=checkpoint,
        description={} if checkpoint is None else identity(model, data, plain),
        journal=notes,
        progress=progress,
    )
    outcome = questions.outcome
    assert outcome is not None
    if not len(outcome.positions):
        raise DiagnosticsError(f"no posterior: {outcome.reason}", hint=outcome.advice)
    return _tree(model, data, (outcome, questions.rounds), plain)


def _number(seed: Any) -> int:
    """A seed, or the words of a key, as one number."""
    return (
        seed if isinstance(seed, int) else int.from_bytes(np.asarray(seed, np.uint32).tobytes()[:8], "little")
    )


def tolerance_of(accuracy: str | float) -> float:
    """The errors that an accuracy allows, in posterior sds, or an error that says what may be asked for."""
    if isinstance(accuracy, str):
        if accuracy not in ACCURACIES:
            raise ConfigError(
                f"accuracy must be {' or '.join(map(repr, ACCURACIES))} or a number; got {accuracy!r}"
            )
        return ACCURACIES[accuracy]
    if isinstance(accuracy, bool) or not 0.005 <= accuracy <= 0.5:
        raise ConfigError(f"accuracy must be between 0.005 and 0.5 posterior sds; got {accuracy!r}")
    return float(accuracy)


def choose(model: Model, method: FitMethod = "auto", *, curvature: bool = True) -> tuple[str, str]:
    """Which method ``fald.fit`` uses, and why, in a sentence.

    Raises
    ------
    ConfigError
        If the method that was asked for cannot do what was asked of it.

    Examples
    --------
    >>> import fald
    >>> choose(fald.models.logistic_regression(2000))
    ('fa-ld', 'plain FA-LD, because the model has 2001 parameters, more than 1000')
    """
    if method not in FIT_METHODS:
        raise ConfigError(
            f"method must be one of {', '.join(FIT_METHODS)}; got {method!r}", hint="auto is usual"
        )
    if method == "fa-ld":
        return "fa-ld", "plain FA-LD, as asked for"
    if model.dim > MAX_DIM or model.takes_key:
        found = f"the model has {model.dim} parameters, more than {MAX_DIM}"
        found = "its log likelihood draws at random" if model.takes_key else found
        if method != "auto":
            raise ConfigError(f"method {method!r} cannot be used: {found}", hint="use method='fa-ld'")
        return "fa-ld", f"plain FA-LD, because {found}"
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


def few_round_settings(
    model: Model, *, accuracy: str | float, max_rounds: int, method: FitMethod, curvature: bool
) -> FewRoundSettings:
    """What ``fald.fit`` with these arguments does, where it takes few rounds.

    Raises
    ------
    ConfigError
        If it takes none, or cannot do what was asked of it.
    """
    chosen, why = choose(model, method, curvature=curvature)
    if chosen == "fa-ld":
        raise ConfigError(f"no few-round method: {why}", hint="give the study a [sampler] section")
    return FewRoundSettings(chosen, tolerance_of(accuracy), max_rounds, curvature, go_on=method == "auto")


def server_of(
    settings: FewRoundSettings, model: Model, seed: int, trace: list[dict[str, Any]]
) -> Server[Outcome]:
    """The server of a method; split-HMC follows where importance sampling had one mode and too few draws.

    It is deterministic: whoever knows settings, model, seed and the sums of the rounds so far knows what it
    asks next. A site runs it as well, and answers nothing else.
    """
    # each method where it is used: every process of a federation would load what it may never need
    from fald.fewround.importance import importance_sampling

    report = _report(model)
    common: dict[str, Any] = {"seed": seed, "tolerance": settings.tolerance, "report": report, "trace": trace}
    if settings.method == "corrected":
        from fald.fewround.corrected import corrected_langevin

        return (yield from corrected_langevin(model, max_rounds=settings.max_rounds, **common))
    outcome, current = yield from importance_sampling(
        model, max_rounds=settings.max_rounds, curvature=settings.curvature, **common
    )
    if outcome.reached or not settings.go_on or _MOST_SCOPE & set(outcome.failed):
        return outcome
    if model.dim > _MOST_LEARNED:
        far = f"split-HMC, which could go on, is for up to {_MOST_LEARNED} parameters"
        hint = f"use fewer features, or method='fa-ld': {model.dim} parameters need many rounds"
        return replace(outcome, reason=f"{outcome.reason}; {far}", advice=hint)
    from fald.fewround.learned import split_hmc
    from fald.fewround.proposal import cholesky, overall

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


class _Told:
    """What is told of a round: its draws and weights, and where the posterior seems to be."""

    def __init__(self, model: Model):
        self.trace: list[dict[str, Any]] = []
        self._names = model.parameter_names if model.constrain_fn is not None else labels(model)

    def note(self, number: int) -> str:
        row = self.trace[number - 1] if number <= len(self.trace) else {"draws": 0, "khat": np.nan}
        parts = [f"{row['draws']:,} draws"] if row["draws"] else ["asking"]
        parts += [f"k-hat {row['khat']:.2f}, ESS {row['ess']:,.0f}"] if np.isfinite(row["khat"]) else []
        parts += [f"{row['accepted']:.0%} accepted"] if "accepted" in row else []
        return ", ".join(parts)

    def line(self, number: int) -> dict[str, Any]:
        if number > len(self.trace):
            return {}
        row = self.trace[number - 1]
        drawn = sum(r["draws"] for r in self.trace[:number])
        said = {"draws": drawn, "ess": row["ess"], "k_hat": row["khat"]}
        if "mean" not in row:
            return said
        rows = list(zip(self._names, row["mean"], row["sd"]))[:MOST_PARAMETERS]
        return {**said, "intervals": {name: [m, m - 1.96 * s, m + 1.96 * s] for name, m, s in rows}}


def _tree(
    model: Model, data: FederatedData, found: tuple[Outcome, Sequence[Round]], settings: dict[str, Any]
) -> xr.DataTree:
    import xarray as xr

    (outcome, rounds), seed = found, _number(settings["seed"])
    with jax.enable_x64(True):
        groups, taken = _draws(model, outcome, seed)
        exact = _precision_of(model, outcome)
        known = _log_densities(model, outcome)
    base = {k: groups["posterior"].coords[k].values for k in ("chain", "draw")}
    with np.errstate(divide="ignore"):
        weights = np.log(outcome.weights)[taken]
    stats = {"log_weight": weights, **{name: values[taken] for name, values in known.items()}}
    groups["sample_stats"] = xr.Dataset({name: (["chain", "draw"], v) for name, v in stats.items()}, base)
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
        "kind": FEW_ROUND.name,
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
        "proved": outcome.proved,
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
        report = _report(model)
        values = outcome.positions if report is None else report(outcome.positions)
        taken = keep(values, outcome.weights, _NUM_CHAINS * _NUM_DRAWS, rng)
    else:
        taken = np.arange(len(outcome.positions) // _NUM_CHAINS * _NUM_CHAINS)
    taken = rng.permutation(taken).reshape(_NUM_CHAINS, -1)
    return posterior_groups(model, outcome.positions[taken]), taken


def _log_densities(model: Model, outcome: Outcome) -> dict[str, Array]:
    """Log prior and log likelihood of the draws, where the method has asked for the posterior at them."""
    if not len(outcome.values):
        return {}
    prior = prior_values(model, outcome.positions)
    with np.errstate(invalid="ignore"):  # where there is no density; such a draw is never kept
        return {"log_prior": prior, "log_likelihood": outcome.values - prior}


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
    with np.errstate(invalid="ignore"):  # a single draw with all the weight has no spread
        mcse = errors * spread
    return {
        label: {"mcse": float(m), "ess": float(min(e**-2 if e > 0 else np.inf, outcome.ess, most))}
        for label, e, m in zip(rows, errors, mcse)
    }
