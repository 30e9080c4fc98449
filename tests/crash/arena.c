/* arena.c: everything that is done with blocks, killed at every instruction.
 *
 * Why         A block is in several lists, in the index, in an owner's row of pins and in a total.
 *             A death may come between any two of these, and while its state is being tried.
 * Contract    As sweep.c, in a world with an arena of two slabs and a short one: a neighbour and a
 *             friend lease, the victim and an owner that died before write, some blocks are idle.
 *             After each death: the tables are sound, the living hold what they held, the same
 *             content is under the same keys or gone; after the dead are reclaimed nothing of
 *             theirs is left and every place can be taken. The one who recovers and the one who
 *             cleans up are killed as well, after a sample of deaths.
 */
#include "crash.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SMALL_BYTES (512u << 10) /* four to a slab */
#define LARGE_BYTES (2u << 20)   /* a slab */
#define TINY_BYTES  (60u << 10)  /* fits the short slab */
#define ARENA_BYTES ((4u << 20) + (64u << 10))
#define BLOCKS_MAX  12u
#define PLACES      8u /* of small blocks */
#define NONCE_FIRST 0x5000u

enum {
    KEY_NEIGHBOUR = 1, /* leased by the neighbour */
    KEY_PARENT,        /* leased by nobody, like the next */
    KEY_CHILD,         /* leased by the victim */
    KEY_FRIEND,        /* withdrawn, leased by the friend: DOOMED */
    KEY_IDLE,          /* only in a full arena, like the next */
    KEY_IDLE_TOO,
    KEY_NEW,
    KEY_ABSENT,
    KEYS,
};

enum scene {
    ROOMY,  /* two places are free */
    FULL,   /* none is: something has to go */
    BURIED, /* full, and nobody reads the DOOMED block any more */
    SCENES,
};

struct blocks_world {
    struct world world; /* of it: both segments, the actors, and the size of an image */
    uint8_t *image[SCENES];
    struct shmc_lease writing; /* the victim's */
    struct shmc_lease leased;  /* by the victim */
    struct shmc_token reservation;
    struct shmc_token claim;
    uint64_t neighbours_block;
    uint64_t friends_block;
};

struct operation {
    const char *name;
    enum scene scene;
    int kind;
    uint32_t key;
    bool lease_writing, lease_leased, with_reservation, with_claim;
    uint32_t reclaimed; /* of RECLAIM_BEGIN: whom */
    enum shmc_status expected;
    struct shmc_request request;
};

/* clang-format off: a table */
static const struct operation operations[] = {
    {"allocate_free", ROOMY, .request = {.operation = SHMC_OP_ALLOCATE, .bytes = SMALL_BYTES}},
    {"allocate_new_slab", ROOMY, .request = {.operation = SHMC_OP_ALLOCATE, .bytes = TINY_BYTES}},
    {"allocate_reserved", ROOMY, .with_reservation = true,
     .request = {.operation = SHMC_OP_ALLOCATE, .bytes = SMALL_BYTES, .has_reservation = true}},
    {"allocate_evicting", FULL, .request = {.operation = SHMC_OP_ALLOCATE, .bytes = SMALL_BYTES}},
    {"allocate_burying", BURIED, .request = {.operation = SHMC_OP_ALLOCATE, .bytes = SMALL_BYTES}},
    {"allocate_class_change", FULL,
     .request = {.operation = SHMC_OP_ALLOCATE, .bytes = LARGE_BYTES}},
    {"seal", ROOMY, .lease_writing = true, .request = {.operation = SHMC_OP_SEAL}},
    {"publish_new", ROOMY, .key = KEY_NEW, .lease_writing = true,
     .request = {.operation = SHMC_OP_PUBLISH, .parent_kind = SHMC_PARENT_KEY,
                 .parent_key = {KEY_CHILD}}},
    {"publish_present", ROOMY, .key = KEY_NEIGHBOUR, .lease_writing = true,
     .request = {.operation = SHMC_OP_PUBLISH}},
    {"discard", ROOMY, .lease_writing = true, .request = {.operation = SHMC_OP_DISCARD}},
    {"evict", FULL, .request = {.operation = SHMC_OP_EVICT, .bytes = 1}},
    {"invalidate", FULL, .key = KEY_IDLE, .request = {.operation = SHMC_OP_INVALIDATE}},
    {"invalidate_leased", ROOMY, .key = KEY_NEIGHBOUR,
     .request = {.operation = SHMC_OP_INVALIDATE}},
    {"protect", ROOMY, .key = KEY_PARENT,
     .request = {.operation = SHMC_OP_PROTECT, .protect = true}},
    {"drain_ring", ROOMY, .request = {.operation = SHMC_OP_DRAIN}},
    {"claim", ROOMY, .key = KEY_ABSENT, .request = {.operation = SHMC_OP_CLAIM}},
    {"release_claim", ROOMY, .with_claim = true, .request = {.operation = SHMC_OP_RELEASE_CLAIM}},
    {"match", ROOMY, .kind = JOB_MATCH, .key = KEY_PARENT},
    {"match_absent", ROOMY, .kind = JOB_MATCH, .key = KEY_ABSENT},
    {"release", ROOMY, .kind = JOB_RELEASE, .lease_leased = true},
    {"reclaim", FULL, .reclaimed = DEAD, .request = {.operation = SHMC_OP_RECLAIM_BEGIN}},
    {"detach", ROOMY, .reclaimed = VICTIM, .request = {.operation = SHMC_OP_RECLAIM_BEGIN}},
};
/* clang-format on */
#define OPERATIONS (sizeof operations / sizeof *operations)

