/* Making a pool, and taking one over from a dead server. */
#include "pool_internal.h"

#include <stdlib.h>
#include <string.h>

void ems_pool_format(uint8_t *index, uint64_t index_bytes, const struct ems_pool_geometry *g,
                     const uint64_t pool_id[2])
{
    struct ems_prologue *pro = (struct ems_prologue *)index;
    struct ems_header *h = (struct ems_header *)(index + EMS_HEADER_OFFSET);
    uint64_t at = EMS_BUCKETS_OFFSET;
    pro->pool_id[0] = pool_id[0];
    pro->pool_id[1] = pool_id[1];
    pro->layout_version = EMS_LAYOUT_VERSION;
    pro->file_kind = EMS_FILE_INDEX;
    pro->file_bytes = index_bytes;
    pro->state = EMS_FORMATTING;
    h->capacity = g->capacity;
    h->data_bytes = g->data_bytes;
    h->nbuckets = g->nbuckets;
    h->buckets_offset = at;
    at += g->nbuckets * sizeof(struct ems_bucket);
    h->nsessions = EMS_MAX_SESSIONS;
    h->sessions_offset = at;
    at += EMS_MAX_SESSIONS * sizeof(struct ems_session);
    h->nreservations = g->nreservations;
    h->reservations_offset = at;
    ems_set_release(&pro->magic, EMS_MAGIC);
}

