/* Reading the shared index: what every client does without asking anybody. */
#ifndef EMS_INDEX_H
#define EMS_INDEX_H

#include "layout.h"
#include "place.h"

enum ems_miss {
    EMS_HIT = 0,
    EMS_MISS_ABSENT = 1,
    EMS_MISS_CHANGING = 2,
    EMS_MISS_LENGTH = 3,
    EMS_MISS_RETIRED = 4,
};

struct ems_reader {
    const uint8_t *index;
    const struct ems_header *header;
    const struct ems_bucket *buckets;
    uint64_t nbuckets;
    uint64_t data_bytes;
    uint64_t *recency; /* may be NULL: no marks are written */
};

/* 0, or a reason why the mapping is not a pool this code can read (a static string). */
const char *ems_reader_open(struct ems_reader *r, const uint8_t *index, uint64_t index_bytes,
                            uint64_t *recency);

/* Fills places[first .. first+count) up to the first miss; `lengths` (per key, absolute index)
 * may be NULL. Returns the number of hits, the reason of the miss in *why. */
uint64_t ems_lookup(const struct ems_reader *r, const uint8_t *digests, const uint64_t *lengths,
                    uint64_t first, uint64_t count, struct ems_place *places, uint64_t now_ns,
                    int *why);

/* How many leading places are unchanged since their lookup. Call after the bytes were copied. */
uint64_t ems_validate(const struct ems_reader *r, const struct ems_place *places, uint64_t first,
                      uint64_t count);

#endif
