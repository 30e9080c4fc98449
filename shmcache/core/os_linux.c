/* os_linux.c: every system call of the engine.
 *
 * Contract    As in os.h. Nothing here is called while the segment's lock is held. Interrupted
 *             calls are repeated where repeating is right, bounded where it is not.
 * Errors      A call that fails leaves errno; a question that cannot be answered says so.
 *             "Cannot tell" is never turned into "no" here: owners.c decides what a missing
 *             answer means.
 * Source      proc(5), pidfd_open(2), fcntl(2) on open file description locks, madvise(2),
 *             futex(2).
 */
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

#ifndef MADV_POPULATE_READ /* Linux 5.14; headers may be older */
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

#define SYS_FUTEX_WAITV  449 /* on every architecture but Alpha */
#define FUTEX_OF_32_BITS 0x02

#define PIDFS_MAGIC            0x50494446
#define PATH_BYTES             64
#define STAT_BYTES             1024
#define STAT_FIELD_THREADS     20
#define STAT_FIELD_START_TICKS 22
#define NS_PER_S               1000000000ull

/* ---- files and memory ---------------------------------------------------------------------- */

bool shmc_os_file_facts(int fd, struct shmc_file_facts *facts)
{
    struct stat status;
    if (fstat(fd, &status) != 0)
        return false;
    facts->device = (uint64_t)status.st_dev;
    facts->inode = (uint64_t)status.st_ino;
    facts->size_bytes = (uint64_t)status.st_size;
    facts->uid = status.st_uid;
    facts->mode = status.st_mode & 0777;
    facts->regular = S_ISREG(status.st_mode);
    return true;
}

bool shmc_os_is_file(int fd, uint64_t device, uint64_t inode)
{
    struct stat status;
    return fstat(fd, &status) == 0 && (uint64_t)status.st_dev == device &&
           (uint64_t)status.st_ino == inode;
}

bool shmc_os_read_at(int fd, void *buffer, uint64_t bytes, uint64_t offset)
{
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t got = pread(fd, (char *)buffer + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        done += (uint64_t)got;
    }
    return true;
}

void *shmc_os_map(int fd, uint64_t bytes)
{
    return shmc_os_map_at(fd, 0, bytes, true);
}

void *shmc_os_map_at(int fd, uint64_t offset, uint64_t bytes, bool writable)
{
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *address = mmap(NULL, bytes, protection, MAP_SHARED, fd, (off_t)offset);
    if (address == MAP_FAILED)
        return NULL;
    if (madvise(address, bytes, MADV_DONTFORK) != 0) {
        munmap(address, bytes);
        return NULL;
    }
    return address;
}

bool shmc_os_reserve(void *address, uint64_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *got = mmap(address, bytes, PROT_NONE, flags, -1, 0);
    if (got != MAP_FAILED && got != address)
        munmap(got, bytes);
    return got == address;
}

bool shmc_os_map_again(void *address, int fd, uint64_t offset, uint64_t bytes)
{
    void *got = mmap(address, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, (off_t)offset);
    if (got == MAP_FAILED)
        return false;
    if (got != address || madvise(got, bytes, MADV_DONTFORK) != 0) {
        munmap(got, bytes);
        return false;
    }
    return true;
}

void shmc_os_want_huge_pages(void *address, uint64_t bytes)
{
    madvise(address, bytes, MADV_HUGEPAGE);
}

