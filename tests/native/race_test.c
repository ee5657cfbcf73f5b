/* The real writer against real readers, in threads: many versions a second of a few keys, on a pool so
 * small that extents are granted again at once.
 *
 * Built twice (see `run`). With PAYLOAD values are copied by the real loops, and every value that a
 * reader accepts is looked at word by word: a torn one ends the program. Without PAYLOAD only the index
 * is used, under ThreadSanitizer: its words must be free of races. The payload is left out there because
 * a seqlock reads it racily by design; docs/memory-ordering.md argues why what was read is dropped then. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "pool.h"
#ifdef PAYLOAD
#include "copy.h"
#endif

#define KEYS 4
#define READERS 2
#define BUCKETS 2
#define RESERVATIONS 16
#define VALUE_BYTES ((uint64_t)40 * 1024)
#define VALUE_WORDS (VALUE_BYTES / 8)
#define UNITS 64
#define INDEX_BYTES                                                                                \
    (EMS_BUCKETS_OFFSET + BUCKETS * sizeof(struct ems_bucket) +                                    \
     EMS_MAX_SESSIONS * sizeof(struct ems_session) + RESERVATIONS * sizeof(struct ems_reservation))

static uint8_t *indexed, *data;
static uint64_t recency[BUCKETS * EMS_BUCKET_SLOTS];
static int stop;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void key_digest(uint64_t key, uint64_t digest[2])
{
    digest[0] = (key + 1) * UINT64_C(0x9E3779B97F4A7C15);
    digest[1] = (key + 1) * UINT64_C(0xC2B2AE3D27D4EB4F);
}

#ifdef PAYLOAD
static uint64_t copy_value(uint64_t *value, struct ems_place *place, int out)
{
    const uint64_t first[2] = {0, 1}, lengths[1] = {VALUE_BYTES};
    const struct ems_piece piece = {(uintptr_t)value, VALUE_BYTES};
    const struct ems_spans spans = {1, first, lengths, &piece};
    const struct ems_copy_limits limits = {NULL, 0};
    int reason = 0;

    if (out)
        CHECK(ems_copy_out(&spans, 0, 1, data, place, 0, &limits, &reason) == 1);
    else
        CHECK(ems_copy_in(&spans, 0, 1, data, place, NULL, &limits, &reason) == 1);
    return place->checksum;
}

static int is_torn(const uint64_t *value)
{
    for (unsigned w = 1; w < VALUE_WORDS; w++)
        if (value[w] != value[0])
            return 1;
    return 0;
}
#endif

struct tally {
    uint64_t hits, torn_and_dropped;
};

static void *read_values(void *argument)
{
    struct tally *tally = argument;
    struct ems_reader reader;
#ifdef PAYLOAD
    uint64_t *value = aligned_alloc(64, VALUE_BYTES);
    CHECK(value);
#endif
    CHECK(ems_reader_open(&reader, indexed, INDEX_BYTES, recency) == NULL);
    for (uint64_t turn = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); turn++) {
        struct ems_place place;
        uint64_t digest[2], key = turn % KEYS;
        int why;

        key_digest(key, digest);
        if (!ems_lookup(&reader, (uint8_t *)digest, NULL, 0, 1, &place, now_ns(), &why))
            continue;
        /* Its checksum says what else must stand in an entry that was read whole. */
        CHECK((place.checksum & 0xff) == key);
#ifdef PAYLOAD
        CHECK(place.checksum >> 8 == place.offset);
        copy_value(value, &place, 1);
#else
        CHECK(place.length == 1 + (place.checksum >> 8) % VALUE_BYTES);
#endif
        if (ems_validate(&reader, &place, 0, 1)) {
            tally->hits++;
#ifdef PAYLOAD
            CHECK(!is_torn(value) && (value[0] & 0xff) == key);
        } else {
            tally->torn_and_dropped += (uint64_t)is_torn(value);
#endif
        }
    }
#ifdef PAYLOAD
    free(value);
