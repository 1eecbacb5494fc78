"""What every method is made of.

A method is data plus pure functions. It never sees rows, files, threads or sockets: a client's part
works on a ``Local`` (energies, gradients, keys), the server's part on the uploads and their weights.
Any engine can run it.

Step sizes mean the same everywhere: a step of size η moves the chain by η∇f, f the energy of the joint
posterior, and adds noise of variance 2ητ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

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

MAX_DIM = 500  # parameters of methods that send matrices
Answers = Mapping[str, Any]


class Spent(NamedTuple):
    """What a client's part in one round cost.

    Attributes
    ----------
    exchanges
        1 if the round needed an answer from this client, 0 if not.
    bytes_up, bytes_down
        Payload sent and received. The energy that monitors a run is not counted.
    batch_gradients, full_gradients
        Gradients on a batch and on all rows of the client; without batches all are on all rows. A
        Hessian counts as one gradient per parameter.
    """

    exchanges: Any = 0
    bytes_up: Any = 0
    bytes_down: Any = 0
    batch_gradients: Any = 0
    full_gradients: Any = 0


class Cost(NamedTuple):
    """What a method costs each client.

    Attributes
    ----------
    each
        A round of a participant, if it is always the same; None: uploads say it.
    setup
        What is spent before the first round.
    """

    each: Spent | None = None
    setup: Spent = Spent()


class Upload(NamedTuple):
    """What a client sends back.

    Attributes
    ----------
    position
        Where the client ended, or where it alone would have moved the chain.
    energy
        Its energy at the position that was broadcast.
    extra
        Whatever else the server's part needs.
    spent
        What the round cost this client; left out where ``Method.cost`` says it.
    """

    position: jax.Array
    energy: jax.Array
    extra: PyTree = ()
    spent: Spent | tuple[()] = ()


@dataclass(frozen=True)
class About:
    """What a method declares of itself.

    Attributes
    ----------
    name, settings
        What results call the method, and all its settings as plain values, for the record.
    reveals
        What leaves a client.
    local_steps, batch_size, step_size
        Steps that a client takes per round; rows per stochastic gradient, None: all; η, a schedule, or None
        where the method has no step.
    point_estimate
        Whether the method converges to a point instead of drawing from a posterior.
    all_rows
        Whether clients look at all their rows although ``batch_size`` is set.
    preparation_rounds
        Rounds at the start that make no draws; the warm-up must cover them.
    participation
        Who takes part: ``"any"`` scheme, ``"full"`` only, or the one scheme that the method has.
    client_steps
        Whether steps of size η follow single clients' energies, whose curvature then limits η.
    meets
        The energy whose curvature a step of size η meets where all clients take part: the ``"joint"`` one f,
        a ``"client"``'s f^c, or that of a ``"node"``, N p_c f^c.
    """

    name: str
    settings: Mapping[str, Any]
    reveals: Reveals
    local_steps: int
    batch_size: int | None
    step_size: StepSize | None
    point_estimate: bool
    all_rows: bool
    preparation_rounds: int
    participation: Literal["any", "full"] | Participation
    client_steps: bool
    meets: Literal["joint", "client", "node"]


class Method(Protocol):
    """What an engine calls: one declaration, and pure functions written for one chain.

    Functions read numbers only from the ``hyper`` argument, which ``split`` has taken out of the method.
    """

    @property
    def about(self) -> About:
        """What the method is, and what leaves a client."""
        ...

    def split(self) -> tuple[Method, dict[str, Any]]:
        """The method without its numbers, and the numbers, which may change without recompiling.

        The first part is hashable; two runs in which it is equal share one compilation.
        """
        ...

    def cost(self, dim: int) -> Cost:
        """What a round and what comes before cost each participant."""
        ...

    def offer(self, model: Model, data: FederatedData) -> dict[str, Any]:
        """What clients send before the first round, by name, clients in front; ``{}`` if nothing.

        A site is given its own rows as ``data``. Kinds are declared in ``about.reveals.preparation``.
        """
        ...

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Method:
        """The method fitted to a federation by what its clients offered; checks that it can run there."""
        ...

    def init(self, position: jax.Array) -> tuple[PyTree, PyTree]:
        """State of a server whose chain starts at ``position``, and what a client keeps between rounds."""
        ...

    def broadcast(self, state: PyTree) -> PyTree:
        """What the server sends to every participant."""
        ...

    def client_update(self, hyper, local: Local, message: PyTree, memory: PyTree) -> tuple[Upload, PyTree]:
        """Work of one client in one round: its upload and its new state."""
        ...

    def server_update(
        self, hyper, state: PyTree, uploads: Upload, weights: jax.Array, server: Server
    ) -> PyTree:
        """New server state from the uploads (slots in front) and their weights (zero: empty slot)."""
        ...

    def position(self, state: PyTree) -> jax.Array:
        """The current draw."""
        ...


class Base:
    """Defaults of all methods: a declaration put together from fields and class attributes, and no state.

    A class says what leaves its clients in ``reveals``. That holds for what it sends itself: a class derived
    from it that sends or sums in another way declares anew, or counts as having declared nothing.
    Subclasses name the settings that only scale numbers in ``_numbers``.
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
    def preparation_rounds(self) -> int:
        """None."""
        return 0

    @property
    def about(self) -> About:
        """The declaration."""
        return About(
            name=self.name,
            settings=self.settings(),
            reveals=self.reveals,
            local_steps=self.local_steps,
            batch_size=self.batch_size,
            step_size=self.step_size,
            point_estimate=self.point_estimate,
            all_rows=self.all_rows,
            preparation_rounds=self.preparation_rounds,
            participation=self.participation,
            client_steps=self.client_steps,
            meets=self.meets,
        )

    def settings(self) -> dict[str, Any]:
        """Settings as plain values."""
        own: Any = self
        values = {f.name: getattr(self, f.name) for f in fields(own) if f.name != "name" and f.compare}
        plain = {k: v.settings() if isinstance(v, Compressor) else v for k, v in values.items()}
        return {"method": self.name, **plain}

    def split(self) -> tuple[Self, dict[str, Any]]:
        """The method with K and the numbers named in ``_numbers`` set to one, and those numbers."""
        own: Any = self
        numbers = {name: jnp.asarray(getattr(self, name), float_dtype()) for name in self._numbers}
        hyper = {"local_steps": jnp.asarray(self.local_steps, jnp.int32), **numbers}
        return replace(own, name="", local_steps=1, **dict.fromkeys(self._numbers, 1.0)), hyper

    def cost(self, dim: int) -> Cost:
        """Uploads say it."""
        return Cost()

    def offer(self, model: Model, data: FederatedData) -> dict[str, Any]:
        """Nothing."""
        return {}

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Self:
        """Nothing to fit."""
        return self

    def init(self, position: jax.Array) -> tuple[PyTree, PyTree]:
        """The state is the position; clients keep nothing between rounds."""
        return position, ()

    def broadcast(self, state: PyTree) -> PyTree:
        """All of the state travels."""
        return state

    def position(self, state: PyTree) -> jax.Array:
        """The position of the state is the draw."""
        return state.position if hasattr(state, "position") else state


@dataclass(frozen=True, kw_only=True)
class Peer(Base):
    """What most methods have in common: a constant step, a temperature, all clients in every round."""

    step_size: float | None
    temperature: float = 1.0
    batch_size: int | None = None
    local_steps: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if "step_size" in self._numbers:
            check_positive("step-size", self.step_size)
        check_number("temperature", self.temperature, 0, math.inf, rule="a number ≥ 0")
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
