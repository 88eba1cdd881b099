"""A backend that the user opened, as a source of devices: asked through its public methods, never closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from gpurt.backend import GPUBackend
from gpurt.discovery.assemble import BackendAnswer, assemble
from gpurt.discovery.verify import verification_key, verify_backend
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import BackendClosed, BackendUnavailable, ReasonCode
from gpurt.platforms import Platform
from gpurt.types import GPUDevice


class GivenBackend:
    """Asks one initialised backend.

    What passes verification is remembered here, not in the registry: the devices may be simulated, or stand-ins.
    """

    def __init__(self, backend: GPUBackend, platform: Platform, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = backend.name
        self._backend = backend
        self._platform: Platform = platform
        self._clock = clock
        self._verified = frozenset[str]()

    def devices(self) -> tuple[GPUDevice, ...]:
        """What it shows without being asked: nothing before it is initialised."""
        return self._backend.devices

    async def ask(self, deadline: float, environ: Mapping[str, str], *, patient: bool) -> BackendAnswer:
        """List and verify its devices; with ``patient`` only those that have not passed before.

        Never raises for what the backend does; one that takes longer than ``deadline`` seconds gets reason
        ``timeout``.
        """
        started = self._clock()
        listed: tuple[GPUDevice, ...] = ()
        verified: tuple[GPUDevice, ...] | None = None
        failure: Failure | None = None
        try:
            async with asyncio.timeout(deadline):
                listed = await self._backend.list_devices()
                verified = await verify_backend(
                    self._backend, listed, already=self._verified if patient else frozenset()
                )
        except TimeoutError:
            failure = Failure(ReasonCode.TIMEOUT, f"no answer within {deadline:g} s")
        except BackendUnavailable as exc:
            failure = Failure(exc.reason, exc.message, exc.hint)
        except BackendClosed as exc:
            failure = Failure(ReasonCode.ERROR, exc.message, "await backend.initialize() before discovering")
        except Exception as exc:
            failure = Failure(ReasonCode.ERROR, f"{type(exc).__name__}: {exc}")
        else:
            passed = (verification_key(device) for device in verified if device.usable)
            self._verified = frozenset(key for key in passed if key is not None)
        elapsed_ms = round((self._clock() - started) * 1000, 1)
        outcome = ProbeOutcome(opened=listed, verified=verified, failure=failure, elapsed_ms=elapsed_ms)
        return assemble(self.name, outcome, environ=environ, platform=self._platform, by_name=True)
