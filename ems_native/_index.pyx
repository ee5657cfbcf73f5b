# cython: language_level=3, boundscheck=False, wraparound=False
"""The shared index: a reader for clients, the single writer for the server.

It knows addresses, lengths and records; keys are opaque 16-byte digests. The mappings that the
addresses point into must outlive the objects here.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy


cdef extern from "place.h":
    cdef struct ems_place:
        uint64_t slot
        uint64_t version
        uint64_t offset
        uint64_t length
        uint64_t checksum


cdef extern from "layout.h":
    enum:
        EMS_ABI_VERSION, EMS_LAYOUT_VERSION, EMS_UNIT, EMS_DATA_START, EMS_BUCKET_SLOTS
        EMS_MAX_SESSIONS, EMS_COUNTERS_PAGE, EMS_HEADER_OFFSET, EMS_BUCKETS_OFFSET
        EMS_RECENCY_OFFSET, EMS_TICK_SHIFT, EMS_SEGMENT_BUCKETS
        EMS_FORMATTING, EMS_ACTIVE, EMS_RETIRED
        EMS_STOPPED, EMS_STARTING, EMS_SERVING, EMS_DRAINING
        EMS_PAGE_UNKNOWN, EMS_PAGE_4K, EMS_PAGE_HUGE, EMS_PAGE_HUGETLB, EMS_PAGE_MIXED
        EMS_FILE_INDEX, EMS_FILE_RECENCY, EMS_FILE_COUNTERS, EMS_FILE_DATA
        EMS_RES_FREE
    const uint64_t EMS_MAGIC
    cdef struct ems_prologue:
        uint64_t magic
        uint64_t pool_id[2]
        uint64_t layout_version
        uint64_t state
        uint64_t file_kind
        uint64_t file_bytes
    cdef struct ems_header:
        uint64_t epoch
        uint64_t heartbeat_ns
        uint64_t frame_bytes
        uint64_t server_pid
        uint64_t capacity
        uint64_t data_bytes
        uint64_t nbuckets
        uint64_t nsessions
        uint64_t sessions_offset
        uint64_t nreservations
        uint64_t sequence
        uint64_t ready_bytes
        uint64_t page_kind
        uint64_t evictions
        uint64_t created_ns
        uint64_t verify
        uint64_t server_state
    cdef struct ems_entry:
        uint64_t version
        uint64_t digest[2]
        uint64_t offset
        uint64_t length
        uint64_t checksum
        uint64_t predecessor
        uint64_t sequence
    cdef struct ems_bucket:
        uint64_t tag[8]
        ems_entry entry[8]
    cdef struct ems_session:
        uint64_t state
        uint64_t pid
        uint64_t secret_hash[2]
        uint64_t opened_ns
    cdef struct ems_reservation:
        uint64_t state
        uint64_t session
        uint64_t request
        uint64_t offset
        uint64_t length
    uint64_t ems_get(const uint64_t *p) nogil
    uint64_t ems_get_acquire(const uint64_t *p) nogil
    void ems_set(uint64_t *p, uint64_t v) nogil
    void ems_set_release(uint64_t *p, uint64_t v) nogil


cdef extern from "index.h":
    cdef struct ems_reader:
        const uint8_t *index
        const ems_header *header
        uint64_t nbuckets
        uint64_t data_bytes
        uint64_t *recency
    const char *ems_reader_open(ems_reader *r, const uint8_t *index, uint64_t index_bytes,
                                uint64_t *recency) nogil
    uint64_t ems_lookup(const ems_reader *r, const uint8_t *digests, const uint64_t *lengths,
                        uint64_t first, uint64_t count, ems_place *places, uint64_t now_ns,
                        int *why) nogil
    uint64_t ems_validate(const ems_reader *r, const ems_place *places, uint64_t first,
                          uint64_t count) nogil


cdef extern from "extents.h":
    enum:
        EMS_OWNER_RESERVATION
    uint32_t EMS_NO_UNIT
    cdef struct ems_extents:
        uint32_t total
        uint32_t ready
        uint32_t free
    uint32_t ems_extents_largest(const ems_extents *x) nogil
    void ems_extents_extend(ems_extents *x, uint32_t to) nogil
    uint32_t ems_extents_cheapest_run(const ems_extents *x, uint32_t n, uint32_t *end) nogil
    uint32_t ems_extents_walk(const ems_extents *x, uint32_t at, uint32_t *n, uint32_t *owner) nogil


include "_pool.pxi"


ABI_VERSION = EMS_ABI_VERSION
LAYOUT = {
    "LAYOUT_VERSION": EMS_LAYOUT_VERSION,
    "MAGIC": EMS_MAGIC,
    "UNIT": EMS_UNIT,
    "DATA_START": EMS_DATA_START,
    "BUCKET_SLOTS": EMS_BUCKET_SLOTS,
    "SEGMENT_BUCKETS": EMS_SEGMENT_BUCKETS,
    "BUCKET_BYTES": sizeof(ems_bucket),
    "SESSION_BYTES": 64,
    "RESERVATION_BYTES": 128,
    "PLACE_BYTES": sizeof(ems_place),
    "MAX_SESSIONS": EMS_MAX_SESSIONS,
    "COUNTERS_PAGE": EMS_COUNTERS_PAGE,
    "HEADER_OFFSET": EMS_HEADER_OFFSET,
    "BUCKETS_OFFSET": EMS_BUCKETS_OFFSET,
    "RECENCY_OFFSET": EMS_RECENCY_OFFSET,
    "TICK_NS": 1 << EMS_TICK_SHIFT,
    "STATE_FORMATTING": EMS_FORMATTING,
    "STATE_ACTIVE": EMS_ACTIVE,
    "STATE_RETIRED": EMS_RETIRED,
    "SERVER_STOPPED": EMS_STOPPED,
    "SERVER_STARTING": EMS_STARTING,
    "SERVER_SERVING": EMS_SERVING,
    "SERVER_DRAINING": EMS_DRAINING,
    "PAGE_UNKNOWN": EMS_PAGE_UNKNOWN,
    "PAGE_4K": EMS_PAGE_4K,
    "PAGE_HUGE": EMS_PAGE_HUGE,
    "PAGE_HUGETLB": EMS_PAGE_HUGETLB,
    "PAGE_MIXED": EMS_PAGE_MIXED,
    "FILE_INDEX": EMS_FILE_INDEX,
    "FILE_RECENCY": EMS_FILE_RECENCY,
    "FILE_COUNTERS": EMS_FILE_COUNTERS,
    "FILE_DATA": EMS_FILE_DATA,
}


def write_prologue(uintptr_t address, bytes pool_id, int file_kind, uint64_t file_bytes, int state):
    """The eternal first 64 bytes of a pool's file."""
    cdef ems_prologue *p = <ems_prologue *>address
    if len(pool_id) != 16:
        raise ValueError("pool_id is not 16 bytes long")
    memcpy(p.pool_id, PyBytes_AS_STRING(pool_id), 16)
    p.layout_version = EMS_LAYOUT_VERSION
    p.file_kind = file_kind
    p.file_bytes = file_bytes
    ems_set(&p.state, state)
    ems_set_release(&p.magic, EMS_MAGIC)


