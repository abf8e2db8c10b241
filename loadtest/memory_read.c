// Reads memory once on several threads: the floor under a decode step, which must read every weight. Built as a library
// with the engine's own flags, so that the compiler takes the widest loads that there are.

#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { MAX_THREADS = 256, LINE = 64, AHEAD = 4096 };

typedef struct {
    const uint8_t *from;
    int64_t bytes;
    uint64_t sum;
} Part;

static void *read_part(void *argument) {
    Part *part = argument;
    uint64_t sums[LINE / 8] = {0};
    for (const uint8_t *line = part->from; line < part->from + part->bytes; line += LINE) {
        __builtin_prefetch(line + AHEAD);
        uint64_t words[LINE / 8];
        memcpy(words, line, LINE);
        for (int i = 0; i < LINE / 8; i++) sums[i] += words[i];
    }
    for (int i = 0; i < LINE / 8; i++) part->sum += sums[i];
    return 0;
}

// The sum of all words, so that no load can be left out. Each thread takes one piece; what is over a multiple of
// threads * LINE bytes is not read.
uint64_t read_memory(const uint8_t *data, int64_t bytes, int64_t threads) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    Part parts[MAX_THREADS];
    pthread_t running[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    int64_t piece = bytes / threads / LINE * LINE;
    for (int64_t i = 0; i < threads; i++) parts[i] = (Part){data + i * piece, piece, 0};
    for (int64_t i = 1; i < threads; i++) started[i] = !pthread_create(&running[i], 0, read_part, &parts[i]);
    read_part(&parts[0]);
    uint64_t sum = parts[0].sum;
    for (int64_t i = 1; i < threads; i++) {
        if (started[i]) pthread_join(running[i], 0);
        else read_part(&parts[i]);
        sum += parts[i].sum;
    }
    return sum;
}
