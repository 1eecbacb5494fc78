"""Models: a log prior, a log likelihood of one example, and a place to start."""

from fald.problem.families.linear import linear_regression
from fald.problem.families.location import gaussian_location
from fald.problem.families.logistic import logistic_regression
from fald.problem.families.mlp import mlp_classifier
from fald.problem.families.poisson import poisson_regression
from fald.problem.families.softmax import softmax_regression
from fald.problem.from_numpyro import from_numpyro
from fald.problem.model import (
    Bounds,
    Model,
    Predictor,
    bounded,
    concave,
    predicted,
    reads,
    takes_key,
    takes_rows,
)

__all__ = [
    "Bounds",
    "Model",
    "Predictor",
    "bounded",
    "concave",
    "from_numpyro",
    "gaussian_location",
    "linear_regression",
    "logistic_regression",
    "mlp_classifier",
    "poisson_regression",
    "predicted",
    "reads",
    "softmax_regression",
    "takes_key",
    "takes_rows",
]
