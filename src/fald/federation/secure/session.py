"""A sum over sites of which the coordinator sees no single term.

Every two sites i < j share a secret and derive from it, for each upload, a stream of random words m_ij.
Site i uploads

    y_i = x_i + Σ_{j>i} m_ij − Σ_{j<i} m_ji   (mod 2¹²⁸, in fixed point),

which by itself is uniformly random; the masks cancel in Σ_i y_i = Σ_i x_i. The secret comes from an X25519
key that each site makes for one session and signs with its ``Identity``. The coordinator passes the keys on
and could exchange them for its own, so a site goes on only if the signatures match the keys that it pinned.

The masks of an upload depend on the session, the round, the attempt, the sites asked, the number of entries
and a digest of the task. Sites that were asked different things give a sum of noise, which is noticed: every
upload has one more entry, 1, and the sum of these must be the number of sites.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import ArrayLike, NDArray

from fald.core.errors import NonFiniteError, SecureSumError
from fald.federation.secure.fixed_point import (
    MOST_TERMS,
    Words,
    add,
    decode,
    encode,
    fixed_point_sum,
    subtract,
    total,
)
from fald.federation.secure.identity import Identity, check_public, check_signature

__all__ = ["FEWEST_SITES", "Identity", "Session", "check_shares", "fixed_point_sum", "split", "unmask_sum"]

PROTOCOL = "fald secure sum 1"
FEWEST_SITES = 3
_ZEROS = memoryview(bytes(1 << 18))  # what is encrypted to get a stream


class _Answer(NamedTuple):
    round: int
    attempt: int
    digest: bytes
    upload: Words | None  # None where another process made it


class Session:
    """A site's part in the sums of one run.

    ``hello`` introduces the site, ``accept`` checks the others, ``mask`` makes uploads. Keys are made afresh
    and kept in memory only: after a restart the site needs a new session, and so do all others. A session is
    for one thread at a time.

    Parameters
    ----------
    identity
        The site's long-lived key.
    name
        The site's name, as the others have pinned it.
    run
        What the session is for, equal at all sites; keys signed for one run are refused in another.

    Examples
    --------
    >>> names = ["a", "b", "c"]
    >>> identities = {name: Identity.generate() for name in names}
    >>> sessions = {name: Session(identities[name], name, "run 1") for name in names}
    >>> hellos = {name: session.hello() for name, session in sessions.items()}
    >>> pins = {name: identity.public for name, identity in identities.items()}
    >>> for session in sessions.values():
    ...     session.accept(hellos, pins)
    >>> uploads = [
    ...     session.mask(np.array([0.5, i]), round=1, attempt=1, digest=b"task")
    ...     for i, session in enumerate(sessions.values())
    ... ]
    >>> unmask_sum(uploads).tolist()
    [1.5, 3.0]
    """

    def __init__(self, identity: Identity, name: str, run: str):
        self.name, self.run = name, run
        self._identity = identity
        self._key = X25519PrivateKey.generate()
        self._hello = self._introduced()
        self._pairs: dict[str, bytes] = {}
        self._transcript = b""
        self._last: _Answer | None = None

    def export(self) -> dict[str, Any]:
        """The session's keys, for a site whose next message another process will answer.

        The private one is among them: write them where only their owner may read, and remove them at the end.
        """
        return {
            "name": self.name,
            "run": self.run,
            "key": self._key.private_bytes_raw().hex(),
            "pairs": {name: pair.hex() for name, pair in self._pairs.items()},
            "transcript": self._transcript.hex(),
        }

    @classmethod
    def restore(
        cls, identity: Identity, exported: Mapping[str, Any], last: tuple[int, int, bytes] | None = None
    ) -> Session:
        """The session that ``export`` wrote down.

        ``last`` has round, attempt and digest of what it answered last, which cannot be asked for again;
        None: it has answered nothing.
        """
        session = cls(identity, exported["name"], exported["run"])
        session._key = X25519PrivateKey.from_private_bytes(bytes.fromhex(exported["key"]))
        session._hello = session._introduced()
        session._pairs = {name: bytes.fromhex(pair) for name, pair in exported["pairs"].items()}
        session._transcript = bytes.fromhex(exported["transcript"])
        session._last = None if last is None else _Answer(*last, None)
        return session

    def _introduced(self) -> dict[str, str]:
        public = self._key.public_key().public_bytes_raw()
        signature = self._identity.sign(_introduction(self.run, self.name, public))
        return {"name": self.name, "key": public.hex(), "signature": signature}

    def hello(self) -> dict[str, str]:
        """Name, public key of this session, and the signature of both; plain text for JSON."""
        return dict(self._hello)

    @property
    def roster(self) -> list[str]:
        """The sites of the session, sorted; empty before ``accept``."""
        return sorted([*self._pairs, self.name]) if self._pairs else []

    def accept(self, hellos: Mapping[str, Any], pins: Mapping[str, str]) -> None:
        """Check what the sites said of themselves, and share a secret with each.

        Parameters
        ----------
        hellos
            What ``hello`` gave at every site, by name, as the coordinator passed it on.
        pins
            The public keys of all sites' identities, by name, from the site's own files.

        Raises
        ------
        SecureSumError
            If there are fewer than three sites, if names or signatures are not those pinned, if this site's
            own part was changed, or if the session has begun with other keys.

        Notes
        -----
        The same hellos may be accepted again: a coordinator that missed a reply asks twice.
        """
        pinned, keys = self._checked(hellos, pins)
        fields = [part for name in sorted(keys) for part in (name, pinned[name], keys[name])]
        transcript = hashlib.sha256(_joined(PROTOCOL, self.run, *fields)).digest()
        if self._transcript and self._transcript != transcript:
            raise SecureSumError(
                "this session has already begun with other keys",
                hint="after a site was restarted, all sites need a new session",
            )
        if not self._transcript:
            self._pairs = {n: self._pair(n, key, transcript) for n, key in keys.items() if n != self.name}
            self._transcript = transcript

    def _checked(
        self, hellos: Mapping[str, Any], pins: Mapping[str, str]
    ) -> tuple[dict[str, str], dict[str, bytes]]:
        """The pinned identities and the keys of the session, by site."""
        if not FEWEST_SITES <= len(pins) <= MOST_TERMS:
            raise SecureSumError(
                f"a secure sum needs between {FEWEST_SITES} and {MOST_TERMS} sites; got {len(pins)}",
                hint="of two sites each could subtract its own part and read the other's",
            )
        pinned = {name: check_public(name, key) for name, key in pins.items()}
        if set(hellos) != set(pinned):
            odd = sorted(set(hellos) ^ set(pinned))
            raise SecureSumError(
                "the sites of the run are not those pinned here; they differ in " + ", ".join(map(repr, odd)),
                hint="every site must hold the same roster, and all its sites must take part",
            )
        if pinned.get(self.name) != self._identity.public:
            raise SecureSumError(f"the key pinned for {self.name!r} is not this site's own")
        if hellos[self.name] != self._hello:
            raise SecureSumError("this site's own introduction came back changed")
        keys = {name: self._verified(name, hellos[name], pinned[name]) for name in sorted(pinned)}
        if len(set(pinned.values())) < len(pinned) or len(set(keys.values())) < len(keys):
            raise SecureSumError(
                "two sites have the same key",
                hint="each site makes its own identity; a copied one is no site",
            )
        return pinned, keys

    def _verified(self, name: str, hello: Any, pinned: str) -> bytes:
        fields = hello if isinstance(hello, Mapping) else {}
        key, signature = fields.get("key"), fields.get("signature")
        try:
            raw = bytes.fromhex(key) if isinstance(key, str) else b""
        except ValueError:
            raw = b""
        signed = isinstance(signature, str) and check_signature(
            pinned, signature, _introduction(self.run, name, raw)
        )
        if len(raw) != 32 or fields.get("name") != name or not signed:
            raise SecureSumError(
                f"the key that came for site {name!r} is not signed for this run with the key pinned for it",
                hint="somebody between the sites may have exchanged it; if the site has lost its key, "
                f"compare the new one by telephone: fald federation repin KIT {name} roster.json",
            )
        return raw

    def _pair(self, name: str, key: bytes, transcript: bytes) -> bytes:
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError:
            raise SecureSumError(f"site {name!r} sent a key that gives no secret") from None
        info = _joined(PROTOCOL, *sorted([self.name, name]))
        return HKDF(algorithm=SHA256(), length=32, salt=transcript, info=info).derive(secret)

    def again(self, *, round: int, attempt: int, digest: bytes) -> Words | None:
        """The upload that answered a request before, None for the next request; ``mask`` explains.

        Ask this first: what was answered need not be computed again.
        """
        last = self._last
        if last is None or (round, attempt) > (last.round, last.attempt):
            return None
        if (round, attempt) < (last.round, last.attempt):
            raise SecureSumError(
                f"round {round}, attempt {attempt} is over: this site has answered round {last.round}, "
                f"attempt {last.attempt}",
                hint="a request is answered once",
            )
        if digest != last.digest:
            raise SecureSumError(
                f"round {round}, attempt {attempt} was asked twice with different tasks",
                hint="two answers under the same masks would show the difference of this site's numbers",
            )
        if last.upload is None:
            raise SecureSumError(f"round {round}, attempt {attempt} was answered by another process")
        return last.upload

    def mask(
        self,
        values: ArrayLike,
        *,
        round: int,
        attempt: int,
        digest: bytes,
        saturate: bool = False,
    ) -> Words:
        """This site's upload: its values under masks that cancel in the sum over all sites.

        A round and attempt is answered once. The same request again gets the same upload whatever the values:
        new values under old masks would show their difference, and new noise would be averaged away. A
        request for an earlier round or attempt is refused.

        Parameters
        ----------
        values
            (n,) numbers below 2⁴⁷ ≈ 1.4e14 in magnitude; they are rounded to multiples of 2⁻⁵⁶ ≈ 1.4e-17.
        round, attempt
            Which sum this is; they never go back.
        digest
            Hash of all that the site was asked; sites that were asked different things give a sum of noise.
        saturate
            True: NaN, infinities and numbers beyond the limit are marked, and their sum is −∞ or no number,
            as the log likelihood of a draw far outside the posterior may be; what is left to see is how many
            sites had one. False: refuse.

        Returns
        -------
        array
            (2, n + 1) words, the argument of ``unmask_sum``.

        Raises
        ------
        SecureSumError
            If the request is refused.
        NonFiniteError
            If a value cannot be summed. The round stays unanswered.
        """
        if not self.roster:
            raise SecureSumError("no sum before the sites' keys were accepted")
        done = self.again(round=round, attempt=attempt, digest=digest)
        if done is not None:
            return done
        upload = np.empty((2, np.size(values) + 1), np.uint64)
        encode(values, saturate=saturate, out=upload[:, :-1])
        encode([1.0], out=upload[:, -1:])
        stream = np.empty(upload.shape, "<u8")
        use = _joined(PROTOCOL, round, attempt, upload.shape[1], digest, *self.roster)
        for name in self.roster:
            if name != self.name:
                _fill(stream, self._pairs[name], use)
                (add if self.name < name else subtract)(upload, stream, upload)
        upload.flags.writeable = False
        self._last = _Answer(round, attempt, digest, upload)
        return upload


def check_shares(weights: ArrayLike, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Refuse a weighted sum whose weights are not the sites' shares of the rows; the shares themselves.

    A coordinator that gives one site all the weight would read its numbers off the sum. Sums are exact, so a
    millionth more does as well, in the difference of two sums: weigh by what is returned, never by what came.

    Parameters
    ----------
    weights
        (…, sites) weights.
    sizes
        Rows of each site.

    Returns
    -------
    array
        (…, sites) shares, which do not depend on the weights.

    Raises
    ------
    SecureSumError
        If a weight is another, beyond rounding.

    Examples
    --------
    >>> check_shares([[0.25000001, 0.25, 0.5]], [10, 10, 20])
    array([[0.25, 0.25, 0.5 ]])
    """
    w, shares = np.asarray(weights, float), np.asarray(sizes, float) / sum(sizes)
    if w.shape[-1:] != shares.shape or not np.all(np.abs(w - shares) <= 1e-6 * shares):
        raise SecureSumError(
            "the weights of the sum are not the sites' shares of the rows",
            hint="other weights can single out a site",
        )
    return np.broadcast_to(shares, w.shape)


