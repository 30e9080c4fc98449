/* blocks.c: the life of a block, as its owner sees it: allocate, seal, publish, withdraw.
 *
 * Why         A block is charged, filled by one owner and read by all; whoever is killed, it is
 *             never lost, never charged to nobody and never handed out half-written.
 * Contract    Called with the lock held; requests of an owner also with its leaf lock. A request
 *             that finds nothing free evicts (room.c), in chunks: MORE asks for the same call
 *             again.
 *
 *             FREE -> WRITING -> SEALED -> PUBLISHED -> EVICTING -> FREE
 *                         '--------^           |            '-> DOOMED -> FREE
 *
 * Invariants  G1: the charge of a block is the size of its class, in the same record as its state.
 *             An owner's held word counts its WRITING and SEALED blocks; its row of pins has a bit
 *             for each, set before the commit that makes it WRITING.
 * Death       Redo. WRITING and SEALED blocks of the dead become FREE by reclaim; published ones
 *             stay.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

#define TRIES_MAX   64u   /* evictions of one allocation while the lock is held */
#define STEP_WORDS  4096u /* words and pins of a row looked at in one chunk */
#define STEP_BLOCKS 256u

static struct shmc_block *block_at(const struct shmc_handle *handle, uint64_t index)
{
    return &handle->blocks[index];
}

bool shmc_block_is(const struct shmc_handle *handle, uint64_t name, enum shmc_block_state state)
{
    const struct shmc_block *block = block_at(handle, SHMC_NAMED_BLOCK(name));
    return SHMC_BLOCK_STATE(shmc_load_relaxed(&block->state)) == state &&
           SHMC_BLOCK_NAME(0, block->generation) == (name & ~(uint64_t)SHMC_BLOCK_NAME_MASK);
}

/* ---- allocate ------------------------------------------------------------------------------ */

/* Whether the host axis has room for the block, its reservation given back; if not, whether
 * evicting can help. */
static enum shmc_status admit(struct shmc_handle *handle, struct shmc_request *request,
                              uint64_t block_bytes)
{
    uint64_t limit = handle->header.geometry.limits[SHMC_HOST];
    uint64_t current = handle->control->current[SHMC_HOST];
    uint64_t reserved = request->has_reservation
                            ? handle->reservations.entries[request->token.index].usage[SHMC_HOST]
                            : 0;
    uint64_t after;
    SHMC_CHECK(reserved <= current && handle->control->used_bytes <= current);
    if (__builtin_add_overflow(current - reserved, block_bytes, &after))
        return SHMC_ADMISSION_OVERFLOW;
    if (after <= limit || after <= current)
        return SHMC_OK;
    request->axis = SHMC_HOST;
    request->required = after;
    request->budget = limit;
    return after - handle->control->used_bytes <= limit ? SHMC_PINNED : SHMC_BUDGET_EXCEEDED;
}

static enum shmc_status put_writing(struct shmc_handle *handle, struct shmc_request *request,
                                    struct shmc_class *class, uint64_t index)
{
    struct shmc_block *block = block_at(handle, index);
    struct shmc_owner *owner = &handle->owners[handle->slot];
    enum shmc_status status = SHMC_OK;
#ifdef SHMC_MUTANT_MASK_RESET
    for (uint32_t slot = 0; slot < handle->header.geometry.owners_max; slot++)
        shmc_and_seq_cst(&shmc_pin_row(handle, slot)[index / 64], ~(1ull << index % 64));
#endif
    block->generation++;
    block->bytes = request->bytes;
    block->manager = request->has_manager ? request->id + 1 : 0;
    block->parent = 0;
    block->checksum = 0;
    shmc_redo_put(handle, &block->state, SHMC_BLOCK_OF(SHMC_BLOCK_WRITING, handle->slot));
    if (request->has_reservation)
        status = shmc_accounts_put_consumed(handle, request->token);
    if (status == SHMC_OK)
        status = shmc_put_charge(handle, class, true);
    if (status != SHMC_OK)
        return status;
    uint64_t current = shmc_redo_get(handle, &handle->control->current[SHMC_HOST]);
    if (current > handle->control->peak[SHMC_HOST] &&
        current <= handle->header.geometry.limits[SHMC_HOST])
        shmc_redo_set(handle, &handle->control->peak[SHMC_HOST], current);
    shmc_redo_set(handle, &owner->held, shmc_redo_get(handle, &owner->held) + 1);
    request->lease = (struct shmc_lease){.block = index,
                                         .generation = block->generation,
                                         .place = block->place,
                                         .bytes = request->bytes};
    request->capacity = class->block_bytes;
    return SHMC_OK;
}

