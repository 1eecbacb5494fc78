"""The explorer's numbers are those of the planner, the bounds and the accountant; nonsense gets a message."""

import json

import pytest

import fald
from fald import planner
from fald.core.errors import ConfigError
from fald.pages.explorer import SettingsExplorer, Sliders
from fald.planner import Setting
from fald.privacy.accountant import account
from fald.privacy.settings import RunSettings
from fald.study.schema import load_study
from fald.theory.measured import constants

SETTINGS = {
    "local_steps": 5,
    "step_size": 1e-4,
    "correlation": 0.5,
    "num_participants": 4,
    "num_rounds": 2000,
    "batch_size": 413,
    "num_chains": 4,
    "clip_norm": 1.0,
}
DRAWN = {"scheme": "with-replacement"}


@pytest.fixture(scope="module")
def study():
    return fald.datasets.load_bundled_study("indo")


@pytest.fixture(scope="module")
def explorer(study):
    return SettingsExplorer(study)


@pytest.fixture(scope="module")
def federation(study):
    data = study.read_data()
    return study.build_model(data.features), data


def ask(function, **changes):
    found = function({name: str(value) for name, value in {**SETTINGS, **changes}.items()})
    json.dumps(found, allow_nan=False)
    return found


def setting(**changes):
    return Setting(local_steps=5, step_size=1e-4, correlation=0.5, **changes)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, {}),
        ({"batch_size": 20}, {"batch_size": 20}),
        ({"num_participants": 2}, {}),  # only drawn sites are counted
        ({"num_participants": 2, **DRAWN}, {"participation": fald.with_replacement(2)}),
        ({"num_participants": 4, **DRAWN}, {"participation": fald.with_replacement(4)}),
        (
            {"num_participants": 2, "noise": "paper", **DRAWN},
            {"participation": fald.with_replacement(2), "noise": "paper"},
        ),
    ],
)
def test_error_and_guarantee_are_those_of_the_planner(explorer, federation, changes, same):
    problem, _ = planner.local_models(*federation, setting(**same))
    wanted, found = planner.predict(problem, setting(**same)), ask(explorer.point, **changes)
    predicted = found["predicted"]
    assert predicted["bias"] == pytest.approx(wanted.bias, rel=1e-9)
    assert predicted["sd_error"] == pytest.approx(wanted.sd_error, rel=1e-9)
    assert predicted["forgotten"] == wanted.forgotten
    bound = planner.guarantee(problem, setting(**same), 2000, wanted.w2)
    assert found["guaranteed"]["w2"] == (None if bound.w2 is None else pytest.approx(bound.w2, rel=1e-9))
    assert found["guaranteed"]["reason"] == bound.reason
    # another setting is another error: the comparison can fail
    other = planner.predict(problem, Setting(local_steps=6, step_size=1e-4, correlation=0.5, **same))
    assert predicted["bias"] != pytest.approx(other.bias, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 20, 163, 413])
def test_constants_of_any_batch_size_follow_from_those_of_one_row(explorer, federation, batch_size):
    measured, derived = constants(*federation, batch_size=batch_size), explorer._constants(batch_size)
    assert derived.gradient_noise == pytest.approx(measured.gradient_noise, rel=1e-9)
    assert derived.provenance == measured.provenance
    assert derived.smoothness == measured.smoothness


@pytest.mark.parametrize(
    "changes", [{}, {"batch_size": 20}, {"num_participants": 2, **DRAWN}, {"num_participants": 4, **DRAWN}]
)
def test_epsilon_is_the_accountants(explorer, federation, changes):
    run = RunSettings(
        sizes=federation[1].sizes.tolist(),
        local_steps=5,
        num_rounds=2000,
        step_size=1e-4,
        correlation=0.5,
        batch_size=changes.get("batch_size"),
        participation=fald.with_replacement(changes["num_participants"]) if changes.keys() & DRAWN else None,
        clip_norm=1.0,
        num_chains=4,
    )
    found = ask(explorer.privacy, **changes)
    assert found["epsilon"] == pytest.approx(account(run, delta=1e-5).worst, rel=1e-9)
    assert ask(explorer.privacy, clip_norm=2.0, **changes)["epsilon"] > found["epsilon"]


def test_without_clipping_or_with_shared_noise_alone_there_is_no_privacy(explorer):
    assert ask(explorer.privacy, clip_norm=0)["epsilon"] is None
    assert "sensitivity" in ask(explorer.privacy, clip_norm=0)["reason"]
    assert ask(explorer.privacy, correlation=1)["epsilon"] is None


