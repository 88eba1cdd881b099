"""The families of models whose configuration is understood, and what sets each apart.

What a field means where it is absent is part of a family too: the value that every reader of its configurations takes.
Extents that a configuration leaves to its family's code (``usual``) count as assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Attention = Literal["grouped", "latent", "falcon"]
Windows = Literal["none", "all", "some_layers", "alternate", "five_of_six"]


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    Attributes:
        qkv_bias, output_bias: of the attention's projections; None: as ``attention_bias`` says.
        head_norms: keys and queries are normed per head.
        norms: over the hidden size, per layer.
        gated: three matrices in a feed-forward block, otherwise two.
        mlp_bias: None: as ``mlp_bias`` says.
        norm_bias: norms have a bias as well as a weight.
        windows: which layers keep only a window, where the configuration has one.
        experts: how routed experts are described, and which layers have them.
        expert_bias: the router has a correction for every expert.
        usual: extents that stand for fields which a configuration leaves out.
    """

    attention: Attention = "grouped"
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    head_norms: bool = False
    norms: int = 2
    norm_bias: bool = False
    gated: bool = True
    mlp_bias: bool | None = None
    head_bias: bool = False
    tied: bool = False
    windows: Windows = "none"
    experts: Literal["none", "mixtral", "qwen", "deepseek", "gpt_oss"] = "none"
    expert_bias: bool = False
    usual: Mapping[str, Any] = field(default_factory=dict[str, Any])


_GEMMA3: Final[Mapping[str, Any]] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window": 4096,
}
_DEEPSEEK2: Final = Family(attention="latent", qkv_bias=False, output_bias=None, experts="deepseek")
_DEEPSEEK3: Final = Family(attention="latent", qkv_bias=False, output_bias=None, experts="deepseek", expert_bias=True)

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, output_bias=False, windows="all"),
    "mixtral": Family(qkv_bias=False, output_bias=False, windows="all", experts="mixtral"),
    "qwen2": Family(qkv_bias=True, output_bias=False, mlp_bias=False, windows="some_layers"),
    "qwen3": Family(head_norms=True, mlp_bias=False, windows="some_layers", usual={"head_dim": 128}),
    "qwen2_moe": Family(qkv_bias=True, output_bias=False, mlp_bias=False, windows="some_layers", experts="qwen"),
    "qwen3_moe": Family(head_norms=True, mlp_bias=False, windows="some_layers", experts="qwen"),
    "gemma": Family(mlp_bias=False, tied=True, usual={"head_dim": 256}),
    "gemma2": Family(mlp_bias=False, norms=4, tied=True, windows="alternate", usual={"head_dim": 256}),
    "gemma3_text": Family(mlp_bias=False, norms=4, head_norms=True, tied=True, windows="five_of_six", usual=_GEMMA3),
    "phi": Family(qkv_bias=True, output_bias=True, norms=1, norm_bias=True, gated=False, mlp_bias=True, head_bias=True),
    "phi3": Family(qkv_bias=False, output_bias=False, mlp_bias=False, windows="all"),
    "falcon": Family(attention="falcon", norm_bias=True, gated=False, tied=True),
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": _DEEPSEEK3,
    "kimi_k2": _DEEPSEEK3,
    "glm4_moe": Family(experts="deepseek", expert_bias=True, mlp_bias=False),
    "gpt_oss": Family(qkv_bias=True, output_bias=True, windows="alternate", experts="gpt_oss", usual={"head_dim": 64}),
}
"""By the field ``model_type``."""
SAME_AS: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text",
    "phi-msft": "phi",
    "RefinedWebModel": "falcon",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Other names under which a family's model of text is found."""
