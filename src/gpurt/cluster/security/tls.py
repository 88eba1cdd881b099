"""What certificates mean for a connection: zenoh's settings, and a context for what is no zenoh."""

from __future__ import annotations

import ssl
from typing import Any

from gpurt.cluster.security.access import access_control
from gpurt.cluster.security.authority import Role
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.identity import AUTHORITY, CERTIFICATE, KEY, Identity
from gpurt.cluster.security.loopback import ENCRYPTED


def tls_values(identity: Identity, *, listen: bool) -> dict[str, Any]:
    """Values of a zenoh configuration.

    Raises:
        CredentialsRefused: a hub's certificate for a client, or a client's for a hub.
    """
    _check_side(identity, listen=listen)
    side = "listen" if listen else "connect"
    tls = "transport/link/tls"
    values: dict[str, Any] = {
        # Nothing else is listened on or connected to, whatever an endpoint says.
        "transport/link/protocols": list(ENCRYPTED),
        f"{tls}/root_ca_certificate": str(identity.folder / AUTHORITY),
        f"{tls}/{side}_certificate": str(identity.folder / CERTIFICATE),
        f"{tls}/{side}_private_key": str(identity.folder / KEY),
        f"{tls}/enable_mtls": True,
        f"{tls}/verify_name_on_connect": True,
        # A certificate that ends while its owner is connected ends the connection, too.
        f"{tls}/close_link_on_expiration": True,
    }
    if listen:
        values["access_control"] = access_control(identity.cluster, identity.roster)
    return values


def client_context(identity: Identity) -> ssl.SSLContext:
    """TLS 1.3 with certificates on both sides. Reads files.

    Raises:
        CredentialsRefused: a hub's certificate.
    """
    _check_side(identity, listen=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the other side's certificate and name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(identity.folder / AUTHORITY)
    context.load_cert_chain(identity.folder / CERTIFICATE, identity.folder / KEY)
    return context


def _check_side(identity: Identity, *, listen: bool) -> None:
    if listen != (identity.role is Role.HUB):
        wanted = "the hub" if listen else "a node, a master or an observer"
        raise CredentialsRefused(
            f"{identity.folder} is of {identity.role} {identity.name!r}, not of {wanted}",
            hint="a master that listens is the hub, and takes the folder hub; a worker takes nodes/NAME",
        )
