"""Adaptive importance sampling over a federation: a posterior in three to eight rounds.

Round 1 asks every site for a quadratic picture of its own rows. From then on each round evaluates the
posterior at thousands of draws from a proposal that all sites make themselves, at Newton candidates and
explorers, and the proposal is adapted to all that is known. The end is certified on the newest draws alone,
because draws that shaped the proposal flatter it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fald.fewround import certify, explorers, proposal
from fald.fewround.certify import Check
from fald.fewround.climbers import Climbers
from fald.fewround.evaluate import prior_derivatives
from fald.fewround.exchange import Server
from fald.fewround.mixture import fit_mixture
from fald.fewround.outcome import Outcome
from fald.fewround.proposal import Proposal
from fald.fewround.site import Answer, checksum
from fald.fewround.target import Derivatives, Target
from fald.fewround.weights import Moments, Precision, Smoothed, moments, precision, smooth
from fald.models.base import Model

Array = NDArray[Any]

FIRST_DRAWS, MOST_DRAWS = 8192, 262144
MOST_HESSIAN = 200  # parameters up to which curvatures are asked for
_NEAR = 10.0  # posterior sds from the mode at which the smoothed posterior takes over from Newton's method
_POOLED = 4  # rounds whose draws are pooled
_REGRESSED = 16  # gradients per parameter that a Hessian is regressed from
_ANCHORED = (1.0, 0.5, 0.25, 0.1, 1.5, 2.2, 3.2, 4.5)  # parts of a Newton step with derivatives
_TRIED = (0.005, 0.02, 0.05, 0.35, 0.7)  # parts with values only


class Batch(NamedTuple):
    """The draws of one round: proposal, asked count, positions (C, d) and log posterior (C,).

    ``densities`` are the log densities (C,) of these draws under proposals of recent rounds, by round.
    """

    number: int
    proposal: Proposal
    count: int
    positions: Array
    values: Array
    densities: dict[int, Array]

    def density(self, other: Batch) -> Array:
        """Log density (C,) of these draws under the proposal of another round, which is computed once."""
        if other.number not in self.densities:
            self.densities[other.number] = proposal.log_density(other.proposal, other.count, self.positions)
        return self.densities[other.number]


class State(NamedTuple):
    """What the draws so far say."""

    newest: Smoothed
    pooled: Smoothed
    precision: Precision
    moments: Moments
    all_moments: Moments
    all_positions: Array
    all_logs: Array


@dataclass
class Search:
    """Everything the server remembers between rounds."""

    target: Target
    seed: int
    tolerance: float
    names: list[str]
    modes: explorers.Modes
    report: Any = None
    curvature: bool = True
    climbers: Climbers | None = None
    batches: list[Batch] = field(default_factory=list)
    best: Derivatives | None = None
    smoothed: Derivatives | None = None
    heavy_rounds: int = 0
    trace: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def make(model: Model, *, seed: int, tolerance: float, **others: Any) -> Search:
        """A search that knows nothing yet."""
        target, names = Target(model), list(model.parameter_names)
        return Search(target, seed, tolerance, names, explorers.Modes(target), **others)

    @property
    def hessians(self) -> bool:
        """Whether sites are asked for Hessians; otherwise gradients at many draws stand for them."""
        return self.curvature and self.target.dim <= MOST_HESSIAN

    @property
    def many(self) -> bool:
        """Whether there are so many parameters that only a very good Gaussian has usable weights."""
        return self.target.dim > 60

    @property
    def num_smoothed(self) -> int:
        """Draws over which derivatives are averaged; their noise must stay small against one sd in all d."""
        return int(np.clip(16 * self.target.dim, 128, 512 if self.target.dim <= 60 else 256))

    @property
    def most_draws(self) -> int:
        """Draws of a round at most; few parameters do not need many."""
        return MOST_DRAWS if self.target.dim > 15 else MOST_DRAWS // 4

    @property
    def first_draws(self) -> int:
        """Draws of the first rounds: enough for a regression of the gradients where there are no Hessians."""
        enough = FIRST_DRAWS if self.hessians else 1.5 * _REGRESSED * self.target.dim
        return int(2 ** np.ceil(np.log2(max(FIRST_DRAWS, enough))))

    def generator(self, stream: int) -> np.random.Generator:
        """A random stream of the server."""
        return np.random.Generator(np.random.Philox([self.seed & (2**64 - 1), stream]))

    def improve(self, found: list[Derivatives]) -> None:
        """Keep the highest point with derivatives as the one that Newton's method goes on from."""
        for here in found:
            if here.finite and (self.best is None or here.value > self.best.value):
                self.best = here
        self.modes.lead(self.best)

    def note(self, **values: Any) -> None:
        """Add a line to the trace of rounds."""
        empty = {"draws": 0, "khat": np.nan, "ess": np.nan}
        newton = self.best.newton()[1] if self.best else np.nan
        self.trace.append({**empty, "newton": newton, "explorers": len(self.modes.active), **values})


