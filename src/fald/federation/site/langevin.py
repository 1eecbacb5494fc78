"""A site's part of a round of FA-LD or one of its peers: all chains of one message together."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fald.calculus.gradients import Rows
from fald.core.errors import FederationError
from fald.core.files import pack, unpack, write_atomically
from fald.core.keys import chain_key
from fald.core.reveals import check_upload
from fald.core.types import PyTree, float_dtype
from fald.federation import wire
from fald.federation.site.audit import next_broadcast
from fald.langevin.client import Setup, Visit, client_round
from fald.langevin.fald import private
from fald.langevin.inprocess import as_device
from fald.langevin.method import Method, Upload
from fald.langevin.safety import check_noise, farthest
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.runtime.compiler import options

Array = NDArray[Any]


class Task(NamedTuple):
    """What a round asks of a site.

    Attributes
    ----------
    round
        Index of the round.
    weight
        (chains,) weight of this site's upload in each chain; zero where it does not take part.
    leaves
        Leaves of the broadcast, chains in front.
    saved
        Round that the coordinator has saved: memory of earlier rounds is no longer needed.
    own
        Root of what only this site draws; that of everybody in a run that is not private.
    """

    round: int
    weight: Array
    leaves: list[Array]
    saved: int
    own: Array


class LangevinSite:
    """One site's rows, ready for rounds.

    Parameters
    ----------
    model, method
        What the study says.
    rows
        This site's rows.
    scheme
        Who takes part.
    place
        Place of this site among all, and everybody's rows.
    root
        Key that anybody may know.
    start
        (chains, dim) positions at which the chains start.
    folder
        Where the state that a method keeps between rounds is saved.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        rows: FederatedData,
        *,
        scheme: str,
        place: tuple[int, list[int]],
        root: Array,
        start: Array,
        folder: Path,
    ):
        client, sizes = place
        self._folder = folder
        self._model, self._method, self._root = model, method, jnp.asarray(root, jnp.uint32)
        self._rows = Rows(
            jax.tree.map(as_device, rows.rows),
            jnp.asarray(0, jnp.int32),
            jnp.asarray(sizes[client], jnp.int32),
            jnp.asarray(sum(sizes), jnp.int32),
        )
        setup = Setup(model, method.split()[0], len(sizes), scheme)
        self._client = jnp.asarray(client, jnp.int32)
        self._numbers = method.split()[1]
        self._run = _compile(setup, sizes[client], len(start), str(float_dtype()))
        positions = jnp.asarray(start, float_dtype())
        server, self._start = jax.vmap(method.init)(positions)
        self._message = jax.vmap(method.broadcast)(server)
        self._chains, self._dim = len(start), model.dim
        self._reveals = method.about.reveals
        self.kinds = self._reveals.uploads
        self._memory: tuple[int, PyTree] | None = None
        # compiled once: tracing it anew would cost more than a round of a small network
        self._next = jax.jit(functools.partial(next_broadcast, method))

    def answer(self, task: Task) -> Upload:
        """Work of one round: the upload, chains in front.

        Raises
        ------
        PolicyError
            If the upload is not what the method declares.
        """
        message = jax.tree.unflatten(jax.tree.structure(self._message), task.leaves)
        memory = self._recall(task)
        upload, memory = self._run(
            self._rows,
            self._numbers,
            (self._root, np.asarray(task.own, np.uint32)),  # NumPy's: jit takes them over at less cost
            (self._client, np.asarray(task.round, np.int32)),
            each=(np.asarray(task.weight, float_dtype()), message, memory),
        )
        upload = jax.tree.map(np.asarray, upload)
        sent = jax.tree.leaves(upload._replace(spent=()))
        check_upload(self._reveals, sent, jax.tree.leaves(upload.spent), self._dim)
        self._keep(task, memory)
        return upload

    def check_noise(self, number: int, weight: Array, leaves: list[Array]) -> None:
        """Refuse a private round whose noise would not be the one accounted for."""
        entering, method = float(np.max(weight, initial=0.0)), private(self._method)
        if entering > 0:
            step = (number - 1) * method.local_steps
            largest = farthest(self._model, method, leaves[0], step)
            share = float(self._rows.size) / float(self._rows.total)
            check_noise(method, share, entering, largest, step=step)

    @functools.cached_property
    def start(self) -> list[Array]:
        """The broadcast of the first round."""
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self._message)]

    def after(self, number: int, total: Array) -> list[Array]:
        """The broadcast of a round, given the sum of all uploads of the round before."""
        made = self._next(self._root, number, before=self.start[0], total=total)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(made)]

    def read(self, message: wire.Message) -> list[Array]:
        """The leaves of a broadcast, if they have the shapes of the study's.

        Raises
        ------
        FederationError
            If they have not.
        """
        expected = {f"leaf_{i}": (leaf.shape, leaf.dtype) for i, leaf in enumerate(self.start)}
        found = {name: a for name, a in message.arrays.items() if name.startswith("leaf_")}
        if {name: (a.shape, a.dtype) for name, a in found.items()} != expected:
            raise FederationError(
                "the coordinator's message does not fit the study",
                hint="the same version of fald is needed at all sites",
            )
        return [found[name] for name in expected]

    def _recall(self, task: Task) -> PyTree:
        """Memory as it was before the round."""
        if self._memory is not None and self._memory[0] <= task.round:
            return self._memory[1]
        leaves, structure = jax.tree.flatten(self._start)
        found = [r for r in self._saved() if r <= task.round] if leaves else []
        if not found:
            return self._start
        arrays = unpack(self._path(found[-1]))
        return jax.tree.unflatten(structure, [jnp.asarray(arrays[f"leaf_{i}"]) for i in range(len(leaves))])

    def _keep(self, task: Task, memory: PyTree) -> None:
        self._memory = (task.round + 1, memory)
        leaves = jax.tree.leaves(memory)
        if not leaves:
            return
        arrays = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        write_atomically(self._path(task.round + 1), pack(arrays))
        saved = self._saved()
        needed = max([r for r in saved if r <= task.saved], default=0)
        for r in saved:
            if r < needed or r > task.round + 1:
                self._path(r).unlink()

    def _saved(self) -> list[int]:
        return sorted(int(p.stem.partition("-")[2]) for p in self._folder.glob("memory-*.npz"))

    def _path(self, round_number: int) -> Path:
        return self._folder / f"memory-{round_number:09d}.npz"


@functools.lru_cache(maxsize=32)
def _compile(setup: Setup, size: int, num_chains: int, dtype: str):
    batched = setup.method.about.batch_size is not None

    def run(rows: Rows, hyper, roots, where, *, each):
        client, round_index = where
        keys = jax.tree.map(lambda root: jax.vmap(chain_key, (None, 0))(root, jnp.arange(num_chains)), roots)
        rows = rows._replace(capacity=size, exact=True)
        rows = rows if batched else rows.hold()

        def update(keys, weight, message, memory):
            visit = Visit(keys, client, weight, round_index)
            upload, changed = client_round(setup, hyper, rows, visit, message=message, memory=memory)
            # nothing leaves, and nothing changes, in chains that did not draw this site
            drawn = weight > 0
            upload = jax.tree.map(lambda leaf: jnp.where(drawn, leaf, jnp.zeros_like(leaf)), upload)
            return upload, jax.tree.map(lambda new, old: jnp.where(drawn, new, old), changed, memory)

        return jax.vmap(update)(keys, *each)

    return jax.jit(run, compiler_options=options())
