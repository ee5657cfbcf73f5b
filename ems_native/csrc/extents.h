/* Extents of one file in units of 4 KiB: a two-level segregated fit with boundary tags.
 *
 * Grant and release are constant time. Every extent knows its owner, so that the evictor can see
 * what lies beside a gap. Private memory of the server; rebuilt from the index at a restart.
 */
#ifndef EMS_EXTENTS_H
#define EMS_EXTENTS_H

#include <stdint.h>

#define EMS_NO_UNIT UINT32_MAX
#define EMS_OWNER_RESERVATION 0x80000000u /* owner = reservation number; else a slot number */
#define EMS_EXTENT_CLASSES (32 * 16)

struct ems_extents_unit {
    uint32_t size;  /* at the first and the last unit of a block; top bit = free */
    uint32_t link;  /* at the first unit: owner, or next free block of the class */
    uint32_t prev;  /* at the first unit of a free block: previous one of the class */
};

struct ems_extents {
    struct ems_extents_unit *unit;
    uint32_t total; /* units there will ever be */
    uint32_t ready; /* units that may be granted */
    uint32_t free;
    uint32_t hand; /* first unit of a block: where the next search for a run begins */
    uint32_t head[EMS_EXTENT_CLASSES];
    uint32_t level_map;    /* which first levels have a free block */
    uint32_t class_map[32];
};

int ems_extents_init(struct ems_extents *x, uint32_t total);
void ems_extents_destroy(struct ems_extents *x);
/* Units [ready, to) become grantable. */
void ems_extents_extend(struct ems_extents *x, uint32_t to);
/* First unit of a block of n, or EMS_NO_UNIT. */
uint32_t ems_extents_grant(struct ems_extents *x, uint32_t n, uint32_t owner);
void ems_extents_release(struct ems_extents *x, uint32_t first, uint32_t n);
static inline void ems_extents_set_owner(struct ems_extents *x, uint32_t first, uint32_t owner)
{
    x->unit[first].link = owner;
}
/* Units of the granted block that begins there. */
static inline uint32_t ems_extents_size(const struct ems_extents *x, uint32_t first)
{
    return x->unit[first].size;
}
uint32_t ems_extents_largest(const struct ems_extents *x);
/* A run of free blocks and blocks owned by slots of at least n units: its first unit, or EMS_NO_UNIT.
 * The one that costs the fewest used units of a few thousand blocks; the next call looks behind it,
 * so that a search among millions of blocks costs no more, and no place is emptied twice.
 * *end is one behind the last block of the run. */
uint32_t ems_extents_cheapest_run(struct ems_extents *x, uint32_t n, uint32_t *end);
/* Next block at or behind `at`: its first unit, with size and owner; EMS_NO_UNIT at the end.
 * *owner is EMS_NO_UNIT for a free block. */
uint32_t ems_extents_walk(const struct ems_extents *x, uint32_t at, uint32_t *n, uint32_t *owner);
/* Rebuild: `blocks` sorted by first unit and disjoint. 0, or -1 when they are not. */
struct ems_extents_block {
    uint32_t first, n, owner;
};
int ems_extents_rebuild(struct ems_extents *x, const struct ems_extents_block *blocks, uint64_t count,
                        uint32_t ready);

#endif
