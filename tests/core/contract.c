/* contract.c: the pool contract's worked examples and checks, asked of the engine itself. */
#include "harness.h"

/* Examples are named by the contract's letters, checks by its P numbers. */

TEST(example_a_admission_and_publication_above_a_limit)
{
    struct shmc_handle *pool = new_pool(U(200, 80, 60, 0));
    MUST(add_manager(pool, 41));
    MUST(publish(pool, 41, U(150, 30, 0, 0)));
    EXPECT_USAGE(U(150, 30, 0, 0), aggregate());
    EXPECT_LEVEL(pool, U(150, 30, 0, 0), U(150, 30, 0, 0));
    MUST(reserve(pool, U(40, 0, 0, 0)));
    struct shmc_token token = last.token;
    EXPECT_LEVEL(pool, U(190, 30, 0, 0), U(190, 30, 0, 0));
    EXPECT_STATUS(BUDGET_EXCEEDED, reserve(pool, U(20, 0, 0, 0)));
    EXPECT_BUDGET(SHMC_DEVICE, 210, 200);
    EXPECT_LEVEL(pool, U(190, 30, 0, 0), U(190, 30, 0, 0));
    MUST(publish(pool, 41, U(230, 30, 0, 0)));
    EXPECT_USAGE(U(270, 30, 0, 0), aggregate());
    EXPECT_LEVEL(pool, U(270, 30, 0, 0), U(190, 30, 0, 0));
    EXPECT_STATUS(BUDGET_EXCEEDED, reserve(pool, U(1, 0, 0, 0)));
    EXPECT_BUDGET(SHMC_DEVICE, 271, 200);
    MUST(reserve(pool, U(0, 10, 0, 0)));
    EXPECT_LEVEL(pool, U(270, 40, 0, 0), U(190, 40, 0, 0));
    MUST(release(pool, token));
    EXPECT_LEVEL(pool, U(230, 40, 0, 0), U(190, 40, 0, 0));
    MUST(publish(pool, 41, U(195, 30, 0, 0)));
    EXPECT_USAGE(U(195, 40, 0, 0), aggregate());
    EXPECT_LEVEL(pool, U(195, 40, 0, 0), U(195, 40, 0, 0));
    EXPECT_STATUS(BUDGET_EXCEEDED, reserve(pool, U(0, 0, 0, 1)));
    EXPECT_BUDGET(SHMC_DISK, 1, 0);
    MUST(reserve(pool, U(0, 40, 0, 0)));
    EXPECT_LEVEL(pool, U(195, 80, 0, 0), U(195, 80, 0, 0));
    EXPECT_CLEAN(pool);
}

TEST(example_b_a_peak_lags_behind_a_release)
{
    struct shmc_handle *pool = new_pool(U(100, 1, 1, 0));
    MUST(reserve(pool, U(50)));
    struct shmc_token token = last.token;
    EXPECT_LEVEL(pool, U(50), U(50));
    MUST(add_manager(pool, 1));
    MUST(publish(pool, 1, U(70)));
    EXPECT_LEVEL(pool, U(120), U(50));
    MUST(release(pool, token));
    EXPECT_LEVEL(pool, U(70), U(50));
    MUST(publish(pool, 1, U(70)));
    EXPECT_LEVEL(pool, U(70), U(70));
}

TEST(example_c_the_first_exceeded_axis_is_named)
{
    struct shmc_handle *pool = new_pool(U(10, 10, 10, 10));
    EXPECT_STATUS(BUDGET_EXCEEDED, reserve(pool, U(0, 11, 0, 11)));
    EXPECT_BUDGET(SHMC_HOST, 11, 10);
    EXPECT_STATUS(BUDGET_EXCEEDED, reserve(pool, U(0, 0, 12, 12)));
    EXPECT_BUDGET(SHMC_TRANSFER, 12, 10);
    EXPECT_STATUS(BUDGET_EXCEEDED, reserve(pool, U(11, UINT64_MAX, 0, 0)));
    EXPECT_BUDGET(SHMC_DEVICE, 11, 10);
    EXPECT_LEVEL(pool, NOTHING, NOTHING);
}

