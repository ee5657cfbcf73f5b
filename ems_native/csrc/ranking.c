/* Which entries go first: looks at a part of the index, and lists its worst by value or recency. */
#include "pool_internal.h"

#include <stdlib.h>

struct candidate {
    float value;
    uint64_t mark, slot;
};

static int worse(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->value != y->value)
        return x->value < y->value ? -1 : 1;
    return x->mark < y->mark ? -1 : x->mark > y->mark ? 1 : x->slot < y->slot ? -1 : x->slot > y->slot;
}

static void sift_down(struct candidate *heap, uint32_t n, uint32_t i)
{
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= n)
            return;
        if (child + 1 < n && worse(&heap[child], &heap[child + 1]) < 0)
            child++;
        if (worse(&heap[i], &heap[child]) >= 0)
            return;
        struct candidate swap = heap[i];
        heap[i] = heap[child];
        heap[child] = swap;
        i = child;
    }
}

/* The word of a slot. One from the future is nonsense that would keep its entry for ever. */
static uint64_t word_of(struct ems_pool *p, uint64_t slot)
{
    uint64_t word = ems_get(&p->recency[slot]);
    if (ems_mark_tick(word) > p->history.now + EMS_AHEAD_TICKS) {
        word = ems_mark(p->history.now, word);
        ems_set(&p->recency[slot], word);
    }
    ems_history_notice(&p->history, slot, word);
    return word;
}

/* Who holds the head of a chain in its own memory loads only the tail here. The head would grow old
 * and go first, and the tail with it: a block is at least as young as its descendants. */
static void lift_ancestors(struct ems_pool *p, uint64_t slot, uint64_t word)
{
    uint64_t tick = ems_mark_tick(word);
    for (unsigned steps = 0; steps < EMS_LIFT_STEPS; steps++) {
        uint64_t link = ems_entry_at(p, slot)->predecessor, before = (uint32_t)link - 1ull;
        if (!link || before >= p->nslots || ems_mark_tick(ems_get(&p->recency[before])) >= tick ||
            p->unit_of[before] == EMS_NONE || (uint32_t)ems_entry_at(p, before)->sequence != link >> 32)
            return;
        uint64_t old = word_of(p, before);
        if (ems_mark_tick(old) >= tick)
            return;
        word = ems_mark(++tick, old);
        ems_set(&p->recency[before], word);
        ems_history_lift(&p->history, before, word);
        slot = before;
    }
}

static uint64_t end_of(const struct ems_pool *p, uint64_t bucket, uint64_t nbuckets)
{
    return bucket + nbuckets < p->nbuckets ? bucket + nbuckets : p->nbuckets;
}

void ems_pool_lift(struct ems_pool *p, uint64_t bucket, uint64_t nbuckets)
{
    uint64_t end = end_of(p, bucket, nbuckets);
    ems_history_advance(&p->history, ems_get(&p->header->heartbeat_ns));
    for (uint64_t slot = bucket * EMS_BUCKET_SLOTS; slot < end * EMS_BUCKET_SLOTS; slot++)
        if (p->unit_of[slot] != EMS_NONE)
            lift_ancestors(p, slot, word_of(p, slot));
}

void ems_pool_survey(struct ems_pool *p, uint64_t bucket, uint64_t nbuckets)
{
    uint64_t end = end_of(p, bucket, nbuckets);
    ems_history_advance(&p->history, ems_get(&p->header->heartbeat_ns));
    if (!bucket)
        p->history.pass_began = p->history.now;
    for (uint64_t slot = bucket * EMS_BUCKET_SLOTS; slot < end * EMS_BUCKET_SLOTS; slot++)
        if (p->unit_of[slot] != EMS_NONE)
            ems_history_age_entry(&p->history, slot);
    for (uint64_t b = bucket; b < end; b++)
        ems_history_age_ghosts(&p->history, b);
    p->history.looked[bucket / EMS_SEGMENT_BUCKETS] = p->history.now;
}

uint32_t ems_pool_worst(struct ems_pool *p, uint64_t bucket, uint64_t nbuckets, uint32_t k, int by_value,
                        uint64_t *slots, uint64_t *marks)
{
    struct ems_history *h = &p->history;
    struct candidate *heap = malloc((k ? k : 1) * sizeof *heap); /* the best of the k on top */
    uint64_t end = end_of(p, bucket, nbuckets);
    uint32_t n = 0;
    if (!heap)
        return 0;
    p->by_value = by_value;
    ems_history_advance(h, ems_get(&p->header->heartbeat_ns));
    for (uint64_t slot = bucket * EMS_BUCKET_SLOTS; slot < end * EMS_BUCKET_SLOTS; slot++) {
        if (p->unit_of[slot] == EMS_NONE)
            continue;
        struct candidate c = {0, word_of(p, slot), slot};
        if (by_value)
            c.value = ems_history_value(h, slot, c.mark);
        if (n < k) {
            heap[n++] = c;
            if (n == k)
                for (uint32_t at = k / 2; at-- > 0;)
                    sift_down(heap, k, at);
        } else if (k && worse(&c, &heap[0]) < 0) {
            heap[0] = c;
            sift_down(heap, k, 0);
        }
    }
    qsort(heap, n, sizeof *heap, worse);
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = heap[i].slot;
        marks[i] = heap[i].mark;
    }
    free(heap);
    return n;
}
