#include "index.h"

#include <string.h>

#define ATTEMPTS 3

static int active(const struct ems_reader *r)
{
    const struct ems_prologue *p = (const struct ems_prologue *)r->index;
    return ems_get_acquire(&p->state) == EMS_ACTIVE;
}

const char *ems_reader_open(struct ems_reader *r, const uint8_t *index, uint64_t index_bytes,
                            uint64_t *recency)
{
    const struct ems_prologue *p = (const struct ems_prologue *)index;
    const struct ems_header *h = (const struct ems_header *)(index + EMS_HEADER_OFFSET);
    if (index_bytes < EMS_BUCKETS_OFFSET)
        return "the index is too short";
    if (ems_get_acquire(&p->magic) != EMS_MAGIC || ems_get(&p->file_kind) != EMS_FILE_INDEX)
        return "the file is not the index of a pool";
    if (ems_layout_major(ems_get(&p->layout_version)) != ems_layout_major(EMS_LAYOUT_VERSION))
        return "the pool has another layout version";
    uint64_t nbuckets = ems_get(&h->nbuckets), at = ems_get(&h->buckets_offset);
    if (at != EMS_BUCKETS_OFFSET || nbuckets < 2 ||
        nbuckets > (index_bytes - at) / sizeof(struct ems_bucket))
        return "the index says more buckets than it has";
    r->index = index;
    r->header = h;
    r->buckets = (const struct ems_bucket *)(index + at);
    r->nbuckets = nbuckets;
    r->data_bytes = ems_get(&h->data_bytes);
    r->recency = recency;
    return NULL;
}

/* One attempt to read a stable copy of the entry. EMS_HIT, ABSENT (not this key) or CHANGING. */
static int read_entry(const struct ems_entry *e, const uint64_t digest[2], struct ems_place *out)
{
    uint64_t version = ems_get_acquire(&e->version);
    if (version & 1)
        return EMS_MISS_CHANGING;
    uint64_t lo = ems_get(&e->digest[0]), hi = ems_get(&e->digest[1]);
    out->offset = ems_get(&e->offset);
    out->length = ems_get(&e->length);
    out->checksum = ems_get(&e->checksum);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (ems_get(&e->version) != version)
        return EMS_MISS_CHANGING;
    out->version = version;
    return lo == digest[0] && hi == digest[1] && out->length ? EMS_HIT : EMS_MISS_ABSENT;
}

static int find(const struct ems_reader *r, const uint64_t digest[2], struct ems_place *out)
{
    uint64_t tag = ems_tag(digest), candidates[2];
    int changing = 0;
    ems_candidates(digest, r->nbuckets, candidates);
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        changing = 0;
        for (int c = 0; c < 2; c++) {
            const struct ems_bucket *b = &r->buckets[candidates[c]];
            for (unsigned i = 0; i < EMS_BUCKET_SLOTS; i++) {
                if (ems_get(&b->tag[i]) != tag)
                    continue;
                int got = read_entry(&b->entry[i], digest, out);
                if (got == EMS_HIT) {
                    out->slot = candidates[c] * EMS_BUCKET_SLOTS + i;
                    return EMS_HIT;
                }
                changing |= got == EMS_MISS_CHANGING;
            }
        }
        if (!changing)
            return EMS_MISS_ABSENT;
    }
    return EMS_MISS_CHANGING;
}

static void touch(const struct ems_reader *r, uint64_t slot, uint64_t tick)
{
    uint64_t *word = &r->recency[slot], old = ems_get(word);
    if (ems_mark_is_young(old, tick))
        return;
    uint64_t uses = old & 0xffff;
    ems_set(word, ems_mark(tick, uses < 0xffff ? uses + 1 : uses));
}

static void prefetch(const struct ems_reader *r, const uint8_t *digest)
{
    uint64_t d[2], candidates[2];
    memcpy(d, digest, 16);
    ems_candidates(d, r->nbuckets, candidates);
    __builtin_prefetch(&r->buckets[candidates[0]]);
    __builtin_prefetch(&r->buckets[candidates[1]]);
}

uint64_t ems_lookup(const struct ems_reader *r, const uint8_t *digests, const uint64_t *lengths,
                    uint64_t first, uint64_t count, struct ems_place *places, uint64_t now_ns,
                    int *why)
{
    uint64_t tick = ems_tick(now_ns), ahead = first, end = first + count;
    *why = EMS_HIT;
    if (!active(r)) {
        *why = EMS_MISS_RETIRED;
        return 0;
    }
    for (uint64_t k = first; k < end; k++) {
        uint64_t digest[2];
        struct ems_place scratch, *out = places ? &places[k] : &scratch;
        for (; ahead < end && ahead < k + 8; ahead++)
            prefetch(r, digests + 16 * ahead);
        memcpy(digest, digests + 16 * k, 16);
        *why = find(r, digest, out);
        if (*why == EMS_HIT) {
            /* Never trust an offset further than the mapping reaches. */
            if (out->offset < EMS_DATA_START || out->offset % EMS_UNIT ||
                out->length > r->data_bytes || out->offset > r->data_bytes - out->length)
                *why = EMS_MISS_CHANGING;
            else if (lengths && out->length != lengths[k])
                *why = EMS_MISS_LENGTH;
        }
        if (*why != EMS_HIT)
            return k - first;
        if (now_ns && r->recency)
            touch(r, out->slot, tick - k);
    }
    return count;
}

uint64_t ems_validate(const struct ems_reader *r, const struct ems_place *places, uint64_t first,
                      uint64_t count)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!active(r))
        return 0;
    for (uint64_t k = first; k < first + count; k++) {
        uint64_t slot = places[k].slot;
        const struct ems_entry *e =
            &r->buckets[slot / EMS_BUCKET_SLOTS].entry[slot % EMS_BUCKET_SLOTS];
        if (ems_get(&e->version) != places[k].version)
            return k - first;
    }
    return count;
}
