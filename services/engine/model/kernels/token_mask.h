// A grammar's packed mask: services/engine/sampling/token_mask.py has the layout.

#pragma once

#include <math.h>

#include "vectors.h"

enum { MASK_BITS = 32 };  // tokens of a word

// What is added to the logits of LANES tokens: 0 where their bit is set (the first LANES bits), else minus infinity.
// Added, so that NaN stays NaN.
INLINE vfloat mask_addition(uint32_t bits) {
    vuint bit = ((vuint){} + bits) >> (vuint)lane_indices() & 1;
    return choose((vint)(bit == 0), splat(-INFINITY), (vfloat){});
}
