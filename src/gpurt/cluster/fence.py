"""Fence: which masters and which plans a node still follows.

A master that was replaced may not know it, and goes on to give commands. Each master has a term, later ones a higher
one, and a node that has heard of a term follows none of an earlier one. Who elects masters is not known here: the term
comes from outside.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gpurt.cluster.errors import StaleTerm
from gpurt.cluster.promises import InstancePromises, Promised, PromiseFile, Promises
from gpurt.cluster.shards import MAX_INSTANCES
from gpurt.errors import GPUError
from gpurt.offload import off_loop
from gpurt.placement.version import PlanVersion

REMEMBERED: Final = 4 * MAX_INSTANCES
"""Instances whose latest version is kept, also of those that are gone. Of an earlier term none needs to be: the term
itself fences it off."""

_log = logging.getLogger("gpurt.cluster.fence")


class Fence:
    """What a node has promised. Each promise is on the disk before it is given.

    Args:
        file: where promises outlive the process; None: nowhere.
        cluster: whose masters these are.
    """

    def __init__(self, file: PromiseFile | None = None, cluster: str = "default") -> None:
        self._file, self._cluster = file, cluster
        self._promises = Promises()
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Take up what an earlier run has promised."""
        file = self._file
        if file is not None:
            self._promises = await off_loop("promises", lambda: file.promises(self._cluster))

    @property
    def term(self) -> int:
        """The latest that was heard of."""
        return self._promises.term

    @property
    def draining(self) -> bool:
        return self._promises.draining

    def promised(self, instance: str) -> InstancePromises | None:
        """The latest plans of ``instance`` that were agreed to, by this run or an earlier one."""
        return self._promises.instances.get(instance)

    async def admit(self, term: int) -> bool:
        """A master of ``term`` has spoken: from now on, none of an earlier term is followed. True: it is a new one.

        Raises:
            StaleTerm: it is of an earlier term itself.
        """
        async with self._lock:
            self._check(term)
            if term == self.term:
                return False
            await self._keep(self._promises.model_copy(update={"term": term}))
            return True

    async def promise(self, instance: str, version: PlanVersion, digest: str, *, activated: bool = False) -> None:
        """Agree to a plan, or to follow it now. The caller has compared it with ``promised``.

        Raises:
            StaleTerm: a later master has spoken meanwhile.
        """
        async with self._lock:
            self._check(version.term)
            this, before = Promised(version=version, digest=digest), self.promised(instance)
            promised = InstancePromises(
                offered=this if before is None or before.offered.version < version else before.offered,
                activated=this if activated else before and before.activated,
            )
            if promised == before:
                return
            instances = {**self._promises.instances, instance: promised}
            if len(instances) > REMEMBERED:
                instances = {name: p for name, p in instances.items() if p.offered.version.term == version.term}
            await self._keep(self._promises.model_copy(update={"instances": instances}))

    async def set_draining(self, draining: bool) -> None:
        async with self._lock:
            if draining != self.draining:
                await self._keep(self._promises.model_copy(update={"draining": draining}))

    def _check(self, term: int) -> None:
        if term < self.term:
            raise StaleTerm(
                f"command of term {term} refused: a master of term {self.term} has spoken", latest=self.term
            )

    async def _keep(self, promises: Promises) -> None:
        file = self._file
        if file is not None:
            try:
                await off_loop("promises", lambda: file.keep(self._cluster, promises))
            except (OSError, GPUError) as exc:
                # The node goes on: refusing every master until somebody frees the disk would be worse.
                _log.warning("what was promised to a master is forgotten at the next start of this node: %s", exc)
        self._promises = promises
