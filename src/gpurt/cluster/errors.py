"""What can go wrong between nodes. All of them are ``GPUError``; none of them harms the devices.

::

    GPUError
    └── ClusterError
        ├── BusUnavailable      the engine cannot be used or reached: library missing, address in use
        ├── BusClosed           used before start() or after close()
        ├── NoAnswer            (TimeoutError)  a node did not answer a query in time
        ├── NodeNameTaken       another live process has joined under this node's name
        ├── StaleTerm           a command of a master that was replaced: .latest
        ├── InvalidName         (ValueError)    cluster or node name, or bus address, malformed
        └── MalformedEvent      (ValueError)    event or snapshot that is no such thing, or too large
"""

from __future__ import annotations

from typing import Any

from gpurt.errors import GPUError


class ClusterError(GPUError):
    """Root of the errors of the cluster layer."""


class BusUnavailable(ClusterError):
    """The engine's library is missing, or the bus cannot be opened or has refused an operation."""


class BusClosed(ClusterError):
    """The engine was used before ``start()`` or after ``close()``."""


class NoAnswer(ClusterError, TimeoutError):
    """Nobody answered a query within its deadline."""


class NodeNameTaken(ClusterError):
    """Another live process answers under the node name that this one wants to join with."""


class StaleTerm(ClusterError):
    """The command is of an earlier term than a node has heard of: its master was replaced.

    Attributes:
        latest: the latest term that the node has heard of.
    """

    _extra = ("latest",)

    def __init__(self, message: str, *, latest: int, **context: Any) -> None:
        super().__init__(message, **context)
        self.latest = latest


class InvalidName(ClusterError, ValueError):
    """A cluster or node name, an epoch or an address that does not have the required form."""


class MalformedEvent(ClusterError, ValueError):
    """An event or a snapshot that cannot be read or must not be sent; the message names what is wrong."""
