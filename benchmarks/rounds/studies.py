"""Studies by name: ``load("contraception")``, ``names("real")``."""

from __future__ import annotations

import difflib

# importing a list enters its studies
from benchmarks.rounds import adversarial, awkward, fresh, heldout, named  # noqa: F401
from benchmarks.rounds.study import ENTRIES, KINDS, Study
from fald.core.errors import ConfigError

__all__ = ["Study", "load", "names"]


def names(kind: str | None = None, *, holdout: bool | None = None) -> list[str]:
    """Names of the studies of one kind, or of all; ``holdout`` True or False keeps only those."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"no kind of study {kind!r}", hint=f"kinds are {', '.join(KINDS)}")
    return [
        name
        for name, entry in ENTRIES.items()
        if kind in (None, entry.kind) and holdout in (None, entry.holdout)
    ]


def load(name: str) -> Study:
    """Build one study."""
    if name not in ENTRIES:
        near = difflib.get_close_matches(name, ENTRIES, 1)
        raise ConfigError(
            f"no study {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"studies are {', '.join(ENTRIES)}",
        )
    return ENTRIES[name].load(name)
