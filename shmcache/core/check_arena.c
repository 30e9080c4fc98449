/* check_arena.c: recount the arena's tables and walk all their lists, trusting nothing.
 *
 * Contract    As check.c, of which it is the part for slabs, blocks, queues and the index. Every
 *             loop is bounded by a table's size. Scratch: one word per block.
 * Invariants  G1 on the host axis; each block is in exactly one list, or in the hands of an owner
 *             whose row has its pin; each published block is found by its key.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

/* In the scratch word of a block; below them, how many children name it. */
#define SEEN     (1u << 31) /* met in a list */
#define INDEXED  (1u << 30) /* met in the index */
#define CHILDREN (INDEXED - 1)

struct class_counts {
    uint64_t slabs;
    uint64_t used;
    uint64_t published;
};

struct arena_walk {
    struct shmc_walk *walk;
    struct shmc_handle *handle;
    uint32_t *marks; /* one per block */
    struct class_counts classes[SHMC_CLASSES_MAX];
    uint64_t used_blocks;
    uint64_t used_bytes;
    uint64_t slabs_used;
};

static uint64_t blocks_max(const struct arena_walk *arena)
{
    return arena->handle->header.geometry.blocks_max;
}

/* Marks the block as met; false, and a finding, when it was before or is not one. */
static bool meet(struct arena_walk *arena, enum shmc_problem_kind kind, uint64_t where,
                 uint64_t index)
{
    if (index >= blocks_max(arena) || (arena->marks[index] & SEEN) != 0) {
        shmc_walk_report(arena->walk, kind, where, blocks_max(arena), index);
        return false;
    }
    arena->marks[index] |= SEEN;
    return true;
}

/* ---- blocks -------------------------------------------------------------------------------- */

static void count_child(struct arena_walk *arena, const struct shmc_block *block)
{
    uint64_t name = block->parent;
    if (name == 0)
        return;
    uint64_t index = SHMC_NAMED_BLOCK(name) - 1ull;
    if (index >= blocks_max(arena)) {
        shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_CHILDREN, index, blocks_max(arena), name);
        return;
    }
    if (shmc_block_is(arena->handle, name - 1, SHMC_BLOCK_PUBLISHED) ||
        shmc_block_is(arena->handle, name - 1, SHMC_BLOCK_DOOMED))
        arena->marks[index]++;
}

static void walk_private(struct arena_walk *arena, const struct shmc_block *block, uint64_t index)
{
    struct shmc_handle *handle = arena->handle;
    uint64_t slot = SHMC_BLOCK_OWNER(block->state);
    if (slot >= handle->header.geometry.owners_max ||
        handle->owners[slot].state == SHMC_OWNER_FREE ||
        (shmc_load_relaxed(&shmc_pin_row(handle, (uint32_t)slot)[index / 64]) >> index % 64 & 1) ==
            0) {
        shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_OWNER, index, 1, slot);
        return;
    }
    handle->scratch[slot]++;
}

static void walk_used(struct arena_walk *arena, uint64_t index)
{
    struct shmc_handle *handle = arena->handle;
    const struct shmc_block *block = &handle->blocks[index];
    struct shmc_slab *slab;
    struct shmc_class *class;
    if (shmc_slab_of(handle, index, &slab, &class) != SHMC_OK ||
        block->bytes > class->block_bytes || block->bytes == 0) {
        shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_PLACE, index, block->bytes, block->place);
        return;
    }
    struct class_counts *counts = &arena->classes[class - handle->classes];
    arena->used_blocks++;
    arena->used_bytes += class->block_bytes;
    counts->used++;
    switch (SHMC_BLOCK_STATE(block->state)) {
    case SHMC_BLOCK_WRITING:
    case SHMC_BLOCK_SEALED:
        walk_private(arena, block, index);
        return;
    case SHMC_BLOCK_PUBLISHED:
        counts->published++;
        count_child(arena, block);
        break;
    default:
        break;
    }
    if (SHMC_BLOCK_OWNER(block->state) != 0)
        shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_STATE, index, 0, block->state);
}

