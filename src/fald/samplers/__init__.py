"""Methods by name; each is data plus pure functions that any engine can run."""

from fald.samplers.base import Method, Upload
from fald.samplers.fald import FALD, fald, fedavg, sgld

__all__ = ["FALD", "Method", "Upload", "fald", "fedavg", "sgld"]
