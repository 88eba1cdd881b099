"""The options of every command that joins a cluster: which certificate, or that none is wanted."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpurt.cluster.security.identity import Identity


def add_arguments(parser: argparse.ArgumentParser, folder: str) -> None:
    """
    Args:
        folder: whose, for the help text.
    """
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--tls",
        metavar="FOLDER",
        help=f"protect everything with the certificate in {folder}; it also says which cluster and where the hub is",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="use a plain address that other machines can reach: whoever reaches it controls the cluster",
    )


def identity_of(args: argparse.Namespace) -> Identity | None:
    """
    Raises:
        CredentialsRefused: what ``--tls`` names is missing, expired, or readable by others.
    """
    if args.tls is None:
        return None
    from gpurt.cluster.security.identity import load_identity

    return load_identity(args.tls)


def check_node(identity: Identity | None) -> None:
    """
    Raises:
        CredentialsRefused: the certificate is a hub's, a master's or an observer's, whose name may be none of a node.
    """
    if identity is None:
        return
    from gpurt.cluster.security.authority import Role
    from gpurt.cluster.security.errors import CredentialsRefused

    if identity.role is not Role.NODE:
        raise CredentialsRefused(
            f"the certificate in {identity.folder} is of {identity.role} {identity.name!r}, not of a node",
            hint="gpurt cluster enrol NAME makes one",
        )


def chosen(option: str | None, certified: str | None, default: str) -> str:
    """What was said on the command line, also if it is nothing; else what the certificate's folder says; else
    ``default``."""
    return next(value for value in (option, certified, default) if value is not None)
