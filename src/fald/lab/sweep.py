"""A grid of settings on one problem: errors against rounds as a tidy table, and the figure of it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.core.errors import ConfigError, NonFiniteError
from fald.lab.reproduce import plots
from fald.langevin.sampling import sample
from fald.planner import Problem, Setting, trajectory
from fald.problem.data import FederatedData
from fald.problem.model import Model
from fald.results.diagnostics import distance
from fald.settings.participation import Participation

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_MEASURED = {
    "w2": "W2 to the posterior",
    "mean_error": "error of means, in posterior sd",
    "sd_error": "relative error of sds",
}
_SYMBOLS = {"local_steps": "K", "step_size": "η", "correlation": "ρ", "temperature": "τ", "batch_size": "b"}


def run(
    rng_key: Any,
    model: Model,
    data: FederatedData,
    grid: Mapping[str, Sequence[Any]],
    *,
    reference: Any,
    problem: Problem | None = None,
    window: int | None = 1,
    points: int = 12,
    **settings: Any,
) -> pd.DataFrame:
    """Run FA-LD with every combination of some settings, and measure each against a reference.

    Numbers of local steps, step sizes, temperatures and correlations share one compiled program.

    Parameters
    ----------
    rng_key, model, data
        As in ``fald.sample``. Every run has the same key, so that differences are due to the settings.
    grid
        Settings of ``fald.sample`` by name, each with the values to try.
    reference, window, points
        As in ``fald.diagnostics.distance``. With the default window, lines tell the law of the position after
        a round, over the chains: take some hundred chains, as the paper does.
    problem
        Local models of the federation, such as ``fald.planner.plan(model, data).problem``: adds what their
        exact law predicts for a window of 1.
    **settings
        Settings that stay as they are; ``num_rounds`` is needed.

    Returns
    -------
    pandas.DataFrame
        The varied settings, then the columns of ``fald.diagnostics.distance``; with ``problem`` also
        ``w2_law``, ``mean_error_law`` and ``sd_error_law``, NaN for settings that have no such law. A run
        that left the finite numbers has one line with infinite errors.

    Raises
    ------
    ConfigError
        If ``fald.sample`` has no such setting, or a value is out of its range.

    Examples
    --------
    >>> import fald
    >>> data = fald.FederatedData.from_arrays({"a": np.ones((30, 1)), "b": np.zeros((10, 1))})
    >>> exact = fald.gaussian.Law(np.array([0.75]), np.array([[1 / 40]]))
    >>> table = run(0, fald.models.gaussian_location([[1.0]]), data, {"local_steps": [1, 8]}, reference=exact,
    ...             num_rounds=60, step_size=2e-3, num_chains=200, points=2)
    >>> table[["local_steps", "round", "w2"]].round(1)
       local_steps  round   w2
    0            1      1  0.7
    1            1     60  0.0
    2            8      1  0.4
    3            8     60  0.0
    """
    import pandas as pd

    known = set(inspect.signature(sample).parameters) - {"rng_key", "model", "data", "progress"}
    unknown = sorted({*grid, *settings} - known)
    if unknown or set(grid) & set(settings):
        twice = sorted(set(grid) & set(settings))
        said = f"fald.sample has no {', '.join(unknown)}" if unknown else f"given twice: {', '.join(twice)}"
        raise ConfigError(f"a sweep is over settings of fald.sample; {said}")
    parts = []
    for values in itertools.product(*grid.values()):
        varied = dict(zip(grid, values))
        try:
            tree = sample(rng_key, model, data, **settings, **varied, progress=False)
            part = distance(tree, reference, window=window, points=points)
        except NonFiniteError:
            last = {**settings, **varied}["num_rounds"]
            part = pd.DataFrame([{"round": last, "draws": 0, **dict.fromkeys(_MEASURED, np.inf)}])
        if problem is not None:
            part = part.assign(**_law(problem, {**settings, **varied}, part["round"]))
        cells = {name: _cell(value) for name, value in varied.items()}
        parts.append(pd.DataFrame({**{k: [v] * len(part) for k, v in cells.items()}, **part}))
    return pd.concat(parts, ignore_index=True)


def _law(problem: Problem, settings: Mapping[str, Any], rounds: Any) -> dict[str, Any]:
    """Errors after some rounds by the law of the local models; NaN where there is none."""
    own = {f.name: settings[f.name] for f in fields(Setting) if f.name in settings}
    try:
        found = trajectory(problem, Setting(**own), rounds)
    except ConfigError:  # a schedule, or a chain that does not settle
        return {f"{name}_law": np.nan for name in _MEASURED}
    return {"w2_law": found.w2, "mean_error_law": found.bias, "sd_error_law": found.sd_error}


def _cell(value: Any) -> Any:
    """A value of a setting as it stands in a table."""
    if isinstance(value, Participation):
        return value.scheme if value.scheme == "full" else f"{value.scheme} S={value.num_participants}"
    return value if isinstance(value, int | float | str | None) else str(value)


def plot(table: pd.DataFrame, y: str = "w2", *, axes: Axes | None = None) -> Axes:
    """Draw an error against rounds on logarithmic axes, a colour for each setting.

    Marks are measured; where the table has a law, lines are that law. Needs Matplotlib.

    Parameters
    ----------
    table
        What ``run`` gave, or parts of it.
    y
        ``"w2"``, ``"mean_error"`` or ``"sd_error"``.
    axes
        Axes of a figure of yours to draw into; None: a figure of its own.

    Returns
    -------
    matplotlib.axes.Axes
        The axes; ``axes.figure.savefig`` writes the figure.

    Raises
    ------
    ConfigError
        If there is no such column, or Matplotlib is not installed.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"local_steps": [1, 1, 8, 8], "round": [1, 9, 1, 9], "w2": [0.9, 0.4, 0.5, 0.1]})
    >>> [line.get_label() for line in plot(table).lines]
    ['K = 1', 'K = 8']
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("a figure needs Matplotlib", hint="pip install 'fald[lab]'")
    if y not in _MEASURED or y not in table:
        raise ConfigError(f"y must be one of {', '.join(_MEASURED)}, and in the table; got {y!r}")
    said = {"round", "draws", *_MEASURED, *[f"{name}_law" for name in _MEASURED]}
    varied = [str(name) for name in table.columns if name not in said]
    groups: Any = table.groupby(varied, sort=False, dropna=False) if varied else [((), table)]
    with plots.style():
        axes = plots.grid(1, 1, width=4.6, height=3.2)[1][0, 0] if axes is None else axes
        assert axes is not None
        for i, (values, part) in enumerate(groups):
            look, law = plots.look(i), part.get(f"{y}_law")
            words = [f"{_SYMBOLS.get(name, name)} = {v}" for name, v in zip(varied, np.atleast_1d(values))]
            good = part[np.isfinite(part[y])]
            dash = look.dash if law is None else "none"
            axes.plot(
                good["round"], good[y], look.marker, color=look.color, linestyle=dash, label=", ".join(words)
            )
            if law is not None:
                axes.plot(part["round"], law, color=look.color, linestyle=look.dash)
        plots.logarithmic(axes, "xy")
        axes.set_xlabel("rounds")
        axes.set_ylabel(_MEASURED[y])
        axes.legend()
    return axes
