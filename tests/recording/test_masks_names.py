"""Names of people, hosts and places, however they are written."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest

from gpurt.recording.mask import Masker


def masked(value: Any, key: str | None = None, **names: Any) -> Any:
    masker = Masker(**names)
    masker.learn(value, key)
    return masker.mask(value, key)


@pytest.mark.parametrize("text", ["WORKER7 said", "worker7", "Worker7-ib0", "logs_worker7_x", "worker7.lan"])
def test_a_host_in_every_case(text: str) -> None:
    after = masked(text, hosts=["worker7"])
    assert "worker7" not in after.lower()
    assert "host-1" in after


def test_one_person_in_every_case_has_one_pseudonym() -> None:
    assert masked(["alice", "ALICE", "/data/Alice/x"], users=["alice"]) == ["user-1", "user-1", "/data/user-1/x"]


def test_other_words_with_a_name_in_them_stay() -> None:
    assert masked("maximum xmax max2", users=["max"]) == "maximum xmax max2"


def test_the_domain_of_a_host() -> None:
    document = {
        "a": "worker7.corp.example.com:22",
        "b": "ns.corp.example.com and CORP.example.com",
        "c": "box.corp.example.com, box again",
        "d": "worker7.service worker7.log",
    }
    after = masked(document, hosts=["worker7"])
    assert after["a"] == "host-1:22"
    assert "corp" not in json.dumps(after).lower()
    assert after["b"].endswith(" and domain-1")
    assert after["d"] == "host-1.service host-1.log", "no domain, so nothing is learnt of it"


def test_names_of_values_have_names_of_people_in_them() -> None:
    document = {"alice/x": 1, "alice": 2, "/home/bob/x": 3, "name": 4, "CUDA_VISIBLE_DEVICES": "0", "gpu_alice": 5}
    after = masked(document, users=["alice"])
    assert list(after) == ["user-1/x", "user-1", "/home/user-2/x", "name", "CUDA_VISIBLE_DEVICES", "gpu_alice"]


@pytest.mark.parametrize("name", ["name", "devices", "uuid", "memory_bytes", "cuda", "error"])
def test_a_document_keeps_its_own_vocabulary(name: str) -> None:
    document = {name: {"backend": name, "text": f"the {name} of it"}}
    assert masked(document, users=[name], hosts=[name]) == document


@pytest.mark.parametrize("name", ["0", "1000", "42", "a", ""])
def test_names_that_are_small_numbers_or_letters_are_everywhere_and_stay(name: str) -> None:
    document = {"uid": 1000, "n": 0, "text": f"42 of 1000, {name} and a 0", "numbers": [0, 42, 1000], "0": 1}
    assert masked(document, users=[name], hosts=[name]) == document


def test_a_name_that_is_a_long_number_is_text() -> None:
    after = masked({"text": "of 20231234", "bytes": 20231234}, users=["20231234"])
    assert after == {"text": "of user-1", "bytes": 20231234}, "a number is no name"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/zoe/x", "zoe"),
        ("/homes/zoe", "zoe"),
        ("/home1/zoe", "zoe"),
        ("/home//zoe/x", "zoe"),
        ("/home/.zoe/x", "zoe"),
        ("/Users/zoe/x", "zoe"),
        ("/users/zoe/x", "zoe"),
        ("/export/home/zoe/x", "zoe"),
        ("/nfs/home/zoe", "zoe"),
        ("/var/home/zoe", "zoe"),
        ("/usr/home/zoe", "zoe"),
        ("/gpfs/u/home/zoe", "zoe"),
        ("/afs/cern.ch/user/z/zoe", "zoe"),
        ("/home/z/lib", "/home/z/"),
        ("~zoe/x", "zoe"),
        ("see ~zoe", "zoe"),
        ("/home/zoe smith/x", "smith"),
        ("C:\\Users\\zoe\\x", "zoe"),
        ("C:\\\\Users\\\\zoe\\\\x", "zoe"),
        ("C:\\Users\\zoe smith\\x", "smith"),
        ("/scratch/zoe/x", "zoe"),
        ("/projects/zoe", "zoe"),
        ("/projects/zoe/lib", "zoe"),
        ("/mnt/nfs/zoe/lib", "zoe"),
        ("/data/team/zoe", "zoe"),
        ("error in '/projects/zoe/x.py', line 1", "zoe"),
        ("file:///projects/zoe/x.whl", "zoe"),
        ("/opt/lib:/projects/zoe/lib", "zoe"),
    ],
)
def test_where_people_live(path: str, name: str) -> None:
    if len(name) > 1 and name != "/home/z/":
        assert name not in masked({"message": path})["message"]
        assert name not in masked({"PYTHONPATH": path})["PYTHONPATH"]


def test_paths_of_variables_with_blanks() -> None:
    value = "/usr/lib:/srv/Bob Jones/lib:/srv/Bob Jones:/projects/zoe smith/x"
    after = masked({"LD_LIBRARY_PATH": value, "message": "no /srv/Bob Jones/lib, /srv/Bobby"})
    assert after["LD_LIBRARY_PATH"] == "/usr/lib:/srv/dir-1/lib:/srv/dir-1:/projects/dir-2/x"
    assert after["message"].startswith("no /srv/dir-1/lib, /srv/dir-")
    assert "Bob" not in after["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/x86_64-linux-gnu:/usr/local/cuda-12.4/lib64",
        "/opt/rocm/lib",
        "/dev/nvidia0",
        "/proc/driver/nvidia/gpus/0000:83:00.0",
        "/sys/class/drm/card0",
        "/var/lib/x",
        "/run/user/1000",
        "/var/root/gpurt",
        "/System/Library/Frameworks",
        "https://example.org/a/b",
        "1.0 GiB / 2.0 GiB, N/A, and/or",
        "0::/docker/abc",
        "4:memory:/kubepods/pod1",
    ],
)
def test_paths_of_the_system_stay(path: str) -> None:
    assert masked({"message": path, "LD_LIBRARY_PATH": path}) == {"message": path, "LD_LIBRARY_PATH": path}


def test_who_has_a_directory_and_a_home_is_one() -> None:
    after = masked({"a": "/projects/zoe/x", "b": "/home/zoe"}, users=["zoe"])
    assert after == {"a": "/projects/user-1/x", "b": "/home/user-1"}
    assert masked("/data/zoe/x", homes=[PurePosixPath("/data/zoe")]) == "/home/user-1/x"


def test_mail() -> None:
    after = masked({"a": "by bob@corp.example, Bob@corp.example", "b": "carol+x@other.org", "c": "user@1000.service"})
    assert after == {"a": "by email-1, email-1", "b": "email-2", "c": "user@1000.service"}


def test_two_people_never_have_one_pseudonym() -> None:
    names = [f"person{n}x" for n in range(600)]
    after = masked([f"/home/{name}/lib" for name in names] + [f"/projects/{name}dir" for name in names])
    assert len(set(after)) == 1200
