/* shmc.h: the engine's interface. Plain C11, no Python, no policy.
 *
 * Why         Python has no atomics, and a process may be killed between any two instructions.
 * Contract    A caller opens a handle on a descriptor, joins it (takes an owner slot) unless it
 *             only observes, and then performs requests. Each request is one critical section:
 *             it happens wholly or not at all, also when the caller is killed inside.
 * Concurrency Any number of threads may perform requests on one handle. Open, join's set-up, and
 *             close are for one thread at a time; close only when no call is in flight.
 * Death       What each request leaves for its successor is said in the file that implements it.
 * Errors      One status enum; whether to try again is part of each value. Nothing here aborts
 *             in release builds: a CHECK that fails poisons the pool and returns SHMC_POISONED.
 *
 * Files:      layout.h the bytes; atomics.h memory orders; os_linux.c system calls; lock.c the
 *             lock; redo.c atomic change and its recovery; segment.c format, open, close;
 *             process.c what this process has open, and fork; owners.c who is attached and who is
 *             dead; paths.c where an owner has files; accounts.c managers, reservations, totals;
 *             operations.c one request; check.c and check_arena.c walk everything. The arena:
 *             index.c from a key to a block; pins.c leasing without the lock; blocks.c a block as
 *             its owner sees it; room.c how it goes; slabs.c which memory has which size;
 *             eviction.c who goes first; claims.c who is making what; views.c what outlives a
 *             handle; census.c, checksum.c; snapshot.c copies of the tables.
 */
#ifndef SHMC_H
#define SHMC_H

#include <stdbool.h>
#include <sys/types.h>

#include "layout.h"

/* name, retry, meaning. retry: 1 when the same call may succeed a moment later. */
#define SHMC_STATUS_TABLE(X)                                                                       \
    X(OK, 0, "done")                                                                               \
    X(BUSY, 1, "the lock was not free within the wait; nothing changed")                           \
    X(MORE, 1, "a chunk of reclaim is done and more remains")                                      \
    X(LIVE_FILES, 1, "the rest of reclaim waits until the owner's live files are deleted")         \
    X(FORKED, 1, "this handle was opened by an ancestor; open anew in this process")               \
    X(NOT_JOINED, 1, "the handle has no owner slot yet")                                           \
    X(STALE, 0, "the named entry or owner is gone; nothing changed")                               \
    X(LOST_SLOT, 0, "the handle's owner slot was taken away")                                      \
    X(RETIRED, 0, "another epoch took this pool's place")                                          \
    X(POISONED, 0, "a validation failed; the pool cannot be trusted")                              \
    X(BUDGET_EXCEEDED, 1, "an axis would exceed its limit")                                        \
    X(PUBLICATION_OVERFLOW, 0, "a published sum leaves 64 bits")                                   \
    X(ADMISSION_OVERFLOW, 0, "an admitted sum leaves 64 bits")                                     \
    X(DUPLICATE_MANAGER, 0, "the manager id is registered")                                        \
    X(UNKNOWN_MANAGER, 0, "the manager id is not registered")                                      \
    X(MANAGERS_FULL, 1, "every manager entry is in use")                                           \
    X(RESERVATIONS_FULL, 1, "every reservation entry is in use")                                   \
    X(OWNERS_FULL, 1, "every owner slot is in use")                                                \
    X(CLAIMS_FULL, 1, "every claim entry is in use")                                               \
    X(CLAIMED, 1, "another owner is making the block of this key")                                 \
    X(ABSENT, 1, "no block is published under this key")                                           \
    X(PINNED, 1, "the block is leased; nothing changed")                                           \
    X(ARENA_FULL, 1, "every block that could be evicted is in use")                                \
    X(CLASSES_FULL, 1, "too many different block sizes are in use")                                \
    X(TOO_LARGE, 0, "no block can have so many bytes")                                             \
    X(NO_ARENA, 0, "the pool was made without an arena")                                           \
    X(OWNERS_CHANGED, 1, "an owner attached since the caller looked")                              \
    X(CORRUPT, 0, "shared state is damaged")                                                       \
    X(REFUSED, 0, "the segment does not fit this process; see the refusal")                        \
    X(SYSTEM, 0, "a system call failed; see errno")

