/* What the server remembers of the use of entries, to tell which are worth keeping.
 *
 * Private memory of the server, 15 bytes a slot: the recency word of each entry at the last look,
 * how it was saved, and for keys that are gone (ghosts) their last word. From these it counts, by
 * class and age, how long keys waited and how often they were used again; class: uses so far, length
 * of the piece that the block was saved in, whether it was the piece's last. `learn` turns that into
 * the value of an entry: the most uses per time that keeping it may bring (a Gittins index). */
#ifndef EMS_HISTORY_H
#define EMS_HISTORY_H

#include "layout.h"

#define EMS_USE_CLASSES 8u
#define EMS_BIRTH_CLASSES 12u
#define EMS_CLASSES (EMS_USE_CLASSES * EMS_BIRTH_CLASSES)
#define EMS_AGES 128u   /* four to an octave, from 4 ms to days */
#define EMS_FINE_AGES 2048u /* 64 to an octave */
#define EMS_GHOSTS 4u              /* per bucket */
#define EMS_LIFT_STEPS 4096u
#define EMS_SEGMENT_BUCKETS 4096u /* looked at in one go: 32,768 slots */

struct ems_history {
    uint64_t nslots, nbuckets;
    uint64_t now; /* tick of the latest thing that happened */
    uint64_t *seen;
    uint64_t *ghost_mark; /* 0 = empty */
    uint32_t *ghost_name; /* 24 bits of digest, 8 of birth */
    uint8_t *birth;
    uint64_t *looked; /* per segment: tick of the last look */
    double reuse[EMS_CLASSES][EMS_AGES];    /* keys used again at that age */
    double exposure[EMS_CLASSES][EMS_AGES]; /* ticks that keys spent at that age */
    float value[EMS_CLASSES][EMS_AGES];
    uint64_t entries_by_age[EMS_FINE_AGES], ghosts_by_age[EMS_FINE_AGES]; /* of the pass that goes on */
    /* Least recently used would have kept what was used from then on, as of the last tally; 0 =
     * everything. A tick and no age: how fast room is taken changes from one request to the next. */
    uint64_t lru_since;
    uint64_t pass_began; /* tick of the first look of this pass over all buckets */
    uint64_t hits, lru_hits; /* since the last tally */
};

struct ems_past {
    uint16_t uses;
    uint8_t birth;
};

struct ems_tally {
    uint64_t hits, lru_hits; /* since the last one: ours, and what those of LRU would have been */
    double missing;          /* share of what LRU would hold that is gone */
};

int ems_history_init(struct ems_history *h, uint64_t nbuckets);
void ems_history_destroy(struct ems_history *h);

static inline void ems_history_advance(struct ems_history *h, uint64_t now_ns)
{
    if (ems_tick(now_ns) > h->now)
        h->now = ems_tick(now_ns);
}

/* How a block came in: as number `k` of a piece of `n`. */
uint8_t ems_birth_class(uint32_t k, uint32_t n);
/* What is known of a key that is not here; leaves *past alone if nothing is. */
void ems_history_recall(const struct ems_history *h, const uint64_t digest[2], struct ems_past *past);
/* A key enters a slot with a recency word; its ghost goes. */
void ems_history_enter(struct ems_history *h, uint64_t slot, const uint64_t digest[2], uint64_t mark,
                       uint8_t birth);
/* Takes note of uses since the last look; `mark` is the word now. */
void ems_history_notice(struct ems_history *h, uint64_t slot, uint64_t mark);
/* A key that is here was saved again and gets a new word; `behind`: a key before it was missing, so
 * that nobody could have loaded it. */
void ems_history_renew(struct ems_history *h, uint64_t slot, uint64_t old, uint64_t mark, int behind);
/* The server itself made the entry younger. */
static inline void ems_history_lift(struct ems_history *h, uint64_t slot, uint64_t mark) { h->seen[slot] = mark; }
/* A key leaves its slot and becomes a ghost. */
void ems_history_leave(struct ems_history *h, uint64_t slot, const uint64_t digest[2], uint64_t mark);
/* Time passed for an entry, or for the ghosts of a bucket. */
void ems_history_age_entry(struct ems_history *h, uint64_t slot);
void ems_history_age_ghosts(struct ems_history *h, uint64_t bucket);
float ems_history_value(const struct ems_history *h, uint64_t slot, uint64_t mark);
/* After a survey of all buckets; `coming` keys are being saved and have their place already. */
struct ems_tally ems_history_tally(struct ems_history *h, uint64_t coming);
/* New values, after old counts lost `fade` of their weight; the reuses that they rest on. */
double ems_history_learn(struct ems_history *h, double fade);

#endif
