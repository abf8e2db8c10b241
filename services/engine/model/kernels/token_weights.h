// Probabilities as whole numbers: see services/engine/sampling/weights.py, whose PyTorch does the same operations in the
// same order. So both give the same bits, on every processor, as long as no compiler joins a product and a sum into one
// operation: sources that include this are compiled with -ffp-contract=off.

#pragma once

#include <math.h>

#include "vectors.h"

typedef float vfloat_half __attribute__((vector_size(LANES * 2)));
typedef double vdouble __attribute__((vector_size(LANES * 4)));  // half as many lanes

// How far logits lie under the row's maximum, in nats: from minus infinity to 0.
INLINE vfloat depths_of(vfloat logits, float row_max, float temperature) {
    vfloat depths = logits - row_max;
    return temperature == 1.0f ? depths : depths / temperature;
}

// exp(depth) * scale, rounded to a whole number. It never falls as the depth rises.
INLINE vfloat weights_at(vfloat depth, float scale) {
    depth = choose(depth < -64.0f, splat(-64.0f), depth);
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    vfloat octaves = depth * 0x1.715476p+0f;
    vfloat shifted = octaves + rounder;
    vfloat rest = octaves - (shifted - rounder);
    // Whole multiples of 2^-21: steps so small that the rounding of the polynomial could turn them round would let a
    // weight fall as its logit rises.
    rest = (rest + 6.0f) - 6.0f;
    vfloat power = rest * 0x1.5bba14p-10f + 0x1.3cea88p-7f;
    power = power * rest + 0x1.c6b752p-5f;
    power = power * rest + 0x1.ebf9bcp-3f;
    power = power * rest + 0x1.62e42ap-1f;
    power = power * rest + 1.0f;
    vfloat weights = (vfloat)((vuint)power + ((vuint)shifted << 23)) * scale;
    const float whole = 8388608.0f;  // 2^23: from here on there are whole numbers alone
    return choose(weights < whole, (weights + whole) - whole, weights);
}

INLINE vfloat weights_of(vfloat logits, float row_max, float temperature, float scale) {
    return weights_at(depths_of(logits, row_max, temperature), scale);
}

// The last lanes of a row whose length is no multiple of LANES; the lanes beyond it weigh nothing and win nothing.
INLINE vfloat load_logits(const float *logits, int64_t count) {
    if (count >= LANES) return load(logits, 0, 0);
    float padded[LANES];
    for (int lane = 0; lane < LANES; lane++) padded[lane] = lane < count ? logits[lane] : -INFINITY;
    return load(padded, 0, 0);
}

INLINE vdouble low_half(vfloat x) {
    vfloat_half half;
    memcpy(&half, &x, sizeof half);
    return __builtin_convertvector(half, vdouble);
}

INLINE vdouble high_half(vfloat x) {
    vfloat_half half;
    memcpy(&half, (char *)&x + sizeof half, sizeof half);
    return __builtin_convertvector(half, vdouble);
}

// The summed weight of `count` consecutive logits. Sums of whole numbers are exact in any order.
static inline double weigh(const float *logits, int64_t count, float row_max, float temperature, float scale) {
    vdouble low = {0}, high = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        vfloat weights = weights_of(load_logits(logits + i, count - i), row_max, temperature, scale);
        low += low_half(weights);
        high += high_half(weights);
    }
    low += high;
    double sum = 0;
    for (int lane = 0; lane < LANES / 2; lane++) sum += low[lane];
    return sum;
}
