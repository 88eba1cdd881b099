"""What is no argument of load_safetensors is told before a file is opened or a device is touched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import gpurt
from gpurt import weights
from gpurt.backend import GPUBackend
from gpurt.errors import GPUError, OutOfRange
from gpurt.testing import create_simulated
from gpurt.weights import WeightsError, load_safetensors
from tests.weights.support import tensor, write

CONTENT = {"a.w": tensor("U8", 10), "b.w": tensor("U8", 20)}


@pytest.fixture
async def backend() -> AsyncIterator[GPUBackend]:
    async with create_simulated("h100x2") as backend:
        yield backend


async def coroutine(*_: Any) -> Any: ...


@pytest.mark.parametrize("path", [None, 3, ["f"]])
async def test_paths(backend: GPUBackend, path: Any) -> None:
    with pytest.raises(OutOfRange, match="is not a path") as caught:
        await load_safetensors(path, backend, "simulated:0")
    assert caught.value.operation == "load_safetensors"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"placement": None}, "placement .*NoneType"),
        ({"placement": 3}, "placement .*int"),
        ({"placement": ["simulated:0"]}, "placement .*list"),
        ({"placement": {3: "simulated:0"}}, "placement .* 3"),
        ({"placement": coroutine}, "placement is an async"),
        ({"only": 3}, "only .*int"),
        ({"only": [3]}, "only .* 3"),
        ({"only": b"a"}, "only .*bytes"),
        ({"only": coroutine}, "only is an async"),
        ({"on_progress": 3}, "on_progress .*int"),
        ({"on_progress": coroutine}, "on_progress is an async"),
        ({"max_concurrent": "2"}, "max_concurrent .*str"),
        ({"max_concurrent": 1.5}, "max_concurrent .*float"),
        ({"max_concurrent": True}, "max_concurrent .*bool"),
        ({"backend": None}, "backend .*NoneType"),
    ],
)
async def test_arguments(backend: GPUBackend, tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"backend": backend, "placement": "simulated:0"}
    with pytest.raises(OutOfRange, match=says) as caught:
        await load_safetensors(tmp_path / "never opened", **(right | arguments))
    assert caught.value.operation == "load_safetensors"


async def test_a_device_record_is_no_device_id(backend: GPUBackend, tmp_path: Path) -> None:
    device: Any = backend.devices[0]
    with pytest.raises(OutOfRange, match="device_id"):
        await load_safetensors("f", backend, device)
    with pytest.raises(WeightsError, match="no device id"):
        await load_safetensors(write(tmp_path / "f", CONTENT), backend, {"": device})


async def test_numbers_of_numpy_and_paths_of_bytes(backend: GPUBackend, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path: Any = str(write(tmp_path / "f", CONTENT)).encode()
    async with await load_safetensors(path, backend, "simulated:0", max_concurrent=numpy.int64(2)) as loaded:
        assert set(loaded) == set(CONTENT)
        assert loaded.as_dict() == dict(loaded)


async def test_a_path_of_thousands_of_characters(backend: GPUBackend) -> None:
    with pytest.raises(GPUError) as caught:
        await load_safetensors("a" * 3000 + "b" * 3000, backend, "simulated:0")
    assert isinstance(caught.value, WeightsError)
    assert len(str(caught.value)) < 600
    assert "aaa" in str(caught.value)
    assert "bbb" in str(caught.value)
    assert len(caught.value.path or "") == 6000


def test_shards_from_peers_are_part_of_weights() -> None:
    for name in ("copy_shard_from_peer", "update_shard_from_peer"):
        assert name in weights.__all__
        assert getattr(weights, name) is getattr(gpurt, name)
