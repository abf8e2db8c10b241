// Attention's tiles by bf16 dot products, for processors that have them: paged_attention.c uses this instead of its
// own where head_dim is a multiple of 32. Queries, keys and values are multiplied as bf16, two at a time; sums are
// float32, and the weights of the softmax are rounded to bf16, both above and below the line.
//
// Keys and values may lie in the pool just as dot products take them ("interleaved"): each STRIPE of positions of one
// KV head together, keys [head_dim / 2][STRIPE][2] and values [STRIPE / 2][head_dim][2]. Then a tile is used where it
// lies; else it is brought into that order first. Both ways give the same bits.

#pragma once

#include <immintrin.h>
#include <math.h>

#include "paged_attention.h"
#include "vectors.h"

enum {
    STRIPE = INTERLEAVED_POSITIONS,
    STRIPES = 4,
    DOT_KEYS = STRIPES * STRIPE,  // keys of one tile
    DOT_ROWS = 6,                 // rows whose sums stay in registers
    DOT_MAX_ROWS = 64,
    DOT_MAX_DIM = 256,
};

// Where the stripes of a tile lie: pairs of dimensions of keys, and pairs of positions' values.
typedef struct {
    const uint32_t *keys[STRIPES];    // [head_dim / 2, STRIPE]
    const uint32_t *values[STRIPES];  // [STRIPE / 2, head_dim]
} DotTile;

typedef struct {
    _Alignas(64) uint32_t keys[STRIPES][DOT_MAX_DIM / 2 * STRIPE];
    _Alignas(64) uint32_t values[STRIPES][STRIPE / 2 * DOT_MAX_DIM];
    _Alignas(64) float sums[DOT_MAX_ROWS][DOT_MAX_DIM];
    _Alignas(64) float totals[DOT_MAX_ROWS][LANES];  // of the weights, by lane
    _Alignas(64) uint32_t weights[DOT_ROWS][DOT_KEYS / 2];
    uint32_t query[DOT_MAX_ROWS][DOT_MAX_DIM / 2];
    float maxima[DOT_MAX_ROWS];  // of the scores, which are logarithms to the base of 2
    int32_t positions[DOT_MAX_ROWS];
} DotScratch;

INLINE void transpose_words(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        __m512i even_2 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        __m512i odd_2 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(even, even_2, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(even, even_2, 0xdd);
        t[4 + i] = _mm512_shuffle_i32x4(odd, odd_2, 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(odd, odd_2, 0xdd);
    }
    memcpy(r, t, sizeof t);
}

// The tile of the `count` keys and values `at` the given elements of the pool, brought into the scratch; zeros beyond.
INLINE DotTile load_dot_tile(const Attention *a, DotScratch *s, const int64_t *at, int64_t count, int64_t offset) {
    const uint16_t *keys = (const uint16_t *)a->keys + offset, *values = (const uint16_t *)a->values + offset;
    // Words 0 to 3 of what unpacking gives are pairs of the dimensions 0 to 3, 8 to 11, 16 to 19 and 24 to 27.
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t d = 0; d < a->head_dim; d += 32) {
        for (int64_t stripe = 0; stripe < STRIPES; stripe++) {
            __m512i square[16];
            for (int64_t j = 0; j < STRIPE; j++) {
                int64_t key = stripe * STRIPE + j;
                square[j] = key < count ? _mm512_loadu_si512(keys + at[key] + d) : _mm512_setzero_si512();
            }
            transpose_words(square);
            for (int64_t j = 0; j < 16; j++) _mm512_store_si512(&s->keys[stripe][(d / 2 + j) * STRIPE], square[j]);
        }
        for (int64_t j = 0; j < count; j += 2) {
            __m512i even = _mm512_loadu_si512(values + at[j] + d);
            __m512i odd = j + 1 < count ? _mm512_loadu_si512(values + at[j + 1] + d) : _mm512_setzero_si512();
            __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
            uint32_t *to = &s->values[j / STRIPE][j % STRIPE / 2 * a->head_dim + d];
            _mm512_store_si512(to, _mm512_permutex2var_epi32(low, first, high));
            _mm512_store_si512(to + 16, _mm512_permutex2var_epi32(low, second, high));
        }
    }
    DotTile tile;
    for (int stripe = 0; stripe < STRIPES; stripe++) {
        tile.keys[stripe] = s->keys[stripe];
        tile.values[stripe] = s->values[stripe];
    }
    return tile;
}

