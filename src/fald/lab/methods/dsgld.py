r"""Distributed SGLD (DSGLD): a chain that visits one client at a time.

The chain visits client s with probability f_s = p_s for K steps,

    θ ← θ − η[∇U_0 + ∇Ũ_s/f_s] + √(2ητ) ξ,      U_0 = −log π0,

which is FA-LD with one participant drawn with replacement.

Reference: Ahn, Shahbaba and Welling, "Distributed stochastic gradient MCMC", ICML 2014.
"""

from __future__ import annotations

from dataclasses import dataclass

from fald.core.reveals import Reveals
from fald.core.types import StepSize
from fald.langevin.fald import FALD, fald, variant
from fald.settings.participation import with_replacement


@dataclass(frozen=True)
class DSGLD(FALD):
    """The method; made by ``dsgld``."""

    reveals = Reveals()  # of one client a round: a sum over it would hide nothing
    participation = with_replacement(1)  # with probability p_c
    meets = "client"


def dsgld(
    *, local_steps: int, step_size: StepSize, temperature: float = 1.0, batch_size: int | None = None
) -> DSGLD:
    """DSGLD: visits to one client after the other, each for K steps.

    Notes
    -----
    A foil: between visits the chain runs to the client's own posterior, so its variance grows with the
    differences between clients and with K η.

    Examples
    --------
    >>> dsgld(local_steps=10, step_size=1e-3).participation.num_participants
    1
    """
    given = {"temperature": temperature, "batch_size": batch_size}
    return variant(DSGLD, fald(local_steps=local_steps, step_size=step_size, **given), name="dsgld")
