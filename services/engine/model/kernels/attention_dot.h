// Attention's tiles by bf16 dot products, for processors that have them: paged_attention.c uses this instead of its
// own where head_dim is a multiple of 32. Queries, keys and values are multiplied as they lie in memory, two at a time;
// sums are float32, and the weights of the softmax are rounded to bf16, both above and below the line.

#pragma once

#include <immintrin.h>
#include <math.h>

#include "paged_attention.h"
#include "vectors.h"

enum {
    DOT_KEYS = 32,  // keys of one tile, as in paged_attention.c
    DOT_ROWS = 6,   // rows whose sums stay in registers
    DOT_MAX_ROWS = 64,
    DOT_MAX_DIM = 256,
};

typedef struct {
    _Alignas(64) uint32_t keys[DOT_MAX_DIM / 2][DOT_KEYS];    // pairs of dimensions, transposed: lanes are keys
    _Alignas(64) uint32_t values[DOT_KEYS / 2][DOT_MAX_DIM];  // pairs of keys; dimensions as unpacking leaves them
    _Alignas(64) float sums[DOT_MAX_ROWS][DOT_MAX_DIM];
    _Alignas(64) uint32_t weights[DOT_ROWS][DOT_KEYS / 2];
    uint32_t query[DOT_MAX_ROWS][DOT_MAX_DIM / 2];
    float maxima[DOT_MAX_ROWS], totals[DOT_MAX_ROWS];
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

// The tile's keys and values that lie `at` the given elements of the pool, `offset` further on; zeros beyond `count`.
INLINE void load_dot_tile(const Attention *a, DotScratch *s, const int64_t *at, int64_t count, int64_t offset) {
    const uint16_t *keys = (const uint16_t *)a->keys + offset, *values = (const uint16_t *)a->values + offset;
    for (int64_t d = 0; d < a->head_dim; d += 32) {
        for (int64_t part = 0; part < DOT_KEYS; part += 16) {
            __m512i square[16];
            for (int64_t j = 0; j < 16; j++)
                square[j] = part + j < count ? _mm512_loadu_si512(keys + at[part + j] + d) : _mm512_setzero_si512();
            transpose_words(square);
            for (int64_t j = 0; j < 16; j++) _mm512_store_si512(&s->keys[d / 2 + j][part], square[j]);
        }
        for (int64_t j = 0; j < count; j += 2) {
            __m512i first = _mm512_loadu_si512(values + at[j] + d);
            __m512i second = j + 1 < count ? _mm512_loadu_si512(values + at[j + 1] + d) : _mm512_setzero_si512();
            _mm512_store_si512(&s->values[j / 2][d], _mm512_unpacklo_epi16(first, second));
            _mm512_store_si512(&s->values[j / 2][d + 16], _mm512_unpackhi_epi16(first, second));
        }
    }
}

INLINE __m512bh pair_of(uint32_t pair) { return (__m512bh)_mm512_set1_epi32((int32_t)pair); }

// `rows` rows against the tile in the scratch (`count` keys from position `first` on): online softmax.
INLINE void attend_dot_rows(const Attention *a, DotScratch *s, int64_t row, int64_t first, int64_t count, int rows) {
    __m512 scores[DOT_ROWS][2];
    for (int r = 0; r < rows; r++) scores[r][0] = scores[r][1] = _mm512_setzero_ps();
    for (int64_t d = 0; d < a->head_dim / 2; d++) {
        __m512bh low = (__m512bh)_mm512_load_si512(&s->keys[d][0]), high = (__m512bh)_mm512_load_si512(&s->keys[d][16]);
        for (int r = 0; r < rows; r++) {
            __m512bh query = pair_of(s->query[row + r][d]);
            scores[r][0] = _mm512_dpbf16_ps(scores[r][0], low, query);
            scores[r][1] = _mm512_dpbf16_ps(scores[r][1], high, query);
        }
    }
    float corrections[DOT_ROWS];
    vfloat differences = splat(0);
    for (int r = 0; r < rows; r++) {
        int32_t position = s->positions[row + r];
        vfloat largest = splat(-INFINITY);
        for (int part = 0; part < 2; part++) {
            vfloat x = (vfloat)scores[r][part] * a->scale;
            if (a->soft_cap > 0) x = a->soft_cap * (1.0f - 2.0f / (exponential(x * (2.0f / a->soft_cap)) + 1.0f));
            vint key = lane_indices() + (int32_t)(first + part * 16);
            vint visible = key <= position;
            if (a->window > 0) visible &= key > (int32_t)(position - a->window);
            x = choose(visible, x, splat(-INFINITY));
            largest = choose(x > largest, x, largest);
            scores[r][part] = (__m512)x;
        }
        float max = horizontal_max(largest), before = s->maxima[row + r];
        s->maxima[row + r] = max > before ? max : before;
        differences[r] = before - s->maxima[row + r];
    }
    differences = exponential(differences);
    memcpy(corrections, &differences, sizeof corrections);
    for (int r = 0; r < rows; r++) {
        vfloat low = exponential((vfloat)scores[r][0] - s->maxima[row + r]);
        vfloat high = exponential((vfloat)scores[r][1] - s->maxima[row + r]);
        _mm512_store_si512(s->weights[r], (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
        // NaN has to survive the sum, as it survives the product.
        s->totals[row + r] = s->totals[row + r] * corrections[r] + horizontal_sum(round_to(low, 1) + round_to(high, 1));
    }
    for (int64_t d = 0; d < a->head_dim; d += 64) {
        int vectors = a->head_dim - d < 64 ? 2 : 4;
        __m512 sums[DOT_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 4; v++)
                sums[r][v] = (__m512)(load(s->sums[row + r], d + (v < vectors ? v : 0) * 16, 0) * corrections[r]);
        for (int64_t j = 0; j < (count + 1) / 2; j++) {
            __m512bh values[4];
            for (int v = 0; v < 4; v++)
                values[v] = (__m512bh)_mm512_load_si512(&s->values[j][d + (v < vectors ? v : 0) * 16]);
            for (int r = 0; r < rows; r++) {
                __m512bh weight = pair_of(s->weights[r][j]);
                for (int v = 0; v < 4; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], values[v], weight);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) _mm512_store_ps(&s->sums[row + r][d + v * 16], sums[r][v]);
    }
}

static inline void attend_some_dot_rows(const Attention *a, DotScratch *s, int64_t row, int64_t first, int64_t count,
                                        int64_t rows) {
    switch (rows) {
        case 1: attend_dot_rows(a, s, row, first, count, 1); break;
        case 2: attend_dot_rows(a, s, row, first, count, 2); break;
        case 3: attend_dot_rows(a, s, row, first, count, 3); break;
        case 4: attend_dot_rows(a, s, row, first, count, 4); break;
        case 5: attend_dot_rows(a, s, row, first, count, 5); break;
        default: attend_dot_rows(a, s, row, first, count, 6); break;
    }
}

INLINE void begin_dot_row(const Attention *a, DotScratch *s, int64_t row, int64_t at, int64_t position) {
    memcpy(s->query[row], (const uint16_t *)a->query + at, a->head_dim * 2);
    memset(s->sums[row], 0, a->head_dim * sizeof(float));
    s->positions[row] = (int32_t)position;
    s->totals[row] = 0;
    s->maxima[row] = -1e30f;  // finite, so that a row which sees nothing of a tile is left exactly as it was
}

INLINE void end_dot_row(const Attention *a, DotScratch *s, int64_t row, int64_t at) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t d = 0; d < a->head_dim; d += 32) {
        __m512 low = _mm512_load_ps(&s->sums[row][d]), high = _mm512_load_ps(&s->sums[row][d + 16]);
        store(a->out, at + d, (vfloat)_mm512_permutex2var_ps(low, first, high) / s->totals[row], 1);
        store(a->out, at + d + 16, (vfloat)_mm512_permutex2var_ps(low, second, high) / s->totals[row], 1);
    }
}
