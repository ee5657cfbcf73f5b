/* What pool.c and recovery.c share. */
#ifndef EMS_POOL_INTERNAL_H
#define EMS_POOL_INTERNAL_H

#include "pool.h"

static inline uint32_t ems_units_of(uint64_t nbytes) { return (uint32_t)((nbytes + EMS_UNIT - 1) / EMS_UNIT); }
static inline uint32_t ems_unit_at(uint64_t offset) { return (uint32_t)((offset - EMS_DATA_START) / EMS_UNIT); }
static inline uint64_t ems_offset_of(uint32_t unit) { return EMS_DATA_START + (uint64_t)unit * EMS_UNIT; }

static inline struct ems_entry *ems_entry_at(const struct ems_pool *p, uint64_t slot)
{
    return &p->buckets[slot / EMS_BUCKET_SLOTS].entry[slot % EMS_BUCKET_SLOTS];
}

static inline uint64_t *ems_tag_at(const struct ems_pool *p, uint64_t slot)
{
    return &p->buckets[slot / EMS_BUCKET_SLOTS].tag[slot % EMS_BUCKET_SLOTS];
}

/* A link to the block in a slot, which proves stale when another block took its place. */
static inline uint64_t ems_link_to(const struct ems_pool *p, uint64_t slot)
{
    return (slot + 1) | ems_entry_at(p, slot)->sequence << 32;
}

void ems_entry_write(struct ems_pool *p, uint64_t slot, const struct ems_reservation *r);
void ems_entry_clear(struct ems_pool *p, uint64_t slot);
/* Files the record under its digest and its request, behind record `after` of the same request. */
void ems_link_record(struct ems_pool *p, uint32_t i, uint32_t after);

#endif
