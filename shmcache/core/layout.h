/* layout.h: the bytes of a segment, as a specification.
 *
 * A segment is one file (tmpfs or memfd) that every attached process maps. All numbers are native
 * (the ABI tag in the header refuses strangers); everything that changes is a naturally aligned
 * word, of 64 bits wherever a crash matters, because one such store is the unit of what a dying
 * process can have done. There are no pointers: regions are found by the offsets in the header,
 * entries by their index. The regions, in this order:
 *
 *   region         bytes                              changed by
 *   header         4096                               nobody after create; checksummed
 *   gate           4096                               the lock, and words used without it
 *   redo           1024                               holder of the lock
 *   control        1024                               redo record
 *   owners         512 x owners_max                   redo record; payload before commit
 *   managers       64 x managers_max                  redo record; payload before commit
 *   manager index  8 x manager_buckets                redo record
 *   reservations   64 x reservations_max              redo record; payload before commit
 *   claims         64 x claims_max                    redo record; payload before commit
 *   claim index    8 x claim_buckets                  redo record
 *   classes        256 x SHMC_CLASSES_MAX             redo record
 *   slabs          64 x slabs_max                     redo record
 *   blocks         128 x blocks_max                   redo record; payload before commit
 *   index          64 x index_buckets                 redo record
 *   pins           row of blocks_max bits per owner   its owner or a cleaner, no lock
 *   policy         4096 + 4 x ghosts_max              holder of the lock, plain; a hint
 *   rings          128 + 8 x ring_entries, per owner  its owner, no lock
 *   telemetry      512 x owners_max                   its owner, no lock
 *   events         64 x SHMC_EVENTS_MAX               anyone, no lock; a hint
 *   arena          arena_bytes, 2 MiB aligned         the owner of a WRITING block
 *
 * Claims to rings, and the arena, have no bytes in a pool without an arena.
 *
 * "Journaled" regions, control up to and without pins, are one contiguous range: a redo record may
 * name only words in it. A word of a FREE entry or slot other than its state, next and held words
 * is payload: it means nothing until the state word says so, so it is written before the commit.
 * Lists of the arena hold indices plus one, so that zeroed memory is the empty state.
 *
 * Reading a field's rule: [who writes it, how] what a reader may rely on. On death: what remains.
 */
/* clang-format off: fields and their comments are aligned by hand, and tools/draw_segment.py makes
 * docs/segment.md of them */
#ifndef SHMC_LAYOUT_H
#define SHMC_LAYOUT_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define SHMC_MAGIC 0x45484341434d4853ull /* "SHMCACHE" in memory order */
#define SHMC_VERSION 5u                  /* rises with any change of this file's meaning */
#define SHMC_PAGE_BYTES 4096u
#define SHMC_AXES 4u                     /* device, host, transfer in flight, disk */
#define SHMC_ARENA_ALIGN_BYTES (2u << 20) /* a huge page */
#define SHMC_NO_INDEX UINT64_MAX /* end of a list: no entry */

/* Every limit of the engine; bounds.py repeats them and a test compares. */
#define SHMC_OWNERS_LIMIT 1024u             /* attached processes */
#define SHMC_MANAGERS_LIMIT 65536u          /* one per live model cache */
#define SHMC_RESERVATIONS_LIMIT (1u << 20)  /* admitted usages that were not given back */
#define SHMC_CLAIMS_LIMIT 65536u            /* blocks that somebody is computing */
#define SHMC_BLOCKS_LIMIT ((1u << 24) - 1)  /* an index plus one has 24 bits in many words */
#define SHMC_ARENA_BYTES_LIMIT (1ull << 46) /* 64 TiB */
#define SHMC_BLOCK_BYTES_LIMIT (1ull << 40)
#define SHMC_CLASSES_MAX 64u                /* different block sizes in use at once */
#define SHMC_REDO_WORDS_MAX 60u             /* words that one change may store */
#define SHMC_OWNER_PATH_BYTES 384u
#define SHMC_WAITER_WORDS (SHMC_OWNERS_LIMIT / 64u) /* one bit per owner */
#define SHMC_EVENTS_MAX 1024u
#define SHMC_RING_ENTRIES_MAX 4096u         /* hits that an owner's ring can hold; a power of two */
#define SHMC_RING_ENTRIES_MIN 256u
#define SHMC_BUCKET_ENTRIES 8u              /* one cache line of index words */
#define SHMC_LEARNED_WORDS 512u             /* what the eviction policy has learned */

