// One row of what a decoder does between its matrix products: RMSNorm, rotary embedding and the KV cache's write.
// decoder_ops.c and decoder_step.c run it over many.

#pragma once

#include <math.h>

#include "paged_attention.h"
#include "vectors.h"

enum { MAX_HEAD_DIM = 256 };

// One row: what PyTorch's models compute, rounding included (to the type before the weight is applied).
INLINE void rms_norm_row(const void *x, int64_t at, const void *weight, void *out, int64_t out_at, int64_t size,
                         float epsilon, int is_bf16) {
    vfloat squares = splat(0);
    for (int64_t i = 0; i < size; i += LANES) {
        vfloat v = load_some(x, at + i, size - i, is_bf16);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(horizontal_sum(squares) / (float)size + epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
        vfloat v = round_to(load_some(x, at + i, size - i, is_bf16) * scale, is_bf16);
        store_some(out, out_at + i, v * load_some(weight, i, size - i, is_bf16), size - i, is_bf16);
    }
}

INLINE void rotate_head(const void *x, int64_t at, void *out, int64_t out_at, const float *cos, const float *sin,
                        int64_t half, int is_bf16) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i;
        vfloat a = load_some(x, at + i, count, is_bf16), b = load_some(x, at + half + i, count, is_bf16);
        vfloat c = load_some(cos, i, count, 0), s = load_some(sin, i, count, 0);
        store_some(out, out_at + i, a * c - b * s, count, is_bf16);
        store_some(out, out_at + half + i, b * c + a * s, count, is_bf16);
    }
}

// One head's key and value of bf16 [head_dim] to their places in an interleaved pool: see attention_dot.h.
INLINE void store_interleaved(const uint16_t *key, const uint16_t *value, void *keys, void *values, int64_t slot,
                              int64_t head, int64_t kv_heads, int64_t head_dim) {
    int64_t position = slot % INTERLEAVED_POSITIONS;
    int64_t at = (slot / INTERLEAVED_POSITIONS * kv_heads + head) * INTERLEAVED_POSITIONS * head_dim;
    uint16_t *key_to = (uint16_t *)keys + at + position * 2;
    uint16_t *value_to = (uint16_t *)values + at + position / 2 * 2 * head_dim + position % 2;
    for (int64_t d = 0; d < head_dim; d += 2) memcpy(key_to + d * INTERLEAVED_POSITIONS, key + d, 4);
    for (int64_t d = 0; d < head_dim; d++) value_to[d * 2] = value[d];
}

// Of one row: qkv [rows, (q_heads + 2 kv_heads) * head_dim] -> query [rows, q_heads, head_dim]; keys and values to
// their slots of the pool [slots, kv_heads, head_dim]. The norms (of each head; Qwen3) are null where a model has none.
// `interleaved`: the pool lies so.
INLINE void rotate_and_store_row(const void *qkv, int64_t row, const int64_t *positions, const int64_t *slots,
                                 const float *cos, const float *sin, const void *query_norm, const void *key_norm,
                                 float epsilon, void *query, void *keys, void *values, int64_t q_heads,
                                 int64_t kv_heads, int64_t head_dim, int is_bf16, int interleaved) {
    int64_t width = (q_heads + 2 * kv_heads) * head_dim, half = head_dim / 2, bytes = is_bf16 ? 2 : 4;
    const uint16_t *value = (const uint16_t *)qkv + row * width + (q_heads + kv_heads) * head_dim;
    uint16_t rotated[MAX_HEAD_DIM];
    float normed[MAX_HEAD_DIM];
    const float *row_cos = cos + positions[row] * half, *row_sin = sin + positions[row] * half;
    for (int64_t head = 0; head < q_heads + kv_heads; head++) {
        const void *source = qkv;
        int64_t at = row * width + head * head_dim;
        const void *norm = head < q_heads ? query_norm : key_norm;
        if (norm) {
            rms_norm_row(qkv, at, norm, normed, 0, head_dim, epsilon, is_bf16);
            source = normed;
            at = 0;
        }
        if (head < q_heads) {
            rotate_head(source, at, query, (row * q_heads + head) * head_dim, row_cos, row_sin, half, is_bf16);
        } else if (interleaved) {
            int64_t kv_head = head - q_heads;
            rotate_head(source, at, rotated, 0, row_cos, row_sin, half, is_bf16);
            store_interleaved(rotated, value + kv_head * head_dim, keys, values, slots[row], kv_head, kv_heads,
                              head_dim);
        } else {
            rotate_head(source, at, keys, (slots[row] * kv_heads + head - q_heads) * head_dim, row_cos, row_sin,
                        half, is_bf16);
        }
    }
    if (interleaved) return;
    memcpy((char *)values + slots[row] * kv_heads * head_dim * bytes,
           (const char *)qkv + (row * width + (q_heads + kv_heads) * head_dim) * bytes,
           kv_heads * head_dim * bytes);
}
