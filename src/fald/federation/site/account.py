"""What a private run costs one site, computed and charged at the site.

The coordinator keeps its own account; a site does not rely on it. It charges its ledger for the whole study
before the first round, counts what it answers, and pays for more before it answers more: rounds that are
asked again after a crash, with fresh noise, are further releases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fald.core.errors import FederationError, PrivacyError
from fald.core.files import damaged, write_atomically
from fald.federation.site.ledger import SiteLedger
from fald.langevin.fald import FALD, private
from fald.langevin.registry import METHODS
from fald.langevin.safety import as_used
from fald.privacy import RunSettings, step_noise
from fald.privacy.accountants import ACCOUNTANTS
from fald.privacy.rounds import ClientLedger
from fald.settings.fald import Setting
from fald.settings.participation import full
from fald.study.schema import PrivacySection, SamplerSection, Study

_MORE = 100  # what is asked beyond the plan is charged by hundredths of it


class Account:
    """Pays for the releases of one run: a release is one upload of one chain.

    Parameters
    ----------
    ledger
        The site's ledger over all studies.
    run
        Name of the run, the same when it is resumed.
    path
        File in which the releases of the run are counted.
    cost
        ε after so many releases.
    delta
        δ at which that holds.
    planned
        Releases of the whole study.
    max_epsilon
        What the study itself may spend; None: no limit but the ledger's.
    """

    def __init__(
        self,
        ledger: SiteLedger,
        run: str,
        path: Path,
        cost: Callable[[int], float],
        *,
        delta: float,
        planned: int,
        max_epsilon: float | None = None,
    ):
        self._ledger, self._run, self._path, self._cost = ledger, run, path, cost
        self._delta, self._planned, self._max_epsilon = delta, planned, max_epsilon
        self._paid = ledger.charged(run).rounds

    def begin(self) -> float:
        """Charge for the whole study, or for as much as its own limit allows; ε charged so far.

        Raises
        ------
        PrivacyError
            If the ledger has not enough left; nothing is charged, and nothing may be answered.
        """
        if self._paid == 0 and not self._path.exists():
            self._count(0)  # before the charge: a crash in between costs nothing
        self._charge(max(self._paid, self._affordable(self._planned)))
        return self._ledger.charged(self._run).epsilon

    def pay(self, releases: int) -> float:
        """Count releases that are about to be made, after they are charged; ε charged so far.

        Raises
        ------
        PrivacyError
            If they would exceed the study's limit or the ledger's budget; they must not be made.
        """
        used = self.used + releases
        if used > self._paid:
            more = max(used, self._paid + max(1, self._planned // _MORE))
            self._charge(max(used, self._affordable(more)))
        self._count(used)
        return self._ledger.charged(self._run).epsilon

    @property
    def used(self) -> int:
        """Releases so far; all that were paid for, where nobody counted."""
        try:
            return int(json.loads(self._path.read_bytes())["releases"])
        except FileNotFoundError:
            return self._paid
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(self._path, error) from error

    def _count(self, releases: int) -> None:
        write_atomically(self._path, json.dumps({"releases": releases}).encode())

    def _affordable(self, releases: int) -> int:
        """The most releases, up to a number, within the study's own limit."""
        most = self._max_epsilon
        if most is None or self._cost(releases) <= most:
            return releases
        low, high = 0, releases
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._cost(middle) <= most else (low, middle)
        return low

    def _charge(self, releases: int) -> None:
        epsilon = self._cost(releases)
        if self._max_epsilon is not None and not epsilon <= self._max_epsilon * (1 + 1e-9):
            raise PrivacyError(
                f"the study's max-epsilon of {self._max_epsilon:g} is spent at this site",
                hint="rounds that a crash made void count as well; begin a new study with what is left",
            )
        self._paid = self._ledger.reserve(self._run, epsilon, self._delta, rounds=releases).rounds


