/* lock.c: the only way to the segment's lock.
 *
 * Why         A killed holder must not wedge anyone, and a waiter must stay able to serve
 *             signals. A plain wait on a robust mutex can sleep for ever although the mutex is
 *             free: a woken waiter is killed before it takes the word while a third locker
 *             barges in.
 * Contract    shmc_lock() returns OK holding a recovered, valid lock, or BUSY after wait_ns.
 *             Callers that want to wait longer call again: every slice re-reads the word, so a
 *             lost wake-up costs one slice. Between lock and unlock: no allocation, no system
 *             call, no Python.
 * Death       The kernel marks the word OWNER_DIED; the next holder replays the redo record. A
 *             record is also looked for on a normal acquisition, for a recoverer may die after
 *             it declared the mutex consistent.
 * Source      DESIGN "Lock"; glibc nptl. A spin first: two hammering processes keep most of
 *             their speed.
 */
#include "internal.h"

#include <errno.h>
#include <time.h>

#include "atomics.h"

/* Pauses between tries double up to SPIN_PAUSES_MAX; altogether a few microseconds. */
#define SPIN_PAUSES_MAX 256u
#define NS_PER_S        1000000000ull

bool shmc_mutex_init(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;
    if (pthread_mutexattr_init(&attributes) != 0)
        return false;
    bool ok = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) == 0;
#ifndef SHMC_MUTANT_NON_ROBUST
    ok = ok && pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0;
#endif
    ok = ok && pthread_mutex_init(mutex, &attributes) == 0;
    pthread_mutexattr_destroy(&attributes);
    return ok;
}

/* What a mutex of shmc_mutex_init() is to glibc. A damaged kind would send pthread functions into
 * paths that assert, and an assertion ends the worker. */
static int sound_kind;
static pthread_once_t kind_once = PTHREAD_ONCE_INIT;

static void learn_kind(void)
{
    pthread_mutex_t mutex;
    if (shmc_mutex_init(&mutex))
        sound_kind = mutex.__data.__kind;
}

static bool is_sound(const pthread_mutex_t *mutex)
{
    return shmc_load_int(&mutex->__data.__kind) == sound_kind;
}

static int wait_slice(pthread_mutex_t *mutex, uint64_t wait_ns)
{
#ifdef SHMC_MUTANT_PLAIN_LOCK
    (void)wait_ns;
    return pthread_mutex_lock(mutex);
#else
    uint64_t until_ns = shmc_os_monotonic_ns() + wait_ns;
    struct timespec until = {.tv_sec = (time_t)(until_ns / NS_PER_S),
                             .tv_nsec = (long)(until_ns % NS_PER_S)};
    return pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
#endif
}

static int acquire(pthread_mutex_t *mutex, uint64_t wait_ns)
{
    int error = pthread_mutex_trylock(mutex);
    for (uint32_t pauses = 4; error == EBUSY && pauses <= SPIN_PAUSES_MAX; pauses *= 2) {
        for (uint32_t i = 0; i < pauses; i++)
            shmc_cpu_relax();
        error = pthread_mutex_trylock(mutex);
    }
    if (error == EBUSY && wait_ns != 0)
        error = wait_slice(mutex, wait_ns);
    return error;
}

/* The one acquisition in the engine. Whatever it finds, a returned OK means: held, and either valid
 * or marked poisoned (operations.c looks at the state word next). */
enum shmc_status shmc_lock(struct shmc_handle *handle, uint64_t wait_ns)
{
    pthread_mutex_t *mutex = &handle->gate->mutex;
    int error = is_sound(mutex) ? acquire(mutex, wait_ns) : EINVAL;
    if (error == EBUSY || error == ETIMEDOUT)
        return SHMC_BUSY;
    if (error != 0 && error != EOWNERDEAD) {
        shmc_poison(handle); /* ENOTRECOVERABLE or EINVAL: the mutex itself is damaged */
        return SHMC_POISONED;
    }
    if (shmc_load_relaxed(&handle->redo->commit) != 0 && shmc_redo_recover(handle) != SHMC_OK)
        shmc_poison(handle);
    if (shmc_load_relaxed(&handle->control->evicting) != 0 && !shmc_blocks_recover(handle))
        shmc_poison(handle);
    if (error == EOWNERDEAD)
        pthread_mutex_consistent(mutex); /* also when poisoned: others must get an answer */
    return SHMC_OK;
}

void shmc_unlock(struct shmc_handle *handle)
{
    pthread_mutex_unlock(&handle->gate->mutex);
}

pid_t shmc_lock_holder(const struct shmc_handle *handle)
{
    return shmc_load_int(&handle->gate->mutex.__data.__owner);
}

/* ---- self-test ----------------------------------------------------------------------------- */

static void lock_and_wait_for_death(void *mutex)
{
    pthread_mutex_lock(mutex);
}

enum { UNTESTED, WORKS, BROKEN };
static uint64_t robust_answer = UNTESTED;

/* Leaves the answer alone, and errno, when the test could not be made: not a word about mutexes. */
static void test_robust(void)
{
    pthread_mutex_t *mutex = shmc_os_map_shared_page();
    if (mutex == NULL)
        return;
    if (!shmc_mutex_init(mutex)) {
        shmc_store_release(&robust_answer, BROKEN);
    } else if (shmc_os_run_and_kill_child(lock_and_wait_for_death, mutex)) {
        int error = pthread_mutex_trylock(mutex);
        shmc_store_release(&robust_answer, error == EOWNERDEAD ? WORKS : BROKEN);
        if (error == EOWNERDEAD)
            pthread_mutex_consistent(mutex), pthread_mutex_unlock(mutex);
    }
    int error = errno;
    shmc_os_unmap(mutex, SHMC_PAGE_BYTES);
    errno = error;
}

bool shmc_robust_mutex_works(void)
{
    pthread_once(&kind_once, learn_kind); /* every opener comes by here, before its first lock */
    if (shmc_load_acquire(&robust_answer) == UNTESTED)
        test_robust();
    uint64_t answer = shmc_load_acquire(&robust_answer);
    if (answer == BROKEN)
        errno = 0;
    return answer == WORKS;
}
