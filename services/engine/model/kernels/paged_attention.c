// Attention over the paged KV cache on a CPU, for prefills, decodes and any mix of them: one pass over a sequence's
// keys and values with an online softmax (Milakov and Gimelshein, 2018; as in FlashAttention, Dao et al., 2022).
// attention.py has the same in PyTorch, and the call.
//
// A tile's keys begin at multiples of its size in positions, and every row adds them up in the order of positions. So a
// row's result does not change by a bit with the batch, the threads, the cut of a prompt into chunks, or where blocks
// lie.

#include <math.h>

#include "paged_attention.h"
#include "vectors.h"

#ifdef __AVX512BF16__
#include "attention_dot.h"
#endif

enum {
    KEYS = 2 * LANES,    // keys of one tile; DOT_KEYS where dot products are used
    ROWS = 4,            // query rows whose running values stay in registers
    MANY_SEQUENCES = 4,
    PASS_ROWS = 60,      // query rows of several positions that share one pass over the keys: whole sets of ROWS, and
                         // of DOT_ROWS
    MAX_HEADS = 64,      // query heads of one position that share a pass, or an item
    MAX_ROWS = PASS_ROWS > MAX_HEADS ? PASS_ROWS : MAX_HEADS,
    MAX_HEAD_DIM = 256,
};

_Static_assert(MAX_ROWS % ROWS == 0, "rows of padding have their place too");

typedef struct {
    vfloat query[MAX_ROWS * MAX_HEAD_DIM / LANES];  // [rows, dim], scaled
    vfloat sums[MAX_ROWS * MAX_HEAD_DIM / LANES];   // [rows, dim]
    vfloat keys[MAX_HEAD_DIM * KEYS / LANES];       // [dim, KEYS]: transposed, so that lanes are keys
    vfloat values[KEYS * MAX_HEAD_DIM / LANES];     // [KEYS, dim]
    vfloat weights[MAX_ROWS];                       // sum of exponentials, by lane
    float maxima[MAX_ROWS];
    int32_t positions[MAX_ROWS];
} Scratch;

static _Thread_local Scratch thread_scratch;
#ifdef __AVX512BF16__
_Static_assert(MAX_ROWS <= DOT_MAX_ROWS && MAX_HEAD_DIM <= DOT_MAX_DIM, "whatever comes has its place");
static _Thread_local DotScratch thread_dot_scratch;
#endif

// Swaps ever larger off-diagonal squares: log2(LANES) passes of two-source shuffles.
INLINE void transpose(vfloat rows[LANES]) {
#pragma GCC unroll 4
    for (int size = 1; size < LANES; size *= 2) {
        vint low = lane_indices(), high = lane_indices();
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = lane & size ? LANES + lane - size : lane;
            high[lane] = lane & size ? LANES + lane : lane + size;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & size) continue;
            vfloat a = rows[i], b = rows[i + size];
            rows[i] = shuffle(a, b, low);
            rows[i + size] = shuffle(a, b, high);
        }
    }
}

INLINE int64_t tile_length(int64_t first, int64_t last_position, int64_t keys) {
    int64_t left = last_position + 1 - first;
    return left < 0 ? 0 : left < keys ? left : keys;
}

// Where the `count` positions from `first` on begin in the pool, in elements.
INLINE void locate_tile(const Attention *a, const int32_t *block_table, int64_t kv_head, int64_t first, int64_t count,
                        int64_t *at) {
    int64_t block = first / a->block_size, offset = first % a->block_size;
    for (int64_t j = 0; j < count; j++) {
        at[j] = ((block_table[block] * a->block_size + offset) * a->kv_heads + kv_head) * a->head_dim;
        if (++offset == a->block_size) {
            block++;
            offset = 0;
        }
    }
}

// Blocks lie anywhere, so the processor does not guess which memory comes next.
INLINE void prefetch_tile(const Attention *a, const int64_t at[KEYS], int64_t count, int is_bf16) {
    int64_t bytes = is_bf16 ? 2 : 4;
    for (int64_t j = 0; j < count; j++)
        for (int64_t byte = 0; byte < a->head_dim * bytes; byte += 64) {
            __builtin_prefetch((const char *)a->keys + at[j] * bytes + byte);
            __builtin_prefetch((const char *)a->values + at[j] * bytes + byte);
        }
}

