"""What leaves a client: kinds of numbers, each with a shape and a sentence, and a declaration made of them.

Everything that sends numbers computed from rows declares them here in one vocabulary. A site compares the
arrays that it is about to send with the declaration, its policy decides by it, and reports put it into words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fald.core.errors import PolicyError


@dataclass(frozen=True)
class KindOfNumber:
    """One kind of number.

    Attributes
    ----------
    says
        What it is, as a report says it: "a client sends …".
    axes
        How many axes of the length of the parameters an array of it has.
    curvature
        Whether it is, or contains, second derivatives over the client's rows.
    grid
        Binary digits after the point that leave a site in a sum, see ``fald.fewround.rounding``; None: all.
    power
        Power of the parameters' units in it, for each axis: 1 of a position, −1 of a derivative.
    """

    says: str
    axes: int
    curvature: bool = False
    grid: int | None = None
    power: int = 0


KINDS: Mapping[str, KindOfNumber] = {
    "nothing": KindOfNumber("zeros in the place of a number that it keeps", 0),
    "count": KindOfNumber("how many bytes and gradients its round took", 0),
    "value": KindOfNumber("its log likelihood at given parameters", 0, grid=12),
    "point": KindOfNumber("the parameters at which it was asked", 1),
    "position": KindOfNumber("where its own steps ended", 1),
    "quantised": KindOfNumber("where its own steps or its gradient lead, rounded to few levels", 1),
    "whitened": KindOfNumber("where its own steps ended, in posterior sds", 1, grid=20),
    "squares": KindOfNumber(
        "sums over its rows of squared derivatives, one for each parameter", 1, curvature=True, power=-2
    ),
    "gradient": KindOfNumber("the gradient over its rows", 1, grid=12, power=-1),
    "shift": KindOfNumber("the linear term of a Gaussian fitted to its rows", 1, grid=12, power=-1),
    "mode": KindOfNumber("its own best parameters", 1, grid=12, power=1),
    "hessian": KindOfNumber("second derivatives over its rows", 2, curvature=True, grid=12, power=-1),
    "precision": KindOfNumber("the precision of a Gaussian fitted to its rows", 2, True, grid=12, power=-1),
    "square": KindOfNumber("products of its own best parameters", 2, curvature=True, grid=12, power=1),
    "leverage": KindOfNumber("its share of the curvature of the posterior", 0, curvature=True, grid=30),
}


@dataclass(frozen=True)
class Reveals:
    """What a method's clients send.

    Attributes
    ----------
    uploads
        Kinds of the arrays of an upload in their order: position, energy, then those of ``extra``.
    sums
        Whether the server needs only the weighted sum of positions and energies over clients, which a secure
        sum can carry.
    preparation
        Kinds of what a client sends once, before the first round, by name.
    accounted
        Whether privacy accounting covers the uploads.
    declared
        False only for a method that says nothing: no site takes part in it.

    Examples
    --------
    >>> newton = Reveals(("point", "value", "gradient", "hessian"))
    >>> newton.curvature, newton.sums
    (True, False)
    >>> newton.sentences()[-1]
    'second derivatives over its rows'
    """

    uploads: tuple[str, ...] = ("position", "value")
    sums: bool = False
    preparation: Mapping[str, str] = field(default_factory=dict, hash=False)
    accounted: bool = False
    declared: bool = True

    def __post_init__(self) -> None:
        unknown = sorted({*self.uploads, *self.preparation.values()} - set(KINDS))
        if unknown:
            raise ValueError(f"no kind of number is called {unknown[0]!r}; there are: {', '.join(KINDS)}")
        if len(self.uploads) < 2:
            raise ValueError("an upload has at least a position and an energy")
        if self.sums and (len(self.uploads) > 2 or self.preparation):
            raise ValueError("only positions and energies are summed; all else is seen of each client")

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds, each once, in the order of ``KINDS``."""
        sent = {*self.uploads, *self.preparation.values()}
        return tuple(kind for kind in KINDS if kind in sent)

    @property
    def curvature(self) -> bool:
        """Whether second derivatives over rows leave a client, as far as is known."""
        return not self.declared or shows_curvature(self.kinds)

    @property
    def energy(self) -> bool:
        """Whether uploads contain the client's energy."""
        return self.uploads[1] != "nothing"

    def sentences(self) -> list[str]:
        """The same in words."""
        return [KINDS[kind].says for kind in self.kinds if kind != "nothing"]


UNDECLARED = Reveals(declared=False)


def shows_curvature(kinds: Iterable[str]) -> bool:
    """Whether any of some kinds is made of second derivatives over rows."""
    return any(KINDS[kind].curvature for kind in kinds)


def check_upload(reveals: Reveals, arrays: Sequence[Any], counts: Sequence[Any], dim: int) -> None:
    """Refuse an upload that is not what was declared; ``counts`` is what it says of its costs.

    Arrays of the upload come in their order, chains in front.

    Raises
    ------
    PolicyError
        Before anything is sent; it names the kind, never a value.

    Examples
    --------
    >>> check_upload(Reveals(), [np.zeros((4, 3)), np.zeros(4)], [], dim=3)
    >>> check_upload(Reveals(), [np.zeros((4, 3)), np.zeros(4), np.zeros((4, 3, 3))], [], dim=3)
    Traceback (most recent call last):
    fald.core.errors.PolicyError: the method would send 3 arrays where it declares 2: position, value
    """
    if not reveals.declared:
        raise PolicyError(
            "the method does not declare what it sends", hint="give it 'reveals'; see fald.core.reveals"
        )
    if len(arrays) != len(reveals.uploads):
        raise PolicyError(
            f"the method would send {len(arrays)} arrays where it declares {len(reveals.uploads)}: "
            + ", ".join(reveals.uploads)
        )
    for kind, array in zip(("count",) * len(counts) + reveals.uploads, [*counts, *arrays]):
        check_kind(kind, array, dim)


def check_preparation(reveals: Reveals, arrays: Mapping[str, Any], dim: int) -> None:
    """Refuse what a client would send before the first round, unless it was declared; clients in front."""
    odd = sorted(set(arrays) ^ set(reveals.preparation))
    if odd or not reveals.declared:
        raise PolicyError(
            "the preparation does not send what the method declares" + (f": {odd[0]!r}" if odd else "")
        )
    for name, array in arrays.items():
        check_kind(reveals.preparation[name], array, dim)


def check_kind(kind: str, array: Any, dim: int, many: int = 1) -> None:
    """Refuse an array that cannot be of a kind; ``many`` axes in front count chains, clients or points."""
    axes, shape = KINDS[kind].axes, np.shape(array)
    if len(shape) < many or shape[many:] != (dim,) * axes:
        raise PolicyError(
            f"an array of shape {shape[many:]} cannot be of the kind {kind!r}, which it was declared to be"
        )
    if kind == "nothing" and np.any(array):
        raise PolicyError("numbers would be sent that the method declares to keep")
