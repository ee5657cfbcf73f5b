/* Batches: which bytes go where, in slices, past the caches or through them.
 *
 * The pool side of a value is contiguous and starts on a page. A value is walked in runs that end
 * where a piece ends: whole chunks of a big piece go past the caches, with the sum made on the way;
 * a chunk that several pieces share, or the rest of a value, goes through the cache, where the sum
 * then finds it on the pool side. Whether a run is big is asked for each run.
 */
#include "copy.h"

#include <string.h>
#include <time.h>

#include "checksum.h"

/* Runs shorter than this go through the caches. On cold memory streaming wins from 4 KiB on (1.1
 * times, at 32 KiB 1.3, at 2 MiB 1.7); what is this small may be warm, and is likely to be used at
 * once. */
#define STREAM_MINIMUM ((size_t)8 << 10)

/* What is summed first and copied then, where one loop cannot do both: fits the first cache beside
 * the keys. */
#define STAGE ((size_t)16 << 10)

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

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The state of a batch: how many bytes may still be moved before the limits are looked at again. */
struct batch {
    const struct ems_copy_limits *limits;
    size_t credit;
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
    else if (limits->deadline_ns && now_ns() >= limits->deadline_ns)
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

/* Moves `nbytes` that may span pieces through the cache. */
static void gather(unsigned char *pool, struct cursor *at, size_t nbytes)
{
    while (nbytes) {
        size_t part = least(nbytes, at->piece->nbytes - at->offset);

        memcpy(pool, cursor_address(at), part);
        cursor_advance(at, part);
        pool += part, nbytes -= part;
    }
}

static void scatter(const unsigned char *pool, struct cursor *at, size_t nbytes)
{
    while (nbytes) {
        size_t part = least(nbytes, at->piece->nbytes - at->offset);

        memcpy(cursor_address(at), pool, part);
        cursor_advance(at, part);
        pool += part, nbytes -= part;
    }
}

/* The contributions of a run that starts with chunk `chunk` and ends with a chunk, or with the
 * value. */
static uint64_t sum_run(const unsigned char *source, size_t nbytes, uint64_t chunk)
{
    uint64_t total = 0;

    for (; nbytes; chunk++) {
        size_t part = least(nbytes, EMS_CHUNK);

        total += ems_checksum_mix(kernel->sum(source, part), chunk, part);
        source += part, nbytes -= part;
    }
    return total;
}

/* The next run of a value with `left` bytes to go, at the start of a chunk: as many whole chunks as
 * lie in the current piece, at most a slice, or else the one chunk (or rest) that this piece
 * shares. */
static inline size_t next_run(const struct cursor *at, uint64_t left)
{
    size_t whole = least(at->piece->nbytes - at->offset, EMS_COPY_SLICE) / EMS_CHUNK * EMS_CHUNK;

    return whole ? whole : least(left, EMS_CHUNK);
}

static int copy_value_in(struct batch *batch, unsigned char *pool, struct cursor at,
                         uint64_t nbytes, uint64_t *checksum)
{
    uint64_t done = 0, total = 0;

    while (done < nbytes) {
        size_t run = next_run(&at, nbytes - done);

        if (!may_go_on(batch, run))
            return 0;
        if (run >= STREAM_MINIMUM && ((uintptr_t)(pool + done) & 63) == 0) {
            total += kernel->copy_chunks(pool + done, cursor_address(&at), run / EMS_CHUNK,
                                         done / EMS_CHUNK);
            cursor_advance(&at, run);
            done += run;
        } else {
            for (uint64_t end = done + run; done < end;) {
                size_t stage = least(end - done, STAGE);

                gather(pool + done, &at, stage);
                total += sum_run(pool + done, stage, done / EMS_CHUNK);
                done += stage;
            }
        }
    }
    *checksum = total;
    return 1;
}

static int copy_value_out(struct batch *batch, const unsigned char *pool, struct cursor at,
                          uint64_t nbytes)
{
    uint64_t done = 0;

    while (done < nbytes) {
        size_t run = least(at.piece->nbytes - at.offset, EMS_COPY_SLICE);

        if (!may_go_on(batch, run))
            return 0;
        if (run >= STREAM_MINIMUM)
            kernel->stream(cursor_address(&at), pool + done, run);
        else
            memcpy(cursor_address(&at), pool + done, run);
        cursor_advance(&at, run);
        done += run;
    }
    return 1;
}

static int verify_value_out(struct batch *batch, const unsigned char *pool, struct cursor at,
                            uint64_t nbytes, uint64_t *checksum)
{
    uint64_t done = 0, total = 0;

    while (done < nbytes) {
        size_t run = next_run(&at, nbytes - done);
        int big = run >= STREAM_MINIMUM;

        if (!may_go_on(batch, run))
            return 0;
        if (big && ((uintptr_t)cursor_address(&at) & 63) == 0) {
            total += kernel->copy_chunks(cursor_address(&at), pool + done, run / EMS_CHUNK,
                                         done / EMS_CHUNK);
            cursor_advance(&at, run);
            done += run;
            continue;
        }
        for (uint64_t end = done + run; done < end;) {
            size_t stage = least(end - done, STAGE);

            total += sum_run(pool + done, stage, done / EMS_CHUNK);
            if (big) {
                kernel->stream(cursor_address(&at), pool + done, stage);
                cursor_advance(&at, stage);
            } else {
                scatter(pool + done, &at, stage);
            }
            done += stage;
        }
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
    struct batch batch = {limits, 0, EMS_COPY_DONE};
    size_t key = first;

    for (; key < first + count; key++) {
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
    struct batch batch = {limits, 0, EMS_COPY_DONE};
    size_t key = first;

    for (; key < first + count; key++) {
        const unsigned char *pool = base + places[key].offset;
        uint64_t checksum = places[key].checksum;

        if (verify ? !verify_value_out(&batch, pool, key_start(spans, key), spans->lengths[key],
                                       &checksum)
                   : !copy_value_out(&batch, pool, key_start(spans, key), spans->lengths[key]))
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
    return sum_run(source, nbytes, 0);
}

void ems_stream_copy(void *target, const void *source, size_t nbytes)
{
    kernel->stream(target, source, nbytes);
    kernel->fence();
}
