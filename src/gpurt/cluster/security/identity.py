"""The folder of one participant: its certificate, its key, the authority's certificate, and for a hub who may connect.

It is what ``gpurt cluster enrol`` makes and what is carried to the participant's machine, whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from gpurt.cluster.errors import ClusterError
from gpurt.cluster.keys import check_name
from gpurt.cluster.message_limits import strict_json, summary
from gpurt.cluster.security.authority import Role, load_certificate, load_cryptography, load_key
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.files import check_private
from gpurt.cluster.security.loopback import is_loopback
from gpurt.cluster.zenoh_settings import check_endpoint
from gpurt.errors import UntrustedFile
from gpurt.registry.trust import check_trusted

if TYPE_CHECKING:
    from cryptography import x509

AUTHORITY: Final = "ca.pem"
CERTIFICATE: Final = "cert.pem"
KEY: Final = "key.pem"
PLACE: Final = "cluster.json"
ROSTER: Final = "roster.json"

RENEW_WITHIN: Final = 1 / 3
"""The last part of a certificate's validity, in which it is renewed."""


class Place(BaseModel):
    """Which cluster, and where its hub is."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    cluster: str
    endpoint: str
    hosts: tuple[str, ...] = ()
    """What the hub's certificate says: its names and addresses."""


class Roster(BaseModel):
    """Who may connect: role by name."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    names: Mapping[str, Role]


@dataclass(frozen=True, slots=True)
class Identity:
    """One participant, as its certificate says."""

    folder: Path
    cluster: str
    endpoint: str
    """Of the hub."""
    name: str
    role: Role
    not_after: datetime
    renew_at: datetime
    """From then on it may be renewed, and asks for it."""
    roster: Mapping[str, Role]
    """Of a hub; empty for others."""

    @property
    def listen_endpoint(self) -> str:
        """Where a hub listens for those who know it by ``endpoint``: on every address, because a machine's own name
        often means loopback on the machine itself."""
        if is_loopback(self.endpoint):
            return self.endpoint
        port = self.endpoint.rpartition(":")[2]
        return f"tls/[::]:{port}" if "[" in self.endpoint else f"tls/0.0.0.0:{port}"


def read_place(folder: Path, *, made_by: str = "gpurt cluster enrol") -> Place:
    """
    Args:
        made_by: the command that makes such a folder, for who has named another.

    Raises:
        CredentialsRefused: it is not there or not that.
    """
    try:
        place = Place.model_validate(_json(folder / PLACE, made_by))
        check_name(place.cluster, "cluster")
        check_endpoint(place.endpoint)
    except ValidationError as exc:
        raise CredentialsRefused(f"{folder / PLACE}: {summary(exc)}") from exc
    except CredentialsRefused:
        raise
    except ClusterError as exc:
        raise CredentialsRefused(f"{folder / PLACE}: {exc.message}") from exc
    return place


def read_roster(folder: Path) -> dict[str, Role]:
    """
    Raises:
        CredentialsRefused: it is not there or not that.
    """
    try:
        return dict(Roster.model_validate(_json(folder / ROSTER)).names)
    except ValidationError as exc:
        raise CredentialsRefused(f"{folder / ROSTER}: {summary(exc)}") from exc


def load_identity(folder: str | os.PathLike[str], *, now: datetime | None = None) -> Identity:
    """Read and check a folder; reads files.

    Raises:
        CredentialsRefused: something is missing, readable by others, expired, or does not belong together.
    """
    folder = Path(folder)
    load_cryptography()
    now = now or datetime.now(UTC)
    key_file = folder / KEY
    pems = {name: _read(folder / name) for name in (AUTHORITY, CERTIFICATE, KEY)}
    check_private(key_file)
    authority = _certificate(folder / AUTHORITY, pems[AUTHORITY])
    certificate = _certificate(folder / CERTIFICATE, pems[CERTIFICATE])
    try:
        key = load_key(pems[KEY])
    except ValueError as exc:
        raise CredentialsRefused(f"{key_file} is not a private key: {exc}") from exc
    if key.public_key() != certificate.public_key():
        raise CredentialsRefused(f"{key_file} is not the key of {folder / CERTIFICATE}", hint="copy the whole folder")
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception as exc:  # a signature, a name or an algorithm: whatever it is, it is not from there
        raise CredentialsRefused(
            f"{folder / CERTIFICATE} was not issued by the authority in {folder / AUTHORITY}",
            hint="copy the whole folder that gpurt cluster enrol made",
        ) from exc
    check_time(folder / CERTIFICATE, certificate, now)
    check_time(folder / AUTHORITY, authority, now)
    place = read_place(folder)
    name, role = subject_of(folder / CERTIFICATE, certificate, place.cluster)
    roster = read_roster(folder) if role is Role.HUB else {}
    return Identity(
        folder,
        place.cluster,
        place.endpoint,
        name,
        role,
        certificate.not_valid_after_utc,
        renewal_due(certificate),
        roster,
    )


def renewal_due(certificate: x509.Certificate) -> datetime:
    """When the last part of its validity begins."""
    ends = certificate.not_valid_after_utc
    return ends - (ends - certificate.not_valid_before_utc) * RENEW_WITHIN


def check_time(path: Path, certificate: x509.Certificate, now: datetime) -> None:
    """
    Raises:
        CredentialsRefused: it is not valid yet, or not any more.
    """
    ends, begins = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    if now >= ends:
        raise CredentialsRefused(
            f"{path} has expired: it was valid until {ends:%Y-%m-%d %H:%M} UTC",
            hint="gpurt cluster enrol NAME makes the next one, where the cluster's authority is",
        )
    if now < begins:
        raise CredentialsRefused(
            f"{path} is not valid before {begins:%Y-%m-%d %H:%M} UTC", hint="is the clock of this machine right?"
        )


def subject_of(path: Path, certificate: x509.Certificate, cluster: str) -> tuple[str, Role]:
    """The common name of a certificate, and its role in ``cluster``.

    Raises:
        CredentialsRefused: it is none of ours, or of another cluster.
    """
    from cryptography.x509.oid import NameOID

    oids = (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME, NameOID.ORGANIZATION_NAME)
    found = [certificate.subject.get_attributes_for_oid(oid) for oid in oids]
    values = [str(attributes[0].value) if len(attributes) == 1 else "" for attributes in found]
    name, role, organization = values
    if role not in set(Role) or not name:
        raise CredentialsRefused(f"{path} is not a certificate of gpurt cluster enrol")
    if organization != cluster:
        raise CredentialsRefused(f"{path} is of cluster {organization!r}, not of {cluster!r}")
    return name, Role(role)


def _certificate(path: Path, pem: bytes) -> x509.Certificate:
    try:
        return load_certificate(pem)
    except ValueError as exc:
        raise CredentialsRefused(f"{path} is not a certificate") from exc


def _json(path: Path, made_by: str = "gpurt cluster enrol") -> Any:
    try:
        return strict_json(_read(path, made_by), str(path))
    except CredentialsRefused:
        raise
    except ClusterError as exc:
        raise CredentialsRefused(exc.message) from exc


def _read(path: Path, made_by: str = "gpurt cluster enrol") -> bytes:
    try:
        with open(path, "rb") as file:
            check_trusted(path, file.fileno())
            return file.read()
    except UntrustedFile as exc:
        raise CredentialsRefused(exc.message, hint=exc.hint) from exc
    except OSError as exc:
        raise CredentialsRefused(
            f"cannot read {path}: {exc.strerror}", hint=f"give the folder that {made_by} made"
        ) from exc


def encode(document: BaseModel) -> bytes:
    return json.dumps({"schema": 1, **document.model_dump(mode="json")}, indent=1).encode() + b"\n"
