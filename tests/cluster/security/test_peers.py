"""Nodes measure the ways between them with the certificates that they show the hub, and with no others."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from gpurt.cluster.errors import ClusterError
from gpurt.cluster.link_probe import probe_link
from gpurt.cluster.link_protocol import HELLO, MAGIC, LinkBudget, split_endpoint
from gpurt.cluster.link_server import LinkServer, Slot
from gpurt.cluster.security.authority import Role
from gpurt.cluster.security.enrolment import enrol, init_cluster
from gpurt.cluster.security.errors import CredentialsRefused, InsecureEndpoint
from gpurt.cluster.security.identity import CERTIFICATE, KEY
from gpurt.cluster.security.peers import Credentials, PeerCredentials, load_peer_credentials
from tests.cluster.security.conftest import Made

SMALL = LinkBudget(pings=2, bytes=64 << 10)


class Listening:
    """Node w2, and what its server has let through."""

    def __init__(self, made: Made) -> None:
        self.slot = Slot()
        self.made = made
        self.server: LinkServer
        self.endpoint = ""

    def reached(self) -> bool:
        """Somebody's measurement has begun."""
        free = self.slot.take()
        self.slot.give_back()
        return not free


def shown(folder: Path) -> Credentials:
    return partial(load_peer_credentials, folder)


async def loaded(folder: Path) -> PeerCredentials:
    return await asyncio.to_thread(load_peer_credentials, folder)


@pytest.fixture
async def listening(made: Made) -> AsyncIterator[Listening]:
    node = Listening(made)
    node.server = LinkServer(node.slot, shown(made.node("w2")))
    node.endpoint = await node.server.start("127.0.0.1")
    yield node
    await node.server.aclose()


async def test_a_node_measures_another_one(made: Made, listening: Listening) -> None:
    assert listening.endpoint.startswith("tls/")
    sample = await probe_link("w2", listening.endpoint, SMALL, credentials=shown(made.node("w1")))
    assert sample.bandwidth > 0
    # What the other tests here ask with: it does tell who is let through.
    assert not await _refused(listening, (await loaded(made.node("w1"))).calling)


async def test_another_node_than_the_one_that_was_called_is_refused(made: Made, listening: Listening) -> None:
    with pytest.raises(CredentialsRefused, match="of node 'w2', not of node 'w3'"):
        await probe_link("w3", listening.endpoint, SMALL, credentials=shown(made.node("w1")))


async def test_a_node_of_another_authority_is_refused_by_both_sides(
    made: Made, listening: Listening, tmp_path: Path
) -> None:
    """The same cluster name, the same node name, and an authority of its own."""
    other = tmp_path / "other"
    await asyncio.to_thread(init_cluster, other, cluster="test", hosts=["127.0.0.1"], port=7448)
    await asyncio.to_thread(enrol, other, "w1", role=Role.NODE)
    stranger = await loaded(other / "nodes" / "w1")
    with pytest.raises(CredentialsRefused, match="not issued by this cluster's authority"):
        await probe_link("w2", listening.endpoint, SMALL, credentials=lambda: stranger)
    # And one that does not look at whom it has called gets nowhere either.
    assert await _refused(listening, stranger.calling)


@pytest.mark.parametrize("role", [Role.MASTER, Role.OBSERVER, Role.HUB])
async def test_only_nodes_call(made: Made, listening: Listening, role: Role) -> None:
    folder = {Role.HUB: made.hub, Role.MASTER: made.node("m1"), Role.OBSERVER: made.node("o1")}[role]
    with pytest.raises(CredentialsRefused, match="not of a node"):
        await loaded(folder)
    assert await _refused(listening, await asyncio.to_thread(_context, folder))


async def test_an_expired_certificate_is_refused_by_both_sides(
    made: Made, listening: Listening, tmp_path: Path
) -> None:
    old = await asyncio.to_thread(made.changed, tmp_path / "old", "w1", begin=timedelta(days=-10), days=5)
    with pytest.raises(CredentialsRefused, match="expired"):
        await loaded(old)
    assert await _refused(listening, await asyncio.to_thread(_context, old))
    # It has expired since the server has started.
    credentials = await loaded(made.node("w2"))
    expired = await asyncio.to_thread(made.changed, tmp_path / "expired", "w2", begin=timedelta(days=-10), days=5)
    context = await asyncio.to_thread(_context, expired, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    server = LinkServer(Slot(), lambda: replace(credentials, listening=context))
    endpoint = await server.start("127.0.0.1")
    with pytest.raises(CredentialsRefused, match="expired"):
        await probe_link("w2", endpoint, SMALL, credentials=shown(made.node("w1")))
    await server.aclose()


async def test_a_renewed_certificate_needs_no_new_start(made: Made, tmp_path: Path) -> None:
    folder = await asyncio.to_thread(made.changed, tmp_path / "w2", "w2", begin=timedelta(days=-10), days=5)
    server = LinkServer(Slot(), shown(folder))
    endpoint = await server.start("127.0.0.1")
    with pytest.raises(ClusterError):
        await probe_link("w2", endpoint, SMALL, credentials=shown(made.node("w1")))
    for name in (CERTIFICATE, KEY):
        await asyncio.to_thread(shutil.copyfile, made.node("w2") / name, folder / name)
    assert await probe_link("w2", endpoint, SMALL, credentials=shown(made.node("w1")))
    await server.aclose()


async def test_without_a_certificate_nothing_is_measured(made: Made, listening: Listening) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    assert await _refused(listening, bare)
    assert await _refused(listening, None)
    with pytest.raises(InsecureEndpoint, match="asks for a certificate"):
        await probe_link("w2", listening.endpoint, SMALL)
    plain = listening.endpoint.replace("tls/", "tcp/")
    with pytest.raises(InsecureEndpoint, match="would not use the certificates"):
        await probe_link("w2", plain, SMALL, credentials=shown(made.node("w1")))
    with pytest.raises(ClusterError):
        await probe_link("w2", plain, SMALL)


def _context(folder: Path, context: ssl.SSLContext | None = None) -> ssl.SSLContext:
    """Of somebody who judges nobody; a caller unless ``context`` says otherwise."""
    context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    return context


async def _refused(listening: Listening, context: ssl.SSLContext | None) -> bool:
    """The server ends the connection without a word, and no measurement has begun."""
    _, host, port = split_endpoint(listening.endpoint)
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            writer.write(HELLO.pack(MAGIC, 1, 1 << 16))
            answer = await reader.read(1)
        finally:
            writer.transport.abort()
    except (OSError, EOFError):
        answer = b""
    return not answer and not listening.reached()


def test_nobody_shows_nothing(made: Made) -> None:
    credentials: PeerCredentials = load_peer_credentials(made.node("w1"))
    with pytest.raises(CredentialsRefused, match="no certificate"):
        credentials.check(None)
