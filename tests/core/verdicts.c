/* verdicts.c: who is alive, who is dead, and what cannot be told. */
#include "harness.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static void attach_and_reserve(void *fd)
{
    MUST(reserve(attach(*(int *)fd), U(7)));
}

static struct shmc_owner_view view_of(struct shmc_handle *pool, uint32_t slot)
{
    struct shmc_owner_view view;
    EXPECT(shmc_owner_view(pool, slot, &view));
    return view;
}

static uint32_t dead_owners(struct shmc_handle *pool)
{
    struct shmc_owner_view dead[4];
    return shmc_find_dead(pool, dead, 4);
}

TEST(a_killed_owner_is_found_and_cleaned)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_owner_view dead[4];
    pid_t pid = child_that_stays(attach_and_reserve, &pool->segment_fd);
    struct shmc_owner_view view = view_of(pool, 1);
    EXPECT_EQ(pid, view.pid);
    EXPECT_EQ(SHMC_ALIVE, shmc_owner_verdict(pool, &view));
    EXPECT_EQ(0, dead_owners(pool));
    kill_child(pid);
    EXPECT_EQ(SHMC_DEAD, shmc_owner_verdict(pool, &view));
    EXPECT_EQ(0, shmc_find_dead(pool, dead, 0));
    EXPECT_EQ(1, shmc_find_dead(pool, dead, 4));
    EXPECT_EQ(view.nonce, dead[0].nonce);
    EXPECT_LEVEL(pool, U(7), U(7));
    reclaim(pool, dead[0].slot, dead[0].nonce);
    EXPECT_LEVEL(pool, NOTHING, U(7));
    EXPECT_EQ(0, dead_owners(pool));
    EXPECT_CLEAN(pool);
}

TEST(a_stopped_owner_is_alive)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    int status;
    pid_t pid = child_that_stays(attach_and_reserve, &pool->segment_fd);
    EXPECT(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid);
    struct shmc_owner_view view = view_of(pool, 1);
    EXPECT_EQ(SHMC_ALIVE, shmc_owner_verdict(pool, &view));
    EXPECT_EQ(0, dead_owners(pool));
    kill_child(pid);
}

TEST(a_handle_closed_without_leaving_is_dead)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    attach_and_reserve(&pool->segment_fd);
    EXPECT_EQ(0, dead_owners(pool));
    struct shmc_handle *careless = attach(pool->segment_fd);
    shmc_close(careless);
    EXPECT_EQ(1, dead_owners(pool));
}

TEST(a_slot_left_half_cleaned_is_offered)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    pid_t pid = child_that_stays(attach_and_reserve, &pool->segment_fd);
    struct shmc_owner_view view = view_of(pool, 1);
    MUST(reclaim_begin(pool, 1, view.nonce));
    EXPECT_EQ(1, dead_owners(pool)); /* whatever its process does */
    kill_child(pid);
}

/* The pid was given to another process before anybody looked: the first descriptor opened, also by
 * a watcher, belongs to the impostor. */
TEST(a_reused_pid_is_no_sign_of_life)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    pid_t pid = child_that_stays(attach_and_reserve, &pool->segment_fd);
    struct shmc_owner *owner = &pool->owners[1];
    owner->exec_locked = 0;
    owner->start_ticks--;
    owner->pidfs_inode -= owner->pidfs_inode != 0;
    struct shmc_owner_view view = view_of(pool, 1);
    struct shmc_handle *watcher = observe(pool->segment_fd);
    EXPECT_EQ(SHMC_DEAD, shmc_owner_verdict(pool, &view));
    shmc_owner_pidfd(watcher, &view);
    EXPECT_EQ(SHMC_DEAD, shmc_owner_verdict(watcher, &view));
    kill_child(pid);
}

TEST(an_impossible_owner_is_unknown)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_owner *owner = &pool->owners[1];
    attach(pool->segment_fd);
    const uint64_t pids[] = {0, (1u << 22) + 1, UINT64_MAX, 1ull << 32};
    for (size_t i = 0; i < sizeof pids / sizeof *pids; i++) {
        owner->pid = pids[i];
        struct shmc_owner_view view = view_of(pool, 1);
        EXPECT_EQ(SHMC_UNKNOWN, shmc_owner_verdict(pool, &view));
        EXPECT(shmc_owner_pidfd(pool, &view) == -1);
    }
    owner->pid = 1;
    owner->nonce = 0;
    struct shmc_owner_view view = view_of(pool, 1);
    EXPECT(shmc_owner_pidfd(pool, &view) == -1);
    EXPECT_EQ(0, dead_owners(pool));
}

