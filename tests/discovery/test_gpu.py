"""On a machine with NVIDIA GPUs: discovery against CUDA, PyTorch and nvidia-smi themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.sight import sight
from gpurt.visibility.candidates import candidate_of
from gpurt.visibility.resolver import resolve

pytestmark = pytest.mark.gpu

CUDA = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
count, uuids = ctypes.c_int(), []
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for index in range(count.value):
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetUuid_v2(uuid, device)
        uuids.append(bytes(uuid).hex())
print(json.dumps(uuids))
"""

TORCH = """
import json, os, sys
try:
    import torch
except ImportError:
    print("null")
    raise SystemExit
counts = []
for form in json.loads(sys.argv[1]):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if form is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = form
    counts.append(torch.cuda.device_count())
print(json.dumps(counts))
"""

GARBAGE = " and what follows"
"""After a whole UUID: CUDA does not look so far."""


def is_read_otherwise_by_torch(form: str | None, count: int) -> bool:
    """Forms that PyTorch's own parser reads in another way than CUDA, which has the last word: a bare prefix, what
    follows a whole UUID, and what comes twice behind the first entry that is no device."""
    return form == "GPU-" or (form or "").endswith(GARBAGE) or (form == "0,1,1" and count < 2)


HOST = """
import asyncio, json, sys
from gpurt import GPUDiscoveryService

async def main():
    async with GPUDiscoveryService(registry_path=sys.argv[1]) as service:
        result = await service.discover_all_devices()
    usable = [device.usable for device in result.devices if device.backend == "cuda"]
    print(json.dumps({"usable": usable, "libcuda": "libcuda.so" in open("/proc/self/maps").read()}))

asyncio.run(main())
"""


def environment(form: str | None) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.endswith("VISIBLE_DEVICES")}
    return environ if form is None else environ | {"CUDA_VISIBLE_DEVICES": form}


def cuda_says(form: str | None) -> list[str]:
    """UUIDs in CUDA's order, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", CUDA], env=environment(form), capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(run.stdout)


def bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-").replace("-", "").lower()


@pytest.fixture(scope="module")
def uuids() -> list[str]:
    line = sight("cuda", environ=environment(None))
    assert line is not None
    assert line.devices, line.message
    return [device.identity.uuid for device in line.devices if device.identity and device.identity.uuid]


def forms(uuids: list[str]) -> list[str | None]:
    a, b = uuids[0], uuids[-1]
    return [
        *(None, "", "-1", "0", "1", "0,1", "1,0", "0,0", "0,1,1", "0,-1,1", "1gpu2,2ampere", " 0, 1", "+1", "0-1"),
        *("0x1", "none", "void", "all", "NoDevFiles", "0,,1", ",0", "0,8,1", "8", "0,1,8"),
        *(a, b, f"{b},{a}", a[:8], f"{b[:9]},{a[:9]}", f"{a},{a}", f"{a}, {b}", f" {a}", f"{a},0", f"0,{b}"),
        *(a.lower(), a.removeprefix("GPU-"), f"{a}{GARBAGE}", "GPU-", "MIG-00000000-0000-0000-0000-000000000000"),
    ]


def test_every_form_of_the_variable_gives_the_set_and_order_of_cuda(uuids: list[str]) -> None:
    line = sight("cuda", environ=environment(None))
    assert line is not None
    candidates = [candidate_of(device) for device in line.devices]
    uuid_of = {device.device_id: bare(device.identity and device.identity.uuid) for device in line.devices}
    asked = forms(uuids)
    with ThreadPoolExecutor(8) as pool:
        truth = dict(zip(asked, pool.map(cuda_says, asked), strict=True))
    run = subprocess.run(
        [sys.executable, "-c", TORCH, json.dumps(asked)],
        env=environment(None),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    torch_counts = json.loads(run.stdout)
    wrong: list[str] = []
    for number, form in enumerate(asked):
        seen = resolve(environment(form), candidates)
        ours = [uuid_of[device] for device in seen.order.get("cuda", seen.visible)]
        if ours != truth[form]:
            wrong.append(f"{form!r}: CUDA {truth[form]}, gpurt {ours}")
        alike = torch_counts is not None and not is_read_otherwise_by_torch(form, len(candidates))
        told = torch_counts[number] if alike else len(truth[form])
        if told != len(truth[form]):
            wrong.append(f"{form!r}: CUDA {len(truth[form])}, PyTorch {told}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("form", [None, "1,0", "0", "", "uuid"])
async def test_discovery_shows_what_cuda_shows(uuids: list[str], form: str | None, tmp_path: Path) -> None:
    form = uuids[-1] if form == "uuid" else form
    service = GPUDiscoveryService(registry_path=tmp_path / "r.json", backends=["cuda"], environ=environment(form))
    async with service:
        result = await service.discover_all_devices()
    usable = sorted((d for d in result.devices if d.usable), key=lambda d: int(d.device_id.partition(":")[2]))
    assert [bare(d.identity and d.identity.uuid) for d in usable] == cuda_says(form)
    hidden = [d for d in result.devices if not d.usable]
    assert len(usable) + len(hidden) == len(uuids)
    assert all("hidden_by_environment" in (d.state_reason or "") for d in hidden)


def test_the_host_process_gets_no_context_and_a_verified_device_needs_none(tmp_path: Path) -> None:
    registry = tmp_path / "registry.json"
    first = subprocess.run(
        [sys.executable, "-c", HOST, str(registry)], capture_output=True, text=True, timeout=60, check=True
    )
    host = json.loads(first.stdout)
    assert any(host["usable"])
    assert not host["libcuda"]
    # Every library that any process of the second discovery loads, by the loader's own word.
    log = tmp_path / "loaded"
    run = subprocess.run(
        [sys.executable, "-m", "gpurt.discover", "--json", "--registry", str(registry), "--backend", "cuda"],
        env=os.environ | {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(log)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    document = json.loads(run.stdout)
    assert [d["usable"] for d in document["devices"] if d["backend"] == "cuda"] == host["usable"]
    loaded = "".join(each.read_text(errors="replace") for each in tmp_path.glob("loaded.*"))
    assert "libnvidia-ml.so" in loaded
    # NVML loads the driver's library for itself, and does not initialise it; nobody else does, nor the runtime.
    wanted = [line for line in loaded.splitlines() if "file=libcuda" in line and "dynamically loaded by" in line]
    assert all("libnvidia-ml.so" in line.partition("loaded by")[2] for line in wanted), wanted
    assert "libcudart" not in loaded
