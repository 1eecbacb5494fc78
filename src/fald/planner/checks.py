"""A finished run against what was predicted for it, what is guaranteed, and what its draws show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.errors import ConfigError, FaldError, NonFiniteError
from fald.core.threads import one_thread
from fald.langevin.registry import with_law
from fald.langevin.sampling import sample
from fald.planner.law import Problem, Setting
from fald.planner.predict import Prediction, guarantee, predict
from fald.planner.search import local_models
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.results import diagnostics
from fald.results.kinds import require_posterior
from fald.results.predict import flat_positions
from fald.results.tree import settings_of
from fald.settings.schedules import heat_at
from fald.theory import gaussian

if TYPE_CHECKING:
    import xarray as xr

_MOST_WORK = 2e8  # rows times squared parameters, beyond which predicting after every run is too slow


def setting_of(settings: Mapping[str, Any]) -> tuple[Setting, str]:
    """Setting of the law for a run, and a remark where they differ; refused if the law does not cover it."""
    if settings.get("method") not in with_law():
        covered = " and ".join(name.upper() for name in with_law())
        raise ConfigError(f"the law covers {covered}; the method is {settings.get('method')!r}")
    if settings.get("temperature") == 0:
        raise ConfigError("temperature 0 gives a point estimate, which has no law to predict")
    if settings.get("clip_norm") is not None:
        raise ConfigError("gradients of rows are clipped, which the law does not cover")
    if settings.get("momentum") or settings.get("preconditioner") is not None:
        raise ConfigError("local steps have momentum or a preconditioner, which predictions do not cover")
    made = Setting.from_record(settings)
    if not callable(made.step_size):
        return made, ""
    schedule: Any = made.step_size
    end = settings["num_rounds"] * made.local_steps
    step, temperature = float(schedule(end)), made.temperature * float(heat_at(schedule, end))
    if temperature == 0:
        raise ConfigError("the last phase has temperature 0, which has no law to predict")
    made = replace(made, step_size=step, temperature=temperature)
    return made, f"the step size changes; predicted for its last value {step:.3g}"


@one_thread
def foresee(
    model: Model, data: FederatedData, settings: Mapping[str, Any], problem: Problem | None = None
) -> dict[str, Any]:
    """Prediction and guarantee for a run, as plain values for the attributes of its result.

    ``settings`` are those of ``fald.results.tree.settings_of``; ``problem`` is given when it is there
    already. ``predicted`` and ``guaranteed`` are None, with a reason in ``no_prediction`` and
    ``no_guarantee``, where there is none. Never raises because of the run. A private run gets no prediction:
    it would come from exact sums over rows.
    """
    absent = {"predicted": None, "guaranteed": None, "remark": ""}
    try:
        if settings.get("privacy") is not None:
            raise ConfigError("a private run: a prediction would reveal sums over its rows")
        if problem is None and data.num_rows * model.dim**2 > _MOST_WORK:
            raise ConfigError("too many rows and parameters to predict after every run")
        setting, remark = setting_of(settings)
        problem = local_models(model, data, setting)[0] if problem is None else problem
        limit = predict(problem, setting)
    except FaldError as error:
        return {**absent, "no_prediction": error.message, "no_guarantee": error.message}
    sure = guarantee(problem, setting, settings["num_rounds"], limit.w2)
    return {
        "predicted": plain(limit),
        "no_prediction": "",
        "guaranteed": None if sure.w2 is None else {"w2": sure.w2, "terms": sure.terms},
        "no_guarantee": sure.reason if sure.w2 is None else "",
        "remark": remark,
    }


def plain(prediction: Prediction) -> dict[str, Any]:
    """The figures of a prediction that matter to a reader, by name."""
    names = "w2 w2_relative bias bias_parameter sd_error sd_parameter autocorrelation_time forgotten"
    return {name: getattr(prediction, name) for name in names.split(" ")}


def _by_chain(tree: xr.DataTree, model: Model) -> np.ndarray:
    """(chains, draws, d) unconstrained draws."""
    chains = tree.children["posterior"].sizes["chain"]
    return flat_positions(model, tree).astype(np.float64).reshape(chains, -1, model.dim)


@one_thread
def checks(
    tree: xr.DataTree, model: Model, data: FederatedData, *, doubling_rounds: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Prediction, guarantee and measurements of a finished run, side by side.

    With ``doubling_rounds``, a run of so many rounds with twice the step size measures how the means move.

    Returns
    -------
    dict
        ``predicted`` and ``guaranteed`` as in ``foresee``; ``measured``: W2 between the first and the
        second halves of the chains by their means and covariances, what Monte-Carlo error alone would give,
        and the client that drifts most; ``doubling``: change of the means, in posterior sds, and of the
        sds with twice the step size, predicted and, if asked for, measured with its standard error. A
        private run is neither predicted nor run again: both would reveal more than its budget allows.

    Notes
    -----
    Halves that agree show mixing, not absence of bias. That the means move little when the step size doubles
    is evidence of small bias as long as bias is proportional to the step size, which holds for small steps.
    """
    require_posterior(tree)
    settings, draws = settings_of(tree), _by_chain(tree, model)
    problem = setting = change = seen = None
    try:
        if settings.get("privacy") is None:
            setting, _ = setting_of(settings)
            if data.num_rows * model.dim**2 <= _MOST_WORK:
                problem, _ = local_models(model, data, setting)
                change = _predicted_change(problem, setting)
    except FaldError:
        problem = None  # foresee says why
    if setting is not None and doubling_rounds > 0:
        twice = replace(setting, step_size=2 * setting.step_size).arguments()
        seen = _measured_change(tree, model, data, {**twice, "num_rounds": doubling_rounds, "rng_key": seed})
    return {
        **foresee(model, data, settings, problem),
        "measured": {**_halves(draws, tree), **_drift(tree, _size(draws))},
        "doubling": {"predicted": change, "measured": seen},
    }


