"""README's own words, run: every Python block in order, and the facts that its tables state."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

import gpurt.factory  # noqa: F401  (or the first block's import would block the loop, as any import does)
from gpurt.plugins import BUILTIN_BACKENDS
from tests.support.conformance_results import ABOUT, RESULTS, readme_table, table

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


async def test_python_blocks_run_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPURT_BACKEND", "cpu")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert len(BLOCKS) >= 6
    # One coroutine, as the text says: later blocks use the names of earlier ones.
    source = "async def readme():\n" + textwrap.indent("\n".join(BLOCKS), "    ") + "\n    return locals()\n"
    namespace: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), namespace)
    names = await namespace["readme"]()  # type: ignore[operator]
    assert names["result"].backend_name == "cpu"
    out = capsys.readouterr().out
    assert "cpu:0" in out
    assert "1,152,921,504,606,846,976" in out


def test_both_commands_stand_in_the_ci_script_too() -> None:
    first, second = (line for line in README.splitlines() if line.startswith("python3 -m venv .venv"))
    assert first.endswith(".venv/bin/gpurt demo")
    assert second in (Path(__file__).parent.parent / ".ci" / "run").read_text(encoding="utf-8")


def test_environment_table_names_every_variable() -> None:
    source = Path(__file__).parent.parent / "src" / "gpurt"
    used = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r"[\"'](GPURT_[A-Z_]+)[\"']", path.read_text(encoding="utf-8"))
        if not name.startswith(("GPURT_PROBE_", "GPURT_TEST_"))
    }
    assert used
    assert {name for name in used if f"`{name}`" not in README} == set()


def test_table_of_backends_is_made_from_results() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert readme_table(README) == table(results), "python -m tests.support.conformance_results"
    assert set(ABOUT) == set(BUILTIN_BACKENDS)
    assert all(not row["failed"] for row in results)
