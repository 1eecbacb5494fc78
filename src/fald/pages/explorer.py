"""Settings to play with: what each choice of them costs, and what it gives.

The local models of a study are found once; after that every move of a slider is answered from closed forms:
the error by the law of the chain, the guarantee by the published bounds, the bytes by counting, ε by the
accountant. What lies outside the range of a theory is said, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fald.core.errors import ConfigError, PrivacyError
from fald.core.threads import one_thread
from fald.langevin.fald import fald
from fald.planner import Goal, Problem, Setting, fewest_rounds, guarantee, local_models
from fald.planner.law import Chain, chain
from fald.planner.predict import errors_at
from fald.privacy.accountant import Ledger
from fald.privacy.protection import bounded_sensitivity
from fald.privacy.settings import RunSettings
from fald.results.tree import labels
from fald.settings.participation import Participation
from fald.study.schema import Study
from fald.theory.measured import combine

_LOCAL_STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80)
_LOCAL_STEPS += (100, 130, 160, 200, 250, 320, 400, 500)
_ROUNDS = tuple(int(round(10 ** (1 + i / 8), -max(0, int(i / 8) - 1))) for i in range(41))
_WORK = 2e6  # sites times parameters times local steps that a prediction may take
_POINTS = 60
_SWEPT = {"local_steps": _LOCAL_STEPS[::2], "correlation": tuple(np.linspace(0, 1, 11).round(2).tolist())}
_CHOICES = {"noise": ("realised", "paper"), "scheme": ("full", "with-replacement", "without-replacement")}
_LIMITS: dict[str, tuple[float, float]] = {
    "local_steps": (1, 100_000),
    "step_size": (1e-300, 1e300),
    "correlation": (0, 1),
    "num_participants": (1, 1_000_000),
    "num_rounds": (1, 10_000_000),
    "batch_size": (1, 10**9),
    "num_chains": (1, 100_000),
    "delta": (1e-30, 0.5),
    "clip_norm": (0, 1e9),
}


class Sliders(NamedTuple):
    """One position of all sliders, by the names of a study's keys."""

    local_steps: int
    step_size: float
    correlation: float
    num_participants: int
    num_rounds: int
    batch_size: int
    num_chains: int = 4
    noise: str = "realised"
    scheme: str = "full"
    delta: float = 1e-5
    clip_norm: float = 0.0


