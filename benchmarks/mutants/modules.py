"""Which quick tests are asked to notice a slip in which module; paths from ``src`` and from ``tests``."""

from __future__ import annotations

_CHECKS = [
    f"results/test_checks.py::{name}"
    for name in (
        "test_a_healthy_result_has_no_problem",
        "test_colours_change_at_their_borders",
        "test_fit_of_the_model",
        "test_outcomes_of_a_site",
        "test_verdict_modes_and_target",
        "test_without_rows_the_checks_of_rows_say_that_they_were_not_made",
    )
]

TESTS: dict[str, list[str]] = {
    "fald/federation/wire.py": ["federation/test_wire.py"],
    "fald/federation/site/policy.py": ["federation/test_policy.py"],
    "fald/federation/site/worker.py": ["federation/test_site_table.py"],
    "fald/federation/site/run.py": ["federation/test_site_table.py"],
    "fald/federation/site/langevin.py": ["federation/test_site_table.py"],
    "fald/core/reveals.py": ["federation/test_site_table.py"],
    "fald/federation/site/ledger.py": ["federation/test_ledger.py"],
    "fald/federation/site/account.py": ["federation/test_account.py"],
    "fald/federation/secure/session.py": ["federation/test_secure.py"],
    "fald/federation/secure/fixed_point.py": ["federation/test_secure.py"],
    "fald/federation/secure/identity.py": ["federation/test_secure.py"],
    "fald/fewround/certify.py": ["fewround/test_certify_borders.py", "fewround/test_certify.py"],
    "fald/fewround/weights.py": ["fewround/test_weights.py"],
    "fald/results/checks_of_draws.py": ["results/test_check_borders.py", *_CHECKS],
    "fald/results/checks_of_model.py": ["results/test_check_borders.py", *_CHECKS],
    "fald/results/judgement.py": ["results/test_check_borders.py", *_CHECKS],
    "fald/settings/participation.py": ["settings/test_participation.py"],
    "fald/langevin/method.py": ["langevin/test_local_parts.py"],
    "fald/langevin/fald.py": ["langevin/test_local_parts.py"],
    "fald/langevin/noise.py": ["langevin/test_local_parts.py"],
    "fald/langevin/server.py": ["langevin/test_local_parts.py"],
    "fald/langevin/guard.py": ["privacy/test_privacy_combinations.py"],
    "fald/privacy/accountant.py": [
        "privacy/test_privacy_combinations.py",
        "privacy/test_privacy_refusals.py",
    ],
    "fald/privacy/events.py": ["privacy/test_privacy_combinations.py"],
    "fald/privacy/rounds.py": ["privacy/test_privacy_combinations.py"],
    "fald/privacy/compose.py": ["privacy/test_privacy_combinations.py"],
    "fald/privacy/settings.py": ["privacy/test_privacy_refusals.py", "privacy/test_privacy_combinations.py"],
    "fald/privacy/pld.py": ["privacy/test_privacy_profile.py", "privacy/test_privacy_combinations.py"],
    "fald/privacy/rdp.py": ["privacy/test_privacy_combinations.py"],
    "fald/privacy/calibration.py": ["privacy/test_privacy_combinations.py"],
}
