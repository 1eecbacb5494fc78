"""The settings of FA-LD: their names, defaults, ranges and messages, once for everybody.

``fald.sample``, study files, the planner, the explorer, privacy accounting and stored results all use
``Setting``; what else a run needs, such as its number of rounds, is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from fald.core.checks import check_count, check_number, check_positive
from fald.core.errors import ConfigError
from fald.settings.participation import Participation, check_participation, full
from fald.settings.schedules import from_record

NoiseScale = Literal["realised", "paper"]
Preconditioner = Literal["rms"]


def _noise(name: str, value: Any) -> NoiseScale:
    if value not in ("realised", "paper"):
        raise ConfigError(f"{name} must be 'realised' or 'paper'; got {value!r}")
    return value


def _momentum(name: str, value: Any) -> float:
    found = check_number(name, value, 0, 1, rule="at least 0 and below 1")
    if found == 1:
        raise ConfigError(f"{name} must be at least 0 and below 1; got {value!r}")
    return found


def _preconditioner(name: str, value: Any) -> Preconditioner:
    if value != "rms":
        raise ConfigError(f"{name} must be 'rms', or left out; got {value!r}")
    return value


# how every setting is checked; each returns the value as it will be used, or raises ``ConfigError``
RULES: dict[str, Callable[[str, Any], Any]] = {
    "local_steps": check_count,
    "step_size": lambda name, value: value if callable(value) else check_positive(name, value),
    "correlation": lambda name, value: check_number(name, value, 0, 1, rule="between 0 and 1"),
    "noise": _noise,
    "temperature": lambda name, value: check_number(name, value, rule="a number ≥ 0"),
    "batch_size": check_count,
    "clip_norm": check_positive,
    "momentum": _momentum,
    "preconditioner": _preconditioner,
    "num_rounds": check_count,
    "num_chains": check_count,
    "num_warmup": lambda name, value: check_count(name, value, 0),
    "thinning": check_count,
    "sensitivity": check_positive,
}
_MAY_BE_NONE = ("batch_size", "clip_norm", "preconditioner", "sensitivity")


def checked(name: str, value: Any) -> Any:
    """A setting as it will be used, or a ``ConfigError`` that names it as study files do."""
    if value is None and name in _MAY_BE_NONE:
        return None
    return RULES[name](name.replace("_", "-"), value)


@dataclass(frozen=True)
class Setting:
    """The settings of FA-LD, named and explained as in ``fald.sample``.

    Raises
    ------
    ConfigError
        If one is out of its range.

    Examples
    --------
    >>> Setting(local_steps=5, step_size=1e-3).correlation
    0.0
    """

    local_steps: int
    step_size: Any
    correlation: float = 0.0
    participation: Participation = full()  # noqa: RUF009 - it is immutable
    noise: NoiseScale = "realised"
    temperature: float = 1.0
    batch_size: int | None = None
    clip_norm: float | None = None
    momentum: float = 0.0
    preconditioner: Preconditioner | None = None

    def __post_init__(self) -> None:
        for name in RULES.keys() & {field.name for field in fields(self)}:  # also those of a subclass
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        object.__setattr__(self, "participation", check_participation(self.participation) or full())

    @classmethod
    def from_record(cls, record: Mapping[str, Any], **others: Any) -> Self:
        """Settings as they are written down in results and journals; ``others`` are further arguments.

        Raises
        ------
        ConfigError
            If the record has a step-size schedule of the user's own, which cannot be written down.
        """
        step = from_record(record["step_size"])
        known = {name: record[name] for name in method_settings() if name in record and name != "step_size"}
        drawn = Participation(record["participation"], record["num_participants"], allow_unequal=True)
        return cls(**{"step_size": step, "participation": drawn, **known, **others})

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``fald.sample``."""
        return {field.name: getattr(self, field.name) for field in fields(Setting)}


def method_settings() -> dict[str, Any]:
    """Defaults of the settings that are a method's own, by name; None where there is none."""
    own = {field.name: field.default for field in fields(Setting) if field.name != "participation"}
    return {**own, "local_steps": None, "step_size": None}
