#include "history.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Weight, in reuses, of what is known of a wider class: a cell with fewer of its own leans on it. */
#define PRIOR 30.0
#define FIRST_SHIFT 10 /* ages begin at 1,024 ticks, 4 ms */
#define FINE 6      /* to the power of two: classes of age to an octave, for LRU's age */
#define NOBODY_LEFT 1e-6

int ems_history_init(struct ems_history *h, uint64_t nbuckets)
{
    memset(h, 0, sizeof *h);
    h->nbuckets = nbuckets;
    h->nslots = nbuckets * EMS_BUCKET_SLOTS;
    h->seen = calloc(h->nslots, sizeof *h->seen);
    h->birth = calloc(h->nslots, sizeof *h->birth);
    h->ghost_mark = calloc(nbuckets * EMS_GHOSTS, sizeof *h->ghost_mark);
    h->ghost_name = calloc(nbuckets * EMS_GHOSTS, sizeof *h->ghost_name);
    h->looked = calloc(nbuckets / EMS_SEGMENT_BUCKETS + 1, sizeof *h->looked);
    return h->seen && h->birth && h->ghost_mark && h->ghost_name && h->looked ? 0 : -1;
}

void ems_history_destroy(struct ems_history *h)
{
    free(h->seen);
    free(h->birth);
    free(h->ghost_mark);
    free(h->ghost_name);
    free(h->looked);
    memset(h, 0, sizeof *h);
}

/* ---- classes and ages ---------------------------------------------------------------------- */

static unsigned log2_of(uint64_t x) { return 63u - (unsigned)__builtin_clzll(x); }

uint8_t ems_birth_class(uint32_t k, uint32_t n)
{
    unsigned length = log2_of(n ? n : 1);
    return (uint8_t)(2 * (length < 5 ? length : 5) + (k + 1 == n));
}

static unsigned class_of(uint64_t uses, uint8_t birth)
{
    static const uint8_t of_uses[16] = {0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6};
    return (uses < 16 ? of_uses[uses] : 7u) * EMS_BIRTH_CLASSES + birth;
}

static uint64_t since(uint64_t later, uint64_t earlier) { return later > earlier ? later - earlier : 0; }

/* 1 << `bits` classes to an octave. */
static unsigned age_step(uint64_t age, unsigned bits)
{
    uint64_t a = age + (1u << FIRST_SHIFT);
    unsigned e = log2_of(a);
    return ((e - FIRST_SHIFT) << bits) + (unsigned)(a >> (e - bits) & ((1u << bits) - 1));
}

static uint64_t step_begin(unsigned i, unsigned bits)
{
    uint64_t within = (1u << bits) + (i & ((1u << bits) - 1));
    return (within << ((i >> bits) + FIRST_SHIFT - bits)) - (1u << FIRST_SHIFT);
}

static unsigned age_class(uint64_t age)
{
    unsigned i = age_step(age, 2);
    return i < EMS_AGES ? i : EMS_AGES - 1;
}

static uint64_t age_begin(unsigned i) { return step_begin(i, 2); }

static unsigned fine_age(uint64_t age)
{
    unsigned i = age_step(age, FINE);
    return i < EMS_FINE_AGES ? i : EMS_FINE_AGES - 1;
}

/* ---- counting ------------------------------------------------------------------------------ */

/* A key of this class went from one age to another unused. */
static void expose(struct ems_history *h, unsigned class, uint64_t from, uint64_t to)
{
    for (unsigned i = age_class(from); from < to; i++) {
        uint64_t end = i + 1 < EMS_AGES && age_begin(i + 1) < to ? age_begin(i + 1) : to;
        h->exposure[class][i] += (double)(end - from);
        from = end;
    }
}

static uint64_t last_look(const struct ems_history *h, uint64_t bucket)
{
    return h->looked[bucket / EMS_SEGMENT_BUCKETS];
}

/* Of a key with this mark. What LRU keeps only grows younger, so since the tally it can be less. */
static int lru_has(const struct ems_history *h, uint64_t mark) { return ems_mark_tick(mark) >= h->lru_since; }

void ems_history_notice(struct ems_history *h, uint64_t slot, uint64_t mark)
{
    uint64_t old = h->seen[slot], used = (mark - old) & 0xffff;
    if (mark == old)
        return;
    h->seen[slot] = mark;
    if (used == 0 || used > 64) /* the count is full, or nonsense */
        used = 1;
    uint64_t waited = since(ems_mark_tick(mark), ems_mark_tick(old)) / used;
    uint64_t known = since(last_look(h, slot / EMS_BUCKET_SLOTS), ems_mark_tick(old));
    for (uint64_t i = 0; i < used; i++) {
        unsigned class = class_of((old & 0xffff) + i, h->birth[slot]);
        h->reuse[class][age_class(waited)] += 1;
        expose(h, class, i ? 0 : known, waited);
    }
    h->hits += used;
    h->lru_hits += used - !lru_has(h, old);
}

