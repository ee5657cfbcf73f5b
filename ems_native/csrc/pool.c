#include "pool_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EMS_SHARE 7ull
#define ORPHAN_STEPS 8

/* ---- entries ------------------------------------------------------------------------------- */

/* Opens the entry for change: odd version, then a release fence, so that a reader that sees one
 * of the new fields also sees that the version moved. Returns the even version to close with. */
static uint64_t entry_begin(struct ems_entry *e)
{
    uint64_t version = ems_get(&e->version) | 1; /* already odd after a crash in between */
    ems_set(&e->version, version);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    return version + 1;
}

void ems_entry_write(struct ems_pool *p, uint64_t slot, const struct ems_reservation *r)
{
    struct ems_entry *e = ems_entry_at(p, slot);
    uint64_t closed = entry_begin(e);
    ems_set(&e->digest[0], r->digest[0]);
    ems_set(&e->digest[1], r->digest[1]);
    ems_set(&e->offset, r->offset);
    ems_set(&e->length, r->length);
    ems_set(&e->checksum, r->checksum);
    ems_set(&e->predecessor, r->predecessor);
    ems_set(&e->sequence, r->sequence);
    ems_set_release(&e->version, closed);
    ems_set_release(ems_tag_at(p, slot), ems_tag(r->digest));
}

void ems_entry_clear(struct ems_pool *p, uint64_t slot)
{
    struct ems_entry *e = ems_entry_at(p, slot);
    ems_set(ems_tag_at(p, slot), 0);
    uint64_t closed = entry_begin(e);
    ems_set(&e->digest[0], 0);
    ems_set(&e->digest[1], 0);
    ems_set(&e->offset, 0);
    ems_set(&e->length, 0);
    ems_set_release(&e->version, closed);
}

/* Whether an entry still says what was written there: this code alone writes it, so anything else
 * is a wild write. */
static int is_true(const struct ems_pool *p, uint64_t slot)
{
    const struct ems_entry *e = ems_entry_at(p, slot);
    uint32_t unit = p->unit_of[slot];
    return unit != EMS_NONE && !(e->version & 1) && e->offset == ems_offset_of(unit) && e->length &&
           ems_units_of(e->length) == ems_extents_size(&p->extents, unit);
}

/* The slot of a key; one that was spoilt is emptied, so that the key can be saved again. */
static uint64_t find_slot(struct ems_pool *p, const uint64_t digest[2])
{
    uint64_t tag = ems_tag(digest), candidates[2];
    ems_candidates(digest, p->nbuckets, candidates);
    for (int c = 0; c < 2; c++)
        for (unsigned i = 0; i < EMS_BUCKET_SLOTS; i++) {
            const struct ems_bucket *b = &p->buckets[candidates[c]];
            uint64_t slot = candidates[c] * EMS_BUCKET_SLOTS + i;
            if (b->tag[i] != tag || b->entry[i].digest[0] != digest[0] ||
                b->entry[i].digest[1] != digest[1])
                continue;
            if (is_true(p, slot))
                return slot;
            ems_pool_withdraw(p, slot);
        }
    return UINT64_MAX;
}

/* Whether a block before it in its chain is known to be gone, so that nobody finds this one. */
static int is_orphan(const struct ems_pool *p, uint64_t slot)
{
    for (unsigned steps = 0; steps < ORPHAN_STEPS; steps++) {
        uint64_t link = ems_entry_at(p, slot)->predecessor, before = (uint32_t)link - 1ull;
        if (!link || before >= p->nslots)
            return 0;
        if (p->unit_of[before] == EMS_NONE || (uint32_t)ems_entry_at(p, before)->sequence != link >> 32)
            return 1;
        slot = before;
    }
    return 0;
}

/* Where a new key goes: a free slot of the emptier candidate, else that of the worst of the sixteen:
 * first one that nobody can find any more, then by what the last list of victims went by. In a pool
 * with a slot a block nearly every save ends here, and each victim leaves a hole in its chain. */
