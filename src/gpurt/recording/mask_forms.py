"""How names and numbers that tell whose machine it is are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

UUID: Final = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Fa-f])")
UDID: Final = re.compile(r"(?<![0-9A-Za-z-])[0-9A-Fa-f]{8}-[0-9A-Fa-f]{16}(?![0-9A-Za-z-])")
"""Of an Apple computer: the number of the chip's type, and the chip's own."""
BARE: Final = re.compile(r"(?<![0-9A-Fa-f])(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{64})(?![0-9A-Fa-f])")
"""UUIDs without dashes, machine ids, and the ids of containers."""
UNIQUE_ID: Final = re.compile(r"(?:(?<=[Gg][Pp][Uu]-)|(?<=host:))[0-9A-Fa-f]{16}(?![0-9A-Fa-f-])")
"""AMD's cards, and the fingerprint of a host."""
HEX: Final = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{12,64}(?![0-9A-Fa-f])")
"""What may be any of them, or a hardware address, without what separates its parts."""
UUID_PREFIX: Final = re.compile(
    r"(?<![0-9A-Za-z])(?P<brand>(?i:(?:MIG-)?GPU-|MIG-))(?P<start>[0-9A-Fa-f][0-9A-Fa-f-]*)(?![0-9A-Za-z])"
)
OCTETS: Final = re.compile(
    r"(?<![\w:-])[0-9A-Fa-f]{2}(?P<by>[:-])[0-9A-Fa-f]{2}(?:(?P=by)[0-9A-Fa-f]{2}){4,18}(?![\w:-])"
)
"""Hardware addresses of 6, 8 and 20 bytes, and UUIDs in bytes."""
DOTTED_MAC: Final = re.compile(r"(?<![\w.])[0-9A-Fa-f]{4}\.[0-9A-Fa-f]{4}\.[0-9A-Fa-f]{4}(?![\w.])")
KFD_ID: Final = re.compile(r"\bunique_id[ \t:=]+([0-9]{4,20})\b")
SERIAL_LINE: Final = re.compile(
    r"^(?P<name>[ \t]*(?:[\w ]*[ _])?serial(?:[ _](?:number|no\.?))?[ \t]*[:=][ \t]*)"
    r"(?P<serial>[^\s:=]{4,64})[ \t\r]*$",
    re.IGNORECASE | re.MULTILINE,
)
"""Of boards, in ``/proc/cpuinfo`` and in what tools print."""
IPV4: Final = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w]|\.[0-9])")
DASHED_IPV4: Final = re.compile(r"(?<=[A-Za-z]-)[0-9]{1,3}(?:-[0-9]{1,3}){3}(?![0-9A-Za-z]|-[0-9])")
"""In names of hosts: ``ip-10-0-0-5``."""
IPV6: Final = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:.])")
LOGIN: Final = re.compile(r"[\w.-]+@[\w.-]+")
"""Whoever built a kernel module, as its version tells."""
MAIL: Final = re.compile(
    r"(?<![\w.+-])[\w.+-]+@(?:[A-Za-z0-9-]+\.)+(?!service|slice|scope|socket|mount)[A-Za-z]{2,}(?![\w-])"
)
NO_DOMAIN: Final = frozenset(
    {
        *("service", "slice", "scope", "socket", "mount", "device", "json", "log", "max", "high", "low"),
        *("min", "stat", "current", "cpus", "so", "py", "txt", "conf", "cfg", "md", "sh"),
    }
)
"""What comes after a dot in names of files and control groups."""

_PIECE: Final = r"[^/\s\"':;,\\<>|]+"
_HOME: Final = re.compile(
    # Letters in between, as /user/j/jim. Blanks belong to a name where a path goes on after it.
    r"/(?i:home[s0-9]*|users?)/+(?:(?P<letter>[a-z])/(?=(?P=letter)))?"
    rf"(?:(?P<long>{_PIECE}(?: {_PIECE}){{1,3}})(?=/)|(?P<name>{_PIECE}))"
)
_TILDE: Final = re.compile(r"(?<![\w/~])~(?P<name>[A-Za-z_][\w.-]*)(?=[/:\s\"']|$)")
_WINDOWS_HOME: Final = re.compile(
    r"\\+(?i:users)\\+(?:(?P<long>[^\\/:*?\"<>|\r\n]+)(?=\\)|(?P<name>[^\\/\s\"':;,*?<>|]+))"
)
_PATH: Final = re.compile(r"(?:(?<![\w./~:-])|(?<=[\w.]:)|(?<=file://))(?:/[^/\s\"':;,()\[\]<>=|]+){2,}")


def users_in(text: str) -> Iterator[str]:
    """Names of users, as paths of their homes tell them."""
    for pattern in (_HOME, _TILDE, _WINDOWS_HOME):
        for match in pattern.finditer(text):
            long = match.groupdict().get("long")
            if long is None:
                yield match["name"]
            else:
                yield long
                if "\\" not in match[0]:
                    yield long.split(" ", 1)[0]


def paths_in(text: str, *, variable: bool) -> Iterator[list[str]]:
    """The parts of absolute paths.

    Args:
        variable: the text is the value of an environment variable, whose paths may have blanks.
    """
    found = [piece for piece in re.split("[:;]", text) if piece.startswith("/")] if variable else []
    for path in (*found, *(match[0] for match in _PATH.finditer(text))):
        yield [part for part in path.split("/") if part]


# Paths

SYSTEM: Final = frozenset(
    {
        *("usr", "lib", "lib32", "lib64", "libx32", "opt", "etc", "bin", "sbin", "dev", "proc", "sys"),
        *("run", "var", "boot", "nix", "snap", "root", "System", "Library", "Applications", "private"),
        *("docker", "kubepods", "lxc", "kubepods.slice", "system.slice", "user.slice", "machine.slice"),
        *("init.scope",),
    }
)
"""Directories at the root whose parts have the same names everywhere."""
MOUNTS: Final = frozenset(
    {
        *("mnt", "media", "net", "nfs", "gpfs", "lustre", "afs", "data", "scratch", "srv", "export"),
        *("Volumes", "storage", "shared"),
    }
)
"""Directories at the root below which a user's own may be one step further down."""
HOMES: Final = re.compile(r"home[s0-9]*|users?", re.IGNORECASE)
TECHNICAL: Final = re.compile(
    r"\.?(?:lib(?:32|64)?|s?bin|share|include|src|v?env|venvs|(?:mini|ana)?conda\d?|mambaforge|miniforge\d?|python[\d.]*|"
    r"site-packages|dist-packages|cuda[\d.-]*|rocm[\d.-]*|nvidia|hip|targets|stubs|icd\.d|vulkan|opencl|nfs|data|"
    r"scratch|projects?|local|cache|user|home|.)",
    re.IGNORECASE,
)
"""Parts that tell what is there, and not whose it is."""