def test_bytes_are_those_that_a_run_counts(explorer, federation):
    tree = fald.sample(
        0, *federation, num_rounds=6, local_steps=5, step_size=1e-4, num_chains=4, progress=False
    )
    found = ask(explorer.point, num_rounds=6)["communication"]
    shares = federation[1].weights
    for drawn in (2, 4):
        fewer = ask(explorer.point, num_rounds=6, num_participants=drawn, **DRAWN)["communication"]
        answered = (1 - (1 - shares) ** drawn).sum() / 4
        assert fewer["bytes_up"] / found["bytes_up"] == pytest.approx(answered, rel=1e-3)
    assert found["bytes_up"] == int(tree["cost"]["bytes_up"].sum())
    assert found["bytes_down"] == int(tree["cost"]["bytes_down"].sum())


def test_what_lies_outside_a_theory_is_said(explorer):
    unstable = ask(explorer.point, step_size=1.0)
    assert unstable["predicted"] is None
    assert "diverges" in unstable["no_prediction"]
    assert "step-size must be" in unstable["guaranteed"]["reason"]
    rough = ask(explorer.point, local_steps=500, step_size=1e-3)
    assert any("prediction is rough" in text for text in rough["warnings"])
    assert any("more than the run has" in text for text in ask(explorer.point, num_rounds=10)["warnings"])
    assert ask(explorer.point, num_rounds=20_000)["warnings"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_steps": "many"}, "local-steps must be a whole number; got 'many'"),
        ({"local_steps": "2.5"}, "local-steps must be a whole number"),
        ({"step_size": "nan"}, "step-size must be between"),
        ({"step_size": "0"}, "step-size must be between"),
        ({"correlation": "2"}, "correlation must be between 0 and 1"),
        ({"num_participants": "0"}, "num-participants must be between"),
        ({"num_participants": "3", "scheme": "without-replacement"}, "equal"),
        ({"scheme": "lottery"}, "scheme must be"),
        ({"num_rounds": "1e400"}, "num-rounds must be a whole number"),
        ({"num_rounds": "9" * 30}, "num-rounds must be between"),
        *[
            ({name: "90000"}, f"{name.replace('_', '-')} must be at most")
            for name in ("local_steps", "num_chains")
        ],
        ({"delta": "0"}, "delta must be between"),
        ({"clip_norm": "-1"}, "clip-norm must be between"),
    ],
)
def test_values_that_cannot_be_used_get_a_message(explorer, changes, message):
    for function in (explorer.point, explorer.privacy):
        with pytest.raises(ConfigError, match=message):
            ask(function, **changes)
    with pytest.raises(ConfigError, match="local-steps is missing"):
        explorer.point({})
    with pytest.raises(ConfigError, match="over must be"):
        ask(explorer.sweep, over="delta")


def test_sliders_begin_where_the_study_stands(explorer, tmp_path):
    about = explorer.about({})
    assert set(about["grids"]) == set(Sliders._fields[:6])
    for name, grid in about["grids"].items():
        assert about["start"][name] in grid
        assert grid == sorted(grid)
    text = (fald.datasets.study_path("indo")).read_text()
    (tmp_path / "indo.csv").write_bytes(fald.datasets.study_path("indo").with_name("indo.csv").read_bytes())
    own = "\n[sampler]\nnum-rounds = 77\nlocal-steps = 7\nstep-size = 3e-5\nclip-norm = 2.0\nbatch-size = 9\n"
    (tmp_path / "study.toml").write_text(text + own + "[privacy]\ndelta = 1e-6\n")
    start = SettingsExplorer(load_study(tmp_path / "study.toml")).start
    assert start == Sliders(7, 3e-5, 0.0, 4, 77, 9, 4, delta=1e-6, clip_norm=2.0)


def test_a_sweep_shows_more_error_for_more_local_steps(explorer):
    found = ask(explorer.sweep, over="local_steps")
    assert found["at"] in found["x"]
    assert found["error"][0] < found["error"][-1]
    assert found["rounds"][0] > found["rounds"][-1]
    shared = ask(explorer.sweep, over="correlation")
    assert shared["x"][-1] == 1.0
    assert all(a >= b for a, b in zip(shared["error"], shared["error"][1:]))


def test_the_same_question_is_answered_from_memory(explorer):
    first, hits = ask(explorer.point, num_rounds=4321), explorer._point.cache_info().hits
    assert ask(explorer.point, num_rounds=4321) == first
    assert explorer._point.cache_info().hits == hits + 1
