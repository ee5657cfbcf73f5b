# What _index.pyx uses of the single writer.

cdef extern from "pool.h":
    cdef struct ems_history:
        pass
    cdef struct ems_tally:
        uint64_t hits
        uint64_t lru_hits
        double missing
    ems_tally ems_history_tally(ems_history *h, uint64_t coming) nogil
    double ems_history_learn(ems_history *h, double fade) nogil
    cdef struct ems_pool_mended:
        uint64_t intents
        uint64_t entries
        uint64_t overlaps
        uint64_t reservations
    cdef struct ems_pool:
        ems_history history
        ems_header *header
        ems_prologue *prologue
        ems_bucket *buckets
        ems_session *sessions
        ems_reservation *reservations
        uint64_t *recency
        ems_reader reader
        ems_extents extents
        ems_reservation *records
        ems_pool_mended mended
        uint32_t nrecords
        uint32_t nfree_records
        uint64_t nslots
        uint64_t entries
        uint32_t reserved_units
        uint32_t reserved_of[1024]
    cdef struct ems_pool_geometry:
        uint64_t capacity
        uint64_t data_bytes
        uint64_t nbuckets
        uint64_t nreservations
    void ems_pool_format(uint8_t *index, uint64_t index_bytes, const ems_pool_geometry *g,
                         const uint64_t *pool_id) nogil
    const char *ems_pool_open(ems_pool *p, uint8_t *index, uint64_t index_bytes,
                              uint64_t *recency) nogil
    void ems_pool_close(ems_pool *p) nogil
    uint32_t ems_pool_reserve(ems_pool *p, uint32_t session, uint64_t request, uint32_t first,
                              uint32_t n, const uint8_t *digests, const uint64_t *lengths,
                              int replace, int force, uint64_t now_ns, uint8_t *statuses,
                              uint64_t *offsets) nogil
    void ems_pool_commit(ems_pool *p, uint32_t session, uint64_t request, uint32_t n,
                         const uint32_t *positions, const uint64_t *checksums, int chain,
                         uint64_t now_ns, uint8_t *statuses) nogil
    int ems_pool_rename(ems_pool *p, uint32_t session, uint64_t request,
                        const uint64_t *digest) nogil
    uint32_t ems_pool_abort(ems_pool *p, uint32_t session, uint64_t request) nogil
    uint32_t ems_pool_release_session(ems_pool *p, uint32_t session, const uint64_t *keep,
                                      uint32_t nkeep) nogil
    void ems_pool_withdraw(ems_pool *p, uint64_t slot) nogil
    uint32_t ems_pool_units(const ems_pool *p, uint64_t slot) nogil
    void ems_pool_lift(ems_pool *p, uint64_t bucket, uint64_t nbuckets) nogil
    void ems_pool_survey(ems_pool *p, uint64_t bucket, uint64_t nbuckets) nogil
    uint32_t ems_pool_worst(ems_pool *p, uint64_t bucket, uint64_t nbuckets, uint32_t k,
                            int by_value, uint64_t *slots, uint64_t *marks) nogil
