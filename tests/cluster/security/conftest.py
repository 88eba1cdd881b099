"""A cluster's folder, made for each test."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpurt.cluster.security.authority import Issued, Role, issue
from gpurt.cluster.security.enrolment import enrol, init_cluster
from gpurt.cluster.security.identity import Place
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_settings import ZenohSettings, load_zenoh, session_config
from tests.cluster.support import free_port


class Made:
    """An authority for cluster ``test`` with its hub on loopback, nodes w1 and w2, a master and an observer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place: Place = init_cluster(folder, cluster="test", hosts=["127.0.0.1"], port=free_port())
        for name, role in (("w1", Role.NODE), ("w2", Role.NODE), ("m1", Role.MASTER), ("o1", Role.OBSERVER)):
            enrol(folder, name, role=role)

    @property
    def endpoint(self) -> str:
        return self.place.endpoint

    @property
    def hub(self) -> Path:
        return self.folder / "hub"

    def node(self, name: str) -> Path:
        return self.folder / "nodes" / name

    @property
    def authority(self) -> Issued:
        pem = (self.folder / "ca.pem").read_bytes()
        return Issued(pem, (self.folder / "ca.key").read_bytes(), datetime.now(UTC))

    def engine(self, folder: Path, **options: Any) -> ZenohEngine:
        return ZenohEngine(cluster="test", endpoint=self.endpoint, tls=folder, **options)

    def changed(self, target: Path, name: str, *, begin: timedelta, days: float, role: Role = Role.NODE) -> Path:
        """A copy of a participant's folder with a certificate of another time."""
        shutil.copytree(self.node(name), target)
        made = issue(self.authority, cluster="test", name=name, role=role, now=datetime.now(UTC) + begin, days=days)
        (target / "cert.pem").write_bytes(made.certificate)
        (target / "key.pem").write_bytes(made.key)
        return target


@pytest.fixture(autouse=True)
def _libraries() -> None:
    if "secure" in os.environ.get("GPURT_TEST_REQUIRE", "").split(","):
        return
    pytest.importorskip("cryptography", "43", "needs cryptography (extra: secure)", exc_type=ImportError)
    pytest.importorskip("zenoh", reason="the hub needs zenoh (extra: cluster)", exc_type=ImportError)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "cluster")


@pytest.fixture
async def hub(made: Made) -> AsyncIterator[ZenohEngine]:
    engine = made.engine(made.hub, listen=True)
    await engine.start()
    yield engine
    await engine.close()


Attack = Callable[..., Any]


@pytest.fixture
def attack(made: Made) -> Iterator[Attack]:
    """Opens a bare zenoh session: what a stranger does who is not held back by any check on their own side."""
    zenoh = load_zenoh()
    opened = ExitStack()

    def connect(folder: Path, **settings: Any) -> Any:
        tls = "transport/link/tls"
        values = {
            f"{tls}/root_ca_certificate": str(folder / "ca.pem"),
            f"{tls}/connect_certificate": str(folder / "cert.pem"),
            f"{tls}/connect_private_key": str(folder / "key.pem"),
            f"{tls}/enable_mtls": True,
        }
        config = session_config(zenoh, made.endpoint, listen=False, settings=ZenohSettings())
        for key, value in {**values, **{key.replace("__", "/"): value for key, value in settings.items()}}.items():
            if value is not None:
                config.insert_json5(key, json.dumps(value))
        session = zenoh.open(config)
        opened.callback(session.close)
        return session

    with opened:
        yield connect
