/* pins.c: leasing a block without a lock, and what makes that safe.
 *
 * Why         A hit must cost a few cache misses, whatever other processes do; two readers of one
 *             block must not share a written cache line; and what a killed reader held must be
 *             findable.
 * Contract    A pin is one bit: row of the owner, column of the block. Only its owner sets and
 *             clears it, or a cleaner of the dead owner under the lock. To lease: set the bit,
 *             then read the state, then compare the key; anything unexpected: undo and miss. To
 *             evict (room.c, under the lock): exchange the state to EVICTING, then read the bit in
 *             every active row; any set: put the state back. Both sides are seq_cst, so one
 *             of them sees the other.
 * Invariants  G3, G4. A bit is set while the process's count for its block is not 0: count and bit
 *             change together under the leaf lock, failed attempts included, for a second thread
 *             must not clear what the first relies on. No transition of a block touches a pin; a
 *             stray bit on a FREE block only delays.
 * Concurrency The leaf lock is a spin lock of this process. It may be taken while holding the
 *             segment's lock only by trying (operations.c), and nothing is awaited under it.
 * Death       Bits remain; reclaim clears the row of the dead owner.
 * Source      DESIGN "Pins"; the store-load race and the lost-bit races that this order excludes
 *             each have a mutant.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

#define SPINS_BEFORE_YIELD 200u
#define MATCH_CHUNK 64u /* keys in flight at once: hides the misses of one behind the others */
#define DECISION_NS 50000000ull /* one wait for the lock, when a block's fate is open */
#define DECISION_WAITS_MAX 200u

/* ---- the leaf lock ------------------------------------------------------------------------- */

bool shmc_leaf_try(struct shmc_handle *handle)
{
#ifdef SHMC_MUTANT_NAIVE_COUNTS
    (void)handle;
    return true;
#endif
    for (uint32_t spins = 0; spins < SPINS_BEFORE_YIELD; spins++) {
        if (shmc_exchange32_acquire(&handle->leaf, 1) == 0)
            return true;
        shmc_cpu_relax();
    }
    return false;
}

void shmc_leaf_enter(struct shmc_handle *handle)
{
    while (!shmc_leaf_try(handle))
        shmc_os_yield();
}

void shmc_leaf_leave(struct shmc_handle *handle)
{
    shmc_store32_release(&handle->leaf, 0);
}

/* ---- bits ---------------------------------------------------------------------------------- */

uint64_t *shmc_pin_row(const struct shmc_handle *handle, uint32_t slot)
{
    uint8_t *pins = shmc_region(handle, SHMC_REGION_PINS);
    return (uint64_t *)(pins + slot * shmc_pin_row_bytes(handle->header.geometry.blocks_max));
}

static uint64_t bit_of(uint64_t block)
{
    return 1ull << block % 64;
}

/* The owner's threads change its row under the leaf lock, and no other process does while it lives:
 * plain stores, which the caller fences. */
void shmc_pin(struct shmc_handle *handle, uint64_t block)
{
    uint64_t *word = &handle->row[block / 64];
#ifdef SHMC_MUTANT_NAIVE_COUNTS
    if (shmc_add32_seq_cst(&handle->counts[block], 1) == 0)
        shmc_or_seq_cst(word, bit_of(block));
#else
    if (handle->counts[block]++ == 0)
        shmc_store_release(word, shmc_load_relaxed(word) | bit_of(block));
#endif
}

/* Between setting bits and reading states: one of reader and evictor sees the other. */
static void fence_pins(void)
{
#ifndef SHMC_MUTANT_NO_READER_FENCE
    shmc_fence_seq_cst();
#endif
}

