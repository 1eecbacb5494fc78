"""The judgement of a result: one list of checks, and the worst of them in plain words.

Terminal, ``--strict``, ``fald diagnose``, JSON and report all show this list, under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Colour = Literal["green", "amber", "red", "none"]
Facts = Mapping[str, Any]

WORDS: dict[str, str] = {"green": "fine", "amber": "care", "red": "stop", "none": "not known"}
HEADLINES = {
    "red": "Do not use this result.",
    "amber": "Use this result with care.",
    "green": "No problem found.",
}


@dataclass(frozen=True)
class Check:
    """One check of a result.

    Attributes
    ----------
    name, colour
        What it is called everywhere, and green (fine), amber (care), red (stop) or none (not made).
    shown
        What was found, in a few characters.
    sentence, advice
        What that means, and what to do about it; no advice where nothing is wrong.
    rule
        Where its borders are.
    strict
        Whether ``--strict`` objects: always when red, and when the sampling itself needs care.
    """

    name: str
    colour: Colour
    shown: str
    sentence: str
    rule: str
    advice: str = ""
    strict: bool = False


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


def judgement(checks: Sequence[Check]) -> dict[str, Any]:
    """The worst of some checks in plain words, and all of them.

    Returns
    -------
    dict
        ``colour`` and ``word`` of the worst, ``headline``, ``first`` (the first line of a terminal),
        ``reasons`` (sentences and advice of all that are red or amber, the worst first), ``objections``
        (those that ``--strict`` minds) and ``checks``.

    Examples
    --------
    >>> judgement([Check("Accuracy", "green", "reached", "It was reached.", "")])["first"]
    'No problem found.'
    >>> judgement([Check("Sites", "red", "0 of 1", "Site a never took part.", "")])["first"]
    'Do not use: Site a never took part.'
    """
    colours = [check.colour for check in checks]
    worst = "red" if "red" in colours else "amber" if "amber" in colours else "green"
    bad = [check for colour in ("red", "amber") for check in checks if check.colour == colour]
    opening = {"red": "Do not use", "amber": "Use with care"}
    return {
        "colour": worst,
        "word": WORDS[worst],
        "headline": HEADLINES[worst],
        "first": f"{opening[worst]}: {bad[0].sentence}" if bad else HEADLINES[worst],
        "reasons": [f"{c.sentence} What to do: {c.advice}." if c.advice else c.sentence for c in bad],
        "objections": [f"{c.name}: {c.sentence}" for c in bad if c.colour == "red" or c.strict],
        "checks": [{**asdict(check), "word": WORDS[check.colour]} for check in checks],
    }


def listed(names: Sequence[str]) -> str:
    """Some sites by name, for a sentence.

    Examples
    --------
    >>> listed(["north"]), listed(["north", "south"])
    ('Site north', 'Sites north, south')
    """
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"Site{'s' if len(names) > 1 else ''} {', '.join(names[:5])}{more}"
