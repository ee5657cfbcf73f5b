/* Random saves, evictions, aborts and restarts of a small pool against a model of what must be in it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pool.h"

#define KEYS 200
#define BATCH 8
#define SESSIONS 3
#define UNITS 512
#define BUCKETS 16
#define RESERVATIONS 64

static uint64_t state = 7, clock_ns = 1000000000;

static uint64_t draw(uint64_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % below;
}

/* What the model knows of a key: the checksum of its last commit; it may be evicted at any time. */
static uint64_t committed[KEYS];

static void key_digest(uint64_t key, uint64_t digest[2])
{
    digest[0] = (key + 1) * UINT64_C(0x9E3779B97F4A7C15);
    digest[1] = (key + 1) * UINT64_C(0xC2B2AE3D27D4EB4F);
}

/* A stored checksum names its key and its length, so that a wrong extent or entry shows. */
static uint64_t make_checksum(uint64_t key, uint64_t length, uint64_t serial)
{
    return key | length << 8 | serial << 40;
}

static void check_entries(struct ems_pool *pool)
{
    static unsigned char used[UNITS];
    uint64_t entries = 0;

    memset(used, 0, sizeof used);
    for (uint64_t key = 0; key < KEYS; key++) {
        struct ems_place place;
        uint64_t digest[2];
        int why;

        key_digest(key, digest);
        if (!ems_lookup(&pool->reader, (uint8_t *)digest, NULL, 0, 1, &place, clock_ns, &why)) {
            CHECK(why == EMS_MISS_ABSENT);
            continue;
        }
        entries++;
        CHECK(place.checksum == committed[key] && (place.checksum & 0xff) == key);
        CHECK((place.checksum >> 8 & 0xffffffff) == place.length);
        CHECK(ems_validate(&pool->reader, &place, 0, 1) == 1);
        CHECK(place.offset >= EMS_DATA_START && place.offset % EMS_UNIT == 0);
        for (uint64_t unit = (place.offset - EMS_DATA_START) / EMS_UNIT, left = place.length;;) {
            CHECK(unit < UNITS && !used[unit]++);
            if (left <= EMS_UNIT)
                break;
            left -= EMS_UNIT, unit++;
        }
    }
    CHECK(entries == pool->entries);
}

/* Units that are free, reserved or hold entries are all units, before and after a restart. */
static uint32_t count_units(struct ems_pool *pool)
{
    uint32_t at = 0, n = 0, owner = 0, total = 0, unused = 0;

    for (at = ems_extents_walk(&pool->extents, 0, &n, &owner); at != EMS_NO_UNIT;
         at = ems_extents_walk(&pool->extents, at + n, &n, &owner)) {
        total += n;
        unused += owner == EMS_NO_UNIT ? n : 0;
    }
    CHECK(total == UNITS && unused == pool->extents.free);
    return unused;
}

static void make_room(struct ems_pool *pool)
{
    uint64_t slots[4], marks[4];
    uint32_t n = ems_pool_worst(pool, 0, BUCKETS, 4, (int)draw(2), slots, marks);

    for (uint32_t i = 0; i < n; i++)
        ems_pool_withdraw(pool, slots[i]);
}

static void save(struct ems_pool *pool, uint32_t session, uint64_t request)
{
    uint64_t digests[BATCH][2], lengths[BATCH], keys[BATCH], offsets[BATCH] = {0}, sums[BATCH];
    uint8_t statuses[BATCH], results[BATCH];
    uint32_t positions[BATCH], n = 1 + (uint32_t)draw(BATCH), granted = 0, at = 0;
    uint64_t start = draw(KEYS - BATCH);
    int tries = 0;

    for (uint32_t k = 0; k < n; k++) {
        keys[k] = start + k;
        key_digest(keys[k], digests[k]);
        lengths[k] = 1 + draw(draw(4) ? 20000 : 200000);
    }
    while ((at = ems_pool_reserve(pool, session, request, at, n, (uint8_t *)digests, lengths,
                                  (int)draw(2), (int)draw(2), clock_ns, statuses, offsets)) < n) {
        if (tries++ < 20) {
            make_room(pool);
            continue;
        }
        statuses[at++] = EMS_NO_ROOM;
    }
    for (uint32_t k = 0; k < n; k++)
        if (statuses[k] == EMS_GRANTED && draw(8)) {
            positions[granted] = k;
            sums[granted++] = make_checksum(keys[k], lengths[k], request);
        }
    if (draw(6) == 0)
        return; /* the reservations stay: somebody else's business */
    if (draw(4)) {
        ems_pool_commit(pool, session, request, granted, positions, sums, (int)draw(2), clock_ns,
                        results);
        for (uint32_t i = 0; i < granted; i++) {
            CHECK(results[i] == EMS_COMMITTED || results[i] == EMS_KEPT);
            if (results[i] == EMS_COMMITTED)
                committed[keys[positions[i]]] = sums[i];
        }
    }
    ems_pool_abort(pool, session, request);
    CHECK(ems_pool_abort(pool, session, request) == 0);
}