enum shmc_status {
#define SHMC_STATUS_ENUM(name, retry, meaning) SHMC_##name,
    SHMC_STATUS_TABLE(SHMC_STATUS_ENUM)
#undef SHMC_STATUS_ENUM
        SHMC_STATUS_COUNT
};

const char *shmc_status_name(enum shmc_status status);
bool shmc_status_retry(enum shmc_status status);

/* Why a segment was refused. errors.py repeats the names in lower case. */
#define SHMC_REFUSAL_TABLE(X)                                                                      \
    X(NONE)                                                                                        \
    X(FILE_TYPE)                                                                                   \
    X(OWNER_UID)                                                                                   \
    X(MODE)                                                                                        \
    X(SIZE)                                                                                        \
    X(MAGIC)                                                                                       \
    X(VERSION)                                                                                     \
    X(ABI)                                                                                         \
    X(CHECKSUM)                                                                                    \
    X(GEOMETRY)                                                                                    \
    X(BOOT_ID)                                                                                     \
    X(PID_NAMESPACE)                                                                               \
    X(TIME_NAMESPACE)                                                                              \
    X(INODE)                                                                                       \
    X(ROBUST_MUTEX)

enum shmc_check_name {
#define SHMC_REFUSAL_ENUM(name) SHMC_CHECK_##name,
    SHMC_REFUSAL_TABLE(SHMC_REFUSAL_ENUM)
#undef SHMC_REFUSAL_ENUM
        SHMC_CHECK_COUNT
};

const char *shmc_check_name_text(enum shmc_check_name check);

struct shmc_refusal {
    enum shmc_check_name check;
    uint64_t expected;
    uint64_t actual;
};

/* ---- segment.c: format, open, close -------------------------------------------------------- */

/* Checked copies of the immutable facts, plus where the regions are in this process. */
struct shmc_handle;

/* Bytes a segment of this geometry has, or 0 when the geometry is out of bounds. */
uint64_t shmc_segment_bytes(const struct shmc_geometry *geometry);
/* The same of all that stands before the arena. */
uint64_t shmc_tables_bytes(const struct shmc_geometry *geometry);

/* Writes a valid, empty segment into fd, whose size must be shmc_segment_bytes(). Not yet visible
 * to others (no name). Death: an unnamed file. */
enum shmc_status shmc_format(int fd, const struct shmc_geometry *geometry,
                             struct shmc_refusal *refusal);

/* Maps the segment behind fd after checking it against this process and this boot. Borrows fd,
 * which must stay open as long as the handle. as_owner: also prepares a nonce and the exec lock for
 * a join. */
enum shmc_status shmc_open(int fd, bool as_owner, struct shmc_handle **handle,
                           struct shmc_refusal *refusal);

/* Unmaps and frees. In a forked child frees only: the mapping was never inherited. */
void shmc_close(struct shmc_handle *handle);

/* Proves once per process that this kernel and libc report the death of a lock holder. */
bool shmc_robust_mutex_works(void); /* false and errno 0: no; else it could not be tested */

/* True in the process that opened the handle, false in its forked children. */
bool shmc_is_mine(const struct shmc_handle *handle);
/* Whether the descriptor given to shmc_open() still names the segment; otherwise it is not ours to
 * close or to pass on. */
bool shmc_descriptor_intact(const struct shmc_handle *handle);
/* A value that no forked child shares; never 0. */
uint64_t shmc_process_guard(void);

/* Whether a handle of this very process has the nonce. */
bool shmc_nonce_is_local(uint64_t nonce);

const struct shmc_header *shmc_header(const struct shmc_handle *handle);
void *shmc_region(const struct shmc_handle *handle, enum shmc_region region);
uint32_t shmc_slot(const struct shmc_handle *handle); /* UINT32_MAX before the join */
uint64_t shmc_nonce(const struct shmc_handle *handle);
enum shmc_pool_state shmc_pool_state(const struct shmc_handle *handle);
void shmc_poison(struct shmc_handle *handle);
/* Ends the epoch whatever its state, and without the lock: the way out when the lock is damaged. */
void shmc_retire(struct shmc_handle *handle);
uint64_t shmc_attach_seq(const struct shmc_handle *handle); /* a hint, read without the lock */

/* ---- operations.c: one request, one critical section --------------------------------------- */

