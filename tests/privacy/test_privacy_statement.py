"""The statement says everything it must, and nothing it must not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fald.core.errors import ConfigError, ExitCode, PrivacyError
from fald.privacy import account, require_private, statement
from fald.settings.participation import with_replacement, without_replacement


def test_says_everything(small):
    report = account(replace(small(), sensitivity=None, clip_norm=1.0), delta=1e-5)
    found = statement(report, preparation_rounds=4)
    for words in (
        "one record of one client",
        "is replaced",
        "every upload of every client",
        "draws 25 records afresh, without replacement",
        "δ = 1e-05",
        "for each of the 6 clients",
        "privacy loss distributions",
        "upper bound",
        "afresh and independently at every step",
        "never leaves the client",
        "start does not depend on the data",
        "4 of preparation and warm-up",
        "tuned on the same data",
        "pseudo-posterior",
    ):
        assert words in found.text
    assert found.is_guarantee
    data = json.loads(found.to_json())
    assert data["guarantee"] is True
    assert data["relation"] == "replace one"
    assert data["epsilon"] == report.worst
    assert data["upper_bound"] is True
    assert [c["epsilon"] for c in data["clients"]] == report.epsilon.tolist()
    assert data["clients"][0]["noise_multiplier"] == pytest.approx(report.noise.multiplier[0])
    assert data["settings"]["sensitivity"] == 2.0


def test_printed_epsilon_is_rounded_up(small):
    report = account(small(), delta=1e-5)
    printed = float(statement(report).text.split("ε = ")[1].split()[0])
    assert report.worst <= printed <= report.worst * 1.001


def test_a_simulation_promises_nothing(small):
    found = statement(account(small(), delta=1e-5), simulation=True)
    assert found.text.lower().startswith("simulation, no privacy")
    assert not found.is_guarantee
    assert json.loads(found.to_json())["label"] == "simulation, no privacy"
    assert "simulation" not in statement(account(small(), delta=1e-5)).text.lower()


def test_views_schemes_and_names(small):
    run = small(participation=with_replacement(3), noise="realised", num_chains=2)
    hidden = statement(account(run, delta=1e-5, view="summed", num_colluders=1)).text
    assert "secure sum" in hidden
    assert "at most one site" in hidden
    assert "No amplification of ε" in hidden
    assert "in each of 2 chains" in hidden
    unequal = small(sizes=[100, 200, 300], participation=None)
    named = statement(account(unequal, delta=1e-5), clients=["a", "b", "c"])
    assert "a ε = " in named.text
    assert named.data["clients"][2]["name"] == "c"
    with pytest.raises(ConfigError, match="3 names"):
        statement(account(unequal, delta=1e-5), clients=["a"])
    counts = [1, 2, 3, 4, 5, 0]
    realised = account(
        small(participation=without_replacement(3)), delta=1e-5, participation="realised", times_drawn=counts
    )
    text = statement(realised).text
    assert "did take part" in text
    assert "averaged" not in text
    assert "client 5 ε = 0" in text
    assert "all records" in statement(account(small(batch_size=None), delta=1e-5)).text


def test_private_runs_need_what_the_statement_assumes():
    require_private(client_noise="entropy", batches="fresh")
    for wrong, reason in (
        ({"client_noise": "seeded"}, "subtracts the noise"),
        ({"batches": "shuffled"}, "not independent"),
        ({"start": "data-dependent"}, "accounted for"),
    ):
        with pytest.raises(PrivacyError, match=reason) as error:
            require_private(**{"client_noise": "entropy", "batches": "fresh", **wrong})
        assert error.value.exit_code == ExitCode.PRIVACY
        assert error.value.hint
    with pytest.raises(ConfigError):
        require_private(client_noise="entropy", batches="unknown")
