/* arena_damage.c: whatever words a stranger leaves in the arena's tables, every request answers.
 *
 * As damage.c, for blocks and leases: what a request hands out lies in the arena, a request ends
 * after a number of chunks, and nothing beside the tables is written.
 */
#include "harness.h"

#define OWNERS     2
#define BLOCKS     40
#define SLABS      3
#define MIB        (1ull << 20)
#define ARENA      (SLABS * 2 * MIB - 4096) /* the last slab is short */
#define KEYS       24
#define LEASES     64
#define CHUNKS_MAX 10000 /* that one request may take */

struct hold {
    struct shmc_lease leases[LEASES];
    uint32_t count;
};

struct stage {
    struct shmc_handle *owners[OWNERS];
    uint8_t *tables; /* a copy of everything from control to the arena */
    uint32_t *counts[OWNERS];
};

/* ---- the stage ------------------------------------------------------------------------------- */

static uint8_t *tables_of(const struct shmc_handle *handle, uint64_t *bytes)
{
    uint64_t first = handle->header.region_offset[SHMC_REGION_CONTROL];
    *bytes = handle->header.region_offset[SHMC_REGION_ARENA] - first;
    return handle->base + first;
}

static const uint64_t sizes[] = {64, 100, 4096, 65536, 300000, MIB, 2 * MIB};

static uint64_t any_size(void)
{
    return sizes[random_below(sizeof sizes / sizeof *sizes)];
}

/* Blocks of three sizes in every state, leased and not, protected, with children, and a claim. */
static void fill(struct shmc_handle *pool, uint64_t first)
{
    for (uint64_t key = first; key < first + KEYS / 2; key++) {
        struct shmc_lease lease = store(pool, key, key % 3 == 0 ? 64 : key % 3 == 1 ? 4096 : 65536);
        if (key % 4 != 0)
            shmc_release(pool, &lease, 1);
    }
    MUST(protect(pool, first + 1, true));
    MUST(invalidate(pool, first + 4));
    MUST(allocate(pool, 4096));
    MUST(allocate(pool, 64));
    MUST(seal_block(pool, last.lease));
}

static struct stage new_stage(enum shmc_policy policy)
{
    struct stage stage;
    struct shmc_geometry geometry = arena(ARENA, BLOCKS, 2 * MIB);
    uint64_t bytes;
    geometry.eviction_policy = policy;
    int fd = new_segment(geometry);
    for (int owner = 0; owner < OWNERS; owner++) {
        stage.owners[owner] = attach(fd);
        fill(stage.owners[owner], (uint64_t)owner * KEYS / 2);
    }
    const uint8_t *tables = tables_of(stage.owners[0], &bytes);
    EXPECT((stage.tables = malloc(bytes)) != NULL);
    memcpy(stage.tables, tables, bytes);
    for (int owner = 0; owner < OWNERS; owner++) {
        EXPECT((stage.counts[owner] = malloc(BLOCKS * sizeof(uint32_t))) != NULL);
        memcpy(stage.counts[owner], stage.owners[owner]->counts, BLOCKS * sizeof(uint32_t));
    }
    return stage;
}

static void heal(const struct stage *stage)
{
    uint64_t bytes;
    uint8_t *tables = tables_of(stage->owners[0], &bytes);
    memcpy(tables, stage->tables, bytes);
    for (int owner = 0; owner < OWNERS; owner++)
        memcpy(stage->owners[owner]->counts, stage->counts[owner], BLOCKS * sizeof(uint32_t));
    stage->owners[0]->redo->commit = 0;
    stage->owners[0]->gate->state = SHMC_POOL_ACTIVE;
}

static void leave_stage(struct stage *stage)
{
    free(stage->tables);
    for (int owner = 0; owner < OWNERS; owner++) {
        free(stage->counts[owner]);
        shmc_close(stage->owners[owner]);
    }
}

/* ---- damage ---------------------------------------------------------------------------------- */

static uint64_t any_index(void)
{
    return random_below(BLOCKS + 3);
}

static uint64_t any_word(uint64_t word)
{
    switch (random_below(12)) {
    case 0:
        return random_u64();
    case 1:
        return word ^ (1ull << random_below(64));
    case 2:
        return word + 1;
    case 3:
        return word - 1;
    case 4:
        return UINT64_MAX;
    case 5:
    case 6:
        return 0;
    case 7:
        return SHMC_BLOCK_OF(random_below(7), random_below(OWNERS + 1));
    case 8:
        return SHMC_PAIR(any_index(), 0);
    case 9:
        return SHMC_PAIR(any_index(), any_index());
    case 10:
        return word ^ 1ull << random_below(24);
    default:
        return any_index();
    }
}

