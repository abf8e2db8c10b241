// A decoder's whole step on a CPU in bf16: from the tokens' embeddings to the states that logits are made of, in one
// call and by one set of threads. decoder.py has the same operation by operation; cpu_decoder.py the call.
//
// Between two PyTorch operations another Python thread may take the interpreter, and a core, for milliseconds; within
// this call none can. Each row's result depends on that row and its sequence alone: neither the batch nor the threads
// nor the cut of a prompt into chunks changes a bit of it.

#include "decoder_rows.h"
#include "packed_linear.h"
#include "paged_attention.h"
#include "team.h"

enum {
    ROWS_OF_ITEM = 8,   // of what is done row by row
    ROTATED_ROWS = 16,  // neighbouring positions share cache lines of the pool, which threads should not both write
};

// A layer's phases, one after another.
enum { NORM_1, QKV, ROTATE, ATTEND, SELECT, OUTPUT, NORM_2, GATE_UP, DOWN, PHASES };

typedef struct {
    const void *attention_norm, *query_norm, *key_norm, *mlp_norm;  // [hidden], [head_dim] or null twice, [hidden]
    Linear qkv, output, gate_up, down;                              // gate_up: see pack_linear
    void *keys, *values;  // [blocks, block_size, kv_heads, head_dim]
    int64_t window;
} Layer;

typedef struct {
    const Layer *layers;
    const void *norm;       // [hidden]
    const float *cos, *sin;  // [positions, head_dim / 2]
    int64_t num_layers, hidden;
    float epsilon;
    // The batch: Attention's fields, and
    const int64_t *positions, *slots;  // [rows]
    int64_t rows;
    const int64_t *selected;  // [num_selected]: the rows whose states are wanted
    int64_t num_selected;
    // [rows, …] each; the residual holds the embeddings at first
    uint16_t *residual, *normed, *qkv, *query, *attended, *activated;
    uint16_t *selected_residual;  // [num_selected, hidden]
    uint16_t *out;                // [num_selected, hidden]
    Attention attention;
} Step;

INLINE int64_t row_items(int64_t rows, int64_t rows_of_item) { return (rows + rows_of_item - 1) / rows_of_item; }
INLINE int64_t item_end(int64_t item, int64_t rows, int64_t rows_of_item) {
    int64_t end = (item + 1) * rows_of_item;
    return end < rows ? end : rows;
}

INLINE void store_rounded(void *to, const Linear *linear, int64_t row, int64_t panel, const float *sums) {
    for (int v = 0; v < 2; v++) {
        int64_t column = panel * PANEL + v * LANES, count = linear->outputs - column;
        if (count <= 0) break;
        store_some(to, row * linear->outputs + column, panel_output(linear, column, count, sums, v), count, 1);
    }
}

INLINE void add_to_residual(void *residual, const Linear *linear, int64_t row, int64_t panel, const float *sums) {
    for (int v = 0; v < 2; v++) {
        int64_t column = panel * PANEL + v * LANES, count = linear->outputs - column;
        if (count <= 0) break;
        int64_t at = row * linear->outputs + column;
        vfloat sum = load_some(residual, at, count, 1) + panel_output(linear, column, count, sums, v);
        store_some(residual, at, sum, count, 1);
    }
}

// A panel's first vector are gates, its second the values beside them.
INLINE void silu_and_multiply_panel(void *to, const Linear *linear, int64_t row, int64_t panel, const float *sums) {
    int64_t inner = linear->outputs / 2, column = panel * LANES, count = inner - column;
    if (count <= 0) return;
    vfloat gate = load(sums, 0, 0), up = load(sums, LANES, 0);
    if (linear->bias) {
        gate += load_some(linear->bias, column, count, 1);
        up += load_some(linear->bias, inner + column, count, 1);
    }
    vfloat activated = round_to(silu(round_to(gate, 1), 1), 1);
    store_some(to, row * inner + column, activated * round_to(up, 1), count, 1);
}

// From the last layer's attention on, only the selected rows count.
INLINE int is_narrow(const Step *step, int64_t layer, int64_t phase) {
    return layer == step->num_layers - 1 && phase >= SELECT;
}

