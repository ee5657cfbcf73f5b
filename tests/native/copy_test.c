/* Copies random batches with every kernel; each buffer is allocated exactly, so that the address
 * sanitizer sees a byte too many on either side. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "checksum.h"
#include "copy.h"

#define MAX_KEYS 4
#define MAX_PIECES 12

static const char *const names[] = {"portable", "avx2", "neon"};
static uint64_t state = 1;

static uint64_t draw(uint64_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % below;
}

static uint64_t draw_length(void)
{
    switch (draw(4)) {
    case 0:
        return 1 + draw(100);
    case 1:
        return EMS_CHUNK * (1 + draw(20));
    case 2:
        return EMS_CHUNK * (1 + draw(8)) + draw(200);
    default:
        return 1 + draw(100000);
    }
}

/* A piece in a block of its own that ends with it, at any distance from an aligned address. */
struct buffer {
    unsigned char *block;
    struct ems_piece piece;
};

static struct buffer buffer_make(uint64_t nbytes)
{
    size_t shift = draw(3) ? draw(65) : 0;
    unsigned char *block = malloc(shift + nbytes);

    CHECK(block);
    for (size_t i = 0; i < nbytes; i++)
        block[shift + i] = (unsigned char)draw(256);
    return (struct buffer){block, {(uint64_t)(uintptr_t)(block + shift), nbytes}};
}

/* The definition, written down once more and in no hurry. */
static uint64_t checksum_by_definition(const unsigned char *bytes, size_t nbytes)
{
    uint64_t total = 0;

    for (size_t start = 0; start < nbytes; start += EMS_CHUNK) {
        size_t n = nbytes - start < EMS_CHUNK ? nbytes - start : EMS_CHUNK;
        uint64_t sum = 0;

        for (size_t at = 0; at < n; at += 8) {
            uint64_t word = 0;

            for (size_t i = 0; i < 8 && at + i < n; i++)
                word |= (uint64_t)bytes[start + at + i] << 8 * i;
            sum += (uint64_t)((uint32_t)word + (uint32_t)ems_checksum_keys[at / 8]) *
                   (uint32_t)((uint32_t)(word >> 32) + (uint32_t)(ems_checksum_keys[at / 8] >> 32));
        }
        total += ems_checksum_mix(sum, start / EMS_CHUNK, n);
    }
    return total;
}

static void copy_random_batch(void)
{
    struct buffer from[MAX_KEYS * MAX_PIECES], to[MAX_KEYS * MAX_PIECES];
    struct ems_piece pieces_in[MAX_KEYS * MAX_PIECES], pieces_out[MAX_KEYS * MAX_PIECES];
    uint64_t first[MAX_KEYS + 1] = {0}, lengths[MAX_KEYS], npieces = 0, pool_bytes = 0, left;
    struct ems_place places[MAX_KEYS];
    struct ems_copy_limits limits = {NULL, 0};
    size_t nkeys = 1 + draw(MAX_KEYS);
    unsigned char mask[MAX_KEYS];
    unsigned char *pool;
    int reason = -1, cancelled = 1;

    for (size_t k = 0; k < nkeys; k++) {
        uint64_t length = draw_length();

        lengths[k] = 0;
        mask[k] = 1;
        for (left = length; left; npieces++) {
            uint64_t n = npieces - first[k] == MAX_PIECES - 1 || draw(2) ? left : 1 + draw(left);

            if (draw(2) && n > 4096)
                n -= n % 4096;
            if (npieces - first[k] == MAX_PIECES - 1)
                n = left;
            from[npieces] = buffer_make(n);
            to[npieces] = buffer_make(n);
            pieces_in[npieces] = from[npieces].piece;
            pieces_out[npieces] = to[npieces].piece;
            lengths[k] += n;
            left -= n;
        }
        first[k + 1] = npieces;
        places[k] = (struct ems_place){0, 0, pool_bytes, length, 0};
        pool_bytes += (length + 4095) / 4096 * 4096;
    }
    /* The last value ends with the allocation. */
    pool_bytes -= (lengths[nkeys - 1] + 4095) / 4096 * 4096 - lengths[nkeys - 1];
    CHECK(posix_memalign((void **)&pool, 4096, pool_bytes) == 0);
    memset(pool, 0xEE, pool_bytes);

    struct ems_spans in = {nkeys, first, lengths, pieces_in},
                     out = {nkeys, first, lengths, pieces_out};

    mask[0] = (unsigned char)draw(2);
    CHECK(ems_copy_in(&in, 0, nkeys, pool, places, mask, &limits, &reason) == nkeys && reason == 0);
    if (!mask[0]) {
        for (size_t i = 0; i < lengths[0]; i++)
            CHECK(pool[i] == 0xEE);
        CHECK(ems_copy_in(&in, 0, 1, pool, places, NULL, &limits, &reason) == 1 && reason == 0);
    }
    for (size_t k = 0; k < nkeys; k++) {
        const unsigned char *value = pool + places[k].offset;

        CHECK(places[k].checksum == checksum_by_definition(value, lengths[k]));
        CHECK(places[k].checksum == ems_checksum(value, lengths[k]));
        for (uint64_t i = first[k]; i < first[k + 1]; value += pieces_in[i++].nbytes)
            CHECK(!memcmp(value, (void *)(uintptr_t)pieces_in[i].address, pieces_in[i].nbytes));
    }
    for (int verify = 0; verify < 2; verify++) {
        for (uint64_t i = 0; i < npieces; i++)
            memset((void *)(uintptr_t)pieces_out[i].address, 0, pieces_out[i].nbytes);
        CHECK(ems_copy_out(&out, 0, nkeys, pool, places, verify, &limits, &reason) == nkeys);
        CHECK(reason == EMS_COPY_DONE);
        for (uint64_t i = 0; i < npieces; i++)
            CHECK(!memcmp((void *)(uintptr_t)pieces_in[i].address,
                          (void *)(uintptr_t)pieces_out[i].address, pieces_in[i].nbytes));
    }

    size_t bad = draw(nkeys);
    pool[places[bad].offset + draw(lengths[bad])] ^= (unsigned char)(1 + draw(255));
    CHECK(ems_copy_out(&out, 0, nkeys, pool, places, 1, &limits, &reason) == bad);
    CHECK(reason == EMS_COPY_DIFFERS);

    limits.deadline_ns = 1;
    CHECK(ems_copy_in(&in, 0, nkeys, pool, places, NULL, &limits, &reason) == 0);
    CHECK(reason == EMS_COPY_DEADLINE);
    limits.cancelled = &cancelled;
    CHECK(ems_copy_out(&out, 0, nkeys, pool, places, 1, &limits, &reason) == 0);
    CHECK(reason == EMS_COPY_CANCELLED);

    for (uint64_t i = 0; i < npieces; i++) {
        free(from[i].block);
        free(to[i].block);
    }
    free(pool);
}

