/* slabs.c: which piece of the arena has blocks of which size.
 *
 * Why         Blocks of several sizes share one arena, and the sizes in demand change: a pool full
 *             of small blocks must be able to hold a large one again, without moving a byte.
 * Contract    Called with the lock held. The arena is cut into slabs, each assigned on demand to
 *             one class (block size) and FREE again when its last block is. A class has a list of
 *             slabs with a free place. Descriptors (struct shmc_block) are bound to a place of a
 *             slab when it is first used and stay there until the slab is FREE, so that taking
 *             and freeing a block changes one list, and freeing a slab splices another.
 *
 *             FREE --assign--> ASSIGNED --drain--> DRAINING --last block freed--> FREE
 *                                   ^------------------' a block is in use after all
 *
 * Death       Each step is one redo record that leaves a valid state: an ASSIGNED slab may be
 *             empty, a DRAINING one is gone on with by whoever next needs a slab.
 * Cost        O(1), but for the search of a class (at most SHMC_CLASSES_MAX words).
 * Source      Slab allocators (Bonwick); small slabs because large ones can hardly be emptied.
 */
#include "atomics.h"
#include "internal.h"

#define LINE_BYTES      64u
#define FORGOTTEN_LOOKS 64u /* slabs of each class */

static uint64_t align_up(uint64_t value, uint64_t alignment)
{
    return (value + alignment - 1) / alignment * alignment;
}

/* Pages for what is a page or more, cache lines below. */
uint64_t shmc_class_bytes(const struct shmc_handle *handle, uint64_t bytes)
{
    uint64_t alignment = bytes >= SHMC_PAGE_BYTES ? SHMC_PAGE_BYTES : LINE_BYTES;
    uint64_t rounded = align_up(bytes, alignment);
    return rounded <= handle->header.slab_bytes ? rounded : handle->header.slab_bytes;
}

static uint64_t slab_length(const struct shmc_handle *handle, uint64_t slab)
{
    uint64_t start = slab * handle->header.slab_bytes;
    uint64_t left = handle->arena_bytes - start;
    return left < handle->header.slab_bytes ? left : handle->header.slab_bytes;
}

uint64_t shmc_slab_places(const struct shmc_handle *handle, uint64_t slab, uint64_t block_bytes)
{
    return slab_length(handle, slab) / block_bytes;
}

/* The class of a slab that is not FREE. This and the next may be asked without the lock, for an
 * answer that was right a moment ago. */
enum shmc_status shmc_class_of(const struct shmc_handle *handle, const struct shmc_slab *slab,
                               struct shmc_class **class)
{
    uint64_t state = shmc_load_relaxed(&slab->state);
    SHMC_CHECK(SHMC_SLAB_STATE(state) != SHMC_SLAB_FREE &&
               SHMC_SLAB_CLASS(state) < SHMC_CLASSES_MAX);
    *class = &handle->classes[SHMC_SLAB_CLASS(state)];
    SHMC_CHECK(shmc_load_relaxed(&(*class)->block_bytes) != 0);
    return SHMC_OK;
}

enum shmc_status shmc_slab_of(const struct shmc_handle *handle, uint64_t block,
                              struct shmc_slab **slab, struct shmc_class **class)
{
    uint64_t place = shmc_load_relaxed(&handle->blocks[block].place);
    SHMC_CHECK(place < handle->arena_bytes);
    *slab = &handle->slabs[place / handle->header.slab_bytes];
    return shmc_class_of(handle, *slab, class);
}

/* ---- the list of slabs with a free place --------------------------------------------------- */

static enum shmc_status partial_remove(struct shmc_handle *handle, struct shmc_class *class,
                                       struct shmc_slab *slab)
{
    uint64_t links = shmc_redo_get(handle, &slab->links);
    uint32_t next = SHMC_HIGH(links);
    uint32_t previous = SHMC_LOW(links);
    SHMC_CHECK(next <= handle->header.slabs_max && previous <= handle->header.slabs_max);
    if (previous == 0) {
        shmc_redo_set(handle, &class->partial, next);
    } else {
        uint64_t *word = &handle->slabs[previous - 1].links;
        shmc_redo_set(handle, word, SHMC_PAIR(next, SHMC_LOW(shmc_redo_get(handle, word))));
    }
    if (next != 0) {
        uint64_t *word = &handle->slabs[next - 1].links;
        shmc_redo_set(handle, word, SHMC_PAIR(SHMC_HIGH(shmc_redo_get(handle, word)), previous));
    }
    return SHMC_OK;
}

