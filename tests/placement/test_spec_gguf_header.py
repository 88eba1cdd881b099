"""The reader of GGUF headers: right answers on right files, a typed error on everything else."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.ggml_types import GGML_TYPES, WITHDRAWN
from gpurt.placement.gguf_header import KEPT_ELEMENTS, MAX_WALKED_ELEMENTS, GgufArray, GgufHeader, read_gguf_header
from gpurt.placement.spec_gguf import spec_from_gguf
from gpurt.weights import WeightsError
from tests.placement.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    File,
    Typed,
    llama,
    packed,
    size,
    text,
)

HUGE = 2**64 - 1


def parse(raw: bytes) -> GgufHeader:
    return read_gguf_header(io.BytesIO(raw), "some.gguf")


def start(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes, extents: list[int], kind: int = 0, offset: int = 0) -> bytes:
    packed_extents = b"".join(struct.pack("<Q", extent) for extent in extents)
    return text(name) + struct.pack("<I", len(extents)) + packed_extents + struct.pack("<IQ", kind, offset)


class TestRight:
    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize("order", ["<", ">"])
    def test_every_type_of_value(self, version: int, order: str) -> None:
        values: dict[str, Typed] = {
            "u8": (U8, 255),
            "i8": (I8, -128),
            "u16": (U16, 65535),
            "i16": (I16, -32768),
            "u32": (U32, 2**32 - 1),
            "i32": (I32, -(2**31)),
            "f32": (F32, 0.5),
            "yes": (BOOL, True),
            "no": (BOOL, False),
            "text": (STRING, "größe"),
            "empty": (STRING, ""),
            "u64": (U64, HUGE),
            "i64": (I64, -(2**63)),
            "f64": (F64, 1e300),
        }
        header = parse(File(values, order=order, version=version).raw())
        assert header.version == version
        assert dict(header.metadata) == {name: value for name, (_, value) in values.items()}
        assert [type(value) for value in header.metadata.values()] == [type(value) for _, value in values.values()]

    def test_arrays(self) -> None:
        values: dict[str, Typed] = {
            "none": (ARRAY, (U32, [])),
            "numbers": (ARRAY, (I16, [-1, 2])),
            "flags": (ARRAY, (BOOL, [True, False])),
            "texts": (ARRAY, (STRING, ["a", "", "b"])),
            "nested": (ARRAY, (ARRAY, [(U8, [1, 2]), (STRING, ["x"])])),
            "long": (ARRAY, (STRING, ["token"] * (KEPT_ELEMENTS + 1))),
            "long numbers": (ARRAY, (F32, [1.0] * (KEPT_ELEMENTS + 1))),
            "behind": (U8, 7),
        }
        found = parse(File(values).raw()).metadata
        assert found["none"] == GgufArray(0, ())
        assert found["numbers"] == GgufArray(2, (-1, 2))
        assert found["flags"] == GgufArray(2, (True, False))
        assert found["texts"] == GgufArray(3, ("a", "", "b"))
        assert found["nested"] == GgufArray(2, None)
        assert found["long"] == found["long numbers"] == GgufArray(KEPT_ELEMENTS + 1, None)
        assert found["behind"] == 7

    def test_value_that_is_no_text(self) -> None:
        assert parse(start(0, 1) + entry("k", STRING, text(b"\xff"))).metadata["k"] == "\ufffd"

    @pytest.mark.parametrize("kind", GGML_TYPES.values(), ids=lambda kind: kind.name)
    def test_sizes_of_types(self, kind: object) -> None:
        name = getattr(kind, "name")  # noqa: B009
        extents = (768, 3)
        file = File({}, {"t": (name, extents), "u": ("I8", (1,))})
        first, second = parse(file.raw()).tensors
        assert (first.dtype, first.shape, first.size_bytes) == (name, (3, 768), size(name, extents))
        assert second.offset_bytes >= first.offset_bytes + first.size_bytes

    def test_known_sizes(self) -> None:
        bits = {kind.name: kind.bits_per_element for kind in GGML_TYPES.values()}
        expected = {"F16": 16, "Q4_0": 4.5, "Q8_0": 8.5, "Q4_K": 4.5, "Q6_K": 6.5625, "IQ1_S": 1.5625, "MXFP4": 4.25}
        assert {name: bits[name] for name in expected} == expected

    @pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
    def test_places(self, alignment: int) -> None:
        file = File(
            {"general.alignment": (U32, alignment)},
            {"a": ("F32", (3,)), "b": ("F16", (5, 2)), "none": ("F32", (0,)), "scalar": ("F32", ())},
            alignment=alignment,
        )
        raw = file.raw()
        tensors = {tensor.name: tensor for tensor in parse(raw).tensors}
        assert tensors["a"].offset_bytes == len(file.header())
        assert tensors["b"].offset_bytes % alignment == 0
        assert tensors["scalar"].offset_bytes + 4 == len(raw)
        assert tensors["none"].size_bytes == 0

    def test_padding_at_the_end_may_be_missing_or_there(self) -> None:
        raw = File({}, {"a": ("I8", (5,))}).raw()
        assert parse(raw).tensors == parse(raw + bytes(27)).tensors

    def test_nothing(self) -> None:
        assert parse(start()) == GgufHeader(3, 32, {}, ())


class TestWrong:
    @pytest.mark.parametrize(
        ("raw", "says"),
        [
            (b"", "the file has 0"),
            (b"GGU", "the file has 3"),
            (b"GGML" + bytes(40), "begin"),
            (start(version=1), "version 1"),
            (start(version=4), "version 4"),
            (start(version=HUGE >> 32), "version"),
            (start()[:-1], "number of metadata"),
            (start(HUGE, 0), "claims 18,446,744,073,709,551,615 tensors"),
            (start(0, HUGE), "metadata"),
            (start(0, 60_000), "would end"),
            (start(200_000, 0), "would end"),
            (start(0, 1) + struct.pack("<Q", HUGE) + bytes(40), "claims"),
            (start(0, 1) + struct.pack("<Q", 60_000) + bytes(50), "would end"),
            (start(0, 1) + text(b"\xff\xfe") + bytes(40), "UTF-8"),
            (start(0, 1) + entry("k", 13, bytes(8)), "unknown type 13"),
            (start(0, 1) + entry("k", U64, bytes(7)), "would end"),
            (start(0, 1) + entry("k", BOOL, b"\x02"), "neither true nor false"),
            (start(0, 1) + entry("k", STRING, struct.pack("<Q", HUGE)), "would end"),
            (start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", U8, HUGE)), "would end"),
            (start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", STRING, 2**61)), "would end"),
            (start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", 99, 0)), "unknown type 99"),
            (start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", BOOL, 1) + b"\x07"), "neither"),
            (start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 6), "deep"),
            (start(0, 2) + entry("k", U8, b"\1") * 2, "twice"),
            (start(0, 1) + entry("general.alignment", U32, bytes(4)), "alignment"),
            (start(0, 1) + entry("general.alignment", U32, struct.pack("<I", 24)), "power of two"),
            (start(0, 1) + entry("general.alignment", U64, struct.pack("<Q", 1 << 60)), "alignment"),
            (start(0, 1) + entry("general.alignment", STRING, text("32")), "alignment"),
            (start(0, 1) + entry("general.alignment", BOOL, b"\1"), "alignment"),
        ],
    )
    def test_file(self, raw: bytes, says: str) -> None:
        with pytest.raises(WeightsError, match=says) as caught:
            parse(raw)
        assert caught.value.path == "some.gguf"
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize(
        ("tensors", "says"),
        [
            ([info("t", [1] * 5)], "5 extents"),
            ([info("t", [])[:8] + b"t" + struct.pack("<I", 2**32 - 1) + bytes(60)], "extents"),
            ([info("t", [4], kind=4)], "withdrawn"),
            ([info("t", [4], kind=255)], "unknown"),
            ([info("t", [33], kind=2)], "whole blocks"),
            ([info("t", [], kind=2)], "whole blocks"),
            ([info("t", [2**40, 2**40])], "64 bits"),
            ([info("t", [0, 2**63, 2**63])], "64 bits"),
            ([info("t", [2**40])], "the file has"),
            ([info("t", [4], offset=8)], "multiple"),
            ([info("t", [4], offset=32)], "the data before end"),
            ([info("t", [4], offset=2**63)], "the data before end"),
            ([info("t", [4]), info("u", [4])], "inside that of 't'"),
            ([info("t", [16]), info("u", [4], offset=32)], "inside"),
            ([info("t", [4]), info("u", [4], offset=96)], "the data before end"),
            ([info("t", [4]), info("t", [4], offset=32)], "twice"),
        ],
    )
    def test_tensor(self, tensors: list[bytes], says: str) -> None:
        with pytest.raises(WeightsError, match=says) as caught:
            parse(start(len(tensors), 0) + b"".join(tensors) + bytes(128))
        assert caught.value.tensor in ("t", "u")

    @pytest.mark.parametrize("number", WITHDRAWN)
    def test_withdrawn_types_are_named(self, number: int) -> None:
        with pytest.raises(WeightsError, match=WITHDRAWN[number]):
            parse(start(1, 0) + info("t", [256], kind=number) + bytes(4096))

    def test_every_truncation(self) -> None:
        raw = llama(layers=1, vocabulary=10).raw()
        for length in range(len(llama(layers=1, vocabulary=10).header())):
            with pytest.raises(WeightsError):
                parse(raw[:length])
        with pytest.raises(WeightsError, match="truncated"):
            parse(raw[:-1])

    @pytest.mark.parametrize(
        "raw",
        [
            start(262_144, 0) + bytes(1000),
            start(0, 65_536) + bytes(1000),
            start(0, 1) + entry("k", STRING, struct.pack("<Q", 1 << 40)) + bytes(1000),
            start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", U8, 1 << 40)) + bytes(1000),
            start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", STRING, 1 << 30)) + bytes(1000),
            start(1, 0) + info("t", [2**62]) + bytes(1000),
        ],
    )
    def test_no_memory_for_a_count_that_lies(self, raw: bytes) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(WeightsError):
                parse(raw)
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()

    def test_arrays_in_arrays_take_no_long_time(self) -> None:
        inner = struct.pack("<IQ", U8, 0) * 100_000
        raw = start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", ARRAY, 100_000) + inner)
        began = time.perf_counter()
        assert parse(raw).metadata["k"] == GgufArray(100_000, None)
        assert time.perf_counter() - began < 5

    @pytest.mark.parametrize("kind", [STRING, ARRAY])
    def test_more_steps_than_any_vocabulary_takes(self, kind: int, tmp_path: Path) -> None:
        path = tmp_path / "long.gguf"
        with path.open("wb") as file:
            file.write(start(0, 1) + entry("k", ARRAY, struct.pack("<IQ", kind, MAX_WALKED_ELEMENTS + 1)))
            file.truncate(90_000_000)
        with path.open("rb") as file, pytest.raises(WeightsError, match="more than 4,194,304"):
            read_gguf_header(file, str(path))

    def test_header_that_is_too_long(self, tmp_path: Path) -> None:
        path = tmp_path / "long.gguf"
        value = packed(ARRAY, (U8, []))[:4] + struct.pack("<Q", 200_000_000)
        with path.open("wb") as file:
            file.write(start(0, 1) + entry("k", ARRAY, value))
            file.truncate(300_000_000)
        with path.open("rb") as file, pytest.raises(WeightsError, match="longer than"):
            read_gguf_header(file, str(path))


# Fuzz

BASES = [
    llama(layers=1, vocabulary=8).raw(),
    llama(layers=2, vocabulary=8, tied=True, kind="Q8_0").raw(),
    llama(
        layers=2,
        vocabulary=8,
        architecture="gemma3",
        more={
            "gemma3.attention.sliding_window": (U32, 512),
            "gemma3.attention.sliding_window_pattern": (ARRAY, (BOOL, [True, False])),
            "gemma3.attention.head_count_kv": (ARRAY, (U32, [2, 0])),
            "gemma3.expert_count": (U32, 4),
            "gemma3.expert_used_count": (U32, 2),
            "split.count": (U16, 1),
        },
    ).raw(),
    File({"general.architecture": (STRING, "llama"), "n": (ARRAY, (ARRAY, [(U8, [1])]))}, order=">").raw(),
]
_extreme = st.sampled_from([0, 1, 2, 8, 9, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, HUGE])
_bytes = st.one_of(st.binary(min_size=1, max_size=12), _extreme.map(lambda value: struct.pack("<Q", value)))
_edit = st.tuples(st.integers(0, 1 << 16), _bytes, st.integers(0, 8))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file of which bytes were overwritten, put in or taken out, mostly in its header; or only noise behind a start
    that is right."""
    if draw(st.integers(0, 9)) == 0:
        return start(draw(st.integers(0, 3)), draw(st.integers(0, 3))) + draw(st.binary(max_size=200))
    raw = bytearray(draw(st.sampled_from(BASES)))
    for place, data, dropped in draw(st.lists(_edit, max_size=6)):
        at = place % min(len(raw), 2048) if raw else 0
        raw[at : at + (dropped if dropped < 8 else len(data))] = data
    return bytes(raw[: draw(st.integers(0, len(raw)))]) if draw(st.integers(0, 4)) == 0 else bytes(raw)


