/* BLAKE2b (RFC 7693) with a key, for digests of block identities: many short messages that share a
 * beginning, so a state is small and copied by value. */
#ifndef EMS_BLAKE2B_H
#define EMS_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>

#define EMS_BLAKE2B_BLOCK 128

struct ems_blake2b {
    uint64_t h[8];
    uint64_t total;  /* bytes compressed so far; 2^64 of them are never hashed */
    size_t buffered; /* 0 to 128: the last block waits, as only then is known that it is the last */
    uint8_t buffer[EMS_BLAKE2B_BLOCK];
};

/* key_bytes 1 to 64, digest_bytes 1 to 64. */
void ems_blake2b_start(struct ems_blake2b *state, const void *key, size_t key_bytes,
                       size_t digest_bytes);
void ems_blake2b_update(struct ems_blake2b *state, const void *data, size_t nbytes);
/* Writes the first `nbytes` of the digest; the state is used up. */
void ems_blake2b_finish(struct ems_blake2b *state, void *digest, size_t nbytes);

#endif
