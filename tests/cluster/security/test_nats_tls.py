"""The bus over a NATS server that asks for certificates."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpurt.cluster.bus import StateReply
from gpurt.cluster.nats_engine import NatsEngine
from gpurt.cluster.security.authority import Role
from gpurt.cluster.security.enrolment import enrol, init_cluster
from gpurt.cluster.security.errors import CredentialsRefused, InsecureEndpoint
from gpurt.cluster.security.identity import Identity
from gpurt.cluster.security.tls import client_context
from tests.cluster.nats_server import NatsServer
from tests.cluster.support import until

TLS = """
jetstream: {{}}
tls {{
  cert_file: "{hub}/cert.pem"
  key_file: "{hub}/key.pem"
  ca_file: "{hub}/ca.pem"
  verify: true
  {more}
}}
"""


def make(folder: Path) -> Path:
    init_cluster(folder, cluster="test", hosts=["127.0.0.1"])
    return folder


def server_of(folder: Path, more: str = "handshake_first: true") -> NatsServer:
    return NatsServer.configured(TLS.format(hub=folder / "hub", more=more)).start()


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    folder = make(tmp_path / "cluster")
    enrol(folder, "m1", role=Role.MASTER)
    enrol(folder, "w1")
    return folder


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """Of another authority, with the same name."""
    return enrol(make(tmp_path / "other"), "w1")


@pytest.fixture
def offering(cluster: Path) -> Iterator[NatsServer]:
    made = server_of(cluster, more="")
    yield made
    made.end()


@pytest.fixture
def server(cluster: Path) -> Iterator[NatsServer]:
    made = server_of(cluster)
    yield made
    made.end()


def engine(server: NatsServer, folder: Path | None, **options: Any) -> NatsEngine:
    return NatsEngine(cluster="test", endpoint=server.endpoint, tls=folder, **options)


async def test_who_has_a_certificate_takes_part(cluster: Path, server: NatsServer) -> None:
    master = engine(server, cluster / "nodes" / "m1")
    node = engine(server, cluster / "nodes" / "w1")
    await master.start()  # makes the stream
    await node.start()
    try:
        with pytest.raises(CredentialsRefused, match="not of node 'w2'"):
            await node.join("w2", b"")
        await node.join("w1", b"state")
        await node.publish(b"event")
        assert await master.snapshot("w1") == (StateReply("w1", b"state"),)
    finally:
        await node.close()
        await master.close()


async def test_another_authority_is_refused(cluster: Path, server: NatsServer, stranger: Path) -> None:
    with pytest.raises(CredentialsRefused, match="certificate of the NATS server at nats://127"):
        await engine(server, stranger).start()
    with pytest.raises(CredentialsRefused, match="of hub 'hub'"):
        await engine(server, cluster / "hub").start()


async def test_the_server_refuses_whom_it_does_not_know(
    server: NatsServer, cluster: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(identity: Identity) -> ssl.SSLContext:
        context = client_context(identity)
        context.load_verify_locations(cluster / "ca.pem")
        return context

    monkeypatch.setattr("gpurt.cluster.security.protection.client_context", trusting)
    with pytest.raises(CredentialsRefused, match="refuses our certificate"):
        await engine(server, stranger).start()


async def test_a_server_that_only_offers_tls_is_refused(cluster: Path, offering: NatsServer) -> None:
    """It could be somebody in between who does not offer it."""
    with pytest.raises(CredentialsRefused, match="handshake_first"):
        await engine(offering, cluster / "nodes" / "w1").start()


async def test_without_a_certificate_one_is_asked_for(
    server: NatsServer, offering: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CredentialsRefused, match="wants certificates") as refused:
        await engine(offering, None).start()
    assert "--tls FOLDER" in str(refused.value)
    starting = asyncio.create_task(engine(server, None).start())
    with caplog.at_level(logging.INFO, "gpurt.cluster.connection"):
        await until(lambda: "it wants certificates: give --tls FOLDER" in caplog.text, "the word", timeout=20)
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting


def test_plaintext_stays_on_this_machine() -> None:
    with pytest.raises(InsecureEndpoint, match="unencrypted"):
        NatsEngine(endpoint="nats://nats.example:4222")
    with pytest.raises(InsecureEndpoint, match="exclude"):
        NatsEngine(endpoint="nats://nats.example:4222", tls="folder", insecure=True)
    NatsEngine(endpoint="nats://nats.example:4222", insecure=True)
    NatsEngine(endpoint="nats://[::1]:4222")
