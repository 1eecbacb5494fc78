"""From events to ε: per client, after any number of rounds, at a given δ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from fald.core.errors import ConfigError, PrivacyError
from fald.privacy.accountants import ACCOUNTANTS, Steps
from fald.privacy.compose import Loss
from fald.privacy.events import StepNoise, View, step_noise
from fald.privacy.rounds import ClientLedger, Method, Sampling
from fald.privacy.settings import RunSettings

if TYPE_CHECKING:
    import xarray as xr

Shown = Literal["hidden", "realised"]
_Reading = Callable[[Steps, Loss], Any]
_SHAPE = ("num_clients", "local_steps", "num_rounds", "num_chains")
_NOISE = ("temperature", "correlation", "batch_size", "scheme", "num_participants", "noise")


@dataclass(frozen=True, eq=False)
class PrivacyReport:
    """What was accounted, how, and the ε that came out, an upper bound for each client's records at δ.

    ``rounds_taken_part`` are those of all chains, expected where participation is hidden, else counted;
    ``grid_interval`` is the width of the grid of privacy losses, NaN where "rdp" gave ε; ``rdp_order`` the
    Rényi order that gave it, NaN where "pld" did. Each is (N,).
    """

    epsilon: np.ndarray
    delta: float
    method: Method
    sampling: Sampling
    view: View
    num_colluders: int
    participation: Shown
    settings: RunSettings
    noise: StepNoise
    rounds_taken_part: np.ndarray
    grid_interval: np.ndarray
    rdp_order: np.ndarray

    @property
    def worst(self) -> float:
        """Largest ε of any client."""
        return float(np.max(self.epsilon))

    @property
    def worst_client(self) -> int:
        """Index of a client with the largest ε."""
        return int(np.argmax(self.epsilon))

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain numbers, lists and strings."""
        s, n, z = self.settings, self.noise, self.noise.multiplier
        eta = np.atleast_1d(s.step_size)
        columns = {
            "weight": s.weights,
            "batch_fraction": n.batch_fraction,
            "inclusion": n.inclusion,
            "rounds_taken_part": self.rounds_taken_part,
            "noise_multiplier": z if z.ndim == 1 else z.min(axis=1),
            "epsilon": self.epsilon,
            "grid_interval": self.grid_interval,
            "rdp_order": self.rdp_order,
        }
        clients = [
            {"client": c, "rows": rows, **{name: _plain(column[c]) for name, column in columns.items()}}
            for c, rows in enumerate(s.sizes)
        ]
        return {
            "epsilon": _plain(self.worst),
            "delta": self.delta,
            "worst_client": self.worst_client,
            "method": self.method,
            "upper_bound": True,
            "sampling": self.sampling if s.batch_size is not None else "all rows",
            "view": self.view,
            "num_colluders": self.num_colluders,
            "participation": self.participation,
            "settings": {
                **{name: getattr(s, name) for name in _SHAPE},
                "step_size_least": float(eta.min()),
                "step_size_largest": float(eta.max()),
                **{name: getattr(s, name) for name in _NOISE},
                "sensitivity": s.delta_gradient,
                "clip_norm": s.clip_norm,
            },
            "clients": clients,
        }


def _plain(value: float) -> float | str | None:
    return None if math.isnan(value) else "infinite" if math.isinf(value) else float(value)


