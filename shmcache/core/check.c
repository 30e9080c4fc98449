/* check.c: recount and walk everything, trusting nothing.
 *
 * Contract    Called with the lock held, in any state of the pool. Changes nothing. Every loop
 *             is bounded by a table's size, whatever the words say. Findings beyond problems_max
 *             are counted only.
 * Invariants  Proves G1 (totals equal their recount) and that every entry is on exactly one
 *             list.
 * Cost        Linear in the entries ever used. It is the full walk; requests only make cheap
 *             checks.
 */
#include "internal.h"

#include <string.h>

void shmc_walk_report(struct shmc_walk *walk, enum shmc_problem_kind kind, uint64_t index,
                      uint64_t expected, uint64_t actual)
{
    struct shmc_request *request = walk->request;
    if (request->problems_count < request->problems_max)
        request->problems[request->problems_count] = (struct shmc_problem){
            .kind = kind, .index = index, .expected = expected, .actual = actual};
    request->problems_count++;
}

void shmc_walk_expect(struct shmc_walk *walk, enum shmc_problem_kind kind, uint64_t index,
                      uint64_t expected, uint64_t actual)
{
    if (expected != actual)
        shmc_walk_report(walk, kind, index, expected, actual);
}

/* The kinds of finding of one table. */
struct table_kinds {
    enum shmc_problem_kind count, state, owner, free_list;
    bool charged; /* a claim's usage is its key */
};

static void walk_live(struct shmc_walk *walk, const struct shmc_entry *entry, uint64_t index,
                      const struct table_kinds *kinds)
{
    struct shmc_handle *handle = walk->handle;
    uint64_t slot = SHMC_ENTRY_OWNER(entry->state);
    for (uint32_t axis = 0; axis < SHMC_AXES && kinds->charged; axis++)
        walk->overflow |=
            __builtin_add_overflow(walk->current[axis], entry->usage[axis], &walk->current[axis]);
    if (slot >= handle->header.geometry.owners_max ||
        handle->owners[slot].state == SHMC_OWNER_FREE) {
        shmc_walk_report(walk, kinds->owner, index, handle->header.geometry.owners_max, slot);
        return;
    }
    handle->scratch[slot]++;
}

/* FREE entries below the mark must be on the free list, and nothing else may be. */
static void walk_free_list(struct shmc_walk *walk, const struct shmc_table *table, uint64_t mark,
                           uint64_t free, const struct table_kinds *kinds)
{
    uint64_t listed = 0;
    uint64_t index = *table->free;
    for (; index != SHMC_NO_INDEX && listed <= free; listed++) {
        if (index >= mark || table->entries[index].state != SHMC_ENTRY_FREE) {
            shmc_walk_report(walk, kinds->free_list, index, mark, listed);
            return;
        }
        index = table->entries[index].next;
    }
    shmc_walk_expect(walk, kinds->free_list, SHMC_NO_INDEX, free, listed);
}

static void walk_table(struct shmc_walk *walk, const struct shmc_table *table,
                       const struct table_kinds *kinds)
{
    uint64_t mark = *table->mark;
    uint64_t live = 0;
    if (mark > table->max) {
        shmc_walk_report(walk, kinds->free_list, SHMC_NO_INDEX, table->max, mark);
        mark = table->max;
    }
    for (uint64_t index = 0; index < table->max; index++) {
        const struct shmc_entry *entry = &table->entries[index];
        if (SHMC_ENTRY_STATE(entry->state) == SHMC_ENTRY_LIVE && index < mark) {
            live++;
            walk_live(walk, entry, index, kinds);
        } else if (entry->state != SHMC_ENTRY_FREE) {
            shmc_walk_report(walk, kinds->state, index, SHMC_ENTRY_FREE, entry->state);
        }
    }
    shmc_walk_expect(walk, kinds->count, SHMC_NO_INDEX, live, *table->live);
    walk_free_list(walk, table, mark, mark - live, kinds);
}

/* Each LIVE claim is in the chain of its own key; chains hold nothing else. */
static void walk_claim_index(struct shmc_walk *walk)
{
    const struct shmc_handle *handle = walk->handle;
    uint64_t linked = 0;
    for (uint64_t bucket = 0; bucket < handle->header.claim_buckets; bucket++) {
        uint64_t index = handle->claim_index[bucket];
        for (; index != SHMC_NO_INDEX; linked++) {
            if (index >= handle->claims.max || linked >= handle->claims.max) {
                shmc_walk_report(walk, SHMC_PROBLEM_CLAIM_INDEX, bucket, handle->claims.max, index);
                return;
            }
            const struct shmc_entry *entry = &handle->claims.entries[index];
            if (SHMC_ENTRY_STATE(entry->state) != SHMC_ENTRY_LIVE ||
                shmc_claim_bucket(handle, entry->usage) != bucket)
                shmc_walk_report(walk, SHMC_PROBLEM_CLAIM_INDEX, bucket, entry->state, index);
            index = entry->next;
        }
    }
    shmc_walk_expect(walk, SHMC_PROBLEM_CLAIM_INDEX, SHMC_NO_INDEX, *handle->claims.live, linked);
}

