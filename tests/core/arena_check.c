/* arena_check.c: the walk over the arena's tables names each kind of damage,
 * and only that.
 *
 * One word is changed where only one thing is wrong with it: what verify
 * answers is how people learn what happened.
 */
#include "harness.h"

#define MIB    (1ull << 20)
#define BLOCKS 40

struct stage {
    struct shmc_handle *pool;
    struct image image;
    struct shmc_lease leased, child, free, writing;
};

/* Of small blocks one that is leased, one with a child, one withdrawn and
 * leased, one that is FREE; a private one; a slab that is FREE, another of
 * larger blocks; two claims. */
static struct stage new_stage(void)
{
    struct stage stage;
    struct shmc_geometry geometry = arena(8 * MIB, BLOCKS, 2 * MIB);
    geometry.eviction_policy = SHMC_POLICY_LRU;
    stage.pool = attach(new_segment(geometry));
    struct shmc_handle *pool = stage.pool;
    stage.leased = store(pool, 1, 4096);
    store(pool, 2, 4096);
    stage.free = store(pool, 3, 4096);
    MUST(allocate(pool, 4096));
    struct shmc_request request = {.operation = SHMC_OP_PUBLISH,
                                   .lease = last.lease,
                                   .key = {99},
                                   .parent_kind = SHMC_PARENT_LEASE,
                                   .parent = stage.leased};
    MUST(shmc_perform(pool, &request, 0));
    stage.child = request.lease;
    MUST(invalidate(pool, 2));
    shmc_release(pool, &stage.free, 1);
    MUST(invalidate(pool, 3));
    MUST(allocate(pool, 65536));
    stage.writing = last.lease;
    struct shmc_lease large = store(pool, 4, 2 * MIB);
    shmc_release(pool, &large, 1);
    MUST(invalidate(pool, 4));
    for (uint64_t key = 1; key <= 2; key++) {
        struct shmc_request claim = {.operation = SHMC_OP_CLAIM, .key = {key}};
        MUST(shmc_perform(pool, &claim, 0));
    }
    EXPECT_CLEAN(pool);
    stage.image = image_of(pool);
    return stage;
}

/* The kind is among the findings; with `only`, nothing else is. */
static void expect(const struct stage *stage, enum shmc_problem_kind kind, bool only)
{
    struct shmc_problem problems[64];
    bool found = false;
    MUST(check(stage->pool, problems, 64));
    for (uint32_t i = 0; i < last.problems_count && i < 64; i++) {
        found |= problems[i].kind == kind;
        if (only && problems[i].kind != kind)
            FAIL("%s: found instead, or as well: %s", shmc_problem_text(kind),
                 shmc_problem_text(problems[i].kind));
    }
    if (!found)
        FAIL("not found: %s", shmc_problem_text(kind));
    EXPECT_EQ(SHMC_POOL_POISONED, shmc_pool_state(stage->pool));
    restore_image(stage->pool, &stage->image);
    stage->pool->gate->state = SHMC_POOL_ACTIVE;
    EXPECT_CLEAN(stage->pool);
}

static void expect_only(const struct stage *stage, enum shmc_problem_kind kind)
{
    expect(stage, kind, true);
}

static void expect_found(const struct stage *stage, enum shmc_problem_kind kind)
{
    expect(stage, kind, false);
}

static struct shmc_block *block(const struct stage *stage, struct shmc_lease lease)
{
    return &stage->pool->blocks[lease.block];
}

static struct shmc_slab *slab_of(const struct stage *stage, struct shmc_lease lease)
{
    return &stage->pool->slabs[lease.place / stage->pool->header.slab_bytes];
}

static struct shmc_class *class_of(const struct stage *stage, struct shmc_lease lease)
{
    return &stage->pool->classes[SHMC_SLAB_CLASS(slab_of(stage, lease)->state)];
}

static uint64_t *entry_of(const struct stage *stage, struct shmc_lease lease)
{
    uint64_t index;
    uint64_t *entry = shmc_index_find(stage->pool, block(stage, lease)->key, &index);
    EXPECT(entry != NULL && index == lease.block);
    return entry;
}

static void leave_stage(struct stage *stage)
{
    free(stage->image.data);
    shmc_close(stage->pool);
}

TEST(check_names_broken_claims)
{
    struct stage stage = new_stage();
    struct shmc_table *claims = &stage.pool->claims;
    (*claims->live)--; /* so the index has one too many */
    expect_found(&stage, SHMC_PROBLEM_CLAIM_COUNT);
    claims->entries[claims->max - 1].state = SHMC_ENTRY_LIVE; /* never used */
    expect_only(&stage, SHMC_PROBLEM_CLAIM_STATE);
    claims->entries[0].usage[1] ^= 1; /* in the chain of another key */
    expect_only(&stage, SHMC_PROBLEM_CLAIM_INDEX);
    *claims->free = 0; /* LIVE */
    expect_only(&stage, SHMC_PROBLEM_CLAIM_FREE_LIST);
    leave_stage(&stage);
}

