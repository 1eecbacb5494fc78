"""A plan as text, as JSON, as a figure, and written into a study file."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from fald import theory
from fald.core.errors import ConfigError, StorageError
from fald.core.files import write_atomically
from fald.planner import LOCAL_STEPS, Candidate, Goal, Guarantee, Plan, plan, trajectory
from fald.planner.checks import plain
from fald.report.lines import write_lines
from fald.results.text import align, number, percent
from fald.study.schema import Study
from fald.theory.bounds import Constants
from fald.theory.measured import Measured

_NAMES = [field.name for field in fields(Constants)]
_LETTERS: dict[str, str] = dict(zip(["L", "m", "d", "N", "p", "tau", "gamma", "sigma", "D"], _NAMES))
_MEANING = {
    "smoothness": "smoothness L, the largest curvature of a site",
    "strong_convexity": "strong convexity m, the smallest",
    "heterogeneity": "heterogeneity γ, pull of a site at the mode",
    "gradient_noise": "gradient noise σ of batches, per parameter",
    "initial_distance": "distance D of the start from the mode, per √d",
}
_SOURCES = ("the distance of the start", "the injected noise", "heterogeneity", "gradient noise")
_SETTING = re.compile(
    r"""(\s*["']?([\w-]+)["']?\s*=\s*)  # key
    (?:"[^"]*"|'[^']*'|\{[^}]*\}|[^\#"'{\r\n])*?  # value
    (\s*(?:\#.*)?)$  # comment""",
    re.VERBOSE,
)
NOT_PRIVATE = "Planning uses exact sums over the sites' rows: it is not differentially private."


def plan_study(study: Study, goal: Goal | None = None, num_rounds: int | None = None) -> Plan:
    """Plan local steps, step size and length of a study; the rest of its ``[sampler]`` is kept.

    ``goal`` and ``num_rounds`` as in ``fald.planner.plan``; without a goal, the default one with the study's
    chains.
    """
    data = study.read_data()
    model = study.build_model(data.features)
    given = {} if study.sampler is None else study.sampler.arguments()
    if given.get("temperature") == 0:
        raise ConfigError("temperature 0 gives a point estimate; there is no posterior to plan for")
    shaping = ("temperature", "correlation", "participation", "noise", "batch_size")
    fixed = {n: given[n] for n in shaping if n in given}
    goal = Goal(num_chains=given.get("num_chains", Goal.num_chains)) if goal is None else goal
    return plan(model, data, goal=goal, num_rounds=num_rounds, **fixed)


def text(plan: Plan, title: str = "") -> str:
    """A plan for a terminal: constants, recommended settings, a table over local steps, and why."""
    problem = plan.problem
    sites = f"{len(problem.weights)} sites, {len(problem.parameters)} parameters"
    cost = f"; {plan.num_exchanges} exchanges with all sites to plan" if plan.num_exchanges else ""
    settings = [f"{key} = {value}" for key, value in sampler_settings(plan).items()]
    parts = [
        "\n".join([*([title] if title else []), sites + cost]),
        _constants_text(problem.constants, problem.uncertified),
        "\n  ".join(["Recommended", *settings, *_verdict(plan.best)]),
        f"The best run for each number of local steps\n{_candidates_text(plan)}",
        "\n  ".join(["Why", *_reasons(plan)]),
    ]
    return "\n\n".join(parts) + f"\n{NOT_PRIVATE}"


def document(plan: Plan, title: str = "") -> dict[str, Any]:
    """A plan as plain values for JSON; what is predicted and what is guaranteed stay apart."""
    known = plan.problem.constants
    return {
        "title": title,
        "num_clients": len(plan.problem.weights),
        "parameters": list(plan.problem.parameters),
        "num_exchanges": plan.num_exchanges,
        "constants": None if known is None else constants_document(known),
        "no_constants": "" if known is not None else plan.problem.uncertified,
        "goal": _finite_fields(plan.goal),
        "recommended": {"settings": sampler_settings(plan), **_candidate_document(plan.best)},
        "candidates": [_candidate_document(c) for c in plan.candidates],
        "what_if": plan.what_if,
        "note": NOT_PRIVATE,
    }


def constants_document(known: Constants) -> dict[str, Any]:
    """Constants as plain values, with their origin where they were measured."""
    values = {f.name: getattr(known, f.name) for f in fields(Constants)}
    measured = {}
    if isinstance(known, Measured) and known.provenance:
        measured = {
            "provenance": dict(known.provenance),
            "smoothness_at_mode": known.smoothness_at_mode,
            "strong_convexity_at_mode": known.strong_convexity_at_mode,
            "clients": {name: dict(report) for name, report in known.clients.items()},
        }
    return {**values, "condition_number": known.condition_number, **measured}


def sampler_settings(plan: Plan) -> dict[str, Any]:
    """Recommended settings under the keys of a study's ``[sampler]``."""
    best = plan.best
    return {
        "num-rounds": best.num_rounds,
        "num-warmup": best.num_warmup,
        "local-steps": best.setting.local_steps,
        "step-size": best.setting.step_size,
        "num-chains": plan.goal.num_chains,
        "thinning": best.thinning,
    }


def plot(plan: Plan, path: str | Path) -> Path:
    """Draw error against rounds of the recommended run and of the best with other local steps, as HTML.

    The lines are predictions; the certified rounds are far to the right and not shown.
    """
    series = {}
    others = [c for c in plan.candidates if c.predicted is not None and c is not plan.best]
    for c in [plan.best, *others[:: max(1, len(others) // 4)]]:
        rounds = np.unique(np.geomspace(1, max(10, 3 * c.num_warmup), 60).round().astype(int))
        path_of = trajectory(plan.problem, c.setting, rounds.tolist())
        name = f"K = {c.setting.local_steps}, step size {c.setting.step_size:.3g}"
        series[name] = (path_of.num_rounds, np.maximum(path_of.bias, path_of.sd_error))
    aim = max(plan.goal.bias, plan.goal.sd_error)
    return write_lines(
        path,
        series,
        title="Predicted error against rounds",
        x="rounds",
        y="error (of means in sds, of sds relative)",
        logarithmic=(True, True),
        level=("wanted", aim) if math.isfinite(aim) else None,
    )


def parse_constants(items: Iterable[str]) -> Constants:
    """Constants from ``L=… m=… d=…`` and further ``name=value`` words, by letter or by full name."""
    values: dict[str, Any] = {}
    for word in " ".join(items).replace(",", " ").split():
        key, separator, value = word.partition("=")
        name = _LETTERS.get(key, key.replace("-", "_"))
        if not separator or name not in _NAMES:
            known = ", ".join(f"{letter} ({name.replace('_', '-')})" for letter, name in _LETTERS.items())
            raise ConfigError(f"unknown constant {word!r}", hint=f"write name=value; names are {known}")
        try:
            values[name] = int(value) if name in ("dim", "num_clients") else float(value)
        except ValueError:
            raise ConfigError(f"{key} must be a number; got {value!r}") from None
    missing = ", ".join(k for k in ("L", "m", "d") if _LETTERS[k] not in values)
    if missing:
        raise ConfigError(f"constants need {missing}", hint="for example --constants L=34 m=1 d=2 N=50")
    return Constants(**values)


def certified(known: Constants, epsilon: float) -> dict[str, Any]:
    """Plan from constants alone, without data: certified rounds for each number of local steps."""
    best = theory.best_local_steps(known, epsilon)
    tried = sorted({*LOCAL_STEPS, best})
    found = theory.complexity(epsilon, known, local_steps=tried)
    rows = [
        {"local_steps": k, "step_size": float(s), "num_rounds": float(r)}
        for k, s, r in zip(tried, np.atleast_1d(found.step_size), np.atleast_1d(found.num_rounds))
    ]
    return {
        "constants": constants_document(known),
        "w2": epsilon,
        "best_local_steps": best,
        "candidates": rows,
        "sources": dict(zip(_SOURCES, known.sources().tolist())),
        "predicted": None,
        "no_prediction": "a prediction needs the data; give a study",
    }


def certified_text(found: Mapping[str, Any]) -> str:
    """Text of a plan from constants alone."""
    shown = ("local_steps", "step_size", "num_rounds")
    rows = [[f"{r[name]:.3g}" for name in shown] for r in found["candidates"]]
    largest = max(found["sources"], key=lambda name: found["sources"][name])
    return (
        f"κ = L/m = {found['constants']['condition_number']:.4g}\n"
        f"Guaranteed to be within W2 = {found['w2']:g} of the posterior:\n"
        f"{align(['local-steps', 'step-size', 'rounds guaranteed'], rows)}\n"
        f"Fewest guaranteed rounds with local-steps = {found['best_local_steps']}.\n"
        f"The largest source of error in the bound is {largest}.\n"
        f"Predicted: none; {found['no_prediction']}. The bound is usually loose by orders of magnitude."
    )


def checks_text(found: Mapping[str, Any]) -> str:
    """What ``fald.planner.checks`` found, for a terminal."""
    predicted, sure, m = found["predicted"], found["guaranteed"], found["measured"]
    errors = f"none ({found['no_prediction']})" if predicted is None else _errors(predicted)
    lines = [f"predicted: {errors}"]
    if predicted is not None and found["remark"]:
        lines.append(f"  {found['remark']}")
    bound = f"none ({found['no_guarantee']})" if sure is None else f"W2 ≤ {sure['w2']:.3g}"
    lines.append(f"guaranteed: {bound}")
    if m["w2_between_halves"] is not None:
        noise = m["w2_from_noise_relative"]
        alone = "" if noise is None else f"; Monte-Carlo error alone gives about {percent(noise)}"
        lines.append(
            f"measured: W2 between halves of the chains {number(m['w2_between_halves'])}, "
            f"{percent(m['w2_between_halves_relative'])} of the posterior's size{alone}"
        )
    if m["drift"] is not None:
        lines.append(
            f"measured: site {m['drift_client']} drifts most, {number(m['drift'])} per round "
            f"({m['drift_relative']:.2g} times the posterior's size)"
        )
    for kind in ("predicted", "measured"):
        change = found["doubling"][kind]
        if change is not None:
            error = f" ± {change['standard_error']:.2g}" if change.get("standard_error") else ""
            lines.append(
                f"twice the step size, {kind}: means move by up to {change['shift']:.2g}{error} posterior sd "
                f"({change['shift_parameter']}), sds by up to {percent(change['sd_change'])}"
            )
    return "\n".join(lines)


def _errors(p: Mapping[str, Any]) -> str:
    return (
        f"bias {p['bias']:.2g} posterior sd ({p['bias_parameter']}), sd error {percent(p['sd_error'])} "
        f"({p['sd_parameter']}), W2 {number(p['w2'])} ({percent(p['w2_relative'])} of the posterior's size)"
    )


def write_settings(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write settings into the ``[sampler]`` section of a study file, in place.

    Everything else, comments included, stays as it is; the file is replaced whole or not at all.
    """
    path = Path(path)
    try:
        before = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    if re.search(r"^\s*\[\s*fit\s*\]", before, re.MULTILINE):
        raise ConfigError(
            f"{path} has a [fit] section, and a study is either fitted or sampled",
            hint="remove [fit] to use plain FA-LD with the planned settings",
        )
    write_atomically(path, with_settings(before, settings, str(path)).encode("utf-8"))


def with_settings(study: str, settings: Mapping[str, Any], where: str = "the study") -> str:
    """Text of a study with settings of ``[sampler]`` changed or added; refused if not one line each."""
    lines = study.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    headers = [i for i, line in enumerate(lines) if re.match(r"\s*\[", line)]
    starts = [i for i in headers if re.match(r"\s*\[\s*sampler\s*\]", lines[i])]
    first = starts[0] if starts else len(lines)
    stop = next((i for i in headers if i > first), len(lines))
    missing, last = dict(settings), first
    for i in range(first + 1, stop):
        found = _SETTING.match(lines[i].rstrip("\r\n"))
        if found is None:
            continue
        last = i
        if found[2] in missing:
            lines[i] = f"{found[1]}{json.dumps(missing.pop(found[2]))}{found[3]}{end}"
    added = [f"{key} = {json.dumps(value)}{end}" for key, value in missing.items()]
    if not starts:
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += end
        lines += [end, f"[sampler]{end}"]
        last = len(lines) - 1
    elif added and not lines[last].endswith("\n"):
        lines[last] += end
    after = "".join([*lines[: last + 1], *added, *lines[last + 1 :]])
    _check_edit(study, after, settings, where)
    return after


def _check_edit(before: str, after: str, settings: Mapping[str, Any], where: str) -> None:
    """Raise unless reading the new text gives the old study with just these settings changed."""
    try:
        wanted, got = tomllib.loads(before), tomllib.loads(after)
        wanted["sampler"] = {**wanted.get("sampler", {}), **settings}
    except (tomllib.TOMLDecodeError, TypeError):
        got, wanted = None, {}
    if got != wanted:
        raise ConfigError(
            f"the [sampler] section of {where} cannot be edited in place",
            hint="write each setting as one line 'key = value' under [sampler], or copy the settings by hand",
        )


def _constants_text(known: Constants | None, reason: str) -> str:
    if known is None:
        return f"Constants of the bounds: none ({reason})"
    origins = known.provenance if isinstance(known, Measured) else {}
    rows = [
        [meaning, number(getattr(known, name)), str(origins.get(name, "given"))]
        for name, meaning in _MEANING.items()
    ]
    rows.insert(2, ["condition number κ = L/m", number(known.condition_number), ""])
    if isinstance(known, Measured):
        between = f"{number(known.strong_convexity_at_mode)} to {number(known.smoothness_at_mode)}"
        rows.insert(3, ["curvatures of the sites at the mode", between, "exact there"])
    return align(["constant", "value", "origin"], rows)


def _verdict(best: Candidate) -> list[str]:
    assert best.predicted is not None
    lines = [f"predicted: {_errors(plain(best.predicted))}"]
    if best.ess > 0:
        lines.append(
            f"predicted: {best.ess:,.0f} effective draws of the slowest parameter, "
            f"so {1 / math.sqrt(best.ess):.2g} posterior sd of Monte-Carlo error on top"
        )
    sure = best.guaranteed
    found = f"none ({sure.reason})" if sure.w2 is None else f"W2 ≤ {sure.w2:.3g}"
    return [*lines, f"guaranteed: {found}"]


def _candidates_text(plan: Plan) -> str:
    header = ["local-steps", "step-size", "rounds predicted", "rounds guaranteed", "bias", "sd error"]
    rows = []
    for c in plan.candidates:
        sure = "none" if c.guaranteed.num_rounds is None else f"{c.guaranteed.num_rounds:.2g}"
        if c.predicted is None:
            rows.append([str(c.setting.local_steps), "-", "none", "-", "-", "-"])
            continue
        run = [f"{c.setting.local_steps}{' *' if c is plan.best else ''}", f"{c.setting.step_size:.3g}"]
        errors = [f"{c.predicted.bias:.2g}", percent(c.predicted.sd_error)]
        rows.append([*run, f"{c.num_rounds:,}", sure, *errors])
    return (
        f"{align(header, rows)}\n* recommended. Guaranteed: rounds, with a far smaller step, after which the "
        "bound certifies the\n  W2 that is predicted here."
    )


def _reasons(plan: Plan) -> list[str]:
    best = plan.best
    assert best.predicted is not None
    share = best.num_warmup / best.num_rounds
    time = best.predicted.autocorrelation_time
    total = plan.what_if["as it is"]
    changes = {name: value for name, value in plan.what_if.items() if name != "as it is"}
    causes = {name: value for name, value in changes.items() if name != "half the step-size"}
    cause = min(causes, key=lambda name: causes[name], default="")
    most = cause and causes[cause] < 0.9 * total
    lines = [
        f"rounds: {percent(share)} to arrive, {percent(1 - share)} for draws; "
        f"{time:,.0f} rounds make one effective draw",
        f"error: {total:.2g} in the limit",
        *(f"  {value:.2g} with {name}" for name, value in changes.items()),
        f"{cause} would take away most of it" if most else "the step size itself causes most of it",
    ]
    if plan.problem.constants is not None:
        sources = plan.problem.constants.sources(best.setting.correlation)
        lines.append(f"in the guarantee the largest term is {_SOURCES[int(np.argmax(sources))]}")
    return lines


def _candidate_document(c: Candidate) -> dict[str, Any]:
    possible = c.predicted is not None
    return {
        **{name: getattr(c.setting, name) for name in ("local_steps", "step_size", "correlation")},
        "num_rounds": c.num_rounds if possible else None,
        "num_warmup": c.num_warmup if possible else None,
        "thinning": c.thinning,
        "ess": c.ess,
        "predicted": None if c.predicted is None else plain(c.predicted),
        "guaranteed": _finite_fields(c.guaranteed),
    }


def _finite_fields(record: Goal | Guarantee) -> dict[str, Any]:
    """The fields by name; None for numbers that JSON has not."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
