"""The model whose tensors are the memory: that its bytes are what the schema says, and that runtimes take it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpurt.backends.tflite.model import MOST_BYTES, ROW_BYTES, is_output, model_of, sample

LITERT = "pip install 'gpurt[tflite]'"


def by_schema(rows: int) -> bytes:
    """The same model, made with the schema that LiteRT's package brings."""
    flatbuffers: Any = pytest.importorskip("flatbuffers", reason=LITERT)
    schema: Any = pytest.importorskip("ai_edge_litert.schema_py_generated", reason=LITERT)

    def tensor(name: str) -> Any:
        made = schema.TensorT()
        made.name, made.shape, made.type, made.buffer = name, [1, rows, 16, 4], schema.TensorType.FLOAT32, 0
        return made

    def mapped(name: str, index: int) -> Any:
        made = schema.TensorMapT()
        made.name, made.tensorIndex = name, index
        return made

    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.RELU
    code.version = 1
    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = 0, [0], [1]
    graph = schema.SubGraphT()
    graph.tensors, graph.inputs, graph.outputs, graph.operators = [tensor("x"), tensor("y")], [0], [1], [operator]
    signature = schema.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = "copy", 0
    signature.inputs, signature.outputs = [mapped("x", 0)], [mapped("y", 1)]
    model = schema.ModelT()
    model.version, model.operatorCodes, model.subgraphs = 3, [code], [graph]
    model.buffers, model.signatureDefs = [schema.BufferT()], [signature]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


@pytest.mark.parametrize("rows", [1, 2, 4096, 0x11223344, 2**31 - 1])
def test_bytes_are_what_the_schema_makes(rows: int) -> None:
    assert model_of(rows * ROW_BYTES) == by_schema(rows)


@pytest.mark.parametrize("nbytes", [0, -ROW_BYTES, 1, ROW_BYTES - 1, ROW_BYTES + 1, MOST_BYTES + ROW_BYTES])
def test_other_sizes_have_no_model(nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiples of 256"):
        model_of(nbytes)


def test_a_runtime_computes_what_the_model_says() -> None:
    interpreter_module: Any = pytest.importorskip("ai_edge_litert.interpreter", reason=LITERT)
    nbytes = 8 * ROW_BYTES
    interpreter = interpreter_module.Interpreter(model_content=model_of(nbytes))
    interpreter.allocate_tensors()
    x = sample(nbytes)
    interpreter.set_tensor(0, x.view(np.float32).reshape(1, 8, 16, 4))
    interpreter.invoke()
    y = interpreter.get_tensor(1).reshape(-1).view(np.uint8)
    assert is_output(x, y)
    assert not is_output(x, x)
