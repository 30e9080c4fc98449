/* orders.c: rare orders of several processes, forced.
 *
 * Why         Each scene is an order that chance shows once in a million runs and that one design
 *             decision makes harmless: the nonce, the fence of cleaning, slices instead of a plain
 *             wait. Without the decision the scene fails; the mutants of the engine prove it.
 * Contract    A process is held at an instruction or at a system call by ptrace while the others
 *             run; nothing depends on time but the watchdogs.
 */
#include "crash.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

static const struct actor nobody = {.slot = SHMC_NO_SLOT};

static bool await_done(const struct tracee *tracee)
{
    uint64_t deadline = now_ns() + WATCHDOG_NS;
    while (tracee->board->stage != STAGE_DONE && poll_until(deadline))
        ;
    return tracee->board->stage == STAGE_DONE;
}

static const char *status_of(const struct tracee *tracee)
{
    return shmc_status_name((enum shmc_status)tracee->board->status);
}

/* ---- fence: a cleaner that was stopped, and comes back ----------------------------------- */

#define FENCE_RESERVATIONS_MAX 512u
#define FENCE_HELD             200u /* more than one chunk of reclaim releases */
#define FENCE_POINTS_MIN       20u
#define NEW_NONCE              0x7000u

struct fence_scene {
    struct segment segment;
    size_t image_bytes;
    uint8_t *image; /* the owner in the slot is dead and holds FENCE_HELD reservations */
    struct actor dead;
};

static void take_many(const struct segment *segment, struct actor actor)
{
    struct shmc_request request = {.operation = SHMC_OP_RESERVE, .usage = {1, 1, 0, 0}};
    for (uint32_t i = 0; i < FENCE_HELD; i++)
        if (perform_as(segment, actor, &request) != SHMC_OK)
            broken("cannot reserve");
}

static struct shmc_request reclaim_of(struct actor actor)
{
    return (struct shmc_request){
        .operation = SHMC_OP_RECLAIM_BEGIN, .owner_slot = actor.slot, .owner_nonce = actor.nonce};
}

/* Others finish what the old cleaner began, and a new owner takes the slot and fills it. */
static struct actor reuse_slot(const struct fence_scene *scene, bool leaving)
{
    if (reclaim(&scene->segment, scene->dead) != SHMC_OK)
        broken("nobody else can finish the cleaning");
    struct actor newcomer = must_join(&scene->segment, NEW_NONCE);
    if (newcomer.slot != scene->dead.slot)
        broken("the slot was not reused");
    take_many(&scene->segment, newcomer);
    struct shmc_request leave = reclaim_of(newcomer);
    if (leaving && perform_as(&scene->segment, newcomer, &leave) != SHMC_OK)
        broken("the new owner cannot leave");
    return newcomer;
}

/* The old cleaner stands still at this instruction meanwhile. False when it holds the lock there,
 * which keeps the others out. */
static bool fence_at(const struct fence_scene *scene, uint32_t head_start, bool leaving,
                     uint64_t point)
{
    const struct shmc_handle *handle = scene->segment.handle;
    size_t first = handle->header.region_offset[SHMC_REGION_CONTROL];
    struct job job = {.segment_fd = scene->segment.fd,
                      .actor = nobody,
                      .request = reclaim_of(scene->dead),
                      .head_start = head_start};
    struct tracee cleaner;
    segment_load(&scene->segment, scene->image, scene->image_bytes);
    tracee_start_stepped(&cleaner, &job);
    if (head_start == 2 && cleaner.board->status != SHMC_MORE)
        broken("one step was enough");
    bool outside =
        tracee_step_to(&cleaner, point) && !lock_is_held_by(&scene->segment, cleaner.pid);
    if (!outside) {
        tracee_kill(&cleaner);
        return false;
    }
    struct actor newcomer = reuse_slot(scene, leaving);
    uint8_t *before = must_allocate(NULL, scene->image_bytes);
    memcpy(before, handle->base, scene->image_bytes);
    tracee_run(&cleaner);
    if (!await_done(&cleaner) || cleaner.board->status != SHMC_STALE)
        violation("fence: the old cleaner gets %s, not STALE", status_of(&cleaner));
    if (memcmp(before + first, handle->base + first, scene->image_bytes - first) != 0)
        violation("fence: the old cleaner changed what the new owner holds (head start %u, "
                  "instruction %llu)",
                  head_start, (unsigned long long)point);
    free(before);
    tracee_kill(&cleaner);
    struct shmc_request reserve = {.operation = SHMC_OP_RESERVE};
    enum shmc_status status = perform_as(&scene->segment, newcomer, &reserve);
    if (status != (leaving ? SHMC_LOST_SLOT : SHMC_OK))
        violation("fence: the new owner then gets %s", shmc_status_name(status));
    expect_clean(&scene->segment, "fence");
    return true;
}

