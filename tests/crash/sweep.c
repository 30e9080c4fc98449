/* sweep.c: every operation, killed at every instruction.
 *
 * Why         Two ways of killing confirm each other. A recording steps through a job once, keeps
 *             the segment as it is after each instruction, and does to the lock in each copy what
 *             the kernel would do: every kill point is judged, in milliseconds. A real SIGKILL
 *             needs a fresh child for each point, but then the kernel itself does its part.
 * Contract    After each death: recovered by whoever comes first, the state is the one before or
 *             the one after a record; the dead's holdings can be reclaimed; nothing is lost. The
 *             same holds when the one who recovers, or the one who reclaims, is killed as well.
 */
#include "crash.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The operations under test. */
struct operation {
    const char *name;
    enum furniture furniture;
    uint32_t actor;
    enum {
        TOKEN_NONE,
        TOKEN_RESERVATION,
        TOKEN_STALE,
        TOKEN_MANAGER,
    } token;
    uint32_t reclaimed; /* of RECLAIM_BEGIN: whom */
    bool kill_cleaner;  /* also kill the one who cleans up after each death */
    bool kill_for_real; /* also by SIGKILL, at points of its own */
    enum shmc_status expected;
    uint32_t changes; /* records that commit */
    struct shmc_request request;
};

/* A reclaim commits: CLEANING, each manager without what is not files, "the files are gone", each
 * entry, FREE. */
#define HELD_BY_DEAD_OR_VICTIM 5u
#define THEIR_MANAGERS         2u
#define RECLAIM_CHANGES        (HELD_BY_DEAD_OR_VICTIM + THEIR_MANAGERS + 3u)

static char two_paths[] = "/somewhere/else\0/live";

static struct shmc_held held_rows[OWNERS_MAX];

/* clang-format off: a table */
static const struct operation operations[] = {
    {"join", FREE_LIST, NEWCOMER, .changes = 1, .request = {.operation = SHMC_OP_JOIN}},
    {"register_id", FREE_LIST, VICTIM, .changes = 1, .kill_cleaner = true, .kill_for_real = true,
     .request = {.operation = SHMC_OP_REGISTER, .id = ID_UNUSED}},
    {"register_any", MARK_PATH, VICTIM, .changes = 1,
     .request = {.operation = SHMC_OP_REGISTER, .allocate_id = true}},
    {"register_duplicate", FREE_LIST, VICTIM, .expected = SHMC_DUPLICATE_MANAGER,
     .request = {.operation = SHMC_OP_REGISTER, .id = ID_FRIEND}},
    {"update_grow", FREE_LIST, VICTIM, .changes = 1,
     .request = {.operation = SHMC_OP_UPDATE, .id = ID_VICTIM, .usage = {200, 100, 50, 25}}},
    {"update_shrink", FREE_LIST, VICTIM, .changes = 1,
     .request = {.operation = SHMC_OP_UPDATE, .id = ID_VICTIM, .usage = {1, 30, 0, 2}}},
    {"update_unknown", FREE_LIST, VICTIM, .expected = SHMC_UNKNOWN_MANAGER,
     .request = {.operation = SHMC_OP_UPDATE, .id = ID_UNUSED}},
    {"reserve_listed", FREE_LIST, VICTIM, .changes = 1, .kill_cleaner = true, .kill_for_real = true,
     .request = {.operation = SHMC_OP_RESERVE, .usage = {100, 50, 5, 1}}},
    {"reserve_unused", MARK_PATH, VICTIM, .changes = 1,
     .request = {.operation = SHMC_OP_RESERVE, .usage = {7, 0, 0, 0}}},
    {"reserve_budget", FREE_LIST, VICTIM, .expected = SHMC_BUDGET_EXCEEDED,
     .request = {.operation = SHMC_OP_RESERVE, .usage = {1, 1, 1000, 1}}},
    {"release_reservation", FREE_LIST, VICTIM, .token = TOKEN_RESERVATION, .changes = 1,
     .kill_for_real = true, .request = {.operation = SHMC_OP_RELEASE_RESERVATION}},
    {"release_stale", FREE_LIST, VICTIM, .token = TOKEN_STALE, .expected = SHMC_STALE,
     .request = {.operation = SHMC_OP_RELEASE_RESERVATION}},
    {"release_manager", FREE_LIST, VICTIM, .token = TOKEN_MANAGER, .changes = 1,
     .request = {.operation = SHMC_OP_RELEASE_MANAGER}},
    {"publish_and_release", FREE_LIST, VICTIM, .token = TOKEN_RESERVATION, .changes = 1,
     .kill_cleaner = true, .kill_for_real = true,
     .request = {.operation = SHMC_OP_PUBLISH_AND_RELEASE,
                 .id = ID_VICTIM,
                 .usage = {80, 90, 0, 20}}},
    {"detach", FREE_LIST, VICTIM, .reclaimed = VICTIM, .changes = RECLAIM_CHANGES,
     .kill_for_real = true, .request = {.operation = SHMC_OP_RECLAIM_BEGIN}},
    {"reclaim", MARK_PATH, VICTIM, .reclaimed = DEAD, .changes = RECLAIM_CHANGES,
     .request = {.operation = SHMC_OP_RECLAIM_BEGIN}},
    {"set_paths", FREE_LIST, VICTIM, .changes = 1, .kill_cleaner = true,
     .request = {.operation = SHMC_OP_SET_PATHS, .paths = two_paths,
                 .paths_bytes = sizeof two_paths}},
    {"set_no_paths", FREE_LIST, VICTIM, .changes = 1, .kill_cleaner = true,
     .request = {.operation = SHMC_OP_SET_PATHS}},
    {"set_relative_path", FREE_LIST, VICTIM, .expected = SHMC_TOO_LARGE,
     .request = {.operation = SHMC_OP_SET_PATHS, .paths = two_paths + 1,
                 .paths_bytes = sizeof two_paths - 1}},
    {"files_gone_alive", FREE_LIST, VICTIM, .reclaimed = FRIEND, .expected = SHMC_STALE,
     .request = {.operation = SHMC_OP_FILES_GONE}},
    {"report", FREE_LIST, VICTIM, .kill_for_real = true, .request = {.operation = SHMC_OP_REPORT}},
    {"held", FREE_LIST, VICTIM, .request = {.operation = SHMC_OP_HELD, .held_rows = held_rows}},
    {"check", FREE_LIST, VICTIM, .request = {.operation = SHMC_OP_CHECK}},
    {"retire", FREE_LIST, VICTIM, .changes = 1, .request = {.operation = SHMC_OP_RETIRE}},
};
/* clang-format on */
#define OPERATIONS (sizeof operations / sizeof *operations)

