"""The header parser: right answers on right files, WeightsError on everything else."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpurt.errors import GPUError
from gpurt.weights import DTYPES, Header, WeightsError, parse_header, read_header
from tests.weights.support import document, raw_file, tensor

CONTENT = {
    "a": tensor("F32", 2, 3, seed=1),
    "b.c": tensor("BF16", 4, seed=2),
    "none": tensor("U8", 0, 5),
    "scalar": tensor("I64", seed=3),
}
ENTRIES = document(CONTENT, {"format": "pt"})
DATA = b"".join(data for _, _, data in CONTENT.values())


def parse(raw: bytes) -> Header:
    return read_header(io.BytesIO(raw), "some.safetensors")


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


class TestRight:
    def test_every_field(self) -> None:
        raw = raw_file(ENTRIES, DATA)
        header = parse(raw)
        assert header.metadata == {"format": "pt"}
        assert [tensor.name for tensor in header.tensors] == list(CONTENT)
        for info in header.tensors:
            dtype, shape, data = CONTENT[info.name]
            assert (info.dtype, info.shape, info.size_bytes) == (dtype, shape, len(data))
            assert raw[info.offset_bytes : info.offset_bytes + info.size_bytes] == data

    def test_order_of_data_not_of_names(self) -> None:
        shuffled = {name: ENTRIES[name] for name in ("scalar", "none", "a", "b.c")}
        assert [tensor.name for tensor in parse(raw_file(shuffled, DATA)).tensors] == list(CONTENT)

    def test_no_tensor_and_padding(self) -> None:
        assert parse(raw_file(b"{}")).tensors == ()
        assert parse(raw_file(b"{}      ")).tensors == ()

    def test_descriptor_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(raw_file(ENTRIES, DATA))
        descriptor = os.open(tmp_path / "f", os.O_RDONLY)
        try:
            assert read_header(descriptor, "f") == parse(raw_file(ENTRIES, DATA))
            assert os.fstat(descriptor).st_size  # still open
        finally:
            os.close(descriptor)

    @pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
    def test_sizes_and_numpy_names(self, name: str, dtype: Any) -> None:
        size = 8 * dtype.bits // 8
        header = parse(raw_file(entry(dtype=name, shape=[2, 4], data_offsets=[0, size]), bytes(size)))
        assert header.tensors[0].size_bytes == size
        if dtype.numpy is not None:
            assert np.dtype(dtype.numpy).itemsize * 8 == dtype.bits


class TestWrong:
    @pytest.mark.parametrize(
        ("raw", "says"),
        [
            (b"", "0 bytes"),
            (b"\x01\0\0", "3 bytes"),
            (raw_file(b"{}", length=10 << 30), "10,737,418,240"),
            (raw_file(b"{}", length=2**64 - 1), "18,446,744,073,709,551,615"),
            (raw_file(b"{}", length=99_999_999), "the file has 10 in all"),
            (raw_file(b"{}", length=3), "the file has 10"),
            (raw_file(b""), "begin"),
            (raw_file(b" {}"), "begin"),
            (raw_file(b"[]"), "begin"),
            (raw_file(b"{} x"), "not JSON"),
            (raw_file(b"{\0}"), "not JSON"),
            (raw_file(b'{"\xff": 1}'), "not JSON"),
            (raw_file(b'{"a": NaN}'), "NaN"),
            (raw_file(b'{"a": -Infinity}'), "Infinity"),
            (raw_file(b'{"a": 1' + b"0" * 5000 + b"}"), "not JSON"),
            (raw_file(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "deep"),
            (raw_file(b'{"a": 1, "a": 2}'), "'a' twice"),
            (raw_file(b'{"x": {"dtype": "U8", "dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'), "'dtype' twice"),
            (raw_file({"__metadata__": []}), "__metadata__"),
            (raw_file({"__metadata__": None}), "__metadata__"),
            (raw_file({"__metadata__": {"k": 1}}), "'k'"),
            (raw_file(b'{"__metadata__": {"k": "\\ud800"}}'), "Unicode"),
        ],
    )
    def test_file(self, raw: bytes, says: str) -> None:
        with pytest.raises(WeightsError, match=says) as caught:
            parse(raw)
        assert caught.value.path == "some.safetensors"
        assert "some.safetensors" in str(caught.value)
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize(
        ("header", "says"),
        [
            ({"x": 5}, "not an object"),
            ({"x": None}, "not an object"),
            ({"x": {}}, "must have"),
            ({"x": {"dtype": "U8", "shape": [4]}}, "must have"),
            (entry(extra=1), "extra"),
            (entry(dtype="F33"), "unknown dtype 'F33'"),
            (entry(dtype=["U8"]), "unknown dtype"),
            (entry(dtype="u8"), "unknown dtype"),
            (entry(shape=4), "shape"),
            (entry(shape=[4.0]), "shape"),
            (entry(shape=[True, 4]), "shape"),
            (entry(shape=["4"]), "shape"),
            (entry(shape=[-4]), "shape"),
            (entry(shape=[-2, -2]), "shape"),
            (entry(shape=[2**63]), "shape"),
            (entry(shape=[2**40, 2**40]), "64 bits"),
            (entry(shape=[0, 2**40, 2**40], data_offsets=[0, 0]), "64 bits"),
            (entry(shape=[2**32] * 100_000), "64 bits"),
            (entry(shape=[5]), "needs 5 bytes; its data has 4"),
            (entry(shape=[2]), "needs 2 bytes"),
            (entry(dtype="F32", shape=[4]), "needs 16"),
            (entry(dtype="F4", shape=[3]), "whole byte"),
            (entry(dtype="F6_E2M3", shape=[2]), "whole byte"),
            (entry(data_offsets=[0]), "data_offsets"),
            (entry(data_offsets=[0, 2, 4]), "data_offsets"),
            (entry(data_offsets=[4, 0]), "data_offsets"),
            (entry(data_offsets=[-1, 3]), "data_offsets"),
            (entry(data_offsets=[0, 4.0]), "data_offsets"),
            (entry(data_offsets={"0": 4}), "data_offsets"),
            (entry(data_offsets=[1, 5]), "ends at byte"),
            (entry(shape=[2**40], data_offsets=[0, 2**40]), "ends at byte"),
            (entry() | {"y": entry(data_offsets=[0, 4])["x"]}, "overlaps that of tensor 'x' by 4"),
            (entry(shape=[3], data_offsets=[0, 3]) | {"y": entry(shape=[2], data_offsets=[2, 4])["x"]}, "by 1 bytes"),
            (entry(shape=[1], data_offsets=[3, 4]), "3 bytes before"),
            (entry(shape=[3], data_offsets=[0, 3]), "last 1 bytes"),
            ({}, "last 4 bytes"),
        ],
    )
    def test_tensor(self, header: Any, says: str) -> None:
        with pytest.raises(WeightsError, match=says) as caught:
            parse(raw_file(header, bytes(4)))
        assert caught.value.tensor in ({"x", "y"} if "last" not in says else {None})
        assert len(str(caught.value)) < 500

    def test_name_that_no_text_can_hold(self) -> None:
        with pytest.raises(WeightsError, match="Unicode"):
            parse(raw_file(b'{"\\udc00": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}', bytes(4)))

    def test_long_names_stay_out_of_the_message(self) -> None:
        with pytest.raises(WeightsError) as caught:
            parse(raw_file({"n" * 10_000: {"v": "w" * 10_000}}))
        assert len(str(caught.value)) < 500
        assert caught.value.tensor == "n" * 10_000

    def test_file_that_ends_while_it_is_read(self) -> None:
        class Shrinking(io.BytesIO):
            def seek(self, offset: int, whence: int = 0) -> int:
                return super().seek(offset, whence) + (100 if whence == os.SEEK_END else 0)

        with pytest.raises(WeightsError, match="ended"):
            read_header(Shrinking(raw_file(b"{}", length=50)), "f")

    def test_error_is_a_gpurt_error_and_survives_pickling(self) -> None:
        error = WeightsError("wrong", path="f", tensor="t", hint="h")
        assert isinstance(error, GPUError)
        assert isinstance(error, ValueError)
        assert str(error) == "f: tensor 't': wrong (h)"
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.path, again.tensor) == (str(error), "f", "t")


class TestAgainstTheReference:
    """Beside the ``safetensors`` library."""

    def test_files_that_it_writes(self, tmp_path: Path) -> None:
        library = pytest.importorskip("safetensors.numpy")
        arrays = {
            f"layer.{number}.{dtype.numpy}": np.arange(number).astype(dtype.numpy).reshape(1, -1)
            for number in range(4)
            for dtype in DTYPES.values()
            if dtype.numpy is not None and dtype.numpy != "complex64"
        }
        path = tmp_path / "f"
        library.save_file(arrays, path, metadata={"k": "värde", "": "x"})
        raw = path.read_bytes()
        header = parse(raw)
        assert header.metadata == {"k": "värde", "": "x"}
        assert {info.name for info in header.tensors} == set(arrays)
        for info in header.tensors:
            dtype = DTYPES[info.dtype].numpy
            assert dtype is not None
            data = raw[info.offset_bytes : info.offset_bytes + info.size_bytes]
            np.testing.assert_array_equal(np.frombuffer(data, dtype).reshape(info.shape), arrays[info.name])

    def test_dtypes_are_its_dtypes(self) -> None:
        library = pytest.importorskip("safetensors")
        with pytest.raises(library.SafetensorError) as caught:
            library.deserialize(raw_file(entry(dtype="?"), bytes(4)))
        known = str(caught.value).split("expected one of")[1].split(" at line")[0]
        assert {name.strip(" `") for name in known.split(",")} == set(DTYPES)

    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    def test_mutated_bytes(self, data: st.DataObject) -> None:
        raw = bytearray(raw_file(ENTRIES, DATA))
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(raw) - 1))
            with_bytes = data.draw(
                st.binary(max_size=3) | st.sampled_from(list(b'"{}[]:,-0189. ')).map(lambda b: bytes([b]))
            )
            raw[at : at + data.draw(st.integers(0, 3))] = with_bytes
        self._agree(bytes(raw))

    values = st.recursive(
        st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats(allow_nan=False) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=4,
    )
    numbers = st.integers(0, 20) | st.sampled_from([2**31, 2**62, 2**63, 2**64])
    fields = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*DTYPES, "X"]) | values,
            "shape": st.lists(numbers, max_size=3) | values,
            "data_offsets": st.tuples(numbers, numbers) | values,
        }
    )

    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        header=st.dictionaries(st.text(max_size=3), fields | values, max_size=3),
        kept=st.sets(st.sampled_from(list(CONTENT))),
        size=st.integers(0, 60),
    )
    @example(header={}, kept=set(CONTENT), size=len(DATA))
    def test_mutated_structure(self, header: dict[str, Any], kept: set[str], size: int) -> None:
        self._agree(raw_file({**header, **{name: ENTRIES[name] for name in sorted(kept)}}, bytes(size)))

    @settings(max_examples=200, deadline=None)
    @given(
        shapes=st.lists(
            st.tuples(
                st.sampled_from([d for d in DTYPES if DTYPES[d].bits >= 8]), st.lists(st.integers(0, 4), max_size=3)
            ),
            max_size=6,
        ),
        order=st.randoms(use_true_random=False),
    )
    def test_right_files_are_accepted(self, shapes: list[tuple[str, list[int]]], order: Any) -> None:
        entries = document({str(i): tensor(dtype, *shape) for i, (dtype, shape) in enumerate(shapes)})
        size = max((each["data_offsets"][1] for each in entries.values()), default=0)
        names = list(entries)
        order.shuffle(names)
        raw = raw_file({name: entries[name] for name in names}, bytes(size))
        assert len(parse(raw).tensors) == len(shapes)
        self._agree(raw)

    def _agree(self, raw: bytes) -> None:
        """Refused, or accepted by the reference too and with the same tensors."""
        library = pytest.importorskip("safetensors")
        try:
            header = parse(raw)
        except WeightsError:
            return
        theirs = {
            name: (each["dtype"], tuple(each["shape"]), bytes(each["data"])) for name, each in library.deserialize(raw)
        }
        ours = {
            info.name: (info.dtype, info.shape, raw[info.offset_bytes : info.offset_bytes + info.size_bytes])
            for info in header.tensors
        }
        assert ours == theirs


def test_document_alone() -> None:
    text = json.dumps(ENTRIES).encode()
    assert parse_header(text, 8 + len(text) + len(DATA), "f") == parse(raw_file(ENTRIES, DATA))
