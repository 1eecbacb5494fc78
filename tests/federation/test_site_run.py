"""A run at a site: whose noise it uses, and what it remembers of rounds that are asked again."""

import numpy as np
import pytest
from hostile import PRIVATE, SHARES, START, STUDY, Coordinator
from test_site_attacks import Steps

from fald.federation.site import langevin, opening
from fald.federation.site import run as site_run
from fald.federation.site import worker as site_worker
from fald.federation.site.langevin import LangevinSite, Task
from fald.federation.wire import unpack
from fald.fewround.site import check_request
from fald.study.schema import make_study


@pytest.mark.parametrize(("study", "secret"), [(STUDY, False), (PRIVATE, True)], ids=["plain", "private"])
def test_noise_of_a_private_run_is_a_secret_of_the_site(tmp_path, monkeypatch, study, secret):
    roots, methods = [], []

    class Seen(Steps):
        def answer(self, task):
            roots.append(task.own.tolist())
            return super().answer(task)

    def made(model, method, *others, **named):
        methods.append(method)
        return Seen()

    monkeypatch.setattr(site_run, "LangevinSite", made)
    coordinator = Coordinator(tmp_path, secure=False, policy="unsummed = true\n")
    coordinator.begin(coordinator.open(study))
    for number in (1, 2):
        assert {reply.kind for reply in coordinator.round(number=number).values()} == {"reply"}
    public = site_run.public_root(make_study(study, "study.toml").sampler).tolist()
    assert len(roots) == 6
    assert all((own != public) == secret for own in roots)
    # no two sites and no two rounds share it
    assert len({tuple(own) for own in roots}) == (6 if secret else 1)
    assert all(method.shares_energy == (not secret) for method in methods)
    # a round that is asked again has the noise that it had
    coordinator.round(number=2, attempt=2)
    assert roots[6:] == roots[3:6]


def test_with_a_secure_sum_only_masked_numbers_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(site_run.SiteRun, "_prepare", lambda self: Steps())
    coordinator = Coordinator(tmp_path)
    coordinator.begin(coordinator.open())
    for reply in coordinator.round().values():
        assert set(reply.arrays) == {"masked", "hashes"}  # of what is masked
        assert reply.arrays["masked"].dtype == np.uint64
    plain = Coordinator(_folder(tmp_path), secure=False, policy="unsummed = true\n")
    plain.begin(plain.open())
    for reply in plain.round(SHARES, START).values():  # the twin: without it a site's own numbers are seen
        np.testing.assert_allclose(reply.arrays["leaf_0"], START + 0.5)


def _folder(path):
    (path / "plain").mkdir()
    return path / "plain"


def memory_of(folder, start=0.0):
    """A site whose method keeps two arrays between rounds."""
    site = object.__new__(LangevinSite)
    site._folder, site._memory = folder, None
    site._start = {"h": np.full((2, 3), start), "n": np.zeros(2, np.int32)}
    return site


def test_memory_is_that_before_the_round_whoever_asks_again(tmp_path, monkeypatch):
    site = memory_of(tmp_path)

    def task(number, saved=0):
        return Task(number, np.ones(2), [], saved, np.zeros(2, np.uint32))

    def kept(value):
        return {"h": np.full((2, 3), float(value)), "n": np.full(2, value, np.int32)}

    assert float(site._recall(task(0))["h"][0, 0]) == 0.0
    for number in range(4):
        site._keep(task(number), kept(number + 1))
        assert int(site._recall(task(number + 1))["n"][0]) == number + 1
    assert site._saved() == [1, 2, 3, 4]
    with monkeypatch.context() as away:
        away.setattr(langevin, "unpack", None)  # what this process knows it does not read again
        assert int(site._recall(task(4))["n"][0]) == 4
    # a round that is asked again, here and in another process, begins with what was known before it
    for asked in (site, memory_of(tmp_path)):
        for number, value in ((4, 4), (3, 3), (1, 1), (0, 0), (9, 4)):
            found = asked._recall(task(number))
            assert (float(found["h"][1, 2]), int(found["n"][1])) == (value, value), number
    # what the coordinator has saved makes earlier memory needless, and what came after void
    again = memory_of(tmp_path)
    again._keep(task(2, saved=2), kept(30))
    assert again._saved() == [2, 3]
    assert int(again._recall(task(3))["n"][0]) == 30
    again._keep(task(3, saved=0), kept(40))
    assert again._saved() == [2, 3, 4]
    empty = memory_of(tmp_path / "none")
    empty._start = ()
    (tmp_path / "none").mkdir()
    empty._keep(task(0), ())
    assert empty._saved() == []
    assert empty._recall(task(1)) == ()


def test_what_a_study_asks_of_a_site():
    study = make_study({**PRIVATE, "privacy": {"delta": 1e-6, "max-epsilon": 0.7}}, "study.toml")
    found = opening.enquiry_of(study, True, 5)
    assert (found.epsilon, found.delta, found.private) == (0.7, 1e-6, True)
    assert (found.sites, found.chains, found.rounds, found.local_steps) == (5, 2, 10, 2)
    assert (found.columns, found.family, found.method) == (("y", "u", "v"), "logistic", "fa-ld")
    assert (found.few_round, found.secure_sum, found.sums, found.declared) == (False, True, True, True)
    plain = opening.enquiry_of(make_study(STUDY, "study.toml"), False, 5)
    assert (plain.epsilon, plain.delta, plain.private, plain.secure_sum) == (None, None, False, False)


def test_refusals_name_no_value_of_the_rows(tmp_path, monkeypatch):
    worker = Coordinator(tmp_path, secure=False).workers["a"]
    for error in (ValueError("row 17 is 3.25"), site_worker.FaldError("row 17 is 3.25")):
        reply = unpack(worker._refuse({}, error))
        assert reply.kind == "refusal"
        assert "3.25" not in str(reply.values)
        assert not reply.arrays
    with pytest.raises(site_worker.PolicyError) as caught:
        check_request({"odd": np.zeros(1)}, 1)
    assert unpack(worker._refuse({}, caught.value)).values["message"] == "no request has a part 'odd'"
    assert "row 17 is 3.25" in (tmp_path / "a" / "state" / "site.log").read_text()  # which stays at the site
