#include "extents.h"

#include <stdlib.h>
#include <string.h>

#define FREE 0x80000000u
#define SIZE(u) ((u) & ~FREE)
#define LOOK_FOR_RUN 4096    /* blocks looked at for the cheapest run, more only while there is none */
#define LOOK_IN_OWN_CLASS 16 /* blocks tried in a class whose blocks may be too small */

static unsigned class_of(uint32_t n)
{
    if (n < 16)
        return n;
    unsigned level = 31u - (unsigned)__builtin_clz(n);
    return (level - 3) * 16 + ((n >> (level - 4)) & 15);
}

static void insert(struct ems_extents *x, uint32_t first, uint32_t n)
{
    unsigned c = class_of(n);
    uint32_t next = x->head[c];
    x->unit[first].size = x->unit[first + n - 1].size = n | FREE;
    x->unit[first].link = next;
    x->unit[first].prev = EMS_NO_UNIT;
    if (next != EMS_NO_UNIT)
        x->unit[next].prev = first;
    x->head[c] = first;
    x->class_map[c / 16] |= 1u << (c % 16);
    x->level_map |= 1u << (c / 16);
}

static void take_out(struct ems_extents *x, uint32_t first)
{
    unsigned c = class_of(SIZE(x->unit[first].size));
    uint32_t next = x->unit[first].link, prev = x->unit[first].prev;
    if (next != EMS_NO_UNIT)
        x->unit[next].prev = prev;
    if (prev != EMS_NO_UNIT) {
        x->unit[prev].link = next;
    } else {
        x->head[c] = next;
        if (next == EMS_NO_UNIT) {
            x->class_map[c / 16] &= ~(1u << (c % 16));
            if (!x->class_map[c / 16])
                x->level_map &= ~(1u << (c / 16));
        }
    }
}

static void clear(struct ems_extents *x)
{
    x->ready = x->free = x->hand = 0;
    x->level_map = 0;
    memset(x->class_map, 0, sizeof x->class_map);
    for (unsigned c = 0; c < EMS_EXTENT_CLASSES; c++)
        x->head[c] = EMS_NO_UNIT;
}

int ems_extents_init(struct ems_extents *x, uint32_t total)
{
    x->unit = calloc(total ? total : 1, sizeof *x->unit);
    x->total = total;
    clear(x);
    return x->unit ? 0 : -1;
}

void ems_extents_destroy(struct ems_extents *x)
{
    free(x->unit);
    x->unit = NULL;
}

void ems_extents_release(struct ems_extents *x, uint32_t first, uint32_t n)
{
    x->free += n;
    if (first > 0 && x->unit[first - 1].size & FREE) {
        uint32_t before = SIZE(x->unit[first - 1].size);
        first -= before;
        n += before;
        take_out(x, first);
    }
    if (first + n < x->ready && x->unit[first + n].size & FREE) {
        take_out(x, first + n);
        n += SIZE(x->unit[first + n].size);
    }
    if (x->hand > first && x->hand - first < n)
        x->hand = first; /* no block begins there any more */
    insert(x, first, n);
}

void ems_extents_extend(struct ems_extents *x, uint32_t to)
{
    uint32_t from = x->ready;
    if (to > x->total)
        to = x->total;
    if (to <= from)
        return;
    x->ready = to;
    ems_extents_release(x, from, to - from);
}

/* A free block of at least n in this class, the first that fits of a few. */
static uint32_t first_fit(const struct ems_extents *x, unsigned c, uint32_t n, int look)
{
    uint32_t b = x->head[c];
    for (; b != EMS_NO_UNIT && look > 0; b = x->unit[b].link, look--)
        if (SIZE(x->unit[b].size) >= n)
            return b;
    return EMS_NO_UNIT;
}

static uint32_t larger_class(const struct ems_extents *x, unsigned c)
{
    unsigned level = c / 16, within = c % 16;
    uint32_t map = within == 15 ? 0 : x->class_map[level] & (~0u << (within + 1));
    if (!map) {
        uint32_t levels = level >= 31 ? 0 : x->level_map & (~0u << (level + 1));
        if (!levels)
            return EMS_NO_UNIT;
        level = (unsigned)__builtin_ctz(levels);
        map = x->class_map[level];
    }
    return x->head[level * 16 + (unsigned)__builtin_ctz(map)];
}

