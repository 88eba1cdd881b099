"""Text that gpurt did not write itself, made fit to be printed: what drivers, files, peers and variables say.

A name may have escape sequences that drive a terminal, half of a surrogate pair that cannot be written as UTF-8, or a
megabyte of letters. JSON needs none of this: it escapes by itself, and is read by programs.
"""

from __future__ import annotations

from typing import Final

MAX_WORD: Final = 300
"""Characters of one name, id or value."""
MAX_LINE: Final = 2000
"""Characters of one line that has words of gpurt's around such values: sixteen devices with a reason each."""


def printable(text: str, limit: int = MAX_WORD) -> str:
    r"""``text`` in one line: what cannot be printed is shown as ``\x1b``, and the middle of a longer text is left out.

    Args:
        limit: characters of ``text`` that are shown.
    """
    text = shortened(text, limit)
    return text if text.isprintable() else "".join(c if c.isprintable() else _shown(c) for c in text)


def quoted(text: str, limit: int = MAX_WORD) -> str:
    """``text`` in quotation marks as Python writes it, without the middle of a longer one."""
    return repr(shortened(text, limit))


def shortened(text: str, limit: int = MAX_WORD) -> str:
    """``text`` without its middle where it is longer than ``limit`` characters, and how much that was."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]} ...({len(text) - limit} more characters)... {text[len(text) - tail :]}"


def _shown(character: str) -> str:
    code = ord(character)
    if character in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
