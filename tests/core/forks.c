/* forks.c: a forked child is a stranger to its parent's handles. */
#include "harness.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

struct family {
    struct shmc_handle *pool;
    struct shmc_token token;
    struct shmc_token membership;
    int watched; /* a pidfd that the parent's handle keeps */
};

static struct family new_family(void)
{
    struct family family = {.pool = new_pool(ROOMY)};
    MUST(reserve(family.pool, U(7)));
    family.token = last.token;
    MUST(add_manager(family.pool, 1));
    family.membership = last.token;
    return family;
}

/* ---- what the child has --------------------------------------------------------------------- */

static void use_inherited(void *argument)
{
    struct family *family = argument;
    struct shmc_handle *pool = family->pool;
    struct shmc_held rows[4];
    EXPECT(!shmc_is_mine(pool));
    EXPECT_STATUS(FORKED, reserve(pool, U(1)));
    EXPECT_STATUS(FORKED, release(pool, family->token));
    EXPECT_STATUS(FORKED, release_manager(pool, family->membership));
    EXPECT_STATUS(FORKED, publish(pool, 1, U(1)));
    EXPECT_STATUS(FORKED, publish_and_release(pool, 1, U(1), family->token));
    EXPECT_STATUS(FORKED, join(pool));
    EXPECT_STATUS(FORKED, report(pool));
    EXPECT_STATUS(FORKED, held(pool, rows));
    EXPECT_STATUS(FORKED, check(pool, NULL, 0));
    EXPECT_STATUS(FORKED, retire(pool, UINT64_MAX));
    EXPECT_STATUS(FORKED, reclaim_begin(pool, 0, shmc_nonce(pool)));
    EXPECT_STATUS(FORKED, reclaim_step(pool, 0, shmc_nonce(pool), 0));
    shmc_waiter_set(pool, true);
    EXPECT_EQ(0, shmc_release_counter(pool));
    shmc_wait_release(pool, 0, 1000000000000ull); /* returns at once: the watchdog comes first */
}

static void close_inherited(void *argument)
{
    shmc_close(((struct family *)argument)->pool);
}

TEST(inherited_handles_are_inert)
{
    struct family family = new_family();
    struct image image = image_of(family.pool);
    in_child(use_inherited, &family);
    in_child(close_inherited, &family);
    EXPECT(same_image(family.pool, &image));
    EXPECT_EQ(0, family.pool->gate->waiters[0]);
    free(image.data);
    EXPECT_STATUS(OK, publish(family.pool, 1, U(1)));
    MUST(release(family.pool, family.token));
    EXPECT_CLEAN(family.pool);
}

static void expect_no_mapping(void *argument)
{
    struct family *family = argument;
    EXPECT(msync(family->pool->base, SHMC_PAGE_BYTES, MS_ASYNC) == -1 && errno == ENOMEM);
}

TEST(the_mapping_is_not_inherited)
{
    struct family family = new_family();
    in_child(expect_no_mapping, &family);
}

static void attach_anew(void *argument)
{
    struct family *family = argument;
    EXPECT(!shmc_nonce_is_local(shmc_nonce(family->pool)));
    struct shmc_handle *mine = attach(family->pool->segment_fd);
    EXPECT(shmc_is_mine(mine) && !shmc_is_mine(family->pool));
    EXPECT(shmc_slot(mine) != shmc_slot(family->pool));
    EXPECT_STATUS(STALE, release(mine, family->token));
    EXPECT_STATUS(FORKED, release(family->pool, family->token));
    MUST(reserve(mine, U(1)));
    EXPECT_LEVEL(mine, U(8), U(8));
    struct shmc_handle *inherited = family->pool;
    family->pool = mine;
    in_child(use_inherited, family); /* and so on: a grandchild */
    shmc_close(inherited);
    detach(mine);
    shmc_close(mine);
}

TEST(a_child_may_attach_anew)
{
    struct family family = new_family();
    in_child(attach_anew, &family);
    EXPECT_LEVEL(family.pool, U(7), U(8));
    EXPECT_EQ(1, last.report.owners);
    EXPECT_CLEAN(family.pool);
}