/* True when it was the last lease of this process. What was read before is read: release. */
bool shmc_unpin(struct shmc_handle *handle, uint64_t block)
{
#ifdef SHMC_MUTANT_NAIVE_COUNTS
    if (shmc_add32_seq_cst(&handle->counts[block], UINT32_MAX) != 1)
        return false;
    shmc_and_seq_cst(&handle->row[block / 64], ~bit_of(block));
#else
    uint64_t *word = &handle->row[block / 64];
    SHMC_ASSERT(handle->counts[block] > 0);
    if (--handle->counts[block] != 0)
        return false;
    shmc_store_release(word, shmc_load_relaxed(word) & ~bit_of(block));
#endif
    return true;
}

bool shmc_is_pinned(const struct shmc_handle *handle, uint64_t block)
{
#ifdef SHMC_MUTANT_BLIND_EVICTION
    return false;
#endif
    uint64_t row_words = shmc_pin_row_bytes(handle->header.geometry.blocks_max) / sizeof(uint64_t);
    const uint64_t *column = shmc_pin_row(handle, 0) + block / 64;
    for (uint32_t word = 0; word * 64 < handle->header.geometry.owners_max; word++) {
        uint64_t active = shmc_load_relaxed(&handle->control->active[word]);
        for (; active != 0; active &= active - 1) {
            uint64_t slot = word * 64 + (uint64_t)__builtin_ctzll(active);
            if (slot >= handle->header.geometry.owners_max)
                break;
            if ((shmc_load_seq_cst(column + slot * row_words) & bit_of(block)) != 0)
                return true;
        }
    }
    return false;
}

/* ---- counters and the access ring ---------------------------------------------------------- */

struct shmc_ring *shmc_ring_of(const struct shmc_handle *handle, uint32_t slot)
{
    uint8_t *rings = shmc_region(handle, SHMC_REGION_RINGS);
    return (struct shmc_ring *)(rings + slot * shmc_ring_bytes(&handle->header));
}

static void count(struct shmc_handle *handle, enum shmc_counter counter, uint64_t more)
{
    struct shmc_telemetry_row *rows = shmc_region(handle, SHMC_REGION_TELEMETRY);
    uint64_t *word = &rows[handle->slot].counters[counter];
    shmc_store_release(word, shmc_load_relaxed(word) + more);
}

/* Appends the last of the leases first, as many as the ring has room for; returns how many are
 * left. */
static uint64_t push(struct shmc_handle *handle, const struct shmc_lease *leases, uint64_t left)
{
    struct shmc_ring *ring = shmc_ring_of(handle, handle->slot);
    uint64_t entries = handle->header.ring_entries;
    uint64_t head = shmc_load_relaxed(&ring->head);
    uint64_t end = shmc_load_acquire(&ring->tail) + entries;
    for (; left > 0 && head != end; left--, head++)
        shmc_ring_entries(ring)[head & (entries - 1)] =
            SHMC_BLOCK_NAME(leases[left - 1].block, leases[left - 1].generation);
    shmc_store_release(&ring->head, head);
    return left;
}

/* Tells the policy of the hits, the last one first, so that the start of a run is the youngest.
 * Called and left with the leaf lock held, which it leaves in between. */
static void note_hits(struct shmc_handle *handle, const struct shmc_lease *leases, uint64_t found)
{
    count(handle, SHMC_COUNTER_HITS, found);
    uint64_t left = push(handle, leases, found);
    for (uint64_t before = 0; left != 0 && left != before; left = push(handle, leases, left)) {
        struct shmc_request request = {.operation = SHMC_OP_DRAIN};
        before = left;
        shmc_leaf_leave(handle);
        shmc_perform(handle, &request, 0); /* when the lock is taken, the policy loses some hits */
        shmc_leaf_enter(handle);
    }
    if (left != 0)
        count(handle, SHMC_COUNTER_RING_LOST, left);
}

/* ---- leasing ------------------------------------------------------------------------------- */

