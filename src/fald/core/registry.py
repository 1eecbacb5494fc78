"""Things by name: those of the package, and those that installed packages add by entry points."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fald.core.errors import ConfigError


class Registry(Mapping[str, Any]):
    """Objects by name, each imported when it is first asked for.

    Only what is installed can be found: a name is looked up, never imported as a path.

    Parameters
    ----------
    kind
        What the things are, for messages.
    group
        Entry-point group through which an installed package adds its own.
    own
        The package's own, as ``"module:object"``. They cannot be replaced from outside.
    qualified
        Whether what an installed package adds is called ``"package:name"``, so that nobody can take it for
        the package's own.

    Examples
    --------
    >>> roots = Registry("root", "an.example", {"square": "math:sqrt"})
    >>> roots["square"](9.0)
    3.0
    >>> roots["squre"]
    Traceback (most recent call last):
    fald.core.errors.ConfigError: no root named 'squre'
      hint: did you mean 'square'?
    """

    def __init__(self, kind: str, group: str, own: Mapping[str, str], *, qualified: bool = False):
        self.kind, self.group, self._own, self._qualified = kind, group, dict(own), qualified

    @functools.cached_property
    def _found(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.group):
            name = point.name
            if self._qualified:
                if point.dist is None:
                    continue
                name = f"{re.sub('[-_.]+', '-', point.dist.name).lower()}:{name}"
            known = found.setdefault(name, [])
            if name not in self._own and point.value not in [k.value for k in known]:
                known.append(point)
        return {name: points for name, points in found.items() if points}

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            module, _, attribute = self._own[name].partition(":")
            return getattr(import_module(module), attribute)
        points = self._found.get(name, [])
        if not points:
            near = difflib.get_close_matches(name, list(self), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self)}"
            if self._qualified and ":" in name and not near:
                hint = f"the package that has it is not installed here; {hint}"
            raise ConfigError(f"no {self.kind} named {name!r}", hint=hint)
        if len(points) > 1:
            raise ConfigError(
                f"two installed packages have a {self.kind} named {name!r}: "
                + " and ".join(sorted(p.value for p in points)),
                hint="uninstall one of them",
            )
        try:
            return points[0].load()
        except (Exception, SystemExit) as error:  # whatever somebody else's module raises
            raise ConfigError(
                f"the {self.kind} {name!r} cannot be loaded: {type(error).__name__}: {error}",
                hint="is everything installed that its package needs?",
            ) from error

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the package's own."""
        return tuple(self._own)

    def refresh(self) -> None:
        """Look again at what is installed, which may have changed since a process began that waits long."""
        self.__dict__.pop("_found", None)

    def origin(self, name: str) -> tuple[str, str] | None:
        """Distribution and version that a name comes from; None: the package itself, or nothing."""
        if name in self._own or name not in self._found:
            return None
        dist = self._found[name][0].dist
        return None if dist is None else (dist.name, dist.version)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter([*self._own, *sorted(set(self._found) - set(self._own))])

    def __len__(self) -> int:
        return len(list(iter(self)))
