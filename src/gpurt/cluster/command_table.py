"""Who answers which command on a node. Every command passes the fence first."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gpurt.cluster.commands import Command, ResetTerm, decode_command, encode_answer
from gpurt.cluster.errors import ClusterError, StaleTerm
from gpurt.cluster.fence import Fence

_log = logging.getLogger("gpurt.cluster.commands")

C = TypeVar("C", bound=Command)


class CommandTable:
    """
    Args:
        fence: refuses masters that were replaced.
        on_new_term: awaited when a master of a new term has spoken, before its command is looked at, and when an
            operator has set the term back.
    """

    def __init__(self, fence: Fence, on_new_term: Callable[[], Awaitable[None]]) -> None:
        self._fence, self._on_new_term = fence, on_new_term
        self._answers: dict[type[Command], Callable[[Any], Awaitable[bytes]]] = {}
        self._stale: dict[type[Command], Callable[[StaleTerm], bytes]] = {}

    def handle(
        self,
        kind: type[C],
        answer: Callable[[C], Awaitable[bytes]],
        *,
        on_stale: Callable[[StaleTerm], bytes] | None = None,
    ) -> None:
        """
        Args:
            answer: awaited on the loop; what it raises is told to the master in words.
            on_stale: answers a command of an earlier term; None: that it is one is told in words.
        """
        self._answers[kind] = answer
        if on_stale is not None:
            self._stale[kind] = on_stale

    async def answer(self, payload: bytes) -> bytes:
        """
        Raises:
            MalformedEvent: no command of this version. StaleTerm: of an earlier term. ClusterError: nobody here does
                this.
        """
        command = decode_command(payload)
        if isinstance(command, ResetTerm):
            return await self._reset(command)
        try:
            if await self._fence.admit(command.term):
                await self._on_new_term()
        except StaleTerm as exc:
            on_stale = self._stale.get(type(command))
            if on_stale is None:
                raise
            return on_stale(exc)
        answer = self._answers.get(type(command))
        if answer is None:
            raise ClusterError(f"this node does not take the command {command.command}")
        return await answer(command)

    async def _reset(self, command: ResetTerm) -> bytes:
        before = self._fence.term
        if await self._fence.reset(command.term):
            _log.warning(
                "an operator has set the latest term that was heard of back to %d, from %d; what was promised to "
                "masters of later ones is void",
                *(command.term, before),
            )
            await self._on_new_term()
        return encode_answer(before=before, term=self._fence.term, unkept=self._fence.unkept)
