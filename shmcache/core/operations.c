/* operations.c: one request is one critical section.
 *
 * Contract    shmc_perform() is the only entry that takes the lock. It refuses before the lock
 *             what must not run (a forked handle), and under it what the pool's state or the
 *             caller's owner slot does not allow; everything else is in accounts.c, owners.c and
 *             check.c.
 * Concurrency The GIL may be held: without a wait the call lasts microseconds.
 * Death       As in the file that does the work. Dying after the unlock and before the wake
 *             leaves waiters to their next slice.
 * Errors      SHMC_CORRUPT becomes a poisoned pool here, and only here.
 */
#include "atomics.h"
#include "internal.h"

#define DRAIN_PIECES_MAX 16u
#define BLIND_WAIT_NS    5000000u /* of one thread for more pools than the kernel can wait for */

static bool needs_owner(enum shmc_operation operation)
{
    switch (operation) {
    case SHMC_OP_REGISTER:
    case SHMC_OP_UPDATE:
    case SHMC_OP_RESERVE:
    case SHMC_OP_RELEASE_MANAGER:
    case SHMC_OP_RELEASE_RESERVATION:
    case SHMC_OP_PUBLISH_AND_RELEASE:
    case SHMC_OP_ALLOCATE:
    case SHMC_OP_SEAL:
    case SHMC_OP_PUBLISH:
    case SHMC_OP_DISCARD:
    case SHMC_OP_CLAIM:
    case SHMC_OP_RELEASE_CLAIM:
    case SHMC_OP_SET_PATHS:
        return true;
    default:
        return false;
    }
}

/* Whether the request changes leases of this process. */
static bool needs_leaf(const struct shmc_handle *handle, enum shmc_operation operation)
{
    return handle->counts != NULL && (operation == SHMC_OP_ALLOCATE ||
                                      operation == SHMC_OP_PUBLISH || operation == SHMC_OP_DISCARD);
}

/* Marks the pool as replaced, unless an owner attached since the caller looked at all of them. Also
 * the way out of POISONED: its users then learn that a new epoch is there. */
static enum shmc_status retire(struct shmc_handle *handle, const struct shmc_request *request)
{
    if (request->attach_seq != handle->control->attach_seq)
        return SHMC_OWNERS_CHANGED;
    shmc_mark_retired(handle);
    return SHMC_OK;
}

static enum shmc_status dispatch_arena(struct shmc_handle *handle, struct shmc_request *request)
{
    switch (request->operation) {
    case SHMC_OP_ALLOCATE:
        return shmc_blocks_allocate(handle, request);
    case SHMC_OP_SEAL:
        return shmc_blocks_seal(handle, request);
    case SHMC_OP_PUBLISH:
        return shmc_blocks_publish(handle, request);
    case SHMC_OP_DISCARD:
        return shmc_blocks_discard(handle, request);
    case SHMC_OP_INVALIDATE:
        return shmc_blocks_invalidate(handle, request);
    case SHMC_OP_PROTECT:
        return shmc_blocks_protect(handle, request);
    case SHMC_OP_EVICT:
        return shmc_blocks_evict(handle, request);
    case SHMC_OP_DRAIN:
        return shmc_policy_drain_own(handle);
    case SHMC_OP_ARENA_REPORT:
        shmc_arena_report(handle, request->arena_report);
        return SHMC_OK;
    default:
        return SHMC_STALE;
    }
}

