"""The smallest model that TFLite's runtimes take, for its tensors: their memory is what the backend gives out.

One float32 tensor ``x`` of shape ``[1, rows, 16, 4]``, and ``y = RELU(x)``. An operator of one input, because a
tensor that is both inputs of an addition is not what delegates expect; four channels, which is how GPUs lay tensors
out, so nothing is rearranged; and a signature, without which LiteRT compiles nothing. Tensors are copied bit by bit
as long as nobody runs the model, NaNs included.

The model is kept as bytes with two places for the number of rows, since not every runtime brings a flatbuffer schema;
``tests/drivers/test_tflite_model.py`` makes it again from the schema.
"""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

ROW_BYTES: Final = 16 * 4 * 4
"""Tensors are so many bytes, or a multiple."""

MOST_BYTES: Final = ROW_BYTES * (2**31 - 1)
"""Dimensions are signed 32-bit numbers."""

_ROWS_AT: Final = (328, 380)
_ONE_ROW: Final = base64.b64decode(
    "HAAAAFRGTDMUABgAFAAQAAwAAAAIAAAAAAAEABQAAAAUAAAAhAAAAJAAAABcAQAAAwAAAAEAAAAQAAAAAAAKABAADAAIAAQACgAAAAwAAAAUAAAA"
    "NAAAAAQAAABjb3B5AAAAAAEAAAAMAAAACAAMAAgABAAIAAAAAQAAAAQAAAABAAAAeQAAAAEAAAAMAAAAAAAGAAgABAAGAAAABAAAAAEAAAB4AAAA"
    "AQAAAAgAAAAEAAQABAAAAAEAAAAQAAAADAAUABAADAAIAAQADAAAABAAAAA8AAAAQAAAAEQAAAABAAAAEAAAAAAACgAMAAAACAAEAAoAAAAIAAAA"
    "DAAAAAEAAAABAAAAAQAAAAAAAAABAAAAAQAAAAEAAAAAAAAAAgAAADwAAAAEAAAA2P///wgAAAAMAAAAAQAAAHkAAAAEAAAAAQAAAAEAAAAQAAAA"
    "BAAAAAwADAAIAAAAAAAEAAwAAAAIAAAADAAAAAEAAAB4AAAABAAAAAEAAAABAAAAEAAAAAQAAAABAAAAEAAAAAwADAALAAAAAAAEAAwAAAATAAAA"
    "AAAAEw=="
)


def model_of(nbytes: int) -> bytes:
    """The model whose tensors are ``nbytes``, a multiple of :data:`ROW_BYTES` of at most :data:`MOST_BYTES`.

    Raises:
        ValueError: any other size.
    """
    rows, rest = divmod(nbytes, ROW_BYTES)
    if rest or not 0 < nbytes <= MOST_BYTES:
        raise ValueError(f"tensors are multiples of {ROW_BYTES} bytes up to {MOST_BYTES:,}, not {nbytes:,}")
    model = bytearray(_ONE_ROW)
    for at in _ROWS_AT:
        struct.pack_into("<i", model, at, rows)
    return bytes(model)


def sample(nbytes: int) -> Bytes:
    """An input ``x`` that every float format can hold, half of it negative. ``nbytes`` as for :func:`model_of`."""
    import numpy as np

    return np.tile(np.array([-1, 2], np.float32), nbytes // 8).view(np.uint8)


def is_output(x: Bytes, y: Bytes) -> bool:
    """Whether ``y`` is what the model makes of ``x``."""
    import numpy as np

    return bool(np.array_equal(np.maximum(x.view(np.float32), 0), y.view(np.float32)))