enum shmc_operation {
    SHMC_OP_NONE,
    SHMC_OP_JOIN,                /* take an owner slot */
    SHMC_OP_REGISTER,            /* in: id, allocate_id; out: id, token */
    SHMC_OP_UPDATE,              /* in: id, usage; out: aggregate */
    SHMC_OP_RESERVE,             /* in: usage; out: token; on refusal: axis, required */
    SHMC_OP_RELEASE_MANAGER,     /* in: token */
    SHMC_OP_RELEASE_RESERVATION, /* in: token */
    SHMC_OP_PUBLISH_AND_RELEASE, /* in: id, usage, token of a reservation; out: aggregate */
    SHMC_OP_REPORT,              /* out: report */
    SHMC_OP_HELD,                /* in: held_rows[owners_max]; out: rows filled */
    SHMC_OP_RECLAIM_BEGIN,       /* in: owner_slot, owner_nonce */
    /* in: owner_slot, owner_nonce, cursor; out: released, usage; MORE until the slot is FREE, or
     * LIVE_FILES until FILES_GONE was said; then out: paths[SHMC_OWNER_PATH_BYTES], paths_bytes */
    SHMC_OP_RECLAIM_STEP,
    SHMC_OP_FILES_GONE, /* in: owner_slot, owner_nonce of an owner that is being reclaimed */
    SHMC_OP_SET_PATHS,  /* in: paths, paths_bytes: all directories that may have live files now */
    SHMC_OP_CLAIM,      /* in: key; out: token, or CLAIMED with owner_slot and owner_nonce */
    SHMC_OP_RELEASE_CLAIM, /* in: token */
    /* in: bytes, manager as id, token of a reservation to consume; out: lease, capacity. MORE: the
     * same request again, it keeps its place in cursor */
    SHMC_OP_ALLOCATE,
    SHMC_OP_SEAL,         /* in: lease */
    SHMC_OP_PUBLISH,      /* in: lease, key, parent, protect, checksum; out: lease, created */
    SHMC_OP_DISCARD,      /* in: lease of a block that is not published */
    SHMC_OP_INVALIDATE,   /* in: key; named: only that generation */
    SHMC_OP_PROTECT,      /* in: key, protect */
    SHMC_OP_EVICT,        /* in: bytes to free, cursor; out: released bytes of this chunk */
    SHMC_OP_DRAIN,        /* tell the policy what this owner has read */
    SHMC_OP_ARENA_REPORT, /* out: arena_report */
    SHMC_OP_SNAPSHOT,     /* in: snapshot with room; out: filled */
    SHMC_OP_COPY,         /* in: copy, with room for all bytes before the arena; out: filled */
    SHMC_OP_RETIRE,       /* in: attach_seq as the caller saw it */
    SHMC_OP_CHECK,        /* in: problems[problems_max]; out: problems_count */
    SHMC_OPERATIONS,
};

struct shmc_token {
    uint64_t index;
    uint64_t generation;
};

#define SHMC_KEY_WORDS 4u

/* One block in the eyes of a process that holds it. */
struct shmc_lease {
    uint64_t block;
    uint64_t generation;
    uint64_t place; /* bytes from the start of the arena */
    uint64_t bytes;
};

enum shmc_parent_kind {
    SHMC_PARENT_NONE,
    SHMC_PARENT_KEY,
    SHMC_PARENT_LEASE,
};

/* Totals of the arena, and what the policy and the slabs look like. */
struct shmc_arena_report {
    uint64_t used_blocks;
    uint64_t used_bytes;
    uint64_t slabs_used;
    uint64_t draining; /* slab plus one, or 0 */
    uint64_t stored;
    uint64_t evicted;
    uint64_t invalidated;
    uint64_t duplicates;
    uint64_t unindexed;
    uint64_t slabs_moved;
    uint64_t clock;
    struct shmc_class classes[SHMC_CLASSES_MAX];
};

struct shmc_report {
    uint64_t managers;
    uint64_t reservations;
    uint64_t owners;
    uint64_t attach_seq;
    uint64_t recoveries;
    uint64_t current[SHMC_AXES];
    uint64_t peak[SHMC_AXES];
};

struct shmc_held {
    uint64_t managers;
    uint64_t reservations;
    uint64_t usage[SHMC_AXES];
};

