"""The version of the package, and of what else shapes its numbers."""

from __future__ import annotations

from collections.abc import Mapping

from fald.core.errors import printable

__version__ = "0.1.0"
_SHAPE_NUMBERS = ("jax", "jaxlib", "numpy", "scipy")


def library_versions() -> dict[str, str]:
    """Versions of fald and of the libraries whose numbers it passes on, as installed here."""
    import importlib.metadata  # not needed to say the version of fald

    return {"fald": __version__, **{name: importlib.metadata.version(name) for name in _SHAPE_NUMBERS}}


def differences(there: object, here: Mapping[str, str]) -> list[str]:
    """What another party has in another version, in words.

    Examples
    --------
    >>> differences({"fald": "0.0.9", "numpy": "2.3.1"}, {"fald": "0.1.0", "numpy": "2.3.1"})
    ['fald 0.0.9, older than 0.1.0 here']
    """
    known = there if isinstance(there, Mapping) else {}
    other = {name: printable(known.get(name, "unknown"))[:40] for name in here}
    return [
        f"{name} {other[name]}, {_order(other[name], mine)} {mine} here"
        for name, mine in here.items()
        if other[name] != mine
    ]


def _order(there: str, here: str) -> str:
    numbers = [[int(part) for part in text.split(".") if part.isdecimal()] for text in (there, here)]
    return "not" if not numbers[0] else "older than" if numbers[0] < numbers[1] else "newer than"
