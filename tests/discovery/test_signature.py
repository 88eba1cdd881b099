"""The signature changes with everything that an answer rests on, and with nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.signature import cpu_signature, cuda_signature, package_stamp
from gpurt.sources.nvml import NvmlDevice, NvmlPartition
from gpurt.types import DeviceState
from tests.support.fake_cuda import nvml_record


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a CuPy in it, before any other."""
    site = tmp_path / "site"
    package = site / "cupy_backends"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (site / "cupy_cuda12x-13.6.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "cupy_backends", raising=False)
    return site


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for path, text in {
        "proc/sys/kernel/random/boot_id": "b007",
        "etc/machine-id": "cafe",
        "dev/nvidia0": "",
        "dev/nvidia-uvm": "",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


PARTS = tuple(NvmlPartition(f"MIG-{n}", None, f"{n}/0", 40, 40, None) for n in (1, 2))


def sign(root: Path, **change: Any) -> str | None:
    given: dict[str, Any] = {"cards": [nvml_record(0), nvml_record(1)], "version": "580.1", "environ": {"PATH": "/bin"}}
    given |= change
    return cuda_signature(given["cards"], given["version"], given["environ"], root=root)


def test_it_is_the_same_for_the_same_in_any_order(site: Path, root: Path) -> None:
    first = sign(root)
    assert first is not None
    assert sign(root, cards=[nvml_record(1), nvml_record(0)]) == first
    assert sign(root, cards=[nvml_record(0, memory_free_bytes=1), nvml_record(1)]) == first
    assert sign(root, environ={"PATH": "/elsewhere", "HOME": "/"}) == first


@pytest.mark.parametrize(
    "change",
    [
        {"version": "580.2"},
        {"version": None},
        {"cards": [nvml_record(0)]},
        {"cards": [nvml_record(0), nvml_record(2)]},
        {"cards": [nvml_record(0), nvml_record(1, pci_address="00000000:0f:00.0")]},
        {"cards": [nvml_record(0), nvml_record(1, partitions=PARTS)]},
        {"cards": [nvml_record(0), nvml_record(1, partitions=PARTS[:1])]},
        {"environ": {"CUDA_VISIBLE_DEVICES": "0"}},
        {"environ": {"CUDA_VISIBLE_DEVICES": ""}},
        {"environ": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}},
        {"environ": {"LD_LIBRARY_PATH": "/compat"}},
        {"environ": {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}},
    ],
)
def test_it_changes_with_cards_driver_and_environment(site: Path, root: Path, change: dict[str, Any]) -> None:
    assert sign(root, **change) not in (None, sign(root))


def upgraded(site: Path, root: Path) -> None:
    (site / "cupy_cuda12x-13.6.0.dist-info").rename(site / "cupy_cuda12x-13.6.1.dist-info")


def installed_twice(site: Path, root: Path) -> None:
    (site / "cupy_cuda11x-13.6.0.dist-info").mkdir()


def reinstalled(site: Path, root: Path) -> None:
    os.utime(site / "cupy_backends" / "__init__.py", (1, 1))


def rebooted(site: Path, root: Path) -> None:
    (root / "proc/sys/kernel/random/boot_id").write_text("b008")


def moved(site: Path, root: Path) -> None:
    (root / "etc/machine-id").write_text("babe")


def node_gone(site: Path, root: Path) -> None:
    (root / "dev/nvidia-uvm").unlink()


@pytest.mark.parametrize("change", [upgraded, installed_twice, reinstalled, rebooted, moved, node_gone])
def test_it_changes_with_library_boot_and_host(site: Path, root: Path, change: Callable[[Path, Path], None]) -> None:
    before = sign(root)
    change(site, root)
    assert sign(root) not in (None, before)


def test_it_changes_with_gpurt(site: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sign(root), cpu_signature(root=root)
    monkeypatch.setattr("gpurt.__version__", "99.0", raising=False)
    after = sign(root), cpu_signature(root=root)
    assert None not in after
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize(
    "cards",
    [
        [],
        [nvml_record(0), nvml_record(1, state=DeviceState.LOST)],
        [nvml_record(0, state=DeviceState.DEGRADED)],
        [nvml_record(0, memory_free_bytes=None)],
        [NvmlDevice(0, name="unknown", memory_free_bytes=1)],
    ],
)
def test_cards_that_are_not_well_known_have_none(site: Path, root: Path, cards: list[NvmlDevice]) -> None:
    assert sign(root, cards=cards) is None


def test_without_the_library_there_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sign(root) is None
    assert cpu_signature(root=root) is None


def test_the_stamp_names_what_is_installed_and_imports_nothing(site: Path) -> None:
    stamp = package_stamp("cupy_backends")
    assert stamp is not None
    assert stamp[-1] == ["cupy_cuda12x-13.6.0.dist-info"]
    assert "cupy_backends" not in sys.modules
    (numpy,) = (package_stamp("numpy") or [])[-1]
    assert numpy.startswith("numpy-")


def test_the_processors_changes_with_the_boot(root: Path) -> None:
    before = cpu_signature(root=root)
    assert before is not None
    assert cpu_signature(root=root) == before
    (root / "proc/sys/kernel/random/boot_id").write_text("b008")
    assert cpu_signature(root=root) != before
