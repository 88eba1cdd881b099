"""LinkMeasuring: a node's side of the topology. It lets others measure, and measures what it is told to."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from gpurt.cluster.commands import LinksAnswer, MeasureLinks, PeerAddress
from gpurt.cluster.errors import ClusterError
from gpurt.cluster.link_probe import LinkSample, PeerBusy, probe_link
from gpurt.cluster.link_protocol import LinkBudget
from gpurt.cluster.link_server import LinkServer, Slot
from gpurt.cluster.peer_links import NodeLinks, PeerLink
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.security.peers import Credentials

PATIENCE_S: Final = 15.0
"""For a node that measures something else, or for ourselves: one and a half of the longest measurement."""
AGAIN_S: Final = (0.02, 0.1)
"""Between two attempts; at random, or two nodes that measure each other would meet again and again."""

_log = logging.getLogger("gpurt.cluster.links")


class LinkMeasuring:
    """
    Args:
        publisher: the node's voice, not started yet: from now on it takes the command.
        credentials: of the node; None: no TLS.
        insecure: without credentials, other machines may be measured all the same.
    """

    def __init__(
        self, publisher: NodePublisher, *, credentials: Credentials | None = None, insecure: bool = False
    ) -> None:
        self._publisher, self._credentials, self._insecure = publisher, credentials, insecure
        self._slot = Slot()
        self._server = LinkServer(self._slot, credentials)
        self._links = NodeLinks()
        self._turn = asyncio.Lock()
        self._random = random.Random()
        publisher.commands.handle(MeasureLinks, self._measure)

    @property
    def links(self) -> NodeLinks:
        """What is known now."""
        return self._links

    async def start(self, host: str, port: int = 0) -> None:
        """Let others measure at this address, and tell them so.

        Raises:
            InsecureEndpoint: others could reach it without certificates, and nobody has said that this is wanted.
            OSError: it is no address of this machine, or in use.
        """
        endpoint = await self._server.start(host, port, insecure=self._insecure)
        self._links = self._links.model_copy(update={"endpoint": endpoint})
        await self._publisher.publish_links(self._links)

    async def aclose(self) -> None:
        """Listen no more. Idempotent."""
        await self._server.aclose()

    # Inside

    async def _measure(self, command: MeasureLinks) -> bytes:
        measured: list[PeerLink] = []
        failed: dict[str, str] = {}
        async with self._turn:
            for peer in command.peers:
                try:
                    sample = await self._patiently(peer, command.budget)
                except ClusterError as exc:
                    _log.warning("the way to node %s was not measured: %s", peer.node, exc)
                    failed[peer.node] = exc.message[:512]
                else:
                    self._links = self._links.with_sample(peer.node, sample.round_trip_s, sample.bandwidth)
                    measured.append(self._links.measured[-1])
            if measured:
                await self._publisher.publish_links(self._links)
        return LinksAnswer(measured=tuple(measured), failed=failed).model_dump_json().encode()

    async def _patiently(self, peer: PeerAddress, budget: LinkBudget) -> LinkSample:
        if peer.node == self._publisher.node:
            raise ClusterError("a node does not measure the way to itself")
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    if self._slot.take():
                        try:
                            return await probe_link(
                                peer.node,
                                peer.endpoint,
                                budget,
                                credentials=self._credentials,
                                insecure=self._insecure,
                            )
                        except PeerBusy:
                            pass  # its own measurement may be of the way to us
                        finally:
                            self._slot.give_back()
                    await asyncio.sleep(self._random.uniform(*AGAIN_S))
        except TimeoutError as exc:
            raise PeerBusy(f"this node or {peer.node} has measured other ways for {PATIENCE_S:g} s") from exc
