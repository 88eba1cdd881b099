"""Without certificates a bus stays within its machine, unless it is said that it shall not."""

from __future__ import annotations

import pytest

from gpurt.cluster.master import MasterConfig
from gpurt.cluster.security.errors import InsecureEndpoint
from gpurt.cluster.security.loopback import check_protected, is_loopback
from gpurt.cluster.worker import WorkerConfig
from gpurt.cluster.zenoh_engine import ZenohEngine

LOCAL = ["tcp/127.0.0.1:7447", "tcp/127.9.9.9:1", "udp/[::1]:1", "tcp/localhost:1", "tcp/LOCALHOST:1"]
LOCAL += ["tcp/[::ffff:127.0.0.1]:1", "unixsock-stream//run/x"]
OPEN = ["tcp/0.0.0.0:1", "tcp/[::]:1", "tcp/10.0.0.1:1", "udp/gpu-1:1", "tcp/localhost.example.org:1", "tcp/127.1:1"]
OPEN += ["tcp/[::ffff:10.0.0.1]:1", "tcp/0:1", "tcp/2130706433:1", "tcp/10.0.0.1:1#iface=lo"]


@pytest.mark.parametrize("endpoint", LOCAL)
def test_this_machine(endpoint: str) -> None:
    assert is_loopback(endpoint)
    check_protected(endpoint, tls=False, insecure=False)
    ZenohEngine(endpoint=endpoint)


@pytest.mark.parametrize("endpoint", OPEN)
def test_others(endpoint: str) -> None:
    assert not is_loopback(endpoint)
    with pytest.raises(InsecureEndpoint, match=r"unencrypted.*gpurt cluster init.*--tls FOLDER.*--insecure"):
        ZenohEngine(endpoint=endpoint)
    with pytest.raises(InsecureEndpoint):
        WorkerConfig("w1", endpoint=endpoint)
    with pytest.raises(InsecureEndpoint):
        MasterConfig(endpoint=endpoint)
    ZenohEngine(endpoint=endpoint, insecure=True)
    WorkerConfig("w1", endpoint=endpoint, insecure=True)
    MasterConfig(endpoint=endpoint, insecure=True)


@pytest.mark.parametrize("endpoint", ["tls/127.0.0.1:1", "quic/h:1"])
def test_an_encrypted_address_wants_certificates(endpoint: str) -> None:
    with pytest.raises(InsecureEndpoint, match="needs certificates"):
        check_protected(endpoint, tls=False, insecure=False)
    check_protected(endpoint, tls=True, insecure=False)


@pytest.mark.parametrize("endpoint", [*LOCAL, *OPEN])
def test_certificates_want_an_encrypted_address(endpoint: str) -> None:
    with pytest.raises(InsecureEndpoint, match="would not use the certificates"):
        check_protected(endpoint, tls=True, insecure=False)


def test_an_address_cannot_take_the_protection_away() -> None:
    with pytest.raises(InsecureEndpoint, match="settings of its own"):
        check_protected("tls/h:1#enable_mtls=false", tls=True, insecure=False)
    with pytest.raises(InsecureEndpoint, match="exclude each other"):
        check_protected("tls/h:1", tls=True, insecure=True)
