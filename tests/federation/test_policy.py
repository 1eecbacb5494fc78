"""A site's policy: what it refuses, and how it says so."""

from dataclasses import replace
from pathlib import Path

import pytest

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
    limits = ("max_rounds", "max_chains", "max_local_steps", "max_failed_opens", "max_studies")
    assert [getattr(policy, name) for name in limits] == [100_000, 1_000, 10_000, 20, 100]
    assert (policy.max_seconds, policy.max_megabytes, policy.minimum_rows) == (120.0, 4096, 1)
    assert (policy.curvature, policy.audit, policy.unsummed) == (True, True, None)


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


def test_a_method_chosen_later_needs_all_that_may_be_chosen():
    make_policy({"allowed-methods": ["importance", "corrected"]}).check(ASKED)
    make_policy({"allowed-methods": ["auto"]}).check(replace(ASKED, method="corrected"))
    with pytest.raises(PolicyError, match="method 'auto'"):
        make_policy({"allowed-methods": ["importance", "fa-ld"]}).check(ASKED)


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


def test_rows_are_counted_after_everything_else_was_allowed():
    policy = make_policy({"minimum-rows": 41})
    policy.check(replace(ASKED, rows=0))
    policy.check_rows(ASKED)
    with pytest.raises(PolicyError, match="minimum-rows"):
        policy.check_rows(replace(ASKED, rows=40))


@pytest.mark.parametrize(("sites", "allowed"), [(2, True), (3, False), (0, False)])
def test_uploads_of_single_sites_are_for_two_of_them_by_default(sites, allowed):
    asked = replace(ASKED, secure_sum=False, sites=sites)
    assert allowed == (make_policy({})._refused_uploads(asked) == [])
    make_policy({"unsummed": True}).check(asked)


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


def test_a_missing_policy_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the policy"):
        read_policy(tmp_path / "none.toml")


def test_every_key_is_documented():
    page = Path(__file__).parents[2] / "docs" / "reference" / "site-policy.md"
    text = page.read_text(encoding="utf-8")
    assert [key for key in policy_keys() if f"`{key}`" not in text] == []
