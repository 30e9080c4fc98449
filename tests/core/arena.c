/* arena.c: random requests on blocks, each compared with a naive model of what may be true.
 *
 * The model is a list of blocks with their contents, states and holders; it knows nothing of slabs,
 * queues, pins or records. Which published block is evicted, and when, is up to the engine: after
 * each request the model learns what has gone, and insists that nobody held or protected it. All
 * else must be equal: contents, counts of leases and their bits, charges, claims.
 */
#include "harness.h"

#define OWNERS       3
#define BLOCKS       48
#define KEYS         30
#define CLAIM_KEYS   12
#define HOLDS        10 /* of one owner */
#define MIB          (1ull << 20)
#define ARENA        (6 * MIB - 8192) /* the last slab is short */
#define REQUESTS     600
#define CHECK_EVERY  8
#define SAMPLE_BYTES 4096

enum state { GONE, PRIVATE, PUBLISHED, DOOMED };

/* One content: from its allocation until its memory may be another's. */
struct content {
    enum state state;
    bool sealed;
    bool is_protected;
    uint64_t key;
    uint64_t mark; /* what its bytes say; unique */
    uint64_t capacity;
    struct shmc_lease lease;
    int leases[OWNERS]; /* PRIVATE: 1 of its owner */
};

struct claim {
    bool used;
    int owner;
    struct shmc_token token;
};

static struct {
    struct shmc_handle *owners[OWNERS];
    struct content contents[BLOCKS];
    struct claim claims[CLAIM_KEYS];
    struct usage limits;
    uint64_t marks;
    uint64_t reserved; /* bytes on the host axis, by one reservation */
    int reserver;
    struct shmc_token reservation;
    bool may_evict; /* the last request */
} world;

/* ---- the model ------------------------------------------------------------------------------ */

static int holders(const struct content *content)
{
    int sum = 0;
    for (int owner = 0; owner < OWNERS; owner++)
        sum += content->leases[owner];
    return sum;
}

static int held_by(int owner)
{
    int sum = 0;
    for (int i = 0; i < BLOCKS; i++)
        sum += world.contents[i].leases[owner];
    return sum;
}

static struct content *find_key(uint64_t key)
{
    for (int i = 0; i < BLOCKS; i++)
        if (world.contents[i].state == PUBLISHED && world.contents[i].key == key)
            return &world.contents[i];
    return NULL;
}

/* One of those that the owner holds, or NULL. */
static struct content *any_held(int owner, bool only_private)
{
    uint64_t first = random_below(BLOCKS);
    for (uint64_t i = 0; i < BLOCKS; i++) {
        struct content *content = &world.contents[(first + i) % BLOCKS];
        if (content->leases[owner] != 0 && (content->state == PRIVATE || !only_private))
            return content;
    }
    return NULL;
}

static uint64_t charged(void)
{
    uint64_t sum = world.reserved;
    for (int i = 0; i < BLOCKS; i++)
        sum += world.contents[i].state != GONE ? world.contents[i].capacity : 0;
    return sum;
}

/* Whether each block could go, so that only its size can forbid an allocation. */
static bool nothing_is_held(void)
{
    for (int i = 0; i < BLOCKS; i++) {
        const struct content *content = &world.contents[i];
        if (content->state == PRIVATE || content->is_protected || holders(content) != 0)
            return false;
    }
    return true;
}

/* ---- contents -------------------------------------------------------------------------------- */

static void write_mark(const struct shmc_handle *pool, const struct content *content)
{
    uint8_t *bytes = shmc_write_address(pool, &content->lease);
    uint64_t last_word = content->lease.bytes - sizeof content->mark;
    for (uint64_t at = 0; at < last_word; at += SAMPLE_BYTES)
        memcpy(bytes + at, &content->mark, sizeof content->mark);
    memcpy(bytes + last_word, &content->mark, sizeof content->mark);
}

