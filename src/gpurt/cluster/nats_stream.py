"""The stream that keeps the events of a cluster."""

from __future__ import annotations

from typing import Any, Final

from gpurt.cluster.errors import BusUnavailable
from gpurt.cluster.nats_settings import NatsSettings, load_nats, stream_name, stream_subjects

NAME_IN_USE: Final = 10058
"""The server's code: somebody else has made it meanwhile, with other limits."""
NO_JETSTREAM: Final = (None, 10039, 10076)
"""Nobody answers; not for this account; not on this server. Other codes of that kind are of a cluster that starts."""
REPEATED_S: Final = 120.0
"""For how long the server recognises an event that it has."""


async def have_stream(client: Any, cluster: str, settings: NatsSettings, *, may_create: bool) -> None:
    """Make it where it is missing; one that is there stays as it is, because its owner may have chosen its limits.

    Raises:
        BusUnavailable: the server has no JetStream, or the stream takes something else. TimeoutError: it is missing.
    """
    nats, name = load_nats(), stream_name(cluster)
    manager = client.jetstream(timeout=settings.answer_timeout_s)
    try:
        try:
            info = await manager.stream_info(name)
        except nats.js.errors.NotFoundError:
            if not may_create:
                raise TimeoutError(f"there is no stream {name} yet: a master makes it") from None
            info = await _create(nats, manager, name, cluster, settings)
    except nats.js.errors.ServiceUnavailableError as exc:
        if exc.err_code not in NO_JETSTREAM:
            raise
        raise BusUnavailable("the NATS server has no JetStream", hint="start it with nats-server -js") from exc
    missing = set(stream_subjects(cluster)) - set(info.config.subjects or ())
    if missing:
        raise BusUnavailable(
            f"the stream {name} of the NATS server does not take {', '.join(sorted(missing))}",
            hint="add these subjects to it, or delete it: it is made again",
        )


async def _create(nats: Any, manager: Any, name: str, cluster: str, settings: NatsSettings) -> Any:
    api = nats.js.api
    config = api.StreamConfig(
        name=name,
        description=f"events of the nodes of gpurt cluster {cluster}",
        subjects=stream_subjects(cluster),
        storage=api.StorageType.FILE,
        retention=api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.OLD,
        max_bytes=settings.stream_bytes,
        max_age=settings.stream_age_s,
        max_msgs_per_subject=settings.stream_events_per_node,
        duplicate_window=min(REPEATED_S, settings.stream_age_s),
        num_replicas=settings.replicas,
    )
    try:
        return await manager.add_stream(config)
    except nats.js.errors.BadRequestError as exc:
        if exc.err_code == NAME_IN_USE:
            return await manager.stream_info(name)
        raise BusUnavailable(f"the NATS server does not make the stream {name}: {exc.description}") from exc
