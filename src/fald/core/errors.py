"""What can go wrong, in words a user can act on, and the exit code each kind ends with."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of the ``fald`` command; the documentation has an entry for each."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    DATA = 3
    NON_FINITE = 4
    DIAGNOSTICS = 5
    PRIVACY = 6
    FEDERATION = 7
    STORAGE = 8
    INTERRUPTED = 130


def printable(text: object, *, lines: bool = False) -> str:
    """Words of somebody else, without what would move a terminal's cursor, colour it or hide parts of them.

    Examples
    --------
    >>> printable("study\\x1b[2J")
    'study?[2J'
    """
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else "?" for c in str(text))


class FaldError(Exception):
    """An error with a cause the user can mend.

    Parameters
    ----------
    message
        What is wrong: the name, the rule, the value found and where it came from.
    hint
        What to do about it.

    Examples
    --------
    >>> print(ConfigError("step-size must be > 0; got -0.1", hint="choose a positive number"))
    step-size must be > 0; got -0.1
      hint: choose a positive number
    """

    exit_code: ExitCode = ExitCode.INTERNAL
    tree = None  # the draws kept so far, where a run has ended early

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(FaldError):
    """A setting is missing, unknown, or outside its range."""

    exit_code = ExitCode.USAGE


class DataError(FaldError):
    """Rows, columns or a model cannot be used as they are."""

    exit_code = ExitCode.DATA


class NonFiniteError(FaldError):
    """The chain left the finite numbers; ``tree`` holds the draws kept before that."""

    exit_code = ExitCode.NON_FINITE


class DiagnosticsError(FaldError):
    """The run finished, but its diagnostics do not support the result."""

    exit_code = ExitCode.DIAGNOSTICS


class PrivacyError(FaldError):
    """A privacy budget would be exceeded, or the request gives no privacy."""

    exit_code = ExitCode.PRIVACY


class FederationError(FaldError):
    """A site or the transport between sites failed."""

    exit_code = ExitCode.FEDERATION


class SecureSumError(FederationError):
    """Taking part in a sum would show one site's numbers, or the masks of a sum did not cancel."""


class PolicyError(FederationError):
    """A site's own policy refuses what it was asked."""


class StorageError(FaldError):
    """A file of a run cannot be written or read back."""

    exit_code = ExitCode.STORAGE


class Interrupted(FaldError):  # noqa: N818 - it is no error of anybody's
    """The user stopped the run; ``tree`` holds the draws kept so far."""

    exit_code = ExitCode.INTERRUPTED
