r"""The published bounds, the lemmas behind them, what they certify, and the exact law on Gaussian energies.

L and m are smoothness and strong convexity of every client energy f^c, κ = L/m, d the dimension, τ the
temperature, ρ the correlation of injected noise, η the step size, K the local steps per round, k = rounds·K
the steps taken, N clients of weights p_c, S of them drawn per round, D with ‖θ_0 − θ*‖² ≤ d D², γ = max_c
‖∇f^c(θ*)‖, σ with E‖∇f̃^c − ∇f^c‖² ≤ d σ², and

    H_ρ = D² + max_c T_cρ/m + γ²/(m² d) + σ²/m²,    T_cρ = τ(ρ² + (1−ρ²)/p_c).

Every function takes the problem as ``constants`` and the rest by name: ``step_size`` η > 0, ``local_steps``
K ≥ 1, ``num_rounds`` ≥ 0, ``correlation`` ρ ∈ [0, 1], ``participation`` (``full()``,
``with_replacement(S)``, or ``without_replacement(S)``, which needs equal weights), and ``epsilon`` > 0, an
accuracy in W2. Numbers may be arrays, which broadcast, except for the correlation; the result is then an
array too. Where a precondition fails, ``ConfigError`` says which one and by how much.

All are upper bounds, for strongly convex and smooth energies and ``noise="paper"``. They guarantee
convergence, they do not predict an error; ``fald.gaussian`` does. How loose they are depends on where one
looks: the page on theory bounds has figures.

"On Convergence of Federated Averaging Langevin Dynamics" (Deng, Zhang, Ma, Song, Lin); numbers of theorems
and lemmas are those of its published version.
"""

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
