"""The published bounds, the lemmas behind them, what they certify, and the exact law on Gaussian energies."""

from fald.theory.bounds import (
    Bound,
    Constants,
    constants,
    decaying_step_bound,
    fixed_step_bound,
    initial_distance_bound,
)
from fald.theory.complexity import (
    Complexity,
    best_local_steps,
    best_step_size,
    complexity,
    decaying_step_complexity,
    drawn_complexity,
)
from fald.theory.lemmas import (
    contraction_bound,
    discretisation_bound,
    divergence_bound,
    drawing_divergence_bound,
    gradient_bound,
    gradient_variance_bound,
    one_step_bound,
    rescaled,
    second_moment_bound,
)

__all__ = [
    "Bound",
    "Complexity",
    "Constants",
    "best_local_steps",
    "best_step_size",
    "complexity",
    "constants",
    "contraction_bound",
    "decaying_step_bound",
    "decaying_step_complexity",
    "discretisation_bound",
    "divergence_bound",
    "drawing_divergence_bound",
    "drawn_complexity",
    "fixed_step_bound",
    "gradient_bound",
    "gradient_variance_bound",
    "initial_distance_bound",
    "one_step_bound",
    "rescaled",
    "second_moment_bound",
]