static void withdraw_all(struct ems_pool *pool)
{
    for (uint64_t slot = 0; slot < BUCKETS * EMS_BUCKET_SLOTS; slot++)
        ems_pool_withdraw(pool, slot);
    CHECK(count_units(pool) == UNITS && pool->entries == 0);
    CHECK(ems_extents_largest(&pool->extents) == UNITS);
}

/* Somebody else's pointer writes into entries and records: bits, nonsense, words from elsewhere. */
static void write_wildly(uint8_t *index)
{
    uint64_t *entries = (uint64_t *)(index + EMS_BUCKETS_OFFSET);
    uint64_t nentries = BUCKETS * sizeof(struct ems_bucket) / 8;
    uint64_t *records = entries + nentries + EMS_MAX_SESSIONS * sizeof(struct ems_session) / 8;
    uint64_t nrecords = RESERVATIONS * sizeof(struct ems_reservation) / 8;

    for (uint64_t n = draw(4); n > 0; n--) {
        uint64_t *word = draw(4) ? &entries[draw(nentries)] : &records[draw(nrecords)];
        switch (draw(3)) {
        case 0:
            *word ^= UINT64_C(1) << draw(64);
            break;
        case 1:
            *word = draw(UINT64_C(1) << 31) * draw(UINT64_C(1) << 31);
            break;
        default:
            *word = entries[draw(nentries)];
        }
    }
}

/* What a reader gets may be wrong now, but never leads it out of the data. */
static void check_places(struct ems_pool *pool)
{
    for (uint64_t key = 0; key < KEYS; key++) {
        struct ems_place place;
        uint64_t digest[2];
        int why;

        key_digest(key, digest);
        if (ems_lookup(&pool->reader, (uint8_t *)digest, NULL, 0, 1, &place, clock_ns, &why))
            CHECK(place.offset >= EMS_DATA_START && place.length <= pool->reader.data_bytes &&
                  place.offset <= pool->reader.data_bytes - place.length);
    }
}

static void run(int rounds, int wild)
{
    struct ems_pool_geometry geometry = {UNITS * EMS_UNIT, EMS_DATA_START + UNITS * EMS_UNIT,
                                         BUCKETS, RESERVATIONS};
    size_t index_bytes = EMS_BUCKETS_OFFSET + BUCKETS * sizeof(struct ems_bucket) +
                         EMS_MAX_SESSIONS * sizeof(struct ems_session) +
                         RESERVATIONS * sizeof(struct ems_reservation);
    uint8_t *index = aligned_alloc(64, (index_bytes + 63) / 64 * 64);
    uint64_t *recency = calloc(BUCKETS * EMS_BUCKET_SLOTS, sizeof *recency);
    const uint64_t pool_id[2] = {1, 2};
    static struct ems_pool pool;

    CHECK(index && recency);
    memset(index, 0, (index_bytes + 63) / 64 * 64);
    ems_pool_format(index, index_bytes, &geometry, pool_id);
    CHECK(ems_pool_open(&pool, index, index_bytes, recency) == NULL);
    pool.prologue->state = EMS_ACTIVE;
    pool.header->ready_bytes = UNITS * EMS_UNIT;
    ems_extents_extend(&pool.extents, UNITS);
    for (int round = 1; round <= rounds; round++) {
        clock_ns += 1000000;
        save(&pool, 1 + (uint32_t)draw(SESSIONS), (uint64_t)round);
        if (draw(20) == 0)
            ems_pool_release_session(&pool, 1 + (uint32_t)draw(SESSIONS), NULL, 0);
        if (wild) {
            write_wildly(index);
            check_places(&pool);
        }
        if (draw(50) == 0) {
            uint32_t unused = count_units(&pool);

            if (!wild)
                check_entries(&pool);
            ems_pool_close(&pool);
            CHECK(ems_pool_open(&pool, index, index_bytes, recency) == NULL);
            if (!wild) {
                CHECK(count_units(&pool) == unused);
                check_entries(&pool);
            }
        }
    }
    for (uint32_t session = 1; session <= (wild ? EMS_MAX_SESSIONS - 1 : SESSIONS); session++)
        ems_pool_release_session(&pool, session, NULL, 0);
    CHECK(pool.reserved_units == 0);
    if (!wild)
        check_entries(&pool);
    withdraw_all(&pool);
    printf("pool_test: %d rounds%s, %llu commits, mended %llu entries, %llu overlaps\n", rounds,
           wild ? " with wild writes" : "", (unsigned long long)pool.sequence,
           (unsigned long long)pool.mended.entries, (unsigned long long)pool.mended.overlaps);
    ems_pool_close(&pool);
    free(index);
    free(recency);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 20000;

    run(rounds, 0);
    run(rounds, 1);
    return 0;
}
