"""Tables: read from files, checked against one schema, and encoded as arrays of numbers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas as pd

Scaling = Mapping[str, tuple[float, float]]
Categories = Mapping[str, Sequence[Any]]

_MISSING_WORDS = ("", "na", "n/a", "nan", "null", "none", "<na>", "#n/a")


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a CSV or Parquet file, by its ending.

    In a CSV only an empty field is missing: words such as ``None`` or ``NA`` may be levels.
    """
    import pandas as pd

    path = Path(path)
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a file", hint="give a .csv or .parquet file")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], 1)
        raise DataError(
            f"no such file: {path}",
            hint=f"did you mean {path.parent / near[0]}?" if near else "check the path in the study file",
        )
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise DataError(f"{path}: cannot read files of type {path.suffix!r}", hint="use .csv or .parquet")
    try:
        if kind == ".parquet":
            return pd.read_parquet(path)
        only_empty = {"keep_default_na": False, "na_values": [""]}
        table = pd.read_csv(path, **only_empty)
        header = pd.read_csv(path, header=None, nrows=1, dtype=str, **only_empty).iloc[0]
    except (ValueError, OSError, NotImplementedError) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from error
    if not isinstance(table.index, pd.RangeIndex):
        raise DataError(f"{path}: rows have more fields than the header", hint="check for stray commas")
    if header.dropna().duplicated().any():
        table.columns = header  # pandas would tell equal names apart by a number
    return table


def columns_present(table: pd.DataFrame, others: Sequence[str], features: Sequence[str], where: str) -> None:
    """Refuse a table that lacks a needed column or has it twice; ``where`` names the table in errors."""
    if isinstance(features, str):
        raise ConfigError(f"features must be a list of columns; got {features!r}", hint=f"[{features!r}]")
    needed = [*others, *features]
    duplicated = sorted({c for c in needed if needed.count(c) > 1})
    if duplicated:
        raise ConfigError(
            f"columns named twice: {', '.join(duplicated)}",
            hint="the site, the target and the features must all differ",
        )
    for column in needed:
        if list(table.columns).count(column) > 1:
            raise DataError(f"{where} has several columns {column!r}", hint="rename or remove all but one")
        if column not in table.columns:
            near = difflib.get_close_matches(column, [str(c) for c in table.columns], 1)
            if len(table.columns) == 1 and any(mark in str(table.columns[0]) for mark in ";\t|"):
                raise DataError(
                    f"{where} has one column only, {str(table.columns[0])!r}",
                    hint="fields must be separated by commas; save the table as comma-separated CSV",
                )
            raise DataError(
                f"{where} has no column {column!r}; it has {', '.join(map(str, table.columns[:20]))}",
                hint=f"did you mean {near[0]!r}?" if near else "check the spelling",
            )


