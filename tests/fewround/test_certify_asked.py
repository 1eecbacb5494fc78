"""That importance sampling asks every condition of *reached*, about the right draws."""

import numpy as np
import pytest

import fald
from fald.fewround import certify
from helpers import federation, linear_model

CONDITIONS = {
    "khat": "k-hat", "pooled_khat": "pooled k-hat", "means_precise": "precision of means",
    "sds_precise": "precision of sds", "moments_exist": "moments", "agreement": "agreement", "tails": "tails",
    "far_mass": "far mass", "defined": "numbers", "mode": "mode", "funnel": "funnel",
    "one_mode": "one mode", "explored": "explorers", "two_rounds": "rounds",
}  # fmt: skip


@pytest.mark.slow
def test_importance_sampling_asks_every_condition_of_the_right_draws(monkeypatch):
    """Each of them can say no, and is asked about what its name says."""
    asked = {}
    for function, name in CONDITIONS.items():

        def no(*given, name=name):
            asked[name] = given
            return certify.Condition(name, False, f"{name} says no")

        monkeypatch.setattr(certify, function, no)
    found = fald.fit(
        0, linear_model(2.0), federation().data, method="importance", max_rounds=3, progress=False
    )
    assert found.attrs["verdict"] == "not reached"
    assert {name for name in CONDITIONS.values() if f"{name} says no" in found.attrs["reason"]} == set(
        CONDITIONS.values()
    )
    newest, count = asked["k-hat"]
    assert count == len(newest.weights)
    pooled = asked["pooled k-hat"][0]
    assert len(pooled.weights) > count  # of all rounds
    first, second, tolerance, _ = asked["agreement"]
    assert not np.array_equal(first.mean, second.mean)
    assert asked["precision of means"][1] == asked["precision of sds"][1] == tolerance
    assert asked["rounds"] == (2,)
    assert asked["one mode"] == (1,)
