"""One side with certificates, the other without: each is told what the other wants."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.handshake import speaks_tls
from gpurt.cluster.zenoh_engine import ZenohEngine
from tests.cluster.security.conftest import Made
from tests.cluster.support import free_port, until

pytestmark = pytest.mark.wide


@pytest.fixture
def silent() -> Iterator[str]:
    """Somebody who listens and says nothing, as a plain hub does until it has a whole message."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_without_a_certificate_a_hub_that_wants_one_is_not_waited_for(made: Made, hub: ZenohEngine) -> None:
    plain = ZenohEngine(cluster="test", endpoint=made.endpoint.replace("tls/", "tcp/"))
    async with asyncio.timeout(20):
        with pytest.raises(CredentialsRefused, match=r"hub at tcp/127\.0\.0\.1:\d+ wants certificates") as refused:
            await plain.start()
    assert "--tls FOLDER" in str(refused.value)


async def test_with_a_certificate_a_plain_hub_is_told_for_one(
    made: Made, silent: str, caplog: pytest.LogCaptureFixture
) -> None:
    made.place = made.place.model_copy(update={"endpoint": f"tls/{silent}"})
    node = made.engine(made.node("w1"))
    with caplog.at_level(logging.INFO, "gpurt.cluster.connection"):
        starting = asyncio.create_task(node.start())
        await until(lambda: "a hub without certificates?" in caplog.text, "the word", timeout=20)
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting


async def test_who_answers_decides(made: Made, hub: ZenohEngine, silent: str) -> None:
    address = made.endpoint.removeprefix("tls/")
    assert [await asyncio.to_thread(speaks_tls, f"{kind}/{address}") for kind in ("tcp", "tls")] == [True, True]
    assert await asyncio.to_thread(speaks_tls, f"tcp/{silent}") is False
    assert await asyncio.to_thread(speaks_tls, f"tcp/127.0.0.1:{free_port()}") is None
    assert await asyncio.to_thread(speaks_tls, f"quic/{address}") is None