/* Where the words that steer are: the first of each table, of each entry that is in use. */
static uint64_t *any_place(const struct shmc_handle *pool)
{
    uint64_t *rings = (uint64_t *)shmc_ring_of(pool, (uint32_t)random_below(OWNERS));
    switch (random_below(10)) {
    case 0:
        return (uint64_t *)pool->control + random_below(48);
    case 1:
        return &pool->control->active[random_below(2)];
    case 2:
    case 3:
        return (uint64_t *)&pool->classes[random_below(4)] + random_below(23);
    case 4:
    case 5:
        return (uint64_t *)&pool->slabs[random_below(SLABS)] + random_below(6);
    case 6:
        return pool->index + random_below(pool->header.index_buckets * SHMC_BUCKET_ENTRIES);
    case 7:
        return shmc_pin_row(pool, (uint32_t)random_below(OWNERS)) + random_below(1);
    case 8:
        return random_below(2) == 0 ? rings + random_below(32) : pool->learned + random_below(440);
    default:
        return (uint64_t *)&pool->blocks[random_below(BLOCKS)] + random_below(16);
    }
}

/* ---- requests -------------------------------------------------------------------------------- */

static void touch(const struct shmc_handle *pool, const struct shmc_lease *lease, bool write)
{
    uint64_t bytes = pool->arena_bytes;
    EXPECT(lease->bytes <= bytes && lease->place <= bytes - lease->bytes);
    if (write)
        memset(shmc_write_address(pool, lease), 1, lease->bytes);
    for (uint64_t at = 0; at < lease->bytes; at += 4096)
        EXPECT_EQ(lease->place + at, shmc_read_address(pool, lease) + at - pool->read_base);
}

/* As the binding does: the same request again while it says MORE, for a bounded number of times. */
static enum shmc_status finish(struct shmc_handle *pool, struct shmc_request *request)
{
    enum shmc_status status = SHMC_MORE;
    uint64_t goal = request->bytes;
    for (int chunks = 0; status == SHMC_MORE; chunks++) {
        EXPECT(chunks < CHUNKS_MAX);
        status = shmc_perform(pool, request, 1000000);
        if (request->operation == SHMC_OP_EVICT) {
            goal -= request->released < goal ? request->released : goal;
            request->bytes = goal;
        }
    }
    return status;
}

static struct shmc_lease any_lease(const struct shmc_handle *pool, const struct hold *hold)
{
    if (hold->count != 0 && random_below(3) != 0)
        return hold->leases[random_below(hold->count)];
    uint64_t block = random_below(BLOCKS);
    return (struct shmc_lease){.block = block, .generation = pool->blocks[block].generation};
}

static enum shmc_status allocate_and_fill(struct shmc_handle *pool, struct hold *hold)
{
    struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = any_size()};
    enum shmc_status status = finish(pool, &request);
    if (status != SHMC_OK)
        return status;
    touch(pool, &request.lease, true);
    if (hold->count < LEASES)
        hold->leases[hold->count++] = request.lease;
    return status;
}

static enum shmc_status publish_any(struct shmc_handle *pool, struct hold *hold)
{
    struct shmc_request request = {
        .operation = SHMC_OP_PUBLISH,
        .lease = any_lease(pool, hold),
        .key = {random_below(2 * KEYS)},
        .protect = random_below(8) == 0,
        .parent_kind = (enum shmc_parent_kind)random_below(3),
        .parent = any_lease(pool, hold),
        .parent_key = {random_below(KEYS)},
    };
    enum shmc_status status = finish(pool, &request);
    if (status == SHMC_OK)
        touch(pool, &request.lease, false);
    return status;
}

static enum shmc_status match_any(struct shmc_handle *pool)
{
    uint64_t keys[3][SHMC_KEY_WORDS] = {{random_below(KEYS)}, {random_below(KEYS)}, {1}};
    struct shmc_lease leases[3];
    struct shmc_block_stat stat;
    uint64_t found;
    shmc_stat(pool, keys[0], &stat);
    enum shmc_status status = shmc_match(pool, keys[0], 3, leases, &found);
    for (uint64_t i = 0; i < found; i++)
        touch(pool, &leases[i], false);
    shmc_release(pool, leases, found);
    return status;
}

