/* room.c: what makes room in an arena, and that it always comes to an end. */
#include "harness.h"

#define MIB     (1ull << 20)
#define READERS 20

/* With more room on the host axis than in the arena. */
static struct shmc_handle *new_arena(uint64_t slabs)
{
    struct shmc_geometry geometry = arena(slabs * 2 * MIB, 64, 2 * MIB);
    geometry.limits[SHMC_HOST] *= 2;
    return attach(new_segment(geometry));
}

/* One hit for each place of the reader's ring. */
static void fill_ring(struct shmc_handle *reader)
{
    struct shmc_lease lease;
    while (shmc_ring_of(reader, shmc_slot(reader))->head -
               shmc_ring_of(reader, shmc_slot(reader))->tail <
           reader->header.ring_entries) {
        EXPECT(lookup(reader, 1, &lease));
        shmc_release(reader, &lease, 1);
    }
}

TEST(readers_cannot_keep_an_allocation_waiting)
{
    struct shmc_geometry geometry = arena(2 * MIB, 64, 2 * MIB);
    struct shmc_handle *readers[READERS];
    struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = MIB};
    enum shmc_status status = SHMC_MORE;
    geometry.owners_max = READERS + 1;
    struct shmc_handle *pool = attach(new_segment(geometry));
    for (uint64_t key = 1; key <= 2; key++) {
        struct shmc_lease lease = store(pool, key, MIB);
        shmc_release(pool, &lease, 1);
    }
    for (int i = 0; i < READERS; i++)
        readers[i] = attach(pool->segment_fd);
    for (int chunks = 0; status == SHMC_MORE; chunks++) {
        EXPECT(chunks < 200);
        for (int i = 0; i < READERS; i++)
            fill_ring(readers[i]);
        status = shmc_perform(pool, &request, 0);
    }
    MUST(status);
    EXPECT_CLEAN(pool);
}

/* As an allocation leaves it that is killed when it has a slab and no block of it yet. */
static void forget_a_slab(struct shmc_handle *pool, uint64_t block_bytes)
{
    struct shmc_class *class;
    uint64_t index;
    MUST(shmc_lock(pool, 0));
    MUST(shmc_class_find(pool, block_bytes, &class));
    MUST(shmc_slab_take(pool, class, &index));
    shmc_unlock(pool);
}

TEST(a_forgotten_slab_is_found_behind_others)
{
    struct shmc_handle *pool = new_arena(2);
    MUST(allocate(pool, MIB));
    struct shmc_lease first = last.lease;
    MUST(allocate(pool, MIB));
    forget_a_slab(pool, MIB);
    MUST(discard(pool, first));
    MUST(allocate(pool, 2 * MIB));
    EXPECT_CLEAN(pool);
}

TEST(the_end_of_a_protection_wakes_who_waits_for_room)
{
    struct shmc_handle *pool = new_arena(1);
    struct shmc_lease lease = store(pool, 1, MIB);
    shmc_release(pool, &lease, 1);
    MUST(protect(pool, 1, true));
    shmc_waiter_set(pool, true);
    uint32_t seen = shmc_release_counter(pool);
    MUST(protect(pool, 1, false));
    EXPECT(shmc_release_counter(pool) != seen);
}

/* Who waits makes such attempts at each look: it would be woken by itself. */
TEST(an_attempt_in_vain_wakes_nobody)
{
    struct shmc_handle *pool = new_arena(1);
    MUST(allocate(pool, MIB));
    struct shmc_lease first = last.lease;
    while (allocate(pool, MIB) == SHMC_OK)
        ;
    shmc_waiter_set(pool, true);
    uint32_t seen = shmc_release_counter(pool);
    EXPECT(allocate(pool, MIB) != SHMC_OK);
    evict(pool, MIB);
    EXPECT_EQ(seen, shmc_release_counter(pool));
    MUST(discard(pool, first));
    EXPECT(shmc_release_counter(pool) != seen);
}

TEST(an_eviction_wakes_who_waits_for_room)
{
    struct shmc_handle *pool = new_arena(1);
    struct shmc_lease lease = store(pool, 1, MIB);
    shmc_release(pool, &lease, 1);
    shmc_waiter_set(pool, true);
    uint32_t seen = shmc_release_counter(pool);
    evict(pool, MIB);
    EXPECT(shmc_release_counter(pool) != seen);
}

TEST(a_slab_with_lost_blocks_is_damage_and_no_endless_work)
{
    struct shmc_handle *pool = new_arena(1);
    struct shmc_lease lease = store(pool, 1, MIB);
    shmc_release(pool, &lease, 1);
    MUST(shmc_lock(pool, 0));
    struct shmc_slab *slab = &pool->slabs[0];
    MUST(shmc_slab_drain_begin(pool, slab, &pool->classes[SHMC_SLAB_CLASS(slab->state)]));
    slab->chain = 0;
    shmc_unlock(pool);
    EXPECT_STATUS(POISONED, allocate(pool, 2 * MIB));
}

TEST(no_place_is_given_that_a_slab_does_not_have)
{
    struct shmc_handle *pool = new_arena(1);
    MUST(allocate(pool, MIB));
    struct shmc_lease first = last.lease;
    MUST(allocate(pool, MIB));
    MUST(discard(pool, first));
    pool->slabs[0].free = 0; /* one place is free, and none is left that never had a block */
    EXPECT_STATUS(POISONED, allocate(pool, MIB));
}

TEST(a_slab_of_a_class_without_blocks_is_damage)
{
    struct shmc_handle *pool = new_arena(1);
    struct shmc_lease lease = store(pool, 1, MIB);
    shmc_release(pool, &lease, 1);
    pool->slabs[0].state = SHMC_SLAB_OF(SHMC_SLAB_ASSIGNED, SHMC_CLASSES_MAX - 1);
    EXPECT_STATUS(POISONED, allocate(pool, 2 * MIB));
}
