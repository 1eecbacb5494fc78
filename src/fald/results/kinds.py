"""What a result is: four declared kinds, and what each of them offers.

The kind stands in the result itself (``tree.attrs["kind"]``), where the draws are put together. Whatever is
said of a result (tables, checks, reports, statements of privacy) asks its kind, and nothing guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fald.core.errors import DataError, StorageError

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Kind:
    """One kind of result.

    Attributes
    ----------
    name
        What the file calls it.
    draws
        Whether it holds draws from a posterior: means, intervals and predictions exist.
    certified
        Whether it carries a verdict on its own accuracy, with the weights, the precision of every mean and
        the record of every round that the verdict rests on.
    chains
        Whether its draws are chains, for which R-hat and drift are known and a bias can be predicted.
    private
        Whether it carries ε and a statement of privacy; nothing else may then be made from the rows.
    exchanged
        What the sites sent, in the words of a terminal.
    unprotected
        What was sent without noise, for the statement of a run that has no privacy.
    unseen
        What none of its checks can see.
    checks
        The checks made of it, in the order of reading, by their keys in ``fald.results.judgement``.
    """

    name: str
    draws: bool
    certified: bool
    chains: bool
    private: bool
    exchanged: str
    unprotected: str
    unseen: str
    checks: tuple[str, ...]


# causes before what follows from them, so that the first line names a cause
_OF_TABLES = ("columns", "values")
_OF_ROWS = ("prior", "fit", "outcomes")
_OF_ROUNDS = ("complete", *_OF_TABLES, "accuracy", "weights", "draws", "modes", "sites")
_OF_CHAINS = ("complete", *_OF_TABLES, "mixing", "draws", "bias", "step", "doubling", "target", "sites")
_BIAS = "R-hat and ESS see mixing, not bias: what local steps and the step size shift stays unseen."

FEW_ROUND = Kind(
    name="few-round",
    draws=True,
    certified=True,
    chains=False,
    private=False,
    exchanged="sums over rows, not rows",
    unprotected="Its uploads were sums over rows without noise.",
    unseen="What no check sees: a further solution (mode) that no search met, and what the model leaves out.",
    checks=(
        "complete",
        *_OF_TABLES,
        "accuracy",
        "weights",
        "draws",
        "modes",
        "sites",
        *_OF_ROWS,
        "reference",
    ),
)
CHAIN = Kind(
    name="chain",
    draws=True,
    certified=False,
    chains=True,
    private=False,
    exchanged="parameters, not rows",
    unprotected="Its client noise came from the run's seed, and uploads carried energies without noise.",
    unseen=_BIAS,
    checks=(*_OF_CHAINS, *_OF_ROWS, "reference"),
)
PRIVATE_CHAIN = replace(CHAIN, name="private chain", private=True, unprotected="")
POINT_ESTIMATE = Kind(
    name="point estimate",
    draws=False,
    certified=False,
    chains=False,
    private=False,
    exchanged="parameters, not rows",
    unprotected="Its uploads were parameters and energies without noise.",
    unseen="",
    checks=("complete", "posterior", "sites"),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in (FEW_ROUND, CHAIN, PRIVATE_CHAIN, POINT_ESTIMATE)}


def kind_of(tree: xr.DataTree) -> Kind:
    """The kind of a result.

    Raises
    ------
    StorageError
        If this version does not know the kind.

    Examples
    --------
    >>> import numpy as np, fald
    >>> rng = np.random.default_rng(0)
    >>> data = fald.FederatedData.from_arrays({name: rng.normal(size=(40, 1)) for name in "ab"})
    >>> kind_of(fald.fit(0, fald.models.gaussian_location([[1.0]]), data, progress=False)).name
    'few-round'
    """
    name = tree.attrs.get("kind")
    if name is None:
        return _derived(tree)
    if name not in KINDS:
        raise StorageError(
            f"the result is of a kind that this version does not know: {name!r}",
            hint=f"it knows {', '.join(KINDS)}; use the version of fald that wrote it",
        )
    return KINDS[name]


def _derived(tree: xr.DataTree) -> Kind:
    """The kind of a tree without one: a file of an earlier version, or draws by another library."""
    if "rounds" in tree.children:
        return FEW_ROUND
    if tree.attrs.get("point_estimate"):
        return POINT_ESTIMATE
    return PRIVATE_CHAIN if "privacy" in tree.attrs else CHAIN


def elsewhere(tree: xr.DataTree) -> str:
    """A sentence on draws that a run has given to sinks; empty if the result has them all."""
    if "sinks" not in tree.attrs:
        return ""
    return f"the result has the last draw of each chain alone; the draws went to {tree.attrs['sinks']}"


def require_posterior(tree: xr.DataTree) -> xr.DataTree:
    """Return ``tree`` if it holds the draws of a run from a posterior, else raise ``DataError``."""
    if not kind_of(tree).draws:
        raise DataError(
            f"{tree.attrs.get('method')} gives a point estimate; its iterates are not draws from a posterior",
            hint="use a temperature > 0, or a method that samples, for intervals",
        )
    if elsewhere(tree):
        raise DataError(
            elsewhere(tree), hint="ask the sinks: fald.sinks.DrawFiles.tree() gives all draws as a result"
        )
    return tree
