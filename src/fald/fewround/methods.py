"""The few-round methods by name: what results call them, and which requests each makes of the sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FitMethod = Literal["auto", "importance", "corrected", "fa-ld"]


@dataclass(frozen=True)
class FewRound:
    """What a few-round method declares of itself.

    Attributes
    ----------
    requests
        Kinds of requests that it makes, of ``fald.fewround.site.ANSWERS``.
    without_curvature
        Those that it makes where second derivatives may not leave a site; empty where it needs them.
    """

    requests: tuple[str, ...] = ()
    without_curvature: tuple[str, ...] = ()


_IMPORTANCE = FewRound(
    ("point", "draw", "state", "anchor", "smooth", "local"), without_curvature=("point", "draw", "state")
)

FIT_METHODS: Mapping[str, FewRound] = {
    "auto": _IMPORTANCE,  # and split-HMC, whose requests are among these
    "importance": _IMPORTANCE,
    "corrected": FewRound(("point", "state", "anchor", "step")),
    "fa-ld": FewRound(),  # planned from the rows, so that it asks no site
}

# what results call a method, by what an outcome says of itself
NAMES = {
    "importance": "adaptive importance sampling",
    "split-hmc": "adaptive importance sampling, then split-HMC",
    "corrected-langevin": "corrected federated Langevin dynamics with a certified end",
}


def requests_of(method: str, curvature: bool = True) -> tuple[str, ...]:
    """Kinds of requests that a method may make of a site.

    Examples
    --------
    >>> requests_of("importance", curvature=False)
    ('point', 'draw', 'state')
    """
    declared = FIT_METHODS[method]
    return declared.requests if curvature else declared.without_curvature
