"""Data sets that come with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fald.data import FederatedData
from fald.errors import ConfigError

if TYPE_CHECKING:
    from fald.study import Study

_BUNDLED = {"indo": "indo.toml"}


def study_path(name: str) -> Path:
    """Path of a bundled study file; its table, licence and codebook lie beside it."""
    if name not in _BUNDLED:
        raise ConfigError(f"no bundled study {name!r}", hint=f"there is: {', '.join(_BUNDLED)}")
    return Path(str(resources.files("fald") / "bundled" / _BUNDLED[name]))


def load_bundled_study(name: str) -> Study:
    """A bundled study with its settings."""
    from fald.study import load_study  # the study model costs start-up time that `import fald` need not pay

    return load_study(study_path(name))


def load(name: str) -> FederatedData:
    """Rows of a bundled study, by site.

    Examples
    --------
    >>> data = load("indo")
    >>> dict(zip(data.names, data.sizes.tolist()))
    {'Case': 3, 'Indiana': 413, 'Kentucky': 22, 'Michigan': 164}
    """
    return load_bundled_study(name).read_data()
