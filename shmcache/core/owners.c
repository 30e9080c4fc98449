/* owners.c: who is attached, who is dead, and the way out of the table for both.
 *
 * Why         A killed process never releases anything; a wrong verdict would double-book memory
 *             that a live process is using. So death must be proved, and everything unproved is
 *             UNKNOWN.
 * Contract    Verdicts are taken without the lock, by anyone. Cleaning happens under it in
 *             bounded chunks, each of which first compares the slot's nonce and its CLEANING
 *             state: a cleaner that was stopped for an hour finds another nonce and does
 *             nothing. An orderly detach is the same cleaning, done by the owner itself.
 *
 *             FREE --join--> ACTIVE --reclaim begin--> CLEANING --held is 0--> FREE
 *
 * Invariants  G6: time is no proof; stopped, traced and frozen processes are ALIVE, and so is a
 *             process whose leader thread exited. G5: a CLEANING slot never takes new entries
 *             (every request of an owner checks that its slot is ACTIVE), so one pass over the
 *             tables empties it.
 * Concurrency The pidfd cache belongs to the handle: calls that take verdicts are serialised by
 *             callers.
 * Death       A dead cleaner leaves CLEANING; shmc_find_dead() offers such slots to everyone.
 * Cost        find_dead: three short system calls per owner.
 * Source      research on pidfds; LMDB's reader check (recheck under the lock), iceoryx2's
 *             cleaners.
 */
#include "atomics.h"
#include "internal.h"

#include <errno.h>
#include <string.h>

#define PID_LIMIT         (1u << 22) /* the kernel's own upper bound */
#define STEP_ENTRIES_MAX  2048u      /* entries looked at in one chunk: tens of microseconds */
#define STEP_RELEASES_MAX 128u       /* records written in one chunk */

/* ---- reading a slot without the lock ------------------------------------------------------------
 */

bool shmc_owner_view(const struct shmc_handle *handle, uint32_t slot, struct shmc_owner_view *view)
{
    const struct shmc_owner *owner = &handle->owners[slot];
    uint64_t state = shmc_load_acquire(&owner->state);
    if (state != SHMC_OWNER_ACTIVE && state != SHMC_OWNER_CLEANING)
        return false;
    view->slot = slot;
    view->state = (enum shmc_owner_state)state;
    view->nonce = shmc_load_acquire(&owner->nonce);
    view->pid = shmc_load_acquire(&owner->pid);
    view->start_ticks = shmc_load_acquire(&owner->start_ticks);
    view->pidfs_inode = shmc_load_acquire(&owner->pidfs_inode);
    view->attach_seq = shmc_load_acquire(&owner->attach_seq);
    view->exec_locked = shmc_load_acquire(&owner->exec_locked);
    view->departed = shmc_load_acquire(&owner->departed);
    for (uint32_t counter = 0; counter < SHMC_COUNTERS; counter++)
        view->counted[counter] = shmc_load_acquire(&owner->counted[counter]);
    /* A slot that was reused in between has another nonce, written before its new state. */
    return shmc_load_acquire(&owner->nonce) == view->nonce &&
           shmc_load_acquire(&owner->state) == state;
}

/* ---- verdict ------------------------------------------------------------------------------- */

/* Whether the process now behind the pid is another one than the slot's: same number, other
 * identity. */
static bool is_impostor(const struct shmc_owner_view *view, int pidfd)
{
    struct shmc_process_stat stat;
    uint64_t inode = pidfd >= 0 ? shmc_os_pidfs_inode(pidfd) : 0;
    if (view->pidfs_inode != 0 && inode != 0)
        return inode != view->pidfs_inode;
    return view->start_ticks != 0 && shmc_os_process_stat((pid_t)view->pid, &stat) &&
           stat.start_ticks != view->start_ticks;
}

#ifndef SHMC_MUTANT_PID_ONLY

/* execve keeps the pid, the start time and the pidfd but closes the exec lock. Another library may
 * have closed that descriptor too, so a free lock is only a suspicion: the proof is that the
 * process no longer maps the segment. */