/* One finding of check.c: what is wrong, where, and the two numbers that disagree. */
#define SHMC_PROBLEM_TABLE(X)                                                                      \
    X(REDO_PENDING, "a redo record is still pending")                                              \
    X(TOTAL, "an axis total differs from its recount")                                             \
    X(PEAK_ABOVE_LIMIT, "a peak is above its limit")                                               \
    X(OWNER_COUNT, "the number of owners differs from its recount")                                \
    X(OWNER_STATE, "an owner slot has an impossible state")                                        \
    X(OWNER_NONCE, "an owner slot in use has no nonce")                                            \
    X(OWNER_HELD, "what an owner holds differs from its recount")                                  \
    X(OWNER_PATHS, "the directories of an owner's live files are no list of absolute paths")       \
    X(MANAGER_COUNT, "the number of managers differs from its recount")                            \
    X(MANAGER_STATE, "a manager entry has an impossible state")                                    \
    X(MANAGER_OWNER, "a manager entry names a slot that is not in use")                            \
    X(MANAGER_FREE_LIST, "the list of free manager entries is broken")                             \
    X(MANAGER_INDEX, "the manager index is broken")                                                \
    X(RESERVATION_COUNT, "the number of reservations differs from its recount")                    \
    X(RESERVATION_STATE, "a reservation entry has an impossible state")                            \
    X(RESERVATION_OWNER, "a reservation entry names a slot that is not in use")                    \
    X(RESERVATION_FREE_LIST, "the list of free reservation entries is broken")                     \
    X(CLAIM_COUNT, "the number of claims differs from its recount")                                \
    X(CLAIM_STATE, "a claim entry has an impossible state")                                        \
    X(CLAIM_OWNER, "a claim entry names a slot that is not in use")                                \
    X(CLAIM_FREE_LIST, "the list of free claim entries is broken")                                 \
    X(CLAIM_INDEX, "the claim index is broken")                                                    \
    X(OWNER_ACTIVE, "the bits of slots in use differ from the slots")                              \
    X(BLOCK_COUNT, "the number or bytes of blocks in use differs from its recount")                \
    X(BLOCK_STATE, "a block has an impossible state")                                              \
    X(BLOCK_PLACE, "a block has an impossible place or size")                                      \
    X(BLOCK_OWNER, "a private block names a slot that is not in use, or is not in its row")        \
    X(BLOCK_FREE_LIST, "the list of blocks without a place is broken")                             \
    X(BLOCK_CHILDREN, "a block has fewer children than name it")                                   \
    X(CLASS_COUNT, "the numbers of a class differ from their recount")                             \
    X(QUEUE, "a queue of blocks is broken")                                                        \
    X(SLAB_STATE, "a slab has an impossible state")                                                \
    X(SLAB_BLOCKS, "the blocks of a slab differ from its counts or lists")                         \
    X(SLAB_LIST, "a list of slabs is broken")                                                      \
    X(INDEX_ENTRY, "an index entry names no block that is published under its key")                \
    X(INDEX_MISSING, "a published block is not in the index once")

enum shmc_problem_kind {
#define SHMC_PROBLEM_ENUM(name, text) SHMC_PROBLEM_##name,
    SHMC_PROBLEM_TABLE(SHMC_PROBLEM_ENUM)
#undef SHMC_PROBLEM_ENUM
        SHMC_PROBLEM_KINDS
};

const char *shmc_problem_text(enum shmc_problem_kind kind);

struct shmc_problem {
    enum shmc_problem_kind kind;
    uint64_t index;
    uint64_t expected;
    uint64_t actual;
};

/* Arguments and results of one request; unused fields are ignored. */
struct shmc_request {
    enum shmc_operation operation;
    bool allocate_id;
    uint64_t id;
    uint64_t usage[SHMC_AXES];
    struct shmc_token token;
    uint64_t aggregate[SHMC_AXES];
    uint32_t axis;
    uint64_t required;
    uint64_t budget;
    struct shmc_report report;
    struct shmc_held *held_rows;
    uint32_t owner_slot;
    uint64_t owner_nonce;
    uint64_t cursor;
    uint64_t row_cursor;  /* of a reclaim: words of the row of pins */
    uint64_t slab_cursor; /* of an allocation: slabs that were looked at */
    uint64_t drained;     /* ring entries that were looked at before the request itself */
    uint64_t released;    /* entries given back by a reclaim step; bytes freed by an eviction */
    char *paths;          /* as in an owner's slot; NULL: not asked for */
    uint64_t paths_bytes;
    uint64_t bytes;
    uint64_t capacity; /* bytes charged for the block */
    bool has_manager;
    bool has_reservation;
    bool protect;
    bool created;
    bool named;
    struct shmc_lease lease;
    uint64_t key[SHMC_KEY_WORDS];
    enum shmc_parent_kind parent_kind;
    struct shmc_lease parent;
    uint64_t parent_key[SHMC_KEY_WORDS];
    uint64_t checksum;
    struct shmc_arena_report *arena_report;
    struct shmc_snapshot *snapshot;
    uint8_t *copy;
    uint64_t attach_seq;
    struct shmc_problem *problems;
    uint32_t problems_max;
    uint32_t problems_count;
};

