# The engine's interface as Cython sees it: core/shmc.h, which is where everything is explained.

cdef extern from "shmc.h" nogil:
    enum shmc_status:
        SHMC_OK
        SHMC_BUSY
        SHMC_MORE
        SHMC_LIVE_FILES
        SHMC_FORKED
        SHMC_NOT_JOINED
        SHMC_STALE
        SHMC_LOST_SLOT
        SHMC_RETIRED
        SHMC_POISONED
        SHMC_BUDGET_EXCEEDED
        SHMC_PUBLICATION_OVERFLOW
        SHMC_ADMISSION_OVERFLOW
        SHMC_DUPLICATE_MANAGER
        SHMC_UNKNOWN_MANAGER
        SHMC_MANAGERS_FULL
        SHMC_RESERVATIONS_FULL
        SHMC_OWNERS_FULL
        SHMC_CLAIMS_FULL
        SHMC_CLAIMED
        SHMC_ABSENT
        SHMC_PINNED
        SHMC_ARENA_FULL
        SHMC_CLASSES_FULL
        SHMC_TOO_LARGE
        SHMC_NO_ARENA
        SHMC_OWNERS_CHANGED
        SHMC_CORRUPT
        SHMC_REFUSED
        SHMC_SYSTEM
        SHMC_STATUS_COUNT

    enum shmc_check_name:
        pass

    enum shmc_region:
        SHMC_REGION_REDO
        SHMC_REGION_ARENA

    enum shmc_pool_state:
        SHMC_POOL_ACTIVE
        SHMC_POOL_RETIRED
        SHMC_POOL_POISONED

    enum shmc_owner_state:
        SHMC_OWNER_CLEANING

    enum shmc_verdict:
        SHMC_ALIVE
        SHMC_DEAD
        SHMC_UNKNOWN

    enum shmc_problem_kind:
        SHMC_PROBLEM_KINDS

    enum shmc_operation:
        SHMC_OP_JOIN
        SHMC_OP_REGISTER
        SHMC_OP_UPDATE
        SHMC_OP_RESERVE
        SHMC_OP_RELEASE_MANAGER
        SHMC_OP_RELEASE_RESERVATION
        SHMC_OP_PUBLISH_AND_RELEASE
        SHMC_OP_REPORT
        SHMC_OP_HELD
        SHMC_OP_RECLAIM_BEGIN
        SHMC_OP_RECLAIM_STEP
        SHMC_OP_FILES_GONE
        SHMC_OP_SET_PATHS
        SHMC_OP_CLAIM
        SHMC_OP_RELEASE_CLAIM
        SHMC_OP_ALLOCATE
        SHMC_OP_SEAL
        SHMC_OP_PUBLISH
        SHMC_OP_DISCARD
        SHMC_OP_INVALIDATE
        SHMC_OP_PROTECT
        SHMC_OP_EVICT
        SHMC_OP_ARENA_REPORT
        SHMC_OP_SNAPSHOT
        SHMC_OP_COPY
        SHMC_OP_RETIRE
        SHMC_OP_CHECK

    struct shmc_geometry:
        uint64_t limits[4]
        uint64_t arena_bytes
        uint64_t blocks_max
        uint64_t block_bytes_max
        uint64_t free_low_bytes
        uint64_t free_high_bytes
        uint32_t owners_max
        uint32_t managers_max
        uint32_t reservations_max
        uint32_t claims_max
        uint32_t eviction_policy
        uint32_t flags
        uint32_t mode

    struct shmc_header:
        uint64_t total_bytes
        uint64_t pool_id
        uint64_t created_ns
        uint64_t slab_bytes
        uint32_t slabs_max
        shmc_geometry geometry
        uint64_t region_offset[1]

    struct shmc_refusal:
        shmc_check_name check
        uint64_t expected
        uint64_t actual

    struct shmc_handle:
        pass

    struct shmc_token:
        uint64_t index
        uint64_t generation

    struct shmc_lease:
        uint64_t block
        uint64_t generation
        uint64_t place
        uint64_t bytes

    enum shmc_parent_kind:
        SHMC_PARENT_NONE
        SHMC_PARENT_KEY
        SHMC_PARENT_LEASE

    enum:
        SHMC_CLASSES_MAX
        SHMC_OWNER_PATH_BYTES
        SHMC_SESSION_COUNTERS_MAX
        SHMC_GAUGES_MAX
        SHMC_QUEUE_PARKED
        SHMC_QUEUE_PROTECTED
        SHMC_QUEUE_DOOMED
        SHMC_FLAG_VERIFY_FIRST
        SHMC_FLAG_VERIFY_ALWAYS
        SHMC_FLAG_HUGE_THP
        SHMC_FLAG_HUGETLB
        SHMC_VERSION

    struct shmc_class:
        uint64_t block_bytes
        uint64_t slabs
        uint64_t used
        uint64_t published
        uint64_t counts[9]

    struct shmc_arena_report:
        uint64_t used_blocks
        uint64_t used_bytes
        uint64_t slabs_used
        uint64_t draining
        uint64_t stored
        uint64_t evicted
        uint64_t invalidated
        uint64_t duplicates
        uint64_t unindexed
        uint64_t slabs_moved
        shmc_class classes[64]

    struct shmc_holding:
        uint64_t leased_blocks
        uint64_t leased_bytes
        uint64_t private_blocks
        uint64_t private_bytes

    struct shmc_block_stat:
        uint64_t bytes
        uint64_t capacity
        uint64_t generation
        uint64_t uses
        bint is_protected
        bint leased

    enum shmc_fidelity:
        SHMC_DAMAGED

    enum shmc_counter:
        SHMC_COUNTERS

    struct shmc_report:
        uint64_t managers
        uint64_t reservations
        uint64_t owners
        uint64_t recoveries
        uint64_t current[4]
        uint64_t peak[4]

    struct shmc_held:
        uint64_t managers
        uint64_t reservations
        uint64_t usage[4]

    struct shmc_entry:
        uint64_t state
        uint64_t usage[4]
        uint64_t id

    struct shmc_slab:
        uint64_t state
        uint64_t used

    struct shmc_owner_view:
        uint32_t slot
        shmc_owner_state state
        uint64_t nonce
        uint64_t pid
        uint64_t start_ticks
        uint64_t attach_seq
        uint64_t counted[4]

    struct shmc_snapshot:
        shmc_report report
        shmc_arena_report arena
        shmc_owner_view *owners
        shmc_held *held
        shmc_entry *managers
        shmc_slab *slabs
        uint32_t owners_count
        uint64_t managers_count

    uint64_t SHMC_SLAB_STATE(uint64_t word)
    uint64_t SHMC_SLAB_CLASS(uint64_t word)
    uint64_t SHMC_ENTRY_OWNER(uint64_t word)

    struct shmc_problem:
        shmc_problem_kind kind
        uint64_t index
        uint64_t expected
        uint64_t actual

    struct shmc_request:
        shmc_operation operation
        bint allocate_id
        uint64_t id
        uint64_t usage[4]
        shmc_token token
        uint64_t aggregate[4]
        uint32_t axis
        uint64_t required
        uint64_t budget
        shmc_report report
        shmc_held *held_rows
        uint32_t owner_slot
        uint64_t owner_nonce
        uint64_t cursor
        uint64_t released
        char *paths
        uint64_t paths_bytes
        uint64_t attach_seq
        shmc_problem *problems
        uint32_t problems_max
        uint32_t problems_count
        uint64_t bytes
        uint64_t capacity
        bint has_manager
        bint has_reservation
        bint protect
        bint created
        bint named
        shmc_lease lease
        uint64_t key[4]
        shmc_parent_kind parent_kind
        shmc_lease parent
        uint64_t parent_key[4]
        uint64_t checksum
        shmc_arena_report *arena_report
        shmc_snapshot *snapshot
        unsigned char *copy

    const char *shmc_status_name(shmc_status status)
    bint shmc_status_retry(shmc_status status)
    const char *shmc_check_name_text(shmc_check_name check)
    const char *shmc_problem_text(shmc_problem_kind kind)

    uint64_t shmc_segment_bytes(const shmc_geometry *geometry)
    uint64_t shmc_tables_bytes(const shmc_geometry *geometry)
    shmc_status shmc_format(int fd, const shmc_geometry *geometry, shmc_refusal *refusal)
    shmc_status shmc_open(int fd, bint as_owner, shmc_handle **handle, shmc_refusal *refusal)
    void shmc_close(shmc_handle *handle)
    bint shmc_is_mine(const shmc_handle *handle)
    bint shmc_descriptor_intact(const shmc_handle *handle)
    uint64_t shmc_process_guard()
    bint shmc_nonce_is_local(uint64_t nonce)
    const shmc_header *shmc_header_of "shmc_header"(const shmc_handle *handle)
    uint32_t shmc_slot(const shmc_handle *handle)
    uint64_t shmc_nonce(const shmc_handle *handle)
    shmc_pool_state shmc_pool_state_of "shmc_pool_state"(const shmc_handle *handle)
    void shmc_retire(shmc_handle *handle)
    uint64_t shmc_attach_seq(const shmc_handle *handle)

    shmc_status shmc_perform(shmc_handle *handle, shmc_request *request, uint64_t wait_ns)
    int shmc_lock_holder(const shmc_handle *handle)

    shmc_status shmc_match(
        shmc_handle *handle, const uint64_t *keys, uint64_t keys_count, shmc_lease *leases,
        uint64_t *found)
    bint shmc_contains(shmc_handle *handle, const uint64_t *key, shmc_lease *lease)
    bint shmc_stat(shmc_handle *handle, const uint64_t *key, shmc_block_stat *stat)
    void shmc_release(shmc_handle *handle, const shmc_lease *leases, uint64_t leases_count)
    bint shmc_lease_again(shmc_handle *handle, const shmc_lease *lease)
    bint shmc_keep_views(shmc_handle *next, shmc_handle *previous, bint apart, bint written)
    void shmc_views_reserve(shmc_handle *handle)
    void shmc_forbid_view(shmc_handle *handle, const shmc_lease *lease)
    bint shmc_prefault(const shmc_handle *handle, uint64_t offset, uint64_t bytes)
    const void *shmc_read_address(const shmc_handle *handle, const shmc_lease *lease)
    void *shmc_write_address(const shmc_handle *handle, const shmc_lease *lease)
    uint64_t shmc_read_counter(const shmc_handle *handle, uint32_t slot, shmc_counter counter)
    void shmc_tell(shmc_handle *handle, uint32_t word, uint64_t more)
    uint64_t shmc_told(const shmc_handle *handle, uint32_t word)
    void shmc_census(const shmc_handle *handle, shmc_holding *rows, uint64_t *leased)
    uint64_t shmc_checksum(const void *data, uint64_t bytes)
    shmc_fidelity shmc_verify_lease(shmc_handle *handle, const shmc_lease *lease)

    bint shmc_owner_view_of "shmc_owner_view"(
        const shmc_handle *handle, uint32_t slot, shmc_owner_view *view)
    shmc_verdict shmc_owner_verdict(shmc_handle *handle, const shmc_owner_view *view)
    uint32_t shmc_find_dead(shmc_handle *handle, shmc_owner_view *dead, uint32_t max)
    uint64_t shmc_owner_paths(
        const shmc_handle *handle, uint32_t slot, uint64_t nonce, char *paths)
    int shmc_owner_pidfd(shmc_handle *handle, const shmc_owner_view *view)

    void shmc_waiter_set(shmc_handle *handle, bint waiting)
    uint32_t shmc_release_counter(const shmc_handle *handle)
    void shmc_wait_release(shmc_handle *handle, uint32_t seen, uint64_t wait_ns)
    void shmc_ring()
    uint32_t shmc_rung()
    void shmc_wait_any(
        shmc_handle **handles, const uint32_t *seen, uint32_t count, uint32_t rung,
        uint64_t wait_ns)