enum shmc_axis {
    SHMC_DEVICE = 0,
    SHMC_HOST = 1,
    SHMC_TRANSFER = 2,
    SHMC_DISK = 3,
};

enum shmc_region {
    SHMC_REGION_HEADER,
    SHMC_REGION_GATE,
    SHMC_REGION_REDO,
    SHMC_REGION_CONTROL,
    SHMC_REGION_OWNERS,
    SHMC_REGION_MANAGERS,
    SHMC_REGION_MANAGER_INDEX,
    SHMC_REGION_RESERVATIONS,
    SHMC_REGION_CLAIMS,
    SHMC_REGION_CLAIM_INDEX,
    SHMC_REGION_CLASSES,
    SHMC_REGION_SLABS,
    SHMC_REGION_BLOCKS,
    SHMC_REGION_INDEX,
    SHMC_REGION_PINS,
    SHMC_REGION_POLICY,
    SHMC_REGION_RINGS,
    SHMC_REGION_TELEMETRY,
    SHMC_REGION_EVENTS,
    SHMC_REGION_ARENA,
    SHMC_REGIONS,
};

enum shmc_policy {
    SHMC_POLICY_LRU = 0,
    SHMC_POLICY_LFU = 1,
    SHMC_POLICY_ADAPTIVE = 2,
    SHMC_POLICIES,
};

enum shmc_flag {
    SHMC_FLAG_VERIFY_FIRST = 1,  /* blocks have checksums; a process verifies at its first lease */
    SHMC_FLAG_VERIFY_ALWAYS = 2, /* ... at every lease */
    SHMC_FLAG_HUGE_THP = 4,      /* attached processes ask for transparent huge pages */
    SHMC_FLAG_HUGETLB = 8,       /* the file has huge pages: sizes are multiples of 2 MiB */
    SHMC_FLAGS = 15,
};

/* What the creator chose; the part of the header that two openers compare. */
struct shmc_geometry {
    uint64_t limits[SHMC_AXES]; /* bytes per axis: device, host, transfer in flight, disk */
    uint64_t arena_bytes;       /* 0: no arena */
    uint64_t blocks_max;        /* 0 exactly when there is no arena */
    uint64_t block_bytes_max;   /* largest block; 0 exactly when there is no arena */
    uint64_t free_low_bytes;    /* below so many free arena bytes, a keeper evicts ... */
    uint64_t free_high_bytes;   /* ... until so many are free; 0: nobody does */
    uint32_t owners_max;        /* 1 .. SHMC_OWNERS_LIMIT */
    uint32_t managers_max;      /* 1 .. SHMC_MANAGERS_LIMIT */
    uint32_t reservations_max;  /* 1 .. SHMC_RESERVATIONS_LIMIT */
    uint32_t claims_max;        /* 0 .. SHMC_CLAIMS_LIMIT; 0 without an arena */
    uint32_t eviction_policy;   /* enum shmc_policy */
    uint32_t flags;             /* enum shmc_flag */
    uint32_t mode;              /* permission bits of the file: 0600, or 0660 for a group */
    uint32_t reserved;          /* 0 */
};

/* Written once before the segment has a name, then never: no lock, no order needed. */
struct shmc_header {
    uint64_t magic;          /* SHMC_MAGIC */
    uint32_t version;        /* SHMC_VERSION: any change of this file's meaning */
    uint32_t abi_tag;        /* word size, mutex size, byte order and libc, see segment.c */
    uint64_t total_bytes;    /* equals the size of the file */
    uint64_t pool_id;        /* random, the identity of this epoch; equal in every process */
    uint64_t boot_id[2];     /* of the boot that made it */
    uint64_t pid_namespace;  /* inode; thread ids in the lock mean something only inside it */
    uint64_t time_namespace; /* inode; start ticks are shifted between time namespaces */
    uint64_t created_ns;     /* CLOCK_REALTIME at create; shown to people, decides nothing */
    uint32_t owner_uid;      /* effective uid of the creator */
    uint32_t manager_buckets; /* power of two, at least managers_max */
    uint64_t slab_bytes;     /* 0 without an arena */
    uint32_t slabs_max;      /* all of slab_bytes but perhaps the last */
    uint32_t index_buckets;  /* SHMC_BUCKET_ENTRIES words each, at least 2 words per block */
    uint32_t claim_buckets;  /* power of two, at least claims_max; 0 without claims */
    uint32_t ring_entries;   /* power of two; 0 without an arena */
    uint32_t ghosts_max;     /* keys of evicted blocks that the policy remembers */
    uint32_t reserved;       /* 0 */
    struct shmc_geometry geometry;
    uint64_t region_offset[SHMC_REGIONS]; /* bytes from the start of the segment */
    uint64_t region_bytes[SHMC_REGIONS];
    uint64_t inode;    /* of the file it was made in: a copy of that is no pool */
    uint64_t checksum; /* FNV-1a of every byte before it */
};

