"""Checks of the draws: were they all made, do they agree, are they enough, and of which law are they."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fald.results.diagnostics import ESS_LIMIT, RHAT_LIMIT, STEP_LIMIT
from fald.results.judgement import Check, Colour, Facts, by_limits, listed
from fald.results.kinds import KINDS
from fald.results.text import number, percent

RHAT_RED, ESS_RED, STEP_AMBER = 1.05, 100, 0.5
KHAT_AMBER, KHAT_RED = 0.5, 0.7
ERROR_AMBER, ERROR_RED = 0.05, 0.2

_LONGER = "run longer: more rounds or more chains; 'fald plan' chooses"
_MORE_ROUNDS = "allow more rounds"
_SMALLER = "take a smaller step or fewer local steps; 'fald plan' chooses both"


def _complete(facts: Facts) -> Check | None:
    run, ended = facts["run"], facts["ended"]
    if KINDS[run["kind"]].certified and not ended:  # the verdict says whether its rounds were enough
        return None
    done, asked = run["rounds_done"], run["settings"].get("num_rounds", run["rounds_done"])
    whole = done + run["settings"].get("thinning", 1) > asked
    shown = f"{done:,} of {asked:,} rounds"
    rule = "red if the run ended before its last round"
    if not ended and whole:
        return Check("Run complete", "green", shown, "The run did all its rounds.", rule)
    why = f": {ended.rstrip('.')}" if ended else ""
    said = f"The run ended early, after {shown}{why}."
    return Check("Run complete", "red", shown, said, rule, "mend what stopped it, and run it to its end")


def _accuracy(facts: Facts) -> Check:
    run = facts["run"]
    goal = f"means within {run['accuracy']:g} posterior sd, sds within {100 * run['accuracy']:g}%"
    rule = f"red unless {goal}, all at once at 95% confidence"
    if run["verdict"] == "reached":
        return Check("Accuracy", "green", "reached", f"The accuracy asked for was reached: {goal}.", rule)
    first, *others = run["reason"].rstrip(".").split("; ")
    more = f" ({len(others)} more condition{'s' if len(others) > 1 else ''} failed)" if others else ""
    said = f"The accuracy asked for was {run['verdict']}: {first}{more}."
    return Check("Accuracy", "red", run["verdict"], said, rule, run["advice"].rstrip("."))


def _weights(facts: Facts) -> Check | None:
    khat = facts["run"]["khat"]
    if khat is None:  # split-HMC ends with draws of equal weight
        return None
    rule = f"amber above {KHAT_AMBER}, red above {KHAT_RED}"
    colour = by_limits(khat, KHAT_AMBER, KHAT_RED)
    said = {
        "green": "No single draw dominates: the proposal covers the posterior, tails included.",
        "amber": "A few draws carry much of the weight; averages are less certain than their errors say.",
        "red": "A few draws dominate: part of the posterior is missed, and averages cannot be trusted.",
    }[colour]
    advice = "" if colour == "green" else "allow more rounds, or give every parameter a proper prior"
    sentence = f"k-hat is {number(khat)}. {said}"
    return Check("Importance weights (k-hat)", colour, number(khat), sentence, rule, advice)


def _worst(facts: Facts, key: str, choose: Callable[..., Any]) -> tuple[str, float]:
    """Parameter and value of the worst entry of a column; a missing value is worse than any."""
    pairs = {row["parameter"]: row[key] for row in facts["run"]["summary"]}
    missing = [name for name, value in pairs.items() if value is None]
    if missing:
        return missing[0], math.nan
    name = choose(pairs, key=lambda label: pairs[label])
    return name, pairs[name]


def _mixing(facts: Facts) -> Check:
    name = "Mixing (R-hat)"
    rule = f"amber above {RHAT_LIMIT}, red above {RHAT_RED} or where it cannot be computed"
    if facts["chains"] < 2:
        said = "R-hat needs two chains or more, and there is one: nothing shows whether another would agree."
        return Check(name, "amber", "one chain", said, rule, "run two chains or more", strict=True)
    worst, value = _worst(facts, "r_hat", max)
    if math.isnan(value):
        said = f"R-hat of {worst} cannot be computed: there are too few draws, or chains that do not move."
        return Check(name, "red", "", said, rule, _LONGER)
    colour = by_limits(value, RHAT_LIMIT, RHAT_RED)
    said = {
        "green": f"The chains agree with each other: the largest R-hat is {value:.3f} ({worst}).",
        "amber": f"The chains do not quite agree yet: R-hat of {worst} is {value:.3f}.",
        "red": f"The chains disagree: R-hat of {worst} is {value:.3f}. They have not found the posterior.",
    }[colour]
    return Check(name, colour, f"{value:.3f}", said, rule, _unless(colour, _LONGER), strict=colour != "green")


def _unless(colour: Colour, advice: str) -> str:
    """Advice, unless all is fine."""
    return advice if colour in ("amber", "red") else ""


def _largest(*values: float) -> float:
    """The largest value; NaN if one of them is, for what is no number is as bad as can be."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _draws(facts: Facts) -> Check:
    name = "Effective draws (ESS)"
    rule = f"amber below {ESS_LIMIT}, red below {ESS_RED} or where it cannot be computed"
    worst, value = _worst(facts, "ess_bulk", min)
    if math.isnan(value):
        said = f"The effective draws of {worst} cannot be counted: there are too few, or chains do not move."
        return Check(name, "red", "", said, rule, _LONGER)
    colour: Colour = "red" if value < ESS_RED else "amber" if value < ESS_LIMIT else "green"
    count = f"{value:,.0f} independent ones"
    short = f"For {worst} the draws are worth only {count} (effective sample size): "
    said = {
        "green": f"For every parameter the draws are worth {count} or more, enough for intervals.",
        "amber": f"{short}the ends of its interval are uncertain.",
        "red": f"{short}too few for an interval.",
    }[colour]
    advice = _unless(colour, _MORE_ROUNDS if KINDS[facts["run"]["kind"]].certified else _LONGER)
    return Check(name, colour, f"{value:,.0f}", said, rule, advice, strict=colour != "green")


