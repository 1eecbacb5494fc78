"""Methods by name, for settings that come as text."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from fald.errors import ConfigError
from fald.samplers.base import Method
from fald.samplers.consensus import consensus, consensus_parametric
from fald.samplers.de_sgld import de_sgld
from fald.samplers.dsgld import dsgld
from fald.samplers.elf import elf
from fald.samplers.fald import fald, fedavg, sgld
from fald.samplers.fedpa import fedpa
from fald.samplers.fsgld import fsgld
from fald.samplers.laplace import laplace
from fald.samplers.marina import marina
from fald.samplers.qlsd import qlsd
from fald.samplers.qlsd_plus import qlsd_plus
from fald.samplers.scaffold import scaffold
from fald.samplers.vr_fald import vr_fald

METHODS: dict[str, Callable[..., Any]] = {
    "fa-ld": fald,
    "sgld": sgld,
    "fedavg": fedavg,
    "scaffold-1": functools.partial(scaffold, option=1),
    "scaffold-2": functools.partial(scaffold, option=2),
    "vr-fald": vr_fald,
    "qlsd": qlsd,
    "qlsd++": qlsd_plus,
    "marina": marina,
    "elf": elf,
    "dsgld": dsgld,
    "fsgld": fsgld,
    "fedpa": fedpa,
    "consensus": consensus,
    "consensus-parametric": consensus_parametric,
    "de-sgld": de_sgld,
    "laplace": laplace,
}


def takes(name: str) -> set[str]:
    """Settings that the method of this name has.

    Examples
    --------
    >>> sorted(takes("laplace"))
    ['newton_rounds', 'temperature']
    """
    return set(inspect.signature(METHODS[name]).parameters) - {"option", "name"}


def by_name(name: str, **settings: Any) -> Method:
    """Make a method from its name and settings.

    Parameters
    ----------
    name
        One of ``METHODS``.
    settings
        Those of its function.

    Raises
    ------
    ConfigError
        If there is no such method or setting, or one is missing.

    Examples
    --------
    >>> by_name("qlsd", step_size=1e-3).name
    'qlsd'
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        raise ConfigError(
            f"no method named {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(METHODS)}",
        )
    known = takes(name)
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
