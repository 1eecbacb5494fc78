"""Draws as an ``xarray.DataTree``: building, saving, summarising."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fald.core.errors import ConfigError, StorageError
from fald.core.files import write_atomically
from fald.problem.model import Model
from fald.results.kinds import kind_of
from fald.results.positions import of_flat

if TYPE_CHECKING:
    import xarray as xr

MOST_ROWS = 1000  # numbers of a draw that are looked at one by one
_MOST_OF_ARRAY = 16
_PROJECTIONS = 3
_MOST_PROJECTIONS = 30
_BLOCK = 2**14  # numbers of a draw that are looked at together, few enough for a cache


def posterior_groups(model: Model, flat: np.ndarray) -> dict[str, xr.Dataset]:
    """The groups of a result that hold draws, from flat positions (chain, draw, dim)."""
    import xarray as xr

    num_chains, num_draws = flat.shape[:2]
    values = reported(model, flat.reshape(num_chains * num_draws, -1))
    coords: dict[str, Any] = {"chain": np.arange(num_chains), "draw": np.arange(num_draws)}
    base = dict(coords)
    posterior = {}
    for name, value in values.items():
        array = np.asarray(value)
        array = array.reshape(num_chains, num_draws, *array.shape[1:])
        dims = list(model.dims.get(name, [f"{name}_dim_{i}" for i in range(array.ndim - 2)]))
        for dim, size in zip(dims, array.shape[2:]):
            coords.setdefault(dim, list(model.coords.get(dim, range(size))))
        attrs = {"ratio": model.ratios[name]} if name in model.ratios else {}
        posterior[name] = xr.Variable(["chain", "draw", *dims], array, attrs)
    groups = {"posterior": xr.Dataset(posterior, coords, {"paths": json.dumps(model.paths)})}
    if model.constrain_fn is not None:
        raw = {"position": (["chain", "draw", "parameter"], flat)}
        groups["unconstrained_posterior"] = xr.Dataset(raw, {**base, "parameter": model.parameter_names})
    return groups


def site_sizes(names: Sequence[str], sizes: Any) -> xr.Dataset:
    """Rows of every site, and its share of all rows."""
    import xarray as xr

    sizes = np.asarray(sizes, np.int64)
    return xr.Dataset(
        {"size": (["client"], sizes), "share": (["client"], sizes / sizes.sum())}, {"client": list(names)}
    )


def reported(model: Model, flat: np.ndarray) -> dict[str, Any]:
    """Reported quantities of many flat positions; compiled only where something is transformed."""
    if model.constrain_fn is not None:
        return _compiled_report(model, str(flat.dtype))(flat)
    return model.report(of_flat(model, flat))


@functools.lru_cache(maxsize=32)
def _compiled_report(model: Model, dtype: str) -> Callable[[np.ndarray], dict[str, Any]]:
    return jax.jit(jax.vmap(lambda theta: model.report(model.unravel(theta))))


def save(tree: xr.DataTree, path: str | Path) -> Path:
    """Write a result to a NetCDF file, whole or not at all.

    Examples
    --------
    ``fald.save(tree, "posterior.nc")`` and later ``fald.load("posterior.nc")``.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise StorageError(f"cannot write {path}: folder {path.parent} does not exist")
    # through memory, because HDF5 does not survive a full disk
    write_atomically(path, tree.to_netcdf(engine="h5netcdf"))
    return path


def load(path: str | Path) -> xr.DataTree:
    """Read a result written by ``save``."""
    import xarray as xr

    path = Path(path)
    if not path.is_file():
        raise StorageError(f"no such file: {path}", hint="give the posterior.nc of a finished run")
    try:
        with xr.open_datatree(path, engine="h5netcdf") as tree:
            loaded = tree.load()
    except Exception as error:  # a damaged file fails in many ways, all of them the same to the user
        raise StorageError(
            f"{path} is not a readable result ({error})", hint="restore it, or run again"
        ) from error
    if "posterior" not in loaded.children:
        raise StorageError(f"{path} has no posterior in it", hint="give the posterior.nc of a fald run")
    loaded.attrs["kind"] = kind_of(loaded).name  # files of earlier versions have none
    return loaded


