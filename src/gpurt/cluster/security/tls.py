"""zenoh's settings for a session that certificates protect."""

from __future__ import annotations

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
    if listen != (identity.role is Role.HUB):
        wanted = "the hub" if listen else "a node, a master or an observer"
        raise CredentialsRefused(
            f"{identity.folder} is of {identity.role} {identity.name!r}, not of {wanted}",
            hint="a master that listens is the hub, and takes the folder hub; a worker takes nodes/NAME",
        )
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
