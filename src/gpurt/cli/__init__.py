"""The ``gpurt`` command: one module a subcommand, imported when that subcommand is chosen."""
