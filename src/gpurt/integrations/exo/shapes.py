"""The shapes of exo's objects that :mod:`gpurt.integrations.exo.bridge` reads. For type checkers: nothing of exo is
imported, and any object with these attributes will do."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from gpurt.integrations.exo.memory import Memory


class ModelCard(Protocol):
    """exo's ``ModelCard``."""

    @property
    def model_id(self) -> str: ...
    @property
    def base_model(self) -> str: ...
    @property
    def storage_size(self) -> Memory: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int | None: ...
    @property
    def supports_tensor(self) -> bool: ...
    @property
    def uses_cfg(self) -> bool: ...
    @property
    def backends(self) -> Collection[str]: ...


class PlaceCommand(Protocol):
    """exo's ``PlaceInstance``."""

    @property
    def model_card(self) -> ModelCard: ...
    @property
    def sharding(self) -> str: ...
    @property
    def instance_meta(self) -> str: ...
    @property
    def min_nodes(self) -> int: ...


class Connection(Protocol):
    """exo's ``Connection``; ``edge`` is a socket's or an RDMA interface's."""

    @property
    def source(self) -> str: ...
    @property
    def sink(self) -> str: ...
    @property
    def edge(self) -> object: ...


class Topology(Protocol):
    """exo's ``Topology``."""

    def list_nodes(self) -> Iterable[str]: ...
    def list_connections(self) -> Iterable[Connection]: ...


class HasAvailable(Protocol):
    """exo's ``MemoryUsage``."""

    @property
    def ram_available(self) -> Memory: ...


class RdmaStatus(Protocol):
    """exo's ``NodeRdmaCtlStatus``."""

    @property
    def enabled(self) -> bool: ...
