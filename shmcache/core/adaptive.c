/* adaptive.c: the default policy, which learns which kinds of blocks are used again, and when.
 *
 * Why         Three quarters of all blocks are never read again, and those of one conversation are
 *             read together or not at all. Age alone (LRU) fills the arena with blocks that nobody
 *             will ask for; how a block has been used so far says much more.
 * Contract    Called with the lock held, by eviction.c. Blocks with children are not candidates.
 *             The others are in four queues by kind: never used and never had a child, never used,
 *             used once, used more often; uses before an eviction count, as far as ghosts
 *             remember. Per kind and age a table says how many uses one more block-and-access of
 *             waiting is worth; the candidate with the least worth goes: one of the two oldest or
 *             the newest of each queue.
 * Invariants  Whatever the learned words hold, the answer is a candidate of the class, or none:
 *             they are hints, written by the holder of the lock outside any record.
 * Cost        O(1) per use, store and eviction: at most 12 candidates, one set of 8 ghosts. Once
 *             per eighth of the capacity, and at most once per COMPUTE_TICKS_MIN events, a table
 *             of 100 entries is computed anew: 5 microseconds.
 * Source      Least hit density (Beckmann et al., LHD); Gittins index over learned hazards, with
 *             blocks that still wait counted as exposed (Kaplan, Meier). docs/performance.md has
 *             the hit rates on recorded traffic.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

#define KINDS            4u
#define AGES             25u /* half octaves of the age in 64ths of the capacity */
#define AGE_PARTS        64u
#define EPOCHS           32u /* of half a capacity: when the blocks that wait were last used */
#define GHOST_WAYS       8u
#define SAMPLE_MASK      3u /* one key in four is observed: four times the memory for ghosts */
#define CAPACITY_MIN     64u
#define COUNT_ONE        256u /* counts are halved now and then: they have eight bits of fraction */
#define PRIOR_WEIGHT     16.0
#define PRIOR_CHANCE     0.1
#define DECAY_CAPACITIES 16u
#define COMPUTE_TICKS_MIN 512u
#define FORGET_GHOSTS     4096u /* while the lock is held: millions would take milliseconds */
#define WORTH_ONE         1099511627776.0 /* 2^40 */

/* The words of the policy region before the ghosts. */
struct learned {
    uint64_t used[KINDS][AGES];  /* waits that ended with a use, at this age */
    uint64_t ended[KINDS][AGES]; /* waits that ended, with a use or forgotten */
    uint64_t worth[KINDS][AGES]; /* see compute() */
    uint64_t waiting[KINDS]
                    [EPOCHS]; /* observed blocks and ghosts, by the epoch of their last use */
    uint64_t capacity;        /* blocks; what ages are measured in */
    uint64_t epoch;           /* the present one */
    uint64_t compute_at;      /* clock */
    uint64_t decay_at;        /* clock */
    uint64_t forget; /* the ghosts below are of another capacity, and still to be forgotten */
};

_Static_assert(sizeof(struct learned) <= SHMC_LEARNED_WORDS * sizeof(uint64_t), "must fit");

/* Half a word per ghost: fingerprint (12 bits), uses (2), kind (2), and the time of the last use
 * (16), in parts of the capacity. */
#define GHOST_FINGERPRINT(word) ((word) >> 20)
#define GHOST_USES(word)        ((word) >> 18 & 3u)
#define GHOST_KIND(word)        ((word) >> 16 & 3u)
#define GHOST_TIME(word)        ((word) & 0xffffu)

static struct learned *learned_of(const struct shmc_handle *handle)
{
    return (struct learned *)handle->learned;
}

