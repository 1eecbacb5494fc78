"""Differential privacy of a run: events, accountants, calibration, and the statement to publish.

``RunSettings`` and ``step_noise`` say what a run reveals; ``account`` and ``Ledger`` turn that into ε;
``paper_bound`` is the published bound, corrected, and ``paper_forms`` its closed forms; ``calibrate`` goes
from a budget to settings; ``statement`` puts the result into words.
"""

from fald.privacy.accountant import Ledger, PrivacyReport, account
from fald.privacy.calibration import Affordable, Budget, Calibration, calibrate, pareto_front
from fald.privacy.events import Presence, StepNoise, step_noise
from fald.privacy.paper import PaperBound, PaperForms, paper_bound, paper_forms
from fald.privacy.pld import step_profile
from fald.privacy.protection import Protection
from fald.privacy.settings import RunSettings
from fald.privacy.statements import Statement, require_private, statement

__all__ = [
    "Affordable",
    "Budget",
    "Calibration",
    "Ledger",
    "PaperBound",
    "PaperForms",
    "Presence",
    "PrivacyReport",
    "Protection",
    "RunSettings",
    "Statement",
    "StepNoise",
    "account",
    "calibrate",
    "paper_bound",
    "paper_forms",
    "pareto_front",
    "require_private",
    "statement",
    "step_noise",
    "step_profile",
]
