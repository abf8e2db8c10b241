// Vectors of float32 for the kernels beside this file: loads and stores of bf16 and float32, sums, the exponential.
// GNU C vector types, so that gcc and clang map them to whatever the machine has.

#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));

#define INLINE static inline __attribute__((always_inline))

INLINE vfloat splat(float x) { return x - (vfloat){}; }

INLINE vfloat choose(vint condition, vfloat yes, vfloat no) {
    return (vfloat)(((vint)yes & condition) | ((vint)no & ~condition));
}

// `is_bf16` is a constant wherever these are used, so each exported function has one plain path for its type.
INLINE vfloat load(const void *base, int64_t index, int is_bf16) {
    if (is_bf16) {
        vhalf half;
        memcpy(&half, (const uint16_t *)base + index, sizeof half);
        return (vfloat)(__builtin_convertvector(half, vuint) << 16);
    }
    vfloat x;
    memcpy(&x, (const float *)base + index, sizeof x);
    return x;
}

// To the nearest, ties to even; what is too small for a normal number may become zero.
INLINE vfloat round_to(vfloat x, int is_bf16) {
    if (!is_bf16) return x;
#ifdef __AVX512BF16__
    return (vfloat)(__builtin_convertvector((vhalf)_mm512_cvtneps_pbh((__m512)x), vuint) << 16);
#else
    vuint bits = (vuint)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    return choose(x != x, x, (vfloat)bits);
#endif
}

INLINE void store(void *base, int64_t index, vfloat x, int is_bf16) {
    if (is_bf16) {
#ifdef __AVX512BF16__
        vhalf half = (vhalf)_mm512_cvtneps_pbh((__m512)x);
#else
        vhalf half = __builtin_convertvector((vuint)round_to(x, 1) >> 16, vhalf);
#endif
        memcpy((uint16_t *)base + index, &half, sizeof half);
    } else {
        memcpy((float *)base + index, &x, sizeof x);
    }
}

// The last lanes of a row whose length is no multiple of LANES; the lanes beyond it are zero.
INLINE vfloat load_some(const void *base, int64_t index, int64_t count, int is_bf16) {
    if (count >= LANES) return load(base, index, is_bf16);
    if (is_bf16) {
        uint16_t half[LANES] = {0};
        memcpy(half, (const uint16_t *)base + index, count * 2);
        return load(half, 0, 1);
    }
    float x[LANES] = {0};
    memcpy(x, (const float *)base + index, count * 4);
    return load(x, 0, 0);
}

INLINE void store_some(void *base, int64_t index, vfloat x, int64_t count, int is_bf16) {
    if (count >= LANES) {
        store(base, index, x, is_bf16);
        return;
    }
    uint16_t half[LANES];
    float full[LANES];
    if (is_bf16) {
        store(half, 0, x, 1);
        memcpy((uint16_t *)base + index, half, count * 2);
    } else {
        store(full, 0, x, 0);
        memcpy((float *)base + index, full, count * 4);
    }
}

INLINE vint lane_indices(void) {
    vint indices;
    for (int lane = 0; lane < LANES; lane++) indices[lane] = lane;
    return indices;
}

// Lane i of the result is lane indices[i] of a, then b.
INLINE vfloat shuffle(vfloat a, vfloat b, vint indices) {
#ifdef __clang__
    vfloat result;
    for (int lane = 0; lane < LANES; lane++)
        result[lane] = indices[lane] < LANES ? a[indices[lane]] : b[indices[lane] - LANES];
    return result;
#else
    return __builtin_shuffle(a, b, indices);
#endif
}

INLINE float horizontal_sum(vfloat x) {
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += shuffle(x, x, lane_indices() ^ distance);
    return x[0];
}

INLINE float horizontal_max(vfloat x) {
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        vfloat other = shuffle(x, x, lane_indices() ^ distance);
        x = choose(other > x, other, x);
    }
    return x[0];
}

// e^x to about 1 ulp, exactly 1 at 0, 0 below -87.3; NaN stays NaN. Cephes' polynomial on x - n ln 2.
INLINE vfloat exponential(vfloat x) {
    vfloat clamped = choose(x < -87.3f, splat(-87.3f), x);
    clamped = choose(clamped > 88.3f, splat(88.3f), clamped);
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vfloat shifted = clamped * 1.44269504088896341f + rounder;
    vfloat n = shifted - rounder;
    vfloat r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vfloat p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vint exponent = ((vint)shifted - (vint)splat(rounder)) << 23;
    vfloat result = (vfloat)((vint)p + exponent);
    result = choose(x < -87.3f, splat(0), result);
    return choose(x != x, x, result);
}

#ifdef __AVX512DQ__
// 2^x to about 4e-6, exactly 1 at 0, 0 at minus infinity; NaN stays NaN.
INLINE vfloat power_of_2(vfloat x) {
    vfloat f = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    vfloat p = f * 0.0134267f + 0.05224245f;
    p = p * f + 0.24128022f;
    p = p * f + 0.69304484f;
    p = p * f + 1.0f;
    return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)x);
}
#endif

// x / (1 + e^-x); where the result is to be bf16, no more exact than that needs.
INLINE vfloat silu(vfloat x, int is_bf16) {
#ifdef __AVX512DQ__
    if (is_bf16) return x / (1.0f + power_of_2(x * -1.44269504f));
#endif
    (void)is_bf16;
    return x / (1.0f + exponential(-x));
}
