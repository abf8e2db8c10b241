// Logprobs, ranks and the likeliest alternatives of rows of logits: what services/engine/sampling/logprobs.py has in
// PyTorch; kernel_draw.py beside it has the call. A row is worked on by one thread.

#include <stdlib.h>

#include "team.h"
#include "token_front.h"

typedef struct {
    const float *logits;  // [any, vocab]; each row has a finite maximum
    int64_t vocab, block;
    const int64_t *rows;             // [count]: which rows
    const int64_t *token_ids;        // [count]
    const int64_t *alternatives;     // [count]: how many are asked for, `width` at most
    int64_t count, width;
    float scale;
    double *logprobs;      // [count]
    int64_t *ranks;        // [count]
    int64_t *found;        // [count]: how many alternatives there are
    int64_t *top_ids;      // [count, width]
    double *top_logprobs;  // [count, width]
    ScratchPool pool;
} Logprobs;

static int by_key(const void *a, const void *b) {
    uint64_t first = ((const Token *)a)->key, second = ((const Token *)b)->key;
    return first < second ? -1 : first > second;
}

static int64_t count_higher(const float *logits, int64_t vocab, float than) {
    vint higher = {0};
    for (int64_t i = 0; i < vocab; i += LANES) higher -= load_logits(logits + i, vocab - i) > than;
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) count += higher[lane];
    return count;
}

static void describe_row(const Logprobs *l, int64_t at, Scratch *scratch) {
    const float *logits = l->logits + l->rows[at] * l->vocab;
    float row_max = find_maxima(logits, l->vocab, l->block, scratch->maxima);
    double log_total = (double)row_max + log(weigh(logits, l->vocab, row_max, 1.0f, l->scale) / (double)l->scale);
    float chosen = logits[l->token_ids[at]];
    l->logprobs[at] = (double)chosen - log_total;
    l->ranks[at] = count_higher(logits, l->vocab, chosen) + 1;
    int64_t wanted = l->alternatives[at] < l->vocab ? l->alternatives[at] : l->vocab, found = 0;
    if (wanted > 0) {
        float threshold = threshold_for(scratch, l->vocab, l->block, wanted);
        int64_t count = collect(logits, l->vocab, l->block, threshold, scratch);
        for (int64_t i = 0; i < count; i++)
            if (scratch->logits[i] != -INFINITY)
                scratch->tokens[found++].key = token_key(scratch->logits[i], scratch->ids[i]);
        if (found > wanted) found = cut_front(scratch->tokens, found, 0, (double)wanted, 1);
        qsort(scratch->tokens, found, sizeof(Token), by_key);
    }
    l->found[at] = found;
    for (int64_t i = 0; i < found; i++) {
        int64_t id = token_id(scratch->tokens[i]);
        l->top_ids[at * l->width + i] = id;
        l->top_logprobs[at * l->width + i] = (double)logits[id] - log_total;
    }
}

static int64_t items(void *work, int64_t phase) {
    (void)phase;
    return ((Logprobs *)work)->count;
}

static void run(void *work, int64_t phase, int64_t item) {
    (void)phase;
    Logprobs *l = work;
    int64_t slot = take_scratch(&l->pool);
    Scratch scratch = scratch_at(&l->pool, slot, l->vocab, l->block);
    describe_row(l, item, &scratch);
    give_scratch_back(&l->pool, slot);
}

void token_logprobs(Logprobs *logprobs) {
    Program program = {logprobs, 1, items, run};
    run_program(&program, logprobs->pool.threads);
}
