"""Log records as JSON, one line each, for programs that collect logs: ``--log-format json``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

from gpurt.printable import shortened

MAX_TEXT: Final = 16_384
"""Characters of a message or a traceback: what collects logs has a limit, and cuts JSON in the middle."""
FIELDS: Final = ("node", "device", "event")
"""Taken from what the record's ``extra`` brings; null where it brings nothing."""


class JsonLines(logging.Formatter):
    """``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, ``node``, ``device``, ``event``, and ``exception``
    where there is one: its traceback in one text.

    Attributes:
        node: of records that name none: a worker speaks of itself.
    """

    node: str | None = None

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(_message(record), MAX_TEXT),
            **{field: _text(getattr(record, field, None)) for field in FIELDS},
        }
        document["node"] = document["node"] or self.node
        exception = record.exc_text or (self.formatException(record.exc_info) if record.exc_info else "")
        if record.stack_info:
            exception = "\n".join(filter(None, (exception, record.stack_info)))
        if exception:
            document["exception"] = shortened(exception, MAX_TEXT)
        # In ASCII: no terminal and no collector has to know any other letters, or half a surrogate pair.
        return json.dumps(document, ensure_ascii=True, allow_nan=False)


def add_log_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="what is logged to stderr: lines for people, or JSON lines, which also tell of every change "
        "(default: %(default)s)",
    )


def log_json_to_stderr(level: int) -> None:
    """Show records of ``level`` and above, and of INFO at least, unless whoever runs us has set up logging already."""
    if logging.root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=min(level, logging.INFO), handlers=[handler])
    # What Python itself warns of would be a line that is no JSON.
    logging.captureWarnings(True)


def announce(text: str, *values: object) -> None:
    """Say on stderr what a person or a program must know: where something is served. As a record where records are
    JSON lines, as a plain line otherwise, whatever level is logged."""
    if _formatters():
        logging.getLogger("gpurt.cli").info(text, *values)
    else:
        sys.stderr.write(text % values + "\n")
        sys.stderr.flush()


def speak_for(node: str) -> None:
    """From now on, JSON records that name no node are of ``node``."""
    for formatter in _formatters():
        formatter.node = node


def _formatters() -> list[JsonLines]:
    formatters = (handler.formatter for handler in logging.root.handlers)
    return [formatter for formatter in formatters if isinstance(formatter, JsonLines)]


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as exc:  # arguments that do not fit their text: better a raw record than none
        return f"{record.msg!s:.1000} (arguments do not fit: {type(exc).__name__})"


def _text(value: object) -> str | None:
    return None if value is None else shortened(str(value), MAX_TEXT)
