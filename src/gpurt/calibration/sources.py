"""The kernels that measure: reading memory, and multiply-adds in registers.

``read_words`` reads ``count`` words of 16 bytes and writes only what no data gives, so that nothing can be left out.
``multiply_add`` does ``FLOPS`` operations per thread and iteration on eight independent chains, enough for the latency
of any unit. ``multiply_matrices`` is ``mma.sync`` of PTX (compute capability 8.0): 4,096 operations per warp and call,
four independent sums.
"""

from __future__ import annotations

from typing import Final

READ: Final = "read_words"
ADD: Final = "multiply_add"
MATRICES: Final = "multiply_matrices"
WORDS: Final = 16
"""Of each thread of ``read_words``."""
WORD_BYTES: Final = 16
FLOPS: Final = 256
"""Of ``multiply_add``, per thread and iteration, in every language."""
MATRIX_FLOPS: Final = 4 * 4096 // 32
"""Of ``multiply_matrices``, per thread and iteration."""
MATRIX_CAPABILITY: Final = 8
"""First major compute capability with ``mma.sync`` of this shape."""

_C = """
#include <stddef.h>
#include <stdint.h>
void read_words(size_t begin, size_t end, const uint64_t *from, uint64_t *out, uint64_t count) {
    size_t first = begin * 32, last = end * 32, limit = count * 2;
    uint64_t sums[8] = {0}, total = 0;
    if (last > limit) last = limit;
    for (size_t i = first; i + 8 <= last; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += from[i + j];
    for (int j = 0; j < 8; j++) total ^= sums[j];
    if (total == 0x9e3779b97f4a7c15) out[0] = total;
}

/* Eight vectors, and as often as makes 256 operations whatever their width. */
#define CHAINS(NAME, BYTES, TIMES) \\
    static float NAME(size_t threads, unsigned iterations, float start) { \\
        typedef float V __attribute__((vector_size(BYTES))); \\
        V zero = {0}, m = zero + 0.999f, k = zero + 0.001f; \\
        V a = zero + start, b = a + 1, c = a + 2, d = a + 3, e = a + 4, f = a + 5, g = a + 6, h = a + 7; \\
        for (size_t n = threads * iterations * TIMES; n > 0; n--) { \\
            a = a * m + k; b = b * m + k; c = c * m + k; d = d * m + k; \\
            e = e * m + k; f = f * m + k; g = g * m + k; h = h * m + k; \\
        } \\
        a = a + b + c + d + e + f + g + h; \\
        float total = 0; \\
        for (unsigned i = 0; i < BYTES / sizeof(float); i++) total += a[i]; \\
        return total; \\
    }
CHAINS(narrow, 16, 4)
#ifdef __x86_64__
__attribute__((target("avx2,fma"))) CHAINS(wide, 32, 2)
__attribute__((target("avx512f"))) CHAINS(widest, 64, 1)
#endif
void multiply_add(size_t begin, size_t end, float *out, unsigned iterations) {
    float total, start = (float)begin;
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) total = widest(end - begin, iterations, start);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        total = wide(end - begin, iterations, start);
    else
#endif
        total = narrow(end - begin, iterations, start);
    if (total == 1.25e30f) out[0] = total;
}
"""

_CUDA = """
extern "C" __global__ void read_words(const uint4 *from, unsigned int *out, unsigned long long count) {
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int total = 0;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        if (i < count) {
            uint4 word = from[i];
            total += word.x + word.y + word.z + word.w;
        }
        i += stride;
    }
    if (total == 0x9e3779b9u) out[0] = total;
}

extern "C" __global__ void multiply_add(float *out, unsigned int iterations) {
    const float m = 0.999f, k = 0.001f;
    float a = threadIdx.x, b = a + 1, c = a + 2, d = a + 3, e = a + 4, f = a + 5, g = a + 6, h = a + 7;
    for (unsigned int i = 0; i < iterations; i++) {
#pragma unroll
        for (int n = 0; n < 16; n++) {
            a = a * m + k; b = b * m + k; c = c * m + k; d = d * m + k;
            e = e * m + k; f = f * m + k; g = g * m + k; h = h * m + k;
        }
    }
    a = a + b + c + d + e + f + g + h;
    if (a == 1.25e30f) out[0] = a;
}
"""

_MATRICES = """
#define MULTIPLY(C) asm volatile( \\
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \\
    : "+f"(C[0]), "+f"(C[1]), "+f"(C[2]), "+f"(C[3]) : "r"(x), "r"(x), "r"(x), "r"(x), "r"(y), "r"(y))

extern "C" __global__ void multiply_matrices(float *out, unsigned int iterations) {
    unsigned int x = 0x3f803f80u + threadIdx.x, y = 0x3c003c00u;
    float a[4] = {0}, b[4] = {0}, c[4] = {0}, d[4] = {0};
#pragma unroll 4
    for (unsigned int i = 0; i < iterations; i++) {
        MULTIPLY(a); MULTIPLY(b); MULTIPLY(c); MULTIPLY(d);
    }
    float total = a[0] + b[0] + c[0] + d[0] + a[1] + b[1] + c[1] + d[1];
    if (total == 1.25e30f) out[0] = total;
}
"""

_OPENCL = """
__kernel void read_words(__global const uint4 *from, __global uint *out, ulong count) {
    ulong stride = get_global_size(0), i = get_global_id(0);
    uint total = 0;
    for (int n = 0; n < 16; n++) {
        if (i < count) {
            uint4 word = from[i];
            total += word.x + word.y + word.z + word.w;
        }
        i += stride;
    }
    if (total == 0x9e3779b9u) out[0] = total;
}

__kernel void multiply_add(__global float *out, uint iterations) {
    const float m = 0.999f, k = 0.001f;
    float a = (float)get_local_id(0), b = a + 1, c = a + 2, d = a + 3, e = a + 4, f = a + 5, g = a + 6, h = a + 7;
    for (uint i = 0; i < iterations; i++) {
        for (int n = 0; n < 16; n++) {
            a = mad(a, m, k); b = mad(b, m, k); c = mad(c, m, k); d = mad(d, m, k);
            e = mad(e, m, k); f = mad(f, m, k); g = mad(g, m, k); h = mad(h, m, k);
        }
    }
    a = a + b + c + d + e + f + g + h;
    if (a == 1.25e30f) out[0] = a;
}
"""

SOURCES: Final = {"c": _C, "cuda": _CUDA, "hip": _CUDA, "opencl": _OPENCL}
"""Language → text with ``read_words`` and ``multiply_add``."""
MATRIX_SOURCES: Final = {"cuda": _MATRICES}
"""Language → text with ``multiply_matrices``."""
