"""Traffic lights: each check of a result as a colour, a value and a sentence for somebody who must decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fald.diagnostics import ESS_LIMIT, RHAT_LIMIT, STEP_LIMIT
from fald.tables import number, percent

Colour = Literal["green", "amber", "red", "none"]
Document = Mapping[str, Any]

WORDS: dict[str, str] = {"green": "fine", "amber": "care", "red": "stop", "none": "not known"}
RHAT_RED, ESS_RED, STEP_AMBER = 1.05, 100, 0.5
KHAT_AMBER, KHAT_RED = 0.5, 0.7
ERROR_AMBER, ERROR_RED = 0.05, 0.2
P_AMBER, DISTANCE_RED = 0.05, 5.0


@dataclass(frozen=True)
class Light:
    """One check: its colour, what was found, what that means, and by which rule."""

    name: str
    colour: Colour
    shown: str
    sentence: str
    rule: str


def by_limits(value: float | None, amber: float, red: float) -> Colour:
    """Green up to ``amber``, red above ``red``; a value that is no number is red.

    Examples
    --------
    >>> [by_limits(v, 1.01, 1.05) for v in (1.0, 1.02, 1.5, float("nan"))]
    ['green', 'amber', 'red', 'red']
    """
    if value is None or math.isnan(value) or value > red:
        return "red"
    return "amber" if value > amber else "green"


def lights(document: Document) -> list[dict[str, str]]:
    """All lights of a report's document, in the order of reading; see ``fald.report``."""
    run = document["run"]
    kinds: tuple[Callable[[Document], Light | None], ...] = (
        (_complete, _verdict, _khat, _draws, _modes, _sites, _predictive, _reference)
        if "verdict" in run
        else (_complete, _point)
        if run["point_estimate"]
        else (_complete, _rhat, _draws, _bias, _step, _doubling, _clipped, _sites, _predictive, _reference)
    )
    return [asdict(light) for light in (kind(document) for kind in kinds) if light is not None]


def overall(found: list[dict[str, str]]) -> dict[str, Any]:
    """What stands at the top: the worst colour, a headline, and the sentences behind it.

    Examples
    --------
    >>> overall([{"colour": "none", "sentence": "?"}])["headline"]
    'No check objects.'
    """
    colours = [light["colour"] for light in found]
    worst = "red" if "red" in colours else "amber" if "amber" in colours else "green"
    headline = {
        "red": "Do not rely on this result.",
        "amber": "Use this result with care.",
        "green": "No check objects.",
    }[worst]
    reasons = [
        light["sentence"] for colour in ("red", "amber") for light in found if light["colour"] == colour
    ]
    return {"colour": worst, "word": WORDS[worst], "headline": headline, "reasons": reasons}


def _complete(document: Document) -> Light | None:
    run, ended = document["run"], document["ended"]
    if "verdict" in run and not ended:
        return None
    done, asked = run["rounds_done"], run["settings"].get("num_rounds", run["rounds_done"])
    whole = done + run["settings"].get("thinning", 1) > asked
    shown = f"{done:,} of {asked:,} rounds"
    rule = "red if the run ended before its last round"
    if not ended and whole:
        return Light("Run complete", "green", shown, "The run did all its rounds.", rule)
    why = f": {ended.rstrip('.')}" if ended else ""
    return Light("Run complete", "red", shown, f"The run ended early, after {shown}{why}.", rule)


def _verdict(document: Document) -> Light:
    run = document["run"]
    goal = f"means within {run['accuracy']:g} posterior sd, sds within {100 * run['accuracy']:g}%"
    rule = f"red unless {goal}, all at once at 95% confidence"
    if run["verdict"] == "reached":
        return Light("Accuracy", "green", "reached", f"The accuracy asked for was reached: {goal}.", rule)
    said = f"The accuracy asked for was {run['verdict']}: {run['reason'].rstrip('.')}."
    advice = f" What to do: {run['advice'].rstrip('.')}." if run["advice"] else ""
    return Light("Accuracy", "red", run["verdict"], said + advice, rule)


def _khat(document: Document) -> Light | None:
    khat = document["run"]["khat"]
    if khat is None:  # chains have no weights
        return None
    rule = f"amber above {KHAT_AMBER}, red above {KHAT_RED}"
    colour = by_limits(khat, KHAT_AMBER, KHAT_RED)
    said = {
        "green": "No single draw dominates: the proposal covers the posterior, tails included.",
        "amber": "A few draws carry much of the weight; averages are less certain than their errors say.",
        "red": "A few draws dominate: part of the posterior is missed, and averages cannot be trusted.",
    }[colour]
    return Light("Importance weights (k-hat)", colour, number(khat), f"k-hat is {number(khat)}. {said}", rule)


