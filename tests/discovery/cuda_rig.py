"""A CuPy that is a package on disk, so that real probe processes find it: host memory behind two H100.

It goes with scenario ``ok2`` of the NVML stub, whose cards it has. Every process that loads it, and every device that
is opened through it, leaves a line in a log.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.nvml_stub import PCI_A, PCI_B

VERSION = "13.6.0"

RUNTIME = '''
import ctypes, os

is_hip = False
CARDS = {cards!r}
TOTAL = 84 << 30

def log(what):
    with open({log!r}, "a") as file:
        file.write(what + "\\n")

log("loaded")

class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(f"cudaError{{status}}")

def visible():
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [0, 1] if value is None else [int(n) for n in value.split(",") if n in ("0", "1")]

def behave():
    """What goes wrong, by a file, so that it can be changed between two probes."""
    try:
        return open({behaviour!r}).read()
    except FileNotFoundError:
        return ""

def getDeviceCount():
    log("opened")
    if behave() == "crash":
        os.kill(os.getpid(), 9)
    if behave() == "hang":
        log("hanging")
        import time; time.sleep(1000)
    return len(visible())

def getDeviceProperties(index):
    return dict(name=b"NVIDIA H100 80GB HBM3", totalGlobalMem=TOTAL, multiProcessorCount=132, major=9, minor=0,
                maxThreadsPerBlock=1024, clockRate=1980000, memoryClockRate=2619000, memoryBusWidth=5120, integrated=0)

def deviceGetPCIBusId(index): return CARDS[visible()[index]]
def deviceGetAttribute(attribute, index): raise CUDARuntimeError(1)
def driverGetVersion(): return 12080
def setDevice(index): pass
def deviceSynchronize(): pass
def memGetInfo(): return TOTAL, TOTAL
def streamCreateWithFlags(flags): return 1
def streamSynchronize(stream): pass
def streamDestroy(stream): pass

_live = {{}}

def malloc(size):
    buffer = ctypes.create_string_buffer(size)
    _live[ctypes.addressof(buffer)] = buffer
    return ctypes.addressof(buffer)

def free(address): del _live[address]

def memcpyAsync(target, source, size, kind, stream):
    ctypes.memmove(target, source, size)
    if kind == 2 and behave() == "corrupt":
        ctypes.memset(target, 0, 16)
    if kind == 2:
        log("verified")
'''


class FakeCuPy:
    """The package under ``folder / "site"``, and what it was used for."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.log = folder / "cupy.log"
        self.behaviour = folder / "behaviour"
        package = self.site / "cupy_backends" / "cuda" / "api"
        package.mkdir(parents=True)
        for directory in (self.site / "cupy_backends", package.parent, package):
            (directory / "__init__.py").touch()
        text = RUNTIME.format(cards=[PCI_A, PCI_B], log=str(self.log), behaviour=str(self.behaviour))
        (package / "runtime.py").write_text(text)
        self.metadata = self.site / f"cupy_cuda12x-{VERSION}.dist-info"
        self.metadata.mkdir()

    def upgrade(self) -> None:
        """As pip does it, to a version whose files happen to be the same."""
        self.metadata = self.metadata.rename(self.site / "cupy_cuda12x-13.7.0.dist-info")

    def behave(self, how: str) -> None:
        """From now on: ``crash``, ``hang``, ``corrupt`` what is read back, or work (``""``)."""
        self.behaviour.write_text(how)

    def count(self, what: str) -> int:
        """How often it was ``loaded`` (by a process), ``opened``, or a device ``verified``."""
        return self.log.read_text().split().count(what) if self.log.exists() else 0
