"""``import gpurt``: all names are there, and nothing is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpurt

VENDOR_LIBRARIES = ("cupy", "cupy_backends", "mlx", "onnxruntime", "torch", "pynvml", "zenoh", "numpy", "vulkan")


def fresh(code: str, *options: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    loaded = fresh("import gpurt, sys; print(*sys.modules)").split()
    assert "gpurt" in loaded
    assert not {"pydantic", "anyio", "asyncio", "aiofiles", "rich", "psutil", *VENDOR_LIBRARIES} & set(loaded)


@pytest.mark.parametrize("use", ["gpurt.GPUBackend", "gpurt.create_backend", "gpurt.DriverBackend", "gpurt.GPUDevice"])
def test_using_a_name_loads_no_vendor_library(use: str) -> None:
    loaded = set(fresh(f"import gpurt, sys; {use}; print(*sys.modules)").split())
    assert not loaded & set(VENDOR_LIBRARIES)


@pytest.mark.parametrize("name", gpurt.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(gpurt, name) is not None
    assert name in dir(gpurt)


def test_public_names_are_those_of_their_modules() -> None:
    from gpurt import errors, factory, types

    for module in (errors, types):
        public = {
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
        }
        assert public - {"MappingModel"} <= set(gpurt.__all__)
    assert gpurt.GPUBackendFactory is factory.GPUBackendFactory
    assert gpurt.create_backend == factory.GPUBackendFactory.create_backend


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        gpurt.nope  # noqa: B018


def test_version_is_the_distributions() -> None:
    from importlib import metadata

    assert gpurt.__version__ == metadata.version("gpurt")


def test_works_from_a_source_tree_without_installation(tmp_path: Path) -> None:
    """No metadata at all: the built-in backends and the version must not need it."""
    code = (
        "from importlib import metadata\n"
        "def missing(*a, **k): raise metadata.PackageNotFoundError('gpurt')\n"
        "metadata.version = missing\n"
        "metadata.entry_points = lambda **k: metadata.EntryPoints(())\n"
        "import asyncio, gpurt\n"
        "async def main():\n"
        "    backend = await gpurt.create_backend('cpu')\n"
        "    print(gpurt.__version__, backend.name)\n"
        "    await backend.shutdown()\n"
        "asyncio.run(main())\n"
    )
    assert fresh(code) == "0+source cpu"
