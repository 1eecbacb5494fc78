"""Splitting one data set into clients, for experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from fald.core.errors import ConfigError
from fald.core.types import PyTree
from fald.problem.data import FederatedData

if TYPE_CHECKING:
    import pandas as pd


def _assemble(rows: PyTree, members: Sequence[np.ndarray]) -> FederatedData:
    width = len(str(max(len(members) - 1, 1)))
    names = tuple(f"client-{i:0{width}d}" for i in range(len(members)))
    order = np.concatenate(members)
    sizes = [len(m) for m in members]
    flat = jax.tree.map(lambda a: np.asarray(a)[order], rows)
    return FederatedData(flat, np.concatenate([[0], np.cumsum(sizes)]), names)


def _num_rows(rows: PyTree, num_clients: int) -> int:
    lengths = {len(leaf) for leaf in jax.tree.leaves(rows)}
    if len(lengths) != 1:
        raise ConfigError(f"all arrays must have the same number of rows; got {sorted(lengths)}")
    (n,) = lengths
    if num_clients != int(num_clients) or not 1 <= num_clients <= n:
        raise ConfigError(f"num-clients must be a whole number from 1 to the {n} rows; got {num_clients}")
    return n


def _labels(labels: np.ndarray, num_rows: int) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.shape != (num_rows,):
        raise ConfigError(f"labels must be one per row; got shape {labels.shape} for {num_rows} rows")
    return labels


def iid(rows: PyTree, num_clients: int, *, seed: int = 0) -> FederatedData:
    """Shuffle the rows and deal them out in equal parts (sizes differ by at most one).

    Examples
    --------
    >>> iid(np.arange(10.0), 3).sizes.tolist()
    [4, 3, 3]
    """
    n = _num_rows(rows, num_clients)
    return _assemble(rows, np.array_split(np.random.default_rng(seed).permutation(n), num_clients))


def dirichlet(
    rows: PyTree, labels: np.ndarray, num_clients: int, *, concentration: float, seed: int = 0
) -> FederatedData:
    """Give each client a share of every class drawn from a symmetric Dirichlet law.

    A small ``concentration`` makes clients with very different classes and sizes; every client
    keeps at least one row.

    Examples
    --------
    >>> y = np.repeat([0, 1], 50)
    >>> dirichlet(np.arange(100.0), y, 4, concentration=0.1).num_rows
    100
    """
    n = _num_rows(rows, num_clients)
    if not 0 < concentration < np.inf:
        raise ConfigError(f"concentration must be a finite number > 0; got {concentration}")
    labels = _labels(labels, n)
    rng = np.random.default_rng(seed)
    members: list[list[int]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        here = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clients, concentration))
        cuts = np.round(np.cumsum(shares)[:-1] * len(here)).astype(int)
        for client, part in enumerate(np.split(here, cuts)):
            members[client].extend(part.tolist())
    for member in members:
        if not member:
            member.append(max(members, key=len).pop())
    return _assemble(rows, [np.array(m) for m in members])


def pathological(
    rows: PyTree, labels: np.ndarray, num_clients: int, *, classes_per_client: int = 2, seed: int = 0
) -> FederatedData:
    """Sort rows by class, cut them into equal shards, give each client ``classes_per_client`` shards.

    Examples
    --------
    >>> y = np.repeat([0, 1, 2, 3], 10)
    >>> data = pathological((np.zeros((40, 1)), y), y, 4, classes_per_client=1)
    >>> [np.unique(data.client(n)[1]).size for n in data.names]
    [1, 1, 1, 1]
    """
    n = _num_rows(rows, num_clients)
    shards = num_clients * classes_per_client
    if shards != int(shards) or not num_clients <= shards <= n:
        raise ConfigError(
            f"num-clients × classes-per-client must be a whole number from {num_clients} to the {n} rows; "
            f"got {shards}"
        )
    labels = _labels(labels, n)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(n)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    pieces = np.array_split(by_class, shards)
    dealt = rng.permutation(shards).reshape(num_clients, classes_per_client)
    return _assemble(rows, [np.concatenate([pieces[i] for i in row]) for row in dealt])


def by_column(
    frame: pd.DataFrame, column: str, *, target: str, features: Sequence[str], **encoding
) -> FederatedData:
    """One client per value of a column; see ``FederatedData.from_frame`` for ``encoding``.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"region": ["n", "s", "n"], "x": [1, 2, 3], "y": [0, 1, 0]})
    >>> by_column(table, "region", target="y", features=["x"]).names
    ('n', 's')
    """
    return FederatedData.from_frame(frame, site=column, target=target, features=features, **encoding)
