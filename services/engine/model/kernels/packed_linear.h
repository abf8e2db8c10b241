// Products of a few or many rows with a bf16 matrix that was packed once, in float32.
//
// A panel of PANEL columns lies together, pairs of inputs one after another: [panels][pairs][PANEL][2]. That is what
// bf16 dot products take (AVX-512 BF16), and what a processor without them widens in two steps. Each output is one sum
// over the pairs in their order, so a row's result does not change by a bit with the rows beside it.

#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "vectors.h"

#if defined(__AVX512BF16__)
enum { TILE_ROWS = 14 };  // 28 of 32 registers hold sums
#elif defined(__AVX512F__)
enum { TILE_ROWS = 12 };
#else
enum { TILE_ROWS = 4 };
#endif

enum {
    PANEL = 2 * LANES,
    WIDE_ROWS = TILE_ROWS / 2,  // up to so many rows, a tile takes two panels: fewer sums would wait for each other
    ROWS_AT_ONCE = 18 * TILE_ROWS,
    PREFETCH_BYTES = 2048,
};

typedef struct {
    const uint16_t *weights;  // packed
    const uint16_t *bias;     // [outputs], or null
    int64_t inputs, outputs, panels;
} Linear;

INLINE vfloat add_product(vfloat sum, vuint weights, uint32_t x) {
#ifdef __AVX512BF16__
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int32_t)x));
#else
    uint32_t low = x << 16, high = x & 0xffff0000;
    float first, second;
    memcpy(&first, &low, 4);
    memcpy(&second, &high, 4);
    sum += (vfloat)(weights << 16) * first;
    return sum + (vfloat)(weights & 0xffff0000) * second;
#endif
}

// `rows` rows of x [rows, inputs] times `panels` neighbouring panels -> sums [rows, panels * PANEL]. Rows and panels
// are constants wherever this is inlined.
INLINE void multiply_tile(const uint16_t *x, int64_t inputs, const uint16_t *weights, float *sums, int rows,
                          int panels) {
    vfloat tile[TILE_ROWS][4];
    int64_t panel_size = (inputs + 1) / 2 * 2 * PANEL;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2 * panels; v++) tile[r][v] = splat(0);
    int64_t pairs = inputs / 2;
    for (int64_t pair = 0; pair < pairs; pair++) {
        vuint columns[4];
        for (int v = 0; v < 2 * panels; v++) {
            const uint16_t *at = weights + v / 2 * panel_size + (pair * 2 + v % 2) * 2 * LANES;
            __builtin_prefetch((const char *)at + PREFETCH_BYTES);
            memcpy(&columns[v], at, sizeof columns[v]);
        }
        for (int r = 0; r < rows; r++) {
            uint32_t two;
            memcpy(&two, x + r * inputs + pair * 2, sizeof two);
            for (int v = 0; v < 2 * panels; v++) tile[r][v] = add_product(tile[r][v], columns[v], two);
        }
    }
    if (inputs % 2)  // the last pair is one, and the weights beside it are zero
        for (int v = 0; v < 2 * panels; v++) {
            vuint columns;
            memcpy(&columns, weights + v / 2 * panel_size + (pairs * 2 + v % 2) * 2 * LANES, sizeof columns);
            for (int r = 0; r < rows; r++)
                tile[r][v] = add_product(tile[r][v], columns, x[r * inputs + inputs - 1]);
        }
    for (int r = 0; r < rows; r++)
        memcpy(sums + r * panels * PANEL, tile[r], 2 * panels * sizeof(vfloat));
}

#define TILE(rows)                                                                                                     \
    case rows:                                                                                                         \
        if (rows <= TILE_ROWS) multiply_tile(x, inputs, weights, sums, rows <= TILE_ROWS ? rows : 1, 1);               \
        break;
#define WIDE_TILE(rows)                                                                                                \
    case rows:                                                                                                         \
        if (rows <= WIDE_ROWS) multiply_tile(x, inputs, weights, sums, rows <= WIDE_ROWS ? rows : 1, 2);               \
        break;

static inline void multiply(const uint16_t *x, int64_t inputs, const uint16_t *weights, float *sums, int64_t rows) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13)
        TILE(14)
    }
}

static inline void multiply_wide(const uint16_t *x, int64_t inputs, const uint16_t *weights, float *sums,
                                 int64_t rows) {
    switch (rows) {
        WIDE_TILE(1) WIDE_TILE(2) WIDE_TILE(3) WIDE_TILE(4) WIDE_TILE(5) WIDE_TILE(6) WIDE_TILE(7)
    }
}

INLINE int64_t panels_of_item(int64_t rows) { return rows <= WIDE_ROWS ? 2 : 1; }
INLINE int64_t row_parts(int64_t rows) { return (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; }

// What is done with the sums of one row and one panel.
typedef void (*Finish)(void *to, const Linear *linear, int64_t row, int64_t panel, const float *sums);

INLINE int64_t linear_items(const Linear *linear, int64_t rows) {
    int64_t panels = panels_of_item(rows);
    return rows == 0 ? 0 : (linear->panels + panels - 1) / panels * row_parts(rows);
}

// One item of x [rows, inputs] times the matrix. `finish` is a constant wherever this is inlined.
INLINE void linear_item(const Linear *linear, const uint16_t *x, int64_t rows, int64_t item, Finish finish, void *to) {
    _Alignas(64) float sums[TILE_ROWS * 2 * PANEL];
    int64_t inputs = linear->inputs, width = panels_of_item(rows);
    int64_t parts = row_parts(rows), part = item % parts, panel = item / parts * width;
    const uint16_t *weights = linear->weights + panel * ((inputs + 1) / 2 * 2 * PANEL);
    if (width == 2 && panel + 1 == linear->panels) width = 1;
    int64_t row = rows * part / parts, end = rows * (part + 1) / parts;
    int64_t tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t count = (end - row + tiles - tile - 1) / (tiles - tile);
        if (width == 2) multiply_wide(x + row * inputs, inputs, weights, sums, count);
        else multiply(x + row * inputs, inputs, weights, sums, count);
        for (int64_t r = 0; r < count; r++)
            for (int64_t p = 0; p < width; p++)
                finish(to, linear, row + r, panel + p, sums + (r * width + p) * PANEL);
        row += count;
    }
}

// Vector v of a panel's sums, with the bias, rounded to bf16 as a matrix product in bf16 is.
INLINE vfloat panel_output(const Linear *linear, int64_t column, int64_t count, const float *sums, int v) {
    vfloat x = load(sums, v * LANES, 0);
    if (linear->bias) x += load_some(linear->bias, column, count, 1);
    return round_to(x, 1);
}
