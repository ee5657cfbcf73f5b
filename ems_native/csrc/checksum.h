/* The checksum of a value: 64 bits, made to ride along in a copy loop.
 *
 * The concatenated bytes of the value are cut into chunks of 4 KiB by their offset in the value (the last chunk may be
 * shorter) and every chunk into 64-bit little endian words (the last word padded with zeros). With two 32-bit keys a
 * position in the chunk, the same in every process that ever reads the pool:
 *
 *     sum(chunk)   = SUM over words w at position i:  ((lo(w) + klo[i]) mod 2^32) * ((hi(w) + khi[i]) mod 2^32)   mod 2^64
 *     value        = SUM over chunks c of n bytes:    mix(sum(c), index of c, n)                                  mod 2^64
 *
 * That is the NH hash of UMAC with fixed keys, a non-linear mix over it, and a sum over that. So: where a value is cut into
 * pieces changes nothing; disjoint runs of chunks can be summed by different threads and added; words can be added in
 * any order, which suits every vector width.
 *
 * What it can miss. It tells an honest accident from the value, not an attacker (the keys are public). Two different chunks
 * collide with a probability of about 2^-32 (NH's bound for 32-bit halves), two values that differ in several chunks with
 * about 2^-64 plus that of each. One structural case: damage confined to one half of a word is missed when the other half plus its key
 * happens to be 0 modulo 2^32. Moved words, swapped chunks, a stale page, a value cut short or zeroed are found.
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

/* The contribution of one chunk to the checksum of its value: murmur's finaliser over sum, index and size. */
static inline uint64_t ems_checksum_mix(uint64_t sum, uint64_t chunk, uint64_t nbytes)
{
    uint64_t x = sum + (chunk + 1) * UINT64_C(0x9E3779B97F4A7C15) + nbytes * UINT64_C(0xC2B2AE3D27D4EB4F);

    x = (x ^ (x >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
    x = (x ^ (x >> 33)) * UINT64_C(0xC4CEB9FE1A85EC53);
    return x ^ (x >> 33);
}

/* Sum of the words of a chunk, from byte `start` (a multiple of 8) of it: the definition, and the tail of every kernel. */
uint64_t ems_checksum_words(const void *source, size_t start, size_t nbytes);

#endif
