"""A result with all that is found out about it: summarised once, checked once, judged once.

What a run hands on to the terminal, to ``--strict``, to JSON and to the report is one ``Examined``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.core.errors import DataError, DiagnosticsError
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.results import checks_of_draws, checks_of_model
from fald.results.columns import absurd_values, redundant_columns
from fald.results.diagnostics import ReferenceLaw, ess
from fald.results.document import document
from fald.results.judgement import Check, judgement
from fald.results.kinds import KINDS, Kind, kind_of
from fald.results.predictive import predictive_checks
from fald.results.prior import prior_sensitivity
from fald.results.tree import draws_by_row, settings_of

if TYPE_CHECKING:
    import xarray as xr

CHECKS = {**checks_of_draws.CHECKS, **checks_of_model.CHECKS}
"""Every check by its key; the kinds of results name those that are made of them."""

_PRIVATE = "a private run: sums over its rows would leave the sites without noise"


@dataclass(frozen=True, eq=False)
class Examined:
    """A result, its document with the judgement, and the facts behind the judgement.

    Attributes
    ----------
    tree, model, data
        The result, and what it was made from where that is at hand.
    facts
        What the checks are made from; ``facts["run"]`` is the document.
    """

    tree: xr.DataTree
    facts: Mapping[str, Any]
    model: Model | None = None
    data: FederatedData | None = None

    @property
    def kind(self) -> Kind:
        """The kind of the result."""
        return kind_of(self.tree)

    @property
    def document(self) -> dict[str, Any]:
        """The result as JSON: its table, its settings, its judgement."""
        return self.facts["run"]

    @property
    def judgement(self) -> dict[str, Any]:
        """The worst of all checks in plain words, and all of them."""
        return self.document["judgement"]

    def require_clean(self) -> None:
        """Raise ``DiagnosticsError`` where ``--strict`` objects: a check is red, or the chains need care."""
        objections = self.judgement["objections"]
        if objections:
            bad = [c for c in self.judgement["checks"] if c["colour"] == "red" or c["strict"]]
            found = [c["advice"] for c in sorted(bad, key=lambda c: c["colour"] != "red")]
            raise DiagnosticsError(" ".join(objections), hint=next((a for a in found if a), ""))


def examine(
    tree: xr.DataTree,
    *,
    model: Model | None = None,
    data: FederatedData | None = None,
    level: float = 0.95,
    why: str = "the rows were not given",
    reference: tuple[str, xr.DataTree] | None = None,
    doubling: Mapping[str, Any] | None = None,
) -> Examined:
    """Summarise, check and judge a result.

    Parameters
    ----------
    tree
        A result of ``fald.fit`` or ``fald.sample``.
    model, data
        What it was made from; without the rows checks of them are not made, for the reason ``why``.
    level
        Probability of the intervals.
    reference
        Name and result of a reference to compare with.
    doubling
        What a check with twice the step size measured.

    Examples
    --------
    >>> import fald
    >>> rng = np.random.default_rng(0)
    >>> data = fald.FederatedData.from_arrays({name: rng.normal(size=(40, 1)) for name in "ab"})
    >>> model = fald.models.gaussian_location([[1.0]])
    >>> examine(fald.fit(0, model, data, progress=False)).judgement["first"]
    'No problem found.'
    """
    kind, run = kind_of(tree), document(tree, level)
    beside = run.get("beside") or {}
    if kind.private:
        data, why = None, _PRIVATE
    rows = data if data is not None and data.present else None
    posterior = tree.children["posterior"]
    facts: dict[str, Any] = {
        "run": run,
        "ended": tree.attrs.get("ended", ""),
        "chains": int(posterior.sizes["chain"]),
        "draws": int(posterior.sizes["draw"]),
        "modes": _num_modes(tree),
        "proved": tree.attrs.get("proved", ""),
        "sites": _sites(tree, run),
        "federation": json.loads(tree.attrs.get("federation", "null")),
        "reference": (beside if "shift" in beside else None)
        if reference is None or not kind.draws
        else compared(tree, *reference),
        "doubling": doubling,
        **(_of_rows(tree, model, rows, level=level, why=why) if kind.draws else dict.fromkeys(_ABOUT_ROWS)),
    }
    found = made_checks(facts)
    said = judgement(found)
    run |= {"judgement": said, "complaints": said["objections"]}
    return Examined(tree, facts, model, rows)


def made_checks(facts: Mapping[str, Any]) -> list[Check]:
    """The checks that the kind of a result declares, in their order."""
    found = [CHECKS[key](facts) for key in KINDS[facts["run"]["kind"]].checks]
    return [check for check in found if check is not None]


_ABOUT_ROWS = ("predictive", "no_predictive", "prior", "no_prior", "columns", "values", "no_rows")


def _of_rows(
    tree: xr.DataTree, model: Model | None, rows: FederatedData | None, *, level: float, why: str
) -> dict[str, Any]:
    """What takes rows: each fact, or why there is none."""
    found: dict[str, Any] = {**dict.fromkeys(_ABOUT_ROWS), "no_predictive": why, "no_rows": why}
    if rows is not None and model is not None:
        try:
            checked = predictive_checks(model, tree, rows, level=level)
            found |= {"predictive": checked, "no_predictive": ""}
        except DataError as error:
            found["no_predictive"] = error.message
    if rows is not None:
        try:
            found |= {"columns": redundant_columns(rows), "values": absurd_values(rows), "no_rows": ""}
        except DataError as error:
            found["no_rows"] = error.message
    try:
        found["prior"] = prior_sensitivity(tree, model, rows)
    except DataError as error:
        found["no_prior"] = why if rows is None else error.message
    return found


def _num_modes(tree: xr.DataTree) -> int | None:
    found = json.loads(tree.attrs.get("modes", "null"))
    return None if found is None else len(found)


def _sites(tree: xr.DataTree, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Sites with what they did and sent; ``seldom``: they took part far less often than planned."""
    posterior = tree.children["posterior"]
    kept = posterior.sizes["chain"] * posterior.sizes["draw"]
    kind = kind_of(tree)
    planned = int(tree.attrs["rounds_done"]) if kind.certified else kept
    sites = []
    for site, spent in zip(run["sites"], _spent(tree, len(run["sites"]))):
        chance = 1.0 if kind.certified else _inclusion(settings_of(tree), site["share"], len(run["sites"]))
        expected = planned * chance
        # rounds of a chain are drawn independently: five standard deviations below the plan is no accident
        floor = expected - 5 * math.sqrt(expected * (1 - chance))
        took_part = int(site["took_part"])
        sites.append(
            {
                **site,
                "rows": int(site["rows"]),
                "took_part": took_part,
                "planned": expected,
                "seldom": bool(took_part < floor),
                **spent,
            }
        )
    return sites


