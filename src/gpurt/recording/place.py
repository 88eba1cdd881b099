"""Which system people type commands into, as far as its files tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpurt.errors import ReasonCode
from gpurt.sources.sysfs import read

_SIGNS: Final = (
    (".dockerenv", "docker"),
    ("run/.containerenv", "podman"),
    ("var/run/secrets/kubernetes.io", "kubernetes"),
    ("dev/dxg", "wsl"),
)

_DRIVER_COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    # By backend and ID of os-release(5).
    "cuda": {
        "ubuntu": "sudo ubuntu-drivers install",
        "debian": "sudo apt install nvidia-driver  # of the component non-free",
        "fedora": "sudo dnf install akmod-nvidia  # of RPM Fusion",
        "arch": "sudo pacman -S nvidia",
    },
    "vulkan": {
        "ubuntu": "sudo apt install mesa-vulkan-drivers",
        "debian": "sudo apt install mesa-vulkan-drivers",
        "fedora": "sudo dnf install mesa-vulkan-drivers",
    },
}


@dataclass(frozen=True, slots=True)
class Place:
    """``distribution`` is the ID of os-release(5), ``container`` the sort of container; None: not told."""

    distribution: str | None = None
    container: str | None = None

    def command(self, reason: ReasonCode, backend: str) -> str | None:
        """The command that does it here, where there is one beyond the general remedy."""
        if self.container is not None:
            return None  # drivers are the host's
        if reason is ReasonCode.NO_DRIVER:
            return _DRIVER_COMMANDS.get(backend, {}).get(self.distribution or "")
        if reason is ReasonCode.DRIVER_MISMATCH and self.distribution is not None:
            return "sudo reboot"
        return None


def place_of(root: Path = Path("/")) -> Place:
    """The system whose files are below ``root``. Reads a few small files."""
    return Place(os_release(root).get("id"), container_of(root))


def os_release(root: Path) -> dict[str, str]:
    """``id``, ``version_id`` and ``pretty_name``, where they are told."""
    text = read(root / "etc/os-release")[0] or ""
    pairs = (line.partition("=") for line in text.splitlines())
    wanted = ("ID", "VERSION_ID", "PRETTY_NAME")
    return {key.lower(): value.strip("\"'") for key, equals, value in pairs if equals and key in wanted}


def container_of(root: Path) -> str | None:
    """Which sort of container this is in, as far as its files say; None: none says so."""
    return next((name for sign, name in _SIGNS if (root / sign).exists()), None)