def _moments(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = draws.reshape(-1, draws.shape[-1])
    return flat.mean(0), np.atleast_2d(np.cov(flat, rowvar=False))


def _size(draws: np.ndarray) -> float:
    return math.sqrt(float(np.trace(_moments(draws)[1])))


def _halves(draws: np.ndarray, tree: xr.DataTree) -> dict[str, Any]:
    half = draws.shape[1] // 2
    if half < 2:
        return dict.fromkeys(("w2_between_halves", "w2_between_halves_relative", "w2_from_noise_relative"))
    first, second = _moments(draws[:, :half]), _moments(draws[:, draws.shape[1] - half :])
    distance = float(gaussian.wasserstein2(*first, *second))
    sizes = [v for v in diagnostics.ess(tree).values() if np.isfinite(v)]
    each = float(np.median(sizes)) / 2 if sizes else math.nan
    # two samples of one isotropic law: means differ by 2/n per coordinate, covariances by (d+1)/(2n)
    noise = math.sqrt((2 + (draws.shape[-1] + 1) / 2) / each) if each > 0 else math.nan
    return {
        "w2_between_halves": distance,
        "w2_between_halves_relative": distance / _size(draws),
        "w2_from_noise_relative": noise if math.isfinite(noise) else None,
    }


def _drift(tree: xr.DataTree, size: float) -> dict[str, Any]:
    table = diagnostics.client_drift(tree)
    drift = np.asarray(table["mean_drift"], float)
    if not np.isfinite(drift).any():
        return {"drift_client": None, "drift": None, "drift_relative": None}
    worst = int(np.nanargmax(drift))
    most = float(drift[worst])
    return {"drift_client": str(table.index[worst]), "drift": most, "drift_relative": most / size}


def _predicted_change(problem: Problem, setting: Setting) -> dict[str, Any] | None:
    try:
        one, two = (predict(problem, replace(setting, step_size=f * setting.step_size)) for f in (1, 2))
    except ConfigError:
        return None
    shift = np.abs(two.shifts - one.shifts)
    worst = int(np.argmax(shift))
    return {
        "shift": float(shift[worst]),
        "shift_parameter": problem.parameters[worst],
        "sd_change": float(np.abs(two.sd_errors - one.sd_errors).max()),
    }


def _measured_change(
    tree: xr.DataTree, model: Model, data: FederatedData, run: dict[str, Any]
) -> dict[str, Any] | None:
    """How the draws change in a further run; None where the chain does not survive it."""
    draws, rounds = _by_chain(tree, model), run["num_rounds"]
    shape = {"num_warmup": rounds // 4, "thinning": max(1, rounds // 400), "num_chains": draws.shape[0]}
    start = jax.vmap(model.unravel)(jnp.asarray(draws[:, -1]))
    try:
        twice = sample(model=model, data=data, initial_position=start, progress=False, **shape, **run)
    except NonFiniteError:
        return None
    other = _by_chain(twice, model)
    (mean, cov), (mean2, cov2) = _moments(draws), _moments(other)
    sd = np.sqrt(np.diag(cov))
    shift = np.abs(mean2 - mean) / sd
    worst = int(np.argmax(shift))
    error = math.sqrt(sum(1 / min(diagnostics.ess(t).values()) for t in (tree, twice)))
    return {
        "shift": float(shift[worst]),
        "shift_parameter": model.parameter_names[worst],
        "standard_error": error if math.isfinite(error) else None,
        "sd_change": float(np.abs(np.sqrt(np.diag(cov2)) / sd - 1).max()),
    }