/* Does one request. wait_ns: 0 tries for a few microseconds, otherwise waits that long for the lock
 * and returns SHMC_BUSY when it stayed taken. Never waits otherwise. */
enum shmc_status shmc_perform(struct shmc_handle *handle, struct shmc_request *request,
                              uint64_t wait_ns);

/* Thread id of the present holder of the lock, 0 when free. A hint. */
pid_t shmc_lock_holder(const struct shmc_handle *handle);

/* ---- pins.c: leases, without the lock ------------------------------------------------------ */

/* Leases the longest run of present keys from the first on; keys_count leases must fit. */
enum shmc_status shmc_match(struct shmc_handle *handle, const uint64_t *keys, uint64_t keys_count,
                            struct shmc_lease *leases, uint64_t *found);
/* Whether the key is published, and what its block is; leases nothing, tells the policy nothing. */
bool shmc_contains(struct shmc_handle *handle, const uint64_t *key, struct shmc_lease *lease);
void shmc_release(struct shmc_handle *handle, const struct shmc_lease *leases,
                  uint64_t leases_count);
/* In a forked child, with its new handle: leases what a view of the parent shows; false when that
 * is not what it was. */
bool shmc_lease_again(struct shmc_handle *handle, const struct shmc_lease *lease);

/* What people may ask of one published block; a hint where it does not come from the block. */
struct shmc_block_stat {
    uint64_t bytes;
    uint64_t capacity;
    uint64_t generation;
    uint64_t uses; /* as far as the policy has heard */
    bool is_protected;
    bool leased; /* by anybody */
};
bool shmc_stat(struct shmc_handle *handle, const uint64_t *key, struct shmc_block_stat *stat);

const uint8_t *shmc_read_address(const struct shmc_handle *handle, const struct shmc_lease *lease);
uint8_t *shmc_write_address(const struct shmc_handle *handle, const struct shmc_lease *lease);
uint64_t shmc_read_counter(const struct shmc_handle *handle, uint32_t slot,
                           enum shmc_counter counter);

/* ---- views.c: what outlives a handle --------------------------------------------------------- */

/* For views that outlive the handle they were made through: next, which has leased their blocks,
 * takes over the mapping that they look at, at its address. apart: new leases get another one, as
 * some views are going to be forbidden. written: some were writable. False: all views fault. */
bool shmc_keep_views(struct shmc_handle *next, struct shmc_handle *previous, bool apart,
                     bool written);
/* In a forked child, before the segment is opened again, when there are views. */
void shmc_views_reserve(struct shmc_handle *handle);
/* Makes the older views of one block fault: they would show another's bytes. */
void shmc_forbid_view(struct shmc_handle *handle, const struct shmc_lease *lease);

/* Fills this process's page tables for a part of the arena; false and errno. */
bool shmc_prefault(const struct shmc_handle *handle, uint64_t offset, uint64_t bytes);

/* What sessions tell: words of their part of a telemetry row, counters and then gauges. */
#define SHMC_SESSION_WORDS (SHMC_SESSION_COUNTERS_MAX + SHMC_GAUGES_MAX)
/* Adds, modulo 2^64, to a word of the handle's own row. */
void shmc_tell(struct shmc_handle *handle, uint32_t word, uint64_t more);
/* The sum of a word over all rows; a hint while owners are being cleaned up after. */
uint64_t shmc_told(const struct shmc_handle *handle, uint32_t word);

/* ---- census.c: who leases what, counted without the lock ----------------------------------- */

