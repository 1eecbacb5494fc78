"""Engines run methods; a method does not know which one runs it."""

from fald.langevin.engine import Engine, Failure, Problem
from fald.langevin.inprocess import InProcess
from fald.runtime.records import Records, RunState

__all__ = ["Engine", "Failure", "InProcess", "Problem", "Records", "RunState"]