static enum shmc_verdict exec_verdict(const struct shmc_handle *handle,
                                      const struct shmc_owner_view *view)
{
    if (view->exec_locked == 0 ||
        shmc_os_byte_locked(handle->segment_fd, view->nonce >> 2) != SHMC_NO)
        return SHMC_ALIVE;
    switch (shmc_os_process_maps_file((pid_t)view->pid, handle->device, handle->inode)) {
    case SHMC_YES:
        return SHMC_ALIVE;
    case SHMC_NO:
        return SHMC_DEAD;
    default:
        return SHMC_UNKNOWN;
    }
}

/* Without pidfds: signal 0 and /proc. A leader that exited while threads run looks like a zombie.
 */
static enum shmc_verdict verdict_without_pidfd(const struct shmc_handle *handle,
                                               const struct shmc_owner_view *view)
{
    struct shmc_process_stat stat;
    if (!shmc_os_process_exists((pid_t)view->pid))
        return SHMC_DEAD;
    if (!shmc_os_process_stat((pid_t)view->pid, &stat))
        return SHMC_UNKNOWN;
    if ((stat.state == 'Z' || stat.state == 'X') && stat.threads <= 1)
        return SHMC_DEAD;
    if (is_impostor(view, -1))
        return SHMC_DEAD;
    return exec_verdict(handle, view);
}

#endif

/* Damage is for check.c to report; it proves no death. */
static bool is_plausible(const struct shmc_owner_view *view)
{
    return view->pid != 0 && view->pid <= PID_LIMIT && view->nonce != 0;
}

/* Decides what can be decided without asking the kernel about a pidfd; ALIVE means "go on". */
static enum shmc_verdict verdict_by_number(const struct shmc_handle *handle,
                                           const struct shmc_owner_view *view)
{
    if (!is_plausible(view))
        return SHMC_UNKNOWN;
    if (view->departed == view->nonce)
        return SHMC_DEAD; /* its own word: the handle is closed, the process may live */
    if (view->pid != (uint64_t)shmc_os_pid() || shmc_nonce_is_local(view->nonce))
        return SHMC_ALIVE;
    /* Our own pid, but not our doing: before an execve, or a reused pid. Only a second copy of this
     * code in one process still has the lock. */
    bool copy = view->exec_locked != 0 &&
                shmc_os_byte_locked(handle->segment_fd, view->nonce >> 2) == SHMC_YES;
    return copy ? SHMC_ALIVE : SHMC_DEAD;
}

/* A descriptor of the owner itself; -1 and errno when it has none. */
static int open_pidfd(const struct shmc_owner_view *view)
{
    int pidfd = shmc_os_pidfd_open((pid_t)view->pid);
    if (pidfd >= 0 && is_impostor(view, pidfd)) {
        shmc_os_close(pidfd);
        errno = ESRCH; /* the owner is gone, its number is not */
        return -1;
    }
    return pidfd;
}

/* The identity is checked once, at the open: a cached descriptor is the owner's, whoever asked for
 * it first, as long as it is still the file that was opened. */
int shmc_owner_pidfd(struct shmc_handle *handle, const struct shmc_owner_view *view)
{
    struct shmc_pidfd *cached = &handle->pidfds[view->slot];
    struct shmc_file_facts facts;
    if (!is_plausible(view)) {
        errno = EDOM;
        return -1;
    }
    if (cached->nonce == view->nonce && shmc_process_pidfd_intact(cached))
        return cached->fd;
    shmc_process_forget_pidfd(cached);
    cached->fd = open_pidfd(view);
    if (cached->fd >= 0 && shmc_os_file_facts(cached->fd, &facts)) {
        cached->nonce = view->nonce;
        cached->device = facts.device;
        cached->inode = facts.inode;
    }
    return cached->fd;
}

/* A pidfd that could not be opened: proof of death, or not available here. */
static bool errno_proves_death(int error)
{
    /* ENOENT, EINVAL before Linux 6.x: the number now names a thread; an owner is always a leader.
     */
    return error == ESRCH || error == ENOENT || error == EINVAL;
}

