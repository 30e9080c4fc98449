/* waiting.c: what gives back wakes who waits, and a killed waiter costs nothing. */
#include "harness.h"

struct waiting {
    struct shmc_handle *pool;
    pid_t thread; /* 0 until it is about to sleep */
};

static void *wait_for_capacity(void *argument)
{
    struct waiting *waiting = argument;
    shmc_waiter_set(waiting->pool, true);
    uint32_t seen = shmc_release_counter(waiting->pool);
    __atomic_store_n(&waiting->thread, gettid(), __ATOMIC_RELEASE);
    while (shmc_release_counter(waiting->pool) == seen)
        shmc_wait_release(waiting->pool, seen, 1000000000000ull); /* the watchdog comes first */
    shmc_waiter_set(waiting->pool, false);
    return NULL;
}

static void expect_woken_by(struct waiting *waiting, enum shmc_status (*act)(struct shmc_handle *))
{
    pthread_t thread;
    waiting->thread = 0;
    EXPECT(pthread_create(&thread, NULL, wait_for_capacity, waiting) == 0);
    wait_for(thread_sleeps, &waiting->thread);
    MUST(act(waiting->pool));
    EXPECT(pthread_join(thread, NULL) == 0);
}

static struct shmc_token token_to_release;

static enum shmc_status release_token(struct shmc_handle *pool)
{
    return release(pool, token_to_release);
}

static enum shmc_status publish_less(struct shmc_handle *pool)
{
    return publish(pool, 1, NOTHING);
}

static enum shmc_status release_membership(struct shmc_handle *pool)
{
    return release_manager(pool, token_to_release);
}

static enum shmc_status publish_instead(struct shmc_handle *pool)
{
    return publish_and_release(pool, 1, NOTHING, token_to_release);
}

static enum shmc_status clean_up_after_another(struct shmc_handle *pool)
{
    struct shmc_handle *other = attach(pool->segment_fd);
    MUST(reserve(other, U(1)));
    reclaim(pool, shmc_slot(other), shmc_nonce(other));
    return SHMC_OK;
}

TEST(what_gives_back_wakes_who_waits)
{
    struct waiting waiting = {.pool = new_pool(ROOMY)};
    MUST(reserve(waiting.pool, U(1)));
    token_to_release = last.token;
    expect_woken_by(&waiting, release_token);
    MUST(add_manager(waiting.pool, 1));
    token_to_release = last.token;
    expect_woken_by(&waiting, publish_less);
    struct shmc_token membership = token_to_release;
    MUST(reserve(waiting.pool, U(1)));
    token_to_release = last.token;
    expect_woken_by(&waiting, publish_instead);
    token_to_release = membership;
    expect_woken_by(&waiting, release_membership);
    expect_woken_by(&waiting, clean_up_after_another);
}

struct watching {
    struct shmc_handle *pools[2];
    uint32_t seen[2], rung;
    pid_t thread;
};

static void *wait_for_any(void *argument)
{
    struct watching *watching = argument;
    __atomic_store_n(&watching->thread, gettid(), __ATOMIC_RELEASE);
    while (shmc_rung() == watching->rung &&
           shmc_release_counter(watching->pools[0]) == watching->seen[0] &&
           shmc_release_counter(watching->pools[1]) == watching->seen[1])
        shmc_wait_any(watching->pools, watching->seen, 2, watching->rung, 1000000000000ull);
    return NULL;
}

static pthread_t begin_watching(struct watching *watching)
{
    pthread_t thread;
    watching->thread = 0;
    watching->rung = shmc_rung();
    for (int k = 0; k < 2; k++)
        watching->seen[k] = shmc_release_counter(watching->pools[k]);
    EXPECT(pthread_create(&thread, NULL, wait_for_any, watching) == 0);
    wait_for(thread_sleeps, &watching->thread);
    return thread;
}

TEST(one_thread_waits_for_all_pools_and_the_doorbell)
{
    struct watching watching = {.pools = {new_pool(ROOMY), new_pool(ROOMY)}};
    for (int k = 0; k < 2; k++) {
        shmc_waiter_set(watching.pools[k], true);
        MUST(reserve(watching.pools[k], U(1)));
        struct shmc_token token = last.token;
        pthread_t thread = begin_watching(&watching);
        MUST(release(watching.pools[k], token));
        EXPECT(pthread_join(thread, NULL) == 0);
    }
    pthread_t thread = begin_watching(&watching);
    shmc_ring();
    EXPECT(pthread_join(thread, NULL) == 0);
}

static enum shmc_status retire_without_the_lock(struct shmc_handle *pool)
{
    shmc_retire(pool);
    return SHMC_OK;
}

TEST(the_end_of_the_pool_wakes_who_waits)
{
    struct waiting waiting = {.pool = new_pool(ROOMY)};
    expect_woken_by(&waiting, retire_without_the_lock);
}

TEST(nobody_is_woken_without_a_flag)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    MUST(reserve(pool, U(1)));
    uint32_t before = shmc_release_counter(pool);
    MUST(release(pool, last.token));
    EXPECT_EQ(before, shmc_release_counter(pool));
    shmc_waiter_set(pool, true);
    MUST(reserve(pool, U(1)));
    EXPECT_EQ(before, shmc_release_counter(pool)); /* taking is no reason to wake */
    MUST(release(pool, last.token));
    EXPECT_EQ(before + 1, shmc_release_counter(pool));
    shmc_waiter_set(pool, false);
    EXPECT_EQ(0, pool->gate->waiters[0]);
}

static void attach_and_wait_for_capacity(void *fd)
{
    shmc_waiter_set(attach(*(int *)fd), true);
}

TEST(a_killed_waiter_costs_nothing_after_reclaim)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    pid_t pid = child_that_stays(attach_and_wait_for_capacity, &pool->segment_fd);
    EXPECT_EQ(1u << 1, pool->gate->waiters[0]);
    kill_child(pid);
    struct shmc_owner_view dead[1];
    EXPECT_EQ(1, shmc_find_dead(pool, dead, 1));
    reclaim(pool, dead[0].slot, dead[0].nonce);
    EXPECT_EQ(0, pool->gate->waiters[0]);
    MUST(reserve(pool, U(1)));
    uint32_t before = shmc_release_counter(pool);
    MUST(release(pool, last.token));
    EXPECT_EQ(before, shmc_release_counter(pool));
}

/* The last word of flags is as good as the first. */
TEST(the_last_owner_may_wait)
{
    int fd = new_segment(tables(ROOMY, SHMC_OWNERS_LIMIT, 1, 1));
    struct shmc_handle *pool = attach(fd);
    for (uint32_t slot = 1; slot < SHMC_OWNERS_LIMIT - 1; slot++)
        pool->owners[slot].state = SHMC_OWNER_ACTIVE;
    struct shmc_handle *final = attach(fd);
    EXPECT_EQ(SHMC_OWNERS_LIMIT - 1, shmc_slot(final));
    shmc_waiter_set(final, true);
    EXPECT_EQ(1ull << 63, pool->gate->waiters[SHMC_WAITER_WORDS - 1]);
    uint32_t before = shmc_release_counter(pool);
    MUST(reserve(pool, U(1)));
    MUST(release(pool, last.token));
    EXPECT_EQ(before + 1, shmc_release_counter(pool));
}