def survives(raw: bytes, path: Path) -> None:
    path.write_bytes(raw)
    with contextlib.suppress(WeightsError, InvalidPlacementInput):
        spec = spec_from_gguf(path)
        assert sum(layer.weight_bytes for layer in spec.layers) <= len(raw)


_numbers = st.sampled_from([0, 1, 2, 3, 4, 5, 16, 64, 255, 2**16 - 1, 2**31, 2**32 - 1])
_values = st.one_of(
    _numbers.map(lambda value: (U32, value)),
    st.integers(-(2**31), 2**31 - 1).map(lambda value: (I32, value)),
    st.just((U64, HUGE)),
    st.floats(width=32).map(lambda value: (F32, value)),
    st.booleans().map(lambda value: (BOOL, value)),
    st.text(max_size=6).map(lambda value: (STRING, value.encode("utf-8", "replace"))),
    st.lists(st.integers(0, 8), max_size=4).map(lambda value: (ARRAY, (U32, value))),
    st.lists(st.booleans(), max_size=4).map(lambda value: (ARRAY, (BOOL, value))),
)
_keys = st.sampled_from(
    [
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "context_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.key_length_mla",
        "attention.kv_lora_rank",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.shared_kv_layers",
        "rope.dimension_count",
        "expert_count",
        "expert_used_count",
        "nextn_predict_layers",
        "full_attention_interval",
        "ssm.conv_kernel",
        "ssm.inner_size",
        "ssm.state_size",
    ]
)

