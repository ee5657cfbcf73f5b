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

static int is_reservation(const struct ems_extents_block *b)
{
    return (b->owner & EMS_OWNER_RESERVATION) != 0;
}

static int by_first(const void *a, const void *b)
{
    const struct ems_extents_block *x = a, *y = b;
    if (x->first != y->first)
        return x->first < y->first ? -1 : 1;
    return x->owner < y->owner ? -1 : x->owner > y->owner;
}

static int in_data(const struct ems_pool *p, uint64_t offset, uint64_t length)
{
    uint64_t end = EMS_DATA_START + (uint64_t)p->extents.total * EMS_UNIT;
    return length && offset >= EMS_DATA_START && offset % EMS_UNIT == 0 && length <= end &&
           offset <= end - length;
}

/* Before the entries are looked at: an intent names the slot, so it may be written again whatever
 * the slot looks like. A replaced or displaced extent is free simply because no entry names it. */
static void roll_forward(struct ems_pool *p)
{
    for (uint32_t i = 0; i < p->nrecords; i++) {
        struct ems_reservation *r = &p->reservations[i];
        if (r->state == EMS_RES_FREE)
            continue;
        int sound = in_data(p, r->offset, r->length) && r->session && r->session < EMS_MAX_SESSIONS;
        if (sound && r->state == EMS_RES_HELD)
            continue;
        if (sound && r->state == EMS_RES_INTENT && r->slot < p->nslots) {
            struct ems_entry *e = ems_entry_at(p, r->slot);
            if (e->version & 1 || e->sequence != r->sequence)
                ems_entry_write(p, r->slot, r);
            else
                ems_set_release(ems_tag_at(p, r->slot), ems_tag(r->digest));
            p->mended.intents++;
        } else {
            p->mended.reservations++;
        }
        ems_set_release(&r->state, EMS_RES_FREE);
    }
}

/* A slot whose change a dead server left half done, or whose content cannot be true, is emptied.
 * Its tag is never written anew: a key could then be there twice, with two values. */
static void mend_entries(struct ems_pool *p)
{
    for (uint64_t slot = 0; slot < p->nslots; slot++) {
        const struct ems_entry *e = ems_entry_at(p, slot);
        uint64_t tag = *ems_tag_at(p, slot), candidates[2], bucket = slot / EMS_BUCKET_SLOTS;
        p->unit_of[slot] = EMS_NONE;
        if (e->version == 0 && tag == 0 && e->length == 0)
            continue;
        ems_candidates(e->digest, p->nbuckets, candidates);
        if (!(e->version & 1) && in_data(p, e->offset, e->length) && tag == ems_tag(e->digest) &&
            (bucket == candidates[0] || bucket == candidates[1])) {
            p->unit_of[slot] = ems_unit_at(e->offset);
            p->entries++;
            if (e->sequence > p->sequence)
                p->sequence = e->sequence;
        } else if (tag || e->version & 1 || e->length) {
            ems_entry_clear(p, slot);
            p->mended.entries++;
        }
    }
}

static void drop_block(struct ems_pool *p, const struct ems_extents_block *b)
{
    if (is_reservation(b)) {
        ems_set_release(&p->reservations[b->owner & ~EMS_OWNER_RESERVATION].state, EMS_RES_FREE);
        p->mended.reservations++;
    } else {
        ems_entry_clear(p, b->owner);
        p->unit_of[b->owner] = EMS_NONE;
        p->entries--;
        p->mended.overlaps++;
    }
}

/* Of two blocks that claim the same memory a reservation stays, because somebody may write there;
 * of two entries neither can be trusted. `blocks` are sorted; returns how many are left. */
static uint64_t drop_overlaps(struct ems_pool *p, struct ems_extents_block *blocks, uint64_t n,
                              uint32_t ready)
{
    uint64_t kept = 0;
    for (uint64_t i = 0; i < n; i++) {
        struct ems_extents_block b = blocks[i];
        int stays = b.first < ready && b.n <= ready - b.first;
        if (!stays)
            drop_block(p, &b);
        while (stays && kept && blocks[kept - 1].first + blocks[kept - 1].n > b.first) {
            if (is_reservation(&blocks[kept - 1])) {
                stays = 0;
                drop_block(p, &b);
            } else {
                stays = is_reservation(&b);
                if (!stays)
                    drop_block(p, &b);
                drop_block(p, &blocks[--kept]);
            }
        }
        if (stays)
            blocks[kept++] = b;
    }
    return kept;
}

