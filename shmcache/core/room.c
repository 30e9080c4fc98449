/* room.c: how a block stops being one, and who has to go when room is needed.
 *
 * Why         A reader may lease a block at the very moment in which it is chosen to be evicted;
 *             and room for a large block is only there once every small one of a slab has gone.
 * Contract    Called with the lock held. evict, bury and invalidate take a block out of use only
 *             when no pin contradicts its EVICTING state; whoever is leased is set aside and
 *             looked at again later. Work is chunked: MORE asks for the same call again.
 * Invariants  G3. G1: a charge goes in the same record as the state. Children go before their
 *             parents, but where a slab is emptied.
 * Death       The state EVICTING lasts no longer than the lock is held: control.evicting names the
 *             block, and the next holder puts it back.
 * Cost        O(1) per evicted block: a look at one DOOMED and one parked block, and one victim.
 */
#include "atomics.h"
#include "internal.h"

#define LOOKS_MAX  64u   /* candidates looked at while the lock is held */
#define SEARCH_MAX 4096u /* blocks looked at in the search for a slab, likewise */

static struct shmc_block *block_at(const struct shmc_handle *handle, uint64_t index)
{
    return &handle->blocks[index];
}

/* ---- charges ------------------------------------------------------------------------------- */

enum shmc_status shmc_put_charge(struct shmc_handle *handle, struct shmc_class *class, bool more)
{
    struct shmc_control *control = handle->control;
    uint64_t bytes = class->block_bytes;
    uint64_t *host = &control->current[SHMC_HOST];
    uint64_t current = shmc_redo_get(handle, host);
    SHMC_CHECK(more || (current >= bytes && control->used_bytes >= bytes &&
                        control->used_blocks > 0 && class->used > 0));
    shmc_redo_set(handle, host, more ? current + bytes : current - bytes);
    shmc_redo_set(handle, &control->used_bytes,
                  more ? control->used_bytes + bytes : control->used_bytes - bytes);
    shmc_redo_set(handle, &control->used_blocks, control->used_blocks + (more ? 1 : -1ull));
    shmc_redo_set(handle, &class->used, class->used + (more ? 1 : -1ull));
    return SHMC_OK;
}

/* ---- freeing ------------------------------------------------------------------------------- */

/* Puts "one child less" for the block's parent into the record. */
static enum shmc_status put_orphan(struct shmc_handle *handle, const struct shmc_block *block)
{
    uint64_t name = block->parent;
    if (name == 0)
        return SHMC_OK;
    SHMC_CHECK(SHMC_NAMED_BLOCK(name) != 0 &&
               SHMC_NAMED_BLOCK(name) <= handle->header.geometry.blocks_max);
    name--; /* a parent is stored as index plus one */
    if (!shmc_block_is(handle, name, SHMC_BLOCK_PUBLISHED) &&
        !shmc_block_is(handle, name, SHMC_BLOCK_DOOMED))
        return SHMC_OK;
    struct shmc_block *parent = block_at(handle, SHMC_NAMED_BLOCK(name));
    uint64_t children = shmc_redo_get(handle, &parent->children);
    SHMC_CHECK(children > 0);
    shmc_redo_set(handle, &parent->children, children - 1);
    return children == 1 ? shmc_policy_childless(handle, SHMC_NAMED_BLOCK(name)) : SHMC_OK;
}

/* Puts "nobody can find it any more" into the record. */
enum shmc_status shmc_put_withdrawn(struct shmc_handle *handle, uint64_t index,
                                    struct shmc_class *class, uint64_t *entry)
{
    struct shmc_block *block = block_at(handle, index);
    enum shmc_status status = shmc_queue_remove(handle, class, index);
    if (status == SHMC_OK)
        status = put_orphan(handle, block);
    if (status != SHMC_OK)
        return status;
    SHMC_CHECK(class->published > 0);
    shmc_redo_set(handle, entry, 0);
    shmc_redo_set(handle, &class->published, class->published - 1);
    shmc_redo_set(handle, &block->flags, 0);
    return SHMC_OK;
}

enum shmc_status shmc_put_free(struct shmc_handle *handle, uint64_t index, struct shmc_class *class)
{
    shmc_redo_set(handle, &block_at(handle, index)->state, SHMC_BLOCK_FREE);
    shmc_redo_set(handle, &block_at(handle, index)->children, 0);
    enum shmc_status status = shmc_put_charge(handle, class, false);
    return status == SHMC_OK ? shmc_slab_give_back(handle, index) : status;
}