// The keys (transposed) and values of `count` positions, as float32; zeros in the places of further keys.
INLINE void load_tile(const Attention *a, const int64_t at[KEYS], int64_t count, Scratch *s, int is_bf16) {
    int64_t vectors = (a->head_dim + LANES - 1) / LANES;
    for (int64_t v = 0; v < vectors; v++) {
        int64_t left = a->head_dim - v * LANES;
        for (int part = 0; part < KEYS / LANES; part++) {
            vfloat square[LANES];
            for (int64_t j = 0; j < LANES; j++) {
                int64_t key = part * LANES + j;
                square[j] = key < count ? load_some(a->keys, at[key] + v * LANES, left, is_bf16) : splat(0);
            }
            transpose(square);
            for (int64_t d = 0; d < LANES; d++) s->keys[(v * LANES + d) * (KEYS / LANES) + part] = square[d];
        }
        for (int64_t j = 0; j < count; j++)
            s->values[j * vectors + v] = load_some(a->values, at[j] + v * LANES, left, is_bf16);
    }
}

// Adds `width` vectors (from vector `v` on) of the weighted values of `count` keys to ROWS rows' sums.
INLINE void add_values(Scratch *s, int64_t row, int64_t vectors, int64_t v, int width, int64_t count,
                       const float weights[ROWS][KEYS], vfloat corrections) {
    vfloat sums[ROWS][4];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < width; w++) sums[r][w] = s->sums[(row + r) * vectors + v + w] * corrections[r];
    for (int64_t j = 0; j < count; j++) {
        vfloat values[4];
        for (int w = 0; w < width; w++) values[w] = s->values[j * vectors + v + w];
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < width; w++) sums[r][w] += weights[r][j] * values[w];
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < width; w++) s->sums[(row + r) * vectors + v + w] = sums[r][w];
}

// ROWS rows against the tile in the scratch (`count` keys from position `first` on): online softmax.
INLINE void attend_rows(const Attention *a, Scratch *s, int64_t row, int64_t first, int64_t count) {
    int64_t vectors = (a->head_dim + LANES - 1) / LANES;
    vfloat scores[ROWS][KEYS / LANES] = {};
    const float *query = (const float *)s->query + row * vectors * LANES;
    for (int64_t d = 0; d < a->head_dim; d++) {
        vfloat keys[KEYS / LANES];
        for (int part = 0; part < KEYS / LANES; part++) keys[part] = s->keys[d * (KEYS / LANES) + part];
        for (int r = 0; r < ROWS; r++)
            for (int part = 0; part < KEYS / LANES; part++)
                scores[r][part] += query[r * vectors * LANES + d] * keys[part];
    }

    float weights[ROWS][KEYS];
    vfloat corrections = splat(0);
    for (int r = 0; r < ROWS; r++) {
        int32_t position = s->positions[row + r];
        float max = s->maxima[row + r];
        for (int part = 0; part < KEYS / LANES; part++) {
            vfloat x = scores[r][part];
            if (a->soft_cap > 0) x = a->soft_cap * (1.0f - 2.0f / (exponential(x * (2.0f / a->soft_cap)) + 1.0f));
            vint key = lane_indices() + (int32_t)(first + part * LANES);
            vint visible = key <= position;
            if (a->window > 0) visible &= key > (int32_t)(position - a->window);
            scores[r][part] = choose(visible, x, splat(-INFINITY));
        }
        vfloat larger = choose(scores[r][0] > scores[r][1], scores[r][0], scores[r][1]);
        float tile_max = horizontal_max(larger);
        max = tile_max > max ? tile_max : max;
        corrections[r] = s->maxima[row + r] - max;
        s->maxima[row + r] = max;
    }
    corrections = exponential(corrections);
    for (int r = 0; r < ROWS; r++) {
        vfloat total = s->weights[row + r] * corrections[r];
        for (int part = 0; part < KEYS / LANES; part++) {
            vfloat weight = exponential(scores[r][part] - s->maxima[row + r]);
            memcpy(&weights[r][part * LANES], &weight, sizeof weight);
            total += weight;
        }
        s->weights[row + r] = total;
    }
    int64_t v = 0;
    for (; v + 4 <= vectors; v += 4) add_values(s, row, vectors, v, 4, count, weights, corrections);
    for (; v < vectors; v++) add_values(s, row, vectors, v, 1, count, weights, corrections);
}

