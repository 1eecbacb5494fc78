"""Clients' rows: flat arrays with offsets, never padded to the largest client.

Clients are kept in the order of their names, so that a run does not depend on the order in which
they were given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fald.core.errors import ConfigError, DataError
from fald.core.types import PyTree, incomplete
from fald.problem.encoding import (
    Categories,
    Scaling,
    columns_present,
    encode_features,
    encode_tables,
    existing,
    read_table,
    table_parts,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Categories", "FederatedData", "Scaling", "encode_features", "read_table"]


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Rows of all clients for one study, kept apart by client.

    Parameters
    ----------
    rows
        Pytree of arrays whose leading axis runs over all rows, client after client. Nothing is
        copied. For rows that are elsewhere, ``jax.ShapeDtypeStruct`` instead of arrays.
    offsets
        (num_clients + 1,) first row of each client, and the number of rows.
    names
        Client names, in ascending order.
    features, target
        Column names, when the data came from tables.
    bounds
        (features, 2) lower and upper bound of every feature, enforced by ``bounded``; None: no bound.
    part
        Whether these are one site's rows of a larger whole, which may lack what the whole must have.
    read
        What reads rows that are not in memory, see ``from_read``.

    Examples
    --------
    >>> import numpy as np
    >>> data = FederatedData.from_arrays({"b": np.ones((2, 3)), "a": np.zeros((1, 3))})
    >>> data.names, data.sizes.tolist()
    (('a', 'b'), [1, 2])
    """

    rows: PyTree
    offsets: np.ndarray
    names: tuple[str, ...]
    features: tuple[str, ...] = ()
    target: str = ""
    bounds: np.ndarray | None = None
    part: bool = False
    read: Callable[[str, np.ndarray], PyTree] | None = None

    def __post_init__(self):
        offsets = np.asarray(self.offsets)
        object.__setattr__(self, "offsets", offsets)
        if offsets.ndim != 1 or not 1 < len(offsets) == len(self.names) + 1:
            raise DataError(
                f"offsets must have one entry more than there are clients; got {len(offsets)} "
                f"for {len(self.names)} clients"
            )
        if any(a >= b for a, b in zip(self.names, self.names[1:])):
            raise DataError("client names must be distinct and in ascending order")
        sizes = np.diff(offsets)
        if np.any(sizes < 1):
            empty = [n for n, s in zip(self.names, sizes) if s < 1][:5]
            raise DataError(
                f"clients without rows: {', '.join(empty)}", hint="leave out clients that have no data"
            )
        lengths = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in jax.tree.leaves(self.rows)}
        if lengths != {int(offsets[-1])} or offsets[0] != 0:
            raise DataError(
                f"every array of rows must have {int(offsets[-1])} rows, as the offsets say; got {lengths}"
            )
        if offsets[-1] >= 2**31:
            raise DataError(f"at most 2^31 − 1 rows are supported; got {int(offsets[-1])}")

    @property
    def present(self) -> bool:
        """Whether the rows are arrays here; of those of a federation or to read, shapes are known."""
        return not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self.rows))

    @property
    def readable(self) -> bool:
        """Whether rows can be looked at here, as arrays or by ``read``."""
        return self.present or self.read is not None

    def take(self, index: np.ndarray) -> PyTree:
        """Some rows, by their numbers among those of all clients."""
        if self.read is None:
            return jax.tree.map(lambda a: np.asarray(a)[index], self.rows)
        wanted, place = np.unique(index, return_inverse=True)
        ends = np.searchsorted(wanted, self.offsets)
        parts = [
            self._read(int(client), wanted[ends[client] : ends[client + 1]] - self.offsets[client])
            for client in np.flatnonzero(np.diff(ends))
        ]
        return jax.tree.map(lambda *own: np.concatenate(own)[place], *parts)

    def _read(self, client: int, index: np.ndarray) -> PyTree:
        """Rows of one client, by ascending numbers; or an error that names the client."""
        name = self.names[client]
        assert self.read is not None
        rows = _read_by(self.read, name, index)
        wanted = jax.tree.map(lambda a: f"{a.dtype}{[len(index), *a.shape[1:]]}", self.rows)
        found = jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", rows)
        if found != wanted:
            raise DataError(
                f"client {name!r}: asked for {len(index)} rows, read gave {found}; expected {wanted}",
                hint="read(client, index) gives one row for each number, all of the type of the first",
            )
        bad = incomplete(rows)
        if bad is not None:
            raise DataError(f"client {name!r} has a missing or infinite value in row {index[bad]}")
        return rows

    def elsewhere(self, names: Sequence[str], sizes: Sequence[int]) -> FederatedData:
        """Data of these clients with rows like these, which are not here.

        Examples
        --------
        >>> import numpy as np
        >>> data = FederatedData.from_arrays({"a": np.zeros((1, 3))}).elsewhere(["a", "b"], [1, 5])
        >>> data.num_rows, data.present
        (6, False)
        """
        total = int(np.sum(sizes))
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((total, *a.shape[1:]), a.dtype), self.rows)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return replace(self, rows=rows, offsets=offsets, names=tuple(names), part=False, read=None)

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.names)

    @property
    def num_rows(self) -> int:
        """Number of rows of all clients together."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> np.ndarray:
        """Rows per client, n_c."""
        return np.diff(self.offsets)

    @property
    def weights(self) -> np.ndarray:
        """p_c = n_c / n."""
        return self.sizes / self.offsets[-1]

    def client(self, name: str) -> PyTree:
        """The rows of one client."""
        if name not in self.names:
            raise DataError(f"no client named {name!r}; clients are {', '.join(self.names[:10])}")
        i = self.names.index(name)
        if not self.present:
            return self.take(np.arange(self.offsets[i], self.offsets[i + 1]))
        return jax.tree.map(lambda a: a[self.offsets[i] : self.offsets[i + 1]], self.rows)

    def bounded(self, lower: Any, upper: Any) -> FederatedData:
        """The same data with every feature clipped into a declared range.

        Bounded features give some models a bounded gradient, on which privacy accounting can rest
        without clipping gradients. The range must be declared, not read off the data.

        Parameters
        ----------
        lower, upper
            One number for all features, or one per feature, in the units the model sees.

        Examples
        --------
        >>> import numpy as np
        >>> data = FederatedData.from_arrays({"a": (np.array([[5.0], [0.5]]), np.zeros(2))})
        >>> data.bounded(-1, 1).rows[0].ravel().tolist()
        [1.0, 0.5]
        """
        pair = self.present and isinstance(self.rows, tuple) and len(self.rows) == 2
        if not (pair and np.ndim(self.rows[0]) == 2):
            raise DataError("bounds need rows (X, y)", hint="build the data from {name: (X, y)} or tables")
        x, y = self.rows
        low, high = (np.broadcast_to(np.asarray(b, float), (x.shape[1],)) for b in (lower, upper))
        if not (np.all(np.isfinite(low)) and np.all(np.isfinite(high)) and np.all(low < high)):
            raise ConfigError(f"bounds must be finite with lower < upper; got {lower!r} and {upper!r}")
        clipped = np.clip(x, low, high)
        return replace(self, rows=(clipped, y), bounds=np.stack([low, high], axis=1))

    def fingerprint(self) -> str:
        """A short hash of names, sizes and rows, to recognise the same data when a run resumes.

        Rows that are elsewhere do not count: each site recognises its own. Of rows to read some do.
        """
        digest = hashlib.sha256(repr((self.names, self.features, self.target)).encode())
        digest.update(np.ascontiguousarray(self.offsets, np.int64).data)
        for leaf in jax.tree.leaves(self.rows) if self.present else ():
            array = np.asarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode())
            # a stride bounds the cost on very large data; every row counts up to 2^16 rows
            digest.update(np.ascontiguousarray(array[:: max(1, len(array) >> 16)]).data)
        digest.update(self._some_read)
        return digest.hexdigest()[:16]

    @cached_property
    def _some_read(self) -> bytes:
        """A hash of some of the rows that are read; looked at once, as a later look might fail."""
        digest = hashlib.sha256()
        for array in [] if self.read is None else jax.tree.leaves(self.take(evenly(self.num_rows, _PRINTED))):
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return b"" if self.read is None else digest.digest()

    @classmethod
    def from_arrays(cls, clients: Mapping[str, PyTree]) -> FederatedData:
        """Build from ``{name: rows}``, where rows is any pytree of arrays with a leading row axis.

        Regression models expect ``(X, y)``.
        """
        if not (clients and isinstance(clients, Mapping)):
            said = f"clients need names; got a {type(clients).__name__}" if clients else "no clients given"
            raise DataError(said, hint="pass {name: (X, y), ...}")
        named = {name: jax.tree.map(np.asarray, rows) for name, rows in _by_text(clients).items()}
        names = tuple(sorted(named))
        structure = jax.tree.structure(named[names[0]])
        sizes, shapes = [], None
        for name in names:
            leaves, who = jax.tree.leaves(named[name]), f"client {name!r}"
            if jax.tree.structure(named[name]) != structure:
                raise DataError(f"{who} has rows of another structure than client {names[0]!r}")
            if any(leaf.ndim == 0 for leaf in leaves):
                hint = "pass arrays, not lists of numbers"
                raise DataError(f"{who} has an array without a row axis", hint=hint)
            lengths = {len(leaf) for leaf in leaves}
            if len(lengths) != 1:
                raise DataError(f"{who}: its arrays have different numbers of rows {sorted(lengths)}")
            if lengths == {0}:
                raise DataError(f"{who} has no rows", hint="leave out clients that have no data")
            these = [leaf.shape[1:] for leaf in leaves]
            if shapes not in (None, these):
                raise DataError(f"{who} has rows of shape {these}; client {names[0]!r} has {shapes}")
            shapes = these
            for leaf in leaves:
                if leaf.dtype.kind not in "fiub":
                    raise DataError(f"{who} has values of type {leaf.dtype}; numbers are needed")
            if (row := incomplete(leaves)) is not None:
                raise DataError(f"{who} has a missing or infinite value in row {row}")
            sizes.append(lengths.pop())
        rows = jax.tree.map(lambda *parts: _joined(parts), *[named[n] for n in names])
        return cls(rows, np.concatenate([[0], np.cumsum(sizes)]), names)

    @classmethod
    def from_read(cls, read: Callable[[str, np.ndarray], PyTree], sizes: Mapping[str, int]) -> FederatedData:
        """Rows of any format that stay where they are, and are read a round before they are needed.

        Parameters
        ----------
        read
            ``read(client, index)`` gives the rows of a client with these ascending numbers, from 0 on: any
            pytree of arrays with a leading row axis, of the shapes and types of the first client's first row.
            It is called once for each client and round, in a thread, never twice at a time.
        sizes
            Client -> its number of rows.

        Examples
        --------
        >>> data = FederatedData.from_read(lambda client, index: np.ones((len(index), 3)), {"a": 4, "b": 2})
        >>> data.num_rows, data.rows.shape
        (6, (6, 3))
        """
        if not (callable(read) and sizes):
            raise DataError("from_read needs a function read(client, index), and {client: number of rows}")
        counts = _by_text(sizes)
        names = tuple(sorted(counts))
        for name in names:
            if not isinstance(counts[name], int | np.integer) or counts[name] < 1:
                raise DataError(f"client {name!r} needs a number of rows; got {counts[name]!r}")
        first = _read_by(read, names[0], np.zeros(1, int))
        if not jax.tree.leaves(first):
            raise DataError(f"client {names[0]!r}: asked for row 0, read gave nothing")
        for leaf in jax.tree.leaves(first):
            if leaf.ndim == 0 or len(leaf) != 1 or leaf.dtype.kind not in "fiub":
                found = f"{leaf.dtype}{list(leaf.shape)}"
                raise DataError(
                    f"client {names[0]!r}: asked for row 0, read gave {found}; numbers are needed"
                )
        unread = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), first)
        own = cls(unread, np.array([0, 1]), names[:1]).elsewhere(names, [int(counts[n]) for n in names])
        own = replace(own, read=read)
        assert own._some_read  # what cannot be read is found now
        return own

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        *,
        site: str,
        target: str,
        features: Sequence[str],
        categories: Categories | None = None,
        scaling: Scaling | None = None,
    ) -> FederatedData:
        """Build from one table with a column that names the site of each row.

        Parameters
        ----------
        frame
            The table.
        site, target
            Columns with the site and the outcome.
        features
            Columns to use as features.
        categories
            Column -> its levels. A feature becomes one 0/1 column per level after the first, named
            ``column=level``; a target becomes the position of its level.
        scaling
            Column -> (center, scale), declared, not estimated: (x − center)/scale is used.
        """
        columns_present(frame, [site, target], features, "the table")
        unnamed = frame[site].isna() | (frame[site].astype(str).str.strip() == "")
        if unnamed.any():
            raise DataError(
                f"column {site!r} names no site in data row {int(np.argmax(unnamed)) + 1}",
                hint="fill or drop such rows",
            )
        parts = _by_text(dict(iter(frame.groupby(site, sort=False, observed=True))))
        return cls._encoded(parts, target, features, categories=categories, scaling=scaling)

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, str | Path],
        *,
        target: str,
        features: Sequence[str],
        categories: Categories | None = None,
        scaling: Scaling | None = None,
        mapped: str | Path | None = None,
    ) -> FederatedData:
        """Build from one CSV or Parquet file per site, checked against one schema.

        Parameters are those of ``from_frame``; ``files`` maps a site's name to its file. ``mapped`` names a
        folder for encoded rows, which are then read from Parquet files part by part, written there, and
        mapped into memory: rows may be more than memory holds.
        """
        if not files:
            raise ConfigError("no site files given", hint='name them: files = { "site-a" = "a.csv" }')
        paths = _by_text(files)
        if mapped is not None:
            return cls._mapped(paths, Path(mapped), target, features, categories=categories, scaling=scaling)
        tables = {name: read_table(path) for name, path in paths.items()}
        for name, table in tables.items():
            columns_present(table, [target], features, f"site {name!r} ({paths[name]})")
        return cls._encoded(tables, target, features, categories=categories, scaling=scaling)

    @classmethod
    def from_reader(
        cls,
        files: Mapping[str, str | Path],
        read: Callable[[Path, list[str], str | None], Any],
        *,
        target: str,
        features: Sequence[str],
    ) -> FederatedData:
        """Build from one file per site by a model's own ``read``, see ``fald.models.reads``."""
        clients = {}
        for name, path in _by_text(files).items():
            rows = read(existing(path), list(features), target)
            if not all(hasattr(part, "shape") for part in (rows if isinstance(rows, tuple) else (rows,))):
                raise DataError("the model's read function must give an array or a tuple of arrays")
            clients[name] = rows
        return replace(cls.from_arrays(clients), features=tuple(features), target=target)

    @classmethod
    def _mapped(
        cls, paths: Mapping[str, Any], folder: Path, target: str, features: Sequence[str], **encoding: Any
    ) -> FederatedData:
        """Rows of Parquet files, encoded part by part into two files that are mapped."""
        folder.mkdir(parents=True, exist_ok=True)
        names, sizes, columns = tuple(sorted(paths)), [], ()
        with (folder / "features").open("wb") as xs, (folder / "outcomes").open("wb") as ys:
            for name in names:
                count = 0
                for part in table_parts(paths[name], [target, *features], f"site {name!r} ({paths[name]})"):
                    try:
                        arrays, columns = encode_tables({name: part}, target, features, **encoding)
                    except DataError as error:
                        where = (
                            f"{error.message}, counted from data row {count + 1}" if count else error.message
                        )
                        raise DataError(where, hint=error.hint) from None
                    for array, file in zip(arrays[name], (xs, ys)):
                        file.write(np.ascontiguousarray(array, np.float64).tobytes())
                    count += len(part)
                sizes.append(count)
        total = sum(sizes)
        x = np.memmap(folder / "features", np.float64, "r", shape=(total, len(columns)))
        y = np.memmap(folder / "outcomes", np.float64, "r", shape=(total,))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return cls((x, y), offsets, names, features=columns, target=target)

    @classmethod
    def _encoded(
        cls, tables: Mapping[str, pd.DataFrame], target: str, features: Sequence[str], **encoding: Any
    ) -> FederatedData:
        arrays, columns = encode_tables(tables, target, features, **encoding)
        return replace(cls.from_arrays(arrays), features=columns, target=target)


