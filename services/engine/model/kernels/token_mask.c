// Bans the tokens that a grammar's packed mask has no bit for: services/engine/sampling/token_mask.py has the layout,
// the same in PyTorch, and the call.

#include "token_mask.h"

#include "team.h"

typedef struct {
    float *logits;         // [rows, vocab]
    const uint32_t *mask;  // [rows, words]
    int64_t rows, vocab, words;
} Masking;

static int64_t items(void *work, int64_t phase) {
    (void)phase;
    return ((Masking *)work)->rows;
}

static void run(void *work, int64_t phase, int64_t row) {
    (void)phase;
    const Masking *m = work;
    const uint32_t *mask = m->mask + row * m->words;
    for (int64_t first = 0; first < m->vocab; first += MASK_BITS) {
        uint32_t allowed = mask[first / MASK_BITS];
        if (allowed == UINT32_MAX) continue;
        float *logits = m->logits + row * m->vocab + first;
        if (m->vocab - first < MASK_BITS) {
            for (int64_t i = 0; i < m->vocab - first; i++)
                if (!(allowed >> i & 1)) logits[i] += -INFINITY;
            continue;
        }
        for (int i = 0; i < MASK_BITS; i += LANES)
            store(logits, i, load(logits, i, 0) + mask_addition(allowed >> i), 0);
    }
}

void add_token_mask(float *logits, const uint32_t *mask, int64_t rows, int64_t vocab, int64_t words, int64_t threads) {
    Masking masking = {logits, mask, rows, vocab, words};
    Program program = {&masking, 1, items, run};
    run_program(&program, threads);
}
