/* The single writer of a pool: reserve, commit, abort, evict, recover. Mechanism only: which
 * entries to evict and when is decided by the caller. Not thread safe, one server owns it. */
#ifndef EMS_POOL_H
#define EMS_POOL_H

#include "extents.h"
#include "history.h"
#include "index.h"

enum ems_reserve_status { EMS_GRANTED = 0, EMS_PRESENT = 1, EMS_NO_ROOM = 2, EMS_BUSY = 3 };
enum ems_commit_status { EMS_COMMITTED = 0, EMS_KEPT = 1, EMS_LOST = 2 };

#define EMS_NONE UINT32_MAX

/* What the server remembers of a reservation beside its shared record. */
struct ems_pool_link {
    uint32_t busy_next;    /* next record whose digest falls into the same chain */
    uint32_t request_next; /* next *first* record of a request in the same chain */
    uint32_t peer_next;    /* next record of the same request, by rising position */
    uint64_t follower;     /* link to the key behind it, if that was there already; 0 = none */
};

/* What recovery found and mended. */
struct ems_pool_mended {
    uint64_t intents;      /* commits that a dead server had begun, finished */
    uint64_t entries;      /* half written or impossible, emptied */
    uint64_t overlaps;     /* entries that claimed memory of others, emptied */
    uint64_t reservations; /* impossible, freed */
};

/* What the server decides by, it keeps in private memory: a wild write into the shared index can
 * cost blocks, but never lead the allocator astray. Shared records are read at recovery only. */
struct ems_pool {
    struct ems_header *header;
    struct ems_prologue *prologue;
    struct ems_bucket *buckets;
    struct ems_session *sessions;
    struct ems_reservation *reservations; /* shared: written, read at recovery only */
    struct ems_reservation *records;      /* the same, private */
    uint64_t *recency;
    struct ems_reader reader;
    struct ems_extents extents;
    struct ems_history history;
    struct ems_past *pasts; /* scratch of a commit */
    uint32_t npasts;
    int by_value; /* what the last list of victims went by */
    struct ems_pool_link *links;
    uint32_t *busy_heads, *request_heads;
    uint32_t *free_records;
    uint32_t *unit_of; /* first unit of the extent of each slot, EMS_NONE = the slot is empty */
    uint32_t nrecords, nfree_records, chain_mask;
    uint64_t nbuckets, nslots, entries, sequence;
    uint32_t reserved_units;
    uint32_t reserved_of[EMS_MAX_SESSIONS]; /* units */
    uint32_t records_of[EMS_MAX_SESSIONS];
    struct ems_pool_mended mended;
};

struct ems_pool_geometry {
    uint64_t capacity, data_bytes, nbuckets, nreservations;
};

void ems_pool_format(uint8_t *index, uint64_t index_bytes, const struct ems_pool_geometry *g,
                     const uint64_t pool_id[2]);
/* Attach to a formatted index; builds private state from it and rolls intents forward.
 * NULL on success, else a static text. */
const char *ems_pool_open(struct ems_pool *p, uint8_t *index, uint64_t index_bytes, uint64_t *recency);
void ems_pool_close(struct ems_pool *p);

/* Handles keys from `first` on; stops at, and returns, the first key that needs room made
 * (returns n when all are handled). offsets[k] is set for granted keys. */
uint32_t ems_pool_reserve(struct ems_pool *p, uint32_t session, uint64_t request, uint32_t first,
                          uint32_t n, const uint8_t *digests, const uint64_t *lengths, int replace,
                          int force, uint64_t now_ns, uint8_t *statuses, uint64_t *offsets);
void ems_pool_commit(struct ems_pool *p, uint32_t session, uint64_t request, uint32_t n,
                     const uint32_t *positions, const uint64_t *checksums, int chain, uint64_t now_ns,
                     uint8_t *statuses);
/* Gives the only key of a request another name, before its commit; 0: there is no such request. */
int ems_pool_rename(struct ems_pool *p, uint32_t session, uint64_t request, const uint64_t digest[2]);
/* Records given back. */
uint32_t ems_pool_abort(struct ems_pool *p, uint32_t session, uint64_t request);
/* Gives back what the session reserved, except the requests listed. */
uint32_t ems_pool_release_session(struct ems_pool *p, uint32_t session, const uint64_t *keep, uint32_t nkeep);

/* Empties a slot, whatever it looks like, and gives its extent back. */
void ems_pool_withdraw(struct ems_pool *p, uint64_t slot);
/* Units of the extent of a slot, 0 when it is empty. */
uint32_t ems_pool_units(const struct ems_pool *p, uint64_t slot);
/* Counts ages, here and gone, of some buckets. */
void ems_pool_survey(struct ems_pool *p, uint64_t bucket, uint64_t nbuckets);
/* Gives heads of chains the marks of their tails, as far as entries of some buckets show them. */
void ems_pool_lift(struct ems_pool *p, uint64_t bucket, uint64_t nbuckets);
/* Lists the `k` entries of some buckets to evict first: by value, or (the same for equal values) the
 * least recently used. */
uint32_t ems_pool_worst(struct ems_pool *p, uint64_t bucket, uint64_t nbuckets, uint32_t k, int by_value,
                        uint64_t *slots, uint64_t *marks);

#endif
