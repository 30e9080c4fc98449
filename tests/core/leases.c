/* leases.c: what a lease is worth while others evict, withdraw, die, or leave damage. */
#include "harness.h"

#define MIB (1ull << 20)

static struct shmc_handle *new_arena(uint64_t bytes)
{
    return attach(new_segment(arena(bytes, 64, MIB)));
}

/* As a holder leaves it that dies while it tries the block. */
static void leave_undecided(struct shmc_handle *pool, uint64_t block)
{
    bool doomed = pool->blocks[block].state == SHMC_BLOCK_DOOMED;
    pool->control->evicting = (block + 1) | (doomed ? 1ull << 32 : 0);
    pool->blocks[block].state = SHMC_BLOCK_EVICTING;
}

TEST(a_lease_is_taken_over_though_its_block_is_being_tried)
{
    struct shmc_handle *pool = new_arena(2 * MIB);
    struct shmc_handle *heir = attach(pool->segment_fd);
    struct shmc_lease lease = store(pool, 1, 4096);
    for (int round = 0; round < 2; round++) { /* PUBLISHED, then DOOMED */
        leave_undecided(pool, lease.block);
        EXPECT(shmc_lease_again(heir, &lease));
        shmc_release(heir, &lease, 1);
        invalidate(pool, 1);
    }
    shmc_release(pool, &lease, 1);
    MUST(evict(pool, 1));
    EXPECT(!shmc_lease_again(heir, &lease));
    EXPECT_CLEAN(pool);
}
