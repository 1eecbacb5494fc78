"""Where draws go as a run goes, instead of into memory: ``fald.sample(..., sinks=[...])``.

A sink gets every kept draw of all chains, in order. What it has gathered is saved with the checkpoint, so a
run that was killed goes on with the same sinks to the same end. A sink belongs to one run: in another it
begins anew.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fald.core.checks import check_count
from fald.core.errors import ConfigError, DataError, StorageError
from fald.core.files import storage_error, write_atomically
from fald.core.types import PyTree
from fald.problem.model import Model
from fald.results.kinds import CHAIN
from fald.results.positions import of_flat
from fald.results.probabilities import (
    Predictive,
    PredictiveSums,
    classes_of,
    labels_of,
    nll,
    predicted,
    scores,
)
from fald.results.tree import posterior_groups

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

Arrays = Mapping[str, np.ndarray]


class Sink(ABC):
    """What takes draws; subclasses may be a user's own."""

    model: Model | None = None

    def begin(self, model: Model) -> None:
        """Called before the first draw of a run."""
        self.model = model

    @abstractmethod
    def add(self, round_number: int, flat: np.ndarray) -> None:
        """Take the draws (chains, dim) of one round."""

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """What it has gathered, to be saved with the state of the run."""

    @abstractmethod
    def restore(self, saved: Arrays) -> None:
        """Go on from what ``arrays`` gave."""

    def end(self) -> None:  # noqa: B027 - most have nothing to do then
        """Called after the last round."""

    def _known(self) -> Model:
        if self.model is None:
            raise DataError("the sink has seen no run yet", hint="pass it to fald.sample(..., sinks=[...])")
        return self.model