_fuzz = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "some.gguf"


class TestFuzz:
    @given(raw=damaged())
    @example(raw=b"")
    @example(raw=BASES[0])
    @settings(_fuzz, max_examples=1000)
    def test_only_typed_errors(self, path: Path, raw: bytes) -> None:
        survives(raw, path)

    @pytest.mark.slow
    @given(raw=damaged())
    @settings(_fuzz, max_examples=100_000, derandomize=False)
    def test_only_typed_errors_on_many(self, path: Path, raw: bytes) -> None:
        survives(raw, path)

    @given(changes=st.dictionaries(_keys, _values, max_size=4), recurrent=st.booleans())
    @settings(_fuzz, max_examples=500)
    def test_metadata_of_any_value(self, path: Path, changes: dict[str, Typed], recurrent: bool) -> None:
        file = llama(vocabulary=8, more={f"llama.{key}": value for key, value in changes.items()})
        state = {"blk.1.ssm_in.weight": ("F32", (4,))} if recurrent else {}
        survives(File(file.metadata, {**file.tensors, **state}).raw(), path)

    @pytest.mark.parametrize("base", range(len(BASES)))
    def test_every_byte_of_a_header(self, path: Path, base: int) -> None:
        raw = BASES[base]
        for at in range(0, min(len(raw), 1200), 7):
            for value in (0, 255):
                survives(raw[:at] + bytes([value]) + raw[at + 1 :], path)


def test_another_file_is_told_without_python_s_bytes(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(WeightsError) as caught:
        spec_from_gguf(file)
    assert str(caught.value) == f"{file}: it is no GGUF file: it begins with the bytes 50 4b 03 04, not with GGUF"
