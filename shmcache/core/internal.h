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

#define SHMC_NO_SLOT  UINT32_MAX
#define SHMC_KEPT_MAX 8u

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

/* Addresses of the size of the arena. */
struct shmc_range {
    uint8_t *base;
    bool empty; /* nothing is mapped there, and nothing may be */
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
    struct shmc_table claims;
    uint64_t *manager_index;
    uint64_t *claim_index;
    struct shmc_class *classes;
    struct shmc_slab *slabs;
    struct shmc_block *blocks;
    uint64_t *index;
    uint64_t *learned;
    uint32_t *ghosts;
    uint8_t *write_base;                   /* of the arena; NULL for an observer */
    uint8_t *read_base;                    /* the same bytes, not writable */
    struct shmc_range kept[SHMC_KEPT_MAX]; /* where only older views look, see views.c */
    uint32_t kept_count;
    bool reserved; /* in a forked child: nothing else is mapped where its views look */
    uint64_t arena_bytes;
    uint64_t arena_mapped; /* in whole pages */
    /* Leases of this process per block. A count and its bit change together, under leaf. */
    uint32_t *counts;
    uint32_t *verified; /* per block the low bits of the generation whose checksum was right */
    uint64_t *row;      /* of pins, of its own slot; set by the join */
    uint32_t leaf;      /* process-local lock of counts, row and ring, see pins.c */
    uint64_t guard;     /* shmc_process_guard() at open */
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
    uint64_t redo_seen;        /* a bit per hash of their offsets; the holder's */
    struct shmc_pidfd *pidfds; /* one per slot; callers serialise sweeps */
    uint64_t *scratch;         /* for check.c; the holder's */
    struct shmc_handle *next;  /* registry of this process */
};

/* lock.c */
enum shmc_status shmc_lock(struct shmc_handle *handle, uint64_t wait_ns);
void shmc_unlock(struct shmc_handle *handle);
bool shmc_mutex_init(pthread_mutex_t *mutex);

/* redo.c */
void shmc_redo_begin(struct shmc_handle *handle, enum shmc_operation operation);
void shmc_redo_put(struct shmc_handle *handle, uint64_t *word, uint64_t value);
/* The word as the record being written leaves it; and put, replacing what the record has of it. */
uint64_t shmc_redo_get(const struct shmc_handle *handle, const uint64_t *word);
void shmc_redo_set(struct shmc_handle *handle, uint64_t *word, uint64_t value);
void shmc_redo_commit(struct shmc_handle *handle);
enum shmc_status shmc_redo_recover(struct shmc_handle *handle);

/* process.c */
void shmc_process_register(struct shmc_handle *handle);
void shmc_process_unregister(const struct shmc_handle *handle);
void shmc_process_close_descriptors(struct shmc_handle *handle);
void shmc_process_forget_pidfd(struct shmc_pidfd *pidfd);
bool shmc_process_pidfd_intact(const struct shmc_pidfd *pidfd);

/* views.c */
void shmc_views_drop(struct shmc_handle *handle);

/* owners.c; called with the lock held */
enum shmc_status shmc_owners_join(struct shmc_handle *handle);
enum shmc_status shmc_owners_reclaim_begin(struct shmc_handle *handle,
                                           struct shmc_request *request);
