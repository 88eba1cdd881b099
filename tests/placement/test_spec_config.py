"""Models from their configurations alone, against what their publishers state."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.spec import ModelSpec
from gpurt.placement.spec_config import spec_from_config
from gpurt.weights import WeightsError
from tests.placement.published import DEEPSEEK_V3, FP8, GPT_OSS, MODELS, Published

LLAMA = MODELS["Llama-3-8B"].config


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


@pytest.mark.parametrize("published", MODELS.values(), ids=MODELS)
class TestPublished:
    def test_parameters(self, published: Published) -> None:
        spec = spec_from_config(published.config)
        assert spec.parameters is not None
        assert spec.parameters == pytest.approx(published.parameters, rel=0.005)
        if published.exact is not None:
            assert spec.parameters == published.exact

    def test_active_parameters(self, published: Published) -> None:
        spec = spec_from_config(published.config)
        active = published.active or spec.parameters
        # Published ones are rounded to two digits or so.
        assert spec.active_parameters == pytest.approx(active, rel=0.02)

    def test_bytes_are_the_parameters(self, published: Published) -> None:
        spec = spec_from_config(published.config, quantisation="none")
        assert spec.parameters is not None
        assert spec.weight_bytes == 2 * spec.parameters
        assert spec_from_config(published.config, quantisation="none", dtype="fp32").weight_bytes == 4 * spec.parameters

    def test_flops_are_twice_the_active_matrices(self, published: Published) -> None:
        spec = spec_from_config(published.config)
        assert spec.active_parameters is not None
        assert spec.hidden_size is not None
        assert spec.vocabulary_size is not None
        flops = sum(layer.flops_per_token for layer in spec.layers) + spec.head_flops_per_token
        lookup = 0 if spec.tied else spec.hidden_size * spec.vocabulary_size
        vectors = 0.002 * spec.active_parameters
        assert flops / 2 == pytest.approx(spec.active_parameters - lookup, abs=vectors)

    def test_groups_divide(self, published: Published) -> None:
        spec = spec_from_config(published.config)
        for size in spec.tensor_parallel:
            assert spec.attention_heads is not None
            assert spec.hidden_size is not None
            assert spec.attention_heads % size == 0
            assert spec.hidden_size % size == 0
        assert spec.tensor_parallel[0] == 1


class TestCache:
    @pytest.mark.parametrize(
        ("name", "per_token"),
        [  # layers x 2 x kv heads x head size x 2 bytes
            ("Llama-2-7B", 32 * 2 * 32 * 128 * 2),
            ("Llama-3-8B", 32 * 2 * 8 * 128 * 2),
            ("Llama-3.1-405B", 126 * 2 * 8 * 128 * 2),
            ("Falcon-7B", 32 * 2 * 1 * 64 * 2),
            ("Qwen3-30B-A3B", 48 * 2 * 4 * 128 * 2),
            ("DeepSeek-V3", 61 * (512 + 64) * 2),
        ],
    )
    def test_bytes_per_token(self, name: str, per_token: int) -> None:
        spec = spec_from_config(MODELS[name].config)
        assert sum(layer.kv_bytes_per_token for layer in spec.layers) == per_token

    def test_dtype_of_the_cache(self) -> None:
        spec = spec_from_config(LLAMA, cache_dtype="fp8")
        assert spec.layers[0].kv_bytes_per_token == 2 * 8 * 128
        assert (spec.dtype, spec.kv_dtype) == ("bfloat16", "float8_e4m3fn")

    @pytest.mark.parametrize(
        ("name", "windows"),
        [
            ("Mistral-7B", [4096] * 32),
            ("Gemma-2-2B", [4096, None] * 13),
            ("Gemma-3-1B", ([512] * 5 + [None]) * 4 + [512, 512]),
            ("GPT-OSS-20B", [128, None] * 12),
            ("Llama-3-8B", [None] * 32),
        ],
    )
    def test_windows(self, name: str, windows: list[int | None]) -> None:
        spec = spec_from_config(MODELS[name].config)
        assert [layer.kv_tokens_max for layer in spec.layers] == windows

    def test_window_counts(self) -> None:
        layer = spec_from_config(MODELS["Gemma-3-1B"].config).layers[0]
        assert layer.kv_bytes(512) == layer.kv_bytes(100_000) == 512 * layer.kv_bytes_per_token

    def test_window_that_is_switched_off(self) -> None:
        config = changed(MODELS["Qwen2-7B"].config, sliding_window=131072, max_window_layers=14)
        assert {layer.kv_tokens_max for layer in spec_from_config(config).layers} == {None}
        windows = [layer.kv_tokens_max for layer in spec_from_config({**config, "use_sliding_window": True}).layers]
        assert windows == [None] * 14 + [131072] * 14


class TestExperts:
    def test_dense_layers_come_first(self) -> None:
        layers = spec_from_config(DEEPSEEK_V3).layers
        assert [layer.read_bytes_per_token is None for layer in layers] == [True] * 3 + [False] * 58

    def test_what_a_token_reads(self) -> None:
        layer = spec_from_config(MODELS["Mixtral-8x7B"].config).layers[0]
        assert layer.read_bytes_per_token is not None
        expert = 3 * 4096 * 14336 * 2
        assert layer.weight_bytes - layer.read_bytes_per_token == 6 * expert
        assert layer.largest_tensor_bytes == expert // 3

    def test_every_other_layer(self) -> None:
        config = changed(MODELS["Qwen3-30B-A3B"].config, decoder_sparse_step=2, mlp_only_layers=[1])
        dense = [layer.read_bytes_per_token is None for layer in spec_from_config(config).layers]
        assert dense == [True, True, True, False] + [True, False] * 22


class TestQuantised:
    def test_microscaling_checkpoint_to_the_byte(self) -> None:
        # The sum that the published index of the 20B model states.
        spec = spec_from_config(GPT_OSS)
        assert spec.weight_bytes == 13_761_264_768
        assert spec.quantisation == "mxfp4"

    def test_fp8_blocks(self) -> None:
        layer = spec_from_config(DEEPSEEK_V3).layers[0]
        matrices = 1536 * 7168 + 24576 * 1536 + 576 * 7168 + 32768 * 512 + 7168 * 16384 + 3 * 7168 * 18432
        blocks = 12 * 56 + 192 * 12 + 5 * 56 + 256 * 4 + 56 * 128 + 3 * 56 * 144
        vectors = 2 * 7168 + 512 + 1536
        assert layer.weight_bytes == matrices + 4 * blocks + 2 * vectors

    @pytest.mark.parametrize(
        ("config", "bits", "name"),
        [  # bits per element of a matrix of 4096 columns
            ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, "awq-int4"),
            ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64, "awq-int4"),
            ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8 + 24 / 4096 + 32 / 4096, "gptq-int8"),
            ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128 + 32 / 4096, "gptq-int4"),
            (FP8, 8 + 32 / 16384, "fp8"),
            ({"quant_method": "fp8"}, 8, "fp8"),
            ({"quant_method": "fbgemm_fp8"}, 8 + 32 / 4096, "fp8"),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8 + 32 / 4096, "bnb-int8"),
            ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5, "bnb-nf4"),
            (
                {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
                4 + 8 / 64 + 32 / (64 * 256),
                "bnb-fp4",
            ),
            ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, "nvfp4"),
            (
                {
                    "quant_method": "compressed-tensors",
                    "ignore": ["lm_head"],
                    "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}},
                },
                4 + 16 / 128,
                "int4",
            ),
            (
                {
                    "quant_method": "compressed-tensors",
                    "ignore": ["re:.*lm_head"],
                    "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel", "type": "float"}}},
                },
                8 + 16 / 4096,
                "fp8",
            ),
        ],
    )
    def test_bits_per_element(self, config: dict[str, Any], bits: float, name: str) -> None:
        # Query, key and value have 4096 columns and so do gate and up; down is left out.
        plain = spec_from_config(LLAMA)
        spec = spec_from_config({**LLAMA, "quantization_config": {**config, "modules_to_not_convert": []}})
        down = 4096 * 14336
        layer = plain.layers[0].weight_bytes // 2 - 2 * 4096 - down
        allowed = 1.02 * layer * bits / 8 + down * (bits + 0.3) / 8 + 2 * 2 * 4096
        assert layer * bits / 8 < spec.layers[0].weight_bytes < allowed
        assert spec.quantisation == name
        assert spec.embedding_bytes == plain.embedding_bytes
        assert spec.head_bytes == plain.head_bytes
        assert spec.layers[0].kv_bytes_per_token == plain.layers[0].kv_bytes_per_token
        assert "layers.weight_bytes" not in spec.estimated

    def test_all_of_a_gptq_layer(self) -> None:
        spec = spec_from_config(
            {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
        )

        def matrix(rows: int, columns: int) -> int:
            groups = columns // 128
            return rows * columns // 2 + groups * rows * 2 + groups * rows // 2 + columns * 4

        matrices = 2 * matrix(4096, 4096) + 2 * matrix(1024, 4096) + 2 * matrix(14336, 4096) + matrix(4096, 14336)
        assert spec.layers[0].weight_bytes == matrices + 2 * 2 * 4096

    def test_head_and_embedding_of_mlx(self) -> None:
        spec = spec_from_config({**LLAMA, "quantization": {"bits": 4, "group_size": 64}})
        assert spec.parameters is not None
        assert spec.quantisation == "mlx-int4"
        assert spec.embedding_bytes == 128256 * 4096 * 9 // 16
        assert spec.weight_bytes == pytest.approx(spec.parameters * 4.5 / 8, rel=1e-3)

    def test_exceptions_of_mlx(self) -> None:
        base = {**LLAMA, "quantization": {"bits": 4, "group_size": 64, "model.layers.1.self_attn.o_proj": False}}
        layers = spec_from_config(base).layers
        assert layers[1].weight_bytes - layers[0].weight_bytes == 4096 * 4096 * 2 - 4096 * 4096 * 9 // 16
        assert layers[2] is layers[0]

    @pytest.mark.parametrize(
        "pattern", ["self_attn", "model.layers.*.self_attn", "re:.*self_attn.*", "model.layers.3.self_attn"]
    )
    def test_modules_that_are_left_plain(self, pattern: str) -> None:
        config = {**LLAMA, "quantization_config": {**FP8, "modules_to_not_convert": ["lm_head", pattern]}}
        attention = 2 * 4096 * 4096 + 2 * 1024 * 4096
        whole = spec_from_config({**LLAMA, "quantization_config": FP8}).layers[3].weight_bytes
        assert spec_from_config(config).layers[3].weight_bytes == whole + attention - 4 * attention // 16384

    def test_part_of_a_name_is_no_match(self) -> None:
        config = {**LLAMA, "quantization_config": {**FP8, "modules_to_not_convert": ["gate", "attn", "layers.3"]}}
        layers = spec_from_config(config).layers
        assert layers[0].weight_bytes == layers[30].weight_bytes < layers[3].weight_bytes

    @pytest.mark.parametrize(
        ("name", "bits"), [("q4_k", 4.5), ("Q8_0", 8.5), ("nf4", 4.5), ("fp8", 8), ("int8", 8), ("mlx-4bit", 4.5)]
    )
    def test_asked_for_by_name(self, name: str, bits: float) -> None:
        spec = spec_from_config(LLAMA, quantisation=name)
        elements = spec_from_config(LLAMA).layers[0].weight_bytes // 2
        assert spec.layers[0].weight_bytes == pytest.approx(elements * bits / 8, rel=0.005)
        assert "layers.weight_bytes" in spec.estimated

    @pytest.mark.parametrize(
        ("name", "gib"), [("Q4_K_M", 4.58), ("q4_k_s", 4.36), ("q5_k_m", 5.33), ("iq2_xxs", 2.23), ("q3_k_m", 3.74)]
    )
    def test_kinds_of_gguf_file_are_as_large_as_published(self, name: str, gib: float) -> None:
        spec = spec_from_config(LLAMA, quantisation=name)  # of the shape of the model that the table is of
        assert spec.quantisation == name.lower()
        assert spec.weight_bytes == pytest.approx(gib * 2**30, rel=0.005)

    def test_an_unknown_name_is_told_the_known_ones_once_each(self) -> None:
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_config(LLAMA, quantisation="q4_k_xxl")
        known = caught.value.message.partition("known are ")[2].split(", ")
        assert {"none", "fp8", "mxfp4", "nvfp4", "q4_k", "q4_k_m", "q6_k", "q8_0", "iq2_xxs"} <= set(known)
        assert len(known) == len(set(known))
        for name in known:
            assert spec_from_config(LLAMA, quantisation=name).layer_count == 32

    def test_said_in_the_model_of_text(self) -> None:
        inside = {"model_type": "llava", "text_config": {**LLAMA, "quantization_config": FP8}}
        assert spec_from_config(inside).layers == spec_from_config({**LLAMA, "quantization_config": FP8}).layers

    def test_asked_for_instead_of_what_there_is(self) -> None:
        plain = spec_from_config(GPT_OSS, quantisation="none")
        assert plain.quantisation is None
        assert spec_from_config(GPT_OSS, quantisation=FP8).quantisation == "fp8"

    def test_patterns_cannot_take_long(self) -> None:
        for pattern in ("re:(a+)+$", "re:" + ".*" * 20, "re:" + "a" * 1000, "re:(", r"re:(a)\1"):
            config = {**LLAMA, "quantization_config": {**FP8, "modules_to_not_convert": [pattern]}}
            began = time.perf_counter()
            with pytest.raises(InvalidPlacementInput, match=r"pattern|expression"):
                spec_from_config(config)
            assert time.perf_counter() - began < 1


class TestShape:
    def test_nested_model_of_text(self) -> None:
        outer = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 1024}}
        assert spec_from_config(outer).layers == spec_from_config(LLAMA).layers

    def test_families_by_other_names(self) -> None:
        text = {**MODELS["Qwen2-7B"].config, "model_type": "qwen2_5_vl_text"}
        spec = spec_from_config({"model_type": "qwen2_5_vl", "text_config": text, "vision_config": {}})
        assert spec.architecture == "qwen2"
        assert spec.parameters == MODELS["Qwen2-7B"].exact

    def test_usual_values_are_noted(self) -> None:
        spec = spec_from_config(MODELS["Gemma-3-4B"].config)
        assert "text_config.num_key_value_heads" in spec.estimated
        assert spec.vocabulary_size == 262_208
        assert "text_config.num_key_value_heads" not in spec_from_config(MODELS["Gemma-3-1B"].config).estimated

    def test_what_is_known_is_not_called_estimated(self) -> None:
        assert spec_from_config(LLAMA).estimated == ("layers.workspace_bytes_per_token",)

    def test_data_type_that_nobody_says(self) -> None:
        spec = spec_from_config(changed(LLAMA, torch_dtype=...))
        assert (spec.dtype, "dtype" in spec.estimated) == ("bfloat16", True)
        assert spec_from_config(changed(LLAMA, torch_dtype=..., dtype="float16")).dtype == "float16"

    def test_tied(self) -> None:
        spec = spec_from_config(MODELS["Qwen2-0.5B"].config)
        assert spec.tied_bytes == spec.embedding_bytes == 151936 * 896 * 2
        assert spec.head_bytes == spec.embedding_bytes + 896 * 2

    def test_bound_to_the_spec(self) -> None:
        assert ModelSpec.from_config(LLAMA) == spec_from_config(LLAMA)

    def test_activation(self) -> None:
        layer = spec_from_config(LLAMA).layers[0]
        assert layer.activation_bytes_per_token == 8192
        assert layer.workspace_bytes_per_token == (2 * 14336 + 4096 + 4096) * 2

    def test_alike_layers_are_one_record(self) -> None:
        assert len({id(layer) for layer in spec_from_config(MODELS["Llama-3.1-405B"].config).layers}) == 1

    def test_fast_enough(self) -> None:
        listed = [f"model.layers.{index}.mlp.gate" for index in range(94)] * 5
        config = {**MODELS["Qwen3-235B-A22B"].config, "quantization_config": {**FP8, "modules_to_not_convert": listed}}
        began = time.perf_counter()
        spec_from_config(config)
        assert time.perf_counter() - began < 2


class TestFile:
    def test_file_and_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "Llama-3-8B"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        assert spec_from_config(folder) == spec_from_config(str(folder / "config.json"))
        assert spec_from_config(folder).name == "Llama-3-8B"
        assert spec_from_config(folder, name="mine").name == "mine"

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 1}', "\udcff"])
    def test_no_json(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(WeightsError, match=r"config\.json"):
            spec_from_config(tmp_path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match="cannot be read"):
            spec_from_config(tmp_path)


class TestWrong:
    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"model_type": "rwkv"}, "model_type"),
            ({"model_type": ...}, "model_type"),
            ({"model_type": 5}, "model_type"),
            ({"hidden_size": ...}, "hidden_size"),
            ({"hidden_size": 0}, "hidden_size"),
            ({"hidden_size": -1}, "hidden_size"),
            ({"hidden_size": True}, "hidden_size"),
            ({"hidden_size": 4096.0}, "hidden_size"),
            ({"hidden_size": "4096"}, "hidden_size"),
            ({"hidden_size": 10**30}, "hidden_size"),
            ({"hidden_size": 4097}, "head_dim"),
            ({"num_attention_heads": ...}, "num_attention_heads"),
            ({"num_key_value_heads": 5}, "num_key_value_heads"),
            ({"num_key_value_heads": 64}, "num_key_value_heads"),
            ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
            ({"num_hidden_layers": None}, "num_hidden_layers"),
            ({"intermediate_size": [1]}, "intermediate_size"),
            ({"vocab_size": ...}, "vocab_size"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
            ({"torch_dtype": "int3"}, "torch_dtype"),
            ({"text_config": []}, "text_config"),
            ({"text_config": {"model_type": "llama"}}, "text_config.hidden_size"),
            ({"layer_types": ["full_attention"]}, "layer_types"),
            ({"layer_types": ["linear_attention"] * 32}, "layer_types"),
            ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
            ({"layer_types": [1] * 32}, "layer_types"),
            ({"quantization_config": {}}, "quantization_config.quant_method"),
            ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.quant_method"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits"),
            (
                {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}},
                "quantization_config.group_size",
            ),
            (
                {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
                "quantization_config.weight_block_size",
            ),
            ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config.config_groups"),
            ({"quantization_config": []}, "quantization_config"),
            ({"quantization": {"bits": 4, "group_size": "x"}}, "quantization.group_size"),
        ],
    )
    def test_field_is_named(self, changes: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_config(changed(LLAMA, **changes))
        assert caught.value.field == field
        assert field in str(caught.value)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"kv_lora_rank": ...}, "kv_lora_rank"),
            ({"n_routed_experts": ...}, "n_routed_experts"),
            ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
            ({"num_experts_per_tok": ...}, "num_experts_per_tok"),
            ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ],
    )
    def test_field_of_a_family(self, changes: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_config(changed(DEEPSEEK_V3, **changes))
        assert caught.value.field == field

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ({"quantisation": "q9"}, "quantisation"),
            ({"quantisation": {"quant_method": "no"}}, "quantisation.quant_method"),
            ({"dtype": "complex"}, "dtype"),
            ({"cache_dtype": "q4"}, "cache_dtype"),
        ],
    )
    def test_argument_is_named(self, arguments: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_config(LLAMA, **arguments)
        assert caught.value.field == field


_BASES = [MODELS[name].config for name in ("Llama-3-8B", "DeepSeek-V3", "Gemma-3-4B", "GPT-OSS-20B", "Falcon-40B")]
_FIELDS = sorted({key for published in MODELS.values() for key in published.config} | {"quantization", "layer_types"})
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["llama", "falcon", "fp8", "awq", "compressed-tensors", "mlx", "float16", "re:.*a.*"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["quant_method", "bits", "group_size", "weights", *_FIELDS]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


class TestFuzz:
    @given(base=st.sampled_from(_BASES), changes=st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=4))
    @settings(deadline=None, derandomize=True, max_examples=400)
    def test_only_the_typed_error(self, base: dict[str, Any], changes: dict[str, Any]) -> None:
        with contextlib.suppress(InvalidPlacementInput):
            spec = spec_from_config({**base, **changes})
            assert spec.weight_bytes > 0


class TestFiles:
    """What is wrong with a file is told with its name; and its name is the model's."""

    @staticmethod
    def write(path: Path, **changes: Any) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(changed(LLAMA, **changes)))
        return path

    def test_a_missing_type(self, tmp_path: Path) -> None:
        file = self.write(tmp_path / "config.json", model_type=...)
        for source in (file, tmp_path):
            with pytest.raises(InvalidPlacementInput) as caught:
                spec_from_config(source)
            assert str(caught.value).startswith(f'{file}: model_type: is missing: it tells the architecture, such as "')
            assert "llama" in caught.value.message
            assert (caught.value.field, caught.value.path) == ("model_type", str(file))

    @pytest.mark.parametrize("changes", [{"hidden_size": -1}, {"torch_dtype": "x"}, {"quantization_config": {}}])
    def test_a_wrong_field(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        file = self.write(tmp_path / "config.json", **changes)
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_config(file)
        assert caught.value.path == str(file)
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_config(changed(LLAMA, **changes))
        assert caught.value.path is None

    @pytest.mark.parametrize("argument", ["quantisation", "dtype", "cache_dtype"])
    def test_a_wrong_argument_is_not_the_file_s_fault(self, tmp_path: Path, argument: str) -> None:
        file = self.write(tmp_path / "config.json")
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_config(file, **{argument: "x"})  # type: ignore[arg-type]
        assert (caught.value.field, caught.value.path) == (argument, None)

    def test_names(self, tmp_path: Path) -> None:
        assert spec_from_config(self.write(tmp_path / "tiny" / "config.json")).name == "tiny"
        assert spec_from_config(tmp_path / "tiny").name == "tiny"
        assert spec_from_config(self.write(tmp_path / "tiny" / "llama-3.1-8b.json")).name == "llama-3.1-8b"
        assert spec_from_config(self.write(tmp_path / "a.json", _name_or_path="meta/llama")).name == "meta/llama"