enum shmc_pool_state {
    SHMC_POOL_ACTIVE = 0,
    SHMC_POOL_RETIRED = 1,  /* another epoch took the name, or the pool was destroyed */
    SHMC_POOL_POISONED = 2, /* a validation failed; nothing in here can be trusted */
};

/* The lock and the words that are used without it. The mutex never moves and its bytes are never
 * reused: the kernel may write to it when a thread dies just after unlocking (glibc bug 14485). */
struct shmc_gate {
    pthread_mutex_t mutex; /* [pthread calls in lock.c only] robust, process-shared, normal */
    uint8_t mutex_reserved[64 - sizeof(pthread_mutex_t)];
    /* [anyone, atomic; ACTIVE -> POISONED -> RETIRED, a step may be skipped, never back]
     * enum shmc_pool_state */
    uint64_t state;
    uint64_t reserved_state[7];
    uint32_t release_counter; /* [anyone, atomic add] futex; moves after capacity was released */
    uint32_t reserved_counter[15];
    /* [bit k: owner k sets and clears, or its cleaner clears; atomic] owner k waits for capacity.
     * On death: costs wakes until reclaim. */
    uint64_t waiters[SHMC_WAITER_WORDS];
};

/* What one word is to become. */
struct shmc_redo_word {
    uint64_t offset; /* bytes from the start of the segment; 8-aligned, in a journaled region */
    uint64_t value;  /* after the change */
};

/* One change in the making. While commit is 0 the words are scratch; when it is not, they are the
 * after-images of one whole change and whoever holds the lock must store them again, then clear. */
struct shmc_redo {
    uint64_t commit;    /* [holder] 0, or count (low 8 bits) and checksum (high 56) of the words */
    uint64_t operation; /* [holder] enum shmc_operation, for people */
    uint64_t reserved[6];
    struct shmc_redo_word words[SHMC_REDO_WORDS_MAX]; /* [holder] commit counts them */
};

/* Totals and list heads, all written by a redo record. */
struct shmc_control {
    /* G1: sum of managers' published and live reservations, and blocks */
    uint64_t current[SHMC_AXES];
    uint64_t peak[SHMC_AXES];    /* largest admitted level; never above the limit */
    uint64_t owners;             /* slots that are not FREE */
    uint64_t managers;           /* LIVE manager entries */
    uint64_t reservations;       /* LIVE reservation entries */
    uint64_t manager_free;       /* first FREE manager entry below the mark, or SHMC_NO_INDEX */
    uint64_t manager_mark;       /* entries at and above it were never used */
    uint64_t reservation_free;   /* as for managers */
    uint64_t reservation_mark;
    uint64_t manager_id_next; /* where the search for an unused manager id starts */
    /* claims of owner slots so far; tells a watcher that owners changed */
    uint64_t attach_seq;
    /* [holder, plain word outside the record] replayed records, for people */
    uint64_t recoveries;
    uint64_t claims;             /* LIVE claim entries */
    uint64_t claim_free;         /* as for managers */
    uint64_t claim_mark;
    /* [holder, plain word before the exchange; redo record] index plus one of the block whose state
     * is being tried for eviction, else 0. On death: the next holder makes it PUBLISHED again. */
    uint64_t evicting;
    uint64_t slab_free;   /* first FREE slab below the mark, plus one; 0: none */
    uint64_t slab_mark;   /* slabs at and above it were never used */
    uint64_t slabs_used;  /* slabs that are not FREE */
    uint64_t draining;    /* the slab that is being emptied, plus one; 0: none */
    uint64_t block_free;  /* first block without a place, plus one; 0: none */
    uint64_t block_mark;  /* blocks at and above it were never used */
    uint64_t used_blocks; /* blocks that are not FREE ... */
    uint64_t used_bytes;  /* ... and the sum of their classes: part of current[SHMC_HOST] */
    uint64_t stored;       /* blocks published since the pool was made; the next five as well */
    uint64_t evicted;      /* blocks that made room */
    uint64_t invalidated;  /* blocks withdrawn */
    uint64_t duplicates;   /* blocks that were published already when their maker came */
    uint64_t unindexed;    /* blocks that found both their buckets full */
    uint64_t slabs_moved;  /* slabs emptied for another class */
    /* [holder, plain word outside the record] counts hits and stores: the policy's clock */
    uint64_t clock;
    uint64_t reserved[75];
    /* bit k: the slot of owner k is not FREE, so that its row of pins counts */
    uint64_t active[SHMC_WAITER_WORDS];
};

