/* BLAKE2b as RFC 7693 defines it. */
#include "blake2b.h"

#include <string.h>

static const uint64_t iv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

/* Rounds 10 and 11 use the first two rows again. */
static const uint8_t sigma[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static inline uint64_t rotate(uint64_t word, int bits)
{
    return word >> bits | word << (64 - bits);
}

static inline uint64_t little(uint64_t word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(word);
#else
    return word;
#endif
}

#define MIX(a, b, c, d, x, y)                                                                      \
    do {                                                                                           \
        a += b + (x), d = rotate(d ^ a, 32);                                                       \
        c += d, b = rotate(b ^ c, 24);                                                             \
        a += b + (y), d = rotate(d ^ a, 16);                                                       \
        c += d, b = rotate(b ^ c, 63);                                                             \
    } while (0)

static void compress(struct ems_blake2b *state, size_t nbytes, int last)
{
    uint64_t m[16], v[16];

    memcpy(m, state->buffer, sizeof m);
    for (int i = 0; i < 16; i++)
        m[i] = little(m[i]);
    state->total += nbytes;
    memcpy(v, state->h, sizeof state->h);
    memcpy(v + 8, iv, sizeof iv);
    v[12] ^= state->total;
    if (last)
        v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = sigma[round];

        MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
        MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
        MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
        MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
        MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
        MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
        MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
        MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++)
        state->h[i] ^= v[i] ^ v[i + 8];
    state->buffered = 0;
}

void ems_blake2b_start(struct ems_blake2b *state, const void *key, size_t key_bytes,
                       size_t digest_bytes)
{
    memcpy(state->h, iv, sizeof iv);
    state->h[0] ^= 0x01010000 ^ key_bytes << 8 ^ digest_bytes;
    state->total = 0;
    memset(state->buffer, 0, sizeof state->buffer);
    memcpy(state->buffer, key, key_bytes);
    state->buffered = EMS_BLAKE2B_BLOCK;
}

void ems_blake2b_update(struct ems_blake2b *state, const void *data, size_t nbytes)
{
    const uint8_t *at = data;

    while (nbytes) {
        size_t room = EMS_BLAKE2B_BLOCK - state->buffered;
        size_t part = nbytes < room ? nbytes : room;

        if (!room) {
            compress(state, EMS_BLAKE2B_BLOCK, 0);
            continue;
        }
        memcpy(state->buffer + state->buffered, at, part);
        state->buffered += part;
        at += part, nbytes -= part;
    }
}

void ems_blake2b_finish(struct ems_blake2b *state, void *digest, size_t nbytes)
{
    size_t filled = state->buffered;

    memset(state->buffer + filled, 0, EMS_BLAKE2B_BLOCK - filled);
    compress(state, filled, 1);
    for (int i = 0; i < 8; i++)
        state->h[i] = little(state->h[i]);
    memcpy(digest, state->h, nbytes);
}