/* What a pinned block is, if it is published under the key and lies in the arena. */
static bool read_pinned(const struct shmc_handle *handle, uint64_t index, const uint64_t *key,
                        struct shmc_lease *lease)
{
    const struct shmc_block *block = &handle->blocks[index];
#ifndef SHMC_MUTANT_NO_REREAD
    if (SHMC_BLOCK_STATE(shmc_load_seq_cst(&block->state)) != SHMC_BLOCK_PUBLISHED)
        return false;
#endif
    *lease = (struct shmc_lease){
        .block = index,
        .generation = shmc_load_relaxed(&block->generation),
        .place = shmc_load_relaxed(&block->place),
        .bytes = shmc_load_relaxed(&block->bytes),
    };
    return shmc_same_key(block->key, key) && shmc_fits_arena(handle, lease->place, lease->bytes);
}

/* Pins what an entry of the index names, for it may be what is looked for; false: it cannot be. */
static bool pin_candidate(struct shmc_handle *handle, uint64_t block)
{
#ifdef SHMC_MUTANT_NO_REREAD
    if (SHMC_BLOCK_STATE(shmc_load_acquire(&handle->blocks[block].state)) != SHMC_BLOCK_PUBLISHED)
        return false; /* looked at before the bit is set, and never again */
#endif
    shmc_pin(handle, block);
    return true;
}

static bool matches(const struct shmc_handle *handle, uint64_t word, uint64_t tag, uint64_t *block)
{
    return shmc_index_matches(word, tag, block) && *block < handle->header.geometry.blocks_max;
}

/* Each entry of a bucket that has the tag: pin, look, undo when it is something else. */
static bool lease_from(struct shmc_handle *handle, const uint64_t *bucket, uint64_t tag,
                       const uint64_t *key, struct shmc_lease *lease)
{
    for (uint32_t i = 0; i < SHMC_BUCKET_ENTRIES; i++) {
        uint64_t block;
        if (!matches(handle, shmc_load_acquire(&bucket[i]), tag, &block) ||
            !pin_candidate(handle, block))
            continue;
        fence_pins();
        if (read_pinned(handle, block, key, lease))
            return true;
        shmc_unpin(handle, block);
    }
    return false;
}

static bool lease_key(struct shmc_handle *handle, const struct shmc_key_hash *hash,
                      const uint64_t *key, struct shmc_lease *lease)
{
    return lease_from(handle, hash->first, hash->tag, key, lease) ||
           lease_from(handle, hash->second, hash->tag, key, lease);
}

/* The first block of a bucket that has the tag, or SHMC_NO_INDEX; asks for the lines that leasing
 * it needs. */
static uint64_t foresee(const struct shmc_handle *handle, const uint64_t *bucket, uint64_t tag)
{
    for (uint32_t i = 0; i < SHMC_BUCKET_ENTRIES; i++) {
        uint64_t block;
        if (!matches(handle, shmc_load_acquire(&bucket[i]), tag, &block))
            continue;
        shmc_prefetch(&handle->blocks[block]);
        shmc_prefetch(&handle->counts[block]);
        shmc_prefetch(&handle->row[block / 64]);
        return block;
    }
    return SHMC_NO_INDEX;
}

/* Leases the first keys of a chunk; returns how many before the first that is absent. Memory is
 * read in passes, so that the misses of one key hide behind those of the others; one fence serves
 * all bits. */
static uint64_t lease_chunk(struct shmc_handle *handle, const uint64_t *keys, uint64_t keys_count,
                            struct shmc_lease *leases)
{
    struct shmc_key_hash hashes[MATCH_CHUNK];
    uint64_t blocks[MATCH_CHUNK]; /* candidates */
    uint64_t pinned = 0, found = 0;
    for (uint64_t i = 0; i < keys_count; i++) {
        hashes[i] = shmc_index_hash(handle, keys + i * SHMC_KEY_WORDS);
        shmc_prefetch(hashes[i].first);
    }
    for (uint64_t i = 0; i < keys_count; i++) {
        blocks[i] = foresee(handle, hashes[i].first, hashes[i].tag);
        if (blocks[i] == SHMC_NO_INDEX)
            shmc_prefetch(hashes[i].second);
    }
    for (uint64_t i = 0; i < keys_count; i++)
        if (blocks[i] == SHMC_NO_INDEX)
            blocks[i] = foresee(handle, hashes[i].second, hashes[i].tag);
    while (pinned < keys_count && blocks[pinned] != SHMC_NO_INDEX &&
           pin_candidate(handle, blocks[pinned]))
        pinned++;
    if (pinned != 0)
        fence_pins();
    for (; found < pinned; found++) {
        const uint64_t *key = keys + found * SHMC_KEY_WORDS;
        if (read_pinned(handle, blocks[found], key, &leases[found]))
            continue;
        shmc_unpin(handle, blocks[found]);
        if (!lease_key(handle, &hashes[found], key, &leases[found]))
            break; /* with its bit undone */
    }
    for (uint64_t i = found + 1; i < pinned; i++)
        shmc_unpin(handle, blocks[i]);
    return found;
}

