"""Copies on a device by a model of one node: ONNX Runtime has no call that copies from tensor to tensor everywhere."""

from __future__ import annotations

from typing import Any, Final

from gpurt.backends.directml.runtime import PROVIDERS, DeviceType
from gpurt.errors import BackendUnavailable, ReasonCode

_VARINT, _BYTES = 0, 2  # wire types of protobuf
_UINT8: Final = 2  # TensorProto.DataType, onnx.proto
_IR_VERSION, _OPSET = 8, 13  # of ONNX 1.10; every version that gpurt accepts reads them

_ERRORS_ONLY: Final = 3


def identity_model() -> bytes:
    """``y = Identity(x)`` for a vector of bytes of any length, as a serialised ONNX model."""
    length = _field(1, _field(2, b"n"))
    tensor = _field(1, _field(1, _UINT8) + _field(2, length))
    node = _field(1, b"x") + _field(2, b"y") + _field(4, b"Identity")
    graph = _field(1, node) + _field(2, b"copy") + _field(11, _value(b"x", tensor)) + _field(12, _value(b"y", tensor))
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(2, _OPSET))


class DeviceCopies:
    """Of one device; for one thread. Making it makes a session on the device, which shows that it works.

    Args:
        ordinal: the library's number of the device.

    Raises:
        BackendUnavailable: ``unsupported_device``: the session was made on another provider.
    """

    def __init__(self, runtime: Any, device_type: DeviceType, ordinal: int) -> None:
        options = runtime.SessionOptions()
        # DirectML needs both: it has no memory patterns, and one queue.
        options.enable_mem_pattern = False
        options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
        # Nothing may find out that the one node does nothing.
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        provider = PROVIDERS[device_type]
        settings = {"device_id": str(ordinal)} if device_type == "dml" else {}
        # Without `enable_fallback=0` it prints on stdout when the provider fails, and takes the CPU.
        self._session = runtime.InferenceSession(
            identity_model(), options, providers=[(provider, settings)], enable_fallback=0
        )
        made: list[str] = self._session.get_providers()
        if made[:1] != [provider]:
            raise BackendUnavailable(
                f"a session asked of {provider} was made on {', '.join(made) or 'nothing'}",
                reason=ReasonCode.UNSUPPORTED_DEVICE,
                backend="directml",
            )
        self._binding = self._session.io_binding()

    def copy(self, src: Any, dst: Any) -> None:
        """Fill the tensor ``dst`` from ``src``, of the same size; returns when the bytes are there."""
        binding = self._binding
        try:
            binding.bind_ortvalue_input("x", src)
            binding.bind_ortvalue_output("y", dst)
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()
        finally:
            # Or it would keep memory that has been freed.
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()


def _field(number: int, value: bytes | int) -> bytes:
    """One field of a protobuf message. Everything here is shorter than 128, so that lengths are single bytes."""
    if isinstance(value, int):
        return bytes((number << 3 | _VARINT, value))
    return bytes((number << 3 | _BYTES, len(value))) + value


def _value(name: bytes, tensor: bytes) -> bytes:
    return _field(1, name) + _field(2, tensor)
