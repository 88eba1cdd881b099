"""docs/problems.md against the tests that it names. Reads files only; imports nothing of what it checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "problems.md"
LETTERS = {
    "D": range(1, 23),
    "M": range(23, 39),
    "I": range(39, 42),
    "L": range(42, 47),
    "E": range(47, 50),
    "P": range(50, 57),
    "C": range(57, 64),
}
IDS = [f"{letter}{number:02d}" for letter, numbers in LETTERS.items() for number in numbers]


def rows() -> dict[str, list[str]]:
    """The cells of each row by its number."""
    found: dict[str, list[str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"[A-Z]\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} is there twice"
            found[cells[0]] = cells
    return found


def nodes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names_in(path: Path) -> set[str]:
    """``test_x`` and ``TestY::test_x`` of a file."""

    def of(body: list[ast.stmt], prefix: str) -> set[str]:
        found: set[str] = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(prefix + node.name)
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                found |= of(node.body, f"{prefix}{node.name}::")
        return found

    return of(ast.parse(path.read_text(encoding="utf-8")).body, "")


def test_every_number_is_there_in_order() -> None:
    assert list(rows()) == IDS
    assert len(IDS) == 63


def test_every_row_is_whole() -> None:
    for number, cells in rows().items():
        assert len(cells) == 4, f"{number} has {len(cells)} cells"
        assert all(len(cell) > 20 for cell in cells[1:]), f"{number} has an empty cell"


@pytest.mark.parametrize("number", IDS)
def test_the_tests_of_a_row_exist_and_carry_its_number(number: str) -> None:
    named = nodes(rows()[number][3])
    assert named, f"{number} names no test"
    for node in named:
        file, _, name = node.partition("::")
        path = ROOT / file
        assert path.is_file(), f"{number}: there is no {file}"
        assert name in names_in(path), f"{number}: there is no {name} in {file}"
        assert f"_{number.lower()}_" in name, f"{number}: {name} does not carry the number"


def test_every_test_of_a_problem_is_in_the_table() -> None:
    named = {node for cells in rows().values() for node in nodes(cells[3])}
    for path in sorted(Path(__file__).parent.glob("test_[a-z].py")):
        for name in names_in(path):
            assert f"{path.relative_to(ROOT).as_posix()}::{name}" in named, f"{name} is in no row"
