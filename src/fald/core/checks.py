"""Checks of single settings: the value as it will be used, or an error with the name and the rule."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from fald.core.errors import ConfigError


def check_number(name: str, value: Any, low: float = 0, high: float = math.inf, *, rule: str) -> float:
    """Return ``value`` as a float within limits, or raise ``ConfigError`` naming it."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and low <= float(value) <= high):
        raise ConfigError(f"{name} must be {rule}; got {value!r}")
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """Return a finite number above zero, or raise ``ConfigError`` naming it."""
    return check_number(name, value, 5e-324, math.inf, rule="a number > 0")


def check_probability(name: str, value: Any) -> float:
    """Return a probability in (0, 1], or raise ``ConfigError`` naming it."""
    return check_number(name, value, 5e-324, 1, rule="above 0 and at most 1")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return ``value``, such as 3.0, as an int ≥ ``least``, or raise ``ConfigError`` naming it."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool) or number != value or number < least:
        raise ConfigError(f"{name} must be a whole number ≥ {least}; got {value!r}")
    return number
