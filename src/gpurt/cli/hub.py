"""``gpurt hub``: the hub of a cluster without a master in it, until Ctrl-C."""

from __future__ import annotations

import argparse

from gpurt.cli import protected
from gpurt.cli.json_logs import add_log_format, announce
from gpurt.cli.running import run_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cluster.worker import DEFAULT_ENDPOINT

    parser.add_argument("--cluster", help="name of the cluster (default: default, or the certificate's)")
    parser.add_argument(
        "--listen",
        metavar="ENDPOINT",
        help=f"where masters and workers connect (default: {DEFAULT_ENDPOINT}; with --tls every address of this "
        "machine, or loopback where the hub was made for that)",
    )
    protected.add_arguments(parser, "FOLDER, which is the folder hub that gpurt cluster init made")
    add_log_format(parser)


def run(args: argparse.Namespace) -> int:
    from gpurt.cluster.hub import HubConfig, run_hub
    from gpurt.cluster.worker import DEFAULT_ENDPOINT
    from gpurt.cluster.zenoh_settings import calm_runtime

    identity = protected.identity_of(args)
    config = HubConfig(
        cluster=protected.chosen(args.cluster, identity and identity.cluster, "default"),
        endpoint=protected.chosen(args.listen, identity and identity.listen_endpoint, DEFAULT_ENDPOINT),
        tls=args.tls,
        insecure=args.insecure,
    )

    def ready() -> None:
        announce("hub of cluster %s: listening at %s; Ctrl-C ends it", config.cluster, config.endpoint)

    calm_runtime()
    run_command(run_hub(config, on_ready=ready))
    return 0