TEST(example_d_overflow_is_found_before_any_budget)
{
    struct shmc_handle *pool = new_pool(U(100, 1, 1, 0));
    MUST(reserve(pool, U(5)));
    EXPECT_STATUS(ADMISSION_OVERFLOW, reserve(pool, U(UINT64_MAX)));
    EXPECT_STATUS(BUDGET_EXCEEDED, reserve(pool, U(UINT64_MAX - 5)));
    EXPECT_BUDGET(SHMC_DEVICE, UINT64_MAX, 100);
    EXPECT_STATUS(ADMISSION_OVERFLOW, reserve(pool, U(UINT64_MAX, 500, 0, 0)));
    EXPECT_LEVEL(pool, U(5), U(5));
}

/* Both columns of the table: they differ in the host limit alone, and so in the host peak. */
static void reserve_publish_release(uint64_t host_limit, uint64_t host_peak)
{
    struct shmc_handle *pool = new_pool(U(64, host_limit, 96, 0));
    MUST(add_manager(pool, 3));
    MUST(publish(pool, 3, U(40)));
    MUST(reserve(pool, U(0, 24, 24, 0)));
    struct shmc_token token = last.token;
    EXPECT_LEVEL(pool, U(40, 24, 24, 0), U(40, 24, 24, 0));
    MUST(publish(pool, 3, U(40, 24, 24, 0)));
    EXPECT_LEVEL(pool, U(40, 48, 48, 0), U(40, host_peak, 48, 0));
    MUST(release(pool, token));
    EXPECT_LEVEL(pool, U(40, 24, 24, 0), U(40, host_peak, 48, 0));
    MUST(publish(pool, 3, U(0, 24, 0, 0)));
    EXPECT_LEVEL(pool, U(0, 24, 0, 0), U(40, host_peak, 48, 0));
}

TEST(example_e_both_charges_coexist_for_a_moment)
{
    reserve_publish_release(48, 48);
    reserve_publish_release(30, 24);
}

/* The same as one request: nobody sees the doubled charge, and neither does the peak. */
TEST(example_e_as_one_request)
{
    struct shmc_handle *pool = new_pool(U(64, 30, 96, 0));
    MUST(add_manager(pool, 3));
    MUST(publish(pool, 3, U(40)));
    MUST(reserve(pool, U(0, 24, 24, 0)));
    struct shmc_token token = last.token;
    MUST(publish_and_release(pool, 3, U(40, 24, 24, 0), token));
    EXPECT_USAGE(U(40, 24, 24, 0), aggregate());
    EXPECT_LEVEL(pool, U(40, 24, 24, 0), U(40, 24, 24, 0));
    EXPECT_STATUS(STALE, release(pool, token));
    EXPECT_STATUS(STALE, publish_and_release(pool, 3, U(1), token));
    EXPECT_STATUS(UNKNOWN_MANAGER, publish_and_release(pool, 4, U(1), token));
    EXPECT_LEVEL(pool, U(40, 24, 24, 0), U(40, 24, 24, 0));
    EXPECT_CLEAN(pool);
}

TEST(example_f_a_reservation_outlives_its_manager)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    MUST(add_manager(pool, 8));
    struct shmc_token membership = last.token;
    MUST(publish(pool, 8, U(6, 2, 0, 1)));
    MUST(reserve(pool, U(0, 3, 0, 0)));
    struct shmc_token token = last.token;
    MUST(release_manager(pool, membership));
    EXPECT_LEVEL(pool, U(0, 3, 0, 0), U(6, 5, 0, 1));
    EXPECT_EQ(0, last.report.managers);
    EXPECT_EQ(1, last.report.reservations);
    MUST(release(pool, token));
    EXPECT_LEVEL(pool, NOTHING, U(6, 5, 0, 1));
    MUST(add_manager(pool, 8));
    MUST(publish(pool, 8, NOTHING));
    EXPECT_USAGE(NOTHING, aggregate());
}

struct racer {
    struct shmc_handle *pool;
    pthread_barrier_t *barrier;
    enum shmc_status status;
    struct shmc_request request;
};

static void *race(void *argument)
{
    struct racer *racer = argument;
    pthread_barrier_wait(racer->barrier);
    racer->status = reserve(racer->pool, U(0, 13, 0, 0));
    racer->request = last;
    return NULL;
}

