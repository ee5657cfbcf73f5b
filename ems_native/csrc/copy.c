/* Batches: which bytes go where, in slices, past the caches or through them.
 *
 * The pool side of a value is contiguous. Where a checksum is wanted, a value is walked chunk by
 * chunk: summed first, which brings it into the cache, then copied from there past the caches. That
 * beats one loop that does both (measured on 2 MiB: 23 instead of 20 GB/s). The CPU's own
 * prefetcher finds its way in long contiguous memory, but not where pieces begin: the chunk after
 * the next is fetched to the second cache and the next one to the first, as long as a piece is
 * young (pieces of 16 KiB: 20 instead of 10 GB/s).
 */
#include "copy.h"

#include <string.h>

#include "checksum.h"
#include "clock.h"

/* Smaller values, and smaller parts of a big one, go through the caches: they may be warm, and are
 * likely to be used at once. On cold memory streaming wins from 4 KiB on. */
#define STREAM_VALUE ((size_t)8 << 10)
#define STREAM_PART ((size_t)1 << 10)

/* Beginning of contiguous memory in which the CPU's prefetcher needs help. */
#define YOUNG ((uint64_t)64 << 10)

static const struct ems_kernel *const kernels[] = {
#if defined(__x86_64__)
    &ems_kernel_avx2,
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    &ems_kernel_neon,
#endif
    &ems_kernel_portable,
};

static const struct ems_kernel *kernel = &ems_kernel_portable;

const char *ems_copy_setup(const char *name)
{
    ems_checksum_setup();
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        if (name && strcmp(name, kernels[i]->name) != 0)
            continue;
        if (kernels[i]->supported()) {
            kernel = kernels[i];
            return kernel->name;
        }
    }
    return NULL;
}

/* The state of a batch. */
struct batch {
    const struct ems_copy_limits *limits;
    const struct ems_piece *end; /* of its pieces */
    size_t credit;               /* bytes that may be moved before the limits are looked at again */
    int reason;
};

/* Says whether `nbytes` more may be moved now; the first call of a batch always looks. */
static int may_go_on(struct batch *batch, size_t nbytes)
{
    const struct ems_copy_limits *limits = batch->limits;

    if (nbytes <= batch->credit) {
        batch->credit -= nbytes;
        return 1;
    }
    if (limits->cancelled && __atomic_load_n(limits->cancelled, __ATOMIC_ACQUIRE))
        batch->reason = EMS_COPY_CANCELLED;
    else if (limits->deadline_ns && ems_now_ns() >= limits->deadline_ns)
        batch->reason = EMS_COPY_DEADLINE;
    else
        batch->credit = EMS_COPY_SLICE - nbytes;
    return batch->reason == EMS_COPY_DONE;
}

/* Walks over the pieces of one key. */
struct cursor {
    const struct ems_piece *piece;
    uint64_t offset; /* in that piece */
};

static inline unsigned char *cursor_address(const struct cursor *at)
{
    return (unsigned char *)(uintptr_t)(at->piece->address + at->offset);
}

static inline void cursor_advance(struct cursor *at, uint64_t nbytes)
{
    at->offset += nbytes;
    if (at->offset == at->piece->nbytes) {
        at->piece++;
        at->offset = 0;
    }
}

static inline size_t least(uint64_t a, uint64_t b)
{
    return (size_t)(a < b ? a : b);
}

/* Move a part of a value that may span pieces. */
static void gather(unsigned char *target, struct cursor *at, size_t nbytes)
{
    while (nbytes) {
        size_t part = least(nbytes, at->piece->nbytes - at->offset);

        memcpy(target, cursor_address(at), part);
        cursor_advance(at, part);
        target += part, nbytes -= part;
    }
}

static void scatter(const unsigned char *pool, struct cursor *at, size_t nbytes, int big)
{
    while (nbytes) {
        size_t part = least(nbytes, at->piece->nbytes - at->offset);

        if (big && part >= STREAM_PART)
            kernel->stream(cursor_address(at), pool, part, NULL);
        else
            memcpy(cursor_address(at), pool, part);
        cursor_advance(at, part);
        pool += part, nbytes -= part;
    }
}

/* Skips a chunk of the batch and returns where the next one begins, if it has to be fetched. */
static const void *look_ahead(const struct batch *batch, struct cursor *at)
{
    uint64_t left = EMS_CHUNK;

    while (left && at->piece < batch->end) {
        uint64_t part = least(left, at->piece->nbytes - at->offset);

        cursor_advance(at, part);
        left -= part;
    }
    return at->piece < batch->end && at->offset < YOUNG ? cursor_address(at) : NULL;
}