void fence(const struct options *options)
{
    struct fence_scene scene;
    segment_make(&scene.segment, FENCE_RESERVATIONS_MAX);
    scene.image_bytes = scene.segment.handle->header.region_offset[SHMC_REGION_PINS];
    take_many(&scene.segment, must_join(&scene.segment, 1));
    scene.dead = must_join(&scene.segment, 2);
    take_many(&scene.segment, scene.dead);
    scene.image = must_allocate(NULL, scene.image_bytes);
    memcpy(scene.image, scene.segment.handle->base, scene.image_bytes);
    /* Stopped before its begin, between begin and first step, and between two steps. */
    for (uint32_t head_start = 0; head_start < 3; head_start++) {
        for (uint32_t leaving = 0; leaving < 2; leaving++) {
            uint64_t points = 0;
            while (fence_at(&scene, head_start, leaving, points * options->every))
                points++;
            if (points * options->every < FENCE_POINTS_MIN)
                broken("the cleaner took the lock after %llu points", (unsigned long long)points);
            printf("scene=fence head_start=%u leaving=%u points=%llu violations=%u\n", head_start,
                   leaving, (unsigned long long)points, violations());
        }
    }
    free(scene.image);
}

/* ---- stopped: the holder of the lock stands still ---------------------------------------- */

#define BUSY_SLICES 3u

static bool await_busy(const struct tracee *waiter)
{
    uint64_t deadline = now_ns() + WATCHDOG_NS;
    while (waiter->board->busy < BUSY_SLICES && poll_until(deadline))
        ;
    return waiter->board->busy >= BUSY_SLICES;
}

/* C56: nobody enters while a live holder is slow, and what it does stands. C47: those who wait for
 * it serve their signals. */
void stopped_holder(const struct options *options)
{
    (void)options;
    struct world world;
    world_make(&world);
    const struct job reserve = {.segment_fd = world.stepped.fd,
                                .actor = world.actors[VICTIM],
                                .request = {.operation = SHMC_OP_RESERVE, .usage = {1, 1, 1, 1}}};
    const struct job report = {.segment_fd = world.stepped.fd,
                               .actor = nobody,
                               .request = {.operation = SHMC_OP_REPORT},
                               .slice_ns = SLICE_NS};
    struct tracee holder, patient, signalled;
    tracee_start_stepped(&holder, &reserve);
    while (pending_commit(&world, world.stepped.handle->base) == 0)
        if (!tracee_step_to(&holder, 1))
            broken("the holder never commits");
    tracee_start_free(&patient, &report);
    tracee_start_free(&signalled, &report);
    if (!await_busy(&patient) || !await_busy(&signalled))
        violation("stopped: a waiter does not come back after its slice");
    if (shmc_lock_holder(world.stepped.handle) != holder.pid)
        violation("stopped: the holder cannot be named");
    tracee_signal(&signalled, SIGTERM);
    if (!await_done(&signalled) || signalled.board->status != SHMC_BUSY)
        violation("stopped: a waiter does not serve its signal");
    uint32_t slices = patient.board->busy;
    tracee_run(&holder);
    if (!await_done(&holder) || holder.board->status != SHMC_OK)
        violation("stopped: the holder's request gives %s", status_of(&holder));
    if (!await_done(&patient) || patient.board->status != SHMC_OK)
        violation("stopped: the waiter's request gives %s", status_of(&patient));
    tracee_kill(&holder);
    tracee_kill(&patient);
    tracee_kill(&signalled);
    expect_clean(&world.stepped, "stopped");
    printf("scene=stopped slices=%u violations=%u\n", slices, violations());
}

/* ---- stranded: the waiter that was woken dies, and nobody wakes the next ----------------- */

#define FIRST_SLICE_NS  (10ull * WATCHDOG_NS)
#define SECOND_SLICE_NS (WATCHDOG_NS / 4)
#define ATTEMPTS_MAX    5u

static struct job reserve_by(const struct world *world, uint32_t actor, uint64_t slice_ns)
{
    return (struct job){.segment_fd = world->stepped.fd,
                        .actor = world->actors[actor],
                        .request = {.operation = SHMC_OP_RESERVE, .usage = {1, 0, 0, 0}},
                        .slice_ns = slice_ns};
}

