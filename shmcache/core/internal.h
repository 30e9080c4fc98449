/* internal.h: what the engine's files share with each other, grouped by the file that defines it.
 *
 * Checks have two strengths. SHMC_ASSERT states what this code has proved; it exists in debug
 * builds only. SHMC_CHECK guards against what another process may have written; it is always on,
 * and a failure makes the function return SHMC_CORRUPT, which operations.c turns into a poisoned
 * pool.
 */
#ifndef SHMC_INTERNAL_H
#define SHMC_INTERNAL_H

#include "os.h"
#include "shmc.h"

#ifdef SHMC_DEBUG
#include <stdlib.h>
#define SHMC_ASSERT(condition) ((condition) ? (void)0 : abort())
#else
#define SHMC_ASSERT(condition) ((void)0)
#endif

#define SHMC_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return SHMC_CORRUPT;                                                                   \
    } while (0)

#define SHMC_NO_SLOT UINT32_MAX

struct shmc_pidfd {
    uint64_t nonce;  /* of the owner it watches; 0: none */
    uint64_t device; /* of the descriptor itself */
    uint64_t inode;  /* its own since Linux 6.9, before that one for all anonymous files */
    int fd;          /* -1: could not be opened */
};

/* A table of entries and the control words that govern it. */
struct shmc_table {
    struct shmc_entry *entries;
    uint64_t max;
    uint64_t *free; /* first FREE entry below the mark */
    uint64_t *mark; /* entries at and above it were never used */
    uint64_t *live;
    enum shmc_status full;
};

/* Private to one process. Immutable after open but for slot, redo_count, pidfds and scratch. */
struct shmc_handle {
    uint8_t *base;
    uint64_t mapped_bytes; /* everything before the arena */
    struct shmc_header header;
    struct shmc_gate *gate;
    struct shmc_redo *redo;
    struct shmc_control *control;
    struct shmc_owner *owners;
    struct shmc_table managers;
    struct shmc_table reservations;
    uint64_t *manager_index;
    uint64_t guard; /* shmc_process_guard() at open */
    uint64_t device;
    uint64_t inode;
    int segment_fd; /* borrowed */
    int lock_fd;    /* private description holding the exec lock, or -1 */
    bool exec_locked;
    bool as_owner;
    uint32_t slot; /* set by the join, under the lock */
    uint64_t nonce;
    uint64_t pid; /* of an owner; asked before the join: under the lock nobody calls the kernel */
    uint64_t pidfs_inode;
    uint64_t start_ticks;
    uint32_t redo_count;       /* words of the record being written; the holder's */
    struct shmc_pidfd *pidfds; /* one per slot; callers serialise sweeps */
    uint64_t *scratch;         /* owners_max words for check.c; the holder's */
    struct shmc_handle *next;  /* registry of this process */
};

/* lock.c */
enum shmc_status shmc_lock(struct shmc_handle *handle, uint64_t wait_ns);
void shmc_unlock(struct shmc_handle *handle);
bool shmc_mutex_init(pthread_mutex_t *mutex);

/* redo.c */
void shmc_redo_begin(struct shmc_handle *handle, enum shmc_operation operation);
void shmc_redo_put(struct shmc_handle *handle, uint64_t *word, uint64_t value);
void shmc_redo_commit(struct shmc_handle *handle);
enum shmc_status shmc_redo_recover(struct shmc_handle *handle);

/* process.c */
void shmc_process_register(struct shmc_handle *handle);
void shmc_process_unregister(const struct shmc_handle *handle);
void shmc_process_close_descriptors(struct shmc_handle *handle);
void shmc_process_forget_pidfd(struct shmc_pidfd *pidfd);
bool shmc_process_pidfd_intact(const struct shmc_pidfd *pidfd);

/* owners.c; called with the lock held */
enum shmc_status shmc_owners_join(struct shmc_handle *handle);
enum shmc_status shmc_owners_reclaim_begin(struct shmc_handle *handle,
                                           struct shmc_request *request);
enum shmc_status shmc_owners_reclaim_step(struct shmc_handle *handle, struct shmc_request *request);

/* accounts.c; called with the lock held */
enum shmc_status shmc_accounts_register(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_accounts_update(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_accounts_reserve(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_accounts_publish_and_release(struct shmc_handle *handle,
                                                   struct shmc_request *request);
enum shmc_status shmc_accounts_release_manager(struct shmc_handle *handle, uint32_t owner,
                                               struct shmc_token token);
enum shmc_status shmc_accounts_release_reservation(struct shmc_handle *handle, uint32_t owner,
                                                   struct shmc_token token);
void shmc_accounts_report(struct shmc_handle *handle, struct shmc_report *report);
enum shmc_status shmc_accounts_held(struct shmc_handle *handle, struct shmc_held *rows);
uint64_t shmc_manager_bucket(const struct shmc_handle *handle, uint64_t id);

/* check.c; called with the lock held */
void shmc_check(struct shmc_handle *handle, struct shmc_request *request);

#endif