def importance_sampling(model: Model, *, max_rounds: int, **common: Any) -> Server[tuple[Outcome, Proposal]]:
    """Server of adaptive importance sampling.

    Parameters
    ----------
    model
        The model.
    max_rounds
        Give up after so many.
    common
        ``seed`` of all draws; ``tolerance``, the wanted precision of means and sds in posterior sds;
        ``report``, a function from positions (C, d) to reported quantities (C, k) that are certified too, or
        None; ``curvature``, whether sites may be asked for Hessians; ``trace``, a list that gets a line per
        round.

    Returns
    -------
    Server
        Yields requests; returns the outcome and the last proposal, from which another method may go on.
    """
    search = Search.make(model, **common)
    current = yield from first_round(search)
    return (yield from certified_rounds(search, current, 2, max_rounds))


def certified_rounds(
    search: Search, current: Proposal, first: int, max_rounds: int
) -> Server[tuple[Outcome, Proposal]]:
    """Rounds of draws from ``current`` and its successors until they are certified, or give up."""
    count, outcome = search.first_draws, None
    for number in range(first, max_rounds + 1):
        state, checks = yield from _round(search, current, count, number)
        count = _next_count(search, state, count)
        outcome = _outcome(search, state, checks)
        search.heavy_rounds = search.heavy_rounds + 1 if "tails" in outcome.failed else 0
        if outcome.reached or set(outcome.failed) <= {"one mode", "tails"}:
            break
        current = _adapt(search, state, current)
        if _hopeless(search):
            break
    assert outcome is not None
    return outcome, current


def first_round(search: Search) -> Server[Proposal]:
    """Ask every site for its own quadratic, and look around; returns the sites' consensus."""
    target, rng = search.target, search.generator(5)
    centre, covariance = target.prior_scale()
    wide = explorers.scouts(centre, covariance, rng)
    request: dict[str, Array] = {"points": wide}
    if search.curvature:
        request["local_start"] = target.start
    if search.hessians:
        request["anchors"] = target.start[None]
    else:
        cloud = proposal.draw(
            proposal.gaussian(target.start, 1e-3 * covariance), 2 * _REGRESSED * target.dim, search.seed
        )
        request["states"] = np.concatenate([target.start[None], cloud])
    sums = yield request
    if search.hessians:
        here = target.derivatives(target.start[None], sums)[0]
    else:
        here = target.regressed(sums, request["states"], len(request["states"]) - 1)[0][0]
    seen = target.values(wide, sums["point_values"])
    best = int(np.argmax(seen))
    search.best = here if here.finite else None
    consensus = None
    sites = float(sums.get("local_sites", 0.0))
    if sites > 0:
        consensus = target.quadratic_mode(sums["local_precision"], sums["local_shift"], target.start)
    if consensus is None and here.finite:
        step, decrement = here.newton()
        consensus = target.start + step / max(1.0, decrement / 3), here.covariance()
    if consensus is None:
        consensus = (wide[best], covariance) if np.isfinite(seen[best]) else (target.start, covariance)
    spread = covariance
    if sites > 1:
        mean = sums["local_mode"] / sites
        spread = sums["local_square"] / sites - np.outer(mean, mean) + consensus[1]
    root = proposal.cholesky(spread)
    around = consensus[0] + rng.standard_normal((explorers.EACH, target.dim)) @ root.T
    search.modes.send(np.concatenate([around, explorers.promising(wide, seen, rng, explorers.EACH)]))
    search.note(mean=consensus[0], sd=np.sqrt(np.diag(consensus[1])))
    return proposal.gaussian(*consensus)


