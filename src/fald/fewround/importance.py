"""Adaptive importance sampling over a federation: a posterior in three to eight rounds.

Round 1 asks every site for a quadratic picture of its own rows. From then on each round evaluates the
posterior at thousands of draws from a proposal that all sites make themselves, at Newton candidates and
explorers, and the proposal is adapted to all that is known. The end is certified on the newest draws alone,
because draws that shaped the proposal flatter it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fald.calculus.sums import prior_derivatives
from fald.fewround import certify, concavity, explorers, proposal, rays
from fald.fewround.adapt import adapt, next_count
from fald.fewround.certify import Condition
from fald.fewround.climbers import Climbers, valley
from fald.fewround.exchange import Server
from fald.fewround.mixture import log_parts
from fald.fewround.outcome import Outcome
from fald.fewround.proposal import Proposal
from fald.fewround.search import REGRESSED, DrawBatch, Search, State, weigh
from fald.fewround.site import Answer, checksum
from fald.fewround.target import Derivatives
from fald.fewround.weights import smooth
from fald.problem.model import Model

Array = NDArray[Any]

_ANCHORED = (1.0, 0.5, 0.25, 0.1, 1.5, 2.2, 3.2, 4.5)  # parts of a Newton step with derivatives
_TRIED = (0.005, 0.02, 0.05, 0.35, 0.7)  # parts with values only
_WATCHED = 2  # rounds of draws, from all of which others may climb
_SPARSE = 20.0  # posterior over proposal, from which on they may later
_LIGHT = 0.5  # share of effective draws from which on a posterior is nearly Gaussian
_HILL = 1.0  # nats that a ray must fall and rise again for somebody to be sent there


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
        outcome = _outcome(search, state, checks)
        search.heavy_rounds = search.heavy_rounds + 1 if "tails" in outcome.failed else 0
        if outcome.reached or set(outcome.failed) <= _FINAL or "concavity" in outcome.failed:
            break
        current = adapt(search, state, current)
        count = next_count(search, state, count, current)
        if _hopeless(search):
            break
    assert outcome is not None
    return outcome, current


def first_round(search: Search) -> Server[Proposal]:
    """Ask every site for its own quadratic, and look around; returns the sites' consensus."""
    target, rng = search.target, search.generator(5)
    centre, covariance = target.prior_scale()
    wide = np.zeros((0, target.dim)) if search.concave else explorers.scouts(centre, covariance, rng)
    request: dict[str, Array] = {"points": wide} if len(wide) else {}
    if search.curvature:
        request["local_start"] = target.start
    if search.hessians:
        request["anchors"] = target.start[None]
    else:
        cloud = proposal.draw(
            proposal.gaussian(target.start, 1e-3 * covariance), 2 * REGRESSED * target.dim, search.seed
        )
        request["states"] = np.concatenate([target.start[None], cloud])
    sums = yield request
    if search.hessians:
        here = target.derivatives(target.start[None], sums)[0]
    else:
        here = target.regressed(sums, request["states"], len(request["states"]) - 1)[0][0]
    search.best = here if here.finite else None
    consensus = None
    sites = float(sums.get("local_sites", 0.0))
    if sites > 0:
        consensus = target.quadratic_mode(sums["local_precision"], sums["local_shift"], target.start)
    if consensus is None and here.finite:
        step, decrement = here.newton()
        consensus = target.start + step / max(1.0, decrement / 3), here.covariance()
    seen = target.values(wide, sums["point_values"]) if len(wide) else np.zeros(0)
    if consensus is None:
        there = wide[int(np.argmax(seen))] if np.isfinite(seen).any() else target.start
        consensus = there, covariance
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
    if search.hessians and not search.fitting:
        request["smooth"] = np.asarray(search.num_smoothed)
    return request, draws


