// Products of a few or many rows with a matrix that was packed once (weight_formats.h), in float32.
//
// Pairs of bf16 inputs are what bf16 dot products take (AVX-512 BF16), and what a processor without them widens in two
// steps. Each output is one sum over the pairs in their order, so a row's result does not change by a bit with the rows
// beside it.

#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "team.h"
#include "weight_formats.h"

#if defined(__AVX512BF16__)
enum { TILE_ROWS = 14 };  // 28 of 32 registers hold sums
#elif defined(__AVX512F__)
enum { TILE_ROWS = 12 };
#else
enum { TILE_ROWS = 4 };
#endif

enum {
    WIDE_ROWS = TILE_ROWS / 2,  // up to so many rows, a tile takes two panels: fewer sums would wait for each other
    ROWS_AT_ONCE = 18 * TILE_ROWS,
    PREFETCH_BYTES = 6144,
};

typedef struct {
    const char *weights;   // packed
    const uint16_t *bias;  // [outputs], or null
    int64_t inputs, outputs, panels, format;
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

// `rows` rows of x [rows, inputs] times `panels` neighbouring panels -> sums [rows, panels * PANEL]. Rows, panels and
// format are constants wherever this is inlined. `ahead` is fetched into the cache meanwhile, `ahead_step` bytes a pair.
INLINE void multiply_tile(const uint16_t *x, int64_t inputs, const char *weights, float *sums, int rows, int panels,
                          int format, const char *ahead, int64_t ahead_step) {
    int64_t panel_step = panel_bytes(inputs, format), group = group_inputs(inputs, format);
    for (int64_t first = 0; first < inputs; first += group) {
        const char *codes = weights + first / group * group_bytes(inputs, format);
        const char *scales = codes + codes_bytes(inputs, format);
        int64_t end = format == INT4 && first + group < inputs ? first + group : inputs;
        vfloat tile[TILE_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2 * panels; v++) tile[r][v] = splat(0);
        vuint columns[4];
        for (int64_t input = first; input + 1 < end; input += 2) {
            for (int p = 0; p < panels; p++) {
                __builtin_prefetch(ahead + p * panel_step);
                if (format == BF16) __builtin_prefetch(ahead + p * panel_step + 64);
                load_columns(codes + p * panel_step, columns + 2 * p, format);
            }
            codes += pair_bytes(format);
            ahead += ahead_step;
            for (int r = 0; r < rows; r++) {
                uint32_t two;
                memcpy(&two, x + r * inputs + input, sizeof two);
                for (int v = 0; v < 2 * panels; v++) tile[r][v] = add_product(tile[r][v], columns[v], two);
            }
        }
        if (end % 2) {  // the last pair is one: whatever weight is beside it is multiplied by zero
            for (int p = 0; p < panels; p++) load_columns(codes + p * panel_step, columns + 2 * p, format);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < 2 * panels; v++)
                    tile[r][v] = add_product(tile[r][v], columns[v], x[r * inputs + inputs - 1]);
        }
        // A group's sums are multiplied by its scales, and added to those of the groups before it, in one way for all:
        // a first group that is not added to zero may be rounded once more than others.
        for (int v = 0; v < 2 * panels; v++) {
            vfloat scale = splat(1);
            if (format != BF16) scale = load(scales + v / 2 * panel_step, v % 2 * LANES, 1);
            for (int r = 0; r < rows; r++) {
                int64_t at = r * panels * PANEL + v * LANES;
                vfloat before = first == 0 ? splat(0) : load(sums, at, 0);
                store(sums, at, format == BF16 ? tile[r][v] : before + tile[r][v] * scale, 0);
            }
        }
    }
}

#define TILE(rows, panels, format)                                                                                     \
    case rows:                                                                                                         \
        if (rows * panels <= TILE_ROWS)                                                                                \
            multiply_tile(x, inputs, weights, sums, rows * panels <= TILE_ROWS ? rows : 1, panels, format, ahead,      \
                          ahead_step);                                                                                 \
        break;
