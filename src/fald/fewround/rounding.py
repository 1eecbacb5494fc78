r"""No more digits than the answer needs: what a site sends lies on a grid.

A log likelihood is known to 2⁻¹² nats, a derivative to 2⁻¹² nats per sd of its parameter in the request's
proposal. A request without a proposal knows no sd, and one between 2⁻¹⁰ and 2¹⁰, or that of the prior, is
allowed for. Steps of the grid are powers of two, so that sums over sites are exact in float64 and in the
secure sum alike, whatever the order.

Rounding is dithered: x becomes one of its two neighbours on the grid, the nearer one with the larger chance,
so that on average nothing is lost. The dither follows from the request and the site's name, and the same
request gets the same answer: asking twice tells nothing new. It is one of the request, moved on round the
circle by a number of the site's, which leaves any two errors of a sum as independent as dithers of their own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
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
_TOGETHER = 1 << 15  # numbers of some sites that are rounded at once and stay in a core's cache


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
        self._dithers: dict[tuple[str, tuple[int, ...]], Array] = {}
        self._steps = {
            name: np.exp2([np.zeros(()), own, own[:, None] + own][KINDS[kind].axes] - grid)
            for name, (kind, _) in ARRAYS.items()
            for own, grid in [(units[KINDS[kind].power], KINDS[kind].grid)]
            if grid is not None
        }

    def rounded(self, name: str, answer: Answer) -> Answer:
        """The answer of one site."""
        alone = {array: np.asarray(value, np.float64)[None] for array, value in answer.items()}
        return self.summed([name], alone)

    def summed(self, names: Sequence[str], answers: Answer) -> Answer:
        """The sum of what some sites send, from their answers (sites, …)."""
        own = np.array([self._number(name) / 2**128 for name in names])
        out: Answer = {}
        for array, values in answers.items():
            values = np.asarray(values, np.float64)
            few = max(1, _TOGETHER // max(1, values[0].size))
            out[array] = np.zeros(values.shape[1:])
            with np.errstate(over="ignore", invalid="ignore"):  # what is beyond all numbers stays so
                for first in range(0, len(values), few):
                    each = slice(first, first + few)
                    out[array] += np.sum(self._on_grid(array, values[each], own[each]), axis=0)
        return out

    def _on_grid(self, array: str, values: Array, own: Array) -> Array:
        """Values (sites, …) of one array, each rounded with the dither of its site."""
        if array not in self._steps:
            return values
        step, shape = self._steps[array], values.shape[1:]
        if (array, shape) not in self._dithers:
            draw = np.random.Generator(np.random.Philox(self._number(array)))
            self._dithers[array, shape] = draw.random(shape)
        dither = self._dithers[array, shape] + own.reshape(-1, *[1] * len(shape))
        dither -= np.floor(dither)
        dither += values * (1 / step)  # which is exact, as steps are powers of two
        return np.floor(dither, out=dither) * step

    def _number(self, name: str) -> int:
        """128 bits that follow from the request and a name."""
        key = self._key.copy()
        key.update(name.encode())
        return int.from_bytes(key.digest()[:16], "little")


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
