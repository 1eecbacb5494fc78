r"""Decentralised SGLD (DE-SGLD): no server, every client talks to its neighbours on a graph.

    x_i ← Σ_j W_ij x_j − Nη ∇Ũ_i(x_i) + √(2Nητ) ξ_i,

W symmetric with rows that sum to one, from Metropolis weights W_ij = 1/(1 + max(deg_i, deg_j)) on the edges.
The step of the reference is Nη, so that the mean of the nodes moves by η∇f. The draw is that mean; ``drift``
in the results says how far single nodes are from it.

Reference: Gürbüzbalaban, Gao, Hu and Zhu, "Decentralized stochastic gradient Langevin dynamics and
Hamiltonian Monte Carlo", JMLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.errors import ConfigError
from fald.core.keys import normals
from fald.core.reveals import Reveals
from fald.langevin.client import Local
from fald.langevin.method import Answers, Peer, Spent, Upload, numbers_as_bytes
from fald.langevin.server import Server
from fald.problem.data import FederatedData
from fald.problem.model import Model

Graph = Literal["ring", "complete", "star"]


def neighbours(graph: Graph, num_nodes: int) -> np.ndarray:
    """Adjacency (N, N) without loops."""
    linked = np.zeros((num_nodes, num_nodes), bool)
    if graph == "complete":
        linked[:] = True
    elif graph == "star":
        linked[0] = linked[:, 0] = True
    else:
        nodes = np.arange(num_nodes)
        linked[nodes, (nodes + 1) % num_nodes] = True
        linked |= linked.T
    np.fill_diagonal(linked, False)
    return linked


def mixing(graph: Graph, num_nodes: int) -> np.ndarray:
    """Metropolis weights W (N, N): symmetric, rows sum to one.

    Examples
    --------
    >>> mixing("ring", 4).round(2)[0].tolist()
    [0.33, 0.33, 0.0, 0.33]
    """
    linked = neighbours(graph, num_nodes)
    degree = linked.sum(1)
    weights = np.where(linked, 1 / (1 + np.maximum(degree[:, None], degree)), 0.0)
    return weights + np.diag(1 - weights.sum(1))


@dataclass(frozen=True, kw_only=True)
class DESGLD(Peer):
    """The method; made by ``de_sgld``."""

    graph: Graph = "ring"
    num_nodes: int = 0
    name: str = "de-sgld"

    reveals = Reveals()
    meets = "node"

    def prepare(self, model: Model, data: FederatedData, answers: Answers) -> Self:
        """Every client is a node."""
        return replace(self, num_nodes=data.num_clients)

    def init(self, position: jax.Array) -> tuple[jax.Array, tuple[()]]:
        """Positions of all nodes; the engine carries them, no node sees more than its neighbours'."""
        return jnp.broadcast_to(position, (self.num_nodes, *position.shape)), ()

    def position(self, state: jax.Array) -> jax.Array:
        """The mean of the nodes."""
        return state.mean(0)

    def client_update(self, hyper, local: Local, message: jax.Array, memory: tuple[()]):
        """Mix with the neighbours and take one step."""
        own = message[local.client]
        weights = jnp.asarray(mixing(self.graph, self.num_nodes), own.dtype)[local.client]
        step = self.num_nodes * hyper["step_size"]
        noise = jnp.sqrt(2 * step * hyper["temperature"]) * normals(local.own_key, 0, own.shape[0])
        moved = weights @ message - step * local.share * local.grad(own, 0) + noise
        links = jnp.asarray(neighbours(self.graph, self.num_nodes).sum(1), jnp.int32)[local.client]
        travelled = numbers_as_bytes(links * own.shape[0])
        return Upload(moved, local.energy(own, 0), spent=Spent(1, travelled, travelled, 1)), memory

    def server_update(self, hyper, state: jax.Array, uploads: Upload, server: Server):
        """Nothing is averaged: the nodes' new positions."""
        return uploads.position


def de_sgld(
    *, step_size: float, graph: Graph = "ring", temperature: float = 1.0, batch_size: int | None = None
) -> DESGLD:
    """DE-SGLD on a graph of the clients.

    Parameters
    ----------
    step_size, temperature, batch_size
        η, τ and rows per stochastic gradient.
    graph
        ``"ring"``, ``"complete"`` or ``"star"``; the first client is the centre of a star. Clients in the
        order of their names.

    Notes
    -----
    Nodes that differ stay apart by an amount that grows with the step size and with the distances in the
    graph, which biases their mean too. Bytes count every message to a neighbour.

    Examples
    --------
    >>> de_sgld(step_size=1e-3, graph="star").graph
    'star'
    """
    if graph not in ("ring", "complete", "star"):
        raise ConfigError(f"graph must be 'ring', 'complete' or 'star'; got {graph!r}")
    return DESGLD(step_size=step_size, temperature=temperature, batch_size=batch_size, graph=graph)
