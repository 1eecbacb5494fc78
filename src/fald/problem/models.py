"""Models: a log prior, a log likelihood of one example, and a place to start."""

from fald.models.base import Model, takes_rows
from fald.models.from_numpyro import from_numpyro
from fald.models.regression import (
    gaussian_location,
    linear_regression,
    logistic_regression,
    mlp_classifier,
    poisson_regression,
    softmax_regression,
)

__all__ = [
    "Model",
    "from_numpyro",
    "gaussian_location",
    "linear_regression",
    "logistic_regression",
    "mlp_classifier",
    "poisson_regression",
    "softmax_regression",
    "takes_rows",
]
