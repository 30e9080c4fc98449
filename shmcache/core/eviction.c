/* eviction.c: which published block goes first.
 *
 * Why         Most blocks are never read again; which ones will be is guessed from how they were
 *             used. A hit must cost its reader no lock, so uses arrive late, by the access rings.
 * Contract    Called with the lock held. Every PUBLISHED block is in one queue of its class; a
 *             policy decides in which, where, and from which queue the next victim comes. What it
 *             remembers beside that (clock, learned numbers, ghosts) is a hint: damage there
 *             costs hits, never a wrong byte.
 * Invariants  A block's queue is the low byte of its policy word. Queues are lists by age, newest
 *             first; blocks stored or matched as a run are in it with the start of the run as the
 *             newest, so that a run is eaten from its end.
 * Death       Moving a block is one redo record. Ring entries that were drained twice count twice.
 * Cost        O(1) per hit, store and eviction.
 */
#include "atomics.h"
#include "internal.h"

#define DRAIN_MAX  512u /* ring entries drained while the lock is held: each may cost four misses */
#define DRAINS_MAX (128 * DRAIN_MAX) /* for one request */
#define RUN_WINDOW 4096u /* a parent used so recently is of the run that its child is stored in */
#define USES_MAX   0xffffu
#define WALK_MAX   64u
#define UNPARK_MAX 4u

/* ---- queues: doubly linked by index, two links in a word ----------------------------------- */

static uint64_t blocks_max(const struct shmc_handle *handle)
{
    return handle->header.geometry.blocks_max;
}

static uint64_t queue_of(const struct shmc_handle *handle, uint64_t block)
{
    return SHMC_POLICY_QUEUE(shmc_redo_get(handle, &handle->blocks[block].policy));
}

static void set_newer(struct shmc_handle *handle, uint32_t block, uint32_t newer)
{
    uint64_t *word = &handle->blocks[block - 1].links;
    shmc_redo_set(handle, word, SHMC_PAIR(newer, SHMC_LOW(shmc_redo_get(handle, word))));
}

static void set_older(struct shmc_handle *handle, uint32_t block, uint32_t older)
{
    uint64_t *word = &handle->blocks[block - 1].links;
    shmc_redo_set(handle, word, SHMC_PAIR(SHMC_HIGH(shmc_redo_get(handle, word)), older));
}

enum shmc_status shmc_queue_remove(struct shmc_handle *handle, struct shmc_class *class,
                                   uint64_t block)
{
    uint64_t queue = queue_of(handle, block);
    SHMC_CHECK(queue < SHMC_QUEUES);
    uint64_t links = shmc_redo_get(handle, &handle->blocks[block].links);
    uint64_t ends = shmc_redo_get(handle, &class->ends[queue]);
    uint64_t count = shmc_redo_get(handle, &class->counts[queue]);
    uint32_t newer = SHMC_HIGH(links), older = SHMC_LOW(links);
    SHMC_CHECK(count > 0 && newer <= blocks_max(handle) && older <= blocks_max(handle));
    if (newer != 0)
        set_older(handle, newer, older);
    if (older != 0)
        set_newer(handle, older, newer);
    if (newer == 0 || older == 0)
        shmc_redo_set(
            handle, &class->ends[queue],
            SHMC_PAIR(newer == 0 ? older : SHMC_HIGH(ends), older == 0 ? newer : SHMC_LOW(ends)));
    shmc_redo_set(handle, &class->counts[queue], count - 1);
    return SHMC_OK;
}

