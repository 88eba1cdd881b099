"""Whether who listens at an address speaks TLS, from a handshake of our own.

zenoh only says that time is up where one side speaks TLS and the other does not.
"""

from __future__ import annotations

import re
import socket
import ssl
from typing import Final

TIMEOUT_S: Final = 0.5
"""For each step of it. A hub answers within 10 ms."""

GIVE_TLS: Final = "give --tls FOLDER (WorkerConfig.tls, MasterConfig.tls) with what gpurt cluster enrol made"
"""To whom a hub wants certificates of."""

_ENDPOINT: Final = re.compile(r"(?:tcp|tls)/(?:\[([^\]]+)\]|([^:]+)):(\d+)")


def speaks_tls(endpoint: str) -> bool | None:
    """None: nobody is there, or it ended in the middle, or the protocol is neither TCP nor TLS over TCP. Blocks for a
    second at most, besides looking up a name."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to whoever it is
    try:
        plain = socket.create_connection((match[1] or match[2], int(match[3])), TIMEOUT_S)
    except OSError:
        return None
    with plain:
        plain.settimeout(TIMEOUT_S)
        try:
            context.wrap_socket(plain).close()
        except TimeoutError:
            return False  # a plain hub waits for the rest of what it takes for a message
        except ssl.SSLEOFError:
            return None
        except ssl.SSLError as exc:
            return "alert" in (exc.reason or "").lower()
        except OSError:
            return None
    return True
