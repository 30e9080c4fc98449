/* owners.c: joining a pool, leaving it, being cleaned up after, retiring it. */
#include "harness.h"

static struct shmc_owner *slot_of(const struct shmc_handle *handle)
{
    return &handle->owners[shmc_slot(handle)];
}

/* ---- joining and leaving --------------------------------------------------------------------- */

TEST(a_handle_joins_once)
{
    int fd = new_segment(tables(ROOMY, 4, 8, 8));
    struct shmc_handle *pool = attach(fd);
    MUST(join(pool));
    MUST(report(pool));
    EXPECT_EQ(1, last.report.owners);
    EXPECT_EQ(1, last.report.attach_seq);
    EXPECT_EQ(1, shmc_attach_seq(pool));
    EXPECT_EQ(0, shmc_slot(pool));
    EXPECT_EQ(SHMC_OWNER_ACTIVE, slot_of(pool)->state);
    EXPECT_EQ(shmc_nonce(pool), slot_of(pool)->nonce);
    EXPECT_EQ(getpid(), slot_of(pool)->pid);
    EXPECT_CLEAN(pool);
}

TEST(a_full_owner_table_is_an_answer)
{
    int fd = new_segment(tables(ROOMY, 2, 8, 8));
    struct shmc_handle *first = attach(fd);
    attach(fd);
    struct shmc_handle *third = NULL;
    struct shmc_refusal refusal;
    MUST(shmc_open(fd, true, &third, &refusal));
    EXPECT_STATUS(OWNERS_FULL, join(third));
    EXPECT_EQ(UINT32_MAX, shmc_slot(third));
    detach(first);
    MUST(join(third));
    EXPECT_EQ(0, shmc_slot(third));
    EXPECT_EQ(3, shmc_attach_seq(third));
    EXPECT_CLEAN(third);
}

TEST(only_an_owner_may_change_accounts)
{
    int fd = new_segment(tables(ROOMY, 2, 8, 8));
    struct shmc_handle *observer = observe(fd);
    struct shmc_held rows[2];
    const struct shmc_token token = {0, 1};
    EXPECT_STATUS(NOT_JOINED, join(observer));
    EXPECT_STATUS(NOT_JOINED, add_manager(observer, 1));
    EXPECT_STATUS(NOT_JOINED, add_any_manager(observer));
    EXPECT_STATUS(NOT_JOINED, publish(observer, 1, U(1)));
    EXPECT_STATUS(NOT_JOINED, reserve(observer, U(1)));
    EXPECT_STATUS(NOT_JOINED, release(observer, token));
    EXPECT_STATUS(NOT_JOINED, release_manager(observer, token));
    EXPECT_STATUS(NOT_JOINED, publish_and_release(observer, 1, U(1), token));
    EXPECT_LEVEL(observer, NOTHING, NOTHING);
    MUST(held(observer, rows));
    EXPECT_CLEAN(observer);
}

/* Everything of an owner goes with it, everything of others stays. */
TEST(leaving_gives_everything_back)
{
    struct shmc_handle *leaver = new_pool(ROOMY);
    struct shmc_handle *stayer = attach(leaver->segment_fd);
    struct shmc_held rows[4];
    MUST(add_manager(leaver, 1));
    MUST(publish(leaver, 1, U(1, 2, 3, 4)));
    MUST(reserve(leaver, U(10, 20, 30, 40)));
    MUST(add_manager(stayer, 2));
    MUST(publish(stayer, 2, U(100)));
    MUST(reserve(stayer, U(0, 100, 0, 0)));
    MUST(held(stayer, rows));
    for (int i = 0; i < 2; i++) {
        EXPECT_EQ(1, rows[i].managers);
        EXPECT_EQ(1, rows[i].reservations);
    }
    EXPECT_EQ(11, rows[0].usage[SHMC_DEVICE]);
    EXPECT_EQ(100, rows[1].usage[SHMC_HOST]);
    EXPECT_EQ(0, rows[2].managers + rows[3].reservations);
    detach(leaver);
    EXPECT_LEVEL(stayer, U(100, 100, 0, 0), U(111, 122, 33, 44));
    EXPECT_EQ(1, last.report.owners);
    EXPECT_STATUS(UNKNOWN_MANAGER, publish(stayer, 1, U(1)));
    EXPECT_STATUS(LOST_SLOT, reserve(leaver, U(1)));
    EXPECT_CLEAN(stayer);
}