/* Whether this process may lease at all: as admission() in operations.c, without the lock. */
static enum shmc_status may_lease(const struct shmc_handle *handle)
{
    if (!shmc_is_mine(handle))
        return SHMC_FORKED;
    enum shmc_status status = shmc_ended(handle);
    if (status != SHMC_OK)
        return status;
    if (handle->arena_bytes == 0)
        return SHMC_NO_ARENA;
    if (handle->slot == SHMC_NO_SLOT || handle->counts == NULL)
        return SHMC_NOT_JOINED;
    const struct shmc_owner *owner = &handle->owners[handle->slot];
    bool mine = shmc_load_relaxed(&owner->nonce) == handle->nonce &&
                shmc_load_relaxed(&owner->state) == SHMC_OWNER_ACTIVE;
    return mine ? SHMC_OK : SHMC_LOST_SLOT;
}

enum shmc_status shmc_match(struct shmc_handle *handle, const uint64_t *keys, uint64_t keys_count,
                            struct shmc_lease *leases, uint64_t *found)
{
    *found = 0;
    enum shmc_status status = may_lease(handle);
    if (status != SHMC_OK || keys_count == 0)
        return status;
    bool missed = false;
    shmc_leaf_enter(handle);
    while (*found < keys_count && !missed) {
        uint64_t chunk = keys_count - *found < MATCH_CHUNK ? keys_count - *found : MATCH_CHUNK;
        uint64_t got = lease_chunk(handle, keys + *found * SHMC_KEY_WORDS, chunk, leases + *found);
        *found += got;
        missed = got != chunk;
    }
    if (missed)
        count(handle, SHMC_COUNTER_MISSES, 1);
    if (*found != 0)
        note_hits(handle, leases, *found);
    shmc_leaf_leave(handle);
    return SHMC_OK;
}

bool shmc_contains(struct shmc_handle *handle, const uint64_t *key, struct shmc_lease *lease)
{
    if (may_lease(handle) != SHMC_OK)
        return false;
    struct shmc_key_hash hash = shmc_index_hash(handle, key);
    shmc_leaf_enter(handle);
    bool found = lease_key(handle, &hash, key, lease);
    if (found)
        shmc_unpin(handle, lease->block);
    shmc_leaf_leave(handle);
    return found;
}

bool shmc_stat(struct shmc_handle *handle, const uint64_t *key, struct shmc_block_stat *stat)
{
    struct shmc_lease lease;
    if (!shmc_contains(handle, key, &lease))
        return false;
    const struct shmc_block *block = &handle->blocks[lease.block];
    struct shmc_slab *slab;
    struct shmc_class *class;
    *stat = (struct shmc_block_stat){
        .bytes = lease.bytes,
        .generation = lease.generation,
        .uses = SHMC_POLICY_USES(shmc_load_relaxed(&block->policy)),
        .is_protected = (shmc_load_relaxed(&block->flags) & SHMC_BLOCK_PROTECTED) != 0,
        .leased = shmc_is_pinned(handle, lease.block),
    };
    if (shmc_slab_of(handle, lease.block, &slab, &class) == SHMC_OK)
        stat->capacity = shmc_load_relaxed(&class->block_bytes);
    return true;
}