def open_account(
    ledger: SiteLedger,
    run: str,
    folder: Path,
    study: Study,
    *,
    sizes: Sequence[int],
    site: int,
    sensitivity: float | None = None,
    colluders: int | None = None,
) -> Account:
    """The account of a site for a private study of plain FA-LD.

    Parameters
    ----------
    ledger, run
        As in ``Account``.
    folder
        The site's folder of the run.
    study
        The study; its ``[privacy]`` section sets δ and the limit.
    sizes, site
        Rows of all sites, and which of them this one is.
    sensitivity
        Δ where the model bounds gradients by declared feature bounds; not needed with ``clip-norm``.
    colluders
        Sites that may give their noise away, where only sums over sites are seen; None: this site counts on
        its own noise alone, whatever the others say of themselves.

    Raises
    ------
    PrivacyError
        If the study gives no privacy, or is none that a site can account for by itself.

    Notes
    -----
    All releases count as made with the first step of a schedule, which only falls, and as if chance had no
    part in who is asked, so the site's ε may exceed that of the coordinator's statement. An accountant of an
    installed package is not relied on.
    """
    asked, sampler, method = private_parts(study)
    part = None if sampler.participation == "full" else sampler.arguments()["participation"]
    alone = colluders is None or colluders >= len(sizes) - 1
    shared = 0 if alone or colluders is None else colluders
    share = 1.0 if part is None else part.num_participants / len(sizes)
    # of what is installed the study chooses, and not every package may tell enough
    accountant = asked.method if asked.method in ACCOUNTANTS.own else ACCOUNTANTS.own[0]

    def cost(releases: int) -> float:
        if releases == 0:
            return 0.0
        settings = RunSettings.of(
            Setting(participation=part or full(), **as_used(method)),
            sensitivity=sensitivity,
            sizes=list(sizes),
            num_rounds=releases,
        )
        noise = step_noise(settings, view="server" if alone else "summed", num_colluders=shared)
        # whoever asks knows that the site takes part: chance does not count
        own = ClientLedger(
            noise,
            site,
            np.ones((1, releases), int),
            delta=asked.delta,
            method=accountant,
            sampling="without-replacement",
        )
        return own.steps.epsilon(own.advance(None, 0, releases), asked.delta)

    return Account(
        ledger,
        run,
        folder / "releases.json",
        cost,
        delta=asked.delta,
        planned=math.ceil(share * sampler.num_rounds * sampler.num_chains),
        max_epsilon=asked.max_epsilon,
    )


def private_parts(study: Study) -> tuple[PrivacySection, SamplerSection, FALD]:
    """The sections of a private study, and its method, where a site can account for them.

    Raises
    ------
    PrivacyError
        If there are none, if the method is not FA-LD, if its noise is no secret, or if how much noise a site
        adds is left to chance.
    """
    if study.privacy is None or study.sampler is None:
        raise PrivacyError("the study has no [privacy] section")
    if study.privacy.client_noise != "entropy":
        raise PrivacyError(
            "the study's noise comes from a seed, which protects nobody",
            hint='client-noise = "entropy" in [privacy]',
        )
    if study.sampler.participation == "with-replacement":
        raise PrivacyError(
            "a site cannot account for rounds in which it is drawn several times",
            hint='use participation = "full" or "without-replacement"',
        )
    # the method as it will run: options of a study can set what its keys leave out
    method = private(study.sampler.build_method())
    if study.sampler.method not in METHODS.own:
        raise PrivacyError(
            f"a site accounts for no method of another package, as {study.sampler.method!r} is",
            hint=f"use one of: {', '.join(METHODS.own)}",
        )
    return study.privacy, study.sampler, method


def check_weights(study: Study, sizes: Sequence[int], site: int, weights: ArrayLike) -> int:
    """The releases of a round, from the weights that the coordinator gave this site in each chain.

    A site's noise follows its weight. A coordinator that overstates the weight would get less noise than was
    accounted for.

    Raises
    ------
    FederationError
        If a weight is neither zero nor that of the study.
    """
    _, sampler, _ = private_parts(study)
    w = np.asarray(weights, float)
    right = (
        sizes[site] / sum(sizes) if sampler.participation == "full" else 1 / (sampler.num_participants or 1)
    )
    taking = w != 0
    if not np.allclose(w[taking], right, rtol=1e-6, atol=0):
        raise FederationError(
            "the coordinator's weights are not those that the privacy of the study rests on"
        )
    return int(taking.sum())
