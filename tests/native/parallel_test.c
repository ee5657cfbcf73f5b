/* Big batches from several threads at once, each of them shared with the helpers; also in forked
 * children, the fork falling anywhere into the copies of other threads. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "copy.h"

#define CALLERS 3
#define NKEYS ((size_t)40)
#define MAX_LENGTH ((uint64_t)120000)

static int rounds;

static uint64_t draw(uint64_t *state, uint64_t below)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (*state >> 33) % below;
}

static void copy_once(uint64_t *state, unsigned char *from, unsigned char *pool, unsigned char *to)
{
    struct ems_piece in[NKEYS], out[NKEYS];
    uint64_t first[NKEYS + 1], lengths[NKEYS], at = 0;
    struct ems_place places[NKEYS];
    unsigned char mask[NKEYS];
    size_t begin = draw(state, 3), count = NKEYS - begin;
    struct ems_copy_limits limits = {NULL, 0};
    struct ems_spans source = {NKEYS, first, lengths, in}, target = {NKEYS, first, lengths, out};
    struct ems_batch batch = {&source, begin, count, pool, places, mask, &limits, 1, 0, NULL};
    int reason, cancelled = 1;

    for (size_t k = 0; k < NKEYS; k++) {
        first[k] = k;
        lengths[k] = MAX_LENGTH / 2 + draw(state, MAX_LENGTH / 2);
        in[k] = (struct ems_piece){(uint64_t)(uintptr_t)(from + at), lengths[k]};
        out[k] = (struct ems_piece){(uint64_t)(uintptr_t)(to + at), lengths[k]};
        places[k] = (struct ems_place){0, 0, at, lengths[k], 0};
        mask[k] = draw(state, 8) != 0;
        at += lengths[k];
    }
    first[NKEYS] = NKEYS;
    memset(pool, 0, at);
    CHECK(ems_copy_batch(&batch, &reason) == NKEYS && reason == EMS_COPY_DONE);
    for (size_t k = begin; k < NKEYS; k++)
        if (mask[k])
            CHECK(!memcmp(pool + places[k].offset, from + places[k].offset, lengths[k]));
        else
            for (size_t i = 0; i < lengths[k]; i++)
                CHECK(pool[places[k].offset + i] == 0);
    batch.mask = NULL;
    CHECK(ems_copy_batch(&batch, &reason) == NKEYS && reason == EMS_COPY_DONE);
    CHECK(!memcmp(pool + places[begin].offset, from + places[begin].offset,
                  at - places[begin].offset));
    for (size_t k = begin; k < NKEYS; k++)
        CHECK(places[k].checksum == ems_checksum(from + places[k].offset, lengths[k]));

    memset(to, 0, at);
    batch.spans = &target;
    batch.into_pool = 0;
    batch.verify = (int)draw(state, 2);
    CHECK(ems_copy_batch(&batch, &reason) == NKEYS && reason == EMS_COPY_DONE);
    CHECK(!memcmp(to + places[begin].offset, from + places[begin].offset,
                  at - places[begin].offset));

    /* The lowest of several bad keys, in whichever thread each is found. */
    size_t bad = begin + draw(state, count), worse = begin + draw(state, count);
    pool[places[bad].offset] ^= 1;
    pool[places[worse].offset + lengths[worse] - 1] ^= 2;
    batch.verify = 1;
    CHECK(ems_copy_batch(&batch, &reason) == (bad < worse ? bad : worse));
    CHECK(reason == EMS_COPY_DIFFERS);

    limits.deadline_ns = 1;
    CHECK(ems_copy_batch(&batch, &reason) == begin && reason == EMS_COPY_DEADLINE);
    limits.cancelled = &cancelled;
    CHECK(ems_copy_batch(&batch, &reason) == begin && reason == EMS_COPY_CANCELLED);
}

static void *caller(void *argument)
{
    uint64_t state = (uint64_t)(uintptr_t)argument;
    unsigned char *memory[3];

    for (int i = 0; i < 3; i++)
        CHECK(memory[i] = calloc(NKEYS, MAX_LENGTH));
    for (size_t i = 0; i < NKEYS * MAX_LENGTH; i++)
        memory[0][i] = (unsigned char)(1 + i % 251);
    for (int round = 0; round < rounds; round++)
        copy_once(&state, memory[0], memory[1], memory[2]);
    for (int i = 0; i < 3; i++)
        free(memory[i]);
    return NULL;
}

static void run_callers(void)
{
    pthread_t threads[CALLERS];

    for (uintptr_t i = 0; i < CALLERS; i++)
        CHECK(!pthread_create(&threads[i], NULL, caller, (void *)(i + 1)));
    for (int i = 0; i < CALLERS; i++)
        CHECK(!pthread_join(threads[i], NULL));
}

static void fork_meanwhile(void)
{
    pthread_t busy;
    int status;

    CHECK(!pthread_create(&busy, NULL, caller, (void *)7));
    for (int child = 0; child < 5; child++) {
        pid_t pid = fork();

        if (!pid) {
            rounds = 2;
            caller((void *)9);
            _exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
    CHECK(!pthread_join(busy, NULL));
}

int main(int argc, char **argv)
{
    int forks = argc > 2 ? atoi(argv[2]) : 1;

    rounds = argc > 1 ? atoi(argv[1]) : 20; /* the first ones of a size are not shared */
    const char *kernel = ems_copy_setup(getenv("EMS_COPY_IMPL"));

    CHECK(kernel);
    for (unsigned threads = 1; threads < 5; threads += 2) {
        ems_copy_set_threads(threads);
        run_callers();
        if (forks)
            fork_meanwhile();
    }
    printf("parallel_test: %s, %d callers, %d rounds\n", kernel, CALLERS, rounds);
    return 0;
}
