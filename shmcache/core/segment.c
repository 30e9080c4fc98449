/* segment.c: format a segment, and map it after checking it.
 *
 * Why         The bytes of a segment are input: another program, another release or a bad disk
 *             may have written them. And a forked child is a stranger that happens to share our
 *             memory.
 * Contract    shmc_format() on a file without a name; shmc_open() on any file; shmc_close()
 *             once. A header is copied, checksummed, and must describe exactly the layout that
 *             its own geometry implies: after that no offset in it needs to be checked again.
 * Death       Nothing shared is changed by open or close; the slot of a joined handle is
 *             owners.c's.
 * Errors      REFUSED with the failed check and both values; SYSTEM with errno.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "atomics.h"

#define ALIGN_UP(value, alignment) (((value) + (alignment) - 1) / (alignment) * (alignment))
#define REGION_ALIGN               64u
#define MODE_OTHERS                0007u
#define MODE_GROUP                 0060u

/* ---- layout: a pure function of the geometry ----------------------------------------------- */

static uint64_t power_of_two_at_least(uint64_t value)
{
    uint64_t power = 1;
    while (power < value)
        power *= 2;
    return power;
}

static bool arena_in_bounds(const struct shmc_geometry *g)
{
    if (g->arena_bytes == 0)
        return g->blocks_max == 0 && g->block_bytes_max == 0 && g->claims_max == 0 &&
               g->free_low_bytes == 0 && g->free_high_bytes == 0;
    return g->arena_bytes >= REGION_ALIGN && g->arena_bytes <= SHMC_ARENA_BYTES_LIMIT &&
           g->arena_bytes % REGION_ALIGN == 0 && g->blocks_max >= 1 &&
           g->blocks_max <= SHMC_BLOCKS_LIMIT && g->block_bytes_max >= 1 &&
           g->block_bytes_max <= SHMC_BLOCK_BYTES_LIMIT && g->block_bytes_max <= g->arena_bytes &&
           g->claims_max <= SHMC_CLAIMS_LIMIT && g->free_low_bytes <= g->free_high_bytes &&
           g->free_high_bytes < g->arena_bytes;
}

static bool geometry_in_bounds(const struct shmc_geometry *g)
{
    return g->limits[SHMC_DEVICE] != 0 && g->limits[SHMC_TRANSFER] != 0 && g->owners_max >= 1 &&
           g->owners_max <= SHMC_OWNERS_LIMIT && g->managers_max >= 1 &&
           g->managers_max <= SHMC_MANAGERS_LIMIT && g->reservations_max >= 1 &&
           g->reservations_max <= SHMC_RESERVATIONS_LIMIT && arena_in_bounds(g) &&
           g->eviction_policy < SHMC_POLICIES && (g->flags & ~(uint32_t)SHMC_FLAGS) == 0 &&
           g->reserved == 0 && (g->mode & ~0660u) == 0 && (g->mode & 0600u) == 0600u;
}

/* A slab holds at least one block of the largest class, and all of a small arena. */
static uint64_t slab_bytes(const struct shmc_geometry *g)
{
    uint64_t bytes = ALIGN_UP(g->block_bytes_max, SHMC_PAGE_BYTES);
    if (bytes < SHMC_ARENA_ALIGN_BYTES)
        bytes = SHMC_ARENA_ALIGN_BYTES;
    return bytes < g->arena_bytes ? bytes : g->arena_bytes;
}

static uint64_t ring_entries(uint64_t blocks)
{
    uint64_t entries = power_of_two_at_least(blocks / 16);
    if (entries < SHMC_RING_ENTRIES_MIN)
        return SHMC_RING_ENTRIES_MIN;
    return entries < SHMC_RING_ENTRIES_MAX ? entries : SHMC_RING_ENTRIES_MAX;
}

/* The arena's part of the header; all zero without one. */
static void fill_arena_counts(struct shmc_header *header)
{
    const struct shmc_geometry *g = &header->geometry;
    bool arena = g->arena_bytes != 0;
    header->slab_bytes = arena ? slab_bytes(g) : 0;
    header->slabs_max =
        arena ? (uint32_t)((g->arena_bytes + header->slab_bytes - 1) / header->slab_bytes) : 0;
    header->index_buckets = arena ? (uint32_t)((g->blocks_max + 3) / 4) : 0;
    header->claim_buckets = g->claims_max != 0 ? (uint32_t)power_of_two_at_least(g->claims_max) : 0;
    header->ring_entries = arena ? (uint32_t)ring_entries(g->blocks_max) : 0;
    header->ghosts_max =
        arena && g->eviction_policy == SHMC_POLICY_ADAPTIVE ? (uint32_t)g->blocks_max : 0;
}