class RunningMoments(Sink):
    """Mean and standard deviation of every parameter, and the latest deviations from the mean (SWAG).

    Parameters
    ----------
    rank
        How many of the latest deviations are kept.

    Examples
    --------
    >>> import numpy as np, fald
    >>> data = fald.FederatedData.from_arrays({"a": np.ones((30, 1)), "b": np.zeros((10, 1))})
    >>> model, moments = fald.models.gaussian_location([[1.0]]), fald.sinks.RunningMoments()
    >>> tree = fald.sample(0, model, data, num_rounds=400, num_warmup=100, local_steps=2, step_size=2e-3,
    ...                    sinks=[moments], progress=False)
    >>> bool(abs(moments.mean()[0] - 0.75) < 0.03), int(moments.count), tree["posterior"].sizes["draw"]
    (True, 1200, 1)
    """

    def __init__(self, rank: int = 20):
        self.rank = check_count("rank", rank, 0)
        self._forget()

    def _forget(self) -> None:
        self.count = 0
        self._mean = self._square = np.zeros(0)
        self._deviations = np.zeros((0, 0), np.float32)

    def begin(self, model: Model) -> None:
        """Called before the first draw of a run."""
        super().begin(model)
        self._forget()

    def add(self, round_number: int, flat: np.ndarray) -> None:
        """Take the draws of one round."""
        for draw in flat:
            if self.count == 0:
                self._mean, self._square = (np.zeros(len(draw)) for _ in range(2))
                self._deviations = np.zeros((0, len(draw)), np.float32)
            self.count += 1
            change = draw - self._mean
            self._mean += change / self.count
            self._square += change * (draw - self._mean)
        if self.rank:
            latest = (flat - self._mean).astype(np.float32)
            self._deviations = np.concatenate([self._deviations, latest])[-self.rank :]

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has gathered."""
        parts = {"mean": self._mean, "square": self._square, "deviations": self._deviations}
        return {"count": np.asarray(self.count), **parts}

    def restore(self, saved: Arrays) -> None:
        """Go on from what was saved."""
        self.count = int(saved["count"])
        self._mean, self._square = (np.array(saved[name]) for name in ("mean", "square"))
        self._deviations = np.array(saved["deviations"])

    def mean(self) -> PyTree:
        """The mean, as a position."""
        return of_flat(self._known(), self._mean)

    def sd(self) -> PyTree:
        """Standard deviations, as a position; NaN with fewer than two draws."""
        spread = (
            np.sqrt(self._square / (self.count - 1)) if self.count > 1 else np.full_like(self._mean, np.nan)
        )
        return of_flat(self._known(), spread)

    def swag(self, rng_key: jax.Array, count: int) -> Iterator[PyTree]:
        """Positions drawn from the Gaussian with this mean and half diagonal, half low-rank covariance.

        Reference: Maddox, Garipov, Izmailov, Vetrov and Wilson, "A simple baseline for Bayesian uncertainty
        in deep learning", NeurIPS 2019.
        """
        model, rank = self._known(), len(self._deviations)
        variance = self._square / max(self.count - 1, 1)
        for key in jax.random.split(rng_key, count):
            own, low = (jax.random.normal(k, (n,)) for k, n in zip(jax.random.split(key), (model.dim, rank)))
            wide = np.asarray(low) @ self._deviations / np.sqrt(2 * max(rank - 1, 1))
            yield of_flat(model, self._mean + np.sqrt(variance / 2) * np.asarray(own) + wide)


class ProbeCurve(Sink):
    """Predictions on a probe set, averaged over all draws so far; its scores against rounds.

    Parameters
    ----------
    x, y
        Rows of features, and their labels.
    every
        Rounds that give draws for each line of the curve.
    batch_size
        Rows that are predicted at a time.
    """

    _COLUMNS = ("round", "draws", "accuracy", "nll", "brier", "ece")

    def __init__(self, x: Any, y: Any, *, every: int = 1, batch_size: int = 500):
        self.x, self.y = np.asarray(x), np.asarray(y)
        self.every, self.batch_size = check_count("every", every), check_count("batch-size", batch_size)
        if not len(self.x):
            raise DataError("a probe set needs rows")
        self._forget()

    def _forget(self) -> None:
        self._sums = PredictiveSums.none(len(self.x))
        self._rounds = 0
        self._lines: list[tuple[float, ...]] = []

    def begin(self, model: Model) -> None:
        """Called before the first draw of a run."""
        super().begin(model)
        # what cannot be predicted is found before the first round
        self.y = labels_of(self.y, len(self.x), classes_of(model, self.x, self.batch_size))
        self._forget()

    def add(self, round_number: int, flat: np.ndarray) -> None:
        """Take the draws of one round."""
        model = self._known()
        for draw in flat:
            position = of_flat(model, draw)
            self._sums = self._sums.plus(predicted(model, position, self.x, self.batch_size))
        self._rounds += 1
        if self._rounds % self.every == 0:
            mean = self.predictive().mean
            found = scores(mean, self.y)
            line = found.accuracy, nll(mean, self.y), found.brier, found.ece
            self._lines.append((round_number, self._sums.count, *line))

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has gathered."""
        numbers = {"count": np.asarray(self._sums.count), "rounds": np.asarray(self._rounds)}
        lines = np.array(self._lines, float).reshape(-1, len(self._COLUMNS))
        own = {"total": self._sums.total, "entropies": self._sums.entropies, "lines": lines}
        return {**numbers, **own, "probe": self._probe()}

    def _probe(self) -> np.ndarray:
        """What rows and labels are recognised by."""
        digest = hashlib.sha256(np.ascontiguousarray(self.x).tobytes() + self.y.astype(np.int64).tobytes())
        return np.frombuffer(digest.digest(), np.uint8)

    def restore(self, saved: Arrays) -> None:
        """Go on from what was saved."""
        if not np.array_equal(saved["probe"], self._probe()):
            raise ConfigError(
                "the checkpoint was made with other rows or labels in ProbeCurve",
                hint="give the same, or choose another folder",
            )
        self._sums = PredictiveSums(saved["total"], saved["entropies"], int(saved["count"]))
        self._rounds, self._lines = int(saved["rounds"]), [tuple(line) for line in saved["lines"].tolist()]

    def predictive(self) -> Predictive:
        """The average over all draws so far, with entropy and mutual information."""
        return self._sums.predictive()

    def curve(self) -> pd.DataFrame:
        """``round``, ``draws``, ``accuracy``, ``nll``, ``brier`` and ``ece``, a line for each point."""
        import pandas as pd

        table = pd.DataFrame(self._lines, columns=list(self._COLUMNS))
        return table.astype({"round": int, "draws": int})


