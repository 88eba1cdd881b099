"""Why ROCm, or CUDA, cannot be used here: the reason, what is wrong, and the command that mends it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.sources.trees import write
from tests.support.fake_cuda import CUDARuntimeError, FakeNvml, FakeRuntime, install, install_nvml, nvml_record
from tests.support.fake_hip import FakeHip, recorded

from gpurt.backends.cuda_backend import CUDADriver
from gpurt.backends.cupy.loading import installed_wheels
from gpurt.backends.rocm_backend import ROCmDriver, create
from gpurt.errors import BackendUnavailable, ReasonCode

INSTALL = "pip install 'gpurt[rocm]'  # cupy-rocm-7-0"
# What the wheel says on a host without ROCm, from `import cupy_backends.cuda.api.runtime` and from `import cupy`.
NO_ROCM = "libamdhip64.so.7: cannot open shared object file: No such file or directory"
BANNER = f"""
================================================================
Failed to import CuPy.

If you installed CuPy via wheels (cupy-cudaXXX or cupy-rocm-X-X), make sure that the package matches with the version of CUDA or ROCm installed.

Original error:
  ImportError: {NO_ROCM}
================================================================
"""  # noqa: E501


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with a card that this process may use."""
    return recorded("amd-mi210", tmp_path)


@pytest.fixture(autouse=True)
def on_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def refusal(root: Path, *, system: str = "linux", **environ: str) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        ROCmDriver(environ=environ, root=root, system=system).open()
    assert caught.value.backend == "rocm"
    return caught.value


# The library


@pytest.mark.usefixtures("no_cupy")
def test_not_installed_the_command_that_installs_it(host: Path) -> None:
    error = refusal(host)
    assert error.reason is ReasonCode.NO_LIBRARY
    assert error.message == "CuPy for ROCm is not installed"
    assert error.install_hint == INSTALL


@pytest.mark.usefixtures("no_cupy")
@pytest.mark.parametrize(("system", "machine"), [("win32", "AMD64"), ("linux", "aarch64")])
def test_where_there_is_no_wheel_it_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str, machine: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    error = refusal(tmp_path, system=system)
    assert error.reason is ReasonCode.NO_LIBRARY
    assert error.install_hint is not None
    assert "there is no CuPy for ROCm to install here: build it" in error.install_hint
    assert "gpurt[rocm]" not in error.install_hint