TEST(check_names_broken_blocks)
{
    struct stage stage = new_stage();
    struct shmc_control *control = stage.pool->control;
    control->used_blocks++;
    expect_only(&stage, SHMC_PROBLEM_BLOCK_COUNT);
    control->used_bytes -= 64;
    expect_only(&stage, SHMC_PROBLEM_BLOCK_COUNT);
    block(&stage, stage.leased)->children++;
    expect_only(&stage, SHMC_PROBLEM_BLOCK_CHILDREN);
    block(&stage, stage.child)->parent = 0;
    expect_only(&stage, SHMC_PROBLEM_BLOCK_CHILDREN);
    block(&stage, stage.free)->place += 64; /* no place of its slab */
    expect_only(&stage, SHMC_PROBLEM_BLOCK_PLACE);
    control->block_free = stage.child.block + 1; /* has a place, and is in use */
    expect_only(&stage, SHMC_PROBLEM_BLOCK_FREE_LIST);
    control->block_free = 0; /* the one that had the large place is in no list */
    expect_only(&stage, SHMC_PROBLEM_BLOCK_FREE_LIST);
    leave_stage(&stage);
}

TEST(check_names_broken_classes_and_queues)
{
    struct stage stage = new_stage();
    struct shmc_class *class = class_of(&stage, stage.leased);
    class->used++;
    expect_only(&stage, SHMC_PROBLEM_CLASS_COUNT);
    class->published--;
    expect_only(&stage, SHMC_PROBLEM_CLASS_COUNT);
    class->counts[SHMC_QUEUE_0]++;
    expect_only(&stage, SHMC_PROBLEM_QUEUE);
    class->ends[SHMC_QUEUE_0] = SHMC_PAIR(SHMC_HIGH(class->ends[SHMC_QUEUE_0]), 0);
    expect_only(&stage, SHMC_PROBLEM_QUEUE);
    block(&stage, stage.leased)->flags |= SHMC_BLOCK_PROTECTED; /* in a queue of candidates */
    expect_only(&stage, SHMC_PROBLEM_QUEUE);
    leave_stage(&stage);
}

TEST(check_names_broken_slabs)
{
    struct stage stage = new_stage();
    struct shmc_class *class = class_of(&stage, stage.leased);
    stage.pool->control->slab_free = 0;
    expect_only(&stage, SHMC_PROBLEM_SLAB_LIST);
    class->partial = 0;
    expect_only(&stage, SHMC_PROBLEM_SLAB_LIST);
    slab_of(&stage, stage.leased)->free &= ~(uint64_t)UINT32_MAX; /* a list without its last */
    expect_only(&stage, SHMC_PROBLEM_SLAB_BLOCKS);
    slab_of(&stage, stage.leased)->used++;
    expect_only(&stage, SHMC_PROBLEM_SLAB_BLOCKS);
    stage.pool->control->draining =
        (uint64_t)(slab_of(&stage, stage.leased) - stage.pool->slabs) + 1;
    expect_found(&stage, SHMC_PROBLEM_SLAB_STATE);
    leave_stage(&stage);
}

TEST(check_names_a_broken_index)
{
    struct stage stage = new_stage();
    uint64_t *entry = entry_of(&stage, stage.leased);
    uint64_t word = *entry;
    *entry = 0;
    expect_found(&stage, SHMC_PROBLEM_INDEX_MISSING);
    *entry ^= 1ull << SHMC_TAG_SHIFT; /* another key's tag */
    expect_found(&stage, SHMC_PROBLEM_INDEX_ENTRY);
    uint64_t *neighbour = entry + (entry[1] == 0 ? 1 : -1);
    *neighbour = word; /* twice */
    expect_only(&stage, SHMC_PROBLEM_INDEX_ENTRY);
    leave_stage(&stage);
}

/* What follows from another damage is named as well: a block that is not
 * counted is missed in each sum that it was part of. */
TEST(check_names_broken_states_and_owners)
{
    struct stage stage = new_stage();
    block(&stage, stage.leased)->state = SHMC_BLOCK_EVICTING;
    expect_found(&stage, SHMC_PROBLEM_BLOCK_STATE);
    block(&stage, stage.leased)->state = SHMC_BLOCK_OF(SHMC_BLOCK_PUBLISHED, 1);
    expect_found(&stage, SHMC_PROBLEM_BLOCK_STATE);
    block(&stage, stage.writing)->state = SHMC_BLOCK_OF(SHMC_BLOCK_WRITING, 3); /* a FREE slot */
    expect_found(&stage, SHMC_PROBLEM_BLOCK_OWNER);
    stage.pool->claims.entries[0].state = SHMC_ENTRY_LIVE_OF(3);
    expect_found(&stage, SHMC_PROBLEM_CLAIM_OWNER);
    stage.pool->control->active[0] ^= 2;
    expect_only(&stage, SHMC_PROBLEM_OWNER_ACTIVE);
    leave_stage(&stage);
}
