"""What to do about a backend that cannot be used: the factory says it, as discovery does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurt import factory
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import BackendUnavailable
from gpurt.factory import create_backend, last_reports


async def test_every_refusal_has_a_remedy() -> None:
    async with await create_backend():
        pass
    refused = [report for report in last_reports() if report.status != "ok"]
    assert {"rocm", "vulkan"} <= {report.name for report in refused}
    assert all(report.hint for report in refused)


@pytest.mark.parametrize("name", ["rocm", "vulkan", "metal", "directml", "tflite"])
async def test_the_same_remedy_as_discovery(name: str, tmp_path: Path) -> None:
    try:
        backend = await create_backend(name)
    except BackendUnavailable as exc:
        refused = exc
    else:
        await backend.shutdown()
        pytest.skip(f"{name} can be used here")
    async with GPUDiscoveryService(tmp_path / "r.json", backends=[name, "cpu"]) as service:
        report = (await service.discover_all_devices()).reports[0]
    assert refused.hint
    assert (refused.reason, refused.hint) == (report.reason, report.hint)


async def test_simulated_devices_are_not_chosen_by_name() -> None:
    with pytest.raises(BackendUnavailable, match=r"gpurt\.testing\.create_simulated"):
        await create_backend("simulated")


@pytest.mark.parametrize("name", [3, b"cuda", ["cuda"], object])
async def test_a_name_is_a_text(name: Any) -> None:
    with pytest.raises(TypeError, match="'cuda'"):
        await create_backend(name)
    with pytest.raises(TypeError, match="'cuda'"):
        await create_backend(candidates=["cpu", name])
    with pytest.raises(TypeError, match="'cuda'"):
        factory.set_backend_override(name)
    with pytest.raises(TypeError, match="'cuda'"):
        factory.register(name, lambda: None)  # type: ignore[arg-type, return-value]


async def test_candidates_are_a_sequence_and_a_deadline_a_number() -> None:
    with pytest.raises(TypeError, match=r"\['cuda'\]"):
        await create_backend(candidates="cuda")
    with pytest.raises(ValueError, match="deadline"):
        await create_backend("cpu", deadline=float("nan"))
