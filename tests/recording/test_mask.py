"""Pseudonyms: the same for the same, everywhere, and nothing of the original left."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.identity import normalize_uuid
from gpurt.recording.mask import Masker, host_masker

A = "GPU-1a1a1a1a-0000-1111-2222-333333333333"
B = "GPU-2b2b2b2b-0000-1111-2222-444444444444"


def masked(value: Any, **names: Any) -> Any:
    masker = Masker(**names)
    masker.learn(value)
    return masker.mask(value)


def test_the_same_card_under_every_spelling() -> None:
    bare = A.removeprefix("GPU-")
    document = {
        "nvml": A,
        "vulkan": bare.replace("-", ""),
        "upper": bare.upper(),
        "mig": f"MIG-{A}/3/0",
        "variable": "GPU-1a1a,GPU-2b2b",
        "other": B,
        "key": {A: 1},
    }
    after = masked(document)
    new = after["nvml"]
    assert normalize_uuid(new) == new != A
    digits = new.removeprefix("GPU-").replace("-", "")
    assert after["vulkan"] == digits
    assert after["upper"].replace("-", "").lower() == digits
    assert after["mig"] == f"MIG-{new}/3/0"
    assert after["other"] != new
    assert list(after["key"]) == [new]
    first, second = after["variable"].split(",")
    assert new.startswith(first), "a prefix still names the same card"
    assert after["other"].startswith(second)
    text = json.dumps(after).lower()
    assert "1a1a" not in text
    assert "2b2b" not in text
    assert "333333333333" not in text


def test_amds_unique_id_in_decimal_and_hexadecimal() -> None:
    number = 10645161697164847644
    after = masked({"properties": f"simd_count 416\nunique_id {number}\n", "uuid": f"GPU-{number:016x}"})
    new = int(after["properties"].split()[-1])
    assert after["uuid"] == f"GPU-{new:016x}"
    assert new != number
    assert "simd_count 416" in after["properties"]


def test_names_addresses_serials_and_homes() -> None:
    document = {
        "where": "box7.example.org: /home/alice/.local/state/gpurt/registry.json",
        "short": "box7",
        "windows": r"C:\Users\alice\gpurt",
        "serial": "1654622000123",
        "message": "card 1654622000123 of alice at 10.1.2.3 and fe80::1:2 (aa:bb:cc:dd:ee:ff)",
    }
    after = masked(document, hosts=["box7.example.org"], users=["alice"])
    text = json.dumps(after)
    for secret in ("box7", "alice", "example.org", "1654622000123", "10.1.2.3", "fe80", "aa:bb:cc"):
        assert secret not in text
    assert after["windows"].split("\\")[2] == after["where"].split("/")[2], "one person, one pseudonym"
    assert after["serial"] in after["message"]


def test_what_a_report_is_about_stays() -> None:
    document = {
        "pci": "0000000f:01:00.0",
        "driver": "590.48.01",
        "windows": "32.0.101.6078",
        "time": "2026-11-28T07:50:54.1+00:00",
        "loopback": "tcp/127.0.0.1:7447",
        "name": "NVIDIA H100 80GB HBM3",
        "memory": 85520809984,
        "flag": True,
        "nothing": None,
        "root": "/var/root/gpurt",
        "group": "0::/",
        "groups": "12:pids:/docker\n0::/kubepods/pod1\n",
        "time of day": "12:30:45",
        "symbol": "abc::def(int)",
        "windows driver": {"driver_version": "31.0.101.5"},
    }
    assert masked(document, users=["root"]) == document


def test_a_home_is_replaced_wherever_it_is_and_whoever_lives_there() -> None:
    home = "/var/root"  # of a Mac's
    document = {"path": f"{home}/.local/state/r.json", "list": f"/usr/lib:{home}/lib", "other": "/rooted /srv/root"}
    after = masked(document, users=["root"], homes=[PurePosixPath(home)])
    assert after == {
        "path": "/home/user-1/.local/state/r.json",
        "list": "/usr/lib:/home/user-1/lib",
        "other": "/rooted /srv/root",
    }
    assert masked("/data/alice/x of alice", homes=[PurePosixPath("/data/alice")]) == "/home/user-1/x of user-1"
    assert masked("/proc/x", homes=[PurePosixPath("/")]) == "/proc/x"


@pytest.mark.parametrize("text", ["fe80::1:2", "[2a00:1450:4001:831::200e]:7447", "10.1.2.3:7447", "fe80::1/64"])
def test_addresses_are_whole_and_real(text: str) -> None:
    after = masked(f"peer {text} left")
    assert after != f"peer {text} left"
    assert "2001:db8::" in after or "192.0.2." in after


def test_what_stands_for_no_serial_number_is_none() -> None:
    for serial in ("0", "000000000", "N/A", "Unknown"):
        document = {"serial": serial, "message": f"{serial} of 0 rows, N/A", "count": 0}
        assert masked(document) == document
    document = {"serial": "1654622000123", "bytes": 1654622000123}
    assert masked(document)["bytes"] == 1654622000123, "a size is no serial number"


def test_names_are_words_and_keys_stay() -> None:
    """A host may be called as a word of our own."""
    after = masked({"gpu": {"kind": "gpu", "name": "gpurt on gpu"}}, hosts=["gpu"])
    assert after == {"gpu": {"kind": "gpu", "name": "gpurt on gpu"}}
    environ = {"GPURT_BACKEND": "eiger", "CUDA_VISIBLE_DEVICES": "eiger", "CUDA_HOME": "/opt/eiger", "vendor": "eiger"}
    assert masked(environ, hosts=["eiger"]) == environ | {"CUDA_HOME": "/opt/host-1"}


def test_what_is_known_in_one_place_is_hidden_in_all() -> None:
    """A serial number is only known to be one by its key, and stands before it in the document."""
    after = masked({"message": "S123 failed", "device": {"serial": "S123"}})
    assert "S123" not in json.dumps(after)


def test_many_cards_have_many_pseudonyms() -> None:
    uuids = [f"{n:08x}-0000-1111-2222-{n:012x}" for n in range(1, 600)]
    after = masked(uuids)
    assert len(set(after)) == len(uuids)
    assert not set(after) & set(uuids)


@given(st.uuids(version=4), st.sampled_from(["GPU-{}", "MIG-{}", "{}", "MIG-GPU-{}/1/0", "host: {}\n"]))
def test_no_uuid_survives(uuid: Any, form: str) -> None:
    text = form.format(uuid)
    after = masked({"a": text, "b": uuid.hex})
    assert str(uuid) not in json.dumps(after)
    assert uuid.hex not in json.dumps(after)


def test_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "secret-box.lan")
    monkeypatch.setenv("USER", "mallory")
    masker = host_masker()
    assert masker.text("mallory@secret-box.lan, secret-box") == "user-1@host-1, host-1"