// `queries` positions of one sequence, from its row `first_query` on, for all query heads of one KV head.
INLINE void attend_tile(const Attention *a, int64_t sequence, int64_t first_query, int64_t queries, int64_t kv_head,
                        Scratch *s, int is_bf16) {
    int64_t group = a->q_heads / a->kv_heads, vectors = (a->head_dim + LANES - 1) / LANES;
    int64_t rows = queries * group, padded = (rows + ROWS - 1) / ROWS * ROWS;
    int64_t length = a->query_starts[sequence + 1] - a->query_starts[sequence];
    int64_t first_position = a->context_lens[sequence] - length + first_query;
    int64_t last_position = first_position + queries - 1;
    int64_t first_row = (a->query_starts[sequence] + first_query) * a->q_heads + kv_head * group;

    for (int64_t row = 0; row < padded; row++) {
        // Rows of padding repeat the last one, and are not written back.
        int64_t real = row < rows ? row : rows - 1;
        int64_t at = (first_row + real / group * a->q_heads + real % group) * a->head_dim;
        for (int64_t v = 0; v < vectors; v++) {
            vfloat x = load_some(a->query, at + v * LANES, a->head_dim - v * LANES, is_bf16);
            s->query[row * vectors + v] = x * a->scale;
            s->sums[row * vectors + v] = splat(0);
        }
        s->positions[row] = (int32_t)(first_position + real / group);
        s->weights[row] = splat(0);
        s->maxima[row] = -1e30f;  // finite, so that a row which sees nothing of a tile is left exactly as it was
    }

    const int32_t *block_table = a->block_tables + sequence * a->table_width;
    int64_t start = a->window > 0 && first_position >= a->window ? first_position - a->window + 1 : 0;
    int64_t first = start / KEYS * KEYS, tiles[2][KEYS];
    locate_tile(a, block_table, kv_head, first, tile_length(first, last_position, KEYS), tiles[0]);
    for (int turn = 0; first <= last_position; first += KEYS, turn = !turn) {
        int64_t count = tile_length(first, last_position, KEYS);
        int64_t next_count = tile_length(first + KEYS, last_position, KEYS);
        locate_tile(a, block_table, kv_head, first + KEYS, next_count, tiles[!turn]);
        prefetch_tile(a, tiles[!turn], next_count, is_bf16);
        load_tile(a, tiles[turn], count, s, is_bf16);
        for (int64_t row = 0; row < padded; row += ROWS)
            if (s->positions[row + ROWS - 1] >= first) attend_rows(a, s, row, first, count);
    }

    for (int64_t row = 0; row < rows; row++) {
        float total = horizontal_sum(s->weights[row]);
        int64_t at = (first_row + row / group * a->q_heads + row % group) * a->head_dim;
        for (int64_t v = 0; v < vectors; v++)
            store_some(a->out, at + v * LANES, s->sums[row * vectors + v] / total, a->head_dim - v * LANES, is_bf16);
    }
}

#ifdef __AVX512BF16__
// Fetches a tile into the cache from one end to the other, which the processor runs ahead of by itself. Head by head,
// it would see pieces with gaps, and wait for most of them.
INLINE void read_tile(const Attention *a, const int64_t *at, int64_t count, int64_t heads) {
    const void *pools[2] = {a->keys, a->values};
    for (int pool = 0; pool < 2; pool++)
        for (int64_t j = 0; j < count; j++)
            for (int64_t i = 0; i < heads * a->head_dim; i += 32)
                (void)*((const volatile uint16_t *)pools[pool] + at[j] + i);
}

// The same by bf16 dot products, for `heads` KV heads from `kv_head` on.
INLINE void attend_dot_tile(const Attention *a, int64_t sequence, int64_t first_query, int64_t queries,
                            int64_t kv_head, int64_t heads, int interleaved) {
    DotScratch *s = &thread_dot_scratch;
    int64_t group = a->q_heads / a->kv_heads, rows = queries * group;
    int64_t length = a->query_starts[sequence + 1] - a->query_starts[sequence];
    int64_t first_position = a->context_lens[sequence] - length + first_query;
    int64_t last_position = first_position + queries - 1;
    int64_t first_row = (a->query_starts[sequence] + first_query) * a->q_heads + kv_head * group;
    for (int64_t row = 0; row < heads * rows; row++) {
        int64_t head = row / rows * group + row % group, query = row % rows / group;
        begin_dot_row(a, s, row, (first_row + query * a->q_heads + head) * a->head_dim, first_position + query);
    }
    const int32_t *block_table = a->block_tables + sequence * a->table_width;
    int64_t start = a->window > 0 && first_position >= a->window ? first_position - a->window + 1 : 0;
    for (int64_t first = start / DOT_KEYS * DOT_KEYS; first <= last_position; first += DOT_KEYS) {
        int64_t count = tile_length(first, last_position, DOT_KEYS), at[DOT_KEYS];
        if (!interleaved) {
            locate_tile(a, block_table, kv_head, first, count, at);
            if (heads > 1) read_tile(a, at, count, heads);
        } else if (queries == 1) {
            read_interleaved(a, block_table, kv_head, heads, first, count);
        }
        for (int64_t h = 0; h < heads; h++) {
            DotTile tile;
            if (interleaved) {
                tile = find_dot_tile(a, block_table, kv_head + h, first, count);
                if (count % 2) end_odd_tile(a, s, &tile, count);
            } else {
                tile = load_dot_tile(a, s, at, count, h * a->head_dim);
            }
            for (int64_t row = 0; row < rows; row += DOT_ROWS) {
                int64_t some = rows - row < DOT_ROWS ? rows - row : DOT_ROWS;
                if (s->positions[h * rows + row + some - 1] >= first)
                    attend_some_dot_rows(a, s, &tile, h * rows + row, first, count, some);
            }
        }
    }
    for (int64_t row = 0; row < heads * rows; row++) {
        int64_t head = row / rows * group + row % group, query = row % rows / group;
        end_dot_row(a, s, row, (first_row + query * a->q_heads + head) * a->head_dim);
    }
}