def _request(search: Search, current: Proposal, count: int, number: int) -> tuple[dict[str, Any], Array]:
    """The request of one round, and the draws of its proposal."""
    seed = (search.seed * 1_000_003 + number) & (2**63 - 1)
    draws = proposal.draw(current, count, seed)
    request = {
        "proposal_weights": current.weights,
        "proposal_means": current.means,
        "proposal_factors": current.factors,
        "proposal_count": np.asarray(count),
        "proposal_seed": np.asarray(seed),
        "proposal_checksum": checksum(draws),
    }
    if search.hessians:
        request["smooth"] = np.asarray(search.num_smoothed)
    return request, draws


def _round(search: Search, current: Proposal, count: int, number: int) -> Server[tuple[State, list[Check]]]:
    """One exchange, and what follows from it about modes, weights and tails."""
    target, modes = search.target, search.modes
    request, draws = _request(search, current, count, number)
    candidates, tries = line(search, current)
    anchors = np.concatenate([candidates, *[e.position[None] for e in modes.active]])
    known = modes.known
    centre, spread = proposal.overall(current)
    mode = search.best.position if search.best else centre
    ways = certify.tail_directions(centre, mode, spread, _far(search, centre))
    if search.climbers is None:
        search.climbers = Climbers(current, search.generator(7))
    around = search.climbers.positions
    parts = [tries, modes.paths(known), certify.tail_points(centre, ways), search.climbers.paths(mode)]
    points = np.concatenate(parts)
    cloud = min(_REGRESSED * target.dim, int(proposal.strata(current, count).counts[0, 0]))
    if search.hessians:
        states = {"states": around} if len(around) else {}
        sums = yield {**request, **states, "anchors": anchors, "points": points}
        found = target.derivatives(anchors, sums)
        search.smoothed = _smooth_derivatives(search, current, draws, sums)
    else:
        states = np.concatenate([around, anchors, draws[:cloud]])
        sums = yield {**request, "states": states, "points": points}
        found, search.smoothed = target.regressed(sums, states, cloud)
        found = found[len(around) :]
    values = target.values(draws, sums["draw_values"])
    search.batches.append(Batch(number, current, count, draws, values, {}))
    _, along, far, down = np.split(
        target.values(points, sums["point_values"]), np.cumsum([len(p) for p in parts])[:-1]
    )
    same = modes.receive(found[len(candidates) :], along, known)
    search.improve([*found[: len(candidates)], *same])
    state = _weigh(search)
    if len(around):
        modes.send(search.climbers.climb(*target.gradients(around, sums), down))
    if len(modes.relevant()) > 1:  # the verdict is known
        search.climbers.rest()
    checks = [
        *certify.draw_checks(
            state.newest, state.precision, state.pooled, len(draws), search.tolerance, _labels(search, state)
        ),
        certify.agreement(state.moments, state.all_moments, search.tolerance, search.names),
        certify.tails(far, ways, float(np.max(values)), np.sqrt(np.diag(spread)), search.names),
        *_mode_checks(search),
    ]
    found = {"mean": state.moments.mean, "sd": state.moments.sd}
    search.note(draws=len(draws), khat=state.newest.khat, ess=state.newest.ess, **found)
    return state, checks


def _labels(search: Search, state: State) -> list[str]:
    extra = len(state.precision.mean) - len(search.names)
    return search.names + [f"reported quantity {i + 1}" for i in range(extra)]


def line(search: Search, current: Proposal) -> tuple[Array, Array]:
    """Newton candidates: those with derivatives, the proposal's centre first, and those with values only."""
    centre = current.means[int(np.argmax(current.weights))]
    if search.best is None:
        return centre[None], centre[None]
    step, decrement = search.best.newton()
    anchored = _ANCHORED if decrement > 0.1 else (1.0,)
    anchors = np.concatenate([centre[None], search.best.position + np.array(anchored)[:, None] * step])
    return anchors, search.best.position + np.array(_TRIED)[:, None] * step


def _far(search: Search, centre: Array) -> Array:
    """A few draws of large weight far from the centre."""
    if not search.batches:
        return np.zeros((0, len(centre)))
    last = search.batches[-1]
    weights = smooth(last.values - last.density(last)).weights
    sd = np.maximum(np.sqrt(weights @ (last.positions - centre) ** 2), 1e-300)
    pull = weights * np.sum(((last.positions - centre) / sd) ** 2, axis=1) ** 2
    return last.positions[np.argsort(-pull)[:6]]