def _modes(facts: Facts) -> Check | None:
    count = facts["modes"]
    if count is None:
        return None
    colour: Colour = "green" if count <= 1 else "amber"
    proof = facts.get("proved")
    if count <= 1 and not proof and facts["run"]["verdict"] != "reached":
        said = "None was found by the end of the run, and it was not judged whether there is one."
        return Check("Further solutions", "none", "0", said, "amber for any")
    said = (
        f"No further solution exists: {proof}."
        if count <= 1 and proof
        else "No further solution was found: the posterior has one mode. A narrow one that no search met "
        "would stay unseen."
        if count <= 1
        else f"There are {count - 1} further solutions: the posterior has {count} modes, and a mean and an "
        "interval hide that."
    )
    advice = _unless(colour, "look at the draws, and ask whether the model can tell the solutions apart")
    return Check("Further solutions", colour, str(max(count - 1, 0)), said, "amber for any", advice)


def _bias(facts: Facts) -> Check:
    name, foreseen = "Predicted bias", facts["run"]["foreseen"]
    rule = f"amber above {ERROR_AMBER} posterior sd or 5% of an sd, red above four times that"
    if foreseen is None or foreseen["predicted"] is None:
        why = "it needs a finished run of a study" if foreseen is None else foreseen["no_prediction"]
        said = f"What local steps and the step size shift was not predicted: {why}."
        return Check(name, "none", "", said, rule)
    p = foreseen["predicted"]
    bias, spread = abs(p["bias"]), abs(p["sd_error"])
    said = (
        f"Local steps and the step size shift means by up to {bias:.2g} posterior sd ({p['bias_parameter']}) "
        f"and change sds by up to {percent(spread)} ({p['sd_parameter']}), by the exact law of local "
        "quadratic models. R-hat does not see this."
    )
    colour = by_limits(_largest(bias, spread), ERROR_AMBER, ERROR_RED)
    return Check(name, colour, f"{bias:.2g} sd, {percent(spread)}", said, rule, _unless(colour, _SMALLER))


def _step(facts: Facts) -> Check:
    value = facts["run"]["step_times_curvature"]
    name = "Step size"
    rule = f"amber above {STEP_AMBER} unless a reference shows what it shifts, red above {STEP_LIMIT:g}"
    if value is None:
        said = "Step size times curvature is not known: sites of a private run keep it, or the run has none."
        return Check(name, "none", "", said, rule)
    limit = STEP_AMBER if facts["reference"] is None else STEP_LIMIT
    colour = by_limits(value, limit, STEP_LIMIT)
    said = (
        f"Step size times the largest curvature is {number(value)}. "
        + {
            "green": "Steps are stable.",
            "amber": "Steps are stable but coarse; look at the predicted bias.",
            "red": "Above 1 the result is badly biased, above 2 steps are unstable, whatever R-hat says.",
        }[colour]
    )
    return Check(name, colour, number(value), said, rule, _unless(colour, _SMALLER))