def unmask_sum(uploads: Sequence[NDArray[np.uint64]]) -> NDArray[np.float64]:
    """The sum of the sites' values, from the uploads of all sites that were asked.

    Parameters
    ----------
    uploads
        What ``Session.mask`` gave at each site, in any order.

    Returns
    -------
    array
        (n,) sums; NaN where a site had no number, −∞ where one had none above the limit.

    Raises
    ------
    SecureSumError
        If the uploads do not belong together: one is missing, or comes from another round or task.

    Notes
    -----
    A site can upload anything. That masks cancel says nothing about the truth of the values.
    """
    shapes = {np.shape(u) for u in uploads}
    fits = all(isinstance(u, np.ndarray) and u.dtype == np.uint64 and u.ndim == 2 for u in uploads)
    if not 1 <= len(uploads) <= MOST_TERMS or len(shapes) != 1 or not fits or len(uploads[0]) != 2:
        raise SecureSumError("uploads to be summed must be arrays of 64-bit words of one shape (2, n + 1)")
    words = total(uploads)
    if words.shape[1] < 1 or not np.array_equal(words[:, -1:], encode([float(len(uploads))])):
        raise SecureSumError(
            f"the masks of {len(uploads)} uploads do not cancel",
            hint="a site is missing, or the sites did not answer the same request, or some audit and others "
            "do not (audit of their policies); ask all of them again",
        )
    try:
        return decode(words[:, :-1], len(uploads))
    except NonFiniteError as error:
        raise SecureSumError(f"an upload is wrong: {error.message}") from error