static enum shmc_status reclaim_any(const struct stage *stage, struct shmc_handle *pool)
{
    const struct shmc_handle *dead = stage->owners[random_below(OWNERS)];
    struct shmc_request request = {.operation = SHMC_OP_RECLAIM_BEGIN,
                                   .owner_slot = shmc_slot(dead),
                                   .owner_nonce = shmc_nonce(dead)};
    enum shmc_status status = finish(pool, &request);
    request.operation = SHMC_OP_RECLAIM_STEP;
    return status == SHMC_OK ? finish(pool, &request) : status;
}

static enum shmc_status any_request(const struct stage *stage, struct hold *holds)
{
    static struct shmc_holding rows[OWNERS + 2];
    static uint64_t leased[SHMC_CLASSES_MAX];
    uint64_t owner = random_below(OWNERS);
    struct shmc_handle *pool = stage->owners[owner];
    struct shmc_request request = {.key = {random_below(KEYS)}, .protect = random_below(2) == 0};
    switch (random_below(16)) {
    case 0:
    case 1:
    case 2:
    case 3:
        return allocate_and_fill(pool, &holds[owner]);
    case 4:
    case 5:
    case 6:
        return publish_any(pool, &holds[owner]);
    case 7:
    case 8:
        return match_any(pool);
    case 9:
        request.operation = SHMC_OP_INVALIDATE;
        break;
    case 10:
        request.operation = SHMC_OP_PROTECT;
        break;
    case 11:
    case 12:
        request.operation = SHMC_OP_EVICT;
        request.bytes = any_size();
        break;
    case 13:
        request.operation = random_below(2) == 0 ? SHMC_OP_DISCARD : SHMC_OP_SEAL;
        request.lease = any_lease(pool, &holds[owner]);
        break;
    case 14:
        request.operation = SHMC_OP_CLAIM;
        break;
    default:
        shmc_census(pool, rows, leased);
        return random_below(4) == 0 ? reclaim_any(stage, pool) : SHMC_OK;
    }
    return finish(pool, &request);
}

/* Performs requests until the pool is poisoned or has stood thirty of them. */
static void shake(const struct stage *stage)
{
    struct hold holds[OWNERS] = {0};
    struct shmc_problem problems[4];
    for (int i = 0; i < 30; i++) {
        enum shmc_status status = any_request(stage, holds);
        EXPECT(status < SHMC_STATUS_COUNT && status != SHMC_CORRUPT);
        if (status == SHMC_POISONED)
            break;
    }
    MUST(check(stage->owners[0], problems, 4));
    EXPECT(last.problems_count == 0 || shmc_pool_state(stage->owners[0]) != SHMC_POOL_ACTIVE);
}

/* Beyond the tables that requests change lie the header and the events. */
static bool same_neighbours(const struct stage *stage)
{
    const struct shmc_handle *pool = stage->owners[0];
    uint64_t first = pool->header.region_offset[SHMC_REGION_CONTROL];
    uint64_t events = pool->header.region_offset[SHMC_REGION_EVENTS];
    return memcmp(pool->base, &pool->header, sizeof pool->header) == 0 &&
           memcmp(pool->base + events, stage->tables + (events - first),
                  pool->header.region_bytes[SHMC_REGION_EVENTS]) == 0;
}

static void damage_and_shake(enum shmc_policy policy, uint64_t times, uint64_t changes_max)
{
    struct stage stage = new_stage(policy);
    for (uint64_t round = 0; round < times; round++) {
        for (uint64_t changes = 1 + random_below(changes_max); changes > 0; changes--) {
            uint64_t *word = any_place(stage.owners[0]);
            *word = any_word(*word);
        }
        shake(&stage);
        EXPECT(same_neighbours(&stage));
        heal(&stage);
    }
    leave_stage(&stage);
}

TEST(any_damaged_word_of_the_arena_gets_an_answer)
{
    for (uint32_t policy = 0; policy < SHMC_POLICIES; policy++)
        damage_and_shake((enum shmc_policy)policy, rounds(500), 1);
}

TEST(any_damaged_words_of_the_arena_get_an_answer)
{
    for (uint32_t policy = 0; policy < SHMC_POLICIES; policy++)
        damage_and_shake((enum shmc_policy)policy, rounds(500), 4);
}