TEST(example_g_one_of_two_racers_wins)
{
    struct shmc_handle *pool = new_pool(U(1, 20, 1, 0));
    pthread_barrier_t barrier;
    EXPECT(pthread_barrier_init(&barrier, NULL, 2) == 0);
    for (uint32_t round = 0; round < 50; round++) {
        struct racer racers[2] = {{.pool = pool, .barrier = &barrier},
                                  {.pool = pool, .barrier = &barrier}};
        pthread_t threads[2];
        for (int i = 0; i < 2; i++)
            EXPECT(pthread_create(&threads[i], NULL, race, &racers[i]) == 0);
        for (int i = 0; i < 2; i++)
            EXPECT(pthread_join(threads[i], NULL) == 0);
        int loser = racers[0].status == SHMC_OK;
        EXPECT_STATUS(OK, racers[!loser].status);
        EXPECT_STATUS(BUDGET_EXCEEDED, racers[loser].status);
        last = racers[loser].request;
        EXPECT_BUDGET(SHMC_HOST, 26, 20);
        EXPECT_LEVEL(pool, U(0, 13, 0, 0), U(0, 13, 0, 0));
        MUST(release(pool, racers[!loser].request.token));
        EXPECT_LEVEL(pool, NOTHING, U(0, 13, 0, 0));
    }
}

TEST(p1_device_and_transfer_need_a_limit)
{
    struct shmc_geometry geometry = tables(U(1, 0, 1, 0), 1, 1, 1);
    EXPECT(shmc_segment_bytes(&geometry) != 0);
    geometry = tables(U(0, 1, 0, 1), 1, 1, 1);
    EXPECT_EQ(0, shmc_segment_bytes(&geometry));
    geometry = tables(U(1, 1, 0, 1), 1, 1, 1);
    EXPECT_EQ(0, shmc_segment_bytes(&geometry));
}

TEST(p5_publishing_returns_the_aggregate)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_handle *other = attach(pool->segment_fd);
    MUST(reserve(other, U(4)));
    MUST(add_manager(pool, 1));
    MUST(publish(pool, 1, U(9)));
    EXPECT_USAGE(U(13), aggregate());
}

TEST(p6_publishing_replaces)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    MUST(add_manager(pool, 1));
    MUST(publish(pool, 1, U(9)));
    MUST(publish(pool, 1, U(2)));
    EXPECT_LEVEL(pool, U(2), U(9));
}

TEST(p7_registration_is_exclusive)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_handle *other = attach(pool->segment_fd);
    EXPECT_STATUS(UNKNOWN_MANAGER, publish(pool, 7, U(1)));
    MUST(add_manager(pool, 7));
    struct shmc_token token = last.token;
    EXPECT_STATUS(DUPLICATE_MANAGER, add_manager(pool, 7));
    EXPECT_STATUS(DUPLICATE_MANAGER, add_manager(other, 7));
    MUST(release_manager(pool, token));
    EXPECT_STATUS(UNKNOWN_MANAGER, publish(pool, 7, U(1)));
    MUST(add_manager(other, 7));
}

TEST(p8_a_zero_reservation_always_succeeds)
{
    struct shmc_handle *pool = new_pool(U(1, 1, 1, 1));
    MUST(add_manager(pool, 1));
    MUST(publish(pool, 1, U(9, 9, 9, 9)));
    MUST(reserve(pool, NOTHING));
    struct shmc_token token = last.token;
    EXPECT_LEVEL(pool, U(9, 9, 9, 9), NOTHING);
    MUST(release(pool, token));
    EXPECT_LEVEL(pool, U(9, 9, 9, 9), NOTHING);
}

TEST(p9_releasing_twice_subtracts_once)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    MUST(reserve(pool, U(1, 2, 3, 4)));
    struct shmc_token kept = last.token;
    MUST(reserve(pool, U(1, 2, 3, 4)));
    struct shmc_token token = last.token;
    MUST(release(pool, token));
    struct image image = image_of(pool);
    EXPECT_STATUS(STALE, release(pool, token));
    EXPECT(same_image(pool, &image));
    free(image.data);
    EXPECT_LEVEL(pool, U(1, 2, 3, 4), U(2, 4, 6, 8));
    MUST(release(pool, kept));
    EXPECT_LEVEL(pool, NOTHING, U(2, 4, 6, 8));
}