def _round(search: Search, base: Proposal, count: int, number: int) -> Server[tuple[State, list[Condition]]]:
    """One exchange, and what follows from it about modes, weights, tails and mass far out."""
    target, modes, nothing = search.target, search.modes, np.zeros((0, search.target.dim))
    current = rays.widened(base, search.wide)
    request, draws = _request(search, current, count, number)
    candidates, tries = line(search, base)
    anchors = np.concatenate([candidates, *[e.position[None] for e in modes.active]])
    known, before = modes.known, search.best
    centre, spread = proposal.overall(base)
    mode = before.position if before else centre
    proved = search.concave and certify.arrived(before)  # that tails fall
    ways = nothing if proved else certify.tail_directions(centre, mode, spread, _far(search, centre))
    if search.climbers is None and not search.concave:
        search.climbers = Climbers(base, search.generator(7), _reach(search, spread))
    climbers = search.climbers
    around = climbers.positions if climbers else nothing
    # the first draws certify nothing yet, and the proposal may be far off
    cast = _cast(search, centre, spread) if search.batches and not search.climbing else None
    parts = [
        tries,
        modes.paths(known),
        nothing if proved else certify.tail_points(centre, ways),
        climbers.paths(mode) if climbers else nothing,
        climbers.lookouts if climbers else nothing,
        climbers.far_lookouts if climbers else nothing,
        cast.positions if cast else nothing,
    ]
    points = np.concatenate(parts)
    cloud = min(REGRESSED * target.dim, int(proposal.strata(current, count).counts[0, 0]))
    if search.hessians:
        states = {"states": around} if len(around) else {}
        sums = yield {**request, **states, "anchors": anchors, "points": points}
        found = target.derivatives(anchors, sums)
        search.smoothed = _smooth_derivatives(search, current, draws, sums) if "smooth" in request else None
    else:
        states = np.concatenate([around, anchors, draws[:cloud]])
        sums = yield {**request, "states": states, "points": points}
        found, search.smoothed = target.regressed(sums, states, cloud)
        found = found[len(around) :]
    values, undefined = target.posterior(draws, sums["draw_values"])
    search.batches.append(DrawBatch(number, current, count, draws, values, {}))
    ends = np.cumsum([len(p) for p in parts])[:-1]
    seen, missing = target.posterior(points, sums["point_values"])
    _, along, far, down, high, lines, out = np.split(seen, ends)
    same = modes.receive(found[len(candidates) :], along, known)
    search.improve([*found[: len(candidates)], *same])
    gain = search.best.value - before.value if search.best and before else np.inf
    search.stalled = before is not None and gain == 0
    state = weigh(search)
    if climbers and len(around):
        modes.send(climbers.climb(*target.gradients(around, sums), down))
    if climbers and len(modes.relevant()) > 1:  # the verdict is known
        climbers.rest()
    elif climbers:
        places, level = _sparse(search.batches, state.log_mass)
        places, level = np.concatenate([parts[4], places]), np.append(high, level)
        climbers.watch(places, level - proposal.log_sum(log_parts(base, places), 1))
        if len(lines):
            climbers.watch_far(lines)
    tails = None if proved else (ways, far)
    checks = _conditions(search, state, base, tails, undefined=undefined, gain=gain)
    checks.append(certify.bulk(search.best, draws, state.newest.weights, state.log_mass))
    if search.concave:
        everything = np.concatenate([draws, points]), np.append(values, seen)
        checks.append(_as_declared(search, base, found, seen=everything, far=(cast, out)))
    if cast:
        checks += _look_out(search, cast, (out, missing[ends[-1] :]), state)
    elif len(search.batches) > 1:
        checks.append(certify.unseen())
    told = {"mean": state.moments.mean, "sd": state.moments.sd}
    search.note(draws=len(draws), khat=state.newest.khat, ess=state.newest.ess, **told)
    return state, checks


def _sparse(batches: list[DrawBatch], log_mass: float) -> tuple[Array, Array]:
    """Newest draws from which others may climb, and the log posterior there.

    All of them in the first rounds. Later those alone where draws are so sparse that a hill could be missed:
    elsewhere their weights know of it.
    """
    last = batches[-1]
    with np.errstate(invalid="ignore"):  # where no draw has any weight, nothing is known of them
        dense = last.values - last.density(last) - log_mass <= np.log(_SPARSE)
    chosen = ~dense if len(batches) > _WATCHED else np.ones(len(dense), bool)
    return last.positions[chosen], last.values[chosen]