/* Puts the block right below newer, or first when that is 0. Its policy word is the caller's. */
static enum shmc_status insert_below(struct shmc_handle *handle, struct shmc_class *class,
                                     uint64_t queue, uint64_t block, uint32_t newer)
{
    uint64_t ends = shmc_redo_get(handle, &class->ends[queue]);
    uint64_t count = shmc_redo_get(handle, &class->counts[queue]);
    uint32_t older = newer == 0 ? SHMC_HIGH(ends)
                                : SHMC_LOW(shmc_redo_get(handle, &handle->blocks[newer - 1].links));
    uint32_t index = (uint32_t)block + 1;
    SHMC_CHECK(older <= blocks_max(handle) && SHMC_HIGH(ends) <= blocks_max(handle));
    if (newer != 0)
        set_older(handle, newer, index);
    if (older != 0)
        set_newer(handle, older, index);
    shmc_redo_set(handle, &handle->blocks[block].links, SHMC_PAIR(newer, older));
    if (newer == 0 || older == 0)
        shmc_redo_set(
            handle, &class->ends[queue],
            SHMC_PAIR(newer == 0 ? index : SHMC_HIGH(ends), older == 0 ? index : SHMC_LOW(ends)));
    shmc_redo_set(handle, &class->counts[queue], count + 1);
    return SHMC_OK;
}

/* Between its elders and its juniors, from the nearer end; exact within WALK_MAX steps. */
static enum shmc_status insert_by_age(struct shmc_handle *handle, struct shmc_class *class,
                                      uint64_t queue, uint64_t block, uint64_t clock)
{
    uint64_t ends = shmc_redo_get(handle, &class->ends[queue]);
    uint32_t newest = SHMC_HIGH(ends), oldest = SHMC_LOW(ends);
    SHMC_CHECK(newest <= blocks_max(handle) && oldest <= blocks_max(handle) &&
               (newest == 0) == (oldest == 0));
    if (oldest == 0)
        return insert_below(handle, class, queue, block, 0);
    uint64_t from = SHMC_POLICY_CLOCK(handle->blocks[oldest - 1].policy);
    uint64_t to = SHMC_POLICY_CLOCK(handle->blocks[newest - 1].policy);
    bool from_oldest = clock <= from || (clock < to && clock - from < to - clock);
    uint32_t newer = from_oldest ? oldest : 0;
    for (uint32_t steps = 0; steps < WALK_MAX; steps++) {
        uint32_t next = from_oldest ? newer
                        : newer == 0
                            ? newest
                            : SHMC_LOW(shmc_redo_get(handle, &handle->blocks[newer - 1].links));
        SHMC_CHECK(next <= blocks_max(handle));
        if (next == 0 ||
            (SHMC_POLICY_CLOCK(handle->blocks[next - 1].policy) >= clock) == from_oldest)
            break;
        newer =
            from_oldest ? SHMC_HIGH(shmc_redo_get(handle, &handle->blocks[next - 1].links)) : next;
        SHMC_CHECK(newer <= blocks_max(handle));
    }
    return insert_below(handle, class, queue, block, newer);
}

/* From the queue it is in to the newest end of another, or of the same. */
enum shmc_status shmc_queue_move(struct shmc_handle *handle, struct shmc_class *class,
                                 uint64_t block, uint64_t queue)
{
    uint64_t *word = &handle->blocks[block].policy;
    enum shmc_status status = shmc_queue_remove(handle, class, block);
    if (status != SHMC_OK)
        return status;
    uint64_t policy = shmc_redo_get(handle, word);
    shmc_redo_set(handle, word, (policy & ~0xffull) | queue);
    return insert_below(handle, class, queue, block, 0);
}

/* ---- policies ------------------------------------------------------------------------------ */

static bool is_adaptive(const struct shmc_handle *handle)
{
    return handle->header.geometry.eviction_policy == SHMC_POLICY_ADAPTIVE;
}

static uint64_t tick(struct shmc_handle *handle)
{
    uint64_t now = ++handle->control->clock;
    if (is_adaptive(handle))
        shmc_adaptive_tick(handle);
    return now;
}

static uint64_t log2_below(uint64_t value, uint64_t limit)
{
    uint64_t log = 0;
    while (value > 1 && log + 1 < limit) {
        value /= 2;
        log++;
    }
    return log;
}

