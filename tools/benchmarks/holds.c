/* holds.c: how long the segment's lock is held, at most, by each thing that is done under it.
 *
 * Prints one JSON object of microseconds. Linked with --wrap=shmc_lock and --wrap=shmc_unlock, so
 * that the clock stands around the very lock of the engine and no line of the engine is for it. The
 * clock is that of the thread's own processor time: a hold that the scheduler interrupts is not the
 * engine's. A million blocks, at random, so that little is in a cache.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define BLOCKS      1000000u
#define SMALL       64u
#define LARGE       (2u << 20)
#define OWNERS      64u
#define MANY        100000u
#define RING        4096u
#define ARENA_BYTES (64ull << 20)

static uint64_t began_ns, longest_ns;

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

enum shmc_status __real_shmc_lock(struct shmc_handle *handle, uint64_t wait_ns);
void __real_shmc_unlock(struct shmc_handle *handle);
enum shmc_status __wrap_shmc_lock(struct shmc_handle *handle, uint64_t wait_ns);
void __wrap_shmc_unlock(struct shmc_handle *handle);

enum shmc_status __wrap_shmc_lock(struct shmc_handle *handle, uint64_t wait_ns)
{
    enum shmc_status status = __real_shmc_lock(handle, wait_ns);
    began_ns = cpu_ns();
    return status;
}

void __wrap_shmc_unlock(struct shmc_handle *handle)
{
    uint64_t held_ns = cpu_ns() - began_ns;
    __real_shmc_unlock(handle);
    if (held_ns > longest_ns)
        longest_ns = held_ns;
}

static void told(const char *name)
{
    static const char *before = "{";
    printf("%s\"%s\": %.1f", before, name, (double)longest_ns / 1e3);
    before = ", ";
    longest_ns = 0;
}

static uint64_t random_u64(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void must(enum shmc_status status)
{
    if (status == SHMC_OK)
        return;
    fprintf(stderr, "the engine said %s\n", shmc_status_name(status));
    exit(1);
}

/* ---- what is done -------------------------------------------------------------------------- */

static struct shmc_handle *owners[OWNERS];
static uint64_t keys[BLOCKS][SHMC_KEY_WORDS];

static enum shmc_status perform(struct shmc_handle *handle, struct shmc_request *request)
{
    enum shmc_status status;
    do
        status = shmc_perform(handle, request, 0);
    while (status == SHMC_MORE);
    return status;
}

static struct shmc_handle *join(int fd)
{
    struct shmc_handle *handle;
    struct shmc_refusal refusal;
    struct shmc_request request = {.operation = SHMC_OP_JOIN};
    must(shmc_open(fd, true, &handle, &refusal));
    must(perform(handle, &request));
    return handle;
}

static int make_pool(enum shmc_policy policy, uint64_t block_bytes_max)
{
    struct shmc_geometry geometry = {
        .limits = {1, ARENA_BYTES, 1, 1},
        .arena_bytes = ARENA_BYTES,
        .blocks_max = BLOCKS,
        .block_bytes_max = block_bytes_max,
        .owners_max = OWNERS,
        .managers_max = 1,
        .reservations_max = 1,
        .eviction_policy = policy,
        .mode = 0600,
    };
    struct shmc_refusal refusal;
    int fd = memfd_create("shmcache-bench", MFD_CLOEXEC);
    if (fd < 0 || fchmod(fd, 0600) != 0 || ftruncate(fd, (off_t)shmc_segment_bytes(&geometry)) != 0)
        exit(1);
    must(shmc_format(fd, &geometry, &refusal));
    return fd;
}

static enum shmc_status allocate(struct shmc_handle *handle, uint64_t bytes)
{
    struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = bytes};
    return perform(handle, &request);
}

static void evict(struct shmc_handle *handle, uint64_t bytes)
{
    for (uint64_t freed = 0; freed < bytes;) {
        struct shmc_request request = {.operation = SHMC_OP_EVICT, .bytes = bytes - freed};
        enum shmc_status status = shmc_perform(handle, &request, 0);
        must(status == SHMC_MORE ? SHMC_OK : status);
        freed += request.released;
    }
}