def _conditions(
    search: Search,
    state: State,
    base: Proposal,
    tails: tuple[Array, Array] | None,
    *,
    undefined: Array,
    gain: float,
) -> list[Condition]:
    """Conditions on all that is known, but for what rays see far out.

    Parameters
    ----------
    search, state, base
        What is known, what the draws say, and the proposal that they were widened from.
    tails
        Directions of ``certify.tail_directions``, and the log posterior at their points; None where the log
        posterior is concave and has a strict top, from which all tails fall.
    undefined, gain
        As in ``certify.defined`` and ``certify.mode``.
    """
    last, modes, tolerance, names = search.batches[-1], search.modes, search.tolerance, search.names
    labels = certify.labels(names, len(state.precision.mean))
    sd = np.sqrt(np.diag(proposal.overall(base)[1]))
    waiting = 0 if search.climbers is None else search.climbers.waiting
    top = float(max(np.max(last.values), search.highest))
    return [
        certify.khat(state.newest, len(last.positions)),
        certify.means_precise(state.precision, tolerance, labels),
        certify.sds_precise(state.precision, tolerance, labels),
        certify.moments_exist(state.precision, labels),
        certify.pooled_khat(state.pooled),
        certify.agreement(state.moments, state.all_moments, tolerance, names),
        certify.tails(tails[1], tails[0], top, sd, names=names) if tails else certify.falls(search.best),
        certify.defined(undefined, *_expected(base, last, undefined), tolerance),
        certify.mode(search.best, gain),
        certify.funnel(search.best, search.highest),
        certify.one_mode(len(modes.relevant())),
        certify.explored(len(modes.active) + waiting),
        certify.two_rounds(len(search.batches)),
    ]


def _cast(search: Search, centre: Array, spread: Array) -> rays.Rays:
    """Rays around a proposal; few places on each where concavity tells the rest and weights are light."""
    thin = search.climbers.thin if search.climbers else np.zeros((0, len(centre)))
    cast = rays.cast(centre, spread, thin, search.generator(8), twins=search.suspicious)
    light = search.trace[-1]["ess"] > _LIGHT * search.trace[-1]["draws"]
    if search.concave and light and not search.suspicious:
        return cast._replace(radii=rays.RADII[concavity.asked(len(centre))])
    return cast


def _as_declared(
    search: Search,
    base: Proposal,
    found: list[Derivatives],
    *,
    seen: tuple[Array, Array],
    far: tuple[rays.Rays | None, Array],
) -> Condition:
    """Whether all that was seen in a round agrees with a log posterior that is declared concave.

    Parameters
    ----------
    search, base
        What is known, and the proposal.
    found
        Derivatives at places of this round.
    seen
        Positions (M, d), and the log posterior there.
    far
        The rays, if any, and the log posterior along them.
    """
    cast, out = far
    top = float(max(np.max(seen[1]), search.highest))
    excess = concavity.above_tangents(found, *seen, top)
    if cast:
        excess = max(excess, concavity.above_chords(cast.levels(out), cast.radii, top))
    factor = proposal.cholesky(proposal.overall(base)[1])
    return certify.concave(excess, concavity.bent_up(found, factor) if search.hessians else 0.0)


def _reach(search: Search, spread: Array) -> float:
    """How far the prior reaches, in sds of the proposal, within reason."""
    prior = np.sqrt(np.diag(search.target.prior_scale()[1]))
    return float(np.clip(np.max(prior / np.sqrt(np.diag(spread))), 1.0, 1000.0))


def _expected(base: Proposal, last: DrawBatch, undefined: Array) -> tuple[Array, Array]:
    """Mass (C,) that is to be expected at each draw, and its largest squared distance (C,) in sds.

    The mass of the cores; where the posterior is not a number, times what it has there more than the cores at
    the nearest draw where it is one: a skewed posterior has more mass than its cores beyond an edge.
    """
    centre, spread = proposal.overall(base)
    cores = proposal.log_sum(log_parts(base, last.positions), 1) - base.dim / 2 * np.log(2 * np.pi)
    logs = cores - last.density(last)
    known = ~undefined & np.isfinite(last.values)
    if undefined.any() and known.any():
        from scipy.spatial import KDTree

        white = np.linalg.solve(proposal.cholesky(spread), (last.positions - centre).T).T
        nearest = np.flatnonzero(known)[KDTree(white[known]).query(white[undefined])[1]]
        ratios = last.values - last.density(last)
        log_mass = logsumexp(ratios) - np.log(len(ratios))
        logs[undefined] += np.maximum(last.values[nearest] - log_mass - cores[nearest], 0.0)
    expected = np.exp(np.minimum(logs, 700.0)) / len(logs)
    return expected, np.max((last.positions - centre) ** 2 / np.diag(spread), axis=1)