static uint64_t choose_slot(const struct ems_pool *p, const uint64_t digest[2])
{
    uint64_t candidates[2], worst = 0, worst_mark = 0, empty = 0;
    float worst_value = INFINITY;
    unsigned most_empty = 0;
    ems_candidates(digest, p->nbuckets, candidates);
    for (int c = 0; c < 2; c++) {
        uint64_t an_empty = 0;
        unsigned nempty = 0;
        for (unsigned i = 0; i < EMS_BUCKET_SLOTS; i++) {
            uint64_t slot = candidates[c] * EMS_BUCKET_SLOTS + i;
            if (p->unit_of[slot] == EMS_NONE && nempty++ == 0)
                an_empty = slot;
        }
        if (nempty > most_empty) {
            most_empty = nempty;
            empty = an_empty;
        }
    }
    if (most_empty)
        return empty;
    for (unsigned i = 0; i < 2 * EMS_BUCKET_SLOTS; i++) {
        uint64_t slot = candidates[i / EMS_BUCKET_SLOTS] * EMS_BUCKET_SLOTS + i % EMS_BUCKET_SLOTS;
        uint64_t mark = ems_get(&p->recency[slot]);
        float value = is_orphan(p, slot) ? -1 : p->by_value ? ems_history_value(&p->history, slot, mark) : 0;
        if (value < worst_value || (value == worst_value && mark < worst_mark)) {
            worst = slot;
            worst_value = value;
            worst_mark = mark;
        }
    }
    return worst;
}

static void release_extent(struct ems_pool *p, uint32_t unit)
{
    ems_extents_release(&p->extents, unit, ems_extents_size(&p->extents, unit));
}

void ems_pool_withdraw(struct ems_pool *p, uint64_t slot)
{
    uint32_t unit = p->unit_of[slot];
    if (unit != EMS_NONE)
        ems_history_leave(&p->history, slot, ems_entry_at(p, slot)->digest, ems_get(&p->recency[slot]));
    ems_entry_clear(p, slot);
    if (unit == EMS_NONE)
        return;
    p->unit_of[slot] = EMS_NONE;
    release_extent(p, unit);
    p->entries--;
}

uint32_t ems_pool_units(const struct ems_pool *p, uint64_t slot)
{
    uint32_t unit = p->unit_of[slot];
    return unit == EMS_NONE ? 0 : ems_extents_size(&p->extents, unit);
}

/* ---- reservation records ------------------------------------------------------------------- */

static uint32_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = (a + 0x9e3779b97f4a7c15ull * (b + 1));
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
    return (uint32_t)(x >> 32);
}

static uint32_t *busy_chain(struct ems_pool *p, const uint64_t digest[2])
{
    return &p->busy_heads[(uint32_t)digest[0] & p->chain_mask];
}

static uint32_t *request_chain(struct ems_pool *p, uint64_t session, uint64_t request)
{
    return &p->request_heads[mix(request, session) & p->chain_mask];
}

static int is_busy(struct ems_pool *p, const uint64_t digest[2])
{
    for (uint32_t i = *busy_chain(p, digest); i != EMS_NONE; i = p->links[i].busy_next)
        if (p->records[i].digest[0] == digest[0] && p->records[i].digest[1] == digest[1])
            return 1;
    return 0;
}

static void enter_busy(struct ems_pool *p, uint32_t i)
{
    uint32_t *busy = busy_chain(p, p->records[i].digest);
    p->links[i].busy_next = *busy;
    *busy = i;
}

static void leave_busy(struct ems_pool *p, uint32_t i)
{
    uint32_t *at = busy_chain(p, p->records[i].digest);
    while (*at != i)
        at = &p->links[*at].busy_next;
    *at = p->links[i].busy_next;
}

void ems_link_record(struct ems_pool *p, uint32_t i, uint32_t after)
{
    struct ems_reservation *r = &p->records[i];
    enter_busy(p, i);
    p->links[i].peer_next = EMS_NONE;
    p->links[i].request_next = EMS_NONE;
    p->links[i].follower = 0;
    if (after != EMS_NONE) {
        p->links[after].peer_next = i;
    } else {
        uint32_t *chain = request_chain(p, r->session, r->request);
        p->links[i].request_next = *chain;
        *chain = i;
    }
    uint32_t units = ems_units_of(r->length);
    p->reserved_units += units;
    p->reserved_of[r->session] += units;
    p->records_of[r->session]++;
}

/* Everything but the extent: the caller has published or released it. */
static void forget_record(struct ems_pool *p, uint32_t i)
{
    struct ems_reservation *r = &p->records[i];
    leave_busy(p, i);
    uint32_t units = ems_units_of(r->length);
    p->reserved_units -= units;
    p->reserved_of[r->session] -= units;
    p->records_of[r->session]--;
    r->state = EMS_RES_FREE;
    ems_set_release(&p->reservations[i].state, EMS_RES_FREE);
    p->free_records[p->nfree_records++] = i;
}