/* The queue of a candidate that was used so often. */
static uint64_t queue_for(const struct shmc_handle *handle, uint64_t block, uint64_t uses)
{
    const struct shmc_block *entry = &handle->blocks[block];
    uint64_t flags = shmc_redo_get(handle, &entry->flags);
    if ((flags & SHMC_BLOCK_PROTECTED) != 0)
        return SHMC_QUEUE_PROTECTED;
    switch (handle->header.geometry.eviction_policy) {
    case SHMC_POLICY_LFU:
        return log2_below(uses + 1, SHMC_POLICY_QUEUES);
    case SHMC_POLICY_ADAPTIVE:
        return shmc_redo_get(handle, &entry->children) != 0 ? SHMC_QUEUE_INNER
                                                            : shmc_adaptive_kind(uses, flags);
    default:
        return SHMC_QUEUE_0;
    }
}

/* Puts the use of a block into the record: it becomes the newest of its queue. */
static enum shmc_status use(struct shmc_handle *handle, struct shmc_class *class, uint64_t block)
{
    struct shmc_block *entry = &handle->blocks[block];
    uint64_t before = entry->policy;
    uint64_t uses = SHMC_POLICY_USES(before) < USES_MAX ? SHMC_POLICY_USES(before) + 1 : USES_MAX;
    uint64_t now = tick(handle);
    uint64_t queue = queue_for(handle, block, uses);
    if (is_adaptive(handle))
        shmc_adaptive_used(handle, block);
    if ((entry->flags & SHMC_BLOCK_NEW) != 0)
        shmc_redo_set(handle, &entry->flags, entry->flags & ~(uint64_t)SHMC_BLOCK_NEW);
    if (queue == SHMC_QUEUE_INNER && SHMC_POLICY_QUEUE(before) == queue) {
        shmc_redo_set(handle, &entry->policy, SHMC_POLICY_OF(queue, uses, now));
        return SHMC_OK; /* no order among those */
    }
    enum shmc_status status = shmc_queue_remove(handle, class, block);
    if (status != SHMC_OK)
        return status;
    shmc_redo_set(handle, &entry->policy, SHMC_POLICY_OF(queue, uses, now));
    return insert_below(handle, class, queue, block, 0);
}

/* Whether a child that is stored now is of the run in which its parent was used or stored. */
static bool is_of_run(const struct shmc_handle *handle, uint64_t parent)
{
    return parent != SHMC_NO_INDEX &&
           handle->control->clock - SHMC_POLICY_CLOCK(handle->blocks[parent].policy) <= RUN_WINDOW;
}

/* The neighbour below which the child goes, plus one, so that the start of a run is its newest. */
static uint32_t place_below(const struct shmc_handle *handle, const struct shmc_class *class,
                            uint64_t parent, uint64_t queue)
{
    struct shmc_slab *slab;
    struct shmc_class *of_parent;
    bool same = queue < SHMC_POLICY_QUEUES && !is_adaptive(handle) &&
                SHMC_POLICY_QUEUE(handle->blocks[parent].policy) == queue &&
                shmc_slab_of(handle, parent, &slab, &of_parent) == SHMC_OK && of_parent == class;
    return same ? (uint32_t)parent + 1 : 0;
}

/* Puts "the block has a child now" into the record. */
static enum shmc_status put_parent(struct shmc_handle *handle, uint64_t parent)
{
    struct shmc_block *entry = &handle->blocks[parent];
    struct shmc_slab *slab;
    struct shmc_class *class;
    enum shmc_status status = shmc_slab_of(handle, parent, &slab, &class);
    if (status != SHMC_OK)
        return status;
    shmc_adaptive_has_child(handle, parent);
    if ((entry->flags & SHMC_BLOCK_HAD_CHILD) == 0)
        shmc_redo_set(handle, &entry->flags, entry->flags | SHMC_BLOCK_HAD_CHILD);
    uint64_t queue = SHMC_POLICY_QUEUE(entry->policy);
    if (queue == SHMC_QUEUE_INNER || queue == SHMC_QUEUE_PROTECTED)
        return SHMC_OK;
    return shmc_queue_move(handle, class, parent, SHMC_QUEUE_INNER);
}

