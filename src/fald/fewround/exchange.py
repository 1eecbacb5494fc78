"""Methods that ask all sites at once: a server that yields requests, and what carries them.

A server is a generator: it yields a request, gets the sum of the sites' answers, and in the end returns its
outcome. It is deterministic, so the sums of the rounds so far are all that a checkpoint needs: a resumed
server is run again on the stored sums, and goes on where they end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fald.checkpoint import Store, damaged, pack, unpack, write_atomically
from fald.data import FederatedData
from fald.errors import Interrupted
from fald.fewround.evaluate import make_site
from fald.fewround.site import REVEALS, Answer, Request, answer, expand
from fald.journal import Journal, replies
from fald.models.base import Model

Array = NDArray[Any]
T = TypeVar("T")
Server = Generator[Request, Answer, T]


class Exchange(Protocol):
    """One way to reach all sites."""

    @property
    def names(self) -> Sequence[str]:
        """The sites, sorted."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Rows of each site."""
        ...

    def ask(self, request: Request) -> Answer:
        """Send a request to every site and return the sum of the answers."""
        ...


class InProcessExchange:
    """All sites in this process.

    What is a plain sum over rows is computed on all rows at once, which gives the same sum up to rounding;
    only what a site does by itself (its own mode, its local steps) is computed site by site.
    """

    def __init__(self, model: Model, data: FederatedData):
        self.names: Sequence[str] = data.names
        self.sizes: Sequence[int] = [int(n) for n in data.sizes]
        self._all = make_site(model, data.rows, "all sites")
        self._sites = [make_site(model, data.client(name), name) for name in data.names]

    def ask(self, request: Request) -> Answer:
        """Sum the answers of all sites."""
        full = expand(request)
        own = {name: a for name, a in full.items() if name.startswith(("local_", "step_", "leverage_"))}
        rest = {name: a for name, a in full.items() if name not in own}
        sums = answer(self._all, rest)
        return sums | total(answer(site, own) for site in self._sites) if own else sums


def total(answers: Any) -> Answer:
    """Sum answers entry by entry, in the order given."""
    sums: Answer = {}
    for one in answers:
        for name, value in one.items():
            sums[name] = sums[name] + value if name in sums else np.asarray(value, np.float64)
    return sums


class Round(NamedTuple):
    """What one round carried: kinds of uploads, and bytes per site down and up."""

    kinds: tuple[str, ...]
    bytes_down: int
    bytes_up: int


def kinds(sums: Answer) -> tuple[str, ...]:
    """Kinds of uploads in an answer, as listed in ``fald.site.REVEALS``."""
    found = {name.partition("_")[0] for name in sums}
    return tuple(kind for kind in REVEALS if kind in found)


def drive(
    server: Server[T],
    exchange: Exchange,
    *,
    store: Store | None = None,
    note: Callable[[int], None] = lambda rounds: None,
    journal: Journal | None = None,
    describe: Callable[[int], dict[str, Any]] = lambda rounds: {},
) -> tuple[T, list[Round]]:
    """Run a server to its end over an exchange.

    Parameters
    ----------
    server, exchange
        Who asks, and who carries the questions.
    store
        Checkpoint of the run, opened; sums that it holds are used before the sites are asked.
    note
        Called with the number of finished rounds.
    journal, describe
        Where to write down every round that the sites were asked in, and what the server knows after so many
        rounds.

    Returns
    -------
    tuple
        The outcome of the server, and what every round carried.

    Raises
    ------
    Interrupted
        On Ctrl-C; the finished rounds are in the store.
    StorageError
        If a stored round does not fit the requests of this server.
    """
    rounds: list[Round] = []
    stored = _stored_rounds(store)
    journal = journal or Journal(None)

    def finished() -> None:
        note(len(rounds))
        if len(rounds) > stored:
            down, up = (len(exchange.names) * sum(sizes) for sizes in list(zip(*rounds))[1:])
            told = {"bytes_up": up, "bytes_down": down, "sites": replies(exchange)}
            journal.write(round=len(rounds), **describe(len(rounds)), **told)

    try:
        with journal.running(round=stored, sites=dict(zip(exchange.names, exchange.sizes))):
            return _served(server, exchange, store, rounds, finished), rounds
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted after round {len(rounds)}",
            hint="resume to go on from here" if store else "give a checkpoint to be able to resume",
        ) from None


def _served(
    server: Server[T], exchange: Exchange, store: Store | None, rounds: list[Round],
    finished: Callable[[], None],
) -> T:  # fmt: skip
    """Carry requests until the server is done; ``rounds`` grows, and ``finished`` is called after each."""
    request = next(server)
    while True:
        sums = _asked(request, exchange, store, len(rounds) + 1)
        size = sum(np.asarray(a).nbytes for a in request.values())
        rounds.append(Round(kinds(sums), size, sum(a.nbytes for a in sums.values())))
        try:
            request = server.send(sums)
        except StopIteration as end:
            finished()
            return end.value
        finished()


def _stored_rounds(store: Store | None) -> int:
    """Rounds in a row that a checkpoint holds."""
    number = 0
    while store is not None and _round_file(store, number + 1).exists():
        number += 1
    return number


def _round_file(store: Store, number: int) -> Path:
    return Path(store.path) / f"round-{number:04d}.npz"


def _asked(request: Request, exchange: Exchange, store: Store | None, number: int) -> Answer:
    if store is None:
        return exchange.ask(request)
    path = _round_file(store, number)
    probe = _probe(request)
    if path.exists():
        saved = unpack(path)
        asked = saved.pop("request", np.zeros(0))
        if asked.shape != probe.shape or not np.allclose(asked, probe, rtol=1e-6, atol=1e-9):
            raise damaged(path, "it answers another question")
        return saved
    sums = exchange.ask(request)
    write_atomically(path, pack({**sums, "request": probe}))
    return sums


def _probe(request: Request) -> Array:
    """A few numbers by which a stored round is recognised as the answer to this request."""
    arrays = [np.asarray(request[name], float) for name in sorted(request)]
    return np.array([f for a in arrays for f in (a.size, a.sum(), np.square(a).sum())])