def test_a_cupy_that_somebody_built_on_windows_is_used(
    monkeypatch: pytest.MonkeyPatch, host: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    install(monkeypatch, FakeHip(host))
    driver = ROCmDriver(environ={}, root=tmp_path_factory.mktemp("no-files"), system="win32")
    (card,) = driver.open()
    assert (card.name, card.usable) == ("AMD Instinct MI210", True)
    driver.close()


@pytest.mark.parametrize("system", ["darwin", "android", "ios", "freebsd14"])
def test_other_systems_have_no_rocm(tmp_path: Path, system: str) -> None:
    error = refusal(tmp_path, system=system)
    assert error.reason is ReasonCode.WRONG_PLATFORM
    assert system in error.message
    assert error.install_hint is None


def test_cudas_cupy_on_an_amd_host(monkeypatch: pytest.MonkeyPatch, host: Path) -> None:
    install(monkeypatch, FakeRuntime())
    error = refusal(host)
    assert error.reason is ReasonCode.NO_LIBRARY
    assert error.message == "the installed CuPy is built for CUDA, not for ROCm"
    assert error.install_hint is not None
    assert error.install_hint.startswith("pip uninstall")
    assert error.install_hint.endswith(INSTALL)


@pytest.mark.parametrize("text", [NO_ROCM, BANNER, "libhipblas.so.3: cannot open shared object file"])
def test_without_rocm_s_own_libraries(monkeypatch: pytest.MonkeyPatch, host: Path, text: str) -> None:
    cannot_be_imported(monkeypatch, text)
    error = refusal(host)
    assert error.reason is ReasonCode.NO_LIBRARY
    assert "CuPy for ROCm is installed" in error.message
    assert ("libhipblas.so.3" if "hipblas" in text else "libamdhip64.so.7") in error.message
    assert "===" not in error.message
    assert "LD_LIBRARY_PATH" not in error.message
    assert error.install_hint is not None
    assert "rocm-hip-runtime" in error.install_hint
    assert isinstance(error.__cause__, ImportError)


def test_rocms_cupy_without_rocm_on_an_nvidia_host(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, FakeNvml([nvml_record(0)]))
    cannot_be_imported(monkeypatch, NO_ROCM)
    with pytest.raises(BackendUnavailable) as caught:
        CUDADriver(environ={}).open()
    error = caught.value
    assert error.reason is ReasonCode.NO_LIBRARY
    assert error.message.startswith("the installed CuPy is built for ROCm, not for CUDA")
    assert "pip uninstall" in str(error)
    assert "cupy-cuda12x" in str(error)


def cannot_be_imported(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError(text)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr("importlib.import_module", fail)


# Two wheels in one place


def site(place: Path, *names: str) -> Path:
    """A directory as pip leaves it, with CuPy from each of these distributions."""
    write(place, "cupy/__init__.py", "raise ImportError('not of a real wheel')\n")
    write(place, "numpy_not_cupy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: numpy-not-cupy\nVersion: 1.0\n")
    for name in names:
        record = f"{name.replace('-', '_')}-14.2.0.dist-info"
        write(place, f"{record}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.2.0\n")
    return place


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*places: Path) -> None:
        for place in reversed(places):
            monkeypatch.syspath_prepend(place)

    for name in [each for each in sys.modules if each.split(".")[0] in ("cupy", "cupy_backends")]:
        monkeypatch.delitem(sys.modules, name)
    return put


@pytest.mark.parametrize("driver", [ROCmDriver, CUDADriver])
def test_two_wheels_at_once_and_what_to_uninstall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: Path, sites: Callable[..., None], driver: Any
) -> None:
    install_nvml(monkeypatch, FakeNvml([nvml_record(0)]))
    sites(site(tmp_path / "site", "cupy-cuda12x", "cupy-rocm-7-0"))
    subject = driver(environ={}, root=host, system="linux") if driver is ROCmDriver else driver(environ={})
    with pytest.raises(BackendUnavailable) as caught:
        subject.open()
    error = caught.value
    assert error.reason is ReasonCode.NO_LIBRARY
    assert error.message.startswith("cupy-cuda12x and cupy-rocm-7-0 are installed over each other")
    assert error.install_hint is not None
    assert error.install_hint.startswith("pip uninstall -y cupy-cuda12x cupy-rocm-7-0, then pip install 'gpurt[")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["cupy-cuda12x"], ("cupy-cuda12x",)),
        (["cupy", "cupy-cuda13x"], ("cupy", "cupy-cuda13x")),
        (["amd-cupy", "cupy-rocm-7-0"], ("amd-cupy", "cupy-rocm-7-0")),
        (["cupy-rocm-7-0", "cupy-xarray"], ("cupy-rocm-7-0",)),
        ([], ()),
    ],
)
def test_which_distributions_bring_cupy(
    tmp_path: Path, sites: Callable[..., None], names: list[str], expected: tuple[str, ...]
) -> None:
    sites(site(tmp_path, *names))
    assert installed_wheels() == expected


def test_a_wheel_elsewhere_on_the_path_is_in_nobodys_way(tmp_path: Path, sites: Callable[..., None]) -> None:
    sites(site(tmp_path / "first", "cupy-rocm-7-0"), site(tmp_path / "second", "cupy-cuda12x"))
    assert installed_wheels() == ("cupy-rocm-7-0",)


# The kernel, which has the first word: no library helps where there is no driver


@pytest.mark.usefixtures("no_cupy")
def test_no_card_at_all(tmp_path: Path) -> None:
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    error = refusal(tmp_path)
    assert error.reason is ReasonCode.NO_DEVICE
    assert error.message == "the PCI bus shows no AMD GPU; CuPy for ROCm is not installed"
    assert error.install_hint is None
    # In WSL the GPU is Windows', and not on the bus.
    write(tmp_path, "dev/dxg", "")
    assert refusal(tmp_path).reason is ReasonCode.NO_LIBRARY


