"""What a model is: a log prior, a log likelihood of one example, and a place to start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fald.core.errors import DataError
from fald.core.keys import words
from fald.core.types import Example, Position, as_floats, float_dtype

if TYPE_CHECKING:
    from fald.problem.data import FederatedData

LARGEST_TERM = 1e12  # a log likelihood of one row beyond this is none


def takes_rows(loglikelihood_fn: Callable) -> Callable:
    """Mark a log likelihood that takes many examples at once too, and returns a number for each.

    Their axis is in front. It then chooses how a batch is laid out, which ``jax.vmap`` of one example does
    otherwise. The mark is the function's, not the model's, so that a function put in its place has none.

    Examples
    --------
    >>> fn = takes_rows(lambda position, x: -0.5 * (x - position) ** 2)
    >>> normal = Model(lambda position: -(position**2), fn, initial_position=jnp.array(0.0))
    >>> normal.loglikelihoods(jnp.array(1.0), jnp.array([1.0, 3.0])).tolist()
    [-0.0, -2.0]
    """
    loglikelihood_fn.takes_rows = True  # type: ignore[attr-defined]
    return loglikelihood_fn


def takes_key(loglikelihood_fn: Callable) -> Callable:
    """Mark a log likelihood ``(position, example, rng_key) -> scalar`` that draws at random, as dropout does.

    Every row of every local step gets a key of its own. Steps then follow the gradient of log p averaged over
    keys: the target is prior × Π_i exp(E log p(x_i | θ, key)), by Jensen's inequality below the mixture over
    keys, and the spread over keys adds to the noise of batches. Elsewhere, as in a plan, one fixed key is
    used. Few-round methods need exact sums and refuse such a model. The mark is the function's, not the
    model's.

    Examples
    --------
    >>> @takes_key
    ... def fn(position, x, rng_key):  # inputs with noise on them
    ...     return -0.5 * (x + 0.1 * jax.random.normal(rng_key) - position) ** 2
    >>> model = Model(lambda position: -(position**2), fn, initial_position=jnp.array(0.0))
    >>> terms = model.loglikelihoods(jnp.array(1.0), jnp.ones(2), jnp.array([0, 1], jnp.uint32))
    >>> bool(terms[0] != terms[1])
    True
    """
    loglikelihood_fn.takes_key = True  # type: ignore[attr-defined]
    return loglikelihood_fn


def concave(function: Callable) -> Callable:
    """Mark a log prior, or the log likelihood of one example, that is concave in the position.

    A position counts as the vector of all its numbers. Where both are marked the log posterior is a sum of
    concave functions, and so concave itself: ``fald.fit`` then looks for no other modes, and takes a fraction
    of the time. It compares whatever it sees with the declaration, and a false one is told if it shows there.
    The marks are the functions', not the model's, so that another prior put in the place of one has none.

    Examples
    --------
    >>> fn = concave(lambda position, x: -jnp.abs(x - position))
    >>> Model(concave(lambda position: -(position**2)), fn, initial_position=jnp.array(0.0)).concave
    True
    >>> Model(lambda position: -jnp.log1p(position**2), fn, initial_position=jnp.array(0.0)).concave
    False
    """
    function.concave = True  # type: ignore[attr-defined]
    return function


def derived(derivatives_fn: Callable) -> Callable[[Callable], Callable]:
    """Mark a log prior with a function that computes it and its derivatives in NumPy, without a compiler.

    ``derivatives_fn(positions, order)`` takes flat positions (M, d) and returns values (M,), gradients (M, d)
    and Hessians (M, d, d), up to the order 0, 1 or 2 of derivatives. The mark is the function's, not the
    model's, so that a function put in its place has none.
    """

    def mark(logprior_fn: Callable) -> Callable:
        logprior_fn.derivatives_fn = derivatives_fn  # type: ignore[attr-defined]
        return logprior_fn

    return mark


def reads(read: Callable[[Any, Sequence[str], str | None], Any]) -> Callable[[Callable], Callable]:
    """Mark a function that makes a model with the function that reads a site's file for it.

    Without the mark fald encodes the study's columns of a table. With it the file may be anything.

    Parameters
    ----------
    read
        ``(path, features, target) -> rows``, an array or a tuple of arrays, each with rows in front. The
        last array of a tuple is the outcome; where ``target`` is None, for predictions, it is left out, and
        what remains must be one array.

    Examples
    --------
    >>> @reads(lambda path, features, target: np.load(path)["images"])
    ... def textures(features):
    ...     return Model(lambda p: -(p**2), lambda p, x: -((x.mean() - p) ** 2), jnp.array(0.0))
    >>> textures.read is not None
    True
    """

    def mark(make: Callable) -> Callable:
        make.read = read  # type: ignore[attr-defined]
        return make

    return mark


class Bounds(NamedTuple):
    """What holds for a log likelihood at every position θ of every client, ℓ = −log likelihood of its rows.

    Attributes
    ----------
    curvature
        0 ≼ ∇²ℓ(θ) ≼ curvature·∇²ℓ(0); infinite where only the lower bound holds.
    rows
        Σ_i ‖∇ℓ_i(θ)‖² ≤ rows·tr ∇²ℓ(0); infinite where there is no such bound.
    """

    curvature: float
    rows: float


def bounded(*, curvature: float, rows: float) -> Callable[[Callable], Callable]:
    """Mark a log likelihood for which inequalities hold; ``fald.theory`` makes guarantees of them.

    The first of them says that it is concave, so that it counts as marked by ``concave`` too.
    The mark is the function's, not the model's, so that a function put in its place has none.

    Examples
    --------
    >>> @bounded(curvature=1.0, rows=4.0)
    ... def fn(position, example):
    ...     x, y = example
    ...     return y * x * position - jnp.logaddexp(0.0, x * position)
    >>> Model(lambda position: -(position**2), fn, initial_position=jnp.array(0.0)).bounds
    Bounds(curvature=1.0, rows=4.0)
    """

    def mark(loglikelihood_fn: Callable) -> Callable:
        loglikelihood_fn.bounds = Bounds(curvature, rows)  # type: ignore[attr-defined]
        return concave(loglikelihood_fn)

    return mark


class Predictor(NamedTuple):
    """How a log likelihood of examples (x, y) depends on η = a + bx, through which alone it knows x.

    All three functions take η (rows, positions), with an axis of predictors in front where there are
    several; y (rows, 1); and the other entries of the position by name, (positions,) each. They compute in
    NumPy, in the precision of η, so that sums over rows are a matrix product and a few passes over an array.

    Attributes
    ----------
    value_fn
        Log likelihood summed over rows, by a fourth argument: ``totals(terms)`` adds up terms
        (rows, positions), ``totals.linear(weights, η)`` η itself times weights (rows, 1) at hardly any cost,
        ``totals.of_logs(factors, most)`` the logarithms of factors between 1 and ``most``,
        and ``totals.counts`` are numbers of rows. It may write to η.
    slopes_fn
        Its derivatives by every predictor and every other entry, in this order; a list of (rows, positions).
    bends_fn
        Second derivatives: a list of such lists, of which the part right of the diagonal is used.
    single
        Whether values and slopes may be computed in float32: where a value changes at most as fast as η, the
        error of a sum over n rows is about 2⁻²⁴ η √n.
    squares
        c where a row is known through the square of a residual alone, which is linear in η and y − c, so that
        few rows stand for many; None otherwise.
    """

    value_fn: Callable[[Any, Any, Mapping[str, Any], Any], Any]
    slopes_fn: Callable[[Any, Any, Mapping[str, Any]], Sequence[Any]]
    bends_fn: Callable[[Any, Any, Mapping[str, Any]], Sequence[Sequence[Any]]]
    single: bool = False
    squares: float | None = None


def predicted(
    value_fn: Callable, slopes_fn: Callable, bends_fn: Callable, **others: Any
) -> Callable[[Callable], Callable]:
    """Mark a log likelihood of examples (x, y) that knows x through the linear predictor η = a + bx alone.

    Its positions are mappings with ``intercept``, () or (predictors,), and ``coefficient``, (features,) or
    (predictors, features); ``Predictor`` says what the functions and ``others`` are. The mark is the
    function's, not the model's, so that a function put in its place has none.
    """

    def mark(loglikelihood_fn: Callable) -> Callable:
        found = Predictor(value_fn, slopes_fn, bends_fn, **others)
        loglikelihood_fn.predictor = found  # type: ignore[attr-defined]
        return loglikelihood_fn

    return mark


@dataclass(frozen=True, eq=False)
class Model:
    """A Bayesian model whose likelihood is a product over examples.

    The joint posterior over all clients is
    π(θ) ∝ exp(logprior_fn(θ) + Σ_c Σ_i loglikelihood_fn(θ, x_ci)): the prior counts once, however
    many clients there are.

    Parameters
    ----------
    logprior_fn
        ``position -> scalar``.
    loglikelihood_fn
        ``(position, example) -> scalar`` for ONE example, a row of the data with the leading axis
        removed. One that draws at random takes a key too, and is marked by ``fald.models.takes_key``.
    initial_position
        Any pytree of floating arrays; where the chains start, and the shape of the parameters.
    predict_fn
        ``(position, features) -> expected outcome`` for one row of features.
    simulate_fn
        ``(rng_key, position, features) -> outcome`` for one row; gives predictive intervals.
    constrain_fn
        ``position -> mapping`` from the unconstrained position to the quantities reported.
    dims, coords
        Dimension names per reported variable and their coordinate values, as in xarray. ``"feature"`` is the
        dimension of effects of features, and ``coords["input"]``, where there is one, names the columns that
        ``predict_fn`` takes if they are others.
    ratios
        Reported variable -> what its exponential is called, such as ``"odds ratio"``.
    sensitivity_fn
        ``bounds -> Δ`` from feature bounds (features, 2) to the largest change of ∇loglikelihood_fn when
        one row is replaced by another within them, at any position.
    check_fn
        ``data -> None``; raises ``DataError`` when rows do not fit the model.
    scales_fn
        ``(values, gradients, rows) -> scales`` that a family's default priors are to be relative to, from the
        log likelihood (1 + d,) and its gradients (1 + d, d) over all rows at zero and at the d unit vectors.
    prior
        The prior in words, for reports.
    name
        What reports call the model.
    origin
        Package and version that it comes from, where a study named it; empty: fald, or a program.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> normal = Model(
    ...     logprior_fn=lambda p: -0.5 * p["mu"] ** 2,
    ...     loglikelihood_fn=lambda p, x: -0.5 * (x - p["mu"]) ** 2,
    ...     initial_position={"mu": jnp.array(0.0)},
    ... )
    >>> normal.dim
    1
    """

    logprior_fn: Callable[[Position], Any]
    loglikelihood_fn: Callable[..., Any]
    initial_position: Position
    predict_fn: Callable[[Position, Any], Any] | None = None
    simulate_fn: Callable[[Any, Position, Any], Any] | None = None
    constrain_fn: Callable[[Position], Mapping[str, Any]] | None = None
    dims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    coords: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ratios: Mapping[str, str] = field(default_factory=dict)
    sensitivity_fn: Callable[[np.ndarray], float] | None = None
    check_fn: Callable[[FederatedData], None] | None = None
    scales_fn: Callable[[np.ndarray, np.ndarray, int], dict[str, Any]] | None = None
    prior: str = ""
    name: str = "custom"
    origin: str = ""

    def __post_init__(self):
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.initial_position)
        if not leaves:
            raise DataError("initial_position has no parameters", hint="give a pytree of floating arrays")
        for path, leaf in leaves:
            array = np.asarray(leaf)
            if array.dtype.kind not in "fiub":
                kind = type(leaf).__name__
                raise DataError(
                    f"initial_position must hold numbers alone; {_path_name(path)} is a {kind}",
                    hint="give the arrays of a module and put the rest back in loglikelihood_fn; with "
                    "Equinox: params, static = eqx.partition(module, eqx.is_inexact_array), then eqx.combine",
                )
            if not (np.issubdtype(array.dtype, np.floating) and np.all(np.isfinite(array))):
                raise DataError(
                    f"initial_position must hold finite floating numbers; got {array.dtype} {array!r}",
                    hint="write 0.0 instead of 0; whole numbers that are no parameters belong into "
                    "loglikelihood_fn",
                )
        self._check_report()

    def _check_report(self) -> None:
        """Refuse names and labels that would only fail when the draws are put together, after the run."""
        for name, value in jax.eval_shape(self.report, as_floats(self.initial_position)).items():
            dims = self.dims.get(name)
            if name in ("chain", "draw") or any(name in d for d in self.dims.values()):
                raise DataError(f"a parameter cannot be called {name!r}: that is the name of a dimension")
            if dims is not None and len(dims) != len(value.shape):
                raise DataError(f"{name!r} has shape {value.shape}, but dims names it {list(dims)}")
            for dim, size in zip(dims or (), value.shape):
                if dim in self.coords and len(self.coords[dim]) != size:
                    raise DataError(
                        f"dimension {dim!r} of {name!r} has {size} entries, but coords gives it "
                        f"{len(self.coords[dim])} labels"
                    )

    @property
    def bounds(self) -> Bounds | None:
        """Inequalities that hold for the log likelihood; None: none are known."""
        return getattr(self.loglikelihood_fn, "bounds", None)

    @property
    def concave(self) -> bool:
        """Whether log prior and log likelihood of a row are declared concave, so that their sum is too."""
        return all(getattr(fn, "concave", False) for fn in (self.logprior_fn, self.loglikelihood_fn))

    @property
    def predictor(self) -> Predictor | None:
        """How the log likelihood depends on a linear predictor; None: it is not known to."""
        return getattr(self.loglikelihood_fn, "predictor", None)

    @property
    def undeclared(self) -> list[str]:
        """What the model does not say of itself, and what follows from that, in words."""
        absent = {
            "its prior in words": not self.prior,
            "what outcome it expects (predict_fn), so there are no predictions and no check of its fit": (
                self.predict_fn is None
            ),
        }
        return [what for what, missing in absent.items() if missing]

    @property
    def flat_initial_position(self) -> jax.Array:
        """The starting point as one vector, in the run's floating type."""
        return ravel_pytree(as_floats(self.initial_position))[0]

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(self.initial_position))

    def unravel(self, flat: jax.Array) -> Position:
        """Turn one flat vector back into a position."""
        return ravel_pytree(as_floats(self.initial_position))[1](flat)

    def flat_logprior(self, flat: jax.Array) -> jax.Array:
        """Log prior of a flat position."""
        return jnp.asarray(self.logprior_fn(self.unravel(flat)))

    @property
    def takes_key(self) -> bool:
        """Whether the log likelihood draws at random."""
        return getattr(self.loglikelihood_fn, "takes_key", False)

    def flat_loglikelihood(
        self, flat: jax.Array, example: Example, key: jax.Array | None = None
    ) -> jax.Array:
        """Log likelihood of one example at a flat position, with the words of a key where it takes one."""
        return self._term(self.unravel(flat), example, key)

    def _term(self, position: Position, example: Example, key: jax.Array | None) -> jax.Array:
        if not self.takes_key:
            return jnp.asarray(self.loglikelihood_fn(position, example))
        own = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32) if key is None else key)
        return jnp.asarray(self.loglikelihood_fn(position, example, own))

    def row_keys(self, rows: Example, key: jax.Array | None) -> jax.Array | None:
        """A key for each of some examples (examples, 2); None where the log likelihood takes none."""
        if not self.takes_key:
            return None
        count = jax.tree.leaves(rows)[0].shape[0]
        return jnp.stack(words(jnp.zeros(2, jnp.uint32) if key is None else key, 0, count), axis=1)

    def loglikelihoods(self, position: Position, rows: Example, key: jax.Array | None = None) -> jax.Array:
        """Log likelihood of each of some examples, whose axis is in front."""
        keys = self.row_keys(rows, key)
        if getattr(self.loglikelihood_fn, "takes_rows", False):
            drawn = () if keys is None else (jax.random.wrap_key_data(keys),)
            return jnp.asarray(self.loglikelihood_fn(position, rows, *drawn))
        return jax.vmap(lambda row, own: self._term(position, row, own))(rows, keys)

    def report(self, position: Position) -> dict[str, Any]:
        """Reported quantities of one position: constrained, as a flat mapping of arrays."""
        if self.constrain_fn is not None:
            # a slash would mean a subgroup in the result tree
            return {name.replace("/", "."): value for name, value in self.constrain_fn(position).items()}
        flat, _ = jax.tree_util.tree_flatten_with_path(position)
        return {_path_name(path): leaf for path, leaf in flat}

    @cached_property
    def paths(self) -> dict[str, list[Any] | None]:
        """Where each reported array stands in a position: keys and places, or None where they do not say it.

        Empty where ``constrain_fn`` reports other quantities.
        """
        if self.constrain_fn is not None:
            return {}
        flat, _ = jax.tree_util.tree_flatten_with_path(self.initial_position)
        steps = {
            _path_name(path): [getattr(s, "key", getattr(s, "idx", None)) for s in path] for path, _ in flat
        }
        return {n: own if all(isinstance(s, str | int) for s in own) else None for n, own in steps.items()}

    @cached_property
    def parameter_names(self) -> list[str]:
        """A readable name for every entry of the flat position."""
        flat, _ = jax.tree_util.tree_flatten_with_path(self.initial_position)
        names = []
        for path, leaf in flat:
            base, shape = _path_name(path), np.shape(leaf)
            dims = self.dims.get(base, ())
            dims = dims if len(dims) == len(shape) else [None] * len(shape)
            labels = [self.coords.get(dim, range(size)) for dim, size in zip(dims, shape)]  # type: ignore[arg-type]
            for parts in itertools.product(*labels):
                names.append(f"{base}[{', '.join(map(str, parts))}]" if parts else base)
        return names


