/* tables.c: entries, free lists, the manager index, ids, full tables and the ends of 64 bits. */
#include "harness.h"

static struct shmc_token reserved(struct shmc_handle *pool, struct usage usage)
{
    MUST(reserve(pool, usage));
    return last.token;
}

static struct shmc_token registered(struct shmc_handle *pool, uint64_t id)
{
    MUST(add_manager(pool, id));
    return last.token;
}

/* The call gives this status and leaves every journaled byte as it was. */
#define EXPECT_REFUSED(pool, name, call)                                                           \
    do {                                                                                           \
        struct image before = image_of(pool);                                                      \
        EXPECT_STATUS(name, call);                                                                 \
        EXPECT(same_image(pool, &before));                                                         \
        free(before.data);                                                                         \
    } while (0)

/* ---- full tables and reuse ------------------------------------------------------------------- */

TEST(a_full_manager_table_is_an_answer)
{
    struct shmc_handle *pool = attach(new_segment(tables(ROOMY, 1, 3, 1)));
    registered(pool, 1);
    struct shmc_token middle = registered(pool, 2);
    registered(pool, 3);
    EXPECT_REFUSED(pool, MANAGERS_FULL, add_manager(pool, 4));
    EXPECT_REFUSED(pool, MANAGERS_FULL, add_any_manager(pool));
    EXPECT_REFUSED(pool, DUPLICATE_MANAGER, add_manager(pool, 3)); /* also when full */
    MUST(release_manager(pool, middle));
    EXPECT_EQ(middle.index, registered(pool, 4).index);
    EXPECT_REFUSED(pool, MANAGERS_FULL, add_manager(pool, 5));
    EXPECT_CLEAN(pool);
}

TEST(a_full_reservation_table_is_an_answer)
{
    struct shmc_handle *pool = attach(new_segment(tables(ROOMY, 1, 1, 2)));
    reserved(pool, U(1));
    struct shmc_token token = reserved(pool, U(2));
    EXPECT_REFUSED(pool, RESERVATIONS_FULL, reserve(pool, U(4)));
    EXPECT_REFUSED(pool, RESERVATIONS_FULL, reserve(pool, NOTHING));
    /* What can never fit is told before what may fit a moment later. */
    EXPECT_REFUSED(pool, ADMISSION_OVERFLOW, reserve(pool, U(UINT64_MAX)));
    EXPECT_REFUSED(pool, BUDGET_EXCEEDED, reserve(pool, U(1ull << 41)));
    MUST(release(pool, token));
    EXPECT_EQ(token.index, reserved(pool, U(4)).index);
    EXPECT_CLEAN(pool);
}

/* Unused entries are taken in order and only when no released one is left; the last released one
 * comes first. */
TEST(released_entries_are_used_before_new_ones)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_token tokens[3];
    for (uint64_t i = 0; i < 3; i++) {
        tokens[i] = reserved(pool, U(1));
        EXPECT_EQ(i, tokens[i].index);
    }
    EXPECT_EQ(3, *pool->reservations.mark);
    EXPECT_EQ(SHMC_NO_INDEX, *pool->reservations.free);
    for (int i = 0; i < 3; i++)
        MUST(release(pool, tokens[i]));
    EXPECT_EQ(2, *pool->reservations.free);
    for (uint64_t i = 3; i-- > 0;) {
        struct shmc_token again = reserved(pool, U(1));
        EXPECT_EQ(i, again.index);
        EXPECT_EQ(tokens[i].generation + 1, again.generation);
    }
    EXPECT_EQ(3, reserved(pool, U(1)).index);
    EXPECT_EQ(4, *pool->reservations.mark);
    EXPECT_CLEAN(pool);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

TEST(a_token_dies_with_its_use_of_the_entry)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_token old = reserved(pool, U(1));
    MUST(release(pool, old));
    struct shmc_token young = reserved(pool, U(7));
    EXPECT_EQ(old.index, young.index);
    EXPECT_REFUSED(pool, STALE, release(pool, old));
    MUST(add_manager(pool, 1));
    EXPECT_REFUSED(pool, STALE, publish_and_release(pool, 1, U(1), old));
    MUST(release(pool, young));
    EXPECT_REFUSED(pool, STALE, release(pool, young));
}

TEST(a_membership_dies_with_its_use_of_the_entry)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_token old = registered(pool, 5);
    MUST(release_manager(pool, old));
    EXPECT_REFUSED(pool, STALE, release_manager(pool, old));
    struct shmc_token young = registered(pool, 5);
    EXPECT_EQ(old.index, young.index);
    EXPECT_REFUSED(pool, STALE, release_manager(pool, old));
    MUST(release_manager(pool, young));
}