/* ---- the world --------------------------------------------------------------------------- */

static void open_segment(struct segment *segment, const struct shmc_geometry *geometry)
{
    struct shmc_refusal refusal;
    segment->fd = memfd_create("shmcache.blocks", MFD_CLOEXEC);
    if (segment->fd < 0 || fchmod(segment->fd, 0600) != 0 ||
        ftruncate(segment->fd, (off_t)shmc_segment_bytes(geometry)) != 0)
        broken("no memory file: %s", strerror(errno));
    if (shmc_format(segment->fd, geometry, &refusal) != SHMC_OK ||
        shmc_open(segment->fd, true, &segment->handle, &refusal) != SHMC_OK)
        broken("a segment with an arena cannot be made");
}

static struct shmc_request must(struct blocks_world *blocks, uint32_t actor,
                                struct shmc_request request)
{
    enum shmc_status status;
    do
        status = perform_as(&blocks->world.stepped, blocks->world.actors[actor], &request);
    while (status == SHMC_MORE);
    if (status != SHMC_OK)
        broken("furnishing: operation %d gives %s", (int)request.operation,
               shmc_status_name(status));
    return request;
}

static struct shmc_lease must_allocate_block(struct blocks_world *blocks, uint32_t actor)
{
    struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = SMALL_BYTES};
    return must(blocks, actor, request).lease;
}

static struct shmc_lease must_publish(struct blocks_world *blocks, uint32_t actor, uint64_t key,
                                      uint64_t parent)
{
    struct shmc_request request = {.operation = SHMC_OP_PUBLISH,
                                   .lease = must_allocate_block(blocks, actor),
                                   .key = {key},
                                   .parent_kind = parent != 0 ? SHMC_PARENT_KEY : SHMC_PARENT_NONE,
                                   .parent_key = {parent}};
    return must(blocks, actor, request).lease;
}

static void give_back(struct blocks_world *blocks, uint32_t actor, struct shmc_lease lease)
{
    act_as(blocks->world.stepped.handle, blocks->world.actors[actor]);
    shmc_release(blocks->world.stepped.handle, &lease, 1);
}

