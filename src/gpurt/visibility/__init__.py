"""Which devices the environment leaves visible, and the environment that shows a child exactly some of them. Pure.

Everything works on a mapping of variables and on :class:`Candidate` records; nothing reads ``os.environ``.
"""

from gpurt.visibility.candidates import Candidate, candidate_of
from gpurt.visibility.children import env_for
from gpurt.visibility.resolve import Visibility, resolve
from gpurt.visibility.variables import (
    CUDA_DEVICE_ORDER,
    CUDA_VISIBLE_DEVICES,
    GGML_VK_VISIBLE_DEVICES,
    GPU_DEVICE_ORDINAL,
    HIP_VISIBLE_DEVICES,
    ROCR_VISIBLE_DEVICES,
    VARIABLES,
    ZE_AFFINITY_MASK,
)

__all__ = [
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "GGML_VK_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "VARIABLES",
    "ZE_AFFINITY_MASK",
    "Candidate",
    "Visibility",
    "candidate_of",
    "env_for",
    "resolve",
]
