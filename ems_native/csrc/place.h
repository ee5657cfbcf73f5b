/* The place of one value in the pool, as `index` reports it and `copy` uses it: 40 bytes, no
 * padding. */
#ifndef EMS_PLACE_H
#define EMS_PLACE_H

#include <stdint.h>

struct ems_place {
    uint64_t slot;     /* of the index */
    uint64_t version;  /* of the entry when it was looked up */
    uint64_t offset;   /* of the extent in the data file, bytes */
    uint64_t length;   /* of the value, bytes */
    uint64_t checksum; /* of the value, see checksum.h */
};

_Static_assert(sizeof(struct ems_place) == 40, "the place is part of the ABI");

#endif