static uint32_t *find_request(struct ems_pool *p, uint32_t session, uint64_t request)
{
    uint32_t *at = request_chain(p, session, request);
    while (*at != EMS_NONE && (p->records[*at].session != session ||
                               p->records[*at].request != request))
        at = &p->links[*at].request_next;
    return at;
}

static uint32_t last_of_request(struct ems_pool *p, uint32_t session, uint64_t request)
{
    uint32_t i = *find_request(p, session, request), last = i;
    for (; i != EMS_NONE; i = p->links[i].peer_next)
        last = i;
    return last;
}

/* ---- reserve, commit, abort ---------------------------------------------------------------- */

/* One session may hold seven times what would be left for all others: alone seven eighths, and
 * however many take all they can get, there is something left for the next. One value always goes. */
static int is_over_share(const struct ems_pool *p, uint32_t session, uint32_t units)
{
    uint64_t held = p->reserved_of[session];
    uint64_t left = (uint64_t)p->extents.ready - p->reserved_units;
    return held && (left < units || held + units > EMS_SHARE * (left - units) ||
                    p->records_of[session] + 1ull > EMS_SHARE * (p->nfree_records - 1ull));
}

/* The private record first, then the shared one, whose state is written last. */
static void write_record(struct ems_pool *p, uint32_t i, const struct ems_reservation *r)
{
    const uint64_t *from = (const uint64_t *)r;
    uint64_t *to = (uint64_t *)&p->reservations[i];
    p->records[i] = *r;
    for (unsigned w = 1; w < sizeof *r / sizeof *to; w++)
        ems_set(&to[w], from[w]);
    ems_set_release(&p->reservations[i].state, r->state);
}

uint32_t ems_pool_reserve(struct ems_pool *p, uint32_t session, uint64_t request, uint32_t first,
                          uint32_t n, const uint8_t *digests, const uint64_t *lengths, int replace,
                          int force, uint64_t now_ns, uint8_t *statuses, uint64_t *offsets)
{
    uint32_t last = last_of_request(p, session, request);
    uint64_t before = 0;     /* link to the key before, if it is there */
    uint32_t granted = EMS_NONE; /* record of the key before, if it has one */
    int missing = first > 0; /* one of the keys before was not there */
    ems_history_advance(&p->history, now_ns);
    if (first) { /* room was made meanwhile */
        uint64_t digest[2], slot = UINT64_MAX;
        memcpy(digest, digests + 16 * (uint64_t)(first - 1), 16);
        if (statuses[first - 1] == EMS_PRESENT)
            slot = find_slot(p, digest);
        if (slot != UINT64_MAX)
            before = ems_link_to(p, slot);
        if (last != EMS_NONE && p->records[last].position == first - 1)
            granted = last;
    }
    for (uint32_t k = first; k < n; k++) {
        uint64_t digest[2], predecessor = before;
        memcpy(digest, digests + 16 * (uint64_t)k, 16);
        if (!replace) {
            uint64_t slot = find_slot(p, digest);
            if (slot != UINT64_MAX) {
                uint64_t old = ems_get(&p->recency[slot]), tick = ems_tick(now_ns) - k;
                if (!ems_mark_is_young(old, tick)) { /* whoever saves has often just loaded it */
                    uint64_t mark = ems_mark_used(ems_mark(tick, 1), old);
                    ems_history_renew(&p->history, slot, old, mark, missing);
                    ems_set(&p->recency[slot], mark);
                }
                statuses[k] = EMS_PRESENT;
                before = ems_link_to(p, slot);
                if (granted != EMS_NONE)
                    p->links[granted].follower = before;
                granted = EMS_NONE;
                continue;
            }
        }
        before = 0;
        granted = EMS_NONE;
        missing = 1;
        if (!force && is_busy(p, digest)) {
            statuses[k] = EMS_BUSY;
            continue;
        }
        statuses[k] = EMS_NO_ROOM;
        if (lengths[k] == 0 || lengths[k] > (uint64_t)p->extents.total * EMS_UNIT || !p->nfree_records)
            continue;
        if (is_over_share(p, session, ems_units_of(lengths[k])))
            continue;
        uint32_t i = p->free_records[p->nfree_records - 1];
        uint32_t unit = ems_extents_grant(&p->extents, ems_units_of(lengths[k]), i | EMS_OWNER_RESERVATION);
        if (unit == EMS_NO_UNIT)
            return k;
        p->nfree_records--;
        struct ems_reservation r = {
            .state = EMS_RES_HELD,
            .session = session,
            .request = request,
            .position = k,
            .digest = {digest[0], digest[1]},
            .offset = ems_offset_of(unit),
            .length = lengths[k],
            .replace = (uint64_t)replace,
            .predecessor = predecessor,
        };
        write_record(p, i, &r);
        ems_link_record(p, i, last);
        last = granted = i;
        statuses[k] = EMS_GRANTED;
        offsets[k] = r.offset;
    }
    return n;
}

