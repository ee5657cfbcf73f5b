/* Batches: which bytes go where, in slices, past the caches or through them.
 *
 * The pool side of a value is contiguous. A value is walked chunk by chunk: summed first, which
 * brings the chunk into the first cache, then copied from there past the caches. That beats one loop
 * that does both (measured on 2 MiB: 23 instead of 20 GB/s), and one that only copies (256 x 64 KiB:
 * 22.2 instead of 20.9 GB/s), so that a load sums whether it compares or not. To touch a chunk
 * without summing it gains 2 % where values follow each other and loses a fifth where they do not.
 *
 * The CPU's own prefetcher finds its way in long contiguous memory, but not where that begins: there
 * the chunk after the next is fetched to the second cache and the next one to the first. Measured
 * with one thread over 1 GiB, Zen 4, 256 x 64 KiB, GB/s (helped; not): loads of values scattered over
 * the pool 19.8; 10.1, saves of pieces of 16 KiB 20; 10. Where values follow each other in memory
 * help hurts: it is given while contiguous memory is young, across keys and pieces (loads of values
 * in a row 22.2; 16.2 while every value counted as a beginning).
 */
#include "copy.h"

#include <stdlib.h>
#include <string.h>

#include "checksum.h"
#include "clock.h"

/* Smaller values, and smaller parts of a big one, go through the caches: they may be used at once.
 * Measured in turns on values scattered over 1 GiB (Zen 4, one thread, sum and copy, ns through the
 * caches; past them), left alone afterwards: 512 B 197; 273, 1 KiB 309; 312, 2 KiB 571; 442, 4 KiB
 * 907; 636, 8 KiB 1,664; 1,202. Read again at once: 4 KiB 1,073; 1,226, 8 KiB 1,934; 2,255, 16 KiB
 * 2,948; 3,558, 32 KiB 5,375; 5,088. So parts are even at 1 KiB, and 8 KiB is where what is gained
 * (28 %) is more than what may be lost (17 %). */
#define STREAM_VALUE ((size_t)8 << 10)
#define STREAM_PART ((size_t)1 << 10)

/* Beginning of contiguous memory in which the CPU's prefetcher needs help. Loads of scattered values of
 * 64 KiB, GB/s: 0 15.3, 4 KiB 16.4, 16 KiB 16.7, 32 KiB 16.7, 64 KiB 19.8, 128 KiB 20.0; of values in a
 * row: the same for all of these (21.4 to 22), but without an end 20.6. */
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

/* Goes over what a batch reads, two chunks before the copy, and knows what to fetch by hand. */
struct scout {
    size_t key;
    uint64_t done;            /* of that key */
    struct cursor at;         /* the same in its pieces; used into the pool */
    const unsigned char *end; /* of the chunk before */
    uint64_t age;             /* contiguous bytes that ended there */
    const void *next, *later; /* the chunk after this one, and after that; NULL: need no help */
};

