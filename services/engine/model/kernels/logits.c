// Logits of some states in float32, not rounded: all of them, or those alone that grammars' masks allow, which are
// often a handful of a row's. cpu_decoder.py has the calls.

#include "packed_linear.h"
#include "token_mask.h"

typedef struct {
    const Linear *linear;
    const uint16_t *x;     // [rows, inputs]
    const uint32_t *mask;  // [rows, words], or null
    float *out;            // [rows, outputs]
    int64_t rows, words;
} Product;

INLINE void store_float(void *to, const Linear *linear, int64_t row, int64_t panel, const float *sums) {
    for (int v = 0; v < 2; v++) {
        int64_t column = panel * PANEL + v * LANES, count = linear->outputs - column;
        if (count <= 0) break;
        vfloat x = load(sums, v * LANES, 0);
        if (linear->bias) x += load_some(linear->bias, column, count, 1);
        store_some(to, row * linear->outputs + column, x, count, 0);
    }
}

static int64_t items(void *work, int64_t phase) {
    (void)phase;
    Product *product = work;
    return linear_items(product->linear, product->rows);
}

static void run(void *work, int64_t phase, int64_t item) {
    (void)phase;
    Product *product = work;
    linear_item(product->linear, product->x, product->rows, item, store_float, product->out);
}

void linear_float(const Linear *linear, const uint16_t *x, float *out, int64_t rows, int64_t threads) {
    Product product = {linear, x, 0, out, rows, 0};
    Program program = {&product, 1, items, run};
    run_program(&program, threads);
}

// The mask's bits of a panel's columns.
INLINE uint32_t panel_bits(const Product *product, int64_t row, int64_t panel) {
    int64_t column = panel * PANEL;
    uint32_t word = product->mask[row * product->words + column / MASK_BITS];
    return word >> column % MASK_BITS & UINT32_MAX >> (MASK_BITS - PANEL);
}

INLINE void store_allowed(const Product *product, int64_t row, int64_t panel, const float *sums) {
    uint32_t bits = panel_bits(product, row, panel);
    _Alignas(64) float masked[PANEL];
    for (int i = 0; i < PANEL; i += LANES) store(masked, i, load(sums, i, 0) + mask_addition(bits >> i), 0);
    store_float(product->out, product->linear, row, panel, masked);
}

// Bans the panel's tokens in the rows that may have none of them. Returns how many others there are.
static int64_t ban_rows(const Product *product, int64_t panel) {
    static const _Alignas(64) float zeros[PANEL];
    int64_t count = 0;
    for (int64_t row = 0; row < product->rows; row++) {
        if (panel_bits(product, row, panel)) count++;
        else store_allowed(product, row, panel, zeros);
    }
    return count;
}

// The states of these rows, one after another: where they lie, or gathered from there.
INLINE const uint16_t *states_of(const Product *product, const int64_t *rows, int64_t count, uint16_t *gathered) {
    int64_t inputs = product->linear->inputs;
    if (rows[count - 1] - rows[0] < count) return product->x + rows[0] * inputs;
    for (int64_t i = 0; i < count; i++)
        memcpy(gathered + i * inputs, product->x + rows[i] * inputs, inputs * sizeof *gathered);
    return gathered;
}

static int64_t panels(void *work, int64_t phase) {
    (void)phase;
    return ((Product *)work)->linear->panels;
}

// A panel times the rows that may have one of its tokens, tile by tile.
static void run_allowed(void *work, int64_t phase, int64_t panel) {
    (void)phase;
    const Product *product = work;
    int64_t left = ban_rows(product, panel), tiles = (left + TILE_ROWS - 1) / TILE_ROWS, row = 0;
    uint16_t gathered[TILE_ROWS * product->linear->inputs];  // a few hundred KiB of the stack for the largest models
    for (int64_t tile = 0; tile < tiles; tile++) {
        _Alignas(64) float sums[TILE_ROWS * PANEL];
        int64_t rows[TILE_ROWS] = {0}, count = (left + tiles - tile - 1) / (tiles - tile);
        for (int64_t found = 0; found < count; row++)
            if (panel_bits(product, row, panel)) rows[found++] = row;
        const uint16_t *states = states_of(product, rows, count, gathered);
        multiply_panels(product->linear, states, count, panel, 1, sums, tile, tiles);
        for (int64_t i = 0; i < count; i++) store_allowed(product, rows[i], panel, sums + i * PANEL);
        left -= count;
    }
}

// What the mask allows is computed, to the bit as without it, and nothing else: that is minus infinity. In a row that
// is NaN, so are the tokens that it allows.
void allowed_linear_float(const Linear *linear, const uint16_t *x, const uint32_t *mask, float *out, int64_t rows,
                          int64_t words, int64_t threads) {
    Product product = {linear, x, mask, out, rows, words};
    Program program = {&product, 1, panels, run_allowed};
    run_program(&program, threads);
}