def set_prologue_state(uintptr_t address, int state):
    """Changes the state in the prologue of any pool, whatever its layout version."""
    ems_set_release(&(<ems_prologue *>address).state, state)


cdef dict header_of(const ems_prologue *p, const ems_header *h):
    pool_id = PyBytes_FromStringAndSize(<const char *>p.pool_id, 16)
    return {
        "pool_id": pool_id.hex(),
        "layout": ems_get(&p.layout_version),
        "state": ems_get_acquire(&p.state),
        "epoch": ems_get(&h.epoch),
        "heartbeat_ns": ems_get(&h.heartbeat_ns),
        "server_pid": ems_get(&h.server_pid),
        "server_state": ems_get(&h.server_state),
        "capacity": ems_get(&h.capacity),
        "data_bytes": ems_get(&h.data_bytes),
        "slots": ems_get(&h.nbuckets) * EMS_BUCKET_SLOTS,
        "reservations": ems_get(&h.nreservations),
        "sequence": ems_get(&h.sequence),
        "ready_bytes": ems_get(&h.ready_bytes),
        "page_kind": ems_get(&h.page_kind),
        "evictions": ems_get(&h.evictions),
        "created_ns": ems_get(&h.created_ns),
        "verify": bool(ems_get(&h.verify)),
    }