class DrawFiles(Sink):
    """Draws in NetCDF files of so many rounds each, which xarray and others read.

    Each file has ``position`` (draw, chain, parameter) and ``round`` (draw,), and is written whole or not at
    all; draws of the file under way are in the checkpoint.

    Parameters
    ----------
    folder
        Where the files are; made if it does not exist. A new run there replaces those of an earlier one.
    rounds_per_file
        Draws of each chain in a file.
    """

    def __init__(self, folder: str | Path, *, rounds_per_file: int = 50):
        self.folder, self.rounds_per_file = Path(folder), check_count("rounds-per-file", rounds_per_file)
        self._files = 0
        self._rounds: list[int] = []
        self._waiting: list[np.ndarray] = []

    def begin(self, model: Model) -> None:
        """Called before the first draw of a run."""
        super().begin(model)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(self.folder, error) from error
        self._files, self._rounds, self._waiting = 0, [], []

    def add(self, round_number: int, flat: np.ndarray) -> None:
        """Take the draws of one round."""
        if self._files == 0 and not self._waiting:
            self._remove(0)
        self._rounds.append(round_number)
        self._waiting.append(np.array(flat))
        if len(self._waiting) >= self.rounds_per_file:
            self._write()

    def _write(self) -> None:
        import xarray as xr

        arrays = {
            "position": (("draw", "chain", "parameter"), np.stack(self._waiting)),
            "round": (("draw",), np.array(self._rounds)),
        }
        write_atomically(self._path(self._files), xr.Dataset(arrays).to_netcdf(engine="h5netcdf"))
        self._files, self._rounds, self._waiting = self._files + 1, [], []

    def end(self) -> None:
        """Write the draws that no file has yet; called after the last round."""
        if self._waiting:
            self._write()

    def _path(self, number: int) -> Path:
        return self.folder / f"draws-{number:05d}.nc"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"draws-{5 * '[0-9]'}.nc"))

    def _remove(self, first: int) -> None:
        for path in self._paths():
            if int(path.stem.split("-")[1]) >= first:
                path.unlink()

    def arrays(self) -> dict[str, np.ndarray]:
        """What no file has yet, and how many files there are."""
        waiting = np.stack(self._waiting) if self._waiting else np.zeros((0, 0, 0), np.float32)
        return {"files": np.asarray(self._files), "rounds": np.array(self._rounds, int), "waiting": waiting}

    def restore(self, saved: Arrays) -> None:
        """Go on from what was saved; files written after that are made again."""
        self._files, self._rounds = int(saved["files"]), saved["rounds"].tolist()
        self._waiting = list(saved["waiting"])
        missing = [n for n in range(self._files) if not self._path(n).exists()]
        if missing:
            raise StorageError(
                f"{self._path(missing[0])} is missing",
                hint="restore it, or begin anew with another checkpoint",
            )
        self._remove(self._files)

    def datasets(self) -> Iterator[Any]:
        """The files one by one, as ``xarray.Dataset``."""
        import xarray as xr

        for path in self._paths():
            with xr.open_dataset(path, engine="h5netcdf") as dataset:
                yield dataset.load()

    def tree(self, model: Model | None = None) -> xr.DataTree:
        """All draws as a result in memory, for ``fald.summary``, ``verdict`` and ArviZ; where sizes allow.

        Files of another process need the model, as ``fald.positions`` may.
        """
        import xarray as xr

        model = self._known() if model is None else model
        parts = list(self.datasets())
        if not parts:
            raise DataError(f"there are no draws in {self.folder} yet")
        flat = np.concatenate([part["position"].values for part in parts]).swapaxes(0, 1)
        rounds = np.concatenate([part["round"].values for part in parts])
        made = xr.DataTree.from_dict(posterior_groups(model, flat))
        made["sample_stats"] = xr.DataTree(xr.Dataset({"round": (["draw"], rounds)}))
        made.attrs |= {"kind": CHAIN.name, "model": model.name}
        return made

    def positions(self, model: Model) -> Iterator[PyTree]:
        """All draws as positions, one by one."""
        for dataset in self.datasets():
            for of_round in dataset["position"].values:
                yield from (of_flat(model, draw) for draw in of_round)