static uint64_t minimum(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

static uint64_t since(const struct shmc_handle *handle, uint64_t clock)
{
    uint64_t now = handle->control->clock;
    return now > clock ? now - clock : 0;
}

static uint64_t capacity_of(const struct learned *learned)
{
    uint64_t capacity = learned->capacity & UINT32_MAX;
    return capacity > CAPACITY_MIN ? capacity : CAPACITY_MIN;
}

static uint32_t bucket_of(const struct learned *learned, uint64_t age)
{
    uint64_t parts = age * AGE_PARTS / capacity_of(learned);
    if (parts == 0)
        return 0;
    uint32_t octave = 63 - (uint32_t)__builtin_clzll(parts);
    uint32_t half = octave != 0 ? (uint32_t)(parts >> (octave - 1) & 1) : 0;
    return (uint32_t)minimum(1 + 2 * octave + half, AGES - 1);
}

static bool is_observed(const struct shmc_handle *handle, const uint64_t *key, uint64_t *tag)
{
    *tag = shmc_index_hash(handle, key).tag;
    return (*tag & SAMPLE_MASK) == 0;
}

/* ---- what is observed ---------------------------------------------------------------------- */

static uint64_t *waiting_at(struct learned *learned, uint64_t kind, uint64_t clock)
{
    uint64_t length = capacity_of(learned) / 2;
    uint64_t epoch = clock / length;
    if (learned->epoch >= EPOCHS && epoch <= learned->epoch - EPOCHS)
        epoch = learned->epoch - EPOCHS + 1;
    return &learned->waiting[kind][epoch % EPOCHS];
}

static void begin_wait(struct learned *learned, uint64_t kind, uint64_t clock)
{
    *waiting_at(learned, kind, clock) += 1;
}

static void cancel_wait(struct learned *learned, uint64_t kind, uint64_t clock)
{
    uint64_t *word = waiting_at(learned, kind, clock);
    *word -= *word != 0;
}

static void end_wait(struct shmc_handle *handle, uint64_t kind, uint64_t clock, bool used)
{
    struct learned *learned = learned_of(handle);
    uint32_t bucket = bucket_of(learned, since(handle, clock));
    cancel_wait(learned, kind, clock);
    learned->ended[kind][bucket] += COUNT_ONE;
    if (used)
        learned->used[kind][bucket] += COUNT_ONE;
}

/* ---- ghosts: keys of evicted blocks -------------------------------------------------------- */

static uint32_t fingerprint_of(uint64_t tag)
{
    uint32_t fingerprint = (uint32_t)(tag >> 2) & 0xfffu;
    return fingerprint != 0 ? fingerprint : 1;
}

/* The set of a key; NULL when there is no room for ghosts. */
static uint32_t *ghost_set(const struct shmc_handle *handle, uint64_t tag)
{
    uint64_t sets = handle->header.ghosts_max / GHOST_WAYS;
    return sets != 0 ? handle->ghosts + (tag >> 14) % sets * GHOST_WAYS : NULL;
}

static uint32_t *find_ghost(const struct shmc_handle *handle, uint64_t tag)
{
    uint32_t *set = ghost_set(handle, tag);
    for (uint32_t way = 0; set != NULL && way < GHOST_WAYS; way++)
        if (GHOST_FINGERPRINT(set[way]) == fingerprint_of(tag))
            return &set[way];
    return NULL;
}

static uint64_t part_length(const struct learned *learned)
{
    return (capacity_of(learned) + AGE_PARTS - 1) / AGE_PARTS;
}

/* The clock at the ghost's last use, to a part of the capacity. */
static uint64_t ghost_clock(const struct shmc_handle *handle, uint32_t ghost)
{
    uint64_t length = part_length(learned_of(handle));
    uint64_t now = handle->control->clock / length;
    uint64_t age = (now - GHOST_TIME(ghost)) & 0xffffu;
    return age < now ? (now - age) * length : 0;
}

/* Remembers an evicted block in the place of the ghost that waits for longest. */
static void put_ghost(struct shmc_handle *handle, uint64_t tag, uint64_t uses, uint64_t kind,
                      uint64_t clock)
{
    uint32_t *set = ghost_set(handle, tag);
    uint32_t *victim = set;
    if (set == NULL)
        return;
    for (uint32_t way = 0; way < GHOST_WAYS; way++)
        if (*victim != 0 &&
            (set[way] == 0 || ghost_clock(handle, set[way]) < ghost_clock(handle, *victim)))
            victim = &set[way];
    if (*victim != 0)
        end_wait(handle, GHOST_KIND(*victim), ghost_clock(handle, *victim), false);
    *victim = fingerprint_of(tag) << 20 | (uint32_t)minimum(uses, 3) << 18 | (uint32_t)kind << 16 |
              (uint32_t)(clock / part_length(learned_of(handle)) & 0xffffu);
}

/* ---- kinds --------------------------------------------------------------------------------- */

uint64_t shmc_adaptive_kind(uint64_t uses, uint64_t flags)
{
    if (uses != 0)
        return uses == 1 ? 2 : 3;
    return (flags & SHMC_BLOCK_HAD_CHILD) != 0 ? 1 : 0;
}

/* ---- events -------------------------------------------------------------------------------- */

void shmc_adaptive_used(struct shmc_handle *handle, uint64_t block)
{
    const struct shmc_block *entry = &handle->blocks[block];
    uint64_t uses = SHMC_POLICY_USES(entry->policy);
    uint64_t tag;
    if (!is_observed(handle, entry->key, &tag))
        return;
    end_wait(handle, shmc_adaptive_kind(uses, entry->flags), SHMC_POLICY_CLOCK(entry->policy),
             true);
    begin_wait(learned_of(handle), shmc_adaptive_kind(uses + 1, entry->flags),
               handle->control->clock);
}

/* How often a new block counts as used: as its ghost remembers; or, not being observed, as the
 * parent it was stored with. */
uint64_t shmc_adaptive_stored(struct shmc_handle *handle, uint64_t block, uint64_t inherited_uses,
                              uint64_t clock)
{
    uint64_t tag;
    if (!is_observed(handle, handle->blocks[block].key, &tag))
        return inherited_uses;
    uint64_t uses = 0;
    uint32_t *ghost = find_ghost(handle, tag);
    if (ghost != NULL) {
        end_wait(handle, GHOST_KIND(*ghost), ghost_clock(handle, *ghost), true);
        uses = GHOST_USES(*ghost) + 1;
        *ghost = 0;
    }
    begin_wait(learned_of(handle), shmc_adaptive_kind(uses, 0), clock);
    return uses;
}

/* Its first child is stored: it may be of another kind now. */
void shmc_adaptive_has_child(struct shmc_handle *handle, uint64_t block)
{
    const struct shmc_block *entry = &handle->blocks[block];
    uint64_t tag;
    uint64_t uses = SHMC_POLICY_USES(entry->policy);
    uint64_t clock = SHMC_POLICY_CLOCK(entry->policy);
    if (uses != 0 || (entry->flags & SHMC_BLOCK_HAD_CHILD) != 0 ||
        !is_observed(handle, entry->key, &tag))
        return;
    cancel_wait(learned_of(handle), shmc_adaptive_kind(uses, 0), clock);
    begin_wait(learned_of(handle), shmc_adaptive_kind(uses, SHMC_BLOCK_HAD_CHILD), clock);
}

void shmc_adaptive_evicted(struct shmc_handle *handle, uint64_t block)
{
    const struct shmc_block *entry = &handle->blocks[block];
    uint64_t tag;
    uint64_t uses = SHMC_POLICY_USES(entry->policy);
    if (is_observed(handle, entry->key, &tag))
        put_ghost(handle, tag, uses, shmc_adaptive_kind(uses, entry->flags),
                  SHMC_POLICY_CLOCK(entry->policy));
}

/* ---- what waiting is worth ----------------------------------------------------------------- */

/* Waits that end at each age, or have not ended yet at it. */
static void count_exposed(const struct shmc_handle *handle, const struct learned *learned,
                          double exposed[KINDS][AGES])
{
    uint64_t length = capacity_of(learned) / 2;
    uint64_t into = handle->control->clock % length;
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        for (uint32_t age = 0; age < AGES; age++)
            exposed[kind][age] = (double)learned->ended[kind][age] / COUNT_ONE;
        for (uint64_t back = 0; back < EPOCHS && back <= learned->epoch; back++) {
            uint64_t waiting = learned->waiting[kind][(learned->epoch - back) % EPOCHS];
            uint64_t age = back == 0 ? into / 2 : (back - 1) * length + into + length / 2;
            exposed[kind][bucket_of(learned, age)] += (double)(waiting & UINT32_MAX);
        }
    }
}

