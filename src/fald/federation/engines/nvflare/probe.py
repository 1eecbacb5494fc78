"""Why a site does not reach its server: one connection as the engine makes it, and what became of it."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

_WAIT = 5.0  # seconds for each step


def probe(host: str, port: int, startup: Path, name: str = "client") -> str:
    """What stands between a party and its server, in a sentence; nothing if nothing does.

    Parameters
    ----------
    host, port
        Where the server is.
    startup
        Folder with the party's certificate and key, and that of the authority.
    name
        What the files of the certificate and key are called.
    """
    try:
        context = ssl.create_default_context(cafile=startup / "rootCA.pem")
        context.load_cert_chain(startup / f"{name}.crt", startup / f"{name}.key")
    except (OSError, ssl.SSLError) as error:
        return f"the certificate in {startup} cannot be used ({error.strerror or error})"
    context.set_alpn_protocols(["h2"])
    try:
        plain = socket.create_connection((host, port), timeout=_WAIT)
    except OSError as error:
        return (
            f"nothing answers at {host}:{port} ({error.strerror or error}): is 'fald federation serve' "
            "running there, and does a firewall let this machine through?"
        )
    with plain:
        try:
            with context.wrap_socket(plain, server_hostname=host) as secured:
                secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
                if not secured.recv(64):
                    return f"the server at {host}:{port} hangs up: it does not take this certificate"
        except ssl.SSLCertVerificationError as error:
            return (
                f"who answers at {host}:{port} has no certificate of this federation's authority that holds "
                f"({error.verify_message}): another server is there, or the coordinator must renew it"
            )
        except ssl.SSLError as error:
            return (
                f"the server at {host}:{port} does not take this site's certificate ({error.reason}): it is "
                "over, or of another federation; remove client.crt and join again to ask for one"
            )
        except OSError as error:
            return f"the connection to {host}:{port} breaks off ({error.strerror or error}): who is there?"
    return ""