/* The first slab is full of what cannot go, the second of what can. */
static void furnish(struct blocks_world *blocks)
{
    struct world *world = &blocks->world;
    for (uint32_t i = 0; i < NEWCOMER; i++) {
        world->stepped.handle->nonce = NONCE_FIRST + i;
        world->actors[i] = must_join(&world->stepped, NONCE_FIRST + i);
    }
    blocks->neighbours_block = must_publish(blocks, NEIGHBOUR, KEY_NEIGHBOUR, 0).block;
    blocks->friends_block = must_publish(blocks, FRIEND, KEY_FRIEND, 0).block;
    must(blocks, FRIEND,
         (struct shmc_request){.operation = SHMC_OP_INVALIDATE, .key = {KEY_FRIEND}});
    blocks->writing = must_allocate_block(blocks, VICTIM);
    must_allocate_block(blocks, DEAD);
    give_back(blocks, FRIEND, must_publish(blocks, FRIEND, KEY_PARENT, 0));
    blocks->leased = must_publish(blocks, VICTIM, KEY_CHILD, KEY_PARENT);
    struct shmc_request reserve = {.operation = SHMC_OP_RESERVE,
                                   .usage = {3, SMALL_BYTES, 1, 0}};
    blocks->reservation = must(blocks, VICTIM, reserve).token;
    struct shmc_request claim = {.operation = SHMC_OP_CLAIM, .key = {KEY_NEW}};
    blocks->claim = must(blocks, VICTIM, claim).token;
    claim.key[0] = KEY_IDLE;
    must(blocks, DEAD, claim);
    act_as(world->stepped.handle, world->actors[VICTIM]);
    uint64_t found;
    const uint64_t key[SHMC_KEY_WORDS] = {KEY_PARENT};
    struct shmc_lease lease;
    if (shmc_match(world->stepped.handle, key, 1, &lease, &found) != SHMC_OK || found != 1)
        broken("furnishing: a block is not found");
    shmc_release(world->stepped.handle, &lease, 1); /* leaves an entry in the ring */
}

static uint8_t *image_now(const struct blocks_world *blocks)
{
    uint8_t *image = must_allocate(NULL, blocks->world.image_bytes);
    return memcpy(image, blocks->world.stepped.handle->base, blocks->world.image_bytes);
}

static void make(struct blocks_world *blocks)
{
    const struct shmc_geometry geometry = {.limits = {1000, 64u << 20, 100, 500},
                                           .arena_bytes = ARENA_BYTES,
                                           .blocks_max = BLOCKS_MAX,
                                           .block_bytes_max = LARGE_BYTES,
                                           .owners_max = OWNERS_MAX,
                                           .managers_max = MANAGERS_MAX,
                                           .reservations_max = RESERVATIONS_MAX,
                                           .claims_max = 4,
                                           .eviction_policy = SHMC_POLICY_ADAPTIVE,
                                           .mode = 0600};
    struct world *world = &blocks->world;
    open_segment(&world->stepped, &geometry);
    open_segment(&world->observed, &geometry);
    world->image_bytes = world->stepped.handle->header.region_offset[SHMC_REGION_TELEMETRY];
    furnish(blocks);
    blocks->image[ROOMY] = image_now(blocks);
    give_back(blocks, FRIEND, must_publish(blocks, FRIEND, KEY_IDLE, 0));
    give_back(blocks, FRIEND, must_publish(blocks, FRIEND, KEY_IDLE_TOO, 0));
    give_back(blocks, VICTIM, blocks->leased);
    blocks->image[FULL] = image_now(blocks);
    shmc_pin_row(world->stepped.handle, world->actors[FRIEND].slot)[0] = 0;
    blocks->image[BURIED] = image_now(blocks);
}

/* ---- judging ----------------------------------------------------------------------------- */

static bool has_pin(const struct shmc_handle *handle, uint32_t slot, uint64_t block)
{
    return (shmc_pin_row(handle, slot)[block / 64] >> block % 64 & 1) != 0;
}