#endif
    return NULL;
}

static void withdraw_one(struct ems_pool *pool, uint64_t key)
{
    struct ems_place found;
    uint64_t digest[2];
    int why;

    key_digest(key, digest);
    if (ems_lookup(&pool->reader, (uint8_t *)digest, NULL, 0, 1, &found, 0, &why))
        ems_pool_withdraw(pool, found.slot);
}

static uint64_t write_values(struct ems_pool *pool, double seconds)
{
    uint64_t until = now_ns() + (uint64_t)(seconds * 1e9), request = 0, victim = 0, offset, sum;
#ifdef PAYLOAD
    uint64_t *value = aligned_alloc(64, VALUE_BYTES);
    CHECK(value);
#endif
    while (now_ns() < until) {
        uint64_t digest[2], key = ++request % KEYS, length = VALUE_BYTES;
        const uint32_t position = 0;
        uint8_t status;

        key_digest(key, digest);
#ifndef PAYLOAD
        length = 1 + request % VALUE_BYTES;
#endif
        while (!ems_pool_reserve(pool, 1, request, 0, 1, (uint8_t *)digest, &length, 1, 0, now_ns(),
                                 &status, &offset))
            withdraw_one(pool, ++victim % KEYS);
        CHECK(status == EMS_GRANTED);
        sum = key | request << 8;
#ifdef PAYLOAD
        struct ems_place place = {0, 0, offset, length, 0};
        for (unsigned w = 0; w < VALUE_WORDS; w++)
            value[w] = sum;
        copy_value(value, &place, 0);
        sum = offset << 8 | key;
#endif
        ems_pool_commit(pool, 1, request, 1, &position, &sum, 0, now_ns(), &status);
        CHECK(status == EMS_COMMITTED);
        if (request % 7 == 0)
            withdraw_one(pool, key);
    }
#ifdef PAYLOAD
    free(value);
#endif
    return request;
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 1.0;
    const struct ems_pool_geometry geometry = {UNITS * EMS_UNIT, EMS_DATA_START + UNITS * EMS_UNIT,
                                               BUCKETS, RESERVATIONS};
    const uint64_t pool_id[2] = {1, 2};
    static struct ems_pool pool;
    struct tally tallies[READERS] = {{0, 0}}, total = {0, 0};
    pthread_t threads[READERS];

    indexed = aligned_alloc(4096, (INDEX_BYTES + 4095) / 4096 * 4096);
    data = aligned_alloc(4096, EMS_DATA_START + UNITS * EMS_UNIT);
    CHECK(indexed && data);
    memset(indexed, 0, INDEX_BYTES);
    memset(data, 0, EMS_DATA_START + UNITS * EMS_UNIT);
#ifdef PAYLOAD
    const char *kernel = ems_copy_setup(getenv("EMS_COPY_IMPL"));
    CHECK(kernel);
#else
    const char *kernel = "no payload";
#endif
    ems_pool_format(indexed, INDEX_BYTES, &geometry, pool_id);
    CHECK(ems_pool_open(&pool, indexed, INDEX_BYTES, recency) == NULL);
    ems_set_release(&pool.prologue->state, EMS_ACTIVE);
    ems_extents_extend(&pool.extents, UNITS);
    for (int i = 0; i < READERS; i++)
        CHECK(pthread_create(&threads[i], NULL, read_values, &tallies[i]) == 0);
    uint64_t versions = write_values(&pool, seconds);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < READERS; i++) {
        pthread_join(threads[i], NULL);
        total.hits += tallies[i].hits;
        total.torn_and_dropped += tallies[i].torn_and_dropped;
    }
    CHECK(total.hits > 0 && versions > 100);
    printf("race_test: %s, %llu versions, %llu hits, %llu torn values seen, none accepted\n", kernel,
           (unsigned long long)versions, (unsigned long long)total.hits,
           (unsigned long long)total.torn_and_dropped);
    ems_pool_close(&pool);
    free(indexed);
    free(data);
    return 0;
}