/* After a block became FREE: its slab may be for any class again. */
enum shmc_status shmc_retire_if_empty(struct shmc_handle *handle, struct shmc_slab *slab)
{
    return slab->used == 0 ? shmc_slab_retire(handle, slab) : SHMC_OK;
}

/* ---- the exchange that decides between a reader and us ------------------------------------- */

#define EVICTING_DOOMED (1ull << 32) /* in control.evicting: the state to go back to is DOOMED */

static void put_back(struct shmc_handle *handle, struct shmc_block *block, uint64_t state)
{
    shmc_store_release(&block->state, state);
    shmc_step_barrier();
    shmc_store_release(&handle->control->evicting, 0);
}

/* True when nobody has a pin on the block: its state is then EVICTING, and the record to come must
 * say what it becomes. False: nothing has changed. */
bool shmc_close_to_readers(struct shmc_handle *handle, uint64_t index, enum shmc_block_state state)
{
    struct shmc_block *block = block_at(handle, index);
    uint64_t note = (index + 1) | (state == SHMC_BLOCK_DOOMED ? EVICTING_DOOMED : 0);
    shmc_store_release(&handle->control->evicting, note);
    shmc_step_barrier();
#ifdef SHMC_MUTANT_NO_FENCE
    shmc_store_release(&block->state, SHMC_BLOCK_EVICTING);
#else
    shmc_exchange_seq_cst(&block->state, SHMC_BLOCK_EVICTING);
#endif
    if (!shmc_is_pinned(handle, index))
        return true;
    put_back(handle, block, state);
    return false;
}

/* After the death of a holder: a block that was being tried stays what it was. False: damage. */
bool shmc_blocks_recover(struct shmc_handle *handle)
{
    uint64_t note = shmc_load_relaxed(&handle->control->evicting);
    uint64_t index = SHMC_LOW(note) - 1ull;
    if (index >= handle->header.geometry.blocks_max ||
        (note & ~(EVICTING_DOOMED | UINT32_MAX)) != 0)
        return false;
    struct shmc_block *block = block_at(handle, index);
    enum shmc_block_state before =
        (note & EVICTING_DOOMED) != 0 ? SHMC_BLOCK_DOOMED : SHMC_BLOCK_PUBLISHED;
    uint64_t state = shmc_load_relaxed(&block->state);
    if (state != SHMC_BLOCK_EVICTING && state != before)
        return false;
    put_back(handle, block, before);
    return true;
}

/* PUBLISHED -> FREE. PINNED when it is leased. */
static enum shmc_status evict(struct shmc_handle *handle, uint64_t index, struct shmc_slab *slab,
                              struct shmc_class *class)
{
    struct shmc_block *block = block_at(handle, index);
    uint64_t found = SHMC_NO_INDEX;
    SHMC_CHECK(block->state == SHMC_BLOCK_PUBLISHED);
    uint64_t *entry = shmc_index_find(handle, block->key, &found);
    SHMC_CHECK(entry != NULL && found == index);
    if (!shmc_close_to_readers(handle, index, SHMC_BLOCK_PUBLISHED))
        return SHMC_PINNED;
    shmc_policy_evicted(handle, index);
    shmc_redo_begin(handle, SHMC_OP_EVICT);
    enum shmc_status status = shmc_put_withdrawn(handle, index, class, entry);
    if (status == SHMC_OK)
        status = shmc_put_free(handle, index, class);
    if (status != SHMC_OK)
        return status;
    shmc_redo_set(handle, &handle->control->evicting, 0);
    shmc_redo_set(handle, &handle->control->evicted, handle->control->evicted + 1);
    shmc_redo_commit(handle);
    return shmc_retire_if_empty(handle, slab);
}

/* DOOMED -> FREE, once nobody reads it. */
static enum shmc_status bury(struct shmc_handle *handle, uint64_t index)
{
    struct shmc_slab *slab;
    struct shmc_class *class;
    enum shmc_status status = shmc_slab_of(handle, index, &slab, &class);
    if (status != SHMC_OK)
        return status;
    SHMC_CHECK(block_at(handle, index)->state == SHMC_BLOCK_DOOMED);
    if (!shmc_close_to_readers(handle, index, SHMC_BLOCK_DOOMED))
        return SHMC_PINNED;
    shmc_redo_begin(handle, SHMC_OP_EVICT);
    status = shmc_queue_remove(handle, class, index);
    if (status == SHMC_OK)
        status = shmc_put_free(handle, index, class);
    if (status != SHMC_OK)
        return status;
    shmc_redo_set(handle, &handle->control->evicting, 0);
    shmc_redo_commit(handle);
    return shmc_retire_if_empty(handle, slab);
}

