"""Checks of the model against the rows: its fit, its prior, and the columns it was given."""

from __future__ import annotations

import math
from collections.abc import Callable

from fald.results.columns import FAR, VIF_LIMIT
from fald.results.judgement import Check, Colour, Facts
from fald.results.text import number

P_AMBER, DISTANCE_RED = 0.05, 5.0
CHANCE = 0.2
SENSITIVE_AMBER, SENSITIVE_RED = 0.05, 0.3


def _fit(facts: Facts) -> Check:
    name, found = "Fit of the model", facts["predictive"]
    rule = (
        f"amber if the smallest of three p-values, times three, is below {P_AMBER}; red if what was seen is "
        f"then {DISTANCE_RED:g} standard deviations or more from what the model expects"
    )
    if found is None:
        said = f"Whether the model fits the rows was not checked: {facts['no_predictive']}."
        return Check(name, "none", "", said, rule)
    shown = [s for s in found["sites"] if s["seen"] is not None]
    worst = max(shown, key=lambda s: abs(s["distance"]), default=None)
    where = f" (worst at {worst['client']})" if worst else ""
    checked = {
        f"the sites' mean outcomes{where}": found["site_means"],
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
    advice = "look at the figures of the fit; another family, another feature or a wider prior may be needed"
    return Check(name, colour, f"p {value:.2g}", said, rule, "" if colour == "green" else advice)


def _outcomes(facts: Facts) -> Check:
    """Sites whose mean outcome is improbable on its own, and the worst of them among so many sites."""
    name, found = "Outcomes of the sites", facts["predictive"]
    rule = (
        f"amber if a site's mean outcome has p below {P_AMBER} and chance would bring one so far in less "
        f"than one of {1 / CHANCE:g} results with so many sites; red from {DISTANCE_RED:g} sds"
    )
    if found is None:
        said = "Whether each site has the outcomes that the model expects was not checked: "
        return Check(name, "none", "", f"{said}{facts['no_predictive']}.", rule)
    shown = [s for s in found["sites"] if s["seen"] is not None]
    if not shown:
        said = "No site has the ten rows that it takes to compare its outcomes with the model."
        return Check(name, "none", "", said, rule)
    outside = [s for s in shown if math.erfc(abs(s["distance"]) / math.sqrt(2)) < P_AMBER]
    worst = max(shown, key=lambda s: abs(s["distance"]))
    far = abs(worst["distance"])
    by_chance = 1 - (1 - math.erfc(far / math.sqrt(2))) ** len(shown)
    colour: Colour = "green"
    if outside and by_chance < CHANCE:
        colour = "red" if far >= DISTANCE_RED else "amber"
    value = f"{len(outside)} of {len(shown)} outside"
    if colour == "green":
        which = "Every site" if len(shown) == len(found["sites"]) else "Every site with ten rows or more"
        said = f"{which} has the outcomes that the model expects, as far as chance allows."
        return Check(name, colour, value, said, rule)
    side = "above" if worst["distance"] > 0 else "below"
    said = (
        f"Outcomes at {worst['client']} lie {side} what the model expects: {found['outcome']} "
        f"{number(worst['seen'])}, expected {number(worst['expected'])} ± "
        f"{number(abs(worst['seen'] - worst['expected']) / far)}, {number(far)} sds away."
    )
    others = [s["client"] for s in outside if s is not worst]
    said += f" So do those at {', '.join(others[:5])}, above or below." if others else ""
    advice = (
        f"ask {worst['client']} how outcomes and features were recorded there, and whether its patients "
        "differ in something that the model leaves out"
    )
    return Check(name, colour, value, said, rule, advice)


def _prior(facts: Facts) -> Check:
    name, found = "Prior and rows", facts["prior"]
    rule = (
        f"amber if a hundredth more or less of the prior moves a parameter (power-scaling sensitivity above "
        f"{SENSITIVE_AMBER}), red above {SENSITIVE_RED} where the rows pull as hard the other way"
    )
    if found is None:
        return Check(name, "none", "", f"Prior and rows were not compared: {facts['no_prior']}.", rule)
    pulled = {r["parameter"]: min(r["prior"], r["likelihood"]) for r in found}
    worst = max(pulled, key=pulled.__getitem__)
    value = pulled[worst]
    alone = [r for r in found if r["prior"] > SENSITIVE_AMBER >= pulled[r["parameter"]]]
    lone = {r["parameter"]: r["prior"] for r in alone}
    little = f"The rows say little about {_some(lone)}: what is known of it is mostly the prior."
    if value > SENSITIVE_AMBER:
        colour: Colour = "red" if value > SENSITIVE_RED else "amber"
        count = sum(v > SENSITIVE_AMBER for v in pulled.values())
        more = f" ({count} of {len(pulled)} parameters)" if count > 1 else ""
        said = (
            f"Prior and rows disagree about {worst}{more}: the prior pulls its estimate away from the rows."
        )
        advice = (
            "widen the prior ([model] prior-scale; a linear model without it takes scales from the rows), "
            "or scale outcome and features so that effects of about one are plausible ([data.scaling])"
        )
        return Check(name, colour, number(value), f"{said} {little}" if lone else said, rule, advice)
    if lone:
        advice = (
            "state the prior beside such an estimate, or leave the feature out; one of very small values "
            "needs another unit ([data.scaling])"
        )
        return Check(name, "amber", number(max(lone.values())), little, rule, advice)
    said = "The prior hardly moves any estimate: the rows decide."
    return Check(name, "green", number(max(r["prior"] for r in found)), said, rule)


def _some(pulled: dict[str, float]) -> str:
    """The parameters that a prior moves most, for a sentence."""
    names = sorted(pulled, key=lambda name: -pulled[name])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _columns(facts: Facts) -> Check:
    name, found = "Columns", facts["columns"]
    rule = (
        "red if the outcome has one value, or a column is a copy of another or an exact sum of others; amber "
        "if a column has one value or is such a sum but for a hundredth of its variance (variance inflation "
        f"above {VIF_LIMIT:g})"
    )
    if found is None:
        said = f"Whether columns repeat each other was not checked: {facts['no_rows']}."
        return Check(name, "none", "", said, rule)
    if found["outcome"]:
        said = f"The same value of {found['outcome'][0]} stands in every row: there is nothing to explain."
        return Check(name, "red", "outcome", said, rule, "look at how the outcome was recorded")
    if found["copies"]:
        first, second = found["copies"][0]
        said = (
            f"Columns {first} and {second} say the same: how an effect is divided between them is arbitrary."
        )
        more = len(found["copies"]) - 1
        said += f" There are {more} more such pairs." if more else ""
        return Check(name, "red", f"{more + 1} copied", said, rule, f"leave out {second}")
    if found["dependent"]:
        names = ", ".join(found["dependent"][:5])
        said = f"Columns {names} determine each other: how an effect is divided among them is arbitrary."
        advice = "leave out one of them"
        return Check(name, "red", f"{len(found['dependent'])} dependent", said, rule, advice)
    if found["constant"]:
        names = ", ".join(found["constant"][:5])
        said = f"The same value stands in every row of {names}: the rows say nothing about its effect."
        return Check(name, "amber", f"{len(found['constant'])} constant", said, rule, "leave it out")
    if found["inflated"]:
        worst, factor = max(found["inflated"], key=lambda pair: pair[1])
        said = (
            f"Column {worst} is almost a sum of others (variance inflation {number(factor)}): their single "
            "effects are uncertain, and depend on the prior."
        )
        return Check(name, "amber", number(factor), said, rule, "leave out one of those that say the same")
    return Check(name, "green", "", "Every column says something of its own.", rule)


def _values(facts: Facts) -> Check:
    name, found = "Values", facts["values"]
    rule = (
        f"amber if a value is more than {FAR:g} robust standard deviations from the median of its column and "
        "apart from all others by more than their whole range"
    )
    if found is None:
        said = f"Whether values are plausible was not checked: {facts['no_rows']}."
        return Check(name, "none", "", said, rule)
    if not found:
        return Check(name, "green", "", "No value lies far apart from the others of its column.", rule)
    places = [f"{f['column']} at {f['client']} ({f['count']})" for f in found]
    more = f" and {len(places) - 5} more" if len(places) > 5 else ""
    total = sum(f["count"] for f in found)
    said = f"Some values lie far apart from all others of their column: {', '.join(places[:5])}{more}."
    advice = "ask the site; a number such as 999 or -99 often stands for a missing value"
    return Check(name, "amber", f"{total} value{'s' if total > 1 else ''}", said, rule, advice)


CHECKS: dict[str, Callable[[Facts], Check | None]] = {
    "columns": _columns,
    "values": _values,
    "prior": _prior,
    "fit": _fit,
    "outcomes": _outcomes,
}
