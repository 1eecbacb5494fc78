"""Run files on disk: written whole or not at all, and read back with suspicion.

A checkpoint is a folder with ``run.json`` (what the run is). Chains leave ``draws-NNNNN.npz`` (draws in the
order they were made) and ``state.npz`` (where to go on) there; ``state.npz`` is replaced last, so a run
killed at any moment finds a consistent earlier state. A few-round method leaves ``round-NNNN.npz``, what the
sites answered in each round, and is run again on these answers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fald.core.errors import ConfigError
from fald.core.files import damaged, pack, storage_error, unpack, write_atomically
from fald.runtime.records import Records, RunState

_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often to save a run.

    Parameters
    ----------
    path
        Folder of the checkpoint.
    seconds
        Save when this much time has passed since the last save; at most this much work is lost.
    rounds
        Save also after so many rounds, when given.
    """

    path: str | Path
    seconds: float = 5.0
    rounds: int | None = None

    def __post_init__(self):
        if not self.seconds >= 0:
            raise ConfigError(f"seconds between checkpoints must be ≥ 0; got {self.seconds!r}")
        if self.rounds is not None and (self.rounds != int(self.rounds) or self.rounds < 1):
            raise ConfigError(f"rounds between checkpoints must be a whole number ≥ 1; got {self.rounds!r}")


def as_checkpoint(checkpoint: str | Path | Checkpoint | None) -> Checkpoint | None:
    """A checkpoint from what a user may give: a folder, a checkpoint, or None for none."""
    if isinstance(checkpoint, str | Path):
        return Checkpoint(checkpoint)
    if not (checkpoint is None or isinstance(checkpoint, Checkpoint)):
        raise ConfigError(f"checkpoint must be a folder or a fald.Checkpoint; got {checkpoint!r}")
    return checkpoint


class Store:
    """The checkpoint folder of one run; made if it does not exist.

    ``description`` is what the run is: ``settings`` and ``fingerprints`` (of rows, densities and other things
    too large to write down), both by name. A folder that holds another run is refused.
    """

    def __init__(self, path: str | Path, description: dict[str, dict[str, Any]]):
        self.path = Path(path)
        # as it will be read back
        self.description = json.loads(json.dumps({"format": _FORMAT, **description}))
        self._saved = (0, 0)
        self.extra: dict[str, np.ndarray] = {}  # what ``save`` was given besides, as ``load`` found it

    @property
    def saved_round(self) -> int:
        """The round of the last saved state."""
        return self._saved[1]

    def open(self) -> bool:
        """Prepare the folder; return whether it holds a state of this run to go on from."""
        about = self.path / "run.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(self.path, error) from error
        for left_by_a_kill in self.path.glob(".*.tmp"):
            left_by_a_kill.unlink(missing_ok=True)
        if not about.exists():
            if (self.path / "state.npz").exists():
                raise damaged(about, "there is a state.npz without it")
            write_atomically(about, json.dumps(self.description, indent=1, sort_keys=True).encode())
            return False
        try:
            found = json.loads(about.read_text())
            differing = _differences(found, self.description)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(about, error) from error
        if differing:
            raise ConfigError(
                f"the checkpoint in {self.path} belongs to another run; different: {', '.join(differing)}",
                hint="use the settings and data it was made with, or choose another folder",
            )
        return self.has_state

    @property
    def has_state(self) -> bool:
        """Whether chains left a state to go on from."""
        return (self.path / "state.npz").exists()

    def answered_rounds(self) -> int:
        """Rounds in a row whose answers were saved."""
        return next(n for n in itertools.count() if not self._answers(n + 1).exists())

    def save_answers(self, number: int, answers: dict[str, np.ndarray], question: np.ndarray) -> None:
        """Save what the sites answered in a round; ``question`` is what it is recognised by."""
        write_atomically(self._answers(number), pack({**answers, "request": question}))

    def load_answers(self, number: int, question: np.ndarray) -> dict[str, np.ndarray]:
        """What the sites answered in a round, if it is an answer to this question."""
        path = self._answers(number)
        saved = unpack(path)
        asked = saved.pop("request", np.zeros(0))
        if asked.shape != question.shape or not np.allclose(asked, question, rtol=1e-6, atol=1e-9):
            raise damaged(path, "it answers another question")
        return saved

    def begin_rounds(self, total: int) -> None:
        """Note, before they run, how many rounds the clients will have answered.

        A private run counts them even if a crash then loses their results.
        """
        write_atomically(self.path / "begun.json", json.dumps({"rounds": total}).encode())

    def begun_rounds(self) -> int:
        """Rounds begun so far, in all parts of the run."""
        path = self.path / "begun.json"
        if not path.exists():
            return 0
        try:
            return int(json.loads(path.read_text())["rounds"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(path, error) from error

    def save(
        self, state: RunState, records: list[Records], extra: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Save the draws made since the last save up to ``state``, then the state, with ``extra`` arrays.

        ``records`` are all draws of the run. Saving again after an interruption is harmless.
        """
        num_files, saved_round = self._saved
        new = [r for r in records if len(r.round) and saved_round < r.round[0] and r.round[-1] <= state.round]
        if new:
            joined = {name: np.concatenate([getattr(r, name) for r in new]) for name in Records._fields}
            write_atomically(self._draws(num_files), pack(joined))
            num_files += 1
        leaves = jax.tree.leaves((state.server, state.memory))
        arrays = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        numbers = {"round": np.asarray(state.round), "num_files": np.asarray(num_files)}
        others = {f"extra_{name}": np.asarray(array) for name, array in (extra or {}).items()}
        write_atomically(self.path / "state.npz", pack({**arrays, **numbers, **others}))
        self._saved = (num_files, state.round)

    def load(self, like: RunState) -> tuple[RunState, list[Records]]:
        """Read the state and all draws saved with it; ``like`` gives the structure."""
        path = self.path / "state.npz"
        arrays = unpack(path)
        leaves, structure = jax.tree.flatten((like.server, like.memory))
        try:
            num_files, round_number = int(arrays["num_files"]), int(arrays["round"])
            loaded = [arrays[f"leaf_{i}"] for i in range(len(leaves))]
        except (KeyError, TypeError) as error:
            raise damaged(path, error) from error
        if any(a.shape != leaf.shape or a.dtype != leaf.dtype for a, leaf in zip(loaded, leaves)):
            raise damaged(path, "arrays of another shape")
        server, memory = jax.tree.unflatten(structure, [jnp.asarray(a) for a in loaded])
        records = [self._read_draws(i) for i in range(num_files)]
        self._saved = (num_files, round_number)
        self.extra = {name[6:]: array for name, array in arrays.items() if name.startswith("extra_")}
        return RunState(round_number, server, memory), records

    def _read_draws(self, index: int) -> Records:
        path = self._draws(index)
        arrays = unpack(path)
        if set(arrays) != set(Records._fields):
            raise damaged(path, f"it holds {', '.join(sorted(arrays))}")
        return Records(**arrays)

    def _draws(self, index: int) -> Path:
        return self.path / f"draws-{index:05d}.npz"

    def _answers(self, number: int) -> Path:
        return self.path / f"round-{number:04d}.npz"


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of what differs between two descriptions, with the values where they say something."""
    differing = [] if found["format"] == wanted["format"] else ["the format of the checkpoint"]
    ours, theirs = wanted["settings"], found["settings"]
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            shown = name.replace("_", "-")
            differing.append(f"{shown} ({theirs.get(name)!r} there, {ours.get(name)!r} now)")
    ours, theirs = wanted["fingerprints"], found["fingerprints"]
    return differing + [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