def _read_by(read: Callable[[str, np.ndarray], PyTree], client: str, index: np.ndarray) -> PyTree:
    """What a function reads, as arrays."""
    try:
        return jax.tree.map(np.asarray, read(client, index))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise DataError(f"rows of client {client!r} could not be read: {said}") from error


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts one after the other; not copied when they already lie like that in one array.

    A copy starts at a 64-byte boundary, from which JAX reads it in place.
    """
    first = parts[0]
    shape = (sum(len(p) for p in parts), *first.shape[1:])
    if first.base is not None and all(
        _owner(p) is _owner(first) and p.flags.c_contiguous and p.dtype == first.dtype for p in parts
    ):
        ends = [p.ctypes.data + p.nbytes for p in parts]
        if ends[:-1] == [p.ctypes.data for p in parts[1:]]:
            return np.lib.stride_tricks.as_strided(first, shape)
    dtype = np.result_type(*parts)
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    joined = buffer[start : start + size].view(dtype).reshape(shape)
    np.concatenate(parts, out=joined)
    return joined


def _owner(array: np.ndarray) -> np.ndarray:
    """The array whose numbers these are; of a mapped file the whole of it."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _by_text(named: Mapping[Any, Any]) -> dict[str, Any]:
    texts = {str(name): value for name, value in named.items()}
    if len(texts) != len(named):
        twice = next(t for t in texts if sum(str(n) == t for n in named) > 1)
        raise DataError(
            f"site names must differ as text; {twice!r} stands for several",
            hint="a column that mixes numbers and text gives such names",
        )
    return texts


_PRINTED = 256  # rows that are read to recognise them


def evenly(count: int, most: int) -> np.ndarray:
    """At most so many of ``count`` numbers, evenly spaced.

    Examples
    --------
    >>> evenly(100, 3).tolist(), evenly(2, 3).tolist()
    ([0, 49, 99], [0, 1])
    """
    return np.linspace(0, count - 1, min(count, most)).astype(int)