static enum shmc_status dispatch(struct shmc_handle *handle, struct shmc_request *request)
{
    switch (request->operation) {
    case SHMC_OP_JOIN:
        return shmc_owners_join(handle);
    case SHMC_OP_REGISTER:
        return shmc_accounts_register(handle, request);
    case SHMC_OP_UPDATE:
        return shmc_accounts_update(handle, request);
    case SHMC_OP_RESERVE:
        return shmc_accounts_reserve(handle, request);
    case SHMC_OP_RELEASE_MANAGER:
        return shmc_accounts_release_manager(handle, handle->slot, request->token);
    case SHMC_OP_RELEASE_RESERVATION:
        return shmc_accounts_release_reservation(handle, handle->slot, request->token);
    case SHMC_OP_PUBLISH_AND_RELEASE:
        return shmc_accounts_publish_and_release(handle, request);
    case SHMC_OP_REPORT:
        shmc_accounts_report(handle, &request->report);
        return SHMC_OK;
    case SHMC_OP_SNAPSHOT:
        return shmc_snapshot_take(handle, request->snapshot);
    case SHMC_OP_HELD:
        return shmc_accounts_held(handle, request->held_rows);
    case SHMC_OP_CLAIM:
        return shmc_claims_take(handle, request);
    case SHMC_OP_RELEASE_CLAIM:
        return shmc_claims_release(handle, handle->slot, request->token);
    case SHMC_OP_RECLAIM_BEGIN:
        return shmc_owners_reclaim_begin(handle, request);
    case SHMC_OP_RECLAIM_STEP:
        return shmc_owners_reclaim_step(handle, request);
    case SHMC_OP_FILES_GONE:
        return shmc_owners_files_gone(handle, request);
    case SHMC_OP_SET_PATHS:
        return shmc_paths_set(handle, request);
    default:
        return handle->arena_bytes != 0 ? dispatch_arena(handle, request) : SHMC_NO_ARENA;
    }
}

/* A pool that has ended stays so. */
enum shmc_status shmc_ended(const struct shmc_handle *handle)
{
    switch (shmc_pool_state(handle)) {
    case SHMC_POOL_ACTIVE:
        return SHMC_OK;
    case SHMC_POOL_RETIRED:
        return SHMC_RETIRED;
    default:
        return SHMC_POISONED;
    }
}

/* What the pool's state and the caller's slot say before anything is done. */
static enum shmc_status admission(const struct shmc_handle *handle, enum shmc_operation operation)
{
    enum shmc_status status = shmc_ended(handle);
    if (status != SHMC_OK || !needs_owner(operation))
        return status;
    if (handle->slot == SHMC_NO_SLOT)
        return SHMC_NOT_JOINED;
    const struct shmc_owner *owner = &handle->owners[handle->slot];
    bool mine = owner->nonce == handle->nonce && owner->state == SHMC_OWNER_ACTIVE;
    return mine ? SHMC_OK : SHMC_LOST_SLOT;
}

static bool any_waiter(const struct shmc_handle *handle)
{
    uint64_t bits = 0;
    for (uint32_t word = 0; word * 64 < handle->header.geometry.owners_max; word++)
        bits |= shmc_load_relaxed(&handle->gate->waiters[word]);
    return bits != 0;
}

/* Whether room may have come about. An attempt that found none, and freed nothing, wakes nobody:
 * who waits makes them, and would wake itself for ever. */
static bool gives_back(const struct shmc_request *request, enum shmc_status status, bool freed)
{
    switch (request->operation) {
    case SHMC_OP_ALLOCATE:
        return status == SHMC_OK || freed;
    case SHMC_OP_EVICT:
        return freed;
    case SHMC_OP_UPDATE:
    case SHMC_OP_RELEASE_MANAGER:
    case SHMC_OP_RELEASE_RESERVATION:
    case SHMC_OP_PUBLISH_AND_RELEASE:
    case SHMC_OP_RECLAIM_STEP:
    case SHMC_OP_PUBLISH:
    case SHMC_OP_DISCARD:
    case SHMC_OP_INVALIDATE:
    case SHMC_OP_PROTECT: /* or its end: the block can be evicted again */
    case SHMC_OP_RELEASE_CLAIM:
        return true;
    default:
        return false;
    }
}