def check_model(model: Model, data: FederatedData) -> None:
    """Refuse a model that cannot be evaluated on rows of this data."""
    if model.check_fn is not None and data.present:
        model.check_fn(data)
    example = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], jax.dtypes.canonicalize_dtype(a.dtype)), data.rows
    )
    theta = jax.ShapeDtypeStruct((model.dim,), float_dtype())
    try:
        likelihood = jax.eval_shape(model.flat_loglikelihood, theta, example)
        prior = jax.eval_shape(model.flat_logprior, theta)
    except Exception as error:
        raise DataError(
            f"the model cannot be evaluated on a row of this data: {error}",
            hint="loglikelihood_fn(position, example) gets ONE example: the rows without their leading axis; "
            "one that takes a key is marked by fald.models.takes_key",
        ) from error
    for name, value in (("loglikelihood_fn", likelihood), ("logprior_fn", prior)):
        if value.shape != ():
            raise DataError(
                f"{name} must return one number; it returns an array of shape {value.shape}",
                hint="sum over the parts of one example",
            )


def check_terms(model: Model, data: FederatedData) -> None:
    """Refuse a model whose log likelihood of some row, or its gradient, is no moderate number at the start.

    Raises
    ------
    DataError
        If a term or the gradient of a part is not finite, or beyond 10¹².
    """

    @jax.jit
    def look(theta, rows):
        def energy(theta):
            terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
            return jnp.sum(terms), terms

        gradient, terms = jax.grad(energy, has_aux=True)(theta)
        return jnp.all(jnp.abs(terms) < LARGEST_TERM), jnp.all(jnp.abs(gradient) < LARGEST_TERM)

    size = min(data.num_rows, 512)
    for first in range(0, data.num_rows, size):
        # the last rows again where a part would be short, so that one program is compiled
        begin = min(first, data.num_rows - size)
        rows = jax.tree.map(lambda a, b=begin: jnp.asarray(a[b : b + size]), data.rows)
        if not all(map(bool, look(model.flat_initial_position, rows))):
            raise DataError(
                "the log likelihood of a row or its gradient is not finite, or beyond 1e12, at the start",
                hint="initial_position must be a place where every row has a density",
            )


def _path_name(path: Sequence[Any]) -> str:
    """``a.b`` for a leaf with a name; ``position`` and ``position.0`` for arrays and sequences."""
    names = [jax.tree_util.keystr((key,), simple=True).replace("/", ".") for key in path]
    return ".".join(names if names and not names[0].isdigit() else ["position", *names])
