"""Backends of other packages: real entry points of a distribution on the path."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurt import factory, plugins
from gpurt.driver import API_VERSION
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.runtime.backend import DriverBackend
from tests.factory.toy import Shelf, ToyBackend, device

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(name=source, …)``: a package that offers these backends, each its own module with a ``create``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(**sources: str) -> None:
        info = tmp_path / "some_plugins-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-plugins\nVersion: 1.0\n")
        lines = ["[gpurt.backends]"]
        for name, source in sources.items():
            module = f"plugin_module_{name}"
            monkeypatch.delitem(sys.modules, module, raising=False)
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
            lines.append(f"{name} = {module}:create")
        (info / "entry_points.txt").write_text("\n".join(lines))

    return install


def toy(name: str, extra: str = "") -> str:
    return f"""
from tests.factory.toy import ToyBackend, device
def create():
    return ToyBackend((device("{name}:0"),))
{extra}
"""


async def chosen() -> str:
    backend = await factory.create_backend()
    return (await backend.list_devices())[0].device_id


async def test_tried_after_the_listed_ones_and_before_cpu(shelf: Shelf, install: Install) -> None:
    install(npu=toy("npu"))
    assert await chosen() == "npu:0"
    assert [report.name for report in factory.last_reports()] == ["cuda", "rocm", "vulkan", "npu"]
    assert await factory.detect_available_backends() == ["npu", "cpu"]


async def test_also_without_cpu_fallback(shelf: Shelf, install: Install) -> None:
    install(npu=toy("npu"))
    backend = await factory.create_backend(fallback=False)
    assert (await backend.list_devices())[0].device_id == "npu:0"


async def test_not_imported_before_its_turn(shelf: Shelf, install: Install) -> None:
    install(npu="raise AssertionError('imported')")
    shelf.put("cuda")
    assert await chosen() == "cuda:0"
    await factory.create_backend("cpu")
    assert "plugin_module_npu" not in sys.modules


async def test_kill_switch(shelf: Shelf, install: Install) -> None:
    install(npu=toy("npu"))
    environ = {"GPURT_PLUGINS": "0"}
    assert await factory.create_backend(environ=environ) is shelf["cpu"]
    assert await factory.detect_available_backends(environ=environ) == ["cpu"]
    with pytest.raises(BackendUnavailable, match="no backend named 'npu'"):
        await factory.create_backend("npu", environ=environ)
    assert "plugin_module_npu" not in sys.modules
    # What this process registered itself stays, and so does everything afterwards.
    factory.register("mine", lambda: ToyBackend((device("mine:0"),)))
    backend = await factory.create_backend(environ=environ)
    assert (await backend.list_devices())[0].device_id == "mine:0"
    assert (await factory.create_backend("npu")).name == "toy"


def test_kill_switch_of_this_process_is_said(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(npu="raise AssertionError('imported')")
    monkeypatch.setenv("GPURT_PLUGINS", "0")
    with pytest.raises(BackendUnavailable, match="switched off by GPURT_PLUGINS"):
        plugins.load("npu")


async def test_built_in_wins_over_entry_point_unless_replaced(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(cpu=toy("stolen"))
    assert (await plugins.create("cpu")).name == "cpu"
    assert "cpu" in await asyncio.to_thread(plugins.known_names)
    assert "built-in cpu backend wins" in caplog.text
    factory.register("cpu", ToyBackend, replace=True)
    assert (await plugins.create("cpu")).name == "toy"
    plugins.unregister("cpu")
    assert (await plugins.create("cpu")).name == "cpu"


async def test_priority_orders_plugins(shelf: Shelf, install: Install) -> None:
    install(
        aaa=toy("aaa"),
        bbb=toy("bbb", "create.priority = 5"),
        broken="raise RuntimeError('broken plug-in')",
        zzz=toy("zzz", "create.priority = 10"),
    )
    assert await factory.detect_available_backends() == ["zzz", "bbb", "aaa", "cpu"]
    assert [report.name for report in factory.last_reports()][3:] == ["zzz", "bbb", "aaa", "broken", "cpu"]
    broken = next(report for report in factory.last_reports() if report.name == "broken")
    assert "broken plug-in" in broken.message


async def test_listed_plugin_keeps_its_place(shelf: Shelf, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(npu=toy("npu"))
    monkeypatch.setattr(factory, "current_platform", lambda **_: "linux")
    monkeypatch.setitem(factory.PLATFORM_BACKEND_PRIORITY, "linux", ("npu", "cuda", "cpu"))
    assert await chosen() == "npu:0"
    assert [report.name for report in factory.last_reports()] == ["npu"]


@pytest.mark.parametrize(
    ("source", "reason", "says"),
    [
        (toy("npu", f"create.api_version = {API_VERSION + 1}"), ReasonCode.WRONG_API, f"version {API_VERSION + 1}"),
        (toy("npu", "create.platforms = ('amiga',)"), ReasonCode.WRONG_PLATFORM, "works on amiga"),
        ("create = 5", ReasonCode.WRONG_API, "cannot be called"),
        ("def create(): return 'a backend'", ReasonCode.WRONG_API, "returned str"),
        ("import no_such_vendor_library", ReasonCode.NO_LIBRARY, "no_such_vendor_library"),
        ("pass", ReasonCode.ERROR, "create"),
        ("import sys; sys.exit('we only support Windows')", ReasonCode.NO_LIBRARY, "we only support Windows"),
        ("1 / 0", ReasonCode.ERROR, "ZeroDivisionError"),
    ],
)
async def test_refused_with_its_reason(
    shelf: Shelf, install: Install, source: str, reason: ReasonCode, says: str
) -> None:
    install(npu=source)
    assert await factory.create_backend() is shelf["cpu"]
    report = factory.last_reports()[-2]
    assert (report.name, report.reason) == ("npu", reason)
    assert says in report.message
    with pytest.raises(BackendUnavailable) as caught:
        await factory.create_backend("npu")
    assert caught.value.reason is reason


async def test_right_api_version_and_platform(shelf: Shelf, install: Install) -> None:
    here = factory.current_platform()
    install(npu=toy("npu", f"create.api_version = {API_VERSION}\ncreate.platforms = ({here!r},)"))
    assert await chosen() == "npu:0"


async def test_install_hint(shelf: Shelf, install: Install) -> None:
    install(npu="def create(): import no_such_vendor_library\ncreate.install_hint = 'pip install the-npu'")
    with pytest.raises(BackendUnavailable, match="pip install the-npu") as caught:
        await factory.create_backend("npu")
    assert caught.value.reason is ReasonCode.NO_LIBRARY


async def test_a_driver_is_enough(shelf: Shelf, install: Install) -> None:
    install(npu="from gpurt.backends.cpu_backend import CPUDriver as create")
    backend = await factory.create_backend("npu")
    assert isinstance(backend, DriverBackend)
    await backend.shutdown()


async def test_code_is_loaded_off_the_event_loop() -> None:
    threads: list[str] = []

    def create() -> ToyBackend:
        threads.append(threading.current_thread().name)
        return ToyBackend()

    factory.register("my_gpu", create)
    await factory.create_backend("my_gpu")
    assert threads == ["gpurt:load:my_gpu"]


def test_every_built_in_name_is_an_entry_point_of_this_distribution() -> None:
    import tomllib

    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert pyproject["project"]["entry-points"]["gpurt.backends"] == dict(plugins.BUILTIN_BACKENDS)


@pytest.mark.parametrize("name", plugins.BUILTIN_BACKENDS)
async def test_every_built_in_backend_can_be_made(name: str) -> None:
    backend = await plugins.create(name)
    assert backend.name == name
    assert backend.devices == ()
