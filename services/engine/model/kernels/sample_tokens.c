// Chooses the next token of every row of logits: steps 7 to 12 of services/engine/sampling/sampler.py, where they are
// described; torch_draw.py beside it has the same in PyTorch and kernel_draw.py the call.
//
// A row is worked on by one thread, and its result depends on that row alone.

#include "team.h"
#include "token_front.h"

enum { NOTHING, GREEDY, PLAIN, TRUNCATED };  // what is to be done with a row

typedef struct {
    // Of each row; the last five are of rows that draw
    const int64_t *kinds;
    const float *temperatures;
    const double *min_weights, *top_ps;
    const int64_t *top_ks, *seeds, *positions;
    const float *logits;  // [rows, vocab]
    int64_t rows, vocab, group, block, first_try;
    float scale;
    int64_t *token_ids;  // [rows]
    float *maxima;       // [rows]
    // Where a row's is not null, the logits of the distribution that it was drawn from go there, [vocab]
    float *const *processed;
    ScratchPool pool;
} Sampling;

// SplitMix64: see race.py.
static const uint64_t INCREMENT = 0x9E3779B97F4A7C15u;

INLINE uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

typedef struct {
    uint64_t key;  // the hash of the row's seed and position
    double best;   // the highest weight / E so far
    int64_t winner;
} Race;

INLINE Race race_of(const Sampling *s, int64_t row) {
    uint64_t key = mix(mix((uint64_t)s->seeds[row] + INCREMENT) + (uint64_t)s->positions[row] * INCREMENT);
    return (Race){key, 0, 0};
}

INLINE void enter(Race *race, int64_t id, double weight) {
    uint64_t bits = mix(race->key + (uint64_t)(id + 1) * INCREMENT);
    double uniform = ((double)(bits >> 12) + 0.5) * 0x1p-52;
    // E = -log(uniform) is at least 1 - uniform, which shows of nearly all entrants that they lose.
    if (weight < race->best * (1 - uniform) * (1 - 1e-9)) return;
    double ratio = weight / -log(uniform);
    if (ratio > race->best) {
        race->best = ratio;
        race->winner = id;
    }
}

// Whether all of these tokens weigh nothing, as under a grammar's mask most do: known from their blocks' maxima alone.
static int weigh_nothing(const Sampling *s, int64_t start, int64_t count, float row_max, float temperature,
                         const float *maxima) {
    float most = -INFINITY;
    for (int64_t block = start / s->block; block * s->block < start + count; block++)
        if (maxima[block] > most) most = maxima[block];
    return (most - row_max) / temperature <= -64.0f;  // as in weights_of, which rounds to 0 from there on
}

// In two heats: groups of consecutive tokens, then the tokens of the group that won.
static int64_t draw_plain(const Sampling *s, int64_t row, const float *logits, float row_max, const float *maxima) {
    float temperature = s->temperatures[row];
    Race groups = race_of(s, row);
    for (int64_t start = 0; start < s->vocab; start += s->group) {
        int64_t rest = s->vocab - start, count = rest < s->group ? rest : s->group;
        if (weigh_nothing(s, start, count, row_max, temperature, maxima)) continue;
        double sum = weigh(logits + start, count, row_max, temperature, s->scale);
        enter(&groups, -1 - start / s->group, sum);
    }
    int64_t start = (-1 - groups.winner) * s->group, end = start + s->group < s->vocab ? start + s->group : s->vocab;
    Race tokens = race_of(s, row);
    for (int64_t i = start; i < end; i += LANES) {
        vfloat weights = weights_of(load_logits(logits + i, end - i), row_max, temperature, s->scale);
        for (int64_t lane = 0; lane < LANES && i + lane < end; lane++) enter(&tokens, i + lane, weights[lane]);
    }
    return tokens.winner;
}

// The shortest front of a row that weighs `limit`, in any order: how many tokens. A histogram over the depth says in
// which bin the front ends, and only the tokens of that bin are looked at one by one.
static int64_t find_nucleus(const Sampling *s, const float *logits, float row_max, float temperature, double limit,
                            Token *tokens) {
    enum { BINS = 1024 };
    double histogram[BINS + 1] = {0}, before = 0;
    // The last bin is beyond the depth at which weights are 0.
    float bins_per_nat = BINS / logf(4 * s->scale);
    int64_t sure = 0, unsure = s->vocab, last = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < s->vocab; i += LANES) {
            vfloat depths = depths_of(load_logits(logits + i, s->vocab - i), row_max, temperature);
            vfloat weights = weights_at(depths, s->scale), place = depths * -bins_per_nat;
            vint bins = __builtin_convertvector(choose(place > BINS, splat(BINS), place), vint);
            int64_t count = s->vocab - i < LANES ? s->vocab - i : LANES;
            if (pass == 0) {
                for (int64_t lane = 0; lane < count; lane++) histogram[bins[lane]] += weights[lane];
                continue;
            }
            for (uint32_t lanes = lanes_at_least(splat(last) - __builtin_convertvector(bins, vfloat), 0); lanes;
                 lanes &= lanes - 1) {
                int64_t lane = __builtin_ctz(lanes);
                if (lane >= count || weights[lane] == 0) continue;
                Token token = {token_key(logits[i + lane], (int32_t)(i + lane)), weights[lane]};
                if (bins[lane] < last) tokens[sure++] = token;
                else tokens[--unsure] = token;
            }
        }
        if (pass == 0)
            while (last < BINS && before + histogram[last] < limit) before += histogram[last++];
    }
    int64_t inside = cut_front(tokens + unsure, s->vocab - unsure, before, limit, 0);
    memmove(tokens + sure, tokens + unsure, inside * sizeof(Token));
    return sure + inside;
}