cdef inline uint64_t *recency_words(uintptr_t address) noexcept:
    return <uint64_t *>(address + EMS_RECENCY_OFFSET) if address else NULL


cdef class Reader:
    """Looks keys up in a mapped index. Thread safe: it holds no state of a lookup."""

    cdef ems_reader reader
    cdef uint64_t index_bytes

    def __cinit__(self, uintptr_t index_address, uint64_t index_bytes, uintptr_t recency_address):
        cdef const char *wrong = ems_reader_open(
            &self.reader, <const uint8_t *>index_address, index_bytes,
            recency_words(recency_address),
        )
        if wrong != NULL:
            raise ValueError(wrong.decode())
        self.index_bytes = index_bytes

    def lookup(self, bytes digests, bytes lengths, uint64_t first, uint64_t count,
               bytearray places, uint64_t tick):
        """Consecutive hits from `first`, and why it stopped there (0 = it did not)."""
        cdef int why = 0
        cdef uint64_t end = first + count
        cdef uint64_t hits
        if (end < first or <uint64_t>len(digests) < 16 * end
                or <uint64_t>len(places) < sizeof(ems_place) * end
                or (lengths is not None and <uint64_t>len(lengths) < 8 * end)):
            raise ValueError("a column is shorter than first + count keys")
        hits = ems_lookup(
            &self.reader, <const uint8_t *>PyBytes_AS_STRING(digests),
            <const uint64_t *>PyBytes_AS_STRING(lengths) if lengths is not None else NULL,
            first, count, <ems_place *>PyByteArray_AS_STRING(places), tick, &why,
        )
        return hits, why

    def validate(self, bytearray places, uint64_t first, uint64_t count):
        """How many keys from `first` are unchanged since their lookup."""
        if first + count < first or <uint64_t>len(places) < sizeof(ems_place) * (first + count):
            raise ValueError("places is shorter than first + count keys")
        return ems_validate(
            &self.reader, <const ems_place *>PyByteArray_AS_STRING(places), first, count
        )

    def present(self, bytes digests, uint64_t n, uint64_t tick):
        """How many leading keys are there."""
        cdef int why = 0
        if <uint64_t>len(digests) < 16 * n:
            raise ValueError("digests is shorter than n keys")
        return ems_lookup(&self.reader, <const uint8_t *>PyBytes_AS_STRING(digests), NULL, 0, n,
                          NULL, tick, &why)

    def pulse(self):
        """(state of the pool, epoch, heartbeat_ns): cheap, for health checks."""
        cdef const ems_header *h = self.reader.header
        cdef const ems_prologue *p = <const ems_prologue *>self.reader.index
        return ems_get_acquire(&p.state), ems_get(&h.epoch), ems_get(&h.heartbeat_ns)

    def room(self):
        """(bytes that are prepared for use, bytes there will be)."""
        cdef const ems_header *h = self.reader.header
        return ems_get(&h.ready_bytes), ems_get(&h.capacity)

    def frame_bytes(self):
        """Bytes that the server wants to be asked for by one message; 0 when it does not say."""
        return ems_get(&self.reader.header.frame_bytes)

    def header(self):
        """Everything the header says, by name."""
        return header_of(<const ems_prologue *>self.reader.index, self.reader.header)

    def sessions(self):
        """(session id, pid) of every open session."""
        cdef const ems_header *h = self.reader.header
        cdef uint64_t at = ems_get(&h.sessions_offset)
        cdef uint64_t n = ems_get(&h.nsessions)
        cdef const ems_session *s
        if n > EMS_MAX_SESSIONS or at > self.index_bytes:
            return []
        if self.index_bytes - at < n * sizeof(ems_session):
            return []
        s = <const ems_session *>(self.reader.index + at)
        return [(i, ems_get(&s[i].pid)) for i in range(n) if ems_get(&s[i].state)]


