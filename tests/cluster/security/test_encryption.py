"""What a connection is encrypted with, and whom its two ends take for each other."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurt.cluster.link_server import LinkServer, Slot
from gpurt.cluster.security.identity import CERTIFICATE, KEY, load_identity
from gpurt.cluster.security.peers import load_peer_credentials
from gpurt.cluster.security.tls import client_context
from gpurt.cluster.zenoh_engine import ZenohEngine
from tests.cluster.security.conftest import Made


async def version_with(endpoint: str, context: ssl.SSLContext) -> str | None:
    """What was agreed on with the server at ``endpoint``; the error of a refusal."""
    host, port = endpoint.partition("/")[2].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=host)
    try:
        agreed: ssl.SSLObject = writer.get_extra_info("ssl_object")
        # In TLS 1.3 a server refuses a certificate only after the client's end of the handshake.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                assert await reader.read(1) != b""
        return agreed.version()
    finally:
        writer.transport.abort()


async def context_of(folder: Path, change: Callable[[ssl.SSLContext], None] = lambda _: None) -> ssl.SSLContext:
    context = await asyncio.to_thread(lambda: client_context(load_identity(folder)))
    change(context)
    return context


def to_tls_1_2(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2


async def test_node_and_hub_speak_tls_1_3_and_both_show_a_certificate(made: Made, hub: ZenohEngine) -> None:
    assert await version_with(made.endpoint, await context_of(made.node("w1"))) == "TLSv1.3"
    unknown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    await asyncio.to_thread(unknown.load_verify_locations, made.folder / "ca.pem")
    with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
        await version_with(made.endpoint, unknown)


async def test_node_and_node_speak_tls_1_3_and_nothing_older(made: Made) -> None:
    server = LinkServer(Slot(), lambda: load_peer_credentials(made.node("w2")))
    endpoint = await server.start("127.0.0.1")
    try:
        credentials = await asyncio.to_thread(load_peer_credentials, made.node("w1"))
        assert await version_with(endpoint, credentials.calling) == "TLSv1.3"
        old = await asyncio.to_thread(load_peer_credentials, made.node("w1"))
        to_tls_1_2(old.calling)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await version_with(endpoint, old.calling)
    finally:
        await server.aclose()


async def test_the_hub_speaks_nothing_older(made: Made, hub: ZenohEngine) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await version_with(made.endpoint, await context_of(made.node("w1"), to_tls_1_2))


def test_keys_are_for_their_owner_alone(made: Made) -> None:
    for folder in (made.hub, made.node("w1")):
        assert stat.S_IMODE((folder / KEY).stat().st_mode) == 0o600
        assert (folder / CERTIFICATE).exists()