def _inclusion(settings: dict[str, Any], share: float, count: int) -> float:
    """Probability that a site takes part in a round, by the scheme of participation."""
    drawn = settings.get("num_participants")
    if settings.get("participation", "full") == "full" or drawn is None:
        return 1.0
    if settings["participation"] == "with-replacement":
        return 1 - (1 - share) ** drawn
    return drawn / count


def _spent(tree: xr.DataTree, count: int) -> list[dict[str, Any]]:
    """Bytes that each site received and sent, all chains together; None where they were not counted."""
    if kind_of(tree).certified:
        rounds = tree.children["rounds"].to_dataset()
        spent = {k: int(rounds[k].values.sum()) for k in ("bytes_down", "bytes_up")}
        return [spent] * count
    if "cost" not in tree.children:
        return [{"bytes_down": None, "bytes_up": None}] * count
    cost = tree.children["cost"].to_dataset()
    down, up = (cost[k].values.sum(axis=0) for k in ("bytes_down", "bytes_up"))
    return [{"bytes_down": int(d), "bytes_up": int(u)} for d, u in zip(down, up)]


def compared(tree: xr.DataTree, name: str, reference: xr.DataTree) -> dict[str, Any]:
    """How far the draws are from those of a reference, in the reference's standard deviations."""
    ours = draws_by_row(tree, every=True)
    labels, goal = list(ours), ReferenceLaw.of(reference, list(ours))
    draws = np.stack([d.ravel() for _, d in ours.values()], axis=1).astype(float)
    shift, ratio = goal.errors(draws)
    worst, wide = int(np.argmax(np.abs(shift))), int(np.argmax(np.abs(ratio - 1)))
    relative = goal.w2(draws) / math.sqrt(np.sum(goal.sd**2))
    error = math.sqrt(sum(1 / min(ess(t).values()) for t in (tree, reference)))
    return {
        "name": name,
        "rounds": reference.attrs.get("rounds_done"),
        "w2_relative": None if math.isnan(relative) else relative,
        "shift": float(abs(shift[worst])),
        "shift_parameter": labels[worst],
        "standard_error": error,
        "sd_ratio": float(ratio[wide]),
        "sd_error": float(abs(ratio[wide] - 1)),
        "sd_parameter": labels[wide],
        "sd_standard_error": error / math.sqrt(2),
    }
