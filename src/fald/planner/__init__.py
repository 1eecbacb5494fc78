"""Planning a run: the errors a setting will have, and the setting that needs the fewest rounds."""

from fald.planner.checks import checks, foresee
from fald.planner.front import FrontPoint, pareto, privacy_loss
from fald.planner.law import Chain, Goal, Problem, Setting, chain
from fald.planner.predict import (
    Guarantee,
    Prediction,
    Trajectory,
    guarantee,
    predict,
    rounds_to,
    trajectory,
    what_if,
)
from fald.planner.search import LOCAL_STEPS, Candidate, Plan, best_accuracy, fewest_rounds, local_models, plan

__all__ = [
    "LOCAL_STEPS",
    "Candidate",
    "Chain",
    "FrontPoint",
    "Goal",
    "Guarantee",
    "Plan",
    "Prediction",
    "Problem",
    "Setting",
    "Trajectory",
    "best_accuracy",
    "chain",
    "checks",
    "fewest_rounds",
    "foresee",
    "guarantee",
    "local_models",
    "pareto",
    "plan",
    "predict",
    "privacy_loss",
    "rounds_to",
    "trajectory",
    "what_if",
]
