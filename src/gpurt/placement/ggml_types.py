"""The element types of GGML: how many bytes a block of so many elements takes in a GGUF file.

The numbers are of the format (``ggml.h`` and ``ggml-common.h`` of llama.cpp); a block holds its own scales and minima,
so that a tensor's size needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type. ``block_bytes`` hold ``block_elements`` consecutive elements of a row."""

    name: str
    block_elements: int
    block_bytes: int

    @property
    def bits_per_element(self) -> float:
        """With scales: 4.5 for Q4_K."""
        return 8 * self.block_bytes / self.block_elements


GGML_TYPES: Final[Mapping[int, GgmlType]] = {
    number: GgmlType(*fields)
    for number, fields in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 36),  # two halves and 32 bytes; only activations have this type
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }.items()
}
"""By the number used in files."""

WITHDRAWN: Final[Mapping[int, str]] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Numbers that once had a meaning; no current reader loads such a file."""

FILE_TYPES: Final[Mapping[str, float]] = {
    "IQ1_S": 2.0042,
    "IQ1_M": 2.1460,
    "IQ2_XXS": 2.3824,
    "IQ2_XS": 2.5882,
    "IQ2_S": 2.7403,
    "IQ2_M": 2.9294,
    "IQ3_XXS": 3.2548,
    "IQ3_XS": 3.4977,
    "IQ3_S": 3.6606,
    "IQ3_M": 3.7628,
    "IQ4_XS": 4.4597,
    "IQ4_NL": 4.6818,
    "Q2_K_S": 2.9697,
    "Q3_K_S": 3.6429,
    "Q3_K_M": 4.0007,
    "Q3_K_L": 4.2979,
    "Q4_K_S": 4.6672,
    "Q4_K_M": 4.8944,
    "Q5_K_S": 5.5704,
    "Q5_K_M": 5.7036,
}
"""Kinds of GGUF file that mix element types, and their bits per weight on average over a whole model.

The figures are of Llama 3.1 8B, from the table in llama.cpp's ``tools/quantize/README.md``; that of Q3_K_M, which the
table lacks, is the 3.74 GiB that ``llama-quantize --help`` gives for the 8.03e9 weights of Llama 3 8B. Another model's
mixture is a few percent off: the smaller the model, the more of it embedding and head are, which stay wider. Of an
i-quant that is an element type as well, this is what the name means to whoever makes files.
"""
