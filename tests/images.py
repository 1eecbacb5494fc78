"""Small image sets in the original file format, so that tests of the image experiments need no download."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


def write_set(folder: Path, seed: int, train: int = 400, test: int = 200) -> dict[str, str]:
    """Ten noisy patterns as a set of four files; returns their SHA-256."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 256, (10, 784))
    hashes = {}
    folder.mkdir(parents=True)
    for rows, (image_file, label_file) in ((train, FILES[:2]), (test, FILES[2:])):
        labels = rng.integers(0, 10, rows)
        images = np.clip(0.3 * patterns[labels] + rng.normal(80, 60, (rows, 784)), 0, 255)
        for name, array in ((image_file, images.reshape(-1, 28, 28)), (label_file, labels)):
            content = _idx(array)
            (folder / name).write_bytes(content)
            hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes
