"""Folders of keys: private, whole, never overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpurt.cluster.errors import InvalidName
from gpurt.cluster.security import enrolment
from gpurt.cluster.security.authority import Role, load_certificate
from gpurt.cluster.security.enrolment import check_host, enrol, init_cluster, revoke
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.identity import load_identity, read_roster
from tests.cluster.security.conftest import Made

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")


@posix
def test_only_the_owner_may_read_anything(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Made(tmp_path / "c")
        enrol(made.folder, "w1", renew=True)
    finally:
        os.umask(before)
    for path in (made.folder, *made.folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_what_init_made_is_what_the_hub_shows(made: Made) -> None:
    hub = load_identity(made.hub)
    assert (hub.name, hub.role, hub.cluster, hub.endpoint) == ("hub", Role.HUB, "test", made.endpoint)
    assert hub.roster == {"w1": "node", "w2": "node", "m1": "master", "o1": "observer"}
    assert not (made.hub / "ca.key").exists()
    node = load_identity(made.node("w1"))
    assert (node.name, node.role, node.cluster, node.endpoint, node.roster) == (
        "w1",
        Role.NODE,
        "test",
        made.endpoint,
        {},
    )
    assert timedelta(days=364) < node.not_after - datetime.now(UTC) < timedelta(days=366)


def test_the_hub_has_the_names_and_addresses_that_were_given(tmp_path: Path) -> None:
    from cryptography import x509

    place = init_cluster(tmp_path / "c", hosts=["gpu-1.example", "10.0.0.7", "fd00::7", "10.0.0.7"])
    assert place.endpoint == "tls/gpu-1.example:7447"
    certificate = load_certificate((tmp_path / "c/hub/cert.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gpu-1.example"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "fd00::7"]
    assert init_cluster(tmp_path / "d", hosts=["fd00::7"], port=1).endpoint == "tls/[fd00::7]:1"


@pytest.mark.parametrize("host", ["", "a b", "a/b", "0.0.0.0", "::", "fe80::1%eth0", "10.0.0", "-x", "x" * 254, "ü"])
def test_no_host(host: str, tmp_path: Path) -> None:
    with pytest.raises(CredentialsRefused, match="neither the name of a host nor an address"):
        init_cluster(tmp_path / "c", hosts=[host])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["a", "gpu_1", "gpu-1.example.org", "10.0.0.1", "::1"])
def test_a_host(host: str) -> None:
    assert check_host(host) == host


def test_a_folder_in_use_is_left_as_it_is(made: Made, tmp_path: Path) -> None:
    key = (made.folder / "ca.key").read_bytes()
    with pytest.raises(CredentialsRefused, match="never overwritten"):
        init_cluster(made.folder, hosts=["a"])
    assert (made.folder / "ca.key").read_bytes() == key
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CredentialsRefused, match="exists"):
        init_cluster(tmp_path / "file", hosts=["a"])
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    init_cluster(tmp_path / "empty", hosts=["a"])
    assert {path.name for path in tmp_path.iterdir()} == {"cluster", "file", "empty"}


def test_what_fails_on_the_way_leaves_nothing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(enrolment, "_write_participant", fail)
    with pytest.raises(KeyboardInterrupt):
        init_cluster(tmp_path / "c", hosts=["a"])
    with pytest.raises(KeyboardInterrupt):
        enrol(made.folder, "w3")
    assert {path.name for path in tmp_path.iterdir()} == {"cluster"}
    assert {path.name for path in (made.folder / "nodes").iterdir()} == {"w1", "w2", "m1", "o1"}
    monkeypatch.undo()
    assert load_identity(enrol(made.folder, "w3")).name == "w3"


def test_a_certificate_is_renewed_when_it_is_due_or_when_it_must_be(made: Made) -> None:
    first = (made.node("w1") / "key.pem").read_bytes()
    with pytest.raises(CredentialsRefused, match="is enrolled, and its certificate is valid until"):
        enrol(made.folder, "w1")
    assert (made.node("w1") / "key.pem").read_bytes() == first
    assert enrol(made.folder, "w1", renew=True, days=1e-9) == made.node("w1")
    second = (made.node("w1") / "key.pem").read_bytes()
    enrol(made.folder, "w1")  # has ended already
    keys = [path.read_bytes() for path in sorted((made.folder / "retired").glob("w1-*/key.pem"))]
    assert keys == [first, second]
    assert load_identity(made.node("w1")).name == "w1"
    enrol(made.folder, "hub", role=Role.HUB, renew=True)
    assert load_identity(made.hub).roster["w2"] == "node"


def test_a_name_keeps_its_role_and_is_not_given_again(made: Made) -> None:
    with pytest.raises(CredentialsRefused, match="'w1' is enrolled as node"):
        enrol(made.folder, "w1", role=Role.MASTER, renew=True)
    revoke(made.folder, "w1")
    assert "w1" not in read_roster(made.hub)
    for renew in (False, True):
        with pytest.raises(CredentialsRefused, match="was revoked"):
            enrol(made.folder, "w1", renew=renew)
    with pytest.raises(CredentialsRefused, match="is not enrolled"):
        revoke(made.folder, "w1")


def test_names_and_folders_that_are_none(made: Made, tmp_path: Path) -> None:
    for name in ("", "W1", "a/b", "..", "x" * 65):
        with pytest.raises(InvalidName):
            enrol(made.folder, name)
    with pytest.raises(CredentialsRefused, match="the hub's name"):
        enrol(made.folder, "w9", role=Role.HUB)
    for call in (lambda: enrol(tmp_path / "none", "w1"), lambda: revoke(tmp_path / "none", "w1")):
        with pytest.raises(CredentialsRefused, match=r"cannot read .* gpurt cluster init made"):
            call()
    assert not (tmp_path / "none").exists()
    with pytest.raises(CredentialsRefused, match="no authority"):
        enrol(made.hub, "w9")  # a hub's folder cannot issue
    (made.folder / "ca.key").write_bytes(b"rubbish")
    with pytest.raises(CredentialsRefused, match="cannot be read"):
        enrol(made.folder, "w9")


@posix
def test_an_authority_that_others_can_read_issues_nothing(made: Made) -> None:
    (made.folder / "ca.key").chmod(0o640)
    with pytest.raises(CredentialsRefused, match="can be read by others"):
        enrol(made.folder, "w9")


def test_two_at_once_make_one_certificate(made: Made) -> None:
    code = "import sys; from gpurt.cluster.security.enrolment import enrol; enrol(sys.argv[1], sys.argv[2])"
    names = ["a", "a", "b", "b"]
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(made.folder), name], stderr=subprocess.PIPE) for name in names
    ]
    codes = [process.wait(60) for process in running]
    for process in running:
        assert process.stderr is not None
        process.stderr.close()
    assert sorted(codes) == [0, 0, 1, 1]
    assert sum(codes[:2]) == 1
    assert {"a", "b"} <= set(read_roster(made.hub))
    assert {load_identity(made.node(name)).name for name in ("a", "b")} == {"a", "b"}


def test_nothing_of_this_is_loaded_without_certificates() -> None:
    code = "import gpurt.cluster.worker, gpurt.cluster.master, sys; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
