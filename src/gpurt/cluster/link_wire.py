"""One connection of a measurement, read and written by a thread: the event loop's own streams copy every byte twice,
and would measure themselves."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from gpurt.cluster.link_protocol import CHUNK, STEP_S


class Wire:
    """Every method but ``abort`` blocks, until it is done or its deadline has come.

    Args:
        connection: becomes this object's own.
        seconds: that all of it may take, until ``allow`` says otherwise.

    Raises (every method but ``abort``):
        TimeoutError: a deadline has come. EOFError: the other side has ended. OSError: the connection has failed.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._socket = connection
        self._deadline = time.monotonic() + seconds
        self._buffer = memoryview(bytearray(CHUNK))
        self._aborted = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def allow(self, seconds: float) -> None:
        """From now on."""
        self._deadline = time.monotonic() + seconds

    def protect(self, context: ssl.SSLContext, *, listening: bool) -> bytes | None:
        """The handshake. Returns the other side's certificate (DER), which is not judged here beyond what ``context``
        does."""
        self._socket.settimeout(STEP_S)
        protected = context.wrap_socket(self._socket, server_side=listening, do_handshake_on_connect=False)
        self._socket = protected
        if self._aborted:
            raise EOFError
        protected.do_handshake()
        return protected.getpeercert(binary_form=True)

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(data)

    def read(self, size: int) -> bytes:
        """Exactly so many bytes, at most a chunk."""
        return bytes(self._fill(size))

    def swallow(self, size: int) -> None:
        """The same, for nobody."""
        self._fill(size)

    def abort(self) -> None:
        """End the connection, and whatever a thread does on it just now. From any thread; more than once is no harm."""
        self._aborted = True
        with contextlib.suppress(OSError):
            # Not the protected socket's own, which takes away what another thread may be using.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that uses it, at the end."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _fill(self, size: int) -> memoryview:
        got = 0
        while got < size:
            self._socket.settimeout(self._left())
            read = self._socket.recv_into(self._buffer[got:size])
            if read == 0:
                raise EOFError("the other side has ended the connection")
            got += read
        return self._buffer[:size]

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it has taken too long")
        return left
