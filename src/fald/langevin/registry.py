"""Methods by name, for settings that come as text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fald.core.errors import ConfigError
from fald.core.registry import Registry
from fald.core.reveals import UNDECLARED, Reveals
from fald.langevin.method import About, Method
from fald.settings.participation import Participation, full

METHODS = Registry(
    "method",
    "fald.methods",
    {
        "fa-ld": "fald.langevin.fald:fald",
        "sgld": "fald.langevin.fald:sgld",
        "fedavg": "fald.langevin.fald:fedavg",
    },
)


def takes(name: str) -> set[str]:
    """Settings that the method of this name has."""
    return set(inspect.signature(METHODS[name]).parameters) - {"option", "name"}


def by_name(name: str, **settings: Any) -> Method:
    """Make a method from its name, one of ``METHODS``, and the settings of its function.

    Raises
    ------
    ConfigError
        If there is no such method or setting, or one is missing.

    Examples
    --------
    >>> by_name("sgld", step_size=1e-3).name
    'sgld'
    """
    known = takes(name)  # raises where there is no such method
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(
            f"{name} has no setting {unknown[0].replace('_', '-')!r}",
            hint=f"it has: {', '.join(sorted(known)).replace('_', '-')}",
        )
    parameters = inspect.signature(METHODS[name]).parameters
    missing = [k for k in sorted(known - set(settings)) if parameters[k].default is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"{name} needs {', '.join(missing).replace('_', '-')}")
    return METHODS[name](**settings)


@functools.cache
def declared(name: str) -> About | None:
    """What the method of a name declares where only what it needs is set; None if it cannot be made so."""
    needed = inspect.signature(METHODS[name]).parameters.values()
    given = {p.name: 1 for p in needed if p.default is inspect.Parameter.empty and p.name in takes(name)}
    try:
        return METHODS[name](**given).about
    except (ConfigError, TypeError, ValueError):
        return None


def reveals_of(name: str) -> Reveals:
    """What leaves a client under the method of a name; undeclared where that cannot be found out."""
    about = declared(name)
    return UNDECLARED if about is None else about.reveals


def declaring(wanted: Callable[[About], bool]) -> list[str]:
    """Names of the methods whose declaration has a property."""
    found = {name: declared(name) for name in METHODS}
    return [name for name, about in found.items() if about is not None and wanted(about)]


def with_law() -> list[str]:
    """Names of FA-LD and of its special cases that sample: what accounting and the exact law cover."""
    return declaring(lambda about: about.reveals.accounted and not about.point_estimate)


def participants(method: Method, asked: Participation | None) -> Participation:
    """Who takes part: what was asked for, or the method's default; ``ConfigError`` if it allows neither."""
    allowed, name = method.about.participation, method.about.name
    if isinstance(allowed, Participation):
        if asked not in (None, allowed):
            count = allowed.num_participants
            raise ConfigError(
                f"{name} needs {'one client' if count == 1 else f'{count} clients'} a round, drawn "
                f"{allowed.scheme}; got {asked}",
                hint="leave participation out",
            )
        return allowed
    if allowed == "full" and asked is not None and asked.scheme != "full":
        others = ", ".join(declaring(lambda about: about.participation == "any"))
        raise ConfigError(
            f"{name} needs every client in every round; got participation {asked.scheme!r}",
            hint=f"leave participation out; these allow less: {others}",
        )
    return full() if asked is None else asked
