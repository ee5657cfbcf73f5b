/* A big batch in units of whole keys, taken by the caller and by helper threads.
 *
 *     caller: offer ─▶ take, copy, take, copy, ... nothing left ─▶ withdraw ─▶ wait for helpers inside
 *     helper: sleep ─▶ find an offer ─▶ take, copy, ...          ─▶ leave
 *
 * Nobody waits for a helper that did not begin. Units are taken in rising order, so when one ends
 * early, all keys below it were taken and nothing above is worth taking; the caller's result is the
 * lowest key that is not done.
 *
 * Whether help pays is found out and not guessed: with processors to spare a batch ends in little
 * more than half the time, on busy ones the caller waits for a helper that lost its processor. Both
 * ways are timed, by size: the first batches alone, some more in turns; then the faster way is taken
 * but for every sixteenth batch.
 *
 * Helpers start when first wanted: not with the first batch, which pays for its page faults already
 * (the first load of a fresh client took 1.3 ms longer). They live as long as the process, or until
 * fewer are wanted. A forked child has none and starts its own.
 */
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include "clock.h"
#include "copy.h"

/* A helper is awake some 30 us after the offer, in which half a megabyte is copied. Measured with two
 * threads on two idle cores, pieces of 64 KiB, as many times as fast as one thread (save, load): 1 MiB
 * 0.98 to 1.0, 2 MiB 1.0 to 1.2, 4 MiB 1.2 to 1.4, 8 MiB 1.3 to 1.6, 64 MiB in pieces of 2 MiB 1.3 to
 * 1.75. */
#define PARALLEL_BYTES ((size_t)2 << 20)
/* Some 12 us at 22 GB/s, which is what one of two waits for the other at most; to take one costs a lock.
 * Units of 32 KiB to 1 MiB made no difference (64 x 64 KiB: 22.6 to 24.9 GB/s), 2 MiB did (13.8 to 18.2). */
#define UNIT_BYTES ((size_t)256 << 10)

/* A helper's last unit takes some 20 us; to sleep and be woken takes longer. */
#define SPIN_NS 40000

#define HELPER_STACK ((size_t)256 << 10)

struct offer {
    const struct ems_batch *batch;
    size_t next, end;    /* keys that nobody took */
    size_t stopped;      /* lowest key that is not done */
    int reason;          /* why, or EMS_COPY_DONE */
    unsigned helpers;    /* inside; written under the lock, read without */
    struct offer *later; /* in the list, while there may be something to take */
};

/* What a byte takes in batches of one power of two, in ns, averaged over about four of them; 0 is
 * not known. */
struct rate {
    double alone, shared;
    unsigned batches;
};

#define CLASSES 11 /* 2 MiB ... 2 GiB and more */
#define ALONE 4
#define TURNS 12
#define EXPLORE 16
#define WORTH_IT 0.95

static struct rate rates[2][CLASSES]; /* out of the pool, into it */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t offered = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static struct offer *offers;
static unsigned wanted, started, idle; /* helpers */
static int fork_handled;

static size_t copy_keys(const struct ems_batch *b, size_t first, size_t count, int *reason)
{
    if (b->into_pool)
        return ems_copy_in(b->spans, first, count, b->base, b->places, b->mask, b->limits, reason);
    return ems_copy_out(b->spans, first, count, b->base, b->places, b->verify, b->limits, reason);
}

/* The following are called with the lock held. */

static int take(struct offer *offer, size_t *first, size_t *count)
{
    const struct ems_batch *batch = offer->batch;
    uint64_t nbytes = 0;
    size_t key = offer->next;

    if (offer->reason != EMS_COPY_DONE)
        return 0;
    while (key < offer->end && nbytes < UNIT_BYTES) {
        if (!batch->mask || batch->mask[key])
            nbytes += batch->spans->lengths[key];
        key++;
    }
    *first = offer->next;
    *count = key - offer->next;
    offer->next = key;
    return *count != 0;
}

static void work(struct offer *offer)
{
    size_t first, count, done;
    int reason;

    while (take(offer, &first, &count)) {
        pthread_mutex_unlock(&lock);
        done = copy_keys(offer->batch, first, count, &reason);
        pthread_mutex_lock(&lock);
        if (reason != EMS_COPY_DONE && done < offer->stopped) {
            offer->stopped = done;
            offer->reason = reason;
        }
    }
}

static void withdraw(struct offer *offer)
{
    struct offer **at = &offers;

    while (*at && *at != offer)
        at = &(*at)->later;
    if (*at)
        *at = offer->later;
}