enum shmc_owner_state {
    SHMC_OWNER_FREE = 0,
    SHMC_OWNER_ACTIVE = 1,
    SHMC_OWNER_CLEANING = 2, /* being emptied, by itself at detach or by anyone after its death */
};

/* One attached process. Payload is written by the claimer under the lock, before the commit that
 * makes the slot ACTIVE, and is fixed until the slot is FREE again. */
struct shmc_owner {
    uint64_t state;       /* [redo record] enum shmc_owner_state */
    uint64_t held;        /* [redo record] LIVE entries that name this slot; 0 when FREE */
    uint64_t nonce;       /* [payload] random, never 0; (slot, nonce) names an owner for ever */
    uint64_t pid;         /* [payload] in the header's pid namespace */
    uint64_t start_ticks; /* [payload] /proc/<pid>/stat field 22; 0 when unreadable */
    /* [payload] unique per process and boot since Linux 6.9; 0 when unknown */
    uint64_t pidfs_inode;
    uint64_t attach_seq;  /* [payload] order of attachment */
    /* [payload] 1: it holds an OFD lock on byte (nonce / 4) of the segment file */
    uint64_t exec_locked;
    /* [redo record] of path; 0 when FREE. Not 0: files may be there, and what is charged for them
     * is not given back before they are gone. */
    uint64_t path_bytes;
    /* [its owner, one atomic store as it leaves] its nonce: "I am gone", said without the lock, so
     * that a handle that could not clean up does not hold for as long as its process lives. */
    uint64_t departed;
    uint64_t counted[4]; /* [payload] the first counters of its telemetry row when it joined */
    uint64_t reserved[2];
    /* [redo record] where its live files are: absolute paths, each ended by a zero byte */
    char path[SHMC_OWNER_PATH_BYTES];
};

enum shmc_entry_state {
    SHMC_ENTRY_FREE = 0,
    SHMC_ENTRY_LIVE = 1,
};

/* The parts of an entry's state word. */
#define SHMC_ENTRY_STATE(word) ((word) & 0xffu)
#define SHMC_ENTRY_OWNER(word) ((word) >> 8)
#define SHMC_ENTRY_LIVE_OF(slot) (((uint64_t)(slot) << 8) | SHMC_ENTRY_LIVE)

/* What one manager last published, or one admitted usage: both tables have the same entries. */
struct shmc_entry {
    /* [redo record] enum shmc_entry_state in the low 8 bits, its owner's slot above; 0 when FREE */
    uint64_t state;
    /* [redo record] FREE: next free entry; LIVE manager: next of its bucket */
    uint64_t next;
    /* LIVE manager: [redo record]; otherwise [payload], fixed while LIVE */
    uint64_t usage[SHMC_AXES];
    /* [payload] grows with each use of the entry; part of a token's name */
    uint64_t generation;
    /* [payload] a manager's id, unique among LIVE ones; 0 in a reservation */
    uint64_t id;
};

/* Lists of blocks of one class. A block that is PUBLISHED is in one of the first SHMC_QUEUES - 1, a
 * DOOMED one in the last; the others are in none. */
enum shmc_queue {
    /* [policy] candidates for eviction; what each means is the policy's */
    SHMC_QUEUE_0 = 0,
    SHMC_QUEUE_INNER = 4, /* adaptive: with children, so no candidates */
    SHMC_QUEUE_PARKED = 6, /* were found pinned: not looked at again for a while */
    SHMC_QUEUE_PROTECTED = 7,
    SHMC_QUEUE_DOOMED = 8,
    SHMC_QUEUES = 9,
};
#define SHMC_POLICY_QUEUES 6u

/* Two indices plus one in a word: one store changes both. 0 in a half: nobody. */
#define SHMC_LOW(word)         ((uint32_t)(word))
#define SHMC_HIGH(word)        ((uint32_t)((word) >> 32))
#define SHMC_PAIR(high, low)   ((uint64_t)(high) << 32 | (uint32_t)(low))

