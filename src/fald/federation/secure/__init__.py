"""Sums of which nobody sees a single term."""

from fald.federation.secure.fixed_point import fixed_point_sum
from fald.federation.secure.identity import Identity
from fald.federation.secure.session import Session, unmask_sum

__all__ = ["Identity", "Session", "fixed_point_sum", "unmask_sum"]
