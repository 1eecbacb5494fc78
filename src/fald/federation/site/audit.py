"""Rounds that the site audits: it answers what the published protocol asks at this point, and nothing else.

The server of a few-round method is deterministic, so that a site can run it too: study, seed and the sums of
the rounds so far give the next request. A server of chains makes the next broadcast from the sum of the round
before. The sums come from the coordinator. Where a secure sum carries the uploads it passes all of them on,
and the site, which knows its own and that all masks cancel, adds them up itself.

What was asked is compared with what the site would have asked; the site then answers *its own* question. So a
difference within the tolerance, which other libraries and processors need, moves nothing that leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fald.core.errors import FederationError
from fald.core.files import write_atomically
from fald.core.keys import as_key, chain_key, key_words
from fald.core.threads import one_thread
from fald.core.types import PyTree
from fald.federation import wire
from fald.fewround.exchange import Server
from fald.fewround.fit import few_round_settings, server_of
from fald.fewround.outcome import Outcome
from fald.fewround.site import Answer, Request
from fald.langevin.method import Method, Upload
from fald.langevin.server import Server as View
from fald.problem.model import Model
from fald.study.scales import scaled, scales_request
from fald.study.schema import SamplerSection, Study

Array = NDArray[Any]
TOLERANCE = 1e-8  # of the largest number of an array; docs/explanation/secure-sum.md says what was measured


class FewRoundAudit:
    """The server of a study's few-round method, run at the site.

    Parameters
    ----------
    study, features
        What the study says, and the names of the features.
    folder
        Where the sums of the rounds so far are kept.
    rows
        Gives the number of rows of all sites.
    """

    def __init__(self, study: Study, features: Sequence[str], folder: Path, rows: Callable[[], int]):
        self._study, self._features, self._folder, self._rows = study, features, folder, rows
        self._first = study.build_model(features)
        self.scales = scales_request(study, self._first)
        self._scaled: Model | None = None
        self._server: Server[Outcome] | None = None
        self._request: Request | None = None
        self._taken = 0

    @property
    def most_rounds(self) -> int:
        """Rounds that the method may take."""
        settings = few_round_settings(self._first, **self._study.fit.arguments())
        return settings.most_rounds + (self.scales is not None)

    def model(self, number: int) -> Model:
        """The model of a round: after the round of scales, with priors relative to them."""
        if self.scales is None or number == 1:
            return self._first
        if self._scaled is None:
            sums = wire.unpack(self._path(1).read_bytes()).arrays
            found = scaled(self._study, self._first, sums, self._rows())
            self._scaled = found.build_model(self._features)
        return self._scaled

    def _protocol(self) -> Server[Outcome]:
        """The round of scales, where the study has one, and the method's own rounds after it."""
        if self.scales is not None:
            yield self.scales
        model = self.model(2)
        settings = few_round_settings(model, **self._study.fit.arguments())
        return (yield from server_of(settings, model, self._study.fit.seed, []))

    def knows(self, number: int) -> bool:
        """Whether the sums of a round were passed on."""
        return self._path(number).exists()

    def take(self, number: int, sums: Answer) -> None:
        """Keep the sums of a round, once: another sum for the same round is refused."""
        path = self._path(number)
        content = wire.pack("sums", {}, {name: sums[name] for name in sorted(sums)})
        if path.exists():
            if path.read_bytes() != content:
                raise FederationError(f"the sum of round {number} is not the one that was passed on before")
            return
        if number > 1 and not self.knows(number - 1):
            raise FederationError(f"the sum of round {number - 1} was not passed on")
        write_atomically(path, content)

    @one_thread
    def request(self, number: int) -> Request:
        """What the protocol asks in a round, given the sums of all rounds before.

        Raises
        ------
        FederationError
            If a sum is missing, or the protocol has ended.
        """
        if self._server is None or number <= self._taken:
            self._server, self._taken = self._protocol(), 0
            self._request = next(self._server)
        while self._taken < number - 1 and self._request is not None:
            path = self._path(self._taken + 1)
            if not path.exists():
                raise FederationError(f"the sum of round {self._taken + 1} was not passed on")
            try:
                self._request = self._server.send(wire.unpack(path.read_bytes()).arrays)
            except StopIteration:
                self._request = None
            self._taken += 1
        if self._request is None:
            raise FederationError("the protocol of the study has ended, and asks nothing more")
        return {name: np.asarray(a) for name, a in self._request.items()}

    def check(self, number: int, asked: Request) -> Request:
        """The site's own request of a round, after what was asked was compared with it."""
        own = self.request(number)
        if not same(own, asked):
            raise FederationError(
                f"the request of round {number} is not the one that the protocol asks here: its digest is "
                f"{digest_of(asked)}, and that of the site's own {digest_of(own)}",
                hint="the same versions of fald, NumPy, SciPy and JAX are needed everywhere; or the "
                "coordinator asks for something else",
            )
        return own

    def _path(self, number: int) -> Path:
        return self._folder / f"sums-{number:04d}.bin"


def same(own: Request, asked: Request) -> bool:
    """Whether two requests agree: names, shapes and whole numbers exactly, others to a tolerance.

    Examples
    --------
    >>> one = {"points": np.ones((2, 2)), "proposal_seed": np.asarray(3)}
    >>> same(one, {**one, "points": one["points"] + 1e-9}), same(one, {**one, "proposal_seed": np.asarray(4)})
    (True, False)
    """
    if set(own) != set(asked):
        return False
    for name, a in own.items():
        b = asked[name]
        if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
            return False
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                return False
        elif not np.array_equal(a, b):
            apart = np.abs(a - b)
            if not np.all(apart <= TOLERANCE * np.abs(a).max()):  # False where one is not a number
                return False
    return True


def digest_of(request: Mapping[str, Array]) -> str:
    """A short name for a request, for the logs of both ends."""
    plain = {name: np.asarray(request[name]) for name in sorted(request)}
    return hashlib.sha256(wire.pack("request", {}, plain)).hexdigest()[:16]


def public_root(sampler: SamplerSection) -> Array:
    """The key of a run that everybody knows: it follows from the study's seed."""
    return np.asarray(key_words(as_key(sampler.seed)[0]))


def start_of(sampler: SamplerSection, model: Model) -> Array:
    """(chains, dim) positions at which the chains of a study start."""
    return np.tile(np.asarray(model.flat_initial_position), (sampler.num_chains, 1))


def next_broadcast(method: Method, root: Array, number: int, *, before: PyTree, total: Array) -> PyTree:
    """What a server of chains sends in a round, from the sum of the uploads of the round before.

    Parameters
    ----------
    method
        A method whose server needs only sums, and whose state is its position.
    root
        The run's public key.
    number
        The round, at least 2.
    before
        (chains, dim) state of the server before the round whose sum this is.
    total
        Sum over sites of the weighted positions of all chains, then of the energies; more may follow.
    """
    chains, dim = before.shape
    position = jnp.asarray(total[: chains * dim].reshape(chains, 1, dim), before.dtype)
    energy = jnp.asarray(total[chains * dim : chains * (dim + 1)].reshape(chains, 1), before.dtype)
    keys = jax.vmap(chain_key, (None, 0))(jnp.asarray(root, jnp.uint32), jnp.arange(chains))
    index = jnp.asarray(number - 2, jnp.int32)
    _, hyper = method.split()

    def update(state, own, sent, key):
        view = View.at(key, index, jnp.ones(1, before.dtype))
        return method.server_update(hyper, state, Upload(own, sent), view)

    return jax.vmap(method.broadcast)(jax.vmap(update)(before, position, energy, keys))