/* Chance of a use at each age, of those that waited so long; the prior helps where few were. */
static void hazards(const uint64_t *used, const double *exposed, const double *prior,
                    double *chance)
{
    double waited = 0;
    for (uint32_t age = AGES; age-- > 0;) {
        double uses = (double)used[age] / COUNT_ONE;
        waited += exposed[age];
        double half = (exposed[age] - uses) / 2; /* those that leave during this age */
        double value = (uses + PRIOR_WEIGHT * prior[age]) / (waited - half + PRIOR_WEIGHT);
        chance[age] = value < 0 ? 0 : value > 1 ? 1 : value;
    }
}

/* The most uses per access of waiting that can be had from each age on, over all horizons. */
static void index_of(const double *chance, const double *width, uint64_t *worth)
{
    for (uint32_t age = 0; age < AGES; age++) {
        double left = 1, uses = 0, waited = 0, best = 0;
        for (uint32_t end = age; end < AGES; end++) {
            uses += left * chance[end];
            waited += left * (1 - chance[end] / 2) * width[end];
            left *= 1 - chance[end];
            if (uses > best * waited)
                best = uses / waited;
        }
        worth[age] = best < 1 ? (uint64_t)(best * WORTH_ONE) : (uint64_t)WORTH_ONE;
    }
}