static const char *rebuild_extents(struct ems_pool *p, uint32_t ready)
{
    struct ems_extents_block *blocks = malloc((p->entries + p->nrecords + 1) * sizeof *blocks);
    uint64_t n = 0;
    if (!blocks)
        return "out of memory";
    for (uint64_t slot = 0; slot < p->nslots; slot++)
        if (p->unit_of[slot] != EMS_NONE)
            blocks[n++] = (struct ems_extents_block){
                p->unit_of[slot], ems_units_of(ems_entry_at(p, slot)->length), (uint32_t)slot};
    for (uint32_t i = 0; i < p->nrecords; i++)
        if (p->reservations[i].state != EMS_RES_FREE) {
            const struct ems_reservation *r = &p->reservations[i];
            blocks[n++] = (struct ems_extents_block){ems_unit_at(r->offset), ems_units_of(r->length),
                                                     i | EMS_OWNER_RESERVATION};
        }
    qsort(blocks, n, sizeof *blocks, by_first);
    n = drop_overlaps(p, blocks, n, ready);
    int bad = ems_extents_rebuild(&p->extents, blocks, n, ready);
    free(blocks);
    return bad ? "two blocks of the pool overlap" : NULL;
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
    memcpy(p->records, p->reservations, p->nrecords * sizeof *p->records);
    for (uint32_t i = p->nrecords; i-- > 0;) {
        if (p->records[i].state == EMS_RES_FREE)
            p->free_records[p->nfree_records++] = i;
        else
            held[n++] = &p->records[i];
    }
    qsort(held, n, sizeof *held, by_request);
    for (uint32_t i = 0; i < n; i++) {
        int peer = i > 0 && held[i]->session == held[i - 1]->session &&
                   held[i]->request == held[i - 1]->request;
        uint32_t before = peer ? (uint32_t)(held[i - 1] - p->records) : EMS_NONE;
        ems_link_record(p, (uint32_t)(held[i] - p->records), before);
    }
    free(held);
    return NULL;
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
    uint64_t ready_bytes = ems_get(&h->ready_bytes);
    uint64_t after_buckets = EMS_BUCKETS_OFFSET + p->reader.nbuckets * sizeof(struct ems_bucket);
    uint64_t after_sessions = after_buckets + EMS_MAX_SESSIONS * sizeof(struct ems_session);
    if (h->sessions_offset != after_buckets || h->nsessions != EMS_MAX_SESSIONS ||
        h->reservations_offset != after_sessions || after_sessions > index_bytes ||
        h->nreservations > (index_bytes - after_sessions) / sizeof(struct ems_reservation) ||
        h->nreservations > EMS_OWNER_RESERVATION - 2 || p->reader.nbuckets * EMS_BUCKET_SLOTS >= EMS_OWNER_RESERVATION ||
        h->capacity > h->data_bytes || h->data_bytes - h->capacity < EMS_DATA_START ||
        h->capacity / EMS_UNIT >= EMS_OWNER_RESERVATION || ready_bytes > h->capacity)
        return "the header of the index contradicts itself";
    p->header = h;
    p->prologue = (struct ems_prologue *)index;
    p->buckets = (struct ems_bucket *)(index + h->buckets_offset);
    p->sessions = (struct ems_session *)(index + h->sessions_offset);
    p->reservations = (struct ems_reservation *)(index + h->reservations_offset);
    p->recency = recency;
    p->nbuckets = p->reader.nbuckets;
    p->nslots = p->nbuckets * EMS_BUCKET_SLOTS;
    p->sequence = h->sequence;
    p->nrecords = (uint32_t)h->nreservations;
    uint32_t chains = 1;
    while (chains < p->nrecords)
        chains *= 2;
    p->chain_mask = chains - 1;
    p->links = malloc((p->nrecords + 1ull) * sizeof *p->links);
    p->records = malloc((p->nrecords + 1ull) * sizeof *p->records);
    p->free_records = malloc((p->nrecords + 1ull) * sizeof *p->free_records);
    p->unit_of = malloc((p->nslots + 1ull) * sizeof *p->unit_of);
    p->busy_heads = new_chains(chains);
    p->request_heads = new_chains(chains);
    if (ems_extents_init(&p->extents, (uint32_t)(h->capacity / EMS_UNIT)) ||
        ems_history_init(&p->history, p->nbuckets) || !p->links || !p->records ||
        !p->free_records || !p->unit_of || !p->busy_heads || !p->request_heads)
        wrong = "out of memory";
    if (!wrong) {
        roll_forward(p);
        mend_entries(p);
        wrong = rebuild_extents(p, (uint32_t)(ready_bytes / EMS_UNIT));
    }
    if (!wrong)
        wrong = rebuild_records(p);
    for (uint64_t slot = 0; !wrong && slot < p->nslots; slot++)
        if (p->unit_of[slot] != EMS_NONE)
            p->history.seen[slot] = ems_get(&recency[slot]);
    if (wrong)
        ems_pool_close(p);
    else
        ems_set(&p->prologue->layout_version, EMS_LAYOUT_VERSION);
    return wrong;
}

void ems_pool_close(struct ems_pool *p)
{
    ems_extents_destroy(&p->extents);
    ems_history_destroy(&p->history);
    free(p->pasts);
    p->pasts = NULL;
    p->npasts = 0;
    free(p->links);
    free(p->records);
    free(p->free_records);
    free(p->unit_of);
    free(p->busy_heads);
    free(p->request_heads);
    p->links = NULL;
    p->records = NULL;
    p->free_records = p->unit_of = p->busy_heads = p->request_heads = NULL;
}