static void expect_mark(const struct shmc_handle *pool, const struct content *content)
{
    const uint8_t *bytes = shmc_read_address(pool, &content->lease);
    uint64_t last_word = content->lease.bytes - sizeof content->mark;
    for (uint64_t at = 0; at < last_word; at += SAMPLE_BYTES)
        EXPECT(memcmp(bytes + at, &content->mark, sizeof content->mark) == 0);
    EXPECT(memcmp(bytes + last_word, &content->mark, sizeof content->mark) == 0);
}

static void expect_lease_on(const struct content *content, const struct shmc_lease *lease)
{
    EXPECT_EQ(content->lease.block, lease->block);
    EXPECT_EQ(content->lease.generation, lease->generation);
    EXPECT_EQ(content->lease.place, lease->place);
    EXPECT_EQ(content->lease.bytes, lease->bytes);
}

/* ---- one request, in both worlds ------------------------------------------------------------ */

static uint64_t any_key(void)
{
    return 1 + random_below(KEYS);
}

static void try_allocate(int owner)
{
    static const uint64_t sizes[] = {64, 100, 4096, 4096, 5000, 65536, 65536, 300000, MIB, 2 * MIB};
    struct shmc_handle *pool = world.owners[owner];
    uint64_t bytes = sizes[random_below(sizeof sizes / sizeof *sizes)];
    bool must_fit = nothing_is_held() && bytes + world.reserved <= 2 * MIB;
    world.may_evict = true;
    enum shmc_status status = allocate(pool, bytes);
    if (status == SHMC_ARENA_FULL || status == SHMC_BUDGET_EXCEEDED) {
        EXPECT(!must_fit);
        return;
    }
    MUST(status);
    EXPECT(last.capacity >= bytes && last.capacity <= bytes + 4095);
    EXPECT(last.lease.block < BLOCKS);
    struct content *content = &world.contents[last.lease.block];
    EXPECT(holders(content) == 0 && content->state != PRIVATE && !content->is_protected);
    *content = (struct content){
        .state = PRIVATE, .mark = ++world.marks, .capacity = last.capacity, .lease = last.lease};
    content->leases[owner] = 1;
    write_mark(pool, content);
}

static void try_publish(int owner)
{
    struct content *content = any_held(owner, true);
    uint64_t key = any_key();
    if (content == NULL)
        return;
    struct content *present = find_key(key);
    last = (struct shmc_request){.operation = SHMC_OP_PUBLISH,
                                 .lease = content->lease,
                                 .key = {key},
                                 .protect = random_below(12) == 0,
                                 .parent_kind = (enum shmc_parent_kind)random_below(3),
                                 .parent_key = {any_key()}};
    const struct content *parent = any_held(owner, false);
    last.parent = parent != NULL ? parent->lease : content->lease;
    MUST(shmc_perform(world.owners[owner], &last, 0));
    EXPECT_EQ(present == NULL, last.created);
    if (present != NULL) {
        expect_lease_on(present, &last.lease);
        *content = (struct content){.state = GONE};
        present->leases[owner]++;
        return;
    }
    expect_lease_on(content, &last.lease);
    content->state = PUBLISHED;
    content->key = key;
    content->is_protected = last.protect;
}

static void try_match(int owner)
{
    uint64_t keys[4][SHMC_KEY_WORDS];
    struct shmc_lease leases[4];
    uint64_t expected = 0;
    uint64_t found;
    for (int i = 0; i < 4; i++)
        memcpy(keys[i], (uint64_t[SHMC_KEY_WORDS]){any_key()}, sizeof keys[i]);
    while (expected < 4 && find_key(keys[expected][0]) != NULL)
        expected++;
    MUST(shmc_match(world.owners[owner], keys[0], 4, leases, &found));
    EXPECT_EQ(expected, found);
    for (uint64_t i = 0; i < found; i++) {
        struct content *content = find_key(keys[i][0]);
        expect_lease_on(content, &leases[i]);
        content->leases[owner]++;
    }
}

