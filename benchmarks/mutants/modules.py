"""Which quick tests are asked to notice a slip in which module; paths from ``src`` and from ``tests``."""

from __future__ import annotations

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
    "fald/fewround/certify.py": ["fewround/test_certify.py"],
    "fald/fewround/weights.py": ["fewround/test_parts.py"],
    "fald/results/checks_of_draws.py": ["results/test_checks.py"],
    "fald/results/checks_of_model.py": ["results/test_checks.py"],
    "fald/results/judgement.py": ["results/test_checks.py"],
    "fald/settings/participation.py": ["settings/test_participation.py"],
}