void ems_history_renew(struct ems_history *h, uint64_t slot, uint64_t old, uint64_t mark, int behind)
{
    ems_history_notice(h, slot, old);
    uint64_t waited = since(ems_mark_tick(mark), ems_mark_tick(old));
    unsigned class = class_of(old & 0xffff, h->birth[slot]);
    h->seen[slot] = mark;
    h->reuse[class][age_class(waited)] += 1;
    expose(h, class, since(last_look(h, slot / EMS_BUCKET_SLOTS), ems_mark_tick(old)), waited);
    h->lru_hits += behind && lru_has(h, old);
}

/* ---- ghosts -------------------------------------------------------------------------------- */

static uint32_t ghost_name(const uint64_t digest[2]) { return (uint32_t)digest[1] & 0xffffff00u; }

/* The ghost of a key, or UINT64_MAX. */
static uint64_t find_ghost(const struct ems_history *h, const uint64_t digest[2])
{
    uint64_t candidates[2];
    ems_candidates(digest, h->nbuckets, candidates);
    for (int c = 0; c < 2; c++)
        for (uint64_t g = candidates[c] * EMS_GHOSTS; g < (candidates[c] + 1) * EMS_GHOSTS; g++)
            if (h->ghost_mark[g] && (h->ghost_name[g] & 0xffffff00u) == ghost_name(digest))
                return g;
    return UINT64_MAX;
}

void ems_history_recall(const struct ems_history *h, const uint64_t digest[2], struct ems_past *past)
{
    uint64_t g = find_ghost(h, digest);
    if (g != UINT64_MAX)
        *past = (struct ems_past){(uint16_t)h->ghost_mark[g], (uint8_t)h->ghost_name[g]};
}

void ems_history_enter(struct ems_history *h, uint64_t slot, const uint64_t digest[2], uint64_t mark,
                       uint8_t birth)
{
    uint64_t g = find_ghost(h, digest);
    h->birth[slot] = birth;
    h->seen[slot] = mark;
    if (g == UINT64_MAX)
        return;
    uint64_t old = h->ghost_mark[g], waited = since(ems_mark_tick(mark), ems_mark_tick(old));
    unsigned class = class_of(old & 0xffff, (uint8_t)h->ghost_name[g]);
    h->reuse[class][age_class(waited)] += 1;
    expose(h, class, since(last_look(h, g / EMS_GHOSTS), ems_mark_tick(old)), waited);
    h->lru_hits += h->lru_since && lru_has(h, old);
    h->ghost_mark[g] = 0;
}

void ems_history_leave(struct ems_history *h, uint64_t slot, const uint64_t digest[2], uint64_t mark)
{
    uint64_t candidates[2];
    ems_candidates(digest, h->nbuckets, candidates);
    uint64_t first = candidates[0] * EMS_GHOSTS, other = candidates[1] * EMS_GHOSTS;
    if (h->ghost_mark[other + EMS_GHOSTS - 1] < h->ghost_mark[first + EMS_GHOSTS - 1])
        first = other;
    uint64_t g = first;
    ems_history_notice(h, slot, mark);
    while (g < first + EMS_GHOSTS - 1 && h->ghost_mark[g])
        g++;
    for (; g > first; g--) { /* the one that left first makes way */
        h->ghost_mark[g] = h->ghost_mark[g - 1];
        h->ghost_name[g] = h->ghost_name[g - 1];
    }
    h->ghost_mark[first] = mark;
    h->ghost_name[first] = ghost_name(digest) | h->birth[slot];
    h->seen[slot] = 0;
}

/* ---- a look at everything ------------------------------------------------------------------ */

void ems_history_age_entry(struct ems_history *h, uint64_t slot)
{
    uint64_t mark = h->seen[slot], age = since(h->now, ems_mark_tick(mark));
    uint64_t known = since(last_look(h, slot / EMS_BUCKET_SLOTS), ems_mark_tick(mark));
    expose(h, class_of(mark & 0xffff, h->birth[slot]), known, age);
    h->entries_by_age[fine_age(age)]++;
}

void ems_history_age_ghosts(struct ems_history *h, uint64_t bucket)
{
    for (uint64_t g = bucket * EMS_GHOSTS; g < (bucket + 1) * EMS_GHOSTS; g++) {
        uint64_t mark = h->ghost_mark[g];
        if (!mark)
            continue;
        uint64_t age = since(h->now, ems_mark_tick(mark));
        uint64_t known = since(last_look(h, bucket), ems_mark_tick(mark));
        expose(h, class_of(mark & 0xffff, (uint8_t)h->ghost_name[g]), known, age);
        h->ghosts_by_age[fine_age(age)]++;
    }
}

