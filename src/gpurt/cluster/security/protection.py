"""The certificates of one connection to a cluster: its settings, and what is said about it."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gpurt.cluster.security.authority import Role
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.identity import Identity, load_identity, read_roster
from gpurt.cluster.security.refusal import refusal
from gpurt.cluster.security.tls import client_context, tls_values
from gpurt.cluster.security.watch import watch_links
from gpurt.cluster.zenoh_callbacks import SessionCallbacks

REMIND_S: Final = 86_400.0
"""How often somebody is told that a certificate ends soon."""

_log = logging.getLogger("gpurt.cluster.security")


class Protection:
    """``values``, ``client_context``, ``check_refusal`` and ``watch`` block.

    Args:
        folder: see :mod:`gpurt.cluster.security.identity`.
    """

    def __init__(self, folder: str | os.PathLike[str], cluster: str, endpoint: str, *, listen: bool) -> None:
        self._folder = Path(folder)
        self._cluster, self._endpoint, self._listen = cluster, endpoint, listen
        self._identity: Identity | None = None
        self._unreadable = ""
        self._reminder: asyncio.TimerHandle | None = None

    def values(self, zenoh: Any) -> dict[str, Any]:
        """Of a zenoh configuration; from the files as they are now.

        Raises:
            CredentialsRefused: they are missing, expired, readable by others, or of another cluster or role.
        """
        identity = self._load()
        values = tls_values(identity, listen=self._listen)
        self._identity = identity
        if "zenoh" in os.environ.get("RUST_LOG", ""):
            # The only place where zenoh tells whom it refuses. It writes to stdout, so only for who asks for it.
            zenoh.try_init_log_from_env()
        return values

    def client_context(self) -> ssl.SSLContext:
        """For a connection to a server that is no hub of zenoh; from the files as they are now.

        Raises:
            CredentialsRefused: as for ``values``.
        """
        identity = self._load()
        context = client_context(identity)
        self._identity = identity
        return context

    @property
    def name(self) -> str:
        """In the certificate that was loaded last."""
        assert self._identity is not None
        return self._identity.name

    @property
    def role(self) -> Role:
        assert self._identity is not None
        return self._identity.role

    def check_refusal(self) -> None:
        """The session could not be opened: end the attempts where a certificate is why.

        Raises:
            CredentialsRefused: the hub refuses ours, or we refuse its.
        """
        assert self._identity is not None
        reason = refusal(self._identity, self._endpoint)
        if reason is not None:
            raise CredentialsRefused(
                f"the hub at {self._endpoint} is there, but {reason}",
                hint="are both from the same gpurt cluster init, in time, and is the hub's host among its names?",
            )

    def watch(self, session: Any, callbacks: SessionCallbacks, opened: Any) -> None:
        assert self._identity is not None
        watch_links(session, callbacks, opened, self._identity.roster)

    def roster_changed(self) -> bool:
        """Whether the roster on the disk is another than that of ``values``. Blocks. One that cannot be read is none:
        that is said once, and the hub goes on with what it has."""
        assert self._identity is not None
        try:
            roster = read_roster(self._folder)
        except CredentialsRefused as exc:
            if str(exc) != self._unreadable:
                self._unreadable = str(exc)
                _log.warning("the hub goes on with the roster that it has: %s", exc)
            return False
        self._unreadable = ""
        return roster != self._identity.roster

    @property
    def roster(self) -> Mapping[str, Role]:
        assert self._identity is not None
        return self._identity.roster

    def trouble(self) -> str | None:
        """What is wrong with the certificate by now: a reason why a connection has ended and does not come back."""
        try:
            load_identity(self._folder)
        except CredentialsRefused as exc:
            return str(exc)
        return None

    def remind(self) -> None:
        """Say, today and every day until ``forget``, that the certificate ends soon, once it does: a hub or a node may
        run for longer than its certificate. On the loop."""
        identity = self._identity
        assert identity is not None
        if datetime.now(UTC) >= identity.renew_at:
            _log.warning(
                "the certificate in %s ends at %s UTC: renew it with gpurt cluster enrol %s%s",
                self._folder,
                f"{identity.not_after:%Y-%m-%d %H:%M}",
                identity.name,
                " --role hub, and start the hub again" if identity.role is Role.HUB else "",
            )
        self._reminder = asyncio.get_running_loop().call_later(REMIND_S, self.remind)

    def forget(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None

    def _load(self) -> Identity:
        identity = load_identity(self._folder)
        if identity.cluster != self._cluster:
            raise CredentialsRefused(f"{self._folder} is of cluster {identity.cluster!r}, not of {self._cluster!r}")
        return identity

    def check_node(self, node: str) -> None:
        """
        Raises:
            CredentialsRefused: the certificate is of another name: the hub would let nothing through.
        """
        identity = self._identity
        if identity is not None and (identity.role, identity.name) != (Role.NODE, node):
            raise CredentialsRefused(
                f"the certificate in {self._folder} is of {identity.role} {identity.name!r}, not of node {node!r}",
                hint="a node's name is its certificate's: leave out --node, or enrol that name",
            )
