/* accounts.c: managers, reservations and the totals of the four axes.
 *
 * Contract    Called with the lock held by a joined owner. Validate first, then one redo record;
 *             a refusal has changed nothing. The rules of each call are contract/pool.md
 *             sections 6-9.
 * Invariants  G1: a total changes only in the same record as the entry that explains it. G2: a
 *             reservation is compared with the limit and charged under one holding of the lock.
 *             An owner's held word counts the LIVE entries that name it; a slot with held != 0
 *             is never FREE, so no entry outlives its owner unnoticed.
 * Death       Redo: wholly before or wholly after. A payload written before the commit belongs
 *             to a FREE entry and means nothing; only its generation may have skipped a number.
 * Errors      Numbers that cannot be (a total below its parts, an index out of its table) are
 *             damage.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

/* ---- totals -------------------------------------------------------------------------------- */

static bool add_usage(uint64_t *sum, const uint64_t *usage)
{
    bool overflow = false;
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        overflow |= __builtin_add_overflow(sum[axis], usage[axis], &sum[axis]);
    return !overflow;
}

static bool subtract_usage(uint64_t *sum, const uint64_t *usage)
{
    bool underflow = false;
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        underflow |= __builtin_sub_overflow(sum[axis], usage[axis], &sum[axis]);
    return !underflow;
}

static void put_current(struct shmc_handle *handle, const uint64_t *current)
{
    struct shmc_control *control = handle->control;
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        if (current[axis] != control->current[axis])
            shmc_redo_put(handle, &control->current[axis], current[axis]);
}

/* A peak is the largest admitted level: an axis above its limit leaves its peak alone. */
static void put_current_and_peaks(struct shmc_handle *handle, const uint64_t *current)
{
    struct shmc_control *control = handle->control;
    put_current(handle, current);
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        if (current[axis] <= handle->header.geometry.limits[axis] &&
            current[axis] > control->peak[axis])
            shmc_redo_put(handle, &control->peak[axis], current[axis]);
}

/* ---- entries ------------------------------------------------------------------------------- */

/* Finds a FREE entry and puts its removal from the free list into the record. */
enum shmc_status shmc_entry_take(struct shmc_handle *handle, struct shmc_table *table,
                                 uint64_t *index)
{
    uint64_t free = *table->free;
    uint64_t mark = *table->mark;
    SHMC_CHECK(mark <= table->max);
    if (free != SHMC_NO_INDEX) {
        SHMC_CHECK(free < mark && table->entries[free].state == SHMC_ENTRY_FREE);
        shmc_redo_put(handle, table->free, table->entries[free].next);
        *index = free;
        return SHMC_OK;
    }
    if (mark == table->max)
        return table->full;
    SHMC_CHECK(table->entries[mark].state == SHMC_ENTRY_FREE);
    shmc_redo_put(handle, table->mark, mark + 1);
    *index = mark;
    return SHMC_OK;
}

/* Fills a taken entry and makes it LIVE when the record commits. */
void shmc_entry_put_live(struct shmc_handle *handle, struct shmc_table *table, uint64_t index,
                         const uint64_t *usage, uint64_t id, struct shmc_token *token)
{
    struct shmc_entry *entry = &table->entries[index];
    struct shmc_owner *owner = &handle->owners[handle->slot];
    memcpy(entry->usage, usage, sizeof entry->usage);
    entry->generation++;
    entry->id = id;
    token->index = index;
    token->generation = entry->generation;
    shmc_redo_put(handle, &entry->state, SHMC_ENTRY_LIVE_OF(handle->slot));
    shmc_redo_put(handle, table->live, *table->live + 1);
    shmc_redo_put(handle, &owner->held, owner->held + 1);
}

void shmc_entry_put_free(struct shmc_handle *handle, struct shmc_table *table, uint64_t index,
                         uint32_t slot)
{
    struct shmc_entry *entry = &table->entries[index];
    struct shmc_owner *owner = &handle->owners[slot];
    shmc_redo_put(handle, &entry->state, SHMC_ENTRY_FREE);
    shmc_redo_put(handle, &entry->next, *table->free);
    shmc_redo_put(handle, table->free, index);
    shmc_redo_put(handle, table->live, *table->live - 1);
    shmc_redo_put(handle, &owner->held, owner->held - 1);
}