static bool is_chosen(const struct options *options, const struct operation *operation)
{
    return options->only == NULL || strcmp(options->only, operation->name) == 0;
}

static struct job job_of(const struct world *world, const struct operation *operation)
{
    const struct shmc_token tokens[] = {
        [TOKEN_RESERVATION] = world->victim_reservation,
        [TOKEN_STALE] = world->stale_reservation,
        [TOKEN_MANAGER] = world->victim_manager,
    };
    struct job job = {.segment_fd = world->stepped.fd,
                      .actor = world->actors[operation->actor],
                      .request = operation->request};
    if (operation->token != TOKEN_NONE)
        job.request.token = tokens[operation->token];
    job.request.owner_slot = world->actors[operation->reclaimed].slot;
    job.request.owner_nonce = world->actors[operation->reclaimed].nonce;
    job.request.attach_seq = shmc_attach_seq(world->stepped.handle);
    return job;
}

/* ---- the sweep --------------------------------------------------------------------------- */

struct tally {
    uint64_t instructions;
    uint64_t snapshots;
};

/* What one operation's sweep has done. */
struct result {
    struct tally victim, recoverer, cleaner;
};

/* One death of a victim. */
struct death {
    const char *name;
    const uint8_t *before;    /* image before its job */
    const uint8_t *snapshot;  /* as it left the segment */
    const uint8_t *recovered; /* the logical state that this means */
};

static bool is_sampled(const struct options *options, uint64_t point)
{
    return (point + 1) % options->every == 0;
}

static void expect_course(const char *name, const struct recording *recording,
                          enum shmc_status status, const struct states *states, uint64_t changes)
{
    if (recording->status != status)
        violation("%s: gives %s", name, shmc_status_name(recording->status));
    if (states->count != changes + 1)
        violation("%s: %zu changes are committed, %llu expected", name, states->count - 1,
                  (unsigned long long)changes);
}

/* The one who comes after a death is killed as well: does its job on this snapshot, dies at every
 * instruction of it, and every death is judged. */
