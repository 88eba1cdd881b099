"""What a node has promised to masters, in a file of its own beside the registry.

A promise must survive the process that made it: a node that starts again must not follow a master that it has already
left, nor an earlier plan than the one it has agreed to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gpurt.placement.version import MAX_NUMBER, PlanVersion
from gpurt.registry.file import SCHEMA_VERSION, JsonFile, default_registry_path
from gpurt.registry.newer import Records

_log = logging.getLogger("gpurt.cluster.promises")


class Promised(BaseModel):
    """One plan of an instance that the node has agreed to."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: PlanVersion
    digest: str
    """Of the node's part: one version is of one plan only."""
    empty: bool = False
    """It leaves the node with nothing of the instance."""

    @field_validator("version", mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        # Placement's records refuse unknown fields, which a newer gpurt may have written here.
        if not isinstance(value, Mapping):
            return value
        fields = cast("Mapping[str, Any]", value)
        return {name: each for name, each in fields.items() if name in PlanVersion.model_fields}


class InstancePromises(BaseModel):
    """Of one instance of a model. An offer that was called off must not keep the plan before from being sent again,
    so the two are kept apart."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    offered: Promised
    """The latest that was agreed to: no earlier one may be offered."""
    activated: Promised | None = None
    """The latest that was followed: no earlier one may be activated."""

    @property
    def holding(self) -> bool:
        """The plan that is followed gives the node something to hold."""
        return self.activated is not None and not self.activated.empty


class Promises(BaseModel):
    """Of one node, to the masters of its cluster."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    term: int = Field(default=0, ge=0, le=MAX_NUMBER)
    draining: bool = False
    """Nothing new may be placed here until a master or the operator says otherwise, also after a restart."""
    instances: Mapping[str, InstancePromises] = Field(default_factory=dict[str, InstancePromises])
    """The latest promise last."""


class PromiseDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    nodes: Mapping[str, Promises] = Field(default_factory=dict[str, Promises])
    """By ``CLUSTER/NODE``: what one node was told is nothing to another that has the same registry, before it or beside
    it."""


class PromiseFile(JsonFile[PromiseDocument]):
    """What one node has promised, in ``registry.promises.json`` beside ``registry.json``.

    Args:
        registry_path: the node's registry; None is the user's own.
        cluster: whose masters these are.
        node: which of the nodes that have this registry.
    """

    MODEL = PromiseDocument
    # By name, not by what is in them.
    RECORDS: ClassVar[Records] = {
        ("nodes", "*"): lambda promises: None,
        ("nodes", "*", "instances", "*"): lambda promises: None,
    }

    def __init__(self, registry_path: str | os.PathLike[str] | None, cluster: str, node: str) -> None:
        registry = default_registry_path() if registry_path is None else Path(registry_path)
        super().__init__(registry.with_name(f"{registry.stem}.promises.json"))
        # Names have no slash in them.
        self._place, self._node = f"{cluster}/{node}", node

    def promises(self) -> Promises:
        """Those that are kept; none where nothing was promised, or nothing can be read, which is logged."""
        document = self.load()
        if document is not None:
            return document.nodes.get(self._place, Promises())
        if self.quarantined is not None or os.path.lexists(self.path):
            # That a file cannot be read was said; that a node which was taken out is back would surprise.
            _log.warning(
                "what node %s had promised to masters is not known any more, also whether it was draining: "
                "if it is to, run gpurt drain %s",
                *(self._node, self._node),
            )
        return Promises()

    def keep(self, promises: Promises) -> None:
        """Replace those of this node; others' stay, also when they are written at the same moment.

        Raises:
            RegistryTooNew, OSError: as ``JsonFile.update``.
        """

        def change(old: PromiseDocument | None) -> PromiseDocument:
            document = old or PromiseDocument()
            return document.model_copy(update={"nodes": {**document.nodes, self._place: promises}})

        self.update(change)