/* STALE when the token's entry was given back already, by reclaim or by another thread. */
enum shmc_status shmc_entry_find(struct shmc_handle *handle, struct shmc_table *table,
                                 uint32_t slot, struct shmc_token token)
{
    if (token.index >= table->max)
        return SHMC_STALE;
    const struct shmc_entry *entry = &table->entries[token.index];
    if (entry->state != SHMC_ENTRY_LIVE_OF(slot) || entry->generation != token.generation)
        return SHMC_STALE;
    SHMC_CHECK(*table->live > 0 && handle->owners[slot].held > 0);
    return SHMC_OK;
}

/* ---- the manager index: id -> entry, chained ----------------------------------------------- */

uint64_t shmc_manager_bucket(const struct shmc_handle *handle, uint64_t id)
{
    return ((id * 0x9e3779b97f4a7c15ull) >> 32) & (handle->header.manager_buckets - 1);
}

/* The word that links to the manager: its bucket, or the next word of its predecessor; its value is
 * SHMC_NO_INDEX when the id is not registered. A chain longer than the table is damage. */
static enum shmc_status find_link(struct shmc_handle *handle, uint64_t id, uint64_t **link)
{
    uint64_t *word = &handle->manager_index[shmc_manager_bucket(handle, id)];
    for (uint64_t steps = 0; *word != SHMC_NO_INDEX; steps++) {
        SHMC_CHECK(*word < handle->managers.max && steps < handle->managers.max);
        struct shmc_entry *entry = &handle->managers.entries[*word];
        SHMC_CHECK(SHMC_ENTRY_STATE(entry->state) == SHMC_ENTRY_LIVE);
        if (entry->id == id)
            break;
        word = &entry->next;
    }
    *link = word;
    return SHMC_OK;
}

static enum shmc_status find_manager(struct shmc_handle *handle, uint64_t id,
                                     struct shmc_entry **entry)
{
    uint64_t *link;
    enum shmc_status status = find_link(handle, id, &link);
    if (status != SHMC_OK)
        return status;
    if (*link == SHMC_NO_INDEX)
        return SHMC_UNKNOWN_MANAGER;
    *entry = &handle->managers.entries[*link];
    return SHMC_OK;
}

/* An id nobody uses; at most one try more than there are managers. */
static enum shmc_status choose_id(struct shmc_handle *handle, uint64_t *id)
{
    uint64_t candidate = handle->control->manager_id_next;
    for (uint64_t tries = 0; tries <= handle->managers.max; tries++, candidate++) {
        uint64_t *link;
        enum shmc_status status = find_link(handle, candidate, &link);
        if (status != SHMC_OK)
            return status;
        if (*link == SHMC_NO_INDEX) {
            *id = candidate;
            return SHMC_OK;
        }
    }
    return SHMC_CORRUPT;
}

/* ---- requests ------------------------------------------------------------------------------ */