static void age_widths(const struct learned *learned, double *width)
{
    double unit = (double)capacity_of(learned) / AGE_PARTS;
    double start = 0;
    for (uint32_t age = 0; age < AGES; age++) {
        uint32_t next = age; /* the age that begins where this one ends, counted from 1 */
        double end = unit * (next % 2 != 0 ? 1.5 : 1) * (double)(1ull << next / 2);
        width[age] = end > start ? end - start : unit / 2;
        start = end;
    }
}

static void compute(struct shmc_handle *handle)
{
    struct learned *learned = learned_of(handle);
    double exposed[KINDS][AGES], all_exposed[AGES] = {0}, prior[AGES], common[AGES], width[AGES];
    uint64_t all_used[AGES] = {0};
    count_exposed(handle, learned, exposed);
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        for (uint32_t age = 0; age < AGES; age++) {
            all_used[age] += learned->used[kind][age];
            all_exposed[age] += exposed[kind][age];
        }
    }
    for (uint32_t age = 0; age < AGES; age++)
        prior[age] = PRIOR_CHANCE;
    hazards(all_used, all_exposed, prior, common);
    age_widths(learned, width);
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        double chance[AGES];
        hazards(learned->used[kind], exposed[kind], common, chance);
        index_of(chance, width, learned->worth[kind]);
    }
}

static void halve(struct learned *learned)
{
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        for (uint32_t age = 0; age < AGES; age++) {
            learned->used[kind][age] /= 2;
            learned->ended[kind][age] /= 2;
        }
    }
}

/* Opens the epochs that have begun since; the oldest take in what waits for longer. */
static void open_epochs(const struct shmc_handle *handle, struct learned *learned)
{
    uint64_t present = handle->control->clock / (capacity_of(learned) / 2);
    if (present < learned->epoch || present - learned->epoch > EPOCHS) {
        memset(learned->waiting, 0, sizeof learned->waiting); /* a new capacity, or damage */
        learned->epoch = present;
    }
    for (; learned->epoch < present; learned->epoch++) {
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            uint64_t *ended = &learned->waiting[kind][(learned->epoch + 1) % EPOCHS];
            learned->waiting[kind][(learned->epoch + 2) % EPOCHS] += *ended;
            *ended = 0;
        }
    }
}

