"""fald: a Bayesian posterior over data that cannot be pooled.

Each client keeps its rows; only parameters travel. ``fald.sample`` draws from the joint posterior
by federated averaging Langevin dynamics, ``fald.summary`` says what it found.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fald.core.version import __version__

if TYPE_CHECKING:
    from fald import planner, privacy, theory
    from fald.core import errors
    from fald.core.errors import FaldError
    from fald.lab import compare, sweep
    from fald.lab import methods as samplers
    from fald.langevin import compressors
    from fald.langevin.inprocess import InProcess
    from fald.langevin.sampling import sample
    from fald.problem import models, partition
    from fald.problem.data import FederatedData
    from fald.problem.models import Model
    from fald.report import write_report
    from fald.results import diagnostics, sinks
    from fald.results.positions import positions
    from fald.results.predict import predict
    from fald.results.probabilities import predictive
    from fald.results.summary import summary
    from fald.results.tree import load, save
    from fald.runtime.checkpoint import Checkpoint
    from fald.settings import schedules
    from fald.settings.participation import Participation, full, with_replacement, without_replacement
    from fald.settings.schedules import paper_decay
    from fald.study import datasets
    from fald.study.fit import fit
    from fald.theory import gaussian

_WHERE = {
    "Checkpoint": "fald.runtime.checkpoint:Checkpoint",
    "FaldError": "fald.core.errors:FaldError",
    "FederatedData": "fald.problem.data:FederatedData",
    "InProcess": "fald.langevin.inprocess:InProcess",
    "Model": "fald.problem.models:Model",
    "Participation": "fald.settings.participation:Participation",
    "compare": "fald.lab.compare",
    "compressors": "fald.langevin.compressors",
    "datasets": "fald.study.datasets",
    "diagnostics": "fald.results.diagnostics",
    "errors": "fald.core.errors",
    "fit": "fald.study.fit:fit",
    "full": "fald.settings.participation:full",
    "gaussian": "fald.theory.gaussian",
    "load": "fald.results.tree:load",
    "models": "fald.problem.models",
    "paper_decay": "fald.settings.schedules:paper_decay",
    "partition": "fald.problem.partition",
    "planner": "fald.planner",
    "positions": "fald.results.positions:positions",
    "predict": "fald.results.predict:predict",
    "predictive": "fald.results.probabilities:predictive",
    "privacy": "fald.privacy",
    "sample": "fald.langevin.sampling:sample",
    "samplers": "fald.lab.methods",
    "save": "fald.results.tree:save",
    "schedules": "fald.settings.schedules",
    "sinks": "fald.results.sinks",
    "summary": "fald.results.summary:summary",
    "sweep": "fald.lab.sweep",
    "theory": "fald.theory",
    "with_replacement": "fald.settings.participation:with_replacement",
    "without_replacement": "fald.settings.participation:without_replacement",
    "write_report": "fald.report:write_report",
}

__all__ = [
    "Checkpoint",
    "FaldError",
    "FederatedData",
    "InProcess",
    "Model",
    "Participation",
    "__version__",
    "compare",
    "compressors",
    "datasets",
    "diagnostics",
    "errors",
    "fit",
    "full",
    "gaussian",
    "load",
    "models",
    "paper_decay",
    "partition",
    "planner",
    "positions",
    "predict",
    "predictive",
    "privacy",
    "sample",
    "samplers",
    "save",
    "schedules",
    "sinks",
    "summary",
    "sweep",
    "theory",
    "with_replacement",
    "without_replacement",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is first asked for: all of it takes a while."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _WHERE[name].partition(":")
    found = import_module(module)
    globals()[name] = getattr(found, attribute) if attribute else found
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