#ifndef SHMC_MUTANT_PID_ONLY

/* Expects errno as open_pidfd() left it. */
static enum shmc_verdict verdict_by_pidfd(const struct shmc_handle *handle,
                                          const struct shmc_owner_view *view, int pidfd)
{
    if (pidfd < 0)
        return errno_proves_death(errno) ? SHMC_DEAD : verdict_without_pidfd(handle, view);
    return shmc_os_is_dead(pidfd) ? SHMC_DEAD : exec_verdict(handle, view);
}

#endif

enum shmc_verdict shmc_owner_verdict(struct shmc_handle *handle, const struct shmc_owner_view *view)
{
#ifdef SHMC_MUTANT_PID_ONLY
    (void)handle;
    return shmc_os_process_exists((pid_t)view->pid) ? SHMC_ALIVE : SHMC_DEAD;
#else
    enum shmc_verdict verdict = verdict_by_number(handle, view);
    if (verdict != SHMC_ALIVE || view->pid == (uint64_t)shmc_os_pid())
        return verdict;
    int pidfd = shmc_owner_pidfd(handle, view);
    verdict = verdict_by_pidfd(handle, view, pidfd);
    if (verdict == SHMC_DEAD && pidfd >= 0) {
        /* Where all anonymous files share one inode, another one may have taken the cached number
         * unnoticed; a fresh descriptor can only be the owner's. */
        pidfd = open_pidfd(view);
        verdict = verdict_by_pidfd(handle, view, pidfd);
        shmc_os_close(pidfd);
    }
    return verdict;
#endif
}

uint32_t shmc_find_dead(struct shmc_handle *handle, struct shmc_owner_view *dead, uint32_t max)
{
    uint32_t found = 0;
    for (uint32_t slot = 0; slot < handle->header.geometry.owners_max && found < max; slot++) {
        struct shmc_owner_view view;
        if (!shmc_owner_view(handle, slot, &view) || shmc_nonce_is_local(view.nonce))
            continue;
        if (view.state == SHMC_OWNER_CLEANING || shmc_owner_verdict(handle, &view) == SHMC_DEAD)
            dead[found++] = view;
    }
    return found;
}

/* ---- joining and cleaning, with the lock held ---------------------------------------------- */

/* Claims a FREE slot. Idempotent: two threads of one process may race here. */
enum shmc_status shmc_owners_join(struct shmc_handle *handle)
{
    struct shmc_control *control = handle->control;
    uint32_t slot = 0;
    if (handle->slot != SHMC_NO_SLOT)
        return SHMC_OK;
    if (handle->nonce == 0)
        return SHMC_NOT_JOINED; /* an observer, which nothing could name */
    while (slot < handle->header.geometry.owners_max &&
           handle->owners[slot].state != SHMC_OWNER_FREE)
        slot++;
    if (slot == handle->header.geometry.owners_max)
        return SHMC_OWNERS_FULL;
    struct shmc_owner *owner = &handle->owners[slot];
    SHMC_CHECK(owner->held == 0 && owner->path_bytes == 0);
    /* The nonce first, each in order: shmc_owner_view() reads without the lock. */
    shmc_store_release(&owner->nonce, handle->nonce);
    shmc_store_release(&owner->pid, handle->pid);
    shmc_store_release(&owner->start_ticks, handle->start_ticks);
    shmc_store_release(&owner->pidfs_inode, handle->pidfs_inode);
    shmc_store_release(&owner->attach_seq, control->attach_seq + 1);
    shmc_store_release(&owner->exec_locked, handle->exec_locked);
    for (uint32_t counter = 0; counter < SHMC_COUNTERS; counter++)
        shmc_store_release(&owner->counted[counter], shmc_read_counter(handle, slot, counter));
    shmc_redo_begin(handle, SHMC_OP_JOIN);
    shmc_redo_put(handle, &owner->state, SHMC_OWNER_ACTIVE);
    shmc_redo_put(handle, &control->attach_seq, control->attach_seq + 1);
    shmc_redo_put(handle, &control->owners, control->owners + 1);
    shmc_redo_put(handle, &control->active[slot / 64],
                  control->active[slot / 64] | 1ull << slot % 64);
    shmc_redo_commit(handle);
    handle->row = shmc_pin_row(handle, slot);
    handle->slot = slot;
    return SHMC_OK;
}