static uint64_t page_bytes(const struct shmc_geometry *g)
{
    return (g->flags & SHMC_FLAG_HUGETLB) != 0 ? SHMC_ARENA_ALIGN_BYTES : SHMC_PAGE_BYTES;
}

static void fill_layout(struct shmc_header *header)
{
    const struct shmc_geometry *g = &header->geometry;
    bool arena = g->arena_bytes != 0;
    header->reserved = 0;
    header->manager_buckets = (uint32_t)power_of_two_at_least(g->managers_max);
    fill_arena_counts(header);
    const uint64_t bytes[SHMC_REGIONS] = {
        [SHMC_REGION_HEADER] = SHMC_PAGE_BYTES,
        [SHMC_REGION_GATE] = SHMC_PAGE_BYTES,
        [SHMC_REGION_REDO] = sizeof(struct shmc_redo),
        [SHMC_REGION_CONTROL] = sizeof(struct shmc_control),
        [SHMC_REGION_OWNERS] = g->owners_max * sizeof(struct shmc_owner),
        [SHMC_REGION_MANAGERS] = g->managers_max * sizeof(struct shmc_entry),
        [SHMC_REGION_MANAGER_INDEX] = header->manager_buckets * sizeof(uint64_t),
        [SHMC_REGION_RESERVATIONS] = g->reservations_max * sizeof(struct shmc_entry),
        [SHMC_REGION_CLAIMS] = g->claims_max * sizeof(struct shmc_entry),
        [SHMC_REGION_CLAIM_INDEX] = header->claim_buckets * sizeof(uint64_t),
        [SHMC_REGION_CLASSES] = arena ? SHMC_CLASSES_MAX * sizeof(struct shmc_class) : 0,
        [SHMC_REGION_SLABS] = header->slabs_max * sizeof(struct shmc_slab),
        [SHMC_REGION_BLOCKS] = g->blocks_max * sizeof(struct shmc_block),
        [SHMC_REGION_INDEX] =
            header->index_buckets * (uint64_t)SHMC_BUCKET_ENTRIES * sizeof(uint64_t),
        [SHMC_REGION_PINS] = shmc_pin_row_bytes(g->blocks_max) * g->owners_max,
        [SHMC_REGION_POLICY] =
            arena ? SHMC_LEARNED_WORDS * sizeof(uint64_t) + header->ghosts_max * sizeof(uint32_t)
                  : 0,
        [SHMC_REGION_RINGS] = arena ? shmc_ring_bytes(header) * g->owners_max : 0,
        [SHMC_REGION_TELEMETRY] = g->owners_max * sizeof(struct shmc_telemetry_row),
        [SHMC_REGION_EVENTS] = SHMC_EVENTS_MAX * sizeof(struct shmc_event),
        [SHMC_REGION_ARENA] = g->arena_bytes,
    };
    uint64_t offset = 0;
    for (uint32_t region = 0; region < SHMC_REGIONS; region++) {
        uint64_t alignment = REGION_ALIGN;
        if (region == SHMC_REGION_ARENA)
            alignment = arena ? SHMC_ARENA_ALIGN_BYTES : SHMC_PAGE_BYTES;
        offset = ALIGN_UP(offset, alignment);
        header->region_offset[region] = offset;
        header->region_bytes[region] = bytes[region];
        offset += bytes[region];
    }
    header->total_bytes = ALIGN_UP(offset, page_bytes(g));
}

uint64_t shmc_pin_row_bytes(uint64_t blocks)
{
    return ALIGN_UP((blocks + 7) / 8, REGION_ALIGN);
}

uint64_t shmc_ring_bytes(const struct shmc_header *header)
{
    return sizeof(struct shmc_ring) + header->ring_entries * sizeof(uint64_t);
}

uint64_t shmc_segment_bytes(const struct shmc_geometry *geometry)
{
    struct shmc_header header = {.geometry = *geometry};
    if (!geometry_in_bounds(geometry))
        return 0;
    fill_layout(&header);
    return header.total_bytes;
}

uint64_t shmc_tables_bytes(const struct shmc_geometry *geometry)
{
    struct shmc_header header = {.geometry = *geometry};
    if (!geometry_in_bounds(geometry))
        return 0;
    fill_layout(&header);
    return header.region_offset[SHMC_REGION_ARENA];
}

