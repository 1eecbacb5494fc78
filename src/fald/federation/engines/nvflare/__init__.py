"""NVIDIA FLARE as the engine: kits with certificates, long-lived processes, and what carries messages.

Nothing outside this package imports ``nvflare``; inside, only functions do, and the module that the engine
itself loads, so that commands can say what is missing.
"""

from __future__ import annotations

import importlib.util

from fald.core.errors import ConfigError


def require_nvflare() -> None:
    """Raise ``ConfigError`` if NVIDIA FLARE is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise ConfigError("NVIDIA FLARE is not installed", hint="pip install 'fald[nvflare]'")
