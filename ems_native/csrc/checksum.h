/* The checksum of a value: 64 bits, made to ride along in a copy loop.
 *
 * The bytes of the value are cut into chunks of 4 KiB by their offset in the value (the last one may
 * be shorter) and each chunk into 64-bit little endian words (the last one padded with zeros). Each
 * position i in a chunk has two 32-bit keys, the same for everybody who ever reads the pool:
 *
 *     sum(c)   = SUM over the words w[i] of chunk c:
 *                ((low(w[i]) + klow[i]) mod 2^32) * ((high(w[i]) + khigh[i]) mod 2^32)   mod 2^64
 *     checksum = SUM over the chunks c of n bytes: mix(sum(c), c, n)                     mod 2^64
 *
 * That is the NH hash of UMAC with fixed keys, a non-linear mix over it, and a sum over that. So it
 * does not matter how a value is cut into pieces; disjoint runs of chunks can be summed by different
 * threads and added; words can be added in any order, which suits every vector width.
 *
 * What it can miss: it tells accidents, not attackers (the keys are public). Two values that differ
 * in one chunk have the same checksum with a probability of about 2^-32 (the bound of NH for 32-bit
 * halves), values that differ in several chunks are no worse. One case has a structure: damage to
 * one half of a word is missed if the other half plus its key is 0 modulo 2^32. Moved words, swapped
 * chunks, stale or zeroed pages and a value cut short are found with the same odds.
 */
#ifndef EMS_CHECKSUM_H
#define EMS_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

#define EMS_CHUNK ((size_t)4096)

/* One key word for each word of a chunk: low half klo, high half khi. */
extern uint64_t ems_checksum_keys[EMS_CHUNK / 8];

/* Fills the keys; before everything else, idempotent. */
void ems_checksum_setup(void);

/* The contribution of one chunk to the checksum of its value: murmur's finaliser over sum, index
 * and size. */
static inline uint64_t ems_checksum_mix(uint64_t sum, uint64_t chunk, uint64_t nbytes)
{
    uint64_t x =
        sum + (chunk + 1) * UINT64_C(0x9E3779B97F4A7C15) + nbytes * UINT64_C(0xC2B2AE3D27D4EB4F);

    x = (x ^ (x >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
    x = (x ^ (x >> 33)) * UINT64_C(0xC4CEB9FE1A85EC53);
    return x ^ (x >> 33);
}

/* Sum of the words of a chunk, from byte `start` (a multiple of 8) of it: the definition, and the
 * tail of every kernel. */
uint64_t ems_checksum_words(const void *source, size_t start, size_t nbytes);

#endif
