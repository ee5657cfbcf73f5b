/* The on-memory format of a pool: the one place that defines it.
 *
 * `index` is written by the node server alone and mapped read-only by clients. Every shared field
 * is a 64-bit word that is only touched through the atomics below: a 16-byte atomic load would
 * fault on a read-only page, and a compiler may tear or invent plain accesses.
 *
 *   prologue | header | buckets (tags, 8 entries) ... | sessions ... | reservations ...
 */
#ifndef EMS_LAYOUT_H
#define EMS_LAYOUT_H

#include <stdint.h>

#define EMS_ABI_VERSION 1u    /* write channel frames + everything in this file */
/* What a pool was written with: major version below, minor version in the upper half. A minor
 * version gives a meaning to words that were unused; a server that does not know it leaves them as
 * they are, so whoever knows them must be able to tell, by the version that the last server left,
 * that they are stale. Anything else is another major version, which nobody reads. */
#define EMS_LAYOUT_VERSION 1ull
static inline uint64_t ems_layout_major(uint64_t version) { return version & 0xffffffffull; }

#define EMS_MAGIC 0x314c4f4f50534d45ull /* "EMSPOOL1" */

#define EMS_UNIT 4096ull             /* extents are granted in these */
#define EMS_DATA_START (2ull << 20)  /* the prologue's huge page; extents begin behind it */
#define EMS_BUCKET_SLOTS 8u
#define EMS_MAX_SESSIONS 1024u
#define EMS_COUNTERS_PAGE 4096u

/* Of the pool, in the prologue: readers use it only while ACTIVE, with or without a server. */
enum ems_state { EMS_FORMATTING = 1, EMS_ACTIVE = 2, EMS_RETIRED = 3 };
enum ems_server_state { EMS_STOPPED = 0, EMS_STARTING = 1, EMS_SERVING = 2, EMS_DRAINING = 3 };
enum ems_page_kind { EMS_PAGE_UNKNOWN = 0, EMS_PAGE_4K = 1, EMS_PAGE_HUGE = 2, EMS_PAGE_HUGETLB = 3, EMS_PAGE_MIXED = 4 };
enum ems_file { EMS_FILE_INDEX = 1, EMS_FILE_RECENCY = 2, EMS_FILE_COUNTERS = 3, EMS_FILE_DATA = 4 };

/* Eternal: the first 64 bytes of every file, readable by every version of EMS. */
struct ems_prologue {
    uint64_t magic;
    uint64_t pool_id[2];
    uint64_t layout_version;
    uint64_t state;
    uint64_t file_kind;
    uint64_t file_bytes;
    uint64_t unused;
};

struct ems_header {
    uint64_t epoch;        /* counts the servers that ever owned this pool */
    uint64_t heartbeat_ns; /* CLOCK_MONOTONIC, every 100 ms from the server's loop */
    uint64_t server_pid;
    uint64_t capacity;
    uint64_t data_bytes;
    uint64_t nbuckets;
    uint64_t buckets_offset;
    uint64_t nsessions;
    uint64_t sessions_offset;
    uint64_t nreservations;
    uint64_t reservations_offset;
    uint64_t sequence;    /* last commit */
    uint64_t ready_bytes; /* prefix of `data` behind EMS_DATA_START that may be granted */
    uint64_t page_kind;   /* enum ems_page_kind, for people */
    uint64_t evictions;
    uint64_t created_ns; /* CLOCK_REALTIME */
    uint64_t verify;     /* default of clients: verify checksums on load */
    uint64_t server_state; /* enum ems_server_state; readers do not care */
    uint64_t frame_bytes;  /* that a client should reserve by one message; 0 = not said */
    uint64_t unused[5];
};

/* One cache line. `version` is odd while the server changes the entry and is never reused for
 * other content, over evictions, overwrites and restarts. */
struct ems_entry {
    uint64_t version;
    uint64_t digest[2];
    uint64_t offset; /* in `data` */
    uint64_t length;
    uint64_t checksum;
    uint64_t predecessor; /* block before it in its chain: slot + 1, 32 bits of its sequence; 0 = unknown */
    uint64_t sequence;
};