/* The state of a batch. */
struct batch {
    const struct ems_spans *spans;
    const unsigned char *base; /* of the pool */
    const struct ems_place *places;
    const unsigned char *mask;
    size_t end; /* of its keys */
    int into_pool;
    const struct ems_copy_limits *limits;
    size_t credit; /* bytes that may be moved before the limits are looked at again */
    int reason;
    struct scout scout;
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

/* `batch` is given for values that go past the caches. */
static void scatter(const unsigned char *pool, struct cursor *at, size_t nbytes,
                    const struct batch *batch)
{
    const unsigned char *next = batch ? batch->scout.next : NULL;

    while (nbytes) {
        size_t part = least(nbytes, at->piece->nbytes - at->offset);

        if (batch && part >= STREAM_PART)
            kernel->stream(cursor_address(at), pool, part, next);
        else
            memcpy(cursor_address(at), pool, part);
        cursor_advance(at, part);
        pool += part, nbytes -= part;
        next = next ? next + part : NULL;
    }
}

static inline struct cursor key_start(const struct ems_spans *spans, size_t key)
{
    return (struct cursor){spans->pieces + spans->first[key], 0};
}

static void look_ahead(struct batch *batch)
{
    struct scout *scout = &batch->scout;
    const unsigned char *from;
    uint64_t length;
    size_t part;

    scout->next = scout->later;
    scout->later = NULL;
    while (batch->mask && scout->key < batch->end && !batch->mask[scout->key])
        scout->key++;
    if (scout->key == batch->end)
        return;
    length = batch->spans->lengths[scout->key];
    part = least(length - scout->done, EMS_CHUNK);
    if (batch->into_pool) {
        if (scout->done == 0)
            scout->at = key_start(batch->spans, scout->key);
        from = cursor_address(&scout->at);
        for (uint64_t left = part, n; left; left -= n) {
            n = least(left, scout->at.piece->nbytes - scout->at.offset);
            cursor_advance(&scout->at, n);
        }
    } else {
        from = batch->base + batch->places[scout->key].offset + scout->done;
    }
    scout->done += part;
    if (scout->done == length)
        scout->key++, scout->done = 0;
    scout->age = from == scout->end ? scout->age + part : 0;
    scout->end = from + part;
    if (scout->age < YOUNG)
        scout->later = from;
}

static void batch_start(struct batch *batch, size_t first)
{
    batch->scout.key = first;
    look_ahead(batch); /* the first chunk is read at once */
    look_ahead(batch);
}

static int copy_value_in(struct batch *batch, size_t key, unsigned char *pool, uint64_t *checksum)
{
    unsigned char shared[EMS_CHUNK] __attribute__((aligned(64)));
    uint64_t nbytes = batch->spans->lengths[key], done = 0, total = 0;
    struct cursor at = key_start(batch->spans, key);
    int big = nbytes >= STREAM_VALUE;

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
        look_ahead(batch);
        total += ems_checksum_mix(kernel->sum(from, part, batch->scout.later), done / EMS_CHUNK, part);
        if (big)
            kernel->stream(pool + done, from, part, batch->scout.next);
        else
            memcpy(pool + done, from, part);
        done += part;
    }
    *checksum = total;
    return 1;
}

/* `chunk` is where in its value the copied begins. */
static int copy_value_out(struct batch *batch, size_t key, const unsigned char *pool, uint64_t chunk,
                          uint64_t *checksum)
{
    uint64_t nbytes = batch->spans->lengths[key], done = 0, total = 0;
    struct cursor at = key_start(batch->spans, key);
    int big = nbytes >= STREAM_VALUE;

    while (done < nbytes) {
        size_t part = least(nbytes - done, EMS_CHUNK);
        const unsigned char *from = pool + done;

        if (!may_go_on(batch, part))
            return 0;
        look_ahead(batch);
        total += ems_checksum_mix(kernel->sum(from, part, batch->scout.later), chunk++, part);
        scatter(from, &at, part, big ? batch : NULL);
        done += part;
    }
    *checksum = total;
    return 1;
}