// Where the stripe that `position` is in begins in an interleaved pool, in elements.
INLINE int64_t stripe_start(const Attention *a, const int32_t *block_table, int64_t kv_head, int64_t position) {
    int64_t block = block_table[position / a->block_size];
    int64_t stripe = block * (a->block_size / STRIPE) + position % a->block_size / STRIPE;
    return (stripe * a->kv_heads + kv_head) * STRIPE * a->head_dim;
}

// The tile of `count` positions from `first` on where it lies in an interleaved pool.
INLINE DotTile find_dot_tile(const Attention *a, const int32_t *block_table, int64_t kv_head, int64_t first,
                             int64_t count) {
    DotTile tile;
    for (int stripe = 0; stripe < STRIPES; stripe++) {
        // One without any key is never looked at but for its scores, which are then hidden: any memory will do.
        int64_t position = first + (stripe * STRIPE < count ? stripe * STRIPE : 0);
        int64_t at = stripe_start(a, block_table, kv_head, position);
        tile.keys[stripe] = (const uint32_t *)((const uint16_t *)a->keys + at);
        tile.values[stripe] = (const uint32_t *)((const uint16_t *)a->values + at);
    }
    return tile;
}

// The place beside a last odd position holds what was there before, perhaps NaN: zeros take its part.
INLINE void end_odd_tile(const Attention *a, DotScratch *s, DotTile *tile, int64_t count) {
    int64_t stripe = (count - 1) / STRIPE, pair = (count - 1) % STRIPE / 2;
    memcpy(s->values[stripe], tile->values[stripe], (pair + 1) * a->head_dim * 4);
    for (int64_t d = 0; d < a->head_dim; d++) s->values[stripe][pair * a->head_dim + d] &= 0xffff;
    tile->values[stripe] = s->values[stripe];
}

// Fetches a tile of `heads` heads into the cache from one end to the other, which the processor runs ahead of by itself,
// with some help. Head by head, it would see pieces with gaps, and wait for most of them.
INLINE void read_interleaved(const Attention *a, const int32_t *block_table, int64_t kv_head, int64_t heads,
                             int64_t first, int64_t count) {
    enum { AHEAD = 2048 };  // elements
    const void *pools[2] = {a->keys, a->values};
    for (int pool = 0; pool < 2; pool++)
        for (int64_t position = first; position < first + count; position += STRIPE) {
            const uint16_t *at = (const uint16_t *)pools[pool] + stripe_start(a, block_table, kv_head, position);
            for (int64_t i = 0; i < heads * STRIPE * a->head_dim; i += 32) {
                __builtin_prefetch(at + i + AHEAD);
                (void)*(const volatile uint16_t *)(at + i);
            }
        }
}

INLINE __m512bh pair_of(uint32_t pair) { return (__m512bh)_mm512_set1_epi32((int32_t)pair); }

