"""Without certificates, a bus stays within its machine.

Whoever reaches a plain bus can be any node and read everything. So an address that others can reach is refused, unless
it is said in so many words that this is wanted.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from gpurt.cluster.security.errors import InsecureEndpoint

ENCRYPTED: Final = ("tls", "quic")
"""Protocols with certificates on both sides."""

_HOST: Final = re.compile(r"(?:nats://|[^/]+/)(\[[^\]]*\]|[^:]*):.*", re.DOTALL)


def check_protected(endpoint: str, *, tls: bool, insecure: bool) -> None:
    """``endpoint`` is one that :func:`~gpurt.cluster.endpoints.check_endpoint` lets through.

    Args:
        tls: there is a certificate to use with it.
        insecure: an unprotected address is wanted.

    Raises:
        InsecureEndpoint: others could reach it unprotected; or with ``tls``, it would not be used.
    """
    # An address of NATS does not say whether certificates are used with it.
    encrypted = tls if endpoint.startswith("nats://") else endpoint.partition("/")[0] in ENCRYPTED
    if tls:
        if insecure:
            raise InsecureEndpoint("certificates and insecure exclude each other", hint="choose one")
        if not encrypted:
            raise InsecureEndpoint(
                f"{endpoint} would not use the certificates",
                hint=f"give it as tls/{endpoint.partition('/')[2]}, or leave them out",
            )
        if "#" in endpoint or "?" in endpoint:
            # zenoh takes settings there, which would override those of the certificates.
            raise InsecureEndpoint(f"{endpoint} has settings of its own", hint="with certificates, end it at the port")
        return
    if insecure:
        return
    if encrypted:
        raise InsecureEndpoint(
            f"{endpoint} needs certificates",
            hint="give --tls FOLDER (WorkerConfig.tls, MasterConfig.tls) with what gpurt cluster init and enrol made",
        )
    if not is_loopback(endpoint):
        raise InsecureEndpoint(
            f"{endpoint} can be reached from other machines, unencrypted and by everybody",
            hint="make certificates with gpurt cluster init and gpurt cluster enrol, and give --tls FOLDER; "
            "or say --insecure (insecure=True) where everybody in the network may control the cluster",
        )


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Of an endpoint that has both; an IPv6 address without its brackets."""
    host, _, port = endpoint.partition("/")[2].rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(endpoint: str) -> bool:
    """Only this machine can reach it. A name is not looked up: what it means may change, but ``localhost`` may not."""
    match = _HOST.fullmatch(endpoint)
    if match is None:
        return True  # a socket in the file system
    host = match[1].strip("[]").lower()
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