size_t ems_copy_in(const struct ems_spans *spans, size_t first, size_t count, unsigned char *base,
                   struct ems_place *places, const unsigned char *mask,
                   const struct ems_copy_limits *limits, int *reason)
{
    struct batch batch = {spans, base, places, mask, first + count, 1, limits, .reason = EMS_COPY_DONE};
    size_t key = first;

    batch_start(&batch, first);
    for (; key < batch.end; key++) {
        if (mask && !mask[key])
            continue;
        if (!copy_value_in(&batch, key, base + places[key].offset, &places[key].checksum))
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
    struct batch batch = {spans, base, places, NULL, first + count, 0, limits, .reason = EMS_COPY_DONE};
    size_t key = first;

    batch_start(&batch, first);
    for (; key < batch.end; key++) {
        uint64_t checksum;

        if (!copy_value_out(&batch, key, base + places[key].offset, 0, &checksum))
            break;
        if (verify && checksum != places[key].checksum) {
            batch.reason = EMS_COPY_DIFFERS;
            break;
        }
    }
    kernel->fence();
    *reason = batch.reason;
    return key;
}

/* How many pieces each key has when all are cut alike, and at chunks; otherwise 0. */
static size_t pieces_of_each(const struct ems_spans *spans, size_t first, size_t count)
{
    const struct ems_piece *like = spans->pieces + spans->first[first];
    size_t n = (size_t)(spans->first[first + 1] - spans->first[first]);

    for (size_t key = first; key < first + count; key++) {
        const struct ems_piece *piece = spans->pieces + spans->first[key];

        if (spans->first[key + 1] - spans->first[key] != n)
            return 0;
        for (size_t i = 0; i < n; i++)
            if (piece[i].nbytes != like[i].nbytes || (i + 1 < n && piece[i].nbytes % EMS_CHUNK))
                return 0;
    }
    return n;
}

/* One piece of each key as a batch of its own. */
struct column {
    uint64_t *first, *lengths, *sums;
    struct ems_piece *pieces;
    struct ems_place *places;
};

static void *column_make(struct column *column, size_t count)
{
    size_t of_key = 3 * sizeof(uint64_t) + sizeof(struct ems_piece) + sizeof(struct ems_place);
    uint64_t *memory = calloc(1, count * of_key + sizeof(uint64_t));

    if (memory) {
        column->first = memory;
        column->lengths = column->first + count + 1;
        column->sums = column->lengths + count;
        column->pieces = (struct ems_piece *)(column->sums + count);
        column->places = (struct ems_place *)(column->pieces + count);
    }
    return memory;
}

size_t ems_copy_out_by_piece(const struct ems_spans *spans, size_t first, size_t count,
                             const unsigned char *base, const struct ems_place *places, int verify,
                             const struct ems_copy_limits *limits, uint32_t *arrived, int *reason)
{
    size_t npieces = count ? pieces_of_each(spans, first, count) : 0, key = 0;
    struct column column;
    void *memory = npieces ? column_make(&column, count) : NULL;
    struct ems_spans one;
    uint64_t at = 0;

    if (!memory)
        return ems_copy_out(spans, first, count, base, places, verify, limits, reason);
    one = (struct ems_spans){count, column.first, column.lengths, column.pieces};
    *reason = EMS_COPY_DONE;
    for (size_t i = 0; i < npieces && *reason == EMS_COPY_DONE; i++) {
        struct batch batch = {&one, base, column.places, NULL, count, 0, limits, .reason = EMS_COPY_DONE};

        for (key = 0; key < count; key++) {
            column.first[key + 1] = key + 1;
            column.pieces[key] = spans->pieces[spans->first[first + key] + i];
            column.lengths[key] = column.pieces[key].nbytes;
            column.places[key].offset = places[first + key].offset + at;
        }
        batch_start(&batch, 0);
        for (key = 0; key < count; key++) {
            uint64_t sum;

            if (!copy_value_out(&batch, key, base + column.places[key].offset, at / EMS_CHUNK, &sum))
                break;
            column.sums[key] += sum;
        }
        kernel->fence();
        at += column.lengths[0];
        *reason = batch.reason;
        if (*reason == EMS_COPY_DONE)
            __atomic_store_n(arrived, (uint32_t)i + 1, __ATOMIC_RELEASE);
    }
    if (*reason != EMS_COPY_DONE)
        key = 0;
    for (size_t done = 0; done < key && verify; done++)
        if (column.sums[done] != places[first + done].checksum) {
            *reason = EMS_COPY_DIFFERS;
            key = done;
        }
    free(memory);
    return first + key;
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
    unsigned char *to = target;
    const unsigned char *from = source;

    for (size_t done = 0; done < nbytes; done += EMS_CHUNK) {
        size_t part = least(nbytes - done, EMS_CHUNK);

        kernel->sum(from + done, part, NULL); /* as above: a chunk is brought near, then copied */
        kernel->stream(to + done, from + done, part, NULL);
    }
    kernel->fence();
}
