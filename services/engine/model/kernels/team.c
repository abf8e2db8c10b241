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

// What is to be had, in one word, so that it is read and taken at once: the phase, its items, the next one to take.
enum { ITEM_BITS = 24 };
#define NEXT(ticket) ((int64_t)((ticket) & ((1u << ITEM_BITS) - 1)))
#define ITEMS(ticket) ((int64_t)((ticket) >> ITEM_BITS & ((1u << ITEM_BITS) - 1)))
#define PHASE(ticket) ((int64_t)((ticket) >> 2 * ITEM_BITS))

static struct {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic int64_t undone;  // items of the phase
    _Alignas(64) const Program *program;
    _Atomic int running;
    _Atomic int64_t wanted;  // threads of the running program, the caller's included
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
            atomic_store(&team.ticket, (uint64_t)phase << 2 * ITEM_BITS | (uint64_t)items << ITEM_BITS);
            return;
        }
        if (items == 1) program->run(program->work, phase, 0);
    }
    atomic_store(&team.ticket, 0);
    atomic_store(&team.running, 0);
}

// Take one item and run it. 0: there was none.
static int run_item(void) {
    uint64_t ticket = atomic_load(&team.ticket);
    if (NEXT(ticket) >= ITEMS(ticket)) return 0;
    ticket = atomic_fetch_add(&team.ticket, 1);
    if (NEXT(ticket) >= ITEMS(ticket)) return 0;
    // Read only now: while an item is held, neither the phase nor the program changes.
    const Program *program = team.program;
    program->run(program->work, PHASE(ticket), NEXT(ticket));
    if (atomic_fetch_sub(&team.undone, 1) == 1) advance(PHASE(ticket));
    return 1;
}

static void *work(void *argument) {
    int64_t index = (int64_t)(intptr_t)argument, waits = 0;
    for (;;) {
        if (index < atomic_load(&team.wanted) && run_item()) {
            waits = 0;
        } else if (atomic_load(&team.running) && index < atomic_load(&team.wanted)) {
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

int64_t running_threads(void) {
    int64_t wanted = atomic_load_explicit(&team.wanted, memory_order_relaxed);
    return wanted > 1 ? wanted : 1;
}

void run_program(const Program *program, int64_t threads) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    pthread_mutex_lock(&team.callers);
    if (team.started < threads - 1) start_threads(threads);
    team.program = program;
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
        if (run_item()) waits = 0;
        else wait_a_little(&waits);
    }
    atomic_store(&team.wanted, 0);
    pthread_mutex_unlock(&team.callers);
}