static int by_first(const void *a, const void *b)
{
    const struct ems_extents_block *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

static int in_data(const struct ems_pool *p, uint64_t offset, uint64_t length)
{
    uint64_t end = EMS_DATA_START + (uint64_t)p->extents.total * EMS_UNIT;
    return length && offset >= EMS_DATA_START && offset % EMS_UNIT == 0 && length <= end &&
           offset <= end - length;
}

/* A slot whose change a dead server left half done, or whose content cannot be true, is emptied. */
static void mend_entries(struct ems_pool *p)
{
    for (uint64_t slot = 0; slot < p->nslots; slot++) {
        struct ems_entry *e = ems_entry_at(p, slot);
        uint64_t tag = *ems_tag_at(p, slot);
        if (e->version == 0 && tag == 0)
            continue;
        int whole = !(e->version & 1) && in_data(p, e->offset, e->length);
        uint64_t candidates[2];
        ems_candidates(e->digest, p->header->nbuckets, candidates);
        uint64_t bucket = slot / EMS_BUCKET_SLOTS;
        if (whole && (bucket == candidates[0] || bucket == candidates[1])) {
            ems_set(ems_tag_at(p, slot), ems_tag(e->digest));
            p->entries++;
        } else if (tag || e->version & 1 || e->length) {
            ems_entry_clear(p, slot);
        }
    }
}

/* Before the entries are counted: an intent names the slot, so it may be written again whatever
 * the slot looks like. A replaced or displaced extent is free simply because no entry names it. */
static void roll_forward(struct ems_pool *p)
{
    for (uint32_t i = 0; i < p->nrecords; i++) {
        struct ems_reservation *r = &p->reservations[i];
        if (r->state == EMS_RES_INTENT && r->slot < p->nslots && in_data(p, r->offset, r->length)) {
            struct ems_entry *e = ems_entry_at(p, r->slot);
            if (e->version & 1 || e->sequence != r->sequence)
                ems_entry_write(p, r->slot, r);
            ems_set_release(&r->state, EMS_RES_FREE);
        } else if (r->state != EMS_RES_FREE &&
                   (r->state != EMS_RES_HELD || !in_data(p, r->offset, r->length) ||
                    r->session >= EMS_MAX_SESSIONS)) {
            ems_set_release(&r->state, EMS_RES_FREE);
        }
    }
}

static int by_request(const void *a, const void *b)
{
    const struct ems_reservation *x = *(struct ems_reservation *const *)a;
    const struct ems_reservation *y = *(struct ems_reservation *const *)b;
    if (x->session != y->session)
        return x->session < y->session ? -1 : 1;
    if (x->request != y->request)
        return x->request < y->request ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

static const char *rebuild_records(struct ems_pool *p)
{
    struct ems_reservation **held = malloc((p->nrecords + 1) * sizeof *held);
    uint32_t n = 0;
    if (!held)
        return "out of memory";
    for (uint32_t i = p->nrecords; i-- > 0;) {
        if (p->reservations[i].state == EMS_RES_FREE)
            p->free_records[p->nfree_records++] = i;
        else
            held[n++] = &p->reservations[i];
    }
    qsort(held, n, sizeof *held, by_request);
    for (uint32_t i = 0; i < n; i++) {
        int peer = i > 0 && held[i]->session == held[i - 1]->session &&
                   held[i]->request == held[i - 1]->request;
        uint32_t before = peer ? (uint32_t)(held[i - 1] - p->reservations) : EMS_NONE;
        ems_link_record(p, (uint32_t)(held[i] - p->reservations), before);
    }
    free(held);
    return NULL;
}

static const char *rebuild_extents(struct ems_pool *p)
{
    uint64_t count = p->entries + (p->nrecords - p->nfree_records), n = 0;
    struct ems_extents_block *blocks = malloc((count + 1) * sizeof *blocks);
    if (!blocks)
        return "out of memory";
    for (uint64_t slot = 0; slot < p->nslots; slot++)
        if (*ems_tag_at(p, slot)) {
            const struct ems_entry *e = ems_entry_at(p, slot);
            blocks[n++] = (struct ems_extents_block){ems_unit_at(e->offset), ems_units_of(e->length), (uint32_t)slot};
        }
    for (uint32_t i = 0; i < p->nrecords; i++)
        if (p->reservations[i].state != EMS_RES_FREE) {
            const struct ems_reservation *r = &p->reservations[i];
            blocks[n++] = (struct ems_extents_block){ems_unit_at(r->offset), ems_units_of(r->length),
                                                     i | EMS_OWNER_RESERVATION};
        }
    qsort(blocks, n, sizeof *blocks, by_first);
    uint32_t ready = (uint32_t)(ems_get(&p->header->ready_bytes) / EMS_UNIT);
    int bad = ems_extents_rebuild(&p->extents, blocks, n, ready);
    free(blocks);
    return bad ? "two blocks of the pool overlap" : NULL;
}

static uint32_t *new_chains(uint32_t n)
{
    uint32_t *heads = malloc((uint64_t)n * sizeof *heads);
    if (heads)
        memset(heads, 0xff, (uint64_t)n * sizeof *heads); /* EMS_NONE */
    return heads;
}

const char *ems_pool_open(struct ems_pool *p, uint8_t *index, uint64_t index_bytes, uint64_t *recency)
{
    memset(p, 0, sizeof *p);
    const char *wrong = ems_reader_open(&p->reader, index, index_bytes, recency);
    if (wrong)
        return wrong;
    struct ems_header *h = (struct ems_header *)(index + EMS_HEADER_OFFSET);
    uint64_t after_buckets = EMS_BUCKETS_OFFSET + h->nbuckets * sizeof(struct ems_bucket);
    uint64_t after_sessions = after_buckets + EMS_MAX_SESSIONS * sizeof(struct ems_session);
    if (h->sessions_offset != after_buckets || h->nsessions != EMS_MAX_SESSIONS ||
        h->reservations_offset != after_sessions || after_sessions > index_bytes ||
        h->nreservations > (index_bytes - after_sessions) / sizeof(struct ems_reservation) ||
        h->nreservations > EMS_OWNER_RESERVATION - 2 || h->nbuckets * EMS_BUCKET_SLOTS >= EMS_OWNER_RESERVATION ||
        h->capacity > h->data_bytes || h->data_bytes - h->capacity < EMS_DATA_START ||
        h->capacity / EMS_UNIT >= EMS_OWNER_RESERVATION || h->ready_bytes > h->capacity)
        return "the header of the index contradicts itself";
    p->header = h;
    p->prologue = (struct ems_prologue *)index;
    p->buckets = (struct ems_bucket *)(index + h->buckets_offset);
    p->sessions = (struct ems_session *)(index + h->sessions_offset);
    p->reservations = (struct ems_reservation *)(index + h->reservations_offset);
    p->recency = recency;
    p->nslots = h->nbuckets * EMS_BUCKET_SLOTS;
    p->nrecords = (uint32_t)h->nreservations;
    uint32_t chains = 1;
    while (chains < p->nrecords)
        chains *= 2;
    p->chain_mask = chains - 1;
    p->links = malloc((p->nrecords + 1ull) * sizeof *p->links);
    p->free_records = malloc((p->nrecords + 1ull) * sizeof *p->free_records);
    p->busy_heads = new_chains(chains);
    p->request_heads = new_chains(chains);
    if (ems_extents_init(&p->extents, (uint32_t)(h->capacity / EMS_UNIT)) || !p->links ||
        !p->free_records || !p->busy_heads || !p->request_heads)
        wrong = "out of memory";
    if (!wrong) {
        roll_forward(p);
        mend_entries(p);
        wrong = rebuild_records(p);
    }
    if (!wrong)
        wrong = rebuild_extents(p);
    if (wrong)
        ems_pool_close(p);
    return wrong;
}

void ems_pool_close(struct ems_pool *p)
{
    ems_extents_destroy(&p->extents);
    free(p->links);
    free(p->free_records);
    free(p->busy_heads);
    free(p->request_heads);
    p->links = NULL;
    p->free_records = p->busy_heads = p->request_heads = NULL;
}