bool shmc_os_populate(void *address, uint64_t bytes, bool writable)
{
    return madvise(address, bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0;
}

void shmc_os_forbid(void *address, uint64_t bytes)
{
    uintptr_t first = (uintptr_t)address & ~(uintptr_t)(SHMC_PAGE_BYTES - 1);
    uintptr_t end = (uintptr_t)address + bytes;
    mprotect((void *)first, end - first, PROT_NONE);
}

void shmc_os_yield(void)
{
    sched_yield();
}

void shmc_os_unmap(void *address, uint64_t bytes)
{
    munmap(address, bytes);
}

static void *map_private_page(int sharing)
{
    void *page =
        mmap(NULL, SHMC_PAGE_BYTES, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
    return page == MAP_FAILED ? NULL : page;
}

uint64_t *shmc_os_fork_page(void)
{
    void *page = map_private_page(MAP_PRIVATE);
    if (page != NULL && madvise(page, SHMC_PAGE_BYTES, MADV_WIPEONFORK) != 0) {
        munmap(page, SHMC_PAGE_BYTES);
        return NULL;
    }
    return page;
}

void *shmc_os_map_shared_page(void)
{
    return map_private_page(MAP_SHARED);
}

void shmc_os_close(int fd)
{
    if (fd >= 0)
        close(fd);
}

/* ---- numbers ------------------------------------------------------------------------------- */

uint64_t shmc_os_random(void)
{
    uint64_t value = 0;
    while (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value || value == 0)
        ;
    return value;
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t shmc_os_realtime_ns(void)
{
    return clock_ns(CLOCK_REALTIME);
}

uint64_t shmc_os_monotonic_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

pid_t shmc_os_pid(void)
{
    return getpid();
}

/* ---- futex --------------------------------------------------------------------------------- */

void shmc_os_futex_wait(uint32_t *word, uint32_t seen, uint64_t wait_ns)
{
    struct timespec wait = {.tv_sec = (time_t)(wait_ns / NS_PER_S),
                            .tv_nsec = (long)(wait_ns % NS_PER_S)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &wait, NULL, 0);
}

void shmc_os_futex_wake_all(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

bool shmc_os_futex_wait_any(const struct shmc_futex *futexes, uint32_t count, uint64_t wait_ns)
{
    struct {
        uint64_t value;
        uint64_t address;
        uint32_t flags;
        uint32_t reserved;
    } waiters[SHMC_FUTEXES_MAX]; /* struct futex_waitv, which older headers lack */
    memset(waiters, 0, sizeof waiters);
    for (uint32_t k = 0; k < count; k++) {
        waiters[k].value = futexes[k].seen;
        waiters[k].address = (uintptr_t)futexes[k].word;
        waiters[k].flags = FUTEX_OF_32_BITS;
    }
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    uint64_t end_ns = (uint64_t)end.tv_nsec + wait_ns;
    end.tv_sec += (time_t)(end_ns / NS_PER_S);
    end.tv_nsec = (long)(end_ns % NS_PER_S);
    if (syscall(SYS_FUTEX_WAITV, waiters, count, 0, &end, CLOCK_MONOTONIC) >= 0)
        return true;
    return errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT;
}

/* ---- locks on bytes of the segment file ---------------------------------------------------- */

int shmc_os_reopen(int fd)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

static struct flock byte_lock(uint64_t byte)
{
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
}

bool shmc_os_lock_byte(int fd, uint64_t byte)
{
    struct flock lock = byte_lock(byte);
    return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

enum shmc_answer shmc_os_byte_locked(int fd, uint64_t byte)
{
    struct flock lock = byte_lock(byte);
    if (fcntl(fd, F_OFD_GETLK, &lock) != 0)
        return SHMC_CANNOT_TELL;
    return lock.l_type == F_UNLCK ? SHMC_NO : SHMC_YES;
}

/* ---- who and where this process is --------------------------------------------------------- */

/* Reads a small /proc file as text; false when it does not fit or cannot be read. */
static bool read_text(const char *path, char *text, size_t text_bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t got;
    do
        got = read(fd, text, text_bytes - 1);
    while (got < 0 && errno == EINTR);
    close(fd);
    if (got <= 0)
        return false;
    text[got] = '\0';
    return true;
}

static uint64_t inode_of(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 ? (uint64_t)status.st_ino : 0;
}

/* 32 hexadecimal digits with dashes between. */
static bool parse_boot_id(const char *text, uint64_t *words)
{
    uint32_t digits = 0;
    words[0] = words[1] = 0;
    for (; *text != '\0' && *text != '\n'; text++) {
        if (*text == '-')
            continue;
        char digit[2] = {*text, '\0'};
        char *end;
        uint64_t value = strtoull(digit, &end, 16);
        if (*end != '\0' || digits == 32)
            return false;
        words[digits / 16] = words[digits / 16] << 4 | value;
        digits++;
    }
    return digits == 32;
}

bool shmc_os_host_identity(struct shmc_host_identity *identity)
{
    char text[PATH_BYTES];
    if (!read_text("/proc/sys/kernel/random/boot_id", text, sizeof text))
        return false;
    identity->pid_namespace = inode_of("/proc/self/ns/pid");
    identity->time_namespace = inode_of("/proc/self/ns/time");
    identity->uid = geteuid();
    if (!parse_boot_id(text, identity->boot_id) || identity->pid_namespace == 0) {
        errno = ENOENT;
        return false;
    }
    return true;
}

/* ---- other processes ----------------------------------------------------------------------- */

int shmc_os_pidfd_open(pid_t pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

bool shmc_os_is_dead(int pidfd)
{
    struct pollfd look = {.fd = pidfd, .events = POLLIN};
    return poll(&look, 1, 0) > 0 && (look.revents & POLLIN) != 0;
}

uint64_t shmc_os_pidfs_inode(int pidfd)
{
    struct statfs filesystem;
    struct stat status;
    if (fstatfs(pidfd, &filesystem) != 0 || filesystem.f_type != PIDFS_MAGIC ||
        fstat(pidfd, &status) != 0)
        return 0;
    return (uint64_t)status.st_ino;
}

bool shmc_os_process_exists(pid_t pid)
{
    return kill(pid, 0) == 0 || errno != ESRCH;
}

/* A /proc of another pid namespace shows other processes under the same numbers. */
static bool proc_is_ours(void)
{
    char text[PATH_BYTES];
    ssize_t got = readlink("/proc/self", text, sizeof text - 1);
    if (got <= 0)
        return false;
    text[got] = '\0';
    return strtol(text, NULL, 10) == (long)getpid();
}

bool shmc_os_process_stat(pid_t pid, struct shmc_process_stat *stat)
{
    char path[PATH_BYTES];
    char text[STAT_BYTES];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    if (!proc_is_ours() || !read_text(path, text, sizeof text))
        return false;
    char *field =
        strrchr(text, ')'); /* the name before it may hold anything, also ')' and spaces */
    if (field == NULL || field[1] != ' ')
        return false;
    field += 2;
    stat->state = *field;
    stat->threads = stat->start_ticks = 0;
    for (uint32_t number = 3; number <= STAT_FIELD_START_TICKS; number++) {
        if (number == STAT_FIELD_THREADS)
            stat->threads = strtoull(field, NULL, 10);
        if (number == STAT_FIELD_START_TICKS)
            stat->start_ticks = strtoull(field, NULL, 10);
        field = strchr(field, ' ');
        if (field == NULL)
            return number == STAT_FIELD_START_TICKS;
        field++;
    }
    return true;
}

/* An empty list is a process on its way out, whose end the pidfd will tell: no answer. */
enum shmc_answer shmc_os_process_maps_file(pid_t pid, uint64_t device, uint64_t inode)
{
    char line[4096 + 128];
    char wanted[PATH_BYTES];
    enum shmc_answer answer = SHMC_CANNOT_TELL;
    snprintf(line, PATH_BYTES, "/proc/%ld/maps", (long)pid);
    if (!proc_is_ours())
        return SHMC_CANNOT_TELL;
    FILE *maps = fopen(line, "re");
    if (maps == NULL)
        return SHMC_CANNOT_TELL;
    uint32_t major = (uint32_t)(device >> 8 & 0xfff);
    uint32_t minor = (uint32_t)((device & 0xff) | (device >> 12 & ~0xffu));
    snprintf(wanted, sizeof wanted, " %02x:%02x %llu ", major, minor, (unsigned long long)inode);
    while (answer != SHMC_YES && fgets(line, sizeof line, maps) != NULL)
        answer = strstr(line, wanted) != NULL ? SHMC_YES : SHMC_NO;
    if (ferror(maps) && answer == SHMC_NO)
        answer = SHMC_CANNOT_TELL;
    fclose(maps);
    return answer;
}

bool shmc_os_run_and_kill_child(void (*child)(void *), void *argument)
{
    pid_t pid = fork();
    if (pid < 0)
        return false;
    if (pid == 0) {
        child(argument);
        kill(getpid(), SIGKILL);
        _exit(1);
    }
    /* ECHILD: the program reaps every child in a handler of its own; then it is dead as well. */
    while (waitpid(pid, NULL, 0) < 0)
        if (errno != EINTR)
            return errno == ECHILD;
    return true;
}
