"""Data sets: a trial that comes with the package, and two image sets that are downloaded once.

The image sets are looked for in the folder that the environment variable ``FALD_DATA`` names
(``FALD_DATA/mnist``, ``FALD_DATA/fashion-mnist``); without it they are downloaded from one of several
mirrors into the user's cache folder. Either way every file must have the SHA-256 of the original.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from fald.core.errors import ConfigError, DataError
from fald.problem.data import FederatedData

if TYPE_CHECKING:
    from fald.study.schema import Study

_BUNDLED = {"indo": "indo.toml"}

IMAGE_SETS = ("mnist", "fashion-mnist")
_MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
}
_HASHES = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
}
_TIMEOUT_SECONDS = 30


class Images(NamedTuple):
    """Images as (rows, 784) bytes from 0 to 255, and labels 0 to 9, in the order of the original files."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def study_path(name: str) -> Path:
    """Path of a bundled study file; its table, licence and codebook lie beside it."""
    if name not in _BUNDLED:
        raise ConfigError(f"no bundled study {name!r}", hint=f"there is: {', '.join(_BUNDLED)}")
    return Path(str(resources.files("fald.study") / "bundled" / _BUNDLED[name]))


def load_bundled_study(name: str) -> Study:
    """A bundled study with its settings."""
    from fald.study.schema import (
        load_study,  # the study model costs start-up time that `import fald` need not pay
    )

    return load_study(study_path(name))


@overload
def load(name: Literal["mnist", "fashion-mnist"]) -> Images: ...
@overload
def load(name: str) -> FederatedData: ...
def load(name: str) -> FederatedData | Images:
    """Rows of a bundled study, by site; or an image set.

    Parameters
    ----------
    name
        ``"indo"``; or ``"mnist"`` or ``"fashion-mnist"``, 60,000 images to train on and 10,000 to test
        with.

    Raises
    ------
    ConfigError
        If there is no such data set.
    DataError
        If the files of an image set are neither at hand nor to be downloaded, or differ from the
        originals.

    Examples
    --------
    >>> data = load("indo")
    >>> dict(zip(data.names, data.sizes.tolist()))
    {'Case': 3, 'Indiana': 413, 'Kentucky': 22, 'Michigan': 164}
    """
    if name in IMAGE_SETS:
        return Images(*(_parse(_find(name, file)) for file in _HASHES[name]))
    if name not in _BUNDLED:
        known = ", ".join((*_BUNDLED, *IMAGE_SETS))
        raise ConfigError(f"no data set {name!r}", hint=f"there is: {known}")
    return load_bundled_study(name).read_data()


def _find(name: str, file: str) -> Path:
    """The checked file, from ``FALD_DATA`` if that is set, else from the cache or a mirror."""
    given = os.environ.get("FALD_DATA")
    if not given:
        return _download(name, file)
    path = Path(given) / name / file
    if not path.is_file():
        raise DataError(
            f"{name}: no file {path} (FALD_DATA is {given})",
            hint=f"put the four original .gz files into {path.parent}, or unset FALD_DATA to download them",
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != _HASHES[name][file]:
        raise DataError(
            f"{path} is not the original file: its SHA-256 is {found}, not {_HASHES[name][file]}",
            hint="replace it by the original, or unset FALD_DATA to download it",
        )
    return path


def _download(name: str, file: str) -> Path:
    import pooch
    import requests

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "fald" / "datasets" / name
    pooch.get_logger().setLevel("WARNING")
    downloader: Any = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS)
    failures = []
    for mirror in _MIRRORS[name]:
        try:
            path = pooch.retrieve(
                mirror + file,
                known_hash=f"sha256:{_HASHES[name][file]}",
                fname=file,
                path=folder,
                downloader=downloader,
            )
            return Path(path)
        except requests.RequestException as error:
            response = getattr(error, "response", None)
            said = type(error).__name__ if response is None else f"HTTP status {response.status_code}"
            failures.append(f"{mirror}: {said}")
        except ValueError:  # pooch's word for a wrong hash
            failures.append(f"{mirror}: not the original file (wrong SHA-256)")
        except OSError as error:
            raise DataError(
                f"{name}: cannot keep {file} in {folder} ({error.strerror or error})",
                hint="set XDG_CACHE_HOME to a folder that can be written to",
            ) from error
    raise DataError(
        f"{name}: {file} could not be downloaded ({'; '.join(failures)})",
        hint=f"without a network, put the original files {', '.join(_HASHES[name])} "
        f"into a folder FOLDER/{name} and set FALD_DATA=FOLDER",
    )


def _parse(path: Path) -> np.ndarray:
    """An IDX file of bytes: two zeros, the type 8, the number of axes, their big-endian lengths, the data."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, 4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    return values.reshape(int(shape[0]), -1) if axes > 1 else values