@pytest.mark.parametrize("loads", [True, False])
def test_kfd_that_may_not_be_opened(monkeypatch: pytest.MonkeyPatch, host: Path, loads: bool) -> None:
    monkeypatch.setattr("gpurt.sources.device_nodes.os.access", lambda path, *_, **__: not str(path).endswith("kfd"))
    refusing_hip(monkeypatch, host) if loads else cannot_be_imported(monkeypatch, NO_ROCM)
    error = refusal(host)
    assert error.reason is ReasonCode.NO_PERMISSION
    assert "this process may not open /dev/kfd" in error.message
    assert error.code == (100 if loads else None)
    assert error.hint is not None
    assert "usermod -aG render,video" in error.hint


def test_a_render_node_that_may_not_be_opened(monkeypatch: pytest.MonkeyPatch, host: Path) -> None:
    monkeypatch.setattr("gpurt.sources.device_nodes.os.access", lambda path, *_, **__: "renderD" not in str(path))
    refusing_hip(monkeypatch, host)
    assert "/dev/dri/renderD130" in refusal(host).message


def test_without_kfd(monkeypatch: pytest.MonkeyPatch, host: Path) -> None:
    refusing_hip(monkeypatch, host)
    (host / "dev/kfd").unlink()
    error = refusal(host)
    assert error.reason is ReasonCode.NO_DRIVER
    assert "/dev/kfd" in error.message
    assert error.hint is not None
    assert "modprobe amdgpu" in error.hint


@pytest.mark.usefixtures("no_cupy")
def test_a_card_without_a_driver(tmp_path: Path) -> None:
    for name, text in (("vendor", "0x1002"), ("class", "0x030000"), ("uevent", "PCI_SLOT_NAME=0000:03:00.0")):
        write(tmp_path, f"sys/bus/pci/devices/0000:03:00.0/{name}", f"{text}\n")
    error = refusal(tmp_path)
    assert error.reason is ReasonCode.NO_DRIVER
    assert error.message.startswith("amdgpu, the kernel's driver, drives none")


def refusing_hip(monkeypatch: pytest.MonkeyPatch, root: Path, status: int = 100) -> FakeRuntime:
    runtime = install(monkeypatch, FakeHip(root))
    runtime.count_status = status
    return runtime


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ROCR_VISIBLE_DEVICES", ""),
        ("ROCR_VISIBLE_DEVICES", "7"),
        ("HIP_VISIBLE_DEVICES", "-1"),
        ("CUDA_VISIBLE_DEVICES", "GPU-0000"),
    ],
)
@pytest.mark.parametrize("status", [100, 0])
def test_hidden_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, host: Path, variable: str, value: str, status: int
) -> None:
    runtime = refusing_hip(monkeypatch, host, status)
    runtime.properties.clear()
    error = refusal(host, **{variable: value})
    assert error.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    assert error.message == f"{variable}={value!r} leaves no device of 1"


def test_a_variable_that_hides_nothing_is_not_blamed(monkeypatch: pytest.MonkeyPatch, host: Path) -> None:
    refusing_hip(monkeypatch, host)
    error = refusal(host, HIP_VISIBLE_DEVICES="0")
    assert error.reason is ReasonCode.UNSUPPORTED_DEVICE
    assert "(gfx90a)" in error.message


def test_no_device_and_nothing_to_blame(
    monkeypatch: pytest.MonkeyPatch, host: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    refusing_hip(monkeypatch, host)
    error = refusal(tmp_path_factory.mktemp("no-files"))
    assert (error.reason, error.code) == (ReasonCode.NO_DEVICE, 100)


@pytest.mark.parametrize(("status", "reason"), [(35, ReasonCode.DRIVER_MISMATCH), (999, ReasonCode.ERROR)])
def test_other_refusals_keep_their_code(
    monkeypatch: pytest.MonkeyPatch, host: Path, status: int, reason: ReasonCode
) -> None:
    refusing_hip(monkeypatch, host, status)
    error = refusal(host)
    assert (error.reason, error.code) == (reason, status)
    assert isinstance(error.__cause__, CUDARuntimeError)


@pytest.mark.usefixtures("no_cupy")
async def test_the_backend_refuses_with_the_reason() -> None:
    for _ in range(2):
        with pytest.raises(BackendUnavailable) as caught:
            await create().initialize()
        assert caught.value.backend == "rocm"
