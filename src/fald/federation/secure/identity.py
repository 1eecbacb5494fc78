"""A site's long-lived key, by which other sites recognise it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fald.core.errors import ConfigError, SecureSumError
from fald.core.files import storage_error


class Identity:
    """An Ed25519 key that signs for one site.

    The private half stays in a file at the site that only its owner may read. The others *pin* the public
    half: they keep a copy that reached them by a way they trust, such as a telephone call or a signed mail.

    Attributes
    ----------
    public
        The public key, 64 hexadecimal digits.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> identity = Identity.create(folder.name + "/identity.pem")
    >>> Identity.load(folder.name + "/identity.pem").public == identity.public
    True
    >>> check_signature(identity.public, identity.sign(b"text"), b"text")
    True
    """

    def __init__(self, key: Ed25519PrivateKey):
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> Identity:
        """Make a key that is kept in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def create(cls, path: str | Path) -> Identity:
        """Make a new key and write it to a file that only its owner may read.

        Raises
        ------
        ConfigError
            If the file exists: a key that others have pinned must not be lost.
        StorageError
            If it cannot be written.
        """
        path = Path(path)
        identity = cls.generate()
        content = identity._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(file, content)
                os.fsync(file)
            finally:
                os.close(file)
            os.link(temporary, path)  # unlike a rename this never replaces a key that is there
        except FileExistsError:
            raise ConfigError(
                f"there is already a key in {path}", hint="load it; others may have pinned it"
            ) from None
        except OSError as error:
            raise storage_error(path, error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return identity

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """Read a key that ``create`` wrote.

        Raises
        ------
        ConfigError
            If there is none, if it is no Ed25519 key, or if others than its owner may read the file.
        """
        path = Path(path)
        try:
            mode, content = path.stat().st_mode, path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the site's key {path}: {error.strerror or error}") from error
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"others may read the site's key {path} (mode {stat.S_IMODE(mode):04o})",
                hint=f"chmod 600 {path}; if somebody may have read it, make a new one and tell all sites",
            )
        try:
            key = load_pem_private_key(content, password=None)
        except (ValueError, TypeError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"{path} holds no Ed25519 private key", hint="restore it from a copy")
        return cls(key)

    def sign(self, message: bytes) -> str:
        """The signature of a message, in hexadecimal digits."""
        return self._key.sign(message).hex()


def key_fingerprint(public: str) -> str:
    """Sixteen characters that stand for a public key, to be compared by telephone.

    Examples
    --------
    >>> key_fingerprint("00" * 32)
    '6668-7aad-f862-bd77'
    """
    digits = hashlib.sha256(bytes.fromhex(public)).hexdigest()[:16]
    return "-".join(digits[i : i + 4] for i in range(0, 16, 4))


def check_signature(public: str, signature: str, message: bytes) -> bool:
    """Whether a signature of a message was made with the private half of a public key."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def check_public(name: str, public: object) -> str:
    """A pinned public key in its one spelling; refused if it is none.

    Raises
    ------
    SecureSumError
        Naming the site.
    """
    try:
        raw = bytes.fromhex(public) if isinstance(public, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise SecureSumError(
            f"the key pinned for site {name!r} is no Ed25519 public key",
            hint="it has 64 hexadecimal digits; ask the site for it again",
        )
    return raw.hex()
