"""Hand-made mutants of the runtime: small wrong versions of its source that the suite must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    where: str
    """Which conformance tests are run against it, as a ``-k`` expression; fewer, to be quick."""


MUTANTS = [
    Mutant(
        "ignore the claim: a dropped call runs all the same",
        "job.py",
        "                self._stage = _CLOSED\n                dropped = True",
        "                return None",
        "queued",
    ),
    Mutant(
        "drop the undo of a call cancelled in the driver",
        "job.py",
        "        if orphan:\n            self._undo(value, error)",
        "        if orphan:\n            pass",
        "cancelled_in_the_driver",
    ),
    Mutant(
        "drop the undo of a call cancelled with its result there",
        "job.py",
        "        return lambda: self._undo(value, error)",
        "        return None",
        "result_is_there",
    ),
    Mutant(
        "keep the reservation of a dropped call",
        "job.py",
        "            self.call = None\n            self._undo(NOTHING, None)\n            return None",
        "            self.call = None\n            return None",
        "reservation or queued",
    ),
    Mutant(
        "settle only on success",
        "job.py",
        "            error, self.error = self.error, None\n            self._undo(NOTHING, None)",
        "            error, self.error = self.error, None",
        "failed_allocations",
    ),
    Mutant(
        "forget the caller's context",
        "job.py",
        "self._context.run(call, self)",
        "call(self)",
        "context_variables",
    ),
    Mutant(
        "keep the caller's buffer in the traceback of a failure",
        "job.py",
        "            clear_frames(exc)\n",
        "",
        "lets_go or failure_after",
    ),
    Mutant(
        "a lane keeps the process alive",
        "lane.py",
        "name=self.name, daemon=True)",
        "name=self.name, daemon=False)",
        "process_ends",
    ),
    Mutant(
        "forget the order on an allocation",
        "order.py",
        "                if tail is not None and not tail.complete:\n",
        "                if False:\n",
        "Ordering or order or waits or queued",
    ),
    Mutant(
        "remember only the first call on an allocation",
        "order.py",
        "                tail, chain.tail = chain.tail, job\n",
        "                tail = chain.tail\n                chain.tail = tail or job\n",
        "order or waits or chain or storm",
    ),
    Mutant(
        "a device's outstanding work is nobody's",
        "order.py",
        "            if after_devices:\n",
        "            if False:\n",
        "synchronize",
    ),
    Mutant(
        "report a job complete before it is",
        "order.py",
        "        if other.sent and other.queue is job.queue:",
        "        if other.sent:",
        "waits or order or storm",
    ),
    Mutant(
        "keep a finished result back while the next call hangs",
        "dispatch.py",
        "        self._watch = None\n        for queue in self._routes:\n            queue.lane.flush()\n",
        "        self._watch = None\n",
        "finished_copies_are_told",
    ),
    Mutant(
        "keep a finished result back for ever at shutdown",
        "dispatch.py",
        "        self._order.close()\n        for queue in self._routes:\n            queue.lane.flush()\n",
        "        self._order.close()\n",
        "finished_copies_are_told",
    ),
    Mutant(
        "new calls on a hung device wait",
        "dispatch.py",
        "        if self._hung and index in self._hung_now():",
        "        if False:",
        "hung",
    ),
    Mutant(
        "waiting calls are not told of a hang",
        "dispatch.py",
        "            future.set_result(None)\n",
        "            pass\n",
        "hung_call_fails",
    ),
    Mutant(
        "give up waiting on the second cancellation",
        "dispatch.py",
        "                except asyncio.CancelledError:\n                    continue",
        "                except asyncio.CancelledError:\n                    return",
        "cancelled_twice",
    ),
    Mutant(
        "a lost device is forgiven",
        "dispatch.py",
        "        if index in self._lost:\n            raise",
        "        if False:\n            raise",
        "lost_device",
    ),
    Mutant(
        "droppable free",
        "shell.py",
        "failure=GPUError, droppable=False)",
        "failure=GPUError)",
        "deallocate",
    ),
    Mutant(
        "a call that others wait for keeps them waiting",
        "order.py",
        "            if queue.held or job.dependents is not None:\n",
        "            if queue.held:\n",
        "waits or order or storm",
    ),
    Mutant(
        "a cancelled caller's call is not left",
        "guard.py",
        "                await dispatch.left(job, exc, droppable=droppable, wait_out=wait_out)\n",
        "",
        "cancelled",
    ),
    Mutant("copy_into does not wait", "copies.py", ", wait_out=True)", ")", "copy_into"),
    Mutant(
        "a cancelled copy goes on to its end",
        "copies.py",
        "                if job.abandoned:\n                    return\n",
        "",
        "next_chunk",
    ),
    Mutant(
        "the source is not kept",
        "copies.py",
        "            view = byte_view(src)\n",
        "            view = byte_view(bytes(byte_view(src)))\n",
        "copy_to_device",
    ),
    Mutant(
        "free under a live view",
        "shell.py",
        "            if allocation.open_views:",
        "            if False:",
        "view",
    ),
    Mutant(
        "overlapping ranges pass",
        "copies.py",
        "if src is dst and abs(src_offset - dst_offset) < size:",
        "if False:",
        "overlap",
    ),
    Mutant(
        "skip the generation and tamper checks",
        "memory/handles.py",
        "        if allocation.handle is not handle and allocation.handle != handle:",
        "        if False:",
        "bad_handle",
    ),
    Mutant(
        "reserve nothing at submission",
        "memory/ledger.py",
        "            limit, committed = usage.limit_bytes, usage.committed_bytes",
        "            limit, committed = usage.limit_bytes, usage.current_bytes",
        "overshoot",
    ),
    Mutant(
        "a cancelled initialize stays open",
        "lifecycle.py",
        "            if value is not NOTHING and self._dispatch in (dispatch, None):",
        "            if False:",
        "initialize",
    ),
    Mutant(
        "serve any event loop",
        "guard.py",
        "        if get_running_loop() is not self._loop:\n            raise self._wrong_loop()",
        "        pass",
        "another_loop",
    ),
]