void shmc_release(struct shmc_handle *handle, const struct shmc_lease *leases,
                  uint64_t leases_count)
{
    bool last = false;
    if (!shmc_is_mine(handle) || handle->counts == NULL)
        return;
    shmc_leaf_enter(handle);
    for (uint64_t i = 0; i < leases_count; i++)
        last |= shmc_unpin(handle, leases[i].block);
    shmc_leaf_leave(handle);
    if (!last)
        return;
    shmc_fence_seq_cst(); /* who waits by now is seen, or sees that the bits have gone */
    shmc_wake_waiters(handle);
}

/* The state of a block that nobody is trying: EVICTING lasts no longer than the lock is held. */
static uint64_t decided_state(struct shmc_handle *handle, const struct shmc_block *block)
{
    uint64_t state = SHMC_BLOCK_STATE(shmc_load_seq_cst(&block->state));
    for (uint32_t waits = 0; state == SHMC_BLOCK_EVICTING && waits < DECISION_WAITS_MAX; waits++) {
        struct shmc_request request = {.operation = SHMC_OP_REPORT};
        shmc_perform(handle, &request, DECISION_NS);
        state = SHMC_BLOCK_STATE(shmc_load_seq_cst(&block->state));
    }
    return state;
}

/* In a forked child, whose handle is new: leases the very blocks that the parent's views show, if
 * they still are what they were. A miss would not do here: a block that is leased may be tried for
 * eviction at any moment, and stays. */
bool shmc_lease_again(struct shmc_handle *handle, const struct shmc_lease *lease)
{
    if (may_lease(handle) != SHMC_OK || lease->block >= handle->header.geometry.blocks_max)
        return false;
    const struct shmc_block *block = &handle->blocks[lease->block];
    shmc_leaf_enter(handle);
    shmc_pin(handle, lease->block);
    fence_pins();
    shmc_leaf_leave(handle);
    uint64_t state = decided_state(handle, block);
    bool same = (state == SHMC_BLOCK_PUBLISHED || state == SHMC_BLOCK_DOOMED) &&
                shmc_load_relaxed(&block->generation) == lease->generation;
    if (!same)
        shmc_release(handle, lease, 1);
    return same;
}

const uint8_t *shmc_read_address(const struct shmc_handle *handle, const struct shmc_lease *lease)
{
    return handle->read_base + lease->place;
}

uint8_t *shmc_write_address(const struct shmc_handle *handle, const struct shmc_lease *lease)
{
    return handle->write_base + lease->place;
}

uint64_t shmc_read_counter(const struct shmc_handle *handle, uint32_t slot,
                           enum shmc_counter counter)
{
    const struct shmc_telemetry_row *rows = shmc_region(handle, SHMC_REGION_TELEMETRY);
    return shmc_load_relaxed(&rows[slot].counters[counter]);
}

/* The sessions' words of a row follow each other. */
static uint64_t *told_word(const struct shmc_handle *handle, uint32_t slot, uint32_t word)
{
    struct shmc_telemetry_row *row =
        (struct shmc_telemetry_row *)shmc_region(handle, SHMC_REGION_TELEMETRY) + slot;
    return word < SHMC_SESSION_COUNTERS_MAX ? &row->sessions[word]
                                            : &row->gauges[word - SHMC_SESSION_COUNTERS_MAX];
}

void shmc_tell(struct shmc_handle *handle, uint32_t word, uint64_t more)
{
    if (handle->slot != SHMC_NO_SLOT && word < SHMC_SESSION_WORDS)
        shmc_add_relaxed(told_word(handle, handle->slot, word), more);
}

uint64_t shmc_told(const struct shmc_handle *handle, uint32_t word)
{
    uint64_t sum = 0;
    for (uint32_t slot = 0; slot < handle->header.geometry.owners_max; slot++)
        sum += shmc_load_relaxed(told_word(handle, slot, word));
    return sum;
}
