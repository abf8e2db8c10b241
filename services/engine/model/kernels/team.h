// The threads of the decoder's step. Work comes as a program: phases one after another, each of a number of items
// that any thread may take in any order.
//
// Each thread begins with a share of neighbouring items. Phases that are cut alike, by rows for one, thus find in a core's
// cache what it made in the phase before. A thread whose share is done takes the last items of others' shares (work
// stealing; Blumofe and Leiserson, 1999).
//
// A phase ends when its items are done, not when all threads have arrived: a thread that lost its core to another
// process while it held no item keeps nobody waiting. Threads that find nothing to do spin for a moment and then leave
// their core to others, a frontend for one.

#pragma once

#include <stdint.h>

enum {
    MAX_THREADS = 256,
    MAX_PHASES = (1 << 16) - 1,
    MAX_ITEMS = (1 << 24) - 1,
};

typedef struct {
    void *work;
    int64_t phases;
    // How many items the phase has: 0 passes it over, and 1 runs at once in the thread that asks. Called once for each
    // phase, when everything before it is done.
    int64_t (*items)(void *work, int64_t phase);
    void (*run)(void *work, int64_t phase, int64_t item);
} Program;

// Run the program on `threads` threads, the caller's included, and return when it is done. The others are started when
// they are first needed, and stay. Programs of several callers run one after another.
void run_program(const Program *program, int64_t threads);
