/* paths.c: where an owner has files, what stays charged until they are gone;
 * what rows tell. */
#include "harness.h"

#define LIST(text) (text), sizeof(text) /* the last path's zero byte is the literal's */

static const struct shmc_owner *slot_of(const struct shmc_handle *handle)
{
    return &handle->owners[shmc_slot(handle)];
}

/* Everything but the disk charge goes at once, that and the slot when the files
 * are gone. */
TEST(files_of_the_dead_stay_charged_until_they_are_gone)
{
    struct shmc_handle *dead = new_pool(ROOMY);
    struct shmc_handle *stayer = attach(dead->segment_fd);
    uint32_t slot = shmc_slot(dead);
    char paths[SHMC_OWNER_PATH_BYTES];
    MUST(set_paths(dead, LIST("/one\0/an other")));
    MUST(add_manager(dead, 1));
    MUST(publish(dead, 1, U(1, 2, 3, 4)));
    MUST(add_manager(dead, 2));
    MUST(publish(dead, 2, U(5)));
    MUST(reserve(dead, U(10, 20, 30, 40)));
    EXPECT_STATUS(STALE, files_gone(stayer, slot, shmc_nonce(dead)));
    MUST(reclaim_begin(stayer, slot, shmc_nonce(dead)));
    for (int i = 0; i < 3; i++) {
        EXPECT_STATUS(LIVE_FILES, reclaim_step(stayer, slot, shmc_nonce(dead), 0));
        EXPECT_EQ(i == 0 ? 2 : 0, last.released);
        EXPECT_EQ(i == 0 ? 22 : 0, last.usage[SHMC_HOST]);
        EXPECT_EQ(i == 0 ? 40 : 0, last.usage[SHMC_DISK]);
        EXPECT_EQ(sizeof "/one\0/an other", last.paths_bytes);
        EXPECT_LEVEL(stayer, U(0, 0, 0, 4), U(16, 22, 33, 44));
        EXPECT_CLEAN(stayer);
    }
    EXPECT_EQ(15, shmc_owner_paths(stayer, slot, shmc_nonce(dead), paths));
    EXPECT(memcmp(paths, "/one\0/an other", 15) == 0);
    EXPECT_EQ(0, shmc_owner_paths(stayer, slot, shmc_nonce(dead) + 1, paths));
    MUST(files_gone(stayer, slot, shmc_nonce(dead)));
    MUST(files_gone(stayer, slot, shmc_nonce(dead)));
    MUST(reclaim_step(stayer, slot, shmc_nonce(dead), 0));
    EXPECT_EQ(1, last.released);
    EXPECT_EQ(4, last.usage[SHMC_DISK]);
    EXPECT_LEVEL(stayer, NOTHING, U(16, 22, 33, 44));
    EXPECT_EQ(SHMC_OWNER_FREE, slot_of(dead)->state);
    EXPECT_STATUS(STALE, files_gone(stayer, slot, shmc_nonce(dead)));
    EXPECT_CLEAN(stayer);
}

TEST(an_owner_with_files_and_no_charges_waits_as_well)
{
    struct shmc_handle *dead = new_pool(ROOMY);
    struct shmc_handle *stayer = attach(dead->segment_fd);
    MUST(set_paths(dead, LIST("/")));
    MUST(reclaim_begin(stayer, shmc_slot(dead), shmc_nonce(dead)));
    EXPECT_STATUS(LIVE_FILES, reclaim_step(stayer, shmc_slot(dead), shmc_nonce(dead), 0));
    detach(dead);
    struct shmc_handle *young = attach(dead->segment_fd);
    EXPECT_EQ(shmc_slot(dead), shmc_slot(young));
    EXPECT_EQ(0, slot_of(young)->path_bytes);
    EXPECT_STATUS(LOST_SLOT, set_paths(dead, LIST("/late")));
    EXPECT_CLEAN(young);
}