static void store(struct shmc_handle *handle, const uint64_t *key)
{
    struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = SMALL};
    must(perform(handle, &request));
    request.operation = SHMC_OP_PUBLISH;
    memcpy(request.key, key, sizeof request.key);
    must(perform(handle, &request));
    shmc_release(handle, &request.lease, 1);
}

static void fill(struct shmc_handle *handle)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        for (uint32_t word = 0; word < SHMC_KEY_WORDS; word++)
            keys[i][word] = random_u64();
        store(handle, keys[i]);
    }
}

/* So many blocks, one by one at random: as many entries in the owner's ring as it has room for. */
static void read_some(struct shmc_handle *handle, uint32_t count)
{
    struct shmc_lease lease;
    uint64_t found;
    for (uint32_t i = 0; i < count; i++) {
        must(shmc_match(handle, keys[random_u64() % BLOCKS], 1, &lease, &found));
        shmc_release(handle, &lease, found);
    }
}

static void reclaim(const struct shmc_handle *dead, struct shmc_handle *cleaner)
{
    struct shmc_request request = {
        .operation = SHMC_OP_RECLAIM_BEGIN, .owner_slot = dead->slot, .owner_nonce = dead->nonce};
    must(perform(cleaner, &request));
    request.operation = SHMC_OP_RECLAIM_STEP;
    must(perform(cleaner, &request));
}

/* ---- scenes -------------------------------------------------------------------------------- */

static void small_blocks(enum shmc_policy policy)
{
    int fd = make_pool(policy, SMALL);
    static struct shmc_lease leases[MANY];
    uint64_t found, key[SHMC_KEY_WORDS] = {7};
    for (uint32_t i = 0; i < OWNERS; i++)
        owners[i] = join(fd);
    struct shmc_handle *one = owners[0], *other = owners[1];
    longest_ns = 0;
    fill(one);
    told("store, one of 10^6");
    read_some(one, RING);
    store(one, key);
    told("publish after 4,096 hits");
    for (uint32_t i = 0; i < OWNERS; i++)
        read_some(owners[i], RING);
    longest_ns = 0;
    for (key[1] = 1; key[1] <= 2 * RING; key[1]++)
        store(one, key);
    told("allocate after 4,096 hits of each of 64 owners");
    evict(one, (uint64_t)MANY * SMALL);
    told("evict 100,000");
    for (uint32_t i = 0; i < MANY; i++)
        must(allocate(other, SMALL));
    told("allocate 100,000");
    reclaim(other, one);
    told("reclaim 100,000 unpublished");
    must(shmc_match(owners[2], keys[BLOCKS / 2], MANY, leases, &found));
    longest_ns = 0;
    reclaim(owners[2], one);
    told("reclaim 100,000 leases");
    must(shmc_match(owners[3], keys[BLOCKS / 2], MANY, leases, &found));
    while (allocate(one, SMALL) == SHMC_OK)
        continue; /* until everything is leased or private */
    told("allocate until nothing can go");
    close(fd);
}

/* Small blocks fill everything, and the first of each slab is leased: the worst for a large one. */
static void class_change(enum shmc_policy policy)
{
    int fd = make_pool(policy, LARGE);
    struct shmc_handle *one = join(fd);
    struct shmc_lease lease;
    uint64_t found;
    fill(one);
    longest_ns = 0;
    must(allocate(one, LARGE));
    told("empty a slab of 32,768 for one of 2 MiB");
    for (uint32_t i = 0; i < BLOCKS; i++) {
        must(shmc_match(one, keys[i], 1, &lease, &found));
        if (found == 1 && lease.place % LARGE != 0)
            shmc_release(one, &lease, 1);
    }
    longest_ns = 0;
    while (allocate(one, LARGE) == SHMC_OK)
        continue;
    told("look for such a slab, the first block of each leased");
    close(fd);
}

int main(int count, char **arguments)
{
    enum shmc_policy policy =
        count > 1 && strcmp(arguments[1], "lru") == 0 ? SHMC_POLICY_LRU : SHMC_POLICY_ADAPTIVE;
    small_blocks(policy);
    class_change(policy);
    printf("}\n");
    return 0;
}