/* Puts a new block into its queue: below its parent when that was just used, else first. */
enum shmc_status shmc_policy_insert(struct shmc_handle *handle, struct shmc_class *class,
                                    uint64_t block, uint64_t parent)
{
    uint64_t now = tick(handle);
    uint64_t clock = now;
    uint64_t uses = 0;
    uint32_t newer = 0;
    if (is_of_run(handle, parent)) {
        const struct shmc_block *of_parent = &handle->blocks[parent];
        clock = SHMC_POLICY_CLOCK(of_parent->policy);
        if ((of_parent->flags & SHMC_BLOCK_NEW) != 0)
            uses = SHMC_POLICY_USES(of_parent->policy);
        newer = place_below(handle, class, parent, queue_for(handle, block, 0));
    }
    if (is_adaptive(handle)) {
        uses = shmc_adaptive_stored(handle, block, uses, clock);
        enum shmc_status status = parent != SHMC_NO_INDEX ? put_parent(handle, parent) : SHMC_OK;
        if (status != SHMC_OK)
            return status;
    } else {
        uses = 0;
    }
    uint64_t queue = queue_for(handle, block, uses);
    shmc_redo_set(handle, &handle->blocks[block].policy, SHMC_POLICY_OF(queue, uses, clock));
    return insert_below(handle, class, queue, block, newer);
}

/* Puts "it has no children any more" into the record: it may be a candidate again, at its age. */
enum shmc_status shmc_policy_childless(struct shmc_handle *handle, uint64_t block)
{
    struct shmc_block *entry = &handle->blocks[block];
    uint64_t policy = shmc_redo_get(handle, &entry->policy);
    struct shmc_slab *slab;
    struct shmc_class *class;
    uint64_t aside = is_adaptive(handle) ? SHMC_QUEUE_INNER : SHMC_QUEUE_PARKED;
    if (SHMC_POLICY_QUEUE(policy) != aside)
        return SHMC_OK;
    enum shmc_status status = shmc_slab_of(handle, block, &slab, &class);
    if (status == SHMC_OK)
        status = shmc_queue_remove(handle, class, block);
    if (status != SHMC_OK)
        return status;
    uint64_t queue = queue_for(handle, block, SHMC_POLICY_USES(policy));
    shmc_redo_set(handle, &entry->policy, (policy & ~0xffull) | queue);
    return insert_by_age(handle, class, queue, block, SHMC_POLICY_CLOCK(policy));
}

/* The block goes, to make room: its key may be remembered. */
void shmc_policy_evicted(struct shmc_handle *handle, uint64_t block)
{
    if (is_adaptive(handle))
        shmc_adaptive_evicted(handle, block);
}

/* The next victim of the class, or SHMC_NO_INDEX. */
uint64_t shmc_policy_victim(const struct shmc_handle *handle, const struct shmc_class *class)
{
    if (is_adaptive(handle))
        return shmc_adaptive_victim(handle, class);
    for (uint32_t queue = 0; queue < SHMC_POLICY_QUEUES; queue++) {
        uint32_t oldest = SHMC_LOW(class->ends[queue]);
        if (oldest != 0 && oldest <= blocks_max(handle))
            return oldest - 1;
    }
    return SHMC_NO_INDEX;
}

/* How long ago the class's next victim was used, on the policy's clock; 0 without one. */
uint64_t shmc_policy_age(const struct shmc_handle *handle, const struct shmc_class *class)
{
    uint64_t victim = shmc_policy_victim(handle, class);
    if (victim == SHMC_NO_INDEX)
        return 0;
    return handle->control->clock - SHMC_POLICY_CLOCK(handle->blocks[victim].policy) + 1;
}

/* ---- blocks that cannot go now ------------------------------------------------------------- */

/* Sets a block aside that is leased, or has children that are. */
enum shmc_status shmc_policy_park(struct shmc_handle *handle, struct shmc_class *class,
                                  uint64_t block)
{
    shmc_redo_begin(handle, SHMC_OP_EVICT);
    enum shmc_status status = shmc_queue_move(handle, class, block, SHMC_QUEUE_PARKED);
    if (status == SHMC_OK)
        shmc_redo_commit(handle);
    return status;
}