def format_index(uintptr_t index_address, uint64_t index_bytes, uint64_t capacity,
                 uint64_t data_bytes, uint64_t nbuckets, uint64_t nreservations, bytes pool_id):
    """Lays an empty index out in zeroed memory, state FORMATTING."""
    cdef ems_pool_geometry g
    if len(pool_id) != 16:
        raise ValueError("pool_id is not 16 bytes long")
    g.capacity = capacity
    g.data_bytes = data_bytes
    g.nbuckets = nbuckets
    g.nreservations = nreservations
    ems_pool_format(<uint8_t *>index_address, index_bytes, &g,
                    <const uint64_t *>PyBytes_AS_STRING(pool_id))


cdef class Writer:
    """The pool's only writer. Not thread safe; the server's loop owns it."""

    cdef ems_pool pool
    cdef bint opened

    def __cinit__(self, uintptr_t index_address, uint64_t index_bytes, uintptr_t recency_address):
        cdef const char *wrong = ems_pool_open(
            &self.pool, <uint8_t *>index_address, index_bytes, recency_words(recency_address)
        )
        if wrong != NULL:
            raise ValueError(wrong.decode())
        self.opened = True

    def __dealloc__(self):
        if self.opened:
            ems_pool_close(&self.pool)

    # ---- what a save does ----

    def reserve(self, uint32_t session, uint64_t request, uint32_t first, bytes digests,
                bytes lengths, bint replace, bint force, uint64_t now_ns, bytearray statuses,
                bytearray offsets):
        """Handles keys from `first`; returns the first that needs room made, or the count."""
        cdef uint32_t n = len(statuses)
        if (session == 0 or session >= EMS_MAX_SESSIONS or first > n or len(digests) != 16 * n
                or len(lengths) != 8 * n or len(offsets) != 8 * n):
            raise ValueError("the columns of a reservation do not fit together")
        return ems_pool_reserve(
            &self.pool, session, request, first, n, <const uint8_t *>PyBytes_AS_STRING(digests),
            <const uint64_t *>PyBytes_AS_STRING(lengths), replace, force, now_ns,
            <uint8_t *>PyByteArray_AS_STRING(statuses), <uint64_t *>PyByteArray_AS_STRING(offsets),
        )

    def commit(self, uint32_t session, uint64_t request, bytes positions, bytes checksums,
               bint chain, uint64_t now_ns):
        """Publishes keys by rising position; a status for each."""
        cdef uint32_t n = len(positions) // 4
        if (session == 0 or session >= EMS_MAX_SESSIONS or len(positions) != 4 * n
                or len(checksums) != 8 * n):
            raise ValueError("the columns of a commit do not fit together")
        statuses = bytearray(n)
        ems_pool_commit(
            &self.pool, session, request, n, <const uint32_t *>PyBytes_AS_STRING(positions),
            <const uint64_t *>PyBytes_AS_STRING(checksums), chain, now_ns,
            <uint8_t *>PyByteArray_AS_STRING(statuses),
        )
        return bytes(statuses)

    def rename(self, uint32_t session, uint64_t request, bytes digest):
        """Gives the only key of a request another name; whether there is such a request."""
        if session == 0 or session >= EMS_MAX_SESSIONS or len(digest) != 16:
            raise ValueError("no such session, or a digest that is none")
        cdef uint64_t name[2]
        memcpy(name, PyBytes_AS_STRING(digest), 16)
        return bool(ems_pool_rename(&self.pool, session, request, name))

    def abort(self, uint32_t session, uint64_t request):
        """Gives back what is left of a request; how many keys that were."""
        return ems_pool_abort(&self.pool, session, request)

    def release_session(self, uint32_t session, bytes keep):
        """Gives back all of a session but the requests in the u64 column `keep`."""
        if session >= EMS_MAX_SESSIONS or len(keep) % 8:
            raise ValueError("no such session, or a torn column")
        return ems_pool_release_session(
            &self.pool, session, <const uint64_t *>PyBytes_AS_STRING(keep), len(keep) // 8
        )

    # ---- eviction: mechanism only ----

    def survey(self, uint64_t bucket, uint64_t nbuckets):
        """Counts how long the entries of some buckets, and those that are gone, wait for a use."""
        ems_pool_survey(&self.pool, bucket, nbuckets)

    def lift(self, uint64_t bucket, uint64_t nbuckets):
        """Gives heads of chains the marks of their tails, as entries of some buckets show them."""
        ems_pool_lift(&self.pool, bucket, nbuckets)

    def worst(self, uint64_t bucket, uint64_t nbuckets, uint32_t k, bint by_value):
        """(slots, recency words) of the k entries to evict first, by value or recency, as u64s."""
        slots = bytearray(8 * k)
        marks = bytearray(8 * k)
        cdef uint32_t n
        cdef uint64_t *s = <uint64_t *>PyByteArray_AS_STRING(slots)
        cdef uint64_t *m = <uint64_t *>PyByteArray_AS_STRING(marks)
        with nogil:
            n = ems_pool_worst(&self.pool, bucket, nbuckets, k, by_value, s, m)
        return bytes(slots[:8 * n]), bytes(marks[:8 * n])

    def tally(self):
        """(hits, hits of LRU since the last tally, share of what LRU would hold that is gone)."""
        cdef ems_tally tally = ems_history_tally(
            &self.pool.history, self.pool.nrecords - self.pool.nfree_records
        )
        return tally.hits, tally.lru_hits, tally.missing

    def learn(self, double fade):
        """New values, when old counts have lost that share; the number of reuses behind them."""
        return ems_history_learn(&self.pool.history, fade)

    def evict(self, bytes slots, bytes marks, uint32_t first, uint32_t units_wanted):
        """Withdraws listed entries from `first` until enough units came back.

        Skips what was used or replaced since it was listed. Returns (index of the next candidate,
        units freed, entries evicted).
        """
        cdef uint32_t n = len(slots) // 8
        cdef uint32_t i = first
        cdef uint32_t before = self.pool.extents.free
        cdef uint32_t evicted = 0
        cdef uint64_t slot
        cdef const uint64_t *s = <const uint64_t *>PyBytes_AS_STRING(slots)
        cdef const uint64_t *m = <const uint64_t *>PyBytes_AS_STRING(marks)
        if len(marks) != len(slots):
            raise ValueError("the columns of candidates do not fit together")
        while i < n and self.pool.extents.free - before < units_wanted:
            slot = s[i]
            if (slot < self.pool.nslots and ems_pool_units(&self.pool, slot)
                    and ems_get(&self.pool.recency[slot]) == m[i]):
                ems_pool_withdraw(&self.pool, slot)
                evicted += 1
            i += 1
        ems_set(&self.pool.header.evictions, self.pool.header.evictions + evicted)
        return i, self.pool.extents.free - before, evicted

    def clear_run(self, uint32_t units):
        """Evicts the cheapest run that makes `units` contiguous; False if there is none."""
        cdef uint32_t end = 0, size = 0, owner = 0
        cdef uint32_t at = ems_extents_cheapest_run(&self.pool.extents, units, &end)
        if at == EMS_NO_UNIT:
            return False
        owners = []
        while at < end:
            ems_extents_walk(&self.pool.extents, at, &size, &owner)
            if owner != EMS_NO_UNIT:
                owners.append(owner)
            at += size
        for slot in owners:
            ems_pool_withdraw(&self.pool, slot)
        ems_set(&self.pool.header.evictions, self.pool.header.evictions + <uint64_t>len(owners))
        return True

    def locate(self, bytes digest):
        """(slot, version, offset, length, checksum) of a key, or None."""
        cdef int why = 0
        cdef ems_place place
        if len(digest) != 16:
            raise ValueError("a digest is 16 bytes long")
        if not ems_lookup(&self.pool.reader, <const uint8_t *>PyBytes_AS_STRING(digest), NULL, 0, 1,
                          &place, 0, &why):
            return None
        return place.slot, place.version, place.offset, place.length, place.checksum

    def withdraw(self, uint64_t slot, uint64_t version):
        """Drops an entry if it is still that version."""
        if (slot >= self.pool.nslots or not ems_pool_units(&self.pool, slot)
                or self.pool.buckets[slot // 8].entry[slot % 8].version != version):
            return False
        ems_pool_withdraw(&self.pool, slot)
        return True

    # ---- space ----

    def extend_ready(self, uint64_t nbytes):
        """The first `nbytes` of the data area may be granted."""
        ems_extents_extend(&self.pool.extents, <uint32_t>(nbytes // EMS_UNIT))
        ems_set(&self.pool.header.ready_bytes, <uint64_t>self.pool.extents.ready * EMS_UNIT)

    def space(self):
        """Units: (total, ready, free, reserved); then entries and slots."""
        return (self.pool.extents.total, self.pool.extents.ready, self.pool.extents.free,
                self.pool.reserved_units, self.pool.entries, self.pool.nslots)

    def largest_free(self):
        return ems_extents_largest(&self.pool.extents)

    def extents(self):
        """All blocks as (first unit, units, owner): owner None = free, (kind, number) otherwise."""
        cdef uint32_t at = 0, size = 0, owner = 0
        blocks = []
        while ems_extents_walk(&self.pool.extents, at, &size, &owner) != EMS_NO_UNIT:
            if owner == EMS_NO_UNIT:
                blocks.append((at, size, None))
            elif owner & EMS_OWNER_RESERVATION:
                blocks.append((at, size, ("reservation", owner & ~<uint32_t>EMS_OWNER_RESERVATION)))
            else:
                blocks.append((at, size, ("slot", owner)))
            at += size
        return blocks

    def reserved_units(self, uint32_t session):
        if session >= EMS_MAX_SESSIONS:
            raise ValueError("no such session")
        return self.pool.reserved_of[session]

    def requests(self, uint32_t session):
        """The requests of a session that still hold reservations."""
        cdef uint32_t i
        cdef const ems_reservation *r
        found = set()
        for i in range(self.pool.nrecords):
            r = &self.pool.reservations[i]
            if r.state != EMS_RES_FREE and r.session == session:
                found.add(r.request)
        return sorted(found)

    def mended(self):
        """What was wrong at the takeover: (intents, entries, overlaps, reservations)."""
        return (self.pool.mended.intents, self.pool.mended.entries, self.pool.mended.overlaps,
                self.pool.mended.reservations)

    # ---- header and sessions ----

    def header(self):
        return header_of(self.pool.prologue, self.pool.header)

    def set_state(self, int state):
        ems_set_release(&self.pool.prologue.state, state)

    def set_server_state(self, int state):
        ems_set_release(&self.pool.header.server_state, state)

    def set_page_kind(self, int kind):
        ems_set(&self.pool.header.page_kind, kind)

    def set_verify(self, bint verify):
        ems_set(&self.pool.header.verify, verify)

    def set_created(self, uint64_t realtime_ns):
        ems_set(&self.pool.header.created_ns, realtime_ns)

    def beat(self, uint64_t now_ns, uint64_t frame_bytes):
        ems_set(&self.pool.header.frame_bytes, frame_bytes)
        ems_set_release(&self.pool.header.heartbeat_ns, now_ns)

    def new_epoch(self, uint64_t pid):
        """A new server owns the pool: the epoch it has from now on."""
        ems_set(&self.pool.header.server_pid, pid)
        ems_set_release(&self.pool.header.epoch, self.pool.header.epoch + 1)
        return self.pool.header.epoch

    def open_session(self, uint32_t session, uint64_t pid, bytes secret_hash, uint64_t now_ns):
        cdef ems_session *s = &self.pool.sessions[session]
        if session == 0 or session >= EMS_MAX_SESSIONS or len(secret_hash) != 16:
            raise ValueError("no such session, or a hash that is not 16 bytes long")
        memcpy(s.secret_hash, PyBytes_AS_STRING(secret_hash), 16)
        ems_set(&s.pid, pid)
        ems_set(&s.opened_ns, now_ns)
        ems_set_release(&s.state, 1)

    def close_session(self, uint32_t session):
        if session == 0 or session >= EMS_MAX_SESSIONS:
            raise ValueError("no such session")
        ems_set_release(&self.pool.sessions[session].state, 0)

    def sessions(self):
        """The ids of all open sessions."""
        cdef uint32_t i, n = EMS_MAX_SESSIONS
        return [i for i in range(1, n) if self.pool.sessions[i].state]

    def session(self, uint32_t session):
        """(pid, secret hash, opened ns) of an open session, or None."""
        cdef ems_session *s
        if session == 0 or session >= EMS_MAX_SESSIONS:
            return None
        s = &self.pool.sessions[session]
        if not s.state:
            return None
        return s.pid, PyBytes_FromStringAndSize(<const char *>s.secret_hash, 16), s.opened_ns