uint32_t ems_extents_grant(struct ems_extents *x, uint32_t n, uint32_t owner)
{
    if (n == 0 || n > x->free)
        return EMS_NO_UNIT;
    unsigned c = class_of(n);
    uint32_t first = first_fit(x, c, n, LOOK_IN_OWN_CLASS);
    if (first == EMS_NO_UNIT)
        first = larger_class(x, c);
    if (first == EMS_NO_UNIT)
        first = first_fit(x, c, n, 4096); /* the last hope before somebody is evicted */
    if (first == EMS_NO_UNIT)
        return EMS_NO_UNIT;
    uint32_t have = SIZE(x->unit[first].size);
    take_out(x, first);
    x->unit[first].size = x->unit[first + n - 1].size = n;
    x->unit[first].link = owner;
    if (have > n)
        insert(x, first + n, have - n);
    x->free -= n;
    return first;
}

uint32_t ems_extents_largest(const struct ems_extents *x)
{
    if (!x->level_map)
        return 0;
    unsigned level = 31u - (unsigned)__builtin_clz(x->level_map);
    unsigned c = level * 16 + 31u - (unsigned)__builtin_clz(x->class_map[level]);
    uint32_t best = 0;
    int look = 4096;
    for (uint32_t b = x->head[c]; b != EMS_NO_UNIT && look > 0; b = x->unit[b].link, look--)
        if (SIZE(x->unit[b].size) > best)
            best = SIZE(x->unit[b].size);
    return best;
}

uint32_t ems_extents_walk(const struct ems_extents *x, uint32_t at, uint32_t *n, uint32_t *owner)
{
    if (at >= x->ready)
        return EMS_NO_UNIT;
    *n = SIZE(x->unit[at].size);
    *owner = x->unit[at].size & FREE ? EMS_NO_UNIT : x->unit[at].link;
    return at;
}

uint32_t ems_extents_cheapest_run(struct ems_extents *x, uint32_t n, uint32_t *end)
{
    uint32_t best = EMS_NO_UNIT, best_cost = UINT32_MAX;
    uint32_t left = x->hand, right = x->hand, cost = 0, size, owner;
    uint64_t units = 0; /* looked at: all of them, and those of a run that begins before the hand */
    for (uint32_t blocks = 0; units < (uint64_t)x->ready + n; blocks++) {
        if (best != EMS_NO_UNIT && blocks >= LOOK_FOR_RUN)
            break;
        if (ems_extents_walk(x, right, &size, &owner) == EMS_NO_UNIT) {
            if (x->ready == 0)
                break;
            left = right = cost = 0; /* a run does not go round the end */
            continue;
        }
        /* Two hands walk over the blocks; [left, right) never holds a reservation. */
        right += size;
        units += size;
        if (owner != EMS_NO_UNIT && owner & EMS_OWNER_RESERVATION) {
            left = right;
            cost = 0;
            continue;
        }
        if (owner != EMS_NO_UNIT)
            cost += size;
        while (right - left >= n) {
            if (cost < best_cost) {
                best = left;
                best_cost = cost;
                *end = right;
            }
            ems_extents_walk(x, left, &size, &owner);
            left += size;
            if (owner != EMS_NO_UNIT)
                cost -= size;
        }
    }
    if (best != EMS_NO_UNIT)
        x->hand = *end < x->ready ? *end : 0;
    return best;
}

int ems_extents_rebuild(struct ems_extents *x, const struct ems_extents_block *blocks, uint64_t count,
                        uint32_t ready)
{
    uint32_t at = 0;
    clear(x);
    x->ready = ready;
    for (uint64_t i = 0; i < count; i++) {
        const struct ems_extents_block *b = &blocks[i];
        if (b->n == 0 || b->first < at || b->first >= ready || b->n > ready - b->first)
            return -1;
        if (b->first > at) {
            insert(x, at, b->first - at);
            x->free += b->first - at;
        }
        x->unit[b->first].size = x->unit[b->first + b->n - 1].size = b->n;
        x->unit[b->first].link = b->owner;
        at = b->first + b->n;
    }
    if (at < ready) {
        insert(x, at, ready - at);
        x->free += ready - at;
    }
    return 0;
}
