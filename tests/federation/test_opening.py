"""What a study asks of a site, as the site reads it; and how many studies it looks at within a day."""

import json
from types import SimpleNamespace

import pytest

from fald.core.errors import PolicyError
from fald.core.reveals import UNDECLARED, Reveals
from fald.federation.site import opening
from fald.federation.site.opening import Openings, enquiry_of, read_json, remote_study
from fald.federation.site.policy import make_policy
from fald.study.schema import SamplerSection, make_study

DATA = {"target": "y", "features": ["u", "v"]}
STUDY = {"data": DATA, "model": {"family": "logistic"}}
SAMPLER = {"num-rounds": 9, "local-steps": 3, "step-size": 1e-3, "num-chains": 4, "clip-norm": 1.0}
DAY = 86400.0


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr(opening.time, "time", lambda: clock.now)
    return clock


def openings(folder, **policy):
    return Openings(folder, make_policy({key.replace("_", "-"): value for key, value in policy.items()}))


def test_runs_are_counted_over_a_day_and_the_same_one_once(tmp_path, clock):
    site = openings(tmp_path, max_studies=2)
    for run, digest in (("1", "a"), ("2", "a"), ("1", "a"), ("2", "a")):
        site.count_run(run, digest)
    for run, digest in (("3", "a"), ("1", "b")):  # another run, or another study under its name
        with pytest.raises(
            PolicyError, match=r"looked at 2 runs of studies within a day \(max-studies\)"
        ) as caught:
            site.count_run(run, digest)
        assert "wait, or ask the site" in caught.value.hint
    openings(tmp_path, max_studies=3).count_run("3", "a")  # another process, another limit
    with pytest.raises(PolicyError, match="looked at 3"):
        openings(tmp_path, max_studies=3).count_run("4", "a")
    # asking again does not renew the day of a run: its time is that of the first look
    clock.now += DAY - 1
    site.count_run("1", "a")
    with pytest.raises(PolicyError):
        openings(tmp_path, max_studies=3).count_run("4", "a")
    clock.now += 1
    site.count_run("4", "a")
    assert list(json.loads((tmp_path / "studies.json").read_text())) == ["4 a"]


def test_studies_that_did_not_fit_are_counted_over_a_day(tmp_path, clock):
    site = openings(tmp_path, max_failed_opens=2)
    site.check_failed()
    site.count_failed()
    site.check_failed()
    clock.now += 10
    site.count_failed()
    for each in (site, openings(tmp_path, max_failed_opens=2)):
        with pytest.raises(
            PolicyError, match=r"2 studies did not fit its rows within a day \(max-failed-opens\)"
        ):
            each.check_failed()
    clock.now += DAY - 10 - 1
    with pytest.raises(PolicyError):
        site.check_failed()
    clock.now += 1
    site.check_failed()  # the first is a day old
    site.count_failed()
    assert json.loads((tmp_path / "failed.json").read_text()) == [1e9 + 10, clock.now]


def test_a_file_that_is_not_there_says_nothing(tmp_path):
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "some.json").write_text("[1]")
    assert read_json(tmp_path / "some.json") == [1]


@pytest.mark.parametrize("source", [{"file": "/etc/passwd", "site": "u"}, {"files": {"a": "/etc/passwd"}}])
def test_files_of_the_coordinator_are_not_read_at_a_site(source):
    study = remote_study({**STUDY, "data": {**DATA, **source}, "folder": "/etc", "title": "t"})
    assert (study.data.file, study.data.files, study.data.site, study.folder) == (None, {}, None, ".")
    assert (study.title, study.data.target, study.data.features) == ("t", "y", ["u", "v"])