def _doubling(facts: Facts) -> Check | None:
    found = facts["doubling"]
    if found is None:
        return None
    error, shift = found["standard_error"] or 0.0, abs(found["shift"])
    said = (
        f"With twice the step size means move by {shift:.2g} ± {error:.2g} posterior sd "
        f"({found['shift_parameter']}). The bias of this run is about as large."
    )
    rule = f"amber if more than {ERROR_AMBER} beyond two standard errors, red if more than {ERROR_RED}"
    colour = by_limits(shift - 2 * error, ERROR_AMBER, ERROR_RED)
    return Check("Twice the step size", colour, f"{shift:.2g} sd", said, rule, _unless(colour, _SMALLER))


def _target(facts: Facts) -> Check | None:
    if not facts["run"]["pseudo_posterior"]:
        return None
    said = "Gradients of rows were clipped: this is a pseudo-posterior, not that of the model as written."
    advice = "a larger clip-norm comes closer to the model, and costs privacy"
    return Check("Target", "amber", "clipped", said, "amber if gradients were clipped", advice)


def _posterior(facts: Facts) -> Check:
    said = f"{facts['run']['note'].capitalize()}."
    advice = "use a temperature above 0, or a method that samples"
    return Check("Posterior", "red", "none", said, "red at temperature 0", advice)


def _sites(facts: Facts) -> Check:
    rule = "red if a site never took part, amber if far less often than planned or late"
    sites = facts["sites"]
    silent = [s["client"] for s in sites if s["took_part"] == 0]
    seldom = [s["client"] for s in sites if s["seldom"] and s["took_part"] > 0]
    shown = f"{len(sites) - len(silent)} of {len(sites)}"
    advice = "find out why it was silent, and run again with all sites"
    if silent:
        said = (
            f"{listed(silent)} never took part in a kept round: the result does not contain "
            f"{'its' if len(silent) == 1 else 'their'} rows as it should."
        )
        return Check("Sites", "red", shown, said, rule, advice)
    if seldom:
        said = f"{listed(seldom)} took part far less often than planned."
        return Check("Sites", "amber", shown, said, rule, advice)
    lost = {name for drop in (facts["federation"] or {}).get("dropouts", ()) for name in drop["silent"]}
    if lost:
        said = f"{listed(sorted(lost))} did not answer in time in some rounds."
        return Check("Sites", "amber", shown, said, rule, "allow more time ([federation] timeout)")
    return Check("Sites", "green", shown, "Every site took part as planned.", rule)


def _reference(facts: Facts) -> Check | None:
    found = facts["reference"]
    if found is None:
        return None
    said = (
        f"Against {found['name']}, means differ by up to {found['shift']:.2g} posterior sd "
        f"({found['shift_parameter']}), sds by up to {percent(found['sd_error'])} ({found['sd_parameter']})."
    )
    if found["w2_relative"] is not None:
        said += (
            f" W2 of Gaussians with these moments is {percent(found['w2_relative'])} of the posterior's size."
        )
    rule = (
        f"amber if a mean is off by more than {ERROR_AMBER} sd, or an sd by 5%, beyond three standard "
        "errors, or if these are too large to tell; red above four times that"
    )
    clear = _largest(
        found["shift"] - 3 * found["standard_error"], found["sd_error"] - 3 * found["sd_standard_error"]
    )
    colour = by_limits(clear, ERROR_AMBER, ERROR_RED)
    if colour == "green" and 3 * found["standard_error"] > ERROR_RED:
        colour = "amber"
    advice = _unless(colour, "one of the two is wrong or too short: compare their other checks")
    return Check("Distance to a reference", colour, f"{found['shift']:.2g} sd", said, rule, advice)


CHECKS: dict[str, Callable[[Facts], Check | None]] = {
    "complete": _complete,
    "accuracy": _accuracy,
    "weights": _weights,
    "mixing": _mixing,
    "draws": _draws,
    "modes": _modes,
    "bias": _bias,
    "step": _step,
    "doubling": _doubling,
    "target": _target,
    "posterior": _posterior,
    "sites": _sites,
    "reference": _reference,
}
