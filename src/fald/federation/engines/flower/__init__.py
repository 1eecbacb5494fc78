"""Flower as the engine: a thin app, and what carries messages.

Nothing outside this package imports ``flwr``; inside, only the modules that Flower itself loads do, so that
commands can say what is missing.
"""

from __future__ import annotations

import importlib.util

from fald.core.errors import ConfigError


def require_flower() -> None:
    """Raise ``ConfigError`` if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("Flower is not installed", hint="pip install 'fald[flower]'")
