"""Tables: read from files, checked against one schema, and encoded as arrays of numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas as pd

Scaling = Mapping[str, tuple[float, float]]
Categories = Mapping[str, Sequence[Any]]

TABLES = (".csv", ".parquet")
_PART = 1 << 17  # rows of a file that are read at once
_MISSING_WORDS = ("", "na", "n/a", "nan", "null", "none", "<na>", "#n/a")


def existing(path: str | Path) -> Path:
    """A path at which there is something; ``DataError`` with the nearest name otherwise."""
    path = Path(path)
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], 1)
        raise DataError(
            f"no such file: {path}",
            hint=f"did you mean {path.parent / near[0]}?" if near else "check the path in the study file",
        )
    return path


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a CSV or Parquet file, by its ending.

    In a CSV only an empty field is missing: words such as ``None`` or ``NA`` may be levels.
    """
    import pandas as pd

    path = existing(path)
    if not path.is_file():
        raise DataError(f"{path} is not a file", hint="give a .csv or .parquet file")
    kind = path.suffix.lower()
    if kind not in TABLES:
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


def table_parts(path: str | Path, columns: Sequence[str], where: str) -> Iterator[pd.DataFrame]:
    """Some columns of a Parquet file, part by part; ``where`` names it in errors."""
    from pyarrow import parquet

    path = existing(path)
    if path.suffix.lower() != ".parquet":
        raise DataError(f"{path}: rows are mapped from Parquet files alone", hint="save it as .parquet")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from error
    if file.metadata.num_rows == 0:
        raise DataError(f"{where} has no rows", hint="leave out sites that have no data")
    columns_present(file.schema_arrow.empty_table().to_pandas(), columns, [], where)
    for part in file.iter_batches(_PART, columns=list(columns)):
        yield part.to_pandas()


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
    *,
    categories: Categories | None = None,
    scaling: Scaling | None = None,
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
    """Each site's table as ``(X, y)``, and the names of the columns of X.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"dose": [1.0, 3.0], "sex": ["f", "m"], "well": [0, 1]})
    >>> arrays, columns = encode_tables({"a": table}, "well", ["dose", "sex"], categories={"sex": ["f", "m"]})
    >>> columns, arrays["a"][0].tolist()
    (('dose', 'sex=m'), [[1.0, 0.0], [3.0, 1.0]])
    """
    categories, scaling = dict(categories or {}), dict(scaling or {})
    _check_encoding([*features, target], categories, scaling)
    arrays = {}
    for name, table in sorted(tables.items()):
        where = f"site {name!r}"
        if len(table) == 0:
            raise DataError(f"{where} has no rows", hint="leave out sites that have no data")
        X = _encode_all(table[list(features)], where, categories, scaling)
        if target in categories:
            y = _codes(table[target], where, categories[target])
        else:
            y = _encode_all(table[[target]], where, {}, scaling)[:, 0]
        arrays[name] = (X, y)
    return arrays, encoded_names(features, categories)


def encoded_names(features: Sequence[str], categories: Categories) -> tuple[str, ...]:
    """Names of the encoded columns: a column's own, or one for every level but the first.

    Examples
    --------
    >>> encoded_names(["dose", "arm"], {"arm": ["a", "b", "c"]})
    ('dose', 'arm=b', 'arm=c')
    """
    levels = {column: list(categories.get(column, ())) for column in features}
    return tuple(
        name for column in features for name in [f"{column}={v}" for v in levels[column][1:]] or [column]
    )


def _check_encoding(columns: Sequence[str], categories: Categories, scaling: Scaling) -> None:
    for column in {**categories, **scaling}:
        if column not in columns:
            raise ConfigError(f"{column!r} is neither the target nor a feature", hint="remove it, or add it")
    for column, levels in categories.items():
        if isinstance(levels, str) or len({_level(v) for v in levels}) != len(levels) or len(levels) < 2:
            raise ConfigError(f"categories of {column!r} must be two or more distinct levels; got {levels!r}")
    for column, (center, scale) in scaling.items():
        if column in categories:
            raise ConfigError(f"{column!r} has categories; it cannot be scaled as well")
        if not (np.isfinite(center) and np.isfinite(scale) and scale > 0):
            raise ConfigError(f"scaling of {column!r} needs a finite center and a scale > 0")


def encode_features(
    table: pd.DataFrame, where: str, features: Sequence[str], *, categories: Categories, scaling: Scaling
) -> np.ndarray:
    """Features of new rows, encoded as in training; ``where`` names the table in errors."""
    columns_present(table, [], features, where)
    return _encode_all(table[list(features)], where, categories, scaling)


def _encode_all(table: Any, where: str, categories: Categories, scaling: Scaling) -> np.ndarray:
    encoded = [np.zeros((len(table), 0))]
    for column in table.columns:
        levels = categories.get(column)
        if levels is not None:
            codes = _codes(table[column], where, levels)
            encoded.append((codes[:, None] == np.arange(1, len(levels))).astype(float))
        else:
            center, scale = scaling.get(column, (0.0, 1.0))
            encoded.append(((_numbers(table[column], where) - center) / scale)[:, None])
    return np.concatenate(encoded, axis=1)


def _numbers(series: Any, where: str) -> np.ndarray:
    at = f"{where}, column {series.name!r}"
    absent = series.isna()
    if series.dtype.kind == "O":
        absent |= series.map(lambda v: isinstance(v, str) and v.strip().lower() in _MISSING_WORDS).astype(
            bool
        )
    _check_present(at, absent)
    try:
        if series.dtype.kind in "mMc":
            raise TypeError
        values = series.to_numpy(dtype=float)
    except (TypeError, ValueError):
        row = int(np.argmax(~series.map(_is_number).astype(bool)))
        value = series.iloc[row]
        shown = repr(value) if isinstance(value, str) else str(value)
        raise DataError(
            f"{at}: {shown} in data row {row + 1} is not a number",
            hint=f"correct it, or declare the levels of {series.name!r} under categories",
        ) from None
    if not np.all(np.isfinite(values)):
        raise DataError(f"{at}: infinite value in data row {int(np.argmax(~np.isfinite(values))) + 1}")
    return values


def _check_present(at: str, absent: Any) -> None:
    if absent.any():
        raise DataError(
            f"{at}: missing value in data row {int(np.argmax(absent)) + 1}",
            hint="fill it in or drop the row at the site",
        )


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


def _codes(series: Any, where: str, levels: Sequence[Any]) -> np.ndarray:
    at = f"{where}, column {series.name!r}"
    order = {_level(level): i for i, level in enumerate(levels)}
    _check_present(at, series.isna())
    found = [_level(value) for value in series]
    for row, text in enumerate(found):
        if text not in order:
            raise DataError(
                f"{at}: level {str(series.iloc[row])!r} in data row {row + 1} is not "
                f"declared; declared are {', '.join(map(str, levels))}",
                hint="add the level to categories, or correct the data",
            )
    return np.array([order[text] for text in found], float)