struct shmc_holding {
    uint64_t leased_blocks; /* with a pin of this owner */
    uint64_t leased_bytes;  /* of their classes */
    uint64_t private_blocks;
    uint64_t private_bytes;
};

/* What each owner has pins on (rows[owners_max]), and how many PUBLISHED blocks of each class
 * anybody has (leased[SHMC_CLASSES_MAX]). A hint: the world goes on meanwhile. */
void shmc_census(const struct shmc_handle *handle, struct shmc_holding *rows, uint64_t *leased);

/* ---- checksum.c --------------------------------------------------------------------------------
 */

/* Of bytes, never 0; finds accidents, not forgers. */
uint64_t shmc_checksum(const void *data, uint64_t bytes);
enum shmc_fidelity {
    SHMC_FAITHFUL,
    SHMC_NOT_CHECKED, /* the pool keeps no checksums, or this process has checked before */
    SHMC_DAMAGED,
};
/* Compares a leased block's bytes with the checksum of its publisher, as the pool's flags ask. */
enum shmc_fidelity shmc_verify_lease(struct shmc_handle *handle, const struct shmc_lease *lease);

/* ---- owners.c: who is attached, who is dead ------------------------------------------------ */

enum shmc_verdict {
    SHMC_ALIVE,
    SHMC_DEAD,
    SHMC_UNKNOWN, /* never reclaimed */
};

struct shmc_owner_view {
    uint32_t slot;
    enum shmc_owner_state state;
    uint64_t nonce;
    uint64_t pid;
    uint64_t start_ticks;
    uint64_t pidfs_inode;
    uint64_t attach_seq;
    uint64_t exec_locked;
    uint64_t departed;
    uint64_t counted[SHMC_COUNTERS];
};

/* Consistent copy of a slot read without the lock; false when the slot is FREE or changing. */
bool shmc_owner_view(const struct shmc_handle *handle, uint32_t slot, struct shmc_owner_view *view);

/* Verdict on one owner; takes no lock and changes nothing shared. */
enum shmc_verdict shmc_owner_verdict(struct shmc_handle *handle,
                                     const struct shmc_owner_view *view);

/* Finds slots to clean: owners proved dead, and slots left CLEANING. Returns how many of at most
 * max. */
uint32_t shmc_find_dead(struct shmc_handle *handle, struct shmc_owner_view *dead, uint32_t max);

/* Where the owner has live files, as in its slot; returns the bytes, 0 when none are to be had.
 * paths[SHMC_OWNER_PATH_BYTES]. Read without the lock: a hint. */
uint64_t shmc_owner_paths(const struct shmc_handle *handle, uint32_t slot, uint64_t nonce,
                          char *paths);

/* A descriptor that becomes readable when the owner dies, or -1. Belongs to the handle. */
int shmc_owner_pidfd(struct shmc_handle *handle, const struct shmc_owner_view *view);

/* ---- snapshot.c: everything at one instant ------------------------------------------------- */

struct shmc_snapshot {
    struct shmc_report report;
    struct shmc_arena_report arena; /* zeros without an arena */
    struct shmc_owner_view *owners; /* [owners_max] those in use come first */
    struct shmc_held *held;         /* [owners_max] by slot */
    struct shmc_entry *managers;    /* [managers_max] the LIVE ones come first */
    struct shmc_slab *slabs;        /* [slabs_max] */
    uint32_t owners_count;
    uint64_t managers_count;
};

/* ---- waiting for capacity ------------------------------------------------------------------ */

/* Marks this owner as waiting (or not); callers count their own threads. */
void shmc_waiter_set(struct shmc_handle *handle, bool waiting);
uint32_t shmc_release_counter(const struct shmc_handle *handle);
/* Sleeps until the counter differs from seen, or wait_ns passed. */
void shmc_wait_release(struct shmc_handle *handle, uint32_t seen, uint64_t wait_ns);

/* This process's doorbell, for the one thread that waits for many pools: ring it when that thread
 * must look at something else. The handles may not be closed meanwhile. */
void shmc_ring(void);
uint32_t shmc_rung(void);
/* Sleeps until one pool's counter differs from its seen, or the doorbell from rung, or wait_ns
 * passed. Where the kernel cannot wait for that many, it returns a little later than it could. */
void shmc_wait_any(struct shmc_handle *const *handles, const uint32_t *seen, uint32_t count,
                   uint32_t rung, uint64_t wait_ns);

#endif
