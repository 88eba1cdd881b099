"""Every error gpurt raises, in one tree.

::

    GPUError (RuntimeError)          backend, device_id, operation, code, hint; picklable
    ├── BackendUnavailable           a backend cannot be used here: .reason, .install_hint
    ├── BackendClosed                used before initialize() or after shutdown()
    ├── WrongLoop                    used from an event loop other than the one of initialize()
    ├── DeviceNotFound               (LookupError)   no device of that name
    ├── InvalidHandle                (ValueError)    stale, foreign, double-freed or malformed handle
    ├── HandleInUse                  (BufferError)   the handle has live views
    ├── OutOfRange                   (ValueError)    offset, size or buffer does not fit
    ├── OutOfMemory                  (MemoryError)   .requested_bytes and what was there
    ├── Unsupported                  (NotImplementedError)  this backend lacks the capability
    ├── TransferFailed               a copy or synchronisation failed in the library
    ├── UntrustedFile                (PermissionError)  somebody else can have written a file of state
    ├── CompileFailed                a compiler refused the source of a kernel: .log
    └── DeviceLost                   sticky: every later call on that device fails at once
        └── DeviceUnresponsive       the driver has not answered for too long; clears when it does

A failure of a vendor library surfaces as one of these with the library's exception as ``__cause__``.
``asyncio.CancelledError`` and ``KeyboardInterrupt`` are never wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar


class ReasonCode(StrEnum):
    """Why a backend or a device cannot be used. Each has a remedy in :mod:`gpurt.remedies`."""

    NO_LIBRARY = "no_library"
    """The Python package or shared library that the backend needs is not installed."""
    NO_DRIVER = "no_driver"
    """The kernel driver is not installed or not loaded."""
    DRIVER_MISMATCH = "driver_mismatch"
    """User-space library and kernel driver are of different versions, or the driver is too old."""
    NO_PERMISSION = "no_permission"
    """The device is there but this process may not open it."""
    HIDDEN_BY_ENVIRONMENT = "hidden_by_environment"
    """A visibility variable such as ``CUDA_VISIBLE_DEVICES`` hides every device."""
    NO_DEVICE = "no_device"
    """Library and driver work, and say that there is no device."""
    TIMEOUT = "timeout"
    """The probe did not answer within its deadline and was killed."""
    CRASHED = "crashed"
    """The probe's process died or answered with something that is not an answer."""
    UNSUPPORTED_DEVICE = "unsupported_device"
    """The device is there, but it failed verification or the library cannot drive it."""
    WRONG_API = "wrong_api"
    """A plug-in was built for another version of gpurt's contracts."""
    WRONG_PLATFORM = "wrong_platform"
    """The backend does not exist on this operating system."""
    NOT_RECORDED = "not_recorded"
    """Nobody was asked: it is of a recording that has no answer of the backend's own driver."""
    ERROR = "error"
    """Anything else; the message says what."""


class GPUError(RuntimeError):
    """Root of all errors of gpurt.

    Attributes:
        message: what happened, without the context below.
        backend: short backend name (``"cuda"``) or None.
        device_id: device name of today (``"cuda:0"``) or None.
        operation: the public method, with its sizes, that failed or None.
        code: the library's own error code or text, or None.
        hint: what the user can do about it, or None.
    """

    _extra: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        device_id: str | None = None,
        operation: str | None = None,
        code: str | int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.backend = backend
        self.device_id = device_id
        self.operation = operation
        self.code = code
        self.hint = hint

    def __str__(self) -> str:
        where = " ".join(part for part in (self.device_id or self.backend, self.operation) if part)
        text = f"{where}: {self.message}" if where else self.message
        if self.code is not None:
            text += f" [{self.code}]"
        if self.hint:
            text += f" ({self.hint})"
        return text

    def fields(self) -> Mapping[str, Any]:
        """The keyword arguments that rebuild this error, for logs and for pickling."""
        names = ("backend", "device_id", "operation", "code", "hint", *self._extra)
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.fields()))


def text_of(exc: BaseException) -> str:
    """The text of an exception, whoever wrote its class: the type's name where it has none, or fails to give it."""
    try:
        return str(exc) or type(exc).__name__
    except BaseException as failure:
        return f"{type(exc).__name__}, whose text could not be had: {type(failure).__name__}"


def _rebuild(cls: type[GPUError], message: str, fields: dict[str, Any]) -> GPUError:
    return cls(message, **fields)


class BackendUnavailable(GPUError):
    """A backend cannot be used on this machine, now.

    Attributes:
        reason: the reason code.
        install_hint: the command that installs what is missing, or None when nothing would help.
    """

    _extra = ("reason", "install_hint")

    def __init__(
        self, message: str, *, reason: ReasonCode = ReasonCode.ERROR, install_hint: str | None = None, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.reason = reason
        self.install_hint = install_hint
        if self.hint is None:
            self.hint = install_hint


class BackendClosed(GPUError):
    """The backend was used before ``initialize()`` or after ``shutdown()``."""


class WrongLoop(GPUError):
    """The backend was used from another event loop than the one that initialised it."""


class DeviceNotFound(GPUError, LookupError):
    """No device of that name in this backend."""


class InvalidHandle(GPUError, ValueError):
    """The handle is stale, freed, malformed, or belongs to another backend instance or process."""


class HandleInUse(GPUError, BufferError):
    """The handle has live views, so its memory cannot be given back."""


class OutOfRange(GPUError, ValueError):
    """An offset, a size or a buffer that does not fit. Raised before any library call."""


class OutOfMemory(GPUError, MemoryError):
    """The device, or the limit set for it, has not enough memory left.

    Attributes (bytes; None where the library does not tell):
        requested_bytes, free_bytes, total_bytes, limit_bytes, pooled_bytes.
    """

    _extra = ("requested_bytes", "free_bytes", "total_bytes", "limit_bytes", "pooled_bytes")

    def __init__(
        self,
        message: str,
        *,
        requested_bytes: int,
        free_bytes: int | None = None,
        total_bytes: int | None = None,
        limit_bytes: int | None = None,
        pooled_bytes: int | None = None,
        **context: Any,
    ) -> None:
        super().__init__(message, **context)
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes
        self.limit_bytes = limit_bytes
        self.pooled_bytes = pooled_bytes


class Unsupported(GPUError, NotImplementedError):
    """This backend, device or platform lacks the capability."""


class TransferFailed(GPUError):
    """A copy or a synchronisation failed inside the vendor library."""


class UntrustedFile(GPUError, PermissionError):
    """A registry, promise file, roster, key or certificate is another user's, or others can write it; the message says
    the path, its owner and its mode. Nothing in it was believed."""


class CompileFailed(GPUError):
    """A compiler refused the source of a kernel, or the source has no kernel of the name that was asked for.

    Attributes:
        log: what the compiler said, whole; empty where it said nothing.
    """

    _extra = ("log",)

    def __init__(self, message: str, *, log: str = "", **context: Any) -> None:
        super().__init__(message, **context)
        self.log = log

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.log}" if self.log else super().__str__()


class DeviceLost(GPUError):
    """The device is gone or its context is poisoned. Sticky: later calls on it fail at once."""


class DeviceUnresponsive(DeviceLost):
    """The driver has not returned from a call for longer than ``hang_after``. Clears if it does return."""
