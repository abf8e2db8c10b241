#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

enum {
    SPINS = 1000,  // about 25 microseconds: longer than an item takes, as a rule
    YIELDS = 10,
    NAP_NANOSECONDS = 20000,
};

// What a thread has left of its share, in one word, so that it is read and taken at once: the phase, the items' end, the
// next one to take.
enum { ITEM_BITS = 24 };
#define WORD(phase, next, end) ((uint64_t)(phase) << 2 * ITEM_BITS | (uint64_t)(end) << ITEM_BITS | (uint64_t)(next))
#define NEXT(share) ((int64_t)((share) & ((1u << ITEM_BITS) - 1)))
#define END(share) ((int64_t)((share) >> ITEM_BITS & ((1u << ITEM_BITS) - 1)))
#define PHASE(share) ((int64_t)((share) >> 2 * ITEM_BITS))

typedef struct {
    _Alignas(64) _Atomic uint64_t left;
} Share;

static struct {
    Share shares[MAX_THREADS];
    _Alignas(64) _Atomic int64_t undone;  // items of the phase
    _Alignas(64) const Program *program;
    int64_t threads;  // of the running program, the caller's included
    _Atomic int running;
    _Atomic int64_t wanted;  // threads that shall take items; one that fell behind may take another program's
    int64_t started;         // threads that exist besides the callers'
    int64_t sleeping;
    pthread_mutex_t callers, mutex;
    pthread_cond_t wake;
} team = {
    .callers = PTHREAD_MUTEX_INITIALIZER, .mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void pause_a_little(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_a_little(int64_t *waits) {
    ++*waits;
    if (*waits < SPINS) {
        pause_a_little();
    } else if (*waits < SPINS + YIELDS) {
        sched_yield();
    } else {
        // A core without anything to run takes over a thread that waits for another core: perhaps the one that holds
        // the last item.
        struct timespec nap = {0, NAP_NANOSECONDS};
        nanosleep(&nap, 0);
    }
}

// Open the phase after this one, running those on the way that are not worth sharing.
static void advance(int64_t phase) {
    const Program *program = team.program;
    for (phase++; phase < program->phases; phase++) {
        int64_t items = program->items(program->work, phase);
        if (items > 1) {
            atomic_store(&team.undone, items);
            // All shares that were not given anything are empty since the phase before.
            int64_t shares = items < team.threads ? items : team.threads;
            for (int64_t i = 0; i < shares; i++)
                atomic_store(&team.shares[i].left, WORD(phase, items * i / shares, items * (i + 1) / shares));
            return;
        }
        if (items == 1) program->run(program->work, phase, 0);
    }
    atomic_store(&team.running, 0);
}

// Take one item and run it: the first of the thread's own share, or the last of another's. 0: there was none.
static int run_item(int64_t index, int64_t threads) {
    for (int64_t i = 0; i < threads; i++) {
        Share *share = &team.shares[(index + i) % threads];
        uint64_t left = atomic_load(&share->left);
        while (NEXT(left) < END(left)) {
            uint64_t after = i == 0 ? left + 1 : left - (1u << ITEM_BITS);
            if (!atomic_compare_exchange_weak(&share->left, &left, after)) continue;
            // Read only now: while an item is held, neither the phase nor the program changes.
            const Program *program = team.program;
            program->run(program->work, PHASE(left), i == 0 ? NEXT(left) : END(left) - 1);
            if (atomic_fetch_sub(&team.undone, 1) == 1) advance(PHASE(left));
            return 1;
        }
    }
    return 0;
}

static void *work(void *argument) {
    int64_t index = (int64_t)(intptr_t)argument, waits = 0;
    for (;;) {
        int64_t wanted = atomic_load(&team.wanted);
        if (index < wanted && run_item(index, wanted)) {
            waits = 0;
        } else if (atomic_load(&team.running) && index < wanted) {
            wait_a_little(&waits);
        } else if (++waits < SPINS) {
            pause_a_little();  // the next program often follows at once
        } else {
            pthread_mutex_lock(&team.mutex);
            team.sleeping++;
            while (!atomic_load(&team.running) || index >= atomic_load(&team.wanted))
                pthread_cond_wait(&team.wake, &team.mutex);
            team.sleeping--;
            pthread_mutex_unlock(&team.mutex);
            waits = 0;
        }
    }
    return 0;
}

// Threads that cannot be started are done without.
static void start_threads(int64_t threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the process's main thread's
    while (team.started < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, 0, work, (void *)(intptr_t)(team.started + 1))) break;
        pthread_detach(thread);
        team.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

void run_program(const Program *program, int64_t threads) {
    if (threads < 1) threads = 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    pthread_mutex_lock(&team.callers);
    if (team.started < threads - 1) start_threads(threads);
    team.program = program;
    team.threads = threads;
    atomic_store(&team.running, 1);
    advance(-1);
    if (threads > 1 && atomic_load(&team.running)) {
        pthread_mutex_lock(&team.mutex);
        atomic_store(&team.wanted, threads);
        if (team.sleeping) pthread_cond_broadcast(&team.wake);
        pthread_mutex_unlock(&team.mutex);
    }
    int64_t waits = 0;
    while (atomic_load(&team.running)) {
        if (run_item(0, threads)) waits = 0;
        else wait_a_little(&waits);
    }
    atomic_store(&team.wanted, 0);
    pthread_mutex_unlock(&team.callers);
}