def _worst(document: Document, key: str, choose: Callable[..., Any]) -> tuple[str, float]:
    """Parameter and value of the worst entry of a column; a missing value is worse than any."""
    pairs = {row["parameter"]: row[key] for row in document["run"]["summary"]}
    missing = [name for name, value in pairs.items() if value is None]
    if missing:
        return missing[0], math.nan
    name = choose(pairs, key=lambda label: pairs[label])
    return name, pairs[name]


def _rhat(document: Document) -> Light:
    name = "Mixing (R-hat)"
    rule = f"amber above {RHAT_LIMIT}, red above {RHAT_RED} or where it cannot be computed"
    if document["chains"] < 2:
        said = "There is one chain only, so nothing shows whether another would have found the same."
        return Light(name, "amber", "one chain", said, rule)
    worst, value = _worst(document, "r_hat", max)
    if math.isnan(value):
        said = f"R-hat of {worst} cannot be computed: there are too few draws, or chains that do not move."
        return Light(name, "red", "", said, rule)
    colour = by_limits(value, RHAT_LIMIT, RHAT_RED)
    said = {
        "green": f"The chains agree with each other: the largest R-hat is {value:.3f} ({worst}).",
        "amber": f"The chains do not quite agree yet: R-hat of {worst} is {value:.3f}. Run longer.",
        "red": f"The chains disagree: R-hat of {worst} is {value:.3f}. They have not found the posterior.",
    }[colour]
    return Light(name, colour, f"{value:.3f}", said, rule)


def _draws(document: Document) -> Light:
    name = "Effective draws (ESS)"
    rule = f"amber below {ESS_LIMIT}, red below {ESS_RED} or where it cannot be computed"
    worst, value = _worst(document, "ess_bulk", min)
    if math.isnan(value):
        said = f"The effective draws of {worst} cannot be counted: there are too few, or chains do not move."
        return Light(name, "red", "", said, rule)
    colour: Colour = "red" if value < ESS_RED else "amber" if value < ESS_LIMIT else "green"
    count = f"{value:,.0f} independent ones"
    said = {
        "green": f"For every parameter the draws are worth {count} or more, enough for intervals.",
        "amber": f"For {worst} the draws are worth only {count}: the ends of its interval are uncertain.",
        "red": f"For {worst} the draws are worth only {count}: too few for an interval.",
    }[colour]
    return Light(name, colour, f"{value:,.0f}", said, rule)


def _modes(document: Document) -> Light | None:
    count = document["modes"]
    if count is None:
        return None
    colour: Colour = "green" if count <= 1 else "amber"
    said = (
        "One mode was found. A narrow one that no explorer met would stay unseen."
        if count <= 1
        else f"The posterior has {count} modes; a mean and an interval hide that. Look at the draws."
    )
    return Light("Modes", colour, str(count), said, "amber for more than one")


def _bias(document: Document) -> Light:
    name, foreseen = "Predicted bias", document["run"]["foreseen"]
    rule = f"amber above {ERROR_AMBER} posterior sd or 5% of an sd, red above four times that"
    if foreseen is None or foreseen["predicted"] is None:
        why = "it needs a finished run of a study" if foreseen is None else foreseen["no_prediction"]
        said = f"What local steps and the step size shift was not predicted: {why}."
        return Light(name, "none", "", said, rule)
    p = foreseen["predicted"]
    bias, spread = p["bias"], abs(p["sd_error"])
    said = (
        f"Local steps and the step size shift means by up to {bias:.2g} posterior sd ({p['bias_parameter']}) "
        f"and change sds by up to {percent(spread)} ({p['sd_parameter']}), by the exact law of local "
        "quadratic models. R-hat does not see this."
    )
    colour = by_limits(max(bias, spread), ERROR_AMBER, ERROR_RED)
    return Light(name, colour, f"{bias:.2g} sd, {percent(spread)}", said, rule)


def _step(document: Document) -> Light:
    value = document["run"]["step_times_curvature"]
    name, rule = "Step size", f"amber above {STEP_AMBER}, red above {STEP_LIMIT:g}"
    if value is None:
        said = "Step size times curvature is not known: sites of a private run keep it, or the run has none."
        return Light(name, "none", "", said, rule)
    colour = by_limits(value, STEP_AMBER, STEP_LIMIT)
    said = (
        f"Step size times the largest curvature is {number(value)}. "
        + {
            "green": "Steps are stable.",
            "amber": "Steps are stable but coarse; look at the predicted bias.",
            "red": "Above 1 the result is badly biased, above 2 steps are unstable, whatever R-hat says.",
        }[colour]
    )
    return Light(name, colour, number(value), said, rule)


def _doubling(document: Document) -> Light | None:
    found = document["doubling"]
    if found is None:
        return None
    error = found["standard_error"] or 0.0
    said = (
        f"With twice the step size means move by {found['shift']:.2g} ± {error:.2g} posterior sd "
        f"({found['shift_parameter']}). The bias of this run is about as large."
    )
    rule = f"amber if more than {ERROR_AMBER} beyond two standard errors, red if more than {ERROR_RED}"
    colour = by_limits(max(0.0, found["shift"] - 2 * error), ERROR_AMBER, ERROR_RED)
    return Light("Twice the step size", colour, f"{found['shift']:.2g} sd", said, rule)


