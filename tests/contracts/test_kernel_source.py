"""What the source of a kernel declares, and arguments that do not fit it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.errors import OutOfRange
from gpurt.runtime.kernels import check_arguments, parameters

C = """
#include <stddef.h>
/* scale(int, int) in a comment */
static void helper(float a) { scale_other(a); }
void scale(size_t begin, size_t end, size_t count, float factor, const float *restrict a, double out[]) {
    for (size_t i = begin; i < end && i < count; i++) out[i] = a[i] * factor; // scale(1)
}
"""
CUDA = 'extern "C" __global__ void scale(unsigned long long count, unsigned int n, float* __restrict__ a) { a[n] = 1; }'
OPENCL = "__kernel void scale(__global const float *a, const uint n, ulong m, __local float *scratch) { }"
A, B = object(), object()


def kinds(source: str, skipped: int = 0) -> list[tuple[bool | None, tuple[str, int] | None]] | None:
    found = parameters(source, "scale", skipped)
    return None if found is None else [(each.pointer, each.scalar) for each in found]


def test_declarations() -> None:
    assert kinds(C, 2) == [(False, ("i", 8)), (False, ("f", 4)), (True, None), (True, None)]
    assert kinds(CUDA) == [(False, ("i", 8)), (False, ("i", 4)), (True, None)]
    assert kinds(OPENCL) == [(True, None), (False, ("i", 4)), (False, ("i", 8)), (True, None)]
    assert kinds("void scale(void) {}") == kinds("void scale() {}") == []
    assert kinds("void scale(real x, half3 v) {}") == [(None, None), (None, None)]


@pytest.mark.parametrize(
    "source",
    [
        "void scale(int a);",
        "KERNEL(scale) { }",
        "void scale(int a) {} void scale(float a) {}",
        "void scale(void (*f)(int)) {}",
        "void scale(int a",
        "void scale(int a,) {}",
        "",
    ],
)
def test_what_is_not_certain_is_not_said(source: str) -> None:
    assert kinds(source) is None


def test_arguments_that_do_not_fit() -> None:
    expected = parameters(C, "scale", 2)
    check_arguments("scale", expected, [np.uint64(3), np.float32(2), A, B])
    check_arguments("scale", expected, [np.int64(3), np.float32(2), A, B])  # of one size
    for args, says in (
        ([], "takes 4 arguments, not 0"),
        ([np.uint64(3), np.float32(2), A, B, B], "takes 4 arguments, not 5"),
        ([A, np.float32(2), A, B], "argument 0 of kernel scale is a scalar, 'size_t count'"),
        ([np.uint64(3), np.float32(2), np.uint64(7), B], "argument 2 of kernel scale is memory"),
        ([np.uint32(3), np.float32(2), A, B], "not a numpy.uint32"),
        ([np.uint64(3), np.float64(2), A, B], "'float factor', not a numpy.float64"),
    ):
        with pytest.raises(OutOfRange, match=says):
            check_arguments("scale", expected, args)
    check_arguments("scale", None, [A])


@given(st.text(alphabet="scale(){}*,[] intfloat;/\n\"'x", max_size=80))
def test_any_text_is_read_or_left(source: str) -> None:
    parameters(source, "scale")
    parameters(f"void scale({source}) {{}}", "scale", 2)