TEST(a_lost_slot_stays_lost_when_it_is_used_again)
{
    struct shmc_handle *old = new_pool(ROOMY);
    MUST(reserve(old, U(1)));
    struct shmc_token token = last.token;
    detach(old);
    struct shmc_handle *young = attach(old->segment_fd);
    EXPECT_EQ(shmc_slot(old), shmc_slot(young));
    MUST(reserve(young, U(2)));
    EXPECT_EQ(token.index, last.token.index);
    EXPECT_STATUS(LOST_SLOT, reserve(old, U(1)));
    EXPECT_STATUS(LOST_SLOT, release(old, token));
    EXPECT_STATUS(LOST_SLOT, add_manager(old, 1));
    EXPECT_LEVEL(old, U(2), U(2)); /* but it may look */
}

TEST(handles_close_in_any_order)
{
    int fd = new_segment(tables(ROOMY, 8, 8, 8));
    struct shmc_handle *handles[6];
    for (int i = 0; i < 6; i++)
        handles[i] = i % 2 == 0 ? attach(fd) : observe(fd);
    const int order[] = {2, 0, 5, 1, 4, 3};
    for (int i = 0; i < 6; i++)
        shmc_close(handles[order[i]]);
    struct shmc_handle *pool = attach(fd);
    MUST(report(pool));
    EXPECT_EQ(4, last.report.owners); /* closing is not leaving */
    EXPECT_EQ(3, shmc_slot(pool));
}

/* ---- cleaning up after an owner -------------------------------------------------------------- */

TEST(cleaning_needs_the_right_owner_and_order)
{
    struct shmc_handle *cleaner = new_pool(ROOMY);
    struct shmc_handle *owner = attach(cleaner->segment_fd);
    uint32_t slot = shmc_slot(owner);
    uint64_t nonce = shmc_nonce(owner);
    MUST(reserve(owner, U(1)));
    struct image image = image_of(cleaner);
    EXPECT_STATUS(STALE, reclaim_begin(cleaner, slot, nonce + 1));
    EXPECT_STATUS(STALE, reclaim_begin(cleaner, slot, 0));
    EXPECT_STATUS(STALE, reclaim_begin(cleaner, slot + 1, nonce));
    EXPECT_STATUS(STALE, reclaim_begin(cleaner, slot + 1, 0)); /* a FREE slot has nonce 0 */
    EXPECT_STATUS(STALE, reclaim_begin(cleaner, 4, nonce));
    EXPECT_STATUS(STALE, reclaim_begin(cleaner, UINT32_MAX, nonce));
    EXPECT_STATUS(STALE, reclaim_step(cleaner, slot, nonce, 0)); /* not begun */
    EXPECT_STATUS(STALE, reclaim_step(cleaner, UINT32_MAX, nonce, 0));
    EXPECT(same_image(cleaner, &image));
    free(image.data);
    MUST(reclaim_begin(cleaner, slot, nonce));
    MUST(reclaim_begin(cleaner, slot, nonce)); /* by somebody else, too */
    EXPECT_STATUS(LOST_SLOT, reserve(owner, U(1)));
    MUST(reclaim_step(cleaner, slot, nonce, 0));
    EXPECT_EQ(1, last.released);
    EXPECT_STATUS(STALE, reclaim_step(cleaner, slot, nonce, 0));
    EXPECT_STATUS(STALE, reclaim_begin(cleaner, slot, nonce));
    EXPECT_LEVEL(cleaner, NOTHING, U(1));
    EXPECT_CLEAN(cleaner);
}