def _clipped(document: Document) -> Light | None:
    if not document["run"]["pseudo_posterior"]:
        return None
    said = "Gradients of rows were clipped: this is a pseudo-posterior, not that of the model as written."
    return Light("Target", "amber", "clipped", said, "amber if gradients were clipped")


def _point(document: Document) -> Light:
    return Light(
        "Posterior", "red", "none", f"{document['run']['note'].capitalize()}.", "red at temperature 0"
    )


def _sites(document: Document) -> Light:
    rule = "red if a site never took part, amber if far less often than planned or late"
    sites = document["sites"]
    silent = [s["client"] for s in sites if s["took_part"] == 0]
    seldom = [s["client"] for s in sites if s["seldom"] and s["took_part"] > 0]
    shown = f"{len(sites) - len(silent)} of {len(sites)}"
    if silent:
        said = (
            f"{_listed(silent)} never took part in a kept round: the result does not contain "
            f"{'its' if len(silent) == 1 else 'their'} rows as it should."
        )
        return Light("Sites", "red", shown, said, rule)
    if seldom:
        return Light(
            "Sites", "amber", shown, f"{_listed(seldom)} took part far less often than planned.", rule
        )
    lost = {name for drop in (document["federation"] or {}).get("dropouts", ()) for name in drop["silent"]}
    if lost:
        said = f"{_listed(sorted(lost))} did not answer in time in some rounds."
        return Light("Sites", "amber", shown, said, rule)
    return Light("Sites", "green", shown, "Every site took part as planned.", rule)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"Site{'s' if len(names) > 1 else ''} {', '.join(names[:5])}{more}"


def _predictive(document: Document) -> Light:
    name, found = "Fit of the model", document["predictive"]
    rule = (
        f"amber if the smallest of three p-values, times three, is below {P_AMBER}; red if what was seen is "
        f"then {DISTANCE_RED:g} standard deviations or more from what the model expects"
    )
    if found is None:
        said = f"Whether the model fits the rows was not checked: {document['no_predictive']}."
        return Light(name, "none", "", said, rule)
    shown = [s for s in found["sites"] if s["seen"] is not None]
    worst = max(shown, key=lambda s: abs(s["distance"]), default=None)
    checked = {
        f"the sites' mean outcomes ({worst['client']} least)" if worst else "the sites' mean outcomes": found[
            "site_means"
        ],
        "the scatter of outcomes": found["squared_error"],
        "averages over rows of similar prediction": found["calibration_error"],
    }
    # of those that fail the farthest, because all p-values end at the number of simulations
    failed = [key for key in checked if 3 * checked[key]["p_value"] < P_AMBER]
    what = max(failed, key=lambda key: abs(checked[key]["distance"]), default=None) or min(
        checked, key=lambda key: checked[key]["p_value"]
    )
    value, far = min(1.0, 3 * checked[what]["p_value"]), abs(checked[what]["distance"])
    colour: Colour = "green" if value >= P_AMBER else "amber" if far < DISTANCE_RED else "red"
    said = {
        "green": f"Outcomes simulated from the posterior look like those of the rows (p {value:.2g}).",
        "amber": f"The draws reproduce {what} badly (p {value:.2g}): the model may leave something out.",
        "red": f"The draws do not reproduce {what}: {far:.3g} standard deviations off. The model does not "
        "fit the rows, or the draws are not from its posterior.",
    }[colour]
    return Light(name, colour, f"p {value:.2g}", said, rule)


def _reference(document: Document) -> Light | None:
    found = document["reference"]
    if found is None:
        return None
    said = (
        f"Against {found['name']}, means differ by up to {found['shift']:.2g} posterior sd "
        f"({found['shift_parameter']}), sds by up to {percent(found['sd_error'])} ({found['sd_parameter']}). "
        f"W2 is {percent(found['w2_relative'])} of the posterior's size; halves of the reference are "
        f"{percent(found['w2_noise_relative'])} apart."
    )
    rule = (
        f"amber if a mean is off by more than {ERROR_AMBER} sd, or an sd by 5%, beyond three standard "
        "errors, or if these are too large to tell; red above four times that"
    )
    clear = max(
        found["shift"] - 3 * found["standard_error"], found["sd_error"] - 3 * found["sd_standard_error"]
    )
    colour = by_limits(clear, ERROR_AMBER, ERROR_RED)
    if colour == "green" and 3 * found["standard_error"] > ERROR_RED:
        colour = "amber"
    return Light("Distance to a reference", colour, f"{found['shift']:.2g} sd", said, rule)