/* Each LIVE manager is in the chain of its own id, once; chains hold nothing else. */
static void walk_manager_index(struct shmc_walk *walk)
{
    struct shmc_handle *handle = walk->handle;
    uint64_t linked = 0;
    for (uint64_t bucket = 0; bucket < handle->header.manager_buckets; bucket++) {
        uint64_t index = handle->manager_index[bucket];
        for (uint64_t first = index; index != SHMC_NO_INDEX; linked++) {
            if (index >= handle->managers.max || linked >= handle->managers.max) {
                shmc_walk_report(walk, SHMC_PROBLEM_MANAGER_INDEX, bucket, handle->managers.max,
                                 index);
                return;
            }
            const struct shmc_entry *entry = &handle->managers.entries[index];
            bool twice = index != first && handle->managers.entries[first].id == entry->id;
            if (SHMC_ENTRY_STATE(entry->state) != SHMC_ENTRY_LIVE || twice ||
                shmc_manager_bucket(handle, entry->id) != bucket)
                shmc_walk_report(walk, SHMC_PROBLEM_MANAGER_INDEX, bucket, entry->id, index);
            index = entry->next;
        }
    }
    shmc_walk_expect(walk, SHMC_PROBLEM_MANAGER_INDEX, SHMC_NO_INDEX, *handle->managers.live,
                     linked);
}

static void walk_owners(struct shmc_walk *walk)
{
    const struct shmc_handle *handle = walk->handle;
    uint64_t in_use = 0;
    for (uint32_t slot = 0; slot < handle->header.geometry.owners_max; slot++) {
        const struct shmc_owner *owner = &handle->owners[slot];
        if (owner->state > SHMC_OWNER_CLEANING)
            shmc_walk_report(walk, SHMC_PROBLEM_OWNER_STATE, slot, SHMC_OWNER_CLEANING,
                             owner->state);
        uint64_t active = handle->control->active[slot / 64] >> slot % 64 & 1;
        shmc_walk_expect(walk, SHMC_PROBLEM_OWNER_ACTIVE, slot, owner->state != SHMC_OWNER_FREE,
                         active);
        if (owner->state != SHMC_OWNER_FREE) {
            in_use++;
            if (owner->nonce == 0)
                shmc_walk_report(walk, SHMC_PROBLEM_OWNER_NONCE, slot, 1, 0);
            if (!shmc_paths_are_valid(owner->path, owner->path_bytes))
                shmc_walk_report(walk, SHMC_PROBLEM_OWNER_PATHS, slot, SHMC_OWNER_PATH_BYTES,
                                 owner->path_bytes);
        } else if (owner->path_bytes != 0) {
            shmc_walk_report(walk, SHMC_PROBLEM_OWNER_PATHS, slot, 0, owner->path_bytes);
        }
        shmc_walk_expect(walk, SHMC_PROBLEM_OWNER_HELD, slot, handle->scratch[slot], owner->held);
    }
    shmc_walk_expect(walk, SHMC_PROBLEM_OWNER_COUNT, SHMC_NO_INDEX, in_use,
                     handle->control->owners);
}

void shmc_check(struct shmc_handle *handle, struct shmc_request *request)
{
    static const struct table_kinds managers = {
        SHMC_PROBLEM_MANAGER_COUNT, SHMC_PROBLEM_MANAGER_STATE, SHMC_PROBLEM_MANAGER_OWNER,
        SHMC_PROBLEM_MANAGER_FREE_LIST, true};
    static const struct table_kinds reservations = {
        SHMC_PROBLEM_RESERVATION_COUNT, SHMC_PROBLEM_RESERVATION_STATE,
        SHMC_PROBLEM_RESERVATION_OWNER, SHMC_PROBLEM_RESERVATION_FREE_LIST, true};
    static const struct table_kinds claims = {SHMC_PROBLEM_CLAIM_COUNT, SHMC_PROBLEM_CLAIM_STATE,
                                              SHMC_PROBLEM_CLAIM_OWNER,
                                              SHMC_PROBLEM_CLAIM_FREE_LIST, false};
    struct shmc_walk walk = {.handle = handle, .request = request};
    const struct shmc_control *control = handle->control;
    request->problems_count = 0;
    memset(handle->scratch, 0, handle->header.geometry.owners_max * sizeof *handle->scratch);
    shmc_walk_expect(&walk, SHMC_PROBLEM_REDO_PENDING, 0, 0, handle->redo->commit);
    walk_table(&walk, &handle->managers, &managers);
    walk_table(&walk, &handle->reservations, &reservations);
    walk_table(&walk, &handle->claims, &claims);
    walk_manager_index(&walk);
    walk_claim_index(&walk);
    shmc_check_arena(&walk);
    walk_owners(&walk);
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++) {
        uint64_t limit = handle->header.geometry.limits[axis];
        if (walk.overflow || walk.current[axis] != control->current[axis])
            shmc_walk_report(&walk, SHMC_PROBLEM_TOTAL, axis, walk.current[axis],
                             control->current[axis]);
        if (control->peak[axis] > limit)
            shmc_walk_report(&walk, SHMC_PROBLEM_PEAK_ABOVE_LIMIT, axis, limit,
                             control->peak[axis]);
    }
}
