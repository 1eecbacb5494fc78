"""What a private run costs a site: the accountant's ε, charged before it is spent, never twice."""

from types import SimpleNamespace

import numpy as np
import pytest

from fald.core.errors import FederationError, PrivacyError, StorageError
from fald.federation.site.account import Account, check_weights, open_account, private_parts
from fald.federation.site.ledger import SiteLedger
from fald.langevin.fald import fald
from fald.langevin.registry import METHODS
from fald.privacy import RunSettings, account
from fald.privacy.accountants import ACCOUNTANTS
from fald.study.schema import make_study

SIZES = [400, 600, 1000]
TREE = {
    "data": {"files": {"a": "a.csv"}, "target": "y", "features": ["x"]},
    "model": {"family": "logistic"},
    "sampler": {"num-rounds": 50, "local-steps": 2, "step-size": 1e-5, "num-chains": 2, "clip-norm": 1.0},
    "privacy": {"delta": 1e-5},
}


STEP = float(np.float32(1e-5))  # as the sampler has it


def study(sampler=None, **privacy):
    return make_study(
        {
            **TREE,
            "sampler": {**TREE["sampler"], **(sampler or {})},
            "privacy": {**TREE["privacy"], **{k.replace("_", "-"): v for k, v in privacy.items()}},
        },
        "test",
    )


def simple(tmp_path, *, planned=100, max_epsilon=None, budget=10.0, run="run"):
    """An account with ε = releases / 100."""
    ledger = SiteLedger(tmp_path / "ledger.jsonl", budget, 1e-4)
    return Account(
        ledger,
        run,
        tmp_path / f"{run}.json",
        lambda n: n / 100,
        delta=1e-6,
        planned=planned,
        max_epsilon=max_epsilon,
    )


@pytest.mark.parametrize("site", [0, 2])
@pytest.mark.parametrize("colluders", [None, 0, 1, 2])
def test_cost_is_that_of_the_accountant(tmp_path, site, colluders):
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    open_account(ledger, "run", tmp_path, study(), sizes=SIZES, site=site, colluders=colluders).begin()
    settings = RunSettings(
        sizes=SIZES, local_steps=2, num_rounds=50, step_size=STEP, num_chains=2, clip_norm=1.0
    )
    honest = {0: {"view": "summed"}, 1: {"view": "summed", "num_colluders": 1}}.get(colluders, {})
    expected = account(settings, delta=1e-5, **honest).epsilon[site]
    assert ledger.charged("run").epsilon == pytest.approx(expected, rel=1e-9)
    assert ledger.charged("run").rounds == 100


def test_a_model_whose_gradients_are_bounded_needs_no_norm(tmp_path):
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    sampler = {k: v for k, v in TREE["sampler"].items() if k != "clip-norm"}
    free = make_study({**TREE, "sampler": sampler}, "test")
    open_account(ledger, "run", tmp_path, free, sizes=SIZES, site=0, sensitivity=0.7).begin()
    settings = RunSettings(
        sizes=SIZES, local_steps=2, num_rounds=50, step_size=STEP, num_chains=2, sensitivity=0.7
    )
    expected = account(settings, delta=1e-5).epsilon[0]
    assert ledger.charged("run").epsilon == pytest.approx(expected, rel=1e-9)


def test_the_accountant_of_another_package_is_not_relied_on(tmp_path, monkeypatch):
    """The study names it, and with it the coordinator: it may say that nothing is spent."""
    nothing = SimpleNamespace(steps=lambda *given: pytest.fail("asked"))
    point = SimpleNamespace(load=lambda: nothing, value="outside:nothing", dist=None)
    monkeypatch.setitem(ACCOUNTANTS._found, "nothing", [point])
    charged = []
    for name in ("pld", "nothing"):
        (tmp_path / name).mkdir()
        ledger = SiteLedger(tmp_path / name / "ledger.jsonl")
        open_account(ledger, "run", tmp_path / name, study(method=name), sizes=SIZES, site=0).begin()
        charged.append(ledger.charged("run").epsilon)
    assert charged[0] == charged[1] > 0


