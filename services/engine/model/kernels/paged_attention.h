// What paged_attention.c takes and offers to the kernels beside it.

#pragma once

#include <stdint.h>

enum { INTERLEAVED_POSITIONS = 16 };  // see attention_dot.h

typedef struct {
    const void *query;  // [rows, q_heads, head_dim], rows of all sequences one after another
    const void *keys;   // [blocks, block_size, kv_heads, head_dim]
    const void *values;
    void *out;                    // as query
    const int32_t *query_starts;  // [sequences + 1], rows
    const int32_t *context_lens;  // [sequences], the sequence's last row included
    const int32_t *block_tables;  // [sequences, table_width]
    int64_t *item_starts;         // [sequences + 1], scratch
    int64_t sequences, table_width, block_size, q_heads, kv_heads, head_dim;
    int64_t window;         // positions that a row sees, itself included; 0: all before it
    float scale, soft_cap;  // soft_cap 0: none
    int64_t interleaved;    // whether keys and values lie in the pool as attention_dot.h says
} Attention;

// Whether a bf16 pool of such blocks may be interleaved, which is faster.
int64_t can_interleave(int64_t head_dim, int64_t block_size);

// Lays the items out and returns how many there are, to be run in any order by any threads.
int64_t attention_items(const Attention *attention);
void attend_item_bf16(const Attention *attention, int64_t item);