def _weigh(search: Search) -> State:
    """Weights of the newest draws by their own proposal, and of recent ones by the mixture of theirs."""
    last, recent = search.batches[-1], search.batches[-_POOLED:]
    newest = smooth(last.values - last.density(last))
    positions = np.concatenate([b.positions for b in recent])
    values = np.concatenate([b.values for b in recent])
    sizes = np.array([len(b.positions) for b in recent])
    densities = [np.concatenate([b.density(other) for b in recent]) for other in recent]
    mixed = logsumexp(np.array(densities), axis=0, b=(sizes / sizes.sum())[:, None])
    logs = values - mixed
    pooled = smooth(logs)
    certified = last.positions
    if search.report is not None:
        certified = np.concatenate([certified, search.report(last.positions)], axis=1)
    return State(
        newest,
        pooled,
        precision(certified, newest.weights),
        moments(last.positions, newest.weights),
        moments(positions, pooled.weights),
        positions,
        logs,
    )


def _next_count(search: Search, state: State, count: int) -> int:
    if state.pooled.ess < 10 * search.target.dim or state.pooled.khat > 0.9:
        close = search.best is not None and search.best.newton()[1] < 1
        return min(16 * count, search.most_draws) if close and not search.many else count
    if not state.newest.khat < certify.KHAT_LIMIT:
        return count
    wanted = 1.2 * count * certify.needed_factor(state.precision, search.tolerance)
    return int(np.clip(2 ** np.ceil(np.log2(max(wanted, 1))), search.first_draws, search.most_draws))


def _mode_checks(search: Search) -> list[Check]:
    modes = search.modes
    found = len(modes.relevant())
    arrived = search.best is not None and search.best.concave() and search.best.newton()[1] < 0.5
    return [
        Check("mode", arrived, "no mode of the posterior was found: it rises on and on, or is flat"),
        Check(
            "one mode",
            found == 1,
            f"the posterior is multimodal: {found} modes found, and whether these are all is unknown",
        ),
        Check(
            "explorers",
            not modes.active,
            f"{len(modes.active)} explorers were still climbing: there may be further modes",
        ),
    ]


_ADVICE = {
    "one mode": "look at the modes in the result: a model with interchangeable parts, or sites that "
    "contradict each other, has several; no sampler can promise to find all",
    "mode": "a feature that separates the outcomes or repeats others does this; give every parameter a "
    "proper prior",
    "tails": "a proper prior with lighter tails (a normal instead of a Cauchy) makes the question answerable",
}


def _outcome(search: Search, state: State, checks: list[Check]) -> Outcome:
    failed = [check for check in checks if not check.holds]
    if len(search.batches) < 2:
        failed.append(Check("rounds", False, "one round of draws is not enough to certify"))
    first = list(_ADVICE)
    order = sorted(failed, key=lambda check: first.index(check.name) if check.name in first else len(first))
    advice = next((_ADVICE[c.name] for c in order if c.name in _ADVICE), None)
    last = search.batches[-1]
    return Outcome(
        method="importance",
        reached=not failed,
        reason="; ".join(c.sentence for c in order),
        advice=(advice or "allow more rounds, or ask for less accuracy") if failed else "",
        positions=last.positions,
        weights=state.newest.weights,
        khat=state.newest.khat,
        ess=state.newest.ess,
        mean=state.moments.mean,
        covariance=state.moments.covariance,
        modes=np.array([m.position for m in search.modes.relevant()]).reshape(-1, search.target.dim),
        failed=tuple(c.name for c in order),
        trace=search.trace,
    )


def _hopeless(search: Search) -> bool:
    """Whether further rounds would bring nothing: tails stay heavy, or far too few draws count."""
    if search.heavy_rounds >= 5:
        return True
    most = search.most_draws
    if search.modes.active or (not search.many and any(b.count < most for b in search.batches[-3:])):
        return False
    sizes = [row["ess"] for row in search.trace if row["draws"]]
    if len(sizes) < 4:
        return False
    smoothed = search.smoothed
    if search.many and smoothed is not None and smoothed.finite and max(sizes) < search.target.dim:
        # a Gaussian fits as well as one can, and in so many dimensions no mixture will do better soon
        return smoothed.newton()[1] < 4 and search.best is not None and search.best.newton()[1] < 0.5
    small = max(sizes[-3:]) < 5 * search.target.dim
    return small and max(sizes[-2:]) < 1.5 * max(sizes[-4:-2], default=0.0)