/* FNV-1a over every byte before the checksum. */
static uint64_t header_checksum(const struct shmc_header *header)
{
    const uint8_t *bytes = (const uint8_t *)header;
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < offsetof(struct shmc_header, checksum); i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return hash;
}

/* Everything two processes must agree on to share a mutex and 64-bit words. */
static uint32_t abi_tag(void)
{
#if defined(__GLIBC__)
    uint32_t libc = 1;
#else
    uint32_t libc = 2;
#endif
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint32_t order = 1;
#else
    uint32_t order = 2;
#endif
    return libc << 24 | order << 16 | (uint32_t)sizeof(pthread_mutex_t) << 8 |
           (uint32_t)sizeof(void *);
}

/* ---- format -----------------------------------------------------------------------------------
 */

static enum shmc_status refuse(struct shmc_refusal *refusal, enum shmc_check_name check,
                               uint64_t expected, uint64_t actual)
{
    *refusal = (struct shmc_refusal){.check = check, .expected = expected, .actual = actual};
    return SHMC_REFUSED;
}

/* Fresh tmpfs and memfd pages are zero, which is the empty state of every table; only list heads,
 * buckets and the mutex need words. */
static bool fill_tables(uint8_t *base, const struct shmc_header *header)
{
    struct shmc_gate *gate = (struct shmc_gate *)(base + header->region_offset[SHMC_REGION_GATE]);
    struct shmc_control *control =
        (struct shmc_control *)(base + header->region_offset[SHMC_REGION_CONTROL]);
    control->manager_free = SHMC_NO_INDEX;
    control->reservation_free = SHMC_NO_INDEX;
    control->manager_id_next = 1;
    control->claim_free = SHMC_NO_INDEX;
    memset(base + header->region_offset[SHMC_REGION_MANAGER_INDEX], 0xff,
           header->region_bytes[SHMC_REGION_MANAGER_INDEX]);
    memset(base + header->region_offset[SHMC_REGION_CLAIM_INDEX], 0xff,
           header->region_bytes[SHMC_REGION_CLAIM_INDEX]);
    return shmc_mutex_init(&gate->mutex);
}

enum shmc_status shmc_format(int fd, const struct shmc_geometry *geometry,
                             struct shmc_refusal *refusal)
{
    struct shmc_host_identity host;
    struct shmc_file_facts facts;
    struct shmc_header header = {
        .magic = SHMC_MAGIC,
        .version = SHMC_VERSION,
        .abi_tag = abi_tag(),
        .pool_id = shmc_os_random(),
        .created_ns = shmc_os_realtime_ns(),
        .geometry = *geometry,
    };
    if (!geometry_in_bounds(geometry))
        return refuse(refusal, SHMC_CHECK_GEOMETRY, 0, 0);
    if (!shmc_robust_mutex_works())
        return errno == 0 ? refuse(refusal, SHMC_CHECK_ROBUST_MUTEX, 1, 0) : SHMC_SYSTEM;
    if (!shmc_os_host_identity(&host) || !shmc_os_file_facts(fd, &facts))
        return SHMC_SYSTEM;
    header.inode = facts.inode;
    memcpy(header.boot_id, host.boot_id, sizeof header.boot_id);
    header.pid_namespace = host.pid_namespace;
    header.time_namespace = host.time_namespace;
    header.owner_uid = host.uid;
    fill_layout(&header);
    header.checksum = header_checksum(&header);
    uint64_t tables = ALIGN_UP(header.region_offset[SHMC_REGION_ARENA], page_bytes(geometry));
    uint8_t *base = shmc_os_map(fd, tables);
    if (base == NULL)
        return SHMC_SYSTEM;
    bool ok = fill_tables(base, &header);
    if (ok)
        memcpy(base, &header, sizeof header);
    shmc_os_unmap(base, tables);
    return ok ? SHMC_OK : SHMC_SYSTEM;
}

/* ---- open ---------------------------------------------------------------------------------------
 */