def encode_tables(
    tables: Mapping[str, pd.DataFrame],
    target: str,
    features: Sequence[str],
    categories: Categories | None = None,
    scaling: Scaling | None = None,
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
    """Each site's table as ``(X, y)``, and the names of the columns of X.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"dose": [1.0, 3.0], "sex": ["f", "m"], "well": [0, 1]})
    >>> arrays, columns = encode_tables({"a": table}, "well", ["dose", "sex"], {"sex": ["f", "m"]})
    >>> columns, arrays["a"][0].tolist()
    (('dose', 'sex=m'), [[1.0, 0.0], [3.0, 1.0]])
    """
    categories, scaling = dict(categories or {}), dict(scaling or {})
    for column, levels in categories.items():
        if isinstance(levels, str) or len({_level(v) for v in levels}) != len(levels) or len(levels) < 2:
            raise ConfigError(f"categories of {column!r} must be two or more distinct levels; got {levels!r}")
    for column in {**categories, **scaling}:
        if column not in [*features, target]:
            raise ConfigError(f"{column!r} is neither the target nor a feature", hint="remove it, or add it")
    for column in scaling:
        center, scale = scaling[column]
        if column in categories:
            raise ConfigError(f"{column!r} has categories; it cannot be scaled as well")
        if not (np.isfinite(center) and np.isfinite(scale) and scale > 0):
            raise ConfigError(f"scaling of {column!r} needs a finite center and a scale > 0")
    columns: list[str] = []
    for column in features:
        levels = categories.get(column)
        columns += [column] if levels is None else [f"{column}={level}" for level in list(levels)[1:]]
    arrays = {}
    for name, table in sorted(tables.items()):
        where = f"site {name!r}"
        if len(table) == 0:
            raise DataError(f"{where} has no rows", hint="leave out sites that have no data")
        X = _encode_all(table, where, features, categories, scaling)
        levels = categories.get(target)
        y = _encode(table[target], target, where, None, scaling.get(target)) if levels is None else None
        outcome = y[:, 0] if y is not None else _codes(table[target], target, where, levels or ())
        arrays[name] = (X, outcome)
    return arrays, tuple(columns)


def _encode_all(
    table: Any, where: str, features: Sequence[str], categories: Categories, scaling: Scaling
) -> np.ndarray:
    encoded = [_encode(table[c], c, where, categories.get(c), scaling.get(c)) for c in features]
    return np.concatenate([np.zeros((len(table), 0)), *encoded], axis=1)


def encode_features(
    table: pd.DataFrame, where: str, features: Sequence[str], categories: Categories, scaling: Scaling
) -> np.ndarray:
    """Features of new rows, encoded as in training; ``where`` names the table in errors."""
    columns_present(table, [], features, where)
    return _encode_all(table, where, features, categories, scaling)


def _encode(series: Any, column: str, where: str, levels, scaling) -> np.ndarray:
    if levels is not None:
        codes = _codes(series, column, where, levels)
        return (codes[:, None] == np.arange(1, len(levels))[None, :]).astype(float)
    values = _numbers(series, column, where)
    center, scale = scaling or (0.0, 1.0)
    return ((values - center) / scale)[:, None]


def _numbers(series: Any, column: str, where: str) -> np.ndarray:
    absent = series.isna()
    if series.dtype.kind == "O":
        absent |= series.map(_says_missing).astype(bool)
    if absent.any():
        raise _missing(where, column, _first(absent))
    try:
        if series.dtype.kind in "mMc":
            raise TypeError
        values = series.to_numpy(dtype=float)
    except (TypeError, ValueError):
        row = _first(~series.map(_is_number).astype(bool))
        raise DataError(
            f"{where}, column {column!r}: {_shown(series.iloc[row])} in data row {row + 1} is not a number",
            hint=f"correct it, or declare the levels of {column!r} under categories",
        ) from None
    if not np.all(np.isfinite(values)):
        row = _first(~np.isfinite(values))
        raise DataError(f"{where}, column {column!r}: infinite value in data row {row + 1}")
    return values


def _missing(where: str, column: str, row: int) -> DataError:
    return DataError(
        f"{where}, column {column!r}: missing value in data row {row + 1}",
        hint="fill it in or drop the row at the site",
    )


def _first(flags: Any) -> int:
    return int(np.argmax(np.asarray(flags)))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _says_missing(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in _MISSING_WORDS


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _level(value: Any) -> str:
    """One spelling for a level however a table stores it: 1 and 1.0, True and TRUE are the same."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    text = str(value)
    return text.lower() if text.lower() in ("true", "false") else text


def _codes(series: Any, column: str, where: str, levels: Sequence[Any]) -> np.ndarray:
    order = {_level(level): i for i, level in enumerate(levels)}
    if series.isna().any():
        raise _missing(where, column, _first(series.isna()))
    found = [_level(value) for value in series]
    unknown = [text not in order for text in found]
    if any(unknown):
        row = _first(unknown)
        raise DataError(
            f"{where}, column {column!r}: level {str(series.iloc[row])!r} in data row {row + 1} is not "
            f"declared; declared are {', '.join(map(str, levels))}",
            hint="add the level to categories, or correct the data",
        )
    return np.array([order[text] for text in found], float)
