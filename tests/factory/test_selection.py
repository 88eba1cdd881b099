"""Which backend is chosen, and what is said about the others (C12, C13, C14, C34)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpurt import factory
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import BackendUnavailable, GPUError, ReasonCode
from gpurt.factory import PLATFORM_BACKEND_PRIORITY, GPUBackendFactory
from gpurt.types import DeviceKind, DeviceState
from tests.factory.toy import Shelf, ToyBackend, device

ORDER = {
    "linux": ["cuda", "rocm", "vulkan", "cpu"],
    "win32": ["directml", "cuda", "rocm", "cpu"],
    "darwin": ["metal", "cpu"],
    "android": ["tflite", "cpu"],
    "ios": ["tflite", "cpu"],
}


def raising(error: BaseException):
    async def fail() -> None:
        raise error

    return lambda: ToyBackend(on_initialize=fail)


@pytest.mark.parametrize("platform", ORDER)
async def test_tries_the_platforms_backends_in_order(
    platform: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "current_platform", lambda **_: platform)
    backend = await GPUBackendFactory.create_backend()
    assert shelf.names == ORDER[platform]
    assert backend is shelf["cpu"]
    assert [report.name for report in GPUBackendFactory.last_reports()] == ORDER[platform]
    assert list(PLATFORM_BACKEND_PRIORITY[platform]) == ORDER[platform]


async def test_stops_at_the_first_with_a_device(shelf: Shelf) -> None:
    shelf.put("rocm")
    backend = await factory.create_backend()
    assert backend is shelf["rocm"]
    assert shelf.names == ["cuda", "rocm"]
    assert shelf["rocm"].shutdowns == 0
    assert shelf["rocm"].initializations == 1
    ok = factory.last_reports()[-1]
    assert (ok.status, ok.reason, ok.device_ids) == ("ok", None, ("rocm:0",))


async def test_every_kind_of_failure_falls_back_and_keeps_its_reason(shelf: Shelf) -> None:
    def not_importable() -> ToyBackend:
        raise ImportError("No module named 'cupy'")

    shelf.put("cuda", not_importable)
    shelf.put("rocm", raising(RuntimeError("HIP said no")))
    shelf.put("vulkan", raising(OSError("libvulkan.so.1: cannot open shared object file")))
    backend = await factory.create_backend()
    assert backend is shelf["cpu"]
    cuda, rocm, vulkan, cpu = factory.last_reports()
    assert (cuda.reason, cuda.status) == (ReasonCode.NO_LIBRARY, "unavailable")
    assert "No module named 'cupy'" in cuda.message
    assert rocm.reason is ReasonCode.ERROR
    assert "HIP said no" in rocm.message
    assert "libvulkan" in vulkan.message
    assert cpu.status == "ok"
    assert shelf["rocm"].shutdowns == 1
    assert shelf["vulkan"].shutdowns == 1


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), KeyError("x"), MemoryError("x"), AssertionError("x"), PermissionError("x")]
)
async def test_any_exception_is_a_reason(shelf: Shelf, error: Exception) -> None:
    shelf.put("cuda", raising(error))
    assert await factory.create_backend() is shelf["cpu"]
    report = factory.last_reports()[0]
    assert report.reason is (ReasonCode.NO_PERMISSION if isinstance(error, PermissionError) else ReasonCode.ERROR)
    assert type(error).__name__ in report.message


async def test_typed_refusal_keeps_reason_and_hint(shelf: Shelf) -> None:
    refusal = BackendUnavailable(
        "CuPy is not installed", reason=ReasonCode.NO_LIBRARY, install_hint="pip install cupy-cuda12x"
    )
    shelf.put("cuda", raising(refusal))
    await factory.create_backend()
    report = factory.last_reports()[0]
    assert (report.reason, report.message) == ("no_library", "CuPy is not installed")
    # On a machine whose bus shows no card it is said first that none may be missed, as discovery says it.
    assert (report.hint or "").endswith("pip install cupy-cuda12x")
    with pytest.raises(BackendUnavailable, match="cupy-cuda12x") as caught:
        await factory.create_backend("cuda")
    assert caught.value.__cause__ is refusal
    assert caught.value.install_hint == "pip install cupy-cuda12x"


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ((), "no device"),
        ((device("vulkan:0", kind=DeviceKind.SOFTWARE, name="llvmpipe"),), "llvmpipe"),
        ((device("vulkan:0", usable=False, state_reason="failed verification"),), "failed verification"),
        ((device("vulkan:0", state=DeviceState.LOST),), "lost"),
    ],
)
async def test_no_usable_device_is_a_refusal(shelf: Shelf, devices: tuple, says: str) -> None:
    shelf.put("vulkan", lambda: ToyBackend(devices))
    assert await factory.create_backend() is shelf["cpu"]
    report = factory.last_reports()[2]
    assert (report.name, report.reason) == ("vulkan", ReasonCode.NO_DEVICE)
    assert says in report.message
    assert shelf["vulkan"].shutdowns == 1


async def test_one_usable_device_is_enough(shelf: Shelf) -> None:
    shelf.put("cuda", lambda: ToyBackend((device("cuda:0", usable=False), device("cuda:1"))))
    assert await factory.create_backend() is shelf["cuda"]


async def test_software_device_only_by_name(shelf: Shelf) -> None:
    shelf.put("vulkan", lambda: ToyBackend((device("vulkan:0", kind=DeviceKind.SOFTWARE),)))
    assert await factory.create_backend("vulkan") is shelf["vulkan"]


class TestForced:
    async def test_override_and_clear(self, shelf: Shelf) -> None:
        shelf.put("cuda")
        GPUBackendFactory.set_backend_override("cpu")
        assert await GPUBackendFactory.create_backend() is shelf["cpu"]
        assert shelf.names == ["cpu"]
        GPUBackendFactory.clear_backend_override()
        assert await GPUBackendFactory.create_backend() is shelf["cuda"]

    async def test_unknown_override_is_a_runtime_error_that_lists_the_names(self) -> None:
        factory.set_backend_override("nope")
        with pytest.raises(RuntimeError, match=r"'nope'.*set_backend_override\(\).*choose one of .*cpu.*cuda"):
            await factory.create_backend()
        assert [report.name for report in factory.last_reports()] == ["nope"]

    def test_empty_override(self) -> None:
        with pytest.raises(ValueError, match="clear_backend_override"):
            factory.set_backend_override(" ")

    async def test_no_silent_fallback(self, shelf: Shelf) -> None:
        for environ in ({"GPURT_BACKEND": "cuda"}, {"GPURT_BACKEND": "cuda", "GPURT_FALLBACK": "1"}):
            with pytest.raises(BackendUnavailable, match=r"cuda.*GPURT_BACKEND=cuda") as caught:
                await factory.create_backend(environ=environ)
            assert caught.value.reason is ReasonCode.NO_DEVICE
        factory.set_backend_override("cuda")
        with pytest.raises(BackendUnavailable):
            await factory.create_backend()
        with pytest.raises(BackendUnavailable):
            await factory.create_backend("cuda", fallback=False)
        assert set(shelf.names) == {"cuda"}
        assert all(backend.shutdowns == 1 for _, backend in shelf.made)

    async def test_asked_for_fallback_is_logged(self, shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
        assert await factory.create_backend("cuda", fallback=True) is shelf["cpu"]
        assert "falling back to cpu" in caplog.text

    async def test_argument_over_override_over_environment(self, shelf: Shelf) -> None:
        for name in ("cuda", "rocm", "vulkan"):
            shelf.put(name)
        factory.set_backend_override("rocm")
        environ = {"GPURT_BACKEND": "vulkan"}
        assert (await factory.create_backend("cuda", environ=environ)) is shelf["cuda"]
        assert (await factory.create_backend(environ=environ)) is shelf["rocm"]
        factory.clear_backend_override()
        assert (await factory.create_backend(environ=environ)) is shelf["vulkan"]

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"GPURT_BACKEND": "rocm"}, "rocm"),
            ({"AITBC_GPU_BACKEND": "rocm"}, "rocm"),
            ({"GPURT_BACKEND": " ROCm "}, "rocm"),
            ({"GPURT_BACKEND": "rocm", "AITBC_GPU_BACKEND": "metal"}, "rocm"),
            ({"GPURT_BACKEND": "", "AITBC_GPU_BACKEND": "rocm"}, "rocm"),
            ({"AITBC_GPU_BACKEND": "apple_silicon"}, "metal"),
            ({"GPURT_BACKEND": "auto"}, "cpu"),
            ({}, "cpu"),
        ],
    )
    async def test_environment(self, shelf: Shelf, environ: dict[str, str], expected: str) -> None:
        shelf.put("rocm") if expected == "rocm" else shelf.put("metal")
        assert await factory.create_backend(environ=environ) is shelf[expected]

    async def test_process_environment_is_the_default(self, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(os.environ, "GPURT_BACKEND", "metal")
        shelf.put("metal")
        assert await factory.create_backend() is shelf["metal"]

    async def test_unknown_name_in_environment_names_variable_and_choices(self) -> None:
        with pytest.raises(GPUError, match=r"GPURT_BACKEND=nope.*choose one of .*cpu.*vulkan"):
            await factory.create_backend(environ={"GPURT_BACKEND": "nope"})

    @pytest.mark.parametrize("variable", ["GPURT_FALLBACK", "AITBC_GPU_FALLBACK", "GPURT_PLUGINS"])
    async def test_bad_switch_names_variable_and_choices(self, variable: str) -> None:
        for call in (factory.create_backend, factory.detect_available_backends):
            with pytest.raises(GPUError, match=rf"{variable}='maybe'.*1 true yes on, 0 false no off"):
                await call(environ={variable: "maybe"})


class TestWithoutFallback:
    @pytest.mark.parametrize("environ", [{"GPURT_FALLBACK": "0"}, {"AITBC_GPU_FALLBACK": "false"}])
    async def test_raises_with_every_reason(self, shelf: Shelf, environ: dict[str, str]) -> None:
        shelf.put("rocm", raising(RuntimeError("HIP said no")))
        with pytest.raises(BackendUnavailable, match=r"cuda \(no_device\).*HIP said no.*vulkan.*GPURT_FALLBACK") as e:
            await factory.create_backend(environ=environ)
        assert shelf.names == ["cuda", "rocm", "vulkan"]
        assert isinstance(e.value.__cause__, ExceptionGroup)
        assert len(e.value.__cause__.exceptions) == 3

    async def test_argument_wins_over_environment(self, shelf: Shelf) -> None:
        assert await factory.create_backend(fallback=True, environ={"GPURT_FALLBACK": "0"}) is shelf["cpu"]
        with pytest.raises(BackendUnavailable):
            await factory.create_backend(fallback=False)

    async def test_forced_cpu_is_no_fallback(self, shelf: Shelf) -> None:
        environ = {"GPURT_FALLBACK": "0", "GPURT_BACKEND": "cpu"}
        assert await factory.create_backend(environ=environ) is shelf["cpu"]

    async def test_same_reason_everywhere_is_the_reason(self, shelf: Shelf) -> None:
        with pytest.raises(BackendUnavailable) as caught:
            await factory.create_backend(fallback=False)
        assert caught.value.reason is ReasonCode.NO_DEVICE


class TestCandidates:
    async def test_replace_the_platforms_list(self, shelf: Shelf) -> None:
        assert await factory.create_backend(candidates=["tflite", "cpu"]) is shelf["cpu"]
        assert shelf.names == ["tflite", "cpu"]

    async def test_cpu_only_when_listed(self, shelf: Shelf) -> None:
        with pytest.raises(BackendUnavailable, match="tflite"):
            await factory.create_backend(candidates=["tflite"])
        with pytest.raises(BackendUnavailable, match="no candidate"):
            await factory.create_backend(candidates=[])


class TestNewBackend:
    """The recipe for one's own backend: register it, or override the classic extension point."""

    async def test_registered_is_tried_just_before_cpu(self, shelf: Shelf) -> None:
        GPUBackendFactory.register("my_gpu", lambda: ToyBackend((device("my_gpu:0"),)))
        backend = await factory.create_backend()
        assert [report.name for report in factory.last_reports()] == ["cuda", "rocm", "vulkan", "my_gpu"]
        assert (await backend.list_devices())[0].device_id == "my_gpu:0"
        assert await factory.detect_available_backends() == ["my_gpu", "cpu"]

    async def test_priority_table_places_it(self, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(factory, "current_platform", lambda **_: "linux")
        monkeypatch.setitem(PLATFORM_BACKEND_PRIORITY, "linux", ("my_gpu", "cuda", "cpu"))
        shelf.put("my_gpu")
        assert await factory.create_backend() is shelf["my_gpu"]
        assert shelf.names == ["my_gpu"]

    async def test_extension_point(self, shelf: Shelf) -> None:
        mine = ToyBackend()

        class MyFactory(GPUBackendFactory):
            @classmethod
            async def _create_specific_backend(cls, name: str):
                if name == "my_gpu":
                    await mine.initialize()  # some do it here already
                    return mine
                return await super()._create_specific_backend(name)

        assert await MyFactory.create_backend("my_gpu") is mine
        assert await MyFactory.create_backend() is shelf["cpu"]

    async def test_taken_names(self) -> None:
        with pytest.raises(ValueError, match="replace=True"):
            factory.register("cuda", ToyBackend)
        factory.register("my_gpu", ToyBackend)
        with pytest.raises(ValueError, match="replace=True"):
            factory.register("my_gpu", ToyBackend)
        with pytest.raises(ValueError, match="lower-case identifier"):
            factory.register("My GPU", ToyBackend)
        with pytest.raises(TypeError, match="callable"):
            factory.register("other", "not.a:callable")  # pyright: ignore


async def test_the_factory_says_of_cuda_what_discovery_says(tmp_path: Path) -> None:
    """Two answers to "why is my GPU missing?" would be one too many."""
    async with GPUDiscoveryService(tmp_path / "r.json", backends=["cuda"]) as service:
        (found,) = (await service.discover_all_devices()).reports
    if found.status == "ok":
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable) as caught:
        await factory.create_backend("cuda")
    report = factory.last_reports()[-1]
    assert report.reason is found.reason is caught.value.reason
    assert found.message.startswith(report.message)
    assert report.hint == found.hint
