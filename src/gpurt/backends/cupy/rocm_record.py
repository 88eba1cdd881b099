"""The record of one of HIP's devices, with identity and memory from the kernel's files."""

from __future__ import annotations

from pathlib import Path

from gpurt.backends.cupy.devices import CuPyDevices
from gpurt.backends.cupy.record import Answers, device_record
from gpurt.identity import device_identity
from gpurt.sources.amd import AmdDevice
from gpurt.sources.host import memory_budget
from gpurt.types import GPUDevice


def rocm_record(
    driver: CuPyDevices, index: int, answers: Answers, card: AmdDevice | None, hip_version: int, root: Path
) -> GPUDevice:
    """The record of HIP's device ``index``.

    Args:
        card: what the kernel shows of it; HIP's properties have no UUID, so without it the PCI address is its identity.
        hip_version: as HIP counts, 10,000,000 for each major and 100,000 for each minor version.
    """
    properties = answers.properties
    # The real instruction set first: HIP's is that of an override, and has features behind a colon.
    gfx = (card.gfx if card else None) or answers.text("gcnArchName").partition(":")[0] or None
    codename = card.codename if card else None
    name = answers.text("name") or (card.name if card else None) or f"AMD GPU {codename or gfx or ''}".strip()
    total, free = (
        properties.get("totalGlobalMem") or (card and card.memory.total_bytes),
        card and card.memory.free_bytes,
    )
    khz = properties.get("clockRate")
    unified = card is not None and card.unified_memory
    record = device_record(
        driver.name,
        index,
        answers,
        vendor="amd",
        name=name,
        identity=device_identity(
            uuid=card.uuid if card else None,
            pci_address=(card.pci_address if card else None) or answers.pci_address,
            partition=card.partition if card else None,
            serial=card.serial if card else None,
            fallback=f"rocm:{index}",
        ),
        memory=(total, free) if answers.failure else driver.memory_at_open(index, total, free),
        driver_version=(card.driver_version if card else None) or _hip(hip_version),
        architecture=gfx,
        compute_units=properties.get("multiProcessorCount") or (card.compute_units if card else None),
        clock_rate_mhz=khz // 1000 if khz else (card.max_clock_mhz if card else None),
        integrated=bool(properties.get("integrated")) or bool(card and card.integrated),
        unified=unified,
        # Neither matrix cores nor bandwidth: nothing tells how many transfers a clock of this memory makes.
        numa_node=card.numa_node if card else None,
        support_level="experimental",  # not yet run on AMD's hardware
        root=root,
    )
    if not unified or record.memory_usable_bytes is None:
        return record
    # What the driver would map is the host's memory, of which less may be left.
    host = memory_budget(root)
    if host.usable_bytes >= record.memory_usable_bytes:
        return record
    return record.model_copy(update={"memory_usable_bytes": host.usable_bytes, "memory_usable_source": host.source})


def _hip(version: int) -> str | None:
    return f"HIP {version // 10_000_000}.{version // 100_000 % 100}" if version else None