/* Puts a block that nobody can find any more, and is in no queue, among the DOOMED. */
enum shmc_status shmc_policy_doom(struct shmc_handle *handle, struct shmc_class *class,
                                  uint64_t block)
{
    uint64_t policy = handle->blocks[block].policy;
    shmc_redo_set(handle, &handle->blocks[block].policy, (policy & ~0xffull) | SHMC_QUEUE_DOOMED);
    return insert_below(handle, class, SHMC_QUEUE_DOOMED, block, 0);
}

/* Looks at the block that was parked longest ago: if nothing holds it any more it is a candidate
 * again (OK), at its age. PINNED: it stays aside, or there is none. */
static enum shmc_status unpark_one(struct shmc_handle *handle, struct shmc_class *class)
{
    uint32_t oldest = SHMC_LOW(class->ends[SHMC_QUEUE_PARKED]);
    if (oldest == 0)
        return SHMC_PINNED;
    SHMC_CHECK(oldest <= blocks_max(handle));
    uint64_t block = oldest - 1;
    bool held = (handle->blocks[block].children != 0 && !is_adaptive(handle)) ||
                shmc_is_pinned(handle, block);
    shmc_redo_begin(handle, SHMC_OP_EVICT);
    enum shmc_status status = shmc_queue_remove(handle, class, block);
    if (status != SHMC_OK)
        return status;
    uint64_t policy = handle->blocks[block].policy;
    uint64_t queue = held ? SHMC_QUEUE_PARKED : queue_for(handle, block, SHMC_POLICY_USES(policy));
    shmc_redo_set(handle, &handle->blocks[block].policy, (policy & ~0xffull) | queue);
    status = held ? insert_below(handle, class, queue, block, 0)
                  : insert_by_age(handle, class, queue, block, SHMC_POLICY_CLOCK(policy));
    if (status == SHMC_OK)
        shmc_redo_commit(handle);
    return status == SHMC_OK && held ? SHMC_PINNED : status;
}

/* A few looks, as long as they find something: more come back than one eviction sets aside. */
enum shmc_status shmc_policy_unpark(struct shmc_handle *handle, struct shmc_class *class)
{
    enum shmc_status status = SHMC_OK;
    for (uint32_t looks = 0; status == SHMC_OK && looks < UNPARK_MAX; looks++)
        status = unpark_one(handle, class);
    return status == SHMC_PINNED ? SHMC_OK : status;
}

/* ---- protection ---------------------------------------------------------------------------- */