static enum shmc_status partial_insert(struct shmc_handle *handle, struct shmc_class *class,
                                       struct shmc_slab *slab)
{
    uint64_t first = shmc_redo_get(handle, &class->partial);
    uint32_t index = (uint32_t)(slab - handle->slabs) + 1;
    SHMC_CHECK(first <= handle->header.slabs_max);
    if (first != 0) {
        uint64_t *word = &handle->slabs[first - 1].links;
        shmc_redo_set(handle, word, SHMC_PAIR(SHMC_HIGH(shmc_redo_get(handle, word)), index));
    }
    shmc_redo_set(handle, &slab->links, SHMC_PAIR(first, 0));
    shmc_redo_set(handle, &class->partial, index);
    return SHMC_OK;
}

/* ---- classes and slabs --------------------------------------------------------------------- */

/* The class of this size; an unused entry is given to it with its first slab. Without one, the next
 * larger size that is in use must do. */
enum shmc_status shmc_class_find(struct shmc_handle *handle, uint64_t block_bytes,
                                 struct shmc_class **class)
{
    struct shmc_class *unused = NULL;
    struct shmc_class *larger = NULL;
    struct shmc_class *next = handle->classes; /* the first that was never used, if any is left */
    SHMC_EACH_CLASS (handle, candidate) {
        next = candidate + 1;
        if (candidate->slabs == 0) {
            if (unused == NULL)
                unused = candidate;
        } else if (candidate->block_bytes == block_bytes) {
            *class = candidate;
            return SHMC_OK;
        } else if (candidate->block_bytes > block_bytes &&
                   (larger == NULL || candidate->block_bytes < larger->block_bytes)) {
            larger = candidate;
        }
    }
    if (unused == NULL && next != handle->classes + SHMC_CLASSES_MAX)
        unused = next;
    *class = unused != NULL ? unused : larger;
    if (unused != NULL && unused->block_bytes != block_bytes) {
        shmc_redo_begin(handle, SHMC_OP_ALLOCATE);
        shmc_redo_put(handle, &unused->block_bytes, block_bytes);
        shmc_redo_commit(handle);
    }
    return *class != NULL ? SHMC_OK : SHMC_CLASSES_FULL;
}

