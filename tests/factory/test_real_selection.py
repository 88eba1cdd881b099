"""Selection with the real drivers, on a host that has libraries and no GPU, taken for each platform in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurt import factory
from gpurt.factory import GPUBackendFactory, create_backend
from gpurt.platforms import PLATFORM_BACKEND_PRIORITY, Platform
from gpurt.sources.pci import AMD, INTEL, NVIDIA, has_pci_vendor
from gpurt.types import DeviceKind

ROOT = Path("/")
HAS_GPU = any(has_pci_vendor(ROOT, vendor, graphics=True) for vendor in (AMD, INTEL, NVIDIA))


@pytest.mark.skipif(HAS_GPU, reason="this host has a GPU")
@pytest.mark.parametrize("platform", list(PLATFORM_BACKEND_PRIORITY))
async def test_the_processor_is_chosen_and_every_other_says_why_not(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is installed: software devices alone never win over the processor."""
    monkeypatch.setattr(factory, "current_platform", lambda **_: platform)
    async with await create_backend() as backend:
        assert backend.name == "cpu"
        assert backend.devices[0].kind is DeviceKind.CPU
    reports = {report.name: report for report in GPUBackendFactory.last_reports()}
    tried = PLATFORM_BACKEND_PRIORITY[platform]
    assert set(tried) <= set(reports)
    for name in tried[:-1]:
        report = reports[name]
        assert (report.status, report.device_ids) == ("unavailable", ())
        assert report.reason
        assert report.message
        assert report.hint
