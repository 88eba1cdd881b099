"""The process of a probe: how it is started, also before anything is imported, and how all of it is killed.

Imports next to nothing: half of the time of a quick answer is imports, in the child and in the parent. A command that
knows that it will ask an NVIDIA driver starts the child before its own (:func:`start_early`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
from collections.abc import Mapping
from typing import Final, NamedTuple

from gpurt.discovery.probe_child import ENV_PATH, ENV_TOKEN


class EarlyProbe(NamedTuple):
    """A child that looks already. Its descriptors belong to whoever takes it over; if nobody does, it ends with us."""

    name: str
    pid: int
    token: str
    environ: Mapping[str, str]
    """What it was started with, before its own additions."""
    stdin: int
    stdout: int
    stderr: int
    exit: int
    """A pidfd."""


_SOURCE: Final = __file__.rsplit(os.sep, 3)[0]
_PLAIN: Final = frozenset({"--json", "--explain", "--verify", "--registry", "--timeout"})
_NVIDIA: Final = ("/proc/driver/nvidia/version", "/dev/nvidiactl")


def probe_command(name: str) -> tuple[str, ...]:
    """The command line of a probe. ``-P``: nothing in the current directory may shadow a module."""
    return (sys.executable, "-P", "-m", "gpurt.discovery.probe_child", name)


def early_command(name: str) -> tuple[str, ...]:
    """As :func:`probe_command`, without ``site``: packages of a PyTorch environment take 40 ms at the start of every
    interpreter, and NVML needs none of them. As a file, because it is found before any path is set."""
    return (sys.executable, "-P", "-S", os.path.join(_SOURCE, "gpurt", "discovery", "probe_child.py"), name)


def new_token() -> str:
    return os.urandom(8).hex()


def child_environment(environ: Mapping[str, str], token: str) -> dict[str, str]:
    """The child's whole environment."""
    env = dict(environ)
    env[ENV_TOKEN] = token
    # pydantic would read the metadata of every installed package to look for plug-ins of its own.
    env.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    env[ENV_PATH] = json.dumps([entry for entry in sys.path if entry])
    # gpurt itself must be found before ENV_PATH can be read. An installed one is; a source tree may not be.
    if _SOURCE not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), _SOURCE)))
    return env


def start_early(options: list[str], environ: Mapping[str, str]) -> EarlyProbe | None:
    """Start the cuda probe of a plain discovery, where there is an NVIDIA driver to ask.

    None where there is none, with ``options`` that ask for something else, and where the system has no pidfd: then
    the probe is started in the ordinary way.
    """
    if sys.platform != "linux" or getattr(sys, "frozen", False) or not sys.executable:
        return None
    if not all(option.partition("=")[0] in _PLAIN for option in options if option.startswith("-")):
        return None
    if not any(map(os.path.exists, _NVIDIA)):
        return None
    token, command = new_token(), early_command("cuda")
    pipes = [os.pipe() for _ in range(3)]
    theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
    ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
    pid = None
    try:
        if min(*theirs, *ours) < 3:  # whoever started us has closed a standard stream
            return None
        pid = os.posix_spawn(
            command[0],
            command,
            child_environment(environ, token),
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(theirs)],
            setsid=True,
        )
        stdin, stdout, stderr = ours
        early = EarlyProbe("cuda", pid, token, dict(environ), stdin, stdout, stderr, os.pidfd_open(pid))
        ours = []
        return early
    except (OSError, NotImplementedError, AttributeError):  # no pidfd, no setsid: an old kernel or C library
        if pid is not None:
            kill_tree(pid)
            os.waitpid(pid, 0)
        return None
    finally:
        for fd in (*theirs, *ours):
            os.close(fd)


def kill_tree(pid: int) -> None:
    """Kill a probe and whatever it forked."""
    if sys.platform == "win32":
        import psutil

        try:
            processes = psutil.Process(pid).children(recursive=True)
            for process in (*processes, psutil.Process(pid)):
                process.kill()
        except psutil.Error:
            return  # gone already
    else:
        try:
            # The child leads its own session, so this reaches its descendants also after it has exited.
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return  # all gone; macOS says EPERM for a group of zombies


def is_alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
