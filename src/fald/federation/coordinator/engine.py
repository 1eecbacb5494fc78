"""Methods over a federation: an engine for chains, and an exchange for the few-round methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fald.core.errors import ConfigError, FederationError
from fald.core.keys import normals
from fald.core.types import PyTree, float_dtype
from fald.federation.coordinator.sites import (
    Federation,
    Replies,
    check_arrays,
    check_finite,
    check_likelihoods,
    check_summed,
    masked_sum,
)
from fald.federation.secure import shares
from fald.federation.secure.fixed_point import MASKED_BYTES
from fald.federation.secure.session import split
from fald.fewround.exchange import payload
from fald.fewround.site import Answer, Request, answer_shapes
from fald.langevin import costs as tally
from fald.langevin.engine import Assignment, Failure
from fald.langevin.method import Method, Upload
from fald.langevin.rounds import Begun, ServerRounds
from fald.langevin.server import Server
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.runtime.records import Records, RunState
from fald.settings.participation import Drawn, num_slots
from fald.settings.schedules import heat_at

Array = NDArray[Any]
_ROUNDS_AT_ONCE = 16
_TOP_UP = 2**31 - 1  # step that addresses the noise added here, apart from what the method draws


class RemoteExchange:
    """Few-round methods over a federation: every answer is a sum over all sites.

    Parameters
    ----------
    federation
        The study, open at all sites.
    """

    def __init__(self, federation: Federation):
        self._federation = federation
        self.names: Sequence[str] = federation.names
        self.sizes: Sequence[int] = federation.sizes
        self._round = 0
        self._begun = False
        self._passed = 0  # bytes that sites are shown of the latest round
        self._dim = federation.study.build_model(federation.data.features).dim

    def resume(self, answered: int) -> None:
        """Go on after so many rounds more."""
        self._round += answered

    def ask(self, request: Request) -> Answer:
        """Sum the sites' answers."""
        f = self._federation
        if not self._begun:
            f.begin()
            self._begun = True
        self._round += 1
        arrays = {name: np.asarray(a) for name, a in request.items()}
        self._check_request(arrays)
        wanted = answer_shapes(arrays, self._dim)
        found = f.ask(
            "ask",
            self._round,
            {},
            arrays,
            expect=functools.partial(self._expect, wanted),
            most=_answer_bytes(arrays),
        )
        answers = list(found.arrays.values())
        if not f.secure:
            sums = {name: sum(a[name] for a in answers[1:]) + answers[0][name] for name in answers[0]}
            f.pass_on(self._round, sums)
            self._keep()
            return sums
        summed = masked_sum(found)
        f.pass_on_masked(self._round, found, summed)
        self._keep()
        sums = split(summed, wanted)
        check_likelihoods(
            sums, f"a secure sum cannot say at which site, but the sums of round {self._round} have"
        )
        return sums

    def replies(self) -> Mapping[str, Any]:
        """How the sites answered in the latest round."""
        return self._federation.replies()

    def carried(self, request: Request, sums: Answer) -> tuple[int, int]:
        """Bytes of a round to a site and back, masks and what is passed on of the round before included."""
        down, up = payload(request, sums)
        if self._federation.secure:
            up = MASKED_BYTES * (up // 8 + 1)
        passed = self._passed
        if self._federation.audited:
            self._passed = up
            if self._federation.secure:
                self._passed = shares.shown_bytes(len(self.names), up // MASKED_BYTES)
        return down + passed, up

    def _keep(self) -> None:
        self._federation.hold_passed()
        self._federation.keep_passed()

    def _check_request(self, arrays: Mapping[str, Array]) -> None:
        """Refuse to ask what no honest answers lead to: sites would, and be blamed."""
        if any(a.dtype.kind == "f" and not np.isfinite(a).all() for a in arrays.values()):
            hidden = "; a secure sum cannot say which" if self._federation.secure else ""
            raise FederationError(
                f"the answers of the rounds before {self._round} lead to parameters that are not finite: "
                f"a site answers for something else than rows of the study{hidden}",
                hint="let every site compare its rows with the study",
            )

    def _expect(self, wanted: Mapping[str, tuple[int, ...]], arrays: dict[str, Array]) -> None:
        """A site answers in the shapes of the request, whatever the others do."""
        if self._federation.secure:
            words = arrays.get("masked")
            shapes = {n.removeprefix("shape_"): tuple(a) for n, a in arrays.items() if n.startswith("shape_")}
            if words is None or words.dtype != np.uint64:
                raise FederationError("its reply is not under masks")
            size = 1 + sum(math.prod(shape) for shape in wanted.values())
            rest = {name: a for name, a in arrays.items() if not name.startswith("shape_")}
            check_arrays(rest, _masked_arrays(len(self.names), size))
            if shapes != wanted:
                raise FederationError("its reply does not have the shapes that were asked for")
        else:
            check_arrays(arrays, {name: (shape, np.float64) for name, shape in wanted.items()})
            check_likelihoods(arrays, "its reply has")


def _answer_bytes(arrays: Mapping[str, Array]) -> int:
    """A generous limit on an answer: values, gradients and curvatures at all that was sent or is drawn."""
    rows = sum(max(1, a.shape[0]) if a.ndim == 2 else 1 for a in arrays.values())
    dim = max([a.shape[-1] for a in arrays.values() if a.ndim], default=1)
    drawn = int(arrays["proposal_count"]) if "proposal_count" in arrays else 0
    return 32 * (drawn + rows * (1 + dim + dim * dim) + 8 * dim * dim)


class RemoteEngine:
    """FA-LD and its peers over a federation: one message per round, all chains in it.

    Parameters
    ----------
    federation
        The study, open at all sites.
    """

    def __init__(self, federation: Federation):
        self._federation = federation
        self._begun = False
        self._saved = self._saving = 0
        self._compiled: tuple[Assignment, Any] | None = None

    def init(self, problem: Assignment, positions: jax.Array) -> RunState:
        """State of chains that start at ``positions``; what clients remember stays with them."""
        self._problem_fits(problem)
        server, _ = jax.vmap(problem.method.init)(positions)
        return RunState(0, server, ((), tally.start(problem)))

    def gather(self, method: Method, model: Model, data: FederatedData) -> dict[str, Any]:
        """What the sites sent when the study was opened."""
        return dict(self._federation.offers)

    def most_rounds(self, problem: Assignment, state: RunState) -> int:
        """A few, so that progress is seen."""
        return _ROUNDS_AT_ONCE

    def costs(self, problem: Assignment, state: RunState) -> dict[str, np.ndarray]:
        """What the rounds so far have cost each site of each chain, with what masks and audits add."""
        spent, f = tally.totals(problem, state.memory[1], state.round), self._federation
        if f.secure:
            numbers = problem.model.dim + 1 + len(jax.tree.leaves(self._upload(problem).spent))
            spent["bytes_up"] = np.full_like(spent["bytes_up"], state.round * MASKED_BYTES * numbers)
            if f.audited:
                chains = problem.num_chains
                each = shares.shown_bytes(len(f.names), chains * numbers + 1) // chains
                spent["bytes_down"] = spent["bytes_down"] + max(0, state.round - 1) * each
        return spent

    def replies(self) -> Mapping[str, Any]:
        """How the sites answered in the latest round."""
        return self._federation.replies()

    def advance(
        self, problem: Assignment, state: RunState, num_rounds: int
    ) -> tuple[RunState, Records, float]:
        """Run rounds, one message each."""
        if not self._begun:
            self._federation.begin()
            self._begun, self._saving = True, state.round
        kept: list[tuple[Any, ...]] = []
        energy = math.nan
        for _ in range(num_rounds):
            state, record, energy = self._round(problem, state)
            if problem.num_kept(state.round) > problem.num_kept(state.round - 1):
                kept.append(record)
        self._federation.hold_passed()
        columns = [np.stack(c) for c in zip(*kept)] if kept else self._nothing(problem)
        return state, Records(*columns), energy

    def before_save(self, state: RunState) -> None:
        """Write down what a resumed run shows again, and what it goes back to until that is done."""
        self._federation.keep_passed()
        self._saved, self._saving = self._saving, state.round

    def locate(self, problem: Assignment, state: RunState, num_rounds: int) -> Failure:
        """Say that the average overflowed: uploads that are not finite are refused as they arrive."""
        raise FederationError(
            f"the average of the sites' uploads left the finite numbers by round {state.round + num_rounds}",
            hint="try a smaller step-size",
        )

    def _round(self, problem: Assignment, state: RunState) -> tuple[RunState, tuple[Any, ...], float]:
        f, index = self._federation, state.round
        begin, finish = self._functions(problem)
        begun = begin(state.server, jnp.asarray(index, jnp.int32))
        drawn = Drawn(*[cast(Any, np.asarray(part)) for part in begun.drawn])
        weight = self._asked_weights(problem, drawn)
        leaves = jax.tree.leaves(begun.messages)
        arrays = {"weight": weight, **{f"leaf_{i}": np.asarray(a) for i, a in enumerate(leaves)}}
        among = [name for c, name in enumerate(f.names) if weight[:, c].any()]
        wanted = self._wanted(problem)
        size = sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in wanted.values())
        replies = f.ask(
            "round",
            index + 1,
            {"leaves": len(leaves), "saved": self._saved},
            arrays,
            among=among,
            expect=functools.partial(_expect, wanted, f.secure),
            most=size,
        )
        summed = masked_sum(replies) if f.secure else np.zeros(0)
        if f.secure:
            f.pass_on_masked(index + 1, replies, summed)
        if f.arrival_based:
            drawn = self._arrived(drawn, replies)
        uploads, weights = (
            self._summed(problem, summed, index + 1) if f.secure else self._uploads(problem, drawn, replies)
        )
        topped = self._missing_noise(weight, drawn) if f.arrival_based else np.zeros(problem.num_chains)
        begun = begun._replace(drawn=begun.drawn._replace(weight=weights), messages=())
        server, (position, energy, apart) = finish(
            begun, state.server, uploads, jnp.asarray(topped, float_dtype())
        )
        if f.secure:  # what each site did is not to be seen
            apart = np.full(drawn.weight.shape, np.nan)
        counters = tally.count(
            state.memory[1], drawn, self._spent(problem, drawn, replies, summed), len(f.names)
        )
        record = (
            index + 1,
            np.asarray(position),
            np.asarray(energy),
            drawn.client,
            drawn.weight,
            np.asarray(apart),
        )
        return RunState(index + 1, server, ((), counters)), record, float(np.mean(np.asarray(energy)))

    def _asked_weights(self, problem: Assignment, drawn: Drawn) -> Array:
        """(chains, sites) weights that sites scale their noise by; zero: not asked.

        Where it is not known who will answer, a site gets the largest weight it can end with, so that the
        noise of the average is never too large, and what is missing can be added.
        """
        f = self._federation
        if f.arrival_based:
            shares = np.asarray(f.sizes) / sum(f.sizes)
            others = [np.sort(np.delete(shares, c))[: f.minimum - 1].sum() for c in range(len(shares))]
            largest = shares / (shares + np.asarray(others))
            return np.tile(largest, (problem.num_chains, 1)).astype(drawn.weight.dtype)
        weight = np.zeros((problem.num_chains, len(f.names)), drawn.weight.dtype)
        for chain in range(problem.num_chains):
            np.add.at(weight[chain], drawn.client[chain], drawn.weight[chain])
        return weight

    def _arrived(self, drawn: Drawn, replies: Replies) -> Drawn:
        """Weights of those who answered: their shares of the rows, made to sum to one."""
        here = np.array([name in replies.arrays for name in self._federation.names])
        weight = np.where(here, drawn.weight, 0)
        return Drawn(drawn.client, (weight / weight.sum(axis=1, keepdims=True)).astype(drawn.weight.dtype))

    def _missing_noise(self, asked: Array, drawn: Drawn) -> Array:
        """(chains,) share of the noise that the average lacks: 1 − Σ w_c²/w̄_c, w̄ what sites scaled by."""
        return np.maximum(0.0, 1 - np.sum(drawn.weight.astype(float) ** 2 / asked, axis=1))

    def _wanted(self, problem: Assignment) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Arrays of a reply: those of the upload, or one masked array."""
        shapes = self._upload(problem)
        chains, dim = problem.num_chains, problem.model.dim
        if not self._federation.secure:
            return {f"leaf_{i}": (a.shape, a.dtype) for i, a in enumerate(jax.tree.leaves(shapes))}
        count = dim + 1 + len(jax.tree.leaves(shapes.spent))
        return _masked_arrays(len(self._federation.names), chains * count + 1)

    def _summed(self, problem: Assignment, summed: Array, number: int) -> tuple[Upload, jax.Array]:
        """The sum of all uploads as one slot of weight one."""
        chains, dim = problem.num_chains, problem.model.dim
        flat = summed.astype(float_dtype())
        check_summed(flat, number)
        position, energy = (
            flat[: chains * dim].reshape(1, chains, dim),
            flat[chains * dim : chains * (dim + 1)].reshape(1, chains),
        )
        return Upload(jnp.asarray(position), jnp.asarray(energy)), jnp.ones((chains, 1), float_dtype())

    def _uploads(self, problem: Assignment, drawn: Drawn, replies: Replies) -> tuple[Upload, jax.Array]:
        """Uploads with slots in front, and their weights (chains, slots)."""
        chains = problem.num_chains
        structure = jax.tree.structure(self._upload(problem))
        gathered = []
        for i, like in enumerate(jax.tree.leaves(self._upload(problem))):
            full = np.zeros((len(self._federation.names), *like.shape), like.dtype)
            for c, name in enumerate(self._federation.names):
                if name in replies.arrays:
                    full[c] = replies.arrays[name][f"leaf_{i}"]
            gathered.append(jnp.asarray(full[drawn.client.T, np.arange(chains)[None, :]]))
        return jax.tree.unflatten(structure, gathered), jnp.asarray(drawn.weight)

    def _spent(self, problem: Assignment, drawn: Drawn, replies: Replies, summed: Array) -> PyTree:
        """What uploads say they cost, (slots, chains); ``()`` where it is always the same.

        Behind a secure sum every site is taken to have the mean.
        """
        like = self._upload(problem).spent
        leaves, structure = jax.tree.flatten(like)
        if not leaves:
            return ()
        count = len(jax.tree.leaves(self._upload(problem)))
        names, chains = self._federation.names, problem.num_chains
        if self._federation.secure:
            told = summed[chains * (problem.model.dim + 1) :].reshape(len(leaves), chains)
            return jax.tree.unflatten(structure, [jnp.asarray(np.rint(a / len(names))) for a in told])
        out = []
        for i, leaf in enumerate(leaves):
            key = f"leaf_{count - len(leaves) + i}"
            full = np.zeros((len(names), *leaf.shape), leaf.dtype)
            for c, name in enumerate(names):
                if name in replies.arrays:
                    full[c] = replies.arrays[name][key]
            out.append(jnp.asarray(full[drawn.client.T, np.arange(problem.num_chains)[None, :]]))
        return jax.tree.unflatten(structure, out)

    def _nothing(self, problem: Assignment) -> list[Array]:
        chains, slots = problem.num_chains, num_slots(problem.participation, problem.data.num_clients)
        real = float_dtype()
        shapes = [((0,), int), ((0, chains, problem.model.dim), real), ((0, chains), real)]
        shapes += [((0, chains, slots), np.int32), ((0, chains, slots), real), ((0, chains, slots), real)]
        return [np.zeros(shape, kind) for shape, kind in shapes]

    def _upload(self, problem: Assignment) -> Upload:
        return self._functions(problem, "upload")

    def _functions(self, problem: Assignment, which: str = "") -> Any:
        if self._compiled is None or self._compiled[0] is not problem:
            self._compiled = (problem, _compile(problem, tuple(self._federation.sizes)))
        made = self._compiled[1]
        return made.upload if which == "upload" else (made.begin, made.finish)

    def _problem_fits(self, problem: Assignment) -> None:
        f = self._federation
        if tuple(problem.data.names) != tuple(f.names):
            raise ConfigError("the data of the problem are not those of the federation")
        if f.arrival_based and (
            problem.participation.scheme != "full" or not problem.method.about.reveals.sums
        ):
            raise ConfigError(
                "first-replies and reweight need full participation and a method whose uploads are summed",
                hint="let the sites that answer in time be the participants",
            )
        if f.arrival_based and problem.secret_key is not None:
            raise ConfigError(
                "privacy is not accounted for rounds whose participants are those who answer first",
                hint="leave out first-replies and reweight, or the privacy section",
            )


def _expect(wanted: Mapping[str, Any], secure: bool, arrays: dict[str, Array]) -> None:
    check_arrays(arrays, wanted)
    if not secure:
        check_finite(arrays, list(wanted))


def _masked_arrays(sites: int, columns: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Arrays of a reply under masks."""
    return {"masked": ((2, columns), np.uint64), "hashes": (shares.hashes_shape(sites, columns), np.uint8)}


class _Functions(NamedTuple):
    begin: Any
    finish: Any
    upload: Upload


def _compile(problem: Assignment, sizes: tuple[int, ...]) -> _Functions:
    method: Method = problem.method
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32)
    rounds = ServerRounds(method, problem.participation, problem.num_chains)
    _, hyper = method.split()
    about = method.about

    @jax.jit
    def begin(server, round_index):
        return rounds.begin(problem.roots, offsets, server, round_index)

    def topped_up(position, share, view: Server):
        """The noise that is missing, of one draw for all local steps."""
        step: Any = about.step_size
        first = view.round * hyper["local_steps"]
        eta: Any = step(first) if callable(step) else hyper.get("step_size", 0.0)
        eta = eta * heat_at(step, first)
        scale = (
            2 * eta * hyper["temperature"] * hyper["local_steps"] * (1 - hyper["correlation"] ** 2) * share
        )
        return position + jnp.sqrt(scale) * normals(view.choice_key, _TOP_UP, position.shape[0])

    @jax.jit
    def finish(begun: Begun, server, uploads, missing):
        weights = begun.drawn.weight
        server = rounds.update(hyper, begun, server, uploads)
        if "correlation" in hyper and about.reveals.sums:
            server = jax.vmap(
                lambda state, share, key, weight: topped_up(state, share, Server.at(key, begun.round, weight))
            )(server, missing, begun.keys[0], weights)
        return server, rounds.record(server, uploads, weights)

    return _Functions(begin, finish, _upload_shapes(problem, sizes))