static void kill_next(struct world *world, const struct death *death, const char *role,
                      struct shmc_request request, enum shmc_status status, uint64_t changes,
                      struct tally *tally)
{
    char name[64];
    snprintf(name, sizeof name, "%s, %s", death->name, role);
    const struct job job = {
        .segment_fd = world->stepped.fd, .actor = {.slot = SHMC_NO_SLOT}, .request = request};
    struct recording recording = record(world, &job, death->snapshot, name);
    struct states states = committed_states(world, death->recovered, &recording);
    const struct expectation expectation = {.name = name,
                                            .before = death->before,
                                            .states = states.images,
                                            .states_count = states.count};
    expect_course(name, &recording, status, &states, changes);
    for (size_t i = 0; i < recording.count; i++)
        judge(world, &expectation, snapshot_at(world, &recording, i), NULL);
    tally->instructions += recording.instructions;
    tally->snapshots += recording.count;
    free(states.images);
    free(recording.snapshots);
}

static void kill_recoverer(struct world *world, const struct death *death, struct tally *tally)
{
    const struct shmc_request request = {.operation = SHMC_OP_REPORT};
    kill_next(world, death, "recoverer", request, SHMC_OK, 0, tally);
}

/* How many managers of a slot are charged for files and for something else. */
static uint64_t managers_to_strip(const struct world *world, const uint8_t *image, uint32_t slot)
{
    const struct shmc_entry *entries = image_region(world, image, SHMC_REGION_MANAGERS);
    uint64_t count = 0;
    for (uint32_t i = 0; i < MANAGERS_MAX; i++) {
        const uint64_t *usage = entries[i].usage;
        count += entries[i].state == SHMC_ENTRY_LIVE_OF(slot) && usage[SHMC_DISK] != 0 &&
                 (usage[SHMC_DEVICE] | usage[SHMC_HOST] | usage[SHMC_TRANSFER]) != 0;
    }
    return count;
}

/* Takes back what the victim holds, if it is still there and the pool is not retired. */
static void kill_cleaner(struct world *world, const struct death *death, struct tally *tally)
{
    const struct actor victim = world->actors[VICTIM];
    const struct shmc_request request = {
        .operation = SHMC_OP_RECLAIM_BEGIN, .owner_slot = victim.slot, .owner_nonce = victim.nonce};
    const struct shmc_gate *gate = image_region(world, death->recovered, SHMC_REGION_GATE);
    const struct shmc_owner *owners = image_region(world, death->recovered, SHMC_REGION_OWNERS);
    const struct shmc_owner *owner = &owners[victim.slot];
    uint64_t changes = owner->held + (owner->state == SHMC_OWNER_ACTIVE) + 1;
    if (owner->path_bytes != 0)
        changes += 1 + managers_to_strip(world, death->recovered, victim.slot);
    if (gate->state == SHMC_POOL_RETIRED)
        kill_next(world, death, "cleaner", request, SHMC_RETIRED, 0, tally);
    else if (owner->state == SHMC_OWNER_FREE)
        kill_next(world, death, "cleaner", request, SHMC_STALE, 0, tally);
    else
        kill_next(world, death, "cleaner", request, SHMC_OK, changes, tally);
}

static struct result sweep_operation(struct world *world, const struct options *options,
                                     const struct operation *operation)
{
    const uint8_t *before = world->image[operation->furniture];
    struct job job = job_of(world, operation);
    struct recording recording = record(world, &job, before, operation->name);
    struct states states = committed_states(world, before, &recording);
    const struct expectation expectation = {.name = operation->name,
                                            .before = before,
                                            .states = states.images,
                                            .states_count = states.count};
    struct result result = {.victim = {recording.instructions, recording.count}};
    uint8_t *recovered = must_allocate(NULL, world->image_bytes);
    expect_course(operation->name, &recording, operation->expected, &states, operation->changes);
    for (size_t i = 0; i < recording.count; i++) {
        const struct death death = {operation->name, before, snapshot_at(world, &recording, i),
                                    recovered};
        judge(world, &expectation, death.snapshot, recovered);
        if (pending_commit(world, death.snapshot) != 0 && is_sampled(options, i))
            kill_recoverer(world, &death, &result.recoverer);
        if ((operation->kill_cleaner || options->all_cleaners) && is_sampled(options, i))
            kill_cleaner(world, &death, &result.cleaner);
    }
    free(recovered);
    free(states.images);
    free(recording.snapshots);
    return result;
}