/* ---- making room --------------------------------------------------------------------------- */

/* One look at the oldest DOOMED block of the class: OK when it became FREE. */
static enum shmc_status bury_one(struct shmc_handle *handle, struct shmc_class *class)
{
    uint32_t oldest = SHMC_LOW(class->ends[SHMC_QUEUE_DOOMED]);
    if (oldest == 0)
        return SHMC_PINNED;
    SHMC_CHECK(oldest <= handle->header.geometry.blocks_max);
    enum shmc_status status = bury(handle, oldest - 1);
    if (status != SHMC_PINNED)
        return status;
    shmc_redo_begin(handle, SHMC_OP_EVICT);
    status = shmc_queue_move(handle, class, oldest - 1, SHMC_QUEUE_DOOMED);
    if (status != SHMC_OK)
        return status;
    shmc_redo_commit(handle);
    return SHMC_PINNED;
}

/* What was set aside in the class is looked at again, one of each kind: OK when a block became
 * FREE, PINNED when none did. */
static enum shmc_status look_again(struct shmc_handle *handle, struct shmc_class *class)
{
    enum shmc_status status = bury_one(handle, class);
    if (status != SHMC_PINNED)
        return status;
    status = shmc_policy_unpark(handle, class);
    return status == SHMC_OK ? SHMC_PINNED : status;
}

/* One block of the class becomes FREE (OK), or a candidate was in use and set aside (PINNED), or
 * there is none (ARENA_FULL). */
static enum shmc_status evict_one(struct shmc_handle *handle, struct shmc_class *class)
{
    struct shmc_slab *slab;
    enum shmc_status status = look_again(handle, class);
    if (status != SHMC_PINNED)
        return status;
    uint64_t victim = shmc_policy_victim(handle, class);
    if (victim == SHMC_NO_INDEX)
        return class->counts[SHMC_QUEUE_PARKED] + class->counts[SHMC_QUEUE_DOOMED] != 0
                   ? SHMC_PINNED
                   : SHMC_ARENA_FULL;
    struct shmc_class *of_victim;
    status = shmc_slab_of(handle, victim, &slab, &of_victim);
    if (status != SHMC_OK)
        return status;
    SHMC_CHECK(of_victim == class);
    if (block_at(handle, victim)->children == 0) {
        status = evict(handle, victim, slab, class);
        if (status != SHMC_PINNED)
            return status;
    }
    status = shmc_policy_park(handle, class, victim);
    return status == SHMC_OK ? SHMC_PINNED : status;
}

/* The class, other than the given one, whose next victim was not used for longest; or NULL. */
static struct shmc_class *stalest(const struct shmc_handle *handle, const struct shmc_class *but,
                                  uint64_t *age)
{
    struct shmc_class *found = NULL;
    *age = 0;
    SHMC_EACH_CLASS (handle, class) {
        if (class == but || class->slabs == 0)
            continue;
        uint64_t of_class = shmc_policy_age(handle, class);
        if (found == NULL || of_class > *age) {
            found = class;
            *age = of_class;
        }
    }
    return found;
}

/* As evict_one(), of any class: what was set aside in one may be free again while another has the
 * stalest candidate. */
static enum shmc_status evict_any(struct shmc_handle *handle)
{
    uint64_t age;
    uint64_t aside = 0;
    SHMC_EACH_CLASS (handle, class) {
        uint64_t of_class = class->counts[SHMC_QUEUE_PARKED] + class->counts[SHMC_QUEUE_DOOMED];
        aside += of_class;
        if (of_class == 0)
            continue;
        enum shmc_status status = look_again(handle, class);
        if (status != SHMC_PINNED)
            return status;
    }
    struct shmc_class *class = stalest(handle, NULL, &age);
    if (class != NULL && age != 0)
        return evict_one(handle, class);
    return aside != 0 ? SHMC_PINNED : SHMC_ARENA_FULL;
}

/* Looks until a block became FREE, of the class, or of any for NULL. Chunked: MORE keeps its place
 * in request->cursor, which ends the search when each candidate was looked at. */