/* Puts "the empty slab is FREE, its blocks have no place" into a record of its own. */
enum shmc_status shmc_slab_retire(struct shmc_handle *handle, struct shmc_slab *slab)
{
    struct shmc_control *control = handle->control;
    struct shmc_class *class;
    enum shmc_status status = shmc_class_of(handle, slab, &class);
    if (status != SHMC_OK)
        return status;
    SHMC_CHECK(slab->used == 0 && control->slabs_used > 0);
    uint32_t first = SHMC_HIGH(slab->free);
    uint32_t last = SHMC_LOW(slab->free);
    SHMC_CHECK(class->slabs > 0 && last <= handle->header.geometry.blocks_max &&
               (first == 0) == (last == 0) && (first == 0) == (slab->mark == 0));
    shmc_redo_begin(handle, SHMC_OP_ALLOCATE);
    if (SHMC_SLAB_STATE(slab->state) == SHMC_SLAB_ASSIGNED) {
        status = partial_remove(handle, class, slab);
        if (status != SHMC_OK)
            return status;
    }
    if (first != 0) {
        shmc_redo_set(handle, &handle->blocks[last - 1].links, control->block_free);
        shmc_redo_set(handle, &control->block_free, first);
    }
    shmc_redo_set(handle, &slab->state, SHMC_SLAB_FREE);
    shmc_redo_set(handle, &slab->mark, 0);
    shmc_redo_set(handle, &slab->free, 0);
    shmc_redo_set(handle, &slab->chain, 0);
    shmc_redo_set(handle, &slab->links, SHMC_PAIR(control->slab_free, 0));
    shmc_redo_set(handle, &control->slab_free, (uint64_t)(slab - handle->slabs) + 1);
    shmc_redo_set(handle, &control->slabs_used, control->slabs_used - 1);
    shmc_redo_set(handle, &class->slabs, class->slabs - 1);
    if (control->draining == (uint64_t)(slab - handle->slabs) + 1) {
        shmc_redo_set(handle, &control->draining, 0);
        shmc_redo_set(handle, &control->slabs_moved, control->slabs_moved + 1);
    }
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* A FREE slab with room for a block of the class; the last slab of the arena may be too short. */
static enum shmc_status take_free(struct shmc_handle *handle, uint64_t block_bytes, uint64_t *slab)
{
    struct shmc_control *control = handle->control;
    uint64_t *word = &control->slab_free;
    SHMC_CHECK(control->slab_mark <= handle->header.slabs_max);
    for (uint32_t looked = 0; looked < 2 && *word != 0; looked++) {
        uint64_t next = looked == 0 ? *word : SHMC_HIGH(*word);
        if (next == 0)
            break;
        SHMC_CHECK(next <= control->slab_mark && handle->slabs[next - 1].state == SHMC_SLAB_FREE);
        uint64_t after = SHMC_HIGH(handle->slabs[next - 1].links);
        if (shmc_slab_places(handle, next - 1, block_bytes) != 0) {
            shmc_redo_put(handle, word, looked == 0 ? after : SHMC_PAIR(after, 0));
            *slab = next - 1;
            return SHMC_OK;
        }
        word = &handle->slabs[next - 1].links;
    }
    if (control->slab_mark < handle->header.slabs_max &&
        shmc_slab_places(handle, control->slab_mark, block_bytes) != 0) {
        shmc_redo_put(handle, &control->slab_mark, control->slab_mark + 1);
        *slab = control->slab_mark;
        return SHMC_OK;
    }
    return SHMC_ARENA_FULL;
}

/* A slab that somebody who was killed left assigned and empty. */
static enum shmc_status retire_forgotten(struct shmc_handle *handle, const struct shmc_class *class)
{
    SHMC_EACH_CLASS (handle, other) {
        uint64_t next = other != class && other->slabs != 0 ? other->partial : 0;
        for (uint32_t looks = 0; next != 0 && looks < FORGOTTEN_LOOKS; looks++) {
            SHMC_CHECK(next <= handle->header.slabs_max);
            struct shmc_slab *slab = &handle->slabs[next - 1];
            if (slab->used == 0)
                return shmc_slab_retire(handle, slab);
            next = SHMC_HIGH(slab->links);
        }
    }
    return SHMC_ARENA_FULL;
}

static bool has_blocks_left(const struct shmc_handle *handle)
{
    return handle->control->block_free != 0 ||
           handle->control->block_mark < handle->header.geometry.blocks_max;
}

/* Gives a FREE slab to the class. ARENA_FULL when there is none. */
static enum shmc_status assign(struct shmc_handle *handle, struct shmc_class *class)
{
    uint64_t index;
    if (!has_blocks_left(handle))
        return SHMC_ARENA_FULL; /* a place is of no use without a descriptor */
    shmc_redo_begin(handle, SHMC_OP_ALLOCATE);
    enum shmc_status status = take_free(handle, class->block_bytes, &index);
    if (status == SHMC_ARENA_FULL) {
        status = retire_forgotten(handle, class);
        shmc_redo_begin(handle, SHMC_OP_ALLOCATE);
        if (status == SHMC_OK)
            status = take_free(handle, class->block_bytes, &index);
    }
    if (status != SHMC_OK)
        return status;
    struct shmc_slab *slab = &handle->slabs[index];
    shmc_redo_set(handle, &slab->state, SHMC_SLAB_OF(SHMC_SLAB_ASSIGNED, class - handle->classes));
    shmc_redo_set(handle, &class->slabs, class->slabs + 1);
    shmc_redo_set(handle, &handle->control->slabs_used, handle->control->slabs_used + 1);
    status = partial_insert(handle, class, slab);
    if (status == SHMC_OK)
        shmc_redo_commit(handle);
    return status;
}

/* ---- taking and freeing a place ------------------------------------------------------------ */

/* Binds a block without a place to the next unused one of the slab. */
static enum shmc_status bind(struct shmc_handle *handle, struct shmc_slab *slab,
                             uint64_t block_bytes, uint64_t *index)
{
    struct shmc_control *control = handle->control;
    uint64_t blocks_max = handle->header.geometry.blocks_max;
    SHMC_CHECK(control->block_mark <= blocks_max && control->block_free <= blocks_max);
    if (control->block_free != 0) {
        *index = control->block_free - 1;
        shmc_redo_put(handle, &control->block_free, SHMC_LOW(handle->blocks[*index].links));
    } else if (control->block_mark < blocks_max) {
        *index = control->block_mark;
        shmc_redo_put(handle, &control->block_mark, *index + 1);
    } else {
        return SHMC_ARENA_FULL;
    }
    struct shmc_block *block = &handle->blocks[*index];
    SHMC_CHECK(block->state == SHMC_BLOCK_FREE);
    uint64_t slab_start = (uint64_t)(slab - handle->slabs) * handle->header.slab_bytes;
    block->place = slab_start + slab->mark * block_bytes;
    block->sibling = slab->chain;
    shmc_redo_put(handle, &slab->chain, *index + 1);
    shmc_redo_put(handle, &slab->mark, slab->mark + 1);
    return SHMC_OK;
}

/* Whether this is a place of the slab that ever had a block. */
static bool is_place_of(const struct shmc_handle *handle, const struct shmc_slab *slab,
                        uint64_t block_bytes, uint64_t place)
{
    uint64_t offset = place - (uint64_t)(slab - handle->slabs) * handle->header.slab_bytes;
    return offset % block_bytes == 0 && offset / block_bytes < slab->mark;
}

/* Puts "this FREE block of the class is in use" into the record that the caller began. When it says
 * ARENA_FULL, the record holds nothing. */
static enum shmc_status take_from(struct shmc_handle *handle, struct shmc_class *class,
                                  uint64_t *index)
{
    SHMC_CHECK(class->partial <= handle->header.slabs_max);
    struct shmc_slab *slab = &handle->slabs[class->partial - 1];
    uint64_t places = shmc_slab_places(handle, class->partial - 1, class->block_bytes);
    SHMC_CHECK(slab->state == SHMC_SLAB_OF(SHMC_SLAB_ASSIGNED, class - handle->classes) &&
               slab->mark <= places && slab->used < places);
    uint32_t first = SHMC_HIGH(slab->free);
    if (first != 0) {
        SHMC_CHECK(first <= handle->header.geometry.blocks_max &&
                   handle->blocks[first - 1].state == SHMC_BLOCK_FREE);
        *index = first - 1;
        SHMC_CHECK(is_place_of(handle, slab, class->block_bytes, handle->blocks[*index].place));
        uint32_t next = SHMC_LOW(handle->blocks[*index].links);
        shmc_redo_put(handle, &slab->free, next == 0 ? 0 : SHMC_PAIR(next, SHMC_LOW(slab->free)));
    } else {
        SHMC_CHECK(slab->mark < places);
        enum shmc_status status = bind(handle, slab, class->block_bytes, index);
        if (status != SHMC_OK)
            return status;
    }
    shmc_redo_put(handle, &slab->used, slab->used + 1);
    return slab->used + 1 == places ? partial_remove(handle, class, slab) : SHMC_OK;
}

enum shmc_status shmc_slab_take(struct shmc_handle *handle, struct shmc_class *class,
                                uint64_t *index)
{
    if (class->partial == 0) {
        enum shmc_status status = assign(handle, class);
        if (status != SHMC_OK)
            return status;
    }
    shmc_redo_begin(handle, SHMC_OP_ALLOCATE);
    return take_from(handle, class, index);
}

enum shmc_status shmc_slab_give_back(struct shmc_handle *handle, uint64_t index)
{
    struct shmc_slab *slab;
    struct shmc_class *class;
    enum shmc_status status = shmc_slab_of(handle, index, &slab, &class);
    if (status != SHMC_OK)
        return status;
    uint64_t places = shmc_slab_places(handle, slab - handle->slabs, class->block_bytes);
    SHMC_CHECK(slab->used > 0 && slab->used <= places);
    uint32_t last = SHMC_LOW(slab->free);
    shmc_redo_set(handle, &handle->blocks[index].links, SHMC_HIGH(slab->free));
    shmc_redo_set(handle, &slab->free, SHMC_PAIR(index + 1, last != 0 ? last : index + 1));
    shmc_redo_set(handle, &slab->used, slab->used - 1);
    if (slab->used == places && SHMC_SLAB_STATE(slab->state) == SHMC_SLAB_ASSIGNED)
        return partial_insert(handle, class, slab);
    return SHMC_OK;
}

/* ---- draining ------------------------------------------------------------------------------ */

/* Takes the slab out of use for new blocks. */
enum shmc_status shmc_slab_drain_begin(struct shmc_handle *handle, struct shmc_slab *slab,
                                       struct shmc_class *class)
{
    enum shmc_status status = SHMC_OK;
    uint64_t places = shmc_slab_places(handle, slab - handle->slabs, class->block_bytes);
    shmc_redo_begin(handle, SHMC_OP_ALLOCATE);
    if (slab->used < places)
        status = partial_remove(handle, class, slab);
    if (status != SHMC_OK)
        return status;
    shmc_redo_set(handle, &slab->state, SHMC_SLAB_OF(SHMC_SLAB_DRAINING, class - handle->classes));
    shmc_redo_set(handle, &handle->control->draining, (uint64_t)(slab - handle->slabs) + 1);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* Gives a slab that cannot be emptied back to its class. */
enum shmc_status shmc_slab_drain_cancel(struct shmc_handle *handle, struct shmc_slab *slab,
                                        struct shmc_class *class)
{
    enum shmc_status status = SHMC_OK;
    uint64_t places = shmc_slab_places(handle, slab - handle->slabs, class->block_bytes);
    shmc_redo_begin(handle, SHMC_OP_ALLOCATE);
    shmc_redo_set(handle, &slab->state, SHMC_SLAB_OF(SHMC_SLAB_ASSIGNED, class - handle->classes));
    shmc_redo_set(handle, &handle->control->draining, 0);
    if (slab->used < places)
        status = partial_insert(handle, class, slab);
    if (status == SHMC_OK)
        shmc_redo_commit(handle);
    return status;
}