static void *help(void *unused)
{
    struct offer *offer;

    prctl(PR_SET_NAME, "ems-copy");
    pthread_mutex_lock(&lock);
    for (;;) {
        while (started <= wanted && !(offer = offers)) {
            idle++;
            pthread_cond_wait(&offered, &lock);
            idle--;
        }
        if (started > wanted)
            break;
        __atomic_store_n(&offer->helpers, offer->helpers + 1, __ATOMIC_RELAXED);
        work(offer);
        withdraw(offer); /* there is nothing left to take; the caller may have done it */
        __atomic_store_n(&offer->helpers, offer->helpers - 1, __ATOMIC_RELEASE);
        if (!offer->helpers)
            pthread_cond_broadcast(&left);
    }
    started--;
    pthread_mutex_unlock(&lock);
    return unused;
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&offered, NULL);
    pthread_cond_init(&left, NULL);
    offers = NULL;
    started = idle = 0;
}

static void start_helpers(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;

    if (!fork_handled)
        fork_handled = !pthread_atfork(before_fork, after_fork, after_fork_in_child);
    if (!fork_handled || pthread_attr_init(&attributes))
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, HELPER_STACK);
    /* Signals are for the threads of the program. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < wanted && !pthread_create(&thread, &attributes, help, NULL))
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void spin_for_helpers(const struct offer *offer)
{
    uint64_t until = 0;

    for (unsigned turn = 0; __atomic_load_n(&offer->helpers, __ATOMIC_ACQUIRE); turn++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (turn % 64 == 0) {
            uint64_t now = ems_now_ns();

            if (!until)
                until = now + SPIN_NS;
            else if (now >= until)
                return;
        }
    }
}

static uint64_t batch_bytes(const struct ems_batch *batch)
{
    uint64_t nbytes = 0;

    for (size_t key = batch->first; key < batch->first + batch->count; key++)
        if (!batch->mask || batch->mask[key])
            nbytes += batch->spans->lengths[key];
    return nbytes;
}

static struct rate *rate_of(uint64_t nbytes, int into_pool)
{
    int class = 0;

    while (class < CLASSES - 1 && nbytes >> class >= 2 * PARALLEL_BYTES)
        class++;
    return &rates[into_pool][class];
}

static int choose_shared(struct rate *rate)
{
    unsigned batch = rate->batches++;
    int better = rate->shared < WORTH_IT * rate->alone;

    if (batch < TURNS)
        return batch >= ALONE && batch % 2;
    return batch % EXPLORE == 0 ? !better : better;
}

static void learn(double *average, uint64_t ns, uint64_t nbytes)
{
    double now = (double)ns / (double)nbytes;

    *average = *average ? *average + (now - *average) / 4 : now;
}

void ems_copy_set_threads(unsigned count)
{
    pthread_mutex_lock(&lock);
    __atomic_store_n(&wanted, count ? count - 1 : 0, __ATOMIC_RELAXED);
    if (started > wanted)
        pthread_cond_broadcast(&offered);
    pthread_mutex_unlock(&lock);
}

/* With the lock held, which it gives up meanwhile. */
static void copy_shared(struct offer *offer)
{
    if (started < wanted)
        start_helpers();
    offer->later = offers;
    offers = offer;
    if (idle)
        pthread_cond_broadcast(&offered);
    work(offer);
    withdraw(offer);
    if (offer->helpers) {
        pthread_mutex_unlock(&lock);
        spin_for_helpers(offer);
        pthread_mutex_lock(&lock);
        while (offer->helpers)
            pthread_cond_wait(&left, &lock);
    }
}

size_t ems_copy_batch(const struct ems_batch *batch, int *reason)
{
    size_t end = batch->first + batch->count;
    struct offer offer = {batch, batch->first, end, end, EMS_COPY_DONE, 0, NULL};
    uint64_t nbytes, begin;
    struct rate *rate;
    int shared;

    if (batch->arrived)
        return ems_copy_out_by_piece(batch->spans, batch->first, batch->count, batch->base, batch->places,
                                     batch->verify, batch->limits, batch->arrived, reason);
    /* One key is one unit. */
    if (!__atomic_load_n(&wanted, __ATOMIC_RELAXED) || batch->count == 1 ||
        (nbytes = batch_bytes(batch)) < PARALLEL_BYTES)
        return copy_keys(batch, batch->first, batch->count, reason);
    begin = ems_now_ns();
    rate = rate_of(nbytes, batch->into_pool);
    pthread_mutex_lock(&lock);
    shared = choose_shared(rate);
    if (shared) {
        copy_shared(&offer);
    } else {
        pthread_mutex_unlock(&lock);
        offer.stopped = copy_keys(batch, batch->first, batch->count, &offer.reason);
        pthread_mutex_lock(&lock);
    }
    if (offer.reason == EMS_COPY_DONE)
        learn(shared ? &rate->shared : &rate->alone, ems_now_ns() - begin, nbytes);
    pthread_mutex_unlock(&lock);
    *reason = offer.reason;
    return offer.stopped;
}