int ems_pool_rename(struct ems_pool *p, uint32_t session, uint64_t request, const uint64_t digest[2])
{
    uint32_t i = *find_request(p, session, request);
    if (i == EMS_NONE || p->links[i].peer_next != EMS_NONE)
        return 0;
    /* The shared record gets its key with the intent; until then nobody asks it for one. */
    leave_busy(p, i);
    memcpy(p->records[i].digest, digest, sizeof p->records[i].digest);
    enter_busy(p, i);
    return 1;
}

/* Publishes a record whose intent is complete. The extent that the slot held before, another
 * key's or this key's former value, comes back only after its version is out. */
static void publish(struct ems_pool *p, uint32_t i, uint64_t mark, uint8_t birth)
{
    struct ems_reservation *r = &p->records[i];
    uint64_t slot = r->slot;
    struct ems_entry *e = ems_entry_at(p, slot);
    uint32_t old = p->unit_of[slot];
    int occupied = old != EMS_NONE;
    int same = occupied && e->digest[0] == r->digest[0] && e->digest[1] == r->digest[1];
    uint64_t old_mark = ems_get(&p->recency[slot]);
    if (occupied && !same)
        ems_history_leave(&p->history, slot, e->digest, old_mark);
    if (same)
        ems_history_renew(&p->history, slot, old_mark, mark, 1);
    else
        ems_history_enter(&p->history, slot, r->digest, mark, birth);
    ems_set(&p->recency[slot], mark);
    ems_entry_write(p, slot, r);
    p->unit_of[slot] = ems_unit_at(r->offset);
    ems_extents_set_owner(&p->extents, p->unit_of[slot], (uint32_t)slot);
    if (occupied)
        release_extent(p, old);
    else
        p->entries++;
    if (occupied && !same)
        ems_set(&p->header->evictions, p->header->evictions + 1);
}

static int commit_record(struct ems_pool *p, uint32_t i, uint64_t checksum, uint64_t predecessor,
                         uint64_t mark, uint8_t birth, uint64_t *slot)
{
    struct ems_reservation r = p->records[i];
    *slot = find_slot(p, r.digest);
    if (*slot != UINT64_MAX && !r.replace) {
        ems_history_renew(&p->history, *slot, ems_get(&p->recency[*slot]), mark, 0);
        ems_set(&p->recency[*slot], mark);
        forget_record(p, i);
        release_extent(p, ems_unit_at(r.offset));
        return EMS_KEPT;
    }
    if (*slot == UINT64_MAX)
        *slot = choose_slot(p, r.digest);
    r.slot = *slot;
    r.checksum = checksum;
    r.predecessor = predecessor;
    r.sequence = ++p->sequence;
    r.state = EMS_RES_INTENT;
    ems_set(&p->header->sequence, r.sequence);
    write_record(p, i, &r);
    publish(p, i, mark, birth);
    forget_record(p, i);
    return EMS_COMMITTED;
}

/* What was known of each key of a commit before it. In a chain nobody uses a block without those
 * before it, so these were used as often at least, whatever was forgotten of them: a chain whose blocks
 * differ by chance would lose one in its middle, and with it all behind. NULL when memory is out. */
