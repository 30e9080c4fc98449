/* os.h: the operating system as the engine sees it. os_linux.c is the only file with system calls.
 *
 * Every function either succeeds, says no in its result, or leaves errno; none retries for ever and
 * none is called while the segment's lock is held.
 */
#ifndef SHMC_OS_H
#define SHMC_OS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct shmc_file_facts {
    uint64_t device;
    uint64_t inode;
    uint64_t size_bytes;
    uint32_t uid;
    uint32_t mode; /* permission bits */
    bool regular;
};

struct shmc_host_identity {
    uint64_t boot_id[2];
    uint64_t pid_namespace;
    uint64_t time_namespace; /* 0 when the kernel has none */
    uint32_t uid;
};

enum shmc_answer {
    SHMC_NO,
    SHMC_YES,
    SHMC_CANNOT_TELL,
};

bool shmc_os_file_facts(int fd, struct shmc_file_facts *facts);
/* Whether the number still names this file; false for a closed one. */
bool shmc_os_is_file(int fd, uint64_t device, uint64_t inode);
bool shmc_os_host_identity(struct shmc_host_identity *identity);
bool shmc_os_read_at(int fd, void *buffer, uint64_t bytes, uint64_t offset);

/* Maps the first bytes of fd, shared and writable, not inherited by fork; NULL and errno on
 * failure. */
void *shmc_os_map(int fd, uint64_t bytes);
/* The same from an offset, and perhaps only for reading. */
void *shmc_os_map_at(int fd, uint64_t offset, uint64_t bytes, bool writable);
/* For a forked child: a mapping for reading at an address where nothing is mapped; false when that
 * cannot be. */
bool shmc_os_map_again(void *address, int fd, uint64_t offset, uint64_t bytes);
/* Takes these addresses, if nobody has them, without memory behind them. */
bool shmc_os_reserve(void *address, uint64_t bytes);
/* A wish: the kernel may know better. */
void shmc_os_want_huge_pages(void *address, uint64_t bytes);
/* Fills the page table for this range, so that no later touch faults; false and errno. */
bool shmc_os_populate(void *address, uint64_t bytes, bool writable);
/* Makes every page that these bytes touch fault. */
void shmc_os_forbid(void *address, uint64_t bytes);
void shmc_os_unmap(void *address, uint64_t bytes);
void shmc_os_yield(void);
/* One private page that fork replaces by zeroes; NULL when the kernel cannot. */
uint64_t *shmc_os_fork_page(void);

uint64_t shmc_os_random(void);
uint64_t shmc_os_realtime_ns(void);
uint64_t shmc_os_monotonic_ns(void);
pid_t shmc_os_pid(void);
void shmc_os_close(int fd);

void shmc_os_futex_wait(uint32_t *word, uint32_t seen, uint64_t wait_ns);
void shmc_os_futex_wake_all(uint32_t *word);

/* A futex, and the value that it must have for anybody to sleep on it. */
struct shmc_futex {
    uint32_t *word;
    uint32_t seen;
};

#define SHMC_FUTEXES_MAX 128u /* the kernel's limit of one call */

/* Sleeps until one is woken or differs, at most wait_ns. False, at once, where the kernel cannot
 * wait for several (before Linux 5.16, or forbidden). */
bool shmc_os_futex_wait_any(const struct shmc_futex *futexes, uint32_t count, uint64_t wait_ns);

/* A second open file description of the file behind fd, close-on-exec; -1 on failure. */
int shmc_os_reopen(int fd);
/* OFD write lock on one byte; false when taken or impossible. Lives until every copy of fd is
 * closed. */
bool shmc_os_lock_byte(int fd, uint64_t byte);
/* Whether somebody else's description holds a lock on the byte. */
enum shmc_answer shmc_os_byte_locked(int fd, uint64_t byte);

int shmc_os_pidfd_open(pid_t pid); /* -1 and errno */
bool shmc_os_is_dead(int pidfd);   /* whether it reports the end of its process */
uint64_t
shmc_os_pidfs_inode(int pidfd); /* 0 when the kernel's pidfds have no identity of their own */
bool shmc_os_process_exists(pid_t pid); /* signal 0; EPERM counts as existing */

struct shmc_process_stat {
    char state;
    uint64_t threads;
    uint64_t start_ticks;
};
/* From /proc/<pid>/stat; false when it cannot be read or does not describe this namespace. */
bool shmc_os_process_stat(pid_t pid, struct shmc_process_stat *stat);
/* Whether the process maps this file, from /proc/<pid>/maps. */
enum shmc_answer shmc_os_process_maps_file(pid_t pid, uint64_t device, uint64_t inode);

/* Runs child() in a forked child that is then killed; true when that could be done. */
bool shmc_os_run_and_kill_child(void (*child)(void *), void *argument);
void *shmc_os_map_shared_page(void);

#endif
