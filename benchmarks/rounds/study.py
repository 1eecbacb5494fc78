"""What a benchmark study is, and the list of all of them.

A study is a function that returns ``(model, data)``, entered in the list by a decorator; its docstring is
the note that tables show. Nothing is read or built before ``load`` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import fald

Build = Callable[[], tuple[fald.Model, fald.FederatedData]]

KINDS = ("real", "awkward", "adversarial", "undetectable")
_EXPECTED = {"adversarial": "not-reached", "undetectable": "anything"}


@dataclass(frozen=True, eq=False)
class Study:
    """A model with the rows of its sites, and the verdict a sound sampler must give.

    Parameters
    ----------
    name
        Short name, as in tables and file names.
    model, data
        The posterior: the prior of the model once, times the likelihood of every site's rows.
    kind
        ``"real"``: measured data, grouped as they were collected or split by outcome.
        ``"awkward"``: made or bent so that one thing is difficult, yet the posterior has one mode and
        finite moments. ``"adversarial"``: several modes, a funnel, or no finite moments.
        ``"undetectable"``: what a few evaluations cannot tell from an ordinary posterior.
    expects
        ``"reached"``: mean and sd can be found. ``"not-reached"``: a sampler that claims to have found
        them claims too much. ``"anything"``: no verdict is held against it.
    source
        Package and table the rows come from; empty for made data.
    note
        One line: outcome, model, sites.
    holdout
        Kept out of development: no threshold may be chosen by looking at it.
    """

    name: str
    model: fald.Model
    data: fald.FederatedData
    kind: str
    expects: str
    source: str
    note: str
    holdout: bool

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.model.dim

    @property
    def sites(self) -> int:
        """Number of sites."""
        return self.data.num_clients


@dataclass(frozen=True)
class Entry:
    """A study that has not been built yet."""

    build: Build
    kind: str
    source: str
    holdout: bool

    def load(self, name: str) -> Study:
        """Read the rows, build the model, and check that they fit each other."""
        model, data = self.build()
        if model.check_fn is not None:
            model.check_fn(data)
        return Study(
            name=name,
            model=model,
            data=data,
            kind=self.kind,
            expects=_EXPECTED.get(self.kind, "reached"),
            source=self.source,
            note=" ".join((self.build.__doc__ or "").split()),
            holdout=self.holdout,
        )


ENTRIES: dict[str, Entry] = {}


def study(kind: str, source: str = "", *, holdout: bool = False) -> Callable[[Build], Build]:
    """Enter a function that returns ``(model, data)``; ``bone_marrow`` becomes the study ``bone-marrow``."""

    def enter(build: Build) -> Build:
        ENTRIES[build.__name__.replace("_", "-")] = Entry(build, kind, source, holdout)
        return build

    return enter