/* Everything that can be refused without looking at the arena. */
static enum shmc_status check_request(struct shmc_handle *handle, struct shmc_request *request)
{
    enum shmc_status status = SHMC_OK;
    if (handle->arena_bytes == 0)
        return SHMC_NO_ARENA;
    if (handle->counts == NULL)
        return SHMC_NOT_JOINED;
    if (request->bytes == 0 || request->bytes > handle->header.geometry.block_bytes_max)
        return SHMC_TOO_LARGE;
    if (request->has_manager)
        status = shmc_accounts_find_manager(handle, request->id);
    if (status == SHMC_OK && request->has_reservation)
        status = shmc_accounts_find_reservation(handle, request->token);
    return status;
}

enum shmc_status shmc_blocks_allocate(struct shmc_handle *handle, struct shmc_request *request)
{
    struct shmc_class *class;
    uint64_t index;
    enum shmc_status status = check_request(handle, request);
    if (status == SHMC_OK)
        status = shmc_class_find(handle, shmc_class_bytes(handle, request->bytes), &class);
    for (uint32_t tries = 0; status == SHMC_OK; tries++) {
        if (tries == TRIES_MAX)
            return SHMC_MORE;
        status = admit(handle, request, class->block_bytes);
        if (status == SHMC_PINNED) {
            status = shmc_make_host_room(handle, request);
            continue;
        }
        if (status == SHMC_OK)
            status = shmc_slab_take(handle, class, &index);
        if (status == SHMC_OK)
            break;
        if (status == SHMC_ARENA_FULL)
            status = shmc_make_room(handle, class, request);
    }
    if (status == SHMC_OK)
        status = put_writing(handle, request, class, index);
    if (status != SHMC_OK)
        return status;
    shmc_pin(handle, index); /* before the commit: a row lists all that its owner holds */
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* ---- what the owner does with its block ---------------------------------------------------- */

/* STALE unless the request's lease names a block that the owner still fills or keeps. */
static enum shmc_status find_private(struct shmc_handle *handle, const struct shmc_request *request,
                                     struct shmc_block **block)
{
    if (request->lease.block >= handle->header.geometry.blocks_max)
        return SHMC_STALE;
    *block = block_at(handle, request->lease.block);
    bool mine = (*block)->state == SHMC_BLOCK_OF(SHMC_BLOCK_WRITING, handle->slot) ||
                (*block)->state == SHMC_BLOCK_OF(SHMC_BLOCK_SEALED, handle->slot);
    if (!mine || (*block)->generation != request->lease.generation)
        return SHMC_STALE;
    SHMC_CHECK(handle->owners[handle->slot].held > 0);
    return SHMC_OK;
}

/* As find_private(), with the leaf lock held: this process knows the block as its own, too. */
static enum shmc_status find_pinned(struct shmc_handle *handle, const struct shmc_request *request,
                                    struct shmc_block **block)
{
    enum shmc_status status = find_private(handle, request, block);
    SHMC_CHECK(status != SHMC_OK || handle->counts[request->lease.block] > 0);
    return status;
}

enum shmc_status shmc_blocks_seal(struct shmc_handle *handle, struct shmc_request *request)
{
    struct shmc_block *block;
    enum shmc_status status = find_private(handle, request, &block);
    if (status != SHMC_OK)
        return status;
    shmc_redo_begin(handle, SHMC_OP_SEAL);
    shmc_redo_put(handle, &block->state, SHMC_BLOCK_OF(SHMC_BLOCK_SEALED, handle->slot));
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* WRITING, SEALED -> FREE: of the owner in the slot, which may be dead. Counted, if so asked. */
static enum shmc_status discard(struct shmc_handle *handle, uint64_t index, uint32_t slot,
                                uint64_t *counter)
{
    struct shmc_slab *slab;
    struct shmc_class *class;
    struct shmc_owner *owner = &handle->owners[slot];
    enum shmc_status status = shmc_slab_of(handle, index, &slab, &class);
    if (status != SHMC_OK)
        return status;
    SHMC_CHECK(owner->held > 0);
    shmc_redo_begin(handle, SHMC_OP_DISCARD);
    status = shmc_put_free(handle, index, class);
    if (status != SHMC_OK)
        return status;
    shmc_redo_set(handle, &owner->held, owner->held - 1);
    if (counter != NULL)
        shmc_redo_set(handle, counter, *counter + 1);
    shmc_redo_commit(handle);
    return shmc_retire_if_empty(handle, slab);
}

enum shmc_status shmc_blocks_discard(struct shmc_handle *handle, struct shmc_request *request)
{
    struct shmc_block *block;
    enum shmc_status status = find_pinned(handle, request, &block);
    if (status == SHMC_OK)
        status = discard(handle, request->lease.block, handle->slot, NULL);
    if (status == SHMC_OK)
        shmc_unpin(handle, request->lease.block);
    return status;
}

/* The parent that the request names, if it is still published, else SHMC_NO_INDEX. */
static uint64_t find_parent(const struct shmc_handle *handle, const struct shmc_request *request)
{
    uint64_t index = SHMC_NO_INDEX;
    if (request->parent_kind == SHMC_PARENT_KEY) {
        shmc_index_find(handle, request->parent_key, &index);
    } else if (request->parent_kind == SHMC_PARENT_LEASE) {
        uint64_t candidate = request->parent.block;
        if (candidate < handle->header.geometry.blocks_max &&
            shmc_block_is(handle, SHMC_BLOCK_NAME(candidate, request->parent.generation),
                          SHMC_BLOCK_PUBLISHED))
            index = candidate;
    }
    return index == request->lease.block ? SHMC_NO_INDEX : index;
}

/* The key is there already: the caller gets a lease on that block, and its own is freed. */
static enum shmc_status yield_to(struct shmc_handle *handle, struct shmc_request *request,
                                 uint64_t present)
{
    uint64_t own = request->lease.block;
    const struct shmc_block *block = block_at(handle, present);
    SHMC_CHECK(shmc_fits_arena(handle, block->place, block->bytes));
    shmc_pin(handle, present); /* it is PUBLISHED, and stays so while the lock is held */
    enum shmc_status status = discard(handle, own, handle->slot, &handle->control->duplicates);
    if (status != SHMC_OK) {
        shmc_unpin(handle, present);
        return status;
    }
    shmc_unpin(handle, own);
    request->lease = (struct shmc_lease){.block = present,
                                         .generation = block->generation,
                                         .place = block->place,
                                         .bytes = block->bytes};
    request->created = false;
    return SHMC_OK;
}

static enum shmc_status put_published(struct shmc_handle *handle, struct shmc_request *request,
                                      struct shmc_class *class, uint64_t parent)
{
    uint64_t index = request->lease.block;
    struct shmc_block *block = block_at(handle, index);
    if (parent != SHMC_NO_INDEX) {
        struct shmc_block *of_parent = block_at(handle, parent);
        block->parent = SHMC_BLOCK_NAME(parent, of_parent->generation) + 1;
        shmc_redo_set(handle, &of_parent->children, of_parent->children + 1);
    }
    shmc_redo_set(handle, &block->flags,
                  SHMC_BLOCK_NEW | (request->protect ? SHMC_BLOCK_PROTECTED : 0));
    shmc_redo_set(handle, &block->state, SHMC_BLOCK_PUBLISHED);
    shmc_redo_set(handle, &class->published, class->published + 1);
    shmc_redo_set(handle, &handle->control->stored, handle->control->stored + 1);
    request->created = true;
    return shmc_policy_insert(handle, class, index, parent);
}

/* Both buckets are full: the block is given as it is, to be forgotten with its last lease. */
static enum shmc_status put_unindexed(struct shmc_handle *handle, struct shmc_request *request,
                                      struct shmc_class *class)
{
    struct shmc_block *block = block_at(handle, request->lease.block);
    shmc_redo_set(handle, &block->state, SHMC_BLOCK_DOOMED);
    shmc_redo_set(handle, &handle->control->unindexed, handle->control->unindexed + 1);
    request->created = false;
    return shmc_policy_doom(handle, class, request->lease.block);
}

enum shmc_status shmc_blocks_publish(struct shmc_handle *handle, struct shmc_request *request)
{
    struct shmc_slab *slab;
    struct shmc_class *class;
    struct shmc_block *block;
    uint64_t present;
    enum shmc_status status = find_pinned(handle, request, &block);
    if (status == SHMC_OK)
        status = shmc_slab_of(handle, request->lease.block, &slab, &class);
    if (status == SHMC_OK && shmc_index_find(handle, request->key, &present) != NULL)
        return yield_to(handle, request, present);
    if (status == SHMC_OK)
        status = shmc_policy_drain_own(handle); /* the parent's use comes before its child's */
    if (status != SHMC_OK && status != SHMC_MORE)
        return status;
    uint64_t parent = find_parent(handle, request);
    struct shmc_owner *owner = &handle->owners[handle->slot];
    for (uint32_t i = 0; i < SHMC_KEY_WORDS; i++)
        block->key[i] = request->key[i];
    block->checksum = request->checksum;
    block->parent = 0;
    shmc_redo_begin(handle, SHMC_OP_PUBLISH);
    status = shmc_index_put(handle, request->key, request->lease.block)
                 ? put_published(handle, request, class, parent)
                 : put_unindexed(handle, request, class);
    if (status != SHMC_OK)
        return status;
    shmc_redo_set(handle, &owner->held, owner->held - 1);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* ---- requests that name keys --------------------------------------------------------------- */

/* PUBLISHED -> FREE, or DOOMED while somebody reads it. */
enum shmc_status shmc_blocks_invalidate(struct shmc_handle *handle, struct shmc_request *request)
{
    struct shmc_slab *slab;
    struct shmc_class *class;
    uint64_t index = SHMC_NO_INDEX;
    uint64_t *entry = shmc_index_find(handle, request->key, &index);
    if (entry == NULL ||
        (request->named && !shmc_block_is(handle, SHMC_BLOCK_NAME(index, request->lease.generation),
                                          SHMC_BLOCK_PUBLISHED)))
        return SHMC_ABSENT;
    enum shmc_status status = shmc_slab_of(handle, index, &slab, &class);
    if (status != SHMC_OK)
        return status;
    bool unread = shmc_close_to_readers(handle, index, SHMC_BLOCK_PUBLISHED);
    shmc_redo_begin(handle, SHMC_OP_INVALIDATE);
    status = shmc_put_withdrawn(handle, index, class, entry);
    if (status == SHMC_OK)
        status =
            unread ? shmc_put_free(handle, index, class) : shmc_policy_doom(handle, class, index);
    if (status != SHMC_OK)
        return status;
    if (!unread)
        shmc_redo_set(handle, &block_at(handle, index)->state, SHMC_BLOCK_DOOMED);
    shmc_redo_set(handle, &handle->control->evicting, 0);
    shmc_redo_set(handle, &handle->control->invalidated, handle->control->invalidated + 1);
    shmc_redo_commit(handle);
    return unread ? shmc_retire_if_empty(handle, slab) : SHMC_OK;
}

enum shmc_status shmc_blocks_protect(struct shmc_handle *handle, struct shmc_request *request)
{
    struct shmc_slab *slab;
    struct shmc_class *class;
    uint64_t index;
    if (shmc_index_find(handle, request->key, &index) == NULL)
        return SHMC_ABSENT;
    enum shmc_status status = shmc_slab_of(handle, index, &slab, &class);
    return status == SHMC_OK ? shmc_policy_protect(handle, class, index, request->protect) : status;
}

/* ---- reclaim ------------------------------------------------------------------------------- */

/* Empties a part of the row of an owner that is gone: private blocks become FREE, pins are cleared.
 * request->row_cursor counts words of the row; MORE until it is at the end. */
enum shmc_status shmc_blocks_reclaim(struct shmc_handle *handle, uint32_t slot,
                                     struct shmc_request *request)
{
    uint64_t blocks = handle->header.geometry.blocks_max;
    uint64_t words = (blocks + 63) / 64;
    uint64_t *row = shmc_pin_row(handle, slot);
    uint32_t freed = 0;
    for (uint32_t steps = 0; request->row_cursor < words; steps++) {
        if (steps >= STEP_WORDS || freed >= STEP_BLOCKS)
            return SHMC_MORE;
        uint64_t bits = shmc_load_relaxed(&row[request->row_cursor]);
        for (uint64_t left = bits; left != 0; left &= left - 1) {
            uint64_t index = request->row_cursor * 64 + (uint64_t)__builtin_ctzll(left);
            if (index >= blocks)
                break;
            uint64_t state = block_at(handle, index)->state;
            if (state != SHMC_BLOCK_OF(SHMC_BLOCK_WRITING, slot) &&
                state != SHMC_BLOCK_OF(SHMC_BLOCK_SEALED, slot))
                continue;
            uint64_t before = handle->control->used_bytes;
            enum shmc_status status = discard(handle, index, slot, NULL);
            if (status != SHMC_OK)
                return status;
            request->usage[SHMC_HOST] += before - handle->control->used_bytes;
            request->released++;
            freed++;
        }
        if (bits != 0)
            shmc_and_seq_cst(&row[request->row_cursor], 0);
        steps += (uint32_t)__builtin_popcountll(bits);
        request->row_cursor++;
    }
    return SHMC_OK;
}

/* ---- reading ------------------------------------------------------------------------------- */

void shmc_arena_report(struct shmc_handle *handle, struct shmc_arena_report *report)
{
    const struct shmc_control *control = handle->control;
    report->used_blocks = control->used_blocks;
    report->used_bytes = control->used_bytes;
    report->slabs_used = control->slabs_used;
    report->draining = control->draining;
    report->stored = control->stored;
    report->evicted = control->evicted;
    report->invalidated = control->invalidated;
    report->duplicates = control->duplicates;
    report->unindexed = control->unindexed;
    report->slabs_moved = control->slabs_moved;
    report->clock = control->clock;
    memcpy(report->classes, handle->classes, sizeof report->classes);
}
