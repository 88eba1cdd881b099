"""What is logged, on stderr."""

from __future__ import annotations

import logging
import sys

from gpurt.cluster.connection import CONNECTION_LOG
from gpurt.printable import MAX_LINE, printable


class _OneLine(logging.Formatter):
    """A line for each record, and one for each of its traceback: messages have values of variables and names of
    devices in them, which must neither drive the terminal nor fill it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        # That a hub is waited for is an answer to who has started us, not a record with a level.
        text = record.message if record.name == CONNECTION_LOG else super().formatMessage(record)
        return printable(text, MAX_LINE)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # pyright: ignore[reportArgumentType]  (whatever logging has)
        return "\n".join(printable(line, MAX_LINE) for line in text.splitlines())


def log_to_stderr(level: int) -> None:
    """Show records of ``level`` and above, and what happens to the connection as plain lines, unless whoever runs us
    has set up logging already."""
    if logging.root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger(CONNECTION_LOG).setLevel(min(level, logging.INFO))
