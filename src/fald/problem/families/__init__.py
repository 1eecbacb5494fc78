"""Families of models that a study can name, one file each.

A family is a function from the names of the encoded features to a ``Model``; its other parameters are the
family's options. All that is particular to it is in the model that it makes: what the exponential of a
coefficient is called, how outcomes are simulated, bounds on curvature and sensitivity. Installed packages add
their own through the entry-point group ``fald.models``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from fald.core.errors import ConfigError
from fald.core.registry import Registry

FAMILIES = Registry(
    "model family",
    "fald.models",
    {
        "linear": "fald.problem.families.linear:linear_regression",
        "logistic": "fald.problem.families.logistic:logistic_regression",
        "poisson": "fald.problem.families.poisson:poisson_regression",
        "softmax": "fald.problem.families.softmax:softmax_regression",
    },
)


def options_of(family: str) -> dict[str, bool]:
    """Options of a family, and whether each must be given."""
    _, *parameters = inspect.signature(FAMILIES[family]).parameters.values()
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}


def check_options(family: str, given: Iterable[str]) -> None:
    """Raise ``ConfigError`` if a family does not have an option, or needs one that is not given.

    Examples
    --------
    >>> check_options("logistic", ["num_classes"])
    Traceback (most recent call last):
    fald.core.errors.ConfigError: 'num-classes' is no option of the family 'logistic'
      hint: it goes with 'softmax'
    """
    known, given = options_of(family), set(given)
    for name in sorted(given - set(known)):
        others = [repr(other) for other in FAMILIES if name in options_of(other)]
        has = ", ".join(known).replace("_", "-")
        raise ConfigError(
            f"'{name.replace('_', '-')}' is no option of the family {family!r}",
            hint=f"it goes with {' or '.join(others)}" if others else f"there are: {has}",
        )
    for name, needed in known.items():
        if needed and name not in given:
            raise ConfigError(
                f"'{name.replace('_', '-')}' is missing", hint=f"the family {family!r} needs it"
            )