static void walk_blocks(struct arena_walk *arena)
{
    const struct shmc_control *control = arena->handle->control;
    for (uint64_t index = 0; index < blocks_max(arena); index++) {
        uint64_t state = arena->handle->blocks[index].state;
        if (state == SHMC_BLOCK_FREE)
            continue;
        if (index >= control->block_mark || SHMC_BLOCK_STATE(state) == SHMC_BLOCK_EVICTING ||
            SHMC_BLOCK_STATE(state) > SHMC_BLOCK_DOOMED)
            shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_STATE, index, control->block_mark,
                             state);
        else
            walk_used(arena, index);
    }
}

/* ---- slabs --------------------------------------------------------------------------------- */

/* All blocks of a slab are in its chain, its FREE ones in its list. */
static void walk_slab_blocks(struct arena_walk *arena, uint64_t index, const struct shmc_slab *slab,
                             uint64_t block_bytes)
{
    struct shmc_handle *handle = arena->handle;
    uint64_t start = index * handle->header.slab_bytes;
    uint64_t bound = 0, used = 0, listed = 0;
    uint64_t next = slab->chain;
    for (; next != 0 && bound < slab->mark; bound++) {
        if (next > blocks_max(arena))
            break;
        const struct shmc_block *block = &handle->blocks[next - 1];
        uint64_t offset = block->place - start;
        if (block->place < start || offset % block_bytes != 0 || offset / block_bytes >= slab->mark)
            shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_PLACE, next - 1, start, block->place);
        used += block->state != SHMC_BLOCK_FREE;
        next = block->sibling;
    }
    if (next != 0 || bound != slab->mark || used != slab->used)
        shmc_walk_report(arena->walk, SHMC_PROBLEM_SLAB_BLOCKS, index, slab->used, used);
    uint64_t last = 0;
    for (next = SHMC_HIGH(slab->free); next != 0; listed++) {
        if (!meet(arena, SHMC_PROBLEM_SLAB_BLOCKS, index, next - 1))
            return;
        if (handle->blocks[next - 1].state != SHMC_BLOCK_FREE)
            shmc_walk_report(arena->walk, SHMC_PROBLEM_SLAB_BLOCKS, index, 0, next - 1);
        last = next;
        next = SHMC_LOW(handle->blocks[next - 1].links);
    }
    if (last != SHMC_LOW(slab->free) || listed != slab->mark - used)
        shmc_walk_report(arena->walk, SHMC_PROBLEM_SLAB_BLOCKS, index, slab->mark - used, listed);
}

static void walk_slab(struct arena_walk *arena, uint64_t index)
{
    struct shmc_handle *handle = arena->handle;
    const struct shmc_slab *slab = &handle->slabs[index];
    uint64_t state = SHMC_SLAB_STATE(slab->state);
    uint64_t class_index = SHMC_SLAB_CLASS(slab->state);
    if (slab->state == SHMC_SLAB_FREE) {
        if ((slab->used | slab->mark | slab->free | slab->chain) != 0)
            shmc_walk_report(arena->walk, SHMC_PROBLEM_SLAB_BLOCKS, index, 0, slab->used);
        return;
    }
    uint64_t bytes = class_index < SHMC_CLASSES_MAX ? handle->classes[class_index].block_bytes : 0;
    if (state > SHMC_SLAB_DRAINING || bytes == 0 || index >= handle->control->slab_mark ||
        slab->mark > shmc_slab_places(handle, index, bytes) || slab->used > slab->mark ||
        (state == SHMC_SLAB_DRAINING) != (handle->control->draining == index + 1)) {
        shmc_walk_report(arena->walk, SHMC_PROBLEM_SLAB_STATE, index, slab->mark, slab->state);
        return;
    }
    arena->slabs_used++;
    arena->classes[class_index].slabs++;
    walk_slab_blocks(arena, index, slab, bytes);
}

