"""What cannot be accounted for is refused, with the reason."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy import Ledger, account, paper_bound, step_noise
from fald.settings.participation import with_replacement, without_replacement


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"correlation": 1.0}, "correlation 1"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"sensitivity": None}, "no bound"),
        ({"sensitivity": math.inf}, "no bound"),
        ({"sensitivity": None, "clip_norm": math.inf}, "no bound"),
    ],
)
def test_no_privacy_is_refused(run, changes, reason):
    for ask in (
        lambda r: account(r, delta=1e-5),
        lambda r: account(r, delta=1e-5, method="rdp"),
        lambda r: paper_bound(r, delta=1e-5),
        step_noise,
    ):
        with pytest.raises(PrivacyError, match=reason) as error:
            ask(run(**changes))
        assert error.value.hint


def test_correlation_near_one_is_finite_and_large(run):
    assert 50 < account(run(num_rounds=100, correlation=1 - 1e-6), delta=1e-5).worst < math.inf


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": []}, "sizes"),
        ({"sizes": [10, 0]}, "sizes"),
        ({"sizes": [10.5]}, "sizes"),
        ({"local_steps": 0}, "local-steps"),
        ({"num_rounds": 1.5}, "num-rounds"),
        ({"num_chains": True}, "num-chains"),
        ({"batch_size": 0}, "batch-size"),
        ({"step_size": 0.0}, "step-size must be a number > 0"),
        ({"step_size": [1e-7] * 3}, "one value per local step"),
        ({"step_size": math.nan}, "step-size"),
        ({"temperature": -1.0}, "temperature"),
        ({"correlation": 1.1}, "correlation"),
        ({"noise": "loud"}, "noise"),
        ({"sensitivity": -1.0}, "sensitivity"),
        ({"clip_norm": 1.0}, "not both"),
        ({"participation": without_replacement(11)}, "num-participants"),
        ({"sizes": [10, 20], "participation": without_replacement(1)}, "another posterior"),
    ],
)
def test_settings_out_of_range(run, changes, words):
    with pytest.raises(ConfigError, match=words):
        run(**changes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"method": "moments"}, "method"),
        ({"sampling": "round-robin"}, "sampling"),
        ({"view": "client"}, "view"),
        ({"num_colluders": -1}, "num-colluders"),
        ({"num_colluders": 10}, "does not collude"),
        ({"participation": "public"}, "participation"),
        ({"times_drawn": [1] * 10}, "only read"),
    ],
)
def test_options_out_of_range(run, options, words):
    with pytest.raises(ConfigError, match=words):
        account(run(), **{"delta": 1e-5, **options})


def test_shuffled_batches_and_poisson_without_a_norm(run):
    with pytest.raises(PrivacyError, match="shuffled"):
        account(run(), delta=1e-5, sampling="shuffled")
    with pytest.raises(PrivacyError, match="norm"):
        account(run(), delta=1e-5, sampling="poisson")


def test_realised_participation_needs_the_table(small):
    options = {"delta": 1e-5, "participation": "realised"}
    drawn = small(participation=without_replacement(2))
    with pytest.raises(ConfigError, match="needs times-drawn"):
        account(drawn, **options)
    with pytest.raises(ConfigError, match="shape"):
        account(drawn, times_drawn=np.ones((20, 5)), **options)
    with pytest.raises(ConfigError, match="more often"):
        account(drawn, times_drawn=np.full((20, 6), 2), **options)
    with pytest.raises(ConfigError, match="between 0 and 20"):
        account(drawn, times_drawn=[21, 0, 0, 0, 0, 0], **options)
    with pytest.raises(ConfigError, match="not enough"):
        account(small(participation=with_replacement(2), noise="realised"), times_drawn=[1] * 6, **options)
    with pytest.raises(ConfigError, match="num-rounds must be between"):
        Ledger(drawn, delta=1e-5).epsilon(21)


def test_library_is_imported_only_when_used():
    code = "import sys, fald.privacy; assert 'dp_accounting' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