/* ---- what the child must not keep ----------------------------------------------------------- */

static void nothing(void *argument)
{
    (void)argument;
}

/* The exec lock would otherwise make an owner that is gone look alive for the child's lifetime. */
TEST(a_child_does_not_hold_the_parents_lock)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    int fd = pool->segment_fd;
    uint64_t byte = shmc_nonce(pool) >> 2;
    EXPECT(pool->exec_locked);
    EXPECT_EQ(SHMC_YES, shmc_os_byte_locked(fd, byte));
    pid_t pid = child_that_stays(nothing, NULL);
    EXPECT_EQ(SHMC_YES, shmc_os_byte_locked(fd, byte));
    shmc_close(pool);
    EXPECT_EQ(SHMC_NO, shmc_os_byte_locked(fd, byte));
    kill_child(pid);
}

static void expect_closed(void *argument)
{
    struct family *family = argument;
    EXPECT(fcntl(family->watched, F_GETFD) == -1 && errno == EBADF);
    EXPECT(fcntl(family->pool->segment_fd, F_GETFD) != -1); /* borrowed: the caller's */
}

static void attach_quietly(void *fd)
{
    attach(*(int *)fd);
}

TEST(a_child_keeps_no_pidfd)
{
    struct family family = new_family();
    struct shmc_owner_view view;
    pid_t other = child_that_stays(attach_quietly, &family.pool->segment_fd);
    EXPECT(shmc_owner_view(family.pool, 1, &view));
    EXPECT_EQ(SHMC_ALIVE, shmc_owner_verdict(family.pool, &view));
    family.watched = shmc_owner_pidfd(family.pool, &view);
    EXPECT(family.watched >= 0);
    in_child(expect_closed, &family);
    kill_child(other);
}

/* A raw fork runs no handler: the child finds the parent's handle in its registry. */
TEST(a_raw_fork_may_close_what_it_inherited)
{
    struct family family = new_family();
    uint64_t nonce = shmc_nonce(family.pool);
    int status;
    pid_t pid = _Fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        struct shmc_handle *mine = attach(family.pool->segment_fd);
        shmc_close(family.pool);
        EXPECT(!shmc_nonce_is_local(nonce));
        EXPECT(shmc_nonce_is_local(shmc_nonce(mine)));
        _exit(0);
    }
    EXPECT(waitpid(pid, &status, 0) == pid);
    EXPECT_EQ(0, status);
    EXPECT_LEVEL(family.pool, U(7), U(7));
}

/* ---- forking in the middle of things -------------------------------------------------------- */

static bool stop_threads;

static void *open_and_close(void *argument)
{
    int fd = *(int *)argument;
    while (!__atomic_load_n(&stop_threads, __ATOMIC_RELAXED)) {
        struct shmc_handle *handle = attach(fd);
        MUST(reserve(handle, U(1)));
        detach(handle);
        shmc_close(handle);
    }
    return NULL;
}

static void open_once(void *fd)
{
    struct shmc_handle *handle = attach(*(int *)fd);
    MUST(reserve(handle, U(1)));
    detach(handle);
    shmc_close(handle);
}

/* A child of a process whose other threads are in the middle of open, requests and close. */
TEST(threads_do_not_disturb_a_fork)
{
    int fd = new_segment(tables(ROOMY, 8, 8, 8));
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        EXPECT(pthread_create(&threads[i], NULL, open_and_close, &fd) == 0);
    for (uint64_t round = 0; round < rounds(50); round++)
        in_child(open_once, &fd);
    __atomic_store_n(&stop_threads, true, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++)
        EXPECT(pthread_join(threads[i], NULL) == 0);
    struct shmc_handle *pool = observe(fd);
    MUST(report(pool));
    EXPECT_EQ(0, last.report.current[SHMC_DEVICE]);
    EXPECT_EQ(0, last.report.owners);
    EXPECT_CLEAN(pool);
}
