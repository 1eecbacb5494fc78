"""Engines run methods; a method does not know which one runs it."""

from fald.engines.base import Engine, Failure, Problem, Records, RunState
from fald.engines.inprocess import InProcess

__all__ = ["Engine", "Failure", "InProcess", "Problem", "Records", "RunState"]
