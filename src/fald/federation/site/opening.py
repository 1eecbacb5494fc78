"""What a site makes of a study that it is asked to open: what it asks, and how many were asked before."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fald.core.errors import PolicyError
from fald.core.files import locked, write_atomically
from fald.core.reveals import shows_curvature
from fald.federation.site.policy import Enquiry, Policy
from fald.fewround.methods import requests_of
from fald.fewround.site import answer_kinds
from fald.study.schema import Study, make_study

_DAY = 86400.0  # seconds
_LARGEST_MODEL = 10**8  # product of the counts among a model's options, about its parameters per feature
_MOST_FEATURES = 20_000  # encoded columns, one for every level but the first


class Openings:
    """How many runs of studies a site has looked at within a day, and how many did not fit its rows.

    Parameters
    ----------
    state
        The site's folder.
    policy
        Its limits.
    """

    def __init__(self, state: Path, policy: Policy):
        self._state, self._policy = state, policy

    def count_run(self, run: str, digest: str) -> None:
        """Refuse more runs within a day than the policy allows, each of a study by its digest.

        Whoever may choose studies freely can ask by many of them what a single one may not ask, and whoever
        has a site of its own can steer many runs of one study.
        """
        path, now, new = self._state / "studies.json", time.time(), f"{run} {digest}"
        with locked(path.with_suffix(".lock")):
            seen = {each: t for each, t in (read_json(path) or {}).items() if now - t < _DAY}
            if new not in seen and len(seen) >= self._policy.max_studies:
                raise _wait(f"it has looked at {len(seen)} runs of studies within a day (max-studies)")
            write_atomically(path, json.dumps({new: now, **seen}).encode())

    def check_failed(self) -> None:
        """Refuse a study after too many that did not fit the rows: each may have told a bit about them."""
        count = len(self._failed())
        if count >= self._policy.max_failed_opens:
            raise _wait(f"{count} studies did not fit its rows within a day (max-failed-opens)")

    def count_failed(self) -> None:
        """One more study did not fit the rows."""
        path = self._state / "failed.json"
        with locked(path.with_suffix(".lock")):
            write_atomically(path, json.dumps([*self._failed(), time.time()]).encode())

    def _failed(self) -> list[float]:
        times = read_json(self._state / "failed.json") or []
        return [t for t in times if time.time() - t < _DAY]


def _wait(why: str) -> PolicyError:
    return PolicyError(why, hint="wait, or ask the site to change its policy")


def read_json(path: Path) -> Any:
    """What a file holds; None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def _counts(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _counts(each)
    elif type(value) is int and value > 1:
        yield value


def remote_study(tree: Mapping[str, Any]) -> Study:
    """The study as a site may read it: without files, which are the coordinator's."""
    data = {k: v for k, v in tree["data"].items() if k not in ("file", "files", "site")}
    study = make_study({**tree, "data": data, "folder": "."}, "the coordinator's study")
    large = math.prod(_counts(study.model.options)) > _LARGEST_MODEL
    if large or len(study.encoded_features) > _MOST_FEATURES:
        raise PolicyError("the study's levels or options ask for more parameters than a site makes")
    return study


def enquiry_of(study: Study, secure: bool, sites: int) -> Enquiry:
    """What a study asks, as far as that can be said without a look at the rows."""
    s = study.sampler
    if s is None:
        kinds, sums, declared = answer_kinds(requests_of(study.fit.method, study.fit.curvature)), True, True
        counts = [1]
    else:
        about = s.build_method().about
        reveals = about.reveals
        # burn-in, samples, Newton steps: whatever a method counts is work
        counts = [
            s.local_steps,
            *(v for k, v in about.settings.items() if type(v) is int and k != "batch_size"),
        ]
        kinds, sums, declared = reveals.kinds, reveals.sums, reveals.declared
    return Enquiry(
        columns=(study.data.target, *study.data.features),
        family=study.model.family,
        method=study.fit.method if s is None else s.method,
        few_round=s is None,
        curvature=shows_curvature(kinds),
        sums=sums,
        declared=declared,
        secure_sum=secure,
        rounds=study.fit.max_rounds if s is None else s.num_rounds,
        chains=1 if s is None else s.num_chains,
        local_steps=max(counts),
        sites=sites,
        epsilon=None if study.privacy is None else study.privacy.max_epsilon,
        delta=None if study.privacy is None else study.privacy.delta,
    )
