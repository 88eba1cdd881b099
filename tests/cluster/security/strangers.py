"""Strangers at a hub's door: connections that will never become a node, so many a second, from a thread."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
from pathlib import Path
from typing import Final

KINDS: Final = ("garbage", "half_open", "slow", "hello_only", "no_certificate", "wrong_certificate")
HOLD_S: Final = 20.0


def contexts(foreign: Path) -> dict[str, ssl.SSLContext]:
    """Of clients without a certificate, and with one of another authority, whose folder is ``foreign``."""
    made: dict[str, ssl.SSLContext] = {}
    for kind in ("no_certificate", "wrong_certificate"):
        context = made[kind] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    made["wrong_certificate"].load_cert_chain(foreign / "cert.pem", foreign / "key.pem")
    return made


class Strangers:
    """A context manager. Each connection comes from ``source``; each ends after ``HOLD_S`` at the latest."""

    def __init__(
        self,
        port: int,
        foreign: Path,
        *,
        rate: float = 100.0,
        kinds: tuple[str, ...] = KINDS,
        source: str = "127.0.0.1",
        seed: int = 1,
    ) -> None:
        self.port, self.rate, self.kinds, self.source = port, rate, kinds, source
        self.made = 0
        self.ended = 0
        self._contexts = contexts(foreign)
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        begin, tasks = self._loop.time(), set[asyncio.Task[None]]()
        over = asyncio.ensure_future(self._over.wait())
        while not self._over.is_set():
            tasks.add(task := asyncio.ensure_future(self._one(self.kinds[self.made % len(self.kinds)])))
            task.add_done_callback(tasks.discard)
            self.made += 1
            await asyncio.wait({over}, timeout=max(0.0, begin + self.made / self.rate - self._loop.time()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, kind: str) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(HOLD_S):
                options = {"ssl": self._contexts[kind]} if kind in self._contexts else {}
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self.port, local_addr=(self.source, 0), **options
                )
                if kind == "garbage":
                    writer.write(self._random.randbytes(200))
                elif kind == "slow":
                    hello = client_hello()
                    for at in range(len(hello)):
                        writer.write(hello[at : at + 1])
                        await asyncio.sleep(0.2)
                        if writer.transport.is_closing():
                            return
                elif kind == "hello_only":
                    writer.write(client_hello())
                while await reader.read(1 << 16):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            self.ended += 1
            if writer is not None:
                writer.transport.abort()


def client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()