static void try_release(int owner)
{
    struct content *content = any_held(owner, false);
    struct shmc_handle *pool = world.owners[owner];
    if (content == NULL)
        return;
    if (content->state != PRIVATE) {
        shmc_release(pool, &content->lease, 1);
        content->leases[owner]--;
    } else if (random_below(3) == 0) {
        MUST(seal_block(pool, content->lease));
        content->sealed = true;
    } else {
        MUST(discard(pool, content->lease));
        *content = (struct content){.state = GONE};
    }
}

static void try_invalidate(int owner)
{
    uint64_t key = any_key();
    struct content *content = find_key(key);
    EXPECT_EQ(content != NULL ? SHMC_OK : SHMC_ABSENT, invalidate(world.owners[owner], key));
    if (content == NULL)
        return;
    content->state = holders(content) != 0 ? DOOMED : GONE;
    content->is_protected = false;
}

static void try_protect(int owner)
{
    uint64_t key = any_key();
    bool on = random_below(4) == 0;
    struct content *content = find_key(key);
    EXPECT_EQ(content != NULL ? SHMC_OK : SHMC_ABSENT, protect(world.owners[owner], key, on));
    if (content != NULL)
        content->is_protected = on;
}

static void try_evict(int owner)
{
    world.may_evict = true;
    enum shmc_status status = evict(world.owners[owner], 1 + random_below(MIB));
    EXPECT(status == SHMC_OK || status == SHMC_ARENA_FULL);
}

static void try_reserve(int owner)
{
    if (world.reserved != 0) {
        MUST(release(world.owners[world.reserver], world.reservation));
        world.reserved = 0;
        return;
    }
    uint64_t bytes = 1 + random_below(MIB);
    bool fits = charged() + bytes <= world.limits.axis[SHMC_HOST];
    EXPECT_EQ(fits ? SHMC_OK : SHMC_BUDGET_EXCEEDED, reserve(world.owners[owner], U(0, bytes)));
    if (fits) {
        world.reserved = bytes;
        world.reserver = owner;
        world.reservation = last.token;
    }
}

static void try_claim(int owner)
{
    uint64_t key = random_below(CLAIM_KEYS);
    struct claim *claim = &world.claims[key];
    struct shmc_request request = {.operation = SHMC_OP_CLAIM, .key = {key + 1000}};
    int used = 0;
    for (int i = 0; i < CLAIM_KEYS; i++)
        used += world.claims[i].used;
    enum shmc_status expected = claim->used ? SHMC_CLAIMED : used == 8 ? SHMC_CLAIMS_FULL : SHMC_OK;
    EXPECT_EQ(expected, shmc_perform(world.owners[owner], &request, 0));
    if (expected == SHMC_OK)
        *claim = (struct claim){.used = true, .owner = owner, .token = request.token};
    if (expected == SHMC_CLAIMED)
        EXPECT_EQ(shmc_nonce(world.owners[claim->owner]), request.owner_nonce);
    if (!claim->used || random_below(2) == 0)
        return;
    request = (struct shmc_request){.operation = SHMC_OP_RELEASE_CLAIM, .token = claim->token};
    MUST(shmc_perform(world.owners[claim->owner], &request, 0));
    claim->used = false;
}

/* Another owner cleans up; the slot goes to a new handle. */
static void replace_owner(int owner)
{
    struct shmc_handle *old = world.owners[owner];
    reclaim(world.owners[(owner + 1) % OWNERS], shmc_slot(old), shmc_nonce(old));
    for (int i = 0; i < BLOCKS; i++) {
        struct content *content = &world.contents[i];
        if (content->state == PRIVATE && content->leases[owner] != 0)
            *content = (struct content){.state = GONE};
        content->leases[owner] = 0;
    }
    for (int i = 0; i < CLAIM_KEYS; i++)
        world.claims[i].used = world.claims[i].used && world.claims[i].owner != owner;
    world.owners[owner] = attach(old->segment_fd);
    EXPECT_EQ(shmc_slot(old), shmc_slot(world.owners[owner]));
    shmc_close(old);
    if (world.reserver == owner)
        world.reserved = 0;
}

