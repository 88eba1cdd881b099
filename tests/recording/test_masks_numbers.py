"""Identifiers of devices, boards and networks, however they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.discover import main
from gpurt.recording.files import read_files, write_files
from gpurt.recording.mask import Masker
from tests.sources import trees

A = "GPU-1a1a1a1a-0000-1111-2222-333333333333"


def masked(value: Any, key: str | None = None, **names: Any) -> Any:
    masker = Masker(**names)
    masker.learn(value, key)
    return masker.mask(value, key)


@pytest.mark.parametrize("brand", ["GPU-", "gpu-", "Gpu-", "MIG-", "mig-", "MIG-GPU-", "mig-gpu-"])
@pytest.mark.parametrize("digits", ["1a", "1a1a", "1a1a1a1a", "1a1a1a1a-0000", "1A1A1A1A-0000-1111-2222-333333333333"])
def test_beginnings_of_a_uuid_in_every_case(brand: str, digits: str) -> None:
    after = masked({"uuid": A, "CUDA_VISIBLE_DEVICES": f"{brand}{digits},0", "said": f"{brand}{digits} is hidden"})
    assert "1a" not in json.dumps(after).lower()
    shown = after["CUDA_VISIBLE_DEVICES"].removesuffix(",0")
    assert shown.startswith(brand)
    assert after["uuid"].removeprefix("GPU-").startswith(shown.removeprefix(brand)), "it still names that card"
    assert after["said"] == f"{shown} is hidden"


def test_beginnings_of_unknown_uuids_differ() -> None:
    value = ",".join(f"GPU-{n:04x}" for n in range(1, 300))
    after = masked({"CUDA_VISIBLE_DEVICES": value, "message": "GPU-00ff1234-dead of GPU-00ff"})
    shown = after["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(set(shown)) == 299
    assert "GPU-00ff" not in after["message"]
    assert "dead" not in after["message"]


@pytest.mark.parametrize("text", ["GPU-accelerated", "gpu-dead-or-alive", "GPU-0 failed", "MIG-1g.10gb", "gpu-a"])
def test_words_that_begin_like_one(text: str) -> None:
    assert masked({"message": text, "uuid": "GPU-" + "0" * 31 + "1"})["message"] == text


def test_a_uuid_in_bytes() -> None:
    plain = "8932f937d72c4106c12f20bd9faed9f6"
    pairs = [plain[n : n + 2] for n in range(0, 32, 2)]
    after = masked({"colons": ":".join(pairs), "dashes": "-".join(pairs).upper(), "bare": plain})
    assert after["colons"].replace(":", "") == after["dashes"].replace("-", "") == after["bare"] != plain


@pytest.mark.parametrize(
    "key",
    ["serial", "serial_number", "serialNumber", "board_serial", "platform_serial_number", "SerialNumber", "asset_tag"],
)
@pytest.mark.parametrize("serial", ["C02XK0AAJG5H", "1650522003820", 1650522003820])
def test_serial_numbers_by_their_names(key: str, serial: object) -> None:
    after = masked({key: serial, "message": f"board {serial} failed", "bytes": 1650522003820})
    assert after == {key: "serial-1", "message": "board serial-1 failed", "bytes": 1650522003820}


def test_short_serial_numbers_are_replaced_in_their_place_only() -> None:
    after = masked({"serial": "12", "other": {"serial": 7}, "n": 12, "text": "12 of 7"})
    assert after == {"serial": "serial-1", "other": {"serial": "serial-2"}, "n": 12, "text": "12 of 7"}


@pytest.mark.parametrize("value", [0, "0", "N/A", "", None, True, "Unknown"])
def test_what_stands_for_none(value: object) -> None:
    assert masked({"serial": value, "unique_id": value}) == {"serial": value, "unique_id": value}


def test_apples_identifiers() -> None:
    udid, old = "00008103-001A2B3C4D5E6F78", "0123456789abcdef0123456789abcdef01234567"
    after = masked({"provisioning_UDID": udid, "text": f"of {udid.lower()}", "udid": old})
    assert "2b3c4d5e" not in json.dumps(after).lower()
    assert "89abcdef" not in json.dumps(after)
    assert after["text"] == f"of {after['provisioning_UDID']}"


@pytest.mark.parametrize("between", [" ", "\t", "  ", ": ", "="])
def test_amds_unique_id(between: str) -> None:
    number = 9886013546254581510
    after = masked({"file": f"unique_id{between}{number}\n", "uuid": f"GPU-{number:016x}", "n": number})
    assert str(number) not in json.dumps(after)
    assert after["uuid"] == f"GPU-{after['n']:016x}"


@pytest.mark.parametrize("serial", ["00000000deadbeef", "K1234XYZ", "1234567"])
def test_the_serial_number_in_cpuinfo(serial: str, tmp_path: Path) -> None:
    text = f"processor\t: 0\nmodel name\t: x 1234567 K1234XYZ\n\nSerial\t\t: {serial}\nModel\t\t: Pi\n"
    trees.write(tmp_path, "a/proc/cpuinfo", text)
    files, masker = read_files(tmp_path / "a"), Masker()
    for name, content in files.contents.items():
        masker.learn_file(content, name.rsplit("/", 1)[-1])
    write_files(files, tmp_path / "b", masker)
    after = (tmp_path / "b/proc/cpuinfo").read_text()
    line = next(line for line in after.splitlines() if line.startswith("Serial"))
    assert serial not in line
    assert line.startswith("Serial\t\t: ")
    assert after.count("\n") == text.count("\n")
    assert "x 1234567 K1234XYZ" in after, "what is not said to be a serial number decides something"


@pytest.mark.parametrize(
    "mac", ["00:1b:63:84:45:e6", "00-1B-63-84-45-E6", "001b.6384.45e6", "00:1B:63:84:45:E6", "001b638445e6"]
)
def test_hardware_addresses(mac: str) -> None:
    after = masked({"known": "00:1b:63:84:45:e6", "other": f"at {mac}!"})
    digits = "".join(c for c in after["other"] if c.isalnum()).removeprefix("at").lower()
    assert digits == after["known"].replace(":", "") == "020000000001"
    assert len(after["other"]) == len(mac) + 4


def test_addresses_of_infiniband() -> None:
    text = "20:00:55:04:01:27:79:40:ec:0d:9a:03:00:a1:b2:c4:00:00:00:00"
    assert "ec:0d" not in masked(text)


def test_addresses_in_names_of_hosts() -> None:
    after = masked({"a": "10.20.30.40/24", "b": "ip-10-20-30-40.ec2.internal", "c": "host-10-9-8-7 up", "d": "1-2-3-4"})
    assert after == {
        "a": "192.0.2.1/24",
        "b": "ip-192-0-2-1.ec2.internal",
        "c": "host-192-0-2-2 up",
        "d": "1-2-3-4",
    }


@pytest.mark.parametrize("form", ["10.{}.{}.7", "fd00:1:2:3:4:5:{}:{}", "00:11:22:33:{:02x}:{:02x}"])
def test_thousands_of_addresses_have_as_many_pseudonyms(form: str) -> None:
    many = [form.format(n // 250, n % 250) for n in range(1500)]
    after = masked(many)
    assert len(set(after)) == 1500
    assert not set(after) & set(many)


@given(st.lists(st.integers(1, 2**128 - 1), unique=True, min_size=1, max_size=20))
def test_two_uuids_never_have_one_pseudonym(numbers: list[int]) -> None:
    after = masked([f"{number:032x}" for number in numbers])
    assert len(set(after)) == len(numbers)


def test_what_looks_alike_and_is_none() -> None:
    document = {
        "pci": "0000:83:00.0 10de:2330",
        "time": "12:30:45",
        "cpus": "0-3,8-11",
        "version": "1.2.3.4",
        "driver_version": "31.0.15.123",
        "mask": "255.255.255.0",
        "zero": "00:00:00:00:00:00",
    }
    kept = {key: value for key, value in document.items() if key != "version"}
    assert masked(kept) == kept


@pytest.mark.parametrize("name", ["0", "1000", "4096", "20231234"])
def test_a_user_who_is_a_number(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("USER", name)
    monkeypatch.setenv("LOGNAME", name)
    options = ["--backend", "cpu", "--registry", str(tmp_path / "r.json"), "--mask"]
    assert main([*options, "--doctor", str(tmp_path / "d.json")]) == 0
    assert json.loads((tmp_path / "d.json").read_text())["masked"] is True
    assert main(["--backend", "cpu", "--mask", "--record", str(tmp_path / "there")]) == 0
    capsys.readouterr()
    assert main(["--json", "--fixture", str(tmp_path / "there")]) == 1
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["memory_bytes"] > 0
