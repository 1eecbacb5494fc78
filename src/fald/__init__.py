"""fald: a Bayesian posterior over data that cannot be pooled.

Each client keeps its rows; only parameters travel. ``fald.sample`` draws from the joint posterior
by federated averaging Langevin dynamics, ``fald.summary`` says what it found.
"""

from typing import TYPE_CHECKING, Any

from fald import (
    compare,
    compressors,
    datasets,
    diagnostics,
    errors,
    gaussian,
    models,
    partition,
    planner,
    privacy,
    samplers,
    theory,
)
from fald.checkpoint import Checkpoint
from fald.data import FederatedData
from fald.engines import InProcess
from fald.errors import FaldError
from fald.fit import fit
from fald.models import Model
from fald.participation import Participation, full, with_replacement, without_replacement
from fald.predict import predict
from fald.results import load, save
from fald.sampling import sample
from fald.schedules import paper_decay
from fald.summaries import summary
from fald.version import __version__

if TYPE_CHECKING:
    from fald.report import write_report

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
    "predict",
    "privacy",
    "sample",
    "samplers",
    "save",
    "summary",
    "theory",
    "with_replacement",
    "without_replacement",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Load what reads studies and writes pages when it is first asked for: it takes a while."""
    if name == "write_report":
        from fald.report import write_report

        return write_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
