"""Flower as the engine: a thin app, and what carries messages.

Nothing outside this package imports ``flwr``; inside, only the modules that Flower itself loads do, so that
commands can say what is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from fald.core.errors import ConfigError

_VERSION = "1.41."  # whose inner parts the SuperLink and the SuperNode of this package use


def require_flower() -> None:
    """Raise ``ConfigError`` if Flower is not installed, or in a version that was never tried."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("Flower is not installed", hint="pip install 'fald[flower]'")
    found = importlib.metadata.version("flwr")
    if not found.startswith(_VERSION):
        raise ConfigError(
            f"Flower {found} is installed; fald works with {_VERSION}x", hint="pip install 'fald[flower]'"
        )