static int64_t items(void *work, int64_t phase) {
    Step *step = work;
    int64_t index = phase / PHASES;
    phase %= PHASES;
    if (index == step->num_layers) return phase == 0 ? row_items(step->num_selected, ROWS_OF_ITEM) : 0;
    const Layer *layer = &step->layers[index];
    int64_t rows = is_narrow(step, index, phase) ? step->num_selected : step->rows;
    switch (phase) {
        case QKV: return linear_items(&layer->qkv, rows);
        case ROTATE: return row_items(rows, ROTATED_ROWS);
        case ATTEND:
            step->attention.keys = layer->keys;
            step->attention.values = layer->values;
            step->attention.window = layer->window;
            return attention_items(&step->attention);
        case SELECT: return is_narrow(step, index, phase) ? row_items(rows, ROWS_OF_ITEM) : 0;
        case OUTPUT: return linear_items(&layer->output, rows);
        case GATE_UP: return linear_items(&layer->gate_up, rows);
        case DOWN: return linear_items(&layer->down, rows);
        default: return row_items(rows, ROWS_OF_ITEM);
    }
}

INLINE void norm_rows(const Step *step, const void *residual, const void *weight, void *out, int64_t item,
                      int64_t rows) {
    for (int64_t row = item * ROWS_OF_ITEM; row < item_end(item, rows, ROWS_OF_ITEM); row++)
        rms_norm_row(residual, row * step->hidden, weight, out, row * step->hidden, step->hidden, step->epsilon, 1);
}

static void run_item_of(Step *step, int64_t phase, int64_t item) {
    const Attention *a = &step->attention;
    int64_t index = phase / PHASES;
    phase %= PHASES;
    if (index == step->num_layers) {
        norm_rows(step, step->selected_residual, step->norm, step->out, item, step->num_selected);
        return;
    }
    const Layer *layer = &step->layers[index];
    int narrow = is_narrow(step, index, phase);
    int64_t rows = narrow ? step->num_selected : step->rows;
    int64_t attended = a->q_heads * a->head_dim;
    uint16_t *residual = narrow ? step->selected_residual : step->residual;
    switch (phase) {
        case NORM_1: norm_rows(step, residual, layer->attention_norm, step->normed, item, rows); break;
        case QKV: linear_item(&layer->qkv, step->normed, rows, item, store_rounded, step->qkv); break;
        case ROTATE:
            for (int64_t row = item * ROTATED_ROWS; row < item_end(item, rows, ROTATED_ROWS); row++)
                rotate_and_store_row(step->qkv, row, step->positions, step->slots, step->cos, step->sin,
                                     layer->query_norm, layer->key_norm, step->epsilon, step->query, layer->keys,
                                     layer->values, a->q_heads, a->kv_heads, a->head_dim, 1, a->interleaved != 0);
            break;
        case ATTEND:
            attend_item_bf16(a, item);
            break;
        case SELECT:
            for (int64_t i = item * ROWS_OF_ITEM; i < item_end(item, rows, ROWS_OF_ITEM); i++) {
                int64_t row = step->selected[i];
                memcpy(step->selected_residual + i * step->hidden, step->residual + row * step->hidden,
                       step->hidden * 2);
                memcpy(step->query + i * attended, step->attended + row * attended, attended * 2);
            }
            break;
        case OUTPUT:
            linear_item(&layer->output, narrow ? step->query : step->attended, rows, item, add_to_residual, residual);
            break;
        case NORM_2: norm_rows(step, residual, layer->mlp_norm, step->normed, item, rows); break;
        case GATE_UP:
            linear_item(&layer->gate_up, step->normed, rows, item, silu_and_multiply_panel, step->activated);
            break;
        case DOWN: linear_item(&layer->down, step->activated, rows, item, add_to_residual, residual); break;
    }
}

#ifdef PROFILE_PHASES  // compiled so by benchmarks of loadtest alone
#include <stdatomic.h>
#include <time.h>

static _Atomic int64_t phase_nanoseconds[PHASES];  // of all threads together

void take_phase_nanoseconds(int64_t out[PHASES]) {
    for (int phase = 0; phase < PHASES; phase++) out[phase] = atomic_exchange(&phase_nanoseconds[phase], 0);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static void run(void *work, int64_t phase, int64_t item) {
    int64_t began = now();
    run_item_of(work, phase, item);
    atomic_fetch_add(&phase_nanoseconds[phase % PHASES], now() - began);
}
#else
static void run(void *work, int64_t phase, int64_t item) { run_item_of(work, phase, item); }
#endif

void decoder_step(Step *step, int64_t threads) {
    Program program = {step, (step->num_layers + 1) * PHASES, items, run};
    run_program(&program, threads);
}
