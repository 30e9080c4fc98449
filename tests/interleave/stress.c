/* stress.c: readers against an eviction at full speed, each on a core of its own.
 *
 * Why         A processor delays stores past loads: no order of single accesses shows that, and
 *             nothing but speed does.
 * Contract    One place, two keys. A writer evicts and stores without end; readers lease and look
 *             again and again whether the block is still the one they leased. Ends after SECONDS,
 *             or at the first violation.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"
#include "internal.h"

#define BLOCK_BYTES 64u
#define READERS     2u /* threads of one owner */
#define LOOKS       12u
#define PAUSES      256u /* at most, between two leases: room for the writer */

static struct shmc_handle *reader, *writer;
static uint64_t violations_count, leases_count, stores_count, stopped;

static void die(const char *what)
{
    fprintf(stderr, "broken: %s\n", what);
    exit(3);
}

static struct shmc_handle *join(int fd)
{
    struct shmc_handle *handle;
    struct shmc_refusal refusal;
    struct shmc_request request = {.operation = SHMC_OP_JOIN};
    if (shmc_open(fd, true, &handle, &refusal) != SHMC_OK ||
        shmc_perform(handle, &request, 0) != SHMC_OK)
        die("join");
    return handle;
}

static void *read_on(void *unused)
{
    (void)unused;
    for (uint64_t round = 0; shmc_load_relaxed(&stopped) == 0; round++) {
        const uint64_t key[SHMC_KEY_WORDS] = {1 + round % 2};
        struct shmc_lease lease;
        uint64_t found;
        if (shmc_match(reader, key, 1, &lease, &found) != SHMC_OK)
            die("match");
        if (found == 0)
            continue;
        const struct shmc_block *block = &reader->blocks[lease.block];
        for (uint32_t look = 0; look < LOOKS; look++)
            if (shmc_load_acquire(&block->generation) != lease.generation ||
                block->key[0] != key[0])
                shmc_store_release(&violations_count, 1);
        __atomic_fetch_add(&leases_count, 1, __ATOMIC_RELAXED);
        shmc_release(reader, &lease, 1);
        for (uint64_t pause = round * 7 % PAUSES; pause > 0; pause--)
            shmc_cpu_relax();
    }
    return NULL;
}

static void store(uint64_t key)
{
    struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = BLOCK_BYTES};
    enum shmc_status status;
    do
        status = shmc_perform(writer, &request, 0);
    while (status == SHMC_MORE);
    if (status != SHMC_OK)
        return; /* it is leased */
    request.operation = SHMC_OP_PUBLISH;
    request.key[0] = key;
    if (shmc_perform(writer, &request, 0) != SHMC_OK)
        die("publish");
    shmc_release(writer, &request.lease, 1);
    stores_count++;
}

int main(int count, char **arguments)
{
    const struct shmc_geometry geometry = {.limits = {1, 1u << 20, 1, 1},
                                           .arena_bytes = BLOCK_BYTES,
                                           .blocks_max = 1,
                                           .block_bytes_max = BLOCK_BYTES,
                                           .owners_max = 2,
                                           .managers_max = 1,
                                           .reservations_max = 1,
                                           .mode = 0600};
    struct shmc_refusal refusal;
    pthread_t threads[READERS];
    int fd = memfd_create("interleave", MFD_CLOEXEC);
    if (count != 2 || fd < 0 || fchmod(fd, 0600) != 0 ||
        ftruncate(fd, (off_t)shmc_segment_bytes(&geometry)) != 0 ||
        shmc_format(fd, &geometry, &refusal) != SHMC_OK)
        die("usage: stress SECONDS");
    reader = join(fd);
    writer = join(fd);
    uint64_t until = shmc_os_monotonic_ns() + strtoull(arguments[1], NULL, 10) * 1000000000ull;
    for (uint32_t i = 0; i < READERS; i++)
        if (pthread_create(&threads[i], NULL, read_on, NULL) != 0)
            die("thread");
    for (uint64_t key = 0; shmc_load_relaxed(&violations_count) == 0; key++) {
        store(1 + key % 3 % 2);
        if (key % 64 == 0 && shmc_os_monotonic_ns() > until)
            break;
    }
    shmc_store_release(&stopped, 1);
    for (uint32_t i = 0; i < READERS; i++)
        pthread_join(threads[i], NULL);
    struct shmc_problem problem;
    struct shmc_request check = {
        .operation = SHMC_OP_CHECK, .problems = &problem, .problems_max = 1};
    bool sound = shmc_perform(writer, &check, 0) == SHMC_OK && check.problems_count == 0;
    printf("scene=stress leases=%llu stores=%llu violations=%llu\n",
           (unsigned long long)leases_count, (unsigned long long)stores_count,
           (unsigned long long)(violations_count + !sound));
    return violations_count == 0 && sound ? 0 : 1;
}
