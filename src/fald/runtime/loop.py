"""The run-time of every run: rounds, progress, checkpoints, journal, interruption, failure.

It knows no method, no engine and no exchange. What goes round by round is a ``Work``: chains of a sampler, or
the questions of a few-round method, in this process or on a federation. Rounds are done in chunks that grow
until one takes about half a second, so that progress is live and Ctrl-C is answered soon; results do not
depend on where chunks end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from fald.core.errors import FaldError, Interrupted, StorageError
from fald.runtime.checkpoint import Checkpoint, Store
from fald.runtime.journal import Journal
from fald.runtime.progress import Progress

_CHUNK_SECONDS = 0.5


class Work(Protocol):
    """What goes on round by round."""

    @property
    def few(self) -> bool:
        """Whether rounds are few and slow, so that each is shown and written down."""
        ...

    @property
    def round(self) -> int:
        """Rounds done."""
        ...

    @property
    def total(self) -> int:
        """Rounds to do; of a work that ends when it has enough, the most that it may take."""
        ...

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        ...

    @property
    def sites(self) -> Mapping[str, int]:
        """Rows of each site."""
        ...

    def begin(self, store: Store | None) -> None:
        """Get ready; go on from what ``store`` holds, if it holds something."""
        ...

    def most_rounds(self) -> int:
        """How many rounds one ``advance`` may cover."""
        ...

    def advance(self, num_rounds: int) -> None:
        """Do rounds. A ``NonFiniteError`` from here may have the draws before it in its ``tree``."""
        ...

    def save(self, store: Store) -> None:
        """Save what was done since the last time; nothing to do for a work that saves every round itself."""
        ...

    def note(self) -> str:
        """A few words on how it goes, for the progress display."""
        ...

    def line(self, summarise: bool) -> dict[str, Any]:
        """How it goes, for the journal; ``summarise`` allows what takes a while."""
        ...

    def end(self) -> None:
        """Called after the last round; may raise where that was too early."""
        ...

    def draws(self) -> Any:
        """The result of the rounds so far, for a run that ends early; None if there is none."""
        ...


def run(
    work: Work,
    *,
    checkpoint: Checkpoint | None = None,
    description: dict[str, Any] | None = None,
    journal: Journal | None = None,
    progress: bool = False,
) -> None:
    """Do all rounds of a work.

    ``checkpoint`` says where to save, ``description`` what identifies the run there, ``journal`` where to
    write down how the run goes, ``progress`` whether to report on standard error.

    Raises
    ------
    Interrupted, NonFiniteError, StorageError, FederationError, PrivacyError
        Each with the draws so far in its ``tree``, or None there if no draw was kept.
    """
    keeper = _Keeper(work, checkpoint, description or {})
    journal = journal or Journal(None)
    store = keeper.open()
    try:
        work.begin(store)
        start = {"round": work.round, "rounds_total": work.total, "sites": dict(work.sites)}
        shown = Progress(work.total, work.round, progress, few=work.few)
        with journal.running(**start), shown as display:
            _go(work, keeper, display, journal)
    except FaldError as error:
        if not isinstance(error, StorageError):
            keeper.save()  # a site is gone, or a chain has diverged: what was done before is kept
        _with_draws(error, work)
        raise
    except Exception as error:  # of a user's function, such as a callback
        keeper.save()
        drawn = (
            "no draw was kept yet" if _with_draws(error, work).tree is None else "draws so far are in `tree`"
        )
        error.add_note(f"after round {work.round} of {work.total}; {drawn}")
        raise
    except KeyboardInterrupt:
        keeper.save()
        hint = "give a checkpoint to be able to resume" if checkpoint is None else "resume to go on from here"
        after = f"interrupted after round {work.round}" + ("" if work.few else f" of {work.total}")
        raise _with_draws(Interrupted(after, hint=hint), work) from None


def _with_draws(error: Any, work: Work) -> Any:
    """The error with what the run has so far, unless it has that already."""
    if "tree" not in vars(error):
        error.tree = work.draws()
    return error


def _go(work: Work, keeper: _Keeper, display: Progress, journal: Journal) -> None:
    chunk = 1
    while not work.done:
        size = max(1, min(chunk, work.total - work.round, work.most_rounds(), keeper.rounds_left()))
        began = time.monotonic()
        work.advance(size)
        seconds = time.monotonic() - began
        chunk = max(1, min(2 * chunk, int(size * _CHUNK_SECONDS / max(seconds, 1e-6))))
        display.update(work.round, work.note(), work.total)
        _tell(work, journal)
        keeper.save_if_due()
    keeper.save()
    work.end()


def _tell(work: Work, journal: Journal) -> None:
    """Write a line about the rounds just done, unless one was written a moment ago."""
    if journal.path is None or not (work.few or work.done or journal.due):
        return
    summarise = work.done or journal.summary_due()
    began = time.monotonic()
    line = work.line(summarise)
    if summarise:
        journal.summarised(time.monotonic() - began)
    journal.write(**line)


class _Keeper:
    """Decides when a work is saved."""

    def __init__(self, work: Work, checkpoint: Checkpoint | None, description: dict[str, Any]):
        self.work, self.checkpoint, self.description = work, checkpoint, description
        self.store: Store | None = None
        self.saved_at = time.monotonic()

    def open(self) -> Store | None:
        """The folder of the run, if there is one, found to be that of this run."""
        if self.checkpoint is not None:
            self.store = Store(self.checkpoint.path, self.description)
            self.store.open()
        return self.store

    def rounds_left(self) -> int:
        """Rounds until the next save that was asked for by rounds."""
        if self.store is None or self.checkpoint is None or self.checkpoint.rounds is None:
            return 2**31
        return self.store.saved_round + self.checkpoint.rounds - self.work.round

    def save_if_due(self) -> None:
        """Save if enough rounds or seconds have passed."""
        if self.checkpoint is not None and (
            self.rounds_left() <= 0 or time.monotonic() - self.saved_at >= self.checkpoint.seconds
        ):
            self.save()

    def save(self) -> None:
        """Save what is not saved yet."""
        if self.store is not None and self.work.round > self.store.saved_round:
            try:
                self.work.save(self.store)
            except StorageError as error:
                raise _with_draws(error, self.work) from error
        self.saved_at = time.monotonic()
