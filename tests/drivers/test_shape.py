"""What a driver file may be: short, blocking, and like no other."""

from __future__ import annotations

import io
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

BACKENDS = Path(__file__).parents[2] / "src/gpurt/backends"
FILES = sorted(BACKENDS.rglob("*.py"))
MOST_LINES = {"cpu_backend.py": 150, "rocm_backend.py": 80}
SHARED_LINES = 6
COMMON = ("#", "import ", "from ")


def name(path: Path) -> str:
    return str(path.relative_to(BACKENDS))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_is_short_and_blocking(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES.get(path.name, 300)
    words = {token.string for token in tokenize.generate_tokens(io.StringIO(text).readline)}
    assert not words & {"async", "await", "asyncio"}


def test_no_block_of_six_lines_stands_twice() -> None:
    """Imports and the shell of a contract's method (its signature over several lines) count as everybody's."""
    seen: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    contract = (BACKENDS.parent / "driver.py").read_text(encoding="utf-8").splitlines()
    everybodys = {line.strip() for line in contract}
    for path in FILES:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [
            line for line in lines if line and not line.startswith(("#", "import ", "from ")) and line not in everybodys
        ]
        for start in range(len(lines) - SHARED_LINES + 1):
            seen[tuple(lines[start : start + SHARED_LINES])].add(name(path))
    assert {block: files for block, files in seen.items() if len(files) > 1} == {}


def test_no_driver_imports_another() -> None:
    drivers = {path.stem for path in BACKENDS.glob("*_backend.py")}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert [driver for driver in drivers if f"backends.{driver} import" in text] == [], name(path)