static void await_sleep(const struct tracee *tracee)
{
    uint64_t deadline = now_ns() + WATCHDOG_NS;
    while (tracee->board->stage != STAGE_RUNNING || !tracee_sleeps(tracee))
        if (!poll_until(deadline))
            broken("a waiter does not sleep");
}

/* Holds, lets two processes sleep, releases, and stops the woken one before it takes the lock; then
 * takes the lock again, past the sleeper, and kills the woken one. False when the second waiter
 * was awake just then: it needs no waking, and nothing was shown. */
static bool strand(struct world *world, struct tracee *first, struct tracee *second)
{
    struct shmc_handle *barger = world->stepped.handle;
    const struct job first_job = reserve_by(world, VICTIM, FIRST_SLICE_NS);
    const struct job second_job = reserve_by(world, FRIEND, SECOND_SLICE_NS);
    uint64_t deadline = now_ns() + WATCHDOG_NS;
    if (shmc_lock(barger, 0) != SHMC_OK)
        broken("the lock is not free");
    tracee_start_stepped(first, &first_job);
    if (!tracee_run_to_call(first, SYS_futex))
        broken("the first waiter does not wait");
    tracee_begin_call_exit(first);
    await_sleep(first);
    tracee_start_free(second, &second_job);
    await_sleep(second);
    shmc_unlock(barger);
    while (!tracee_stopped(first))
        if (!poll_until(deadline))
            return false;
    if (shmc_lock(barger, 0) != SHMC_OK)
        return false;
    tracee_kill(first);
    shmc_unlock(barger);
    return true;
}

/* C50. */
void stranded_sleeper(const struct options *options)
{
    (void)options;
    struct world world;
    uint32_t attempts = 0;
    bool forced = false;
    world_make(&world);
    while (!forced && attempts++ < ATTEMPTS_MAX) {
        struct tracee first = {0}, second = {0};
        segment_load(&world.stepped, world.image[FREE_LIST], world.image_bytes);
        forced = strand(&world, &first, &second);
        if (forced && (!await_done(&second) || second.board->status != SHMC_OK))
            violation("stranded: the lock is free and a waiter sleeps on (%s)", status_of(&second));
        if (forced)
            printf("scene=stranded attempts=%u slices=%u violations=%u\n", attempts,
                   second.board->busy, violations());
        tracee_kill(&first);
        tracee_kill(&second);
    }
    if (!forced)
        broken("the order could not be forced");
    expect_clean(&world.stepped, "stranded");
}

/* ---- pending: the word that libc left with the kernel ------------------------------------ */

#define WINDOWS_MAX 128u

/* C49: at a death the kernel may write to the word that is being locked or unlocked. So at each
 * instruction, through close and reopen, that word must be the segment's lock and still mapped. */
static void expect_the_lock(const struct world *world, const struct tracee *tracee, uint64_t word)
{
    pthread_mutex_t seen;
    uint64_t inside = offsetof(pthread_mutex_t, __data.__lock);
    if (!tracee_reads(tracee, word - inside, &seen, sizeof seen))
        violation("pending: the kernel's word is not mapped any more");
    else if (memcmp(&seen, &world->stepped.handle->gate->mutex, sizeof seen) != 0)
        violation("pending: the kernel's word is not the lock");
}

/* A death at this instruction, after the lock was given back: the kernel must leave every byte. */
static void die_in_window(const struct world *world, const struct job *job, uint64_t point)
{
    const uint8_t *base = world->stepped.handle->base;
    uint8_t *before = must_allocate(NULL, world->image_bytes);
    struct tracee tracee;
    segment_load(&world->stepped, world->image[FREE_LIST], world->image_bytes);
    tracee_start_stepped(&tracee, job);
    tracee_step_to(&tracee, point);
    memcpy(before, base, world->image_bytes);
    tracee_kill(&tracee);
    if (memcmp(before, base, world->image_bytes) != 0)
        violation("pending: a death after instruction %llu changed the segment",
                  (unsigned long long)point);
    free(before);
}

