"""Models as their publishers describe them: the numbers of their configurations, and how many parameters they state.

``exact`` is the number of elements in the published checkpoint where it is known to the last one. Active parameters
count the embedding and the head, which some publishers leave out: then they are added here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    config: dict[str, Any]
    parameters: float
    active: float | None = None
    exact: int | None = None


def _dense(model_type: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> Any:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **more,
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DEEPSEEK_V3: dict[str, Any] = _dense(
    "deepseek_v3", 7168, 18432, 61, 128, 128, 129280,
    kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
    first_k_dense_replace=3, moe_layer_freq=1, num_nextn_predict_layers=1, max_position_embeddings=163840,
    tie_word_embeddings=False, quantization_config=FP8,
)  # fmt: skip
GPT_OSS: dict[str, Any] = _dense(
    "gpt_oss", 2880, 2880, 24, 64, 8, 201088,
    head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12, tie_word_embeddings=False,
    quantization_config={
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "model.embed_tokens", "lm_head"],
    },
)  # fmt: skip

MODELS: dict[str, Published] = {
    "Llama-2-7B": Published(_dense("llama", 4096, 11008, 32, 32, 32, 32000), 6.74e9, exact=6_738_415_616),
    "Llama-2-70B": Published(_dense("llama", 8192, 28672, 80, 64, 8, 32000), 68.98e9, exact=68_976_648_192),
    "Llama-3-8B": Published(
        _dense("llama", 4096, 14336, 32, 32, 8, 128256, max_position_embeddings=8192), 8.03e9, exact=8_030_261_248
    ),
    "Llama-3-70B": Published(_dense("llama", 8192, 28672, 80, 64, 8, 128256), 70.6e9, exact=70_553_706_496),
    "Llama-3.1-405B": Published(_dense("llama", 16384, 53248, 126, 128, 8, 128256), 405.85e9, exact=405_853_388_800),
    "Llama-3.2-1B": Published(
        _dense("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
        1.236e9,
        exact=1_235_814_400,
    ),
    "Mistral-7B": Published(
        _dense("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096), 7.24e9, exact=7_241_732_096
    ),
    "Mixtral-8x7B": Published(
        _dense("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        46.7e9,
        12.9e9,
        exact=46_702_792_704,
    ),
    "Mixtral-8x22B": Published(
        _dense("mixtral", 6144, 16384, 56, 48, 8, 32000, num_local_experts=8, num_experts_per_tok=2), 140.62e9, 39.1e9
    ),
    "Qwen2-7B": Published(_dense("qwen2", 3584, 18944, 28, 28, 4, 152064), 7.62e9, exact=7_615_616_512),
    "Qwen2-0.5B": Published(
        _dense("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True), 0.494e9, exact=494_032_768
    ),
    "Qwen2.5-72B": Published(_dense("qwen2", 8192, 29568, 80, 64, 8, 152064), 72.7e9, exact=72_706_203_648),
    "Qwen1.5-MoE-A2.7B": Published(
        _dense(
            "qwen2_moe",
            2048,
            5632,
            24,
            16,
            16,
            151936,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
        ),
        14.3e9,
        2.7e9,
        exact=14_315_784_192,
    ),
    "Qwen3-8B": Published(_dense("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128), 8.19e9, exact=8_190_735_360),
    "Qwen3-30B-A3B": Published(
        _dense(
            "qwen3_moe",
            2048,
            6144,
            48,
            32,
            4,
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            mlp_only_layers=[],
            decoder_sparse_step=1,
        ),
        30.5e9,
        3.3e9,
        exact=30_532_122_624,
    ),
    "Qwen3-235B-A22B": Published(
        _dense(
            "qwen3_moe",
            4096,
            12288,
            94,
            64,
            4,
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1536,
        ),
        235.1e9,
        22e9,
        exact=235_093_634_560,
    ),
    "Gemma-2B": Published(_dense("gemma", 2048, 16384, 18, 8, 1, 256000, head_dim=256), 2.51e9, exact=2_506_172_416),
    "Gemma-2-2B": Published(
        _dense("gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256, sliding_window=4096), 2.61e9, exact=2_614_341_888
    ),
    "Gemma-2-9B": Published(
        _dense("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256, sliding_window=4096), 9.24e9, exact=9_241_705_984
    ),
    "Gemma-2-27B": Published(
        _dense("gemma2", 4608, 36864, 46, 32, 16, 256000, head_dim=128, sliding_window=4096),
        27.2e9,
        exact=27_227_128_320,
    ),
    "Gemma-3-1B": Published(
        _dense("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512, sliding_window_pattern=6),
        1.0e9,
        exact=999_885_952,
    ),
    "Gemma-3-4B": Published(
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        },
        3.88e9,
    ),
    "Phi-2": Published(_dense("phi", 2560, 10240, 32, 32, 32, 51200), 2.78e9, exact=2_779_683_840),
    "Phi-3-mini": Published(
        _dense("phi3", 3072, 8192, 32, 32, 32, 32064, sliding_window=2047), 3.82e9, exact=3_821_079_552
    ),
    "Phi-4": Published(_dense("phi3", 5120, 17920, 40, 40, 10, 100352), 14.66e9, exact=14_659_507_200),
    "DeepSeek-V2-Lite": Published(
        _dense(
            "deepseek_v2",
            2048,
            10944,
            27,
            16,
            16,
            102400,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            moe_layer_freq=1,
        ),
        15.7e9,
        2.66e9,
        exact=15_706_484_224,
    ),
    "DeepSeek-V2": Published(
        _dense(
            "deepseek_v2",
            5120,
            12288,
            60,
            128,
            128,
            102400,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=160,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1536,
            first_k_dense_replace=1,
            moe_layer_freq=1,
        ),
        235.7e9,
        21.4e9,
        exact=235_741_434_880,
    ),
    "DeepSeek-V3": Published(DEEPSEEK_V3, 671.0e9, 37.5e9, exact=671_026_419_200),
    "GPT-OSS-20B": Published(GPT_OSS, 20.91e9, 3.61e9 + 0.58e9, exact=20_914_757_184),
    "GPT-OSS-120B": Published(
        {
            **GPT_OSS,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
        116.83e9,
        5.13e9 + 0.58e9,
        exact=116_829_156_672,
    ),
    "Falcon-7B": Published(
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "bias": False,
            "torch_dtype": "bfloat16",
        },
        6.92e9,
        exact=6_921_720_704,
    ),
    "Falcon-40B": Published(
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "vocab_size": 65024,
            "new_decoder_architecture": True,
            "parallel_attn": True,
            "bias": False,
            "torch_dtype": "bfloat16",
        },
        41.3e9,
        exact=41_303_293_952,
    ),
    "GLM-4.5-Air": Published(
        _dense(
            "glm4_moe",
            4096,
            10944,
            46,
            96,
            8,
            151552,
            head_dim=128,
            attention_bias=True,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            use_qk_norm=False,
            num_nextn_predict_layers=1,
        ),
        106.9e9,
        12.2e9 + 1.24e9,
    ),
}
