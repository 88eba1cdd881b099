"""What is looked at before a folder is used."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from gpurt.cluster.security.authority import Role
from gpurt.cluster.security.enrolment import enrol, init_cluster
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.identity import Identity, load_identity
from gpurt.cluster.security.tls import tls_values
from tests.cluster.security.conftest import Made


def _other(made: Made, tmp_path: Path, cluster: str = "test") -> Path:
    init_cluster(tmp_path / "other", cluster=cluster, hosts=["127.0.0.1"])
    return enrol(tmp_path / "other", "w1")


def _missing(made: Made, tmp_path: Path) -> Path:
    (made.node("w1") / "cert.pem").unlink()
    return made.node("w1")


def _nothing(made: Made, tmp_path: Path) -> Path:
    return tmp_path / "nothing"


def _rubbish(made: Made, tmp_path: Path) -> Path:
    (made.node("w1") / "cert.pem").write_bytes(b"rubbish")
    return made.node("w1")


def _no_key(made: Made, tmp_path: Path) -> Path:
    shutil.copy(made.node("w1") / "cert.pem", made.node("w1") / "key.pem")
    return made.node("w1")


def _other_key(made: Made, tmp_path: Path) -> Path:
    shutil.copy(made.node("w2") / "key.pem", made.node("w1") / "key.pem")
    return made.node("w1")


def _other_authority(made: Made, tmp_path: Path) -> Path:
    shutil.copy(_other(made, tmp_path) / "ca.pem", made.node("w1") / "ca.pem")
    return made.node("w1")


def _other_cluster(made: Made, tmp_path: Path) -> Path:
    shutil.copy(_other(made, tmp_path, "elsewhere") / "cluster.json", made.node("w1") / "cluster.json")
    return made.node("w1")


def _authority_itself(made: Made, tmp_path: Path) -> Path:
    for own, name in (("ca.pem", "cert.pem"), ("ca.key", "key.pem")):
        shutil.copy(made.folder / own, made.node("w1") / name)
    return made.node("w1")


def _no_place(made: Made, tmp_path: Path) -> Path:
    (made.node("w1") / "cluster.json").write_text('{"cluster": "test", "endpoint": "nowhere"}')
    return made.node("w1")


def _no_json(made: Made, tmp_path: Path) -> Path:
    (made.hub / "roster.json").write_text("{")
    return made.hub


def _no_role(made: Made, tmp_path: Path) -> Path:
    (made.hub / "roster.json").write_text('{"names": {"w1": "king"}}')
    return made.hub


def _expired(made: Made, tmp_path: Path) -> Path:
    return made.changed(tmp_path / "changed", "w1", begin=timedelta(days=-3), days=2)


def _early(made: Made, tmp_path: Path) -> Path:
    return made.changed(tmp_path / "changed", "w1", begin=timedelta(days=3), days=2)


REFUSED = {
    _missing: "cannot read .*cert.pem",
    _nothing: "cannot read .*ca.pem",
    _rubbish: "cert.pem is not a certificate",
    _no_key: "is not a private key",
    _other_key: "is not the key of",
    _other_authority: "was not issued by the authority",
    _other_cluster: "is of cluster 'test', not of 'elsewhere'",
    _authority_itself: "is not a certificate of gpurt cluster enrol",
    _no_place: "cluster.json: endpoint 'nowhere' is not valid",
    _no_json: "roster.json: not JSON",
    _no_role: "roster.json: names.w1",
    _expired: "has expired: it was valid until",
    _early: "is not valid before",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_refused(spoil: Callable[[Made, Path], Path], made: Made, tmp_path: Path) -> None:
    with pytest.raises(CredentialsRefused, match=REFUSED[spoil]):
        load_identity(spoil(made, tmp_path))


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_not_used(mode: int, made: Made) -> None:
    (made.node("w1") / "key.pem").chmod(mode)
    with pytest.raises(CredentialsRefused, match=rf"can be read by others \(mode 0{mode:o}\).*chmod 600"):
        load_identity(made.node("w1"))


def test_without_the_library(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(CredentialsRefused, match=r"pip install 'gpurt\[cluster,secure\]'"):
        load_identity(made.node("w1"))


def test_a_hub_listens_where_it_is_reached(made: Made) -> None:
    def listening(endpoint: str) -> str:
        known = load_identity(made.hub)
        fields = {name: getattr(known, name) for name in Identity.__dataclass_fields__}
        return Identity(**{**fields, "endpoint": endpoint}).listen_endpoint

    assert listening("tls/gpu-1.example:7000") == "tls/0.0.0.0:7000"
    assert listening("tls/10.0.0.1:7000") == "tls/0.0.0.0:7000"
    assert listening("tls/[fd00::7]:7000") == "tls/[::]:7000"
    assert listening("tls/127.0.0.1:7000") == "tls/127.0.0.1:7000"


@pytest.mark.parametrize(("name", "listen"), [("hub", False), ("nodes/w1", True), ("nodes/m1", True)])
def test_a_role_in_the_wrong_place(name: str, listen: bool, made: Made) -> None:
    with pytest.raises(CredentialsRefused, match="not of"):
        tls_values(load_identity(made.folder / name), listen=listen)


def test_nobody_may_do_what_is_not_allowed(made: Made) -> None:
    rules = tls_values(load_identity(made.hub), listen=True)["access_control"]
    assert rules["enabled"]
    assert rules["default_permission"] == "deny"
    writes = {
        rule["id"]: rule["key_exprs"]
        for rule in rules["rules"]
        if "ingress" in rule["flows"] and {"put", "reply", "liveliness_token"} & set(rule["messages"])
    }
    assert writes.pop("speaking") == [
        f"gpurt/v1/test/{leaf}" for leaf in ("master/**", "master/**/@adv/**", "placement/**", "placement/**/@adv/**")
    ]
    assert writes == {
        f"own-{name}": [f"gpurt/v1/test/node/{name}/**", f"gpurt/v1/test/node/{name}/**/@adv/**"]
        for name in ("w1", "w2")
    }
    given = {policy["subjects"][0]: set(policy["rules"]) & {*writes, "speaking"} for policy in rules["policies"]}
    assert given == {"w1": {"own-w1"}, "w2": {"own-w2"}, "m1": {"speaking"}, "o1": set(), "anybody": set()}


def test_roles_are_all_there() -> None:
    assert set(Role) == {"hub", "node", "master", "observer"}
