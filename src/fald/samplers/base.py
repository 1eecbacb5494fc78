"""What every method is made of.

A method is data plus pure functions. It never sees rows, files, threads or sockets: a client's part
works on a ``Local`` (energies, gradients, keys), the server's part on the uploads and their weights.
Any engine can run it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from fald.client import Local
from fald.types import PyTree


class Upload(NamedTuple):
    """What a client sends back: a position, and its energy at the position that was broadcast."""

    position: jax.Array
    energy: jax.Array


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

    def server_update(self, hyper, state: PyTree, uploads: Upload, weights: jax.Array) -> PyTree:
        """New server state from the uploads (slots in front) and their weights (zero: empty slot)."""
        ...

    def position(self, state: PyTree) -> jax.Array:
        """The current draw."""
        ...
