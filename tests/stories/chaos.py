"""A cluster of the real commands (hub, master, workers as processes) under faults that a seed decides. After each fault
every view has to equal what the nodes say of themselves within 5 s (``--whole``); no event may be applied twice, no log
may have a traceback, and no process may grow. ::

    python -m tests.stories.chaos --seed 1 --seconds 7200          # --tls, --nats, --hostile

It prints how many faults of each kind there were, how long views took after them, and every violation; the exit code is
1 where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from gpurt.cluster.commands import request_drain
from gpurt.cluster.committer import PlacementCommitter
from gpurt.cluster.endpoints import engine_at
from gpurt.cluster.errors import ClusterError
from gpurt.cluster.keys import EVENTS, STATE, node_key
from gpurt.cluster.master import Master, MasterConfig, run_master
from gpurt.cluster.state import NodeSnapshot, decode_snapshot
from gpurt.placement.version import PlanVersion
from gpurt.testing.judged_view import JudgedView, digest
from tests.cluster.plans import plan
from tests.cluster.support import free_port
from tests.stories.chaos_proxy import FAULTS, ChaosProxy

WHOLE_S: Final = 5.0
"""Within this every view is whole again once a fault is over, on a machine that does nothing else."""
START_S: Final = 30.0
"""For a process to be started again, on a machine that does other things: it is part of the fault."""
WARM_S: Final = 20.0
"""Age of a process from which on its memory is compared."""
GROWTH: Final = 1.3
GROWTH_BYTES: Final = 32 << 20
LAYERS: Final = 4

OF_WORKERS: Final = ("kill", "terminate", "freeze", *FAULTS, "double", "strangers")
OF_OTHERS: Final = ("hub kill", "hub freeze", "master kill", "master freeze")
WITH_CERTIFICATES: Final = ("roster",)
HOSTILE: Final = ("lie", "flood")


@dataclass
class Report:
    seed: int
    faults: Counter[str] = field(default_factory=Counter[str])
    whole_s: list[float] = field(default_factory=list[float])
    commits: Counter[str] = field(default_factory=Counter[str])
    applied: int = 0
    violations: list[str] = field(default_factory=list[str])

    def text(self) -> str:
        times = sorted(self.whole_s) or [0.0]
        lines = [
            f"seed {self.seed}: {self.faults.total()} faults: "
            + ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())),
            f"commits: {dict(self.commits)}; {self.applied} events applied",
            f"views whole after: median {statistics.median(times):.2f} s, longest {times[-1]:.2f} s",
            f"{len(self.violations)} violations",
            *(f"  {each}" for each in self.violations[:40]),
        ]
        return "\n".join(lines)


class Program:
    """One process of the command, which is started again under the same name with the same log."""

    def __init__(self, name: str, words: list[str], folder: Path) -> None:
        self.name, self.words = name, words
        self.log, self.out = folder / f"{name}.err", folder / f"{name}.out"
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.warm_bytes: int | None = None
        self.last_bytes = 0

    def start(self) -> None:
        with open(self.log, "ab") as log, open(self.out, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpurt", *self.words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.started, self.warm_bytes = time.monotonic(), None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def gone(self, seconds: float = 15.0) -> bool:
        assert self.process is not None
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return self.process.poll() is not None

    async def kill(self) -> None:
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        await self.gone()

    def measure(self) -> str | None:
        """What is wrong with its memory."""
        if not self.running or self.process is None:
            return None
        with contextlib.suppress(psutil.Error):
            self.last_bytes = psutil.Process(self.process.pid).memory_info().rss
        if self.warm_bytes is None and time.monotonic() - self.started > WARM_S:
            self.warm_bytes = self.last_bytes
        if self.warm_bytes is not None and self.last_bytes > GROWTH * self.warm_bytes + GROWTH_BYTES:
            return f"{self.name} has grown from {self.warm_bytes >> 20} to {self.last_bytes >> 20} MiB"
        return None


class MasterLines:
    """The view of a ``gpurt master --json``, folded from its lines."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._at = 0
        self._states: dict[str, str] = {}

    def begin(self) -> None:
        self._at = self._program.out.stat().st_size if self._program.out.exists() else 0
        self._states.clear()

    def states(self) -> dict[str, str]:
        with open(self._program.out, "rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            told = json.loads(line)
            if told.get("node") and told.get("node_state"):
                self._states[told["node"]] = told["node_state"]
        return dict(self._states)


class Watcher:
    """A master of this process: a view, its engine, and who commits plans in its term."""

    def __init__(self, config: MasterConfig) -> None:
        self.view = JudgedView()
        self._config = config
        self._tasks: list[asyncio.Task[Any]] = []
        self.master: Master | None = None

    async def open(self) -> Watcher:
        ready: asyncio.Future[Master] = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(run_master(self._config, self.view, on_ready=ready.set_result)))
        await asyncio.wait({*self._tasks, ready}, return_when=asyncio.FIRST_COMPLETED)
        self.master = ready.result()
        self.committer = PlacementCommitter(self.master.engine, self.view)
        self._tasks.append(asyncio.create_task(self.committer.run()))
        return self

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Chaos:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.random = random.Random(options.seed)
        self.report = Report(options.seed)
        self.names = [f"w{number}" for number in range(1, options.workers + 1)]
        self.port = free_port()
        self.scheme = "nats://" if options.nats else "tls/" if options.tls else "tcp/"
        self.term, self.number = 1, 0
        self.proxies: dict[str, ChaosProxy] = {}
        self.workers: dict[str, Program] = {}
        self.watchers: list[Watcher] = []
        self._server: Any = None

    def address(self, port: int) -> str:
        return f"{self.scheme}127.0.0.1:{port}"

    def protected(self, name: str) -> list[str]:
        return ["--tls", str(self.folder / "cluster" / "nodes" / name)] if self.options.tls else []

    async def run(self) -> Report:
        try:
            await self._open()
            await self._settle("the start", START_S)
            end = time.monotonic() + self.options.seconds
            while time.monotonic() < end:
                await self._round()
        except Exception as exc:
            self.report.violations.append(f"the program itself: {exc!r}")
            raise
        finally:
            await self._close()
        return self.report

    # Start and end

    async def _open(self) -> None:
        from gpurt.cli.demo_model import write_model

        weights = self.folder / "model.safetensors"
        await asyncio.to_thread(write_model, weights)
        if self.options.tls:
            await asyncio.to_thread(self._enrol)
        if self.options.nats:
            from tests.cluster.nats_server import NatsServer

            self._server = NatsServer()
            await asyncio.to_thread(self._server.start)
            self.port = int(self._server.endpoint.rpartition(":")[2])
        at = self.address(self.port)
        hub_tls = ["--tls", str(self.folder / "cluster" / "hub")] if self.options.tls else []
        self.hub = Program("hub", ["hub", "--listen", at, "--cluster", "chaos", *hub_tls], self.folder)
        if not self.options.nats:
            self.hub.start()
        where = "--listen" if self.options.nats else "--connect"
        words = ["master", where, at, "--cluster", "chaos", "--json", *self.protected("m1")]
        self.master = Program("gpurt-master", words, self.folder)
        self.lines = MasterLines(self.master)
        self.master.start()
        for name in self.names:
            proxy = self.proxies[name] = await ChaosProxy(self.port, f"{self.options.seed} {name}").open()
            words = ["worker", "--node", name, "--cluster", "chaos", "--connect", self.address(proxy.port)]
            words += ["--simulate", "h100x2", "--registry", str(self.folder / f"{name}.json"), "--json"]
            words += ["--weights", str(weights), *self.protected(name)]
            self.workers[name] = Program(name, words, self.folder)
            self.workers[name].start()
        for name in ("m2", "m3"):
            tls = self.folder / "cluster" / "nodes" / name if self.options.tls else None
            self.watchers.append(await Watcher(MasterConfig("chaos", at, listen=False, tls=tls)).open())
        tls = self.folder / "cluster" / "nodes" / "o1" if self.options.tls else None
        self.asking = engine_at(at, cluster="chaos", tls=tls)
        await self.asking.start()

    def _enrol(self) -> None:
        from gpurt.cluster.security.authority import Role
        from gpurt.cluster.security.enrolment import enrol, init_cluster

        cluster = self.folder / "cluster"
        init_cluster(cluster, cluster="chaos", hosts=["127.0.0.1"], port=self.port)
        roles = {"m1": Role.MASTER, "m2": Role.MASTER, "m3": Role.MASTER, "o1": Role.OBSERVER}
        for name, role in {**dict.fromkeys(self.names, Role.NODE), **roles}.items():
            enrol(cluster, name, role=role)

    async def _close(self) -> None:
        for watcher in self.watchers:
            await watcher.close()
            self.report.applied += watcher.view.applied
            if watcher.view.faults:
                self.report.violations.append(f"events: {dict(watcher.view.faults)}")
        if hasattr(self, "asking"):
            await self.asking.close()
        programs = [*self.workers.values(), self.hub, self.master]
        for program in programs:
            if program.running:
                await program.kill()
        for proxy in self.proxies.values():
            await proxy.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.end)
        for log in sorted(self.folder.glob("*.err")):
            text = log.read_text(errors="replace")
            if "Traceback" in text:
                at = text.index("Traceback")
                many = text.count("Traceback")
                self.report.violations.append(f"{log.name}: {many} tracebacks: {text[at : at + 1500]}")

    # One round: something that masters do, a fault, and what is true afterwards

    async def _round(self) -> None:
        kinds = [*OF_WORKERS, *OF_OTHERS]
        kinds += WITH_CERTIFICATES if self.options.tls else ()
        kinds += HOSTILE if self.options.hostile and not self.options.nats else ()
        kind, name = self.random.choice(kinds), self.random.choice(self.names)
        meanwhile = asyncio.create_task(self._command())
        faults: dict[str, Callable[[str], Awaitable[None]]] = {
            "kill": self._kill,
            "terminate": self._terminate,
            "freeze": self._freeze,
            "double": self._double,
            "strangers": self._strangers,
            "roster": self._roster,
            "lie": self._lie,
            "flood": self._flood,
        }
        if kind in FAULTS:
            await self._disturb(name, kind)
        elif kind in faults:
            await faults[kind](name)
        elif kind.startswith("hub") and self.options.nats:
            await self._disturb_server(kind)
        elif kind.endswith("kill"):
            await self._restart(self.hub if kind.startswith("hub") else self.master)
        else:
            await self._freeze_program(self.hub if kind.startswith("hub") else self.master)
        self.report.faults[kind] += 1
        healed = time.monotonic()
        await self._settle(f"{kind} of {name}", self.options.whole)
        self.report.whole_s.append(time.monotonic() - healed)
        await meanwhile
        await self._settle(f"a command during {kind} of {name}", self.options.whole + START_S)
        for program in (*self.workers.values(), self.hub, self.master):
            wrong = program.measure()
            if wrong is not None:
                self.report.violations.append(wrong)
                program.warm_bytes = None

    async def _command(self) -> None:
        """An election and a plan, or a node drained and taken back."""
        await asyncio.sleep(self.random.uniform(0.0, 0.5))
        watcher, deed = self.random.choice(self.watchers), self.random.random()
        if deed < 0.3:
            self.term, self.number = self.term + 1, 0
        assert watcher.master is not None
        if deed < 0.6:
            some = self.random.sample(self.names, 2)
            self.number += 1
            devices = [sorted(watcher.view.snapshot().nodes[each].devices)[0] for each in some]
            first, second = (f"{node}/{key}" for node, key in zip(some, devices, strict=True))
            made = plan((first, 0, LAYERS // 2), (second, LAYERS // 2, LAYERS), model="demo", layer_bytes=1 << 20)
            result = await watcher.committer.commit(made, PlanVersion(term=self.term, n=self.number))
            self.report.commits[str(result.status)] += 1
        else:
            name, draining = self.random.choice(self.names), self.random.random() < 0.5
            with contextlib.suppress(ClusterError):  # it is away, or has heard of a later term
                await request_drain(watcher.master.engine, name, term=self.term, draining=draining, timeout=3)

    # Faults

    async def _kill(self, name: str) -> None:
        await self.workers[name].kill()
        await asyncio.sleep(self.random.uniform(0.0, 3.0))
        await self._again(self.workers[name])

    async def _terminate(self, name: str) -> None:
        self.workers[name].send(signal.SIGTERM)
        if not await self.workers[name].gone():
            self.report.violations.append(f"{name} does not end by SIGTERM")
            await self.workers[name].kill()
        await self._again(self.workers[name])

    async def _again(self, program: Program) -> None:
        """Start it, and wait until it says so: what an interpreter needs to start is no delay of the cluster's."""
        at = program.out.stat().st_size
        program.start()
        if not await _until(lambda: b'"joined"' in _from(program.out, at), START_S):
            self.report.violations.append(f"{program.name} has not joined within {START_S:g} s of its start")

    async def _restart(self, program: Program) -> None:
        await program.kill()
        await asyncio.sleep(self.random.uniform(0.0, 3.0))
        at = program.log.stat().st_size
        if program is self.master:
            self.lines.begin()
        program.start()
        word = b"watching through" if program is self.master else b"listening at"
        if not await _until(lambda: word in _from(program.log, at), START_S):
            self.report.violations.append(f"{program.name} does not start again")

    async def _disturb_server(self, kind: str) -> None:
        if kind == "hub kill":
            await asyncio.to_thread(self._server.kill)
            await asyncio.sleep(self.random.uniform(0.0, 3.0))
            await asyncio.to_thread(self._server.start)
            return
        self._server.signal(signal.SIGSTOP)
        await asyncio.sleep(self.random.uniform(0.5, 8.0))
        self._server.signal(signal.SIGCONT)

    async def _freeze(self, name: str) -> None:
        await self._freeze_program(self.workers[name])

    async def _freeze_program(self, program: Program) -> None:
        program.send(signal.SIGSTOP)
        await asyncio.sleep(self.random.uniform(0.5, 8.0))
        program.send(signal.SIGCONT)

    async def _disturb(self, name: str, fault: str) -> None:
        self.proxies[name].set(fault)
        # What is damaged is over when it is done; the others last for a while.
        lasting = fault in ("stall", "delay")
        await asyncio.sleep(self.random.uniform(1.0, 6.0) if lasting else 0.0)
        if not lasting:
            await asyncio.sleep(1.5)  # something has to pass to be damaged
        self.proxies[name].heal()
        if fault == "corrupt" and self.scheme == "tcp/":
            # Without certificates nothing tells a message with a wrong byte in it from another message, so it is only
            # the next connection that is right again.
            self.proxies[name].cut()

    async def _double(self, name: str) -> None:
        """Another process under the name ends, whoever connects first after a restart of the hub."""
        with_hub = not self.options.nats and self.random.random() < 0.5
        words = [*self.workers[name].words]
        words[words.index("--registry") + 1] = str(self.folder / f"{name}-double-{self.report.faults['double']}.json")
        words[words.index("--connect") + 1] = self.address(self.port)
        other = Program(f"{name}-double", words, self.folder)
        if with_hub:
            await self.hub.kill()
        other.start()
        if with_hub:
            await asyncio.sleep(1.0)
            at = self.hub.log.stat().st_size
            self.hub.start()
            await _until(lambda: b"listening at" in _from(self.hub.log, at), START_S)
        if not await other.gone(START_S):
            self.report.violations.append(f"a second {name} goes on{' after a restart of the hub' if with_hub else ''}")
            await other.kill()
        elif other.process is not None and other.process.returncode != 2:
            self.report.violations.append(f"a second {name} has ended with {other.process.returncode}")
        if not self.workers[name].running:
            self.report.violations.append(f"{name} has ended because of another process of its name")
            await self._again(self.workers[name])

    async def _roster(self, name: str) -> None:
        """A new name: the hub opens its session anew within a second or two."""
        from gpurt.cluster.security.enrolment import enrol

        await asyncio.to_thread(enrol, self.folder / "cluster", f"new-{self.report.faults['roster']}")
        await asyncio.sleep(2.0)

    async def _strangers(self, name: str) -> None:
        end, open_ones = time.monotonic() + 2.0, list[asyncio.StreamWriter]()
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                open_ones.append(writer)
                if self.random.random() < 0.7:
                    writer.write(self.random.randbytes(self.random.randint(1, 300)))
            await asyncio.sleep(0.02)
        for writer in open_ones:
            writer.transport.abort()

    async def _lie(self, name: str) -> None:
        session = self._session(name)
        for payload in (b'{"age_s":1e400}', b"9" * 400, b"\xff" * 100, b"[" * 5000, b"null"):
            for leaf in (EVENTS, "telemetry", STATE):
                await asyncio.to_thread(session.put, node_key("chaos", name, leaf), payload)
        await asyncio.to_thread(session.close)

    async def _flood(self, name: str) -> None:
        folder = self.folder / "cluster" / "nodes" / name if self.options.tls else None
        flooding = multiprocessing.get_context("spawn").Process(
            target=pour, args=(self.address(self.port), name, folder), daemon=True
        )
        flooding.start()
        await asyncio.to_thread(flooding.join, START_S)
        if flooding.exitcode != 0:
            self.report.violations.append(f"the flood itself has ended with {flooding.exitcode}")
            flooding.kill()

    def _session(self, name: str) -> Any:
        folder = self.folder / "cluster" / "nodes" / name
        return session_of(self.address(self.port), folder if self.options.tls else None)

    # What is true

    async def _settle(self, what: str, seconds: float) -> None:
        end, wrong = time.monotonic() + seconds, "nothing was compared"
        while True:
            wrong = await self._wrong()
            if wrong is None:
                return
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.05)
        self.report.violations.append(f"{seconds:g} s after {what}: {wrong}")
        # It counts once, and what comes next begins with a cluster that is whole, if it ever is.
        again = time.monotonic() + START_S
        while await self._wrong() is not None and time.monotonic() < again:
            await asyncio.sleep(0.2)

    async def _wrong(self) -> str | None:
        """How a view differs from what the nodes say of themselves."""
        truth: dict[str, NodeSnapshot] = {}
        for reply in await self.asking.snapshot("*", timeout=1.0):
            truth[reply.node] = decode_snapshot(reply.payload, node=reply.node)
        if sorted(truth) != self.names:
            return f"nodes answer: {sorted(truth)}"
        for number, watcher in enumerate(self.watchers):
            snapshot = watcher.view.snapshot()
            if snapshot.conflicts:
                return f"view {number} has conflicts: {[each.node for each in snapshot.conflicts]}"
            for name, said in truth.items():
                record = snapshot.nodes.get(name)
                if record is None or record.state != "healthy":
                    return f"view {number} has {name} as {record and record.state}"
                if (record.epoch, record.seq) < (said.epoch, said.seq) or record.draining != said.draining:
                    return f"view {number} is behind on {name}: {record.epoch, record.seq} of {said.epoch, said.seq}"
                if record.seq == said.seq and digest(record.gpu_devices) != digest(said.gpu_devices):
                    return f"view {number} has other devices of {name}"
                if record.seq == said.seq and record.placement != said.placement:
                    return f"view {number} has another placement of {name}"
        states = self.lines.states()
        if any(states.get(name) != "healthy" for name in self.names):
            return f"gpurt master has {states}"
        return None


def session_of(at: str, folder: Path | None) -> Any:
    """Who is at the hub by itself, with the certificate in ``folder``."""
    from gpurt.cluster.security.protection import Protection
    from gpurt.cluster.zenoh_settings import ZenohSettings, load_zenoh, session_config

    zenoh = load_zenoh()
    values = None if folder is None else Protection(folder, "chaos", at, listen=False).values(zenoh)
    return zenoh.open(session_config(zenoh, at, listen=False, settings=ZenohSettings(), protection=values))


def pour(at: str, name: str, folder: Path | None) -> None:
    """Send garbage as events of ``name`` for two seconds, as fast as one process can."""
    session = session_of(at, folder)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        session.put(node_key("chaos", name, EVENTS), b"x" * 1000)
    session.close()


def _from(path: Path, at: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(at)
        return file.read()


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="decides what happens (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="faults begin within (default: %(default)s)")
    parser.add_argument(
        "--whole", type=float, default=WHOLE_S, help="seconds for views to be whole again (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--tls", action="store_true", help="with certificates")
    parser.add_argument("--nats", action="store_true", help="over a NATS server")
    parser.add_argument("--hostile", action="store_true", help="one node lies, or floods the hub, at times")
    parser.add_argument("--keep", metavar="DIR", help="keep the logs there")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="gpurt-chaos-")))
        folder.mkdir(exist_ok=True)
        report = asyncio.run(Chaos(options, folder).run())
    sys.stdout.write(report.text() + "\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
