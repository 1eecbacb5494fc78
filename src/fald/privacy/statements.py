"""The privacy statement of a run, in prose and as data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy.accountant import PrivacyReport
from fald.privacy.accountants import ACCOUNTANTS

_COUNT_WORDS = {0: "no site", 1: "at most one site"}
_REFUSED = {
    "seeded": (
        "draw client noise from a seed: whoever knows the seed subtracts the noise",
        "leave client noise to the entropy of each client, or call the run a simulation",
    ),
    "shuffled": (
        "take batches from shuffled epochs: they are not independent draws, and no amplification is proved",
        "draw a fresh batch at every step, or use all rows",
    ),
    "data-dependent": (
        "start from a position found with its data, unless that was accounted for",
        "start from the prior, or count the preparation rounds in num-rounds",
    ),
}


@dataclass(frozen=True, eq=False)
class Statement:
    """What a run promises about one record, and what it does not.

    ``text`` is prose, one paragraph a line; ``data`` the same as plain data, with the accounting it rests on.
    ``is_guarantee`` is False for a simulation and where ε is infinite.
    """

    text: str
    data: dict[str, Any]
    is_guarantee: bool

    def to_json(self) -> str:
        """The data as JSON text."""
        return json.dumps(self.data, indent=2, ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        return self.text


def require_private(
    *,
    client_noise: Literal["entropy", "seeded"],
    batches: Literal["fresh", "poisson", "all", "shuffled"],
    start: Literal["data-free", "data-dependent"] = "data-free",
) -> None:
    """Refuse a private run whose assumptions do not hold; the message says which and why.

    A client's own noise comes from ``"entropy"`` of its own machine that never leaves it, or is ``"seeded"``
    by a seed that others know; batches are ``"fresh"`` draws at every step, ``"poisson"`` samples, ``"all"``
    rows, or ``"shuffled"`` epochs; the start was found without the protected data or depends on it.

    Examples
    --------
    >>> require_private(client_noise="entropy", batches="fresh")
    """
    for said in (client_noise, batches, start):
        if said in _REFUSED:
            what, hint = _REFUSED[said]
            raise PrivacyError(f"a private run cannot {what}", hint=hint)
    if client_noise != "entropy" or batches not in ("fresh", "poisson", "all") or start != "data-free":
        raise ConfigError(f"unknown kind of run: {client_noise!r}, {batches!r}, {start!r}")


def rounded_up(value: float) -> str:
    """Four significant digits, rounded up: a printed upper bound stays one."""
    if not math.isfinite(value) or value <= 0:
        return "infinite" if value > 0 else "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.4g}"


def statement(
    report: PrivacyReport,
    *,
    simulation: bool = False,
    preparation_rounds: int = 0,
    clients: Sequence[str] | None = None,
    origin: str = "",
) -> Statement:
    """Say what a run promises, in words that a data-protection officer can check.

    Parameters
    ----------
    report
        The accounting of the run.
    simulation
        True where client noise came from a seed: then nothing is promised.
    preparation_rounds, clients
        How many of the accounted rounds were preparation or warm-up; names of the clients, in order.
    origin
        Package and version of a model that is not part of fald; empty: there is none.

    Notes
    -----
    The statement repeats what it was told. That batches were fresh and noise secret is for the run to
    ensure; see ``require_private``.

    Examples
    --------
    >>> from fald.privacy import RunSettings, account
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=1, num_rounds=100, step_size=1e-6,
    ...                   batch_size=200, clip_norm=1.0)
    >>> print(statement(account(run, delta=1e-5)).text.splitlines()[0])
    Every record is protected with ε = 0.1507 at δ = 1e-05 against replacement by another record.
    """
    s = report.settings
    names = [f"client {c}" for c in range(s.num_clients)] if clients is None else [str(c) for c in clients]
    if len(names) != s.num_clients:
        raise ConfigError(f"clients must have {s.num_clients} names; got {len(names)}")
    label, first = "no privacy", "No record is protected: ε is infinite."
    assumptions, not_covered = _assumptions(report, preparation_rounds), _not_covered(report)
    if origin:
        assumptions.append(
            f"the model, which comes from {origin} and not from fald, reads and evaluates records one by "
            "one, and keeps nothing of one for another"
        )
    if math.isfinite(report.worst):
        label = "differential privacy"
        first = (
            f"Every record is protected with ε = {rounded_up(report.worst)} at δ = {report.delta:g} "
            "against replacement by another record."
        )
    if simulation:
        label = "simulation, no privacy"
        first = (
            "Simulation, no privacy: client noise was drawn from a seed, and whoever knows the seed can "
            f"subtract it. With secret noise the same run would give: {first[0].lower()}{first[1:]}"
        )
    paragraphs = [
        first,
        "Unit: one record of one client. Relation: two data sets are neighbours if one record of one client "
        "is replaced; the number of records of each client is taken as known.",
        _view(report),
        _sampling(report),
        _participation(report),
        _method(report),
        _per_client(report, names),
        "Assumed: " + "; ".join(assumptions) + ".",
        "Not covered: " + "; ".join(not_covered) + ".",
    ]
    if s.clip_norm is not None:
        paragraphs.append(
            f"Each record's gradient was clipped to norm {s.clip_norm:g}. Clipping changes the target: the "
            "result is a pseudo-posterior, not the posterior of the model as written."
        )
    details = report.to_dict()
    for entry, name in zip(details["clients"], names):
        entry["name"] = name
    data = {
        "guarantee": label == "differential privacy",
        "simulation": simulation,
        "label": label,
        "summary": first,
        "unit": "one record of one client",
        "relation": "replace one",
        "preparation_rounds": preparation_rounds,
        "pseudo_posterior": s.clip_norm is not None,
        "assumptions": assumptions,
        "not_covered": not_covered,
        **details,
    }
    return Statement("\n".join(paragraphs), data, data["guarantee"])


def _view(report: PrivacyReport) -> str:
    if report.view == "server":
        read = "reads every upload of every client and everything that is broadcast"
        return f"View: the server, and whoever sees what it sees, {read}. Other clients see less."
    number = _COUNT_WORDS.get(report.num_colluders, f"at most {report.num_colluders} sites")
    return (
        "View: only weighted sums of uploads are visible, through a secure sum whose security is assumed, "
        f"and {number} passes its own noise on to the server. The last local step of a round is covered by "
        "the noise of all honest participants, earlier ones only by the client's own."
    )


def _sampling(report: PrivacyReport) -> str:
    s = report.settings
    if s.batch_size is None:
        return "Sampling: every local step uses all records of the client."
    if report.sampling == "poisson":
        number = f"{s.batch_size} expected records per step"
        return f"Sampling: a record enters a local step by a coin of its own, with {number}."
    return f"Sampling: every local step draws {s.batch_size} records afresh, without replacement."


def _participation(report: PrivacyReport) -> str:
    s = report.settings
    if s.scheme == "full":
        return "Participation: every client takes part in every round."
    how = "with" if s.scheme == "with-replacement" else "without"
    drawn = f"Participation: {s.num_participants} draws per round, {how} replacement. "
    if report.participation == "realised":
        return drawn + "ε is computed from the rounds in which each client did take part."
    return drawn + (
        "ε is averaged over the random draw, which is made independently of the data; the observer may "
        "know who took part. No amplification of ε by client sampling is claimed, because uploads of "
        "different clients can be told apart."
    )


def _method(report: PrivacyReport) -> str:
    accountant = ACCOUNTANTS[report.method]
    said = f"Method: {accountant.says} The value is an upper bound."
    replaced = accountant.instead and np.any(np.isfinite(report.rdp_order))
    return f"{said} {accountant.instead}" if replaced else said


def _per_client(report: PrivacyReport, names: Sequence[str]) -> str:
    values = [rounded_up(float(e)) for e in report.epsilon]
    if len(set(values)) == 1:
        return f"Per client: ε = {values[0]} for each of the {len(values)} clients."
    return "Per client: " + ", ".join(f"{name} ε = {value}" for name, value in zip(names, values)) + "."


def _assumptions(report: PrivacyReport, preparation_rounds: int) -> list[str]:
    s = report.settings
    rounds = f"all {s.num_rounds} rounds are counted"
    if preparation_rounds:
        rounds += f", {preparation_rounds} of preparation and warm-up among them"
    if s.num_chains > 1:
        rounds += f", in each of {s.num_chains} chains"
    items = [
        f"replacing a record moves a gradient sum by at most {s.delta_gradient:g}, whatever the position",
        "a client's own noise comes from a secret source that never leaves the client, and its generator "
        "(Threefry-2x32, keyed with 64 bits of entropy) cannot be told from chance",
        "the start does not depend on the data",
        rounds,
        "noise shared between clients is known to the observer and not counted",
    ]
    if s.batch_size is not None:
        items.insert(1, "batches are drawn afresh and independently at every step, and stay secret")
    if s.scheme != "full" and report.participation == "hidden":
        items.append("clients are drawn at random in every round, not chosen, nor by a seed fixed beforehand")
    return items


def _not_covered(report: PrivacyReport) -> list[str]:
    items = [
        "settings tuned on the same data, and any other run or release from it",
        "several records of one person",
        "the number of records of a client, and that it takes part",
        "side channels such as computing time and the finite precision of arithmetic",
    ]
    if report.settings.scheme != "full" and report.participation == "hidden":
        items.append("a promise to a client that was drawn more often than expected, given that it was")
    return items
