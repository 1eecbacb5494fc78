"""Methods that ask all sites at once: a server that yields requests, and what carries them.

A server is a generator: it yields a request, gets the sum of the sites' answers, and in the end returns its
outcome. It is deterministic, so the sums of the rounds so far are all that a checkpoint needs: a resumed
server is run again on the stored sums, and goes on where they end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fald.calculus.sums import make_site
from fald.fewround.rounding import Grid
from fald.fewround.site import REVEALS, Answer, Request, answer_shapes, answers, expand
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.runtime.checkpoint import Store
from fald.runtime.journal import replies

Array = NDArray[Any]
T = TypeVar("T")
Server = Generator[Request, Answer, T]
_TOGETHER = 1 << 24  # numbers of one kind from sites that are looked at together


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
    """All sites in this process, each with the answer that it would send: rounded to its own grid."""

    def __init__(self, model: Model, data: FederatedData):
        self.names: Sequence[str] = data.names
        self.sizes: Sequence[int] = [int(n) for n in data.sizes]
        self._model = model
        self._sites = [make_site(model, data.client(name), name) for name in data.names]

    def ask(self, request: Request) -> Answer:
        """Sum the answers of all sites."""
        full = expand(request)
        most = max(np.prod(shape) for shape in answer_shapes(request, self._model.dim).values())
        size = max(1, int(_TOGETHER // most))
        groups = [self._sites[first : first + size] for first in range(0, len(self._sites), size)]
        grid = Grid(self._model, request)
        return total(grid.summed([site.name for site in group], answers(group, full)) for group in groups)


def total(answers: Iterable[Answer]) -> Answer:
    """Sum answers entry by entry, in the order given."""
    sums: Answer = {}
    for one in answers:
        for name, value in one.items():
            with np.errstate(invalid="ignore"):  # +∞ from one site and −∞ from another: not a number
                sums[name] = sums[name] + value if name in sums else np.asarray(value, np.float64)
    return sums


class Round(NamedTuple):
    """What one round carried: kinds of uploads, and bytes per site down and up."""

    kinds: tuple[str, ...]
    bytes_down: int
    bytes_up: int


def kinds(sums: Answer) -> tuple[str, ...]:
    """Kinds of uploads in an answer, as listed in ``fald.fewround.site.REVEALS``."""
    found = {name.partition("_")[0] for name in sums}
    return tuple(kind for kind in REVEALS if kind in found)


def payload(request: Request, sums: Answer) -> tuple[int, int]:
    """Bytes of the numbers that a round carries to a site and back."""
    return sum(np.asarray(a).nbytes for a in request.values()), sum(a.nbytes for a in sums.values())


class Told(Protocol):
    """What a few-round server says of itself while it works."""

    def note(self, number: int) -> str:
        """A few words about a round."""
        ...

    def line(self, number: int) -> dict[str, Any]:
        """What the journal is told after so many rounds."""
        ...


class Questions(Generic[T]):
    """The questions of a server as a work of the run-time: every round is saved as soon as it is answered.

    Parameters
    ----------
    server, exchange
        Who asks, and who carries the questions.
    most
        Rounds to expect, and the most there may be.
    told
        What the server says of its rounds.

    Attributes
    ----------
    outcome
        What the server returned, when it is done.
    rounds
        What every round carried.
    """

    few = True

    def __init__(
        self,
        server: Server[T],
        exchange: Exchange,
        most: tuple[int, int] = (0, 0),
        told: Told | None = None,
    ):
        self._server, self._exchange, self._most, self._told = server, exchange, most, told
        self._store: Store | None = None
        self._request: Request = {}
        self.outcome: T | None = None
        self.rounds: list[Round] = []
        self.done = False

    @property
    def round(self) -> int:
        """Rounds that the server has got the answers of."""
        return len(self.rounds)

    @property
    def total(self) -> int:
        """Rounds to expect."""
        expected, most = self._most
        if self.done:
            return self.round
        return expected if self.round < expected else max(most, self.round)

    @property
    def sites(self) -> Mapping[str, int]:
        """Rows of each site."""
        return dict(zip(self._exchange.names, self._exchange.sizes))

    def begin(self, store: Store | None) -> None:
        """Run the server on the answers that are saved, if there are any."""
        self._store = store
        self._request = next(self._server)
        saved = 0 if store is None else store.answered_rounds()
        while store is not None and self.round < saved and not self.done:
            self._take(store.load_answers(self.round + 1, _probe(self._request)))
        resume = getattr(self._exchange, "resume", None)  # those that count rounds have one
        if resume is not None:
            resume(self.round)

    def most_rounds(self) -> int:
        """One, because what to ask next depends on the answers."""
        return 1

    def advance(self, num_rounds: int) -> None:
        """Ask the sites, once for every round."""
        for _ in range(num_rounds):
            sums = self._exchange.ask(self._request)
            if self._store is not None:
                self._store.save_answers(self.round + 1, sums, _probe(self._request))
            self._take(sums)

    def _take(self, sums: Answer) -> None:
        """Give the server what the sites answered, and get its next question."""
        carried = getattr(self._exchange, "carried", payload)  # an exchange may send more than numbers
        self.rounds.append(Round(kinds(sums), *carried(self._request, sums)))
        try:
            self._request = self._server.send(sums)
        except StopIteration as end:
            self.outcome, self.done = end.value, True

    def save(self, store: Store) -> None:
        """Nothing: every round is saved when it is answered."""

    def note(self) -> str:
        """A few words about the latest round."""
        return "" if self._told is None else self._told.note(self.round)

    def line(self, summarise: bool) -> dict[str, Any]:
        """What the journal is told of the latest round."""
        down, up = (len(self._exchange.names) * sum(sizes) for sizes in list(zip(*self.rounds))[1:])
        told = {} if self._told is None else self._told.line(self.round)
        sent = {"bytes_up": up, "bytes_down": down, "sites": replies(self._exchange)}
        return {"round": self.round, **told, **sent}

    def end(self) -> None:
        """Nothing: the server says itself what it has reached."""

    def draws(self) -> Any:
        """None: before the last round there are no draws to be trusted."""
        return None


def _probe(request: Request) -> Array:
    """A few numbers by which a stored round is recognised as the answer to this request."""
    arrays = [np.asarray(request[name], float) for name in sorted(request)]
    return np.array([f for a in arrays for f in (a.size, a.sum(), np.square(a).sum())])