int64_t can_interleave(int64_t head_dim, int64_t block_size) {
    return head_dim % 32 == 0 && head_dim <= DOT_MAX_DIM && block_size % STRIPE == 0;
}
#else
int64_t can_interleave(int64_t head_dim, int64_t block_size) {
    (void)head_dim, (void)block_size;
    return 0;
}
#endif

// How many positions' queries share one pass over the keys.
INLINE int64_t tile_queries(const Attention *a) {
    int64_t queries = PASS_ROWS / (a->q_heads / a->kv_heads);
    return queries > 0 ? queries : 1;
}

// Whether a sequence of `length` rows is one item, or one for each tile and KV head. A token's heads lie side by side,
// so one item reads memory faster; where decodes are few, the threads share their heads.
INLINE int is_one_item(const Attention *a, int64_t length) {
    return length == 1 && a->sequences >= MANY_SEQUENCES && a->q_heads <= MAX_HEADS;
}

int64_t attention_items(const Attention *a) {
    int64_t tile = tile_queries(a);
    a->item_starts[0] = 0;
    for (int64_t i = 0; i < a->sequences; i++) {
        int64_t length = a->query_starts[i + 1] - a->query_starts[i];
        int64_t items = is_one_item(a, length) ? 1 : (length + tile - 1) / tile * a->kv_heads;
        a->item_starts[i + 1] = a->item_starts[i] + items;
    }
    return a->item_starts[a->sequences];
}

INLINE void attend_item(const Attention *a, int64_t item, int is_bf16) {
    int64_t tile = tile_queries(a), sequence = 0, above = a->sequences;
    while (above - sequence > 1) {
        int64_t middle = (sequence + above) / 2;
        if (a->item_starts[middle] <= item) sequence = middle;
        else above = middle;
    }
    item -= a->item_starts[sequence];
    int64_t length = a->query_starts[sequence + 1] - a->query_starts[sequence];
    int one = is_one_item(a, length);
    int64_t heads = one ? a->kv_heads : 1, kv_head = one ? 0 : item % a->kv_heads;
    int64_t first_query = one ? 0 : item / a->kv_heads * tile;
    int64_t queries = length - first_query < tile ? length - first_query : tile;
#ifdef __AVX512BF16__
    if (is_bf16 && a->head_dim % 32 == 0) {
        if (a->interleaved) attend_dot_tile(a, sequence, first_query, queries, kv_head, heads, 1);
        else attend_dot_tile(a, sequence, first_query, queries, kv_head, heads, 0);
        return;
    }
#endif
    for (int64_t head = kv_head; head < kv_head + heads; head++)
        attend_tile(a, sequence, first_query, queries, head, &thread_scratch, is_bf16);
}

INLINE void attend(const Attention *a, int is_bf16) {
    int64_t items = attention_items(a);
    // From the end on: the prefills, which are the longest items, lie there.
#pragma omp parallel for schedule(dynamic, 1) if (items > 1)
    for (int64_t item = items - 1; item >= 0; item--) attend_item(a, item, is_bf16);
}

void attend_item_bf16(const Attention *attention, int64_t item) { attend_item(attention, item, 1); }
void attend_bf16(const Attention *attention) { attend(attention, 1); }
void attend_f32(const Attention *attention) { attend(attention, 0); }