def _look_out(search: Search, cast: rays.Rays, seen: tuple[Array, Array], state: State) -> list[Condition]:
    """What the rays say about mass far out; the proposal is widened where draws miss it.

    What looks like mass may be rounding: it is looked at twice before anything follows from it. ``seen`` are
    the log posterior at the places of the rays, and where it is not a number.
    """
    last, dim = search.batches[-1], search.target.dim
    levels = cast.levels(seen[0])
    undefined = seen[1][: levels.size].reshape(levels.shape)
    if len(cast.radii) < len(rays.RADII):
        places = concavity.near(dim)
        levels = concavity.extended(levels[:, : len(places)], places)
        undefined = concavity.beyond_numbers(undefined, concavity.asked(dim))
        cast = cast._replace(radii=rays.RADII)
    places = cast.positions[: levels.size]
    density = proposal.log_density(last.proposal, last.count, places).reshape(levels.shape)
    many = {"count": len(last.positions), "quantile": certify.quantile(dim)}
    found = rays.far(levels, levels - density - state.log_mass, dim, **many)
    check = certify.far_mass(cast, found, search.tolerance, search.names)
    if not check.holds and search.suspicious:
        search.wide = rays.joined(search.wide, rays.wide_cores(cast, found, search.tolerance / 2))
        missed = found.missed.max(axis=1)
        hills = np.flatnonzero((valley(levels) > _HILL) & (missed > search.tolerance / 2))
        tops = places[rays.tops(levels, hills)]
        search.modes.send_apart(tops[np.argsort(-missed[hills], kind="stable")[:8]])
    search.suspicious |= not check.holds
    lost = rays.unknown(levels, undefined, dim)
    return [check, certify.defined_far_out(cast, lost, search.tolerance, search.names)]


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
    return last.positions[np.argsort(-pull, kind="stable")[:6]]


_FINAL = {"one mode", "tails", "numbers"}  # nothing else is amiss, and no further round mends these
_ADVICE = {
    "concavity": "take the mark fald.models.concave off the log prior or the log likelihood",
    "one mode": "look at the modes in the result: a model with interchangeable parts, or sites that "
    "contradict each other, has several; no sampler can promise to find all",
    "mode": "a feature that separates the outcomes or repeats others does this; give every parameter a "
    "proper prior",
    "funnel": "write effects of groups in units of their scale (effect = scale × standard normal), or choose "
    "a model that integrates them out",
    "numbers": "write the likelihood in a stable form (log_sigmoid, softplus, logaddexp, gammaln) instead of "
    "logarithms of what rounds to zero, so that it is a number for all parameters",
    "tails": "a proper prior with lighter tails (a normal instead of a Cauchy) makes the question answerable",
    "explorers": "allow more rounds; where parameters bend each other (a product, a ratio, a scale and what "
    "it scales), write the model in others that do not",
}


_PROVED = (
    "the posterior has one mode and light tails, because the model declares its log prior and log likelihood "
    "concave, and the top that was found curves downwards on all sides"
)


def _outcome(search: Search, state: State, checks: list[Condition]) -> Outcome:
    failed = [check for check in checks if not check.holds]
    first = list(_ADVICE)
    order = sorted(failed, key=lambda check: first.index(check.name) if check.name in first else len(first))
    contradicted = any(check.name == "concavity" for check in failed)
    proved = search.concave and not contradicted and certify.arrived(search.best)
    advice = next((_ADVICE[c.name] for c in order if c.name in _ADVICE), None)
    return Outcome(
        method="importance",
        reached=not failed,
        reason="; ".join(c.sentence for c in order),
        advice=(advice or "allow more rounds, or ask for less accuracy") if failed else "",
        positions=search.batches[-1].positions,
        weights=state.newest.weights,
        khat=state.newest.khat,
        ess=state.newest.ess,
        mean=state.moments.mean,
        covariance=state.moments.covariance,
        modes=np.array([m.position for m in search.modes.relevant()]).reshape(-1, search.target.dim),
        failed=tuple(c.name for c in order),
        proved=_PROVED if proved else "",
        trace=search.trace,
        values=search.batches[-1].values,
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


def _smooth_derivatives(search: Search, current: Proposal, draws: Array, sums: Answer) -> Derivatives:
    """The log posterior near the proposal's first core, its derivatives averaged over draws of that core."""
    _, gradient, hessian = prior_derivatives(search.target.model, draws[: search.num_smoothed])
    return Derivatives(
        current.means[0],
        0.0,
        sums["smooth_gradient"] + gradient.mean(axis=0),
        sums["smooth_hessian"] + hessian.mean(axis=0),
    )