/* One size of blocks. */
struct shmc_class {
    uint64_t block_bytes; /* [redo record] 0: this entry is not in use */
    uint64_t slabs;       /* [redo record] that are ASSIGNED to it or DRAINING */
    uint64_t used;        /* [redo record] its blocks that are not FREE */
    uint64_t published;   /* [redo record] its blocks that are PUBLISHED */
    uint64_t partial;     /* [redo record] first slab with a free place, plus one; 0: none */
    uint64_t ends[SHMC_QUEUES];   /* [redo record] newest (high), oldest (low) */
    uint64_t counts[SHMC_QUEUES]; /* [redo record] */
    uint64_t reserved[9];
};

enum shmc_slab_state {
    SHMC_SLAB_FREE = 0,
    SHMC_SLAB_ASSIGNED = 1,
    SHMC_SLAB_DRAINING = 2, /* takes no new blocks; anyone may go on emptying it */
};
#define SHMC_SLAB_STATE(word) ((word) & 0xffu)
#define SHMC_SLAB_CLASS(word) ((word) >> 8)
#define SHMC_SLAB_OF(state, class_index) ((uint64_t)(class_index) << 8 | (state))

/* A piece of the arena that holds blocks of one class. */
struct shmc_slab {
    uint64_t state; /* [redo record] enum shmc_slab_state, its class above */
    uint64_t used;  /* [redo record] its blocks that are not FREE */
    uint64_t mark;  /* [redo record] places that ever had a block since it was assigned */
    uint64_t free;  /* [redo record] its FREE blocks: first (high), last (low) */
    uint64_t chain; /* [redo record] first of all its blocks, plus one */
    /* [redo record] in the list of its class: next (high), previous (low); FREE: next (high) */
    uint64_t links;
    uint64_t reserved[2];
};

enum shmc_block_state {
    SHMC_BLOCK_FREE = 0,
    SHMC_BLOCK_WRITING = 1,   /* its owner fills it */
    SHMC_BLOCK_SEALED = 2,    /* immutable, of its owner's session */
    SHMC_BLOCK_PUBLISHED = 3, /* immutable, findable, nobody's */
    SHMC_BLOCK_EVICTING = 4,  /* nobody may begin to use it; lasts while the lock is held */
    SHMC_BLOCK_DOOMED = 5,    /* withdrawn while leased: unfindable, freed when no pin is left */
};
#define SHMC_BLOCK_STATE(word) ((word) & 0xffu)
#define SHMC_BLOCK_OWNER(word) ((word) >> 8)
#define SHMC_BLOCK_OF(state, slot) ((uint64_t)(slot) << 8 | (state))

/* The policy's word: queue in the low 8 bits, a count of uses in 16, the clock at the last use. */
#define SHMC_POLICY_QUEUE(word) ((word) & 0xffu)
#define SHMC_POLICY_USES(word) ((word) >> 8 & 0xffffu)
#define SHMC_POLICY_CLOCK(word) ((word) >> 24)
#define SHMC_POLICY_OF(queue, uses, clock) \
    ((uint64_t)(clock) << 24 | (uint64_t)(uses) << 8 | (queue))

/* In a block's flags. */
#define SHMC_BLOCK_PROTECTED 1u /* never evicted */
#define SHMC_BLOCK_HAD_CHILD 2u /* was the parent of a block */
#define SHMC_BLOCK_NEW       4u /* not used since it was stored */

/* What is known of one block. A FREE block is on the list of blocks without a place, or bound to a
 * place of a slab and on the list of that. The first line is what a reader needs. */
struct shmc_block {
    /* [redo record; PUBLISHED to EVICTING and back by a seq_cst exchange under the lock] enum
     * shmc_block_state; of WRITING and SEALED the owner's slot above */
    uint64_t state;
    uint64_t generation; /* [payload] grows with each allocation; (block, generation) is a name */
    uint64_t key[4];     /* [its owner's publish, before the commit] valid when PUBLISHED */
    uint64_t place;      /* [payload while it has no place] bytes from the start of the arena */
    uint64_t bytes;      /* [payload] as asked for; at most its class */
    /* [its owner's publish, before the commit] block plus one (low 24 bits), its generation above;
     * 0: none */
    uint64_t parent;
    uint64_t children;   /* [redo record] PUBLISHED blocks whose parent this is */
    /* [redo record] PUBLISHED, DOOMED: newer (high), older (low) in its queue; FREE: next (low) */
    uint64_t links;
    uint64_t policy;     /* [redo record] see SHMC_POLICY_OF */
    uint64_t checksum;   /* [its owner's publish, before the commit] of the bytes; 0: not taken */
    uint64_t manager;    /* [payload] the manager it is attributed to, plus one; 0: none */
    uint64_t flags;      /* [redo record] */
    uint64_t sibling;    /* [payload while it has no place] next of its slab's chain, plus one */
};

