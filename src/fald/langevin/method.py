"""What every method is made of.

A method is data plus pure functions. It never sees rows, files, threads or sockets: a client's part
works on a ``Local`` (energies, gradients, keys), the server's part on the uploads and their weights.
Any engine can run it.

Step sizes mean the same everywhere: a step of size η moves the chain by η∇f, f the energy of the joint
posterior, and adds noise of variance 2ητ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from fald.client import Local
from fald.compressors import Compressor
from fald.data import FederatedData
from fald.errors import ConfigError, DataError, PrivacyError
from fald.models.base import Model
from fald.participation import Participation, full
from fald.server import Server
from fald.types import PyTree, float_dtype

MAX_DIM = 500  # parameters of methods that send matrices


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
        What the round cost this client; left out where ``Method.fixed_cost`` says it.
    """

    position: jax.Array
    energy: jax.Array
    extra: PyTree = ()
    spent: Spent | tuple[()] = ()


class Method(Protocol):
    """The functions an engine calls, all pure, written for one chain.

    ``traced()`` holds the numbers that may change without recompiling; ``skeleton()`` is the method
    with those numbers taken out, and must be hashable: two runs with equal skeletons share one
    compilation. Inside, functions read numbers only from the ``hyper`` argument.
    """

    @property
    def name(self) -> str:
        """What results call the method."""
        ...

    @property
    def local_steps(self) -> int:
        """Steps a client takes per round."""
        ...

    @property
    def batch_size(self) -> int | None:
        """Rows per stochastic gradient; None: all."""
        ...

    @property
    def point_estimate(self) -> bool:
        """Whether the method converges to a point instead of drawing from a posterior."""
        ...

    @property
    def needs_all_rows(self) -> bool:
        """Whether clients look at all their rows although ``batch_size`` is set."""
        ...

    @property
    def preparation_rounds(self) -> int:
        """Rounds at the start that make no draws; the warm-up must cover them."""
        ...

    @property
    def sums(self) -> bool:
        """Whether the server's part needs only Σ_c w_c β^c of the uploads, which a secure sum can carry."""
        ...

    def traced(self) -> dict[str, Any]:
        """Numbers given to the functions below as ``hyper``."""
        ...

    def skeleton(self) -> Method:
        """The method without those numbers."""
        ...

    def settings(self) -> dict[str, Any]:
        """All settings, for the record."""
        ...

    def without_energy(self) -> Method:
        """The method of a private run, whose clients upload nothing that has no noise on it."""
        ...

    def participation(self, asked: Participation | None) -> Participation:
        """Who takes part: what was asked for, if the method allows it, or its default."""
        ...

    def prepare(self, model: Model, data: FederatedData) -> Method:
        """The method fitted to a federation, where it depends on one; checks that it can run there."""
        ...

    def fixed_cost(self, dim: int) -> Spent | None:
        """What a round costs each participant if it is always the same; None: uploads say it."""
        ...

    def setup_cost(self, dim: int) -> Spent:
        """What each client spends before the first round."""
        ...

    def init_server(self, position: jax.Array) -> PyTree:
        """Server state of a chain that starts at ``position``."""
        ...

    def init_client(self, position: jax.Array) -> PyTree:
        """State a client keeps between rounds; ``()`` if none."""
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


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What most methods have in common: a constant step, a temperature, all clients in every round.

    Subclasses name the settings that only scale numbers in ``_numbers``.
    """

    step_size: float | None
    temperature: float = 1.0
    batch_size: int | None = None
    local_steps: int = 1
    name: str = ""

    _numbers: ClassVar[tuple[str, ...]] = ("step_size", "temperature")

    def __post_init__(self) -> None:
        if "step_size" in self._numbers:
            check_number("step-size", self.step_size, 5e-324, math.inf, "a number > 0")
        check_number("temperature", self.temperature, 0, math.inf, "a number ≥ 0")
        if self.batch_size is not None:
            check_count("batch-size", self.batch_size, 1)

    @property
    def point_estimate(self) -> bool:
        """True at temperature 0: the iterates are those of an optimiser."""
        return self.temperature == 0

    @property
    def needs_all_rows(self) -> bool:
        """No: batches are enough."""
        return False

    @property
    def preparation_rounds(self) -> int:
        """None."""
        return 0

    @property
    def sums(self) -> bool:
        """No: uploads carry more than a position."""
        return False

    @property
    def client_steps(self) -> bool:
        """Whether steps of size η follow single clients' energies, whose curvature then limits η."""
        return False

    def traced(self) -> dict[str, Any]:
        """The numbers that do not recompile."""
        numbers = {name: jnp.asarray(getattr(self, name), float_dtype()) for name in self._numbers}
        return {"local_steps": jnp.asarray(self.local_steps, jnp.int32), **numbers}

    def skeleton(self) -> Self:
        """The method with those numbers set to one."""
        return replace(self, name="", local_steps=1, **dict.fromkeys(self._numbers, 1.0))

    def settings(self) -> dict[str, Any]:
        """Settings as plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name" and f.compare}
        plain = {k: v.settings() if isinstance(v, Compressor) else v for k, v in values.items()}
        return {"method": self.name, **plain}

    def without_energy(self) -> Self:
        """Refuse: accounting covers FA-LD and its special cases only."""
        raise PrivacyError(
            f"there is no privacy accounting for {self.name}",
            hint="use fald.samplers.fald, sgld or fedavg for a private run, without a compressor",
        )

    def participation(self, asked: Participation | None) -> Participation:
        """All clients in every round; anything else is refused."""
        return only_full(self.name, asked)

    def prepare(self, model: Model, data: FederatedData) -> Self:
        """Nothing to fit."""
        return self

    def fixed_cost(self, dim: int) -> Spent | None:
        """Uploads say it."""
        return None

    def setup_cost(self, dim: int) -> Spent:
        """Nothing."""
        return Spent()

    def init_client(self, position: jax.Array) -> PyTree:
        """Clients keep nothing between rounds."""
        return ()

    def init_server(self, position: jax.Array) -> PyTree:
        """The state is the position."""
        return position

    def broadcast(self, state: PyTree) -> PyTree:
        """All of the state travels."""
        return state

    def position(self, state: PyTree) -> jax.Array:
        """The position of the state is the draw."""
        return state.position if hasattr(state, "position") else state


def only_full(name: str, asked: Participation | None) -> Participation:
    """Full participation, or ``ConfigError`` where something else was asked for."""
    if asked is not None and asked.scheme != "full":
        raise ConfigError(
            f"{name} needs every client in every round; got participation {asked.scheme!r}",
            hint="leave participation out; fa-ld, scaffold-2, qlsd, qlsd++ and fedpa allow less",
        )
    return full()


def check_dim(name: str, dim: int) -> None:
    """Raise ``DataError`` if matrices of this size are too large to send."""
    if dim > MAX_DIM:
        raise DataError(
            f"{name} sends matrices of the size of the parameters, up to {MAX_DIM}; the model has {dim}",
            hint="use a method without curvature, such as fald.samplers.fald or qlsd",
        )


def check_number(name: str, value: Any, low: float, high: float, rule: str) -> float:
    """Return ``value`` as a float within limits, or raise ``ConfigError`` naming it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be {rule}; got {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {rule}; got {value!r}")
    return float(value)


def check_probability(name: str, value: Any) -> float:
    """Return a probability in (0, 1], or raise ``ConfigError`` naming it."""
    return check_number(name, value, 5e-324, 1, "above 0 and at most 1")


def check_count(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int ≥ ``least``, or raise ``ConfigError`` naming it."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or number != value or number < least:
        raise ConfigError(f"{name} must be a whole number ≥ {least}; got {value!r}")
    return number


def numbers_as_bytes(count: Any) -> Any:
    """Bytes of so many uncompressed numbers in the run's floating type."""
    return count * float_dtype().itemsize


def triangle(dim: int) -> int:
    """Numbers in a symmetric matrix."""
    return dim * (dim + 1) // 2