enum shmc_status shmc_accounts_register(struct shmc_handle *handle, struct shmc_request *request)
{
    static const uint64_t nothing[SHMC_AXES];
    struct shmc_table *table = &handle->managers;
    uint64_t *link;
    uint64_t index;
    enum shmc_status status = SHMC_OK;
    if (request->allocate_id)
        status = choose_id(handle, &request->id);
    if (status == SHMC_OK)
        status = find_link(handle, request->id, &link);
    if (status == SHMC_OK && *link != SHMC_NO_INDEX)
        status = SHMC_DUPLICATE_MANAGER;
    shmc_redo_begin(handle, SHMC_OP_REGISTER);
    if (status == SHMC_OK)
        status = shmc_entry_take(handle, table, &index);
    if (status != SHMC_OK)
        return status;
    uint64_t *bucket = &handle->manager_index[shmc_manager_bucket(handle, request->id)];
    shmc_entry_put_live(handle, table, index, nothing, request->id, &request->token);
    shmc_redo_put(handle, &table->entries[index].next, *bucket);
    shmc_redo_put(handle, bucket, index);
    if (request->allocate_id)
        shmc_redo_put(handle, &handle->control->manager_id_next, request->id + 1);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* Puts "the manager's usage becomes usage, and released goes" into the record. */
static enum shmc_status put_publication(struct shmc_handle *handle, struct shmc_entry *manager,
                                        const uint64_t *released, struct shmc_request *request)
{
    uint64_t *current = request->aggregate;
    memcpy(current, handle->control->current, sizeof request->aggregate);
    SHMC_CHECK(subtract_usage(current, manager->usage));
    SHMC_CHECK(released == NULL || subtract_usage(current, released));
    if (!add_usage(current, request->usage))
        return SHMC_PUBLICATION_OVERFLOW;
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        if (manager->usage[axis] != request->usage[axis])
            shmc_redo_put(handle, &manager->usage[axis], request->usage[axis]);
    put_current_and_peaks(handle, current);
    return SHMC_OK;
}

enum shmc_status shmc_accounts_update(struct shmc_handle *handle, struct shmc_request *request)
{
    struct shmc_entry *manager;
    enum shmc_status status = find_manager(handle, request->id, &manager);
    shmc_redo_begin(handle, SHMC_OP_UPDATE);
    if (status == SHMC_OK)
        status = put_publication(handle, manager, NULL, request);
    if (status == SHMC_OK)
        shmc_redo_commit(handle);
    return status;
}

enum shmc_status shmc_accounts_publish_and_release(struct shmc_handle *handle,
                                                   struct shmc_request *request)
{
    struct shmc_table *table = &handle->reservations;
    struct shmc_entry *manager;
    enum shmc_status status = find_manager(handle, request->id, &manager);
    if (status == SHMC_OK)
        status = shmc_entry_find(handle, table, handle->slot, request->token);
    shmc_redo_begin(handle, SHMC_OP_PUBLISH_AND_RELEASE);
    if (status == SHMC_OK)
        status =
            put_publication(handle, manager, table->entries[request->token.index].usage, request);
    if (status != SHMC_OK)
        return status;
    shmc_entry_put_free(handle, table, request->token.index, handle->slot);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* Overflow is looked for on all axes before any budget; an axis asked for 0 is never compared. */
static enum shmc_status admit(struct shmc_handle *handle, struct shmc_request *request,
                              uint64_t *current)
{
    const uint64_t *limits = handle->header.geometry.limits;
    memcpy(current, handle->control->current, sizeof handle->control->current);
    if (!add_usage(current, request->usage))
        return SHMC_ADMISSION_OVERFLOW;
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++) {
        if (request->usage[axis] == 0 || current[axis] <= limits[axis])
            continue;
        request->axis = axis;
        request->required = current[axis];
        request->budget = limits[axis];
        return SHMC_BUDGET_EXCEEDED;
    }
    return SHMC_OK;
}

enum shmc_status shmc_accounts_reserve(struct shmc_handle *handle, struct shmc_request *request)
{
    uint64_t current[SHMC_AXES];
    uint64_t index;
    enum shmc_status status = admit(handle, request, current);
    shmc_redo_begin(handle, SHMC_OP_RESERVE);
    if (status == SHMC_OK)
        status = shmc_entry_take(handle, &handle->reservations, &index);
    if (status != SHMC_OK)
        return status;
    shmc_entry_put_live(handle, &handle->reservations, index, request->usage, 0, &request->token);
    put_current_and_peaks(handle, current);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* Subtracts what an entry charges and frees it; link is the manager's, or NULL. */
static enum shmc_status release(struct shmc_handle *handle, struct shmc_table *table, uint32_t slot,
                                uint64_t index, uint64_t *link)
{
    uint64_t current[SHMC_AXES];
    memcpy(current, handle->control->current, sizeof current);
    SHMC_CHECK(subtract_usage(current, table->entries[index].usage));
    put_current(handle, current);
    if (link != NULL)
        shmc_redo_put(handle, link, table->entries[index].next);
    shmc_entry_put_free(handle, table, index, slot);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

enum shmc_status shmc_accounts_release_manager(struct shmc_handle *handle, uint32_t owner,
                                               struct shmc_token token)
{
    uint64_t *link;
    enum shmc_status status = shmc_entry_find(handle, &handle->managers, owner, token);
    if (status == SHMC_OK)
        status = find_link(handle, handle->managers.entries[token.index].id, &link);
    if (status != SHMC_OK)
        return status;
    SHMC_CHECK(*link == token.index);
    shmc_redo_begin(handle, SHMC_OP_RELEASE_MANAGER);
    return release(handle, &handle->managers, owner, token.index, link);
}

enum shmc_status shmc_accounts_release_reservation(struct shmc_handle *handle, uint32_t owner,
                                                   struct shmc_token token)
{
    enum shmc_status status = shmc_entry_find(handle, &handle->reservations, owner, token);
    if (status != SHMC_OK)
        return status;
    shmc_redo_begin(handle, SHMC_OP_RELEASE_RESERVATION);
    return release(handle, &handle->reservations, owner, token.index, NULL);
}

/* Of a dead manager whose files are still there, only what they occupy stays charged; released
 * receives what is given back. */
enum shmc_status shmc_accounts_keep_disk(struct shmc_handle *handle, uint64_t index,
                                         uint64_t *released)
{
    struct shmc_entry *entry = &handle->managers.entries[index];
    uint64_t current[SHMC_AXES];
    memcpy(current, handle->control->current, sizeof current);
    memcpy(released, entry->usage, sizeof entry->usage);
    released[SHMC_DISK] = 0;
    SHMC_CHECK(subtract_usage(current, released));
    shmc_redo_begin(handle, SHMC_OP_RECLAIM_STEP);
    put_current(handle, current);
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        if (released[axis] != 0)
            shmc_redo_put(handle, &entry->usage[axis], 0);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* ---- for blocks.c ------------------------------------------------------------------------------
 */

enum shmc_status shmc_accounts_find_manager(struct shmc_handle *handle, uint64_t id)
{
    struct shmc_entry *manager;
    return find_manager(handle, id, &manager);
}

enum shmc_status shmc_accounts_find_reservation(struct shmc_handle *handle, struct shmc_token token)
{
    return shmc_entry_find(handle, &handle->reservations, handle->slot, token);
}

/* Puts "the reservation is given back" into the record of the allocation that it was made for. */
enum shmc_status shmc_accounts_put_consumed(struct shmc_handle *handle, struct shmc_token token)
{
    uint64_t current[SHMC_AXES];
    memcpy(current, handle->control->current, sizeof current);
    SHMC_CHECK(subtract_usage(current, handle->reservations.entries[token.index].usage));
    put_current(handle, current);
    shmc_entry_put_free(handle, &handle->reservations, token.index, handle->slot);
    return SHMC_OK;
}

/* ---- reading ----------------------------------------------------------------------------------
 */

void shmc_accounts_report(struct shmc_handle *handle, struct shmc_report *report)
{
    const struct shmc_control *control = handle->control;
    report->managers = control->managers;
    report->reservations = control->reservations;
    report->owners = control->owners;
    report->attach_seq = control->attach_seq;
    report->recoveries = control->recoveries;
    memcpy(report->current, control->current, sizeof report->current);
    memcpy(report->peak, control->peak, sizeof report->peak);
}

static enum shmc_status add_held(struct shmc_handle *handle, const struct shmc_table *table,
                                 struct shmc_held *rows)
{
    SHMC_CHECK(*table->mark <= table->max);
    for (uint64_t index = 0; index < *table->mark; index++) {
        const struct shmc_entry *entry = &table->entries[index];
        if (SHMC_ENTRY_STATE(entry->state) != SHMC_ENTRY_LIVE)
            continue;
        uint64_t slot = SHMC_ENTRY_OWNER(entry->state);
        SHMC_CHECK(slot < handle->header.geometry.owners_max);
        SHMC_CHECK(add_usage(rows[slot].usage, entry->usage));
        if (table == &handle->managers)
            rows[slot].managers++;
        else
            rows[slot].reservations++;
    }
    return SHMC_OK;
}

/* What each owner holds at this instant; O(entries ever used). */
enum shmc_status shmc_accounts_held(struct shmc_handle *handle, struct shmc_held *rows)
{
    memset(rows, 0, handle->header.geometry.owners_max * sizeof *rows);
    enum shmc_status status = add_held(handle, &handle->managers, rows);
    return status == SHMC_OK ? add_held(handle, &handle->reservations, rows) : status;
}
