"""Why a hub cannot be talked to, from a handshake of our own.

zenoh only says that time is up, whatever is wrong with a certificate, and tries again for ever.
"""

from __future__ import annotations

import re
import socket
import ssl
from contextlib import suppress
from typing import Final

from gpurt.cluster.security.identity import AUTHORITY, CERTIFICATE, KEY, Identity

TIMEOUT_S: Final = 1.0
"""For each step of the handshake."""
QUIET_S: Final = 0.3
"""A hub that refuses a certificate says so at once; one that takes it waits for us."""

_ENDPOINT: Final = re.compile(r"tls/(?:\[([^\]]+)\]|([^:]+)):(\d+)")


def refusal(identity: Identity, endpoint: str) -> str | None:
    """What one side has against the other's certificate; None where it is something else, or nothing, or the protocol
    is not TLS over TCP. Blocks for a few seconds at most."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        return None
    host, port = match[1] or match[2], int(match[3])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(identity.folder / AUTHORITY)
    context.load_cert_chain(identity.folder / CERTIFICATE, identity.folder / KEY)
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as plain:
            plain.settimeout(TIMEOUT_S)
            with context.wrap_socket(plain, server_hostname=host) as protected:
                protected.settimeout(QUIET_S)
                with suppress(TimeoutError):
                    protected.recv(1)
    except ssl.SSLCertVerificationError as exc:
        return f"its certificate is refused: {exc.verify_message}"
    except ssl.SSLEOFError:
        return None  # ended in the middle: a hub that is just being stopped
    except ssl.SSLError as exc:
        reason = (exc.reason or str(exc)).lower().replace("_", " ")
        return f"it refuses the certificate of {identity.name!r}: {reason}" if "alert" in reason else reason
    except OSError:
        return None
    return None