def test_cost_does_not_count_on_chance(tmp_path):
    """A site that is drawn is charged for it, whatever the odds were."""
    some = {"participation": "without-replacement", "num-participants": 2, "allow-unequal": True}
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    open_account(ledger, "run", tmp_path, study(some), sizes=SIZES, site=0).begin()
    assert ledger.charged("run").rounds == 67
    settings = RunSettings(
        sizes=SIZES,
        local_steps=2,
        num_rounds=67,
        step_size=STEP,
        clip_norm=1.0,
        participation=study(some).sampler.arguments()["participation"],
    )
    exact = account(
        settings, delta=1e-5, participation="realised", times_drawn=np.ones((67, 3), int)
    ).epsilon[0]
    assert ledger.charged("run").epsilon == pytest.approx(exact, rel=1e-9)
    assert exact > 1.05 * account(settings, delta=1e-5).epsilon[0]


def test_a_decaying_step_is_charged_at_its_first(tmp_path):
    decay = study({"step-size": {"smoothness": 5e4, "strong-convexity": 1e4}})
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    open_account(ledger, "decay", tmp_path, decay, sizes=SIZES, site=0).begin()
    open_account(ledger, "constant", tmp_path, study(), sizes=SIZES, site=0).begin()
    assert ledger.charged("decay").epsilon == ledger.charged("constant").epsilon


def test_the_whole_study_is_charged_before_it_begins(tmp_path):
    one = simple(tmp_path)
    one.begin()
    assert SiteLedger(tmp_path / "ledger.jsonl").charged("run")[:] == (1.0, 1e-6, 100)
    for _ in range(50):
        one.pay(2)
    assert one.used == 100
    assert SiteLedger(tmp_path / "ledger.jsonl").charged("run").rounds == 100


def test_a_study_beyond_the_budget_does_not_begin(tmp_path):
    simple(tmp_path, budget=1.5, run="first").begin()
    second = simple(tmp_path, budget=1.5, run="second")
    with pytest.raises(PrivacyError, match=r"ε = 0.5 and"):
        second.begin()
    with pytest.raises(PrivacyError, match=r"ε = 0.5 and"):
        simple(tmp_path, budget=1.5, run="third").pay(60)
    assert "second" not in SiteLedger(tmp_path / "ledger.jsonl").charges()


def test_after_a_crash_only_repeated_releases_cost_more(tmp_path):
    first = simple(tmp_path)
    first.begin()
    for _ in range(30):
        first.pay(2)
    again = simple(tmp_path)  # the coordinator's checkpoint was at 40 releases, the site had answered 60
    again.begin()
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    assert ledger.charged("run").rounds == 100
    for _ in range(30):
        again.pay(2)
    assert again.used == ledger.charged("run").rounds == 120
    assert ledger.charged("run").epsilon == pytest.approx(1.2)


def test_where_nobody_counted_all_that_was_paid_is_used(tmp_path):
    first = simple(tmp_path)
    first.begin()
    first.pay(2)
    (tmp_path / "run.json").unlink()
    again = simple(tmp_path)
    again.begin()
    assert again.used == 100
    again.pay(2)
    assert SiteLedger(tmp_path / "ledger.jsonl").charged("run").rounds == 102


def test_a_damaged_count_stops_the_site(tmp_path):
    one = simple(tmp_path)
    one.begin()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(StorageError):
        one.pay(1)


def test_a_count_without_a_charge_is_kept(tmp_path):
    (tmp_path / "run.json").write_text('{"releases": 3}')  # of a ledger that is gone
    one = simple(tmp_path)
    one.begin()
    assert one.used == 3


@pytest.mark.parametrize(("planned", "more"), [(500, 5), (100, 1), (7, 1)])
def test_what_goes_beyond_the_plan_is_charged_by_hundredths_of_it(tmp_path, planned, more):
    one = simple(tmp_path, planned=planned)
    one.begin()
    one.pay(planned)
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    assert ledger.charged("run").rounds == planned
    one.pay(1)
    assert ledger.charged("run").rounds == planned + more
    one.pay(more + 20)
    assert ledger.charged("run").rounds == one.used == planned + more + 21


@pytest.mark.parametrize("limit", [0.005, 0.01, 0.0199, 0.02, 0.03, 0.04, 0.99, 1.0])
def test_as_much_is_charged_as_the_limit_of_the_study_allows(tmp_path, limit):
    simple(tmp_path, max_epsilon=limit).begin()
    expected = max(n for n in range(101) if n / 100 <= limit)
    assert SiteLedger(tmp_path / "ledger.jsonl").charged("run").rounds == expected


