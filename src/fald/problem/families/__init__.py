"""Families of models that a study can name, one file each.

A family is a function from the names of the encoded features to a ``Model``; its other parameters are the
family's options. All that is particular to it is in the model that it makes: what the exponential of a
coefficient is called, how outcomes are simulated, bounds on curvature and sensitivity. Installed packages add
their own through the entry-point group ``fald.models``; a study calls them ``"package:name"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from fald.core.errors import ConfigError
from fald.core.registry import Registry
from fald.core.version import __version__

FAMILIES = Registry(
    "model family",
    "fald.models",
    {
        "linear": "fald.problem.families.linear:linear_regression",
        "logistic": "fald.problem.families.logistic:logistic_regression",
        "poisson": "fald.problem.families.poisson:poisson_regression",
        "softmax": "fald.problem.families.softmax:softmax_regression",
        "mlp": "fald.problem.families.mlp:mlp_classifier",
    },
    qualified=True,
)


def is_outside(family: str) -> bool:
    """Whether a family is called as one of an installed package, whether there is such a package or not.

    Examples
    --------
    >>> is_outside("logistic"), is_outside("os:system")
    (False, True)
    """
    return ":" in family


def versions(family: str) -> str:
    """Versions that both ends of a federation must share for a family; nothing is imported.

    Examples
    --------
    >>> versions("logistic") == __version__
    True
    >>> versions("os:system") == f"{__version__} without a model os:system"
    True
    """
    if not is_outside(family):
        return __version__
    FAMILIES.refresh()
    origin = FAMILIES.origin(family)
    return f"{__version__} " + (f"without a model {family}" if origin is None else f"with {' '.join(origin)}")


def options_of(family: str) -> dict[str, bool]:
    """Options of a family, and whether each must be given."""
    function = FAMILIES[family]
    if not callable(function):
        raise ConfigError(f"{family!r} is no function that makes a model", hint="mend its entry point")
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is inspect.Parameter.empty for p in parameters if p.kind in named}


def check_options(family: str, given: Iterable[str]) -> None:
    """Raise ``ConfigError`` if a family does not have an option, or needs one that is not given.

    Examples
    --------
    >>> check_options("logistic", ["num_classes"])
    Traceback (most recent call last):
    fald.core.errors.ConfigError: 'num-classes' is no option of the family 'logistic'
      hint: it goes with 'softmax' or 'mlp'
    """
    known, given = options_of(family), set(given)
    for name in sorted(given - set(known)):
        # of packages nothing is imported for the sake of a hint
        others = [repr(other) for other in FAMILIES.own if name in options_of(other)]
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