TEST(a_list_is_replaced_as_a_whole_or_refused)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    char longest[SHMC_OWNER_PATH_BYTES + 1] = "/";
    memset(longest + 1, 'x', sizeof longest - 3);
    MUST(set_paths(pool, longest, SHMC_OWNER_PATH_BYTES));
    EXPECT_EQ(SHMC_OWNER_PATH_BYTES, slot_of(pool)->path_bytes);
    EXPECT_STATUS(TOO_LARGE, set_paths(pool, longest, SHMC_OWNER_PATH_BYTES + 1));
    EXPECT_STATUS(TOO_LARGE, set_paths(pool, LIST("relative")));
    EXPECT_STATUS(TOO_LARGE, set_paths(pool, LIST("/one\0two")));
    EXPECT_STATUS(TOO_LARGE, set_paths(pool, LIST("/empty\0")));
    EXPECT_STATUS(TOO_LARGE, set_paths(pool, "/unended", 8));
    EXPECT_EQ(SHMC_OWNER_PATH_BYTES, slot_of(pool)->path_bytes);
    MUST(set_paths(pool, LIST("/short")));
    EXPECT(strcmp(slot_of(pool)->path, "/short") == 0);
    MUST(set_paths(pool, "", 0));
    EXPECT_EQ(0, slot_of(pool)->path_bytes);
    EXPECT_STATUS(NOT_JOINED, set_paths(observe(pool->segment_fd), LIST("/x")));
    detach(pool); /* no file has to go */
    EXPECT_CLEAN(pool);
}

TEST(a_damaged_list_is_found)
{
    struct shmc_problem problem;
    struct shmc_handle *pool = new_pool(ROOMY);
    MUST(set_paths(pool, LIST("/there")));
    pool->owners[shmc_slot(pool)].path[0] = 'x';
    MUST(check(pool, &problem, 1));
    EXPECT_EQ(1, last.problems_count);
    EXPECT_EQ(SHMC_PROBLEM_OWNER_PATHS, problem.kind);
}

TEST(a_damaged_list_is_not_handed_out)
{
    char paths[SHMC_OWNER_PATH_BYTES];
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_handle *stayer = attach(pool->segment_fd);
    pool->owners[shmc_slot(pool)].path_bytes = SHMC_OWNER_PATH_BYTES + 1;
    EXPECT_EQ(0, shmc_owner_paths(stayer, shmc_slot(pool), shmc_nonce(pool), paths));
    MUST(reclaim_begin(stayer, shmc_slot(pool), shmc_nonce(pool)));
    EXPECT_STATUS(POISONED, reclaim_step(stayer, shmc_slot(pool), shmc_nonce(pool), 0));
}

/* ---- telemetry rows
 * ---------------------------------------------------------------------------
 */

TEST(what_was_done_stays_told_and_what_is_there_goes)
{
    const uint32_t gauge = SHMC_SESSION_COUNTERS_MAX;
    struct shmc_handle *dead = new_pool(ROOMY);
    struct shmc_handle *stayer = attach(dead->segment_fd);
    shmc_tell(dead, 0, 5);
    shmc_tell(dead, gauge, 7);
    shmc_tell(dead, gauge, (uint64_t)-3);
    shmc_tell(dead, SHMC_SESSION_WORDS, 1); /* there is no such word */
    shmc_tell(observe(dead->segment_fd), 0, 1);
    shmc_tell(stayer, 0, 10);
    shmc_tell(stayer, gauge, 20);
    shmc_tell(stayer, SHMC_SESSION_WORDS - 1, 1);
    EXPECT_EQ(15, shmc_told(stayer, 0));
    EXPECT_EQ(24, shmc_told(stayer, gauge));
    reclaim(stayer, shmc_slot(dead), shmc_nonce(dead));
    EXPECT_EQ(15, shmc_told(stayer, 0));
    EXPECT_EQ(20, shmc_told(stayer, gauge));
    struct shmc_handle *young = attach(dead->segment_fd);
    EXPECT_EQ(shmc_slot(dead), shmc_slot(young));
    shmc_tell(young, 0, 1);
    EXPECT_EQ(16, shmc_told(stayer, 0));
    EXPECT_EQ(1, shmc_told(stayer, SHMC_SESSION_WORDS - 1));
}