def test_rounding_errors_do_not_end_a_study(tmp_path):
    one = simple(tmp_path, planned=1, max_epsilon=0.03 * (1 - 1e-12))
    one.begin()
    one.pay(3)
    assert one.used == 3
    with pytest.raises(PrivacyError, match="is spent"):
        simple(tmp_path, run="other", planned=1, max_epsilon=0.03 * (1 - 1e-8)).pay(3)


def test_a_limit_below_one_release_charges_nothing(tmp_path):
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    one = open_account(ledger, "run", tmp_path, study(max_epsilon=1e-3), sizes=SIZES, site=0)
    one.begin()
    assert ledger.charged("run").epsilon == 0.0
    with pytest.raises(PrivacyError, match="is spent"):
        one.pay(1)


def test_the_limit_of_the_study_ends_it(tmp_path):
    one = simple(tmp_path, max_epsilon=0.255)
    one.begin()
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    assert ledger.charged("run").rounds == 25
    one.pay(24)
    one.pay(1)
    with pytest.raises(PrivacyError, match=r"max-epsilon of 0.255 is spent"):
        one.pay(1)
    assert one.used == ledger.charged("run").rounds == 25


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda: study(client_noise="seeded"), "protects nobody"),
        (lambda: study({"participation": "with-replacement", "num-participants": 2}), "drawn several times"),
        (
            lambda: make_study({k: v for k, v in TREE.items() if k != "privacy"}, "test"),
            "no .privacy. section",
        ),
    ],
)
def test_studies_that_a_site_cannot_account_for_are_refused(changed, message):
    with pytest.raises(PrivacyError, match=message):
        private_parts(changed())


def test_what_runs_is_what_is_accounted_for(tmp_path):
    """Options set what the keys of the section leave out."""
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    open_account(ledger, "hot", tmp_path, study(), sizes=SIZES, site=0).begin()
    open_account(
        ledger, "cold", tmp_path, study({"options": {"temperature": 0.25}}), sizes=SIZES, site=0
    ).begin()
    assert ledger.charged("cold").epsilon > 1.5 * ledger.charged("hot").epsilon


def test_a_method_of_another_package_is_not_accounted_for(monkeypatch):
    """Whatever it declares: what it adds to its uploads is not known here."""
    point = SimpleNamespace(load=lambda: fald, value="outside:fald", dist=None)
    monkeypatch.setitem(METHODS._found, "other", [point])
    private_parts(study())  # the twin: the same function under its own name
    with pytest.raises(PrivacyError, match="no method of another package"):
        private_parts(study({"method": "other"}))


@pytest.mark.parametrize("method", ["fsgld", "laplace", "scaffold-2"])
def test_methods_without_accounting_are_refused(method):
    sampler = {"method": method, "num-rounds": 5}
    if method != "laplace":
        sampler |= {"local-steps": 2, "step-size": 1e-5}
    with pytest.raises(PrivacyError, match="no privacy accounting"):
        private_parts(make_study({**TREE, "sampler": sampler}, "test"))


def test_unbounded_gradients_are_refused(tmp_path):
    tree = {**TREE, "sampler": {k: v for k, v in TREE["sampler"].items() if k != "clip-norm"}}
    with pytest.raises(PrivacyError, match="sensitivity is infinite"):
        open_account(
            SiteLedger(tmp_path / "l"), "run", tmp_path, make_study(tree, "test"), sizes=SIZES, site=0
        ).begin()


def test_weights_must_be_those_that_were_accounted_for():
    some = study({"participation": "without-replacement", "num-participants": 2, "allow-unequal": True})
    assert check_weights(study(), SIZES, 0, np.float32([0.2, 0.2])) == 2
    assert check_weights(some, SIZES, 0, [0.5, 0.0]) == 1
    assert check_weights(some, SIZES, 0, [0.0, 0.0]) == 0
    for s, weights in [
        (study(), [0.2, 1.0]),
        (study(), [0.21, 0.2]),
        (some, [1.0, 0.5]),
        (study(), [np.nan, 0.2]),
    ]:
        with pytest.raises(FederationError, match="weights are not those"):
            check_weights(s, SIZES, 0, weights)
