r"""How privacy losses add up: composition, repetition, and chance.

Let L be the privacy loss of a mechanism. Everything an accountant uses is an expectation E[e^{sL}]:
at s = iω the Fourier transform of the loss distribution, at real s = α − 1 the Rényi divergence
(its logarithm is (α−1)·D_α). Mechanisms that run one after another multiply these expectations;
a mechanism that runs with probability q, and otherwise does nothing, has (1−q) + q·E[e^{sL}].

The last rule is where accounting for random participation is easily done wrong. It grants the
observer knowledge of who took part, and it shrinks δ, not ε: the published theorem's
ε → log(1 + q(e^ε − 1)) would need uploads of different clients to be hard to tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Loss(NamedTuple):
    """The privacy loss of a mechanism, as an accountant carries it."""

    transform: np.ndarray  # Fourier transform of the finite losses on the grid; empty where there is none
    log_moment: np.ndarray  # log E[e^{sL}] at the accountant's real orders s
    infinity: float  # upper bound on the probability of an infinite loss
    factors: float  # number of multiplications behind ``transform``, for a bound on round-off


def nothing(like: Loss) -> Loss:
    """The loss of a mechanism that reveals nothing."""
    return Loss(np.ones_like(like.transform), np.zeros_like(like.log_moment), 0.0, 0.0)


def together(losses: Iterable[Loss]) -> Loss:
    """Loss of mechanisms that all run, each free to depend on what the others revealed."""
    every = list(losses)
    if len(every) == 1:
        return every[0]
    transform = every[0].transform * every[1].transform
    for other in every[2:]:
        transform *= other.transform
    moment = np.sum([loss.log_moment for loss in every], axis=0)
    return Loss(transform, moment, sum(x.infinity for x in every), sum(x.factors for x in every))


def repeated(loss: Loss, count: int) -> Loss:
    """Loss of ``count`` independent runs of one mechanism."""
    if count == 1:
        return loss
    if count == 0:
        return nothing(loss)
    transform, moment, infinity, factors = loss
    return Loss(transform ** float(count), moment * count, infinity * count, factors * count)


def mixed(losses: Sequence[Loss], probabilities: Sequence[float]) -> Loss:
    """Loss of a mechanism drawn at random in the open; with the remaining probability, nothing runs."""
    pairs = [(loss, p) for loss, p in zip(losses, probabilities) if p > 0]
    losses, probabilities = [loss for loss, _ in pairs], [p for _, p in pairs]
    if len(losses) == 1 and probabilities[0] == 1:
        return losses[0]
    idle = max(0.0, 1.0 - float(sum(probabilities)))
    transform = probabilities[0] * losses[0].transform
    for loss, probability in zip(losses[1:], probabilities[1:]):
        transform += probability * loss.transform
    transform += idle
    logs = [loss.log_moment + np.log(probability) for loss, probability in zip(losses, probabilities)]
    if idle > 0:
        logs.append(np.full_like(losses[0].log_moment, np.log(idle)))
    return Loss(
        transform,
        np.logaddexp.reduce(np.stack(logs), axis=0),
        float(sum(p * loss.infinity for loss, p in zip(losses, probabilities))),
        max(loss.factors for loss in losses) + 1.0,
    )


def chord(first: Loss, second: Loss, share: float) -> Loss:
    """``mixed([first, second], [share, 1 − share])``, quickly: schedules need it at every step."""
    transform = first.transform - second.transform
    transform *= share
    transform += second.transform
    low = np.minimum(first.log_moment, second.log_moment)
    moment = share * np.exp(first.log_moment - low) + (1.0 - share) * np.exp(second.log_moment - low)
    return Loss(
        transform,
        low + np.log(moment),
        share * first.infinity + (1.0 - share) * second.infinity,
        max(first.factors, second.factors) + 1.0,
    )
