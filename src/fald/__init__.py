"""fald: a Bayesian posterior over data that cannot be pooled.

Each client keeps its rows; only parameters travel. ``fald.sample`` draws from the joint posterior
by federated averaging Langevin dynamics, ``fald.summary`` says what it found.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fald import privacy, theory
from fald.core import errors
from fald.core.errors import FaldError
from fald.core.version import __version__
from fald.langevin import compressors
from fald.langevin.inprocess import InProcess
from fald.langevin.sampling import sample
from fald.problem import models, partition
from fald.problem.data import FederatedData
from fald.problem.models import Model
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

if TYPE_CHECKING:
    from fald import planner
    from fald.lab import compare, sweep
    from fald.lab import methods as samplers
    from fald.report import write_report

_WHEN_ASKED = {
    "compare": "fald.lab.compare",
    "planner": "fald.planner",
    "samplers": "fald.lab.methods",
    "sweep": "fald.lab.sweep",
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
    """Load what not everybody needs when it is first asked for: it takes a while."""
    if name not in _WHEN_ASKED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _WHEN_ASKED[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found