/* The ASSIGNED slabs with a free place, and nothing else, are in the list of their class. */
static void walk_partial(struct arena_walk *arena, uint32_t class_index)
{
    struct shmc_handle *handle = arena->handle;
    const struct shmc_class *class = &handle->classes[class_index];
    uint64_t listed = 0, expected = 0, previous = 0;
    for (uint64_t next = class->partial; next != 0; listed++) {
        if (next > handle->header.slabs_max || listed > handle->header.slabs_max ||
            handle->slabs[next - 1].state != SHMC_SLAB_OF(SHMC_SLAB_ASSIGNED, class_index) ||
            SHMC_LOW(handle->slabs[next - 1].links) != previous) {
            shmc_walk_report(arena->walk, SHMC_PROBLEM_SLAB_LIST, class_index, previous, next);
            return;
        }
        previous = next;
        next = SHMC_HIGH(handle->slabs[next - 1].links);
    }
    if (class->block_bytes == 0)
        return;
    for (uint64_t index = 0; index < handle->header.slabs_max; index++)
        expected += handle->slabs[index].state == SHMC_SLAB_OF(SHMC_SLAB_ASSIGNED, class_index) &&
                    handle->slabs[index].used < shmc_slab_places(handle, index, class->block_bytes);
    shmc_walk_expect(arena->walk, SHMC_PROBLEM_SLAB_LIST, class_index, expected, listed);
}

static void walk_free_slabs(struct arena_walk *arena)
{
    struct shmc_handle *handle = arena->handle;
    uint64_t listed = 0;
    uint64_t free = handle->control->slab_mark - arena->slabs_used;
    for (uint64_t next = handle->control->slab_free; next != 0 && listed <= free; listed++) {
        if (next > handle->control->slab_mark || next > handle->header.slabs_max ||
            handle->slabs[next - 1].state != SHMC_SLAB_FREE) {
            shmc_walk_report(arena->walk, SHMC_PROBLEM_SLAB_LIST, next, 0, listed);
            return;
        }
        next = SHMC_HIGH(handle->slabs[next - 1].links);
    }
    shmc_walk_expect(arena->walk, SHMC_PROBLEM_SLAB_LIST, SHMC_NO_INDEX, free, listed);
}

/* ---- queues -------------------------------------------------------------------------------- */

static void walk_queue(struct arena_walk *arena, uint32_t class_index, uint32_t queue)
{
    struct shmc_handle *handle = arena->handle;
    const struct shmc_class *class = &handle->classes[class_index];
    uint64_t state = queue == SHMC_QUEUE_DOOMED ? SHMC_BLOCK_DOOMED : SHMC_BLOCK_PUBLISHED;
    uint64_t listed = 0;
    uint32_t newer = 0;
    for (uint32_t next = SHMC_HIGH(class->ends[queue]); next != 0; listed++) {
        if (!meet(arena, SHMC_PROBLEM_QUEUE, class_index, next - 1ull))
            return;
        const struct shmc_block *block = &handle->blocks[next - 1];
        bool is_protected = (block->flags & SHMC_BLOCK_PROTECTED) != 0;
        if (block->state != state || SHMC_POLICY_QUEUE(block->policy) != queue ||
            SHMC_HIGH(block->links) != newer || is_protected != (queue == SHMC_QUEUE_PROTECTED))
            shmc_walk_report(arena->walk, SHMC_PROBLEM_QUEUE, class_index, queue, next - 1ull);
        newer = next;
        next = SHMC_LOW(block->links);
    }
    if (newer != SHMC_LOW(class->ends[queue]) || listed != class->counts[queue])
        shmc_walk_report(arena->walk, SHMC_PROBLEM_QUEUE, class_index, class->counts[queue],
                         listed);
}

static void walk_class(struct arena_walk *arena, uint32_t class_index)
{
    const struct shmc_class *class = &arena->handle->classes[class_index];
    const struct class_counts *counts = &arena->classes[class_index];
    if (class->slabs != counts->slabs || class->used != counts->used ||
        class->published != counts->published)
        shmc_walk_report(arena->walk, SHMC_PROBLEM_CLASS_COUNT, class_index, counts->used,
                         class->used);
    for (uint32_t queue = 0; queue < SHMC_QUEUES; queue++)
        walk_queue(arena, class_index, queue);
    walk_partial(arena, class_index);
}

/* ---- what belongs to all ------------------------------------------------------------------- */

static void walk_free_blocks(struct arena_walk *arena)
{
    struct shmc_handle *handle = arena->handle;
    for (uint64_t next = handle->control->block_free; next != 0;) {
        if (!meet(arena, SHMC_PROBLEM_BLOCK_FREE_LIST, SHMC_NO_INDEX, next - 1))
            return;
        if (next > handle->control->block_mark || handle->blocks[next - 1].state != SHMC_BLOCK_FREE)
            shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_FREE_LIST, next - 1, 0, 1);
        next = SHMC_LOW(handle->blocks[next - 1].links);
    }
}