/* The blocks that one owner has read since the ring was last drained. ring_entries words follow:
 * each a block (low 24 bits), its generation above. */
struct shmc_ring {
    uint64_t head; /* [its owner, release store] entries ever written */
    uint64_t reserved_head[7];
    uint64_t tail; /* [holder of the lock, release store] entries ever drained */
    uint64_t reserved_tail[7];
};

/* The engine's counters of a telemetry row, in order. */
enum shmc_counter {
    SHMC_COUNTER_HITS,        /* blocks leased by lookup and match */
    SHMC_COUNTER_MISSES,      /* keys asked for and not found */
    SHMC_COUNTER_RING_LOST,   /* hits that the policy never saw */
    SHMC_COUNTER_BAD_CHECKSUMS, /* blocks whose bytes were not what was published */
    SHMC_COUNTERS,
};

#define SHMC_SESSION_COUNTERS_MAX 32u /* those of sessions, numbered by telemetry/shared.py */
#define SHMC_GAUGES_MAX           24u

/* What a slot of the owner table tells, whoever was in it: the sum over all is the pool's. */
struct shmc_telemetry_row {
    uint64_t counters[8]; /* [its owner] enum shmc_counter; only grow, survive the slot's reuse */
    uint64_t sessions[SHMC_SESSION_COUNTERS_MAX]; /* [its owner, atomic add] as counters */
    /* [its owner, atomic add; zeroed by who cleans the slot] what its sessions have now */
    uint64_t gauges[SHMC_GAUGES_MAX];
};

/* Something that people may want to know happened; may be overwritten or torn. */
struct shmc_event {
    uint64_t sequence;
    uint64_t words[7];
};

_Static_assert(SHMC_COUNTERS == 4, "shmc_owner.counted has room for each");

#define SHMC_SIZE_IS(type, bytes) \
    _Static_assert(sizeof(struct type) == (bytes), #type " must be " #bytes " bytes")
#define SHMC_OFFSET_IS(type, field, bytes) \
    _Static_assert(offsetof(struct type, field) == (bytes), #type "." #field " must be at " #bytes)

SHMC_SIZE_IS(shmc_geometry, 104);
SHMC_SIZE_IS(shmc_header, 552);
SHMC_OFFSET_IS(shmc_header, geometry, 112);
SHMC_OFFSET_IS(shmc_header, region_offset, 216);
SHMC_OFFSET_IS(shmc_header, checksum, 544);
SHMC_SIZE_IS(shmc_gate, 320);
SHMC_OFFSET_IS(shmc_gate, mutex, 0);
SHMC_OFFSET_IS(shmc_gate, state, 64);
SHMC_OFFSET_IS(shmc_gate, release_counter, 128);
SHMC_OFFSET_IS(shmc_gate, waiters, 192);
SHMC_SIZE_IS(shmc_redo, 1024);
SHMC_OFFSET_IS(shmc_redo, words, 64);
SHMC_SIZE_IS(shmc_control, 1024);
SHMC_SIZE_IS(shmc_owner, 512);
SHMC_OFFSET_IS(shmc_owner, path_bytes, 64);
SHMC_OFFSET_IS(shmc_owner, path, 128);
SHMC_SIZE_IS(shmc_entry, 64);
SHMC_SIZE_IS(shmc_class, 256);
SHMC_SIZE_IS(shmc_slab, 64);
SHMC_SIZE_IS(shmc_block, 128);
SHMC_OFFSET_IS(shmc_block, parent, 64);
SHMC_SIZE_IS(shmc_ring, 128);
SHMC_SIZE_IS(shmc_telemetry_row, 512);
SHMC_OFFSET_IS(shmc_telemetry_row, gauges, 320);
_Static_assert((SHMC_COUNTERS) <= 8u, "the engine's counters have eight words");
SHMC_SIZE_IS(shmc_event, 64);
_Static_assert(sizeof(pthread_mutex_t) <= 64, "the mutex must fit its cache line");
_Static_assert(SHMC_REDO_WORDS_MAX < 256, "the count lives in eight bits of the commit word");

#endif
