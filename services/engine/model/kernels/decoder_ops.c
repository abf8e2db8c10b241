// What a decoder does between its matrix products, on a CPU: RMSNorm, SwiGLU, rotary embedding and the KV cache's
// write. decoder_ops.py has the same in PyTorch, and the calls.
//
// Each row's result depends on that row alone: neither the batch nor the number of threads changes a bit of it.

#include "decoder_rows.h"

enum {
    MIN_PARALLEL_WORK = 1 << 15,  // elements below which waking the threads costs more than it saves
};

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
            vfloat activated = round_to(silu(gate, is_bf16), is_bf16);
            store_some(out, row * size + i, activated * up, size - i, is_bf16);
        }
    }
}

INLINE void rotate_and_store(const void *qkv, const int64_t *positions, const int64_t *slots, const float *cos,
                             const float *sin, const void *query_norm, const void *key_norm, float epsilon,
                             void *query, void *keys, void *values, int64_t rows, int64_t q_heads, int64_t kv_heads,
                             int64_t head_dim, int is_bf16) {
#pragma omp parallel for if (rows * (q_heads + 2 * kv_heads) * head_dim > MIN_PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++)
        rotate_and_store_row(qkv, row, positions, slots, cos, sin, query_norm, key_norm, epsilon, query, keys, values,
                             q_heads, kv_heads, head_dim, is_bf16, 0);
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