enum shmc_status shmc_owners_reclaim_step(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_owners_files_gone(struct shmc_handle *handle,
                                        const struct shmc_request *request);

/* paths.c; called with the lock held */
bool shmc_paths_are_valid(const char *paths, uint64_t bytes);
enum shmc_status shmc_paths_set(struct shmc_handle *handle, const struct shmc_request *request);
enum shmc_status shmc_paths_forget(struct shmc_handle *handle, uint32_t slot);
enum shmc_status shmc_paths_tell(const struct shmc_handle *handle, uint32_t slot,
                                 struct shmc_request *request);

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
enum shmc_status shmc_accounts_keep_disk(struct shmc_handle *handle, uint64_t index,
                                         uint64_t *released);
void shmc_accounts_report(struct shmc_handle *handle, struct shmc_report *report);
enum shmc_status shmc_accounts_held(struct shmc_handle *handle, struct shmc_held *rows);
uint64_t shmc_manager_bucket(const struct shmc_handle *handle, uint64_t id);

enum shmc_status shmc_accounts_find_manager(struct shmc_handle *handle, uint64_t id);
enum shmc_status shmc_accounts_find_reservation(struct shmc_handle *handle,
                                                struct shmc_token token);
enum shmc_status shmc_accounts_put_consumed(struct shmc_handle *handle, struct shmc_token token);
enum shmc_status shmc_entry_take(struct shmc_handle *handle, struct shmc_table *table,
                                 uint64_t *index);
void shmc_entry_put_live(struct shmc_handle *handle, struct shmc_table *table, uint64_t index,
                         const uint64_t *usage, uint64_t id, struct shmc_token *token);
void shmc_entry_put_free(struct shmc_handle *handle, struct shmc_table *table, uint64_t index,
                         uint32_t slot);
enum shmc_status shmc_entry_find(struct shmc_handle *handle, struct shmc_table *table,
                                 uint32_t slot, struct shmc_token token);

/* claims.c; called with the lock held */
enum shmc_status shmc_claims_take(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_claims_release(struct shmc_handle *handle, uint32_t owner,
                                     struct shmc_token token);
uint64_t shmc_claim_bucket(const struct shmc_handle *handle, const uint64_t *key);

/* operations.c */
enum shmc_status shmc_ended(const struct shmc_handle *handle);
void shmc_wake_waiters(struct shmc_handle *handle);
void shmc_mark_retired(struct shmc_handle *handle); /* the change itself, which wakes nobody */

/* segment.c */
uint64_t shmc_pin_row_bytes(uint64_t blocks);
uint64_t shmc_ring_bytes(const struct shmc_header *header);

/* A block and its generation in one word, as rings and parents have it. */
#define SHMC_BLOCK_NAME_MASK               0xffffffull
#define SHMC_BLOCK_NAME(block, generation) ((generation) << 24 | (block))
#define SHMC_NAMED_BLOCK(name)             ((name) & SHMC_BLOCK_NAME_MASK)

/* index.c; find and put with the lock held */
struct shmc_key_hash {
    uint64_t *first; /* its two buckets */
    uint64_t *second;
    uint64_t tag;
};

static inline bool shmc_same_key(const uint64_t *one, const uint64_t *other)
{
    return ((one[0] ^ other[0]) | (one[1] ^ other[1]) | (one[2] ^ other[2]) |
            (one[3] ^ other[3])) == 0;
}

struct shmc_key_hash shmc_index_hash(const struct shmc_handle *handle, const uint64_t *key);

/* An entry of the index: whether it is used, the block, the tag of its key. */
#define SHMC_ENTRY_USED 1ull
#define SHMC_TAG_SHIFT  25u

static inline bool shmc_index_matches(uint64_t word, uint64_t tag, uint64_t *block)
{
    *block = word >> 1 & SHMC_BLOCK_NAME_MASK;
    return word >> SHMC_TAG_SHIFT == tag && (word & SHMC_ENTRY_USED) != 0;
}

uint64_t *shmc_index_find(const struct shmc_handle *handle, const uint64_t *key, uint64_t *block);
bool shmc_index_names(const struct shmc_handle *handle, uint64_t word, uint64_t block);
bool shmc_index_put(struct shmc_handle *handle, const uint64_t *key, uint64_t block);

static inline bool shmc_fits_arena(const struct shmc_handle *handle, uint64_t place, uint64_t bytes)
{
    return bytes <= handle->arena_bytes && place <= handle->arena_bytes - bytes;
}

/* pins.c */
bool shmc_leaf_try(struct shmc_handle *handle);
void shmc_leaf_enter(struct shmc_handle *handle);
void shmc_leaf_leave(struct shmc_handle *handle);
uint64_t *shmc_pin_row(const struct shmc_handle *handle, uint32_t slot);
void shmc_pin(struct shmc_handle *handle, uint64_t block);
bool shmc_unpin(struct shmc_handle *handle, uint64_t block);
bool shmc_is_pinned(const struct shmc_handle *handle, uint64_t block);
static inline uint64_t *shmc_ring_entries(const struct shmc_ring *ring)
{
    return (uint64_t *)(ring + 1);
}
struct shmc_ring *shmc_ring_of(const struct shmc_handle *handle, uint32_t slot);

/* slabs.c; called with the lock held */
/* Every class there ever was. Entries are taken in order and never given back, so that the first
 * without a size ends them: a store must not read the whole table. */
#define SHMC_EACH_CLASS(handle, class)                                                             \
    for (struct shmc_class *class = (handle)->classes;                                             \
         class != (handle)->classes + SHMC_CLASSES_MAX && class->block_bytes != 0; class ++)
uint64_t shmc_class_bytes(const struct shmc_handle *handle, uint64_t bytes);
enum shmc_status shmc_class_find(struct shmc_handle *handle, uint64_t block_bytes,
                                 struct shmc_class **class);
uint64_t shmc_slab_places(const struct shmc_handle *handle, uint64_t slab, uint64_t block_bytes);
enum shmc_status shmc_class_of(const struct shmc_handle *handle, const struct shmc_slab *slab,
                               struct shmc_class **class);
enum shmc_status shmc_slab_of(const struct shmc_handle *handle, uint64_t block,
                              struct shmc_slab **slab, struct shmc_class **class);
enum shmc_status shmc_slab_take(struct shmc_handle *handle, struct shmc_class *class,
                                uint64_t *index);
enum shmc_status shmc_slab_give_back(struct shmc_handle *handle, uint64_t index);
enum shmc_status shmc_slab_retire(struct shmc_handle *handle, struct shmc_slab *slab);
enum shmc_status shmc_slab_drain_begin(struct shmc_handle *handle, struct shmc_slab *slab,
                                       struct shmc_class *class);
enum shmc_status shmc_slab_drain_cancel(struct shmc_handle *handle, struct shmc_slab *slab,
                                        struct shmc_class *class);

/* eviction.c; called with the lock held */
enum shmc_status shmc_queue_remove(struct shmc_handle *handle, struct shmc_class *class,
                                   uint64_t block);
enum shmc_status shmc_queue_move(struct shmc_handle *handle, struct shmc_class *class,
                                 uint64_t block, uint64_t queue);
enum shmc_status shmc_policy_insert(struct shmc_handle *handle, struct shmc_class *class,
                                    uint64_t block, uint64_t parent);
enum shmc_status shmc_policy_doom(struct shmc_handle *handle, struct shmc_class *class,
                                  uint64_t block);
uint64_t shmc_policy_victim(const struct shmc_handle *handle, const struct shmc_class *class);
uint64_t shmc_policy_age(const struct shmc_handle *handle, const struct shmc_class *class);
enum shmc_status shmc_policy_childless(struct shmc_handle *handle, uint64_t block);
void shmc_policy_evicted(struct shmc_handle *handle, uint64_t block);
enum shmc_status shmc_policy_park(struct shmc_handle *handle, struct shmc_class *class,
                                  uint64_t block);
enum shmc_status shmc_policy_unpark(struct shmc_handle *handle, struct shmc_class *class);
enum shmc_status shmc_policy_protect(struct shmc_handle *handle, struct shmc_class *class,
                                     uint64_t block, bool protect);
enum shmc_status shmc_policy_drain_own(struct shmc_handle *handle);
bool shmc_ring_is_long(const struct shmc_handle *handle); /* with or without the lock */
enum shmc_status shmc_policy_drain_all(struct shmc_handle *handle, struct shmc_request *request);

/* adaptive.c; called with the lock held */
uint64_t shmc_adaptive_kind(uint64_t uses, uint64_t flags);
void shmc_adaptive_used(struct shmc_handle *handle, uint64_t block);
uint64_t shmc_adaptive_stored(struct shmc_handle *handle, uint64_t block, uint64_t inherited_uses,
                              uint64_t clock);
void shmc_adaptive_has_child(struct shmc_handle *handle, uint64_t block);
void shmc_adaptive_evicted(struct shmc_handle *handle, uint64_t block);
void shmc_adaptive_tick(struct shmc_handle *handle);
uint64_t shmc_adaptive_victim(const struct shmc_handle *handle, const struct shmc_class *class);

/* room.c; called with the lock held, but recover, which is part of taking it */
bool shmc_blocks_recover(struct shmc_handle *handle);
enum shmc_status shmc_put_charge(struct shmc_handle *handle, struct shmc_class *class, bool more);
enum shmc_status shmc_put_free(struct shmc_handle *handle, uint64_t index,
                               struct shmc_class *class);
enum shmc_status shmc_put_withdrawn(struct shmc_handle *handle, uint64_t index,
                                    struct shmc_class *class, uint64_t *entry);
enum shmc_status shmc_retire_if_empty(struct shmc_handle *handle, struct shmc_slab *slab);
bool shmc_close_to_readers(struct shmc_handle *handle, uint64_t index, enum shmc_block_state state);
enum shmc_status shmc_make_room(struct shmc_handle *handle, struct shmc_class *class,
                                struct shmc_request *request);
enum shmc_status shmc_make_host_room(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_blocks_evict(struct shmc_handle *handle, struct shmc_request *request);

/* blocks.c; called with the lock held */
bool shmc_block_is(const struct shmc_handle *handle, uint64_t name, enum shmc_block_state state);
enum shmc_status shmc_blocks_allocate(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_blocks_seal(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_blocks_publish(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_blocks_discard(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_blocks_invalidate(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_blocks_protect(struct shmc_handle *handle, struct shmc_request *request);
enum shmc_status shmc_blocks_reclaim(struct shmc_handle *handle, uint32_t slot,
                                     struct shmc_request *request);
void shmc_arena_report(struct shmc_handle *handle, struct shmc_arena_report *report);

/* check.c, check_arena.c; called with the lock held */
struct shmc_walk {
    struct shmc_handle *handle;
    struct shmc_request *request;
    uint64_t current[SHMC_AXES];
    bool overflow;
};
void shmc_walk_report(struct shmc_walk *walk, enum shmc_problem_kind kind, uint64_t index,
                      uint64_t expected, uint64_t actual);
void shmc_walk_expect(struct shmc_walk *walk, enum shmc_problem_kind kind, uint64_t index,
                      uint64_t expected, uint64_t actual);
void shmc_check_arena(struct shmc_walk *walk);
/* check.c; called with the lock held */
void shmc_check(struct shmc_handle *handle, struct shmc_request *request);

/* ---- snapshot.c ---- */
enum shmc_status shmc_snapshot_take(struct shmc_handle *handle, struct shmc_snapshot *snapshot);
void shmc_snapshot_copy(const struct shmc_handle *handle, uint8_t *copy);

#endif
