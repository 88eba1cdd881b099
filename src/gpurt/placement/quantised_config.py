"""How a model's configuration says that its weights are quantised, as a :class:`NumberFormat`.

Sizes of scales are those of the published checkpoint formats: GPTQ and AWQ keep 16-bit scales and packed zero points
per group (GPTQ also the group of every input), FP8 keeps 32-bit scales per block, row or tensor, bitsandbytes 32-bit
maxima per 64 elements (8-bit where they are quantised again), the microscaling formats one byte per 32 or 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

from gpurt.placement.config_fields import Fields, is_count
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.ggml_types import FILE_TYPES, GGML_TYPES, GgmlType
from gpurt.placement.number_formats import NumberFormat
from gpurt.weights.errors import shown

NAMED: Final[Mapping[str, Mapping[str, Any]]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mlx-4bit": {"quant_method": "mlx", "bits": 4, "group_size": 64},
    "mlx-8bit": {"quant_method": "mlx", "bits": 8, "group_size": 64},
}
"""Short names for the usual settings. GGML's types of elements (``q4_k``) and of files (``q4_k_m``) are known by
theirs, ``none`` is the plain model."""
_GGML: Final[Mapping[str, GgmlType]] = {
    kind.name.lower(): kind for kind in GGML_TYPES.values() if kind.block_elements > 1
}
_MIXED: Final[Mapping[str, float]] = {name.lower(): bits for name, bits in FILE_TYPES.items()}
_SUPER_BLOCK: Final = 256
"""Elements of a block of most types in a mixture."""


def named_format(name: str) -> NumberFormat | None:
    """The format of that short name; None for ``none``.

    Raises:
        InvalidPlacementInput: no such name.
    """
    short = name.lower()
    if short == "none":
        return None
    if short in _MIXED:
        bits = int(_MIXED[short])
        scales = (_MIXED[short] - bits) * _SUPER_BLOCK
        return NumberFormat(short, bits, _SUPER_BLOCK, scale_bits=scales, head=True, embedding=True)
    if short in _GGML:
        kind = _GGML[short]
        bits = 8 * kind.block_bytes // kind.block_elements
        scales = 8 * kind.block_bytes - bits * kind.block_elements
        return NumberFormat(short, bits, kind.block_elements, scale_bits=scales, head=True, embedding=True)
    if short not in NAMED:
        known = ", ".join(dict.fromkeys(["none", *NAMED, *_GGML, *_MIXED]))
        raise InvalidPlacementInput(f"{shown(name)} is unknown; known are {known}", field="quantisation")
    return format_of(Fields(NAMED[short], "quantisation."))


def configured_format(config: Fields) -> NumberFormat | None:
    """What a whole configuration says of it; None: its weights are plain.

    Raises:
        InvalidPlacementInput: a method that is not known here, or a field that cannot be.
    """
    inner = config.part("text_config")
    own = config.part("quantization_config") or (None if inner is None else inner.part("quantization_config"))
    if own is not None:
        return format_of(own)
    apple = config.part("quantization")
    return None if apple is None else _mlx(apple)


def format_of(fields: Fields) -> NumberFormat:
    """From the object ``quantization_config``."""
    method = fields.text("quant_method")
    if method is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        method = "bitsandbytes"
    known = _METHODS.get(method or "")
    if known is None:
        message = f"{shown(method)} is not known here; known are {', '.join(_METHODS)}"
        raise fields.wrong("quant_method", message)
    return known(fields)


def _gptq(fields: Fields) -> NumberFormat:
    bits, group = fields.count("bits", least=2), _group(fields, "group_size")
    inside = [name for names in fields.items("modules_in_block_to_quantize") for name in _flat(names)]
    return NumberFormat(
        f"gptq-int{bits}",
        bits,
        group,
        scale_bits=16 + bits,
        column_bytes=4,
        head=fields.flag("lm_head", False),
        only=tuple(inside) or None,
        plain=fields.texts("modules_to_not_convert"),
    )


def _awq(fields: Fields) -> NumberFormat:
    bits = fields.count("bits", "w_bit", least=2)
    group = _group(fields, "group_size" if fields.get("group_size") is not None else "q_group_size")
    # The kernels' layout has room for zero points whether or not they are used.
    return NumberFormat(
        f"awq-int{bits}", bits, group, scale_bits=16 + bits, plain=fields.texts("modules_to_not_convert")
    )


def _fp8(fields: Fields) -> NumberFormat:
    block = fields.counts("weight_block_size")
    plain = fields.texts("modules_to_not_convert") or fields.texts("ignored_layers")
    if not block:
        scales = 4 if fields.text("activation_scheme") != "static" else 8
        return NumberFormat("fp8", 8, None, None, matrix_bytes=scales, plain=plain)
    if len(block) != 2 or 0 in block:
        raise fields.wrong("weight_block_size", f"must be two integers from 1, and is {shown(list(block))}")
    return NumberFormat("fp8", 8, block[1], block[0], scale_bits=32, plain=plain)


def _fbgemm(fields: Fields) -> NumberFormat:
    return NumberFormat("fp8", 8, scale_bits=32, plain=fields.texts("modules_to_not_convert"))


def _bitsandbytes(fields: Fields) -> NumberFormat:
    plain = fields.texts("llm_int8_skip_modules")
    if not fields.flag("load_in_4bit", False):
        return NumberFormat("bnb-int8", 8, scale_bits=32, plain=plain)
    name = f"bnb-{fields.text('bnb_4bit_quant_type') or 'fp4'}"
    if not fields.flag("bnb_4bit_use_double_quant", False):
        return NumberFormat(name, 4, 64, scale_bits=32, matrix_bytes=64, plain=plain)
    # 8-bit maxima, a 32-bit one for 256 of them, and both tables of values.
    return NumberFormat(name, 4, 64, scale_bits=8 + 32 / 256, matrix_bytes=64 + 1024, plain=plain)


def _mxfp4(fields: Fields) -> NumberFormat:
    # Experts alone are stored so, whatever the list of exceptions says.
    return NumberFormat("mxfp4", 4, 32, scale_bits=8, only=("experts",), plain=fields.texts("modules_to_not_convert"))


def _modelopt(fields: Fields) -> NumberFormat:
    algorithm = (fields.text("quant_algo") or "").upper()
    plain = fields.texts("exclude_modules") or fields.texts("ignore")
    if algorithm == "FP8":
        return NumberFormat("fp8", 8, None, None, matrix_bytes=8, plain=plain)
    if algorithm == "NVFP4":
        return NumberFormat("nvfp4", 4, 16, scale_bits=8, matrix_bytes=8, plain=plain)
    raise fields.wrong("quant_algo", f"{shown(fields.get('quant_algo'))} is neither FP8 nor NVFP4")


def _compressed(fields: Fields) -> NumberFormat:
    groups = fields.part("config_groups")
    names = list(groups.named()) if groups is not None else []
    if groups is None or len(names) != 1:
        raise fields.wrong("config_groups", f"must have one group; has {shown(names)}")
    group = groups.part(names[0])
    weights = None if group is None else group.part("weights")
    if weights is None:
        raise groups.wrong(names[0], "says nothing of weights")
    bits, kind = weights.count("num_bits", least=2), weights.text("type") or "int"
    strategy = weights.text("strategy") or "tensor"
    plain = fields.texts("ignore")
    name = f"{'fp' if kind == 'float' else 'int'}{bits}"
    # Zero points are packed beside the scales where the weights are not symmetric.
    zeros = 0 if weights.flag("symmetric", True) else bits
    made = NumberFormat(name, bits, plain=plain, head=True)
    if strategy == "tensor":
        return replace(made, group_rows=None, matrix_bytes=4)
    if strategy == "channel":
        return replace(made, scale_bits=16 + zeros)
    if strategy == "group":
        return replace(made, group_columns=_group(weights, "group_size"), scale_bits=16 + zeros, matrix_bytes=16)
    if strategy == "tensor_group":
        return replace(made, group_columns=_group(weights, "group_size"), scale_bits=8, matrix_bytes=8)
    if strategy == "block":
        block = weights.counts("block_structure")
        if len(block) == 2 and 0 not in block:
            return replace(made, group_rows=block[0], group_columns=block[1], scale_bits=32)
        raise weights.wrong("block_structure", f"must be two integers from 1, and is {shown(list(block))}")
    raise weights.wrong("strategy", f"{shown(strategy)} is not known here")


def _mlx(fields: Fields) -> NumberFormat:
    plain = _mlx_matrix(fields)
    overrides: dict[str, NumberFormat | None] = {}
    for name, value in fields.named().items():
        if value is False:
            overrides[name] = None
        elif isinstance(value, Mapping):
            overrides[name] = _mlx_matrix(Fields(cast("Mapping[str, Any]", value), f"{fields.path(name)}."))
    return replace(plain, head=True, embedding=True, routers=True, overrides=overrides)


def _mlx_matrix(fields: Fields) -> NumberFormat:
    bits, group = fields.count("bits", least=2), _group(fields, "group_size")
    affine = (fields.text("mode") or "affine") == "affine"
    return NumberFormat(f"mlx-int{bits}" if affine else "mxfp4", bits, group, scale_bits=32 if affine else 8)


def _group(fields: Fields, name: str) -> int | None:
    """Columns of a group; -1 and none are the whole row."""
    value = fields.get(name)
    return None if value is None or (is_count(value) and value == -1) else fields.count(name)


def _flat(names: Any) -> list[str]:
    return [str(name) for name in cast("list[Any]", names)] if isinstance(names, list) else [str(names)]


_METHODS: Final = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "mlx": _mlx,
}