/* How many blocks of the present mean size the arena can hold. When that has become another number,
 * what was learned is of another scale, and forgotten. */
static void measure(const struct shmc_handle *handle, struct learned *learned)
{
    const struct shmc_control *control = handle->control;
    if (control->used_blocks == 0 || control->used_bytes < control->used_blocks)
        return;
    uint64_t mean_bytes = control->used_bytes / control->used_blocks;
    uint64_t blocks = minimum(handle->arena_bytes / mean_bytes, handle->header.geometry.blocks_max);
    uint64_t before = learned->capacity;
    if (blocks <= before + before / 4 && blocks + blocks / 4 >= before)
        return;
    memset(learned, 0, sizeof *learned);
    learned->forget = handle->header.ghosts_max;
    learned->capacity = blocks;
    learned->epoch = control->clock / (capacity_of(learned) / 2);
}

static uint64_t compute_ticks(const struct learned *learned)
{
    uint64_t eighth = capacity_of(learned) / 8;
    return eighth > COMPUTE_TICKS_MIN ? eighth : COMPUTE_TICKS_MIN;
}

static void forget_some(const struct shmc_handle *handle, struct learned *learned)
{
    uint64_t end = minimum(learned->forget, handle->header.ghosts_max);
    uint64_t count = minimum(end, FORGET_GHOSTS);
    learned->forget = end - count;
    memset(handle->ghosts + learned->forget, 0, count * sizeof *handle->ghosts);
}

/* Keeps the books: to be called with every tick of the clock. */
void shmc_adaptive_tick(struct shmc_handle *handle)
{
    struct learned *learned = learned_of(handle);
    uint64_t now = handle->control->clock;
    if (learned->capacity != 0 && now % CAPACITY_MIN != 0)
        return;
    open_epochs(handle, learned);
    forget_some(handle, learned);
    if (now >= learned->compute_at || learned->compute_at - now > compute_ticks(learned)) {
        measure(handle, learned);
        compute(handle);
        learned->compute_at = now + compute_ticks(learned);
    }
    uint64_t decay = DECAY_CAPACITIES * capacity_of(learned);
    if (now >= learned->decay_at || learned->decay_at - now > decay) {
        halve(learned);
        learned->decay_at = now + decay;
    }
}

/* ---- the victim ---------------------------------------------------------------------------- */

struct choice {
    uint64_t block; /* SHMC_NO_INDEX: none yet */
    uint64_t worth;
    uint64_t clock;
};

static void consider(const struct shmc_handle *handle, uint32_t kind, uint32_t next, bool newest,
                     struct choice *choice)
{
    const struct learned *learned = learned_of(handle);
    if (next == 0 || next > handle->header.geometry.blocks_max)
        return;
    uint64_t clock = SHMC_POLICY_CLOCK(handle->blocks[next - 1].policy);
    uint64_t worth = learned->worth[kind][bucket_of(learned, since(handle, clock))];
    bool better = choice->block == SHMC_NO_INDEX || worth < choice->worth ||
                  (worth == choice->worth && !newest && clock < choice->clock);
    /* The newest is leased as a rule, by whoever stores the run that it ends; the oldest not. */
    if (better && !(newest && shmc_is_pinned(handle, next - 1)))
        *choice = (struct choice){.block = next - 1, .worth = worth, .clock = clock};
}

uint64_t shmc_adaptive_victim(const struct shmc_handle *handle, const struct shmc_class *class)
{
    struct choice choice = {.block = SHMC_NO_INDEX};
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        uint32_t oldest = SHMC_LOW(class->ends[kind]);
        consider(handle, kind, oldest, false, &choice);
        if (oldest != 0 && oldest <= handle->header.geometry.blocks_max)
            consider(handle, kind, SHMC_HIGH(handle->blocks[oldest - 1].links), false, &choice);
    }
    for (uint32_t kind = 0; kind < KINDS; kind++)
        consider(handle, kind, SHMC_HIGH(class->ends[kind]), true, &choice);
    return choice.block;
}