def split(flat: NDArray[np.float64], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float64]]:
    """Arrays by name out of one, in which they follow each other in the order of their names.

    Raises
    ------
    SecureSumError
        If they do not fill it.

    Examples
    --------
    >>> split(np.arange(3.0), {"b": (2,), "a": ()})["b"].tolist()
    [1.0, 2.0]
    """
    if sum(math.prod(shape) for shape in shapes.values()) != len(flat):
        raise SecureSumError("a sum does not have the shapes of its terms")
    out, place = {}, 0
    for name in sorted(shapes):
        size = math.prod(shapes[name])
        out[name] = flat[place : place + size].reshape(shapes[name])
        place += size
    return out


def _introduction(run: str, name: str, key: bytes) -> bytes:
    return _joined(PROTOCOL, "hello", run, name, key)


def _joined(*fields: str | bytes | int) -> bytes:
    """Fields in one string of bytes that no other fields give."""
    raw = [f if isinstance(f, bytes) else str(f).encode() for f in fields]
    return b"".join(len(r).to_bytes(8, "big") + r for r in raw)


def _fill(stream: NDArray[Any], pair: bytes, use: bytes) -> None:
    """Overwrite an array by the stream of two sites for one use."""
    key = hmac.digest(pair, use + b"\x01", "sha256")  # HKDF-Expand, of which the first block is the key
    # a key is used for one stream, so the nonce may be constant
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    content = memoryview(stream.data).cast("B")
    for start in range(0, len(content), len(_ZEROS)):
        part = content[start : start + len(_ZEROS)]
        encryptor.update_into(_ZEROS[: len(part)], part)
