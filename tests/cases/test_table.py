"""The table of cases: each has a test whose name carries it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "cases.md"
GROUPS = {
    "CVD": 13, "NVI": 12, "NVF": 13, "AMD": 8, "INT": 2, "VK": 5, "DML": 5, "APL": 3, "MOB": 2, "CPU": 4, "HNG": 5,
    "TEL": 3, "REG": 5, "EVT": 3, "ID": 1, "CLK": 1, "MEM": 3,
}  # fmt: skip


def rows() -> dict[str, tuple[str, str, list[str]]]:
    """Case id to what it is about, its source and its tests."""
    found: dict[str, tuple[str, str, list[str]]] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.fullmatch(r"[A-Z]+-\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} is there twice"
            assert len(cells) == 4, line
            found[cells[0]] = cells[1], cells[2], re.findall(r"`([^`]+::[^`]+)`", cells[3])
    return found


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def test_every_case_is_in_the_table() -> None:
    expected = [f"{group}-{number}" for group, count in GROUPS.items() for number in range(1, count + 1)]
    assert len(expected) == 88
    assert sorted(rows()) == sorted(expected)


def test_every_case_says_what_it_is_about_and_where_it_comes_from() -> None:
    for case, (about, source, _) in rows().items():
        assert len(about) > 20, case
        assert re.search(r"[\w.-]+#\d+", source) or source.startswith("none public"), case


def test_every_case_has_a_test_that_carries_its_name() -> None:
    for case, (_, _, tests) in rows().items():
        assert tests, case
        group, number = case.lower().split("-")
        for test in tests:
            file, *_, name = test.split("::")
            assert name in names_in(file), test
            assert re.search(rf"_{group}_?{number}(_|$)", name), test
