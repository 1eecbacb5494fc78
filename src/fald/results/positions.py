"""From draws back to positions, the pytrees that a model's functions take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fald.core.errors import DataError
from fald.core.types import PyTree
from fald.problem.model import Model

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class Positions:
    """The draws of a result as positions; made by ``positions``.

    ``[chain, draw]`` is one position, ``[chain]`` the draws of a chain, their axis in front, and slices work
    as in NumPy. ``shape`` is (chains, draws).
    """

    arrays: PyTree
    shape: tuple[int, int]

    def __getitem__(self, place: Any) -> PyTree:
        return jax.tree.map(lambda array: array[place], self.arrays)

    def last(self, num_chains: int) -> PyTree:
        """The last draws of the chains, one for each of so many new ones; repeated where there are fewer."""
        chains = np.arange(num_chains) % self.shape[0]
        earlier = np.arange(num_chains) // self.shape[0] % self.shape[1]  # other draws before the same again
        return self[chains, self.shape[1] - 1 - earlier]


def positions(tree: xr.DataTree, model: Model | None = None) -> Positions:
    """The draws of a result as positions: ``positions(tree)[chain, draw]`` is what a model's functions take.

    Parameters
    ----------
    tree
        A result of ``fald.sample`` or ``fald.fit``.
    model
        Its model. Needed where the result has only quantities transformed by ``constrain_fn``, or the
        position is made of objects other than dictionaries, lists and tuples; tuples become lists without it.

    Raises
    ------
    DataError
        If the model is needed, or does not belong to the result.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np, fald
    >>> model = fald.Model(lambda p: -jnp.sum(p["mu"] ** 2), lambda p, x: -jnp.sum((x - p["mu"]) ** 2),
    ...                    initial_position={"mu": jnp.zeros(2)})
    >>> data = fald.FederatedData.from_arrays({"a": np.zeros((20, 2)), "b": np.zeros((10, 2))})
    >>> tree = fald.sample(0, model, data, num_rounds=4, local_steps=1, step_size=1e-3, progress=False)
    >>> fald.positions(tree)[0, 3]["mu"].shape, fald.positions(tree)[:, -1]["mu"].shape
    ((2,), (4, 2))
    """
    posterior = tree["posterior"].to_dataset()
    shape = (posterior.sizes["chain"], posterior.sizes["draw"])
    if model is not None:
        return Positions(_with_model(tree, model, shape), shape)
    paths = json.loads(posterior.attrs.get("paths", "{}"))
    if not paths or None in paths.values():
        raise DataError("the result does not say how its positions are built", hint="give the model too")
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        place = root
        for step in ["", *path[:-1]] if path else []:
            place = place.setdefault(step, {})
        place[path[-1] if path else ""] = posterior[name].values
    return Positions(_lists(root[""]), shape)


def _lists(node: Any) -> Any:
    """Dictionaries whose keys are places as lists."""
    if not isinstance(node, dict):
        return node
    parts = {key: _lists(value) for key, value in node.items()}
    return list(parts.values()) if all(isinstance(key, int) for key in parts) else parts


def _with_model(tree: xr.DataTree, model: Model, shape: tuple[int, int]) -> PyTree:
    leaves, structure = jax.tree.flatten(model.initial_position)
    if "unconstrained_posterior" in tree.children:
        flat = np.asarray(tree["unconstrained_posterior"]["position"].values)
        if flat.shape[-1] == model.dim:
            return of_flat(model, flat)
    else:
        found = [array.values for array in tree["posterior"].data_vars.values()]
        if [array[0, 0].size for array in found] == [np.size(leaf) for leaf in leaves]:
            shaped = [array.reshape(*shape, *np.shape(leaf)) for array, leaf in zip(found, leaves)]
            return jax.tree.unflatten(structure, shaped)
    raise DataError(f"the result is not one of model {model.name!r}: its parameters have other shapes")


def of_flat(model: Model, flat: np.ndarray) -> PyTree:
    """Flat positions (…, dim) as pytrees of views into them."""
    leaves, structure = jax.tree.flatten(model.initial_position)
    ends = np.cumsum([0, *[int(np.size(leaf)) for leaf in leaves]])
    parts = [
        flat[..., a:b].reshape(*flat.shape[:-1], *np.shape(leaf))
        for (a, b), leaf in zip(pairwise(ends), leaves)
    ]
    return jax.tree.unflatten(structure, parts)


def functionals(
    tree: xr.DataTree, functions: Mapping[str, Callable[[PyTree], Any]], model: Model | None = None
) -> xr.DataTree:
    """A result of functions of the position instead of the parameters, for ``fald.summary`` and ``verdict``.

    Predictions on some rows, or some weights, say more of a network than all of its weights.

    Parameters
    ----------
    tree, model
        As in ``fald.positions``.
    functions
        By name, each from a position to a number or an array. They are compiled, and see one draw at a time.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np, fald
    >>> model = fald.Model(lambda p: -jnp.sum(p["w"] ** 2), lambda p, x: -jnp.sum((x - p["w"]) ** 2),
    ...                    initial_position={"w": jnp.zeros(5000)})
    >>> data = fald.FederatedData.from_arrays({"a": np.zeros((2, 5000)), "b": np.zeros((2, 5000))})
    >>> tree = fald.sample(0, model, data, num_rounds=8, local_steps=1, step_size=1e-2, progress=False)
    >>> fald.summary(tree).index.tolist()
    ['w: norm', 'w: projection 1', 'w: projection 2', 'w: projection 3']
    >>> fald.summary(fald.diagnostics.functionals(tree, {"first": lambda p: p["w"][:2]})).index.tolist()
    ['first[0]', 'first[1]']
    """
    import xarray as xr

    found = positions(tree, model)
    compiled = jax.jit(lambda position: {name: fn(position) for name, fn in functions.items()})
    values = [
        [jax.device_get(compiled(found[c, d])) for d in range(found.shape[1])] for c in range(found.shape[0])
    ]
    variables = {}
    for name in functions:
        array = np.array([[draw[name] for draw in chain] for chain in values])
        dims = [f"{name}_dim_{i}" for i in range(array.ndim - 2)]
        variables[name] = (["chain", "draw", *dims], array)
    others = {name: child for name, child in tree.children.items() if name == "sample_stats"}
    made = xr.DataTree.from_dict({"posterior": xr.Dataset(variables), **others})
    made.attrs = dict(tree.attrs)
    return made
