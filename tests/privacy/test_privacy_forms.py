"""The closed forms of the published privacy bound: larger than the bound, and of the printed order."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy import RunSettings, account, paper_bound, paper_forms
from fald.settings.participation import with_replacement, without_replacement

PARTS = {"delta_0": 1e-9, "delta_1": 1e-8, "delta_2": 1e-6}


def random_run(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 12))
    scheme = [None, without_replacement(int(rng.integers(1, n + 1))), with_replacement(3)][seed % 3]
    run = RunSettings(
        sizes=[600] * n, local_steps=int(rng.integers(1, 30)), num_rounds=int(rng.integers(1, 2000)),
        step_size=1e-30, temperature=rng.uniform(0.1, 3), correlation=rng.uniform(0, 0.95),
        batch_size=int(rng.choice([20, 200, 600])), participation=scheme, noise="paper",
        sensitivity=rng.uniform(0.5, 3),
    )  # fmt: skip
    return run, rng.uniform(0.01, 1)


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_forms_are_upper_bounds_of_the_bound(seed, as_published):
    run, share = random_run(seed)
    limit = paper_forms(run, **PARTS, as_published=as_published).step_size_limit
    run = replace(run, step_size=share * limit)
    forms = paper_forms(run, **PARTS, as_published=as_published)
    q = forms.bound.inclusion if as_published else 1.0
    assert forms.step_size_limit == pytest.approx(limit)
    assert limit <= forms.step_size_order * (1 + 1e-12)
    assert forms.bound.epsilon <= forms.closed_epsilon * (1 + 1e-9)
    without_slack = paper_bound(run, delta_0=PARTS["delta_0"], as_published=as_published)
    if not (as_published and run.scheme == "with-replacement"):  # Scheme I has another δ as printed
        assert forms.simple_epsilon == pytest.approx(without_slack.epsilon)
        assert forms.simple_delta == pytest.approx(without_slack.delta)
    # the order: exact without amplification; otherwise log(1 + q(e^x − 1)) lies between qx and q(e^x − 1)
    inner = forms.epsilon_order / q / (2 * math.sqrt(2 * forms.bound.num_rounds * math.log(1e6)))
    assert forms.epsilon_order * (1 - 1e-9) <= forms.closed_epsilon
    assert forms.closed_epsilon <= forms.epsilon_order * math.expm1(inner) / inner * (1 + 1e-9)
    if q == 1:
        assert forms.closed_epsilon == pytest.approx(forms.epsilon_order)


@pytest.mark.parametrize("seed", range(0, 60, 7))
def test_forms_react_with_the_right_sign(seed):
    run, _ = random_run(seed)
    run = replace(run, step_size=0.1 * paper_forms(run, **PARTS).step_size_limit)
    here = paper_forms(run, **PARTS)
    for change in (
        {"step_size": 2 * run.step_size},
        {"sensitivity": 1.5 * run.sensitivity},
        {"temperature": run.temperature / 1.5},
        {"correlation": math.sqrt((1 + run.correlation**2) / 2)},
        {"num_rounds": 2 * run.num_rounds},
    ):
        there = paper_forms(replace(run, **change), **PARTS)
        for name in ("closed_epsilon", "epsilon_order", "simple_epsilon"):
            assert getattr(there, name) > getattr(here, name), (name, change)
        if "step_size" not in change:
            assert there.step_size_limit <= here.step_size_limit
    assert paper_forms(run, **{**PARTS, "delta_2": 1e-5}).closed_epsilon < here.closed_epsilon


def test_beyond_its_range_the_form_under_the_root_says_nothing():
    run, _ = random_run(3)
    limit = paper_forms(run, **PARTS).step_size_limit
    assert math.isfinite(paper_forms(replace(run, step_size=limit), **PARTS).closed_epsilon)
    assert math.isinf(paper_forms(replace(run, step_size=1.01 * limit), **PARTS).closed_epsilon)
    # the twin: far beyond its range the form would be no upper bound
    far = replace(run, local_steps=1, num_rounds=100_000, batch_size=None)
    far = replace(far, step_size=0.99 * paper_bound(far, **PARTS).step_size_limit)
    forms = paper_forms(far, **PARTS)
    assert forms.bound.epsilon > forms.epsilon_order


def test_an_accountant_is_below_the_forms():
    run = RunSettings(sizes=[600] * 5, local_steps=4, num_rounds=50, step_size=1e-30, batch_size=60,
                      sensitivity=1.0, noise="paper")  # fmt: skip
    run = replace(run, step_size=0.9 * paper_forms(run, **PARTS).step_size_limit)
    forms = paper_forms(run, **PARTS)
    assert account(run, delta=forms.bound.delta).worst < forms.closed_epsilon
    assert account(run, delta=forms.simple_delta).worst < forms.simple_epsilon


def test_failed_preconditions_are_named():
    run, _ = random_run(0)
    with pytest.raises(ConfigError, match=r"delta-1 and delta-2 must be between 0 and 1; got 0 and 0\.5"):
        paper_forms(run, delta_0=1e-9, delta_1=0, delta_2=0.5)
    steps = [1e-30] * (run.num_steps - 1) + [1e-31]
    with pytest.raises(ConfigError, match="constant step size"):
        paper_forms(replace(run, step_size=steps), **PARTS)
    with pytest.raises(ConfigError, match="step-size must be ≤"):
        paper_forms(replace(run, step_size=1.0), **PARTS)
    with pytest.raises(PrivacyError, match="correlation 1"):
        paper_forms(replace(run, correlation=1.0), **PARTS)