static enum shmc_status evict_some(struct shmc_handle *handle, struct shmc_class *class,
                                   struct shmc_request *request)
{
    uint64_t candidates = class != NULL ? class->used : handle->control->used_blocks;
    SHMC_CHECK(candidates <= handle->header.geometry.blocks_max);
    for (uint32_t looks = 0; looks < LOOKS_MAX; looks++) {
        enum shmc_status status = class != NULL ? evict_one(handle, class) : evict_any(handle);
        if (status == SHMC_OK)
            request->cursor = 0; /* the next one is searched for anew */
        if (status != SHMC_PINNED)
            return status;
        if (request->cursor++ > candidates + SHMC_CLASSES_MAX)
            return SHMC_ARENA_FULL;
    }
    return SHMC_MORE;
}

enum shmc_status shmc_blocks_evict(struct shmc_handle *handle, struct shmc_request *request)
{
    enum shmc_status status = shmc_policy_drain_all(handle, request);
    request->released = 0;
    for (uint32_t looks = 0; status == SHMC_OK && looks < LOOKS_MAX; looks++) {
        uint64_t before = handle->control->used_bytes;
        if (request->released >= request->bytes)
            return SHMC_OK;
        status = evict_some(handle, NULL, request);
        if (status == SHMC_OK)
            request->released += before - handle->control->used_bytes;
    }
    return status == SHMC_OK ? SHMC_MORE : status;
}

/* ---- emptying a slab for another class ----------------------------------------------------- */

/* Whether a block that is not FREE can be made so, as far as its descriptor says. */
static bool can_go(const struct shmc_block *block)
{
    return block->state == SHMC_BLOCK_DOOMED ||
           (block->state == SHMC_BLOCK_PUBLISHED && (block->flags & SHMC_BLOCK_PROTECTED) == 0);
}

/* Whether nothing in the slab is leased, protected or private; counts the blocks looked at. */
static bool is_evictable(const struct shmc_handle *handle, const struct shmc_slab *slab,
                         uint64_t *looks)
{
    uint64_t next = slab->mark <= handle->header.geometry.blocks_max ? slab->chain : 0;
    for (uint64_t steps = 0; next != 0 && steps < slab->mark; steps++, (*looks)++) {
        if (next > handle->header.geometry.blocks_max)
            return false;
        const struct shmc_block *block = block_at(handle, next - 1);
        if (block->state != SHMC_BLOCK_FREE && (!can_go(block) || shmc_is_pinned(handle, next - 1)))
            return false;
        next = block->sibling;
    }
    return true;
}

/* Among the slabs of the class's next victims, one that can be emptied. */
static struct shmc_slab *choose_slab(const struct shmc_handle *handle,
                                     const struct shmc_class *class)
{
    const struct shmc_slab *last = NULL;
    uint64_t looks = 0;
    for (uint32_t queue = 0; queue < SHMC_QUEUES; queue++) {
        uint32_t next = SHMC_LOW(class->ends[queue]);
        for (uint32_t tries = 0; tries < 8 && next != 0; tries++) {
            struct shmc_slab *slab;
            struct shmc_class *of_block;
            if (next > handle->header.geometry.blocks_max ||
                shmc_slab_of(handle, next - 1, &slab, &of_block) != SHMC_OK || of_block != class)
                return NULL;
            if (slab != last && is_evictable(handle, slab, &looks))
                return slab;
            last = slab;
            next = SHMC_HIGH(block_at(handle, next - 1)->links);
        }
    }
    return NULL;
}

/* Evicts from the DRAINING slab: OK when it is FREE, MORE, or PINNED when it went back to its
 * class. */
static enum shmc_status drain_step(struct shmc_handle *handle)
{
    SHMC_CHECK(handle->control->draining <= handle->header.slabs_max);
    struct shmc_slab *slab = &handle->slabs[handle->control->draining - 1];
    struct shmc_class *class;
    enum shmc_status status = shmc_class_of(handle, slab, &class);
    if (status != SHMC_OK)
        return status;
    SHMC_CHECK(SHMC_SLAB_STATE(slab->state) == SHMC_SLAB_DRAINING &&
               slab->mark <= handle->header.geometry.blocks_max);
    if (slab->used == 0)
        return shmc_slab_retire(handle, slab);
    uint64_t next = slab->chain;
    uint32_t evictions = 0;
    for (uint64_t steps = 0; next != 0 && steps < slab->mark && evictions < LOOKS_MAX; steps++) {
        SHMC_CHECK(next <= handle->header.geometry.blocks_max);
        const struct shmc_block *block = block_at(handle, next - 1);
        uint64_t index = next - 1;
        next = block->sibling;
        if (block->state == SHMC_BLOCK_FREE)
            continue;
        status = SHMC_PINNED;
        if (can_go(block))
            status = block->state == SHMC_BLOCK_DOOMED ? bury(handle, index)
                                                       : evict(handle, index, slab, class);
        if (status == SHMC_PINNED) {
            status = shmc_slab_drain_cancel(handle, slab, class);
            return status == SHMC_OK ? SHMC_PINNED : status;
        }
        if (status != SHMC_OK || SHMC_SLAB_STATE(slab->state) == SHMC_SLAB_FREE)
            return status;
        evictions++;
    }
    SHMC_CHECK(evictions != 0); /* all blocks of a slab are in its chain, and some are in use */
    return SHMC_MORE;
}

