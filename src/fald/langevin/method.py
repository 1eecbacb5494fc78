"""What every method is made of.

A method is data plus pure functions. It never sees rows, files, threads or sockets: a client's part
works on a ``Local`` (energies, gradients, keys), the server's part on the uploads and their weights.
Any engine can run it.

Step sizes mean the same everywhere: a step of size η moves the chain by η∇f, f the energy of the joint
posterior, and adds noise of variance 2ητ.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.sums import MAX_DIM
from fald.core.checks import check_count, check_number, check_positive
from fald.core.errors import DataError
from fald.core.reveals import UNDECLARED, Reveals
from fald.core.types import PyTree, StepSize, float_dtype
from fald.langevin.client import Local
from fald.langevin.compressors import Compressor
from fald.langevin.server import Server
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.settings.participation import Participation

Answers = Mapping[str, Any]


class Spent(NamedTuple):
    """What a client's part in one round cost.

    ``exchanges`` is 1 if the round needed an answer from this client. Bytes are the payload sent and
    received, without the energy that monitors a run. Gradients are on a batch and on all rows of the client;
    without batches all are on all rows. A Hessian counts as one gradient per parameter.
    """

    exchanges: Any = 0
    bytes_up: Any = 0
    bytes_down: Any = 0
    batch_gradients: Any = 0
    full_gradients: Any = 0


class Cost(NamedTuple):
    """What ``each`` round costs a participant (None: uploads say it), and the ``setup`` before the first."""

    each: Spent | None = None
    setup: Spent = Spent()


class Upload(NamedTuple):
    """What a client sends back."""

    position: jax.Array  # where the client ended, or where it alone would have moved the chain
    energy: jax.Array  # at the position that was broadcast
    extra: PyTree = ()  # whatever else the server's part needs
    spent: Spent | tuple[()] = ()  # what the round cost; left out where ``Method.cost`` says it


@dataclass(frozen=True)
class About:
    """What a method declares of itself."""

    name: str  # what results call it
    settings: Mapping[str, Any]  # all of them as plain values, for the record
    reveals: Reveals  # what leaves a client
    local_steps: int  # that a client takes per round
    batch_size: int | None  # rows per stochastic gradient; None: all
    step_size: StepSize | None  # η, a schedule, or None where the method has no step
    point_estimate: bool  # whether it converges to a point instead of drawing from a posterior
    all_rows: bool  # whether clients look at all their rows although there is a batch size
    preparation_rounds: int  # at the start, which make no draws; the warm-up must cover them
    participation: Literal["any", "full"] | Participation  # what it allows; or the one scheme that it has
    client_steps: bool  # whether steps of size η follow single clients' energies, whose curvature limits η
    meets: Literal["joint", "client", "node"]  # curvature that a step meets: of f, of f^c, of N p_c f^c


class Method(ABC):
    """What an engine calls: one declaration, and pure functions written for one chain.

    Functions read numbers only from the ``hyper`` argument, which ``split`` has taken out of the method. A
    class says what leaves its clients in ``reveals``. That holds for what it sends itself: a class derived
    from it that sends or sums in another way declares anew, or counts as having declared nothing. Subclasses
    are frozen dataclasses, and name the settings that only scale numbers in ``_numbers``.
    """

    # fields of the dataclasses derived from this
    name: str
    local_steps: int
    batch_size: int | None
    step_size: Any
    temperature: float

    reveals: Any = UNDECLARED  # a Reveals, or a property that gives one
    all_rows: ClassVar[bool] = False
    participation: ClassVar[Any] = "full"
    client_steps: ClassVar[bool] = False
    meets: ClassVar[Any] = property(lambda self: "client" if self.client_steps else "joint")
    preparation_rounds: Any = 0
    _numbers: ClassVar[tuple[str, ...]] = ("step_size", "temperature")

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "reveals" not in cls.__dict__ and {"client_update", "server_update", "offer"} & set(cls.__dict__):
            cls.reveals = UNDECLARED

    @property
    def point_estimate(self) -> bool:
        """True at temperature 0: the iterates are those of an optimiser."""
        return self.temperature == 0

    @property
    def about(self) -> About:
        """What the method is, and what leaves a client."""
        own = {f.name: getattr(self, f.name) for f in fields(About) if f.name != "settings"}
        return About(settings=self.settings(), **own)

    def settings(self) -> dict[str, Any]:
        """Settings as plain values."""
        own: Any = self
        values = {f.name: getattr(self, f.name) for f in fields(own) if f.name != "name" and f.compare}
        plain = {k: v.settings() if isinstance(v, Compressor) else v for k, v in values.items()}
        return {"method": self.name, **plain}

    def split(self) -> tuple[Self, dict[str, Any]]:
        """The method without its numbers, K among them, and these numbers, which change without recompiling.

        The first part is hashable; two runs in which it is equal share one compilation.
        """
        own: Any = self
        numbers = {name: jnp.asarray(getattr(self, name), float_dtype()) for name in self._numbers}
        hyper = {"local_steps": jnp.asarray(self.local_steps, jnp.int32), **numbers}
        return replace(own, name="", local_steps=1, **dict.fromkeys(self._numbers, 1.0)), hyper

    def cost(self, dim: int) -> Cost:
        """What a round and what comes before cost each participant; by default uploads say it."""
        return Cost()

    def offer(self, model: Model, data: FederatedData) -> dict[str, Any]:
        """What clients send before the first round, by name, clients in front; ``{}`` if nothing.

        A site is given its own rows as ``data``. Kinds are declared in ``about.reveals.preparation``.
        """
        return {}

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Self:
        """The method fitted to a federation by what its clients offered; checks that it can run there."""
        return self

    def init(self, position: jax.Array) -> tuple[PyTree, PyTree]:
        """State of a server whose chain starts at ``position``, and what a client keeps between rounds.

        By default the state is the position, and clients keep nothing.
        """
        return position, ()

    def broadcast(self, state: PyTree) -> PyTree:
        """What the server sends to every participant; by default all of the state."""
        return state

    @abstractmethod
    def client_update(self, hyper, local: Local, message: PyTree, memory: PyTree) -> tuple[Upload, PyTree]:
        """Work of one client in one round: its upload and its new state."""

    @abstractmethod
    def server_update(self, hyper, state: PyTree, uploads: Upload, server: Server) -> PyTree:
        """New server state from the uploads, slots in front; those of weight zero are empty."""

    def position(self, state: PyTree) -> jax.Array:
        """The current draw."""
        return state.position if hasattr(state, "position") else state


@dataclass(frozen=True, kw_only=True)
class Peer(Method):
    """What most methods have in common: a constant step, a temperature, all clients in every round."""

    step_size: float | None
    temperature: float = 1.0
    batch_size: int | None = None
    local_steps: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if "step_size" in self._numbers:
            check_positive("step-size", self.step_size)
        check_number("temperature", self.temperature, rule="a number ≥ 0")
        if self.batch_size is not None:
            check_count("batch-size", self.batch_size, 1)


def digest(arrays: Any) -> str:
    """A short hash of arrays, by which settings name them."""
    found = hashlib.sha256()
    for part in arrays:
        found.update(np.ascontiguousarray(np.asarray(part, np.float32)).data)
    return found.hexdigest()[:16]


def check_dim(name: str, dim: int) -> None:
    """Raise ``DataError`` if matrices of this size are too large to send."""
    if dim > MAX_DIM:
        raise DataError(
            f"{name} sends matrices of the size of the parameters, up to {MAX_DIM}; the model has {dim}",
            hint="use a method without curvature, such as fald.samplers.fald or qlsd",
        )


def numbers_as_bytes(count: Any) -> Any:
    """Bytes of so many uncompressed numbers in the run's floating type."""
    return count * float_dtype().itemsize


def triangle(dim: int) -> int:
    """Numbers in a symmetric matrix."""
    return dim * (dim + 1) // 2