/* The living lease what they leased, and it is what it was. */
static void expect_living(const struct blocks_world *blocks, const char *name, enum scene scene)
{
    const struct shmc_handle *handle = blocks->world.observed.handle;
    const struct shmc_block *before = (const struct shmc_block *)(blocks->image[scene] +
                                          handle->header.region_offset[SHMC_REGION_BLOCKS]);
    const uint64_t held[] = {blocks->neighbours_block, blocks->friends_block};
    const uint32_t slots[] = {blocks->world.actors[NEIGHBOUR].slot,
                              blocks->world.actors[FRIEND].slot};
    for (uint32_t i = 0; i < (scene == BURIED ? 1 : 2); i++) {
        uint64_t state = handle->blocks[held[i]].state;
        if (!has_pin(handle, slots[i], held[i]))
            violation("%s: a living owner lost its lease", name);
        if (handle->blocks[held[i]].generation != before[held[i]].generation ||
            (state != SHMC_BLOCK_PUBLISHED && state != SHMC_BLOCK_DOOMED))
            violation("%s: a leased block is another one (state %llu)", name,
                      (unsigned long long)state);
    }
}

/* What is found under a key is the block that was put there. */
static void expect_contents(const struct blocks_world *blocks, const char *name, enum scene scene)
{
    const struct shmc_handle *handle = blocks->world.observed.handle;
    const struct shmc_block *before = (const struct shmc_block *)(blocks->image[scene] +
                                          handle->header.region_offset[SHMC_REGION_BLOCKS]);
    for (uint64_t key = 1; key < KEYS; key++) {
        const uint64_t words[SHMC_KEY_WORDS] = {key};
        uint64_t found;
        if (shmc_index_find(handle, words, &found) == NULL)
            continue;
        bool was = before[found].key[0] == key && before[found].state == SHMC_BLOCK_PUBLISHED &&
                   before[found].generation == handle->blocks[found].generation;
        bool is_new = key == KEY_NEW && found == blocks->writing.block &&
                      handle->blocks[found].generation == blocks->writing.generation;
        if (!was && !is_new)
            violation("%s: key %llu gives a block that was never its", name,
                      (unsigned long long)key);
    }
}

static void expect_gone(const struct blocks_world *blocks, const char *name, uint32_t actor)
{
    const struct segment *segment = &blocks->world.observed;
    struct actor dead = blocks->world.actors[actor];
    const struct shmc_owner *owner = &segment->handle->owners[dead.slot];
    enum shmc_status status = SHMC_OK;
    if (owner->state != SHMC_OWNER_FREE && owner->nonce == dead.nonce)
        status = reclaim(segment, dead);
    if (status != SHMC_OK || owner->state != SHMC_OWNER_FREE)
        violation("%s: reclaim gives %s", name, shmc_status_name(status));
    for (uint64_t block = 0; block < BLOCKS_MAX; block++)
        if (has_pin(segment->handle, dead.slot, block))
            violation("%s: a pin of the dead remains", name);
}

/* C21: every place that nobody living holds can be taken. */
static void expect_places(const struct blocks_world *blocks, const char *name, enum scene scene)
{
    const struct segment *segment = &blocks->world.observed;
    uint64_t expected = PLACES - (scene == BURIED ? 1 : 2);
    uint64_t taken = 0;
    for (uint64_t block = 0; block < BLOCKS_MAX; block++)
        expected -= segment->handle->blocks[block].state == SHMC_BLOCK_PUBLISHED &&
                    (segment->handle->blocks[block].flags & SHMC_BLOCK_PROTECTED) != 0;
    enum shmc_status status = SHMC_OK;
    while (status == SHMC_OK && taken <= PLACES) {
        struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = SMALL_BYTES};
        do
            status = perform_as(segment, blocks->world.actors[NEIGHBOUR], &request);
        while (status == SHMC_MORE);
        taken += status == SHMC_OK;
    }
    if (status != SHMC_ARENA_FULL || taken != expected)
        violation("%s: %llu of %llu places could be taken, then %s", name,
                  (unsigned long long)taken, (unsigned long long)expected,
                  shmc_status_name(status));
}

static void judge_blocks(struct blocks_world *blocks, const char *name, enum scene scene,
                         const uint8_t *snapshot)
{
    const struct segment *segment = &blocks->world.observed;
    segment_load(segment, snapshot, blocks->world.image_bytes);
    expect_clean(segment, name); /* the first call: it recovers */
    if (segment->handle->control->evicting != 0)
        violation("%s: a block is left half-way to its eviction", name);
    expect_living(blocks, name, scene);
    expect_contents(blocks, name, scene);
    expect_gone(blocks, name, VICTIM);
    expect_gone(blocks, name, DEAD);
    expect_clean(segment, name);
    expect_places(blocks, name, scene);
    expect_clean(segment, name);
}

