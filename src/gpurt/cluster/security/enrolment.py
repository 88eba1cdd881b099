"""A cluster's authority in a folder, and what is issued from it. ::

FOLDER/             0700, on one machine only, best on none that runs nodes
  ca.pem  ca.key    the authority; whoever has the key can be anybody
  cluster.json
  hub/              the hub's own folder; roster.json in it says who may connect
  nodes/NAME/       one for each participant, to be carried there
  retired/          what was renewed
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from gpurt.cluster.keys import check_name
from gpurt.cluster.security.authority import (
    DAYS,
    Issued,
    Role,
    issue,
    load_certificate,
    load_cryptography,
    load_key,
    make_authority,
)
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.files import check_private, new_folder, replace_file, write_new
from gpurt.cluster.security.identity import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    PLACE,
    ROSTER,
    Place,
    Roster,
    encode,
    read_place,
    read_roster,
    renewal_due,
)
from gpurt.errors import UntrustedFile
from gpurt.registry.trust import check_trusted

AUTHORITY_KEY: Final = "ca.key"
HUB: Final = "hub"
PORT: Final = 7447
LOCK_S: Final = 10.0

_HOST: Final = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_-]{1,63})*\.?")
_NUMBERS: Final = re.compile(r"[0-9.]+")


def init_cluster(
    folder: str | os.PathLike[str],
    *,
    cluster: str = "default",
    hosts: Sequence[str],
    port: int = PORT,
    days: float = DAYS,
) -> Place:
    """Make an authority and the hub's certificate.

    Args:
        folder: new or empty.
        hosts: names and addresses under which the hub is reached; workers use the first.

    Raises:
        CredentialsRefused: the folder is in use, or a host is malformed. InvalidName: cluster.
    """
    check_name(cluster, "cluster")
    if not hosts or not 1 <= port <= 65535:
        raise CredentialsRefused("a hub needs a host and a port from 1 to 65535")
    for host in hosts:
        check_host(host)
    first = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    place = Place(cluster=cluster, endpoint=f"tls/{first}:{port}", hosts=tuple(dict.fromkeys(hosts)))
    with new_folder(Path(folder)) as staged:
        authority = make_authority(cluster)
        write_new(
            staged,
            {AUTHORITY: authority.certificate, AUTHORITY_KEY: authority.key, PLACE: encode(place)},
        )
        hub = staged / HUB
        hub.mkdir(mode=0o700)
        (staged / "nodes").mkdir(mode=0o700)
        issued = issue(authority, cluster=cluster, name=HUB, role=Role.HUB, hosts=place.hosts, days=days)
        _write_participant(hub, authority, issued, place)
        write_new(hub, {ROSTER: encode(Roster(names={}))})
    return place


def enrol(
    folder: str | os.PathLike[str], name: str, *, role: Role = Role.NODE, days: float = DAYS, renew: bool = False
) -> Path:
    """Issue a certificate, and return the folder that is to be carried to its owner.

    For a name that has one, the next: with a new key, the one before goes to ``retired``. That remains valid until it
    ends, so this alone does not take a stolen key's power away.

    Args:
        name: of the node; with ``Role.HUB`` it is ``hub``.
        renew: also where the certificate that is there has long to go.

    Raises:
        CredentialsRefused: no authority there, the name has another role, or its certificate has long to go.
        InvalidName: name.
    """
    if role is not Role.HUB:
        check_name(name, "node")
    elif name != HUB:
        raise CredentialsRefused(f"the hub's name is {HUB!r}, not {name!r}")
    folder = Path(folder)
    place, authority = read_place(folder, made_by="gpurt cluster init"), _authority(folder)
    with _alone(folder):
        return _enrol(folder, place, authority, name, role, days, renew)


def revoke(folder: str | os.PathLike[str], name: str) -> None:
    """Take ``name`` off the hub's roster: whatever certificate it has, a hub that starts from now on lets it say and
    hear nothing. The name is not given again.

    Raises:
        CredentialsRefused: no such name.
    """
    folder = Path(folder)
    read_place(folder, made_by="gpurt cluster init")
    with _alone(folder):
        roster = read_roster(folder / HUB)
        if roster.pop(name, None) is None:
            raise CredentialsRefused(f"{name!r} is not enrolled in {folder}")
        replace_file(folder / HUB / ROSTER, encode(Roster(names=roster)))


def check_host(host: str) -> str:
    """
    Raises:
        CredentialsRefused: neither an address nor the name of a host.
    """
    with suppress(ValueError):
        if not ipaddress.ip_address(host).is_unspecified and "%" not in host:
            return host
    if not _HOST.fullmatch(host) or _NUMBERS.fullmatch(host):
        raise CredentialsRefused(f"{host!r} is neither the name of a host nor an address")
    return host


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """No other process changes ``folder`` meanwhile."""
    try:
        with FileLock(folder / ".lock", timeout=LOCK_S, mode=0o600):
            yield
    except Timeout as exc:
        raise CredentialsRefused(f"{folder} is in use by another gpurt cluster") from exc
    except OSError as exc:
        raise CredentialsRefused(f"cannot change {folder}: {exc}") from exc


def _enrol(folder: Path, place: Place, authority: Issued, name: str, role: Role, days: float, renew: bool) -> Path:
    target = folder / HUB if role is Role.HUB else folder / "nodes" / name
    roster = read_roster(folder / HUB)
    if role is not Role.HUB and roster.get(name, role) is not role:
        raise CredentialsRefused(
            f"{name!r} is enrolled as {roster[name]}, and a certificate of that name may be in use",
            hint="choose another name",
        )
    if target.exists():
        if role is not Role.HUB and name not in roster:
            raise CredentialsRefused(f"{name!r} was revoked", hint="choose another name")
        _check_due(target, name, renew)
    elif role is not Role.HUB:
        # First, so that no certificate is out that the hub has not heard of.
        replace_file(folder / HUB / ROSTER, encode(Roster(names={**roster, name: role})))
    hosts = place.hosts if role is Role.HUB else ()
    issued = issue(authority, cluster=place.cluster, name=name, role=role, hosts=hosts, days=days)
    if target.exists():
        retired = folder / "retired"
        retired.mkdir(mode=0o700, exist_ok=True)
        target.rename(retired / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
    with new_folder(target) as staged:
        _write_participant(staged, authority, issued, place)
        if role is Role.HUB:
            write_new(staged, {ROSTER: encode(Roster(names=roster))})
    return target


def _check_due(target: Path, name: str, renew: bool) -> None:
    certificate = load_certificate((target / CERTIFICATE).read_bytes())
    if not renew and datetime.now(UTC) < renewal_due(certificate):
        raise CredentialsRefused(
            f"{name!r} is enrolled, and its certificate is valid until {certificate.not_valid_after_utc:%Y-%m-%d}",
            hint=f"it is in {target}; --renew makes another all the same",
        )


def _write_participant(folder: Path, authority: Issued, issued: Issued, place: Place) -> None:
    files = {AUTHORITY: authority.certificate, CERTIFICATE: issued.certificate, KEY: issued.key, PLACE: encode(place)}
    write_new(folder, files)


def _authority(folder: Path) -> Issued:
    load_cryptography()
    try:
        check_private(folder / AUTHORITY_KEY)
        for each in (AUTHORITY, AUTHORITY_KEY):
            check_trusted(folder / each)
        certificate, key = (folder / AUTHORITY).read_bytes(), (folder / AUTHORITY_KEY).read_bytes()
        load_key(key)
        return Issued(certificate, key, load_certificate(certificate).not_valid_after_utc)
    except UntrustedFile as exc:
        raise CredentialsRefused(exc.message, hint=exc.hint) from exc
    except OSError as exc:
        raise CredentialsRefused(
            f"no authority in {folder}: {exc.strerror}", hint="gpurt cluster init DIR makes one"
        ) from exc
    except ValueError as exc:
        raise CredentialsRefused(f"the authority in {folder} cannot be read: {exc}") from exc
