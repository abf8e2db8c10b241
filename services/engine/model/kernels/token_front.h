// The one order of a row's tokens, higher logit first and lower id first among equals, and the front of it: see
// services/engine/sampling/ordering.py. Maxima of blocks say which blocks can hold a row's first tokens, so that
// neither all of it is looked at again nor anything sorted.

#pragma once

#include <stdatomic.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "token_weights.h"

typedef struct {
    uint64_t key;  // ascending in the order; the id is its lower half
    double weight;
} Token;

// Where one thread works on one row.
typedef struct {
    float *maxima, *sorted;  // [blocks]
    float *logits;           // [vocab]: of what was collected
    int32_t *ids;            // [vocab]
    Token *tokens;           // [vocab]
} Scratch;

// Memory for so many threads, taken by whichever works on a row: [threads, scratch_bytes]. `taken` [threads] are zero.
typedef struct {
    char *memory;
    _Atomic int32_t *taken;
    int64_t threads, bytes;
} ScratchPool;

INLINE int64_t scratch_blocks(int64_t vocab, int64_t block) { return (vocab + block - 1) / block; }

INLINE int64_t scratch_size(int64_t vocab, int64_t block) {
    int64_t bytes = vocab * (sizeof(Token) + 8) + scratch_blocks(vocab, block) * 8;
    return (bytes + 4095) / 4096 * 4096;
}

INLINE int64_t take_scratch(ScratchPool *pool) {
    for (int64_t slot = 0;; slot = (slot + 1) % pool->threads)
        if (!atomic_exchange(&pool->taken[slot], 1)) return slot;
}

INLINE void give_scratch_back(ScratchPool *pool, int64_t slot) { atomic_store(&pool->taken[slot], 0); }

INLINE Scratch scratch_at(const ScratchPool *pool, int64_t slot, int64_t vocab, int64_t block) {
    Scratch scratch;
    scratch.tokens = (Token *)(pool->memory + slot * pool->bytes);
    scratch.logits = (float *)(scratch.tokens + vocab);
    scratch.ids = (int32_t *)(scratch.logits + vocab);
    scratch.maxima = (float *)(scratch.ids + vocab);
    scratch.sorted = scratch.maxima + scratch_blocks(vocab, block);
    return scratch;
}

INLINE uint64_t token_key(float logit, int32_t id) {
    uint32_t bits;
    float no_minus_zero = logit + 0.0f;
    memcpy(&bits, &no_minus_zero, sizeof bits);
    uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)~ascending << 32 | (uint32_t)id;
}

INLINE int64_t token_id(Token token) { return (int64_t)(token.key & 0xffffffffu); }

// Which lanes are at least the threshold: bit i for lane i.
INLINE uint32_t lanes_at_least(vfloat x, float threshold) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(threshold), _CMP_GE_OQ);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(threshold), _CMP_GE_OQ));
#else
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES; lane++) lanes |= (uint32_t)(x[lane] >= threshold) << lane;
    return lanes;
#endif
}

// The maxima of every `block` logits, and that of the row: NaN if one of them is.
static inline float find_maxima(const float *logits, int64_t vocab, int64_t block, float *maxima) {
    float row_max = -INFINITY;
    vint broken = {0};
    for (int64_t start = 0; start < vocab; start += block) {
        int64_t end = start + block < vocab ? start + block : vocab;
        vfloat highest = splat(-INFINITY);
        for (int64_t i = start; i < end; i += LANES) {
            vfloat x = load_logits(logits + i, end - i);
            broken |= x != x;
            highest = choose(x > highest, x, highest);
        }
        float maximum = horizontal_max(highest);
        maxima[start / block] = maximum;
        row_max = maximum > row_max ? maximum : row_max;
    }
    for (int lane = 0; lane < LANES; lane++)
        if (broken[lane]) return NAN;
    return row_max;
}

// The first token of a row whose maximum is `row_max`.
INLINE int64_t first_token(const float *logits, int64_t vocab, int64_t block, const float *maxima, float row_max) {
    int64_t id = 0;
    while (maxima[id / block] < row_max) id += block;
    while (id < vocab - 1 && logits[id] < row_max) id++;
    return id;
}

// The nth largest of these values, which end up in another order.
static inline float nth_largest(float *values, int64_t count, int64_t n) {
    int64_t low = 0, high = count - 1, target = n - 1;
    while (low < high) {
        float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                float swapped = values[i];
                values[i++] = values[j];
                values[j--] = swapped;
            }
        }
        if (target <= j) high = j;
        else if (target >= i) low = i;
        else break;
    }
    return values[target];
}

// A threshold that at least `count` tokens of the row reach; minus infinity where only the whole row is as many.
static inline float threshold_for(const Scratch *scratch, int64_t vocab, int64_t block, int64_t count) {
    int64_t blocks = scratch_blocks(vocab, block);
    if (count > blocks) return -INFINITY;
    memcpy(scratch->sorted, scratch->maxima, blocks * sizeof(float));
    return nth_largest(scratch->sorted, blocks, count);
}

// All tokens that reach the threshold, by their ids: how many, their logits and ids in the scratch.
static inline int64_t collect(const float *logits, int64_t vocab, int64_t block, float threshold, const Scratch *scratch) {
    int64_t count = 0;
    for (int64_t start = 0; start < vocab; start += block) {
        if (scratch->maxima[start / block] < threshold) continue;
        int64_t end = start + block < vocab ? start + block : vocab;
        for (int64_t i = start; i < end; i += LANES) {
            uint32_t lanes = lanes_at_least(load_logits(logits + i, end - i), threshold);
            if (end - i < LANES) lanes &= (1u << (end - i)) - 1;
            for (; lanes; lanes &= lanes - 1) {
                int64_t id = i + __builtin_ctz(lanes);
                scratch->logits[count] = logits[id];
                scratch->ids[count++] = (int32_t)id;
            }
        }
    }
    return count;
}

// The shortest front of these tokens whose weights (or, where `counts`, whose number), with `before` of others, reach
// `limit`: it is moved to the beginning, in any order, and its length returned, which is 1 at least.
static inline int64_t cut_front(Token *tokens, int64_t count, double before, double limit, int counts) {
    int64_t low = 0, high = count;  // those under `low` are all inside, and counted; from `high` on all are outside
    while (low < high) {
        int64_t middle = low + (high - low) / 2, last = high - 1;
        uint64_t a = tokens[low].key, b = tokens[middle].key, c = tokens[last].key;
        int64_t at = a < b ? (b < c ? middle : a < c ? last : low) : (a < c ? low : b < c ? last : middle);
        Token pivot = tokens[at];
        tokens[at] = tokens[last];
        int64_t left = low;
        double sum = 0;
        for (int64_t i = low; i < last; i++) {
            Token token = tokens[i];
            if (token.key < pivot.key) {
                tokens[i] = tokens[left];
                tokens[left++] = token;
                sum += counts ? 1.0 : token.weight;
            }
        }
        tokens[last] = tokens[left];
        tokens[left] = pivot;
        if (before + sum >= limit) {
            high = left;
        } else {
            before += sum + (counts ? 1.0 : pivot.weight);
            low = left + 1;
            if (before >= limit) break;
        }
    }
    return low > 0 ? low : 1;
}