/* Whether the request still speaks of the owner that is in the slot. */
static bool names_owner(const struct shmc_handle *handle, const struct shmc_request *request)
{
    if (request->owner_slot >= handle->header.geometry.owners_max)
        return false;
#ifdef SHMC_MUTANT_NO_NONCE
    return handle->owners[request->owner_slot].state != SHMC_OWNER_FREE;
#else
    const struct shmc_owner *owner = &handle->owners[request->owner_slot];
    return owner->state != SHMC_OWNER_FREE && owner->nonce == request->owner_nonce;
#endif
}

enum shmc_status shmc_owners_reclaim_begin(struct shmc_handle *handle, struct shmc_request *request)
{
    if (!names_owner(handle, request))
        return SHMC_STALE;
    struct shmc_owner *owner = &handle->owners[request->owner_slot];
    SHMC_CHECK(owner->state == SHMC_OWNER_ACTIVE || owner->state == SHMC_OWNER_CLEANING);
    if (owner->state == SHMC_OWNER_CLEANING)
        return SHMC_OK;
    shmc_redo_begin(handle, SHMC_OP_RECLAIM_BEGIN);
    shmc_redo_put(handle, &owner->state, SHMC_OWNER_CLEANING);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* The three tables one after the other, and where the cursor is in them. */
struct place {
    struct shmc_table *table;
    uint64_t index;
    enum shmc_status (*release)(struct shmc_handle *, uint32_t, struct shmc_token);
};

/* False at the end. Skips what was never used. */
static bool find_place(struct shmc_handle *handle, uint64_t *cursor, struct place *place)
{
    struct place tables[] = {
        {&handle->managers, 0, shmc_accounts_release_manager},
        {&handle->reservations, 0, shmc_accounts_release_reservation},
        {&handle->claims, 0, shmc_claims_release},
    };
    uint64_t first = 0;
    for (uint32_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        uint64_t max = tables[i].table->max;
        if (*cursor < first + *tables[i].table->mark) {
            *place = tables[i];
            place->index = *cursor - first;
            return true;
        }
        first += max;
        if (*cursor < first)
            *cursor = first;
    }
    return false;
}

/* The entry at the place, given back if it is the slot's; as far as its files are gone. */
static enum shmc_status release_at(struct shmc_handle *handle, uint32_t slot,
                                   const struct place *place, struct shmc_request *request)
{
    const struct shmc_entry *entry = &place->table->entries[place->index];
    if (entry->state != SHMC_ENTRY_LIVE_OF(slot))
        return SHMC_OK;
    if (place->table == &handle->managers && entry->usage[SHMC_DISK] != 0 &&
        handle->owners[slot].path_bytes != 0) {
        uint64_t released[SHMC_AXES];
        enum shmc_status status = shmc_accounts_keep_disk(handle, place->index, released);
        for (uint32_t axis = 0; axis < SHMC_AXES && status == SHMC_OK; axis++)
            request->usage[axis] += released[axis];
        return status;
    }
    struct shmc_token token = {.index = place->index, .generation = entry->generation};
    enum shmc_status status = place->release(handle, slot, token);
    if (status != SHMC_OK)
        return status;
    request->released++;
    for (uint32_t axis = 0; axis < SHMC_AXES && place->table != &handle->claims; axis++)
        request->usage[axis] += entry->usage[axis]; /* a FREE entry keeps its payload till reuse */
    return SHMC_OK;
}

static uint64_t count_of(const struct shmc_table *table, uint32_t slot)
{
    uint64_t count = 0;
    for (uint64_t index = 0; index < *table->mark; index++)
        count += table->entries[index].state == SHMC_ENTRY_LIVE_OF(slot);
    return count;
}

/* Whether the slot's entries are as many as its held word says, wherever they are. */
static bool held_adds_up(const struct shmc_handle *handle, uint32_t slot)
{
    uint64_t count = count_of(&handle->managers, slot) + count_of(&handle->reservations, slot) +
                     count_of(&handle->claims, slot);
    return count == handle->owners[slot].held;
}

static enum shmc_status free_slot(struct shmc_handle *handle, uint32_t slot)
{
    struct shmc_control *control = handle->control;
    SHMC_CHECK(control->owners > 0);
    shmc_and_seq_cst(&handle->gate->waiters[slot / 64], ~(1ull << (slot % 64)));
    shmc_redo_begin(handle, SHMC_OP_RECLAIM_STEP);
    shmc_redo_put(handle, &handle->owners[slot].state, SHMC_OWNER_FREE);
    shmc_redo_put(handle, &control->owners, control->owners - 1);
    shmc_redo_put(handle, &control->active[slot / 64],
                  control->active[slot / 64] & ~(1ull << slot % 64));
    shmc_redo_commit(handle);
    return SHMC_OK;
}

/* What the sessions of the dead have now is nothing; what they have done stays told. */
static void clear_gauges(struct shmc_handle *handle, uint32_t slot)
{
    struct shmc_telemetry_row *rows = shmc_region(handle, SHMC_REGION_TELEMETRY);
    for (uint32_t gauge = 0; gauge < SHMC_GAUGES_MAX; gauge++)
        shmc_store_release(&rows[slot].gauges[gauge], 0);
}

enum shmc_status shmc_owners_files_gone(struct shmc_handle *handle,
                                        const struct shmc_request *request)
{
    if (!names_owner(handle, request) ||
        handle->owners[request->owner_slot].state != SHMC_OWNER_CLEANING)
        return SHMC_STALE;
    return shmc_paths_forget(handle, request->owner_slot);
}

/* One chunk: every release is a record of its own, so a killed cleaner leaves a shorter list. The
 * row of pins first: it names the blocks that count in held. What is charged for files comes last,
 * when whoever asks has deleted them. */
enum shmc_status shmc_owners_reclaim_step(struct shmc_handle *handle, struct shmc_request *request)
{
    uint32_t slot = request->owner_slot;
    request->released = 0;
    memset(request->usage, 0, sizeof request->usage);
#ifdef SHMC_MUTANT_UNFENCED_CLEANING
    if (slot >= handle->header.geometry.owners_max)
        return SHMC_STALE;
#else
    if (!names_owner(handle, request) || handle->owners[slot].state != SHMC_OWNER_CLEANING)
        return SHMC_STALE;
#endif
    SHMC_CHECK(*handle->managers.mark <= handle->managers.max);
    SHMC_CHECK(*handle->reservations.mark <= handle->reservations.max);
    SHMC_CHECK(*handle->claims.mark <= handle->claims.max);
    clear_gauges(handle, slot);
    enum shmc_status status = shmc_blocks_reclaim(handle, slot, request);
    if (status != SHMC_OK)
        return status;
    bool has_files = handle->owners[slot].path_bytes != 0;
    struct place place;
    for (uint32_t looked = 0; handle->owners[slot].held != 0; looked++) {
        if (!find_place(handle, &request->cursor, &place)) {
            if (has_files)
                break;
            /* The caller began behind an entry: it may begin anew, unless nothing is there. */
            SHMC_CHECK(held_adds_up(handle, slot));
            request->cursor = 0;
            return SHMC_MORE;
        }
        if (looked == STEP_ENTRIES_MAX || request->released >= STEP_RELEASES_MAX)
            return SHMC_MORE;
        status = release_at(handle, slot, &place, request);
        if (status != SHMC_OK)
            return status == SHMC_STALE ? SHMC_CORRUPT : status;
        request->cursor++;
    }
    return has_files ? shmc_paths_tell(handle, slot, request) : free_slot(handle, slot);
}
