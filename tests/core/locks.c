/* locks.c: a lock that is held, lost with its holder, or damaged, is an answer and never a hang. */
#include "harness.h"

#include <signal.h>
#include <sys/wait.h>

#define SHORT_NS 1000000ull
#define LONG_NS  1000000000000ull /* the watchdog comes first */

static enum shmc_status report_within(struct shmc_handle *pool, uint64_t wait_ns)
{
    struct shmc_request request = {.operation = SHMC_OP_REPORT};
    return shmc_perform(pool, &request, wait_ns);
}

TEST(robust_mutexes_work_here)
{
    EXPECT(shmc_robust_mutex_works());
}

TEST(a_held_lock_makes_others_busy)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    EXPECT_EQ(0, shmc_lock_holder(pool));
    pid_t pid = child_that_stays(hold_the_lock, &pool->segment_fd);
    EXPECT_EQ(pid, shmc_lock_holder(pool));
    EXPECT_STATUS(BUSY, report_within(pool, 0));
    EXPECT_STATUS(BUSY, report_within(pool, 1));
    EXPECT_STATUS(BUSY, report_within(pool, SHORT_NS));
    EXPECT(kill(pid, SIGSTOP) == 0);
    EXPECT_STATUS(BUSY, report_within(pool, SHORT_NS)); /* time is no proof of death */
    EXPECT_EQ(SHMC_POOL_ACTIVE, shmc_pool_state(pool));
    kill_child(pid);
    MUST(report_within(pool, 0));
    EXPECT_EQ(0, shmc_lock_holder(pool));
}

struct patient {
    struct shmc_handle *pool;
    pid_t thread;
    enum shmc_status status;
};

static void *wait_for_the_lock(void *argument)
{
    struct patient *patient = argument;
    __atomic_store_n(&patient->thread, gettid(), __ATOMIC_RELEASE);
    patient->status = report_within(patient->pool, LONG_NS);
    return NULL;
}

TEST(who_waits_gets_the_lock_of_a_killed_holder)
{
    struct patient patient = {.pool = new_pool(ROOMY)};
    pthread_t thread;
    pid_t pid = child_that_stays(hold_the_lock, &patient.pool->segment_fd);
    EXPECT(pthread_create(&thread, NULL, wait_for_the_lock, &patient) == 0);
    wait_for(thread_sleeps, &patient.thread);
    kill_child(pid);
    EXPECT(pthread_join(thread, NULL) == 0);
    MUST(patient.status);
    EXPECT_CLEAN(patient.pool);
}

/* A child that dies of this has met an abort or a fault; its parent's process is spared. */
static void use_damaged_lock(void *argument)
{
    int fd = *(int *)argument;
    struct shmc_handle *pool = attach(fd);
    uint32_t *words = (uint32_t *)&pool->gate->mutex;
    const uint32_t interesting[] = {0, 1, 255, (uint32_t)getpid(), 1u << 30, 1u << 31, UINT32_MAX};
    for (uint64_t changes = 1 + random_below(3); changes > 0; changes--) {
        uint32_t *word = words + random_below(sizeof(pthread_mutex_t) / 4);
        uint64_t choice = random_below(10);
        *word = choice < 7   ? interesting[choice]
                : choice < 9 ? *word ^ 1u << random_below(32)
                             : (uint32_t)random_u64();
    }
    for (int i = 0; i < 2; i++) {
        enum shmc_status status = report_within(pool, SHORT_NS);
        EXPECT(status == SHMC_OK || status == SHMC_BUSY || status == SHMC_POISONED);
    }
}

TEST(any_damaged_lock_gets_an_answer)
{
    for (uint64_t round = 0; round < rounds(100); round++) {
        int fd = new_segment(tables(ROOMY, 1, 1, 1));
        random_start(round + 1);
        in_child(use_damaged_lock, &fd);
        close(fd);
    }
}

TEST(an_ended_pool_answers_without_its_lock)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    pid_t pid = child_that_stays(hold_the_lock, &pool->segment_fd);
    shmc_poison(pool);
    EXPECT_STATUS(POISONED, report_within(pool, 0));
    EXPECT_STATUS(POISONED, reserve(pool, U(1)));
    shmc_retire(pool);
    EXPECT_STATUS(RETIRED, report_within(pool, 0));
    kill_child(pid);
    EXPECT_CLEAN(pool);
}

/* glibc's trylock keeps what it calls not recoverable: only the first to meet it is told. */
TEST(a_lock_that_cannot_be_recovered_poisons)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    kill_child(child_that_stays(hold_the_lock, &pool->segment_fd));
    EXPECT(pthread_mutex_lock(&pool->gate->mutex) == EOWNERDEAD);
    EXPECT(pthread_mutex_unlock(&pool->gate->mutex) == 0); /* without making it consistent */
    EXPECT_STATUS(POISONED, report(pool));
    EXPECT_EQ(SHMC_POOL_POISONED, shmc_pool_state(pool));
    EXPECT_STATUS(POISONED, report(pool));
    shmc_retire(pool); /* the way out needs no lock */
    EXPECT_STATUS(RETIRED, report(pool));
}