/* Each block below the mark was met in one list, or is private. */
static void walk_marks(struct arena_walk *arena)
{
    struct shmc_handle *handle = arena->handle;
    for (uint64_t index = 0; index < handle->control->block_mark && index < blocks_max(arena);
         index++) {
        const struct shmc_block *block = &handle->blocks[index];
        uint64_t state = SHMC_BLOCK_STATE(block->state);
        bool listed = (arena->marks[index] & SEEN) != 0;
        if (listed == (state == SHMC_BLOCK_WRITING || state == SHMC_BLOCK_SEALED))
            shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_FREE_LIST, index, state, listed);
        if ((state == SHMC_BLOCK_PUBLISHED || state == SHMC_BLOCK_DOOMED) &&
            block->children != (arena->marks[index] & CHILDREN))
            shmc_walk_report(arena->walk, SHMC_PROBLEM_BLOCK_CHILDREN, index,
                             arena->marks[index] & CHILDREN, block->children);
    }
}

/* Each entry names a published block of that hash, none twice; each published block is named. */
static void walk_index(struct arena_walk *arena)
{
    struct shmc_handle *handle = arena->handle;
    uint64_t entries = 0, published = 0;
    uint64_t words = (uint64_t)handle->header.index_buckets * SHMC_BUCKET_ENTRIES;
    for (uint64_t word = 0; word < words; word++) {
        uint64_t index;
        if (word + 64 < words) {
            shmc_index_matches(handle->index[word + 64], 0, &index);
            if (index < blocks_max(arena))
                shmc_prefetch(&handle->blocks[index]);
        }
        if (handle->index[word] == 0)
            continue;
        entries++;
        shmc_index_matches(handle->index[word], 0, &index);
        if (index >= blocks_max(arena) || (arena->marks[index] & INDEXED) != 0 ||
            !shmc_index_names(handle, word, index)) {
            shmc_walk_report(arena->walk, SHMC_PROBLEM_INDEX_ENTRY, word, 0, handle->index[word]);
            continue;
        }
        arena->marks[index] |= INDEXED;
    }
    for (uint64_t index = 0; index < blocks_max(arena); index++) {
        if (handle->blocks[index].state != SHMC_BLOCK_PUBLISHED)
            continue;
        published++;
        if ((arena->marks[index] & INDEXED) == 0)
            shmc_walk_report(arena->walk, SHMC_PROBLEM_INDEX_MISSING, index, 1, 0);
    }
    shmc_walk_expect(arena->walk, SHMC_PROBLEM_INDEX_ENTRY, SHMC_NO_INDEX, published, entries);
}

void shmc_check_arena(struct shmc_walk *walk)
{
    struct shmc_handle *handle = walk->handle;
    struct arena_walk arena = {.walk = walk, .handle = handle};
    const struct shmc_control *control = handle->control;
    if (handle->arena_bytes == 0)
        return;
    arena.marks = (uint32_t *)(handle->scratch + handle->header.geometry.owners_max);
    memset(arena.marks, 0, blocks_max(&arena) * sizeof *arena.marks);
    if (control->block_mark > blocks_max(&arena) || control->slab_mark > handle->header.slabs_max) {
        shmc_walk_report(walk, SHMC_PROBLEM_BLOCK_COUNT, SHMC_NO_INDEX, blocks_max(&arena),
                         control->block_mark);
        return;
    }
    walk_blocks(&arena);
    for (uint64_t index = 0; index < handle->header.slabs_max; index++)
        walk_slab(&arena, index);
    for (uint32_t class_index = 0; class_index < SHMC_CLASSES_MAX; class_index++)
        walk_class(&arena, class_index);
    walk_free_slabs(&arena);
    walk_free_blocks(&arena);
    walk_marks(&arena);
    walk_index(&arena);
    shmc_walk_expect(walk, SHMC_PROBLEM_BLOCK_COUNT, 0, arena.used_blocks, control->used_blocks);
    shmc_walk_expect(walk, SHMC_PROBLEM_BLOCK_COUNT, 1, arena.used_bytes, control->used_bytes);
    walk->overflow |= __builtin_add_overflow(walk->current[SHMC_HOST], arena.used_bytes,
                                             &walk->current[SHMC_HOST]);
}
