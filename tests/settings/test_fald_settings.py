"""The settings of FA-LD at their borders: which values hold, as what they are used, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from fald.core.checks import check_probability
from fald.core.errors import ConfigError
from fald.settings.fald import RULES, Setting, checked, method_settings
from fald.settings.participation import full, with_replacement, without_replacement
from fald.settings.schedules import polynomial, record

LEAST = 5e-324
# by name: values that hold and what they become, and values that must be refused
COUNTS = ({1: 1, 3.0: 3, np.int64(7): 7}, [0, -1, 1.5, True, False, None, "3", math.nan, math.inf])
POSITIVE = ({LEAST: LEAST, 2: 2.0, 1e30: 1e30}, [0, 0.0, -1.0, True, None, "1", math.nan, math.inf, [1.0]])
TABLE = {
    "local_steps": COUNTS,
    "num_rounds": COUNTS,
    "num_chains": COUNTS,
    "thinning": COUNTS,
    "batch_size": (COUNTS[0] | {None: None}, [v for v in COUNTS[1] if v is not None]),
    "num_warmup": ({0: 0, 5: 5}, [-1, 0.5, True, None]),
    "step_size": POSITIVE,
    "clip_norm": (POSITIVE[0] | {None: None}, [v for v in POSITIVE[1] if v is not None]),
    "sensitivity": (POSITIVE[0] | {None: None}, [v for v in POSITIVE[1] if v is not None]),
    "temperature": ({0: 0.0, 0.5: 0.5, 100: 100.0}, [-LEAST, -1, True, None, math.inf, math.nan, "1"]),
    "correlation": ({0: 0.0, 0.5: 0.5, 1: 1.0}, [-LEAST, 1 + 1e-15, 2, None, math.nan, "0"]),
    "momentum": ({0: 0.0, 1 - 1e-15: 1 - 1e-15}, [1, 1.0, -LEAST, 2, None, math.nan]),
    "noise": ({"realised": "realised", "paper": "paper"}, ["Paper", "", None, 1]),
    "preconditioner": ({"rms": "rms", None: None}, ["RMS", "", 1, True]),
}  # fmt: skip


def test_every_setting_has_a_rule():
    assert set(TABLE) == set(RULES)


@pytest.mark.parametrize("name", TABLE)
def test_values_hold_or_are_refused_by_their_name(name):
    right, wrong = TABLE[name]
    for value, used in right.items():
        assert checked(name, value) == used
        assert type(checked(name, value)) is type(used)
    for value in wrong:
        with pytest.raises(ConfigError, match=f"^{name.replace('_', '-')} must be "):
            checked(name, value)


def test_settings_are_checked_where_they_are_made():
    made = Setting(local_steps=3.0, step_size=1)
    assert (made.local_steps, made.step_size, made.participation) == (3, 1.0, full())
    assert Setting(1, 0.1, participation=None).participation == full()
    usual = {"local_steps": 1, "step_size": 0.1}
    for name in set(TABLE) & set(made.arguments()):
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            Setting(**{**usual, name: TABLE[name][1][0]})
    with pytest.raises(ConfigError, match="participation must be"):
        Setting(1, 0.1, participation="full")
    schedule = polynomial(0.1, 10.0)
    assert Setting(1, schedule).step_size is schedule


def test_what_is_not_given_is_the_default():
    defaults = {
        "local_steps": None, "step_size": None, "correlation": 0.0, "noise": "realised", "temperature": 1.0,
        "batch_size": None, "clip_norm": None, "momentum": 0.0, "preconditioner": None,
    }  # fmt: skip
    assert method_settings() == defaults
    made = Setting(2, 0.1)
    assert made.arguments() == {**defaults, "local_steps": 2, "step_size": 0.1, "participation": full()}


@pytest.mark.parametrize("part", [full(), with_replacement(2), without_replacement(3)])
def test_settings_come_back_from_a_record(part):
    written = {
        "step_size": record(polynomial(0.1, 10.0)), "local_steps": 4, "temperature": 0.5, "clip_norm": 2.0,
        "participation": part.scheme, "num_participants": part.num_participants, "method": "fa-ld",
    }  # fmt: skip
    made = Setting.from_record(written)
    assert (made.local_steps, made.temperature, made.clip_norm) == (4, 0.5, 2.0)
    assert float(made.step_size(0)) == pytest.approx(0.1)
    assert (made.participation.scheme, made.participation.num_participants) == (
        part.scheme, part.num_participants,
    )  # fmt: skip
    assert made.noise == "realised"
    assert made.participation.allow_unequal  # a run that was made has been allowed to be
    assert Setting.from_record(written, temperature=2.0).temperature == 2.0
    other = Setting.from_record(written, step_size=0.3, participation=full())
    assert (other.step_size, other.participation, other.local_steps) == (0.3, full(), 4)
    with pytest.raises(ConfigError):
        Setting.from_record({**written, "step_size": {"schedule": "function"}})


@dataclass(frozen=True)
class Longer(Setting):
    """Settings of a run with a length."""

    num_rounds: int = 10
    num_sites: int = 0  # which has no rule


def test_settings_that_a_subclass_adds_are_checked_and_are_no_arguments():
    made = Longer(1, 0.1, num_rounds=3.0, num_sites=-1)
    assert (made.num_rounds, type(made.num_rounds), made.num_sites) == (3, int, -1)
    assert made.arguments() == Setting(1, 0.1).arguments()
    with pytest.raises(ConfigError, match="num-rounds must be"):
        Longer(1, 0.1, num_rounds=0)
    written = {
        "step_size": 0.2, "local_steps": 4, "correlation": 0.5, "noise": "paper", "temperature": 0.5,
        "batch_size": 7, "clip_norm": 2.0, "momentum": 0.9, "preconditioner": "rms", "num_rounds": 77,
        "participation": "full", "num_participants": None,
    }  # fmt: skip
    made = Longer.from_record(written, num_rounds=5)
    assert type(made) is Longer
    assert made.num_rounds == 5
    assert Longer.from_record(written).num_rounds == 10  # a record has what is the method's own
    for name in method_settings():
        assert getattr(made, name) == written[name]


def test_a_probability_is_above_zero_and_at_most_one():
    assert [check_probability("p", v) for v in (LEAST, 0.5, 1)] == [LEAST, 0.5, 1.0]
    for wrong in (0, -0.1, 1 + 1e-15, None, True, math.nan):
        with pytest.raises(ConfigError, match="p must be above 0 and at most 1"):
            check_probability("p", wrong)
