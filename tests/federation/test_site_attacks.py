"""A coordinator that breaks the rules, against sites that follow them."""

import numpy as np
import pytest
from hostile import FEW_ROUND, PRIVATE, SHARES, START, STUDY, Coordinator, kinds, said, summed

from fald.core.errors import SecureSumError
from fald.federation.site.run import SiteRun
from fald.langevin.method import Upload


class Steps:
    """In place of local steps, which take long to compile and are not what is attacked here."""

    kinds = ("position", "value")
    start = (START,)

    def read(self, message):
        return [message.arrays["leaf_0"]]

    def check_noise(self, number, weight, leaves):
        pass

    def answer(self, task):
        return Upload(task.leaves[0] + 0.5, np.ones(len(task.weight)))


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    if "real_steps" not in request.fixturenames:
        monkeypatch.setattr(SiteRun, "_prepare", lambda self: Steps())


@pytest.fixture
def real_steps():
    """Ask for it to have the steps computed."""


@pytest.fixture
def coordinator(tmp_path):
    return Coordinator(tmp_path)


def test_an_honest_round_gives_a_sum(coordinator, real_steps):
    assert kinds(coordinator.begin(coordinator.open())) == ["reply"] * 3
    total = summed(coordinator.round())
    assert np.isfinite(total).all()
    assert np.abs(total[:6]).max() > 0


def test_an_honest_round_gives_the_weighted_sum(coordinator):
    """The twin of the attacks: what they change is what makes the masks fail."""
    coordinator.begin(coordinator.open())
    np.testing.assert_allclose(summed(coordinator.round()), [0.5] * 6 + [1.0] * 2, rtol=1e-12)


@pytest.mark.parametrize("weights", [[1, 0, 0], [0.99, 0.005, 0.005], [0.2, 0.3, -0.5], [np.nan, 0.3, 0.5]])
def test_weights_that_single_out_a_site_are_refused(coordinator, weights):
    coordinator.begin(coordinator.open())
    for reply in coordinator.round(weights).values():
        assert "not finite" in said(reply) if np.isnan(weights).any() else "shares of the rows" in said(reply)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_weight_a_millionth_off_shows_no_upload(coordinator, dtype):
    """Sums are exact: of two, the difference over that of the weights would be one site's upload."""
    lie, found = SHARES.astype(dtype) * (1 + np.array([9e-7, 0, 0], dtype)), []
    for run, weights in ("0", SHARES), ("2", lie):
        coordinator.ids["run"] = run * 16
        coordinator.begin(coordinator.open())
        found.append(summed(coordinator.round(weights=weights)))
    assert np.abs(found[0]).max() > 0
    assert np.array_equal(*found)


def test_weights_from_sizes_that_differ_between_sites_give_noise(coordinator):
    """Each site sees its own size right and lies about the others, so that the weights fit everywhere."""
    sizes = {"a": [20, 5, 5], "b": [120, 30, 30], "c": [200, 50, 50]}
    opened = coordinator.open()
    assert kinds(coordinator.begin(opened, sizes=sizes)) == ["reply"] * 3
    replies = coordinator.round([2 / 3, 1 / 6, 1 / 6])
    with pytest.raises(SecureSumError, match="do not cancel"):
        summed(replies)


def test_sites_that_were_told_different_studies_give_noise(coordinator):
    """Sites that hardly move upload what the coordinator knows, and could be subtracted."""
    still = {**STUDY, "sampler": {**STUDY["sampler"], "step-size": 1e-300}}
    coordinator.begin(coordinator.open(for_others=still))
    with pytest.raises(SecureSumError, match="do not cancel"):
        summed(coordinator.round())


@pytest.mark.parametrize("study", [STUDY, PRIVATE], ids=["plain", "private"])
@pytest.mark.parametrize("secure", [True, False])
def test_chains_that_were_agreed_on_do_not_become_exact_sums(tmp_path, study, secure):
    """Otherwise a private study would give away gradients without noise."""
    coordinator = Coordinator(tmp_path, secure, policy="unsummed = true\n")
    assert kinds(coordinator.begin(coordinator.open(study))) == ["reply"] * 3
    reply = coordinator.say("a", "ask", {"round": 1, "attempt": 1}, {"states": START})
    assert reply.kind == "refusal"
    assert "takes no such requests" in reply.values["message"]


def test_a_private_study_does_not_give_away_curvature_when_it_is_opened(coordinator):
    reply = coordinator.open({**PRIVATE, "sampler": {**STUDY["sampler"], "method": "fsgld"}})["a"]
    assert reply.kind == "refusal"
    assert "no privacy accounting" in reply.values["message"]
    assert not reply.arrays


def test_chains_are_not_run_where_sums_were_agreed_on(coordinator):
    coordinator.begin(coordinator.open(FEW_ROUND))
    for reply in coordinator.round().values():
        assert "takes no such rounds" in said(reply)


def test_more_weight_than_was_accounted_for_is_refused_in_private_runs(tmp_path):
    coordinator = Coordinator(tmp_path, secure=False, policy="unsummed = true\n")
    coordinator.begin(coordinator.open(PRIVATE))
    for reply in coordinator.round([1.0, 1.0, 1.0]).values():
        assert reply.kind == "refusal"
        assert "privacy of the study rests on" in reply.values["message"]
    assert kinds(coordinator.round()) == ["reply"] * 3


def test_a_spent_budget_is_told_at_both_ends(tmp_path):
    policy = "[privacy]\nmax-epsilon = 0.001\ndelta = 1e-5\n"
    coordinator = Coordinator(tmp_path, policy=policy)
    private = {**PRIVATE, "privacy": {"delta": 1e-6, "max-epsilon": 0.0009}}
    opened = coordinator.open(private)
    assert kinds(opened) == ["reply"] * 3
    ledger = tmp_path / "a" / "state" / "ledger.jsonl"
    ledger.write_text('{"study": "earlier", "epsilon": 0.0009999, "delta": 1e-6, "rounds": 5}\n')
    ledger.chmod(0o600)
    tiny = {**private, "sampler": {**private["sampler"], "step-size": 1e-9}}
    coordinator.ids["run"] = "2" * 16
    opened = coordinator.open(tiny)
    assert kinds(opened) == ["reply"] * 3
    reply = coordinator.begin(opened)["a"]
    assert reply.kind == "refusal"
    assert "over all studies" in reply.values["message"]
    assert "over all studies" in (tmp_path / "a" / "state" / "site.log").read_text()
