"""Strangers at the hub's door keep nobody out, and what the door lets through is whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.cluster.errors import BusUnavailable
from gpurt.cluster.security import door as doors
from gpurt.cluster.security.door import Door, hello_complete
from gpurt.cluster.security.enrolment import enrol, init_cluster
from gpurt.cluster.zenoh_engine import ZenohEngine
from tests.cluster.security.conftest import Made
from tests.cluster.security.strangers import KINDS, Strangers, client_hello
from tests.cluster.support import free_port

IN_S = 5.0
"""Within this a node is in, whatever strangers do."""


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The folder of a node of another cluster."""
    init_cluster(tmp_path / "foreign", cluster="test", hosts=["127.0.0.1"])
    return enrol(tmp_path / "foreign", "w1")


async def joins_within(made: Made, hub: ZenohEngine, name: str) -> float:
    begin = time.monotonic()
    engine = made.engine(made.node(name))
    try:
        async with asyncio.timeout(2 * IN_S):
            await engine.start()
            await engine.join(name, b"state")
            while not await hub.snapshot(name, timeout=1):
                await asyncio.sleep(0.01)
    finally:
        await engine.close()
    return time.monotonic() - begin


async def besieged(made: Made, hub: ZenohEngine, foreign: Path, kinds: tuple[str, ...], seconds: float) -> list[float]:
    port = int(made.endpoint.rpartition(":")[2])
    strangers = Strangers(port, foreign, rate=100.0, kinds=kinds)
    await asyncio.to_thread(strangers.__enter__)
    try:
        await asyncio.sleep(seconds)
        return [await joins_within(made, hub, name) for name in ("w1", "w2", "w1")]
    finally:
        await asyncio.to_thread(strangers.__exit__)


@pytest.mark.wide
async def test_a_node_gets_in_beside_a_hundred_strangers_a_second(
    made: Made, hub: ZenohEngine, foreign: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for took in await besieged(made, hub, foreign, KINDS, 1.0):
        assert took < IN_S
    assert "did not become participants" in caplog.text
    assert "127.0.0.1" in caplog.text


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
async def test_no_kind_of_stranger_keeps_a_node_out(kind: str, made: Made, hub: ZenohEngine, foreign: Path) -> None:
    """Longer than zenoh's own timeouts, so that everything that could fill up has."""
    for took in await besieged(made, hub, foreign, (kind,), 12.0):
        assert took < IN_S


# What a ClientHello is


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_a_hello_is_complete_at_its_last_byte(cut: int) -> None:
    hello = client_hello()
    assert hello_complete(hello) is True
    assert hello_complete(hello + b"more") is True
    if cut < len(hello):
        assert hello_complete(hello[:cut]) is False


@given(st.binary(max_size=64))
def test_what_is_no_hello_never_reaches_a_lane(data: bytes) -> None:
    said = hello_complete(data)
    assert said is not True or (data[0] == 22 and data[1] == 3 and data[5] == 1)
    if len(data) >= 6 and (data[0] != 22 or data[1] != 3 or data[5] != 1):
        assert said is None


@given(st.integers(1, 5), st.integers(4, 200))
def test_a_hello_in_several_records(pieces: int, size: int) -> None:
    message = b"\x01" + size.to_bytes(3) + bytes(size)
    step = max(4, -(-len(message) // pieces))
    parts = [message[at : at + step] for at in range(0, len(message), step)]
    records = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in parts)
    assert hello_complete(records) is True
    assert hello_complete(records[:-1]) is False


# What it passes on


class Echo:
    """A stand-in for zenoh that gives everything back."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Door]:
    server = await asyncio.start_server(Echo(), "127.0.0.1", 0)
    door = Door("127.0.0.1", free_port())
    await asyncio.to_thread(door.open, [server.sockets[0].getsockname()[1]])
    yield door
    await asyncio.to_thread(door.close)
    server.close()


def port_of(door: Door) -> int:
    return door._port  # pyright: ignore[reportPrivateUsage]


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """What came before the end of the connection, however it ended."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def test_bytes_pass_whole_in_both_directions_and_slowly(echo: Door) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(echo))
    hello, data = client_hello(), random.Random(1).randbytes(8 << 20)
    writer.write(hello)
    assert await reader.readexactly(len(hello)) == hello

    async def send() -> None:
        for at in range(0, len(data), 100_000):
            writer.write(data[at : at + 100_000])
            await writer.drain()

    sending = asyncio.create_task(send())
    await asyncio.sleep(0.2)  # nobody reads meanwhile: what is under way is held back, not kept
    assert await reader.readexactly(len(data)) == data
    await sending
    writer.close()


async def test_who_sends_no_hello_is_refused_and_counted(echo: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HELLO_S", 0.1)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"", client_hello()[:-1]):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(echo))
        writer.write(said)
        assert await end_of(reader) == b""
        writer.close()
    assert echo.refused == {"no TLS": 1, "slow": 2}


async def test_of_too_many_that_wait_the_one_that_has_waited_longest_goes(echo: Door) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port_of(echo)) for _ in range(doors.WAITING_EACH + 3)]
    for reader, _ in opened[:3]:
        assert await asyncio.wait_for(end_of(reader), 2) == b""
    last_reader, last = opened[-1]
    last.write(client_hello())
    assert await last_reader.read(1)
    for _, writer in opened:
        writer.close()


async def test_an_address_that_is_in_use_is_told_as_such(made: Made, hub: ZenohEngine) -> None:
    other = made.engine(made.hub, listen=True)
    with pytest.raises(BusUnavailable, match=r"cannot listen on tls/127\.0\.0\.1"):
        await other.start()
