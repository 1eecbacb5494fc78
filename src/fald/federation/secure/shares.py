"""A sum that its sites check together, each a share of it, although none is shown all uploads.

Uploads of n sites are cut into blocks of columns. With the sum come, for all sites alike, the hashes of all
blocks of all uploads, and for each site the uploads' words of one block, its share. A site checks that its
own row of hashes is that of what it sent, that its share has the hashes of its block, and that it adds up to
the sum there. Masks are bound to what all sites are shown alike: if they cancel, all sites have seen the same
sum and the same hashes. Each upload was then confirmed by its owner, each block by a site, so the sum is that
of what the sites sent. A share takes as many bytes as an upload, however many sites there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fald.core.errors import NonFiniteError, SecureSumError
from fald.federation.secure.fixed_point import MASKED_BYTES, Words, decode, total

Array = NDArray[Any]
HASH = 32  # bytes
_LEAST = 4096  # columns of a block: hashes of smaller ones would outweigh them


def _cut(sites: int, columns: int) -> tuple[int, int]:
    """Blocks, and columns of each: equally many, so that shares have one shape; the last two may overlap."""
    blocks = max(1, min(sites, columns // _LEAST))
    return blocks, -(-columns // blocks)


def _block(place: int, sites: int, columns: int) -> tuple[int, slice]:
    """The block of a site, and its columns."""
    blocks, width = _cut(sites, columns)
    number = place % blocks
    start = min(number * width, columns - width)
    return number, slice(start, start + width)


def hashes(upload: Words, sites: int) -> Array:
    """(blocks, 32) hashes of an upload's blocks.

    Examples
    --------
    >>> hashes(np.zeros((2, 3), np.uint64), 4).shape, hashes(np.zeros((2, 9000), np.uint64), 4).shape
    ((1, 32), (2, 32))
    """
    columns = upload.shape[1]
    blocks = range(_cut(sites, columns)[0])
    return np.stack([_hash(upload[:, _block(b, sites, columns)[1]], columns) for b in blocks])


def hashes_shape(sites: int, columns: int) -> tuple[int, int]:
    """Shape of what ``hashes`` gives."""
    return _cut(sites, columns)[0], HASH


def _hash(words: Words, columns: int) -> Array:
    """Hash of a block of an upload of so many columns; without them its place would be open."""
    found = hashlib.sha256(columns.to_bytes(8, "little"))
    for row in words.astype("<u8", copy=False):
        found.update(row.data)  # of a block of an upload: nothing is copied
    return np.frombuffer(found.digest(), np.uint8)


def share(uploads: Sequence[Words], place: int) -> Array:
    """(sites, 2, columns) words of all uploads in the block of a site."""
    block = _block(place, len(uploads), uploads[0].shape[1])[1]
    return np.stack([upload[:, block] for upload in uploads])


def shown_bytes(sites: int, columns: int) -> int:
    """Bytes that a site is shown of a sum: numbers, hashes and its share."""
    blocks, width = _cut(sites, columns)
    return 8 * columns + HASH * blocks * sites + MASKED_BYTES * width * sites


def owner_hash(mine: Array) -> str:
    """What a site keeps of an upload: the hash of the hashes of its blocks."""
    return hashlib.sha256(mine.tobytes()).hexdigest()


def check(
    shown: Mapping[str, Array], names: Sequence[str], place: int, known: set[str], *, number: int
) -> Array:
    """The sum of the uploads, after a site has checked its share of it.

    Parameters
    ----------
    shown
        ``sum`` (columns,), ``hashes`` (sites, blocks, 32) and ``share`` (sites, 2, columns of a block).
    names, place
        The sites, and which of them this one is.
    known
        What the site has kept of its uploads of the round: ``owner_hash`` of each.
    number
        The round, for messages.

    Raises
    ------
    SecureSumError
        If it is not the sum of what the sites sent.
    """
    sites, nothing = len(names), np.zeros(())
    summed, told, words = (shown.get(name, nothing) for name in ("sum", "hashes", "share"))
    columns = len(summed) if summed.ndim == 1 else 0
    blocks, width = _cut(sites, columns)
    fits = (summed.dtype, told.dtype, words.dtype) == (np.float64, np.uint8, np.uint64)
    shapes = (told.shape, words.shape) == ((sites, blocks, HASH), (sites, 2, width))
    if not (fits and shapes and columns):
        raise SecureSumError(f"the sum of round {number} was not passed on, and this site audits (audit)")
    if owner_hash(told[place]) not in known:
        raise SecureSumError(f"what was passed on as this site's upload of round {number} is not its own")
    block, part = _block(place, sites, columns)
    odd = [n for n, a, own in zip(names, told, words) if not np.array_equal(_hash(own, columns), a[block])]
    if odd:
        raise SecureSumError(
            f"what was passed on as the upload of site {odd[0]!r} of round {number} does not have its hash"
        )
    try:
        own = decode(total(words), sites)
    except NonFiniteError as error:
        raise SecureSumError(f"an upload is wrong: {error.message}") from error
    if not np.array_equal(own, summed[part], equal_nan=True):
        raise SecureSumError(f"what was passed on is not the sum of the uploads of round {number}")
    if summed[-1] != sites:
        raise SecureSumError(f"the masks of the {sites} uploads of round {number} do not cancel")
    return summed[:-1]