@pytest.mark.parametrize(
    ("options", "built"),
    [
        ({"hidden": [10_000, 10_000]}, True),
        ({"hidden": [10_000, 10_001]}, False),
        ({"hidden": (10_001,), "more": {"of": [{"them": 10_000}]}}, False),
        ({"hidden": [10**8]}, True),
        ({"hidden": [10**8, 1, 0, -7, True, 2.5, "10000000"]}, True),
        ({"hidden": [10**8], "other": 2}, False),
        ({"hidden": [10**8, 2, 0]}, False),
        ({"hidden": [10**8, 2], "other": -1}, False),
        ({}, True),
    ],
)
def test_a_model_is_not_built_of_any_size(monkeypatch, options, built):
    """Counts anywhere among the options multiply; what is no count does not."""
    made = SimpleNamespace(model=SimpleNamespace(options=options), encoded_features=["x"] * 20_000)
    monkeypatch.setattr(opening, "make_study", lambda tree, where: made)
    if built:
        assert remote_study(STUDY) is made
        made.encoded_features.append("y")
        with pytest.raises(PolicyError, match="levels or options ask for more parameters than a site makes"):
            remote_study(STUDY)
    else:
        with pytest.raises(PolicyError, match="more parameters than a site makes"):
            remote_study(STUDY)


def asked(tree, secure=False, sites=2):
    return enquiry_of(make_study({**STUDY, **tree}, "a test"), secure, sites)


def test_a_study_of_chains_asks_for_its_rounds_and_uploads():
    found = asked({"sampler": SAMPLER}, secure=True, sites=7)
    assert (found.method, found.few_round, found.rounds, found.chains, found.local_steps) == (
        "fa-ld",
        False,
        9,
        4,
        3,
    )
    assert (found.columns, found.family, found.secure_sum, found.sites) == (
        ("y", "u", "v"),
        "logistic",
        True,
        7,
    )
    assert (found.curvature, found.sums, found.declared) == (False, True, True)
    assert (found.epsilon, found.delta, found.rows, found.dim) == (None, None, 0, 0)
    private = asked({"sampler": SAMPLER, "privacy": {"delta": 1e-6, "max-epsilon": 2.0}})
    assert (private.epsilon, private.delta, private.private, private.secure_sum) == (2.0, 1e-6, True, False)
    without = asked({"sampler": SAMPLER, "privacy": {"delta": 1e-6}})
    assert (without.epsilon, without.delta, without.private) == (None, 1e-6, False)


def test_a_few_round_study_asks_for_its_requests():
    found = asked({"fit": {"max-rounds": 7}})
    assert (found.method, found.few_round, found.rounds, found.chains, found.local_steps) == (
        "auto",
        True,
        7,
        1,
        1,
    )
    assert (found.curvature, found.sums, found.declared, found.secure_sum) == (True, True, True, False)
    assert not asked({"fit": {"curvature": False}}).curvature


@pytest.mark.parametrize(
    "reveals",
    [
        UNDECLARED, Reveals(), Reveals(sums=True), Reveals(("point", "value", "hessian")),
        Reveals(preparation={"first": "hessian"}),
    ],
)  # fmt: skip
def test_a_site_is_asked_for_what_the_method_declares(monkeypatch, reveals):
    about = SimpleNamespace(reveals=reveals, settings={})
    monkeypatch.setattr(SamplerSection, "build_method", lambda self: SimpleNamespace(about=about))
    found = asked({"sampler": SAMPLER})
    assert (found.declared, found.sums) == (reveals is not UNDECLARED, reveals == Reveals(sums=True))
    assert found.curvature is ("hessian" in reveals.kinds)


@pytest.mark.parametrize("most", ["num-burn", "num-fit"])
def test_whatever_a_method_counts_is_work(most):
    options = {"num-burn": 60_000, "num-fit": 60_000, most: 70_000}
    sampler = {"num-rounds": 9, "step-size": 1e-3, "method": "consensus", "options": options}
    assert asked({"sampler": sampler}).local_steps == 70_000


def test_a_batch_is_no_work_beyond_the_rows():
    assert asked({"sampler": {**SAMPLER, "batch-size": 5000}}).local_steps == 3
    assert asked({"sampler": {**SAMPLER, "local-steps": 5000}}).local_steps == 5000