#define TILES_TO_7(panels, format)                                                                                     \
    TILE(1, panels, format) TILE(2, panels, format) TILE(3, panels, format) TILE(4, panels, format)                    \
    TILE(5, panels, format) TILE(6, panels, format) TILE(7, panels, format)
#define TILES_TO_14(format)                                                                                            \
    TILES_TO_7(1, format) TILE(8, 1, format) TILE(9, 1, format) TILE(10, 1, format) TILE(11, 1, format)                \
    TILE(12, 1, format) TILE(13, 1, format) TILE(14, 1, format)
#define MULTIPLY(format)                                                                                               \
    static inline void multiply_##format(const uint16_t *x, int64_t inputs, const char *weights, float *sums,          \
                                         int64_t rows, int64_t panels, const char *ahead, int64_t ahead_step) {        \
        if (panels == 2) switch (rows) { TILES_TO_7(2, format) }                                                       \
        else switch (rows) { TILES_TO_14(format) }                                                                     \
    }

MULTIPLY(BF16)
MULTIPLY(INT8)
MULTIPLY(INT4)

INLINE int64_t panels_of_item(int64_t rows) { return rows <= WIDE_ROWS ? 2 : 1; }
// Parts of the rows that stay in a core's cache while panels pass by.
INLINE int64_t row_parts(int64_t rows) { return (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; }

// What is done with the sums of one row and one panel.
typedef void (*Finish)(void *to, const Linear *linear, int64_t row, int64_t panel, const float *sums);

INLINE int64_t linear_items(const Linear *linear, int64_t rows) {
    int64_t panels = panels_of_item(rows);
    return rows == 0 ? 0 : (linear->panels + panels - 1) / panels * row_parts(rows);
}

// One of `tiles` tiles of rows times `width` panels from `panel` on -> sums [rows, width * PANEL]. The tiles of a panel
// follow each other in one thread.
INLINE void multiply_panels(const Linear *linear, const uint16_t *x, int64_t rows, int64_t panel, int64_t width,
                            float *sums, int64_t tile, int64_t tiles) {
    int64_t inputs = linear->inputs;
    int format = (int)linear->format;
    int64_t size = panel_bytes(inputs, format), step = pair_bytes(format);
    const char *weights = linear->weights + panel * size, *ahead = weights + PREFETCH_BYTES;
    if (tiles > 1) {
        // One tile alone would wait for memory, and the others find its panel in the cache: each of them fetches its
        // part of the next panel, which this thread is likely to take next.
        ahead = weights + width * size + size * tile / tiles;
        step = (step + tiles - 1) / tiles;
    }
    if (format == BF16) multiply_BF16(x, inputs, weights, sums, rows, width, ahead, step);
    if (format == INT8) multiply_INT8(x, inputs, weights, sums, rows, width, ahead, step);
    if (format == INT4) multiply_INT4(x, inputs, weights, sums, rows, width, ahead, step);
}

// One item of x [rows, inputs] times the matrix: those of one part of the rows are neighbours. `finish` is a constant
// wherever this is inlined.
INLINE void linear_item(const Linear *linear, const uint16_t *x, int64_t rows, int64_t item, Finish finish, void *to) {
    _Alignas(64) float sums[TILE_ROWS * 2 * PANEL];
    int64_t width = panels_of_item(rows), parts = row_parts(rows), panels = (linear->panels + width - 1) / width;
    int64_t part = item / panels, panel = item % panels * width;
    if (width == 2 && panel + 1 == linear->panels) width = 1;
    int64_t row = rows * part / parts, end = rows * (part + 1) / parts;
    int64_t tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t count = (end - row + tiles - tile - 1) / (tiles - tile);
        multiply_panels(linear, x + row * linear->inputs, count, panel, width, sums, tile, tiles);
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