TEST(a_free_slot_shows_no_owner)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    struct shmc_owner_view view;
    EXPECT(!shmc_owner_view(pool, 1, &view));
    pool->owners[1].state = 3;
    EXPECT(!shmc_owner_view(pool, 1, &view));
    pool->owners[1].state = UINT64_MAX;
    EXPECT(!shmc_owner_view(pool, 1, &view));
}

static void attach_and_execute(void *fd)
{
    attach(*(int *)fd);
    execlp("sleep", "sleep", "1000", NULL);
    FAIL("cannot execute sleep");
}

static void attach_and_lose_the_lock(void *fd)
{
    close(attach(*(int *)fd)->lock_fd);
}

static bool second_owner_is_dead(void *pool)
{
    struct shmc_owner_view view = view_of(pool, 1);
    EXPECT_EQ(1, view.exec_locked);
    return shmc_owner_verdict(pool, &view) == SHMC_DEAD;
}

static bool has_second_owner(void *pool)
{
    struct shmc_owner_view view;
    return shmc_owner_view(pool, 1, &view);
}

/* The same pid, start time and pidfd, but another program: it knows nothing of what it holds. */
TEST(an_owner_that_executed_another_program_is_dead)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        die_with_parent();
        attach_and_execute(&pool->segment_fd);
    }
    wait_for(has_second_owner, pool);
    wait_for(second_owner_is_dead, pool);
    EXPECT(kill(pid, 0) == 0);
    kill_child(pid);
}

/* Another library may close the descriptor behind the lock: only a process that no longer maps the
 * segment has forgotten it. */
TEST(an_owner_that_lost_its_lock_but_maps_the_segment_is_alive)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    pid_t pid = child_that_stays(attach_and_lose_the_lock, &pool->segment_fd);
    struct shmc_owner_view view = view_of(pool, 1);
    EXPECT_EQ(SHMC_NO, shmc_os_byte_locked(pool->segment_fd, view.nonce >> 2));
    EXPECT_EQ(SHMC_ALIVE, shmc_owner_verdict(pool, &view));
    EXPECT_EQ(0, dead_owners(pool));
    kill_child(pid);
}

/* ---- less to ask ----------------------------------------------------------------------------- */

static void live_without_pidfds(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    EXPECT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* As on an old kernel or in a strict container: signal 0 and /proc tell the same. */
TEST(verdicts_need_no_pidfds)
{
    int status;
    live_without_pidfds();
    struct shmc_handle *pool = new_pool(ROOMY);
    pid_t pid = child_that_stays(attach_and_reserve, &pool->segment_fd);
    struct shmc_owner_view view = view_of(pool, 1);
    EXPECT(shmc_owner_pidfd(pool, &view) == -1);
    EXPECT_EQ(SHMC_ALIVE, shmc_owner_verdict(pool, &view));
    EXPECT(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid);
    EXPECT_EQ(SHMC_ALIVE, shmc_owner_verdict(pool, &view));
    view.start_ticks--;
    EXPECT_EQ(SHMC_DEAD, shmc_owner_verdict(pool, &view)); /* another process has the number */
    view.start_ticks++;
    siginfo_t info;
    EXPECT(kill(pid, SIGKILL) == 0 && waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT) == 0);
    EXPECT_EQ(SHMC_DEAD, shmc_owner_verdict(pool, &view)); /* a zombie */
    EXPECT(waitpid(pid, NULL, 0) == pid);
    EXPECT_EQ(SHMC_DEAD, shmc_owner_verdict(pool, &view));
}

TEST(without_descriptors_nothing_is_proved_but_absence)
{
    struct shmc_handle *pool = new_pool(ROOMY);
    pid_t pid = child_that_stays(attach_and_reserve, &pool->segment_fd);
    struct shmc_owner_view view = view_of(pool, 1);
    struct rlimit before;
    EXPECT(getrlimit(RLIMIT_NOFILE, &before) == 0);
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
    EXPECT(setrlimit(RLIMIT_NOFILE, &none) == 0);
    EXPECT_EQ(SHMC_UNKNOWN, shmc_owner_verdict(pool, &view));
    EXPECT_EQ(0, dead_owners(pool));
    kill_child(pid);
    EXPECT_EQ(SHMC_DEAD, shmc_owner_verdict(pool, &view));
    EXPECT(setrlimit(RLIMIT_NOFILE, &before) == 0);
}