/* The file itself: kind, owner, permissions, size against what its header claims. */
static enum shmc_status check_file(const struct shmc_file_facts *facts,
                                   const struct shmc_header *header,
                                   const struct shmc_host_identity *host,
                                   struct shmc_refusal *refusal)
{
    uint32_t mode = header->geometry.mode;
    bool group = (mode & MODE_GROUP) != 0;
    if (facts->uid != header->owner_uid)
        return refuse(refusal, SHMC_CHECK_OWNER_UID, header->owner_uid, facts->uid);
    if (facts->uid != host->uid && !group)
        return refuse(refusal, SHMC_CHECK_OWNER_UID, host->uid, facts->uid);
    if ((facts->mode & MODE_OTHERS) != 0 || facts->mode != mode)
        return refuse(refusal, SHMC_CHECK_MODE, mode, facts->mode);
    if (facts->size_bytes != header->total_bytes)
        return refuse(refusal, SHMC_CHECK_SIZE, header->total_bytes, facts->size_bytes);
    return SHMC_OK;
}

static enum shmc_status check_format(const struct shmc_header *header, struct shmc_refusal *refusal)
{
    if (header->magic != SHMC_MAGIC)
        return refuse(refusal, SHMC_CHECK_MAGIC, SHMC_MAGIC, header->magic);
    if (header->version != SHMC_VERSION)
        return refuse(refusal, SHMC_CHECK_VERSION, SHMC_VERSION, header->version);
    if (header->abi_tag != abi_tag())
        return refuse(refusal, SHMC_CHECK_ABI, abi_tag(), header->abi_tag);
    uint64_t checksum = header_checksum(header);
    if (header->checksum != checksum)
        return refuse(refusal, SHMC_CHECK_CHECKSUM, checksum, header->checksum);
    struct shmc_header implied = *header;
    if (!geometry_in_bounds(&header->geometry))
        return refuse(refusal, SHMC_CHECK_GEOMETRY, 0, 0);
    fill_layout(&implied);
    if (memcmp(&implied, header, sizeof implied) != 0)
        return refuse(refusal, SHMC_CHECK_GEOMETRY, implied.total_bytes, header->total_bytes);
    return SHMC_OK;
}

static enum shmc_status check_host(const struct shmc_header *header,
                                   const struct shmc_host_identity *host,
                                   struct shmc_refusal *refusal)
{
    if (memcmp(header->boot_id, host->boot_id, sizeof host->boot_id) != 0)
        return refuse(refusal, SHMC_CHECK_BOOT_ID, header->boot_id[0], host->boot_id[0]);
    if (header->pid_namespace != host->pid_namespace)
        return refuse(refusal, SHMC_CHECK_PID_NAMESPACE, header->pid_namespace,
                      host->pid_namespace);
    if (header->time_namespace != host->time_namespace)
        return refuse(refusal, SHMC_CHECK_TIME_NAMESPACE, header->time_namespace,
                      host->time_namespace);
    if (!shmc_robust_mutex_works())
        return errno == 0 ? refuse(refusal, SHMC_CHECK_ROBUST_MUTEX, 1, 0) : SHMC_SYSTEM;
    return SHMC_OK;
}

/* Reads the header once into private memory and judges that copy. */
static enum shmc_status read_header(int fd, struct shmc_handle *handle,
                                    struct shmc_refusal *refusal)
{
    struct shmc_file_facts facts;
    struct shmc_host_identity host;
    if (!shmc_os_file_facts(fd, &facts))
        return SHMC_SYSTEM;
    if (!facts.regular)
        return refuse(refusal, SHMC_CHECK_FILE_TYPE, 0, 1);
    if (facts.size_bytes < SHMC_PAGE_BYTES)
        return refuse(refusal, SHMC_CHECK_SIZE, SHMC_PAGE_BYTES, facts.size_bytes);
    if (!shmc_os_read_at(fd, &handle->header, sizeof handle->header, 0) ||
        !shmc_os_host_identity(&host))
        return SHMC_SYSTEM;
    handle->device = facts.device;
    handle->inode = facts.inode;
    enum shmc_status status = check_format(&handle->header, refusal);
    if (status == SHMC_OK)
        status = check_file(&facts, &handle->header, &host, refusal);
    if (status == SHMC_OK)
        status = check_host(&handle->header, &host, refusal);
#ifndef SHMC_COPIES /* the crash harness works on copies of one segment */
    /* The owners in a copy are those of the original, and do not map it: a sweep would take them
     * for dead, and delete their files. */
    if (status == SHMC_OK && facts.inode != handle->header.inode)
        status = refuse(refusal, SHMC_CHECK_INODE, handle->header.inode, facts.inode);
#endif
    return status;
}

