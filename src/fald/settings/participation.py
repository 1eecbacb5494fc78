"""Who takes part in a round, and with what weight in the average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fald.calculus.gradients import choose_without_replacement
from fald.core.errors import ConfigError
from fald.core.keys import integers

Scheme = Literal["full", "with-replacement", "without-replacement"]


@dataclass(frozen=True)
class Participation:
    """How the devices of a round are chosen; made by the three functions below.

    Attributes
    ----------
    scheme
        ``"full"``, ``"with-replacement"`` (Scheme I) or ``"without-replacement"`` (Scheme II).
    num_participants
        S, the number of draws per round; ``None`` for full participation.
    allow_unequal
        Scheme II only: run although the client weights are unequal.
    """

    scheme: Scheme = "full"
    num_participants: int | None = None
    allow_unequal: bool = False

    def __post_init__(self):
        if isinstance(self.num_participants, np.integer):
            # a NumPy integer could not be written with the settings of a run
            object.__setattr__(self, "num_participants", int(self.num_participants))

    def check(self, sizes: np.ndarray) -> None:
        """Raise ``ConfigError`` if this participation does not fit clients of these sizes."""
        if self.scheme == "full":
            return
        num_clients, s = len(sizes), self.num_participants
        if not isinstance(s, int) or isinstance(s, bool) or s < 1:
            raise ConfigError(
                f"num-participants must be a whole number ≥ 1; got {s!r}",
                hint="it is S, the number of devices drawn per round",
            )
        if self.scheme == "without-replacement":
            if s > num_clients:
                raise ConfigError(
                    f"num-participants must be ≤ the number of clients without replacement; "
                    f"got {s} with {num_clients} clients",
                    hint=f"choose 1 to {num_clients}, or full participation",
                )
            if not self.allow_unequal and len(np.unique(sizes)) > 1:
                raise ConfigError(
                    f"drawing without replacement weighs every client 1/S, but the clients have "
                    f"{int(min(sizes))} to {int(max(sizes))} rows: the chain would sample another posterior",
                    hint="use with-replacement, full participation, or set allow-unequal if that is meant",
                )


def full() -> Participation:
    """Every client in every round, weight p_c = n_c / n.

    Examples
    --------
    >>> full().scheme
    'full'
    """
    return Participation("full")


def with_replacement(num_participants: int) -> Participation:
    """Scheme I: S draws, client c with probability p_c; weight = (times drawn) / S.

    Examples
    --------
    >>> with_replacement(3).num_participants
    3
    """
    return Participation("with-replacement", num_participants)


def without_replacement(num_participants: int, *, allow_unequal: bool = False) -> Participation:
    """Scheme II: S distinct clients, uniformly; weight = 1 / S.

    It targets the joint posterior only when all clients have equally many rows; otherwise it is
    refused unless ``allow_unequal`` is set.

    Examples
    --------
    >>> without_replacement(3).scheme
    'without-replacement'
    """
    return Participation("without-replacement", num_participants, allow_unequal)


def check_participation(given: Any) -> Participation | None:
    """Return what was given if it says who takes part, or None for everybody; or raise ``ConfigError``."""
    if given is None or isinstance(given, Participation):
        return given
    raise ConfigError(
        f"participation must be fald.full(), with_replacement(S) or without_replacement(S); got {given!r}"
    )


class Drawn(NamedTuple):
    """The participants of one round of one chain.

    ``client`` (slots,) are client indices in ascending order, ``weight`` (slots,) their weights in
    the average. A slot of weight zero is empty: a repeated draw in Scheme I.
    """

    client: jax.Array
    weight: jax.Array


def num_slots(participation: Participation, num_clients: int) -> int:
    """Most clients that can take part in one round."""
    if participation.scheme == "full":
        return num_clients
    assert participation.num_participants is not None
    return participation.num_participants


def draw(participation: Participation, rng_key: jax.Array, offsets: jax.Array) -> Drawn:
    """Draw the participants of one round, with the key of the participation stream of its chain.

    ``offsets`` (num_clients + 1,) are the first row of each client, and the number of rows: Scheme I draws a
    row and takes its client, so its probabilities are exactly n_c / n.
    """
    num_clients = offsets.shape[0] - 1
    dtype = jnp.zeros(()).dtype
    sizes = offsets[1:] - offsets[:-1]
    if participation.scheme == "full":
        return Drawn(
            jnp.arange(num_clients, dtype=jnp.int32), sizes.astype(dtype) / offsets[-1].astype(dtype)
        )
    s = num_slots(participation, num_clients)
    if participation.scheme == "without-replacement":
        chosen = jnp.sort(choose_without_replacement(rng_key, num_clients, s, most=num_clients))
        return Drawn(chosen, jnp.full((s,), 1.0 / s, dtype))
    rows = integers(rng_key, 0, s, offsets[-1])
    chosen = jnp.sort(jnp.searchsorted(offsets, rows, side="right") - 1).astype(jnp.int32)
    times = jnp.sum(chosen[:, None] == chosen[None, :], axis=1)
    first = jnp.concatenate([jnp.ones((1,), bool), chosen[1:] != chosen[:-1]])
    return Drawn(chosen, jnp.where(first, times, 0).astype(dtype) / s)