void pending_word(const struct options *options)
{
    (void)options;
    struct world world;
    struct tracee tracee;
    uint64_t instructions = 0, pending = 0, windows = 0;
    uint64_t points[WINDOWS_MAX];
    world_make(&world);
    struct job job = reserve_by(&world, VICTIM, 0);
    segment_load(&world.stepped, world.image[FREE_LIST], world.image_bytes);
    job.reopens = true;
    tracee_start_stepped(&tracee, &job);
    while (tracee.board->stage != STAGE_DONE && tracee_step_to(&tracee, 1)) {
        struct robust_view view = tracee_robust_view(&tracee);
        instructions++;
        if (view.listed)
            expect_the_lock(&world, &tracee, tracee.board->mutex);
        if (view.pending == 0)
            continue;
        pending++;
        expect_the_lock(&world, &tracee, view.pending);
        if (!lock_is_held_by(&world.stepped, tracee.pid) && windows < WINDOWS_MAX)
            points[windows++] = instructions;
    }
    tracee_kill(&tracee);
    if (windows == 0)
        broken("the window was not seen");
    for (uint64_t i = 0; i < windows / 2; i++) /* of two equal requests the first is nearer */
        die_in_window(&world, &job, points[i]);
    printf("scene=pending instructions=%llu pending=%llu windows=%llu violations=%u\n",
           (unsigned long long)instructions, (unsigned long long)pending,
           (unsigned long long)windows, violations());
}

/* ---- damage: a validation that fails under the lock -------------------------------------- */

/* C43: every request gets an answer, and it is POISONED; but for those that examine such a pool, or
 * end it. */
static void expect_poisoned(const struct segment *segment, struct actor actor, const char *name)
{
    struct shmc_held rows[OWNERS_MAX];
    for (int operation = SHMC_OP_JOIN; operation < SHMC_OPERATIONS; operation++) {
        struct shmc_request request = {.operation = (enum shmc_operation)operation,
                                       .held_rows = rows};
        if (operation == SHMC_OP_CHECK || operation == SHMC_OP_RETIRE || operation == SHMC_OP_COPY)
            continue;
        enum shmc_status status = perform_as(segment, actor, &request);
        if (status != SHMC_POISONED)
            violation("%s: operation %d gives %s", name, operation, shmc_status_name(status));
    }
}

static void expect_found_and_retired(const struct segment *segment, const char *name)
{
    struct shmc_request request = {.operation = SHMC_OP_CHECK,
                                   .attach_seq = shmc_attach_seq(segment->handle)};
    enum shmc_status status = perform_as(segment, nobody, &request);
    if (status != SHMC_OK || request.problems_count == 0)
        violation("%s: check gives %s and finds %u problems", name, shmc_status_name(status),
                  request.problems_count);
    request.operation = SHMC_OP_RETIRE;
    status = perform_as(segment, nobody, &request);
    request.operation = SHMC_OP_REPORT;
    if (status != SHMC_OK || perform_as(segment, nobody, &request) != SHMC_RETIRED)
        violation("%s: the poisoned pool cannot be retired", name);
}

/* The one who finds the damage is killed at each instruction; the next finds it again. */
static void damage_scene(struct world *world, const char *name, const uint8_t *image)
{
    const struct job job = reserve_by(world, VICTIM, 0);
    struct recording recording = record(world, &job, image, name);
    if (recording.status != SHMC_POISONED)
        violation("%s: gives %s", name, shmc_status_name(recording.status));
    for (size_t i = 0; i < recording.count; i++) {
        struct shmc_request request = job.request;
        segment_load(&world->observed, snapshot_at(world, &recording, i), world->image_bytes);
        enum shmc_status status = perform_as(&world->observed, world->actors[FRIEND], &request);
        if (status != SHMC_POISONED)
            violation("%s: the next reserve gives %s", name, shmc_status_name(status));
        expect_poisoned(&world->observed, world->actors[FRIEND], name);
        expect_found_and_retired(&world->observed, name);
    }
    printf("scene=%s kill_points=%llu snapshots=%zu violations=%u\n", name,
           (unsigned long long)recording.instructions + 1, recording.count, violations());
    free(recording.snapshots);
}

void damage(const struct options *options)
{
    (void)options;
    struct world world;
    world_make(&world);
    struct shmc_handle *handle = world.stepped.handle;
    uint8_t *image = must_allocate(NULL, world.image_bytes);

    segment_load(&world.stepped, world.image[FREE_LIST], world.image_bytes);
    handle->control->reservation_free = world.victim_reservation.index; /* a LIVE entry */
    memcpy(image, handle->base, world.image_bytes);
    damage_scene(&world, "damaged_list", image);

    segment_load(&world.stepped, world.image[FREE_LIST], world.image_bytes);
    handle->control->current[SHMC_DEVICE] = 0; /* less than its parts */
    handle->redo->commit = 1;                  /* one word, with a wrong checksum */
    memcpy(image, handle->base, world.image_bytes);
    damage_scene(&world, "damaged_record", image);
    free(image);
}
