"""exo's own tests, and the adapter's contract, on a checkout of exo with the patches of ``docs/exo``.

``GPURT_EXO_PATH`` names the checkout, ``GPURT_EXO_PYTHON`` an interpreter that has exo's requirements and gpurt's
(``docs/exo.md`` says which); without the second it is the checkout's ``.venv/bin/python``. exo's bindings for its
network are not needed: names that stand for them are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "docs" / "exo"
CHECKOUT = os.environ.get("GPURT_EXO_PATH")
TESTS = ("src/exo/master/tests", "src/exo/shared/tests/test_apply")
LEAST = 68
"""exo's tests of placement and of applying events, at the commit that the patches are made for."""
BINDINGS = """
class FromSwarm:
    class Connection: ...
    class Message: ...
class NetworkingHandle: ...
class Pidfile: ...
class PidfileError(Exception): ...
"""

pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="GPURT_EXO_PATH names no checkout of exo")


class Patched:
    """A copy of what the tests need of the checkout, with some patches."""

    def __init__(self, place: Path, *patches: str) -> None:
        assert CHECKOUT is not None
        self.checkout = Path(CHECKOUT)
        self.root = place / "exo"
        for name in ("src", "resources"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(self.checkout / name, self.root / name, ignore=ignored)
        shutil.copy(self.checkout / "pyproject.toml", self.root)
        self.stubs = place / "stubs"
        (self.stubs / "exo_rs").mkdir(parents=True)
        (self.stubs / "exo_rs" / "__init__.py").write_text(BINDINGS)
        info = self.stubs / "exo-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exo\nVersion: 0\n")
        (place / "home" / "dashboard").mkdir(parents=True)
        self.home = place / "home"
        for patch in patches:
            command = ["git", "apply", "-p1", str(PATCHES / f"{patch}.patch")]
            # A folder above may be a repository, in which git would look for the files.
            environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(place)}
            subprocess.run(command, cwd=self.root, check=True, env=environ)

    def python(self) -> str:
        chosen = os.environ.get("GPURT_EXO_PYTHON") or str(self.checkout / ".venv" / "bin" / "python")
        if shutil.which(chosen) is None:
            pytest.fail(f"no interpreter for exo at {chosen}: GPURT_EXO_PYTHON names one", pytrace=False)
        return chosen

    def pytest(self, *args: str) -> int:
        """How many tests passed; none may fail."""
        path = os.pathsep.join(map(str, (self.root / "src", self.stubs, ROOT / "src")))
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "EXO_DASHBOARD_DIR": "dashboard",
            "XDG_STATE_HOME": str(self.home / "state"),
            "PYTHONPATH": path,
        }
        command = [self.python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
        done = subprocess.run(command, cwd=self.root, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
        passed = re.search(r"(\d+) passed", done.stdout)
        return int(passed[1]) if passed else 0


@pytest.mark.parametrize("patches", [("memory",), ("devices",), ("placement",), ("devices", "placement")], ids="+".join)
def test_exos_own_tests_pass_with_the_patches(tmp_path: Path, patches: tuple[str, ...]) -> None:
    assert Patched(tmp_path, *patches).pytest(*TESTS) >= LEAST


@pytest.mark.parametrize(
    ("patch", "contract", "tests"), [("devices", "exo_contract.py", 8), ("memory", "exo_contract_memory.py", 2)]
)
def test_the_contract_with_exos_types(tmp_path: Path, patch: str, contract: str, tests: int) -> None:
    exo = Patched(tmp_path, patch)
    shutil.copy(Path(__file__).with_name(contract), exo.root / f"test_{contract}")
    assert exo.pytest("-o", "asyncio_mode=strict", f"test_{contract}") == tests