def settings_of(tree: xr.DataTree) -> dict[str, Any]:
    """All settings a result was made with."""
    return json.loads(tree.attrs["settings"])


def check_level(level: float) -> float:
    """Return a probability strictly between 0 and 1, or raise ``ConfigError``."""
    if not 0 < level < 1:
        raise ConfigError(f"level must be between 0 and 1; got {level!r}", hint="0.95 is usual")
    return float(level)


def draws_by_row(tree: xr.DataTree, *, every: bool = False) -> dict[str, tuple[str, np.ndarray]]:
    """Label -> (variable, (chain, draw) array) for every scalar of the posterior.

    A regression coefficient is called by its feature, unless something else has that name; others
    ``name[index]``. In a posterior of more than 1,000 numbers, an array of more than 16 is represented by its
    norm and up to three random projections, with no variable to their names; ``every`` asks for all the same.
    """
    posterior = tree["posterior"]
    per_feature = [str(n) for n, array in posterior.data_vars.items() if array.dims[2:] == ("feature",)]
    many = not every and numbers_per_draw(tree) > MOST_ROWS
    projections = max(1, min(_PROJECTIONS, _MOST_PROJECTIONS // max(len(posterior.data_vars), 1)))
    rows = {}
    for name, array in posterior.data_vars.items():
        dims = [str(d) for d in array.dims[2:]]
        values = array.values
        if many and values[0, 0].size > _MOST_OF_ARRAY:
            of_array = _functionals(str(name), values, projections)
            rows |= {f"{name}: {what}": ("", draws) for what, draws in of_array.items()}
            continue
        for place in np.ndindex(values.shape[2:]):
            index = [str(array.coords[d].values[i] if d in array.coords else i) for d, i in zip(dims, place)]
            label = f"{name}[{', '.join(index)}]" if dims else str(name)
            if per_feature == [name] and index[0] not in posterior.data_vars:
                label = index[0]
            rows[label] = (str(name), values[(slice(None), slice(None), *place)])
    return rows


def numbers_per_draw(tree: xr.DataTree) -> int:
    """Scalars in one draw of the posterior."""
    return sum(int(np.prod(array.shape[2:])) for array in tree["posterior"].data_vars.values())


def _functionals(name: str, values: np.ndarray, projections: int) -> dict[str, np.ndarray]:
    """The norm and random projections of an array in every draw, in little more memory than the draws have.

    A projection is Σ ±x_i/√n with signs that depend on the name alone.
    """
    shape, flat = values.shape[:2], values.reshape(values.shape[0] * values.shape[1], -1)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    signs = rng.integers(0, 2, (projections, flat.shape[1]), np.int8)
    square, along = np.zeros(len(flat)), np.zeros((len(flat), projections))
    for start in range(0, flat.shape[1], _BLOCK):
        signed = (2 * signs[:, start : start + _BLOCK] - 1).astype(flat.dtype)
        for i, draw in enumerate(flat):  # one by one: a product of matrices would copy all of them first
            part = draw[start : start + _BLOCK]
            square[i] += part @ part
            along[i] += signed @ part
    along /= np.sqrt(flat.shape[1])
    found = {"norm": np.sqrt(square), **{f"projection {i + 1}": row for i, row in enumerate(along.T)}}
    return {what: row.reshape(shape) for what, row in found.items()}


def labels(model: Model) -> list[str]:
    """What ``draws_by_row`` calls the scalars of a model."""
    import xarray as xr

    one = np.asarray(model.flat_initial_position)[None, None]
    return list(draws_by_row(xr.DataTree.from_dict(posterior_groups(model, one))))
