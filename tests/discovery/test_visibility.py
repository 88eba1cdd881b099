"""CUDA_VISIBLE_DEVICES, entry by entry. Expected values: PyTorch's parser and reports of real machines."""

from __future__ import annotations

import pytest

from gpurt.discovery.visibility import cuda_visible

A = "GPU-1a1a1a1a-0000-1111-2222-333333333333"
B = "GPU-2b2b2b2b-0000-1111-2222-444444444444"
MIG = "MIG-5e5e5e5e-0000-1111-2222-777777777777"


@pytest.mark.parametrize(
    ("value", "order"),
    [
        (None, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("", ()),
        ("-1", ()),
        ("none", ()),
        ("void", ()),
        ("all", ()),
        ("NoDevFiles", ()),
        ("0,1", (0, 1)),
        ("1,0", (1, 0)),
        ("0,0", ()),
        ("0,1,1", ()),
        ("0,1,2,3,0", ()),
        ("0,-1,1", (0,)),
        ("0,1,8,2,3", (0, 1)),
        ("8", ()),
        ("0,1,2,3,-1,5,6,7", (0, 1, 2, 3)),
        ("0,1,2,3,-1,0,6,7", (0, 1, 2, 3)),
        ("1gpu2,2ampere", (1, 2)),
        ("0, 1", (0, 1)),
        (" 0, 1", (0, 1)),
        ("+1", (1,)),
        ("0-2", (0,)),
        ("0x1", (0,)),
        ("0,,1", (0,)),
        (",0", ()),
    ],
)
def test_by_index(value: str | None, order: tuple[int, ...]) -> None:
    assert cuda_visible(value, [None] * 8).order == order


@pytest.mark.parametrize(
    ("value", "order"),
    [
        (f"{B},{A}", (1, 0)),
        ("GPU-2b2b,GPU-1a1a1a1a", (1, 0)),
        ("GPU-2B2B2B2B", (1,)),
        (f"{A}, {B}", (0,)),
        (f"{A},{A}", ()),
        ("GPU-3c3c,GPU-1a1a", ()),
        ("GPU-1a1a,GPU-3c3c", (0,)),
        ("GPU-", ()),
        (MIG, (2,)),
        (f"{MIG},{A}", (2,)),
    ],
)
def test_by_uuid(value: str, order: tuple[int, ...]) -> None:
    assert cuda_visible(value, [A, B, MIG]).order == order


@pytest.mark.parametrize("value", ["0,1,1", "0-2", "9", "GPU-dead", f"{A},{A}"])
def test_what_a_person_did_not_mean_is_said(value: str) -> None:
    assert cuda_visible(value, [A, B]).warning


@pytest.mark.parametrize("value", [None, "", "-1", "0", "1,0", A])
def test_what_a_person_did_mean_is_not(value: str | None) -> None:
    assert cuda_visible(value, [A, B]).warning is None
