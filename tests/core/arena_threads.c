/* arena_threads.c: readers, publishers and evictors at once, on one handle and on handles of their
 * own, as threads.c is for accounts; meant for -fsanitize=thread.
 *
 * The arena is so small that most stores evict. Every leased block must say its key from its first
 * word to its last, and when all have let go, no count, bit or charge is left.
 */
#include "harness.h"

#define THREADS     4
#define KEYS        24
#define HOLDS       3
#define BLOCK_BYTES 4096
#define BLOCKS      16
#define REQUESTS    2000

struct worker {
    struct shmc_handle *pool;
    uint64_t number;
};

struct hold {
    struct shmc_lease lease;
    uint64_t key;
};

static void expect_key(struct shmc_handle *pool, const struct hold *hold)
{
    uint64_t words[BLOCK_BYTES / sizeof(uint64_t)];
    memcpy(words, shmc_read_address(pool, &hold->lease), sizeof words);
    for (uint64_t i = 0; i < BLOCK_BYTES / sizeof(uint64_t); i++)
        EXPECT_EQ(hold->key, words[i]);
}

/* A lease on the key's block: found, or made. False when the arena is full of leases. */
static bool obtain(struct shmc_handle *pool, struct hold *hold)
{
    if (lookup(pool, hold->key, &hold->lease))
        return true;
    enum shmc_status status = allocate(pool, BLOCK_BYTES);
    if (status == SHMC_ARENA_FULL || status == SHMC_BUDGET_EXCEEDED)
        return false;
    MUST(status);
    uint64_t *words = (uint64_t *)shmc_write_address(pool, &last.lease);
    for (uint64_t i = 0; i < BLOCK_BYTES / sizeof(uint64_t); i++)
        words[i] = hold->key;
    MUST(publish_block(pool, last.lease, hold->key));
    hold->lease = last.lease;
    return true;
}

static void disturb(struct shmc_handle *pool)
{
    static const uint64_t none[SHMC_KEY_WORDS];
    struct shmc_holding rows[THREADS];
    uint64_t leased[SHMC_CLASSES_MAX];
    struct shmc_block_stat stat;
    uint64_t key[SHMC_KEY_WORDS] = {1 + random_below(KEYS)};
    switch (random_below(6)) {
    case 0:
        invalidate(pool, key[0]);
        break;
    case 1:
        evict(pool, BLOCK_BYTES);
        break;
    case 2:
        protect(pool, key[0], random_below(4) == 0);
        break;
    case 3:
        EXPECT(!shmc_stat(pool, none, &stat));
        if (shmc_stat(pool, key, &stat))
            EXPECT_EQ(BLOCK_BYTES, stat.bytes);
        break;
    case 4:
        shmc_census(pool, rows, leased);
        break;
    default:
        EXPECT_CLEAN(pool);
    }
}

static void *work(void *argument)
{
    const struct worker *worker = argument;
    struct hold holds[HOLDS];
    uint32_t count = 0;
    random_start(worker->number + 1);
    for (uint64_t request = 0; request < rounds(REQUESTS); request++) {
        struct hold hold = {.key = 1 + random_below(KEYS)};
        if (count < HOLDS && obtain(worker->pool, &hold))
            holds[count++] = hold;
        if (count != 0)
            expect_key(worker->pool, &holds[random_below(count)]);
        if (count == HOLDS || (count != 0 && random_below(4) == 0)) {
            shmc_release(worker->pool, &holds[--count].lease, 1);
        }
        if (random_below(16) == 0)
            disturb(worker->pool);
    }
    for (; count != 0; count--)
        shmc_release(worker->pool, &holds[count - 1].lease, 1);
    return NULL;
}

/* Nothing is left but what can be evicted. */
static void expect_let_go(struct shmc_handle *pool)
{
    for (uint64_t block = 0; block < BLOCKS; block++)
        EXPECT_EQ(0, pool->counts[block]);
    EXPECT_EQ(0, pool->row[0]);
    for (uint64_t key = 1; key <= KEYS; key++)
        protect(pool, key, false);
    evict(pool, BLOCKS * BLOCK_BYTES);
    EXPECT_EQ(0, pool->control->used_blocks);
    EXPECT_EQ(0, pool->control->current[SHMC_HOST]);
    EXPECT(pool->control->evicted > 100);
    EXPECT_CLEAN(pool);
}

static void race(enum shmc_policy policy, bool own_handles)
{
    struct shmc_geometry geometry = arena(BLOCKS / 2 * BLOCK_BYTES, BLOCKS, BLOCK_BYTES);
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    geometry.eviction_policy = policy;
    int fd = new_segment(geometry);
    struct shmc_handle *pool = attach(fd);
    for (uint64_t i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){i != 0 && own_handles ? attach(fd) : pool, i};
        EXPECT_EQ(0, pthread_create(&threads[i], NULL, work, &workers[i]));
    }
    for (uint64_t i = 0; i < THREADS; i++)
        EXPECT_EQ(0, pthread_join(threads[i], NULL));
    expect_let_go(pool);
    for (uint64_t i = 1; i < THREADS && own_handles; i++) {
        EXPECT_EQ(0, workers[i].pool->row[0]);
        shmc_close(workers[i].pool);
    }
    shmc_close(pool);
    close(fd);
}

TEST(threads_share_the_blocks_of_one_handle)
{
    for (uint32_t policy = 0; policy < SHMC_POLICIES; policy++)
        race((enum shmc_policy)policy, false);
}

TEST(threads_share_blocks_through_handles_of_their_own)
{
    for (uint32_t policy = 0; policy < SHMC_POLICIES; policy++)
        race((enum shmc_policy)policy, true);
}
