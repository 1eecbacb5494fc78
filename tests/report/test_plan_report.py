"""Plans as text, JSON and figures; settings written into studies; plans from constants alone."""

from __future__ import annotations

import json
import math
import tomllib

import pytest

from fald import planner
from fald.core.errors import ConfigError
from fald.report import plan as plan_report
from fald.study.datasets import load_bundled_study, study_path
from fald.study.schema import SamplerSection, load_study


@pytest.fixture(scope="module")
def plan():
    return plan_report.plan_study(load_bundled_study("indo"))


def test_the_plan_as_text_json_and_figure(plan, tmp_path):
    shown = plan_report.text(plan, "A title")
    for word in ("A title", "4 sites", "smoothness L", "bound", "rounds predicted", "rounds guaranteed",
                 "guaranteed:", "predicted:", "correlation = 1", "not differentially private"):  # fmt: skip
        assert word in shown
    found = json.loads(json.dumps(plan_report.document(plan), allow_nan=False))
    best = found["recommended"]
    assert best["predicted"]["bias"] <= 0.05
    assert best["guaranteed"]["num_rounds"] > 1e6 * best["num_rounds"]
    assert best["settings"]["num-chains"] == 32
    assert [c["local_steps"] for c in found["candidates"]] == list(planner.LOCAL_STEPS)
    assert found["constants"]["provenance"]["smoothness"] == "bound"
    assert set(found["constants"]["clients"]) == {"Case", "Indiana", "Kentucky", "Michigan"}
    page = plan_report.plot(plan, tmp_path / "plan.html").read_text()
    assert "Predicted error against rounds" in page
    assert "K = 2" in page
    with pytest.raises(ConfigError, match=r"written as .html"):
        plan_report.plot(plan, tmp_path / "plan.png")


SAMPLER = """
[sampler]
num-rounds = 40000
num-warmup = 2500
local-steps = 3
step-size = 6e-4
num-chains = 32
thinning = 25
seed = 1
"""


def test_written_settings_change_nothing_else(plan, tmp_path):
    path = tmp_path / "study.toml"
    before = study_path("indo").read_text() + SAMPLER
    path.write_text(before)
    chosen = plan_report.sampler_settings(plan)
    plan_report.write_settings(path, chosen)
    after = path.read_text()
    old, new = tomllib.loads(before), tomllib.loads(after)
    assert new["sampler"] == {**old["sampler"], **chosen}
    assert {k: v for k, v in new.items() if k != "sampler"} == {
        k: v for k, v in old.items() if k != "sampler"
    }
    changed = [(a, b) for a, b in zip(before.splitlines(), after.splitlines()) if a != b]
    assert len(before.splitlines()) == len(after.splitlines())
    assert all(a.split("=")[0] == b.split("=")[0] for a, b in changed)
    assert load_study(path).sampler.local_steps == chosen["local-steps"]


STUDIES = {
    "comments": "a = 1\n[sampler] # how\nstep-size = 1e-4   # keep me\nseed = 3 # x\n\n[model]\nx = 'x'\n",
    "windows": "[sampler]\r\nstep-size = 1e-4 # keep me\r\n",
    "no newline at the end": "[sampler]\nstep-size = 1e-4 # keep me",
    "no section": "[model]\nx = 1 # keep me",
    "a table": "[sampler]\nstep-size = { smoothness = 3.0, strong-convexity = 1.0 } # keep me\n",
    "quoted": '[sampler]\n"step-size" = 1e-4 # keep me\nnoise = "a # b"\n',
    "indented": "[sampler]\n  step-size=1e-4# keep me\n",
}


@pytest.mark.parametrize("case", STUDIES)
def test_settings_are_written_into_any_spelling(case):
    before = STUDIES[case]
    after = plan_report.with_settings(before, {"step-size": 2.5e-5, "num-rounds": 70})
    expected = tomllib.loads(before)
    expected["sampler"] = {**expected.get("sampler", {}), "step-size": 2.5e-5, "num-rounds": 70}
    assert tomllib.loads(after) == expected
    assert "keep me" in after
    assert plan_report.with_settings(after, {"step-size": 2.5e-5, "num-rounds": 70}) == after
    assert ("\r\n" in after) == (case == "windows")
    assert after.count("\r") == (after.count("\n") if case == "windows" else 0)


@pytest.mark.parametrize(
    "study",
    [
        "sampler.step-size = 1e-4\n",
        "sampler = { step-size = 1e-4 }\n",
        "[sampler]\n[sampler.step-size]\nsmoothness = 1.0\n",
        "not toml at all",
    ],
)
def test_a_section_that_cannot_be_edited_is_left_alone(study, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(study)
    with pytest.raises(ConfigError, match="cannot be edited in place"):
        plan_report.write_settings(path, {"step-size": 2e-4})
    assert path.read_text() == study


def test_a_plan_from_constants_alone():
    known = plan_report.parse_constants(["L=34", "m=1", "d=2", "N=50,gamma=1e3", "D=2"])
    found = plan_report.certified(known, 1e-3)
    assert found["best_local_steps"] == round(math.sqrt(35))
    rounds = {row["local_steps"]: row["num_rounds"] for row in found["candidates"]}
    assert min(rounds, key=lambda k: rounds[k]) == 6
    shown = plan_report.certified_text(found)
    assert "Predicted: none" in shown
    assert "heterogeneity" in shown
    json.dumps(found, allow_nan=False)
    for words, message in (
        (["L=1", "m=1"], "constants need d"),
        (["L=x", "m=1", "d=1"], "L must be a number; got 'x'"),
        (["lambda=1"], "unknown constant 'lambda=1'"),
        (["L"], "unknown constant 'L'"),
        (["L=1", "m=2", "d=1"], "strong-convexity must be > 0 and ≤ smoothness"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_report.parse_constants(words)


def test_a_study_at_temperature_zero_is_not_planned():
    study = load_bundled_study("indo")
    cold = SamplerSection(**{"num-rounds": 10, "local-steps": 1, "step-size": 0.1, "temperature": 0.0})
    with pytest.raises(ConfigError, match="no posterior to plan for"):
        plan_report.plan_study(study.model_copy(update={"sampler": cold}))