static const struct ems_past *recall(struct ems_pool *p, uint32_t record, uint32_t n,
                                     const uint32_t *positions, int chain)
{
    if (n > p->npasts) {
        struct ems_past *grown = realloc(p->pasts, n * sizeof *grown);
        if (!grown)
            return NULL;
        p->pasts = grown;
        p->npasts = n;
    }
    for (uint32_t k = 0; k < n; k++) {
        struct ems_past *past = &p->pasts[k];
        *past = (struct ems_past){0, ems_birth_class(k, n)};
        while (record != EMS_NONE && p->records[record].position < positions[k])
            record = p->links[record].peer_next;
        if (record == EMS_NONE || p->records[record].position != positions[k])
            continue;
        uint64_t slot = find_slot(p, p->records[record].digest);
        if (slot == UINT64_MAX)
            ems_history_recall(&p->history, p->records[record].digest, past);
        else
            *past = (struct ems_past){(uint16_t)ems_get(&p->recency[slot]), p->history.birth[slot]};
    }
    for (uint32_t k = n; chain && k > 1; k--) {
        struct ems_past *past = &p->pasts[k - 2];
        const struct ems_past *next = past + 1;
        if (past->uses == 0 && next->uses)
            past->birth = next->birth & (uint8_t)~1u;
        if (past->uses < next->uses)
            past->uses = next->uses;
    }
    return p->pasts;
}

/* A key that was there all along has its predecessor again. */
static void follow_on(struct ems_pool *p, uint64_t link, uint64_t predecessor)
{
    uint64_t slot = (uint32_t)link - 1ull;
    if (p->unit_of[slot] != EMS_NONE && (uint32_t)ems_entry_at(p, slot)->sequence == link >> 32)
        ems_set(&ems_entry_at(p, slot)->predecessor, predecessor);
}

void ems_pool_commit(struct ems_pool *p, uint32_t session, uint64_t request, uint32_t n,
                     const uint32_t *positions, const uint64_t *checksums, int chain, uint64_t now_ns,
                     uint8_t *statuses)
{
    uint32_t *head = find_request(p, session, request);
    uint32_t first = *head, previous = EMS_NONE, i = first;
    uint32_t request_next = first == EMS_NONE ? EMS_NONE : p->links[first].request_next;
    uint64_t predecessor = 0;
    ems_history_advance(&p->history, now_ns);
    const struct ems_past *pasts = recall(p, first, n, positions, chain);
    for (uint32_t k = 0; k < n; k++) {
        statuses[k] = EMS_LOST;
        /* Both lists rise, so one walk finds all. */
        while (i != EMS_NONE && p->records[i].position < positions[k]) {
            previous = i;
            i = p->links[i].peer_next;
        }
        if (i == EMS_NONE || p->records[i].position != positions[k]) {
            predecessor = 0;
            continue;
        }
        uint32_t next = p->links[i].peer_next;
        uint64_t follower = p->links[i].follower;
        struct ems_past past = pasts ? pasts[k] : (struct ems_past){0, 0};
        uint64_t mark = ems_mark_used(ems_mark(ems_tick(now_ns) - positions[k], 1), past.uses), slot;
        uint64_t before = p->records[i].predecessor ? p->records[i].predecessor : predecessor;
        statuses[k] = (uint8_t)commit_record(p, i, checksums[k], chain ? before : 0, mark, past.birth, &slot);
        predecessor = ems_link_to(p, slot);
        if (chain && follower)
            follow_on(p, follower, predecessor);
        if (previous != EMS_NONE)
            p->links[previous].peer_next = next;
        else
            first = next;
        i = next;
    }
    if (first == EMS_NONE) {
        *head = request_next;
    } else if (first != *head) {
        p->links[first].request_next = request_next;
        *head = first;
    }
}

static void abort_record(struct ems_pool *p, uint32_t i)
{
    uint32_t unit = ems_unit_at(p->records[i].offset);
    forget_record(p, i);
    release_extent(p, unit);
}

uint32_t ems_pool_abort(struct ems_pool *p, uint32_t session, uint64_t request)
{
    uint32_t *head = find_request(p, session, request), i = *head, count = 0;
    if (i == EMS_NONE)
        return 0;
    *head = p->links[i].request_next;
    while (i != EMS_NONE) {
        uint32_t next = p->links[i].peer_next;
        abort_record(p, i);
        count++;
        i = next;
    }
    return count;
}

uint32_t ems_pool_release_session(struct ems_pool *p, uint32_t session, const uint64_t *keep, uint32_t nkeep)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->nrecords && p->reserved_of[session]; i++) {
        const struct ems_reservation *r = &p->records[i];
        if (r->state == EMS_RES_FREE || r->session != session)
            continue;
        int kept = 0;
        for (uint32_t k = 0; k < nkeep; k++)
            kept |= keep[k] == r->request;
        if (!kept)
            count += ems_pool_abort(p, session, r->request);
    }
    return count;
}