/* A cleaner that slept while others finished its work and the slot found a new owner. */
TEST(a_late_cleaner_harms_nobody)
{
    struct shmc_handle *cleaner = new_pool(ROOMY);
    struct shmc_handle *dead = attach(cleaner->segment_fd);
    uint32_t slot = shmc_slot(dead);
    uint64_t nonce = shmc_nonce(dead);
    MUST(reserve(dead, U(1)));
    reclaim(cleaner, slot, nonce);
    struct shmc_handle *heir = attach(cleaner->segment_fd);
    EXPECT_EQ(slot, shmc_slot(heir));
    MUST(reserve(heir, U(7)));
    struct shmc_token token = last.token;
    EXPECT_STATUS(STALE, reclaim_step(cleaner, slot, nonce, 0));
    EXPECT_STATUS(STALE, reclaim_begin(cleaner, slot, nonce));
    EXPECT_LEVEL(heir, U(7), U(7));
    MUST(release(heir, token));
    EXPECT_CLEAN(heir);
}

/* The same while the heir itself is being cleaned: CLEANING alone is no fence, the nonce is. */
TEST(a_late_cleaner_leaves_another_cleaning_alone)
{
    struct shmc_handle *cleaner = new_pool(ROOMY);
    struct shmc_handle *dead = attach(cleaner->segment_fd);
    uint32_t slot = shmc_slot(dead);
    reclaim(cleaner, slot, shmc_nonce(dead));
    struct shmc_handle *heir = attach(cleaner->segment_fd);
    MUST(reserve(heir, U(7)));
    MUST(reclaim_begin(cleaner, slot, shmc_nonce(heir)));
    EXPECT_STATUS(STALE, reclaim_step(cleaner, slot, shmc_nonce(dead), 0));
    EXPECT_LEVEL(cleaner, U(7), U(7));
    EXPECT_EQ(SHMC_OWNER_CLEANING, slot_of(heir)->state);
}

/* A bad choice of the caller is harmless: a cursor behind the entries only costs another pass. */
TEST(a_cursor_behind_everything_starts_again)
{
    struct shmc_handle *cleaner = new_pool(ROOMY);
    struct shmc_handle *dead = attach(cleaner->segment_fd);
    MUST(reserve(dead, U(7)));
    MUST(reclaim_begin(cleaner, shmc_slot(dead), shmc_nonce(dead)));
    EXPECT_STATUS(MORE, reclaim_step(cleaner, shmc_slot(dead), shmc_nonce(dead), UINT64_MAX));
    EXPECT_EQ(0, last.cursor);
    MUST(reclaim_step(cleaner, shmc_slot(dead), shmc_nonce(dead), last.cursor));
    EXPECT_LEVEL(cleaner, U(0), U(7));
    EXPECT_CLEAN(cleaner);
}

/* A chunk ends after 128 releases; each leaves a valid pool; any cleaner takes over. */
TEST(many_releases_take_many_steps)
{
    struct shmc_handle *owner = attach(new_segment(tables(ROOMY, 2, 1, 1000)));
    struct shmc_handle *cleaners[] = {attach(owner->segment_fd), observe(owner->segment_fd)};
    uint32_t slot = shmc_slot(owner);
    uint64_t nonce = shmc_nonce(owner);
    uint64_t cursors[2] = {0, 0};
    uint64_t released = 0;
    uint32_t steps = 0;
    enum shmc_status status = SHMC_MORE;
    for (int i = 0; i < 1000; i++)
        MUST(reserve(owner, U(1)));
    MUST(reclaim_begin(owner, slot, nonce));
    for (; status == SHMC_MORE; steps++) {
        status = reclaim_step(cleaners[steps % 2], slot, nonce, cursors[steps % 2]);
        cursors[steps % 2] = last.cursor;
        released += last.released;
        EXPECT(last.released <= 128);
        EXPECT_CLEAN(owner);
        EXPECT_LEVEL(owner, U(1000 - released), U(1000));
    }
    MUST(status);
    EXPECT_EQ(1000, released);
    EXPECT_EQ(8, steps);
}

