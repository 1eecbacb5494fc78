"""A site's policy: what it refuses, and how it says so."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from fald.core.errors import ConfigError, ExitCode, PolicyError
from fald.federation.site.policy import Enquiry, Policy, make_policy, policy_keys, read_policy

ASKED = Enquiry(
    columns=("outcome", "age", "sex"),
    family="logistic",
    method="auto",
    few_round=True,
    curvature=True,
    secure_sum=False,
    rounds=12,
    chains=4,
    rows=41,
    dim=3,
    sites=2,
)
PRIVATE = replace(ASKED, method="fa-ld", few_round=False, curvature=False, epsilon=1.0, delta=1e-6)

FULL = """
allowed-columns = ["outcome", "age", "sex", "site"]
allowed-models = ["logistic", "linear"]
allowed-methods = ["importance", "fa-ld"]
minimum-rows = 30
curvature = false
unsummed = false
max-rounds = 1000
max-chains = 16

[privacy]
required = true
max-epsilon = 2.0
delta = 1e-5
"""


def test_without_a_file_everything_is_allowed():
    policy = read_policy(None)
    policy.check(ASKED)
    policy.check(PRIVATE)
    assert policy == make_policy({}) == Policy()
    limits = ("max_rounds", "max_chains", "max_local_steps", "max_draws", "max_failed_opens", "max_studies")
    assert [getattr(policy, name) for name in limits] == [100_000, 1_000, 10_000, 262_144, 20, 100]
    assert (policy.max_seconds, policy.max_megabytes, policy.minimum_rows) == (120.0, 4096, 1)
    assert (policy.curvature, policy.audit, policy.unsummed) == (True, True, None)


def test_an_enquiry_that_says_no_more_asks_for_little():
    asked = Enquiry(("y",), "linear", "auto", True, False, False, 1, 1)
    assert (asked.rows, asked.dim, asked.local_steps, asked.sites) == (0, 0, 1, 0)
    assert (asked.epsilon, asked.delta, asked.sums, asked.declared) == (None, None, True, True)


@pytest.mark.parametrize(
    ("epsilon", "delta", "private"),
    [
        (1.0, 1e-6, True), (None, 1e-6, False), (1.0, None, False), (None, None, False),
        (float("inf"), 1e-6, False), (float("nan"), 1e-6, False),
    ],
)  # fmt: skip
def test_privacy_without_a_limit_is_none(epsilon, delta, private):
    assert replace(PRIVATE, epsilon=epsilon, delta=delta).private is private


def test_a_policy_does_not_change():
    policy = read_policy(None)
    with pytest.raises(ValidationError, match="frozen"):
        policy.minimum_rows = 0
    with pytest.raises(ValidationError, match="frozen"):
        policy.privacy.required = False


def test_file_is_read(tmp_path):
    path = tmp_path / "POLICY.toml"
    path.write_text(FULL)
    policy = read_policy(path)
    assert policy.minimum_rows == 30
    assert policy.privacy.max_epsilon == 2.0
    policy.check(replace(PRIVATE, secure_sum=True))


@pytest.mark.parametrize(
    ("tree", "key", "change"),
    [
        ({"allowed-columns": ["outcome", "age", "sex"]}, "column 'hiv'", {"columns": ("outcome", "hiv")}),
        (
            {"allowed-columns": ["outcome", "age", "sex"]},
            "columns 'dose', 'hiv'",
            {"columns": ("hiv", "dose")},
        ),
        ({"allowed-methods": ["auto"]}, "method 'nuts'", {"method": "nuts"}),
        ({"allowed-models": ["logistic"]}, "model 'poisson'", {"family": "poisson"}),
        ({"allowed-methods": ["auto"]}, "method 'fa-ld'", {"method": "fa-ld"}),
        ({"allowed-methods": ["importance", "corrected"]}, "method 'sgld'", {"method": "sgld"}),
        ({"max-local-steps": 4}, "5 local steps, more than 4", {"local_steps": 5}),
        ({"max-rounds": 12}, "13 rounds, more than 12", {"rounds": 13}),
        ({"max-chains": 4}, "5 chains, more than 4", {"chains": 5}),
    ],
)
def test_each_rule_refuses_what_it_forbids_and_nothing_else(tree, key, change):
    policy = make_policy(tree)
    policy.check(ASKED)
    with pytest.raises(PolicyError, match=key) as caught:
        policy.check(replace(ASKED, **change))
    assert f"({next(iter(tree))})" in str(caught.value)
    assert caught.value.exit_code == ExitCode.FEDERATION


@pytest.mark.parametrize(
    ("tree", "fits"),
    [({"curvature": False}, {"curvature": False}), ({"unsummed": False}, {"secure_sum": True})],
)
def test_switches_refuse_what_they_forbid(tree, fits):
    policy = make_policy(tree)
    policy.check(replace(ASKED, **fits))
    with pytest.raises(PolicyError, match=next(iter(tree))):
        policy.check(ASKED)


@pytest.mark.parametrize("method", ["fsgld", "consensus", "consensus-parametric", "laplace"])
def test_methods_that_send_curvature_count_as_such(method):
    asked = replace(ASKED, method=method, few_round=False, curvature=False)
    make_policy({"allowed-methods": [method]}).check(asked)
    with pytest.raises(PolicyError, match="second derivatives"):
        make_policy({"curvature": False}).check(asked)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"declared": False}, "'auto', which does not declare what it sends .reveals."),
        ({"secure_sum": True, "sums": False}, "uploads of 'auto', which are more than sums .secure-sum."),
    ],
)
def test_uploads_that_no_policy_allows(change, words):
    """More than sums may leave where they are not summed, and a sum of what is one may."""
    policy = make_policy({"unsummed": True})
    with pytest.raises(PolicyError, match=words):
        policy.check(replace(ASKED, **change))
    for fine in ({"secure_sum": True}, {"sums": False}, {}):
        policy.check(replace(ASKED, **fine))


def test_a_few_round_method_may_be_called_like_one_that_sends_curvature():
    """What requests show is said by the requests; only rounds of a method are judged by its name."""
    asked = replace(ASKED, method="laplace", few_round=True, curvature=False)
    make_policy({"curvature": False}).check(asked)
    with pytest.raises(PolicyError, match="second derivatives"):
        make_policy({"curvature": False}).check(replace(asked, few_round=False))
    # of a method that is not known here only the enquiry says what it sends
    make_policy({"curvature": False}).check(replace(asked, method="package:method", few_round=False))


@pytest.mark.parametrize(
    ("family", "named", "allowed"),
    [
        ("logistic", None, True), ("package:model", None, False), ("package:model", ["package:model"], True),
        ("package:other", ["package:model"], False), ("logistic", ["package:model"], False),
    ],
)  # fmt: skip
def test_models_of_packages_must_be_named(family, named, allowed):
    policy = make_policy({} if named is None else {"allowed-models": named})
    for check, asked in ((policy.check_model, family), (policy.check, replace(ASKED, family=family))):
        if allowed:
            check(asked)
        else:
            with pytest.raises(PolicyError, match=rf"the model '{family}' \(allowed-models\)"):
                check(asked)


def test_a_method_chosen_later_needs_all_that_may_be_chosen():
    make_policy({"allowed-methods": ["importance", "corrected"]}).check(ASKED)
    make_policy({"allowed-methods": ["auto"]}).check(replace(ASKED, method="corrected"))
    for few in (["importance", "fa-ld"], ["corrected"], ["fa-ld"], []):
        with pytest.raises(PolicyError, match="method 'auto'"):
            make_policy({"allowed-methods": few}).check(ASKED)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"epsilon": None, "delta": None}, "without differential privacy"),
        ({"epsilon": None}, "sets no limit to its ε"),
        ({"epsilon": float("inf")}, "privacy.required"),
        ({"epsilon": float("nan")}, "privacy.required"),
        ({"epsilon": 2.1}, "ε = 2.1, more than 2 .privacy.max-epsilon"),
        ({"delta": 1e-4}, "δ = 0.0001, more than 1e-05 .privacy.delta"),
    ],
)
def test_privacy_that_the_site_insists_on(change, key):
    policy = make_policy({"privacy": {"max-epsilon": 2.0, "delta": 1e-5}})
    assert policy.privacy.required
    policy.check(PRIVATE)
    policy.check(replace(PRIVATE, epsilon=2.0, delta=1e-5))  # the limits themselves
    with pytest.raises(PolicyError, match=key):
        policy.check(replace(PRIVATE, **change))


def test_limits_of_privacy_hold_where_it_is_not_required():
    """A site may name δ alone: then a study that promises privacy is held to it, and others are not."""
    policy = make_policy({"privacy": {"delta": 1e-5}})
    assert not policy.privacy.required
    policy.check(ASKED)
    policy.check(replace(PRIVATE, epsilon=1e3))
    with pytest.raises(PolicyError, match=r"\(privacy\.delta\)"):
        policy.check(replace(PRIVATE, delta=1.1e-5))
    make_policy({}).check(replace(PRIVATE, delta=0.5))


def test_rows_are_counted_after_everything_else_was_allowed():
    policy = make_policy({"minimum-rows": 41})
    policy.check(replace(ASKED, rows=0))
    policy.check_rows(ASKED)
    with pytest.raises(PolicyError, match="minimum-rows"):
        policy.check_rows(replace(ASKED, rows=40))


@pytest.mark.parametrize(("sites", "allowed"), [(2, True), (3, False), (0, False), (1, True)])
def test_uploads_of_single_sites_are_for_two_of_them_by_default(sites, allowed):
    asked = replace(ASKED, secure_sum=False, sites=sites)
    assert allowed == (make_policy({})._refused_uploads(asked) == [])
    make_policy({"unsummed": True}).check(asked)
    make_policy({}).check(replace(asked, secure_sum=True))


def test_a_refusal_has_all_reasons_and_no_number_of_rows(tmp_path):
    path = tmp_path / "POLICY.toml"
    path.write_text(FULL.replace("30", "977"))
    with pytest.raises(PolicyError) as caught:
        read_policy(path).check(replace(ASKED, columns=("outcome", "hiv"), rounds=5000))
    text = str(caught.value)
    for key in policy_keys():
        if key in ("allowed-columns", "allowed-methods", "curvature", "unsummed", "max-rounds"):
            assert f"({key})" in text
    assert "(privacy.required)" in text
    assert "41" not in text
    assert "977" not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("change", "warned"),
    [
        ({"rows": 5}, True),
        ({"rows": 6}, False),
        ({"rows": 20, "dim": 20}, True),
        ({"rows": 21, "dim": 20}, False),
        ({"rows": 5, "secure_sum": True}, False),
        ({"rows": 5, "epsilon": 1.0, "delta": 1e-6}, False),
        ({"rows": 5, "epsilon": float("inf"), "delta": 1e-6}, True),
    ],
)
def test_sites_with_few_rows_are_warned(change, warned):
    assert bool(Policy().warnings(replace(ASKED, **change))) == warned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("minimum-row = 3", "unknown key 'minimum-row'.*\n.*did you mean 'minimum-rows'"),
        ("[privacy]\nepsilon = 1", "unknown key 'privacy.epsilon'"),
        ("max_rounds = 3", "unknown key 'max_rounds'.*\n.*did you mean 'max-rounds'"),
        ("xyzzy = 1", "unknown key 'xyzzy'.*\n.*keys: allowed-columns, .*privacy.required"),
        ("minimum-rows = 0\nminimum-row = 3", "unknown key 'minimum-row'"),
        ("privacy = 3", "privacy: .*; got 3"),
        ("max-rounds = [1]", r"max-rounds: [^\[]*integer \("),
        ("max-seconds = 0", "max-seconds: .*greater than 0"),
        ("max-seconds = 86401", "max-seconds: .*less than or equal to 86400"),
        ("[privacy]\ncolluders = -1", "privacy.colluders: .*greater than or equal to 0"),
        ("[privacy]\ndelta = 1.0", "privacy.delta: .*less than 1"),
        ("[privacy]\ndelta = 0.0", "privacy.delta: .*greater than 0"),
        ("minimum-rows = 0", "minimum-rows: .* greater than or equal to 1; got 0"),
        ("curvature = 'perhaps'", "curvature: .*boolean"),
        ("allowed-models = ['logistc']", "allowed-models: 'logistc' is not known; did you mean 'logistic'"),
        ("allowed-methods = ['nuts']", "allowed-methods: 'nuts' is not known"),
        ("allowed-models = ['package']", "allowed-models: 'package' is not known"),
        ("[privacy]\nmax-epsilon = 1.0", "privacy: 'max-epsilon' needs 'delta'"),
        ("[privacy]\nrequired = true\ndelta = 1e-5", "'required' needs 'max-epsilon'"),
        (
            "[privacy]\nmax-epsilon = 1.0\ndelta = 1e-5\nrequired = false",
            "is no budget while studies without",
        ),
        ("[privacy]\nmax-epsilon = inf\ndelta = 1e-5", "privacy.max-epsilon: .*finite"),
        ("[privacy]\nmax-epsilon = -1\ndelta = 1e-5", "privacy.max-epsilon: .*greater than 0"),
        ("= 3", "not valid TOML"),
    ],
)
def test_a_policy_with_mistakes_is_not_used(tmp_path, text, message):
    path = tmp_path / "POLICY.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_policy(path)
    assert "POLICY.toml" in str(caught.value)


def test_models_of_packages_that_are_not_installed_may_be_allowed(tmp_path):
    path = tmp_path / "POLICY.toml"
    path.write_text("allowed-models = ['package:größe']\n", encoding="utf-8")
    assert read_policy(path).allowed_models == ["package:größe"]
    with pytest.raises(ConfigError, match="allowed-methods: 'package:model' is not known"):
        make_policy({"allowed-methods": ["package:model"]})


@pytest.mark.parametrize("key", [k for k in policy_keys() if k.startswith("max-")])
def test_limits_may_be_one_and_not_less(key):
    least = {"max-seconds": 1e-3}.get(key, 1)
    assert getattr(make_policy({key: least}), key.replace("-", "_")) == least
    with pytest.raises(ConfigError, match=key):
        make_policy({key: 0})


def test_borders_of_privacy_may_be_taken():
    section = {"max-epsilon": 1e-9, "delta": 0.999, "colluders": 0}
    assert make_policy({"max-seconds": 86400, "privacy": section}).privacy.colluders == 0


def test_a_missing_policy_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the policy"):
        read_policy(tmp_path / "none.toml")


def test_every_key_is_documented():
    page = Path(__file__).parents[2] / "docs" / "reference" / "site-policy.md"
    text = page.read_text(encoding="utf-8")
    assert [key for key in policy_keys() if f"`{key}`" not in text] == []
