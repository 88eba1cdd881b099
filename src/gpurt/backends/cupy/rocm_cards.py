"""What the kernel's files show of AMD's GPUs, and which of them is which of HIP's devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpurt.sources.amd import AmdDevice, AmdInventory, read_amd
from gpurt.visibility import Candidate, resolve


class RocmCards:
    """The GPUs of a host.

    Args:
        root: where ``/sys`` and ``/dev`` are read from.
        environ: has the variables by which ROCm hides and orders devices.
    """

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root, self.environ = root, environ
        self.inventory = AmdInventory()
        self.counted: tuple[AmdDevice, ...] = ()
        """The GPUs that the variables leave, in the order in which HIP counts them."""
        self.hidden = 0
        """How many the variables hide."""
        self.found: dict[int, AmdDevice] = {}
        """What ``find`` has found since the last reading, by HIP's index."""

    def read(self) -> None:
        """Look at the files. Blocking, some milliseconds."""
        self.inventory = read_amd(self.root)
        shown = {str(card.rocm_index): card for card in self.inventory.devices if card.rocm_index is not None}
        candidates = [Candidate(name, "amd", card.uuid, card.pci_address) for name, card in shown.items()]
        seen = resolve(self.environ, candidates)
        self.counted = tuple(shown[name] for name in seen.order.get("rocm", ()))
        self.hidden = len(shown) - len(self.counted)
        self.found.clear()

    def find(self, index: int, address: str | None) -> AmdDevice | None:
        """The GPU, or the partition of one, that is HIP's device ``index`` at ``address``; None if nothing tells."""
        slot = _slot(address)
        there = [each for each in self.inventory.devices if slot is not None and _slot(each.pci_address) == slot]
        if len(there) > 1:
            # Partitions of a card share its address: only the count tells them apart.
            there = [each for each in self.counted[index : index + 1] if each in there]
        if not there:
            return None
        self.found[index] = there[0]
        return there[0]


def _slot(address: str | None) -> str | None:
    """Without the function, which HIP leaves out, and by which some kernels number partitions."""
    return None if address is None else address.rpartition(".")[0]