def _adapt(search: Search, state: State, current: Proposal) -> Proposal:
    """The next proposal."""
    d = search.target.dim
    modes = search.modes.relevant()
    if state.pooled.ess >= 10 * d and state.pooled.khat < 0.9:
        fitted = fit_mixture(state.all_positions, _for_moments(state), search.seed + len(search.batches))
        if len(fitted.weights) > 1:
            search.modes.send_apart(fitted.means)
        return fitted
    best = search.best
    if best is None:
        widened = [2.0 * factor for factor in current.factors]
        return Proposal(current.weights, current.means, np.array(widened))
    if len(modes) > 1:
        logs = np.array([explorers.log_mass(m) for m in modes])
        weights = np.maximum(np.exp(logs - logs.max()), 0.05)
        factors = np.array([proposal.cholesky(m.covariance()) for m in modes])
        return Proposal(weights / weights.sum(), np.array([m.position for m in modes]), factors)
    if best.newton()[1] > _NEAR or not best.concave():
        step, decrement = best.newton()
        return proposal.gaussian(best.position + step / max(1.0, decrement), best.covariance())
    return _tempered(search, state, current, best)


def _for_moments(state: State) -> Array:
    """The draws' weights to fit a mixture to, larger in the tails of an sd that rests on few of them."""
    khats = state.precision.khat[: state.all_positions.shape[1]]
    heavy = int(np.argmax(khats))
    z = (state.all_positions[:, heavy] - state.all_moments.mean[heavy]) / state.all_moments.sd[heavy]
    weights = state.pooled.weights * (1 + (z**2 if khats[heavy] >= certify.KHAT_LIMIT else 0))
    return weights / weights.sum()


def _smooth_derivatives(search: Search, current: Proposal, draws: Array, sums: Answer) -> Derivatives:
    """The log posterior near the proposal's first core, its derivatives averaged over draws of that core."""
    _, gradient, hessian = prior_derivatives(search.target.model, draws[: search.num_smoothed])
    return Derivatives(
        current.means[0],
        0.0,
        sums["smooth_gradient"] + gradient.mean(axis=0),
        sums["smooth_hessian"] + hessian.mean(axis=0),
    )


def _tempered(search: Search, state: State, current: Proposal, best: Derivatives) -> Proposal:
    """A Newton step on the posterior smoothed by the proposal, mixed with tempered moments."""
    power, weights = 1.0, state.pooled
    while weights.ess < 5 * search.target.dim and power > 1e-6:
        power *= 0.8
        weights = smooth(power * state.all_logs)
    tempered = moments(state.all_positions, weights.weights)
    if len(current.weights) > 1 or search.smoothed is None:
        return proposal.gaussian(tempered.mean, tempered.covariance)
    here = search.smoothed
    if not here.finite or not here.concave():
        return proposal.gaussian(tempered.mean, (tempered.covariance + best.covariance()) / 2)
    if search.many:  # half of the old precision keeps the steps of many parameters from swinging
        old = np.linalg.inv(current.factors[0] @ current.factors[0].T)
        here = here._replace(hessian=(here.hessian - old) / 2)
    step, decrement = here.newton()
    climb, left = best.newton()
    away = np.linalg.norm(np.linalg.solve(current.factors[0], best.position - current.means[0]))
    if min(away, decrement) > 2.5 and 0.3 < left < 0.6 * decrement:
        # Newton's method is ahead: start anew from where it is
        return proposal.gaussian(best.position + climb / max(1.0, left), best.covariance())
    mean = here.position + step / max(1.0, decrement / 4)
    if search.many:  # tempered moments of few draws would spoil more directions than they mend
        return proposal.gaussian(mean, here.covariance())
    # the less the weights had to be tempered, the more their moments count
    mixed = power * tempered.mean + (1 - power) * mean
    return proposal.gaussian(mixed, power * tempered.covariance + (1 - power) * here.covariance())