/* ---- the sweep --------------------------------------------------------------------------- */

static struct job job_of(const struct blocks_world *blocks, const struct operation *operation)
{
    struct job job = {.segment_fd = blocks->world.stepped.fd,
                      .actor = blocks->world.actors[VICTIM],
                      .request = operation->request,
                      .with_blocks = true,
                      .kind = (int)operation->kind};
    job.request.key[0] = operation->key;
    if (operation->lease_writing)
        job.request.lease = blocks->writing;
    if (operation->lease_leased)
        job.request.lease = blocks->leased;
    if (operation->with_reservation)
        job.request.token = blocks->reservation;
    if (operation->with_claim)
        job.request.token = blocks->claim;
    job.request.owner_slot = blocks->world.actors[operation->reclaimed].slot;
    job.request.owner_nonce = blocks->world.actors[operation->reclaimed].nonce;
    return job;
}

/* The one who comes next is killed as well, at every instruction. */
static uint64_t kill_next(struct blocks_world *blocks, const struct operation *operation,
                          const uint8_t *snapshot, const char *role, struct shmc_request request)
{
    char name[64];
    snprintf(name, sizeof name, "%s, %s", operation->name, role);
    const struct job job = {.segment_fd = blocks->world.stepped.fd,
                            .actor = {.slot = SHMC_NO_SLOT},
                            .request = request};
    struct recording recording = record(&blocks->world, &job, snapshot, name);
    for (size_t i = 0; i < recording.count; i++)
        judge_blocks(blocks, name, operation->scene,
                     snapshot_at(&blocks->world, &recording, i));
    free(recording.snapshots);
    return recording.instructions;
}

static void sweep_one(struct blocks_world *blocks, const struct options *options,
                      const struct operation *operation)
{
    const struct actor victim = blocks->world.actors[VICTIM];
    const struct shmc_request recover = {.operation = SHMC_OP_REPORT};
    const struct shmc_request clean = {.operation = SHMC_OP_RECLAIM_BEGIN,
                                       .owner_slot = victim.slot,
                                       .owner_nonce = victim.nonce};
    struct job job = job_of(blocks, operation);
    struct recording recording =
        record(&blocks->world, &job, blocks->image[operation->scene], operation->name);
    uint64_t recoverer = 0, cleaner = 0;
    if (recording.status != operation->expected)
        violation("%s: gives %s", operation->name, shmc_status_name(recording.status));
    for (size_t i = 0; i < recording.count && violations() == 0; i++) {
        const uint8_t *snapshot = snapshot_at(&blocks->world, &recording, i);
        const struct shmc_control *control =
            image_region(&blocks->world, snapshot, SHMC_REGION_CONTROL);
        judge_blocks(blocks, operation->name, operation->scene, snapshot);
        if ((i + 1) % options->every != 0)
            continue;
        if (pending_commit(&blocks->world, snapshot) != 0 || control->evicting != 0)
            recoverer += kill_next(blocks, operation, snapshot, "recoverer", recover);
        if (options->all_cleaners || (i + 1) % (16 * options->every) == 0)
            cleaner += kill_next(blocks, operation, snapshot, "cleaner", clean);
    }
    printf("operation=%s kill_points=%llu snapshots=%zu recoverer_kill_points=%llu "
           "cleaner_kill_points=%llu violations=%u\n",
           operation->name, (unsigned long long)recording.instructions + 1, recording.count,
           (unsigned long long)recoverer, (unsigned long long)cleaner, violations());
    free(recording.snapshots);
}

void sweep_blocks(const struct options *options)
{
    struct blocks_world blocks;
    memset(&blocks, 0, sizeof blocks);
    make(&blocks);
    for (size_t i = 0; i < OPERATIONS; i++)
        if (options->only == NULL || strcmp(options->only, operations[i].name) == 0)
            sweep_one(&blocks, options, &operations[i]);
}
