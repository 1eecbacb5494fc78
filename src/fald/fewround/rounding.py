r"""No more digits than the answer needs: what a site sends lies on a grid.

A log likelihood is known to 2⁻¹² nats, a derivative to 2⁻¹² nats per sd of its parameter in the request's
proposal. A request without a proposal knows no sd, and one between 2⁻¹⁰ and 2¹⁰, or that of the prior, is
allowed for. Steps of the grid are powers of two, so that sums over sites are exact in float64 and in the
secure sum alike, whatever the order.

Rounding is dithered: x becomes one of its two neighbours on the grid, the nearer one with the larger chance,
so that on average nothing is lost. The dither follows from the request and the site's name, and the same
request gets the same answer: asking twice tells nothing new.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.core.reveals import KINDS
from fald.fewround.proposal import Proposal, overall
from fald.fewround.site import ARRAYS, Answer, Request
from fald.fewround.target import Target
from fald.problem.model import Model

Array = NDArray[Any]

_REACH = 10.0  # of the binary logarithm of an sd that nobody knows yet
_WIDEST = 1e9  # a prior may say that it is as large as this


def rounded(model: Model, name: str, request: Request, answer: Answer) -> Answer:
    """An answer of the site ``name`` on its grid; what is not a number stays what it is.

    Parameters
    ----------
    model
        The model.
    name
        The site.
    request
        The request as it was asked, before ``expand``.
    answer
        What ``fald.fewround.site.answer`` gave.
    """
    return Grid(model, request).rounded(name, answer)


class Grid:
    """The grid of one request, for the answers of all sites to it; as ``rounded``."""

    def __init__(self, model: Model, request: Request):
        self._key = hashlib.sha256()
        for part in sorted(request):
            self._key.update(part.encode() + np.ascontiguousarray(request[part]).tobytes())
        units = {power: _units(model, request, power) for power in (-1, 0, 1)}
        self._steps = {
            name: np.exp2([np.zeros(()), own, own[:, None] + own][KINDS[kind].axes] - grid)
            for name, (kind, _) in ARRAYS.items()
            for own, grid in [(units[KINDS[kind].power], KINDS[kind].grid)]
            if grid is not None
        }

    def rounded(self, name: str, answer: Answer) -> Answer:
        """The answer of one site."""
        key = self._key.copy()
        key.update(name.encode())
        dither = np.random.Generator(np.random.Philox(int.from_bytes(key.digest()[:16], "little")))
        out: Answer = {}
        for array in sorted(answer):
            value = np.asarray(answer[array], np.float64)
            if array in self._steps:
                step = self._steps[array]
                # times the inverse, which is exact, as steps are powers of two
                with np.errstate(over="ignore"):  # what is beyond all numbers stays so
                    value = np.floor(value * (1 / step) + dither.random(value.shape)) * step
            out[array] = value
        return out


def _units(model: Model, request: Request, power: int) -> Array:
    """(d,) binary logarithms of the parameters' sds to a power, rounded down."""
    if "proposal_means" in request:
        parts = (request[f"proposal_{part}"] for part in ("weights", "means", "factors"))
        logs = np.log2(np.diag(overall(Proposal(*map(np.asarray, parts)))[1])) / 2
    else:
        known = _prior_logs(model)
        logs = np.maximum(known, _REACH) if power < 0 else np.minimum(known, -_REACH)
    return np.floor(power * logs)


@functools.lru_cache(maxsize=32)
def _prior_logs(model: Model) -> Array:
    # an effect on a sum of money may have an sd of millions, and a curvature of 1e-13 must not be lost
    return np.log2(np.diag(Target(model).prior_scale(widest=_WIDEST)[1])) / 2
