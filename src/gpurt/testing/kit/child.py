"""Scenarios that need a process of their own: ``python -m gpurt.testing.kit.child SCENARIO module:callable``.

``exit``: end while a driver call hangs. ``fork``: use the backend in a forked child. ``misuse``: calls that make most
libraries abort the process. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from gpurt.errors import GPUError
from gpurt.testing.kit.base import load_factory
from gpurt.testing.loops import until
from gpurt.types import Capabilities


async def hang_and_leave(spec: str) -> None:
    backend: Any = load_factory(spec)
    await backend.initialize()
    device_id = backend.devices[0].device_id
    entered = threading.Event()

    def sync(index: int) -> None:
        entered.set()
        threading.Event().wait()

    backend.driver.sync = sync
    call = asyncio.create_task(backend.synchronize(device_id))
    await until(entered.is_set, "the call reached the driver")
    call.cancel()
    await asyncio.wait({call})


async def fork_and_use(spec: str) -> dict[str, object]:
    backend = load_factory(spec)
    await backend.initialize()
    device_id = backend.devices[0].device_id
    handle = await backend.allocate(device_id, 64)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        heard: list[str] = []
        try:
            # The running coroutine came along, so the child can drive backend calls by hand, without a loop.
            for call in (
                backend.allocate(device_id, 64),
                backend.copy_from_device(handle),
                backend.deallocate(handle),
                backend.synchronize(device_id),
            ):
                try:
                    call.send(None)
                    heard.append("suspended: it would wait for a thread that the child does not have")
                except GPUError as exc:
                    heard.append(type(exc).__name__)
                except StopIteration:
                    heard.append("returned")
            os.write(write_end, json.dumps(heard).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    deadline = time.monotonic() + 10
    answers: object = "the child did not answer"
    os.set_blocking(read_end, False)
    while time.monotonic() < deadline:
        try:
            answers = json.loads(os.read(read_end, 4096))
            break
        except BlockingIOError:
            await asyncio.sleep(0.005)
    os.waitpid(pid, 0)  # noqa: ASYNC222 - it has answered and is about to end
    os.close(read_end)
    # The parent is unharmed.
    await backend.copy_to_device(b"p" * 64, handle)
    parent = await backend.copy_from_device(handle) == b"p" * 64
    await backend.deallocate(handle)
    await backend.shutdown()
    return {"child": answers, "parent": parent}


async def misuse(spec: str) -> dict[str, object]:
    """What each bad call raised, by name; ``round trip`` is whether the device works afterwards."""
    backend = load_factory(spec)
    await backend.initialize()
    device_id = backend.devices[0].device_id
    unit = getattr(getattr(backend, "driver", None), "capabilities", Capabilities()).alignment_bytes
    size = 64 * unit
    total = backend.devices[0].memory_bytes or (await backend.get_device_memory_info(device_id)).total_bytes
    live, freed = await backend.allocate(device_id, size), await backend.allocate(device_id, size)
    await backend.deallocate(freed)
    foreign = dataclasses.replace(live, handle_id=live.handle_id + 1000)
    stale = dataclasses.replace(live, generation=live.generation ^ 1)
    buffer = bytearray(size)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "allocate far too much": lambda: backend.allocate(device_id, 4 * total // unit * unit),
        "free twice": lambda: backend.deallocate(freed),
        "free a handle that never was": lambda: backend.deallocate(foreign),
        "write past the end": lambda: backend.copy_to_device(bytes(2 * size), live),
        "read past the end": lambda: backend.copy_from_device(live, 0, 2 * size),
        "read into past the end": lambda: backend.copy_into(live, bytearray(2 * size)),
        "read before the beginning": lambda: backend.copy_from_device(live, -unit, unit),
        "copy past the end": lambda: backend.copy_device_to_device(live, live, size, dst_offset_bytes=unit),
    }
    for name, handle in {"freed": freed, "foreign": foreign, "stale": stale}.items():
        calls |= {
            f"write to a {name} handle": lambda handle=handle: backend.copy_to_device(buffer, handle),
            f"read from a {name} handle": lambda handle=handle: backend.copy_from_device(handle),
            f"read into from a {name} handle": lambda handle=handle: backend.copy_into(handle, buffer),
            f"copy from a {name} handle": lambda handle=handle: backend.copy_device_to_device(handle, live, size),
            f"copy to a {name} handle": lambda handle=handle: backend.copy_device_to_device(live, handle, size),
        }
    heard: dict[str, object] = {}
    for name, call in calls.items():
        heard[name] = await _raised(call())
    content = bytes(range(64)) * unit
    await backend.copy_to_device(content, live)
    heard["round trip"] = await backend.copy_from_device(live) == content
    await backend.deallocate(live)
    await backend.shutdown()
    heard["use after shutdown"] = await _raised(backend.copy_from_device(live))
    return heard


async def _raised(call: Awaitable[object]) -> str:
    try:
        await call
    except GPUError as exc:
        return type(exc).__name__
    return "nothing"


def main(scenario: str, spec: str) -> None:
    if scenario == "exit":
        asyncio.run(hang_and_leave(spec))
        # Just before the interpreter starts to end.
        answer: dict[str, object] = {"left": time.time()}
    elif scenario == "fork":
        answer = asyncio.run(fork_and_use(spec))
    else:
        answer = asyncio.run(misuse(spec))
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*cast("tuple[str, str]", tuple(sys.argv[1:3])))
