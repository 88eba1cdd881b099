"""Every mutant is killed: by the conformance kit over the reference driver, or by the tests that it names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpurt
from tests.mutants.mutants import KIT, MUTANTS, Mutant

SOURCE = Path(gpurt.__file__).parent
ROOT = Path(__file__).parents[2]


def _run(package_parent: Path, where: str, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """``tests``, as far as ``where`` selects them, over the gpurt in ``package_parent``."""
    code = (
        "import sys, pathlib, gpurt, pytest\n"
        f"assert pathlib.Path(gpurt.__file__).is_relative_to({str(package_parent)!r}), gpurt.__file__\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    selection = f"TestReference and not OneThread and not great and not soak and ({where})" if tests == KIT else where
    arguments = [*tests, "-q", "-x", "-n", "0", "--tb=line", "-p", "no:cacheprovider"]
    arguments += ["-m", "not gpu"]  # the everyday suite leaves this driver out
    return subprocess.run(
        [sys.executable, "-c", code, *arguments, "-k", selection],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package_parent), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _copy(folder: Path) -> Path:
    shutil.copytree(SOURCE, folder / "gpurt", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_still_applies(mutant: Mutant) -> None:
    """A mutant whose text is gone would prove nothing."""
    text = (SOURCE / mutant.file).read_text()
    assert text.count(mutant.old) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("tests", sorted({mutant.tests for mutant in MUTANTS}), ids=" ".join)
def test_unchanged_copy_passes(tests: tuple[str, ...], tmp_path: Path) -> None:
    where = " or ".join(dict.fromkeys(f"({mutant.where})" for mutant in MUTANTS if mutant.tests == tests))
    result = _run(_copy(tmp_path), where, tests)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    parent = _copy(tmp_path)
    path = parent / "gpurt" / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    try:
        result = _run(parent, mutant.where, mutant.tests)
    except subprocess.TimeoutExpired:
        return  # it hung: noticed
    # 1: tests failed. Anything else (nothing collected, a usage error) would be no proof.
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-1000:]