float ems_history_value(const struct ems_history *h, uint64_t slot, uint64_t mark)
{
    uint64_t age = since(h->now, ems_mark_tick(mark));
    return h->value[class_of(mark & 0xffff, h->birth[slot])][age_class(age)];
}

/* ---- learning ------------------------------------------------------------------------------ */

static double rate(double reuse, double exposure, double wider)
{
    if (wider <= 0)
        return 0;
    return (reuse + PRIOR) / (exposure + PRIOR / wider);
}

/* value[i] = max over j > i of (uses expected from age i to age j) / (time spent between them):
 * the slope from point i to the upper hull of the points behind it. */
static void index_of(const double rates[EMS_AGES], float value[EMS_AGES])
{
    double time[EMS_AGES + 1], uses[EMS_AGES + 1], left = 1;
    unsigned hull[EMS_AGES + 1], n = 0, last = 0;
    time[0] = uses[0] = 0;
    for (unsigned i = 0; i < EMS_AGES && left > NOBODY_LEFT; i++) {
        double width = (double)(age_begin(i + 1) - age_begin(i)), stay = exp(-rates[i] * width);
        uses[i + 1] = uses[i] + left * (1 - stay);
        time[i + 1] = time[i] + left * (rates[i] * width > 1e-9 ? (1 - stay) / rates[i] : width);
        left *= stay;
        last = i + 1;
    }
    for (unsigned i = last; i < EMS_AGES; i++)
        value[i] = (float)rates[i];
    hull[n++] = last;
    for (unsigned i = last; i-- > 0;) {
#define SLOPE(a, b) ((uses[b] - uses[a]) / (time[b] - time[a]))
        while (n > 1 && SLOPE(i, hull[n - 1]) <= SLOPE(hull[n - 1], hull[n - 2]))
            n--;
        value[i] = (float)SLOPE(i, hull[n - 1]);
        hull[n++] = i;
#undef SLOPE
    }
}

static void learn_values(struct ems_history *h)
{
    static const unsigned births = EMS_BIRTH_CLASSES;
    double all[EMS_AGES], of_use[EMS_AGES], rates[EMS_AGES];
    for (unsigned a = 0; a < EMS_AGES; a++) {
        double reuse = 0, exposure = 0;
        for (unsigned c = 0; c < EMS_CLASSES; c++) {
            reuse += h->reuse[c][a];
            exposure += h->exposure[c][a];
        }
        all[a] = exposure > 0 ? reuse / exposure : 0;
    }
    for (unsigned u = 0; u < EMS_USE_CLASSES; u++) {
        for (unsigned a = 0; a < EMS_AGES; a++) {
            double reuse = 0, exposure = 0;
            for (unsigned c = u * births; c < (u + 1) * births; c++) {
                reuse += h->reuse[c][a];
                exposure += h->exposure[c][a];
            }
            of_use[a] = rate(reuse, exposure, all[a]);
        }
        for (unsigned c = u * births; c < (u + 1) * births; c++) {
            for (unsigned a = 0; a < EMS_AGES; a++)
                rates[a] = rate(h->reuse[c][a], h->exposure[c][a], of_use[a]);
            index_of(rates, h->value[c]);
        }
    }
}

/* The age that as many of all keys, here or gone, have not reached as there are entries (rounded up,
 * in favour of LRU); returns the share of them that is gone. */
static double find_lru(struct ems_history *h, uint64_t coming)
{
    uint64_t entries = coming, younger = 0, gone = 0, age = 0;
    for (unsigned i = 0; i < EMS_FINE_AGES; i++)
        entries += h->entries_by_age[i];
    for (unsigned i = 0; i < EMS_FINE_AGES && younger < entries; i++) {
        younger += h->entries_by_age[i] + h->ghosts_by_age[i];
        gone += h->ghosts_by_age[i];
        if (younger >= entries)
            age = step_begin(i + 1, FINE);
    }
    h->lru_since = age ? since(h->pass_began, age) : 0;
    return entries ? (double)gone / (double)entries : 0;
}

struct ems_tally ems_history_tally(struct ems_history *h, uint64_t coming)
{
    struct ems_tally tally = {h->hits, h->lru_hits, find_lru(h, coming)};
    h->hits = h->lru_hits = 0;
    memset(h->entries_by_age, 0, sizeof h->entries_by_age);
    memset(h->ghosts_by_age, 0, sizeof h->ghosts_by_age);
    return tally;
}

double ems_history_learn(struct ems_history *h, double fade)
{
    double reuses = 0;
    for (unsigned c = 0; c < EMS_CLASSES; c++)
        for (unsigned a = 0; a < EMS_AGES; a++) {
            h->reuse[c][a] *= 1 - fade;
            h->exposure[c][a] *= 1 - fade;
            reuses += h->reuse[c][a];
        }
    learn_values(h);
    return reuses;
}