class SettingsExplorer:
    """Answers what a study would cost and give with other settings.

    Parameters
    ----------
    study
        The study; its rows are read once, to find the local models of the sites.

    Raises
    ------
    FaldError
        If the study cannot be read, or its posterior has no mode.

    Examples
    --------
    >>> import fald
    >>> explorer = SettingsExplorer(fald.datasets.load_bundled_study("indo"))
    >>> settings = {**explorer.about({})["start"], "local_steps": 2, "step_size": 1e-4}
    >>> point = explorer.point({name: str(value) for name, value in settings.items()})
    >>> point["predicted"]["bias"] <= 0.05, point["guaranteed"]["w2"] > 1000 * point["predicted"]["w2"]
    (True, True)
    """

    @one_thread
    def __init__(self, study: Study):
        data = study.read_data()
        model = study.build_model(data.features)
        self.study, self.sizes, self.names = study, [int(n) for n in data.sizes], list(data.names)
        given = {} if study.sampler is None else study.sampler.arguments()
        self.temperature = float(given.get("temperature", 1.0))
        if self.temperature == 0:
            raise ConfigError("temperature 0 gives a point estimate; there is no posterior to explore")
        self.sensitivity = bounded_sensitivity(model, data)
        # with one row per batch the constants say how a batch of any size is noisy
        like = Setting(1, 1.0, temperature=self.temperature, batch_size=1)
        self.problem, _ = local_models(model, data, like)
        if model.constrain_fn is None:  # then the parameters are what results report, by their short names
            self.problem = replace(self.problem, parameters=tuple(labels(model)))
        self.start = self._start(given)
        self._point = lru_cache(maxsize=4096)(self._compute)
        self._spent = lru_cache(maxsize=4096)(self._account)
        self._line = lru_cache(maxsize=1024)(self._compute_sweep)

    def _start(self, given: Mapping[str, Any]) -> Sliders:
        """The study's own settings, or planned ones where it has none."""
        step, chains = given.get("step_size"), int(given.get("num_chains", Goal.num_chains))
        most = max(self.sizes)
        if not isinstance(step, float):  # none, or a schedule
            goal = Goal(num_chains=chains)
            best = fewest_rounds(self._problem(most), goal, temperature=self.temperature).best
            steps, rounds = (
                (best.setting.local_steps, best.setting.step_size),
                (best.num_rounds, most, chains),
            )
            return Sliders(*steps, 0.0, len(self.sizes), *rounds, clip_norm=self._clip(given))
        drawn: Participation = given["participation"]
        privacy = self.study.privacy
        return Sliders(
            local_steps=given["local_steps"],
            step_size=step,
            correlation=given["correlation"],
            num_participants=drawn.num_participants or len(self.sizes),
            num_rounds=given["num_rounds"],
            batch_size=given["batch_size"] or most,
            num_chains=chains,
            noise=given["noise"],
            scheme=drawn.scheme,
            delta=1e-5 if privacy is None else privacy.delta,
            clip_norm=self._clip(given),
        )

    def _clip(self, given: Mapping[str, Any]) -> float:
        """The study's clipping; without it, and without bounds of the model's own, 1 as an example."""
        return float(given.get("clip_norm") or (0.0 if self.sensitivity is not None else 1.0))

    def about(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What the page needs once: the sliders, where they stand first, and what they are about."""
        known = self.problem.constants
        return {
            "title": self.study.title or "study",
            "sites": dict(zip(self.names, self.sizes)),
            "parameters": list(self.problem.parameters),
            "start": self.start._asdict(),
            "grids": {k: sorted({*grid, getattr(self.start, k)}) for k, grid in self._grids().items()},
            "choices": {name: list(options) for name, options in _CHOICES.items()},
            "smoothness": None if known is None else known.smoothness,
            "strong_convexity": None if known is None else known.strong_convexity,
            "own_bounds": self.sensitivity is not None,
        }

    def _grids(self) -> dict[str, list[Any]]:
        top, most, sites = 2 * self.problem.largest_step, max(self.sizes), len(self.sizes)
        sizes = sorted({max(1, round(most / 2**i)) for i in range(12)})
        drawn = np.linspace(1, sites, min(sites, 40))  # all numbers of participants up to forty sites
        return {
            "local_steps": list(_LOCAL_STEPS),
            "step_size": [float(f"{top * 10 ** (-i / 10):.3g}") for i in range(50, -1, -1)],
            "correlation": np.linspace(0, 1, 21).round(2).tolist(),
            "num_participants": np.unique(drawn.round().astype(int)).tolist(),
            "num_rounds": list(_ROUNDS),
            "batch_size": sizes,
        }

    def point(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Predicted error, guarantee and communication of a position of the sliders."""
        return self._point(self._parse(query))

    def privacy(self, query: Mapping[str, str]) -> dict[str, Any]:
        """ε of a position of the sliders."""
        return self._spent(self._parse(query))

    def sweep(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Error in the limit and rounds until the start is forgotten, along one slider, the others fixed."""
        over = query.get("over", "")
        if over not in ("local_steps", "step_size", "correlation"):
            raise ConfigError(f"over must be local_steps, step_size or correlation; got {over!r}")
        return self._line(self._parse(query), over)

    def _parse(self, query: Mapping[str, str]) -> Sliders:
        missing = [n for n in Sliders._fields if n not in query and n not in Sliders._field_defaults]
        if missing:
            raise ConfigError(f"{_shown(missing[0])} is missing")
        run = Sliders(**{name: _value(name, query[name]) for name in Sliders._fields if name in query})
        if run.scheme == "full":  # then S is not drawn, whatever the query says
            run = run._replace(num_participants=len(self.sizes))
        participation(run).check(np.asarray(self.sizes))
        for name, most in (
            ("local_steps", _LOCAL_STEPS[-1]),
            ("num_rounds", _ROUNDS[-1]),
            ("num_chains", 1000),
        ):
            limit = max(most, getattr(self.start, name))  # beyond, one request would keep the page busy
            if getattr(run, name) > limit:
                raise ConfigError(f"{_shown(name)} must be at most {limit} here; got {getattr(run, name)}")
        return run

    def _problem(self, batch_size: int) -> Problem:
        """The local models with the constants for a batch of this size."""
        return replace(self.problem, constants=self._constants(batch_size))

    def _constants(self, batch_size: int) -> Any:
        known: Any = self.problem.constants
        if known is None:
            return None
        reports = {name: _with_batch(report, batch_size) for name, report in known.clients.items()}
        same = {name: getattr(known, name) for name in ("dim", "initial_distance", "temperature")}
        return combine(reports, **same)

    def _setting(self, run: Sliders) -> Setting:
        return Setting(
            local_steps=run.local_steps,
            step_size=run.step_size,
            correlation=run.correlation,
            participation=participation(run),
            noise=run.noise,  # type: ignore[arg-type]
            temperature=self.temperature,
            batch_size=None if run.batch_size >= max(self.sizes) else run.batch_size,
            clip_norm=run.clip_norm or None,
        )

    @one_thread
    def _compute(self, run: Sliders) -> dict[str, Any]:
        setting, problem = self._setting(run), self._problem(run.batch_size)
        predicted, why, path = None, "", None
        try:
            law = self._chain(problem, setting)
            predicted = self._predicted(problem, law, run)
            path = _trajectory(law, run.num_rounds)
        except ConfigError as error:
            why = self._no_law(setting, error)
        scale = math.sqrt(float(np.trace(np.linalg.inv(problem.precision))))
        bound = guarantee(problem, setting, run.num_rounds, predicted["w2"] if predicted else 0.1 * scale)
        return {
            "predicted": predicted,
            "no_prediction": why,
            "warnings": self._warnings(run, setting, predicted),
            "trajectory": path,
            "guaranteed": {
                "w2": _finite(bound.w2),
                "num_rounds": _finite(bound.num_rounds),
                "reason": bound.reason,
                "terms": None if bound.terms is None else {k: _finite(v) for k, v in bound.terms.items()},
            },
            "communication": self._communication(run),
        }

    def _no_law(self, setting: Setting, error: ConfigError) -> str:
        """Why there is no prediction, in the words of the sliders."""
        reach = setting.step_size * float(self.problem.spectrum[0].max())
        if reach < 2:
            return error.message
        words = "the chain diverges: step-size times the largest curvature of a site is"
        return f"{words} {reach:.3g}, and steps are unstable above 2"

    def _chain(self, problem: Problem, setting: Setting) -> Chain:
        sites, parameters, _ = problem.hessians.shape
        if sites * parameters * setting.local_steps > _WORK:
            raise ConfigError(
                f"{sites} sites and {parameters} parameters with {setting.local_steps} local steps take too "
                "long to predict for a slider",
                hint="use fewer local steps, or fald plan",
            )
        return chain(problem, setting)

    def _predicted(self, problem: Problem, law: Chain, run: Sliders) -> dict[str, Any]:
        limit, after = errors_at(problem, law, math.inf), law.errors(law.at(run.num_rounds))
        scale = math.sqrt(float(np.trace(law.posterior.covariance)))
        kept = max(0, run.num_rounds - limit.forgotten)
        draws = run.num_chains * kept / limit.autocorrelation_time
        return {
            "bias": _finite(limit.bias),
            "bias_parameter": limit.bias_parameter,
            "sd_error": _finite(limit.sd_error),
            "sd_parameter": limit.sd_parameter,
            "w2": _finite(limit.w2),
            "posterior_scale": scale,
            "forgotten": limit.forgotten,
            "autocorrelation_time": _finite(limit.autocorrelation_time),
            "effective_draws": draws,
            "monte_carlo": 1 / math.sqrt(draws) if draws >= 1 else None,
            "last_bias": _finite(float(np.abs(after[0]).max())),
            "last_sd_error": _finite(float(np.abs(after[1]).max())),
        }

    def _warnings(self, run: Sliders, setting: Setting, predicted: dict[str, Any] | None) -> list[str]:
        largest = float(self.problem.spectrum[0].max())
        reach = setting.local_steps * setting.step_size * largest
        found = []
        if predicted and self.problem.skews is not None and np.any(self.problem.skews) and reach > 1:
            found.append(
                f"local-steps × step-size × curvature is {reach:.2g}: above 1 the prediction is rough, "
                f"because the sites' energies are not quadratic"
            )
        if predicted and predicted["forgotten"] >= run.num_rounds:
            found.append(
                f"the start is forgotten only after {predicted['forgotten']:,} rounds, more than the run has"
            )
        if run.clip_norm > 0 and self.study.sampler is not None and self.study.sampler.clip_norm is not None:
            found.append("clipping changes the target, which the predicted error leaves out")
        return found

    def _communication(self, run: Sliders) -> dict[str, Any]:
        dim = len(self.problem.parameters)
        spent: Any = fald(local_steps=run.local_steps, step_size=run.step_size).cost(dim).each
        times = run.num_rounds * run.num_chains
        return {
            "rounds": run.num_rounds,
            "bytes_up_per_round": int(spent.bytes_up) * run.num_chains,
            "bytes_up": round(int(spent.bytes_up) * times * self._present(run)),
            "bytes_down": round(int(spent.bytes_down) * times * self._present(run)),
            "gradients_per_site": run.local_steps * times,
        }

    def _present(self, run: Sliders) -> float:
        """Sites that answer in a round, on average; one that is drawn twice answers once."""
        drawn = participation(run)
        if drawn.scheme == "with-replacement":
            return float(np.sum(1 - (1 - self.problem.weights) ** run.num_participants))
        return float(run.num_participants)

    def _account(self, run: Sliders) -> dict[str, Any]:
        try:
            known = {"sensitivity": self.sensitivity, "sizes": self.sizes}
            rounds = {"num_rounds": run.num_rounds, "num_chains": run.num_chains}
            settings = RunSettings.of(self._setting(run), **known, **rounds)
            values = Ledger(settings, delta=run.delta).epsilon()
        except PrivacyError as error:
            return {"epsilon": None, "site": None, "reason": error.message, "hint": error.hint}
        worst = int(np.argmax(values))
        epsilon = _finite(float(values[worst]))
        reason = "" if epsilon is not None else "infinite: nothing protects the rows"
        return {"epsilon": epsilon, "site": self.names[worst], "reason": reason, "hint": ""}

    @one_thread
    def _compute_sweep(self, run: Sliders, over: str) -> dict[str, Any]:
        problem, setting = self._problem(run.batch_size), self._setting(run)
        grid = _SWEPT.get(over) or self._grids()["step_size"][::3]
        points = []
        for value in sorted({*grid, getattr(run, over)}):
            try:
                law = self._chain(problem, replace(setting, **{over: value}))
                error = max(float(np.abs(e).max()) for e in law.errors(law.stationary))
                rounds = law.arrival(Goal(bias=0.01, sd_error=0.01), law.stationary)
            except ConfigError:
                continue
            if math.isfinite(error) and rounds is not None:
                points.append((value, error, rounds))
        columns = zip(*points) if points else ((), (), ())
        return {
            "over": over,
            "at": getattr(run, over),
            **dict(zip(("x", "error", "rounds"), map(list, columns))),
        }


def participation(run: Sliders) -> Participation:
    """Who takes part: all sites, or S drawn by the chosen scheme."""
    if run.scheme == "full":
        return Participation()
    return Participation(run.scheme, run.num_participants)  # type: ignore[arg-type]


def _value(name: str, text: str) -> Any:
    """One number or word of a query, checked."""
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise ConfigError(f"{_shown(name)} must be {' or '.join(_CHOICES[name])}; got {text!r}")
        return text
    whole = name not in ("step_size", "correlation", "delta", "clip_norm")
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{_shown(name)} must be {kind}; got {text!r}") from None
    low, high = _LIMITS[name]
    if not low <= value <= high:
        raise ConfigError(f"{_shown(name)} must be between {low:g} and {high:g}; got {value:g}")
    return value


def _shown(name: str) -> str:
    return name.replace("_", "-")


def _with_batch(report: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """A site's report for another batch size than one: the noise falls as (1 − b/n)/b."""
    rows = int(report["rows"])
    if batch_size >= rows:
        noise = {"gradient_noise": 0.0, "provenance": {**report["provenance"], "gradient_noise": "exact"}}
        return {**report, **noise}
    factor = math.sqrt((1 - batch_size / rows) / batch_size / (1 - 1 / rows))
    return {**report, "gradient_noise": report["gradient_noise"] * factor}


def _trajectory(law: Chain, num_rounds: int) -> dict[str, list[float]]:
    """Largest errors of mean and sd against rounds."""
    rounds = np.unique(np.geomspace(1, max(num_rounds, 2), _POINTS).round().astype(int))
    errors = [[float(np.abs(e).max()) for e in law.errors(law.at(int(r)))] for r in rounds]
    return {
        "rounds": rounds.tolist(),
        "bias": [_finite(e[0]) or 0.0 for e in errors],
        "sd_error": [_finite(e[1]) or 0.0 for e in errors],
    }


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
