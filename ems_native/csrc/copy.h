/* Copies between the pieces of a caller's values and the extents of the pool. See copy.c for the
 * order of things. */
#ifndef EMS_COPY_H
#define EMS_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "place.h"

/* One batch, described once: the pieces of key k are pieces[first[k] .. first[k + 1]). */
struct ems_piece {
    uint64_t address;
    uint64_t nbytes;
};

struct ems_spans {
    size_t nkeys;
    const uint64_t *first;   /* nkeys + 1 */
    const uint64_t *lengths; /* nkeys: sum of the pieces */
    const struct ems_piece *pieces;
};

enum ems_copy_reason {
    EMS_COPY_DONE = 0,
    EMS_COPY_DEADLINE = 1,
    EMS_COPY_CANCELLED = 2,
    EMS_COPY_DIFFERS = 3, /* the checksum of the returned key */
};

/* What may end a batch early; looked at every EMS_COPY_SLICE bytes at the latest. */
struct ems_copy_limits {
    const int *cancelled; /* read atomically; or NULL */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0 = none */
};

/* Some 50 us at 22 GB/s, in which a copy notices its end; to read the clock takes some 30 ns. */
#define EMS_COPY_SLICE ((size_t)1 << 20)

/* One set of inner loops; all give the same bytes and the same sums. Any alignment of both sides.
 * What is to be fetched meanwhile (as many bytes as are read) may be NULL. */
struct ems_kernel {
    const char *name;
    int (*supported)(void);
    /* Sum of one chunk (at most EMS_CHUNK bytes) without mix, which brings it into the first cache;
     * `later` is fetched to the second one. */
    uint64_t (*sum)(const void *source, size_t nbytes, const void *later);
    /* Copies a chunk past the caches; `next` is fetched to the first one. */
    void (*stream)(void *target, const void *source, size_t nbytes, const void *next);
    /* Orders streaming stores before everything that follows. */
    void (*fence)(void);
};

/* What the SIMD kernels share of `stream`: ragged ends through the cache, whole lines of an aligned
 * target by `lines`, which fetches from `next` on while it copies. */
static inline void ems_stream_split(unsigned char *to, const unsigned char *from, size_t nbytes,
                                    const unsigned char *next,
                                    void (*lines)(unsigned char *, const unsigned char *, size_t,
                                                  const unsigned char *))
{
    size_t head = -(uintptr_t)to & 63, middle;

    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    middle = nbytes & ~(size_t)63;
    lines(to, from, middle, next);
    memcpy(to + middle, from + middle, nbytes - middle);
}

extern const struct ems_kernel ems_kernel_avx2, ems_kernel_neon, ems_kernel_portable;

/* Picks the kernel, by name or (NULL) the best that this CPU has. Returns its name, or NULL when it
 * cannot be had. */
const char *ems_copy_setup(const char *name);

/* Both return the first key that is not completely done and set *reason. Keys with mask[k] == 0 are
 * skipped. */
size_t ems_copy_in(const struct ems_spans *spans, size_t first, size_t count, unsigned char *base,
                   struct ems_place *places, const unsigned char *mask,
                   const struct ems_copy_limits *limits, int *reason);
size_t ems_copy_out(const struct ems_spans *spans, size_t first, size_t count,
                    const unsigned char *base, const struct ems_place *places, int verify,
                    const struct ems_copy_limits *limits, int *reason);

/* Like ems_copy_out, but the first piece of every key, then the second, and so on; *arrived is how
 * many pieces all keys have. Checksums are compared at the end, so when it ends early no key is done.
 * Where keys are not cut alike, and at chunks, it is ems_copy_out. */
size_t ems_copy_out_by_piece(const struct ems_spans *spans, size_t first, size_t count,
                             const unsigned char *base, const struct ems_place *places, int verify,
                             const struct ems_copy_limits *limits, uint32_t *arrived, int *reason);

/* The same for a batch as one thing, by several threads when it is big. */
struct ems_batch {
    const struct ems_spans *spans;
    size_t first, count;
    unsigned char *base; /* of the pool */
    struct ems_place *places;
    const unsigned char *mask; /* or NULL; only into the pool */
    const struct ems_copy_limits *limits;
    int into_pool, verify;
    uint32_t *arrived; /* or NULL; by piece, only out of the pool */
};

size_t ems_copy_batch(const struct ems_batch *batch, int *reason);

/* How many threads copy one batch, the caller's among them; 1 until told otherwise. */
void ems_copy_set_threads(unsigned count);

uint64_t ems_checksum(const void *source, size_t nbytes);

/* Streaming copy with its fence. */
void ems_stream_copy(void *target, const void *source, size_t nbytes);

#endif
