"""A TCP proxy that does what networks do: it stalls, cuts and delays a connection, and damages what passes."""

from __future__ import annotations

import asyncio
import random
from typing import Final

CHUNK: Final = 16 << 10

FAULTS: Final = ("stall", "cut", "delay", "half_close", "corrupt", "drop", "reorder")


class ChaosProxy:
    """Passes on what comes to ``port``, both ways, until a fault is set."""

    def __init__(self, target_port: int, seed: str) -> None:
        self.target_port = target_port
        self.port = 0
        self._random = random.Random(seed)
        self._fault: str | None = None
        self._damaged, self._to = 0, "both"
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> ChaosProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut()

    def cut(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    def set(self, fault: str, *, to: str = "both") -> None:
        """Damage is done to the next six pieces that pass; the others last until ``heal``.

        Args:
            to: damage only what goes to the ``hub``, or to the ``node``.
        """
        self._fault, self._damaged, self._to = fault, 0, to
        if fault == "cut":
            self.cut()
        elif fault == "half_close":
            for writer in tuple(self._writers)[:1]:
                if writer.can_write_eof() and not writer.is_closing():
                    writer.write_eof()
        elif fault == "stall":
            self._flowing.clear()

    def heal(self) -> None:
        self._fault = None
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            beyond, there = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._writers.add(there)
            ways = [
                asyncio.create_task(self._pass(reader, there, "hub")),
                asyncio.create_task(self._pass(beyond, writer, "node")),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # nobody is there now
        finally:
            for each in (writer, there):
                if each is not None:
                    self._writers.discard(each)
                    each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: str) -> None:
        held = b""
        while data := await reader.read(CHUNK):
            await self._flowing.wait()
            if self._fault == "delay":
                await asyncio.sleep(self._random.uniform(0.05, 0.3))
            elif self._fault in ("corrupt", "drop", "reorder") and self._damaged < 6 and self._to in ("both", to):
                self._damaged += 1
                at = self._random.randrange(len(data))
                if self._fault == "corrupt":
                    data = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
                elif self._fault == "drop":
                    data = data[:at] + data[at + self._random.randint(1, 16) :]
                elif not held:
                    held = data[:at]
                    data = data[at:]
                else:
                    data, held = data + held, b""
            writer.write(data)
            await writer.drain()
