"""Models from the headers of generated GGUF files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.spec import ModelSpec
from gpurt.placement.spec_gguf import spec_from_gguf
from gpurt.weights import WeightsError
from tests.placement.gguf_files import ARRAY, BOOL, F32, I32, STRING, U16, U32, File, Typed, llama, size


def write(path: Path, file: File) -> Path:
    """The header and a hole where the data would be."""
    header = file.header()
    path.write_bytes(header)
    os.truncate(path, len(header) + file.data_bytes())
    return path


def spec_of(tmp_path: Path, file: File, **arguments: Any) -> ModelSpec:
    return spec_from_gguf(write(tmp_path / "model.gguf", file), **arguments)


def with_tensors(file: File, add: Mapping[str, tuple[str, tuple[int, ...]]], drop: str = "\0") -> File:
    kept = {name: value for name, value in file.tensors.items() if drop not in name}
    return File(file.metadata, {**kept, **add})


class TestRight:
    def test_bytes(self, tmp_path: Path) -> None:
        file = llama(kind="Q8_0")
        spec = spec_of(tmp_path, file)
        layer = sum(size(kind, extents) for name, (kind, extents) in file.tensors.items() if name.startswith("blk.0."))
        matrices = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
        assert layer == matrices * 34 // 32 + 2 * 64 * 4
        assert [one.weight_bytes for one in spec.layers] == [layer, layer]
        assert spec.embedding_bytes == 64 * 100 * 34 // 32
        assert spec.head_bytes == spec.embedding_bytes + 64 * 4
        assert spec.weight_bytes == sum(size(kind, extents) for kind, extents in file.tensors.values())
        assert spec.layers[0].largest_tensor_bytes == 64 * 128 * 34 // 32
        assert spec.layers[0].flops_per_token == 2 * matrices
        assert spec.head_flops_per_token == 2 * 64 * 100
        assert spec.parameters == spec.active_parameters == 2 * (matrices + 128) + 2 * 6400 + 64

    def test_fields(self, tmp_path: Path) -> None:
        spec = spec_of(tmp_path, llama(kind="Q8_0"))
        assert (spec.name, spec.architecture, spec.quantisation) == ("Small", "llama", "q8_0")
        assert (spec.hidden_size, spec.attention_heads, spec.kv_heads) == (64, 4, 2)
        assert (spec.vocabulary_size, spec.context_tokens_max) == (100, 4096)
        assert (spec.dtype, spec.kv_dtype) == (None, "float16")
        assert spec.tensor_parallel == (1, 2)
        assert spec.layers[0].read_bytes_per_token is None
        assert spec.layers[0].activation_bytes_per_token == 64 * 4
        assert spec.estimated == ("layers.workspace_bytes_per_token",)

    def test_plain_types_are_no_quantisation(self, tmp_path: Path) -> None:
        assert spec_of(tmp_path, llama(kind="BF16")).quantisation is None

    def test_name(self, tmp_path: Path) -> None:
        assert spec_of(tmp_path, llama(), name="mine").name == "mine"
        assert spec_of(tmp_path, llama(more={"general.name": (STRING, " ")})).name == "model"

    def test_bound_to_the_spec(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.gguf", llama())
        assert ModelSpec.from_gguf(path) == ModelSpec.from_gguf(str(path)) == spec_from_gguf(path)

    def test_big_endian(self, tmp_path: Path) -> None:
        little, big = llama(), llama()
        big.order = ">"
        assert spec_of(tmp_path, big) == spec_of(tmp_path, little)

    def test_size_of_a_large_model(self, tmp_path: Path) -> None:
        # 70B in Q4_K: the file is a hole of 40 GB.
        file = llama(layers=80, hidden=8192, heads=64, kv_heads=8, inner=28672, vocabulary=128256, kind="Q4_K")
        spec = spec_of(tmp_path, file)
        assert spec.parameters == 70_553_706_496
        assert spec.weight_bytes == pytest.approx(70_553_706_496 * 4.5 / 8, rel=1e-3)
        assert spec.tensor_parallel == (1, 2, 4, 8)


class TestTied:
    def test_tied(self, tmp_path: Path) -> None:
        spec = spec_of(tmp_path, llama(tied=True))
        assert spec.tied_bytes == spec.embedding_bytes == 64 * 100 * 2
        assert spec.head_bytes == spec.embedding_bytes + 256
        assert spec.parameters == spec_of(tmp_path, llama()).parameters - 6400  # type: ignore[operator]

    def test_what_lies_beside_the_layers(self, tmp_path: Path) -> None:
        extra = {"rope_freqs.weight": ("F32", (32,)), "token_embd_norm.weight": ("F32", (64,))}
        spec = spec_of(tmp_path, with_tensors(llama(), extra))
        assert spec.embedding_bytes == 64 * 100 * 2 + 96 * 4
        assert "embedding_bytes" not in spec.estimated
        spec = spec_of(tmp_path, with_tensors(llama(), {"what.weight": ("F32", (8,))}))
        assert spec.embedding_bytes == 64 * 100 * 2 + 32
        assert "embedding_bytes" in spec.estimated


class TestCache:
    def cache(self, tmp_path: Path, more: Mapping[str, Typed], *, layers: int = 6, **shape: Any) -> list[int]:
        return [
            layer.kv_bytes_per_token for layer in spec_of(tmp_path, llama(layers=layers, more=more, **shape)).layers
        ]

    def test_from_heads(self, tmp_path: Path) -> None:
        assert self.cache(tmp_path, {}) == [2 * 2 * 16 * 2] * 6

    def test_explicit_lengths(self, tmp_path: Path) -> None:
        lengths: dict[str, Typed] = {
            "llama.attention.key_length": (U32, 24),
            "llama.attention.value_length": (U32, 20),
        }
        assert self.cache(tmp_path, lengths) == [2 * 44 * 2] * 6

    def test_heads_of_every_layer(self, tmp_path: Path) -> None:
        heads: dict[str, Typed] = {"llama.attention.head_count_kv": (ARRAY, (I32, [4, 2, 1, 0, 4, 4]))}
        assert self.cache(tmp_path, heads) == [256, 128, 64, 0, 256, 256]

    def test_without_heads_of_their_own(self, tmp_path: Path) -> None:
        file = llama()
        metadata = {key: value for key, value in file.metadata.items() if not key.endswith("head_count_kv")}
        spec = spec_of(tmp_path, File(metadata, file.tensors))
        assert spec.kv_heads == 4
        assert spec.layers[0].kv_bytes_per_token == 2 * 64 * 2

    def test_dtype(self, tmp_path: Path) -> None:
        spec = spec_of(tmp_path, llama(), cache_dtype="float32")
        assert (spec.kv_dtype, spec.layers[0].kv_bytes_per_token) == ("float32", 256)

    def test_latent(self, tmp_path: Path) -> None:
        more: dict[str, Typed] = {
            "deepseek2.attention.kv_lora_rank": (U32, 16),
            "deepseek2.attention.key_length": (U32, 20),
            "deepseek2.attention.value_length": (U32, 16),
            "deepseek2.attention.key_length_mla": (U32, 12),
            "deepseek2.rope.dimension_count": (U32, 4),
            "deepseek2.attention.head_count_kv": (U32, 1),
        }
        spec = spec_of(tmp_path, llama(architecture="deepseek2", more=more))
        assert spec.layers[0].kv_bytes_per_token == 20 * 2
        assert spec.tensor_parallel == (1, 2, 4)

    def test_latent_of_old_files_is_kept_whole(self, tmp_path: Path) -> None:
        more: dict[str, Typed] = {
            "deepseek2.attention.kv_lora_rank": (U32, 16),
            "deepseek2.attention.key_length": (U32, 24),
            "deepseek2.attention.value_length": (U32, 16),
            "deepseek2.attention.head_count_kv": (U32, 4),
        }
        spec = spec_of(tmp_path, llama(architecture="deepseek2", more=more))
        assert spec.layers[0].kv_bytes_per_token == 4 * 40 * 2

    def test_shared_by_later_layers(self, tmp_path: Path) -> None:
        more: dict[str, Typed] = {"gemma3n.attention.shared_kv_layers": (U32, 2)}
        assert self.cache(tmp_path, more, architecture="gemma3n") == [128] * 4 + [0] * 2


class TestWindows:
    def windows(self, tmp_path: Path, architecture: str, more: Mapping[str, Typed]) -> list[int | None]:
        prefixed = {f"{architecture}.attention.{key}": value for key, value in more.items()}
        spec = spec_of(tmp_path, llama(layers=8, architecture=architecture, more=prefixed))
        return [layer.kv_tokens_max for layer in spec.layers]

    @pytest.mark.parametrize(
        ("architecture", "windows"),
        [
            ("gemma2", [512, None] * 4),
            ("gpt-oss", [512, None] * 4),
            ("gemma3", [512] * 5 + [None] + [512] * 2),
            ("cohere2", ([512] * 3 + [None]) * 2),
            ("llama", [None] * 8),
        ],
    )
    def test_of_architectures(self, tmp_path: Path, architecture: str, windows: list[int | None]) -> None:
        assert self.windows(tmp_path, architecture, {"sliding_window": (U32, 512)}) == windows

    def test_listed(self, tmp_path: Path) -> None:
        listed = [True, False, False, True, True, True, False, True]
        more: dict[str, Typed] = {"sliding_window": (U32, 64), "sliding_window_pattern": (ARRAY, (BOOL, listed))}
        assert self.windows(tmp_path, "any", more) == [64 if flag else None for flag in listed]

    def test_period(self, tmp_path: Path) -> None:
        more: dict[str, Typed] = {"sliding_window": (U32, 64), "sliding_window_pattern": (U32, 4)}
        assert self.windows(tmp_path, "any", more) == [64, 64, 64, None] * 2

    @pytest.mark.parametrize("value", [0, 2**32 - 1])
    def test_none(self, tmp_path: Path, value: int) -> None:
        assert self.windows(tmp_path, "gemma2", {"sliding_window": (U32, value)}) == [None] * 8


class TestExperts:
    def file(self, used: int = 2) -> File:
        more: dict[str, Typed] = {"llama.expert_count": (U32, 8), "llama.expert_used_count": (U32, used)}
        experts: dict[str, tuple[str, tuple[int, ...]]] = {}
        for index in range(2):
            experts |= {
                f"blk.{index}.ffn_gate_inp.weight": ("F32", (64, 8)),
                f"blk.{index}.ffn_gate_exps.weight": ("Q8_0", (64, 128, 8)),
                f"blk.{index}.ffn_up_exps.weight": ("Q8_0", (64, 128, 8)),
                f"blk.{index}.ffn_down_exps.weight": ("Q8_0", (128, 64, 8)),
                f"blk.{index}.ffn_up_shexp.weight": ("Q8_0", (64, 128)),
            }
        return with_tensors(llama(more=more), experts, drop="ffn_")

    def test_what_a_token_reads(self, tmp_path: Path) -> None:
        spec = spec_of(tmp_path, self.file())
        layer = spec.layers[0]
        expert = 3 * 64 * 128 * 34 // 32
        assert layer.read_bytes_per_token == layer.weight_bytes - 6 * expert
        matrices = 2 * 64 * 64 + 2 * 64 * 32 + 64 * 8 + 64 * 128 + 2 * 3 * 64 * 128
        assert layer.flops_per_token == 2 * matrices
        assert spec.parameters is not None
        assert spec.active_parameters == spec.parameters - 2 * 6 * 3 * 64 * 128

    def test_all_in_use(self, tmp_path: Path) -> None:
        assert spec_of(tmp_path, self.file(used=8)).layers[0].read_bytes_per_token is None

    @pytest.mark.parametrize("used", [0, 9])
    def test_wrong(self, tmp_path: Path, used: int) -> None:
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_of(tmp_path, self.file(used=used))
        assert caught.value.field == "llama.expert_used_count"


class TestRecurrent:
    def test_state(self, tmp_path: Path) -> None:
        more: dict[str, Typed] = {
            "hybrid.ssm.conv_kernel": (U32, 4),
            "hybrid.ssm.inner_size": (U32, 128),
            "hybrid.ssm.state_size": (U32, 16),
            "hybrid.ssm.group_count": (U32, 2),
            "hybrid.attention.head_count_kv": (ARRAY, (U32, [0, 2])),
        }
        file = llama(architecture="hybrid", more=more)
        spec = spec_of(tmp_path, with_tensors(file, {"blk.0.ssm_in.weight": ("F16", (64, 256))}, drop="blk.0.attn_"))
        first, second = spec.layers
        assert (first.kv_bytes_per_token, second.kv_bytes_per_token) == (0, 128)
        assert first.state_bytes == 4 * (3 * (128 + 2 * 2 * 16) + 16 * 128)
        assert second.state_bytes == 0
        assert "layers.state_bytes" in spec.estimated

    def test_layers_that_draft_are_not_placed(self, tmp_path: Path) -> None:
        spec = spec_of(tmp_path, llama(layers=3, more={"llama.nextn_predict_layers": (U32, 1)}))
        assert spec.layer_count == 2


class TestSplit:
    def files(self, folder: Path, changes: Mapping[str, Typed] | None = None) -> list[Path]:
        whole = llama(layers=4)
        names = list(whole.tensors)
        paths: list[Path] = []
        count = 3
        for number in range(count):
            own = {name: whole.tensors[name] for name in names[number::count]}
            metadata: dict[str, Typed] = dict(whole.metadata) if number == 0 else {}
            metadata |= {
                "split.no": (U16, number),
                "split.count": (U16, count),
                "split.tensors.count": (I32, len(names)),
            }
            if number == 1:
                metadata |= changes or {}
            path = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
            paths.append(write(path, File(metadata, own)))
        return paths

    def test_by_any_of_them(self, tmp_path: Path) -> None:
        whole = spec_of(tmp_path, llama(layers=4))
        for path in self.files(tmp_path):
            assert spec_from_gguf(path) == whole

    def test_missing(self, tmp_path: Path) -> None:
        paths = self.files(tmp_path)
        paths[2].unlink()
        with pytest.raises(WeightsError, match="00003-of-00003"):
            spec_from_gguf(paths[0])

    def test_renamed(self, tmp_path: Path) -> None:
        path = self.files(tmp_path)[0].rename(tmp_path / "other.gguf")
        with pytest.raises(WeightsError, match="name"):
            spec_from_gguf(path)

    @pytest.mark.parametrize("changes", [{"split.no": (U16, 2)}, {"split.count": (U16, 4)}])
    def test_of_another_model(self, tmp_path: Path, changes: dict[str, Typed]) -> None:
        paths = self.files(tmp_path, changes)
        with pytest.raises(WeightsError, match="not file 1 of 3"):
            spec_from_gguf(paths[0])

    def test_same_tensor_twice(self, tmp_path: Path) -> None:
        paths = self.files(tmp_path)
        more: dict[str, Typed] = {"split.no": (U16, 1), "split.count": (U16, 3)}
        write(paths[1], File(more, {"token_embd.weight": ("F16", (64, 100))}))
        with pytest.raises(WeightsError, match="two files"):
            spec_from_gguf(paths[0])

    def test_tensors_are_missing(self, tmp_path: Path) -> None:
        paths = self.files(tmp_path)
        write(paths[1], File({"split.no": (U16, 1), "split.count": (U16, 3)}, {}))
        with pytest.raises(WeightsError, match="should have"):
            spec_from_gguf(paths[0])


class TestWrong:
    @pytest.mark.parametrize(
        ("metadata", "field"),
        [
            ({"general.architecture": None}, "general.architecture"),
            ({"general.architecture": (U32, 1)}, "general.architecture"),
            ({"general.architecture": (STRING, "rwkv7")}, "general.architecture"),
            ({"llama.block_count": None}, "llama.block_count"),
            ({"llama.block_count": (U32, 0)}, "llama.block_count"),
            ({"llama.block_count": (U32, 3)}, "llama.block_count"),
            ({"llama.block_count": (U32, 2**31)}, "llama.block_count"),
            ({"llama.block_count": (F32, 2.0)}, "llama.block_count"),
            ({"llama.block_count": (BOOL, True)}, "llama.block_count"),
            ({"llama.nextn_predict_layers": (U32, 2)}, "llama.block_count"),
            ({"llama.embedding_length": None}, "llama.embedding_length"),
            ({"llama.embedding_length": (U32, 65)}, "llama.embedding_length"),
            ({"llama.attention.head_count": None}, "llama.attention.head_count"),
            ({"llama.attention.head_count": (U32, 5)}, "llama.attention.key_length"),
            ({"llama.attention.head_count": (I32, -4)}, "llama.attention.head_count"),
            ({"llama.attention.head_count_kv": (ARRAY, (U32, [1]))}, "llama.attention.head_count_kv"),
            ({"llama.attention.head_count_kv": (ARRAY, (I32, [1, -1]))}, "llama.attention.head_count_kv"),
            ({"llama.attention.head_count_kv": (ARRAY, (STRING, ["1", "2"]))}, "llama.attention.head_count_kv"),
            ({"llama.attention.head_count_kv": (STRING, "2")}, "llama.attention.head_count_kv"),
        ],
    )
    def test_key_is_named(self, tmp_path: Path, metadata: dict[str, Typed | None], field: str) -> None:
        file = llama()
        changed = {key: value for key, value in {**file.metadata, **metadata}.items() if value is not None}
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_of(tmp_path, File(changed, file.tensors))
        assert caught.value.field == field

    @pytest.mark.parametrize(("drop", "field"), [("token_embd", "embedding_length"), ("blk.1.", "block_count")])
    def test_tensors_that_lack(self, tmp_path: Path, drop: str, field: str) -> None:
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_of(tmp_path, with_tensors(llama(), {}, drop=drop))
        assert caught.value.field == f"llama.{field}"

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match="cannot be read"):
            spec_from_gguf(tmp_path / "none.gguf")
        with pytest.raises(WeightsError, match="regular"):
            spec_from_gguf(tmp_path)
        with pytest.raises(WeightsError, match="NUL"):
            spec_from_gguf("a\0b")

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
    def test_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(WeightsError, match="regular"):
            spec_from_gguf(tmp_path / "pipe.gguf")
