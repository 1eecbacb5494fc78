"""Who belongs to a federation: a certificate authority, requests of sites, and their approval.

A site makes its private key itself and asks for a certificate; the coordinator approves. What travels is a
request (public keys) one way and a certificate the other way. Both ends show the fingerprint of the request,
so that two people can compare it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from fald.core.errors import ConfigError, FederationError, StorageError
from fald.core.files import write_atomically
from fald.federation.folder import FederationSettings

AUTHORITY_DAYS, MEMBER_DAYS = 3650, 1095
REQUEST = "request.json"
_MINUTES = "%Y-%m-%d %H:%M"


@dataclass(frozen=True)
class Authority:
    """The certificate authority of a federation."""

    name: str
    key: Any
    certificate: Any

    @classmethod
    def make(cls, name: str) -> Authority:
        """A new authority with a key of its own."""
        from nvflare.lighter.utils import Identity, generate_cert, generate_keys

        key, public = generate_keys()
        owner = Identity(name)
        certificate = generate_cert(owner, owner, key, public, valid_days=AUTHORITY_DAYS, ca=True)
        return cls(name, key, certificate)

    @classmethod
    def read(cls, folder: Path, name: str) -> Authority:
        """The authority that ``save`` has written."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificate

        try:
            key = load_pem_private_key((folder / "authority.key").read_bytes(), None)
            return cls(name, key, load_pem_x509_certificate((folder / "authority.crt").read_bytes()))
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the certificate authority in {folder} cannot be read ({error})",
                hint="approve sites where the federation was made, or restore the folder from a copy",
            ) from error

    def save(self, folder: Path) -> None:
        """Write key and certificate; the key is for the owner's eyes."""
        folder.mkdir(parents=True, mode=0o700)
        write_private(folder / "authority.key", _key_pem(self.key))
        write_atomically(folder / "authority.crt", self.pem)

    @property
    def pem(self) -> bytes:
        """The certificate that all parties trust."""
        return _certificate_pem(self.certificate)

    def certify(
        self, public_key: Any, name: str, *, role: str | None = None, host: str | None = None
    ) -> bytes:
        """A certificate for one party: a user with a role, the server at a host, or a site."""
        from cryptography.x509.oid import ExtendedKeyUsageOID
        from nvflare.lighter.utils import Identity, generate_cert

        uses = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if host else [])
        now = datetime.datetime.now(datetime.UTC)
        last = self.certificate.not_valid_after_utc
        certificate = generate_cert(
            Identity(name, self.name, role),  # type: ignore[arg-type]
            Identity(self.name),
            self.key,
            public_key,
            server_default_host=host,
            not_valid_before=now - datetime.timedelta(hours=1),  # clocks of sites differ
            not_valid_after=min(last, now + datetime.timedelta(days=MEMBER_DAYS)),
            extra_extensions=[
                (x509.BasicConstraints(ca=False, path_length=None), True),
                (x509.ExtendedKeyUsage(uses), False),
            ],
        )
        return _certificate_pem(certificate)

    def issue(self, startup: Path, kind: str, name: str, **how: Any) -> None:
        """Make a key and its certificate for a party that lives with the authority."""
        from nvflare.lighter.utils import generate_keys

        key, public = generate_keys()
        write_private(startup / f"{kind}.key", _key_pem(key))
        write_atomically(startup / f"{kind}.crt", self.certify(public, name, **how))


def make_request(kit: Path, federation: str, site: str, identity: str) -> dict[str, str]:
    """At a site: make its private key, unless there is one, and a request for a certificate.

    Parameters
    ----------
    kit
        Folder of the site's kit.
    identity
        The site's public identity key (hex), with which it signs towards other sites.
    """
    from cryptography.hazmat.primitives import hashes, serialization
    from nvflare.lighter.utils import generate_keys

    path = kit / "startup" / "client.key"
    if path.exists():
        key: Any = serialization.load_pem_private_key(path.read_bytes(), None)
    else:
        key, _ = generate_keys()
        write_private(path, _key_pem(key))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, site)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    asked = csr.public_bytes(serialization.Encoding.PEM).decode()
    request = {"federation": federation, "site": site, "identity": identity, "request": asked}
    write_atomically(kit / REQUEST, json.dumps(request, indent=1).encode())
    return request


def read_request(path: Path, federation: FederationSettings) -> tuple[dict[str, str], Any]:
    """A checked request and the public key it asks a certificate for."""
    try:
        request = json.loads(path.read_text())
        csr = x509.load_pem_x509_csr(request["request"].encode())
        site, origin, identity = request["site"], request["federation"], request["identity"]
        proper = csr.is_signature_valid and len(bytes.fromhex(identity)) == 32
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no request of a site", hint=f"it is the {REQUEST} that 'fald federation join' writes"
        ) from error
    if not proper:
        raise FederationError(f"the request {path} is not signed with the key that it names")
    if origin != federation.name or site not in federation.sites:
        raise FederationError(
            f"the request {path} is of site {site!r} of federation {origin!r}; "
            f"{federation.name} has the sites {', '.join(federation.sites)}"
        )
    return request, csr.public_key()


def fingerprint(request: dict[str, str]) -> str:
    """Sixteen characters that stand for both public keys of a request; the same at both ends.

    Examples
    --------
    >>> fingerprint({"site": "north", "identity": "00" * 32, "request": "-----BEGIN..."})
    '3296-8367-ec29-e11a'
    """
    said = "\n".join(request[key] for key in ("site", "identity", "request"))
    digits = hashlib.sha256(said.encode()).hexdigest()[:16]
    return "-".join(digits[i : i + 4] for i in range(0, 16, 4))


def key_matches(certificate: Path, key: Path) -> bool:
    """Whether a certificate belongs to a private key."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    public: Any = load_pem_private_key(key.read_bytes(), None).public_key()
    return _read_certificate(certificate).public_key() == public


def check_certificate(startup: Path, site: str) -> None:
    """Refuse a site's certificate that no server would take, with what to do.

    Raises
    ------
    FederationError
        If it is of another authority or another site, or its time is over or has not begun.
    """
    path = startup / "client.crt"
    own, authority = _read_certificate(path), _read_certificate(startup / "rootCA.pem")
    renew = f"remove {path} and join again: the request that is made then is for the coordinator to approve"
    try:
        own.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise FederationError(
            f"{path} was not given by the authority of this kit",
            hint=f"it is of another federation, or of one that was made anew; {renew}",
        ) from error
    names = [a.value for a in own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [site]:
        raise FederationError(f"{path} is of {' '.join(map(str, names))!r}, not of site {site!r}", hint=renew)
    for each, mend in ((own, renew), (authority, "the coordinator must make the federation anew")):
        now, end = datetime.datetime.now(datetime.UTC), each.not_valid_after_utc
        if now > end:
            raise FederationError(f"{path} or its authority is over since {end:{_MINUTES}} UTC", hint=mend)
        begin = each.not_valid_before_utc
        if now < begin:
            raise FederationError(
                f"{path} is valid from {begin:{_MINUTES}} UTC on, and here it is {now:{_MINUTES}} UTC",
                hint="set the clock of this machine",
            )


def days_left(path: Path) -> float:
    """Days until a certificate is over."""
    end = _read_certificate(path).not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def _read_certificate(path: Path) -> Any:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is no certificate", hint="restore it from a copy") from error


def certificate_key_is(certificate: Path, public_key: Any) -> bool:
    """Whether a certificate was given for a public key."""
    return _read_certificate(certificate).public_key() == public_key


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, and that must not exist yet."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _key_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate_pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)
