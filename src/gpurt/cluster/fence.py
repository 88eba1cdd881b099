"""Fence: which masters and which plans a node still follows.

A master that was replaced may not know it, and goes on to give commands. Each master has a term, later ones a higher
one, and a node that has heard of a term follows none of an earlier one. Who elects masters is not known here: the term
comes from outside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from gpurt.cluster.errors import StaleTerm
from gpurt.cluster.promises import InstancePromises, Promised, PromiseFile, Promises
from gpurt.cluster.shards import MAX_INSTANCES
from gpurt.errors import GPUError
from gpurt.placement.version import PlanVersion
from gpurt.runtime.lane import off_loop

REMEMBERED: Final = 32
"""Instances that the node holds nothing of, and whose latest versions are kept all the same: one that was let go of, or
was only offered. A command for it that comes late would have to be overtaken by plans of as many others."""

_log = logging.getLogger("gpurt.cluster.fence")


class Fence:
    """What a node has promised. Each promise is on the disk before it is given.

    Args:
        file: where promises outlive the process; None: nowhere.
    """

    def __init__(self, file: PromiseFile | None = None) -> None:
        self._file = file
        self._promises = Promises()
        self._unkept: str | None = None
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Take up what an earlier run has promised."""
        file = self._file
        if file is not None:
            self._promises = await off_loop("promises", file.promises)

    @property
    def term(self) -> int:
        """The latest that was heard of."""
        return self._promises.term

    @property
    def draining(self) -> bool:
        return self._promises.draining

    @property
    def unkept(self) -> str | None:
        """Why the next start of this node will not know of the latest promise; None: it will."""
        return self._unkept

    def promised(self, instance: str) -> InstancePromises | None:
        """The latest plans of ``instance`` that were agreed to, by this run or an earlier one."""
        return self._promises.instances.get(instance)

    async def admit(self, term: int) -> bool:
        """A master of ``term`` has spoken: from now on, none of an earlier term is followed. True: it is a new one.

        Raises:
            StaleTerm: it is of an earlier term itself.
        """

        def change(promises: Promises) -> Promises:
            self._check(term)
            return promises if term == promises.term else promises.model_copy(update={"term": term})

        return await self._change(change)

    async def promise(
        self, instance: str, version: PlanVersion, digest: str, *, activated: bool = False, empty: bool = False
    ) -> None:
        """Agree to a plan, or to follow it now. The caller has compared it with ``promised``. Cancelled, it counts as
        promised all the same.

        Args:
            empty: the plan leaves the node with nothing of the instance.

        Raises:
            StaleTerm: a later master has spoken meanwhile.
        """

        def change(promises: Promises) -> Promises:
            self._check(version.term)
            this = Promised(version=version, digest=digest, empty=empty)
            before = promises.instances.get(instance)
            followed = before and before.activated
            if activated and (followed is None or followed.version <= version):
                followed = this
            promised = InstancePromises(
                offered=this if before is None or before.offered.version < version else before.offered,
                activated=followed,
            )
            if promised == before:
                return promises
            others = {name: each for name, each in promises.instances.items() if name != instance}
            return promises.model_copy(update={"instances": _bounded({**others, instance: promised})})

        await self._change(change)

    async def reset(self, term: int) -> bool:
        """An operator's word: ``term`` is the latest that was heard of, and what was promised of later ones is void.
        True: that is news.

        A later term is no business of this: a master raises it.
        """

        def change(promises: Promises) -> Promises:
            if term >= promises.term:
                return promises
            kept = {name: left for name, each in promises.instances.items() if (left := _up_to(each, term)) is not None}
            return promises.model_copy(update={"term": term, "instances": kept})

        return await self._change(change)

    async def set_draining(self, draining: bool) -> None:
        """Said again, it is also written again where that could not be done before."""
        await self._change(
            lambda promises: (
                promises if draining == promises.draining else promises.model_copy(update={"draining": draining})
            ),
            insist=True,
        )

    def _check(self, term: int) -> None:
        if term < self.term:
            raise StaleTerm(
                f"command of term {term} refused: a master of term {self.term} has spoken", latest=self.term
            )

    async def _change(self, change: Callable[[Promises], Promises], *, insist: bool = False) -> bool:
        """Whether anything is new. The lock is held until the write has ended, also when the caller is cancelled
        before: a later one must not be overwritten by it. What is being written is followed already.

        Args:
            insist: write also what is not new, where it could not be written before.
        """
        await self._lock.acquire()
        try:
            promises = change(self._promises)
        except StaleTerm:
            self._lock.release()
            raise
        if promises is self._promises and not (insist and self._unkept):
            self._lock.release()
            return False
        changed, self._promises = promises is not self._promises, promises
        writing = asyncio.create_task(self._keep(promises), name="gpurt-cluster-promise")
        writing.add_done_callback(lambda _: self._lock.release())
        await asyncio.shield(writing)
        return changed

    async def _keep(self, promises: Promises) -> None:
        file = self._file
        if file is not None:
            try:
                await off_loop("promises", lambda: file.keep(promises))
            except (OSError, GPUError) as exc:
                # The node goes on: refusing every master until somebody frees the disk would be worse.
                self._unkept = f"{file.path} cannot be written: {exc}"
                _log.warning(
                    "what was promised to a master is forgotten at the next start of this node: %s (see to it that "
                    "the file can be written: the next promise is kept with all before it, also a drain said again)",
                    self._unkept,
                )
            else:
                self._unkept = None


def _up_to(promised: InstancePromises, term: int) -> InstancePromises | None:
    """What of it is of no later term."""
    activated = promised.activated
    if activated is not None and activated.version.term > term:
        activated = None
    offered = promised.offered if promised.offered.version.term <= term else activated
    return None if offered is None else InstancePromises(offered=offered, activated=activated)


def _bounded(instances: Mapping[str, InstancePromises]) -> dict[str, InstancePromises]:
    """Without those that were promised longest ago, first those of which the node holds nothing."""
    holding = [name for name, each in instances.items() if each.holding]
    idle = [name for name, each in instances.items() if not each.holding]
    kept = {*holding[-MAX_INSTANCES:], *idle[-REMEMBERED:]}
    return {name: each for name, each in instances.items() if name in kept}