static void point_at_regions(struct shmc_handle *handle)
{
    handle->gate = shmc_region(handle, SHMC_REGION_GATE);
    handle->redo = shmc_region(handle, SHMC_REGION_REDO);
    handle->control = shmc_region(handle, SHMC_REGION_CONTROL);
    handle->owners = shmc_region(handle, SHMC_REGION_OWNERS);
    handle->manager_index = shmc_region(handle, SHMC_REGION_MANAGER_INDEX);
    handle->managers = (struct shmc_table){
        .entries = shmc_region(handle, SHMC_REGION_MANAGERS),
        .max = handle->header.geometry.managers_max,
        .free = &handle->control->manager_free,
        .mark = &handle->control->manager_mark,
        .live = &handle->control->managers,
        .full = SHMC_MANAGERS_FULL,
    };
    handle->reservations = (struct shmc_table){
        .entries = shmc_region(handle, SHMC_REGION_RESERVATIONS),
        .max = handle->header.geometry.reservations_max,
        .free = &handle->control->reservation_free,
        .mark = &handle->control->reservation_mark,
        .live = &handle->control->reservations,
        .full = SHMC_RESERVATIONS_FULL,
    };
    handle->claims = (struct shmc_table){
        .entries = shmc_region(handle, SHMC_REGION_CLAIMS),
        .max = handle->header.geometry.claims_max,
        .free = &handle->control->claim_free,
        .mark = &handle->control->claim_mark,
        .live = &handle->control->claims,
        .full = SHMC_CLAIMS_FULL,
    };
    handle->claim_index = shmc_region(handle, SHMC_REGION_CLAIM_INDEX);
    handle->classes = shmc_region(handle, SHMC_REGION_CLASSES);
    handle->slabs = shmc_region(handle, SHMC_REGION_SLABS);
    handle->blocks = shmc_region(handle, SHMC_REGION_BLOCKS);
    handle->index = shmc_region(handle, SHMC_REGION_INDEX);
    handle->learned = shmc_region(handle, SHMC_REGION_POLICY);
    handle->ghosts = (uint32_t *)(handle->learned + SHMC_LEARNED_WORDS);
}

/* What an owner shows of itself: a nonce, its identity, and a lock that execve drops. */
static void prepare_owner(struct shmc_handle *handle)
{
    struct shmc_process_stat stat;
    while (handle->nonce == 0)
        handle->nonce = shmc_os_random();
    handle->pid = (uint64_t)shmc_os_pid();
    if (shmc_os_process_stat((pid_t)handle->pid, &stat))
        handle->start_ticks = stat.start_ticks;
    int pidfd = shmc_os_pidfd_open((pid_t)handle->pid);
    if (pidfd >= 0) {
        handle->pidfs_inode = shmc_os_pidfs_inode(pidfd);
        shmc_os_close(pidfd);
    }
    handle->lock_fd = shmc_os_reopen(handle->segment_fd);
    handle->exec_locked =
        handle->lock_fd >= 0 && shmc_os_lock_byte(handle->lock_fd, handle->nonce >> 2);
}

/* ---- public -----------------------------------------------------------------------------------
 */

static void free_handle(struct shmc_handle *handle)
{
    free(handle->pidfds);
    free(handle->scratch);
    free(handle->counts);
    free(handle->verified);
    free(handle);
}

/* Two views of the arena: one to fill own blocks, one to read leased ones, through which nobody can
 * scribble. */
static enum shmc_status map_arena(struct shmc_handle *handle)
{
    const struct shmc_geometry *geometry = &handle->header.geometry;
    uint64_t offset = handle->header.region_offset[SHMC_REGION_ARENA];
    handle->arena_bytes = geometry->arena_bytes;
    if (!handle->as_owner || handle->arena_bytes == 0)
        return SHMC_OK;
    handle->counts = calloc(geometry->blocks_max, sizeof *handle->counts);
    if ((geometry->flags & SHMC_FLAG_VERIFY_FIRST) != 0)
        handle->verified = calloc(geometry->blocks_max, sizeof *handle->verified);
    handle->arena_mapped = ALIGN_UP(handle->arena_bytes, page_bytes(geometry));
    handle->write_base = shmc_os_map_at(handle->segment_fd, offset, handle->arena_mapped, true);
    handle->read_base = shmc_os_map_at(handle->segment_fd, offset, handle->arena_mapped, false);
    if ((geometry->flags & SHMC_FLAG_HUGE_THP) != 0 && handle->write_base != NULL &&
        handle->read_base != NULL) {
        shmc_os_want_huge_pages(handle->write_base, handle->arena_mapped);
        shmc_os_want_huge_pages(handle->read_base, handle->arena_mapped);
    }
    bool verified = (geometry->flags & SHMC_FLAG_VERIFY_FIRST) == 0 || handle->verified != NULL;
    return handle->counts != NULL && verified && handle->write_base != NULL &&
                   handle->read_base != NULL
               ? SHMC_OK
               : SHMC_SYSTEM;
}