enum shmc_status shmc_policy_protect(struct shmc_handle *handle, struct shmc_class *class,
                                     uint64_t block, bool protect)
{
    struct shmc_block *entry = &handle->blocks[block];
    bool is_protected = SHMC_POLICY_QUEUE(entry->policy) == SHMC_QUEUE_PROTECTED;
    if (is_protected == protect)
        return SHMC_OK;
    shmc_redo_begin(handle, SHMC_OP_PROTECT);
    shmc_redo_set(handle, &entry->flags, entry->flags ^ SHMC_BLOCK_PROTECTED);
    enum shmc_status status = shmc_queue_move(
        handle, class, block, queue_for(handle, block, SHMC_POLICY_USES(entry->policy)));
    if (status != SHMC_OK)
        return status;
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* ---- the access rings ---------------------------------------------------------------------- */

static enum shmc_status use_named(struct shmc_handle *handle, uint64_t name)
{
    struct shmc_slab *slab;
    struct shmc_class *class;
    uint64_t block = SHMC_NAMED_BLOCK(name);
    if (block >= blocks_max(handle) || !shmc_block_is(handle, name, SHMC_BLOCK_PUBLISHED))
        return SHMC_OK; /* gone meanwhile, or never was */
    enum shmc_status status = shmc_slab_of(handle, block, &slab, &class);
    shmc_redo_begin(handle, SHMC_OP_DRAIN);
    if (status == SHMC_OK)
        status = use(handle, class, block);
    if (status == SHMC_OK)
        shmc_redo_commit(handle);
    return status;
}

static void prefetch_links(const struct shmc_handle *handle, uint32_t next)
{
    if (next != 0 && next <= blocks_max(handle))
        shmc_prefetch(&handle->blocks[next - 1].links);
}

/* Asks for what the use of a block that comes AHEAD entries later will read: first its own lines,
 * then, once its links can be read, those of its neighbours. */
#define AHEAD 16u

static void foresee(const struct shmc_handle *handle, const struct shmc_ring *ring, uint64_t tail,
                    uint64_t head)
{
    const uint64_t *entries = shmc_ring_entries(ring);
    uint64_t mask = handle->header.ring_entries - 1;
    if (tail + AHEAD < head) {
        uint64_t block = SHMC_NAMED_BLOCK(shmc_load_relaxed(&entries[(tail + AHEAD) & mask]));
        if (block < blocks_max(handle)) {
            shmc_prefetch(&handle->blocks[block]);
            shmc_prefetch(&handle->blocks[block].links);
        }
    }
    if (tail + AHEAD / 2 < head) {
        uint64_t block = SHMC_NAMED_BLOCK(shmc_load_relaxed(&entries[(tail + AHEAD / 2) & mask]));
        if (block < blocks_max(handle)) {
            uint64_t links = shmc_load_relaxed(&handle->blocks[block].links);
            prefetch_links(handle, SHMC_LOW(links));
            prefetch_links(handle, SHMC_HIGH(links));
        }
    }
}

/* Tells the policy what one owner has read; at most budget entries, which it lowers. */
static enum shmc_status drain(struct shmc_handle *handle, uint32_t slot, uint32_t *budget)
{
    struct shmc_ring *ring = shmc_ring_of(handle, slot);
    uint64_t entries = handle->header.ring_entries;
    uint64_t head = shmc_load_acquire(&ring->head);
    uint64_t tail = shmc_load_relaxed(&ring->tail);
    if (head - tail > entries)
        tail = head; /* damage, which may cost a hit and no more */
    for (; tail != head && *budget > 0; tail++, (*budget)--) {
        foresee(handle, ring, tail, head);
        enum shmc_status status =
            use_named(handle, shmc_load_relaxed(&shmc_ring_entries(ring)[tail & (entries - 1)]));
        if (status != SHMC_OK)
            return status;
    }
    if (tail != ring->tail)
        shmc_store_release(&ring->tail, tail);
    return SHMC_OK;
}

/* Whether this owner has read more than is told to the policy at once. */
bool shmc_ring_is_long(const struct shmc_handle *handle)
{
    if (handle->slot == SHMC_NO_SLOT || handle->arena_bytes == 0)
        return false;
    const struct shmc_ring *ring = shmc_ring_of(handle, handle->slot);
    return shmc_load_relaxed(&ring->head) - shmc_load_relaxed(&ring->tail) > DRAIN_MAX;
}

/* The oldest of what this owner has read; MORE when that was not all. */
enum shmc_status shmc_policy_drain_own(struct shmc_handle *handle)
{
    uint32_t budget = DRAIN_MAX;
    if (handle->slot == SHMC_NO_SLOT)
        return SHMC_OK;
    enum shmc_status status = drain(handle, handle->slot, &budget);
    return status == SHMC_OK && budget == 0 ? SHMC_MORE : status;
}

/* MORE when the lock should be given to others before the rest. A request goes on after so many:
 * all readers together may be faster than it, and would keep it here for ever. */
enum shmc_status shmc_policy_drain_all(struct shmc_handle *handle, struct shmc_request *request)
{
    uint32_t budget = DRAIN_MAX;
    if (request->drained >= DRAINS_MAX)
        return SHMC_OK;
    for (uint32_t word = 0; word < SHMC_WAITER_WORDS; word++) {
        for (uint64_t active = handle->control->active[word]; active != 0; active &= active - 1) {
            uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(active);
            SHMC_CHECK(slot < handle->header.geometry.owners_max);
            enum shmc_status status = drain(handle, slot, &budget);
            if (status != SHMC_OK)
                return status;
            if (budget == 0) {
                request->drained += DRAIN_MAX;
                return SHMC_MORE;
            }
        }
    }
    return SHMC_OK;
}