void shmc_wake_waiters(struct shmc_handle *handle)
{
    if (!any_waiter(handle))
        return;
    shmc_add32_seq_cst(&handle->gate->release_counter, 1);
    shmc_os_futex_wake_all(&handle->gate->release_counter);
}

/* Takes the segment's lock, and the leaf lock where the request needs it. That one is only tried
 * under the first: its holder may have been suspended, and nobody waits for it here. */
static enum shmc_status enter(struct shmc_handle *handle, const struct shmc_request *request,
                              uint64_t wait_ns)
{
    for (;;) {
        enum shmc_status status = shmc_lock(handle, wait_ns);
        if (status != SHMC_OK || !needs_leaf(handle, request->operation) || shmc_leaf_try(handle))
            return status;
        shmc_unlock(handle);
        shmc_os_yield();
    }
}

static void leave(struct shmc_handle *handle, const struct shmc_request *request)
{
    if (needs_leaf(handle, request->operation))
        shmc_leaf_leave(handle);
    shmc_unlock(handle);
}

static bool works_in_any_state(enum shmc_operation operation)
{
    return operation == SHMC_OP_CHECK || operation == SHMC_OP_RETIRE || operation == SHMC_OP_COPY;
}

/* What people do with a pool that may be poisoned: learn what is wrong, and end it. */
static enum shmc_status inspect(struct shmc_handle *handle, struct shmc_request *request)
{
    if (request->operation == SHMC_OP_RETIRE)
        return retire(handle, request);
    if (request->operation == SHMC_OP_COPY) {
        shmc_snapshot_copy(handle, request->copy);
        return SHMC_OK;
    }
    shmc_check(handle, request);
    if (request->problems_count != 0)
        shmc_poison(handle);
    return SHMC_OK;
}

/* What this owner has read is told to the policy before it stores; in pieces, for others want the
 * lock. When it is taken, the store itself tells a piece. */
static void drain_first(struct shmc_handle *handle)
{
    struct shmc_request request = {.operation = SHMC_OP_DRAIN};
    for (uint32_t pieces = 0; pieces < DRAIN_PIECES_MAX; pieces++)
        if (!shmc_ring_is_long(handle) || shmc_perform(handle, &request, 0) != SHMC_MORE)
            return;
}

enum shmc_status shmc_perform(struct shmc_handle *handle, struct shmc_request *request,
                              uint64_t wait_ns)
{
    if (!shmc_is_mine(handle))
        return SHMC_FORKED;
    if (request->operation == SHMC_OP_PUBLISH)
        drain_first(handle);
    /* An ended pool says so at once, though a stopped process or a damaged mutex bar the lock. */
    bool in_any_state = works_in_any_state(request->operation);
    enum shmc_status status = in_any_state ? SHMC_OK : shmc_ended(handle);
    if (status != SHMC_OK)
        return status;
    status = enter(handle, request, wait_ns);
    if (status == SHMC_OK && in_any_state) {
        status = inspect(handle, request);
        leave(handle, request);
        if (shmc_pool_state(handle) != SHMC_POOL_ACTIVE)
            shmc_wake_waiters(handle);
        return status;
    }
    if (status == SHMC_POISONED)
        shmc_wake_waiters(handle); /* the lock was found damaged */
    if (status != SHMC_OK)
        return status;
    uint64_t used_blocks = handle->control->used_blocks;
    status = admission(handle, request->operation);
    if (status == SHMC_OK)
        status = dispatch(handle, request);
    bool freed = handle->control->used_blocks < used_blocks;
    if (status == SHMC_CORRUPT) {
        shmc_poison(handle);
        status = SHMC_POISONED;
    }
    leave(handle, request);
    if (status == SHMC_POISONED || gives_back(request, status, freed))
        shmc_wake_waiters(handle);
    return status;
}

void shmc_retire(struct shmc_handle *handle)
{
    shmc_mark_retired(handle);
    shmc_wake_waiters(handle);
}

/* ---- waiting for capacity ------------------------------------------------------------------ */