static int copy_value_in(struct batch *batch, unsigned char *pool, struct cursor at,
                         uint64_t nbytes, uint64_t *checksum)
{
    unsigned char shared[EMS_CHUNK] __attribute__((aligned(64)));
    uint64_t done = 0, total = 0;
    int big = nbytes >= STREAM_VALUE;
    struct cursor ahead = at;
    const void *next, *later = look_ahead(batch, &ahead);

    while (done < nbytes) {
        size_t part = least(nbytes - done, EMS_CHUNK);
        const unsigned char *from = shared;

        if (!may_go_on(batch, part))
            return 0;
        if (at.piece->nbytes - at.offset >= part) {
            from = cursor_address(&at);
            cursor_advance(&at, part);
        } else {
            gather(shared, &at, part);
        }
        next = later;
        later = look_ahead(batch, &ahead);
        total += ems_checksum_mix(kernel->sum(from, part, later), done / EMS_CHUNK, part);
        if (big)
            kernel->stream(pool + done, from, part, next);
        else
            memcpy(pool + done, from, part);
        done += part;
    }
    *checksum = total;
    return 1;
}

/* `next`: of the pool, what the key behind this one will read. */
static int copy_value_out(struct batch *batch, const unsigned char *pool, struct cursor at,
                          uint64_t nbytes, const unsigned char *next)
{
    uint64_t done = 0;
    int big = nbytes >= STREAM_VALUE;

    while (done < nbytes) {
        size_t run = least(at.piece->nbytes - at.offset, EMS_COPY_SLICE);
        const unsigned char *from = pool + done;

        if (!may_go_on(batch, run))
            return 0;
        done += run;
        if (big && run >= STREAM_PART)
            kernel->stream(cursor_address(&at), from, run, done < nbytes ? pool + done : next);
        else
            memcpy(cursor_address(&at), from, run);
        cursor_advance(&at, run);
    }
    return 1;
}

static int verify_value_out(struct batch *batch, const unsigned char *pool, struct cursor at,
                            uint64_t nbytes, const unsigned char *next, uint64_t *checksum)
{
    uint64_t done = 0, total = 0;
    int big = nbytes >= STREAM_VALUE;

    while (done < nbytes) {
        size_t part = least(nbytes - done, EMS_CHUNK);
        const unsigned char *from = pool + done, *later = NULL;

        if (!may_go_on(batch, part))
            return 0;
        if (done + part == nbytes)
            later = next;
        else if (done < YOUNG)
            later = from + part;
        total += ems_checksum_mix(kernel->sum(from, part, later), done / EMS_CHUNK, part);
        scatter(from, &at, part, big);
        done += part;
    }
    *checksum = total;
    return 1;
}

static inline struct cursor key_start(const struct ems_spans *spans, size_t key)
{
    return (struct cursor){spans->pieces + spans->first[key], 0};
}

size_t ems_copy_in(const struct ems_spans *spans, size_t first, size_t count, unsigned char *base,
                   struct ems_place *places, const unsigned char *mask,
                   const struct ems_copy_limits *limits, int *reason)
{
    size_t key = first, end = first + count;
    struct batch batch = {limits, spans->pieces + spans->first[end], 0, EMS_COPY_DONE};

    for (; key < end; key++) {
        if (mask && !mask[key])
            continue;
        if (!copy_value_in(&batch, base + places[key].offset, key_start(spans, key),
                           spans->lengths[key], &places[key].checksum))
            break;
    }
    kernel->fence();
    *reason = batch.reason;
    return key;
}

size_t ems_copy_out(const struct ems_spans *spans, size_t first, size_t count,
                    const unsigned char *base, const struct ems_place *places, int verify,
                    const struct ems_copy_limits *limits, int *reason)
{
    size_t key = first, end = first + count;
    struct batch batch = {limits, spans->pieces + spans->first[end], 0, EMS_COPY_DONE};

    for (; key < end; key++) {
        const unsigned char *pool = base + places[key].offset;
        const unsigned char *next = key + 1 < end ? base + places[key + 1].offset : pool;
        uint64_t checksum = places[key].checksum;
        struct cursor at = key_start(spans, key);

        if (verify ? !verify_value_out(&batch, pool, at, spans->lengths[key], next, &checksum)
                   : !copy_value_out(&batch, pool, at, spans->lengths[key], next))
            break;
        if (checksum != places[key].checksum) {
            batch.reason = EMS_COPY_DIFFERS;
            break;
        }
    }
    kernel->fence();
    *reason = batch.reason;
    return key;
}

uint64_t ems_checksum(const void *source, size_t nbytes)
{
    const unsigned char *from = source;
    uint64_t total = 0;

    for (size_t done = 0; done < nbytes; done += EMS_CHUNK) {
        size_t part = least(nbytes - done, EMS_CHUNK);

        total += ems_checksum_mix(kernel->sum(from + done, part, NULL), done / EMS_CHUNK, part);
    }
    return total;
}

void ems_stream_copy(void *target, const void *source, size_t nbytes)
{
    kernel->stream(target, source, nbytes, NULL);
    kernel->fence();
}
