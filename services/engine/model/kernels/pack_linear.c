// Packs a bf16 matrix once, at loading, for the products of packed_linear.h: as it is, or quantized to 8 or 4 bits.

#include <math.h>

#include "team.h"
#include "weight_formats.h"

enum { SCALES_TRIED = 12 };

typedef struct {
    const uint16_t *weights;  // [outputs, inputs]
    char *packed;
    int64_t outputs, inputs, gated, format;
} Packing;

int64_t packed_panels(int64_t outputs, int64_t gated) {
    return gated ? (outputs / 2 + LANES - 1) / LANES : (outputs + PANEL - 1) / PANEL;
}

// How many bytes a packed [outputs, inputs] matrix has.
int64_t packed_size(int64_t outputs, int64_t inputs, int64_t gated, int64_t format) {
    return packed_panels(outputs, gated) * panel_bytes(inputs, (int)format);
}

INLINE vfloat whole_number(vfloat x, int format) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vfloat limit = splat(format == INT4 ? 7.0f : 127.0f), lowest = splat(format == INT4 ? -8.0f : -127.0f);
    x = choose(x > limit, limit, x);
    x = choose(x < lowest, lowest, x);
    return x + rounder - rounder;
}

// For 8 bits the scale under which the largest weight just reaches the limit. For 4 the one for which weight / scale,
// rounded and cut off at the limits, leaves the least squared error, of those around it: for given codes the best scale
// is a quotient of sums, and what it explains of the weights' squares is the larger the better (as llama.cpp searches).
static float best_scale(const uint16_t *weights, int64_t count, int format) {
    float largest = 0;
    vfloat finite = splat(0);
    for (int64_t i = 0; i < count; i += LANES) {
        vfloat w = load_some(weights, i, count - i, 1);
        finite += w * 0.0f;
        float high = horizontal_max(w), low = -horizontal_max(-w);
        if (high > fabsf(largest)) largest = high;
        if (-low > fabsf(largest)) largest = low;
    }
    if (horizontal_sum(finite) != 0) return NAN;  // what is not finite must not pass for a number
    if (fabsf(largest) < 1e-30f) return 0;
    if (format == INT8) return round_to(splat(fabsf(largest) / 127), 1)[0];
    float scale = 0, most_explained = 0;
    for (int i = 0; i < SCALES_TRIED; i++) {
        float inverse = (0.85f + 0.05f * (float)i) * -8 / largest;
        vfloat products = splat(0), squares = splat(0);
        for (int64_t j = 0; j < count; j += LANES) {
            vfloat w = load_some(weights, j, count - j, 1), code = whole_number(w * inverse, format);
            products += w * code;
            squares += code * code;
        }
        float product = horizontal_sum(products), square = horizontal_sum(squares);
        if (square > 0 && product * product / square > most_explained) {
            most_explained = product * product / square;
            scale = product / square;
        }
    }
    return round_to(splat(scale), 1)[0];
}

// One column's codes and scale of one group.
static void quantize_group(const uint16_t *weights, int64_t count, char *codes, int64_t column, uint16_t *scale_out,
                           int format) {
    float scale = best_scale(weights, count, format), inverse = scale == 0 ? 0 : 1 / scale;
    uint32_t scale_bits;
    memcpy(&scale_bits, &scale, 4);
    *scale_out = (uint16_t)(scale_bits >> 16);
    for (int64_t i = 0; i < count; i += LANES) {
        vint code = __builtin_convertvector(whole_number(load_some(weights, i, count - i, 1) * inverse, format), vint);
        for (int64_t lane = 0; lane < LANES && i + lane < count; lane++) {
            int64_t input = i + lane;
            char *pair = codes + input / 2 * pair_bytes(format);
            int32_t number = code[lane];
            if (format == INT8)
                pair[int8_place(column, input % 2)] = (char)(number < 0 ? 128 | (-number & 127) : number & 127);
            else pair[int4_place(column, input % 2)] |= (char)((number + 8 & 15) << (column < LANES ? 0 : 4));
        }
    }
}

static void copy_column(const uint16_t *weights, int64_t count, char *codes, int64_t column) {
    uint16_t *to = (uint16_t *)codes + column * 2;
    for (int64_t input = 0; input < count; input++) to[input / 2 * PANEL * 2 + input % 2] = weights[input];
}

// Where the matrix is gated, the first half of its outputs are gates and the second what they are for: a panel then
// takes LANES columns of each, side by side. The memory is zero before, and stays so where there is no weight.
static void pack_panel(void *work, int64_t phase, int64_t panel) {
    (void)phase;
    const Packing *p = work;
    int64_t half = p->outputs / 2, format = p->format, group = group_inputs(p->inputs, (int)format);
    for (int64_t column = 0; column < PANEL; column++) {
        int64_t output = p->gated ? panel * LANES + column % LANES : panel * PANEL + column;
        if (output >= (p->gated ? half : p->outputs)) continue;
        if (p->gated) output += column / LANES * half;
        for (int64_t first = 0; first < p->inputs; first += group) {
            const uint16_t *weights = p->weights + output * p->inputs + first;
            int64_t count = p->inputs - first < group ? p->inputs - first : group;
            char *codes = p->packed + panel * panel_bytes(p->inputs, (int)format) +
                          first / group * group_bytes(p->inputs, (int)format);
            uint16_t *scale = (uint16_t *)(codes + codes_bytes(p->inputs, (int)format)) + column;
            if (format == BF16) copy_column(weights, count, codes, column);
            if (format == INT8) quantize_group(weights, count, codes, column, scale, INT8);
            if (format == INT4) quantize_group(weights, count, codes, column, scale, INT4);
        }
    }
}

static int64_t packing_items(void *work, int64_t phase) {
    (void)phase;
    const Packing *packing = work;
    return packed_panels(packing->outputs, packing->gated);
}

// weights [outputs, inputs] -> packed, which must be zero.
void pack_linear(const uint16_t *weights, char *packed, int64_t outputs, int64_t inputs, int64_t gated, int64_t format,
                 int64_t threads) {
    Packing packing = {weights, packed, outputs, inputs, gated, format};
    Program program = {&packing, 1, packing_items, pack_panel};
    run_program(&program, threads);
}
