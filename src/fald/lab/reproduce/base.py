"""What an experiment is: settings, a function that measures, a function that draws, verdicts."""

from __future__ import annotations

import math
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fald.core.errors import ConfigError
from fald.runtime.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table: TypeAlias = Any  # a pandas.DataFrame, whose own types say less than nothing about its columns
Size = Literal["full", "quick"]
SIZES: tuple[Size, ...] = ("full", "quick")
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be told"


@dataclass(frozen=True)
class Verdict:
    """One claim, what was measured, and whether the claim holds."""

    claim: str
    measured: str
    verdict: str

    @classmethod
    def of(cls, claim: str, measured: str, holds: bool | None) -> Verdict:
        """Put a truth value into words; None: it cannot be told."""
        return cls(claim, measured, UNKNOWN if holds is None else HOLDS if holds else FAILS)


@dataclass(frozen=True)
class Findings:
    """What a panel measured: every plotted point, the verdicts, and further facts for the record."""

    table: Table
    verdicts: list[Verdict]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class PanelRun:
    """What the function of a panel works with.

    ``settings`` are those of the chosen size. ``cache`` is a folder for parts of the work that are worth
    keeping; ``begin`` opens a progress display for ``total`` local steps.
    """

    name: str
    settings: Mapping[str, Any]
    seed: int
    cache: Path
    progress: bool = True

    @contextmanager
    def begin(self, total: int, label: str) -> Iterator[Meter]:
        """A display of the progress of this panel."""
        with Progress(max(1, int(total)), 0, self.progress, unit="local step", task=self.name) as display:
            yield Meter(display, label)


class Meter:
    """Counts local steps for a progress display; threads may share it."""

    def __init__(self, display: Progress, label: str):
        self.display, self.label, self.done, self._lock = display, label, 0, threading.Lock()

    def add(self, steps: int, value: float) -> None:
        """Count steps that are done, or that turned out not to be needed."""
        if steps <= 0:
            return
        with self._lock:
            self.done += int(steps)
            self.display.update(self.done, f"{self.label} {value:,.4g}")


@dataclass(frozen=True)
class Panel:
    """One experiment of the collection."""

    name: str
    measure: Callable[[PanelRun], Findings]
    draw: Callable[[Table, Mapping[str, Any]], Figure]


def read_settings(name: str, size: Size, image_rounds: int | None = None) -> dict[str, Any]:
    """Settings of a panel: the file's own keys, changed by its table ``quick`` for that size.

    A file may start from another one by ``extends``. ``image_rounds`` replaces the rounds of an image
    panel; a quarter of them, but no more than before, are then warm-up.

    Examples
    --------
    >>> read_settings("fig1b", "full")["num-runs"], read_settings("fig1b", "quick")["num-runs"]
    (300, 100)
    >>> read_settings("fig4", "full", image_rounds=500)["num-warmup"]
    120
    """
    settings = _read(name)
    changes = settings.pop("quick", {})
    if size == "quick":
        settings |= changes
    if image_rounds is not None and "rounds-per-sample" in settings:
        every = settings["rounds-per-sample"]
        if image_rounds < 4 * every:
            raise ConfigError(f"rounds must be at least {4 * every}; got {image_rounds}")
        settings["num-rounds"] = image_rounds // every * every
        settings["num-warmup"] = min(settings["num-warmup"], image_rounds // 4 // every * every)
    return settings


def cuts(name: str, used: Mapping[str, Any]) -> list[str]:
    """What settings take away from the full experiment, in words.

    Examples
    --------
    >>> cuts("fig1b", read_settings("fig1b", "full"))
    []
    >>> cuts("fig1b", read_settings("fig1b", "quick"))[0]
    'num-runs 300 → 100'
    """
    full = read_settings(name, "full")
    return [f"{key} {_short(full[key])} → {_short(used[key])}" for key in full if used[key] != full[key]]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_short(v) for v in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _read(name: str) -> dict[str, Any]:
    path = resources.files("fald.lab.reproduce") / "settings" / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"no experiment {name!r}")
    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    parent = settings.pop("extends", None)
    if parent is None:
        return settings
    base = _read(parent)
    return {**base, **settings, "quick": {**base.get("quick", {}), **settings.get("quick", {})}}


def frame(content: Any) -> Table:
    """A table of columns, or of records."""
    import pandas as pd

    return pd.DataFrame(content)


def joined(parts: Sequence[Table]) -> Table:
    """Tables below each other."""
    import pandas as pd

    return pd.concat(parts, ignore_index=True)


def paired(differences: Any) -> tuple[float, float]:
    """Mean of paired differences (pandas) and half the width of its 95% interval; infinite for one seed."""
    from scipy.stats import t

    count = len(differences)
    if count < 2:
        return float(differences.mean()), float("inf")
    return float(differences.mean()), float(t.ppf(0.975, count - 1) * differences.std() / math.sqrt(count))
