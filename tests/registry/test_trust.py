"""A file of state that another user can have written is refused, whatever it says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gpurt.cluster.promises import PromiseFile
from gpurt.cluster.security.enrolment import enrol, init_cluster
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.identity import load_identity
from gpurt.cluster.worker import WorkerConfig, run_worker
from gpurt.discovery.registry import RegistryDocument, RegistryFile
from gpurt.errors import UntrustedFile
from gpurt.registry import trust
from gpurt.registry.measured import MeasuredFile
from gpurt.registry.trust import check_trusted

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows' rights are not looked at")

OTHER = 54321
"""A user that is not this one."""


def expected(file: tuple[int, int, int], folder: tuple[int, int, int], me: int, sudo: int | None) -> bool:
    """The rule once more: (owner, group, mode) of file and directory, this user's number, who called sudo."""
    believed = {me, 0} | ({sudo} if me == 0 and sudo is not None else set())
    for number, (owner, group, mode) in enumerate((file, folder)):
        if owner not in believed:
            return False
        if number == 1 and mode & 0o1000:
            continue
        if mode & 0o002 or (mode & 0o020 and group != me):
            return False
    return True


def refusal(path: Path) -> str | None:
    try:
        check_trusted(path, 0)
    except UntrustedFile as exc:
        return exc.message
    return None


class Status:
    def __init__(self, kind: int, owner: int, group: int, mode: int) -> None:
        self.st_uid, self.st_gid, self.st_mode, self.st_size = owner, group, kind | mode, 2


@pytest.mark.parametrize("me", [0, 1000])
@pytest.mark.parametrize("sudo", [None, 1000])
def test_every_owner_and_mode(me: int, sudo: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trust.os, "geteuid", lambda: me)
    monkeypatch.setenv("SUDO_UID", str(sudo)) if sudo is not None else monkeypatch.delenv("SUDO_UID", raising=False)
    path = tmp_path / "state.json"
    path.write_text("{}")
    real_stat = Path.stat
    seen = {True: 0, False: 0}
    for owner in (0, 1000, OTHER):
        for group in (0, 1000):
            for mode in (0o600, 0o640, 0o644, 0o660, 0o664, 0o646, 0o666):
                for folder_owner in (0, 1000, OTHER):
                    for folder_mode in (0o700, 0o755, 0o775, 0o777, 0o1777, 0o1775):
                        file = Status(0o100000, owner, group, mode)
                        folder = Status(0o040000, folder_owner, group, folder_mode)
                        monkeypatch.setattr(trust.os, "fstat", lambda _, file=file: file)
                        monkeypatch.setattr(
                            Path,
                            "stat",
                            lambda self, folder=folder, **options: (
                                folder if self == tmp_path else real_stat(self, **options)
                            ),
                        )
                        wanted = expected((owner, group, mode), (folder_owner, group, folder_mode), me, sudo)
                        seen[wanted] += 1
                        refused = refusal(path)
                        assert (refused is None) is wanted, (owner, group, oct(mode), folder_owner, oct(folder_mode))
                        if refused is not None:
                            assert str(path) in refused
                            assert "owner" in refused
                            assert "mode " in refused
    assert min(seen.values()) > 10


needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")


@needs_root
def test_what_another_user_has_planted_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    RegistryFile(path).save(RegistryDocument(epoch=7))
    assert RegistryFile(path).next_epoch() == 8
    before = path.read_bytes()
    os.chown(path, OTHER, OTHER)
    for attempt in (RegistryFile(path).load, RegistryFile(path).next_epoch):
        with pytest.raises(UntrustedFile, match=rf"{path} .*owner {OTHER}, mode 0600"):
            attempt()
    assert MeasuredFile(path).tunings() == ()
    assert path.read_bytes() == before
    os.chown(path, 0, 0)
    path.chmod(0o666)
    with pytest.raises(UntrustedFile, match=r"can be written by others .*mode 0666"):
        RegistryFile(path).load()
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(UntrustedFile, match=f"its directory {tmp_path} can be written by others"):
        RegistryFile(path).load()
    tmp_path.chmod(0o1777)
    assert RegistryFile(path).load() is not None


@needs_root
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    RegistryFile(real).save(RegistryDocument())
    link.symlink_to(real)
    assert RegistryFile(link).load() is not None
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(UntrustedFile, match="symbolic link is owned by another user"):
        RegistryFile(link).load()


@needs_root
async def test_a_worker_ends_with_the_reason(tmp_path: Path) -> None:
    registry = tmp_path / "registry.json"
    await asyncio.to_thread(RegistryFile(registry).save, RegistryDocument())
    await asyncio.to_thread(os.chown, registry, OTHER, OTHER)
    with pytest.raises(UntrustedFile):
        await run_worker(WorkerConfig("w1", registry_path=registry, simulate="h100"))


@needs_root
def test_promises_of_another_user_are_not_kept(tmp_path: Path) -> None:
    registry = tmp_path / "registry.json"
    promises = PromiseFile(registry, "default", "w1")
    promises.keep(promises.promises())
    os.chown(promises.path, OTHER, OTHER)
    with pytest.raises(UntrustedFile, match=r"promises\.json"):
        promises.promises()


@needs_root
@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem", "cluster.json", "roster.json"])
def test_no_file_of_a_certificates_folder_is_anothers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    init_cluster(tmp_path / "c", hosts=["localhost"])
    hub = tmp_path / "c" / "hub"
    load_identity(hub)
    os.chown(hub / name, OTHER, OTHER)
    with pytest.raises(CredentialsRefused, match=rf"{name} is not believed: the file is owned by another user"):
        load_identity(hub)


@needs_root
def test_nothing_is_issued_from_anothers_authority(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    init_cluster(tmp_path / "c", hosts=["localhost"])
    os.chown(tmp_path / "c" / "ca.pem", OTHER, OTHER)
    with pytest.raises(CredentialsRefused, match="is not believed"):
        enrol(tmp_path / "c", "w1")


def test_a_file_that_is_not_there_is_no_question_of_trust(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_trusted(tmp_path / "nothing")