TEST(a_token_of_nothing_is_stale)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_token token = reserved(pool, U(1));
    const struct shmc_token strangers[] = {
        {token.index, token.generation + 1},
        {token.index, 0},
        {token.index + 1, 0},
        {*pool->reservations.mark, 1},
        {pool->reservations.max, 1},
        {UINT64_MAX, UINT64_MAX},
        {UINT64_MAX / 64, 1},
    };
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        EXPECT_REFUSED(pool, STALE, release(pool, strangers[i]));
        EXPECT_REFUSED(pool, STALE, release_manager(pool, strangers[i]));
    }
    EXPECT_REFUSED(pool, STALE, release_manager(pool, token)); /* of the other table */
    MUST(release(pool, token));
}

TEST(a_token_of_another_owner_is_stale)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_handle *other = attach(pool->segment_fd);
    struct shmc_token token = reserved(pool, U(1));
    struct shmc_token membership = registered(pool, 1);
    EXPECT_REFUSED(pool, STALE, release(other, token));
    EXPECT_REFUSED(pool, STALE, release_manager(other, membership));
    EXPECT_REFUSED(pool, STALE, publish_and_release(other, 1, U(1), token));
}

/* ---- the manager index ----------------------------------------------------------------------- */

/* Finds ids that share a bucket. */
static void ids_of_one_bucket(const struct shmc_handle *pool, uint64_t *ids, uint32_t count)
{
    uint64_t bucket = shmc_manager_bucket(pool, 1);
    uint64_t id = 1;
    for (uint32_t found = 0; found < count; id++)
        if (shmc_manager_bucket(pool, id) == bucket)
            ids[found++] = id;
}

static uint32_t chain_length(const struct shmc_handle *pool, uint64_t id)
{
    uint32_t length = 0;
    uint64_t index = pool->manager_index[shmc_manager_bucket(pool, id)];
    for (; index != SHMC_NO_INDEX; length++)
        index = pool->managers.entries[index].next;
    return length;
}

/* For each order in which a chain of four can lose its members. */
TEST(a_bucket_may_hold_every_manager)
{
    struct shmc_handle *pool = attach(new_segment(tables(ROOMY, 1, 4, 1)));
    uint64_t ids[5];
    ids_of_one_bucket(pool, ids, 5);
    for (uint32_t order = 0; order < 4 * 3 * 2; order++) {
        struct shmc_token tokens[4];
        bool gone[4] = {false};
        for (int i = 0; i < 4; i++)
            tokens[i] = registered(pool, ids[i]);
        EXPECT_EQ(4, chain_length(pool, ids[0]));
        uint32_t choices = order;
        for (uint32_t left = 4; left > 0; choices /= left, left--) {
            uint32_t skip = choices % left;
            uint32_t victim = 0;
            while (gone[victim] || skip-- > 0)
                victim++;
            MUST(release_manager(pool, tokens[victim]));
            gone[victim] = true;
            for (int i = 0; i < 4; i++)
                EXPECT(publish(pool, ids[i], U(1)) == (gone[i] ? SHMC_UNKNOWN_MANAGER : SHMC_OK));
            EXPECT_STATUS(UNKNOWN_MANAGER, publish(pool, ids[4], U(1)));
            EXPECT_CLEAN(pool);
        }
        EXPECT_EQ(0, chain_length(pool, ids[0]));
    }
}

TEST(a_chain_refuses_a_second_use_of_an_id)
{
    struct shmc_handle *pool = attach(new_segment(tables(ROOMY, 1, 8, 1)));
    uint64_t ids[4];
    ids_of_one_bucket(pool, ids, 4);
    for (int i = 0; i < 4; i++)
        registered(pool, ids[i]);
    for (int i = 0; i < 4; i++)
        EXPECT_REFUSED(pool, DUPLICATE_MANAGER, add_manager(pool, ids[i]));
}

/* ---- ids ------------------------------------------------------------------------------------- */

TEST(allocated_ids_go_around_used_ones)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    MUST(add_any_manager(pool));
    EXPECT_EQ(1, last.id);
    registered(pool, 2);
    registered(pool, 3);
    struct shmc_token fifth = registered(pool, 5);
    MUST(add_any_manager(pool));
    EXPECT_EQ(4, last.id);
    MUST(release_manager(pool, fifth));
    MUST(add_any_manager(pool)); /* 5 was never allocated */
    EXPECT_EQ(5, last.id);
    struct shmc_token token = last.token;
    MUST(release_manager(pool, token));
    MUST(add_any_manager(pool)); /* but now it was, and is not repeated */
    EXPECT_EQ(6, last.id);
    EXPECT_CLEAN(pool);
}

