"""Convolutions written so that the compiler is quick with them inside a loop.

On a CPU the compiler hands a convolution to its fast library only if channels come last. Outside loops it
rearranges others itself; inside a loop, where a client's steps are, it does not, and gradients of
convolutions are always of the other kind: a step of a small network then takes four to five times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fald.core.types import PyTree, float_dtype
from fald.problem.model import Model


def convolves(model: Model, rows: PyTree) -> bool:
    """Whether the log likelihood of such rows (examples in front) contains a convolution."""
    leaves, structure = jax.tree.flatten(rows)
    shapes = tuple((tuple(a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype).name) for a in leaves)
    return _convolves(model, structure, shapes, float_dtype().name)


@functools.lru_cache(maxsize=64)
def _convolves(model: Model, structure: Any, shapes: tuple[tuple[tuple[int, ...], str], ...], _: str) -> bool:
    rows = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct((2, *shape), kind) for shape, kind in shapes])
    position = jax.eval_shape(lambda: model.unravel(jnp.zeros(model.dim, float_dtype())))
    return _inside(jax.make_jaxpr(model.loglikelihoods)(position, rows).jaxpr)


def channels_last(function: Callable) -> Callable:
    """The same function of arrays, with every convolution in it written with channels last.

    Results are equal up to rounding.

    Examples
    --------
    >>> edge = lambda x, k: jax.lax.conv(x, k, (1,), "SAME")
    >>> x, k = jnp.arange(6.0).reshape(1, 2, 3), jnp.ones((1, 2, 3))
    >>> bool(jnp.allclose(edge(x, k), channels_last(edge)(x, k)))
    True
    """

    @functools.wraps(function)
    def rewritten(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        out = core.jaxpr_as_fun(_rewritten(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return rewritten


def _programs(params: Mapping[str, Any]) -> list[Any]:
    """Programs that an operation contains, such as the body of a loop."""
    values = [v for value in params.values() for v in (value if isinstance(value, tuple | list) else [value])]
    return [v for v in values if isinstance(v, core.Jaxpr | core.ClosedJaxpr)]


def _inside(program: Any) -> bool:
    return any(
        one.primitive is jax.lax.conv_general_dilated_p or any(map(_inside, _programs(one.params)))
        for one in program.eqns
    )


def _rewritten(program: Any) -> Any:
    if isinstance(program, core.ClosedJaxpr):
        return program.replace(jaxpr=_rewritten(program.jaxpr))
    return program.replace(eqns=[_operation(one) for one in program.eqns])


def _operation(one: Any) -> Any:
    if one.primitive is jax.lax.conv_general_dilated_p:
        made = jax.make_jaxpr(jax.jit(functools.partial(_convolved, one.params)))(
            *[v.aval for v in one.invars]
        )
        return one.replace(primitive=made.eqns[0].primitive, params=made.eqns[0].params)
    if not any(map(_inside, _programs(one.params))):
        return one

    def changed(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(changed, value)) if _programs({"": value}) else value
        return _rewritten(value) if isinstance(value, core.Jaxpr | core.ClosedJaxpr) else value

    return one.replace(params={name: changed(value) for name, value in one.params.items()})


def _convolved(params: Mapping[str, Any], left: jax.Array, right: jax.Array) -> jax.Array:
    """A convolution with channels last, between transpositions."""
    numbers, last = params["dimension_numbers"], left.ndim - 1
    spatial = range(1, last)
    orders = [
        (spec[0], *spec[2:], spec[1]) for spec in (numbers.lhs_spec, numbers.out_spec)
    ]  # batch, spatial, channels
    kernel = (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    usual = jax.lax.ConvDimensionNumbers(
        (0, last, *spatial), (last, last - 1, *range(last - 1)), (0, last, *spatial)
    )
    out = jax.lax.conv_general_dilated_p.bind(
        left.transpose(orders[0]), right.transpose(kernel), **{**params, "dimension_numbers": usual}
    )
    return out.transpose(tuple(np.argsort(orders[1])))