/* A chunk ends after 2048 entries looked at: the owner's only one is the last of many. */
TEST(many_foreign_entries_take_many_steps)
{
    struct shmc_handle *crowd = attach(new_segment(tables(ROOMY, 2, 5000, 5000)));
    struct shmc_handle *owner = attach(crowd->segment_fd);
    for (uint64_t i = 0; i < 4999; i++) {
        MUST(add_manager(crowd, i));
        MUST(reserve(crowd, U(1)));
    }
    MUST(reserve(owner, U(7)));
    EXPECT_EQ(5, reclaim(crowd, shmc_slot(owner), shmc_nonce(owner))); /* 9999 / 2048, rounded up */
    EXPECT_LEVEL(crowd, U(4999), U(5006));
    EXPECT_CLEAN(crowd);
}

TEST(cleaning_skips_what_was_never_used)
{
    struct shmc_handle *pool = attach(new_segment(tables(ROOMY, 2, 65536, 1 << 20)));
    MUST(add_manager(pool, 1));
    MUST(reserve(pool, U(1)));
    EXPECT_EQ(1, reclaim(pool, 0, shmc_nonce(pool)));
}

/* ---- retiring a pool ------------------------------------------------------------------------- */

static void expect_every_request(struct shmc_handle *pool, enum shmc_status status)
{
    struct shmc_held rows[4];
    const struct shmc_token token = {0, 1};
    EXPECT_EQ(status, join(pool));
    EXPECT_EQ(status, add_manager(pool, 9));
    EXPECT_EQ(status, add_any_manager(pool));
    EXPECT_EQ(status, publish(pool, 1, U(1)));
    EXPECT_EQ(status, reserve(pool, U(1)));
    EXPECT_EQ(status, release_manager(pool, token));
    EXPECT_EQ(status, release(pool, token));
    EXPECT_EQ(status, publish_and_release(pool, 1, U(1), token));
    EXPECT_EQ(status, report(pool));
    EXPECT_EQ(status, held(pool, rows));
    EXPECT_EQ(status, reclaim_begin(pool, 0, shmc_nonce(pool)));
    EXPECT_EQ(status, reclaim_step(pool, 0, shmc_nonce(pool), 0));
}

TEST(a_retired_pool_only_checks)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    MUST(add_manager(pool, 1));
    MUST(reserve(pool, U(1)));
    MUST(retire(pool, shmc_attach_seq(pool)));
    MUST(retire(pool, shmc_attach_seq(pool)));
    struct image image = image_of(pool);
    EXPECT_EQ(SHMC_POOL_RETIRED, shmc_pool_state(pool));
    expect_every_request(pool, SHMC_RETIRED);
    EXPECT_CLEAN(pool);
    shmc_poison(pool); /* comes too late to change anything */
    expect_every_request(pool, SHMC_RETIRED);
    EXPECT(same_image(pool, &image));
    free(image.data);
}

TEST(a_poisoned_pool_checks_and_retires)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    MUST(add_manager(pool, 1));
    MUST(reserve(pool, U(1)));
    struct image image = image_of(pool);
    shmc_poison(pool);
    EXPECT_EQ(SHMC_POOL_POISONED, shmc_pool_state(pool));
    expect_every_request(pool, SHMC_POISONED);
    expect_every_request(observe(pool->segment_fd), SHMC_POISONED);
    EXPECT(same_image(pool, &image));
    EXPECT_CLEAN(pool);
    EXPECT_EQ(SHMC_POOL_POISONED, shmc_pool_state(pool)); /* a clean walk lifts nothing */
    free(image.data);
    MUST(retire(pool, shmc_attach_seq(pool))); /* the way out: another epoch takes the name */
    expect_every_request(pool, SHMC_RETIRED);
}

/* Who looked at all owners and found none alive must not retire a pool that got one since. */
TEST(retiring_notices_a_new_owner)
{
    int fd = new_segment(tables(ROOMY, 4, 8, 8));
    struct shmc_handle *destroyer = observe(fd);
    uint64_t seen = shmc_attach_seq(destroyer);
    struct shmc_handle *owner = attach(fd);
    EXPECT_STATUS(OWNERS_CHANGED, retire(destroyer, seen));
    detach(owner);
    EXPECT_STATUS(OWNERS_CHANGED, retire(destroyer, seen)); /* leaving does not undo attaching */
    MUST(retire(destroyer, shmc_attach_seq(destroyer)));
    EXPECT_STATUS(RETIRED, join(owner));
}
