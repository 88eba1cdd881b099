"""What changes under a running process: devices plugged in and out, drivers, device nodes, and a machine that slept.

Nothing here says what devices there are; it says that it is time to look again.
"""

from gpurt.hotchange.cause import Cause
from gpurt.hotchange.watcher import HotChangeWatcher

__all__ = ["Cause", "HotChangeWatcher"]
