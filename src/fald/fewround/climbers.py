"""Climbers: many places far around a proposal, from which gradients lead to hills that it does not know.

An explorer needs Hessians; climbers need gradients alone, so that there can be many. Far out even a small
hill has a side wide enough to be met in any number of dimensions, and in the proposal's units one step along
the gradient leads from anywhere on a hill as wide as the proposal to its top. A climber is on another hill
when the way from it to the proposal's mode leads through a valley.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.fewround import lookouts
from fald.fewround.proposal import Proposal

Array = NDArray[Any]

DIP = 0.1  # nats by which a path may fall and still be one hill
_FIRST, _LATER = 2048, 256  # climbers at first, and at most from then on
_NEAREST, _FURTHEST = 2.0, 20.0  # sds from the proposal's bulk at which they begin
_RINGS = 8  # shells of climbers
_SAME = 0.5  # sds between two places on one hill
_HOME = 2.0  # sds from the proposal's centre within which a hilltop is its own
_PATH = 12
_SEARCHED = 2  # steps up after which nobody is sent from far below the mode
_THIN = 0.4  # curvature below which a shell is wide, the proposal's being one
_MOST_THIN, _MOST_RAYS = 4, 16  # such directions of a shell, and of all of them
_ALIKE = 0.95  # cosine of two directions that are one
_OUT, _CROWD = 5.0, 3  # sds from the centre that are far out, and how many there show a direction
_SENT = 8  # explorers sent at a time, from the deepest valleys; other climbers beyond a valley wait
_LEAST = -10.0  # nats of mass, relative to the proposal's, that a hill must have
_RAISED = 16  # of every shell, those that rise most above the proposal climb on
_STRAIGHT = 0.8  # cosine of how slopes and places of two climbers differ, if they are on one round hill
_TWIN = 0.99  # of the way out at which a second one stands beside one far out
_NARROW = 0.8  # curvature of hills that are looked for far out, the proposal's being one


def plain(dim: int) -> float:
    """How many nats below a hilltop the plain is, from which every hill can be seen."""
    return 20.0 + 3 * dim


def valley(values: Array) -> Array:
    """How deep the deepest valley of each path is: how far below places on both sides of it.

    Examples
    --------
    >>> valley(np.array([[0.0, 1.0, 3.0], [2.0, 0.5, 3.0]]))
    array([0. , 1.5])
    """
    values = np.maximum(values, -1e300)
    before = np.maximum.accumulate(values, axis=-1)
    after = np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]
    return np.max(np.minimum(before, after) - values, axis=-1)


class Climbers:
    """Climbers around the first core of a proposal, in its units; a quarter of them as far as ``reach``."""

    def __init__(self, around: Proposal, rng: np.random.Generator, reach: float = _FURTHEST):
        self._centre, self._factor = around.means[0], around.factors[0]
        ways = rng.standard_normal((_FIRST, around.dim))
        ways /= np.linalg.norm(ways, axis=1)[:, None]
        far = np.exp(rng.uniform(np.log(_NEAREST), np.log(_FURTHEST), _FIRST))
        if reach > _FURTHEST:
            beyond = slice(0, _FIRST // 4)
            far[beyond] = np.exp(rng.uniform(np.log(_FURTHEST), np.log(reach), _FIRST // 4))
        far = np.sort(far)
        self._next = self._places = (far + np.sqrt(around.dim) - 1)[:, None] * ways
        self._slopes = np.zeros_like(ways)
        self._heights, self._reach = np.full(_FIRST, -np.inf), np.ones(_FIRST)
        self._thin = self._sent = np.zeros((0, around.dim))
        self.waiting = self._steps = self._joined = self._twins = 0
        self._mode = np.zeros(around.dim)
        self._lookouts = lookouts.around(around.dim, rng)
        self._lines = lookouts.outward(around.dim, reach, rng)

    @property
    def _setting_out(self) -> bool:
        return len(self._next) == _FIRST

    @property
    def positions(self) -> Array:
        """(M, d) where they want to know the log posterior and its gradient next."""
        return self._centre + self._next @ self._factor.T

    @property
    def lookouts(self) -> Array:
        """(L, d) where they want to know the log posterior alone, at the first step."""
        return self._centre + self._lookouts[: None if self._setting_out else 0] @ self._factor.T

    @property
    def far_lookouts(self) -> Array:
        """(F, d) the same far beyond the bulk."""
        lines = self._lines[: None if self._setting_out else 0]
        return self._centre + lines.reshape(-1, len(self._centre)) @ self._factor.T

    @property
    def thin(self) -> Array:
        """(T, d) directions of mass far out, known after the first step.

        Those to which climbers crowd that stay far out, and those in which the posterior is wide there.
        """
        places = self._next[: 0 if self._setting_out else None]
        ways = np.concatenate([_crowds(places), self._thin])[:_MOST_RAYS]
        return ways @ self._factor.T

    def paths(self, mode: Array) -> Array:
        """(P, d) points on the ways from there to the proposal's mode, none before the first step."""
        starts = self.positions[: 0 if self._setting_out else None]
        self._mode = np.linalg.solve(self._factor, mode - self._centre)
        parts = np.linspace(0, 1, _PATH + 1)[1:, None]
        return (starts[:, None] + parts * (mode - starts[:, None])).reshape(-1, len(mode))

    def climb(self, values: Array, gradients: Array, along: Array) -> Array:
        """Take a step.

        Parameters
        ----------
        values, gradients
            Log posterior (M,) and its gradient (M, d) at ``positions``.
        along
            Log posterior (P,) on the paths.

        Returns
        -------
        Array
            (T, d) where there may be another hill.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            slopes = gradients @ self._factor
            seen = np.isfinite(np.sum(slopes**2, axis=1)) & np.isfinite(values)
        hills = self._next[:0]
        if self._setting_out:
            deep = np.zeros(len(values))
            found, self._thin = _wide_hills(self._next[seen], slopes[seen])
        else:
            ways = along.reshape(-1, _PATH)  # which end at the mode
            deep = valley(np.concatenate([values[:, None], ways], axis=1))
            self._steps += 1
            # far below all tops a valley may be no more than a bend of the slope, along which one climbs on
            new = np.arange(len(values)) >= len(values) - self._joined
            high = seen & (values > ways[:, -1] - plain(len(self._centre)))
            deep = np.where(high | (seen & ~new & (self._steps <= _SEARCHED)), deep, 0.0)
            found = self._choose(deep)
            if self._steps == 1:
                with np.errstate(invalid="ignore"):
                    raised = values - ways[:, -1]
                hills = self._round_hills(high & new & (not len(found)), seen, slopes, raised)
        apart = np.linalg.norm(self._next[:, None] - self._sent, axis=2).min(axis=1, initial=np.inf)
        waits = seen & (deep > DIP) & (apart > _SAME)
        up = seen & (values >= self._heights)
        self._places = np.where(up[:, None], self._next, self._places)
        self._slopes = np.where(up[:, None], slopes, self._slopes)
        self._heights = np.where(up, values, self._heights)
        self._reach = np.where(up, np.minimum(2 * self._reach, 1.0), self._reach / 3)
        pointed = np.linalg.norm(self._places + self._slopes, axis=1)
        self._go_on(waits, np.isfinite(self._heights) & (pointed > _HOME) & (deep <= DIP))
        self._join(hills + self._mode)
        self.waiting += len(hills)
        return self._centre + found @ self._factor.T

    def _choose(self, deep: Array) -> Array:
        """(T, d) places beyond the deepest valleys, each on a hill to which nobody was sent yet."""
        new = np.zeros((0, self._next.shape[1]))
        for i in np.argsort(-deep, kind="stable"):
            if deep[i] <= DIP or len(new) == _SENT:
                break
            known = np.concatenate([self._sent, new])
            if np.linalg.norm(known - self._next[i], axis=1).min(initial=np.inf) > _SAME:
                new = np.append(new, self._next[i][None], axis=0)
        self._sent = np.concatenate([self._sent, new])
        return new

    def watch(self, positions: Array, raised: Array) -> None:
        """Let others climb from where the posterior rises most above what is known of it.

        Parameters
        ----------
        positions, raised
            (N, d) and (N,) log posterior less that of the proposal's cores. Tails rise the more the further
            out, so that places are compared within shells.
        """
        places = np.linalg.solve(self._factor, (positions - self._centre).T).T
        order = np.argsort(np.linalg.norm(places, axis=1), kind="stable")
        best = [s[np.argsort(-raised[s], kind="stable")[:_RAISED]] for s in np.array_split(order, _RINGS)]
        self._join(places[np.concatenate(best)])

    def watch_far(self, levels: Array) -> None:
        """Let others climb in pairs from where the log posterior (F,) at ``far_lookouts`` falls least."""
        places = lookouts.risen(self._lines, levels.reshape(self._lines.shape[:2]))
        self._twins = 2 * len(places)
        self._join(np.concatenate([places, _TWIN * places]))

    def _round_hills(self, near: Array, seen: Array, slopes: Array, raised: Array) -> Array:
        """(T, d) tops, less the mode, of round hills on which some stand that joined, ``near`` or far out.

        Those far out are the last that joined. Few of them are on a hill, and most are far below all tops.
        """
        far = seen & (np.arange(len(seen)) >= len(seen) - self._twins)
        groups = (near & ~far, 0.0), (far, _NARROW)
        places = self._next - self._mode
        tops = [_round_hills(places[on], slopes[on], raised[on], least) for on, least in groups]
        return np.concatenate(tops)

    def _join(self, places: Array) -> None:
        """Let others climb from these places (N, d)."""
        self._joined += len(places)
        self._next, self._places = (np.concatenate([a, places]) for a in (self._next, self._places))
        self._slopes = np.concatenate([self._slopes, np.zeros_like(places)])
        self._heights = np.append(self._heights, np.full(len(places), -np.inf))
        self._reach = np.append(self._reach, np.ones(len(places)))

    def rest(self) -> None:
        """Look no further."""
        nobody = np.zeros(len(self._next), bool)
        self._go_on(nobody, nobody)

    def _go_on(self, waits: Array, climbs: Array) -> None:
        """Let those that wait and some that climb step up, none further than it is away."""
        waiting, climbing = np.flatnonzero(waits)[:_LATER], np.flatnonzero(climbs)
        self.waiting, self._joined, room = len(waiting), 0, _LATER - len(waiting)
        left = np.concatenate([waiting, climbing[:: len(climbing) // max(room, 1) + 1][:room]])
        self._places, self._slopes = self._places[left], self._slopes[left]
        self._heights, self._reach = self._heights[left], self._reach[left]
        steep = np.linalg.norm(self._slopes, axis=1)
        part = np.minimum(self._reach, np.linalg.norm(self._places, axis=1) / np.maximum(steep, 1e-300))
        self._next = self._places + part[:, None] * self._slopes


def _round_hills(places: Array, slopes: Array, values: Array, least: float = 0.0) -> Array:
    """(T, d) tops, away from the mode, of round hills on which two climbers stand each, the highest first.

    On a round hill of curvature a around c the slopes are a(c − x): two of them give a, which must be more
    than ``least``, and c. The hill must lie on the same side of the mode as both climbers, and have mass that
    matters; places (M, d) and values (M,) are relative to the mode.
    """
    i, j = np.triu_indices(len(places), 1)
    apart, turned = places[i] - places[j], slopes[j] - slopes[i]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        square, inner = np.sum(apart**2, axis=1), np.sum(apart * turned, axis=1)
        curve = inner / square
        straight = inner / np.sqrt(square * np.sum(turned**2, axis=1))
        tops = (places[i] + places[j]) / 2 + (slopes[i] + slopes[j]) / (2 * curve[:, None])
        height = values[i] + np.sum(slopes[i] * (tops - places[i]), axis=1) / 2
        side = np.minimum(np.sum(tops * places[i], axis=1), np.sum(tops * places[j], axis=1))
        mass = height - places.shape[1] / 2 * np.log(curve)
        good = (straight > _STRAIGHT) & (curve > least) & (side > 0) & (mass > _LEAST)
        good &= (np.sum(tops**2, axis=1) > (_HOME + 1) ** 2) & (height > values.max(initial=-np.inf))
    order = np.flatnonzero(good)[np.argsort(-height[good], kind="stable")]
    chosen = np.zeros((0, places.shape[1]))
    while len(order) and len(chosen) < _SENT:
        chosen = np.append(chosen, tops[order[:1]], axis=0)
        order = order[np.linalg.norm(tops[order] - chosen[-1], axis=1) > 1]
    return chosen


def _crowds(places: Array) -> Array:
    """(T, d) directions, the most crowded first, along which several of some places (M, d) lie far out.

    From everywhere beside a thin ridge the slopes lead to its axis, far from the centre, and stay there.
    """
    size = np.linalg.norm(places, axis=1)
    ways = places[size > _OUT] / size[size > _OUT, None]
    alike = ways @ ways.T > _ALIKE
    found, left = [], np.ones(len(ways), bool)
    while len(found) < _MOST_RAYS:
        counts = np.sum(alike & left, axis=1) * left
        if np.max(counts, initial=0) < _CROWD:
            break
        own = alike[int(np.argmax(counts))] & left
        middle = ways[own].sum(axis=0)
        found.append(middle / np.linalg.norm(middle))
        left &= np.abs(ways @ found[-1]) <= _ALIKE
    return np.reshape(found, (-1, places.shape[1]))


def _wide_hills(places: Array, slopes: Array) -> tuple[Array, Array]:
    """(T, d) tops of hills wider than the proposal, which are all there is far out, and directions (W, d).

    Single steps fall short of such a top; a linear fit to the slopes of a whole shell leads to it, and the
    fits of two shells agree. Directions in which a shell curves much less than the proposal are those of
    thin mass far out.
    """
    count, dim = places.shape
    tops, ends, thin = np.zeros((0, dim)), np.zeros(0), np.zeros((0, dim))
    rings = min(_RINGS, count // (3 * (dim + 1)))
    for ring in np.array_split(np.arange(count), rings) if rings else []:
        middle, slope = places[ring].mean(axis=0), slopes[ring].mean(axis=0)
        bend = np.linalg.lstsq(places[ring] - middle, slopes[ring] - slope, rcond=None)[0]
        bend = (bend + bend.T) / 2
        curves, axes = np.linalg.eigh(bend)
        flat = axes.T[curves > -_THIN][::-1][:_MOST_THIN]
        new = [axis for axis in flat if not len(thin) or np.max(np.abs(thin @ axis)) < _ALIKE]
        thin = np.append(thin, np.reshape(new, (-1, dim)), axis=0)
        if curves[-1] < 0:
            tops = np.append(tops, [middle - np.linalg.solve(bend, slope)], axis=0)
            ends = np.append(ends, np.linalg.norm(places[ring[-1]]))
    away = np.linalg.norm(tops, axis=1)
    tops = tops[(away > _HOME) & (away < ends)]
    near = np.linalg.norm(tops[:, None] - tops, axis=2) < 1
    return tops[(near.sum(axis=1) > 1) & ~np.tril(near, -1).any(axis=1)], thin[-_MOST_RAYS:]
