/* process.c: what this process has open, and how a forked child learns that it is another one.
 *
 * Why         A forked child is a stranger that happens to share our memory: it must not release
 *             the parent's tokens, nor keep the parent alive in other processes' eyes. Pids repeat,
 *             so comparing them is no guard.
 * Contract    A handle remembers the guard of the process that opened it. The guard is a random
 *             word in a page that fork replaces by zeroes; segment mappings are not inherited at
 *             all, so a child can neither scribble nor read stale totals. A descriptor is used and
 *             closed only while its number still names what was opened under it: programs that
 *             become daemons close what they do not know, and the number is then a stranger's.
 * Concurrency The registry has a mutex of its own (process-local, a leaf, never held over a call);
 *             fork takes it first, so that a child finds it free.
 * Death       Nothing here is shared. A raw clone skips the child's handler: its copies of the
 *             descriptors then keep the parent's exec lock, which errs on the safe side.
 */
#include "internal.h"

#include <pthread.h>

#include "atomics.h"

static pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct shmc_handle *registry;
static uint64_t *guard_page;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

bool shmc_process_pidfd_intact(const struct shmc_pidfd *pidfd)
{
    return shmc_os_is_file(pidfd->fd, pidfd->device, pidfd->inode);
}

void shmc_process_forget_pidfd(struct shmc_pidfd *pidfd)
{
    if (pidfd->nonce != 0 && shmc_process_pidfd_intact(pidfd))
        shmc_os_close(pidfd->fd);
    pidfd->nonce = 0;
}

bool shmc_descriptor_intact(const struct shmc_handle *handle)
{
    return shmc_os_is_file(handle->segment_fd, handle->device, handle->inode);
}

void shmc_process_close_descriptors(struct shmc_handle *handle)
{
    if (shmc_os_is_file(handle->lock_fd, handle->device, handle->inode))
        shmc_os_close(handle->lock_fd);
    handle->lock_fd = -1;
    for (uint32_t slot = 0; slot < handle->header.geometry.owners_max; slot++)
        shmc_process_forget_pidfd(&handle->pidfds[slot]);
}

static void before_fork(void)
{
    pthread_mutex_lock(&registry_mutex);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&registry_mutex);
}

static void after_fork_in_child(void)
{
    *guard_page = 0; /* for kernels that cannot wipe it */
    for (struct shmc_handle *handle = registry; handle != NULL; handle = handle->next) {
        shmc_views_reserve(handle);
        shmc_process_close_descriptors(handle);
    }
    registry = NULL;
    pthread_mutex_unlock(&registry_mutex);
}

static void prepare_fork(void)
{
    static uint64_t ordinary_page;
    guard_page = shmc_os_fork_page();
    if (guard_page == NULL)
        guard_page = &ordinary_page;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

uint64_t shmc_process_guard(void)
{
    pthread_once(&fork_once, prepare_fork);
    while (shmc_load_acquire(guard_page) == 0)
        shmc_replace_seq_cst(guard_page, 0, shmc_os_random());
    return shmc_load_acquire(guard_page);
}

bool shmc_is_mine(const struct shmc_handle *handle)
{
    return shmc_load_relaxed(guard_page) == handle->guard;
}

bool shmc_nonce_is_local(uint64_t nonce)
{
    bool found = false;
    uint64_t guard = shmc_process_guard(); /* a raw fork leaves the parent's handles in the list */
    pthread_mutex_lock(&registry_mutex);
    for (struct shmc_handle *handle = registry; handle != NULL && !found; handle = handle->next)
        found = handle->as_owner && handle->nonce == nonce && handle->guard == guard;
    pthread_mutex_unlock(&registry_mutex);
    return found;
}

void shmc_process_register(struct shmc_handle *handle)
{
    pthread_mutex_lock(&registry_mutex);
    handle->next = registry;
    registry = handle;
    pthread_mutex_unlock(&registry_mutex);
}

void shmc_process_unregister(const struct shmc_handle *handle)
{
    pthread_mutex_lock(&registry_mutex);
    for (struct shmc_handle **link = &registry; *link != NULL; link = &(*link)->next) {
        if (*link == handle) {
            *link = handle->next;
            break;
        }
    }
    pthread_mutex_unlock(&registry_mutex);
}