// `rows` rows against the first `stripes` of a tile, whose first position is `first` and of whose positions none of
// these rows sees more than `count`: online softmax.
INLINE void attend_dot_rows(const Attention *a, DotScratch *s, const DotTile *tile, int64_t row, int64_t first,
                            int64_t count, int rows, int stripes) {
    const float log2_e = 1.44269504088896341f;
    __m512 scores[DOT_ROWS][STRIPES];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < stripes; i++) scores[r][i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < a->head_dim / 2; d++) {
        __m512bh keys[STRIPES];
        for (int i = 0; i < stripes; i++) keys[i] = (__m512bh)_mm512_loadu_si512(tile->keys[i] + d * STRIPE);
        for (int r = 0; r < rows; r++) {
            __m512bh query = pair_of(s->query[row + r][d]);
            for (int i = 0; i < stripes; i++) scores[r][i] = _mm512_dpbf16_ps(scores[r][i], keys[i], query);
        }
    }
    // Positions rise with the rows.
    int32_t lowest = s->positions[row], highest = s->positions[row + rows - 1];
    int is_edge = first + stripes * STRIPE - 1 > lowest || (a->window > 0 && first <= highest - a->window);
    float scale = a->soft_cap > 0 ? log2_e : a->scale * log2_e, corrections[LANES];
    vfloat differences = splat(0);
    for (int r = 0; r < rows; r++) {
        // Where one is NaN, the other is taken: NaN shall not hide the rest's size, and comes back as a weight.
        __m512 larger = _mm512_set1_ps(-INFINITY);
        for (int i = 0; i < stripes; i++) {
            if (a->soft_cap > 0) {
                vfloat x = (vfloat)scores[r][i] * a->scale;
                x = a->soft_cap * (1.0f - 2.0f / (exponential(x * (2.0f / a->soft_cap)) + 1.0f));
                scores[r][i] = (__m512)x;
            }
            if (is_edge) {
                int32_t position = s->positions[row + r];
                vint key = lane_indices() + (int32_t)(first + i * STRIPE);
                vint visible = key <= position;
                if (a->window > 0) visible &= key > (int32_t)(position - a->window);
                scores[r][i] = (__m512)choose(visible, (vfloat)scores[r][i], splat(-INFINITY));
            }
            larger = _mm512_max_ps(scores[r][i], larger);
        }
        float max = _mm512_reduce_max_ps(larger) * scale, before = s->maxima[row + r];
        s->maxima[row + r] = max > before ? max : before;
        differences[r] = before - s->maxima[row + r];
    }
    differences = power_of_2(differences);
    memcpy(corrections, &differences, sizeof corrections);
    const __m512bh ones = pair_of(0x3f803f80);
    for (int r = 0; r < rows; r++) {
        vfloat max = splat(s->maxima[row + r]);
        __m512 total = (__m512)(load(s->totals[row + r], 0, 0) * corrections[r]);
        for (int i = 0; i < stripes; i += 2) {
            vfloat low = power_of_2((vfloat)scores[r][i] * scale - max);
            vfloat high = power_of_2((vfloat)scores[r][i + 1] * scale - max);
            __m512bh weights = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            _mm512_store_si512(&s->weights[r][i * STRIPE / 2], (__m512i)weights);
            total = _mm512_dpbf16_ps(total, weights, ones);
        }
        _mm512_store_ps(s->totals[row + r], total);
    }
    for (int64_t d = 0; d < a->head_dim; d += 64) {
        int vectors = a->head_dim - d < 64 ? 2 : 4;
        __m512 sums[DOT_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 4; v++)
                sums[r][v] = (__m512)(load(s->sums[row + r], d + (v < vectors ? v : 0) * 16, 0) * corrections[r]);
        for (int i = 0; i < stripes; i++) {
            int64_t pairs = (count - i * STRIPE + 1) / 2;
            for (int64_t j = 0; j < (pairs < STRIPE / 2 ? pairs : STRIPE / 2); j++) {
                __m512bh values[4];
                for (int v = 0; v < 4; v++)
                    values[v] = (__m512bh)_mm512_loadu_si512(tile->values[i] + j * a->head_dim + d +
                                                             (v < vectors ? v : 0) * 16);
                for (int r = 0; r < rows; r++) {
                    __m512bh weight = pair_of(s->weights[r][i * STRIPE / 2 + j]);
                    for (int v = 0; v < 4; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], values[v], weight);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) _mm512_store_ps(&s->sums[row + r][d + v * 16], sums[r][v]);
    }
}

#define SOME_DOT_ROWS(rows, stripes)                                                                                   \
    case rows: attend_dot_rows(a, s, tile, row, first, count, rows, stripes); break;
#define ANY_DOT_ROWS(stripes)                                                                                          \
    switch (rows) {                                                                                                    \
        SOME_DOT_ROWS(1, stripes) SOME_DOT_ROWS(2, stripes) SOME_DOT_ROWS(3, stripes) SOME_DOT_ROWS(4, stripes)        \
        SOME_DOT_ROWS(5, stripes) SOME_DOT_ROWS(6, stripes)                                                            \
    }

static inline void attend_some_dot_rows(const Attention *a, DotScratch *s, const DotTile *tile, int64_t row,
                                        int64_t first, int64_t count, int64_t rows) {
    int64_t seen = s->positions[row + rows - 1] + 1 - first;
    if (seen < count) count = seen;
    if (count > 2 * STRIPE) ANY_DOT_ROWS(4)
    else ANY_DOT_ROWS(2)
}

INLINE void begin_dot_row(const Attention *a, DotScratch *s, int64_t row, int64_t at, int64_t position) {
    memcpy(s->query[row], (const uint16_t *)a->query + at, a->head_dim * 2);
    memset(s->sums[row], 0, a->head_dim * sizeof(float));
    memset(s->totals[row], 0, sizeof s->totals[row]);
    s->positions[row] = (int32_t)position;
    s->maxima[row] = -1e30f;  // finite, so that a row which sees nothing of a tile is left exactly as it was
}

INLINE void end_dot_row(const Attention *a, DotScratch *s, int64_t row, int64_t at) {
    float total = horizontal_sum(load(s->totals[row], 0, 0));
    for (int64_t d = 0; d < a->head_dim; d += LANES) store(a->out, at + d, load(s->sums[row], d, 0) / total, 1);
}
