"""A kit whose fixtures nothing runs says so once, and not as often as it has tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
from gpurt.testing import BackendConformance
from tests.support.backends import reference

class TestMine(BackendConformance):
    @pytest.fixture
    async def backend(self):
        async with reference() as backend:
            yield backend
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("options", "remedy"),
    [([], "decorate it with @pytest_asyncio.fixture"), (["-p", "no:asyncio"], "pip install pytest-asyncio")],
)
def test_a_fixture_that_nothing_runs_is_told_once(tmp_path: Path, options: list[str], remedy: str) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    root = str(Path(__file__).parents[2])
    arguments = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", "-rN", "test_mine.py", *options]
    start = f"import sys; sys.path.append({root!r}); import pytest; sys.exit(pytest.main({arguments!r}))"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert "1 error" in ended.stdout
    assert ended.stdout.count(remedy) == 1