// The tokens that min_p, top_k and top_p leave, in any order at the beginning of the scratch's: how many.
static int64_t find_survivors(const Sampling *s, int64_t row, const float *logits, float row_max, Scratch *scratch) {
    float temperature = s->temperatures[row];
    double min_weight = s->min_weights[row], top_p = s->top_ps[row];
    int64_t top_k = s->top_ks[row];
    int only_top_p = top_k >= s->vocab && min_weight <= 1;
    Token *tokens = scratch->tokens;
    for (int64_t wanted = top_k < s->vocab ? top_k : s->first_try;; wanted *= 8) {
        float threshold = threshold_for(scratch, s->vocab, s->block, wanted);
        int64_t found = collect(logits, s->vocab, s->block, threshold, scratch), count = 0;
        double mass = 0;
        for (int64_t i = 0; i < found; i += LANES) {
            vfloat weights = weights_of(load_logits(scratch->logits + i, found - i), row_max, temperature, s->scale);
            for (int64_t lane = 0; lane < LANES && i + lane < found; lane++)
                if (weights[lane] >= min_weight) {
                    mass += weights[lane];
                    tokens[count++] = (Token){token_key(scratch->logits[i + lane], scratch->ids[i + lane]), weights[lane]};
                }
        }
        // Nothing that min_p and top_k leave is missing: what these leave adds up to what top_p is a share of.
        int complete = threshold == -INFINITY || count < found || count >= top_k;
        if (complete) {
            if (count > top_k) {
                count = cut_front(tokens, count, 0, (double)top_k, 1);
                mass = 0;
                for (int64_t i = 0; i < count; i++) mass += tokens[i].weight;
            }
        } else if (only_top_p) {
            double found_mass = mass;
            mass = weigh(logits, s->vocab, row_max, temperature, s->scale);
            if (found_mass < top_p * mass) return find_nucleus(s, logits, row_max, temperature, top_p * mass, tokens);
        } else {
            continue;
        }
        return top_p < 1 ? cut_front(tokens, count, 0, top_p * mass, 0) : count;
    }
}

static void sample_row(const Sampling *s, int64_t row, Scratch *scratch) {
    const float *logits = s->logits + row * s->vocab;
    float *processed = s->processed ? s->processed[row] : 0;
    float row_max = find_maxima(logits, s->vocab, s->block, scratch->maxima);
    s->maxima[row] = row_max;
    s->token_ids[row] = 0;
    if (!isfinite(row_max) || s->kinds[row] == NOTHING) return;
    if (s->kinds[row] == GREEDY) {
        s->token_ids[row] = first_token(logits, s->vocab, s->block, scratch->maxima, row_max);
        if (processed) memcpy(processed, logits, s->vocab * sizeof(float));
        return;
    }
    float temperature = s->temperatures[row];
    if (s->kinds[row] == PLAIN) {
        s->token_ids[row] = draw_plain(s, row, logits, row_max, scratch->maxima);
        for (int64_t i = 0; processed && i < s->vocab; i++) processed[i] = (logits[i] - row_max) / temperature;
        return;
    }
    int64_t count = find_survivors(s, row, logits, row_max, scratch);
    Race race = race_of(s, row);
    for (int64_t i = 0; i < count; i++) enter(&race, token_id(scratch->tokens[i]), scratch->tokens[i].weight);
    s->token_ids[row] = race.winner;
    if (processed) {
        for (int64_t i = 0; i < s->vocab; i++) processed[i] = -INFINITY;
        for (int64_t i = 0; i < count; i++) {
            int64_t id = token_id(scratch->tokens[i]);
            processed[id] = (logits[id] - row_max) / temperature;
        }
    }
}

static int64_t items(void *work, int64_t phase) {
    (void)phase;
    return ((Sampling *)work)->rows;
}

static void run(void *work, int64_t phase, int64_t item) {
    (void)phase;
    Sampling *s = work;
    int64_t slot = take_scratch(&s->pool);
    Scratch scratch = scratch_at(&s->pool, slot, s->vocab, s->block);
    sample_row(s, item, &scratch);
    give_scratch_back(&s->pool, slot);
}

int64_t sampling_scratch_bytes(int64_t vocab, int64_t block) { return scratch_size(vocab, block); }

void sample_tokens(Sampling *sampling) {
    Program program = {sampling, 1, items, run};
    run_program(&program, sampling->pool.threads);
}
