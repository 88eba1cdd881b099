"""Nodes that talk to each other without the hub, each with the certificate that it shows the hub.

A node's certificate is for clients only, so that its key cannot play the hub. Between two nodes somebody has to listen
all the same: that side's certificate is therefore not judged by TLS, which would ask for a server's, but by us. It has
to be issued by the cluster's authority, in time, of a node, and of the very node that was called. TLS itself proves
that the other side has the key.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpurt.cluster.security.authority import Role, load_certificate
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.identity import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    Identity,
    check_time,
    load_identity,
    subject_of,
)

if TYPE_CHECKING:
    from cryptography import x509


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """What a node shows other nodes, and what it asks of them."""

    identity: Identity
    authority: x509.Certificate
    listening: ssl.SSLContext
    """For the side that is called: who calls has to show a certificate of the authority."""
    calling: ssl.SSLContext
    """For the side that calls. It has to have ``check`` look at the certificate before it says anything."""

    def check(self, certificate: bytes | None, *, name: str | None = None) -> str:
        """The name of the node whose certificate (DER) the other side has shown.

        Args:
            name: of the node that was called; None: any node of the cluster will do.

        Raises:
            CredentialsRefused: none, of another authority or cluster, out of time, of no node, or of another node.
        """
        if not certificate:
            raise CredentialsRefused("the other side has shown no certificate")
        who = Path("the certificate of the other side")
        shown = load_certificate(ssl.DER_cert_to_PEM_cert(certificate).encode())
        try:
            shown.verify_directly_issued_by(self.authority)
        except Exception as exc:  # a signature, a name or an algorithm: whatever it is, it is not from there
            raise CredentialsRefused(f"{who} was not issued by this cluster's authority") from exc
        check_time(who, shown, datetime.now(UTC))
        told, role = subject_of(who, shown, self.identity.cluster)
        if role is not Role.NODE:
            raise CredentialsRefused(f"{who} is of {role} {told!r}, not of a node")
        if name is not None and told != name:
            raise CredentialsRefused(f"{who} is of node {told!r}, not of node {name!r}")
        return told


Credentials = Callable[[], PeerCredentials]
"""Reads them from the files as they are then, so that a renewed certificate needs no new start. Not for the event loop.

Raises:
    CredentialsRefused: as :func:`load_peer_credentials`.
"""


def load_peer_credentials(folder: str | os.PathLike[str]) -> PeerCredentials:
    """Of a node's folder. Reads files: not for the event loop.

    Raises:
        CredentialsRefused: as ``load_identity``, or of another role than a node.
    """
    identity = load_identity(folder)
    if identity.role is not Role.NODE:
        raise CredentialsRefused(f"{identity.folder} is of {identity.role} {identity.name!r}, not of a node")
    listening = _shown(identity, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    listening.load_verify_locations(identity.folder / AUTHORITY)
    listening.verify_mode = ssl.CERT_REQUIRED
    calling = _shown(identity, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    calling.check_hostname = False
    calling.verify_mode = ssl.CERT_NONE
    authority = load_certificate((identity.folder / AUTHORITY).read_bytes())
    return PeerCredentials(identity, authority, listening, calling)


def _shown(identity: Identity, context: ssl.SSLContext) -> ssl.SSLContext:
    """``context`` with the node's own certificate in it."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity.folder / CERTIFICATE, identity.folder / KEY)
    return context