def _upload_shapes(problem: Assignment, sizes: tuple[int, ...]) -> Upload:
    """Shapes of a site's upload, all chains in front."""
    from fald.calculus.gradients import Rows
    from fald.langevin.client import Setup, Visit, client_round

    method, model, chains = problem.method, problem.model, problem.num_chains
    real = float_dtype()

    def one(rows_flat, position):
        rows = Rows(rows_flat, jnp.int32(0), jnp.int32(1), jnp.int32(sum(sizes)), 1, True)
        key = jnp.zeros(2, jnp.uint32)
        setup = Setup(model, method, len(sizes), problem.participation.scheme)
        visit = Visit((key, key), jnp.int32(0), jnp.ones((), real), jnp.int32(0))
        server, memory = method.init(position)
        message = method.broadcast(server)
        return client_round(setup, method.split()[1], rows, visit, message=message, memory=memory)[0]

    def row(a):
        kind = jnp.uint8 if a.dtype == bool else real if a.dtype.kind == "f" else a.dtype
        return jax.ShapeDtypeStruct((1, *a.shape[1:]), jax.dtypes.canonicalize_dtype(kind))

    rows = jax.tree.map(row, problem.data.rows)
    position = jax.ShapeDtypeStruct((model.dim,), real)
    shapes = jax.eval_shape(one, rows, position)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((chains, *s.shape), s.dtype), shapes)
