"""``gpurt cluster``: the certificates of a cluster, and what an operator alone may do to its nodes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpurt.cli import reset_term

FOLDER: Final = "gpurt-cluster"
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = commands.add_parser("init", help="make the authority of a cluster and the certificate of its hub")
    init.add_argument(
        "folder", nargs="?", default=FOLDER, metavar="DIR", help="new or empty; keep it safe (default: %(default)s)"
    )
    init.add_argument("--cluster", default="default", help="name of the cluster (default: %(default)s)")
    init.add_argument(
        "--host",
        action="append",
        metavar="HOST",
        help="name or address under which nodes reach the hub; may be repeated, and the first is used "
        "(default: the name and the addresses of this machine)",
    )
    init.add_argument("--port", type=_port, default=7447, help="of the hub (default: %(default)s)")
    _add_days(init)
    enrol = commands.add_parser("enrol", help="make the certificate of a node, or the next one before it ends")
    enrol.add_argument("name", metavar="NAME", help="of the node; with --role hub it is hub")
    enrol.add_argument(
        "--role",
        choices=("node", "master", "observer", "hub"),
        default="node",
        help="a node speaks for itself alone; a master also gives commands, an observer only reads, both through a "
        "hub that runs elsewhere (default: %(default)s)",
    )
    enrol.add_argument("--renew", action="store_true", help="also where the certificate that is there has long to go")
    _add_folder(enrol)
    _add_days(enrol)
    revoke = commands.add_parser("revoke", help="let a name say and hear nothing any more")
    revoke.add_argument("name", metavar="NAME")
    _add_folder(revoke)
    reset_term.add_arguments(
        commands.add_parser("reset-term", help="have nodes follow masters of earlier terms again, after a wrong one")
    )


def run(args: argparse.Namespace) -> int:
    if args.action == "reset-term":
        return reset_term.run(args)
    actions: dict[str, Callable[[argparse.Namespace], str]] = {"init": _init, "enrol": _enrol, "revoke": _revoke}
    sys.stdout.write(actions[args.action](args))
    return 0


def _init(args: argparse.Namespace) -> str:
    from gpurt.cluster.security.enrolment import init_cluster

    hosts: list[str] = args.host or _own_hosts()
    place = init_cluster(args.folder, cluster=args.cluster, hosts=[*hosts, *_LOCAL], port=args.port, days=args.days)
    folder = Path(args.folder)
    return (
        f"made the authority of cluster {place.cluster} in {folder}, and its hub's certificate for\n"
        f"  {', '.join(place.hosts)}\n"
        f"whoever has {folder / 'ca.key'} can be anybody in the cluster: keep it to yourself\n"
        "next:\n"
        f"  {_command('gpurt', 'cluster', 'enrol', 'NAME', *_dir(folder))}   for each node\n"
        f"  {_command('gpurt', 'master', '--tls', folder / 'hub')}   where {place.hosts[0]} is; "
        "elsewhere with a copy of that folder\n"
    )


def _enrol(args: argparse.Namespace) -> str:
    from gpurt.cluster.security.authority import Role
    from gpurt.cluster.security.enrolment import enrol
    from gpurt.cluster.security.identity import load_identity

    folder, role = Path(args.folder), Role(args.role)
    own = enrol(folder, args.name, role=role, days=args.days, renew=args.renew)
    made = load_identity(own)
    text = f"{role} {made.name} of cluster {made.cluster}: {own}, valid until {made.not_after:%Y-%m-%d}\nnext:\n"
    if role is Role.HUB:
        return text + f"  {_command('gpurt', 'master', '--tls', own)}   when the master is started again\n"
    text += (
        f"  nothing where the hub uses {folder / 'hub'}: it reads who may connect again within a second; where it uses "
        f"a copy of that folder, copy {folder / 'hub' / 'roster.json'} there\n"
        f"  copy {own} to the machine, readable for its user alone\n"
    )
    if role is Role.NODE:
        text += f"  {_command('gpurt', 'worker', '--tls', own.name)}   there\n"
    return text


def _revoke(args: argparse.Namespace) -> str:
    from gpurt.cluster.security.enrolment import revoke

    revoke(args.folder, args.name)
    return (
        f"{args.name} is off the roster, and the name is not given again\nnext:\n"
        f"  nothing where the hub uses {Path(args.folder) / 'hub'}: it shuts the name out within a second; where it "
        f"uses a copy of that folder, copy {Path(args.folder) / 'hub' / 'roster.json'} there, or it lets the name in\n"
    )


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", dest="folder", metavar="DIR", default=FOLDER, help="what init made (default: %(default)s)"
    )


def _add_days(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--days", type=_days, default=365, help="validity of the certificate in days (default: %(default)s)"
    )


def _dir(folder: Path) -> tuple[str | Path, ...]:
    return () if str(folder) == FOLDER else ("--dir", folder)


def _command(*words: str | Path) -> str:
    return shlex.join(map(str, words))


def _own_hosts() -> list[str]:
    """This machine's name and its addresses that others can use."""
    import ipaddress
    import platform
    import socket

    import psutil

    addresses: list[str] = []
    for interface in psutil.net_if_addrs().values():
        for each in interface:
            if each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address:
                address = ipaddress.ip_address(each.address)
                if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                    addresses.append(each.address)
    return [platform.node() or "localhost", *addresses]


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _days(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 3650:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days, 3650 at most")
    return value