TEST(allocated_ids_wrap)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    registered(pool, 0);
    pool->control->manager_id_next = UINT64_MAX;
    MUST(add_any_manager(pool));
    EXPECT_EQ(UINT64_MAX, last.id);
    MUST(add_any_manager(pool));
    EXPECT_EQ(1, last.id);
    EXPECT_CLEAN(pool);
}

/* The longest search: every other manager has the id that is tried next. */
TEST(allocated_ids_are_found_after_a_full_row)
{
    struct shmc_handle *pool = attach(new_segment(tables(ROOMY, 1, 64, 1)));
    for (uint64_t id = 1; id < 64; id++)
        registered(pool, id);
    MUST(add_any_manager(pool));
    EXPECT_EQ(64, last.id);
    EXPECT_STATUS(MANAGERS_FULL, add_any_manager(pool));
    EXPECT_CLEAN(pool);
}

/* ---- the ends of 64 bits --------------------------------------------------------------------- */

TEST(every_id_is_legal)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    registered(pool, 0);
    registered(pool, UINT64_MAX);
    MUST(publish(pool, 0, U(1)));
    MUST(publish(pool, UINT64_MAX, U(2)));
    EXPECT_USAGE(U(3), aggregate());
    EXPECT_STATUS(UNKNOWN_MANAGER, publish(pool, UINT64_MAX - 1, U(1)));
}

TEST(every_axis_reaches_the_last_byte)
{
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++) {
        struct shmc_handle *pool = new_pool(U(UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX));
        struct usage most = NOTHING;
        struct usage one = NOTHING;
        most.axis[axis] = UINT64_MAX;
        one.axis[axis] = 1;
        struct shmc_token token = reserved(pool, most);
        EXPECT_LEVEL(pool, most, most);
        EXPECT_REFUSED(pool, ADMISSION_OVERFLOW, reserve(pool, one));
        registered(pool, 1);
        EXPECT_REFUSED(pool, PUBLICATION_OVERFLOW, publish(pool, 1, one));
        MUST(publish_and_release(pool, 1, most, token)); /* the sum after both is what counts */
        EXPECT_LEVEL(pool, most, most);
        EXPECT_REFUSED(pool, ADMISSION_OVERFLOW, reserve(pool, one));
        MUST(publish(pool, 1, one));
        EXPECT_LEVEL(pool, one, most);
        EXPECT_CLEAN(pool);
    }
}

TEST(one_overflowing_axis_refuses_all_four)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    registered(pool, 1);
    registered(pool, 2);
    MUST(publish(pool, 1, U(1, 2, 3, UINT64_MAX)));
    EXPECT_REFUSED(pool, PUBLICATION_OVERFLOW, publish(pool, 2, U(5, 5, 5, 1)));
    struct shmc_token token = reserved(pool, U(4));
    EXPECT_REFUSED(pool, PUBLICATION_OVERFLOW, publish_and_release(pool, 2, U(0, 0, 0, 1), token));
    EXPECT_REFUSED(pool, ADMISSION_OVERFLOW, reserve(pool, U(5, 5, 5, 1)));
    MUST(publish(pool, 1, NOTHING));
    EXPECT_LEVEL(pool, U(4), U(5, 2, 3, 0));
}

/* ---- the tables that people and the binding rely on ------------------------------------------ */

TEST(every_status_has_a_name)
{
    for (int status = 0; status < SHMC_STATUS_COUNT; status++) {
        EXPECT(strcmp(shmc_status_name((enum shmc_status)status), "?") != 0);
        for (int other = 0; other < status; other++)
            EXPECT(strcmp(shmc_status_name((enum shmc_status)status),
                          shmc_status_name((enum shmc_status)other)) != 0);
    }
    EXPECT(strcmp(shmc_status_name(SHMC_STATUS_COUNT), "?") == 0);
    EXPECT(strcmp(shmc_status_name((enum shmc_status) - 1), "?") == 0);
    EXPECT(!shmc_status_retry(SHMC_OK) && shmc_status_retry(SHMC_BUSY));
    EXPECT(!shmc_status_retry(SHMC_POISONED) && !shmc_status_retry(SHMC_STATUS_COUNT));
}

TEST(every_refusal_and_problem_has_a_text)
{
    for (int name = 0; name < SHMC_CHECK_COUNT; name++)
        EXPECT(strcmp(shmc_check_name_text((enum shmc_check_name)name), "?") != 0);
    EXPECT(strcmp(shmc_check_name_text(SHMC_CHECK_COUNT), "?") == 0);
    for (int kind = 0; kind < SHMC_PROBLEM_KINDS; kind++)
        EXPECT(strcmp(shmc_problem_text((enum shmc_problem_kind)kind), "?") != 0);
    EXPECT(strcmp(shmc_problem_text(SHMC_PROBLEM_KINDS), "?") == 0);
}