struct ems_bucket {
    uint64_t tag[EMS_BUCKET_SLOTS]; /* 0 = empty slot */
    struct ems_entry entry[EMS_BUCKET_SLOTS];
};

struct ems_session {
    uint64_t state; /* 0 = free, 1 = open */
    uint64_t pid;
    uint64_t secret_hash[2];
    uint64_t opened_ns;
    uint64_t unused[3];
};

enum ems_reservation_state { EMS_RES_FREE = 0, EMS_RES_HELD = 1, EMS_RES_INTENT = 2 };

/* Who may write which extent. HELD -> (commit) INTENT -> entry published -> FREE. Recovery rolls
 * an INTENT forward, so that a commit happens entirely or not at all. */
struct ems_reservation {
    uint64_t state;
    uint64_t session;
    uint64_t request;
    uint64_t position; /* of the key in its request */
    uint64_t digest[2];
    uint64_t offset;
    uint64_t length;
    uint64_t replace;
    uint64_t slot; /* intent: where the entry goes */
    uint64_t checksum;
    uint64_t predecessor;
    uint64_t sequence;
    uint64_t unused[3];
};

_Static_assert(sizeof(struct ems_prologue) == 64, "prologue is 64 bytes");
_Static_assert(sizeof(struct ems_header) == 192, "header is 192 bytes");
_Static_assert(sizeof(struct ems_entry) == 64, "an entry is one cache line");
_Static_assert(sizeof(struct ems_bucket) == 576, "a bucket is nine cache lines");
_Static_assert(sizeof(struct ems_session) == 64, "a session record is one cache line");
_Static_assert(sizeof(struct ems_reservation) == 128, "a reservation is two cache lines");

#define EMS_HEADER_OFFSET 64u
#define EMS_BUCKETS_OFFSET 4096u
#define EMS_RECENCY_OFFSET 4096u /* in `recency`: one word per slot behind the prologue */

static inline uint64_t ems_get(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint64_t ems_get_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void ems_set(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void ems_set_release(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

/* Recency word: 48 bits of tick (4.096 us of CLOCK_MONOTONIC: it wraps when a machine has been up for
 * 36 years), 16 bits of use count. */
#define EMS_TICK_SHIFT 12
#define EMS_RECENT_TICKS 2441u /* about 10 ms: younger words are left alone */
/* 400 ms: a server looks at its clock every 100 ms and when it is asked something, and no reader is
 * further ahead of it. A word that is, is nonsense. */
#define EMS_AHEAD_TICKS 97656u

static inline uint64_t ems_tick(uint64_t ns) { return ns >> EMS_TICK_SHIFT; }
static inline uint64_t ems_mark(uint64_t tick, uint64_t uses) { return (tick << 16) | (uses & 0xffff); }
/* The word with as many uses more as another word counts. */
static inline uint64_t ems_mark_used(uint64_t word, uint64_t more)
{
    uint64_t uses = (word & 0xffff) + (more & 0xffff);
    return (word & ~0xffffull) | (uses < 0xffff ? uses : 0xffff);
}
static inline uint64_t ems_mark_tick(uint64_t word) { return word >> 16; }
/* Whether a use at `tick` is the one that the word tells of. A mark a little newer is another reader's;
 * one from far ahead is nonsense. */
static inline int ems_mark_is_young(uint64_t word, uint64_t tick)
{
    int64_t age = (int64_t)(tick - ems_mark_tick(word));
    return age < EMS_RECENT_TICKS && age > -(int64_t)EMS_AHEAD_TICKS;
}

/* Where a digest may live. The digest is uniformly random (keyed BLAKE2b), so its words are used
 * as they are; the two candidate buckets are always different. */
static inline uint64_t ems_tag(const uint64_t digest[2])
{
    uint64_t tag = digest[0] ^ (digest[1] << 1);
    return tag ? tag : 1;
}

static inline void ems_candidates(const uint64_t digest[2], uint64_t nbuckets, uint64_t out[2])
{
    out[0] = (uint64_t)(((unsigned __int128)digest[0] * nbuckets) >> 64);
    out[1] = (uint64_t)(((unsigned __int128)digest[1] * nbuckets) >> 64);
    if (out[1] == out[0])
        out[1] = out[0] + 1 == nbuckets ? 0 : out[0] + 1;
}

#endif