static void unmap(struct shmc_handle *handle)
{
    if (handle->base != NULL)
        shmc_os_unmap(handle->base, handle->mapped_bytes);
    shmc_views_drop(handle);
}

static enum shmc_status map_tables(struct shmc_handle *handle)
{
    uint32_t owners = handle->header.geometry.owners_max;
    handle->pidfds = calloc(owners, sizeof *handle->pidfds);
    /* Pages that no check ever touches cost nothing. */
    handle->scratch = calloc(owners + handle->header.geometry.blocks_max, sizeof *handle->scratch);
    if (handle->pidfds == NULL || handle->scratch == NULL)
        return SHMC_SYSTEM;
    handle->mapped_bytes = ALIGN_UP(handle->header.region_offset[SHMC_REGION_ARENA],
                                    page_bytes(&handle->header.geometry));
    handle->base = shmc_os_map(handle->segment_fd, handle->mapped_bytes);
    if (handle->base == NULL)
        return SHMC_SYSTEM;
    point_at_regions(handle);
    return map_arena(handle);
}

enum shmc_status shmc_open(int fd, bool as_owner, struct shmc_handle **result,
                           struct shmc_refusal *refusal)
{
    struct shmc_handle *handle = calloc(1, sizeof *handle);
    if (handle == NULL)
        return SHMC_SYSTEM;
    handle->segment_fd = fd;
    handle->lock_fd = -1;
    handle->slot = SHMC_NO_SLOT;
    handle->as_owner = as_owner;
    handle->guard = shmc_process_guard();
    enum shmc_status status = read_header(fd, handle, refusal);
    if (status == SHMC_OK)
        status = map_tables(handle);
    if (status != SHMC_OK) {
        int error = errno;
        unmap(handle);
        free_handle(handle);
        errno = error;
        return status;
    }
    if (as_owner)
        prepare_owner(handle);
    shmc_process_register(handle);
    *result = handle;
    return SHMC_OK;
}

/* Says without the lock that nobody will come back for the slot: what is left of it may be swept at
 * once. Another owner's slot is not harmed by our nonce. */
static void depart(struct shmc_handle *handle)
{
    if (handle->slot == SHMC_NO_SLOT)
        return;
    struct shmc_owner *owner = &handle->owners[handle->slot];
    if (shmc_load_acquire(&owner->nonce) == handle->nonce)
        shmc_store_release(&owner->departed, handle->nonce);
}

void shmc_close(struct shmc_handle *handle)
{
    if (shmc_is_mine(handle))
        depart(handle);
    /* In a forked child both find nothing to do, unless a raw fork skipped its handler. */
    shmc_process_unregister(handle);
    shmc_process_close_descriptors(handle);
    if (shmc_is_mine(handle))
        unmap(handle);
    else if (handle->reserved)
        shmc_views_drop(handle);
    free_handle(handle);
}

const struct shmc_header *shmc_header(const struct shmc_handle *handle)
{
    return &handle->header;
}

void *shmc_region(const struct shmc_handle *handle, enum shmc_region region)
{
    return handle->base + handle->header.region_offset[region];
}

uint32_t shmc_slot(const struct shmc_handle *handle)
{
    return handle->slot;
}

uint64_t shmc_nonce(const struct shmc_handle *handle)
{
    return handle->nonce;
}

enum shmc_pool_state shmc_pool_state(const struct shmc_handle *handle)
{
    uint64_t state = shmc_load_acquire(&handle->gate->state);
    return state <= SHMC_POOL_POISONED ? (enum shmc_pool_state)state : SHMC_POOL_POISONED;
}

void shmc_poison(struct shmc_handle *handle)
{
    shmc_replace_seq_cst(&handle->gate->state, SHMC_POOL_ACTIVE, SHMC_POOL_POISONED);
}

void shmc_mark_retired(struct shmc_handle *handle)
{
    shmc_store_release(&handle->gate->state, SHMC_POOL_RETIRED);
}

uint64_t shmc_attach_seq(const struct shmc_handle *handle)
{
    return shmc_load_acquire(&handle->control->attach_seq);
}
