// What a decoder does between its matrix products, on a CPU: RMSNorm, SwiGLU, rotary embedding and the KV cache's
// write. decoder_ops.py has the same in PyTorch, and the calls.
//
// Each row's result depends on that row alone: neither the batch nor the number of threads changes a bit of it.

#include <math.h>

#include "vectors.h"

enum {
    MAX_HEAD_DIM = 256,
    MIN_PARALLEL_WORK = 1 << 15,  // elements below which waking the threads costs more than it saves
};

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

INLINE void rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t size, float epsilon,
                     int is_bf16) {
#pragma omp parallel for if (rows * size > MIN_PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++)
        rms_norm_row(x, row * size, weight, out, row * size, size, epsilon, is_bf16);
}

INLINE void add_rms_norm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t size,
                         float epsilon, int is_bf16) {
#pragma omp parallel for if (rows * size > MIN_PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * size;
        for (int64_t i = 0; i < size; i += LANES) {
            vfloat sum = load_some(residual, at + i, size - i, is_bf16) + load_some(x, at + i, size - i, is_bf16);
            store_some(residual, at + i, sum, size - i, is_bf16);
        }
        rms_norm_row(residual, at, weight, out, at, size, epsilon, is_bf16);
    }
}

INLINE void silu_and_multiply(const void *gate_up, void *out, int64_t rows, int64_t size, int is_bf16) {
#pragma omp parallel for if (rows * size > MIN_PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < size; i += LANES) {
            vfloat gate = load_some(gate_up, row * 2 * size + i, size - i, is_bf16);
            vfloat up = load_some(gate_up, row * 2 * size + size + i, size - i, is_bf16);
            vfloat silu = round_to(gate / (1.0f + exponential(-gate)), is_bf16);
            store_some(out, row * size + i, silu * up, size - i, is_bf16);
        }
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

// qkv [rows, (q_heads + 2 kv_heads) * head_dim] -> query [rows, q_heads, head_dim]; keys and values to their slots
// of the pool [slots, kv_heads, head_dim]. The norms (of each head; Qwen3) are null where a model has none.
INLINE void rotate_and_store(const void *qkv, const int64_t *positions, const int64_t *slots, const float *cos,
                             const float *sin, const void *query_norm, const void *key_norm, float epsilon,
                             void *query, void *keys, void *values, int64_t rows, int64_t q_heads, int64_t kv_heads,
                             int64_t head_dim, int is_bf16) {
    int64_t width = (q_heads + 2 * kv_heads) * head_dim, half = head_dim / 2, bytes = is_bf16 ? 2 : 4;
#pragma omp parallel for if (rows * width > MIN_PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
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
            if (head < q_heads)
                rotate_head(source, at, query, (row * q_heads + head) * head_dim, row_cos, row_sin, half, is_bf16);
            else
                rotate_head(source, at, keys, (slots[row] * kv_heads + head - q_heads) * head_dim, row_cos, row_sin,
                            half, is_bf16);
        }
        memcpy((char *)values + slots[row] * kv_heads * head_dim * bytes,
               (const char *)qkv + (row * width + (q_heads + kv_heads) * head_dim) * bytes,
               kv_heads * head_dim * bytes);
    }
}

#define EXPORT_FOR(type, is_bf16)                                                                                      \
    void rms_norm_##type(const void *x, const void *weight, void *out, int64_t rows, int64_t size, float epsilon) {    \
        rms_norm(x, weight, out, rows, size, epsilon, is_bf16);                                                        \
    }                                                                                                                  \
    void add_rms_norm_##type(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t size, \
                             float epsilon) {                                                                          \
        add_rms_norm(x, residual, weight, out, rows, size, epsilon, is_bf16);                                          \
    }                                                                                                                  \
    void silu_and_multiply_##type(const void *gate_up, void *out, int64_t rows, int64_t size) {                        \
        silu_and_multiply(gate_up, out, rows, size, is_bf16);                                                          \
    }                                                                                                                  \
    void rotate_and_store_##type(const void *qkv, const int64_t *positions, const int64_t *slots, const float *cos,    \
                                 const float *sin, const void *query_norm, const void *key_norm, float epsilon,        \
                                 void *query, void *keys, void *values, int64_t rows, int64_t q_heads,                 \
                                 int64_t kv_heads, int64_t head_dim) {                                                 \
        rotate_and_store(qkv, positions, slots, cos, sin, query_norm, key_norm, epsilon, query, keys, values, rows,    \
                         q_heads, kv_heads, head_dim, is_bf16);                                                        \
    }

EXPORT_FOR(bf16, 1)
EXPORT_FOR(f32, 0)
