"""A coordinator that breaks the rules, against sites that follow them."""

import numpy as np
import pandas as pd
import pytest

from fald.core.errors import SecureSumError
from fald.core.version import __version__
from fald.federation import wire
from fald.federation.secure.session import unmask_sum
from fald.federation.site.run import SiteRun
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.langevin.method import Upload

NAMES = ["a", "b", "c"]
SIZES = [20, 30, 50]
SHARES = np.array(SIZES) / sum(SIZES)
IDS = {"run": "0" * 16, "session": "1" * 16}
START = np.zeros((2, 3))
STUDY = {
    "data": {"target": "y", "features": ["u", "v"]},
    "model": {"family": "logistic"},
    "sampler": {
        "num-rounds": 10,
        "local-steps": 2,
        "step-size": 1e-3,
        "num-chains": 2,
        "precision": "float64",
    },
}
PRIVATE = {**STUDY, "sampler": {**STUDY["sampler"], "clip-norm": 1.0}, "privacy": {"delta": 1e-5}}
FEW_ROUND = {**STUDY, "sampler": None}


class Coordinator:
    """Speaks to three sites by hand, so that it can lie to each."""

    def __init__(self, folder, secure=True, policy=None):
        rng = np.random.default_rng(0)
        self.workers, self.secure = {}, secure
        for name, size in zip(NAMES, SIZES):
            place = folder / name
            place.mkdir()
            rows = pd.DataFrame(rng.normal(size=(size, 2)), columns=["u", "v"])
            rows.assign(y=rng.integers(0, 2, size)).to_csv(place / "rows.csv", index=False)
            if policy is not None:
                (place / "POLICY.toml").write_text(policy)
            settings = SiteSettings(
                name, place / "state", place / "rows.csv", None if policy is None else place / "POLICY.toml"
            )
            self.workers[name] = SiteWorker(settings)

    def say(self, name, kind, values=None, arrays=None):
        return wire.unpack(self.workers[name].handle(wire.pack(kind, {**IDS, **(values or {})}, arrays)))

    def open(self, study=STUDY, for_others=None):
        """Open a study; ``for_others`` is what all sites but the first are told."""
        replies = {}
        for name in NAMES:
            told = study if name == "a" or for_others is None else for_others
            values = {"version": __version__, "study": without_none(told), "secure": self.secure}
            replies[name] = self.say(name, "open", values)
        return replies

    def begin(self, opened, *, sizes=None, start=None):
        """Introduce the sites; ``sizes`` and ``start`` by site where they are told different ones."""
        identities = {name: worker.identity.public for name, worker in self.workers.items()}
        hellos = {name: reply.values["hello"] for name, reply in opened.items()}
        replies = {}
        for name in NAMES:
            values = {
                "names": NAMES,
                "sizes": (sizes or {}).get(name, SIZES),
                "hellos": hellos if self.secure else None,
                "identities": identities,
            }
            arrays = {"start": (start or {}).get(name, START), "root": np.zeros(2, np.uint32)}
            replies[name] = self.say(name, "begin", values, arrays)
        return replies

    def round(self, weights=SHARES, position=START, number=1):
        arrays = {"weight": np.tile(np.asarray(weights, float), (2, 1)), "leaf_0": position}
        values = {"round": number, "attempt": 1, "leaves": 1, "saved": 0}
        return {name: self.say(name, "round", values, arrays) for name in NAMES}


def without_none(tree):
    return {key: value for key, value in tree.items() if value is not None}


class Steps:
    """In place of local steps, which take long to compile and are not what is attacked here."""

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


def kinds(replies):
    return [reply.kind for reply in replies.values()]


def summed(replies):
    assert kinds(replies) == ["reply"] * 3, [r.values for r in replies.values()]
    return unmask_sum([reply.arrays["masked"] for reply in replies.values()])


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
        assert reply.kind == "refusal"
        assert "shares of the rows" in reply.values["message"]


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


def test_sites_that_were_told_different_starts_give_noise(coordinator):
    coordinator.begin(coordinator.open(), start={"a": START, "b": START + 1, "c": START})
    with pytest.raises(SecureSumError, match="do not cancel"):
        summed(coordinator.round())


@pytest.mark.parametrize("study", [STUDY, PRIVATE], ids=["plain", "private"])
@pytest.mark.parametrize("secure", [True, False])
def test_chains_that_were_agreed_on_do_not_become_exact_sums(tmp_path, study, secure):
    """Otherwise a private study would give away gradients without noise."""
    coordinator = Coordinator(tmp_path, secure)
    assert kinds(coordinator.begin(coordinator.open(study))) == ["reply"] * 3
    reply = coordinator.say("a", "ask", {"round": 1, "attempt": 1}, {"states": START})
    assert reply.kind == "refusal"
    assert "takes no such requests" in reply.values["message"]


def test_a_private_study_does_not_give_away_curvature_when_it_is_opened(coordinator):
    reply = coordinator.open({**PRIVATE, "sampler": {**STUDY["sampler"], "method": "fsgld"}})["a"]
    assert reply.kind == "refusal"
    assert "no privacy accounting" in reply.values["message"]
    assert not reply.arrays


def test_few_round_requests_are_answered_where_they_were_agreed_on(coordinator, real_steps):
    coordinator.begin(coordinator.open(FEW_ROUND))
    asked = {"round": 1, "attempt": 1}
    replies = {name: coordinator.say(name, "ask", asked, {"states": START}) for name in NAMES}
    assert np.isfinite(summed(replies)).all()
    for reply in coordinator.round(number=2).values():
        assert reply.kind == "refusal"


def test_more_weight_than_was_accounted_for_is_refused_in_private_runs(tmp_path):
    coordinator = Coordinator(tmp_path, secure=False)
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
    opened = coordinator.open(tiny)
    assert kinds(opened) == ["reply"] * 3
    reply = coordinator.begin(opened)["a"]
    assert reply.kind == "refusal"
    assert "over all studies" in reply.values["message"]
    assert "over all studies" in (tmp_path / "a" / "state" / "site.log").read_text()