class Ledger:
    """ε of every client after any number of rounds; build once, ask often.

    Parameters are those of ``account``; the rounds of ``settings`` are the most that can be asked for.
    Clients with equal weight, size and participation are computed once.

    Examples
    --------
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=10, num_rounds=1000, step_size=1e-7,
    ...                   batch_size=200, sensitivity=2.0)
    >>> ledger = Ledger(run, delta=1e-5)
    >>> round(ledger.worst(1000), 3), ledger.max_rounds(0.25)
    (0.506, 274)
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        delta: float,
        method: Method = "pld",
        sampling: Sampling = "without-replacement",
        view: View = "server",
        num_colluders: int = 0,
        participation: Shown = "hidden",
        times_drawn: ArrayLike | None = None,
    ):
        _check_options(delta, method, sampling, participation)
        self.settings, self.delta, self.method = settings, float(delta), method
        self.sampling: Sampling = sampling
        self.participation: Shown = participation
        self.noise = step_noise(settings, view=view, num_colluders=num_colluders)
        if sampling == "poisson" and settings.clip_norm is None and settings.batch_size is not None:
            raise PrivacyError(
                "Poisson sampling needs a bound on the norm of a row's gradient, not only on differences",
                hint="set clip-norm, or account for batches of fixed size: sampling 'without-replacement'",
            )
        self._times = self._drawn(times_drawn)
        self._ledgers: list[ClientLedger] = []
        self._which = np.zeros(settings.num_clients, int)
        seen: dict[Any, int] = {}
        for c in range(settings.num_clients):
            times = None if self._times is None else self._times[:, :, c]
            key = (settings.sizes[c], None if times is None else times.tobytes())
            if key not in seen:
                seen[key] = len(self._ledgers)
                how = {"delta": self.delta, "method": method, "sampling": sampling}
                self._ledgers.append(ClientLedger(self.noise, c, times, **how))
            self._which[c] = seen[key]
        self._last: dict[int, tuple[int, Loss]] = {}

    def _drawn(self, times_drawn: ArrayLike | None) -> np.ndarray | None:
        """(chains, rounds, clients) times drawn; ``None`` where chance decides."""
        s = self.settings
        shape = (s.num_chains, s.num_rounds, s.num_clients)
        if self.participation == "hidden":
            if times_drawn is not None:
                raise ConfigError("times-drawn is only read with participation 'realised'")
            return None
        if s.scheme == "full":
            return None if times_drawn is None else np.broadcast_to(np.asarray(times_drawn) > 0, shape) * 1
        if times_drawn is None:
            raise ConfigError(
                "participation 'realised' needs times-drawn: how often each client was drawn in each round"
            )
        times = np.asarray(times_drawn)
        if times.ndim == 1 and times.shape == (s.num_clients,):
            if self.noise.times_matter or self.noise.step.size > 1:
                raise ConfigError(
                    "counts of rounds per client are not enough here: the noise differs between rounds",
                    hint="give times-drawn as a table of rounds by clients",
                )
            rounds = s.num_chains * s.num_rounds
            if np.any(times < 0) or np.any(times > rounds):
                raise ConfigError(f"rounds taken part in must be between 0 and {rounds}; got {times}")
            return (np.arange(rounds)[:, None] < times).reshape(shape).astype(int)
        if times.ndim == 2 and s.num_chains == 1:
            times = times[None]
        if times.shape != shape or np.any(times < 0) or np.any(times != np.floor(times)):
            raise ConfigError(
                f"times-drawn must be whole numbers of shape {shape} (chains, rounds, clients), "
                f"{shape[1:]} for one chain, or {shape[2:]} rounds per client; got shape {times.shape}"
            )
        if np.any(times > (s.num_participants if s.scheme == "with-replacement" else 1)):
            raise ConfigError("times-drawn has a client drawn more often than the scheme can draw it")
        times = times.astype(int)
        return times if self.noise.times_matter else np.minimum(times, 1)

    def _loss(self, index: int, num_rounds: int) -> Loss:
        if self._ledgers[index].constant:  # at once, so that no order of questions changes a digit
            return self._ledgers[index].advance(None, 0, num_rounds)
        at, loss = self._last.get(index, (0, None))
        if at > num_rounds:
            at, loss = 0, None
        if loss is None or at < num_rounds:
            loss = self._ledgers[index].advance(loss, at, num_rounds)
            self._last[index] = (num_rounds, loss)
        return loss

    def _each(self, num_rounds: int | None, read: _Reading, idle: Any = 0.0) -> np.ndarray:
        """(N, …) what ``read`` finds in each client's loss; ``idle`` for one that reveals nothing."""
        most = self.settings.num_rounds
        rounds = most if num_rounds is None else num_rounds
        if not 0 <= rounds <= most:
            raise ConfigError(f"num-rounds must be between 0 and {most}; got {rounds}")
        values = [
            idle if led.idle or rounds == 0 else read(led.steps, self._loss(i, int(rounds)))
            for i, led in enumerate(self._ledgers)
        ]
        return np.array(values)[self._which]

    def epsilon(self, num_rounds: int | None = None) -> np.ndarray:
        """(N,) ε of each client after ``num_rounds`` rounds; all of them where not given."""
        return self._each(num_rounds, lambda steps, loss: steps.epsilon(loss, self.delta))

    def worst(self, num_rounds: int | None = None) -> float:
        """Largest ε of any client after ``num_rounds`` rounds."""
        return float(np.max(self.epsilon(num_rounds)))

    def delta_at(self, epsilon: float, num_rounds: int | None = None) -> np.ndarray:
        """(N,) δ that goes with a chosen ε after ``num_rounds`` rounds."""
        return self._each(num_rounds, lambda steps, loss: steps.delta(loss, float(epsilon)))

    def max_rounds(self, epsilon: float) -> int:
        """Most rounds, up to those of the settings, after which no client's ε exceeds ``epsilon``."""
        most = self.settings.num_rounds
        for led in self._ledgers:
            if led.idle:
                continue
            low, low_loss, high, probe = 0, None, most + 1, most  # often all rounds fit
            while high - low > 1:
                loss = led.advance(None, 0, probe) if led.constant else led.advance(low_loss, low, probe)
                if led.steps.epsilon(loss, self.delta) <= epsilon:
                    low, low_loss = probe, loss
                else:
                    high = probe
                probe = (low + high) // 2
            most = low
        return most

    def report(self, num_rounds: int | None = None) -> PrivacyReport:
        """ε after ``num_rounds`` rounds (all where not given), with everything it rests on.

        For a run that was stopped early this is the report to publish: its ε is the one by which
        ``max_rounds`` stopped it.
        """
        epsilon = self.epsilon(num_rounds)
        rounds = self.settings.num_rounds if num_rounds is None else int(num_rounds)
        settings = self.settings.first_rounds(rounds)
        if self._times is None:
            taken_part = self.noise.inclusion * rounds * settings.num_chains
        else:
            taken_part = np.sum(self._times[:, :rounds] > 0, axis=(0, 1)).astype(float)
        found = self._each(
            rounds, lambda steps, loss: steps.precision(loss, self.delta), (math.nan, math.nan)
        )
        return PrivacyReport(
            epsilon=epsilon,
            delta=self.delta,
            method=self.method,
            sampling=self.sampling,
            view=self.noise.view,
            num_colluders=self.noise.num_colluders,
            participation=self.participation,
            settings=settings,
            noise=step_noise(settings, view=self.noise.view, num_colluders=self.noise.num_colluders),
            rounds_taken_part=taken_part,
            grid_interval=found[:, 0],
            rdp_order=found[:, 1],
        )