void shmc_waiter_set(struct shmc_handle *handle, bool waiting)
{
    if (!shmc_is_mine(handle) || handle->slot == SHMC_NO_SLOT)
        return;
    uint64_t *word = &handle->gate->waiters[handle->slot / 64];
    uint64_t bit = 1ull << (handle->slot % 64);
    if (waiting)
        shmc_or_seq_cst(word, bit);
    else
        shmc_and_seq_cst(word, ~bit);
}

uint32_t shmc_release_counter(const struct shmc_handle *handle)
{
    return shmc_is_mine(handle) ? shmc_load32_acquire(&handle->gate->release_counter) : 0;
}

void shmc_wait_release(struct shmc_handle *handle, uint32_t seen, uint64_t wait_ns)
{
    if (shmc_is_mine(handle))
        shmc_os_futex_wait(&handle->gate->release_counter, seen, wait_ns);
}

/* ---- waiting for many pools at once ---------------------------------------------------------- */

static uint32_t doorbell; /* of this process: how often it was rung */

void shmc_ring(void)
{
    shmc_add32_seq_cst(&doorbell, 1);
    shmc_os_futex_wake_all(&doorbell);
}

uint32_t shmc_rung(void)
{
    return shmc_load32_acquire(&doorbell);
}

void shmc_wait_any(struct shmc_handle *const *handles, const uint32_t *seen, uint32_t count,
                   uint32_t rung, uint64_t wait_ns)
{
    struct shmc_futex words[SHMC_FUTEXES_MAX] = {{.word = &doorbell, .seen = rung}};
    uint32_t words_count = 1;
    for (uint32_t k = 0; k < count && words_count < SHMC_FUTEXES_MAX; k++)
        if (shmc_is_mine(handles[k]))
            words[words_count++] =
                (struct shmc_futex){.word = &handles[k]->gate->release_counter, .seen = seen[k]};
    bool whole = count < SHMC_FUTEXES_MAX;
    if (!whole && wait_ns > BLIND_WAIT_NS)
        wait_ns = BLIND_WAIT_NS;
    if (shmc_os_futex_wait_any(words, words_count, wait_ns))
        return;
    shmc_os_futex_wait(&doorbell, rung, wait_ns < BLIND_WAIT_NS ? wait_ns : BLIND_WAIT_NS);
}

/* ---- names of statuses, for the binding and for people ------------------------------------------
 */

const char *shmc_status_name(enum shmc_status status)
{
    static const char *const names[] = {
#define SHMC_STATUS_NAME(name, retry, meaning) #name,
        SHMC_STATUS_TABLE(SHMC_STATUS_NAME)
#undef SHMC_STATUS_NAME
    };
    return status < SHMC_STATUS_COUNT ? names[status] : "?";
}

bool shmc_status_retry(enum shmc_status status)
{
    static const bool retries[] = {
#define SHMC_STATUS_RETRY(name, retry, meaning) retry,
        SHMC_STATUS_TABLE(SHMC_STATUS_RETRY)
#undef SHMC_STATUS_RETRY
    };
    return status < SHMC_STATUS_COUNT && retries[status];
}

const char *shmc_check_name_text(enum shmc_check_name check)
{
    static const char *const names[] = {
#define SHMC_REFUSAL_NAME(name) #name,
        SHMC_REFUSAL_TABLE(SHMC_REFUSAL_NAME)
#undef SHMC_REFUSAL_NAME
    };
    return check < SHMC_CHECK_COUNT ? names[check] : "?";
}

const char *shmc_problem_text(enum shmc_problem_kind kind)
{
    static const char *const texts[] = {
#define SHMC_PROBLEM_TEXT(name, text) text,
        SHMC_PROBLEM_TABLE(SHMC_PROBLEM_TEXT)
#undef SHMC_PROBLEM_TEXT
    };
    return kind < SHMC_PROBLEM_KINDS ? texts[kind] : "?";
}
