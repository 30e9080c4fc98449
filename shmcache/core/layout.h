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
 *   slabs          64 x slabs_max                     redo record
 *   blocks         128 x blocks_max                   redo record; payload before commit
 *   index          64 x index_buckets                 redo record
 *   pins           row of blocks_max bits per owner   its owner or a cleaner, no lock
 *   rings          2048 x owners_max                  its owner, no lock
 *   telemetry      512 x owners_max                   its owner, no lock; only grows
 *   events         64 x SHMC_EVENTS_MAX               anyone, no lock; a hint
 *   arena          arena_bytes, 2 MiB aligned         the owner of a WRITING block
 *
 * Slabs, blocks, index, pins, rings and arena have no bytes in a pool without an arena.
 *
 * "Journaled" regions, control up to and without pins, are one contiguous range: a redo record may
 * name only words in it. A word of a FREE entry or slot other than its state, next and held words
 * is payload: it means nothing until the state word says so, so it is written before the commit.
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
#define SHMC_VERSION 1u                  /* rises with any change of this file's meaning */
#define SHMC_PAGE_BYTES 4096u
#define SHMC_AXES 4u                     /* device, host, transfer in flight, disk */
#define SHMC_ARENA_ALIGN_BYTES (2u << 20) /* a huge page */
#define SHMC_NO_INDEX UINT64_MAX /* end of a list: no entry */

/* Every limit of the engine; bounds.py repeats them and a test compares. */
#define SHMC_OWNERS_LIMIT 1024u             /* attached processes */
#define SHMC_MANAGERS_LIMIT 65536u          /* one per live model cache */
#define SHMC_RESERVATIONS_LIMIT (1u << 20)  /* admitted usages that were not given back */
#define SHMC_BLOCKS_LIMIT (1u << 24)
#define SHMC_ARENA_BYTES_LIMIT (1ull << 46) /* 64 TiB */
#define SHMC_REDO_WORDS_MAX 60u             /* words that one change may store */
#define SHMC_OWNER_PATH_BYTES 384u
#define SHMC_WAITER_WORDS (SHMC_OWNERS_LIMIT / 64u) /* one bit per owner */
#define SHMC_EVENTS_MAX 1024u
#define SHMC_RING_ENTRIES 254u              /* with its two indices a ring fills 2048 bytes */

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
    SHMC_REGION_SLABS,
    SHMC_REGION_BLOCKS,
    SHMC_REGION_INDEX,
    SHMC_REGION_PINS,
    SHMC_REGION_RINGS,
    SHMC_REGION_TELEMETRY,
    SHMC_REGION_EVENTS,
    SHMC_REGION_ARENA,
    SHMC_REGIONS,
};

/* What the creator chose; the part of the header that two openers compare. */
struct shmc_geometry {
    uint64_t limits[SHMC_AXES]; /* bytes per axis: device, host, transfer in flight, disk */
    uint64_t arena_bytes;       /* 0: no arena */
    uint64_t blocks_max;        /* 0 exactly when there is no arena */
    uint32_t owners_max;        /* 1 .. SHMC_OWNERS_LIMIT */
    uint32_t managers_max;      /* 1 .. SHMC_MANAGERS_LIMIT */
    uint32_t reservations_max;  /* 1 .. SHMC_RESERVATIONS_LIMIT */
    uint32_t eviction_policy;   /* an enum of the arena; opaque here */
    uint32_t flags;             /* of the arena; opaque here */
    uint32_t mode;              /* permission bits of the file: 0600, or 0660 for a group */
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
    uint32_t slabs_max;      /* arena_bytes / slab_bytes */
    uint32_t index_buckets;  /* power of two; 8 words each, at least 2 words per block */
    struct shmc_geometry geometry;
    uint64_t region_offset[SHMC_REGIONS]; /* bytes from the start of the segment */
    uint64_t region_bytes[SHMC_REGIONS];
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
    uint64_t reserved[110];
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
    uint64_t path_bytes;  /* [its owner, release store, once] length of path; 0: none yet */
    /* [its owner, one atomic store as it leaves] its nonce: "I am gone", said without the lock, so
     * that a handle that could not clean up does not hold for as long as its process lives. */
    uint64_t departed;
    uint64_t reserved[6];
    /* [its owner, before path_bytes] directory of its live files */
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

/* A piece of the arena that holds blocks of one size. This and all structures below are laid out
 * for the arena and for telemetry; nothing writes them yet. */
struct shmc_slab {
    uint64_t state; /* [redo record] */
    uint64_t block_bytes;
    uint64_t used;
    uint64_t free_head;
    uint64_t reserved[4];
};

/* What is known of one block. */
struct shmc_block {
    uint64_t state; /* [redo record, and a seq_cst exchange] */
    uint64_t generation;
    uint64_t key[4];
    uint64_t parent; /* block index and, next to it, the generation it had */
    uint64_t parent_generation;
    uint64_t children;
    uint64_t size_bytes;
    uint64_t slab;
    uint64_t newer; /* recency list */
    uint64_t older;
    uint64_t policy_word;
    uint64_t checksum;
    uint64_t reserved;
};

/* The blocks that one owner has read since the ring was last drained. */
struct shmc_ring {
    uint64_t head; /* [its owner] */
    uint64_t tail; /* [holder of the lock] */
    uint64_t blocks[SHMC_RING_ENTRIES];
};

/* Counters of one slot of the owner table, whoever was in it. */
struct shmc_telemetry_row {
    uint64_t counters[64]; /* [its owner] only grow, survive the reuse of the slot */
};

/* Something that people may want to know happened; may be overwritten or torn. */
struct shmc_event {
    uint64_t sequence;
    uint64_t words[7];
};

#define SHMC_SIZE_IS(type, bytes) \
    _Static_assert(sizeof(struct type) == (bytes), #type " must be " #bytes " bytes")
#define SHMC_OFFSET_IS(type, field, bytes) \
    _Static_assert(offsetof(struct type, field) == (bytes), #type "." #field " must be at " #bytes)

SHMC_SIZE_IS(shmc_geometry, 72);
SHMC_SIZE_IS(shmc_header, 432);
SHMC_OFFSET_IS(shmc_header, geometry, 96);
SHMC_OFFSET_IS(shmc_header, region_offset, 168);
SHMC_OFFSET_IS(shmc_header, checksum, 424);
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
SHMC_SIZE_IS(shmc_slab, 64);
SHMC_SIZE_IS(shmc_block, 128);
SHMC_SIZE_IS(shmc_ring, 2048);
SHMC_SIZE_IS(shmc_telemetry_row, 512);
SHMC_SIZE_IS(shmc_event, 64);
_Static_assert(sizeof(pthread_mutex_t) <= 64, "the mutex must fit its cache line");
_Static_assert(SHMC_REDO_WORDS_MAX < 256, "the count lives in eight bits of the commit word");

#endif
