"""Compiled programs, kept from one process to the next."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

SWITCH = "FALD_CACHE"  # a folder, or "off"


def cache_folder() -> Path | None:
    """Where compiled programs are kept: ``FALD_CACHE``, or in the user's cache folder; None: nowhere."""
    wanted = os.environ.get(SWITCH, "")
    if wanted.lower() in ("off", "0", "no"):
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(wanted) if wanted else root / "fald" / "compiled"


@functools.cache
def keep_compiled() -> None:
    """Keep what this process compiles, unless JAX was told where, or ``FALD_CACHE=off``.

    Entries are named by program, compiler and processor, so that versions and processes do not disturb each
    other; one that cannot be read is compiled again.
    """
    folder = cache_folder()
    if folder is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    wanted = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if "jax" not in sys.modules:  # a command, which may not need it; processes that it starts know as well
        os.environ.update({name.upper(): str(value) for name, value in wanted.items()})
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # which looks once, and may have looked before