void sweep(const struct options *options)
{
    struct world world;
    world_make(&world);
    for (size_t i = 0; i < OPERATIONS; i++) {
        if (!is_chosen(options, &operations[i]))
            continue;
        struct result result = sweep_operation(&world, options, &operations[i]);
        printf("operation=%s kill_points=%llu snapshots=%llu recoverer_kill_points=%llu "
               "recoverer_snapshots=%llu cleaner_kill_points=%llu cleaner_snapshots=%llu "
               "violations=%u\n",
               operations[i].name, (unsigned long long)result.victim.instructions + 1,
               (unsigned long long)result.victim.snapshots,
               (unsigned long long)result.recoverer.instructions,
               (unsigned long long)result.recoverer.snapshots,
               (unsigned long long)result.cleaner.instructions,
               (unsigned long long)result.cleaner.snapshots, violations());
    }
}

/* ---- real SIGKILLs ----------------------------------------------------------------------- */

/* The next request of another process: within the watchdog, whatever slices it takes. */
static void expect_next_request(const struct world *world, const char *name, uint64_t point)
{
    struct shmc_request request = {.operation = SHMC_OP_REPORT};
    uint64_t deadline = now_ns() + WATCHDOG_NS;
    act_as(world->stepped.handle, (struct actor){.slot = SHMC_NO_SLOT});
    enum shmc_status status;
    do
        status = shmc_perform(world->stepped.handle, &request, SLICE_NS);
    while (status == SHMC_BUSY && now_ns() < deadline);
    if (status != SHMC_OK)
        violation("%s: killed after %llu instructions: the next request gives %s", name,
                  (unsigned long long)point, shmc_status_name(status));
}

static void expect_done(const struct tracee *waiter, const char *name, uint64_t point)
{
    uint64_t deadline = now_ns() + WATCHDOG_NS;
    while (waiter->board->stage != STAGE_DONE && poll_until(deadline))
        ;
    if (waiter->board->stage != STAGE_DONE || waiter->board->status != SHMC_OK)
        violation("%s: killed after %llu instructions: a waiter hangs or fails (%s)", name,
                  (unsigned long long)point,
                  shmc_status_name((enum shmc_status)waiter->board->status));
}

/* Starts a process that asks for the lock; returns when it sleeps, or needs no longer. */
static void start_waiter(const struct world *world, struct tracee *waiter)
{
    const struct job job = {.segment_fd = world->stepped.fd,
                            .actor = {.slot = SHMC_NO_SLOT},
                            .request = {.operation = SHMC_OP_REPORT},
                            .slice_ns = SLICE_NS};
    uint64_t deadline = now_ns() + WATCHDOG_NS;
    tracee_start_free(waiter, &job);
    while (waiter->board->stage != STAGE_DONE && poll_until(deadline))
        if (waiter->board->stage == STAGE_RUNNING && tracee_sleeps(waiter))
            break;
}

static void kill_at(struct world *world, const struct options *options, const struct job *job,
                    const struct expectation *expectation, uint64_t point)
{
    struct tracee victim, waiter;
    segment_load(&world->stepped, expectation->before, world->image_bytes);
    tracee_start_stepped(&victim, job);
    if (!tracee_step_to(&victim, point))
        broken("%s took fewer instructions than before", expectation->name);
    if (options->waiter)
        start_waiter(world, &waiter);
    tracee_signal(&victim, SIGKILL); /* not yet reaped: its parent may be slow */
    expect_next_request(world, expectation->name, point);
    if (options->waiter) {
        expect_done(&waiter, expectation->name, point);
        tracee_kill(&waiter);
    }
    tracee_kill(&victim);
    if (violations() == 0)
        judge(world, expectation, world->stepped.handle->base, NULL);
}

void kill_for_real(const struct options *options)
{
    struct world world;
    world_make(&world);
    for (size_t i = 0; i < OPERATIONS; i++) {
        const struct operation *operation = &operations[i];
        if (!operation->kill_for_real || !is_chosen(options, operation))
            continue;
        const uint8_t *before = world.image[operation->furniture];
        struct job job = job_of(&world, operation);
        struct recording recording = record(&world, &job, before, operation->name);
        struct states states = committed_states(&world, before, &recording);
        const struct expectation expectation = {.name = operation->name,
                                                .before = before,
                                                .states = states.images,
                                                .states_count = states.count};
        uint64_t points = recording.instructions + 1;
        uint64_t stride = (points - 1) / options->kills + 1;
        uint64_t kills = 0;
        /* A hang costs a watchdog's time: one is enough. */
        for (; kills * stride < points && violations() == 0; kills++)
            kill_at(&world, options, &job, &expectation, kills * stride);
        printf("operation=%s kill_points=%llu kills=%llu waiter=%d violations=%u\n",
               operation->name, (unsigned long long)points, (unsigned long long)kills,
               options->waiter, violations());
        free(states.images);
        free(recording.snapshots);
    }
}