/* Keys that are cut alike come piece by piece; one that ends early at a piece says so. */
static void copy_by_piece(void)
{
    uint64_t first[MAX_KEYS + 1] = {0}, lengths[MAX_KEYS], sizes[MAX_PIECES], at = 0;
    size_t nkeys = 1 + draw(MAX_KEYS), npieces = 1 + draw(MAX_PIECES), bad = draw(nkeys);
    struct ems_piece pieces[MAX_KEYS * MAX_PIECES];
    struct ems_copy_limits limits = {NULL, 0};
    struct buffer to[MAX_KEYS * MAX_PIECES], pool;
    struct ems_place places[MAX_KEYS];
    uint32_t arrived = 0;
    int reason = -1;

    for (size_t i = 0; i < npieces; i++)
        sizes[i] = i + 1 < npieces ? EMS_CHUNK * (1 + draw(6)) : 1 + draw(20000);
    for (size_t k = 0; k < nkeys; k++) {
        lengths[k] = 0;
        for (size_t i = 0; i < npieces; i++) {
            to[k * npieces + i] = buffer_make(sizes[i]);
            pieces[k * npieces + i] = to[k * npieces + i].piece;
            lengths[k] += sizes[i];
        }
        first[k + 1] = first[k] + npieces;
    }
    pool = buffer_make(nkeys * lengths[0]);
    unsigned char *base = (unsigned char *)(uintptr_t)pool.piece.address;
    for (size_t k = 0; k < nkeys; k++)
        places[k] = (struct ems_place){0, 0, k * lengths[0], lengths[0], ems_checksum(base + k * lengths[0], lengths[0])};
    struct ems_spans out = {nkeys, first, lengths, pieces};

    CHECK(ems_copy_out_by_piece(&out, 0, nkeys, base, places, 1, &limits, &arrived, &reason) == nkeys);
    CHECK(reason == EMS_COPY_DONE && arrived == npieces);
    for (size_t k = 0; k < nkeys; k++)
        for (size_t i = 0; i < npieces; at += sizes[i++])
            CHECK(!memcmp((void *)(uintptr_t)pieces[k * npieces + i].address, base + at, sizes[i]));
    base[bad * lengths[0] + draw(lengths[0])] ^= (unsigned char)(1 + draw(255));
    CHECK(ems_copy_out_by_piece(&out, 0, nkeys, base, places, 1, &limits, &arrived, &reason) == bad);
    CHECK(reason == EMS_COPY_DIFFERS);
    limits.deadline_ns = 1;
    arrived = 0;
    CHECK(ems_copy_out_by_piece(&out, 0, nkeys, base, places, 1, &limits, &arrived, &reason) == 0);
    CHECK(reason == EMS_COPY_DEADLINE && arrived == 0);
    for (size_t i = 0; i < nkeys * npieces; i++)
        free(to[i].block);
    free(pool.block);
}

static void stream_random(void)
{
    struct buffer from = buffer_make(draw_length()), to = buffer_make(from.piece.nbytes);

    ems_stream_copy((void *)(uintptr_t)to.piece.address, (void *)(uintptr_t)from.piece.address,
                    from.piece.nbytes);
    CHECK(!memcmp((void *)(uintptr_t)to.piece.address, (void *)(uintptr_t)from.piece.address,
                  from.piece.nbytes));
    free(from.block);
    free(to.block);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 300, tried = 0;

    CHECK(ems_copy_setup("none such") == NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!ems_copy_setup(names[i]))
            continue;
        for (int round = 0; round < rounds; round++) {
            copy_random_batch();
            copy_by_piece();
            stream_random();
        }
        printf("copy_test: %s, %d batches\n", names[i], rounds);
        tried++;
    }
    CHECK(tried > 0);
    return 0;
}