def _check_options(delta: float, method: str, sampling: str, participation: str) -> None:
    if not 0 < delta < 1:
        hint = "Gaussian noise gives no guarantee with delta 0; choose well below 1 / (rows of a client)"
        raise ConfigError(f"delta must be between 0 and 1, both excluded; got {delta}", hint=hint)
    if sampling == "shuffled":
        raise PrivacyError(
            "batches from shuffled epochs are not independent draws: no amplification is proved for them",
            hint="draw a fresh batch at every step, or use all rows",
        )
    chosen = (
        ("method", method, tuple(ACCOUNTANTS)),
        ("sampling", sampling, get_args(Sampling)),
        ("participation", participation, get_args(Shown)),
    )
    for name, value, known in chosen:
        if value not in known:
            raise ConfigError(f"{name} must be {' or '.join(map(repr, known))}; got {value!r}")


def account(
    settings: RunSettings | xr.DataTree,
    *,
    delta: float,
    method: Method = "pld",
    sampling: Sampling = "without-replacement",
    view: View = "server",
    num_colluders: int = 0,
    participation: Shown = "hidden",
    times_drawn: ArrayLike | None = None,
) -> PrivacyReport:
    r"""ε of every client's records at a given δ.

    Two data sets are neighbours when one row of one client is replaced. Every local step is treated
    as if its result were seen (releasing less reveals less); a round of K steps happens with the
    probability q_c that the client takes part,

        E[e^{sL_run}] = Π_rounds ((1 − q_c) + q_c Π_k E[e^{sL_k}]),

    and ε is read off the composed loss at δ.

    Parameters
    ----------
    settings
        The run: its settings, or a result of ``fald.sample``.
    delta
        δ; choose it well below one over the number of rows of a client.
    method
        ``"pld"`` (tight) or ``"rdp"`` (looser, by other means). Where the first has no grid, for ε in
        the thousands or δ near 1e-12, the second is used, and the report says so.
    sampling
        ``"without-replacement"``: batches of fixed size, as the sampler draws them; ``"poisson"``:
        each row by its own coin, which needs ``clip_norm``.
    view, num_colluders
        ``"server"``: every upload is seen. ``"summed"``: only sums of uploads are, and so many sites may side
        with the server.
    participation
        ``"hidden"``: averaged over the random choice of clients, made independently of the data;
        ``"realised"``: given who did take part.
    times_drawn
        For ``"realised"``: how often each client was drawn, (rounds, clients), (chains, rounds,
        clients), or (clients,) rounds taken part in where all rounds are alike.

    Returns
    -------
    PrivacyReport
        Per-client ε, the worst, and everything they rest on. A run that gives no privacy (ρ = 1, τ = 0,
        unbounded gradients, shuffled batches) is a ``PrivacyError``.

    Notes
    -----
    Not guaranteed: anything about tuning on the same data, a start that depends on the data, noise
    whose seed others know, time or floating-point side channels. ``"hidden"`` holds even if the
    observer sees who took part, but only on average over that draw: it is no promise to a client
    that was drawn unusually often, and none at all where participants follow from a seed that was
    fixed beforehand. ``"realised"`` is right in both cases.

    Examples
    --------
    >>> run = RunSettings(sizes=[6000] * 10, local_steps=1, num_rounds=10_000, step_size=1e-6,
    ...                   batch_size=200, sensitivity=2.0)
    >>> report = account(run, delta=1e-5)
    >>> round(report.worst, 2)
    1.87
    """
    if not isinstance(settings, RunSettings):
        settings = RunSettings.from_tree(settings)
    seen = {"view": view, "num_colluders": num_colluders, "participation": participation}
    how = {"method": method, "sampling": sampling, "times_drawn": times_drawn}
    return Ledger(settings, delta=delta, **seen, **how).report()