static void any_request(void)
{
    int owner = (int)random_below(OWNERS);
    uint64_t choice = random_below(64);
    world.may_evict = false;
    if (choice < 18)
        held_by(owner) < HOLDS ? try_allocate(owner) : try_release(owner);
    else if (choice < 32)
        try_publish(owner);
    else if (choice < 40)
        held_by(owner) < HOLDS ? try_match(owner) : try_release(owner);
    else if (choice < 51)
        try_release(owner);
    else if (choice < 54)
        try_invalidate(owner);
    else if (choice < 57)
        try_protect(owner);
    else if (choice < 58)
        try_evict(owner);
    else if (choice < 60)
        try_reserve(owner);
    else if (choice < 63)
        try_claim(owner);
    else
        replace_owner(owner);
}

/* ---- what must be equal ---------------------------------------------------------------------- */

/* Learns what the engine chose to free; nothing that anybody needs may be among it. */
static void learn_what_went(void)
{
    for (int i = 0; i < BLOCKS; i++) {
        struct content *content = &world.contents[i];
        const uint64_t key[SHMC_KEY_WORDS] = {content->key};
        struct shmc_lease lease;
        bool there = true;
        if (content->state == PUBLISHED)
            there = shmc_contains(world.owners[0], key, &lease) &&
                    lease.generation == content->lease.generation;
        else if (content->state == DOOMED)
            there = world.owners[0]->blocks[i].state == SHMC_BLOCK_DOOMED;
        if (there)
            continue;
        EXPECT(world.may_evict && holders(content) == 0 && !content->is_protected);
        *content = (struct content){.state = GONE};
    }
}

/* The counts of leases, and the bits that others see of them. */
static void expect_pins(int owner)
{
    const struct shmc_handle *pool = world.owners[owner];
    for (int i = 0; i < BLOCKS; i++) {
        int leases = world.contents[i].leases[owner];
        EXPECT_EQ(leases, pool->counts[i]);
        EXPECT_EQ(leases != 0, pool->row[i / 64] >> i % 64 & 1);
        if (leases != 0)
            expect_mark(pool, &world.contents[i]);
    }
}

static void expect_equal_worlds(void)
{
    uint64_t found = 0, used = 0;
    learn_what_went();
    for (int owner = 0; owner < OWNERS; owner++)
        expect_pins(owner);
    for (uint64_t key = 1; key <= KEYS; key++) {
        struct shmc_lease lease;
        const uint64_t words[SHMC_KEY_WORDS] = {key};
        found += shmc_contains(world.owners[1], words, &lease);
        used += find_key(key) != NULL;
    }
    EXPECT_EQ(used, found);
    MUST(report(world.owners[0]));
    EXPECT_EQ(charged(), last.report.current[SHMC_HOST]);
    EXPECT(charged() <= world.limits.axis[SHMC_HOST]);
}

static void play(enum shmc_policy policy)
{
    struct shmc_geometry geometry = arena(ARENA, BLOCKS, 2 * MIB);
    memset(&world, 0, sizeof world);
    world.limits = U(1, random_below(2) == 0 ? 4 * MIB : 8 * MIB, 1, 1);
    memcpy(geometry.limits, world.limits.axis, sizeof geometry.limits);
    geometry.eviction_policy = policy;
    int fd = new_segment(geometry);
    for (int owner = 0; owner < OWNERS; owner++)
        world.owners[owner] = attach(fd);
    for (int request = 0; request < REQUESTS; request++) {
        any_request();
        expect_equal_worlds();
        if (request % CHECK_EVERY == 0)
            EXPECT_CLEAN(world.owners[0]);
    }
    EXPECT(world.owners[0]->control->evicted != 0);
    for (int owner = 0; owner < OWNERS; owner++)
        shmc_close(world.owners[owner]);
    close(fd);
}

TEST(random_requests_on_blocks_behave_as_the_model_does)
{
    for (uint64_t round = 0; round < rounds(30); round++)
        for (uint32_t policy = 0; policy < SHMC_POLICIES; policy++)
            play((enum shmc_policy)policy);
}