/* OK when a slab became FREE, ARENA_FULL when none can be emptied now. */
static enum shmc_status drain_other(struct shmc_handle *handle, const struct shmc_class *but)
{
    if (handle->control->draining == 0) {
        uint64_t age;
        struct shmc_class *class = stalest(handle, but, &age);
        struct shmc_slab *slab = class != NULL ? choose_slab(handle, class) : NULL;
        SHMC_EACH_CLASS (handle, other) {
            if (slab != NULL)
                break;
            class = other;
            if (class != but && class->slabs != 0)
                slab = choose_slab(handle, class);
        }
        if (slab == NULL)
            return SHMC_ARENA_FULL;
        enum shmc_status status = shmc_slab_drain_begin(handle, slab, class);
        if (status != SHMC_OK)
            return status;
    }
    enum shmc_status status = drain_step(handle);
    return status == SHMC_PINNED ? SHMC_ARENA_FULL : status;
}

/* The last resort, as the victims' slabs say little about the others: looks at every slab, in
 * chunks, from request->slab_cursor on. MORE when one was found and is DRAINING now, or when the
 * search goes on; ARENA_FULL at its end. */
static enum shmc_status search_slab(struct shmc_handle *handle, const struct shmc_class *but,
                                    struct shmc_request *request)
{
    for (uint64_t looks = 0; request->slab_cursor < handle->header.slabs_max; looks++) {
        if (looks >= SEARCH_MAX)
            return SHMC_MORE;
        uint64_t index = request->slab_cursor++;
        struct shmc_slab *slab = &handle->slabs[index];
        if (SHMC_SLAB_STATE(slab->state) != SHMC_SLAB_ASSIGNED ||
            shmc_slab_places(handle, index, but->block_bytes) == 0)
            continue;
        struct shmc_class *class;
        enum shmc_status status = shmc_class_of(handle, slab, &class);
        if (status != SHMC_OK)
            return status;
        if (class == but || !is_evictable(handle, slab, &looks))
            continue;
        status = shmc_slab_drain_begin(handle, slab, class);
        return status == SHMC_OK ? SHMC_MORE : status;
    }
    return SHMC_ARENA_FULL;
}

/* ---- room for an allocation ------------------------------------------------------------------ */

/* Which room is missing, and makes some: in this class, or by taking a slab from another that is
 * used much less. */
enum shmc_status shmc_make_room(struct shmc_handle *handle, struct shmc_class *class,
                                struct shmc_request *request)
{
    uint64_t others;
    enum shmc_status status = shmc_policy_drain_all(handle, request);
    if (status != SHMC_OK)
        return status;
    uint64_t own = shmc_policy_age(handle, class);
    stalest(handle, class, &others);
    bool other_first = handle->control->draining != 0 || own == 0 || others / 2 > own;
    if (other_first) {
        status = drain_other(handle, class);
        if (status != SHMC_ARENA_FULL)
            return status;
    }
    status = evict_some(handle, class, request);
    if (status == SHMC_ARENA_FULL && !other_first)
        status = drain_other(handle, class);
    return status == SHMC_ARENA_FULL ? search_slab(handle, class, request) : status;
}

/* Room on the host axis, which is one for all classes. */
enum shmc_status shmc_make_host_room(struct shmc_handle *handle, struct shmc_request *request)
{
    enum shmc_status status = shmc_policy_drain_all(handle, request);
    if (status == SHMC_OK)
        status = evict_some(handle, NULL, request);
    return status == SHMC_ARENA_FULL ? SHMC_BUDGET_EXCEEDED : status;
}
